"""Choose among tiles of the recurrent scan on the machine at hand: each candidate is checked, then timed.

    python tests/benchmarks/tune_scan.py [--only outputs back] [--seconds 140]

A candidate replaces entries of the table that custom_kernels._scan_tiles returns (columns x warps x stages, and x
chunks asked for ahead), or the counts of segments. Checks: outputs, final state and every gradient against the float64
token loop, with documents, to the bounds of tests/test_custom_kernels_scan.py, whole and in three segments; 20 runs
that repeat bit for bit. Then one row: ms of forward and of both directions at 4 x 8,192 (a) and 1 x 65,536 tokens (b),
of forward at 1 x 1,048,576 (c), 28 heads of 128 in bf16; below the base, its ms by kernel and its peak memory. Last,
one JSON line. Without a GPU the same code runs tiny float32 shapes in Triton's interpreter: a smoke test without
times.

Log, one H200, torch 2.11, Triton 3.6 (ms). Predicted from instructions a chunk at 0.7 an issue slot and clock,
occupancy and bytes: all walks take twice that, since they wait (issued 0.17 instructions a clock and scheduler; 37 % of
the stalls for memory, 18 % at barriers), with half of the memory's rate.
    a: entry 0.25, measured 0.50; outputs 0.27, 0.69; states 0.25, 0.53; back 0.32, 0.79; inputs 1.1, 2.22; forward
       0.55, 1.19; both 2.3, 4.74. Then pairs and inputs apart, 64 keys a program: predicted 0.45 + 1.0, measured 0.54 +
       1.16, one stage: both 4.13. Walks of 8 warps: 1.67 forward; two stages for the outputs: 1.30
    b: entry 0.5, 0.99; forward 1.7, 3.50; both 5.9, 12.2, then 11.1; 7.2 GB
    c: entry 8, 15.6; forward 26, 47.6: 0.80 of the throughput of a
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import test_custom_kernels_scan as tests  # noqa: E402
from triton.testing import do_bench  # noqa: E402

import custom_kernels  # noqa: E402

H, D, DTYPE, DEVICE = (28, 128, torch.bfloat16, "cuda") if CUDA else (2, 16, torch.float32, "cpu")
SHAPES = dict(a=(4, 8192), b=(1, 65_536), c=(1, 1_048_576)) if CUDA else dict(a=(2, 40), b=(1, 70), c=(1, 100))
CANDIDATES = {
    "base": ("0",),
    "pairs": ("64x4x1", "128x4x1"),
    "inputs": ("64x4x1", "128x4x1", "128x8x1"),
    # the fourth number: how many chunks ahead the second-level cache is asked
    "outputs": ("64x4x1x0", "64x4x1x2", "64x4x2x2", "128x8x2x2"),
    "states": ("64x4x2x0", "64x4x2x3", "64x4x1x1", "64x4x3x3"),
    "back": ("64x4x1x0", "64x4x1x2", "64x4x2x2"),
    "segments": ("1x3", "2x4", "4x14", "8x66"),  # of b and c
    "entry": ("168",),  # registers
}
_TILES, _RUN = custom_kernels._scan_tiles, tests._scan_run
LOOPS: dict[torch.dtype, list[torch.Tensor]] = {}


def replaced(stage: str, numbers: tuple[int, ...]):
    """custom_kernels._scan_tiles with the candidate's entries."""
    keys = ("maxnreg",) if stage == "entry" else ("BV", "num_warps", "num_stages", "AHEAD")[: len(numbers)]
    values = {} if stage in ("base", "segments") else {stage: dict(zip(keys, numbers, strict=True))}

    def tiles(*arguments):
        out = vars(_TILES(*arguments))
        return SimpleNamespace(**out | {name: out[name] | new for name, new in values.items()})

    return mock.patch.object(custom_kernels, "_scan_tiles", tiles)


def in_segments(count: int | None):
    """Cut every row in `count` segments; None leaves the rule."""
    rule = custom_kernels._scan_segments if count is None else lambda rows, chunks, processors: min(count, chunks)
    return mock.patch.object(custom_kernels, "_scan_segments", rule)


def remembered(fn, inputs, upstream, *, dtype, device="cpu", doc=None, **options):
    """tests._scan_run, but the token loop runs once for all candidates."""
    if fn is not tests.scan_reference:
        return _RUN(fn, inputs, upstream, dtype=dtype, device=device, doc=doc, **options)
    if dtype not in LOOPS:
        LOOPS[dtype] = _RUN(fn, inputs, upstream, dtype=dtype, doc=doc)
    return LOOPS[dtype]


