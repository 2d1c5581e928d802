"""Command line: prepare, train, evaluate, generate, plan.

Every field of model_config.py is a flag of the same name (--tokens-per-step for tokens_per_step), its help the comment
above the field; nothing is restated here. An error that a user can cause is one line on standard error and exit
code 2; text goes to standard output, figures to standard error.
"""

import argparse
import ast
import inspect
import sys
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import torch

import model_config
from dataset_pipeline import TextDecoder, TokenFile, bytes_of_id, demo_corpus, encode_prompt, open_tokens, prepare
from generation_engine import GenerationStatistics, StreamingGenerationEngine
from hybrid_model import HybridLanguageModel
from model_config import PRESETS, Config, PrecisionConfig, preset, suggest_name
from train_engine import (
    DeviceFacts,
    TrainingEngine,
    TrainingError,
    choose_preset,
    describe_device,
    evaluate,
    load_weights,
    multiple_choice,
    next_run_dir,
    plan,
    preflight,
    read_run_config,
    require_precision,
)

__all__ = ["build_parser", "main"]

# ---------------------------------------------------------------------------
# Flags


def _field_notes() -> dict[str, str]:
    """Read {field name: comment above it} off model_config.py, so that --help says what the source says."""
    source = inspect.getsource(model_config)
    lines = source.splitlines()
    notes = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above, at = [], node.lineno - 2
            while lines[at].lstrip().startswith("#"):
                above.insert(0, lines[at].lstrip().lstrip("# "))
                at -= 1
            notes[node.target.id] = " ".join(above)
    return notes


def _form(hint: object) -> dict[str, object]:
    """argparse keywords for a field's type; a type without a form is a programming error."""
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (a for a in get_args(hint) if a is not type(None))
        return _form(inner)
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "type": type(get_args(hint)[0])}
    if hint is int:
        return {"type": _integer, "metavar": "N"}
    if hint in (float, str):
        return {"type": hint, "metavar": "X" if hint is float else "TEXT"}
    raise TypeError(f"no command line form for field type {hint}")


def _integer(text: str) -> int:
    """Read 1_000_000, 250e6 or 64k as an integer."""
    scale = {"k": 10**3, "m": 10**6, "b": 10**9}.get(text[-1:].lower(), 1)
    value = float((text[:-1] if scale > 1 else text).replace("_", "").replace(",", "")) * scale
    if value != int(value):
        raise ValueError(text)
    return int(value)


def _add_fields(parser: argparse.ArgumentParser, sections: tuple[str, ...], only: tuple[str, ...] = ()) -> None:
    notes = _field_notes()
    for section in sections:
        cls = get_type_hints(Config)[section]
        group = parser.add_argument_group(f"{section} settings")
        hints = get_type_hints(cls)
        for f in fields(cls):
            if only and f.name not in only:
                continue
            # a percent sign would start one of argparse's own formats
            note = f"{notes.get(f.name, '')} [full: {f.default}]".strip().replace("%", "%%")
            flag = f"--{f.name.replace('_', '-')}"
            group.add_argument(flag, dest=f.name, default=argparse.SUPPRESS, help=note, **_form(hints[f.name]))


