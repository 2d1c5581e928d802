"""Gated delta rule matrix memory: the recurrent operator of 24 of the 32 layers.

State of one head: S (V, K), kept transposed as (B, H, K, V) float32. With scalar gates per head and token,

    S_t = gamma_t S_{t-1} + beta_t (alpha_t v_t - S_{t-1} k_t) k_t^T        y_t = S_t q_t

alpha scales what is written, beta is how strongly the old value is erased, gamma is the decay. q and k have unit
length per head. y keeps its length, so that a head whose memory holds nothing for a query stays silent: normalised per
head, the noise is as loud as a hit, 0.025 nats worse at 35 M and at 123 M parameters (tests/benchmarks/ablate.py); the
norm of the residual addition sees to the scale. The block knows nothing of residuals: it returns the output projection,
and holds the norm that the residual addition applies to it.

Public names: MemoryNodes, GatedDeltaRuleMatrixMemoryBlock, half_life_biases.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from custom_kernels import (
    Projection,
    RootMeanSquareNorm,
    chunk_associative_scan,
    delta_rule_commit,
    delta_rule_step,
    l2_normalize,
    linear_product,
)
from model_config import ModelConfig

__all__ = ["GatedDeltaRuleMatrixMemoryBlock", "MemoryNodes", "half_life_biases"]

ALPHA_BIAS, BETA_BIAS = 2.0, 0.0  # sigmoid(2) = 0.88 written, sigmoid(0) = 0.5 erased
SHORTEST_HALF_LIFE, LONGEST_HALF_LIFE = 8, 1048576  # tokens


class MemoryNodes(NamedTuple):
    """What a draft-tree node would write: kept until acceptance decides which nodes are committed."""

    k: Tensor  # (B, N, H, K)
    v: Tensor  # (B, N, H, V), already scaled by alpha
    beta: Tensor  # (B, N, H) f32
    log_gamma: Tensor  # (B, N, H) f32


def half_life_biases(heads: int) -> Tensor:
    """Return b (H,) float32 with exp(-softplus(b)) of half-lives log-spaced from 8 to 1,048,576 tokens.

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
        self.output = Projection(values, width, precision)
        # 2 * layers branches share the stream; smaller gains would mute them, larger ones wash the embedding out
        self.output_norm = RootMeanSquareNorm(width, self.eps, start=1 / math.sqrt(2 * config.layers))
        self.register_buffer("decay_bias", half_life_biases(self.heads), persistent=False)

    def forward(
        self, x: Tensor, *, state: Tensor | None = None, doc_start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run T tokens in chunks: x (B, T, D), state (B, H, K, V) f32 or None, doc_start (B, T) int32 or None.

        Returns the output projection (B, T, D) and the state after the last token, which belongs to its document.
        """
        q, k, v = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        alpha, beta, log_gamma = self._gates(self._gate_logits(x))
        y, final_state = chunk_associative_scan(
            l2_normalize(q),
            l2_normalize(k),
            (v * alpha[..., None]).to(v.dtype),
            beta,
            log_gamma,
            initial_state=state,
            doc_start=doc_start,
            chunk_size=self.chunk_size,
        )
        return self.output(y.flatten(2)), final_state

    def nodes(self, x: Tensor, state: Tensor, parents: Tensor | None = None) -> tuple[Tensor, MemoryNodes]:
        """Evaluate N draft-tree nodes x (B, N, D) against the committed state, which stays as it is.

        parents (N,) int32 in topological order, -1 = the committed state, None = a chain. Returns the output
        projection (B, N, D) and what the nodes would write. A node's result does not depend on the others.
        """
        q, k, v = self._heads(self.query.step(x)), self._heads(self.key.step(x)), self._heads(self.value.step(x))
        logits = linear_product(x.float(), self._gate_weight()) if x.dtype != torch.float64 else self._gate_logits(x)
        alpha, beta, log_gamma = self._gates(logits)
        k = l2_normalize(k)
        written = MemoryNodes(k, (v * alpha[..., None]).to(v.dtype), beta, log_gamma)
        y = delta_rule_step(l2_normalize(q), *written, state, parents=parents)
        return self.output.step(y.flatten(2)), written

    def commit(self, written: MemoryNodes, state: Tensor, path: Tensor) -> None:
        """Write the nodes of path (B, depth) int32 (-1 = end) into state (B, H, K, V) in place."""
        delta_rule_commit(*written, state, path)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Take one token x (B, 1, D): return the updated state and the output projection (B, 1, D)."""
        y, written = self.nodes(x, state)
        self.commit(written, state, torch.zeros(x.shape[0], 1, dtype=torch.int32, device=x.device))
        return state, y

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))  # (B, T, H, K)

    def _gate_weight(self) -> Tensor:
        return torch.cat((self.write_gate, self.erase_gate, self.decay_gate))  # (3H, D)

    def _gate_logits(self, x: Tensor) -> Tensor:
        # gates are 32 bit from the pre-activation on: rounding beta to 16 bits drifts over long outputs
        wide = x if x.dtype == torch.float64 else x.float()
        return nn.functional.linear(wide, self._gate_weight().to(wide.dtype))  # (B, T, 3H)

    def _gates(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        write, erase, decay = logits.unflatten(-1, (3, self.heads)).unbind(-2)
        alpha = _sigmoid(write + ALPHA_BIAS + self.write_offset)
        beta = _sigmoid(erase + BETA_BIAS + self.erase_offset)
        decay = decay + self.decay_bias + self.decay_offset
        # -softplus, written out for the same reason as _sigmoid
        log_gamma = -(decay.clamp(min=0) + torch.log1p(torch.exp(-decay.abs())))
        return alpha, beta, log_gamma


def _sigmoid(x: Tensor) -> Tensor:
    """Logistic function whose bits do not depend on an element's place.

    torch's sigmoid and softplus round the last numel % 32 elements of a CPU tensor otherwise than the rest (about 1 %
    of them differ), so a draft node's gates would depend on how many nodes there are.
    """
    return 1 / (1 + torch.exp(-x.clamp(min=-80)))
