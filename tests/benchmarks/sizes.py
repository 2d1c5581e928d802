"""Which preset for how many tokens? Loss of `small`, `medium` and `base` at equal budgets, the trend, and its reading.

    python tests/benchmarks/sizes.py --data data/tokens.bin --out sized

Every run has a whole schedule for its budget, 32,768 tokens a step and the file's vocabulary, so that only size and
budget differ. Fits nats = E + A / parameters^a + B / tokens^b (exponents on a grid, the rest by non-negative least
squares) and prints, for budgets from the measured ones to 2.5 billion, the preset that the fit puts first. A fit to
budgets up to --tokens says little about a hundred times as many: read its far end as a guess.
"""

import sys
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import learning  # noqa: E402

from model_config import preset  # noqa: E402

PRESETS = ("small", "medium", "base")
SHARES = (0.25, 0.5, 1.0)
EXPONENTS = np.arange(0.05, 1.01, 0.05)


def non_negative(columns: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
    """Solve least squares with coefficients >= 0 by trying every subset of columns: (coefficients, squared error)."""
    best = np.zeros(columns.shape[1]), float((values**2).sum())
    for count in range(1, columns.shape[1] + 1):
        for kept in map(list, combinations(range(columns.shape[1]), count)):
            found = np.linalg.lstsq(columns[:, kept], values, rcond=None)[0]
            error = float(((columns[:, kept] @ found - values) ** 2).sum())
            if (found >= 0).all() and error < best[1]:
                whole = np.zeros(columns.shape[1])
                whole[kept] = found
                best = whole, error
    return best


def fit(parameters: np.ndarray, tokens: np.ndarray, nats: np.ndarray) -> tuple[np.ndarray, float, float, float]:
    """Return (E, A, B), a, b and the root mean square error in nats; parameters and tokens in millions."""
    found = None
    for a in EXPONENTS:
        for b in EXPONENTS:
            columns = np.stack([np.ones_like(nats), parameters**-a, tokens**-b], 1)
            coefficients, error = non_negative(columns, nats)
            if found is None or error < found[3]:
                found = coefficients, a, b, error
    coefficients, a, b, error = found
    return coefficients, a, b, float(np.sqrt(error / len(nats)))


def main() -> None:
    parser = learning.parser(__doc__, tokens=19_660_800)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    arguments = parser.parse_args()
    _check_own_arithmetic()
    learning.CURVE_POINTS = 1
    corpus, out = learning.begin(arguments)
    results = learning.Results(out / "sizes.jsonl", corpus)
    for name in arguments.presets:
        for share in SHARES:
            config = learning.product_config(name, corpus, tokens=round(arguments.tokens * share),
                                             context=arguments.context, seed=arguments.seed)  # fmt: skip
            results.once(name, config, partial(learning.train_product, config, corpus, name=name))
    runs = results.runs
    columns = (np.array([getattr(run, key) for run in runs], float) for key in ("parameters", "tokens", "nats"))
    parameters, tokens, nats = columns
    (e, a_factor, b_factor), a, b, error = fit(parameters / 1e6, tokens / 1e6, nats)
    print(f"\nnats = {e:.3f} + {a_factor:.3f} / (M parameters)^{a:.2f} + {b_factor:.3f} / (M tokens)^{b:.2f}, "
          f"root mean square error {error:.4f} over {len(runs)} runs")  # fmt: skip
    full = preset("full").with_values({"vocab_size": corpus.tokens.vocab_size})
    sizes = {run.name: run.parameters for run in runs} | {"full": full.model.matrix_parameters}
    # equal operations: a larger model reads fewer tokens in the same time
    print(f"{'operations of':>24s} " + " ".join(f"{name:>10s}" for name in sizes) + "   first")
    for million in (10, 50, 250, 1000, 2500):
        operations = 6 * sizes["small"] * million * 1e6
        row = {name: e + a_factor / (n / 1e6) ** a + b_factor / (operations / (6 * n) / 1e6) ** b
               for name, n in sizes.items()}  # fmt: skip
        print(f"small at {million:9,d} M tok " + " ".join(f"{row[name]:10.3f}" for name in sizes)
              + f"   {min(row, key=row.__getitem__)}")  # fmt: skip
    print(f"{'equal tokens':>24s}")
    for million in (10, 50, 250, 1000, 2500):
        row = {name: e + a_factor / (n / 1e6) ** a + b_factor / million**b for name, n in sizes.items()}
        print(f"{million:18,d} M tok " + " ".join(f"{row[name]:10.3f}" for name in sizes)
              + f"   {min(row, key=row.__getitem__)}")  # fmt: skip


def _check_own_arithmetic() -> None:
    parameters, tokens = (x.ravel() for x in np.meshgrid([35.0, 123.0, 300.0], [5.0, 10.0, 20.0]))
    found, a, b, error = fit(parameters, tokens, 1.5 + 2 * parameters**-0.3 + 4 * tokens**-0.4)
    assert error < 1e-6 and np.allclose([*found, a, b], [1.5, 2, 4, 0.3, 0.4], atol=1e-3), (found, a, b, error)


if __name__ == "__main__":
    main()
