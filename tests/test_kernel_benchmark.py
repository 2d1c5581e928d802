"""The kernel benchmark: it renders, refuses to time what is wrong, judges targets, and verify counts tests."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import custom_kernels

ROOT = Path(__file__).resolve().parent.parent
NO_INTERPRETER = pytest.mark.skipif(custom_kernels._INTERPRETED, reason="looks at the PyTorch paths")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tested_kernel_benchmark", ROOT / "tests/benchmarks/kernels.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels = _load()
Target, Result = kernels.Target, kernels.Result


@pytest.fixture(autouse=True)
def _one_thread(_fixed_randomness: None) -> None:
    torch.set_num_threads(1)  # the tensors are tiny, waking a second thread takes longer than they do


def _bench(*only: str, **options) -> tuple[int, list[str], dict]:
    """Exit code, printed lines without the last, and the last as JSON, of a quick run on the CPU."""
    lines = []
    code = kernels.bench(only=list(only) or None, quick=True, device="cpu", log=lines.append, **options)
    return code, lines[:-1], json.loads(lines[-1])


# ---------------------------------------------------------------------------
# The table


@NO_INTERPRETER
def test_every_kernel_is_checked_and_timed_and_the_last_line_is_json(tmp_path):
    out = tmp_path / "bench.json"
    code, lines, report = _bench(out=out)
    assert code == 0 and report["failed"] == []
    assert json.loads(out.read_text()) == report
    known = {name for name in kernels.KERNELS if name != "convolution" or hasattr(custom_kernels, "causal_convolution")}
    assert {row["kernel"] for row in report["rows"]} == known
    assert re.match(rf"{len(report['rows'])} rows; about \d+:\d\d on a CPU", lines[0])
    assert report["rates_per_second"]["copy"] > 1e8 and report["rates_per_second"]["matrix"] > 1e8
    text = "\n".join(lines)
    for row in report["rows"]:
        name = f"{row['kernel']} {row['shape']}"
        assert row["ms"] > 0 and row["roof_ms"] > 0 and row["roof_share"] == row["roof_ms"] / row["ms"], name
        assert row["first_call_s"] > 0 and 0 <= row["error"] < (0.1 if row["kernel"] == "newton-schulz" else 1e-5), name
        (line,) = (line for line in lines if line.startswith(f"{name:58s} "))
        assert re.search(r"\d (ms|us) +(copy|matrix) [\d.e-]+ (ms|us) +[\d.]+% ", line), line
        # no verdict on small shapes
        assert all(verdict["met"] is None for verdict in row["targets"])
    assert text.count("open, not measured here") == sum(len(row["targets"]) for row in report["rows"])
    assert "FAILED" not in text and "every check passed" in text
    # one peer that everybody has, one that no CPU runs
    (forward,) = (row for row in report["rows"] if row["kernel"] == "rmsnorm" and row["shape"].endswith("128 forward"))
    assert forward["peers"]["torch"]["ms"] > 0 and forward["peers"]["Liger"] == {"note": "not run on a CPU"}


def _targets(m: SimpleNamespace) -> dict[str, list[Target]]:
    return {f"{row.kernel} {row.shape}": list(row.targets) for make in kernels.KERNELS.values() for row in make(m)}


def test_a_gpu_runs_the_full_shapes_under_the_stated_targets():
    """Rows are listed without drawing inputs, so that a machine without a GPU can see what one would run."""
    m = SimpleNamespace(cuda=True, device="cpu", pick=lambda full, small: full)
    targets = _targets(m)
    fla = Target("must", "peer", 1.5, "fla"), Target("moonshot", "peer", 1.0, "FlashQLA")
    for shape in ("4x8,192", "1x65,536"):
        assert targets[f"scan {shape} forward"] == list(fla)
    assert Target("must", "peer memory", 1.0, "fla") in targets["scan 1x65,536 forward + backward"]
    long = targets["scan 1x1,048,576 forward"]
    assert [(t.kind, t.need, t.name) for t in long] == [("throughput", x, "scan 4x8,192 forward") for x in (0.9, 1.0)]
    for rows in ("8,192", "16,384"):
        assert Target("must", "peer", 1.05, "Liger") in targets[f"cross-entropy {rows}x3,584x65,536 one type"]
    assert targets["cross-entropy 1,048,576x3,584x65,536 float32 master"] == [Target("must", "memory", 500)]
    assert Target("moonshot", "copy", 0.95) in targets["rmsnorm 16,384x3,584 forward"]
    assert Target("must", "peer error", 1.0, "torch Muon") in targets["newton-schulz 8x3,584x3,584"]
    assert Target("moonshot", "peer", 2.0, "torch Muon") in targets["newton-schulz 3,584x11,008"]
    assert Target("must", "peer", 1.15, "FlexAttention") in targets["attention 65,536 documents forward"]
    assert targets["fp4-quantize 16,384x3,584 with Hadamard"] == [
        Target("must", "copy", 0.6), Target("moonshot", "copy", 0.8)
    ]  # fmt: skip
    assert Target("must", "peer", 2.2, "F.linear") in targets["fp4-decode 16 x 3,584 to 11,008"]
    assert Target("must", "time", 1.05, "step 1 node") in targets["step 7 nodes"]
    assert Target("must", "peer", 1.3, "F.linear") in targets["fp8-linear 8,192x3,584x11,008 forward + backward"]
    # a target that names a row names one that exists
    named = {t.name for rows in targets.values() for t in rows if t.kind in ("throughput", "time")}
    assert named <= set(targets)


# ---------------------------------------------------------------------------
# What is wrong is not timed


def _scaled(value: object) -> object:
    if isinstance(value, tuple):
        return (_scaled(value[0]), *value[1:])
    if isinstance(value, custom_kernels.PackedFP4):
        return custom_kernels.PackedFP4(
            value.codes, value.scales, value.global_scale * 1.02, value.signs, value.shape
        )  # fmt: skip
    return value * 1.02


BROKEN = {
    "scan": "chunk_associative_scan", "cross-entropy": "fused_chunked_cross_entropy", "rmsnorm": "fused_rmsnorm",
    "newton-schulz": "newton_schulz_orthogonalize", "attention": "windowed_attention", "fp4-quantize": "quantize_fp4",
    "fp4-decode": "fp4_weight_only_linear", "fp4-train": "microscaled_fp4_gemm", "fp8-linear": "fp8_linear",
    "step": "delta_rule_step", "swiglu": "fused_swiglu", "rotary": "rotary",
}  # fmt: skip


@NO_INTERPRETER
@pytest.mark.parametrize("kernel", BROKEN)
def test_a_kernel_that_is_two_percent_off_has_no_time(kernel, monkeypatch):
    operation = getattr(custom_kernels, BROKEN[kernel])
    monkeypatch.setattr(custom_kernels, BROKEN[kernel], lambda *a, **o: _scaled(operation(*a, **o)))
    code, lines, report = _bench(kernel)
    assert code == 1
    wrong = [row for row in report["rows"] if "add, sphere" not in row["shape"]]  # that one is another operation
    assert report["failed"] == [f"{row['kernel']} {row['shape']}" for row in wrong] and wrong
    for row in wrong:
        name = f"{row['kernel']} {row['shape']}"
        (line,) = (line for line in lines if line.startswith(f"{name:58s} "))
        assert re.search(r" FAILED: .*(RMS error ratio|worst element|a block)", line), line
        assert row["ms"] is None and row["peers"] == {} and not re.search(r"\d (ms|us)\b", line)
    assert any(line.startswith("FAILED: ") for line in lines)


@NO_INTERPRETER
@pytest.mark.parametrize("fault", ["gradient", "one row", "nan", "raises"])
def test_a_fault_that_the_mean_of_the_output_hides_is_found(fault, monkeypatch):
    operation = custom_kernels.fused_swiglu

    def broken(gate, up):
        if fault == "raises":
            raise RuntimeError("out of\nregisters")
        if fault == "gradient":
            return operation(gate, 1.02 * up - (0.02 * up).detach())
        y = operation(gate, up)
        bump = torch.zeros_like(y)
        bump[3, 5] = 1e-4 if fault == "one row" else float("nan")
        return y + bump

    monkeypatch.setattr(custom_kernels, "fused_swiglu", broken)
    code, lines, report = _bench("swiglu")
    said = {
        "gradient": "dup: RMS error ratio",
        "one row": "y: ",
        "nan": "y: 1 non-finite",
        "raises": "RuntimeError: out of registers",
    }
    assert code == 1 and len(report["failed"]) == 1
    assert report["rows"][0]["failed"].startswith(said[fault])
    assert f"{report['failed'][0]:58s} FAILED: {report['rows'][0]['failed']}" in lines


def test_without_a_low_precision_run_a_wrong_block_is_found():
    truth = torch.randn(64, 1024, dtype=torch.float64)
    got = truth.float()
    assert kernels.compare(kernels.Comparison("y", got, truth)) < 1e-7
    got[7] *= 1 + 6e-5  # the mean over all is 7.5e-6, under float32's bound of 1e-5
    with pytest.raises(AssertionError, match=r"y: a block of 1024 is off by 5\.9"):
        kernels.compare(kernels.Comparison("y", got, truth))


def test_a_peer_that_is_absent_or_breaks_is_a_note_and_no_failure(monkeypatch):
    m = kernels.Machine("cpu", quick=True)

    def absent():
        import no_such_package_of_kernels  # noqa: F401

    def call(x):
        raise TypeError("unexpected keyword")

    case = kernels.Case(inputs=[(torch.ones(3),)], own=torch.neg, check=lambda: iter(()), bytes=1.0)
    entry = kernels._measure_peer(m, case, kernels.Peer("absent", absent))
    assert entry["note"] == "not installed" and "no_such_package_of_kernels" in entry["why"]
    entry = kernels._measure_peer(m, case, kernels.Peer("broken", lambda: call))
    assert entry == {"note": "failed: TypeError: unexpected keyword"}
    assert "--peers" in kernels._measure_peer(m, case, kernels.Peer("slow", absent, slow=True))["note"]


# ---------------------------------------------------------------------------
# Targets


def _machine() -> SimpleNamespace:
    return SimpleNamespace(cuda=True, rates={"copy": 4e9, "matrix": 6e11})  # 4 TB/s, 600 TFLOP/s


def _result(**fields) -> Result:
    return Result(kernel="scan", shape="own", ms=2.0, roof="copy", roof_ms=1.0, error=1e-3, first_call_s=3.0, **fields)


@pytest.mark.parametrize(
    ("target", "fields", "value", "met", "margin"),
    [
        (Target("must", "peer", 1.5, "fla"), {"peers": {"fla": {"ms": 3.6}}}, 1.8, True, 0.2),
        (Target("must", "peer", 1.5, "fla"), {"peers": {"fla": {"ms": 2.4}}}, 1.2, False, -0.2),
        (Target("must", "peer", 1.5, "fla"), {"peers": {"fla": {"note": "not installed"}}}, None, None, None),
        (Target("must", "copy", 0.6), {"bytes": 6e9}, 0.75, True, 0.25),
        (Target("moonshot", "matrix", 0.5), {"operations": 3e11}, 0.25, False, -0.5),
        (Target("moonshot", "rate", 1.0, "S"), {"operations": 1e12, "peers": {"S": {"ms": 1.0, "operations": 4e11}}},
         1.25, True, 0.25),
        (Target("must", "throughput", 0.9, "scan other"), {"units": 1000}, 0.5, False, 0.5 / 0.9 - 1),
        (Target("must", "time", 1.05, "scan other"), {}, 2.0, False, 1 - 2 / 1.05),
        (Target("must", "time", 1.05, "scan absent"), {}, None, None, None),
        (Target("must", "memory", 500), {"beyond_bytes": 400e6}, 400.0, True, 0.2),
        (Target("must", "memory", 500), {"beyond_bytes": 0}, 0.0, True, 1.0),
        (Target("must", "peer memory", 1.0, "fla"), {"peak_bytes": 9e9, "peers": {"fla": {"peak_bytes": 7.5e9}}},
         1.2, False, -0.2),
        (Target("must", "peer error", 1.0, "M"),
         {"approximation_error": 0.1, "peers": {"M": {"approximation_error": 0.2}}}, 0.5, True, 0.5),
        (Target("must", "first call", 20), {}, 3.0, True, 0.85),
    ],
)  # fmt: skip
def test_verdicts(target, fields, value, met, margin):
    other = Result(kernel="scan", shape="other", ms=1.0, units=1000)
    verdict = kernels.judge(target, _result(**fields), {"scan other": other}, _machine())
    assert verdict["met"] is met
    assert verdict["value"] == (None if value is None else pytest.approx(value))
    assert verdict["margin"] == (None if margin is None else pytest.approx(margin))


def test_every_kind_of_target_in_a_row_can_be_judged_and_said():
    m = SimpleNamespace(cuda=True, device="cpu", pick=lambda full, small: full)
    seen = {target for targets in _targets(m).values() for target in targets}
    for target in seen:
        kernels.judge(target, _result(), {}, _machine())
        assert kernels._subject(target.kind, target.name)
    with pytest.raises(ValueError, match="unknown kind of target 'speed'"):
        kernels.judge(Target("must", "speed", 1.0), _result(), {}, _machine())


def test_a_row_with_everything_is_printed_in_full():
    result = _result(
        peak_bytes=123_000_000, peers={"fla": {"ms": 3.6}, "CCE": {"note": "not installed"}},
        resources=[dict(kernel="_k", registers=168, spills=4, shared=98304, warps=8, stages=3, tensor_memory=128)],
    )  # fmt: skip
    for target in (Target("must", "peer", 1.5, "fla"), Target("moonshot", "copy", 0.9)):
        result.targets.append(kernels.judge(target, result, {}, _machine()))
    assert [re.sub(r" +", " ", line) for line in kernels.lines_of(result)] == [
        "scan own 2 ms copy 1 ms 50.0% 123 3.0 1.0e-03",
        " fla: 3.6 ms, 1.80 x",
        " CCE: not installed",
        " must >= 1.5 x fla: 1.8, met by 20%",
        " moonshot >= 0.9 of the copy rate: 0, missed by 100%",
        " _k: 168 registers, 4 spilled, 96 KB shared, 8 warps, 128 columns",
    ]


@pytest.mark.skipif(custom_kernels.triton is None or custom_kernels._INTERPRETED, reason="needs Triton's compiler")
def test_launched_kernels_are_collected_once_each(monkeypatch):
    function = custom_kernels.triton.runtime.JITFunction
    meta = SimpleNamespace(shared=1024, num_warps=4, num_stages=2)
    monkeypatch.setattr(function, "run", lambda self, *a, **o: SimpleNamespace(n_regs=40, n_spills=0, metadata=meta))
    with kernels.launched_kernels() as found:
        for _ in range(2):
            custom_kernels._fused_swiglu_kernel[(1,)](None)
    (entry,) = found
    assert entry["kernel"] == "_fused_swiglu_kernel" and entry["registers"] == 40 and entry["shared"] == 1024


# ---------------------------------------------------------------------------
# verify

KERNEL_TESTS = """
from custom_kernels import fused_rmsnorm, fused_swiglu, rotary