def make(B: int, T: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    gen = torch.Generator(device=DEVICE).manual_seed(0)
    q, k, v, do = (torch.randn(B, T, H, D, device=DEVICE, dtype=DTYPE, generator=gen) for _ in range(4))
    beta = torch.rand(B, T, H, device=DEVICE, generator=gen)
    log_gamma = -0.693 / 2.0 ** torch.linspace(3, 20, H, device=DEVICE) * (0.5 + beta)
    leaves = custom_kernels.l2_normalize(q), custom_kernels.l2_normalize(k), v, beta, log_gamma
    return [x.detach().requires_grad_() for x in leaves], do


def forward(leaves, do) -> None:
    with torch.no_grad():
        custom_kernels.chunk_associative_scan(*leaves)


def both(leaves, do) -> tuple[torch.Tensor, ...]:
    y, final = custom_kernels.chunk_associative_scan(*leaves)
    return y, final, *torch.autograd.grad((y, final), leaves, (do, torch.ones_like(final)))


def check() -> None:
    """Parity, whole and in segments; then 20 more runs of both directions, bit by bit."""
    B, T, heads, data = (2, 257, 2, make(2, 300)) if CUDA else (2, 40, 1, make(2, 40))
    doc = tests._scan_random_doc(B, T, seed=T)
    for count in (1, 3):
        with in_segments(count), mock.patch.object(tests, "_scan_run", remembered):
            tests._scan_parity(B, T, heads, D, D, dtype=DTYPE, device=DEVICE, doc=doc)
            first = both(*data)
            for _ in range(20 if CUDA else 1):
                assert all(map(torch.equal, both(*data), first)), "two runs differ"


def measure(data: dict, segments: dict[str, int]) -> dict[str, float]:
    row = {}
    for name, call in (("a", forward), ("a", both), ("b", forward), ("b", both), ("c", forward)):
        run = lambda name=name, call=call: call(*data[name])  # noqa: E731
        with in_segments(segments.get(name)):
            run()
            row[f"{name} {call.__name__}"] = do_bench(run, warmup=20, rep=100, return_mode="median") if CUDA else 0.0
    return row


def facts(data: dict) -> dict[str, object]:
    """Milliseconds of each kernel, and the GB that a call needs, its inputs included."""
    out = {}
    for name, arguments in data.items():
        others = torch.cuda.memory_allocated() - sum(x.nbytes for x in (*arguments[0], arguments[1]))
        torch.cuda.reset_peak_memory_stats()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            (forward if name == "c" else both)(*arguments)
            torch.cuda.synchronize()
        out[name] = {e.key: round(e.device_time_total / 1e3, 3) for e in profile.key_averages() if "scan" in e.key}
        out[name]["GB"] = round((torch.cuda.max_memory_allocated() - others) / 1e9, 2)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=[*CANDIDATES], help="stages, beside base")
    parser.add_argument("--seconds", type=float, default=140, help="start no candidate later than this")
    options = parser.parse_args()
    started, results = time.perf_counter(), {}
    data = {name: make(*shape) for name, shape in SHAPES.items()}
    for stage in dict.fromkeys(("base", *options.only)):
        for numbers in CANDIDATES[stage]:
            name, counts = f"{stage} {numbers}", tuple(map(int, numbers.split("x")))
            if time.perf_counter() - started > options.seconds:
                continue
            try:
                with replaced(stage, counts):
                    check()
                    results[name] = measure(data, dict(zip("bc", counts, strict=True)) if stage == "segments" else {})
                row = "  ".join(f"{key} {value:.3f}" for key, value in results[name].items())
                if stage == "base" and CUDA:
                    results["facts"] = facts(data)
                    row += "\n" + json.dumps(results["facts"], indent=1)
            except Exception as error:  # a candidate that is wrong or does not fit must not end the run
                row = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                results.setdefault(name, row)
            print(f"{name:<16}{row}", flush=True)
    device = torch.cuda.get_device_name() if CUDA else "interpreter"
    print(json.dumps(dict(device=device, seconds=time.perf_counter() - started, shapes=SHAPES, results=results)))


if __name__ == "__main__":
    main()
