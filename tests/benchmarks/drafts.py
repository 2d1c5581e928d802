"""Acceptance of the draft head on held-out text, at a short and at a long context, and beside it in free text.

    python tests/benchmarks/drafts.py --weights runs/NAME/final.safetensors --data data/tokens.val.bin

Teacher-forced: at every root position p the text x_0 ... x_p is the context, whatever the model would have said. With
the rule of generation, one noise for draft and model (seed, absolute position), penalties off:

    model    m_q = argmax(logits(h_{q-1}) / T + noise(q))                      T = 0: argmax of the logits
    depth 1  from (h_{p-1}, E[x_p]), scored with noise(p + 1): accepted iff m_{p+1} is among its best one or two
    depth 2  from (depth 1's output, E[x_{p+1}]), noise(p + 2): accepted iff m_{p+2} is among its best one or two

Depth 2 is counted over all roots; over those where depth 1 was accepted; and "on path", where moreover m_{p+1} is
x_{p+1}. Only there has generation the same node in its tree: elsewhere it would go on with m_{p+1} where the text has
another token. In a text that the model itself made every root is on path; the free texts below are counted twice, by
the engine and by this script, and no table is printed where this script does not repeat the engine's choices.

A context of c tokens is measured at roots c - w ... c - 1 with w = min(1,024, c / 2): 512 ... 1,023 and 31,744 ...
32,767. Acceptance depends on how hard a text is, so the short context is measured twice: near the start of the same
rows, and on the very tokens of the long one's window, with 512 to 1,023 tokens before them. A row is the start of one
document, or of neighbouring documents of one source joined where no document is long enough; the table says how many.

Standard errors are binomial (positions taken as independent) and, in the JSON line, over rows as well. Prints a table
and one JSON line.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from custom_kernels import gumbel_noise  # noqa: E402
from dataset_pipeline import TokenFile, open_tokens  # noqa: E402
from generation_engine import DRAFT_WIDTH, GenerationStatistics, StreamingGenerationEngine  # noqa: E402
from hybrid_model import HybridLanguageModel  # noqa: E402
from model_config import GenerationConfig, PrecisionConfig  # noqa: E402
from train_engine import describe_device, load_weights  # noqa: E402

TEMPERATURES = (0.0, 1.0)
WINDOW = 1024  # most roots of a row
PROMPT = 64  # tokens of held-out text before a free one
GRAM = 4
# of recomputed choices that must equal the emitted ones; segments and steps round differently in 16 bit
AGREEMENT = 0.95


# ---------------------------------------------------------------------------
# Text


def window_of(context: int) -> int:
    """Return the number of roots at the end of a context."""
    return min(WINDOW, context // 2)


def long_rows(tokens: TokenFile, length: int, limit: int) -> tuple[np.ndarray, int]:
    """Return at most `limit` rows of `length` ids (R, length) int64, and how many of them join documents.

    Long documents come first; the others are joined in their order within their source, each row from the start of a
    document on.
    """
    spans = list(zip(tokens.starts.tolist(), tokens.ends.tolist(), strict=True))
    alone = [tokens.ids[a : a + length] for a, b in spans if b - a >= length][:limit]
    source_of = np.zeros(len(spans), int) if tokens.source_of is None else tokens.source_of
    joined: list[np.ndarray] = []
    for source in range(len(tokens.sources)):
        parts, size = [], 0
        for index in np.flatnonzero(source_of == source):
            begin, end = spans[index]
            if end - begin >= length:
                continue
            parts.append(tokens.ids[begin:end])
            size += end - begin
            if size >= length:
                joined.append(np.concatenate(parts)[:length])
                parts, size = [], 0
    wanted = min(limit - len(alone), len(joined))
    # spread over the sources in proportion to their size
    rows = [*alone, *(joined[at] for at in np.linspace(0, len(joined) - 1, wanted).round().astype(int))]
    if not rows:
        found = f"got {len(tokens):,} in all; give shorter --contexts"
        raise ValueError(f"{tokens.path} must hold {length:,} tokens of one source, {found}")
    return np.stack(rows).astype(np.int64), len(rows) - len(alone)


def distinct_share(ids: list[int]) -> float:
    """Return the share of distinct 4-grams; it falls with the length of a text, so compare equal lengths."""
    grams = list(zip(*(ids[i:] for i in range(GRAM)), strict=False))
    return len(set(grams)) / len(grams)


# ---------------------------------------------------------------------------
# Acceptance


@torch.no_grad()
def hidden_from(model: HybridLanguageModel, ids: Tensor, begin: int, segment: int = 16384) -> Tensor:
    """Return hidden states (B, T - begin, D) of rows ids (B, T), each one document, run in segments."""
    kept, carry, length = [], None, ids.shape[1]
    for start in range(0, length, segment):
        part = ids[:, start : start + segment]
        doc_start = torch.full(part.shape, -start, dtype=torch.int32, device=ids.device)
        output = model(part, doc_start=doc_start, carry=carry, return_carry=start + segment < length)
        carry = output.carry
        kept.append(output.hidden[:, max(0, begin - start) :].clone())  # a view would keep the whole segment
    return torch.cat(kept, 1)


class Acceptance(NamedTuple):
    """What happened at each root, all bool. [..., k - 1]: within the k best candidates."""

    one: Tensor  # (B, n, 2) depth 1 accepted
    two: Tensor  # (B, n, 2) depth 2 accepted, after the text's own token
    hit: Tensor  # (B, n) the model's choice is the text's token

    @classmethod
    def joined(cls, parts: list["Acceptance"]) -> "Acceptance":
        return cls(*(torch.cat(x) for x in zip(*parts, strict=True)))


@torch.no_grad()
def accept(
    model: HybridLanguageModel, ids: Tensor, hidden: Tensor, first: int, temperature: float, seeds: list[int],
    chunk: int = 512,
) -> Acceptance:  # fmt: skip
    """Judge the drafts at roots first ... first + n - 1 of rows ids (B, T).

    hidden (B, n + 2, D): of positions first - 1 ... first + n. seeds: of each row's noise.
    """
    n, D = hidden.shape[1] - 2, hidden.shape[2]
    read = model.embed(ids[:, first : first + n + 1])  # (B, n + 1, D): the token before each judged position
    one = model.draft(0, hidden[:, :-1], read)
    # depth 2 reads depth 1's output of the position before; the first place has none and is not used
    two = model.draft(1, one[:, :-1], read[:, 1:])
    two = torch.cat((two.new_zeros(len(ids), 1, D), two), 1)
    judged = hidden[:, 1:], one, two  # what predicts positions first + 1 ... first + n + 1
    chosen, drafts = [], ([], [])
    for row, seed in enumerate(seeds):
        for start in range(0, n + 1, chunk):
            part = slice(start, min(start + chunk, n + 1))
            noise = _noise(model, seed, range(first + 1 + part.start, first + 1 + part.stop), temperature)
            model_scores, *draft_scores = (_scores(model, x[row, part], temperature, noise) for x in judged)
            chosen.append(model_scores.argmax(-1))
            for kept, scores in zip(drafts, draft_scores, strict=True):
                kept.append(scores.topk(DRAFT_WIDTH).indices)
    choice = torch.cat(chosen).view(len(ids), n + 1)
    # (B, n + 1, 2): within the best, within the two best
    met = [(torch.cat(x).view(len(ids), n + 1, -1) == choice[..., None]).cumsum(-1) > 0 for x in drafts]
    return Acceptance(met[0][:, :n], met[1][:, 1:], choice[:, :n] == ids[:, first + 1 : first + n + 1])


def _noise(model: HybridLanguageModel, seed: int, positions: range, temperature: float) -> Tensor | None:
    """-> (positions, W) float64: what generation adds there"""
    if temperature == 0:
        return None
    size, device = model.config.vocab_size, model.embedding.device
    return torch.stack([gumbel_noise(seed, position, size, device) for position in positions])


def _scores(model: HybridLanguageModel, hidden: Tensor, temperature: float, noise: Tensor | None) -> Tensor:
    """hidden (N, D) -> (N, W) float64, what the choice is the largest of"""
    logits = model.logits(hidden[None])[0].double()
    return logits if noise is None else logits / temperature + noise


def walk(one: Tensor, two: Tensor, count: int) -> GenerationStatistics:
    """Step through a text of `count` new tokens as generation does: one, two (count,) bool of its roots."""
    figures, at = GenerationStatistics(tokens=count), 0
    while at < count:
        figures.backbone_calls += 1
        reached = at
        # a tree is no deeper than the tokens that are left after its root's
        for depth, met in enumerate((one, two)[: count - at - 1]):
            figures.drafted[depth] += 1
            if not met[reached]:
                break
            figures.accepted[depth] += 1
            at += 1
        at += 1
    return figures


# ---------------------------------------------------------------------------
# Measurement


def measure(model: HybridLanguageModel, rows: np.ndarray, context: int, seed: int) -> list[Acceptance]:
    """Judge the last roots of the first `context` tokens of rows (R, context + 1 or more), at each temperature."""
    device = model.embedding.device
    first = context - window_of(context)
    step = max(1, 65536 // min(context, 16384))
    parts = []
    for start in range(0, len(rows), step):
        ids = torch.from_numpy(rows[start : start + step, : context + 1]).to(device)
        hidden = hidden_from(model, ids, first - 1)
        seeds = [seed + start + row for row in range(len(ids))]
        parts.append([accept(model, ids, hidden, first, temperature, seeds) for temperature in TEMPERATURES])
    return [Acceptance.joined(list(x)) for x in zip(*parts, strict=True)]


def same_text(rows: np.ndarray, long: int, short: int) -> np.ndarray:
    """Cut the long context's window out of rows, each piece at the end of a short context: (R * pieces, short + 1)."""
    width = window_of(short)
    begins = range(long - window_of(long), long - width + 1, width)
    return np.concatenate([rows[:, b + width - short : b + width + 1] for b in begins])


