"""Command line: prepare, train, evaluate, quantize, generate, plan; on this machine's kernels, bench and verify.

Every field of model_config.py is a flag of the same name (--tokens-per-step for tokens_per_step), its help the comment
above the field; nothing is restated here. An error that a user can cause is one line on standard error and exit
code 2; Ctrl-C is exit code 130, a reader that went away 141. Where a command makes text, the text goes to standard
output and the figures to standard error.
"""

import argparse
import ast
import codecs
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, UnionType
from typing import Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

if __name__ == "__main__":
    # read when torch loads: idle OpenMP threads sleep in place of spinning, which costs nothing on idle cores; with one
    # core taken by another process a training step of nano takes 0.7 s so, and 7.2 s otherwise (two cores)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from tqdm import tqdm

import model_config
from dataset_pipeline import (
    TextDecoder,
    TokenFile,
    bytes_of_id,
    demo_corpus,
    encode_chat,
    encode_prompt,
    open_tokens,
    prepare,
    special_names,
)
from generation_engine import CURVE_TOKENS, GenerationStatistics, Request, StreamingGenerationEngine
from hybrid_model import HybridLanguageModel
from model_config import PRESETS, Config, PrecisionConfig, preset, suggest_name
from train_engine import (
    CHIPS,
    DeviceFacts,
    Evaluation,
    TrainingEngine,
    TrainingError,
    chip_facts,
    choose_preset,
    describe_device,
    evaluate,
    load_weights,
    multiple_choice,
    next_run_dir,
    plan,
    preflight,
    quantize_weights,
    read_run_config,
    read_session,
    read_weights_info,
    require_precision,
    write_session,
)

__all__ = ["build_parser", "main"]

# settings that say how a token file without facts is read
DATA_FORM = ("doc_id", "doc_at", "data_dtype")

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
            if above:  # a section may have the name of a field
                notes[node.target.id] = " ".join(above)
    return notes


def _form(hint: object) -> dict[str, object]:
    """argparse keywords for a field's type; a type without a form is a programming error."""
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (a for a in get_args(hint) if a is not type(None))
        return _form(inner)
    if get_origin(hint) is tuple:
        return {"nargs": "+", **_form(get_args(hint)[0])}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "type": type(get_args(hint)[0])}
    forms = {int: (_integer, "N"), float: (_number, "X"), str: (str, "TEXT")}
    if hint not in forms:
        raise TypeError(f"no command line form for field type {hint}")
    return dict(zip(("type", "metavar"), forms[hint], strict=True))


