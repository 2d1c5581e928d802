"""Every kernel at the full model's shapes: checked, timed, against the machine's measured roofs and installed peers.

    python main.py bench                          # every row; a GPU takes a few minutes, a CPU runs small shapes
    python main.py bench --only scan step --quick --out bench.json
    python main.py bench --peers                  # also peers whose first call searches for minutes
    python main.py verify                         # the tests of the kernels on this machine, pass or FAIL per kernel

A row is one kernel at one shape: inputs, own call, check, peers, bytes, operations, targets (class Row, class Case).
Nothing is timed before its check has passed: outputs and every gradient against float64, by the rule of helpers.py (RMS
error under the type's bound, worst element at most twice as far off as the same computation in the row's own type).
Where that computation does not fit at full size, blocks of 1,024 elements stand for the worst element (at most four
times the bound). A row that fails prints FAILED and no time, and the exit code is 1.

Times are medians of CUDA events after warm-up, with the L2 cache overwritten before each; short calls are recorded as
one graph over rotated inputs that do not fit in the cache, own and peer alike. A roof is the larger of bytes (each
input read once, each output written once) over the measured copy rate and operations over the measured matrix rate.
First call: seconds of the first own call of the row, compilation included, with an empty compiler cache; kernels that
an earlier row compiled are not compiled again. Peak: device memory above the inputs; beyond: less what is returned.

Operations are counted plainly: no symmetry in orthogonalisation, so its share of the roof may exceed 1. The delta rule
counts blocks of 64 tokens. Attention counts visible pairs, its backward 2.5 forwards. Peers compute the decay-first
rule on the same tensors. `documents` rows hold five documents of uneven length.
"""

import ast
import functools
import inspect
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import reference  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from helpers import RMS_BOUND  # noqa: E402
from torch import Tensor  # noqa: E402

import custom_kernels  # noqa: E402
from model_config import preset, suggest_name  # noqa: E402

FIRST_CALL_SECONDS = 20.0
KERNEL_TESTS = "tests/test_custom_kernels_*.py"
Call = Callable[..., object]


# ---------------------------------------------------------------------------
# Rows


@dataclass(frozen=True)
class Target:
    """What a row must reach (level "must" or "moonshot"). At least: kinds peer, copy, matrix, rate, throughput.

    peer        peer time / own time                    copy, matrix   share of the measured rate
    rate        own operations a second / the peer's    throughput     own units a second / those of row `name`
    At most: time (own / row `name`), memory (MB beyond inputs and outputs), peer memory and peer error (own / the
    peer's), first call (seconds).
    """

    level: str
    kind: str
    need: float
    name: str = ""

    @property
    def at_most(self) -> bool:
        return self.kind in ("time", "memory", "peer memory", "peer error", "first call")


class Peer(NamedTuple):
    """Another implementation: make() imports it and returns a call that takes the row's inputs."""

    name: str
    make: Callable[[], Call]
    slow: bool = False  # its first call takes minutes: run under --peers only
    operations: float | None = None  # where it does other work than the row
    on_cpu: bool = True


class Comparison(NamedTuple):
    """A result, its float64 truth, and the same computation in the result's type where it can be had."""

    name: str
    got: Tensor
    truth: Tensor
    low: Tensor | None = None
    bound: float | None = None  # of the RMS error ratio; None: the type's
    counted: bool = True  # in the row's error; not where the truth is only approached


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one shape with its tensors; own and peers take one tuple of inputs."""

    inputs: list[tuple]
    own: Call
    check: Callable[[], Iterator[Comparison]]
    bytes: float
    operations: float = 0.0
    unit: str = "matrix"  # which matrix rate bounds it
    units: int = 1  # tokens, for throughput
    peers: tuple[Peer, ...] = ()
    graph: bool = False
    error: Callable[[object], float] | None = None  # of an output to what it approximates


@dataclass(frozen=True, kw_only=True)
class Row:
    """A kernel and a shape; `build` draws the inputs; `seconds` is what the row takes on one H200, for the estimate."""

    kernel: str
    shape: str
    build: Callable[[], Case]
    targets: tuple[Target, ...] = ()
    seconds: float = 4.0

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape}"


@dataclass(kw_only=True)
class Result:
    """What a row measured: milliseconds, bytes, seconds; None where it was not."""

    kernel: str
    shape: str
    error: float | None = None  # largest RMS error ratio of its outputs and gradients
    failed: str | None = None
    skipped: str | None = None
    ms: float | None = None
    timing: str = ""
    roof: str = ""
    roof_ms: float | None = None
    bytes: float = 0.0
    operations: float = 0.0
    units: int = 1
    peak_bytes: int | None = None
    beyond_bytes: int | None = None
    first_call_s: float | None = None
    approximation_error: float | None = None
    peers: dict[str, dict] = field(default_factory=dict)
    targets: list[dict] = field(default_factory=list)
    resources: list[dict] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape}"

    @property
    def roof_share(self) -> float | None:
        """Share of the roof that was reached."""
        return None if self.ms is None else self.roof_ms / self.ms


class Machine:
    """The device, its measured rates, and the sizes and types that rows are drawn in."""

    def __init__(self, device: str, *, quick: bool, slow_peers: bool = False) -> None:
        self.device, self.quick, self.slow_peers = torch.device(device), quick, slow_peers
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.cache_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size if self.cuda else 0
        # written before each timed call, in about as long as the launches of a call take to queue up
        scrubbed = max(4 * self.cache_bytes, 1 << 28) if self.cuda else 0
        self._scrub = torch.empty(scrubbed, dtype=torch.uint8, device=device)
        self.rates: dict[str, float] = {}  # bytes or operations a millisecond

    def pick(self, full, small):
        """Return the full model's size on a GPU, the small one on a CPU."""
        return full if self.cuda else small

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(dtype or self.dtype)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device)

    def sets(self, draw: Callable[[], tuple], read_bytes: float) -> list[tuple]:
        """Draw so many sets of inputs that one round of them does not fit three times in the cache."""
        count = max(4, math.ceil(3 * self.cache_bytes / read_bytes)) if self.cuda else 1
        return [draw() for _ in range(count)]

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def measure_rates(self) -> None:
        """Measure copy and matrix rates, random data."""
        count, side = self.pick(2**30, 2**22), self.pick(8192, 256)
        source = torch.randn(count, device=self.device)
        copied = 2 * source.nbytes
        self.rates["copy"] = copied / self.time(torch.empty_like(source).copy_, [(source,)])[0]
        a, b = self.randn(side, side), self.randn(side, side)
        self.rates["matrix"] = 2 * side**3 / self.time(torch.matmul, [(a, b)])[0]
        if self.cuda and torch.cuda.get_device_capability(self.device) >= (8, 9):
            one = torch.ones((), device=self.device)
            eight = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T, one, one
            try:
                call = functools.partial(torch._scaled_mm, out_dtype=torch.bfloat16)
                self.rates["matrix fp8"] = 2 * side**3 / self.time(call, [eight])[0]
            except RuntimeError as error:  # no such product in this library: the 16-bit rate is the roof
                print(f"8-bit rate not measured: {_line(error)}", file=sys.stderr)

    def time(self, call: Call, inputs: list[tuple], *, graph: bool = False) -> tuple[float, str]:
        """Median milliseconds of one call, and how it was timed."""
        if not self.cuda:
            return self._time_host(call, inputs), "host clock"
        if graph:
            try:
                return self._time_graph(call, inputs), "graph"
            except RuntimeError as error:  # what cannot be recorded is timed launch by launch, and the table says so
                torch.cuda.synchronize(self.device)
                print(f"not recorded as a graph: {_line(error)}", file=sys.stderr)
        return self._time_events(lambda i: call(*inputs[i % len(inputs)])), "events"

    def _time_host(self, call: Call, inputs: list[tuple]) -> float:
        call(*inputs[0])
        times = []
        for _ in range(3 if self.quick else 10):
            begin = time.perf_counter()
            call(*inputs[0])
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)

    def _time_graph(self, call: Call, inputs: list[tuple]) -> float:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                call(*inputs[0])
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for arguments in inputs:
                call(*arguments)
        return self._time_events(lambda _: graph.replay()) / len(inputs)

    def _time_events(self, call: Callable[[int], object]) -> float:
        """Warm up, then at most 0.25 s of calls, each behind an overwritten cache."""
        begin = time.perf_counter()
        call(0)
        self.synchronize()
        estimate = time.perf_counter() - begin
        limit = (3, 10) if self.quick else (5, 100)
        count = max(1 if estimate > 1 else limit[0], min(limit[1], int(0.25 / max(estimate, 1e-6))))
        for i in range(min(count, 10)):
            call(i)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for i, (start, end) in enumerate(events):
            self._scrub.zero_()
            start.record()
            call(i)
            end.record()
        self.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events)

    def memory(self, call: Call, arguments: tuple) -> tuple[int | None, int | None]:
        """Bytes above what was allocated before the call at its peak: in all, and without what it returns."""
        if not self.cuda:
            return None, None
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        out = call(*arguments)
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        kept = max(0, torch.cuda.memory_allocated(self.device) - before)
        del out
        return peak, peak - kept


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:240]


