"""Shared by the learning benchmarks: train the product or another model on the same batches, and report.

Every run of one table reads the same token file in the product's own order (same seed: the same batches), gets a whole
schedule of its own for its number of tokens, and is measured on the same validation targets. Product runs go through
TrainingEngine; its terminal average is what is measured at the end. Seconds are of training alone: validation, the
first step (compilation) and the second (recording) are left out, and counted as two mean steps. Runs are stored as they
end, and the same command goes on with what is missing: a table may take several calls.
"""

import argparse
import gc
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from dataset_pipeline import (
    PackedSequenceDataLoader,
    TokenFile,
    build_curriculum,
    open_tokens,
    token_byte_lengths,
    validation_batches,
)
from model_config import Config, preset
from train_engine import TrainingEngine, evaluate

CURVE_POINTS = 10  # validation losses on the way


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A token file and its held-out split, and how much of that is read."""

    tokens: TokenFile
    validation: TokenFile
    val_tokens: int

    @classmethod
    def open(cls, path: str, val_tokens: int) -> "Corpus":
        file = Path(path)
        return cls(tokens=open_tokens(file), validation=open_tokens(file.with_name("tokens.val.bin")),
                   val_tokens=val_tokens)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run. nats: validation loss at the end; curve: (tokens, seconds, nats) on the way."""

    name: str
    point: dict[str, float]
    seed: int
    tokens: int
    parameters: int
    nats: float
    bits: float | None
    seconds: float
    curve: list[tuple[int, float, float]] = field(repr=False)
    key: str = ""  # of Results

    def row(self) -> str:
        rates = " ".join(f"{k}={v:.3g}" for k, v in self.point.items())
        bits = math.nan if self.bits is None else self.bits
        return (f"{self.name:34.34s} {self.seed:4d} {self.tokens / 1e6:7.2f} {self.parameters / 1e6:7.1f} "
                f"{self.nats:8.4f} {bits:7.4f} {self.seconds:7.1f}  {rates}")  # fmt: skip


HEADER = f"{'model':34s} {'seed':>4s} {'M tok':>7s} {'M par':>7s} {'nats':>8s} {'bits/B':>7s} {'seconds':>7s}  rates"


def product_config(name: str, corpus: Corpus, *, tokens: int, context: int, seed: int = 0, **values: object) -> Config:
    """Return a preset for one run of the tables: 32,768 tokens a step whatever the size, vocabulary of the file."""
    given = {"vocab_size": corpus.tokens.vocab_size, "context": context, "total_tokens": tokens, "seed": seed,
             "tokens_per_step": 32768, "micro_batch_tokens": 32768}  # fmt: skip
    return preset(name).with_values({**given, **values})


class Clock:
    """Seconds of training steps, without what lies between them and without the first two steps' set-up."""

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0

    def run(self, step: Callable[[], None], count: int) -> None:
        for _ in range(min(count, max(0, 2 - self.steps))):
            step()
            self.steps += 1
            count -= 1
        _synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        _synchronize()
        self.seconds += time.perf_counter() - begin
        self.steps += count

    @property
    def total(self) -> float:
        return self.seconds * self.steps / max(1, self.steps - 2)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def points(steps: int) -> list[int]:
    """Step counts at which validation is read: equal parts, the last step included."""
    return sorted({max(1, round(steps * (i + 1) / CURVE_POINTS)) for i in range(CURVE_POINTS)})


def train_product(
    config: Config,
    corpus: Corpus,
    *,
    name: str = "hybrid",
    point: dict[str, float] | None = None,
    prepare: Callable[[TrainingEngine], None] = lambda engine: None,
    keep: Callable[[TrainingEngine], None] = lambda engine: None,
) -> Run:
    """Train the product through its engine. prepare sees it before the first step, keep with the averaged weights."""
    run = _train_product(config, corpus, name, point or {}, prepare, keep)
    release()
    return run


def _train_product(config, corpus, name, point, prepare, keep) -> Run:
    engine = TrainingEngine(config, corpus.tokens, validation=corpus.validation, log=lambda line: None)
    prepare(engine)
    length = config.curriculum.context

    def measure() -> tuple[float, float | None]:
        engine.model.eval()
        result = evaluate(engine.model, corpus.validation, length, limit_tokens=corpus.val_tokens,
                          micro_batch_tokens=config.train.micro_batch_tokens)  # fmt: skip
        engine.model.train()
        return result.loss, result.bits_per_byte

    clock, curve = Clock(), []
    for stop in points(engine.loader.total_steps):
        clock.run(engine.train_step, stop - engine.state.step)
        curve.append((engine.state.tokens, clock.total, measure()[0]))
    if engine.averager.state_dict()["weight"] > 0:
        average = engine.averager.consolidate()
        with torch.no_grad():
            for key, parameter in engine.model.named_parameters():
                parameter.copy_(average[key])
    nats, bits = measure()
    keep(engine)
    return Run(name=name, point=point, seed=config.train.seed, tokens=engine.loader.total_tokens,
               parameters=config.model.matrix_parameters, nats=nats, bits=bits, seconds=clock.total,
               curve=curve)  # fmt: skip


