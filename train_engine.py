"""Training: device facts, cost plan, segmented backward, training loop, checkpoints, weights files, evaluation.

The engine turns (configuration, token file) into a run folder:

    config.json   metrics.jsonl   loss.png   checkpoints/step-00000120/   final.safetensors

A step's loss is sum(w * ce) / sum(w) over the whole step, whatever its micro-batches (draft losses have denominators of
their own); a step without supervised targets, or with a gradient norm that is not finite, moves nothing. A row longer
than a micro-batch is cut into segments h_1 ... h_n that hand on a carry c_s (recurrent states, last window, anchors):

    first pass    c_s = f(x_s, c_{s-1}), no graph, only carries kept
    second pass   s = n ... 1:  recompute with c_{s-1} as a leaf;  d c_{s-1} = backward(loss_s, <c_s, d c_s>)

which is the unsegmented gradient, in memory that does not grow with length. Batch and rate are pure functions of
(seed, step), so a resumed run is bit-identical. It does not know how text becomes tokens, nor how tokens are sampled.
Errors that a user can cause are one-line ValueErrors; a run that must stop raises TrainingError, one line as well.

Public names, in file order: see `__all__`. Letters: B rows, T tokens of a row, N tokens of a micro-batch, D width.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from custom_kernels import (
    PackedFP4,
    PackedINT8,
    Projection,
    fused_chunked_cross_entropy,
    pack_weight,
    unpack_weight,
)
from dataset_pipeline import (
    DRAFT_STRIDE,
    Batch,
    CurriculumStage,
    PackedSequenceDataLoader,
    StepPlan,
    TokenFile,
    build_curriculum,
    decode_bytes,
    token_byte_lengths,
    unigram_bits_per_byte,
    validation_batches,
    xz_bits_per_byte,
)
from hybrid_model import HybridLanguageModel, LayerCarry, ParameterSpec, RecordedWork
from model_config import PRESETS, Config, PrecisionConfig, TrainConfig, config_from_dict, preset
from scheduler import TerminalShrinkageAverager, WarmupStableDecayScheduler
from spectral_optimizer import DualSpectralOptimizer, StepReport

__all__ = [
    "CHIPS",
    "Chip",
    "DeviceFacts",
    "Evaluation",
    "PackedError",
    "Plan",
    "TrainResult",
    "TrainState",
    "TrainingEngine",
    "TrainingError",
    "chip_facts",
    "choose_preset",
    "choose_recompute",
    "describe_device",
    "draw_curve",
    "evaluate",
    "load_weights",
    "multiple_choice",
    "newest_checkpoint",
    "next_run_dir",
    "plan",
    "preflight",
    "quantize_weights",
    "read_run_config",
    "read_session",
    "read_weights_info",
    "require_precision",
    "save_weights",
    "segmented_backward",
    "write_checkpoint",
    "write_session",
]

# of weights files; counts what tensors mean, too: 2 has no norm between a memory's heads and its output projection,
# 3 has half-lives from 1 token
FORMAT_VERSION = 3
PRINTED_PARAMETERS = 4_960_153_600


class TrainingError(RuntimeError):
    """A run that must stop; the message is one line and says what was kept."""


# ---------------------------------------------------------------------------
# Durable files


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _replace_durably(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file, flush it and rename it: a reader sees the old file or the whole new one."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        write(temporary)
        _sync_file(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gigabytes(count: float) -> str:
    if count < 1e8:
        return f"{count / 1e6:,.1f} MB"
    return f"{count / 1e9:,.2f} GB" if count < 1e11 else f"{count / 1e9:,.0f} GB"


def _duration(hours: float) -> str:
    """Write a time in the unit that people would use: 40 seconds, 12 minutes, 9.5 hours."""
    if hours < 1 / 60:
        return f"{max(1, round(3600 * hours))} seconds"
    return f"{round(60 * hours)} minutes" if hours < 1 else f"{hours:,.1f} hours"


def _one_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# ---------------------------------------------------------------------------
# Device


@dataclass(frozen=True, slots=True)
class Chip:
    """Dense peak rates of one accelerator (operations a second; 0 = no such unit), memory and bandwidth."""

    name: str
    bf16: float
    fp8: float
    fp4: float
    memory: float
    bandwidth: float
    capability: tuple[int, int]


# by a part of the driver's device name; vendor's dense figures
CHIPS: dict[str, Chip] = {
    chip.name.split()[0]: chip
    for chip in (
        # name, bf16, fp8, fp4, memory, bandwidth, capability
        Chip("A100",         312e12,  0.0,     0.0,      80e9,  2.0e12,  (8, 0)),
        Chip("H100",         989e12,  1979e12, 0.0,      80e9,  3.35e12, (9, 0)),
        Chip("H200",         989e12,  1979e12, 0.0,      141e9, 4.8e12,  (9, 0)),
        Chip("B200",         2250e12, 4500e12, 9000e12,  192e9, 8.0e12,  (10, 0)),
        Chip("B300 (SM103)", 2250e12, 4500e12, 13500e12, 288e9, 8.0e12,  (10, 3)),
    )
}  # fmt: skip
TARGET_CHIP = CHIPS["B300"]

# least compute capability whose matrix units take a format
_NEEDED_CAPABILITY = {"bf16": (8, 0), "fp8": (8, 9), "fp4": (10, 0)}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """What a device is and can do, found before any work. Bytes; peak in operations a second."""

    kind: str
    name: str
    memory: int
    free: int
    capability: tuple[int, int] | None
    chip: Chip | None
    probed_peak: float

    def has_units(self, precision: str) -> bool:
        """Say whether the matrix units take a format."""
        needed = _NEEDED_CAPABILITY.get(precision)
        return needed is None or (self.capability is not None and self.capability >= needed)

    def peak(self, precision: str) -> float:
        """Return the rate that utilisation is counted against: the format's, or the probed one of an unknown device."""
        if self.chip is None:
            return self.probed_peak
        return {"fp8": self.chip.fp8, "fp4": self.chip.fp4}.get(precision, self.chip.bf16)

    def describe(self) -> str:
        """Return the capability line."""
        units = [name for name in _NEEDED_CAPABILITY if self.has_units(name)]
        absent = [name for name in _NEEDED_CAPABILITY if not self.has_units(name)]
        unit = f"sm_{self.capability[0]}{self.capability[1]}, " if self.capability else ""
        line = f"device: {self.name}, {unit}{_gigabytes(self.memory)} ({_gigabytes(self.free)} free)"
        line += f"; matrix units: fp32{''.join(', ' + name for name in units)}"
        falls = {"bf16": "bf16 falls back to fp32", "fp8": "fp8 is refused", "fp4": "fp4 only as fp4-emulated"}
        return line + "".join(f"; {falls[name]}" for name in absent)


def describe_device(device: str = "auto") -> DeviceFacts:
    """Find the device that `auto`, `cuda` or `cpu` names and what it can do; takes a few milliseconds."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {device}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda needs a CUDA accelerator, found none; use --device cpu or auto")
    if device != "cpu" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        chip = next((chip for part, chip in CHIPS.items() if part in properties.name), None)
        return DeviceFacts(
            kind="cuda", name=properties.name, memory=total, free=free, chip=chip,
            capability=(properties.major, properties.minor), probed_peak=0.0 if chip else _probe_peak("cuda"),
        )  # fmt: skip
    page = os.sysconf("SC_PAGE_SIZE")
    return DeviceFacts(
        kind="cpu", name=f"CPU with {torch.get_num_threads()} threads", memory=page * os.sysconf("SC_PHYS_PAGES"),
        free=_free_memory(), capability=None, chip=None, probed_peak=_probe_peak("cpu"),
    )  # fmt: skip


def _free_memory(table: Path = Path("/proc/meminfo")) -> int:
    """Bytes of host memory that a process may have: what caches files counts, for the system gives it back."""
    try:
        found = re.search(r"^MemAvailable: *(\d+) kB$", table.read_text("ascii"), re.MULTILINE)
    except OSError:
        found = None  # not Linux
    return 1024 * int(found[1]) if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def chip_facts(name: str) -> DeviceFacts:
    """Return the facts of a chip of the table, all of its memory free: for plans of runs on another machine."""
    chip = CHIPS[name]
    return DeviceFacts(
        kind="cuda", name=chip.name, memory=int(chip.memory), free=int(chip.memory), chip=chip,
        capability=chip.capability, probed_peak=0.0,
    )  # fmt: skip


def require_precision(precision: str, facts: DeviceFacts) -> str | None:
    """Refuse a precision that the device has no matrix units for; return a note where it is only slow."""
    if precision in ("fp8", "fp4") and not facts.has_units(precision):
        major, minor = _NEEDED_CAPABILITY[precision]
        others = "fp8, bf16 or fp4-emulated" if facts.has_units("fp8") else "bf16 or fp4-emulated"
        raise ValueError(
            f"precision {precision} needs matrix units of sm_{major}{minor} or later, "
            f"found {_unit_name(facts)}; use {others}"
        )
    if precision == "bf16" and not facts.has_units("bf16"):
        return f"precision bf16: {facts.name} has no bf16 matrix units; computing in fp32, slowly"
    if precision == "fp4-emulated":
        return "precision fp4-emulated: computes fp4's values with wider products, slowly"
    return None


def _unit_name(facts: DeviceFacts) -> str:
    return f"sm_{facts.capability[0]}{facts.capability[1]} ({facts.name})" if facts.capability else facts.name


def _probe_peak(device: str) -> float:
    """Time a float32 product on an unknown device: operations a second."""
    x = torch.ones(512, 512, device=device)
    seconds = math.inf
    for _ in range(3):
        started = time.perf_counter()
        (x @ x)[0, 0].item()
        seconds = min(seconds, time.perf_counter() - started)
    return 2 * 512**3 / seconds


# ---------------------------------------------------------------------------
# Plan and pre-flight

# share of the device's memory that a plan may fill
_MEMORY_SHARE = 0.92
# driver, libraries and compiled kernels of one process
_CONTEXT_BYTES = {"cuda": 1.0e9, "cpu": 0.4e9}
# elements that one optimizer slice works on, and its temporaries of that size
_SLICE_ELEMENTS, _SLICE_TEMPORARIES = 2**26, 8
# training operations over peak, where no rate was measured. cpu: nano reaches 23 GFLOP/s a core where a 512 x 512
# product reaches 104
_UTILISATION = {"cuda": 0.35, "cpu": 0.20}
# saved tensors over the formula's, which counts what the kernels save; the CPU's path keeps what autograd needs as well
# (measured: 1.52 at width 192, 1.38 at 512)
_SAVED_RATIO = {"cuda": 1.0, "cpu": 1.5}
_RECOMPUTE = ("none", "ffn", "layer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run costs before it starts. Bytes, operations, hours; each part by name."""

    parameters: int
    matrix_parameters: int
    recompute: str
    training: dict[str, int]
    generation: dict[str, int]
    flops: float
    hours: float
    utilisation: float
    measured: bool
    decode_roof: float | None
    checkpoint_bytes: int
    disk_bytes: int
    tokens: int

    @property
    def training_bytes(self) -> int:
        """Peak of one step: the parts that live at once."""
        parts = dict(self.training)
        shared = ("optimizer workspace", "activations and cross entropy")
        return max(parts.pop(name) for name in shared) + sum(parts.values())

    @property
    def generation_bytes(self) -> int:
        return sum(self.generation.values())

    def describe(self) -> list[str]:
        """Return the lines to print."""
        lines = [f"parameters: {self.parameters:,} (matrices {self.matrix_parameters:,}; norms, biases, draft head)"]
        if self.matrix_parameters == 5_497_569_280:
            lines.append(
                f"the printed {PRINTED_PARAMETERS:,} is not a sum of the printed dimensions: each matrix has a side "
                "that is a multiple of 7, the number is not; the dimensions win"
            )
        for title, parts, total in (
            (f"training, recompute {self.recompute}", self.training, self.training_bytes),
            ("generation", self.generation, self.generation_bytes),
        ):
            named = ", ".join(f"{name} {_gigabytes(count)}" for name, count in parts.items())
            lines.append(f"memory of {title}: {_gigabytes(total)} ({named})")
        lines.append(
            f"training: {self.tokens:,} tokens, {self.flops:.3g} operations, about {_duration(self.hours)} "
            f"at {self.utilisation:.0%} of the peak ({'measured' if self.measured else 'assumed'})"
        )
        if self.decode_roof is not None:
            lines.append(f"generation: at most {self.decode_roof:,.0f} tokens/s without drafts, by memory bandwidth")
        lines.append(f"disk: {_gigabytes(self.checkpoint_bytes)} a checkpoint, {_gigabytes(self.disk_bytes)} in all")
        return lines


