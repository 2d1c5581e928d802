"""The hybrid language model: tied embedding, 3:1 recurrent and attention layers on a hypersphere, draft head.

The residual stream starts as sphere(E[id]) and returns to radius sqrt(D) after every addition:

    x <- sphere(x + norm_out(operator(norm_in(x))))          twice a layer: sequence operator, then SwiGLU

    logits = 16/D * norm(x) E^T = 16 cos(angle)               one tensor E for lookup and head, started at 1.0

The model maps ids to hidden states; the loss (training) and sampling (generation) belong to the engines. Sequences go
through `forward` (training, prefill, evaluation), draft-tree nodes through `nodes` and `commit` (decoding). A node's
results depend on its own path only, bit for bit in float32: not on how many nodes there are, nor which.

Public names: ParameterSpec, LayerCarry, DraftTree, NodeWrites, DecodeState, RecordedWork, HybridOutput,
SwiGLUFeedForward, DecoderLayer, StreamedDecoderLayer, DraftHead, HybridLanguageModel.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attention_layers import (
    ROTARY_POSITIONS,
    AttentionCarry,
    GroupedQueryAttentionBlock,
    NodeKeyValues,
    PagedKeyValueCache,
    RotaryAngles,
    RotaryTable,
)
from custom_kernels import (
    Projection,
    RootMeanSquareNorm,
    fused_residual_sphere,
    fused_rmsnorm,
    fused_swiglu,
    linear_product,
    step_together,
)
from model_config import ModelConfig, PrecisionConfig
from recurrent_layers import GatedDeltaRuleMatrixMemoryBlock, MemoryNodes, MemoryState, earlier_tokens

__all__ = [
    "DecodeState",
    "DecoderLayer",
    "DraftHead",
    "DraftTree",
    "HybridLanguageModel",
    "HybridOutput",
    "LayerCarry",
    "NodeWrites",
    "ParameterSpec",
    "RecordedWork",
    "StreamedDecoderLayer",
    "SwiGLUFeedForward",
]

LayerCarry = MemoryState | AttentionCarry  # a recurrent layer's, or an attention layer's window

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


class DraftTree(NamedTuple):
    """Shape of a draft tree: node 0 is the root, every parent comes before its children."""

    parents: Tensor  # (N,) int32, -1 at the root
    depths: Tensor  # (N,) int64, 0 at the root
    mask: Tensor  # (N, N) bool: [n, m] where m is n or an ancestor of n
    earlier: Tensor  # (N, 3) int64, the three tokens before each node on its path, see earlier_tokens

    @classmethod
    def from_parents(cls, parents: Sequence[int], device: torch.device | str = "cpu") -> "DraftTree":
        """Build the tree from each node's parent, -1 for the committed text; e.g. [-1, 0, 0, 1, 1, 2, 2]."""
        mask = torch.eye(len(parents), dtype=torch.bool)
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(f"a parent must be -1 or come before its node, got {parent} at node {node}")
            if parent >= 0:
                mask[node] |= mask[parent]
        rows = torch.tensor(parents, dtype=torch.int32)
        return cls(*(x.to(device) for x in (rows, mask.sum(1) - 1, mask, earlier_tokens(rows))))


class NodeWrites(NamedTuple):
    """What evaluated nodes would leave behind once committed: final hidden states and each layer's writes."""

    hidden: Tensor  # (B, N, D)
    layers: list[MemoryNodes | NodeKeyValues]


def _is_pool(name: str) -> bool:
    return name.endswith(("_codes", "_scale"))