def _number(text: str) -> float:
    """Read a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return value


def _integer(text: str) -> int:
    """Read 1_000_000, 250e6 or 64k as an integer."""
    scale = {"k": 10**3, "m": 10**6, "b": 10**9}.get(text[-1:].lower(), 1)
    digits = (text[:-1] if scale > 1 else text).replace("_", "").replace(",", "")
    if digits.removeprefix("-").isdecimal():
        return int(digits) * scale
    value = _number(digits) * scale
    if value != int(value):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(value)


def _positive(text: str) -> int:
    if (value := _integer(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
    return value


def _default_note(section: str, name: str) -> str:
    """Return '[0.95]', or '[nano 4, small 8, ...]' where the presets differ, or nothing where there is no default."""
    values = {key: getattr(getattr(make(), section), name) for key, make in PRESETS.items()}
    shown = {key: f"{x:g}" if isinstance(x, float) else str(x) for key, x in values.items() if x is not None}
    if len(set(shown.values())) > 1:
        return f"[{', '.join(f'{key} {x}' for key, x in shown.items())}]"
    return f"[{next(iter(shown.values()))}]" if shown else ""


def _add_fields(parser: argparse.ArgumentParser, sections: tuple[str, ...], only: tuple[str, ...] = ()) -> None:
    """Add the fields of sections as flags; `only` names those of a command that reads their defaults elsewhere."""
    notes = _field_notes()
    for section in sections:
        cls = get_type_hints(Config)[section]
        group = parser.add_argument_group(f"{section} settings")
        hints = get_type_hints(cls)
        for f in fields(cls):
            if only and f.name not in only:
                continue
            default = "" if only else _default_note(section, f.name)
            # a percent sign would start one of argparse's own formats
            note = f"{notes.get(f.name, '')} {default}".strip().replace("%", "%%")
            flag = f"--{f.name.replace('_', '-')}"
            group.add_argument(flag, dest=f.name, default=argparse.SUPPRESS, help=note, **_form(hints[f.name]))


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print forty lines of usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """Build the command line; every configuration field is a flag of train and plan."""
    parser = _Parser(
        prog="main.py",
        description="Train a hybrid language model from a token file and generate long text from it.",
        epilog=(
            "start here:\n"
            "  python main.py train                                   a demo: text from this Python, minutes on a CPU\n"
            "  python main.py prepare --text FOLDER --out data        text to data/tokens.bin and a tokenizer\n"
            "  python main.py inspect --data data/tokens.bin          what it holds, a window of it as text\n"
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
    train.add_argument("--dry-run", action="store_true", help="two steps at each row length, then stop; writes nothing")
    _add_fields(train, tuple(s for s in everything if s != "generation"))

    plan = command("plan", "Print parameters, memory, operations and hours of a configuration, before any work.")
    plan.add_argument("--preset", **presets)
    plan.add_argument("--chip", choices=tuple(CHIPS), help="plan for this accelerator in place of the present device")
    _add_fields(plan, tuple(s for s in everything if s != "generation"))

    generate = command("generate", "Stream text from weights: text to standard output, figures to standard error.")
    generate.add_argument("--weights", required=True, metavar="FILE", help="final.safetensors of a run")
    generate.add_argument("--prompt", metavar="TEXT", help="text to continue; default: standard input")
    generate.add_argument("--prompt-file", metavar="FILE", help="text to continue; its last line end is left out")
    generate.add_argument("--chat", action="store_true", help="one line in, one answer out, until end of input")
    generate.add_argument("--session", metavar="FILE", help="go on from this file's text where it exists; store there")
    generate.add_argument("--trace", metavar="FILE.png", help="plot repetition, entropy and tokens/s over the text")
    generate.add_argument("--requests", metavar="FILE", help=".jsonl of {prompt, seed, max_new_tokens}")
    generate.add_argument("--stream-layers", action="store_true",
                          help="read each layer from the file when it runs: a few layers of memory, slower")
    generate.add_argument("--batch", type=_positive, metavar="N", help="--requests that run at once [8]")
    _add_fields(generate, ("generation",))
    _add_fields(generate, ("model", "precision", "train"), only=("attention_scope", "precision", "device"))

    prepare = command("prepare", "Turn text, .jsonl or folders into tokens.bin, its side files and tokenizer.json.")
    kinds = "text, .jsonl, .parquet (.xz, .gz, .zst), folders"
    prepare.add_argument("--text", nargs="+", required=True, metavar="PATH", help=kinds)
    prepare.add_argument("--out", required=True, metavar="FOLDER", help="for the token files and tokenizer.json")
    prepare.add_argument("--vocab-size", type=_integer, default=16384, metavar="N", help="of a new tokenizer [16384]")
    prepare.add_argument("--tokenizer", metavar="FILE", help="use this tokenizer.json in place of training one")
    prepare.add_argument("--tokenizer-bytes", type=_positive, default=64_000_000, metavar="N",
                         help="text to train it on; 64 MB take 0.8 GB of memory [64000000]")  # fmt: skip
    prepare.add_argument("--validation-fraction", type=_number, default=0.05, metavar="X", help="held out [0.05]")
    prepare.add_argument("--validation-documents", type=_integer, metavar="N", help="held out, as a count")
    prepare.add_argument("--join", choices=("source",), help="join documents of one source into one")
    similar = "remove documents this similar to an earlier one that stays [off; without a number 0.8]"
    prepare.add_argument("--dedup", type=_number, nargs="?", const=0.8, metavar="X", help=similar)
    held_out = (
        "remove documents that share half of their 13-word runs with this text, or hold half of one of its documents"
    )
    prepare.add_argument("--decontaminate", metavar="PATH", help=held_out)
    prepare.add_argument("--skip-bad", action="store_true", help="leave malformed lines out; they are named")
    prepare.add_argument("--seed", type=_integer, default=0, metavar="N", help="of the held-out choice [0]")

    window = command("inspect", "Show what a token file holds: sizes, and a window of it with boundaries and mask.")
    window.add_argument("--data", required=True, metavar="FILE", help="token file, or a folder or pattern of shards")
    window.add_argument("--at", type=_integer, metavar="N", help="first token to show [0]")
    window.add_argument("--document", type=_integer, metavar="N", help="show this document from its start, from 0 on")
    window.add_argument("--tokens", type=_positive, default=256, metavar="N", help="tokens to show [256]")
    window.add_argument("--supervised", action="store_true", help="list the positions that are trained, and on what")
    window.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="auto: on a terminal")
    _add_fields(window, ("train",), only=DATA_FORM)

    quantize = command("quantize", "Write weights with every projection in 4 or 8 bits, and what that costs.")
    quantize.add_argument("--weights", required=True, metavar="FILE", help="final.safetensors of a run")
    quantize.add_argument("--out", required=True, metavar="FILE", help="weights file to write")
    quantize.add_argument("--bits", type=int, choices=(4, 8), default=8, help="E2M1 with block scales, or integers [8]")
    quantize.add_argument("--data", metavar="FILE", help="token file to compare the loss on, before and after")
    quantize.add_argument("--context", type=_positive, default=2048, metavar="N", help="row length [2048]")
    quantize.add_argument("--eval-tokens", type=_positive, default=100_000, metavar="N", help="tokens to read [100000]")
    _add_fields(quantize, ("precision", "train"), only=("precision", "device", *DATA_FORM))

    evaluate = command("evaluate", "Print loss, bits per byte and loss by position of weights on a named split.")
    evaluate.add_argument("--weights", required=True, metavar="FILE", help="final.safetensors of a run")
    evaluate.add_argument("--data", metavar="FILE", help="token file of the split")
    evaluate.add_argument("--choices", metavar="FILE", help=".jsonl of {prompt, choices, answer}: share answered right")
    evaluate.add_argument("--context", type=_positive, default=2048, metavar="N", help="row length [2048]")
    evaluate.add_argument("--eval-tokens", type=_positive, metavar="N", help="first tokens to read; default: all")
    _add_fields(evaluate, ("precision", "train"), only=("precision", "device", *DATA_FORM))

    bench = command("bench", "Time every kernel on this machine against its roofs and peers, each checked first.")
    bench.add_argument("--only", nargs="+", metavar="NAME", help="kernels such as scan, rmsnorm, attention [all]")
    bench.add_argument("--quick", action="store_true", help="few repetitions")
    bench.add_argument("--peers", action="store_true", help="also peers whose first call searches for minutes")
    bench.add_argument("--out", metavar="FILE", help="write the JSON line here too")
    _add_fields(bench, ("train",), only=("device",))
    command("verify", "Run the kernels' tests on this machine and say pass or FAIL per kernel.")
    return parser


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse, and name the nearest flag where one is unknown."""
    parser = build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    if argv and argv[0] in commands.choices:
        known = [flag for action in commands.choices[argv[0]]._actions for flag in action.option_strings]
        for word in argv[1:]:
            flag = word.split("=")[0]
            # a word with a space is the value of a flag, such as a prompt
            if len(flag) > 2 and flag.startswith("--") and " " not in flag and flag not in known:
                raise ValueError(f"unknown flag {flag} of {argv[0]}{suggest_name(flag, known)}")
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------
# What is printed