def plan(config: Config, facts: DeviceFacts, *, tokens_per_second: float | None = None) -> Plan:
    """Compute parameters, memory, operations, hours and disk of a configuration on a device.

    Args:
        tokens_per_second: a measured training rate; without one the peak times a stated utilisation is taken.
    """
    model, tokens = config.model, config.schedule.total_tokens
    recompute = choose_recompute(config, facts)
    context = _mean_row_length(config)
    forward = model.forward_flops_per_token(context)
    again = {"none": 0.0, "ffn": 2.0 * model.layers * model.feed_forward_parameters, "layer": forward}[recompute]
    # the draft head and the logits of its depths
    drafts = 2.0 * (model.draft_parameters + model.draft_depth * model.embedding_parameters) / DRAFT_STRIDE
    flops = tokens * (3 * (forward + drafts) + again)
    utilisation, peak = _UTILISATION[facts.kind], facts.peak(config.precision.precision)
    hours = flops / (peak * utilisation) / 3600
    if tokens_per_second is not None:
        hours = tokens / tokens_per_second / 3600
        utilisation = flops / (hours * 3600) / peak
    small = model.embedding_parameters + model.vector_parameters
    # weights, the average, and the optimizer's one or two moments
    checkpoint = 8 * model.total_parameters + 4 * (model.total_parameters - small) + 8 * small
    return Plan(
        parameters=model.total_parameters,
        matrix_parameters=model.matrix_parameters,
        recompute=recompute,
        training=_training_parts(config, facts.kind, recompute),
        generation=_generation_parts(config, facts.kind),
        flops=flops,
        hours=hours,
        utilisation=utilisation,
        measured=tokens_per_second is not None,
        decode_roof=facts.chip.bandwidth / _decode_bytes(config) if facts.chip else None,
        checkpoint_bytes=checkpoint,
        disk_bytes=checkpoint * (config.train.keep_checkpoints + 1) + 4 * model.total_parameters,
        tokens=tokens,
    )


def choose_recompute(config: Config, facts: DeviceFacts) -> str:
    """Return the recompute setting, `auto` resolved to the least that fits the device's memory."""
    if config.train.recompute != "auto":
        return config.train.recompute
    for choice in _RECOMPUTE:
        parts = _training_parts(config, facts.kind, choice)
        workspace = parts.pop("optimizer workspace")
        activations = parts.pop("activations and cross entropy")
        if sum(parts.values()) + max(workspace, activations) <= _MEMORY_SHARE * facts.free:
            return choice
    return _RECOMPUTE[-1]


def _curriculum(config: Config, corpus_tokens: int | None = None) -> tuple[list[CurriculumStage], list[str]]:
    return build_curriculum(
        config.schedule.total_tokens,
        config.curriculum,
        max_context_len=config.model.max_context_len,
        corpus_tokens=corpus_tokens,
    )


def _mean_row_length(config: Config) -> int:
    stages, _ = _curriculum(config)
    return sum(stage.length * stage.tokens for stage in stages) // sum(stage.tokens for stage in stages)


def _activation_bytes(config: Config, recompute: str) -> int:
    """Bytes a token that the backward pass keeps, by the tensors that each operation saves."""
    model, width = config.model, 4 if config.precision.precision == "fp32" else 2
    D, F = model.hidden_dim, model.ffn_dim
    keys, values = model.recurrent_heads * model.recurrent_key_dim, model.recurrent_heads * model.recurrent_value_dim
    query, key_value = model.num_query_heads * model.head_dim, model.num_kv_heads * model.head_dim
    # stream, norm, branch; q and k before and after their norm; v, scaled v, y; the scan's inverse, pairs and gates, of
    # blocks of 64 tokens in 16 bit or 32 in 32; the float32 input of the gates, their logits and alpha
    recurrent = width * (3 * D + 4 * keys + 3 * values) + model.recurrent_heads * (256 + 32 + 16)
    recurrent += 4 * D if width == 2 else 0
    # the convolution's inputs
    recurrent += width * (2 * keys + values) if model.conv_width else 0
    # q raw, normed, rotated twice, y; k the same; v
    attention = width * (3 * D + 5 * query + 5 * key_value)
    feed_forward = width * (3 * D + 3 * F)
    if recompute == "layer":
        return model.layers * width * D
    operators = model.recurrent_layers * recurrent + model.attention_layers * attention
    return operators + model.layers * (feed_forward if recompute == "none" else 2 * width * D)


def _training_parts(config: Config, kind: str, recompute: str) -> dict[str, int]:
    model = config.model
    total, small = model.total_parameters, model.embedding_parameters + model.vector_parameters
    # a micro-batch holds as many rows as fit, or one segment of a longer row
    tokens = min(config.train.micro_batch_tokens, config.curriculum.tokens_per_step)
    narrow = config.precision.precision != "fp32"
    one_layer = replace(config, model=replace(model, layers=4, recurrent_layers=3, attention_layers=1))
    live = {
        "none": 0,
        "ffn": 3 * model.ffn_dim * (2 if narrow else 4),
        "layer": _activation_bytes(one_layer, "none") // 3,
    }
    on_host = config.schedule.average_on_host and kind == "cuda"
    copies = {"none": model.layers, "ffn": model.layers, "layer": 1}[recompute]
    layer_matrices = (model.matrix_parameters - model.embedding_parameters) // model.layers
    # blocks of logits under their bound, the head's whole weight gradient, and hidden states with their gradient
    head = min(500_000_000, tokens * model.vocab_size * 8) + 4 * model.embedding_parameters
    head += tokens * model.hidden_dim * 8
    activations = int(_SAVED_RATIO[kind] * tokens * (_activation_bytes(config, recompute) + live[recompute])) + head
    return {
        "weights": 4 * total,
        "gradients": 4 * total,
        "momentum and moments": 4 * (total - small) + 8 * small,
        "average": 4 * total if config.schedule.average_fraction > 0 and not on_host else 0,
        "16-bit copies": 2 * layer_matrices * copies if narrow else 0,
        "activations and cross entropy": activations,
        "optimizer workspace": 4 * _SLICE_TEMPORARIES * min(_SLICE_ELEMENTS, total),
        "context": int(_CONTEXT_BYTES[kind]),
    }


def _generation_parts(config: Config, kind: str) -> dict[str, int]:
    model = config.model
    width = 4 if config.precision.precision == "fp32" else 2
    gates = model.recurrent_layers * 3 * model.recurrent_heads * model.hidden_dim
    wide = model.vector_parameters + gates
    window = model.sliding_window_size + model.anchor_tokens + 128
    positions = window if model.attention_scope == "window" else model.max_context_len
    prefill = min(config.generation.prefill_chunk, model.max_context_len)
    return {
        "weights": width * (model.total_parameters - wide) + 4 * wide,
        "recurrent state": model.state_bytes(width=width),
        "cache": model.cache_bytes(config.generation.cache_bits, positions=positions),
        "workspace": prefill * width * (6 * model.hidden_dim + 3 * model.ffn_dim) + 4 * 8 * model.vocab_size,
        "context": int(_CONTEXT_BYTES[kind]),
    }


def _decode_bytes(config: Config) -> float:
    """Bytes that one decoding step reads and writes at least: matrices, head, state twice, window cache."""
    model = config.model
    width = {"fp32": 4.0, "fp4": 4.25 / 8, "fp4-emulated": 4.25 / 8}.get(config.precision.precision, 2.0)
    matrices = width * (model.matrix_parameters - model.embedding_parameters)
    wide = 4 if config.precision.precision == "fp32" else 2
    head, state = wide * model.embedding_parameters, model.state_bytes(width=wide)
    return matrices + head + 2 * state + model.cache_bytes(config.generation.cache_bits)


