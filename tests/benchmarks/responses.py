"""A supervised run on conversations after pre-training: loss on held-out answers, answers that end, masked prompts.

    pip download chatterbot-corpus --no-deps && unzip chatterbot_corpus-*.whl
    python tests/benchmarks/responses.py --conversations chatterbot_corpus/data/english --out talk \\
        --text prose.jsonl.xz --pretrain-tokens 10_000_000 --preset small
    python tests/benchmarks/responses.py --conversations talk.jsonl --out talk --weights runs/NAME/final.safetensors

1. Conversations are read from .jsonl ({"messages": [{"role", "content"}, ...]}) or from a folder of .yml in the
   corpus's own form (needs PyYAML). They are split by first message: no held-out prompt occurs in training, whatever
   its answer.
2. Both texts pass through one tokenizer: that of the pre-training corpus, or the one in the weights file.
3. Pre-training, unless --weights is given, and the supervised run go through the product's own command; the second
   starts by --initial-weights, with every rate times --rate-factor and without soft orthogonality.
4. Before and after: loss of held-out answers; share of held-out prompts whose greedy answer (no penalties) ends by
   <|end|> within 64 tokens; how long answers are and how many differ, beside the corpus's own.
5. On nano in float32: the gradient of the loss with respect to the logits is exactly zero at prompt positions, and
   another target there changes no bit of any parameter's gradient.

Prints a table, some answers and one JSON line; the training log goes to standard error.
"""

import argparse
import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import main as product  # noqa: E402
from custom_kernels import fused_chunked_cross_entropy  # noqa: E402
from dataset_pipeline import (  # noqa: E402
    DRAFT_STRIDE,
    TokenFile,
    decode_bytes,
    encode_chat,
    encode_prompt,
    open_tokens,
    prepare,
    special_names,
)
from generation_engine import StreamingGenerationEngine  # noqa: E402
from model_config import GenerationConfig, PrecisionConfig, preset  # noqa: E402
from train_engine import TrainingEngine, describe_device, evaluate, load_weights, read_weights_info  # noqa: E402

ANSWER_TOKENS = 64
Turns = list[dict[str, str]]  # messages of one conversation, a user's first


# ---------------------------------------------------------------------------
# Conversations


def read_conversations(path: Path) -> list[Turns]:
    """Read .jsonl of messages, or a folder of .yml files with lists of alternating turns."""
    if path.is_dir():
        return [turns for file in sorted(path.glob("*.yml")) for turns in _read_yaml(file)]
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            messages = json.loads(line)["messages"]
            roles = [message["role"] for message in messages]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}:{number} must be JSON with messages of role and content") from None
        if roles[:2] != ["user", "assistant"]:
            raise ValueError(f"{path}:{number} must begin with a user's message and an answer, got {roles[:2]}")
        found.append(messages)
    return found


