"""Shared fixtures: GPU tests skip with the reason, uninitialised memory is poisoned, threads and seeds are fixed."""

import importlib.util
import os
from importlib.metadata import version

# idle OpenMP threads sleep: spinning ones make a busy machine ten times slower (see main.py); read when torch loads
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from torch.utils._device import _device_constructors

# the set of factories that `with torch.device(...)` redirects is built once, by attribute: before we patch any of them
_device_constructors()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; runs the Triton kernels natively")
    config.addinivalue_line("markers", "compile: cross-compiles kernels for GPUs that are not here")
    config.addinivalue_line("markers", "interpret: runs Triton kernels in the interpreter, float32, in a subprocess")


def _interpreter_fault() -> str | None:
    """Say why Triton's interpreter cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    triton, numpy = version("triton"), version("numpy")
    if triton.startswith("3.6.") and tuple(map(int, numpy.split(".")[:2])) >= (2, 4):
        return f"the interpreter of Triton {triton} fails on every loop with NumPy {numpy} (2.4 and later)"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = None if torch.cuda.is_available() else "no CUDA device: the Triton kernel cannot run natively here"
    for mark, reason in {"gpu": no_gpu, "interpret": _interpreter_fault()}.items():
        for item in items:
            if reason and mark in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fixed_randomness() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty and its relatives return with NaN (floats), so that an unwritten output fails a test."""

    def poisoned(make):
        def wrapper(*args, **kwargs):
            out = make(*args, **kwargs)
            if out.is_floating_point() and out.device.type != "meta":
                with torch.no_grad():  # checkpointing makes an empty leaf that requires a gradient
                    out.fill_(float("nan"))
            return out

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