def _say(text: str) -> None:
    """Print figures beside a text: to standard error, so that standard output holds the text alone."""
    print(text, file=sys.stderr, flush=True)


def _log(text: str) -> None:
    """Print a line at once; where nobody reads on (train | head), a run ends as under SIGTERM: it saves."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            raise  # no run is under way
        _drop_output()
        signal.raise_signal(signal.SIGTERM)


def _drop_output() -> None:
    """Point standard output nowhere, so that the flush at the end of the process finds no closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_folder(flag: str, path: Path) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold."""
    if not path.parent.is_dir():
        raise ValueError(f"{flag} must lie in a folder that exists, got {path.parent}")


def _message(error: BaseException) -> str:
    """Return an error's text as one line; a failed file operation starts with its path."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split("\n")) or type(error).__name__


# ---------------------------------------------------------------------------
# prepare, train, plan

DEMO_FOLDER = Path("demo")
DEMO_VOCABULARY = 2048  # about 3 bytes a token on 1 MB of text; the head is a third of the work at 4,096
SAMPLE_TOKENS = 120


def _prepare(arguments: argparse.Namespace) -> int:
    report = prepare(
        arguments.text,
        arguments.out,
        vocab_size=arguments.vocab_size,
        tokenizer=arguments.tokenizer,
        tokenizer_bytes=arguments.tokenizer_bytes,
        validation_fraction=arguments.validation_fraction,
        validation_documents=arguments.validation_documents,
        join_source=arguments.join == "source",
        dedup=arguments.dedup,
        decontaminate=arguments.decontaminate,
        skip_bad=arguments.skip_bad,
        seed=arguments.seed,
    )
    for line in report.describe():
        _log(line)
    _log(f"go on: python main.py train --data {report.train.path}")
    return 0


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the configuration fields that the command line names."""
    known = {f.name for cls in get_type_hints(Config).values() for f in fields(cls)}
    return {name: value for name, value in vars(arguments).items() if name in known}


def _configure(arguments: argparse.Namespace, facts: DeviceFacts, *, demo: bool) -> tuple[Config, bool]:
    """Resolve preset and settings, without a look at the data: (configuration, its vocabulary is fixed).

    A vocabulary that is not fixed is what the token file states. A resumed run has the configuration of its folder.
    """
    given, name = _settings(arguments), arguments.preset
    if given.get("resume"):
        return _resumed(given, name), True
    if "initial_weights" in given:
        if demo:
            raise ValueError("--initial-weights needs --data, made with the tokenizer of those weights")
        return _started(given, name), True
    if name == "auto" and demo:
        name = "nano"
    elif name == "auto":
        name, line = choose_preset(facts, float(given.get("max_hours", Config().train.max_hours)))
        _log(line)
    return _in_run_dir(preset(name).with_values(given), name), name == "full" or "vocab_size" in given


def _in_run_dir(config: Config, name: str) -> Config:
    """Name a new run folder where none is given."""
    return config if config.train.run_dir is not None else config.with_values({"run_dir": str(next_run_dir(name))})


def _started(given: dict[str, object], name: str) -> Config:
    """Configuration of a run that starts from weights: theirs (preset auto) or a preset's, with their vocabulary."""
    theirs = read_weights_info(Path(str(given["initial_weights"])))["config"]
    base = theirs if name == "auto" else preset(name).with_values({"vocab_size": theirs.model.vocab_size})
    return _in_run_dir(base.with_values(given), "tuned" if name == "auto" else name)


def _resumed(given: dict[str, object], name: str) -> Config:
    if "run_dir" not in given:
        raise ValueError("--resume needs --run-dir, the folder of the run to go on with")
    config = read_run_config(Path(str(given["run_dir"]))).with_values(given)
    if name != "auto":
        named = preset(name).with_values({**given, "vocab_size": config.model.vocab_size})
        if named.model != config.model:
            raise ValueError(f"{given['run_dir']} was started with another preset or shape; leave --preset out")
    return config


def _open_data(config: Config, path: str | Path) -> TokenFile:
    train = config.train
    dtype = None if train.data_dtype == "auto" else train.data_dtype
    return open_tokens(path, dtype=dtype, doc_id=train.doc_id, doc_at=train.doc_at)


def _open_splits(config: Config, *, fixed: bool) -> tuple[Config, TokenFile, TokenFile | None]:
    """Open both splits, so that a bad one stops everything else; set the vocabulary where it is not fixed."""
    path = Path(config.train.data)
    tokens = _open_data(config, path)
    if not fixed:
        config = config.with_values({"vocab_size": tokens.vocab_size or tokens.largest + 1})
    tokens.check_vocabulary(config.model.vocab_size)
    if (tokenizer := tokens.read_tokenizer()) is not None:
        bytes_of_id(tokenizer)  # one that cannot make text is refused now, not after the training
    named = config.train.val_data
    beside = path.with_suffix(f".val{path.suffix}")
    validation = _open_data(config, named or beside) if named or beside.is_file() else None
    return config, tokens, validation


