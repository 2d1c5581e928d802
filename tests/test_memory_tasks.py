"""Tasks of tests/benchmarks/memory.py: documents, order of presentation, scoring by an oracle and by chance, parts."""

import json
import math
import sys
from argparse import Namespace
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))

import memory
from memory import (
    ASK,
    BEGIN,
    DEPTHS,
    TELL,
    Alphabet,
    Associative,
    Document,
    Needle,
    associative_gaps,
    grid_table,
    guess_rate,
    half_lives,
    hybrid_predictor,
    join_documents,
    make_alphabets,
    measured_half_lives,
    score,
    score_associative,
    score_needle,
    train_hybrid,
    training_documents,
    write_in_order,
)

from dataset_pipeline import PackedSequenceDataLoader, build_curriculum, open_tokens, write_tokens
from hybrid_model import HybridLanguageModel
from model_config import Config, CurriculumConfig, ModelConfig, PrecisionConfig, preset
from recurrent_layers import half_life_biases
from train_engine import save_weights

ALPHABET, _ = make_alphabets(96, None)  # 24 keys, 24 values, 45 filler ids
ANCHORS, WINDOW, ROW = 4, 16, 128
TASKS = {"associative": Associative(ALPHABET, ANCHORS, (2, 4, 8)), "needle": Needle(ALPHABET, ANCHORS)}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny(
    vocab: int, *, window: int = WINDOW, anchors: int = ANCHORS, row: int = ROW, step: int = 4 * ROW, steps: int = 1
) -> Config:
    """Four layers, 64 wide."""
    model = ModelConfig(
        layers=4, recurrent_layers=3, attention_layers=1, hidden_dim=64, ffn_dim=96, num_query_heads=2, num_kv_heads=1,
        head_dim=32, recurrent_heads=2, recurrent_key_dim=32, recurrent_value_dim=32, sliding_window_size=window,
        anchor_tokens=anchors, max_context_len=4096, max_output_len=256, vocab_size=vocab, hypersphere_radius=8.0,
        chunk_size=32, wide_tail_layers=1, draft_depth=0,
    )  # fmt: skip
    config = preset("nano")
    return replace(
        config,
        model=model,
        optimizer=replace(config.optimizer, matrix_lr_base=0.06 * 64 / 256),
        schedule=replace(config.schedule, total_tokens=steps * step),
        curriculum=CurriculumConfig(tokens_per_step=step, context=row),
        precision=PrecisionConfig(precision="fp32"),
        train=replace(config.train, micro_batch_tokens=step, device="cpu", keep_checkpoints=1),
    )


def untrained(vocab: int) -> HybridLanguageModel:
    model = HybridLanguageModel(tiny(vocab).model, PrecisionConfig(precision="fp32"))
    model.init_weights(0)
    return model.eval()


def is_key(token: int) -> bool:
    return ASK < token <= ASK + ALPHABET.keys


def is_value(token: int) -> bool:
    return ASK + ALPHABET.keys < token < ALPHABET.first_filler


def read_facts(ids: list[int]) -> tuple[dict[int, tuple[int, int]], int]:
    """Parse a document with eyes of its own: {key: (place, value)} of what is told, and the place of ASK."""
    ask = ids.index(ASK)
    told = {token: (i, ids[i + 1]) for i, token in enumerate(ids[:ask]) if is_key(token)}
    return told, ask


def check(document: Document) -> None:
    """Compare a document with what reading it says."""
    ids, mask = document.ids.tolist(), document.mask.tolist()
    told, ask = read_facts(ids)
    assert ids[0] == BEGIN and ids.count(BEGIN) == ids.count(ASK) == 1
    assert all(token >= ALPHABET.first_filler for token in ids[1 : ANCHORS + 1])
    assert len(told) == sum(is_key(token) for token in ids[:ask]), "a key is told twice"
    assert all(is_value(value) for _, value in told.values())
    questions = range(ask + 1, len(ids), 2)
    assert [i for i, m in enumerate(mask) if m] == [i + 1 for i in questions], "the mask must cover answers, no more"
    assert len({ids[i] for i in questions}) == len(questions) == len(document.keys), "a key is asked twice"
    for i, distance in zip(questions, document.distances.tolist(), strict=True):
        place, value = told[ids[i]]
        assert ids[i + 1] == value
        assert distance == i - place


