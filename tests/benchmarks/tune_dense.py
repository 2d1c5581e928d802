"""Choose among tiles of the matrix product, the cross entropy and the orthogonalisation: each is checked, then timed.

    python tests/benchmarks/tune_dense.py [--only product loss polar] [--seconds 140]

A candidate replaces the tile table of custom_kernels (rows x columns x depth x warps x stages). Checks: against float64
at a small ragged shape, by the bounds of tests/test_custom_kernels_dense.py's rule, and 5 runs that repeat bit for bit.
Shapes: the products of the loss's backward pass at 2,048 tokens, width 3,584 and 65,536 classes, TFLOP/s beside the
library's; the loss forward and backward at 8,192 tokens with a float32 weight (ms); orthogonalisation of 3,584 x 11,008
(ms) beside five bf16 steps by the library's products; there square tiles are candidates for the symmetric products, the
others for the rest. One JSON line at the end.
Without a GPU the same code runs tiny float32 shapes in Triton's interpreter: a smoke test without times.

One H200, operands through pointers and steps on X itself (before 2026-12-04): loss 27.5 ms, orthogonalisation 7.3 ms:
440 to 480 TFLOP/s where the library reaches 685. Predicted since: operands by the bulk copy unit 600 TFLOP/s, the
loss 23.5 ms (2.7 of them the casts of a float32 weight); steps on A = X X^T, 2,054 in place of 3,200 GFLOP, 3.5 ms.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels' module is imported
sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from helpers import assert_close  # noqa: E402
from triton.testing import do_bench  # noqa: E402

import custom_kernels  # noqa: E402

DTYPE, DEVICE = (torch.bfloat16, "cuda") if CUDA else (torch.float32, "cpu")
N, D, W = (2048, 3584, 65_536) if CUDA else (32, 64, 96)
RAGGED = (300, 520, 264) if CUDA else (33, 72, 40)
PRODUCT = ("128x256x64x8x4", "128x256x64x8x3", "256x128x64x8x4", "128x128x64x4x3", "128x256x128x8x2")
LOSS = ("128x256x64x8x4", "128x256x64x8x3", "256x128x64x8x4", "128x128x64x8x3")
POLAR = ("128x256x64x8x4", "256x128x64x8x4", "128x128x64x8x3", "128x128x64x8x4", "128x128x64x4x3", "128x128x64x4x4")
CANDIDATES = {"product": PRODUCT, "loss": LOSS, "polar": POLAR}


def replaced(numbers: tuple[int, ...]):
    """The tables with the candidate's tile for 16-bit operands."""
    BM, BN, BK, warps, stages = numbers
    options = dict(num_warps=warps, num_stages=stages)
    product, loss = custom_kernels._matrix_product_tile, custom_kernels._cross_entropy_tile
    polar = custom_kernels._newton_schulz_tile

    def product_tile(m, n, dtype):
        small = dtype == torch.float32 or m < 128 or n < 256
        return product(m, n, dtype) if small else (dict(BM=BM, BN=BN, BK=BK, GROUP=8), options)

    def loss_tile(dtype):
        return loss(dtype) if dtype == torch.float32 else (dict(BM=BM, BN=BN, BK=BK), options)

    def polar_tile(dtype, symmetric):
        kept = dtype == torch.float32 or symmetric != (BM == BN)
        return polar(dtype, symmetric) if kept else (dict(BM=BM, BN=BN, BK=BK, GROUP=8), options)

    return mock.patch.multiple(
        custom_kernels, _matrix_product_tile=product_tile, _cross_entropy_tile=loss_tile, _newton_schulz_tile=polar_tile
    )


def milliseconds(call) -> float:
    """Median milliseconds; 0 without a GPU, where it is called once."""
    if CUDA:
        return do_bench(call, warmup=20, rep=100, return_mode="median")
    call()
    return 0.0


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    gen = torch.Generator(device=DEVICE).manual_seed(sum(shape))
    return (torch.randn(shape, device=DEVICE, generator=gen) * scale).to(dtype)


def check(product) -> None:
    """A ragged product against float64, bit by bit the same five times."""
    m, k, n = RAGGED
    a, b = random(m, k), random(n, k, scale=k**-0.5)
    got, truth = product(a, b), a.double() @ b.double().T
    assert_close("product", got.cpu(), truth.cpu(), (a @ b.T).cpu(), rms_bound=5e-3 if CUDA else 1e-5)
    assert all(torch.equal(product(a, b), got) for _ in range(5)), "two runs differ"


def measure_product(product) -> dict[str, float]:
    """The loss's three products, TFLOP/s."""
    h, w, logits = random(N, D), random(W, D, scale=D**-0.5), random(N, W)
    total = torch.zeros(W, D, device=DEVICE)
    calls = {
        "logits": lambda: product(h, w),
        "hidden": lambda: product(logits, w, transpose_b=False),
        "weight": lambda: product(logits, h, transpose_a=True, transpose_b=False, out=total, accumulate=True),
    }
    return {name: 2 * N * D * W / max(milliseconds(call), 1e-9) / 1e9 for name, call in calls.items()}


def measure_loss() -> dict[str, float]:
    h, w = random(4 * N, D), random(W, D, scale=D**-0.5, dtype=torch.float32)
    targets = torch.randint(0, W, (4 * N,), device=DEVICE)

    def both() -> None:
        leaves = h.detach().requires_grad_(), w.detach().requires_grad_()
        torch.autograd.grad(custom_kernels.fused_chunked_cross_entropy(*leaves, targets), leaves)

    return {"ms": milliseconds(both)}


def measure_polar() -> dict[str, float]:
    x = random(D, 11_008 if CUDA else 96, dtype=torch.float32)
    return {"ms": milliseconds(lambda: custom_kernels.newton_schulz_orthogonalize(x))}


def library() -> dict[str, float]:
    h, w, logits = random(N, D), random(W, D, scale=D**-0.5), random(N, W)
    x = random(D, 11_008 if CUDA else 96)
    calls = {"logits": lambda: h @ w.T, "hidden": lambda: logits @ w, "weight": lambda: logits.T @ h}
    rates = {name: 2 * N * D * W / max(milliseconds(call), 1e-9) / 1e9 for name, call in calls.items()}

    def five_steps(x: torch.Tensor) -> None:
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x

    return rates | {"five bf16 steps, ms": milliseconds(lambda: five_steps(x / x.norm()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=[*CANDIDATES])
    parser.add_argument("--seconds", type=float, default=140, help="start no candidate later than this")
    options = parser.parse_args()
    started, results = time.perf_counter(), {"library": library()}
    print(f"{'library':<24}" + "  ".join(f"{key} {value:.1f}" for key, value in results["library"].items()), flush=True)
    for kind in options.only:
        for numbers in CANDIDATES[kind]:
            name = f"{kind} {numbers}"
            if time.perf_counter() - started > options.seconds:
                continue
            try:
                with replaced(tuple(map(int, numbers.split("x")))):
                    check(custom_kernels.matrix_product)
                    measure = {"loss": measure_loss, "polar": measure_polar}.get(kind)
                    row = measure() if measure else measure_product(custom_kernels.matrix_product)
                results[name] = row
                print(f"{name:<24}" + "  ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)
            except Exception as error:  # a candidate that is wrong or does not fit must not end the run
                results[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                print(f"{name:<24}{results[name]}", flush=True)
    device = torch.cuda.get_device_name() if CUDA else "interpreter"
    print(json.dumps(dict(device=device, seconds=time.perf_counter() - started, results=results)))


if __name__ == "__main__":
    main()
