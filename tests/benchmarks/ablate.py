"""What each reading of the specification costs or gains: one row each, in nats, against the product as it is.

    python tests/benchmarks/ablate.py --data data/tokens.bin --out ablated
    python tests/benchmarks/ablate.py --data data/tokens.bin --preset medium --only R8 conv --out ablated

A variant changes the product from outside, by settings or by replacing one function for the length of its run, so that
the product holds no switch for what it does not do. Positive nats: the variant is worse. The same seed, batches and
tokens for all; two seeds of one configuration differed by 0.04 at 6.6 M tokens in stream order.
"""

import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import learning  # noqa: E402

import attention_layers  # noqa: E402
import custom_kernels  # noqa: E402
import hybrid_model  # noqa: E402
import recurrent_layers  # noqa: E402
from custom_kernels import (  # noqa: E402
    Projection,
    RootMeanSquareNorm,
    fused_residual_sphere,
    fused_rmsnorm,
    fused_swiglu,
)
from model_config import Config, ModelConfig  # noqa: E402
from recurrent_layers import GatedDeltaRuleMatrixMemoryBlock as Memory  # noqa: E402
from train_engine import TrainingEngine  # noqa: E402


@dataclass(frozen=True)
class Variant:
    """A change of the product: settings, replaced attributes (owner, name, value), and a hand on the fresh engine."""

    reading: str
    name: str
    values: dict[str, object] = field(default_factory=dict)
    patches: tuple[tuple[object, str, object], ...] = ()
    prepare: Callable[[TrainingEngine], None] = lambda engine: None
    # settings as factors on the preset's own
    factors: dict[str, float] = field(default_factory=dict)