def _read_yaml(file: Path) -> list[Turns]:
    try:
        import yaml
    except ImportError:
        raise ValueError("reading .yml needs PyYAML, found none; pip install pyyaml, or give .jsonl") from None
    found = []
    # strings only: `- Yes` is an answer and no truth value
    for said in yaml.load(file.read_text("utf-8"), Loader=yaml.BaseLoader)["conversations"]:
        turns = [text.strip() for text in said[: len(said) // 2 * 2]]  # a question without an answer teaches nothing
        if len(turns) >= 2 and all(turns):
            found.append([{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)])
    return found


def opening(turns: Turns) -> str:
    """Return a conversation's first message as it is compared: without case and outer space."""
    return turns[0]["content"].strip().casefold()


def split(conversations: list[Turns], fraction: float) -> tuple[list[Turns], list[Turns]]:
    """Hold out a fraction of the distinct first messages, with every conversation that begins so."""
    openings = sorted({opening(turns) for turns in conversations}, key=lambda x: hashlib.sha256(x.encode()).digest())
    held = set(openings[: max(1, round(fraction * len(openings)))])
    if len(held) == len(openings):
        raise ValueError(f"conversations must have at least 2 different first messages, got {len(openings)}")
    kept = [turns for turns in conversations if opening(turns) not in held]
    return kept, [turns for turns in conversations if opening(turns) in held]


def write_split(conversations: list[Turns], folder: Path, tokenizer: Path) -> TokenFile:
    """Encode conversations with a given tokenizer as folder/tokens.bin and open it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"messages": turns}, ensure_ascii=False) + "\n" for turns in conversations)
    (folder / "talk.jsonl").write_text("".join(lines), "utf-8")
    prepare(folder / "talk.jsonl", folder, tokenizer=tokenizer, validation_fraction=0.0)
    return open_tokens(folder / "tokens.bin")


# ---------------------------------------------------------------------------
# Runs


def train(flags: Sequence[object]) -> None:
    """Run the product's train command; its log goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        code = product.main(["train", *map(str, flags)])
    if code:
        raise SystemExit(code)


def pretrain(arguments: argparse.Namespace, out: Path) -> Path:
    """Prepare the text and train on it: the weights file."""
    with contextlib.redirect_stdout(sys.stderr):
        prepare(arguments.text, out / "text", vocab_size=arguments.vocab_size)
    train([
        "--preset", arguments.preset, "--device", arguments.device, "--data", out / "text/tokens.bin",
        "--total-tokens", arguments.pretrain_tokens, "--run-dir", out / "pretrained", *arguments.pretrain_flags,
    ])  # fmt: skip
    return out / "pretrained/final.safetensors"


def tune(arguments: argparse.Namespace, weights: Path, talk: TokenFile, held: TokenFile, out: Path) -> Path:
    """Train on the answers, from the weights: the new weights file."""
    optimizer, factor = read_weights_info(weights)["config"].optimizer, arguments.rate_factor
    # a rate that the weights' own rule does not read is refused
    matrix = {"printed": "matrix_lr_base", "spectral": "spectral_lr"}[optimizer.lr_rule]
    rates = (matrix, "vector_lr", "embedding_lr")
    train([
        "--initial-weights", weights, "--device", arguments.device, "--data", talk.path, "--val-data", held.path,
        "--total-tokens", arguments.epochs * len(talk), "--tokens-per-step", arguments.tokens_per_step,
        "--context", arguments.context, "--run-dir", out / "tuned", "--spectral-lambda", 0, "--seed", arguments.seed,
        *(x for name in rates for x in (f"--{name.replace('_', '-')}", factor * getattr(optimizer, name))),
    ])  # fmt: skip
    return out / "tuned/final.safetensors"


def measure(weights: Path, held: TokenFile, prompts: list[str], arguments: argparse.Namespace) -> dict:
    """Return loss and answers of weights on held-out conversations."""
    facts = describe_device(arguments.device)
    wide = facts.kind == "cpu"
    model, info = load_weights(
        weights, facts.kind, dtype=torch.float32 if wide else torch.bfloat16,
        precision=PrecisionConfig(precision="fp32" if wide else "bf16"),
    )  # fmt: skip
    length = min(arguments.context, len(held) - 1)
    result = evaluate(model, held, length)
    options = GenerationConfig(
        max_new_tokens=ANSWER_TOKENS, temperature=0.0, frequency_penalty=0.0, presence_penalty=0.0, cache_bits=16
    )
    end = held.facts["turn_end_id"]
    engine = StreamingGenerationEngine(model, options, end)
    answers, lengths, ended = [], [], 0
    for prompt in prompts:
        ids = encode_chat(info["tokenizer_json"], [("user", prompt)])
        made = list(engine.generate([held.facts["bos_id"], *ids]))
        ended += engine.statistics.stop_reason == "eos"
        made = [token for token in made if token != end]
        lengths.append(len(made))
        answers.append(decode_bytes(info["tokenizer_json"], made).decode("utf-8", "replace"))
    return {
        "loss": result.loss, "accuracy": result.accuracy, "targets": result.targets,
        "ended": ended / len(prompts), "length": sum(lengths) / len(lengths),
        "distinct": len(set(answers)) / len(answers), "answers": answers,
    }  # fmt: skip


# ---------------------------------------------------------------------------
# Proof that prompts carry no gradient


def logit_gradient(logits: Tensor, targets: Tensor, weights: Tensor, denominator: float) -> Tensor:
    """Return the gradient (N, W) of the product's loss with respect to logits (N, W).

    The loss takes hidden states and head: with the identity for hidden states, the head's gradient is this transposed.
    """
    head = logits.detach().T.contiguous().requires_grad_()  # (W, N)
    hidden = torch.eye(len(logits), dtype=logits.dtype)
    fused_chunked_cross_entropy(hidden, head, targets, loss_weights=weights, denominator=denominator).backward()
    return head.grad.T


def answer_targets(ids: list[int], names: dict[int, str]) -> list[bool]:
    """Say of each id but the first whether it belongs to an answer, from the markers alone; ids start a document.

    An answer is what follows <|assistant|>, up to and with <|end|>.
    """
    found, inside = [], False
    for before, token in pairwise(ids):
        name = names.get(before)
        inside = name == "<|assistant|>" or (inside and name is None)
        found.append(inside and names.get(token) in (None, "<|end|>"))
    return found


def prove_mask(tokens: TokenFile, length: int = 256) -> dict:
    """Measure on nano, float32, CPU, what prompts contribute to the gradients of the first row of conversations.

    Prompts are found by the markers in the ids, not by the weights that training uses.
    Without the draft head: it reads the next token as an input, and a changed target would be a changed input. What
    keeps its own targets off the prompts is counted apart.
    """
    config = preset("nano").with_values({
        "vocab_size": tokens.vocab_size, "draft_depth": 0, "context": length, "tokens_per_step": length,
        "micro_batch_tokens": length, "total_tokens": length, "device": "cpu", "precision": "fp32",
    })  # fmt: skip
    engine = TrainingEngine(config, tokens, facts=describe_device("cpu"), log=lambda line: None)
    plan = engine.loader.step_batches(0)
    batch = plan[0]
    weights, targets = batch.loss_weights.flatten(), batch.targets.flatten()
    ids = [*batch.inputs[0].tolist(), max(0, int(targets[-1]))]
    prompt = ~torch.tensor(answer_targets(ids, special_names(tokens.read_tokenizer())))
    assert batch.inputs.shape[0] == 1 and batch.doc_start[0, 0] == 0, "one row, from the start of a document"
    assert prompt.any() and not prompt.all(), "the row must hold prompts and answers"
    with torch.no_grad():
        logits = engine.model.logits(engine.model(batch.inputs, doc_start=batch.doc_start).hidden)[0]
    at_logits = logit_gradient(logits, targets, weights, plan.supervised).abs().amax(1)  # (N,)

    def gradients(changed: Tensor) -> list[Tensor]:
        engine.model.zero_grad(set_to_none=True)
        engine._accumulate(replace(batch, targets=changed.view_as(batch.targets)), plan)
        return [parameter.grad.clone() for parameter in engine.model.parameters()]

    def largest_change(where: Tensor) -> float:
        other = torch.where(where & (targets >= 0), (targets + 1) % config.model.vocab_size, targets)
        assert not torch.equal(other, targets)
        return max((x - y).abs().max().item() for x, y in zip(gradients(other), given, strict=True))

    given = gradients(targets)
    # the draft's target at depth d, at every DRAFT_STRIDE-th place, is the target of the position d places on
    places = torch.arange(0, length, DRAFT_STRIDE)
    places = places[places + 2 < length]
    drafted = [(batch.draft_targets[d - 1, 0, : len(places)] >= 0) & prompt[places + d] for d in (1, 2)]
    return {
        "prompt_positions": int(prompt.sum()), "answer_positions": int((~prompt).sum()),
        "logit_gradient_at_prompts": at_logits[prompt].max().item(),
        "logit_gradient_at_answers": at_logits[~prompt].min().item(),
        "change_by_prompt_targets": largest_change(prompt), "change_by_answer_targets": largest_change(~prompt),
        "draft_targets_on_prompts": sum(int(x.sum()) for x in drafted),
    }  # fmt: skip


def require_mask(proof: dict) -> None:
    """Refuse a result of training that touched prompts."""
    zero = ("logit_gradient_at_prompts", "change_by_prompt_targets", "draft_targets_on_prompts")
    for name in zero:
        if proof[name] != 0:
            raise ValueError(f"{name.replace('_', ' ')} must be exactly 0, got {proof[name]}")
    for name in ("logit_gradient_at_answers", "change_by_answer_targets"):
        if not proof[name] > 0:
            raise ValueError(f"{name.replace('_', ' ')} must be above 0, got {proof[name]}")


# ---------------------------------------------------------------------------
# Report


def run(arguments: argparse.Namespace) -> dict:
    """Do all steps; return what the JSON line holds."""
    began, out = time.perf_counter(), Path(arguments.out)
    training, held_out = split(read_conversations(Path(arguments.conversations)), arguments.held_out)
    weights = Path(arguments.weights) if arguments.weights else pretrain(arguments, out)
    tokenizer_json = read_weights_info(weights)["tokenizer_json"]
    if tokenizer_json is None:
        raise ValueError(f"{weights} holds no tokenizer; train with tokenizer.json beside the token file")
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_bytes(tokenizer_json.encode("utf-8"))
    talk = write_split(training, out / "talk", out / "tokenizer.json")
    held = write_split(held_out, out / "held", out / "tokenizer.json")
    # the rule is checked first
    proof = prove_mask(talk, min(256, len(talk) - 4))
    require_mask(proof)
    references = {opening(turns): turns[1]["content"] for turns in held_out}
    shown = {opening(turns): turns[0]["content"] for turns in held_out}
    prompts = list(shown.values())[: arguments.prompts]
    before = measure(weights, held, prompts, arguments)
    after = measure(tune(arguments, weights, talk, held, out), held, prompts, arguments)
    known = {turns[at]["content"] for turns in training for at in range(1, len(turns), 2)}
    for part in (before, after):
        part["of_training"] = sum(answer in known for answer in part["answers"]) / len(prompts)
    own = [references[key] for key in list(shown)[: arguments.prompts]]
    corpus = {
        "length": sum(len(encode_prompt(tokenizer_json, text)) for text in own) / len(own),
        "distinct": len(set(own)) / len(own), "of_training": sum(text in known for text in own) / len(own),
    }  # fmt: skip
    return {
        "weights": str(weights), "training": len(training), "held_out": len(held_out), "tokens": len(talk),
        "supervised": talk.supervised, "epochs": arguments.epochs, "rate_factor": arguments.rate_factor,
        "prompts": prompts, "references": own, "before": before, "after": after, "corpus": corpus, "mask": proof,
        "device": describe_device(arguments.device).name, "seconds": time.perf_counter() - began,
    }  # fmt: skip


def report(result: dict, samples: int) -> None:
    """Print the table and some answers."""
    before, after, corpus, mask = (result[name] for name in ("before", "after", "corpus", "mask"))
    print(f"\n{result['weights']}, {result['training']:,} conversations, {result['tokens']:,} tokens of which "
          f"{result['supervised']:,} supervised, {result['epochs']} epochs at {result['rate_factor']:g} of the rates; "
          f"{result['held_out']:,} held out, {len(result['prompts'])} prompts; {result['device']}, torch "
          f"{torch.__version__}, {result['seconds']:.0f} seconds")  # fmt: skip
    print(f"{'':52s} {'before':>8s} {'after':>8s} {'corpus':>8s}")
    rows = (
        ("loss of held-out answers, nats a supervised token", "loss", ".4f"),
        ("accuracy", "accuracy", ".4f"),
        (f"answers that end by <|end|> within {ANSWER_TOKENS} tokens", "ended", ".1%"),
        ("mean length of an answer, tokens", "length", ".1f"),
        ("different answers, share", "distinct", ".1%"),
        ("answers found word by word in training", "of_training", ".1%"),
    )
    for title, name, form in rows:
        cells = (f"{part[name]:{form}}" if name in part else "" for part in (before, after, corpus))
        print(f"{title:52s}" + "".join(f" {cell:>8s}" for cell in cells))
    print(f"mask, nano in float32: {mask['prompt_positions']} prompt positions, largest gradient at their logits "
          f"{mask['logit_gradient_at_prompts']:g} (at {mask['answer_positions']} answer positions at least "
          f"{mask['logit_gradient_at_answers']:.1e}); other targets there change gradients by "
          f"{mask['change_by_prompt_targets']:g} (answers' by {mask['change_by_answer_targets']:.1e})")  # fmt: skip
    for at in range(min(samples, len(result["prompts"]))):
        print(f"\n  user:   {result['prompts'][at]}")
        print(f"  before: {before['answers'][at]!r}")
        print(f"  after:  {after['answers'][at]!r}")
        print(f"  corpus: {result['references'][at]!r}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", required=True, help=".jsonl of messages, or a folder of .yml")
    parser.add_argument("--out", required=True, help="folder for token files and runs")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--weights", help="of a pre-training")
    source.add_argument("--text", nargs="+", help="what to pre-train on")
    parser.add_argument("--preset", default="small", help="of the pre-training")
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--pretrain-tokens", type=int, default=10_000_000)
    parser.add_argument("--held-out", type=float, default=0.1, help="share of the first messages")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rate-factor", type=float, default=0.1, help="of the supervised run's rates")
    parser.add_argument("--prompts", type=int, default=100, help="most prompts to answer")
    parser.add_argument("--samples", type=int, default=5, help="answers to print")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--pretrain-flags", nargs=argparse.REMAINDER, default=[], help="for train; must be last")
    arguments = parser.parse_args(argv)
    try:
        result = run(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(result, arguments.samples)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
