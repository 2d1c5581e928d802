"""The dual optimizer: orthogonalised momentum for matrices, decoupled-decay adaptive moments for the rest.

It knows parameters by the model's table (name, tensor, role, fans) and nothing of layers, losses, ranks or schedules:
the caller reduces gradients over ranks and gives the schedule's multiplier m and the fraction of tokens done.

Matrix group (every 2-D parameter but the embedding; W is (R, C) = (fan_out, fan_in), G its gradient):

    B <- momentum * B + G                       no weight decay
    O  = polar factor of G + momentum * B       Newton-Schulz, spectral norm 1; of B alone without `nesterov`
    W <- W - m * rate * (O + lambda * grad P)   P = ||W^T W - I||_F^2, grad P = 4 W (W^T W - I), decoupled from B

Adaptive group (1-D parameters, stored as offsets so that decay pulls them home, and the tied embedding):

    g  = G * min(1, clip_norm / ||group||)
    W <- W - m * rate * (decay * W + m1_hat / (sqrt(m2_hat) + eps))

rate, by `lr_rule`:  printed   matrix_lr_base * d_base / fan_in,  attention output matrix_lr_base / d_model
                     spectral  spectral_lr * sqrt(fan_out / fan_in)

Sources: "Old Optimizer, New Norm" (arXiv:2409.20325, orthogonalised momentum by Newton-Schulz); "Functions of Matrices"
(2008), chapter 8 (polar decomposition); "Decoupled Weight Decay Regularization" (arXiv:1711.05101); "Tensor Programs V"
(arXiv:2203.03466, maximal update parametrisation); "A Spectral Condition for Feature Learning" (arXiv:2310.17813);
"Can We Gain More from Orthogonality Regularizations in Training Deep CNNs?" (arXiv:1810.09102).

In file order: spectral_intensity, matrix_rate, soft_orthogonality, soft_orthogonality_gradient, StepReport,
DualSpectralOptimizer. Shape letters: n matrices in a stack, R rows, C columns, E elements.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from custom_kernels import newton_schulz_orthogonalize
from hybrid_model import ParameterSpec
from model_config import OptimizerConfig

__all__ = [
    "DualSpectralOptimizer",
    "StepReport",
    "matrix_rate",
    "soft_orthogonality",
    "soft_orthogonality_gradient",
    "spectral_intensity",
]

# which optimizer a role goes to
_GROUP_OF_ROLE = {
    "matrix":           "orthogonal",
    "attention_output": "orthogonal",
    "gate":             "orthogonal",
    "embedding":        "adaptive",
    "vector":           "adaptive",
}  # fmt: skip

# elements worked on at once: 256 MiB in float32, so that the about eight temporaries of a slice stay near 2 GiB
# whatever the model's size, while all equal matrices of a small model still share one launch
_SLICE_ELEMENTS = 2**26

_NAMES_SHOWN = 10


# ---------------------------------------------------------------------------
# Pure functions


def spectral_intensity(tokens_fraction: float, config: OptimizerConfig) -> float:
    """Give lambda of the orthogonality penalty after a fraction of the token budget: held, then cosine to zero."""
    if tokens_fraction >= config.spectral_end_fraction:
        return 0.0
    if tokens_fraction <= config.spectral_hold_fraction:
        return config.spectral_lambda
    span = config.spectral_end_fraction - config.spectral_hold_fraction
    progress = (tokens_fraction - config.spectral_hold_fraction) / span
    return config.spectral_lambda * 0.5 * (1 + math.cos(math.pi * progress))


def matrix_rate(spec: ParameterSpec, config: OptimizerConfig, d_model: int) -> float:
    """Give the peak spectral norm of one step of a matrix (schedule multiplier 1)."""
    if config.lr_rule == "spectral":
        return config.spectral_lr * math.sqrt(spec.fan_out / spec.fan_in)
    if spec.role == "attention_output" and config.attention_output_rule == "printed":
        return config.matrix_lr_base / d_model
    return config.matrix_lr_base * config.d_base / spec.fan_in


def soft_orthogonality(weight: Tensor) -> Tensor:
    """Compute ||W^T W - I||_F^2 of each matrix: (..., R, C) -> (...), in the type of `weight`."""
    rows, columns = weight.shape[-2:]
    gram = weight @ weight.mT if rows < columns else weight.mT @ weight
    excess = gram - torch.eye(gram.shape[-1], dtype=weight.dtype, device=weight.device)
    # a wide matrix: W^T W has columns - rows further eigenvalues, all zero, and each is 1 away from the identity
    return excess.square().sum((-2, -1)) + max(columns - rows, 0)


def soft_orthogonality_gradient(weight: Tensor) -> Tensor:
    """Compute 4 W (W^T W - I), the gradient of `soft_orthogonality`: (..., R, C) -> (..., R, C), same type."""
    rows, columns = weight.shape[-2:]
    # bf16 factors leave 0.4 % of W W^T W as rounding noise, and a step takes about 1 % of that; the difference to W is
    # in the type of `weight`
    low = weight.to(_product_type(weight))
    cubic = (low @ low.mT) @ low if rows < columns else low @ (low.mT @ low)
    return 4 * (cubic.to(weight.dtype) - weight)


def _product_type(x: Tensor) -> torch.dtype:
    """bf16 for the matrix products of a float32 CUDA tensor: exact float32 would leave the tensor cores unused."""
    return torch.bfloat16 if x.is_cuda and x.dtype == torch.float32 else x.dtype


def _adaptive(
    weight: Tensor,  # (E,) f32
    grad: Tensor,  # (E,) f32, clipped
    first: Tensor,  # (E,) f32
    second: Tensor,  # (E,) f32
    steps: Tensor,  # 0-D int64, this step included
    rate: Tensor,  # 0-D f32
    config: OptimizerConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """m1' = b1 m1 + (1-b1) g, m2' = b2 m2 + (1-b2) g^2, W' = W - rate (decay W + m1_hat / (sqrt(m2_hat) + eps))."""
    first = first.lerp(grad, 1 - config.adam_beta1)
    second = second.lerp(grad.square(), 1 - config.adam_beta2)
    # float64, since 1 - 0.95^n loses digits for small n in float32
    first_share = 1 - torch.pow(config.adam_beta1, steps.double())
    second_share = 1 - torch.pow(config.adam_beta2, steps.double())
    direction = (first / first_share) / ((second / second_share).sqrt_() + config.adam_eps)
    return weight * (1 - rate * config.weight_decay) - rate * direction, first, second


