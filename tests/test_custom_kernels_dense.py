"""custom_kernels.py, dense sections: parity with float64, gradients, edges, interpreter, cross-compilation."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import triton
from helpers import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import (
    fused_chunked_cross_entropy_reference,
    fused_residual_sphere_reference,
    fused_rmsnorm_reference,
    fused_swiglu_reference,
    l2_normalize_reference,
    linear_product_reference,
    newton_schulz_orthogonalize_reference,
)
from torch.nn.functional import softplus
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import custom_kernels
from custom_kernels import (
    PackedINT8,
    Projection,
    delta_rule_gates,
    delta_rule_operands,
    dequantize_int8,
    fused_chunked_cross_entropy,
    fused_residual_sphere,
    fused_rmsnorm,
    fused_swiglu,
    gumbel_noise,
    int8_weight_only_linear,
    l2_normalize,
    linear_product,
    linear_products,
    matrix_product,
    newton_schulz_orthogonalize,
    pack_weight,
    quantize_int8,
    step_together,
    unpack_weight,
    wrapped_word,
)
from recurrent_layers import half_life_biases

# ---------------------------------------------------------------------------
# Shared by the dense tests

DENSE_CASES = [
    pytest.param("cpu", torch.float32, id="cpu-f32"),
    pytest.param("cpu", torch.float64, id="cpu-f64"),
    pytest.param("cuda", torch.float32, id="cuda-f32", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, id="cuda-bf16", marks=pytest.mark.gpu),
]
DENSE_BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3}


def dense_random(*shape, seed, device="cpu", dtype=torch.float32, scale=1.0):
    """A leading view of a larger buffer that is nan behind the view: what is read past the end shows."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
    buffer = torch.full((values.numel() + 4096,), float("nan"), dtype=dtype, device=device)
    buffer[: values.numel()] = values.flatten().to(buffer)
    return buffer[: values.numel()].view(shape)


def dense_run(op, inputs, do):
    """Outputs and gradients of op at inputs for the incoming gradient do."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = op(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, do.to(y).view_as(y))


def dense_parity(name, op, reference, inputs, bound=None, plain=None):
    """Output and every gradient against the float64 reference, at most twice as wrong as the same-dtype reference.

    plain stands for the reference in the inputs' dtype, where the reference itself sums better than usual.
    """
    shape = reference(*[x.double() for x in inputs]).shape
    do = dense_random(*shape, seed=99).to(inputs[0].device)
    got = dense_run(op, inputs, do)
    truth = dense_run(reference, [x.double() for x in inputs], do.to(got[0].dtype))
    low = dense_run(plain or reference, inputs, do)
    again = dense_run(op, inputs, do)
    for i, (g, t, w, a) in enumerate(zip(got, truth, low, again, strict=True)):
        assert_close(f"{name}[{i}]", g, t, w, rms_bound=bound or DENSE_BOUND[g.dtype])
        assert torch.equal(g, a), f"{name}[{i}] differs between two runs"


def dense_finite_difference(op, inputs, directions=3, step=1e-5):
    """Central differences of <op, do> along random directions against its own backward, in float64."""
    inputs = [x.double() for x in inputs]
    do = dense_random(*op(*inputs).shape, seed=77).double()
    _, *gradients = dense_run(op, inputs, do)
    for seed in range(directions):
        vs = [dense_random(*x.shape, seed=1000 + 10 * seed + i).double() for i, x in enumerate(inputs)]
        plus = (op(*[x + step * v for x, v in zip(inputs, vs, strict=True)]) * do).sum()
        minus = (op(*[x - step * v for x, v in zip(inputs, vs, strict=True)]) * do).sum()
        numeric = ((plus - minus) / (2 * step)).item()
        analytic = sum((g * v).sum().item() for g, v in zip(gradients, vs, strict=True))
        assert abs(numeric - analytic) <= 1e-6 * max(1.0, abs(analytic)), f"{numeric} against {analytic}"


# ---------------------------------------------------------------------------
# Matrix product


def product_expected(a, b, transpose_a, transpose_b):
    return (a.mT if transpose_a else a) @ (b.mT if transpose_b else b)


def product_check(device, dtype, m, n, k, batch, transpose_a, transpose_b):
    lead = () if batch is None else (batch,)
    a = dense_random(*lead, *((k, m) if transpose_a else (m, k)), seed=1, device=device, dtype=dtype)
    # sums of order 1, so that the comparison's absolute slack of 1e-6 is one float32 rounding
    b = dense_random(*lead, *((n, k) if transpose_b else (k, n)), seed=2, device=device, dtype=dtype, scale=k**-0.5)
    flags = dict(transpose_a=transpose_a, transpose_b=transpose_b)
    truth = product_expected(a.double(), b.double(), transpose_a, transpose_b)
    low = product_expected(a, b, transpose_a, transpose_b)
    got = matrix_product(a, b, **flags)
    assert_close("product", got, truth, low, rms_bound=DENSE_BOUND[dtype])
    assert torch.equal(got, matrix_product(a, b, **flags))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    start = dense_random(*lead, m, n, seed=3, device=device, dtype=wide)
    out = start.clone()
    assert matrix_product(a, b, **flags, out=out, accumulate=True) is out
    # bf16 operands, float32 sums: no rounding to 16 bits on the way
    assert_close("sum", out, start.double() + truth, low.to(wide) + start, rms_bound=max(1e-6, DENSE_BOUND[wide]))


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
@pytest.mark.parametrize("transpose_a, transpose_b", [(False, True), (False, False), (True, False), (True, True)])
# below, at and above tile edges; 130 x 300 takes the large bf16 tile with ragged sides
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (2, 63, 65), (65, 64, 127), (130, 300, 257), (257, 129, 64)])
def test_matrix_product_parity(device, dtype, m, n, k, transpose_a, transpose_b):
    product_check(device, dtype, m, n, k, None, transpose_a, transpose_b)


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
def test_matrix_product_batched(device, dtype):
    product_check(device, dtype, 65, 33, 70, 3, True, False)


def test_matrix_product_refuses_wrong_shapes():
    a, b = torch.zeros(3, 4), torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"agree in K.*\(3, 4\)"):
        matrix_product(a, b, transpose_b=False)
    with pytest.raises(ValueError, match="out must have shape"):
        matrix_product(a, b, out=torch.zeros(3, 4))
    with pytest.raises(ValueError, match="accumulate needs out"):
        matrix_product(a, b, accumulate=True)
    with pytest.raises(ValueError, match="float32 to accumulate"):
        matrix_product(a.bfloat16(), b.bfloat16(), out=torch.zeros(3, 5, dtype=torch.bfloat16), accumulate=True)
    with pytest.raises(ValueError, match="one dtype"):
        matrix_product(a, b.double())


def linear_check(device, dtype, rows, n_in, n_out):
    # both sums, over inputs and over rows, of order 1
    x = dense_random(rows, n_in, seed=4, device=device, dtype=dtype, scale=rows**-0.5)
    weight = dense_random(n_out, n_in, seed=5, device=device, dtype=dtype, scale=n_in**-0.5)
    # the reference sums in a tree, a library's product in a chain: 3.3e-6 off over 257 outputs where a tree is 1.3e-6
    dense_parity("linear", linear_product, linear_product_reference, [x, weight], plain=torch.nn.functional.linear)


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
# 1..128 rows are the skinny kernel (1,100 inputs: four splits with a ragged last one), 129 and more the large one
@pytest.mark.parametrize("rows, n_in, n_out", [(1, 1, 1), (2, 7, 5), (7, 1100, 63), (16, 129, 257), (17, 65, 64),
                                               (65, 127, 129), (129, 65, 33)])  # fmt: skip
def test_linear_product_parity(device, dtype, rows, n_in, n_out):
    linear_check(device, dtype, rows, n_in, n_out)


def test_linear_product_finite_differences_and_leading_shape():
    x, weight = dense_random(2, 3, 9, seed=6), dense_random(4, 9, seed=7)
    assert linear_product(x, weight).shape == (2, 3, 4)
    assert linear_product(x[:0], weight).shape == (0, 3, 4)
    dense_finite_difference(linear_product, [x, weight])


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
@pytest.mark.parametrize("n_in, n_out", [(1, 1), (7, 5), (9, 2), (257, 11), (512, 1001), (1100, 64), (3584, 96)])
def test_r17_linear_product_row_does_not_depend_on_the_other_rows(device, dtype, n_in, n_out):
    most = custom_kernels._SKINNY_MOST
    x = dense_random(most, n_in, seed=8, device=device, dtype=dtype)
    weight = dense_random(n_out, n_in, seed=9, device=device, dtype=dtype)
    single = torch.cat([linear_product(x[r : r + 1], weight) for r in range(most)])
    for rows in (*range(1, 18), 33, 112, most):
        assert torch.equal(linear_product(x[:rows], weight), single[:rows]), f"{rows} rows"
    loud = x.clone()
    loud[1:] = 1e4 * loud[1:].flip(0)
    assert torch.equal(linear_product(loud, weight)[0], single[0])


def together_check(device, dtype, rows, n_in, sizes):
    """Several products of one x: each within a product's bounds, each row's bits its own; 32-bit weights under 16."""
    x = dense_random(rows, n_in, seed=41, device=device, dtype=dtype)
    options = dict(device=device, dtype=dtype, scale=n_in**-0.5)
    matrices = [dense_random(n, n_in, seed=42 + i, **options) for i, n in enumerate(sizes)]
    wide = torch.promote_types(dtype, torch.float32)
    for weights in (matrices, [w.to(wide) for w in matrices]):
        got = linear_products(x, weights)
        for i, (y, w) in enumerate(zip(got, weights, strict=True)):
            assert y.is_contiguous() and y.dtype == w.dtype
            low = x.to(w.dtype) @ w.T
            assert_close(f"product {i}", y, x.double() @ w.double().T, low, rms_bound=DENSE_BOUND[w.dtype])
        for r in (0, rows - 1):
            for y, alone in zip(got, linear_products(x[r : r + 1], weights), strict=True):
                assert torch.equal(y[r : r + 1], alone)
    packed = [quantize_int8(w) for w in matrices]
    projections = [Projection(n_in, n) for n in sizes]
    for projection, codes in zip(projections, packed, strict=True):
        projection.take(codes)
    for y, codes in zip(step_together(x, projections), packed, strict=True):
        values = codes.codes.double() * codes.scale.double()[:, None]
        low = (x.to(dtype) @ codes.codes.to(dtype).T) * codes.scale.to(dtype)
        assert_close("8 bit", y, x.double() @ values.T, low, rms_bound=DENSE_BOUND[dtype])


def noise_check(device):
    """The kernel against the plain form: bits alike, so nothing but a logarithm's last place may differ."""
    seed = torch.tensor([0, 3, -1, 1 << 62], device=device)
    position = torch.tensor([0, 7, 1 << 40, 131_071], device=device)
    got = custom_kernels._gumbel_noise_launch(seed, position, 1500)
    want = custom_kernels._gumbel_noise_torch(seed, position, 1500)
    assert got.shape == (4, 1500) and torch.allclose(got, want, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("word", [0, 7, -1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), 3 << 90])
