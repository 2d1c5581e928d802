"""Tests of dataset_pipeline.py: writing of tokens, preparation, packing, curriculum, decoding. No network, no GPU."""

import gzip
import json
import lzma
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dataset_pipeline as dp
from model_config import CurriculumConfig

FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PLENTY = settings(FAST, max_examples=120)


def raw(path: Path, ids, dtype="<u2") -> Path:
    path.write_bytes(np.asarray(ids, dtype).tobytes())
    return path


def ends(path: Path, values) -> None:
    path.with_name(path.stem + ".ends.bin").write_bytes(np.asarray(values, "<u8").tobytes())


def mask(path: Path, values) -> None:
    path.with_name(path.stem + ".mask.bin").write_bytes(np.asarray(values, np.uint8).tobytes())


def stage(length, steps, rows=1, min_document=0) -> dp.CurriculumStage:
    per_step = rows * length
    return dp.CurriculumStage(
        length=length, tokens=per_step * steps, tokens_per_step=per_step, steps=steps, min_document=min_document
    )


def file_of(tmp_path: Path, lengths, masks=None, name="t.bin") -> dp.TokenFile:
    """Documents whose ids are their places in the file, so that an id says where it came from."""
    path = raw(tmp_path / name, np.arange(sum(lengths)), "<u4")
    ends(path, np.cumsum(lengths))
    mask_file = path.with_name(path.stem + ".mask.bin")
    mask_file.unlink(missing_ok=True)
    if masks is not None:
        mask(path, masks)
    return dp.open_tokens(path, dtype="uint32")


# ---------------------------------------------------------------------------
# Writing


def test_written_files_read_back(tmp_path):
    path = tmp_path / "w.bin"
    dp.write_tokens(
        path, [[1, 2, 3], [], [4, 5]], vocab_size=65_536, masks=[[0, 1, 1], [], [0, 1]], facts={"eos_id": 3}
    )
    tokens = dp.open_tokens(path)
    assert path.stat().st_size == 10 and tokens.ids.dtype == np.uint16
    assert (tokens.ids.tolist(), tokens.ends.tolist(), tokens.mask.tolist()) == (
        [1, 2, 3, 4, 5],
        [3, 5],
        [0, 1, 1, 0, 1],
    )
    assert tokens.facts["eos_id"] == 3 and tokens.vocab_size == 65_536 and tokens.facts["documents"] == 2
    dp.write_tokens(path, [[9, 8]], vocab_size=10)  # no mask now: the old one goes
    assert dp.open_tokens(path).mask is None and dp.open_tokens(path).ids.tolist() == [9, 8]
    assert not list(tmp_path.glob("*.tmp-*"))


def test_wide_vocabulary_never_wraps(tmp_path):
    """B085: 65,535, 65,536 and 70,000 under a vocabulary of 100,000."""
    ids = [65_535, 65_536, 70_000]
    dp.write_tokens(tmp_path / "t.bin", [ids], vocab_size=100_000)
    tokens = dp.open_tokens(tmp_path / "t.bin")
    assert tokens.ids.tolist() == ids and tokens.ids.dtype == np.uint32
    with pytest.raises(ValueError, match=r"vocabulary of 100000 does not fit uint16 .*65,535"):
        dp.write_tokens(tmp_path / "n.bin", [ids], vocab_size=100_000, dtype="uint16")
    with pytest.raises(ValueError, match="id 65536 at token 1 must be below the vocabulary 65536"):
        dp.write_tokens(tmp_path / "n.bin", [ids], vocab_size=65_536)
    with pytest.raises(ValueError, match="id -1 at token 0"):
        dp.write_tokens(tmp_path / "n.bin", [[-1]], vocab_size=65_536)
    with pytest.raises(ValueError, match="no id was written"):
        dp.write_tokens(tmp_path / "n.bin", [], vocab_size=9)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("n.")) == []


def test_sources_are_kept_for_each_document(tmp_path):
    path = tmp_path / "t.bin"
    dp.write_tokens(path, [[1, 2], [], [3], [4, 5]], vocab_size=10, sources=["web", "none", "code", "web"])
    tokens = dp.open_tokens(path)
    assert tokens.sources == ("web", "code") and tokens.source_of.tolist() == [0, 1, 0]
    assert "of 2 sources" in tokens.describe()[2]
    for damage, message in (([0, 1], "holds 2 documents, t.bin has 3"), ([0, 7, 1], "holds source 7, t.json names 2")):
        np.asarray(damage, "<u2").tofile(tmp_path / "t.sources.bin")
        with pytest.raises(ValueError, match=message):
            dp.open_tokens(path)
    dp.write_tokens(path, [[1, 2], [3]], vocab_size=10)
    tokens = dp.open_tokens(path)
    assert tokens.source_of is None and tokens.sources == ("all",) and not (tmp_path / "t.sources.bin").exists()


def test_failed_write_keeps_the_old_file(tmp_path):
    dp.write_tokens(tmp_path / "t.bin", [[1, 2]], vocab_size=10)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ValueError):
        dp.write_tokens(tmp_path / "t.bin", [[3, 4], [11]], vocab_size=10)
    for wrong in ([[0, 2]], [[1]]):
        with pytest.raises(ValueError, match="mask must"):
            dp.write_tokens(tmp_path / "t.bin", [[3, 4]], vocab_size=10, masks=wrong)
    with pytest.raises(ValueError, match="every add"), dp.TokenWriter(tmp_path / "t.bin", vocab_size=10) as writer:
        writer.add([1, 2])
        writer.add([1, 2], [1, 1])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("survives", range(5))
def test_crash_between_renames_never_mixes_files(tmp_path, monkeypatch, survives):
    path = tmp_path / "t.bin"
    dp.write_tokens(path, [[1, 2], [3, 4]], vocab_size=10, masks=[[0, 1], [0, 1]])
    done, real = [], os.replace

    def replace(*names):
        if len(done) == survives:
            raise OSError("power is out")
        done.append(names)
        real(*names)

    monkeypatch.setattr(dp.os, "replace", replace)
    if survives < 4:
        with pytest.raises(OSError, match="power"):
            dp.write_tokens(path, [[5, 6, 7], [8]], vocab_size=10, masks=[[1, 1, 0], [1]])
    else:
        dp.write_tokens(path, [[5, 6, 7], [8]], vocab_size=10, masks=[[1, 1, 0], [1]])
    monkeypatch.undo()
    if survives < 3:
        with pytest.raises(ValueError, match="does not exist"):
            dp.open_tokens(path)
    elif survives == 3:  # only the facts are still the old ones, and they tell
        with pytest.raises(ValueError, match="changed or damaged"):
            dp.open_tokens(path)
    else:
        tokens = dp.open_tokens(path)
        assert (tokens.ids.tolist(), tokens.ends.tolist(), tokens.mask.tolist()) == ([5, 6, 7, 8], [3, 4], [1, 1, 0, 1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: os.truncate(p, 8), "holds 4 ids of uint16, but t.json says 5 ids"),
        (lambda p: raw(p, [1, 2, 3, 4, 6]), "was changed or damaged"),
        (lambda p: raw(p, [1, 2, 3, 4, 5], "<u4"), "holds 10 ids of uint16, but t.json says 5 ids of uint16"),
    ],
    ids=["cut", "changed", "wide"],
)
def test_facts_catch_a_damaged_copy(tmp_path, damage, message):
    path = tmp_path / "t.bin"
    dp.write_tokens(path, [[1, 2, 3, 4, 5]], vocab_size=10)
    dp.open_tokens(path)
    damage(path)
    with pytest.raises(ValueError, match=re.escape(message)):
        dp.open_tokens(path)