def share(flags: Tensor, where: Tensor | None = None) -> dict[str, float]:
    """Summarise flags (B, n) where another is True: share, positions, standard errors by positions and by rows."""
    where = torch.ones_like(flags) if where is None else where
    n, hits = int(where.sum()), int((flags & where).sum())
    p = hits / max(1, n)
    counts = where.sum(1)
    each = ((flags & where).sum(1)[counts > 0] / counts[counts > 0]).double()
    by_rows = float(each.std() / math.sqrt(len(each))) if len(each) > 1 else math.nan
    return {"share": p, "n": n, "se": math.sqrt(p * (1 - p) / max(1, n)), "se_rows": by_rows}


def summary(met: Acceptance) -> dict[str, dict]:
    """Name every share of the table, and the share of roots whose choice is the text's token."""
    result = {"choice is the text": share(met.hit)}
    for width in (1, 2):
        one, two = met.one[..., width - 1], met.two[..., width - 1]
        result[f"depth 1, top {width}"] = share(one)
        result[f"depth 2, top {width}"] = share(two)
        result[f"depth 2 after depth 1, top {width}"] = share(two, one)
        result[f"depth 2 on path, top {width}"] = share(two, one & met.hit)
    return result


def free_text(model: HybridLanguageModel, prompt: list[int], count: int, temperature: float, seed: int) -> dict:
    """Generate, and judge the same text teacher-forced: counters of both, distinct 4-grams."""
    options = GenerationConfig(
        max_new_tokens=count, temperature=temperature, top_p=1.0, frequency_penalty=0.0, presence_penalty=0.0,
        temperature_range=0.0, ignore_eos=True, cache_bits=16, sampling_seed=seed,
    )  # fmt: skip
    engine = StreamingGenerationEngine(model, options)
    made = list(engine.generate(prompt))
    ids = torch.tensor([[*prompt, *made]], device=model.embedding.device)
    first = len(prompt) - 1
    met = accept(model, ids, hidden_from(model, ids, first - 1), first, temperature, [seed])
    again = walk(met.one[0, :, 1].cpu(), met.two[0, :, 1].cpu(), count)
    return {
        "temperature": temperature, "distinct": distinct_share(made), "agreement": met.hit.double().mean().item(),
        "drafted": engine.statistics.drafted, "accepted": engine.statistics.accepted,
        "acceptance": engine.statistics.acceptance, "tokens_per_call": engine.statistics.tokens_per_call,
        "counted_again": again.acceptance, "drafted_again": again.drafted, "accepted_again": again.accepted,
    }  # fmt: skip


