"""generation_engine.py: drafts never change the text or the stored tensors, stops end it where plain decoding ends."""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attention_layers import ROTARY_POSITIONS
from custom_kernels import Projection, gumbel_noise
from generation_engine import (
    Request,
    StreamingGenerationEngine,
    TextHistory,
    dynamic_temperature,
    penalize,
    restrict,
)
from hybrid_model import DraftTree, HybridLanguageModel
from model_config import GenerationConfig, PrecisionConfig, preset
from train_engine import load_weights, quantize_weights, save_weights

TINY = replace(
    preset("nano").model, conv_width=0, hidden_dim=64, hypersphere_radius=8.0, ffn_dim=104, num_query_heads=2,
    num_kv_heads=1,
    head_dim=32, recurrent_heads=6, recurrent_key_dim=16, recurrent_value_dim=16, vocab_size=24, anchor_tokens=8,
    sliding_window_size=128, max_context_len=2048, max_output_len=1024,
)  # fmt: skip
ROOT = DraftTree.from_parents([-1])
PLAIN = GenerationConfig(drafts=False, ignore_eos=True, cache_bits=16)
GREEDY = replace(PLAIN, temperature=0.0, cache_bits=8, frequency_penalty=0.3, presence_penalty=0.2)
SAMPLED = replace(
    PLAIN, temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, frequency_penalty=0.2, presence_penalty=0.1,
    penalty_window=100, entropy_low=1.2, entropy_high=1.6, entropy_span=16, cache_bits=4, sampling_seed=5,
)  # fmt: skip
PROMPT = [(7 * i * i + 3 * i) % TINY.vocab_size for i in range(90)]


@pytest.fixture(autouse=True)
def _one_thread(_fixed_randomness: None) -> None:
    torch.set_num_threads(1)  # the tensors are tiny, waking a second thread takes longer than they do


def make_model(width: int = 0, device: str = "cpu", precision: str = "fp32", **shape: object) -> HybridLanguageModel:
    """Drawn weights; the taps of a convolution, where there are some, off their start."""
    with torch.device(device):
        model = HybridLanguageModel(replace(TINY, conv_width=width, **shape), PrecisionConfig(precision=precision))
    model.init_weights(0)
    for name, parameter in model.named_parameters():
        if name.endswith("taps"):
            torch.nn.init.normal_(parameter, 0, 0.5, torch.Generator(device).manual_seed(len(name)))
    return model


@pytest.fixture(scope="module")
def model() -> HybridLanguageModel:
    return make_model()


@pytest.fixture(scope="module", params=[0, 4], ids=["plain", "four-taps"])
def any_model(request: pytest.FixtureRequest) -> HybridLanguageModel:
    """Without a convolution and with one: for the tests of state, trees and roll-back."""
    return make_model(request.param)


# ---------------------------------------------------------------------------
# Sampling


def test_noise_is_gumbel_and_depends_on_seed_position_and_index_only():
    noise = torch.stack([gumbel_noise(3, p, 4096) for p in range(64)])
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - math.pi**2 / 6) < 0.02
    assert torch.equal(gumbel_noise(3, 7, 4096), noise[7]) and torch.equal(gumbel_noise(3, 7, 100), noise[7, :100])
    centred = torch.cat([noise, gumbel_noise(4, 0, 4096)[None]])
    correlation = torch.corrcoef(centred) - torch.eye(65)
    assert correlation.abs().max() < 0.08, "positions and seeds must be independent"  # 5 / sqrt(4096)
    assert torch.unique(torch.stack([gumbel_noise(-1, p, 16) for p in (0, 1 << 20, (1 << 20) - 1)])).numel() == 48
    # argmax(z + noise) follows softmax(z)
    z = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=torch.float64)
    hits = torch.stack([(z + gumbel_noise(0, p, 4)).argmax() for p in range(4000)]).bincount(minlength=4)
    assert _p_value(hits.tolist(), (z.softmax(0) * 4000).tolist()) > 1e-3


NOTHING = torch.empty(1, 1, 0, dtype=torch.int64)  # no token ahead


def _told(options: GenerationConfig, size: int, *told: tuple[int, float]) -> TextHistory:
    """The history of one row that has recorded these (token, entropy)."""
    history = TextHistory(options, size)
    for token, entropy in told:
        history.push(torch.tensor([token]), torch.tensor([entropy], dtype=torch.float64))
    return history


def test_penalties_count_the_bounded_window_of_the_own_path():
    options = replace(PLAIN, frequency_penalty=0.5, presence_penalty=0.25, penalty_window=4, repetition_gain=2.0)
    logits = torch.zeros(1, 1, 6)
    assert torch.equal(penalize(logits, TextHistory(options, 6), options, NOTHING), logits)
    history = _told(options, 6, (5, 0.0), (1, 0.0), (1, 0.0), (2, 0.0))
    # window 5 1 1 2: one of four repeats, strength 1 + 2 / 4
    want = torch.tensor([0, 1.25, 0.75, 0, 0, 0.75]) * -1.5
    assert torch.allclose(penalize(logits, history, options, NOTHING), want)
    # window 1 1 2 1 with one draft ahead: two of four repeat, strength 2; 1 2 1 3 with two: one of four
    want = torch.tensor([0, 1.75, 0.75, 0, 0, 0]) * -2.0
    further = torch.tensor([0, 1.25, 0.75, 0.75, 0, 0]) * -1.5
    assert torch.allclose(penalize(logits, history, options, torch.tensor([[[1]]])), want)
    both = penalize(logits.expand(-1, 2, -1), history, options, torch.tensor([[[1, 3], [1, 1]]]))
    assert torch.allclose(both[0, 0], further) and not torch.allclose(both[0, 1], further)
    history.push(torch.tensor([1]), torch.zeros(1, dtype=torch.float64))
    assert torch.allclose(penalize(logits, history, options, NOTHING), want)


@pytest.mark.parametrize("window", [1, 2, 3, 7])
def test_counts_ahead_are_those_after_the_same_tokens(window: int):
    """Rows of different lengths, windows shorter and longer than a path, rows that are not active."""
    options, size = replace(PLAIN, penalty_window=window), 5
    history, texts = TextHistory(options, size, batch=3), [[], [], []]
    for step in range(12):
        active = torch.tensor([True, step % 2 == 0, step < 4])
        token = torch.randint(0, size, (3,))
        ahead = torch.randint(0, size, (3, 2, 2))
        for depth in range(3):
            counts, total = history.counted(ahead[..., :depth])
            for row, node in itertools.product(range(3), range(2)):
                kept = [*texts[row], *ahead[row, node, :depth].tolist()][-window:]
                assert counts[row, node].tolist() == [kept.count(i) for i in range(size)]
                assert total[row, node] == len(kept)
        history.push(token, torch.zeros(3, dtype=torch.float64), active)
        for row in range(3):
            texts[row] += [int(token[row])] if active[row] else []
    assert history.count.tolist() == [12, 6, 4]
    history.reset(1)
    assert history.count.tolist() == [12, 0, 4] and not history.counts[1].any()


