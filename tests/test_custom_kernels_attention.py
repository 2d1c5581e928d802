"""custom_kernels.py, attention sections: parity with float64, gradients, edges, interpreter, cross-compilation."""

import os
import re
import subprocess
import sys

import pytest
import torch
from helpers import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import hadamard_reference, paged_attention_reference, rotary_reference, windowed_attention_reference

import custom_kernels
from custom_kernels import (
    cache_append,
    cache_prefix,
    dequantize_cache,
    fake_quantize_cache,
    hadamard_rotate,
    paged_attention,
    paged_cache,
    quantize_cache,
    rotary,
    windowed_attention,
)

ATTENTION_NAMES = ("q", "k", "v", "q_far", "k_far", "anchor_k", "anchor_v")


def attention_behind_nan(x):
    """The same values as the leading view of a larger buffer that is NaN behind them."""
    room = torch.full((x.numel() + 4096,), float("nan"), dtype=x.dtype, device=x.device)
    room[: x.numel()] = x.detach().flatten()
    return room[: x.numel()].view(x.shape)


def attention_doc_start(B, T, cuts, first=0):
    """(B, T) int32: documents start at `first` and at the cuts; row b shifts the cuts by b."""
    ds = torch.full((B, T), first, dtype=torch.int32)
    for b in range(B):
        for cut in sorted(cuts):
            if 0 <= cut + b < T:
                ds[b, cut + b:] = cut + b
    return ds


def attention_inputs(B, T, P, H, G, K, A, carried, seed=0):
    """float64 leaves in the order of ATTENTION_NAMES (without anchors where nothing is carried), and dy."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, T, H, K), (B, P + T, G, K), (B, P + T, G, K), (B, T, H, K), (B, T, G, K)]
    shapes += [(B, A, G, K)] * 2 if carried else []
    leaves = [torch.randn(*s, dtype=torch.float64, generator=g) for s in shapes]
    # a quarter: key gradients are sums over many queries, and float32 rounding is judged against 1e-6
    return leaves, torch.randn(B, T, H, K, dtype=torch.float64, generator=g) / 4


def attention_run(op, leaves, dy, rule, dtype, device, wrap=lambda x: x):
    """Output and gradients of op at dtype; leaves round to dtype first. Unused gradients are zeros."""
    leaves = [wrap(x.to(dtype).to(device)).requires_grad_() for x in leaves]
    carried = dict(zip(ATTENTION_NAMES[5:], leaves[5:], strict=False))
    rule = {k: v.to(device) if torch.is_tensor(v) else v for k, v in rule.items()}
    y = op(*leaves[:5], **carried, **rule)
    grads = torch.autograd.grad(y, leaves, dy.to(dtype).to(device), allow_unused=True)
    return [y.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


# B, T, P, H, G, K, window, anchors, document cuts, first document's start
ATTENTION_CASES = {
    "one-token": (1, 1, 0, 2, 1, 32, 4, 2, (), 0),
    "tiny-window": (2, 12, 0, 2, 1, 32, 4, 2, (), 0),
    "docs-in-a-tile": (2, 65, 0, 4, 2, 32, 4, 2, (1, 2, 9, 20, 21, 40, 63), 0),
    "prefix-old-anchors": (2, 63, 5, 2, 2, 64, 4, 2, (30,), -9),
    "anchors-straddle": (1, 64, 7, 4, 1, 32, 8, 5, (33,), -3),
    "long-document": (1, 129, 40, 2, 1, 128, 40, 20, (), -100),
    "short-prefix": (1, 33, 3, 2, 2, 32, 16, 8, (), -3),
    "window-over-T": (1, 127, 0, 2, 1, 64, 500, 16, (50,), 0),
    "no-anchors": (1, 130, 16, 2, 2, 32, 17, 0, (70,), -40),
    "group-of-seven": (1, 66, 0, 7, 1, 32, 20, 17, (3,), 0),
}
ATTENTION_GPU_CASES = ATTENTION_CASES | {
    "tiles": (2, 257, 64, 4, 2, 128, 64, 16, (64, 128, 190), -64),
    "many-anchors": (1, 400, 0, 2, 1, 128, 130, 100, (), 0),
    "items": (2, 2500, 100, 2, 1, 64, 100, 16, (60, 1300), -500),
    "full-heads": (1, 513, 128, 28, 4, 128, 128, 64, (200,), -300),
    # tiles in which every pair is visible, at every kernel's width: between documents, window's edge and diagonal
    "full-tiles": (2, 1300, 150, 4, 2, 128, 700, 64, (333,), -150),
}
# RMS error ratio: float32 measured 2e-7..6e-7 (margin 8x)
ATTENTION_BOUND = {torch.float32: 5e-6, torch.bfloat16: 8e-3}


def attention_low(q, k, v, q_far, k_far, *, anchor_k=None, anchor_v=None, doc_start, window, anchors):
    """The dense form with every step rounded to the inputs' type: the low-precision run at the larger sizes."""
    T, K = q.shape[1], q.shape[3]
    return torch.cat([custom_kernels._attention_block_torch(
        m0, min(m0 + 256, T), q, k, v, q_far, k_far, anchor_k, anchor_v, None, None, doc_start, window, anchors,
        K**-0.5) for m0 in range(0, T, 256)], 1)