def _ungated(self: Memory, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    alpha, beta, log_gamma = _GATES(self, logits)
    return torch.ones_like(alpha), beta, log_gamma


_GATES = Memory._gates
_MEMORY_INIT = Memory.__init__


def _plain(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return x


class _Normalised(nn.Module):
    """The output projection of a memory layer behind a norm of each head."""

    def __init__(self, projection: nn.Module, heads: int, eps: float) -> None:
        super().__init__()
        self.weight, self.heads, self.eps = projection.weight, heads, eps

    def forward(self, y: Tensor) -> Tensor:
        y = fused_rmsnorm(y.unflatten(-1, (self.heads, -1)), None, self.eps).flatten(-2)
        return F.linear(y, self.weight.to(y.dtype))


def _normalised_init(self: Memory, config: ModelConfig, precision: str = "wide") -> None:
    _MEMORY_INIT(self, config, precision)
    self.output = _Normalised(self.output, self.heads, self.eps)


class _Gated(nn.Module):
    """The output projection of a memory layer behind SiLU of another projection of the layer's input."""

    def __init__(self, projection: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.projection, self.gate = projection, gate

    def forward(self, y: Tensor) -> Tensor:
        return self.projection(fused_swiglu(self.gate(self.x), y))


def _gated_init(self: Memory, config: ModelConfig, precision: str = "wide") -> None:
    _MEMORY_INIT(self, config, precision)
    self.output = _Gated(self.output, Projection(config.hidden_dim, self.heads * self.value_dim, precision))
    self.register_forward_pre_hook(lambda module, inputs: setattr(module.output, "x", inputs[0]))


def _constant_decay(heads: int) -> Tensor:
    """Biases of one half-life for every head: the geometric middle of the spectrum, 1,024 tokens."""
    middle = math.sqrt(recurrent_layers.SHORTEST_HALF_LIFE * recurrent_layers.LONGEST_HALF_LIFE)
    return torch.full((heads,), math.log(math.expm1(math.log(2) / middle)))


def _spectrum(shortest: float, longest: float) -> Callable[[int], Tensor]:
    def biases(heads: int) -> Tensor:
        ends = {"SHORTEST_HALF_LIFE": shortest, "LONGEST_HALF_LIFE": longest}
        with mock.patch.multiple(recurrent_layers, **ends):
            return _HALF_LIVES(heads)

    return biases


_HALF_LIVES = recurrent_layers.half_life_biases


def _no_sphere(residual: Tensor, branch: Tensor, offset: Tensor, eps: float, *, start: float) -> Tensor:
    return residual + fused_rmsnorm(branch, offset, eps, start=start)


def _no_output_norm(residual: Tensor, branch: Tensor, offset: Tensor, eps: float, *, start: float) -> Tensor:
    return fused_rmsnorm(residual + branch, None, eps)


def _neither(residual: Tensor, branch: Tensor, offset: Tensor, eps: float, *, start: float) -> Tensor:
    return residual + branch


def _sphere_of_gain(residual: Tensor, branch: Tensor, offset: Tensor, eps: float, *, start: float) -> Tensor:
    return fused_residual_sphere(residual, branch, start * offset, eps)


def _scaled_logits(factor: float) -> tuple[object, str, object]:
    return ModelConfig, "logit_scale", property(lambda self: factor * 16.0 / self.hidden_dim)


def _full_gates(engine: TrainingEngine) -> None:
    """Gate matrices start at 1/sqrt(d_in), like every other matrix, instead of a tenth of it."""
    with torch.no_grad():
        for spec in engine.model.parameter_table():
            if spec.role == "gate":
                spec.parameter.mul_(10)


def _gains_from_zero(engine: TrainingEngine) -> None:
    """With the patches of R11's variant: gains and biases are the parameters themselves, so decay pulls them to 0."""
    with torch.no_grad():
        for module in engine.model.modules():
            if isinstance(module, RootMeanSquareNorm):
                module.offset.fill_(1.0)
            if isinstance(module, Memory):
                module.write_offset.fill_(2.0)
                module.decay_offset.copy_(module.decay_bias)
                module.decay_bias.zero_()


VARIANTS = (
    Variant("R3", "no write gate (alpha = 1)", patches=((Memory, "_gates", _ungated),)),
    Variant("R4", "memory output normalised per head", patches=((Memory, "__init__", _normalised_init),)),
    Variant("R4", "attention q, k not normalised", patches=((attention_layers, "fused_rmsnorm", _plain),)),
    Variant("R5", "one half-life, 1,024 tokens", patches=((recurrent_layers, "half_life_biases", _constant_decay),)),
    *(
        Variant("R5", f"half-lives {shortest:g} ... {longest:,}",
                patches=((recurrent_layers, "half_life_biases", _spectrum(shortest, longest)),))
        for shortest, longest in ((0.25, 1048576), (8, 1048576), (1, 4096))
    ),
    Variant("R5", "gates start at 1/sqrt(d_in)", prepare=_full_gates),
    Variant("R6", "no sphere", patches=((hybrid_model, "fused_residual_sphere", _no_sphere),)),
    Variant("R6", "no output norm", patches=((hybrid_model, "fused_residual_sphere", _no_output_norm),)),
    Variant("R6", "neither sphere nor output norm", patches=((hybrid_model, "fused_residual_sphere", _neither),)),
    Variant("R7", "logits x 1/2", patches=(_scaled_logits(0.5),)),
    Variant("R7", "logits x 2", patches=(_scaled_logits(2.0),)),
    Variant("R8", "printed rule", {"lr_rule": "printed"}),
    Variant("R8", "printed, attention output at 256/d_model", {"lr_rule": "printed", "attention_output_rule": "width"}),
    Variant("R9", "no cubic steps", patches=((custom_kernels, "_NS_CUBIC_STEPS", 0),)),
    Variant("R9", "no Nesterov", {"nesterov": False}),
    Variant("R9", "momentum 0.9", {"momentum": 0.9}),
    Variant("R10", "no conditioning", {"spectral_lambda": 0.0}),
    Variant("R10", "conditioning x 1/4", factors={"spectral_lambda": 0.25}),
    Variant("R10", "conditioning x 4", factors={"spectral_lambda": 4.0}),
    Variant(
        "R11", "decay pulls gains and biases to zero", prepare=_gains_from_zero,
        patches=(
            (RootMeanSquareNorm, "forward", lambda self, x: fused_rmsnorm(x, self.start * self.offset, self.eps)),
            (hybrid_model, "fused_residual_sphere", _sphere_of_gain),
            (recurrent_layers, "ALPHA_BIAS", 0.0),
        ),
    ),
    *(Variant("R12", f"decay over the last {100 * share:.0f} %",
              {"decay_fraction": share, "stable_fraction": 0.98 - share}) for share in (0.28, 0.6, 0.9)),
    Variant("average", "no terminal average", {"average_fraction": 0.0}),
    Variant("average", "average over the last 15 %", {"average_fraction": 0.15}),
    Variant("draft", "no draft losses", {"draft_loss_weight_1": 0.0, "draft_loss_weight_2": 0.0}),
    Variant("draft", "draft losses x 3", factors={"draft_loss_weight_1": 3.0, "draft_loss_weight_2": 3.0}),
    Variant("conv", "no convolution", {"conv_width": 0}),
    Variant("conv", "2 taps", {"conv_width": 2}),
    Variant("gate", "SiLU gate on the memory's output", patches=((Memory, "__init__", _gated_init),)),
)  # fmt: skip


def run_variant(variant: Variant, config: Config, corpus: learning.Corpus, results: learning.Results) -> learning.Run:
    """Train one variant with its patches in place."""
    name = f"{variant.reading}: {variant.name}"
    flat = {name: value for section in (config.optimizer, config.train) for name, value in _fields(section).items()}
    scaled = {name: flat[name] * factor for name, factor in variant.factors.items()}
    config = config.with_values({**variant.values, **scaled})
    with ExitStack() as stack:
        for owner, attribute, value in variant.patches:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        train = partial(learning.train_product, config, corpus, name=name, prepare=variant.prepare)
        return results.once(name, config, train)


def _fields(section: object) -> dict[str, object]:
    return {name: getattr(section, name) for name in section.__dataclass_fields__}


def main() -> None:
    parser = learning.parser(__doc__, tokens=6_553_600)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--only", nargs="+", choices=sorted({v.reading for v in VARIANTS}), help="readings to run")
    arguments = parser.parse_args()
    learning.CURVE_POINTS = 1
    corpus, out = learning.begin(arguments)
    config = learning.product_config(arguments.preset, corpus, tokens=arguments.tokens, context=arguments.context,
                                     seed=arguments.seed)  # fmt: skip
    results = learning.Results(out / f"ablate-{arguments.preset}.jsonl", corpus)
    results.once("as it is", config, partial(learning.train_product, config, corpus, name="as it is"))
    for variant in VARIANTS:
        if arguments.only is None or variant.reading in arguments.only:
            run_variant(variant, config, corpus, results)
    runs = results.runs
    print(f"\n{'change':44s} {'nats':>8s} {'cost':>8s}")
    for run in runs:
        print(f"{run.name:44s} {run.nats:8.4f} {run.nats - runs[0].nats:+8.4f}")


if __name__ == "__main__":
    main()