def test_temperature_moves_within_its_range_only_outside_the_band():
    options = replace(PLAIN, temperature=0.8, entropy_low=1.0, entropy_high=3.0, temperature_range=0.3, entropy_span=2)
    for entropies, want in [((), 0.8), ((2.0,), 0.8), ((0.0,), 1.1), ((0.5,), 0.95), ((4.5,), 0.65), ((9.0,), 0.5),
                            ((99.0, 0.0, 1.0), 0.95)]:  # fmt: skip
        history = _told(options, 4, *((0, entropy) for entropy in entropies))
        assert dynamic_temperature(history, options).tolist() == pytest.approx([want]), entropies
    assert dynamic_temperature(history, replace(options, temperature=0.0)) == 0.0
    assert dynamic_temperature(history, replace(options, temperature=0.1, entropy_low=0.0, entropy_high=0.0)) >= 0.05


def test_restrict_keeps_the_set_that_each_rule_names():
    z = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()

    def kept(**rules: float) -> int:
        return int(restrict(z, replace(PLAIN, **({"top_p": 1.0} | rules))).isfinite().sum())

    assert kept() == 5 and kept(top_k=2) == 2 and kept(top_k=9) == 5
    assert kept(top_p=0.69) == 2 and kept(top_p=0.71) == 3 and kept(top_p=1e-9) == 1
    assert kept(min_p=0.3) == 3 and kept(top_k=3, top_p=0.8) == 2 and kept(top_k=2, min_p=0.9) == 1


# ---------------------------------------------------------------------------
# State: prefill in any cut, steps and training agree


@torch.no_grad()
def _steps(model: HybridLanguageModel, ids: Tensor, state, nodes: int = 1) -> Tensor:
    out = []
    for part in ids.split(nodes, 1):
        n = part.shape[1]
        hidden, written = model.nodes(part, state, DraftTree.from_parents(range(-1, n - 1)))
        model.commit(written, state, torch.arange(n, dtype=torch.int32)[None])
        out.append(hidden)
    return torch.cat(out, 1)


def test_training_prefill_chunks_and_steps_give_the_same_logits_and_state(any_model: HybridLanguageModel):
    model = any_model
    ids = torch.randint(0, TINY.vocab_size, (1, 230))
    with torch.no_grad():
        truth = model(ids).hidden
    states, hidden = {}, {}
    for name, run in {
        "one chunk": lambda s: model(ids, state=s).hidden,
        "chunks": lambda s: torch.cat([model.prefill(part, s) for part in ids.split([3, 61, 66, 1, 99], 1)], 1),
        "steps": lambda s: _steps(model, ids, s),
        "chains of three": lambda s: _steps(model, ids, s, 3),
    }.items():
        states[name] = model.decode_state(cache_bits=16)
        hidden[name] = run(states[name])
        error = (hidden[name] - truth).abs().max().item()
        assert error < 2e-5, f"{name}: hidden states off by {error:.1e} from the training path"
        for key, value in states[name].tensors().items():
            off = (value.double() - states["one chunk"].tensors()[key].double()).abs().max().item()
            assert off < 2e-5, f"{name}: {key} off by {off:.1e}"
    assert torch.equal(states["steps"].hidden, hidden["steps"][:, -1:])
    assert torch.allclose(model.logits(hidden["steps"][:, -5:]), truth[:, -5:] @ model.embedding.T * 0.25, atol=1e-4)


def test_a_reset_state_is_a_fresh_one_and_a_copy_is_its_own(any_model: HybridLanguageModel):
    state, fresh = any_model.decode_state(), any_model.decode_state()
    any_model.prefill(torch.tensor([PROMPT]), state)
    kept = {name: value.clone() for name, value in state.tensors().items()}
    assert sum(name.endswith("tail") for name in kept) == (3 if any_model.config.conv_width else 0)
    twin = state.copy()
    state.reset()
    for name, value in fresh.tensors().items():
        assert torch.equal(state.tensors()[name], value), name
        assert torch.equal(twin.tensors()[name], kept[name]), name
        # a page table never changes; everything else held something
        assert name.endswith("page_table") or not torch.equal(kept[name], value), name


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_caches_stay_close_whatever_the_chunks(model: HybridLanguageModel, bits: int):
    ids = torch.randint(0, TINY.vocab_size, (1, 230))
    one, cut = model.decode_state(cache_bits=bits), model.decode_state(cache_bits=bits)
    whole = model.prefill(ids, one)
    model.prefill(ids[:, :70], cut)
    model.prefill(ids[:, 70:71], cut)
    model.prefill(ids[:, 71:], cut)
    for key, value in one.tensors().items():
        other = cut.tensors()[key]
        if key.endswith("codes"):  # float32 noise may move a value over a rounding edge: one code, seldom
            if bits == 4:
                value, other = (torch.cat((x & 15, x >> 4), -1) for x in (value, other))
            moved = (value.int() - other.int()).abs()
            assert moved.max() <= 1 and (moved > 0).float().mean() < 1e-3, key
        else:
            assert torch.allclose(value.double(), other.double(), atol=2e-3), key
    with torch.no_grad():
        error = (whole - model(ids).hidden).abs().max().item()
    assert 0 < error < {8: 0.05, 4: 0.6}[bits], f"hidden states off by {error:.2f} of unit size"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_b125_many_new_tokens_on_a_filled_cache(any_model: HybridLanguageModel, count: int):
    model = any_model
    ids = torch.randint(0, TINY.vocab_size, (1, 20 + count))
    state = model.decode_state(cache_bits=16)
    model.prefill(ids[:, :20], state)
    single = model.nodes(ids[:, 20:21], state, ROOT)[0]
    chain = DraftTree.from_parents(range(-1, count - 1))
    block = model.nodes(ids[:, 20:], state, chain)[0]
    assert torch.equal(block[:, :1], single), "the first node must not depend on the later ones"
    assert (model.prefill(ids[:, 20:], state.copy())[:, :1] - single).abs().max() < 1e-5
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % TINY.vocab_size
    assert torch.equal(model.nodes(other[:, 20:], state, chain)[0][:, : count - 1], block[:, : count - 1])