def test_a_seed_of_any_size_is_its_lowest_64_bits(word):
    got = wrapped_word(word)
    assert -(1 << 63) <= got < 1 << 63 and (got - word) % (1 << 64) == 0
    assert torch.equal(gumbel_noise(word, 5, 8), gumbel_noise(word % (1 << 64), 5, 8))


@pytest.mark.gpu
def test_noise_is_the_plain_forms():
    noise_check("cuda")
    assert torch.allclose(gumbel_noise(5, 9, 64, "cuda").cpu(), gumbel_noise(5, 9, 64), rtol=1e-12)


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
# one, two and three weights; a size that ends on a tile, one behind it; splits with a ragged last one
@pytest.mark.parametrize("rows, n_in, sizes", [(3, 96, (64,)), (7, 1100, (65, 130)), (17, 520, (64, 100, 192))])
def test_products_of_one_input_together(device, dtype, rows, n_in, sizes):
    together_check(device, dtype, rows, n_in, sizes)


def test_products_together_refuse_what_does_not_fit():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="one to three weights"):
        linear_products(x, [torch.zeros(3, 8)] * 4)
    with pytest.raises(ValueError, match="must have x's dtype or be float32"):
        linear_products(x, [torch.zeros(3, 8, dtype=torch.bfloat16)])
    with pytest.raises(ValueError, match="at most 128 rows"):
        linear_products(torch.zeros(129, 8), [torch.zeros(3, 8)])


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
@pytest.mark.parametrize("rows, n_in, n_out", [(1, 1, 1), (7, 1100, 63), (16, 128, 257), (112, 513, 40)])
def test_8_bit_weights_multiply_as_what_they_stand_for(device, dtype, rows, n_in, n_out):
    weight = dense_random(n_out, n_in, seed=21, device=device, dtype=dtype, scale=n_in**-0.5)
    weight[0] = 0
    weight[-1] *= 1e-30
    packed = quantize_int8(weight)
    assert (packed.codes.abs().amax() == 127 and not packed.codes[0].any()) or n_out == 1
    values = packed.codes.double() * packed.scale.double()[:, None]
    # half a step a row, whatever its size
    assert ((values - weight.double()).abs().amax(1) <= 0.501 * packed.scale.double()).all()
    x = dense_random(rows, n_in, seed=22, device=device, dtype=dtype)
    got, truth = int8_weight_only_linear(x, packed), x.double() @ values.T
    low = (x.to(dtype) @ packed.codes.to(dtype).T) * packed.scale.to(dtype)
    if n_out > 1:
        assert_close("8-bit product", got[:, 1:-1], truth[:, 1:-1], low[:, 1:-1], rms_bound=DENSE_BOUND[dtype])
    assert not got[:, 0].any()
    single = torch.cat([int8_weight_only_linear(x[r : r + 1], packed) for r in range(rows)])
    assert torch.equal(got, single)
    assert torch.equal(dequantize_int8(packed, torch.float32).double(), values.float().double())
    assert torch.equal(unpack_weight(pack_weight(weight, 8), dtype), dequantize_int8(packed, dtype))
    assert torch.equal(PackedINT8.from_dict(packed.to("cpu").to_dict()).codes, packed.codes.cpu())


def test_8_bit_weights_refuse_what_does_not_fit():
    packed = quantize_int8(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"got x \(2, 5\) and weight \(3, 4\)"):
        int8_weight_only_linear(torch.zeros(2, 5), packed)
    with pytest.raises(ValueError, match="at most 128 rows"):
        int8_weight_only_linear(torch.zeros(129, 4), packed)
    with pytest.raises(ValueError, match=r"packed tensors must be int8 \(out, in\) and \(out,\), got codes \(3, 4\)"):
        PackedINT8.from_dict({"codes": packed.codes, "scale": packed.scale[:2]})


def test_linear_product_refuses_wrong_shapes():
    with pytest.raises(ValueError, match=r"got x \(3, 4\) and weight \(5, 6\)"):
        linear_product(torch.zeros(3, 4), torch.zeros(5, 6))
    with pytest.raises(ValueError, match="2-D"):
        linear_product(torch.zeros(3, 4), torch.zeros(4))


# ---------------------------------------------------------------------------
# Row norms and gated activation


def _operands(op):
    """op's three results side by side, so that one gradient reaches all."""
    return lambda *inputs: torch.cat([x.flatten(2) for x in op(*inputs)], -1)


def _operands_plain(q, k, v, alpha):
    return l2_normalize_reference(q), l2_normalize_reference(k), (v * alpha[..., None]).to(v.dtype)