def attention_parity(case, dtype, device, wrap=attention_behind_nan):
    B, T, P, H, G, K, window, anchors, cuts, first = case
    leaves, dy = attention_inputs(B, T, P, H, G, K, max(anchors, 1), first < 0)
    # the truth sees the same rounded inputs
    leaves, dy = [x.to(dtype).double() for x in leaves], dy.to(dtype).double()
    rule = {"window": window, "anchors": anchors, "doc_start": attention_doc_start(B, T, cuts, first)}
    # the token loop is the truth; at the larger sizes the dense form, which the small ones hold to it
    small = B * T <= 130
    truth = attention_run(windowed_attention_reference if small else windowed_attention, leaves, dy, rule,
                          torch.float64, "cpu")
    low = attention_run(windowed_attention_reference if small else attention_low, leaves, dy, rule, dtype, "cpu")
    got = attention_run(windowed_attention, leaves, dy, rule, dtype, device, wrap)
    for name, a, b, c in zip(("y", *ATTENTION_NAMES), got, truth, low, strict=False):
        if b.abs().max() < 1e-12:
            # an input that nothing reads, or a softmax over one key: its gradient is rounding alone
            assert a.abs().max() < (1e-5 if dtype == torch.float32 else 5e-2), name
        else:
            assert_close(name, a.cpu(), b, c, rms_bound=ATTENTION_BOUND.get(dtype))


