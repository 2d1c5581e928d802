"""dataset_pipeline.py, cleaning: duplicates, contamination, and their way through prepare."""

import collections
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
    report = dp.find_duplicates([" ".join(text) for text in texts], **options)
    return {r.document: (r.kept, r.reason) for r in report.removed}


def runs_of(text, width):
    return {tuple(text[i : i + width]) for i in range(len(text) - width + 1)}


def jaccard(a, b, width=5):
    a, b = runs_of(a, width), runs_of(b, width)
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
    report = dp.find_duplicates([" ".join(text) for text in texts])
    assert report.removed[0].similarity == jaccard(base, near)
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
    # of many that are half alike and meet in a band none goes, though a band of these would agree for every pair
    table = np.repeat(np.frombuffer(dp._signatures([" ".join(texts[0])])[0][2], np.uint32)[None], 12, axis=0)
    buckets = dp._buckets(table, 16, 8)
    assert (buckets == np.arange(16)[:, None]).all()
    assert list(dp._repeats([" ".join(t) for t in texts], np.arange(12), table, buckets, 0.8)) == []


def test_buckets_hold_what_shares_a_band():
    table = np.array([[1, 2, 3, 4], [1, 2, 9, 9], [5, 2, 3, 4], [7, 7, 9, 8], [1, 2, 3, 4]], np.uint32)
    first, second = dp._buckets(table, 2, 2)
    assert [list(np.flatnonzero(first == b)) for b in set(first) - {-1}] == [[0, 1, 4]]
    assert [list(np.flatnonzero(second == b)) for b in set(second) - {-1}] == [[0, 2, 4]]
    assert not set(first) & set(second) - {-1}


@PLENTY
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(0, 2)), max_size=14))
def test_a_document_goes_iff_it_repeats_one_that_stays(choices):
    """Chains of versions, two steps of which are 0.86 alike and three 0.80 or 0.77, by brute force over all pairs."""
    texts = []
    for family, version, layout in choices:
        text = words(400, 100 + family)
        for step in range(version):
            text = [f"s{step}i{i}" if i % 130 == 20 * step + 10 else word for i, word in enumerate(text)]
        texts.append((" ", "\n\n", ", ")[layout].join(text))
    plain = [text.replace(",", "").split() for text in texts]
    stays, expected = [], {}
    for i, text in enumerate(plain):
        alike = {k: jaccard(plain[k], text) for k in stays}
        if not any(value >= 0.8 for value in alike.values()):
            stays.append(i)
        expected[i] = alike
    report = dp.find_duplicates(texts)
    assert [i for i in range(len(texts)) if i not in {r.document for r in report.removed}] == stays
    for r in report.removed:
        assert r.kept in stays and r.similarity == pytest.approx(expected[r.document][r.kept]) and r.similarity >= 0.8
        same = texts[r.document].split() == texts[r.kept].split()
        assert (r.reason == "exact") == same and (not same or r.similarity == 1)
    assert dp.find_duplicates([texts[i] for i in stays]).removed == ()


def test_a_chain_goes_only_as_far_as_it_is_like_the_one_that_stays():
    """Neighbours are 0.92 alike; what is three steps away is not a repetition, though those between them go."""
    chain = [words(600, 30)]
    for step in range(5):
        chain.append([f"s{step}i{i}" if i % 130 == 20 * step + 10 else word for i, word in enumerate(chain[-1])])
    assert all(jaccard(a, b) > 0.91 for a, b in itertools.pairwise(chain))
    assert jaccard(chain[0], chain[2]) > 0.83 and jaccard(chain[0], chain[3]) < 0.79
    assert removed(chain) == {1: (0, "near"), 2: (0, "near"), 4: (3, "near"), 5: (3, "near")}
    # a copy of one that goes is like the one that stays, which is not its own text
    copied = [chain[0], chain[2], chain[2]]
    report = dp.find_duplicates([" ".join(text) for text in copied])
    found = [(r.document, r.kept, r.reason, r.similarity) for r in report.removed]
    assert found == [(i, 0, "near", jaccard(chain[0], chain[2])) for i in (1, 2)]


