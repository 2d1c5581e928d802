"""custom_kernels.py, causal convolution: parity with float64, documents, carries, interpreter, cross-compilation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import causal_convolution_reference
from torch import Tensor

import custom_kernels
from custom_kernels import causal_convolution

CONV_CASES = [
    pytest.param("cpu", torch.float32, id="cpu-f32"),
    pytest.param("cpu", torch.float64, id="cpu-f64"),
    pytest.param("cuda", torch.float32, id="cuda-f32", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, id="cuda-bf16", marks=pytest.mark.gpu),
]
CONV_NAMES = ("y", "dx", "dtaps", "dcarry")
# the gradients of bf16 runs have one rounding each, as the output has; dtaps is float32 and has none
CONV_BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3}


def conv_doc(T: int, *rows: list[int]) -> Tensor:
    """doc_start (B, T) of rows given as rising starts, of which the first may be negative."""
    index, never = torch.arange(T), -(1 << 20)
    starts = [torch.stack([torch.where(index >= s, s, never) for s in row]).amax(0) for row in rows]
    return torch.stack(starts).int()


def conv_random_doc(T: int, seed: int = 0) -> Tensor:
    """Two rows with a start in every fourth place: documents of 1, 2, 3 and more tokens; the first began 2 before."""
    gen = torch.Generator().manual_seed(seed)
    cuts = [torch.nonzero(torch.rand(T, generator=gen) < 0.25).flatten().tolist() for _ in range(2)]
    return conv_doc(T, [-2, *cuts[0]], [0, *cuts[1]])


def conv_run(op, x, taps, do, *, doc=None, carry=None) -> list[Tensor]:
    """Output and the gradients of x, taps and, where there is one, carry."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, taps, carry) if t is not None]
    y = op(*leaves[:2], doc_start=doc, carry=None if carry is None else leaves[2])
    return [y.detach(), *torch.autograd.grad(y, leaves, do.to(y))]


def conv_parity(B, T, C, W, *, device="cpu", dtype=torch.float32, doc=None, carried=True, flat=False) -> None:
    gen = torch.Generator().manual_seed(T * C + W)
    x, carry = (torch.randn(B, n, C, generator=gen).to(dtype) for n in (T, W - 1))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    taps, do = torch.randn(C, W, generator=gen).to(wide), torch.randn(B, T, C, generator=gen).to(dtype)
    taps = taps.flatten() if flat else taps
    carry = carry if carried else None
    exact = [None if t is None else t.double() for t in (x, taps, do, carry)]
    truth = conv_run(causal_convolution_reference, *exact[:3], doc=doc, carry=exact[3])
    # the reference in the input's type rounds each product: at bf16 it may not be more right than one rounding is
    low = conv_run(causal_convolution_reference, x, taps.to(dtype), do, doc=doc, carry=carry)
    there = [None if t is None else t.to(device) for t in (x, taps, do, doc, carry)]
    got, again = (conv_run(causal_convolution, *there[:3], doc=there[3], carry=there[4]) for _ in range(2))
    for name, g, t, w, a in zip(CONV_NAMES, got, truth, low, again, strict=False):
        assert g.dtype == (wide if name == "dtaps" else dtype), name
        if g.dtype == torch.bfloat16:
            # a reference that is right by luck counts as one rounding off
            unit = 2**-9 * t.abs().max()
            w = torch.where((w - t).abs() < unit, t + unit, w.double())
        assert_close(name, g, t, w, rms_bound=CONV_BOUND[g.dtype])
        assert torch.equal(g, a), f"{name} differs between two runs"


@pytest.mark.parametrize("device, dtype", CONV_CASES)
@pytest.mark.parametrize("carried", [False, True], ids=["whole", "carried"])
# rows shorter than the taps, one block of 64 tokens and its edges, several; channels of one thread, ragged, two blocks
@pytest.mark.parametrize("T, C, W", [(1, 1, 2), (1, 33, 4), (2, 16, 4), (3, 7, 3), (63, 16, 4), (64, 5, 2), (65, 16, 4),
                                     (66, 8, 3), (67, 3, 4), (130, 48, 4), (5, 257, 4), (9, 300, 3)])  # fmt: skip
