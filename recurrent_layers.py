"""Gated delta rule matrix memory: the recurrent operator of 24 of the 32 layers.

State of one head: S (V, K), kept transposed as (B, H, K, V) float32. With scalar gates per head and token,

    S_t = gamma_t S_{t-1} + beta_t (alpha_t v_t - S_{t-1} k_t) k_t^T        y_t = S_t q_t

alpha scales what is written, beta is how strongly the old value is erased, gamma is the decay. q and k have unit
length per head. y keeps its length, so that a head whose memory holds nothing for a query stays silent: normalised per
head, the noise is as loud as a hit, 0.025 nats worse at 35 M and at 123 M parameters (tests/benchmarks/ablate.py); the
norm of the residual addition sees to the scale. The block knows nothing of residuals: it returns the output projection,
and holds the norm that the residual addition applies to it.

With ModelConfig.conv_width = W > 0 the projections of q, k and v first pass a causal convolution of W taps and SiLU,
each channel for itself; what a sequence carries is then S and the projections of its last W - 1 tokens, the tail.

Public names: MemoryState, MemoryNodes, GatedDeltaRuleMatrixMemoryBlock, earlier_tokens, half_life_biases.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from custom_kernels import (
    Projection,
    RootMeanSquareNorm,
    causal_convolution,
    chunk_associative_scan,
    delta_rule_commit,
    delta_rule_gates,
    delta_rule_operands,
    delta_rule_step,
    linear_products,
    step_together,
)
from model_config import ModelConfig

__all__ = ["GatedDeltaRuleMatrixMemoryBlock", "MemoryNodes", "MemoryState", "earlier_tokens", "half_life_biases"]

ALPHA_BIAS, BETA_BIAS = 2.0, 0.0  # sigmoid(2) = 0.88 written, sigmoid(0) = 0.5 erased
# tokens. The text asks for a broad spectrum and names no ends: from 8, nano's demo run ends 0.045 and 0.027 nats higher
# (two seeds); at 35 M parameters, 1 ... 4,096 ended 0.051 lower than 8 ... 1,048,576 (one H200, one seed; all with the
# convolution)
SHORTEST_HALF_LIFE, LONGEST_HALF_LIFE = 1, 1048576


class MemoryState(NamedTuple):
    """What one layer carries from token to token, between the segments of a row and in decoding."""

    state: Tensor  # (B, H, K, V) f32
    tail: Tensor  # (B, W - 1, C) projections of the last tokens, oldest first, C = q, k, v; (B, 0, 0) without taps

    def tensors(self) -> dict[str, Tensor]:
        """Name every stored tensor."""
        return {"memory": self.state} | ({"tail": self.tail} if self.tail.numel() else {})

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return sum(x.numel() * x.element_size() for x in self)

    def assign(self, other: "MemoryState") -> None:
        """Take the values of another, in place."""
        for mine, theirs in zip(self, other, strict=True):
            mine.copy_(theirs)

    def take(self, row: int, other: "MemoryState") -> None:
        """Make one sequence a copy of another memory's only one."""
        for mine, theirs in zip(self, other, strict=True):
            mine[row] = theirs[0]

    def reset(self) -> None:
        """Forget the sequence: a tail of zeros reads like the start of a document."""
        for x in self:
            x.zero_()

    def copy(self) -> "MemoryState":
        """Return an independent copy."""
        return MemoryState(*(x.clone() for x in self))


class MemoryNodes(NamedTuple):
    """What a draft-tree node would write: kept until acceptance decides which nodes are committed."""

    k: Tensor  # (B, N, H, K)
    v: Tensor  # (B, N, H, V), already scaled by alpha
    beta: Tensor  # (B, N, H) f32
    log_gamma: Tensor  # (B, N, H) f32
    raw: Tensor  # (B, N, C) projections, for the tail; (B, N, 0) without taps


def earlier_tokens(parents: Tensor) -> Tensor:
    """Return (N, 3) int64: the 1st, 2nd and 3rd token before each draft-tree node, on its own path.

    parents (N,) int32, -1 = the committed text. An entry is a node, or -1, -2, -3 for the last committed token, the one
    before it, and the one before that.
    """
    cursor, columns = torch.arange(len(parents), device=parents.device), []
    for _ in range(3):
        cursor = torch.where(cursor >= 0, parents[cursor.clamp(min=0)].long(), cursor - 1)
        columns.append(cursor)
    return torch.stack(columns, 1)


