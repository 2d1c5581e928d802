"""Token files made by others: every format by struct and NumPy alone, shards, the shelf of bad files, and inspect."""

import gzip
import json
import lzma
import os
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

FAST = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
IDS = [5, 300, 7, 0, 65_535, 12, 9, 300, 7, 1]


def raw(path: Path, ids, dtype="<u2", head=b"") -> Path:
    path.write_bytes(head + np.asarray(ids, dtype).tobytes())
    return path


def ends(path: Path, values) -> Path:
    path.with_name(path.stem + ".ends.bin").write_bytes(struct.pack(f"<{len(values)}Q", *values))
    return path


def mask(path: Path, values) -> Path:
    path.with_name(path.stem + ".mask.bin").write_bytes(bytes(values))
    return path


def headed(path: Path, ids, magic=20240520, version=1, dtype="<u2") -> Path:
    return raw(path, ids, dtype, struct.pack("<256i", magic, version, len(ids), *[0] * 253))


def indexed(path: Path, sequences, bounds=None, dtype="<u2", code=8, modes=False) -> Path:
    raw(path, np.concatenate(sequences), dtype)
    width, lengths = np.dtype(dtype).itemsize, [len(s) for s in sequences]
    pointers = [width * sum(lengths[:i]) for i in range(len(lengths))]
    bounds = range(len(lengths) + 1) if bounds is None else bounds
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
        + struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *pointers)
        + struct.pack(f"<{len(bounds)}q", *bounds) + bytes(len(lengths) if modes else 0)
    )  # fmt: skip
    return path


def npy(path: Path, array) -> Path:
    with open(path, "wb") as file:
        np.save(file, array)
    return path


# Each writer: (folder, documents, masks, dtype, random) -> what --data names. A format without masks ignores them.


def joined(documents):
    return [i for d in documents for i in d]


def nanogpt(folder, documents, masks, dtype, random):
    return raw(folder / "train.bin", joined([*d, 0] for d in documents), dtype)


def llmc(folder, documents, masks, dtype, random):
    magic, version = (20240520, 1) if dtype == "<u2" else (20240801, 7)
    return headed(folder / "t.bin", joined([0, *d] for d in documents), magic, version, dtype)


def megatron(folder, documents, masks, dtype, random, name="m.bin"):
    """A document is one or more sequences."""
    sequences, bounds = [], [0]
    for d in documents:
        cut = random.randrange(len(d))
        sequences += [d[:cut], d[cut:]] if cut else [d]
        bounds.append(len(sequences))
    code = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}[dtype]
    return indexed(folder / name, sequences, bounds, dtype, code)


def neox(folder, documents, masks, dtype, random, name="x_text"):
    labels = [np.where(m, d, -100) for d, m in zip(documents, masks, strict=True)]
    megatron(folder, labels, masks, dtype, random, f"{name}_label_document.bin")
    return megatron(folder, documents, masks, dtype, random, f"{name}_document.bin")


def datatrove(folder, documents, masks, dtype, random):
    bounds = np.cumsum([len(d) for d in documents])
    (folder / "0.ds.index").write_bytes(struct.pack(f"<{len(bounds)}Q", *bounds))
    raw(folder / "0.ds.loss", joined(masks), "?")
    (folder / "0.ds.metadata").write_text(f"a/tokenizer|{np.dtype(dtype).itemsize}\n{bounds[-1]}\n0.1 K")
    return raw(folder / "0.ds", joined(documents), dtype)


def olmo(folder, documents, masks, dtype, random):
    """.npy by name only, bounds as lines of text, labels beside."""
    bounds = np.cumsum([0, *map(len, documents)])
    with gzip.open(folder / "token_ids_part_0001.csv.gz", "wt") as file:
        file.writelines(f"{a},{b},id,source,{i}\n" for i, (a, b) in enumerate(pairwise(bounds)))
    raw(folder / "labels_mask_part_0001.npy", joined(masks), "?")
    return raw(folder / "token_ids_part_0001.npy", joined(documents), dtype)


def litdata(folder, documents, masks, dtype, random):
    """A chunk a document, so that chunk-0-10 comes after chunk-0-9; a file of no index is not read."""
    code = {"u1": 11, "<i4": 16, "<i8": 18, "<u2": 20}[dtype]
    for n, d in enumerate(documents):
        end = 12 + np.dtype(dtype).itemsize * len(d)
        raw(folder / f"chunk-0-{n}.bin", d, dtype, struct.pack("<III", 1, 12, end))
    raw(folder / "chunk-9-0.bin", [1, 2, 3])
    config = {"data_format": [f"no_header_tensor:{code}"], "compression": None, "chunk_bytes": 1 << 26}
    chunks = [{"filename": f"chunk-0-{n}.bin", "chunk_size": 1} for n in range(len(documents))]
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    return folder


