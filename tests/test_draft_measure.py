"""Benchmarks of the draft head and of answers: what they count is what the engines count, on small models."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import train_engine
from custom_kernels import gumbel_noise
from dataset_pipeline import StepPlan, TokenFile, open_tokens, prepare, write_tokens
from generation_engine import StreamingGenerationEngine
from hybrid_model import HybridLanguageModel
from model_config import GenerationConfig, TrainConfig, preset
from train_engine import TrainingEngine, read_run_config, save_weights

STEPS = 12
BENCHMARKS = Path(__file__).resolve().parent / "benchmarks"
NANO = preset("nano")
SMALL = NANO.with_values(dict(
    hidden_dim=64, hypersphere_radius=8.0, ffn_dim=104, num_query_heads=2, num_kv_heads=1, head_dim=32,
    recurrent_heads=2, recurrent_key_dim=32, recurrent_value_dim=32, vocab_size=24, sliding_window_size=128,
    anchor_tokens=8,
))  # fmt: skip


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


drafts, responses = _load("drafts"), _load("responses")


@pytest.fixture(autouse=True)
def _one_thread(_fixed_randomness: None) -> None:
    torch.set_num_threads(1)


def _text(count: int, seed: int = 0) -> list[int]:
    """Ids of a noisy rule: 13 times the last one and 7, in five of six places."""
    draw, ids = np.random.default_rng(seed), [1]
    for _ in range(count):
        ids.append(int(draw.integers(24)) if draw.integers(6) == 0 else (13 * ids[-1] + 7) % 24)
    return ids[1:]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HybridLanguageModel:
    """Trained for a second: knows the rule in part; noise on the draft head, which else meets every greedy choice."""
    folder = tmp_path_factory.mktemp("model")
    torch.set_num_threads(1)
    write_tokens(folder / "tokens.bin", [_text(20_000, 9)], vocab_size=24)
    config = SMALL.with_values(dict(total_tokens=STEPS * 512, tokens_per_step=512, context=128, average_fraction=0.0,
                                    device="cpu", micro_batch_tokens=512))  # fmt: skip
    engine = TrainingEngine(config, open_tokens(folder / "tokens.bin"), log=lambda line: None)
    for _ in range(STEPS):
        engine.train_step()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in engine.model.draft.output:
            layer.weight += 1.5 * layer.weight.std() * torch.randn(layer.weight.shape, generator=generator)
    return engine.model.eval().requires_grad_(False)


# ---------------------------------------------------------------------------
# Draft head: acceptance


def _options(temperature: float, count: int = 1) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=count, temperature=temperature, top_p=1.0, frequency_penalty=0.0, presence_penalty=0.0,
        temperature_range=0.0, ignore_eos=True, cache_bits=16, sampling_seed=3,
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counting_a_generated_text_again_gives_the_engines_own_counters(model, temperature):
    prompt = _text(150)
    made = drafts.free_text(model, prompt, 301, temperature, 3)
    assert made["drafted_again"] == made["drafted"] and made["accepted_again"] == made["accepted"]
    assert made["agreement"] == 1.0
    # the equality says something only where both outcomes occur at both depths
    assert all(0 < a < d for a, d in zip(made["accepted"], made["drafted"], strict=True)), made


def _shift_draft_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of the position before for everything: an absolute position that is off by one."""
    monkeypatch.setattr(drafts, "gumbel_noise", lambda seed, p, size, device: gumbel_noise(seed, p - 1, size, device))


def _top_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second candidate left out."""
    whole = drafts.accept

    def narrow(*arguments):
        met = whole(*arguments)
        return met._replace(one=met.one[..., :1].expand(-1, -1, 2))

    monkeypatch.setattr(drafts, "accept", narrow)


def _early_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states of one position before: the draft would read the token that it has in its state already."""
    whole = drafts.hidden_from
    monkeypatch.setattr(drafts, "hidden_from", lambda model, ids, begin: whole(model, ids, begin - 1)[:, :-1])