def half_life_biases(heads: int) -> Tensor:
    """Return b (H,) float32 with exp(-softplus(b)) of half-lives log-spaced from 1 to 1,048,576 tokens.

    softplus(b) = ln 2 / half-life. The spread over heads is the decay spectrum; its biases are stored as offsets from
    these values, so that weight decay regularises towards the spectrum.
    """
    ends = math.log(SHORTEST_HALF_LIFE), math.log(LONGEST_HALF_LIFE)
    rate = math.log(2.0) / torch.linspace(*ends, heads, dtype=torch.float64).exp()
    return rate.expm1().log().float()


class GatedDeltaRuleMatrixMemoryBlock(nn.Module):
    """Matrix memory operator: x (B, T, D) and a state (B, H, K, V) to the output projection (B, T, D) and the state."""

    def __init__(self, config: ModelConfig, precision: str = "wide") -> None:
        super().__init__()
        self.heads, self.key_dim = config.recurrent_heads, config.recurrent_key_dim
        self.value_dim, self.chunk_size, self.eps = config.recurrent_value_dim, config.chunk_size, config.rms_norm_eps
        width, keys, values = config.hidden_dim, self.heads * self.key_dim, self.heads * self.value_dim
        self.query = Projection(width, keys, precision)
        self.key = Projection(width, keys, precision)
        self.value = Projection(width, values, precision)
        self.write_gate = nn.Parameter(torch.empty(self.heads, width))
        self.erase_gate = nn.Parameter(torch.empty(self.heads, width))
        self.decay_gate = nn.Parameter(torch.empty(self.heads, width))
        # offsets from the biases that half_life_biases and the two constants give
        self.write_offset = nn.Parameter(torch.empty(self.heads))
        self.erase_offset = nn.Parameter(torch.empty(self.heads))
        self.decay_offset = nn.Parameter(torch.empty(self.heads))
        # (C * W,) offsets from the identity, newest tap 1 and the others 0: weight decay pulls them home
        self.conv_width, self.conv_channels = config.conv_width, config.conv_channels
        self.taps = nn.Parameter(torch.empty(config.conv_channels * config.conv_width)) if config.conv_width else None
        self.output = Projection(values, width, precision)
        # 2 * layers branches share the stream; smaller gains would mute them, larger ones wash the embedding out
        self.output_norm = RootMeanSquareNorm(width, self.eps, start=1 / math.sqrt(2 * config.layers))
        self.register_buffer("decay_bias", half_life_biases(self.heads), persistent=False)

    def forward(
        self, x: Tensor, *, memory: MemoryState | None = None, doc_start: Tensor | None = None
    ) -> tuple[Tensor, MemoryState]:
        """Run T tokens in chunks: x (B, T, D), what came before them or None, doc_start (B, T) int32 or None.

        Returns the output projection (B, T, D) and the memory after the last token, which belongs to its document.
        """
        raw = self.query(x), self.key(x), self.value(x)
        q, k, v = (self._heads(part) for part in self._convolved(raw, memory, doc_start))
        alpha, beta, log_gamma = self._gates(self._gate_logits(x))
        y, final_state = chunk_associative_scan(
            *delta_rule_operands(q, k, v, alpha),
            beta,
            log_gamma,
            initial_state=None if memory is None else memory.state,
            doc_start=doc_start,
            chunk_size=self.chunk_size,
        )
        return self.output(y.flatten(2)), MemoryState(final_state, self._tail(raw, memory))

    def nodes(
        self, x: Tensor, memory: MemoryState, parents: Tensor | None = None, earlier: Tensor | None = None
    ) -> tuple[Tensor, MemoryNodes]:
        """Evaluate N draft-tree nodes x (B, N, D) against the committed memory, which stays as it is.

        parents (N,) int32 in topological order, -1 = the committed memory, None = a chain; earlier (N, 3) is
        earlier_tokens(parents), where the caller has it. Returns the output projection (B, N, D) and what the nodes
        would write. A node's result does not depend on nodes outside its own path.
        """
        if parents is None:
            parents = torch.arange(-1, x.shape[1] - 1, dtype=torch.int32, device=x.device)
        parts = step_together(x, (self.query, self.key, self.value))
        parts, raw = self._convolved_nodes(parts, memory, parents, earlier)
        q, k, v = (self._heads(part) for part in parts)
        (logits,) = linear_products(x, [self._gate_weight().to(torch.promote_types(x.dtype, torch.float32))])
        alpha, beta, log_gamma = self._gates(logits)
        q, k, v = delta_rule_operands(q, k, v, alpha)
        y = delta_rule_step(q, k, v, beta, log_gamma, memory.state, parents=parents)
        return self.output.step(y.flatten(2)), MemoryNodes(k, v, beta, log_gamma, raw)

    def commit(self, written: MemoryNodes, memory: MemoryState, path: Tensor) -> None:
        """Write the nodes of path (B, depth) int32 (-1 = end) into the memory, in place."""
        delta_rule_commit(written.k, written.v, written.beta, written.log_gamma, memory.state, path)
        if self.taps is None:
            return
        tail, channels = memory.tail, memory.tail.shape[2]
        index = path.long().clamp(min=0)[..., None].expand(-1, -1, channels)
        rows = torch.cat((tail, written.raw.gather(1, index)), 1)  # (B, W - 1 + depth, C), of which the path's end
        accepted = (path >= 0).sum(1)[:, None]
        newest = accepted + torch.arange(tail.shape[1], device=tail.device)  # (B, W - 1)
        tail.copy_(rows.gather(1, newest[..., None].expand(-1, -1, channels)))

    def step(self, x: Tensor, memory: MemoryState) -> tuple[MemoryState, Tensor]:
        """Take one token x (B, 1, D) in place: return the updated memory and the output projection (B, 1, D)."""
        y, written = self.nodes(x, memory)
        self.commit(written, memory, torch.zeros(x.shape[0], 1, dtype=torch.int32, device=x.device))
        return memory, y

    def empty(self, batch: int, dtype: torch.dtype, device: torch.device | str) -> MemoryState:
        """Allocate the memory of `batch` sequences that have no token yet, for activations of dtype."""
        shape = (batch, self.heads, self.key_dim, self.value_dim)
        state = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
        rows, channels = (0, 0) if self.taps is None else (self.conv_width - 1, self.conv_channels)
        return MemoryState(state, torch.zeros(batch, rows, channels, dtype=dtype, device=device))

    def _convolved(
        self, raw: Sequence[Tensor], memory: MemoryState | None, doc_start: Tensor | None
    ) -> Sequence[Tensor]:
        """Convolve the projections of q, k and v, (B, T, C) each, apart: joined they would be copied twice."""
        if self.taps is None:
            return raw
        sizes = [part.shape[-1] for part in raw]
        taps = self.taps.view(-1, self.conv_width).split(sizes)
        tails = (None,) * 3 if memory is None else memory.tail.split(sizes, -1)
        return [
            causal_convolution(part, weight, doc_start=doc_start, carry=tail)
            for part, weight, tail in zip(raw, taps, tails, strict=True)
        ]

    def _tail(self, raw: Sequence[Tensor], memory: MemoryState | None) -> Tensor:
        """Return the projections of the last W - 1 tokens, (B, W - 1, C), whatever document they are of."""
        if self.taps is None:
            return raw[0].new_empty(raw[0].shape[0], 0, 0)
        rows = self.conv_width - 1
        newest = torch.cat([part[:, -rows:] for part in raw], -1)
        if newest.shape[1] == rows:
            return newest
        batch, tokens, channels = newest.shape
        before = newest.new_zeros(batch, rows - tokens, channels) if memory is None else memory.tail[:, tokens:]
        return torch.cat((before, newest), 1)

    def _convolved_nodes(
        self, parts: Sequence[Tensor], memory: MemoryState, parents: Tensor, earlier: Tensor | None
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Convolve the projections of N nodes, each after its own ancestors: the parts, and the raw inputs joined.

        A node is a row of one token that carries its W - 1 predecessors, so its bits depend on nothing else.
        """
        if self.taps is None:
            return parts, parts[0].new_empty(*parts[0].shape[:2], 0)
        raw, rows = torch.cat(tuple(parts), -1), self.conv_width - 1  # (B, N, C)
        if earlier is None:
            earlier = earlier_tokens(parents)
        known = torch.cat((memory.tail, raw), 1)  # row W - 1 + n is node n, row W - 2 the last committed token
        carry = known[:, earlier[:, :rows].flip(1) + rows]  # (B, N, W - 1, C), oldest first
        y = causal_convolution(raw.flatten(0, 1)[:, None], self.taps, carry=carry.flatten(0, 1)).view_as(raw)
        return y.split([part.shape[-1] for part in parts], -1), raw

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))  # (B, T, H, K)

    def _gate_weight(self) -> Tensor:
        return torch.cat((self.write_gate, self.erase_gate, self.decay_gate))  # (3H, D)

    def _gate_logits(self, x: Tensor) -> Tensor:
        # gates are 32 bit from the pre-activation on: rounding beta to 16 bits drifts over long outputs
        wide = x if x.dtype == torch.float64 else x.float()
        return nn.functional.linear(wide, self._gate_weight().to(wide.dtype))  # (B, T, 3H)

    def _gates(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        offsets = self.write_offset, self.erase_offset, self.decay_offset, self.decay_bias
        return delta_rule_gates(logits, *(x.to(logits.dtype) for x in offsets), write_bias=ALPHA_BIAS,
                                erase_bias=BETA_BIAS)  # fmt: skip