# ---------------------------------------------------------------------------
# Report


def print_table(cells: list[dict]) -> None:
    columns = ("depth 1", "depth 2 after depth 1", "depth 2 on path", "depth 2")
    print(f"{'text':34s} {'T':>3s} {'roots':>7s}" + "".join(f" {name + ', top 1 / 2':>29s}" for name in columns))
    for cell in cells:
        shown = ""
        for name in columns:
            one, two = (cell["shares"][f"{name}, top {width}"] for width in (1, 2))
            text = f"{one['share']:.3f}±{one['se']:.3f} {two['share']:.3f}±{two['se']:.3f}"
            shown += f" {text:>29s}"
        roots = cell["shares"]["depth 1, top 1"]["n"]
        print(f"{cell['text']:34s} {cell['temperature']:3.0f} {roots:7,}{shown}")


def ratios(cells: list[dict], long: int) -> list[dict]:
    """Acceptance at the longest context over that at each shorter one, with the binomial standard error."""
    result = []
    for cell in cells:
        if cell["context"] == long:
            continue
        far = next(c for c in cells if c["context"] == long and c["temperature"] == cell["temperature"])
        for width in (1, 2):
            top, base = (c["shares"][f"depth 1, top {width}"] for c in (far, cell))
            ratio = top["share"] / base["share"] if base["share"] else math.nan
            error = ratio * math.hypot(*(x["se"] / x["share"] if x["share"] else math.nan for x in (top, base)))
            result.append({
                "of": far["text"], "over": cell["text"], "temperature": cell["temperature"], "width": width,
                "ratio": ratio, "se": error,
            })  # fmt: skip
    return result


