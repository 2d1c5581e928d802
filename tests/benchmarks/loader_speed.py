"""Loader throughput from a warm file, every tensor of every step touched, at each row length of the curriculum.

    python tests/benchmarks/loader_speed.py           # 64 M random ids, documents of 1,500 tokens on average
    python tests/benchmarks/loader_speed.py --data data/tokens.bin

One process, one loader thread, as in training. For each length: tokens a second over whole steps, each step's totals,
inputs, targets, draft targets, loss weights, document starts, reset flags and tile map summed.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dataset_pipeline import (  # noqa: E402
    CurriculumStage,
    PackedSequenceDataLoader,
    attention_tile_map,
    open_tokens,
    reset_flags,
    write_tokens,
)

LENGTHS = (2_048, 4_096, 8_192, 16_384, 65_536, 131_072, 1_048_576)
WINDOW, ANCHORS, TILE = 8_192, 64, 128  # of the full model


def random_file(folder: Path, count: int, mean: int, masked: bool) -> Path:
    """Write ids of a 65,536 vocabulary in documents of geometric length, half of the targets masked if asked."""
    generator = np.random.default_rng(0)
    lengths = generator.geometric(1 / mean, count // mean)
    documents = (generator.integers(0, 65_536, n) for n in lengths)
    masks = (generator.integers(0, 2, n) for n in lengths) if masked else None
    write_tokens(folder / "tokens.bin", documents, vocab_size=65_536, masks=masks)
    return folder / "tokens.bin"


def touch(loader: PackedSequenceDataLoader, step: int) -> int:
    """Sum everything that a step delivers."""
    plan = loader.step_batches(step)
    total = plan.supervised + sum(plan.draft_supervised)
    for batch in plan:
        drafts = batch.draft_ids, batch.draft_targets
        for x in (batch.inputs, batch.targets, *drafts, batch.loss_weights, batch.doc_start):
            total += x.sum().item()
        total += reset_flags(batch.doc_start).sum().item()
        tiles = attention_tile_map(batch.doc_start, WINDOW, ANCHORS, TILE)
        total += tiles.offsets.sum().item() + tiles.key_tiles.sum().item() + tiles.full.sum().item()
    return int(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--mean", type=int, default=1_500, help="tokens of a document of the random file")
    parser.add_argument("--masked", action="store_true", help="give the random file a response mask")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.data or random_file(Path(folder), 64_000_000, arguments.mean, arguments.masked)
        tokens = open_tokens(path)
        np.asarray(tokens.ids[:]).sum()  # the page cache is warm
        print(*tokens.describe(), sep="\n")
        for length in LENGTHS:
            size = max(131_072, length)
            if len(tokens) < 2 * size:
                continue
            steps = min(64, len(tokens) // size)
            stage = CurriculumStage(length=length, tokens=steps * size, tokens_per_step=size, steps=steps)
            loader = PackedSequenceDataLoader(tokens, [stage], seed=0, micro_batch_tokens=16_384)
            touch(loader, 0)
            rates = []
            for _ in range(3):
                begin = time.perf_counter()
                for step in range(steps):
                    touch(loader, step)
                rates.append(steps * size / (time.perf_counter() - begin))
            spread = f"{min(rates) / 1e6:.1f} to {max(rates) / 1e6:.1f}"
            print(f"rows of {length:9,}: {np.median(rates) / 1e6:6.1f} M tokens/s ({spread})", flush=True)


if __name__ == "__main__":
    main()