@pytest.mark.parametrize("case", ATTENTION_CASES.values(), ids=ATTENTION_CASES)
def test_attention_torch_parity(case):
    attention_parity(case, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", ATTENTION_GPU_CASES.values(), ids=ATTENTION_GPU_CASES)
def test_attention_kernel_parity(case, dtype):
    attention_parity(case, dtype, "cuda")


def attention_angles(T, K, offset=0):
    frequency = 5e6 ** -(torch.arange(K // 2, dtype=torch.float64) * 2 / K)
    angle = (torch.arange(T, dtype=torch.float64) + offset)[:, None] * frequency
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("cut", [(5,), (1, 2, 3), (7, 20, 33), (16, 32), (39,)], ids=str)
def test_attention_segments_equal_whole(cut):
    """Any split with carried window and anchors gives the whole row's outputs and gradients (R19)."""
    T, H, G, K, window, anchors = 40, 2, 1, 32, 6, 3
    leaves, dy = attention_inputs(1, T, 0, H, G, K, anchors, False)
    ds = attention_doc_start(1, T, (11,))
    whole = attention_run(windowed_attention, leaves, dy, {"window": window, "anchors": anchors, "doc_start": ds},
                          torch.float64, "cpu")

    def segmented(q, k, v, q_far, k_far, window, anchors, doc_start):
        out = []
        for lo, hi in zip((0, *cut), (*cut, T), strict=True):
            start = max(0, lo - window + 1)
            d = int(doc_start[0, lo])
            old = slice(d, min(d + anchors, lo))
            carried = {"anchor_k": k_far[:, old], "anchor_v": v[:, old]} if d < lo else {}
            out.append(windowed_attention(
                q[:, lo:hi], k[:, start:hi], v[:, start:hi], q_far[:, lo:hi], k_far[:, lo:hi], window=window,
                anchors=anchors, doc_start=(doc_start[:, lo:hi] - lo).contiguous(), **carried))
        return torch.cat(out, 1)

    parts = attention_run(segmented, leaves, dy, {"window": window, "anchors": anchors, "doc_start": ds},
                          torch.float64, "cpu")
    for name, a, b in zip(("y", *ATTENTION_NAMES), parts, whole, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, msg=name)


@settings(max_examples=12, deadline=None)
@given(T=st.integers(1, 24), window=st.integers(1, 30), anchors=st.integers(0, 6), first=st.integers(-12, 0),
       cuts=st.lists(st.integers(0, 23), max_size=4), seed=st.integers(0, 99))
def test_attention_any_documents(T, window, anchors, first, cuts, seed):
    leaves, dy = attention_inputs(1, T, 12, 2, 1, 32, max(anchors, 1), first < 0, seed)
    rule = {"window": window, "anchors": anchors, "doc_start": attention_doc_start(1, T, cuts, first)}
    got = attention_run(windowed_attention, leaves, dy, rule, torch.float64, "cpu")
    truth = attention_run(windowed_attention_reference, leaves, dy, rule, torch.float64, "cpu")
    for name, a, b in zip(("y", *ATTENTION_NAMES), got, truth, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11, msg=name)


def test_attention_finite_differences():
    leaves, dy = attention_inputs(1, 30, 4, 2, 1, 32, 3, True)
    rule = {"window": 5, "anchors": 3, "doc_start": attention_doc_start(1, 30, (17,), -7)}
    grads = attention_run(windowed_attention, leaves, dy, rule, torch.float64, "cpu")[1:]

    def loss(step, directions):
        moved = [x + step * d for x, d in zip(leaves, directions, strict=True)]
        y = windowed_attention(*moved[:5], anchor_k=moved[5], anchor_v=moved[6], **rule)
        return (y * dy).sum().item()

    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        directions = [torch.randn(x.shape, dtype=x.dtype, generator=g) for x in leaves]
        slope = (loss(1e-5, directions) - loss(-1e-5, directions)) / 2e-5
        exact = sum((a * d).sum().item() for a, d in zip(grads, directions, strict=True))
        assert abs(slope - exact) < 1e-7 * max(1.0, abs(exact)), (slope, exact)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_no_leak_between_documents(device):
    """The second document's loss moves nothing of the first one: gradients there are exactly zero."""
    T, cut = 90, 37
    leaves, dy = attention_inputs(1, T, 6, 2, 1, 32, 4, True)
    dy[:, :cut] = 0
    rule = {"window": 6, "anchors": 4, "doc_start": attention_doc_start(1, T, (cut,), -20)}
    grads = attention_run(windowed_attention, leaves, dy, rule, torch.float32, device)[1:]
    for name, g in zip(ATTENTION_NAMES, grads, strict=True):
        before = g if name.startswith("anchor") else g[:, : g.shape[1] - T + cut]
        assert (before == 0).all(), name
        assert name.startswith("anchor") or (g != 0).any(), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_repeats_bitwise(device):
    leaves, dy = attention_inputs(1, 200, 20, 4, 2, 64, 8, True)
    rule = {"window": 20, "anchors": 8, "doc_start": attention_doc_start(1, 200, (60,), -50)}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    first = attention_run(windowed_attention, leaves, dy, rule, dtype, device)
    for _ in range(20 if device == "cuda" else 2):
        again = attention_run(windowed_attention, leaves, dy, rule, dtype, device)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def attention_quantised_parity(dtype, device):
    """Prefill reads the quantised rows exactly for pairs two pages apart (R15), anchors excepted."""
    B, T, P, H, G, K, window, anchors = 1, 70, 150, 2, 1, 32, 151, 5
    leaves, _ = attention_inputs(B, T, P, H, G, K, anchors, True)
    quants = [torch.randn(leaves[1].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(s))
              for s in (8, 9)]
    for cuts, first in (((), -150), ((), -1000), ((40,), -139)):
        rule = {"window": window, "anchors": anchors, "doc_start": attention_doc_start(B, T, cuts, first)}

        def run(op, kind, where, rule=rule):
            x = [t.to(dtype).to(kind).to(where) for t in (*leaves, *quants)]
            rest = dict(rule, doc_start=rule["doc_start"].to(where))
            return op(*x[:5], anchor_k=x[5], anchor_v=x[6], k_quant=x[7], v_quant=x[8], **rest)

        assert_close("y", run(windowed_attention, dtype, device).cpu(),
                     run(windowed_attention_reference, torch.float64, "cpu"),
                     run(windowed_attention_reference, dtype, "cpu"), rms_bound=ATTENTION_BOUND.get(dtype))


def test_attention_quantised_reads_torch():
    attention_quantised_parity(torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_attention_quantised_reads_kernel(dtype):
    attention_quantised_parity(dtype, "cuda")


@pytest.mark.gpu
def test_attention_million_token_offsets():
    """B015: more than 2^31 elements. The last 300 queries equal a segment with carried window and anchors."""
    T, H, G, K, window, anchors, tail = 700_001, 28, 4, 128, 512, 64, 300
    g = torch.Generator("cuda").manual_seed(0)

    def rows(heads, n=T):
        return torch.randn(1, n, heads, K, dtype=torch.bfloat16, device="cuda", generator=g).requires_grad_()

    q, k, v, q_far, k_far = rows(H), rows(G), rows(G), rows(H), rows(G)
    assert q.numel() > 2**31
    y = windowed_attention(q, k, v, q_far, k_far, window=window, anchors=anchors)
    dy = torch.zeros_like(y)
    dy[:, -tail:] = torch.randn(1, tail, H, K, dtype=torch.bfloat16, device="cuda", generator=g)
    got = torch.autograd.grad(y, (q, k, v, q_far, k_far), dy)
    with torch.no_grad():
        part = [x[:, -n:].detach().clone().requires_grad_() for x, n in (
            (q, tail), (k, tail + window), (v, tail + window), (q_far, tail), (k_far, tail))]
        carried = [x[:, :anchors].detach().clone().requires_grad_() for x in (k_far, v)]
    ds = torch.full((1, tail), tail - T, dtype=torch.int32, device="cuda")
    short = windowed_attention(*part, window=window, anchors=anchors, doc_start=ds, anchor_k=carried[0],
                               anchor_v=carried[1])
    want = torch.autograd.grad(short, (*part, *carried), dy[:, -tail:].contiguous())
    torch.testing.assert_close(y[:, -tail:], short, rtol=2e-2, atol=2e-3)
    for a, b in zip(got, want[:5], strict=True):
        torch.testing.assert_close(a[:, -b.shape[1]:], b, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(got[4][:, :anchors], want[5], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(got[2][:, :anchors], want[6], rtol=2e-2, atol=2e-3)


def test_attention_far_items_cover_every_far_query_once():
    for T, window, chunk, cuts, first in ((50, 4, 16, (3, 20, 21), 0), (50, 4, 16, (), -30), (7, 9, 4, (), 0),
                                          (40, 1, 8, (2, 4, 6, 8, 30), -1)):
        ds = attention_doc_start(2, T, cuts, first)
        items, slots, slot_items = custom_kernels._attention_far_items(ds, window, chunk)
        for b in range(2):
            far = {i for i in range(T) if i - int(ds[b, i]) >= window}
            seen = []
            for u, start in enumerate(slots[b].tolist()):
                for w in range(slot_items[b, u], slot_items[b, u + 1]):
                    lo = int(items[b, w])
                    hi = min(int(items[b, w + 1]), (lo // chunk + 1) * chunk)
                    assert ds[b, lo] == ds[b, start]
                    seen += [i for i in range(lo, hi) if i in far and ds[b, i] == ds[b, lo]]
            assert sorted(seen) == sorted(far) and len(set(seen)) == len(seen)


@pytest.mark.parametrize("change, words", [
    ({"k": (1, 3, 1, 32)}, "P + T"), ({"v": (1, 9, 1, 32)}, "v must"), ({"q_far": (1, 8, 1, 32)}, "q_far must"),
    ({"k_far": (1, 9, 1, 32)}, "k_far must"), ({"window": 0}, "window"), ({"anchors": -1}, "anchors"),
    ({"k": (1, 9, 1, 32), "v": (1, 9, 1, 32)}, "doc_start is required"),
    ({"doc_start": (1, 8)}, "int32"), ({"q": (1, 8, 2, 48)}, "key dimension"),
], ids=str)
def test_attention_refuses(change, words):
    shapes = {"q": (1, 8, 2, 32), "k": (1, 8, 1, 32), "v": (1, 8, 1, 32), "q_far": (1, 8, 2, 32),
              "k_far": (1, 8, 1, 32), "window": 4, "anchors": 2} | change
    args = {name: torch.zeros(s) if isinstance(s, tuple) else s for name, s in shapes.items()}
    with pytest.raises(ValueError, match=re.escape(words)):
        windowed_attention(args.pop("q"), args.pop("k"), args.pop("v"), args.pop("q_far"), args.pop("k_far"), **args)


def rotary_parity(dtype, device):
    for B, T, H, K in ((1, 1, 1, 32), (2, 63, 3, 64), (1, 129, 2, 128)):
        g = torch.Generator().manual_seed(T)
        x, dy = (torch.randn(B, T, H, K, dtype=torch.float64, generator=g).to(dtype) for _ in range(2))
        for per_row in (False, True):
            cos, sin = attention_angles(T, K)
            if per_row:
                cos, sin = torch.stack([cos] * B).contiguous(), torch.stack([sin] * B)
                cos, sin = cos.roll(1, 1), sin.roll(1, 1)
            cos, sin = cos.float(), sin.float()

            def run(op, kind, where, wrap=lambda t: t, x=x, dy=dy, cos=cos, sin=sin):
                leaf = wrap(x.to(kind).to(where)).requires_grad_()
                y = op(leaf, wrap(cos.to(where)), wrap(sin.to(where)))
                return y.detach().cpu(), torch.autograd.grad(y, leaf, dy.to(kind).to(where))[0].cpu()

            got = run(rotary, dtype, device, attention_behind_nan)
            for name, a, b, c in zip(("y", "dx"), got, run(rotary_reference, torch.float64, "cpu"),
                                     run(rotary_reference, dtype, "cpu"), strict=True):
                assert_close(name, a, b, c)


def test_rotary_torch_parity():
    rotary_parity(torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rotary_kernel_parity(dtype):
    rotary_parity(dtype, "cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rotary_score_depends_on_distance_only(device):
    """B029: the scores at (p + 1, p) agree for p = 0 and p = 1,048,574 with tables built in float64."""
    q, k = (torch.randn(1, 1, 1, 128, generator=torch.Generator().manual_seed(s)).to(device) for s in (0, 1))
    scores = []
    for p in (0, 1_048_574):
        cos, sin = (t.float().to(device) for t in attention_angles(2, 128, offset=p))
        scores.append((rotary(q, cos[1:], sin[1:]) * rotary(k, cos[:1], sin[:1])).sum().item())
    assert abs(scores[0] - scores[1]) < 1e-3


@pytest.mark.parametrize("K", [32, 64, 128])
def test_hadamard_is_the_dense_product_and_its_own_inverse(K):
    x = torch.randn(3, 5, K, dtype=torch.float64, generator=torch.Generator().manual_seed(K))
    torch.testing.assert_close(hadamard_rotate(x), hadamard_reference(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hadamard_rotate(hadamard_rotate(x)), x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bits", [4, 8])
def test_cache_codes_are_within_half_a_step(bits, device):
    """B115: constant, zero, tiny and ordinary rows; every scale is finite and positive."""
    g = torch.Generator().manual_seed(bits)
    x = torch.randn(7, 64, generator=g)
    x[0], x[1], x[2], x[3], x[4] = 0.0, 3.0, x[2] * 1e-6, 1e-42, x[4] * 1e30
    x[5] = torch.where(torch.arange(64) % 64 == 9, 100.0, x[5])
    x = x.to(device)
    codes, scale = quantize_cache(x, bits)
    assert torch.isfinite(scale).all() and (scale > 0).all() and scale.dtype == torch.float32
    assert codes.shape[-1] == (64 if bits == 8 else 32) and scale.shape[-1] == (1 if bits == 8 else 2)
    back = dequantize_cache(codes, scale, bits, torch.float32)
    step = scale.repeat_interleave(64 // scale.shape[-1], -1)
    assert ((back - x).abs() <= step * 0.50001).all()
    assert (back[0] == 0).all()
    torch.testing.assert_close(back[1], x[1], rtol=1e-6, atol=0)
    # a row's codes do not depend on its neighbours
    assert torch.equal(quantize_cache(x[5:6], bits)[0], codes[5:6])


def counted_path(counts, device="cpu"):
    """The first so many rows of each sequence, as a path."""
    step = torch.arange(max(counts), dtype=torch.int32)
    return torch.where(step < torch.tensor(counts)[:, None], step, -1).to(device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("scope", ["window", "full"])
def test_cache_append_does_not_depend_on_the_cuts(bits, scope, device):
    B, L, G, K = 2, 330, 2, 32
    g = torch.Generator().manual_seed(0)
    k, v, raw = (torch.randn(B, L, G, K, generator=g).to(device) for _ in range(3))
    stored = []
    for cuts in ([330], [1] * 10 + [320], [63, 1, 1, 200, 65], [100, 3, 3, 3, 221]):
        cache = paged_cache(B, G, K, window=70, anchors=5, scope=scope, bits=bits, max_length=400,
                            dtype=torch.float32, device=device)
        at = 0
        for n in cuts:
            rows = slice(at, at + n)
            given, path = [x[:, rows] for x in (k, v, raw)], None
            if n == 3:
                # an accepted path of three among five nodes, in another order: the rest must leave no trace
                given = [x[:, [at + 4, at, at + 3, at + 1, at + 2]] for x in (k, v, raw)]
                path = torch.tensor([[1, 3, 4, -1]] * B, dtype=torch.int32, device=device)
            cache_append(cache, *given, path=path)
            at += n
        assert cache.length.tolist() == [L, L]
        stored.append(cache)
    for other in stored[1:]:
        for name, tensor in vars(stored[0]).items():
            assert not torch.is_tensor(tensor) or torch.equal(tensor, getattr(other, name)), name
    k_full, v_full, k_quant, v_quant = cache_prefix(stored[0], 69)
    assert torch.equal(k_full, k[:, -69:]) and torch.equal(v_full, v[:, -69:])
    if bits == 16:
        assert torch.equal(k_quant, k[:, -69:]) and torch.equal(v_quant, v[:, -69:])
    else:
        assert torch.equal(k_quant, fake_quantize_cache(k, bits, rotated=bits == 4)[:, -69:])
        assert torch.equal(v_quant, fake_quantize_cache(v, bits, rotated=False)[:, -69:])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_cache_append_of_unequal_counts(device):
    k, v, raw = (torch.randn(2, 6, 1, 32, generator=torch.Generator().manual_seed(s)).to(device) for s in range(3))
    both = paged_cache(2, 1, 32, window=8, anchors=2, scope="window", bits=8, max_length=64, dtype=torch.float32,
                       device=device)
    cache_append(both, k, v, raw, path=counted_path([2, 5], device))
    assert both.length.tolist() == [2, 5]
    for b, n in ((0, 2), (1, 5)):
        alone = paged_cache(1, 1, 32, window=8, anchors=2, scope="window", bits=8, max_length=64,
                            dtype=torch.float32, device=device)
        cache_append(alone, k[b:b + 1, :n], v[b:b + 1, :n], raw[b:b + 1, :n])
        assert torch.equal(alone.recent_k[0], both.recent_k[b]) and torch.equal(alone.anchor_k[0], both.anchor_k[b])
        assert torch.equal(alone.key_codes[alone.page_table[0].long()], both.key_codes[both.page_table[b].long()])


PAGED_PARENTS = (-1, 0, 0, 1, 1, 2, 2)


def paged_tree(parents):
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    depth = []
    for n in range(len(parents)):
        m = n
        while m >= 0:
            mask[n, m] = True
            m = parents[m]
        depth.append(int(mask[n].sum()) - 1)
    return mask, torch.tensor(depth, dtype=torch.int32)


def paged_tokens(L, N, H, G, K, dtype, seed=0):
    """k, v, raw_k (1, L + N, G, K), q, q_far (1, N, H, K)."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(1, L + N, G, K)] * 3 + [(1, N, H, K)] * 2
    return [torch.randn(*s, dtype=torch.float64, generator=g).to(dtype) for s in shapes]


def paged_filled(k, v, raw, L, window, anchors, scope, bits, device, shuffle=False):
    """A cache that holds the first L tokens; other pages, and those behind L, are NaN or 77."""
    G, K = k.shape[2:]
    cache = paged_cache(1, G, K, window=window, anchors=anchors, scope=scope, bits=bits, max_length=640,
                        dtype=k.dtype, device=device)
    R = cache.page_table.shape[1]
    for name in ("key_codes", "value_codes", "key_scale", "value_scale", "recent_k", "recent_v", "anchor_near",
                 "anchor_k", "anchor_v"):
        tensor = getattr(cache, name)
        if tensor is not None and name.startswith(("key", "value")) and shuffle:
            tensor = torch.cat([tensor, tensor, tensor])
            setattr(cache, name, tensor)
        if tensor is not None:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
    if shuffle:
        order = torch.randperm(3 * R, generator=torch.Generator().manual_seed(1))[:R] + 1
        cache.page_table.copy_(order.view(1, R).to(torch.int32))
    if L > 0:
        cache_append(cache, *(x[:, :L].to(device) for x in (k, v, raw)))
    return cache


# committed, window, anchors, scope, bits, group
PAGED_CASES = [
    (0, 16, 2, "window", 8, 2), (1, 16, 2, "window", 16, 1), (63, 128, 16, "window", 8, 2),
    (64, 128, 16, "window", 4, 2), (200, 128, 16, "window", 8, 3), (300, 70, 5, "window", 4, 1),
    (127, 9, 2, "window", 8, 2), (400, 300, 70, "window", 4, 2), (530, 300, 0, "window", 16, 7),
    (300, 128, 16, "full", 8, 2), (510, 128, 16, "full", 4, 7),
]
PAGED_BOUND = {torch.float32: 5e-6, torch.bfloat16: 1e-2}


def paged_run(L, window, anchors, scope, bits, group, dtype, device):
    H, G, K, N = 2 * group, 2, 64, len(PAGED_PARENTS)
    k, v, raw, q, q_far = paged_tokens(L, N, H, G, K, dtype)
    tree, depth = paged_tree(PAGED_PARENTS)
    cache = paged_filled(k, v, raw, L, window, anchors, scope, bits, device)
    y = paged_attention(*(x.to(device) for x in (q, q_far)), cache, k[:, L:].to(device), v[:, L:].to(device),
                        tree.to(device), (depth + L).to(device), window=window, anchors=anchors, scope=scope)
    quant = [x if bits == 16 else fake_quantize_cache(x, bits, rotated=t) for x, t in ((k, bits == 4), (v, False))]
    rule = {"window": window, "anchors": anchors, "scope": scope}

    def reference(kind):
        return paged_attention_reference(*(x[0].to(kind) for x in (q, q_far, k, v, raw, *quant)), PAGED_PARENTS, L,
                                         **rule)

    assert_close("y", y[0].cpu(), reference(torch.float64), reference(dtype), rms_bound=PAGED_BOUND[dtype])


@pytest.mark.parametrize("case", PAGED_CASES, ids=str)
def test_paged_torch_parity(case):
    paged_run(*case, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", PAGED_CASES, ids=str)
def test_paged_kernel_parity(case, dtype):
    paged_run(*case, dtype, "cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", PAGED_CASES, ids=str)
def test_paged_nodes_are_bitwise_the_plain_steps(case, device):
    """R17: a node's bits do not change with its neighbours, with what is committed of its path, or with the pages."""
    L, window, anchors, scope, bits, group = case
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32, torch.float64):
        N = len(PAGED_PARENTS)
        k, v, raw, q, q_far = (x.to(device) for x in paged_tokens(L, N, 2 * group, 2, 32, dtype))
        tree, depth = (x.to(device) for x in paged_tree(PAGED_PARENTS))
        rule = {"window": window, "anchors": anchors, "scope": scope}
        cache = paged_filled(k, v, raw, L, window, anchors, scope, bits, device)
        y = paged_attention(q, q_far, cache, k[:, L:], v[:, L:], tree, depth + L, **rule)
        for n in range(N):
            path = [L + m for m in range(N) if tree[n, m] and m != n]
            plain = paged_filled(k, v, raw, L, window, anchors, scope, bits, device, shuffle=True)
            for row in path:
                cache_append(plain, k[:, row:row + 1], v[:, row:row + 1], raw[:, row:row + 1])
            one = paged_attention(q[:, n:n + 1], q_far[:, n:n + 1], plain, k[:, L + n:L + n + 1],
                                  v[:, L + n:L + n + 1], torch.ones(1, 1, dtype=torch.bool, device=device),
                                  depth[n:n + 1] + L, **rule)
            assert torch.equal(one[:, 0], y[:, n]), (n, dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_paged_sequences_of_unequal_length(device):
    """A batch of two sequences of 90 and 210 tokens equals each alone, bit for bit."""
    k, v, raw, q, q_far = (x.to(device) for x in paged_tokens(211, 1, 4, 2, 32, torch.float32))
    rule = {"window": 70, "anchors": 3, "scope": "window"}
    one = torch.ones(1, 1, dtype=torch.bool, device=device)
    alone, lengths = [], torch.tensor([90, 210], dtype=torch.int32, device=device)
    both = paged_cache(2, 2, 32, window=70, anchors=3, scope="window", bits=8, max_length=256, dtype=torch.float32,
                       device=device)
    cache_append(both, *(x[:, :210].expand(2, -1, -1, -1) for x in (k, v, raw)), path=counted_path([90, 210], device))
    for L in (90, 210):
        cache = paged_filled(k, v, raw, L, 70, 3, "window", 8, device)
        alone.append(paged_attention(q, q_far, cache, k[:, 211:], v[:, 211:], one, cache.length, **rule))
    twice = [x.expand(2, -1, -1, -1) for x in (q, q_far)]
    y = paged_attention(*twice, both, k[:, 211:].expand(2, -1, -1, -1), v[:, 211:].expand(2, -1, -1, -1), one,
                        lengths[:, None], **rule)
    assert torch.equal(y, torch.cat(alone))


@pytest.mark.parametrize("bits", [4, 8])
def test_paged_decode_equals_prefill(bits):
    """The paged step reads what windowed_attention reads of the quantised copies."""
    L, window, anchors = 300, 190, 5
    k, v, raw, q, q_far = paged_tokens(L, 1, 4, 2, 64, torch.float64)
    cache = paged_filled(k, v, raw, L, window, anchors, "window", bits, "cpu")
    y = paged_attention(q, q_far, cache, k[:, L:], v[:, L:], torch.ones(1, 1, dtype=torch.bool),
                        torch.tensor([L], dtype=torch.int32), window=window, anchors=anchors, scope="window")
    k_old, v_old, k_quant, v_quant = cache_prefix(cache, window)
    new = slice(L, L + 1)
    want = windowed_attention(
        q, torch.cat([k_old, k[:, new]], 1), torch.cat([v_old, v[:, new]], 1), q_far, raw[:, new], window=window,
        anchors=anchors, doc_start=torch.full((1, 1), -L, dtype=torch.int32), anchor_k=cache.anchor_k,
        anchor_v=cache.anchor_v, k_quant=torch.cat([k_quant, k[:, new]], 1), v_quant=torch.cat([v_quant, v[:, new]], 1))
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_paged_and_windowed_see_the_same_keys(device):
    """B108: W = 4, two anchors, T = 12, one-hot values: one set of keys in train, segments, decode and verify."""
    T, K, window, anchors = 12, 32, 4, 2
    want = [{j for j in range(i + 1) if i - j < window or j < anchors} for i in range(T)]
    q = torch.zeros(1, T, 1, K, device=device)
    k, v = torch.zeros(1, T, 1, K, device=device), torch.eye(T, K, device=device)[None, :, None]
    rule = {"window": window, "anchors": anchors}

    def sets(y):
        return [set(row.nonzero().flatten().tolist()) for row in y[0, :, 0]]

    def weights(y):
        # equal scores: each seen key weighs the same, so the count is right as well as the set
        return all(torch.allclose(row[row > 0], 1 / (row > 0).sum()) for row in y[0, :, 0])

    y = windowed_attention(q, k, v, q, k, **rule)
    assert sets(y) == want and weights(y)
    for cut in range(1, T):
        lo = max(0, cut - window + 1)
        y = windowed_attention(q[:, cut:], k[:, lo:], v[:, lo:], q[:, cut:], k[:, cut:], **rule,
                               doc_start=torch.full((1, T - cut), -cut, dtype=torch.int32, device=device),
                               anchor_k=k[:, : min(cut, anchors)], anchor_v=v[:, : min(cut, anchors)].contiguous())
        assert sets(y) == want[cut:] and weights(y)
    for bits in (8, 16):
        for N in (1, 3):
            for L in range(T - N + 1):
                cache = paged_filled(k, v, k, L, window, anchors, "window", bits, device)
                tree = torch.ones(N, N, dtype=torch.bool, device=device).tril()
                at = torch.arange(L, L + N, dtype=torch.int32, device=device)
                y = paged_attention(q[:, L:L + N], q[:, L:L + N], cache, k[:, L:L + N], v[:, L:L + N], tree, at,
                                    **rule, scope="window")
                assert sets(y) == want[L:L + N] and weights(y)


def test_paged_refuses():
    k, v, raw, q, q_far = paged_tokens(5, 2, 2, 1, 32, torch.float32)
    cache = paged_filled(k, v, raw, 5, 8, 2, "window", 8, "cpu")
    args = (q, q_far, cache, k[:, 5:], v[:, 5:], torch.ones(2, 2), torch.tensor([5, 6]))
    rule = {"window": 8, "anchors": 2, "scope": "window"}
    for change, words in (({"anchors": 3}, "anchors"), ({"scope": "all"}, "scope"), ({"window": 1}, "path"),
                          ({"window": 500}, "holds a window")):
        with pytest.raises(ValueError, match=words):
            paged_attention(*args, **(rule | change))
    with pytest.raises(ValueError, match="bits"):
        quantize_cache(k, 3)
    with pytest.raises(ValueError, match="raw_k"):
        cache_append(cache, k, v, raw[:, :3])


ATTENTION_INTERPRETED = """
import test_section as t, torch
for name in ("docs-in-a-tile", "prefix-old-anchors", "anchors-straddle"):
    t.attention_parity(t.ATTENTION_CASES[name], torch.float32, "cpu")
t.attention_quantised_parity(torch.float32, "cpu")
t.rotary_parity(torch.float32, "cpu")
for case in t.PAGED_CASES[3:8:4] + t.PAGED_CASES[-2:-1]:
    t.paged_run(*case, torch.float32, "cpu")
for bits in (4, 8, 16):
    t.test_cache_append_does_not_depend_on_the_cuts(bits, "window", "cpu")
"""


@pytest.mark.interpret
def test_attention_interpreted():
    """The kernels under the interpreter, in float32 (its bf16 is not the GPU's; its dots are not row-independent)."""
    pytest.importorskip("triton")
    here = os.path.dirname(os.path.abspath(__file__))
    code = ATTENTION_INTERPRETED.replace("test_section", os.path.splitext(os.path.basename(__file__))[0])
    path = os.pathsep.join([here, os.path.dirname(custom_kernels.__file__), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=path),
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


# kernel name -> pointer arguments with their types ("*" = the input's type), then scalars, in signature order
ATTENTION_SIGNATURES = {
    "_attention_fwd_kernel": (
        "q:* k:* v:* q_far:* k_far:* anchor_k:* anchor_v:* k_quant:* v_quant:* ds:*i32 y:* lse:*fp32",
        "T P old_rows window anchors scale2:fp32"),
    "_attention_delta_kernel": ("y:* dy:* delta:*fp32", "T"),
    "_attention_bwd_query_kernel": (
        "q:* k:* v:* q_far:* k_far:* anchor_k:* anchor_v:* ds:*i32 dy:* lse:*fp32 delta:*fp32 dq:* dq_far:*",
        "T P old_rows window anchors scale2:fp32 scale:fp32"),
    "_attention_bwd_key_kernel": (
        "q:* k:* v:* ds:*i32 dy:* lse:*fp32 delta:*fp32 end:*i32 dk:* dv:*", "T P window scale2:fp32 scale:fp32"),
    "_attention_bwd_far_kernel": (
        "v:* q_far:* k_far:* anchor_k:* anchor_v:* ds:*i32 dy:* lse:*fp32 delta:*fp32 item:*i32 dk_part:*fp32 "
        "dv_part:*fp32", "T P old_rows window anchors chunk scale2:fp32 scale:fp32"),
    "_attention_far_sum_kernel": (
        "dk_part:*fp32 dv_part:*fp32 ds:*i32 slot:*i32 slot_item:*i32 dv:* dk_far:* danchor_k:* danchor_v:*",
        "T P old_rows anchors n_items"),
    "_cache_append_kernel": (
        "k:* v:* raw:* path:*i32 length:*i32 table:*i32 key:codes key_scale:*fp32 value:codes value_scale:*fp32 "
        "recent_k:* recent_v:* near:* anchor_k:* anchor_v:*", "T ROWS ANCHORS R"),
    "_rotary_kernel": ("x:* cos:*fp32 sin:*fp32 y:*", "rows T batch_stride sign:fp32"),
    "_paged_pages_kernel": (
        "q:* key:codes key_scale:*fp32 value:codes value_scale:*fp32 table:*i32 length:*i32 position:*i32 "
        "acc:*fp32 m:*fp32 l:*fp32", "N R window anchors scale2:fp32"),
    "_paged_node_kernel": (
        "q:* q_far:* recent_k:* recent_v:* scratch_k:* scratch_v:* near:* far:* anchor_v:* tree:*i32 length:*i32 "
        "position:*i32 acc:*fp32 m:*fp32 l:*fp32 y:*", "N anchor_rows window anchors n_splits scale2:fp32"),
}


def attention_case(name, kind, constexprs, options):
    """One row of COMPILE_CASES: (kernel name, signature, constexprs, options)."""
    pointers, scalars = ATTENTION_SIGNATURES[name]
    bits = constexprs.get("BITS", 16)
    kinds = {"*": "*" + kind, "codes": {16: "*" + kind, 8: "*i8", 4: "*u8"}[bits]}
    signature = {}
    for word in pointers.split():
        arg, kind_of = word.split(":")
        signature[arg + "_ptr"] = kinds.get(kind_of, kind_of)
    for word in scalars.split():
        arg, _, kind_of = word.partition(":")
        signature[arg] = kind_of or "i32"
    signature.update({arg: "constexpr" for arg in constexprs})
    return name, signature, constexprs, options


def attention_compile_cases():
    """What the launchers pick at the product's heads (28 over 4, K = 128), both types, and the smallest K."""
    cases = []
    for kind, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        probe = torch.empty(0, dtype=dtype)
        for K in (128, 64, 32):
            head = {"H": 28, "G": 4, "K": K}
            for name, tile in (("fwd", "fwd"), ("bwd_query", "query"), ("bwd_key", "key"), ("bwd_far", "far")):
                # 64 anchors at full width; 16, the smallest tile, in the presets with narrow heads
                t = custom_kernels._attention_tiles(tile, probe, 64 if K == 128 else 16)
                consts = {**head, "BM": t.BM, "BN": t.BN, "BA": t.BA, "PRECISION": t.precision}
                options = {"num_warps": t.num_warps, "num_stages": t.num_stages}
                if name == "fwd":
                    for quant in (False, True):
                        cases.append(attention_case("_attention_fwd_kernel", kind,
                                                    {**head, "FAR": True, "QUANT": quant, **consts}, options))
                elif name == "bwd_query":
                    cases.append(attention_case("_attention_bwd_query_kernel", kind, {**consts, "FAR": True}, options))
                elif name == "bwd_key":
                    consts.pop("BA")
                    cases.append(attention_case("_attention_bwd_key_kernel", kind, consts, options))
                else:
                    consts.pop("BN")
                    cases.append(attention_case("_attention_bwd_far_kernel", kind, consts, options))
            t = custom_kernels._attention_tiles("far", probe, 64 if K == 128 else 16)
            four = {"num_warps": 4, "num_stages": 3}
            cases.append(attention_case("_attention_far_sum_kernel", kind, {"G": 4, "K": K, "BA": t.BA},
                                        {"num_warps": 8, "num_stages": 3}))
            cases.append(attention_case("_attention_delta_kernel", kind, {"H": 28, "K": K, "BM": 64}, four))
            cases.append(attention_case("_rotary_kernel", kind, {"H": 28, "K": K, "BR": 32}, four))
            t = custom_kernels._paged_tiles(probe, 7)
            for scope, split in custom_kernels._PAGED_SPLIT.items():
                both = {**head, "FULL": scope == "full", "SPLIT": split, "ROWS": 64, "PRECISION": t.precision}
                for bits in (4, 8, 16):
                    cases.append(attention_case("_paged_pages_kernel", kind,
                                                {**both, "BITS": bits, "BR": t.BR, "BP": t.BP},
                                                {"num_warps": t.num_warps, "num_stages": t.num_stages}))
                for bits in (4, 8, 16):
                    consts = {"G": 4, "K": K, "LOG_K": K.bit_length() - 1, "BG": 4, "BITS": bits, "HAS_PATH": True,
                              "RECENT": 192, "PAGE": 64}
                    cases.append(attention_case("_cache_append_kernel", kind, consts, four))
                cases.append(attention_case("_paged_node_kernel", kind,
                                            {**both, "RECENT": 192, "NODES": 8, "BR": t.node_BR, "BP": t.node_BP},
                                            {"num_warps": t.node_warps, "num_stages": 1}))
    return cases


@pytest.mark.compile
@pytest.mark.parametrize("arch", [90, 100, 103])
def test_attention_kernels_compile(arch):
    """Cross-compile two configurations of each kernel (all of COMPILE_CASES are checked before a release)."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    done = {}
    for name, signature, constexprs, options in attention_compile_cases():
        kind = "bf16" if "*bf16" in signature.values() else "fp32"
        if (name, kind) in done or constexprs["K"] != 128:
            continue
        fn = getattr(custom_kernels, name)
        order = {arg: i for i, arg in enumerate(fn.arg_names)}
        attrs = {(i,): [["tt.divisibility", 16]] for arg, i in order.items() if signature[arg].startswith("*")}
        source = ASTSource(fn=fn, signature={arg: signature[arg] for arg in order}, attrs=attrs,
                           constexprs={(order[arg],): value for arg, value in constexprs.items()})
        out = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        done[name, kind] = out
        assert getattr(out.metadata, "tmem_size", 0) <= 512 and out.metadata.shared <= 227 * 1024, (name, kind)
        assert len(out.asm["ptx"].splitlines()) > 150, (name, kind)
    assert len(done) == 2 * len(ATTENTION_SIGNATURES)