def run(arguments: argparse.Namespace) -> dict:
    """Measure everything; return what the JSON line holds."""
    began = time.perf_counter()
    facts = describe_device(arguments.device)
    precision = arguments.precision or ("bf16" if facts.kind == "cuda" else "fp32")
    model, _ = load_weights(
        Path(arguments.weights), facts.kind, precision=PrecisionConfig(precision=precision),
        dtype=torch.float32 if precision == "fp32" else torch.bfloat16,
    )  # fmt: skip
    tokens = open_tokens(arguments.data)
    tokens.check_vocabulary(model.config.vocab_size)
    contexts, most = sorted(set(arguments.contexts)), model.config.max_context_len
    if model.config.draft_depth != 2:
        raise ValueError(f"the weights must have draft_depth 2, got {model.config.draft_depth}; train with it")
    if contexts[0] < 4 or contexts[-1] >= most:
        raise ValueError(f"contexts must be within 4..{most - 1:,}, got {contexts[0]:,} to {contexts[-1]:,}")
    rows, joined = long_rows(tokens, contexts[-1] + 1, arguments.rows)
    held_out = [distinct_share(row[: arguments.free_tokens].tolist()) for row in rows] if arguments.free_tokens else []
    made = []
    for temperature in TEMPERATURES if arguments.free_tokens else ():
        made.append(free_text(model, rows[0, :PROMPT].tolist(), arguments.free_tokens, temperature, arguments.seed))
        if made[-1]["agreement"] < AGREEMENT:
            found = f"{made[-1]['agreement']:.1%} of the choices of a generated text"
            raise ValueError(f"this script must repeat {AGREEMENT:.0%} of the engine's choices, got {found}")
    cells, long = [], contexts[-1]
    for context in contexts:
        texts = {f"{context:,} tokens": rows}
        if context != long:
            same = same_text(rows, long, context)
            texts = {f"{context:,} tokens, rows' start": rows, f"{context:,} tokens, text of {long:,}": same}
        for name, cut in texts.items():
            for temperature, met in zip(TEMPERATURES, measure(model, cut, context, arguments.seed), strict=True):
                cells.append({"text": name, "context": context, "temperature": temperature, "shares": summary(met)})
    return {
        "weights": str(arguments.weights), "data": str(tokens.path), "precision": precision,
        "device": torch.cuda.get_device_name() if facts.kind == "cuda" else facts.name, "rows": len(rows),
        "joined_rows": joined, "cells": cells, "ratios": ratios(cells, long), "free": made,
        "free_tokens": arguments.free_tokens, "held_out_distinct": float(np.mean(held_out)) if held_out else None,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def report(result: dict) -> None:
    """Print the table and the lines below it."""
    rows, joined = result["rows"], result["joined_rows"]
    print(f"\n{result['weights']} on {result['data']}; {result['device']}, {result['precision']}, "
          f"torch {torch.__version__}, {result['seconds']:.0f} seconds")  # fmt: skip
    print(f"{rows} rows: {rows - joined} of one document, {joined} of joined documents of one source")
    print_table(result["cells"])
    for r in result["ratios"]:
        name = f"ratio at depth 1, top {r['width']}, T {r['temperature']:.0f}: {r['of']} over {r['over']}"
        print(f"{name}: {r['ratio']:.3f}±{r['se']:.3f}")
    for m in result["free"]:
        print(f"free text, T {m['temperature']:.0f}, {result['free_tokens']:,} tokens: distinct 4-grams "
              f"{m['distinct']:.3f} (held-out text {result['held_out_distinct']:.3f}); accepted "
              f"{m['acceptance'][0]:.3f}, {m['acceptance'][1]:.3f}, counted again {m['counted_again'][0]:.3f}, "
              f"{m['counted_again'][1]:.3f}; {m['tokens_per_call']:.2f} tokens a call; {m['agreement']:.1%} of the "
              "choices repeated")  # fmt: skip


def finite(value: object) -> object:
    """Replace what JSON has no number for by null."""
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--data", required=True, help="held-out token file")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 32768])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--free-tokens", type=int, default=2000, help="of each free text; 0 makes none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp8", "fp4", "fp4-emulated"))
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    try:
        result = run(parser.parse_args(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(result)
    print(json.dumps(finite(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
