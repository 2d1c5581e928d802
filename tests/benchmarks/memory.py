"""Does the recurrent memory carry facts past the attention window? Four parts: a table, a picture and a JSON line each.

    python tests/benchmarks/memory.py associative --out memory                     # pairs x distance
    python tests/benchmarks/memory.py needle --data data/tokens.bin --out memory   # depth x length
    python tests/benchmarks/memory.py position --weights W --data data/tokens.val.bin --out memory
    python tests/benchmarks/memory.py spectrum --weights W --data data/tokens.val.bin --out memory

associative and needle make a token file with a response mask, train preset `small` on it with the product's engine
(30 M tokens in rows of 4,096, no draft head) and count right answers, always the most likely of all ids. They take
--model dense for a baseline with the same window and anchors, --weights FILE to score a file that was trained before,
and --preset nano with small sizes as a smoke test on a CPU. Keys and values are drawn anew for every document, so
weights cannot hold them. A document:

    associative   BEGIN  filler * anchors  k v k v ...  filler * gap  ASK  k v ...          (half of the pairs asked)
    needle        BEGIN  filler * anchors  filler  TELL k v  filler ...  ASK  k v ...       (at stated depths)

Only the v after ASK is supervised. Half of the facts stay unasked: an answer stays readable to later questions, so with
all of them asked, a model that knows the values but not their keys would be right for 52 % of 4 pairs by elimination.
What such a guess still earns is printed beside each row. Facts come after the anchors, the tokens that attention sees
from everywhere. A question lies more than `gap` and less than gap + 3 pairs tokens after its pair. A stack of n
attention layers can relay a fact over n windows without any memory: 2 in the hybrid `small`, as many as it has layers
in a dense model. Training rows are whole documents, first short ones with few facts, from half of the run on with gaps
log-uniform up to the row.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dataset_pipeline import (  # noqa: E402
    CurriculumStage,
    PackedSequenceDataLoader,
    TokenFile,
    build_curriculum,
    open_tokens,
    validation_batches,
    write_tokens,
)
from hybrid_model import HybridLanguageModel  # noqa: E402
from model_config import PRESETS, Config, preset  # noqa: E402
from recurrent_layers import half_life_biases  # noqa: E402
from train_engine import TrainingEngine, TrainingError, describe_device, evaluate, load_weights  # noqa: E402

# ---------------------------------------------------------------------------
# Documents

BEGIN, TELL, ASK = 0, 1, 2
SHORTEST_GAP = 4  # filler tokens
DEPTHS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # share of the haystack that comes before the needle
MOST_ASKED = 8  # in one training haystack, beside as many decoys


class Document(NamedTuple):
    """One document: ids (n,) int64, mask (n,) uint8 with 1 at answers, and what is known of each answer, in order."""

    ids: np.ndarray
    mask: np.ndarray
    keys: np.ndarray  # (answers,) which fact is asked: index of the pair, or of the depth given
    distances: np.ndarray  # (answers,) tokens from the key's first place to the question


@dataclass(frozen=True, kw_only=True)
class Alphabet:
    """Ids: three marks, then keys, then values, then filler (random ids, or a text's ids shifted by `first_filler`)."""

    keys: int
    values: int
    filler: int
    text: np.ndarray | None = None  # ids that filler is cut from

    @property
    def first_filler(self) -> int:
        return ASK + 1 + self.keys + self.values

    @property
    def vocab_size(self) -> int:
        return self.first_filler + self.filler

    def facts(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draw (count, 2) ids: keys all different, each value independent of the others."""
        keys = rng.choice(self.keys, count, replace=False)
        values = rng.integers(self.keys, self.keys + self.values, count)
        return np.stack([keys, values], 1) + ASK + 1

    def draw_filler(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draw (count,) ids: independent ones, or a stretch of the text, which goes on at its start after its end."""
        if self.text is None:
            return rng.integers(self.first_filler, self.vocab_size, count)
        start = int(rng.integers(len(self.text)))
        return self.text.take(np.arange(start, start + count), mode="wrap").astype(np.int64) + self.first_filler


def make_alphabets(vocab_size: int, tokens: TokenFile | None) -> tuple[Alphabet, Alphabet]:
    """Return the alphabets of training and of evaluation: a quarter keys, a quarter values, the rest filler.

    With a token file, `vocab_size` only sizes the quarters; filler is its text, the last tenth kept for evaluation.
    """
    quarter = vocab_size // 4
    if tokens is None:
        alphabet = Alphabet(keys=quarter, values=quarter, filler=vocab_size - ASK - 1 - 2 * quarter)
        if alphabet.filler < 2 or quarter < 2:
            raise ValueError(f"--vocab-size must be at least 12 for keys, values and filler, got {vocab_size}")
        return alphabet, alphabet
    cut = len(tokens) * 9 // 10
    parts = [
        Alphabet(keys=quarter, values=quarter, filler=tokens.largest + 1, text=text)
        for text in (tokens.ids[:cut], tokens.ids[cut:])
    ]
    return parts[0], parts[1]


class Task(Protocol):
    """What training rows are filled with: a document of exactly `length` tokens for any length from `least` on."""

    least: int

    def draw(self, rng: np.random.Generator, room: int, longest: int) -> Document:
        """Draw a document that leaves none of `room`, or at least `least`; about `longest` tokens at most."""


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))


