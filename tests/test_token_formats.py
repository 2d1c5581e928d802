"""Token files made by others: every format by struct and NumPy alone, shards, the shelf of bad files, and inspect."""

import gzip
import json
import re
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dataset_pipeline as dp
import main

FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, documents, dtype, offset=b"") -> Path:
    path.write_bytes(offset + np.concatenate(documents).astype(dtype).tobytes())
    return path


def header(documents, magic, version):
    return struct.pack("<256i", magic, version, sum(map(len, documents)), *[0] * 253)


def indexed(path: Path, documents, dtype, code) -> Path:
    write(path, documents, dtype)
    width, lengths = np.dtype(dtype).itemsize, [len(d) for d in documents]
    pointers = [width * sum(lengths[:i]) for i in range(len(lengths))]
    count = len(documents)
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, count, count + 1) + struct.pack(f"<{count}i", *lengths)
        + struct.pack(f"<{count}q", *pointers) + struct.pack(f"<{count + 1}q", *range(count + 1))
    )  # fmt: skip
    return path


def ends_file(path: Path, documents) -> None:
    path.write_bytes(struct.pack(f"<{len(documents)}Q", *np.cumsum([len(d) for d in documents])))


# Each writer: (folder, documents, masks) -> what --data names. A kind without masks ignores them.


def nanogpt(folder, documents, masks):
    """Raw uint16; 65,535, which no document holds, ends each."""
    return write(folder / "train.bin", [np.append(d, 65_535) for d in documents], "<u2")


def llmc(folder, documents, masks):
    return write(folder / "t.bin", [[65_535, *d] for d in documents], "<u2", header([[0, *d] for d in documents],
                 20240520, 1))  # fmt: skip


def llmc_wide(folder, documents, masks):
    opened = [[65_535, *d] for d in documents]
    return write(folder / "t.bin", opened, "<u4", header(opened, 20240801, 7))


def megatron(folder, documents, masks):
    return indexed(folder / "m.bin", documents, "<u2", 8)


def megatron_wide(folder, documents, masks):
    return indexed(folder / "m.bin", documents, "<i4", 4)


def neox(folder, documents, masks):
    labels = [np.where(m, d, -100) for d, m in zip(documents, masks, strict=True)]
    indexed(folder / "x_label_document.bin", labels, "<i4", 4)
    return indexed(folder / "x_text_document.bin", documents, "<i4", 4)


def datatrove(folder, documents, masks):
    ends_file(folder / "0.ds.index", documents)
    write(folder / "0.ds.loss", masks, "?")
    (folder / "0.ds.metadata").write_text(f"gpt2|2\n{sum(map(len, documents))}\n0.1 K\n")
    return write(folder / "0.ds", documents, "<u2")


def datatrove_wide(folder, documents, masks):
    ends_file(folder / "0.ds.index", documents)
    write(folder / "0.ds.loss", masks, "?")
    (folder / "0.ds.metadata").write_text(f"llama|4\n{sum(map(len, documents))}\n0.1 K\n")
    return write(folder / "0.ds", documents, "<u4")


def olmo(folder, documents, masks):
    """.npy by name only, ends as lines of text, labels beside."""
    bounds = np.cumsum([0, *map(len, documents)])
    with gzip.open(folder / "token_ids_part_0001.csv.gz", "wt") as file:
        file.writelines(f"{a},{b},id,source,{i}\n" for i, (a, b) in enumerate(pairwise(bounds)))
    write(folder / "labels_mask_part_0001.npy", masks, "?")
    return write(folder / "token_ids_part_0001.npy", documents, "<u2")