def litdata_chunk(folder, documents, masks, dtype, random):
    """One chunk of several items."""
    litdata(folder, [joined(documents)], masks, dtype, random)
    bounds = 4 * (len(documents) + 2) + np.dtype(dtype).itemsize * np.cumsum([0, *map(len, documents)])
    head = struct.pack(f"<I{len(bounds)}I", len(documents), *bounds)
    return raw(folder / "chunk-0-0.bin", joined(documents), dtype, head)


def numpy_npy(folder, documents, masks, dtype, random):
    path = npy(folder / "a.npy", np.array(joined(documents), dtype))
    return mask(ends(path, np.cumsum([len(d) for d in documents])), joined(masks))


def shards(folder, documents, masks, dtype, random):
    """A shard for every one or two documents; a validation file beside them is not training data."""
    at = 0
    while at < len(documents):
        upto = at + random.randint(1, 2)
        path = raw(folder / f"interval_{at:03}.bin", joined(documents[at:upto]), dtype)
        ends(mask(path, joined(masks[at:upto])), np.cumsum([len(d) for d in documents[at:upto]]))
        at = upto
    raw(folder / "fineweb_val_000.bin", [1, 2, 3])
    return folder


def pattern(folder, documents, masks, dtype, random):
    shards(folder, documents, masks, dtype, random)
    return folder / "interval_*.bin"


def folders(folder, documents, masks, dtype, random):
    """A folder a document, named by a pattern."""
    for n, (d, m) in enumerate(zip(documents, masks, strict=True)):
        (folder / f"part{n}").mkdir()
        numpy_npy(folder / f"part{n}", [d], [m], dtype, random)
    return folder / "part*"


FORMATS = [  # writer, widths, where id 0 marks a document, whether masks are kept
    (nanogpt, ("<u2", "<u4"), "end", False),
    (llmc, ("<u2", "<u4"), "start", False),
    (megatron, ("u1", "i1", "<i2", "<i4", "<i8", "<u2"), None, False),
    (neox, ("<i4",), None, True),
    (datatrove, ("<u2", "<u4"), None, True),
    (olmo, ("<u2", "<u4"), None, True),
    (litdata, ("u1", "<i4", "<u2"), None, False),
    (litdata_chunk, ("<i4", "<i8"), None, False),
    (numpy_npy, ("u1", "<u2", ">u4", "<i8"), None, True),
    (shards, ("<u2", "<u4"), None, True),
    (pattern, ("<u2",), None, True),
    (folders, ("<u4",), None, True),
]
# a few raw ids do not show how wide they are; test_raw_width_by_content has larger files
RAW = {nanogpt, olmo, shards, pattern}


@pytest.mark.parametrize(
    ("writer", "dtype", "marked", "masked"),
    [pytest.param(w, x, at, m, id=f"{w.__name__}-{x.strip('<')}") for w, widths, at, m in FORMATS for x in widths],
)
@FAST
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_files_of_other_writers(tmp_path_factory, writer, dtype, marked, masked, data, random):
    folder = tmp_path_factory.mktemp("t")
    largest = min(int(np.iinfo(dtype).max), 1 << 40)
    one = st.lists(st.integers(1, largest) | st.just(largest), min_size=2, max_size=30)
    documents = data.draw(st.lists(one, min_size=1, max_size=12 if writer is litdata else 6))
    # a target in each
    masks = [[random.random() < 0.5, *(random.random() < 0.7 for _ in d[2:]), True] for d in documents]
    path = writer(folder, documents, masks, dtype, random)
    width = np.dtype(dtype).name if writer in RAW else None
    options = {"dtype": width, "doc_id": 0 if marked else None, "doc_at": marked or "end"}
    tokens = dp.open_tokens(path, **options)
    expected = [[*d, 0] if marked == "end" else [0, *d] if marked else d for d in documents]
    flat = joined(expected)
    assert tokens.ids[:].tolist() == flat and len(tokens) == len(flat)
    assert tokens.ids.dtype == dtype and tokens.ids.itemsize == np.dtype(dtype).itemsize
    assert tokens.ids.shape == (len(flat),)
    assert tokens.ends.tolist() == np.cumsum([len(d) for d in expected]).tolist()
    assert tokens.largest == max(flat)
    if masked:
        assert [bool(x) for x in tokens.mask[:]] == joined(masks)
        assert tokens.supervised == sum(sum(m[1:]) for m in masks)
    else:
        assert tokens.mask is None and tokens.supervised == len(flat) - len(documents)
    # opened again, from the cached scan
    again = dp.open_tokens(path, **options)
    assert (again.supervised, again.largest) == (tokens.supervised, tokens.largest)
    # the loader reads the same through any slice
    stream = [i for batch in dp.validation_batches(tokens, 5) for i in batch.inputs.flatten().tolist()]
    assert stream == flat


