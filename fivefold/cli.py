"""The command line. Only the module of the chosen verb is imported, so that the start is fast."""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Annotated, Any, NamedTuple, get_args

import typer
from typer.models import OptionInfo

from fivefold import __version__, completion
from fivefold.core import JSON_SCHEMA, FivefoldError, InternalError, UnknownName, nearest, printable
from fivefold.terminal import PanelCommand, WrappedStream, discard, outliving_readers

BAD_INPUT = 2
INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h; 1 is a comparison that failed
GREETING = f"""fivefold {__version__} trains transformers over five dimensions of parallelism.

  fivefold plan llama-3.1-405b --gpus 16384 --machine h100   how to train it, how fast, and why
  fivefold verify tiny --layout "dp=2 tp=2 pp=2"              prove a layout on this machine
  fivefold train tiny --steps 20 --out runs/first             train, with planned beside measured

All commands: fivefold -h"""
_LASTING = ("train", "serve")  # verbs that end by their own result, whoever reads their output
_A_COUNT = "whole number, such as 8, 8k or 1e6"
_PAIRED = ("--layout", "--set")  # options that take key=value pairs
# Keys whose values have spaces: what the shell has joined is one value.
_SPACED = re.compile(r"""(fix|what_if|budget)=([^"']*\s[^"']*)""")
_PAIR = r"""[a-z_.]+=(\S+|"[^"]*"|'[^']*')"""
_PAIRS = re.compile(rf"{_PAIR}(\s+{_PAIR})*")


class Verb(NamedTuple):
    """A command: the module with its `run` function, and its line in the help."""

    module: str
    help: str


