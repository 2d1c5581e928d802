"""Loss per token and per second against the recipes that a user would pick instead, each at its own best rates.

    python tests/benchmarks/learn.py --data data/tokens.bin --out learned
    python tests/benchmarks/learn.py --data data/tokens.bin --out learned --preset medium --seeds 0

    hybrid    the product as its preset has it, its own optimizer and schedule
    printed   the same without what the printed text has not: the convolution
    adamw     dense decoder, decoupled weight decay Adam (beta2 0.95), linear warm-up and one cosine
    muon      the same decoder, torch.optim.Muon for the matrices of its layers, the same Adam for the rest
    delta     gated delta networks, three layers to one of windowed attention, with the product's optimizer and schedule

All have the same matrix parameters (2 %; not counted is the product's draft head, 7.5 % more at `small`, which no
validation loss reads), batches in the same order, and a whole schedule for their number of tokens. The rates, the
momentum, and the warm-up or the share of the tokens over which the rate decays are tuned with the first seed: from a
start, neighbours on a doubling grid are tried until the best point has worse ones on both sides of each, or is a
ladder's end. Then every seed runs at the best point, and the product at parts of the tokens too: where its loss at the
end of a part meets a recipe's loss at the end of all tokens is the share that it needs. Prints the grids, a table and
the shares; writes learn-PRESET.png and learn-PRESET.jsonl.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import baselines  # noqa: E402
import learning  # noqa: E402
from learning import Corpus, Run  # noqa: E402

from dataset_pipeline import Batch  # noqa: E402
from hybrid_model import RecordedWork  # noqa: E402
from model_config import Config  # noqa: E402
from scheduler import WarmupStableDecayScheduler  # noqa: E402

# axes that are no doubling grid, by index
LADDERS = {"warm-up": (0.02, 0.05, 0.1, 0.2, 0.4, 0.6), "momentum": (0.975, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.4),
           "decay": (0.28, 0.45, 0.6, 0.75, 0.9)}  # fmt: skip
SHARES = (1 / 3, 0.5, 0.8, 0.9)  # of the tokens, for the product


@dataclass(frozen=True)
class Recipe:
    """A way to train: where its search begins. Grid point i of a rate is unit * 2^i, of the others LADDERS[axis][i]."""

    start: dict[str, int]
    units: dict[str, float]

    def point(self, indices: dict[str, int]) -> dict[str, float]:
        return {k: LADDERS[k][i] if k in LADDERS else self.units[k] * 2.0**i for k, i in indices.items()}


# starts: the best points so far of `small` at 6.6 M tokens (one H200, 2026-12-01; searches not at their end)
PRODUCT = {"matrix": 0.12, "embedding": 0.12, "vector": 0.032}
RECIPES = {
    "hybrid": Recipe({"decay": 2, "momentum": 5, "vector": 0, "matrix": 0, "embedding": 0}, PRODUCT),
    "printed": Recipe({"decay": 2, "momentum": 5, "vector": 0, "matrix": 0, "embedding": 0}, PRODUCT),
    "adamw": Recipe(
        {"embedding": 0, "matrix": 0, "vector": 0, "warm-up": 4},
        {"matrix": 5e-4, "embedding": 0.032, "vector": 0.032},
    ),
    "muon": Recipe(
        {"embedding": 0, "matrix": 0, "vector": 0, "momentum": 4, "warm-up": 2},
        {"matrix": 5e-3, "embedding": 0.016, "vector": 0.016},
    ),
    "delta": Recipe(
        {"decay": 2, "momentum": 4, "vector": 0, "matrix": 0, "embedding": 0},
        {"matrix": 0.06, "embedding": 0.032, "vector": 0.032},
    ),
}
OWN = ("hybrid", "printed")  # trained by the product's engine


def cosine(step: int, steps: int, warmup_share: float) -> float:
    """Return the factor on a rate: linear warm-up over that share, then one cosine to 0.01 at the last step."""
    warmup = max(1, round(warmup_share * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


_compiled: dict[tuple, baselines.Decoder] = {}


def _fresh_model(shape: str, config: Config, device: torch.device) -> baselines.Decoder:
    """Return a model at its start for the seed; one of a shape is compiled once and drawn anew for each run."""
    torch.manual_seed(config.train.seed)
    drawn = baselines.build(shape, config.model, config.curriculum.context).to(device)
    key = (shape, config.model, config.curriculum.context)
    if key not in _compiled:
        _compiled.clear()
        _compiled[key] = drawn
        if device.type == "cuda":
            drawn.compile_parts()
        return drawn
    model = _compiled[key]
    model.load_state_dict(drawn.state_dict())
    for parameter in model.parameters():
        parameter.grad = None
    return model


def train_baseline(kind: str, point: dict[str, float], config: Config, corpus: Corpus, bits_per_nat: float) -> Run:
    """Train one baseline on the batches that a product run of this configuration reads."""
    run = _train_baseline(kind, point, config, corpus, bits_per_nat)
    learning.release()
    return run


def _train_baseline(kind: str, point: dict[str, float], config: Config, corpus: Corpus, bits_per_nat: float) -> Run:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = learning.loader_for(config, corpus)
    model = _fresh_model("delta" if kind == "delta" else "dense", config, device)
    if kind == "delta":
        config = _decaying(config, point)
        optimizer = baselines.dual(model, point, replace(config.optimizer, momentum=point["momentum"]))
    else:
        optimizer = {"adamw": baselines.adamw, "muon": baselines.muon}[kind](model, point)
    scheduler = WarmupStableDecayScheduler(config.schedule)
    recorded = RecordedWork(device.type == "cuda")
    denominator = torch.zeros((), device=device)
    places: dict[tuple[int, ...], Batch] = {}

    def gradients(batch: Batch) -> None:
        rows = model.loss_rows(batch.inputs, batch.doc_start, batch.targets)
        ((rows * batch.loss_weights.flatten()).sum() / denominator).backward()

    state = {"step": 0}

    def step() -> None:
        plan, index = loader.step_batches(state["step"]), state["step"]
        denominator.fill_(plan.supervised)
        for batch in plan:
            place = places.get(batch.inputs.shape)
            if place is None:
                place = places[batch.inputs.shape] = batch.to(device)
            place.copy_(batch.pin_memory() if device.type == "cuda" else batch)
            recorded(("gradients", *batch.inputs.shape), lambda place=place: gradients(place))
        if kind == "delta":
            factor = scheduler.multiplier(loader.tokens_before(index), plan.tokens)
        else:
            factor = cosine(index, loader.total_steps, point["warm-up"])
        optimizer.step(factor, index / loader.total_steps, run=recorded)
        state["step"] += 1

    clock, curve = learning.Clock(), []
    for stop in learning.points(loader.total_steps):
        clock.run(step, stop - state["step"])
        # other shapes: compiling for them would take longer than running them
        with torch.compiler.set_stance("force_eager"):
            nats = learning.measure_rows(model.loss_rows, corpus, config, device)
        curve.append((loader.tokens_before(stop), clock.total, nats))
    return Run(name=kind, point=point, seed=config.train.seed, tokens=loader.total_tokens,
               parameters=learning.count_parameters(model), nats=nats, bits=nats * bits_per_nat,
               seconds=clock.total, curve=curve)  # fmt: skip


def train_hybrid(name: str, point: dict[str, float], config: Config, corpus: Corpus) -> Run:
    """Train the product at a grid point; matrix is the spectral norm of a square matrix's step."""
    fields = {"matrix": "spectral_lr", "embedding": "embedding_lr", "vector": "vector_lr", "momentum": "momentum"}
    values = {fields[name]: value for name, value in point.items() if name in fields}
    return learning.train_product(_decaying(config.with_values(values), point), corpus, name=name, point=point)


