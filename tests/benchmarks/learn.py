"""Loss per token against a dense Transformer: equal parameters, equal tokens, the same batches in the same order.

    python tests/benchmarks/learn.py --data data/tokens.bin --tokens 10_000_000 --context 1024 --out learned

The baseline is a pre-norm decoder (rotary attention with QK normalisation, SwiGLU, tied embedding scaled as usual),
trained by decoupled weight decay Adam (beta2 0.95) alone, or by torch.optim.Muon for the matrices of its layers and
Adam for the rest; linear warm-up, one cosine to 1 %. Warm-up and every rate are tuned: from a start, neighbours on a
doubling grid are tried until the best point has worse ones on both sides of each rate. Documents are masked for all,
targets never cross them. The product runs through its own command at its preset's rates. Prints a table and one JSON
line; writes a picture.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dataset_pipeline import PackedSequenceDataLoader, build_curriculum, open_tokens, validation_batches  # noqa: E402
from model_config import preset  # noqa: E402


class DenseLayer(nn.Module):
    """Pre-norm attention and SwiGLU, plain PyTorch."""

    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * ffn, bias=False), nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        q, k = (self._rotate(F.rms_norm(t, t.shape[-1:]), cos, sin) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v.contiguous(), attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class DenseTransformer(nn.Module):
    """Decoder with a tied head; initialised N(0, 0.02), residual projections scaled by 1/sqrt(2 layers)."""

    def __init__(self, vocab: int, width: int, layers: int, heads: int, ffn: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(DenseLayer(width, heads, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        frequency = 10000.0 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.arange(context)[:, None] * frequency
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, 0, 0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, ids: Tensor, doc_start: Tensor) -> Tensor:
        index = torch.arange(ids.shape[1], device=ids.device)
        mask = (index[None, None, :] >= doc_start[:, :, None]) & (index[:, None] >= index)[None]
        x = self.embedding(ids)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            for layer in self.layers:
                x = layer(x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]], mask[:, None])
            return F.linear(self.norm(x), self.embedding.weight)


def dense_for(parameters: int, vocab: int, width: int, layers: int, heads: int, context: int) -> DenseTransformer:
    """Build a dense model of the product's width and depth whose parameter count is within 2 %."""
    fixed = vocab * width + layers * 4 * width * width
    ffn = round((parameters - fixed) / (3 * width * layers) / 16) * 16
    model = DenseTransformer(vocab, width, layers, heads, ffn, context)
    count = sum(p.numel() for p in model.parameters())
    assert abs(count / parameters - 1) < 0.02, (count, parameters)
    return model