def preflight(config: Config, facts: DeviceFacts, *, folder: Path | None = None) -> Plan:
    """Return the plan of a run that fits; refuse one over 92 % of the memory, over max_hours, or over the free disk."""
    costs, room = plan(config, facts), int(_MEMORY_SHARE * facts.free)
    if costs.training_bytes > room:
        raise ValueError(
            f"training needs {costs.training_bytes:,} bytes of memory, found {room:,} "
            f"(92 % of what {facts.name} has free); {_memory_fixes(config, facts, room)}"
        )
    if costs.hours > config.train.max_hours:
        tokens = int(costs.tokens * config.train.max_hours / costs.hours)
        raise ValueError(
            f"training needs about {costs.hours:,.1f} hours on {facts.name}, max_hours is {config.train.max_hours:g}; "
            f"use a smaller preset, --total-tokens {tokens} or --max-hours {math.ceil(costs.hours)}"
        )
    if folder is not None:
        place = next(p for p in (folder, *folder.resolve().parents) if p.exists())
        free = shutil.disk_usage(place).free
        if costs.disk_bytes > free:
            raise ValueError(
                f"checkpoints need {costs.disk_bytes:,} bytes of disk, found {free:,} at {place}; "
                "use --keep-checkpoints 1, or a --run-dir on a larger disk"
            )
    return costs


def _memory_fixes(config: Config, facts: DeviceFacts, room: int) -> str:
    """Name the cheapest changes that fit, with their totals."""
    fixes, micro = [], config.train.micro_batch_tokens
    while micro > 256:
        micro //= 2
        smaller = replace(config, train=replace(config.train, micro_batch_tokens=micro))
        needed = plan(smaller, facts).training_bytes
        if needed <= room:
            fixes.append(f"--micro-batch-tokens {micro} ({_gigabytes(needed)})")
            break
    recomputed = replace(config, train=replace(config.train, recompute="layer"))
    needed = plan(recomputed, facts).training_bytes
    if needed <= room:
        fixes.append(f"--recompute layer ({_gigabytes(needed)})")
    for name in reversed(PRESETS):
        needed = plan(preset(name), facts).training_bytes
        if needed <= room and PRESETS[name]().model.total_parameters < config.model.total_parameters:
            fixes.append(f"--preset {name} ({_gigabytes(needed)})")
            break
    return f"use {', or '.join(fixes)}" if fixes else "no setting of this program fits"


def choose_preset(facts: DeviceFacts, max_hours: float) -> tuple[str, str]:
    """Return the largest preset that fits the device's memory and the hours, and the line that says so."""
    refused = "none is larger"
    for name in reversed(PRESETS):
        costs = plan(preset(name), facts)
        room = _MEMORY_SHARE * facts.free
        if name == "nano" or (costs.training_bytes <= room and costs.hours <= max_hours):
            return name, (
                f"preset: {name}, {costs.parameters:,} parameters, {_gigabytes(costs.training_bytes)}, about "
                f"{_duration(costs.hours)} ({refused})"
            )
        over = "memory" if costs.training_bytes > room else "hours"
        refused = f"{name} needs {_gigabytes(costs.training_bytes)} and {_duration(costs.hours)}: over the {over}"
    raise AssertionError("PRESETS must hold nano")


# ---------------------------------------------------------------------------
# Weights file

_WEIGHTS_KEY = "description"


def save_weights(
    path: Path,
    tensors: Mapping[str, Tensor],
    config: Config,
    *,
    tokenizer_json: str | None = None,
    eos_id: int | None = None,
    bos_id: int | None = None,
    turn_end_id: int | None = None,
    step: int = 0,
    tokens: int = 0,
) -> None:
    """Write a weights file that alone is enough to generate: tensors, configuration and tokenizer; all or nothing.

    tensors: by parameter name, the tied matrix once. turn_end_id ends an answer, where conversations were trained on.
    The same content gives the same bytes.
    """
    stored = {name: x.detach().to("cpu", torch.float32).contiguous() for name, x in sorted(tensors.items())}
    info = {
        "format_version": FORMAT_VERSION,
        "packed_bits": None,
        # paths of the machine that trained do not belong in a file that is passed on
        "config": asdict(replace(config, train=TrainConfig())),
        "tokenizer_json": tokenizer_json,
        "eos_id": eos_id,
        "bos_id": bos_id,
        "turn_end_id": turn_end_id,
        "parameters": sum(x.numel() for x in stored.values()),
        "step": step,
        "tokens": tokens,
    }
    _write_weights(path, stored, info)


def _write_weights(path: Path, stored: Mapping[str, Tensor], info: Mapping[str, Any]) -> None:
    """Write tensors and their description, with its checksums, all or nothing."""
    info = {**info, "crc32": {name: _crc32(x) for name, x in stored.items()}}
    info["info_crc32"] = _info_crc32(info)
    # one key only: several come out in another order in each process
    metadata = {_WEIGHTS_KEY: json.dumps(info, sort_keys=True)}
    try:
        _replace_durably(path, lambda temporary: save_file(stored, temporary, metadata))
    except (OSError, SafetensorError) as error:
        need = sum(x.nbytes for x in stored.values())
        raise TrainingError(f"{path} could not be written, {_gigabytes(need)} needed: {_one_line(error)}") from None


def load_weights(
    path: Path,
    device: str | torch.device = "cpu",
    *,
    dtype: torch.dtype | None = None,
    precision: PrecisionConfig | None = None,
    attention_scope: str | None = None,
    stream_layers: bool = False,
) -> tuple[HybridLanguageModel, dict[str, Any]]:
    """Read a weights file: the model in evaluation mode, and its description (config, tokenizer_json, eos_id, ...).

    A file of quantize_weights is recognised; its matrices stay packed.

    Args:
        dtype: type of the matrices on the device, bfloat16 for generation; gates and vectors stay float32.
        precision, attention_scope: what to use in place of the file's configuration.
        stream_layers: leave the layers in the file, and read each one for the time that it runs.
    """
    path = Path(path)
    with _open_weights(path) as (file, info):
        config = info["config"]
        # the wavelengths are the trained ones whatever the scope
        scope, stretch = attention_scope or config.model.attention_scope, config.model.rope_scaling
        shape = replace(config.model, attention_scope=scope, rope_stretch=stretch)
        # memory of these is not touched until a tensor replaces it
        model = HybridLanguageModel(shape, precision or config.precision, streamed=stream_layers)
        table = {spec.name: spec for spec in model.parameter_table()}
        packed = _projections(model) if info.get("packed_bits") else {}
        kind, parts = _PACKED.get(info.get("packed_bits"), (None, ()))
        needed = {f"{name}.{part}" for name in packed for part in parts} | (table.keys() - packed.keys())
        _check_names(path, needed, set(file.keys()))
        shapes = {name: spec.parameter.shape for name, spec in table.items()}

        def place(names: Iterable[str], read: Callable[[str], Tensor], check: Callable[[str, Tensor], None]) -> None:
            for name in names:
                if name in packed:
                    held = {part: read(f"{name}.{part}") for part in parts}
                    for part, value in held.items():
                        check(f"{name}.{part}", value)
                    packed[name].take(kind.from_dict(held).to(device))
                    continue
                value, spec = read(name), table[name]
                if value.shape != shapes[name] or value.dtype != torch.float32:
                    found = f"{tuple(value.shape)} {value.dtype}"
                    raise ValueError(f"{path}: {name} must be {tuple(shapes[name])} float32, got {found}")
                check(name, value)
                keep = dtype is None or spec.role in ("vector", "gate")
                spec.parameter.data = value.to(device, torch.float32 if keep else dtype)

        resident = [name for name in table if not (stream_layers and name.startswith("layers."))]
        place(resident, file.get_tensor, partial(_check_sum, path, info["crc32"]))
    if stream_layers:
        stream = _LayerStream(path, info, needed, place, table, packed)
        for i, layer in enumerate(model.layers):
            layer.borrow = partial(stream.borrow, i)
    model.to(device).eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Projection) and module.precision == "fp4" and module.packed is None:
            module.pack()
    return model, info


class _LayerStream:
    """Reads a layer's tensors when it runs, and forgets them when it has run.

    Plain reads at offsets, not a mapping of the file: mapped pages would count as this process's memory until the
    system wants them back. While a layer runs, the system is asked to bring the next one's bytes into its own cache.
    Checksums are compared at the first read of each tensor.
    """

    def __init__(
        self,
        path: Path,
        info: Mapping[str, Any],
        stored: Iterable[str],
        place: Callable[[Iterable[str], Callable[[str], Tensor], Callable[[str, Tensor], None]], None],
        table: Mapping[str, ParameterSpec],
        packed: Mapping[str, Projection],
    ) -> None:
        self._path, self._place, self._table, self._packed = path, place, table, packed
        self._sums, self._checked = info["crc32"], set[str]()
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        self._at = {}
        for name in stored:
            begin, end = header[name]["data_offsets"]
            self._at[name] = 8 + size + begin, end - begin, header[name]["dtype"], header[name]["shape"]
        self._count = 1 + max(int(name.split(".")[1]) for name in table if name.startswith("layers."))
        self._names = [[n for n in table if n.startswith(f"layers.{i}.")] for i in range(self._count)]
        self._stored = [[n for n in stored if n.startswith(f"layers.{i}.")] for i in range(self._count)]
        for i in range(self._count):
            self._drop(i)

    @contextlib.contextmanager
    def borrow(self, index: int) -> Iterator[None]:
        """Give layer `index` its weights for the time of the context."""
        held = self._read(index)
        self._place(self._names[index], held.__getitem__, self._check)
        del held
        try:
            yield
        finally:
            self._drop(index)

    def _check(self, name: str, value: Tensor) -> None:
        if name not in self._checked:
            _check_sum(self._path, self._sums, name, value)
            self._checked.add(name)

    def _drop(self, index: int) -> None:
        for name in self._names[index]:
            self._table[name].parameter.data = torch.empty(0)
            if name in self._packed:
                self._packed[name].packed = None

    def _read(self, index: int) -> dict[str, Tensor]:
        held = {}
        with open(self._path, "rb", buffering=0) as file:
            for name in sorted(self._stored[index], key=self._at.__getitem__):
                offset, _, kind, shape = self._at[name]
                value = torch.empty(shape, dtype=_STORED_TYPES[kind])
                file.seek(offset)
                view = memoryview(value.view(-1).view(torch.uint8).numpy()).cast("B")
                while view:
                    if not (count := file.readinto(view)):
                        raise ValueError(f"{self._path} is cut off at {name}; copy it again")
                    view = view[count:]
                held[name] = value
            if hasattr(os, "posix_fadvise"):
                for name in self._stored[(index + 1) % self._count]:
                    offset, size, *_ = self._at[name]
                    os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_WILLNEED)
        return held