@FAST
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_joined_arrays_read_as_one(sizes, data):
    parts = [np.arange(n) + 10 * i for i, n in enumerate(sizes)]
    whole, array = np.concatenate(parts), dp._Joined(parts)
    a, b = (data.draw(st.integers(-3, len(whole) + 2)) for _ in range(2))
    assert array[a:b].tolist() == whole[a:b].tolist()
    index = np.array(data.draw(st.lists(st.integers(-len(whole), len(whole) - 1), max_size=9)), int)
    assert array[index].tolist() == whole[index].tolist()
    assert array[index[:8].reshape(-1, 1)].shape == (len(index[:8]), 1)
    assert array[a % len(whole)] == whole[a % len(whole)]
    for beyond in (len(whole), -len(whole) - 1):
        with pytest.raises(IndexError, match="within"):
            array[np.array([0, beyond])]
    if 0 <= a < b <= len(parts[0]):
        assert np.shares_memory(array[a:b], parts[0])


def test_label_files_by_their_names_and_read_again(tmp_path):
    """x_KEY_label_document beside x_KEY_document, and x_label_document beside x_text_document."""
    for name, labels in (("x_chat_document", "x_chat_label_document"), ("y_text_document", "y_label_document")):
        path = indexed(tmp_path / f"{name}.bin", [[5, 6, 7, 8]], None, "<i4", 4)
        indexed(tmp_path / f"{labels}.bin", [[-100, 6, 7, 8]], None, "<i4", 4)
        assert dp.open_tokens(path).mask[:].tolist() == [0, 1, 1, 1]
        indexed(tmp_path / f"{labels}.bin", [[-100, 6, -100, 8]], None, "<i4", 4)
        assert dp.open_tokens(path).supervised == 2


def test_a_folder_of_validation_shards_is_read(tmp_path):
    for n in range(2):
        raw(tmp_path / f"val_{n}.bin", [n, n, n])
    assert dp.open_tokens(tmp_path, dtype="uint16").ids[:].tolist() == [0, 0, 0, 1, 1, 1]


def test_every_format_gives_the_same_ids_and_documents(tmp_path):
    flat = raw(tmp_path / "raw16.bin", IDS)
    ends(flat, [4, 10])
    wide = raw(tmp_path / "raw32.bin", IDS, "<u4")
    (tmp_path / "raw32.bin.index").write_bytes(np.array([4, 10], "<u8").tobytes())
    np.save(tmp_path / "a.npy", np.array(IDS, np.int64))
    np.save(tmp_path / "b.npy", np.array(IDS, ">u4"))
    sequences = [IDS[:4], IDS[4:9], IDS[9:]]
    cases = {
        flat: ("raw uint16", [4, 10]),
        wide: ("raw uint32", [4, 10]),
        tmp_path / "a.npy": ("NumPy .npy", [10]),
        tmp_path / "b.npy": ("NumPy .npy", [10]),
        indexed(tmp_path / "m16.bin", sequences, [0, 1, 3]): ("raw ids with a .idx index", [4, 10]),
        indexed(tmp_path / "m32.bin", sequences, [0, 1, 1, 3], "<i4", 4): ("raw ids with a .idx index", [4, 10]),
        indexed(tmp_path / "mm.bin", sequences, None, "<i8", 5, modes=True): ("raw ids with a .idx index", [4, 9, 10]),
        headed(tmp_path / "h16.bin", IDS): ("ids after a 1,024-byte header", [10]),
        headed(tmp_path / "h32.bin", IDS, 20240801, 7, "<u4"): ("ids after a 1,024-byte header", [10]),
    }
    for path, (kind, expected_ends) in cases.items():
        tokens = dp.open_tokens(path)
        assert (tokens.format, tokens.ids.tolist(), tokens.ends.tolist()) == (kind, IDS, expected_ends), path
        assert (tokens.largest, tokens.supervised) == (65_535, 10 - len(expected_ends))
        assert isinstance(tokens.ids, np.memmap)
    assert dp.open_tokens(tmp_path / "m16.idx").ids.tolist() == IDS


def test_document_marks(tmp_path):
    path = raw(tmp_path / "t.bin", [0, 1, 2, 0, 3, 0, 4, 5])
    assert dp.open_tokens(path, doc_id=0, doc_at="end").ends.tolist() == [1, 4, 6, 8]
    assert dp.open_tokens(path, doc_id=0, doc_at="start").ends.tolist() == [3, 5, 8]
    assert dp.open_tokens(path, doc_id=5, doc_at="end").ends.tolist() == [8]
    assert dp.open_tokens(path, doc_id=5, doc_at="start").ends.tolist() == [7, 8]
    assert dp.open_tokens(path).ends.tolist() == [8]
    ends(path, [5, 8])
    assert dp.open_tokens(path, doc_id=0).ends.tolist() == [5, 8]
    assert "t.ends.bin; doc_id 0 not needed" in dp.open_tokens(path, doc_id=0).describe()[2]


