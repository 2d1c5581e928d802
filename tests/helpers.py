"""The one numerical comparison that every kernel test uses."""

import torch
from torch import Tensor

# RMS error over RMS of the truth. bf16: one rounding of the output alone is 1.7e-3; products of bf16 operands add to it
RMS_BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def assert_close(name: str, got: Tensor, truth: Tensor, low: Tensor, *, rms_bound: float | None = None) -> None:
    """Compare `got` with a float64 `truth`; `low` is the same reference run in got's precision.

    Passes iff the shapes agree and all values are finite, the RMS error ratio is under the type's bound (small
    systematic errors), and the worst element is at most twice as far off as low's worst (a few wrong rows).
    """
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    assert torch.isfinite(got).all(), f"{name}: {(~torch.isfinite(got)).sum().item()} non-finite values"
    got, truth, low = got.detach().cpu(), truth.detach().cpu(), low.detach().cpu()
    error, error_low = got.double() - truth.double(), low.double() - truth.double()
    ratio, ratio_low = rms(error) / (rms(truth) + 1e-30), rms(error_low) / (rms(truth) + 1e-30)
    bound = rms_bound or RMS_BOUND[got.dtype]
    same = f"same-precision {ratio_low:.2e}"
    assert ratio < bound, f"{name}: RMS error ratio {ratio:.2e} must be < {bound:.1e} ({same})"
    worst, budget = error.abs().max().item(), 2 * error_low.abs().max().item() + 1e-6
    where = error.abs().argmax().item()
    assert worst <= budget, f"{name}: worst element off by {worst:.2e}, budget {budget:.2e}, at flat index {where}"