def _train(arguments: argparse.Namespace) -> int:
    facts = describe_device(getattr(arguments, "device", "auto"))
    _log(facts.describe())
    config, fixed = _configure(arguments, facts, demo=not hasattr(arguments, "data"))
    require_precision(config.precision.precision, facts)
    folder = Path(config.train.run_dir)
    if config.train.data is None:
        config = config.with_values({"data": str(DEMO_FOLDER / "tokens.bin")})
        preflight(config, facts, folder=folder)
        _make_demo(Path(config.train.data))
    elif fixed:
        preflight(config, facts, folder=folder)
    config, tokens, validation = _open_splits(config, fixed=fixed)
    for line in preflight(config, facts, folder=folder).describe():
        _log(line)
    engine = TrainingEngine(config, tokens, validation=validation, facts=facts, log=_log)
    if arguments.dry_run:
        engine.dry_run()
        return 0
    result = engine.run()
    if result.weights is None:
        return result.exit_code
    _log(f"curve: {folder / 'loss.png'}, figures: {folder / 'metrics.jsonl'}")
    if tokens.read_tokenizer() is not None:
        _show_sample(result.weights, config, facts)
    _log(f"go on: python main.py generate --weights {result.weights} --prompt 'The '")
    return 0


def _make_demo(data: Path) -> None:
    """Make demo/tokens.bin once: about 1 MB of text that every Python carries, through prepare."""
    if data.is_file():
        _log(f"no --data: using the demo corpus {data}")
        return
    _log("no --data: making a demo corpus from this Python's own documentation")
    for line in prepare(demo_corpus(data.parent), data.parent, vocab_size=DEMO_VOCABULARY).describe():
        _log(line)


def _show_sample(weights: Path, config: Config, facts: DeviceFacts) -> None:
    """Print a text of new weights; the run is complete, so a reason against it is a remark and no error."""
    # no end of text before the last token, or the sample of a young model may be empty
    count = min(SAMPLE_TOKENS, config.model.max_output_len)
    try:
        request = _load_engine(weights, facts, {"max_new_tokens": count, "min_new_tokens": count})
        _log("a sample:\n")
        # from nothing, unless the data names no id that opens a text
        _stream(request, "" if request.first_id is not None else "The ")
    except (ValueError, torch.OutOfMemoryError) as error:
        _log(f"no sample: {_message(error)}")


def _plan(arguments: argparse.Namespace) -> int:
    facts = chip_facts(arguments.chip) if arguments.chip else describe_device(getattr(arguments, "device", "auto"))
    _log(facts.describe())
    config, fixed = _configure(arguments, facts, demo=False)
    if config.train.data is not None:
        config, _, _ = _open_splits(config, fixed=fixed)
    for line in plan(config, facts).describe():
        _log(line)
    try:
        preflight(config, facts, folder=None if arguments.chip else Path(config.train.run_dir))
        _log(f"fits {facts.name}, in memory and hours" + ("" if arguments.chip else " and disk"))
    except ValueError as error:
        _log(f"does not fit: {error}")
    return 0


# ---------------------------------------------------------------------------
# inspect

_LEARNED, _DIM, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_COLUMNS = 110


def _inspect(arguments: argparse.Namespace) -> int:
    form = {name: value for name, value in _settings(arguments).items() if name in DATA_FORM}
    tokens = _open_data(Config().with_values(form), arguments.data)
    if arguments.at is not None and arguments.document is not None:
        raise ValueError("give --at or --document, not both")
    count, stop = len(tokens.ends), len(tokens)
    if arguments.document is not None and not 0 <= arguments.document < count:
        raise ValueError(f"document must be within 0..{count - 1:,}, got {arguments.document:,}")
    begin = arguments.at or 0
    if arguments.document is not None:
        begin, stop = int(tokens.starts[arguments.document]), int(tokens.ends[arguments.document])
    if not 0 <= begin < len(tokens):
        raise ValueError(f"at must be within 0..{len(tokens) - 1:,}, got {begin:,}")
    end = min(begin + arguments.tokens, stop)
    plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))
    color = arguments.color == "always" or (arguments.color == "auto" and not plain)
    for line in (*tokens.describe(), *_statistics(tokens)):
        _log(line)
    tokenizer = tokens.read_tokenizer()
    table, special = (None, {}) if tokenizer is None else (bytes_of_id(tokenizer), special_names(tokenizer))
    if table is not None and tokens.largest >= len(table):
        raise ValueError(f"{tokens.path} holds id {tokens.largest:,}, its tokenizer.json has {len(table):,} ids")
    # one more than the window: the target of its last position
    shown = [_piece(int(token), table, special) for token in tokens.ids[begin : end + 1]]
    pieces = shown[: end - begin]
    listed = _supervised(tokens, begin, end, shown) if arguments.supervised else _window(tokens, begin, pieces, color)
    for line in listed:
        _log(line)
    if arguments.document is not None and end < stop:
        _log(f"{stop - end:,} more tokens of this document: --tokens {stop - begin} shows them")
    return 0


def _statistics(tokens: TokenFile) -> list[str]:
    """Lengths of the documents and the share of the ids that is trained, of all and of each source."""
    lengths, trained = tokens.lengths, f"{tokens.supervised / len(tokens):.1%}"
    lines = [f"lengths: {_quantiles(lengths)} tokens", f"trained: {trained} of the ids are targets"]
    if tokens.source_of is not None:
        targets = _targets(tokens)
        for index, name in enumerate(tokens.sources):
            mine = tokens.source_of == index
            size, share = int(lengths[mine].sum()), targets[mine].sum() / max(lengths[mine].sum(), 1)
            sizes = f"{int(mine.sum()):,} documents, {size:,} tokens, {share:.1%} trained"
            lines.append(f"source {name}: {sizes}; {_quantiles(lengths[mine])}")
    return lines


def _quantiles(lengths: np.ndarray) -> str:
    marks = {"shortest": 0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1}
    return ", ".join(f"{name} {int(np.quantile(lengths, at)):,}" for name, at in marks.items() if len(lengths))


