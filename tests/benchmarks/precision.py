"""What narrower numbers cost in loss: float32, bf16, FP8 and FP4 with and without its parts, on the same batches.

    python tests/benchmarks/precision.py --data data/tokens.bin --out precise

FP4 is emulated (the same values by wider products), so only its loss is of interest here, not its time. Validation
multiplies in bf16 (float32 for fp32) by the trained masters whatever the format of the training: the gap to bf16, which
is printed in percent, is what narrow training costs, without what 4-bit weights would cost in generation.
"""

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import learning  # noqa: E402

import custom_kernels  # noqa: E402

_QUANTIZE = custom_kernels._fp4_quantize


def _without_rotation(x, signs, per_row, stochastic=False, seed=0, stream=0):
    return _QUANTIZE(x, None, per_row, stochastic, seed, stream)


def _to_nearest(x, signs, per_row, stochastic=False, seed=0, stream=0):
    return _QUANTIZE(x, signs, per_row, False, seed, stream)


@dataclass(frozen=True)
class Choice:
    """A number format, with a part of it taken away."""

    name: str
    values: dict[str, object]
    quantize: object = None


FP4 = {"precision": "fp4-emulated"}
CHOICES = (
    Choice("bf16", {"precision": "bf16"}),
    Choice("bf16, seed 1", {"precision": "bf16", "seed": 1}),
    Choice("fp32", {"precision": "fp32"}),
    Choice("fp8", {"precision": "fp8"}),
    Choice("fp4", FP4),
    Choice("fp4, last layers too", {**FP4, "wide_tail_layers": 0}),
    Choice("fp4, no Hadamard rotation", FP4, _without_rotation),
    Choice("fp4, gradients to nearest", FP4, _to_nearest),
)


def main() -> None:
    parser = learning.parser(__doc__, tokens=9_961_472)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--only", nargs="+", choices=[choice.name for choice in CHOICES], help="beside bf16")
    arguments = parser.parse_args()
    learning.CURVE_POINTS = 1
    corpus, out = learning.begin(arguments)
    config = learning.product_config(arguments.preset, corpus, tokens=arguments.tokens, context=arguments.context,
                                     seed=arguments.seed)  # fmt: skip
    results = learning.Results(out / f"precision-{arguments.preset}.jsonl", corpus)
    for choice in CHOICES:
        if arguments.only is None or choice.name in (*arguments.only, "bf16"):
            with ExitStack() as stack:
                if choice.quantize is not None:
                    stack.enter_context(mock.patch.object(custom_kernels, "_fp4_quantize", choice.quantize))
                chosen = config.with_values(choice.values)
                train = partial(learning.train_product, chosen, corpus, name=choice.name)
                results.once(choice.name, chosen, train)
    runs = results.runs
    print(f"\n{'format':28s} {'nats':>8s} {'against bf16':>13s} {'tokens/s':>10s}")
    for run in runs:
        print(f"{run.name:28s} {run.nats:8.4f} {run.nats / runs[0].nats - 1:+13.2%} {run.tokens / run.seconds:10,.0f}")


if __name__ == "__main__":
    main()
