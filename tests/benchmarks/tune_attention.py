"""Choose among tiles of the windowed attention on the machine at hand: each candidate is checked, then timed.

    python tests/benchmarks/tune_attention.py [--only fwd query key] [--seconds 140]

A candidate replaces one row of the table in custom_kernels._attention_tiles (query rows x key rows x warps x stages).
Checks: outputs and every gradient against float64, with documents, carried keys, anchors and whole tiles without masks,
to the bounds of tests/test_custom_kernels_attention.py; 20 runs that repeat bit for bit. Then ms of the stage that it
changes at 16,384 and 65,536 tokens, and TFLOP/s by visible pairs: 2 products a pair forward, 3 in the query pass, 4 in
the key pass (5 of a backward pass are counted in peers' figures: ours makes 7, for sums in a fixed order). 28 query
heads over 4 of 128, window 8,192 and 64 anchors, bf16. Last, whole forward and both directions beside the library's
causal attention, and one JSON line. Without a GPU the same code runs tiny float32 shapes in Triton's interpreter.

Log, one H200, torch 2.11, Triton 3.6, ms at 16,384 tokens. Predicted from products at 0.8 of the measured matrix rate
and instructions a tile: forward 3.0 (480 TFLOP/s), query 4.5, key 5.8; both directions 13.5 (375). Measured: forward
3.22 (448), query 4.05 (535), both 14.3 (352); at 65,536 forward 16.2 (444), both 70.2 (360); the library, causal, 613.
Other tiles are slower: forward 3.29 to 4.71, query 4.31 and 5.40; those of the key pass have not been timed.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels' module is imported
sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import test_custom_kernels_attention as tests  # noqa: E402
from triton.testing import do_bench  # noqa: E402

import custom_kernels  # noqa: E402

H, G, K, DTYPE, DEVICE = (28, 4, 128, torch.bfloat16, "cuda") if CUDA else (2, 1, 32, torch.float32, "cpu")
LENGTHS, WINDOW, ANCHORS = ((16_384, 65_536), 8192, 64) if CUDA else ((70,), 40, 4)
CASES = ("full-tiles", "docs-in-a-tile", "anchors-straddle") if CUDA else ("docs-in-a-tile",)
CANDIDATES = {
    "fwd": ((128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 2)),
    "query": ((128, 64, 8, 2), (128, 32, 8, 2), (128, 128, 8, 1), (64, 64, 4, 2)),
    "key": ((64, 128, 8, 2), (32, 128, 8, 2), (64, 128, 8, 1), (64, 64, 4, 2)),
}
_TILES, _RUN = custom_kernels._attention_tiles, tests.attention_run
TRUTHS: dict[tuple, list[torch.Tensor]] = {}


def remembered(op, leaves, dy, rule, dtype, device, *wrap):
    """tests.attention_run, but what runs on the CPU runs once for all candidates."""
    if not CUDA or device != "cpu":
        return _RUN(op, leaves, dy, rule, dtype, device, *wrap)
    key = (op.__name__, dtype, tuple(leaves[0].shape), rule["window"])
    if key not in TRUTHS:
        TRUTHS[key] = _RUN(op, leaves, dy, rule, dtype, device, *wrap)
    return TRUTHS[key]


def replaced(stage: str, numbers: tuple[int, ...]):
    """custom_kernels._attention_tiles with the candidate's row."""

    def tiles(name, x, anchors):
        out = _TILES(name, x, anchors)
        if name == stage and CUDA:
            out.BM, out.BN, out.num_warps, out.num_stages = numbers
        return out

    return mock.patch.object(custom_kernels, "_attention_tiles", tiles)