def _targets(tokens: TokenFile) -> np.ndarray:
    """(documents,) int64, the trained targets of each: its mask, but for its first token, which nothing predicts."""
    if tokens.mask is None:
        return tokens.lengths - 1
    before = np.zeros(len(tokens.ends) + 1, np.int64)  # ones of the mask before each document's end
    bounds, total, size = np.append(0, tokens.ends), 0, 1 << 22
    for begin in range(0, len(tokens), size):
        sums = np.cumsum(tokens.mask[begin : begin + size], dtype=np.int64)
        first, last = np.searchsorted(bounds, [begin, begin + len(sums)], side="right")
        before[first:last] = total + sums[bounds[first:last] - begin - 1]
        total += int(sums[-1])
    return np.diff(before) - tokens.mask[tokens.starts]


def _piece(token: int, table: list[bytes] | None, special: dict[int, str]) -> bytes:
    if token in special:
        return special[token].encode()
    return f" {token}".encode() if table is None else table[token]


def _visible(text: str) -> str:
    """The text with escapes for what a terminal would obey or hide; its line ends stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _window(tokens: TokenFile, begin: int, pieces: list[bytes], color: bool) -> Iterator[str]:
    """Lines of text after the place of their first token; [[ ]] or green around what is trained, a rule at documents.

    A character belongs to the token that completes it. A line after "|" is one of the text, after ":" goes on."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    opened, closed = (_LEARNED, _PLAIN) if color else ("[[", "]]")
    starts, ends = tokens.starts, tokens.ends
    document = int(np.searchsorted(ends, begin, side="right"))
    learned = np.ones(len(pieces), bool) if tokens.mask is None else tokens.mask[begin : begin + len(pieces)] != 0
    line, width, number, margin, inside = "", 0, begin, "|", False
    for place, piece, is_learned in zip(range(begin, begin + len(pieces)), pieces, learned, strict=True):
        if place == ends[document] or place == begin:
            document += place == ends[document]
            # bytes of an unfinished character end with their document
            line += decoder.decode(b"", final=True)
            if line:
                yield f"{number:>12,} {margin} {line}" + (closed if inside else "")
            source = "" if tokens.source_of is None else f", source {tokens.sources[tokens.source_of[document]]}"
            size = int(ends[document] - starts[document])
            rule = f"--- document {document:,}, {size:,} tokens from {int(starts[document]):,}{source} ---"
            yield f"{_DIM}{rule}{_PLAIN}" if color else rule
            line, width, number, margin, inside = "", 0, place, "|", False
        # no position predicts a document's first token
        is_learned = bool(is_learned) and place != starts[document]
        if is_learned != inside and tokens.mask is not None:
            line, inside = line + (opened if is_learned else closed), is_learned
        first, *rest = _visible(decoder.decode(piece)).split("\n")
        line, width = line + first, width + len(first)
        # a token that ends a line begins the next one only with what it has behind the line end
        cuts = [(part, "|", place if part or i < len(rest) else place + 1) for i, part in enumerate(rest, 1)]
        if width > _COLUMNS and not rest:
            cuts = [("", ":", place + 1)]
        for part, next_margin, next_number in cuts:
            yield f"{number:>12,} {margin} {line}" + (closed if inside and color else "")
            line, width = (opened if inside and color else "") + part, len(part)
            number, margin = next_number, next_margin
    line += decoder.decode(b"", final=True)
    if line:
        yield f"{number:>12,} {margin} {line}" + (closed if inside else "")


def _supervised(tokens: TokenFile, begin: int, end: int, shown: list[bytes]) -> Iterator[str]:
    """The positions that receive a loss: those whose next token is of the same document and is trained."""
    mask = None if tokens.mask is None else tokens.mask[begin : end + 1]
    texts = [_quoted(piece) for piece in shown]
    last = set((tokens.ends[np.searchsorted(tokens.ends, begin, side="right") :][: end - begin] - 1).tolist())
    for place in range(begin, end):
        if place not in last and (mask is None or mask[place + 1 - begin]):
            read, target = texts[place - begin : place - begin + 2]
            yield f"position {place:,} reads {read} and is trained on {target}"


