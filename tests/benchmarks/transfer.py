"""Does the best rate stay where it is when the model gets wider? Both rate rules, widths 256, 512 and 1,024.

    python tests/benchmarks/transfer.py --data data/tokens.bin --out transferred

Eight layers, heads of 64; only the width changes. Rates lie on a doubling grid; at each width the grid is walked until
the best rate has worse ones on both sides. Under `spectral` the rate is that of a square matrix, under `printed` it is
eta_base. Prints validation nats by width and rate, and how many grid steps the best one moved; draws transfer.png.
"""

import math
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import learning  # noqa: E402

WIDTHS = (256, 512, 1024)
# a square matrix's step of 0.06 at width 512, under both rules
RULES = {"spectral": ("spectral_lr", 0.06), "printed": ("matrix_lr_base", 0.12)}


def shape(width: int) -> dict[str, object]:
    """Return the settings of a model of this width."""
    heads = width // 64
    return dict(hidden_dim=width, hypersphere_radius=round(math.sqrt(width), 3), ffn_dim=3 * width, head_dim=64,
                num_query_heads=heads, num_kv_heads=heads // 4, recurrent_heads=heads)  # fmt: skip


def draw(losses: dict[str, dict[int, dict[float, float]]], path: Path) -> None:
    """Plot loss against rate, one curve a width, one panel a rule."""
    figure, axes = learning.axes(1, len(losses), (11, 4.2))
    for axis, (rule, by_width) in zip(axes[0], losses.items(), strict=True):
        for width, by_rate in by_width.items():
            axis.plot(*zip(*sorted(by_rate.items()), strict=True), "o-", label=f"width {width:,}")
        axis.set(xscale="log", xlabel=RULES[rule][0], ylabel="validation loss, nats a token", title=rule)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = learning.parser(__doc__, tokens=3_276_800)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    arguments = parser.parse_args()
    learning.CURVE_POINTS = 1
    corpus, out = learning.begin(arguments)
    results = learning.Results(out / "transfer.jsonl", corpus)
    losses: dict[str, dict[int, dict[float, float]]] = {}
    moved: dict[str, int] = {}
    for rule, (field, unit) in RULES.items():
        start, best = 0, []
        for width in arguments.widths:
            config = learning.product_config("small", corpus, tokens=arguments.tokens, context=arguments.context,
                                             seed=arguments.seed, lr_rule=rule, **shape(width))  # fmt: skip
            found = losses.setdefault(rule, {}).setdefault(width, {})

            def value(point: dict[str, int], config=config, found=found, rule=rule, width=width) -> float:
                field, unit = RULES[rule]
                rate = unit * 2.0 ** point["rate"]
                name, point = f"{rule}, width {width}", {field: rate}
                try:
                    tuned = config.with_values(point)
                    train = partial(learning.train_product, tuned, corpus, name=name, point=point)
                    run = results.once(name, tuned, train, point)
                except ValueError as error:  # a rate at which the orthogonality penalty would diverge is refused
                    print(f"{rule}, width {width}, {field}={rate:.3g}: {error}")
                    return math.inf
                found[rate] = run.nats
                return run.nats

            tried = learning.search({"rate": start}, value)
            start = min(tried, key=tried.__getitem__)[0]  # the next width begins where this one ended
            best.append(start)
        moved[rule] = max(best) - min(best)
    draw(losses, out / "transfer.png")
    for rule, by_width in losses.items():
        field = RULES[rule][0]
        rates = sorted({rate for found in by_width.values() for rate in found})
        print(f"\n{rule:10s} {field} " + " ".join(f"{rate:8.4g}" for rate in rates))
        for width, found in by_width.items():
            row = " ".join(f"{found[rate]:8.4f}" if rate in found else " " * 8 for rate in rates)
            print(f"width {width:6,d}{' ' * len(field)} {row}  best {min(found, key=found.__getitem__):.4g}")
        print(f"{rule}: the best rate moves {moved[rule]} grid steps over these widths")


if __name__ == "__main__":
    main()
