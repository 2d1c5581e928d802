"""Every kernel of the program: Triton on CUDA, vectorised PyTorch on a CPU, gradients by hand.

Public operations validate and dispatch; launchers (`_<op>_fwd`, `_<op>_bwd`) allocate and launch; kernels
(`_<op>_fwd_kernel`) hold the mathematics; `_<op>_torch` is the CPU path, for float32 and float64. This file knows
nothing of the modules above it: no configuration, no model, no files.

Precision: bf16 or float32 in, float32 accumulation; float32 operands multiply exactly (ieee). All decay arithmetic,
statistics, softmax and losses are float32. Nothing is random but what a `seed` argument drives; no float atomics, so
every result repeats bit for bit. Tiles are fixed choices per case, never searched for.

Sections, each self-contained after the shared device functions: matrix product; norms and SwiGLU; linear cross entropy;
orthogonalisation; causal convolution; delta rule scan and step; windowed attention, rotary and paged cache; Hadamard
transform and microscaled formats; noise of choices; layer primitives. Letters as in model_config.py; kernels use p_
pointers, b_ blocks, o_ offsets, m_ masks, i_ program indices, and tiles BM BN BK.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # a CPU needs no Triton: every public operation has a vectorised PyTorch path
    triton = None
    tl = SimpleNamespace(constexpr=lambda value=None: value)

__all__ = [
    "DelayedScale",
    "PackedFP4",
    "PackedINT8",
    "Projection",
    "RootMeanSquareNorm",
    "cache_append",
    "cache_prefix",
    "causal_convolution",
    "chunk_associative_scan",
    "delta_rule_commit",
    "delta_rule_gates",
    "delta_rule_operands",
    "delta_rule_step",
    "dequantize_cache",
    "dequantize_fp4",
    "dequantize_int8",
    "fake_quantize_cache",
    "fp4_signs",
    "fp4_weight_only_linear",
    "fp8_linear",
    "fused_chunked_cross_entropy",
    "fused_residual_sphere",
    "fused_rmsnorm",
    "fused_swiglu",
    "gumbel_noise",
    "hadamard_rotate",
    "hadamard_transform",
    "int8_weight_only_linear",
    "l2_normalize",
    "linear_product",
    "linear_products",
    "matrix_product",
    "microscaled_fp4_gemm",
    "newton_schulz_orthogonalize",
    "pack_weight",
    "paged_attention",
    "paged_cache",
    "quantize_cache",
    "quantize_fp4",
    "quantize_fp8",
    "quantize_int8",
    "rotary",
    "step_together",
    "unpack_weight",
    "windowed_attention",
    "wrapped_word",
]

# ---------------------------------------------------------------------------
# Shared device functions


def _jit(fn):
    """triton.jit where Triton is installed; the bare function (never launched) elsewhere."""
    return fn if triton is None else triton.jit(fn)


def _jit_dynamic(*names: str):
    """_jit for a kernel whose integer arguments `names` vary from call to call: one compilation serves every value."""
    return lambda fn: fn if triton is None else triton.jit(fn, do_not_specialize=names)


_INTERPRETED = triton is not None and triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: the CI's smoke test


def _uses_kernel(x: Tensor) -> bool:
    """True where an operation runs its Triton kernel: on CUDA, and on the CPU under the interpreter."""
    if x.is_cuda and triton is None:
        raise RuntimeError("CUDA tensors need Triton, found none; install it (pip install triton) or move to the CPU")
    return x.is_cuda or (_INTERPRETED and x.dtype == torch.float32)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _multiprocessors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4


@_jit_dynamic("P")
def _partial_sum_kernel(p_partial, p_out, P, D, BP: tl.constexpr, BD: tl.constexpr):
    """out[d] = sum over p of partial[p, d], in one fixed order."""
    o_d = tl.program_id(0) * BD + tl.arange(0, BD)
    o_p = tl.arange(0, BP)
    acc = tl.zeros((BP, BD), dtype=tl.float32)
    for i_p in range(0, P, BP):
        m = (i_p + o_p < P)[:, None] & (o_d < D)[None, :]
        acc += tl.load(p_partial + (i_p + o_p)[:, None].to(tl.int64) * D + o_d[None, :], mask=m, other=0.0)
    tl.store(p_out + o_d, tl.sum(acc, axis=0).to(p_out.dtype.element_ty), mask=o_d < D)


def _partial_sum(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the float32 rows that the programs of a backward kernel left: partial (P, D) -> (D,) in dtype."""
    parts, width = partial.shape
    out = partial.new_empty(width, dtype=dtype)
    _partial_sum_kernel[(triton.cdiv(width, 32),)](partial, out, parts, width, BP=64, BD=32, num_warps=4)
    return out


# ---------------------------------------------------------------------------
# Matrix product

# Rows of a tile of a skinny product (the narrowest tensor-core side is 8; a draft tree has 7 nodes, two fit).
_SKINNY_ROWS = 16
# The same on a CPU, where the library's kernels for 8 rows treat every row alike (fewer rows take other code).
_SKINNY_ROWS_CPU = 8
# Rows up to which a product runs in such tiles: a batch of decoding, 16 trees of 7 nodes.
_SKINNY_MOST = 128


def _require_kernel_dtype(name: str, x: Tensor) -> None:
    if x.is_cuda:
        found = f"{name} must be bfloat16 or float32 on CUDA, got {x.dtype}"
        _require(x.dtype in (torch.bfloat16, torch.float32), found)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that the PyTorch paths compute in: the input's own, but float32 for 16-bit inputs."""
    return x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32


@_jit
def _product_program(pid, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Tile (i_m, i_n) of program pid: GROUP row tiles walk the columns together, so that L2 serves both operands."""
    n_m = tl.cdiv(M, BM)
    n_n = tl.cdiv(N, BN)
    first = pid // (GROUP * n_n) * GROUP
    rows = tl.minimum(n_m - first, GROUP)
    local = pid % (GROUP * n_n)
    return first + local % rows, local // rows


@_jit
def _dot_add(b_a, b_b, acc, PRECISION: tl.constexpr):
    """acc + a b; the sums of float32 operands are as good as a library's.

    One exact chain over all of K = 257 was 3.0e-6 off where cuBLAS was 0.9e-6 (H200): float32 tiles are summed apart,
    then added. A max_num_imprecise_acc other than 0 means nothing to float32 products, but keeps the compiler from
    folding that addition back into the chain.
    """
    if b_a.dtype == tl.float32:
        acc += tl.dot(b_a, b_b, input_precision=PRECISION, max_num_imprecise_acc=1)
    else:
        acc = tl.dot(b_a, b_b, acc, input_precision=PRECISION)
    return acc


@_jit
def _product_tile(
    a_desc, b_desc, i_z, i_m, i_n, K,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """Tile (i_m, i_n) of a[i_z] b[i_z] in float32, operands brought by the bulk copy unit, zeros beyond their edges.

    a (M, K) is stored as itself or, A_TURNED, as (K, M); b (K, N) as itself or, B_TURNED, as (N, K).
    """
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for i_k in range(0, K, BK):
        if A_TURNED:
            b_a = tl.trans(a_desc.load([i_z, i_k, i_m * BM]).reshape(BK, BM))
        else:
            b_a = a_desc.load([i_z, i_m * BM, i_k]).reshape(BM, BK)
        if B_TURNED:
            b_b = tl.trans(b_desc.load([i_z, i_n * BN, i_k]).reshape(BN, BK))
        else:
            b_b = b_desc.load([i_z, i_k, i_n * BN]).reshape(BK, BN)
        # ieee: exact products for float32 operands; 16-bit operands are not affected
        acc = _dot_add(b_a, b_b, acc, "ieee")
    return acc


@_jit
def _matrix_product_kernel(
    a_desc, b_desc, p_out, M, N, K, s_ob, s_om, s_on,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, ACCUMULATE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    """out[z] = a[z] b[z], or out[z] += a[z] b[z]; a (M, K), b (K, N), sums in float32."""
    i_m, i_n = _product_program(tl.program_id(0), M, N, BM, BN, GROUP)
    i_z = tl.program_id(1)
    acc = _product_tile(a_desc, b_desc, i_z, i_m, i_n, K, A_TURNED, B_TURNED, BM, BN, BK)
    o_m = i_m.to(tl.int64) * BM + tl.arange(0, BM)
    o_n = i_n.to(tl.int64) * BN + tl.arange(0, BN)
    p_o = p_out + i_z.to(tl.int64) * s_ob + o_m[:, None] * s_om + o_n[None, :] * s_on
    m_o = (o_m < M)[:, None] & (o_n < N)[None, :]
    if ACCUMULATE:
        acc += tl.load(p_o, mask=m_o, other=0.0)
    tl.store(p_o, acc.to(p_out.dtype.element_ty), mask=m_o)


@_jit_dynamic("R", "N0", "N1", "N2")
def _skinny_product_kernel(
    p_x, p_w0, p_w1, p_w2, p_scale0, p_scale1, p_scale2, p_out, R, N0, N1, N2, K, s_xr, s_xk, s_wn, s_wk, KS,
    SCALED: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """out[s, r, n] = scale[n] sum of x[r, k] w[n, k] over split s, KS values of k long, for up to three weights w0, w1,
    w2 of N0, N1, N2 rows, whose results lie one behind the other; BR rows of x a program, however many there are.

    The weight is the left operand, so that its rows fill the tensor core and the few rows of x are its columns. The
    tiles of rows that read one tile of the weight run side by side, so that L2 serves all but the first.
    """
    i_n = tl.program_id(1)
    p_w, p_scale, N, before = p_w0, p_scale0, N0, N0 * 0
    if i_n >= tl.cdiv(N0, BN):
        i_n -= tl.cdiv(N0, BN)
        p_w, p_scale, N, before = p_w1, p_scale1, N1, N0
        if i_n >= tl.cdiv(N1, BN):
            i_n -= tl.cdiv(N1, BN)
            p_w, p_scale, N, before = p_w2, p_scale2, N2, N0 + N1
    o_n = i_n.to(tl.int64) * BN + tl.arange(0, BN)
    i_s = tl.program_id(2).to(tl.int64)
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_k = tl.arange(0, BK)
    m_n = o_n < N
    m_r = o_r < R
    acc = tl.zeros((BN, BR), dtype=tl.float32)
    for i_k in range(0, KS, BK):
        o_c = i_s * KS + i_k + o_k
        m_k = o_c < K
        p_w_k = p_w + o_n[:, None] * s_wn + o_c[None, :] * s_wk
        p_x_k = p_x + o_r[None, :] * s_xr + o_c[:, None] * s_xk
        b_w = tl.load(p_w_k, mask=m_n[:, None] & m_k[None, :], other=0.0)
        b_x = tl.load(p_x_k, mask=m_k[:, None] & m_r[None, :], other=0.0)
        # 8-bit codes are exact in 16 bits, 16-bit rows in 32
        if p_w0.dtype.element_ty == tl.float32:
            b_x = b_x.to(tl.float32)
        acc = _dot_add(b_w.to(b_x.dtype), b_x, acc, "ieee")
    if SCALED:
        acc *= tl.load(p_scale + o_n, mask=m_n, other=0.0)[:, None]
    p_o = p_out + (i_s * (N0 + N1 + N2) + before) * R + o_r[None, :].to(tl.int64) * N + o_n[:, None]
    tl.store(p_o, acc.to(p_out.dtype.element_ty), mask=m_n[:, None] & m_r[None, :])


@_jit_dynamic("n")
def _skinny_sum_kernel(p_partial, p_out, n, SPLITS: tl.constexpr, BN: tl.constexpr):
    """out[i] = partial[0, i] + partial[1, i] + ... in that order."""
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    m_n = o_n < n
    acc = tl.zeros((BN,), dtype=tl.float32)
    for i_s in range(SPLITS):
        acc += tl.load(p_partial + i_s * n.to(tl.int64) + o_n, mask=m_n, other=0.0)
    tl.store(p_out + o_n, acc.to(p_out.dtype.element_ty), mask=m_n)


def _matrix_product_tile(m: int, n: int, dtype: torch.dtype) -> tuple[dict, dict]:
    """Tile and launch options of a product with an (m, n) result; fixed, no search."""
    if dtype == torch.float32:
        # exact float32 products run on the ordinary units: 64 x 64 keeps 32 sums a thread, no spill
        return dict(BM=64, BN=64, BK=32, GROUP=8), dict(num_warps=4, num_stages=2)
    if m >= 128 and n >= 256:
        # sm_90: two groups of four warps with 64 x 256 sums each, 128 registers; 4 stages take 192 KB of shared memory
        return dict(BM=128, BN=256, BK=64, GROUP=8), dict(num_warps=8, num_stages=4)
    return dict(BM=64, BN=64, BK=64, GROUP=8), dict(num_warps=4, num_stages=4)


def _product_operand(x: Tensor, rows: int, columns: int) -> tuple["TensorDescriptor", bool]:
    """What the bulk copy unit reads tiles of x (n, R, C) from, and whether it is stored turned, as (n, C, R).

    The unit wants lines without gaps that start at multiples of 16 bytes: what has none is copied into some.
    """
    turned = x.stride(2) != 1 and x.stride(1) == 1
    x, block = (x.mT, [1, columns, rows]) if turned else (x, [1, rows, columns])
    unit = 16 // x.element_size()
    fits = x.stride(2) == 1 and x.stride(1) % unit == 0 and x.data_ptr() % 16 == 0
    if not (fits and x.stride(1) >= x.shape[2] and (len(x) == 1 or (x.stride(0) > 0 and x.stride(0) % unit == 0))):
        lines = x.new_empty(len(x), x.shape[1], -(-x.shape[2] // unit) * unit)[..., : x.shape[2]]
        x = lines.copy_(x)
    # the stride of a dimension of one is whatever it is
    step = x.stride(0) if len(x) > 1 else x.shape[1] * x.stride(1)
    return TensorDescriptor(x, list(x.shape), [step, x.stride(1), 1], block), turned


def _product_operands(a: Tensor, b: Tensor, tile: dict) -> tuple[tuple, dict]:
    """Descriptors of a (n, M, K) and b (n, K, N) for tiles BM, BN, BK, and how they are stored."""
    a_desc, a_turned = _product_operand(a, tile["BM"], tile["BK"])
    b_desc, b_turned = _product_operand(b, tile["BK"], tile["BN"])
    return (a_desc, b_desc), dict(A_TURNED=a_turned, B_TURNED=b_turned)


def _matrix_product(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
    """Launch out (n, M, N) = or += a (n, M, K) @ b (n, K, N)."""
    (batch, m, k), n = a.shape, b.shape[2]
    tile, options = _matrix_product_tile(m, n, a.dtype)
    operands, stored = _product_operands(a, b, tile)
    grid = (triton.cdiv(m, tile["BM"]) * triton.cdiv(n, tile["BN"]), batch)
    _matrix_product_kernel[grid](
        *operands, out, m, n, k, *out.stride(), **stored, ACCUMULATE=accumulate, **tile, **options
    )


def _matrix_product_torch(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> None:
    work = torch.promote_types(_compute_dtype(a), out.dtype)
    product = torch.matmul(a.to(work), b.to(work))
    out.copy_(out + product if accumulate else product)


def matrix_product(
    a: Tensor,
    b: Tensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = True,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Multiply two matrices, or batches of them, with float32 sums; not differentiable (linear_product is).

    a (M, K) or, with transpose_a, (K, M); b (N, K) or, without transpose_b, (K, N); both may carry one leading batch
    dimension. The result (M, N) has a's dtype, or is written to `out`, of a's dtype or float32. With accumulate the
    product is added to the float32 (or float64) `out`. Strides are free; on CUDA an operand is copied where neither its
    rows nor its columns are lines without gaps that start at multiples of 16 bytes.
    """
    _require(a.dim() == b.dim() and a.dim() in (2, 3), f"a and b must both be 2-D or 3-D, got {a.dim()} and {b.dim()}")
    _require(a.dtype == b.dtype, f"a and b must have one dtype, got {a.dtype} and {b.dtype}")
    _require_kernel_dtype("a", a)
    a3 = (a if a.dim() == 3 else a.unsqueeze(0)).detach()
    b3 = (b if b.dim() == 3 else b.unsqueeze(0)).detach()
    a3 = a3.mT if transpose_a else a3
    b3 = b3.mT if transpose_b else b3
    found = f"got a {tuple(a.shape)}, b {tuple(b.shape)}, transpose_a={transpose_a}, transpose_b={transpose_b}"
    _require(a3.shape[2] == b3.shape[1] and a3.shape[0] == b3.shape[0], f"a and b must agree in K and batch, {found}")
    shape = (a3.shape[0], a3.shape[1], b3.shape[2])
    shape = shape if a.dim() == 3 else shape[1:]
    if out is None:
        _require(not accumulate, "accumulate needs out, got None")
        out = a.new_empty(shape)
    _require(tuple(out.shape) == shape, f"out must have shape {shape}, got {tuple(out.shape)}")
    wide = (torch.float32, torch.float64)
    _require(out.dtype in (a.dtype, *wide), f"out must have dtype {a.dtype} or float32, got {out.dtype}")
    _require(not accumulate or out.dtype in wide, f"out must be float32 to accumulate, got {out.dtype}")
    out3 = (out if out.dim() == 3 else out.unsqueeze(0)).detach()
    if out.numel():
        launch = _matrix_product if _uses_kernel(a) else _matrix_product_torch
        launch(a3, b3, out3, accumulate)
    return out


def _skinny_products(
    x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype, scales: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Launch x (R, in) @ weight (out, in)^T for R <= 128 and up to three weights of one layout, together.

    The split depends on the weights' shapes only, so a row's bits do not depend on how many there are.
    """
    (rows, k), sizes = x.shape, [weight.shape[0] for weight in weights]
    # sm_90: 4 stages of 20 KB, two programs a multiprocessor; float32 (84 gates of the full model) is no work of the
    # tensor cores, and tiles of 64 rows spilled 192 bytes
    BN, BK = (16, 64) if weights[0].dtype == torch.float32 else (64, 128)
    tiles = sum(triton.cdiv(n, BN) for n in sizes)
    splits = 1
    # at least 264 programs (two on each of 132 multiprocessors), as long as a split keeps 256 values of k
    while tiles * splits < 264 and k >= 512 * splits:
        splits *= 2
    KS = triton.cdiv(triton.cdiv(k, splits), BK) * BK
    out = x.new_empty(rows * sum(sizes), dtype=dtype)
    target = out if splits == 1 else x.new_empty(splits, len(out), dtype=torch.float32)
    absent = 3 - len(weights)
    _skinny_product_kernel[(triton.cdiv(rows, _SKINNY_ROWS), tiles, splits)](
        x, *weights, *weights[:1] * absent, *(scales or [None] * len(weights)), *(scales or [None])[:1] * absent,
        target, rows, *sizes, *[0] * absent, k, *x.stride(), *weights[0].stride(), KS,
        SCALED=scales is not None, BR=_SKINNY_ROWS, BN=BN, BK=BK, num_warps=4, num_stages=4,
    )
    if splits > 1:
        _skinny_sum_kernel[(triton.cdiv(len(out), 1024),)](target, out, len(out), SPLITS=splits, BN=1024, num_warps=4)
    return [part.view(rows, n) for part, n in zip(out.split([rows * n for n in sizes]), sizes, strict=True)]


def _linear_product_fwd(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0], dtype=dtype)
    if x.shape[0] <= _SKINNY_MOST:
        return _skinny_products(x, [weight], dtype)[0]
    return matrix_product(x, weight, out=x.new_empty(x.shape[0], weight.shape[0], dtype=dtype))


class _LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear_product_fwd(x, weight, x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dx = matrix_product(do, weight, transpose_b=False) if ctx.needs_input_grad[0] else None
        dweight = matrix_product(do, x, transpose_a=True, transpose_b=False) if ctx.needs_input_grad[1] else None
        return dx, dweight


def _linear_product_torch(x: Tensor, weight: Tensor) -> Tensor:
    rows, k = x.shape
    if rows > _SKINNY_MOST:
        return F.linear(x, weight)
    # the library treats 8 rows alike only when K is a multiple of 16 (measured: K = 7 gives row-dependent last bits)
    pad_k = -k % 16
    x = F.pad(x, (0, pad_k, 0, -rows % _SKINNY_ROWS_CPU))
    weight = F.pad(weight, (0, pad_k)) if pad_k else weight
    return torch.cat([F.linear(tile, weight) for tile in x.split(_SKINNY_ROWS_CPU)])[:rows]


def linear_product(x: Tensor, weight: Tensor, *, wide: bool = False) -> Tensor:
    """Return x @ weight^T, differentiable in both: x (..., in), weight (out, in) of one dtype -> (..., out).

    wide keeps the float32 sums of 16-bit operands unrounded (logits); it has no gradient.

    Up to 128 rows run in fixed tiles (16 rows on CUDA, 8 on a CPU) with a fixed split over `in`, so that a row's result
    is the same bits whatever the number and the content of the other rows.
    """
    _require(weight.dim() == 2, f"weight must be 2-D (out, in), got {tuple(weight.shape)}")
    found = f"got x {tuple(x.shape)} and weight {tuple(weight.shape)}"
    _require(x.dim() >= 1 and x.shape[-1] == weight.shape[1], f"x must end in weight's in-dimension, {found}")
    _require(x.dtype == weight.dtype, f"x and weight must have one dtype, got {x.dtype} and {weight.dtype}")
    _require_kernel_dtype("x", x)
    rows = x.reshape(-1, x.shape[-1])
    if not _uses_kernel(x):
        out = _linear_product_torch(rows, weight)
    elif wide:
        _require(not torch.is_grad_enabled(), "a wide product has no gradient; call it under torch.no_grad()")
        out = _linear_product_fwd(rows, weight, torch.float32)
    else:
        out = _LinearProduct.apply(rows, weight)
    return out.view(*x.shape[:-1], weight.shape[0])


@torch.no_grad()
def linear_products(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return x @ weight^T for up to three weights (out, in) in one pass, for decoding: a row's bits are its own.

    x (..., in), at most 128 rows; weights contiguous, all of x's dtype, or all float32: then the results are float32.
    """
    found = f"got x {tuple(x.shape)} {x.dtype}, weights {[(tuple(w.shape), w.dtype) for w in weights]}"
    fits = 1 <= len(weights) <= 3 and all(w.dim() == 2 and w.shape[1] == x.shape[-1] for w in weights)
    _require(fits and len({w.dtype for w in weights}) == 1, f"one to three weights of one dtype must fit x, {found}")
    dtype = weights[0].dtype
    _require(dtype in (x.dtype, torch.float32), f"weights must have x's dtype or be float32, {found}")
    _require_kernel_dtype("x", x)
    rows = x.reshape(-1, x.shape[-1])
    _require(rows.shape[0] <= _SKINNY_MOST, f"x must have at most {_SKINNY_MOST} rows, {found}")
    if _uses_kernel(x) and len(rows):
        outputs = _skinny_products(rows, [w.contiguous() for w in weights], dtype)
    else:
        outputs = [_linear_product_torch(rows.to(dtype), w) for w in weights]
    return [out.view(*x.shape[:-1], -1) for out in outputs]


@dataclass(frozen=True)
class PackedINT8:
    """8-bit weight: value = code * scale of its row. codes (out, in) int8, scale (out,) float32."""

    codes: Tensor
    scale: Tensor

    def to_dict(self) -> dict[str, Tensor]:
        """Return plain tensors for a weights file."""
        return {"codes": self.codes, "scale": self.scale}

    @classmethod
    def from_dict(cls, tensors: Mapping[str, Tensor]) -> "PackedINT8":
        """Rebuild from to_dict's tensors; raises ValueError if their shapes disagree."""
        codes, scale = tensors["codes"], tensors["scale"]
        found = f"got codes {tuple(codes.shape)} {codes.dtype}, scale {tuple(scale.shape)}"
        fits = codes.dim() == 2 and codes.dtype == torch.int8 and scale.shape == codes.shape[:1]
        _require(fits, f"packed tensors must be int8 (out, in) and (out,), {found}")
        return cls(codes, scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    def to(self, device: torch.device | str) -> "PackedINT8":
        """Return the same values on another device."""
        return PackedINT8(self.codes.to(device), self.scale.to(device))


def quantize_int8(weight: Tensor) -> PackedINT8:
    """Round a weight (out, in) to 255 levels a row, symmetric about 0, its largest magnitude at 127."""
    _require(weight.dim() == 2, f"weight must be 2-D (out, in), got {tuple(weight.shape)}")
    wide = weight.detach().float()
    largest = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
    scale = (largest / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return PackedINT8((wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale)


def dequantize_int8(packed: PackedINT8, dtype: torch.dtype) -> Tensor:
    """Return the weight (out, in), rounded once to dtype."""
    return (packed.codes.float() * packed.scale[:, None]).to(dtype)


@torch.no_grad()
def int8_weight_only_linear(x: Tensor, packed: PackedINT8) -> Tensor:
    """Return x @ weight^T for decoding: x (..., in), kept in its own type, up to 128 rows, each row alone."""
    found = f"got x {tuple(x.shape)} and weight {packed.shape}"
    _require(x.dim() >= 1 and x.shape[-1] == packed.shape[1], f"x must end in weight's in-dimension, {found}")
    _require_kernel_dtype("x", x)
    return _int8_products(x, [packed])[0]


def _int8_products(x: Tensor, packed: Sequence[PackedINT8]) -> list[Tensor]:
    rows = x.reshape(-1, x.shape[-1])
    _require(rows.shape[0] <= _SKINNY_MOST, f"x must have at most {_SKINNY_MOST} rows, got {tuple(x.shape)}")
    if _uses_kernel(x):
        outputs = _skinny_products(rows, [p.codes for p in packed], x.dtype, [p.scale for p in packed])
    else:
        outputs = [_linear_product_torch(rows, p.codes.to(x.dtype)) * p.scale.to(x.dtype) for p in packed]
    return [out.view(*x.shape[:-1], -1) for out in outputs]


# ---------------------------------------------------------------------------
# Row norms and gated activation

# A row lives in the registers of one program: 16,384 float32 values are 32 a thread at 16 warps.
_RMSNORM_MAX_WIDTH = 16384
# The backward kernels keep about 110 registers a thread, so that two programs share a multiprocessor.
_RMSNORM_PROGRAMS = 2


@_jit
def _rmsnorm_rstd(b_x, inv_d, eps):
    """(BR, 1) reciprocal root of inv_d * sum x^2 + eps."""
    return tl.rsqrt(tl.sum(b_x * b_x, axis=1, keep_dims=True) * inv_d + eps)


@_jit
def _rmsnorm_input_gradient(b_g, b_hat, b_rstd, inv_d):
    """Gradient of x * rstd(x) at x given the gradient g of the normalised row: rstd (g - hat * inv_d * sum g hat)."""
    return b_rstd * (b_g - b_hat * (tl.sum(b_g * b_hat, axis=1, keep_dims=True) * inv_d))


@_jit
def _rmsnorm_gain(p_w, o_d, m_d, base, slope):
    """(1, BD) gain base + slope w: the weight itself (0, 1), or start (1 + w) of an offset w (start, start)."""
    return (base + slope * tl.load(p_w + o_d, mask=m_d, other=0.0).to(tl.float32))[None, :]


@_jit_dynamic("R")
def _fused_rmsnorm_kernel(
    p_x, p_w, p_y, R, D, inv_d, eps, base, slope,
    HAS_WEIGHT: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):
    """y = x / sqrt(inv_d * sum x^2 + eps) * gain, BR rows a program; each row is read once and written once."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    m = (o_r < R)[:, None] & m_d[None, :]
    o = o_r[:, None] * D + o_d[None, :]
    b_x = tl.load(p_x + o, mask=m, other=0.0).to(tl.float32)
    b_y = b_x * _rmsnorm_rstd(b_x, inv_d, eps)
    if HAS_WEIGHT:
        b_y *= _rmsnorm_gain(p_w, o_d, m_d, base, slope)
    tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)


@_jit_dynamic("R")
def _fused_rmsnorm_bwd_kernel(
    p_x, p_w, p_dy, p_dx, p_partial, R, D, inv_d, eps, base, slope,
    HAS_WEIGHT: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):
    """With hat = x rstd and g = dy gain: dx = rstd (g - hat inv_d sum g hat), dw = slope * sum over rows of dy hat.

    Each program walks the row tiles p, p + P, ... and leaves its part of dw in partial[p].
    """
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    if HAS_WEIGHT:
        b_w = _rmsnorm_gain(p_w, o_d, m_d, base, slope)
        b_dw = tl.zeros((BR, BD), dtype=tl.float32)
    for i_r in tl.range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0), num_stages=STAGES):
        o_r = i_r * BR + tl.arange(0, BR).to(tl.int64)
        m = (o_r < R)[:, None] & m_d[None, :]
        o = o_r[:, None] * D + o_d[None, :]
        b_x = tl.load(p_x + o, mask=m, other=0.0).to(tl.float32)
        b_g = tl.load(p_dy + o, mask=m, other=0.0).to(tl.float32)
        b_rstd = _rmsnorm_rstd(b_x, inv_d, eps)
        b_hat = b_x * b_rstd
        if HAS_WEIGHT:
            b_dw += b_g * b_hat
            b_g *= b_w
        b_dx = _rmsnorm_input_gradient(b_g, b_hat, b_rstd, inv_d)
        tl.store(p_dx + o, b_dx.to(p_dx.dtype.element_ty), mask=m)
    if HAS_WEIGHT:
        p_o = p_partial + tl.program_id(0).to(tl.int64) * D + o_d
        tl.store(p_o, slope * tl.sum(b_dw, axis=0), mask=m_d)


@_jit_dynamic("R")
def _fused_residual_sphere_kernel(
    p_residual, p_branch, p_w, p_y, R, D, inv_d, eps, base, slope,
    BR: tl.constexpr, BD: tl.constexpr,
):
    """y = norm(residual + norm(branch) gain) with norm(x) = x / sqrt(inv_d * sum x^2 + eps)."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    m = (o_r < R)[:, None] & m_d[None, :]
    o = o_r[:, None] * D + o_d[None, :]
    b_x = tl.load(p_branch + o, mask=m, other=0.0).to(tl.float32)
    b_w = _rmsnorm_gain(p_w, o_d, m_d, base, slope)
    b_s = tl.load(p_residual + o, mask=m, other=0.0).to(tl.float32)
    b_s += b_x * _rmsnorm_rstd(b_x, inv_d, eps) * b_w
    b_y = b_s * _rmsnorm_rstd(b_s, inv_d, eps)
    tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)


@_jit_dynamic("R")
def _fused_residual_sphere_bwd_kernel(
    p_residual, p_branch, p_w, p_dy, p_dresidual, p_dbranch, p_partial, R, D, inv_d, eps, base, slope,
    BR: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):
    """With hat = norm(branch), s = residual + hat gain: ds = norm'(s) dy = dresidual, dbranch = norm'(branch) (ds gain)
    and dw = slope * sum over rows of ds hat, left per program in partial[p] as in the norm's own backward."""
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_w = _rmsnorm_gain(p_w, o_d, m_d, base, slope)
    b_dw = tl.zeros((BR, BD), dtype=tl.float32)
    for i_r in tl.range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0), num_stages=STAGES):
        o_r = i_r * BR + tl.arange(0, BR).to(tl.int64)
        m = (o_r < R)[:, None] & m_d[None, :]
        o = o_r[:, None] * D + o_d[None, :]
        b_x = tl.load(p_branch + o, mask=m, other=0.0).to(tl.float32)
        b_s = tl.load(p_residual + o, mask=m, other=0.0).to(tl.float32)
        b_rstd = _rmsnorm_rstd(b_x, inv_d, eps)
        b_hat = b_x * b_rstd
        b_s += b_hat * b_w
        b_rstd_s = _rmsnorm_rstd(b_s, inv_d, eps)
        b_dy = tl.load(p_dy + o, mask=m, other=0.0).to(tl.float32)
        b_ds = _rmsnorm_input_gradient(b_dy, b_s * b_rstd_s, b_rstd_s, inv_d)
        tl.store(p_dresidual + o, b_ds.to(p_dresidual.dtype.element_ty), mask=m)
        b_dw += b_ds * b_hat
        b_dx = _rmsnorm_input_gradient(b_ds * b_w, b_hat, b_rstd, inv_d)
        tl.store(p_dbranch + o, b_dx.to(p_dbranch.dtype.element_ty), mask=m)
    p_o = p_partial + tl.program_id(0).to(tl.int64) * D + o_d
    tl.store(p_o, slope * tl.sum(b_dw, axis=0), mask=m_d)


@_jit
def _delta_operands_kernel(
    p_q, p_k, p_v, p_alpha, p_q_out, p_k_out, p_v_out, H, eps,
    K: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """BH heads of one token: q and k over their lengths, alpha v."""
    i_r = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_k = (o_h < H)[:, None] & (o_k < K)[None, :]
    m_v = (o_h < H)[:, None] & (o_v < V)[None, :]
    k_rows = (i_r * H + o_h)[:, None] * K + o_k[None, :]
    v_rows = (i_r * H + o_h)[:, None] * V + o_v[None, :]
    b_q = tl.load(p_q + k_rows, mask=m_k, other=0.0).to(tl.float32)
    b_k = tl.load(p_k + k_rows, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + v_rows, mask=m_v, other=0.0).to(tl.float32)
    b_alpha = tl.load(p_alpha + i_r * H + o_h, mask=o_h < H, other=0.0)
    dtype = p_q_out.dtype.element_ty
    tl.store(p_q_out + k_rows, (b_q * _rmsnorm_rstd(b_q, 1.0, eps)).to(dtype), mask=m_k)
    tl.store(p_k_out + k_rows, (b_k * _rmsnorm_rstd(b_k, 1.0, eps)).to(dtype), mask=m_k)
    tl.store(p_v_out + v_rows, (b_v * b_alpha[:, None]).to(dtype), mask=m_v)


@_jit
def _delta_operands_bwd_kernel(
    p_q, p_k, p_v, p_alpha, p_dq, p_dk, p_dv, p_dq_out, p_dk_out, p_dv_out, p_dalpha, H, eps,
    K: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):
    """The norms' input gradients, alpha dv, and dalpha = sum over V of v dv."""
    i_r = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_k = (o_h < H)[:, None] & (o_k < K)[None, :]
    m_v = (o_h < H)[:, None] & (o_v < V)[None, :]
    k_rows = (i_r * H + o_h)[:, None] * K + o_k[None, :]
    v_rows = (i_r * H + o_h)[:, None] * V + o_v[None, :]
    dtype = p_dq_out.dtype.element_ty
    b_x = tl.load(p_q + k_rows, mask=m_k, other=0.0).to(tl.float32)
    b_g = tl.load(p_dq + k_rows, mask=m_k, other=0.0).to(tl.float32)
    b_rstd = _rmsnorm_rstd(b_x, 1.0, eps)
    tl.store(p_dq_out + k_rows, _rmsnorm_input_gradient(b_g, b_x * b_rstd, b_rstd, 1.0).to(dtype), mask=m_k)
    b_x = tl.load(p_k + k_rows, mask=m_k, other=0.0).to(tl.float32)
    b_g = tl.load(p_dk + k_rows, mask=m_k, other=0.0).to(tl.float32)
    b_rstd = _rmsnorm_rstd(b_x, 1.0, eps)
    tl.store(p_dk_out + k_rows, _rmsnorm_input_gradient(b_g, b_x * b_rstd, b_rstd, 1.0).to(dtype), mask=m_k)
    b_v = tl.load(p_v + v_rows, mask=m_v, other=0.0).to(tl.float32)
    b_g = tl.load(p_dv + v_rows, mask=m_v, other=0.0).to(tl.float32)
    b_alpha = tl.load(p_alpha + i_r * H + o_h, mask=o_h < H, other=0.0)
    tl.store(p_dv_out + v_rows, (b_g * b_alpha[:, None]).to(dtype), mask=m_v)
    tl.store(p_dalpha + i_r * H + o_h, tl.sum(b_v * b_g, axis=1), mask=o_h < H)


@_jit
def _delta_gate_sigmoid(x):
    return 1 / (1 + tl.exp(-tl.maximum(x, -80.0)))


@_jit
def _delta_gate_inputs(p_logits, p_write, p_erase, p_decay, p_start, o_r, o_h, m, H, write_bias, erase_bias):
    """(BR, BH) pre-activations of the three gates: logits, constant and offset of the head."""
    o = (o_r * 3 * H)[:, None] + o_h[None, :]
    m_h = o_h < H
    b_write = tl.load(p_logits + o, mask=m, other=0.0)
    b_erase = tl.load(p_logits + o + H, mask=m, other=0.0)
    b_decay = tl.load(p_logits + o + 2 * H, mask=m, other=0.0)
    b_write += write_bias + tl.load(p_write + o_h, mask=m_h, other=0.0)[None, :]
    b_erase += erase_bias + tl.load(p_erase + o_h, mask=m_h, other=0.0)[None, :]
    b_start = tl.load(p_start + o_h, mask=m_h, other=0.0)
    b_decay += (b_start + tl.load(p_decay + o_h, mask=m_h, other=0.0))[None, :]
    return b_write, b_erase, b_decay


@_jit_dynamic("R")
def _delta_gates_kernel(
    p_logits, p_write, p_erase, p_decay, p_start, p_alpha, p_beta, p_gamma, R, H, write_bias, erase_bias,
    BR: tl.constexpr, BH: tl.constexpr,
):
    """BR tokens: alpha and beta are logistic, log gamma is -softplus."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_h = tl.arange(0, BH)
    m = (o_r < R)[:, None] & (o_h < H)[None, :]
    b_write, b_erase, b_decay = _delta_gate_inputs(
        p_logits, p_write, p_erase, p_decay, p_start, o_r, o_h, m, H, write_bias, erase_bias
    )
    # log(1 + e) = 2 atanh(s), s = e / (2 + e) <= 1/3, by its series to 1e-9: the fast logarithm has an absolute error
    # of 2e-7, and a half-life of 1,048,576 tokens is a log gamma of 7e-7
    b_e = tl.exp(-tl.abs(b_decay))
    s = b_e / (2.0 + b_e)
    q = s * s
    series = 1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13 + q / 15))))))
    o = (o_r * H)[:, None] + o_h[None, :]
    tl.store(p_alpha + o, _delta_gate_sigmoid(b_write), mask=m)
    tl.store(p_beta + o, _delta_gate_sigmoid(b_erase), mask=m)
    tl.store(p_gamma + o, -(tl.maximum(b_decay, 0.0) + 2.0 * s * series), mask=m)


@_jit_dynamic("R")
def _delta_gates_bwd_kernel(
    p_logits, p_write, p_erase, p_decay, p_start, p_dalpha, p_dbeta, p_dgamma, p_dlogits, p_partial,
    R, H, write_bias, erase_bias, BR: tl.constexpr, BH: tl.constexpr,
):
    """Gradients of the logits; their sums over tokens, which are those of the offsets, per program in partial[p]."""
    o_h = tl.arange(0, BH)
    b_dw = tl.zeros((BR, BH), tl.float32)
    b_de = tl.zeros((BR, BH), tl.float32)
    b_dd = tl.zeros((BR, BH), tl.float32)
    for i_r in range(tl.program_id(0), tl.cdiv(R, BR), tl.num_programs(0)):
        o_r = i_r * BR + tl.arange(0, BR).to(tl.int64)
        m = (o_r < R)[:, None] & (o_h < H)[None, :]
        b_write, b_erase, b_decay = _delta_gate_inputs(
            p_logits, p_write, p_erase, p_decay, p_start, o_r, o_h, m, H, write_bias, erase_bias
        )
        b_alpha, b_beta = _delta_gate_sigmoid(b_write), _delta_gate_sigmoid(b_erase)
        o = (o_r * H)[:, None] + o_h[None, :]
        b_write = tl.load(p_dalpha + o, mask=m, other=0.0) * b_alpha * (1 - b_alpha)
        b_erase = tl.load(p_dbeta + o, mask=m, other=0.0) * b_beta * (1 - b_beta)
        b_decay = -tl.load(p_dgamma + o, mask=m, other=0.0) * _delta_gate_sigmoid(b_decay)
        p_o = p_dlogits + (o_r * 3 * H)[:, None] + o_h[None, :]
        tl.store(p_o, b_write, mask=m)
        tl.store(p_o + H, b_erase, mask=m)
        tl.store(p_o + 2 * H, b_decay, mask=m)
        b_dw += b_write
        b_de += b_erase
        b_dd += b_decay
    p_o = p_partial + tl.program_id(0).to(tl.int64) * 3 * H + o_h
    tl.store(p_o, tl.sum(b_dw, axis=0), mask=o_h < H)
    tl.store(p_o + H, tl.sum(b_de, axis=0), mask=o_h < H)
    tl.store(p_o + 2 * H, tl.sum(b_dd, axis=0), mask=o_h < H)


@_jit
def _fused_swiglu_kernel(p_gate, p_up, p_y, n, BLOCK: tl.constexpr):
    """y = gate sigmoid(gate) up."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    b_g = tl.load(p_gate + o, mask=m, other=0.0).to(tl.float32)
    b_u = tl.load(p_up + o, mask=m, other=0.0).to(tl.float32)
    b_y = b_g * tl.sigmoid(b_g) * b_u
    tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)


@_jit
def _fused_swiglu_bwd_kernel(p_gate, p_up, p_dy, p_dgate, p_dup, n, BLOCK: tl.constexpr):
    """With s = sigmoid(gate): dup = dy gate s, dgate = dy up s (1 + gate (1 - s))."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    b_g = tl.load(p_gate + o, mask=m, other=0.0).to(tl.float32)
    b_u = tl.load(p_up + o, mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(p_dy + o, mask=m, other=0.0).to(tl.float32)
    b_s = tl.sigmoid(b_g)
    b_du = b_dy * b_g * b_s
    b_dg = b_dy * b_u * b_s * (1.0 + b_g * (1.0 - b_s))
    tl.store(p_dup + o, b_du.to(p_dup.dtype.element_ty), mask=m)
    tl.store(p_dgate + o, b_dg.to(p_dgate.dtype.element_ty), mask=m)


def _rmsnorm_tile(width: int) -> tuple[dict, dict]:
    """Rows a program holds about 4,096 values of, and its warps; fixed by the width, never by the number of rows."""
    BD = max(16, triton.next_power_of_2(width))
    BR = max(1, min(32, 4096 // BD))
    # 16 values a thread (two 16-byte loads of bf16) up to 4,096 wide, 32 above
    num_warps = 4 if BR * BD <= 2048 else 8 if BD <= 8192 else 16
    return dict(BR=BR, BD=BD), dict(num_warps=num_warps)


def _rmsnorm_bwd_tile(width: int) -> tuple[dict, dict]:
    """The same, with the next two tiles on their way, 57 KB a multiprocessor, while a row's sums and their barriers
    last; wider tiles would not fit shared memory."""
    tile, options = _rmsnorm_tile(width)
    return tile | dict(STAGES=3 if tile["BD"] <= 4096 else 1), options


def _rmsnorm_line(start: float | None) -> tuple[float, float]:
    """Base and slope of the gain in the weight."""
    return (0.0, 1.0) if start is None else (start, start)


def _fused_rmsnorm_fwd(x: Tensor, weight: Tensor | None, inv_d: float, eps: float, start: float | None) -> Tensor:
    rows, width = x.shape
    tile, options = _rmsnorm_tile(width)
    y = torch.empty_like(x)
    _fused_rmsnorm_kernel[(triton.cdiv(rows, tile["BR"]),)](
        x, weight, y, rows, width, inv_d, eps, *_rmsnorm_line(start), HAS_WEIGHT=weight is not None, **tile, **options
    )
    return y


def _rmsnorm_programs(x: Tensor, tile: dict) -> int:
    return min(triton.cdiv(x.shape[0], tile["BR"]), _RMSNORM_PROGRAMS * _multiprocessors(x))


def _fused_rmsnorm_bwd(
    x: Tensor, weight: Tensor | None, dy: Tensor, inv_d: float, eps: float, start: float | None
) -> tuple[Tensor, Tensor | None]:
    rows, width = x.shape
    tile, options = _rmsnorm_bwd_tile(width)
    programs = _rmsnorm_programs(x, tile)
    dx = torch.empty_like(x)
    partial = None if weight is None else x.new_empty(programs, width, dtype=torch.float32)
    _fused_rmsnorm_bwd_kernel[(programs,)](
        x, weight, dy, dx, partial, rows, width, inv_d, eps, *_rmsnorm_line(start),
        HAS_WEIGHT=weight is not None, **tile, **options,
    )
    return dx, None if weight is None else _partial_sum(partial, weight.dtype)


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, inv_d: float, eps: float, start: float | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scalars = inv_d, eps, start
        return _fused_rmsnorm_fwd(x, weight, inv_d, eps, start)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dweight = _fused_rmsnorm_bwd(x, weight, dy.contiguous(), *ctx.scalars)
        return dx, dweight, None, None, None


class _FusedResidualSphere(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, residual: Tensor, branch: Tensor, weight: Tensor, eps: float, start: float | None
    ) -> Tensor:
        ctx.save_for_backward(residual, branch, weight)
        ctx.scalars = eps, *_rmsnorm_line(start)
        rows, width = branch.shape
        tile, options = _rmsnorm_tile(width)
        y = torch.empty_like(residual)
        _fused_residual_sphere_kernel[(triton.cdiv(rows, tile["BR"]),)](
            residual, branch, weight, y, rows, width, 1.0 / width, *ctx.scalars, **tile, **options
        )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        residual, branch, weight = ctx.saved_tensors
        rows, width = branch.shape
        tile, options = _rmsnorm_bwd_tile(width)
        programs = _rmsnorm_programs(branch, tile)
        dresidual, dbranch = torch.empty_like(residual), torch.empty_like(branch)
        partial = branch.new_empty(programs, width, dtype=torch.float32)
        _fused_residual_sphere_bwd_kernel[(programs,)](
            residual, branch, weight, dy.contiguous(), dresidual, dbranch, partial,
            rows, width, 1.0 / width, *ctx.scalars, **tile, **options,
        )
        return dresidual, dbranch, _partial_sum(partial, weight.dtype), None, None


def _delta_operands_tile(heads: int, key_dim: int, value_dim: int) -> tuple[dict, dict]:
    """Heads a program: about 4,096 values of q, 16 a thread."""
    BK, BV = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    BH = min(triton.next_power_of_2(heads), max(1, 4096 // max(BK, BV)))
    return dict(K=key_dim, V=value_dim, BH=BH, BK=BK, BV=BV), dict(num_warps=8 if BH * max(BK, BV) > 2048 else 4)


class _DeltaOperands(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, alpha)
        ctx.eps = eps
        (batch, tokens, heads, key_dim), value_dim = q.shape, v.shape[3]
        tile, options = _delta_operands_tile(heads, key_dim, value_dim)
        outputs = [torch.empty_like(x) for x in (q, k, v)]
        _delta_operands_kernel[(batch * tokens, triton.cdiv(heads, tile["BH"]))](
            q, k, v, alpha, *outputs, heads, eps, **tile, **options
        )
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, alpha = ctx.saved_tensors
        (batch, tokens, heads, key_dim), value_dim = q.shape, v.shape[3]
        tile, options = _delta_operands_tile(heads, key_dim, value_dim)
        gradients = [torch.empty_like(x) for x in (q, k, v, alpha)]
        _delta_operands_bwd_kernel[(batch * tokens, triton.cdiv(heads, tile["BH"]))](
            q, k, v, alpha, dq.contiguous(), dk.contiguous(), dv.contiguous(), *gradients, heads, ctx.eps,
            **tile, **options,
        )
        return *gradients, None


def _delta_gates_tile(heads: int) -> tuple[dict, dict]:
    BH = triton.next_power_of_2(heads)
    return dict(BR=max(1, 512 // BH), BH=BH), dict(num_warps=4)


class _DeltaGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, write, erase, decay, start, write_bias, erase_bias) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(logits, write, erase, decay, start)
        ctx.biases = write_bias, erase_bias
        heads = start.shape[0]
        tile, options = _delta_gates_tile(heads)
        outputs = [logits.new_empty(*logits.shape[:-1], heads) for _ in range(3)]
        rows = outputs[0].numel() // heads
        _delta_gates_kernel[(triton.cdiv(rows, tile["BR"]),)](
            logits, write, erase, decay, start, *outputs, rows, heads, write_bias, erase_bias, **tile, **options
        )
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dalpha: Tensor, dbeta: Tensor, dgamma: Tensor) -> tuple[Tensor | None, ...]:
        logits, *offsets, start = ctx.saved_tensors
        heads = start.shape[0]
        tile, options = _delta_gates_tile(heads)
        rows = dalpha.numel() // heads
        programs = min(triton.cdiv(rows, tile["BR"]), 4 * _multiprocessors(logits))
        dlogits, partial = torch.empty_like(logits), logits.new_empty(programs, 3 * heads)
        _delta_gates_bwd_kernel[(programs,)](
            logits, *offsets, start, dalpha.contiguous(), dbeta.contiguous(), dgamma.contiguous(), dlogits, partial,
            rows, heads, *ctx.biases, **tile, **options,
        )
        return dlogits, *_partial_sum(partial, torch.float32).split(heads), None, None, None


class _FusedSwiGLU(torch.autograd.Function):
    # 2,048 values a program: 16 a thread, two 16-byte loads of bf16 from each operand
    BLOCK = 2048

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y = torch.empty_like(gate)
        n, BLOCK = gate.numel(), _FusedSwiGLU.BLOCK
        _fused_swiglu_kernel[(triton.cdiv(n, BLOCK),)](gate, up, y, n, BLOCK=BLOCK, num_warps=4)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        n, BLOCK = gate.numel(), _FusedSwiGLU.BLOCK
        grid = (triton.cdiv(n, BLOCK),)
        _fused_swiglu_bwd_kernel[grid](gate, up, dy.contiguous(), dgate, dup, n, BLOCK=BLOCK, num_warps=4)
        return dgate, dup


def _fused_rmsnorm_torch(
    x: Tensor, weight: Tensor | None, inv_d: float, eps: float, start: float | None = None
) -> Tensor:
    work = x.to(_compute_dtype(x))
    y = work * torch.rsqrt(work.square().sum(-1, keepdim=True) * inv_d + eps)
    if weight is not None:
        y = y * (weight if start is None else start * (1.0 + weight))
    return y.to(x.dtype)


def _row_norm(x: Tensor, weight: Tensor | None, inv_d: float, eps: float, start: float | None = None) -> Tensor:
    if not _uses_kernel(x) or x.numel() == 0:
        return _fused_rmsnorm_torch(x, weight, inv_d, eps, start)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    weight = None if weight is None else weight.contiguous()
    return _FusedRMSNorm.apply(rows, weight, inv_d, float(eps), start).view(x.shape)


def _require_rows(name: str, x: Tensor) -> None:
    width = x.shape[-1] if x.dim() else 0
    found = f"{name} must be 1 to {_RMSNORM_MAX_WIDTH} wide in its last dimension, got shape {tuple(x.shape)}"
    _require(1 <= width <= _RMSNORM_MAX_WIDTH, found)
    _require_kernel_dtype(name, x)


def _require_gain(weight: Tensor, width: int) -> None:
    _require(tuple(weight.shape) == (width,), f"weight must have shape ({width},), got {tuple(weight.shape)}")
    _require_kernel_dtype("weight", weight)


def fused_rmsnorm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, start: float | None = None
) -> Tensor:
    """Return x / sqrt(mean x^2 + eps) * weight over the last dimension; no weight: on the sphere of radius sqrt(D).

    x (..., D), D <= 16,384, weight (D,) of any float dtype; the result has x's dtype, statistics are float32 (float64
    for float64). With `start` the weight is an offset: the gain is start * (1 + weight), made where it is used. A row
    beyond 1e19 in magnitude becomes zero. Zhang and Sennrich, arXiv 1910.07467.
    """
    _require_rows("x", x)
    if weight is not None:
        _require_gain(weight, x.shape[-1])
    return _row_norm(x, weight, 1.0 / x.shape[-1], eps, start)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(sum x^2 + eps) over the last dimension: x (..., D), D <= 16,384, same dtype out."""
    _require_rows("x", x)
    return _row_norm(x, None, 1.0, eps)


def delta_rule_operands(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the delta rule takes of its projections: q and k at unit length, alpha v; in one pass over memory.

    q, k (B, T, H, K), v (B, T, H, V) of one dtype, alpha (B, T, H) float32 (float64 for float64). Each token and head
    for itself; results have the dtype of q, norms and products are float32.
    """
    found = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, alpha {tuple(alpha.shape)}"
    fits = q.dim() == 4 and k.shape == q.shape and v.dim() == 4 and v.shape[:3] == alpha.shape == q.shape[:3]
    _require(fits, f"q, k (B, T, H, K), v (B, T, H, V) and alpha (B, T, H) must agree, {found}")
    _require(q.dtype == k.dtype == v.dtype, f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    _require_kernel_dtype("q", q)
    if not _uses_kernel(q) or q.numel() == 0 or v.numel() == 0:
        return l2_normalize(q, eps), l2_normalize(k, eps), (v * alpha[..., None]).to(v.dtype)
    return _DeltaOperands.apply(*(x.contiguous() for x in (q, k, v, alpha)), float(eps))


def delta_rule_gates(
    logits: Tensor, write: Tensor, erase: Tensor, decay: Tensor, start: Tensor, *, write_bias: float, erase_bias: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gates of the delta rule: alpha = sigmoid(l_0 + write_bias + write), beta = sigmoid(l_1 + erase_bias +
    erase), log gamma = -softplus(l_2 + start + decay), (B, T, H) each.

    logits (B, T, 3H), one third for each gate; offsets write, erase, decay and the decay's first bias start (H,); all
    float32, or all float64.
    """
    heads, offsets = start.shape[0], (write, erase, decay, start)
    found = f"got logits {tuple(logits.shape)} and offsets {[tuple(x.shape) for x in offsets]}"
    fits = logits.shape[-1] == 3 * heads and all(x.shape == (heads,) for x in offsets)
    _require(fits, f"logits (B, T, 3H) and offsets (H,) must agree, {found}")
    types = {x.dtype for x in (logits, *offsets)}
    _require(len(types) == 1 and types <= {torch.float32, torch.float64}, f"gates must have 32 or 64 bit, got {types}")
    if not _uses_kernel(logits) or logits.numel() == 0:
        return _delta_gates_torch(logits, write, erase, decay, start, write_bias, erase_bias)
    return _DeltaGates.apply(logits.contiguous(), write, erase, decay, start, write_bias, erase_bias)


def _delta_gates_torch(logits, write, erase, decay, start, write_bias, erase_bias) -> tuple[Tensor, Tensor, Tensor]:
    # -softplus is written out for the same reason as the logistic function
    x, y, z = logits.unflatten(-1, (3, -1)).unbind(-2)
    z = z + start + decay
    log_gamma = -(z.clamp(min=0) + torch.log1p(torch.exp(-z.abs())))
    return _logistic_torch(x + write_bias + write), _logistic_torch(y + erase_bias + erase), log_gamma


def _logistic_torch(x: Tensor) -> Tensor:
    """Logistic function whose bits do not depend on an element's place.

    torch's sigmoid and softplus round the last numel % 32 elements of a CPU tensor otherwise than the rest (about 1 %
    of them differ), so a draft node's gates would depend on how many nodes there are.
    """
    return 1 / (1 + torch.exp(-x.clamp(min=-80)))


def fused_residual_sphere(
    residual: Tensor, branch: Tensor, weight: Tensor, eps: float = 1e-6, *, start: float | None = None
) -> Tensor:
    """Return rmsnorm(residual + rmsnorm(branch, weight)): output norm, addition, return to the sphere.

    residual and branch (..., D) of one dtype, weight (D,), with `start` an offset as in fused_rmsnorm; no intermediate
    is rounded to 16 bits.
    """
    _require_rows("residual", residual)
    found = f"got {tuple(branch.shape)} {branch.dtype} and {tuple(residual.shape)} {residual.dtype}"
    same = branch.shape == residual.shape and branch.dtype == residual.dtype
    _require(same, f"branch must have residual's shape and dtype, {found}")
    _require_gain(weight, residual.shape[-1])
    if not _uses_kernel(residual) or residual.numel() == 0:
        return _fused_residual_sphere_torch(residual, branch, weight, eps, start)
    width = residual.shape[-1]
    rows = [x.reshape(-1, width).contiguous() for x in (residual, branch)]
    return _FusedResidualSphere.apply(*rows, weight.contiguous(), float(eps), start).view(residual.shape)


def _fused_residual_sphere_torch(
    residual: Tensor, branch: Tensor, weight: Tensor, eps: float, start: float | None
) -> Tensor:
    work, inv_d = _compute_dtype(residual), 1.0 / residual.shape[-1]
    total = residual.to(work) + _fused_rmsnorm_torch(branch.to(work), weight, inv_d, eps, start)
    return _fused_rmsnorm_torch(total, None, inv_d, eps).to(residual.dtype)


def _fused_swiglu_torch(gate: Tensor, up: Tensor) -> Tensor:
    work = _compute_dtype(gate)
    # exp and division, not F.silu: torch's silu rounds the scalar tail of a tensor otherwise than its vector part;
    # below -80 the value is under 2e-33, and exp would overflow
    g = gate.to(work).clamp(min=-80)
    return (g / (1 + torch.exp(-g)) * up.to(work)).to(gate.dtype)


def fused_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up: two tensors of one shape and dtype. Shazeer, arXiv 2002.05202."""
    found = f"got {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
    same = gate.shape == up.shape and gate.dtype == up.dtype
    _require(same, f"gate and up must have one shape and dtype, {found}")
    _require_kernel_dtype("gate", gate)
    if not _uses_kernel(gate) or gate.numel() == 0:
        return _fused_swiglu_torch(gate, up)
    return _FusedSwiGLU.apply(gate.contiguous(), up.contiguous())


# ---------------------------------------------------------------------------
# Chunked cross entropy

# Outer tile: 2,048 tokens by 4,096 classes. At 3584 wide in bf16 its operands are 44 MB and stay in a 50 MB L2.
_CE_TOKENS = 2048
_CE_CLASSES = 4096
# One block of logits: 256 MB hold 2,048 tokens of 65,536 classes in bf16; wider rows or vocabularies take fewer tokens.
_CE_BLOCK_BYTES = 2**28
_CE_IGNORED = -100


@_jit
def _fused_chunked_cross_entropy_kernel(
    a_desc, b_desc, p_targets, p_exp, p_max, p_sum, p_index, p_target_logit,
    N, W, D, first_class, scale, s_en, s_pt,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, STORE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    """One tile of z = scale * hidden weight^T and its online log-sum-exp parts, all from the float32 sums:
    max_t = max z, sum_t = sum exp(z - max_t), the lowest class with z = max_t, and the target's logit.
    What is stored of the tile is exp(z - max_t): its 16-bit rounding is relative to the probability itself,
    where a stored logit near 30 would be off by 0.06 and its probability by 6 %.
    """
    pid = tl.program_id(0)
    n_m = tl.cdiv(N, BM)
    # row tiles fastest: consecutive programs fill one outer tile of 2,048 tokens by 4,096 classes after the other
    i_m = pid % n_m
    i_n = pid // n_m
    b_z = _product_tile(a_desc, b_desc, 0, i_m, i_n, D, A_TURNED, B_TURNED, BM, BN, BK) * scale
    o_m = i_m.to(tl.int64) * BM + tl.arange(0, BM)
    o_n = i_n.to(tl.int64) * BN + tl.arange(0, BN)
    m_m = o_m < N
    m_n = o_n < W
    b_z = tl.where(m_n[None, :], b_z, float("-inf"))
    o_c = (first_class + o_n).to(tl.int32)
    b_t = tl.load(p_targets + o_m, mask=m_m, other=-1)
    hit = o_c[None, :] == b_t[:, None]
    b_zt = tl.sum(tl.where(hit & m_n[None, :], b_z, 0.0), axis=1)
    here = (b_t >= first_class + i_n * BN) & (b_t < first_class + tl.minimum(i_n * BN + BN, W))
    tl.store(p_target_logit + o_m, b_zt, mask=m_m & here)
    b_max = tl.max(b_z, axis=1)
    b_index = tl.min(tl.where(b_z == b_max[:, None], o_c[None, :], 2147483647), axis=1)
    b_e = tl.exp(b_z - b_max[:, None])
    p_part = (first_class // BN + i_n) * s_pt + o_m
    tl.store(p_max + p_part, b_max, mask=m_m)
    tl.store(p_sum + p_part, tl.sum(b_e, axis=1), mask=m_m)
    tl.store(p_index + p_part, b_index, mask=m_m)
    if STORE:
        p_e = p_exp + o_m[:, None] * s_en + (first_class + o_n)[None, :]
        tl.store(p_e, b_e.to(p_exp.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@_jit
def _cross_entropy_merge_kernel(
    p_max, p_sum, p_index, p_target_logit, p_row_weight, p_inverse, p_lse, p_loss, p_argmax,
    N, NT, s_pt, BT: tl.constexpr, BR: tl.constexpr,
):
    """Merge the tiles' parts in class order: lse = m + log sum_t sum_t exp(max_t - m), argmax the lowest of equals;
    loss = weight / denominator * (lse - z_target), exactly 0 where the weight is 0."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    m_r = o_r < N
    b_m = tl.full((BR,), float("-inf"), dtype=tl.float32)
    b_s = tl.zeros((BR,), dtype=tl.float32)
    b_i = tl.zeros((BR,), dtype=tl.int32)
    for i_t in range(0, NT, BT):
        o_t = i_t + tl.arange(0, BT)
        m = (o_t < NT)[:, None] & m_r[None, :]
        o = o_t[:, None].to(tl.int64) * s_pt + o_r[None, :]
        t_m = tl.load(p_max + o, mask=m, other=float("-inf"))
        t_s = tl.load(p_sum + o, mask=m, other=0.0)
        t_i = tl.load(p_index + o, mask=m, other=2147483647)
        c_m = tl.max(t_m, axis=0)
        c_i = tl.min(tl.where(t_m == c_m[None, :], t_i, 2147483647), axis=0)
        b_new = tl.maximum(b_m, c_m)
        c_s = tl.sum(t_s * tl.exp(t_m - b_new[None, :]), axis=0)
        b_s = b_s * tl.exp(b_m - b_new) + c_s
        # strictly greater: an equal maximum of a later tile has a higher class
        b_i = tl.where(c_m > b_m, c_i, b_i)
        b_m = b_new
    b_lse = b_m + tl.log(b_s)
    b_w = tl.load(p_row_weight + o_r, mask=m_r, other=0.0) * tl.load(p_inverse)
    b_zt = tl.load(p_target_logit + o_r, mask=m_r, other=0.0)
    b_loss = tl.where(b_w == 0.0, 0.0, b_w * (b_lse - b_zt))
    tl.store(p_lse + o_r, b_lse, mask=m_r)
    tl.store(p_loss + o_r, b_loss, mask=m_r)
    tl.store(p_argmax + o_r, b_i.to(tl.int64), mask=m_r)


@_jit
def _cross_entropy_gradient_kernel(
    p_exp, p_max, p_lse, p_target_logit, p_targets, p_row_weight, p_inverse,
    N, W, scale, s_en, s_pt, BR: tl.constexpr, BN: tl.constexpr,
):
    """In place, exp(z - max_t) -> dz = (softmax(z) - [class = target]) * scale * weight / denominator."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    i_t = tl.program_id(1).to(tl.int64)
    o_c = (i_t * BN + tl.arange(0, BN)).to(tl.int32)
    m_r = o_r < N
    m = m_r[:, None] & (o_c < W)[None, :]
    b_lse = tl.load(p_lse + o_r, mask=m_r, other=0.0)
    b_max = tl.load(p_max + i_t * s_pt + o_r, mask=m_r, other=0.0)
    b_zt = tl.load(p_target_logit + o_r, mask=m_r, other=0.0)
    b_t = tl.load(p_targets + o_r, mask=m_r, other=-1)
    b_w = tl.load(p_row_weight + o_r, mask=m_r, other=0.0) * tl.load(p_inverse) * scale
    p_e = p_exp + o_r[:, None] * s_en + o_c[None, :]
    b_p = tl.load(p_e, mask=m, other=0.0).to(tl.float32) * tl.exp(b_max - b_lse)[:, None]
    # the target's own probability comes from the unrounded logit, since p - 1 cancels
    b_p = tl.where(o_c[None, :] == b_t[:, None], tl.exp(b_zt - b_lse)[:, None] - 1.0, b_p)
    b_d = tl.where(b_w[:, None] == 0.0, 0.0, b_p * b_w[:, None])
    tl.store(p_e, b_d.to(p_exp.dtype.element_ty), mask=m)


def _cross_entropy_tile(dtype: torch.dtype) -> tuple[dict, dict]:
    if dtype == torch.float32:
        return dict(BM=64, BN=64, BK=32), dict(num_warps=4, num_stages=2)
    # as the large matrix product; 256 classes a tile make 256 parts a row at 65,536 classes
    return dict(BM=128, BN=256, BK=64), dict(num_warps=8, num_stages=4)


def _cross_entropy_rows(hidden: Tensor, classes: int) -> int:
    """Tokens in one block: 2,048, or fewer where their logits would pass 256 MB, in steps of 128."""
    fitting = _CE_BLOCK_BYTES // (classes * hidden.element_size()) // 128 * 128
    return min(hidden.shape[0], _CE_TOKENS, max(fitting, 128))


def _cross_entropy_classes(weight: Tensor, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Class ranges that run as one product: all at once, or 4,096 by 4,096 where they are cast on the way."""
    classes = weight.shape[0]
    step = classes if weight.dtype == dtype else _CE_CLASSES
    return [(first, min(first + step, classes)) for first in range(0, classes, step)]


def _cross_entropy_logits(hidden, weight, targets, exps, parts, target_logit, logit_scale, store) -> None:
    """Fill the block's exps, parts (max, sum, index) and target logits."""
    (n, d), dtype = hidden.shape, hidden.dtype
    tile, options = _cross_entropy_tile(dtype)
    for first, last in _cross_entropy_classes(weight, dtype):
        w = weight[first:last].to(dtype)
        operands, stored = _product_operands(hidden[None], w.T[None], tile)
        grid = (triton.cdiv(n, tile["BM"]) * triton.cdiv(last - first, tile["BN"]),)
        _fused_chunked_cross_entropy_kernel[grid](
            *operands, targets, exps, *parts, target_logit,
            n, last - first, d, first, logit_scale, exps.stride(0), parts[0].stride(0),
            STORE=store, **stored, **tile, **options,
        )


def _cross_entropy_hidden_gradient(dlogits: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (n, D) = dlogits (n, W) @ weight (W, D); out may be the block of hidden itself."""
    ranges = _cross_entropy_classes(weight, dlogits.dtype)
    if len(ranges) == 1:
        matrix_product(dlogits, weight.to(dlogits.dtype), transpose_b=False, out=out)
        return
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for first, last in ranges:
        w = weight[first:last].to(dlogits.dtype)
        matrix_product(dlogits[:, first:last], w, transpose_b=False, out=total, accumulate=True)
    out.copy_(total)


def _fused_chunked_cross_entropy_fwd(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_weight: Tensor, inverse: Tensor, logit_scale: float,
    dhidden: Tensor | None, dweight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Loss of every row and its argmax; fills dhidden (may be hidden itself) and adds into dweight (f32)."""
    (N, _), W = hidden.shape, weight.shape[0]
    tile, _ = _cross_entropy_tile(hidden.dtype)
    BN = tile["BN"]
    rows, tiles = _cross_entropy_rows(hidden, W), triton.cdiv(W, BN)
    store = dhidden is not None or dweight is not None
    f32 = dict(dtype=torch.float32, device=hidden.device)
    # nan: a target that is no class leaves its logit unwritten, and the loss says so
    target_logit = torch.full((N,), float("nan"), **f32)
    lse, losses = torch.empty(N, **f32), torch.empty(N, **f32)
    argmax = torch.empty(N, dtype=torch.int64, device=hidden.device)
    parts = (
        torch.empty(tiles, rows, **f32),
        torch.empty(tiles, rows, **f32),
        torch.empty(tiles, rows, dtype=torch.int32, device=hidden.device),
    )
    # lines of a multiple of 16 bytes, which the products read as they are
    exps = hidden.new_empty(rows, triton.cdiv(W, 8) * 8)[:, :W] if store else hidden.new_empty(1, 1)
    for first in range(0, N, rows):
        block = slice(first, min(first + rows, N))
        n = block.stop - first
        h, t, zt, w = hidden[block], targets[block], target_logit[block], row_weight[block]
        _cross_entropy_logits(h, weight, t, exps, parts, zt, logit_scale, store)
        _cross_entropy_merge_kernel[(triton.cdiv(n, 16),)](
            *parts, zt, w, inverse, lse[block], losses[block], argmax[block],
            n, tiles, parts[0].stride(0), BT=64, BR=16, num_warps=4,
        )
        if not store:
            continue
        _cross_entropy_gradient_kernel[(triton.cdiv(n, 16), tiles)](
            exps, parts[0], lse[block], zt, t, w, inverse,
            n, W, logit_scale, exps.stride(0), parts[0].stride(0), BR=16, BN=BN, num_warps=4,
        )
        # the weight's gradient first: it reads hidden, which dhidden may overwrite
        if dweight is not None:
            matrix_product(exps[:n], h, transpose_a=True, transpose_b=False, out=dweight, accumulate=True)
        if dhidden is not None:
            _cross_entropy_hidden_gradient(exps[:n], weight, dhidden[block])
    return losses, argmax


def _fused_chunked_cross_entropy_torch(
    hidden: Tensor, weight: Tensor, targets: Tensor, row_weight: Tensor, inverse: Tensor, logit_scale: float,
    dhidden: Tensor | None, dweight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    N, work = hidden.shape[0], row_weight.dtype
    w, rows = weight.to(work), _cross_entropy_rows(hidden, weight.shape[0])
    losses, argmax = row_weight.new_empty(N), torch.empty_like(targets)
    for first in range(0, N, rows):
        block = slice(first, min(first + rows, N))
        h = hidden[block].to(work)
        logits = F.linear(h, w) * logit_scale  # (n, W)
        lse = logits.logsumexp(-1)
        # the first of equals; argmax alone does not promise it
        argmax[block] = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        factor, counted = row_weight[block] * inverse, row_weight[block] != 0
        target = targets[block].clamp_min(0).unsqueeze(-1)
        losses[block] = torch.where(counted, factor * (lse - logits.gather(-1, target).squeeze(-1)), 0)
        if dhidden is None and dweight is None:
            continue
        dlogits = logits.sub_(lse.unsqueeze(-1)).exp_()
        dlogits.scatter_add_(-1, target, torch.full_like(target, -1, dtype=work))
        dlogits = torch.where(counted.unsqueeze(-1), dlogits * (factor * logit_scale).unsqueeze(-1), 0)
        if dweight is not None:
            dweight.addmm_(dlogits.T, h)
        if dhidden is not None:
            dhidden[block] = (dlogits @ w).to(hidden.dtype)
    return losses, argmax


class _FusedChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, row_weight, inverse, logit_scale, wanted, inplace):
        run = _fused_chunked_cross_entropy_fwd if _uses_kernel(hidden) else _fused_chunked_cross_entropy_torch
        dhidden = dweight = None
        if wanted[0]:
            dhidden = hidden.detach() if inplace else torch.empty_like(hidden)
        if wanted[1]:
            dweight = torch.zeros(weight.shape, dtype=row_weight.dtype, device=weight.device)
        losses, argmax = run(hidden, weight, targets, row_weight, inverse, logit_scale, dhidden, dweight)
        if wanted[0] and inplace:
            # a kernel's write goes past the version counter: whoever saved hidden for backward must be told
            torch.autograd.graph.increment_version(hidden)
        ctx.gradients = dhidden, None if dweight is None else dweight.to(weight.dtype)
        ctx.mark_non_differentiable(argmax)
        return losses.sum(), argmax

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do: Tensor, _) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("fused_chunked_cross_entropy keeps its gradients for one backward, got a second one")
        dhidden, dweight = ctx.gradients
        ctx.gradients = None
        for gradient in (dhidden, dweight):
            if gradient is not None:
                gradient.mul_(do)
        return dhidden, dweight, None, None, None, None, None, None


def _cross_entropy_check(hidden: Tensor, weight: Tensor, targets: Tensor, loss_weights: Tensor | None) -> None:
    shapes = f"got hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}"
    fits = hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1]
    _require(fits, f"hidden must be (N, D) and weight (W, D), {shapes}")
    _require(targets.shape == hidden.shape[:1], f"targets must be (N,), {shapes}")
    _require(min(*hidden.shape, weight.shape[0]) >= 1, f"N, D and W must be at least 1, {shapes}")
    _require(targets.dtype == torch.int64, f"targets must be int64, got {targets.dtype}")
    _require_kernel_dtype("hidden", hidden)
    _require_kernel_dtype("weight", weight)
    if loss_weights is not None:
        found = f"loss_weights must be (N,) like targets, got {tuple(loss_weights.shape)}"
        _require(loss_weights.shape == targets.shape, found)
    if not targets.is_cuda:
        # on CUDA the check would wait for the device: there a target that is no class makes the loss nan
        wrong = targets[(targets != _CE_IGNORED) & ((targets < 0) | (targets >= weight.shape[0]))]
        found = f"targets must be -100 or in 0..{weight.shape[0] - 1}, got {wrong[:1].tolist()}"
        _require(wrong.numel() == 0, found)


def fused_chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    loss_weights: Tensor | None = None,
    denominator: float | Tensor | None = None,
    logit_scale: float = 1.0,
    return_argmax: bool = False,
    inplace: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return sum(w * ce) / (denominator or sum(w)), ce the cross entropy of logit_scale * hidden @ weight^T.

    hidden (N, D), weight (W, D), targets (N,) int64, -100 ignored; loss_weights (N,), 1 if absent; denominator a
    number or 0-d tensor. Differentiable once in hidden and weight: both gradients are computed here, products in
    hidden's dtype, the weight's summed in float32. With no weight at all the loss and the gradients are 0.
    return_argmax adds every row's most likely class (N,) int64, the lowest of equals. inplace writes hidden's gradient
    over hidden itself. Needs less than 500 MB beyond inputs and gradients, of which the weight's is the float32 sum (a
    16-bit copy is made of it at the end if weight is 16-bit). Method: arXiv 2410.10989, 2411.09009.
    """
    _cross_entropy_check(hidden, weight, targets, loss_weights)
    work = _compute_dtype(hidden)
    row_weight = torch.ones((), dtype=work, device=hidden.device) if loss_weights is None else loss_weights.to(work)
    row_weight = torch.where(targets == _CE_IGNORED, 0.0, row_weight.detach()).contiguous()  # (N,)
    total = row_weight.sum()
    if denominator is None:
        divisor = total
    elif isinstance(denominator, Tensor):
        divisor = denominator.detach().to(total)
    else:
        divisor = torch.full_like(total, denominator)
    empty = (total == 0) | (divisor == 0)
    inverse = torch.where(empty, 0.0, 1.0 / divisor)
    grad = torch.is_grad_enabled()
    wanted = grad and hidden.requires_grad, grad and weight.requires_grad
    loss, argmax = _FusedChunkedCrossEntropy.apply(
        hidden, weight, targets.contiguous(), row_weight, inverse, float(logit_scale), wanted, inplace
    )
    return (loss, argmax) if return_argmax else loss


# ---------------------------------------------------------------------------
# Newton-Schulz orthogonalisation

# X <- (a + b A + c A^2) X with A = X X^T. The five printed steps bring singular values into 0.68..1.2;
# two cubic steps X <- (1.5 - 0.5 A) X after them bring the leading ones into 0.97..1.
_NS_QUINTIC = (3.4445, -4.7750, 2.0315)
_NS_CUBIC = (1.5, -0.5)
_NS_CUBIC_STEPS = 2
_NS_EPS = 1e-7
# Every step is a polynomial P of A, and what it makes of A is P A P: the steps run on A (R, R), and their product moves
# X after every second printed step. 3,584 x 11,008 takes 2,054 GFLOP in place of 3,200, a square as many as before.
# Emulated in float16, 15 matrices of 256 x 800: norms of 0.977 to 1.0012, as close to the exact map as steps on X are.
# X moved once, after four steps: 0.14 off where one singular value is alone; after three: norms up to 1.017.
_NS_CHAIN = 2
# Smaller side from which CUDA iterates in float16; smaller matrices cost little in float32 and keep its accuracy. The
# scale keeps elements of 1e-8 of a matrix of norm 1 in float16's normal range: an eighth of bf16's error at its speed.
_NS_LOW_SIDE = 256
_NS_LOW_SCALE = 4096.0


@_jit
def _newton_schulz_kernel(
    a_desc, b_desc, p_add, p_out, M, N, K, alpha, beta, diagonal, s_db, s_dm, s_dn, s_ob, s_om, s_on,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, ADD: tl.constexpr, SYMMETRIC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    """out[z] = alpha a[z] b[z] + beta add[z] + diagonal I: one kernel for A = X X^T, polynomials of A and P X.

    A and its polynomials are symmetric: only tiles on and above the diagonal are computed, each is stored twice
    (BM = BN). A tall X comes as its transpose, stored turned.
    """
    i_m, i_n = _product_program(tl.program_id(0), M, N, BM, BN, GROUP)
    if SYMMETRIC:
        if i_m > i_n:
            return
    acc = _product_tile(a_desc, b_desc, tl.program_id(1), i_m, i_n, K, A_TURNED, B_TURNED, BM, BN, BK) * alpha
    i_z = tl.program_id(1).to(tl.int64)
    o_m = i_m.to(tl.int64) * BM + tl.arange(0, BM)
    o_n = i_n.to(tl.int64) * BN + tl.arange(0, BN)
    m_o = (o_m < M)[:, None] & (o_n < N)[None, :]
    if ADD:
        p_d = p_add + i_z * s_db + o_m[:, None] * s_dm + o_n[None, :] * s_dn
        acc += beta * tl.load(p_d, mask=m_o, other=0.0).to(tl.float32)
    if SYMMETRIC:
        acc += tl.where(o_m[:, None] == o_n[None, :], diagonal, 0.0)
    b_o = acc.to(p_out.dtype.element_ty)
    tl.store(p_out + i_z * s_ob + o_m[:, None] * s_om + o_n[None, :] * s_on, b_o, mask=m_o)
    if SYMMETRIC:
        if i_m < i_n:
            tl.store(p_out + i_z * s_ob + o_n[None, :] * s_om + o_m[:, None] * s_on, b_o, mask=m_o)


def _newton_schulz_tile(dtype: torch.dtype, symmetric: bool) -> tuple[dict, dict]:
    if dtype == torch.float32:
        return dict(BM=64, BN=64, BK=32, GROUP=8), dict(num_warps=4, num_stages=2)
    if symmetric:
        # square tiles, so that a tile's mirror image is a tile; of 96 KB each, two programs share a multiprocessor
        return dict(BM=128, BN=128, BK=64, GROUP=8), dict(num_warps=8, num_stages=3)
    return dict(BM=128, BN=256, BK=64, GROUP=8), dict(num_warps=8, num_stages=4)


def _newton_schulz_product(a, b, out, alpha=1.0, add=None, beta=0.0, diagonal=0.0, symmetric=True) -> None:
    """Launch out (n, M, N) = alpha a (n, M, K) @ b (n, K, N) + beta add + diagonal I."""
    (batch, m, k), n = a.shape, b.shape[2]
    tile, options = _newton_schulz_tile(a.dtype, symmetric)
    operands, stored = _product_operands(a, b, tile)
    grid = (triton.cdiv(m, tile["BM"]) * triton.cdiv(n, tile["BN"]), batch)
    _newton_schulz_kernel[grid](
        *operands, out if add is None else add, out, m, n, k, alpha, beta, diagonal,
        *(out if add is None else add).stride(), *out.stride(),
        ADD=add is not None, SYMMETRIC=symmetric, **stored, **tile, **options,
    )


def _newton_schulz_product_torch(a, b, out, alpha=1.0, add=None, beta=0.0, diagonal=0.0, symmetric=True) -> None:
    product = torch.matmul(a, b).mul_(alpha)
    out.copy_(product if add is None else product.add_(add, alpha=beta))
    if diagonal:
        out.diagonal(dim1=1, dim2=2).add_(diagonal)


def _newton_schulz_prescale(x: Tensor, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Divide x (n, R, C) by max |x|, then by max(sqrt(F inf + 1e-7), min(F, sqrt(one inf))); zero stays zero.

    F, inf, one are the Frobenius norm and the largest absolute row and column sums; the minimum bounds the spectral
    norm from above, so that no singular value starts beyond 1. The result, times scale, is in dtype.
    """
    norm, both = torch.linalg.vector_norm, dict(dim=(-2, -1), keepdim=True)
    largest = norm(x, math.inf, **both)
    x = x / torch.where(largest == 0, 1.0, largest)
    frobenius = norm(x, 2, **both)
    row_sum = norm(x, 1, dim=-1, keepdim=True).amax(-2, keepdim=True)
    column_sum = norm(x, 1, dim=-2, keepdim=True).amax(-1, keepdim=True)
    printed = (frobenius * row_sum + _NS_EPS).sqrt()
    bound = torch.minimum(frobenius, (column_sum * row_sum).sqrt())
    return torch.mul(x, scale / torch.maximum(printed, bound), out=torch.empty_like(x, dtype=dtype))


def _newton_schulz_iterate(x: Tensor, scale: float, last: Tensor, steps: int, product) -> None:
    """Run the steps on x (n, R, C), R <= C, its own scratch, `scale` times the prescaled matrix, into `last` (any
    strides, any dtype)."""
    a, b, c = _NS_QUINTIC
    start, turn = _NS_CUBIC
    total, spare = steps + _NS_CUBIC_STEPS, None
    # A, what becomes of it, this step's polynomial, the product of all since x was last moved, and room for the next
    gram, moved, poly, chain, room = (x.new_empty(x.shape[0], x.shape[1], x.shape[1]) for _ in range(5))
    returns = set(range(_NS_CHAIN, steps + 1, _NS_CHAIN))
    for i in range(total):
        fresh = i == 0 or i in returns
        if i in returns:
            spare = torch.empty_like(x) if spare is None else spare
            product(chain, x, spare, 1 / scale, symmetric=False)
            x, spare, scale = spare, x, 1.0
        if fresh:
            product(x, x.mT, gram, 1 / scale**2)
        goes_on = i + 1 < total and i + 1 not in returns
        if i < steps:
            p = chain if fresh else poly
            product(gram, gram, p, c, gram, b, a)
            if not fresh:
                product(poly, chain, room)
                chain, room = room, chain
            if goes_on:
                product(p, gram, moved)
                product(moved, p, gram)
            continue
        if fresh:
            torch.mul(gram, turn, out=chain)
            chain.diagonal(dim1=1, dim2=2).add_(start)
        else:
            product(gram, chain, room, turn, chain, start)
            chain, room = room, chain
        if goes_on:
            product(gram, gram, moved, turn, gram, start)
            product(gram, moved, poly, turn, moved, start)
            gram, poly = poly, gram
    product(chain, x, last, 1 / scale, symmetric=False)


def newton_schulz_orthogonalize(matrix: Tensor, *, steps: int = 5) -> Tensor:
    """Return the matrix, or each of a batch, with its leading singular values brought to 1; a new tensor.

    matrix (R, C) or (n, R, C), any float dtype and any finite scale; same shape and dtype out. The spectral norm of the
    result is in 0.96..1.01; a zero matrix gives zero. CUDA iterates in float16 when the smaller side is 256 or more.
    Quintic iteration with the coefficients of "Muon: an optimizer for hidden layers" (2024), then two cubic steps.
    """
    _require(matrix.dim() in (2, 3), f"matrix must be (R, C) or (n, R, C), got {tuple(matrix.shape)}")
    _require(matrix.is_floating_point(), f"matrix must have a float dtype, got {matrix.dtype}")
    _require(steps >= 0, f"steps must be at least 0, got {steps}")
    if matrix.dtype == torch.float64:
        _require_kernel_dtype("matrix", matrix)
    if matrix.numel() == 0:
        return matrix.clone()
    m = matrix.detach()
    m = (m if m.dim() == 3 else m.unsqueeze(0)).to(_compute_dtype(m))
    kernel = _uses_kernel(m)
    low = m.is_cuda and min(m.shape[1:]) >= _NS_LOW_SIDE
    scale, dtype = (_NS_LOW_SCALE, torch.float16) if low else (1.0, m.dtype)
    x = _newton_schulz_prescale(m, scale, dtype)
    out = torch.empty_like(x, dtype=matrix.dtype)
    # X^T X of a tall matrix is X X^T of its transpose
    x, last = (x.mT, out.mT) if x.shape[1] > x.shape[2] else (x, out)
    _newton_schulz_iterate(x, scale, last, steps, _newton_schulz_product if kernel else _newton_schulz_product_torch)
    return out.view(matrix.shape)


# ---------------------------------------------------------------------------
# Causal depthwise convolution
#
# Here C counts channels and W taps. A program walks BT tokens of BC channels with the last rows in registers, so that
# every byte of x is read once, but for the three rows before its first token (and, in the backward pass, after its
# last). Four taps, the widest case, are always computed: absent ones are zero, and time goes into bytes, not sums.

_CONVOLUTION_MOST_TAPS = 4
# from compiled code, not timed on a device. 256 channels on two warps are 4 a thread, one 8-byte load of bf16: the
# backward pass takes 128 to 183 registers, with 8 a thread 255 and spills on sm_100. 64 tokens keep the partial sums of
# taps under 5 % of the bytes, and make 64 programs of a row of 2,048 tokens and 512 channels
_CONVOLUTION_TILE = dict(BT=64, BC=256, num_warps=2)


@_jit
def _convolution_taps(p_taps, o_c, m_c, W: tl.constexpr):
    """The four weights of each channel, newest first: offset + 1, offset, ...; zero past W."""
    w0 = 1.0 + tl.load(p_taps + o_c * W, mask=m_c, other=0.0).to(tl.float32)
    w1 = tl.load(p_taps + o_c * W + 1, mask=m_c, other=0.0).to(tl.float32)
    w2 = tl.load(p_taps + o_c * W + 2, mask=m_c & (W > 2), other=0.0).to(tl.float32)
    w3 = tl.load(p_taps + o_c * W + 3, mask=m_c & (W > 3), other=0.0).to(tl.float32)
    return w0, w1, w2, w3


@_jit
def _convolution_load(p_row, t, T, C, o_c, m_c):
    """Row t of (T, C) in float32, zero past the end."""
    return tl.load(p_row + t * C + o_c, mask=m_c & (t >= 0) & (t < T), other=0.0).to(tl.float32)


@_jit
def _convolution_before(p_x, p_carry, t, T, C, o_c, m_c, HAS_CARRY: tl.constexpr, W: tl.constexpr):
    """Row t of x, or for t < 0 the carry's row W - 1 + t."""
    b_x = _convolution_load(p_x, t, T, C, o_c, m_c)
    if HAS_CARRY:
        row = t + (W - 1)
        m = m_c & (t < 0) & (row >= 0)
        b_x += tl.load(p_carry + row * C + o_c, mask=m, other=0.0).to(tl.float32)
    return b_x


@_jit
def _convolution_reach(p_doc, t, T, HAS_DOC: tl.constexpr, W: tl.constexpr):
    """How many earlier tokens the taps of token t read: those of its document, at most W - 1."""
    if HAS_DOC:
        return tl.minimum(t - tl.load(p_doc + t, mask=t < T, other=0), W - 1)
    else:
        return tl.full((), W - 1, tl.int64)


@_jit
def _convolution_within(x1, x2, x3, reach):
    """The three earlier rows, zero where out of reach: what lies there may be anything, even nan."""
    return tl.where(reach >= 1, x1, 0.0), tl.where(reach >= 2, x2, 0.0), tl.where(reach >= 3, x3, 0.0)


@_jit
def _convolution_sum(x0, x1, x2, x3, w0, w1, w2, w3, reach):
    """w0 x0 + w1 x1 + w2 x2 + w3 x3, newest first."""
    x1, x2, x3 = _convolution_within(x1, x2, x3, reach)
    return w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3


@_jit_dynamic("T")
def _causal_convolution_kernel(
    p_x, p_taps, p_doc, p_carry, p_y, T, C,
    HAS_DOC: tl.constexpr, HAS_CARRY: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y_t = silu(sum_j (taps_j + [j = 0]) x_{t-j}), four tokens a turn: their loads are in flight together."""
    NC = tl.cdiv(C, BC)
    NT = tl.cdiv(T, BT)
    o_c = tl.program_id(0) % NC * BC + tl.arange(0, BC)
    m_c = o_c < C
    first = (tl.program_id(0) // NC % NT).to(tl.int64) * BT
    i_b = tl.program_id(0).to(tl.int64) // NC // NT
    p_x += i_b * T * C
    p_y += i_b * T * C
    if HAS_DOC:
        p_doc += i_b * T
    if HAS_CARRY:
        p_carry += i_b * (W - 1) * C
    w0, w1, w2, w3 = _convolution_taps(p_taps, o_c, m_c, W)
    r0 = _convolution_before(p_x, p_carry, first - 3, T, C, o_c, m_c, HAS_CARRY, W)
    r1 = _convolution_before(p_x, p_carry, first - 2, T, C, o_c, m_c, HAS_CARRY, W)
    r2 = _convolution_before(p_x, p_carry, first - 1, T, C, o_c, m_c, HAS_CARRY, W)
    for i in range(0, tl.minimum(T - first, BT).to(tl.int32), 4):
        t = first + i
        r3 = _convolution_load(p_x, t, T, C, o_c, m_c)
        r4 = _convolution_load(p_x, t + 1, T, C, o_c, m_c)
        r5 = _convolution_load(p_x, t + 2, T, C, o_c, m_c)
        r6 = _convolution_load(p_x, t + 3, T, C, o_c, m_c)
        s0 = _convolution_sum(r3, r2, r1, r0, w0, w1, w2, w3, _convolution_reach(p_doc, t, T, HAS_DOC, W))
        s1 = _convolution_sum(r4, r3, r2, r1, w0, w1, w2, w3, _convolution_reach(p_doc, t + 1, T, HAS_DOC, W))
        s2 = _convolution_sum(r5, r4, r3, r2, w0, w1, w2, w3, _convolution_reach(p_doc, t + 2, T, HAS_DOC, W))
        s3 = _convolution_sum(r6, r5, r4, r3, w0, w1, w2, w3, _convolution_reach(p_doc, t + 3, T, HAS_DOC, W))
        p_o = p_y + t * C + o_c
        tl.store(p_o, (s0 * tl.sigmoid(s0)).to(p_y.dtype.element_ty), mask=m_c)
        tl.store(p_o + C, (s1 * tl.sigmoid(s1)).to(p_y.dtype.element_ty), mask=m_c & (t + 1 < T))
        tl.store(p_o + 2 * C, (s2 * tl.sigmoid(s2)).to(p_y.dtype.element_ty), mask=m_c & (t + 2 < T))
        tl.store(p_o + 3 * C, (s3 * tl.sigmoid(s3)).to(p_y.dtype.element_ty), mask=m_c & (t + 3 < T))
        r0, r1, r2 = r4, r5, r6


@_jit
def _convolution_gradient(
    b_dy, x0, x1, x2, x3, w0, w1, w2, w3, d1, d2, d3, a0, a1, a2, a3, t, p_doc, T, last,
    HAS_DOC: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Token t's part of the gradients: g = dy silu'(s), dx_{t-j} += w_j g, dtaps_j += g x_{t-j}.

    d1 d2 d3 are the unfinished dx of tokens t - 1 to t - 3; token t finishes the last of them, which is returned first.
    Tokens from `last` on are another program's: it counts their dtaps.
    """
    reach = _convolution_reach(p_doc, t, T, HAS_DOC, W)
    b_s = _convolution_sum(x0, x1, x2, x3, w0, w1, w2, w3, reach)
    b_sig = tl.sigmoid(b_s)
    b_g = b_dy * b_sig * (1.0 + b_s * (1.0 - b_sig))
    g1, g2, g3 = _convolution_within(b_g, b_g, b_g, reach)
    done = d3 + w3 * g3
    d3 = d2 + w2 * g2
    d2 = d1 + w1 * g1
    d1 = w0 * b_g
    b_own = tl.where(t < last, b_g, 0.0)
    x1, x2, x3 = _convolution_within(x1, x2, x3, reach)
    return done, d1, d2, d3, a0 + b_own * x0, a1 + b_own * x1, a2 + b_own * x2, a3 + b_own * x3


@_jit
def _convolution_store(p_dx, p_dcarry, b_d, s, first, last, C, o_c, m_c, HAS_CARRY: tl.constexpr, W: tl.constexpr):
    """Write the gradient of row s: of x if it is this program's, of the carry if it lies before the segment."""
    tl.store(p_dx + s * C + o_c, b_d.to(p_dx.dtype.element_ty), mask=m_c & (s >= first) & (s < last))
    if HAS_CARRY:
        row = s + (W - 1)
        m = m_c & (s < 0) & (row >= 0) & (first == 0)
        tl.store(p_dcarry + row * C + o_c, b_d.to(p_dcarry.dtype.element_ty), mask=m)


@_jit_dynamic("T")
def _causal_convolution_bwd_kernel(
    p_x, p_taps, p_doc, p_carry, p_dy, p_dx, p_dcarry, p_partial, T, C,
    HAS_DOC: tl.constexpr, HAS_CARRY: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx, dcarry and this program's part of dtaps, partial (B NT, W, C); s is recomputed from x.

    The walk goes on three tokens past the program's own, which its last rows also fed.
    """
    NC = tl.cdiv(C, BC)
    NT = tl.cdiv(T, BT)
    o_c = tl.program_id(0) % NC * BC + tl.arange(0, BC)
    m_c = o_c < C
    i_bt = tl.program_id(0).to(tl.int64) // NC
    first = i_bt % NT * BT
    last = tl.minimum(first + BT, T)
    i_b = i_bt // NT
    p_x += i_b * T * C
    p_dy += i_b * T * C
    p_dx += i_b * T * C
    if HAS_DOC:
        p_doc += i_b * T
    if HAS_CARRY:
        p_carry += i_b * (W - 1) * C
        p_dcarry += i_b * (W - 1) * C
    w0, w1, w2, w3 = _convolution_taps(p_taps, o_c, m_c, W)
    r0 = _convolution_before(p_x, p_carry, first - 3, T, C, o_c, m_c, HAS_CARRY, W)
    r1 = _convolution_before(p_x, p_carry, first - 2, T, C, o_c, m_c, HAS_CARRY, W)
    r2 = _convolution_before(p_x, p_carry, first - 1, T, C, o_c, m_c, HAS_CARRY, W)
    d1 = tl.zeros((BC,), dtype=tl.float32)
    d2, d3, a0, a1, a2, a3 = d1, d1, d1, d1, d1, d1
    for i in range(0, (last - first).to(tl.int32) + 3, 4):
        t = first + i
        r3 = _convolution_load(p_x, t, T, C, o_c, m_c)
        r4 = _convolution_load(p_x, t + 1, T, C, o_c, m_c)
        r5 = _convolution_load(p_x, t + 2, T, C, o_c, m_c)
        r6 = _convolution_load(p_x, t + 3, T, C, o_c, m_c)
        g0 = _convolution_load(p_dy, t, T, C, o_c, m_c)
        g1 = _convolution_load(p_dy, t + 1, T, C, o_c, m_c)
        g2 = _convolution_load(p_dy, t + 2, T, C, o_c, m_c)
        g3 = _convolution_load(p_dy, t + 3, T, C, o_c, m_c)
        e0, d1, d2, d3, a0, a1, a2, a3 = _convolution_gradient(
            g0, r3, r2, r1, r0, w0, w1, w2, w3, d1, d2, d3, a0, a1, a2, a3, t, p_doc, T, last, HAS_DOC, W
        )
        e1, d1, d2, d3, a0, a1, a2, a3 = _convolution_gradient(
            g1, r4, r3, r2, r1, w0, w1, w2, w3, d1, d2, d3, a0, a1, a2, a3, t + 1, p_doc, T, last, HAS_DOC, W
        )
        e2, d1, d2, d3, a0, a1, a2, a3 = _convolution_gradient(
            g2, r5, r4, r3, r2, w0, w1, w2, w3, d1, d2, d3, a0, a1, a2, a3, t + 2, p_doc, T, last, HAS_DOC, W
        )
        e3, d1, d2, d3, a0, a1, a2, a3 = _convolution_gradient(
            g3, r6, r5, r4, r3, w0, w1, w2, w3, d1, d2, d3, a0, a1, a2, a3, t + 3, p_doc, T, last, HAS_DOC, W
        )
        _convolution_store(p_dx, p_dcarry, e0, t - 3, first, last, C, o_c, m_c, HAS_CARRY, W)
        _convolution_store(p_dx, p_dcarry, e1, t - 2, first, last, C, o_c, m_c, HAS_CARRY, W)
        _convolution_store(p_dx, p_dcarry, e2, t - 1, first, last, C, o_c, m_c, HAS_CARRY, W)
        _convolution_store(p_dx, p_dcarry, e3, t, first, last, C, o_c, m_c, HAS_CARRY, W)
        r0, r1, r2 = r4, r5, r6
    p_o = p_partial + i_bt * W * C + o_c
    tl.store(p_o, a0, mask=m_c)
    tl.store(p_o + C, a1, mask=m_c)
    tl.store(p_o + 2 * C, a2, mask=m_c & (W > 2))
    tl.store(p_o + 3 * C, a3, mask=m_c & (W > 3))


def _convolution_grid(x: Tensor) -> tuple[int, int]:
    """Blocks of channels, and blocks of tokens over the batch."""
    B, T, C = x.shape
    return triton.cdiv(C, _CONVOLUTION_TILE["BC"]), B * triton.cdiv(T, _CONVOLUTION_TILE["BT"])


def _causal_convolution_fwd(x: Tensor, taps: Tensor, doc_start: Tensor | None, carry: Tensor | None) -> Tensor:
    _, T, C = x.shape
    channel_blocks, token_blocks = _convolution_grid(x)
    y = torch.empty_like(x)
    _causal_convolution_kernel[(channel_blocks * token_blocks,)](
        x, taps, doc_start, carry, y, T, C,
        HAS_DOC=doc_start is not None, HAS_CARRY=carry is not None, W=taps.shape[1], **_CONVOLUTION_TILE,
    )  # fmt: skip
    return y


def _causal_convolution_bwd(
    x: Tensor, taps: Tensor, doc_start: Tensor | None, carry: Tensor | None, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    (_, T, C), W = x.shape, taps.shape[1]
    channel_blocks, token_blocks = _convolution_grid(x)
    dx = torch.empty_like(x)
    dcarry = None if carry is None else torch.empty_like(carry)
    # channels last, so that they are stored side by side
    partial = x.new_empty(token_blocks, W * C, dtype=torch.float32)
    _causal_convolution_bwd_kernel[(channel_blocks * token_blocks,)](
        x, taps, doc_start, carry, dy, dx, dcarry, partial, T, C,
        HAS_DOC=doc_start is not None, HAS_CARRY=carry is not None, W=W, **_CONVOLUTION_TILE,
    )  # fmt: skip
    return dx, _partial_sum(partial, taps.dtype).view(W, C).T, dcarry


def _causal_convolution_taps_torch(x, taps, doc_start, carry) -> tuple[list[Tensor], list[Tensor | None], Tensor]:
    """Rows that each tap reads (B, T, C), where it may (B, T, 1), and the sum over taps; in the computing type."""
    T, W = x.shape[1], taps.shape[1]
    rows = F.pad(x, (0, 0, W - 1, 0)) if carry is None else torch.cat((carry, x), 1)
    rows, index = rows.to(_compute_dtype(x)), torch.arange(T, device=x.device)  # (B, W - 1 + T, C)
    read, inside = [rows[:, W - 1 :]], [None]
    for back in range(1, W):
        earlier, may = rows[:, W - 1 - back : W - 1 - back + T], None
        if doc_start is not None:
            # before the product: what is not read may be nan
            may = (index - back >= doc_start)[..., None]
            earlier = torch.where(may, earlier, 0)
        read.append(earlier)
        inside.append(may)
    total = read[0] * (1 + taps[:, 0])
    for back in range(1, W):
        total = total + read[back] * taps[:, back]
    # below -80 silu is under 2e-33, and exp would overflow
    return read, inside, total.clamp(min=-80)


def _causal_convolution_torch(x, taps, doc_start, carry) -> Tensor:
    *_, total = _causal_convolution_taps_torch(x, taps.to(_compute_dtype(x)), doc_start, carry)
    # as in the gated activation: torch's silu rounds the last elements of a tensor otherwise than the rest
    return (total / (1 + torch.exp(-total))).to(x.dtype)


def _causal_convolution_torch_bwd(x, taps, doc_start, carry, dy) -> tuple[Tensor, Tensor, Tensor | None]:
    W, work = taps.shape[1], taps.to(_compute_dtype(x))
    read, inside, total = _causal_convolution_taps_torch(x, work, doc_start, carry)
    gate = 1 / (1 + torch.exp(-total))
    dtotal = dy * gate * (1 + total * (1 - gate))
    drows = F.pad(dtotal * (1 + work[:, 0]), (0, 0, W - 1, 0))  # (B, W - 1 + T, C)
    dtaps = [(dtotal * read[0]).sum((0, 1))]
    for back in range(1, W):
        part = dtotal if inside[back] is None else torch.where(inside[back], dtotal, 0)
        drows[:, W - 1 - back : W - 1 - back + x.shape[1]] += part * work[:, back]
        dtaps.append((part * read[back]).sum((0, 1)))
    dcarry = None if carry is None else drows[:, : W - 1].to(carry.dtype)
    return drows[:, W - 1 :].to(x.dtype), torch.stack(dtaps, 1).to(taps.dtype), dcarry


class _CausalConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, taps: Tensor, doc_start: Tensor | None, carry: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, taps, doc_start, carry)
        forward = _causal_convolution_fwd if _uses_kernel(x) else _causal_convolution_torch
        return forward(x, taps, doc_start, carry)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        backward = _causal_convolution_bwd if _uses_kernel(saved[0]) else _causal_convolution_torch_bwd
        dx, dtaps, dcarry = backward(*saved, dy.contiguous())
        return dx, dtaps, None, dcarry


def causal_convolution(
    x: Tensor, taps: Tensor, *, doc_start: Tensor | None = None, carry: Tensor | None = None
) -> Tensor:
    """Return y_t = silu(sum_j (taps_j + [j = 0]) x_{t-j}), j = 0 ... W - 1: a causal convolution of each channel, SiLU.

    x and y (B, T, C) bfloat16 or float32 (CPU: float32 or float64), T and C at least 1; taps (C, W) or (C * W,), W 2 to
    4, newest first, of any float type, stored as offsets from the identity: at zero, y = silu(x). Sums are float32.
    doc_start (B, T) int32: index in the row at which each token's document starts, negative where it began that many
    tokens before the row; no tap reads over it (None: it began long before the row). carry (B, W - 1, C) of x's type:
    the inputs before the row, oldest first, which only documents that began before the row read (None: zeros).
    Differentiable once in x, taps and carry. Raises ValueError on a wrong shape or type.
    """
    _require(x.ndim == 3 and min(x.shape) > 0, f"x must be (B, T, C), each at least 1, got {tuple(x.shape)}")
    B, T, C = x.shape
    kinds = (torch.bfloat16, torch.float32) if x.is_cuda else (torch.float32, torch.float64)
    _require(x.dtype in kinds, f"x on {x.device.type} must be one of {kinds}, got {x.dtype}")
    W = taps.numel() // C
    fits = tuple(taps.shape) in ((C, W), (C * W,)) and 2 <= W <= _CONVOLUTION_MOST_TAPS
    _require(fits, f"taps must be ({C}, W) or ({C} * W,), W 2 to {_CONVOLUTION_MOST_TAPS}, got {tuple(taps.shape)}")
    _require_kernel_dtype("taps", taps)
    if doc_start is not None:
        _require(doc_start.shape == (B, T), f"doc_start must have shape {(B, T)}, got {tuple(doc_start.shape)}")
        _require(doc_start.dtype == torch.int32, f"doc_start must be torch.int32, got {doc_start.dtype}")
    if carry is not None:
        found = f"got {tuple(carry.shape)} {carry.dtype}"
        fits = tuple(carry.shape) == (B, W - 1, C) and carry.dtype == x.dtype
        _require(fits, f"carry must be {(B, W - 1, C)} {x.dtype}, {found}")
    x, taps, doc_start, carry = (
        None if given is None else given.contiguous() for given in (x, taps.reshape(C, W), doc_start, carry)
    )
    return _CausalConvolution.apply(x, taps, doc_start, carry)


# ---------------------------------------------------------------------------
# Chunked gated delta rule (recurrent scan)

# exp of anything lower is 0 in float32; the bound keeps the coarse sums of a chunk of 128 tokens exact
_SCAN_LOG_FLOOR = -128.0
# decays are summed as multiples of 1/1024 (exact in float32 to 16,384) plus a rest below 1/2048: after many tokens of
# -80 a plain float32 cumulative sum is wrong by 1e-3, and so would be every later decay of the chunk
_SCAN_COARSE = 1024.0
# per chunk and head, eight float32 rows: coarse and fine sums up to the token (0, 1) and before it (2, 3); decay of the
# entering state for the prediction (4) and the output (5); decay of the token's write to the end of the chunk (6); beta
# (7), whose own elements lie H apart: one load for each, in each layout that a kernel needs it in
_SCAN_GATE_ROWS = 8


@_jit
def _scan_load(ptr, o_t, o_d, stride, n_t, n_d):
    """A (rows, columns) tile whose rows are `stride` elements apart, zero outside (n_t, n_d)."""
    mask = (o_t[:, None] < n_t) & (o_d[None, :] < n_d)
    return tl.load(ptr + o_t[:, None] * stride + o_d[None, :], mask=mask, other=0.0)


@_jit
def _scan_store(ptr, value, o_t, o_d, stride, n_t, n_d):
    mask = (o_t[:, None] < n_t) & (o_d[None, :] < n_d)
    tl.store(ptr + o_t[:, None] * stride + o_d[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@_jit
def _scan_ahead(ptr, o_line):
    """Ask the second-level cache for the 128-byte lines at ptr + o_line, which a later chunk will load."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(ptr + o_line).to(tl.int64)], tl.int32, False, 1
    )


@_jit
def _scan_ahead_tokens(ptr, first, T, stride, o_t, D: tl.constexpr):
    """The rows of tokens first + o_t, D 16-bit values each, `stride` elements apart from one token to the next."""
    for i in tl.static_range(0, D, 64):
        _scan_ahead(ptr + i, tl.minimum(first + o_t, T - 1).to(tl.int64) * stride)


@_jit
def _scan_load_doc(doc_ptr, i_b, i_c, T, o_t, BT: tl.constexpr):
    """Where each token's document starts, from the chunk's first token on; tokens behind the row follow its last."""
    i_t = tl.minimum(i_c * BT + o_t, T - 1)
    return tl.load(doc_ptr + i_b * T + i_t) - (i_c * BT).to(tl.int32)


@_jit
def _scan_decays(p_gate, b_doc, o_t, BT: tl.constexpr, ACROSS: tl.constexpr):
    """Decays between a chunk's tokens: E_ij = prod_{m=j+1}^{i-1} gamma_m of the prediction for doc_start_i <= j < i,
    D_ij = gamma_i E_ij of the output, 1 for j = i; zero elsewhere. One exponential serves both. ACROSS: the axis that i
    does not run along, 1 for tiles (i, j), 0 for (j, i)."""
    ALONG: tl.constexpr = 1 - ACROSS
    out_coarse, out_fine = tl.load(p_gate), tl.load(p_gate + BT)
    pre_coarse, pre_fine = tl.load(p_gate + 2 * BT), tl.load(p_gate + 3 * BT)
    o_i, o_j = tl.expand_dims(o_t, ACROSS), tl.expand_dims(o_t, ALONG)
    coarse = tl.expand_dims(pre_coarse, ACROSS) - tl.expand_dims(out_coarse, ALONG)
    exponent = coarse + (tl.expand_dims(pre_fine, ACROSS) - tl.expand_dims(out_fine, ALONG))
    b_e = tl.exp(tl.where((o_j < o_i) & (o_j >= tl.expand_dims(b_doc, ACROSS)), exponent, float("-inf")))
    gamma = tl.exp((out_coarse - pre_coarse) + (out_fine - pre_fine))
    return tl.where(o_i == o_j, 1.0, tl.expand_dims(gamma, ACROSS) * b_e), b_e


@_jit
def _scan_restart(start_a, coarse_a, fine_a, start_b, coarse_b, fine_b):
    """Running sums that begin anew where start is 1: what associative_scan folds two neighbouring spans with."""
    again = start_b != 0
    return start_a | start_b, tl.where(again, coarse_b, coarse_a + coarse_b), tl.where(again, fine_b, fine_a + fine_b)


@_jit
def _scan_substitute(block_ptr, o_t):
    """Replace strictly lower blocks a (BT/16, 16, 16) f32 by (I - a)^-1, row by row: each thread owns one column.

    The rows of a column stay in its thread's registers and a is read through the first-level cache, one address a
    block: as sums over a (16, 16) tile the same steps took 800 shuffles a chunk.
    """
    p_block = block_ptr + o_t // 16 * 256
    o_c = o_t % 16
    rows = (tl.where(o_c == 0, 1.0, 0.0),)
    for i in tl.static_range(1, 16):
        row = tl.where(o_c == i, 1.0, 0.0)
        for j in tl.static_range(0, i):
            row += tl.load(p_block + (16 * i + j)) * rows[j]
        rows = rows + (row,)  # noqa: RUF005 - the compiler knows no star in a tuple
    tl.debug_barrier()
    for i in tl.static_range(0, 16):
        tl.store(p_block + 16 * i + o_c, rows[i])
    tl.debug_barrier()


@_jit
def _scan_lower_inverse(a, block_ptr, BT: tl.constexpr, PRECISION: tl.constexpr):
    """(I - a)^-1 for strictly lower a (BT, BT): its 16x16 diagonal blocks by substitution in memory of their own,
    block_ptr (BT, 16) f32, then [[X, 0], [Y b X, Y]] merges to 32 and 64."""
    o_t = tl.arange(0, BT)
    i_row = o_t[:, None] // 16
    i_col = o_t[None, :] // 16
    p_block = block_ptr + o_t[:, None] * 16 + o_t[None, :] % 16
    tl.store(p_block, a, mask=i_row == i_col)
    tl.debug_barrier()
    _scan_substitute(block_ptr, o_t)
    inverse = tl.load(p_block, mask=i_row == i_col, other=0.0)
    if BT > 16:
        below = tl.where((i_row // 2 == i_col // 2) & (i_row > i_col), a, 0.0)
        product = tl.dot(inverse, below, input_precision=PRECISION)
        inverse += tl.dot(product, inverse, input_precision=PRECISION)
    if BT > 32:
        below = tl.where(i_row // 2 > i_col // 2, a, 0.0)
        product = tl.dot(inverse, below, input_precision=PRECISION)
        inverse += tl.dot(product, inverse, input_precision=PRECISION)
    return inverse


@_jit_dynamic("T", "NC")
def _chunk_associative_scan_kernel(
    q_ptr, k_ptr, beta_ptr, g_ptr, doc_ptr, inverse_ptr, pair_ptr, gate_ptr, block_ptr,
    T, NC, H, K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr, MERGE: tl.constexpr,
    FLOOR: tl.constexpr = _SCAN_LOG_FLOOR, COARSE: tl.constexpr = _SCAN_COARSE, ROWS: tl.constexpr = _SCAN_GATE_ROWS,
):  # fmt: skip
    """Entry stage, one chunk of one head: the decays, the strictly lower part of (I - A)^-1,
    A_ij = -beta_j (k_j . k_i) prod_{m=j+1}^{i-1} gamma_m for doc_start_i <= j < i, zero elsewhere, and
    pair_ij = (q_i . k_j) prod_{m=j+1}^{i} gamma_m for doc_start_i <= j <= i."""
    i_c = tl.program_id(0).to(tl.int64) % NC
    i_bh = tl.program_id(0).to(tl.int64) // NC
    i_b, i_h = i_bh // H, i_bh % H
    i_chunk = i_bh * NC + i_c
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    n_t = T - i_c * BT
    i_token = (i_b * T + i_c * BT) * H + i_h
    m_t = o_t < n_t
    b_k = _scan_load(k_ptr + i_token * K, o_t, o_k, H * K, n_t, K)  # (BT, BK)
    b_q = _scan_load(q_ptr + i_token * K, o_t, o_k, H * K, n_t, K)
    b_beta = tl.load(beta_ptr + i_token + o_t * H, mask=m_t, other=0.0)
    b_g = tl.load(g_ptr + i_token + o_t * H, mask=m_t, other=0.0)
    b_doc = _scan_load_doc(doc_ptr, i_b, i_c, T, o_t, BT)

    # sums restart at each document, so that no bit of a document depends on another one's decays
    b_g = tl.maximum(b_g, FLOOR)
    b_coarse = tl.floor(b_g * COARSE + 0.5) / COARSE
    b_fine = b_g - b_coarse
    _, out_coarse, out_fine = tl.associative_scan(((b_doc == o_t).to(tl.int32), b_coarse, b_fine), 0, _scan_restart)
    pre_coarse = out_coarse - b_coarse
    pre_fine = out_fine - b_fine
    m_last = o_t == BT - 1
    last_coarse = tl.sum(tl.where(m_last, out_coarse, 0.0))
    last_fine = tl.sum(tl.where(m_last, out_fine, 0.0))
    last_doc = tl.sum(tl.where(m_last, b_doc, 0))
    exponent = (last_coarse - out_coarse) + (last_fine - out_fine)
    to_end = tl.exp(tl.where(o_t >= last_doc, exponent, float("-inf")))
    p_gate = gate_ptr + i_chunk * (ROWS * BT) + o_t
    tl.store(p_gate, out_coarse)
    tl.store(p_gate + BT, out_fine)
    tl.store(p_gate + 2 * BT, pre_coarse)
    tl.store(p_gate + 3 * BT, pre_fine)
    tl.store(p_gate + 4 * BT, tl.where(b_doc < 0, tl.exp(pre_coarse + pre_fine), 0.0))
    tl.store(p_gate + 5 * BT, tl.where(b_doc < 0, tl.exp(out_coarse + out_fine), 0.0))
    tl.store(p_gate + 6 * BT, to_end)
    tl.store(p_gate + 7 * BT, b_beta)

    # the decays are read back, from the cache, in the layout of the products: running sums would pull both tiles of
    # pairs into their own layout, at 500 instructions a thread more
    tl.debug_barrier()
    b_d, b_e = _scan_decays(p_gate, b_doc, o_t, BT, 1)
    b_pair = b_d * tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    _scan_store(pair_ptr + i_chunk * (BT * BT), b_pair, o_t, o_t, BT, BT, BT)
    b_a = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_a *= -tl.load(p_gate + 7 * BT)[None, :] * b_e
    b_inverse = _scan_lower_inverse(b_a, block_ptr + i_chunk * (BT * 16), BT, MERGE)
    b_inverse = tl.where(o_t[:, None] > o_t[None, :], b_inverse, 0.0)
    _scan_store(inverse_ptr + i_chunk * (BT * BT), b_inverse, o_t, o_t, BT, BT, BT)


@_jit_dynamic("T", "NC", "SEGMENTS", "LENGTH")
def _chunk_scan_walk_kernel(
    q_ptr, k_ptr, v_ptr, inverse_ptr, pair_ptr, gate_ptr, initial_ptr, y_ptr, w_ptr, states_ptr, final_ptr, maps_ptr,
    T, NC, H, SEGMENTS, LENGTH, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    PRECISION: tl.constexpr, KEEP: tl.constexpr, MAPS: tl.constexpr, AHEAD: tl.constexpr,
    ROWS: tl.constexpr = _SCAN_GATE_ROWS,
):  # fmt: skip
    """One segment (LENGTH chunks) of one head in order, BV value columns: w = (I - A)^-1 (v - pre K S), u = beta w,
    y = out Q S + pair u, S <- carry S + K^T (to_end u), from the state that enters the segment. KEEP, for the backward
    pass: w and the state that enters each chunk in place of y. MAPS, before the entering states are known: each segment
    but the last as S -> M S + E; E is what it leaves of no state (the first: of the row's), the columns of M what it
    leaves of the identity's when nothing is written but what the prediction takes back."""
    NV: tl.constexpr = (V + BV - 1) // BV
    BLOCKS: tl.constexpr = NV + (K + BV - 1) // BV if MAPS else NV
    walked = SEGMENTS - 1 if MAPS else SEGMENTS
    i_v = tl.program_id(0) % BLOCKS
    i_s = tl.program_id(0) // BLOCKS % walked
    i_bh = (tl.program_id(0) // BLOCKS // walked).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_segment = i_bh * SEGMENTS + i_s
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    n_v = V
    if MAPS:
        is_map = i_v >= NV
        if is_map & (i_s == 0):
            return  # the state that enters the row is known
        o_v -= tl.where(is_map, NV * BV, 0)
        n_v = tl.where(is_map, 0, V)
        b_s = _scan_load(initial_ptr + i_bh * (K * V), o_k, o_v, V, K, tl.where(i_s == 0, n_v, 0))
        b_s = tl.where(is_map & (o_k[:, None] == o_v[None, :]), 1.0, b_s)
    else:
        b_s = _scan_load(initial_ptr + i_segment * (K * V), o_k, o_v, V, K, V)  # (BK, BV) f32
    for i_c in range(i_s * LENGTH, tl.minimum(NC, (i_s + 1) * LENGTH)):
        n_t = T - i_c * BT
        i_chunk = i_bh * NC + i_c
        i_token = (i_b * T + i_c * BT) * H + i_h
        p_gate = gate_ptr + i_chunk * (ROWS * BT) + o_t
        if AHEAD:
            i_next = tl.minimum(i_c + AHEAD, NC - 1)
            p_row = (i_b * T * H + i_h) * K
            _scan_ahead_tokens(k_ptr + p_row, i_next * BT, T, H * K, o_t, K)
            _scan_ahead_tokens(v_ptr + (i_b * T * H + i_h) * V + i_v * BV, i_next * BT, T, H * V, o_t, BV)
            _scan_ahead(inverse_ptr + (i_bh * NC + i_next) * (BT * BT), o_t * BT)
            _scan_ahead(gate_ptr + (i_bh * NC + i_next) * (ROWS * BT), o_t % ROWS * BT + o_t // ROWS % 2 * 32)
            if not (KEEP or MAPS):
                _scan_ahead_tokens(q_ptr + p_row, i_next * BT, T, H * K, o_t, K)
                _scan_ahead(pair_ptr + (i_bh * NC + i_next) * (BT * BT), o_t * BT)
        b_k = _scan_load(k_ptr + i_token * K, o_t, o_k, H * K, n_t, K)
        b_v = _scan_load(v_ptr + i_token * V, o_t, o_v, H * V, n_t, n_v)
        b_inverse = _scan_load(inverse_ptr + i_chunk * (BT * BT), o_t, o_t, BT, BT, BT)
        if not (KEEP or MAPS):
            # beside the others: where they are needed, each chunk would wait for memory a second time
            b_q = _scan_load(q_ptr + i_token * K, o_t, o_k, H * K, n_t, K)
            b_pair = _scan_load(pair_ptr + i_chunk * (BT * BT), o_t, o_t, BT, BT, BT)
            out_entry = tl.load(p_gate + 5 * BT)
        pre_entry = tl.load(p_gate + 4 * BT)
        to_end = tl.load(p_gate + 6 * BT)
        b_beta = tl.load(p_gate + 7 * BT)
        carry = tl.load(gate_ptr + i_chunk * (ROWS * BT) + 6 * BT - 1)
        b_low = b_s.to(b_k.dtype)
        b_x = b_v.to(tl.float32) - pre_entry[:, None] * tl.dot(b_k, b_low, input_precision=PRECISION)  # (BT, BV)
        # the unit diagonal of the inverse is added in float32
        b_w = b_x + tl.dot(b_inverse, b_x.to(b_k.dtype), input_precision=PRECISION)
        b_u = b_beta[:, None] * b_w
        if KEEP:
            _scan_store(states_ptr + i_chunk * (K * V), b_s, o_k, o_v, V, K, V)
            _scan_store(w_ptr + i_token * V, b_w, o_t, o_v, H * V, n_t, V)
        elif not MAPS:
            b_y = out_entry[:, None] * tl.dot(b_q, b_low, input_precision=PRECISION)
            b_y += tl.dot(b_pair, b_u.to(b_k.dtype), input_precision=PRECISION)
            _scan_store(y_ptr + i_token * V, b_y, o_t, o_v, H * V, n_t, V)
        b_write = (to_end[:, None] * b_u).to(b_k.dtype)
        b_s = carry * b_s + tl.dot(tl.trans(b_k), b_write, input_precision=PRECISION)
    if MAPS:
        _scan_store(final_ptr + i_segment * (K * V), b_s, o_k, o_v, V, K, n_v)
        _scan_store(maps_ptr + i_segment * (K * K), b_s, o_k, o_v, K, K, tl.where(is_map, K, 0))
    elif not KEEP:
        _scan_store(final_ptr + i_bh * (K * V), b_s, o_k, o_v, V, K, tl.where(i_s == SEGMENTS - 1, V, 0))


@_jit_dynamic("SEGMENTS")
def _chunk_scan_carry_kernel(
    start_ptr, maps_ptr, ends_ptr, carry_ptr,
    SEGMENTS, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The state that enters each segment, BV columns of one head: start, then E of the first (walked from start), then
    M S + E. REVERSE: the gradient that leaves each segment, from the last one on, with M^T.

    Exact float32 products: the state of a head that forgets nothing in 1,048,576 tokens passes through every one, and
    what tf32 cuts off adds up. The operand is read back from what was stored: a program reads its own columns only."""
    NV: tl.constexpr = (V + BV - 1) // BV
    BI: tl.constexpr = 16
    i_v = tl.program_id(0) % NV
    i_bh = tl.program_id(0).to(tl.int64) // NV
    o_k = tl.arange(0, BK)
    o_i = tl.arange(0, BI)
    o_v = i_v * BV + tl.arange(0, BV)
    b_s = _scan_load(start_ptr + i_bh * (K * V), o_k, o_v, V, K, V)
    for i_step in range(0, SEGMENTS):
        i_segment = i_bh * SEGMENTS + (SEGMENTS - 1 - i_step if REVERSE else i_step)
        p_carry = carry_ptr + i_segment * (K * V)
        _scan_store(p_carry, b_s, o_k, o_v, V, K, V)
        tl.debug_barrier()
        if i_step < SEGMENTS - 1:
            b_s = _scan_load(ends_ptr + i_segment * (K * V), o_k, o_v, V, K, V)
            if i_step > 0:
                for i_k in range(0, K, BI):
                    p_map = maps_ptr + i_segment * (K * K)
                    m_map = (o_k[:, None] < K) & (i_k + o_i[None, :] < K)
                    if REVERSE:
                        p_map += (i_k + o_i)[None, :] * K + o_k[:, None]
                    else:
                        p_map += o_k[:, None] * K + i_k + o_i[None, :]
                    b_m = tl.load(p_map, mask=m_map, other=0.0)
                    b_c = _scan_load(p_carry, i_k + o_i, o_v, V, K, V)
                    b_s += tl.dot(b_m, b_c, input_precision="ieee")


@_jit_dynamic("T", "NC", "SEGMENTS", "LENGTH")
def _chunk_scan_dstate_kernel(
    q_ptr, k_ptr, inverse_ptr, pair_ptr, gate_ptr, do_ptr, dfinal_ptr, dv_ptr, dstates_ptr, dinitial_ptr,
    T, NC, H, SEGMENTS, LENGTH, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    PRECISION: tl.constexpr, MAPS: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr = _SCAN_GATE_ROWS,
):  # fmt: skip
    """One segment of one head in reverse, BV value columns: du = pair^T do + to_end K dS, dv = (I - A)^-T (beta du),
    dS <- carry dS + Q^T (out do) - K^T (pre dv). du stays in float32: with repeated keys the solve cancels most of it,
    and a bf16 copy doubles the error of dv. Keeps dv and the dS that leaves each chunk. MAPS, before the gradients that
    leave the segments are known: what each but the first hands on of its own outputs (the last: and of the row's final
    state)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    walked = SEGMENTS - 1 if MAPS else SEGMENTS
    i_v = tl.program_id(0) % NV
    i_s = tl.program_id(0) // NV % walked
    if MAPS:
        i_s += 1
    i_bh = (tl.program_id(0) // NV // walked).to(tl.int64)
    i_b, i_h = i_bh // H, i_bh % H
    i_segment = i_bh * SEGMENTS + i_s
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    if MAPS:
        b_ds = _scan_load(dfinal_ptr + i_bh * (K * V), o_k, o_v, V, K, tl.where(i_s == SEGMENTS - 1, V, 0))
    else:
        b_ds = _scan_load(dfinal_ptr + i_segment * (K * V), o_k, o_v, V, K, V)  # (BK, BV) f32
    last = tl.minimum(NC, (i_s + 1) * LENGTH) - 1
    for i_step in range(0, last + 1 - i_s * LENGTH):
        i_c = last - i_step
        n_t = T - i_c * BT
        i_chunk = i_bh * NC + i_c
        i_token = (i_b * T + i_c * BT) * H + i_h
        p_gate = gate_ptr + i_chunk * (ROWS * BT) + o_t
        if AHEAD:
            i_next = tl.maximum(i_c - AHEAD, 0)
            p_row = (i_b * T * H + i_h) * K
            _scan_ahead_tokens(q_ptr + p_row, i_next * BT, T, H * K, o_t, K)
            _scan_ahead_tokens(k_ptr + p_row, i_next * BT, T, H * K, o_t, K)
            _scan_ahead_tokens(do_ptr + (i_b * T * H + i_h) * V + i_v * BV, i_next * BT, T, H * V, o_t, BV)
            _scan_ahead(inverse_ptr + (i_bh * NC + i_next) * (BT * BT), o_t * BT)
            _scan_ahead(pair_ptr + (i_bh * NC + i_next) * (BT * BT), o_t * BT)
            _scan_ahead(gate_ptr + (i_bh * NC + i_next) * (ROWS * BT), o_t % ROWS * BT + o_t // ROWS % 2 * 32)
        b_q = _scan_load(q_ptr + i_token * K, o_t, o_k, H * K, n_t, K)
        b_k = _scan_load(k_ptr + i_token * K, o_t, o_k, H * K, n_t, K)
        b_do = _scan_load(do_ptr + i_token * V, o_t, o_v, H * V, n_t, V)
        b_inverse = _scan_load(inverse_ptr + i_chunk * (BT * BT), o_t, o_t, BT, BT, BT)
        b_pair = _scan_load(pair_ptr + i_chunk * (BT * BT), o_t, o_t, BT, BT, BT)
        pre_entry = tl.load(p_gate + 4 * BT)
        out_entry = tl.load(p_gate + 5 * BT)
        to_end = tl.load(p_gate + 6 * BT)
        b_beta = tl.load(p_gate + 7 * BT)
        carry = tl.load(gate_ptr + i_chunk * (ROWS * BT) + 6 * BT - 1)
        b_du = to_end[:, None] * tl.dot(b_k, b_ds.to(b_k.dtype), input_precision=PRECISION)  # (BT, BV)
        b_du += tl.dot(tl.trans(b_pair), b_do, input_precision=PRECISION)
        b_dw = b_beta[:, None] * b_du
        b_dv = b_dw + tl.dot(tl.trans(b_inverse), b_dw.to(b_k.dtype), input_precision=PRECISION)
        if not MAPS:
            _scan_store(dstates_ptr + i_chunk * (K * V), b_ds, o_k, o_v, V, K, V)
            _scan_store(dv_ptr + i_token * V, b_dv, o_t, o_v, H * V, n_t, V)
        b_out = (out_entry[:, None] * b_do.to(tl.float32)).to(b_k.dtype)
        b_pre = (pre_entry[:, None] * b_dv).to(b_k.dtype)
        b_loss = tl.dot(tl.trans(b_k), b_pre, input_precision=PRECISION)
        # one product is subtracted: two sums would be chained in one accumulator
        b_ds = carry * b_ds - b_loss
        b_ds += tl.dot(tl.trans(b_q), b_out, input_precision=PRECISION)
    if MAPS:
        _scan_store(dinitial_ptr + i_segment * (K * V), b_ds, o_k, o_v, V, K, V)
    else:
        _scan_store(dinitial_ptr + i_bh * (K * V), b_ds, o_k, o_v, V, K, tl.where(i_s == 0, V, 0))


@_jit_dynamic("T", "NC")
def _chunk_scan_dpair_kernel(
    q_ptr, k_ptr, doc_ptr, gate_ptr, w_ptr, do_ptr, dv_ptr, dpair_ptr, dsolve_ptr, dbeta_ptr, dg_ptr,
    T, NC, H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr = _SCAN_GATE_ROWS,
):  # fmt: skip
    """Pairs of one chunk: with dP = do w^T, dA = dv w^T, D and E the decays of outputs and predictions, keeps
    dP beta D and dA beta E for the gradients of q and k, and the pairs' part of those of beta_j (what the write u_j
    gets through the outputs, and the column of A) and of the log decays.

    Tiles are (j, i), source by target: sums over targets stay in a warp, and what is summed up to a token is a product
    whose left side lies in registers already."""
    i_chunk = tl.program_id(0).to(tl.int64)
    i_c, i_bh = i_chunk % NC, i_chunk // NC
    i_b, i_h = i_bh // H, i_bh % H
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    n_t = T - i_c * BT
    i_token = (i_b * T + i_c * BT) * H + i_h
    p_gate = gate_ptr + i_chunk * (ROWS * BT) + o_t
    b_dp = tl.zeros((BT, BT), tl.float32)
    b_da = tl.zeros((BT, BT), tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_w = _scan_load(w_ptr + i_token * V, o_t, o_v, H * V, n_t, V)
        b_do = _scan_load(do_ptr + i_token * V, o_t, o_v, H * V, n_t, V)
        b_dv = _scan_load(dv_ptr + i_token * V, o_t, o_v, H * V, n_t, V)
        b_dp += tl.dot(b_w, tl.trans(b_do), input_precision=PRECISION)
        b_da += tl.dot(b_w, tl.trans(b_dv), input_precision=PRECISION)
    b_beta = tl.load(p_gate + 7 * BT)
    b_d, b_e = _scan_decays(p_gate, _scan_load_doc(doc_ptr, i_b, i_c, T, o_t, BT), o_t, BT, 0)
    b_dp *= b_d
    b_da *= b_e
    p_pair = i_chunk * (BT * BT)
    _scan_store(dpair_ptr + p_pair, b_dp * b_beta[:, None], o_t, o_t, BT, BT, BT)
    _scan_store(dsolve_ptr + p_pair, b_da * b_beta[:, None], o_t, o_t, BT, BT, BT)

    b_q = _scan_load(q_ptr + i_token * K, o_t, o_k, H * K, n_t, K)
    b_k = _scan_load(k_ptr + i_token * K, o_t, o_k, H * K, n_t, K)
    b_gain = b_dp * tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    b_net = b_gain - b_da * tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    tl.store(dbeta_ptr + i_token + o_t * H, tl.sum(b_net, axis=1), mask=o_t < n_t)
    # a decay m lies on the way of the pairs j < m <= i of outputs, j < m < i of predictions. Only those are summed,
    # never differences of a row's sums: a decay of -80 gets 0, not rounding noise
    b_gain *= b_beta[:, None]
    b_net *= b_beta[:, None]
    m_behind = o_t[:, None] > o_t[None, :]  # (i, m)
    if q_ptr.dtype.element_ty == tl.float32:
        b_sum = tl.dot(b_net, m_behind.to(tl.float32), input_precision=PRECISION)  # (j, m)
    else:
        # in two halves of 8 bits (tf32 cuts 3e-4 of the result); subtracted, since two sums would be chained in one
        # accumulator
        b_high = b_net.to(b_q.dtype)
        b_rest = (b_high.to(tl.float32) - b_net).to(b_q.dtype)
        b_sum = tl.dot(b_high, m_behind.to(b_q.dtype)) - tl.dot(b_rest, m_behind.to(b_q.dtype))
    b_dg = tl.sum(tl.where(o_t[:, None] < o_t[None, :], b_sum + b_gain, 0.0), axis=0)
    tl.store(dg_ptr + i_token + o_t * H, b_dg, mask=o_t < n_t)


@_jit_dynamic("T", "NC", "PART")
def _chunk_scan_dinput_kernel(
    q_ptr, k_ptr, gate_ptr, w_ptr, states_ptr, do_ptr, dv_ptr, dstates_ptr, dpair_ptr, dsolve_ptr,
    dq_ptr, dk_ptr, dbeta_ptr, dg_ptr,
    T, NC, H, PART, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr = _SCAN_GATE_ROWS,
):  # fmt: skip
    """BK key columns of one chunk: with P = dP beta D and X = dA beta E of the pairs, both stored transposed,
    dQ = out do S^T + P K, dK = P^T Q - (X + X^T) K - pre dv S^T + to_end beta w dS^T, and these columns' part, PART
    elements from the pairs' own, of the gradients of beta (to_end k . (dS w)) and of the log decays: what passes from
    the entering state to each token, and from each to the leaving one."""
    NK: tl.constexpr = (K + BK - 1) // BK
    i_k = tl.program_id(0) % NK
    i_chunk = (tl.program_id(0) // NK).to(tl.int64)
    i_c, i_bh = i_chunk % NC, i_chunk // NC
    i_b, i_h = i_bh // H, i_bh % H
    o_t = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    n_t = T - i_c * BT
    i_token = (i_b * T + i_c * BT) * H + i_h
    p_gate = gate_ptr + i_chunk * (ROWS * BT) + o_t
    b_dq = tl.zeros((BT, BK), tl.float32)
    b_dk = tl.zeros((BT, BK), tl.float32)
    b_dk_end = tl.zeros((BT, BK), tl.float32)
    b_carry = tl.zeros((BK,), tl.float32)
    # the only loop over what is as large as the state: each tile is read once
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_w = _scan_load(w_ptr + i_token * V, o_t, o_v, H * V, n_t, V)
        b_do = _scan_load(do_ptr + i_token * V, o_t, o_v, H * V, n_t, V)
        b_dv = _scan_load(dv_ptr + i_token * V, o_t, o_v, H * V, n_t, V)
        b_s = _scan_load(states_ptr + i_chunk * (K * V), o_k, o_v, V, K, V)
        b_ds = _scan_load(dstates_ptr + i_chunk * (K * V), o_k, o_v, V, K, V)
        b_dq += tl.dot(b_do, tl.trans(b_s), input_precision=PRECISION)
        b_dk += tl.dot(b_dv, tl.trans(b_s), input_precision=PRECISION)
        b_dk_end += tl.dot(b_w, tl.trans(b_ds), input_precision=PRECISION)
        b_carry += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), axis=1)

    b_q = _scan_load(q_ptr + i_token * K, o_t, o_k, H * K, n_t, K)
    b_k = _scan_load(k_ptr + i_token * K, o_t, o_k, H * K, n_t, K)
    b_dp = _scan_load(dpair_ptr + i_chunk * (BT * BT), o_t, o_t, BT, BT, BT)  # P^T (j, i)
    b_x = _scan_load(dsolve_ptr + i_chunk * (BT * BT), o_t, o_t, BT, BT, BT)  # X^T (j, i)
    # decays and beta after the sums, where they are one number a token
    pre_entry, out_entry = tl.load(p_gate + 4 * BT), tl.load(p_gate + 5 * BT)
    to_end, b_beta = tl.load(p_gate + 6 * BT), tl.load(p_gate + 7 * BT)
    z_end = to_end * tl.sum(b_dk_end * b_k.to(tl.float32), axis=1)
    z_pre = -pre_entry * tl.sum(b_dk * b_k.to(tl.float32), axis=1)
    z_out = out_entry * tl.sum(b_dq * b_q.to(tl.float32), axis=1)
    part = (1 + i_k).to(tl.int64) * PART + i_token
    tl.store(dbeta_ptr + part + o_t * H, z_end, mask=o_t < n_t)
    o_i, o_m = o_t[:, None], o_t[None, :]
    b_dg = tl.where(o_i > o_m, (z_out + z_pre)[:, None], tl.where(o_i < o_m, (z_end * b_beta)[:, None], z_out[:, None]))
    carried = tl.sum(b_carry) * tl.load(gate_ptr + i_chunk * (ROWS * BT) + 6 * BT - 1)
    tl.store(dg_ptr + part + o_t * H, tl.sum(b_dg, axis=0) + carried, mask=o_t < n_t)

    b_dk = (to_end * b_beta)[:, None] * b_dk_end - pre_entry[:, None] * b_dk
    b_dq = out_entry[:, None] * b_dq + tl.dot(tl.trans(b_dp), b_k, input_precision=PRECISION)
    # one product is added and two are subtracted, each by itself: sums would be chained in one accumulator
    b_dk += tl.dot(b_dp, b_q, input_precision=PRECISION)
    b_dk -= tl.dot(b_x, b_k, input_precision=PRECISION)
    b_dk -= tl.dot(tl.trans(b_x), b_k, input_precision=PRECISION)
    _scan_store(dq_ptr + i_token * K, b_dq, o_t, o_k, H * K, n_t, K)
    _scan_store(dk_ptr + i_token * K, b_dk, o_t, o_k, H * K, n_t, K)


def _scan_chunks(x: Tensor, chunk: int) -> Tensor:
    """(B, T, H, ...) -> (B, H, N, C, ...), zeros behind the last token."""
    tail = -x.shape[1] % chunk
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, tail))
    return x.unflatten(1, (-1, chunk)).movedim(3, 1)


def _scan_tokens(x: Tensor, tokens: int) -> Tensor:
    """(B, H, N, C, ...) -> (B, T, H, ...), the inverse of _scan_chunks."""
    return x.movedim(1, 3).flatten(1, 2)[:, :tokens].contiguous()


def _scan_torch_gates(log_gamma: Tensor, doc_start: Tensor, chunk: int) -> SimpleNamespace:
    """Decays of every chunk: pairwise (B, H, N, C, C) for predictions and outputs, (B, H, N, C) for the carry."""
    # tokens behind the row continue its last document without decay and without a write
    tail = -doc_start.shape[1] % chunk
    doc = torch.cat([doc_start, doc_start[:, -1:].expand(-1, tail)], dim=1).unflatten(1, (-1, chunk))
    doc = doc - torch.arange(doc.shape[1], device=doc.device)[:, None] * chunk  # (B, N, C), local to the chunk
    index = torch.arange(chunk, device=doc.device)
    within = (index <= index[:, None]) & (index >= doc[..., None])  # (B, N, C, C)
    enters = (doc < 0)[:, None]  # (B, 1, N, C)
    log_gamma = F.pad(log_gamma.clamp(min=_SCAN_LOG_FLOOR), (0, 0, 0, tail)).unflatten(1, (-1, chunk))
    coarse = torch.floor(log_gamma * _SCAN_COARSE + 0.5) / _SCAN_COARSE  # (B, N, C, H)
    fine = log_gamma - coarse
    mask = within.to(log_gamma.dtype)
    sum_coarse, sum_fine = mask @ coarse, mask @ fine
    # (B, H, N, C): up to and including the token (out), up to the token before it (pre)
    out_coarse, out_fine = sum_coarse.permute(0, 3, 1, 2), sum_fine.permute(0, 3, 1, 2)
    pre_coarse, pre_fine = (sum_coarse - coarse).permute(0, 3, 1, 2), (sum_fine - fine).permute(0, 3, 1, 2)

    def pairwise(row_coarse: Tensor, row_fine: Tensor, keep: Tensor) -> Tensor:
        exponent = (row_coarse[..., None] - out_coarse[..., None, :]) + (row_fine[..., None] - out_fine[..., None, :])
        return torch.where(keep[:, None], exponent, -math.inf).exp()

    out_pair = pairwise(out_coarse, out_fine, within)
    out_entry = torch.where(enters, (out_coarse + out_fine).exp(), 0.0)
    return SimpleNamespace(
        pre_pair=pairwise(pre_coarse, pre_fine, within & (index < index[:, None])),
        out_pair=out_pair,
        pre_entry=torch.where(enters, (pre_coarse + pre_fine).exp(), 0.0),
        out_entry=out_entry,
        to_end=out_pair[..., -1, :],
        carry=out_entry[..., -1],
    )


def _scan_torch_states(k, v, beta, gates, initial_state):
    """Solve every chunk against any entering state, then pass the state: the carry is the affine map (M, S)."""
    # (I - A) w = v - pre K S0^T; A is kept strictly lower triangular
    a = -(k @ k.mT) * beta[..., None, :] * gates.pre_pair
    x = torch.cat([v, gates.pre_entry[..., None] * k], dim=-1)
    x = torch.linalg.solve_triangular(-a, x, upper=False, unitriangular=True)
    w_local, w_state = x.split([v.shape[-1], k.shape[-1]], dim=-1)
    writes = (gates.to_end * beta)[..., None] * k
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    m = gates.carry[..., None, None] * eye - writes.mT @ w_state  # (B, H, N, K, K)
    s = writes.mT @ w_local  # (B, H, N, K, V)
    state = initial_state.to(k.dtype).flatten(0, 1)
    states = []
    for m_n, s_n in zip(m.flatten(0, 1).unbind(1), s.flatten(0, 1).unbind(1), strict=True):
        states.append(state)
        state = torch.baddbmm(s_n, m_n, state)
    entering = torch.stack(states, dim=1).unflatten(0, m.shape[:2])  # (B, H, N, K, V)
    w = w_local - w_state @ entering
    return a, m, entering, w, state.unflatten(0, m.shape[:2])


def _chunk_associative_scan_torch(q, k, v, beta, log_gamma, initial_state, doc_start, chunk_size):
    """The vectorised PyTorch form: everything but the state pass is batched over the chunks."""
    tokens = q.shape[1]
    gates = _scan_torch_gates(log_gamma, doc_start, chunk_size)
    q, k, v, beta = (_scan_chunks(x, chunk_size) for x in (q, k, v, beta))
    _, _, entering, w, final_state = _scan_torch_states(k, v, beta, gates, initial_state)
    y = gates.out_entry[..., None] * (q @ entering) + ((q @ k.mT) * gates.out_pair * beta[..., None, :]) @ w
    return _scan_tokens(y, tokens), final_state


def _chunk_associative_scan_torch_bwd(q, k, v, beta, log_gamma, initial_state, doc_start, chunk_size, do, dfinal):
    """Recompute the chunks, pass the state's gradient in reverse, then every chunk's gradients at once."""
    tokens = q.shape[1]
    gates = _scan_torch_gates(log_gamma, doc_start, chunk_size)
    q, k, v, beta, do = (_scan_chunks(x, chunk_size) for x in (q, k, v, beta, do))
    a, m, entering, w, _ = _scan_torch_states(k, v, beta, gates, initial_state)
    qk = q @ k.mT

    # gradient of the writes u = beta w inside the chunk, and through it of the entering state
    du = (qk * gates.out_pair).mT @ do
    dx = torch.linalg.solve_triangular(-a.mT, beta[..., None] * du, upper=True, unitriangular=True)
    out_do = gates.out_entry[..., None] * do
    r = q.mT @ out_do - (gates.pre_entry[..., None] * k).mT @ dx
    dstate = dfinal.to(k.dtype).flatten(0, 1)
    dstates = []
    for m_n, r_n in zip(reversed(m.flatten(0, 1).unbind(1)), reversed(r.flatten(0, 1).unbind(1)), strict=True):
        dstates.append(dstate)
        dstate = torch.baddbmm(r_n, m_n.mT, dstate)
    leaving = torch.stack(dstates[::-1], dim=1).unflatten(0, m.shape[:2])  # (B, H, N, K, V)
    k_leaving = k @ leaving
    du = du + gates.to_end[..., None] * k_leaving
    dv = torch.linalg.solve_triangular(-a.mT, beta[..., None] * du, upper=True, unitriangular=True)

    dp = (do @ w.mT) * beta[..., None, :] * gates.out_pair
    da = dv @ w.mT
    dkk = -da * beta[..., None, :] * gates.pre_pair
    dq_entry = out_do @ entering.mT
    dk_entry = -(gates.pre_entry[..., None] * dv) @ entering.mT
    dq = dq_entry + dp @ k
    dk = dk_entry + dp.mT @ q + (dkk + dkk.mT) @ k + (gates.to_end * beta)[..., None] * (w @ leaving.mT)
    dbeta = (du * w).sum(-1) - (da * (k @ k.mT) * gates.pre_pair).sum(-2)

    # a decay between two tokens collects every pair that spans it: sums of terms, never differences of sums
    ones = torch.ones(chunk_size, chunk_size, dtype=q.dtype, device=q.device)
    span = ((dp * qk).cumsum(-1) * ones.tril(-1) + (da * a).cumsum(-1) * ones.tril(-2)).sum(-2)
    dlog_gamma = F.pad(span[..., :-1], (1, 0))
    dlog_gamma = dlog_gamma + (dq_entry * q).sum(-1) @ ones.tril() + (dk_entry * k).sum(-1) @ ones.tril(-1)
    dlog_gamma = dlog_gamma + (gates.to_end * beta * (w * k_leaving).sum(-1)) @ ones.triu(1)
    dlog_gamma = dlog_gamma + (gates.carry * (leaving * entering).sum((-2, -1)))[..., None]
    grads = (_scan_tokens(x, tokens) for x in (dq, dk, dv, dbeta, dlog_gamma))
    return *grads, dstate.unflatten(0, m.shape[:2])


def _scan_capability(x: Tensor) -> int:
    return torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 9


def _scan_segments(rows: int, chunks: int, multiprocessors: int) -> int:
    """Segments that each of `rows` walks (sequences by heads) over `chunks` is cut into.

    One where the rows are enough programs. Fewer rows: as many as keep the walk (S a row) and the maps (2 S - 3: the
    first segment has no M, the last none at all) in one wave of two programs a row, two a multiprocessor; 28 rows on
    132: 3, 2.5 ms measured for 65,536 tokens (maps and outputs). A row of 1,048,576 tokens is cut to 512 chunks, for
    many waves of which none is nearly empty. Below 16 chunks a segment costs more than it saves.
    """
    one_wave = min(multiprocessors // rows, (multiprocessors // rows + 3) // 2)
    segments = one_wave if chunks <= 4096 else max(one_wave, chunks // 512)
    return max(1, min(segments, chunks // 16))


def _scan_tiles(x: Tensor, v: Tensor, chunk_size: int) -> SimpleNamespace:
    """Tile sizes, warps and pipeline depth of every stage for this call."""
    B, T, H, K = x.shape
    V = v.shape[-1]
    low = x.dtype == torch.bfloat16
    hopper = low and _scan_capability(x) < 10
    # float32: 32 tokens, 16 columns, 8 warps, one buffer: exact products run on the plain units, from registers
    BT = min(chunk_size, 64 if low else 32)
    BK, widest = triton.next_power_of_2(K), triton.next_power_of_2(V)
    BV = min(widest, 32 if low else 16)
    chunks = triton.cdiv(T, BT)
    segments = _scan_segments(B * H, chunks, _multiprocessors(x))
    length = triton.cdiv(chunks, segments)
    merge = "tf32" if low else "ieee"
    # the carried state over pipelined products is not repeatable at 4 and 8 warps on sm_103, Triton 3.6 and 3.7
    # of 32 columns in two warps, the compiler keeps 32 registers and 6 KB of stack in the walk back; 16: 0.7 KB
    narrow = dict(BV=min(widest, 16), num_warps=2 if low else 8, num_stages=1, AHEAD=0)
    # sm_90: four warps, since the compiler gives all of eight the same 64 rows, and each product is made twice; 64
    # columns in 255 registers, so that two programs share a multiprocessor and its 227 KB of shared memory. Both hold a
    # walk's tiles twice when it makes no outputs (three tiles, 74 KB), once when it does or goes back (five, 74 KB).
    # Never 32 columns, nor 32 keys below: with matrix instructions of that width results were wrong, and a walk read
    # outside its shared memory
    # AHEAD asks the second-level cache for the chunk behind those on their way: a third to a half of these walks' time
    # was spent waiting for memory at half of its rate (4 x 8,192 tokens; not measured with it yet)
    ahead = dict(BV=64, num_warps=4, num_stages=2, AHEAD=2) if hopper else narrow
    at_once = dict(BV=64, num_warps=4, num_stages=1, AHEAD=1) if hopper else narrow
    return SimpleNamespace(
        NC=chunks,
        segments=triton.cdiv(chunks, length),
        length=length,
        sizes=dict(K=K, V=V, BK=BK, BT=BT, PRECISION="ieee"),
        merge=merge,
        # 128 registers (96 bytes spilled) put four programs on a multiprocessor in place of two: substitution waits
        entry=dict(num_warps=4, num_stages=1, maxnreg=128) if hopper else dict(num_warps=4 if low else 8, num_stages=1),
        outputs=at_once,
        states=ahead,
        back=at_once,
        carry=dict(BV=min(widest, 16), num_warps=4, num_stages=1),
        pairs=dict(BV=64 if hopper else BV, num_warps=4 if low else 8, num_stages=2 if hopper else 1),
        # 64 keys in four warps: three accumulators in 255 registers, two programs a multiprocessor. Measured, one H200,
        # 4 x 8,192 tokens: 1.16 ms with both halves of the columns on their way at once, 1.08 one after the other (and
        # 0.54 of the pairs); pairs and all keys of a chunk in one kernel of eight warps took 2.22
        inputs=dict(BK=64 if hopper else min(BK, 64 if low else 32), BV=64 if hopper else BV,
                    num_warps=4 if low else 8, num_stages=1),
    )


def _scan_entry(q, k, beta, log_gamma, doc_start, tiles):
    """What each chunk needs of itself alone: inverse, pair, gates."""
    B, T, H, K = k.shape
    NC, BT = tiles.NC, tiles.sizes["BT"]
    inverse, pair = k.new_empty(B, H, NC, BT, BT), k.new_empty(B, H, NC, BT, BT)
    gates = beta.new_empty(B, H, NC, _SCAN_GATE_ROWS, BT)
    blocks = beta.new_empty(B, H, NC, BT, 16)
    _chunk_associative_scan_kernel[(NC * B * H,)](
        q, k, beta, log_gamma, doc_start, inverse, pair, gates, blocks,
        T, NC, H, K=K, BK=tiles.sizes["BK"], BT=BT, PRECISION="ieee", MERGE=tiles.merge, **tiles.entry,
    )  # fmt: skip
    return inverse, pair, gates


def _scan_walk(q, k, v, inverse, pair, gates, initial, y, w, states, final, maps, tiles, options):
    """Walk the segments: outputs y, what the backward pass reads (w, states), or maps."""
    B, T, H, K = k.shape
    blocks = triton.cdiv(v.shape[-1], options["BV"]) + (0 if maps is None else triton.cdiv(K, options["BV"]))
    _chunk_scan_walk_kernel[(blocks * (tiles.segments - (maps is not None)) * B * H,)](
        q, k, v, inverse, pair, gates, initial, y, w, states, final, maps,
        T, tiles.NC, H, tiles.segments, tiles.length, KEEP=states is not None, MAPS=maps is not None,
        **tiles.sizes, **options,
    )  # fmt: skip


def _scan_carry(start, maps, ends, tiles, reverse):
    """Compose the segments' maps in order: the state that enters each (its gradient that leaves it, in reverse)."""
    carry = torch.empty_like(ends)
    B, H, _, K, V = ends.shape
    programs = triton.cdiv(V, tiles.carry["BV"]) * B * H
    _chunk_scan_carry_kernel[(programs if tiles.segments > 1 else 0,)](
        start, maps, ends, carry,
        tiles.segments, K=K, V=V, BK=tiles.sizes["BK"], REVERSE=reverse, **tiles.carry,
    )  # fmt: skip
    return carry if tiles.segments > 1 else start


def _chunk_associative_scan_fwd(q, k, v, beta, log_gamma, initial_state, doc_start, chunk_size):
    """y, final state, and for the backward pass inverse, pair, gates, the states entering the segments, their maps."""
    tiles = _scan_tiles(q, v, chunk_size)
    B, _, H, K = q.shape
    V = v.shape[-1]
    entry = _scan_entry(q, k, beta, log_gamma, doc_start, tiles)
    # a whole row has no maps, and launches them without a program: a longer one later then waits for no compiler
    parts = tiles.segments if tiles.segments > 1 else 0
    ends, maps = beta.new_empty(B, H, parts, K, V), beta.new_empty(B, H, parts, K, K)
    _scan_walk(q, k, v, *entry, initial_state, None, None, None, ends, maps, tiles, tiles.states)
    entering = _scan_carry(initial_state, maps, ends, tiles, False)
    y, final_state = torch.empty_like(v), torch.empty_like(initial_state)
    _scan_walk(q, k, v, *entry, entering, y, None, None, final_state, None, tiles, tiles.outputs)
    return y, final_state, (*entry, entering, maps)


def _chunk_associative_scan_bwd(q, k, v, doc_start, inverse, pair, gates, entering, maps, chunk_size, do, dfinal):
    B, T, H, K = q.shape
    V = v.shape[-1]
    tiles = _scan_tiles(q, v, chunk_size)
    NC, NV = tiles.NC, triton.cdiv(V, tiles.back["BV"])
    # a chunk's state is as large as its inputs: walked again, not kept from the forward pass
    w, states = torch.empty_like(v), k.new_empty(B, H, NC, K, V)
    _scan_walk(q, k, v, inverse, pair, gates, entering, None, w, states, None, None, tiles, tiles.states)
    dv, dstates = torch.empty_like(v), torch.empty_like(states)
    dinitial = torch.empty_like(dfinal)

    def walk_back(dleaving, dentering, programs, is_map):
        _chunk_scan_dstate_kernel[(NV * programs * B * H,)](
            q, k, inverse, pair, gates, do, dleaving, dv, dstates, dentering,
            T, NC, H, tiles.segments, tiles.length, MAPS=is_map, **tiles.sizes, **tiles.back,
        )  # fmt: skip

    dends = gates.new_empty(B, H, maps.shape[2], K, V)
    walk_back(dfinal, dends, tiles.segments - 1, True)
    walk_back(_scan_carry(dfinal, maps, dends, tiles, True), dinitial, tiles.segments, False)
    # the pairs' part of the gates' gradients, then one of each block of keys
    keys = triton.cdiv(K, tiles.inputs["BK"])
    dgates = gates.new_empty(2, 1 + keys, B, T, H)
    dpair, dsolve = torch.empty_like(pair), torch.empty_like(pair)
    _chunk_scan_dpair_kernel[(NC * B * H,)](
        q, k, doc_start, gates, w, do, dv, dpair, dsolve, *dgates, T, NC, H, **tiles.sizes, **tiles.pairs,
    )  # fmt: skip
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    _chunk_scan_dinput_kernel[(NC * B * H * keys,)](
        q, k, gates, w, states, do, dv, dstates, dpair, dsolve, dq, dk, *dgates,
        T, NC, H, B * T * H, **tiles.sizes | tiles.inputs,
    )  # fmt: skip
    dbeta, dlog_gamma = dgates.sum(1)
    return dq, dk, dv, dbeta, dlog_gamma, dinitial


class _ChunkAssociativeScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, beta, log_gamma, initial_state, doc_start, chunk_size):
        inputs = (q, k, v, beta, log_gamma, initial_state, doc_start)
        ctx.chunk_size = chunk_size
        if not _uses_kernel(q):
            ctx.save_for_backward(*inputs)
            return _chunk_associative_scan_torch(*inputs, chunk_size)
        # inverse, pair and gates are 0.4 of q, k and v together (288 bytes a token and head in bf16), and half of the
        # forward pass to make again; the segments' states and maps are 0.2 MB a segment and head
        y, final_state, entry = _chunk_associative_scan_fwd(*inputs, chunk_size)
        ctx.save_for_backward(q, k, v, doc_start, *entry)
        return y, final_state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dfinal):
        saved = ctx.saved_tensors
        backward = _chunk_associative_scan_bwd if _uses_kernel(saved[0]) else _chunk_associative_scan_torch_bwd
        grads = backward(*saved, ctx.chunk_size, do.contiguous(), dfinal.contiguous())
        return *grads, None, None


def _scan_check(q, k, v, beta, log_gamma) -> None:
    """Shapes and types that the scan, the step and the commit share; q may be k."""
    _require(q.ndim == 4 and v.ndim == 4, f"q and v must be 4-D, got {tuple(q.shape)} and {tuple(v.shape)}")
    _require(k.shape == q.shape, f"k must have q's shape {tuple(q.shape)}, got {tuple(k.shape)}")
    _require(v.shape[:3] == q.shape[:3], f"v must begin with {tuple(q.shape[:3])}, got {tuple(v.shape)}")
    _require(min(q.shape) > 0 and v.shape[-1] > 0, f"every dimension must be at least 1, got {tuple(q.shape)}")
    for name, x in (("beta", beta), ("log_gamma", log_gamma)):
        _require(x.shape == q.shape[:3], f"{name} must have shape {tuple(q.shape[:3])}, got {tuple(x.shape)}")
    kinds = (torch.bfloat16, torch.float32) if q.is_cuda else (torch.float32, torch.float64)
    _require(q.dtype in kinds, f"q on {q.device.type} must be one of {kinds}, got {q.dtype}")
    _require(k.dtype == v.dtype == q.dtype, f"k and v must be {q.dtype}, got {k.dtype} and {v.dtype}")
    gate = torch.float64 if q.dtype == torch.float64 else torch.float32
    _require(beta.dtype == log_gamma.dtype == gate, f"gates must be {gate}, got {beta.dtype} and {log_gamma.dtype}")
    for size in (q.shape[-1], v.shape[-1]):
        _require(size % 16 == 0 and size <= 128, f"head dims must be multiples of 16 up to 128, got {size}")


def _scan_check_state(state, q, v) -> None:
    shape = (q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    _require(state.shape == shape, f"state must have shape {shape}, got {tuple(state.shape)}")
    gate = torch.float64 if q.dtype == torch.float64 else torch.float32
    _require(state.dtype == gate, f"state must be {gate}, got {state.dtype}")


def chunk_associative_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_gamma: Tensor,
    *,
    initial_state: Tensor | None = None,
    doc_start: Tensor | None = None,
    chunk_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over a row of tokens, in chunks; return (y, final_state).

    S_t = gamma_t S_{t-1} + beta_t (v_t - S_{t-1} k_t) k_t^T and y_t = S_t q_t: the prediction reads the undecayed state
    (delta rule: arXiv 2406.06484; gated, with the decay first: arXiv 2412.06464).
    q, k (B, T, H, K), v and y (B, T, H, V) bfloat16 or float32 (CPU: float32 or float64); beta, log_gamma (B, T, H)
    float32, log_gamma in natural log and at most 0, beta |k|^2 below 2; states (B, H, K, V) float32, state = S^T.
    doc_start (B, T) int32: index in the row at which each token's document starts, never falling along the row,
    negative where it began in an earlier segment; only such tokens (all of them when doc_start is None) read
    initial_state, and final_state is that of the last document. chunk_size is 16, 32, 64 or 128; kernels use blocks of
    at most 64 inside.
    Differentiable once in everything but doc_start, also through final_state. Raises ValueError on a wrong shape or
    type.
    """
    _scan_check(q, k, v, beta, log_gamma)
    B, T, H, K = q.shape
    _require(chunk_size in (16, 32, 64, 128), f"chunk_size must be 16, 32, 64 or 128, got {chunk_size}")
    if initial_state is None:
        initial_state = beta.new_zeros(B, H, K, v.shape[-1])
    _scan_check_state(initial_state, q, v)
    if doc_start is None:
        doc_start = torch.full((B, T), -1, dtype=torch.int32, device=q.device)
    _require(doc_start.shape == (B, T), f"doc_start must have shape {(B, T)}, got {tuple(doc_start.shape)}")
    _require(doc_start.dtype == torch.int32, f"doc_start must be torch.int32, got {doc_start.dtype}")
    # a short row needs no longer block
    chunk_size = min(chunk_size, 1 << max(4, (T - 1).bit_length()))
    tensors = (x.contiguous() for x in (q, k, v, beta, log_gamma, initial_state, doc_start))
    return _ChunkAssociativeScan.apply(*tensors, chunk_size)


# ---------------------------------------------------------------------------
# Gated delta rule, one step (decoding over a draft tree)

_STEP_MAX_NODES = 8
# fixed, whatever the batch: the order of a node's sums is part of the contract
_STEP_BLOCK_V = 32


@_jit
def _delta_rule_update(b_s, p_k, p_v, p_beta, p_g, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    """S <- gamma S + beta k (v - k S)^T on a (BK, BV) tile in float32; the pointers are at the token."""
    b_k = tl.load(p_k + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + o_v, mask=o_v < V, other=0.0).to(tl.float32)
    b_beta = tl.load(p_beta)
    decay = tl.exp(tl.load(p_g))
    error = b_v - tl.sum(b_s * b_k[:, None], axis=0)
    return decay * b_s + (b_beta * b_k)[:, None] * error[None, :]


@_jit_dynamic("beta_ptr", "g_ptr", "parents_ptr", "N")
def _delta_rule_step_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, g_ptr, state_ptr, parents_ptr, y_ptr,
    N, H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BV value columns of one head: reads the state once; every node replays its own path from it, so that its bits
    depend on that path alone. y = q S."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_bh = tl.program_id(0).to(tl.int64) // NV
    i_b, i_h = i_bh // H, i_bh % H
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_s = (o_k[:, None] < K) & (o_v[None, :] < V)
    b_root = tl.load(state_ptr + i_bh * (K * V) + o_k[:, None] * V + o_v[None, :], mask=m_s, other=0.0)
    for node in range(0, N):
        # parents come before their children, so the set bits in rising order are the path
        path = 0
        cursor = node
        while cursor >= 0:
            path = path | (1 << cursor)
            cursor = tl.load(parents_ptr + cursor)
        b_s = b_root
        for step in range(0, node + 1):
            if (path >> step) & 1:
                i_token = (i_b * N + step) * H + i_h
                p_k, p_v = k_ptr + i_token * K, v_ptr + i_token * V
                b_s = _delta_rule_update(b_s, p_k, p_v, beta_ptr + i_token, g_ptr + i_token, o_k, o_v, K, V)
        i_token = (i_b * N + node) * H + i_h
        b_q = tl.load(q_ptr + i_token * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        b_y = tl.sum(b_s * b_q[:, None], axis=0)
        tl.store(y_ptr + i_token * V + o_v, b_y.to(y_ptr.dtype.element_ty), mask=o_v < V)


@_jit_dynamic("beta_ptr", "g_ptr", "path_ptr", "N", "D")
def _delta_rule_commit_kernel(
    k_ptr, v_ptr, beta_ptr, g_ptr, state_ptr, path_ptr,
    N, D, H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """BV value columns of one head: the nodes of the row's path, in order, up to the first negative one; in place."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % NV
    i_bh = tl.program_id(0).to(tl.int64) // NV
    i_b, i_h = i_bh // H, i_bh % H
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_s = (o_k[:, None] < K) & (o_v[None, :] < V)
    p_s = state_ptr + i_bh * (K * V) + o_k[:, None] * V + o_v[None, :]
    b_s = tl.load(p_s, mask=m_s, other=0.0)
    alive = 1
    for step in range(0, D):
        node = tl.load(path_ptr + i_b * D + step)
        alive = tl.where(node < 0, 0, alive)
        if alive == 1:
            i_token = (i_b * N + node) * H + i_h
            p_k, p_v = k_ptr + i_token * K, v_ptr + i_token * V
            b_s = _delta_rule_update(b_s, p_k, p_v, beta_ptr + i_token, g_ptr + i_token, o_k, o_v, K, V)
    tl.store(p_s, b_s, mask=m_s)


def _delta_rule_sum_torch(x: Tensor) -> Tensor:
    """Sum of (B, H, K, V) over K, elementwise in one fixed order: no batch and no thread count changes a bit."""
    while x.shape[-2] % 2 == 0:
        upper, lower = x.chunk(2, dim=-2)
        x = upper + lower
    total = x[..., 0, :]
    for row in range(1, x.shape[-2]):
        total = total + x[..., row, :]
    return total


def _delta_rule_update_torch(state, k, v, beta, log_gamma):
    """One token on (B, H, K, V): k (B, H, K), v (B, H, V), beta and log_gamma (B, H)."""
    k, v = k.to(state.dtype), v.to(state.dtype)
    error = v - _delta_rule_sum_torch(state * k[..., None])
    write = (beta[..., None] * k)[..., None] * error[..., None, :]
    return log_gamma.contiguous().exp()[..., None, None] * state + write


def _delta_rule_step_torch(q, k, v, beta, log_gamma, state, parents):
    outputs = []
    for node in range(q.shape[1]):
        path, cursor = [], node
        while cursor >= 0:
            path.append(cursor)
            cursor = parents[cursor]
        s = state
        for step in reversed(path):
            s = _delta_rule_update_torch(s, k[:, step], v[:, step], beta[:, step], log_gamma[:, step])
        outputs.append(_delta_rule_sum_torch(s * q[:, node].to(s.dtype)[..., None]))
    return torch.stack(outputs, dim=1).to(v.dtype)


def _delta_rule_commit_torch(k, v, beta, log_gamma, state, path):
    rows = torch.arange(k.shape[0], device=k.device)
    alive = torch.ones_like(rows, dtype=torch.bool)
    for node in path.long().unbind(1):
        alive = alive & (node >= 0)
        node = node.clamp(min=0)
        moved = _delta_rule_update_torch(state, k[rows, node], v[rows, node], beta[rows, node], log_gamma[rows, node])
        state.copy_(torch.where(alive[:, None, None, None], moved, state))


@torch.no_grad()
def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_gamma: Tensor,
    state: Tensor,
    *,
    parents: Tensor | None = None,
) -> Tensor:
    """Evaluate the gated delta rule at every node of a draft tree; return y (B, N, H, V) in v's dtype.

    q, k (B, N, H, K), v (B, N, H, V), beta, log_gamma (B, N, H) float32, N at most 8; state (B, H, K, V) float32 is
    read, not changed. parents (N,) int32: each node's parent, before it in the list, -1 for the committed state; None
    is a chain. A node's bits depend only on its own path. Not differentiable. Raises ValueError on a wrong shape or
    type.
    """
    _scan_check(q, k, v, beta, log_gamma)
    _scan_check_state(state, q, v)
    B, N, H, K = q.shape
    V = v.shape[-1]
    _require(N <= _STEP_MAX_NODES, f"a draft tree must have at most {_STEP_MAX_NODES} nodes, got {N}")
    if parents is None:
        parents = torch.arange(-1, N - 1, dtype=torch.int32, device=q.device)
    _require(parents.shape == (N,), f"parents must have shape {(N,)}, got {tuple(parents.shape)}")
    _require(parents.dtype == torch.int32, f"parents must be torch.int32, got {parents.dtype}")
    if not q.is_cuda:
        ordered = all(-1 <= p < node for node, p in enumerate(parents.tolist()))
        _require(ordered, f"each parent must come before its node, got {parents.tolist()}")
    if not _uses_kernel(q):
        return _delta_rule_step_torch(q, k, v, beta, log_gamma, state, parents.tolist())
    q, k, v, beta, log_gamma, state = (x.contiguous() for x in (q, k, v, beta, log_gamma, state))
    y = torch.empty_like(v)
    BV = min(_STEP_BLOCK_V, triton.next_power_of_2(V))
    _delta_rule_step_kernel[(triton.cdiv(V, BV) * B * H,)](
        q, k, v, beta, log_gamma, state, parents, y,
        N, H, K=K, V=V, BK=triton.next_power_of_2(K), BV=BV, num_warps=4,
    )  # fmt: skip
    return y


@torch.no_grad()
def delta_rule_commit(k: Tensor, v: Tensor, beta: Tensor, log_gamma: Tensor, state: Tensor, path: Tensor) -> None:
    """Apply the accepted nodes of a draft tree to the state, in place, with the arithmetic of delta_rule_step.

    k (B, N, H, K), v (B, N, H, V), beta, log_gamma (B, N, H) float32, state (B, H, K, V) float32 and contiguous;
    path (B, D) int32: node indices in the order of their tokens, -1 ends a row. Raises ValueError on a wrong shape or
    type.
    """
    _scan_check(k, k, v, beta, log_gamma)
    _scan_check_state(state, k, v)
    _require(state.is_contiguous(), f"state must be contiguous, got strides {state.stride()}")
    B, N, H, K = k.shape
    V = v.shape[-1]
    _require(path.ndim == 2 and path.shape[0] == B, f"path must have shape ({B}, D), got {tuple(path.shape)}")
    _require(path.dtype == torch.int32, f"path must be torch.int32, got {path.dtype}")
    if not k.is_cuda:
        _require(int(path.max()) < N, f"path must name nodes below {N}, got {path.tolist()}")
    if not _uses_kernel(k):
        _delta_rule_commit_torch(k, v, beta, log_gamma, state, path)
        return
    k, v, beta, log_gamma, path = (x.contiguous() for x in (k, v, beta, log_gamma, path))
    BV = min(_STEP_BLOCK_V, triton.next_power_of_2(V))
    _delta_rule_commit_kernel[(triton.cdiv(V, BV) * B * H,)](
        k, v, beta, log_gamma, state, path,
        N, path.shape[1], H, K=K, V=V, BK=triton.next_power_of_2(K), BV=BV, num_warps=4,
    )  # fmt: skip


# ---------------------------------------------------------------------------
# Windowed attention with anchors

_ATTENTION_LOG2E = 1.4426950408889634
# a window of this size or more covers every index; larger values would overflow i - window in int32
_ATTENTION_WIDEST = 1 << 30
# queries of one partial sum of the far keys' gradients: at least 1,024, and at most 32 such chunks a row
_ATTENTION_FAR_CHUNK, _ATTENTION_FAR_CHUNKS = 1024, 32
_ATTENTION_PAGE = 64


@_jit
def _attention_rows(ptr, o_row, m_row, stride, K: tl.constexpr, MASKED: tl.constexpr = True):
    """Load rows o_row of a matrix of K columns; masked rows are zero."""
    p_row = ptr + o_row.to(tl.int64)[:, None] * stride + tl.arange(0, K)[None, :]
    if MASKED:
        b_row = tl.load(p_row, mask=m_row[:, None], other=0.0)
    else:
        b_row = tl.load(p_row)
    return b_row


@_jit
def _attention_anchor_rows(seg_ptr, old_ptr, o_a, o_j, m_a, row_shift, old_rows, stride, K: tl.constexpr):
    """Load anchors o_a, at index o_j: from the segment where o_j >= 0, else from the carried anchors."""
    is_old = o_j < 0
    b_seg = _attention_rows(seg_ptr, o_j + row_shift, m_a & (o_j >= 0), stride, K)
    b_old = _attention_rows(old_ptr, o_a, m_a & is_old & (o_a < old_rows), stride, K)
    return tl.where(is_old[:, None], b_old, b_seg)


@_jit
def _attention_full_tiles(lo, hi, full_lo, full_hi, BLOCK: tl.constexpr):
    """Cut [lo, hi), walked from lo in tiles: (end of the tiles before, first and end of those in [full_lo, full_hi)).

    Tiles in which every pair is visible need no mask, which costs about as much as the exponentials.
    """
    first = lo + tl.cdiv(tl.maximum(full_lo - lo, 0), BLOCK) * BLOCK
    end = first + tl.maximum(full_hi - first, 0) // BLOCK * BLOCK
    return tl.minimum(first, hi), first, end


@_jit
def _attention_online(b_s, b_v, acc, m, z, scale2, PRECISION: tl.constexpr):
    """One step of the running softmax, base 2, of scores scale2 b_s: a row that sees nothing here (-inf) keeps its
    (acc, m, z) bit for bit."""
    m_new = tl.maximum(m, tl.max(b_s, 1) * scale2)
    # a row that has seen nothing yet: any finite maximum will do
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    b_p = tl.exp2(b_s * scale2 - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    z = z * alpha + tl.sum(b_p, 1)
    acc = _dot_add(b_p.to(b_v.dtype), b_v, acc * alpha[:, None], PRECISION)
    return acc, m_new, z


@_jit
def _attention_near_mask(o_q, o_r, b_first, window, anchors, READ: tl.constexpr):
    """Pairs inside the window; READ 1 keeps those that read quantised rows, 2 the others, 0 all. Broadcasts.

    Rows count from the first carried key, so that queries o_q and keys o_r are never negative: the same comparisons on
    indices, negative for carried keys, gave wrong outputs on sm_90 with triton 3.6.0 (four forms tried on one H200; the
    cause was not established).
    """
    visible = (o_r >= tl.maximum(b_first, 0)) & (o_r <= o_q) & (o_q - o_r < window)
    if READ > 0:
        quantised = ((o_q - b_first) // 64 - (o_r - b_first) // 64 >= 2) & (o_r - b_first >= anchors)
        if READ == 1:
            visible = visible & quantised
        else:
            visible = visible & (quantised == 0)
    return visible


@_jit
def _attention_near(
    b_q, o_q, b_first, k_ptr, v_ptr, acc, m, z, lo, hi, rows, window, anchors, scale2, stride,
    K: tl.constexpr, BN: tl.constexpr, READ: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """Running softmax over the window keys of rows [lo, hi), hi rounded up to whole tiles; MASKED: not all visible."""
    for r0 in range(lo, hi, BN):
        o_r = r0 + tl.arange(0, BN)
        b_k = _attention_rows(k_ptr, o_r, o_r < rows, stride, K, MASKED)
        b_v = _attention_rows(v_ptr, o_r, o_r < rows, stride, K, MASKED)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if MASKED:
            visible = _attention_near_mask(o_q[:, None], o_r[None, :], b_first[:, None], window, anchors, READ)
            b_s = tl.where(visible, b_s, float("-inf"))
        acc, m, z = _attention_online(b_s, b_v, acc, m, z, scale2, PRECISION)
    return acc, m, z


@_jit
def _attention_near_split(
    b_q, o_q, b_first, k_ptr, v_ptr, acc, m, z, lo, hi, full_lo, full_hi, rows, window, anchors, scale2, stride,
    K: tl.constexpr, BN: tl.constexpr, READ: tl.constexpr, PRECISION: tl.constexpr,
):
    """_attention_near over [lo, hi), without masks in the tiles of [full_lo, full_hi)."""
    stop, first, end = _attention_full_tiles(lo, hi, full_lo, full_hi, BN)
    acc, m, z = _attention_near(b_q, o_q, b_first, k_ptr, v_ptr, acc, m, z, lo, stop, rows, window, anchors, scale2,
                                stride, K, BN, READ, True, PRECISION)
    acc, m, z = _attention_near(b_q, o_q, b_first, k_ptr, v_ptr, acc, m, z, first, end, rows, window, anchors, scale2,
                                stride, K, BN, READ, False, PRECISION)
    return _attention_near(b_q, o_q, b_first, k_ptr, v_ptr, acc, m, z, end, hi, rows, window, anchors, scale2,
                           stride, K, BN, READ, True, PRECISION)


@_jit_dynamic("T", "P", "old_rows", "window", "anchors")
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, q_far_ptr, k_far_ptr, anchor_k_ptr, anchor_v_ptr, k_quant_ptr, v_quant_ptr, ds_ptr,
    y_ptr, lse_ptr, T, P, old_rows, window, anchors, scale2,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, FAR: tl.constexpr, QUANT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BA: tl.constexpr, PRECISION: tl.constexpr,
):
    """y_i = sum_j softmax_j(s_ij) v_j over the keys that query i sees; lse_i = log2 sum_j 2^(s_ij).

    s_ij = scale log2(e) q_i.k_j inside the window and scale log2(e) q_far_i.k_far_j for an anchor beyond it.
    """
    # the tiles with the most keys first
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    i_b = (tl.program_id(1) // H).to(tl.int64)
    i_h = tl.program_id(1) % H
    i_g = i_h // (H // G)
    # rows past the end repeat the last query, so that every row sees a key; they are not stored
    o_m = m0 + tl.arange(0, BM)
    m_m = o_m < T
    o_i = tl.minimum(o_m, T - 1)
    b_ds = tl.load(ds_ptr + i_b * T + o_i)
    d_lo = tl.load(ds_ptr + i_b * T + m0)
    q_base = i_b * T * H * K + i_h * K
    kv_base = i_b * (P + T) * G * K + i_g * K
    b_q = _attention_rows(q_ptr + q_base, o_i, o_i >= 0, H * K, K)
    acc = tl.zeros((BM, K), tl.float32)
    m = tl.full((BM,), float("-inf"), tl.float32)
    z = tl.zeros((BM,), tl.float32)
    # rows of the window keys, counted from the first carried one; a document's first row is negative if not carried
    o_q = o_i + P
    b_first = b_ds + P
    lo = tl.maximum(tl.maximum(d_lo, m0 - window + 1) + P, 0)
    hi = tl.minimum(m0 + BM, T) + P
    # rows that every query of the tile sees: of every query's document, within its window, not after it
    first_hi = tl.max(b_first, 0)
    near_lo = tl.maximum(first_hi, hi - window)
    near_hi = m0 + P + 1
    if QUANT:
        # start of the page before the query's: the first row of full precision
        b_edge = b_first + tl.maximum((o_i - b_ds) // 64 - 1, 0) * 64
        edge_lo = tl.min(b_edge, 0)
        full_lo = lo + tl.maximum(edge_lo - lo, 0) // BN * BN
        anchor_hi = tl.minimum(full_lo, tl.maximum(first_hi, 0) + anchors)
        acc, m, z = _attention_near(b_q, o_q, b_first, k_ptr + kv_base, v_ptr + kv_base, acc, m, z, lo, anchor_hi,
                                    P + T, window, anchors, scale2, G * K, K, BN, 2, True, PRECISION)
        acc, m, z = _attention_near_split(b_q, o_q, b_first, k_quant_ptr + kv_base, v_quant_ptr + kv_base, acc, m, z,
                                          lo, tl.max(b_edge, 0), tl.maximum(near_lo, first_hi + anchors),
                                          tl.minimum(near_hi, edge_lo), P + T, window, anchors, scale2, G * K,
                                          K, BN, 1, PRECISION)
        acc, m, z = _attention_near(b_q, o_q, b_first, k_ptr + kv_base, v_ptr + kv_base, acc, m, z, full_lo, hi,
                                    P + T, window, anchors, scale2, G * K, K, BN, 2, True, PRECISION)
    else:
        acc, m, z = _attention_near_split(b_q, o_q, b_first, k_ptr + kv_base, v_ptr + kv_base, acc, m, z, lo, hi,
                                          near_lo, near_hi, P + T, window, anchors, scale2, G * K, K, BN, 0, PRECISION)
    if FAR:
        none = -2147483647
        b_fd = tl.where(o_i - b_ds >= window, b_ds, none)
        d = tl.max(b_fd, 0)
        b_qf = _attention_rows(q_far_ptr + q_base, o_i, o_i >= 0, H * K, K)
        old_base = i_b * old_rows * G * K + i_g * K
        far_base = i_b * T * G * K + i_g * K
        # the distinct documents of the tile that have far anchors, last first; usually one
        while d > none:
            for a0 in range(0, anchors, BA):
                o_a = a0 + tl.arange(0, BA)
                o_j = d + o_a
                m_a = (o_a < anchors) & (o_j < T) & ((o_j >= 0) | (o_a < old_rows))
                b_k = _attention_anchor_rows(k_far_ptr + far_base, anchor_k_ptr + old_base, o_a, o_j, m_a, 0,
                                             old_rows, G * K, K)
                b_v = _attention_anchor_rows(v_ptr + kv_base, anchor_v_ptr + old_base, o_a, o_j, m_a, P,
                                             old_rows, G * K, K)
                visible = m_a[None, :] & (b_fd == d)[:, None] & (o_i[:, None] - o_j[None, :] >= window)
                b_s = tl.dot(b_qf, tl.trans(b_k), input_precision=PRECISION)
                b_s = tl.where(visible, b_s, float("-inf"))
                acc, m, z = _attention_online(b_s, b_v, acc, m, z, scale2, PRECISION)
            d = tl.max(tl.where(b_fd < d, b_fd, none), 0)
    b_y = acc / z[:, None]
    p_y = y_ptr + q_base + o_m.to(tl.int64)[:, None] * (H * K) + tl.arange(0, K)[None, :]
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_m[:, None])
    tl.store(lse_ptr + (i_b * H + i_h) * T + o_m, m + tl.log2(z), mask=m_m)


@_jit_dynamic("T")
def _attention_delta_kernel(y_ptr, dy_ptr, delta_ptr, T, H: tl.constexpr, K: tl.constexpr, BM: tl.constexpr):
    """delta_i = dy_i . y_i"""
    i_b = (tl.program_id(1) // H).to(tl.int64)
    i_h = tl.program_id(1) % H
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    base = i_b * T * H * K + i_h * K
    b_y = _attention_rows(y_ptr + base, o_m, o_m < T, H * K, K).to(tl.float32)
    b_dy = _attention_rows(dy_ptr + base, o_m, o_m < T, H * K, K).to(tl.float32)
    tl.store(delta_ptr + (i_b * H + i_h) * T + o_m, tl.sum(b_y * b_dy, 1), mask=o_m < T)


@_jit
def _attention_query_step(
    b_q, b_k, b_v, b_dy, b_lse, b_delta, visible, acc, scale2, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """acc += dS K with dS = P o (dy V^T - delta)."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_p = tl.exp2(b_s * scale2 - b_lse[:, None])
    if MASKED:
        b_p = tl.where(visible, b_p, 0.0)
    b_dp = tl.dot(b_dy, tl.trans(b_v), input_precision=PRECISION)
    b_dsc = b_p * (b_dp - b_delta[:, None])
    return _dot_add(b_dsc.to(b_k.dtype), b_k, acc, PRECISION)


@_jit
def _attention_query_near(
    b_q, o_q, b_first, b_dy, b_lse, b_delta, k_ptr, v_ptr, acc, lo, hi, rows, window, anchors, scale2, stride,
    K: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """_attention_query_step over the window keys of rows [lo, hi); MASKED: not all visible."""
    for r0 in range(lo, hi, BN):
        o_r = r0 + tl.arange(0, BN)
        b_k = _attention_rows(k_ptr, o_r, o_r < rows, stride, K, MASKED)
        b_v = _attention_rows(v_ptr, o_r, o_r < rows, stride, K, MASKED)
        visible = True
        if MASKED:
            visible = _attention_near_mask(o_q[:, None], o_r[None, :], b_first[:, None], window, anchors, 0)
        acc = _attention_query_step(b_q, b_k, b_v, b_dy, b_lse, b_delta, visible, acc, scale2, MASKED, PRECISION)
    return acc


@_jit_dynamic("T", "P", "old_rows", "window", "anchors")
def _attention_bwd_query_kernel(
    q_ptr, k_ptr, v_ptr, q_far_ptr, k_far_ptr, anchor_k_ptr, anchor_v_ptr, ds_ptr, dy_ptr, lse_ptr, delta_ptr,
    dq_ptr, dq_far_ptr, T, P, old_rows, window, anchors, scale2, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, FAR: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BA: tl.constexpr, PRECISION: tl.constexpr,
):
    """dq_i = scale sum_j p_ij (dy_i.v_j - delta_i) k_j over the window; dq_far_i the same over the far anchors."""
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    i_b = (tl.program_id(1) // H).to(tl.int64)
    i_h = tl.program_id(1) % H
    i_g = i_h // (H // G)
    o_m = m0 + tl.arange(0, BM)
    m_m = o_m < T
    o_i = tl.minimum(o_m, T - 1)
    b_ds = tl.load(ds_ptr + i_b * T + o_i)
    d_lo = tl.load(ds_ptr + i_b * T + m0)
    q_base = i_b * T * H * K + i_h * K
    kv_base = i_b * (P + T) * G * K + i_g * K
    b_q = _attention_rows(q_ptr + q_base, o_i, o_i >= 0, H * K, K)
    b_dy = _attention_rows(dy_ptr + q_base, o_i, o_i >= 0, H * K, K)
    b_lse = tl.load(lse_ptr + (i_b * H + i_h) * T + o_i)
    b_delta = tl.load(delta_ptr + (i_b * H + i_h) * T + o_i)
    p_out = o_m.to(tl.int64)[:, None] * (H * K) + tl.arange(0, K)[None, :]
    acc = tl.zeros((BM, K), tl.float32)
    lo = tl.maximum(tl.maximum(d_lo, m0 - window + 1) + P, 0)
    hi = tl.minimum(m0 + BM, T) + P
    o_q = o_i + P
    b_first = b_ds + P
    stop, first, end = _attention_full_tiles(lo, hi, tl.maximum(tl.max(b_first, 0), hi - window), m0 + P + 1, BN)
    p_k, p_v = k_ptr + kv_base, v_ptr + kv_base
    acc = _attention_query_near(b_q, o_q, b_first, b_dy, b_lse, b_delta, p_k, p_v, acc, lo, stop, P + T, window,
                                anchors, scale2, G * K, K, BN, True, PRECISION)
    acc = _attention_query_near(b_q, o_q, b_first, b_dy, b_lse, b_delta, p_k, p_v, acc, first, end, P + T, window,
                                anchors, scale2, G * K, K, BN, False, PRECISION)
    acc = _attention_query_near(b_q, o_q, b_first, b_dy, b_lse, b_delta, p_k, p_v, acc, end, hi, P + T, window,
                                anchors, scale2, G * K, K, BN, True, PRECISION)
    acc *= scale
    tl.store(dq_ptr + q_base + p_out, acc.to(dq_ptr.dtype.element_ty), mask=m_m[:, None])
    if FAR:
        none = -2147483647
        b_fd = tl.where(o_i - b_ds >= window, b_ds, none)
        d = tl.max(b_fd, 0)
        b_qf = _attention_rows(q_far_ptr + q_base, o_i, o_i >= 0, H * K, K)
        old_base = i_b * old_rows * G * K + i_g * K
        far_base = i_b * T * G * K + i_g * K
        far = tl.zeros((BM, K), tl.float32)
        while d > none:
            for a0 in range(0, anchors, BA):
                o_a = a0 + tl.arange(0, BA)
                o_j = d + o_a
                m_a = (o_a < anchors) & (o_j < T) & ((o_j >= 0) | (o_a < old_rows))
                b_k = _attention_anchor_rows(k_far_ptr + far_base, anchor_k_ptr + old_base, o_a, o_j, m_a, 0,
                                             old_rows, G * K, K)
                b_v = _attention_anchor_rows(v_ptr + kv_base, anchor_v_ptr + old_base, o_a, o_j, m_a, P,
                                             old_rows, G * K, K)
                visible = m_a[None, :] & (b_fd == d)[:, None] & (o_i[:, None] - o_j[None, :] >= window)
                far = _attention_query_step(b_qf, b_k, b_v, b_dy, b_lse, b_delta, visible, far, scale2, True,
                                            PRECISION)
            d = tl.max(tl.where(b_fd < d, b_fd, none), 0)
        far *= scale
        tl.store(dq_far_ptr + q_base + p_out, far.to(dq_far_ptr.dtype.element_ty), mask=m_m[:, None])


@_jit
def _attention_key_step(
    b_q, b_k, b_v, b_dy, b_lse, b_delta, visible, b_dk, b_dv, scale2, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """dv += P^T dy, dk += dS^T q, scale aside; both are formed transposed, so no accumulator is ever transposed."""
    b_st = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    b_pt = tl.exp2(b_st * scale2 - b_lse[None, :])
    if MASKED:
        b_pt = tl.where(visible, b_pt, 0.0)
    b_dv = _dot_add(b_pt.to(b_dy.dtype), b_dy, b_dv, PRECISION)
    b_dpt = tl.dot(b_v, tl.trans(b_dy), input_precision=PRECISION)
    b_dst = b_pt * (b_dpt - b_delta[None, :])
    b_dk = _dot_add(b_dst.to(b_q.dtype), b_q, b_dk, PRECISION)
    return b_dk, b_dv


@_jit
def _attention_key_near(
    q_ptr, dy_ptr, lse_ptr, delta_ptr, ds_ptr, b_k, b_v, o_row, b_dk, b_dv, lo, hi, T, P, window, scale2, stride,
    K: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):
    """_attention_key_step over the queries [lo, hi) of one head; MASKED: not all of them see every key of the tile."""
    for i0 in range(lo, hi, BM):
        o_i = i0 + tl.arange(0, BM)
        m_i = o_i < T
        b_q = _attention_rows(q_ptr, o_i, m_i, stride, K, MASKED)
        b_dy = _attention_rows(dy_ptr, o_i, m_i, stride, K, MASKED)
        visible = True
        if MASKED:
            b_lse = tl.load(lse_ptr + o_i, mask=m_i, other=0.0)
            b_delta = tl.load(delta_ptr + o_i, mask=m_i, other=0.0)
            b_ds = tl.load(ds_ptr + o_i, mask=m_i, other=0)
            visible = _attention_near_mask(o_i[None, :] + P, o_row[:, None], b_ds[None, :] + P, window, 0, 0)
            visible = visible & m_i[None, :]
        else:
            b_lse = tl.load(lse_ptr + o_i)
            b_delta = tl.load(delta_ptr + o_i)
        b_dk, b_dv = _attention_key_step(b_q, b_k, b_v, b_dy, b_lse, b_delta, visible, b_dk, b_dv, scale2, MASKED,
                                         PRECISION)
    return b_dk, b_dv


@_jit_dynamic("T", "P", "window")
def _attention_bwd_key_kernel(
    q_ptr, k_ptr, v_ptr, ds_ptr, dy_ptr, lse_ptr, delta_ptr, end_ptr, dk_ptr, dv_ptr, T, P, window, scale2, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):
    """dk_j, dv_j of the window pairs: the sum over the group's heads and over the queries that can see the tile."""
    i_n = tl.program_id(0)
    i_b = (tl.program_id(1) // G).to(tl.int64)
    i_g = tl.program_id(1) % G
    o_row = i_n * BN + tl.arange(0, BN)
    m_row = o_row < P + T
    j_lo = i_n * BN - P
    kv_base = i_b * (P + T) * G * K + i_g * K
    b_k = _attention_rows(k_ptr + kv_base, o_row, m_row, G * K, K)
    b_v = _attention_rows(v_ptr + kv_base, o_row, m_row, G * K, K)
    b_dk = tl.zeros((BN, K), tl.float32)
    b_dv = tl.zeros((BN, K), tl.float32)
    # the first query of a document later than the tile, and the first one beyond the window, end the loop; a query of
    # no document later than the tile's first key sees it all
    p_end = end_ptr + i_b * 2 * tl.num_programs(0) + i_n
    lo = tl.maximum(j_lo, 0)
    hi = tl.minimum(tl.load(p_end + tl.num_programs(0)), j_lo + BN - 1 + window)
    full_hi = tl.minimum(tl.load(p_end), j_lo + window)
    stop, first, end = _attention_full_tiles(lo, hi, j_lo + BN - 1, full_hi, BM)
    for i_r in range(H // G):
        i_h = i_g * (H // G) + i_r
        p_q = q_ptr + i_b * T * H * K + i_h * K
        p_dy = dy_ptr + i_b * T * H * K + i_h * K
        p_lse = lse_ptr + (i_b * H + i_h) * T
        p_delta = delta_ptr + (i_b * H + i_h) * T
        p_ds = ds_ptr + i_b * T
        b_dk, b_dv = _attention_key_near(p_q, p_dy, p_lse, p_delta, p_ds, b_k, b_v, o_row, b_dk, b_dv, lo, stop,
                                         T, P, window, scale2, H * K, K, BM, True, PRECISION)
        b_dk, b_dv = _attention_key_near(p_q, p_dy, p_lse, p_delta, p_ds, b_k, b_v, o_row, b_dk, b_dv, first, end,
                                         T, P, window, scale2, H * K, K, BM, False, PRECISION)
        b_dk, b_dv = _attention_key_near(p_q, p_dy, p_lse, p_delta, p_ds, b_k, b_v, o_row, b_dk, b_dv, end, hi,
                                         T, P, window, scale2, H * K, K, BM, True, PRECISION)
    b_dk *= scale
    p_out = kv_base + o_row.to(tl.int64)[:, None] * (G * K) + tl.arange(0, K)[None, :]
    tl.store(dk_ptr + p_out, b_dk.to(dk_ptr.dtype.element_ty), mask=m_row[:, None])
    tl.store(dv_ptr + p_out, b_dv.to(dv_ptr.dtype.element_ty), mask=m_row[:, None])


@_jit_dynamic("T", "P", "old_rows", "window", "anchors", "chunk")
def _attention_bwd_far_kernel(
    v_ptr, q_far_ptr, k_far_ptr, anchor_k_ptr, anchor_v_ptr, ds_ptr, dy_ptr, lse_ptr, delta_ptr, item_ptr,
    dk_part_ptr, dv_part_ptr, T, P, old_rows, window, anchors, chunk, scale2, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BA: tl.constexpr, PRECISION: tl.constexpr,
):
    """Partial dk_far, dv of one document's anchors over one item: the document's far queries within a chunk."""
    i_w = tl.program_id(0)
    n_items = tl.num_programs(0)
    i_b = (tl.program_id(1) // G).to(tl.int64)
    i_g = tl.program_id(1) % G
    lo = tl.load(item_ptr + i_b * (n_items + 1) + i_w)
    if lo < T:
        hi = tl.minimum(tl.load(item_ptr + i_b * (n_items + 1) + i_w + 1), (lo // chunk + 1) * chunk)
        d = tl.load(ds_ptr + i_b * T + lo)
        o_a = tl.program_id(2) * BA + tl.arange(0, BA)
        o_j = d + o_a
        m_a = (o_a < anchors) & (o_j < T) & ((o_j >= 0) | (o_a < old_rows))
        old_base = i_b * old_rows * G * K + i_g * K
        b_k = _attention_anchor_rows(k_far_ptr + i_b * T * G * K + i_g * K, anchor_k_ptr + old_base, o_a, o_j, m_a, 0,
                                     old_rows, G * K, K)
        b_v = _attention_anchor_rows(v_ptr + i_b * (P + T) * G * K + i_g * K, anchor_v_ptr + old_base, o_a, o_j, m_a,
                                     P, old_rows, G * K, K)
        b_dk = tl.zeros((BA, K), tl.float32)
        b_dv = tl.zeros((BA, K), tl.float32)
        for i_r in range(H // G):
            i_h = i_g * (H // G) + i_r
            q_base = i_b * T * H * K + i_h * K
            for i0 in range(lo, hi, BM):
                o_i = i0 + tl.arange(0, BM)
                m_i = o_i < hi
                b_q = _attention_rows(q_far_ptr + q_base, o_i, m_i, H * K, K)
                b_dy = _attention_rows(dy_ptr + q_base, o_i, m_i, H * K, K)
                b_lse = tl.load(lse_ptr + (i_b * H + i_h) * T + o_i, mask=m_i, other=0.0)
                b_delta = tl.load(delta_ptr + (i_b * H + i_h) * T + o_i, mask=m_i, other=0.0)
                b_ds = tl.load(ds_ptr + i_b * T + o_i, mask=m_i, other=0)
                visible = m_a[:, None] & (m_i & (b_ds == d))[None, :] & (o_i[None, :] - o_j[:, None] >= window)
                b_dk, b_dv = _attention_key_step(b_q, b_k, b_v, b_dy, b_lse, b_delta, visible, b_dk, b_dv, scale2,
                                                 True, PRECISION)
        rows = tl.num_programs(2) * BA
        p_part = ((i_b * G + i_g) * n_items + i_w) * rows * K + o_a[:, None] * K + tl.arange(0, K)[None, :]
        tl.store(dk_part_ptr + p_part, b_dk * scale)
        tl.store(dv_part_ptr + p_part, b_dv)


@_jit_dynamic("T", "P", "old_rows", "anchors", "n_items")
def _attention_far_sum_kernel(
    dk_part_ptr, dv_part_ptr, ds_ptr, slot_ptr, slot_item_ptr, dv_ptr, dk_far_ptr, danchor_k_ptr, danchor_v_ptr,
    T, P, old_rows, anchors, n_items, G: tl.constexpr, K: tl.constexpr, BA: tl.constexpr,
):
    """Add one document's partial sums in item order; dv's rows already hold the window part."""
    i_u = tl.program_id(0)
    n_slots = tl.num_programs(0)
    i_b = (tl.program_id(1) // G).to(tl.int64)
    i_g = tl.program_id(1) % G
    first = tl.load(slot_ptr + i_b * n_slots + i_u)
    if first < T:
        d = tl.load(ds_ptr + i_b * T + first)
        o_a = tl.program_id(2) * BA + tl.arange(0, BA)
        o_j = d + o_a
        o_k = tl.arange(0, K)
        rows = tl.num_programs(2) * BA
        b_dk = tl.zeros((BA, K), tl.float32)
        b_dv = tl.zeros((BA, K), tl.float32)
        item_lo = tl.load(slot_item_ptr + i_b * (n_slots + 1) + i_u)
        item_hi = tl.load(slot_item_ptr + i_b * (n_slots + 1) + i_u + 1)
        for i_w in range(item_lo, item_hi):
            p_part = ((i_b * G + i_g) * n_items + i_w) * rows * K + o_a[:, None] * K + o_k[None, :]
            b_dk += tl.load(dk_part_ptr + p_part)
            b_dv += tl.load(dv_part_ptr + p_part)
        m_seg = ((o_a < anchors) & (o_j >= 0) & (o_j < T))[:, None]
        m_old = ((o_a < anchors) & (o_j < 0) & (o_a < old_rows))[:, None]
        head = i_g * K + o_k[None, :]
        p_far = dk_far_ptr + (i_b * T + o_j.to(tl.int64))[:, None] * (G * K) + head
        p_v = dv_ptr + (i_b * (P + T) + P + o_j.to(tl.int64))[:, None] * (G * K) + head
        p_old = (i_b * old_rows + o_a.to(tl.int64))[:, None] * (G * K) + head
        tl.store(p_far, b_dk.to(dk_far_ptr.dtype.element_ty), mask=m_seg)
        b_near = tl.load(p_v, mask=m_seg, other=0.0).to(tl.float32)
        tl.store(p_v, (b_near + b_dv).to(dv_ptr.dtype.element_ty), mask=m_seg)
        tl.store(danchor_k_ptr + p_old, b_dk.to(danchor_k_ptr.dtype.element_ty), mask=m_old)
        tl.store(danchor_v_ptr + p_old, b_dv.to(danchor_v_ptr.dtype.element_ty), mask=m_old)


def _attention_tiles(name: str, x: Tensor, anchors: int) -> SimpleNamespace:
    """Fixed tiles per kernel and type: query rows BM, key rows BN, anchors BA, and the launch options."""
    half = x.dtype != torch.float32
    BM, BN, warps, stages = {
        # bf16, K = 128, sm_90, Triton 3.6: all at 255 registers; the loops without masks spill nothing and issue 512,
        # 285 and 445 instructions a tile, for 2,800, 2,100 and 2,800 clocks of its products
        ("fwd", True): (128, 128, 8, 2),
        ("query", True): (128, 64, 8, 2),
        ("key", True): (64, 128, 8, 2),
        ("far", True): (64, 64, 8, 2),
        # float32: exact products hold whole operand rows in registers, so the tiles are small (stack 24 to 80 bytes)
        ("fwd", False): (32, 32, 8, 1),
        ("query", False): (32, 32, 8, 1),
        ("key", False): (32, 32, 8, 1),
        ("far", False): (32, 32, 8, 1),
    }[name, half]
    BA = min(max(16, 1 << (anchors - 1).bit_length()), 64 if half else 32)
    precision = "tf32" if half else "ieee"
    return SimpleNamespace(BM=BM, BN=BN, BA=BA, precision=precision, num_warps=warps, num_stages=stages)


def _attention_fwd(q, k, v, q_far, k_far, anchor_k, anchor_v, doc_start, k_quant, v_quant, window, anchors, scale):
    B, T, H, K = q.shape
    G, P = k.shape[2], k.shape[1] - T
    tiles = _attention_tiles("fwd", q, anchors)
    y = torch.empty_like(q)
    lse = q.new_empty((B, H, T), dtype=torch.float32)
    far = anchors > 0 and q_far is not None
    _attention_fwd_kernel[(triton.cdiv(T, tiles.BM), B * H)](
        q, k, v, q_far if far else q, k_far if far else k, *_attention_carried(anchor_k, anchor_v, k),
        k if k_quant is None else k_quant, v if v_quant is None else v_quant, doc_start, y, lse,
        T, P, 0 if anchor_k is None else anchor_k.shape[1], window, anchors, scale * _ATTENTION_LOG2E,
        H=H, G=G, K=K, FAR=far, QUANT=k_quant is not None,
        BM=tiles.BM, BN=tiles.BN, BA=tiles.BA, PRECISION=tiles.precision,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )
    return y, lse


def _attention_carried(anchor_k, anchor_v, k):
    """The carried anchors, or a stand-in pointer that no program reads."""
    return (k, k) if anchor_k is None else (anchor_k, anchor_v)


def _attention_bwd_query(q, k, v, q_far, k_far, anchor_k, anchor_v, doc_start, dy, lse, delta, window, anchors, scale):
    B, T, H, K = q.shape
    G, P = k.shape[2], k.shape[1] - T
    tiles = _attention_tiles("query", q, anchors)
    far = anchors > 0 and q_far is not None
    dq = torch.empty_like(q)
    dq_far = torch.empty_like(q) if far else dq
    _attention_bwd_query_kernel[(triton.cdiv(T, tiles.BM), B * H)](
        q, k, v, q_far if far else q, k_far if far else k, *_attention_carried(anchor_k, anchor_v, k),
        doc_start, dy, lse, delta, dq, dq_far,
        T, P, 0 if anchor_k is None else anchor_k.shape[1], window, anchors, scale * _ATTENTION_LOG2E, scale,
        H=H, G=G, K=K, FAR=far, BM=tiles.BM, BN=tiles.BN, BA=tiles.BA, PRECISION=tiles.precision,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )
    return dq, dq_far if far else None


def _attention_bwd_key(q, k, v, doc_start, dy, lse, delta, window, scale):
    B, T, H, K = q.shape
    G, P = k.shape[2], k.shape[1] - T
    tiles = _attention_tiles("key", q, 0)
    n_tiles = triton.cdiv(P + T, tiles.BN)
    # (B, 2 n_tiles): how many queries belong to documents that start at or before each tile's first key, its last key
    first = torch.arange(n_tiles, device=q.device, dtype=torch.int32) * tiles.BN - P
    edges = torch.cat((first, first + tiles.BN - 1)).expand(B, -1).contiguous()
    end = torch.searchsorted(doc_start, edges, right=True, out_int32=True)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    _attention_bwd_key_kernel[(n_tiles, B * G)](
        q, k, v, doc_start, dy, lse, delta, end, dk, dv, T, P, window, scale * _ATTENTION_LOG2E, scale,
        H=H, G=G, K=K, BM=tiles.BM, BN=tiles.BN, PRECISION=tiles.precision,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )
    return dk, dv


def _attention_far_items(doc_start: Tensor, window: int, chunk: int):
    """Cut the far queries into items: one document's far queries within one chunk of the row, in order.

    Returns, as int32: the first query of each item (B, items + 1), the first far query of each document that has
    one (B, slots), and the first item of each (B, slots + 1). Entries that do not exist hold T. No host sync.
    """
    B, T = doc_start.shape
    # a document that starts in the row needs window + 1 tokens to have a far query; one more began earlier
    n_slots = T // (window + 1) + 1
    n_items = n_slots + -(-T // chunk)
    index = torch.arange(T, device=doc_start.device, dtype=torch.int32)
    is_first = index == (doc_start + window).clamp(min=0)
    is_item = is_first | ((index - doc_start >= window) & (index % chunk == 0))
    item_count = is_item.cumsum(1, dtype=torch.int32)
    slot_count = is_first.cumsum(1, dtype=torch.int32)
    wanted = torch.arange(1, n_items + 2, device=doc_start.device, dtype=torch.int32).expand(B, -1)
    items = torch.searchsorted(item_count, wanted.contiguous(), out_int32=True)
    slots = torch.searchsorted(slot_count, wanted[:, : n_slots + 1].contiguous(), out_int32=True)
    before = item_count.gather(1, slots.clamp(max=T - 1).long()) - 1
    slot_items = torch.where(slots < T, before, item_count[:, -1:])
    return items, slots[:, :n_slots].contiguous(), slot_items.contiguous()


def _attention_bwd_far(
    v, q_far, k_far, anchor_k, anchor_v, doc_start, dy, lse, delta, dv, window, anchors, scale,
):
    B, T, H, K = q_far.shape
    G, P = v.shape[2], v.shape[1] - T
    tiles = _attention_tiles("far", q_far, anchors)
    chunk = max(_ATTENTION_FAR_CHUNK, -(-T // (_ATTENTION_FAR_CHUNKS * tiles.BM)) * tiles.BM)
    items, slots, slot_items = _attention_far_items(doc_start, window, chunk)
    n_items, n_slots, n_anchor_tiles = items.shape[1] - 1, slots.shape[1], triton.cdiv(anchors, tiles.BA)
    old_rows = 0 if anchor_k is None else anchor_k.shape[1]
    parts = v.new_empty((2, B, G, n_items, n_anchor_tiles * tiles.BA, K), dtype=torch.float32)
    dk_far = torch.zeros_like(k_far)
    danchor_k = danchor_v = None
    if anchor_k is not None:
        danchor_k, danchor_v = torch.zeros_like(anchor_k), torch.zeros_like(anchor_v)
    _attention_bwd_far_kernel[(n_items, B * G, n_anchor_tiles)](
        v, q_far, k_far, *_attention_carried(anchor_k, anchor_v, v), doc_start, dy, lse, delta, items,
        parts[0], parts[1], T, P, old_rows, window, anchors, chunk, scale * _ATTENTION_LOG2E, scale,
        H=H, G=G, K=K, BM=tiles.BM, BA=tiles.BA, PRECISION=tiles.precision,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )
    _attention_far_sum_kernel[(n_slots, B * G, n_anchor_tiles)](
        parts[0], parts[1], doc_start, slots, slot_items, dv, dk_far, *_attention_carried(danchor_k, danchor_v, dk_far),
        T, P, old_rows, anchors, n_items, G=G, K=K, BA=tiles.BA, num_warps=8,
    )
    return dk_far, danchor_k, danchor_v


class _WindowedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, q_far, k_far, anchor_k, anchor_v, doc_start, k_quant, v_quant, window, anchors, scale):
        y, lse = _attention_fwd(
            q, k, v, q_far, k_far, anchor_k, anchor_v, doc_start, k_quant, v_quant, window, anchors, scale)
        ctx.save_for_backward(q, k, v, q_far, k_far, anchor_k, anchor_v, doc_start, y, lse)
        ctx.rule = (window, anchors, scale)
        ctx.quantised = k_quant is not None
        return y

    @staticmethod
    def backward(ctx, dy):
        if ctx.quantised:
            raise RuntimeError("windowed_attention has no gradient when k_quant is given")
        q, k, v, q_far, k_far, anchor_k, anchor_v, doc_start, y, lse = ctx.saved_tensors
        window, anchors, scale = ctx.rule
        B, T, H, K = q.shape
        dy = dy.contiguous()
        delta = torch.empty_like(lse)
        _attention_delta_kernel[(triton.cdiv(T, 64), B * H)](y, dy, delta, T, H=H, K=K, BM=64, num_warps=4)
        need_q, need_k, need_v, need_qf, need_kf, need_ak, need_av = ctx.needs_input_grad[:7]
        dq = dq_far = dk = dv = dk_far = danchor_k = danchor_v = None
        if need_q or need_qf:
            dq, dq_far = _attention_bwd_query(
                q, k, v, q_far, k_far, anchor_k, anchor_v, doc_start, dy, lse, delta, window, anchors, scale)
        need_far = need_v or need_kf or need_ak or need_av
        if need_k or need_far:
            dk, dv = _attention_bwd_key(q, k, v, doc_start, dy, lse, delta, window, scale)
        if need_far and anchors > 0 and q_far is not None:
            dk_far, danchor_k, danchor_v = _attention_bwd_far(
                v, q_far, k_far, anchor_k, anchor_v, doc_start, dy, lse, delta, dv, window, anchors, scale)
        elif q_far is not None:
            dq_far, dk_far = torch.zeros_like(q_far), torch.zeros_like(k_far)
        return dq, dk, dv, dq_far, dk_far, danchor_k, danchor_v, None, None, None, None, None, None


def _windowed_attention_torch(
    q, k, v, q_far, k_far, anchor_k, anchor_v, doc_start, k_quant, v_quant, window, anchors, scale,
):
    """Dense masked form in blocks of 256 queries by their window and anchors: float32 or float64 softmax."""
    dtype = q.dtype
    T = q.shape[1]
    wide = [None if x is None else x if x.dtype == torch.float64 else x.float()
            for x in (q, k, v, q_far, k_far, anchor_k, anchor_v, k_quant, v_quant)]
    blocks = []
    for m0 in range(0, T, 256):
        blocks.append(_attention_block_torch(m0, min(m0 + 256, T), *wide, doc_start, window, anchors, scale))
    return torch.cat(blocks, 1).to(dtype)


def _attention_block_torch(
    m0, m1, q, k, v, q_far, k_far, anchor_k, anchor_v, k_quant, v_quant, doc_start, window, anchors, scale,
):
    """Queries [m0, m1): softmax over [window keys | far anchors], with masks from the law. -> (B, m1 - m0, H, K)"""
    T, H = q.shape[1:3]
    G, P = k.shape[2], k.shape[1] - T
    index = torch.arange(m0, m1, device=q.device)
    ds = doc_start[:, m0:m1].long()                                        # (B, M)
    lo = max(m0 - window + 1, int(ds.min()), -P)
    j = torch.arange(lo, m1, device=q.device)
    i = index[:, None]
    near = (j >= ds[..., None]) & (j <= i) & (i - j < window)              # (B, M, N)
    b_q = q[:, m0:m1].unflatten(2, (G, H // G))                            # (B, M, G, R, K)
    rows = slice(lo + P, m1 + P)
    scores = torch.einsum("bmgrk,bngk->bgrmn", b_q, k[:, rows])
    if k_quant is not None:
        pos_i, pos_j = i - ds[..., None], j - ds[..., None]
        old = (pos_i // _ATTENTION_PAGE - pos_j // _ATTENTION_PAGE >= 2) & (pos_j >= anchors)
        old = old[:, None, None]
        scores = torch.where(old, torch.einsum("bmgrk,bngk->bgrmn", b_q, k_quant[:, rows]), scores)
    mask, far_v = near, None
    if anchors > 0 and q_far is not None and bool((index - ds >= window).any()):
        far_k, far_v, far = _attention_far_torch(index, ds, k_far, v, anchor_k, anchor_v, doc_start, window, anchors, P)
        b_qf = q_far[:, m0:m1].unflatten(2, (G, H // G))
        scores = torch.cat([scores, torch.einsum("bmgrk,bngk->bgrmn", b_qf, far_k)], -1)
        mask = torch.cat([near, far], -1)
    weight = (scores * scale).masked_fill(~mask[:, None, None], float("-inf")).softmax(-1)
    w_near = weight[..., : len(j)]
    if k_quant is None:
        y = torch.einsum("bgrmn,bngk->bmgrk", w_near, v[:, rows])
    else:
        y = torch.einsum("bgrmn,bngk->bmgrk", w_near.masked_fill(old, 0.0), v[:, rows])
        y = y + torch.einsum("bgrmn,bngk->bmgrk", w_near.masked_fill(~old, 0.0), v_quant[:, rows])
    if far_v is not None:
        y = y + torch.einsum("bgrmn,bngk->bmgrk", weight[..., len(j):], far_v)
    return y.flatten(2, 3)


def _attention_far_torch(index, ds, k_far, v, anchor_k, anchor_v, doc_start, window, anchors, P):
    """Anchors of the documents in a block that have far queries: keys, values (B, D * A, G, K), mask (B, M, D * A)."""
    T = doc_start.shape[1]
    starts = ds[index - ds >= window].unique()                             # (D,)
    a = torch.arange(anchors, device=ds.device).repeat(len(starts))
    d = starts.repeat_interleave(anchors)                                  # (D * A,)
    j = d + a
    seg = j.clamp(0, T - 1)
    far_k, far_v = k_far[:, seg], v[:, P + seg]
    have = (j >= 0) & (j < T)
    if anchor_k is not None and anchor_k.shape[1] > 0:
        old_rows = anchor_k.shape[1]
        old = a.clamp(max=old_rows - 1)
        is_old = (j < 0)[:, None, None]
        far_k = torch.where(is_old, anchor_k[:, old], far_k)
        far_v = torch.where(is_old, anchor_v[:, old], far_v)
        have = have | ((j < 0) & (a < old_rows))
    far = have & (ds[..., None] == d) & (index[:, None] - j >= window)     # (B, M, D * A)
    # a NaN behind a masked pair would still spoil 0 * NaN
    dead = ~far.any(1)[..., None, None]
    return far_k.masked_fill(dead, 0.0), far_v.masked_fill(dead, 0.0), far


def _check_attention(q, k, v, q_far, k_far, window, anchors, doc_start, anchor_k, anchor_v, k_quant, v_quant):
    _require(q.ndim == 4, f"q must be (B, T, H, K), got {tuple(q.shape)}")
    B, T, H, K = q.shape
    _require(K in (32, 64, 128), f"the key dimension must be 32, 64 or 128, got {K}")
    _require(T >= 1, f"q must hold at least one token, got {tuple(q.shape)}")
    rows_ok = k.ndim == 4 and k.shape[0] == B and k.shape[1] >= T and k.shape[3] == K and H % k.shape[2] == 0
    _require(rows_ok, f"k must be (B, P + T, G, K) with H a multiple of G, got {tuple(k.shape)} for q {tuple(q.shape)}")
    _require(v.shape == k.shape, f"v must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    _require((q_far is None) == (k_far is None), "q_far and k_far must be given together")
    G, P = k.shape[2], k.shape[1] - T
    if q_far is not None:
        _require(q_far.shape == q.shape, f"q_far must have q's shape {tuple(q.shape)}, got {tuple(q_far.shape)}")
        _require(k_far.shape == (B, T, G, K), f"k_far must be {(B, T, G, K)}, got {tuple(k_far.shape)}")
    _require(window >= 1, f"window must be at least 1, got {window}")
    _require(anchors >= 0, f"anchors must not be negative, got {anchors}")
    _require(P == 0 or doc_start is not None, f"doc_start is required with a prefix, got none for {P} prefix rows")
    if doc_start is not None:
        fits = doc_start.shape == (B, T) and doc_start.dtype == torch.int32
        _require(fits, f"doc_start must be int32 {(B, T)}, got {doc_start.dtype} {tuple(doc_start.shape)}")
    _require((anchor_k is None) == (anchor_v is None), "anchor_k and anchor_v must be given together")
    if anchor_k is not None:
        fits = anchor_k.ndim == 4 and anchor_k.shape[0] == B and anchor_k.shape[2:] == (G, K)
        _require(fits, f"anchor_k must be (B, A, G, K) = ({B}, A, {G}, {K}), got {tuple(anchor_k.shape)}")
        fits = anchor_v.shape == anchor_k.shape
        _require(fits, f"anchor_v must be {tuple(anchor_k.shape)}, got {tuple(anchor_v.shape)}")
    _require((k_quant is None) == (v_quant is None), "k_quant and v_quant must be given together")
    if k_quant is not None:
        fits = k_quant.shape == k.shape and v_quant.shape == k.shape
        _require(fits, f"k_quant, v_quant must be {tuple(k.shape)}, got {tuple(k_quant.shape)}, {tuple(v_quant.shape)}")
    for x in (k, v, q_far, k_far, anchor_k, anchor_v, k_quant, v_quant):
        fits = x is None or x.dtype == q.dtype
        _require(fits, f"every input must have q's type {q.dtype}, got {q.dtype if fits else x.dtype}")
    _require(not (q.is_cuda and q.dtype == torch.float64), "float64 runs on the CPU only, got a CUDA tensor")


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, q_far: Tensor | None, k_far: Tensor | None, *, window: int, anchors: int,
    doc_start: Tensor | None = None, anchor_k: Tensor | None = None, anchor_v: Tensor | None = None,
    scale: float | None = None, k_quant: Tensor | None = None, v_quant: Tensor | None = None,
) -> Tensor:
    """Attend causally to a window of keys and to the first tokens of the document; returns (B, T, H, K).

    q, q_far (B, T, H, K): rotated at its position, and at position `window`. k, v (B, P + T, G, K): P carried rows,
    then the segment's. k_far (B, T, G, K): unrotated keys. anchor_k, anchor_v (B, A, G, K): unrotated keys and values
    of the first tokens of the document open at the segment's start; rows at index >= 0 are not read, and None means
    that no token before the segment is an anchor.
    doc_start (B, T) int32, non-decreasing along a row. Key j is visible to query i iff doc_start[i] <= j <= i and
    (i - j < window or j < doc_start[i] + anchors); beyond the window the score is q_far_i . k_far_j.
    q_far = k_far = None: no far keys (the window covers every document). k_quant, v_quant (as k; no gradient): read
    instead of k, v where the pages of 64, counted from the document's start, are two or more apart, anchors excepted.
    Window and first tokens: Xiao et al., "Efficient Streaming Language Models with Attention Sinks".
    """
    _check_attention(q, k, v, q_far, k_far, window, anchors, doc_start, anchor_k, anchor_v, k_quant, v_quant)
    B, T, _, K = q.shape
    scale = K**-0.5 if scale is None else float(scale)
    window = min(window, _ATTENTION_WIDEST)
    if doc_start is None:
        doc_start = torch.zeros((B, T), dtype=torch.int32, device=q.device)
    if not _uses_kernel(q):
        return _windowed_attention_torch(
            q, k, v, q_far, k_far, anchor_k, anchor_v, doc_start, k_quant, v_quant, window, anchors, scale)
    tensors = (q, k, v, q_far, k_far, anchor_k, anchor_v, doc_start, k_quant, v_quant)
    tensors = (None if x is None else x.contiguous() for x in tensors)
    return _WindowedAttention.apply(*tensors, window, anchors, scale)


# ---------------------------------------------------------------------------
# Rotary embedding


@_jit_dynamic("rows", "T", "batch_stride")
def _rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, rows, T, batch_stride, sign,
    H: tl.constexpr, K: tl.constexpr, BR: tl.constexpr,
):
    """(y1, y2) = (x1 cos - s x2 sin, x2 cos + s x1 sin) for the halves of each row; s = -1 is the inverse."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_k = tl.arange(0, K // 2)
    m_r = (o_r < rows)[:, None]
    token = o_r // H
    p_angle = (token // T * batch_stride + token % T * (K // 2))[:, None] + o_k[None, :]
    p_x = o_r[:, None] * K + o_k[None, :]
    b_cos = tl.load(cos_ptr + p_angle, mask=m_r, other=0.0)
    b_sin = tl.load(sin_ptr + p_angle, mask=m_r, other=0.0) * sign
    b_x1 = tl.load(x_ptr + p_x, mask=m_r, other=0.0).to(tl.float32)
    b_x2 = tl.load(x_ptr + p_x + K // 2, mask=m_r, other=0.0).to(tl.float32)
    tl.store(y_ptr + p_x, (b_x1 * b_cos - b_x2 * b_sin).to(y_ptr.dtype.element_ty), mask=m_r)
    tl.store(y_ptr + p_x + K // 2, (b_x2 * b_cos + b_x1 * b_sin).to(y_ptr.dtype.element_ty), mask=m_r)


def _rotary_apply(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    B, T, H, K = x.shape
    y = torch.empty_like(x)
    rows, BR = B * T * H, 32
    _rotary_kernel[(triton.cdiv(rows, BR),)](
        x, cos, sin, y, rows, T, 0 if cos.ndim == 2 else T * (K // 2), sign, H=H, K=K, BR=BR, num_warps=4)
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotary_apply(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, dy):
        return _rotary_apply(dy.contiguous(), *ctx.saved_tensors, -1.0), None, None


def _rotary_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x1, x2 = x.to(wide).chunk(2, -1)
    cos, sin = cos.to(wide)[..., None, :], sin.to(wide)[..., None, :]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[..., i], x[..., i + K/2]) by their angles; the gradient is the inverse rotation.

    x (B, T, H, K); cos, sin (T, K/2) or (B, T, K/2) float32, built in float64; float64 x also takes float64 tables.
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    _require(x.ndim == 4 and x.shape[3] % 2 == 0, f"x must be (B, T, H, K) with K even, got {tuple(x.shape)}")
    B, T, _, K = x.shape
    fits = cos.shape in ((T, K // 2), (B, T, K // 2)) and sin.shape == cos.shape
    _require(fits, f"cos, sin must be {(T, K // 2)} or {(B, T, K // 2)}, got {tuple(cos.shape)}, {tuple(sin.shape)}")
    _require(not (x.is_cuda and x.dtype == torch.float64), "float64 runs on the CPU only, got a CUDA tensor")
    if not _uses_kernel(x):
        return _rotary_torch(x, cos, sin)
    fits = K & (K - 1) == 0 and cos.dtype == torch.float32 and sin.dtype == torch.float32
    _require(fits, f"the kernel needs K a power of two and float32 tables, got K = {K}, {cos.dtype}, {sin.dtype}")
    return _Rotary.apply(x.contiguous(), cos.contiguous(), sin.contiguous())


# ---------------------------------------------------------------------------
# Cache quantisation

_CACHE_GROUP = 32
# a smaller scale is subnormal in float32: its quotient would not be exact to half a step
_CACHE_TINY = torch.finfo(torch.float32).tiny


def hadamard_rotate(x: Tensor) -> Tensor:
    """Multiply the last dimension (a power of two) by the normalised Walsh-Hadamard matrix; its own inverse."""
    K = x.shape[-1]
    _require(K & (K - 1) == 0 and K > 0, f"the last dimension must be a power of two, got {K}")
    wide = x if x.dtype == torch.float64 else x.float()
    half = 1
    while half < K:
        # butterflies of elementwise sums: a row's bits do not depend on its neighbours
        a, b = wide.unflatten(-1, (K // (2 * half), 2, half)).unbind(-2)
        wide = torch.stack([a + b, a - b], -2).flatten(-3)
        half *= 2
    return (wide * K**-0.5).to(x.dtype)


def quantize_cache(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise rows of K values symmetrically: codes and float32 scales.

    x (..., K). 8 bit: codes int8 (..., K), scale (..., 1). 4 bit: codes uint8 (..., K/2), element i in the low half
    of byte i and element i + K/2 in the high half, offset by 8; scale (..., K/32), one per 32 values.
    """
    _require(bits in (4, 8), f"bits must be 4 or 8, got {bits}")
    K = x.shape[-1]
    _require(K % _CACHE_GROUP == 0, f"the last dimension must be a multiple of {_CACHE_GROUP}, got {K}")
    group, top = (K, 127) if bits == 8 else (_CACHE_GROUP, 7)
    parts = x.detach().float().unflatten(-1, (K // group, group))
    largest = parts.abs().amax(-1)
    # tensor by tensor: a division by a number is a product with its reciprocal on CUDA, one ulp off, which moves 0.13 %
    # of the codes of bf16 values across a tie (emulated) and the attention output by 1e-2
    scale = (largest / torch.full_like(largest, top)).clamp(min=_CACHE_TINY)
    codes = (parts / scale[..., None]).round().clamp(-top, top).flatten(-2)
    if bits == 8:
        return codes.to(torch.int8), scale
    low, high = (codes + 8).to(torch.uint8).chunk(2, -1)
    return low | (high << 4), scale


def dequantize_cache(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Return quantize_cache's values (..., K): code times scale in float32, rounded once to dtype."""
    _require(bits in (4, 8), f"bits must be 4 or 8, got {bits}")
    if bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], -1).float() - 8
    K = codes.shape[-1]
    parts = codes.float().unflatten(-1, (scale.shape[-1], K // scale.shape[-1]))
    return (parts * scale[..., None]).flatten(-2).to(dtype)


def fake_quantize_cache(x: Tensor, bits: int, *, rotated: bool) -> Tensor:
    """Return x as a quantised page gives it back; rotated: keys of 4 bit, stored after hadamard_rotate."""
    wide = hadamard_rotate(x.float()) if rotated else x
    got = dequantize_cache(*quantize_cache(wide, bits), bits, torch.float32)
    return (hadamard_rotate(got) if rotated else got).to(x.dtype)


# ---------------------------------------------------------------------------
# Paged cache

_PAGED_NODES = 8
# the newest pages that are kept in full precision, in a ring: a query reads its own page and the one before, and
# the nodes of one tree lie in at most two pages
_PAGED_RECENT = 3 * _ATTENTION_PAGE
# positions of one split: 33 splits by 4 key heads fill 132 multiprocessors at a window of 8,192; the full scope takes
# longer ones, for 512 partial sums at 1,048,576 positions
_PAGED_SPLIT = {"window": 256, "full": 2048}


def paged_cache(
    batch: int, kv_heads: int, key_dim: int, *, window: int, anchors: int, scope: str, bits: int,
    max_length: int, dtype: torch.dtype, device: torch.device | str,
) -> SimpleNamespace:
    """Allocate one layer's cache; every tensor keeps its address for life. G = kv_heads, K = key_dim.

    length (B,) int32: committed tokens. page_table (B, R) int32: position p lies in pool page
    page_table[b, p // 64 % R]; R = ceil(window/64) + 2 (scope window) or ceil(max_length/64) (full).
    Pool page 0 belongs to nobody: rows that must not be stored go there, as zeros.
    key_codes, value_codes (pages, 64, G, K) in dtype (16 bit) or int8, or (pages, 64, G, K/2) uint8;
    key_scale, value_scale (pages, 64, G, 1 or K/32) float32, None for 16 bit. Keys are rotary-rotated, and 4-bit keys
    hadamard-rotated. recent_k, recent_v (B, 192, G, K): position p of the newest 192 at row p % 192.
    anchor_near, anchor_k, anchor_v (B, anchors, G, K): the first tokens' rotated keys, unrotated keys, values.
    """
    _require(scope in _PAGED_SPLIT, f"scope must be window or full, got {scope!r}")
    _require(bits in (4, 8, 16), f"bits must be 4, 8 or 16, got {bits}")
    R = -(-window // _ATTENTION_PAGE) + 2 if scope == "window" else -(-max_length // _ATTENTION_PAGE)

    def zeros(*shape, kind=dtype):
        return torch.zeros(shape, dtype=kind, device=device)

    pool = (batch * R + 1, _ATTENTION_PAGE, kv_heads)
    width, kind, groups = {16: (key_dim, dtype, 0), 8: (key_dim, torch.int8, 1),
                           4: (key_dim // 2, torch.uint8, key_dim // _CACHE_GROUP)}[bits]
    rows = (batch, _PAGED_RECENT, kv_heads, key_dim)
    first = (batch, anchors, kv_heads, key_dim)
    table = torch.arange(1, batch * R + 1, dtype=torch.int32, device=device).view(batch, R)
    return SimpleNamespace(
        bits=bits, length=zeros(batch, kind=torch.int32), page_table=table,
        key_codes=zeros(*pool, width, kind=kind), value_codes=zeros(*pool, width, kind=kind),
        key_scale=zeros(*pool, groups, kind=torch.float32) if groups else None,
        value_scale=zeros(*pool, groups, kind=torch.float32) if groups else None,
        recent_k=zeros(*rows), recent_v=zeros(*rows),
        anchor_near=zeros(*first), anchor_k=zeros(*first), anchor_v=zeros(*first),
    )


def _paged_encode(x: Tensor, bits: int, rotated: bool) -> tuple[Tensor, Tensor | None]:
    if bits == 16:
        return x, None
    return quantize_cache(hadamard_rotate(x.float()) if rotated else x, bits)


@_jit
def _cache_encode(b_x, codes_ptr, scale_ptr, row, o_g, m_g, G, K: tl.constexpr, BG: tl.constexpr, BITS: tl.constexpr):
    """Store rows b_x (BG, K) of one token as a pool keeps them, in the steps and the order of quantize_cache."""
    o_k = tl.arange(0, K)
    p_row = (row * G + o_g)[:, None]
    if BITS == 16:
        tl.store(codes_ptr + p_row * K + o_k[None, :], b_x, mask=m_g[:, None])
    else:
        GROUPS: tl.constexpr = 1 if BITS == 8 else K // 32
        TOP: tl.constexpr = 127.0 if BITS == 8 else 7.0
        parts = tl.reshape(b_x.to(tl.float32), (BG, GROUPS, K // GROUPS))
        largest = tl.max(tl.abs(parts), axis=2)
        scale = tl.maximum(tl.div_rn(largest, tl.full((BG, GROUPS), TOP, tl.float32)), 1.1754943508222875e-38)
        tl.store(scale_ptr + p_row * GROUPS + tl.arange(0, GROUPS)[None, :], scale, mask=m_g[:, None])
        # adding 1.5 * 2^23 leaves no bit below one: round half to even
        codes = tl.div_rn(parts, tl.broadcast_to(scale[:, :, None], (BG, GROUPS, K // GROUPS)))
        codes = (codes + 12582912.0) - 12582912.0
        codes = tl.reshape(tl.minimum(tl.maximum(codes, -TOP), TOP), (BG, K))
        if BITS == 8:
            tl.store(codes_ptr + p_row * K + o_k[None, :], codes.to(tl.int8), mask=m_g[:, None])
        else:
            halves = tl.permute(tl.reshape((codes + 8.0).to(tl.uint8), (BG, 2, K // 2)), (0, 2, 1))
            low, high = tl.split(halves)
            o_byte = tl.arange(0, K // 2)
            tl.store(codes_ptr + p_row * (K // 2) + o_byte[None, :], low | (high << 4), mask=m_g[:, None])


@_jit_dynamic("T", "ANCHORS", "R")
def _cache_append_kernel(
    k_ptr, v_ptr, raw_ptr, path_ptr, length_ptr, table_ptr, key_ptr, key_scale_ptr, value_ptr, value_scale_ptr,
    recent_k_ptr, recent_v_ptr, near_ptr, anchor_k_ptr, anchor_v_ptr, T, ROWS, ANCHORS, R, G,
    K: tl.constexpr, LOG_K: tl.constexpr, BG: tl.constexpr, BITS: tl.constexpr, HAS_PATH: tl.constexpr,
    RECENT: tl.constexpr = _PAGED_RECENT, PAGE: tl.constexpr = _ATTENTION_PAGE,
):  # fmt: skip
    """One token of one sequence, row path[b, t] of those given (-1: there is none), or row t: into the ring, the first
    tokens and its page, each unless a later token of this call will lie there."""
    i_t, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, end = i_t, T
    if HAS_PATH:
        row = tl.load(path_ptr + i_b * T + i_t)
        end = 0
        for i in range(0, T):
            end += (tl.load(path_ptr + i_b * T + i) >= 0).to(tl.int32)
    start = tl.load(length_ptr + i_b)
    position, end = start + i_t, start + end
    if position >= end:
        return
    o_g = tl.arange(0, BG)
    o_k = tl.arange(0, K)
    m_g = o_g < G
    m = m_g[:, None]
    p_in = ((i_b * ROWS + row) * G + o_g)[:, None] * K + o_k[None, :]
    b_k = tl.load(k_ptr + p_in, mask=m, other=0.0)
    b_v = tl.load(v_ptr + p_in, mask=m, other=0.0)
    if position >= end - RECENT:
        p_out = ((i_b * RECENT + position % RECENT) * G + o_g)[:, None] * K + o_k[None, :]
        tl.store(recent_k_ptr + p_out, b_k, mask=m)
        tl.store(recent_v_ptr + p_out, b_v, mask=m)
    if position < ANCHORS:
        p_out = ((i_b * ANCHORS + position) * G + o_g)[:, None] * K + o_k[None, :]
        tl.store(near_ptr + p_out, b_k, mask=m)
        tl.store(anchor_k_ptr + p_out, tl.load(raw_ptr + p_in, mask=m, other=0.0), mask=m)
        tl.store(anchor_v_ptr + p_out, b_v, mask=m)
    if position >= end - R * PAGE:
        page = tl.load(table_ptr + i_b * R + position // PAGE % R).to(tl.int64)
        slot = page * PAGE + position % PAGE
        if BITS == 4:
            # the butterflies of hadamard_rotate, pair by pair in its order
            b_turned = b_k.to(tl.float32)
            for _ in tl.static_range(0, LOG_K):
                even, odd = tl.split(tl.reshape(b_turned, (BG, K // 2, 2)))
                b_turned = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (BG, K))
            _cache_encode(b_turned * K**-0.5, key_ptr, key_scale_ptr, slot, o_g, m_g, G, K, BG, BITS)
        else:
            _cache_encode(b_k, key_ptr, key_scale_ptr, slot, o_g, m_g, G, K, BG, BITS)
        _cache_encode(b_v, value_ptr, value_scale_ptr, slot, o_g, m_g, G, K, BG, BITS)


def _cache_append_launch(cache, k, v, raw_k, path) -> None:
    """Rows k[b, path[b, t]] (path (B, depth) int32, -1 = end), or all."""
    batch, rows, heads, width = k.shape
    steps = rows if path is None else path.shape[1]
    _cache_append_kernel[(steps, batch)](
        k, v, raw_k, path, cache.length, cache.page_table, cache.key_codes, cache.key_scale, cache.value_codes,
        cache.value_scale, cache.recent_k, cache.recent_v, cache.anchor_near, cache.anchor_k, cache.anchor_v,
        steps, rows, cache.anchor_k.shape[1], cache.page_table.shape[1], heads, K=width,
        LOG_K=width.bit_length() - 1, BG=triton.next_power_of_2(heads), BITS=cache.bits, HAS_PATH=path is not None,
        num_warps=4,
    )  # fmt: skip
    cache.length.add_(steps if path is None else (path >= 0).sum(1, dtype=torch.int32))


def cache_append(cache: SimpleNamespace, k: Tensor, v: Tensor, raw_k: Tensor, *, path: Tensor | None = None) -> None:
    """Commit tokens in place at positions length, length + 1, ...; the stored bits do not depend on the cuts.

    k, v, raw_k (B, T, G, K): rotated keys, values, unrotated keys, any T >= 1. path (B, depth) int32: the rows of each
    sequence that are committed, in order, -1 behind the last (None: all T), e.g. what of a draft tree was accepted.
    """
    B, T = k.shape[:2]
    want = (cache.length.shape[0], T, *cache.recent_k.shape[2:])
    same = k.shape == want and v.shape == want and raw_k.shape == want
    _require(same, f"k, v, raw_k must be {want}, got {tuple(k.shape)}, {tuple(v.shape)}, {tuple(raw_k.shape)}")
    fits = path is None or (path.dim() == 2 and path.shape[0] == B and path.dtype == torch.int32)
    _require(fits, f"path must be int32 ({B}, depth), got {None if path is None else (path.dtype, tuple(path.shape))}")
    if _uses_kernel(k):
        _cache_append_launch(cache, *(x.contiguous() for x in (k, v, raw_k)), path)
    else:
        _cache_append_torch(cache, k, v, raw_k, path)


def _cache_append_torch(cache, k, v, raw_k, path) -> None:
    count = None
    if path is not None:
        count = (path >= 0).sum(1, dtype=torch.int32)
        index = path.long().clamp(min=0)[..., None, None].expand(-1, -1, *k.shape[2:])
        k, v, raw_k = (x.gather(1, index) for x in (k, v, raw_k))
    B, T = k.shape[:2]
    start = cache.length[:, None].long()                                   # (B, 1)
    end = start + (T if count is None else count[:, None].long())
    device = k.device
    # ring of recent rows: the last position below end that is congruent to the row
    ring = torch.arange(_PAGED_RECENT, device=device)
    newest = end - 1 - (end - 1 - ring) % _PAGED_RECENT                    # (B, 192)
    for store, rows in ((cache.recent_k, k), (cache.recent_v, v)):
        _paged_overwrite(store, rows, newest - start, newest >= start)
    first = torch.arange(cache.anchor_k.shape[1], device=device).expand(B, -1)
    for store, rows in ((cache.anchor_near, k), (cache.anchor_k, raw_k), (cache.anchor_v, v)):
        _paged_overwrite(store, rows, first - start, (first >= start) & (first < end))
    # a call longer than the ring stores its last rows only
    R = cache.page_table.shape[1]
    skip = max(T - R * _ATTENTION_PAGE, 0) if count is None else 0
    at = start + torch.arange(skip, T, device=device)                      # (B, T - skip)
    slot = at // _ATTENTION_PAGE % R
    page = cache.page_table.long().gather(1, slot)
    kept = (at < end) & (at >= end - R * _ATTENTION_PAGE)
    row = torch.where(kept, page * _ATTENTION_PAGE + at % _ATTENTION_PAGE, at % _ATTENTION_PAGE).flatten()
    for codes, scale, rows, rotated in (
        (cache.key_codes, cache.key_scale, k[:, skip:], cache.bits == 4),
        (cache.value_codes, cache.value_scale, v[:, skip:], False),
    ):
        new_codes, new_scale = _paged_encode(rows, cache.bits, rotated)
        codes.flatten(0, 1)[row] = new_codes.masked_fill(~kept[..., None, None], 0).flatten(0, 1)
        if scale is not None:
            scale.flatten(0, 1)[row] = new_scale.masked_fill(~kept[..., None, None], 0).flatten(0, 1)
    cache.length.copy_(end[:, 0])


def _paged_overwrite(store: Tensor, rows: Tensor, index: Tensor, mask: Tensor) -> None:
    """store[b, r] = rows[b, index[b, r]] where mask[b, r]."""
    index = index.clamp(0, rows.shape[1] - 1)[..., None, None].expand(-1, -1, *rows.shape[2:])
    store.copy_(torch.where(mask[..., None, None], rows.gather(1, index), store))


def _paged_decode(cache: SimpleNamespace, at: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of the pool at positions at (B, N): keys (4 bit: still hadamard-rotated) and values (B, N, G, K)."""
    R = cache.page_table.shape[1]
    page = cache.page_table.long().gather(1, at // _ATTENTION_PAGE % R)
    row = page * _ATTENTION_PAGE + at % _ATTENTION_PAGE
    k, v = cache.key_codes.flatten(0, 1)[row], cache.value_codes.flatten(0, 1)[row]
    if cache.bits == 16:
        return k.to(dtype), v.to(dtype)
    k_scale, v_scale = cache.key_scale.flatten(0, 1)[row], cache.value_scale.flatten(0, 1)[row]
    return dequantize_cache(k, k_scale, cache.bits, dtype), dequantize_cache(v, v_scale, cache.bits, dtype)


def cache_prefix(cache: SimpleNamespace, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return windowed_attention's prefix (k, v, k_quant, v_quant) of the last rows positions, each (B, rows, G, K).

    Newest pages and anchors are in full precision in k, v. Rows before the sequence's start are zero.
    """
    at = cache.length[:, None].long() - rows + torch.arange(rows, device=cache.length.device)
    live = (at >= 0)[..., None, None]
    at = at.clamp(min=0)
    dtype = cache.recent_k.dtype
    wide_k, wide_v = _paged_decode(cache, at, torch.float32 if cache.bits != 16 else dtype)
    k_quant = (hadamard_rotate(wide_k) if cache.bits == 4 else wide_k).to(dtype)
    v_quant = wide_v.to(dtype)
    recent = (at >= cache.length[:, None] - _PAGED_RECENT)[..., None, None]
    anchors = cache.anchor_k.shape[1]
    out = []
    for quantised, newest, first in ((k_quant, cache.recent_k, cache.anchor_near),
                                     (v_quant, cache.recent_v, cache.anchor_v)):
        shape = (-1, -1, *newest.shape[2:])
        exact = torch.where(recent, newest.gather(1, (at % _PAGED_RECENT)[..., None, None].expand(shape)), quantised)
        if anchors > 0:
            index = at.clamp(max=anchors - 1)[..., None, None].expand(shape)
            exact = torch.where((at < anchors)[..., None, None], first.gather(1, index), exact)
        out.append(exact.masked_fill(~live, 0))
    return out[0], out[1], k_quant.masked_fill(~live, 0), v_quant.masked_fill(~live, 0)


# ---------------------------------------------------------------------------
# Paged attention


@_jit
def _paged_rows(code_ptr, scale_ptr, o_row, m_row, i_g, dtype, G: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr):
    """Read rows of a page of head i_g, dequantised in float32 and rounded to dtype."""
    o_k = tl.arange(0, K)[None, :]
    head = (o_row * G + i_g)[:, None]
    m = m_row[:, None]
    if BITS == 16:
        b_x = tl.load(code_ptr + head * K + o_k, mask=m, other=0.0)
    elif BITS == 8:
        b_x = tl.load(code_ptr + head * K + o_k, mask=m, other=0).to(tl.float32)
        b_x = b_x * tl.load(scale_ptr + head, mask=m, other=0.0)
    else:
        b_c = tl.load(code_ptr + head * (K // 2) + o_k % (K // 2), mask=m, other=0).to(tl.int32)
        b_c = (b_c >> (o_k // (K // 2) * 4)) & 15
        b_x = (b_c - 8).to(tl.float32) * tl.load(scale_ptr + head * (K // 32) + o_k // 32, mask=m, other=0.0)
    return b_x.to(dtype)


@_jit_dynamic("N", "R", "window", "anchors")
def _paged_pages_kernel(
    q_ptr, key_ptr, key_scale_ptr, value_ptr, value_scale_ptr, table_ptr, length_ptr, position_ptr,
    acc_ptr, m_ptr, l_ptr, N, R, window, anchors, scale2,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, FULL: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
):
    """Partial softmax of all nodes over one split's pages, those at least two pages older than the node's own.

    Such pages are committed whatever the tree, and the splits lie at fixed positions, so a node's partial sums do
    not depend on the other nodes nor on how many tokens are in the cache.
    """
    GROUP: tl.constexpr = H // G
    i_b = (tl.program_id(0) // G).to(tl.int64)
    i_g = tl.program_id(0) % G
    length = tl.load(length_ptr + i_b)
    first = 0 if FULL else tl.maximum(length - window + 1, 0) // SPLIT
    s0 = (first + tl.program_id(1)) * SPLIT
    o_r = tl.program_id(2) * BR + tl.arange(0, BR)
    m_r = o_r < N * GROUP
    b_pos = tl.load(position_ptr + i_b * N + o_r // GROUP, mask=m_r, other=0)
    newest = tl.max(b_pos, 0)
    hi = tl.minimum(s0 + SPLIT, (newest // 64 - 1) * 64)
    if s0 < hi:
        oldest = tl.min(tl.where(m_r, b_pos, newest), 0)
        lo = tl.maximum(s0, tl.maximum(oldest - window + 1, 0) // 64 * 64)
        # (B, N, H, K): row r is head i_g * GROUP + r % GROUP of node r // GROUP
        o_q = (o_r // GROUP) * H + i_g * GROUP + o_r % GROUP
        b_q = _attention_rows(q_ptr + i_b * N * H * K, o_q, m_r, K, K)
        acc = tl.zeros((BR, K), tl.float32)
        m = tl.full((BR,), float("-inf"), tl.float32)
        z = tl.zeros((BR,), tl.float32)
        for p0 in range(lo, hi, BP):
            o_p = p0 + tl.arange(0, BP)
            page = tl.load(table_ptr + i_b * R + p0 // 64 % R).to(tl.int64)
            o_row = page * 64 + p0 % 64 + tl.arange(0, BP)
            m_p = o_p < length
            b_k = _paged_rows(key_ptr, key_scale_ptr, o_row, m_p, i_g, b_q.dtype, G, K, BITS)
            b_v = _paged_rows(value_ptr, value_scale_ptr, o_row, m_p, i_g, b_q.dtype, G, K, BITS)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            old = (p0 // 64 <= b_pos // 64 - 2) & m_r
            visible = old[:, None] & (m_p & (o_p >= anchors))[None, :] & (b_pos[:, None] - o_p[None, :] < window)
            b_s = tl.where(visible, b_s, float("-inf"))
            acc, m, z = _attention_online(b_s, b_v, acc, m, z, scale2, PRECISION)
        part = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * ROWS + o_r
        tl.store(acc_ptr + part[:, None] * K + tl.arange(0, K)[None, :], acc)
        tl.store(m_ptr + part, m)
        tl.store(l_ptr + part, z)


@_jit_dynamic("N", "anchor_rows", "window", "anchors", "n_splits")
def _paged_node_kernel(
    q_ptr, q_far_ptr, recent_k_ptr, recent_v_ptr, scratch_k_ptr, scratch_v_ptr, near_ptr, far_ptr, anchor_v_ptr,
    tree_ptr, length_ptr, position_ptr, acc_ptr, m_ptr, l_ptr, y_ptr,
    N, anchor_rows, window, anchors, n_splits, scale2,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, FULL: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    RECENT: tl.constexpr, NODES: tl.constexpr, BR: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
):
    """One node: its own page and the one before, in full precision, then the anchors, then the splits in order.

    A key's column depends on its position only; it is read from the ring when committed, else from the scratch row
    of the node's ancestor there, so that committing a token changes no bit of a later node's sum.
    """
    GROUP: tl.constexpr = H // G
    i_b = (tl.program_id(0) // G).to(tl.int64)
    i_g = tl.program_id(0) % G
    i_n = tl.program_id(1)
    length = tl.load(length_ptr + i_b)
    pos = tl.load(position_ptr + i_b * N + i_n)
    o_h = tl.arange(0, BR)
    m_h = o_h < GROUP
    q_base = (i_b * N + i_n) * H * K + i_g * GROUP * K
    b_q = _attention_rows(q_ptr + q_base, o_h, m_h, K, K)
    o_n = tl.arange(0, NODES)
    is_path = tl.load(tree_ptr + i_n * N + o_n, mask=o_n < N, other=0) != 0
    b_np = tl.load(position_ptr + i_b * N + o_n, mask=o_n < N, other=-1)
    acc = tl.zeros((BR, K), tl.float32)
    m = tl.full((BR,), float("-inf"), tl.float32)
    z = tl.zeros((BR,), tl.float32)
    edge = (pos // 64 - 1) * 64
    # counts from zero: edge is -64 in the first page
    for c0 in range(0, 128, BP):
        o_p = edge + c0 + tl.arange(0, BP)
        seen = (o_p >= 0) & (o_p <= pos) & (pos - o_p < window)
        m_ring = seen & (o_p < length)
        hit = is_path[None, :] & (b_np[None, :] == o_p[:, None])
        o_node = tl.sum(tl.where(hit, o_n[None, :] + 1, 0), 1) - 1
        m_new = seen & (o_p >= length) & (o_node >= 0)
        ring = i_b * RECENT * G * K + i_g * K
        new = i_b * N * G * K + i_g * K
        o_ring = tl.maximum(o_p, 0) % RECENT
        b_k = tl.where(m_ring[:, None], _attention_rows(recent_k_ptr + ring, o_ring, m_ring, G * K, K),
                       _attention_rows(scratch_k_ptr + new, o_node, m_new, G * K, K))
        b_v = tl.where(m_ring[:, None], _attention_rows(recent_v_ptr + ring, o_ring, m_ring, G * K, K),
                       _attention_rows(scratch_v_ptr + new, o_node, m_new, G * K, K))
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_s = tl.where((m_ring | m_new)[None, :], b_s, float("-inf"))
        acc, m, z = _attention_online(b_s, b_v, acc, m, z, scale2, PRECISION)
    base = i_b * anchor_rows * G * K + i_g * K
    b_qf = _attention_rows(q_far_ptr + q_base, o_h, m_h, K, K)
    for a0 in range(0, anchors, BP):
        o_a = a0 + tl.arange(0, BP)
        m_far = (o_a < anchors) & (pos - o_a >= window)
        m_near = (o_a < anchors) & (o_a < edge) & (pos - o_a < window)
        b_k = _attention_rows(near_ptr + base, o_a, m_near, G * K, K)
        b_v = _attention_rows(anchor_v_ptr + base, o_a, m_near | m_far, G * K, K)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if not FULL:
            b_kf = _attention_rows(far_ptr + base, o_a, m_far, G * K, K)
            b_sf = tl.dot(b_qf, tl.trans(b_kf), input_precision=PRECISION)
            b_s = tl.where(m_far[None, :], b_sf, b_s)
        b_s = tl.where((m_near | m_far)[None, :], b_s, float("-inf"))
        acc, m, z = _attention_online(b_s, b_v, acc, m, z, scale2, PRECISION)
    first = 0 if FULL else tl.maximum(length - window + 1, 0) // SPLIT
    for i_t in range(0, tl.minimum(n_splits, (edge + SPLIT - 1) // SPLIT - first)):
        part = (tl.program_id(0).to(tl.int64) * n_splits + i_t) * ROWS + i_n * GROUP + o_h
        b_m = tl.load(m_ptr + part, mask=m_h, other=float("-inf"))
        b_l = tl.load(l_ptr + part, mask=m_h, other=0.0)
        b_acc = tl.load(acc_ptr + part[:, None] * K + tl.arange(0, K)[None, :], mask=m_h[:, None], other=0.0)
        m_new = tl.maximum(m, b_m)
        alpha = tl.exp2(m - m_new)
        beta = tl.exp2(b_m - m_new)
        acc = acc * alpha[:, None] + b_acc * beta[:, None]
        z = z * alpha + b_l * beta
        m = m_new
    p_y = y_ptr + q_base + o_h[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(p_y, (acc / z[:, None]).to(y_ptr.dtype.element_ty), mask=m_h[:, None])


def _paged_tiles(x: Tensor, group: int) -> SimpleNamespace:
    """Fixed tiles: rows BR and positions BP (a divisor of 64) of the two kernels, and the launch options."""
    rows = 1 << (max(16, _PAGED_NODES * group) - 1).bit_length()
    node = 1 << (max(16, group) - 1).bit_length()
    if x.dtype == torch.float32:
        # exact products hold whole operand rows in registers: 64 by 64 tiles spill 5.9 KB a thread
        return SimpleNamespace(BR=min(rows, 32), BP=32, num_warps=8, num_stages=1, node_BR=node, node_BP=16,
                               node_warps=4, precision="ieee")
    return SimpleNamespace(BR=min(rows, 64), BP=64, num_warps=4, num_stages=2, node_BR=node, node_BP=64,
                           node_warps=4, precision="tf32")


def _paged_attention_kernel(
    q, q_far, q_pages, cache, scratch_k, scratch_v, tree, positions, window, anchors, scope, scale,
):
    B, N, H, K = q.shape
    G, R = scratch_k.shape[2], cache.page_table.shape[1]
    split = _PAGED_SPLIT[scope]
    n_splits = triton.cdiv(window, split) + 1 if scope == "window" else triton.cdiv(R * _ATTENTION_PAGE, split)
    # eight nodes of the group's heads, whatever N; tl.dot needs 16
    ROWS = triton.next_power_of_2(max(16, _PAGED_NODES * (H // G)))
    tiles = _paged_tiles(q, H // G)
    acc = q.new_empty((B * G, n_splits, ROWS, K), dtype=torch.float32)
    m, z = (q.new_empty((B * G, n_splits, ROWS), dtype=torch.float32) for _ in range(2))
    y = torch.empty_like(q)
    scales = (cache.key_scale, cache.value_scale) if cache.bits != 16 else (acc, acc)
    _paged_pages_kernel[(B * G, n_splits, triton.cdiv(ROWS, tiles.BR))](
        q_pages, cache.key_codes, scales[0], cache.value_codes, scales[1], cache.page_table, cache.length, positions,
        acc, m, z, N, R, window, anchors, scale * _ATTENTION_LOG2E,
        H=H, G=G, K=K, BITS=cache.bits, FULL=scope == "full", SPLIT=split, ROWS=ROWS, BR=tiles.BR, BP=tiles.BP,
        PRECISION=tiles.precision, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )
    _paged_node_kernel[(B * G, N)](
        q, q_far, cache.recent_k, cache.recent_v, scratch_k, scratch_v, cache.anchor_near, cache.anchor_k,
        cache.anchor_v, tree, cache.length, positions, acc, m, z, y,
        N, cache.anchor_k.shape[1], window, anchors, n_splits, scale * _ATTENTION_LOG2E,
        H=H, G=G, K=K, FULL=scope == "full", SPLIT=split, ROWS=ROWS, RECENT=_PAGED_RECENT, NODES=_PAGED_NODES,
        BR=tiles.node_BR, BP=tiles.node_BP, PRECISION=tiles.precision, num_warps=tiles.node_warps, num_stages=1,
    )
    return y


def _paged_softmax_torch(scores: Tensor, mask: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Partial softmax: scores (B, 8, G, R, C), mask (B, 8, C), v (B, 8 or 1, C, G, K) -> acc, maximum, sum."""
    scores = scores.masked_fill(~mask[:, :, None, None], float("-inf"))
    m = scores.amax(-1)
    p = (scores - m.masked_fill(m == float("-inf"), 0.0)[..., None]).exp()
    return _paged_product_torch(p, v.permute(0, 1, 3, 2, 4)), m, p.sum(-1)


def _paged_product_torch(a: Tensor, b: Tensor) -> Tensor:
    """(B, 8, G, R, X) @ (B, 8 or 1, G, X, Y): one product of fixed shape per node, so no node sees another."""
    b = b.expand(*a.shape[:3], *b.shape[3:]).contiguous()
    return torch.stack([torch.matmul(a[i], b[i]) for i in range(a.shape[0])])


def _paged_attention_torch(
    q, q_far, q_pages, cache, scratch_k, scratch_v, tree, positions, window, anchors, scope, scale,
):
    """The kernels' sums in PyTorch: eight padded nodes, the same sets of keys, the same order of partial sums."""
    N, H = q.shape[1:3]
    G, dtype = scratch_k.shape[2], q.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    pad = _PAGED_NODES - N
    q, q_far, q_pages = (
        F.pad(x.to(wide), (0, 0, 0, 0, 0, pad)).unflatten(2, (G, H // G)) * scale for x in (q, q_far, q_pages))
    scratch_k, scratch_v = (F.pad(x.to(wide), (0, 0, 0, 0, 0, pad)) for x in (scratch_k, scratch_v))
    tree = F.pad(tree != 0, (0, pad, 0, pad))
    position = F.pad(positions.long(), (0, pad), value=-1)                 # (B, 8)
    length = cache.length.long()[:, None]
    edge = (position.div(_ATTENTION_PAGE, rounding_mode="floor") - 1) * _ATTENTION_PAGE
    acc, m, z = _paged_own_torch(
        q, q_far, cache, scratch_k, scratch_v, tree, position, edge, window, anchors, scope)
    split = _PAGED_SPLIT[scope]
    first = torch.zeros_like(length) if scope == "full" else (length - window + 1).clamp(min=0) // split
    for t in range(max(0, int((-(-edge // split) - first).max()))):
        at = (first + t) * split + torch.arange(split, device=q.device)    # (B, split)
        k, v = _paged_decode(cache, at, wide)
        dead = (at >= length)[..., None, None]
        k, v = k.masked_fill(dead, 0.0)[:, None], v.masked_fill(dead, 0.0)[:, None]
        mask = (at[:, None] < edge[..., None]) & (at[:, None] >= anchors) & (position[..., None] - at[:, None] < window)
        scores = _paged_product_torch(q_pages, k.permute(0, 1, 3, 4, 2))
        b_acc, b_m, b_l = _paged_softmax_torch(scores, mask, v)
        m_new = torch.maximum(m, b_m)
        alpha, beta = (m - m_new).exp(), (b_m - m_new).exp()
        acc = acc * alpha[..., None] + b_acc * beta[..., None]
        z, m = z * alpha + b_l * beta, m_new
    return (acc / z[..., None])[:, :N].flatten(2, 3).to(dtype)


def _paged_own_torch(q, q_far, cache, scratch_k, scratch_v, tree, position, edge, window, anchors, scope):
    """Each node's own page, the page before, and the anchors, in full precision: partial softmax."""
    B = q.shape[0]
    dtype = q.dtype
    batch = torch.arange(B, device=q.device)[:, None, None]
    length = cache.length.long()[:, None, None]
    pos = position[..., None]                                              # (B, 8, 1)
    at = edge[..., None] + torch.arange(2 * _ATTENTION_PAGE, device=q.device)
    hit = tree[None, :, None, :] & (position[:, None, None, :] == at[..., None])
    seen = (at >= 0) & (at <= pos) & (pos - at < window)
    in_ring, in_new = seen & (at < length), seen & (at >= length) & hit.any(-1)
    node, row = hit.int().argmax(-1), at % _PAGED_RECENT

    def column(ring, new):
        got = torch.where(in_ring[..., None, None], ring[batch, row].to(dtype), new[batch, node])
        return got.masked_fill(~(in_ring | in_new)[..., None, None], 0.0)  # (B, 8, 128, G, K)

    k, v = column(cache.recent_k, scratch_k), column(cache.recent_v, scratch_v)
    scores = _paged_product_torch(q, k.permute(0, 1, 3, 4, 2))
    mask = in_ring | in_new
    if anchors > 0:
        a = torch.arange(anchors, device=q.device)
        far = (pos - a >= window) & (scope == "window")
        near = (a < edge[..., None]) & (pos - a < window)
        live = (a < length)[..., None, None]
        near_k, far_k, anchor_v = (x[:, None, :anchors].to(dtype).masked_fill(~live, 0.0)
                                   for x in (cache.anchor_near, cache.anchor_k, cache.anchor_v))
        near_s = _paged_product_torch(q, near_k.permute(0, 1, 3, 4, 2))
        far_s = _paged_product_torch(q_far, far_k.permute(0, 1, 3, 4, 2))
        scores = torch.cat([scores, torch.where(far[:, :, None, None], far_s, near_s)], -1)
        mask = torch.cat([mask, near | far], -1)
        v = torch.cat([v, anchor_v.expand(-1, _PAGED_NODES, -1, -1, -1)], 2)
    return _paged_softmax_torch(scores, mask, v)


def paged_attention(
    q: Tensor, q_far: Tensor | None, cache: SimpleNamespace, scratch_k: Tensor, scratch_v: Tensor, tree_mask: Tensor,
    positions: Tensor, *, window: int, anchors: int, scope: str, scale: float | None = None,
) -> Tensor:
    """Attend from N <= 8 tree nodes to the committed tokens and to each node's own path; returns (B, N, H, K).

    q, q_far (B, N, H, K) as in windowed_attention. scratch_k, scratch_v (B, N, G, K): the nodes' rotated keys, values.
    tree_mask (N, N) bool: [n, m] when m is n or its ancestor. positions (N,) or (B, N) int32: length + depth.
    cache: paged_cache. scope window: the law of windowed_attention, N <= window; full: every position, each at its
    distance (q_far may be None). Keys two or more pages of 64 older are read quantised, the first `anchors` never.
    A node's bits depend neither on the other nodes, nor on what is committed of its path, nor on the page table.
    """
    _require(q.ndim == 4, f"q must be (B, N, H, K), got {tuple(q.shape)}")
    B, N, H, K = q.shape
    _require(scope in _PAGED_SPLIT, f"scope must be window or full, got {scope!r}")
    _require(1 <= N <= _PAGED_NODES, f"a tree must have 1 to {_PAGED_NODES} nodes, got {N}")
    _require(K in (32, 64, 128), f"the key dimension must be 32, 64 or 128, got {K}")
    G = cache.recent_k.shape[2]
    want = (B, N, G, K)
    fits = scratch_k.shape == want and scratch_v.shape == want and H % G == 0
    _require(fits, f"scratch_k, scratch_v must be {want}, got {tuple(scratch_k.shape)}, {tuple(scratch_v.shape)}")
    kind = cache.recent_k.dtype
    fits = q.dtype == kind and scratch_k.dtype == kind and scratch_v.dtype == kind
    _require(fits, f"q, scratch_k, scratch_v must have the cache's type {kind}, got {q.dtype}, {scratch_k.dtype}")
    _require(tree_mask.shape == (N, N), f"tree_mask must be {(N, N)}, got {tuple(tree_mask.shape)}")
    _require(positions.shape in ((N,), (B, N)), f"positions must be {(N,)} or {(B, N)}, got {tuple(positions.shape)}")
    held = cache.anchor_k.shape[1]
    _require(0 <= anchors <= held, f"anchors must be 0 to the {held} that the cache holds, got {anchors}")
    _require(not (q.is_cuda and q.dtype == torch.float64), "float64 runs on the CPU only, got a CUDA tensor")
    if scope == "window":
        _require(q_far is not None and q_far.shape == q.shape, "scope window needs q_far of q's shape")
        _require(N <= window, f"the window must hold a whole path of {N} nodes, got {window}")
        held = (cache.page_table.shape[1] - 2) * _ATTENTION_PAGE
        _require(window <= held, f"the cache holds a window of {held}, got {window}")
    else:
        q_far, window = q, _ATTENTION_WIDEST
    scale = K**-0.5 if scale is None else float(scale)
    q_pages = hadamard_rotate(q) if cache.bits == 4 else q
    tree, positions = tree_mask.to(torch.int32), positions.to(torch.int32).expand(B, N)
    run = _paged_attention_kernel if _uses_kernel(q) else _paged_attention_torch
    args = (x.contiguous() for x in (q, q_far, q_pages))
    return run(*args, cache, scratch_k.contiguous(), scratch_v.contiguous(), tree.contiguous(), positions.contiguous(),
               window, anchors, scope, scale)


# ---------------------------------------------------------------------------
# Random Hadamard transform

# butterfly block; also the multiple that every contraction width must be
_HADAMARD_BLOCK = 128
_HADAMARD_NORM = tl.constexpr(128**-0.5)
# rows of one quantiser or transform tile: 32 x 128 floats are 32 registers a thread at 4 warps
_MICROSCALED_ROWS = 32
# key of the fixed random signs; "seed" arguments drive stochastic rounding only
_HADAMARD_SIGN_KEY = 0x243F6A88


@_jit
def _hadamard_tile(x, ROWS: tl.constexpr):
    """x H / sqrt(128), x (ROWS, 128) float32, by seven butterfly stages.

    A stage transforms the lowest index bit and moves it to the top: seven of them restore natural order.
    Additions only, in a fixed order, so that the CPU path gives the same bits; a dot with the constant
    matrix would not (its order of summation belongs to the hardware) and spends 18 times the operations.
    """
    for _ in tl.static_range(7):
        even, odd = tl.split(tl.reshape(x, (ROWS, 64, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS, 128))
    return x * _HADAMARD_NORM


@_jit
def _microscaled_load_tile(
    x_ptr, signs_ptr, i_row, i_block, rows, width, stride_row, stride_col, HADAMARD: tl.constexpr, ROWS: tl.constexpr
):
    """Tile (ROWS, 128) of x in float32, zero outside, rotated by H diag(signs) if asked."""
    o_row = i_row.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_col = (i_block * 128 + tl.arange(0, 128)).to(tl.int64)
    m_col = o_col < width
    p_x = x_ptr + o_row[:, None] * stride_row + o_col[None, :] * stride_col
    b_x = tl.load(p_x, mask=(o_row < rows)[:, None] & m_col[None, :], other=0.0).to(tl.float32)
    if HADAMARD:
        b_sign = tl.load(signs_ptr + o_col, mask=m_col, other=0).to(tl.float32)
        b_x = _hadamard_tile(b_x * b_sign[None, :], ROWS)
    return b_x


@_jit_dynamic("rows")
def _hadamard_kernel(
    x_ptr, signs_ptr, y_ptr, rows, width, HAS_SIGNS: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr
):
    """y = H diag(signs) x, or diag(signs) H x when INVERSE, in blocks of 128 along the last dim."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_col = tl.program_id(1) * 128 + tl.arange(0, 128)
    m_row = (o_row < rows)[:, None]
    offsets = o_row[:, None] * width + o_col[None, :]
    b_x = tl.load(x_ptr + offsets, mask=m_row, other=0.0).to(tl.float32)
    if HAS_SIGNS:
        b_sign = tl.load(signs_ptr + o_col).to(tl.float32)[None, :]
        if INVERSE:
            b_x = _hadamard_tile(b_x, ROWS) * b_sign
        else:
            b_x = _hadamard_tile(b_x * b_sign, ROWS)
    else:
        b_x = _hadamard_tile(b_x, ROWS)
    tl.store(y_ptr + offsets, b_x.to(y_ptr.dtype.element_ty), mask=m_row)


def _hadamard_torch(x: Tensor, signs: Tensor | None, inverse: bool) -> Tensor:
    """The butterfly of the kernel in x's float32 or float64, same order of additions."""
    y = x.float() if x.dtype == torch.bfloat16 else x
    if signs is not None and not inverse:
        y = y * signs.to(y.dtype)
    y = y.reshape(*x.shape[:-1], -1, _HADAMARD_BLOCK)
    for _ in range(7):
        even, odd = y[..., 0::2], y[..., 1::2]
        y = torch.cat((even + odd, even - odd), dim=-1)
    y = (y * _HADAMARD_BLOCK**-0.5).reshape(x.shape)
    if signs is not None and inverse:
        y = y * signs.to(y.dtype)
    return y.to(x.dtype)


def _hadamard(x: Tensor, signs: Tensor | None, inverse: bool) -> Tensor:
    if not _uses_kernel(x):
        return _hadamard_torch(x, signs, inverse)
    x = x.contiguous()
    y = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    if rows == 0:
        return y
    grid = (triton.cdiv(rows, _MICROSCALED_ROWS), width // _HADAMARD_BLOCK)
    _hadamard_kernel[grid](
        x_ptr=x,
        signs_ptr=x if signs is None else signs,
        y_ptr=y,
        rows=rows,
        width=width,
        HAS_SIGNS=signs is not None,
        INVERSE=inverse,
        ROWS=_MICROSCALED_ROWS,
        num_warps=4,
    )
    return y


class _Hadamard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, signs, inverse):
        ctx.signs, ctx.inverse = signs, inverse
        return _hadamard(x, signs, inverse)

    @staticmethod
    def backward(ctx, dy):
        return _hadamard(dy, ctx.signs, not ctx.inverse), None, None


def _require_microscaled_input(name: str, x: Tensor) -> None:
    _require(
        x.dim() >= 1 and x.shape[-1] > 0 and x.shape[-1] % _HADAMARD_BLOCK == 0,
        f"{name} width must be a positive multiple of {_HADAMARD_BLOCK}, got shape {tuple(x.shape)}",
    )
    allowed = (torch.float32, torch.bfloat16) if x.is_cuda else (torch.float32, torch.float64, torch.bfloat16)
    _require(x.dtype in allowed, f"{name} must be bfloat16 or float32 (float64 on the CPU only), got {x.dtype}")


def _require_signs(signs: Tensor | None, x: Tensor) -> None:
    _require(
        signs is None or (signs.shape == x.shape[-1:] and signs.device == x.device),
        f"signs must have shape ({x.shape[-1]},) on {x.device}, "
        f"got {None if signs is None else (tuple(signs.shape), str(signs.device))}",
    )


def hadamard_transform(x: Tensor, signs: Tensor | None = None, *, inverse: bool = False) -> Tensor:
    """Rotate x (..., width) by the normalised 128-wide Hadamard matrix after signs; inverse: its transpose.

    signs: (width,) of +-1 of any type, or None. The transform is orthogonal (fast Walsh-Hadamard butterfly).
    """
    _require_microscaled_input("x", x)
    _require_signs(signs, x)
    return _Hadamard.apply(x, signs, inverse)


# ---------------------------------------------------------------------------
# Microscaled quantisers (E2M1 with E4M3 scales; E4M3 and E5M2 with power-of-two scales)

_FP4_BLOCK = 32
# float32 bit pattern of 6 * 448, the largest magnitude that a global scale of one holds
_FP4_LIMIT_BITS = 0x45280000
# mantissa bits, lowest exponent, largest finite code, float32 bit pattern of the largest value (448, 57344)
_FP8_FORMATS = {
    "e4m3": (3, -6, 0x7E, 0x43E00000),
    "e5m2": (2, -14, 0x7B, 0x47600000),
}
_FP8_TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# thresholds of rounding to the nearest value; ">=" where the upper neighbour is even, ">" where the lower one is
_E2M1_TIES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
_TWO_POW_120 = tl.constexpr(2.0**120)
_TWO_POW_126 = tl.constexpr(2.0**126)
# rounding noise has 19 bits and sits in the middle of its cell: noise * scale is then exact in float32
_NOISE_UNIT = tl.constexpr(2.0**-19)


@_jit
def _covering_exponent(amax, LIMIT_BITS: tl.constexpr):
    """Biased exponent of the smallest power of two p with amax <= limit * p, at least 1 and at most 253."""
    excess = amax.to(tl.int32, bitcast=True) - LIMIT_BITS
    return tl.minimum(tl.maximum(((excess + 0x7FFFFF) >> 23) + 127, 1), 253)


@_jit
def _fp8_encode(x, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, TOP: tl.constexpr, UP: tl.constexpr):
    """Code of x >= 0 (float32, finite): to nearest, ties to even, or up; saturates at TOP. Integer arithmetic."""
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) >> 23, 127 + LOWEST)
    # x in units of the last place of its binade: exact
    units = x * ((254 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)
    whole = units.to(tl.int32)
    rest = units - whole.to(tl.float32)
    if UP:
        whole += (rest > 0).to(tl.int32)
    else:
        whole += ((rest > 0.5) | ((rest == 0.5) & ((whole & 1) == 1))).to(tl.int32)
    return tl.minimum(((exponent - (127 + LOWEST)) << MANTISSA) + whole, TOP)


@_jit
def _e4m3_decode(byte):
    bits = byte.to(tl.uint32)
    value = (bits << 20).to(tl.float32, bitcast=True) * _TWO_POW_120
    return tl.where(bits == 127, float("nan"), value)


@_jit
def _e2m1_decode(code):
    bits = code.to(tl.uint32)
    return (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True) * _TWO_POW_126


@_jit
def _microscaled_noise(seed, STREAM: tl.constexpr, i_row, i_block, ROWS: tl.constexpr):
    """Uniform noise (ROWS, 128) in (0, 1): Philox word k % 4 of counter (k // 4, row, STREAM) under the key seed."""
    o_row = (i_row * ROWS + tl.arange(0, ROWS))[:, None]
    o_quad = (i_block * 32 + tl.arange(0, 32))[None, :]
    zero = o_row * 0 + o_quad * 0
    w0, w1, w2, w3 = tl.philox(seed, zero + o_quad, zero + o_row, zero + STREAM, zero)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, 128))
    return ((words >> 13).to(tl.int32).to(tl.float32) + 0.5) * _NOISE_UNIT


@_jit_dynamic("rows")
def _fp4_row_scale_kernel(
    x_ptr,
    signs_ptr,
    global_ptr,
    rows,
    width,
    stride_row,
    stride_col,
    HADAMARD: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """global[row] = smallest power of two p with max |x[row]| <= 6 * 448 * p, over the finite values."""
    i_row = tl.program_id(0)
    b_amax = tl.zeros((ROWS,), tl.float32)
    for i_block in range(0, tl.cdiv(width, 128)):
        b_x = _microscaled_load_tile(
            x_ptr, signs_ptr, i_row, i_block, rows, width, stride_row, stride_col, HADAMARD, ROWS
        )
        b_abs = tl.where(tl.abs(b_x) < float("inf"), tl.abs(b_x), 0.0)
        b_amax = tl.maximum(b_amax, tl.max(b_abs, axis=1))
    b_global = (_covering_exponent(b_amax, LIMIT_BITS) << 23).to(tl.float32, bitcast=True)
    o_row = i_row.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(global_ptr + o_row, b_global, mask=o_row < rows)


@_jit_dynamic("rows")
def _fp4_quantize_kernel(
    x_ptr,
    signs_ptr,
    global_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    width,
    padded_width,
    stride_row,
    stride_col,
    seed_ptr,
    HADAMARD: tl.constexpr,
    PER_ROW: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STREAM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """x = code * scale * global with code in E2M1, scale E4M3 of 32 values, all compared exactly: no division of x.

    Nearest: count the thresholds t with |x| > t * scale (>= where the upper neighbour is even).
    Stochastic: add u * step * scale, u uniform, and truncate; the scale is rounded up so that nothing clips.
    A block with a non-finite value gets the NaN scale.
    """
    i_row, i_block = tl.program_id(0), tl.program_id(1)
    o_row = i_row.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < rows
    b_x = _microscaled_load_tile(x_ptr, signs_ptr, i_row, i_block, rows, width, stride_row, stride_col, HADAMARD, ROWS)
    if PER_ROW:
        b_global = tl.load(global_ptr + o_row, mask=m_row, other=1.0)[:, None]
    else:
        b_global = tl.load(global_ptr)
    # the reciprocal of a power of two, exact: exponent 254 - e
    b_inverse = ((254 << 23) - b_global.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    m_finite = tl.abs(b_x) < float("inf")
    b_abs = tl.where(m_finite, tl.abs(b_x) * b_inverse, 0.0)
    b_abs = tl.reshape(b_abs, (ROWS, 4, 32))
    b_share = tl.div_rn(tl.max(b_abs, axis=2), tl.full((ROWS, 4), 6.0, tl.float32))
    b_code = _fp8_encode(b_share, 3, -6, 0x7E, STOCHASTIC)
    s = _e4m3_decode(b_code)[:, :, None]
    if STOCHASTIC:
        step = tl.where(b_abs < 2.0 * s, 0.5, tl.where(b_abs < 4.0 * s, 1.0, 2.0))
        u = tl.reshape(_microscaled_noise(tl.load(seed_ptr), STREAM, i_row, i_block, ROWS), (ROWS, 4, 32))
        a = b_abs + u * (step * s)
        mag = (a >= 0.5 * s).to(tl.int32) + (a >= s).to(tl.int32) + (a >= 1.5 * s).to(tl.int32)
        mag += (a >= 2.0 * s).to(tl.int32) + (a >= 3.0 * s).to(tl.int32)
        mag += (a >= 4.0 * s).to(tl.int32) + (a >= 6.0 * s).to(tl.int32)
    else:
        a = b_abs
        mag = (a > 0.25 * s).to(tl.int32) + (a >= 0.75 * s).to(tl.int32) + (a > 1.25 * s).to(tl.int32)
        mag += (a >= 1.75 * s).to(tl.int32) + (a > 2.5 * s).to(tl.int32)
        mag += (a >= 3.5 * s).to(tl.int32) + (a > 5.0 * s).to(tl.int32)
    # a block whose scale underflows to zero is zero
    mag = tl.where(s > 0.0, mag, 0)
    negative = tl.reshape((b_x < 0).to(tl.int32), (ROWS, 4, 32))
    low, high = tl.split(tl.reshape(mag | (negative << 3), (ROWS, 64, 2)))
    b_bad = tl.max(tl.reshape(1 - m_finite.to(tl.int32), (ROWS, 4, 32)), axis=2)
    b_code = tl.where(b_bad > 0, 0x7F, b_code)
    o_byte = i_block * 64 + tl.arange(0, 64)
    p_codes = codes_ptr + o_row[:, None] * (padded_width // 2) + o_byte[None, :]
    tl.store(p_codes, (low | (high << 4)).to(tl.uint8), mask=m_row[:, None])
    o_scale = i_block * 4 + tl.arange(0, 4)
    p_scales = scales_ptr + o_row[:, None] * (padded_width // 32) + o_scale[None, :]
    tl.store(p_scales, b_code.to(tl.uint8), mask=m_row[:, None])


@_jit_dynamic("rows")
def _fp8_quantize_kernel(
    x_ptr,
    scale_ptr,
    codes_ptr,
    exponents_ptr,
    amax_ptr,
    rows,
    width,
    padded_width,
    stride_row,
    stride_col,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    TOP: tl.constexpr,
    LIMIT_BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """x = code * 2^(e - 127) * scale, e one byte for 32 values, chosen from the block itself: no block clips.

    amax[program] = largest finite magnitude of the tile, for the delayed scale of later steps.
    """
    i_row, i_block = tl.program_id(0), tl.program_id(1)
    o_row = i_row.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < rows
    b_x = _microscaled_load_tile(x_ptr, x_ptr, i_row, i_block, rows, width, stride_row, stride_col, False, ROWS)
    m_finite = tl.abs(b_x) < float("inf")
    b_abs = tl.reshape(tl.where(m_finite, tl.abs(b_x), 0.0), (ROWS, 4, 32))
    b_amax = tl.max(b_abs, axis=2)
    # biased exponent of the tensor scale, a power of two
    shift = (tl.load(scale_ptr).to(tl.int32, bitcast=True) >> 23) - 127
    b_exponent = tl.minimum(tl.maximum(_covering_exponent(b_amax, LIMIT_BITS) - shift, 1), 253)
    total = tl.minimum(tl.maximum(b_exponent + shift, 1), 253)
    b_inverse = ((254 - total) << 23).to(tl.float32, bitcast=True)
    b_code = tl.reshape(_fp8_encode(b_abs * b_inverse[:, :, None], MANTISSA, LOWEST, TOP, False), (ROWS, 128))
    b_code = tl.where(m_finite, b_code | ((b_x < 0).to(tl.int32) << 7), 0x7F)
    o_col = i_block * 128 + tl.arange(0, 128)
    p_codes = codes_ptr + o_row[:, None] * padded_width + o_col[None, :]
    tl.store(p_codes, b_code.to(tl.uint8), mask=m_row[:, None])
    o_exponent = i_block * 4 + tl.arange(0, 4)
    p_exponents = exponents_ptr + o_row[:, None] * (padded_width // 32) + o_exponent[None, :]
    tl.store(p_exponents, b_exponent.to(tl.uint8), mask=m_row[:, None])
    tl.store(amax_ptr + i_row * tl.num_programs(1) + i_block, tl.max(tl.max(b_amax, axis=1), axis=0))


def _exp2_torch(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent for int32 exponents in -126 ... 127, exact (a library pow need not be)."""
    return ((exponent + 127) << 23).view(torch.float32).to(dtype)


def _covering_exponent_torch(amax: Tensor, limit_bits: int) -> Tensor:
    excess = amax.float().contiguous().view(torch.int32) - limit_bits
    return (((excess + 0x7FFFFF) >> 23) + 127).clamp(1, 253)


def _fp8_encode_torch(x: Tensor, mantissa: int, lowest: int, top: int, up: bool) -> Tensor:
    exponent = torch.where(x > 0, torch.frexp(x).exponent - 1, lowest).clamp(min=lowest)
    units = x * _exp2_torch(mantissa - exponent, x.dtype)
    whole = units.floor()
    rest = units - whole
    whole = whole + ((rest > 0) if up else (rest > 0.5) | ((rest == 0.5) & (whole % 2 == 1)))
    return (((exponent - lowest) << mantissa) + whole.int()).clamp(max=top)


def _e4m3_decode_torch(byte: Tensor, dtype: torch.dtype) -> Tensor:
    return byte.view(torch.float8_e4m3fn).to(dtype)


def _philox_torch(key: int, counter: tuple[Tensor, ...]) -> list[Tensor]:
    """Philox-4x32, ten rounds: four int64 tensors of 32-bit words."""
    mask = 0xFFFFFFFF
    k0, k1 = key & mask, key >> 32
    c0, c1, c2, c3 = counter
    for _ in range(10):
        # 32 x 32 bit product in two halves, since int64 cannot hold it
        low0, low2 = c0 * 0x1F53, c2 * 0x8D57
        high0, high2 = c0 * 0xD251 + (low0 >> 16), c2 * 0xCD9E + (low2 >> 16)
        product0 = ((high0 & 0xFFFF) << 16) | (low0 & 0xFFFF)
        product2 = ((high2 & 0xFFFF) << 16) | (low2 & 0xFFFF)
        c0, c1, c2, c3 = (high2 >> 16) ^ c1 ^ k0, product2, (high0 >> 16) ^ c3 ^ k1, product0
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return [c0, c1, c2, c3]


def _microscaled_noise_torch(seed: int | Tensor, stream: int, rows: int, width: int, device: torch.device) -> Tensor:
    row = torch.arange(rows, device=device)[:, None].expand(rows, width // 4)
    quad = torch.arange(width // 4, device=device)[None, :].expand(rows, width // 4)
    counter = quad, row, torch.full_like(row, stream), torch.zeros_like(row)
    words = torch.stack(_philox_torch(int(seed), counter), dim=-1)
    return ((words >> 13).double() + 0.5).reshape(rows, width) * 2.0**-19


@functools.lru_cache(maxsize=64)
def _fp4_signs_table(length: int, device: torch.device) -> Tensor:
    # leaves inference mode: a cached inference tensor could never enter a graph later
    with torch.inference_mode(False):
        index = torch.arange(length // 4)
        zero = torch.zeros_like(index)
        words = torch.stack(_philox_torch(_HADAMARD_SIGN_KEY, (index, zero, zero, zero)), dim=-1).reshape(-1)
        return (1 - 2 * (words & 1)).to(torch.int8).to(device)


def fp4_signs(width: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the fixed random signs (width,) int8 that the FP4 operations apply; a prefix for every width."""
    # tables of power-of-two length, so that a changing token count does not fill the cache
    length = max(_HADAMARD_BLOCK, 1 << (width - 1).bit_length())
    return _fp4_signs_table(length, torch.device(device))[:width]


@dataclass(frozen=True, eq=False)
class PackedFP4:
    """FP4 tensor: value = E2M1 code * E4M3 scale of 32 values * float32 power of two of the tensor or row.

    codes (rows, width / 2) uint8, even element in the low half; scales (rows, width / 32) uint8;
    global_scale (1,) or (rows,) float32; signs (width,) int8 if rotated, else None; shape of the original.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    signs: Tensor | None
    shape: tuple[int, ...]

    def to_dict(self) -> dict[str, Tensor]:
        """Return plain tensors for a weights file."""
        tensors = {"codes": self.codes, "scales": self.scales, "global_scale": self.global_scale}
        tensors["shape"] = torch.tensor(self.shape, dtype=torch.int64)
        if self.signs is not None:
            tensors["signs"] = self.signs
        return tensors

    @classmethod
    def from_dict(cls, tensors: dict[str, Tensor]) -> "PackedFP4":
        """Rebuild from to_dict's tensors; raises ValueError if their shapes disagree."""
        shape = tuple(tensors["shape"].tolist())
        packed = cls(tensors["codes"], tensors["scales"], tensors["global_scale"], tensors.get("signs"), shape)
        rows, width = math.prod(shape[:-1]), shape[-1]
        _require(
            packed.codes.shape == (rows, width // 2)
            and packed.scales.shape == (rows, width // _FP4_BLOCK)
            and packed.global_scale.shape in ((1,), (rows,))
            and (packed.signs is None or packed.signs.shape == (width,)),
            f"packed tensors must fit shape {shape}, got codes {tuple(packed.codes.shape)}, "
            f"scales {tuple(packed.scales.shape)}, global_scale {tuple(packed.global_scale.shape)}",
        )
        return packed

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    def to(self, device: torch.device | str) -> "PackedFP4":
        """Return the same values on another device."""
        signs = None if self.signs is None else self.signs.to(device)
        return PackedFP4(self.codes.to(device), self.scales.to(device), self.global_scale.to(device), signs, self.shape)


def _fp4_quantize_torch(
    x: Tensor, signs: Tensor | None, per_row: bool, stochastic: bool, seed: int | Tensor, stream: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The values of the kernel, bit for bit in float32; x (rows, width), any width."""
    rows, width = x.shape
    x = F.pad(x.float() if x.dtype == torch.bfloat16 else x, (0, -width % _HADAMARD_BLOCK))
    if signs is not None:
        x = _hadamard_torch(x, F.pad(signs, (0, -width % _HADAMARD_BLOCK)), False)
    finite = x.abs() < math.inf
    magnitude = torch.where(finite, x.abs(), 0.0)
    exponent = _covering_exponent_torch(magnitude.amax(dim=1), _FP4_LIMIT_BITS)
    exponent = exponent if per_row else exponent.amax(dim=0, keepdim=True)
    magnitude = (magnitude * _exp2_torch(127 - exponent, x.dtype)[:, None]).view(rows, -1, _FP4_BLOCK)
    code = _fp8_encode_torch(magnitude.amax(dim=2) / 6.0, 3, -6, 0x7E, stochastic)
    s = _e4m3_decode_torch(code.to(torch.uint8), x.dtype)[:, :, None]
    if stochastic:
        step = torch.where(magnitude < 2.0 * s, 0.5, torch.where(magnitude < 4.0 * s, 1.0, 2.0))
        noise = _microscaled_noise_torch(seed, stream, rows, x.shape[1], x.device).to(x.dtype)
        magnitude = magnitude + noise.view_as(step) * (step * s)
        mag = sum((magnitude >= value * s).int() for value in _E2M1_VALUES[1:])
    else:
        mag = sum(((magnitude >= t * s) if even else (magnitude > t * s)).int() for t, even in _E2M1_TIES)
    mag = torch.where(s > 0, mag, 0).view(rows, -1)
    nibbles = mag | ((x < 0).int() << 3)
    codes = (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).to(torch.uint8)
    bad = ~finite.view(rows, -1, _FP4_BLOCK).all(dim=2)
    return codes, torch.where(bad, 0x7F, code).to(torch.uint8), _exp2_torch(exponent - 127, torch.float32)


def _fp4_quantize(
    x: Tensor, signs: Tensor | None, per_row: bool, stochastic: bool = False, seed: int | Tensor = 0, stream: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and global scale of x (rows, width), strided as it comes; the width is padded to 128 by zeros."""
    if not _uses_kernel(x):
        return _fp4_quantize_torch(x, signs, per_row, stochastic, seed, stream)
    rows, width = x.shape
    blocks = triton.cdiv(width, _HADAMARD_BLOCK)
    codes = torch.empty(rows, blocks * 64, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, blocks * 4, dtype=torch.uint8, device=x.device)
    global_scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    row_tiles = triton.cdiv(rows, _MICROSCALED_ROWS)
    shared = dict(rows=rows, width=width, stride_row=x.stride(0), stride_col=x.stride(1), HADAMARD=signs is not None)
    signs_or_x = x if signs is None else signs
    if stochastic and not isinstance(seed, Tensor):
        seed = torch.full((), seed, dtype=torch.int64, device=x.device)
    _fp4_row_scale_kernel[(row_tiles,)](
        x_ptr=x,
        signs_ptr=signs_or_x,
        global_ptr=global_scale,
        **shared,
        LIMIT_BITS=_FP4_LIMIT_BITS,
        ROWS=_MICROSCALED_ROWS,
        num_warps=4,
    )
    if not per_row:
        global_scale = global_scale.amax(dim=0, keepdim=True)
    _fp4_quantize_kernel[(row_tiles, blocks)](
        x_ptr=x,
        signs_ptr=signs_or_x,
        global_ptr=global_scale,
        codes_ptr=codes,
        scales_ptr=scales,
        padded_width=blocks * _HADAMARD_BLOCK,
        seed_ptr=seed if stochastic else x,
        **shared,
        PER_ROW=per_row,
        STOCHASTIC=stochastic,
        STREAM=stream,
        ROWS=_MICROSCALED_ROWS,
        num_warps=4,
    )
    return codes, scales, global_scale


def quantize_fp4(
    x: Tensor,
    *,
    signs: Tensor | None = None,
    stochastic: bool = False,
    seed: int | Tensor = 0,
    per_row_scale: bool = False,
) -> PackedFP4:
    """Pack x (..., width) into FP4: E2M1 values, an E4M3 scale per 32 along the last dim, a power of two above.

    signs (width,): rotate by hadamard_transform(x, signs) first. stochastic: unbiased rounding driven by seed and
    the element's index, block scales rounded up; otherwise nearest, ties to even. per_row_scale: one power of two
    a row (activations) instead of one (weights). Blocks that hold a NaN or an infinity come back as NaN.
    """
    _require_microscaled_input("x", x)
    _require_signs(signs, x)
    _require_seed(seed)
    _require(x.numel() > 0, f"x must have at least one row, got shape {tuple(x.shape)}")
    flat = x.detach().reshape(-1, x.shape[-1])
    signs = None if signs is None else signs.to(torch.int8)
    codes, scales, global_scale = _fp4_quantize(flat, signs, per_row_scale, stochastic, seed)
    return PackedFP4(codes, scales, global_scale, signs, tuple(x.shape))


def _require_seed(seed: int | Tensor) -> None:
    if isinstance(seed, Tensor):
        found = f"a tensor seed must be one int64, got {tuple(seed.shape)} {seed.dtype}"
        _require(seed.dim() == 0 and seed.dtype == torch.int64, found)
    else:
        _require(isinstance(seed, int) and 0 <= seed < 2**63, f"seed must be an integer in [0, 2**63), got {seed!r}")


def _fp4_values_torch(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Code times block scale (rows, width), still without the global scale; exact even in bfloat16 (6 bits)."""
    table = torch.tensor(_E2M1_VALUES + tuple(-v for v in _E2M1_VALUES), dtype=dtype, device=codes.device)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).int().view(codes.shape[0], -1, _FP4_BLOCK)
    return (table[nibbles] * _e4m3_decode_torch(scales, dtype)[:, :, None]).flatten(1)


def dequantize_fp4(packed: PackedFP4, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the packed values in their original shape, the rotation undone."""
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    values = _fp4_values_torch(packed.codes, packed.scales, compute) * packed.global_scale.to(compute)[:, None]
    if packed.signs is not None:
        values = _hadamard(values, packed.signs, True)
    return values.to(dtype).view(packed.shape)


class DelayedScale(torch.nn.Module):
    """Hold the largest magnitudes of the last 16 steps of a linear map's input, weight and gradient.

    The scale used at a step comes from the history before it and is a power of two: it moves exponents, never a
    mantissa, so a forward pass repeated under recomputation gives the same bits although the history has moved.
    """

    ROLES = ("input", "weight", "gradient")
    LENGTH = 16

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(len(self.ROLES), self.LENGTH))

    def scale(self, role: str) -> Tensor:
        """Return the tensor scale (1,) float32 of a role; 1 while its history holds nothing but zeros."""
        limit_bits = _FP8_FORMATS["e5m2" if role == "gradient" else "e4m3"][3]
        amax = self.history[self.ROLES.index(role)].float().amax(dim=0, keepdim=True)
        # half of float32's exponent range on either side keeps the product of two scales finite
        exponent = (_covering_exponent_torch(amax, limit_bits) - 127).clamp(-62, 62)
        return _exp2_torch(torch.where(amax > 0, exponent, 0), torch.float32)

    @torch.no_grad()
    def update(self, role: str, amax: Tensor) -> None:
        """Push the largest finite magnitude of this step, (1,), and drop the oldest."""
        row = self.history[self.ROLES.index(role)]
        amax = torch.where(amax < math.inf, amax, 0.0).to(row.dtype)
        row.copy_(torch.cat((amax.reshape(1), row[:-1])))


def _fp8_quantize_torch(x: Tensor, scale: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """The values of the kernel, bit for bit in float32; x (rows, width), any width."""
    mantissa, lowest, top, limit_bits = _FP8_FORMATS[format]
    rows, width = x.shape
    x = F.pad(x.float() if x.dtype == torch.bfloat16 else x, (0, -width % _HADAMARD_BLOCK))
    finite = x.abs() < math.inf
    magnitude = torch.where(finite, x.abs(), 0.0).view(rows, -1, _FP4_BLOCK)
    shift = (scale.view(torch.int32) >> 23) - 127
    exponent = (_covering_exponent_torch(magnitude.amax(dim=2), limit_bits) - shift).clamp(1, 253)
    total = (exponent + shift).clamp(1, 253)
    units = magnitude * _exp2_torch(127 - total, x.dtype)[:, :, None]
    code = _fp8_encode_torch(units, mantissa, lowest, top, False).view(rows, -1)
    code = torch.where(finite, code | ((x < 0).int() << 7), 0x7F)
    return code.to(torch.uint8), exponent.to(torch.uint8), magnitude.amax().float().reshape(1)


def _fp8_quantize(x: Tensor, scale: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block exponents and largest magnitude of x (rows, width), strided as it comes; width padded to 128."""
    if not _uses_kernel(x):
        return _fp8_quantize_torch(x, scale, format)
    mantissa, lowest, top, limit_bits = _FP8_FORMATS[format]
    rows, width = x.shape
    blocks = triton.cdiv(width, _HADAMARD_BLOCK)
    row_tiles = triton.cdiv(rows, _MICROSCALED_ROWS)
    codes = torch.empty(rows, blocks * _HADAMARD_BLOCK, dtype=torch.uint8, device=x.device)
    exponents = torch.empty(rows, blocks * 4, dtype=torch.uint8, device=x.device)
    amax = torch.empty(row_tiles * blocks, dtype=torch.float32, device=x.device)
    _fp8_quantize_kernel[(row_tiles, blocks)](
        x_ptr=x,
        scale_ptr=scale,
        codes_ptr=codes,
        exponents_ptr=exponents,
        amax_ptr=amax,
        rows=rows,
        width=width,
        padded_width=blocks * _HADAMARD_BLOCK,
        stride_row=x.stride(0),
        stride_col=x.stride(1),
        MANTISSA=mantissa,
        LOWEST=lowest,
        TOP=top,
        LIMIT_BITS=limit_bits,
        ROWS=_MICROSCALED_ROWS,
        num_warps=4,
    )
    return codes, exponents, amax.amax(dim=0, keepdim=True)


def quantize_fp8(x: Tensor, format: str = "e4m3", *, scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise x (..., width) to 8 bits: codes (..., width), block exponents (..., width / 32), largest magnitude (1,).

    Value = code * 2^(exponent - 127) * scale; format "e4m3" or "e5m2"; scale (1,) float32, a power of two (default 1).
    """
    _require_microscaled_input("x", x)
    _require(format in _FP8_FORMATS, f"format must be one of {tuple(_FP8_FORMATS)}, got {format!r}")
    _require(x.numel() > 0, f"x must have at least one row, got shape {tuple(x.shape)}")
    scale = torch.ones(1, device=x.device) if scale is None else scale
    codes, exponents, amax = _fp8_quantize(x.detach().reshape(-1, x.shape[-1]), scale, format)
    codes = codes.view(x.shape).view(_FP8_TORCH[format])
    return codes, exponents.view(*x.shape[:-1], -1), amax


# ---------------------------------------------------------------------------
# Block-scaled 4-bit matrix product

# weight-only decoding: rows of a tile (tensor cores need 16; the CPU pads to 8) and columns
_FP4_DECODE_ROWS = 16
_FP4_DECODE_ROWS_CPU = 8
_FP4_DECODE_COLS = 64
# programs that a decoding product aims for: two a multiprocessor; a constant, or results would depend on the device
_FP4_DECODE_PROGRAMS = 256


@_jit
def _fp4_dequantize_tile(codes, scales, DTYPE: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr):
    """codes (ROWS, K / 2), scales (ROWS, K / 32) -> code * scale (ROWS, K), exact in bfloat16: 2 + 4 bits."""
    c = tl.reshape(codes, (ROWS, K // 32, 16))
    s = _e4m3_decode(scales)[:, :, None]
    low = (_e2m1_decode(c & 15) * s).to(DTYPE)
    high = (_e2m1_decode(c >> 4) * s).to(DTYPE)
    return tl.reshape(tl.join(low, high), (ROWS, K))


@_jit_dynamic("M")
def _microscaled_fp4_gemm_kernel(
    a_ptr,
    a_scale_ptr,
    a_global_ptr,
    b_ptr,
    b_scale_ptr,
    b_global_ptr,
    c_ptr,
    M,
    N,
    K,
    A_PER_ROW: tl.constexpr,
    B_PER_ROW: tl.constexpr,
    NATIVE: tl.constexpr,
    DTYPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """c = (a * scale_a) (b * scale_b)^T * global_a * global_b; a (M, K), b (N, K) packed E2M1, scales E4M3 of 32.

    NATIVE: the block-scaled instruction, which takes a scale per 16: each byte is read twice. Otherwise the codes
    are multiplied by their scales in registers and go through an ordinary product; K is a multiple of BK.
    """
    # groups of 8 row tiles share their b tiles in the second-level cache
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0)
    first = pid // (8 * tiles_n) * 8
    group = tl.minimum(tiles_m - first, 8)
    i_m = first + pid % (8 * tiles_n) % group
    i_n = pid % (8 * tiles_n) // group
    o_m = i_m.to(tl.int64) * BM + tl.arange(0, BM)
    o_n = i_n.to(tl.int64) * BN + tl.arange(0, BN)
    m_m, m_n = o_m < M, o_n < N
    o_byte = tl.arange(0, BK // 2)
    if NATIVE:
        o_scale = tl.arange(0, BK // 16) // 2
    else:
        o_scale = tl.arange(0, BK // 32)
    p_a = a_ptr + o_m[:, None] * (K // 2) + o_byte[None, :]
    p_b = b_ptr + o_n[:, None] * (K // 2) + o_byte[None, :]
    p_a_scale = a_scale_ptr + o_m[:, None] * (K // 32) + o_scale[None, :]
    p_b_scale = b_scale_ptr + o_n[:, None] * (K // 32) + o_scale[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K // BK):
        b_a = tl.load(p_a, mask=m_m[:, None], other=0)
        b_b = tl.load(p_b, mask=m_n[:, None], other=0)
        s_a = tl.load(p_a_scale, mask=m_m[:, None], other=0)
        s_b = tl.load(p_b_scale, mask=m_n[:, None], other=0)
        if NATIVE:
            s_a = s_a.to(tl.float8e4nv, bitcast=True)
            s_b = s_b.to(tl.float8e4nv, bitcast=True)
            acc = tl.dot_scaled(b_a, s_a, "e2m1", tl.trans(b_b), s_b, "e2m1", acc)
        else:
            v_a = _fp4_dequantize_tile(b_a, s_a, DTYPE, BM, BK)
            v_b = _fp4_dequantize_tile(b_b, s_b, DTYPE, BN, BK)
            acc = tl.dot(v_a, tl.trans(v_b), acc, input_precision="ieee")
        p_a += BK // 2
        p_b += BK // 2
        p_a_scale += BK // 32
        p_b_scale += BK // 32
    if A_PER_ROW:
        acc *= tl.load(a_global_ptr + o_m, mask=m_m, other=0.0)[:, None]
    else:
        acc *= tl.load(a_global_ptr)
    if B_PER_ROW:
        acc *= tl.load(b_global_ptr + o_n, mask=m_n, other=0.0)[None, :]
    else:
        acc *= tl.load(b_global_ptr)
    p_c = c_ptr + o_m[:, None] * N + o_n[None, :]
    tl.store(p_c, acc.to(c_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@_jit_dynamic("M")
def _fp4_weight_only_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    partial_ptr,
    M,
    N,
    K,
    depth,
    DTYPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """partial[split] = x (code * scale)^T over the split's depth columns; 16-row tiles for any number of rows."""
    i_m, i_n, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_m = i_m.to(tl.int64) * BM + tl.arange(0, BM)
    o_n = i_n.to(tl.int64) * BN + tl.arange(0, BN)
    m_m, m_n = o_m < M, o_n < N
    o_k, o_byte, o_scale = tl.arange(0, BK), tl.arange(0, BK // 2), tl.arange(0, BK // 32)
    acc = tl.zeros((BM, BN), tl.float32)
    start = i_split * depth
    for k in range(start, tl.minimum(start + depth, K), BK):
        b_x = tl.load(x_ptr + o_m[:, None] * K + (k + o_k)[None, :], mask=m_m[:, None], other=0.0)
        p_codes = codes_ptr + o_n[:, None] * (K // 2) + (k // 2 + o_byte)[None, :]
        p_scales = scales_ptr + o_n[:, None] * (K // 32) + (k // 32 + o_scale)[None, :]
        b_codes = tl.load(p_codes, mask=m_n[:, None], other=0)
        b_scales = tl.load(p_scales, mask=m_n[:, None], other=0)
        b_w = _fp4_dequantize_tile(b_codes, b_scales, DTYPE, BN, BK)
        acc = _dot_add(b_x, tl.trans(b_w), acc, "ieee")
    p_partial = partial_ptr + (i_split.to(tl.int64) * M + o_m[:, None]) * N + o_n[None, :]
    tl.store(p_partial, acc, mask=m_m[:, None] & m_n[None, :])


@_jit_dynamic("size")
def _fp4_weight_only_sum_kernel(
    partial_ptr, global_ptr, y_ptr, size, N, SPLITS: tl.constexpr, PER_ROW: tl.constexpr, BLOCK: tl.constexpr
):
    """y = global * sum over splits of partial, in order of the splits; size = rows * N, flattened."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < size
    acc = tl.zeros((BLOCK,), tl.float32)
    for i_split in tl.static_range(SPLITS):
        acc += tl.load(partial_ptr + i_split * size.to(tl.int64) + o, mask=m, other=0.0)
    if PER_ROW:
        acc *= tl.load(global_ptr + o % N, mask=m, other=0.0)
    else:
        acc *= tl.load(global_ptr)
    tl.store(y_ptr + o, acc.to(y_ptr.dtype.element_ty), mask=m)


def _microscaled_native(x: Tensor) -> bool:
    """True on the SM10x family, whose tensor cores take block-scaled operands."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 10


def _fp4_gemm_config(native: bool, dtype: torch.dtype) -> dict:
    """Tiles by case; shared memory and registers of each are in the compile tests."""
    if native:
        # 2 instructions of depth 64 a step; the accumulator takes 128 of 512 columns of tensor memory
        return dict(BM=128, BN=128, BK=128, DTYPE=tl.bfloat16, num_warps=4, num_stages=3)
    if dtype == torch.bfloat16:
        # sm_90: both operands pass through registers; depth 64 keeps their values beside 64 accumulators a thread
        return dict(BM=128, BN=128, BK=64, DTYPE=tl.bfloat16, num_warps=8, num_stages=3)
    return dict(BM=64, BN=64, BK=32, DTYPE=tl.float32, num_warps=4, num_stages=2)


def _fp4_gemm_torch(a: tuple[Tensor, ...], b: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    compute = torch.float32 if dtype == torch.bfloat16 else dtype
    product = _fp4_values_torch(a[0], a[1], compute) @ _fp4_values_torch(b[0], b[1], compute).T
    return (product * a[2].to(compute)[:, None] * b[2].to(compute)[None, :]).to(dtype)


def _fp4_gemm(a: tuple[Tensor, ...], b: tuple[Tensor, ...], like: Tensor) -> Tensor:
    """a b^T (M, N) of two (codes, scales, global_scale) of equal width, in the type and place of like."""
    dtype = like.dtype
    if not _uses_kernel(like):
        return _fp4_gemm_torch(a, b, dtype)
    M, N, K = a[0].shape[0], b[0].shape[0], 2 * a[0].shape[1]
    c = torch.empty(M, N, dtype=dtype, device=like.device)
    native = _microscaled_native(like)
    config = _fp4_gemm_config(native, dtype)
    grid = (triton.cdiv(M, config["BM"]) * triton.cdiv(N, config["BN"]),)
    _microscaled_fp4_gemm_kernel[grid](
        a_ptr=a[0],
        a_scale_ptr=a[1],
        a_global_ptr=a[2],
        b_ptr=b[0],
        b_scale_ptr=b[1],
        b_global_ptr=b[2],
        c_ptr=c,
        M=M,
        N=N,
        K=K,
        A_PER_ROW=a[2].numel() > 1,
        B_PER_ROW=b[2].numel() > 1,
        NATIVE=native,
        **config,
    )
    return c


class _MicroscaledFP4Gemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, seed):
        if isinstance(weight, PackedFP4):
            packed, ctx.packed = (weight.codes, weight.scales, weight.global_scale), weight
            signs = weight.signs
        else:
            signs = fp4_signs(x.shape[1], x.device)
            packed, ctx.packed = _fp4_quantize(weight, signs, per_row=False), None
        ctx.seed = seed
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, None if ctx.packed is not None else weight)
        return _fp4_gemm(_fp4_quantize(x, signs, per_row=True), packed, x)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            # contraction along the outputs
            dense = weight if ctx.packed is None else dequantize_fp4(ctx.packed, dy.dtype)
            signs = fp4_signs(dy.shape[1], dy.device)
            dy_rows = _fp4_quantize(dy, signs, per_row=True, stochastic=True, seed=ctx.seed, stream=0)
            dx = _fp4_gemm(dy_rows, _fp4_quantize(dense.T, signs, per_row=False), dy)
        if ctx.needs_input_grad[1]:
            # contraction along the tokens
            signs = fp4_signs(dy.shape[0], dy.device)
            dy_columns = _fp4_quantize(dy.T, signs, per_row=True, stochastic=True, seed=ctx.seed, stream=1)
            dweight = _fp4_gemm(dy_columns, _fp4_quantize(x.T, signs, per_row=True), dy).to(weight.dtype)
        return dx, dweight, None


def microscaled_fp4_gemm(x: Tensor, weight: Tensor | PackedFP4, *, seed: int | Tensor = 0) -> Tensor:
    """Multiply x (..., in) by weight (out, in) transposed in FP4, both rotated and quantised: (..., out) in x's dtype.

    weight: a float tensor, quantised here, or a PackedFP4 (then without a gradient). "in" is a multiple of 128.
    Gradients are products of the same kind; the incoming gradient is rounded stochastically, driven by seed, whose
    noise has no other use: a number, or a 0-d int64 tensor on x's device that the kernels read (a recorded step draws
    new noise by it). Format and recipe: arXiv 2509.25149, here with blocks of 32.
    """
    _require_microscaled_input("x", x)
    _require_seed(seed)
    packed = isinstance(weight, PackedFP4)
    _require(
        len(weight.shape) == 2 and weight.shape[1] == x.shape[-1] and weight.shape[0] > 0,
        f"weight must have shape (out, {x.shape[-1]}), got {tuple(weight.shape)}",
    )
    _require(weight.device == x.device, f"weight must be on {x.device}, got {weight.device}")
    if not packed:
        _require_microscaled_input("weight", weight)
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] == 0:
        return x.new_zeros(*x.shape[:-1], weight.shape[0])
    return _MicroscaledFP4Gemm.apply(flat, weight, seed).view(*x.shape[:-1], weight.shape[0])


def _fp4_weight_only_torch(x: Tensor, packed: PackedFP4) -> Tensor:
    """Tiles of 8 rows, padded: a row's bits do not depend on its neighbours."""
    compute = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    weight = _fp4_values_torch(packed.codes, packed.scales, compute).T
    rows = x.shape[0]
    x = F.pad(x.to(compute), (0, 0, 0, -rows % _FP4_DECODE_ROWS_CPU))
    y = torch.cat([tile @ weight for tile in x.split(_FP4_DECODE_ROWS_CPU)])
    return y[:rows] * packed.global_scale.to(compute)


def _fp4_weight_only_config(dtype: torch.dtype) -> dict:
    if dtype == torch.bfloat16:
        return dict(BM=_FP4_DECODE_ROWS, BN=_FP4_DECODE_COLS, BK=128, DTYPE=tl.bfloat16, num_warps=4, num_stages=3)
    # exact float32 products spill 3 KB a thread at depth 128
    return dict(BM=_FP4_DECODE_ROWS, BN=_FP4_DECODE_COLS, BK=32, DTYPE=tl.float32, num_warps=4, num_stages=3)


def _fp4_weight_only(x: Tensor, packed: PackedFP4) -> Tensor:
    if not _uses_kernel(x):
        return _fp4_weight_only_torch(x, packed).to(x.dtype)
    M, K = x.shape
    N = packed.shape[0]
    tiles, blocks = triton.cdiv(N, _FP4_DECODE_COLS), K // _HADAMARD_BLOCK
    # a function of the weight's shape alone
    splits = min(8, blocks, max(1, _FP4_DECODE_PROGRAMS // tiles))
    partial = torch.empty(splits, M, N, dtype=torch.float32, device=x.device)
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    _fp4_weight_only_kernel[(triton.cdiv(M, _FP4_DECODE_ROWS), tiles, splits)](
        x_ptr=x,
        codes_ptr=packed.codes,
        scales_ptr=packed.scales,
        partial_ptr=partial,
        M=M,
        N=N,
        K=K,
        depth=triton.cdiv(blocks, splits) * _HADAMARD_BLOCK,
        **_fp4_weight_only_config(x.dtype),
    )
    _fp4_weight_only_sum_kernel[(triton.cdiv(M * N, 1024),)](
        partial_ptr=partial,
        global_ptr=packed.global_scale,
        y_ptr=y,
        size=M * N,
        N=N,
        SPLITS=splits,
        PER_ROW=packed.global_scale.numel() > 1,
        BLOCK=1024,
        num_warps=4,
    )
    return y


def fp4_weight_only_linear(x: Tensor, packed: PackedFP4) -> Tensor:
    """Multiply x (..., in), kept in its own type, by a packed weight (out, in) transposed; for decoding, no gradient.

    A row's result does not depend on the number of rows: tiles of 16 rows and a split of the contraction that
    depends on the weight's shape only, summed in a fixed order.
    """
    _require_microscaled_input("x", x)
    _require(
        len(packed.shape) == 2 and packed.shape[1] == x.shape[-1],
        f"packed weight must have shape (out, {x.shape[-1]}), got {packed.shape}",
    )
    _require(packed.device == x.device, f"packed weight must be on {x.device}, got {packed.device}")
    _require(not (torch.is_grad_enabled() and x.requires_grad), "x must not require a gradient, got requires_grad=True")
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] == 0:
        return x.new_zeros(*x.shape[:-1], packed.shape[0])
    flat = flat.contiguous() if packed.signs is None else _hadamard(flat, packed.signs, False)
    return _fp4_weight_only(flat, packed).view(*x.shape[:-1], packed.shape[0])


# ---------------------------------------------------------------------------
# Block-scaled 8-bit matrix product


@_jit_dynamic("M")
def _fp8_gemm_kernel(
    a_ptr,
    a_exponent_ptr,
    a_scale_ptr,
    b_ptr,
    b_exponent_ptr,
    b_scale_ptr,
    c_ptr,
    M,
    N,
    K,
    A_FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    EXACT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """c = (a 2^(ea - 127)) (b 2^(eb - 127))^T * scale_a * scale_b; a (M, K) in A_FORMAT, b (N, K) E4M3.

    NATIVE: the block-scaled instruction. Otherwise BK = 32 = one block: each slab's product is a fresh accumulator
    that is scaled in float32 and added, which also keeps the hardware's short 8-bit accumulation to 32 terms.
    EXACT (float32 inputs) multiplies in float32.
    """
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    pid = tl.program_id(0)
    first = pid // (8 * tiles_n) * 8
    group = tl.minimum(tiles_m - first, 8)
    i_m = first + pid % (8 * tiles_n) % group
    i_n = pid % (8 * tiles_n) // group
    o_m = i_m.to(tl.int64) * BM + tl.arange(0, BM)
    o_n = i_n.to(tl.int64) * BN + tl.arange(0, BN)
    m_m, m_n = o_m < M, o_n < N
    o_k = tl.arange(0, BK)
    p_a = a_ptr + o_m[:, None] * K + o_k[None, :]
    p_b = b_ptr + o_n[None, :] * K + o_k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    if NATIVE:
        o_e = tl.arange(0, BK // 32)
        p_ea = a_exponent_ptr + o_m[:, None] * (K // 32) + o_e[None, :]
        p_eb = b_exponent_ptr + o_n[:, None] * (K // 32) + o_e[None, :]
    else:
        p_ea = a_exponent_ptr + o_m * (K // 32)
        p_eb = b_exponent_ptr + o_n * (K // 32)
    for _ in range(0, K // BK):
        b_a = tl.load(p_a, mask=m_m[:, None], other=0.0)
        b_b = tl.load(p_b, mask=m_n[None, :], other=0.0)
        if NATIVE:
            e_a = tl.load(p_ea, mask=m_m[:, None], other=127)
            e_b = tl.load(p_eb, mask=m_n[:, None], other=127)
            acc = tl.dot_scaled(b_a, e_a, A_FORMAT, b_b, e_b, "e4m3", acc)
        else:
            s_a = (tl.load(p_ea, mask=m_m, other=127).to(tl.int32) << 23).to(tl.float32, bitcast=True)
            s_b = (tl.load(p_eb, mask=m_n, other=127).to(tl.int32) << 23).to(tl.float32, bitcast=True)
            if EXACT:
                slab = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), input_precision="ieee")
            else:
                slab = tl.dot(b_a, b_b)
            # one scale after the other: their product alone may leave float32's range
            acc += slab * s_a[:, None] * s_b[None, :]
        p_a += BK
        p_b += BK
        p_ea += BK // 32
        p_eb += BK // 32
    acc *= tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
    p_c = c_ptr + o_m[:, None] * N + o_n[None, :]
    tl.store(p_c, acc.to(c_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


def _fp8_gemm_config(native: bool, dtype: torch.dtype) -> dict:
    """Tiles by case; BK = 32 is the scale block where the instruction knows no scales."""
    if native:
        return dict(BM=128, BN=128, BK=128, num_warps=4, num_stages=3)
    if dtype == torch.bfloat16:
        # sm_90: 206 registers, no spill; 128 x 128 by 8 warps spills 152 bytes and loads each scale 32 times
        return dict(BM=64, BN=128, BK=32, num_warps=4, num_stages=4)
    return dict(BM=64, BN=64, BK=32, num_warps=4, num_stages=2)


def _fp8_values_torch(codes: Tensor, exponents: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """Code times block scale, without the tensor scale."""
    values = codes.view(_FP8_TORCH[format]).to(dtype).view(codes.shape[0], -1, _FP4_BLOCK)
    return (values * _exp2_torch(exponents.int() - 127, dtype)[:, :, None]).flatten(1)


def _fp8_gemm_torch(a: tuple[Tensor, ...], b: tuple[Tensor, ...], a_format: str, dtype: torch.dtype) -> Tensor:
    compute = torch.float32 if dtype == torch.bfloat16 else dtype
    a_values = _fp8_values_torch(a[0], a[1], a_format, compute)
    product = a_values @ _fp8_values_torch(b[0], b[1], "e4m3", compute).T
    return (product * (a[2] * b[2]).to(compute)).to(dtype)


def _fp8_gemm(a: tuple[Tensor, ...], b: tuple[Tensor, ...], a_format: str, like: Tensor) -> Tensor:
    """a b^T (M, N) of two (codes, block exponents, tensor scale) of equal width; b is E4M3."""
    dtype = like.dtype
    if not _uses_kernel(like):
        return _fp8_gemm_torch(a, b, a_format, dtype)
    M, N, K = a[0].shape[0], b[0].shape[0], a[0].shape[1]
    c = torch.empty(M, N, dtype=dtype, device=like.device)
    native = _microscaled_native(like)
    config = _fp8_gemm_config(native, dtype)
    grid = (triton.cdiv(M, config["BM"]) * triton.cdiv(N, config["BN"]),)
    _fp8_gemm_kernel[grid](
        a_ptr=a[0].view(_FP8_TORCH[a_format]),
        a_exponent_ptr=a[1],
        a_scale_ptr=a[2],
        b_ptr=b[0].view(torch.float8_e4m3fn),
        b_exponent_ptr=b[1],
        b_scale_ptr=b[2],
        c_ptr=c,
        M=M,
        N=N,
        K=K,
        A_FORMAT=a_format,
        NATIVE=native,
        EXACT=dtype == torch.float32,
        **config,
    )
    return c


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, scales):
        x_scale, weight_scale = scales.scale("input"), scales.scale("weight")
        x_codes, x_exponents, x_amax = _fp8_quantize(x, x_scale, "e4m3")
        weight_codes, weight_exponents, weight_amax = _fp8_quantize(weight, weight_scale, "e4m3")
        if scales.training:
            scales.update("input", x_amax)
            scales.update("weight", weight_amax)
        ctx.scales = scales
        ctx.save_for_backward(
            x if ctx.needs_input_grad[1] else None,
            weight,
            x_scale,
            weight_scale,
        )
        a, b = (x_codes, x_exponents, x_scale), (weight_codes, weight_exponents, weight_scale)
        return _fp8_gemm(a, b, "e4m3", x)

    @staticmethod
    def backward(ctx, dy):
        x, weight, x_scale, weight_scale = ctx.saved_tensors
        scale = ctx.scales.scale("gradient")
        dx = dweight = amax = None
        if ctx.needs_input_grad[0]:
            codes, exponents, amax = _fp8_quantize(dy, scale, "e5m2")
            b = (*_fp8_quantize(weight.T, weight_scale, "e4m3")[:2], weight_scale)
            dx = _fp8_gemm((codes, exponents, scale), b, "e5m2", dy)
        if ctx.needs_input_grad[1]:
            codes, exponents, amax = _fp8_quantize(dy.T, scale, "e5m2")
            b = (*_fp8_quantize(x.T, x_scale, "e4m3")[:2], x_scale)
            dweight = _fp8_gemm((codes, exponents, scale), b, "e5m2", dy).to(weight.dtype)
        if ctx.scales.training and amax is not None:
            ctx.scales.update("gradient", amax)
        return dx, dweight, None


def fp8_linear(x: Tensor, weight: Tensor, scales: DelayedScale) -> Tensor:
    """Multiply x (..., in) by weight (out, in) transposed in 8 bits, (..., out) in x's dtype; "in" a multiple of 128.

    Forward E4M3 by E4M3, gradients E5M2 by E4M3; a power-of-two scale per 32 values along each contraction under
    the delayed tensor scales, whose history moves only while scales.training is set. Formats: arXiv 2209.05433.
    """
    _require_microscaled_input("x", x)
    _require(
        weight.dim() == 2 and weight.shape[1] == x.shape[-1] and weight.shape[0] > 0,
        f"weight must have shape (out, {x.shape[-1]}), got {tuple(weight.shape)}",
    )
    _require_microscaled_input("weight", weight)
    _require(isinstance(scales, DelayedScale), f"scales must be a DelayedScale, got {type(scales).__name__}")
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] == 0:
        return x.new_zeros(*x.shape[:-1], weight.shape[0])
    return _FP8Linear.apply(flat, weight, scales).view(*x.shape[:-1], weight.shape[0])


# ---------------------------------------------------------------------------
# Noise of choices

_NOISE_GOLDEN, _NOISE_MIX_1, _NOISE_MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@_jit
def _noise_mixed(bits, MIX_1: tl.constexpr = _NOISE_MIX_1, MIX_2: tl.constexpr = _NOISE_MIX_2):
    bits = (bits ^ (bits >> 30)) * MIX_1
    bits = (bits ^ (bits >> 27)) * MIX_2
    return bits ^ (bits >> 31)


@_jit
def _gumbel_noise_kernel(p_seed, p_position, p_out, W, BLOCK: tl.constexpr, GOLDEN: tl.constexpr = _NOISE_GOLDEN):
    """BLOCK values of one (seed, position)."""
    i_n = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # as vectors, whose products wrap without a warning in the interpreter too
    seed = tl.load(p_seed + i_n + 0 * o).to(tl.uint64)
    position = tl.load(p_position + i_n + 0 * o).to(tl.uint64)
    start = _noise_mixed((_noise_mixed(seed + GOLDEN) ^ position) + GOLDEN)
    bits = _noise_mixed((o + 1).to(tl.uint64) * GOLDEN + start)
    uniform = ((bits >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    tl.store(p_out + i_n * W + o, -tl.log(-tl.log(uniform)), mask=o < W)


def _gumbel_noise_launch(seed: Tensor, position: Tensor, size: int) -> Tensor:
    out = torch.empty(len(seed), size, dtype=torch.float64, device=seed.device)
    _gumbel_noise_kernel[(triton.cdiv(size, 1024), len(seed))](seed, position, out, size, BLOCK=1024, num_warps=4)
    return out


def _noise_mixed_torch(bits: Tensor, add: int = 0) -> Tensor:
    bits = bits + add
    bits = (bits ^ _noise_shifted_torch(bits, 30)) * wrapped_word(_NOISE_MIX_1)
    bits = (bits ^ _noise_shifted_torch(bits, 27)) * wrapped_word(_NOISE_MIX_2)
    return bits ^ _noise_shifted_torch(bits, 31)


def wrapped_word(word: int) -> int:
    """Return the int64 that has the lowest 64 bits of a number: a seed of any size, or an unsigned constant."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def _noise_shifted_torch(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)  # logical shift of int64


def _gumbel_noise_torch(seed: Tensor, position: Tensor, size: int) -> Tensor:
    golden = wrapped_word(_NOISE_GOLDEN)
    start = _noise_mixed_torch(_noise_mixed_torch(seed + golden) ^ position, golden)
    index = torch.arange(1, size + 1, dtype=torch.int64, device=start.device)
    bits = _noise_mixed_torch(index * golden + start[..., None])  # wraps modulo 2^64
    # 53 bits, centred in their cell, so that neither logarithm meets 0
    uniform = (_noise_shifted_torch(bits, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def gumbel_noise(
    seed: int | Tensor, position: int | Tensor, size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return standard Gumbel noise float64, a function of (seed, position, index) alone.

    seed, position: numbers, for (W,); or int64 tensors (B,), for (B, W). Counter-based: index i takes the i-th output
    of the 64-bit SplitMix generator (Steele, Lea, Flood, 2014) whose start is the mixed pair (seed, position), so
    nothing depends on what was drawn before. The bits are the same on any device, the logarithms to their last place.
    """
    seed, position = (
        x if isinstance(x, Tensor) else torch.tensor(wrapped_word(x), device=device) for x in (seed, position)
    )
    seed, position = torch.broadcast_tensors(seed, position)
    if not seed.is_cuda:
        return _gumbel_noise_torch(seed, position, size)
    rows = (x.reshape(-1).contiguous() for x in (seed, position))
    return _gumbel_noise_launch(*rows, size).view(*seed.shape, size)


# ---------------------------------------------------------------------------
# Layer primitives: the projection and the norm that every block is built from


def pack_weight(weight: Tensor, bits: int) -> PackedFP4 | PackedINT8:
    """Round a weight (out, in) to what decoding reads: rotated E2M1 codes (4 bits) or integers (8 bits)."""
    _require(bits in (4, 8), f"bits must be 4 or 8, got {bits}")
    if bits == 8:
        return quantize_int8(weight)
    return quantize_fp4(weight, signs=fp4_signs(weight.shape[1], weight.device))


def unpack_weight(packed: PackedFP4 | PackedINT8, dtype: torch.dtype) -> Tensor:
    """Return the weight that a packed one stands for."""
    if isinstance(packed, PackedINT8):
        return dequantize_int8(packed, dtype)
    return dequantize_fp4(packed, dtype)


class Projection(nn.Module):
    """Linear map x (..., d_in) -> (..., d_out) without bias; float32 master weight, product in x's type.

    precision: "wide" multiplies in x's own type, "fp8" and "fp4" quantise both operands in training (microscaled
    formats). Inference multiplies in x's type, by 4- or 8-bit weights after `pack`.
    `forward` serves sequences; `step` serves decoding, where a row's result must not depend on how many rows there
    are (fixed tiles, fixed split), so that drafts never change a token.
    """

    def __init__(self, d_in: int, d_out: int, precision: str = "wide") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.precision = precision
        self.delayed_scale = DelayedScale() if precision == "fp8" else None
        # drives the stochastic rounding of fp4 gradients; the training engine fills it anew each step
        seed = torch.zeros((), dtype=torch.int64) if precision == "fp4" else None
        self.register_buffer("rounding_seed", seed, persistent=False)
        self.packed: PackedFP4 | PackedINT8 | None = None

    @torch.no_grad()
    def pack(self, bits: int = 4) -> None:
        """Keep the weight as 4- or 8-bit codes alone, for inference: x stays wide (weight-only), in all of it."""
        self.take(pack_weight(self.weight, bits))

    def take(self, packed: PackedFP4 | PackedINT8) -> None:
        """Multiply by a packed weight from now on."""
        self.packed = packed
        self.weight.data = self.weight.data.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.packed, PackedINT8):
            return F.linear(x, dequantize_int8(self.packed, x.dtype))
        if self.packed is not None:
            return fp4_weight_only_linear(x, self.packed)
        if self.precision == "fp4" and self.training:
            return microscaled_fp4_gemm(x, self.weight, seed=self.rounding_seed)
        if self.precision == "fp8" and self.training:
            return fp8_linear(x, self.weight, self.delayed_scale)
        # the vendor's product: 688 TFLOP/s on one H200 at 8192 x 3584 x 11008; ours is for where it has none (fused
        # epilogues, quantised operands, fixed order)
        return F.linear(x, self.weight.to(x.dtype))

    def step(self, x: Tensor) -> Tensor:
        """Map x (B, N, d_in), B * N <= 128, each row the same bits in any company."""
        if isinstance(self.packed, PackedINT8):
            return int8_weight_only_linear(x, self.packed)
        if self.packed is not None:
            return fp4_weight_only_linear(x, self.packed)
        return linear_product(x, self.weight.to(x.dtype))


@torch.no_grad()
def step_together(x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
    """Projection.step of up to three projections of one x, in one launch where their weights are of one kind."""
    packed = [p.packed for p in projections]
    if all(isinstance(p, PackedINT8) for p in packed):
        return _int8_products(x, packed)
    if not any(packed):
        return linear_products(x, [p.weight.to(x.dtype) for p in projections])
    return [p.step(x) for p in projections]


class RootMeanSquareNorm(nn.Module):
    """Root-mean-square norm whose gain is stored as an offset: gain = start * (1 + offset), offset starts at 0.

    Weight decay then pulls the gain home to `start` and not to zero.
    """

    def __init__(self, dim: int, eps: float, start: float = 1.0) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        return fused_rmsnorm(x, self.offset, self.eps, start=self.start)
