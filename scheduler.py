"""Learning-rate schedule and terminal weight average, both in tokens.

It knows token counts and named tensors, and nothing of optimizers, steps or files. One optimizer step is the pair
(tokens_done, tokens_step): tokens presented before it, and by it.

    rate(x)  = x / warm-up end                                                 warm-up
             = 1                                                               stable
             = f + (1 - f) (1 + cos(pi (x - decay start) / decay length)) / 2  decay, f = final_lr_fraction
    average  = sum_i c_i W_i / sum_i c_i,   c_i = (1 - e^{-n_i / tau}) e^{(t_i - T) / tau}

where x is a step's middle token, W_i the weights after step i, n_i its tokens, t_i the tokens done after it, T the
budget and tau a share of the averaged span. The c_i are those of A <- e^{-n/tau} A + (1 - e^{-n/tau}) W, divided by the
sum of its weights (bias correction).

Sources: warmup-stable-decay, arXiv:2404.06395 and "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
Durations" (arXiv:2405.18392); averages that keep their time scale at any batch size, "How to Scale Your EMA"
(arXiv:2307.13813).

In file order: warmup_stable_decay, WarmupStableDecayScheduler, TerminalShrinkageAverager.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from model_config import ScheduleConfig

__all__ = ["TerminalShrinkageAverager", "WarmupStableDecayScheduler", "warmup_stable_decay"]


def warmup_stable_decay(token: float, config: ScheduleConfig) -> float:
    """Give the learning-rate multiplier at a token position; past the end the last phase's final value stays."""
    warmup_end = config.warmup_fraction * config.total_tokens
    decay_length = config.decay_fraction * config.total_tokens
    decay_start = config.total_tokens - decay_length
    if token < warmup_end:
        return token / warmup_end
    if token <= decay_start or decay_length == 0:
        return 1.0
    if token >= config.total_tokens:
        return config.final_lr_fraction
    cosine = 0.5 * (1 + math.cos(math.pi * (token - decay_start) / decay_length))
    return config.final_lr_fraction + (1 - config.final_lr_fraction) * cosine