def _gradient_call(op: Call, count: int) -> Call:
    """Output and gradients of op: its first `count` inputs have one, the last is the incoming gradient."""

    def call(*arguments):
        leaves = [x.detach().requires_grad_() for x in arguments[:count]]
        y = op(*leaves, *arguments[count:-1])
        return y.detach(), *torch.autograd.grad(y, leaves, arguments[-1])

    return call


def _without_gradient(op: Call) -> Call:
    """Forward alone; what the row's inputs hold beyond op's own arguments is cut by op."""

    def call(*arguments):
        with torch.no_grad():
            return op(*arguments)

    return call


def _compiled(op: Call) -> Call:
    return torch.compile(op, dynamic=False)


def _widen(arguments: tuple, dtype: torch.dtype) -> tuple:
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)


def _against_reference(names: str, own: Call, plain: Call, arguments: tuple) -> Iterator[Comparison]:
    """Outputs of own against those of plain in float64, and in the inputs' type."""
    got, truth, low = own(*arguments), plain(*_widen(arguments, torch.float64)), plain(*arguments)
    for name, *results in zip(names.split(), *map(_tuple, (got, truth, low)), strict=True):
        yield Comparison(name, *results)


def _tuple(x: object) -> tuple:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


# ---------------------------------------------------------------------------
# Delta rule: scan and decoding step


def _scan_inputs(m: Machine, B: int, T: int, H: int, K: int) -> tuple:
    q, k = (F.normalize(m.randn(B, T, H, K, dtype=torch.float32), dim=-1).to(m.dtype) for _ in range(2))
    # half-lives from 8 to 1,048,576 tokens over the heads, as the model starts
    half_life = 2.0 ** torch.linspace(3, 20, H, device=m.device)
    log_gamma = -math.log(2) / half_life * (0.5 + m.rand(B, T, H))
    return q, k, m.randn(B, T, H, K), m.rand(B, T, H), log_gamma


def _scan(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gamma: Tensor) -> Tensor:
    return custom_kernels.chunk_associative_scan(q, k, v, beta, log_gamma)[0]


def _scan_truth(arguments: tuple, heads: list[int], segment: int) -> tuple[Tensor, Tensor]:
    """Output and final state of some heads in float64 by the CPU path, one segment of tokens after another."""
    parts = [x[:, :, heads].cpu().double() for x in arguments[:5]]
    state, outputs = None, []
    for begin in range(0, parts[0].shape[1], segment):
        cut = (x[:, begin : begin + segment] for x in parts)
        y, state = custom_kernels.chunk_associative_scan(*cut, initial_state=state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


_SCAN_NAMES = ("y", "dq", "dk", "dv", "dbeta", "dlog_gamma")


def _scan_check(m: Machine, arguments: tuple, backward: bool) -> Iterator[Comparison]:
    """The last head at full size against the chunked float64 form; that, and the kernel, against the token loop.

    The last head forgets slowest, the loop's two fastest; few tokens leave time for the first one at full size. Heads
    are compared one by one: one that never forgets is larger than one that does. Sums of bf16 products are held to one
    bound whatever the type that holds them; log decay's is a difference of such sums (as in the tests).
    """

    def bound(name: str) -> float | None:
        return {"dlog_gamma": 1e-2}.get(name, 5e-3) if m.cuda else None

    _, T, H, _ = arguments[0].shape
    heads = [0, H - 1] if T < 1024 else [H - 1]  # 65,536 tokens of one head take a CPU seconds
    kernel = _gradient_call(_scan, 5)
    if backward:
        truth = kernel(*[x[:, :, heads].cpu().double() for x in arguments])
        got = [x[:, :, heads].cpu() for x in kernel(*arguments)]
    else:
        y, final = _without_gradient(custom_kernels.chunk_associative_scan)(*arguments[:5])
        got = y[:, :, heads].cpu(), final[:, heads].cpu()
        with torch.no_grad():
            truth = _scan_truth(arguments, heads, 65_536)
    for name, a, b in zip(_SCAN_NAMES if backward else ("y", "final state"), got, truth, strict=True):
        dim = 1 if name == "final state" else 2
        for i, head in enumerate(heads):
            yield Comparison(f"{name}, head {head}", a.select(dim, i), b.select(dim, i), bound=bound(name))
    yield from _scan_loop_check(m, arguments, bound)


def _scan_loop_check(m: Machine, arguments: tuple, bound: Callable[[str], float | None]) -> Iterator[Comparison]:
    small = [x[:1, :257, :2] for x in arguments[:5]]
    small.append(m.randn(1, small[0].shape[1], 2, small[0].shape[3]))
    kernel, plain = _gradient_call(_scan, 5), _gradient_call(lambda *x: reference.scan_reference(*x)[0], 5)
    host = [x.cpu() for x in small]
    wide = _widen(tuple(host), torch.float64)
    runs = kernel(*small), plain(*wide), plain(*host), kernel(*wide)
    for name, got, truth, low, chunked in zip(_SCAN_NAMES, *runs, strict=True):
        yield Comparison(f"{name} at 257 tokens", got.cpu(), truth, low, bound(name))
        yield Comparison(f"{name} at 257 tokens, float64 form", chunked, truth, None, 1e-11)


def _fla_scan(backward: bool) -> Call:
    os.environ["FLA_FLASH_QLA"] = "0"  # it would hand the work to FlashQLA, which has its own column
    import fla.ops.common.chunk_o as chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    chunk_o.IS_NVIDIA_HOPPER = False  # timing only: with some compilers its gated backward is wrong here, so it refuses

    def op(q, k, v, beta, g):
        return chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)[0]

    return _gradient_call(op, 5) if backward else _without_gradient(lambda *a: op(*a[:5]))


def _flash_qla_scan(backward: bool) -> Call:
    from flash_qla import chunk_gated_delta_rule

    def op(q, k, v, beta, g):
        return chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)[0]

    return _gradient_call(op, 5) if backward else _without_gradient(lambda *a: op(*a[:5]))


def _scan_case(m: Machine, B: int, T: int, H: int, K: int, backward: bool) -> Case:
    arguments = (*_scan_inputs(m, B, T, H, K), m.randn(B, T, H, K))
    tokens, tensor, gates = B * T, arguments[0].nbytes, arguments[3].nbytes
    operations = tokens * H * (6 * K * K + 8 * 64 * K)
    forward = _without_gradient(lambda *a: custom_kernels.chunk_associative_scan(*a[:5]))
    return Case(
        inputs=[arguments],
        own=_gradient_call(_scan, 5) if backward else forward,
        check=lambda: _scan_check(m, arguments, backward),
        # forward reads q, k, v and writes y; backward reads them and dy and writes three gradients
        bytes=(11 * tensor + 6 * gates) if backward else (4 * tensor + 2 * gates),
        operations=operations * (4 if backward else 1),
        units=tokens,
        peers=(
            Peer("fla", lambda: _fla_scan(backward), slow=True, on_cpu=False),
            Peer("FlashQLA", lambda: _flash_qla_scan(backward), slow=True, on_cpu=False),
        ),
    )


def scan_rows(m: Machine) -> Iterator[Row]:
    H, K = m.pick((28, 128), (2, 16))
    for backward in (False, True):
        for B, T in m.pick(((4, 8192), (1, 65536)), ((2, 260), (1, 300))):
            form = "forward + backward" if backward else "forward"
            must = Target("must", "peer", 1.4 if backward else 1.5, "fla")
            targets = [must, Target("moonshot", "peer", 1.0, "FlashQLA")]
            if backward and B == 1:
                targets.append(Target("must", "peer memory", 1.0, "fla"))
            yield Row(
                kernel="scan", shape=f"{B}x{T:,} {form}", targets=tuple(targets), seconds=10,
                build=lambda B=B, T=T, backward=backward: _scan_case(m, B, T, H, K, backward),
            )  # fmt: skip
    base = "scan {}x{:,} forward".format(*m.pick((4, 8192), (2, 260)))
    T = m.pick(1048576, 1000)
    yield Row(
        kernel="scan", shape=f"1x{T:,} forward", seconds=25, build=lambda: _scan_case(m, 1, T, H, K, False),
        targets=(Target("must", "throughput", 0.9, base), Target("moonshot", "throughput", 1.0, base)),
    )  # fmt: skip


def _step(q, k, v, beta, log_gamma, state, parents, path) -> Tensor:
    y = custom_kernels.delta_rule_step(q, k, v, beta, log_gamma, state, parents=parents)
    custom_kernels.delta_rule_commit(k, v, beta, log_gamma, state, path)
    return y


def _step_check(arguments: tuple) -> Iterator[Comparison]:
    *tensors, state, parents, path = arguments
    after = state.clone()
    y = _step(*tensors, after, parents, path)
    host, order = [x.cpu() for x in tensors], parents.tolist()
    truth, low = (
        (
            reference.delta_rule_step_reference(*_widen(tuple(host), dtype), state.cpu().to(dtype), parents=order),
            reference.delta_rule_commit_reference(*_widen(tuple(host[1:]), dtype), state.cpu().to(dtype), path.cpu()),
        )
        for dtype in (torch.float64, tensors[0].dtype)
    )
    yield Comparison("y", y.cpu(), truth[0], low[0].to(y.dtype))
    yield Comparison("state", after.cpu(), truth[1], low[1].float())