# heads in one program and in several, dimensions that fill no tile
OPERAND_SHAPES = [(1, 1, 1, 16, 16), (2, 5, 3, 32, 48), (1, 7, 28, 128, 128), (2, 3, 70, 64, 80)]


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
@pytest.mark.parametrize("B, T, H, K, V", OPERAND_SHAPES)
def test_delta_rule_operands_parity(device, dtype, B, T, H, K, V):
    operands_check(device, dtype, B, T, H, K, V)


def operands_check(device, dtype, B, T, H, K, V):
    q, k, v = (dense_random(B, T, H, n, seed=30 + i, device=device, dtype=dtype) for i, n in enumerate((K, K, V)))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    alpha = dense_random(B, T, H, seed=33, device=device, dtype=wide).sigmoid()
    dense_parity("operands", _operands(delta_rule_operands), _operands(_operands_plain), [q, k, v, alpha])
    # a token's bits are its own
    whole = delta_rule_operands(q, k, v, alpha)
    for got, want in zip(delta_rule_operands(*(x[:, -1:] for x in (q, k, v, alpha))), whole, strict=True):
        assert torch.equal(got, want[:, -1:])


def test_delta_rule_operands_finite_differences_and_refusals():
    inputs = [dense_random(1, 2, 3, n, seed=i) for i, n in enumerate((4, 4, 5))] + [dense_random(1, 2, 3, seed=4)]
    dense_finite_difference(_operands(delta_rule_operands), inputs)
    with pytest.raises(ValueError, match="must agree, got q"):
        delta_rule_operands(*inputs[:3], inputs[3][:, :1])
    with pytest.raises(ValueError, match="must have one dtype"):
        delta_rule_operands(inputs[0].double(), *inputs[1:])


def _gates_plain(logits, write, erase, decay, start):
    x, y, z = logits.unflatten(-1, (3, -1)).unbind(-2)
    return torch.cat([(x + 2 + write).sigmoid(), (y + 0.5 + erase).sigmoid(), -softplus(z + start + decay)], -1)


def _gates(*inputs):
    return torch.cat(delta_rule_gates(*inputs[:4], inputs[4].detach(), write_bias=2.0, erase_bias=0.5), -1)


def gates_check(device, dtype, *shape):
    """The last head forgets half in 1,048,576 tokens: its log gamma is 7e-7, with the relative error of the others."""
    heads = shape[-1]
    logits = dense_random(*shape[:-1], 3 * heads, seed=34, device=device, dtype=dtype)
    logits[..., -1] *= 1e-3
    offsets = [dense_random(heads, seed=35 + i, device=device, dtype=dtype, scale=0.1) for i in range(3)]
    start = half_life_biases(heads).to(logits)

    def alone(op):
        return lambda *inputs: op(*inputs, start.to(inputs[0].dtype))

    dense_parity("gates", alone(_gates), alone(_gates_plain), [logits, *offsets])
    got, want = (alone(op)(logits.double() if op is _gates_plain else logits, *(
        x.double() if op is _gates_plain else x for x in offsets)) for op in (_gates, _gates_plain))  # fmt: skip
    assert torch.allclose(got.double(), want, rtol=5e-6 if dtype == torch.float32 else 1e-12, atol=0)
    # far out on both sides nothing overflows, and a token's bits are its own
    far = torch.full_like(logits, 90.0)
    far[:, ::2] = -90.0
    assert alone(_gates)(far, *offsets).isfinite().all()
    assert torch.equal(alone(_gates)(logits[:, -1:], *offsets), got[:, -1:])


@pytest.mark.parametrize("device, dtype", [case for case in DENSE_CASES if "bf16" not in case.id])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 65, 28), (1, 700, 40)], ids=str)
def test_delta_rule_gates_parity(device, dtype, shape):
    gates_check(device, dtype, *shape)


def test_delta_rule_gates_finite_differences_and_refusals():
    inputs = [dense_random(2, 3, 9, seed=38), *(dense_random(3, seed=39 + i) for i in range(3))]
    start = half_life_biases(3).double()
    dense_finite_difference(lambda *leaves: _gates(*leaves, start), inputs)
    with pytest.raises(ValueError, match=r"\(B, T, 3H\) and offsets \(H,\) must agree, got logits \(2, 3, 8\)"):
        delta_rule_gates(inputs[0][..., :8], *inputs[1:], start.float(), write_bias=0.0, erase_bias=0.0)
    with pytest.raises(ValueError, match="must have 32 or 64 bit"):
        delta_rule_gates(*inputs, start, write_bias=0.0, erase_bias=0.0)


# 2 and 63 rows of a head, more rows than one program holds, rows wider than one warp's share; 3584 is no power of two
NORM_SHAPES = [(1, 2), (63, 32), (129, 128), (3, 257), (2, 65, 64), (5, 3584)]


def offset_ops(x, residual, weight):
    """The weight as an offset from a gain of 0.3."""

    def gained(reference):
        return lambda *inputs: reference(*inputs[:-1], (0.3 * (1 + inputs[-1])).to(inputs[-1].dtype))

    dense_parity("rmsnorm", partial(fused_rmsnorm, start=0.3), gained(fused_rmsnorm_reference), [x, weight])
    dense_parity("residual", partial(fused_residual_sphere, start=0.3), gained(fused_residual_sphere_reference),
                 [residual, x, weight])  # fmt: skip


def norm_ops(device, dtype, shape):
    x = dense_random(*shape, seed=10, device=device, dtype=dtype)
    residual = dense_random(*shape, seed=11, device=device, dtype=dtype)
    weight = dense_random(shape[-1], seed=12, device=device, dtype=dtype)
    dense_parity("rmsnorm", fused_rmsnorm, fused_rmsnorm_reference, [x, weight])
    dense_parity("sphere", fused_rmsnorm, fused_rmsnorm_reference, [x])
    dense_parity("l2", l2_normalize, l2_normalize_reference, [x])
    dense_parity("residual", fused_residual_sphere, fused_residual_sphere_reference, [residual, x, weight])
    offset_ops(x, residual, weight)
    dense_parity("swiglu", fused_swiglu, fused_swiglu_reference, [x, residual])


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_norm_parity(device, dtype, shape):
    norm_ops(device, dtype, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# the widest row; enough rows that every program of the backward walks several tiles
@pytest.mark.parametrize("shape", [(3, 16384), (2, 8193), (1500, 3584), (70000, 64)], ids=str)
def test_norm_parity_large(dtype, shape):
    norm_ops("cuda", dtype, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_gain_of_another_dtype(dtype):
    x = dense_random(65, 257, seed=13, device="cuda", dtype=torch.bfloat16)
    weight = dense_random(257, seed=14, device="cuda", dtype=dtype)
    dense_parity("rmsnorm", fused_rmsnorm, lambda x, w: fused_rmsnorm_reference(x, w).to(x.dtype), [x, weight])


def test_norm_finite_differences():
    x, residual, weight = (dense_random(*s, seed=15 + i) for i, s in enumerate([(5, 33), (5, 33), (33,)]))
    dense_finite_difference(fused_rmsnorm, [x, weight])
    dense_finite_difference(l2_normalize, [x])
    dense_finite_difference(fused_residual_sphere, [residual, x, weight])
    dense_finite_difference(partial(fused_rmsnorm, start=0.3), [x, weight])
    dense_finite_difference(partial(fused_residual_sphere, start=0.3), [residual, x, weight])
    dense_finite_difference(fused_swiglu, [x, residual])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=st.integers(1, 40), width=st.integers(2, 300), seed=st.integers(0, 2**20))
def test_norm_any_shape(rows, width, seed):
    x = dense_random(rows, width, seed=seed).double()
    norm = fused_rmsnorm(x).norm(dim=-1)
    torch.testing.assert_close(norm, torch.full_like(norm, width**0.5), rtol=1e-3, atol=0)
    torch.testing.assert_close(l2_normalize(x), l2_normalize_reference(x))


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-20, 1e-4, 1e4, 1e16, 1e25, 1e30])
def test_norm_extreme_rows(device, dtype, scale):
    rows = [dense_random(3, 257, seed=18 + i, device=device) for i in range(2)]
    x, residual = (row / row.abs().amax() * scale for row in rows)
    x, residual = x.to(dtype), residual.to(dtype)
    weight = dense_random(257, seed=20, device=device, dtype=dtype)
    do = torch.ones_like(x)
    for op, reference, inputs in (
        (fused_rmsnorm, fused_rmsnorm_reference, [x, weight]),
        (l2_normalize, l2_normalize_reference, [x]),
        (fused_residual_sphere, fused_residual_sphere_reference, [residual, x, weight]),
    ):
        got = dense_run(op, inputs, do)
        assert all(torch.isfinite(g).all() for g in got), f"{op.__name__} at {scale}"
        if scale <= 1e16:
            truth = reference(*[i.double() for i in inputs])
            error = (got[0].double() - truth).norm() / (truth.norm() + 1e-300)
            assert error <= DENSE_BOUND[dtype], f"{op.__name__} at {scale}: {error:.1e}"


