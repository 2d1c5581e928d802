"""benchmarks/baselines.py: sizes, who sees whom, gated delta layers against their published form, all of them learn.

And of learn.py, that their steps wait for nothing and that a table goes on in a later call.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks import ablate, baselines, learn
from benchmarks.baselines import GatedDelta, Shared, adamw, build, dual, muon, short_convolution
from helpers import assert_close
from torch import Tensor

from dataset_pipeline import Batch, write_tokens
from model_config import ModelConfig, preset

CONTEXT = 96
TINY = replace(preset("nano").model, conv_width=0, vocab_size=64, hidden_dim=64, ffn_dim=128, num_query_heads=2,
               num_kv_heads=1, recurrent_heads=2, hypersphere_radius=8.0, sliding_window_size=24,
               anchor_tokens=4)  # fmt: skip
KINDS = ("dense", "dense-window", "delta")
# a short document, one longer than the window, one that begins in the last tokens
STARTS = (0, 7, 90)


def documents(tokens: int, starts: tuple[int, ...]) -> Tensor:
    """Return doc_start (1, T) of documents that start there."""
    index = torch.arange(tokens, dtype=torch.int32)
    return torch.stack([index.where(index == s, 0) for s in starts]).amax(0).cummax(0).values[None].int()


def rows(model: baselines.Decoder, ids: Tensor, doc_start: Tensor) -> Tensor:
    """Return the loss of each token under fixed targets: it reads what the token sees."""
    return model.loss_rows(ids, doc_start, torch.full_like(ids, 5))


@pytest.mark.parametrize("name", ["nano", "small", "medium", "base"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_within_two_percent(kind: str, name: str) -> None:
    product: ModelConfig = preset(name).model
    with torch.device("meta"):
        model = build(kind, product, 64)
    count = sum(p.numel() for p in model.parameters())
    assert abs(count / product.matrix_parameters - 1) < 0.02
    assert len(model.layers) == product.layers and model.embedding.weight.shape[1] == product.hidden_dim
    groups = model.parameter_groups()
    assert {n for group in groups.values() for n in group} == {n for n, _ in model.named_parameters()}
    assert all(p.dim() == 1 for p in groups["vector"].values())
    assert all(p.dim() == 2 for p in groups["matrix"].values()) and len(groups["embedding"]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_and_other_documents_change_nothing(kind: str) -> None:
    model = build(kind, TINY, CONTEXT).double()
    ids, doc_start = torch.randint(64, (1, CONTEXT)), documents(CONTEXT, STARTS)
    before = rows(model, ids, doc_start)
    changed = ids.clone()
    changed[0, 60] = (ids[0, 60] + 1) % 64
    moved = (rows(model, changed, doc_start) - before).abs() > 1e-6
    assert moved[60] and moved[61] and not moved[:60].any() and not moved[90:].any()
    changed = ids.clone()
    changed[0, 2:7] = (ids[0, 2:7] + 1) % 64
    moved = (rows(model, changed, doc_start) - before).abs() > 1e-6
    assert moved[2:7].all() and not moved[7:].any() and not moved[:2].any()
    # a document alone, at the start of a row, loses what it lost inside one
    alone = rows(model, ids[:, 7:90], documents(83, (0,)))
    torch.testing.assert_close(alone, before[7:90], rtol=0, atol=1e-5)


def test_window_bounds_what_a_layer_sees() -> None:
    """One layer of the windowed decoder: a changed token moves the next 24 places of its document and no more."""
    model = build("dense-window", TINY, CONTEXT).double()
    layer, doc_start = model.layers[0], documents(CONTEXT, STARTS)
    shared = Shared(model.cos, model.sin, doc_start, model.window)
    x = torch.randn(1, CONTEXT, 64, dtype=torch.float64)
    changed = x.clone()
    changed[0, 40] += 1
    moved = (layer(changed, shared) - layer(x, shared)).abs().amax(-1)[0] > 1e-9
    assert moved.nonzero().flatten().tolist() == list(range(40, 64))


def test_convolution_stays_in_its_document() -> None:
    x, taps = torch.randn(2, 12, 5, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    doc_start = torch.cat((documents(12, (0, 6)), documents(12, (0, 1, 10))))
    got = short_convolution(x, taps, doc_start)
    for row, bounds in enumerate(((0, 6, 12), (0, 1, 10, 12))):
        for a, z in pairwise(bounds):
            alone = F.pad(x[row, a:z].T, (3, 0))[None]
            expected = F.conv1d(alone, taps.view(5, 1, 4).flip(-1), groups=5)[0].T
            torch.testing.assert_close(got[row, a:z], F.silu(expected))


def published_layer(layer: GatedDelta, x: Tensor, starts: tuple[int, ...]) -> Tensor:
    """Run a gated delta layer token by token: decay, then erase, then write. x (T, D), state (H, V, K)."""
    ends = (*starts[1:], len(x))
    out = []
    for a, z in zip(starts, ends, strict=True):
        mixed = []
        for matrix, taps in (
            (layer.query, layer.query_taps), (layer.key, layer.key_taps), (layer.value, layer.value_taps),
        ):  # fmt: skip
            channels = F.pad(matrix(x[a:z]).T, (3, 0))[None]
            y = F.conv1d(channels, taps.view(-1, 1, 4).flip(-1), groups=channels.shape[1])[0].T
            mixed.append(F.silu(y).unflatten(-1, (layer.heads, -1)))
        q, k, v = mixed
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        beta = layer.erase_gate(x[a:z]).sigmoid()
        step = F.softplus(layer.decay_gate(x[a:z]) + layer.step_start + layer.step_offset)
        decay = (-(layer.rate_start + layer.rate_offset).exp() * step).clamp(min=-5).exp()
        state = x.new_zeros(layer.heads, v.shape[-1], k.shape[-1])
        for t in range(z - a):
            state = decay[t, :, None, None] * state
            told = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
            state = state + beta[t, :, None, None] * told[..., None] * k[t, :, None]
            y = torch.einsum("hvk,hk->hv", state, q[t])
            y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + layer.output_norm.offset)
            gate = F.silu(layer.output_gate(x[a + t]).unflatten(-1, (layer.heads, -1)))
            out.append(layer.output((y * gate).flatten()))
    return torch.stack(out)


@pytest.mark.parametrize("bias", [0.0, 4.0], ids=["usual", "decay at its bound"])
def test_gated_delta_is_the_published_rule(bias: float) -> None:
    layer = GatedDelta(32, 2, 16, 16)
    with torch.no_grad():
        layer.step_offset += bias
    x, starts = torch.randn(70, 32), (0, 3, 40)
    single = Shared(x, x, documents(70, starts), x)
    low = published_layer(layer, x, starts)
    got = layer(x[None], single)[0]
    layer.double()
    truth = published_layer(layer, x.double(), starts)
    gates = layer._gates(x.double(), torch.float64)[1]
    assert (gates == -5).any() == bool(bias)
    assert_close("float32", got, truth, low, rms_bound=2e-5)
    torch.testing.assert_close(layer(x.double()[None], single)[0], truth, rtol=1e-9, atol=1e-10)


def test_first_losses_are_those_of_a_tied_head_at_its_start() -> None:
    ids, doc_start = torch.randint(64, (1, CONTEXT)), documents(CONTEXT, STARTS)
    targets = torch.randint(64, (1, CONTEXT))
    # ln 64 = 4.16; the tied head also sees the input token's own embedding, at most a logit of 0.02 D = 1.3 or sqrt(D)
    for kind, most in (("dense", 4.5), ("delta", 8.0)):
        loss = build(kind, TINY, CONTEXT).loss_rows(ids, doc_start, targets).mean()
        assert 4.1 < loss.item() < most, (kind, loss)


RATES = {
    # optimizer            matrix  embedding  vector
    "adamw": dict(matrix=5e-3, embedding=5e-3, vector=5e-3),
    "muon":  dict(matrix=2e-2, embedding=5e-3, vector=5e-3),
    "dual":  dict(matrix=6e-2, embedding=1e-2, vector=4e-3),
}  # fmt: skip


def made(kind: str, name: str) -> tuple[baselines.Decoder, object]:
    model = build(kind, TINY, CONTEXT)
    config = (preset("nano").optimizer,) if name == "dual" else ()
    return model, {"adamw": adamw, "muon": muon, "dual": dual}[name](model, RATES[name], *config)


@pytest.mark.parametrize(("kind", "name"), [("dense", "adamw"), ("dense", "muon"), ("delta", "dual")])
def test_a_repeated_batch_is_learned(kind: str, name: str) -> None:
    model, optimizer = made(kind, name)
    ids, doc_start = torch.randint(64, (2, 33)), documents(32, (0, 10)).expand(2, -1)
    targets = ids[:, 1:].clone()
    targets[:, 9] = -100
    losses = []
    for step in range(20):
        loss = model.loss_rows(ids[:, :-1], doc_start, targets)
        assert loss.shape == (64,) and loss.dtype == torch.float32 and loss[9] == 0 and loss[41] == 0
        loss.mean().backward()
        optimizer.step(min(1.0, (step + 1) / 4), step / 20)
        losses.append(loss.mean().item())
        assert all((p.grad == 0).all() for p in model.parameters())
    assert losses[-1] < losses[0] - 1.5, losses


@pytest.mark.parametrize("name", ["adamw", "muon", "dual"])
def test_a_multiplier_of_zero_moves_nothing_and_one_moves_all(name: str) -> None:
    model, optimizer = made("delta", name)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    ids, doc_start = torch.randint(64, (1, CONTEXT)), documents(CONTEXT, STARTS)
    for multiplier in (0.0, 1.0):
        rows(model, ids, doc_start).mean().backward()
        recorded = []
        optimizer.step(multiplier, 0.5, run=lambda key, body: recorded.append(key) or body())  # noqa: B023
        assert len(recorded) == 1
        moved = {n for n, p in model.named_parameters() if not torch.equal(p, start[n])}
        assert moved == (set(start) if multiplier else set())


def test_muon_is_that_of_torch_and_the_gradient_is_clipped() -> None:
    (model, optimizer), rates = made("dense", "muon"), RATES["muon"]
    twin = build("dense", TINY, CONTEXT)
    twin.load_state_dict(model.state_dict())
    groups = {role: list(group.values()) for role, group in twin.parameter_groups().items()}
    theirs = [
        torch.optim.Muon(groups["matrix"], lr=rates["matrix"] / 2, weight_decay=0.1, momentum=0.95, nesterov=True,
                         adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups["embedding"], lr=rates["embedding"] / 2, betas=(0.9, 0.95), weight_decay=0.1),
        torch.optim.AdamW(groups["vector"], lr=rates["vector"] / 2, betas=(0.9, 0.95), weight_decay=0.0),
    ]  # fmt: skip
    for size in (1e-6, 1e-2, 1.0):
        # given, not computed: bf16 iterations enlarge the last bits of what a model would compute
        for p, other in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = size * torch.randn_like(p)
            other.grad = p.grad.clone()
        torch.nn.utils.clip_grad_norm_([p for group in groups.values() for p in group], 1.0)
        optimizer.step(0.5)
        for other in theirs:
            other.step()
            other.zero_grad()
    for (name, p), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=0, atol=1e-7, msg=name)


def tiny_corpus(folder: Path) -> learn.Corpus:
    for name in ("tokens.bin", "tokens.val.bin"):
        write_tokens(folder / name, [[(7 * i) % 64 for i in range(700)]], vocab_size=64)
    return learn.Corpus.open(str(folder / "tokens.bin"), 64)


def test_a_step_of_a_baseline_waits_for_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From memory that is not page-locked a copy waits for the device: once a shape, or its seconds would be longer."""
    corpus = tiny_corpus(tmp_path)
    config = preset("nano").with_values({"context": 32, "total_tokens": 640, "tokens_per_step": 64})
    config = replace(config.with_values({"micro_batch_tokens": 64}), model=TINY)
    copied = []
    monkeypatch.setattr(learn.learning, "points", lambda steps: [steps])
    monkeypatch.setattr(learn.learning, "measure_rows", lambda *_: 0.0)
    move = Batch.to
    monkeypatch.setattr(Batch, "to", lambda batch, device: copied.append(batch.inputs.shape) or move(batch, device))
    point = {"warm-up": 0.2, "matrix": 1e-3, "embedding": 1e-3, "vector": 1e-3}
    learn.train_baseline("adamw", point, config, corpus, 1.0)
    assert copied == [(2, 32)]


