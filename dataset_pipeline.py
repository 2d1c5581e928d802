"""Token files, preparation of text, packed batches, and the length curriculum.

What this file is: everything between files on disk and the tensors of one optimizer step. It knows no model and no
loss, and never prints: callers print what `describe()` and the returned notes say.

Packing. Documents are concatenated in an order drawn from (seed, epoch); the epochs follow each other in one stream,
several sources side by side. A row is a window of T stream tokens, the next row starts T tokens later; a stage reads
its rows in shuffled order, or a step would be a few pages of one long document. Each row reads T + 3 tokens, so that
targets (t + 1) and draft targets (t + 2, t + 3) cross row ends; none crosses a document end:

    stream      a a a a | b b b b b b | c c        T = 5
    row 0       a a a a b    targets  a a a - b    doc_start  0 0 0 0 4
    row 1       b b b b b    targets  b b b b -    doc_start  0 0 0 0 0

A document longer than the rest of its row goes on in the next row as a new start (doc_start 0 there): no state is
carried between rows. Every token but a document's first is a target exactly once an epoch. Which rows a step reads
follows from the seed and the stages, so a batch is a pure function of (seed, step), whatever the ranks.

Errors that a user can cause are one-line ValueErrors: what, the value found, the value needed, what to do.
Letters: B rows of a batch, T tokens of a row, W vocabulary.
"""

import ast
import bisect
import codecs
import collections
import contextlib
import fnmatch
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import lzma
import math
import multiprocessing
import os
import re
import sysconfig
import unicodedata
import warnings
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_config import CurriculumConfig

__all__ = [  # noqa: RUF022 (file order)
    "TokenFile", "open_tokens", "TokenWriter", "write_tokens",
    "encode_prompt", "encode_chat", "bytes_of_id", "special_names", "decode_bytes", "TextDecoder",
    "Removal", "DuplicateReport", "find_duplicates", "Contamination", "ContaminationReport", "find_contaminated",
    "SplitReport", "PrepareReport", "prepare", "demo_corpus",
    "CurriculumStage", "build_curriculum",
    "SourcePlan", "plan_mixture", "difficulty",
    "DRAFT_STRIDE", "Batch", "StepPlan", "PackedSequenceDataLoader", "long_share",
    "doc_start_from_cu_seqlens", "reset_flags", "boundary_indices", "AttentionTileMap", "attention_tile_map",
    "validation_batches", "token_byte_lengths", "unigram_bits_per_byte", "xz_bits_per_byte",
]  # fmt: skip

# ---------------------------------------------------------------------------
# Shared helpers


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _sidecar(path: Path, suffix: str) -> Path:
    """tokens.bin, ".ends.bin" -> tokens.ends.bin"""
    return path.with_name(path.stem + suffix)