def helper(op):
    return fused_swiglu if op else None

def check():
    return helper(1)

def test_norm():
    assert fused_rmsnorm

def test_gate(number=1):
    assert check()

def test_gate_again():
    assert check() is None, "two percent off"
"""


@pytest.fixture
def verified(tmp_path, monkeypatch):
    """Run verify on a folder with the given tests: exit code and printed lines."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(source: str) -> tuple[int, list[str]]:
        (tmp_path / "tests").mkdir()
        (tmp_path / "custom_kernels.py").write_text("fused_rmsnorm = fused_swiglu = rotary = print\n")
        (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers = gpu\n")
        (tmp_path / "tests" / "test_custom_kernels_x.py").write_text(source)
        lines = []
        return kernels.verify(log=lines.append, root=tmp_path), lines

    return run


def test_verify_says_which_kernel_fails_and_where(verified):
    code, lines = verified(KERNEL_TESTS)
    assert code == 1 and lines[-1] == "FAIL"
    said = {line.split()[1]: " ".join(line.split()) for line in lines if re.match("(pass|FAIL) +[a-z]", line)}
    assert said["fused_rmsnorm"] == "pass fused_rmsnorm 1 passed; test_custom_kernels_x.py"
    assert said["fused_swiglu"] == "FAIL fused_swiglu 1 passed, 1 failed; test_custom_kernels_x.py"
    assert "worst file: test_custom_kernels_x.py, 1 failures of one kernel" in lines
    assert any(line.startswith("no test here names: ") and "rotary" in line for line in lines)


def test_verify_passes_where_every_test_does(verified):
    code, lines = verified(KERNEL_TESTS.replace("check() is None", "check()"))
    assert code == 0 and lines[-1] == "pass: every test that ran"
    assert not any(line.startswith("FAIL") for line in lines)


def test_verify_does_not_pass_what_cannot_be_collected(verified):
    code, lines = verified("import no_such_module_of_tests\n")
    assert code == 1 and lines[-1] == "FAIL"


def test_verify_without_tests_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"verify needs the tests, found no .*test_custom_kernels_"):
        kernels.verify(root=tmp_path)


def test_the_kernels_of_a_test_are_those_that_its_helpers_use():
    found = kernels.kernels_of_tests(ROOT / "tests/test_custom_kernels_dense.py")
    assert "newton_schulz_orthogonalize" in found["test_newton_schulz_singular_values"]
    assert "fused_chunked_cross_entropy" in found["test_cross_entropy_parity"]
    assert "fused_chunked_cross_entropy" not in found["test_newton_schulz_singular_values"]
    tested = set().union(*(
        names for path in (ROOT / "tests").glob("test_custom_kernels_*.py")
        for names in kernels.kernels_of_tests(path).values()
    ))  # fmt: skip
    functions = {n for n in custom_kernels.__all__ if not isinstance(getattr(custom_kernels, n), type)}
    assert functions <= tested