def litdata(folder, documents, masks, code=16, dtype="<i4"):
    half = max(1, len(documents) // 2)
    names = []
    for n, part in enumerate((documents[:half], documents[half:])):
        if part:
            names.append(f"chunk-0-{n}.bin")
            sizes = [np.dtype(dtype).itemsize * len(d) for d in part]
            offsets = [4 * (len(part) + 2) + sum(sizes[:i]) for i in range(len(part) + 1)]
            head = struct.pack(f"<I{len(offsets)}I", len(part), *offsets)
            write(folder / names[-1], part, dtype, head)
    config = {"data_format": [f"no_header_tensor:{code}"], "compression": None, "chunk_bytes": 1 << 26}
    index = {"chunks": [{"filename": name, "chunk_size": 1} for name in names], "config": config}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def litdata_narrow(folder, documents, masks):
    return litdata(folder, documents, masks, 20, "<u2")


def shards(folder, documents, masks):
    """A folder of files with ends and masks; a validation file beside them is not training data."""
    for i, (document, mask) in enumerate(zip(documents, masks, strict=True)):
        write(folder / f"train_{i:03}.bin", [document], "<u2")
        ends_file(folder / f"train_{i:03}.ends.bin", [document])
        write(folder / f"train_{i:03}.mask.bin", [mask], "?")
    write(folder / "val_000.bin", [[1, 2, 3]], "<u2")
    return folder


def pattern(folder, documents, masks):
    shards(folder, documents, masks)
    return folder / "train_*.bin"


WRITERS = {  # writer: (documents are ended by the format, marked by an id at, masks are kept)
    nanogpt: "end", llmc: "start", llmc_wide: "start", megatron: None, megatron_wide: None, neox: None,
    datatrove: None, datatrove_wide: None, olmo: None, litdata: None, litdata_narrow: None, shards: None, pattern: None,
}  # fmt: skip
MASKED = {neox, datatrove, datatrove_wide, olmo, shards, pattern}


@pytest.mark.parametrize("writer", WRITERS, ids=lambda w: w.__name__)
@FAST
@given(
    documents=st.lists(st.lists(st.integers(1, 65_534), min_size=2, max_size=30), min_size=1, max_size=8),
    random=st.randoms(use_true_random=False),
)
def test_files_of_other_writers(tmp_path_factory, writer, documents, random):
    folder = tmp_path_factory.mktemp("t")
    masks = [[True, *(random.random() < 0.7 for _ in d[1:])] for d in documents]
    for mask in masks:
        mask[-1] = True  # a target in each
    marked = WRITERS[writer]
    path = writer(folder, documents, masks)
    # a few ids do not show how wide they are; larger files do, as test_dataset_pipeline.py checks
    width = "uint16" if writer in (nanogpt, olmo, shards, pattern) else None
    options = {"doc_id": 65_535, "doc_at": marked} if marked else {}
    tokens = dp.open_tokens(path, dtype=width, **options)
    expected = [[*d, 65_535] if marked == "end" else [65_535, *d] if marked else d for d in documents]
    flat = [i for d in expected for i in d]
    assert tokens.ids[:].tolist() == flat and len(tokens) == len(flat)
    assert tokens.ends.tolist() == np.cumsum([len(d) for d in expected]).tolist()
    assert tokens.largest == max(flat)
    if writer in MASKED:
        assert [bool(x) for x in tokens.mask[:]] == [x for m in masks for x in m]
        assert tokens.supervised == sum(sum(m[1:]) for m in masks)
    else:
        assert tokens.mask is None and tokens.supervised == len(flat) - len(documents)
    # opened again, from the cached scan
    assert dp.open_tokens(path, dtype=width, **options).supervised == tokens.supervised
    # the loader reads the same through any slice
    stream = [i for batch in dp.validation_batches(tokens, 5) for i in batch.inputs.flatten().tolist()]
    assert stream == flat


@FAST
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_joined_arrays_read_as_one(sizes, data):
    parts = [np.arange(n) + 10 * i for i, n in enumerate(sizes)]
    whole, joined = np.concatenate(parts), dp._Joined(parts)
    a, b = (data.draw(st.integers(0, len(whole) + 2)) for _ in range(2))
    assert joined[a:b].tolist() == whole[a:b].tolist()
    index = data.draw(st.lists(st.integers(-len(whole), len(whole) - 1), max_size=9))
    assert joined[np.array(index, int)].tolist() == whole[np.array(index, int)].tolist()
    assert joined[a % len(whole)] == whole[a % len(whole)]
    if parts[0][a:b].size and b <= len(parts[0]):
        assert np.shares_memory(joined[a:b], parts[0])


def test_a_label_file_that_changes_is_read_again(tmp_path):
    documents = [[5, 6, 7, 8]]
    path = neox(tmp_path, documents, [[0, 1, 1, 1]])
    assert dp.open_tokens(path).supervised == 3
    neox(tmp_path, documents, [[0, 1, 0, 1]])
    assert dp.open_tokens(path).supervised == 2


# ---------------------------------------------------------------------------
# The shelf of bad files: one line each, before anything is built

IDS = list(range(1, 21))


def _shelf_write(path, size=None, data=None, dtype="<u2"):
    path.write_bytes(np.array(IDS if data is None else data, dtype).tobytes()[:size])


def _ends(path, values):
    path.with_name("t.ends.bin").write_bytes(np.array(values, "<u8").tobytes())


def _shelf_idx(path, at, value):
    indexed(path, [IDS, IDS], "<u2", 8)
    data = bytearray(path.with_suffix(".idx").read_bytes())
    data[at : at + len(value)] = value
    path.with_suffix(".idx").write_bytes(data)


def _shelf_facts(path):
    dp.write_tokens(path, [IDS, IDS], vocab_size=300, facts={"tokenizer_sha256": "0" * 64})
    path.with_name("tokenizer.json").write_text("{}")


def _shelf_cut_copy(path):
    dp.write_tokens(path, [IDS, IDS], vocab_size=300)
    path.write_bytes(path.read_bytes()[:40])


def _shelf_mask(path, mask):
    _shelf_write(path)
    path.with_name("t.mask.bin").write_bytes(bytes(mask))


def _shelf_shards(path):
    path.mkdir()
    _shelf_write(path / "a.bin")
    headed = header([IDS], 20240520, 1)
    (path / "b.bin").write_bytes(headed + np.array(IDS, "<u2").tobytes())


def _shelf_chunk(path):
    path.mkdir()
    litdata(path, [IDS], None)
    (path / "chunk-0-0.bin").write_bytes(b"\x01" + bytes(30))


SHELF = {
    "missing": (lambda p: None, "does not exist"),
    "empty": (lambda p: p.write_bytes(b""), "is empty (0 bytes)"),
    "odd size": (lambda p: _shelf_write(p, 39), "39 bytes of ids, 1 more than a multiple of 2"),
    "directory": (lambda p: p.mkdir(), "holds no token files"),
    "folder of text": (lambda p: (p.mkdir(), (p / "a.txt").write_text("x")), "holds no token files"),
    "text": (lambda p: p.write_text("words of a text, not ids\n" * 9), "holds text, not token ids"),
    "cut copy": (_shelf_cut_copy, "holds 20 ids of uint16, but t.json says 40 ids"),
    "other tokenizer": (_shelf_facts, "was made with 000000000000"),
    "cut header": (lambda p: p.write_bytes(header([IDS, IDS], 20240520, 1) + bytes(20)), "its header states 40 ids"),
    "cut index": (lambda p: (indexed(p, [IDS], "<u2", 8), p.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0x")), "index"),
    "floating index": (lambda p: _shelf_idx(p, 17, b"\x07"), "dtype code must be one of"),
    "negative length": (lambda p: _shelf_idx(p, 34, struct.pack("<i", -5)), "length is negative (-5)"),
    "negative id": (lambda p: indexed(p, [[5, -3, 4]], "<i4", 4), "id -3 at token 1"),
    "long mask": (lambda p: _shelf_mask(p, [1] * 21), "has 21 bytes, but there are 20 ids"),
    "zero mask": (lambda p: _shelf_mask(p, [0] * 20), "supervised tokens = 0"),
    "odd mask": (lambda p: _shelf_mask(p, [1] * 9 + [7] + [1] * 10), "got 7 at token 9"),
    "falling ends": (lambda p: (_shelf_write(p), _ends(p, [9, 5, 20])), "must increase, got 5 after 9"),
    "ends beyond": (lambda p: (_shelf_write(p), _ends(p, [9, 25])), "ends at 25, but there are 20 ids"),
    "ends short": (lambda p: (_shelf_write(p), _ends(p, [9, 15])), "ends at 15, but there are 20 ids"),
    "mixed shards": (_shelf_shards, "give shards of one kind"),
    "cut chunk": (_shelf_chunk, "do not fill"),
}  # fmt: skip


@pytest.mark.parametrize("case", SHELF)
def test_the_shelf_of_bad_files(tmp_path, monkeypatch, capsys, case):
    make, message = SHELF[case]
    path = tmp_path / "t.bin"
    make(path)
    if case != "other tokenizer":
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            dp.open_tokens(path)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(main, "TrainingEngine", None)  # no model is built
    monkeypatch.chdir(tmp_path)
    assert main.main(["train", "--preset", "nano", "--data", str(path), "--device", "cpu"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], lines
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").rglob("*.json"))


def test_ids_over_the_vocabulary_name_the_first(tmp_path, capsys):
    _shelf_write(tmp_path / "t.bin", data=[1, 2, 900, 4, 901])
    command = ["train", "--preset", "nano", "--data", str(tmp_path / "t.bin"), "--device", "cpu"]
    assert main.main([*command, "--vocab-size", "900", "--run-dir", str(tmp_path / "r")]) == 2
    assert "t.bin: id 900 at token 2 must be in 0..899" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"id 900 at token 2 must be in 0\.\.899"):
        dp.open_tokens(tmp_path / "t.bin", vocab_size=900)


# ---------------------------------------------------------------------------
# inspect


@pytest.fixture
def talk(tmp_path):
    turns = [{"role": "user", "content": "Deep?"}, {"role": "assistant", "content": "Yes."}]
    rows = [
        {"text": "Prose, naïve: 日本語.\nA second line.", "source": "books"},
        {"messages": turns, "source": "talk"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dp.prepare(tmp_path / "in.jsonl", tmp_path / "out", vocab_size=300, validation_fraction=0)
    return tmp_path / "out" / "tokens.bin"


def inspected(capsys, *arguments):
    assert main.main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_inspect_shows_boundaries_and_mask(talk, capsys):
    text = inspected(capsys, "--data", talk)
    assert "source books: 1 documents" in text and "lengths: shortest " in text and "\x1b" not in text
    assert "--- document 0, " in text and ", source books ---" in text and "--- document 1, " in text
    body = text[text.index("--- document 0") :]
    assert "<|endoftext|>[[Prose, naïve: 日本語." in body and " | A second line.<|endoftext|>]]" in body
    assert "| <|endoftext|><|user|>Deep?<|end|><|assistant|>[[Yes.<|end|>]]<|endoftext|>" in body
    # from inside a document, and from a start of its own
    start = dp.open_tokens(talk).starts[1]
    assert inspected(capsys, "--data", talk, "--document", 1).count("---") == 2
    inside = inspected(capsys, "--data", talk, "--at", start + 2, "--tokens", 3)
    assert f"{start + 2:>12,} | D" in inside
    colored = inspected(capsys, "--data", talk, "--document", 1, "--color", "always")
    assert "\x1b[32mYes.<|end|>\x1b[0m" in colored and "[[" not in colored


def test_inspect_lists_what_is_trained(talk, capsys):
    lines = inspected(capsys, "--data", talk, "--document", 1, "--supervised").splitlines()
    found = [re.match(r"position ([\d,]+) reads '(.*)' and is trained on '(.*)'", line) for line in lines]
    found = [match.groups() for match in found if match]
    assert found[0][1] == "<|assistant|>" and found[-1][2] == "<|end|>"
    assert "".join(target for _, _, target in found) == "Yes.<|end|>"
    tokens = dp.open_tokens(talk)
    (batch,) = dp.validation_batches(tokens, len(tokens))
    trained = [int(p) for p in batch.loss_weights[0].nonzero().flatten() if p >= tokens.starts[1]]
    assert [int(position.replace(",", "")) for position, _, _ in found] == trained


def test_inspect_without_a_tokenizer_and_refusals(talk, tmp_path, capsys):
    write(tmp_path / "raw.bin", [[7, 300, 9]], "<u2")
    assert "           0 |  7 300 9" in inspected(capsys, "--data", tmp_path / "raw.bin")
    for arguments, message in (
        (["--at", "1", "--document", "0"], "give --at or --document, not both"),
        (["--document", "2"], "document must be within 0..1, got 2"),
        (["--at", "-1"], "at must be within 0.."),
    ):
        assert main.main(["inspect", "--data", str(talk), *arguments]) == 2
        assert message in capsys.readouterr().err