@pytest.mark.parametrize(
    ("ids", "dtype"),
    [
        (np.random.default_rng(0).integers(0, 50_257, 4_000), "uint16"),
        (np.random.default_rng(0).integers(0, 256, 4_000), "uint16"),
        (np.random.default_rng(0).integers(0, 50_257, 4_000), "uint32"),
        (np.random.default_rng(0).integers(0, 256, 4_000), "uint32"),
        (np.random.default_rng(0).integers(0, 200_000, 4_000), "uint32"),
        (np.zeros(100, int), "uint16"),
    ],
    ids=["words16", "bytes16", "words32", "bytes32", "large32", "zeros"],
)
def test_raw_width_by_content(tmp_path, ids, dtype):
    tokens = dp.open_tokens(raw(tmp_path / "t.bin", ids, np.dtype(dtype)))
    assert tokens.ids.dtype == dtype and tokens.ids.tolist() == ids.tolist()
    assert dp.open_tokens(tmp_path / "t.bin", dtype=dtype).ids.tolist() == ids.tolist()


# 32-bit ids that look like 16-bit ones, and the reverse: their number decides
HIDDEN = [("<u4", [(i << 16) + i for i in range(90, 121)]), ("<u4", [0] * 40 + [9]), ("<u2", [5, 0, 900, 7] * 9)]


@pytest.mark.parametrize("side", ["ends", "mask", "index", "loss", "labels", "bounds"])
@pytest.mark.parametrize(("dtype", "ids"), HIDDEN, ids=["large32", "zeros32", "words16"])
def test_files_beside_settle_the_width(tmp_path, side, dtype, ids):
    path, count = raw(tmp_path / "part_0.npy", ids, dtype), len(ids)
    if side in ("ends", "mask"):
        ends(path, [3, count]) if side == "ends" else mask(path, [1] * count)
    elif side == "bounds":
        with gzip.open(tmp_path / "part_0.csv.gz", "wt") as file:
            file.write(f"0,3,a\n3,{count},b\n")
    else:
        name = {"index": "part_0.npy.index", "loss": "part_0.npy.loss", "labels": "labels_mask_part_0.npy"}[side]
        (tmp_path / name).write_bytes(struct.pack("<Q", count) if side == "index" else bytes([1]) * count)
    tokens = dp.open_tokens(path)
    assert (tokens.ids.tolist(), tokens.ids.dtype) == (ids, dtype)


@pytest.mark.parametrize(("count", "vocabulary"), [(9, 50_000), (11, 50_000), (40, 50_000), (1_000, 200_000)])
@pytest.mark.parametrize("side", [ends, mask])
def test_half_of_a_32_bit_file_is_not_a_16_bit_file(tmp_path, side, count, vocabulary):
    """Cut in half it has two bytes for each id that its ends or its mask count."""
    path = raw(tmp_path / "t.bin", np.arange(count) * 9_973 % vocabulary, "<u4")
    side(path, [count] if side is ends else [1] * count)
    assert len(dp.open_tokens(path)) == count
    path.write_bytes(path.read_bytes()[: 2 * count])
    with pytest.raises(ValueError, match=rf"has 2 bytes for each of the {count:,} ids .* half are missing"):
        dp.open_tokens(path)
    assert len(dp.open_tokens(path, dtype="uint16")) == count