def test_norm_is_the_sphere_of_radius_59_866_at_full_width():
    norm = fused_rmsnorm(dense_random(2, 3584, seed=21)).norm(dim=-1)
    torch.testing.assert_close(norm, torch.full_like(norm, 59.866), rtol=1e-5, atol=0)


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
def test_swiglu_large_gate(device, dtype):
    gate = torch.tensor([-1e30, -1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4, 1e30], device=device, dtype=dtype)
    up = torch.full_like(gate, 2.0)
    y, dgate, dup = dense_run(fused_swiglu, [gate, up], torch.ones_like(gate))
    # silu(g) is g above and 0 below; its slope is 1 and 0 there, 0.5 at zero
    expected = torch.where(gate > 0, 2 * gate, 0.0)
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(dup, torch.where(gate > 0, gate, 0.0), rtol=1e-2, atol=1e-6)
    slope = torch.where(gate > 0, 2.0, torch.where(gate < 0, 0.0, 1.0)).to(dtype)
    torch.testing.assert_close(dgate, slope, rtol=1e-2, atol=1e-6)


def test_norm_refuses_wrong_shapes():
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"shape \(8,\), got \(7,\)"):
        fused_rmsnorm(x, torch.ones(7))
    with pytest.raises(ValueError, match="16384 wide"):
        l2_normalize(torch.zeros(1, 16385))
    with pytest.raises(ValueError, match="residual's shape"):
        fused_residual_sphere(x, torch.zeros(3, 9), torch.ones(8))
    with pytest.raises(ValueError, match="one shape and dtype"):
        fused_swiglu(x, x.double())


# ---------------------------------------------------------------------------
# Chunked cross entropy


def ce_inputs(n, d, w, device="cpu", dtype=torch.float32, ignored=0.3):
    hidden = dense_random(n, d, seed=30, device=device, dtype=dtype)
    weight = dense_random(w, d, seed=31, device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(32)
    targets = torch.randint(0, w, (n,), generator=generator)
    drop = torch.rand(n, generator=generator) < ignored
    drop[0] = False
    targets = targets.masked_fill(drop, -100)
    loss_weights = torch.rand(n, generator=generator) + 0.1
    return hidden, weight, targets.to(device), loss_weights.to(device)


def ce_parity(device, dtype, n, d, w, weight_dtype=None, bound=None, **options):
    hidden, weight, targets, loss_weights = ce_inputs(n, d, w, device, dtype)
    # the master is what a cast to hidden's dtype represents, so that both products see the same numbers
    weight = weight.to(weight_dtype or dtype)
    if options.pop("weighted", False):
        options["loss_weights"] = loss_weights

    def op(h, u):
        return fused_chunked_cross_entropy(h, u, targets, **options)

    def reference(h, u):
        return fused_chunked_cross_entropy_reference(h, u.to(h.dtype), targets, **options)[0]

    do = torch.tensor(1.7)
    truth = dense_run(reference, [hidden.double(), weight.double()], do)
    low = dense_run(reference, [hidden, weight], do)
    got, again = (dense_run(op, [hidden, weight], do) for _ in range(2))
    assert got[1].dtype == hidden.dtype and got[2].dtype == weight.dtype
    limit = bound or DENSE_BOUND[dtype]
    loss_limit = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-6}[dtype]
    # the loss is exact to float32 sums whatever the storage of the logits
    assert abs(got[0].double() - truth[0]) <= loss_limit * (1 + abs(truth[0])), f"loss {got[0]} against {truth[0]}"
    for i, name in ((1, "dhidden"), (2, "dweight")):
        assert_close(name, got[i], truth[i], low[i], rms_bound=limit)
    assert all(torch.equal(g, a) for g, a in zip(got, again, strict=True))
    _, argmax = fused_chunked_cross_entropy(hidden, weight, targets, **options, return_argmax=True)
    top = fused_chunked_cross_entropy_reference(hidden.double(), weight.double(), targets, **options)[1]
    assert argmax.dtype == torch.int64 and torch.equal(argmax, top)


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
@pytest.mark.parametrize(
    "n, d, w", [(1, 8, 100), (1, 33, 4097), (63, 17, 100), (257, 64, 5000), (63, 129, 4097), (257, 24, 2)]
)
def test_cross_entropy_parity(device, dtype, n, d, w):
    ce_parity(device, dtype, n, d, w)


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
def test_cross_entropy_weights_denominator_and_scale(device, dtype):
    ce_parity(device, dtype, 63, 33, 300, weighted=True)
    ce_parity(device, dtype, 63, 33, 300, weighted=True, denominator=41.5, logit_scale=0.25)
    ce_parity(device, dtype, 63, 33, 300, denominator=torch.tensor(17.0, device=device), logit_scale=1.5)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
# two and a bit token blocks; classes in one launch (bf16) and in cast ranges of 4,096 (float32 master)
def test_cross_entropy_several_blocks(weight_dtype):
    ce_parity("cuda", torch.bfloat16, 4500, 64, 9000, weight_dtype=weight_dtype)


def test_cross_entropy_several_blocks_on_cpu():
    ce_parity("cpu", torch.float64, 4500, 5, 70)


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
def test_cross_entropy_one_class(device, dtype):
    hidden, weight, targets, _ = ce_inputs(5, 8, 1, device, dtype, ignored=0.0)
    got = dense_run(lambda h, u: fused_chunked_cross_entropy(h, u, targets), [hidden, weight], torch.tensor(1.0))
    assert all((g == 0).all() for g in got)


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
def test_b036_cross_entropy_without_any_supervised_token(device, dtype):
    hidden, weight, targets, loss_weights = ce_inputs(65, 16, 50, device, dtype)
    ignored = torch.full_like(targets, -100)
    for t, options in (
        (ignored, {}),
        (ignored, dict(denominator=3.0)),
        (ignored, dict(denominator=0.0)),
        (targets, dict(loss_weights=torch.zeros_like(loss_weights))),
    ):
        def op(h, u, t=t, options=options):
            return fused_chunked_cross_entropy(h, u, t, **options)

        got = dense_run(op, [hidden, weight], torch.tensor(1.0))
        assert all((g == 0).all() for g in got)
    _, argmax = fused_chunked_cross_entropy(hidden, weight, ignored, return_argmax=True)
    top = fused_chunked_cross_entropy_reference(hidden.double(), weight.double(), targets)[1]
    assert torch.equal(argmax, top)