# ---------------------------------------------------------------------------
# Drafts on and off


def _run(engine: StreamingGenerationEngine, prompt: list[int] = PROMPT) -> list[int]:
    return list(engine.generate(prompt))


def _plain(
    model: HybridLanguageModel, options: GenerationConfig, **more: object
) -> tuple[StreamingGenerationEngine, list[int]]:
    engine = StreamingGenerationEngine(model, replace(options, drafts=False), **more)
    return engine, _run(engine)


Pattern = Callable[[int], tuple[int | None, int | None]]


def _scripted(engine: StreamingGenerationEngine, text: list[int], pattern: Pattern) -> StreamingGenerationEngine:
    """Replace the drafter: at step s, pattern(s) says which candidate (0, 1, None) is right at depth 1 and 2."""
    steps = itertools.count()
    size = engine.model.config.vocab_size

    def pair(which: int | None, right: int) -> list[int]:
        wrong = [(right + 1) % size, (right + 2) % size]
        return wrong if which is None else [right, wrong[0]] if which == 0 else [wrong[0], right]

    def draft(root, position, history):
        one, two = pattern(next(steps))
        count = int(history.count[0])
        rights = [*text[count : count + 2], 0, 0]
        return torch.tensor(
            [[int(root[0]), *pair(one, rights[0]), *pair(two, rights[1]), *pair(two, rights[1])]], device=engine.device
        )

    engine._draft = draft
    engine._record.active = False  # the script looks at the history, which no recording may
    return engine


