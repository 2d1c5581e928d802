"""Grouped query attention over a sliding window with anchors: the operator of every fourth layer.

Key j is visible to query i iff j >= doc_start[i], j <= i, and (i - j < window or j < doc_start[i] + anchors). The
rotary distance is i - j inside the window and exactly `window` for an anchor beyond it, so that tokens dropped from the
window leave no gap and an anchor looks the same from token 10,000 and token 1,000,000. Queries and keys are
root-mean-square normalised per head before rotary.

Public names: RotaryTable, RotaryAngles, AttentionCarry, GroupedQueryAttentionBlock.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from custom_kernels import Projection, RootMeanSquareNorm, fused_rmsnorm, rotary, windowed_attention
from model_config import ModelConfig

__all__ = ["AttentionCarry", "GroupedQueryAttentionBlock", "RotaryAngles", "RotaryTable"]

ROTARY_STRIDE = 1024  # positions split as high * 1024 + low: two tables of 1,024 rows reach 1,048,576


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
        q, k, v = self._project(self.query(x), self.key(x), self.value(x))
        q_far, k_far = rotary(q, angles.cos_far.expand(q.shape[1], -1), angles.sin_far.expand(q.shape[1], -1)), k
        q, k = rotary(q, angles.cos, angles.sin), rotary(k, angles.cos, angles.sin)
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

    def _project(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))  # (B, T, H or G, K)
        return fused_rmsnorm(q, None, self.eps), fused_rmsnorm(k, None, self.eps), v

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