def test_the_estimate_decides_nothing():
    """Of 60 pairs just above and below the threshold, whose estimates are off by 0.035, all above go and none below."""
    texts, above = [], []
    for i in range(60):
        text = words(700, 300 + i)
        other = changed(text, 45 if i % 2 else 52)
        texts += [text, other]
        above.append(jaccard(text, other))
    assert min(above[::2]) > 0.81 and 0.78 < max(above[1::2]) < 0.8
    gone = removed(texts)
    assert set(gone) <= {2 * i + 1 for i in range(0, 60, 2)} and len(gone) >= 27  # of 30, 0.95 are looked at
    assert all(kept == document - 1 for document, (kept, _) in gone.items())


def test_many_copies_are_compared_with_the_one_that_stays(monkeypatch):
    calls, real = [], dp._jaccard
    monkeypatch.setattr(dp, "_jaccard", lambda a, b: calls.append(len(a)) or real(a, b))
    base = words(300, 40)
    texts = [[*base, f"page{i}"] for i in range(200)]
    assert removed(texts) == {i: (0, "near") for i in range(1, 200)}
    assert len(calls) == 199
    # pages of one template meet in some band, and only the most alike of them are read word by word
    calls.clear()
    pages = [[*base, *words(60, 1_000 + i)] for i in range(100)]
    assert 0.7 < jaccard(pages[0], pages[1]) < 0.73 and removed(pages) == {}
    assert 100 < len(calls) <= 100 * dp._COMPARED


def test_duplicates_need_the_texts_twice():
    with pytest.raises(ValueError, match="must be iterable twice, such as a list, got map"):
        dp.find_duplicates(map(str, range(3)))


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


def contaminated(texts, benchmark, **options):
    """{document: (share, held-out document, share of that one)}"""
    texts, benchmark = ([t if isinstance(t, str) else " ".join(t) for t in x] for x in (texts, benchmark))
    report = dp.find_contaminated(texts, benchmark, **options)
    return {r.document: (r.share, r.held_out, r.held_out_share) for r in report.removed}, report


def test_a_question_counts_by_the_share_of_its_runs():
    question, other = words(30, 7), words(40, 12)
    texts = [
        [*words(500, 8), *question, *words(500, 18)],  # the whole of it
        [*words(50, 9), *question[-21:]],  # 9 of its 18 runs
        [*words(50, 10), *question[-20:]],  # one fewer
        [*words(50, 10), *question[:12], "other", *question[13:24]],  # interrupted
        ", ".join(w.upper() for w in [*question[:22], *words(9, 11)]) + ".",  # case and punctuation do not count
        [*words(50, 13), *question[-13:], *words(50, 14), *other[:13]],  # a run of each of two is no question
        "yes",
        "",
    ]
    gone, report = contaminated(texts, [other, question])
    assert gone == {
        0: (18 / 1018, 1, 1.0), 1: (9 / 59, 1, 0.5), 4: (10 / 19, 1, 10 / 18),
    }  # fmt: skip
    assert report.shares.tolist() == [1 / 28, 1] and report.documents == 8
    assert "removed 3 of 8 documents; 1 are held-out text by 50% or more, 2 hold" in report.describe()[0]
    assert report.describe()[2] == "held-out document 1 takes 3 away, first 100% of it in document 0"
    assert set(contaminated(texts, [other, question], share=8 / 18)[0]) == {0, 1, 2, 4}
    assert set(contaminated(texts, [other, question], share=1.0)[0]) == {0}
    for wrong in (0.0, 1.1):
        with pytest.raises(ValueError, match=r"share of n-grams must be in \(0, 1\]"):
            contaminated(texts, [question], share=wrong)


def test_a_document_counts_by_the_share_of_its_own_runs():
    """A page of a long held-out text goes, a long text with a passage of it stays."""
    book = words(3_000, 21)
    texts = [
        book[100:200],
        [*words(100, 22), *book[500:612]],  # 100 of 200 runs
        [*words(100, 22), *book[500:611]],  # 99 of 199
        [*words(2_000, 23), *book[:900]],
        book[40:53],  # 13 words are one run
        book[40:52],  # of fewer, only the same text would go
    ]
    gone, _ = contaminated(texts, [words(200, 24), book])
    assert {i: (share, held) for i, (share, held, _) in gone.items()} == {0: (1, 1), 1: (0.5, 1), 4: (1, 1)}


