"""The kernels are the program's own: no library matrix product inside the printed operations, the printed names exist.

Library products are looked for twice: on a CPU in the operators that the host code of each operation dispatches while
its kernels run in Triton's interpreter, and on a GPU in what the profiler saw, operators and device kernels alike. Both
detectors are shown to catch the library's products. The FP4 kernel that is cross-compiled here is the object, with the
constants, that the public operation launches.
"""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import scan_reference, windowed_attention_reference
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import custom_kernels
from custom_kernels import (
    chunk_associative_scan,
    fused_chunked_cross_entropy,
    fused_rmsnorm,
    microscaled_fp4_gemm,
    newton_schulz_orthogonalize,
    windowed_attention,
)

# the printed kernel of each printed operation
PRINTED = {
    "chunk_associative_scan": "_chunk_associative_scan_kernel",
    "fused_chunked_cross_entropy": "_fused_chunked_cross_entropy_kernel",
    "newton_schulz_orthogonalize": "_newton_schulz_kernel",
    "microscaled_fp4_gemm": "_microscaled_fp4_gemm_kernel",
    "fused_rmsnorm": "_fused_rmsnorm_kernel",
}
NO_COMPILER = custom_kernels.triton is None or custom_kernels._INTERPRETED
needs_torch_paths = pytest.mark.skipif(custom_kernels._INTERPRETED, reason="looks at the PyTorch paths")
needs_compiler = pytest.mark.skipif(NO_COMPILER, reason="needs Triton, not interpreted")


@pytest.fixture(autouse=True)
def _one_thread(_fixed_randomness: None) -> None:
    torch.set_num_threads(1)  # the tensors are tiny, waking a second thread takes longer than they do


# ---------------------------------------------------------------------------
# What counts as a library product

_LIBRARY_OPERATOR = re.compile(
    r"(_?scaled_|_int_|_?grouped_|_foreach_|_)?(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|addr|matmul|linear|bilinear|einsum"
    r"|dot|vdot|inner|tensordot|chain_matmul|multi_dot)(_out|_activation|_v2)?_?"
    r"|linalg_(?!vector_norm)\w+|triangular_solve|_?scaled_dot_product\w*|_convolution|conv\dd?|convolution\w*"
)
_LIBRARY_KERNEL = re.compile(
    r"gemm|gemv|cublas|cutlass|cudnn|xmma|nvjet|splitk|split_k|wgmma|magma|trsm|trsv|dot_kernel|convolve", re.IGNORECASE
)


def library_operators(names: set[str]) -> set[str]:
    """Those of the operator names ("aten::mm", "aten.mm.default") that are matrix products or solves."""
    found = set()
    for name in names:
        base = re.sub(r"^aten(::|\.)", "", name).split(".")[0]
        if re.match(r"aten(::|\.)", name) and _LIBRARY_OPERATOR.fullmatch(base):
            found.add(name)
    return found


def own_kernels() -> set[str]:
    return {name for name in vars(custom_kernels) if name.endswith("_kernel")}


def library_kernels(names: set[str]) -> set[str]:
    """Those of the device kernels' names that belong to a matrix library, and not to this program."""
    return {name for name in names if name not in own_kernels() and _LIBRARY_KERNEL.search(name)}


_PRODUCTS = """mm addmm bmm baddbmm addbmm matmul linear einsum mv addmv dot inner tensordot _scaled_mm _int_mm addmm_
    baddbmm_ _addmm_activation _grouped_mm linalg_matmul linalg_solve_triangular triangular_solve linalg_multi_dot
    conv1d scaled_dot_product_attention _scaled_dot_product_flash_attention convolution"""
_OTHERS = """add mul sum addcmul addcdiv lerp norm linalg_vector_norm copy_ empty_strided cumsum searchsorted rsqrt amax
    linspace minimum to _to_copy zeros view mean mse_loss"""
_LIBRARY_KERNELS = {
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(cutlass_80_simt_sgemm_128x64_8x5_nn::Params)",
    "ampere_sgemm_32x32_sliced1x4_tn",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel",
    "void gemv2T_kernel_val<int, int, float>",
    "void cublasLt::splitKreduce_kernel<32, 16, int>",
}


@pytest.mark.parametrize("form", ["aten::{}", "aten.{}.default"])
def test_library_operators_are_told_from_others(form):
    products, others = ({form.format(name) for name in names.split()} for names in (_PRODUCTS, _OTHERS))
    assert library_operators(products | others | {"Memcpy HtoD", "cudaLaunchKernel", "mm"}) == products


