"""The full model on a machine where only a few of its layers fit: seconds a token and peak memory, from random weights.

    python tests/benchmarks/stream_layers.py --folder /path/with/25GB [--tokens 3] [--preset full]

Writes a weights file of the preset (one random block, repeated and scaled, so that 22 GB take no time to draw), never
holding more than one tensor; generates from it in a process of its own with --stream-layers, whose largest resident
set is what is printed; and removes the file. What is said by random weights means nothing.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import train_engine  # noqa: E402
from hybrid_model import HybridLanguageModel  # noqa: E402
from model_config import PRESETS, Config, GenerationConfig, PrecisionConfig, preset  # noqa: E402

PROMPT = [7, 1, 30, 2]


def write_random_weights(path: Path, config: Config) -> int:
    """Write a weights file of random tensors, one at a time; return its bytes."""
    with torch.device("meta"):
        model = HybridLanguageModel(config.model, config.precision)
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))

    def tensor(spec) -> torch.Tensor:
        count = spec.parameter.numel()
        if spec.role == "vector":
            return torch.zeros(spec.parameter.shape)
        std = 1.0 if spec.role == "embedding" else spec.fan_in**-0.5 * (0.1 if spec.role == "gate" else 1.0)
        return (block * std).repeat(-(-count // len(block)))[:count].view(spec.parameter.shape)

    table, offset, header, checks = sorted(model.parameter_table()), 0, {}, {}
    for spec in table:
        begin, offset = offset, offset + 4 * spec.parameter.numel()
        header[spec.name] = {"dtype": "F32", "shape": list(spec.parameter.shape), "data_offsets": [begin, offset]}
        checks[spec.name] = train_engine._crc32(tensor(spec))
    info = {"format_version": train_engine.FORMAT_VERSION, "packed_bits": None, "config": asdict(config),
            "tokenizer_json": None, "eos_id": None, "bos_id": None, "turn_end_id": None, "crc32": checks}  # fmt: skip
    info["info_crc32"] = train_engine._info_crc32(info)
    header["__metadata__"] = {train_engine._WEIGHTS_KEY: json.dumps(info, sort_keys=True)}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for spec in table:
            file.write(memoryview(tensor(spec).view(-1).numpy()).cast("B"))
    return path.stat().st_size


def generate(path: Path, tokens: int) -> None:
    """In a process of its own: load, generate, print one JSON line."""
    from generation_engine import StreamingGenerationEngine

    started = time.perf_counter()
    model, _ = train_engine.load_weights(path, precision=PrecisionConfig(precision="fp32"), stream_layers=True)
    options = GenerationConfig(max_new_tokens=tokens, ignore_eos=True, cache_bits=8)
    engine = StreamingGenerationEngine(model, options, max_length=min(4096, model.config.max_context_len))
    loaded = time.perf_counter() - started
    ids = list(engine.generate(PROMPT))
    figures = engine.statistics
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(dict(loaded=loaded, prefill=figures.prefill_seconds, seconds=figures.seconds, tokens=len(ids),
                          calls=figures.backbone_calls, peak=peak)))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="for the weights file, which is removed again")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="full")
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.generate:
        generate(Path(arguments.generate), arguments.tokens)
        return
    path = Path(arguments.folder) / "random.safetensors"
    config = preset(arguments.preset)
    try:
        started = time.perf_counter()
        size = write_random_weights(path, config)
        print(f"{arguments.preset}: {config.model.total_parameters:,} parameters, file of {size / 1e9:.2f} GB, written "
              f"in {time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
        command = [sys.executable, __file__, "--folder", arguments.folder, "--generate", str(path),
                   "--tokens", str(arguments.tokens)]  # fmt: skip
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    finally:
        path.unlink(missing_ok=True)
    made = json.loads(line)
    print(f"loaded in {made['loaded']:.1f} s, prompt of {len(PROMPT)} in {made['prefill']:.1f} s")
    print(f"{made['tokens']} tokens in {made['seconds']:.1f} s, {made['seconds'] / made['calls']:.1f} s a pass")
    print(f"largest resident set: {made['peak'] / 1e9:.2f} GB of a file of {size / 1e9:.2f} GB")
    print(line)


if __name__ == "__main__":
    main()