def test_a_licence_is_no_contamination():
    """Of 25 files of one licence 5 are held out: their text stays in the corpus, a file that repeats one does not."""
    licence = words(200, 50)
    files = [[*licence, *words(100, 60 + i)] for i in range(31)]
    held, corpus = files[:5], [*files[5:], [*licence, *files[2][200:], *words(50, 99)]]
    assert all(len(runs_of(text, 13) & runs_of(licence, 13)) > len(runs_of(text, 13)) / 2 for text in files)
    gone, report = contaminated(corpus, held)
    # of the runs that count: 12 that begin in the licence and 88 of its own
    assert gone == {26: (100 / 150, 2, 1.0)}
    assert report.most == 20 and report.ignored == 188
    assert "13-word runs in more than 20 documents do not count, 188 here; 5 of 5 held-out" in report.describe()[1]
    # what it does not hold of the licence counts: 58 of 288 runs are not half of a file
    assert 27 not in contaminated([*corpus, [*words(90, 98), *files[1][230:]]], held)[0]
    assert 27 in contaminated([*corpus, [*words(90, 98), *licence, *files[1][200:250]]], held)[0]
    # in 20 documents a run still counts
    assert set(contaminated(corpus[-20:], held)[0]) == set(range(20))
    # a held-out text of the licence alone is in all of them, and a document of nothing else is held out
    gone, _ = contaminated([*corpus, licence[30:180]], [licence])
    assert set(gone) == set(range(28)) and gone[27][0] == 1


def test_the_frame_of_questions_is_no_question():
    """Runs of more than 20 held-out documents count for the first of them alone; so do copies of one."""
    frame, asked = words(60, 70), [words(30, 71 + i) for i in range(30)]
    benchmark = [[*frame, *question] for question in asked]
    corpus = [[*words(300, 200), *frame], [*words(300, 201), *asked[17]], [*words(300, 202), *frame, *asked[9]]]
    gone, _ = contaminated(corpus, benchmark)
    assert {i: held for i, (_, held, _) in gone.items()} == {0: 0, 1: 17, 2: 9}
    # question 17 has 12 runs that begin in the frame and 18 of its own, question 0 also the 48 of the frame
    assert [round(part, 6) for _, _, part in gone.values()] == [round(x, 6) for x in (48 / 78, 18 / 30, 1)]
    assert contaminated(corpus, [asked[17]] * 30)[0] == {1: (18 / 318, 0, 1.0)}


def test_short_texts_count_whole():
    asked = "Which of the four is not a prime?"
    short, report = contaminated([f"Now: {asked} ...", asked[:-7], "not a prime of which", asked], [asked, "none"])
    assert short == {0: (0, 0, 1), 3: (1, 0, 1)} and report.shares.tolist() == [1, 0]
    # fewer than 8 words are everywhere: they count where they are the whole text
    texts_of_few = ["so the answer is: Four!", "The ANSWER is four.", "answer is four"]
    few, report = contaminated(texts_of_few, ["The answer is four", "so"])
    assert few == {1: (1, 0, 1)} and report.shares.tolist() == [1, 0]
    # however many there are
    assert len(contaminated(["yes", "No.", *["The answer is: four"] * 40], ["The answer is four"])[0]) == 40
    assert set(contaminated(texts_of_few, ["is four"], ngram=2)[0]) == {0, 1, 2}
    with pytest.raises(ValueError, match="no words"):
        contaminated(texts_of_few, ["", "?!"])
    with pytest.raises(ValueError, match="at least 1 word, got 0"):
        contaminated(texts_of_few, ["a"], ngram=0)


# texts of parts of three texts, so that all kinds of sharing occur
PARTS = st.lists(
    st.builds(lambda text, begin, size: words(40, 400 + text)[begin : begin + size],
              st.integers(0, 2), st.sampled_from([0, 0, 5, 11]), st.sampled_from([3, 8, 9, 10, 14, 20])),
    max_size=3,
).map(lambda parts: [word for part in parts for word in part])  # fmt: skip


