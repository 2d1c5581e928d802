"""The training engine: loss accounting, exact segments, durable checkpoints, bitwise resume, weights files, plans."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

import custom_kernels
import train_engine
from dataset_pipeline import PackedSequenceDataLoader, open_tokens, write_tokens
from hybrid_model import HybridLanguageModel, RecordedWork
from model_config import PRESETS, Config, CurriculumConfig, ModelConfig, PrecisionConfig, TrainConfig, preset
from train_engine import (
    CHIPS,
    DeviceFacts,
    TrainingEngine,
    TrainingError,
    TrainState,
    choose_preset,
    choose_recompute,
    describe_device,
    evaluate,
    load_weights,
    multiple_choice,
    newest_checkpoint,
    next_run_dir,
    plan,
    preflight,
    read_run_config,
    require_precision,
    save_weights,
    write_checkpoint,
)

ROOT = Path(__file__).resolve().parent.parent
FACTS = DeviceFacts(
    kind="cpu", name="CPU", memory=10**11, free=10**11, capability=None, chip=None, probed_peak=1e11
)
H200 = DeviceFacts(
    kind="cuda", name="NVIDIA H200", memory=150 * 10**9, free=149 * 10**9, capability=(9, 0), chip=CHIPS["H200"],
    probed_peak=0.0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tensors here are tiny: a second thread only waits, and slows the tests tenfold beside other work."""
    torch.set_num_threads(1)


def tiny_config(
    *, steps: int = 20, row: int = 16, rows: int = 2, micro: int = 32, vocab: int = 61, window: int = 8,
    average: float = 0.5, run_dir: Path | None = None, **train: object,
) -> Config:
    """Four layers, 64 wide, window shorter than a row."""
    model = ModelConfig(
        layers=4, recurrent_layers=3, attention_layers=1, hidden_dim=64, ffn_dim=96, num_query_heads=2, num_kv_heads=1,
        head_dim=32, recurrent_heads=2, recurrent_key_dim=32, recurrent_value_dim=32, sliding_window_size=window,
        anchor_tokens=4, max_context_len=256, max_output_len=256, vocab_size=vocab, hypersphere_radius=8.0,
        chunk_size=16, wide_tail_layers=1,
    )  # fmt: skip
    config = preset("nano")
    return replace(
        config,
        model=model,
        optimizer=replace(config.optimizer, matrix_lr_base=0.06 * 64 / 256),
        schedule=replace(config.schedule, total_tokens=steps * rows * row, average_fraction=average),
        curriculum=CurriculumConfig(tokens_per_step=rows * row, context=row),
        precision=PrecisionConfig(precision="fp32"),
        train=replace(
            config.train, micro_batch_tokens=micro, device="cpu", log_every=1, eval_tokens=200,
            run_dir=None if run_dir is None else str(run_dir), **train,
        ),
    )  # fmt: skip


def pattern(count: int, vocab: int = 61) -> list[int]:
    """Ids that a model can learn: steps of 7 with a jump at each 5th."""
    return [(7 * i + 11 * (i // 5)) % vocab for i in range(count)]


def token_file(folder: Path, documents: list[list[int]], masks: list[list[int]] | None = None, vocab: int = 61):
    path = folder / "tokens.bin"
    write_tokens(path, documents, vocab_size=vocab, masks=masks)
    return open_tokens(path)


def one_document(folder: Path, count: int = 900):
    return token_file(folder, [pattern(count)])


def many_documents(folder: Path):
    """Documents of 1 to 40 tokens, so that starts fall everywhere in rows and segments."""
    ids, documents, start = pattern(1500), [], 0
    for index in range(70):
        length = 1 + (index * 17) % 40
        documents.append(ids[start : start + length])
        start += length
    return token_file(folder, documents)


def make_engine(config: Config, tokens, **options: object) -> TrainingEngine:
    return TrainingEngine(config, tokens, facts=FACTS, log=options.pop("log", lambda line: None), **options)


def gradients(engine: TrainingEngine, step: int = 0) -> dict[str, torch.Tensor]:
    """Gradients of a whole step in float64."""
    engine.model.double()
    step_plan, batches = engine._load(step)
    for batch in batches:
        engine._accumulate(batch, step_plan)
    return {name: p.grad.clone() for name, p in engine.model.named_parameters()}


def assert_same_gradients(got: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], bound: float) -> None:
    for name, want in truth.items():
        error = (got[name] - want).norm() / want.norm().clamp_min(1e-30)
        assert error < bound, f"{name}: relative error {error:.2e} must be < {bound:.0e}"


# ---------------------------------------------------------------------------
# Segmented backward (R19)


def convolved(config: Config, width: int = 4, **shape: object) -> Config:
    return replace(config, model=replace(config.model, conv_width=width, **shape))


def segmented_gradients(tokens, segment: int, width: int, **shape: object) -> None:
    """Two rows of 48: whole in one micro-batch, against two micro-batches of segments."""
    configs = (convolved(tiny_config(row=48, micro=micro, window=24), width, **shape) for micro in (96, segment))
    whole, cut = (make_engine(config, tokens) for config in configs)
    for engine in (whole, cut):
        with torch.no_grad():
            for name, parameter in engine.model.named_parameters():
                if name.endswith("taps"):
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()))
    assert_same_gradients(gradients(cut), gradients(whole), 1e-12)


@pytest.mark.parametrize(
    "segment", [8, 13, 15], ids=["window is 3 segments", "uneven segments", "last without a draft place"]
)
@pytest.mark.parametrize("documents", ["one", "many"])
@pytest.mark.parametrize("width", [0, 4], ids=["plain", "four-taps"])
def test_segmented_gradients_equal_unsegmented_ones(tmp_path: Path, segment: int, documents: str, width: int) -> None:
    tokens = one_document(tmp_path) if documents == "one" else many_documents(tmp_path)
    segmented_gradients(tokens, segment, width)


@pytest.mark.parametrize("width", [2, 4])
def test_segments_shorter_than_the_taps_reach_hand_their_gradient_on(tmp_path: Path, width: int) -> None:
    # a draft loss needs segments longer than the draft head looks ahead
    segmented_gradients(many_documents(tmp_path), 2, width, draft_depth=0)


