"""Encoding by prepare against the tokenizer library alone, on the same texts and cores, in one run.

    python tests/benchmarks/prepare_speed.py corpus.jsonl.xz

prepare reads, unpacks, parses, encodes and writes ids, ends and hashes; the library is given lists of ready texts in
batches of the same size, and what it makes is thrown away. Both use one tokenizer, trained before.
"""

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import dataset_pipeline as dp  # noqa: E402


def main() -> None:
    files = [found for path in sys.argv[1:] for found in dp._text_files(Path(path))]
    corpus = dp._Corpus(files, join_source=False)
    held = dp._held_out(corpus.count, 0.05, None, 0)
    tokenizer = dp._train_tokenizer(corpus.sample(~held, 20_000_000, 0), 65_536)
    pieces = [piece for text in corpus.texts() for piece in dp._pieces(text)]
    library = dp._load_tokenizer(tokenizer)
    rates = {"library": [], "prepare": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            begin, tokens = time.perf_counter(), 0
            for i in range(0, len(pieces), dp._BATCH_PIECES):
                batch = library.encode_batch_fast(pieces[i : i + dp._BATCH_PIECES], add_special_tokens=False)
                tokens += sum(map(len, batch))
            rates["library"].append(corpus.size / (time.perf_counter() - begin))
            begin = time.perf_counter()
            splits, _, _ = dp._encode_splits(corpus, held, tokenizer, Path(folder))
            rates["prepare"].append(corpus.size / (time.perf_counter() - begin))
            made = sum(split.tokens - 2 * split.documents for split in splits)
            assert made == tokens, (made, tokens)
    size = f"{corpus.count:,} documents, {corpus.size / 1e6:.1f} MB, {tokens:,} tokens"
    print(f"{size}; MB/s: " + ", ".join(f"{name} {max(x) / 1e6:.2f}" for name, x in rates.items()))
    ratios = [p / q for p, q in zip(rates["prepare"], rates["library"], strict=True)]
    print("prepare / library, each of 3 rounds: " + ", ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