def test_convolution_parity(device, dtype, T, C, W, carried):
    conv_parity(2, T, C, W, device=device, dtype=dtype, carried=carried)
    conv_parity(2, T, C, W, device=device, dtype=dtype, carried=carried, doc=conv_random_doc(T), flat=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution_at_the_full_model_s_width(dtype):
    conv_parity(1, 515, 3584, 4, device="cuda", dtype=dtype, doc=conv_doc(515, [-1, 64, 65, 127, 130, 400]))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(T=st.integers(1, 70), C=st.integers(1, 20), W=st.integers(2, 4), seed=st.integers(0, 2**20))
def test_convolution_any_shape(T, C, W, seed):
    conv_parity(2, T, C, W, dtype=torch.float64, doc=conv_random_doc(T, seed), carried=seed % 2 == 0)


@pytest.mark.parametrize("device, dtype", CONV_CASES)
def test_zero_taps_are_the_identity_before_silu(device, dtype):
    x = torch.randn(2, 9, 5).to(device, dtype)
    y = causal_convolution(x, torch.zeros(20, device=device), carry=torch.randn(2, 3, 5).to(x))
    torch.testing.assert_close(y, torch.nn.functional.silu(x), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)


@pytest.mark.parametrize("device, dtype", CONV_CASES)
def test_convolution_any_cut_gives_the_same_bits_and_the_same_gradients(device, dtype):
    convolution_cuts(device, dtype, ([1] * 140, [2] * 70, [64, 76], [65, 1, 74], [3, 130, 7]))


def convolution_cuts(device, dtype, cuts) -> None:
    """Segments that hand on their last inputs, also ones shorter than the taps reach."""
    T, C, W = 140, 6, 4
    x, taps = torch.randn(2, T, C).to(device, dtype), torch.randn(C, W).to(device)
    taps = taps.to(torch.promote_types(dtype, torch.float32))
    doc, do = conv_doc(T, [0, 64, 66, 67, 100], [0, 3, 139]).to(device), torch.randn(2, T, C).to(x)

    def run(sizes: list[int]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), taps.clone().requires_grad_()]
        carry, parts, at = None, [], 0
        for size in sizes:
            part = leaves[0][:, at : at + size]
            parts.append(causal_convolution(part, leaves[1], doc_start=doc[:, at : at + size] - at, carry=carry))
            before = torch.zeros_like(x[:, : W - 1]) if carry is None else carry
            carry = torch.cat((before, part), 1)[:, 1 - W :]
            at += size
        y = torch.cat(parts, 1)
        return [y.detach(), *torch.autograd.grad(y, leaves, do)]

    whole = run([T])
    for sizes in cuts:
        y, dx, dtaps = run(sizes)
        assert torch.equal(y, whole[0]), sizes
        # a cut row's gradient is the sum of two roundings
        error = (dx.double() - whole[1].double()).norm() / whole[1].double().norm()
        assert error < CONV_BOUND[dtype], f"dx off by {error:.1e} at {sizes}"
        assert torch.allclose(dtaps, whole[2], rtol=1e-4 if dtype != torch.float64 else 1e-11, atol=1e-4), sizes