def _quoted(piece: bytes) -> str:
    """The text of a token in quotes, or its bytes, where it holds parts of characters."""
    try:
        return repr(piece.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(piece)


# ---------------------------------------------------------------------------
# generate, evaluate

CHAT_USER, CHAT_MODEL = "User: ", "\nAssistant:"
STOP_REASONS = {"eos": "the end of the text", "stop": "the stop string", "length": "max_new_tokens",
                "loop": "a loop: --loop-tokens", "closed": "Ctrl-C"}  # fmt: skip


def _load(
    weights: str | Path, facts: DeviceFacts, precision: str | None = None, attention_scope: str | None = None,
    stream_layers: bool = False,
) -> tuple[HybridLanguageModel, dict[str, object]]:  # fmt: skip
    """Read weights for inference: 16-bit matrices where the device multiplies them, float32 elsewhere."""
    choice = precision or ("bf16" if facts.kind == "cuda" else "fp32")
    if note := require_precision(choice, facts):
        _say(note)
    return load_weights(
        Path(weights),
        facts.kind,
        dtype=torch.float32 if choice == "fp32" else torch.bfloat16,
        precision=PrecisionConfig(precision=choice),
        attention_scope=attention_scope,
        stream_layers=stream_layers,
    )


class _Loaded(NamedTuple):
    """What turns a prompt into text: an engine, its tokenizer, and the id that opens a text, as it did in training."""

    engine: StreamingGenerationEngine
    tokenizer: str
    first_id: int | None
    turn_end_id: int | None
    weights_crc32: int


def _load_engine(
    weights: str | Path, facts: DeviceFacts, given: dict[str, object], *, chat: bool = False, batch: int = 1,
    stream_layers: bool = False,
) -> _Loaded:  # fmt: skip
    model, info = _load(weights, facts, given.get("precision"), given.get("attention_scope"), stream_layers)
    options, tokenizer = info["config"].with_values(given).generation, info["tokenizer_json"]
    if tokenizer is None:
        raise ValueError(f"{weights} holds no tokenizer; train with tokenizer.json beside the token file")
    table = bytes_of_id(tokenizer)

    def token_bytes(token: int) -> bytes:
        return table[token] if token < len(table) else b""

    turn_end = info.get("turn_end_id") if chat else None
    if chat and turn_end is None:
        _say("these weights were not trained on conversations: the plain form 'User: ... Assistant:' is used")
        options = replace(options, stop=options.stop or ("\n" + CHAT_USER.strip(),))
    end = info["eos_id"] if turn_end is None else turn_end
    engine = StreamingGenerationEngine(model, options, end, batch=batch, token_bytes=token_bytes)
    return _Loaded(engine, tokenizer, info.get("bos_id"), turn_end, info["info_crc32"])


class _TextOutput:
    """Standard output of a text that comes in pieces; what may become a stop string waits until it is decided."""

    def __init__(self, stops: tuple[str, ...], *, shown: bool = True) -> None:
        self._stops, self._waiting, self._pieces, self._shown = stops, "", [], shown

    @property
    def text(self) -> str:
        """What was written."""
        return "".join(self._pieces)

    def write(self, piece: str, *, stopped: bool = False) -> None:
        """Write a piece, without the stop string that ended the text or an end that may begin one."""
        self._waiting += piece
        if stopped:
            self._put(min(at for stop in self._stops if (at := self._waiting.find(stop)) >= 0))
            self._waiting = ""
        else:
            begun = (n for stop in self._stops for n in range(1, len(stop)) if self._waiting.endswith(stop[:n]))
            self._put(len(self._waiting) - max(begun, default=0))

    def flush(self) -> None:
        """Write what waited."""
        self._put(len(self._waiting))

    def _put(self, count: int) -> None:
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        self._pieces.append(ready)
        if self._shown:
            sys.stdout.write(ready)
            sys.stdout.flush()


def _stream(loaded: _Loaded, prompt: str | list[int]) -> str:
    """Stream a continuation to standard output, then its figures to standard error; Ctrl-C keeps what was made.

    The prompt goes on from the text that the engine holds, where it holds one.
    """
    engine, decoder, interrupted = loaded.engine, TextDecoder(loaded.tokenizer), False
    output = _TextOutput(engine.options.stop)
    ids, resume = _encoded(loaded, prompt), engine.held > 0
    stream = engine.generate(ids if resume or loaded.first_id is None else [loaded.first_id, *ids], resume=resume)
    try:
        for token in stream:
            if token not in engine.end_ids:
                output.write(decoder.decode(token), stopped=engine.statistics.stop_reason == "stop")
    except KeyboardInterrupt:
        interrupted = True
    stream.close()
    output.write(decoder.flush())
    output.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    _say(_figures(engine.statistics))
    if interrupted:
        raise KeyboardInterrupt
    return output.text


def _encoded(loaded: _Loaded, prompt: str | list[int]) -> list[int]:
    return encode_prompt(loaded.tokenizer, prompt) if isinstance(prompt, str) and prompt else list(prompt)


def _figures(done: GenerationStatistics) -> str:
    """One line on a finished request."""
    drafts = "".join(f", depth {i} accepted {a:.1%}" for i, a in enumerate(done.acceptance, 1) if done.drafted[i - 1])
    return (
        f"prompt tokens: {done.prompt_tokens:,} in {done.prefill_seconds:.2f} s; made tokens: {done.tokens:,}, "
        f"{done.tokens_per_second:.1f} a second, {done.tokens_per_call:.2f} a model call{drafts}; entropy "
        f"{done.entropy_mean:.2f} nats, repeated {done.repetition:.1%}; state {done.state_bytes / 1e6:.1f} MB, cache "
        f"{done.cache_bytes / 1e6:.1f} MB; ended by {STOP_REASONS[done.stop_reason]}"
    )


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.prompt is not None and arguments.prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if arguments.chat and (arguments.prompt is not None or arguments.prompt_file is not None):
        raise ValueError("--chat reads its lines from standard input; leave --prompt and --prompt-file out")
    facts = describe_device(getattr(arguments, "device", "auto"))
    _say(facts.describe())
    given = {name: value for name, value in _settings(arguments).items() if name != "device"}
    Config().with_values(given)  # a setting out of range is refused before the weights are read
    if arguments.requests is not None:
        return _answer_requests(arguments, facts, given)
    if arguments.batch is not None:
        raise ValueError("--batch is for --requests; leave it out")
    session, trace = (None if name is None else Path(name) for name in (arguments.session, arguments.trace))
    if session is not None:
        _check_folder("--session", session)
    if trace is not None:
        _check_folder("--trace", trace)
        if trace.suffix != ".png" or arguments.chat:
            raise ValueError(f"--trace must be a .png and of one text, got {trace}{' of --chat' * arguments.chat}")
    prompt = None if arguments.chat else _read_prompt(arguments)
    streamed = arguments.stream_layers
    loaded = _load_engine(arguments.weights, facts, given, chat=arguments.chat, stream_layers=streamed)
    if session is not None and session.exists():
        loaded.engine.restore(read_session(session, loaded.weights_crc32))
        _say(f"goes on from {session}: {loaded.engine.held:,} tokens")
    try:
        if arguments.chat:
            _chat(loaded)
        else:
            _stream(loaded, prompt)
    finally:
        if session is not None and loaded.engine.held:
            write_session(session, loaded.engine.session(), loaded.weights_crc32)
            _say(f"session: {session}, {session.stat().st_size / 1e6:,.1f} MB")
        if trace is not None:
            _draw_trace(loaded.engine.statistics, trace)
    return 0


def _answer_requests(arguments: argparse.Namespace, facts: DeviceFacts, given: dict[str, object]) -> int:
    """Continue every prompt of a .jsonl, --batch of them at once: one JSON line each, as they end.

    --prompt begins every one of them, and is run once.
    """
    one_text = {"--session": arguments.session, "--trace": arguments.trace, "--chat": arguments.chat or None}
    for flag, value in one_text.items():
        if value is not None:
            raise ValueError(f"{flag} is for one text; leave it out beside --requests")
    asked = read_requests(Path(arguments.requests))
    begins = arguments.prompt is not None or arguments.prompt_file is not None
    beginning = _read_prompt(arguments) if begins else ""
    batch = min(arguments.batch or 8, len(asked))
    loaded = _load_engine(arguments.weights, facts, given, batch=batch, stream_layers=arguments.stream_layers)
    opening = [] if loaded.first_id is None else [loaded.first_id]
    prefix, opening = ([*opening, *_encoded(loaded, beginning)], []) if beginning else ([], opening)
    requests = [
        Request([*opening, *_encoded(loaded, one["prompt"])], one.get("seed"), one.get("max_new_tokens"))
        for one in asked
    ]
    made: list[list[int]] = [[] for _ in requests]
    started, tokens = time.perf_counter(), 0
    with tqdm(total=len(requests), unit="text", file=sys.stderr, disable=None) as bar:
        for chunk in loaded.engine.serve(requests, prefix=prefix):
            made[chunk.index] += chunk.ids
            tokens += len(chunk.ids)
            if chunk.done:
                decoder, done = TextDecoder(loaded.tokenizer), chunk.statistics
                output = _TextOutput(loaded.engine.options.stop, shown=False)
                for left, token in zip(range(done.tokens - 1, -1, -1), made[chunk.index], strict=True):
                    if token not in loaded.engine.end_ids:
                        output.write(decoder.decode(token), stopped=not left and done.stop_reason == "stop")
                output.write(decoder.flush())
                output.flush()
                _log(json.dumps({"index": chunk.index, "text": output.text, "tokens": done.tokens,
                                 "prompt_tokens": done.prompt_tokens, "stop_reason": done.stop_reason}))  # fmt: skip
                bar.update()
    seconds = time.perf_counter() - started
    _say(f"{len(requests):,} texts, {tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.1f} a second, prompts "
         f"included, {loaded.engine.batch} at once")  # fmt: skip
    return 0


def _draw_trace(done: GenerationStatistics, path: Path) -> None:
    """Plot the stability curve, and store its points beside the picture."""
    points = done.curve
    rows = [json.dumps(point._asdict()) + "\n" for point in points]
    path.with_suffix(".jsonl").write_text("".join(rows), encoding="utf-8")
    if not points:
        _say(f"no trace: it has a point every {CURVE_TOKENS:,} tokens, got {done.tokens:,}")
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(9, 7), sharex=True, layout="constrained")
    xs = [point.tokens for point in points]
    speeds = [(b.tokens - a.tokens) / max(1e-9, b.seconds - a.seconds) for a, b in pairwise(points)]
    for axis, ys, label in (
        (axes[0], [point.repetition for point in points], "repeated share of the window"),
        (axes[1], [point.entropy for point in points], "entropy, nats"),
        (axes[2], [speeds[0] if speeds else 0.0, *speeds], "tokens/s"),
    ):
        axis.plot(xs, ys, ".-", markersize=3)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[2].set_xlabel("tokens made")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    _say(f"trace: {path}, {path.with_suffix('.jsonl')}")