class _AtomicFile:
    """A file under a temporary name until publish(): readers see the old file or the whole new one."""

    def __init__(self, path: Path) -> None:
        self.path, self._temporary = path, path.with_name(f"{path.name}.tmp-{os.getpid()}")
        self._file = open(self._temporary, "wb")
        self.write = self._file.write

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def publish(self) -> None:
        os.replace(self._temporary, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def close(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _write_atomically(path: Path, data: bytes) -> None:
    with contextlib.closing(_AtomicFile(path)) as file:
        file.write(data)
        file.sync()
        file.publish()


def _hash_indices(count: int, *key: object) -> np.ndarray:
    """64 well-mixed bits for each index below count, the same on every machine and library version."""
    salt = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little")
    z = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# ---------------------------------------------------------------------------
# Token files: reading

_FACTS_KIND = "token-file-facts"
_RAW_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
# dtype codes of an .idx file (6 and 7 are floating point)
_INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
# headers of 256 int32, which begin with magic, version and count
_HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_HEADER_BYTES = 1024
# dtype codes of a litdata index.json, "no_header_tensor:CODE"
_LITDATA_DTYPES = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}
# endings of what lies beside token files
_BESIDE = (".ends.bin", ".mask.bin", ".sources.bin", ".json", ".idx", ".index", ".loss", ".metadata", ".csv.gz", ".tmp")
# how files that are not ids begin; three bytes and more, for two are an id that may well come first
_NOT_IDS = {
    b"PAR1": "Parquet", b"\x1f\x8b\x08": "gzip", b"\xfd7zX": "xz", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd",
    b"ARROW1": "Arrow", (20240522).to_bytes(4, "little"): "multiple-choice records",
}  # fmt: skip
# fineweb_val_000.bin, val.bin and tokens.val.bin, not interval.bin
_VALIDATION = re.compile(r"(^|[._-])val(id|idation)?([._-]|$)")
_SCAN_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """An open token file: memory-mapped ids, document ends, response mask and what is known about them."""

    path: Path
    format: str
    ids: np.ndarray
    ends: np.ndarray  # (documents,) int64, cumulative, exclusive
    ends_source: str
    mask: np.ndarray | None  # uint8 per token, 1 = this token is a supervised target
    source_of: np.ndarray | None  # (documents,) uint16, index into sources; None = all of one source
    sources: tuple[str, ...]  # names, at least one
    facts: dict[str, Any]  # X.json, {} without one
    vocab_size: int | None
    largest: int
    supervised: int  # targets with weight 1 in one epoch

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    def check_vocabulary(self, size: int) -> None:
        """Refuse ids that a vocabulary lacks."""
        if self.largest >= size:
            raise ValueError(_strange_id(self.path, self.ids, self.largest, size))

    def describe(self) -> list[str]:
        """Return the lines to print: what was found, and in which file."""
        vocabulary = "not stated" if self.vocab_size is None else f"{self.vocab_size:,}"
        mask = "no mask: every target counts" if self.mask is None else "response mask"
        return [
            f"data: {self.path} is {self.format}, {8 * self.ids.dtype.itemsize} bits an id",
            f"ids: {len(self):,}, largest {self.largest:,}, vocabulary {vocabulary}",
            f"documents: {len(self.ends):,} ({self.ends_source}), longest {int(self.lengths.max()):,} tokens"
            + (f", of {len(self.sources)} sources" if len(self.sources) > 1 else ""),
            f"supervised tokens: {self.supervised:,} ({mask})",
        ]

    def read_tokenizer(self) -> str | None:
        """Return the tokenizer.json beside the file, or None; refuse one that the ids were not made with."""
        path = self.path.with_name(self.facts.get("tokenizer", "tokenizer.json"))
        if not path.is_file():
            return None
        data = path.read_bytes()
        found, made_with = hashlib.sha256(data).hexdigest(), self.facts.get("tokenizer_sha256")
        if made_with not in (None, found):
            wrong = f"{path} has sha256 {found[:12]}, but {self.path.name} was made with {made_with[:12]}"
            raise ValueError(f"{wrong}; restore that tokenizer or run `prepare` again")
        return data.decode("utf-8")


def open_tokens(
    path: str | Path,
    *,
    dtype: str | None = None,
    doc_id: int | None = None,
    doc_at: str = "end",
    vocab_size: int | None = None,
) -> TokenFile:
    """Open a token file, recognised by content, and check every byte of it once.

    Args:
        path: a file; a folder or a pattern such as shard_*.bin, whose files are one file, in the order of their names.
        dtype: width of a raw file ("uint16" or "uint32") where neither facts nor content should decide.
        doc_id: id that stands at each document's `doc_at` ("start" or "end"); used where no file states the ends.
        vocab_size: ids must be below it; None takes the one in X.json, if any.
    """
    if shards := _shards(Path(path)):
        return _join_shards([open_tokens(p, dtype=dtype, doc_id=doc_id, doc_at=doc_at, vocab_size=vocab_size)
                             for p in shards])  # fmt: skip
    path = Path(path)
    _require(doc_at in ("start", "end"), f"doc_at must be 'start' or 'end', got {doc_at!r}")
    _require(dtype is None or dtype in _RAW_DTYPES, f"dtype must be uint16 or uint32, got {dtype!r}")
    _require(path.exists(), f"{path} does not exist; give the path of a token file, or make one with `prepare`")
    if path.suffix == ".idx":
        path = path.with_suffix(".bin")
        _require(path.is_file(), f"{path} does not exist, but the index beside it does; copy both files")
    _require(path.stat().st_size > 0, f"{path} is empty (0 bytes); a token file needs at least 2 ids")

    facts = _read_facts(path)
    kind, ids, index_ends = _map_ids(path, dtype, facts)
    count, bits = len(ids), 8 * ids.itemsize
    _require(count >= 2, f"{path} holds {count} id; training needs at least 2")
    found = f"{count:,} ids of {ids.dtype.name}"
    stated = f"{facts.get('count', count):,} ids of {facts.get('dtype', ids.dtype.name)}"
    _require(found == stated, f"{path} holds {found}, but {path.stem}.json says {stated}; copy both again")
    vocab_size = facts.get("vocab_size") if vocab_size is None else vocab_size
    narrow = f"{path} stores {bits}-bit ids (largest {(1 << bits) - 1:,}), but the vocabulary is {vocab_size}"
    _require(vocab_size is None or vocab_size <= 1 << bits, f"{narrow}; ids would have wrapped: write 32-bit ids")

    ends, source = _document_ends(path, ids, index_ends, doc_id, doc_at)
    mask = _map_mask(path, ids)
    source_of, sources = _read_sources(path, facts, len(ends))
    scan = _scan(path, ids, mask, needs_digest="sha256" in facts)
    _check_values(path, ids, mask, scan, facts.get("sha256"), vocab_size)
    supervised = count - len(ends)
    if mask is not None:
        supervised = scan["mask_ones"] - int(mask[0]) - int(np.count_nonzero(mask[ends[:-1]]))
    _require(supervised > 0, f"{path}: supervised tokens = 0; give documents of 2 tokens, and a mask with 1 at targets")
    return TokenFile(
        path=path, format=kind, ids=ids, ends=ends, ends_source=source, mask=mask, source_of=source_of,
        sources=sources, facts=facts, vocab_size=vocab_size, largest=scan["largest"], supervised=supervised,
    )  # fmt: skip


def _check_values(
    path: Path, ids: np.ndarray, mask: np.ndarray | None, scan: dict, digest: str | None, vocab_size: int | None
) -> None:
    changed = digest is not None and scan["sha256"] != digest
    _require(not changed, f"{path} was changed or damaged: its sha256 differs from {path.stem}.json; copy it again")
    limit = math.inf if vocab_size is None else vocab_size
    if scan["smallest"] < 0 or scan["largest"] >= limit:
        raise ValueError(_strange_id(path, ids, scan["largest"], limit))
    if mask is not None and scan["mask_largest"] > 1:
        at = _first(mask, lambda chunk: chunk > 1)
        raise ValueError(
            f"{path}: its mask must hold only 0 and 1, got {int(mask[at])} at token {at:,}; write it again"
        )


def _strange_id(path: Path, ids: np.ndarray, largest: int, limit: float) -> str:
    """The message on the first id outside 0..limit - 1."""
    at = _first(ids, lambda chunk: (chunk < 0) | (chunk >= limit))
    within = "at least 0" if limit == math.inf else f"in 0..{limit - 1:,}"
    wrong = f"{path}: id {int(ids[at]):,} at token {at:,} must be {within}"
    return f"{wrong} (largest id found: {largest:,}); use the tokenizer that made the file, or a larger vocabulary"


def _shards(path: Path) -> list[Path]:
    """The token files of a folder or a pattern, [] for a file. Validation files beside others are left out of a folder;
    a folder of a pattern stands for its own files."""
    if path.is_dir():
        if chunks := _litdata_chunks(path):
            # in the order of the index: by name, chunk-0-10 would come before chunk-0-2
            missing = next((name for name in chunks if not (path / name).is_file()), None)
            _require(missing is None, f"{path}/index.json lists {missing}, which does not exist; copy the folder again")
            return [path / name for name in chunks]
        found = sorted(p for p in path.iterdir() if p.suffix in (".bin", ".npy", ".ds"))
    elif not path.exists() and any(mark in str(path) for mark in "*?["):
        found = [p for match in sorted(glob.glob(str(path))) for p in _shards(Path(match)) or [Path(match)]]
    else:
        return []
    beside = ("labels_mask_", "label_document")
    found = [p for p in found if not p.name.endswith(_BESIDE) and not any(mark in p.name for mark in beside)]
    if path.is_dir():
        found = [p for p in found if not _VALIDATION.search(p.stem)] or found
    _require(bool(found), f"{path} holds no token files; give one, a folder of shards, or run `prepare` on text")
    return found


class _Joined:
    """Arrays one after another, read as one: a slice within one of them is a view, other reads are copies."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = [part.view(np.ndarray) for part in parts]
        self._bounds = np.cumsum([0, *map(len, parts)])
        self._cuts = self._bounds.tolist()
        self.dtype, self.itemsize, self.shape = parts[0].dtype, parts[0].itemsize, (int(self._bounds[-1]),)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice | np.ndarray) -> Any:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            assert step == 1
            # bisect on a list: 1.4 us a slice, 3.5 us with searchsorted on the array
            first = bisect.bisect_right(self._cuts, begin) - 1
            last = min(max(bisect.bisect_left(self._cuts, end), first + 1), len(self._parts))
            pieces = [self._parts[p][max(begin - self._cuts[p], 0) : max(end - self._cuts[p], 0)]
                      for p in range(first, last)]  # fmt: skip
            return pieces[0] if len(pieces) == 1 else np.concatenate([self._parts[0][:0], *pieces])
        index = np.asarray(index)
        index = np.where(index < 0, index + len(self), index)
        if index.size and not (0 <= index.min() and index.max() < len(self)):
            raise IndexError(f"places must be within {len(self):,} tokens, got {index.min():,}..{index.max():,}")
        # sorted once, each part reads its own stretch: 1 M places of 1,000 parts in 0.15 s, 1.0 s with a mask a part
        flat = index.ravel()
        order = np.argsort(flat, kind="stable")
        cuts = np.searchsorted(flat[order], self._bounds)
        found = np.empty(flat.shape, self.dtype)
        for p in np.flatnonzero(np.diff(cuts)):
            mine = order[cuts[p] : cuts[p + 1]]
            found[mine] = self._parts[p][flat[mine] - self._bounds[p]]
        return found.reshape(index.shape)[()]


def _join_shards(shards: list[TokenFile]) -> TokenFile:
    """Read open files as one; each ends its last document."""
    one = shards[0]
    if len(shards) == 1:
        return one

    def traits(shard: TokenFile) -> dict[str, object]:
        return {
            "format": shard.format,
            "width": shard.ids.dtype.name,
            # without the name, which differs: a shard that lost its ends file would be one document
            "documents": shard.ends_source.removeprefix(shard.path.stem),
            "mask": "none" if shard.mask is None else "a mask",
            "vocabulary": shard.vocab_size,
            "tokenizer sha256": str(shard.facts.get("tokenizer_sha256"))[:12],
        }

    for other in shards[1:]:
        for name, here, there in zip(traits(one), traits(one).values(), traits(other).values(), strict=True):
            differs = f"{other.path} has {name} {there}, but {one.path} has {here}"
            _require(here == there, f"{differs}; give shards of one kind, each with the same files beside it")
    begins = np.cumsum([0, *map(len, shards)])
    names = tuple(dict.fromkeys(name for shard in shards for name in shard.sources))
    source_of = [
        np.array([names.index(name) for name in shard.sources], np.uint16)[
            np.zeros(len(shard.ends), int) if shard.source_of is None else shard.source_of
        ]
        for shard in shards
    ]
    return replace(
        one,
        format=f"the first of {len(shards)} shards, each {one.format}",
        ids=_Joined([shard.ids for shard in shards]),
        ends=np.concatenate([shard.ends + begin for shard, begin in zip(shards, begins, strict=False)]),
        mask=None if one.mask is None else _Joined([shard.mask for shard in shards]),
        source_of=np.concatenate(source_of) if len(names) > 1 else None,
        sources=names,
        largest=max(shard.largest for shard in shards),
        supervised=sum(shard.supervised for shard in shards),
    )


def _read_facts(path: Path) -> dict[str, Any]:
    """X.json, where it is one of ours; another JSON file of that name says nothing about the ids."""
    file = _sidecar(path, ".json")
    if not file.is_file():
        return {}
    try:
        facts = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, got: {error}; delete it or restore it") from None
    return facts if isinstance(facts, dict) and facts.get("kind") == _FACTS_KIND else {}


def _map_ids(path: Path, dtype: str | None, facts: dict) -> tuple[str, np.ndarray, np.ndarray | None]:
    """-> (format, ids, document ends if the format has them)"""
    with open(path, "rb") as file:
        head = file.read(4096)
    index_ends = None
    if head.startswith(b"\x93NUMPY"):
        kind, ids = "NumPy .npy", _map_numpy(path)
    elif path.with_suffix(".idx").is_file():
        kind, (ids, index_ends) = "raw ids with a .idx index", _map_indexed(path)
    elif header := _header_dtype(path, head):
        kind, ids = "ids after a 1,024-byte header", _map_flat(path, header, _HEADER_BYTES)
    elif code := _litdata_chunks(path.parent).get(path.name):
        kind, (ids, index_ends) = "a chunk of an index.json", _map_chunk(path, code)
    else:
        stated = dtype or facts.get("dtype") or _metadata_dtype(path)
        if stated is None:
            _refuse_text(path, head)
            stated = _counted_width(path) or _guess_width(path)
        _require(stated in _RAW_DTYPES, f"{path.stem}.json: dtype must be uint16 or uint32, got {stated!r}")
        return f"raw {stated}", _map_flat(path, _RAW_DTYPES[stated], 0), None
    stated = ids.dtype.name
    _require(dtype in (None, stated), f"{path} is {kind} and states {stated}, not {dtype}; leave dtype out")
    return kind, ids, index_ends


def _map_flat(path: Path, dtype: str, offset: int) -> np.ndarray:
    width, size = np.dtype(dtype).itemsize, path.stat().st_size - offset
    odd = f"{path} has {size:,} bytes of ids, {size % width} more than a multiple of {width}"
    _require(size % width == 0, f"{odd}; the copy is cut off, or the width is another one (--data-dtype)")
    _require(size > 0, f"{path} holds 0 ids; training needs at least 2")
    return np.memmap(path, dtype=dtype, mode="r", offset=offset)


def _map_numpy(path: Path) -> np.ndarray:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} must be a whole .npy file, got: {reason}; save or copy it again") from None
    whole = ids.ndim == 1 and ids.dtype.kind in "ui"
    _require(whole, f"{path} must hold a list of integers, got {ids.dtype} of shape {ids.shape}; flatten and cast it")
    return ids


def _map_indexed(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Ids and document ends by the .idx layout: magic, u64 version, u8 dtype, u64 sequences, u64 documents + 1, then
    int32 lengths, int64 byte offsets, int64 document bounds (and one int8 mode a sequence, where multimodal)."""
    index = path.with_suffix(".idx")
    data = index.read_bytes()

    def check(condition: bool, what: str) -> None:
        _require(condition, f"{index}: {what}; copy both files again, or move the .idx away to read the ids raw")

    check(data.startswith(_INDEX_MAGIC) and len(data) >= 34, f"no whole index header in its {len(data)} bytes")
    version, code = int.from_bytes(data[9:17], "little"), data[17]
    sequences, documents = (int.from_bytes(data[i : i + 8], "little") for i in (18, 26))
    check(version == 1, f"version must be 1, got {version}")
    check(code in _INDEX_DTYPES, f"dtype code must be one of {sorted(_INDEX_DTYPES)}, got {code}")
    size = 34 + 12 * sequences + 8 * documents
    whole = sequences > 0 and len(data) in (size, size + sequences)
    check(whole, f"{len(data):,} bytes, but {sequences:,} sequences and {documents:,} document bounds need {size:,}")
    lengths = np.frombuffer(data, "<i4", sequences, 34).astype(np.int64)
    offsets = np.frombuffer(data, "<i8", sequences, 34 + 4 * sequences)
    bounds = np.frombuffer(data, "<i8", documents, 34 + 12 * sequences)
    ids = _map_flat(path, _INDEX_DTYPES[code], 0)
    ends = np.cumsum(lengths)
    check(bool((lengths >= 0).all()), f"a sequence length is negative ({lengths.min()})")
    check(bool((offsets == (ends - lengths) * ids.itemsize).all()), "the sequences are not stored one after another")
    check(int(ends[-1]) == len(ids), f"{int(ends[-1]):,} ids are indexed, but {path.name} holds {len(ids):,}")
    rising = documents >= 2 and bounds[0] == 0 and bounds[-1] == sequences and bool((np.diff(bounds) >= 0).all())
    check(rising, f"the document bounds must rise from 0 to {sequences}")
    document_ends = np.concatenate([[0], ends])[bounds[1:]]
    return ids, np.unique(document_ends[document_ends > 0])  # an empty document has no token


def _header_dtype(path: Path, head: bytes) -> str | None:
    """The dtype that a 1,024-byte header states, None without one. A raw file may begin with a magic number by chance:
    an unknown version counts as a header only when the rest of it is zero."""
    if len(head) < 12:
        return None
    magic, version, count = (int.from_bytes(head[i : i + 4], "little") for i in (0, 4, 8))
    dtype = _HEADERS.get((magic, version))
    if dtype is not None:
        size, needed = path.stat().st_size, _HEADER_BYTES + count * np.dtype(dtype).itemsize
        cut = f"{path} has {size:,} bytes, but its header states {count:,} ids, which need {needed:,}"
        _require(size == needed, f"{cut}; the copy is cut off: copy it again")
        return dtype
    known = [v for m, v in _HEADERS if m == magic]
    chance = not known or len(head) < _HEADER_BYTES or any(head[12:_HEADER_BYTES])
    _require(chance, f"{path} has a token header (magic {magic}) of version {version}, needs {known}; convert it")
    return None


def _litdata_chunks(folder: Path) -> dict[str, str]:
    """{chunk: dtype}, in order, where the folder's index.json lists chunks, else {}."""
    file = folder / "index.json"
    try:
        index = json.loads(file.read_text("utf-8"))
        names, config = [chunk["filename"] for chunk in index["chunks"]], index["config"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # none, or one of another program
    form, packed = config.get("data_format"), config.get("compression")
    code = str(form[0]).removeprefix("no_header_tensor:") if isinstance(form, list) and len(form) == 1 else ""
    dtype = _LITDATA_DTYPES.get(int(code)) if code.isdecimal() else None
    found = f"{file} states {form}, compression {packed}"
    _require(bool(dtype and not packed), f"{found}; needs one list of integers an item, not compressed: write it again")
    return dict.fromkeys(names, dtype)


def _map_chunk(path: Path, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids and item ends of a chunk: u32 items, u32 byte offsets of items + 1 bounds, ids. An item is a document."""
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    with open(path, "rb") as file:
        items = int.from_bytes(file.read(4), "little")
        offsets = np.frombuffer(file.read(4 * (items + 1)), "<u4").astype(np.int64)
    whole = len(offsets) == items + 1 and offsets[0] == 4 * (items + 2) and offsets[-1] == size
    whole = whole and bool((np.diff(offsets) >= 0).all()) and not ((offsets - offsets[0]) % width).any()
    _require(whole, f"{path}: its {items:,} items do not fill its {size:,} bytes; the copy is cut off: copy it again")
    ends = (offsets[1:] - offsets[0]) // width
    return _map_flat(path, dtype, int(offsets[0])), np.unique(ends[ends > 0])


def _metadata_dtype(path: Path) -> str | None:
    """The width that X.ds.metadata states: its first line is tokenizer|bytes an id."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        width = path.with_name(path.name + ".metadata").read_text("utf-8").split("\n")[0].rpartition("|")[2]
        return {"2": "uint16", "4": "uint32"}.get(width)
    return None


def _refuse_text(path: Path, head: bytes) -> None:
    name = next((name for magic, name in _NOT_IDS.items() if head.startswith(magic)), None)
    if name is None and len(head) >= 32 and min(head) >= 9 and not any(13 < byte < 32 for byte in head):
        with contextlib.suppress(UnicodeDecodeError):
            codecs.getincrementaldecoder("utf-8")().decode(head)
            name = "text"
    _require(name is None, f"{path} holds {name}, not token ids; run `prepare` on it first, or state --data-dtype")


def _counted_width(path: Path) -> str | None:
    """The width at which the file holds as many ids as a file of ends or a mask beside it counts; None without one."""
    size = path.stat().st_size
    count = next((n for n in _counts_beside(path) if n and size in (2 * n, 4 * n)), None)
    if count is None or size == 4 * count:
        return None if count is None else "uint32"
    # fewer pairs of words than 4, or 256 with values below 64 in the second place, look so by chance
    zero, small = _upper_halves(path) if size >= 16 else (False, False)
    half = f"{path} has 2 bytes for each of the {count:,} ids that the files beside it count, but looks like 32-bit ids"
    cut = zero or (small and size >= 1_024)
    _require(not cut, f"{half}, of which half are missing; copy it again, or state --data-dtype uint16")
    return "uint16"


def _counts_beside(path: Path) -> Iterator[int]:
    """Numbers of ids by each file of ends and each mask; damaged files say nothing here and are refused when read."""
    for file in _ends_files(path):
        with contextlib.suppress(OSError, EOFError, zlib.error, ValueError, IndexError):
            if file.suffix == ".gz":
                with gzip.open(file, "rt") as lines:
                    yield int(collections.deque(lines, 1)[0].split(",")[1])
            else:
                yield int(np.fromfile(file, "<u8")[-1])
    for file in _mask_files(path):
        yield file.stat().st_size


def _guess_width(path: Path) -> str:
    """uint32 if the upper halves of the words look like it."""
    size = path.stat().st_size
    if size < 64 and size % 4:
        return "uint16"  # so few words show nothing
    # of an odd size too: 32-bit ids that were cut within one must not pass as twice as many of 16 bits
    return "uint32" if any(_upper_halves(path)) else "uint16"


def _upper_halves(path: Path) -> tuple[bool, bool]:
    """-> whether the upper halves of 32-bit words are nearly all 0; whether all are small beside varied lower halves"""
    words = np.memmap(path, dtype="<u2", mode="r", shape=(path.stat().st_size // 4 * 2,))
    middle = len(words) // 4 * 2
    sample = np.concatenate([words[: 1 << 19], words[middle : middle + (1 << 19)]])
    low, high = sample[0::2], sample[1::2]
    nearly_all_zero = (high == 0).mean() > 0.9 and (low != 0).mean() > 0.1
    return bool(nearly_all_zero), bool(high.max() < 64 and (low >= 64).mean() > 0.5)


def _ends_files(path: Path) -> list[Path]:
    beside = (_sidecar(path, ".ends.bin"), path.with_name(path.name + ".index"), path.with_suffix(".csv.gz"))
    return [file for file in beside if file.is_file()]


def _document_ends(
    path: Path, ids: np.ndarray, index_ends: np.ndarray | None, doc_id: int | None, doc_at: str
) -> tuple[np.ndarray, str]:
    count, unused = len(ids), "" if doc_id is None else f"; doc_id {doc_id} not needed"
    for file in _ends_files(path):
        return (_read_bounds if file.suffix == ".gz" else _read_ends)(file, count), file.name + unused
    if index_ends is not None:
        index = path.with_suffix(".idx")
        return index_ends, (index.name if index.is_file() else "index.json") + unused
    if doc_id is None:
        return np.array([count], np.int64), "one stream: no ends file, no doc_id"
    at = [i + np.flatnonzero(ids[i : i + _SCAN_TOKENS] == doc_id) for i in range(0, count, _SCAN_TOKENS)]
    marks = np.concatenate(at).astype(np.int64)
    _require(len(marks) > 0, f"{path}: doc_id {doc_id} does not occur in {count:,} ids; give the id between documents")
    inner = marks[marks > 0] if doc_at == "start" else marks[marks < count - 1] + 1
    return np.append(inner, count), f"id {doc_id} at each document's {doc_at}"


def _read_ends(file: Path, count: int) -> np.ndarray:
    size = file.stat().st_size
    _require(size > 0 and size % 8 == 0, f"{file} must hold 8-byte unsigned ends, got {size} bytes; write it again")
    ends = np.fromfile(file, "<u8")
    before = np.concatenate([np.zeros(1, np.uint64), ends[:-1]])
    if (fall := ends <= before).any():
        at = int(np.argmax(fall))
        raise ValueError(f"{file}: document ends must increase, got {ends[at]} after {before[at]} at entry {at}")
    last = int(ends[-1])
    _require(last == count, f"{file}: the last document ends at {last:,}, but there are {count:,} ids; write it again")
    return ends.astype(np.int64)


def _read_bounds(file: Path, count: int) -> np.ndarray:
    """Ends by lines of start,end,...: tokens between documents, which nobody claims, are refused."""
    try:
        with gzip.open(file, "rt") as lines:
            rows = np.array([[int(x) for x in line.split(",")[:2]] for line in lines if line.strip()], np.int64)
        starts, ends = rows[:, 0], rows[:, 1]
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise ValueError(f"{file} must hold lines of start,end, got: {error}; write it again") from None
    level = bool((starts == np.concatenate([[0], ends[:-1]])).all() and (ends > starts).all() and ends[-1] == count)
    _require(level, f"{file}: the documents must follow one another from 0 to {count:,}; write it again")
    return ends


def _read_sources(path: Path, facts: dict, documents: int) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """-> (source of each document or None, the sources' names)"""
    file, names = _sidecar(path, ".sources.bin"), tuple(facts.get("sources", ("all",)))
    if not file.is_file():
        return None, names[:1]
    found = np.fromfile(file, "<u2")
    wrong = f"{file} holds {len(found):,} documents, {path.name} has {documents:,}"
    _require(len(found) == documents, f"{wrong}; copy both again")
    _require(int(found.max()) < len(names), f"{file} holds source {found.max()}, {path.stem}.json names {len(names)}")
    return found, names


def _mask_of_labels(path: Path, ids: np.ndarray, file: Path) -> np.ndarray:
    """uint8 per token: a label is the id at its own place, or -100 where no loss is taken."""
    labels = _map_ids(file, None, {})[1]
    _require(len(labels) == len(ids), f"{file} holds {len(labels):,} labels for {len(ids):,} ids; copy both again")
    mask = np.empty(len(ids), np.uint8)
    for begin in range(0, len(ids), _SCAN_TOKENS):
        part, wanted = labels[begin : begin + _SCAN_TOKENS], ids[begin : begin + _SCAN_TOKENS]
        mask[begin : begin + len(part)] = part != -100
        if (wrong := (part != -100) & (part != wanted)).any():
            at = int(np.argmax(wrong))
            found = f"{file}: label {part[at]} at token {begin + at:,} must be -100 or the id {wanted[at]}"
            raise ValueError(f"{found} of {path.name}; write labels that are not shifted")
    return mask


def _mask_files(path: Path) -> list[Path]:
    part = re.search(r"part_\d+\.npy$", path.name)
    beside = [_sidecar(path, ".mask.bin"), path.with_name(path.name + ".loss")]
    beside += [path.with_name("labels_mask_" + part[0])] if part else []
    return [file for file in beside if file.is_file()]


def _map_mask(path: Path, ids: np.ndarray) -> np.ndarray | None:
    count = len(ids)
    # GPT-NeoX writes x_KEY_label_document beside x_KEY_document, and names x_text_document and x_label_document too
    for ending in ("_document", "_text_document"):
        labels = path.with_name(path.stem.removesuffix(ending) + "_label_document" + path.suffix)
        if path.stem.endswith(ending) and labels.is_file():
            return _mask_of_labels(path, ids, labels)
    for file in _mask_files(path):
        size = file.stat().st_size
        _require(size == count, f"{file} has {size:,} bytes, but there are {count:,} ids; write one byte an id")
        return np.memmap(file, dtype=np.uint8, mode="r")
    return None


def _first(values: np.ndarray, test: Callable[[np.ndarray], np.ndarray]) -> int:
    hits = ((i, test(values[i : i + _SCAN_TOKENS])) for i in range(0, len(values), _SCAN_TOKENS))
    return next(begin + int(np.argmax(found)) for begin, found in hits if found.any())


def _scan(path: Path, ids: np.ndarray, mask: np.ndarray | None, *, needs_digest: bool) -> dict[str, Any]:
    """Extremes of ids and mask from one pass over the data, kept in X.scan.json until either file changes.

    Where the folder cannot be written, the next start makes the pass again."""
    cache = _sidecar(path, ".scan.json")
    # a mask that was made from labels has no file of its own
    made = mask is not None and not isinstance(mask, np.memmap)
    masked = None if mask is None else hashlib.sha256(mask).hexdigest() if made else _fingerprint(Path(mask.filename))
    key = [_fingerprint(path), ids.dtype.str, masked]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none yet, or not ours
        known = json.loads(cache.read_text("utf-8"))
        if known["key"] == key and (known["sha256"] or not needs_digest):
            return known
    chunks = [ids[i : i + _SCAN_TOKENS] for i in range(0, len(ids), _SCAN_TOKENS)]
    found: dict[str, Any] = {
        "key": key,
        "smallest": min(int(chunk.min()) for chunk in chunks),
        "largest": max(int(chunk.max()) for chunk in chunks),
        "sha256": None,
        "mask_largest": 0 if mask is None else int(mask.max()),
        "mask_ones": 0 if mask is None else int(np.count_nonzero(mask)),
    }
    if needs_digest:
        with open(path, "rb") as file:
            found["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError):
        _write_atomically(cache, json.dumps(found).encode())
    return found


def _fingerprint(path: Path) -> list:
    """Size, time of change and a digest of the first and last 64 KiB."""
    status = path.stat()
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(1 << 16))
        file.seek(max(0, status.st_size - (1 << 16)))
        digest.update(file.read())
    return [status.st_size, status.st_mtime_ns, digest.hexdigest()]


# ---------------------------------------------------------------------------
# Token files: writing


class TokenWriter:
    """Stream documents into X.bin with X.ends.bin, X.mask.bin (where masks are given), X.sources.bin (uint16 a
    document, where there are several sources) and X.json; use it in a `with`.

    Everything is written and flushed under temporary names first; an exception leaves the old files as they were. Then
    the old X.bin goes, and the new one comes after its ends and mask, so that a crash between never mixes old and new.
    Ids are 16 bits wide iff the vocabulary fits."""

    def __init__(
        self, path: str | Path, *, vocab_size: int, dtype: str | None = None, facts: dict | None = None
    ) -> None:
        _require(1 <= vocab_size <= 1 << 32, f"vocab_size must be in 1..4,294,967,296, got {vocab_size}")
        self.dtype = dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32")
        _require(self.dtype in _RAW_DTYPES, f"dtype must be uint16 or uint32, got {dtype!r}")
        fits = self.dtype == "uint32" or vocab_size <= 1 << 16
        _require(fits, f"a vocabulary of {vocab_size} does not fit uint16 (largest id 65,535); write uint32")
        self.path, self.vocab_size, self.facts, self.count = Path(path), vocab_size, facts or {}, 0
        self._ends, self._digest = array("Q"), hashlib.sha256()
        self._sources: dict[str, int] = {}
        self._source_of = array("H")
        self._file, self._mask = _AtomicFile(self.path), None

    @property
    def documents(self) -> int:
        return len(self._ends)

    def add(self, ids: Sequence[int] | np.ndarray, mask: Sequence[int] | np.ndarray | None = None) -> None:
        """Append ids to the current document; give a mask (0 or 1 per id) with every call or with none."""
        values = np.asarray(ids) if isinstance(ids, np.ndarray) else np.array(ids, np.int64)
        if len(values) and (int(values.min()) < 0 or int(values.max()) >= self.vocab_size):
            at = int(np.argmax((values < 0) | (values >= self.vocab_size)))
            place = f"id {values[at]} at token {self.count + at:,}"
            raise ValueError(f"{self.path}: {place} must be below the vocabulary {self.vocab_size}")
        if mask is not None and self._mask is None and self.count == 0:
            self._mask = _AtomicFile(_sidecar(self.path, ".mask.bin"))
        _require((mask is None) == (self._mask is None), "a mask must be given with every add() or with none")
        if self._mask is not None:
            weights = np.asarray(mask)
            _require(weights.shape == values.shape, f"mask must have {len(values)} values, got {weights.size}")
            _require(bool(np.isin(weights, (0, 1)).all()), "mask must hold only 0 and 1")
            self._mask.write(weights.astype(np.uint8).tobytes())
        data = values.astype(_RAW_DTYPES[self.dtype]).tobytes()
        self._digest.update(data)
        self._file.write(data)
        self.count += len(values)

    def end_document(self, source: str = "all") -> None:
        """Close the current document, which belongs to that source; one without ids is dropped."""
        if self.count > (self._ends[-1] if self._ends else 0):
            self._ends.append(self.count)
            self._source_of.append(self._sources.setdefault(source, len(self._sources)))
            _require(len(self._sources) < 1 << 16, f"{self.path}: sources must be fewer than 65,536; name fewer")

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for file in filter(None, (self._file, self._mask)):
                stack.enter_context(contextlib.closing(file))
            if kind is None:
                self._commit(stack)

    def _commit(self, stack: contextlib.ExitStack) -> None:
        self.end_document()
        _require(self.count > 0, f"{self.path}: no id was written; a token file needs at least 2")
        known = {"kind": _FACTS_KIND, "dtype": self.dtype, "count": self.count, "documents": self.documents}
        facts = self.facts | known | {"vocab_size": self.vocab_size, "sha256": self._digest.hexdigest()}
        small = {".ends.bin": np.asarray(self._ends, dtype="<u8").tobytes()}
        if len(self._sources) > 1:
            small[".sources.bin"] = np.asarray(self._source_of, dtype="<u2").tobytes()
        facts["sources"] = list(self._sources)
        small[".json"] = (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode()
        made = {suffix: _AtomicFile(_sidecar(self.path, suffix)) for suffix in small}
        for suffix, file in made.items():
            stack.enter_context(contextlib.closing(file))
            file.write(small[suffix])
        *sides, described = made.values()
        files = [file for file in (*sides, self._mask, self._file, described) if file is not None]
        for file in files:
            file.sync()
        for old in (self.path, *(_sidecar(self.path, x) for x in (".mask.bin", ".sources.bin", ".scan.json"))):
            old.unlink(missing_ok=True)
        for file in files:
            file.publish()


def write_tokens(
    path: str | Path,
    documents: Iterable[Sequence[int] | np.ndarray],
    *,
    vocab_size: int,
    masks: Iterable[Sequence[int] | np.ndarray] | None = None,
    sources: Iterable[str] | None = None,
    dtype: str | None = None,
    facts: dict | None = None,
) -> None:
    """Write documents (and one mask and one source name each) as X.bin with its sidecars, through TokenWriter."""
    with TokenWriter(path, vocab_size=vocab_size, dtype=dtype, facts=facts) as writer:
        pairs = ((ids, None) for ids in documents) if masks is None else zip(documents, masks, strict=True)
        names = itertools.repeat("all") if sources is None else iter(sources)
        for ids, mask in pairs:
            writer.add(ids, mask)
            writer.end_document(next(names))


# ---------------------------------------------------------------------------
# Tokenizer: training, encoding, decoding

_END_OF_TEXT, _END_OF_TURN = "<|endoftext|>", "<|end|>"
_ROLES = ("system", "user", "assistant")
_SPECIAL = (_END_OF_TEXT, *(f"<|{role}|>" for role in _ROLES), _END_OF_TURN)
# words with their leading space, digits by threes, punctuation runs, line ends, spaces
_SPLIT = r" ?[\p{L}\p{M}]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError("encoding text needs the `tokenizers` package, found none; pip install tokenizers") from None
    return tokenizers


def _check_vocabulary(vocab_size: int) -> None:
    least = 256 + len(_SPECIAL)
    _require(vocab_size >= least, f"vocab_size must be at least {least} (256 bytes and {len(_SPECIAL)} special ids), "
             f"got {vocab_size}")  # fmt: skip


def _train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """Train a byte-level BPE of at most vocab_size ids; id 0 ends a document, 1 to 4 mark turns of conversations."""
    lib = _tokenizers()
    _check_vocabulary(vocab_size)
    tokenizer = lib.Tokenizer(lib.models.BPE())
    byte_level = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = lib.pre_tokenizers.Split(lib.Regex(_SPLIT), "isolated")
    tokenizer.pre_tokenizer = lib.pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = lib.decoders.ByteLevel()
    alphabet = lib.pre_tokenizers.ByteLevel.alphabet()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


def _load_tokenizer(tokenizer_json: str) -> Any:
    """A tokenizer that reads special names in a text as ordinary characters, so that no text can end a document."""
    try:
        tokenizer = _tokenizers().Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"tokenizer.json could not be read: {str(error).splitlines()[0]}; make it again") from None
    tokenizer.encode_special_tokens = True
    return tokenizer


def _special_ids(library: Any) -> dict[str, int]:
    """-> ids of the special tokens: all of them, or the end of text alone where the tokenizer lacks a role marker."""
    ids = {name: library.token_to_id(name) for name in _SPECIAL}
    lacking = f"the tokenizer must have {_END_OF_TEXT} to end documents; train one by `prepare`"
    _require(ids[_END_OF_TEXT] is not None, lacking)
    return ids if None not in ids.values() else {_END_OF_TEXT: ids[_END_OF_TEXT]}


def encode_prompt(tokenizer_json: str, text: str) -> list[int]:
    """Encode text as ids, without any special id; the names of special tokens are ordinary text."""
    return _load_tokenizer(tokenizer_json).encode(text, add_special_tokens=False).ids


def _chat_parts(turns: Iterable[tuple[str, str]]) -> Iterator[tuple[str, bool, int]]:
    """The template of conversations -> (text, is it a marker, weight as a target)

    Each turn is <|role|> content <|end|>. Contents of the assistant and the <|end|> behind them are learned."""
    for role, content in turns:
        learned = int(role == "assistant")
        yield f"<|{role}|>", True, 0
        yield content, False, learned
        yield _END_OF_TURN, True, learned


def encode_chat(tokenizer_json: str, turns: Iterable[tuple[str, str]]) -> list[int]:
    """Encode (role, content) turns as in training, opened for the assistant's answer; without the id that opens a
    document. The tokenizer must have the role markers."""
    library = _load_tokenizer(tokenizer_json)
    special, ids = _special_ids(library), []
    for text, is_marker, _ in _chat_parts(turns):
        ids += [special[text]] if is_marker else library.encode(text, add_special_tokens=False).ids
    return [*ids, special["<|assistant|>"]]


def bytes_of_id(tokenizer_json: str) -> list[bytes]:
    """Return the UTF-8 bytes of each id of a byte-level tokenizer.json: none for special ids, 0xff for unused ones."""
    try:
        parsed = json.loads(tokenizer_json)
        vocabulary, added = parsed["model"]["vocab"], parsed.get("added_tokens") or []
        size = 1 + max(itertools.chain(vocabulary.values(), (token["id"] for token in added)))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("tokenizer.json must be a byte-level BPE vocabulary; make one with `prepare`") from None
    # each byte has a printable stand-in: itself where printable, else the next free character from 256 on
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    table = [b"\xff"] * size
    names = {token["content"] for token in added}
    for text, index in vocabulary.items():
        if text not in names:
            strange = next((char for char in text if char not in byte_of), None)
            _require(strange is None, f"tokenizer.json must be byte-level, but id {index} holds {strange!r}")
            table[index] = bytes(byte_of[char] for char in text)
    for token in added:
        table[token["id"]] = b"" if token.get("special") else token["content"].encode("utf-8")
    return table


def special_names(tokenizer_json: str) -> dict[int, str]:
    """Return the names of the ids that are no text, such as <|endoftext|>."""
    added = json.loads(tokenizer_json).get("added_tokens") or []
    return {token["id"]: token["content"] for token in added if token.get("special")}


def decode_bytes(tokenizer_json: str, ids: Iterable[int]) -> bytes:
    """Return the bytes of all ids joined; an id that the tokenizer lacks gives 0xff, which no UTF-8 text holds."""
    table = bytes_of_id(tokenizer_json)
    return b"".join(table[i] if i < len(table) else b"\xff" for i in ids)


class TextDecoder:
    """Turn ids into text as they come, without a tokenizer library.

    Bytes wait until their character is whole, invalid ones become U+FFFD, and flush() gives what is left, so the joined
    output always equals the joined bytes decoded at once with errors="replace"."""

    def __init__(self, tokenizer_json: str) -> None:
        self._table = bytes_of_id(tokenizer_json)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, token: int) -> str:
        """Return the characters that this id completes, often one word, sometimes none."""
        return self._decoder.decode(self._table[token] if token < len(self._table) else b"\xff")

    def flush(self) -> str:
        """Return what an unfinished character leaves (U+FFFD) and start afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


# ---------------------------------------------------------------------------
# Cleaning: duplicates and contamination

_SHINGLE_WORDS = 5
_PERMUTATIONS = 128
_WORDS_KEPT = 1 << 20  # hashed words a process remembers, about 150 MB
_CLEAN_BATCH = 32
# a run of fewer words says nothing about its origin: Brown et al. use n-grams of 8 words at least for that reason
_LEAST_RUN = 8
# n-grams of more documents, and of more than one in 1,000, are boiler-plate. Measured with 2% of 24,278 documents of
# prose and of 5,246 C files held out: 410 and 1,512 others share runs with them; 243 and 772 of these runs are in
# more than 20 documents, some in 200 (licences, frames of pages). Without them, 405 and 1,509 are held-out text by less
# than 20%, 3 and 3 by 20 to 45%, none by 45 to 70%, 2 pages by 70 to 73%; of one held-out document 1 holds 85%, the
# others at most 45%. With them, 14 C files are held-out text by half, 51 hold half of a held-out one. So half, without
_COMMON = 20
# an estimate by 128 permutations is off by 0.035 at 0.8 (one standard deviation), so candidates begin three below
_ESTIMATE_MARGIN = 0.1
# of many documents that look alike the most alike are compared: 10,000 pages of one template would be 10**7 pairs
_COMPARED = 16


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A document that repeats another one."""

    document: int
    kept: int  # the document that stays in its place
    reason: str  # "exact" or "near"
    similarity: float  # Jaccard similarity of the shingles of both


@dataclass(frozen=True, kw_only=True)
class DuplicateReport:
    """What find_duplicates() found; `removed` in rising order of documents."""

    documents: int
    removed: tuple[Removal, ...]
    removed_bytes: dict[str, int]  # UTF-8 bytes by reason
    bands: int
    rows: int
    threshold: float

    def retrieval(self, similarity: float) -> float:
        """Return the probability that a pair of this Jaccard similarity is looked at."""
        return 1 - (1 - similarity**self.rows) ** self.bands

    def describe(self) -> list[str]:
        """Return the lines to print."""
        counts = collections.Counter(removal.reason for removal in self.removed)
        seen = ", ".join(f"{s}: {self.retrieval(s):.3f}" for s in (0.7, 0.8, 0.9))
        size = f"{sum(self.removed_bytes.values()):,} bytes"
        gone = f"{counts['exact']:,} exact and {counts['near']:,} near of {self.documents:,} documents, {size}"
        near = f"Jaccard similarity of {_SHINGLE_WORDS}-word shingles to the document that stays >= {self.threshold}"
        bands = f"{self.bands} bands of {self.rows} rows; probability to look at a pair of similarity {seen}"
        lines = [f"duplicates: removed {gone}", f"near: {near}; {bands}"]
        clusters = collections.Counter(removal.kept for removal in self.removed)
        for kept, members in clusters.most_common(3):
            example = next(removal for removal in self.removed if removal.kept == kept)
            alike = f"document {example.document:,}: {example.reason}, {example.similarity:.2f}"
            lines.append(f"document {kept:,} stands for {members:,} removed, first {alike}")
        return lines


@dataclass(frozen=True, kw_only=True)
class Contamination:
    """A document that holds too much of a benchmark; shares are of different n-grams."""

    document: int
    share: float  # of its own, that the benchmark holds
    held_out: int  # the benchmark document of which it holds the largest share
    held_out_share: float  # of that one's, that it holds


@dataclass(frozen=True, kw_only=True)
class ContaminationReport:
    """What find_contaminated() found."""

    documents: int  # of the corpus
    ngram: int
    share: float
    shares: np.ndarray  # (benchmark documents,) share of a document's n-grams that the corpus holds
    most: int  # documents of the corpus beyond which an n-gram does not count
    ignored: int  # n-grams of the benchmark that do not count
    removed: tuple[Contamination, ...]

    def describe(self) -> list[str]:
        """Return the lines to print."""
        limit = f"{self.share:.0%} or more"
        own = sum(found.share >= self.share for found in self.removed)
        runs = f"{self.ngram}-word runs in more than {self.most:,} documents do not count, {self.ignored:,} here"
        touched = f"{np.count_nonzero(self.shares):,} of {len(self.shares):,} held-out documents share one"
        lines = [
            f"contamination: removed {len(self.removed):,} of {self.documents:,} documents; {own:,} are held-out text "
            f"by {limit}, {len(self.removed) - own:,} hold {limit} of a held-out document",
            f"{runs}; {touched}",
        ]
        taken = collections.Counter(found.held_out for found in self.removed)
        for held_out, members in taken.most_common(3):
            example = next(found for found in self.removed if found.held_out == held_out)
            alike = f"{example.held_out_share:.0%} of it in document {example.document:,}"
            lines.append(f"held-out document {held_out:,} takes {members:,} away, first {alike}")
        return lines


@functools.cache
def _word_hashes() -> dict[str, int]:
    """Words that this process has hashed."""
    return {}


@functools.cache
def _gram_table() -> dict[tuple[int, bool], np.ndarray]:
    """This process's copy of the benchmark's n-grams by width and whether they count as whole texts only."""
    return {}


def _share_table(table: dict[tuple[int, bool], np.ndarray]) -> None:
    _gram_table().update(table)


def _fold(text: str) -> str:
    return unicodedata.normalize("NFC", text).casefold()


def _hash_words(folded: str) -> np.ndarray:
    """(words,) uint64 of a folded text's words: runs of letters, digits and _."""
    known = _word_hashes()
    if len(known) > _WORDS_KEPT:
        known.clear()
    words = re.findall(r"\w+", folded)
    for word in set(words).difference(known):
        known[word] = int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "little")
    return np.fromiter(map(known.__getitem__, words), np.uint64, len(words))


def _hash_grams(words: np.ndarray, width: int) -> np.ndarray:
    """(n,) uint64, different, rising hashes of the runs of `width` words."""
    count = len(words) - width + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    z = np.zeros(count, np.uint64)
    for i in range(width):
        z = z * np.uint64(0x9E3779B97F4A7C15) + words[i : i + count]
        z ^= z >> np.uint64(29)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    return np.unique(z ^ (z >> np.uint64(32)))


@functools.cache
def _sketch() -> Any:
    """This process's MinHash: drawing the permutations anew takes 1 ms a document."""
    from datasketch import MinHash

    return MinHash(_PERMUTATIONS, seed=1, hashfunc=int, scheme="affine32")


def _signatures(texts: list[str]) -> list[tuple[int, bytes, bytes | None]]:
    """-> (UTF-8 bytes, digest without regard to form, case and white space, MinHash of the shingles, if any)"""
    sketch, result = _sketch(), []
    for text in texts:
        folded = _fold(text)
        digest = hashlib.blake2b(" ".join(folded.split()).encode("utf-8", "replace"), digest_size=16).digest()
        shingles = _hash_grams(_hash_words(folded), _SHINGLE_WORDS) >> np.uint64(32)
        signature = None
        if len(shingles):
            sketch.clear()
            # 4,096 at a time: the library makes 1 KB of each, 1.2 GB of a document of 7.7 MB
            for i in range(0, len(shingles), 4096):
                sketch.update_batch(shingles[i : i + 4096].tolist())
            signature = sketch.hashvalues.tobytes()  # uint32
        result.append((len(text.encode("utf-8", "replace")), digest, signature))
    return result


def _spread(
    work: Callable, texts: Iterable[str], workers: int | None, total: int | None, title: str, table: dict | None = None
) -> Iterator:
    """work() on lists of texts by processes, results in order, with a progress bar over documents."""
    from tqdm import tqdm

    texts, count = iter(texts), workers or os.cpu_count() or 1
    groups = iter(lambda: list(itertools.islice(texts, _CLEAN_BATCH)), [])
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=total, unit=" documents", desc=title, disable=None))
        # not fork: the parent may hold threads
        context = multiprocessing.get_context("spawn")
        pool = stack.enter_context(ProcessPoolExecutor(count, context, _share_table, (table or {},)))
        pending = collections.deque(pool.submit(work, group) for group in itertools.islice(groups, 4 * count))
        while pending:
            done = pending.popleft().result()
            pending.extend(pool.submit(work, group) for group in itertools.islice(groups, 1))
            bar.update(len(done))
            yield from done


def find_duplicates(
    texts: Iterable[str], *, threshold: float = 0.8, workers: int | None = None, total: int | None = None
) -> DuplicateReport:
    """Find documents that repeat an earlier one that stays, exactly or nearly.

    Broder, On the resemblance and containment of documents (1997); bands as in Indyk and Motwani (1998). MinHash of
    5-word shingles by 128 permutations (datasketch), bands and rows by datasketch for the threshold, name the documents
    to compare; a document goes iff the Jaccard similarity of its shingles to those of one that stays, counted and not
    estimated, reaches the threshold. So nothing goes for being like a document that goes. Texts of fewer words have
    exact duplicates only. Exact is the same text after NFC and case folding, with runs of white space as one space;
    words are runs of letters, digits and _ of that, so near ignores punctuation as well. The result depends on the
    texts alone. Memory: 0.9 KB a document at the peak, 0.44 GB for 500,000, 0.85 GB for a million, and 8 bytes a
    shingle of those that stay while a document that may repeat them is still to come.

    Args:
        texts: read twice, as a stream; so no iterator.
        workers: processes (spawned, so a script needs its `if __name__ == "__main__":`); None = all cores.
        total: number of texts, for the progress bar.
    """
    from datasketch import MinHashLSH

    # beyond these 128 permutations make one band, or bands of one row, which meet everywhere
    _require(0.2 <= threshold <= 0.95, f"the duplicate threshold must be in 0.2..0.95, got {threshold}")
    once = f"texts must be iterable twice, such as a list, got {type(texts).__name__}"
    _require(not isinstance(texts, Iterator), f"{once}; give the list that it reads")
    # a pair that meets by chance is compared and costs time only, so a missed pair weighs 19 times as much
    banding = MinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS, weights=(0.05, 0.95))
    first: dict[bytes, int] = {}
    copies: list[tuple[int, int]] = []  # (document, the first of its text)
    members, sizes, sketches, count = array("Q"), array("Q"), bytearray(), 0
    for size, digest, signature in _spread(_signatures, texts, workers, total, "signatures"):
        sizes.append(size)
        kept = first.setdefault(digest, count)
        if kept != count:
            copies.append((count, kept))
        elif signature is not None:
            members.append(count)
            sketches += signature
        count += 1
    del first
    table = np.frombuffer(sketches, np.uint32).reshape(-1, _PERMUTATIONS)
    near = {
        members[i]: Removal(document=members[i], kept=members[kept], reason="near", similarity=similarity)
        for i, kept, similarity in _repeats(
            texts, np.asarray(members, np.int64), table, _buckets(table, banding.b, banding.r), threshold
        )
    }
    # a copy of a document that goes is as near to the one that stays
    exact = [
        replace(near[same], document=document) if same in near
        else Removal(document=document, kept=same, reason="exact", similarity=1.0)
        for document, same in copies
    ]  # fmt: skip
    removed = tuple(sorted([*exact, *near.values()], key=lambda removal: removal.document))
    gone = {reason: sum(sizes[r.document] for r in removed if r.reason == reason) for reason in ("exact", "near")}
    return DuplicateReport(
        documents=count, removed=removed, removed_bytes=gone, bands=banding.b, rows=banding.r, threshold=threshold
    )  # fmt: skip