def _fla_step() -> Call:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def call(q, k, v, beta, g, state, parents, path):
        one = (x[:, :1] for x in (q, k, v, g))
        return fused_recurrent_gated_delta_rule(*one, beta=beta[:, :1], initial_state=state, output_final_state=True)

    return _without_gradient(call)


def _step_case(m: Machine, nodes: int, H: int, K: int) -> Case:
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 2][:nodes], dtype=torch.int32, device=m.device)
    path = torch.tensor([[n if n < nodes else -1 for n in (0, 1, 3)]], dtype=torch.int32, device=m.device)
    state_bytes = 4 * H * K * K

    def draw() -> tuple:
        return *_scan_inputs(m, 1, nodes, H, K), m.randn(1, H, K, K, dtype=torch.float32), parents, path

    inputs = m.sets(draw, state_bytes)
    return Case(
        inputs=inputs, own=_step, check=lambda: _step_check(inputs[0]), graph=True,
        # the state read once and written once; q, k, v, y of every node
        bytes=2 * state_bytes + 4 * inputs[0][0].nbytes,
        peers=(Peer("fla, one node", _fla_step, on_cpu=False),),
    )  # fmt: skip


def step_rows(m: Machine) -> Iterator[Row]:
    H, K = m.pick((28, 128), (2, 16))
    for nodes in range(1, 8):
        targets = [Target("must", "peer", 1.0, "fla, one node"), Target("moonshot", "copy", 0.8)]
        if nodes > 1:
            targets.insert(0, Target("must", "time", 1.05, "step 1 node"))
        shape = "1 node" if nodes == 1 else f"{nodes} nodes"
        yield Row(
            kernel="step", shape=shape, targets=tuple(targets), build=lambda nodes=nodes: _step_case(m, nodes, H, K),
            seconds=1.5,
        )  # fmt: skip


# ---------------------------------------------------------------------------
# Linear cross entropy


def _cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return custom_kernels.fused_chunked_cross_entropy(hidden, weight, targets)


def _loss_call(op: Call) -> Call:
    """Loss and both gradients of op(hidden, weight, targets)."""

    def call(hidden, weight, targets):
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = op(*leaves, targets)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    return call


def _plain_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.to(hidden.dtype).T).float(), targets)


