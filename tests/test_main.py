"""The command line: its flags, its refusals, and every command from text to generated text, as a user runs it."""

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple, get_type_hints

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import custom_kernels
import main
from dataset_pipeline import open_tokens, write_tokens
from hybrid_model import HybridLanguageModel
from model_config import PRESETS, Config, preset
from train_engine import DeviceFacts, read_run_config, read_weights_info, save_weights

ROOT = Path(__file__).resolve().parent.parent
# no larger than what every rule of the configuration allows
SHAPE = (
    "--layers 4 --recurrent-layers 3 --attention-layers 1 --hidden-dim 64 --hypersphere-radius 8 --ffn-dim 128 "
    "--num-query-heads 2 --num-kv-heads 1 --head-dim 32 --recurrent-heads 2 --recurrent-key-dim 32 "
    "--recurrent-value-dim 32"
).split()
TINY = ["--device", "cpu", "--preset", "nano", *SHAPE]
BUDGET = ["--total-tokens", "20k", "--tokens-per-step", "1024", "--micro-batch-tokens", "1024", "--log-every", "1"]
# as bash starts a command in the foreground, wherever the tests run; tensors here are tiny: one thread is faster
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
COMMAND = [sys.executable, str(ROOT / "main.py")]


def _take_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _start(arguments: list[str], folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, env=ENVIRONMENT, preexec_fn=_take_signals, bufsize=0,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _run(arguments: list[str], folder: Path, *, given: str = "") -> subprocess.CompletedProcess:
    """Run a command to its end; it must succeed."""
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=ENVIRONMENT, input=given.encode(), capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    return done


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run a command in this process: an exception that escapes fails the test, as a traceback would a user."""
    torch.set_num_threads(1)

    def run(*arguments: object, given: bytes = b"") -> Outcome:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
        capsys.readouterr()
        try:
            code = main.main([str(argument) for argument in arguments])
        except SystemExit as stop:  # --help
            code = stop.code
        return Outcome(code, *capsys.readouterr())

    return run


class World(NamedTuple):
    """A folder in which text was prepared and a tiny model trained, through the shell."""

    folder: Path
    data: Path
    run: Path
    weights: Path
    prepared: str
    trained: str


WORDS = "the river ran past a quiet mill where three old stones kept turning under grey water and nobody spoke".split()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    (folder / "text").mkdir()
    draw = np.random.default_rng(0)
    for number in range(8):
        lines = [" ".join(draw.choice(WORDS, 9)) + ".\n" for _ in range(150)]
        (folder / "text" / f"{number}.txt").write_text("".join(lines))
    prepared = _run(["prepare", "--text", "text", "--out", "data", "--vocab-size", "320"], folder)
    trained = _run(["train", *TINY, *BUDGET, "--data", "data/tokens.bin", "--run-dir", "run"], folder)
    return World(
        folder=folder, data=folder / "data/tokens.bin", run=folder / "run", weights=folder / "run/final.safetensors",
        prepared=prepared.stdout.decode(), trained=trained.stdout.decode(),
    )  # fmt: skip


def _commands() -> dict[str, argparse.ArgumentParser]:
    parser = main.build_parser()
    return next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))


# ---------------------------------------------------------------------------
# Flags

# a new flag is a reviewed change: add it here, and say in model_config.py what it does
TRAIN_FLAGS = """
--adam-beta1 --adam-beta2 --adam-eps --anchor-tokens --attention-layers --attention-output-rule --attention-scope
--average-fraction --average-on-host --average-tau-fraction --chunk-size --clip-norm --context --conv-width --d-base
--data --data-dtype --decay-fraction --device --doc-at --doc-id --draft-depth --draft-loss-weight-1
--draft-loss-weight-2 --embedding-lr --eval-every --eval-tokens --ffn-dim --final-lr-fraction --head-dim --help
--hidden-dim --hypersphere-radius --initial-weights --keep-checkpoints --layers --length-divisor --log-every --lr-rule
--matrix-lr-base --max-context-len --max-hours --max-output-len --micro-batch-tokens --mix --mix-temperature
--momentum --nesterov --newton-schulz-steps --no-average-on-host --no-nesterov --no-resume --num-kv-heads
--num-query-heads --pace --pace-full --pace-start --precision --preset --recompute --recurrent-heads
--recurrent-key-dim --recurrent-layers --recurrent-value-dim --resume --rms-norm-eps --rope-base-theta --rope-stretch
--run-dir --save-every --save-every-minutes --seed --sliding-window-size --spectral-end-fraction
--spectral-hold-fraction --spectral-lambda --spectral-lr --stable-fraction --tokens-per-step --total-tokens --val-data
--vector-lr --vocab-size --warmup-fraction --weight-decay --wide-tail-layers -h
""".split()


def test_the_flags_of_train_are_frozen_and_are_the_configuration():
    flags = [flag for action in _commands()["train"]._actions for flag in action.option_strings]
    assert sorted(flags) == sorted([*TRAIN_FLAGS, "--dry-run"])
    flags.remove("--dry-run")
    names = {f.name for s in fields(Config) if s.name != "generation" for f in fields(get_type_hints(Config)[s.name])}
    extra = {"-h", "--help", "--preset", "--no-resume", "--no-nesterov", "--no-average-on-host"}
    assert set(flags) - extra == {f"--{name.replace('_', '-')}" for name in names}
    planned = [flag for action in _commands()["plan"]._actions for flag in action.option_strings]
    assert sorted(planned) == sorted([*flags, "--chip"])


def test_a_plan_refuses_ids_over_a_fixed_vocabulary(tmp_path, capsys):
    (tmp_path / "big.bin").write_bytes(np.full(4000, 70_000, "<u4").tobytes())
    assert main.main(["plan", "--preset", "full", "--chip", "B300", "--data", str(tmp_path / "big.bin")]) == 2
    assert re.search(r"^error: .*big\.bin: id 70,000 at token \d+ must be in 0\.\.65,535 .*$", capsys.readouterr().err)


def test_a_plan_for_an_absent_chip(capsys):
    """Its memory, units and bandwidth decide; this machine's disk does not."""
    assert main.main(["plan", "--preset", "full", "--chip", "B300"]) == 0
    text = capsys.readouterr().out
    assert "B300 (SM103), sm_103, 288 GB" in text and "fp8, fp4" in text and "5,497,569,280" in text
    assert re.search(r"generation: at most \d+ tokens/s", text) and "fits B300 (SM103)" in text
    assert main.main(["plan", "--preset", "full", "--chip", "A100"]) == 0
    assert "does not fit: training needs" in capsys.readouterr().out


def test_every_flag_says_what_its_field_says():
    source = (ROOT / "model_config.py").read_text("utf-8")
    comments = dict(
        (name, " ".join(line.strip().lstrip("# ") for line in block.splitlines()))
        for block, name in re.findall(r"((?:^    #.*\n)+)^    (\w+): ", source, re.MULTILINE)
    )
    assert len(comments) > 20
    helps = {a.dest: a.help for name in ("train", "generate") for a in _commands()[name]._actions}
    for name, comment in comments.items():
        assert helps[name].replace("%%", "%").startswith(comment), name
    # what a flag is without being given, in each preset where they differ
    assert helps["layers"].endswith("[nano 4, small 8, medium 16, base 20, full 32]")
    assert helps["momentum"].endswith("[nano 0.85, small 0.85, medium 0.85, base 0.95, full 0.95]")
    assert helps["adam_beta2"].endswith("[0.95]")
    assert helps["max_new_tokens"].endswith("[256]")


@pytest.mark.parametrize("command", ["", "train", "plan", "generate", "prepare", "evaluate", "bench", "verify"])
def test_help_of_every_command(call, command):
    code, out, err = call(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert f"main.py {command}".strip() in out
    if not command:
        assert all(f"    {name} " in out for name in _commands())
        assert "start here:" in out
    else:
        assert all(flag in out for action in _commands()[command]._actions for flag in action.option_strings[-1:])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "COMMAND"),
        ("trian", "'trian'"),
        ("train --layerz 4", "unknown flag --layerz of train; did you mean --layers?"),
        ("train --data_dtype auto", "did you mean --data-dtype?"),
        ("train --prese nano", "did you mean --preset?"),  # no abbreviations: they change meaning as flags are added
        ("generate --wieghts x", "did you mean --weights?"),
        ("generate --weights=x --promt=y", "did you mean --prompt?"),
        ("train tokens.bin", "tokens.bin"),
        ("train --layers", "--layers"),
        ("train --layers many", "--layers: must be a number, got 'many'"),
        ("train --layers 4.5", "--layers: must be a whole number, got '4.5'"),
        ("train --layers 0x4", "--layers: must be a number, got '0x4'"),
        ("train --total-tokens inf", "--total-tokens: must be a number"),
        ("train --clip-norm nan", "--clip-norm: must be a number, got 'nan'"),
        ("train --precision fp9", "fp32"),
        ("train --preset huge", "nano"),
        ("generate --weights x --cache-bits 5", "--cache-bits"),
        ("evaluate --weights x --data y --context 0", "--context: must be at least 1"),
        ("evaluate --weights x --data y --eval-tokens -3", "--eval-tokens: must be at least 1"),
        ("evaluate --weights x", "--data"),
        ("bench --only rmsnrom", "unknown kernel 'rmsnrom'; did you mean rmsnorm?"),
        ("bench --olny scan", "did you mean --only?"),
        ("verify --quick", "--quick"),
        # shapes
        ("plan --layers 5", "layers must be a multiple of 4"),
        ("plan --layers 8 --preset nano", "recurrent_layers and attention_layers must be 6 and 2"),
        ("plan --preset nano --num-kv-heads 4", "num_query_heads must be a multiple of num_kv_heads"),
        ("plan --preset nano --hidden-dim 256", "hypersphere_radius must be sqrt(hidden_dim) = 16"),
        ("plan --preset nano --head-dim 48", "head_dim must be 32, 64 or 128"),
        ("train --preset nano --warmup-fraction 0.5", "must be >= 0 and sum to 1"),
        ("generate --weights x --prompt y --top-p 1.5", "0 < top_p <= 1"),  # before the weights are read
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(call, tmp_path, monkeypatch, line, expected):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*line.split(), *(["--device", "cpu"] if line.startswith("plan") else []))
    assert code == 2
    assert "usage:" not in out + err
    (error,) = (text for text in err.splitlines() if not text.startswith("device: "))
    assert error.startswith("error: ") and expected in error
    assert list(tmp_path.iterdir()) == []