def _buckets(table: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """(bands, members) int32: the bucket of each member, those of all bands numbered through; -1 where it is alone."""
    before, buckets = 0, np.full((bands, len(table)), -1, np.int32)
    for band in range(bands):
        part = np.ascontiguousarray(table[:, band * rows : (band + 1) * rows])
        _, place, number = np.unique(part, axis=0, return_inverse=True, return_counts=True)
        shared = number[place.ravel()] > 1
        buckets[band, shared] = before + place.ravel()[shared]
        before += len(number)
    return buckets


def _repeats(
    texts: Iterable[str], members: np.ndarray, table: np.ndarray, buckets: np.ndarray, threshold: float
) -> Iterator[tuple[int, int, float]]:
    """-> (member, the member that stays in its place, their similarity), from one pass over the texts in order

    Members are numbered as in the table (members, permutations); `members` holds their places among the texts. Those
    that share a bucket with another one are read; each is compared with the ones before it that stay."""
    shared = np.flatnonzero((buckets >= 0).any(axis=0))
    if len(shared) == 0:
        return
    last = np.zeros(int(buckets.max()) + 1, np.int64)  # member of each bucket, and of all buckets of a member
    for row in buckets:
        last[row[row >= 0]] = np.flatnonzero(row >= 0)  # rising, so that the last one stands
    until = np.where(buckets >= 0, last[buckets], 0).max(axis=0)
    read = np.zeros(int(members[shared[-1]]) + 1, bool)
    read[members[shared]] = True
    staying: dict[int, list[int]] = collections.defaultdict(list)  # members by bucket
    shingles: dict[int, np.ndarray] = {}
    closing: dict[int, list[int]] = collections.defaultdict(list)
    for i, text in zip(shared.tolist(), itertools.compress(texts, read), strict=True):
        own = _hash_grams(_hash_words(_fold(text)), _SHINGLE_WORDS)
        mine = buckets[buckets[:, i] >= 0, i].tolist()
        others = np.array(sorted(set().union(*(staying[bucket] for bucket in mine))), np.int64)
        estimate = np.mean(table[others] == table[i], axis=1)
        others = others[np.argsort(-estimate, kind="stable")[: np.sum(estimate >= threshold - _ESTIMATE_MARGIN)]]
        for kept in others[:_COMPARED].tolist():
            if (similarity := _jaccard(own, shingles[kept])) >= threshold:
                yield i, kept, similarity
                break
        else:
            if until[i] > i:
                shingles[i] = own
                closing[until[i]].append(i)
                for bucket in mine:
                    staying[bucket].append(i)
        for kept in closing.pop(i, ()):
            del shingles[kept]


def _jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Similarity of two sets, each as different rising numbers."""
    both = int(np.count_nonzero(b[np.minimum(np.searchsorted(b, a), len(b) - 1)] == a))
    return both / (len(a) + len(b) - both)


def _held_grams(texts: list[str]) -> list[tuple[np.ndarray, int, int]]:
    """-> for each text the n-grams of this process's table, by their numbers in it, that it holds; the width of its own
    runs, n words or all that it has; how many of these it has"""
    table, result = _gram_table(), []
    ngram = max(width for width, _ in table)
    for text in texts:
        words, found, before = _hash_words(_fold(text)), [], 0
        width = min(ngram, len(words))
        runs = len(_hash_grams(words, width)) if width else 0
        for (size, whole), known in table.items():
            if len(known):
                grams = _hash_grams(words if not whole or len(words) == size else words[:0], size)
                place = np.minimum(np.searchsorted(known, grams), len(known) - 1)
                found.append((before + place[known[place] == grams]).astype(np.uint32))
                before += len(known)
        result.append((np.concatenate(found), width, runs))
    return result


def _many(documents: int) -> int:
    """Documents beyond which the n-grams that they share are boiler-plate."""
    return max(_COMMON, documents // 1000)


class _HeldOut:
    """Which benchmark documents hold each n-gram of the table, and the largest share of one."""

    def __init__(self, numbers: list[np.ndarray], grams: int) -> None:
        """numbers: the n-grams of each document, by their numbers below `grams`."""
        gram, owner = np.concatenate(numbers), np.repeat(np.arange(len(numbers)), [len(n) for n in numbers])
        order = np.argsort(gram, kind="stable")
        gram, owner = gram[order], owner[order]
        # what many of them share, as a frame around questions or copies, counts for the first alone: work stays bounded
        stays = (np.diff(gram, prepend=-1) > 0) | (np.bincount(gram)[gram] <= _many(len(numbers)))
        self._owner, self._bounds = owner[stays], np.searchsorted(gram[stays], np.arange(grams + 1))
        self._sizes = np.bincount(self._owner, minlength=len(numbers))
        self.common = np.zeros(grams, bool)  # those that count neither for nor against a text that holds them

    def share(self, found: np.ndarray, runs: int) -> float:
        """-> share of a text's own runs, where `found` are those of them that the benchmark holds"""
        # a text that is held out as a whole goes, however common it is
        common = 0 if len(found) == runs else np.count_nonzero(self.common[found])
        return float((len(found) - common) / (runs - common)) if len(found) else 0.0

    def most_held(self, found: np.ndarray) -> tuple[int, float]:
        """-> the benchmark document of which a text that holds these n-grams holds the largest share, and that share"""
        begin, number = self._bounds[found], self._bounds[found + 1] - self._bounds[found]
        owner = self._owner[np.repeat(begin - np.cumsum(number) + number, number) + np.arange(number.sum())]
        documents, place, count = np.unique(owner, return_inverse=True, return_counts=True)
        size, common = self._sizes[documents], np.bincount(place, np.repeat(self.common[found], number))
        shares = np.where(count == size, 1.0, (count - common) / np.maximum(size - common, 1))
        best = int(np.argmax(shares))
        return int(documents[best]), float(shares[best])


def find_contaminated(
    texts: Iterable[str],
    benchmark: Iterable[str],
    *,
    ngram: int = 13,
    share: float = 0.5,
    workers: int | None = None,
    total: int | None = None,
) -> ContaminationReport:
    """Find corpus documents that are held-out text by a share of their n-grams, or hold such a share of the n-grams of
    one benchmark document, such as a question.

    N-grams as in Brown et al., Language models are few-shot learners (2020), appendix C: 13 words, no punctuation, no
    case. Those of many corpus documents (more than 20 and than one in 1,000), such as a licence or the frame of a page,
    count neither for nor against a document that holds them.
    A document that is held out, or holds a benchmark document, to the last n-gram goes for all that. One of fewer words
    is one n-gram; a benchmark document of fewer than 8 is found only where it is a document's whole text: "yes" is in
    most of them. Texts are read once, as a stream; memory grows with the benchmark and, by 4 bytes an n-gram, with what
    the documents hold of it that go."""
    _require(ngram >= 1, f"ngram must be at least 1 word, got {ngram}")
    _require(0 < share <= 1, f"the share of n-grams must be in (0, 1], got {share}")
    keys, grams = [], []
    for words in map(_hash_words, map(_fold, benchmark)):
        width = min(ngram, len(words))
        keys.append((width, width < min(ngram, _LEAST_RUN)))
        grams.append(_hash_grams(words, width) if width else np.zeros(0, np.uint64))
    _require(any(map(len, grams)), "the benchmark holds no words; give a file with text")
    # one of width n in any case: from it the processes know n
    table = {
        key: np.unique(np.concatenate([g[:0] if k != key else g for g, k in zip(grams, keys, strict=True)]))
        for key in sorted({*keys, (ngram, False)})
        if key[0]
    }
    first = dict(zip(table, itertools.accumulate(map(len, table.values()), initial=0), strict=False))
    numbers = [
        first[k] + np.searchsorted(table[k], g) if len(g) else np.zeros(0, np.int64)
        for g, k in zip(grams, keys, strict=True)
    ]
    widths = np.repeat([width for width, _ in table], [len(known) for known in table.values()])
    held_out, holders, suspects, count = _HeldOut(numbers, len(widths)), np.zeros(len(widths), np.int64), [], 0
    for found, width, runs in _spread(_held_grams, texts, workers, total, "contamination", table):
        holders[found] += 1
        # what is common is known at the end; without it a share can only be smaller
        own = found[widths[found] == width]
        if len(found) and (held_out.share(own, runs) >= share or held_out.most_held(found)[1] >= share):
            suspects.append((count, found, width, runs))
        count += 1
    held_out.common = holders > _many(count)
    removed = []
    for document, found, width, runs in suspects:
        own, (held, part) = held_out.share(found[widths[found] == width], runs), held_out.most_held(found)
        if max(own, part) >= share:
            removed.append(Contamination(document=document, share=own, held_out=held, held_out_share=part))
    return ContaminationReport(
        documents=count, ngram=ngram, share=share, most=_many(count), ignored=int(np.count_nonzero(held_out.common)),
        shares=np.array([np.mean(holders[n] > 0) if len(n) else 0.0 for n in numbers]), removed=tuple(removed),
    )  # fmt: skip


# ---------------------------------------------------------------------------
# Preparation: text to token files

# longest text of one encoding and texts of one parallel call: at most 4 M characters are in the library at a time
_PIECE_CHARS = 1 << 14
_BATCH_PIECES = 256
_OPENERS: dict[str, Callable] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw), ".xz": lzma.LZMAFile, ".zst": lambda raw: _zstd(raw)
}  # fmt: skip
_FAULTS_KEPT = 100
_BEGINNING = 100  # characters of a removed document that removed.jsonl shows