def test_a_number_beside_that_fits_no_width_settles_nothing(tmp_path):
    path = ends(raw(tmp_path / "t.bin", IDS), [4, 11])
    with pytest.raises(ValueError, match="the last document ends at 11, but there are 10 ids"):
        dp.open_tokens(path)
    (tmp_path / "t.ends.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="must hold 8-byte unsigned ends, got 0 bytes"):
        dp.open_tokens(mask(path, [1] * 10))


def test_describe_names_everything_found(tmp_path):
    path = raw(tmp_path / "t.bin", IDS)
    ends(path, [4, 10])
    mask(path, [1, 0, 1, 1, 1, 0, 0, 1, 1, 0])
    lines = dp.open_tokens(path, vocab_size=65_536).describe()
    assert "raw uint16, 16 bits" in lines[0] and "ids: 10, largest 65,535, vocabulary 65,536" in lines[1]
    assert "documents: 2 (t.ends.bin), longest 6 tokens" in lines[2]
    # places 0 and 4 start a document, so no position predicts them
    assert "supervised tokens: 4 (response mask)" in lines[3]


def test_scan_is_kept_and_renewed(tmp_path, monkeypatch):
    path = raw(tmp_path / "t.bin", [1, 2, 3])
    scans = []
    monkeypatch.setattr(dp, "_write_atomically", lambda p, d, real=dp._write_atomically: (scans.append(p), real(p, d)))
    assert dp.open_tokens(path).largest == dp.open_tokens(path).largest == 3
    assert len(scans) == 1
    raw(path, [1, 2, 9])
    os.utime(path, ns=(1, 1))
    assert dp.open_tokens(path).largest == 9 and len(scans) == 2
    mask(path, [0, 1, 1])
    assert dp.open_tokens(path).supervised == 2 and len(scans) == 3
    mask(path, [0, 1, 0])
    assert dp.open_tokens(path).supervised == 1
    long = np.zeros(1 << 18, int)
    raw(path, long, "<u2")
    (tmp_path / "t.mask.bin").unlink()
    assert dp.open_tokens(path).largest == 0
    long[1 << 17] = 9  # the same size, head and tail
    raw(path, long, "<u2")
    os.utime(path, ns=(2, 2))
    assert dp.open_tokens(path).largest == 9
    (tmp_path / "t.scan.json").write_text('{"key": 3}')
    assert dp.open_tokens(path).largest == 9
    (tmp_path / "t.scan.json").unlink()

    def full_disk(path, data):
        raise OSError("no space left")

    monkeypatch.setattr(dp, "_write_atomically", full_disk)
    assert dp.open_tokens(path).largest == 9 and not (tmp_path / "t.scan.json").exists()


# ---------------------------------------------------------------------------
# The shelf of bad files: one line each, before anything is built


def patched(path: Path, offset: int, value: bytes) -> None:
    """A sound indexed file of three sequences of one length, but for some bytes of its .idx."""
    index = indexed(path, [IDS, IDS, IDS]).with_suffix(".idx")
    data = bytearray(index.read_bytes())
    data[offset : offset + len(value)] = value
    index.write_bytes(data)


def _facts(path):
    dp.write_tokens(path, [IDS, IDS], vocab_size=65_536, facts={"tokenizer_sha256": "0" * 64})
    path.with_name("tokenizer.json").write_text("{}")


def _shards(path, **beside):
    path.mkdir()
    for name in "ab":
        raw(path / f"{name}.bin", IDS)
    for name, data in beside.items():
        (path / name.replace("_", ".")).write_bytes(data)


def _tokenizers(path):
    path.mkdir()
    for name in "12":
        dp.write_tokens(path / f"{name}.bin", [IDS], vocab_size=65_536, facts={"tokenizer_sha256": name * 64})


def _litdata(path, change=None, chunk=None):
    path.mkdir()
    litdata(path, [IDS, IDS], None, "<i4", None)
    index = path / "index.json"
    if change:
        index.write_text(index.read_text().replace(*change))
    if chunk:
        chunk(path / "chunk-0-1.bin")


def _labels(path, labels):
    path.mkdir()
    indexed(path / "t_text_document.bin", [[3, 4, 5]], None, "<i4", 4)
    indexed(path / "t_text_label_document.bin", [labels], None, "<i4", 4)


def _bounds(path, text, damage=0):
    data = bytearray(gzip.compress(text))
    data[10 : 10 + damage] = b"\xff" * damage
    raw(path, IDS).with_suffix(".csv.gz").write_bytes(data)


SHELF = {
    "missing": (lambda p: None, {}, "does not exist"),
    "empty": (lambda p: p.write_bytes(b""), {}, "is empty"),
    "directory": (lambda p: p.mkdir(), {}, "holds no token files"),
    "one id": (lambda p: raw(p, [1]), {}, "at least 2"),
    "odd": (lambda p: p.write_bytes(bytes(7)), {}, "7 bytes of ids, 1 more than a multiple of 2"),
    "odd wide": (lambda p: p.write_bytes(bytes(6)), {"dtype": "uint32"}, "2 more than a multiple of 4"),
    "text": (lambda p: p.write_text("It was the best of times, it was the worst of times."), {}, "holds text"),
    "gzip": (lambda p: p.write_bytes(gzip.compress(b"x" * 99)), {}, "holds gzip"),
    "xz": (lambda p: p.write_bytes(lzma.compress(b"x" * 99)), {}, "holds xz"),
    "header cut": (lambda p: p.write_bytes(headed(p, IDS).read_bytes()[:600]), {}, "header states"),
    "ids cut": (
        lambda p: p.write_bytes(headed(p, IDS).read_bytes()[:-2]),
        {},
        "header states 10 ids, which need 1,044",
    ),
    "header only": (lambda p: headed(p, []), {}, "holds 0 ids"),
    "header version": (lambda p: headed(p, IDS, version=3), {}, "version 3, needs [1]"),
    "header width": (lambda p: headed(p, IDS, 20240801, 7, "<u4"), {"vocab_size": 100}, "id 300 at token 1"),
    "npy cut": (lambda p: (npy(p, np.arange(99)), os.truncate(p, 300)), {}, "whole .npy"),
    "npy header": (lambda p: p.write_bytes(b"\x93NUMPY\x01\x00"), {}, "whole .npy"),
    "npy magic": (lambda p: p.write_bytes(b"\x93NUMPY"), {}, "whole .npy"),
    "npy objects": (lambda p: npy(p, np.array([{}, 1])), {}, "whole .npy"),
    "npy float": (lambda p: npy(p, np.ones(9)), {}, "got float64"),
    "npy 2-d": (lambda p: npy(p, np.ones((3, 3), int)), {}, "shape (3, 3)"),
    "npy empty": (lambda p: npy(p, np.ones(0, int)), {}, "0 id"),
    "npy negative": (lambda p: npy(p, np.array([3, -1])), {}, "id -1 at token 1"),
    "npy width": (lambda p: npy(p, np.arange(9)), {"dtype": "uint16"}, "states int64"),
    "idx cut": (lambda p: (indexed(p, [IDS, IDS]), os.truncate(p.with_suffix(".idx"), 50)), {}, "need 82"),
    "idx header": (lambda p: (indexed(p, [IDS]), os.truncate(p.with_suffix(".idx"), 20)), {}, "no whole index header"),
    "idx empty": (lambda p: (raw(p, IDS), p.with_suffix(".idx").touch()), {}, "in its 0 bytes"),
    "idx float": (lambda p: indexed(p, [IDS], code=7), {}, "dtype code"),
    "idx version": (lambda p: patched(p, 9, b"\x02"), {}, "version must be 1, got 2"),
    "idx pointers": (lambda p: patched(p, 34 + 12 + 8, b"\x28"), {}, "not stored one after another"),
    "idx negative": (lambda p: patched(p, 34, b"\xff\xff\xff\xff"), {}, "length is negative (-1)"),
    "idx falls": (lambda p: patched(p, 34 + 12 + 24 + 8, b"\x03"), {}, "must rise from 0 to 3"),
    "idx bounds": (lambda p: indexed(p, [IDS, IDS], [0, 1]), {}, "must rise from 0 to 2"),
    "idx other bin": (lambda p: raw(indexed(p, [IDS]), IDS[:-1]), {}, "10 ids are indexed, but t.bin holds 9"),
    "vocabulary": (lambda p: raw(p, IDS), {"vocab_size": 301}, "id 65,535 at token 4 must be in 0..300"),
    "doc id": (lambda p: raw(p, IDS), {"doc_id": 77}, "doc_id 77 does not occur in 10 ids"),
    "ends empty": (lambda p: ends(raw(p, IDS), []), {}, "got 0 bytes"),
    "ends cut": (lambda p: raw(p, IDS).with_name("t.ends.bin").write_bytes(bytes(9)), {}, "got 9 bytes"),
    "ends equal": (lambda p: ends(raw(p, IDS), [4, 4, 10]), {}, "4 after 4 at entry 1"),
    "ends fall": (lambda p: ends(raw(p, IDS), [4, 3, 10]), {}, "3 after 4 at entry 1"),
    "ends zero": (lambda p: ends(raw(p, IDS), [0, 10]), {}, "0 after 0 at entry 0"),
    "ends short": (lambda p: ends(raw(p, IDS), [4, 9]), {}, "ends at 9, but there are 10"),
    "ends long": (lambda p: ends(raw(p, IDS), [4, 2**63 + 5]), {}, "but there are 10"),
    "no pair": (lambda p: ends(raw(p, IDS), np.arange(1, 11)), {}, "supervised tokens = 0"),
    "mask length": (lambda p: mask(raw(p, IDS), [1] * 9), {}, "9 bytes, but there are 10 ids"),
    "mask empty": (lambda p: mask(raw(p, IDS), []), {}, "0 bytes, but there are 10 ids"),
    "mask value": (lambda p: mask(raw(p, IDS), [1] * 8 + [255, 1]), {}, "got 255 at token 8"),
    "mask zero": (lambda p: mask(raw(p, IDS), [0] * 10), {}, "supervised tokens = 0"),
    "mask first": (lambda p: mask(raw(p, IDS), [1] + [0] * 9), {}, "supervised tokens = 0"),
    "facts": (lambda p: (raw(p, IDS), p.with_suffix(".json").write_text("{")), {}, "must be JSON"),
    "folder of text": (lambda p: (p.mkdir(), (p / "a.txt").write_text("x")), {}, "holds no token files"),
    "odd cut of 32 bits": (lambda p: os.truncate(raw(p, range(99), "<u4"), 394), {}, "2 more than a multiple of 4"),
    "jsonl": (lambda p: p.write_text('{"text": "words of a text"}\n' * 9), {}, "holds text, not token ids"),
    "parquet": (lambda p: p.write_bytes(b"PAR1" + bytes(99)), {}, "holds Parquet"),
    "arrow": (lambda p: p.write_bytes(b"ARROW1" + bytes(99)), {}, "holds Arrow"),
    "zstd": (lambda p: p.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(99)), {}, "holds zstd"),
    "evaluation records": (lambda p: headed(p, IDS, 20240522), {}, "holds multiple-choice records"),
    "header count": (lambda p: raw(p, IDS, head=headed(p, IDS * 3).read_bytes()[:1024]), {}, "its header states 30"),
    "header other width": (lambda p: headed(p, IDS), {"dtype": "uint32"}, "states uint16, not uint32"),
    "idx negative id": (lambda p: indexed(p, [[5, -3, 4]], None, "<i4", 4), {}, "id -3 at token 1 must be at least 0"),
    "idx alone": (lambda p: (indexed(p, [IDS]), p.unlink()), {}, "does not exist"),
    "cut copy": (lambda p: (dp.write_tokens(p, [IDS], vocab_size=65_536), os.truncate(p, 8)), {}, "says 10 ids"),
    "other tokenizer": (_facts, None, "was made with 000000000000"),
    "bounds gap": (lambda p: _bounds(p, b"0,4\n5,10\n"), {}, "must follow one another from 0 to 10"),
    "bounds short": (lambda p: _bounds(p, b"0,4\n4,9\n"), {}, "must follow one another from 0 to 10"),
    "bounds words": (lambda p: _bounds(p, b"start,end\n0,10\n"), {}, "must hold lines of start,end"),
    "bounds damaged": (lambda p: _bounds(p, b"0,10\n" * 99, damage=9), {}, "must hold lines of start,end"),
    "labels shifted": (lambda p: _labels(p, [4, 5, -100]), {}, "label 4 at token 0 must be -100 or the id 3"),
    "labels short": (lambda p: _labels(p, [3, 4]), {}, "holds 2 labels for 3 ids"),
    "chunk cut": (lambda p: _litdata(p, chunk=lambda c: os.truncate(c, 40)), {}, "do not fill its 40 bytes"),
    "chunk head": (lambda p: _litdata(p, chunk=lambda c: os.truncate(c, 3)), {}, "do not fill its 3 bytes"),
    "chunk missing": (lambda p: _litdata(p, chunk=Path.unlink), {}, "lists chunk-0-1.bin, which does not exist"),
    "chunks packed": (lambda p: _litdata(p, ("null", '"zstd"')), {}, "compression zstd; needs one list of integers"),
    "chunks of floats": (lambda p: _litdata(p, (":16", ":0")), {}, "states ['no_header_tensor:0']"),
    "chunks of images": (lambda p: _litdata(p, ("no_header_tensor:16", "jpeg")), {}, "states ['jpeg']"),
    "shards of two widths": (lambda p: _shards(p, b_bin=np.arange(99, dtype="<u4").tobytes()), {}, "b.bin has format"),
    "shard without ends": (lambda p: _shards(p, a_ends_bin=struct.pack("<Q", 10)), {}, "has documents one stream"),
    "shard without mask": (lambda p: _shards(p, a_mask_bin=b"\1" * 10), {}, "b.bin has mask none"),
    "shards of two tokenizers": (_tokenizers, {}, "has tokenizer sha256 222222222222"),
    "empty shard": (lambda p: _shards(p, b_bin=b""), {}, "b.bin is empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", SHELF)
def test_the_shelf_of_bad_files(tmp_path, monkeypatch, capsys, case):
    make, options, message = SHELF[case]
    path = tmp_path / "t.bin"
    make(path)
    if options is not None:  # else only the tokenizer is wrong
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            dp.open_tokens(path, **options)
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    monkeypatch.setattr(main, "TrainingEngine", None)  # no model is built
    monkeypatch.chdir(tmp_path)
    names = {"dtype": "--data-dtype", "doc_id": "--doc-id", "vocab_size": "--vocab-size"}
    flags = [word for name, value in (options or {}).items() for word in (names[name], str(value))]
    assert main.main(["train", "--preset", "nano", "--data", str(path), "--device", "cpu", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").rglob("*.json"))


def test_wrong_arguments_and_a_narrow_file(tmp_path):
    path = raw(tmp_path / "t.bin", IDS)
    for options, message in (
        ({"doc_at": "middle"}, "doc_at must be 'start' or 'end', got 'middle'"),
        ({"dtype": "int7"}, "dtype must be uint16 or uint32, got 'int7'"),
        ({"vocab_size": 100_000}, "16-bit ids (largest 65,535), but the vocabulary is 100000"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            dp.open_tokens(path, **options)


def test_vocabulary_error_names_the_first_place(tmp_path):
    path = raw(tmp_path / "t.bin", np.r_[np.zeros(10, int), 40, np.zeros(10, int), 99], "<u2")
    with pytest.raises(ValueError, match=r"id 40 at token 10 must be in 0\.\.29 \(largest id found: 99\)"):
        dp.open_tokens(path, vocab_size=30, dtype="uint16")
    assert dp.open_tokens(path, vocab_size=100, dtype="uint16").vocab_size == 100


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


def bytes_file(tmp_path, documents, masks=None, sources=None):
    """Ids are bytes; 256 is <|end|>, 257 two line ends and a q."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    vocabulary = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
    vocabulary[2 * chr(256 + others.index(10)) + "q"] = 257
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 256, "content": "<|end|>", "special": True}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    ids = [list(d) if isinstance(d, bytes) else d for d in documents]
    dp.write_tokens(tmp_path / "b.bin", ids, vocab_size=258, masks=masks, sources=sources)
    return tmp_path / "b.bin"


def test_inspect_loses_and_obeys_no_character(tmp_path, capsys):
    """Escapes reach no terminal, a cut character stays in its document, and each line has its first token's place."""
    wave = "\N{WATER WAVE}".encode()
    path = bytes_file(tmp_path, [b"a\x1b[2Jb\t\r\n\nc" + wave[:2], wave[2:] + b"d\\", b"x" * 250, [97, 257, 98]])
    body = inspected(capsys, "--data", path, "--tokens", 300).splitlines()[6:]
    assert body == [
        "--- document 0, 13 tokens from 0 ---",
        "           0 | a\\x1b[2Jb\\t\\r",
        "           9 | ",
        "          10 | c\N{REPLACEMENT CHARACTER}",
        "--- document 1, 4 tokens from 13 ---",
        "          13 | \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}d\\",
        "--- document 2, 250 tokens from 17 ---",
        "          17 | " + "x" * 111,
        "         128 : " + "x" * 111,
        "         239 : " + "x" * 28,
        "--- document 3, 3 tokens from 267 ---",
        "         267 | a",
        "         268 | ",
        "         268 | qb",
    ]


def test_inspect_gives_the_figures_of_each_source(tmp_path, monkeypatch, capsys):
    documents = [b"abcd", b"efghij", b"kl"]
    masks = [[1, 0, 1, 1], [0, 0, 0, 1, 1, 1], [1, 1]]
    path = bytes_file(tmp_path, documents, masks, ["web", "talk", "web"])
    lines = inspected(capsys, "--data", path).splitlines()
    assert "trained: 50.0% of the ids are targets" in lines
    assert any(line.startswith("source web: 2 documents, 6 tokens, 50.0% trained; shortest 2, ") for line in lines)
    assert any(line.startswith("source talk: 1 documents, 6 tokens, 50.0% trained; shortest 6, ") for line in lines)
    tokens = dp.open_tokens(path)
    assert main._targets(tokens).tolist() == [2, 3, 1]
    lines = inspected(capsys, "--data", path, "--document", 1, "--tokens", 3).splitlines()
    assert lines[-1] == "3 more tokens of this document: --tokens 6 shows them"
    # on a terminal: colour, but for NO_COLOR, unless forced
    monkeypatch.setattr(main.sys.stdout, "isatty", lambda: True, raising=False)
    assert "\x1b[32mcd\x1b[0m" in inspected(capsys, "--data", path, "--document", 0)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "ab[[cd]]" in inspected(capsys, "--data", path, "--document", 0)
    assert "\x1b[32m" in inspected(capsys, "--data", path, "--color", "always")
    assert "\x1b" not in inspected(capsys, "--data", path, "--color", "never")


def test_inspect_targets_of_a_prompt_and_its_response(tmp_path, capsys):
    """B043: P1 P2 P3 R1 R2 END trains exactly the positions of P3, R1 and R2, in any window."""
    half = "\N{EURO SIGN}".encode()
    path = bytes_file(tmp_path, [b"zz", [112, 113, 114, half[0], half[1], 256]], [[0, 1], [0, 0, 0, 1, 1, 1]])
    lines = [
        "position 4 reads 'r' and is trained on b'\\xe2'",
        "position 5 reads b'\\xe2' and is trained on b'\\x82'",
        "position 6 reads b'\\x82' and is trained on '<|end|>'",
    ]
    assert inspected(capsys, "--data", path, "--document", 1, "--supervised").splitlines()[6:] == lines
    # the target of the window's last position lies outside it
    cut = inspected(capsys, "--data", path, "--at", 1, "--tokens", 4, "--supervised").splitlines()[6:]
    assert cut == lines[:1]


def test_inspect_without_a_tokenizer_and_refusals(talk, tmp_path, capsys):
    raw(tmp_path / "raw.bin", [7, 300, 9])
    assert "           0 |  7 300 9" in inspected(capsys, "--data", tmp_path / "raw.bin")
    for arguments, message in (
        (["--at", "1", "--document", "0"], "give --at or --document, not both"),
        (["--document", "2"], "document must be within 0..1, got 2"),
        (["--at", "-1"], "at must be within 0.."),
    ):
        assert main.main(["inspect", "--data", str(talk), *arguments]) == 2
        assert message in capsys.readouterr().err