def _cross_entropy_blocks(hidden, weight, targets, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients from all logits, 1,024 rows at a time, in dtype; sums over blocks are float32 at least."""
    w = weight.to(dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    loss, dweight, dhidden = 0.0, torch.zeros_like(w, dtype=wide), []
    for begin in range(0, len(hidden), 1024):
        h = hidden[begin : begin + 1024].to(dtype).requires_grad_()
        part, _ = reference.fused_chunked_cross_entropy_reference(
            h, w, targets[begin : begin + 1024], denominator=float(len(hidden))
        )
        dh, dw = torch.autograd.grad(part, (h, w))
        loss, dweight = loss + part.detach().to(wide), dweight.add_(dw)
        dhidden.append(dh)
    return loss, torch.cat(dhidden), dweight


def _cross_entropy_check(hidden, weight, targets, repeats: int) -> Iterator[Comparison]:
    """Of rows that repeat a block `repeats` times, loss and the weight's gradient are the block's own."""
    block = len(hidden) // repeats
    got = _loss_call(_cross_entropy)(hidden, weight, targets)
    sample = hidden[:block], weight.to(hidden.dtype), targets[:block]
    truth = _cross_entropy_blocks(*sample, torch.float64)
    low = _cross_entropy_blocks(*sample, hidden.dtype)
    yield Comparison("loss", got[0].float(), truth[0], bound=5e-6)
    for begin in {0, len(hidden) - block}:
        rows = slice(begin, begin + block)
        yield Comparison(f"dhidden from row {begin:,}", got[1][rows], truth[1] / repeats, low[1] / repeats)
    # the sum is float32 whatever the operands; each term has a rounded operand
    yield Comparison("dweight", got[2], truth[2], low[2], RMS_BOUND[hidden.dtype])


def _liger_cross_entropy() -> Call:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    return _loss_call(lambda h, w, y: Function.apply(h, w, y)[0])


def _cce() -> Call:
    from cut_cross_entropy import linear_cross_entropy

    return _loss_call(lambda h, w, y: linear_cross_entropy(h, w, y))


def _cross_entropy_case(m: Machine, N: int, D: int, W: int, wide_weight: bool, repeats: int = 1) -> Case:
    hidden = m.randn(N // repeats, D).repeat(repeats, 1)
    weight = m.randn(W, D, scale=0.02).to(torch.float32 if wide_weight else m.dtype)
    targets = torch.randint(0, W, (N // repeats,), device=m.device).repeat(repeats)
    peers = (
        Peer("Liger", _liger_cross_entropy, on_cpu=False),
        Peer("torch.compile", lambda: _loss_call(_compiled(_plain_cross_entropy)), on_cpu=False),
        Peer("torch", lambda: _loss_call(_plain_cross_entropy)),
        Peer("CCE", _cce, on_cpu=False),
    )
    return Case(
        inputs=[(hidden, weight, targets)],
        own=_loss_call(_cross_entropy),
        check=lambda: _cross_entropy_check(hidden, weight, targets, repeats),
        bytes=2 * (hidden.nbytes + weight.nbytes), operations=6.0 * N * D * W, units=N,
        peers=() if wide_weight else peers,
    )  # fmt: skip


def cross_entropy_rows(m: Machine) -> Iterator[Row]:
    D, W = m.pick((3584, 65536), (32, 320))
    ratio = Target("must", "peer", 1.05, "Liger"), Target("moonshot", "peer", 1.0, "torch.compile")
    memory = (Target("must", "memory", 500),)
    for N in m.pick((8192, 16384), (96, 160)):
        for wide in (False, True):
            # peers take a weight of hidden's type; the model's is the float32 master, whose gradient is the sum itself
            yield Row(
                kernel="cross-entropy", shape=f"{N:,}x{D:,}x{W:,} {'float32 master' if wide else 'one type'}",
                targets=memory if wide else ratio, seconds=6,
                build=lambda N=N, wide=wide: _cross_entropy_case(m, N, D, W, wide),
            )  # fmt: skip
    N, repeats = m.pick((1048576, 128), (384, 4))
    yield Row(
        kernel="cross-entropy", shape=f"{N:,}x{D:,}x{W:,} float32 master", targets=memory, seconds=25,
        build=lambda: _cross_entropy_case(m, N, D, W, True, repeats),
    )  # fmt: skip


# ---------------------------------------------------------------------------
# Row norms, gated activation, rotary, convolution: bound by bytes


def _streaming_case(
    m: Machine, draw: Callable[[], tuple], own: Call, plain: Call, names: str, tensors: int, leaves: int,
    extra: tuple[Peer, ...] = (), fast: Call | None = None,
) -> Case:  # fmt: skip
    """A call that moves `tensors` times its first input; `leaves` inputs have a gradient, 0 for forward alone.

    plain is the float64-capable form that is right, fast (or plain) the one that a user of torch writes.
    """
    wrap = (lambda op: _gradient_call(op, leaves)) if leaves else _without_gradient
    inputs = m.sets(draw, 0.5 * tensors * draw()[0].nbytes)
    fast = fast or plain
    return Case(
        inputs=inputs, own=wrap(own), check=lambda: _against_reference(names, wrap(own), wrap(plain), inputs[0]),
        bytes=tensors * inputs[0][0].nbytes, graph=True,
        peers=(
            Peer("torch", lambda: wrap(fast)),
            Peer("torch.compile", lambda: wrap(_compiled(fast)), on_cpu=False),
            *extra,
        ),
    )  # fmt: skip


def _liger_norm(leaves: int) -> Call:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Function

    op = lambda x, w: Function.apply(x, w, 1e-6, 0.0, "llama", False)  # noqa: E731
    return _gradient_call(op, leaves) if leaves else _without_gradient(op)


def rmsnorm_rows(m: Machine) -> Iterator[Row]:
    N, D = m.pick((16384, 3584), (64, 128))

    def norm_inputs(gradient: bool) -> tuple:
        inputs = m.randn(N, D), 1 + m.randn(D, scale=0.1)
        return (*inputs, m.randn(N, D)) if gradient else inputs

    def sphere_inputs(gradient: bool) -> tuple:
        inputs = m.randn(N, D), m.randn(N, D), m.randn(D, scale=0.1)
        return (*inputs, m.randn(N, D)) if gradient else inputs

    def torch_norm(x, w):
        return F.rms_norm(x, (D,), w, 1e-6)

    def torch_sphere(residual, branch, w):
        return F.rms_norm(residual + F.rms_norm(branch, (D,), w, 1e-6), (D,), None, 1e-6)

    def own_norm(x, w):
        return custom_kernels.fused_rmsnorm(x, w)

    def own_sphere(residual, branch, w):
        return custom_kernels.fused_residual_sphere(residual, branch, w)

    for leaves in (0, 2):
        yield Row(
            kernel="rmsnorm", shape=f"{N:,}x{D:,} {'forward + backward' if leaves else 'forward'}", seconds=6,
            targets=(Target("must", "peer", 1.5 if leaves else 1.1, "torch"),
                     Target("moonshot", "copy", 0.9 if leaves else 0.95)),
            build=lambda leaves=leaves: _streaming_case(
                m, lambda: norm_inputs(leaves > 0), own_norm, reference.fused_rmsnorm_reference,
                "y dx dweight" if leaves else "y", 5 if leaves else 2, leaves,
                (Peer("Liger", lambda: _liger_norm(leaves), on_cpu=False),), torch_norm),
        )  # fmt: skip
    for leaves in (0, 3):
        yield Row(
            kernel="rmsnorm", shape=f"{N:,}x{D:,} add, sphere {'forward + backward' if leaves else 'forward'}",
            targets=(Target("must", "peer", 1.5 if leaves else 1.1, "torch"),
                     Target("moonshot", "copy", 0.9 if leaves else 0.95)), seconds=6,
            build=lambda leaves=leaves: _streaming_case(
                m, lambda: sphere_inputs(leaves > 0), own_sphere, reference.fused_residual_sphere_reference,
                "y dresidual dbranch dweight" if leaves else "y", 8 if leaves else 3, leaves, (), torch_sphere),
        )  # fmt: skip


def _liger_swiglu() -> Call:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Function

    return _gradient_call(Function.apply, 2)


def swiglu_rows(m: Machine) -> Iterator[Row]:
    N, width = m.pick((8192, 11008), (64, 96))
    yield Row(
        kernel="swiglu", shape=f"{N:,}x{width:,} forward + backward", seconds=6,
        targets=(Target("must", "peer", 1.1, "torch.compile"), Target("moonshot", "copy", 0.9)),
        build=lambda: _streaming_case(
            m, lambda: tuple(m.randn(N, width) for _ in range(3)), lambda g, u: custom_kernels.fused_swiglu(g, u),
            reference.fused_swiglu_reference, "y dgate dup", 8, 2, (Peer("Liger", _liger_swiglu, on_cpu=False),),
            lambda g, u: F.silu(g) * u),
    )  # fmt: skip


def rotary_rows(m: Machine) -> Iterator[Row]:
    B, T, H, K = m.pick((4, 8192, 28, 128), (2, 24, 2, 16))
    angles = torch.arange(T, dtype=torch.float64)[:, None] * 5e6 ** -torch.linspace(0, 1, K // 2, dtype=torch.float64)
    cos, sin = angles.cos().float().to(m.device), angles.sin().float().to(m.device)

    def plain(x, cos, sin):
        x1, x2 = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)

    yield Row(
        kernel="rotary", shape=f"{B}x{T:,}x{H}x{K} forward + backward", seconds=6,
        targets=(Target("must", "peer", 1.1, "torch.compile"), Target("moonshot", "copy", 0.9)),
        build=lambda: _streaming_case(
            m, lambda: (m.randn(B, T, H, K), cos, sin, m.randn(B, T, H, K)),
            lambda x, c, s: custom_kernels.rotary(x, c, s), reference.rotary_reference, "y dx", 4, 1, (), plain),
    )  # fmt: skip


def convolution_rows(m: Machine) -> Iterator[Row]:
    if not hasattr(custom_kernels, "causal_convolution"):
        return
    B, T, C, taps = m.pick((4, 8192, 3584, 4), (2, 24, 16, 4))

    def plain(x, taps):
        taps = taps + F.one_hot(torch.zeros((), dtype=torch.int64, device=taps.device), taps.shape[1]).to(taps.dtype)
        total = sum(taps[:, j] * F.pad(x, (0, 0, j, 0))[:, : x.shape[1]] for j in range(taps.shape[1]))
        return total * torch.sigmoid(total)

    def fast(x, taps):
        # as a library's user writes it: the taps oldest first, channels before tokens
        y = F.conv1d(F.pad(x.mT, (taps.shape[1] - 1, 0)), taps.flip(1)[:, None], groups=C)
        return F.silu(y + x.mT).mT

    yield Row(
        kernel="convolution", shape=f"{B}x{T:,}x{C:,} taps {taps} forward + backward", seconds=6,
        build=lambda: _streaming_case(
            m, lambda: (m.randn(B, T, C), m.randn(C, taps, scale=0.3), m.randn(B, T, C)),
            lambda x, w: custom_kernels.causal_convolution(x, w), plain, "y dx dtaps", 5, 2, (), fast),
    )  # fmt: skip


# ---------------------------------------------------------------------------
# Orthogonalisation


def _orthogonal_map(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Prescale, five quintic and two cubic steps on a matrix with no more rows than columns, products in dtype."""
    x = matrix.double() / matrix.abs().max().double()
    norm, rows, columns = x.norm(), x.abs().sum(1).max(), x.abs().sum(0).max()
    x = x / torch.maximum((norm * rows + 1e-7).sqrt(), torch.minimum(norm, (rows * columns).sqrt()))
    x = x.to(dtype)
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 5 + [(1.5, -0.5, 0.0)] * 2:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def _polar(matrix: Tensor) -> Tensor:
    """Orthogonal polar factor in float64: cubic steps until nothing moves."""
    x = matrix.double()
    x = x / torch.minimum(x.norm(), (x.abs().sum(0).max() * x.abs().sum(1).max()).sqrt())
    for _ in range(80):
        step = 0.5 * (x - (x @ x.mT) @ x)
        x = x + step
        if step.norm() < 1e-8 * x.norm():
            break
    return x


def _newton_schulz_check(matrix: Tensor) -> Iterator[Comparison]:
    """Near the map in float64, at most 1.5 times as far as products in the kernel's type; spectral norm in the band."""
    got = custom_kernels.newton_schulz_orthogonalize(matrix).view(-1, *matrix.shape[-2:])
    for i in {0, len(got) - 1}:
        single = matrix.view(-1, *matrix.shape[-2:])[i]
        truth = _orthogonal_map(single, torch.float64)
        low = _orthogonal_map(single, matrix.dtype)
        ratio = ((low.double() - truth).norm() / truth.norm()).item()
        yield Comparison(f"matrix {i}", got[i], truth, low, max(1.5 * ratio, 1e-5))
        x = got[i].double()
        vector = torch.randn(x.shape[0], dtype=torch.float64, device=x.device)
        for _ in range(50):
            vector = F.normalize(x @ (x.mT @ vector), dim=0)
        norm = (x.mT @ vector).norm().reshape(1).float()
        # 0.985 +- 0.025 is the band 0.96 to 1.01 of the optimizer's update
        yield Comparison("spectral norm", norm, torch.full_like(norm, 0.985).double(), None, 0.0256, False)


def _torch_muon() -> Call:
    from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalize

    def call(matrix):
        # it takes one matrix at a time and writes into a bf16 one: the copy is its caller's, as in the optimizer
        members = matrix if matrix.dim() == 3 else matrix[None]
        each = [orthogonalize(x.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7) for x in members]
        return torch.stack(each) if matrix.dim() == 3 else each[0]

    return _without_gradient(call)


def _newton_schulz_case(m: Machine, shape: tuple[int, ...]) -> Case:
    matrix = m.randn(*shape)
    rows, columns = shape[-2:]
    truth = []

    def error(out: Tensor) -> float:
        if not truth:
            truth.append(_polar(matrix.view(-1, rows, columns)[0]))
        first = out.view(-1, rows, columns)[0].double()
        return ((first - truth[0]).norm() / truth[0].norm()).item()

    one = 5 * (4 * rows * rows * columns + 2 * rows**3) + 2 * 4 * rows * rows * columns
    return Case(
        inputs=[(matrix,)], own=lambda x: custom_kernels.newton_schulz_orthogonalize(x),
        check=lambda: _newton_schulz_check(matrix), bytes=2 * matrix.nbytes,
        operations=one * math.prod(shape[:-2]), error=error, peers=(Peer("torch Muon", _torch_muon),),
    )  # fmt: skip


def newton_schulz_rows(m: Machine) -> Iterator[Row]:
    square, wide, batch = m.pick(((3584, 3584), (3584, 11008), (8, 3584, 3584)), ((48, 48), (32, 96), (2, 32, 32)))
    for shape in (square, wide, batch):
        targets = [Target("must", "peer", 1.3, "torch Muon"), Target("must", "peer error", 1.0, "torch Muon")]
        if shape == wide:
            targets.append(Target("moonshot", "peer", 2.0, "torch Muon"))
        yield Row(
            kernel="newton-schulz", shape="x".join(f"{n:,}" for n in shape), targets=tuple(targets), seconds=6,
            build=lambda shape=shape: _newton_schulz_case(m, shape),
        )  # fmt: skip


# ---------------------------------------------------------------------------
# Windowed attention with anchors and documents


def _attention_group(q, k, v, q_far, k_far, doc_start, window: int, anchors: int, begin: int, end: int) -> Tensor:
    """Queries begin to end of one key-value head, dense: q (T, H, K), k (T, K), doc_start (T,); (end - begin, H, K)."""
    first = int(doc_start[begin])
    i = torch.arange(begin, end, device=q.device)[:, None]
    j = torch.arange(first, end, device=q.device)[None]
    start = doc_start[begin:end, None]
    inside, near = (j <= i) & (j >= start), i - j < window
    scores = torch.einsum("ihk,jk->hij", q[begin:end], k[first:end])
    far = torch.einsum("ihk,jk->hij", q_far[begin:end], k_far[first:end])
    scores = torch.where(near, scores, far) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~(inside & (near | (j < start + anchors))), -math.inf)
    return torch.einsum("hij,jk->ihk", scores.softmax(-1), v[first:end])


