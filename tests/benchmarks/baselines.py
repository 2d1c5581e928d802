"""The models and optimizers that the product is compared with, at equal parameters, as their users would run them.

    dense    pre-norm decoder: rotary attention with normalised queries and keys, SwiGLU, tied embedding
    delta    gated delta networks, three layers to one of windowed attention: short convolutions, decay before erasure,
             gated output norm; plain residuals

Documents never see each other: doc_start (B, T) int32 is the index in its row at which a token's document starts. Both
compute in bf16 on CUDA and in the parameters' type on a CPU. Forward and backward neither wait for the device nor have
shapes that depend on data, so they can be compiled (torch.compile) and recorded as a graph; so can optimizer steps.

Public names: RootMeanSquareGain, Attention, GatedDelta, Decoder, DenseTransformer, GatedDeltaHybrid, build, adamw,
muon, dual. Shape letters: B rows, T tokens, D width, H heads, G key-value heads, K key dim, V value dim, C channels.
"""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from custom_kernels import chunk_associative_scan, windowed_attention
from hybrid_model import ParameterSpec
from model_config import ModelConfig, OptimizerConfig
from spectral_optimizer import DualSpectralOptimizer

EPS = 1e-6
TAPS = 4  # width of the short convolutions
LOWEST_LOG_DECAY = -5.0  # a token: 0.7 % of the state stays


class Shared(NamedTuple):
    """What all layers of one forward pass read."""

    cos: Tensor  # (T, K/2) f32
    sin: Tensor  # (T, K/2) f32
    doc_start: Tensor  # (B, T) int32
    window: int  # keys a query sees, itself included


class RootMeanSquareGain(nn.Module):
    """x / rms(x) * (1 + offset) over the last dimension, in float32; an offset, so that weight decay pulls it to 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (F.rms_norm(x.to(wide), x.shape[-1:], eps=EPS) * (1 + self.offset)).to(x.dtype)


# ---------------------------------------------------------------------------
# Attention


@torch.compiler.disable  # kernels of its own
def _attend(q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> Tensor:
    """The product's kernel, without anchors: FlexAttention's tiles for documents failed to compile on torch 2.11."""
    return windowed_attention(q, k, v, None, None, window=shared.window, anchors=0, doc_start=shared.doc_start)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, T, H, K) by its angles (T, K/2)."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """H query heads over G key-value heads, rotary, queries and keys normalised per head with a gain: (B, T, D)."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query = nn.Linear(width, heads * head_dim, bias=False)
        self.key = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.value = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.query_norm, self.key_norm = RootMeanSquareGain(head_dim), RootMeanSquareGain(head_dim)
        self.output = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, self.head_dim)) for m in (self.query, self.key, self.value))
        q, k = self.query_norm(q), self.key_norm(k)
        q, k = (_rotate(t, shared.cos, shared.sin) for t in (q, k))  # (B, T, H or G, K)
        return self.output(_attend(q, k, v, shared).flatten(2))


# ---------------------------------------------------------------------------
# Gated delta layer


def short_convolution(x: Tensor, taps: Tensor, doc_start: Tensor) -> Tensor:
    """SiLU of a causal depthwise convolution, x (B, T, C), taps (C * 4,), which sees its own document only."""
    index = torch.arange(x.shape[1], device=x.device)
    weight = taps.view(-1, TAPS).to(x.dtype)
    y = x * weight[:, 0]
    for back in range(1, TAPS):
        earlier = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        y = y + torch.where((index - back >= doc_start)[..., None], earlier, 0) * weight[:, back]
    return F.silu(y)


@torch.compiler.disable  # kernels of its own
def _scan(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gamma: Tensor, doc_start: Tensor) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        return chunk_associative_scan(q, k, v, beta, log_gamma, doc_start=doc_start)[0]


