"""Streaming generation: a prompt in chunks, then one tree of drafts a step, verified by the model itself.

This file knows ids, not text: it takes prompt ids and yields committed ids. It reads bottom-up: noise, penalties and
temperature, choice, statistics, then the engine: prefill, draft, verify, loop.

The token at absolute position p is

    argmax( z / T + Gumbel(seed, p) )        z = penalised logits, masked by top-k, top-p, min-p        T = 0: argmax z

with noise that is a function of (seed, position, vocabulary index) only. The draft head proposes the two largest of its
own z / T plus the same noise, so a good draft meets the model's choice; a draft is accepted iff it is that choice. The
text is therefore that of plain decoding whatever the drafter. Step of depth 2, root = newest token, not yet run:

    root -+- a -+- aa         one pass of the model over the seven nodes gives the logits after each; the walk takes
          |     +- ab         the model's choice at the root, goes on at the child that equals it, and stops where none
          +- b -+- ba         does. The walked nodes are committed, the last choice is the next root: 1 to 3 tokens a
                +- bb         pass.

Penalties, temperature, entropy, minimum length and stops are evaluated at a node after all tokens of its path have been
recorded in the history, one by one, as plain decoding would; nothing is refreshed by step.

Letters: N tree nodes, W vocabulary, D width. Public names: gumbel_noise, TextHistory, penalize, dynamic_temperature,
restrict, GenerationStatistics, StreamingGenerationEngine.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_model import DraftTree, HybridLanguageModel
from model_config import GenerationConfig

__all__ = [
    "GenerationStatistics",
    "StreamingGenerationEngine",
    "TextHistory",
    "dynamic_temperature",
    "gumbel_noise",
    "penalize",
    "restrict",
]

DRAFT_WIDTH = 2  # candidates at each node: a second one raises acceptance from about 0.74 to 0.90 and costs no pass
CURVE_TOKENS = 1024  # tokens between two points of the stability curve

# ---------------------------------------------------------------------------
# Noise

_WORD = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def gumbel_noise(seed: int, position: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return standard Gumbel noise (W,) float64, a function of (seed, position, index) alone, the same on any device.

    Counter-based: index i takes the i-th output of the 64-bit SplitMix generator (Steele, Lea, Flood, 2014) whose start
    is the mixed pair (seed, position), so nothing depends on what was drawn before.
    """
    start = _mix(_mix(seed & _WORD) ^ (position & _WORD))
    index = torch.arange(1, size + 1, dtype=torch.int64, device=device)
    bits = index * _signed(_GOLDEN) + _signed(start)  # wraps modulo 2^64
    bits = (bits ^ _shifted(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_MIX_2)
    bits = bits ^ _shifted(bits, 31)
    # 53 bits, centred in their cell, so that neither logarithm meets 0
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _mix(word: int) -> int:
    word = (word + _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)  # logical shift of int64


# ---------------------------------------------------------------------------
# Penalties and temperature: functions of a node's own path


class TextHistory:
    """What the sampler remembers of the generated text: a window of ids, and the entropies of the newest choices."""

    def __init__(self, options: GenerationConfig) -> None:
        self.window: deque[int] = deque(maxlen=options.penalty_window)
        self.entropies: deque[float] = deque(maxlen=options.entropy_span)
        self.count = 0  # tokens generated

    def push(self, token: int, entropy: float) -> None:
        """Record one token and the entropy (nats) of the distribution that it was chosen from."""
        self.window.append(token)
        self.entropies.append(entropy)
        self.count += 1

    def counts(self, ahead: Sequence[int] = ()) -> Counter[int]:
        """Count the ids of the window as it would be after the tokens `ahead`."""
        ids = [*self.window, *ahead]
        return Counter(ids[-self.window.maxlen :])

    @property
    def repetition(self) -> float:
        """Share of the window's tokens that repeat an earlier one of it, 0 ... 1."""
        return _repeated_share(self.counts())


def _repeated_share(counts: Counter[int]) -> float:
    total = counts.total()
    return 1 - len(counts) / total if total else 0.0


def penalize(logits: Tensor, history: TextHistory, options: GenerationConfig, ahead: Sequence[int] = ()) -> Tensor:
    """Subtract strength * (frequency * count + presence) from the logits (W,) of the ids of the window.

    strength = 1 + repetition_gain * share of repeated tokens in the window. The window holds generated tokens only, so
    that a prompt's own words stay free, and is bounded, so that in 131,072 tokens no common word is driven out.
    """
    if not options.frequency_penalty and not options.presence_penalty:
        return logits
    counts = history.counts(ahead)
    if not counts:
        return logits
    strength = 1 + options.repetition_gain * _repeated_share(counts)
    amounts = [strength * (options.frequency_penalty * n + options.presence_penalty) for n in counts.values()]
    ids = torch.tensor(list(counts), dtype=torch.int64, device=logits.device)
    out = logits.clone()
    out[ids] -= torch.tensor(amounts, dtype=torch.float64).to(logits)
    return out


def dynamic_temperature(history: TextHistory, options: GenerationConfig) -> float:
    """Return the temperature of the next choice, from the running mean entropy of the newest ones.

    Inside [entropy_low, entropy_high] it is the configured one. Below, it rises in proportion, by temperature_range at
    entropy 0; above, it falls, by temperature_range at twice entropy_high, and never below half the configured one.
    """
    base = options.temperature
    if base == 0 or not history.entropies:
        return base
    mean = sum(history.entropies) / len(history.entropies)
    if mean < options.entropy_low:
        return base + options.temperature_range * (options.entropy_low - mean) / options.entropy_low
    excess = (mean - options.entropy_high) / options.entropy_high if options.entropy_high else 0.0
    return max(base / 2, base - options.temperature_range * min(1.0, max(0.0, excess)))


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
        scaled = scaled.masked_fill(scaled < ordered[kept - 1], minus)
    if options.min_p > 0:
        share = scaled.softmax(0)
        scaled = scaled.masked_fill(share < options.min_p * share.max(), minus)
    return scaled


def _entropy(logits: Tensor) -> float:
    """Entropy in nats of softmax(logits), logits (W,): of the model's penalised prediction, at temperature 1."""
    return torch.special.entr(logits.softmax(0)).sum().item()


# ---------------------------------------------------------------------------
# Statistics


class CurvePoint(NamedTuple):
    """One point of the stability curve, over the tokens since the last one where that has a meaning."""

    tokens: int
    entropy: float  # running mean, nats
    repetition: float  # share of repeated tokens in the penalty window
    accepted: float  # tokens a backbone call so far


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
    stop_reason: str = "running"  # eos, stop, length; closed where the consumer left
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
# Engine


class _Tree(NamedTuple):
    """A draft tree with, per node, its children: known to the host, so that the walk needs no device."""

    shape: DraftTree
    children: list[list[int]]


class StreamingGenerationEngine:
    """Generate from a model, one request at a time; every buffer is allocated here and reused."""

    def __init__(
        self,
        model: HybridLanguageModel,
        options: GenerationConfig,
        eos_id: int | None = None,
        *,
        token_bytes: Callable[[int], bytes] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Prepare for requests under `options`.

        eos_id ends a text (unless options.ignore_eos) and starts an empty prompt. token_bytes maps an id to its bytes,
        needed for options.stop. max_length bounds prompt plus output under attention scope full (None = the model's).
        """
        config = model.config
        if eos_id is not None and not 0 <= eos_id < config.vocab_size:
            raise ValueError(f"eos_id must be within 0..{config.vocab_size - 1}, got {eos_id}")
        if options.stop and token_bytes is None:
            raise ValueError("a stop string must come with token_bytes, which maps an id to its bytes")
        if options.max_new_tokens > config.max_output_len:
            raise ValueError(
                f"max_new_tokens must be at most max_output_len {config.max_output_len}, got {options.max_new_tokens}"
            )
        self.model, self.options, self.eos_id = model, options, eos_id
        self.max_length = min(max_length or config.max_context_len, config.max_context_len)
        self.device = model.embedding.device
        self.state = model.decode_state(cache_bits=options.cache_bits, max_length=self.max_length)
        self.statistics = GenerationStatistics()
        self.requests = self.ended = 0  # requests finished, and those that ended by themselves: eos or stop string
        self._draft_depth = config.draft_depth if options.drafts else 0
        self._trees = [self._build_tree(depth) for depth in range(self._draft_depth + 1)]
        self._stop_bytes = (options.stop or "").encode()
        self._token_bytes = token_bytes
        self._tail = b""  # newest bytes of the text, for a stop string that spans tokens

    @property
    def stop_rate(self) -> float:
        """Share of finished requests that ended by themselves rather than at max_new_tokens."""
        return self.ended / max(1, self.requests)

    def generate(self, prompt_ids: Sequence[int]) -> Iterator[int]:
        """Check the prompt, then stream committed ids: the end-of-text id or the stop string's last id comes last.

        An empty prompt starts from the end-of-text id, as training documents do. Closing the stream early keeps what
        was yielded; the next request starts from a cleared state.
        """
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            if self.eos_id is None:
                raise ValueError("an empty prompt must have an eos_id to start from, got none")
            prompt = [self.eos_id]
        size = self.model.config.vocab_size
        for at, token in enumerate(prompt):
            if not 0 <= token < size:
                raise ValueError(f"a prompt id must be within 0..{size - 1}, got {token} at position {at}")
        total = len(prompt) + self.options.max_new_tokens
        if total > self.max_length:
            raise ValueError(
                f"prompt and output must fit {self.max_length} tokens of context, "
                f"got {len(prompt)} + {self.options.max_new_tokens} = {total}"
            )
        return self._stream(prompt)

    def _stream(self, prompt: list[int]) -> Iterator[int]:
        """Loop: prefill all but the last prompt token, then step from it as the first root."""
        # 1) a cleared state and fresh figures
        self.state.reset()
        self._tail = b""
        history = TextHistory(self.options)
        figures = self.statistics = GenerationStatistics(
            prompt_tokens=len(prompt), state_bytes=self.state.state_bytes, cache_bytes=self.state.cache_bytes
        )
        try:
            # 2) the prompt
            started = time.perf_counter()
            self._prefill(prompt[:-1])
            figures.prefill_seconds = time.perf_counter() - started
            if self.options.max_new_tokens == 0:
                figures.stop_reason = "length"
            # 3) steps; the time that the consumer takes between tokens is not counted
            root = prompt[-1]
            while figures.stop_reason == "running":
                started = time.perf_counter()
                emitted = self._step(root, len(prompt) - 1 + history.count, history)
                root = emitted[-1]
                figures.seconds += time.perf_counter() - started
                reason, figures.stop_reason = figures.stop_reason, "running"
                for left, token in zip(range(len(emitted) - 1, -1, -1), emitted, strict=True):
                    figures.tokens += 1
                    figures.stop_reason = "running" if left else reason
                    yield token
        finally:
            # 4) what the request came to, also where it was closed
            figures.repetition = history.repetition
            figures.repetition_peak = max(figures.repetition_peak, figures.repetition)
            if figures.stop_reason == "running":
                figures.stop_reason = "closed"
            self.requests += 1
            self.ended += figures.stop_reason in ("eos", "stop")

    def _prefill(self, ids: list[int]) -> None:
        for start in range(0, len(ids), self.options.prefill_chunk):
            self.model.prefill(self._ids(ids[start : start + self.options.prefill_chunk]), self.state)

    @torch.no_grad()
    def _step(self, root: int, position: int, history: TextHistory) -> list[int]:
        """Draft, verify and commit from a root at `position`, the first one not in the state: return 1 to 3 new ids."""
        left = self.options.max_new_tokens - history.count
        tree = self._trees[min(self._draft_depth, left - 1)]
        ids = self._draft(root, position, tree, history)
        hidden, written = self.model.nodes(self._ids(ids), self.state, tree.shape)
        self.statistics.backbone_calls += 1
        path, emitted = self._walk(ids, position, tree, self.model.logits(hidden)[0], history)
        self.model.commit(written, self.state, torch.tensor([path], dtype=torch.int32, device=self.device))
        return emitted

    # Drafts

    def _draft(self, root: int, position: int, tree: _Tree, history: TextHistory) -> list[int]:
        """Fill the tree's nodes with ids, in node order: the root, then two candidates below each node, by depth.

        Depth 1 reads the final hidden state of the token before the root and the root's embedding, depth 2 depth 1's
        output and the candidate's: what the draft head was trained on.
        """
        ids, paths = [root], [[]]
        hidden = self.state.hidden  # (1, 1, D)
        first = 0
        while tree.children[first]:
            depth = len(paths[first])
            level = range(first, len(ids))
            embedded = self.model.embed(self._ids(ids[first:]))  # (1, n, D)
            # one hidden state serves both depths' rows: depth 1 has one node, and depth 2's nodes share its output
            hidden = self.model.draft.step(depth, hidden.expand(-1, len(level), -1), embedded)
            logits = self.model.logits(hidden)[0]  # (n, W)
            noise = self._noise(position + depth + 1)
            for row, node in enumerate(level):
                for token in self._propose(logits[row], noise, history, paths[node]):
                    ids.append(token)
                    paths.append([*paths[node], token])
            first = level.stop
        return ids

    def _propose(self, logits: Tensor, noise: Tensor | None, history: TextHistory, ahead: list[int]) -> list[int]:
        """Return the two most likely ids after the history and the drafts `ahead`, by draft logits (W,) and noise."""
        scores = self._penalized(logits, history, ahead).double()
        if noise is not None:
            # the entropy along a draft path is not known yet: the temperature is the root's
            scores = scores / dynamic_temperature(history, self.options) + noise
        return scores.topk(DRAFT_WIDTH).indices.tolist()

    # Verification

    def _walk(
        self, ids: list[int], position: int, tree: _Tree, logits: Tensor, history: TextHistory
    ) -> tuple[list[int], list[int]]:
        """Follow the model's own choices down the tree: return the nodes to commit and the ids chosen at them.

        logits (N, W). A choice is recorded before the next node is judged, and a stop ends the walk, so that what
        follows a stop is neither emitted nor committed.
        """
        node, path, emitted = 0, [], []
        while True:
            path.append(node)
            emitted.append(self._choose(logits[node], position + len(path), history))
            if self._stopped(emitted[-1], history):
                return path, emitted
            children, depth = tree.children[node], len(path) - 1
            if not children:
                return path, emitted
            self.statistics.drafted[depth] += 1
            match = next((child for child in children if ids[child] == emitted[-1]), None)
            if match is None:
                return path, emitted
            self.statistics.accepted[depth] += 1
            node = match

    def _choose(self, logits: Tensor, position: int, history: TextHistory) -> int:
        """Choose the token at `position` from logits (W,), and record it."""
        penalized = self._penalized(logits, history)
        temperature = dynamic_temperature(history, self.options)
        if temperature == 0:
            token = int(penalized.argmax())
        else:
            scores = restrict(penalized.double() / temperature, self.options) + self._noise(position)
            token = int(scores.argmax())
        entropy = _entropy(penalized)
        history.push(token, entropy)
        figures = self.statistics
        figures.entropy_sum += entropy
        if history.count % CURVE_TOKENS == 0:
            mean = sum(history.entropies) / len(history.entropies)
            figures.curve.append(
                CurvePoint(history.count, mean, history.repetition, history.count / max(1, figures.backbone_calls))
            )
            figures.repetition_peak = max(figures.repetition_peak, figures.curve[-1].repetition)
        return token

    def _penalized(self, logits: Tensor, history: TextHistory, ahead: Sequence[int] = ()) -> Tensor:
        """Apply penalties, and forbid the end of text before min_new_tokens."""
        logits = penalize(logits, history, self.options, ahead)
        if self._ends_text(self.eos_id) and history.count + len(ahead) < self.options.min_new_tokens:
            logits = logits.clone()
            logits[self.eos_id] = float("-inf")
        return logits

    def _ends_text(self, token: int | None) -> bool:
        return token is not None and token == self.eos_id and not self.options.ignore_eos

    def _stopped(self, token: int, history: TextHistory) -> bool:
        """Say whether the text ends with this token, just recorded, and why."""
        reason = None
        if self._ends_text(token):
            reason = "eos"
        elif self._stop_bytes and self._completes_stop(token) and history.count >= self.options.min_new_tokens:
            reason = "stop"
        elif history.count >= self.options.max_new_tokens:
            reason = "length"
        if reason:
            self.statistics.stop_reason = reason
        return reason is not None

    def _completes_stop(self, token: int) -> bool:
        text = self._tail + self._token_bytes(token)
        self._tail = text[len(text) - len(self._stop_bytes) + 1 :] if len(text) >= len(self._stop_bytes) else text
        return self._stop_bytes in text

    # Small parts

    def _noise(self, position: int) -> Tensor | None:
        if self.options.temperature == 0:
            return None
        return gumbel_noise(self.options.sampling_seed, position, self.model.config.vocab_size, self.device)

    def _ids(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], dtype=torch.int64, device=self.device)  # (1, N)

    def _build_tree(self, depth: int) -> _Tree:
        parents, level = [-1], [0]
        for _ in range(depth):
            start = len(parents)
            parents += [node for node in level for _ in range(DRAFT_WIDTH)]
            level = list(range(start, len(parents)))
        children = [[n for n, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
        return _Tree(DraftTree.from_parents(parents, self.device), children)