@dataclass
class DecodeState:
    """Everything that a sequence carries from token to token; allocated once, changed in place."""

    layers: list[MemoryState | PagedKeyValueCache]
    hidden: Tensor  # (B, 1, D) final hidden state of the last committed token, zero before the first: draft head input
    length: Tensor  # (B,) int64 committed tokens

    @property
    def memories(self) -> list[MemoryState]:
        """What the recurrent layers hold, in order."""
        return [x for x in self.layers if isinstance(x, MemoryState)]

    @property
    def caches(self) -> list[PagedKeyValueCache]:
        """Pages of the attention layers, in order."""
        return [x for x in self.layers if isinstance(x, PagedKeyValueCache)]

    @property
    def state_bytes(self) -> int:
        return sum(memory.nbytes for memory in self.memories)

    @property
    def cache_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def reset(self) -> None:
        """Forget the sequence: no byte of it can be read afterwards."""
        for layer in self.layers:
            layer.reset()
        self.hidden.zero_()
        self.length.zero_()

    def copy(self) -> "DecodeState":
        """Return an independent copy."""
        return DecodeState([x.copy() for x in self.layers], self.hidden.clone(), self.length.clone())

    def take(self, row: int, other: "DecodeState") -> None:
        """Make one of this batch's sequences a copy of another state's only one."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.take(row, theirs)
        self.hidden[row] = other.hidden[0]
        self.length[row] = other.length[0]

    def stored(self) -> dict[str, Tensor]:
        """Return copies of what one sequence's state consists of, without pages that hold nothing yet."""
        assert len(self.length) == 1, "a batch has no one state to store"
        length, kept = int(self.length[0]), {}
        for name, value in self._own().items():
            # (pages, tokens of a page, ...); the first page belongs to nobody
            kept[name] = (value[: -(-length // value.shape[1]) + 1] if _is_pool(name) else value).clone()
        return kept

    def restore(self, stored: Mapping[str, Tensor]) -> None:
        """Take the tensors of `stored` in place; raises ValueError where they are of another model or cache."""
        mine = self._own()
        strange = sorted(mine.keys() ^ stored.keys())
        if strange:
            raise ValueError(f"a stored state must have this model's tensors, got {len(strange)} others: {strange[0]}")
        for name, value in mine.items():
            given = stored[name]
            fits = given.shape[1:] == value.shape[1:] and given.dtype == value.dtype
            if not fits or not (given.shape[0] <= value.shape[0] if _is_pool(name) else given.shape == value.shape):
                raise ValueError(
                    f"stored {name} must be {tuple(value.shape)} {value.dtype}, got {tuple(given.shape)} {given.dtype}"
                )
        for name, value in mine.items():
            value[: stored[name].shape[0]] = stored[name].to(value.device)
            value[stored[name].shape[0] :] = 0

    def _own(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.tensors().items() if not name.endswith("page_table")}

    def tensors(self) -> dict[str, Tensor]:
        """Name every stored tensor, e.g. for a comparison."""
        named = {"hidden": self.hidden, "length": self.length}
        for i, layer in enumerate(self.layers):
            named.update({f"layers.{i}.{name}": value for name, value in layer.tensors().items()})
        return named


class RecordedWork:
    """Runs device work that is the same at every call of its key: eagerly once, then recorded as a graph and replayed.

    A step of a small model is some thousand launches, which take the host longer than they take the device (35 M
    parameters on one H200: 167 k tokens/s launched one by one, 411 k replayed). The first call compiles kernels and
    sets libraries up, which no recording may hold; recording itself runs nothing. The graphs share one pool of memory,
    as they never run at once: what a call returns is valid until the next call of any key. Work of a new key drops all
    graphs, and they are recorded anew: its first run would need its memory beside theirs.
    """

    def __init__(self, active: bool) -> None:
        self.active = active
        self._ran: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool = torch.cuda.graph_pool_handle() if active else None

    def __call__(self, key: Hashable, body: Callable[[], Any]) -> Any:
        if not self.active:
            return body()
        if key not in self._ran:
            self.release()
            self._ran.add(key)
            return body()
        if key not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            # thread_local: the thread that prepares the next batch allocates pinned memory meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = body()
            self._graphs[key] = graph, result
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def release(self) -> None:
        """Forget the graphs: what runs outside them would need its memory beside theirs, twice the activations."""
        if self._graphs:
            torch.cuda.synchronize()
            self._graphs.clear()
            torch.cuda.empty_cache()
            # a result that is still held keeps its part of the old pool, which no later graph may join
            self._pool = torch.cuda.graph_pool_handle()

    def holds(self, kind: str) -> bool:
        """Say whether work of this kind, the first part of its key, is recorded."""
        return any(key[0] == kind for key in self._graphs)


class HybridOutput(NamedTuple):
    """Normalised hidden states (B, T, D) for the head, and what was asked for: layer carries, or the decode state."""

    hidden: Tensor
    carry: list[LayerCarry] | None
    state: DecodeState | None = None


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
        return self.down.step(fused_swiglu(*step_together(x, (self.gate, self.up))))


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
            branch, carry = self.operator(branch_input, memory=carry, doc_start=doc_start)
        x = self.add(x, branch, self.operator.output_norm)
        if recompute == "ffn" and torch.is_grad_enabled():
            branch = checkpoint(self._feed_forward_branch, x, use_reentrant=False, preserve_rng_state=False)
        else:
            branch = self._feed_forward_branch(x)
        return self.add(x, branch, self.feed_forward.output_norm), carry

    def prefill(self, x: Tensor, angles: RotaryAngles, memory: MemoryState | PagedKeyValueCache, stored: int) -> Tensor:
        """Run the next chunk x (B, T, D) of a prompt of which `stored` tokens are in memory; memory moves in place."""
        branch_input = self.operator_norm(x)
        if self.is_attention:
            branch = self.operator.prefill(branch_input, angles, memory, stored)
        else:
            branch, after = self.operator(branch_input, memory=memory)
            memory.assign(after)
        x = self.add(x, branch, self.operator.output_norm)
        return self.add(x, self._feed_forward_branch(x), self.feed_forward.output_norm)

    def nodes(
        self,
        x: Tensor,
        angles: RotaryAngles,
        memory: MemoryState | PagedKeyValueCache,
        tree: DraftTree,
        positions: Tensor,
    ) -> tuple[Tensor, MemoryNodes | NodeKeyValues]:
        """Evaluate draft-tree nodes x (B, N, D) at positions (B, N); memory stays as it is."""
        branch_input = self.operator_norm(x)
        if self.is_attention:
            branch, written = self.operator.nodes(branch_input, angles, memory, tree.mask, positions)
        else:
            branch, written = self.operator.nodes(branch_input, memory, tree.parents, tree.earlier)
        x = self.add(x, branch, self.operator.output_norm)
        branch = self.feed_forward.step(self.feed_forward_norm(x))
        return self.add(x, branch, self.feed_forward.output_norm), written

    def add(self, x: Tensor, branch: Tensor, output_norm: RootMeanSquareNorm) -> Tensor:
        """Return sphere(x + output_norm(branch))."""
        return fused_residual_sphere(x, branch, output_norm.offset, self.eps, start=output_norm.start)

    def _feed_forward_branch(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.feed_forward_norm(x))


class StreamedDecoderLayer(DecoderLayer):
    """A layer that holds its weights only while it runs, for machines where a few layers fit.

    borrow() gives a context in which they are there. commit needs none: it moves state alone.
    """

    borrow: Callable[[], AbstractContextManager[None]]

    def forward(self, *arguments: Any) -> tuple[Tensor, LayerCarry | None]:
        with self.borrow():
            return super().forward(*arguments)

    def prefill(self, *arguments: Any) -> Tensor:
        with self.borrow():
            return super().prefill(*arguments)

    def nodes(self, *arguments: Any) -> tuple[Tensor, MemoryNodes | NodeKeyValues]:
        with self.borrow():
            return super().nodes(*arguments)


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
        """Predict at decoding: hidden and embedded (B, N, D), B * N <= 128, each row alone."""
        joined = torch.cat((fused_rmsnorm(hidden, None, self.eps), embedded), -1)
        branch = self.output[depth].step(fused_swiglu(self.gate[depth].step(joined), self.up[depth].step(joined)))
        return fused_rmsnorm(branch, None, self.eps)


class HybridLanguageModel(nn.Module):
    """The decoder of ModelConfig; float32 masters, computing in the type that PrecisionConfig names."""

    def __init__(
        self, config: ModelConfig, precision: PrecisionConfig | None = None, *, streamed: bool = False
    ) -> None:
        super().__init__()
        self.config, self.streamed = config, streamed
        choice = (precision or PrecisionConfig()).precision
        self._compute_type = COMPUTE_TYPES[choice]
        narrow = {"fp8": "fp8", "fp4": "fp4", "fp4-emulated": "fp4"}.get(choice, "wide")
        narrow_layers = config.layers - config.wide_tail_layers
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_dim))
        self.rotary = RotaryTable(config)
        kind = StreamedDecoderLayer if streamed else DecoderLayer
        self.layers = nn.ModuleList(
            kind(config, i, narrow if i < narrow_layers else "wide") for i in range(config.layers)
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
        state: DecodeState | None = None,
    ) -> HybridOutput:
        """Map ids (B, T) int64 to normalised hidden states (B, T, D).

        doc_start (B, T) int32: where each token's document starts in this segment, negative if in an earlier one
        (None = one document from token 0). carry: what an earlier segment returned; recompute: none, ffn or layer.
        state: generation; the ids follow what it holds, it moves in place and is returned, and there is no gradient.
        """
        if state is not None:
            assert doc_start is None and carry is None and not return_carry, "a decode state replaces carries"
            return HybridOutput(self.prefill(ids, state), None, state)
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
        """Type of activations: PrecisionConfig's on a GPU, float32 on a CPU, float64 where the masters are."""
        if self.embedding.dtype == torch.float64:
            return torch.float64
        return torch.float32 if self.embedding.device.type == "cpu" else self._compute_type

    def embed(self, ids: Tensor) -> Tensor:
        """Look ids (...,) up on the sphere: (..., D) in the compute type."""
        return fused_rmsnorm(nn.functional.embedding(ids, self.embedding), None, self.config.rms_norm_eps).to(
            self.compute_type
        )

    def draft_hidden(self, hidden: Tensor, next_ids: Tensor) -> list[Tensor]:
        """Return the draft head's hidden states at every depth, each (B, P, D), for training.

        hidden (B, P, D), at P places of each row, is detached; next_ids (depth, B, P): the token after each place, and
        the one after that (any valid id where there is none: the targets mask it).
        """
        drafts, h = [], hidden.detach()
        for depth in range(self.config.draft_depth):
            h = self.draft(depth, h, self.embed(next_ids[depth]))
            drafts.append(h)
        return drafts

    # Generation: a prompt in chunks, then draft-tree nodes

    def decode_state(self, *, batch: int = 1, cache_bits: int = 8, max_length: int | None = None) -> DecodeState:
        """Allocate the state of `batch` sequences; max_length (tokens) bounds the cache under attention scope full."""
        config, device = self.config, self.embedding.device
        layers: list[MemoryState | PagedKeyValueCache] = [
            PagedKeyValueCache(
                config,
                batch=batch,
                bits=cache_bits,
                max_length=max_length,
                dtype=self.compute_type,
                device=device,
            )
            if layer.is_attention
            else layer.operator.empty(batch, self.compute_type, device)
            for layer in self.layers
        ]
        hidden = torch.zeros(batch, 1, config.hidden_dim, dtype=self.compute_type, device=device)
        return DecodeState(layers, hidden, torch.zeros(batch, dtype=torch.int64, device=device))

    @torch.no_grad()
    def prefill(self, ids: Tensor, state: DecodeState) -> Tensor:
        """Take the next chunk of a prompt, ids (B, T), in parallel: hidden states (B, T, D); state moves in place.

        All sequences of the batch hold the same number of tokens during prefill.
        """
        stored = int(state.length[0])
        positions = state.length[:, None] + torch.arange(ids.shape[1], device=ids.device)  # (B, T)
        angles = self.rotary(positions)
        x = self.embed(ids)
        for layer, memory in zip(self.layers, state.layers, strict=True):
            x = layer.prefill(x, angles, memory, stored)
        hidden = self.final_norm(x)
        state.hidden.copy_(hidden[:, -1:])
        state.length += ids.shape[1]
        return hidden

    @torch.no_grad()
    def nodes(self, ids: Tensor, state: DecodeState, tree: DraftTree) -> tuple[Tensor, NodeWrites]:
        """Evaluate tree nodes ids (B, N), N <= 8, after the state, which stays as it is: hidden (B, N, D), writes."""
        positions = state.length[:, None] + tree.depths  # (B, N)
        # nodes past the last position are never committed, but must be computable
        angles = self.rotary(positions.clamp(max=ROTARY_POSITIONS - 1))
        x = self.embed(ids)
        writes = []
        for layer, memory in zip(self.layers, state.layers, strict=True):
            x, written = layer.nodes(x, angles, memory, tree, positions)
            writes.append(written)
        hidden = self.final_norm(x)
        return hidden, NodeWrites(hidden, writes)

    @torch.no_grad()
    def commit(self, written: NodeWrites, state: DecodeState, path: Tensor) -> None:
        """Write the nodes of path (B, depth) int32, root first, -1 = end, into the state in place; none: no change."""
        for layer, memory, layer_written in zip(self.layers, state.layers, written.layers, strict=True):
            layer.operator.commit(layer_written, memory, path)
        accepted = (path >= 0).sum(1)  # (B,), 0 for a sequence that stays as it is
        last = path.gather(1, accepted[:, None].sub(1).clamp(min=0)).long().clamp(min=0)[..., None]  # (B, 1, 1)
        newest = written.hidden.gather(1, last.expand(-1, -1, written.hidden.shape[2]))
        state.hidden.copy_(torch.where(accepted[:, None, None] > 0, newest, state.hidden))
        state.length += accepted

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden (B, N, D), B * N <= 128, to logits (B, N, W) float32, each row alone.

        The sums stay unrounded, as in the training loss: 16-bit logits are off by up to 0.02 at 14 and tie.
        """
        return linear_product(hidden.to(self.embedding.dtype), self.embedding, wide=True) * self.config.logit_scale

    def _positions(self, ids: Tensor, doc_start: Tensor | None) -> Tensor:
        index = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return index if doc_start is None else index - doc_start

    # Parameters

    def seed_rounding(self, step: int) -> None:
        """Give every 4-bit projection its own noise for a step's stochastic rounding, the same in a recomputation."""
        narrow = [m for m in self.modules() if isinstance(m, Projection) and m.precision == "fp4"]
        for i, projection in enumerate(narrow):
            projection.rounding_seed.fill_(step * len(narrow) + i)

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