def guess_rate(facts: int, asked: int) -> float:
    """Return how often a model is right that knows the document's values, and which are used up, but no keys."""
    return sum(1 / (facts - i) for i in range(asked)) / asked


@dataclass(frozen=True)
class Associative:
    """Pairs once, a gap, half of the keys asked in another order."""

    alphabet: Alphabet
    anchors: int
    pairs: tuple[int, ...]  # each at least 2

    def length(self, pairs: int, gap: int) -> int:
        return self.anchors + 2 + 2 * pairs + 2 * (pairs // 2) + gap

    @property
    def least(self) -> int:
        return self.length(min(self.pairs), SHORTEST_GAP)

    def make(self, rng: np.random.Generator, pairs: int, gap: int) -> Document:
        """Lay one document out; `gap` filler tokens lie between the last pair and ASK."""
        facts, order = self.alphabet.facts(rng, pairs), rng.permutation(pairs)[: pairs // 2]
        filler = self.alphabet.draw_filler(rng, self.anchors + gap)
        parts = [[BEGIN], filler[: self.anchors], facts.ravel(), filler[self.anchors :], [ASK], facts[order].ravel()]
        ids = np.concatenate(parts).astype(np.int64)
        told = self.anchors + 1 + 2 * order
        asked = len(ids) - 2 * len(order) + 2 * np.arange(len(order))
        mask = np.zeros(len(ids), np.uint8)
        mask[asked + 1] = 1
        return Document(ids, mask, order, asked - told)

    def draw(self, rng: np.random.Generator, room: int, longest: int) -> Document:
        short = max(self.least, min(room, longest))
        pairs = int(rng.choice([k for k in self.pairs if self.length(k, SHORTEST_GAP) <= short]))
        widest = room - self.length(pairs, 0)
        gap = min(widest, _log_uniform(rng, SHORTEST_GAP, longest - self.length(pairs, 0)))
        return self.make(rng, pairs, gap if widest - gap >= self.least else widest)


@dataclass(frozen=True)
class Needle:
    """Sentences TELL key value in a haystack; at its end those at the depths given are asked, decoys are not."""

    alphabet: Alphabet
    anchors: int

    def overhead(self, asked: int, decoys: int) -> int:
        return self.anchors + 2 + 5 * asked + 3 * decoys

    @property
    def least(self) -> int:
        return self.overhead(1, 1) + SHORTEST_GAP

    def make(self, rng: np.random.Generator, depths: np.ndarray, decoys: int, length: int) -> Document:
        """Lay out a document of `length` tokens; depth 0 is right after the anchors, 1 right before ASK."""
        asked, count = len(depths), len(depths) + decoys
        hay = length - self.overhead(asked, decoys)
        assert hay >= 0, f"a haystack of {length} tokens cannot hold {count} needles"
        facts, order = self.alphabet.facts(rng, count), rng.permutation(asked)
        filler = self.alphabet.draw_filler(rng, self.anchors + hay)
        # filler tokens of the haystack before each needle
        places = np.round(np.concatenate([depths, rng.random(decoys)]) * hay).astype(np.int64)
        rising = np.argsort(places, kind="stable")
        sentences = np.column_stack([np.full(count, TELL), facts])[rising]
        hay_ids = np.insert(filler[self.anchors :], np.repeat(places[rising], 3), sentences.ravel())
        ids = np.concatenate([[BEGIN], filler[: self.anchors], hay_ids, [ASK], facts[order].ravel()]).astype(np.int64)
        told = np.empty(count, np.int64)
        told[rising] = self.anchors + 2 + places[rising] + 3 * np.arange(count)
        questions = length - 2 * asked + 2 * np.arange(asked)
        mask = np.zeros(length, np.uint8)
        mask[questions + 1] = 1
        return Document(ids, mask, order, questions - told[order])

    def draw(self, rng: np.random.Generator, room: int, longest: int) -> Document:
        short = max(self.least, min(room, longest))
        fits = min(MOST_ASKED, self.alphabet.keys // 2, (short - self.overhead(0, 0) - SHORTEST_GAP) // 8)
        count = int(rng.integers(1, fits + 1))
        length = min(room, _log_uniform(rng, self.overhead(count, count) + SHORTEST_GAP, longest))
        return self.make(rng, rng.random(count), count, length if room - length >= self.least else room)


def training_documents(task: Task, rows: int, row: int, seed: int) -> list[Document]:
    """Return documents that fill `rows` rows of `row` tokens without a cut; the longest grow over half of the rows."""
    if task.least > row:
        raise ValueError(f"--row must hold the shortest document of {task.least} tokens, got {row}")
    rng, documents = np.random.default_rng([seed, 0]), []
    for index in range(rows):
        # geometric from twice the shortest document to the whole row
        longest = round(2 * task.least * (row / (2 * task.least)) ** min(1.0, 2 * index / rows))
        room = row
        while room:
            documents.append(task.draw(rng, room, longest))
            room -= len(documents[-1].ids)
    return documents


def write_in_order(path: Path, documents: list[Document], vocab_size: int, seed: int, row: int) -> None:
    """Write a token file whose first epoch under `seed`, in rows of `row` tokens, presents the documents in this order.

    The loader's permutations depend on the seed and on the numbers of documents and rows only: they are read off a file
    of two tokens a document and one of two tokens a row, and undone.
    """
    ends = np.cumsum([len(document.ids) for document in documents])
    rows = np.split(np.arange(len(documents)), np.flatnonzero(ends % row == 0) + 1)[:-1]
    laid: list[np.ndarray] = [np.zeros(0, np.int64)] * len(rows)
    for place, members in zip(_probe(path, len(rows), seed)[1], rows, strict=True):
        laid[place] = members
    documents = [documents[i] for i in np.concatenate(laid)]
    placed: list[Document | None] = [None] * len(documents)
    for number, document in zip(_probe(path, len(documents), seed)[0], documents, strict=True):
        placed[number] = document
    write_tokens(path, (d.ids for d in placed), masks=(d.mask for d in placed), vocab_size=vocab_size)


def _probe(path: Path, count: int, seed: int) -> tuple[list[int], list[int]]:
    """-> order of `count` documents in the stream, and order in which as many rows of it are read"""
    probe = path.with_name("probe.bin")
    np.zeros(2 * count, "<u2").tofile(probe)
    np.arange(2, 2 * count + 2, 2, dtype="<u8").tofile(probe.with_suffix(".ends.bin"))
    stage = CurriculumStage(length=2, tokens=2 * count, tokens_per_step=2, steps=count)
    loader = PackedSequenceDataLoader(open_tokens(probe, dtype="uint16"), [stage], seed=seed, micro_batch_tokens=2)
    rows = [int(loader.step_batches(step).rows[0]) // 2 for step in range(count)]
    return loader.stream.order[:count].tolist(), rows


# ---------------------------------------------------------------------------
# Models: how each is trained, and what each answers

# maps ids (B, T) and where (B, T) bool, both on the CPU, to the most likely next ids (n,) at those places, row by row
Predictor = Callable[[Tensor, Tensor], Tensor]


def task_config(arguments: argparse.Namespace, vocab_size: int) -> Config:
    """Return the preset with this vocabulary and row and no draft head, which would see targets that it cannot know."""
    config = preset(arguments.preset)
    return replace(
        config,
        model=replace(config.model, vocab_size=vocab_size, draft_depth=0),
        schedule=replace(config.schedule, total_tokens=arguments.tokens),
        curriculum=replace(config.curriculum, context=arguments.row, length_divisor=1),
        train=replace(config.train, seed=arguments.seed, keep_checkpoints=1),
    )


def train_hybrid(config: Config, tokens: TokenFile, folder: Path) -> HybridLanguageModel:
    """Train the product; the model comes back with its averaged weights, which folder/final.safetensors holds too."""
    config = replace(config, train=replace(config.train, run_dir=str(folder)))
    engine = TrainingEngine(config, tokens, log=lambda line: print(line, file=sys.stderr, flush=True))
    result = engine.run()
    if result.exit_code:
        raise SystemExit(result.exit_code)
    shutil.rmtree(folder / "checkpoints")
    return engine.model.eval()


def hybrid_predictor(model: HybridLanguageModel, segment: int = 16_384) -> Predictor:
    """Answer with the product; rows longer than `segment` run in segments that hand on their carry."""

    @torch.no_grad()
    def predict(ids: Tensor, where: Tensor) -> Tensor:
        device = model.embedding.device
        ids, best, carry = ids.to(device), torch.full_like(ids, -1), None
        for start in range(0, ids.shape[1], segment):
            part = slice(start, min(start + segment, ids.shape[1]))
            doc_start = torch.full_like(ids[:, part], -start, dtype=torch.int32)
            output = model(ids[:, part], doc_start=doc_start, carry=carry, return_carry=ids.shape[1] > segment)
            carry, chosen = output.carry, where[:, part]
            best[:, part][chosen] = most_likely(output.hidden[chosen.to(device)], model.embedding).cpu()
        return best[where]

    return predict


def most_likely(hidden: Tensor, embedding: Tensor) -> Tensor:
    """Return the id (n,) of the largest product of hidden (n, D) and embedding (W, D); no logit scale matters."""
    return (hidden.float() @ embedding.float().T).argmax(-1)


def dense_baseline(config: Config, context: int) -> nn.Module:
    """Build the dense baseline with the product's window, for rows of up to `context` tokens."""
    from baselines import build

    return build("dense-window", config.model, context)


def train_dense(model: nn.Module, config: Config, tokens: TokenFile, peak: float) -> nn.Module:
    """Train a baseline on the same rows: AdamW, 5 % linear warm-up, cosine to 1 %, gradients clipped at norm 1."""
    stages, _ = build_curriculum(
        config.schedule.total_tokens, config.curriculum, max_context_len=config.model.max_context_len
    )
    loader = PackedSequenceDataLoader(
        tokens, stages, seed=config.train.seed, micro_batch_tokens=config.train.micro_batch_tokens
    )
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))
    device, steps = matrices[0].device, loader.total_steps
    warmup = max(1, steps // 20)
    for step in range(steps):
        step_plan = loader.step_batches(step)
        total = torch.zeros((), device=device)
        for host_batch in step_plan if step_plan.supervised else ():
            batch = host_batch.to(device)
            losses = model.loss_rows(batch.inputs, batch.doc_start, batch.targets.clamp_min(0))
            loss = (losses.reshape(-1) * batch.loss_weights.reshape(-1)).sum() / step_plan.supervised
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        fall = (step - warmup) / max(1, steps - 1 - warmup)
        factor = (step + 1) / warmup if step < warmup else 0.01 + 0.495 * (1 + math.cos(math.pi * fall))
        for group in optimizer.param_groups:
            group["lr"] = peak * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            print(f"dense step {step + 1}/{steps}  loss {total.item():.4f}", file=sys.stderr, flush=True)
    return model.eval()


def dense_predictor(model: nn.Module) -> Predictor:
    """Answer with a baseline, whole rows at once."""
    matrix = model.embedding.weight

    @torch.no_grad()
    def predict(ids: Tensor, where: Tensor) -> Tensor:
        doc_start = torch.zeros_like(ids, dtype=torch.int32, device=matrix.device)
        hidden = model(ids.to(matrix.device), doc_start)
        return most_likely(hidden[where.to(matrix.device)], matrix).cpu()

    return predict


def obtain_predictor(arguments: argparse.Namespace, task: Task, longest: int) -> tuple[Predictor, dict]:
    """Train the model that was asked for, or read its weights: what answers, and facts for the JSON line."""
    vocab_size = task.alphabet.vocab_size
    device = torch.device(describe_device().kind)
    if arguments.weights:
        model, info = load_weights(Path(arguments.weights), device)
        trained = info["config"].model
        if trained.vocab_size != vocab_size:
            found = f"{arguments.weights} has a vocabulary of {trained.vocab_size:,}, the task needs {vocab_size:,}"
            raise ValueError(f"{found}; give the --vocab-size and --data that it was trained with")
        return hybrid_predictor(model), {"weights": Path(arguments.weights).name, "tokens": info["tokens"]}
    config, out = task_config(arguments, vocab_size), Path(arguments.out)
    per_step = max(1, config.curriculum.tokens_per_step // arguments.row) * arguments.row
    if arguments.tokens < per_step:
        raise ValueError(f"--tokens must be at least one step of {per_step:,}, got {arguments.tokens:,}")
    rows = arguments.tokens // per_step * per_step // arguments.row
    with tempfile.TemporaryDirectory() as folder:
        path, begin = Path(folder) / "task.bin", time.perf_counter()
        write_in_order(path, training_documents(task, rows, arguments.row, arguments.seed), vocab_size, arguments.seed,
                       arguments.row)  # fmt: skip
        tokens = open_tokens(path)
        made = time.perf_counter()
        if arguments.model == "hybrid":
            model = train_hybrid(config, tokens, out / f"{arguments.part}-run")
            predictor = hybrid_predictor(model)
        else:
            torch.manual_seed(arguments.seed)
            model = train_dense(dense_baseline(config, longest).to(device), config, tokens, arguments.rate)
            predictor = dense_predictor(model)
        facts = {
            "tokens": rows * arguments.row, "documents": len(tokens.ends), "supervised": tokens.supervised,
            "seconds_to_make_data": round(made - begin, 1), "seconds_to_train": round(time.perf_counter() - made, 1),
            "parameters": sum(p.numel() for p in model.parameters()),
        }  # fmt: skip
    return predictor, facts


# ---------------------------------------------------------------------------
# Evaluation

BATCH_TOKENS = 65_536
LEAST_QUERIES, LEAST_DOCUMENTS = 500, 16  # of one cell


def score(predict: Predictor, documents: Iterator[Document], length: int) -> list[tuple[int, float, bool]]:
    """Return (which fact, distance, right) of every answer; the documents all have `length` tokens."""
    results, group = [], []
    rows = max(1, BATCH_TOKENS // length)

    def flush() -> None:
        ids = torch.from_numpy(np.stack([d.ids for d in group]))
        where = torch.from_numpy(np.stack([d.mask for d in group]))[:, 1:] > 0
        right = predict(ids[:, :-1], where) == ids[:, 1:][where]
        keys, distances = (np.concatenate([d[i] for d in group]).tolist() for i in (2, 3))
        results.extend(zip(keys, distances, right.tolist(), strict=True))
        group.clear()

    for document in documents:
        group.append(document)
        if len(group) == rows:
            flush()
    if group:
        flush()
    return results


def doubling(first: int, last: int) -> list[int]:
    """Return first, 2 first, 4 first, ... up to last."""
    return [first << i for i in range((last // first).bit_length())]


def associative_gaps(window: int, longest: int) -> list[int]:
    """Return the gaps of the table: a quarter window, whose questions see their pairs, then 2, 4, 8, ... windows."""
    return [window // 4, *doubling(2 * window, longest)]


def score_associative(predict: Predictor, task: Associative, gaps: list[int], row: int, seed: int) -> list[dict]:
    """Return one cell for every number of pairs and gap."""
    cells = []
    for pairs in task.pairs:
        for gap in gaps:
            rng, length = np.random.default_rng([seed, 1, pairs, gap]), task.length(pairs, gap)
            count = max(LEAST_DOCUMENTS, -(-LEAST_QUERIES // (pairs // 2)))
            results = score(predict, (task.make(rng, pairs, gap) for _ in range(count)), length)
            right = sum(r for _, _, r in results)
            cells.append(dict(pairs=pairs, gap=gap, length=length, past_training=length > row, queries=len(results),
                              accuracy=right / len(results), guess=guess_rate(pairs, pairs // 2)))  # fmt: skip
    return cells


def score_needle(
    predict: Predictor, task: Needle, lengths: list[int], row: int, seed: int, *, alone: bool
) -> list[dict]:
    """Return one cell for every depth and length.

    The needles of all depths share haystacks with as many decoys; or `alone`, each has haystacks to itself.
    """
    cells = []
    for length in lengths:
        for depths in [[d] for d in DEPTHS] if alone else [list(DEPTHS)]:
            rng = np.random.default_rng([seed, 2, length, round(100 * depths[0])])
            decoys = 0 if alone else len(depths)
            documents = (task.make(rng, np.array(depths), decoys, length) for _ in range(LEAST_QUERIES))
            results = score(predict, documents, length)
            for number, depth in enumerate(depths):
                mine = [(distance, right) for key, distance, right in results if key == number]
                cells.append(dict(depth=depth, length=length, past_training=length > row, queries=len(mine),
                                  distance=sum(d for d, _ in mine) / len(mine),
                                  accuracy=sum(r for _, r in mine) / len(mine),
                                  guess=guess_rate(len(depths) + decoys, len(depths))))  # fmt: skip
    return cells


# ---------------------------------------------------------------------------
# Tables and pictures


def grid_table(cells: list[dict], rows: str, columns: str, window: int) -> list[str]:
    """Return the lines of a table of accuracies; columns in tokens and in windows, a star where past training."""
    row_values, column_values = (sorted({cell[name] for cell in cells}) for name in (rows, columns))
    by_place = {(cell[rows], cell[columns]): cell for cell in cells}
    lines = [
        f"{rows + ' / ' + columns:>16s}" + "".join(f"{x:>9,d}" for x in column_values) + "    guess  queries a cell"
    ]
    lines.append(f"{'in windows':>16s}" + "".join(f"{x / window:>9.4g}" for x in column_values))
    for value in row_values:
        mine = [by_place[value, x] for x in column_values]
        text = f"{value:.0%}" if rows == "depth" else f"{value}"
        shown = "".join(f"{cell['accuracy']:>8.3f}{'*' if cell['past_training'] else ' '}" for cell in mine)
        lines.append(f"{text:>16s}{shown}  {mine[0]['guess']:>7.3f}  {min(c['queries'] for c in mine):,}")
    return lines


def new_figure(width: float, height: float, columns: int = 1):
    """Return a matplotlib figure without a window system, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, sharey=True, squeeze=False)[0]


def draw_associative(cells: list[dict], window: int, row: int, chance: float, title: str, path: Path) -> None:
    """Plot accuracy against the gap, a line for each number of pairs and a dotted one for its guesses."""
    figure, (axes,) = new_figure(7, 4.5)
    for pairs in sorted({cell["pairs"] for cell in cells}):
        mine = [cell for cell in cells if cell["pairs"] == pairs]
        (line,) = axes.plot([c["gap"] for c in mine], [c["accuracy"] for c in mine], "o-", label=f"{pairs} pairs")
        axes.axhline(mine[0]["guess"], color=line.get_color(), linestyle=":", linewidth=0.8)
    axes.axvline(window, color="black", linestyle="--", linewidth=1, label="attention window")
    axes.axvline(row, color="tab:gray", linestyle=":", linewidth=1.5, label="training row")
    axes.axhline(chance, color="tab:red", linewidth=0.8, label="chance")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens between pairs and questions", ylabel="right answers", ylim=(-0.02, 1.02), title=title)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def draw_needle(cells: list[dict], title: str, path: Path) -> None:
    """Draw the table depth x length as a picture."""
    lengths = sorted({cell["length"] for cell in cells})
    grid = np.zeros((len(DEPTHS), len(lengths)))
    for cell in cells:
        grid[DEPTHS.index(cell["depth"]), lengths.index(cell["length"])] = cell["accuracy"]
    figure, (axes,) = new_figure(7, 4.5)
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for (i, j), value in np.ndenumerate(grid):
        axes.text(j, i, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.6 else "black", fontsize=8)
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(DEPTHS)), [f"{d:.0%}" for d in DEPTHS])
    axes.set(xlabel="length of the haystack, tokens", ylabel="depth of the needle", title=title)
    figure.colorbar(image, ax=axes, label="right answers")
    figure.savefig(path, dpi=120)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def report(part: str, lines: list[str], **record: object) -> None:
    """Print the table, then one JSON line."""
    print("\n".join(lines))
    print(json.dumps({"part": part, "device": device_name(), "torch": torch.__version__, **record}))


# ---------------------------------------------------------------------------
# Parts: associative and needle


def task_alphabets(arguments: argparse.Namespace) -> tuple[Alphabet, Alphabet]:
    """Return the alphabets for training and evaluation that the flags name."""
    return make_alphabets(arguments.vocab_size, open_tokens(arguments.data) if arguments.data else None)


def headline(arguments: argparse.Namespace, facts: dict, alphabet: Alphabet, window: int) -> list[str]:
    """Return the lines above a table."""
    filler = "text" if arguments.data else "random filler"
    name = arguments.weights or f"{arguments.model} {arguments.preset}"
    return [
        f"{arguments.part}: {name}, {facts['tokens']:,} tokens in rows of {arguments.row:,}, window {window}, "
        f"{filler}, seed {arguments.seed}, {device_name()}; * past the training length",
        f"chance {1 / alphabet.values:.4f} (one of {alphabet.values} values); standard error at most "
        f"{0.5 / math.sqrt(LEAST_QUERIES):.3f}; guess: a value of the document that no earlier answer has used up",
    ]


def run_associative(arguments: argparse.Namespace) -> None:
    """Recall of key-value pairs against their number and distance."""
    model, pairs = preset(arguments.preset).model, tuple(sorted(set(arguments.pairs)))
    window, anchors = model.sliding_window_size, model.anchor_tokens
    training, held_out = task_alphabets(arguments)
    most = min(training.keys, (window - window // 4) // 3)
    if not 2 <= pairs[0] <= pairs[-1] <= most:
        rule = f"within 2..{most} ({training.keys} keys; the nearest questions must see their pairs)"
        raise ValueError(f"--pairs must be {rule}, got {pairs[0]}..{pairs[-1]}; use fewer, or a larger --vocab-size")
    gaps = associative_gaps(window, arguments.longest)
    task = Associative(training, anchors, pairs)
    predict, facts = obtain_predictor(arguments, task, task.length(pairs[-1], gaps[-1]))
    begin = time.perf_counter()
    cells = score_associative(predict, replace(task, alphabet=held_out), gaps, arguments.row, arguments.seed)
    facts["seconds_to_score"] = round(time.perf_counter() - begin, 1)
    lines = headline(arguments, facts, training, window)
    image = Path(arguments.out) / f"associative-{arguments.model}.png"
    draw_associative(cells, window, arguments.row, 1 / training.values, f"associative recall, {arguments.model}", image)
    report("associative", lines + grid_table(cells, "pairs", "gap", window), model=arguments.model, window=window,
           seed=arguments.seed, chance=1 / training.values, cells=cells, **facts)  # fmt: skip


def run_needle(arguments: argparse.Namespace) -> None:
    """Recall of one sentence against its depth and the length of the haystack."""
    model = preset(arguments.preset).model
    window, anchors = model.sliding_window_size, model.anchor_tokens
    training, held_out = task_alphabets(arguments)
    task = Needle(training, anchors)
    needed = task.overhead(len(DEPTHS), len(DEPTHS))
    lengths = [n for n in doubling(2 * window, arguments.longest) if n >= needed]
    if not lengths:
        raise ValueError(f"--longest must be at least 2 windows = {2 * window} and hold needles and decoys of {needed} "
                         f"tokens, got {arguments.longest}; use a larger one")  # fmt: skip
    if training.keys < 2 * len(DEPTHS):
        raise ValueError(f"--vocab-size must be at least {8 * len(DEPTHS)} for {2 * len(DEPTHS)} keys, got "
                         f"{arguments.vocab_size}")  # fmt: skip
    predict, facts = obtain_predictor(arguments, task, lengths[-1])
    begin = time.perf_counter()
    cells = score_needle(
        predict, replace(task, alphabet=held_out), lengths, arguments.row, arguments.seed, alone=arguments.alone
    )
    facts["seconds_to_score"] = round(time.perf_counter() - begin, 1)
    lines = headline(arguments, facts, training, window)
    together = f"the needles of all {len(DEPTHS)} depths share each haystack with {len(DEPTHS)} decoys"
    lines.append("one needle a haystack" if arguments.alone else together)
    draw_needle(
        cells, f"needle in a haystack, {arguments.model}", Path(arguments.out) / f"needle-{arguments.model}.png"
    )
    report("needle", lines + grid_table(cells, "depth", "length", window), model=arguments.model, window=window,
           seed=arguments.seed, chance=1 / training.values, alone=arguments.alone, cells=cells, **facts)  # fmt: skip


# ---------------------------------------------------------------------------
# Part: position


def join_documents(tokens: TokenFile, length: int, rows: int) -> tuple[list[np.ndarray], float]:
    """Return at most `rows` pieces of `length` ids, documents of one source in file order, and documents a piece."""
    source_of = np.zeros(len(tokens.ends), np.int64) if tokens.source_of is None else np.asarray(tokens.source_of)
    starts, ends = tokens.starts, tokens.ends
    pieces: list[np.ndarray] = []
    used = 0
    for source in range(len(tokens.sources)):
        share = -(-(rows - len(pieces)) // (len(tokens.sources) - source))
        held, size, taken, joined = [], 0, 0, 0
        for document in np.flatnonzero(source_of == source).tolist():
            if taken == share:
                break
            ids = np.asarray(tokens.ids[starts[document] : ends[document]])
            joined += 1
            while size + len(ids) >= length and taken < share:
                held.append(ids[: length - size])
                ids = ids[length - size :]
                pieces.append(np.concatenate(held))
                held, size, taken = [], 0, taken + 1
                used, joined = used + joined, 1 if len(ids) else 0
            held.append(ids)
            size += len(ids)
    if not pieces:
        largest = int(np.bincount(source_of, weights=tokens.lengths).max())
        raise ValueError(f"{tokens.path}: its largest source holds {largest:,} tokens, --length is {length:,}; "
                         "use a smaller --length or a larger file")  # fmt: skip
    return pieces, used / len(pieces)


def run_position(arguments: argparse.Namespace) -> None:
    """Loss by position in long documents, attention scope window against full."""
    tokens, scopes = open_tokens(arguments.data), ("window", "full")
    pieces, mean = join_documents(tokens, arguments.length, arguments.rows)
    facts, results = describe_device(), {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "joined.bin"
        write_tokens(path, pieces, vocab_size=tokens.largest + 1)
        joined = open_tokens(path)
        for scope in scopes:
            model, info = load_weights(Path(arguments.weights), facts.kind, attention_scope=scope)
            joined.check_vocabulary(model.config.vocab_size)
            if arguments.length > model.config.max_context_len:
                limit = model.config.max_context_len
                raise ValueError(f"--length must be at most the model's {limit:,}, got {arguments.length:,}")
            results[scope] = evaluate(model, joined, arguments.length, split=scope, micro_batch_tokens=BATCH_TOKENS)
    window = info["config"].model.sliding_window_size
    lines = [
        f"position: {Path(arguments.weights).name}, {info['tokens']:,} tokens, window {window}, {device_name()}; "
        f"{len(pieces)} rows of {arguments.length:,} tokens, {mean:.1f} documents of one source joined in each",
        f"{'position':>18s}{'targets':>12s}{'window':>9s}{'full':>9s}{'full - window':>15s}   nats a token",
    ]
    for near, far in zip(*(results[scope].by_position for scope in scopes), strict=True):
        first, last, loss, count = near
        name = f"{first:,}-{min(last, arguments.length) - 1:,}"
        lines.append(f"{name:>18s}{count:>12,d}{loss:>9.4f}{far[2]:>9.4f}{far[2] - loss:>+15.4f}")
    lines.append(f"{'all':>18s}{results['window'].targets:>12,d}" + "".join(f"{results[s].loss:>9.4f}" for s in scopes)
                 + f"{results['full'].loss - results['window'].loss:>+15.4f}")  # fmt: skip
    figure, (axes,) = new_figure(7, 4.5)
    for scope in scopes:
        bins = results[scope].by_position
        axes.plot(
            [math.sqrt(max(a, 1) * b) for a, b, *_ in bins], [row[2] for row in bins], "o-", label=f"scope {scope}"
        )
    axes.axvline(window, color="black", linestyle="--", linewidth=1, label="attention window")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the document, tokens", ylabel="loss, nats a token", title="loss by position")
    axes.legend()
    figure.savefig(Path(arguments.out) / "position.png", dpi=120)
    report("position", lines, weights=Path(arguments.weights).name, window=window, rows=len(pieces),
           documents_a_row=mean, by_position={scope: results[scope].by_position for scope in scopes},
           loss={scope: results[scope].loss for scope in scopes})  # fmt: skip


# ---------------------------------------------------------------------------
# Part: spectrum


@torch.no_grad()
def half_lives(model: HybridLanguageModel) -> np.ndarray:
    """Return ln 2 / softplus(bias + offset) of every head, (recurrent layers, H), tokens: no input."""
    blocks = [layer.operator for layer in model.layers if not layer.is_attention]
    rates = [nn.functional.softplus((b.decay_bias + b.decay_offset).double()) for b in blocks]
    return (math.log(2) / torch.stack(rates)).cpu().numpy()


@torch.no_grad()
def measured_half_lives(model: HybridLanguageModel, tokens: TokenFile, count: int, row: int) -> np.ndarray:
    """Return ln 2 / -mean(log gamma) of every head on the first `count` tokens, (recurrent layers, H), tokens."""
    blocks = [layer.operator for layer in model.layers if not layer.is_attention]
    sums = torch.zeros(len(blocks), blocks[0].heads, dtype=torch.float64, device=model.embedding.device)
    seen = 0

    def hook(index: int) -> Callable:
        def add(block: nn.Module, inputs: tuple[Tensor], _: object) -> None:
            logits = nn.functional.linear(inputs[0].float(), block.decay_gate.float())
            sums[index] += nn.functional.softplus(logits + block.decay_bias + block.decay_offset).double().sum((0, 1))

        return add

    hooks = [block.register_forward_hook(hook(index)) for index, block in enumerate(blocks)]
    for batch in validation_batches(tokens, row, count, micro_batch_tokens=4 * row):
        on_device = batch.to(model.embedding.device)
        model(on_device.inputs, doc_start=on_device.doc_start)
        seen += batch.tokens
    for handle in hooks:
        handle.remove()
    return (math.log(2) / (sums / seen)).cpu().numpy()


def run_spectrum(arguments: argparse.Namespace) -> None:
    """Half-lives of every head before and after training."""
    device = describe_device().kind
    tokens = open_tokens(arguments.data) if arguments.data else None
    lines, records = [f"spectrum: half-lives in tokens, {device_name()}"], []
    lines.append(f"{'model':24s}{'':14s}{'layer':>6s}{'shortest':>11s}{'median':>11s}{'longest':>12s}"
                 f"{'> window':>10s}{'> 16 windows':>14s}   of heads")  # fmt: skip
    figure, axes = new_figure(5.5 * len(arguments.weights), 4.5, len(arguments.weights))
    for path, place in zip(arguments.weights, axes, strict=True):
        model, info = load_weights(Path(path), device)
        window, heads = model.config.sliding_window_size, model.config.recurrent_heads
        start = math.log(2) / nn.functional.softplus(half_life_biases(heads).double())
        curves = {"start": np.tile(start.numpy(), (model.config.recurrent_layers, 1)), "trained": half_lives(model)}
        if tokens is not None:
            tokens.check_vocabulary(model.config.vocab_size)
            fresh = HybridLanguageModel(model.config, info["config"].precision).to(device)
            fresh.init_weights(0)
            size = min(arguments.row, len(tokens))
            curves["start, text"] = measured_half_lives(fresh.eval(), tokens, arguments.count, size)
            curves["trained, text"] = measured_half_lives(model, tokens, arguments.count, size)
        name = Path(path).parent.name + "/" + Path(path).name if Path(path).parent.name else Path(path).name
        for kind, values in curves.items():
            for layer, row in enumerate(values):
                share = "".join(f"{(row > n * window).sum():>{w}d}" for n, w in ((1, 10), (16, 14)))
                lines.append(
                    f"{name[-23:]:24s}{kind:>14s}{layer + layer // 3:>6d}{row.min():>11,.1f}{np.median(row):>11,.1f}"
                    f"{row.max():>12,.0f}{share}   {heads}"
                )
        draw_spectrum(place, curves, window, name)
        records.append(dict(weights=name, window=window, **{kind: x.tolist() for kind, x in curves.items()}))
    axes[0].set_ylabel("half-life, tokens")
    figure.savefig(Path(arguments.out) / "spectrum.png", dpi=120)
    report("spectrum", lines, models=records)


def draw_spectrum(axes, curves: dict[str, np.ndarray], window: int, title: str) -> None:
    """Plot half-lives over heads: the start in black, layers coloured from early to late, on text with crosses."""
    from matplotlib import colormaps

    index = np.arange(curves["start"].shape[1])
    axes.plot(index, curves["start"][0], "k-", linewidth=2, label="start, biases")
    styles = {"trained": ("o", "trained, biases"), "start, text": ("_", "start, on text"),
              "trained, text": ("x", "trained, on text")}  # fmt: skip
    for kind, (marker, label) in styles.items():
        for layer, row in enumerate(curves.get(kind, ())):
            color = "tab:gray" if kind == "start, text" else colormaps["viridis"](layer / max(1, len(curves[kind]) - 1))
            axes.plot(index, row, marker, color=color, markersize=5, label=label if layer == 0 else None)
    axes.axhline(window, color="tab:red", linestyle="--", linewidth=1, label="attention window")
    axes.set_yscale("log", base=2)
    axes.set(xlabel="head", title=title)
    axes.legend(fontsize=8)


# ---------------------------------------------------------------------------
# Command line


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the four parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, run in (("associative", run_associative), ("needle", run_needle)):
        part = parts.add_parser(name, help=run.__doc__)
        part.set_defaults(run=run)
        part.add_argument("--preset", choices=tuple(PRESETS), default="small")
        part.add_argument("--model", choices=("hybrid", "dense"), default="hybrid")
        part.add_argument("--weights", help="hybrid weights file to score in place of training")
        part.add_argument("--data", help="token file whose text is the filler; default: random ids")
        part.add_argument("--vocab-size", type=int, default=512, help="a quarter keys, a quarter values, rest filler")
        part.add_argument("--tokens", type=int, default=30_000_000, help="of training")
        part.add_argument("--row", type=int, default=4096, help="tokens of a training row")
        part.add_argument("--longest", type=int, default=65_536, help="largest gap or haystack that is scored, tokens")
        part.add_argument("--rate", type=float, default=1e-3, help="peak rate of the dense baseline")
        part.add_argument("--seed", type=int, default=0)
    parts.choices["associative"].add_argument("--pairs", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parts.choices["needle"].add_argument("--alone", action="store_true", help="one needle a haystack: 7 times the time")
    part = parts.add_parser("position", help=run_position.__doc__)
    part.set_defaults(run=run_position)
    part.add_argument("--weights", required=True)
    part.add_argument("--data", required=True, help="token file; documents of one source are joined")
    part.add_argument("--length", type=int, default=65_536)
    part.add_argument("--rows", type=int, default=32, help="most rows that are read")
    part = parts.add_parser("spectrum", help=run_spectrum.__doc__)
    part.set_defaults(run=run_spectrum)
    part.add_argument("--weights", required=True, nargs="+")
    part.add_argument("--data", help="token file on which log gamma is averaged as well")
    part.add_argument("--count", type=int, default=262_144, help="tokens of it that are read")
    part.add_argument("--row", type=int, default=4096)
    for part in parts.choices.values():
        part.add_argument("--out", required=True, help="folder of pictures and runs")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one part; an error that the user can mend is one line."""
    parsed = build_parser().parse_args(arguments)
    try:
        if parsed.part in ("associative", "needle") and parsed.weights and parsed.model == "dense":
            raise ValueError("--weights names a file of the hybrid; leave it out with --model dense")
        Path(parsed.out).mkdir(parents=True, exist_ok=True)
        parsed.run(parsed)
    except (ValueError, TrainingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