_STORED_TYPES = {"F32": torch.float32, "I8": torch.int8, "U8": torch.uint8, "I64": torch.int64}

# what a packed matrix is stored as, by bits
_PACKED = {4: (PackedFP4, ("codes", "scales", "global_scale", "shape", "signs")), 8: (PackedINT8, ("codes", "scale"))}


class PackedError(NamedTuple):
    """What packing did to one matrix."""

    name: str
    shape: tuple[int, ...]
    relative: float  # norm of the error over the norm of the matrix
    worst: float  # largest error of an element over the root mean square of its row
    bytes: int


def quantize_weights(source: Path, target: Path, bits: int) -> Iterator[PackedError]:
    """Write a weights file with every projection in 4 or 8 bits; yield each matrix's error as it is packed.

    Embedding, norms, gates and taps stay as they are. The source is read a tensor at a time; what is written is held
    until the last matrix has been taken.
    """
    with _open_weights(source) as (file, info):
        if info.get("packed_bits"):
            raise ValueError(f"{source} holds {info['packed_bits']}-bit weights; give the file that training wrote")
        with torch.device("meta"):
            model = HybridLanguageModel(info["config"].model, info["config"].precision)
        projections = _projections(model)
        odd = next((f"{n} has {m.weight.shape[1]}" for n, m in projections.items() if m.weight.shape[1] % 128), None)
        if bits == 4 and odd:
            raise ValueError(f"4-bit weights need inputs in multiples of 128, {odd}; take --bits 8")
        stored: dict[str, Tensor] = {}
        for name in sorted(file.keys()):
            value = file.get_tensor(name)
            _check_sum(source, info["crc32"], name, value)
            if name not in projections:
                stored[name] = value
                continue
            packed = pack_weight(value, bits)
            # copies: the signs of a width are one tensor, which a file would refuse to hold under several names
            parts = {part: x.clone() for part, x in packed.to_dict().items()}
            stored.update({f"{name}.{part}": x for part, x in parts.items()})
            error = unpack_weight(packed, torch.float32) - value
            row = value.square().mean(1).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
            relative = (error.norm() / value.norm().clamp(min=torch.finfo(torch.float32).tiny)).item()
            worst = (error.abs().amax(1) / row).max().item()
            yield PackedError(name, tuple(value.shape), relative, worst, sum(x.nbytes for x in parts.values()))
        described = {key: value for key, value in info.items() if key not in ("crc32", "info_crc32")}
        _write_weights(target, stored, described | {"packed_bits": bits, "config": asdict(info["config"])})


def _projections(model: HybridLanguageModel) -> dict[str, Projection]:
    """Every projection by its weight's name."""
    return {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, Projection)}


def _check_sum(path: Path, sums: Mapping[str, int], name: str, value: Tensor) -> None:
    if _crc32(value) != sums[name]:
        raise ValueError(f"{path}: {name} is damaged (its checksum differs); copy the file again")


def read_weights_info(path: Path) -> dict[str, Any]:
    """Read what a weights file says of itself (config, tokenizer_json, eos_id, tokens, ...), without its tensors."""
    with _open_weights(Path(path)) as (_, info):
        return info


_SESSION_KEY = "session"


def write_session(path: Path, tensors: Mapping[str, Tensor], weights_crc32: int) -> None:
    """Store a generation engine's session, all or nothing, with the checksum of the weights that made it."""
    stored = {name: x.detach().cpu().contiguous() for name, x in sorted(tensors.items())}
    metadata = {_SESSION_KEY: json.dumps({"format_version": FORMAT_VERSION, "weights_crc32": weights_crc32})}
    try:
        _replace_durably(path, lambda temporary: save_file(stored, temporary, metadata))
    except (OSError, SafetensorError) as error:
        need = sum(x.nbytes for x in stored.values())
        raise ValueError(f"{path} could not be written, {_gigabytes(need)} needed: {_one_line(error)}") from None


