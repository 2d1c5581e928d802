"""Streaming generation: prompts in chunks, then one tree of drafts a step and row, verified by the model itself.

This file knows ids, not text: it takes prompt ids and yields committed ids. It reads bottom-up: noise, history,
penalties and temperature, choice, statistics, then the engine: draft, verify, commit, and the host's loop around them.

The token at absolute position p is

    argmax( z / T + Gumbel(seed, p) )        z = penalised logits, masked by top-k, top-p, min-p        T = 0: argmax z

with noise that is a function of (seed, position, vocabulary index) only. The draft head proposes the two largest of its
own z / T plus the same noise, so a good draft meets the model's choice; a draft is accepted iff it is that choice. The
text is therefore that of plain decoding whatever the drafter. Step of depth 2, root = newest token, not yet run:

    root -+- a -+- aa         one pass of the model over the seven nodes gives the logits after each; the walk takes
          |     +- ab         the model's choice at the root, goes on at the child that equals it, and stops where none
          +- b -+- ba         does. The walked nodes are committed, the last choice is the next root: 1 to 3 tokens a
                +- bb         pass. Nodes are numbered by level, so the children of node n are 2 n + 1 and 2 n + 2.

Penalties, temperature, entropy, minimum length and stops are evaluated at a node after all tokens of its path have been
recorded in the history, one by one, as plain decoding would; nothing is refreshed by step.

A step is device work of fixed shapes, for all rows of a batch at once: on CUDA it is recorded as one graph, and the
host reads what a step made after it has launched the next. A row that has finished runs along and commits nothing. No
row depends on its neighbours: sums whose order a library picks by the shape of its input are folded in a fixed order
or taken row by row.

Letters: B rows, N tree nodes, W vocabulary, D width, S penalty window. Public names: TextHistory, penalize,
dynamic_temperature, restrict, CurvePoint, GenerationStatistics, Request, Chunk, StreamingGenerationEngine.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from custom_kernels import gumbel_noise, wrapped_word
from hybrid_model import DecodeState, DraftTree, HybridLanguageModel, RecordedWork
from model_config import GenerationConfig

__all__ = [
    "Chunk",
    "CurvePoint",
    "GenerationStatistics",
    "Request",
    "StreamingGenerationEngine",
    "TextHistory",
    "dynamic_temperature",
    "penalize",
    "restrict",
]

DRAFT_WIDTH = 2  # candidates at each node: a second one raises acceptance from about 0.74 to 0.90 and costs no pass
CURVE_TOKENS = 1024  # tokens between two points of the stability curve
LOOP_PERIOD = 64  # longest block of tokens whose exact repetition counts as a loop

# ---------------------------------------------------------------------------
# History, penalties and temperature: functions of a node's own path


class TextHistory:
    """What the sampler remembers of each row's own text: a window of ids, and the entropies of the newest choices."""

    def __init__(
        self, options: GenerationConfig, vocab_size: int, *, batch: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        self.ids = torch.zeros(batch, options.penalty_window, dtype=torch.int64, device=device)  # ring: place count % S
        self.entropies = torch.zeros(batch, options.entropy_span, dtype=torch.float64, device=device)  # another ring
        self.counts = torch.zeros(batch, vocab_size, dtype=torch.int32, device=device)  # of each id in the window
        self.count = torch.zeros(batch, dtype=torch.int64, device=device)  # tokens generated
        self.newest = torch.zeros(batch, LOOP_PERIOD, dtype=torch.int64, device=device)  # the newest id first
        # per period p = 1, 2, ...: for how many tokens each has been the one p tokens before it
        self.runs = torch.zeros(batch, LOOP_PERIOD, dtype=torch.int64, device=device)

    def reset(self, row: int) -> None:
        """Forget a row's text."""
        for x in vars(self).values():
            x[row] = 0

    def push(self, token: Tensor, entropy: Tensor, active: Tensor | None = None) -> None:
        """Record one token (B,) and the entropy (B,), nats, that it was chosen from, in the rows that are active."""
        active = torch.ones_like(token, dtype=torch.bool) if active is None else active
        window, live = self.ids.shape[1], active[:, None]
        place = (self.count % window)[:, None]
        oldest = self.ids.gather(1, place)
        leaves = live & (self.count >= window)[:, None]
        self.counts.scatter_add_(1, oldest, -leaves.int())
        self.counts.scatter_add_(1, token[:, None], live.int())
        self.ids.scatter_(1, place, torch.where(live, token[:, None], oldest))
        place = (self.count % self.entropies.shape[1])[:, None]
        kept = self.entropies.gather(1, place)
        self.entropies.scatter_(1, place, torch.where(live, entropy[:, None], kept))
        known = self.count[:, None] > torch.arange(LOOP_PERIOD, device=token.device)
        runs = torch.where(known & (self.newest == token[:, None]), self.runs + 1, 0)
        self.runs.copy_(torch.where(live, runs, self.runs))
        newest = torch.cat((token[:, None], self.newest[:, :-1]), 1)
        self.newest.copy_(torch.where(live, newest, self.newest))
        self.count += active

    def counted(self, ahead: Tensor) -> tuple[Tensor, Tensor]:
        """Count the window as it would be after the tokens ahead (B, n, d): (B, n, W) int32, its length (B, n)."""
        (batch, nodes, depth), window = ahead.shape, self.ids.shape[1]
        counts = self.counts[:, None].expand(-1, nodes, -1)
        if depth:
            counts = counts.clone()
        for i in range(depth):
            place = ((self.count + i) % window)[:, None]
            # with a window shorter than the path, the path's own first tokens leave it
            oldest = self.ids.gather(1, place).expand(-1, nodes) if i < window else ahead[..., i - window]
            leaves = (self.count + i >= window)[:, None, None].expand(-1, nodes, -1)
            counts.scatter_add_(2, oldest[..., None], -leaves.int())
            counts.scatter_add_(2, ahead[..., i : i + 1], torch.ones_like(leaves, dtype=torch.int32))
        return counts, (self.count + depth).clamp(max=window)[:, None].expand(batch, nodes)


def penalize(logits: Tensor, history: TextHistory, options: GenerationConfig, ahead: Tensor) -> Tensor:
    """Subtract strength * (frequency * count + presence) from the logits (B, n, W) of the ids of the window.

    strength = 1 + repetition_gain * share of repeated tokens in the window, as it would be after the tokens ahead
    (B, n, d) int64. The window holds generated tokens only, so that a prompt's own words stay free, and is bounded, so
    that in 131,072 tokens no common word is driven out.
    """
    if not options.frequency_penalty and not options.presence_penalty:
        return logits
    counts, total = history.counted(ahead)
    found = counts > 0
    share = torch.where(total > 0, 1 - found.sum(-1).double() / total.clamp(min=1).double(), 0.0)  # (B, n)
    strength = 1 + options.repetition_gain * share
    amounts = strength[..., None] * (options.frequency_penalty * counts.double() + options.presence_penalty)
    return torch.where(found, logits - amounts.to(logits.dtype), logits)


def dynamic_temperature(history: TextHistory, options: GenerationConfig) -> Tensor:
    """Return the temperature (B,) float64 of the next choice, from the running mean entropy of the newest ones.

    Inside [entropy_low, entropy_high] it is the configured one. Below, it rises in proportion, by temperature_range at
    entropy 0; above, it falls, by temperature_range at twice entropy_high, and never below half the configured one.
    """
    base, low, high = options.temperature, options.entropy_low, options.entropy_high
    span = history.entropies.shape[1]
    mean = _fold(history.entropies) / history.count.clamp(1, span).double()
    raised = base + options.temperature_range * (low - mean) / (low or 1.0)
    excess = ((mean - high) / high).clamp(0.0, 1.0) if high else torch.zeros_like(mean)
    lowered = (base - options.temperature_range * excess).clamp(min=base / 2)
    moved = torch.where(mean < low, raised, lowered)
    return torch.where(history.count > 0, moved, base) if base else torch.zeros_like(mean)


def _fold(x: Tensor) -> Tensor:
    """Sum (B, n) over n in one fixed order, elementwise, whatever B is."""
    x = torch.nn.functional.pad(x, (0, (1 << (x.shape[1] - 1).bit_length()) - x.shape[1]))
    while x.shape[1] > 1:
        left, right = x.chunk(2, 1)
        x = left + right
    return x[:, 0]


# ---------------------------------------------------------------------------
# Choice


def restrict(scaled: Tensor, options: GenerationConfig) -> Tensor:
    """Mask scaled logits (W,) with -inf outside top-k, then top-p, then min-p; ties at an edge stay in."""
    minus = float("-inf")
    if 0 < options.top_k < scaled.shape[0]:
        scaled = scaled.masked_fill(scaled < scaled.topk(options.top_k).values[-1], minus)
    if options.top_p < 1:
        ordered = scaled.sort(descending=True).values
        share = ordered.softmax(0)
        # a token stays while the ones before it hold less than top_p
        kept = (share.cumsum(0) - share < options.top_p).sum().clamp(min=1)
        scaled = scaled.masked_fill(scaled < ordered.gather(0, kept[None] - 1), minus)
    if options.min_p > 0:
        share = scaled.softmax(0)
        scaled = scaled.masked_fill(share < options.min_p * share.max(), minus)
    return scaled


def _entropy(logits: Tensor) -> Tensor:
    """Entropy (B,) in nats, float64, of softmax(logits (B, W)): of the model's penalised prediction, temperature 1."""
    below = logits - logits.amax(-1, keepdim=True)
    weight = below.exp()
    total = _fold(weight)
    # a forbidden id has weight 0 and no finite logit
    return (total.log() - _fold(weight * below.masked_fill(weight == 0, 0.0)) / total).double()


def _each_twice(x: Tensor) -> Tensor:
    """Repeat every node of (B, n, ...) for its two candidates."""
    return x[:, :, None].expand(-1, -1, DRAFT_WIDTH, -1).flatten(1, 2)


# ---------------------------------------------------------------------------
# Statistics


class CurvePoint(NamedTuple):
    """One point of the stability curve, over the tokens since the last one where that has a meaning."""

    tokens: int
    entropy: float  # running mean, nats
    repetition: float  # share of repeated tokens in the penalty window
    accepted: float  # tokens a backbone call so far
    seconds: float  # of decoding so far


@dataclass
class GenerationStatistics:
    """Figures of one request; complete when its stream has ended or was closed."""

    prompt_tokens: int = 0
    tokens: int = 0  # yielded
    prefill_seconds: float = 0.0
    seconds: float = 0.0  # of decoding
    backbone_calls: int = 0  # of decoding
    # per depth: times that the walk reached a node with children there, and times that a child was the model's choice
    drafted: list[int] = field(default_factory=lambda: [0, 0])
    accepted: list[int] = field(default_factory=lambda: [0, 0])
    entropy_sum: float = 0.0  # over all tokens chosen: more than yielded where the stream was closed within a step
    repetition: float = 0.0  # of the last window
    repetition_peak: float = 0.0  # of the curve's points and the last window
    stop_reason: str = "running"  # eos, stop, length, loop; closed where the consumer left
    state_bytes: int = 0
    cache_bytes: int = 0
    curve: list[CurvePoint] = field(default_factory=list)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of drafted positions that were accepted, at depth 1 and 2."""
        return tuple(a / max(1, d) for a, d in zip(self.accepted, self.drafted, strict=True))

    @property
    def entropy_mean(self) -> float:
        """Mean entropy (nats) of the distributions that the tokens were chosen from."""
        return self.entropy_sum / max(1, self.backbone_calls + sum(self.accepted))

    @property
    def tokens_per_call(self) -> float:
        return self.tokens / max(1, self.backbone_calls)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


# ---------------------------------------------------------------------------
# Requests


class Request(NamedTuple):
    """What a row is asked for."""

    prompt: Sequence[int]
    seed: int | None = None  # None: the options' sampling_seed
    max_new_tokens: int | None = None  # None: the options'
    resume: bool = False  # the prompt goes on from the text that the engine made last; penalties begin anew


class Chunk(NamedTuple):
    """What one step made of one request: 0 to 3 ids; done with its last one."""

    index: int  # of the request, in the order given
    ids: list[int]
    done: bool
    statistics: GenerationStatistics


class _Row:
    """The host's side of a running request."""

    def __init__(self, index: int, options: GenerationConfig, figures: GenerationStatistics) -> None:
        self.index, self.figures = index, figures
        self.tail = b""  # newest bytes of the text, for a stop string that spans tokens
        self._window: deque[int] = deque(maxlen=options.penalty_window)
        self._entropies: deque[float] = deque(maxlen=options.entropy_span)
        self.made = 0

    def record(self, token: int, entropy: float, seconds: float) -> None:
        """Take one chosen token into the figures."""
        figures = self.figures
        self.made += 1
        self._window.append(token)
        self._entropies.append(entropy)
        figures.entropy_sum += entropy
        if self.made % CURVE_TOKENS == 0:
            mean = sum(self._entropies) / len(self._entropies)
            calls = max(1, figures.backbone_calls)
            figures.curve.append(CurvePoint(self.made, mean, self.repetition, self.made / calls, seconds))
            figures.repetition_peak = max(figures.repetition_peak, figures.curve[-1].repetition)

    def walked(self, made: int, stopped: bool, depth: int) -> None:
        """Count one step that chose `made` tokens in a tree of this depth."""
        self.figures.backbone_calls += 1
        for level in range(depth):
            # a stop ends the walk before the children are looked at
            self.figures.drafted[level] += made > level + 1 or (made == level + 1 and not stopped)
            self.figures.accepted[level] += made > level + 1

    def finish(self, reason: str) -> None:
        figures = self.figures
        figures.repetition = self.repetition
        figures.repetition_peak = max(figures.repetition_peak, figures.repetition)
        figures.stop_reason = reason

    @property
    def repetition(self) -> float:
        """Share of the window's tokens that repeat an earlier one of it, 0 ... 1."""
        return 1 - len(Counter(self._window)) / len(self._window) if self._window else 0.0


# ---------------------------------------------------------------------------
# Engine

_REASONS = ("running", "eos", "stop", "length", "loop", "closed")
_RUNNING, _EOS, _STOP, _LENGTH, _LOOP, _CLOSED = range(6)


class StreamingGenerationEngine:
    """Generate from a model, `batch` requests at a time; every buffer is allocated here and reused."""

    def __init__(
        self,
        model: HybridLanguageModel,
        options: GenerationConfig,
        eos_id: int | None = None,
        *,
        batch: int = 1,
        token_bytes: Callable[[int], bytes] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Prepare for requests under `options`.

        eos_id ends a text (unless options.ignore_eos), as options.stop_ids do, and starts an empty prompt. token_bytes
        maps an id to its bytes, needed for options.stop. max_length bounds prompt plus output under attention scope
        full (None = the model's).
        """
        config = model.config
        if eos_id is not None and not 0 <= eos_id < config.vocab_size:
            raise ValueError(f"eos_id must be within 0..{config.vocab_size - 1}, got {eos_id}")
        for token in options.stop_ids:
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"a stop id must be within 0..{config.vocab_size - 1}, got {token}")
        if options.stop and token_bytes is None:
            raise ValueError("a stop string must come with token_bytes, which maps an id to its bytes")
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        if options.max_new_tokens > config.max_output_len:
            raise ValueError(
                f"max_new_tokens must be at most max_output_len {config.max_output_len}, got {options.max_new_tokens}"
            )
        self.model, self.options, self.eos_id, self.batch = model, options, eos_id, batch
        self.max_length = min(max_length or config.max_context_len, config.max_context_len)
        self.device = model.embedding.device
        self.statistics = GenerationStatistics()  # of the request that was read last
        self.requests = self.ended = 0  # requests finished, and those that ended by themselves: eos or stop string
        self.depth = config.draft_depth if options.drafts else 0
        self.tree = DraftTree.from_parents([(n - 1) // 2 for n in range(2 ** (self.depth + 1) - 1)], self.device)
        self.state = self._new_state(batch)
        self._alone = self._new_state(1) if batch > 1 else self.state  # a prompt runs here before it joins the batch
        self._shared: DecodeState | None = None  # behind the prefix of the requests that are served
        self._stops = [stop.encode() for stop in options.stop if stop]
        self._token_bytes = token_bytes
        self._rows: list[_Row | None] = [None] * batch

        def numbers(*shape: int, kind: torch.dtype = torch.int64, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=kind, device=self.device)

        # what a step reads and leaves, at fixed addresses
        self.history = TextHistory(options, config.vocab_size, batch=batch, device=self.device)
        self._root, self._limit = numbers(batch), numbers(batch)
        self._seed = numbers(batch, value=wrapped_word(options.sampling_seed))
        self._reason = numbers(batch, value=_CLOSED)
        self._node, self._active = numbers(batch), numbers(batch, kind=torch.bool)
        self._path = numbers(batch, self.depth + 1, kind=torch.int32)
        # per depth an id (-1: none); per depth the bits of an entropy; the reason
        self._report = numbers(batch, 2 * (self.depth + 1) + 1)
        self._verified: tuple[Tensor, Tensor, Any, list[Tensor | None]] | None = None
        ends = [*options.stop_ids, *([] if eos_id is None or options.ignore_eos else [eos_id])]
        self.end_ids = frozenset([*options.stop_ids, *([] if eos_id is None else [eos_id])])  # not for display
        # (W,) which ids end a text
        self._ends = numbers(config.vocab_size, kind=torch.bool) if ends else None
        for token in ends:
            self._ends[token] = True
        # a recording would hold the addresses of layers that come and go
        self._record = RecordedWork(self.device.type == "cuda" and not model.streamed)

    def _new_state(self, batch: int) -> DecodeState:
        return self.model.decode_state(batch=batch, cache_bits=self.options.cache_bits, max_length=self.max_length)

    @property
    def held(self) -> int:
        """Tokens of the text that `resume` goes on from, the last one included; 0 before the first text."""
        return int(self.state.length[0]) + 1 if self.requests and self.batch == 1 else 0

    @property
    def last_id(self) -> int | None:
        """The last id of the text that `resume` goes on from, None before the first text."""
        return int(self._root[0]) if self.held else None

    def session(self) -> dict[str, Tensor]:
        """Return what `resume` needs, to be stored: the state, pages that hold nothing left out, and the last token."""
        if not self.held:
            raise ValueError("a session needs a text that this engine made before, alone, got none")
        return {"root": self._root.clone(), **self.state.stored()}

    def restore(self, session: Mapping[str, Tensor]) -> None:
        """Take a session of an engine of the same model and cache up, so that `resume` goes on from its text."""
        self.state.restore({name: value for name, value in session.items() if name != "root"})
        self._root.copy_(session["root"])
        self.requests += 1

    @property
    def stop_rate(self) -> float:
        """Share of finished requests that ended by themselves rather than at max_new_tokens."""
        return self.ended / max(1, self.requests)

    # Requests in, ids out

    def generate(self, prompt_ids: Sequence[int], *, resume: bool = False) -> Iterator[int]:
        """Check the prompt, then stream committed ids: the end-of-text id or the stop string's last id comes last.

        An empty prompt starts from the end-of-text id, as training documents do. Closing the stream early keeps what
        was yielded. The next request starts from a cleared state, or with resume goes on from this text's, whose tokens
        are not run again; after an early close that text ends with the last step's tokens, read or not.
        """
        return self._stream(self._checked(Request(prompt_ids, resume=resume)))

    def _stream(self, request: Request) -> Iterator[int]:
        serving = self._serve([request])
        try:
            for chunk in serving:
                figures = self.statistics = chunk.statistics
                reason, figures.stop_reason = figures.stop_reason, "running"
                for left, token in zip(range(len(chunk.ids) - 1, -1, -1), chunk.ids, strict=True):
                    figures.tokens += 1
                    figures.stop_reason = "running" if left else reason
                    yield token
                figures.stop_reason = reason
        finally:
            serving.close()
            if self.statistics.stop_reason == "running":
                self.statistics.stop_reason = "closed"

    def serve(self, requests: Iterable[Request], *, prefix: Sequence[int] = ()) -> Iterator[Chunk]:
        """Stream the chunks of many requests: `batch` of them run at once, and a row that ends takes the next one.

        A request's ids are those that it would have alone. Requests are read as rows become free. The ids of prefix
        begin every prompt and are run once: each request starts from a copy of the state behind them.
        """
        if prefix:
            ids = self._checked(Request(prefix, max_new_tokens=0)).prompt
            self._alone.reset()
            self._prefill(ids)
            self._shared = self._alone.copy()
        try:
            for chunk in self._serve(map(self._checked, requests)):
                chunk.statistics.tokens += len(chunk.ids)
                self.statistics = chunk.statistics
                yield chunk
        finally:
            self._shared = None

    def _checked(self, request: Request) -> Request:
        prompt = [int(token) for token in request.prompt]
        held = 0 if self._shared is None else int(self._shared.length[0])
        if request.resume:
            if self.batch > 1 or not self.held:
                raise ValueError("resume needs a text that this engine made before, alone, got none")
            held = self.held - 1  # but for the last token, with which the prompt now begins
            prompt = [int(self._root[0]), *prompt]
        if not prompt:
            if self.eos_id is None:
                raise ValueError("an empty prompt must have an eos_id to start from, got none")
            prompt = [self.eos_id]
        size = self.model.config.vocab_size
        for at, token in enumerate(prompt):
            if not 0 <= token < size:
                raise ValueError(f"a prompt id must be within 0..{size - 1}, got {token} at position {at}")
        new = self.options.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
        if not 0 <= new <= self.model.config.max_output_len:
            most = self.model.config.max_output_len
            raise ValueError(f"max_new_tokens must be within 0..{most}, got {new}")
        asked = held + len(prompt)
        if asked + new > self.max_length:
            raise ValueError(
                f"prompt and output must fit {self.max_length} tokens of context, got {asked} + {new} = {asked + new}"
            )
        seed = self.options.sampling_seed if request.seed is None else request.seed
        return Request(prompt, wrapped_word(seed), new, request.resume)

    def _serve(self, requests: Iterable[Request]) -> Iterator[Chunk]:
        """Loop: free rows take requests, a step is launched, and the step before it is read."""
        waiting, flying = enumerate(requests), deque[tuple[list[_Row | None], Callable[[], list[list[int]]]]]()
        # a stop string is looked for on the host, before the next step may build on it
        lag = 1 if self.device.type == "cuda" and not self._stops else 0
        more = True
        try:
            while True:
                while more and None in self._rows:
                    index, request = next(waiting, (0, None))
                    more = request is not None
                    if more:
                        yield from self._admit(index, request)
                if not flying and not any(self._rows):
                    return
                started = time.perf_counter()
                if any(self._rows):
                    flying.append((list(self._rows), self._launch()))
                if len(flying) > lag or not any(self._rows):
                    rows, wait = flying.popleft()
                    report = wait()
                    # the time that the consumer takes is not counted
                    self._count_seconds(time.perf_counter() - started)
                    yield from self._read(rows, report)
        finally:
            while flying:
                rows, wait = flying.popleft()
                self._read(rows, wait())
            for row, running in enumerate(self._rows):
                if running is not None:
                    self._release(row, "closed")

    def _count_seconds(self, seconds: float) -> None:
        for row in self._rows:
            if row is not None:
                row.figures.seconds += seconds

    def _admit(self, index: int, request: Request) -> Iterator[Chunk]:
        """Run a prompt but for its last token, the first root, and give it a free row."""
        figures = GenerationStatistics(
            prompt_tokens=len(request.prompt) - request.resume,
            state_bytes=self.state.state_bytes // self.batch,
            cache_bytes=self.state.cache_bytes // self.batch,
        )
        row, started = self._rows.index(None), time.perf_counter()
        self._rows[row] = _Row(index, self.options, figures)
        self.statistics = figures
        if self._shared is not None:
            self._alone.take(0, self._shared)
        elif not request.resume:
            self._alone.reset()
        self._prefill(list(request.prompt[:-1]))
        if self._alone is not self.state:
            self.state.take(row, self._alone)
        self.history.reset(row)
        for mine, value in (
            (self._root, request.prompt[-1]), (self._seed, request.seed), (self._limit, request.max_new_tokens),
            (self._reason, _RUNNING),
        ):  # fmt: skip
            mine[row] = value
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # for the figure alone
        figures.prefill_seconds = time.perf_counter() - started
        if request.max_new_tokens == 0:
            self._release(row, "length")
            yield Chunk(index, [], True, figures)

    def _prefill(self, ids: list[int]) -> None:
        for start in range(0, len(ids), self.options.prefill_chunk):
            part = torch.tensor([ids[start : start + self.options.prefill_chunk]], device=self.device)
            self.model.prefill(part, self._alone)

    def _launch(self) -> Callable[[], list[list[int]]]:
        """Run one step for all rows; return what waits for its report."""
        with torch.no_grad():
            if self._stops:
                self._step(self._record)
            else:
                self._record(("step",), partial(self._step, lambda _, body: body()))
            if self.device.type != "cuda":
                return self._report.tolist
            copy = torch.empty(self._report.shape, dtype=torch.int64, pin_memory=True)
            copy.copy_(self._report, non_blocking=True)
            done = torch.cuda.Event()
            done.record()

        def wait() -> list[list[int]]:
            done.synchronize()
            return copy.tolist()

        return wait

    def _read(self, rows: list[_Row | None], report: list[list[int]]) -> list[Chunk]:
        """Take a step's report into the figures of the rows that were running when it was launched."""
        chunks, depths = [], self.depth + 1
        for number, (row, line) in enumerate(zip(rows, report, strict=True)):
            if row is None or self._rows[number] is not row:
                continue  # it had ended before this step
            ids = [token for token in line[:depths] if token >= 0]
            bits = torch.tensor(line[depths : depths + len(ids)], dtype=torch.int64)
            entropies = bits.view(torch.float64).tolist()
            reason = _REASONS[line[-1]]
            row.walked(len(ids), reason != "running", self.depth)
            for token, entropy in zip(ids, entropies, strict=True):
                row.record(token, entropy, row.figures.seconds)
            if reason != "running":
                self._release(number, reason)
            chunks.append(Chunk(row.index, ids, reason != "running", row.figures))
        return chunks

    def _release(self, number: int, reason: str) -> None:
        row, self._rows[number] = self._rows[number], None
        self._reason[number] = _REASONS.index(reason)
        row.finish(reason)
        self.requests += 1
        self.ended += reason in ("eos", "stop")

    # One step on the device

    def _step(self, run: Callable[[Hashable, Callable[[], None]], None]) -> None:
        """Draft, verify and commit from each row's root, the first token that is not in its state.

        run(key, body) runs a part, or its recording where the host looks at the text between the parts.
        """
        run(("verify",), self._verify)
        for depth in range(self.depth + 1):
            run(("choose", depth), partial(self._choose_at, depth))
            if self._stops:
                self._look_for_stop(depth)
        run(("commit",), self._commit)

    def _verify(self) -> None:
        noises = self._noises()
        ids = self._draft(self._root, noises, self.history)
        hidden, written = self.model.nodes(ids, self.state, self.tree)
        self._verified = ids, self.model.logits(hidden), written, noises
        self._node.zero_()
        self._active.copy_(self._reason == _RUNNING)
        self._path.fill_(-1)
        self._report.fill_(-1)

    def _choose_at(self, depth: int) -> None:
        """Take the model's own choice at each row's node, and go on at the child that equals it.

        A choice is recorded before the next node is judged, and a stop ends the walk, so that what follows a stop is
        neither emitted nor committed.
        """
        ids, logits, _, noises = self._verified
        active, node = self._active, self._node
        self._path[:, depth] = torch.where(active, node, -1)
        at = node[:, None, None].expand(-1, -1, logits.shape[2])
        token, entropy = self._choose(logits.gather(1, at)[:, 0], noises[depth], self.history)
        self.history.push(token, entropy, active)
        self._report[:, depth] = torch.where(active, token, -1)
        self._report[:, self.depth + 1 + depth] = entropy.view(torch.int64)
        self._root.copy_(torch.where(active, token, self._root))
        reason = torch.zeros_like(self._reason)
        if self.options.loop_tokens:
            looped = (self.history.runs >= self.options.loop_tokens).any(1)
            reason = torch.where(looped & (self.history.count >= self.options.min_new_tokens), _LOOP, reason)
        reason = torch.where(self.history.count >= self._limit, _LENGTH, reason)
        if self._ends is not None:
            reason = torch.where(self._ends.gather(0, token), _EOS, reason)
        self._reason.copy_(torch.where(active, reason, self._reason))
        if depth < self.depth:
            below = 2 * node[:, None] + torch.arange(1, DRAFT_WIDTH + 1, device=node.device)  # (B, 2)
            met = ids.gather(1, below) == token[:, None]
            self._active.copy_(active & (self._reason == _RUNNING) & met.any(1))
            self._node.copy_(below.gather(1, met.int().argmax(1)[:, None])[:, 0])

    def _look_for_stop(self, depth: int) -> None:
        """End the rows whose token of this depth completes a stop string, unless the token itself is an end."""
        stopped = [number for number, token in enumerate(self._report[:, depth].tolist())
                   if token >= 0 and self._completes_stop(number, token)]  # fmt: skip
        for number in stopped:
            ended = int(self._reason[number]) == _EOS
            if not ended and int(self.history.count[number]) >= self.options.min_new_tokens:
                self._reason[number] = _STOP
                self._active[number] = False

    def _commit(self) -> None:
        self.model.commit(self._verified[2], self.state, self._path)
        self._report[:, -1] = self._reason

    # Drafts

    def _draft(self, root: Tensor, noises: list[Tensor | None], history: TextHistory) -> Tensor:
        """Fill the tree's nodes with ids (B, N): the roots (B,), then two candidates below each node, by depth.

        Depth 1 reads the final hidden state of the token before the root and the root's embedding, depth 2 depth 1's
        output and the candidate's: what the draft head was trained on.
        """
        level, ids = root[:, None], [root[:, None]]
        ahead, hidden = root.new_empty(len(root), 1, 0), self.state.hidden  # (B, n, depth), (B, n, D)
        for depth in range(self.depth):
            hidden = self.model.draft.step(depth, hidden, self.model.embed(level))
            scores = self._penalized(self.model.logits(hidden), history, ahead).double()
            if noises[depth] is not None:
                # the entropy along a draft path is not known yet: the temperature is the root's
                scores = scores / dynamic_temperature(history, self.options)[:, None, None] + noises[depth][:, None]
            best = scores.topk(DRAFT_WIDTH).indices  # (B, n, 2)
            level = best.flatten(1)
            ids.append(level)
            ahead = torch.cat((_each_twice(ahead), level[..., None]), 2)
            hidden = _each_twice(hidden)
        return torch.cat(ids, 1)

    # Verification

    def _choose(self, logits: Tensor, noise: Tensor | None, history: TextHistory) -> tuple[Tensor, Tensor]:
        """Choose a token of each row from logits (B, W) and its position's noise: ids (B,), entropies (B,) float64."""
        nothing = history.count.new_empty(len(logits), 1, 0)
        penalized = self._penalized(logits[:, None], history, nothing)[:, 0]
        if self.options.temperature == 0:
            token = penalized.argmax(-1)
        else:
            scores = penalized.double() / dynamic_temperature(history, self.options)[:, None]
            if self.options.top_k or self.options.top_p < 1 or self.options.min_p:
                scores = torch.stack([restrict(row, self.options) for row in scores])
            token = (scores + noise).argmax(-1)
        return token, _entropy(penalized)

    def _penalized(self, logits: Tensor, history: TextHistory, ahead: Tensor) -> Tensor:
        """Apply penalties to logits (B, n, W), and forbid an end of the text before min_new_tokens."""
        logits = penalize(logits, history, self.options, ahead)
        if self._ends is not None and self.options.min_new_tokens:
            early = history.count + ahead.shape[2] < self.options.min_new_tokens
            logits = logits.masked_fill(early[:, None, None] & self._ends, float("-inf"))
        return logits

    def _noises(self) -> list[Tensor | None]:
        """Noise of each depth's position behind the state, once a step: its drafts and its choice meet in it."""
        return [self._noise(self.state.length + depth + 1) for depth in range(self.depth + 1)]

    def _noise(self, position: Tensor) -> Tensor | None:
        """Return the noise (B, W) of each row at its position (B,); None at temperature 0."""
        if self.options.temperature == 0:
            return None
        return gumbel_noise(self._seed, position, self.model.config.vocab_size)

    def _completes_stop(self, number: int, token: int) -> bool:
        row, kept = self._rows[number], max(map(len, self._stops)) - 1
        known = len(row.tail)
        text = row.tail + self._token_bytes(token)
        row.tail = text[max(0, len(text) - kept) :]
        # an occurrence that ends in this token: one before min_new_tokens may still lie in the tail
        return any(text.find(stop, max(0, known - len(stop) + 1)) >= 0 for stop in self._stops)