def test_library_kernels_are_told_from_others():
    others = {*PRINTED.values(), "_fp8_gemm_kernel", "void at::native::vectorized_elementwise_kernel<4, float>"}
    assert library_kernels(_LIBRARY_KERNELS | others) == _LIBRARY_KERNELS


# ---------------------------------------------------------------------------
# The five operations, both directions


def operations(device: str, dtype: torch.dtype) -> dict[str, list[Callable[[], object]]]:
    """Calls of every printed operation, forward and backward where it has one, by the operation's name."""
    gen = torch.Generator().manual_seed(0)

    def leaf(*shape: int, kind: torch.dtype = dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=gen) * scale).to(device, kind).requires_grad_()

    def backward(*outputs: Tensor) -> None:
        sum(y.float().square().sum() for y in outputs).backward()

    f32 = torch.float32
    q, v = leaf(2, 70, 2, 32), leaf(2, 70, 2, 48)
    k = F.normalize(leaf(2, 70, 2, 32, kind=f32).detach(), dim=-1).to(dtype).requires_grad_()
    beta, log_gamma = leaf(2, 70, 2, kind=f32).detach().sigmoid().requires_grad_(), torch.full((2, 70, 2), -0.1)
    log_gamma, state = log_gamma.to(device).requires_grad_(), leaf(2, 2, 32, 48, kind=f32)
    doc = torch.where(torch.arange(70) < 33, -1, 33).int().expand(2, -1).contiguous().to(device)

    hidden, targets = leaf(130, 33), torch.randint(0, 300, (130,), generator=gen).to(device)
    # the engine's float32 master is cast on the way, a weight of hidden's type is not
    heads = [leaf(300, 33), leaf(300, 33, kind=f32)]
    # below and, on a GPU, above the side from which the iteration runs in bf16; wide, tall, a batch
    sides = [(40, 70), (2, 33, 20)] + ([(260, 520), (520, 260)] if device == "cuda" else [])
    matrices = [leaf(*shape).detach() for shape in sides]
    x, weight = leaf(33, 256), leaf(130, 256, scale=0.05)
    row, gain = leaf(9, 257), leaf(257, kind=f32)
    return {
        "chunk_associative_scan": [
            lambda: backward(*chunk_associative_scan(q, k, v, beta, log_gamma, initial_state=state, doc_start=doc))
        ],
        "fused_chunked_cross_entropy": [
            lambda head=head: fused_chunked_cross_entropy(hidden, head, targets, logit_scale=0.5).backward()
            for head in heads
        ],
        "newton_schulz_orthogonalize": [lambda m=m: newton_schulz_orthogonalize(m) for m in matrices],
        "microscaled_fp4_gemm": [lambda: backward(microscaled_fp4_gemm(x, weight, seed=3))],
        "fused_rmsnorm": [lambda: backward(fused_rmsnorm(row, gain)), lambda: backward(fused_rmsnorm(row))],
    }


def products(a: Tensor) -> list[Callable[[], Tensor]]:
    """The library's products of square matrices a (2, n, n), in the forms that a program writes."""
    return [
        lambda: torch.mm(a[0], a[1]),
        lambda: torch.bmm(a, a),
        lambda: torch.addmm(a[0], a[0], a[1]),
        lambda: torch.baddbmm(a, a, a),
        lambda: a @ a[0],
        lambda: F.linear(a, a[0]),
        lambda: torch.einsum("bij,bjk->bik", a, a),
    ]


class Dispatched(TorchDispatchMode):
    """Counts the operators below autograd, by name; composite ones arrive as what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Recorder:
    """Stands in for a kernel: keeps the arguments of its launches, and runs it where `run` is set."""

    def __init__(self, kernel: object, run: bool = True) -> None:
        self.kernel, self.run, self.launches = kernel, run, []

    def __getitem__(self, grid: tuple) -> Callable:
        def launch(*args, **kwargs):
            self.launches.append((args, kwargs))
            return self.kernel[grid](*args, **kwargs) if self.run else None

        return launch


# ---------------------------------------------------------------------------
# (a) no library product


def dispatched_by(calls: list[Callable[[], object]]) -> set[str]:
    with Dispatched() as seen:
        for call in calls:
            call()
    return set(seen.names)


def interpreted_purity() -> None:
    """Runs in the child: host code and kernels of every printed operation, float32, in the interpreter."""
    torch.set_num_threads(1)
    assert custom_kernels._uses_kernel(torch.zeros(1)), "the child must run the kernels"
    for name, calls in operations("cpu", torch.float32).items():
        recorder = Recorder(getattr(custom_kernels, PRINTED[name]))
        setattr(custom_kernels, PRINTED[name], recorder)
        found = library_operators(dispatched_by(calls))
        assert not found, f"{name} dispatches {sorted(found)}"
        assert recorder.launches, f"{name} does not launch {PRINTED[name]}"
    print("pure")


@pytest.mark.interpret
def test_operations_dispatch_no_library_product_around_their_kernels():
    pytest.importorskip("triton")
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    code = f"import {Path(__file__).stem} as t; t.interpreted_purity()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "pure" in done.stdout, done.stdout + done.stderr[-3000:]


@needs_torch_paths
def test_the_dispatch_detector_sees_library_products():
    """The PyTorch paths are built from library products, all but the norm's."""
    for name, calls in operations("cpu", torch.float32).items():
        assert bool(library_operators(dispatched_by(calls))) == (name != "fused_rmsnorm"), name
    a = torch.randn(2, 5, 5)
    for call in products(a):
        assert library_operators(dispatched_by([call]))


