"""Loss per token against a dense Transformer: equal parameters, equal tokens, the same batches in the same order.

    python tests/benchmarks/learn.py --data data/tokens.bin --tokens 10_000_000 --context 1024 --out learned

The baseline is a pre-norm decoder (rotary attention with QK normalisation, SwiGLU, tied embedding scaled as usual) with
decoupled weight decay Adam (beta2 0.95), warm-up and cosine; for each of three warm-ups its rate is the best of a
grid that is extended until the best point is interior. Documents are masked for both, targets never cross them. The
product runs through its own command. Prints a table and one JSON line; writes a picture.
"""

import argparse
import json
import math
import subprocess
import sys
import time
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


def train_dense(
    model: DenseTransformer, rate: float, warmup: float, loader: PackedSequenceDataLoader, steps: int, val: list,
    device: torch.device,
) -> dict:  # fmt: skip
    """Train on the loader's own batches; return the curve and the validation loss in nats."""
    decayed = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=plain, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=device.type == "cuda")
    curve, begin = [], time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * cosine_rate(step, steps, warmup)
        plan, total = loader.step_batches(step), 0.0
        for batch in plan:
            loss = dense_loss(model, batch, device).sum() / plan.supervised
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == steps - 1:
            curve.append((step + 1, total.item()))
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        pairs = [(dense_loss(model, b, device).sum().item(), float(b.supervised)) for b in val]
    nats = sum(p[0] for p in pairs) / sum(p[1] for p in pairs)
    return dict(rate=rate, warmup=warmup, validation=nats, curve=curve, seconds=seconds)


def dense_loss(model: DenseTransformer, batch, device: torch.device) -> Tensor:
    """Return the summed cross entropy of each row's supervised targets."""
    logits = model(batch.inputs.to(device), batch.doc_start.to(device))
    targets, weights = batch.targets.to(device).flatten(), batch.loss_weights.to(device).flatten()
    return F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none", ignore_index=-100) * weights


def tune_dense(arguments: argparse.Namespace, device: torch.device) -> list[dict]:
    """Train the baseline over a doubling grid of rates for either warm-up, extended until the best is interior."""
    tokens = open_tokens(arguments.data)
    val = open_tokens(Path(arguments.data).with_name("tokens.val.bin"))
    config = replace(preset(arguments.preset).model, vocab_size=tokens.vocab_size)
    curriculum = replace(preset(arguments.preset).curriculum, context=arguments.context)
    stages, _ = build_curriculum(arguments.tokens, curriculum, max_context_len=config.max_context_len)
    steps = sum(s.steps for s in stages)
    runs: dict[tuple[float, float], dict] = {}
    pending = [(warmup, rate) for warmup in arguments.warmups for rate in (1e-3, 2e-3, 4e-3)]
    while pending:
        warmup, rate = pending.pop(0)
        torch.manual_seed(0)
        model = dense_for(config.matrix_parameters, config.vocab_size, config.hidden_dim, config.layers,
                          config.num_query_heads, arguments.context).to(device)  # fmt: skip
        loader = PackedSequenceDataLoader(tokens, stages, seed=0, micro_batch_tokens=32768)
        batches = list(validation_batches(val, arguments.context, arguments.val_tokens, micro_batch_tokens=32768))
        runs[warmup, rate] = train_dense(model, rate, warmup, loader, steps, batches, device)
        print(f"{dense_name(runs[warmup, rate])}: validation {runs[warmup, rate]['validation']:.4f} nats", flush=True)
        rates = sorted(r for w, r in runs if w == warmup)
        best = min(rates, key=lambda r: runs[warmup, r]["validation"])
        if all(w != warmup for w, _ in pending) and best in (rates[0], rates[-1]):
            pending.insert(0, (warmup, best / 2 if best == rates[0] else best * 2))
    return [runs[key] for key in sorted(runs)]


def dense_name(run: dict) -> str:
    """Name a baseline run by its two choices."""
    return f"dense, rate {run['rate']:.1e}, warm-up {run['warmup']:.0%}"


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
    """Plot training loss against steps for the best baseline and every product seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    best = min(dense, key=lambda r: r["validation"])
    axes.plot(*zip(*best["curve"], strict=True), label=dense_name(best), color="tab:gray")
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
    parser.add_argument("--warmups", type=float, nargs="+", default=[0.1, 0.2, 0.4], help="shares, of the baseline")
    parser.add_argument("--out", required=True)
    parser.add_argument("--product-flags", nargs=argparse.REMAINDER, default=[], help="for train; must be last")
    arguments = parser.parse_args()
    # the baseline's schedule is checked first: one that stays high would hand the comparison to the product
    assert [round(cosine_rate(step, 305, 0.02), 3) for step in (0, 5, 6, 150, 304)] == [0.167, 1.0, 1.0, 0.531, 0.01]
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    product = [train_product(arguments, seed) for seed in arguments.seeds]
    dense = tune_dense(arguments, device)
    draw(dense, product, Path(arguments.out) / "learn.png")
    best = min(dense, key=lambda r: r["validation"])
    # the baseline sees the same tokens, so nats convert to bits per byte by the product's own ratio
    ratio = product[0]["bits"] / product[0]["validation"]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"\n{arguments.tokens:,} tokens, rows of {arguments.context:,}, {name}, torch {torch.__version__}")
    print(f"{'model':34s} {'nats':>8s} {'bits/byte':>10s} {'seconds':>8s}")
    for run in dense:
        print(f"{dense_name(run):34s} {run['validation']:8.4f} {run['validation'] * ratio:10.4f} "
              f"{run['seconds']:8.1f}")  # fmt: skip
    for run in product:
        print(f"hybrid, seed {run['seed']:<21d} {run['validation']:8.4f} {run['bits']:10.4f} {run['seconds']:8.1f}")
    ahead = best["validation"] - max(run["validation"] for run in product)
    print(f"hybrid's worst seed is ahead by {ahead:.3f} nats, {ahead * ratio:.3f} bits per byte")
    print(json.dumps({"dense": dense, "product": product, "device": name, "tokens": arguments.tokens}))


if __name__ == "__main__":
    main()