def _run(nats: float) -> learn.Run:
    return learn.Run(name="hybrid", point={"matrix": 0.06}, seed=0, tokens=1, parameters=1, nats=nats, bits=None,
                     seconds=1.0, curve=[(1, 1.0, nats)])  # fmt: skip


def test_each_variant_of_the_product_is_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one name, the first variant's result would be taken for the others."""
    corpus, made = tiny_corpus(tmp_path), []
    results = ablate.learning.Results(tmp_path / "runs.jsonl", corpus)
    monkeypatch.setattr(ablate.learning, "train_product", lambda *_, name, **__: made.append(name) or _run(len(made)))
    for variant in ablate.VARIANTS:
        ablate.run_variant(variant, preset("nano"), corpus, results)
    assert [run.nats for run in results.runs] == list(range(1, len(ablate.VARIANTS) + 1))
    assert made == [f"{variant.reading}: {variant.name}" for variant in ablate.VARIANTS]


def test_a_table_goes_on_where_its_last_call_stopped(tmp_path: Path) -> None:
    corpus, config, file = tiny_corpus(tmp_path), preset("nano"), tmp_path / "runs.jsonl"
    made = []

    def once(results, name, nats, config=config, point=None):
        return results.once(name, config, lambda: made.append(nats) or _run(nats), point).nats

    first = learn.learning.Results(file, corpus)
    assert once(first, "hybrid", 4.0, point={"matrix": 0.06}) == 4.0
    again = learn.learning.Results(file, corpus)
    assert once(again, "hybrid", 5.0, point={"matrix": 0.06}) == 4.0 and made == [4.0]
    assert [run.nats for run in again.runs] == [4.0] and again.runs[0].curve[0] == [1, 1.0, 4.0]
    # another name, point or setting is another run
    assert once(again, "muon", 6.0, point={"matrix": 0.06}) == 6.0
    assert once(again, "hybrid", 7.0, point={"matrix": 0.12}) == 7.0
    assert once(again, "hybrid", 8.0, config.with_values({"seed": 1}), {"matrix": 0.06}) == 8.0
    assert len(file.read_text().splitlines()) == 4 and not file.with_suffix(".part").exists()