def cosine_rate(step: int, steps: int, share: float) -> float:
    """Return the baseline's rate factor: linear warm-up over that share, then one cosine to 0.01 at the last step."""
    warmup = max(1, round(share * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def dense_optimizers(model: DenseTransformer, kind: str, rates: dict[str, float], fused: bool) -> list:
    """Return the optimizers of a baseline; each group keeps its peak rate under "peak"."""
    inner = [p for p in model.layers.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() == 1]
    others = [model.embedding.weight] if kind == "muon" else [model.embedding.weight, *inner]
    groups = [dict(params=others, weight_decay=0.1), dict(params=plain, weight_decay=0.0)]
    made = [torch.optim.AdamW(groups, lr=rates["adam"], betas=(0.9, 0.95), eps=1e-8, fused=fused)]
    if kind == "muon":
        made.append(torch.optim.Muon(inner, lr=rates["matrix"], weight_decay=0.1, momentum=0.95, nesterov=True,
                                     adjust_lr_fn="match_rms_adamw"))  # fmt: skip
    for group in (group for optimizer in made for group in optimizer.param_groups):
        group["peak"] = group["lr"]
    return made


def train_dense(
    model: DenseTransformer, kind: str, point: dict, loader: PackedSequenceDataLoader, steps: int, val: list,
    device: torch.device,
) -> dict:  # fmt: skip
    """Train on the loader's own batches; return the curve and the validation loss in nats."""
    optimizers = dense_optimizers(model, kind, point, device.type == "cuda")
    curve, begin = [], time.perf_counter()
    for step in range(steps):
        plan, total = loader.step_batches(step), 0.0
        for batch in plan:
            loss = dense_loss(model, batch, device).sum() / plan.supervised
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * cosine_rate(step, steps, point["warm-up"])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == steps - 1:
            curve.append((step + 1, total.item()))
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        pairs = [(dense_loss(model, b, device).sum().item(), float(b.supervised)) for b in val]
    nats = sum(p[0] for p in pairs) / sum(p[1] for p in pairs)
    return dict(kind=kind, point=point, validation=nats, curve=curve, seconds=seconds)


def dense_loss(model: DenseTransformer, batch, device: torch.device) -> Tensor:
    """Return the summed cross entropy of each row's supervised targets."""
    logits = model(batch.inputs.to(device), batch.doc_start.to(device))
    targets, weights = batch.targets.to(device).flatten(), batch.loss_weights.to(device).flatten()
    return F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none", ignore_index=-100) * weights


WARMUPS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6)
# where the search begins: index of WARMUPS, and rates as powers of two of 1e-3 (Adam) and 1e-2 (Muon's matrices)
STARTS = {"adamw": {"warm-up": 4, "adam": 1}, "muon": {"warm-up": 3, "adam": 1, "matrix": 0}}


def search(start: dict[str, int], run: Callable[[dict[str, int]], float]) -> list[dict[str, int]]:
    """Walk to a point whose neighbours along each axis are all worse; return every point that was run."""
    seen: dict[tuple, float] = {}

    def value(point: dict[str, int]) -> float:
        key = tuple(point.values())
        if key not in seen:
            seen[key] = run(point)
        return seen[key]

    best, moved = start, True
    while moved:
        moved = False
        for axis in start:
            for step in (1, -1):
                other = best | {axis: best[axis] + step}
                if axis == "warm-up" and not 0 <= other[axis] < len(WARMUPS):
                    continue
                if value(other) < value(best):
                    best, moved = other, True
    return [dict(zip(start, key, strict=True)) for key in seen]


def tune_dense(arguments: argparse.Namespace, kind: str, device: torch.device) -> list[dict]:
    """Train a baseline at every point that the search asks for."""
    tokens = open_tokens(arguments.data)
    val = open_tokens(Path(arguments.data).with_name("tokens.val.bin"))
    config = replace(preset(arguments.preset).model, vocab_size=tokens.vocab_size)
    curriculum = replace(preset(arguments.preset).curriculum, context=arguments.context)
    stages, _ = build_curriculum(arguments.tokens, curriculum, max_context_len=config.max_context_len)
    micro = 32768
    loader = PackedSequenceDataLoader(tokens, stages, seed=0, micro_batch_tokens=micro)
    batches = list(validation_batches(val, arguments.context, arguments.val_tokens, micro_batch_tokens=micro))
    runs: list[dict] = []

    def run(indices: dict[str, int]) -> float:
        units = {"adam": 1e-3, "matrix": 1e-2}
        point = {k: WARMUPS[i] if k == "warm-up" else units[k] * 2.0**i for k, i in indices.items()}
        torch.manual_seed(0)
        model = dense_for(config.matrix_parameters, config.vocab_size, config.hidden_dim, config.layers,
                          config.num_query_heads, arguments.context).to(device)  # fmt: skip
        runs.append(train_dense(model, kind, point, loader, loader.total_steps, batches, device))
        print(f"{dense_name(runs[-1])}: validation {runs[-1]['validation']:.4f} nats", flush=True)
        return runs[-1]["validation"]

    search(STARTS[kind], run)
    return runs


def dense_name(run: dict) -> str:
    """Name a baseline run by its choices."""
    rates = ", ".join(f"{k} {v:.0%}" if k == "warm-up" else f"{k} {v:.1e}" for k, v in run["point"].items())
    return f"dense {run['kind']}, {rates}"


def train_product(arguments: argparse.Namespace, seed: int) -> dict:
    """Train the product through its own command; return its curve and final validation loss."""
    run_dir = Path(arguments.out) / f"product-{seed}"
    command = [
        sys.executable, str(ROOT / "main.py"), "train", "--preset", arguments.preset, "--data", str(arguments.data),
        "--context", str(arguments.context), "--total-tokens", str(arguments.tokens), "--seed", str(seed),
        "--run-dir", str(run_dir), "--eval-tokens", str(arguments.val_tokens), *arguments.product_flags,
    ]  # fmt: skip
    begin = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - begin
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    curve = [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]
    final = [r for r in records if r["kind"] == "validation"][-1]
    return dict(seed=seed, validation=final["loss"], bits=final["bits_per_byte"], curve=curve, seconds=seconds)


def draw(dense: list[dict], product: list[dict], path: Path) -> None:
    """Plot training loss against steps for the best of each baseline and every product seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for kind, color in (("adamw", "tab:gray"), ("muon", "black")):
        if mine := [run for run in dense if run["kind"] == kind]:
            best = min(mine, key=lambda r: r["validation"])
            axes.plot(*zip(*best["curve"], strict=True), label=dense_name(best), color=color)
    for run in product:
        axes.plot(*zip(*run["curve"], strict=True), label=f"hybrid, seed {run['seed']}")
    axes.set(xlabel="step", ylabel="training loss, nats a token", ylim=(2, 9))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--val-tokens", type=int, default=300_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--baselines", nargs="+", choices=tuple(STARTS), default=list(STARTS))
    parser.add_argument("--out", required=True)
    parser.add_argument("--product-flags", nargs=argparse.REMAINDER, default=[], help="for train; must be last")
    arguments = parser.parse_args()
    # the baseline's schedule is checked first: one that stays high would hand the comparison to the product
    assert [round(cosine_rate(step, 305, 0.02), 3) for step in (0, 5, 6, 150, 304)] == [0.167, 1.0, 1.0, 0.531, 0.01]
    # so is the search: it must end at the best point, with both sides of every rate tried
    tried = search({"warm-up": 0, "adam": 0}, lambda p: (p["warm-up"] - 2) ** 2 + (p["adam"] + 3 - p["warm-up"]) ** 2)
    assert all({"warm-up": 2, "adam": a} in tried for a in (-2, -1, 0)), tried
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    product = [train_product(arguments, seed) for seed in arguments.seeds]
    dense = [run for kind in arguments.baselines for run in tune_dense(arguments, kind, device)]
    draw(dense, product, Path(arguments.out) / "learn.png")
    # the baselines see the same tokens, so nats convert to bits per byte by the product's own ratio
    ratio = product[0]["bits"] / product[0]["validation"]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"\n{arguments.tokens:,} tokens, rows of {arguments.context:,}, {name}, torch {torch.__version__}")
    print(f"{'model':54s} {'nats':>8s} {'bits/byte':>10s} {'seconds':>8s}")
    for run in dense:
        print(f"{dense_name(run):54s} {run['validation']:8.4f} {run['validation'] * ratio:10.4f} "
              f"{run['seconds']:8.1f}")  # fmt: skip
    for run in product:
        print(f"hybrid, seed {run['seed']:<41d} {run['validation']:8.4f} {run['bits']:10.4f} {run['seconds']:8.1f}")
    for kind in arguments.baselines:
        best = min((run for run in dense if run["kind"] == kind), key=lambda r: r["validation"])
        ahead = best["validation"] - max(run["validation"] for run in product)
        print(f"{dense_name(best)}: hybrid's worst seed is ahead by {ahead:.3f} nats, {ahead * ratio:.3f} bits a byte")
    print(json.dumps({"dense": dense, "product": product, "device": name, "tokens": arguments.tokens}))


if __name__ == "__main__":
    main()