@pytest.mark.gpu
@pytest.mark.parametrize("documents", ["one", "many"])
@pytest.mark.parametrize("width", [0, 4], ids=["plain", "four-taps"])
def test_segmented_gradients_on_the_gpu(tmp_path: Path, documents: str, width: int) -> None:
    """Native float32 kernels and pinned carries against the unsegmented float64 gradients of the CPU."""
    tokens = one_document(tmp_path) if documents == "one" else many_documents(tmp_path)
    reference = make_engine(convolved(tiny_config(row=48, micro=96, window=24), width), tokens)
    engine = gpu_engine(convolved(tiny_config(row=48, micro=13, window=24), width), tokens)
    engine.model.load_state_dict(reference.model.state_dict())
    step_plan, batches = engine._load(0)
    for batch in batches:
        engine._accumulate(batch, step_plan)
    got = {name: p.grad.double().cpu() for name, p in engine.model.named_parameters()}
    # the decay gate's gradient is a difference of large sums: float32 leaves it a few 1e-5
    assert_same_gradients(got, gradients(reference), 2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("micro", [13, 48], ids=["segments", "recorded"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_is_bit_identical_on_the_gpu(tmp_path: Path, precision: str, micro: int) -> None:
    tokens = many_documents(tmp_path)
    config = replace(tiny_config(row=48, micro=micro, window=24), precision=PrecisionConfig(precision=precision))
    straight = gpu_engine(config, tokens)
    for _ in range(6):
        straight.train_step()
    first = gpu_engine(config, tokens)
    for _ in range(3):
        first.train_step()
    first.save(tmp_path / "checkpoints")
    second = gpu_engine(config, tokens)
    path, manifest, _ = newest_checkpoint(tmp_path / "checkpoints")
    second.load(path, manifest)
    for _ in range(3):
        second.train_step()
    for (name, want), got in zip(straight.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(want, got), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    "precision, recompute, width",
    [("fp32", "none", 0), ("bf16", "layer", 0), ("bf16", "ffn", 0), ("fp8", "none", 0), ("fp4-emulated", "none", 0),
     ("bf16", "none", 4)],
)  # fmt: skip
def test_recorded_steps_are_the_launched_ones_bit_for_bit(
    tmp_path: Path, precision: str, recompute: str, width: int
) -> None:
    """Over warm-up, conditioning and its end; three rows in micro-batches of two: two shapes are recorded."""
    tokens = many_documents(tmp_path)
    config = convolved(tiny_config(steps=12, row=48, rows=3, micro=96, window=24, recompute=recompute), width)
    if precision in ("fp8", "fp4-emulated"):
        wide = replace(config.model, hidden_dim=128, hypersphere_radius=11.314, ffn_dim=128, num_query_heads=4,
                       recurrent_heads=4)  # fmt: skip
        config = replace(config, model=wide)
    config = replace(config, precision=PrecisionConfig(precision=precision))
    launched, recorded = gpu_engine(config, tokens), gpu_engine(config, tokens)
    launched._recorded = RecordedWork(False)
    losses = []
    for step in range(12):
        for engine in (launched, recorded):
            engine.train_step()
        assert torch.equal(launched._sums, recorded._sums), step
        losses.append(launched._sums[0].item())
    # two shapes, and the optimizer without conditioning, whose first call dropped the graph with it
    assert len(recorded._recorded._graphs) == 3
    assert len(set(losses)) == 12  # every step read its own batch
    for (name, want), got in zip(launched.model.named_parameters(), recorded.model.parameters(), strict=True):
        assert torch.equal(want, got), name
    states = launched.optimizer.state_dict(), recorded.optimizer.state_dict()
    for (name, want), got in zip(states[0].items(), states[1].values(), strict=True):
        assert torch.equal(want, got), name


def gpu_engine(config: Config, tokens) -> TrainingEngine:
    config = replace(config, train=replace(config.train, device="cuda"))
    return TrainingEngine(config, tokens, facts=describe_device("cuda"), log=lambda line: None)


def test_truncating_the_carry_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = one_document(tmp_path)
    truth = gradients(make_engine(tiny_config(row=48, micro=96, window=24), tokens))
    cut = make_engine(tiny_config(row=48, micro=8, window=24), tokens)
    monkeypatch.setattr(train_engine, "_leaves", lambda carry: [])
    monkeypatch.setattr(train_engine, "_rebuild", lambda carry, leaves: None)
    got = gradients(cut)
    worst = max(((got[n] - truth[n]).norm() / truth[n].norm().clamp_min(1e-30)).item() for n in truth)
    assert worst > 1e-2


@pytest.mark.parametrize("recompute", ["ffn", "layer"])
def test_recomputation_changes_no_gradient(tmp_path: Path, recompute: str) -> None:
    tokens = many_documents(tmp_path)
    truth = gradients(make_engine(tiny_config(row=48, micro=96), tokens))
    engine = make_engine(tiny_config(row=48, micro=13, recompute=recompute), tokens)
    assert engine.recompute == recompute
    assert_same_gradients(gradients(engine), truth, 1e-12)


def test_a_carry_that_does_not_repeat_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny_config(row=48, micro=16), one_document(tmp_path))
    forward = engine.model.forward

    def drifting(*args, **kwargs):
        output = forward(*args, **kwargs)
        if torch.is_grad_enabled():
            return output
        return output._replace(carry=[type(layer)(*(x + 1e-7 for x in layer)) for layer in output.carry])

    monkeypatch.setattr(engine.model, "forward", drifting)
    with pytest.raises(TrainingError, match="carry must equal"):
        engine.train_step()


# ---------------------------------------------------------------------------
# Loss accounting (R20, B034, B036)


def uneven_mask(count: int) -> list[int]:
    """All targets supervised in every third row of 16, one in the others: step 0 reads one of each kind."""
    return [int((i - 1) // 16 % 3 == 1 or i % 16 == 5) for i in range(count)]


def test_micro_batches_and_ranks_share_one_denominator_b034(tmp_path: Path) -> None:
    tokens = token_file(tmp_path, [pattern(900)], [uneven_mask(900)])
    truth = gradients(make_engine(tiny_config(micro=32), tokens))
    assert_same_gradients(gradients(make_engine(tiny_config(micro=16), tokens)), truth, 1e-12)

    engine = make_engine(tiny_config(micro=16), tokens)
    engine.model.double()
    for rank in range(2):
        loader = PackedSequenceDataLoader(
            tokens, engine.loader.stages, seed=0, micro_batch_tokens=16, rank=rank, world_size=2
        )
        step_plan = loader.step_batches(0)
        for batch in step_plan:
            engine._accumulate(batch, step_plan)
    assert_same_gradients({n: p.grad for n, p in engine.model.named_parameters()}, truth, 1e-12)


def test_logged_loss_is_the_mean_over_supervised_tokens(tmp_path: Path) -> None:
    tokens = token_file(tmp_path, [pattern(900)], [uneven_mask(900)])
    engine = make_engine(tiny_config(micro=16), tokens)
    step_plan, batches = engine._load(0)
    total = right = 0.0
    with torch.no_grad():
        for batch in batches:
            hidden = engine.model(batch.inputs, doc_start=batch.doc_start).hidden
            logits = hidden @ engine.model.embedding.T * engine.config.model.logit_scale
            ce = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100, reduction="none")
            total += (ce * batch.loss_weights.flatten()).sum().item()
            right += ((logits.argmax(-1) == batch.targets) * batch.loss_weights).sum().item()
    engine.train_step()
    counts = [batch.supervised for batch in batches]
    assert engine.state.weight == step_plan.supervised == sum(counts) and len(set(counts)) == 2
    assert engine._sums[0].item() == pytest.approx(total, rel=1e-5)
    assert engine._sums[1].item() == right


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_only_draft_losses_that_exist_are_logged(tmp_path: Path, depth: int) -> None:
    config = tiny_config(steps=1, run_dir=tmp_path / "run")
    config = replace(config, model=replace(config.model, draft_depth=depth))
    make_engine(config, one_document(tmp_path)).run()
    record = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert len(record["draft_losses"]) == depth and all(loss > 1 for loss in record["draft_losses"])


def snapshot(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    parts = engine.model.state_dict(), engine.optimizer.state_dict(), engine.averager.state_dict()
    return {f"{i}/{name}": x.clone() for i, part in enumerate(parts) for name, x in part.items()}


def test_a_step_without_targets_moves_nothing_and_is_counted_b036(tmp_path: Path) -> None:
    rows = make_engine(tiny_config(average=1.0), one_document(tmp_path)).loader.step_batches(2).rows
    mask = [int(not any(row < i <= row + 16 for row in rows)) for i in range(900)]  # without the targets of step 2
    engine = make_engine(tiny_config(average=1.0), token_file(tmp_path, [pattern(900)], [mask]))
    engine.train_step()
    engine.train_step()
    before = snapshot(engine)
    engine.train_step()
    after = snapshot(engine)
    assert engine.state.empty_steps == 1 and engine.state.step == 3 and engine.state.tokens == 96
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    engine.train_step()
    assert not torch.equal(snapshot(engine)["0/embedding"], before["0/embedding"])


def test_steps_that_are_not_finite_move_nothing_and_stop_the_run(tmp_path: Path) -> None:
    config = tiny_config(run_dir=tmp_path / "run", save_every=1)
    engine = make_engine(config, one_document(tmp_path))
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    engine.model.layers[0].feed_forward.gate.weight.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(TrainingError, match="step 3: the gradient norm was not finite 3 steps in a row") as caught:
        engine.run()
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], p) for name, p in engine.model.named_parameters())
    assert newest_checkpoint(tmp_path / "run/checkpoints")[0].name == "step-00000002"


def test_first_loss_is_that_of_a_head_that_sees_its_input_r7(tmp_path: Path) -> None:
    ids = torch.randint(4096, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    config = preset("nano").with_values({"context": 128, "tokens_per_step": 512, "total_tokens": 512, "device": "cpu"})
    engine = make_engine(config, token_file(tmp_path, [ids], vocab=4096))
    engine.train_step()
    rho = (1 + 1 / 8) ** -4
    expected = math.log(4096 * math.exp(128 / 192) + math.exp(16 * rho))
    assert engine._sums[0].item() / engine.state.weight == pytest.approx(expected, abs=0.2)


def test_loss_falls(tmp_path: Path) -> None:
    lines: list[str] = []
    config = tiny_config(steps=30, row=32, rows=4, micro=128, run_dir=tmp_path / "run")
    validation = token_file(tmp_path, [pattern(200)])
    (tmp_path / "train").mkdir()
    engine = make_engine(config, one_document(tmp_path / "train", 4000), validation=validation, log=lines.append)
    result = engine.run()
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    ratios = [record[name] for record in records if record["kind"] == "train"
              for name in ("matrix_update_ratio", "adaptive_update_ratio")]  # fmt: skip
    assert ratios and all(1e-6 < ratio < 1 for ratio in ratios), "an update is a small part of the weights"
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    assert result.exit_code == 0 and result.step == 30 and len(losses) == 30
    assert losses[-1] < losses[0] - 1.0
    assert sum(r["kind"] == "validation" for r in records) == 1
    assert (tmp_path / "run/loss.png").read_bytes().startswith(b"\x89PNG")
    assert read_run_config(tmp_path / "run") == engine.config
    assert any(line.startswith("step 30/30  loss ") and "tok/s" in line and "eta 0:00:00" in line for line in lines)


# ---------------------------------------------------------------------------
# Resume, signals, kills (R24, B073, B079, B081)


def run_until(config: Config, tokens, stops: list[tuple[int, int]]) -> list[int]:
    """Run, sending a signal as each (step, signal) is logged, and resume until the end; return the exit codes."""
    codes, config = [], replace(config, train=replace(config.train, resume=False))
    for step, number in [*stops, (-1, 0)]:

        def log(line: str, step: int = step, number: int = number) -> None:
            if line.startswith(f"step {step}/"):
                os.kill(os.getpid(), number)

        codes.append(make_engine(config, tokens, log=log).run().exit_code)
        config = replace(config, train=replace(config.train, resume=True))
    return codes


def run_results(folder: Path) -> tuple[list, bytes, dict[str, str]]:
    """What must not depend on interruptions: losses, weights file, digests of the last checkpoint's tensors."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [(r["step"], r["tokens"], r["loss"], r["draft_losses"], r["accuracy"]) for r in records]
    digests = newest_checkpoint(folder / "checkpoints")[1]["sha256"]
    # config.json's run_dir differs between the two folders, and so does the description in the weights file
    tensors = load_file(folder / "final.safetensors")
    weights = b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))
    return losses, weights, {name: value for name, value in digests.items()}


@pytest.mark.parametrize("log_every, width", [(1, 0), (3, 4)])
def test_resume_is_bit_identical_b073(tmp_path: Path, log_every: int, width: int) -> None:
    tokens = many_documents(tmp_path)
    results = []
    for name, stops in {
        "straight": [],
        "10+10": [(10, signal.SIGINT)],
        "7+7+6": [(7, signal.SIGTERM), (14, signal.SIGTERM)],
    }.items():
        config = convolved(tiny_config(run_dir=tmp_path / name, micro=16, average=0.7), width)
        config = replace(config, train=replace(config.train, log_every=log_every))
        if log_every == 3:
            stops = [(step // 3 * 3, number) for step, number in stops]
        codes = run_until(config, tokens, stops)
        assert codes == [128 + number for _, number in stops] + [0]
        results.append(run_results(tmp_path / name))
    assert results[0] == results[1] == results[2]


def test_a_resumed_ladder_climbs_the_same_tiers(tmp_path: Path) -> None:
    """Row lengths 16 to 128, the longest in segments, from the configuration that the run folder holds."""
    tokens = one_document(tmp_path, 2000)
    ladder = {"context": None, "length_divisor": 128, "total_tokens": 3_333}
    ladder |= {"tokens_per_step": 64, "micro_batch_tokens": 64}
    results = []
    for name, stops in {"straight": [], "cut": [30]}.items():
        config = tiny_config(run_dir=tmp_path / name).with_values(ladder)
        run_until(config, tokens, [(step, signal.SIGINT) for step in stops])
        saved = read_run_config(tmp_path / name)
        assert saved == config
        results.append(run_results(tmp_path / name))
        assert {stage.length for stage in make_engine(saved, tokens).loader.stages} >= {16, 32, 64, 128}
    assert results[0] == results[1]


def test_forgetting_the_optimizer_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = one_document(tmp_path)
    run_until(tiny_config(run_dir=tmp_path / "straight"), tokens, [])
    monkeypatch.setattr(train_engine.DualSpectralOptimizer, "load_state_dict", lambda self, state: None)
    run_until(tiny_config(run_dir=tmp_path / "cut"), tokens, [(10, signal.SIGINT)])
    assert run_results(tmp_path / "straight")[0] != run_results(tmp_path / "cut")[0]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, write, seen = many_documents(tmp_path), train_engine.write_checkpoint, []
    engine = make_engine(tiny_config(steps=9, run_dir=tmp_path / "run", save_every=4), tokens)
    other = make_engine(tiny_config(steps=9, run_dir=tmp_path / "run", save_every=4), tokens)
    for _ in range(4):
        other.train_step()
    want = {name: value.clone() for name, value in other.model.state_dict().items()}

    def slow(folder: Path, step: int, tensors: dict, *rest: object) -> Path:
        deadline = time.monotonic() + 20
        while engine.state.step < min(step + 2, 9) and time.monotonic() < deadline:
            time.sleep(0.005)
        seen.append((step, engine.state.step))
        if step == 4:
            assert all(torch.equal(value, want[name]) for name, value in tensors["model"].items()), "of a later step"
        return write(folder, step, tensors, *rest)

    monkeypatch.setattr(train_engine, "write_checkpoint", slow)
    assert engine.run().exit_code == 0
    assert [step for step, _ in seen] == [4, 8, 9] and seen[0][1] >= 6
    # a fault of the write ends the run with its line, and the weights of that run are not written
    monkeypatch.setattr(train_engine, "write_checkpoint", lambda *_: (_ for _ in ()).throw(TrainingError("no room")))
    failing = make_engine(tiny_config(steps=9, run_dir=tmp_path / "other", save_every=4), tokens)
    with pytest.raises(TrainingError, match="no room"):
        failing.run()
    assert failing.state.step < 9 and not (tmp_path / "other/final.safetensors").exists()


def test_resume_inside_a_log_interval_keeps_its_sums(tmp_path: Path) -> None:
    tokens = one_document(tmp_path)
    first = make_engine(tiny_config(), tokens)
    for _ in range(4):
        first.train_step()
    path = first.save(tmp_path / "checkpoints")
    second = make_engine(tiny_config(), tokens)
    second.load(path, newest_checkpoint(tmp_path / "checkpoints")[1])
    assert second.state == first.state and torch.equal(second._sums, first._sums)
    assert all(torch.equal(x, y) for x, y in zip(snapshot(first).values(), snapshot(second).values(), strict=True))
    assert TrainState.from_state_dict(json.loads(json.dumps(first.state.state_dict()))) == first.state


def test_last_step_is_saved_off_the_interval_b081(tmp_path: Path) -> None:
    config = tiny_config(steps=10, run_dir=tmp_path / "run", save_every=4)
    result = make_engine(config, one_document(tmp_path)).run()
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000008", "step-00000010"]
    assert result.weights == tmp_path / "run/final.safetensors" and result.weights.is_file()


def test_finished_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    config = tiny_config(steps=4, run_dir=tmp_path / "run")
    tokens = one_document(tmp_path)
    make_engine(config, tokens).run()
    before = load_file(tmp_path / "run/final.safetensors")
    result = make_engine(replace(config, train=replace(config.train, resume=True)), tokens).run()
    after = load_file(tmp_path / "run/final.safetensors")
    assert result.step == 4 and all(torch.equal(before[name], after[name]) for name in before)


def test_sigkill_at_any_time_then_resume(tmp_path: Path) -> None:
    tokens = one_document(tmp_path)
    config = tiny_config(run_dir=tmp_path / "killed", save_every=1)
    run_until(replace(config, train=replace(config.train, run_dir=str(tmp_path / "straight"))), tokens, [])
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(f"""
        import sys; sys.path[:0] = {[str(ROOT), str(ROOT / "tests")]!r}
        from pathlib import Path
        from dataclasses import replace
        import torch; torch.set_num_threads(1)
        from test_train_engine import tiny_config, make_engine, open_tokens
        folder = Path({str(tmp_path)!r})
        config = tiny_config(run_dir=folder / "killed", save_every=1, resume=bool(int(sys.argv[1])))
        make_engine(config, open_tokens(folder / "tokens.bin"), log=lambda line: print(line, flush=True)).run()
    """))
    for attempt, lines in enumerate((9, 14)):
        child = subprocess.Popen([sys.executable, str(script), str(attempt)], stdout=subprocess.PIPE, text=True)
        seen = 0
        for line in child.stdout:
            seen += line.startswith(("step ", "saved "))
            if seen == lines:
                break
        time.sleep(0.003 * attempt)
        child.kill()
        child.wait()
    config = replace(config, train=replace(config.train, resume=True))
    assert make_engine(config, tokens).run().exit_code == 0
    assert run_results(tmp_path / "killed") == run_results(tmp_path / "straight")
    assert not list((tmp_path / "killed").rglob("*.tmp-*"))


def small_checkpoint(folder: Path, step: int, keep: int = 2) -> Path:
    tensors = {"model": {"a": torch.full((5,), float(step))}, "extra": {"b": torch.arange(3)}}
    return write_checkpoint(folder, step, tensors, {"state": {"step": step}}, keep)


def test_exit_at_every_durable_call_leaves_a_whole_checkpoint_b079(tmp_path: Path) -> None:
    calls = [(os, "fsync"), (os, "rename"), (os, "replace"), (shutil, "rmtree"), (train_engine, "save_file")]

    def dies_at(wanted: int, after: bool) -> bool:
        """Fork, save step 12 over 4 and 8, and exit before or after the wanted call; False if there were fewer."""
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        count = 0

        def counted(call: Callable) -> Callable:
            def wrapper(*args, **kwargs):
                nonlocal count
                count += 1
                if count == wanted and not after:
                    os._exit(9)
                result = call(*args, **kwargs)
                if count == wanted:
                    os._exit(9)
                return result

            return wrapper

        for module, name in calls:
            setattr(module, name, counted(getattr(module, name)))
        small_checkpoint(folder, 12)
        os._exit(0)

    stages, after = 0, False
    for after in (False, True):
        for stages in range(1, 40):
            folder = tmp_path / f"{after}-{stages}"
            small_checkpoint(folder, 4)
            small_checkpoint(folder, 8)
            died = dies_at(stages, after)
            path, manifest, skipped = newest_checkpoint(folder)
            assert path.name in ("step-00000008", "step-00000012") and not skipped
            assert load_file(path / "model.safetensors")["a"][0] == manifest["step"]
            if not died:
                break
        # two files, manifest, folder, rename, parent, removal of the oldest
        assert stages > 8


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete"])
@pytest.mark.parametrize("name", ["model.safetensors", "extra.safetensors", "manifest.json"])
def test_damaged_checkpoint_falls_back_by_name(tmp_path: Path, name: str, damage: str) -> None:
    older, newer = small_checkpoint(tmp_path, 4), small_checkpoint(tmp_path, 8)
    harm(newer / name, damage)
    path, _, skipped = newest_checkpoint(tmp_path)
    assert path == older and [p for p, _ in skipped] == [newer]
    assert name in skipped[0][1] or name == "manifest.json"
    harm(older / name, damage)
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole") as caught:
        newest_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def harm(path: Path, damage: str) -> None:
    data = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
        return
    if damage == "flip":
        # of a manifest: a bit of the first digest
        place = data.index(b'": "') + 8 if path.suffix == ".json" else len(data) - 3
        data[place] ^= 1
    path.write_bytes({"flip": data, "truncate": data[: len(data) // 2], "empty": b""}[damage])


def test_checkpoint_under_another_step_or_swapped_files_is_refused(tmp_path: Path) -> None:
    older, newer = small_checkpoint(tmp_path, 4), small_checkpoint(tmp_path, 8)
    shutil.copytree(older, tmp_path / "step-00000012")
    assert newest_checkpoint(tmp_path)[0] == newer
    (newer / "model.safetensors").rename(newer / "x")
    (newer / "extra.safetensors").rename(newer / "model.safetensors")
    (newer / "x").rename(newer / "extra.safetensors")
    path, _, skipped = newest_checkpoint(tmp_path)
    assert path == older and "is of step 4" in skipped[0][1] and "differs" in skipped[1][1]


def test_resume_skips_a_damaged_checkpoint_aloud(tmp_path: Path) -> None:
    tokens = one_document(tmp_path)
    run_until(tiny_config(run_dir=tmp_path / "straight", save_every=2), tokens, [])
    config = tiny_config(run_dir=tmp_path / "run", save_every=2, resume=True)
    first = replace(config, train=replace(config.train, resume=False))

    def stop(line: str) -> None:
        if line.startswith("step 10/"):
            os.kill(os.getpid(), signal.SIGINT)

    make_engine(first, tokens, log=stop).run()
    harm(tmp_path / "run/checkpoints/step-00000010/optimizer.safetensors", "flip")
    lines: list[str] = []
    make_engine(config, tokens, log=lines.append).run()
    assert any("skipped step-00000010: optimizer.safetensors differs" in line for line in lines)
    assert any("at step 8" in line for line in lines)
    assert run_results(tmp_path / "run") == run_results(tmp_path / "straight")
    assert (tmp_path / "run/checkpoints/damaged-step-00000010").is_dir()


@pytest.mark.parametrize("fault", ["full", "almost full", "read-only"])
def test_a_save_that_fails_keeps_the_earlier_checkpoint_b079(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    small_checkpoint(tmp_path, 4)
    if fault == "full":

        def fail(*args, **kwargs):
            Path(args[1]).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(train_engine, "save_file", fail)
    elif fault == "almost full":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    else:

        def refuse(*args, **kwargs):
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(Path, "mkdir", refuse)
    message = r"checkpoint of step 8 could not be written .* step-00000004 is kept"
    with pytest.raises(TrainingError, match=message) as caught:
        small_checkpoint(tmp_path, 8)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]
    assert newest_checkpoint(tmp_path)[0].name == "step-00000004"


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        small_checkpoint(tmp_path, step, keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003", "step-00000004"]


# ---------------------------------------------------------------------------
# Run folder


def test_run_folder_refusals(tmp_path: Path) -> None:
    tokens = one_document(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"must be empty, got 1 entries \(notes.txt"):
        make_engine(tiny_config(run_dir=tmp_path / "used"), tokens).run()
    with pytest.raises(ValueError, match="holds no run to resume"):
        make_engine(tiny_config(run_dir=tmp_path / "absent", resume=True), tokens).run()
    assert not (tmp_path / "absent").exists()
    folder = train_engine._RunFolder(tmp_path / "held", resume=False)
    with pytest.raises(ValueError, match="in use by another process"):
        train_engine._RunFolder(tmp_path / "held", resume=False)
    folder.close()
    train_engine._RunFolder(tmp_path / "held", resume=False).close()


def test_resume_refuses_another_run(tmp_path: Path) -> None:
    tokens = one_document(tmp_path)
    config = tiny_config(steps=4, run_dir=tmp_path / "run")
    make_engine(config, tokens).run()
    changed = tiny_config(steps=4, run_dir=tmp_path / "run", resume=True, seed=1)
    with pytest.raises(ValueError, match=r"must keep train.seed = 0, got 1"):
        make_engine(changed, tokens).run()
    (tmp_path / "other").mkdir()
    other = one_document(tmp_path / "other", 901)
    with pytest.raises(ValueError, match=r"must keep data.count = 900, got 901"):
        make_engine(tiny_config(steps=4, run_dir=tmp_path / "run", resume=True), other).run()


def test_run_names_count_up(tmp_path: Path) -> None:
    assert next_run_dir("nano", tmp_path) == tmp_path / "nano-001"
    for name in ("nano-001", "nano-007", "nano-x", "nano-old-009"):
        (tmp_path / name).mkdir()
    assert next_run_dir("nano", tmp_path) == tmp_path / "nano-008"


def test_torn_metrics_are_dropped_on_resume(tmp_path: Path) -> None:
    folder = train_engine._RunFolder(tmp_path / "run", resume=False)
    for step in (1, 2, 3):
        folder.append({"step": step, "loss": math.nan})
    with open(folder.metrics, "a") as file:
        file.write('{"step": 4, "lo')
    folder.truncate(2)
    assert folder.metrics.read_text() == '{"loss": null, "step": 1}\n{"loss": null, "step": 2}\n'
    folder.close()


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    tokens = token_file(tmp_path, [[70, 1, 2] * 40], vocab=71)
    with pytest.raises(ValueError, match="holds id 70, the model's vocabulary is 61"):
        make_engine(tiny_config(steps=2), tokens)


# ---------------------------------------------------------------------------
# Starting from the weights of an earlier run


def tuned_config(weights: Path, run_dir: Path | None = None, **train: object) -> Config:
    return tiny_config(steps=6, run_dir=run_dir, initial_weights=str(weights), **train)


def other_text(folder: Path):
    """A second corpus: the rule of the first, backwards."""
    folder.mkdir()
    return token_file(folder, [pattern(300)[::-1]])


def test_a_run_starts_from_the_weights_of_a_file(tmp_path: Path) -> None:
    first = tiny_config(steps=30, run_dir=tmp_path / "first")
    weights = make_engine(first, one_document(tmp_path)).run().weights
    stored, lines = load_file(weights), []
    config = tuned_config(weights, tmp_path / "second", seed=5)
    engine = make_engine(config, one_document(tmp_path), log=lines.append)
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, stored[name]), name
        assert parameter.requires_grad, name
    result = engine.run()
    # the text of the first run is known at once, and its weights go on moving
    assert json.loads((tmp_path / "second/metrics.jsonl").read_text().splitlines()[0])["loss"] < 3.0 < math.log(61) - 1
    tuned = load_file(result.weights)
    assert all(not torch.equal(tuned[name], stored[name]) for name in stored)
    checksum = train_engine.read_weights_info(weights)["info_crc32"]
    assert f"start: weights of {weights}, trained on 960 tokens, checksum {checksum:08x}" in lines
    assert read_run_config(tmp_path / "second").train.initial_weights == str(weights)
    # a file that is passed on names no path of this machine
    with safe_open(result.weights, "pt") as file:
        assert str(tmp_path) not in file.metadata()["description"]


def test_a_started_run_resumes_bit_for_bit_without_the_first_weights(tmp_path: Path) -> None:
    _, weights = saved_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"x": 1}')
    tokens = one_document(tmp_path)
    run_until(tuned_config(weights, tmp_path / "straight"), tokens, [])
    cut = tuned_config(weights, tmp_path / "cut")

    def log(line: str) -> None:
        if line.startswith("step 3/"):
            os.kill(os.getpid(), signal.SIGINT)

    assert make_engine(cut, tokens, log=log).run().exit_code == 130
    weights.rename(tmp_path / "elsewhere.safetensors")
    resumed = replace(cut, train=replace(cut.train, resume=True))
    assert make_engine(resumed, tokens).run().exit_code == 0
    assert run_results(tmp_path / "cut") == run_results(tmp_path / "straight")
    other = replace(resumed, train=replace(resumed.train, initial_weights=None))
    with pytest.raises(ValueError, match=r"must keep train.initial_weights = .*final.safetensors, got None"):
        make_engine(other, tokens).run()


def test_a_started_run_that_was_killed_before_its_first_checkpoint_starts_from_them_again(tmp_path: Path) -> None:
    _, weights = saved_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"x": 1}')
    tokens, config, lines = one_document(tmp_path), tuned_config(weights, tmp_path / "run"), []
    run_until(config, tokens, [])
    whole = run_results(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints")
    resumed = replace(config, train=replace(config.train, resume=True))
    assert make_engine(resumed, tokens, log=lines.append).run().exit_code == 0
    assert run_results(tmp_path / "run") == whole
    assert sum(line.startswith("start: weights of ") for line in lines) == 1


def test_weights_of_another_shape_or_tokenizer_are_refused_before_any_file_is_made(tmp_path: Path) -> None:
    _, weights = saved_model(tmp_path)  # its tokenizer is {"x": 1}
    config = tuned_config(weights, tmp_path / "run")
    tokens = one_document(tmp_path)
    stored = load_file(weights)

    def refused(words: str, **model: object) -> None:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ValueError, match=words) as caught:
            make_engine(config.with_values(model), tokens).run()
        assert "\n" not in str(caught.value) and sorted(tmp_path.rglob("*")) == before

    refused("has no tokenizer.json, but .*final.safetensors has one")
    (tmp_path / "tokenizer.json").write_text('{"x": 2}')
    refused("tokenizer.json in .* differs from that of .*final.safetensors; make the data by `prepare --tokenizer`")
    (tmp_path / "tokenizer.json").write_text('{ "x":  1}')
    refused("has ffn_dim 96, the run has 128; leave --preset", ffn_dim=128)
    # as many numbers, another function
    refused("has num_kv_heads 1, the run has 2", num_kv_heads=2)
    refused("has draft_depth 2, the run has 0", draft_depth=0)
    refused("wavelengths stretched by 1, the run by 2; pass --rope-stretch 1", rope_stretch=2.0)
    refused("does not exist", initial_weights=str(tmp_path / "gone.safetensors"))
    # what no tensor depends on may change
    free = config.with_values({"sliding_window_size": 16, "max_context_len": 512, "chunk_size": 32})
    model = make_engine(free, tokens).model
    assert all(torch.equal(parameter, stored[name]) for name, parameter in model.named_parameters())


# ---------------------------------------------------------------------------
# Weights file (R21, B055)


def saved_model(tmp_path: Path, width: int = 0) -> tuple[TrainingEngine, Path]:
    engine = make_engine(convolved(tiny_config(), width), one_document(tmp_path))
    engine.train_step()
    path = tmp_path / "final.safetensors"
    save_weights(path, engine._average(), engine.config, tokenizer_json='{"x": 1}', eos_id=3, step=1, tokens=32)
    return engine, path


@pytest.mark.parametrize("width", [0, 4])
def test_weights_file_reads_back_to_identical_logits_b055(tmp_path: Path, width: int) -> None:
    engine, path = saved_model(tmp_path, width)
    model, info = load_weights(path)
    ids = torch.tensor([pattern(30)])
    with torch.no_grad():
        assert torch.equal(model(ids).hidden, engine.model(ids).hidden)
    assert torch.equal(model.embedding, engine.model.embedding)
    assert (info["tokenizer_json"], info["eos_id"], info["step"], info["tokens"]) == ('{"x": 1}', 3, 1, 32)
    # everything but the settings of the machine that trained
    assert info["config"] == replace(engine.config, train=TrainConfig())
    assert info["parameters"] == engine.config.model.total_parameters
    with safe_open(path, "pt") as file:
        assert list(file.metadata()) == ["description"]
        assert sum("embedding" in name for name in file.keys()) == 1
    again = tmp_path / "again.safetensors"
    save_weights(again, engine._average(), engine.config, tokenizer_json='{"x": 1}', eos_id=3, step=1, tokens=32)
    assert again.read_bytes() == path.read_bytes()


def test_files_older_than_a_setting_take_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weights file and a checkpoint whose configuration does not name the convolution have none."""
    config = tiny_config(steps=4, run_dir=tmp_path / "run", save_every=1)

    def older(values: Config) -> dict:
        found = asdict(values)
        del found["model"]["conv_width"]
        return found

    as_then = {Config: older}
    monkeypatch.setattr(train_engine, "asdict", lambda value: as_then.get(type(value), asdict)(value))
    engine, path = saved_model(tmp_path)
    run_until(config, open_tokens(tmp_path / "tokens.bin"), [])
    monkeypatch.undo()
    assert "conv_width" not in newest_checkpoint(tmp_path / "run/checkpoints")[1]["config"]["model"]
    model, info = load_weights(path)
    assert info["config"].model.conv_width == 0 and torch.equal(model.embedding, engine.model.embedding)
    resumed = replace(read_run_config(tmp_path / "run"), train=replace(config.train, resume=True))
    tokens = open_tokens(tmp_path / "tokens.bin")
    assert make_engine(resumed, tokens).run().step == 4
    with pytest.raises(ValueError, match=r"must keep model.conv_width = 0, got 4"):
        make_engine(convolved(resumed), tokens).run()
    # one that computed another function is no start
    for path in (tmp_path / "run/checkpoints").glob("step-*/manifest.json"):
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps(manifest | {"format_version": 1}))
    with pytest.raises(ValueError, match=r"format version 1, this program goes on from \d+; start again"):
        make_engine(resumed, tokens).run()


@pytest.mark.parametrize("width", [0, 4])
def test_matrices_can_be_read_in_16_bit(tmp_path: Path, width: int) -> None:
    engine, path = saved_model(tmp_path, width)
    model, _ = load_weights(path, dtype=torch.bfloat16)
    for spec in model.parameter_table():
        wide = spec.role in ("vector", "gate")
        assert spec.parameter.dtype == (torch.float32 if wide else torch.bfloat16), spec.name
    ids = torch.tensor([pattern(9)])
    with torch.no_grad():
        error = (model(ids).hidden - engine.model(ids).hidden).norm() / engine.model(ids).hidden.norm()
    assert 1e-5 < error < 0.05
    # a CPU has no 16-bit path: the same weights compute in float32 there
    assert load_weights(path, precision=PrecisionConfig(precision="bf16"))[0].compute_type == torch.float32


def test_bf16_on_a_cpu_computes_in_fp32_and_says_so(tmp_path: Path) -> None:
    config = replace(tiny_config(), precision=PrecisionConfig(precision="bf16"))
    engine = make_engine(config, one_document(tmp_path))
    engine.train_step()
    assert engine.state.step == 1 and "computing in fp32" in engine.notes[0]


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete"])
def test_damaged_weights_are_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    _, path = saved_model(tmp_path)
    harm(path, damage)
    with pytest.raises(ValueError, match=r"final\.safetensors") as caught:
        load_weights(path)
    assert "\n" not in str(caught.value)


def test_a_bit_of_the_description_is_seen(tmp_path: Path) -> None:
    _, path = saved_model(tmp_path)
    data = path.read_bytes()
    at = data.index(b'eos_id\\": 3')
    path.write_bytes(data[: at + 10] + b"4" + data[at + 11 :])
    with pytest.raises(ValueError, match="description is damaged"):
        load_weights(path)


def test_weights_of_a_model_with_normalised_memory_output_are_refused(tmp_path: Path, monkeypatch) -> None:
    """Version 1 has the same tensors and computes something else: its hidden states differ by a fifth."""
    with monkeypatch.context() as patch:
        patch.setattr(train_engine, "FORMAT_VERSION", 1)
        _, path = saved_model(tmp_path)
    with pytest.raises(ValueError, match=r"has format version 1, this program reads 3; train again"):
        load_weights(path)


def test_missing_extra_and_foreign_tensors_are_named(tmp_path: Path) -> None:
    _, path = saved_model(tmp_path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    for change, message in (
        ({"final_norm.offset": None}, "lacks tensor final_norm.offset"),
        ({"head": torch.zeros(1)}, "has the unknown tensor head"),
        ({"final_norm.offset": torch.zeros(7)}, r"final_norm.offset must be \(64,\) float32, got \(7,\)"),
    ):
        changed = {name: x for name, x in {**tensors, **change}.items() if x is not None}
        save_file(changed, path, metadata)
        with pytest.raises(ValueError, match=message):
            load_weights(path)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="not a weights file of this program"):
        load_weights(path)


def test_exported_weights_are_the_terminal_average_b066(tmp_path: Path) -> None:
    config = tiny_config(steps=12, average=0.5, run_dir=tmp_path / "run")
    engine = make_engine(config, one_document(tmp_path))
    history = []
    train_step = engine.train_step

    def recorded() -> None:
        train_step()
        history.append(engine.model.embedding.detach().double().clone())

    engine.train_step = recorded
    engine.run()
    # the last half: steps 7 to 12, weight (1 - e^{-n/tau}) e^{-(tokens to the end)/tau}
    share = [math.exp((i - 11) / (6 / 3)) for i in range(6, 12)]
    truth = sum(w * x for w, x in zip(share, history[6:], strict=True)) / sum(share)
    got = load_file(tmp_path / "run/final.safetensors")["embedding"]
    assert (got - truth).abs().max() < 1e-5
    assert (got - history[-1]).abs().max() > 1e-3


# ---------------------------------------------------------------------------
# Evaluation


@pytest.mark.parametrize("width", [0, 4])
def test_evaluate_equals_a_direct_computation_and_segments_change_nothing(tmp_path: Path, width: int) -> None:
    tokens = many_documents(tmp_path)
    engine = make_engine(convolved(tiny_config(), width), tokens)
    engine.train_step()
    model = engine.model
    whole = evaluate(model, tokens, 48, split="training", micro_batch_tokens=96)
    cut = evaluate(model, tokens, 48, micro_batch_tokens=11)
    assert whole.loss == pytest.approx(cut.loss, rel=1e-5) and whole.targets == cut.targets == tokens.supervised
    assert whole.bits_per_byte is None and whole.split == "training"
    total = sum(row[2] * row[3] for row in whole.by_position)
    assert total / whole.targets == pytest.approx(whole.loss, rel=1e-6)
    assert [row[:2] for row in whole.by_position] == [(0, 16), (16, 64)]
    loss = count = 0.0
    with torch.no_grad():
        for batch in train_engine.validation_batches(tokens, 48):
            hidden = model(batch.inputs, doc_start=batch.doc_start).hidden
            logits = (hidden @ model.embedding.T * model.config.logit_scale).flatten(0, 1)
            loss += F.cross_entropy(logits, batch.targets.flatten(), ignore_index=-100, reduction="sum").item()
            count += (batch.targets >= 0).sum().item()
    assert whole.loss == pytest.approx(loss / count, rel=1e-5)
    assert evaluate(model, tokens, 48, stop=lambda: True) is None


def test_multiple_choice_takes_the_best_mean(tmp_path: Path) -> None:
    model = make_engine(tiny_config(), one_document(tmp_path)).model.eval()
    questions = [("abc", ["d", "efgh"]), ("x", ["yz", "q", "rr"])]

    def encode(text: str) -> list[int]:
        return [ord(c) % 61 for c in text]

    def mean(prompt: str, choice: str) -> float:
        ids, start = encode(prompt + choice), len(prompt)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).hidden[0] @ model.embedding.T * model.config.logit_scale
        return logits.log_softmax(-1)[torch.arange(start - 1, len(ids) - 1), ids[start:]].mean().item()

    best = [max(range(len(c)), key=lambda i, p=p, c=c: mean(p, c[i])) for p, c in questions]
    path = tmp_path / "choices.jsonl"
    lines = [{"prompt": p, "choices": c, "answer": b} for (p, c), b in zip(questions, best, strict=True)]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert multiple_choice(model, encode, path) == (1.0, 2)
    lines[0]["answer"] = 1 - best[0]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert multiple_choice(model, encode, path) == (0.5, 2)
    path.write_text('{"prompt": "a", "choices": ["b"], "answer": 0}')
    with pytest.raises(ValueError, match=r"choices.jsonl:1: needs two choices"):
        multiple_choice(model, encode, path)


