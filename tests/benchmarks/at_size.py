"""The largest preset on one device: step rate, what recomputation costs, every row length, checkpoints.

    python tests/benchmarks/at_size.py rate --precision bf16 fp8        # seconds a step, TFLOP/s, memory, kernels
    python tests/benchmarks/at_size.py recompute                        # none, ffn and layer: seconds and bytes
    python tests/benchmarks/at_size.py tiers                            # one step at each length up to 1,048,576
    python tests/benchmarks/at_size.py checkpoint                       # seconds that saving blocks; resumed bits
    python tests/benchmarks/at_size.py rate --preset nano --tokens-per-step 2048 --context 256       # smoke, CPU

Ids are random, in one document, since neither time nor memory depends on them; no loss printed here means anything.
A step is whole: loss, draft losses, recomputation, both optimizers, conditioning (the run is planned so long that the
timed steps fall in its first tenth). Its first two runs (compilation, recording) are not counted. TFLOP/s are 6 *
matrix parameters * tokens / seconds, the attention's and the draft head's own products and what is computed again left
out; the share is of the chip's dense peak. Peak memory is the allocator's, beside what `plan` says.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dataset_pipeline import CurriculumStage, PackedSequenceDataLoader, TokenFile, open_tokens  # noqa: E402
from model_config import PRESETS, Config, preset  # noqa: E402
from train_engine import DeviceFacts, TrainingEngine, describe_device, newest_checkpoint, plan  # noqa: E402

KERNELS = 15  # lines of the profile


def random_tokens(folder: Path, count: int, vocab_size: int) -> TokenFile:
    """Write one document of random ids."""
    ids = np.random.default_rng(0).integers(0, vocab_size, count).astype("<u2" if vocab_size <= 65536 else "<u4")
    np.save(folder / "ids.npy", ids)
    return open_tokens(folder / "ids.npy")


def build(arguments: argparse.Namespace, tokens: TokenFile, lengths: list[int], steps: int, **values) -> TrainingEngine:
    """Return an engine that takes `steps` steps of each row length."""
    given = dict(tokens_per_step=arguments.tokens_per_step, micro_batch_tokens=arguments.micro_batch_tokens,
                 context=arguments.context, total_tokens=max(len(tokens) - 1, arguments.tokens_per_step),
                 average_on_host=arguments.average_on_host)  # fmt: skip
    config = preset(arguments.preset).with_values(given | values)
    engine = TrainingEngine(config, tokens, log=lambda line: None)
    sizes = [max(config.curriculum.tokens_per_step, length) for length in lengths]
    stages = [CurriculumStage(length=length, tokens=steps * size, tokens_per_step=size, steps=steps)
              for length, size in zip(lengths, sizes, strict=True)]  # fmt: skip
    engine.loader = PackedSequenceDataLoader(tokens, stages, seed=0, config=config.curriculum,
                                             micro_batch_tokens=config.train.micro_batch_tokens)  # fmt: skip
    return engine


def timed(engine: TrainingEngine, steps: int) -> float:
    """Take steps; seconds of one."""
    _synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        engine.train_step()
    _synchronize()
    return (time.perf_counter() - started) / steps


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _forget(engine: TrainingEngine) -> None:
    engine._recorded.release()
    engine._loads.shutdown()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def row(name: str, config: Config, facts: DeviceFacts, tokens: int, seconds: float) -> dict:
    """Print one line of a table, and return it."""
    rate = tokens / seconds
    flops = 6 * config.model.matrix_parameters * rate
    share = flops / facts.peak(config.precision.precision) if facts.chip else 0.0
    predicted = plan(config, facts).training_bytes
    made = dict(name=name, seconds=seconds, tokens_per_second=rate, tflops=flops / 1e12, share=share,
                peak=_peak(), predicted=predicted)  # fmt: skip
    print(f"{name:28s} {seconds:9.3f} s {rate:12,.0f} tok/s {flops / 1e12:8.1f} TFLOP/s {share:7.1%} of peak, "
          f"memory {_peak() / 2**30:7.2f} GiB, planned {predicted / 2**30:7.2f}", flush=True)  # fmt: skip
    return made


def measure_rate(arguments: argparse.Namespace, tokens: TokenFile, facts: DeviceFacts) -> list[dict]:
    rows = []
    for precision in arguments.precision:
        started = time.perf_counter()
        engine = build(arguments, tokens, [arguments.context], 10 * (arguments.steps + 3), precision=precision)
        engine.train_step()
        _synchronize()
        print(f"{precision}: first step {time.perf_counter() - started:.1f} s after the start, recompute "
              f"{engine.recompute}", flush=True)  # fmt: skip
        engine.train_step()
        seconds = timed(engine, arguments.steps)
        rows.append(row(precision, engine.config, facts, engine.loader.step_batches(1).tokens, seconds))
        if torch.cuda.is_available():
            profile(engine)
        _forget(engine)
        del engine
    return rows


def profile(engine: TrainingEngine) -> None:
    """Print the kernels that one step spends its time in."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        engine.train_step()
        _synchronize()
    kernels = sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    for event in kernels[:KERNELS]:
        print(f"  {event.key[:72]:72s} {event.count:7,d} x {event.self_device_time_total / 1e3:10.2f} ms "
              f"{event.self_device_time_total / total:7.1%}")  # fmt: skip
    print(f"  {'all kernels':72s} {'':7s}   {total / 1e3:10.2f} ms", flush=True)