def test_numbers_may_be_written_as_people_write_them():
    def tokens(text: str) -> int:
        return main.build_parser().parse_args(["train", "--total-tokens", text]).total_tokens

    for text, value in {"250e6": 250 * 10**6, "1_000": 1000, "64k": 64_000, "1.5M": 1_500_000, "2B": 2 * 10**9}.items():
        assert tokens(text) == value
    assert tokens("9007199254740993") == 2**53 + 1  # not through a float


# ---------------------------------------------------------------------------
# Refusals


def _tree(folder: Path) -> set[str]:
    """Every path, but for the cache that a scan leaves beside the data."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.name.endswith(".scan.json")}


def _bare_weights(path: Path, *, tokenizer_json: str | None = None) -> None:
    values = dict(zip((f.lstrip("-").replace("-", "_") for f in SHAPE[::2]), map(int, SHAPE[1::2]), strict=True))
    config = preset("nano").with_values({**values, "vocab_size": 320})
    model = HybridLanguageModel(config.model, config.precision)
    model.init_weights(0)
    save_weights(path, dict(model.named_parameters()), config, tokenizer_json=tokenizer_json)


def _make_shelf(folder: Path, world: World) -> None:
    """Files that a user may hold by mistake."""
    (folder / "empty.bin").touch()
    (folder / "folder").mkdir()
    (folder / "odd.bin").write_bytes(b"\x01\x00\x02\x00\x03")
    np.save(folder / "large.npy", np.array([5, 70_000, 6], np.uint32))
    write_tokens(folder / "masked.bin", [np.arange(9)], vocab_size=16, masks=[np.zeros(9, np.uint8)])
    write_tokens(folder / "plain.bin", [np.arange(4000) % 16], vocab_size=16)
    (folder / "prose.txt").write_text("Once upon a time there was a river, and it ran past a mill.\n" * 9)
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    weights = world.weights.read_bytes()
    (folder / "cut.safetensors").write_bytes(weights[: len(weights) // 2])
    save_file({"x": torch.zeros(2)}, folder / "other.safetensors")
    _bare_weights(folder / "bare.safetensors")
    (folder / "used").mkdir()
    (folder / "used" / "notes.txt").touch()
    (folder / "foreign").mkdir()
    (folder / "foreign" / "tokens.bin").write_bytes((folder / "plain.bin").read_bytes())
    (folder / "foreign" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"\u2581the": 0}}}))


TRAIN = "train --device cpu --preset nano"
GENERATE = "generate --device cpu --weights"
SHELF = {
    "data missing": (f"{TRAIN} --data gone.bin", "gone.bin does not exist"),
    "data empty": (f"{TRAIN} --data empty.bin", "empty.bin is empty"),
    "data a directory": (f"{TRAIN} --data folder", "folder holds no token files"),
    "data of odd size": (f"{TRAIN} --data odd.bin", "odd.bin has 5 bytes"),
    "data is text": (f"{TRAIN} --data prose.txt", "prepare"),
    "data above the vocabulary": (f"{TRAIN} --data large.npy --vocab-size 320", "large.npy: id 70,000 at token"),
    "data above full's vocabulary (R22)": (
        f"train --device cpu --preset full {' '.join(SHAPE)} --precision fp32 --max-hours 1e9 --total-tokens 2048 "
        "--tokens-per-step 2048 --data large.npy",
        "must be in 0..65,535",
    ),
    "nothing supervised": (f"{TRAIN} --data masked.bin", "supervised tokens = 0"),
    "validation missing": (f"{TRAIN} --data plain.bin --val-data gone.bin", "gone.bin does not exist"),
    "tokenizer of another kind": (f"{TRAIN} --data foreign/tokens.bin", "tokenizer.json must be byte-level"),
    "weights missing": (f"{GENERATE} gone.safetensors --prompt x", "gone.safetensors does not exist"),
    "weights a directory": (f"{GENERATE} folder --prompt x", "folder is a directory; give the weights file"),
    "weights cut off": (f"{GENERATE} cut.safetensors --prompt x", "cut.safetensors is cut off"),
    "weights of another program": (f"{GENERATE} other.safetensors --prompt x", "not a weights file of this program"),
    "no tokenizer": (f"{GENERATE} bare.safetensors --prompt x", "holds no tokenizer"),
    "two prompts": (f"{GENERATE} bare.safetensors --prompt x --prompt-file prose.txt", "not both"),
    "chat with a prompt": (f"{GENERATE} bare.safetensors --prompt x --chat", "leave --prompt"),
    "prompt file missing": (f"{GENERATE} WEIGHTS --prompt-file gone.txt", "gone.txt: No such file or directory"),
    "prompt not UTF-8": (f"{GENERATE} WEIGHTS --prompt-file latin.txt", "latin.txt must be UTF-8 text, got byte 0xe9"),
    "prompt argument not UTF-8": (f"{GENERATE} WEIGHTS --prompt caf\udce9", "--prompt must be UTF-8 text"),
    "output too long": (f"{GENERATE} WEIGHTS --prompt x --max-new-tokens 10m", "max_new_tokens must be at most"),
    "choices missing": ("evaluate --device cpu --weights WEIGHTS --choices gone.jsonl", "gone.jsonl: No such file"),
    "choices not UTF-8": ("evaluate --device cpu --weights WEIGHTS --choices latin.txt", "latin.txt must be UTF-8"),
    "choices not JSON": ("evaluate --device cpu --weights WEIGHTS --choices prose.txt", "prose.txt:1"),
    "choices without tokenizer": ("evaluate --device cpu --weights bare.safetensors --choices prose.txt", "tokenizer"),
    "evaluate above the vocabulary": ("evaluate --device cpu --weights WEIGHTS --data large.npy", "id 70,000 at token"),
    "initial weights without data": (f"{TRAIN} --initial-weights WEIGHTS", "--initial-weights needs --data"),
    "initial weights missing": (f"{TRAIN} --data plain.bin --initial-weights gone.safetensors", "does not exist"),
    "initial weights of another preset": (f"{TRAIN} --data DATA --initial-weights WEIGHTS", "has hidden_dim 64, the"),
    "initial weights, other tokenizer": (
        "train --device cpu --data plain.bin --initial-weights WEIGHTS",
        "has no tokenizer.json, but",
    ),
    "run folder in use": (f"{TRAIN} --data plain.bin --run-dir used", "--resume"),
    "run folder under a file": (f"{TRAIN} --data plain.bin --run-dir plain.bin/run", "plain.bin/run cannot be written"),
    "resume without run folder": ("train --device cpu --resume", "--resume needs --run-dir"),
    "resume of no run": ("train --device cpu --resume --run-dir used", "used is no run folder"),
    "resume with another preset": ("train --device cpu --resume --preset small --run-dir RUN", "leave --preset out"),
    "fp8 on a CPU": ("train --device cpu --preset small --precision fp8", "precision fp8 needs matrix units of sm_89"),
    "fp8 at odd widths": (f"{TRAIN} --precision fp8", "needs widths that are multiples of 128"),
    "fp4 on a CPU": (f"{GENERATE} WEIGHTS --prompt x --precision fp4", "precision fp4 needs matrix units of sm_100"),
    "budget over the hours": (f"{TRAIN} --total-tokens 1e12 --data plain.bin", "--max-hours"),
    "prepare nothing": ("prepare --text gone --out new", "gone does not exist"),
    "prepare into a file": ("prepare --text prose.txt --out plain.bin", "plain.bin: File exists"),
}


@pytest.fixture(scope="module")
def shelf(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    _make_shelf(folder, world)
    return folder


@pytest.mark.parametrize("case", SHELF)
def test_a_user_error_is_one_line_and_nothing_is_created(call, world, shelf, monkeypatch, case):
    monkeypatch.chdir(shelf)
    line, expected = SHELF[case]
    before = _tree(shelf)
    places = {"WEIGHTS": world.weights, "RUN": world.run, "DATA": world.data}
    code, out, err = call(*(places.get(word, word) for word in line.split()))
    assert code == 2, err
    *others, last = err.splitlines()
    assert last.startswith("error: ") and expected in last, err
    # the capability line is the only other one, and it comes before any work (R22)
    if line.startswith("generate") and "--chat" not in line and "prose.txt" not in line:
        assert len(others) == 1 and others[0].startswith("device: ")
    else:
        assert others == []
    assert line.startswith(("generate", "prepare")) or out.startswith("device: ")
    assert _tree(shelf) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_run_folder_is_refused(call, shelf, tmp_path):
    tmp_path.chmod(0o500)
    code, _, err = call(*TRAIN.split(), "--data", shelf / "plain.bin", "--run-dir", tmp_path / "run")
    assert code == 2 and err.startswith("error: ") and "cannot be written (Permission denied)" in err


def _small_cpu(device: str = "auto") -> DeviceFacts:
    size = 16 * 10**9
    return DeviceFacts(kind="cpu", name="CPU", memory=size, free=size, capability=None, chip=None, probed_peak=1e11)


def test_full_on_a_small_device_stops_before_any_work(call, tmp_path, monkeypatch):
    """R22: with the bytes needed and found; without --data not even the demo corpus is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "describe_device", _small_cpu)
    code, out, err = call("train", "--preset", "full")
    assert code == 2 and re.match(r"error: training needs [\d,]{15} bytes of memory, found 14,720,000,000 ", err)
    assert err.count("\n") == 1 and out.count("\n") == 1 and out.startswith("device: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.\nTried 3 GiB"), OSError()]
)
def test_errors_of_the_machine_are_one_line_too(call, monkeypatch, error):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(main, "describe_device", fail)
    code, _, err = call("plan")
    assert code == 2 and re.fullmatch(r"error: .+\n", err)