def _read_prompt(arguments: argparse.Namespace) -> str:
    """Return the text to continue. A file or a pipe ends in a line end that nobody means to continue."""
    if arguments.prompt is not None:
        return _text(os.fsencode(arguments.prompt), "--prompt")
    if arguments.prompt_file is not None:
        text = _text(Path(arguments.prompt_file).read_bytes(), arguments.prompt_file)
    else:
        if sys.stdin.isatty():
            _say("reading the prompt from standard input; Ctrl-D ends it")
        text = _text(sys.stdin.buffer.read(), "standard input")
    return text.removesuffix("\n").removesuffix("\r")


def read_requests(path: Path) -> list[dict]:
    """Read a .jsonl of {"prompt": text, "seed": number, "max_new_tokens": number}, the numbers optional."""
    asked, kinds = [], {"prompt": str, "seed": int, "max_new_tokens": int}
    for number, line in enumerate(_text(path.read_bytes(), str(path)).splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
        except ValueError:
            one = None
        if not isinstance(one, dict) or "prompt" not in one:
            raise ValueError(f'{path}:{number} must be {{"prompt": text, ...}}, got {line[:60]}')
        for name, value in one.items():
            if name not in kinds or not isinstance(value, kinds[name]) or isinstance(value, bool):
                raise ValueError(f"{path}:{number} may hold prompt (text), seed and max_new_tokens (numbers), "
                                 f"got {name} {value!r:.60}")  # fmt: skip
        asked.append(one)
    if not asked:
        raise ValueError(f"{path} holds no request; give one JSON object a line")
    return asked


def _text(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} must be UTF-8 text, got byte 0x{data[error.start]:02x} at {error.start}") from None


def _chat(loaded: _Loaded) -> int:
    """Converse, one line in, one answer out: in the template of training, or in the plain form without one."""
    engine, turn = loaded.engine, "\n" + CHAT_USER
    _say("one line in, one answer out; end of input (Ctrl-D) leaves")
    for line in sys.stdin.buffer:
        if not (said := _text(line, "standard input").strip()):
            continue
        # only what is new is run: the engine holds the conversation so far
        if loaded.turn_end_id is None:
            # an answer that the stop string ended has opened the next turn itself
            opened = engine.statistics.stop_reason == "stop" and engine.options.stop == (turn.rstrip(),)
            _stream(loaded, (CHAT_USER if not engine.held else " " if opened else turn) + said + CHAT_MODEL)
        else:
            cut = [] if engine.last_id in (None, loaded.turn_end_id) else [loaded.turn_end_id]
            _stream(loaded, cut + encode_chat(loaded.tokenizer, [("user", said)]))
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    if arguments.data is None and arguments.choices is None:
        raise ValueError("give --data, a token file, or --choices, a .jsonl of questions")
    facts = describe_device(getattr(arguments, "device", "auto"))
    _log(facts.describe())
    model, info = _load(arguments.weights, facts, getattr(arguments, "precision", None))
    if arguments.data is not None:
        _evaluate_split(model, arguments)
    if arguments.choices is not None:
        tokenizer = info["tokenizer_json"]
        if tokenizer is None:
            raise ValueError(f"{arguments.weights} holds no tokenizer, which --choices needs")
        path = Path(arguments.choices)
        _text(path.read_bytes(), str(path))
        share, count = multiple_choice(
            model, lambda text: encode_prompt(tokenizer, text), path, context_id=info["bos_id"]
        )
        _log(f"{path.name}: {share:.1%} of {count:,} questions right")
    return 0


def _quantize(arguments: argparse.Namespace) -> int:
    source, out = Path(arguments.weights), Path(arguments.out)
    if out.resolve() == source.resolve():
        raise ValueError(f"--out must be another file than --weights, got {out} for both")
    _check_folder("--out", out)
    before = _loss_of(source, arguments)
    rows, count = [], len(read_weights_info(source)["crc32"])
    with tqdm(total=count, unit="tensor", file=sys.stderr, disable=None) as bar:
        for row in quantize_weights(source, out, arguments.bits):
            rows.append(row)
            bar.update()
    _log(f"{'matrix':48s} {'shape':>16s} {'error':>9s} {'worst':>9s} {'bytes':>14s}")
    for row in rows:
        shape = " x ".join(f"{n:,}" for n in row.shape)
        _log(f"{row.name:48s} {shape:>16s} {row.relative:9.2%} {row.worst:9.3f} {row.bytes:14,}")
    mean = math.sqrt(sum(row.relative**2 for row in rows) / max(1, len(rows)))
    _log(f"error: of the norm, {mean:.2%} over all matrices; worst: of an element, in root mean squares of its row")
    _log(f"wrote {out}: {out.stat().st_size:,} bytes, {out.stat().st_size / source.stat().st_size:.3f} of {source}")
    if before is not None:
        after = _loss_of(out, arguments)
        _log(f"loss {before:.4f} to {after:.4f} ({after - before:+.4f} nats), perplexity {math.exp(before):.3f} to "
             f"{math.exp(after):.3f}")  # fmt: skip
    return 0


def _loss_of(weights: Path, arguments: argparse.Namespace) -> float | None:
    """The loss of weights on --data, None without it."""
    if arguments.data is None:
        return None
    facts = describe_device(getattr(arguments, "device", "auto"))
    model, _ = _load(weights, facts, getattr(arguments, "precision", None))
    return _split_loss(model, arguments).loss


def _split_loss(model: HybridLanguageModel, arguments: argparse.Namespace) -> Evaluation:
    form = {name: value for name, value in _settings(arguments).items() if name in DATA_FORM}
    tokens = _open_data(Config().with_values(form), arguments.data)
    tokens.check_vocabulary(model.config.vocab_size)
    if arguments.context > model.config.max_context_len:
        most = model.config.max_context_len
        raise ValueError(f"context must be at most {most:,} for these weights, got {arguments.context:,}")
    length = min(arguments.context, len(tokens) - 1)
    return evaluate(model, tokens, length, split=tokens.path.name, limit_tokens=arguments.eval_tokens)


def _evaluate_split(model: HybridLanguageModel, arguments: argparse.Namespace) -> None:
    result = _split_loss(model, arguments)
    _log(result.describe())
    for first, last, loss, targets in result.by_position:
        _log(f"  positions {first:>7,} to {last - 1:>7,}: loss {loss:.4f} ({targets:,} targets)")


def _kernel_harness() -> ModuleType:
    """Load tests/benchmarks/kernels.py, which is no part of the program and may be absent beside it."""
    path = Path(__file__).resolve().parent / "tests" / "benchmarks" / "kernels.py"
    if not path.is_file():
        raise ValueError(f"bench and verify need {path}, which is not there; run them from a full checkout")
    spec = importlib.util.spec_from_file_location("benchmark_kernels", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def _bench(arguments: argparse.Namespace) -> int:
    device = getattr(arguments, "device", "auto")
    if arguments.out is not None:
        _check_folder("--out", Path(arguments.out))
    options = dict(only=arguments.only, quick=arguments.quick, peers=arguments.peers, out=arguments.out)
    return _kernel_harness().bench(**options, device=device, log=_log)


def _verify(arguments: argparse.Namespace) -> int:
    return _kernel_harness().verify(log=_log)


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code."""
    commands = {"train": _train, "plan": _plan, "generate": _generate, "prepare": _prepare, "quantize": _quantize}
    commands |= {"evaluate": _evaluate, "inspect": _inspect, "bench": _bench, "verify": _verify}
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        return commands[arguments.command](arguments)
    except BrokenPipeError:
        _drop_output()
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, TrainingError, MemoryError, torch.OutOfMemoryError) as error:
        _say(f"error: {_message(error)}")
        return 2
    except KeyboardInterrupt:
        _say("stopped by Ctrl-C")
        return 128 + signal.SIGINT


if __name__ == "__main__":
    # a terminal of another encoding shows ? where it lacks a character of the text
    sys.stdout.reconfigure(errors="replace")
    sys.exit(main())