def profiled(calls: list[Callable[[], object]]) -> tuple[set[str], set[str]]:
    """Names of the operators and of the device kernels that the calls run, compiled before."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for call in calls:
            call()
        torch.cuda.synchronize()
    events = profiler.events()
    kernels = {event.name for event in events if event.device_type == DeviceType.CUDA}
    return {event.name for event in events if event.device_type == DeviceType.CPU}, kernels


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", PRINTED)
def test_operations_run_no_library_kernel_on_the_gpu(name, dtype):
    operators, kernels = profiled(operations("cuda", dtype)[name])
    assert not library_operators(operators), f"{name} calls {sorted(library_operators(operators))}"
    assert not library_kernels(kernels), f"{name} runs {sorted(library_kernels(kernels))}"
    assert PRINTED[name] in kernels, f"{name} must run {PRINTED[name]}, ran {sorted(kernels)}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_the_gpu_detector_sees_library_products(dtype):
    a = torch.randn(2, 256, 256, device="cuda", dtype=dtype)
    for call in products(a):
        operators, kernels = profiled([call])
        assert library_operators(operators), f"operators {sorted(operators)}"
        assert library_kernels(kernels), f"kernels {sorted(kernels)}"


# ---------------------------------------------------------------------------
# (b) the FP4 kernel that is cross-compiled is the one that is launched


def recorded_fp4_launches(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> tuple[object, list[dict]]:
    """The kernel object of the module, and the keyword arguments of its launches by both directions on SM10x.

    The quantisers around it run their PyTorch form: they are not what is looked at.
    """
    kernel, quantize = custom_kernels._microscaled_fp4_gemm_kernel, custom_kernels._fp4_quantize
    recorder = Recorder(kernel, run=False)
    on_kernels = [True]

    def quantize_in_torch(*args, **kwargs):
        on_kernels[0] = False
        try:
            return quantize(*args, **kwargs)
        finally:
            on_kernels[0] = True

    monkeypatch.setattr(custom_kernels, "_uses_kernel", lambda x: on_kernels[0])
    monkeypatch.setattr(custom_kernels, "_microscaled_native", lambda x: True)
    monkeypatch.setattr(custom_kernels, "_fp4_quantize", quantize_in_torch)
    monkeypatch.setattr(custom_kernels, "_microscaled_fp4_gemm_kernel", recorder)
    x, weight = torch.randn(256, 512).to(dtype).requires_grad_(), torch.randn(384, 512).to(dtype).requires_grad_()
    y = microscaled_fp4_gemm(x, weight, seed=1)
    y.backward(torch.ones_like(y))
    assert recorder.kernel is kernel and all(not args for args, _ in recorder.launches)
    return kernel, [kwargs for _, kwargs in recorder.launches]


def compile_launch(kernel, launch: dict, arch: int):
    """Cross-compile a kernel for exactly one recorded launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {torch.uint8: "*u8", torch.float32: "*fp32", torch.bfloat16: "*bf16"}
    names, signature, constants, attributes = kernel.arg_names, {}, {}, {}
    for i, name in enumerate(names):
        value = launch[name]
        if isinstance(value, Tensor):
            signature[name], attributes[(i,)] = pointers[value.dtype], [["tt.divisibility", 16]]
        elif kernel.params[i].is_constexpr:
            signature[name], constants[(i,)] = "constexpr", value
        else:
            signature[name] = "i32"
            if value % 16 == 0 and not kernel.params[i].do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in launch.items() if name not in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@needs_compiler
