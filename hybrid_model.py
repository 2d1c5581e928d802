"""The hybrid language model: tied embedding, 3:1 recurrent and attention layers on a hypersphere, draft head.

The residual stream starts as sphere(E[id]) and returns to radius sqrt(D) after every addition:

    x <- sphere(x + norm_out(operator(norm_in(x))))          twice a layer: sequence operator, then SwiGLU

    logits = 16/D * norm(x) E^T = 16 cos(angle)               one tensor E for lookup and head, started at 1.0

The model maps ids to hidden states; the loss (training) and sampling (generation) belong to the engines. Sequences go
through `forward` (training, prefill, evaluation), draft-tree nodes through `nodes` and `commit` (decoding).

Public names: ParameterSpec, LayerCarry, HybridOutput, SwiGLUFeedForward, DecoderLayer, DraftHead,
HybridLanguageModel.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attention_layers import AttentionCarry, GroupedQueryAttentionBlock, RotaryAngles, RotaryTable
from custom_kernels import Projection, RootMeanSquareNorm, fused_residual_sphere, fused_rmsnorm, fused_swiglu
from model_config import ModelConfig, PrecisionConfig
from recurrent_layers import GatedDeltaRuleMatrixMemoryBlock

__all__ = [
    "DecoderLayer",
    "DraftHead",
    "HybridLanguageModel",
    "HybridOutput",
    "LayerCarry",
    "ParameterSpec",
    "SwiGLUFeedForward",
]

LayerCarry = Tensor | AttentionCarry  # a recurrent layer's state (B, H, K, V) f32, or an attention layer's window

COMPUTE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp4": torch.bfloat16,
                 "fp4-emulated": torch.bfloat16}  # fmt: skip


class ParameterSpec(NamedTuple):
    """One row of the parameter table: how the optimizer and the initialiser treat a tensor."""

    name: str
    parameter: nn.Parameter
    role: Literal["matrix", "attention_output", "gate", "embedding", "vector"]
    fan_in: int
    fan_out: int
    conditioned: bool  # soft orthogonality applies


class HybridOutput(NamedTuple):
    """Normalised hidden states (B, T, D) for the head, and the carry of each layer if it was asked for."""

    hidden: Tensor
    carry: list[LayerCarry] | None


class SwiGLUFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), width D -> F -> D, with the norm that the residual addition applies."""

    def __init__(self, config: ModelConfig, precision: str) -> None:
        super().__init__()
        self.gate = Projection(config.hidden_dim, config.ffn_dim, precision)
        self.up = Projection(config.hidden_dim, config.ffn_dim, precision)
        self.down = Projection(config.ffn_dim, config.hidden_dim, precision)
        self.output_norm = RootMeanSquareNorm(
            config.hidden_dim, config.rms_norm_eps, start=1 / math.sqrt(2 * config.layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(fused_swiglu(self.gate(x), self.up(x)))

    def step(self, x: Tensor) -> Tensor:
        return self.down.step(fused_swiglu(self.gate.step(x), self.up.step(x)))


class DecoderLayer(nn.Module):
    """One sequence operator and one feed-forward network, each between its norms and the sphere."""

    def __init__(self, config: ModelConfig, layer_index: int, precision: str) -> None:
        super().__init__()
        self.is_attention = config.is_attention(layer_index)
        block = GroupedQueryAttentionBlock if self.is_attention else GatedDeltaRuleMatrixMemoryBlock
        self.eps = config.rms_norm_eps
        self.operator_norm = RootMeanSquareNorm(config.hidden_dim, self.eps)
        self.operator = block(config, precision)
        self.feed_forward_norm = RootMeanSquareNorm(config.hidden_dim, self.eps)
        self.feed_forward = SwiGLUFeedForward(config, precision)

    def forward(
        self,
        x: Tensor,
        angles: RotaryAngles,
        doc_start: Tensor | None,
        carry: LayerCarry | None,
        return_carry: bool,
        recompute: str,
    ) -> tuple[Tensor, LayerCarry | None]:
        branch_input = self.operator_norm(x)
        if self.is_attention:
            branch, carry = self.operator(
                branch_input, angles, doc_start=doc_start, carry=carry, return_carry=return_carry
            )
        else:
            branch, carry = self.operator(branch_input, state=carry, doc_start=doc_start)
        x = self.add(x, branch, self.operator.output_norm)
        if recompute == "ffn" and torch.is_grad_enabled():
            branch = checkpoint(self._feed_forward_branch, x, use_reentrant=False, preserve_rng_state=False)
        else:
            branch = self._feed_forward_branch(x)
        return self.add(x, branch, self.feed_forward.output_norm), carry

    def add(self, x: Tensor, branch: Tensor, output_norm: RootMeanSquareNorm) -> Tensor:
        """Return sphere(x + output_norm(branch))."""
        return fused_residual_sphere(x, branch, output_norm.gain(), self.eps)

    def _feed_forward_branch(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.feed_forward_norm(x))


class DraftHead(nn.Module):
    """Hidden states that predict one (depth 1) and two (depth 2) tokens further than the model itself.

    Depth d maps [rms(h); sphere(E[token])] (2D) through a gated linear layer (2D -> D, SwiGLU) and a second one
    (D -> D) to a hidden state for the tied head. Depth 2 reads depth 1's hidden state. No positions enter, so that
    acceptance does not depend on where in the text a draft is made.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        width = config.hidden_dim
        depths = range(config.draft_depth)
        self.gate = nn.ModuleList(Projection(2 * width, width) for _ in depths)
        self.up = nn.ModuleList(Projection(2 * width, width) for _ in depths)
        self.output = nn.ModuleList(Projection(width, width) for _ in depths)

    def forward(self, depth: int, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Predict from hidden (..., D) and the next token's embedding (..., D): draft hidden state (..., D)."""
        joined = torch.cat((fused_rmsnorm(hidden, None, self.eps), embedded), -1)
        branch = self.output[depth](fused_swiglu(self.gate[depth](joined), self.up[depth](joined)))
        return fused_rmsnorm(branch, None, self.eps)

    def step(self, depth: int, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Predict at decoding: hidden and embedded (B, N, D), B * N <= STEP_ROWS."""
        joined = torch.cat((fused_rmsnorm(hidden, None, self.eps), embedded), -1)
        branch = self.output[depth].step(fused_swiglu(self.gate[depth].step(joined), self.up[depth].step(joined)))
        return fused_rmsnorm(branch, None, self.eps)


class HybridLanguageModel(nn.Module):
    """The decoder of ModelConfig; float32 masters, computing in the type that PrecisionConfig names."""

    def __init__(self, config: ModelConfig, precision: PrecisionConfig | None = None) -> None:
        super().__init__()
        self.config = config
        choice = (precision or PrecisionConfig()).precision
        self._compute_type = COMPUTE_TYPES[choice]
        narrow = {"fp8": "fp8", "fp4": "fp4", "fp4-emulated": "fp4"}.get(choice, "wide")
        narrow_layers = config.layers - config.wide_tail_layers
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_dim))
        self.rotary = RotaryTable(config)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, narrow if i < narrow_layers else "wide") for i in range(config.layers)
        )
        self.final_norm = RootMeanSquareNorm(config.hidden_dim, config.rms_norm_eps)
        self.draft = DraftHead(config) if config.draft_depth else None

    # Sequences: training, prefill, evaluation

    def forward(
        self,
        ids: Tensor,
        *,
        doc_start: Tensor | None = None,
        carry: list[LayerCarry] | None = None,
        return_carry: bool = False,
        recompute: str = "none",
    ) -> HybridOutput:
        """Map ids (B, T) int64 to normalised hidden states (B, T, D).

        doc_start (B, T) int32: where each token's document starts in this segment, negative if in an earlier one
        (None = one document from token 0). carry: what an earlier segment returned; recompute: none, ffn or layer.
        """
        angles = self.rotary(self._positions(ids, doc_start))
        x = self.embed(ids)
        carries: list[LayerCarry | None] = []
        for i, layer in enumerate(self.layers):
            arguments = (x, angles, doc_start, carry[i] if carry else None, return_carry, recompute)
            if recompute == "layer" and torch.is_grad_enabled():
                x, layer_carry = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x, layer_carry = layer(*arguments)
            carries.append(layer_carry)
        return HybridOutput(self.final_norm(x), carries if return_carry else None)

    @property
    def compute_type(self) -> torch.dtype:
        """Type of activations: PrecisionConfig's, or float64 where the masters are (verification)."""
        return torch.float64 if self.embedding.dtype == torch.float64 else self._compute_type

    def embed(self, ids: Tensor) -> Tensor:
        """Look ids (...,) up on the sphere: (..., D) in the compute type."""
        return fused_rmsnorm(nn.functional.embedding(ids, self.embedding), None, self.config.rms_norm_eps).to(
            self.compute_type
        )

    def draft_hidden(self, hidden: Tensor, next_ids: Tensor) -> list[Tensor]:
        """Return the draft head's hidden states at every depth, each (B, T, D), for training.

        hidden (B, T, D) is detached; next_ids (depth, B, T): the token after each position, and the one after that
        (any valid id where there is none: the targets mask it).
        """
        drafts, h = [], hidden.detach()
        for depth in range(self.config.draft_depth):
            h = self.draft(depth, h, self.embed(next_ids[depth]))
            drafts.append(h)
        return drafts

    def _positions(self, ids: Tensor, doc_start: Tensor | None) -> Tensor:
        index = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return index if doc_start is None else index - doc_start

    # Parameters

    def parameter_table(self) -> list[ParameterSpec]:
        """List every parameter once with its role, fan-in and fan-out."""
        rows = []
        for name, parameter in self.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if name == "embedding":
                role = "embedding"
            elif parameter.dim() == 1:
                role = "vector"
            elif leaf in ("write_gate", "erase_gate", "decay_gate"):
                role = "gate"
            elif name.endswith("operator.output.weight") and self.layers[int(name.split(".")[1])].is_attention:
                role = "attention_output"
            else:
                role = "matrix"
            fan_out, fan_in = parameter.shape if parameter.dim() == 2 else (parameter.shape[0], 1)
            conditioned = role in ("matrix", "attention_output")
            rows.append(ParameterSpec(name, parameter, role, fan_in, fan_out, conditioned))
        return rows

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw every parameter: embedding N(0, 1), matrices N(0, 1/d_in), gates a tenth of that, offsets zero.

        One generator on the parameters' device, in the order of the table; on the meta device nothing is drawn.
        """
        if self.embedding.is_meta:
            return
        generator = torch.Generator(self.embedding.device).manual_seed(seed)
        for spec in self.parameter_table():
            if spec.role == "vector":
                spec.parameter.zero_()
                continue
            std = 1.0 if spec.role == "embedding" else spec.fan_in**-0.5
            spec.parameter.normal_(0.0, 0.1 * std if spec.role == "gate" else std, generator=generator)