def build_parser() -> argparse.ArgumentParser:
    """Build the command line; every configuration field is a flag of train and plan."""
    parser = argparse.ArgumentParser(
        prog="main.py",
        description="Train a hybrid language model from a token file and generate long text from it.",
        epilog=(
            "start here:\n"
            "  python main.py train                                   a demo: text from this Python, minutes on a CPU\n"
            "  python main.py prepare --text FOLDER --out data        text to data/tokens.bin and a tokenizer\n"
            "  python main.py plan --preset full                      parameters, memory, hours, before any work\n"
            "  python main.py train --data data/tokens.bin            the largest preset that fits the device\n"
            "  python main.py generate --weights runs/NAME/final.safetensors --prompt 'Once'\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, allow_abbrev=False)

    everything = tuple(f.name for f in fields(Config))
    presets = dict(choices=("auto", *PRESETS), default="auto", help="auto: the largest that fits device and max-hours")

    train = command("train", "Train from a token file, or without --data on a demo corpus made from this Python.")
    train.add_argument("--preset", **presets)
    _add_fields(train, tuple(s for s in everything if s != "generation"))

    plan = command("plan", "Print parameters, memory, operations and hours of a configuration, before any work.")
    plan.add_argument("--preset", **presets)
    _add_fields(plan, tuple(s for s in everything if s != "generation"))

    generate = command("generate", "Stream text from weights: text to standard output, figures to standard error.")
    generate.add_argument("--weights", required=True, help="final.safetensors of a run")
    generate.add_argument("--prompt", help="text to continue; without it and --prompt-file, standard input is read")
    generate.add_argument("--prompt-file", help="file whose text is continued")
    generate.add_argument("--chat", action="store_true", help="one line in, one answer out, until end of input")
    _add_fields(generate, ("generation",))
    _add_fields(generate, ("model", "precision", "train"), only=("attention_scope", "precision", "device"))

    prepare = command("prepare", "Turn text, .jsonl or folders into tokens.bin, its side files and tokenizer.json.")
    prepare.add_argument("--text", nargs="+", required=True, metavar="PATH", help="text, .jsonl (.xz, .gz), folders")
    prepare.add_argument("--out", required=True, help="folder for tokens.bin, tokens.val.bin and tokenizer.json")
    prepare.add_argument("--vocab-size", type=_integer, default=16384, metavar="N", help="ids of a new tokenizer")
    prepare.add_argument("--tokenizer", help="use this tokenizer.json in place of training one")
    prepare.add_argument("--validation-fraction", type=float, default=0.05, metavar="X", help="documents held out")
    prepare.add_argument("--validation-documents", type=_integer, metavar="N", help="the same, as a count")
    prepare.add_argument("--join", choices=("source",), help="join documents of one source into one")
    prepare.add_argument("--skip-bad", action="store_true", help="leave malformed lines out; they are named")
    prepare.add_argument("--seed", type=_integer, default=0, metavar="N", help="of the held-out choice")

    evaluate = command("evaluate", "Print loss, bits per byte and loss by position of weights on a named split.")
    evaluate.add_argument("--weights", required=True, help="final.safetensors of a run")
    evaluate.add_argument("--data", help="token file of the split")
    evaluate.add_argument("--choices", help=".jsonl of {prompt, choices, answer}: accuracy by mean log-likelihood")
    evaluate.add_argument("--context", type=_integer, default=2048, metavar="N", help="row length")
    _add_fields(evaluate, ("precision", "train"), only=("precision", "device", "eval_tokens"))
    return parser


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        known = [f for action in commands.choices[arguments.command]._actions for f in action.option_strings]
        flag = unknown[0].split("=")[0]
        raise ValueError(f"unknown flag {flag} of {arguments.command}{suggest_name(flag, known)}")
    return arguments


# ---------------------------------------------------------------------------
# Commands

DEMO_VOCABULARY = 2048  # about 3 bytes a token on 1 MB of text; the head is a third of the work at 4,096
CHAT_USER, CHAT_MODEL = "User: ", "\nAssistant:"


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the configuration fields that the command line names."""
    known = {f.name for cls in get_type_hints(Config).values() for f in fields(cls)}
    return {name: value for name, value in vars(arguments).items() if name in known}


def _say(text: str) -> None:
    """Print figures to standard error, so that standard output holds text alone."""
    print(text, file=sys.stderr, flush=True)


def _open_data(config: Config, path: str, vocab_size: int | None) -> TokenFile:
    train = config.train
    dtype = None if train.data_dtype == "auto" else train.data_dtype
    return open_tokens(path, dtype=dtype, doc_id=train.doc_id, doc_at=train.doc_at, vocab_size=vocab_size)


def _demo_data() -> str:
    """Make demo/tokens.bin once: about 1 MB of text that every Python carries, through prepare."""
    folder = Path("demo")
    data = folder / "tokens.bin"
    if not data.is_file():
        print("no --data: making a demo corpus from this Python's own documentation", flush=True)
        for line in prepare(demo_corpus(folder), folder, vocab_size=DEMO_VOCABULARY).describe():
            print(line)
    return str(data)


def _configure(
    arguments: argparse.Namespace, facts: DeviceFacts, *, needs_data: bool
) -> tuple[Config, TokenFile | None]:
    """Resolve preset, settings and vocabulary; open the token file, so that a bad one stops everything else."""
    given, name = _settings(arguments), arguments.preset
    if given.get("resume"):
        if "run_dir" not in given:
            raise ValueError("--resume needs --run-dir, the folder of the run to go on with")
        saved = read_run_config(Path(str(given["run_dir"])))
        config = saved.with_values(given)
    else:
        if name == "auto" and "data" not in given and needs_data:
            name = "nano"
        elif name == "auto":
            name, line = choose_preset(facts, float(given.get("max_hours", Config().train.max_hours)))
            print(line)
        config = preset(name).with_values(given)
        if config.train.run_dir is None:
            config = config.with_values({"run_dir": str(next_run_dir(name))})
    if needs_data and config.train.data is None:
        config = config.with_values({"data": _demo_data()})
    if config.train.data is None:
        return config, None
    tokens = _open_data(config, config.train.data, config.model.vocab_size if name == "full" else None)
    if name != "full" and "vocab_size" not in given and not given.get("resume"):
        # presets below full take their vocabulary from the file: its facts, or its largest id
        config = config.with_values({"vocab_size": tokens.vocab_size or tokens.largest + 1})
    return config, tokens


def _train(arguments: argparse.Namespace) -> int:
    facts = describe_device(getattr(arguments, "device", "auto"))
    print(facts.describe(), flush=True)
    config, tokens = _configure(arguments, facts, needs_data=True)
    named = Path(config.train.run_dir)
    for line in preflight(config, facts, folder=named).describe():
        print(line)
    path = Path(config.train.val_data) if config.train.val_data else Path(config.train.data).with_suffix(".val.bin")
    validation = _open_data(config, str(path), config.model.vocab_size) if path.is_file() else None
    if config.train.val_data and validation is None:
        raise ValueError(f"val_data {path} does not exist; give the path of a token file, or leave it out")
    result = TrainingEngine(config, tokens, validation=validation, facts=facts).run()
    if result.weights is None:
        return result.exit_code
    print(f"curve: {named / 'loss.png'}, figures: {named / 'metrics.jsonl'}")
    if tokens.read_tokenizer() is not None:
        print("a sample:\n", flush=True)
        _stream(*_load_engine(result.weights, facts, {"max_new_tokens": 120}), "")
    print(f"\ngo on: python main.py generate --weights {result.weights} --prompt 'The '", flush=True)
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    facts = describe_device(getattr(arguments, "device", "auto"))
    print(facts.describe())
    config, _ = _configure(arguments, facts, needs_data=False)
    for line in plan(config, facts).describe():
        print(line)
    return 0


def _prepare(arguments: argparse.Namespace) -> int:
    report = prepare(
        arguments.text,
        arguments.out,
        vocab_size=arguments.vocab_size,
        tokenizer=arguments.tokenizer,
        validation_fraction=arguments.validation_fraction,
        validation_documents=arguments.validation_documents,
        join_source=arguments.join == "source",
        skip_bad=arguments.skip_bad,
        seed=arguments.seed,
    )
    for line in report.describe():
        print(line)
    return 0


def _load(
    weights: str | Path, facts: DeviceFacts, precision: str | None = None, attention_scope: str | None = None
) -> tuple[HybridLanguageModel, dict[str, object]]:
    """Read weights for inference: 16-bit matrices where the device multiplies them, float32 elsewhere."""
    choice = precision or ("bf16" if facts.kind == "cuda" else "fp32")
    require_precision(choice, facts)
    dtype = torch.float32 if choice == "fp32" else torch.bfloat16
    return load_weights(
        Path(weights),
        facts.kind,
        dtype=dtype,
        precision=PrecisionConfig(precision=choice),
        attention_scope=attention_scope,
    )


def _load_engine(
    weights: str | Path, facts: DeviceFacts, given: dict[str, object]
) -> tuple[StreamingGenerationEngine, str | None]:
    """Build the generation engine of a weights file, and its tokenizer."""
    model, info = _load(weights, facts, given.get("precision"), given.get("attention_scope"))
    options = info["config"].with_values(given).generation
    tokenizer = info["tokenizer_json"]
    table = bytes_of_id(tokenizer) if tokenizer else None
    token_bytes = (lambda token: table[token] if token < len(table) else b"") if table else None
    return StreamingGenerationEngine(model, options, info["eos_id"], token_bytes=token_bytes), tokenizer


def _figures(done: GenerationStatistics) -> str:
    """One line on a finished request."""
    drafts = "".join(f", depth {i} accepted {a:.1%}" for i, a in enumerate(done.acceptance, 1) if done.drafted[i - 1])
    return (
        f"{done.prompt_tokens:,} prompt tokens in {done.prefill_seconds:.2f} s; {done.tokens:,} tokens at "
        f"{done.tokens_per_second:.1f} a second, {done.tokens_per_call:.2f} a model call{drafts}; entropy "
        f"{done.entropy_mean:.2f} nats, repeated {done.repetition:.1%}; stopped by {done.stop_reason}; state "
        f"{done.state_bytes / 1e6:.1f} MB, cache {done.cache_bytes / 1e6:.1f} MB"
    )


def _stream(engine: StreamingGenerationEngine, tokenizer: str | None, prompt: str) -> str:
    """Stream a continuation to standard output and its figures to standard error; Ctrl-C keeps what was made."""
    if tokenizer is None:
        raise ValueError("the weights file holds no tokenizer; train with tokenizer.json beside the token file")
    decoder, pieces = TextDecoder(tokenizer), []

    def put(text: str) -> None:
        pieces.append(text)
        sys.stdout.write(text)
        sys.stdout.flush()

    stream = engine.generate(encode_prompt(tokenizer, prompt))
    try:
        for token in stream:
            if token != engine.eos_id:
                put(decoder.decode(token))
    except KeyboardInterrupt:
        _say("\nstopped; what was made is kept")
        raise
    finally:
        stream.close()
        put(decoder.flush())
        _say("\n" + _figures(engine.statistics))
    return "".join(pieces)


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.prompt is not None and arguments.prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    facts = describe_device(getattr(arguments, "device", "auto"))
    _say(facts.describe())
    given = {name: value for name, value in _settings(arguments).items() if name != "device"}
    if arguments.chat:
        engine, tokenizer = _load_engine(arguments.weights, facts, {"stop": "\n" + CHAT_USER.strip(), **given})
        return _chat(engine, tokenizer)
    engine, tokenizer = _load_engine(arguments.weights, facts, given)
    prompt = arguments.prompt
    if arguments.prompt_file is not None:
        prompt = Path(arguments.prompt_file).read_text("utf-8")
    elif prompt is None:
        prompt = sys.stdin.read()
    _stream(engine, tokenizer, prompt)
    sys.stdout.write("\n")
    return 0


def _chat(engine: StreamingGenerationEngine, tokenizer: str | None) -> int:
    """Converse in the plain template 'User: ...' / 'Assistant: ...', one line in, one answer out."""
    history = ""
    _say("one line in, one answer out; end of input (Ctrl-D) leaves")
    for line in sys.stdin:
        history += f"{CHAT_USER}{line.strip()}{CHAT_MODEL}"
        answer = _stream(engine, tokenizer, history)
        history += answer.removesuffix(CHAT_USER.strip()).rstrip("\n") + "\n"
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    if arguments.data is None and arguments.choices is None:
        raise ValueError("give --data, a token file, or --choices, a .jsonl of questions")
    facts = describe_device(getattr(arguments, "device", "auto"))
    print(facts.describe())
    model, info = _load(arguments.weights, facts, getattr(arguments, "precision", None))
    if arguments.data is not None:
        tokens = _open_data(info["config"], arguments.data, model.config.vocab_size)
        limit = getattr(arguments, "eval_tokens", None)
        length = min(arguments.context, len(tokens) - 1)
        result = evaluate(model, tokens, length, split=Path(arguments.data).name, limit_tokens=limit)
        print(result.describe())
        for first, last, loss, targets in result.by_position:
            print(f"  positions {first:>7,} to {last - 1:>7,}: loss {loss:.4f} ({targets:,} targets)")
    if arguments.choices is not None:
        if info["tokenizer_json"] is None:
            raise ValueError(f"{arguments.weights} holds no tokenizer, which --choices needs")
        share, count = multiple_choice(
            model, lambda text: encode_prompt(info["tokenizer_json"], text), Path(arguments.choices),
            context_id=info["eos_id"],
        )  # fmt: skip
        print(f"{arguments.choices}: {share:.1%} of {count:,} questions right")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code."""
    commands = {"train": _train, "plan": _plan, "generate": _generate, "prepare": _prepare, "evaluate": _evaluate}
    try:
        arguments = _parse(argv)
        return commands[arguments.command](arguments)
    except (ValueError, OSError, TrainingError) as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