# ---------------------------------------------------------------------------
# Device, plan, pre-flight


@pytest.mark.parametrize(
    ("precision", "capability", "refused"),
    [
        ("fp32", (7, 5), False), ("bf16", (8, 0), False), ("fp8", (8, 0), True), ("fp8", (8, 9), False),
        ("fp4", (9, 0), True), ("fp4", (10, 0), False), ("fp4", (10, 3), False), ("fp4-emulated", (8, 0), False),
        ("bf16", None, False), ("fp8", None, True), ("fp4", None, True), ("fp4-emulated", None, False),
    ],
)  # fmt: skip
def test_precisions_are_refused_by_name(precision: str, capability: tuple[int, int] | None, refused: bool) -> None:
    facts = replace(H200 if capability else FACTS, capability=capability)
    if refused:
        with pytest.raises(ValueError, match=f"precision {precision} needs matrix units of sm_"):
            require_precision(precision, facts)
    else:
        note = require_precision(precision, facts)
        assert (note is not None) == (precision == "fp4-emulated" or (precision, capability) == ("bf16", None))


def test_capability_line() -> None:
    facts = describe_device("cpu")
    assert facts.kind == "cpu" and facts.free > 0 and facts.probed_peak > 1e8
    assert "matrix units: fp32; bf16 falls back to fp32" in facts.describe()
    assert "sm_90" in H200.describe() and "fp32, bf16, fp8; fp4 only as fp4-emulated" in H200.describe()
    with pytest.raises(ValueError, match="device must be auto"):
        describe_device("tpu")