_Document = str | tuple[tuple[str, str], ...]  # a text, or the turns (role, content) of a conversation


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """One token file that prepare() wrote."""

    path: Path
    documents: int
    tokens: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True)
class PrepareReport:
    """What prepare() wrote."""

    train: SplitReport
    validation: SplitReport | None
    tokenizer: Path
    vocab_size: int
    sources: dict[str, tuple[int, int, int]]  # documents, tokens, bytes of text
    skipped: tuple[str, ...]  # "file:line: reason" of the first malformed inputs
    skipped_count: int
    notes: tuple[str, ...]

    def describe(self) -> list[str]:
        """Return the lines to print."""
        lines = [f"tokenizer: {self.tokenizer}, {self.vocab_size:,} ids"]
        for name, (documents, tokens, size) in self.sources.items() if len(self.sources) > 1 else ():
            lines.append(f"source {name}: {documents:,} documents, {tokens:,} tokens, {size:,} bytes of text")
        for name, split in (("training", self.train), ("validation", self.validation)):
            if split is not None:
                size = f"{split.documents:,} documents, {split.tokens:,} tokens, {split.text_bytes:,} bytes of text"
                lines.append(f"{name}: {split.path}, {size} ({split.text_bytes / split.tokens:.2f} a token)")
        lines += [*self.notes, *(f"skipped {reason}" for reason in self.skipped)]
        if self.skipped_count > len(self.skipped):
            lines.append(f"skipped {self.skipped_count:,} inputs in all")
        return lines