def read_session(path: Path, weights_crc32: int) -> dict[str, Tensor]:
    """Read a session of these weights; raises ValueError where the file is none, or of other weights."""
    try:
        with safe_open(path, framework="pt") as file:
            info = json.loads((file.metadata() or {}).get(_SESSION_KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is cut off or not a session ({_one_line(error)}); give another --session") from None
    if info.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path} is not a session of this program's format {FORMAT_VERSION}; give another --session")
    if info["weights_crc32"] != weights_crc32:
        raise ValueError(f"{path} is a session of other weights; give those, or another --session")
    return tensors


@contextlib.contextmanager
def _open_weights(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """-> (open file, its description with config as a Config); a fault of the file is a one-line ValueError"""
    try:
        if path.is_dir():
            raise ValueError(f"{path} is a directory; give the weights file in it, final.safetensors of a run")
        with safe_open(path, framework="pt") as file:
            info = _read_info(path, file.metadata())
            info["config"] = config_from_dict(info["config"])
            yield file, info
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give the path of a weights file") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is cut off or not a weights file ({_one_line(error)}); copy it again") from None


def _read_info(path: Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    if not metadata or _WEIGHTS_KEY not in metadata:
        raise ValueError(f"{path} is not a weights file of this program: its metadata has no {_WEIGHTS_KEY}")
    try:
        info = json.loads(metadata[_WEIGHTS_KEY])
        version, sealed = info["format_version"], info["info_crc32"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: its {_WEIGHTS_KEY} is damaged; copy the file again") from None
    if version != FORMAT_VERSION:
        reads = f"this program reads {FORMAT_VERSION}; train again, or use the program that wrote the file"
        raise ValueError(f"{path} has format version {version}, {reads}")
    if sealed != _info_crc32(info):
        raise ValueError(f"{path}: its {_WEIGHTS_KEY} is damaged (its checksum differs); copy the file again")
    return info


def _check_names(path: Path, needed: set[str], found: set[str]) -> None:
    for rule, names in (("lacks", needed - found), ("has the unknown", found - needed)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"{path} {rule} tensor {min(names)}{more}; it belongs to another configuration")


def _crc32(x: Tensor) -> int:
    return zlib.crc32(memoryview(x.reshape(-1).numpy()).cast("B"))


def _info_crc32(info: Mapping[str, Any]) -> int:
    rest = {key: value for key, value in info.items() if key != "info_crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


# ---------------------------------------------------------------------------
# Checkpoints

_STEP_FOLDER = re.compile(r"step-(\d{8,})")


def write_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any], keep: int
) -> Path:
    """Write folder/step-N so that it is there whole or not at all, then drop all but the newest `keep`.

    Args:
        tensors: {file stem: {name: tensor}}.
        facts: JSON-able content of manifest.json beside the digests (state, configuration, data).
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f"{final.name}.tmp-{os.getpid()}"
    need = sum(x.nbytes for part in tensors.values() for x in part.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if need > free:
            raise OSError(f"only {_gigabytes(free)} free")
        temporary.mkdir()
        for stem, part in tensors.items():
            save_file({name: x.detach().contiguous() for name, x in part.items()}, temporary / f"{stem}.safetensors")
        names = sorted(path.name for path in temporary.iterdir())
        with ThreadPoolExecutor() as pool:
            digests = dict(zip(names, pool.map(lambda name: _sha256(temporary / name), names), strict=True))
        _write_json(temporary / "manifest.json", {**facts, "step": step, "sha256": digests})
        for name in (*names, "manifest.json"):
            _sync_file(temporary / name)
        _sync_folder(temporary)
        if final.exists():
            _remove_folder(final)
        os.rename(temporary, final)
        _sync_folder(folder)
        # only now that the new one is durable
        for _, old in _checkpoints(folder)[keep:]:
            _remove_folder(old)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        earlier = [path.name for _, path in _checkpoints(folder) if path != final]
        kept = f"{earlier[0]} is kept" if earlier else "there is no earlier one"
        raise TrainingError(
            f"checkpoint of step {step} could not be written to {folder}, {_gigabytes(need)} needed: "
            f"{_one_line(error)}; {kept}"
        ) from None
    return final


def newest_checkpoint(folder: Path) -> tuple[Path | None, dict[str, Any], list[tuple[Path, str]]]:
    """Find the newest checkpoint whose every digest matches: (path, manifest, [(skipped path, why)]).

    Raises:
        ValueError: there are checkpoints, and none is whole.
    """
    skipped: list[tuple[Path, str]] = []
    for step, path in _checkpoints(folder):
        fault, manifest = _checkpoint_fault(path, step)
        if fault is None:
            return path, manifest, skipped
        skipped.append((path, fault))
    if skipped:
        found = "; ".join(f"{path.name}: {fault}" for path, fault in skipped)
        raise ValueError(f"no checkpoint in {folder} is whole ({found}); start again in another --run-dir")
    return None, {}, skipped


def _checkpoint_fault(path: Path, step: int) -> tuple[str | None, dict[str, Any]]:
    try:
        manifest = json.loads((path / "manifest.json").read_text("utf-8"))
        digests = manifest["sha256"]
        if manifest["step"] != step:
            return f"manifest.json is of step {manifest['step']}", {}
        for name, digest in digests.items():
            if not (path / name).is_file():
                return f"{name} is missing", {}
            if _sha256(path / name) != digest:
                return f"{name} differs from its digest", {}
    except FileNotFoundError:
        return "manifest.json is missing", {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json is damaged ({type(error).__name__})", {}
    return None, manifest


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """-> [(step, path)], newest first"""
    if not folder.is_dir():
        return []
    found = [(_STEP_FOLDER.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def _remove_folder(path: Path) -> None:
    """Rename first, so that a kill in between leaves no half checkpoint under its name."""
    doomed = path.with_name(f"{path.name}.tmp-remove")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


# ---------------------------------------------------------------------------
# Exact segmented backward


def _leaves(carry: Sequence[LayerCarry]) -> list[Tensor]:
    return [x for layer in carry for x in layer]


def _rebuild(carry: Sequence[LayerCarry], leaves: Sequence[Tensor]) -> list[LayerCarry]:
    """Put leaves into the structure of carry."""
    source = iter(leaves)
    return [type(layer)(*(next(source) for _ in layer)) for layer in carry]


def _to_host(x: Tensor) -> Tensor:
    """Copy to pinned memory in stream order on CUDA, and elsewhere tightly (a window is a slice of a longer tensor)."""
    if not x.is_cuda:
        return x.detach().clone()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x.detach(), non_blocking=True)


def _bounds(length: int, segment: int) -> list[tuple[int, int]]:
    return [(start, min(start + segment, length)) for start in range(0, length, segment)]


def _differs(x: Tensor, y: Tensor) -> Tensor:
    return ((x != y) & ~(x.isnan() & y.isnan())).any()


def segmented_backward(
    model: HybridLanguageModel,
    ids: Tensor,
    doc_start: Tensor | None,
    segment_length: int,
    loss_fn: Callable[[Tensor, slice], Tensor],
    *,
    recompute: str = "none",
) -> None:
    """Add the exact gradients of a row's loss to the parameters, keeping one segment's activations at a time.

    Args:
        ids: (B, T) int64; doc_start (B, T) int32 of the whole row.
        loss_fn: maps a segment's hidden states (B, t, D) and its slice of the row to its part of the loss, a 0-D tensor
            with a graph; called once a segment, last segment first.

    Raises:
        TrainingError: a recomputed carry is not the stored one bit for bit, so the gradients are of another function.
    """
    if doc_start is None:
        doc_start = torch.zeros_like(ids, dtype=torch.int32)
    bounds = _bounds(ids.shape[1], segment_length)

    def forward(start: int, stop: int, carry: list[LayerCarry] | None) -> tuple[Tensor, list[LayerCarry]]:
        part = doc_start[:, start:stop] - start
        output = model(ids[:, start:stop], doc_start=part, carry=carry, return_carry=True, recompute=recompute)
        return output.hidden, output.carry

    stored: list[list[Tensor]] = []  # what each segment but the last hands on
    carry = None
    with torch.no_grad():
        for start, stop in bounds[:-1]:
            carry = forward(start, stop, carry)[1]
            stored.append([_to_host(x) for x in _leaves(carry)])
    structure = carry
    gradients: list[Tensor | None] = []
    wrong = torch.zeros((), dtype=torch.bool, device=ids.device)
    for index in reversed(range(len(bounds))):
        start, stop = bounds[index]
        leaves = [x.to(ids.device, non_blocking=True).requires_grad_() for x in stored[index - 1]] if index else []
        hidden, carry = forward(start, stop, _rebuild(structure, leaves) if index else None)
        outputs = [loss_fn(hidden, slice(start, stop))]
        seeds: list[Tensor | None] = [None]
        if index < len(stored):
            for x, kept, gradient in zip(_leaves(carry), stored.pop(), gradients, strict=True):
                wrong |= _differs(x.detach(), kept.to(ids.device, non_blocking=True))
                if gradient is not None and x.requires_grad:
                    outputs.append(x)
                    seeds.append(gradient)
        torch.autograd.backward(outputs, seeds)
        gradients = [x.grad for x in leaves]
    if wrong.item():
        raise TrainingError("a segment's recomputed carry must equal the stored one; the forward pass does not repeat")


# ---------------------------------------------------------------------------
# Evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Result over one split. Loss in nats a target; by_position rows are (first, past the last, loss, targets)."""

    split: str
    length: int
    loss: float
    accuracy: float
    targets: int
    bits_per_byte: float | None
    by_position: tuple[tuple[int, int, float, int], ...]

    def describe(self) -> str:
        """Return the line to print."""
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return (
            f"{self.split}: loss {self.loss:.4f}{bits}, accuracy {self.accuracy:.4f} "
            f"({self.targets:,} targets, rows of {self.length:,})"
        )


def _position_bins(length: int) -> list[tuple[int, int]]:
    """0..15, 16..63, 64..255, ...: positions in the document, factor 4."""
    edges = [0, 16]
    while edges[-1] < length:
        edges.append(4 * edges[-1])
    return list(pairwise(edges))


def _hidden_segments(model: HybridLanguageModel, batch: Batch, segment: int) -> Iterator[tuple[slice, Tensor]]:
    carry = None
    bounds = _bounds(batch.inputs.shape[1], segment)
    for start, stop in bounds:
        part = batch.doc_start[:, start:stop] - start
        ids = batch.inputs[:, start:stop]
        output = model(ids, doc_start=part, carry=carry, return_carry=len(bounds) > 1)
        carry = output.carry
        yield slice(start, stop), output.hidden


@torch.no_grad()
def evaluate(
    model: HybridLanguageModel,
    tokens: TokenFile,
    length: int,
    *,
    split: str = "validation",
    limit_tokens: int | None = None,
    micro_batch_tokens: int = 65_536,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Measure loss, bits per byte, accuracy and loss by position in the document, each target of the split once.

    Rows longer than micro_batch_tokens run in segments. Returns None if `stop` became true on the way.
    """
    device, config = model.embedding.device, model.config
    byte_lengths = None if tokens.read_tokenizer() is None else token_byte_lengths(tokens)
    bins = _position_bins(length)
    sums = torch.zeros(len(bins), 3, dtype=torch.float64, device=device)  # loss, correct, targets
    size = 0
    batches = validation_batches(
        tokens, length, limit_tokens, micro_batch_tokens=micro_batch_tokens, byte_lengths=byte_lengths
    )
    for host_batch in batches:
        if stop():
            return None
        batch = host_batch.to(device)
        position = torch.arange(batch.inputs.shape[1], device=device) - batch.doc_start
        size += batch.target_bytes or 0
        for part, hidden in _hidden_segments(model, batch, micro_batch_tokens):
            targets = torch.where(batch.loss_weights[:, part] > 0, batch.targets[:, part], -100)
            for row, (first, last) in enumerate(bins):
                inside = (position[:, part] >= first) & (position[:, part] < last) & (targets >= 0)
                if inside.any():
                    chosen = targets[inside]
                    loss, best = fused_chunked_cross_entropy(
                        hidden[inside], model.embedding, chosen, denominator=1.0,
                        logit_scale=config.logit_scale, return_argmax=True,
                    )  # fmt: skip
                    sums[row] += torch.stack([loss.double(), (best == chosen).sum().double(), inside.sum().double()])
    rows = sums.tolist()
    loss, correct, count = (sum(column) for column in zip(*rows, strict=True))
    if not count:
        raise ValueError(f"{tokens.path}: supervised tokens = 0 in the part evaluated; give a larger --eval-tokens")
    return Evaluation(
        split=split,
        length=length,
        loss=loss / count,
        accuracy=correct / count,
        targets=int(count),
        bits_per_byte=loss / math.log(2) / size if size else None,
        by_position=tuple((*bins[i], row[0] / row[2], int(row[2])) for i, row in enumerate(rows) if row[2]),
    )


@torch.no_grad()
def multiple_choice(
    model: HybridLanguageModel, encode: Callable[[str], list[int]], path: Path, *, context_id: int | None = None
) -> tuple[float, int]:
    """Score {"prompt", "choices", "answer"} lines by mean log-likelihood a choice token: (share right, questions).

    Args:
        context_id: put before each prompt: the id that opened the training documents, so that an empty prompt has a
            context.
    """
    right = count = 0
    device = model.embedding.device
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        prompt, choices, answer = _read_question(line, f"{path}:{number}")
        context = ([] if context_id is None else [context_id]) + encode(prompt)
        coded = [encode(choice) for choice in choices]
        if not context or not all(coded):
            raise ValueError(f"{path}:{number}: the prompt and every choice must have at least one token")
        scores = []
        for ids in coded:
            row = torch.tensor([context + ids], device=device)
            hidden = model(row[:, :-1]).hidden[0, len(context) - 1 :]
            targets = row[0, len(context) :]
            loss = fused_chunked_cross_entropy(hidden, model.embedding, targets, logit_scale=model.config.logit_scale)
            scores.append(-loss.item())
        right += max(range(len(scores)), key=scores.__getitem__) == answer
        count += 1
    if not count:
        raise ValueError(f"{path} holds no question; give one JSON object a line")
    return right / count, count


def _read_question(line: str, where: str) -> tuple[str, list[str], int]:
    try:
        record = json.loads(line)
        prompt, choices, answer = record["prompt"], record["choices"], record["answer"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where}: must be JSON with prompt, choices and answer") from None
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if len(choices) < 2 or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ValueError(f"{where}: needs two choices or more and the answer's index among them, got {answer!r}")
    return prompt, choices, answer


# ---------------------------------------------------------------------------
# Run folder


def next_run_dir(name: str, root: Path = Path("runs")) -> Path:
    """Return root/NAME-001, or the number after the largest there."""
    taken = [int(m[1]) for p in root.glob(f"{name}-*") if (m := re.fullmatch(rf"{re.escape(name)}-(\d+)", p.name))]
    return root / f"{name}-{max(taken, default=0) + 1:03d}"


def read_run_config(run_dir: Path) -> Config:
    """Return the configuration that a run folder was started with."""
    path = Path(run_dir) / "config.json"
    try:
        return config_from_dict(json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        raise ValueError(f"{run_dir} is no run folder: it has no config.json") from None
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({_one_line(error)}); restore it or start another run") from None


class _RunFolder:
    """The folder of one run, held by a lock that ends with the process."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path, self.checkpoints, self.metrics = path, path / "checkpoints", path / "metrics.jsonl"
        others = sorted(p.name for p in path.iterdir() if p.name != ".lock") if path.is_dir() else []
        if resume and "config.json" not in others:
            raise ValueError(f"{path} holds no run to resume; leave --resume out, or give the run's --run-dir")
        if not resume and others:
            raise ValueError(
                f"run folder {path} must be empty, got {len(others)} entries ({others[0]}, ...); "
                "pass --resume to go on there, or give another --run-dir"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "w")
        except OSError as error:
            raise ValueError(f"run folder {path} cannot be written ({error.strerror}); give another") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"run folder {path} is in use by another process; wait for it, or give another") from None
        for stale in (*path.glob("*.tmp-*"), *self.checkpoints.glob("*.tmp-*")):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()

    def close(self) -> None:
        self._lock.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl; a number that is not finite becomes null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite, sort_keys=True) + "\n")

    def truncate(self, step: int) -> None:
        """Drop the lines past a step, and a torn last line."""
        kept = [record for record in _read_metrics(self.metrics) if record["step"] <= step]
        text = "".join(json.dumps(record, sort_keys=True) + "\n" for record in kept)
        _replace_durably(self.metrics, lambda path: path.write_text(text, encoding="utf-8"))


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    records = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # torn by a kill
    return [record for record in records if isinstance(record, dict) and "step" in record]