def _total_norm(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Euclidean norm over all elements, 0-D f32: rows first, so that no float32 sum is over more than a row."""
    rows = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).reshape(-1) for x in tensors]
    return torch.linalg.vector_norm(torch.cat(rows)) if rows else torch.zeros((), device=device)


def _ratio(squares: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Sum the (change, weight) squares of all slices: ||change|| / ||weight||, 0-D f32."""
    change = sum(change for change, _ in squares)
    weight = sum(weight for _, weight in squares)
    return (change / weight.clamp_min(torch.finfo(torch.float32).tiny)).sqrt()


# ---------------------------------------------------------------------------
# Table and slices


@dataclass(frozen=True, slots=True)
class _MatrixSlice:
    """Matrices of one shape and one rate that are stepped as one (n, R, C) stack."""

    names: tuple[str, ...]
    rate: float
    conditioned: bool


@dataclass(frozen=True, slots=True)
class _FlatSlice:
    """Ranges (name, start, stop) of flattened parameters of one rate that are stepped as one (E,) vector."""

    pieces: tuple[tuple[str, int, int], ...]
    rate: float


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"[{', '.join(names[:_NAMES_SHOWN])}]{more}"


def _require_empty(rule: str, strays: Iterable[str]) -> None:
    strays = list(strays)
    if strays:
        raise ValueError(f"{rule}, got {_listed(strays)}")


def _repeated(keys: Sequence[object], names: Sequence[str]) -> list[str]:
    seen: set[object] = set()
    return [name for key, name in zip(keys, names, strict=True) if key in seen or seen.add(key)]


def _fits_role(spec: ParameterSpec) -> bool:
    if spec.role == "vector":
        return spec.parameter.ndim <= 1
    if spec.role == "embedding":
        return spec.parameter.ndim == 2
    return tuple(spec.parameter.shape) == (spec.fan_out, spec.fan_in)


def _check_table(table: Sequence[ParameterSpec], named_parameters: Iterable[tuple[str, Tensor]] | None) -> None:
    names = [spec.name for spec in table]
    if not table:
        raise ValueError("the parameter table must hold at least one parameter, got none")
    _require_empty(
        f"the role of a parameter must be one of {', '.join(_GROUP_OF_ROLE)}",
        (f"{spec.name} ({spec.role})" for spec in table if spec.role not in _GROUP_OF_ROLE),
    )
    _require_empty("a parameter must be in exactly one group; its name must occur once", _repeated(names, names))
    tensors = [id(spec.parameter) for spec in table]
    _require_empty("a parameter must be in exactly one group; its tensor must occur once", _repeated(tensors, names))
    if named_parameters is not None:
        actual = {(name, id(parameter)) for name, parameter in named_parameters}
        strays = actual ^ set(zip(names, tensors, strict=True))
        _require_empty("every parameter of the model must be in exactly one group", {name for name, _ in strays})
    _require_empty(
        "a vector must have at most one dimension, an embedding two, a matrix the shape (fan_out, fan_in)",
        (f"{spec.name} {tuple(spec.parameter.shape)}" for spec in table if not _fits_role(spec)),
    )
    device = table[0].parameter.device
    _require_empty(
        f"parameters must be contiguous, trainable float32 masters with at least one element on {device}",
        (spec.name for spec in table if not _is_master(spec.parameter, device)),
    )


def _is_master(parameter: Tensor, device: torch.device) -> bool:
    filled = parameter.is_contiguous() and parameter.numel() > 0
    return filled and parameter.requires_grad and parameter.dtype == torch.float32 and parameter.device == device


def _check_contraction(specs: Iterable[ParameterSpec], config: OptimizerConfig, d_model: int) -> None:
    """Refuse rates at which the conditioning would throw singular values away from 1 instead of pulling them in.

    With c = 4 lambda rate, one step maps a singular value s to s - c s (s^2 - 1), so its distance to 1 is multiplied by
    1 - c s (s + 1): a contraction iff c s (s + 1) < 2, without overshoot iff < 1. A Gaussian start of standard
    deviation 1/sqrt(fan_in) reaches s = 1 + sqrt(fan_out / fan_in): 2 for a square matrix, 2.75 for 3584 -> 11008.
    There the defaults (rate 0.06, lambda 0.05) give c s (s + 1) = 0.07 and 0.22. Steps of spectral norm `rate` cannot
    lift s past the larger of that start and the balance s (s^2 - 1) = 1 / (4 lambda), 1.9 at lambda 0.05; where lambda
    anneals, the balance grows but c s^2 falls with it, so the bound at the start holds for the whole run.
    """
    for spec in specs:
        largest = 1 + math.sqrt(spec.fan_out / spec.fan_in)
        factor = 4 * config.spectral_lambda * matrix_rate(spec, config, d_model) * largest * (largest + 1)
        if spec.conditioned and factor >= 2:
            raise ValueError(
                f"spectral_lambda {config.spectral_lambda} times the rate of {spec.name} must keep "
                f"4 lambda rate s (s + 1) under 2 at s = 1 + sqrt(fan_out / fan_in) = {largest:.2f}, got {factor:.2f}"
            )


def _matrix_slices(specs: Sequence[ParameterSpec], config: OptimizerConfig, d_model: int) -> list[_MatrixSlice]:
    def key(spec: ParameterSpec) -> tuple[int, int, float, bool]:
        return spec.fan_out, spec.fan_in, matrix_rate(spec, config, d_model), spec.conditioned

    slices = []
    # sorted is stable: within a slice the table's order stays, whatever the hash seed
    for (rows, columns, rate, conditioned), members in groupby(sorted(specs, key=key), key=key):
        names = [spec.name for spec in members]
        count = max(1, _SLICE_ELEMENTS // (rows * columns))
        for start in range(0, len(names), count):
            slices.append(_MatrixSlice(tuple(names[start : start + count]), rate, conditioned))
    return slices


def _flat_slices(specs: Sequence[ParameterSpec], rate: float) -> Iterator[_FlatSlice]:
    pieces, room = [], _SLICE_ELEMENTS
    for spec in specs:
        start, size = 0, spec.parameter.numel()
        while start < size:
            stop = min(size, start + room)
            pieces.append((spec.name, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield _FlatSlice(tuple(pieces), rate)
                pieces, room = [], _SLICE_ELEMENTS
    if pieces:
        yield _FlatSlice(tuple(pieces), rate)


# ---------------------------------------------------------------------------
# Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one optimizer step saw. Tensors are 0-D on the parameters' device, so that reading them is the only wait."""

    step: int
    """Number of this call of `step`, from 1, skipped ones included; kept over save and load."""
    finite: Tensor
    """bool: both gradient norms were finite in float32 (below 1.8e19); where it is False only `step` has changed."""
    matrix_gradient_norm: Tensor
    """float32, of all matrices' gradients."""
    adaptive_gradient_norm: Tensor
    """float32, of the embedding's and the vectors' gradients before clipping."""
    missing: tuple[str, ...]
    """Parameters whose gradient was None and was read as zero."""
    matrix_update_ratio: Tensor | None
    """float32, ||change|| / ||weight|| over the group, on request."""
    adaptive_update_ratio: Tensor | None
    """float32, the same over the embedding and the vectors."""

    def require_finite(self) -> None:
        """Raise FloatingPointError with the step's number if the step was skipped; waits for the device."""
        if not self.finite.item():
            raise FloatingPointError(
                f"optimizer step {self.step}: gradient norms must be finite, got {self.matrix_gradient_norm.item()} "
                f"(matrices) and {self.adaptive_gradient_norm.item()} (embedding and vectors); nothing was changed"
            )


class DualSpectralOptimizer:
    """Orthogonalised momentum for matrices, decoupled-decay adaptive moments for the embedding and 1-D parameters.

    Args:
        table: the model's parameters, each once; float32 masters on one device. `matrix`, `attention_output` and
            `gate` go to the matrix group, `embedding` and `vector` to the adaptive one.
        config: rates, moments, penalty.
        d_model: width of the residual stream; the printed rate of the attention output uses it.
        named_parameters: `model.named_parameters()`; if given, the table must hold exactly these.

    State is float32: one momentum a matrix (4 bytes an element), two moments an adaptive parameter (8 bytes). Equal
    matrices are stacked, at most 2^26 elements at once. Gradients are read, never changed; they may be bf16 or float32.

    Raises:
        ValueError: a stray, repeated or misshapen parameter (named), or a penalty too strong for its rate.
    """

    def __init__(
        self,
        table: Sequence[ParameterSpec],
        config: OptimizerConfig,
        d_model: int,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        _check_table(table, named_parameters)
        matrices = [spec for spec in table if _GROUP_OF_ROLE[spec.role] == "orthogonal"]
        adaptive = [spec for spec in table if _GROUP_OF_ROLE[spec.role] == "adaptive"]
        _check_contraction(matrices, config, d_model)
        self._config = config
        self._parameters = {spec.name: spec.parameter for spec in table}
        self._device = table[0].parameter.device
        self._momentum = {spec.name: torch.zeros_like(spec.parameter, requires_grad=False) for spec in matrices}
        self._first = {spec.name: torch.zeros_like(spec.parameter, requires_grad=False) for spec in adaptive}
        self._second = {spec.name: torch.zeros_like(spec.parameter, requires_grad=False) for spec in adaptive}
        self._calls = 0
        self._applied = torch.zeros((), dtype=torch.int64, device=self._device)
        # schedule multiplier and penalty intensity of this step: on the device, so that a recorded step reads new ones
        self._scalars = torch.zeros(2, device=self._device)
        self._matrix_slices = _matrix_slices(matrices, config, d_model)
        self._flat_slices = [
            *_flat_slices([spec for spec in adaptive if spec.role == "embedding"], config.embedding_lr),
            *_flat_slices([spec for spec in adaptive if spec.role == "vector"], config.vector_lr),
        ]

    @torch.no_grad()
    def step(
        self,
        lr_multiplier: float,
        tokens_fraction: float,
        *,
        norms: bool = False,
        run: Callable[[Hashable, Callable[[], tuple]], tuple] = lambda key, body: body(),
    ) -> StepReport:
        """Move every parameter once, or none of them where a gradient norm is not finite.

        Args:
            lr_multiplier: the schedule's factor on every rate, >= 0.
            tokens_fraction: tokens done / token budget, >= 0; sets the penalty's intensity.
            norms: also measure the update / weight ratio of both groups (one more read of each slice).
            run: takes a key and the step's device work, which is the same at every call of that key, and returns what
                the work returns: it may record the work once and replay it.

        A gradient of None counts as zero: momentum and moments decay, and the parameter goes on by them.

        Whether a step is finite stays a 0-D flag on the device that every write below selects by: the host never waits
        here, runs ahead of the device, and reads the flag when it logs. The price is one select a slice, under 1 % of
        the orthogonalisation, and that a skipped step costs as much as a good one. A norm past float32's range counts
        as not finite.
        """
        if not (0 <= lr_multiplier < math.inf and 0 <= tokens_fraction < math.inf):
            raise ValueError(f"lr_multiplier and tokens_fraction must be >= 0, got {lr_multiplier}, {tokens_fraction}")
        strength = spectral_intensity(tokens_fraction, self._config)
        for place, value in zip(self._scalars, (lr_multiplier, strength), strict=True):
            place.fill_(value)  # a copy would wait for the device
        self._calls += 1
        outcome = run(("optimizer", strength > 0, norms), lambda: self._move(strength > 0, norms))
        finite, matrix_norm, adaptive_norm, matrix_ratio, adaptive_ratio = outcome
        return StepReport(
            step=self._calls,
            finite=finite,
            matrix_gradient_norm=matrix_norm,
            adaptive_gradient_norm=adaptive_norm,
            missing=tuple(name for name, parameter in self._parameters.items() if parameter.grad is None),
            matrix_update_ratio=matrix_ratio,
            adaptive_update_ratio=adaptive_ratio,
        )

    def _move(self, conditioning: bool, norms: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Do a step's device work: the flag, both gradient norms, both update ratios if asked for."""
        multiplier, strength = self._scalars.unbind()
        # 1. norms of both groups before anything moves, the flag, and the adaptive group's clip
        matrix_norm = self._gradient_norm(self._momentum)
        adaptive_norm = self._gradient_norm(self._first)
        finite = matrix_norm.isfinite() & adaptive_norm.isfinite()
        clip = (self._config.clip_norm / adaptive_norm).clamp(max=1.0)
        self._applied += finite
        # 2.-5. momentum, orthogonalisation, update and conditioning, slice by slice
        intensity = strength if conditioning else None
        matrix_squares = [self._step_matrices(x, multiplier, intensity, finite, norms) for x in self._matrix_slices]
        # 6. adaptive moments
        adaptive_squares = [self._step_adaptive(x, multiplier, clip, finite, norms) for x in self._flat_slices]
        return (
            finite,
            matrix_norm,
            adaptive_norm,
            _ratio(matrix_squares) if norms and matrix_squares else None,
            _ratio(adaptive_squares) if norms and adaptive_squares else None,
        )

    @torch.no_grad()
    def spectral_penalty(self, tokens_fraction: float) -> Tensor:
        """Compute lambda * sum ||W^T W - I||_F^2 over the conditioned matrices, 0-D f32, for logging only."""
        intensity = spectral_intensity(tokens_fraction, self._config)
        total = torch.zeros((), device=self._device)
        for part in self._matrix_slices:
            if part.conditioned and intensity > 0:
                total += soft_orthogonality(torch.stack([self._parameters[name] for name in part.names])).sum()
        return intensity * total

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state by parameter name (`momentum/NAME`, ...): the live tensors, not copies."""
        return {"calls": torch.tensor(self._calls), "applied": self._applied, **self._named_state()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a saved state in; raises ValueError naming missing, unexpected and misshapen entries, changing none."""
        own = self.state_dict()
        shared = own.keys() & state.keys()
        _require_empty("the optimizer state must hold every entry of this table; missing", own.keys() - shared)
        _require_empty("the optimizer state must hold no entry outside this table", state.keys() - shared)
        _require_empty(
            "the optimizer state must have the shapes and types of this table",
            (
                f"{name} {tuple(state[name].shape)} {state[name].dtype}"
                for name in shared
                if (state[name].shape, state[name].dtype) != (own[name].shape, own[name].dtype)
            ),
        )
        self._calls = int(state["calls"])
        for name in own.keys() - {"calls"}:
            own[name].copy_(state[name])

    def _named_state(self) -> dict[str, Tensor]:
        kinds = {"momentum": self._momentum, "first_moment": self._first, "second_moment": self._second}
        return {f"{kind}/{name}": x for kind, tensors in kinds.items() for name, x in tensors.items()}

    def _gradient_norm(self, names: Iterable[str]) -> Tensor:
        grads = (self._parameters[name].grad for name in names)
        return _total_norm((grad for grad in grads if grad is not None), self._device)

    def _gradient(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        if parameter.grad is None:
            # one zero seen at every place: no memory even for the embedding
            return torch.zeros((), device=self._device).expand(parameter.shape)
        return parameter.grad

    def _step_matrices(
        self, part: _MatrixSlice, multiplier: Tensor, intensity: Tensor | None, finite: Tensor, norms: bool
    ) -> tuple[Tensor, Tensor] | None:
        momenta = [self._momentum[name] for name in part.names]
        parameters = [self._parameters[name] for name in part.names]
        rate = part.rate * multiplier
        # 2. momentum
        old = torch.stack(momenta)  # (n, R, C)
        grad = torch.stack([self._gradient(name).float() for name in part.names])  # (n, R, C) f32
        new = (old * self._config.momentum).add_(grad)
        _write(momenta, finite, new, old)
        # 3. orthogonalise a scratch copy; the stored momentum keeps its scale
        ahead = grad.add_(new, alpha=self._config.momentum) if self._config.nesterov else new
        direction = newton_schulz_orthogonalize(ahead, steps=self._config.newton_schulz_steps)
        # 4. and 5. update and conditioning, both at the weights before the step
        weight = torch.stack(parameters)  # (n, R, C)
        if part.conditioned and intensity is not None:
            direction = direction + intensity * soft_orthogonality_gradient(weight)
        kept = _write(parameters, finite, weight - rate * direction, weight)
        return _squares(kept, weight) if norms else None

    def _step_adaptive(
        self, part: _FlatSlice, multiplier: Tensor, clip: Tensor, finite: Tensor, norms: bool
    ) -> tuple[Tensor, Tensor] | None:
        grads = [self._gradient(name).reshape(-1)[start:stop] for name, start, stop in part.pieces]
        grad = torch.cat(grads).float() * clip  # (E,) f32
        targets = [
            [tensors[name].view(-1)[start:stop] for name, start, stop in part.pieces]
            for tensors in (self._parameters, self._first, self._second)
        ]
        olds = [torch.cat(target) for target in targets]  # (E,) each
        news = _adaptive(olds[0], grad, *olds[1:], self._applied, part.rate * multiplier, self._config)
        kept = [_write(target, finite, new, old) for target, new, old in zip(targets, news, olds, strict=True)]
        return _squares(kept[0], olds[0]) if norms else None


def _squares(kept: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return (kept - weight).square().sum(), weight.square().sum()


def _write(targets: list[Tensor], finite: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Store `new` where the step is finite, else `old` bit for bit; both are the targets stacked or concatenated."""
    kept = torch.where(finite, new, old)
    rows = kept.unbind(0) if kept.ndim == 3 else kept.split([target.numel() for target in targets])
    torch._foreach_copy_(targets, rows)
    return kept