def test_memory_that_caches_files_is_free(tmp_path: Path) -> None:
    table = tmp_path / "meminfo"
    table.write_text("MemTotal:       24689756 kB\nMemFree:          231000 kB\nMemAvailable:   22343472 kB\n")
    assert train_engine._free_memory(table) == 22343472 * 1024
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    assert train_engine._free_memory(tmp_path / "none") == pytest.approx(free, rel=0.5)


def test_plan_of_the_full_model_r1() -> None:
    costs = plan(preset("full"), H200)
    assert costs.matrix_parameters == 5_497_569_280 and costs.parameters == preset("full").model.total_parameters
    text = "\n".join(costs.describe())
    assert "4,960,153,600" in text and "5,497,569,280" in text and "multiple of 7" in text
    assert costs.recompute == "layer"
    # weights, gradients, momentum and average of 5.6e9 parameters at 4 bytes each, and activations
    assert 90e9 < costs.training_bytes < 140e9
    assert costs.checkpoint_bytes > 12 * costs.parameters
    measured = plan(preset("full"), H200, tokens_per_second=10_000.0)
    assert measured.hours == pytest.approx(250e6 / 10_000 / 3600)


@pytest.mark.parametrize("name", list(PRESETS))
def test_recomputing_more_needs_less_memory(name: str) -> None:
    config = preset(name)
    plans = [plan(replace(config, train=replace(config.train, recompute=c)), H200) for c in ("none", "ffn", "layer")]
    needed = [p.training["activations and cross entropy"] for p in plans]
    assert needed[0] > needed[1] > needed[2]
    assert choose_recompute(preset("nano"), H200) == "none"