@pytest.mark.parametrize("spoil", [_shift_draft_noise, _top_one_only, _early_hidden])
def test_a_count_by_another_rule_is_seen(model, monkeypatch, spoil):
    spoil(monkeypatch)
    made = drafts.free_text(model, _text(40), 120, 1.0, 3)
    assert made["accepted_again"] != made["accepted"] or made["drafted_again"] != made["drafted"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_root_of_a_foreign_text_is_judged_as_the_engine_would_there(model, temperature):
    ids, first, count = _text(90), 60, 24
    rows = torch.tensor([_text(90, 1), ids])
    met = drafts.accept(
        model, rows, drafts.hidden_from(model, rows, first - 1, segment=33)[:, : count + 2], first, temperature, [7, 3],
        chunk=10,
    )  # fmt: skip
    engine = StreamingGenerationEngine(model, _options(temperature))

    def choice(position: int) -> int:
        """What generation emits at a position of the text."""
        engine.state.reset()
        hidden = model.prefill(torch.tensor([ids[:position]]), engine.state)
        logits = model.logits(hidden[:, -1:])[0]
        return int(engine._choose(logits, engine._noise(engine.state.length), engine.history)[0])

    seen = set()
    for at in range(count):
        root = first + at
        engine.state.reset()
        model.prefill(torch.tensor([ids[:root]]), engine.state)
        with torch.no_grad():
            nodes = engine._draft(torch.tensor([ids[root]]), engine._noises(), engine.history)[0].tolist()
        chosen = choice(root + 1)
        assert met.hit[1, at] == (chosen == ids[root + 1])
        assert met.one[1, at].tolist() == [chosen == nodes[1], chosen in nodes[1:3]]
        # the engine has a node for the text's token only where that is among its two candidates
        if ids[root + 1] in nodes[1:3]:
            leaves = nodes[3:5] if ids[root + 1] == nodes[1] else nodes[5:7]
            second = choice(root + 2)
            assert met.two[1, at].tolist() == [second == leaves[0], second in leaves]
            seen.add(bool(met.two[1, at, 1]))
    assert met.one[1, :, 1].unique().numel() == 2 and seen == {True, False}


def test_segments_change_no_hidden_state(model):
    ids = torch.tensor([_text(200), _text(200, 1)])
    with torch.no_grad():
        whole = model(ids).hidden
    for begin, segment in ((0, 64), (70, 50), (150, 300)):
        got = drafts.hidden_from(model, ids, begin, segment)
        assert got.shape == whole[:, begin:].shape and (got - whole[:, begin:]).abs().max() < 2e-5


def test_walk_counts_as_the_engine_at_the_end_of_a_text():
    yes, no = torch.ones(7, dtype=torch.bool), torch.zeros(7, dtype=torch.bool)

    def counted(one, two, count):
        figures = drafts.walk(one, two, count)
        return figures.backbone_calls, figures.drafted, figures.accepted

    assert counted(yes, yes, 7) == (3, [2, 2], [2, 2])  # 3 + 3 + 1: no draft for the last one
    assert counted(yes, yes, 5) == (2, [2, 1], [2, 1])  # 3 + 2
    assert counted(yes, no, 7) == (4, [3, 3], [3, 0])
    assert counted(no, yes, 7) == (7, [6, 0], [0, 0])
    # depth 2 is judged at the root, not at the token after it
    two = torch.tensor([1, 0, 0, 0, 0, 0, 0], dtype=torch.bool)
    assert counted(yes, two, 5) == (2, [2, 1], [2, 1])


def test_shares_and_their_errors():
    one = torch.tensor([[[1, 1], [0, 1], [0, 0], [1, 1]]] * 2, dtype=torch.bool)
    two = torch.tensor([[[1, 1], [1, 1], [1, 1], [0, 1]]] * 2, dtype=torch.bool)
    hit = torch.tensor([[1, 1, 1, 0]] * 2, dtype=torch.bool)
    found = drafts.summary(drafts.Acceptance(one, two, hit))
    shares = {name: (value["share"], value["n"]) for name, value in found.items()}
    assert shares == {
        "choice is the text": (0.75, 8),
        "depth 1, top 1": (0.5, 8), "depth 1, top 2": (0.75, 8),
        "depth 2, top 1": (0.75, 8), "depth 2, top 2": (1.0, 8),
        "depth 2 after depth 1, top 1": (0.5, 4), "depth 2 after depth 1, top 2": (1.0, 6),
        "depth 2 on path, top 1": (1.0, 2), "depth 2 on path, top 2": (1.0, 4),
    }  # fmt: skip
    assert found["depth 1, top 1"]["se"] == pytest.approx((0.25 / 8) ** 0.5) and found["depth 1, top 1"]["se_rows"] == 0


def test_rows_are_documents_or_join_those_of_one_source(tmp_path):
    documents = [[i] * n for i, n in enumerate((50, 7, 9, 8, 6, 12))]
    sources = ["a", "a", "b", "a", "b", "b"]
    write_tokens(tmp_path / "tokens.bin", documents, vocab_size=24, sources=sources)
    rows, joined = drafts.long_rows(open_tokens(tmp_path / "tokens.bin"), 14, 9)
    assert rows.tolist() == [[0] * 14, [1] * 7 + [3] * 7, [2] * 9 + [4] * 5] and joined == 2
    assert drafts.long_rows(open_tokens(tmp_path / "tokens.bin"), 14, 1)[0].tolist() == [[0] * 14]
    with pytest.raises(ValueError, match="must hold 70 tokens of one source"):
        drafts.long_rows(open_tokens(tmp_path / "tokens.bin"), 70, 9)
    # fewer than there are: spread over the sources
    write_tokens(tmp_path / "two.bin", [[i] * 5 for i in range(20)], vocab_size=24, sources=["a"] * 10 + ["b"] * 10)
    assert drafts.long_rows(open_tokens(tmp_path / "two.bin"), 10, 4)[0][:, 0].tolist() == [0, 6, 12, 18]


def test_the_same_text_is_cut_to_the_short_context():
    rows = np.arange(8193)[None] + np.array([[0], [100_000]])
    cut = drafts.same_text(rows, 8192, 1024)
    assert cut.shape == (4, 1025)
    # roots are at 512 ... 1,023 of each piece: the tokens at 7,168 ... 8,191, each once
    assert sorted(cut[:, 512:1024].ravel().tolist()) == rows[:, 7168:8192].ravel().tolist()
    assert drafts.distinct_share([1, 2, 3, 4, 1, 2, 3, 4, 1]) == 4 / 6


def _weights(folder: Path, model: HybridLanguageModel) -> Path:
    config = replace(SMALL, model=model.config)
    save_weights(folder / "final.safetensors", dict(model.named_parameters()), config)
    return folder / "final.safetensors"


def test_one_command_prints_a_table_and_one_json_line(model, tmp_path, capsys):
    write_tokens(tmp_path / "tokens.bin", [_text(300, s) for s in range(3)], vocab_size=24)
    command = ["--weights", str(_weights(tmp_path, model)), "--data", str(tmp_path / "tokens.bin"), "--device", "cpu"]
    assert drafts.main([*command, "--contexts", "64", "256", "--rows", "2", "--free-tokens", "40"]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert "2 rows: 2 of one document, 0 of joined documents of one source" in table
    assert len(result["cells"]) == 6 and len(result["ratios"]) == 8 and len(result["free"]) == 2
    for cell in result["cells"]:
        roots = {"64 tokens, rows' start": 64, "64 tokens, text of 256": 256, "256 tokens": 256}[cell["text"]]
        shares = cell["shares"]
        assert shares["depth 1, top 2"]["n"] == roots
        assert shares["depth 1, top 1"]["share"] <= shares["depth 1, top 2"]["share"]
        shown = f"{shares['depth 1, top 1']['share']:.3f}±{shares['depth 1, top 1']['se']:.3f}"
        assert any(row.startswith(cell["text"]) and shown in row for row in table)
    assert drafts.main([*command, "--contexts", "1000"]) == 2
    assert "error: " in (err := capsys.readouterr().err) and "give shorter --contexts" in err


def test_a_table_whose_choices_the_engine_does_not_make_is_refused(model, tmp_path, capsys, monkeypatch):
    write_tokens(tmp_path / "tokens.bin", [_text(300)], vocab_size=24)
    _shift_draft_noise(monkeypatch)
    command = ["--weights", str(_weights(tmp_path, model)), "--data", str(tmp_path / "tokens.bin"), "--device", "cpu"]
    assert drafts.main([*command, "--contexts", "128", "--free-tokens", "60"]) == 2
    caught = capsys.readouterr()
    assert "must repeat 95% of the engine's choices, got " in caught.err and caught.out == ""


# ---------------------------------------------------------------------------
# Responses


def _turns(*said: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]


TALK = [_turns(f"what is {i} and {j} ?", "it is a number .") for i in range(12) for j in range(10)]
SHAPE = [
    "--layers", "4", "--recurrent-layers", "3", "--attention-layers", "1", "--hidden-dim", "64",
    "--hypersphere-radius", "8", "--ffn-dim", "104", "--num-query-heads", "2", "--num-kv-heads", "1",
    "--head-dim", "32", "--recurrent-heads", "2", "--recurrent-key-dim", "32", "--recurrent-value-dim", "32",
    "--tokens-per-step", "512", "--micro-batch-tokens", "512", "--context", "128", "--eval-tokens", "512",
]  # fmt: skip


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    folder = tmp_path_factory.mktemp("talk")
    prepare(_write_text(folder), folder / "text", vocab_size=300)
    return responses.write_split(TALK, folder / "talk", folder / "text/tokenizer.json")


def _write_text(folder: Path) -> Path:
    draw, words = (
        np.random.default_rng(0),
        "the mill by a river ground what grain it was given , and is it so ?".split(),
    )
    (folder / "text.txt").write_text("\n".join(" ".join(draw.choice(words, 9)) for _ in range(400)))
    return folder / "text.txt"


def test_prompts_carry_no_gradient_on_nano(talk):
    proof = responses.prove_mask(talk)
    responses.require_mask(proof)
    assert proof["prompt_positions"] + proof["answer_positions"] == 256
    assert proof["logit_gradient_at_prompts"] == proof["change_by_prompt_targets"] == 0.0
    assert proof["draft_targets_on_prompts"] == 0
    assert proof["logit_gradient_at_answers"] > 1e-4 and proof["change_by_answer_targets"] > 1e-4


def _weigh(value: float):
    """Every position that has a target weighs `value`, prompts too."""

    def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
        whole = StepPlan.__getitem__

        def weighed(plan: StepPlan, index: int):
            batch = whole(plan, index)
            return replace(batch, loss_weights=torch.where(batch.targets >= 0, batch.loss_weights + value, 0))

        monkeypatch.setattr(StepPlan, "__getitem__", weighed)

    return spoil


def _leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss forgets its weights where the engine takes it."""
    whole = train_engine.fused_chunked_cross_entropy
    monkeypatch.setattr(
        train_engine, "fused_chunked_cross_entropy", lambda *x, loss_weights=None, **more: whole(*x, **more)
    )


def _unmask_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StepPlan.__getitem__
    monkeypatch.setattr(StepPlan, "__getitem__", lambda plan, index: replace(
        batch := whole(plan, index), draft_targets=batch.draft_targets.clamp_min(0)
    ))  # fmt: skip


@pytest.mark.parametrize(
    "spoil", [_weigh(1.0), _weigh(1e-6), _leak, _unmask_drafts], ids=["all", "a millionth", "no weights", "drafts"]
)
def test_a_leak_from_prompts_is_seen(talk, monkeypatch, spoil):
    spoil(monkeypatch)
    with pytest.raises(ValueError, match="must be exactly 0, got"):
        responses.require_mask(responses.prove_mask(talk))


def test_answers_are_found_by_the_markers():
    names = {0: "<|endoftext|>", 1: "<|system|>", 2: "<|user|>", 3: "<|assistant|>", 4: "<|end|>"}
    ids = [0, 1, 9, 4, 2, 8, 7, 4, 3, 6, 5, 4, 2, 8, 4, 3, 4, 0, 0, 9, 2, 3]
    answers = [at for at, found in enumerate(responses.answer_targets(ids, names), 1) if found]
    assert answers == [9, 10, 11, 16]


def test_the_logit_gradient_is_that_of_plain_cross_entropy():
    logits, targets = torch.randn(9, 17), torch.arange(9)
    weights = torch.tensor([1.0, 0, 1, 0.5, 0, 1, 1, 0, 1])
    leaf = logits.clone().requires_grad_()
    (F.cross_entropy(leaf, targets, reduction="none") * weights).sum().div(4.0).backward()
    got = responses.logit_gradient(logits, targets, weights, 4.0)
    assert torch.allclose(got, leaf.grad, atol=1e-7) and (got[weights == 0] == 0).all()


def test_no_held_out_prompt_is_trained_on():
    talk = [_turns(f"{'Say' if i % 3 else 'say'} {i % 20} ", f"answer {i}") for i in range(60)]
    training, held = responses.split(talk, 0.25)
    openings = [{responses.opening(turns) for turns in part} for part in (training, held)]
    assert not openings[0] & openings[1] and len(openings[1]) == 5 and len(training) + len(held) == 60
    assert responses.split(talk, 0.25) == (training, held)
    with pytest.raises(ValueError, match="at least 2 different first messages, got 1"):
        responses.split([talk[0], talk[0]], 0.5)


def test_conversations_of_both_forms_are_read_alike(tmp_path):
    (tmp_path / "talk.jsonl").write_text(
        "".join(
            json.dumps({"messages": turns}) + "\n" for turns in (_turns("a?", "Yes", "b: c", "d"), _turns("e", "f"))
        )
    )
    found = responses.read_conversations(tmp_path / "talk.jsonl")
    assert found == [_turns("a?", "Yes", "b: c", "d"), _turns("e", "f")]
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "assistant", "content": "x"}]}')
    with pytest.raises(ValueError, match=r"bad.jsonl:1 must begin with a user's message"):
        responses.read_conversations(tmp_path / "bad.jsonl")
    pytest.importorskip("yaml", reason="PyYAML is not installed: .yml cannot be read")
    (tmp_path / "x.yml").write_text(
        'categories:\n- x\nconversations:\n- - a?\n  - Yes\n  - "b: c"\n  - d\n  - left over\n- - e\n  - f\n- - alone\n'
    )
    assert responses.read_conversations(tmp_path) == found


def test_a_supervised_run_after_pre_training_in_one_command(tmp_path, capsys):
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in TALK))
    command = [
        "--conversations", str(tmp_path / "talk.jsonl"), "--out", str(tmp_path / "out"), "--device", "cpu",
        "--context", "128", "--tokens-per-step", "512", "--rate-factor", "1", "--epochs", "5", "--prompts", "3",
        "--samples", "2",
    ]  # fmt: skip
    text = ["--text", str(_write_text(tmp_path)), "--vocab-size", "300", "--preset", "nano"]
    flags = ["--pretrain-tokens", "2048", "--pretrain-flags", *SHAPE]
    assert responses.main([*command, *text, *flags]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    before, after = result["before"], result["after"]
    assert after["loss"] < before["loss"] - 1 and after["accuracy"] > before["accuracy"]
    assert before["ended"] == 0 and after["ended"] == 1
    assert after["answers"] == ["it is a number ."] * 3 and after["of_training"] == 1 and after["distinct"] == 1 / 3
    assert result["held_out"] == 12 and result["training"] == 108 and len(result["prompts"]) == 3
    assert any(
        row.startswith("answers that end by <|end|>") and row.split()[-2:] == ["0.0%", "100.0%"] for row in table
    )
    assert sum(row.startswith("  after:") for row in table) == 2
    # the second run starts from the first one's weights and shape, under its tokenizer, and learns no prompt
    tuned = read_run_config(tmp_path / "out/tuned")
    assert tuned.train.initial_weights == str(tmp_path / "out/pretrained/final.safetensors")
    assert tuned.model.hidden_dim == 64 and tuned.optimizer.spectral_lambda == 0
    assert open_tokens(tmp_path / "out/talk/tokens.bin").supervised == result["supervised"] < result["tokens"]
    # weights in place of a text must bring their tokenizer
    bare = replace(tuned, train=TrainConfig())
    tensors = load_file(tmp_path / "out/tuned/final.safetensors")
    save_weights(tmp_path / "bare.safetensors", tensors, bare)
    assert responses.main([*command, "--weights", str(tmp_path / "bare.safetensors")]) == 2
    assert capsys.readouterr().err.endswith("holds no tokenizer; train with tokenizer.json beside the token file\n")