def make(T: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    gen = torch.Generator(device=DEVICE).manual_seed(0)
    shapes = ((1, T, H, K), (1, T, G, K), (1, T, G, K), (1, T, H, K), (1, T, G, K), (1, T, H, K))
    *leaves, dy = (torch.randn(s, device=DEVICE, dtype=DTYPE, generator=gen) for s in shapes)
    return [x.requires_grad_() for x in leaves], dy


def both(leaves, dy) -> tuple[torch.Tensor, ...]:
    y = custom_kernels.windowed_attention(*leaves, window=WINDOW, anchors=ANCHORS)
    return y, *torch.autograd.grad(y, leaves, dy)


def stage_call(stage: str, leaves, dy):
    """What one pass of the kernels is given."""
    q, k, v, q_far, k_far = (x.detach() for x in leaves)
    doc = torch.zeros(1, q.shape[1], dtype=torch.int32, device=DEVICE)
    rule = (WINDOW, ANCHORS, K**-0.5)
    if stage == "fwd":
        return lambda: custom_kernels._attention_fwd(q, k, v, q_far, k_far, None, None, doc, None, None, *rule)
    lse = q.new_full((1, H, q.shape[1]), 8.0, dtype=torch.float32)
    if stage == "query":
        return lambda: custom_kernels._attention_bwd_query(q, k, v, q_far, k_far, None, None, doc, dy, lse, lse, *rule)
    return lambda: custom_kernels._attention_bwd_key(q, k, v, doc, dy, lse, lse, WINDOW, K**-0.5)


def milliseconds(call) -> float:
    """Median milliseconds; 0 without a GPU, where it is called once."""
    if CUDA:
        return do_bench(call, warmup=20, rep=100, return_mode="median")
    call()
    return 0.0


def teraflops(T: int, products: float, ms: float) -> float:
    pairs = T * min(T, WINDOW) - min(T, WINDOW) ** 2 / 2
    return products * 2 * pairs * H * K / max(ms, 1e-9) / 1e9


def check() -> None:
    with mock.patch.object(tests, "attention_run", remembered):
        for name in CASES:
            tests.attention_parity(tests.ATTENTION_GPU_CASES[name], DTYPE, DEVICE)
    data = make(1500 if CUDA else 70)
    first = both(*data)
    for _ in range(20 if CUDA else 1):
        assert all(map(torch.equal, both(*data), first)), "two runs differ"


def whole(data: dict) -> dict[str, float]:
    """Both directions by the table as it is, and the library's causal attention at the first length."""
    row = {}
    for T, (leaves, dy) in data.items():
        ms = milliseconds(lambda leaves=leaves, dy=dy: both(leaves, dy))
        row[f"{T} both"], row[f"{T} both TFLOP/s"] = ms, teraflops(T, 7, ms)
    (q, k, v, *_), _ = data[LENGTHS[0]]
    q, k, v = (x.detach().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    ms = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    row["library, causal, forward TFLOP/s"] = 2 * LENGTHS[0] ** 2 * H * K / max(ms, 1e-9) / 1e9
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=[*CANDIDATES])
    parser.add_argument("--seconds", type=float, default=140, help="start no candidate later than this")
    options = parser.parse_args()
    started, results = time.perf_counter(), {}
    data = {T: make(T) for T in LENGTHS}
    results["whole"] = whole(data)
    print(results["whole"], flush=True)
    products = {"fwd": 2, "query": 3, "key": 4}
    for stage in options.only:
        for numbers in CANDIDATES[stage]:
            name = f"{stage} {'x'.join(map(str, numbers))}"
            if time.perf_counter() - started > options.seconds:
                continue
            try:
                with replaced(stage, numbers):
                    check()
                    row = {}
                    for T, (leaves, dy) in data.items():
                        row[f"{T}"] = ms = milliseconds(stage_call(stage, leaves, dy))
                        row[f"{T} TFLOP/s"] = teraflops(T, products[stage], ms)
                results[name] = row
                print(f"{name:<20}" + "  ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)
            except Exception as error:  # a candidate that is wrong or does not fit must not end the run
                results[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                print(f"{name:<20}{results[name]}", flush=True)
    device = torch.cuda.get_device_name() if CUDA else "interpreter"
    print(json.dumps(dict(device=device, seconds=time.perf_counter() - started, results=results)))


if __name__ == "__main__":
    main()