@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize("recompute", ["none", "ffn"])
def test_planned_activations_are_what_autograd_keeps(tmp_path: Path, recompute: str, width: int) -> None:
    ids = torch.randint(4096, (2000,), generator=torch.Generator().manual_seed(1)).tolist()
    values = {"context": 256, "tokens_per_step": 512, "total_tokens": 512, "device": "cpu", "conv_width": width}
    config = preset("nano").with_values(values)
    engine = make_engine(config, token_file(tmp_path, [ids], vocab=4096))
    (batch,) = engine._load(0)[1]
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        engine.model(batch.inputs, doc_start=batch.doc_start, recompute=recompute)
    weights = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    found = sum(x.untyped_storage().nbytes() for pointer, x in kept.items() if pointer not in weights) / batch.tokens
    planned = train_engine._SAVED_RATIO["cpu"] * train_engine._activation_bytes(config, recompute)
    assert planned == pytest.approx(found, rel=0.25)


@pytest.mark.parametrize("recompute, width", [("none", 0), ("none", 4), ("ffn", 0)])
def test_planned_activations_are_what_the_kernels_keep(
    recompute: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launchers allocate and save as on a GPU, in bf16, while no kernel runs."""
    jit = pytest.importorskip("triton.runtime.jit")
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *args, grid, warmup, **options: None)
    monkeypatch.setattr(custom_kernels, "_uses_kernel", lambda x: True)
    monkeypatch.setattr(custom_kernels, "_require", lambda condition, message: None)
    monkeypatch.setattr(HybridLanguageModel, "compute_type", property(lambda self: torch.bfloat16))
    # 704 tokens: no side of a matrix, so that 16-bit copies of matrices are told from activations
    config, tokens = preset("small").with_values({"conv_width": width, "vocab_size": 512}), 704
    model = HybridLanguageModel(config.model, config.precision)
    model.init_weights(0)
    kept: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        model(ids, doc_start=torch.zeros(1, tokens, dtype=torch.int32), recompute=recompute)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sides = {config.model.hidden_dim, config.model.ffn_dim}
    found = sum(
        x.untyped_storage().nbytes() for pointer, x in kept.items()
        if pointer not in weights and not (x.dim() == 2 and {x.shape[0], x.shape[1]} <= sides)
    )  # fmt: skip
    planned = train_engine._SAVED_RATIO["cuda"] * train_engine._activation_bytes(config, recompute)
    assert planned == pytest.approx(found / tokens, rel=0.05)


def test_planned_operations_of_the_draft_head_are_those_done(tmp_path: Path) -> None:
    """Its own matrices and, far larger in a small model, the logits of both depths, at every fourth place."""
    tokens = token_file(tmp_path, [[(13 * i) % 4096 for i in range(2000)]], vocab=4096)
    done, planned = [], []
    # the counter knows only the form that is not in place
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **rest: 2 * a[0] * a[1] * b[1]}
    for depth in (2, 0):
        values = {"context": 64, "tokens_per_step": 64, "total_tokens": 64, "device": "cpu", "draft_depth": depth}
        engine = make_engine(preset("nano").with_values(values), tokens)
        step_plan, batches = engine._load(0)
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            engine._accumulate(batches[0], step_plan)
        done.append(counter.get_total_flops())
        planned.append(plan(engine.config, FACTS).flops)
    assert planned[0] - planned[1] == pytest.approx(done[0] - done[1], rel=0.05)


@pytest.mark.parametrize("width", [0, 4])
def test_parameters_of_a_plan_are_the_models(tmp_path: Path, width: int) -> None:
    engine = make_engine(convolved(tiny_config(), width), one_document(tmp_path))
    assert sum(p.numel() for p in engine.model.parameters()) == plan(engine.config, FACTS).parameters
    state = sum(x.numel() for part in (engine.optimizer.state_dict(), engine.model.state_dict()) for x in part.values())
    assert state * 4 + 4 * plan(engine.config, FACTS).parameters == pytest.approx(
        plan(engine.config, FACTS).checkpoint_bytes, rel=1e-3
    )


def test_preflight_names_bytes_and_fixes(tmp_path: Path) -> None:
    small = replace(H200, free=60 * 10**9)
    with pytest.raises(ValueError, match=r"training needs [\d,]+ bytes of memory, found 55,200,000,000") as caught:
        preflight(preset("full"), small)
    assert "--preset base" in str(caught.value) and "\n" not in str(caught.value)
    slow = preset("full").with_values({"max_hours": 0.5})
    with pytest.raises(ValueError, match=r"hours on NVIDIA H200, max_hours is 0.5"):
        preflight(slow, H200)
    assert preflight(preset("nano"), H200, folder=tmp_path / "a/b").recompute == "none"
    wide = preset("base").with_values({"micro_batch_tokens": 131072, "recompute": "none"})
    tight = replace(H200, free=40 * 10**9)
    with pytest.raises(ValueError, match=r"--micro-batch-tokens \d+ \("):
        preflight(wide, tight)


def test_choose_preset_r22() -> None:
    name, line = choose_preset(FACTS, 12.0)
    assert name == "nano" and line.startswith("preset: nano, ")
    assert choose_preset(H200, 1e6)[0] == "full"
    assert choose_preset(replace(H200, free=60 * 10**9), 1e6)[0] == "base"
    assert choose_preset(H200, 1e-6)[0] == "nano"