def _attention_check(arguments: tuple, window: int, anchors: int, backward: bool) -> Iterator[Comparison]:
    """Full size; the last key-value head and its queries against the dense form, 512 queries at a time."""
    *_, doc_start, dy = arguments
    T, H, G = dy.shape[1], dy.shape[2], arguments[1].shape[2]
    own = _attention(window, anchors)
    got = _tuple(_gradient_call(own, 5)(*arguments) if backward else own(*arguments[:-1]).detach())
    heads = slice(H - H // G, H)
    runs = []
    for dtype in (torch.float64, dy.dtype):
        q, k, v, q_far, k_far = (x.detach()[0].to(dtype) for x in arguments[:5])
        leaves = q[:, heads], k[:, -1], v[:, -1], q_far[:, heads], k_far[:, -1]
        leaves = [x.contiguous().requires_grad_() for x in leaves]
        sums, rows = [torch.zeros_like(x, dtype=torch.promote_types(dtype, torch.float32)) for x in leaves], []
        for begin in range(0, T, 512):
            end = min(begin + 512, T)
            with torch.set_grad_enabled(backward):
                y = _attention_group(*leaves, doc_start[0], window, anchors, begin, end)
            rows.append(y.detach())
            if backward:
                parts = torch.autograd.grad(y, leaves, dy[0, begin:end, heads].to(dtype))
                for total, part in zip(sums, parts, strict=True):
                    total += part
        runs.append((torch.cat(rows), *(sums if backward else ())))
    bound = 8e-3 if dy.dtype == torch.bfloat16 else None  # as in test_custom_kernels_attention.py
    for name, a, truth, low in zip(("y", "dq", "dk", "dv", "dq_far", "dk_far"), got, *runs, strict=False):
        a = a[0, :, heads] if a.shape[2] == H else a[0, :, -1]
        yield Comparison(name, a, truth, low.to(a.dtype), bound)


def _attention(window: int, anchors: int) -> Call:
    def op(q, k, v, q_far, k_far, doc_start):
        return custom_kernels.windowed_attention(
            q, k, v, q_far, k_far, window=window, anchors=anchors, doc_start=doc_start
        )

    return op


def _flex_attention(arguments: tuple, window: int, anchors: int, backward: bool) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    doc = arguments[5][0]

    def visible(b, h, i, j):
        return (i >= j) & (j >= doc[i]) & ((i - j < window) | (j < doc[i] + anchors))

    T = doc.shape[0]
    mask = torch.compile(create_block_mask)(visible, None, None, T, T, device=str(doc.device))
    attend = torch.compile(flex_attention, dynamic=False)
    return _heads_first(lambda q, k, v: attend(q, k, v, block_mask=mask, enable_gqa=True), arguments, backward)


def _sdpa(arguments: tuple, backward: bool) -> Call:
    """Full causal attention of as many key-value as query heads: the rate of the best library kernel."""
    heads = arguments[0].shape[2] // arguments[1].shape[2]
    wide = tuple(x.repeat_interleave(heads, 2) if i in (1, 2) else x for i, x in enumerate(arguments))
    return _heads_first(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), wide, backward)


def _heads_first(op: Call, arguments: tuple, backward: bool) -> Call:
    """A peer's layout is (B, H, T, K): the transposition is not its work, so it is done once."""
    q, k, v, dy = (arguments[i].transpose(1, 2).contiguous() for i in (0, 1, 2, -1))
    if backward:
        return lambda *_: _gradient_call(op, 3)(q, k, v, dy)
    return lambda *_: _without_gradient(op)(q, k, v)


def _attention_case(m: Machine, T: int, documents: bool, backward: bool) -> Case:
    H, G, K, window, anchors = m.pick((28, 4, 128, 8192, 64), (4, 2, 32, 64, 16))
    cuts = [0, T // 16, T // 16 + 70, T // 4, T // 2 + 33] if documents else [0]
    doc_start = torch.zeros(1, T, dtype=torch.int32, device=m.device)
    for cut in cuts:
        doc_start[:, cut:] = cut
    q, q_far, dy = (m.randn(1, T, H, K) for _ in range(3))
    k, v, k_far = (m.randn(1, T, G, K) for _ in range(3))
    arguments = (q, k, v, q_far, k_far, doc_start, dy)
    depth = torch.arange(T, device=m.device) - doc_start[0] + 1
    pairs = (depth.clamp(max=window) + (depth - window).clamp(0, anchors)).sum().item()
    passes = 3.5 if backward else 1.0
    own = _attention(window, anchors)
    forward = _without_gradient(lambda *a: own(*a[:-1]))
    query, key = q.nbytes, k.nbytes
    return Case(
        inputs=[arguments], own=_gradient_call(own, 5) if backward else forward,
        check=lambda: _attention_check(arguments, window, anchors, backward),
        bytes=(9 * query + 9 * key) if backward else (3 * query + 3 * key),
        operations=passes * 4 * pairs * K * H, units=T,
        peers=(
            Peer("FlexAttention", lambda: _flex_attention(arguments, window, anchors, backward), on_cpu=False),
            Peer("SDPA causal", lambda: _sdpa(arguments, backward), operations=passes * 2 * T * T * K * H),
        ),
    )  # fmt: skip


def attention_rows(m: Machine) -> Iterator[Row]:
    short, long = m.pick((16384, 65536), (200, 300))
    for backward in (False, True):
        for T, documents in ((short, False), (long, False), (long, True)):
            form = f"{'documents ' if documents else ''}{'forward + backward' if backward else 'forward'}"
            yield Row(
                kernel="attention", shape=f"{T:,} {form}", seconds=10,
                targets=(Target("must", "peer", 1.3 if backward else 1.15, "FlexAttention"),
                         Target("moonshot", "rate", 1.0, "SDPA causal")),
                build=lambda T=T, documents=documents, backward=backward: _attention_case(m, T, documents, backward),
            )  # fmt: skip


# ---------------------------------------------------------------------------
# Microscaled formats


def _nibbles(packed: object) -> Tensor:
    codes = packed.codes.cpu().long()
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1)


def _fp4_quantize_check(x: Tensor, signs: Tensor) -> Iterator[Comparison]:
    """64 rows against the format's tables, code by code; all rows against the values they stand for."""
    packed = custom_kernels.quantize_fp4(x, signs=signs, per_row_scale=True)
    rows = min(64, len(x))
    truth = reference.quantize_fp4_reference(x[-rows:].cpu().float(), signs=signs.cpu(), per_row=True)
    values = reference.dequantize_fp4_reference(
        _nibbles(packed)[-rows:], packed.scales.cpu().long()[-rows:], packed.global_scale.cpu().double()[-rows:]
    )
    yield Comparison("values", values, reference.dequantize_fp4_reference(*truth), None, 1e-6)
    # E2M1 under a scale of 32 values loses 11 % of a Gaussian row
    yield Comparison("restored", custom_kernels.dequantize_fp4(packed), x.double(), None, 0.125, False)


def _fp4_quantize_case(m: Machine, N: int, D: int) -> Case:
    signs = custom_kernels.fp4_signs(D, m.device)
    own = lambda x: custom_kernels.quantize_fp4(x, signs=signs, per_row_scale=True)  # noqa: E731
    inputs = m.sets(lambda: (m.randn(N, D),), m.dtype.itemsize * N * D)
    return Case(
        inputs=inputs, own=own, check=lambda: _fp4_quantize_check(inputs[0][0], signs), graph=True,
        # read once; half a byte a value, a byte of scale for 32
        bytes=N * D * (m.dtype.itemsize + 0.5 + 1 / 32) + 4 * N,
    )  # fmt: skip


def fp4_quantize_rows(m: Machine) -> Iterator[Row]:
    N, D = m.pick((16384, 3584), (96, 256))
    yield Row(
        kernel="fp4-quantize", shape=f"{N:,}x{D:,} with Hadamard", build=lambda: _fp4_quantize_case(m, N, D),
        targets=(Target("must", "copy", 0.6), Target("moonshot", "copy", 0.8)),
    )  # fmt: skip