def draw_curve(metrics: Path, image: Path) -> None:
    """Draw metrics.jsonl: training loss raw and smoothed with the validation points, and the learning rate below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = _read_metrics(metrics)
    train = [r for r in records if r.get("kind") == "train" and r.get("loss") is not None]
    validation = [r for r in records if r.get("kind") == "validation" and r.get("loss") is not None]
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps, losses = [r["step"] for r in train], [r["loss"] for r in train]
    top.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, raw")
    top.plot(steps, _smoothed(losses), color="tab:blue", label="training, smoothed")
    if validation:
        points = [r["step"] for r in validation], [r["loss"] for r in validation]
        top.plot(*points, "o", color="tab:red", label="validation")
    top.set_ylabel("loss (nats a token)")
    top.legend()
    bottom.plot(steps, [r["matrix_lr"] for r in train], color="tab:green")
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("step")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    canvas = FigureCanvasAgg(figure)
    _replace_durably(image, lambda path: canvas.print_png(str(path)))


def _smoothed(values: Sequence[float]) -> list[float]:
    """Exponential mean over about a twentieth of the points, without the pull of its start."""
    decay = 1 - 1 / (1 + len(values) / 20)
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
        result.append(total / weight)
    return result


class _Interrupts:
    """Turns the first SIGINT, SIGTERM or SIGHUP (a lost terminal) into a flag and the second into an exit.

    A no-op outside the main thread.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_Interrupts":
        if threading.current_thread() is threading.main_thread():
            signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            self._previous = {s: signal.signal(s, self._handle) for s in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self.exit_code:
            os._exit(128 + number)
        self.exit_code = 128 + number
        # straight to the descriptor: a signal may come while a line is printed, and no buffer may be entered twice
        with contextlib.suppress(OSError):
            os.write(2, b"stopping after this step; once more to exit at once\n")


# ---------------------------------------------------------------------------
# Training engine

_MOST_SKIPS = 3  # steps in a row whose gradient is not finite
_CHECK_EVERY = 10  # steps between looks at that count, where the log looks more rarely
# sections and fields that a resumed run must share with the first one, or it would be another run
_FIXED_SECTIONS = ("model", "precision", "optimizer", "schedule", "curriculum")
_FIXED_FIELDS = ("seed", "draft_loss_weight_1", "draft_loss_weight_2", "initial_weights")
# what a run may choose anew when it starts from weights: no tensor has its size, and no trained wavelength its value
_FREE_SHAPE = ("max_context_len", "max_output_len", "sliding_window_size", "anchor_tokens", "attention_scope",
               "rope_stretch", "chunk_size", "wide_tail_layers")  # fmt: skip


@dataclass(kw_only=True, slots=True)
class TrainState:
    """Where a run stands; everything that moves besides tensors of the model, optimizer and average."""

    step: int = 0
    tokens: int = 0
    empty_steps: int = 0
    seconds: float = 0.0
    # weights of the losses summed since the last log line
    weight: float = 0.0
    draft_weight: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, values: Mapping[str, Any]) -> "TrainState":
        return cls(**values)


def _number(value: Tensor | None) -> float | None:
    return None if value is None else float(value)


class TrainResult(NamedTuple):
    """How a run ended: 0, or 130 / 143 after a signal; the weights file if it was written."""

    exit_code: int
    step: int
    weights: Path | None