def _decaying(config: Config, point: dict[str, float]) -> Config:
    """The product's schedule with the point's share of decay, at the cost of what is constant."""
    return config.with_values({
        "decay_fraction": point["decay"],
        "stable_fraction": 1 - config.schedule.warmup_fraction - point["decay"],
    })  # fmt: skip


def share_needed(parts: list[tuple[int, float]], nats: float, tokens: int) -> float:
    """Interpolate the part of `tokens` at whose end the product reaches `nats`: linear between measured runs.

    parts: (tokens, nats) of product runs with a schedule of their own. Below the smallest run: that run's share.
    """
    parts = sorted(parts)
    if parts[0][1] <= nats:
        return parts[0][0] / tokens
    for (t0, n0), (t1, n1) in pairwise(parts):
        if n1 <= nats:
            return (t0 + (t1 - t0) * (n0 - nats) / (n0 - n1)) / tokens
    return math.inf


def draw(best: dict[str, list[Run]], parts: list[Run], path: Path) -> None:
    """Plot validation loss against tokens and against seconds, every seed; dots are ends of whole schedules."""
    colors = {"hybrid": "tab:blue", "printed": "tab:cyan", "adamw": "tab:gray", "muon": "black", "delta": "tab:orange"}
    figure, axes = learning.axes(1, 2, (12, 4.5))
    for axis, column, label in ((axes[0][0], 0, "million tokens"), (axes[0][1], 1, "seconds of training")):
        for kind, runs in best.items():
            for i, run in enumerate(runs):
                xs = [point[column] / (1e6 if column == 0 else 1) for point in run.curve]
                axis.plot(xs, [point[2] for point in run.curve], color=colors[kind], alpha=0.6,
                          label=kind if i == 0 else None)  # fmt: skip
        ends = sorted([*parts, *best["hybrid"]], key=lambda run: run.tokens)
        xs = [run.tokens / 1e6 if column == 0 else run.seconds for run in ends]
        axis.plot(xs, [run.nats for run in ends], "o", color=colors["hybrid"], label="hybrid, whole schedules")
        axis.set(xlabel=label, ylabel="validation loss, nats a token",
                 ylim=(min(run.nats for run in ends) - 0.1, max(r[0].nats for r in best.values()) + 1))  # fmt: skip
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = learning.parser(__doc__, tokens=9_961_472)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the first one tunes")
    parser.add_argument("--recipes", nargs="+", choices=tuple(RECIPES), default=list(RECIPES))
    parser.add_argument("--fixed", action="store_true", help="take every recipe's starting point, without a search")
    arguments = parser.parse_args()
    _check_own_arithmetic()
    corpus, out = learning.begin(arguments)
    bits_per_nat = learning.bits_per_nat(corpus, arguments.context)
    results = learning.Results(out / f"learn-{arguments.preset}.jsonl", corpus)

    def train(kind: str, point: dict[str, float], seed: int, share: float = 1.0) -> Run:
        config = learning.product_config(arguments.preset, corpus, tokens=round(arguments.tokens * share),
                                         context=arguments.context, seed=seed)  # fmt: skip
        if kind == "printed":
            config = config.with_values({"conv_width": 0})
        if kind in OWN:
            make = partial(train_hybrid, kind, point, config, corpus)
        else:
            make = partial(train_baseline, kind, point, config, corpus, bits_per_nat)
        return results.once(kind, config, make, point)

    best: dict[str, list[Run]] = {}
    for kind in arguments.recipes:
        recipe, tried = RECIPES[kind], {}

        def value(indices: dict[str, int], kind: str = kind, recipe: Recipe = recipe, tried: dict = tried) -> float:
            try:
                run = train(kind, recipe.point(indices), arguments.seeds[0])
            except ValueError as error:  # a rate at which the orthogonality penalty would diverge is refused
                print(f"{kind} {recipe.point(indices)}: {error}")
                return math.inf
            tried[tuple(indices.values())] = run
            return run.nats

        if arguments.fixed:
            value(recipe.start)
        else:
            learning.search(recipe.start, value, {axis: range(len(ladder)) for axis, ladder in LADDERS.items()})
        chosen = min(tried.values(), key=lambda run: run.nats)
        best[kind] = [chosen, *(train(kind, chosen.point, seed) for seed in arguments.seeds[1:])]
    parts = []
    if "hybrid" in best:
        parts = [train("hybrid", best["hybrid"][0].point, arguments.seeds[0], share) for share in SHARES]
        draw(best, parts, out / f"learn-{arguments.preset}.png")
    report(best, parts)