@pytest.mark.parametrize("device, dtype", DENSE_CASES[1:])
def test_b034_cross_entropy_micro_batches_share_one_denominator(device, dtype):
    hidden, weight, targets, _ = ce_inputs(1200, 16, 60, device, dtype, ignored=0.0)
    # 1 supervised token in the first micro-batch of 200, 999 in the second of 1,000
    targets[1:200], targets[200] = -100, -100
    parts = [slice(0, 200), slice(200, 1200)]
    assert [(targets[p] != -100).sum().item() for p in parts] == [1, 999]
    one = torch.tensor(1.0)
    whole = dense_run(lambda h, u: fused_chunked_cross_entropy(h, u, targets), [hidden, weight.float()], one)
    halves = [
        dense_run(
            lambda h, u, p=p: fused_chunked_cross_entropy(h, u, targets[p], denominator=1000.0),
            [hidden[p], weight.float()],
            one,
        )
        for p in parts
    ]
    limit = 1e-6 if dtype != torch.bfloat16 else 1e-5
    torch.testing.assert_close(halves[0][0] + halves[1][0], whole[0], rtol=1e-6, atol=0)
    error = (halves[0][2] + halves[1][2] - whole[2]).norm() / whole[2].norm()
    assert error <= limit
    error = (torch.cat([halves[0][1], halves[1][1]]).double() - whole[1].double()).norm() / whole[1].double().norm()
    assert error <= limit


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
def test_cross_entropy_argmax_takes_the_lowest_of_equals(device, dtype):
    hidden, weight, targets, _ = ce_inputs(40, 8, 700, device, dtype)
    # small integers: every logit is exact, so that equal classes are equal bits on every path
    hidden, weight = (2 * hidden).round().clamp(-4, 4), weight.round().clamp(-3, 3)
    # the same class three times, twice in one tile and once in another; then all classes alike
    weight[600], weight[130], weight[131] = 4, 4, 4
    hidden[::2] = 2
    _, argmax = fused_chunked_cross_entropy(hidden, weight, targets, return_argmax=True)
    assert (argmax[::2] == 130).all()
    _, argmax = fused_chunked_cross_entropy(hidden, weight[:1].repeat(700, 1), targets, return_argmax=True)
    assert (argmax == 0).all()


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
def test_cross_entropy_inplace_reuses_hidden(device, dtype):
    hidden, weight, targets, _ = ce_inputs(129, 16, 90, device, dtype)
    one = torch.tensor(1.0)
    expected = dense_run(lambda h, u: fused_chunked_cross_entropy(h, u, targets), [hidden, weight], one)
    leaf, u = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    h = leaf * 1.0
    storage = h.data_ptr()
    loss = fused_chunked_cross_entropy(h, u, targets, inplace=True)
    dh, du = torch.autograd.grad(loss, [h, u])
    assert dh.data_ptr() == storage
    assert torch.equal(dh, expected[1]) and torch.equal(du, expected[2]) and torch.equal(loss, expected[0])
    # a producer that saved hidden for its own backward is told, not fed the gradient
    h = leaf.exp()
    loss = fused_chunked_cross_entropy(h, u, targets, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_cross_entropy_no_grad_second_backward_and_finite_differences():
    hidden, weight, targets, loss_weights = ce_inputs(7, 5, 11)
    with torch.no_grad():
        assert not fused_chunked_cross_entropy(hidden.requires_grad_(), weight, targets).requires_grad
    hidden = hidden.detach()
    loss = fused_chunked_cross_entropy(hidden.requires_grad_(), weight, targets)
    loss.backward(retain_graph=True)
    assert weight.grad is None
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()

    def op(h, u):
        return fused_chunked_cross_entropy(h, u, targets, loss_weights=loss_weights.double(), logit_scale=0.7).view(1)

    dense_finite_difference(op, [hidden.detach(), weight])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(n=st.integers(1, 70), d=st.integers(1, 20), w=st.integers(2, 200))
def test_cross_entropy_any_shape(n, d, w):
    ce_parity("cpu", torch.float64, n, d, w, weighted=True)


@pytest.mark.gpu
def test_cross_entropy_large_logits_keep_the_loss():
    # logits near 30: stored in bf16 they would be off by up to 0.06
    hidden, weight, targets, _ = ce_inputs(300, 64, 3000, "cuda", torch.bfloat16)
    targets = (hidden.double() @ weight.double().T).argmax(-1)
    loss = fused_chunked_cross_entropy(hidden, weight, targets, logit_scale=1.2)
    truth, _ = fused_chunked_cross_entropy_reference(hidden.double(), weight.double(), targets, logit_scale=1.2)
    assert abs(loss.double() - truth) <= 2e-6 * (1 + truth)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_memory_bound(weight_dtype):
    n, d, w = 16384, 512, 65536
    hidden = torch.randn(n, d, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(w, d, device="cuda") / 23).to(weight_dtype).requires_grad_()
    targets = torch.randint(0, w, (n,), device="cuda")
    # compile first: the compiler's own buffers are not the operation's
    fused_chunked_cross_entropy(hidden[:64], weight, targets[:64]).backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused_chunked_cross_entropy(hidden, weight, targets).backward()
    gradients = hidden.grad.nbytes + weight.grad.nbytes
    extra = torch.cuda.max_memory_allocated() - before - gradients
    assert extra < 500e6, f"{extra / 1e6:.0f} MB beyond inputs and gradients"


@pytest.mark.gpu
def test_b015_dense_offsets_past_2_31():
    # 2.5e9 elements: the last rows must equal the same rows alone
    rows, width = 700_000, 3584
    x = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16).normal_()
    assert x.numel() > 2**31
    last, weight = x[-9:].clone(), dense_random(width, seed=33, device="cuda")
    assert torch.equal(fused_rmsnorm(x, weight)[-9:], fused_rmsnorm(last, weight))
    assert torch.equal(fused_residual_sphere(x, x, weight)[-9:], fused_residual_sphere(last, last, weight))
    assert torch.equal(fused_swiglu(x, x)[-9:], fused_swiglu(last, last))
    leaf = x.requires_grad_()
    (dx,) = torch.autograd.grad(fused_rmsnorm(leaf), leaf, x)
    (dlast,) = torch.autograd.grad(fused_rmsnorm(last.requires_grad_()), last, last.detach())
    assert torch.equal(dx[-9:], dlast)
    del leaf, dx
    x = x.detach()
    weight = dense_random(3200, 64, seed=34, device="cuda", dtype=torch.bfloat16)
    out = matrix_product(x[:, -64:], weight)
    assert out.numel() > 2**31
    expected = x[-9:, -64:].double() @ weight.double().T
    assert (out[-9:].double() - expected).norm() <= 5e-3 * expected.norm()


def test_cross_entropy_refuses_wrong_input():
    hidden, weight, targets, loss_weights = ce_inputs(5, 4, 6)
    with pytest.raises(ValueError, match=r"got hidden \(5, 4\), weight \(6, 3\)"):
        fused_chunked_cross_entropy(hidden, weight[:, :3], targets)
    with pytest.raises(ValueError, match="targets must be"):
        fused_chunked_cross_entropy(hidden, weight, targets[:4])
    with pytest.raises(ValueError, match="int64"):
        fused_chunked_cross_entropy(hidden, weight, targets.int())
    with pytest.raises(ValueError, match="loss_weights must be"):
        fused_chunked_cross_entropy(hidden, weight, targets, loss_weights=loss_weights[:4])
    for wrong in (6, -1):
        targets[2] = wrong
        with pytest.raises(ValueError, match=rf"in 0..5, got \[{wrong}\]"):
            fused_chunked_cross_entropy(hidden, weight, targets)


@pytest.mark.gpu
def test_cross_entropy_target_that_is_no_class_is_nan_on_cuda():
    hidden, weight, targets, _ = ce_inputs(5, 4, 6, "cuda", torch.float32)
    targets[2] = 6
    assert fused_chunked_cross_entropy(hidden, weight, targets).isnan()


# ---------------------------------------------------------------------------
# Newton-Schulz orthogonalisation