VERBS = {
    "calibrate": Verb(
        "fivefold.commands.calibrate", "Measure this machine and write a machine file."
    ),
    "compare-frameworks": Verb(
        "fivefold.commands.compare_frameworks",
        "Price the best layout of each framework.",
    ),
    "eval": Verb("fivefold.commands.evaluate", "Evaluate a run or a model on tasks of lm-eval."),
    "export": Verb("fivefold.commands.export", "Export a run to Hugging Face or TorchTitan."),
    "generate": Verb("fivefold.commands.generate", "Complete prompts with a run or a model."),
    "import": Verb(
        "fivefold.commands.import_model", "Import a Hugging Face or TorchTitan model as a run."
    ),
    "launch": Verb("fivefold.commands.launch", "Write the script that starts a plan on a cluster."),
    "observe": Verb(
        "fivefold.commands.observe", "Open the page: explore plans, learn, inspect runs."
    ),
    "plan": Verb("fivefold.commands.plan", "Resolve a job or search its layout, with reasons."),
    "rehearse": Verb("fivefold.commands.rehearse", "Run one step of any rank of any job here."),
    "schedule": Verb("fivefold.commands.schedule", "Draw and time a pipeline schedule."),
    "score": Verb("fivefold.commands.score", "Compare the planner's estimates with measured runs."),
    "serve": Verb("fivefold.commands.serve", "Serve a run or a model with the API of OpenAI."),
    "simulate": Verb(
        "fivefold.commands.simulate", "Simulate a run with failures before it happens."
    ),
    "tokens": Verb(
        "fivefold.commands.tokens", "Tokenize text into a folder, or check such a folder."
    ),
    "train": Verb("fivefold.commands.train", "Train, and compare every step with the plan."),
    "verify": Verb(
        "fivefold.commands.verify", "Prove that a layout computes the same as one device."
    ),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake prints one message and exits with code 2."""
    args = gather_pairs(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without · prints ?
    # Wrap long lines of text where a person reads them; JSON and files stay as they are.
    if "--json" not in args and sys.stdout is not None and sys.stdout.isatty():
        sys.stdout = WrappedStream(sys.stdout)
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr = WrappedStream(sys.stderr)
    try:
        lasting = next((word for word in args if not word.startswith("-")), None) in _LASTING
        with outliving_readers() if lasting else contextlib.nullcontext():
            code = run(args)
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has ended
        code = 0
        discard(sys.stdout)
    except OSError as error:
        code = BAD_INPUT
        discard(sys.stdout)
        typer.echo(
            f"fivefold: cannot write to standard output: {error.strerror}; redirect it to a disk "
            "with free space",
            err=True,
        )
    if arguments is None:  # the process ends: no look for garbage in what it leaves behind
        gc.freeze()
    sys.exit(code)


def run(args: list[str]) -> int | str | None:
    """Run one verb; returns the exit code."""
    chosen = next((word for word in args if not word.startswith("-")), None)
    if chosen == "plan":  # it ends before garbage matters, and looking for some takes about 5%
        gc.disable()
    try:
        if (typed := completion.typed_words()) is not None:
            # Print what can follow the words, for the shell that asks.
            pairs = completion.degrees_after(typed, _PAIRED)
            if pairs is not None:
                typer.echo(completion.answer(pairs))
                return 0
            completion.pass_on(gather_pairs(typed[:-1]) + typed[-1:])
            verb = next((word for word in typed[:-1] if not word.startswith("-")), None)
            build(verb)([], prog_name="fivefold")
            return 0
        if not args:
            typer.echo(GREETING)
            return 0
        if args[0] == chosen and chosen not in VERBS:
            raise UnknownName("command", chosen, VERBS)
        args = with_numbers(args, options_of(chosen)) if chosen in VERBS else args
        return build(chosen)(args, prog_name="fivefold", standalone_mode=False) or 0
    except FivefoldError as error:
        from fivefold.core.model import presets as models

        message = str(error)
        if names := [word for word in args if word in message and models.is_hub_name(word)]:
            message += f"\n  - {models.hub_hint(names[0])}"
        return _failed(message, error, BAD_INPUT, "--json" in args)
    except InternalError as error:
        message = f"internal error: {error}; report it with this command"
        return _failed(message, error, INTERNAL_ERROR, "--json" in args)
    except SystemExit as stop:
        # The libraries that print turn a closed pipe into an error exit.
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        return stop.code
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # Typer refuses an unknown option or a missing value: said in our words.
        return _failed(usage_text(error, chosen, args), UsageError(), BAD_INPUT, "--json" in args)
    finally:
        gc.enable()


class UsageError(FivefoldError):
    """A command line whose options or arguments the command does not have."""


def options_of(verb: str) -> dict[str, Any]:
    """The options of a command by their names, each with the type of its value."""
    kinds: dict[str, Any] = {}
    run = import_module(VERBS[verb].module).run
    for parameter in inspect.signature(run, eval_str=True).parameters.values():
        kind, *info = get_args(parameter.annotation) or (parameter.annotation,)
        if info and isinstance(info[0], OptionInfo):
            # In Annotated the first name takes the place of the default.
            names = [name for name in (info[0].default, *(info[0].param_decls or ())) if name]
            named = [name for name in names if str(name).startswith("-")]
            kinds |= dict.fromkeys(named or [f"--{parameter.name.replace('_', '-')}"], kind)
    return kinds


def with_numbers(args: list[str], kinds: Mapping[str, Any]) -> list[str]:
    """The arguments with numbers as Python writes them: 8k is 8192. What is no number is
    refused."""
    from fivefold.core import parse_count

    parsed: list[str] = []
    for word in args:
        name, equals, text = word.partition("=")
        option, text = (name, text) if equals else (parsed[-1] if parsed else "", word)
        types = _parts(kinds.get(option))
        if types & {int, float}:
            key = option.lstrip("-").replace("-", "_")
            reader = partial(parse_count, key=key) if int in types or key == "tokens" else float
            try:
                number = str(reader(text))
            except ValueError:
                such = "number, such as 0.5 or 1e-3" if reader is float else _A_COUNT
                raise FivefoldError(f"{option} {text}: give a {such}") from None
            word = f"{name}={number}" if equals else number
        parsed.append(word)
    return parsed


def _parts(kind: Any) -> set[Any]:
    """A type and those inside of it: of list[int] | None also int."""
    return {kind}.union(*map(_parts, get_args(kind)))


def own_keys(verb: str) -> Mapping[str, Any]:
    """The keys of `--set` that a command has beside those of plan, training and model."""
    return getattr(import_module(VERBS[verb].module).run, "set_keys", {})


def usage_text(error: Exception, verb: str | None, args: Sequence[str]) -> str:
    """What is wrong with options or arguments, and the nearest way out."""
    message: str = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    usage_hint = f"`fivefold {verb or ''}".rstrip() + " -h` lists what it takes"
    if type(error).__name__ != "NoSuchOption" or verb is None:
        return f"{message[:1].lower()}{message[1:]}; {usage_hint}"
    from fivefold.core.plan import plan_keys, train_keys

    option: str = error.option_name  # type: ignore[attr-defined]
    name = option.lstrip("-")
    flags = [flag.removeprefix("--") for flag in options_of(verb)]
    if name == "output" and "-o" in flags:
        return f"No such option: {option}, which is a number of tokens: a file is -o FILE"
    keys = [*own_keys(verb)]
    if "schedule" in flags:  # it takes those of a plan too
        keys += [*train_keys(), *plan_keys()]
    if setting := _as_setting(name, keys, args):
        return f"No such option: {option}; it is a key: --set {setting}"
    near = nearest(name, [*flags, *keys], alike=0.7)
    shown = [f"--{key}" if key in flags else f"--set {key}=VALUE" for key in near]
    return f"No such option: {option}; " + (
        f"did you mean {' or '.join(shown)}?" if near else usage_hint
    )


def _as_setting(option: str, keys: Collection[str], args: Sequence[str]) -> str:
    """What `--set` takes in place of an option that is a key, with the value that it has here."""
    negated = option.removeprefix("no-")
    key = negated.replace("-", "_")
    if key not in keys:
        return ""
    if negated != option:
        return f"{key}=false"
    following = ""
    for word, value in zip(args, [*args[1:], "-"], strict=True):
        head, equals, text = word.partition("=")
        if head == f"--{option}":
            following = text if equals else value
    value = "true" if not following or following.startswith("-") else following
    return f"""'{key}="{value}"'""" if re.search(r"[\s,]", value) else f"{key}={value}"


def _failed(message: str, error: Exception, code: int, as_json: bool) -> int:
    """Say what is wrong; with `--json` as JSON too, on standard output. Returns the exit code."""
    typer.echo(f"fivefold: {printable(message)}", err=True)
    if as_json:
        import json

        kind = type(error).__name__
        report: dict[str, object] = {"kind": kind, "message": message, "exit_code": code}
        if isinstance(error, FivefoldError) and error.ways:
            report["ways"] = list(error.ways)
        typer.echo(json.dumps({"schema_version": JSON_SCHEMA, "error": report}))
    return code


def build(chosen: str | None) -> typer.Typer:
    """The application. Only the chosen verb is loaded; the others have their help line."""
    app = typer.Typer(
        name="fivefold",
        help="Train transformers with five dimensions of parallelism: plan, rehearse, verify, "
        "train and inspect.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_top)
    for name, verb in VERBS.items():
        run = import_module(verb.module).run if name == chosen else _nothing
        app.command(name, help=verb.help, cls=PanelCommand)(run)
    return app


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"fivefold {__version__}")
        raise typer.Exit


def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Options before the verb."""


def _nothing() -> None:
    """Placeholder for a verb that was not chosen."""


def gather_pairs(args: list[str]) -> list[str]:
    """Join pairs after an option, so that `--layout dp=2 tp=2` needs no quotes; words of several
    pairs may stand among them."""
    gathered: list[str] = []
    collecting = False
    for word in args:
        if collecting and (match := _SPACED.fullmatch(word)):
            word = f'{match[1]}="{match[2]}"'
        is_pair = _PAIRS.fullmatch(word) is not None
        if collecting and is_pair and gathered[-1] not in _PAIRED:
            gathered[-1] += f" {word}"
            continue
        collecting = word in _PAIRED or (collecting and is_pair)
        gathered.append(word)
    return gathered
