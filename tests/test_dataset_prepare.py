"""dataset_pipeline.py, preparation: kinds of input, sources, conversations and their masks, memory."""

import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_dataset_pipeline import TEXTS, jsonl, texts_of

import dataset_pipeline as dp

FAST = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

TALK = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Is the river deep?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And <|end|> cold?"},
    {"role": "assistant", "content": "Very."},
]


def records(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pieces(tokenizer, ids, names=("E", "S", "U", "A", "T")):
    """Ids as text, the special ones by a letter in braces."""
    return "".join("{" + names[i] + "}" if i < 5 else dp.decode_bytes(tokenizer, [i]).decode() for i in ids)


def test_conversations_follow_the_template_and_the_mask(tmp_path):
    rows = [{"messages": TALK}, {"prompt": "Two and two?", "completion": "Four."}, {"text": "plain prose"}]
    path = records(tmp_path / "in.jsonl", rows)
    report = dp.prepare(path, tmp_path / "out", vocab_size=400, validation_fraction=0)
    tokens, tokenizer = dp.open_tokens(report.train.path), report.tokenizer.read_text()
    documents = [slice(a, b) for a, b in zip(tokens.starts, tokens.ends, strict=True)]
    texts = [pieces(tokenizer, tokens.ids[d].tolist()) for d in documents]
    assert texts == [
        "{E}{S}Answer in one word.{T}{U}Is the river deep?{T}{A}Yes.{T}{U}And <|end|> cold?{T}{A}Very.{T}{E}",
        "{E}{U}Two and two?{T}{A}Four.{T}{E}",
        "{E}plain prose{E}",
    ]
    learned = [pieces(tokenizer, tokens.ids[d][tokens.mask[d] == 1].tolist()) for d in documents]
    assert learned == ["Yes.{T}Very.{T}", "Four.{T}", "{E}plain prose{E}"]
    assert tokens.facts["turn_end_id"] == 4 and tokens.facts["eos_id"] == 0
    # B043: the position before an answer, which is the assistant's marker, predicts its first token
    batch = next(dp.validation_batches(tokens, documents[0].stop))
    at = batch.loss_weights[0].nonzero().flatten().tolist()
    assert pieces(tokenizer, tokens.ids[at].tolist()) == "{A}Yes.{A}Very."
    # the same template opens a request
    turns = [(m["role"], m["content"]) for m in TALK[:4]]
    assert pieces(tokenizer, dp.encode_chat(tokenizer, turns)) == texts[0].removeprefix("{E}").split("Very.")[0]


def test_text_alone_has_no_mask(tmp_path):
    report = dp.prepare(jsonl(tmp_path / "i.jsonl", TEXTS), tmp_path / "out", vocab_size=400)
    tokens = dp.open_tokens(report.train.path)
    assert tokens.mask is None and "turn_end_id" not in tokens.facts


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "no messages"),
        ({"messages": "hello"}, "not a list"),
        ({"messages": ["hello"]}, "not a list"),
        ({"messages": [{"role": "human", "content": "a"}]}, "role must be one of system, user, assistant, got 'human'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no assistant message"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "no assistant message"),
        ({"messages": [{"role": "assistant", "content": 5}]}, 'no "content" that is a string'),
        ({"messages": [{"role": "assistant"}]}, 'no "content" that is a string'),
        ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "half a surrogate"),
        ({"prompt": "a"}, 'no "content" that is a string'),
    ],
    ids=range(10),
)
def test_malformed_conversations_are_named(tmp_path, row, message):
    path = records(tmp_path / "in.jsonl", [{"text": "good"}, row])
    with pytest.raises(ValueError, match=r"1 malformed inputs: .*in\.jsonl:2: ") as caught:
        dp.prepare(path, tmp_path / "out", vocab_size=300)
    assert message in str(caught.value) and not (tmp_path / "out").exists()
    report = dp.prepare(path, tmp_path / "out", vocab_size=300, validation_fraction=0, skip_bad=True)
    assert report.train.documents == 1 and message in report.describe()[-1]


def test_conversations_need_role_markers(tmp_path):
    path = records(tmp_path / "in.jsonl", [{"messages": TALK}, {"text": "more"}])
    made = dp.prepare(path, tmp_path / "a", vocab_size=400).tokenizer.read_text()
    (tmp_path / "t.json").write_text(made.replace("<|user|>", "<|human|>"))
    with pytest.raises(ValueError, match="1 conversations, but the tokenizer lacks"):
        dp.prepare(path, tmp_path / "out", tokenizer=tmp_path / "t.json")


def test_many_faults_are_counted(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "good"}\n' + "{\n" * 250)
    report = dp.prepare(tmp_path / "in.jsonl", tmp_path / "o", vocab_size=300, validation_fraction=0, skip_bad=True)
    assert report.skipped_count == 250 and len(report.skipped) == 100
    assert report.describe()[-1] == "skipped 250 inputs in all"