def report(best: dict[str, list[Run]], parts: list[Run]) -> None:
    """Print the best point of every recipe with its seeds, and what share of tokens and seconds the product needs."""
    print(f"\n{'recipe':8s} {'nats, mean (extremes)':38s} {'seconds':>8s}  best rates")
    for kind, runs in best.items():
        rates = ", ".join(f"{k} {v:.3g}" for k, v in runs[0].point.items())
        print(f"{kind:8s} {learning.mean_and_spread(runs):38s} {min(run.seconds for run in runs):8.1f}  {rates}")
    if not parts:
        return
    mine = best["hybrid"]
    mean = sum(run.nats for run in mine) / len(mine)
    ends = [(run.tokens, run.nats) for run in parts] + [(mine[0].tokens, mean)]
    # of the fastest seed: the first ones ran beside other searches
    per_token = min(run.seconds for run in mine) / mine[0].tokens
    for kind, runs in best.items():
        if kind != "hybrid":
            nats = sum(run.nats for run in runs) / len(runs)
            share = share_needed(ends, nats, mine[0].tokens)
            seconds = share * mine[0].tokens * per_token
            print(f"hybrid reaches the end of {kind} ({nats:.4f}) with {share:.2f} of its tokens, "
                  f"in {seconds / min(run.seconds for run in runs):.2f} of its seconds")  # fmt: skip


def _check_own_arithmetic() -> None:
    """A schedule that stays high, or a search that stops early, would hand the comparison to the product."""
    assert [round(cosine(step, 305, 0.02), 3) for step in (0, 5, 6, 150, 304)] == [0.167, 1.0, 1.0, 0.531, 0.01]
    tried = learning.search({"a": 0, "b": 0}, lambda p: (p["a"] - 2) ** 2 + (p["b"] + 3 - p["a"]) ** 2)
    assert all((2, b) in tried for b in (-2, -1, 0)) and all((a, -1) in tried for a in (1, 3)), tried
    assert share_needed([(2, 5.0), (4, 4.0), (8, 3.0)], 3.5, 8) == 0.75


if __name__ == "__main__":
    main()