# ---------------------------------------------------------------------------
# plan


def test_plan_of_the_full_model(call, tmp_path, monkeypatch):
    """The exact count, the printed one and why they differ, and what the device would have to hold (R1)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "describe_device", _small_cpu)
    code, out, err = call("plan", "--preset", "full")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("device: CPU, 16.00 GB")
    assert "parameters: 5,626,484,192 (matrices 5,497,569,280" in out
    assert "the printed 4,960,153,600 is not a sum of the printed dimensions" in out and "multiple of 7" in out
    for part in ("memory of training, recompute", "memory of generation: ", "recurrent state 44.0 MB", "operations"):
        assert part in out
    assert lines[-1].startswith("does not fit: training needs ")
    assert list(tmp_path.iterdir()) == []


def test_plan_takes_the_largest_preset_that_fits_and_the_vocabulary_of_the_data(call, world, monkeypatch):
    monkeypatch.setattr(main, "describe_device", _small_cpu)
    code, out, _ = call("plan", "--data", world.data)
    assert code == 0
    assert re.match(r"preset: nano, .* \(small needs .*: over the hours\)$", out.splitlines()[1])
    size = open_tokens(world.data).vocab_size
    model = preset("nano").with_values({"vocab_size": size}).model
    assert f"matrices {model.matrix_parameters:,}" in out
    assert out.endswith("fits CPU, in memory and hours and disk\n")


def test_a_run_from_weights_has_their_configuration_and_a_new_name(call, world, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    changed = ["--total-tokens", "2048", "--lr-rule", "printed", "--matrix-lr-base", "0.002"]
    code, out, err = call(
        "train", "--device", "cpu", "--data", world.data, "--initial-weights", world.weights, *changed
    )
    assert code == 0, err
    theirs, config = read_run_config(world.run), read_run_config(tmp_path / "runs/tuned-001")
    assert config.model == theirs.model and config.curriculum == theirs.curriculum
    assert config.schedule.total_tokens == 2048 and config.optimizer.matrix_lr_base == 0.002
    assert f"start: weights of {world.weights}, trained on " in out and not re.search(r"^preset: ", out, re.M)


# ---------------------------------------------------------------------------
# From text to text


def test_prepare_says_what_it_wrote(world):
    for part in ("tokenizer: data/tokenizer.json, 320 ids", "training: data/tokens.bin, 7 documents", "validation: "):
        assert part in world.prepared
    assert world.prepared.endswith("go on: python main.py train --data data/tokens.bin\n")


def test_train_leaves_a_whole_run_folder(world):
    """R21, R24."""
    assert json.loads((world.run / "config.json").read_text())["model"]["vocab_size"] == 320  # R22: the file's
    kinds = [json.loads(line)["kind"] for line in (world.run / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("train") == 19 and kinds.count("validation") == 1
    image = (world.run / "loss.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n") and image.endswith(b"IEND\xaeB`\x82") and len(image) > 10_000
    (checkpoint,) = (world.run / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000019" and (checkpoint / "manifest.json").is_file()
    assert load_file(world.weights)
    assert not [p for p in world.run.rglob("*") if ".tmp-" in p.name]


def test_train_prints_what_a_newcomer_needs(world):
    lines = world.trained.splitlines()
    assert lines[0].startswith("device: ")
    for part in (
        "parameters: ", "memory of training", "disk: ", "data: data/tokens.bin is raw uint16", "ids: ", "documents: 7 ",
        "supervised tokens: ", "stage: ", "run: run, ", "step 1/19  loss ", "step 19/19  loss ",
        "saved run/checkpoints/step-00000019", "wrote run/final.safetensors", "validation, averaged weights: loss ",
        "curve: run/loss.png, figures: run/metrics.jsonl",
    ):  # fmt: skip
        assert part in world.trained, part
    assert lines[-1] == "go on: python main.py generate --weights run/final.safetensors --prompt 'The '"
    assert _sample(world.trained)


def _sample(printed: str) -> str:
    """The text between its headline and the last line."""
    return printed.split("a sample:\n", 1)[1].rsplit("go on: ", 1)[0].strip()


def test_demo_corpus_without_data(tmp_path):
    """R22: `train` alone makes demo/tokens.bin, trains preset nano on it and shows a text."""
    small = ["--device", "cpu", *SHAPE, "--total-tokens", "4096", "--tokens-per-step", "1024", "--eval-tokens", "2048"]
    printed = _run(["train", *small], tmp_path).stdout.decode()
    assert open_tokens(tmp_path / "demo/tokens.bin").vocab_size == main.DEMO_VOCABULARY
    assert (tmp_path / "runs/nano-001/final.safetensors").is_file()
    assert "no --data: making a demo corpus" in printed
    assert _sample(printed)
    assert printed.endswith("--weights runs/nano-001/final.safetensors --prompt 'The '\n")


def _generate(world: World, *more: str) -> list[str]:
    return ["generate", "--device", "cpu", "--weights", str(world.weights), "--max-new-tokens", "60", *more]


def test_generate_reads_argument_file_and_standard_input_alike(call, world, tmp_path):
    """One text, on standard output alone, whether drafted or not; figures on standard error alone."""
    prompt = "the river ran past"
    done = _run(_generate(world, "--prompt", prompt), tmp_path)
    text, figures = done.stdout.decode(), done.stderr.decode().splitlines()
    assert len(text.strip()) > 60 and text.endswith("\n")
    assert len(figures) == 2 and figures[0].startswith("device: ") and figures[1].startswith("prompt tokens: ")
    assert "depth 1 accepted" in figures[1] and "ended by max_new_tokens" in figures[1]
    assert _run(_generate(world), tmp_path, given=prompt).stdout.decode() == text
    (tmp_path / "prompt.txt").write_bytes(prompt.encode() + b"\r\n")  # an editor's line end is not part of the prompt
    for more in (["--prompt-file", str(tmp_path / "prompt.txt")], ["--prompt", prompt, "--no-drafts"]):
        outcome = call(*_generate(world, *more))
        assert (outcome.code, outcome.out) == (0, text), more
    assert "depth" not in outcome.err
    assert call(*_generate(world, "--prompt", prompt, "--sampling-seed", "1")).out != text


def test_a_prompt_opens_with_the_id_that_opened_every_training_document(call, world, monkeypatch):
    seen, engine = [], main.StreamingGenerationEngine
    stream = engine._stream
    monkeypatch.setattr(engine, "_stream", lambda self, asked: seen.append(asked.prompt) or stream(self, asked))
    tokenizer = (world.data.parent / "tokenizer.json").read_text()
    first = int(open_tokens(world.data).ids[0])
    assert call(*_generate(world, "--prompt", "the mill")).code == 0
    assert call(*_generate(world), given=b"").code == 0
    assert seen == [[first, *main.encode_prompt(tokenizer, "the mill")], [first]]


def test_a_stop_string_ends_the_text_and_is_not_shown(call, world):
    text = call(*_generate(world, "--prompt", "the mill")).out
    stop = text[20:26]
    outcome = call(*_generate(world, "--prompt", "the mill", f"--stop={stop}"))
    assert outcome.out == text[: text.index(stop)] + "\n"
    assert "ended by the stop string" in outcome.err


@pytest.mark.parametrize("cut", range(1, 12))
def test_text_that_may_become_the_stop_string_waits(capsys, cut):
    text, stop = "one\nUs two\nUser:", "\nUser:"
    pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
    output = main._TextOutput((stop, 'never there'))
    for piece in pieces[:-1]:
        output.write(piece)
        assert stop[:2] not in output.text[-2:]
    output.write(pieces[-1] + " more", stopped=True)
    output.flush()
    assert output.text == capsys.readouterr().out == "one\nUs two"
    # an end that only began to look like it is shown in the end
    output = main._TextOutput((stop, 'never there'))
    output.write("one\nUse")
    assert output.text == "one"
    output.flush()
    assert output.text == capsys.readouterr().out == "one\nUse"


def test_chat_takes_turns(call, world, monkeypatch):
    prompts = []
    encode = main.encode_prompt
    monkeypatch.setattr(main, "encode_prompt", lambda tokenizer, text: prompts.append(text) or encode(tokenizer, text))
    chat = ["generate", "--device", "cpu", "--weights", world.weights, "--chat", "--max-new-tokens", 20]
    code, out, err = call(*chat, "--min-new-tokens", 20, given=b"a river\n\n  the mill \n")
    assert code == 0
    # the second turn goes on from the state after the first answer; an empty line is no turn
    assert prompts == ["User: a river\nAssistant:", "\nUser: the mill\nAssistant:"]
    assert len(out.strip()) > 40 and err.count("prompt tokens: ") == 2 and "User:" not in out


def test_a_session_goes_on_where_the_text_was(call, world, tmp_path, monkeypatch):
    session, more = tmp_path / "talk.session", ["--max-new-tokens", "12", "--session", tmp_path / "talk.session"]
    whole = call(*_generate(world, "--prompt", "the mill", "--max-new-tokens", "12"))
    first = call(*_generate(world, "--prompt", "the mill", *more))
    assert (first.code, first.out) == (0, whole.out) and f"session: {session}, " in first.err
    size = session.stat().st_size
    asked = []
    engine = main.StreamingGenerationEngine
    stream = engine._stream
    monkeypatch.setattr(engine, "_stream", lambda self, one: asked.append(one) or stream(self, one))
    second = call(*_generate(world, "--prompt", " and the river", *more))
    assert second.code == 0 and "goes on from" in second.err and session.stat().st_size == size
    # the last id of the first text and the new prompt are run, and nothing else
    tokenizer = (world.data.parent / "tokenizer.json").read_text()
    assert asked[0].resume and asked[0].prompt[1:] == main.encode_prompt(tokenizer, " and the river")
    other = tmp_path / "other.session"
    other.write_bytes(session.read_bytes()[:-5])
    outcome = call(*_generate(world, "--prompt", "x", "--session", other))
    assert outcome.code == 2 and "is cut off or not a session" in outcome.err and outcome.err.count("\n") <= 3
    save_file({"x": torch.zeros(1)}, other)
    assert "is not a session of this program" in call(*_generate(world, "--prompt", "x", "--session", other)).err


def test_requests_are_answered_each_as_alone(call, world, tmp_path):
    asked = [{"prompt": "the mill", "max_new_tokens": 9}, {"prompt": "a river", "seed": 3}, {"prompt": "the old"}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    code, out, err = call(*_generate(world, "--requests", tmp_path / "asked.jsonl", "--batch", "2"))
    lines = sorted(map(json.loads, out.splitlines()), key=lambda line: line["index"])
    assert code == 0 and [line["index"] for line in lines] == [0, 1, 2] and lines[0]["tokens"] == 9
    assert "3 texts, " in err and ", 2 at once" in err
    for line, one in zip(lines, asked, strict=True):
        more = [x for name in ("seed", "max_new_tokens") if name in one
                for x in (f"--{name.replace('seed', 'sampling-seed').replace('_', '-')}", str(one[name]))]  # fmt: skip
        assert call(*_generate(world, "--prompt", one["prompt"], *more)).out == line["text"] + "\n", one
    # a prompt beside them begins each, and is run once
    begun = call(*_generate(world, "--requests", tmp_path / "asked.jsonl", "--prompt", "It was "))
    texts = {line["index"]: line["text"] for line in map(json.loads, begun.out.splitlines())}
    assert begun.code == 0 and texts.keys() == {0, 1, 2} and texts[0] != lines[0]["text"]


@pytest.mark.parametrize("line, message", [
    ("{", 'asked.jsonl:1 must be {"prompt": text, ...}, got {'),
    ('{"prompt": 3}', "asked.jsonl:1 may hold prompt (text), seed and max_new_tokens (numbers), got prompt 3"),
    ('{"prompt": "x", "temperature": 1}', "got temperature 1"),
    ("", "asked.jsonl holds no request"),
])  # fmt: skip
def test_bad_requests_are_one_line(call, world, tmp_path, line, message):
    (tmp_path / "asked.jsonl").write_text(line)
    outcome = call(*_generate(world, "--requests", tmp_path / "asked.jsonl"))
    assert outcome.code == 2 and message in outcome.err and outcome.err.splitlines()[-1].startswith("error: ")
    outcome = call(*_generate(world, "--requests", tmp_path / "asked.jsonl", "--chat"))
    assert outcome.code == 2 and "--chat is for one text; leave it out beside --requests" in outcome.err


@pytest.mark.parametrize("words, message", [
    (["--session", "absent/talk.session"], "--session must lie in a folder that exists, got absent"),
    (["--trace", "absent/trace.png"], "--trace must lie in a folder that exists, got absent"),
    (["--trace", "trace.jsonl"], "--trace must be a .png and of one text, got trace.jsonl"),
    (["--chat", "--trace", "trace.png"], "--trace must be a .png and of one text, got trace.png of --chat"),
    (["--batch", "2"], "--batch is for --requests; leave it out"),
    (["--requests", "absent.jsonl"], "absent.jsonl: No such file or directory"),
])  # fmt: skip
def test_what_could_not_be_kept_is_refused_before_the_work(call, world, monkeypatch, words, message):
    monkeypatch.setattr(main, "load_weights", lambda *_, **__: pytest.fail("the weights were read"))
    outcome = call(*_generate(world, *words))
    assert outcome.code == 2 and outcome.err.splitlines()[-1] == f"error: {message}" and outcome.out == ""


def test_a_trace_is_a_picture_and_its_points(call, world, tmp_path, monkeypatch):
    monkeypatch.setattr("generation_engine.CURVE_TOKENS", 8)
    trace = tmp_path / "trace.png"
    outcome = call(*_generate(world, "--prompt", "the mill", "--max-new-tokens", "40", "--trace", trace))
    assert outcome.code == 0 and trace.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    points = [json.loads(line) for line in trace.with_suffix(".jsonl").read_text().splitlines()]
    assert [point["tokens"] for point in points] == [8, 16, 24, 32, 40]
    assert all(point["seconds"] > 0 and 0 <= point["repetition"] < 1 for point in points[1:])


def test_evaluate_on_a_split_and_on_choices(call, world, tmp_path):
    evaluate = ["evaluate", "--device", "cpu", "--weights", world.weights]
    code, out, err = call(*evaluate, "--data", world.data.with_suffix(".val.bin"), "--context", 256)
    assert (code, err) == (0, "")
    first, line, *positions = out.splitlines()
    assert first.startswith("device: ")
    assert re.fullmatch(
        r"tokens\.val\.bin: loss \d\.\d{4}, \d\.\d{4} bits per byte, accuracy 0\.\d{4} \([\d,]+ targets, rows of 256\)",
        line,
    )
    assert re.fullmatch(r"  positions       0 to      15: loss \d\.\d{4} \(\d+ targets\)", positions[0])
    less = call(*evaluate, "--data", world.data.with_suffix(".val.bin"), "--context", 256, "--eval-tokens", 256).out
    assert "(256 targets, rows of 256)" in less
    code, _, err = call(*evaluate, "--data", world.data.with_suffix(".val.bin"), "--context", 10**9)
    refusal = r"error: context must be at most [\d,]+ for these weights, got 1,000,000,000\n"
    assert code == 2 and re.fullmatch(refusal, err)

    questions = [{"prompt": "the old", "choices": [" stones", " zqxj"], "answer": i} for i in (0, 0, 1)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, questions)))
    code, out, err = call(*evaluate, "--choices", tmp_path / "q.jsonl")
    assert (code, err) == (0, "") and out.endswith("q.jsonl: 66.7% of 3 questions right\n")


def test_a_dry_run_takes_two_steps_a_length_and_writes_nothing(call, world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ["--total-tokens", "4096", "--tokens-per-step", "256", "--length-divisor", "64", "--run-dir", "run"]
    outcome = call("train", "--device", "cpu", "--data", world.data, *TINY, *more, "--dry-run")
    assert outcome.code == 0 and not list(tmp_path.iterdir())
    row = r"^rows of ([\d,]+): ([\d,]+) tokens a step, [\d.]+ s, [\d,]+ tok/s, gradient norm "
    rows = re.findall(row, outcome.out, re.MULTILINE)
    lengths = [int(length.replace(",", "")) for length, _ in rows]
    assert lengths == sorted(set(lengths)) and len(lengths) >= 4
    assert all(int(size.replace(",", "")) == max(256, length) for length, (_, size) in zip(lengths, rows, strict=True))
    assert outcome.out.rstrip().endswith("dry run: every row length has run; nothing was written")


def test_quantize_writes_a_file_that_generates(call, world, tmp_path):
    out = tmp_path / "q8.safetensors"
    split = ["--data", world.data.with_suffix(".val.bin"), "--context", "256", "--device", "cpu"]
    code, text, _ = call("quantize", "--weights", world.weights, "--out", out, *split)
    assert code == 0 and out.stat().st_size < 0.6 * Path(world.weights).stat().st_size
    rows = [line.split() for line in text.splitlines() if line.startswith("layers.")]
    config = read_weights_info(world.weights)["config"].model
    assert len(rows) == 3 * config.layers + 4 * config.layers, "four projections an operator, three a feed-forward"
    assert all(0.001 < float(row[4].rstrip("%")) / 100 < 0.02 for row in rows)
    before, after = map(float, re.search(r"^loss ([\d.]+) to ([\d.]+) ", text, re.M).groups())
    assert abs(after - before) < 0.01
    # as good as the printed loss when read again, and it speaks
    again = call("evaluate", "--weights", out, *split).out
    assert float(re.search(r"loss ([\d.]+),", again)[1]) == pytest.approx(after, abs=1e-4)
    assert len(call(*_generate(world, "--prompt", "the mill"))[1]) > 20
    made = call("generate", "--device", "cpu", "--weights", out, "--prompt", "the mill", "--max-new-tokens", "20")
    assert made.code == 0 and "made tokens: 20" in made.err
    for arguments, message in (
        (["--weights", out, "--out", tmp_path / "x"], "holds 8-bit weights; give the file that training wrote"),
        (["--weights", out, "--out", out], "--out must be another file than --weights"),
        (["--weights", world.weights, "--out", tmp_path / "no/x"], "--out must lie in a folder that exists"),
        (["--weights", world.weights, "--out", tmp_path / "x", "--bits", "4"], "4-bit weights need inputs in"),
    ):
        outcome = call("quantize", *arguments)
        assert outcome.code == 2 and message in outcome.err and not (tmp_path / "x").exists()


def test_validation_file_is_found_beside_data_of_any_suffix(call, world, tmp_path, monkeypatch):
    """DATA with .val before its suffix."""
    monkeypatch.chdir(tmp_path)
    ids = np.arange(1500) % 16
    np.save("ids.npy", ids.astype(np.uint16))
    np.save("ids.val.npy", ids[:300].astype(np.uint16))
    more = ["--total-tokens", "1024", "--tokens-per-step", "1024", "--data", "ids.npy", "--run-dir", "run"]
    code, out, _ = call("train", *TINY, *more)
    assert code == 0 and "validation, averaged weights: loss " in out
    assert "sample" not in out  # there is no tokenizer to make one


def test_a_sample_that_cannot_be_made_is_a_remark(call, world, tmp_path, monkeypatch):
    """The run is complete, whatever the sample."""
    monkeypatch.chdir(tmp_path)
    ids = (np.arange(1500) % 16).astype(np.uint16)
    np.save("ids.npy", ids)
    Path("tokenizer.json").write_bytes((world.data.parent / "tokenizer.json").read_bytes())
    more = ["--total-tokens", "1024", "--tokens-per-step", "1024", "--data", "ids.npy", "--run-dir", "run"]
    # neither facts nor an id that opens a text: the sample begins with a word, whose ids the model does not have
    code, out, err = call("train", *TINY, *more)
    assert (code, err) == (0, "") and "no sample: a prompt id must be within 0..15" in out
    assert Path("run/final.safetensors").is_file()


def test_the_sample_of_a_model_that_would_end_at_once_shows_something(capsys, world, monkeypatch):
    end = open_tokens(world.data).facts["eos_id"]
    bias = torch.zeros(320).index_fill(0, torch.tensor([end]), 1e3)
    monkeypatch.setattr("generation_engine.penalize", lambda logits, *_: logits + bias)
    main._show_sample(world.weights, preset("nano"), _small_cpu())
    out, err = capsys.readouterr()
    assert f"made tokens: {main.SAMPLE_TOKENS}," in err
    assert len(out.removeprefix("a sample:\n").strip()) > main.SAMPLE_TOKENS


# ---------------------------------------------------------------------------
# Interrupts


ENDLESS = ["--prompt", "the", "--max-new-tokens", "60k", "--min-new-tokens", "60k"]


def _read_until(process: subprocess.Popen, mark: bytes) -> bytes:
    seen = b""
    while mark not in seen:
        chunk = process.stdout.read(1)
        assert chunk, (seen, process.stderr.read())
        seen += chunk
    return seen


def _same_weights(path: Path, other: Path) -> bool:
    left, right = load_file(path), load_file(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_ctrl_c_saves_and_resume_ends_like_an_unbroken_run(world):
    """R24: bit for bit. A first stop by Ctrl-C, just while a line is printed; a second as nobody reads on (| head)."""
    arguments = ["train", *TINY, *BUDGET, "--data", "data/tokens.bin", "--run-dir", "broken"]
    process = _start(arguments, world.folder)
    _read_until(process, b"step 4/19")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and err == b"stopping after this step; once more to exit at once\n"
    last = out.decode().splitlines()[-1]
    assert re.fullmatch(r"stopped at step \d+; go on with --resume --run-dir broken", last)
    assert not (world.folder / "broken/final.safetensors").exists()

    process = _start(["train", "--device", "cpu", "--resume", "--run-dir", "broken"], world.folder)
    assert b"resumed broken/checkpoints/step-0000000" in _read_until(process, b"  loss ")
    process.stdout.close()
    assert process.wait(timeout=300) == 143
    assert process.stderr.read() == b"stopping after this step; once more to exit at once\n"
    process.stderr.close()
    assert not (world.folder / "broken/final.safetensors").exists()

    # the first command with --resume behind it is a way to say it, too
    done = _run([*arguments, "--resume"], world.folder).stdout.decode()
    assert int(re.search(r"resumed broken/checkpoints/step-(\d+)", done)[1]) >= 5
    assert _same_weights(world.folder / "broken/final.safetensors", world.weights)


def test_ctrl_c_while_generating_keeps_what_was_made(world, tmp_path):
    process = _start(_generate(world, *ENDLESS), tmp_path)
    begun = process.stdout.read(1) + process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    text, lines = (begun + out).decode(), err.decode().splitlines()
    assert process.returncode == 130
    assert text.strip() and text.endswith("\n")
    assert len(lines) == 3 and "ended by Ctrl-C" in lines[1] and lines[2] == "stopped by Ctrl-C"


def test_a_reader_that_goes_away_is_no_error(world, tmp_path):
    """generate | head"""
    process = _start(_generate(world, *ENDLESS), tmp_path)
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=300) == 141
    assert process.stderr.read().decode().splitlines()[1:] == []
    process.stderr.close()


def test_presets_are_offered_by_name():
    (offered,) = (a.choices for a in _commands()["train"]._actions if a.dest == "preset")
    assert offered == ("auto", *PRESETS)


# ---------------------------------------------------------------------------
# bench, verify


def test_bench_prints_a_table_and_one_json_line(call, tmp_path):
    code, out, err = call("bench", "--only", "swiglu", "--quick", "--device", "cpu", "--out", tmp_path / "bench.json")
    assert code == 0
    *table, last = out.splitlines()
    report = json.loads(last)
    assert report == json.loads((tmp_path / "bench.json").read_text())
    assert [row["kernel"] for row in report["rows"]] == ["swiglu"] and report["device"] == "cpu"
    assert any(line.startswith("swiglu ") for line in table)
    assert re.fullmatch(r"\[1/1\] swiglu .* \(first row\)", err.strip())


def test_bench_of_a_wrong_kernel_fails(call, monkeypatch):
    operation = custom_kernels.fused_swiglu
    monkeypatch.setattr(custom_kernels, "fused_swiglu", lambda gate, up: 1.02 * operation(gate, up))
    code, out, _ = call("bench", "--only", "swiglu", "--quick", "--device", "cpu")
    assert code == 1
    assert re.search(r"^swiglu .* FAILED: y: RMS error ratio 2\.00e-02 must be < 1\.0e-05$", out, re.MULTILINE)


@pytest.mark.parametrize("command", ["bench", "verify"])
def test_bench_and_verify_without_the_tests_folder(call, tmp_path, monkeypatch, command):
    monkeypatch.setattr(main, "__file__", str(tmp_path / "main.py"))
    code, out, err = call(command)
    assert (code, out) == (2, "")
    needed = tmp_path / "tests" / "benchmarks" / "kernels.py"
    assert err == f"error: bench and verify need {needed}, which is not there; run them from a full checkout\n"


def test_verify_ends_as_the_harness_does(call, monkeypatch):
    """Its counts are tested in test_kernel_benchmark.py; here, that the command reaches it and hands on its code."""
    harness = main._kernel_harness()
    monkeypatch.setattr(harness, "verify", lambda log: log("FAIL") or 1)
    monkeypatch.setattr(main, "_kernel_harness", lambda: harness)
    assert call("verify") == (1, "FAIL\n", "")