# ---------------------------------------------------------------------------
# Packing


def expected_rows(stream, position, length, masks):
    """Token loop over a stream of (presentation, place): inputs, targets, draft ids and targets, weights, starts."""
    row = stream[position : position + length + 3]
    inputs = [place for _, place in row[:length]]
    targets, weights, starts, drafts = [], [], [], [[], []]
    start = 0
    for t in range(length):
        if t and row[t][0] != row[t - 1][0]:
            start = t
        starts.append(start)
        ahead = [row[t + d][1] if row[t + d][0] == row[t][0] else -100 for d in (1, 2, 3)]
        targets.append(ahead[0])
        weights.append(float(ahead[0] >= 0 and masks[ahead[0]]))
        for depth in (1, 2):
            drafts[depth - 1].append(ahead[depth] if ahead[depth] >= 0 and masks[ahead[depth]] else -100)
    draft_ids = [[row[t + depth][1] for t in range(0, length, 4)] for depth in (1, 2)]
    return inputs, targets, draft_ids, [depth[::4] for depth in drafts], weights, starts


@st.composite
def corpora(draw):
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=12).filter(lambda ls: max(ls) >= 2))
    return lengths, draw(st.integers(1, 40)), draw(st.integers(1, 3)), draw(st.integers(0, 2**40))