@settings(PLENTY, max_examples=150)
@given(
    st.lists(PARTS, max_size=8), st.lists(PARTS, max_size=5),
    st.integers(8, 9), st.integers(0, 3), st.sampled_from([0.3, 0.5, 1.0]),
)  # fmt: skip
def test_contamination_equals_brute_force(corpus, benchmark, ngram, most, share):
    def grams(text):
        return runs_of(text, min(ngram, len(text))) if text else set()

    def held(text):
        """Runs of the benchmark that a text holds: short ones anywhere, the shortest as whole texts."""
        everywhere = set().union(*(runs_of(text, n) for n in range(8, ngram + 1)))
        return (everywhere | {tuple(text)}) & set().union(*map(grams, benchmark))

    if not any(benchmark):
        return
    number = collections.Counter(run for text in corpus for run in held(text))
    common = {run for run, n in number.items() if n > most}

    def part(runs, found):
        return 1.0 if found >= runs else len((found & runs) - common) / len(runs - (common & found))

    frames = collections.Counter(run for text in benchmark for run in grams(text))
    counts = [
        {run for run in grams(text) if frames[run] <= most or all(run not in grams(b) for b in benchmark[:i])}
        for i, text in enumerate(benchmark)
    ]
    expected = {}
    for i, text in enumerate(corpus):
        if found := held(text):
            own = part(grams(text), found)
            shares = [part(runs, found) if runs & found else 0.0 for runs in counts]
            best = int(np.argmax(shares))
            if max(own, shares[best]) >= share:
                expected[i] = (own, best, shares[best])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dp, "_COMMON", most)
        gone, report = contaminated(corpus, benchmark, ngram=ngram, share=share)
    assert gone.keys() == expected.keys()
    for i, (own, best, shares) in expected.items():
        assert gone[i][0] == pytest.approx(own) and gone[i][2] == pytest.approx(shares)
        assert gone[i][1] == best or shares == 0
    assert report.ignored == len(common)


def test_prepare_removes_and_lists(tmp_path):
    base = words(200, 20)
    texts = [" ".join(t) for t in (base, words(200, 21), changed(base, 100), words(200, 22), words(200, 23))]
    records = [{"text": t, "source": "ab"[i % 2]} for i, t in enumerate(texts)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    # 13 words of the first document in a longer text, and a question of the fourth
    questions = [" ".join([*words(40, 24), *base[:13]]), texts[3][300:500]]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in questions))
    report = dp.prepare(
        tmp_path / "in.jsonl", tmp_path / "out", vocab_size=400, validation_documents=1, dedup=0.8,
        decontaminate=tmp_path / "test.jsonl",
    )  # fmt: skip
    gone = [json.loads(line) for line in (tmp_path / "out" / "removed.jsonl").read_text().splitlines()]
    assert [(r["document"], r["source"], r["reason"], r["kept"]) for r in gone] == [
        (2, "a", "near", 0), (3, "b", "contaminated", None),
    ]  # fmt: skip
    assert all(texts[r["document"]].startswith(r["begins"]) for r in gone)
    assert gone[0]["similarity"] == jaccard(base, changed(base, 100))
    own, part = (runs_of(t.split(), 13) for t in (texts[3], questions[1]))
    assert (
        gone[1]["share"] == len(own & part) / len(own) < 0.5 < gone[1]["held_out_share"] == len(own & part) / len(part)
    )
    assert (gone[1]["held_out"], gone[1]["held_out_begins"]) == (1, questions[1][:100])
    assert report.train.documents + report.validation.documents == 3
    made = b"".join(
        dp.decode_bytes(report.tokenizer.read_text(), dp.open_tokens(split.path).ids.tolist())
        for split in (report.train, report.validation)
    )
    assert all((t.encode() in made) == (i not in (2, 3)) for i, t in enumerate(texts))
    lines = report.describe()
    assert any("removed from a: 1 documents" in line for line in lines) and any("contamination:" in x for x in lines)
    held = tmp_path / "test.jsonl"
    with pytest.raises(ValueError, match="left no document"):
        dp.prepare(held, tmp_path / "o", vocab_size=400, decontaminate=held)