@pytest.mark.parametrize("device, dtype", CONV_CASES)
def test_an_edit_of_one_document_changes_no_bit_of_the_others(device, dtype):
    """Not even when it is not a number: values, gradients of x, taps and carry of the second document."""
    x, carry = torch.randn(1, 80, 4).to(device, dtype), torch.randn(1, 3, 4).to(device, dtype)
    taps = torch.randn(4, 4, device=device, dtype=torch.promote_types(dtype, torch.float32))
    for start in (1, 3, 64, 66):
        doc = conv_doc(80, [-5, start]).to(device)
        do = torch.randn(1, 80, 4).to(x)
        do[:, :start] = 0
        plain = conv_run(causal_convolution, x, taps, do, doc=doc, carry=carry)
        edited, other = x.clone(), carry.clone()
        edited[:, :start], other[:] = 1e3, -1e3
        again = conv_run(causal_convolution, edited, taps, do, doc=doc, carry=other)
        assert torch.equal(plain[0][:, start:], again[0][:, start:]) and not torch.equal(plain[0], again[0])
        assert torch.equal(plain[1], again[1]) and not plain[1][:, :start].any() and not plain[3].any()
        assert torch.equal(plain[2], again[2])
        edited[:, :start], other[:] = float("nan"), float("nan")
        y, dx, *_ = conv_run(causal_convolution, edited, taps, do, doc=doc, carry=other)
        assert torch.equal(y[:, start:], plain[0][:, start:]) and torch.equal(dx[:, start:], plain[1][:, start:])


@pytest.mark.parametrize("device, dtype", CONV_CASES)
def test_convolution_is_causal(device, dtype):
    x = torch.randn(1, 80, 4).to(device, dtype)
    taps = torch.randn(4, 4, device=device)
    y = causal_convolution(x, taps)
    for t in (0, 1, 62, 63, 64, 79):
        edited = x.clone()
        edited[:, t] += 1
        other = causal_convolution(edited, taps)
        changed = (other != y).any(-1)[0].nonzero().flatten().tolist()
        assert changed == list(range(t, min(80, t + 4)))


@pytest.mark.parametrize("device, dtype", CONV_CASES)
def test_a_row_s_bits_do_not_depend_on_the_other_rows(device, dtype):
    """What a draft-tree node is: a row of one token after its own ancestors."""
    x, carry = torch.randn(7, 1, 33).to(device, dtype), torch.randn(7, 3, 33).to(device, dtype)
    taps = torch.randn(33, 4, device=device)
    single = torch.cat([causal_convolution(x[r : r + 1], taps, carry=carry[r : r + 1]) for r in range(7)])
    for rows in range(1, 8):
        assert torch.equal(causal_convolution(x[:rows], taps, carry=carry[:rows]), single[:rows]), rows


