"""Seconds to find duplicates in a corpus, and what was found.

    python tests/benchmarks/dedup_speed.py corpus.jsonl.xz
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dataset_pipeline import _Corpus, _text_files, find_duplicates  # noqa: E402


def main() -> None:
    files = [found for path in sys.argv[1:] for found in _text_files(Path(path))]
    corpus = _Corpus(files, join_source=False)
    begin = time.perf_counter()
    report = find_duplicates(corpus.texts(), total=corpus.count)
    seconds = time.perf_counter() - begin
    print(*report.describe(), sep="\n")
    size = corpus.size / 1e6
    print(f"{corpus.count:,} documents, {size:.1f} MB in {seconds:.1f} s, {size / seconds:.1f} MB/s")
    texts = list(corpus.texts())
    near = [removal for removal in report.removed if removal.reason == "near"]
    for removal in near[:: max(1, len(near) // 6)]:
        print(f"\n{removal}\n  {texts[removal.kept][:200]!r}\n  {texts[removal.document][:200]!r}")


if __name__ == "__main__":
    main()