def fused_linears() -> list[tuple[int, int]]:
    """(out, in) of every linear map of the full model of at least 3,584 squared, read off the model."""
    from hybrid_model import HybridLanguageModel

    # one group of four layers has every kind
    group = {"layers": 4, "recurrent_layers": 3, "attention_layers": 1}
    with torch.device("meta"):
        model = HybridLanguageModel(preset("full").with_values(group).model)
    maps = (x for x in model.modules() if isinstance(x, custom_kernels.Projection))
    return sorted({tuple(x.weight.shape) for x in maps if x.weight.numel() >= 3584**2})


def _fp4_decode_case(m: Machine, rows: int, out: int, width: int) -> Case:
    signs = custom_kernels.fp4_signs(width, m.device)

    def draw() -> tuple:
        dense = m.randn(out, width, scale=width**-0.5)
        return m.randn(rows, width), custom_kernels.quantize_fp4(dense, signs=signs), dense

    packed_bytes = out * width * (0.5 + 1 / 32)
    inputs = m.sets(draw, packed_bytes)
    x, packed, _ = inputs[0]

    def check() -> Iterator[Comparison]:
        got = custom_kernels.fp4_weight_only_linear(x, packed)
        weight = custom_kernels.dequantize_fp4(packed).double()
        yield Comparison("y", got, x.double() @ weight.T)
        # the packed weight itself, one slice of its rows, by the format's tables
        cut = reference.dequantize_fp4_reference(
            _nibbles(packed)[:16], packed.scales.cpu().long()[:16], packed.global_scale.cpu().double()
        )
        cut = reference.hadamard_transform_reference(cut, signs.cpu(), inverse=True)
        yield Comparison("weight", weight[:16].cpu().float(), cut)

    return Case(
        inputs=inputs, own=_without_gradient(lambda x, packed, dense: custom_kernels.fp4_weight_only_linear(x, packed)),
        check=check, graph=True, bytes=packed_bytes + x.nbytes + rows * out * x.itemsize, units=rows,
        operations=2.0 * rows * out * width,
        peers=(Peer("F.linear", lambda: _without_gradient(lambda x, packed, dense: F.linear(x, dense))),),
    )  # fmt: skip


def fp4_decode_rows(m: Machine) -> Iterator[Row]:
    for out, width in fused_linears() if m.cuda else ((384, 128), (128, 256)):
        for rows in m.pick((1, 4, 8, 16), (1, 7)):
            yield Row(
                kernel="fp4-decode", shape=f"{rows} x {width:,} to {out:,}", seconds=1,
                targets=(Target("must", "peer", 2.2, "F.linear"), Target("moonshot", "copy", 0.6)),
                build=lambda rows=rows, out=out, width=width: _fp4_decode_case(m, rows, out, width),
            )  # fmt: skip


