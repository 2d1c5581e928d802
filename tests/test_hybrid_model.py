"""hybrid_model.py: the whole small model packed, split, tied, initialised, and on the GPU against the CPU."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import rms

from custom_kernels import fused_chunked_cross_entropy
from hybrid_model import HybridLanguageModel
from model_config import ModelConfig, PrecisionConfig, preset

TINY = replace(
    preset("nano").model, conv_width=0, hidden_dim=64, hypersphere_radius=8.0, ffn_dim=96, num_query_heads=2,
    num_kv_heads=1,
    head_dim=32, recurrent_heads=2, recurrent_key_dim=32, recurrent_value_dim=32, vocab_size=211,
    sliding_window_size=24, anchor_tokens=4,
)  # fmt: skip
CONVOLVED = replace(TINY, conv_width=4)
CONFIGS = pytest.mark.parametrize("config", [TINY, CONVOLVED], ids=["plain", "four-taps"])


def make_model(config: ModelConfig = TINY, dtype: torch.dtype = torch.float64, seed: int = 0) -> HybridLanguageModel:
    model = HybridLanguageModel(config, PrecisionConfig(precision="fp32"))
    model.init_weights(seed)
    with torch.no_grad():  # move the offsets off zero so that their gradients are generic
        for spec in model.parameter_table():
            if spec.role == "vector":
                spec.parameter.normal_(0, 0.5 if spec.name.endswith("taps") else 0.1)
    return model.to(dtype)


def doc_starts(lengths: list[int]) -> torch.Tensor:
    starts = [0]
    for n in lengths[:-1]:
        starts.append(starts[-1] + n)
    return torch.cat([torch.full((n,), s, dtype=torch.int32) for s, n in zip(starts, lengths, strict=True)])[None]


@pytest.mark.parametrize("width", [0, 2, 3, 4])
def test_parameter_table_covers_everything_once_and_counts_exactly(width):
    config = replace(TINY, conv_width=width)
    model = HybridLanguageModel(config)
    table = model.parameter_table()
    assert {s.name for s in table} == {n for n, _ in model.named_parameters()} and len(table) == len({*map(id, table)})
    assert sum(s.parameter.numel() for s in table) == config.total_parameters
    vectors = sum(s.parameter.numel() for s in table if s.role == "vector")
    draft = sum(s.parameter.numel() for s in table if s.name.startswith("draft."))
    assert (vectors, draft) == (config.vector_parameters, config.draft_parameters)
    taps = [s for s in table if s.name.endswith("operator.taps")]
    assert [s.name for s in taps] == [f"layers.{i}.operator.taps" for i in range(3)] * bool(width)
    assert all(s.role == "vector" and s.parameter.shape == (width * 192,) and not s.conditioned for s in taps)
    assert [s.name for s in table if s.role == "attention_output"] == ["layers.3.operator.output.weight"]
    assert sum(s.role == "gate" for s in table) == 9 and not any(s.conditioned for s in table if s.role == "gate")


@pytest.mark.parametrize("width", [0, 4])
def test_full_size_builds_on_the_meta_device(width):
    config = ModelConfig(conv_width=width)
    with torch.device("meta"):
        model = HybridLanguageModel(config)
        model.init_weights(0)
    assert sum(p.numel() for p in model.parameters()) == config.total_parameters


def test_taps_leave_every_other_weight_and_start_at_the_identity():
    plain, convolved = HybridLanguageModel(TINY), HybridLanguageModel(CONVOLVED)
    for model in (plain, convolved):
        model.init_weights(3)
    named, taps = dict(convolved.named_parameters()), 0
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, named.pop(name)), name
    for parameter in named.values():
        taps += parameter.numel()
        assert not parameter.any()
    assert taps == CONVOLVED.total_parameters - TINY.total_parameters == 3 * 4 * 2 * 96


def test_initialisation_as_printed():
    model = HybridLanguageModel(replace(preset("nano").model, conv_width=4))
    model.init_weights(3)
    for spec in model.parameter_table():
        if spec.role == "vector":
            assert not spec.parameter.any(), spec.name
            continue
        std = {"embedding": 1.0, "gate": 0.1 * spec.fan_in**-0.5}.get(spec.role, spec.fan_in**-0.5)
        assert spec.parameter.std().item() == pytest.approx(std, rel=0.1), spec.name


@CONFIGS
def test_b001_packed_documents_equal_documents_alone(config):
    model = make_model(config, dtype=torch.float32)
    lengths = [70, 1, 200]
    ids, doc_start = torch.randint(0, 211, (1, 271)), doc_starts([70, 1, 200])
    with torch.no_grad():
        packed = model(ids, doc_start=doc_start).hidden
        at = 0
        for n in lengths:
            alone = model(ids[:, at : at + n]).hidden
            assert (packed[:, at : at + n] - alone).abs().max() < 1e-5, n
            at += n
        edited = ids.clone()
        edited[0, 30] = (edited[0, 30] + 1) % 211
        again = model(edited, doc_start=doc_start).hidden
    assert torch.equal(again[:, 70:], packed[:, 70:]) and not torch.equal(again[:, :70], packed[:, :70])


@CONFIGS
def test_b001_cross_document_gradient_is_exactly_zero(config):
    model = make_model(config)
    ids = torch.arange(0, 202).reshape(1, -1) % 211  # every token of document 1 occurs once
    hidden = model(ids, doc_start=doc_starts([70, 1, 131])).hidden
    (grad,) = torch.autograd.grad(hidden[:, 71:].square().sum() + hidden[:, 71:, 0].sum(), model.embedding)
    assert not grad[:71].any() and grad[71:202].any()


@CONFIGS
def test_segments_equal_the_whole_row(config):
    model = make_model(config)
    ids, doc_start = torch.randint(0, 211, (2, 150)), torch.cat((doc_starts([40, 110]), doc_starts([120, 30])))
    whole = model(ids, doc_start=doc_start).hidden
    for size in (2, 8, 50, 149):  # segments shorter than the window too, and than the taps
        carry, parts = None, []
        for a in range(0, 150, size):
            out = model(ids[:, a : a + size], doc_start=doc_start[:, a : a + size] - a, carry=carry, return_carry=True)
            carry = out.carry
            parts.append(out.hidden)
        assert (torch.cat(parts, 1) - whole).abs().max() < 1e-11, size


@CONFIGS
@pytest.mark.parametrize("recompute", ["ffn", "layer"])
def test_recomputation_changes_no_bit(recompute, config):
    model = make_model(config, dtype=torch.float32)
    ids = torch.randint(0, 211, (1, 90))
    grads = []
    for choice in ("none", recompute):
        model.zero_grad()
        model(ids, recompute=choice).hidden.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_stream_stays_on_the_hypersphere():
    model = make_model(dtype=torch.float32)
    seen = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _module, _inputs, out: seen.append(out[0]))
    model(torch.randint(0, 211, (1, 40)))
    for x in seen:
        assert torch.allclose(x.norm(dim=-1), torch.full((1, 40), TINY.hypersphere_radius), atol=1e-3)


@pytest.mark.parametrize("name", ["nano", "small"])
def test_r7_first_loss(name):
    config = replace(preset(name).model, vocab_size=4096)
    model = HybridLanguageModel(config, PrecisionConfig(precision="fp32"))
    model.init_weights(1)
    ids = torch.randint(0, 4096, (1, 257))
    with torch.no_grad():
        hidden = model(ids[:, :-1]).hidden
        loss = fused_chunked_cross_entropy(
            hidden.flatten(0, 1), model.embedding, ids[0, 1:], logit_scale=config.logit_scale
        )
    rho = (1 + 1 / (2 * config.layers)) ** -config.layers
    expected = math.log(4096 * math.exp(128 / config.hidden_dim) + math.exp(16 * rho))
    assert abs(loss.item() - expected) < 0.2


def test_draft_head_detaches_the_backbone():
    model = make_model()
    ids = torch.randint(0, 211, (1, 20))
    hidden = model(ids).hidden
    drafts = model.draft_hidden(hidden, torch.stack((ids.roll(-1, 1), ids.roll(-2, 1))))
    assert [d.shape for d in drafts] == [hidden.shape] * 2
    sum(d.square().sum() + d[..., 0].sum() for d in drafts).backward()
    assert model.layers[0].operator.query.weight.grad is None
    assert all(p.grad is not None and p.grad.any() for p in model.draft.parameters())


@pytest.mark.parametrize("precision", ["fp8", "fp4"])
def test_narrow_precision_keeps_the_tail_and_gates_wide(precision):
    model = HybridLanguageModel(preset("small").model, PrecisionConfig(precision=precision))
    kinds = [layer.feed_forward.up.precision for layer in model.layers]
    assert kinds == [precision] * 7 + ["wide"] and model.draft.output[0].precision == "wide"


@CONFIGS
def test_an_edit_changes_nothing_before_it(config):
    model = make_model(config, dtype=torch.float32)
    ids = torch.randint(0, 211, (1, 90))
    with torch.no_grad():
        before = model(ids).hidden
        for t in (1, 40, 89):
            edited = ids.clone()
            edited[0, t] = (edited[0, t] + 1) % 211
            after = model(edited).hidden
            assert torch.equal(after[:, :t], before[:, :t]) and not torch.equal(after[:, t], before[:, t])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 2e-5), ("bf16", 4e-2)])
def test_gpu_backward_against_cpu_float64(precision, bound, width):
    # bf16: every activation of 8 branches is rounded to 8 bits; float32: same model, ieee products
    config = replace(TINY, conv_width=width, head_dim=32, hidden_dim=128, hypersphere_radius=11.314, ffn_dim=384)
    truth = make_model(config)
    model = HybridLanguageModel(config, PrecisionConfig(precision=precision)).cuda()
    model.load_state_dict({k: v.float() for k, v in truth.state_dict().items()})
    ids, targets = torch.randint(0, 211, (2, 257)), torch.randint(0, 211, (514,))
    doc_start = torch.cat((doc_starts([100, 157]), doc_starts([256, 1])))

    def run(m, device):
        hidden = m(ids.to(device), doc_start=doc_start.to(device)).hidden
        loss = fused_chunked_cross_entropy(
            hidden.flatten(0, 1), m.embedding, targets.to(device), logit_scale=config.logit_scale
        )
        loss.backward()
        return loss.item(), {n: p.grad.detach().cpu().double() for n, p in m.named_parameters() if p.grad is not None}

    loss64, grads64 = run(truth, "cpu")
    loss, grads = run(model, "cuda")
    assert abs(loss - loss64) < bound * loss64
    for name, truth_grad in grads64.items():
        ratio = rms(grads[name] - truth_grad) / rms(truth_grad)
        # the decay gate's gradient is a difference of large sums: its bf16 error is several times the others'
        limit = bound * (4 if "gate" in name or "offset" in name else 1)
        assert ratio < limit, f"{name}: {ratio:.2e}"