class TrainingEngine:
    """One training run on one device.

    Args:
        config: the whole configuration; rate and average go over the part of total_tokens that whole steps use.
        tokens, validation: open token files.
        facts: of the device, if they are known already.
        log: takes each line to print.

    Raises:
        ValueError: a precision that the device lacks, ids outside the vocabulary, a curriculum that does not fit.
    """

    def __init__(
        self,
        config: Config,
        tokens: TokenFile,
        *,
        validation: TokenFile | None = None,
        facts: DeviceFacts | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        self.facts = facts or describe_device(config.train.device)
        note = require_precision(config.precision.precision, self.facts)
        for split in (tokens, validation):
            if split is not None and split.largest >= config.model.vocab_size:
                vocabulary = f"the model's vocabulary is {config.model.vocab_size:,}"
                raise ValueError(f"{split.path} holds id {split.largest:,}, {vocabulary}; use a larger --vocab-size")
        stages, notes = _curriculum(config, len(tokens))
        self.loader = PackedSequenceDataLoader(
            tokens, stages, seed=config.train.seed, micro_batch_tokens=config.train.micro_batch_tokens,
            config=config.curriculum,
        )  # fmt: skip
        schedule = replace(config.schedule, total_tokens=self.loader.total_tokens)
        self.config = config
        self.tokens, self.validation, self._log = tokens, validation, log
        self.notes = [*([note] if note else []), *notes]
        self.device = torch.device(self.facts.kind)
        self.recompute = choose_recompute(self.config, self.facts)
        torch.manual_seed(config.train.seed)
        with self.device:
            self.model = HybridLanguageModel(config.model, config.precision)
        self.model.init_weights(config.train.seed)
        if config.train.initial_weights is not None and not config.train.resume:
            self.notes.append(self._start_from(Path(config.train.initial_weights)))
        self.optimizer = DualSpectralOptimizer(
            self.model.parameter_table(), config.optimizer, config.model.hidden_dim,
            named_parameters=self.model.named_parameters(),
        )  # fmt: skip
        self.scheduler = WarmupStableDecayScheduler(schedule)
        self.averager = TerminalShrinkageAverager(schedule)
        self.state = TrainState()
        # nats and right predictions since the last log line: loss, correct, draft 1, draft 2
        self._sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        # skipped steps: in a row, in all, and the step at which there were too many in a row (-1 = none)
        self._skips = torch.tensor([0, 0, -1], device=self.device)
        self._report: StepReport | None = None
        # denominators of the step's losses: main, draft 1, draft 2
        self._denominators = torch.zeros(3, dtype=torch.float64, device=self.device)
        self._recorded = RecordedWork(self.device.type == "cuda")
        self._places: dict[tuple[int, ...], Batch] = {}
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[Path] | None = None
        self._ahead: tuple[int, Future] | None = None

    # One step

    def train_step(self) -> None:
        """Take one optimizer step; a step without supervised targets only counts. Never waits for the device."""
        state = self.state
        step_plan, batches = self._batches(state.step)
        done = self.loader.tokens_before(state.step)
        if step_plan.supervised > 0:
            self.model.seed_rounding(state.step)
            for batch in batches:
                self._accumulate(batch, step_plan)
            multiplier = self.scheduler.multiplier(done, step_plan.tokens)
            fraction = done / self.loader.total_tokens
            # ratios at every step: one more read of the weights, 0.1 % of a step at full size, and one recording less
            self._report = self.optimizer.step(multiplier, fraction, norms=True, run=self._recorded)
            # in place: a recorded backward pass adds to the tensors that it was recorded with
            self.model.zero_grad(set_to_none=False)
            self._count_skips(self._report.finite)
            self.averager.update(self.model.named_parameters(), done, step_plan.tokens)
            state.weight += step_plan.supervised
            for depth in range(self.config.model.draft_depth):
                state.draft_weight[depth] += step_plan.draft_supervised[depth]
        else:
            state.empty_steps += 1
        state.step += 1
        state.tokens = done + step_plan.tokens

    def _batches(self, step: int) -> tuple[StepPlan, list[Batch]]:
        """Return a step's micro-batches and start building the next step's beside the device's work."""
        ahead, self._ahead = self._ahead, None
        result = ahead[1].result() if ahead is not None and ahead[0] == step else self._load(step)
        if step + 1 < self.loader.total_steps:
            self._ahead = step + 1, self._loads.submit(self._load, step + 1)
        return result

    def _load(self, step: int) -> tuple[StepPlan, list[Batch]]:
        step_plan = self.loader.step_batches(step)
        batches = list(step_plan) if step_plan.supervised > 0 else []
        if self.device.type == "cuda":
            batches = [batch.pin_memory() for batch in batches]
        return step_plan, batches

    def _accumulate(self, batch: Batch, step_plan: StepPlan) -> None:
        """Add one micro-batch's gradients; rows longer than a micro-batch run in segments."""
        for place, weight in zip(self._denominators, (step_plan.supervised, *step_plan.draft_supervised), strict=True):
            place.fill_(weight)  # a copy would wait for the device
        length, segment = batch.inputs.shape[1], self.config.train.micro_batch_tokens
        batch = self._placed(batch)
        if length <= segment:
            self._recorded(("gradients", *batch.inputs.shape), lambda: self._whole_rows_backward(batch))
            return

        if self._recorded.holds("gradients"):  # a stage of shorter rows is over
            self._recorded.release()

        def loss_fn(hidden: Tensor, part: slice) -> Tensor:
            return self._loss(hidden, batch, part)

        segmented_backward(self.model, batch.inputs, batch.doc_start, segment, loss_fn, recompute=self.recompute)

    def _placed(self, batch: Batch) -> Batch:
        """Copy a micro-batch to the device: to the same place for every one of a shape, where work is recorded."""
        if not self._recorded.active:
            return batch.to(self.device)
        place = self._places.get(batch.inputs.shape)
        if place is None:
            place = self._places[batch.inputs.shape] = batch.to(self.device)
        place.copy_(batch)
        return place

    def _whole_rows_backward(self, batch: Batch) -> None:
        hidden = self.model(batch.inputs, doc_start=batch.doc_start, recompute=self.recompute).hidden
        self._loss(hidden, batch, slice(0, batch.inputs.shape[1])).backward()

    def _loss(self, hidden: Tensor, batch: Batch, part: slice) -> Tensor:
        """Return the main loss of hidden (B, t, D); the draft head's is taken back here, for it ends at `hidden`."""
        scale, embedding = self.config.model.logit_scale, self.model.embedding
        supervised, *draft_supervised = self._denominators.unbind()
        # the row's places 0, DRAFT_STRIDE, ... that lie in this part; a short last segment may have none
        places = slice(-(-part.start // DRAFT_STRIDE), -(-part.stop // DRAFT_STRIDE))
        if self.model.draft is not None and places.start < places.stop:
            weights = (self.config.train.draft_loss_weight_1, self.config.train.draft_loss_weight_2)
            rooted = hidden[:, -part.start % DRAFT_STRIDE :: DRAFT_STRIDE]
            drafts = self.model.draft_hidden(rooted, batch.draft_ids[:, :, places])
            total = hidden.new_zeros((), dtype=torch.float32)
            for depth, draft in enumerate(drafts):
                targets = batch.draft_targets[depth, :, places].reshape(-1)
                loss = fused_chunked_cross_entropy(
                    draft.flatten(0, 1), embedding, targets, denominator=draft_supervised[depth], logit_scale=scale
                )
                self._sums[2 + depth] += loss.detach() * draft_supervised[depth]
                total = total + weights[depth] * loss
            total.backward()
        targets, row_weights = batch.targets[:, part].reshape(-1), batch.loss_weights[:, part].reshape(-1)
        # last: the gradient is written over the hidden states
        loss, best = fused_chunked_cross_entropy(
            hidden.flatten(0, 1), embedding, targets, loss_weights=row_weights, denominator=supervised,
            logit_scale=scale, return_argmax=True, inplace=True,
        )  # fmt: skip
        self._sums[0] += loss.detach() * supervised
        self._sums[1] += (row_weights * (best == targets)).sum()
        return loss

    def _count_skips(self, finite: Tensor) -> None:
        row, total, stopped = self._skips.unbind()
        bad = (~finite).long()
        row = (row + 1) * bad
        stopped = torch.where((row >= _MOST_SKIPS) & (stopped < 0), self.state.step + 1, stopped)
        self._skips = torch.stack([row, total + bad, stopped])

    def _require_finite(self) -> None:
        stopped = int(self._skips[2])
        if stopped >= 0:
            raise TrainingError(
                f"step {stopped}: the gradient norm was not finite {_MOST_SKIPS} steps in a row; they moved nothing; "
                "the last checkpoint is kept: lower the learning rates, or look at the data there"
            )

    # A whole run

    def run(self) -> TrainResult:
        """Train to the end or to a signal, saving on the way, and write the averaged weights."""
        train = self.config.train
        path = Path(train.run_dir) if train.run_dir else next_run_dir("run")
        folder = _RunFolder(path, resume=train.resume)
        try:
            self._open(folder)
            with _Interrupts() as interrupts:
                self._loop(folder, interrupts)
                if interrupts.exit_code:
                    self._log(f"stopped at step {self.state.step}; go on with --resume --run-dir {folder.path}")
                    return TrainResult(interrupts.exit_code, self.state.step, None)
                return TrainResult(0, self.state.step, self._finish(folder, interrupts))
        finally:
            self._loads.shutdown(wait=True, cancel_futures=True)
            self._writes.shutdown(wait=True)
            folder.close()

    def dry_run(self) -> None:
        """Take the first two steps of every row length on the real data, print what they take, and write nothing.

        The second one is timed: the first compiles kernels. On CUDA it is the one that records, if shorter rows do.
        """
        stages = [replace(stage, steps=2, tokens=2 * stage.tokens_per_step) for stage in self.loader.stages]
        self.loader = PackedSequenceDataLoader(
            self.tokens, stages, seed=self.config.train.seed, config=self.config.curriculum,
            micro_batch_tokens=self.config.train.micro_batch_tokens,
        )  # fmt: skip
        planned = plan(self.config, self.facts).training_bytes
        for line in (*self.tokens.describe(), *self.notes):
            self._log(line)
        try:
            for stage in stages:
                if self.facts.kind == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                self.train_step()
                self._wait()
                started = time.perf_counter()
                self.train_step()
                self._wait()
                seconds = time.perf_counter() - started
                norm = float(self._report.matrix_gradient_norm) if self._report else math.nan
                if not math.isfinite(norm) and self._report:
                    raise TrainingError(f"rows of {stage.length:,}: the gradient norm is {norm}; nothing was written")
                memory = ""
                if self.facts.kind == "cuda":
                    peak = torch.cuda.max_memory_allocated()
                    memory = f", memory {_gigabytes(peak)}, {peak / planned:.0%} of the planned {_gigabytes(planned)}"
                rate = f"{seconds:.2f} s, {stage.tokens_per_step / seconds:,.0f} tok/s"
                size = f"{stage.tokens_per_step:,} tokens a step"
                self._log(f"rows of {stage.length:,}: {size}, {rate}, gradient norm {norm:.3g}{memory}")
        finally:
            self._loads.shutdown(wait=True, cancel_futures=True)
        self._log("dry run: every row length has run; nothing was written")

    def _wait(self) -> None:
        if self.facts.kind == "cuda":
            torch.cuda.synchronize()

    def _open(self, folder: _RunFolder) -> None:
        """Print what is known, and restore the newest whole checkpoint of a resumed run."""
        for line in (*self.tokens.describe(), *self.notes, *self.loader.describe()):
            self._log(line)
        if self.config.train.resume:
            self._resume(folder)
        else:
            _replace_durably(folder.path / "config.json", lambda path: _write_json(path, asdict(self.config)))
        count = self.config.model.total_parameters
        steps = f"{self.loader.total_steps:,} steps, recompute {self.recompute}"
        self._log(f"run: {folder.path}, {count:,} parameters, {steps}")
        if self.validation is not None and (line := self._baselines()):
            self._log(line)

    def _baselines(self) -> str | None:
        """What knowing no context scores on the validation split, and what a general compressor does."""
        tokenizer = self.validation.read_tokenizer()
        if tokenizer is None:
            return None
        length = self._validation_length()
        # the targets that validation reads: whole rows
        limit = max(1, self.config.train.eval_tokens // length) * length
        unigram = unigram_bits_per_byte(self.tokens, self.validation, length, limit_tokens=limit)
        packed = xz_bits_per_byte(decode_bytes(tokenizer, self.validation.ids[:limit].tolist()))
        return f"validation baselines, bits per byte: unigram {unigram:.4f}, xz -9 {packed:.4f}"

    def _loop(self, folder: _RunFolder, interrupts: _Interrupts) -> None:
        train, total = self.config.train, self.loader.total_steps
        saved_at, logged_at, since = time.monotonic(), time.perf_counter(), self.state.tokens
        saved = self.state.step if train.resume else -1
        while self.state.step < total and not interrupts.exit_code:
            self.train_step()
            step = self.state.step
            last = step == total
            if step == 1 or step % train.log_every == 0 or last:
                seconds = self._log_step(folder, logged_at, since)
                self.state.seconds += seconds
                logged_at, since = time.perf_counter(), self.state.tokens
                if self._saving is not None and self._saving.done():
                    self._saved()
            elif step % _CHECK_EVERY == 0:
                self._require_finite()
            if train.eval_every and step % train.eval_every == 0 and not last:
                self._validate(folder, interrupts)
                logged_at = time.perf_counter()
            due = train.save_every and step % train.save_every == 0
            if due or last or interrupts.exit_code or time.monotonic() - saved_at > 60 * train.save_every_minutes:
                self._save_behind(folder.checkpoints)
                saved, saved_at, logged_at = step, time.monotonic(), time.perf_counter()
                draw_curve(folder.metrics, folder.path / "loss.png")
        if self.state.step != saved and self.state.step:
            self._save_behind(folder.checkpoints)
        self._saved()

    def _log_step(self, folder: _RunFolder, logged_at: float, since: int) -> float:
        """Print and store one line; reading the sums is the only wait for the device. -> seconds since the last."""
        state, config = self.state, self.config
        loss, correct, *drafts = self._sums.tolist()
        _, skipped, _ = self._skips.tolist()
        seconds = max(time.perf_counter() - logged_at, 1e-9)
        rate = (state.tokens - since) / seconds
        flops = rate * config.model.training_flops_per_token()
        factor = self.scheduler.multiplier(max(0, state.tokens - 1), 1)
        weight = state.weight or math.nan
        bytes_per_token = self.tokens.facts.get("text_bytes", 0) / len(self.tokens)
        record: dict[str, Any] = {
            "kind": "train", "step": state.step, "tokens": state.tokens, "loss": loss / weight,
            "accuracy": correct / weight,
            "draft_losses": [x / w for x, w in zip(drafts, state.draft_weight, strict=True) if w],
            "bits_per_byte": loss / weight / math.log(2) / bytes_per_token if bytes_per_token else None,
            "lr_multiplier": factor, "matrix_lr": factor * _matrix_lr(config),
            "embedding_lr": factor * config.optimizer.embedding_lr,
            "matrix_gradient_norm": float(self._report.matrix_gradient_norm) if self._report else None,
            "adaptive_gradient_norm": float(self._report.adaptive_gradient_norm) if self._report else None,
            "matrix_update_ratio": _number(self._report and self._report.matrix_update_ratio),
            "adaptive_update_ratio": _number(self._report and self._report.adaptive_update_ratio),
            "spectral_penalty": float(self.optimizer.spectral_penalty(state.tokens / self.loader.total_tokens)),
            "tokens_per_second": rate, "seconds": seconds, "empty_steps": state.empty_steps, "skipped_steps": skipped,
            "mfu": flops / self.facts.peak(config.precision.precision) if self.facts.chip else None,
            "mfu_sm103": flops / TARGET_CHIP.bf16 if self.facts.kind == "cuda" else None,
            "memory": torch.cuda.max_memory_allocated() if self.facts.kind == "cuda" else None,
            "eta_seconds": (self.loader.total_tokens - state.tokens) / rate,
        }  # fmt: skip
        folder.append(record)
        self._log(_progress_line(record, self.loader.total_steps))
        self._sums.zero_()
        state.weight, state.draft_weight = 0.0, [0.0, 0.0]
        self._require_finite()
        return seconds

    def _validation_length(self) -> int:
        length = max(stage.length for stage in self.loader.stages if not stage.min_document)
        return min(length, len(self.validation) - 1)

    def _validate(self, folder: _RunFolder, interrupts: _Interrupts, split: str = "validation") -> None:
        if self.validation is None:
            return
        # evaluation mode multiplies as generation does: 8- and 4-bit operands are training's alone
        self.model.eval()
        result = evaluate(
            self.model, self.validation, self._validation_length(), split=split,
            limit_tokens=self.config.train.eval_tokens, micro_batch_tokens=self.config.train.micro_batch_tokens,
            stop=lambda: bool(interrupts.exit_code),
        )  # fmt: skip
        self.model.train()
        if result is not None:
            record = asdict(result) | {"kind": "validation", "step": self.state.step, "tokens": self.state.tokens}
            folder.append(record)
            self._log(result.describe())

    def _finish(self, folder: _RunFolder, interrupts: _Interrupts) -> Path:
        """Write the averaged weights, then validate them."""
        average = self._average()
        path = folder.path / "final.safetensors"
        save_weights(
            path, average, self.config, tokenizer_json=self.tokens.read_tokenizer(),
            **{name: self.tokens.facts.get(name) for name in ("eos_id", "bos_id", "turn_end_id")},
            step=self.state.step, tokens=self.state.tokens,
        )  # fmt: skip
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(average.pop(name))
        self._log(f"wrote {path} ({self.state.empty_steps} empty steps, {int(self._skips[1])} skipped steps)")
        self._validate(folder, interrupts, split="validation, averaged weights")
        draw_curve(folder.metrics, folder.path / "loss.png")
        return path

    def _average(self) -> dict[str, Tensor]:
        """Return the terminal average, or a copy of the weights where no step counted towards it."""
        if self.averager.state_dict()["weight"] > 0:
            return self.averager.consolidate()
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    # Saving and restoring

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of this step into a folder of checkpoints, and wait for it."""
        self._save_behind(folder)
        return self._saved()

    def _save_behind(self, folder: Path) -> None:
        """Copy this step's tensors to the host and let a thread hash, write and flush them while training goes on.

        One write at a time: an earlier one is waited for. Its fault ends the run at the next log line or save. At full
        size the copy is 68 GB, some seconds, and the write about a minute.
        """
        self._saved()
        tensors, facts = self._content()
        copies = {
            stem: {name: x.detach().to("cpu", copy=True) for name, x in part.items()} for stem, part in tensors.items()
        }
        keep = self.config.train.keep_checkpoints
        self._saving = self._writes.submit(write_checkpoint, folder, self.state.step, copies, facts, keep)

    def _saved(self) -> Path | None:
        """Wait for the checkpoint that is being written, if there is one."""
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        path = saving.result()
        self._log(f"saved {path}")
        return path

    def _content(self) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]:
        """-> what a checkpoint holds: tensors by file, facts of the manifest"""
        extra = {"rng_cpu": torch.get_rng_state(), "sums": self._sums, "skips": self._skips}
        if self.device.type == "cuda":
            extra["rng_cuda"] = torch.cuda.get_rng_state()
        tensors = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.averager.state_dict(),
            "extra": extra,
        }
        facts = {
            "format_version": FORMAT_VERSION,
            "state": self.state.state_dict(),
            "config": asdict(self.config),
            "data": _data_facts(self.tokens),
        }
        return tensors, facts

    def load(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Restore a checkpoint that newest_checkpoint found whole; refuse one of another configuration or corpus."""
        _check_same_run(manifest, self.config, self.tokens)
        parts = {stem: load_file(path / f"{stem}.safetensors") for stem in ("model", "optimizer", "average", "extra")}
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.averager.load_state_dict(parts["average"])
        self.state = TrainState.from_state_dict(manifest["state"])
        self._sums.copy_(parts["extra"]["sums"])
        self._skips.copy_(parts["extra"]["skips"])
        torch.set_rng_state(parts["extra"]["rng_cpu"])
        if self.device.type == "cuda" and "rng_cuda" in parts["extra"]:
            torch.cuda.set_rng_state(parts["extra"]["rng_cuda"])

    def _start_from(self, path: Path) -> str:
        """Take the weights of a file whose shape and tokenizer are this run's. -> the line to print"""
        info = read_weights_info(path)
        _check_start(path, info, self.config, self.tokens)
        # read on the host and not packed: the masters are float32 whatever the run multiplies in
        source, _ = load_weights(path, precision=PrecisionConfig(precision="fp32"))
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), source.parameters(), strict=True):
                parameter.copy_(value)
        return f"start: weights of {path}, trained on {info['tokens']:,} tokens, checksum {info['info_crc32']:08x}"

    def _resume(self, folder: _RunFolder) -> None:
        path, manifest, skipped = newest_checkpoint(folder.checkpoints)
        for damaged, why in skipped:
            self._log(f"skipped {damaged.name}: {why}; it is now called damaged-{damaged.name}")
        if path is None:
            self._log("no checkpoint yet: starting at step 0")
            if self.config.train.initial_weights is not None:
                self._log(self._start_from(Path(self.config.train.initial_weights)))
        else:
            self.load(path, manifest)
            self._log(f"resumed {path} at step {self.state.step}")
        for damaged, _ in skipped:
            # out of the way of keep_checkpoints, which counts whole ones
            shutil.rmtree(aside := damaged.with_name(f"damaged-{damaged.name}"), ignore_errors=True)
            os.rename(damaged, aside)
        folder.truncate(self.state.step)


def _matrix_lr(config: Config) -> float:
    """Rate of a matrix that reads the residual stream, schedule multiplier 1."""
    optimizer = config.optimizer
    if optimizer.lr_rule == "spectral":
        return optimizer.spectral_lr
    return optimizer.matrix_lr_base * optimizer.d_base / config.model.hidden_dim


def _data_facts(tokens: TokenFile) -> dict[str, Any]:
    ends = tokens.ids[: 1 << 16].tobytes() + tokens.ids[-(1 << 16) :].tobytes()
    return {
        "count": len(tokens),
        "documents": len(tokens.ends),
        "supervised": tokens.supervised,
        "sha256_of_both_ends": hashlib.sha256(ends).hexdigest(),
    }


def _check_start(path: Path, info: Mapping[str, Any], config: Config, tokens: TokenFile) -> None:
    """Refuse weights of another shape, other rotary wavelengths or another tokenizer."""
    model = info["config"].model
    for name, value in asdict(model).items():
        if name not in _FREE_SHAPE and getattr(config.model, name) != value:
            found = getattr(config.model, name)
            raise ValueError(f"{path} has {name} {value}, the run has {found}; leave --preset and shape flags out")
    if model.rope_scaling != config.model.rope_scaling:
        found = f"{path} has wavelengths stretched by {model.rope_scaling:g}, the run by {config.model.rope_scaling:g}"
        raise ValueError(f"{found}; pass --rope-stretch {model.rope_scaling:g}")
    ours = info["tokenizer_json"]
    if ours is not None:
        theirs, place = tokens.read_tokenizer(), tokens.path.parent
        if theirs is None:
            raise ValueError(f"{place} has no tokenizer.json, but {path} has one; copy that of its token file there")
        if json.loads(theirs) != json.loads(ours):
            fix = "make the data by `prepare --tokenizer` with the tokenizer.json that the weights were trained with"
            raise ValueError(f"tokenizer.json in {place} differs from that of {path}; {fix}")


def _check_same_run(manifest: Mapping[str, Any], config: Config, tokens: TokenFile) -> None:
    version = manifest.get("format_version", 1)
    if version != FORMAT_VERSION:
        raise ValueError(f"the checkpoint has format version {version}, this program goes on from {FORMAT_VERSION}; "
                         "start again in another --run-dir")  # fmt: skip
    # a setting that is younger than the checkpoint had its default
    saved, now = asdict(config_from_dict(manifest["config"])), asdict(config)
    pairs = [(f"{s}.{key}", saved[s].get(key), value) for s in _FIXED_SECTIONS for key, value in now[s].items()]
    pairs += [(f"train.{key}", saved["train"].get(key), now["train"][key]) for key in _FIXED_FIELDS]
    pairs += [(f"data.{key}", manifest["data"].get(key), value) for key, value in _data_facts(tokens).items()]
    for name, before, value in pairs:
        if before != value:
            raise ValueError(f"a resumed run must keep {name} = {before}, got {value}; change it in another --run-dir")


def _progress_line(record: Mapping[str, Any], total_steps: int) -> str:
    parts = [f"step {record['step']}/{total_steps}", f"loss {record['loss']:.4f}"]
    if record["bits_per_byte"] is not None:
        parts.append(f"bpb {record['bits_per_byte']:.4f}")
    parts += [f"acc {record['accuracy']:.4f}", f"{record['tokens_per_second']:,.0f} tok/s"]
    if record["mfu"] is not None:
        parts.append(f"mfu {record['mfu']:.1%}")
    if record["memory"] is not None:
        parts.append(f"mem {_gigabytes(record['memory'])}")
    minutes, seconds = divmod(int(record["eta_seconds"]), 60)
    parts += [f"lr {record['matrix_lr']:.4g}", f"eta {minutes // 60}:{minutes % 60:02d}:{seconds:02d}"]
    return "  ".join(parts)