@pytest.mark.compile
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_the_fp4_kernel_that_is_launched_is_block_scaled_on_sm103(dtype, monkeypatch):
    kernel, launches = recorded_fp4_launches(monkeypatch, dtype)
    # the product, the input's gradient and the weight's
    sizes = [tuple(launch[n] for n in "MNK") for launch in launches]
    assert sizes == [(256, 384, 512), (256, 512, 384), (384, 512, 256)]
    assert all(launch["NATIVE"] is True for launch in launches)
    monkeypatch.undo()
    assert custom_kernels._microscaled_fp4_gemm_kernel is kernel
    for launch in launches:
        built = compile_launch(kernel, launch, 103)
        ptx = built.asm["ptx"]
        assert built.metadata.name == "_microscaled_fp4_gemm_kernel" and ".target sm_103a" in ptx
        assert "tcgen05.mma" in ptx and "kind::mxf4nvf4.block_scale" in ptx, "no block-scaled FP4 instruction"
        for other in ("kind::f16", "kind::tf32", "kind::i8", "kind::f8f6f4", "kind::mxf8f6f4", "mma.sync", "wgmma"):
            assert other not in ptx, f"a {other} product beside the FP4 one"


@needs_compiler
@pytest.mark.compile
def test_that_instruction_check_sees_the_16_bit_form(monkeypatch):
    """The same kernel for sm_90, where the codes pass through an ordinary product, has what must not be there."""
    kernel, launches = recorded_fp4_launches(monkeypatch, torch.bfloat16)
    monkeypatch.undo()
    launch = launches[0] | {"NATIVE": False} | custom_kernels._fp4_gemm_config(False, torch.bfloat16)
    ptx = compile_launch(kernel, launch, 90).asm["ptx"]
    assert "block_scale" not in ptx and "wgmma" in ptx


# ---------------------------------------------------------------------------
# (c) the printed names

NAMES = {
    "model_config": ["ModelConfig"],
    "custom_kernels": [*PRINTED, *PRINTED.values()],
    "recurrent_layers": ["GatedDeltaRuleMatrixMemoryBlock"],
    "attention_layers": ["GroupedQueryAttentionBlock"],
    "hybrid_model": ["HybridLanguageModel"],
    "spectral_optimizer": ["DualSpectralOptimizer"],
    "scheduler": ["WarmupStableDecayScheduler", "TerminalShrinkageAverager"],
    "dataset_pipeline": ["PackedSequenceDataLoader"],
    "train_engine": ["TrainingEngine"],
    "generation_engine": ["StreamingGenerationEngine"],
}
MODULES = {"GatedDeltaRuleMatrixMemoryBlock", "GroupedQueryAttentionBlock", "HybridLanguageModel"}


@pytest.mark.parametrize("file, name", [(file, name) for file, names in NAMES.items() for name in names])
def test_printed_names_are_defined_in_their_file(file, name):
    module = importlib.import_module(file)
    value = getattr(module, name)
    assert value.__module__ == file, f"{name} must be defined in {file}.py, comes from {value.__module__}"
    assert name.startswith("_") or name in module.__all__
    assert name not in MODULES or issubclass(value, nn.Module)
    if name in PRINTED.values() and custom_kernels.triton is not None:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        assert isinstance(value, InterpretedFunction if custom_kernels._INTERPRETED else JITFunction), type(value)


def test_printed_commands_are_parsed():
    main = importlib.import_module("main")
    (commands,) = (a.choices for a in main.build_parser()._actions if a.dest == "command")
    assert {"train", "generate"} <= set(commands)


# ---------------------------------------------------------------------------
# (d) the CPU path is vectorised


def scan_call(T: int, op: Callable = chunk_associative_scan) -> Callable[[], object]:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 1, 16, generator=gen) for _ in range(3))
    beta, log_gamma, state = torch.full((1, T, 1), 0.5), torch.full((1, T, 1), -0.1), torch.ones(1, 1, 16, 16)
    leaves = [x.requires_grad_() for x in (q, F.normalize(k, dim=-1), v, beta, log_gamma)]

    def call() -> None:
        y, final = op(*leaves, initial_state=state)
        (y.sum() + final.sum()).backward()

    return call