def release() -> None:
    """Give the memory of what is no longer referenced back, so that one run does not bear on the next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def loader_for(config: Config, corpus: Corpus) -> PackedSequenceDataLoader:
    """Return the loader that a product run of this configuration reads from."""
    stages, _ = build_curriculum(config.schedule.total_tokens, config.curriculum,
                                 max_context_len=config.model.max_context_len)  # fmt: skip
    return PackedSequenceDataLoader(corpus.tokens, stages, seed=config.train.seed, config=config.curriculum,
                                    micro_batch_tokens=config.train.micro_batch_tokens)  # fmt: skip


@torch.no_grad()
def measure_rows(loss_rows: Callable, corpus: Corpus, config: Config, device: torch.device) -> float:
    """Return the validation loss in nats of a model given as loss_rows(ids, doc_start, targets) -> (B * T,)."""
    total = weight = 0.0
    for batch in validation_batches(corpus.validation, config.curriculum.context, corpus.val_tokens,
                                    micro_batch_tokens=config.train.micro_batch_tokens):  # fmt: skip
        b = batch.to(device)
        rows = loss_rows(b.inputs, b.doc_start, b.targets)
        total += (rows * b.loss_weights.flatten()).sum().item()
        weight += batch.supervised
    return total / weight


def search(
    start: dict[str, int], run: Callable[[dict[str, int]], float], bounds: dict[str, range] | None = None
) -> dict[tuple[int, ...], float]:
    """Walk over a grid to a point whose neighbours along each axis are all worse; return every value that was run."""
    seen: dict[tuple[int, ...], float] = {}

    def value(point: dict[str, int]) -> float:
        key = tuple(point.values())
        if key not in seen:
            seen[key] = run(point)
        return seen[key]

    best, moved = start, True
    while moved:
        moved = False
        for axis in start:
            for step in (1, -1):
                other = best | {axis: best[axis] + step}
                if bounds and axis in bounds and other[axis] not in bounds[axis]:
                    continue
                if value(other) < value(best):
                    best, moved = other, True
                    break
    return seen


def mean_and_spread(runs: Sequence[Run]) -> str:
    """Write the mean of several seeds with their extremes."""
    values = [run.nats for run in runs]
    return f"{sum(values) / len(values):.4f} ({min(values):.4f}..{max(values):.4f}, {len(values)} seeds)"


def title(corpus: Corpus, context: int) -> str:
    """Name data, device and versions: what a number needs beside it."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    data = f"{len(corpus.tokens):,} training tokens, rows of {context:,}, validation on {corpus.val_tokens:,} tokens"
    return f"{data}; {device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"


class Results:
    """The runs of one table in order, stored as they end, a JSON line each; one that the file holds is not repeated.

    A run is known by its name, point, whole configuration, corpus and device; the code is not part of that: after a
    change that bears on the losses, delete the file.
    """

    def __init__(self, path: Path, corpus: Corpus) -> None:
        self.path, self.runs = path, list[Run]()
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        self._setting = [device, len(corpus.tokens), len(corpus.validation), corpus.val_tokens]
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        self._stored = {run.key: run for run in (Run(**json.loads(line)) for line in lines)}

    def once(self, name: str, config: Config, train: Callable[[], Run], point: dict[str, float] | None = None) -> Run:
        """Return the stored run of this description, or the one that train makes."""
        described = json.dumps([name, point or {}, asdict(config), *self._setting], sort_keys=True)
        key = hashlib.sha256(described.encode()).hexdigest()[:16]
        run = self._stored.get(key)
        if run is None:
            run = replace(train(), key=key)
            self._stored[key] = run
            whole = self.path.with_suffix(".part")
            whole.write_text("".join(json.dumps(asdict(x)) + "\n" for x in self._stored.values()), encoding="utf-8")
            whole.replace(self.path)
        print(run.row(), flush=True)
        self.runs.append(run)
        return run


def parser(doc: str | None, *, tokens: int, context: int = 2048) -> argparse.ArgumentParser:
    """Return the command line that the learning benchmarks share."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", required=True, help="token file of prepare; tokens.val.bin lies beside it")
    made.add_argument("--tokens", type=int, default=tokens)
    made.add_argument("--context", type=int, default=context)
    made.add_argument("--val-tokens", type=int, default=300_000)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", required=True)
    return made


def begin(arguments: argparse.Namespace) -> tuple[Corpus, Path]:
    """Open the corpus and the folder of results, and print what every number of the table needs beside it."""
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.open(arguments.data, arguments.val_tokens)
    print(title(corpus, arguments.context))
    print(HEADER)
    return corpus, out


def axes(rows: int = 1, columns: int = 1, size: tuple[float, float] = (7, 4.5)):
    """Return a figure and its axes, drawn without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def bits_per_nat(corpus: Corpus, context: int) -> float:
    """Return what turns nats a target into bits a byte of text on this validation split."""
    lengths = token_byte_lengths(corpus.validation)
    batches = list(validation_batches(corpus.validation, context, corpus.val_tokens, byte_lengths=lengths))
    return sum(b.supervised for b in batches) / sum(b.target_bytes for b in batches) / math.log(2)


def count_parameters(model: nn.Module) -> int:
    """Count the matrices alone, as ModelConfig.matrix_parameters does."""
    return sum(p.numel() for p in model.parameters() if p.dim() == 2)