def measure_recompute(arguments: argparse.Namespace, tokens: TokenFile, facts: DeviceFacts) -> list[dict]:
    rows = []
    for choice in ("none", "ffn", "layer"):
        config = preset(arguments.preset).with_values({
            "recompute": choice, "micro_batch_tokens": arguments.micro_batch_tokens, "context": arguments.context,
            "tokens_per_step": arguments.tokens_per_step, "average_on_host": arguments.average_on_host,
        })  # fmt: skip
        need = plan(config, facts).training_bytes
        if need > facts.memory:
            print(f"{choice:28s} needs {need / 2**30:.1f} GiB, the device has {facts.memory / 2**30:.1f}: not run")
            continue
        engine = build(arguments, tokens, [arguments.context], 10 * (arguments.steps + 2), recompute=choice)
        timed(engine, 2)
        seconds = timed(engine, arguments.steps)
        rows.append(row(choice, engine.config, facts, engine.loader.step_batches(1).tokens, seconds))
        _forget(engine)
        del engine
    return rows


def measure_tiers(arguments: argparse.Namespace, tokens: TokenFile, facts: DeviceFacts) -> list[dict]:
    """One step a length, after one more that compiles and records it where there is time for that."""
    rows, lengths = [], [n for n in arguments.lengths if n < len(tokens)]
    short = [n for n in lengths if n <= arguments.tokens_per_step]
    engine = build(arguments, tokens, [n for length in lengths for n in ([length] * (1 + 2 * (length in short)))], 1)
    for length in lengths:
        if length in short:
            timed(engine, 2)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        engine._sums.zero_()
        size = engine.loader.step_batches(engine.state.step).tokens
        seconds = timed(engine, 1)
        made = row(f"rows of {length:,}", engine.config, facts, size, seconds)
        norm = float(engine._report.matrix_gradient_norm)
        print(f"{'':28s} gradient norm {norm:.4g}, loss {engine._sums[0].item() / size:.4f}")
        rows.append(made | {"gradient_norm": norm})
    return rows


def measure_checkpoint(arguments: argparse.Namespace, tokens: TokenFile, facts: DeviceFacts) -> list[dict]:
    """Seconds that a save takes from the run, its size, and whether a second engine goes on with the same bits."""
    folder = Path(arguments.folder) / "checkpoints"
    folder.mkdir(exist_ok=True)
    engine = build(arguments, tokens, [arguments.context], 4)
    timed(engine, 2)
    started = time.perf_counter()
    engine.save(folder)
    seconds = time.perf_counter() - started
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    planned = plan(engine.config, facts).checkpoint_bytes
    print(f"checkpoint: {seconds:.1f} s, {size / 1e9:.2f} GB on disk, planned {planned / 1e9:.2f}", flush=True)
    timed(engine, 1)
    want = {name: value.detach().to("cpu", copy=True) for name, value in engine.model.named_parameters()}
    _forget(engine)
    del engine
    other = build(arguments, tokens, [arguments.context], 4)
    path, manifest, _ = newest_checkpoint(folder)
    other.load(path, manifest)
    timed(other, 1)
    same = all(torch.equal(value.cpu(), want[name]) for name, value in other.model.named_parameters())
    print(f"resumed: the next step's weights are {'the same bits' if same else 'OTHER BITS'}")
    return [{"name": "checkpoint", "seconds": seconds, "bytes": size, "planned": planned, "same": same}]


PARTS = {"rate": measure_rate, "recompute": measure_recompute, "tiers": measure_tiers, "checkpoint": measure_checkpoint}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--preset", choices=tuple(PRESETS), default="full")
    parser.add_argument("--precision", nargs="+", default=["bf16"])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tokens-per-step", type=int, default=131_072)
    parser.add_argument("--micro-batch-tokens", type=int, default=16_384)
    parser.add_argument("--average-on-host", action="store_true", help="leaves its memory to activations")
    parser.add_argument("--steps", type=int, default=2, help="timed")
    parser.add_argument("--lengths", type=int, nargs="+",
                        default=[2048, 4096, 8192, 16_384, 65_536, 131_072, 1_048_576])  # fmt: skip
    parser.add_argument("--folder", help="for the token file and checkpoints; default: a temporary one")
    arguments = parser.parse_args()
    facts = describe_device()
    print(facts.describe(), f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    with tempfile.TemporaryDirectory() as temporary:
        arguments.folder = arguments.folder or temporary
        longest = max(arguments.lengths) if arguments.part == "tiers" else 0
        count = max(longest, 4 * arguments.tokens_per_step) + 8
        tokens = random_tokens(Path(arguments.folder), count, preset(arguments.preset).model.vocab_size)
        rows = PARTS[arguments.part](arguments, tokens, facts)
    print(json.dumps({"part": arguments.part, "preset": arguments.preset, "rows": rows}))


if __name__ == "__main__":
    main()