def attention_call(T: int, op: Callable = windowed_attention) -> Callable[[], object]:
    """Window and anchors that are short enough to fire in one chunk, and two documents."""
    gen = torch.Generator().manual_seed(0)
    q, q_far = (torch.randn(1, T, 2, 32, generator=gen).requires_grad_() for _ in range(2))
    k, v, k_far = (torch.randn(1, T, 1, 32, generator=gen).requires_grad_() for _ in range(3))
    doc = torch.where(torch.arange(T) < T // 4, 0, T // 4).int()[None]
    return lambda: op(q, k, v, q_far, k_far, window=48, anchors=16, doc_start=doc).sum().backward()


def operator_count(call: Callable[[], object]) -> int:
    with Dispatched() as seen:
        call()
    return len(seen.names)


# the scan's ratio has its own test
@needs_torch_paths
def test_attention_torch_operators_grow_with_chunks():
    one, many = (operator_count(attention_call(T)) for T in (128, 4096))
    assert many <= 1.3 * (4096 / 128) * one, f"{many} operators at 4,096 tokens, {one} at 128"


@needs_torch_paths
@pytest.mark.parametrize("make, loop", [(scan_call, scan_reference), (attention_call, windowed_attention_reference)],
                         ids=["scan", "attention"])  # fmt: skip
def test_torch_operators_are_fewer_than_tokens(make, loop):
    """The ratio alone cannot see a loop over tokens, whose count grows 32-fold too: both directions, 4,096 tokens."""
    count = operator_count(make(4096))
    assert count < 4096, f"{count} operators for 4,096 tokens"
    assert operator_count(make(128, loop)) > 5 * 128, "a loop over tokens must be seen"


# ---------------------------------------------------------------------------
# (c) a change of the row length compiles nothing anew


def variant(kernel: object, args: tuple, kwargs: dict) -> tuple:
    """What a launch is compiled for: constants, types, options, and whether an integer is 1 or a multiple of 16."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    key = [sorted((name, value) for name, value in kwargs.items() if name not in kernel.arg_names)]
    for parameter in kernel.params:
        value = values.get(parameter.name)  # one with a default may be left out
        if parameter.is_constexpr:
            key.append(value)
        elif isinstance(value, Tensor):
            key.append(value.dtype)
        elif isinstance(value, int):
            seen = () if parameter.do_not_specialize else (value == 1, value % 16 == 0)
            key.append((abs(value) >= 2**31, *seen))
        else:
            key.append(type(value))
    return tuple(map(str, key))


@needs_compiler
def test_no_kernel_is_compiled_anew_at_a_change_of_length(monkeypatch):
    """Every tier of the curriculum launches the same variants of every kernel of a layer, forward and backward."""
    recorders = {}
    for name, kernel in list(vars(custom_kernels).items()):
        if isinstance(kernel, custom_kernels.triton.runtime.jit.JITFunction):
            recorders[name] = Recorder(kernel, run=False)
            monkeypatch.setattr(custom_kernels, name, recorders[name])
    monkeypatch.setattr(custom_kernels, "_uses_kernel", lambda x: True)
    variants = []
    for length in (2_048, 4_096, 8_192, 16_384, 65_536):
        rows = max(1, 16_384 // length)

        def leaf(*shape):
            return torch.ones(shape, requires_grad=True)

        q, k, v, kv = leaf(rows, length, 2, 32), leaf(rows, length, 2, 32), leaf(rows, length, 2, 32), (1, 32)
        gates = leaf(rows, length, 2), leaf(rows, length, 2)
        starts = torch.zeros(rows, length, dtype=torch.int32)
        x, wide = leaf(rows * length, 32), leaf(rows * length, 32)
        outputs = [
            custom_kernels.chunk_associative_scan(q, k, v, *gates, doc_start=starts)[0],
            custom_kernels.windowed_attention(
                q, leaf(rows, length, *kv), leaf(rows, length, *kv), q, leaf(rows, length, *kv),
                window=512, anchors=16, doc_start=starts,
            ),
            custom_kernels.fused_rmsnorm(x, leaf(32)),
            custom_kernels.fused_residual_sphere(x, wide, leaf(32)),
            custom_kernels.fused_swiglu(x, wide),
            custom_kernels.causal_convolution(q.flatten(2), leaf(64, 4), doc_start=starts, carry=leaf(rows, 3, 64)),
            custom_kernels.linear_product(x, leaf(48, 32)),
            custom_kernels.fused_chunked_cross_entropy(x, leaf(512, 32), torch.zeros(rows * length, dtype=torch.long)),
        ]  # fmt: skip
        for y in outputs:
            y.sum().backward()
        made = {name: {variant(r.kernel, *launch) for launch in r.launches} for name, r in recorders.items()}
        variants.append({name: keys for name, keys in made.items() if keys})
        for recorder in recorders.values():
            recorder.launches.clear()
    assert len(variants[0]) > 15
    for other in variants[1:]:
        for name, keys in other.items():
            assert keys == variants[0][name], f"{name} would be compiled anew"