@PLENTY
@given(corpora(), st.integers(1, 4), st.integers(1, 100), st.randoms(use_true_random=False), st.booleans())
def test_every_target_once_an_epoch(tmp_path, corpus, world, micro, random, masked):
    """Any documents, row length, ranks, micro-batches and restarts: each target once, and rows equal the token loop."""
    lengths, length, rows, seed = corpus
    size = sum(lengths)
    masks = [int(not masked or random.random() < 0.6) for _ in range(size)]
    bounds = np.r_[0, np.cumsum(lengths)]
    inner = np.ones(size, bool)
    inner[bounds[:-1]] = False
    if not (inner & np.array(masks, bool)).any():
        masks = [1] * size
    tokens = file_of(tmp_path, lengths, masks if masked else None)
    steps = -(-size // (rows * length)) + 1
    # phase-2 stages rearrange the epoch; the promise holds all the same
    stages = [stage(length, steps, rows)] if random.random() < 0.5 else [
        stage(length, max(1, steps // 2), rows), stage(2 * length, steps, 1, length)
    ]  # fmt: skip
    seen = {}
    for rank in range(world):
        for step in range(sum(s.steps for s in stages)):
            loader = dp.PackedSequenceDataLoader(
                tokens, stages, seed=seed, micro_batch_tokens=micro, rank=rank, world_size=world
            )  # a fresh loader a step: nothing may depend on earlier calls
            plan = loader.step_batches(step)
            batches = list(plan)
            assert len(batches) == len(plan)
            for batch in batches:
                for row, position in enumerate(plan.rows[: len(batch.inputs)]):
                    assert position not in seen
                    seen[position] = (plan, batch, row)
                plan = dp.replace(plan, rows=plan.rows[len(batch.inputs) :])
    order = dp.PackedSequenceDataLoader(tokens, stages, seed=seed, micro_batch_tokens=9).stream.order
    stream = [(n, place) for n, d in enumerate(order) for place in range(bounds[d], bounds[d + 1])]
    for epoch in range(loader.total_tokens // size):
        assert sorted(order[epoch * len(lengths) : (epoch + 1) * len(lengths)]) == list(range(len(lengths)))
    supervised, drafts, targets = {}, {}, []
    for position in sorted(seen):
        plan, batch, row = seen[position]
        got = [
            batch.inputs[row].tolist(),
            batch.targets[row].tolist(),
            batch.draft_ids[:, row].tolist(),
            batch.draft_targets[:, row].tolist(),
            batch.loss_weights[row].tolist(),
            batch.doc_start[row].tolist(),
        ]
        assert got == list(expected_rows(stream, position, plan.length, masks))
        assert batch.offsets[row] == got[0][0] and batch.tokens == batch.inputs.numel()
        targets += got[1]
        supervised.setdefault(plan.step, []).append(sum(got[4]))
        drafts.setdefault(plan.step, []).append([sum(t >= 0 for t in d) for d in got[3]])
        assert batch.supervised == batch.loss_weights.sum()
    epoch = sorted(t for t in targets[:size] if t >= 0)
    assert epoch == np.flatnonzero(inner).tolist()
    for position in seen:
        plan = seen[position][0]
        assert plan.supervised == sum(supervised[plan.step])
        assert plan.draft_supervised == tuple(np.sum(drafts[plan.step], axis=0).tolist())
    assert sorted(seen) == sorted(p for s in range(loader.total_steps) for p in loader_rows(loader, s))


def loader_rows(loader, step):
    whole = dp.PackedSequenceDataLoader(loader.tokens, loader.stages, seed=loader.seed, micro_batch_tokens=1)
    return whole.step_batches(step).rows


def _response_file(tmp_path):
    path = raw(tmp_path / "t.bin", [11, 12, 13, 21, 22, 99, 14, 23, 99], "<u2")
    ends(path, [6, 9])
    mask(path, [0, 0, 0, 1, 1, 1, 0, 1, 1])
    return dp.open_tokens(path, dtype="uint16")


def test_response_positions(tmp_path):
    """B043: P1 P2 P3 R1 R2 END trains exactly the positions of P3, R1 and R2."""
    tokens = _response_file(tmp_path)
    (batch,) = dp.validation_batches(tokens, 9)
    weights = batch.loss_weights[0]
    assert weights.nonzero().flatten().tolist() == [2, 3, 4, 6, 7]
    assert batch.targets[0].tolist() == [12, 13, 21, 22, 99, -100, 23, 99, -100]
    # every fourth place of [-100, 21, 22, 99, -100, -100, 99, -100, -100], of what is one further, and what leads there
    assert batch.draft_targets[:, 0].tolist() == [[-100, -100, -100], [21, -100, -100]]
    assert batch.draft_ids[:, 0].tolist() == [[12, 99, 11], [13, 14, 12]]
    assert batch.doc_start[0].tolist() == [0] * 6 + [6] * 3
    assert batch.supervised == tokens.supervised == 5


def test_empty_windows_and_steps_have_weight_zero(tmp_path):
    """B036: a window, then a whole step, without a supervised token."""
    tokens = file_of(tmp_path, [40], [0] * 30 + [1] * 10)
    loader = dp.PackedSequenceDataLoader(tokens, [stage(5, 4, 2)], seed=0, micro_batch_tokens=5)
    # rows of 5 by stream position; a step is two of them, in shuffled order
    known = dict(zip(range(0, 40, 5), [0, 0, 0, 0, 0, 1, 5, 4], strict=True))
    seen = []
    for step in range(4):
        plan = loader.step_batches(step)
        assert [b.supervised for b in plan] == [known[row] for row in plan.rows.tolist()]
        assert plan.supervised == sum(known[row] for row in plan.rows.tolist())
        seen += plan.rows.tolist()
    assert sorted(seen) == list(known)


def test_rows_of_a_stage_are_shuffled_and_those_of_a_paced_one_near_their_place(tmp_path):
    """A long document does not fill consecutive steps; the loss of a step would be that of one text."""
    tokens = file_of(tmp_path, [4096, 50, 50])
    stages = [stage(4, 128, 4), stage(8, 64, 4)]
    loader = dp.PackedSequenceDataLoader(tokens, stages, seed=3, micro_batch_tokens=16)
    rows = np.concatenate([loader.step_batches(s).rows for s in range(loader.total_steps)])
    # each stage reads its own part of the stream, each row once
    assert sorted(rows[:512]) == list(range(0, 2048, 4)) and sorted(rows[512:]) == list(range(2048, 4096, 8))
    # a shuffled row lies a third of the stage from its place on average, in steps of any four hardly two are neighbours
    assert abs(np.abs(rows[:512] - np.arange(0, 2048, 4)).mean() / 2048 - 1 / 3) < 0.04
    steps = np.sort(rows[:512].reshape(-1, 4))
    assert (np.diff(steps) == 4).mean() < 0.03
    other = dp.PackedSequenceDataLoader(tokens, stages, seed=4, micro_batch_tokens=16)
    assert (other.step_batches(0).rows != rows[:4]).any()
    paced = dp.PackedSequenceDataLoader(
        tokens, stages, seed=3, micro_batch_tokens=16, config=dp.CurriculumConfig(pace="length")
    )
    near = np.concatenate([paced.step_batches(s).rows for s in range(128)])
    assert 0 < np.abs(near - np.arange(0, 2048, 4)).max() < 2048 / 64


def test_shuffled_rows_leave_no_token_of_an_epoch_to_the_next(tmp_path):
    """Ten epochs in one stage: the steps of each read every token once."""
    tokens = file_of(tmp_path, [40] * 16)
    loader = dp.PackedSequenceDataLoader(tokens, [stage(16, 100, 4)], seed=3, micro_batch_tokens=64)
    for epoch in range(10):
        read = [batch.inputs.flatten() for s in range(10 * epoch, 10 * epoch + 10) for batch in loader.step_batches(s)]
        assert sorted(torch.cat(read).tolist()) == list(range(640))


def test_batches_are_a_function_of_seed_and_step(tmp_path):
    """B073: straight, 10 + 10 and 7 + 7 + 6 steps read the same file offsets; other seeds and epochs read others."""
    tokens = file_of(tmp_path, [7, 13, 1, 29, 5, 40, 3, 3, 11])
    stages = [stage(8, 12, 2), stage(16, 8, 2)]

    def offsets(parts, seed=5):
        result, step = [], 0
        for part in parts:
            loader = dp.PackedSequenceDataLoader(tokens, stages, seed=seed, micro_batch_tokens=16)
            for _ in range(part):
                result.append([batch.offsets for batch in loader.step_batches(step)])
                step += 1
        return result

    straight = offsets([20])
    assert straight == offsets([10, 10]) == offsets([7, 7, 6])
    assert straight != offsets([20], seed=6)
    order = dp.PackedSequenceDataLoader(tokens, stages, seed=5, micro_batch_tokens=9).stream.order
    orders = [order[:9], order[9:18]]
    assert orders[0].tolist() != orders[1].tolist() and sorted(orders[0]) == sorted(orders[1])
    # pinned: an order that changed with a library or a rewrite would break resumed runs
    assert orders[0].tolist() == PINNED_ORDER


PINNED_ORDER = [3, 1, 0, 7, 4, 8, 2, 6, 5]


def test_tokens_before_and_limits(tmp_path):
    tokens = file_of(tmp_path, [50])
    loader = dp.PackedSequenceDataLoader(tokens, [stage(4, 3, 2), stage(8, 2, 1)], seed=0, micro_batch_tokens=8)
    assert [loader.tokens_before(s) for s in range(6)] == [0, 8, 16, 24, 32, 40]
    assert (loader.total_steps, loader.total_tokens) == (5, 40)
    assert [loader.step_batches(s).stage for s in range(5)] == [0, 0, 0, 1, 1]
    for call in (lambda: loader.step_batches(5), lambda: loader.step_batches(-1), lambda: loader.tokens_before(6)):
        with pytest.raises(ValueError, match="step must be in"):
            call()
    with pytest.raises(IndexError):
        loader.step_batches(0)[1]
    for bad in (
        {"stages": []},
        {"rank": 2, "world_size": 2},
        {"micro_batch_tokens": 0},
        {"stages": [dp.CurriculumStage(length=4, tokens=6, tokens_per_step=6, steps=1)]},
    ):
        with pytest.raises(ValueError, match="must"):
            dp.PackedSequenceDataLoader(
                **{"tokens": tokens, "stages": [stage(4, 1)], "seed": 0, "micro_batch_tokens": 8} | bad
            )


def test_long_documents_lie_under_the_long_stages(tmp_path):
    lengths = [3] * 200 + [100, 90] + [20] * 6
    tokens = file_of(tmp_path, lengths)
    stages = [stage(8, 40, 1), stage(16, 8, 1, 8), stage(64, 2, 1, 32)]
    loader = dp.PackedSequenceDataLoader(tokens, stages, seed=1, micro_batch_tokens=64)
    order = loader.stream.order.tolist()  # less than an epoch: no document twice
    assert len(set(order)) == len(order) < 208
    shares = dict(dp.long_share(loader))
    assert set(shares) == {16, 64} and shares[64] > 0.7 and shares[16] > 0.4
    random_order = dp.PackedSequenceDataLoader(
        tokens, [stage(8, 40), stage(16, 8), stage(64, 2)], seed=1, micro_batch_tokens=64
    )
    assert dp.long_share(random_order) == []
    assert max(len(set(b.doc_start[0].tolist())) for b in loader.step_batches(49)) <= 3
    # by hand: the tokens of step 48 and 49 in parts longer than 32 that have a target
    long = total = 0
    for step in (48, 49):
        (batch,) = loader.step_batches(step)
        starts, targets = batch.doc_start[0], batch.targets[0]
        for t in range(64):
            if targets[t] >= 0:
                total += 1
                long += int((starts == starts[t]).sum() > 32)
    assert shares[64] == pytest.approx(long / total)


def test_short_documents_still_fill_the_long_stages(tmp_path):
    loader = dp.PackedSequenceDataLoader(
        file_of(tmp_path, [5] * 30), [stage(8, 4), stage(32, 9, 1, 8)], seed=0, micro_batch_tokens=64
    )
    assert dp.long_share(loader) == [(32, 0.0)]


def test_million_token_row_is_cheap(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 2_000, 1_500)
    tokens = file_of(tmp_path, lengths)
    loader = dp.PackedSequenceDataLoader(tokens, [stage(1 << 20, 2)], seed=0, micro_batch_tokens=1)
    begin = time.perf_counter()
    plan = loader.step_batches(1)
    (batch,) = plan
    assert batch.inputs.shape == (1, 1 << 20) and batch.supervised == plan.supervised
    assert time.perf_counter() - begin < 5  # 0.3 s on two cores; a Python loop over tokens takes longer


# ---------------------------------------------------------------------------
# Mixture and pacing


def mixed_file(tmp_path, sizes, *, seed=0):
    """A token file of sources a, b, ... with the given document lengths, shuffled together."""
    documents = [(name, n) for name, lengths in sizes.items() for n in lengths]
    order = np.random.default_rng(seed).permutation(len(documents))
    names = [documents[i][0] for i in order]
    ids = [np.full(documents[i][1], 1 + sorted(sizes).index(documents[i][0])) for i in order]
    dp.write_tokens(tmp_path / "t.bin", ids, vocab_size=100, sources=names)
    return dp.open_tokens(tmp_path / "t.bin")


def mixed_loader(tokens, total, **options):
    config = CurriculumConfig(context=8, **options)
    return dp.PackedSequenceDataLoader(tokens, [stage(8, total // 8)], seed=3, micro_batch_tokens=64, config=config)


@PLENTY
@given(
    st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(2, 40), min_size=1, max_size=12), min_size=1),
    st.integers(20, 400),
    st.sampled_from([0.5, 1.0, 3.0, 1e9]),
)
def test_mixture_gives_each_source_its_share_and_whole_epochs(tmp_path, sizes, rows, temperature):
    tokens = mixed_file(tmp_path, sizes)
    total = 8 * rows
    loader = mixed_loader(tokens, total, mix_temperature=temperature)
    weights = {name: sum(n) ** (1 / temperature) for name, n in sizes.items()}
    order, lengths, starts = loader.stream.order, tokens.lengths, loader.stream.bounds[:-1]
    assert loader.stream.bounds[-1] >= total + 3
    assert sum(source.quota for source in loader.sources) == total
    source_of = np.zeros(len(lengths), int) if tokens.source_of is None else tokens.source_of
    for source in loader.sources:
        assert abs(source.quota - total * weights[source.name] / sum(weights.values())) <= 1
        assert source.tokens == sum(sizes[source.name])
        mine = source_of[order] == tokens.sources.index(source.name)
        # each epoch is a permutation of the source's documents
        sequence = order[mine]
        for begin in range(0, len(sequence), len(source.documents)):
            epoch = sequence[begin : begin + len(source.documents)]
            assert len(set(epoch)) == len(epoch) and set(epoch) <= set(source.documents)
        # any stretch of the run holds the proportions, to within the documents at its edges
        for position in range(0, total, max(8, total // 7)):
            upto = np.minimum(np.maximum(position - starts[mine], 0), lengths[sequence]).sum()
            slack = sum(max(n) for n in sizes.values()) + 3
            assert abs(upto - position * source.quota / total) <= slack
    again = mixed_loader(tokens, total, mix_temperature=temperature)
    assert np.array_equal(order, again.stream.order)


def test_mixture_weights_by_name_and_pattern(tmp_path):
    tokens = mixed_file(tmp_path, {"code-a": [10] * 30, "code-b": [10] * 10, "prose": [10] * 40, "rest": [10] * 5})
    loader = mixed_loader(tokens, 1600, mix="code-*=1,prose=3")
    assert {s.name: s.quota for s in loader.sources} == {"code-a": 300, "code-b": 100, "prose": 1200}
    lines = loader.describe()
    assert any("source prose: 40 documents, 400 tokens; 75.0% of the run, 3.00 epochs" in line for line in lines)
    assert "sources left out: rest" in lines
    with pytest.raises(ValueError, match=r"mix names 'poetry', but .* has .*prose.*; name one of them"):
        mixed_loader(tokens, 1600, mix="poetry=1")
    for bad in ("prose", "prose=", "prose=-1", "=2", "prose=1,,"):
        with pytest.raises(ValueError, match="mix must be NAME=WEIGHT"):
            CurriculumConfig(mix=bad)
    with pytest.raises(ValueError, match="give one of them"):
        CurriculumConfig(mix="a=1", mix_temperature=2.0)
    # a share below one token is said
    least = mixed_loader(tokens, 1600, mix_temperature=1e-3)
    assert [s.name for s in least.sources] == ["prose"] and "sources left out: code-a, code-b, rest" in least.describe()
    # a file that names no source is one source
    (tmp_path / "plain").mkdir()
    plain = file_of(tmp_path / "plain", [10] * 8)
    assert [s.name for s in mixed_loader(plain, 64, mix_temperature=1.0).sources] == ["all"]


def test_long_documents_of_all_sources_come_together(tmp_path):
    sizes = {"a": [6] * 60 + [90], "b": [5] * 80 + [100, 70], "c": [4] * 30}
    tokens = mixed_file(tmp_path, sizes)
    stages = [stage(8, 200), stage(64, 4, 1, 8)]

    def loader(*stages):
        config = CurriculumConfig(mix="a=1,b=1,c=2")
        return dp.PackedSequenceDataLoader(tokens, stages, seed=0, micro_batch_tokens=64, config=config)

    placed, plain = loader(*stages), loader(stage(8, 200), stage(64, 4))
    assert dict(dp.long_share(placed))[64] > 0.9
    # the same turns of the same documents, up to what the run's end cuts off
    turns = [np.bincount(x.stream.order, minlength=len(tokens.ends)) for x in (placed, plain)]
    assert np.array_equal(*turns)
    # only last turns moved
    earlier = []
    for order in (placed.stream.order.tolist(), plain.stream.order.tolist()):
        final = {document: place for place, document in enumerate(order)}
        earlier.append([document for place, document in enumerate(order) if place != final[document]])
    assert earlier[0] == earlier[1] and len(earlier[0]) > 100


def test_difficulty_scores(tmp_path):
    dp.write_tokens(tmp_path / "t.bin", [[1, 1, 1, 2], [3], [1, 3, 3], [4, 1]], vocab_size=9)
    tokens = dp.open_tokens(tmp_path / "t.bin")
    assert dp.difficulty(tokens, "length").tolist() == [4, 1, 3, 2]
    share = {1: 5 / 10, 2: 1 / 10, 3: 3 / 10, 4: 1 / 10}
    expected = [-np.mean([np.log2(share[i]) for i in d]) for d in ([1, 1, 1, 2], [3], [1, 3, 3], [4, 1])]
    for chunk in (3, 4, 5, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dp, "_SCAN_TOKENS", chunk)
            assert dp.difficulty(tokens, "rarity") == pytest.approx(expected, abs=1e-12)
    np.save(tmp_path / "scores.npy", np.float32([3, 1, 4, 1]))
    assert dp.difficulty(tokens, str(tmp_path / "scores.npy")).tolist() == [3, 1, 4, 1]
    np.save(tmp_path / "short.npy", np.float32([3, 1]))
    np.save(tmp_path / "nan.npy", np.float32([3, 1, np.nan, 0]))
    (tmp_path / "text.npy").write_text("no")
    for name, message in (
        ("lenght", "pace must be length, rarity or a .npy file of scores, got 'lenght'"),
        (str(tmp_path / "short.npy"), r"has shape \(2,\), needed \(4,\)"),
        (str(tmp_path / "nan.npy"), "not finite"),
        (str(tmp_path / "text.npy"), "is not a .npy file"),
    ):
        with pytest.raises(ValueError, match=message):
            dp.difficulty(tokens, name)


@pytest.mark.parametrize("share", [0.5, 1.0, 2.5])
@pytest.mark.parametrize(("start", "full"), [(0.3, 0.5), (0.05, 1.0), (1.0, 0.1)])
def test_pace_keeps_the_window_replays_and_loses_nothing(tmp_path, share, start, full):
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 30, 4_000)
    tokens = file_of(tmp_path, lengths)
    total = int(share * len(tokens)) // 8 * 8
    options = {"pace": "length", "pace_start": start, "pace_full": full}
    loader = mixed_loader(tokens, total, **options)
    plain = mixed_loader(tokens, total)
    order = loader.stream.order
    # the same documents as without pacing, in another order; later epochs are untouched
    upto = min(len(lengths), len(order))
    if share >= 1:
        assert sorted(order[:upto]) == list(range(len(lengths)))
        assert np.array_equal(order[upto:], plain.stream.order[upto:])
    else:
        assert set(order[:-3]) <= set(plain.stream.order.tolist())
    read = order[:upto]
    span = lengths[read].sum()
    hardness = np.argsort(lengths[read], kind="stable")
    quantile = np.empty(upto)
    quantile[hardness] = (np.cumsum(lengths[read][hardness]) - lengths[read][hardness]) / span
    progress = (np.cumsum(lengths[read]) - lengths[read]) / span
    competence = np.minimum(1, start + (1 - start) * progress / full)
    # one bucket of 64, and one slice of 64, is the resolution
    assert (quantile <= np.maximum(competence, progress) + (1 + (1 - start) / full) / 64 + 0.01).all()
    if start < 1:
        assert quantile[progress < 0.02].mean() < quantile[progress > 0.7].mean()
        assert quantile[progress < 0.02].max() < start + 0.1
    # easy documents stay in the draw to the end, unless the window is as narrow as what is read
    if full < 1:
        assert (quantile[progress > 0.9] < start / 2).any()


def test_pace_is_independent_of_the_mixture(tmp_path):
    sizes = {"a": list(range(2, 42)) * 8, "b": list(range(10, 50)) * 8}
    tokens = mixed_file(tmp_path, sizes)
    total = 8 * (len(tokens) // 8)
    loader = mixed_loader(tokens, total, mix_temperature=1.0, pace="length")
    early = loader.stream.order[:60]
    for source in loader.sources:
        mine = np.isin(early, source.documents)
        assert 20 < mine.sum() < 40
        lengths = tokens.lengths[source.documents]
        assert tokens.lengths[early[mine]].mean() < 0.75 * lengths.mean()


# ---------------------------------------------------------------------------
# Boundaries and tiles


def test_boundary_helpers():
    doc_start = dp.doc_start_from_cu_seqlens(torch.tensor([0, 3, 3, 7, 8]), 8)
    assert doc_start.tolist() == [[0, 0, 0, 3, 3, 3, 3, 7]] and doc_start.dtype == torch.int32
    both = torch.cat([doc_start, torch.tensor([[-4] * 5 + [5] * 3], dtype=torch.int32)])
    assert dp.reset_flags(both).nonzero().tolist() == dp.boundary_indices(both).tolist()
    assert dp.boundary_indices(both).tolist() == [[0, 0], [0, 3], [0, 7], [1, 5]]
    for bad in ([0, 3], [1, 8], [0, 5, 4, 8], [8]):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to 8"):
            dp.doc_start_from_cu_seqlens(torch.tensor(bad), 8)


@PLENTY
@given(
    st.lists(st.integers(1, 25), min_size=1, max_size=8),
    st.integers(1, 30),
    st.integers(0, 12),
    st.integers(1, 20),
    st.integers(0, 9),
    st.integers(1, 3),
)
def test_tile_map_equals_the_dense_mask(lengths, window, anchors, tile, earlier, rows):
    size = sum(lengths)
    start = dp.doc_start_from_cu_seqlens(torch.tensor([0, *np.cumsum(lengths).tolist()]), size)
    start[start == 0] = -earlier
    i, j, s = torch.arange(size)[:, None], torch.arange(size)[None], start[0][:, None]
    dense = (j >= s) & (j <= i) & ((i - j < window) | (j < s + anchors))
    tiles = -(-size // tile)
    expected = []
    for a in range(tiles):
        for b in range(tiles):
            part = dense[a * tile : (a + 1) * tile, b * tile : (b + 1) * tile]
            if part.any():
                expected.append((a, b, bool(part.all())))
    made = dp.attention_tile_map(start.repeat(rows, 1), window, anchors, tile)
    query = torch.repeat_interleave(torch.arange(rows * tiles), made.offsets.diff())
    got = list(zip(query.tolist(), made.key_tiles.tolist(), made.full.tolist(), strict=True))
    assert got == [(r * tiles + a, b, full) for r in range(rows) for a, b, full in expected]


def test_tile_map_rejects_empty_windows():
    with pytest.raises(ValueError, match="window must be positive, got 0"):
        dp.attention_tile_map(torch.zeros(1, 4, dtype=torch.int32), 0, 1, 2)


# ---------------------------------------------------------------------------
# Curriculum


def build(total, config, corpus=None, max_context_len=1_048_576):
    return dp.build_curriculum(total, config, max_context_len=max_context_len, corpus_tokens=corpus)


def plan(total, corpus=None, max_context_len=1_048_576, **options):
    config = CurriculumConfig(**{"tokens_per_step": 65_536} | options)
    stages, notes = build(total, config, corpus, max_context_len)
    for s in stages:
        assert s.tokens == s.steps * s.tokens_per_step and s.tokens_per_step % s.length == 0
    return [(s.length, s.tokens_per_step, s.steps) for s in stages], notes


def test_full_budget_table():
    """R12 at 250 M tokens, 524,288 a step: 143 steps fit each 75 M, and remainders move down."""
    stages, notes = build(250_000_000, CurriculumConfig(tokens_per_step=524_288))
    rows = [(s.length, s.tokens_per_step, s.steps, s.min_document) for s in stages]
    assert rows == [
        (2_048,     524_288,   143, 0),
        (4_096,     524_288,   143, 0),
        (8_192,     524_288,   143, 0),
        (16_384,    524_288,   19,  8_192),
        (65_536,    524_288,   14,  16_384),
        (131_072,   524_288,   10,  65_536),
        (1_048_576, 1_048_576, 2,   131_072),
    ]  # fmt: skip
    assert sum(s.tokens for s in stages) == 250_000_000 - 438_912
    assert notes[0] == "length 1,048,576: whole steps only; 402,848 tokens go to length 131,072"
    assert notes[-1] == "length 2,048: whole steps only; 438,912 tokens are not used" and len(notes) == 7


def test_small_budgets_move_down_by_name():
    stages, notes = plan(3_000_000)
    assert stages == [
        (2_048, 65_536, 13), (4_096, 65_536, 14), (8_192, 65_536, 14), (16_384, 65_536, 2), (65_536, 65_536, 2),
    ]  # fmt: skip
    assert notes[:2] == [
        "length 1,048,576: 30,000 tokens are less than one step of 1,048,576; 30,000 tokens go to length 131,072",
        "length 131,072: 90,000 tokens are less than one step of 131,072; 90,000 tokens go to length 65,536",
    ]
    stages, notes = plan(3_000_000, corpus=20_000, max_context_len=65_536)
    assert [s[0] for s in stages] == [2_048, 4_096, 8_192, 16_384]
    assert notes[0].startswith("length 1,048,576: rows are longer than the model's context of 65,536; 30,000 tokens go")
    assert notes[2].startswith("length 65,536: rows are longer than the corpus of 20,000 tokens; 180,000 tokens go")
    assert plan(300_000)[0] == [(2_048, 65_536, 1), (4_096, 65_536, 2), (8_192, 65_536, 1)]
    assert plan(30_000)[0] == [(2_048, 28_672, 1)]


def test_context_and_divisor():
    assert plan(1_000_000, context=4_096) == (
        [(4_096, 65_536, 15)],
        ["length 4,096: whole steps only; 16,960 tokens are not used"],
    )
    assert plan(2_097_152, context=1_048_576) == ([(1_048_576, 1_048_576, 2)], [])
    assert plan(5_000, context=2_048) == (
        [(2_048, 4_096, 1)],
        ["length 2,048: whole steps only; 904 tokens are not used"],
    )
    rows, _ = plan(1_000_000, length_divisor=64, tokens_per_step=1_024, max_context_len=16_384)
    assert [r[0] for r in rows] == [32, 64, 128, 256, 1_024, 2_048]  # 1 % does not hold one row of 16,384
    stages, _ = build(10_000_000, CurriculumConfig(tokens_per_step=1_024, length_divisor=64))
    assert [(s.length, s.min_document) for s in stages][-4:] == [
        (256, 128),
        (1_024, 256),
        (2_048, 1_024),
        (16_384, 2_048),
    ]


@pytest.mark.parametrize(
    ("total", "corpus", "options", "message"),
    [
        (0, None, {}, "token budget must be positive"),
        (1_000, None, {}, "no length fits: 2,048: 1,000 tokens are less than one step"),
        (10**6, 1_000, {}, "no length fits: 2,048: rows are longer than the corpus of 1,000 tokens"),
        (10**6, None, {"max_context_len": 1_024}, "no length fits: 2,048: rows are longer than the model's context"),
        (10**6, None, {"context": 4_096, "max_context_len": 2_048}, "context must be at most 2,048, got 4,096"),
        (10**6, 5_000, {"context": 8_192}, "longer than the corpus"),
        (10**6, None, {"length_divisor": 4_096}, "length_divisor must be in 1..2,048"),
    ],
)
def test_impossible_curricula(total, corpus, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(total, corpus, **options)


@PLENTY
@given(
    st.integers(1, 10**9), st.integers(1, 10**6), st.sampled_from([1, 8, 64, 512]), st.none() | st.integers(1, 10**7)
)
def test_budgets_are_kept(total, per_step, divisor, corpus):
    config = CurriculumConfig(tokens_per_step=per_step, length_divisor=divisor)
    try:
        stages, notes = build(total, config, corpus)
    except ValueError as error:
        assert "no length fits" in str(error) and (total < 2_048 // divisor or (corpus or total) < 2_048 // divisor)
        return
    used = sum(s.tokens for s in stages)
    unused = total - used
    assert 0 <= unused < max(per_step, 2_048 // divisor) or unused < 2_048 // divisor
    assert [s.length for s in stages] == sorted(s.length for s in stages) and all(s.steps > 0 for s in stages)
    assert all(s.tokens_per_step <= max(per_step, s.length) for s in stages)
    assert (unused == 0) or any("are not used" in note for note in notes)
    assert corpus is None or all(s.length <= corpus for s in stages)


# ---------------------------------------------------------------------------
# Preparation and tokenizer

TEXTS = [
    f"Document {i}: the quick brown fox jumps over {i * i} lazy dogs.\n\n  Naïve café, 日本語 🙂\n" * 3
    for i in range(40)
]


def jsonl(path: Path, texts, **extra) -> Path:
    path.write_text("".join(json.dumps({"text": t, **extra}) + "\n" for t in texts))
    return path


def texts_of(path: Path) -> list[str]:
    tokens = dp.open_tokens(path)
    tokenizer = tokens.read_tokenizer()
    eos = tokens.facts["eos_id"]
    result = []
    for start, end in zip(tokens.starts, tokens.ends, strict=True):
        # opened and closed by the end-of-text id, which is nowhere else
        assert tokens.ids[start] == tokens.ids[end - 1] == eos and eos not in tokens.ids[start + 1 : end - 1]
        result.append(dp.decode_bytes(tokenizer, tokens.ids[start:end].tolist()).decode())
    return result


def test_prepare_keeps_every_text_and_repeats_its_bytes(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", TEXTS)
    reports = [dp.prepare(source, tmp_path / name, vocab_size=400, validation_fraction=0.1) for name in "ab"]
    call = "d.prepare(sys.argv[1], sys.argv[2], vocab_size=400, validation_fraction=0.1)"
    code = f"import sys, dataset_pipeline as d; {call}"  # another process: other hash seeds
    root = Path(dp.__file__).parent
    subprocess.run([sys.executable, "-c", code, source, tmp_path / "c"], check=True, cwd=root)
    made = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "abc"]
    assert made[0] == made[1] == made[2]
    assert sorted(made[0]) == [
        "tokenizer.json", "tokens.bin", "tokens.ends.bin", "tokens.json",
        "tokens.val.bin", "tokens.val.ends.bin", "tokens.val.json",
    ]  # fmt: skip
    train, val = texts_of(tmp_path / "a" / "tokens.bin"), texts_of(tmp_path / "a" / "tokens.val.bin")
    assert (len(train), len(val)) == (36, 4) and sorted(train + val) == sorted(TEXTS)
    assert train == [t for t in TEXTS if t not in val]
    report = reports[0]
    assert (
        report.train.text_bytes
        == sum(len(t.encode()) for t in train)
        == dp.open_tokens(report.train.path).facts["text_bytes"]
    )
    assert (report.train.documents, report.validation.documents) == (36, 4)
    assert report.train.tokens == len(dp.open_tokens(report.train.path))
    assert "training: " in report.describe()[1] and "36 documents" in report.describe()[1]
    other = dp.prepare(source, tmp_path / "d", vocab_size=400, validation_documents=4, seed=9)
    assert other.validation.documents == 4 and texts_of(other.validation.path) != val


def test_prepare_reads_all_kinds_of_input(tmp_path):
    folder = tmp_path / "in"
    (folder / "b" / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.txt").write_bytes(b"\xff\xfe")
    (folder / "a.txt").write_text("first\r\n", newline="")
    (folder / "b" / "c.txt").write_bytes(b"\xef\xbb\xbfsecond")
    (folder / "b" / "deep" / "d.txt.gz").write_bytes(gzip.compress(b"third"))
    (folder / "e.jsonl.xz").write_bytes(lzma.compress(b'{"text": "fourth"}\r\n\n{"text": ""}\n{"text": "fifth"}'))
    (folder / "f.txt").write_text("")
    report = dp.prepare(folder, tmp_path / "out", vocab_size=300, validation_fraction=0)
    assert report.validation is None and not (tmp_path / "out" / "tokens.val.bin").exists()
    assert texts_of(report.train.path) == ["first\r\n", "second", "third", "fourth", "fifth"]
    joined = dp.prepare(folder, tmp_path / "joined", vocab_size=300, validation_fraction=0, join_source=True)
    assert texts_of(joined.train.path) == ["first\r\n", "second\nthird", "fourth\nfifth"]


def test_rerun_without_validation_removes_the_old_split(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", TEXTS)
    dp.prepare(source, tmp_path / "out", vocab_size=300)
    dp.prepare(source, tmp_path / "out", vocab_size=300, validation_fraction=0)
    assert not list((tmp_path / "out").glob("tokens.val*"))


def test_one_document_is_cut_at_a_line_end(tmp_path):
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "one.txt").write_text(text)
    report = dp.prepare(tmp_path / "one.txt", tmp_path / "out", vocab_size=300, validation_fraction=0.2)
    train, val = texts_of(report.train.path) + texts_of(report.validation.path)
    assert train + val == text and train.endswith("\n") and 0.1 < len(val) / len(text) < 0.3
    assert "one document only" in report.describe()[-1]


def test_special_names_in_a_text_are_ordinary_characters(tmp_path):
    texts = ["before <|endoftext|> after", "plain text of another document"]
    report = dp.prepare(jsonl(tmp_path / "i.jsonl", texts), tmp_path / "o", vocab_size=300, validation_fraction=0)
    assert texts_of(report.train.path) == texts
    tokenizer = report.tokenizer.read_text()
    ids = dp.encode_prompt(tokenizer, "a<|endoftext|>b")
    assert 0 not in ids and dp.decode_bytes(tokenizer, ids) == b"a<|endoftext|>b"


def test_given_tokenizer_is_used_as_it_is(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", TEXTS)
    first = dp.prepare(source, tmp_path / "a", vocab_size=350)
    again = dp.prepare(source, tmp_path / "b", tokenizer=first.tokenizer)
    assert again.vocab_size == first.vocab_size == 350
    assert (tmp_path / "a" / "tokens.bin").read_bytes() == (tmp_path / "b" / "tokens.bin").read_bytes()
    again.tokenizer.write_text(again.tokenizer.read_text().replace("ByteLevel", "Bytelevel"))
    with pytest.raises(ValueError, match=r"has sha256 .* was made with"):
        dp.open_tokens(again.train.path).read_tokenizer()
    again.tokenizer.unlink()
    assert dp.open_tokens(again.train.path).read_tokenizer() is None


def test_tokenizer_learns_from_the_training_split_alone(tmp_path):
    (held,) = dp._held_out(20, 0.05, None, 0).nonzero()[0]
    texts = ["the same few words again " * 9] * 20
    texts[held] = "zqxj" * 99
    report = dp.prepare(jsonl(tmp_path / "i.jsonl", texts), tmp_path / "o", vocab_size=400)
    assert texts_of(report.validation.path) == [texts[held]]
    assert len(dp.encode_prompt(report.tokenizer.read_text(), "zqxj")) == 4


BAD_LINES = [
    b"{",
    b"[1]",
    b'{"txt": "a"}',
    b'{"text": 5}',
    b'{"text": "\\ud800"}',
    b'\xff{"text": "a"}',
    b'"text"',
    b"null",
]


def test_malformed_lines_are_counted_and_named(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "good one"}\n' + b"\n".join(BAD_LINES) + b'\n{"text": "good two"}\n')
    with pytest.raises(
        ValueError, match=r"8 malformed inputs: .*in\.jsonl:2: not JSON .*in\.jsonl:6: half a surrogate"
    ) as caught:
        dp.prepare(path, tmp_path / "out", vocab_size=300)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    report = dp.prepare(path, tmp_path / "out", vocab_size=300, validation_fraction=0, skip_bad=True)
    assert texts_of(report.train.path) == ["good one", "good two"] and len(report.skipped) == 8
    assert [re.search(r":(\d+): ", r)[1] for r in report.skipped] == [str(n) for n in range(2, 10)]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda p: None, {}, "does not exist"),
        (lambda p: p.mkdir(), {}, "folder without files"),
        (lambda p: p.write_text("\n\n"), {}, "no text found"),
        (lambda p: p.write_bytes(b"\xff\xfe\x00"), {}, "1 malformed inputs"),
        (lambda p: jsonl(p, ["a", "b"]), {"vocab_size": 260}, "at least 261"),
        (lambda p: jsonl(p, ["a", "b"]), {"validation_fraction": 1.0}, "must be in"),
        (lambda p: jsonl(p, ["a", "b"]), {"validation_documents": 2}, "below the 2 documents"),
        (lambda p: jsonl(p, ["a"]), {}, "give more text"),
        (lambda p: jsonl(p, ["a", "b"]), {"tokenizer": "no-such.json"}, "does not exist"),
    ],
    ids=[
        "missing",
        "empty folder",
        "blank",
        "binary",
        "vocabulary",
        "fraction",
        "documents",
        "one letter",
        "tokenizer",
    ],
)
def test_prepare_refusals(tmp_path, make, options, message):
    path = tmp_path / "in.jsonl"
    make(path)
    with pytest.raises(ValueError) as caught:
        dp.prepare(path, tmp_path / "out", **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_cut_archives_are_refused(tmp_path, suffix, pack):
    path = tmp_path / f"t.txt{suffix}"
    for data in (pack(os.urandom(5_000))[:-9], b"plain text"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="cut off or not"):
            dp.prepare(path, tmp_path / "out")


def test_unusable_tokenizers_are_refused(tmp_path):
    source = jsonl(tmp_path / "in.jsonl", TEXTS)
    for text, message in (("{}", "could not be read"), ("no json", "could not be read")):
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            dp.prepare(source, tmp_path / "out", tokenizer=tmp_path / "t.json")
    made = dp.prepare(source, tmp_path / "a", vocab_size=300).tokenizer.read_text()
    (tmp_path / "t.json").write_text(made.replace("<|endoftext|>", "<s>"))
    with pytest.raises(ValueError, match=r"must have <.endoftext.> to end"):
        dp.prepare(source, tmp_path / "out", tokenizer=tmp_path / "t.json")
    for text in ("", "{}", "[]", '{"model": {"vocab": []}}', '{"model": {"vocab": {}}}'):
        with pytest.raises(ValueError, match="byte-level"):
            dp.bytes_of_id(text)
    with pytest.raises(ValueError, match="must be byte-level, but id 0 holds '▁'"):
        dp.bytes_of_id(json.dumps({"model": {"vocab": {"▁the": 0}}}))


def test_long_texts_are_encoded_in_parts_with_the_same_ids(tmp_path, monkeypatch):
    text = "".join(f"  word {i},\nnext\n\nline\r\n\tdeep {'é' * (i % 7)}!\n" for i in range(400))
    tokenizer = dp._train_tokenizer([text], 500)
    whole = dp.encode_prompt(tokenizer, text)
    for size in (37, 100, 1_000):
        monkeypatch.setattr(dp, "_PIECE_CHARS", size)
        parts = list(dp._pieces(text))
        assert "".join(parts) == text and len(parts) > 5 and max(map(len, parts)) <= size
        if size > 50:  # long enough to hold a place to cut
            assert [i for part in parts for i in dp.encode_prompt(tokenizer, part)] == whole
    monkeypatch.setattr(dp, "_PIECE_CHARS", 10)
    assert [len(p) for p in dp._pieces("x" * 25)] == [10, 10, 5]


@pytest.fixture(scope="module")
def tokenizer():
    return dp._train_tokenizer(["日本語 naïve café 🙂🙂 The quick brown fox. " * 20, "Ünïcödé ŝtřîņğ"] * 4, 380)


@PLENTY
@given(st.lists(st.integers(0, 330), max_size=60))
def test_streamed_text_equals_the_whole(tokenizer, ids):
    """Random ids are mostly invalid UTF-8: nothing may be lost, split or reordered, at any cut."""
    decoder = dp.TextDecoder(tokenizer)
    for _ in range(2):  # flush() starts afresh
        parts = [decoder.decode(i) for i in ids]
        assert "".join(parts) + decoder.flush() == dp.decode_bytes(tokenizer, ids).decode("utf-8", "replace")


@FAST
@given(st.text())
def test_prompt_round_trip(tokenizer, text):
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        return
    assert dp.decode_bytes(tokenizer, dp.encode_prompt(tokenizer, text)) == data


def test_byte_table(tokenizer):
    table = dp.bytes_of_id(tokenizer)
    assert table[0] == b"" and len(table) == 321 and {bytes([b]) for b in range(256)} <= set(table)
    assert dp.decode_bytes(tokenizer, [400]) == b"\xff"
    added = json.loads(tokenizer)
    added["added_tokens"].append({"id": 323, "content": "<é>", "special": False})
    table = dp.bytes_of_id(json.dumps(added))
    assert table[323] == "<é>".encode() and table[322] == b"\xff"


def test_demo_corpus(tmp_path):
    path = dp.demo_corpus(tmp_path / "demo")
    first = path.read_bytes()
    records = [json.loads(line) for line in first.splitlines()]
    size = sum(len(r["text"].encode()) for r in records)
    assert 900_000 < size < 1_200_000 and len(records) > 100
    assert {r["source"] for r in records} == {"topics", "docstrings"}
    assert "assert" in records[0]["text"] and str(Path.home()) not in first.decode()
    assert dp.demo_corpus(tmp_path / "again").read_bytes() == first


# ---------------------------------------------------------------------------
# Validation


@PLENTY
@given(corpora(), st.integers(1, 60))
def test_validation_reads_each_target_once(tmp_path, corpus, micro):
    lengths, length, _, _ = corpus
    tokens = file_of(tmp_path, lengths)
    batches = list(dp.validation_batches(tokens, length, micro_batch_tokens=micro))
    assert [i for b in batches for i in b.inputs.flatten().tolist()] == list(range(sum(lengths)))
    targets = [t for b in batches for t in b.targets.flatten().tolist()]
    starts = set(np.r_[0, np.cumsum(lengths)].tolist())
    assert targets == [-100 if i + 1 in starts else i + 1 for i in range(sum(lengths))]
    limited = list(dp.validation_batches(tokens, length, 2 * length, micro_batch_tokens=micro))
    assert sum(b.tokens for b in limited) == min(2 * length, sum(lengths))
    assert [b.inputs.tolist() for b in limited][:1] == [b.inputs.tolist() for b in batches][:1] or micro > length


def test_bits_per_byte(tmp_path):
    report = dp.prepare(jsonl(tmp_path / "in.jsonl", TEXTS), tmp_path / "out", vocab_size=400, validation_fraction=0.2)
    train, val = dp.open_tokens(report.train.path), dp.open_tokens(report.validation.path)
    got = dp.unigram_bits_per_byte(train, val, 64)
    table = dp.bytes_of_id(val.read_tokenizer())
    counts = np.bincount(train.ids, minlength=len(table)) + 1.0
    places = sorted(set(range(len(val))) - set(val.starts.tolist()))
    bits = -sum(np.log2(counts[val.ids[p]] / counts.sum()) for p in places)
    size = sum(len(table[val.ids[p]]) for p in places)
    assert got == pytest.approx(bits / size)
    lengths = dp.token_byte_lengths(val)
    assert sum(b.target_bytes for b in dp.validation_batches(val, 64, byte_lengths=lengths)) == size
    text = dp.decode_bytes(val.read_tokenizer(), val.ids.tolist())
    assert len(text) == val.facts["text_bytes"]
    assert dp.xz_bits_per_byte(text) == 8 * len(lzma.compress(text, preset=9)) / len(text)
    assert dp.xz_bits_per_byte(os.urandom(4_096)) > 8 > dp.xz_bits_per_byte(b"a" * 4_096)
    with pytest.raises(ValueError, match="0 bytes"):
        dp.xz_bits_per_byte(b"")
    report.tokenizer.unlink()
    with pytest.raises(ValueError, match=r"needs tokenizer\.json beside"):
        dp.unigram_bits_per_byte(train, val, 64)


def test_import_has_no_effect():
    code = "import sys, dataset_pipeline; print([m for m in ('tokenizers', 'triton') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(dp.__file__).parent, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]" and result.stderr == ""
