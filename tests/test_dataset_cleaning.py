"""dataset_pipeline.py, cleaning: duplicates, clusters, contamination, and their way through prepare."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dataset_pipeline as dp

PLENTY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def in_this_process(request, monkeypatch):
    """Processes take seconds to start; one test uses them."""
    if "processes" in request.node.name:
        return

    def spread(work, texts, workers, total, title, table=None):
        dp._gram_table().clear()
        dp._share_table(table or {})
        for text in texts:
            yield from work([text])

    monkeypatch.setattr(dp, "_spread", spread)


def words(count, seed, vocabulary=5_000):
    rng = np.random.default_rng(seed)
    return [f"w{i}" for i in rng.integers(0, vocabulary, count)]


def changed(text, every, name="x"):
    return [f"{name}{i}" if i % every == every // 2 else word for i, word in enumerate(text)]


def removed(texts, **options):
    return {r.document: (r.kept, r.reason) for r in dp.find_duplicates(map(" ".join, texts), **options).removed}


def jaccard(a, b, width=5):
    a, b = ({tuple(t[i : i + width]) for i in range(len(t) - width + 1)} for t in (a, b))
    return len(a & b) / len(a | b)


def test_exact_and_near_duplicates_keep_the_first():
    base, other = words(600, 0), words(600, 1)
    near = changed(base, 60)
    far = changed(base, 6)
    assert jaccard(base, near) > 0.83 and jaccard(base, far) < 0.3
    texts = [other, base, near, far, base, ["short", "text"], ["short", "text"], ["short", "texts"]]
    assert removed(texts) == {2: (1, "near"), 4: (1, "exact"), 6: (5, "exact")}
    assert removed([near, base]) == {1: (0, "near")}
    assert removed(texts, threshold=0.95) == {4: (1, "exact"), 6: (5, "exact")}
    report = dp.find_duplicates(map(" ".join, texts))
    assert report.removed[0].similarity == pytest.approx(jaccard(base, near), abs=0.1)
    assert report.removed_bytes == {"exact": len(" ".join(base)) + 10, "near": len(" ".join(near))}
    size = sum(report.removed_bytes.values())
    assert f"removed 2 exact and 1 near of 8 documents, {size:,} bytes" in report.describe()[0]
    assert report.describe()[2].startswith("document 1 stands for 2 removed, first document 2: near, 0.")


def test_form_case_and_white_space():
    """Exact ignores white space, composition and case; near ignores punctuation as well."""
    text = "Naïve café: " + " ".join(words(80, 2))
    composed, decomposed = text, text.replace("ï", "i\u0308").replace("é", "e\u0301")
    near = text.upper().replace(":", ";")
    report = dp.find_duplicates([composed, decomposed.replace(" ", "\n  "), decomposed.upper(), near])
    assert [(r.document, r.reason) for r in report.removed] == [(1, "exact"), (2, "exact"), (3, "near")]
    assert {r.kept for r in report.removed} == {0} and report.removed_bytes["near"] == len(near.encode())


def test_empty_and_short_documents():
    """Four words and fewer make no shingle, five make one."""
    texts = ["", " \n", "one", "One\n", "a b c d", "a, b c d", "a b c d e", "a, b c d e", "a b c d f", "\ud800", "。"]
    report = dp.find_duplicates(texts)
    assert [(r.document, r.kept, r.reason) for r in report.removed] == [
        (1, 0, "exact"), (3, 2, "exact"), (7, 6, "near"),
    ]  # fmt: skip
    with_word = ["a b c d e f g h", "a b c d x f g h"]
    assert dp.find_duplicates(with_word, threshold=0.2).removed == ()  # every run of 5 of 8 words holds the changed one
    assert len(dp.find_duplicates(["a b c d e f g h i j", "a b c d e f g h i x"], threshold=0.5).removed) == 1


def test_five_words_tell_an_order_that_two_do_not():
    blocks = [words(12, 200 + i) for i in range(40)]
    text, shuffled = ([w for i in order for w in blocks[i]] for order in (range(40), range(39, -1, -1)))
    assert jaccard(text, shuffled, 2) > 0.82 and jaccard(text, shuffled) < 0.6
    assert removed([text, shuffled]) == {}


def test_shared_templates_are_not_duplicates():
    frame = words(40, 3)
    texts = [[*frame, *words(60, 10 + i)] for i in range(12)]
    assert max(jaccard(texts[0], t) for t in texts[1:]) < 0.5
    assert removed(texts) == {}
    # pairs of 0.65 meet in a band four times in ten, which removes nothing
    pairs = [t for i in range(30) for t in (words(300, 50 + i), changed(words(300, 50 + i), 24))]
    assert all(0.6 < jaccard(a, b) < 0.7 for a, b in zip(pairs[::2], pairs[1::2], strict=True))
    assert removed(pairs) == {} and len(removed(pairs, threshold=0.5)) == 30
    # a band that agrees by chance is not enough: with one row a band nearly every pair of these meets
    table = np.frombuffer(
        b"".join(s for _, _, s in dp._signatures([" ".join(t) for t in texts])), np.uint32
    ).reshape(12, -1)  # fmt: skip
    assert (table[0] == table[1]).any()
    clusters = dp._Clusters(12)
    dp._join_group(np.arange(12), table, clusters, 0.8)
    assert [clusters.root(i) for i in range(12)] == list(range(12))
    # and a bucket may hold several clusters
    table = np.repeat(table[:3], 4, axis=0)[[0, 4, 8, 1, 5, 9, 2, 6, 10]]
    clusters = dp._Clusters(9)
    dp._join_group(np.arange(9), table, clusters, 0.8)
    assert [clusters.root(i) for i in range(9)] == [0, 1, 2] * 3


@PLENTY
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 2)), max_size=14))
def test_clusters_are_the_connected_components(choices):
    """Families of variants, each one word in 180 from its base, some in another layout."""
    texts = []
    for family, variant, layout in choices:
        text = changed(words(360, 100 + family), 180, f"v{variant}x") if variant else words(360, 100 + family)
        texts.append((" ", "\n\n", ", ")[layout].join(text))
    near = [[jaccard(a.replace(",", "").split(), b.replace(",", "").split()) for b in texts] for a in texts]
    assert all(s < 0.1 or s > 0.93 for row in near for s in row)
    component = list(range(len(texts)))
    for _ in texts:
        for i, j in np.argwhere(np.array(near).reshape(len(texts), -1) > 0.8):
            component[i] = component[j] = min(component[i], component[j])
    report = dp.find_duplicates(texts)
    # one stays of each component, the first, and all others stand behind it
    assert {r.document: r.kept for r in report.removed} == {i: k for i, k in enumerate(component) if i != k}
    assert {r.document for r in report.removed if r.reason == "exact"} == {
        i for i, text in enumerate(texts) if text.split() in [t.split() for t in texts[:i]]
    }
    gone = {r.document for r in report.removed}
    stay = [text for i, text in enumerate(texts) if i not in gone]
    assert len({tuple(text.split()) for text in stay}) == len(stay)
    assert dp.find_duplicates(stay).removed == ()


@settings(PLENTY, max_examples=10)
@given(st.permutations(range(6)))
def test_a_chain_is_one_cluster(order):
    """Neighbours are 0.92 alike, the ends below 0.75: they hang together by those between them."""
    chain = [words(600, 30)]
    for step in range(5):
        chain.append([f"s{step}i{i}" if i % 130 == 20 * step + 10 else word for i, word in enumerate(chain[-1])])
    assert all(jaccard(a, b) > 0.91 for a, b in itertools.pairwise(chain))
    assert jaccard(chain[0], chain[-1]) < 0.75
    assert removed([chain[i] for i in order]) == {i: (0, "near") for i in range(1, 6)}
    assert removed([chain[0], words(300, 31), chain[-1]]) == {}


def test_the_same_result_with_one_and_two_processes():
    texts = [" ".join(t) for i in range(40) for t in (words(120, i), changed(words(120, i), 100))]
    one, two = (dp.find_duplicates(texts, workers=n) for n in (1, 2))
    assert one == two and len(one.removed) == 40
    held = [dp.find_contaminated(texts, texts[3:5], workers=n) for n in (1, 2)]
    assert held[0].removed == held[1].removed and np.array_equal(held[0].shares, held[1].shares)
    assert [r.document for r in held[0].removed] == [2, 3, 4, 5]


def test_retrieval_probability():
    report = dp.find_duplicates([])
    assert (report.bands, report.rows) == (16, 8)
    assert report.retrieval(0.8) == pytest.approx(1 - (1 - 0.8**8) ** 16) and report.retrieval(0.8) > 0.94
    assert "0.7: 0.613, 0.8: 0.947, 0.9: 1.000" in report.describe()[1]
    with pytest.raises(ValueError, match=r"must be in 0.2..0.95, got 0.0"):
        dp.find_duplicates([], threshold=0.0)


def test_contamination_by_runs_of_words():
    question = words(30, 7)
    tail = question[-13:]
    texts = [
        " ".join([*words(50, 8), *tail]),  # at the very end
        " ".join([*words(50, 9), *tail[:-1]]),  # one word short
        " ".join([*words(50, 10), *tail[:6], "other", *tail[6:]]),  # interrupted
        ", ".join(w.upper() for w in [*question[:13], *words(9, 11)]) + ".",  # case and punctuation do not count
        "yes",
        "",
    ]
    report = dp.find_contaminated(texts, [" ".join(question), " ".join(words(40, 12))])
    assert [(r.document, r.similarity) for r in report.removed] == [(0, 1), (3, 1)]
    assert report.shares.tolist() == [2 / 18, 0]
    assert "1 of 2 benchmark documents" in report.describe()[0]
    # several runs of one document, and the same words in another order
    report = dp.find_contaminated([" ".join(["so", *question[:20]]), " ".join(tail[::-1])], [" ".join(question)])
    assert [(r.document, r.similarity) for r in report.removed] == [(0, 8)] and report.shares.tolist() == [8 / 18]
    # a benchmark text of fewer words counts whole
    asked = "Which of the four is not a prime?"
    short = dp.find_contaminated([f"Now: {asked} ...", asked[:-7], "not a prime of which"], [asked, "none"])
    assert [r.document for r in short.removed] == [0] and short.shares.tolist() == [1, 0]
    # fewer than 8 words are everywhere: they count where they are the whole text
    texts_of_few = ["so the answer is: Four!", "The ANSWER is four.", "answer is four"]
    few = dp.find_contaminated(texts_of_few, ["The answer is four", "so"])
    assert [r.document for r in few.removed] == [1] and few.shares.tolist() == [1, 0]
    assert [r.document for r in dp.find_contaminated(texts_of_few, ["is four"], ngram=2).removed] == [0, 1, 2]
    assert [r.document for r in dp.find_contaminated(texts, [" ".join(tail)], ngram=12).removed] == [0, 1]
    with pytest.raises(ValueError, match="no words"):
        dp.find_contaminated(texts, ["", "?!"])


def test_prepare_removes_and_lists(tmp_path):
    base = words(200, 20)
    texts = [" ".join(t) for t in (base, words(200, 21), changed(base, 100), words(200, 22), words(200, 23))]
    records = [{"text": t, "source": "ab"[i % 2]} for i, t in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "test.txt").write_text(texts[3][300:500])
    report = dp.prepare(
        tmp_path / "in.jsonl", tmp_path / "out", vocab_size=400, validation_documents=1, dedup=0.8,
        decontaminate=tmp_path / "test.txt",
    )  # fmt: skip
    gone = [json.loads(line) for line in (tmp_path / "out" / "removed.jsonl").read_text().splitlines()]
    assert [(r["document"], r["source"], r["reason"], r["kept"]) for r in gone] == [
        (2, "a", "near", 0), (3, "b", "contaminated", None),
    ]  # fmt: skip
    assert all(texts[r["document"]].startswith(r["begins"]) for r in gone)
    assert report.train.documents + report.validation.documents == 3
    made = b"".join(
        dp.decode_bytes(report.tokenizer.read_text(), dp.open_tokens(split.path).ids.tolist())
        for split in (report.train, report.validation)
    )
    assert all((t.encode() in made) == (i not in (2, 3)) for i, t in enumerate(texts))
    lines = report.describe()
    assert any("removed from a: 1 documents" in line for line in lines) and any("contamination:" in x for x in lines)
    with pytest.raises(ValueError, match="left no document"):
        dp.prepare(tmp_path / "test.txt", tmp_path / "o", vocab_size=400, decontaminate=tmp_path / "test.txt")