def prepare(
    text_paths: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    vocab_size: int = 16_384,
    tokenizer: str | Path | None = None,
    tokenizer_bytes: int = 64_000_000,
    validation_fraction: float = 0.05,
    validation_documents: int | None = None,
    join_source: bool = False,
    dedup: float | None = None,
    decontaminate: str | Path | None = None,
    skip_bad: bool = False,
    seed: int = 0,
) -> PrepareReport:
    """Make out/tokens.bin and out/tokens.val.bin with their sidecars, and out/tokenizer.json, from text.

    The inputs are read as streams, once to check and count them and once more for each of training the tokenizer and
    encoding: unpacking and parsing run at 76 MB/s beside an encoder of 5 MB/s a core, so a copy of the texts on disk
    would save little. Memory does not grow with the corpus, but for the longest document and a few bytes a document.

    Args:
        text_paths: files or folders: .jsonl and .parquet with a "text", "messages" or "prompt" and "completion" a
            record, and a "source" where it is known; anything else is one UTF-8 document a file; .gz, .xz and .zst are
            unpacked. Messages are {"role": system, user or assistant, "content": text}; see _chat_parts.
        tokenizer: path of a tokenizer.json to use; None trains one of vocab_size ids on the training split.
        tokenizer_bytes: text to train the tokenizer on, whole documents drawn by a hash (64 MB take 0.8 GB of memory).
        validation_fraction: share of whole documents to hold out, drawn by a hash of (seed, number of the document).
        validation_documents: how many to hold out instead.
        join_source: join neighbouring texts of one source (for files: of one folder) into one long document.
        dedup: Jaccard similarity from which a document goes that repeats an earlier one; None keeps all.
        decontaminate: file or folder of a benchmark, one question or text a document; what shares at least half of its
            own 13-word runs with it, or holds half of those of one of its documents, goes. What went, and why, is in
            out/removed.jsonl.
        skip_bad: leave out malformed lines and files instead of refusing.
    """
    inputs = [Path(text_paths)] if isinstance(text_paths, (str, Path)) else [Path(path) for path in text_paths]
    _require(0 <= validation_fraction < 1, f"validation_fraction must be in [0, 1), got {validation_fraction}")
    files = [found for path in inputs for found in _text_files(path)]
    given = None
    if tokenizer is not None:
        _require(Path(tokenizer).is_file(), f"{tokenizer} does not exist; give a tokenizer.json, or none to train one")
        given = Path(tokenizer).read_text("utf-8")
        _special_ids(_load_tokenizer(given))
    else:
        _check_vocabulary(vocab_size)
    corpus = _Corpus(files, join_source)
    refused = f"{corpus.fault_count:,} malformed inputs: {'; '.join(corpus.faults[:5])}"
    _require(skip_bad or not corpus.faults, f"{refused}; mend them, or pass --skip-bad to leave them out")
    nothing = f"no text found in {', '.join(map(str, inputs))}"
    _require(corpus.count > 0, f"{nothing}; give .jsonl with a text, or text files")
    notes, removed = _clean(corpus, dedup, decontaminate)
    held = _held_out(corpus.count, validation_fraction, validation_documents, seed)
    if notes:
        notes.append(f"removed documents: {Path(out) / 'removed.jsonl'}")
    if corpus.count == 1 and corpus.conversations == 0 and validation_fraction > 0 and validation_documents is None:
        last = corpus.cut_end(validation_fraction)
        held = np.array([False, True])
        notes.append(f"one document only: its last {last:,} characters are the validation split")
    if given is None:
        given = _train_tokenizer(corpus.sample(~held, tokenizer_bytes, seed), vocab_size)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    # first: tokens without their tokenizer would train and then could not generate
    _write_atomically(out / "tokenizer.json", given.encode("utf-8"))
    if notes:
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in removed)
        _write_atomically(out / "removed.jsonl", "".join(lines).encode("utf-8", "replace"))
    splits, sources, ids = _encode_splits(corpus, held, given, out)
    for stale in [] if held.any() else list(out.glob("tokens.val.*")):
        stale.unlink()
    return PrepareReport(
        train=splits[0], validation=splits[1] if held.any() else None, tokenizer=out / "tokenizer.json",
        vocab_size=ids, sources=sources, skipped=tuple(corpus.faults), skipped_count=corpus.fault_count,
        notes=tuple(notes),
    )  # fmt: skip