def oracle(ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Answer by reading."""
    answers = []
    for row, places in zip(ids.tolist(), where.tolist(), strict=True):
        told, _ = read_facts(row)
        answers += [told[row[i]][1] for i, asked in enumerate(places) if asked]
    return torch.tensor(answers)


# ---------------------------------------------------------------------------
# Documents


@pytest.mark.parametrize(("pairs", "gap"), [(2, 4), (4, 100), (8, 31), (7, 0)])
def test_an_associative_document_is_what_it_claims(pairs: int, gap: int) -> None:
    for seed in range(20):
        document = TASKS["associative"].make(np.random.default_rng(seed), pairs, gap)
        check(document)
        told, ask = read_facts(document.ids.tolist())
        assert len(told) == pairs and len(document.keys) == pairs // 2
        assert len(document.ids) == TASKS["associative"].length(pairs, gap)
        assert ask - max(place for place, _ in told.values()) - 2 == gap
        assert all(token >= ALPHABET.first_filler for token in document.ids[ask - gap : ask])
        # what the table's columns promise
        assert document.distances.min() > gap and document.distances.max() < gap + 3 * pairs


@pytest.mark.parametrize("decoys", [0, 7])
def test_needles_lie_at_their_depths(decoys: int) -> None:
    length, task = 400, TASKS["needle"]
    hay = length - task.overhead(len(DEPTHS), decoys)
    for seed in range(20):
        document = task.make(np.random.default_rng(seed), np.array(DEPTHS), decoys, length)
        check(document)
        ids = document.ids.tolist()
        told, ask = read_facts(ids)
        assert len(ids) == length and len(told) == ids.count(TELL) == len(DEPTHS) + decoys
        assert all(ids[place - 1] == TELL for place, _ in told.values())
        for number, key in zip(document.keys.tolist(), ids[ask + 1 :: 2], strict=True):
            before = sum(token >= ALPHABET.first_filler for token in ids[: told[key][0]]) - ANCHORS
            assert before == round(DEPTHS[number] * hay)


def test_values_are_drawn_afresh_and_independently() -> None:
    rng, seen = np.random.default_rng(0), np.zeros((ALPHABET.keys, ALPHABET.values))
    for _ in range(4000):
        for key, value in ALPHABET.facts(rng, 4) - ASK - 1:
            seen[key, value - ALPHABET.keys] += 1
    # 16,000 draws over 576 cells: 27.8 each; chi-square of 575 degrees of freedom has deviation 34
    assert abs(((seen - seen.mean()) ** 2 / seen.mean()).sum() - 575) < 4 * 34


def test_text_fills_both_splits_from_its_own_part() -> None:
    text = np.arange(1000, dtype=np.uint16) % 500
    tokens = Namespace(ids=text, largest=499)
    training, held_out = make_alphabets(96, type("Tokens", (), {"__len__": lambda _: 1000, **vars(tokens)})())
    assert training.vocab_size == held_out.vocab_size == 3 + 24 + 24 + 500
    rng = np.random.default_rng(0)
    for alphabet, part in ((training, text[:900]), (held_out, text[900:])):
        drawn = alphabet.draw_filler(rng, 2500) - alphabet.first_filler
        assert set(drawn.tolist()) == set(part.tolist())
        steps = np.diff(drawn)
        # consecutive, but for the seam of the text's own period and for the return to the start
        assert (steps == 1).mean() > 0.98


def test_training_rows_are_whole_documents_first_short_then_long() -> None:
    for task in TASKS.values():
        documents = training_documents(task, 200, ROW, seed=0)
        for document in documents:
            check(document)
        ends = np.cumsum([len(d.ids) for d in documents])
        assert ends[-1] == 200 * ROW
        assert set(range(ROW, 200 * ROW + 1, ROW)) <= set(ends.tolist())
        lengths = np.diff(ends, prepend=0)
        early, late = lengths[ends <= 20 * ROW], lengths[ends > 100 * ROW]
        assert early.max() < 4 * task.least and late.max() > 0.9 * ROW
        assert early.mean() < late.mean()


def test_the_loader_presents_rows_in_the_order_written(tmp_path: Path) -> None:
    documents = training_documents(TASKS["associative"], 40, ROW, seed=0)
    write_in_order(tmp_path / "task.bin", documents, ALPHABET.vocab_size, 5, ROW)
    tokens, config = open_tokens(tmp_path / "task.bin"), tiny(ALPHABET.vocab_size, steps=10)
    stages, _ = build_curriculum(len(tokens), config.curriculum, max_context_len=4096)
    loader = PackedSequenceDataLoader(tokens, stages, seed=5, micro_batch_tokens=4 * ROW, config=config.curriculum)
    batches = [batch for step in range(loader.total_steps) for batch in loader.step_batches(step)]
    ids = torch.cat([b.inputs for b in batches])
    assert loader.total_steps == 10
    assert ids.flatten().tolist() == np.concatenate([d.ids for d in documents]).tolist()
    # each row begins a document, and what is supervised are the answers
    starts = torch.cat([b.doc_start for b in batches])
    assert (starts == torch.arange(ROW)).logical_and(ids == BEGIN).sum() == len(documents)
    assert (ids[:, 0] == BEGIN).all()
    supervised = torch.cat([torch.where(b.loss_weights > 0, b.targets, -100).flatten() for b in batches])
    answers = np.concatenate([d.ids[d.mask > 0] for d in documents])
    assert supervised[supervised >= 0].tolist() == answers.tolist()


# ---------------------------------------------------------------------------
# Scoring


def test_the_oracle_is_always_right_and_cells_hold_500_queries() -> None:
    cells = score_associative(oracle, TASKS["associative"], [4, 32], ROW, seed=0)
    assert [(c["pairs"], c["gap"]) for c in cells] == [(p, g) for p in (2, 4, 8) for g in (4, 32)]
    for alone in (False, True):
        needles = score_needle(oracle, TASKS["needle"], [128, 256], ROW, seed=0, alone=alone)
        assert [(c["length"], c["depth"]) for c in needles] == [(n, d) for n in (128, 256) for d in DEPTHS]
        assert [c["past_training"] for c in needles] == [False] * 7 + [True] * 7
        # the deeper, the nearer
        assert all(a["distance"] > b["distance"] for a, b in pairwise(needles[:7]))
        cells += needles
    assert all(cell["accuracy"] == 1.0 and cell["queries"] >= 500 for cell in cells)


def test_random_values_score_chance_and_an_untrained_model_no_more() -> None:
    generator = torch.Generator().manual_seed(0)

    def guess(ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        first = ASK + 1 + ALPHABET.keys
        return torch.randint(first, ALPHABET.first_filler, (int(where.sum()),), generator=generator)

    chance = 1 / ALPHABET.values
    for predict, low in ((guess, 0.3 * chance), (hybrid_predictor(untrained(ALPHABET.vocab_size)), 0.0)):
        cells = score_associative(predict, TASKS["associative"], [4], ROW, seed=0)
        right, count = (
            sum(f(c) for c in cells) for f in (lambda c: c["accuracy"] * c["queries"], lambda c: c["queries"])
        )
        # the mean of at least 1,500 answers: four standard errors
        assert low <= right / count < chance + 4 * math.sqrt(chance / count)


def test_elimination_earns_the_guess_rate() -> None:
    assert guess_rate(4, 4) == pytest.approx((1 / 4 + 1 / 3 + 1 / 2 + 1) / 4)
    rng = np.random.default_rng(0)

    def eliminate(ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Guess among the document's values less those that earlier answers showed."""
        answers = []
        for row, places in zip(ids.tolist(), where.tolist(), strict=True):
            told, ask = read_facts(row)
            left = [value for _, value in told.values()]
            for i in (i for i, asked in enumerate(places) if asked):
                if i - 2 > ask:
                    left.remove(row[i - 1])
                answers.append(int(rng.choice(left)))
        return torch.tensor(answers)

    task = replace(TASKS["associative"], alphabet=Alphabet(keys=24, values=5000, filler=45), pairs=(4,))
    results = score(eliminate, (task.make(rng, 4, 4) for _ in range(2000)), task.length(4, 4))
    share = sum(right for _, _, right in results) / len(results)
    assert abs(share - guess_rate(4, 2)) < 4 * 0.5 / math.sqrt(len(results))


def test_segments_answer_as_one_piece_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rng = untrained(ALPHABET.vocab_size), np.random.default_rng(0)
    documents = [TASKS["needle"].make(rng, np.array(DEPTHS), 7, 250) for _ in range(3)]
    ids = torch.from_numpy(np.stack([d.ids for d in documents]))
    where = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    # an untrained model repeats its input whatever it carries: compare hidden states, in units of 1e-4
    monkeypatch.setattr(memory, "most_likely", lambda hidden, _: (1e4 * hidden[:, 0].double()).round().long())
    whole = hybrid_predictor(model, 1000)(ids, where)
    assert torch.equal(whole, (1e4 * model(ids).hidden[where][:, 0].double()).round().long())
    assert (hybrid_predictor(model, 64)(ids, where) - whole).abs().max() <= 2
    forgetful = torch.cat([(1e4 * model(part).hidden[..., 0].double()).round().long() for part in ids.split(64, 1)], 1)
    assert (forgetful[where] - whole).abs().max() > 100


def test_tables_mark_what_lies_past_training() -> None:
    cells = [dict(pairs=4, gap=gap, past_training=gap > 64, queries=500, accuracy=0.5, guess=0.25) for gap in (32, 128)]
    lines = grid_table(cells, "pairs", "gap", 16)
    assert lines[0].split()[3:5] == ["32", "128"] and lines[1].split()[2:] == ["2", "8"]
    assert lines[2].split() == ["4", "0.500", "0.500*", "0.250", "500"]
    assert associative_gaps(512, 65_536) == [128, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536]


# ---------------------------------------------------------------------------
# Parts through the command


def last_json(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


class Reader(torch.nn.Module):
    """A stand-in for the dense baseline, right without training: after a key asked, the value's embedding."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding.from_pretrained(torch.eye(vocab), freeze=False)

    def loss_rows(self, ids: torch.Tensor, doc_start: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.embedding(ids) @ self.embedding.weight.T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")

    def forward(self, ids: torch.Tensor, doc_start: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(*ids.shape, self.embedding.weight.shape[0])
        for row, values in enumerate(ids.tolist()):
            told, ask = read_facts(values)
            for i in range(ask + 1, len(values)):
                if values[i] in told:
                    out[row, i, told[values[i]][1]] = 1.0
        return out


def run_small(part: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(memory, "preset", lambda name: tiny(96))
    # the real cells of 500 questions take half a minute
    monkeypatch.setattr(memory, "LEAST_QUERIES", 20)
    monkeypatch.setattr(memory, "LEAST_DOCUMENTS", 4)
    return memory.main([part, "--preset", "nano", "--vocab-size", "96", "--row", str(ROW), "--tokens", "2048",
                        "--longest", "128", "--out", str(folder), *flags])  # fmt: skip


def test_associative_trains_scores_and_reads_its_weights_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    flags = ("--pairs", "2", "4")
    assert run_small("associative", tmp_path, monkeypatch, *flags) == 0
    first = last_json(capsys.readouterr().out)
    assert first["tokens"] == 2048 and first["supervised"] > 50
    assert [(c["pairs"], c["gap"]) for c in first["cells"]] == [(p, g) for p in (2, 4) for g in (4, 32, 64, 128)]
    assert (tmp_path / "associative-hybrid.png").stat().st_size > 5000
    weights = str(tmp_path / "associative-run" / "final.safetensors")
    assert run_small("associative", tmp_path, monkeypatch, *flags, "--weights", weights) == 0
    assert last_json(capsys.readouterr().out)["cells"] == first["cells"]


def test_needle_takes_a_baseline_through_the_seam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    built = []

    def build(name: str, config: ModelConfig, context: int) -> Reader:
        built.append((name, context, config.sliding_window_size))
        return Reader(config.vocab_size)

    monkeypatch.setitem(sys.modules, "baselines", Namespace(build=build))
    assert run_small("needle", tmp_path, monkeypatch, "--model", "dense") == 0
    record = last_json(capsys.readouterr().out)
    assert built == [("dense-window", 128, WINDOW)]
    assert all(cell["accuracy"] > 0.9 for cell in record["cells"]) and len(record["cells"]) == 2 * len(DEPTHS)
    assert (tmp_path / "needle-dense.png").stat().st_size > 5000


def test_a_tiny_model_learns_to_recall_past_its_window_and_its_rows(tmp_path: Path) -> None:
    window, row, steps = 32, 64, 98
    alphabet, _ = make_alphabets(16, None)
    task = Associative(alphabet, 2, (2, 4))
    write_in_order(tmp_path / "t.bin", training_documents(task, steps * 8, row, seed=0), 16, 0, row)
    config = tiny(16, window=window, anchors=2, row=row, step=512, steps=steps)
    model = train_hybrid(config, open_tokens(tmp_path / "t.bin"), tmp_path / "run")
    cells = score_associative(hybrid_predictor(model), task, [2 * window, 4 * window], row, seed=0)
    assert all(cell["past_training"] for cell in cells)
    # reached: 0.69; knowing values without keys earns 0.40, with a standard error of 0.01
    assert sum(cell["guess"] for cell in cells) / 4 < 0.4
    assert sum(cell["accuracy"] for cell in cells) / 4 > 0.5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--pairs", "1", "4"), "--pairs must be within 2..4"),
        (("--pairs", "2", "--tokens", "100"), "--tokens must be at least one step of 512"),
        (("--pairs", "2", "--weights", "none.safetensors", "--model", "dense"), "--weights names a file of the hybrid"),
        (("--pairs", "2", "--vocab-size", "8"), "--vocab-size must be at least 12"),
    ],
)
def test_user_errors_are_one_line(
    flags: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert run_small("associative", tmp_path, monkeypatch, *flags) == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and words in errors[0]


def test_documents_of_one_source_are_joined(tmp_path: Path) -> None:
    # source a: ids below 100, source b: from 100 on; lengths 5 to 14, so that pieces cut through documents
    documents = [[(100 * (i % 2)) + i % 100] * (5 + i % 10) for i in range(80)]
    write_tokens(tmp_path / "t.bin", documents, vocab_size=256, sources=["ab"[i % 2] for i in range(80)])
    pieces, mean = join_documents(open_tokens(tmp_path / "t.bin"), 50, 6)
    assert len(pieces) == 6 and all(len(piece) == 50 for piece in pieces)
    for number, group in enumerate((pieces[:3], pieces[3:])):
        whole = np.concatenate([np.array(d) for d in documents[number::2]])
        assert np.concatenate(group).tolist() == whole[:150].tolist()
    assert 5 < mean < 8
    with pytest.raises(ValueError, match="largest source holds"):
        join_documents(open_tokens(tmp_path / "t.bin"), 5000, 6)


def weights_and_text(folder: Path) -> tuple[str, str]:
    model = untrained(96)
    with torch.no_grad():
        model.layers[1].operator.decay_offset += 1.0
    save_weights(folder / "w.safetensors", dict(model.named_parameters()), tiny(96))
    rng = np.random.default_rng(0)
    write_tokens(folder / "text.bin", [rng.integers(0, 96, 70) for _ in range(20)], vocab_size=96)
    return str(folder / "w.safetensors"), str(folder / "text.bin")


def test_position_compares_scopes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    weights, data = weights_and_text(tmp_path)
    assert memory.main(["position", "--weights", weights, "--data", data, "--length", "256", "--rows", "4",
                        "--out", str(tmp_path)]) == 0  # fmt: skip
    record = last_json(capsys.readouterr().out)
    near, far = record["by_position"]["window"], record["by_position"]["full"]
    assert record["rows"] == 4 and [row[3] for row in near] == [4 * 16, 4 * 48, 4 * 191]
    # one and the same up to the window, and only there
    assert near[0][2] == pytest.approx(far[0][2], abs=1e-5)
    assert abs(near[2][2] - far[2][2]) > 1e-5
    assert (tmp_path / "position.png").stat().st_size > 5000


def test_spectrum_reads_biases_and_text(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    weights, data = weights_and_text(tmp_path)
    assert memory.main(["spectrum", "--weights", weights, "--data", data, "--count", "512", "--row", "128",
                        "--out", str(tmp_path)]) == 0  # fmt: skip
    (record,) = last_json(capsys.readouterr().out)["models"]
    assert np.allclose(record["start"], [[1, 1048576]] * 3, rtol=1e-3)
    trained = np.array(record["trained"])
    assert np.allclose(trained[[0, 2]], record["start"][0], rtol=1e-3)
    shifted = math.log(2) / torch.nn.functional.softplus(half_life_biases(2).double() + 1.0)
    assert np.allclose(trained[1], shifted, rtol=1e-3)
    assert np.array(record["trained, text"]).shape == (3, 2)
    assert (tmp_path / "spectrum.png").stat().st_size > 5000


def test_measured_half_lives_average_what_the_operator_computes(tmp_path: Path) -> None:
    model, seen = untrained(96), []
    _, data = weights_and_text(tmp_path)
    operator = model.layers[0].operator
    original = operator._gates
    operator._gates = lambda logits: seen.append(original(logits)) or seen[-1]
    measured = measured_half_lives(model, open_tokens(data), 512, 128)
    log_gamma = torch.cat([gates[2].flatten(0, 1) for gates in seen]).double()
    assert np.allclose(measured[0], (math.log(2) / -log_gamma.mean(0)).numpy(), rtol=1e-5)
    assert not np.allclose(measured[0], half_lives(model)[0], rtol=1e-3)
