"""Grouped query attention over a sliding window with anchors: the operator of every fourth layer.

Key j is visible to query i iff j >= doc_start[i], j <= i, and (i - j < window or j < doc_start[i] + anchors). The
rotary distance is i - j inside the window and exactly `window` for an anchor beyond it, so that tokens dropped from the
window leave no gap and an anchor looks the same from token 10,000 and token 1,000,000. Queries and keys are
root-mean-square normalised per head before rotary.

Generation keeps keys and values in pages of 64 tokens from one pool, in 16, 8 or 4 bit. Query i reads key j quantised
iff floor(i / 64) - floor(j / 64) >= 2, anchors never: a rule of positions only, so that a prompt in any chunks, one
token at a time, and a tree of drafts all read the same numbers.

Public names: RotaryTable, RotaryAngles, AttentionCarry, NodeKeyValues, PagedKeyValueCache, GroupedQueryAttentionBlock.
"""

import copy
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from custom_kernels import (
    Projection,
    RootMeanSquareNorm,
    cache_append,
    cache_prefix,
    fake_quantize_cache,
    fused_rmsnorm,
    paged_attention,
    paged_cache,
    rotary,
    step_together,
    windowed_attention,
)
from model_config import ModelConfig

__all__ = [
    "AttentionCarry",
    "GroupedQueryAttentionBlock",
    "NodeKeyValues",
    "PagedKeyValueCache",
    "RotaryAngles",
    "RotaryTable",
]

ROTARY_STRIDE = 1024  # positions split as high * 1024 + low: two tables of 1,024 rows
ROTARY_POSITIONS = ROTARY_STRIDE**2  # reach 1,048,576


class RotaryAngles(NamedTuple):
    """Cosine and sine, float32: of each token's position (B, T, K/2), and of the anchors' fixed distance (1, K/2)."""

    cos: Tensor
    sin: Tensor
    cos_far: Tensor
    sin_far: Tensor