class _Corpus:
    """The documents of the inputs, read anew at each iteration; counted and checked once, when it is made."""

    def __init__(self, files: list[tuple[Path, str]], join_source: bool) -> None:
        self._files, self._join, self._parts = files, join_source, None
        self._numbers: np.ndarray | None = None  # of the documents that stay, among all that were read; None = all
        self.count = self.size = self.conversations = self.fault_count = 0
        self.faults: list[str] = []
        for _, document in self._read(self._note):
            self.count += 1
            self.size += _text_size(document)
            self.conversations += not isinstance(document, str)

    def _note(self, fault: str) -> None:
        self.fault_count += 1
        if len(self.faults) < _FAULTS_KEPT:
            self.faults.append(fault)

    def _read(self, note: Callable[[str], None], title: str = "reading") -> Iterator[tuple[str, _Document]]:
        """-> (source, document), without what is malformed or empty"""
        found = _read_documents(self._files, note, title)
        if not self._join:
            yield from found
            return
        for source, group in itertools.groupby(found, key=lambda pair: pair[0]):
            texts: list[str] = []
            for _, document in group:
                if isinstance(document, str):
                    texts.append(document)
                else:
                    yield source, document
            if texts:
                yield source, "\n".join(texts)

    def __iter__(self) -> Iterator[tuple[str, _Document]]:
        """-> (source, document)"""
        if self._parts is not None:
            return iter(self._parts)
        found = self._read(lambda _: None, "")
        if self._numbers is None:
            return found
        stays = np.zeros(self._numbers[-1] + 1, bool)
        stays[self._numbers] = True
        return itertools.compress(found, stays)

    def texts(self) -> "_Texts":
        """The documents as plain texts."""
        return _Texts(self)

    def drop(self, reasons: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """Leave documents out from now on; return what each was and why it goes."""
        numbers = np.arange(self.count) if self._numbers is None else self._numbers
        records = []
        for index, (source, document) in enumerate(self):
            if index in reasons:
                record = {"document": int(numbers[index]), "source": source, **reasons[index]}
                records.append(record | {"begins": _plain(document)[:_BEGINNING]})
                self.size -= _text_size(document)
                self.conversations -= not isinstance(document, str)
        self._numbers = np.delete(numbers, list(reasons))
        self.count = len(self._numbers)
        _require(self.count > 0, "cleaning left no document; give more text or a higher --dedup")
        return records

    def cut_end(self, fraction: float) -> int:
        """Make two documents of the only one; return the characters of the second."""
        ((source, text),) = self
        _require(len(text) >= 2, f"the only document has {len(text)} character; give more text")
        wanted = min(len(text) - 1, max(1, round((1 - fraction) * len(text))))
        # behind the last line end before the wanted place, if there is one
        cut = text.rfind("\n", 0, wanted) + 1 or wanted
        self._parts = [(source, text[:cut]), (source, text[cut:])]
        return len(text) - cut

    def sample(self, chosen: np.ndarray, limit: int, seed: int) -> Iterator[str]:
        """Texts of the chosen documents, about `limit` bytes of them, with a progress bar."""
        share = min(1.0, limit / self.size)
        drawn = chosen & (_hash_indices(len(chosen), "tokenizer", seed) / 2**64 < share)
        if not drawn.any():
            drawn = chosen
        total = round(self.size * np.mean(drawn))
        with _bar("training the tokenizer", total) as bar:
            for index, (_, document) in enumerate(self):
                if drawn[index]:
                    for text in [document] if isinstance(document, str) else [content for _, content in document]:
                        for piece in _pieces(text):
                            yield piece
                            bar.update(len(piece.encode("utf-8")))
            bar.set_description_str("merging pairs")


class _Texts:
    """The documents of a corpus as plain texts, as often as they are asked for."""

    def __init__(self, corpus: _Corpus) -> None:
        self._corpus = corpus

    def __iter__(self) -> Iterator[str]:
        return (_plain(document) for _, document in self._corpus)


def _clean(
    corpus: _Corpus, dedup: float | None, decontaminate: str | Path | None
) -> tuple[list[str], list[dict[str, Any]]]:
    """Drop duplicates, then what holds too much of the benchmark. -> (lines to print, records of what went)"""
    notes, removed = [], []
    if dedup is not None:
        found = find_duplicates(corpus.texts(), threshold=dedup, total=corpus.count)
        notes += found.describe()
        # nothing was dropped before, so these are the numbers of the documents that were read
        removed += corpus.drop({
            r.document: {"reason": r.reason, "kept": r.kept, "similarity": r.similarity} for r in found.removed
        })  # fmt: skip
    if decontaminate is not None:
        benchmark = _Corpus(_text_files(Path(decontaminate)), join_source=False)
        _require(not benchmark.faults, f"{decontaminate} has malformed inputs: {'; '.join(benchmark.faults[:5])}")
        held = find_contaminated(corpus.texts(), benchmark.texts(), total=corpus.count)
        notes += held.describe()
        wanted = {r.held_out for r in held.removed}
        begins = {i: text[:_BEGINNING] for i, text in enumerate(benchmark.texts()) if i in wanted}
        removed += corpus.drop({
            r.document: {"reason": "contaminated", "kept": None, "share": r.share, "held_out": r.held_out,
                         "held_out_share": r.held_out_share, "held_out_begins": begins[r.held_out]}
            for r in held.removed
        })  # fmt: skip
    for source, size in sorted(collections.Counter(record["source"] for record in removed).items()):
        notes.append(f"removed from {source}: {size:,} documents")
    return notes, removed


def _bar(title: str, total: int) -> Any:
    """A progress bar over bytes, with rate and ETA, on a terminal only."""
    from tqdm import tqdm

    return tqdm(total=total, unit="B", unit_scale=True, desc=title, disable=None if title else True)


def _plain(document: _Document) -> str:
    return document if isinstance(document, str) else "\n".join(content for _, content in document)


def _text_size(document: _Document) -> int:
    texts = [document] if isinstance(document, str) else [content for _, content in document]
    return sum(len(text.encode("utf-8")) for text in texts)


def _text_files(path: Path) -> list[tuple[Path, str]]:
    """-> (file, source) in a fixed order; the source of a file is its name without endings, in a folder the first
    folder below that one, or else its name."""
    _require(path.exists(), f"{path} does not exist; give a text file, a .jsonl file or a folder")
    if not path.is_dir():
        return [(path, path.name.split(".")[0] or path.name)]
    inside = (p.relative_to(path) for p in sorted(path.rglob("*")) if p.is_file())
    visible = [p for p in inside if not any(part.startswith(".") for part in p.parts)]
    _require(len(visible) > 0, f"{path} is a folder without files; give one with text files")
    return [(path / p, p.parts[0] if len(p.parts) > 1 else path.resolve().name) for p in visible]


def _read_documents(
    files: list[tuple[Path, str]], note: Callable[[str], None], title: str
) -> Iterator[tuple[str, _Document]]:
    """-> (source, document); each malformed input is noted as "file:line: reason", empty texts are dropped."""
    with _bar(title, sum(path.stat().st_size for path, _ in files)) as bar:
        for path, source in files:
            read = 0
            with open(path, "rb") as raw:
                for where, record in _read_records(path, raw):
                    bar.update(raw.tell() - read)
                    read = raw.tell()
                    try:
                        named, document = _read_record(record, source)
                    except ValueError as error:
                        note(f"{where}: {error}")
                        continue
                    if document:
                        yield named, document


def _read_records(path: Path, raw: Any) -> Iterator[tuple[str, bytes | dict]]:
    """-> (file or file:line, one JSON line, one parsed row, or {"text": the bytes of a text file})"""
    kind = (path.with_suffix("") if path.suffix in _OPENERS else path).suffix
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    try:
        with _OPENERS.get(path.suffix, contextlib.nullcontext)(raw) as file:
            if kind != ".jsonl":
                yield str(path), {"text": file.read()}
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is cut off or not {path.suffix[1:]} data ({error}); copy it again") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, dict]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path} needs the `pyarrow` package, found none; pip install pyarrow") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        columns = [c for c in ("text", "messages", "prompt", "completion", "source") if c in file.schema_arrow.names]
        rows = (row for part in file.iter_batches(512, columns=columns) for row in part.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"{path}:{number}", {name: value for name, value in row.items() if value is not None}
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is cut off or not parquet data ({reason}); copy it again") from None


class _ZstdStream(io.RawIOBase):
    """Unpacked bytes of a .zst stream; one that ends within a frame raises EOFError, which the library would not."""

    def __init__(self, raw: Any, library: Any) -> None:
        self._raw, self._new, self._rest = raw, library.ZstdDecompressor().decompressobj, b""
        self._error, self._frame = library.ZstdError, None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            data = self._raw.read(1 << 16)
            if not data:
                if self._frame is not None:
                    raise EOFError("the last frame is not whole")
                return 0
            try:
                while data:
                    self._frame = self._frame or self._new()
                    self._rest += self._frame.decompress(data)
                    data = self._frame.unused_data
                    self._frame = None if self._frame.eof else self._frame
            except self._error as error:
                raise EOFError(str(error)) from None
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _zstd(raw: Any) -> io.BufferedReader:
    try:
        import zstandard
    except ImportError:
        raise ValueError(f"{raw.name} needs the `zstandard` package, found none; pip install zstandard") from None
    return io.BufferedReader(_ZstdStream(raw, zstandard), 1 << 20)


def _read_record(record: bytes | dict, source: str) -> tuple[str, _Document]:
    """-> (source, document); raises ValueError with what is wrong."""
    if isinstance(record, bytes):
        try:
            record = json.loads(_read_text(record))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from None
    if not isinstance(record, dict) or not record.keys() & {"text", "messages", "prompt"}:
        raise ValueError('no "text" that is a string, no "messages", no "prompt"')
    source = str(record.get("source", source))
    if "messages" in record:
        return source, _read_turns(record["messages"])
    if "prompt" in record:
        pairs = (("user", record["prompt"]), ("assistant", record.get("completion")))
        return source, _read_turns([{"role": role, "content": content} for role, content in pairs])
    text = record["text"]
    return source, _read_text(text) if isinstance(text, bytes) else _whole_text(text, "text")


def _read_text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None


def _whole_text(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f'no "{name}" that is a string')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair") from None
    return text


def _read_turns(messages: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError('"messages" is not a list of {"role", "content"}')
    turns = tuple((message.get("role"), _whole_text(message.get("content"), "content")) for message in messages)
    strange = next((role for role, _ in turns if role not in _ROLES), None)
    if strange is not None or not turns:
        raise ValueError(f"role must be one of {', '.join(_ROLES)}, got {strange!r}" if turns else "no messages")
    if not any(role == "assistant" and content for role, content in turns):
        raise ValueError("no assistant message, so nothing to learn")
    return turns


def _held_out(count: int, fraction: float, documents: int | None, seed: int) -> np.ndarray:
    """(count,) bool, True for validation: those with the smallest hashes, so the choice is fixed by (seed, count)."""
    wanted = documents
    if wanted is None:
        wanted = max(1, round(fraction * count)) if fraction > 0 and count > 1 else 0
    _require(0 <= wanted < count, f"validation_documents must be below the {count} documents found, got {wanted}")
    held = np.zeros(count, bool)
    held[np.argsort(_hash_indices(count, "validation", seed), kind="stable")[:wanted]] = True
    return held


def _pieces(text: str) -> Iterator[str]:
    """Parts of a long text. Between a line end and a visible character the split pattern always divides, so the ids of
    the parts are those of the whole; only a text without such places is cut elsewhere."""
    begin = 0
    while len(text) - begin > _PIECE_CHARS:
        end = begin + _PIECE_CHARS
        cut = text.rfind("\n", begin + 1, end)
        while cut > 0 and (text[cut - 1].isspace() or text[cut + 1].isspace()):
            cut = text.rfind("\n", begin + 1, cut)
        end = cut + 1 if cut > 0 else end
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _document_parts(document: _Document, special: dict[str, int]) -> Iterator[tuple[int | str, int]]:
    """-> (a special id or a piece of text, its weight as a target)

    The end-of-text id opens a document and closes it: an id that only ever ended one would never be a context in
    training, and a text generated from nothing would start in a state that was never trained."""
    spoken = [(document, False, 1)] if isinstance(document, str) else _chat_parts(document)
    weight = int(isinstance(document, str))
    yield special[_END_OF_TEXT], weight
    for text, is_marker, learned in spoken:
        if is_marker:
            yield special[text], learned
        else:
            for piece in _pieces(text):
                yield piece, learned
    yield special[_END_OF_TEXT], weight


def _batches(corpus: _Corpus, special: dict[str, int]) -> Iterator[list[tuple[int, str, list[tuple[int | str, int]]]]]:
    """-> lists of (document, source, parts) with about _BATCH_PIECES texts; a long document's parts span several."""
    batch, texts = [], 0
    for index, (source, document) in enumerate(corpus):
        parts: list[tuple[int | str, int]] = []
        batch.append((index, source, parts))
        for part in _document_parts(document, special):
            parts.append(part)
            texts += isinstance(part[0], str)
            if texts == _BATCH_PIECES:
                yield batch
                parts, texts = [], 0
                batch = [(index, source, parts)]
    yield batch


def _ahead(batches: Iterator, count: int) -> Iterator:
    """The same items, `count` of them made by a thread while earlier ones are used: the encoder leaves the interpreter
    free."""
    with ThreadPoolExecutor(1, thread_name_prefix="texts") as pool:
        pending = collections.deque(pool.submit(next, batches, None) for _ in range(count))
        while (batch := pending.popleft().result()) is not None:
            pending.append(pool.submit(next, batches, None))
            yield batch


def _encode(library: Any, batches: Iterator[list]) -> Iterator[tuple[list, list]]:
    """-> (batch, encodings of its texts), on all cores"""
    for batch in batches:
        texts = [part for _, _, parts in batch for part, _ in parts if isinstance(part, str)]
        yield batch, library.encode_batch_fast(texts, add_special_tokens=False)


def _encode_splits(
    corpus: _Corpus, held: np.ndarray, tokenizer_json: str, out: Path
) -> tuple[list[SplitReport], dict[str, tuple[int, int, int]], int]:
    """Encode in batches (all cores) and stream the splits to disk. -> (reports, sizes of the sources, number of ids)"""
    library = _load_tokenizer(tokenizer_json)
    special = _special_ids(library)
    found = f"{corpus.conversations:,} conversations, but the tokenizer lacks {', '.join(_SPECIAL[1:])}"
    _require(not corpus.conversations or len(special) > 1, f"{found}; leave --tokenizer out to train one with them")
    vocabulary = max(library.get_vocab().values()) + 1
    digest = hashlib.sha256(tokenizer_json.encode("utf-8")).hexdigest()
    end = special[_END_OF_TEXT]
    facts = {"eos_id": end, "bos_id": end, "doc_at": "end", "tokenizer": "tokenizer.json", "tokenizer_sha256": digest}
    if corpus.conversations:
        facts |= {"chat_template": "<|role|>content<|end|>", "turn_end_id": special[_END_OF_TURN]}
    names = ["tokens.bin", "tokens.val.bin"][: 1 + int(held.any())]
    sizes: dict[str, np.ndarray] = {}
    with contextlib.ExitStack() as stack:
        opened = (TokenWriter(out / name, vocab_size=vocabulary, facts=facts | {"text_bytes": 0}) for name in names)
        writers = [stack.enter_context(writer) for writer in opened]
        bar = stack.enter_context(_bar("encoding", corpus.size))
        last, source = -1, ""
        for batch, made_of in _ahead(_encode(library, _ahead(_batches(corpus, special), 4)), 1):
            encoded = iter(made_of)
            for index, named, parts in batch:
                if index != last:
                    if last >= 0:
                        writers[int(held[last])].end_document(source)
                    sizes.setdefault(named, np.zeros(3, np.int64))[0] += 1
                last, source, writer = index, named, writers[int(held[index])]
                made = [array("I", [part] if isinstance(part, int) else next(encoded).ids) for part, _ in parts]
                ids = np.concatenate([np.frombuffer(x, np.uint32) for x in made])
                weights = np.repeat([weight for _, weight in parts], [len(x) for x in made])
                writer.add(ids, weights if corpus.conversations else None)
                size = sum(len(part.encode("utf-8")) for part, _ in parts if isinstance(part, str))
                writer.facts["text_bytes"] += size
                sizes[named] += (0, len(ids), size)
                bar.update(size)
        writers[int(held[last])].end_document(source)
    reports = [
        SplitReport(path=w.path, documents=w.documents, tokens=w.count, text_bytes=w.facts["text_bytes"])
        for w in writers
    ]
    return reports, {name: tuple(x.tolist()) for name, x in sorted(sizes.items())}, vocabulary


_DEMO_BYTES = 1_000_000
_DEMO_SKIPPED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo"}


def demo_corpus(folder: str | Path) -> Path:
    """Write folder/demo.jsonl, about 1 MB of English prose that every Python carries, and return its path.

    The language reference's topics, then docstrings of the standard library, one document a topic or module, read from
    source without importing. The same Python version gives the same bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    records, size = [], 0
    for source, text in itertools.chain(_demo_topics(library), _demo_docstrings(library)):
        records.append(json.dumps({"text": text, "source": source}))
        size += len(text.encode("utf-8"))
        if size >= _DEMO_BYTES:
            break
    _require(size > 0, f"{library} holds no Python sources to make a demonstration from; give text files instead")
    path = Path(folder) / "demo.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_atomically(path, ("\n".join(records) + "\n").encode("utf-8"))
    return path


def _demo_topics(library: Path) -> Iterator[tuple[str, str]]:
    path = library / "pydoc_data" / "topics.py"
    for node in ast.parse(path.read_bytes()).body if path.is_file() else ():
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            for _, text in sorted(ast.literal_eval(node.value).items()):
                yield "topics", text


def _demo_docstrings(library: Path) -> Iterator[tuple[str, str]]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for folder, inner, names in os.walk(library):
        inner[:] = sorted(set(inner) - _DEMO_SKIPPED)
        for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # old escapes in other people's strings
                    nodes = ast.walk(ast.parse(path.read_bytes()))
            except (SyntaxError, ValueError):
                continue  # a template, not a module
            found = filter(None, (ast.get_docstring(node) for node in nodes if isinstance(node, documented)))
            if text := "\n\n".join(found):
                yield "docstrings", f"{path.relative_to(library).with_suffix('').as_posix()}\n\n{text}\n"


# ---------------------------------------------------------------------------
# Curriculum

# length, percent of the tokens; phase 2 starts at 16,384
_TIERS = (
    (2_048,     30),
    (4_096,     30),
    (8_192,     30),
    (16_384,    4),
    (65_536,    3),
    (131_072,   2),
    (1_048_576, 1),
)  # fmt: skip
_PHASE_2_LENGTH = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class CurriculumStage:
    """Consecutive steps of one row length."""

    length: int
    tokens: int  # steps * tokens_per_step
    tokens_per_step: int  # a multiple of length
    steps: int
    min_document: int = 0  # documents longer than this have the first claim to the stage; 0 = any


def build_curriculum(
    total_tokens: int, config: CurriculumConfig, *, max_context_len: int, corpus_tokens: int | None = None
) -> tuple[list[CurriculumStage], list[str]]:
    """Divide a token budget into stages of growing length; also return the notes to print.

    Each tier takes whole steps of max(tokens_per_step, length) tokens in whole rows. What is left over, and the whole
    budget of a tier that is too long for the budget, the corpus or the model, goes to the tier below, which the notes
    name. A budget below one step of the lowest tier makes one smaller step."""
    _require(total_tokens > 0, f"the token budget must be positive, got {total_tokens}")
    if config.context is not None:
        fits = config.context <= max_context_len
        _require(fits, f"context must be at most {max_context_len:,}, got {config.context:,}")
        tiers = [(config.context, 100)]
    else:
        divisor = config.length_divisor
        _require(divisor <= _TIERS[0][0], f"length_divisor must be in 1..{_TIERS[0][0]:,}, got {divisor}")
        tiers = [(length // divisor, share) for length, share in _TIERS]
    budgets = [total_tokens * share // 100 for _, share in tiers]
    budgets[0] += total_tokens - sum(budgets)

    stages: list[CurriculumStage] = []
    notes: list[str] = []
    for index in reversed(range(len(tiers))):
        length, budget = tiers[index][0], budgets[index]
        per_step = max(1, config.tokens_per_step // length) * length
        steps, fault = budget // per_step, ""
        if length > max_context_len:
            steps, fault = 0, f"rows are longer than the model's context of {max_context_len:,}"
        elif corpus_tokens is not None and length > corpus_tokens:
            steps, fault = 0, f"rows are longer than the corpus of {corpus_tokens:,} tokens"
        elif steps == 0 and index == 0 and not stages and budget >= length:
            per_step, steps = budget // length * length, 1
        elif steps == 0:
            fault = f"{budget:,} tokens are less than one step of {per_step:,}"
        if steps:
            sizes = {"tokens": steps * per_step, "tokens_per_step": per_step, "steps": steps}
            stages.insert(0, CurriculumStage(length=length, **sizes))
        rest = budget - steps * per_step
        if index > 0:
            budgets[index - 1] += rest
        if rest:
            where = f"go to length {tiers[index - 1][0]:,}" if index else "are not used"
            notes.append(f"length {length:,}: {fault or 'whole steps only'}; {rest:,} tokens {where}")
    _require(bool(stages), f"no length fits: {length:,}: {fault}; give more tokens or a smaller --context")
    for below, index in zip(list(stages), range(1, len(stages)), strict=False):
        if stages[index].length >= _PHASE_2_LENGTH // config.length_divisor:
            stages[index] = replace(stages[index], min_document=below.length)
    return stages, notes


# ---------------------------------------------------------------------------
# Mixture and pacing: which documents a run presents, and in which order

_PACE_BUCKETS = 64


@dataclass(frozen=True, kw_only=True)
class SourcePlan:
    """One source's part of a run: its documents and the tokens that the run reads of them."""

    name: str
    documents: np.ndarray  # (n,) int64, numbers in the token file, rising
    tokens: int  # of one epoch
    quota: int  # of the run

    @property
    def epochs(self) -> float:
        return self.quota / self.tokens


def plan_mixture(tokens: TokenFile, total: int, config: CurriculumConfig) -> list[SourcePlan]:
    """Divide a run of `total` tokens among the sources of a token file.

    Without mix and mix_temperature all documents are one pool. A temperature T gives a source of n tokens a weight of
    n^(1/T): 1 keeps the proportions, larger values raise the small sources. `mix` states weights by name or pattern; a
    pattern's weight is shared among its sources by their tokens, and a source that no entry names is left out."""
    if config.mix is None and config.mix_temperature is None:
        everything = np.arange(len(tokens.ends))
        return [SourcePlan(name="all", documents=everything, tokens=len(tokens), quota=total)]
    source_of = np.zeros(len(tokens.ends), np.int64) if tokens.source_of is None else tokens.source_of
    sizes = np.bincount(source_of, weights=tokens.lengths, minlength=len(tokens.sources)).astype(np.int64)
    if config.mix is None:
        weights = (sizes / sizes.max()) ** (1 / config.mix_temperature)  # of the largest: no power overflows
    else:
        weights = np.zeros(len(sizes))
        for pattern, weight in config.mix_weights().items():
            named = [i for i, name in enumerate(tokens.sources) if fnmatch.fnmatchcase(name, pattern) and sizes[i]]
            known = f"{tokens.path} has {', '.join(tokens.sources)}"
            _require(bool(named), f"mix names {pattern!r}, but {known}; name one of them")
            weights[named] += weight * sizes[named] / sizes[named].sum()
    # whole tokens whose sum is the total
    quotas = np.diff(np.round(np.cumsum(weights) / weights.sum() * total).astype(np.int64), prepend=0)
    return [
        SourcePlan(name=name, documents=np.flatnonzero(source_of == i), tokens=int(sizes[i]), quota=int(quotas[i]))
        for i, name in enumerate(tokens.sources)
        if quotas[i]
    ]


def difficulty(tokens: TokenFile, pace: str) -> np.ndarray:
    """Return a number for each document, larger = harder, (documents,) float64.

    "length" counts tokens; "rarity" is the mean information of a token under the file's own id frequencies, bits; any
    other word is the path of a .npy file with one number a document, such as the loss under a reference model."""
    if pace == "length":
        return tokens.lengths.astype(np.float64)
    if pace == "rarity":
        counts = np.zeros(tokens.largest + 1, np.int64)
        chunks = [slice(i, i + _SCAN_TOKENS) for i in range(0, len(tokens), _SCAN_TOKENS)]
        for chunk in chunks:
            counts += np.bincount(tokens.ids[chunk], minlength=len(counts))
        bits = np.log2(len(tokens)) - np.log2(np.maximum(counts, 1))
        sums = np.zeros(len(tokens.ends))
        for chunk in chunks:
            cost = bits[tokens.ids[chunk]]
            first = int(np.searchsorted(tokens.ends, chunk.start, side="right"))
            last = int(np.searchsorted(tokens.ends, chunk.start + len(cost), side="left"))
            begins = np.maximum(tokens.starts[first : last + 1] - chunk.start, 0)
            sums[first : last + 1] += np.add.reduceat(cost, begins)
        return sums / tokens.lengths
    path = Path(pace)
    _require(path.is_file(), f"pace must be length, rarity or a .npy file of scores, got {pace!r}, which is no file")
    try:
        scores = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a .npy file of numbers ({error}); write it with numpy.save") from None
    documents = len(tokens.ends)
    _require(scores.shape == (documents,), f"{path} has shape {scores.shape}, needed ({documents},): one a document")
    _require(bool(np.isfinite(scores).all()), f"{path} holds a score that is not finite; give each document a number")
    return scores.astype(np.float64)


def _pace_table(start: float, full: float) -> np.ndarray:
    """(slices, buckets): share of a difficulty bucket that is presented in each slice of the paced tokens.

    Slice i opens the buckets up to its competence, which rises linearly from `start` to 1 at the share `full` of the
    slices, and draws from every open bucket in proportion to what is left of it: what was opened early is replayed to
    the end, and all of each bucket is presented once."""
    table, left = np.zeros((_PACE_BUCKETS, _PACE_BUCKETS)), np.ones(_PACE_BUCKETS)
    for i in range(_PACE_BUCKETS):
        competence = min(1.0, start + (1 - start) * i / (full * _PACE_BUCKETS))
        # never fewer than the slices so far have used up
        opened = max(i + 1, math.ceil(competence * _PACE_BUCKETS - 1e-9))
        table[i, :opened] = left[:opened] / left[:opened].sum()
        left -= table[i]
    return table


def _pace(order: np.ndarray, lengths: np.ndarray, scores: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Reorder documents, given in hash order with their lengths and scores, so that easy ones come first."""
    hardness = np.argsort(scores, kind="stable")
    before = np.empty(len(order), np.int64)
    before[hardness] = np.cumsum(lengths[hardness]) - lengths[hardness]
    bucket = before * _PACE_BUCKETS // lengths.sum()
    slices = np.empty(len(order), np.int64)
    for b in range(_PACE_BUCKETS):
        members = np.flatnonzero(bucket == b)
        middle = np.cumsum(lengths[members]) - lengths[members] / 2
        place = np.searchsorted(np.cumsum(table[:, b]), middle / max(lengths[members].sum(), 1), side="right")
        slices[members] = np.minimum(place, _PACE_BUCKETS - 1)
    return order[np.argsort(slices, kind="stable")]


# ---------------------------------------------------------------------------
# Packed batches

_LOOKAHEAD = 3  # the target and two draft targets of a row's last token
# The draft head learns from every fourth place of a row: at 35 M parameters its two losses at every place took a third
# of the step, more than the main loss, and a place's neighbours teach it nearly the same.
DRAFT_STRIDE = 4
_IGNORED = -100  # target of a token that has none


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch. A target of -100 has weight 0; loss_weights is 0 as well where the response mask is."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    draft_ids: Tensor  # (2, B, P) int64, one and two tokens after each of P = ceil(T / DRAFT_STRIDE) places
    draft_targets: Tensor  # (2, B, P) int64, two and three after, -100 where none or not a supervised token
    loss_weights: Tensor  # (B, T) f32
    doc_start: Tensor  # (B, T) int32
    supervised: float  # sum of loss_weights
    tokens: int  # B * T
    offsets: tuple[int, ...]  # place of each row's first token in the file
    target_bytes: int | None = None  # UTF-8 bytes of the supervised targets, where byte lengths were given

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with its tensors on device; from pinned memory the host does not wait."""
        return self._each(lambda x: x.to(device, non_blocking=x.is_pinned()))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory."""
        return self._each(Tensor.pin_memory)

    def copy_(self, other: "Batch") -> None:
        """Overwrite every tensor with that of another batch of the same shape; its facts stay."""
        for name, x in self._tensors().items():
            x.copy_(getattr(other, name), non_blocking=True)

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(self, **{name: change(x) for name, x in self._tensors().items()})


class _Span:
    """A stretch of the stream, as the documents that it cuts through; places count from its first token."""

    def __init__(self, stream: "_TokenStream", position: int, count: int) -> None:
        bounds = stream.bounds
        first = int(np.searchsorted(bounds, position, side="right")) - 1
        last = int(np.searchsorted(bounds, position + count, side="left"))
        begin, end = bounds[first:last] - position, bounds[first + 1 : last + 1] - position
        self.count, self._stream = count, stream
        self.begins = np.maximum(begin, 0)  # the first document may have begun before the span
        self.counts = np.minimum(end, count) - self.begins
        # last token of each document that ends within the span
        self.ends = end[end <= count] - 1
        offsets = stream.starts[stream.order[first:last]] - np.minimum(begin, 0)
        self.pieces = list(zip(offsets.tolist(), (offsets + self.counts).tolist(), strict=True))

    def ids(self) -> np.ndarray:
        """(count,) int64. Slices: one copy of what the file stores, several times faster than gathering places."""
        ids = self._stream.ids
        return np.concatenate([ids[a:b] for a, b in self.pieces]).astype(np.int64)

    def supervised(self) -> np.ndarray:
        """(count,) uint8, the response mask, or ones."""
        mask = self._stream.mask
        return np.ones(self.count, np.uint8) if mask is None else np.concatenate([mask[a:b] for a, b in self.pieces])

    def without(self, ahead: int, count: int) -> np.ndarray:
        """Places below count whose document has ended `ahead` tokens on."""
        # a place that falls before a short document lies as near to the end of the one before it
        places = (self.ends[:, None] - np.arange(ahead)).ravel()
        return places[(places >= 0) & (places < count)]


class _TokenStream:
    """The documents of a token file laid end to end in a given order; a document may occur more than once."""

    def __init__(self, tokens: TokenFile, order: np.ndarray) -> None:
        self.tokens, self.order, self.starts = tokens, order, tokens.starts
        self.bounds = np.concatenate([[0], np.cumsum(tokens.lengths[order])])
        # slices of a memory map cost 2 us each, those of the plain array below it 0.2 us
        self.ids, self.mask = (x.view(np.ndarray) if isinstance(x, np.memmap) else x for x in (tokens.ids, tokens.mask))

    def supervised(self, rows: Sequence[int], length: int) -> list[float]:
        """Count supervised targets, and first and second draft targets, of the rows that begin at these positions."""
        sums = np.zeros(_LOOKAHEAD)
        for row in rows:
            span = _Span(self, row, length + _LOOKAHEAD)
            mask = span.supervised()
            for ahead in range(1, _LOOKAHEAD + 1):
                weights = mask[ahead : ahead + length].copy()
                weights[span.without(ahead, length)] = 0
                sums[ahead - 1] += np.count_nonzero(weights[:: DRAFT_STRIDE if ahead > 1 else 1])
        return sums.tolist()

    def batch(self, rows: Sequence[int], length: int, byte_lengths: np.ndarray | None = None) -> Batch:
        """Build the rows that begin at these stream positions."""
        columns = zip(*(self._row(int(row), length) for row in rows), strict=True)
        ids, targets, draft_ids, draft_targets, loss_weights, doc_start, offsets = columns
        targets, loss_weights = np.stack(targets), np.stack(loss_weights)
        return Batch(
            inputs=torch.from_numpy(np.stack(ids)),
            targets=torch.from_numpy(targets),
            draft_ids=torch.from_numpy(np.stack(draft_ids, 1)),
            draft_targets=torch.from_numpy(np.stack(draft_targets, 1)),
            loss_weights=torch.from_numpy(loss_weights),
            doc_start=torch.from_numpy(np.stack(doc_start)),
            supervised=float(loss_weights.sum(dtype=np.float64)),
            tokens=len(rows) * length,
            offsets=offsets,
            target_bytes=None if byte_lengths is None else int(byte_lengths[targets[loss_weights > 0]].sum()),
        )

    def _row(self, position: int, length: int) -> tuple[np.ndarray, ...]:
        """-> ids (T,), targets (T,), draft ids and targets (2, P), weights (T,), doc_start (T,), place in the file"""
        span = _Span(self, position, length + _LOOKAHEAD)
        ids = span.ids()
        mask = None if self.mask is None else span.supervised()
        ended = span.without(1, length)
        targets = ids[1 : length + 1].copy()
        targets[ended] = _IGNORED
        weights = np.ones(length, np.float32) if mask is None else mask[1 : length + 1].astype(np.float32)
        weights[ended] = 0
        drafts = np.stack([ids[1 + depth : 1 + depth + length] for depth in (1, 2)])
        for depth in (1, 2):
            drafts[depth - 1, span.without(1 + depth, length)] = _IGNORED
            if mask is not None:
                drafts[depth - 1, mask[1 + depth : 1 + depth + length] == 0] = _IGNORED
        draft_ids = np.stack([ids[1 : 1 + length : DRAFT_STRIDE], ids[2 : 2 + length : DRAFT_STRIDE]])
        doc_start = np.repeat(span.begins.astype(np.int32), span.counts)[:length]
        return ids[:length], targets, draft_ids, drafts[:, ::DRAFT_STRIDE], weights, doc_start, span.pieces[0][0]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One optimizer step: its totals over all ranks, and this rank's micro-batches, built as they are iterated."""

    step: int
    stage: int
    length: int
    tokens: int  # all ranks
    supervised: float  # all ranks: the loss denominator
    draft_supervised: tuple[float, float]  # all ranks: the denominators of both draft depths
    rows: np.ndarray  # (rows,) int64, stream position of each row of this rank
    rows_per_batch: int
    stream: _TokenStream = field(repr=False)

    def __len__(self) -> int:
        return -(-len(self.rows) // self.rows_per_batch)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch must be in 0..{len(self) - 1}, got {index}")
        begin = index * self.rows_per_batch
        return self.stream.batch(self.rows[begin : begin + self.rows_per_batch], self.length)

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))


_PACED_BLOCKS = 64  # parts of a paced stage whose rows are shuffled each for itself


class PackedSequenceDataLoader:
    """Batches of every step of a curriculum, as a pure function of (seed, step).

    The order of a whole run is laid down at once: each source's epochs, each a permutation of its documents, so that
    every target is seen once an epoch; the sources side by side, so that any stretch of the run has the mixture's
    proportions. Documents longer than the previous tier's rows are laid where the phase-2 stages will read (the longest
    tier chooses first): within each epoch, or with several sources each document's last turn in the run. In the first
    epoch the others follow their difficulty, if paced, or else, as in all later epochs, hash order. A stage reads the
    rows that this lays out in shuffled order: those of an epoch before those of the next with one source, of the whole
    stage with several, each 64th of it for itself if paced.

    Args:
        micro_batch_tokens: rows of one micro-batch = max(1, micro_batch_tokens // length).
        config: mixture and pacing.
        rank, world_size: this process reads one of world_size neighbouring parts of a step's rows; the totals of the
            plan cover all ranks. A step with fewer rows than ranks leaves some ranks without a micro-batch.
    """

    def __init__(
        self,
        tokens: TokenFile,
        stages: Sequence[CurriculumStage],
        *,
        seed: int,
        micro_batch_tokens: int,
        config: CurriculumConfig | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        _require(len(stages) > 0, "the curriculum must have a stage, got none")
        _require(0 <= rank < world_size, f"rank must be in 0..{world_size - 1}, got {rank}")
        _require(micro_batch_tokens > 0, f"micro_batch_tokens must be positive, got {micro_batch_tokens}")
        for stage in stages:
            whole = stage.tokens_per_step % stage.length == 0 and stage.tokens == stage.steps * stage.tokens_per_step
            _require(whole and stage.steps > 0, f"a stage must hold whole rows and steps, got {stage}")
        self.tokens, self.stages, self.seed = tokens, tuple(stages), seed
        self.config = config or CurriculumConfig()
        self.micro_batch_tokens, self.rank, self.world_size = micro_batch_tokens, rank, world_size
        self._first_step = [0, *itertools.accumulate(stage.steps for stage in stages)]
        self._first_token = [0, *itertools.accumulate(stage.tokens for stage in stages)]
        self.sources = plan_mixture(tokens, self.total_tokens, self.config)
        self.stream = _TokenStream(tokens, self._run_order())
        self._row_orders = [self._row_order(index) for index in range(len(stages))]

    @property
    def total_steps(self) -> int:
        return self._first_step[-1]

    @property
    def total_tokens(self) -> int:
        return self._first_token[-1]

    def describe(self) -> list[str]:
        """Return the lines to print: sources, pacing, stages and what a stage's rows do to long documents."""
        lines = []
        for source in self.sources if len(self.sources) > 1 else []:
            size = f"{len(source.documents):,} documents, {source.tokens:,} tokens"
            share = f"{source.quota / self.total_tokens:.1%} of the run, {source.epochs:.2f} epochs"
            lines.append(f"source {source.name}: {size}; {share}")
        left = set(self.tokens.sources) - {source.name for source in self.sources}
        if (self.config.mix or self.config.mix_temperature) and left:
            lines.append(f"sources left out: {', '.join(sorted(left))}")
        if len(self.sources) == 1:
            lines.append(f"epochs: {self.sources[0].epochs:.2f}")
        if self.config.pace != "none":
            opened = f"{self.config.pace_start:.0%} of the range is open at first, all of it from"
            lines.append(f"pace by {self.config.pace}: {opened} {self.config.pace_full:.0%} of the first epoch on")
        shares = dict(long_share(self))
        lengths = self.tokens.lengths
        for stage in self.stages:
            sizes = f"{stage.steps:,} steps of {stage.tokens_per_step:,} tokens in rows of {stage.length:,}"
            longer = np.mean(lengths > stage.length)
            split = f"; {longer:.1%} of the documents are longer and are split: no state crosses rows" if longer else ""
            lines.append(f"stage: {sizes}{split}")
            if stage.min_document:
                share = f"{shares[stage.length]:.1%} of the targets have a document longer than the tier below"
                lines.append(f"rows of {stage.length:,}: {share}")
        return lines

    def tokens_before(self, step: int) -> int:
        """Return the tokens read by all steps before this one (step = total_steps gives the total)."""
        _require(0 <= step <= self.total_steps, f"step must be in 0..{self.total_steps}, got {step}")
        if step == self.total_steps:
            return self.total_tokens
        stage = bisect.bisect_right(self._first_step, step) - 1
        return self._first_token[stage] + (step - self._first_step[stage]) * self.stages[stage].tokens_per_step

    def step_batches(self, step: int) -> StepPlan:
        """Return the plan of an optimizer step: totals now, micro-batches when iterated."""
        _require(0 <= step < self.total_steps, f"step must be in 0..{self.total_steps - 1}, got {step}")
        index = bisect.bisect_right(self._first_step, step) - 1
        stage, count = self.stages[index], self.stages[index].tokens_per_step // self.stages[index].length
        begin = (step - self._first_step[index]) * count
        rows = self._first_token[index] + self._row_orders[index][begin : begin + count] * stage.length
        supervised, *drafts = self.stream.supervised(rows, stage.length)
        part = slice(*(len(rows) * r // self.world_size for r in (self.rank, self.rank + 1)))
        return StepPlan(
            step=step,
            stage=index,
            length=stage.length,
            tokens=stage.tokens_per_step,
            supervised=supervised,
            draft_supervised=(drafts[0], drafts[1]),
            rows=rows[part],
            rows_per_batch=max(1, self.micro_batch_tokens // stage.length),
            stream=self.stream,
        )

    def _row_order(self, index: int) -> np.ndarray:
        """(rows of the stage,) the order in which its rows are read: shuffled part by part."""
        stage = self.stages[index]
        rows = np.arange(stage.tokens // stage.length)
        part = np.zeros_like(rows)
        if self.config.pace != "none":
            part = rows // max(1, len(rows) // _PACED_BLOCKS)
        elif len(self.sources) == 1:
            # epochs stay apart, or a third of the corpus would not be read until a second epoch's worth of steps
            part = (self._first_token[index] + rows * stage.length) // self.sources[0].tokens
        return np.lexsort((_hash_indices(len(rows), "rows", self.seed, index), part))

    def _run_order(self) -> np.ndarray:
        """(presentations,) document numbers of the whole run and of what its last row looks ahead to."""
        paced = self.config.pace != "none"
        scores = difficulty(self.tokens, self.config.pace) if paced else None
        table = _pace_table(self.config.pace_start, self.config.pace_full) if paced else None
        orders, progress = [], []
        for source in self.sources:
            made, reached = [], 0
            while reached < source.quota + _LOOKAHEAD:
                made.append(self._epoch_order(source, len(made), scores, table))
                reached += source.tokens
            order = np.concatenate(made)
            before = np.cumsum(self.tokens.lengths[order]) - self.tokens.lengths[order]
            needed = int(np.searchsorted(before, source.quota + _LOOKAHEAD))
            orders.append(order[:needed])
            progress.append(before[:needed] / source.quota)
        # a document comes when its source's share of the run has come that far
        order = np.concatenate(orders)[np.argsort(np.concatenate(progress), kind="stable")]
        if len(self.sources) == 1:
            return order
        # the long ones of all sources come together: each document's last turn in the run may move
        last = np.zeros(len(order), bool)
        last[len(order) - 1 - np.unique(order[::-1], return_index=True)[1]] = True
        return self._place_long(order, self._first_token, last)

    def _epoch_order(
        self, source: SourcePlan, epoch: int, scores: np.ndarray | None, table: np.ndarray | None
    ) -> np.ndarray:
        """(documents of the source,) the epoch's permutation."""
        key = ("epoch", self.seed, epoch, *([source.name] if len(self.sources) > 1 else []))
        order = source.documents[np.argsort(_hash_indices(len(source.documents), *key), kind="stable")]
        if table is not None and epoch == 0:
            # a run of less than an epoch paces the documents that it reads
            upto = int(np.searchsorted(np.cumsum(self.tokens.lengths[order]), source.quota)) + 1
            read = order[:upto]
            order = np.concatenate([_pace(read, self.tokens.lengths[read], scores[read], table), order[upto:]])
        if len(self.sources) > 1:
            return order
        return self._place_long(order, [token - epoch * source.tokens for token in self._first_token], True)

    def _place_long(self, order: np.ndarray, bounds: list[int], movable: np.ndarray | bool) -> np.ndarray:
        """Move long documents under the phase-2 stages, which begin at these tokens; all else keeps its order."""
        spans, size = [], int(self.tokens.lengths[order].sum())
        for index, stage in enumerate(self.stages):
            begin, end = max(bounds[index], 0), min(bounds[index + 1], size)
            if begin < end:
                spans.append((begin, end, stage.min_document))
        if not any(least for _, _, least in spans):
            return order
        lengths = self.tokens.lengths[order]
        free = np.ones(len(order), bool) & movable
        reserved: dict[int, np.ndarray] = {}
        for begin, end, least in sorted(spans, key=lambda span: -span[2]):
            if least:
                long = np.flatnonzero(free & (lengths > least))
                reserved[begin] = long[: np.searchsorted(np.cumsum(lengths[long]), end - begin) + 1]
                free[reserved[begin]] = False
        rest = np.setdiff1d(np.arange(len(order)), np.concatenate(list(reserved.values())))
        rest_bounds = np.concatenate([[0], np.cumsum(lengths[rest])])
        laid, filled, used = [], 0, 0
        for begin, end, _ in spans:
            laid.append(reserved.get(begin, rest[:0]))
            filled += int(lengths[laid[-1]].sum())
            if filled < end:
                upto = min(int(np.searchsorted(rest_bounds, rest_bounds[used] + end - filled)), len(rest))
                laid.append(rest[used:upto])
                filled, used = filled + int(rest_bounds[upto] - rest_bounds[used]), upto
        return order[np.concatenate([*laid, rest[used:]])]


def long_share(loader: PackedSequenceDataLoader) -> list[tuple[int, float]]:
    """Return (length, share) of each phase-2 stage: the share of targets in a document whose part of the row is longer
    than the previous tier's rows. Only those targets can teach the added length."""
    shares = []
    for index, stage in enumerate(loader.stages):
        long = total = 0
        for step in range(loader._first_step[index], loader._first_step[index + 1] if stage.min_document else 0):
            span = _Span(loader.stream, loader.tokens_before(step), stage.tokens_per_step)
            # parts of documents within a row; the last token of a document has no target
            cuts = np.union1d(span.begins, np.arange(0, span.count, stage.length))
            sizes = np.diff(cuts, append=span.count)
            targets = sizes - np.isin(cuts + sizes - 1, span.ends)
            total += int(targets.sum())
            long += int(targets[sizes > stage.min_document].sum())
        if stage.min_document:
            shares.append((stage.length, long / max(total, 1)))
    return shares


# ---------------------------------------------------------------------------
# Document boundaries and attention tiles


def doc_start_from_cu_seqlens(cu_seqlens: Tensor, length: int) -> Tensor:
    """Convert cumulative document lengths (0, ..., length) of one row to doc_start, int32 (1, T)."""
    bounds = cu_seqlens.to(torch.int64)
    rising = bounds.ndim == 1 and len(bounds) >= 2 and bool((bounds.diff() >= 0).all())
    whole = rising and bounds[0] == 0 and bounds[-1] == length
    _require(whole, f"cu_seqlens must rise from 0 to {length}, got {bounds.tolist()}")
    return bounds[:-1].repeat_interleave(bounds.diff()).to(torch.int32)[None]


def reset_flags(doc_start: Tensor) -> Tensor:
    """Return bool (B, T): True at each token that starts a document in its row."""
    return doc_start == torch.arange(doc_start.shape[1], dtype=doc_start.dtype, device=doc_start.device)


def boundary_indices(doc_start: Tensor) -> Tensor:
    """Return int64 (documents, 2): row and first token of each document that starts in the batch."""
    return reset_flags(doc_start).nonzero()


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTileMap:
    """The key tiles that each query tile must visit, as block-sparse rows; tiles that are not listed are empty.

    Query tile i of row b visits key_tiles[offsets[n] : offsets[n + 1]], n = b * query tiles + i, in rising order."""

    offsets: Tensor  # (B * query tiles + 1,) int64
    key_tiles: Tensor  # (visits,) int32
    full: Tensor  # (visits,) bool: every query sees every key, so no mask is needed


def attention_tile_map(doc_start: Tensor, window: int, anchors: int, tile: int) -> AttentionTileMap:
    """Derive the visited tiles of rows (B, T) of document starts.

    Query i sees key j iff doc_start[i] <= j <= i and (i - j < window or j < doc_start[i] + anchors). Both the start and
    the window's edge rise with i. So the first query of a tile sees the furthest back: its window reaches the tile
    itself without a gap, and of all documents in the tile only its own can have anchors beyond that window; and a tile
    is full iff the last query sees all of it."""
    _require(window > 0, f"window must be positive, got {window}")
    _require(anchors >= 0 and tile > 0, f"anchors must be at least 0 and tile positive, got {anchors} and {tile}")
    start = doc_start.cpu().numpy().astype(np.int64)
    rows, length = start.shape
    first = np.tile(np.arange(0, length, tile), rows)  # (B * query tiles,): first query of each tile
    last = np.minimum(first + tile, length) - 1
    row = np.repeat(np.arange(rows), len(first) // rows)
    head, tail = start[row, first], start[row, last]  # document starts of the first and of the last query
    near = np.maximum(np.maximum(head, first - window + 1), 0) // tile
    far = np.maximum(head, 0) // tile
    far_end = -(-np.minimum(head + anchors, first + 1) // tile) if anchors else far  # exclusive
    far_end = np.clip(far_end, far, near)
    far_count, count = far_end - far, far_end - far + first // tile - near + 1
    offsets = np.concatenate([[0], np.cumsum(count)])
    number = np.arange(offsets[-1]) - np.repeat(offsets[:-1], count)  # 0, 1, ... within each query tile

    def spread(x: np.ndarray) -> np.ndarray:
        return np.repeat(x, count)

    key_tile = np.where(number < spread(far_count), spread(far) + number, spread(near - far_count) + number)
    key = key_tile * tile
    key_end = np.minimum(key + tile, length)
    edge, anchor_end = spread(last - window + 1), spread(tail + anchors)
    seen = (key >= edge) | (key_end <= anchor_end) | (anchor_end >= edge)
    full = seen & (key >= spread(tail)) & (key_end <= spread(first) + 1)
    made = {"offsets": offsets, "key_tiles": key_tile.astype(np.int32), "full": full}
    return AttentionTileMap(**{name: torch.from_numpy(x).to(doc_start.device) for name, x in made.items()})


# ---------------------------------------------------------------------------
# Validation and bits per byte


def validation_batches(
    tokens: TokenFile,
    length: int,
    limit_tokens: int | None = None,
    *,
    micro_batch_tokens: int = 65_536,
    byte_lengths: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Yield the file in its own order, each target once: rows of `length` from the start, then one shorter row.

    Bits per byte = summed cross entropy / ln 2 / sum of target_bytes (an end of document costs bits and has no bytes).

    Args:
        limit_tokens: read only the first tokens, in whole rows; None reads all.
        byte_lengths: result of token_byte_lengths(), to fill target_bytes.
    """
    _require(length > 0, f"validation length must be positive, got {length}")
    # the end of the file looks ahead to its beginning, where no target is
    stream = _TokenStream(tokens, np.resize(np.arange(len(tokens.ends)), len(tokens.ends) + _LOOKAHEAD))
    count = len(tokens)
    if limit_tokens is not None:
        count = min(count, max(1, limit_tokens // length) * length)
    whole = range(0, count - length + 1, length)
    per_batch = max(1, micro_batch_tokens // length)
    for i in range(0, len(whole), per_batch):
        yield stream.batch(whole[i : i + per_batch], length, byte_lengths)
    if rest := count - len(whole) * length:
        yield stream.batch([count - rest], rest, byte_lengths)


def token_byte_lengths(tokens: TokenFile) -> np.ndarray:
    """Return the UTF-8 bytes of each id, int64 (W,), by the tokenizer beside the file."""
    tokenizer = tokens.read_tokenizer()
    _require(tokenizer is not None, f"bits per byte needs tokenizer.json beside {tokens.path}, found none; copy it")
    lengths = np.array([len(text) for text in bytes_of_id(tokenizer)], np.int64)
    short = f"{tokens.path} holds id {tokens.largest:,}, but its tokenizer.json has {len(lengths):,} ids"
    _require(tokens.largest < len(lengths), f"{short}; restore the right one")
    return lengths


def unigram_bits_per_byte(train: TokenFile, val: TokenFile, length: int, *, limit_tokens: int | None = None) -> float:
    """Return the bits per byte of val's targets under train's id frequencies (add one): no context at all.

    length and limit_tokens as for validation_batches, so that both see the same targets."""
    byte_lengths = token_byte_lengths(val)
    counts = np.ones(len(byte_lengths), np.int64)
    other = f"{train.path} holds id {train.largest:,}, but the tokenizer of {val.path} has {len(counts):,} ids"
    _require(train.largest < len(counts), f"{other}; compare files made by one tokenizer")
    for begin in range(0, len(train), _SCAN_TOKENS):
        counts += np.bincount(train.ids[begin : begin + _SCAN_TOKENS].astype(np.int64), minlength=len(counts))
    cost = np.log2(counts.sum()) - np.log2(counts)  # bits of each id
    bits, size = 0.0, 0
    for batch in validation_batches(val, length, limit_tokens, byte_lengths=byte_lengths):
        bits += float(cost[batch.targets[batch.loss_weights > 0].numpy()].sum())
        size += batch.target_bytes or 0
    _require(size > 0, f"{val.path}: its targets hold 0 bytes of text; validate on a file with text")
    return bits / size


def xz_bits_per_byte(text: bytes) -> float:
    """Return the bits per byte that xz (preset 9) needs for a text, which it sees without any training split."""
    _require(len(text) > 0, "xz_bits_per_byte needs text, got 0 bytes")
    return 8 * len(lzma.compress(text, preset=9)) / len(text)