def ns_matrices(r, c):
    """Ordinary and degenerate matrices by name; B049's list and more."""
    x = dense_random(r, c, seed=40)
    row, column, one = torch.zeros(r, c), torch.zeros(r, c), torch.zeros(r, c)
    row[r // 2] = x[0]
    column[:, c // 3] = x[:, 0]
    one[r - 1, c // 2] = -1.0
    return dict(
        gaussian=x,
        one_row=row,
        one_column=column,
        one_element=one,
        rank_one=x[:, :1] @ x[:1],
        all_ones=torch.ones(r, c),
        decaying=x * torch.logspace(0, -6, c),
        identity=torch.eye(r, c),
    )


def ns_norm(x):
    return torch.linalg.matrix_norm(x.double(), 2).item()


NS_SHAPES = [(1, 1), (1, 50), (50, 1), (2, 63), (64, 64), (64, 257), (257, 64), (129, 127)]


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
@pytest.mark.parametrize("shape", NS_SHAPES, ids=str)
def test_b049_newton_schulz_norm_band(device, dtype, shape):
    for name, matrix in ns_matrices(*shape).items():
        out = newton_schulz_orthogonalize(matrix.to(device, dtype))
        assert out.shape == matrix.shape and out.dtype == dtype
        assert torch.isfinite(out).all(), name
        assert 0.96 <= ns_norm(out) <= 1.01, f"{name} {shape}: {ns_norm(out)}"
    zero = newton_schulz_orthogonalize(torch.zeros(shape, device=device, dtype=dtype))
    assert (zero == 0).all()


@pytest.mark.parametrize("device, dtype", DENSE_CASES[:3])
@pytest.mark.parametrize("shape", NS_SHAPES, ids=str)
def test_newton_schulz_singular_values(device, dtype, shape):
    # rounding noise in a degenerate matrix's other directions is raised a thousandfold by the steps
    bound = {torch.float64: 1e-10, torch.float32: 2e-4}[dtype]
    for name, matrix in ns_matrices(*shape).items():
        got = newton_schulz_orthogonalize(matrix.to(device, dtype)).double().cpu()
        truth = newton_schulz_orthogonalize_reference(matrix)
        if dtype == torch.float64 and name == "rank_one":
            matrix = matrix.double()
        assert (got - truth).norm() <= max(bound, 2e-4 if name == "rank_one" else 0) * truth.norm(), name


@pytest.mark.parametrize("exponent", [-44, -40, -30, -20, -7, 0, 7, 20, 30, 38])
def test_newton_schulz_any_scale(exponent):
    matrix = dense_random(33, 65, seed=41).double()
    # at 1e-44 float32 holds only a few steps per element
    small = (matrix / matrix.abs().max() * 10.0**exponent).float()
    out = newton_schulz_orthogonalize(small)
    assert 0.96 <= ns_norm(out) <= 1.01
    if -30 <= exponent <= 30:
        truth = newton_schulz_orthogonalize_reference(matrix)
        assert (out.double() - truth).norm() <= 1e-5 * truth.norm()


@pytest.mark.parametrize("device, dtype", DENSE_CASES)
@pytest.mark.parametrize("shape", [(3, 65, 129), (2, 129, 65)], ids=str)
def test_newton_schulz_batch_equals_its_members_and_leaves_the_argument(device, dtype, shape):
    x = dense_random(*shape, seed=42, device=device, dtype=dtype)
    before = x.clone()
    out = newton_schulz_orthogonalize(x)
    assert torch.equal(x, before)
    assert torch.equal(out, newton_schulz_orthogonalize(x))
    members = torch.stack([newton_schulz_orthogonalize(m) for m in x])
    # the norms of a batch may be summed in another order than those of one matrix; rounded to bf16, one ulp may flip
    slack = DENSE_BOUND[torch.float32 if dtype == torch.bfloat16 else dtype]
    ulp = 2**-7 * members.double().abs() if dtype == torch.bfloat16 else 0.0
    assert ((out.double() - members.double()).abs() <= slack + ulp).all()
    # a view with any strides is the same matrix
    strided = newton_schulz_orthogonalize(x.mT.contiguous().mT)
    assert ((strided.double() - out.double()).abs() <= slack + ulp).all()


def ns_float16(matrix, product):
    """The iteration as CUDA runs it from side 256 on: float16 operands and results, float32 sums."""
    x = custom_kernels._newton_schulz_prescale(
        matrix.float().unsqueeze(0), custom_kernels._NS_LOW_SCALE, torch.float16
    )
    out = torch.empty_like(x, dtype=torch.float32)
    x, last = (x.mT, out.mT) if x.shape[1] > x.shape[2] else (x, out)
    custom_kernels._newton_schulz_iterate(x, custom_kernels._NS_LOW_SCALE, last, 5, product)
    return out[0]


def ns_float16_product(a, b, out, alpha=1.0, add=None, beta=0.0, diagonal=0.0, symmetric=True):
    total = torch.matmul(a.float(), b.float()) * alpha
    total += 0.0 if add is None else beta * add.float()
    total += diagonal * torch.eye(total.shape[2]) if diagonal else 0.0
    out.copy_(total.triu() + total.triu(1).mT if symmetric else total)


def ns_spectra(rows, columns):
    """Spectra on which iterations of A alone fail: one value far above, two groups, long tails, few columns."""
    rank = min(rows, columns)
    u, v = (torch.linalg.qr(dense_random(n, rank, seed=n)).Q for n in (rows, columns))
    index = torch.arange(rank)
    spectra = {
        "one above": torch.where(index == 0, 1.0, 0.01),
        "two groups": torch.where(index < rank // 2, 1.0, 0.001),
        "power": 1 / (1.0 + index),
        "steep": 10.0 ** (-8.0 * index / rank),
        "flat": torch.ones(rank),
    }
    matrices = {name: u * s @ v.T for name, s in spectra.items()}
    matrices["scaled columns"] = dense_random(rows, columns, seed=5) * torch.logspace(0, -6, columns)
    return ns_matrices(rows, columns) | matrices


@pytest.mark.parametrize("shape", [(256, 256), (256, 600), (600, 256)], ids=str)
def test_newton_schulz_float16_error_by_emulation(shape):
    for name, matrix in ns_spectra(*shape).items():
        out = ns_float16(matrix, ns_float16_product)
        assert 0.96 <= ns_norm(out) <= 1.01, f"{name} {shape}: {ns_norm(out)}"
        truth = newton_schulz_orthogonalize_reference(matrix)
        # rounding noise in directions of next to no length is raised a thousandfold; bf16 steps on X were 0.1 to 1 off
        noisy = {"rank_one": 0.3, "steep": 0.05, "two groups": 0.03}.get(name, 0.015)
        assert (out.double() - truth).norm() <= noisy * truth.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 256), (300, 1025), (1025, 300), (512, 1792)], ids=str)
def test_newton_schulz_float16_kernel(dtype, shape):
    matrices = {name: matrix.to("cuda", dtype) for name, matrix in ns_spectra(*shape).items()}
    together = newton_schulz_orthogonalize(torch.stack([*matrices.values()]))
    for (name, matrix), beside in zip(matrices.items(), together, strict=True):
        out = newton_schulz_orthogonalize(matrix)
        assert (beside.double() - out.double()).norm() <= 5e-3 * out.double().norm(), name
        assert torch.equal(out, newton_schulz_orthogonalize(matrix)), name
        assert torch.isfinite(out).all(), name
        assert 0.96 <= ns_norm(out) <= 1.01, f"{name} {shape}: {ns_norm(out)}"
        if name not in ("rank_one", "steep", "two groups"):
            truth = newton_schulz_orthogonalize_reference(matrix)
            assert (out.double() - truth).norm() <= 1.5e-2 * truth.norm(), name


@settings(max_examples=25, deadline=None, derandomize=True)
@given(r=st.integers(1, 70), c=st.integers(1, 70), rank=st.integers(1, 3), log_scale=st.integers(-30, 30))
def test_newton_schulz_any_shape(r, c, rank, log_scale):
    matrix = dense_random(r, rank, seed=43) @ dense_random(rank, c, seed=44) * 10.0**log_scale
    out = newton_schulz_orthogonalize(matrix)
    assert 0.96 <= ns_norm(out) <= 1.01


def test_newton_schulz_other_types_and_refusals():
    for dtype in (torch.float16, torch.bfloat16):
        out = newton_schulz_orthogonalize(dense_random(9, 30, seed=45).to(dtype))
        assert out.dtype == dtype and 0.96 <= ns_norm(out) <= 1.01
    assert newton_schulz_orthogonalize(torch.zeros(0, 4)).shape == (0, 4)
    with pytest.raises(ValueError, match=r"got \(3,\)"):
        newton_schulz_orthogonalize(torch.zeros(3))
    with pytest.raises(ValueError, match=r"float dtype, got torch\.int64"):
        newton_schulz_orthogonalize(torch.zeros(3, 3, dtype=torch.int64))


@pytest.mark.gpu
def test_dense_refuses_float64_on_cuda():
    x = torch.zeros(4, 4, device="cuda", dtype=torch.float64)
    targets = torch.zeros(4, dtype=torch.int64, device="cuda")
    for call in (
        lambda: matrix_product(x, x),
        lambda: linear_product(x, x),
        lambda: fused_rmsnorm(x),
        lambda: l2_normalize(x),
        lambda: fused_residual_sphere(x, x, x[0]),
        lambda: fused_swiglu(x, x),
        lambda: fused_chunked_cross_entropy(x, x, targets),
        lambda: newton_schulz_orthogonalize(x),
    ):
        with pytest.raises(ValueError, match=r"on CUDA, got torch\.float64"):
            call()


# ---------------------------------------------------------------------------
# Interpreter and compiler

DENSE_INTERPRETED = """
import torch
import test_custom_kernels as t
f32 = torch.float32
for m, n, k, ta, tb in ((2, 63, 65, False, True), (65, 129, 33, True, False)):
    t.product_check("cpu", f32, m, n, k, None, ta, tb)
t.product_check("cpu", f32, 65, 33, 70, 2, True, True)
for rows, n_in, n_out in ((1, 7, 5), (3, 1100, 63), (17, 65, 64)):
    t.linear_check("cpu", f32, rows, n_in, n_out)
for shape in ((1, 2), (63, 32), (3, 257)):
    t.norm_ops("cpu", f32, shape)
t.noise_check("cpu")
t.together_check("cpu", f32, 7, 1100, (65, 130))
t.together_check("cpu", f32, 17, 520, (64, 100, 192))
t.operands_check("cpu", f32, 2, 3, 3, 32, 48)
t.operands_check("cpu", f32, 1, 2, 70, 64, 80)
t.gates_check("cpu", f32, 2, 65, 28)
t.gates_check("cpu", f32, 1, 1, 1)
t.ce_parity("cpu", f32, 65, 17, 300, weighted=True, denominator=9.0, logit_scale=0.5)
t.ce_parity("cpu", f32, 2, 9, 4097)
t.test_b036_cross_entropy_without_any_supervised_token("cpu", f32)
t.test_cross_entropy_argmax_takes_the_lowest_of_equals("cpu", f32)
t.test_cross_entropy_inplace_reuses_hidden("cpu", f32)
for shape in ((1, 50), (70, 33), (65, 70)):
    matrix = t.ns_matrices(*shape)["gaussian"]
    got, truth = t.newton_schulz_orthogonalize(matrix), t.newton_schulz_orthogonalize_reference(matrix)
    assert (got - truth).norm() <= 1e-5 * truth.norm(), shape
    low, same = (t.ns_float16(matrix, p) for p in (t.custom_kernels._newton_schulz_product, t.ns_float16_product))
    assert (low - same).norm() <= 2e-3 * same.norm(), shape
print("interpreted")
"""


@pytest.mark.interpret
def test_dense_kernels_interpreted():
    here = os.path.dirname(os.path.abspath(__file__))
    script = DENSE_INTERPRETED.replace("test_custom_kernels", os.path.splitext(os.path.basename(__file__))[0])
    paths = [here, os.path.dirname(os.path.abspath(custom_kernels.__file__)), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=here)
    assert run.returncode == 0 and "interpreted" in run.stdout, run.stderr[-3000:]


def _dense_types(pointers: dict, ints: str, floats: str = "", div: str = "", tag: str = "") -> dict:
    types = dict(pointers)
    types |= {name: "i32" for name in ints.split()} | {name: "fp32" for name in floats.split()}
    return types | {"_div": div.split(), "_tag": tag}


def _dense_operands(dt: str, tile: dict, turned: str) -> tuple[dict, dict]:
    """Types of a product's two descriptors, stored as letters of `turned` say, and the kernel's flags for them."""
    a, b = [tile["BM"], tile["BK"]], [tile["BK"], tile["BN"]]
    flags = dict(A_TURNED=turned[0] == "t", B_TURNED=turned[1] == "t")
    boxes = dict(a_desc=a[::-1] if flags["A_TURNED"] else a, b_desc=b[::-1] if flags["B_TURNED"] else b)
    return {name: f"tensordesc<{dt}[1,{box[0]},{box[1]}]>" for name, box in boxes.items()}, flags


def _dense_cases() -> list:
    """(kernel, argument types, constants, options): what the launchers pick, with the product's alignment.

    A stride of 1 is a constant, as the launcher's specialisation makes it.
    """
    cases = []
    small = dict(num_warps=4, num_stages=4)
    for dt in ("bf16", "fp32"):
        big = (dict(BM=128, BN=256, BK=64), dict(num_warps=8, num_stages=4))
        exact = (dict(BM=64, BN=64, BK=32), dict(num_warps=4, num_stages=2))
        tile, options = big if dt == "bf16" else exact
        pointer = f"*{dt}"
        # a linear layer, its input gradient, the loss's sum over class ranges, a weight gradient, the loss's own
        for turned, accumulate in (("nt", False), ("nn", False), ("nn", True), ("tn", False), ("tn", True)):
            for t, o in ((tile, options), (dict(BM=64, BN=64, BK=64), small))[: 1 + (dt == "bf16")]:
                operands, flags = _dense_operands(dt, t, turned)
                out = "*fp32" if accumulate else pointer
                names = "M N K s_ob s_om"
                types = _dense_types(operands | dict(p_out=out), names, div=names, tag=f"{dt} {turned}")
                constants = {"s_on": 1, "ACCUMULATE": accumulate, "GROUP": 8} | flags | t
                cases.append(("_matrix_product_kernel", types, constants, o))
        names = "R N0 N1 N2 K s_xr s_wn KS"
        for out in ("*fp32", pointer):
            for scaled in (False, True):
                scales = ("p_scale0", "p_scale1", "p_scale2")
                pointers = dict.fromkeys(("p_w0", "p_w1", "p_w2"), "*i8" if scaled else pointer)
                pointers |= dict(p_x=pointer, p_out=out) | (dict.fromkeys(scales, "*fp32") if scaled else {})
                types = _dense_types(pointers, names, div="K s_xr s_wn KS", tag=dt)
                constants = dict(s_xk=1, s_wk=1, SCALED=scaled, BR=16, BN=64 if dt == "bf16" else 16,
                                 BK=128 if dt == "bf16" else 64)  # fmt: skip
                constants |= {} if scaled else dict.fromkeys(scales)
                cases.append(("_skinny_product_kernel", types, constants, small))
        types = _dense_types(dict(p_seed="*i64", p_position="*i64", p_out="*fp64"), "W", tag=dt)
        golden = dict(BLOCK=1024, GOLDEN=custom_kernels._NOISE_GOLDEN)
        cases.append(("_gumbel_noise_kernel", types, golden, dict(num_warps=4)))
        types = _dense_types(dict(p_partial="*fp32", p_out=pointer), "n", tag=dt)
        cases.append(("_skinny_sum_kernel", types, dict(SPLITS=8, BN=1024), dict(num_warps=4)))
        for width, BR, BD, warps in ((128, 32, 128, 8), (3584, 1, 4096, 8), (16384, 1, 16384, 16)):
            constants, options_n = dict(BR=BR, BD=BD), dict(num_warps=warps)
            stages = dict(STAGES=3 if BD <= 4096 else 1)
            tag, scalars = f"{dt} {width}", "inv_d eps base slope"
            for gain in (True, False):
                w = dict(p_w="*fp32") if gain else {}
                c = constants | ({} if gain else {"p_w": None}) | {"HAS_WEIGHT": gain}
                types = _dense_types(dict(p_x=pointer, p_y=pointer) | w, "R D", scalars, div="D", tag=tag)
                cases.append(("_fused_rmsnorm_kernel", types, c, options_n))
                pointers = dict(p_x=pointer, p_dy=pointer, p_dx=pointer) | w
                pointers |= {"p_partial": "*fp32"} if gain else {}
                c = c | ({} if gain else {"p_partial": None})
                types = _dense_types(pointers, "R D", scalars, div="D", tag=tag)
                cases.append(("_fused_rmsnorm_bwd_kernel", types, c | stages, options_n))
            pointers = dict.fromkeys(("p_residual", "p_branch", "p_y"), pointer) | dict(p_w="*fp32")
            types = _dense_types(pointers, "R D", scalars, div="D", tag=tag)
            cases.append(("_fused_residual_sphere_kernel", types, constants, options_n))
            pointers = dict.fromkeys(("p_residual", "p_branch", "p_dy", "p_dresidual", "p_dbranch"), pointer)
            pointers |= dict(p_w="*fp32", p_partial="*fp32")
            types = _dense_types(pointers, "R D", scalars, div="D", tag=tag)
            cases.append(("_fused_residual_sphere_bwd_kernel", types, constants | stages, options_n))
        heads = dict(K=128, V=128, BH=32, BK=128, BV=128)
        parts = ("p_q", "p_k", "p_v")
        pointers = dict.fromkeys((*parts, *(f"{name}_out" for name in parts)), pointer) | dict(p_alpha="*fp32")
        types = _dense_types(pointers, "H", "eps", tag=dt)
        cases.append(("_delta_operands_kernel", types, heads, dict(num_warps=8)))
        incoming = ("p_dq", "p_dk", "p_dv")
        pointers = dict.fromkeys((*parts, *incoming, *(f"{name}_out" for name in incoming)), pointer)
        types = _dense_types(pointers | dict(p_alpha="*fp32", p_dalpha="*fp32"), "H", "eps", tag=dt)
        cases.append(("_delta_operands_bwd_kernel", types, heads, dict(num_warps=8)))
        inputs = "p_logits p_write p_erase p_decay p_start".split()
        pointers = dict.fromkeys((*inputs, "p_alpha", "p_beta", "p_gamma"), "*fp32")
        biases = "write_bias erase_bias"
        types = _dense_types(pointers, "R H", biases)
        cases.append(("_delta_gates_kernel", types, dict(BR=16, BH=32), dict(num_warps=4)))
        pointers = dict.fromkeys((*inputs, *"p_dalpha p_dbeta p_dgamma p_dlogits p_partial".split()), "*fp32")
        types = _dense_types(pointers, "R H", biases)
        cases.append(("_delta_gates_bwd_kernel", types, dict(BR=16, BH=32), dict(num_warps=4)))
        types = _dense_types(dict(p_partial="*fp32", p_out=pointer), "P D", div="D", tag=dt)
        cases.append(("_partial_sum_kernel", types, dict(BP=64, BD=32), dict(num_warps=4)))
        types = _dense_types(dict.fromkeys(("p_gate", "p_up", "p_y"), pointer), "n", div="n", tag=dt)
        cases.append(("_fused_swiglu_kernel", types, dict(BLOCK=2048), dict(num_warps=4)))
        pointers = dict.fromkeys(("p_gate", "p_up", "p_dy", "p_dgate", "p_dup"), pointer)
        types = _dense_types(pointers, "n", div="n", tag=dt)
        cases.append(("_fused_swiglu_bwd_kernel", types, dict(BLOCK=2048), dict(num_warps=4)))
        parts = dict(p_max="*fp32", p_target_logit="*fp32")
        for store in (True, False):
            operands, flags = _dense_operands(dt, tile, "nt")
            pointers = parts | operands | dict(p_targets="*i64", p_exp=pointer, p_sum="*fp32", p_index="*i32")
            names = "N W D first_class s_en s_pt"
            types = _dense_types(pointers, names, "scale", div="W D first_class s_en s_pt", tag=dt)
            constants = dict(STORE=store) | flags | tile
            cases.append(("_fused_chunked_cross_entropy_kernel", types, constants, options))
        rows = parts | dict(p_row_weight="*fp32", p_inverse="*fp32", p_lse="*fp32")
        if dt == "fp32":
            pointers = rows | dict(p_sum="*fp32", p_index="*i32", p_loss="*fp32", p_argmax="*i64")
            types = _dense_types(pointers, "N NT s_pt", div="NT s_pt", tag=dt)
            cases.append(("_cross_entropy_merge_kernel", types, dict(BT=64, BR=16), dict(num_warps=4)))
        pointers = rows | dict(p_exp=pointer, p_targets="*i64")
        types = _dense_types(pointers, "N W s_en s_pt", "scale", div="W s_en s_pt", tag=dt)
        cases.append(("_cross_entropy_gradient_kernel", types, dict(BR=16, BN=tile["BN"]), dict(num_warps=4)))
        # A = X X^T, polynomials of A, and P X, written in float16 or as the result; X as it is or stored turned
        low = "fp16" if dt == "bf16" else dt
        square = (dict(BM=128, BN=128, BK=64), dict(num_warps=8, num_stages=3)) if dt == "bf16" else exact
        plain, across = ("s_dn", "s_on"), ("s_dm", "s_om")
        for symmetric, add, turned, out, ones in dict.fromkeys((
            (True, False, "nt", low, plain), (True, False, "tn", low, plain), (True, False, "nn", low, plain),
            (True, True, "nn", low, plain), (False, False, "nn", low, plain), (False, False, "nt", low, across),
            (False, False, "nn", dt, plain), (False, False, "nn", "fp32", plain), (False, False, "nt", "fp32", across),
        )):  # fmt: skip
            t, o = square if symmetric else (tile, options)
            operands, flags = _dense_operands(low, t, turned)
            names = " ".join({"M", "N", "K", "s_db", "s_dm", "s_dn", "s_ob", "s_om", "s_on"} - set(ones))
            types = _dense_types(
                operands | dict(p_add=f"*{low}", p_out=f"*{out}"), names, "alpha beta diagonal", div=names,
                tag=f"{low} sym={symmetric} add={add} {turned} out={out}",
            )
            c = dict.fromkeys(ones, 1) | dict(ADD=add, SYMMETRIC=symmetric, GROUP=8) | flags | t
            cases.append(("_newton_schulz_kernel", types, c, o))
    return cases


DENSE_COMPILE_CASES = _dense_cases()


@pytest.mark.parametrize("capability", [90, 100, 103])
@pytest.mark.parametrize("index", range(len(DENSE_COMPILE_CASES)))
def test_dense_kernel_compiles(index, capability):
    name, types, constants, options = DENSE_COMPILE_CASES[index]
    kernel = getattr(custom_kernels, name)
    signature = {p: "constexpr" if p in constants else types[p] for p in kernel.arg_names}
    aligned = [i for i, p in enumerate(kernel.arg_names) if signature[p].startswith("*") or p in types["_div"]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(p),): value for p, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned if signature[kernel.arg_names[i]] != "constexpr"},
    )
    out = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    # shared memory of one block: 227 KB; tensor memory: 512 columns, beyond which the kernel comes out empty
    assert out.metadata.shared <= 232448
    assert (getattr(out.metadata, "tmem_size", 0) or 0) <= 512
    low = any("bf16" in t or "fp16" in t for t in types.values() if isinstance(t, str))
    if low and {"BN", "BK"} <= constants.keys():
        assert out.asm["ptx"].count("wgmma.mma_async" if capability == 90 else "tcgen05.mma") > 0