class RotaryTable(nn.Module):
    """Rotary angles for positions 0 ... 2^20 - 1 and beyond, from two small tables built in float64.

    A float32 product position * frequency is wrong by up to 0.04 in the cosine at position 1,048,575. Here cos and sin
    of high * 1024 and of low are tabulated from float64 and combined by the addition theorem: 1.3e-7 everywhere.
    Frequencies: base^(-2i/K), base 5,000,000, divided band by band by 1 ... rope_scaling (bands whose wavelength fits
    the window are untouched, bands longer than the context get the whole factor, linear in log wavelength between).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.window = config.attention_window
        half = config.head_dim // 2
        exponent = torch.arange(half, dtype=torch.float64) / half
        wavelength = 2 * math.pi * config.rope_base_theta**exponent
        span = math.log(max(config.max_context_len, config.sliding_window_size + 1) / config.sliding_window_size)
        ramp = (torch.log(wavelength / config.sliding_window_size) / span).clamp(0.0, 1.0)
        frequency = 2 * math.pi / wavelength / (1 + (config.rope_scaling - 1) * ramp)  # (K/2,) f64, radians a token
        rows = torch.arange(ROTARY_STRIDE, dtype=torch.float64)[:, None]
        low, high = rows * frequency, rows * ROTARY_STRIDE * frequency
        far = torch.tensor([[float(self.window)]], dtype=torch.float64) * frequency
        tables = {"low": low, "high": high, "far": far}
        for name, angle in tables.items():
            self.register_buffer(f"cos_{name}", angle.cos().float(), persistent=False)
            self.register_buffer(f"sin_{name}", angle.sin().float(), persistent=False)

    def forward(self, positions: Tensor) -> RotaryAngles:
        """Look up positions (B, T) int64, each 0 <= p < 2^20, within its document."""
        high, low = positions // ROTARY_STRIDE, positions % ROTARY_STRIDE
        cos_a, sin_a, cos_b, sin_b = self.cos_high[high], self.sin_high[high], self.cos_low[low], self.sin_low[low]
        return RotaryAngles(cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b, self.cos_far, self.sin_far)


class AttentionCarry(NamedTuple):
    """What a segment leaves to the next: the window's last keys and values, and the open document's anchors."""

    k: Tensor  # (B, P, G, K) rotated, P <= window
    v: Tensor  # (B, P, G, K)
    anchor_k: Tensor  # (B, A, G, K) f32, not rotated; rows past the document's length are unused
    anchor_v: Tensor  # (B, A, G, K) f32: every later segment adds to their gradient, in float32


class NodeKeyValues(NamedTuple):
    """What a draft-tree node would store: kept until acceptance decides which nodes are committed."""

    k: Tensor  # (B, N, G, K) rotated
    v: Tensor  # (B, N, G, K)
    raw_k: Tensor  # (B, N, G, K) not rotated, for the anchors


class PagedKeyValueCache:
    """Keys and values of one attention layer: pages of 64 tokens from one pool, found through a page table.

    Under scope window the table is a ring of window/64 + 2 pages, so that storing a token evicts the oldest page in
    place; under scope full it has a page for each 64 of max_length positions. Beside the pool, in the compute type: the
    newest three pages, which no query may read quantised yet, and the anchors. Everything is allocated once.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int = 1,
        bits: int = 8,
        max_length: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.bits, self.scope = bits, config.attention_scope
        self.window, self.anchors = config.attention_window, config.anchor_tokens
        self.pages = paged_cache(
            batch,
            config.num_kv_heads,
            config.head_dim,
            window=self.window,
            anchors=self.anchors,
            scope=self.scope,
            bits=bits,
            max_length=max_length or config.max_context_len,
            dtype=dtype,
            device=device,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Name every stored tensor."""
        return {name: value for name, value in vars(self.pages).items() if isinstance(value, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    def reset(self) -> None:
        """Forget the sequence: every page, scale, anchor and length becomes zero, so that nothing of it can be read."""
        for name, value in self.tensors().items():
            if name != "page_table":
                value.zero_()

    def copy(self) -> "PagedKeyValueCache":
        """Return an independent copy."""
        twin = copy.copy(self)
        twin.pages = copy.deepcopy(self.pages)
        return twin

    def take(self, row: int, other: "PagedKeyValueCache") -> None:
        """Make one sequence a copy of another cache's only one."""
        ours, theirs = self.pages.page_table[row].long(), other.pages.page_table[0].long()
        for name, value in self.tensors().items():
            if name.startswith(("key_", "value_")):  # pools: pages are found through the tables
                value[ours] = other.tensors()[name][theirs]
            elif name != "page_table":
                value[row] = other.tensors()[name][0]

    def append(self, k: Tensor, v: Tensor, raw_k: Tensor, path: Tensor | None = None) -> None:
        """Store rows path (B, depth) int32 (-1 = end; None = all) of T tokens: k, v, raw_k (B, T, G, K)."""
        cache_append(self.pages, k, v, raw_k, path=path)

    def prefix(self, stored: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return what a chunk may still see of the `stored` tokens: k, v and their quantised forms, (B, P, G, K)."""
        k, v, k_quant, v_quant = cache_prefix(self.pages, min(stored, self.window - 1))
        return (k, v, None, None) if self.bits == 16 else (k, v, k_quant, v_quant)

    def quantized(self, k: Tensor, v: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return k, v (B, T, G, K) as the pool will give them back; None, None at 16 bit, where nothing changes."""
        if self.bits == 16:
            return None, None
        # 4-bit keys are stored after a Hadamard rotation, which spreads a loud channel over its group
        k = fake_quantize_cache(k, self.bits, rotated=self.bits == 4)
        return k, fake_quantize_cache(v, self.bits, rotated=False)


class GroupedQueryAttentionBlock(nn.Module):
    """Attention operator: x (B, T, D) to the output projection (B, T, D), H query heads over G key-value heads."""

    def __init__(self, config: ModelConfig, precision: str = "wide") -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_query_heads, config.num_kv_heads, config.head_dim
        self.window, self.anchors, self.eps = config.attention_window, config.anchor_tokens, config.rms_norm_eps
        width, kv_width = config.hidden_dim, self.kv_heads * self.head_dim
        self.query = Projection(width, self.heads * self.head_dim, precision)
        self.key = Projection(width, kv_width, precision)
        self.value = Projection(width, kv_width, precision)
        self.output = Projection(self.heads * self.head_dim, width, precision)
        self.output_norm = RootMeanSquareNorm(width, self.eps, start=1 / math.sqrt(2 * config.layers))

    def forward(
        self,
        x: Tensor,
        angles: RotaryAngles,
        *,
        doc_start: Tensor | None = None,
        carry: AttentionCarry | None = None,
        return_carry: bool = False,
    ) -> tuple[Tensor, AttentionCarry | None]:
        """Attend over x (B, T, D), after the carry of an earlier segment if there is one.

        doc_start (B, T) int32, negative where the document began in an earlier segment. Returns the output projection
        (B, T, D) and, if asked, the carry for the next segment.
        """
        q, q_far, k, k_far, v = self._rotated(self.query(x), self.key(x), self.value(x), angles)
        keys = k if carry is None else torch.cat((carry.k, k), 1)  # (B, P + T, G, K)
        values = v if carry is None else torch.cat((carry.v, v), 1)
        y = windowed_attention(
            q,
            keys,
            values,
            q_far,
            k_far,
            window=self.window,
            anchors=self.anchors,
            doc_start=doc_start,
            anchor_k=None if carry is None else carry.anchor_k.to(k.dtype),
            anchor_v=None if carry is None else carry.anchor_v.to(v.dtype),
        )
        next_carry = self._carry(keys, values, k_far, v, doc_start, carry) if return_carry else None
        return self.output(y.flatten(2)), next_carry

    def prefill(self, x: Tensor, angles: RotaryAngles, cache: PagedKeyValueCache, stored: int) -> Tensor:
        """Attend over the next chunk x (B, T, D) of a prompt of which `stored` tokens are cached, and cache it.

        Returns the output projection (B, T, D).
        """
        q, q_far, k, raw_k, v = self._rotated(self.query(x), self.key(x), self.value(x), angles)
        k_quant, v_quant = cache.quantized(k, v)
        keys, values, anchor_k, anchor_v = k, v, None, None
        if stored:
            old_k, old_v, old_k_quant, old_v_quant = cache.prefix(stored)
            keys, values = torch.cat((old_k, k), 1), torch.cat((old_v, v), 1)  # (B, P + T, G, K)
            anchor_k, anchor_v = cache.pages.anchor_k, cache.pages.anchor_v
            if k_quant is not None:
                k_quant, v_quant = torch.cat((old_k_quant, k_quant), 1), torch.cat((old_v_quant, v_quant), 1)
        y = windowed_attention(
            q,
            keys,
            values,
            q_far,
            raw_k,
            window=self.window,
            anchors=self.anchors,
            doc_start=torch.full(x.shape[:2], -stored, dtype=torch.int32, device=x.device),
            anchor_k=anchor_k,
            anchor_v=anchor_v,
            k_quant=k_quant,
            v_quant=v_quant,
        )
        cache.append(k, v, raw_k)
        return self.output(y.flatten(2))

    def nodes(
        self, x: Tensor, angles: RotaryAngles, cache: PagedKeyValueCache, tree_mask: Tensor, positions: Tensor
    ) -> tuple[Tensor, NodeKeyValues]:
        """Evaluate N draft-tree nodes x (B, N, D) against the cache, which stays as it is.

        tree_mask (N, N) bool: [n, m] where m is n or an ancestor of n; positions (B, N): cached length plus depth.
        Returns the output projection (B, N, D) and what the nodes would store. A node's result does not depend on
        nodes outside its own path.
        """
        projected = step_together(x, (self.query, self.key, self.value))
        q, q_far, k, raw_k, v = self._rotated(*projected, angles)
        y = paged_attention(
            q,
            q_far,
            cache.pages,
            k,
            v,
            tree_mask,
            positions.to(torch.int32),
            window=self.window,
            anchors=self.anchors,
            scope=cache.scope,
        )
        return self.output.step(y.flatten(2)), NodeKeyValues(k, v, raw_k)

    def commit(self, written: NodeKeyValues, cache: PagedKeyValueCache, path: Tensor) -> None:
        """Store the nodes of path (B, depth) int32 (-1 = end) in the cache, in place."""
        cache.append(*written, path)

    def _rotated(
        self, q: Tensor, k: Tensor, v: Tensor, angles: RotaryAngles
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Split projections into heads: q, q at distance `window`, k, k not rotated, v, each (B, T, H or G, K)."""
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        q, raw_k = fused_rmsnorm(q, None, self.eps), fused_rmsnorm(k, None, self.eps)
        tokens = q.shape[1]
        q_far = rotary(q, angles.cos_far.expand(tokens, -1), angles.sin_far.expand(tokens, -1))
        return rotary(q, angles.cos, angles.sin), q_far, rotary(raw_k, angles.cos, angles.sin), raw_k, v

    def _carry(
        self,
        keys: Tensor,
        values: Tensor,
        k_far: Tensor,
        v: Tensor,
        doc_start: Tensor | None,
        carry: AttentionCarry | None,
    ) -> AttentionCarry:
        batch, tokens = k_far.shape[:2]
        start = k_far.new_zeros(batch, dtype=torch.int64) if doc_start is None else doc_start[:, -1].long()
        rows = start[:, None] + torch.arange(self.anchors, device=k_far.device)  # (B, A) index in this segment
        fresh = (rows >= 0) & (rows < tokens)
        index = rows.clamp(0, tokens - 1)[..., None, None].expand(-1, -1, *k_far.shape[2:])
        wide = torch.promote_types(k_far.dtype, torch.float32)

        def anchors(new: Tensor, old: Tensor | None) -> Tensor:
            kept = torch.zeros_like(index, dtype=wide) if old is None else old * (rows < 0)[..., None, None]
            return torch.where(fresh[..., None, None], new.gather(1, index).to(wide), kept)

        return AttentionCarry(
            keys[:, -self.window :],
            values[:, -self.window :],
            anchors(k_far, None if carry is None else carry.anchor_k),
            anchors(v, None if carry is None else carry.anchor_v),
        )