def _same(plain: StreamingGenerationEngine, drafted: StreamingGenerationEngine) -> None:
    others = drafted.state.tensors()
    different = [name for name, value in plain.state.tensors().items() if not torch.equal(value, others[name])]
    assert not different, f"stored tensors differ: {different}"
    for figure in ("tokens", "entropy_sum", "repetition", "stop_reason"):
        assert getattr(plain.statistics, figure) == getattr(drafted.statistics, figure), figure


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_change_no_id_and_no_stored_bit(any_model: HybridLanguageModel, options: GenerationConfig):
    drafts_change_nothing(any_model, options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("width", [0, 4], ids=["plain", "four-taps"])
def test_drafts_change_no_id_and_no_stored_bit_on_the_gpu(options: GenerationConfig, precision: str, width: int):
    drafts_change_nothing(make_model(width, "cuda", precision), options)


def drafts_change_nothing(model: HybridLanguageModel, options: GenerationConfig) -> None:
    """Compare plain decoding with scripted drafts over 760 tokens: ids, every stored tensor, every figure."""
    options = replace(options, max_new_tokens=760)
    plain, text = _plain(model, options)
    assert len(set(text)) > 12, "a text of one token would show nothing"
    # every accept and reject pattern, in an order that mixes them: three of four drafts are right
    kinds = [*itertools.product((0, 1), (0, 1)), *itertools.product((0, 1), (0, 1)), (0, None), (None, 1), (1, None)]
    order = torch.randint(0, len(kinds), (760,), generator=torch.Generator().manual_seed(1)).tolist()
    drafted = _scripted(
        StreamingGenerationEngine(model, replace(options, drafts=True)), text, lambda step: kinds[order[step]]
    )
    assert _run(drafted) == text
    _same(plain, drafted)
    assert min(drafted.statistics.accepted) >= 200, drafted.statistics.accepted


def test_the_real_draft_head_changes_nothing(any_model: HybridLanguageModel):
    model = any_model
    # hot enough for the shared noise to decide, so that an untrained head is often right
    options = replace(SAMPLED, temperature=6.0, entropy_low=0.5, top_k=0, top_p=1.0, max_new_tokens=300, cache_bits=8)
    plain, text = _plain(model, options)
    drafted = StreamingGenerationEngine(model, replace(options, drafts=True))
    assert _run(drafted) == text
    _same(plain, drafted)
    assert min(drafted.statistics.accepted) >= 20, drafted.statistics.accepted
    assert drafted.statistics.backbone_calls < 0.8 * 300


def test_scope_full_reaches_every_position_with_and_without_drafts():
    model = HybridLanguageModel(replace(TINY, attention_scope="full"), PrecisionConfig(precision="fp32"))
    model.init_weights(0)
    options = replace(GREEDY, max_new_tokens=50)
    plain, text = _plain(model, options, max_length=300)
    drafted = StreamingGenerationEngine(model, replace(options, drafts=True), max_length=300)
    assert _run(_scripted(drafted, text, lambda step: (step % 2, 1))) == text
    _same(plain, drafted)
    ids = torch.randint(0, TINY.vocab_size, (1, 300))
    state = model.decode_state(cache_bits=16, max_length=300)
    model.prefill(ids[:, :290], state)
    with torch.no_grad():
        assert (_steps(model, ids[:, 290:], state) - model(ids).hidden[:, 290:]).abs().max() < 2e-5


def test_proposals_are_what_the_draft_head_was_trained_to_predict(model: HybridLanguageModel):
    ids = torch.tensor([PROMPT])
    # a bonus in place of a penalty, large enough to decide: the draft at depth 1 must count at depth 2
    engine = StreamingGenerationEngine(model, replace(GREEDY, drafts=True, frequency_penalty=-99.0))
    model.prefill(ids[:, :-1], engine.state)
    proposed = engine._draft(ids[0, -1:], engine._noises(), engine.history)[0].tolist()
    with torch.no_grad():
        hidden = model(ids).hidden
        for first in proposed[1:3]:
            # training: position t reads h_t and token t + 1, then token t + 2; here t + 2 is the first draft
            next_ids = torch.stack((torch.roll(ids, -1, 1), torch.roll(ids, -2, 1)))
            next_ids[1, 0, -2] = first
            one, two = (h[0, -2] @ model.embedding.T for h in model.draft_hidden(hidden, next_ids))
            assert proposed[1:3] == one.topk(2).indices.tolist()
            leaves = proposed[3:5] if first == proposed[1] else proposed[5:7]
            penalised = penalize(two[None, None] * 0.25, engine.history, engine.options, torch.tensor([[[first]]]))
            assert leaves == penalised[0, 0].topk(2).indices.tolist()


@pytest.mark.parametrize("one", [0, 1, None])
@pytest.mark.parametrize("two", [0, 1, None])
def test_b091_every_accept_pattern_and_the_calls_it_takes(
    any_model: HybridLanguageModel, one: int | None, two: int | None
):
    model = any_model
    options = replace(GREEDY, max_new_tokens=60, cache_bits=16)
    plain, text = _plain(model, options)
    drafted = _scripted(StreamingGenerationEngine(model, replace(options, drafts=True)), text, lambda step: (one, two))
    assert _run(drafted) == text
    _same(plain, drafted)
    tokens_a_call = 1 if one is None else 2 if two is None else 3
    calls = drafted.statistics.backbone_calls
    assert calls == 60 // tokens_a_call, f"{calls} calls for 60 tokens"
    assert drafted.statistics.acceptance == ({1: 0.0}.get(tokens_a_call, 1.0), {3: 1.0}.get(tokens_a_call, 0.0))
    if tokens_a_call == 3:
        assert calls <= 60 / 2.9


def test_the_text_depends_on_seed_and_prompt_only(any_model: HybridLanguageModel):
    model = any_model
    options = replace(SAMPLED, max_new_tokens=30)
    engine, text = _plain(model, options)
    assert _run(engine) == text and _plain(model, options)[1] == text
    assert _plain(model, replace(options, sampling_seed=6))[1] != text
    assert _plain(model, replace(options, prefill_chunk=17, cache_bits=16))[1] == _plain(
        model, replace(options, cache_bits=16))[1]


# ---------------------------------------------------------------------------
# Stops and edges


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_b097_a_stop_ends_at_the_same_token_in_every_slot(model: HybridLanguageModel, lead: int):
    options = replace(SAMPLED, max_new_tokens=60, ignore_eos=False)
    _, free = _plain(model, options)
    at = next(i for i in range(7, 60) if free[i] not in free[:i])
    plain, text = _plain(model, options, eos_id=free[at])
    assert text == free[: at + 1] and plain.statistics.stop_reason == "eos"
    # `lead` steps of one token, then three a step: the stop falls in another slot of its step each time
    drafted = StreamingGenerationEngine(model, replace(options, drafts=True), eos_id=free[at])
    _scripted(drafted, free, lambda step: (None, None) if step < lead else (0, 1))
    assert _run(drafted) == text
    _same(plain, drafted)
    assert int(drafted.state.length[0]) == len(PROMPT) + at, "the stop itself is not in the state"
    assert drafted.stop_rate == 1.0


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_a_stop_string_may_span_tokens(model: HybridLanguageModel, lead: int):
    options = replace(SAMPLED, max_new_tokens=60)
    _, free = _plain(model, options)
    spell = [b"", *(bytes([97 + i]) * (1 + i % 2) for i in range(TINY.vocab_size - 1))]  # one id without text
    written = [b"".join(spell[i] for i in free[: n + 1]) for n in range(60)]
    stop = written[12][-4:-1] if len(spell[free[12]]) == 2 else written[12][-3:]
    end = next(n for n in range(60) if stop in written[n])
    options = replace(options, stop=(stop.decode(),))
    plain, text = _plain(model, options, token_bytes=spell.__getitem__)
    assert text == free[: end + 1] and plain.statistics.stop_reason == "stop"
    drafted = StreamingGenerationEngine(model, replace(options, drafts=True), token_bytes=spell.__getitem__)
    _scripted(drafted, free, lambda step: (None, None) if step < lead else (1, 0))
    assert _run(drafted) == text
    _same(plain, drafted)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_first_of_several_stops_ends_the_text(model: HybridLanguageModel, batch: int):
    """Strings of different lengths and an id: whichever comes first, whatever the tails that were kept."""
    options = replace(SAMPLED, max_new_tokens=60)
    _, free = _plain(model, options)
    spell = [bytes([97 + i]) for i in range(TINY.vocab_size)]
    text = "".join(chr(97 + i) for i in free)
    long, short = text[30:37], text[40:42]
    ends = {stop: text.index(stop) + len(stop) for stop in (long, short)}
    once = next(i for i in range(5, 60) if free[i] not in free[:i])
    cases = ((long, short), ()), ((short, "never there"), ()), ((long,), (free[once],)), ((), (free[once],))
    for stops, ids in cases:
        end = min([ends[stop] for stop in stops if stop in ends] + [once + 1] * len(ids))
        chosen = replace(options, stop=stops, stop_ids=ids, drafts=True)
        engine = StreamingGenerationEngine(model, chosen, batch=batch, token_bytes=spell.__getitem__)
        got = [[], []]
        for chunk in engine.serve([Request(PROMPT), Request(PROMPT)]):
            got[chunk.index] += chunk.ids
        assert got == [free[:end]] * 2, (stops, ids)
        assert engine.statistics.stop_reason == ("eos" if ids and end == once + 1 else "stop")


def test_a_stop_string_does_not_span_requests(model: HybridLanguageModel):
    options = replace(SAMPLED, max_new_tokens=10)
    _, free = _plain(model, options)
    spell = [bytes([97 + i]) for i in range(TINY.vocab_size)]
    stop = spell[free[-1]] + spell[free[0]]
    assert stop not in b"".join(spell[i] for i in free)
    engine, text = _plain(model, replace(options, stop=(stop.decode(),)), token_bytes=spell.__getitem__)
    assert text == free and _run(engine) == free


def test_minimum_length_forbids_the_end_on_each_path(model: HybridLanguageModel):
    options = replace(SAMPLED, max_new_tokens=60, ignore_eos=False)
    _, free = _plain(model, options)
    first = next(i for i in range(5, 20) if free[i] not in free[:i])
    eos = free[first]
    allowed = _plain(model, replace(options, min_new_tokens=first), eos_id=eos)[1]
    assert allowed == free[: first + 1], "the token after min_new_tokens may be the end"
    assert _plain(model, replace(options, min_new_tokens=first + 1), eos_id=eos)[1][first] != eos
    options = replace(options, min_new_tokens=20)
    plain, text = _plain(model, options, eos_id=eos)
    assert eos not in text[:20] and text != free
    drafted = _scripted(StreamingGenerationEngine(model, replace(options, drafts=True), eos_id=eos), text,
                        lambda step: (0, 1))  # fmt: skip
    assert _run(drafted) == text
    _same(plain, drafted)


def test_b122_a_request_sees_nothing_of_the_one_before(model: HybridLanguageModel):
    options = replace(SAMPLED, max_new_tokens=40, drafts=True)
    alone = StreamingGenerationEngine(model, options)
    text = _run(alone)
    engine = StreamingGenerationEngine(model, options)
    _run(engine, list(range(20)) * 9)
    for name, value in engine.state.tensors().items():  # what the first request left is poison
        if "page_table" not in name:
            value.fill_(float("nan") if value.is_floating_point() else 77)
    assert _run(engine) == text
    for name, value in alone.state.tensors().items():
        assert torch.equal(value, engine.state.tensors()[name]), name


def test_closing_the_stream_keeps_what_was_made(model: HybridLanguageModel):
    options = replace(GREEDY, max_new_tokens=40)
    _, text = _plain(model, options)
    engine = _scripted(StreamingGenerationEngine(model, replace(options, drafts=True)), text, lambda step: (0, 0))
    stream = engine.generate(PROMPT)
    assert [next(stream) for _ in range(4)] == text[:4]
    stream.close()
    assert (engine.statistics.tokens, engine.statistics.stop_reason) == (4, "closed")
    assert int(engine.state.length[0]) == len(PROMPT) - 1 + 6, "whole steps are committed"
    assert _run(engine) == text and engine.requests == 2


def test_figures_of_a_long_text(any_model: HybridLanguageModel, monkeypatch: pytest.MonkeyPatch):
    model = any_model
    monkeypatch.setattr("generation_engine.CURVE_TOKENS", 16)
    engine, text = _plain(model, replace(SAMPLED, max_new_tokens=64))
    figures = engine.statistics
    assert [p.tokens for p in figures.curve] == [16, 32, 48, 64] and figures.curve[-1].repetition == figures.repetition
    assert figures.repetition == pytest.approx(1 - len(set(text)) / 64)
    assert 0 < figures.entropy_mean < math.log(TINY.vocab_size) and figures.stop_reason == "length"
    assert figures.state_bytes == model.config.state_bytes() and figures.cache_bytes > TINY.cache_bytes(4)
    assert (figures.prompt_tokens, figures.tokens, figures.backbone_calls) == (90, 64, 64) and engine.stop_rate == 0.0


def test_edges_of_a_request(model: HybridLanguageModel):
    engine = StreamingGenerationEngine(model, replace(PLAIN, max_new_tokens=5, drafts=True), eos_id=3)
    assert _run(engine, []) == _run(engine, [3]), "an empty prompt starts as a document does"
    assert len(_run(engine, [1])) == 5
    nothing = StreamingGenerationEngine(model, replace(PLAIN, max_new_tokens=0))
    assert _run(nothing) == [] and nothing.statistics.stop_reason == "length"


@pytest.mark.parametrize("prompt, options, message", [
    ([], {}, "an empty prompt must have an eos_id to start from, got none"),
    ([1, 24], {}, "a prompt id must be within 0..23, got 24 at position 1"),
    ([-1], {}, "a prompt id must be within 0..23, got -1 at position 0"),
    ([1] * 1049, {"max_new_tokens": 1000}, "prompt and output must fit 2048 tokens of context, got 1049 + 1000 = 2049"),
])  # fmt: skip
def test_impossible_requests_are_refused_before_any_work(model, prompt, options, message):
    engine = StreamingGenerationEngine(model, replace(PLAIN, **options))
    with pytest.raises(ValueError) as caught:
        engine.generate(prompt)
    assert str(caught.value) == message


def test_impossible_options_are_refused(model: HybridLanguageModel):
    with pytest.raises(ValueError, match="max_new_tokens must be at most max_output_len 1024, got 1025"):
        StreamingGenerationEngine(model, replace(PLAIN, max_new_tokens=1025))
    with pytest.raises(ValueError, match="a stop string must come with token_bytes"):
        StreamingGenerationEngine(model, replace(PLAIN, stop=("end",)))
    with pytest.raises(ValueError, match=r"a stop id must be within 0\.\.23, got -1"):
        StreamingGenerationEngine(model, replace(PLAIN, stop_ids=(3, -1)))
    with pytest.raises(ValueError, match=r"eos_id must be within 0\.\.23, got 24"):
        StreamingGenerationEngine(model, PLAIN, eos_id=24)


# ---------------------------------------------------------------------------
# The law of the text, against its exact distribution, with controls that must fail


class TableModel:
    """Stands in for the model: the logits after a token are a row of a table, the draft head's of a similar one."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self.table = torch.randn(size, size, generator=generator)
        self.drafts = self.table + 0.5 * torch.randn(size, size, generator=generator)
        self.rows = torch.cat((self.table, self.drafts))
        self.config = SimpleNamespace(vocab_size=size, draft_depth=2, max_context_len=64, max_output_len=64)
        self.embedding, self.streamed = torch.zeros(1), False
        self.draft = SimpleNamespace(step=lambda depth, hidden, embedded: embedded + size)

    def decode_state(self, *, batch: int, **_) -> SimpleNamespace:
        state = SimpleNamespace(state_bytes=0, cache_bytes=0, hidden=torch.zeros(batch, 1, 1))
        state.length = torch.zeros(batch, dtype=torch.int64)
        state.reset = state.length.zero_
        return state

    def embed(self, ids: Tensor) -> Tensor:
        return ids[..., None]

    def prefill(self, ids: Tensor, state) -> None:
        state.length += ids.shape[1]

    def nodes(self, ids: Tensor, state, tree) -> tuple[Tensor, None]:
        return ids[..., None], None

    def logits(self, hidden: Tensor) -> Tensor:
        return self.rows[hidden[..., 0].long()]

    def commit(self, written, state, path) -> None:
        state.length += (path >= 0).sum(1)


LAW = replace(
    PLAIN, max_new_tokens=3, temperature=0.9, top_p=0.9, frequency_penalty=0.6, presence_penalty=0.4, penalty_window=2,
    repetition_gain=1.0, entropy_low=1.2, entropy_high=1.3, entropy_span=2, temperature_range=0.5, drafts=True,
)  # fmt: skip


def _exact_law(table: Tensor, first: int, top_p: float) -> dict[tuple[int, ...], float]:
    """Probability of each three-token text: the options of LAW written out plainly, in float64."""
    law = {}
    for text in itertools.product(range(len(table)), repeat=3):
        chance, last, entropies = 1.0, first, []
        for n, token in enumerate(text):
            z = table[last].double().tolist()
            window = text[max(0, n - 2) : n]
            strength = 1 + (1 - len(set(window)) / len(window) if window else 0)
            z = [x - strength * (0.6 * window.count(i) + 0.4 * (i in window)) for i, x in enumerate(z)]
            temperature = 0.9
            if entropies:
                mean = sum(entropies[-2:]) / len(entropies[-2:])
                temperature += 0.5 * max(0.0, 1.2 - mean) / 1.2 - 0.5 * min(1.0, max(0.0, mean - 1.3) / 1.3)
                temperature = max(0.45, temperature)
            total = sum(map(math.exp, z))
            entropies.append(-sum(math.exp(x) / total * (x - math.log(total)) for x in z))
            weights = [math.exp(x / temperature) for x in z]
            kept, held = set(), 0.0
            for i in sorted(range(len(z)), key=lambda i: -z[i]):
                if held >= top_p * sum(weights):
                    break
                kept.add(i)
                held += weights[i]
            chance *= weights[token] / held if token in kept else 0.0
            last = token
        law[text] = chance
    assert abs(sum(law.values()) - 1) < 1e-9
    return law


def _p_value(seen: list[float], expected: list[float]) -> float:
    """Upper tail of chi-square, cells of under 5 expected joined; an impossible outcome that was seen gives 0."""
    if any(s and not e for s, e in zip(seen, expected, strict=True)):
        return 0.0
    big = [(s, e) for s, e in zip(seen, expected, strict=True) if e >= 5]
    rest = sum(expected) - sum(e for _, e in big)
    cells = [*big, (sum(seen) - sum(s for s, _ in big), rest)] if rest > 1e-6 else big
    statistic = sum((s - e) ** 2 / e for s, e in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def _draws(
    count: int, spoil: Callable[[StreamingGenerationEngine], None] | None = None, options: GenerationConfig = LAW
) -> tuple[float, int]:
    """Chi-square p-value of `count` texts, one a row with its own seed, against the exact law; drafts accepted."""
    table = TableModel(5)
    engine = StreamingGenerationEngine(table, options, batch=count)
    if spoil:
        spoil(engine)
    # as if each row had been given the prompt [0, 1]
    engine._seed.copy_(torch.arange(count))
    engine.state.length.fill_(1)
    for x, value in ((engine._root, 1), (engine._limit, 3), (engine._reason, 0)):
        x.fill_(value)
    texts, accepted = [[] for _ in range(count)], 0
    while bool((engine._reason == 0).any()):
        for text, line in zip(texts, engine._launch()(), strict=True):
            new = [token for token in line[:3] if token >= 0]
            text += new
            accepted += max(0, len(new) - 1)
    seen = Counter(map(tuple, texts))
    law = _exact_law(table.table, 1, options.top_p)
    return _p_value([seen[text] for text in law], [count * chance for chance in law.values()]), accepted


def test_the_text_follows_the_exact_law():
    p, accepted = _draws(2500)
    assert accepted > 1500, f"{accepted} accepted drafts would not exercise the tree"
    assert p > 1e-3, f"chi-square p = {p:.1e}"


def test_four_hundred_thousand_texts_follow_the_exact_law():
    p, accepted = _draws(400_000, options=replace(LAW, top_p=1.0))
    assert accepted > 240_000 and p > 1e-3, f"chi-square p = {p:.1e}, {accepted} accepted"


def _freeze_penalties(engine: StreamingGenerationEngine) -> None:
    # penalties as they were when the step began
    verify, penalized = engine._verify, engine._penalized

    def verifying():
        engine._frozen = copy.deepcopy(engine.history)
        verify()

    engine._verify = verifying
    engine._penalized = lambda logits, history, ahead: penalized(logits, engine._frozen, ahead)


def _freeze_temperature(engine: StreamingGenerationEngine) -> None:
    # the next choice does not see the entropies of those before
    choose = engine._choose

    def frozen(logits, noise, history):
        blind = copy.copy(history)
        blind.entropies = torch.full_like(history.entropies, LAW.entropy_low)
        return choose(logits, noise, blind)

    engine._choose = frozen


def _emit_any_candidate(engine: StreamingGenerationEngine) -> None:
    # accepts the drafter's first candidate in place of the model's own choice
    choose, draft = engine._choose, engine._draft

    def drafting(root, noises, history):
        engine._ids_of_step = draft(root, noises, history)
        return engine._ids_of_step

    def choosing(logits, noise, history):
        token, entropy = choose(logits, noise, history)
        return torch.where(history.count == 1, engine._ids_of_step[:, 1], token), entropy

    engine._draft, engine._choose = drafting, choosing


def _shift_noise(engine: StreamingGenerationEngine) -> None:
    # one noise for every position: drafts and model still agree, but positions are no longer independent
    noise = engine._noise
    engine._noise = lambda position: noise(torch.zeros_like(position))


@pytest.mark.parametrize("spoil", [_freeze_penalties, _freeze_temperature, _emit_any_candidate, _shift_noise])
def test_controls_that_must_fail_do(spoil: Callable[[StreamingGenerationEngine], None]):
    p, _ = _draws(1200, spoil)
    assert p < 1e-6, f"{spoil.__name__} went unseen: p = {p:.1e}"


# ---------------------------------------------------------------------------
# Batches


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("more", [{}, {"drafts": False}, {"temperature": 0.0}], ids=["drafts", "plain", "greedy"])
def test_a_request_has_the_ids_in_a_batch_that_it_has_alone(any_model: HybridLanguageModel, batch: int, more: dict):
    batch_changes_nothing(any_model, replace(SAMPLED, **({"max_new_tokens": 40, "drafts": True} | more)), batch)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_request_has_the_ids_in_a_batch_that_it_has_alone_on_the_gpu(precision: str):
    batch_changes_nothing(make_model(0, "cuda", precision), replace(SAMPLED, max_new_tokens=100, drafts=True), 5)


@pytest.mark.gpu
@pytest.mark.parametrize("stop", [(), ("zz",)], ids=["one graph", "a graph a part"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_steps_are_the_launched_ones_bit_for_bit(precision: str, stop: tuple[str, ...]):
    model = make_model(0, "cuda", precision)
    options = replace(SAMPLED, max_new_tokens=300, drafts=True, stop=stop)
    engines = [StreamingGenerationEngine(model, options, token_bytes=lambda token: bytes([97 + token])) for _ in "ab"]
    engines[0]._record.active = False
    texts = [_run(engine) for engine in engines]
    assert texts[0] == texts[1] and len(engines[1]._record._graphs) == (5 if stop else 1)
    _same(*engines)


def batch_changes_nothing(model: HybridLanguageModel, options: GenerationConfig, batch: int) -> None:
    """Compare five requests of different prompts, lengths and seeds, alone and by continuous batching."""
    requests = [Request(PROMPT, 1), Request([1, 2, 3], 2, 17), Request(PROMPT[:70], 3), Request([5], 4, 31),
                Request(list(range(20)) * 9, 5, 0)]  # fmt: skip
    alone, figures = StreamingGenerationEngine(model, options), []
    texts = []
    for request in requests:
        texts.append([token for chunk in alone.serve([request]) for token in chunk.ids])
        figures.append(alone.statistics)
    engine = StreamingGenerationEngine(model, options, batch=batch)
    got, done = [[] for _ in requests], {}
    for chunk in engine.serve(requests):
        assert chunk.index not in done, "a request that is done makes nothing more"
        got[chunk.index] += chunk.ids
        if chunk.done:
            done[chunk.index] = chunk.statistics
    assert got == texts and [len(text) for text in got] == [options.max_new_tokens, 17, options.max_new_tokens, 31, 0]
    for index, one in enumerate(figures):
        for figure in ("tokens", "entropy_sum", "repetition", "drafted", "accepted", "backbone_calls", "stop_reason"):
            assert getattr(done[index], figure) == getattr(one, figure), (index, figure)
    assert engine.requests == 5 and engine._rows == [None] * batch


@pytest.mark.parametrize("batch", [1, 2])
def test_a_prefix_is_run_once_and_begins_every_prompt(any_model: HybridLanguageModel, batch: int):
    options = replace(GREEDY, max_new_tokens=12, cache_bits=16, drafts=True)
    rest = [[1, 2, 3], [7], [9, 9, 4, 11]]
    engine = StreamingGenerationEngine(any_model, options, batch=batch)
    run, prefill = [], any_model.prefill
    any_model.prefill = lambda ids, state: run.append(ids.shape[1]) or prefill(ids, state)
    try:
        got = [[] for _ in rest]
        for chunk in engine.serve([Request(ids) for ids in rest], prefix=PROMPT):
            got[chunk.index] += chunk.ids
    finally:
        del any_model.prefill
    assert run == [len(PROMPT), 2, 3], "the prefix once, then each prompt but for its last token"
    alone = StreamingGenerationEngine(any_model, options)
    assert got == [_run(alone, [*PROMPT, *ids]) for ids in rest]
    assert _run(alone, [5, 6]) == _run(StreamingGenerationEngine(any_model, options), [5, 6])
    most = any_model.config.max_context_len - 12 - len(PROMPT)
    with pytest.raises(ValueError, match=f"got {most + len(PROMPT) + 1} \\+ 12 = {most + len(PROMPT) + 13}"):
        list(engine.serve([Request([1] * (most + 1))], prefix=PROMPT))


def test_a_text_that_is_resumed_is_the_one_made_at_once(any_model: HybridLanguageModel):
    """Prompt, answer and second prompt in one, or the second on the state of the first, or on a stored state."""
    options = replace(GREEDY, max_new_tokens=30, drafts=True, loop_tokens=0)
    engine = StreamingGenerationEngine(any_model, options)
    first, more = _run(engine), [4, 9, 2]
    stored = {name: value.clone() for name, value in engine.session().items()}
    second = list(engine.generate(more, resume=True))
    assert engine.statistics.prompt_tokens == 3 and engine.held == len(PROMPT) + 30 + 3 + 30
    other = StreamingGenerationEngine(any_model, options)
    other.restore(stored)
    assert other.last_id == first[-1] and list(other.generate(more, resume=True)) == second
    for name, value in engine.state.tensors().items():
        if "codes" in name or "scale" in name:  # page 0 belongs to nobody
            assert torch.equal(value[1:], other.state.tensors()[name][1:]), name
        else:
            assert torch.equal(value, other.state.tensors()[name]), name
    # greedy steps at 8 bit may differ from a prefill of the whole in a last bit, not in what the prompt is
    whole = StreamingGenerationEngine(any_model, replace(options, cache_bits=16))
    again = StreamingGenerationEngine(any_model, replace(options, cache_bits=16))
    first = _run(again)
    assert list(again.generate(more, resume=True)) == _run(whole, [*PROMPT, *first, *more])


def test_a_session_holds_no_empty_page_and_fits_its_model_only(model: HybridLanguageModel):
    full = make_model(attention_scope="full")
    options = replace(GREEDY, max_new_tokens=10)
    long, short = (StreamingGenerationEngine(full, options, max_length=n) for n in (1024, 300))
    with pytest.raises(ValueError, match="a session needs a text that this engine made before, alone, got none"):
        long.session()
    with pytest.raises(ValueError, match="resume needs a text that this engine made before, alone, got none"):
        long.generate([1], resume=True)
    _run(long)
    stored = long.session()
    pages = [value.shape[0] for name, value in stored.items() if name.endswith("codes")]
    assert pages == [1 + 2] * len(pages), "90 + 10 tokens lie in two pages"
    # of a longer text that was here before nothing is left
    list(short.generate([9] * 250))
    short.restore(stored)
    pools = [value for name, value in short.state.tensors().items() if name.endswith("codes")]
    assert pools and not any(value[1 + 2 :].any() for value in pools)
    assert list(short.generate([5], resume=True)) == list(long.generate([5], resume=True))
    with pytest.raises(ValueError, match=r"prompt and output must fit 300 tokens of context, got 311 \+ 10 = 321"):
        short.generate([1] * 200, resume=True)
    with pytest.raises(ValueError, match=r"stored layers\.\d\.key_codes must be .* torch.uint8, got .* torch.int8"):
        StreamingGenerationEngine(full, replace(options, cache_bits=4)).restore(stored)
    with pytest.raises(ValueError, match="a stored state must have this model's tensors"):
        long.restore({name: value for name, value in stored.items() if name != "hidden"})


def test_a_loop_ends_the_text_and_nothing_shorter_does(model: HybridLanguageModel, monkeypatch: pytest.MonkeyPatch):
    """Texts by a script: a block of 5 from token 20 on; a block longer than the longest period; one broken block."""
    options = replace(PLAIN, max_new_tokens=300, loop_tokens=40, temperature=0.0)

    def ends(text: list[int], **more: object) -> tuple[int, str]:
        engine = StreamingGenerationEngine(model, replace(options, **more))

        def choose(logits, position, history):
            token = torch.tensor([text[int(history.count[0])]])
            return token, torch.zeros(1, dtype=torch.float64)

        engine._choose = choose
        return len(_run(engine)), engine.statistics.stop_reason

    noise = torch.randint(0, TINY.vocab_size, (400,)).tolist()
    block = [1, 2, 3, 4, 5]
    looped = [*noise[:20], 6, *block * 80]
    # 40 tokens that equal the ones five before them: eight blocks after the first
    assert ends(looped) == (21 + 5 + 40, "loop")
    assert ends(looped, loop_tokens=0) == (300, "length")
    assert ends(looped, min_new_tokens=100) == (100, "loop")
    assert ends(looped, loop_tokens=295) == (300, "length")
    assert ends(noise[:65] * 6) == (300, "length") and ends(noise[:64] * 6) == (64 + 40, "loop")
    broken = [*noise[:20], 6, *(block * 8)[:-1], 7, *noise]
    assert ends(broken) == (300, "length")


def test_a_row_of_a_batch_is_a_copy_of_a_state(any_model: HybridLanguageModel):
    one, many = any_model.decode_state(cache_bits=8), any_model.decode_state(batch=3, cache_bits=8)
    for row, count in ((0, 20), (2, 90), (1, 300)):
        one.reset()
        any_model.prefill(torch.tensor([(PROMPT * 4)[:count]]), one)
        many.take(row, one)
        token = torch.tensor([[7]])
        alone = any_model.nodes(token, one, ROOT)[0]
        assert torch.equal(any_model.nodes(token.expand(3, -1), many, ROOT)[0][row : row + 1], alone)
    assert many.length.tolist() == [20, 300, 90]


def test_an_empty_path_changes_nothing(any_model: HybridLanguageModel):
    state = any_model.decode_state(cache_bits=8)
    any_model.prefill(torch.tensor([PROMPT]), state)
    kept = {name: value.clone() for name, value in state.tensors().items()}
    _, written = any_model.nodes(torch.tensor([[1, 2, 3]]), state, DraftTree.from_parents([-1, 0, 0]))
    any_model.commit(written, state, torch.full((1, 2), -1, dtype=torch.int32))
    for name, value in state.tensors().items():
        if "codes" in name or "scale" in name:  # page 0 belongs to nobody
            value, kept[name] = value[1:], kept[name][1:]
        assert torch.equal(value, kept[name]), name


def test_drafts_past_the_last_position_are_harmless():
    model = make_model(max_context_len=ROTARY_POSITIONS)
    engine = StreamingGenerationEngine(model, replace(SAMPLED, max_new_tokens=1, drafts=True))
    state = engine.state
    model.prefill(torch.tensor([PROMPT]), state)
    state.length.fill_(ROTARY_POSITIONS - 1)
    hidden, _ = model.nodes(torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), state, engine.tree)
    assert hidden.isfinite().all()


def test_packed_weights_are_one_function_in_prefill_and_decoding():
    """R18: decoding multiplies by 4-bit weights, and so does the prompt, or the state would belong to another model."""
    config = replace(
        TINY, hidden_dim=128, hypersphere_radius=11.314, ffn_dim=128, num_query_heads=4, num_kv_heads=2, head_dim=32,
        recurrent_heads=4, recurrent_key_dim=32, recurrent_value_dim=32, wide_tail_layers=0,
    )  # fmt: skip
    model = HybridLanguageModel(config, PrecisionConfig(precision="fp4-emulated"))
    model.init_weights(0)
    model.eval()
    ids = torch.randint(0, config.vocab_size, (1, 40))
    with torch.no_grad():
        wide = model(ids).hidden
        for module in model.modules():
            if isinstance(module, Projection) and module.precision == "fp4":
                module.pack()
        packed = model(ids).hidden
        state = model.decode_state(cache_bits=16)
        steps = _steps(model, ids, state)
    assert (steps - packed).abs().max() < 1e-4
    assert (packed - wide).norm() / wide.norm() > 1e-2, "nothing was quantised"


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_file_is_the_model_packed_in_place(tmp_path, bits: int):
    shape = replace(
        TINY, hidden_dim=128, hypersphere_radius=11.314, ffn_dim=128, num_query_heads=4, num_kv_heads=2, head_dim=32,
        recurrent_heads=4, recurrent_key_dim=32, recurrent_value_dim=32,
    )  # fmt: skip
    model = HybridLanguageModel(shape, PrecisionConfig(precision="fp32"))
    model.init_weights(0)
    wide, packed = tmp_path / "wide.safetensors", tmp_path / "packed.safetensors"
    config = replace(preset("nano"), model=shape, precision=PrecisionConfig(precision="fp32"))
    save_weights(wide, dict(model.named_parameters()), config)
    errors = list(quantize_weights(wide, packed, bits))
    projections = [m for m in model.modules() if isinstance(m, Projection)]
    assert len(errors) == len(projections) and all({4: 0.05, 8: 0.002}[bits] < e.relative < {4: 0.2, 8: 0.02}[bits]
                                                   for e in errors)  # fmt: skip
    assert packed.stat().st_size < {4: 0.3, 8: 0.4}[bits] * wide.stat().st_size
    read, info = load_weights(packed)
    assert info["packed_bits"] == bits
    for projection in projections:
        projection.pack(bits)
    options = replace(SAMPLED, max_new_tokens=20, drafts=True)
    assert _run(StreamingGenerationEngine(read, options)) == _run(StreamingGenerationEngine(model.eval(), options))
    streamed, _ = load_weights(packed, stream_layers=True)
    assert _run(StreamingGenerationEngine(streamed, options)) == _run(StreamingGenerationEngine(read, options))
    # a damaged code is seen
    data = bytearray(packed.read_bytes())
    data[-100] ^= 1
    packed.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="is damaged"):
        load_weights(packed)


def test_streamed_layers_change_no_bit_and_hold_no_weights(any_model: HybridLanguageModel, tmp_path):
    path = tmp_path / "w.safetensors"
    config = replace(preset("nano"), model=any_model.config, precision=PrecisionConfig(precision="fp32"))
    save_weights(path, dict(any_model.named_parameters()), config)
    streamed, _ = load_weights(path, stream_layers=True)
    held = []

    def count() -> int:
        return sum(p.numel() > 0 for layer in streamed.layers for p in layer.parameters())

    each = [sum(1 for _ in layer.parameters()) for layer in any_model.layers]
    for layer in streamed.layers:
        layer.feed_forward.register_forward_hook(lambda *_: held.append(count()))
    whole = (torch.nn.Module.train(m, False) for m in (any_model, streamed))
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        one, other = (m(ids).hidden for m in whole)
    assert torch.equal(one, other) and count() == 0
    assert held == each, "one layer's weights at a time"
    options = replace(SAMPLED, max_new_tokens=40, drafts=True)
    engines = [StreamingGenerationEngine(m, options) for m in (any_model, streamed)]
    assert _run(engines[0]) == _run(engines[1])
    _same(*engines)
    # a layer's fault shows when it is read
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="is damaged"), torch.no_grad():
        load_weights(path, stream_layers=True)[0](ids)