def _fp4_small_check(m: Machine) -> Iterator[Comparison]:
    """Forward and both gradients of one small product against the format's tables, stochastic rounding included."""
    x, weight, dy = m.randn(96, 256), m.randn(160, 256), m.randn(96, 160)
    weight = m.randn(128, 256)
    dy = dy[:, :128].contiguous()
    got = _gradient_call(lambda x, w: custom_kernels.microscaled_fp4_gemm(x, w, seed=5), 2)(x, weight, dy)
    host = [t.cpu().float() for t in (x, weight, dy)]
    truth, low = (
        reference.microscaled_fp4_gemm_reference(*host, custom_kernels.fp4_signs, seed=5, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    for name, a, b, c in zip(("y", "dx", "dweight"), got, truth, low, strict=True):
        yield Comparison(f"{name}, small", a.cpu(), b, c.to(a.dtype))


def _fp4_train_case(m: Machine, N: int, width: int, out: int, backward: bool) -> Case:
    signs = custom_kernels.fp4_signs(width, m.device)
    x, weight = m.randn(N, width), m.randn(out, width, scale=width**-0.5)
    packed = custom_kernels.quantize_fp4(weight, signs=signs)
    dy = m.randn(N, out)

    def check() -> Iterator[Comparison]:
        with torch.no_grad():
            got = custom_kernels.microscaled_fp4_gemm(x, packed)
        rows = custom_kernels.dequantize_fp4(custom_kernels.quantize_fp4(x, signs=signs, per_row_scale=True))
        yield Comparison("y", got, rows.double() @ custom_kernels.dequantize_fp4(packed).double().T)
        yield from _fp4_small_check(m)

    forward = _without_gradient(lambda x, w, packed, dy: custom_kernels.microscaled_fp4_gemm(x, packed))
    both = lambda x, w, packed, dy: _gradient_call(custom_kernels.microscaled_fp4_gemm, 2)(x, w, dy)  # noqa: E731
    plain = lambda x, w, packed, dy: _gradient_call(F.linear, 2)(x, w, dy)  # noqa: E731
    peer = plain if backward else _without_gradient(lambda x, w, packed, dy: F.linear(x, w))
    return Case(
        inputs=[(x, weight, packed, dy)], own=both if backward else forward, check=check,
        bytes=(3 if backward else 1) * (x.nbytes + weight.nbytes + dy.nbytes), units=N,
        operations=(3 if backward else 1) * 2.0 * N * width * out, peers=(Peer("F.linear", lambda: peer),),
    )  # fmt: skip


def fp4_train_rows(m: Machine) -> Iterator[Row]:
    N, width, out = m.pick((8192, 3584, 11008), (128, 256, 384))
    yield Row(
        kernel="fp4-train", shape=f"{N:,}x{width:,}x{out:,} forward, packed weight",
        targets=(Target("must", "peer", 0.4, "F.linear"), Target("moonshot", "peer", 0.7, "F.linear")),
        build=lambda: _fp4_train_case(m, N, width, out, False),
    )  # fmt: skip
    yield Row(
        kernel="fp4-train", shape=f"{N:,}x{width:,}x{out:,} forward + backward",
        build=lambda: _fp4_train_case(m, N, width, out, True),
    )  # fmt: skip


def _fp8_values(x: Tensor, format: str) -> Tensor:
    """What x is after quantisation without a history, float64."""
    codes, exponents, _ = custom_kernels.quantize_fp8(x.contiguous(), format)
    scale = 2.0 ** (exponents.double() - 127)
    return codes.float().double() * scale.repeat_interleave(32, -1)


def _fp8_case(m: Machine, N: int, width: int, out: int) -> Case:
    x, weight, dy = m.randn(N, width), m.randn(out, width, scale=width**-0.5), m.randn(N, out)
    scales = custom_kernels.DelayedScale().to(m.device)
    own = _gradient_call(lambda x, w: custom_kernels.fp8_linear(x, w, scales), 2)

    def fresh(x: Tensor, w: Tensor) -> Tensor:
        return custom_kernels.fp8_linear(x, w, custom_kernels.DelayedScale().to(m.device))

    def check() -> Iterator[Comparison]:
        y, dx, dweight = _gradient_call(fresh, 2)(x, weight, dy)
        yield Comparison("y", y, _fp8_values(x, "e4m3") @ _fp8_values(weight, "e4m3").T)
        yield Comparison("dx", dx, _fp8_values(dy, "e5m2") @ _fp8_values(weight.T, "e4m3").T)
        yield Comparison("dweight", dweight, _fp8_values(dy.T, "e5m2") @ _fp8_values(x.T, "e4m3").T)
        small = [t.contiguous() for t in (x[:128, :128], weight[:128, :128], dy[:128, :128])]
        truth, low = (
            reference.fp8_linear_reference(*[t.cpu().float() for t in small], dtype=dtype)
            for dtype in (torch.float64, torch.float32)
        )
        for name, a, b, c in zip(("y", "dx", "dweight"), _gradient_call(fresh, 2)(*small), truth, low, strict=True):
            yield Comparison(f"{name}, small", a.cpu(), b, c.to(a.dtype))

    return Case(
        inputs=[(x, weight, dy)], own=own, check=check,
        bytes=3 * (x.nbytes + weight.nbytes + dy.nbytes), operations=6.0 * N * width * out, unit="matrix fp8", units=N,
        peers=(Peer("F.linear", lambda: _gradient_call(F.linear, 2)),),
    )  # fmt: skip


def fp8_rows(m: Machine) -> Iterator[Row]:
    N, width, out = m.pick((8192, 3584, 11008), (128, 256, 384))
    yield Row(
        kernel="fp8-linear", shape=f"{N:,}x{width:,}x{out:,} forward + backward",
        targets=(Target("must", "peer", 1.3, "F.linear"), Target("moonshot", "peer", 1.6, "F.linear")),
        build=lambda: _fp8_case(m, N, width, out),
    )  # fmt: skip


KERNELS: dict[str, Callable[[Machine], Iterator[Row]]] = {
    "scan": scan_rows,
    "cross-entropy": cross_entropy_rows,
    "rmsnorm": rmsnorm_rows,
    "newton-schulz": newton_schulz_rows,
    "attention": attention_rows,
    "fp4-quantize": fp4_quantize_rows,
    "fp4-decode": fp4_decode_rows,
    "fp4-train": fp4_train_rows,
    "fp8-linear": fp8_rows,
    "step": step_rows,
    "swiglu": swiglu_rows,
    "rotary": rotary_rows,
    "convolution": convolution_rows,
}


# ---------------------------------------------------------------------------
# Check, measure, judge

_BLOCK = 1024  # elements


def compare(c: Comparison) -> float:
    """Return the RMS error ratio; AssertionError where the rule of helpers.assert_close, on the device, is broken."""
    assert c.got.shape == c.truth.shape, f"{c.name}: shape {tuple(c.got.shape)}, expected {tuple(c.truth.shape)}"
    got, truth = c.got.detach(), c.truth.detach().to(c.got.device, torch.float64)
    missing = (~torch.isfinite(got)).sum().item()
    assert not missing, f"{c.name}: {missing:,} non-finite values"
    error = got.double() - truth
    scale = truth.square().mean().sqrt() + 1e-30
    ratio = (error.square().mean().sqrt() / scale).item()
    bound = c.bound or RMS_BOUND[got.dtype]
    assert ratio < bound, f"{c.name}: RMS error ratio {ratio:.2e} must be < {bound:.1e}"
    if c.low is not None:
        low = c.low.detach().to(truth)
        # the slack is meant for values of order 1
        slack = 1e-6 * max(1.0, truth.abs().max().item())
        worst, budget = error.abs().max().item(), 2 * (low - truth).abs().max().item() + slack
        assert worst <= budget, f"{c.name}: worst element off by {worst:.2e}, budget {budget:.2e}"
    elif error.numel() >= 2 * _BLOCK:
        whole = error.numel() // _BLOCK * _BLOCK
        squares = [x.flatten()[:whole].view(-1, _BLOCK).square().mean(1).sqrt() for x in (error, truth)]
        worst = (squares[0] / torch.maximum(squares[1], scale)).max().item()
        assert worst < 4 * bound, f"{c.name}: a block of {_BLOCK} is off by {worst:.2e}, must be < {4 * bound:.1e}"
    return ratio


@contextmanager
def launched_kernels() -> Iterator[list[dict]]:
    """Collect registers, spills (bytes a thread), shared memory and warps of every Triton kernel launched inside."""
    found: dict[tuple, dict] = {}
    triton = custom_kernels.triton
    with ExitStack() as stack:
        if triton is not None:
            run = triton.runtime.JITFunction.run

            def recording(self, *arguments, **options):
                kernel = run(self, *arguments, **options)
                if hasattr(kernel, "n_regs"):
                    meta = kernel.metadata
                    entry = dict(
                        kernel=self.__name__, registers=kernel.n_regs, spills=kernel.n_spills,
                        shared=meta.shared, warps=meta.num_warps, stages=getattr(meta, "num_stages", None),
                        tensor_memory=getattr(meta, "tmem_size", None),
                    )  # fmt: skip
                    found[tuple(entry.values())] = entry
                return kernel

            stack.enter_context(mock.patch.object(triton.runtime.JITFunction, "run", recording))
        collected: list[dict] = []
        yield collected
        collected.extend(found.values())


def _measure_peer(m: Machine, case: Case, peer: Peer) -> dict:
    """One entry: ms, peak_bytes and error, or why there is none."""
    if not m.cuda and not peer.on_cpu:
        return {"note": "not run on a CPU"}
    if peer.slow and not m.slow_peers:
        return {"note": "left out; --peers runs it (its first call searches for minutes)"}
    try:
        torch.compiler.reset()  # recompilations of earlier rows would count against this one's limit
        call = peer.make()
        begin = time.perf_counter()
        out = call(*case.inputs[0])
        m.synchronize()
        entry = {"first_call_s": time.perf_counter() - begin}
        if case.error is not None:
            entry["approximation_error"] = case.error(out)
        del out
        entry["peak_bytes"] = m.memory(call, case.inputs[0])[0]
        entry["ms"], entry["timing"] = m.time(call, case.inputs, graph=case.graph)
        if peer.operations is not None:
            entry["operations"] = peer.operations
        return entry
    except ImportError as error:
        return {"note": "not installed", "why": _line(error)}
    except Exception as error:  # a peer's own failure is a note on the peer, whatever it raises
        return {"note": f"failed: {_line(error)}"}


def measure(m: Machine, row: Row) -> Result:
    """Run one row: first call, check, and only then its times and those of its peers."""
    result = Result(kernel=row.kernel, shape=row.shape)
    torch.manual_seed(0)
    try:
        case = row.build()
        _check(m, case, result)
        result.bytes, result.operations, result.units = case.bytes, case.operations, case.units
        result.peak_bytes, result.beyond_bytes = m.memory(case.own, case.inputs[0])
        ms, result.timing = m.time(case.own, case.inputs, graph=case.graph)
    except torch.OutOfMemoryError as error:
        result.skipped = f"does not fit in this device's memory: {_line(error)}"
        return result
    except AssertionError as error:
        result.failed = str(error)
        return result
    except Exception as error:  # whatever a kernel raises is a failure of its row, and the others still run
        result.failed = _line(error)
        return result
    unit = case.unit if case.unit in m.rates else "matrix"
    roofs = {"copy": case.bytes / m.rates["copy"], unit: case.operations / m.rates[unit]}
    result.ms, result.roof = ms, max(roofs, key=roofs.get)
    result.roof_ms = roofs[result.roof]
    for peer in case.peers:
        result.peers[peer.name] = _measure_peer(m, case, peer)
    return result


def _check(m: Machine, case: Case, result: Result) -> None:
    """Time the first call with the kernels it launches, then compare; AssertionError where a comparison fails."""
    m.synchronize()
    with launched_kernels() as result.resources:
        begin = time.perf_counter()
        out = case.own(*case.inputs[0])
        m.synchronize()
        result.first_call_s = time.perf_counter() - begin
    if case.error is not None:
        result.approximation_error = case.error(out)
    del out
    result.error = max(ratio for c in case.check() for ratio in [compare(c)] if c.counted)


def _achieved(target: Target, result: Result, results: dict[str, Result], rates: dict[str, float]) -> float | None:
    """The value to hold against target.need, or None where a part of it was not measured."""
    peer, other = result.peers.get(target.name, {}), results.get(target.name)

    def over(a: float | None, b: float | None) -> float | None:
        return None if a is None or not b else a / b

    def rate(amount: float | None, ms: float | None) -> float | None:
        return over(amount, ms)

    match target.kind:
        case "peer":
            return over(peer.get("ms"), result.ms)
        case "copy":
            return over(rate(result.bytes, result.ms), rates["copy"])
        case "matrix":
            return over(rate(result.operations, result.ms), rates["matrix"])
        case "rate":
            return over(rate(result.operations, result.ms), rate(peer.get("operations"), peer.get("ms")))
        case "throughput":
            return over(rate(result.units, result.ms), rate(other.units, other.ms) if other else None)
        case "time":
            return over(result.ms, other.ms if other else None)
        case "memory":
            return over(result.beyond_bytes, 1e6)
        case "peer memory":
            return over(result.peak_bytes, peer.get("peak_bytes"))
        case "peer error":
            return over(result.approximation_error, peer.get("approximation_error"))
        case "first call":
            return result.first_call_s
    raise ValueError(f"unknown kind of target {target.kind!r}")


def judge(target: Target, result: Result, results: dict[str, Result], m: Machine) -> dict:
    """Return a target's verdict: value, met (None: open), margin as a share of what is needed (negative: missed)."""
    # the targets are for the full shapes
    value = _achieved(target, result, results, m.rates) if m.cuda else None
    verdict = asdict(target) | {"value": value, "met": None, "margin": None}
    if value is not None:
        margin = (1 - value / target.need) if target.at_most else (value / target.need - 1)
        verdict |= {"met": margin >= 0, "margin": margin}
    return verdict


# ---------------------------------------------------------------------------
# What is printed


def _subject(kind: str, name: str) -> str:
    return {
        "peer": f"x {name}", "copy": "of the copy rate", "matrix": "of the matrix rate", "rate": f"of {name}'s rate",
        "throughput": f"of the throughput of {name}", "time": f"x the time of {name}",
        "memory": "MB beyond inputs and outputs", "peer memory": f"x the peak memory of {name}",
        "peer error": f"x the error of {name}", "first call": "s for the first call",
    }[kind]  # fmt: skip


def target_line(verdict: dict) -> str:
    """'must >= 1.5 x fla: 1.71, met by 14 %'."""
    at_most = Target(verdict["level"], verdict["kind"], verdict["need"]).at_most
    need = f"{'<=' if at_most else '>='} {verdict['need']:g} {_subject(verdict['kind'], verdict['name'])}"
    text = f"{verdict['level']} {need}"
    if verdict["value"] is None:
        return f"{text}: open, not measured here"
    word = "met" if verdict["met"] else "missed"
    return f"{text}: {verdict['value']:.3g}, {word} by {abs(verdict['margin']):.0%}"


def _ms(value: float) -> str:
    return f"{value:.4g} ms" if value >= 0.1 else f"{1e3 * value:.4g} us"


_COLUMNS = "{:58s} {:>10s} {:>20s} {:>8s} {:>9s} {:>8s} {:>8s}"
HEADER = _COLUMNS.format("kernel and shape", "own", "roof", "% of it", "peak MB", "first s", "error")


def lines_of(result: Result) -> list[str]:
    """One line of figures; indented below: peers, targets, compiled kernels. FAILED and no time where the check did."""
    if result.failed is not None:
        return [f"{result.name:58s} FAILED: {result.failed}"]
    if result.skipped is not None:
        return [f"{result.name:58s} not run: {result.skipped}"]
    peak = "-" if result.peak_bytes is None else f"{result.peak_bytes / 1e6:,.0f}"
    figures = (
        _ms(result.ms), f"{result.roof} {_ms(result.roof_ms)}", f"{result.roof_share:.1%}", peak,
        f"{result.first_call_s:.1f}", f"{result.error:.1e}",
    )  # fmt: skip
    lines = [_COLUMNS.format(result.name, *figures)]
    for name, peer in result.peers.items():
        found = f"{_ms(peer['ms'])}, {peer['ms'] / result.ms:.2f} x" if "ms" in peer else peer["note"]
        lines.append(f"    {name}: {found}")
    lines += [f"    {target_line(verdict)}" for verdict in result.targets]
    for r in result.resources:
        tensor = f", {r['tensor_memory']} columns" if r["tensor_memory"] else ""
        spills = f", {r['spills']} spilled" if r["spills"] else ""
        lines.append(
            f"    {r['kernel']}: {r['registers']} registers{spills}, {r['shared'] / 1024:.0f} KB shared, "
            f"{r['warps']} warps{tensor}"
        )
    return lines


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def chosen_rows(m: Machine, only: list[str] | None) -> list[Row]:
    """Rows of the named kernels, all without a name; ValueError names the nearest kernel to an unknown one."""
    for name in only or []:
        if name not in KERNELS:
            raise ValueError(f"unknown kernel {name!r}{suggest_name(name, list(KERNELS))} known: {', '.join(KERNELS)}")
    first = Target("must", "first call", FIRST_CALL_SECONDS)
    rows = []
    for name, make in KERNELS.items():
        if not only or name in only:
            rows += [Row(**{**vars(row), "targets": (*row.targets, *([first] if m.cuda else []))}) for row in make(m)]
    return rows


def bench(*, only=None, quick=False, peers=False, out=None, device="auto", log: Callable[[str], None] = print) -> int:
    """Print the table and one JSON line; return 1 where a check failed."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device, found none; use --device cpu")
    m = Machine(device, quick=quick, slow_peers=peers)
    rows = chosen_rows(m, only)
    estimate = sum(row.seconds for row in rows) if m.cuda else 0.5 * len(rows)
    log(f"{len(rows)} rows; about {_clock(estimate)} {'on an H200' if m.cuda else 'on a CPU, small shapes, float32'}"
        + (", and minutes for each peer that searches" if peers else ""))  # fmt: skip
    with ExitStack() as stack:
        if m.cuda and custom_kernels.triton is not None:
            # an empty cache: the first call compiles, as a user's first does
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            stack.enter_context(mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}))
        m.measure_rates()
        results = _run_rows(m, rows, log)
    name = torch.cuda.get_device_name() if m.cuda else "cpu"
    failed = [r.name for r in results.values() if r.failed is not None]
    verdicts = [v for r in results.values() for v in r.targets]
    for level in ("must", "moonshot"):
        mine = [v["met"] for v in verdicts if v["level"] == level]
        log(f"{level}: {mine.count(True)} met, {mine.count(False)} missed, {mine.count(None)} open")
    idle = [r.name for r in results.values() if r.skipped is not None]
    missed = [f"{r.name} ({v['kind']})" for r in results.values() for v in r.targets
              if v["level"] == "must" and v["met"] is False]  # fmt: skip
    for word, names in (("missed", missed), ("not run", idle), ("FAILED", failed)):
        if names:
            log(f"{word}: {', '.join(names)}")
    if not failed:
        log("every check passed")
    report = {
        "device": name,
        "torch": torch.__version__,
        "triton": getattr(custom_kernels.triton, "__version__", None),
        "dtype": str(m.dtype).removeprefix("torch."),
        "rates_per_second": {key: 1e3 * rate for key, rate in m.rates.items()},
        "rows": [asdict(result) | {"roof_share": result.roof_share} for result in results.values()],
        "failed": failed,
    }
    text = json.dumps(report)
    if out is not None:
        Path(out).write_text(text + "\n", encoding="utf-8")
    log(text)
    return 1 if failed else 0


def _run_rows(m: Machine, rows: list[Row], log: Callable[[str], None]) -> dict[str, Result]:
    rates = "; ".join(
        f"{key} {rate / 1e9:.2f} T{'B' if key == 'copy' else 'FLOP'}/s" if rate > 1e8 else f"{key} {rate / 1e6:.1f} G/s"
        for key, rate in m.rates.items()
    )
    log(f"roofs, measured now: {rates}")
    log(HEADER)
    results: dict[str, Result] = {}
    begin, total, done = time.perf_counter(), sum(row.seconds for row in rows), 0.0
    for number, row in enumerate(rows, 1):
        spent = time.perf_counter() - begin
        left = f"about {_clock(spent / done * (total - done))} left" if done else "first row"
        print(f"[{number}/{len(rows)}] {row.name} ({left})", file=sys.stderr, flush=True)
        result = measure(m, row)
        results[row.name] = result
        if result.ms is not None:
            result.targets = [judge(target, result, results, m) for target in row.targets]
        for line in lines_of(result):
            log(line)
        done += row.seconds
        if m.cuda:
            torch.cuda.empty_cache()
    return results


# ---------------------------------------------------------------------------
# verify


def kernels_of_tests(path: Path) -> dict[str, set[str]]:
    """{test function: public kernels that it or a function of its file that it uses names}."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    words = {
        name: {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        for name, node in functions.items()
    }
    found = {}
    for test in (name for name in functions if name.startswith("test_")):
        reached, waiting = set(), {test}
        while waiting:
            name = waiting.pop()
            reached.add(name)
            waiting |= {word for word in words[name] if word in functions} - reached
        named = set().union(*(words[name] for name in reached))
        found[test] = named & set(custom_kernels.__all__)
    return found


def tally(report: Path, root: Path) -> dict[str, dict[str, defaultdict[str, int]]]:
    """{kernel: {test file: counts of passed, failed, skipped}} of a pytest report in JUnit's form."""
    maps: dict[str, dict[str, set[str]]] = {}
    counts: dict[str, dict[str, defaultdict[str, int]]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").split(".")[-1]
        path = root / "tests" / f"{module}.py"
        if module not in maps:
            maps[module] = kernels_of_tests(path) if path.is_file() else {}
        kinds = {child.tag for child in case}
        word = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        for kernel in maps[module].get(case.get("name", "").split("[")[0], ()):
            counts.setdefault(kernel, {}).setdefault(f"{module}.py", defaultdict(int))[word] += 1
    return counts


def verify(*, log: Callable[[str], None] = print, root: Path = ROOT, pattern: str = KERNEL_TESTS) -> int:
    """Run the kernels' tests, on the GPU where there is one; print pass or FAIL per kernel; return 1 on a failure."""
    gpu = torch.cuda.is_available()
    files = sorted(root.glob(pattern))
    if not files:
        raise ValueError(f"verify needs the tests, found no {root / pattern}; run it from a full checkout")
    where = f"{torch.cuda.get_device_name()}: the Triton kernels" if gpu else "no CUDA device: the CPU paths alone"
    log(f"verify on {where}, {len(files)} files; minutes")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        marks = "gpu" if gpu else "not gpu and not compile and not interpret"
        command = [sys.executable, "-m", "pytest", *map(str, files), "-m", marks, "-q", "-o", "addopts=", "--no-header"]
        done = subprocess.run([*command, "-rN", "--tb=short", f"--junitxml={report}"], cwd=root, check=False)
        if not report.is_file():
            raise ValueError(f"pytest ended with exit code {done.returncode} and no report; run {' '.join(command)}")
        counts = tally(report, root)
    return _print_tally(counts, done.returncode, log)


def _print_tally(counts: dict, returncode: int, log: Callable[[str], None]) -> int:
    failures, idle = defaultdict(int), []
    for kernel in (name for name in custom_kernels.__all__ if inspect.isfunction(getattr(custom_kernels, name))):
        files = counts.get(kernel, {})
        total = {word: sum(c[word] for c in files.values()) for word in ("passed", "failed", "skipped")}
        for name, c in files.items():
            failures[name] = max(failures[name], c["failed"])
        verdict = "FAIL" if total["failed"] else "pass" if total["passed"] else "not run"
        if verdict == "not run":
            idle.append(kernel)
        worst = max(files, key=lambda name: (files[name]["failed"], files[name]["passed"]), default="")
        figures = ", ".join(f"{n} {word}" for word, n in total.items() if n)
        log(f"{verdict:8s} {kernel:32s} {figures}{f'; {worst}' if worst else ''}")
    worst = max(failures, key=failures.get, default="")
    if worst and failures[worst]:
        log(f"worst file: {worst}, {failures[worst]} failures of one kernel")
    if idle:
        log(f"no test here names: {', '.join(idle)}")
    failed = returncode != 0
    log("FAIL" if failed else "pass: every test that ran")
    return 1 if failed else 0