class WarmupStableDecayScheduler:
    """Warm-up from 0, plateau at 1, cosine to `final_lr_fraction`, over shares of the token budget.

    A phase of share 0 is left out: without warm-up the first step has rate 1, without decay the rate stays 1.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config

    def multiplier(self, tokens_done: int, tokens_step: int) -> float:
        """Give the factor on every rate for the step after `tokens_done` tokens: the schedule at its middle token."""
        _check_step(tokens_done, tokens_step)
        return warmup_stable_decay(tokens_done + 0.5 * tokens_step, self._config)


class TerminalShrinkageAverager:
    """Float32 average of all weights over the last `average_fraction` of the tokens, with weight e^{-tokens/tau}.

    tau is `average_tau_fraction` of that span. The weights after a step count iff the step ends inside the span.

    The weighted sum is kept undivided and grows with its weights, up to e^{1/average_tau_fraction}: an increment is
    never less than its share of the sum, so none is rounded to nothing as it would be in A + (1 - d)(W - A), which
    stands still once W - A is under 6e-8 / (1 - d) of A. Nothing is stored before the span begins; inside it 4 bytes an
    element, on the weights' device, or with average_on_host in page-locked host memory: each sum then visits the device
    for its update, one tensor at a time, so that its bits are the same.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        span = config.average_fraction * config.total_tokens
        self._origin = config.total_tokens
        self._start = config.total_tokens - span
        self._tau = config.average_tau_fraction * span
        self._on_host = config.average_on_host
        self._stored: torch.cuda.Event | None = None  # behind the last copy to the host
        self._sums: dict[str, Tensor] = {}
        self._weight = 0.0
        self._latest: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, named_parameters: Iterable[tuple[str, Tensor]], tokens_done: int, tokens_step: int) -> None:
        """Count the weights after a step, if it ends inside the span.

        Call it once a step, after the optimizer moved the weights, with the step's own (tokens_done, tokens_step). The
        tensors may be of any float type; outside the span they are remembered by reference only.

        Raises:
            ValueError: names other than those averaged so far.
        """
        _check_step(tokens_done, tokens_step)
        self._latest = dict(named_parameters)
        position = tokens_done + tokens_step
        if position <= self._start or self._tau == 0:
            return
        if self._sums and self._sums.keys() != self._latest.keys():
            strays = sorted(self._sums.keys() ^ self._latest.keys())
            raise ValueError(f"an update must hold the names averaged so far, got a difference in {strays}")
        if position > self._origin:
            # past the budget the weights count from the newest step, or e^{t/tau} would leave float32's range
            self._rescale(math.exp((self._origin - position) / self._tau))
            self._origin = position
        share = -math.expm1(-tokens_step / self._tau) * math.exp((position - self._origin) / self._tau)
        for name, parameter in self._latest.items():
            weight = parameter.detach().float()
            if name in self._sums:
                # a sum of the host, or a restored one, is not where the weight is
                total = self._sums[name].to(weight.device, non_blocking=True).add_(weight, alpha=share)
            else:
                total = weight * share
            self._keep(name, total)
        self._weight += share
        if self._on_host and total.is_cuda:
            self._stored = torch.cuda.Event()
            self._stored.record()

    @torch.no_grad()
    def consolidate(self) -> dict[str, Tensor]:
        """Return the average as new float32 tensors by name.

        Where no step has ended inside the span (a run stopped early, or an average_fraction of 0), these are the
        weights of the last update as they are now.

        Raises:
            ValueError: before the first update.
        """
        self._wait()
        if self._sums:
            return {name: total / self._weight for name, total in self._sums.items()}
        if not self._latest:
            raise ValueError("an average must have seen at least one update, got none")
        return {name: parameter.detach().to(torch.float32, copy=True) for name, parameter in self._latest.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weighted sums (`sum/NAME`, live tensors), their `weight` (float64) and `origin` (int64), 0-D."""
        self._wait()
        weight = torch.tensor(self._weight, dtype=torch.float64)
        origin = torch.tensor(self._origin)
        return {"weight": weight, "origin": origin, **{f"sum/{name}": x for name, x in self._sums.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a saved state in; raises ValueError, naming entries, unless it is float32 sums and their two scalars."""
        scalars = {"weight", "origin"}
        strays = [x for x in state if x not in scalars and not x.startswith("sum/")]
        strays += [x for x, value in state.items() if x.startswith("sum/") and value.dtype != torch.float32]
        missing = sorted(scalars - state.keys())
        if strays or missing:
            raise ValueError(
                "an averager's state must hold weight, origin and float32 sums by name, "
                f"got strays {sorted(strays)}, missing {missing}"
            )
        sums = {name.removeprefix("sum/"): value for name, value in state.items() if name not in scalars}
        weight = state["weight"].item()
        if (weight > 0) != bool(sums):
            raise ValueError(f"an averager's weight must be positive iff it has sums, got {weight}, {len(sums)} sums")
        self._weight = weight
        self._origin = int(state["origin"])
        self._sums = {name: value.clone() for name, value in sums.items()}

    def _keep(self, name: str, total: Tensor) -> None:
        """Store a sum where sums are kept."""
        if not (self._on_host and total.is_cuda):
            self._sums[name] = total
            return
        place = self._sums.get(name)
        if place is None or not place.is_pinned():
            place = self._sums[name] = torch.empty(total.shape, dtype=total.dtype, pin_memory=True)
        place.copy_(total, non_blocking=True)

    def _wait(self) -> None:
        """Wait for sums that are on their way to the host."""
        if self._stored is not None:
            self._stored.synchronize()

    def _rescale(self, factor: float) -> None:
        self._wait()
        self._weight *= factor
        for total in self._sums.values():
            total.mul_(factor)


def _check_step(tokens_done: int, tokens_step: int) -> None:
    if tokens_done < 0 or tokens_step < 1:
        raise ValueError(f"tokens_done must be >= 0 and tokens_step >= 1, got {tokens_done}, {tokens_step}")
