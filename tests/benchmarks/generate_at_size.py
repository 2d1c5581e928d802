"""Generation with the largest preset on one device: speed, memory, flatness, prompts, batches.

    python tests/benchmarks/generate_at_size.py decode --bits 16 8 4     # launched, recorded; drafts on and off
    python tests/benchmarks/generate_at_size.py long --tokens 131072     # first and last 8,192 tokens, memory, drift
    python tests/benchmarks/generate_at_size.py prefill                  # 32,768 and 1,048,576 tokens
    python tests/benchmarks/generate_at_size.py batch --out batch.png    # tokens/s against texts at once, a picture
    python tests/benchmarks/generate_at_size.py decode --preset nano --bits 16 --tokens 20      # smoke test, CPU

Weights are random: neither speed nor memory depends on them, but acceptance of drafts does, so that rows with drafts
show what a step of seven nodes costs, not what it gains. GB/s counts the weights once a step, state and cache read and
written beside it, over the measured copy rate of the device (8 GB, in the same run).
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from custom_kernels import Projection  # noqa: E402
from generation_engine import Request, StreamingGenerationEngine  # noqa: E402
from hybrid_model import HybridLanguageModel, RecordedWork  # noqa: E402
from model_config import PRESETS, GenerationConfig, PrecisionConfig, preset  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM = 8  # tokens before a timed text: compilation and recording


def build(arguments: argparse.Namespace, bits: int) -> HybridLanguageModel:
    """Draw random weights, in 16 bit on a GPU, or packed."""
    config = preset(arguments.preset).model
    with torch.device(DEVICE):
        model = HybridLanguageModel(config, PrecisionConfig(precision="bf16" if DEVICE == "cuda" else "fp32"))
    model.init_weights(0)
    model.eval().requires_grad_(False)
    for spec in model.parameter_table():
        if DEVICE == "cuda" and spec.role not in ("vector", "gate"):
            spec.parameter.data = spec.parameter.data.to(torch.bfloat16)
    for module in model.modules():
        if bits < 16 and isinstance(module, Projection):
            module.pack(bits)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model


def weight_bytes(model: HybridLanguageModel) -> int:
    """Bytes that one step without drafts reads of the weights: all but the draft head, the embedding as the head."""
    total = 0
    for name, module in model.named_modules():
        if name.startswith("draft"):
            continue
        total += sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
        if isinstance(module, Projection) and module.packed is not None:
            total += sum(x.numel() * x.element_size() for x in module.packed.to_dict().values())
    return total


def copy_rate() -> float:
    """Bytes a second of a large copy, read and written."""
    if DEVICE == "cpu":
        return float("inf")
    x = torch.empty(1 << 30, dtype=torch.float32, device=DEVICE)
    y = torch.empty_like(x)
    y.copy_(x)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        y.copy_(x)
    torch.cuda.synchronize()
    return 5 * 2 * x.nbytes / (time.perf_counter() - started)


def options(arguments: argparse.Namespace, tokens: int, **more: object) -> GenerationConfig:
    given = dict(max_new_tokens=tokens, ignore_eos=True, loop_tokens=0, cache_bits=arguments.cache_bits)
    return GenerationConfig(**{**given, **more})


def _peak() -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0


def decode(arguments: argparse.Namespace) -> list[dict]:
    """Tokens/s of one text, by weights' bits, with launched and recorded steps, with and without drafts."""
    rows, roof = [], copy_rate()
    prompt = list(range(1, 1 + arguments.prompt))
    for bits in arguments.bits:
        model = build(arguments, bits)
        for recorded, drafts in ((False, False), (True, False), (True, True)):
            if recorded and DEVICE == "cpu":
                continue
            engine = StreamingGenerationEngine(model, options(arguments, WARM + arguments.tokens, drafts=drafts))
            engine._record = RecordedWork(recorded)
            stream = engine.generate(prompt)
            for _ in range(WARM):
                next(stream)
            begun = (engine.statistics.seconds, engine.statistics.backbone_calls, engine.statistics.tokens)
            for _ in stream:
                pass
            done = engine.statistics
            seconds, calls = done.seconds - begun[0], done.backbone_calls - begun[1]
            moved = weight_bytes(model) + 2 * done.state_bytes + done.cache_bytes
            made = done.tokens - begun[2]
            row = dict(bits=bits, recorded=recorded, drafts=drafts, tokens_per_second=made / seconds,
                       milliseconds_a_step=1e3 * seconds / calls, gigabytes_per_second=moved * calls / seconds / 1e9,
                       share=moved * calls / seconds / roof, peak_gb=_peak())  # fmt: skip
            rows.append(row)
            print("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                            for key, value in row.items()), flush=True)  # fmt: skip
        del model, engine, stream
    return rows


def long(arguments: argparse.Namespace) -> list[dict]:
    """One long text without drafts: speed over its first and last part, memory at both."""
    model, rows = build(arguments, arguments.bits[0]), []
    engine = StreamingGenerationEngine(model, options(arguments, arguments.tokens, drafts=arguments.drafts))
    part = min(8192, arguments.tokens // 4)
    marks, began = {}, None
    for made, _ in enumerate(engine.generate(list(range(1, 1 + arguments.prompt))), 1):
        if made in (WARM, WARM + part, arguments.tokens - part, arguments.tokens):
            allocated = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
            marks[made] = (engine.statistics.seconds, allocated)
            began = began or marks[made]
    (a, _), (b, memory), (c, _), (d, memory_end) = (marks[n] for n in sorted(marks))
    first, last = part / (b - a), part / (d - c)
    row = dict(tokens=arguments.tokens, first=first, last=last, ratio=last / first, memory_growth=memory_end - memory,
               repetition=engine.statistics.repetition, finite=bool(engine.state.hidden.isfinite().all()))  # fmt: skip
    print(f"tokens/s over the first {part:,}: {first:.1f}, over the last: {last:.1f}, ratio {last / first:.3f}; memory "
          f"grew by {memory_end - memory:,} bytes; state finite: {row['finite']}")  # fmt: skip
    rows.append(row)
    return rows


def prefill(arguments: argparse.Namespace) -> list[dict]:
    """Tokens/s of prompts of two lengths, and the peak of memory beside the weights."""
    model, rows = build(arguments, arguments.bits[0]), []
    generator = torch.Generator().manual_seed(0)
    for length in arguments.lengths:
        prompt = torch.randint(0, model.config.vocab_size, (length,), generator=generator).tolist()
        engine = StreamingGenerationEngine(model, options(arguments, 1, prefill_chunk=arguments.chunk))
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        list(engine.generate(prompt))
        seconds = engine.statistics.prefill_seconds
        flops = 2 * model.config.matrix_parameters * length / seconds
        row = dict(length=length, seconds=seconds, tokens_per_second=length / seconds, tflops=flops / 1e12,
                   beside_gb=_peak() - held / 1e9)  # fmt: skip
        rows.append(row)
        print(f"{length:,} tokens: {seconds:.2f} s, {length / seconds:,.0f} tok/s, {flops / 1e12:.1f} TFLOP/s by the "
              f"matrices alone, {row['beside_gb']:.2f} GB beside weights and state", flush=True)  # fmt: skip
        del engine
    return rows


def batch(arguments: argparse.Namespace) -> list[dict]:
    """Tokens/s of many texts against how many run at once."""
    model, rows = build(arguments, arguments.bits[0]), []
    for size in arguments.batches:
        engine = StreamingGenerationEngine(
            model, options(arguments, arguments.tokens, drafts=arguments.drafts), batch=size
        )
        requests = [Request(list(range(1, 2 + arguments.prompt + i % 7)), seed=i) for i in range(2 * size)]
        list(engine.serve(requests[:size]))  # compiles and records
        started = time.perf_counter()
        made = sum(len(chunk.ids) for chunk in engine.serve(requests))
        rate = made / (time.perf_counter() - started)
        rows.append(dict(batch=size, tokens_per_second=rate, peak_gb=_peak()))
        gain = rate / rows[0]["tokens_per_second"]
        print(f"{size} at once: {rate:,.1f} tok/s, {gain:.2f} of one, memory {_peak():.1f} GB", flush=True)
        del engine
    if arguments.out:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
        axis.plot([row["batch"] for row in rows], [row["tokens_per_second"] for row in rows], "o-")
        axis.set(xlabel="texts at once", ylabel="tokens/s", ylim=(0, None))
        axis.grid(alpha=0.3)
        figure.savefig(arguments.out, dpi=120)
    return rows


PARTS = {"decode": decode, "long": long, "prefill": prefill, "batch": batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--preset", choices=tuple(PRESETS), default="full")
    parser.add_argument("--bits", type=int, nargs="+", choices=(16, 8, 4), default=[16], help="of the weights")
    parser.add_argument("--cache-bits", type=int, choices=(16, 8, 4), default=8)
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=256, help="of a text")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32_768, 1_048_000])
    parser.add_argument("--chunk", type=int, default=16_384)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--out", help="picture of the batches")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"{arguments.preset} on {device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    with torch.no_grad():
        rows = PARTS[arguments.part](arguments)
    print(json.dumps({"part": arguments.part, "preset": arguments.preset, "rows": rows}))


if __name__ == "__main__":
    main()