class GatedDelta(nn.Module):
    """S_t = gamma_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, y_t = S_t q_t; x and the result are (B, T, D).

    The product's scan erases before it decays: S_t = gamma S_{t-1} + b (w - S_{t-1} k) k^T. The same states follow from
    b = beta * gamma and w = v / gamma, which is why log gamma is bounded by LOWEST_LOG_DECAY.
    """

    def __init__(self, width: int, heads: int, key_dim: int, value_dim: int) -> None:
        super().__init__()
        self.heads = heads
        keys, values = heads * key_dim, heads * value_dim
        self.query, self.key = nn.Linear(width, keys, bias=False), nn.Linear(width, keys, bias=False)
        self.value, self.output_gate = nn.Linear(width, values, bias=False), nn.Linear(width, values, bias=False)
        self.output = nn.Linear(values, width, bias=False)
        self.erase_gate, self.decay_gate = nn.Linear(width, heads, bias=False), nn.Linear(width, heads, bias=False)
        self.query_taps, self.key_taps, self.value_taps = (
            nn.Parameter(torch.empty(TAPS * channels).uniform_(-(TAPS**-0.5), TAPS**-0.5))
            for channels in (keys, keys, values)
        )
        self.output_norm = RootMeanSquareGain(value_dim)
        step = torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        # offsets from the published start, which no weight decay should pull away
        self.rate_offset, self.step_offset = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))
        self.register_buffer("rate_start", torch.empty(heads).uniform_(1, 16).log())
        self.register_buffer("step_start", step.expm1().log())  # inverse of softplus

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        q, k, v = (
            short_convolution(matrix(x), taps, shared.doc_start).unflatten(-1, (self.heads, -1))  # (B, T, H, K)
            for matrix, taps in (
                (self.query, self.query_taps), (self.key, self.key_taps), (self.value, self.value_taps),
            )
        )  # fmt: skip
        wide = torch.promote_types(x.dtype, torch.float32)
        q, k = (F.normalize(t.to(wide), dim=-1, eps=EPS).to(v.dtype) for t in (q, k))
        beta, log_gamma = self._gates(x, wide)
        gamma = log_gamma.exp()
        y = _scan(q, k, (v / gamma[..., None]).to(v.dtype), beta * gamma, log_gamma, shared.doc_start)
        gate = self.output_gate(x).unflatten(-1, (self.heads, -1))
        return self.output((self.output_norm(y) * F.silu(gate)).flatten(2))

    def _gates(self, x: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return beta and log gamma (B, T, H), 32 bit."""
        rate = (self.rate_start + self.rate_offset).exp()
        step = F.softplus(self.decay_gate(x).to(wide) + self.step_start + self.step_offset)
        return self.erase_gate(x).to(wide).sigmoid(), (-rate * step).clamp(min=LOWEST_LOG_DECAY)


# ---------------------------------------------------------------------------
# Models


class DecoderLayer(nn.Module):
    """x + operator(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, width: int, ffn: int, operator: nn.Module) -> None:
        super().__init__()
        self.operator_norm, self.operator = RootMeanSquareGain(width), operator
        self.feed_forward_norm = RootMeanSquareGain(width)
        self.gate, self.up = nn.Linear(width, ffn, bias=False), nn.Linear(width, ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        x = x + self.operator(self.operator_norm(x), shared)
        y = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Tied embedding E, layers, norm; logits = h E^T. At most `context` tokens a row."""

    input_scale = 1.0  # on the embedding of a token, not on the head

    def __init__(
        self, vocab: int, width: int, ffn: int, operators: Iterable[nn.Module], head_dim: int, context: int,
        window: int | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.window = window or context
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(DecoderLayer(width, ffn, operator) for operator in operators)
        self.norm = RootMeanSquareGain(width)
        frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.arange(context, dtype=torch.float64)[:, None] * frequency
        # the row's index stands for the position in its document: only differences count
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, ids: Tensor, doc_start: Tensor) -> Tensor:
        """Map ids (B, T) int64 to normalised hidden states (B, T, D)."""
        tokens = ids.shape[1]
        shared = Shared(self.cos[:tokens], self.sin[:tokens], doc_start, self.window)
        x = self.embedding(ids) * self.input_scale
        with torch.autocast("cuda", torch.bfloat16, enabled=ids.is_cuda):
            x = x.bfloat16() if ids.is_cuda else x
            for layer in self.layers:
                x = layer(x, shared)
            return self.norm(x)

    def loss_rows(self, ids: Tensor, doc_start: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of every target (B, T) int64 in nats, (B * T,) float32; 0 where it is -100.

        32,768 tokens over 16,384 classes are 1 GiB of bf16 logits, kept, and as much of gradient: chunks recomputed in
        the backward pass would save that for 8 % more work at 35 M parameters.
        """
        hidden = self(ids, doc_start)
        return self._head_loss(hidden.flatten(0, 1), self.embedding.weight.to(hidden.dtype), targets.flatten())

    @staticmethod
    def _head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).float()
        return F.cross_entropy(logits, targets, reduction="none", ignore_index=-100)

    def compile_parts(self) -> None:
        """Compile each layer and the head by torch.compile: layers of one kind share one compilation a shape."""
        for layer in self.layers:
            layer.compile(dynamic=False)
        self._head_loss = torch.compile(self._head_loss, dynamic=False)

    def parameter_groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """Name every parameter once, by role: matrix (of the layers), embedding, vector."""
        groups: dict[str, dict[str, nn.Parameter]] = {"matrix": {}, "embedding": {}, "vector": {}}
        for name, parameter in self.named_parameters():
            role = "embedding" if name.startswith("embedding") else "matrix" if parameter.dim() == 2 else "vector"
            groups[role][name] = parameter
        return groups

    def parameter_table(self) -> list[ParameterSpec]:
        """List the parameters for the dual optimizer; convolutions, decay rates and gains are vectors."""
        rows = []
        for role, group in self.parameter_groups().items():
            for name, parameter in group.items():
                fan_out, fan_in = parameter.shape if parameter.dim() == 2 else (parameter.shape[0], 1)
                thin = name.endswith(("erase_gate.weight", "decay_gate.weight"))
                rows.append(ParameterSpec(name, parameter, "gate" if thin else role, fan_in, fan_out,
                                          role == "matrix" and not thin))  # fmt: skip
        return rows

    @torch.no_grad()
    def _draw(self, std: Callable[[ParameterSpec], float]) -> None:
        """Draw matrices and the embedding from a normal distribution; vectors keep what their modules gave them."""
        for spec in self.parameter_table():
            if spec.role != "vector":
                spec.parameter.normal_(0, std(spec))


class DenseTransformer(Decoder):
    """Attention in every layer, a key-value head to each query head. window = None: the whole document is seen.

    Matrices start at N(0, 0.02), those that end a branch at 0.02 / sqrt(2 layers).
    """

    def __init__(
        self, vocab: int, width: int, layers: int, heads: int, ffn: int, context: int,
        window: int | None = None,
    ) -> None:  # fmt: skip
        head_dim = width // heads
        operators = [Attention(width, heads, heads, head_dim) for _ in range(layers)]
        super().__init__(vocab, width, ffn, operators, head_dim, context, window)
        last = (".output.weight", ".down.weight")
        self._draw(lambda spec: 0.02 / (math.sqrt(2 * layers) if spec.name.endswith(last) else 1))


class GatedDeltaHybrid(Decoder):
    """Three gated delta layers to one of windowed attention, head counts and window as in the product.

    All matrices start at 1/sqrt(d_in), which steps of a fixed spectral norm suit at every width; the embedding too, and
    it enters at standard deviation 1, so that branches do not drown it. Worse in trials of 100 steps at width 192 (CPU,
    seeds differ by about 0.02 nats): the ends of branches scaled down as in the dense model by 0.02 to 0.03; those at
    zero by 0.10; an embedding of 0.02 that enters unscaled by 0.10.
    """

    def __init__(self, product: ModelConfig, ffn: int, context: int) -> None:
        width, heads = product.hidden_dim, product.recurrent_heads
        operators = [
            Attention(width, product.num_query_heads, product.num_kv_heads, product.head_dim)
            if product.is_attention(i)
            else GatedDelta(width, heads, product.recurrent_key_dim, product.recurrent_value_dim)
            for i in range(product.layers)
        ]
        super().__init__(product.vocab_size, width, ffn, operators, product.head_dim, context,
                         product.attention_window)  # fmt: skip
        self.input_scale = math.sqrt(width)
        self._draw(lambda spec: spec.fan_in**-0.5)


def build(kind: str, product: ModelConfig, context: int) -> Decoder:
    """Build a baseline of the product's width and depth within 2 % of its matrix parameters, on the CPU.

    kind: dense; dense-window, with the product's window; delta. Draws from torch's default generator.
    """
    window = product.attention_window if kind == "dense-window" else None

    def made(ffn: int) -> Decoder:
        if kind == "delta":
            return GatedDeltaHybrid(product, ffn, context)
        assert kind in ("dense", "dense-window"), kind
        return DenseTransformer(product.vocab_size, product.hidden_dim, product.layers, product.num_query_heads, ffn,
                                context, window)  # fmt: skip

    one = 3 * product.hidden_dim * product.layers  # parameters of a feed-forward width of 1
    with torch.device("meta"):
        fixed = sum(p.numel() for p in made(64).parameters()) - 64 * one
    # tiles of 64 are fastest; narrow models need a finer grid
    for multiple in (64, 16, 4):
        ffn = round((product.matrix_parameters - fixed) / one / multiple) * multiple
        count = fixed + one * ffn
        if abs(count / product.matrix_parameters - 1) < 0.02:
            return made(ffn)
    raise AssertionError(f"parameters must be within 2 % of {product.matrix_parameters:,}, got {count:,}")


# ---------------------------------------------------------------------------
# Optimizers

Run = Callable[[Hashable, Callable[[], Any]], Any]  # may record device work once and replay it


def _eager(key: Hashable, body: Callable[[], Any]) -> Any:
    return body()


class _Stepper:
    """Torch optimizers behind one step: rates, clipping of the whole gradient to norm 1, steps, gradients to zero.

    Rates are tensors on the device and gradients are zeroed in place, so that a recorded step reads new values.
    """

    def __init__(self, model: Decoder, rates: dict[str, float], orthogonal: bool) -> None:
        groups = {role: list(group.values()) for role, group in model.parameter_groups().items()}
        self.parameters = [p for group in groups.values() for p in group]
        device = self.parameters[0].device
        self.peaks = {role: rates[role] for role in groups}
        self.rates = {role: torch.zeros((), device=device) for role in groups}
        self.matrices = groups.pop("matrix") if orthogonal else []
        self.adam = torch.optim.AdamW(
            [dict(params=group, lr=self.rates[role], weight_decay=0.0 if role == "vector" else 0.1)
             for role, group in groups.items()],
            betas=(0.9, 0.95), eps=1e-8, fused=True, capturable=device.type == "cuda",
        )  # fmt: skip
        if orthogonal:
            # at rate 1 and without decay: _step_matrices applies both, as this class reads its rate on the host
            self.muon = torch.optim.Muon(
                self.matrices, lr=1.0, weight_decay=0.0, momentum=rates.get("momentum", 0.95), nesterov=True,
                adjust_lr_fn="match_rms_adamw",
            )  # fmt: skip

    def step(self, multiplier: float, fraction: float = 1.0, run: Run = _eager) -> None:
        """Move every parameter at its peak rate * multiplier; run may record the device work (fraction: see dual)."""
        for role, rate in self.rates.items():
            rate.fill_(self.peaks[role] * multiplier)
        run("optimizer", self._move)

    @torch.no_grad()
    def _move(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adam.step()
        if self.matrices:
            self._step_matrices()
        torch._foreach_zero_([p.grad for p in self.parameters])

    def _step_matrices(self) -> None:
        """W <- W - rate * (update + 0.1 W), the update being what a step at rate 1 subtracts."""
        before = [p.clone() for p in self.matrices]
        self.muon.step()
        torch._foreach_sub_(self.matrices, before)
        torch._foreach_add_(self.matrices, before, alpha=-0.1)
        torch._foreach_mul_(self.matrices, self.rates["matrix"])
        torch._foreach_add_(self.matrices, before)


class _DualStepper:
    """The product's own optimizer behind the same step; it clips by itself, embedding and vectors only."""

    def __init__(self, model: Decoder, rates: dict[str, float], config: OptimizerConfig) -> None:
        width = model.embedding.weight.shape[1]
        # `matrix` is the spectral norm of a step of a (D, D) matrix, whichever rule is in force
        config = replace(config, matrix_lr_base=rates["matrix"] * width / config.d_base, spectral_lr=rates["matrix"],
                         embedding_lr=rates["embedding"], vector_lr=rates["vector"])  # fmt: skip
        self.optimizer = DualSpectralOptimizer(
            model.parameter_table(), config, width, named_parameters=model.named_parameters()
        )
        self.parameters = list(model.parameters())

    def step(self, multiplier: float, fraction: float = 1.0, run: Run = _eager) -> None:
        """As above; fraction of all tokens done: sets the orthogonality penalty, which is over at 1."""
        self.optimizer.step(multiplier, fraction, run=run)
        torch._foreach_zero_([p.grad for p in self.parameters])


def adamw(model: Decoder, rates: dict[str, float]) -> _Stepper:
    """Decoupled weight decay Adam (beta2 0.95) for all; rates: peaks by role (matrix, embedding, vector)."""
    return _Stepper(model, rates, orthogonal=False)


def muon(model: Decoder, rates: dict[str, float]) -> _Stepper:
    """torch.optim.Muon for the matrices of the layers, the same Adam for the rest; rates as for adamw."""
    return _Stepper(model, rates, orthogonal=True)


def dual(model: Decoder, rates: dict[str, float], config: OptimizerConfig) -> _DualStepper:
    """The product's dual optimizer with its settings but for the three rates."""
    return _DualStepper(model, rates, config)