def test_sources_of_records_files_and_folders(tmp_path):
    folder = tmp_path / "in"
    (folder / "web" / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("first")
    (folder / "web" / "deep" / "b.txt").write_text("second")
    rows = [{"text": "third", "source": "books"}, {"text": "fourth"}, {"messages": TALK, "source": "talk"}]
    more = records(tmp_path / "more.v2.jsonl", rows)
    report = dp.prepare([folder, more], tmp_path / "out", vocab_size=300, validation_fraction=0)
    tokens = dp.open_tokens(report.train.path)
    assert [tokens.sources[i] for i in tokens.source_of] == ["in", "web", "books", "more", "talk"]
    assert {name: sizes[0] for name, sizes in report.sources.items()} == dict.fromkeys(tokens.sources, 1)
    assert sum(sizes[1] for sizes in report.sources.values()) == len(tokens) == report.train.tokens
    assert report.sources["books"][2] == 5
    assert any(line.startswith("source books: 1 documents, ") for line in report.describe())


def test_join_leaves_conversations_whole(tmp_path):
    rows = [{"text": "a"}, {"prompt": "q", "completion": "r"}, {"text": "b"}, {"text": "c", "source": "x"}]
    path = records(tmp_path / "in.jsonl", rows)
    report = dp.prepare(path, tmp_path / "out", vocab_size=300, validation_fraction=0, join_source=True)
    tokenizer, tokens = report.tokenizer.read_text(), dp.open_tokens(report.train.path)
    texts = [pieces(tokenizer, tokens.ids[a:b].tolist()) for a, b in zip(tokens.starts, tokens.ends, strict=True)]
    assert texts == ["{E}{U}q{T}{A}r{T}{E}", "{E}a\nb{E}", "{E}c{E}"]


@FAST
@given(st.lists(st.integers(0, 90), min_size=2, max_size=12), st.sampled_from([1, 2, 3, 256]))
def test_documents_of_any_size_span_batches_whole(tmp_path, sizes, batch):
    texts = [f"{'word ' * (size % 7)}\nline {size}\n" * size + "x" for size in sizes]
    path = jsonl(tmp_path / "in.jsonl", texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dp, "_BATCH_PIECES", batch)
        patch.setattr(dp, "_PIECE_CHARS", 200)
        report = dp.prepare(path, tmp_path / "out", vocab_size=300, validation_fraction=0)
    assert texts_of(report.train.path) == texts
    assert report.sources["in"][0] == report.train.documents == len(texts)
    assert report.train.text_bytes == sum(map(len, texts))


def test_tokenizer_sample_is_whole_documents_of_that_size(tmp_path):
    texts = [f"{i} {'abc ' * 250}" for i in range(200)]
    corpus = dp._Corpus([(jsonl(tmp_path / "in.jsonl", texts), "in")], False)
    everything = np.ones(200, bool)
    assert list(corpus.sample(everything, 10**9, 0)) == texts
    some = list(corpus.sample(everything, 50_000, 0))
    assert set(some) < set(texts) and 30_000 < sum(map(len, some)) < 70_000
    assert some == list(corpus.sample(everything, 50_000, 0)) != list(corpus.sample(everything, 50_000, 1))


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Ten times the documents: the Python heap's peak stays where it was, but for a few bytes a document."""
    peaks = []
    for count in (2_000, 20_000):
        path = tmp_path / f"{count}.jsonl"
        with open(path, "w") as file:
            file.writelines(json.dumps({"text": f"{i} " + "some words " * 20}) + "\n" for i in range(count))
        tracemalloc.start()
        dp.prepare(path, tmp_path / "out", vocab_size=300)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 100 * 18_000, peaks  # each text alone is 230 bytes


def test_out_is_not_made_before_all_is_checked(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match="could not be read"):
        dp.prepare(jsonl(tmp_path / "i.jsonl", ["a", "b"]), tmp_path / "out", tokenizer=tmp_path / "t.json")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------
# Optional packages


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    talk = [m for m in TALK if "<" not in m["content"]]
    columns = {"text": [*TEXTS[:30], None], "messages": [*[None] * 30, talk], "source": ["a"] * 15 + ["b"] * 16}
    parquet.write_table(arrow.table(columns), tmp_path / "in.parquet", row_group_size=7)
    report = dp.prepare(tmp_path / "in.parquet", tmp_path / "out", vocab_size=400, validation_fraction=0)
    tokens = dp.open_tokens(report.train.path)
    assert len(tokens.ends) == 31 and report.sources["a"][0] == 15 and tokens.mask is not None
    assert dp.decode_bytes(report.tokenizer.read_text(), tokens.ids[: tokens.ends[0]].tolist()).decode() == TEXTS[0]
    data = (tmp_path / "in.parquet").read_bytes()
    (tmp_path / "in.parquet").write_bytes(data[:-20])
    with pytest.raises(ValueError, match="cut off or not parquet"):
        dp.prepare(tmp_path / "in.parquet", tmp_path / "o")


def test_zstd(tmp_path):
    library = pytest.importorskip("zstandard")
    lines = "".join(json.dumps({"text": t}) + "\n" for t in TEXTS * 40).encode()
    packed = library.compress(lines[:100_000]) + library.compress(lines[100_000:])  # two frames
    path = tmp_path / "in.jsonl.zst"
    path.write_bytes(packed)
    report = dp.prepare(path, tmp_path / "out", vocab_size=400, validation_fraction=0)
    assert texts_of(report.train.path) == TEXTS * 40
    for data in (packed[:-7], b"plain text"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="cut off or not zst"):
            dp.prepare(path, tmp_path / "o")


@pytest.mark.parametrize(("name", "package"), [("in.parquet", "pyarrow"), ("in.jsonl.zst", "zstandard")])
def test_absent_packages_are_named(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"needs the `{package}` package, found none; pip install {package}"):
        dp.prepare(tmp_path / name, tmp_path / "out")
