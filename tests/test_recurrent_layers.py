"""recurrent_layers.py: one function of the input at any split, gates in 32 bit, the decay spectrum."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from reference import causal_convolution_reference

from model_config import ModelConfig, preset
from recurrent_layers import GatedDeltaRuleMatrixMemoryBlock, MemoryState, earlier_tokens, half_life_biases

CONFIG = replace(preset("nano").model, conv_width=0, hidden_dim=48, hypersphere_radius=6.928, recurrent_heads=3,
                 recurrent_key_dim=16, recurrent_value_dim=32)  # fmt: skip
WIDTHS = pytest.mark.parametrize("width", [0, 2, 4], ids=["plain", "two-taps", "four-taps"])


def make_block(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float64) -> GatedDeltaRuleMatrixMemoryBlock:
    block = GatedDeltaRuleMatrixMemoryBlock(config)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            scale = 0.1 if "gate" in name or "offset" in name else parameter.shape[-1] ** -0.5
            parameter.normal_(0, 0.5 if name == "taps" else scale)
    return block.to(dtype)


def make_convolved(width: int, dtype: torch.dtype = torch.float64) -> GatedDeltaRuleMatrixMemoryBlock:
    return make_block(replace(CONFIG, conv_width=width), dtype)


def test_r5_half_lives_span_1_to_a_million():
    decay = torch.exp(-torch.nn.functional.softplus(half_life_biases(28).double()))
    half_lives = torch.log(torch.tensor(0.5, dtype=torch.float64)) / torch.log(decay)
    assert half_lives[0].item() == pytest.approx(1, rel=1e-4)
    assert half_lives[-1].item() == pytest.approx(1048576, rel=1e-2)
    ratios = half_lives[1:] / half_lives[:-1]
    assert (ratios / ratios.mean() - 1).abs().max() < 2e-2  # log-spaced


@WIDTHS
def test_any_split_gives_the_same_outputs_state_and_gradients(width):
    block = make_convolved(width)
    x = torch.randn(2, 150, 48, dtype=torch.float64, requires_grad=True)
    doc_start = torch.zeros(2, 150, dtype=torch.int32)
    doc_start[0, 70:], doc_start[1, 149:] = 70, 149
    probe = torch.randn(2, 150, 48, dtype=torch.float64)
    inputs = [x, *([block.taps] if width else [])]

    def objective(y, memory):
        return (y * probe).sum() + sum(part.square().sum() for part in memory)

    whole, memory = block(x, doc_start=doc_start)
    whole_grads = torch.autograd.grad(objective(whole, memory), inputs)
    for cuts in ([1], [64], [70], [71], [149], [3, 64, 130], [1, 2, 3, 69, 70, 71, 72, 147, 148, 149]):
        edges = [0, *cuts, 150]
        carried, parts = None, []
        for a, b in pairwise(edges):
            y, carried = block(x[:, a:b], memory=carried, doc_start=doc_start[:, a:b] - a)
            parts.append(y)
        split = torch.cat(parts, 1)
        pairs = [(split, whole), *zip(carried, memory, strict=True)]
        assert all(torch.allclose(got, want, atol=1e-11) for got, want in pairs), cuts
        grads = torch.autograd.grad(objective(split, carried), inputs)
        assert all(torch.allclose(g, w, atol=1e-10) for g, w in zip(grads, whole_grads, strict=True)), cuts


@WIDTHS
def test_chunked_forward_equals_single_steps(width):
    block = make_convolved(width, torch.float32)
    x = torch.randn(2, 67, 48)
    with torch.no_grad():
        y, memory = block(x)
        running = block.empty(2, torch.float32, "cpu")
        steps = []
        for t in range(67):
            running, out = block.step(x[:, t : t + 1], running)
            steps.append(out)
    assert memory.state.dtype == torch.float32
    assert torch.allclose(torch.cat(steps, 1), y, atol=2e-5)
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(running, memory, strict=True))
    assert memory.tail.shape == running.tail.shape == (2, max(0, width - 1), 3 * 64 if width else 0)


@WIDTHS
def test_b125_first_node_does_not_depend_on_later_nodes(width):
    block = make_convolved(width, torch.float32)
    x = torch.randn(1, 7, 48)
    with torch.no_grad():
        _, memory = block(torch.randn(1, 20, 48))
        alone, _ = block.nodes(x[:, :1], memory)
        for n in (2, 3, 7):
            together, _ = block.nodes(x[:, :n], memory)
            assert torch.equal(together[:, :1], alone), n


@WIDTHS
@pytest.mark.parametrize("committed", [0, 1, 2, 20])  # fewer tokens than the taps reach back, and enough
def test_b091_commit_of_a_path_equals_plain_steps_bit_for_bit(width, committed):
    block = make_convolved(width, torch.float32)
    x = torch.randn(2, 4, 48)
    parents = torch.tensor([-1, 0, 0, 2], dtype=torch.int32)
    with torch.no_grad():
        start = block.empty(2, torch.float32, "cpu")
        if committed:
            start.assign(block(torch.randn(2, committed, 48))[1])
        y, written = block.nodes(x, start, parents)
        for path in ([0], [0, 2], [0, 1], [0, 2, 3]):
            drafted, plain = start.copy(), start.copy()
            # the other row commits the root alone
            padded = torch.tensor([path + [-1] * (3 - len(path)), [0, -1, -1]], dtype=torch.int32)
            block.commit(written, drafted, padded)
            for n in path:
                plain, out = block.step(x[:, n : n + 1], plain)
                assert torch.equal(out, y[:, n : n + 1]), path
                if n == 0:
                    root = plain.copy()
            for name, got in drafted.tensors().items():
                assert torch.equal(got[0], plain.tensors()[name][0]), f"{name}, {path}"
                assert torch.equal(got[1], root.tensors()[name][1]), f"{name}, root"


def test_earlier_tokens_follow_the_path_and_then_the_committed_text():
    parents = torch.tensor([-1, 0, 0, 2, 3, -1], dtype=torch.int32)
    expected = [[-1, -2, -3], [0, -1, -2], [0, -1, -2], [2, 0, -1], [3, 2, 0], [-1, -2, -3]]
    assert earlier_tokens(parents).tolist() == expected


def test_a_layer_without_taps_carries_no_tail():
    block = make_block(dtype=torch.float32)
    memory = block(torch.randn(1, 5, 48))[1]
    assert block.taps is None and memory.tail.numel() == 0 and list(memory.tensors()) == ["memory"]
    convolved = make_convolved(4, torch.float32)
    memory = convolved.empty(3, torch.float32, "cpu")
    assert memory.nbytes == replace(CONFIG, conv_width=4, layers=4).state_bytes(3) // 3
    assert isinstance(memory.copy(), MemoryState) and list(memory.tensors()) == ["memory", "tail"]


def test_gates_are_32_bit_under_bf16():
    block = make_block(dtype=torch.float32)
    x = torch.randn(1, 4, 48).bfloat16()
    alpha, beta, log_gamma = block._gates(block._gate_logits(x))
    assert alpha.dtype == beta.dtype == log_gamma.dtype == torch.float32
    assert not torch.equal(beta, beta.bfloat16().float())


def test_state_norm_does_not_grow_where_nothing_is_written():
    # decay <= 1 and unit keys: the transition gamma I - beta k k^T has norm <= 1, whatever the input
    block = make_block(dtype=torch.float32)
    with torch.no_grad():
        _, memory = block(torch.randn(1, 64, 48))
        block.value.weight.zero_()
        for _ in range(64):
            before = memory.state.norm(dim=(2, 3))
            memory, _ = block.step(10 * torch.randn(1, 1, 48), memory)
            assert (memory.state.norm(dim=(2, 3)) <= before * (1 + 1e-6)).all()


@WIDTHS
def test_r3_write_gate_scales_what_is_written_and_r4_unit_keys(width):
    """The layer against its law written out: v = alpha W_v x, unit q and k, y as the memory gives it.

    With taps, q, k and v are silu(W x_t + sum_j taps_j W x_{t-j}), before unit length and before alpha.
    """
    block = make_convolved(width)
    x = torch.randn(1, 20, 48, dtype=torch.float64)
    out, (state, tail) = block(x)
    alpha = torch.sigmoid(x[0] @ block.write_gate.T + 2.0 + block.write_offset)
    beta = torch.sigmoid(x[0] @ block.erase_gate.T + block.erase_offset)
    decay = x[0] @ block.decay_gate.T + block.decay_bias + block.decay_offset
    gamma = torch.exp(-torch.nn.functional.softplus(decay))
    q, k, v = (x[0] @ p.weight.T for p in (block.query, block.key, block.value))
    if width:
        joined = torch.cat((q, k, v), -1)
        assert torch.allclose(tail[0], joined[1 - width :])
        q, k, v = causal_convolution_reference(joined[None], block.taps)[0].split((48, 48, 96), -1)
    q, k = (torch.nn.functional.normalize(t.unflatten(-1, (3, 16)), dim=-1) for t in (q, k))
    v = v.unflatten(-1, (3, 32)) * alpha[..., None]
    s, rows = torch.zeros(3, 32, 16, dtype=torch.float64), []
    for t in range(20):
        residual = v[t] - torch.einsum("hvk,hk->hv", s, k[t])
        s = gamma[t][:, None, None] * s + beta[t][:, None, None] * torch.einsum("hv,hk->hvk", residual, k[t])
        rows.append(torch.einsum("hvk,hk->hv", s, q[t]).flatten())
    expected = torch.stack(rows) @ block.output.weight.T
    # l2 normalisation adds 1e-6 under the root
    assert torch.allclose(out[0], expected, atol=1e-5) and torch.allclose(state[0], s.mT, atol=1e-5)