@pytest.mark.parametrize("device, dtype", CONV_CASES)
def test_convolution_of_loud_inputs_is_finite(device, dtype):
    x = torch.tensor([-1e30, -1e4, -90.0, 0.0, 90.0, 1e4, 1e30], device=device).to(dtype).view(1, 1, 7)
    y, dx, dtaps = conv_run(causal_convolution, x, torch.zeros(7, 2, device=device), torch.ones_like(x))
    torch.testing.assert_close(y, x.clamp(min=0), rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(dx.flatten().float().cpu(), torch.tensor([0, 0, 0, 0.5, 1, 1, 1]), rtol=1e-3, atol=1e-6)
    assert dtaps.isfinite().all()


def test_convolution_refuses_wrong_shapes():
    x, taps = torch.zeros(2, 5, 8), torch.zeros(8, 4)
    with pytest.raises(ValueError, match=r"x must be \(B, T, C\).*got \(5, 8\)"):
        causal_convolution(x[0], taps)
    with pytest.raises(ValueError, match=r"each at least 1, got \(2, 0, 8\)"):
        causal_convolution(x[:, :0], taps)
    for wrong in (torch.zeros(8, 5), torch.zeros(8, 1), torch.zeros(4, 8), torch.zeros(33)):
        with pytest.raises(ValueError, match=r"taps must be \(8, W\) or \(8 \* W,\), W 2 to 4, got"):
            causal_convolution(x, wrong)
    with pytest.raises(ValueError, match=r"carry must be \(2, 3, 8\) torch.float32, got \(2, 4, 8\)"):
        causal_convolution(x, taps, carry=torch.zeros(2, 4, 8))
    with pytest.raises(ValueError, match=r"torch\.float64"):
        causal_convolution(x, taps, carry=torch.zeros(2, 3, 8).double())
    with pytest.raises(ValueError, match=r"doc_start must have shape \(2, 5\), got \(5,\)"):
        causal_convolution(x, taps, doc_start=torch.zeros(5, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"int32, got torch\.int64"):
        causal_convolution(x, taps, doc_start=torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"x on cpu must be one of .* got torch\.bfloat16"):
        causal_convolution(x.bfloat16(), taps)


# ---------------------------------------------------------------------------
# Interpreter and compiler

CONV_INTERPRETED = """
import torch
import test_custom_kernels as t
torch.set_num_threads(1)
f32 = torch.float32
assert t.custom_kernels._uses_kernel(torch.zeros(1))
for T, C, W in ((1, 1, 2), (1, 33, 4), (3, 7, 3), (66, 8, 3), (5, 257, 4), (130, 3, 4)):
    for carried in (False, True):
        t.test_convolution_parity("cpu", f32, T, C, W, carried)
t.convolution_cuts("cpu", f32, ([2, 1, 2, 1, 1, 133], [65, 1, 74]))
t.test_an_edit_of_one_document_changes_no_bit_of_the_others("cpu", f32)
t.test_convolution_is_causal("cpu", f32)
t.test_a_row_s_bits_do_not_depend_on_the_other_rows("cpu", f32)
t.test_convolution_of_loud_inputs_is_finite("cpu", f32)
print("interpreted")
"""


@pytest.mark.interpret
def test_convolution_kernels_interpreted():
    pytest.importorskip("triton")
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    script = CONV_INTERPRETED.replace("test_custom_kernels", Path(__file__).stem)
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "interpreted" in run.stdout, run.stdout + run.stderr[-3000:]


def conv_compile(kernel: str, kind: str, W: int, doc: bool, carry: bool, arch: int):
    """Cross-compile as the launcher specialises it: 16-byte alignment, channels a multiple of 16, any T."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = getattr(custom_kernels, kernel)
    tile = dict(custom_kernels._CONVOLUTION_TILE)
    options = dict(num_warps=tile.pop("num_warps"))
    pointers = dict.fromkeys(("p_x", "p_y", "p_dy", "p_dx", "p_carry", "p_dcarry"), kind)
    pointers |= dict(p_taps="*fp32", p_partial="*fp32", p_doc="*i32")
    constants = dict(HAS_DOC=doc, HAS_CARRY=carry, W=W) | tile
    constants |= ({} if doc else dict(p_doc=None)) | ({} if carry else dict(p_carry=None, p_dcarry=None))
    constants = {name: value for name, value in constants.items() if name in fn.arg_names}
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in fn.arg_names}
    aligned = [i for i, n in enumerate(fn.arg_names) if signature[n].startswith("*") or n == "C"]
    source = ASTSource(
        fn=fn, signature=signature,
        constexprs={(fn.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.compile
@pytest.mark.skipif(custom_kernels.triton is None, reason="needs Triton")
@pytest.mark.parametrize("arch", [90, 100, 103])
@pytest.mark.parametrize("doc, carry", [(True, False), (True, True), (False, True)], ids=["train", "segment", "decode"])
@pytest.mark.parametrize("kind", ["*bf16", "*fp32"])
@pytest.mark.parametrize("kernel", ["_causal_convolution_kernel", "_causal_convolution_bwd_kernel"])
def test_convolution_kernels_compile(kernel, kind, doc, carry, arch):
    built = conv_compile(kernel, kind, 4, doc, carry, arch)
    ptx = built.asm["ptx"]
    # rows stay in registers, and a thread's four channels are one access
    assert built.metadata.shared == 0 and "ld.local" not in ptx
    assert ("ld.global.v2.b32" if kind == "*bf16" else "ld.global.v4.b32") in ptx
    assert "atom." not in ptx and "red." not in ptx.replace("shared.", "")
