"""attention_layers.py: the paged cache, and the same attention in training, prefill, decoding and tree verification."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention_layers import GroupedQueryAttentionBlock, PagedKeyValueCache, RotaryAngles, RotaryTable
from custom_kernels import cache_prefix
from hybrid_model import DraftTree
from model_config import ModelConfig, preset

TINY = replace(
    preset("nano").model, conv_width=0, hidden_dim=64, hypersphere_radius=8.0, num_query_heads=4, num_kv_heads=2,
    head_dim=32,
    sliding_window_size=128, anchor_tokens=8, max_context_len=1024, max_output_len=1024,
)  # fmt: skip
ROOT = DraftTree.from_parents([-1])


@pytest.fixture(autouse=True)
def _one_thread(_fixed_randomness: None) -> None:
    torch.set_num_threads(1)  # the tensors are tiny, waking a second thread takes longer than they do


class Harness:
    """One attention block with its rotary table, run over x (1, T, D) in every way that the program has."""

    def __init__(self, config: ModelConfig, bits: int) -> None:
        torch.manual_seed(1)
        self.block = GroupedQueryAttentionBlock(config)
        for parameter in self.block.parameters():
            torch.nn.init.normal_(parameter, 0, 0.2 if parameter.dim() == 2 else 0.0)
        self.table, self.config, self.bits = RotaryTable(config), config, bits

    def cache(self, batch: int = 1) -> PagedKeyValueCache:
        return PagedKeyValueCache(self.config, batch=batch, bits=self.bits, max_length=self.config.max_context_len)

    def angles(self, x: Tensor, start: int = 0) -> RotaryAngles:
        return self.table((start + torch.arange(x.shape[1])).expand(len(x), -1))

    @torch.no_grad()
    def train(self, x: Tensor) -> Tensor:
        return self.block(x, self.angles(x))[0]

    @torch.no_grad()
    def prefill(self, x: Tensor, cuts: list[int], cache: PagedKeyValueCache | None = None) -> Tensor:
        cache, out, at = cache or self.cache(len(x)), [], 0
        for tokens in [*cuts, x.shape[1] - sum(cuts)]:
            part = x[:, at : at + tokens]
            out.append(self.block.prefill(part, self.angles(part, at), cache, at))
            at += tokens
        return torch.cat(out, 1)

    @torch.no_grad()
    def decode(self, x: Tensor, nodes: int = 1) -> Tensor:
        """Step in chains of `nodes`, each committed whole."""
        cache, out = self.cache(len(x)), []
        for at in range(0, x.shape[1], nodes):
            part = x[:, at : at + nodes]
            n = part.shape[1]
            tree = DraftTree.from_parents(range(-1, n - 1))
            positions = (at + tree.depths).expand(len(x), -1)
            y, written = self.block.nodes(part, self.table(positions), cache, tree.mask, positions)
            self.block.commit(written, cache, torch.arange(n, dtype=torch.int32).expand(len(x), -1))
            out.append(y)
        return torch.cat(out, 1)


def test_b108_the_same_keys_are_visible_in_all_five_paths():
    # window of 4 with the query itself, and 2 anchors: which keys move a query's output when they change
    harness = Harness(replace(TINY, sliding_window_size=4, anchor_tokens=2), 16)
    x = torch.randn(1, 12, 64).repeat(13, 1, 1)
    x[range(12), range(12)] = torch.randn(12, 64)  # row j of the batch changes key j, row 12 none
    law = torch.tensor([[j <= i and (i - j < 4 or j < 2) for i in range(12)] for j in range(12)])
    for name, y in {
        "train": harness.train(x),
        "prefill": harness.prefill(x, []),
        "chunked prefill": harness.prefill(x, [5, 1, 3]),
        "decode": harness.decode(x),
        "three-token verify": harness.decode(x, nodes=3),
    }.items():
        moved = (y[:12] - y[12]).abs().amax(-1) > 1e-5  # (key j, query i)
        assert torch.equal(moved, law), f"{name}: keys are seen by queries\n{moved.int()}"


@pytest.mark.parametrize("bits, scope", [(16, "window"), (8, "window"), (4, "window"), (8, "full")])
def test_prefill_chunks_and_steps_read_the_same_numbers(bits: int, scope: str):
    # r15: past the window of 128, over seven pages; what is read quantised is a function of positions only. The paths
    # differ by the order of float32 sums alone: no rounding to 8 or 4 bits happens in between, x is given
    harness = Harness(replace(TINY, attention_scope=scope), bits)
    x = torch.randn(1, 330, 64)
    whole = harness.prefill(x, [])
    for name, got in {
        "chunks": harness.prefill(x, [1, 62, 64, 100, 7]),
        "steps": harness.decode(x),
        "chains of seven": harness.decode(x, nodes=7),
    }.items():
        # one key row in about 10^4 sits on a rounding edge, where float32 noise of the projection moves a code by one
        worst = (got - whole).abs().max().item() / whole.abs().max().item()
        assert worst < {16: 1e-5, 8: 2e-3, 4: 2e-2}[bits], f"{name}: off by {worst:.1e} of the largest output"
    error = (whole - harness.train(x)).abs().max() / whole.abs().max()
    assert error < {16: 1e-6, 8: 0.02, 4: 0.2}[bits], f"quantised attention is off by {error:.1e}"
    if bits != 16:
        assert torch.equal(whole[:, :128], harness.train(x)[:, :128]), "the first two pages must read no quantised key"
        assert error > {8: 1e-5, 4: 1e-3}[bits], "the pool must be read quantised somewhere"


def test_each_node_equals_the_step_at_the_end_of_its_path_bit_for_bit():
    harness = Harness(TINY, 8)
    x = torch.randn(1, 251, 64)
    cache = harness.cache()
    harness.prefill(x, [100], cache)
    parents = [-1, 0, 0, 1, 1, 2, 2]
    tree = DraftTree.from_parents(parents)
    nodes = torch.randn(1, 7, 64)
    with torch.no_grad():
        positions = 251 + tree.depths[None]
        y, written = harness.block.nodes(nodes, harness.table(positions), cache, tree.mask, positions)
        for path in ([0, 1, 4], [0, 2, 5], [0, 2], [0]):
            plain, verified = cache.copy(), cache.copy()
            for node in path:
                at = plain.pages.length.long()[None]
                step, one = harness.block.nodes(nodes[:, node, None], harness.table(at), plain, ROOT.mask, at)
                harness.block.commit(one, plain, torch.zeros(1, 1, dtype=torch.int32))
                assert torch.equal(step[:, 0], y[:, node]), f"node {node} of path {path}"
            padded = torch.tensor([path + [-1] * (3 - len(path))], dtype=torch.int32)
            harness.block.commit(written, verified, padded)
            for name, value in plain.tensors().items():
                assert torch.equal(value, verified.tensors()[name]), f"{name} after path {path}"


@pytest.mark.parametrize("scope", ["window", "full"])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_stored_tensors_do_not_depend_on_the_cuts(bits: int, scope: str):
    config = replace(TINY, attention_scope=scope)
    k, v, raw = torch.randn(3, 1, 700, 2, 32).unbind(0)
    whole = PagedKeyValueCache(config, bits=bits)
    whole.append(k, v, raw)
    for cuts in ([1] * 80 + [300, 320], [64, 128, 192, 316], [513, 187]):
        cache, at = PagedKeyValueCache(config, bits=bits), 0
        for tokens in cuts:
            cache.append(*(t[:, at : at + tokens] for t in (k, v, raw)))
            at += tokens
        for name, value in whole.tensors().items():
            assert torch.equal(value, cache.tensors()[name]), f"{name} differs for cuts {cuts[-2:]}"


@pytest.mark.parametrize("bits", [8, 4])
def test_b115_constant_and_tiny_channels_reconstruct_within_half_a_step(bits: int):
    k = torch.randn(1, 256, 2, 32)
    k[..., 5] = 3.0
    k[..., 7] = torch.rand(1, 256, 2) * 1e-6
    k[:, 100:, 1] = 0.0
    v = torch.full((1, 256, 2, 32), 3.0)
    cache = PagedKeyValueCache(TINY, bits=bits)
    cache.append(k, v, k)
    assert cache.pages.key_scale.isfinite().all() and cache.pages.value_scale.isfinite().all()
    got_k, got_v = cache_prefix(cache.pages, 128)[2:]
    assert torch.equal(got_v, v[:, -128:]) or (got_v - v[:, -128:]).abs().max() < 1e-6, "a constant row must be exact"
    assert torch.equal(got_k[:, :, 1], torch.zeros_like(got_k[:, :, 1])), "a zero row must be exact"
    step = 2 * k[:, -128:].abs().amax(-1, keepdim=True) / {8: 254, 4: 14}[bits]
    # at 4 bit the steps are those of the rotated row: up to sqrt(32) times the largest channel over 32 channels
    bound = step / 2 * {8: 1.001, 4: 32**0.5}[bits]
    assert ((got_k - k[:, -128:]).abs() <= bound).all()


@pytest.mark.parametrize("scope", ["window", "full"])
def test_anchors_are_never_quantised_and_the_newest_pages_are_exact(scope: str):
    k, v, raw = torch.randn(3, 1, 126, 2, 32).unbind(0)
    cache = PagedKeyValueCache(replace(TINY, attention_scope=scope), bits=4)
    cache.append(k, v, raw)
    got_k, got_v, _, _ = cache.prefix(126)
    assert torch.equal(got_k, k) and torch.equal(got_v, v), "three pages are held in the compute type"
    assert torch.equal(cache.pages.anchor_k, raw[:, :8]) and torch.equal(cache.pages.anchor_v, v[:, :8])
    later = torch.randn(3, 1, 130, 2, 32).unbind(0)
    cache.append(*later)
    assert torch.equal(cache.pages.anchor_k, raw[:, :8]), "later tokens must leave the anchors alone"


def test_reset_leaves_no_byte_of_the_sequence():
    cache = PagedKeyValueCache(TINY, bits=8)
    fresh = {name: value.clone() for name, value in cache.tensors().items()}
    cache.append(*torch.randn(3, 1, 300, 2, 32).unbind(0))
    table = cache.pages.page_table.data_ptr()
    for value in cache.tensors().values():
        if value.is_floating_point():
            value.fill_(float("nan"))
    cache.reset()
    assert cache.pages.page_table.data_ptr() == table, "reset must keep addresses"
    for name, value in cache.tensors().items():
        assert torch.equal(value, fresh[name]), name


def test_copy_is_independent():
    cache = PagedKeyValueCache(TINY, bits=8)
    cache.append(*torch.randn(3, 1, 30, 2, 32).unbind(0))
    twin = cache.copy()
    cache.reset()
    assert int(twin.pages.length[0]) == 30 and twin.pages.recent_k.abs().sum() > 0


def test_pool_is_bounded_by_the_window():
    sizes = {bits: PagedKeyValueCache(TINY, bits=bits).nbytes for bits in (16, 8, 4)}
    assert sizes[4] < sizes[8] < sizes[16]
    pages = PagedKeyValueCache(TINY, bits=8).pages
    assert pages.page_table.shape == (1, 128 // 64 + 2), "the ring holds the window and two pages"
    full = PagedKeyValueCache(replace(TINY, attention_scope="full"), bits=8, max_length=640).pages
    assert full.page_table.shape == (1, 10), "scope full holds every position"


def test_b029_rotary_angles_are_exact_at_every_position():
    config = preset("full").model
    table, positions = RotaryTable(config), torch.tensor([[0, 1, 2047, 131071, 1048575]])
    angles = table(positions)
    frequency = 5e6 ** (-torch.arange(64, dtype=torch.float64) / 64)
    truth = positions[0, :, None].double() * frequency
    assert (angles.cos[0] - truth.cos()).abs().max() < 3e-7 and (angles.sin[0] - truth.sin()).abs().max() < 3e-7
    # for comparison: the plain float32 product is off by several hundredths there
    assert ((positions[0, :, None].float() * frequency.float()).cos() - truth.cos()).abs().max() > 1e-2


def test_r12_scope_does_not_change_the_wavelengths_of_trained_weights():
    window = preset("nano").model
    full = replace(window, attention_scope="full")
    assert window.rope_scaling == 1.0 and full.rope_scaling == 131072 / (16 * 128)
    kept = replace(full, rope_stretch=window.rope_scaling)
    positions = torch.arange(100)[None]
    assert torch.equal(RotaryTable(kept)(positions).cos, RotaryTable(window)(positions).cos)
    assert not torch.equal(RotaryTable(full)(positions).cos, RotaryTable(window)(positions).cos)
