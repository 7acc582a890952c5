"""The command line. Only the module of the chosen verb is imported, so that the start is fast."""

from __future__ import annotations

import contextlib
import gc
import io
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, NamedTuple

import typer

from fivefold import __version__, completion
from fivefold.core.errors import JSON_SCHEMA, FivefoldError, InternalError, printable
from fivefold.terminal import PanelCommand, WrappedStream, discard, outliving_readers

BAD_INPUT = 2
INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h; 1 is a comparison that failed
GREETING = f"""fivefold {__version__} trains transformers over five dimensions of parallelism.

  fivefold plan llama-3.1-405b --gpus 16384 --machine h100   how to train it, how fast, and why
  fivefold verify tiny --layout "dp=2 tp=2 pp=2"              prove a layout on this machine
  fivefold train tiny --steps 20 --out runs/first             train, with planned beside measured

All commands: fivefold -h"""
_LASTING = ("train", "serve")  # verbs that end by their own result, whoever reads their output
_PAIRED = ("--layout", "--set", "--fix", "--what-if")  # options that take key=value pairs


class Verb(NamedTuple):
    """A command: the module with its `run` function, and its line in the help."""

    module: str
    help: str


VERBS = {
    "calibrate": Verb("fivefold.verbs.calibrate", "Measure this machine and write a machine file."),
    "compare-frameworks": Verb(
        "fivefold.verbs.compare_frameworks",
        "Price the best layout of each framework.",
    ),
    "eval": Verb("fivefold.verbs.evaluate", "Evaluate a run or a model on tasks of lm-eval."),
    "export": Verb("fivefold.verbs.export_weights", "Export a run to Hugging Face or TorchTitan."),
    "generate": Verb("fivefold.verbs.generate", "Complete prompts with a run or a model."),
    "import": Verb(
        "fivefold.verbs.import_weights", "Import a Hugging Face or TorchTitan model as a run."
    ),
    "launch": Verb("fivefold.verbs.launch", "Write the script that starts a plan on a cluster."),
    "observe": Verb("fivefold.verbs.observe", "Open the page: explore plans, learn, inspect runs."),
    "plan": Verb("fivefold.verbs.plan", "Resolve a job or search its layout, with reasons."),
    "rehearse": Verb("fivefold.verbs.rehearse", "Run one step of any rank of any job here."),
    "schedule": Verb("fivefold.verbs.schedule", "Draw and time a pipeline schedule."),
    "score": Verb("fivefold.verbs.score", "Compare the planner's estimates with measured runs."),
    "serve": Verb("fivefold.verbs.serve", "Serve a run or a model with the API of OpenAI."),
    "simulate": Verb("fivefold.verbs.simulate", "Simulate a run with failures before it happens."),
    "tokens": Verb("fivefold.verbs.tokens", "Tokenize text into a folder, or check such a folder."),
    "train": Verb("fivefold.verbs.train", "Train, and compare every step with the plan."),
    "verify": Verb("fivefold.verbs.verify", "Prove that a layout computes the same as one device."),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake prints one message and exits with code 2."""
    words = gather_pairs(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without · prints ?
    wrap_for_terminal(words)
    try:
        lasting = next((word for word in words if not word.startswith("-")), None) in _LASTING
        with outliving_readers() if lasting else contextlib.nullcontext():
            code = run(words)
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


def run(words: list[str]) -> int | str | None:
    """Run one verb; returns the exit code."""
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen == "plan":  # it ends before garbage matters, and looking for some takes about 5%
        gc.disable()
    try:
        if (typed := completion.typed_words()) is not None:
            return _complete(typed)
        if not words:
            typer.echo(GREETING)
            return 0
        build(chosen)(words, prog_name="fivefold")
    except FivefoldError as error:
        return _failed(str(error), error, BAD_INPUT, "--json" in words)
    except InternalError as error:
        said = f"internal error: {error}; report it with this command"
        return _failed(said, error, INTERNAL_ERROR, "--json" in words)
    except SystemExit as stop:
        # The libraries that print turn a closed pipe into an error exit.
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        # Typer has printed what it refuses, an unknown option or a missing one.
        refused = getattr(stop.__context__, "format_message", None)
        if refused is not None and "--json" in words:
            _print_error("UsageError", refused(), BAD_INPUT)
        return stop.code
    finally:
        gc.enable()
    return 0


def _complete(typed: list[str]) -> int:
    """Print what can follow the words, for the shell that asks."""
    found = completion.degrees_after(typed, _PAIRED)
    if found is not None:
        typer.echo(completion.answer(found))
        return 0
    completion.pass_on(gather_pairs(typed[:-1]) + typed[-1:])
    verb = next((word for word in typed[:-1] if not word.startswith("-")), None)
    build(verb)([], prog_name="fivefold")
    return 0


def wrap_for_terminal(words: list[str]) -> None:
    """Wrap long lines of text where a person reads them; JSON and files stay as they are."""
    if "--json" not in words and sys.stdout is not None and sys.stdout.isatty():
        sys.stdout = WrappedStream(sys.stdout)
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr = WrappedStream(sys.stderr)


def _failed(said: str, error: Exception, code: int, as_json: bool) -> int:
    """Say what is wrong; with `--json` as JSON too, on standard output. Returns the exit code."""
    typer.echo(f"fivefold: {printable(said)}", err=True)
    if as_json:
        ways = error.ways if isinstance(error, FivefoldError) else ()
        _print_error(type(error).__name__, said, code, ways)
    return code


def _print_error(kind: str, said: str, code: int, ways: Sequence[str] = ()) -> None:
    import json

    found: dict[str, object] = {"kind": kind, "message": said, "exit_code": code}
    found |= {"ways": list(ways)} if ways else {}
    typer.echo(json.dumps({"schema_version": JSON_SCHEMA, "error": found}))


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


def _print_version(asked: bool) -> None:
    if asked:
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


def gather_pairs(words: list[str]) -> list[str]:
    """Join pairs after an option, so that `--layout dp=2 tp=2` needs no quotes."""
    gathered: list[str] = []
    collecting = False
    for word in words:
        is_pair = re.fullmatch(r"[a-z_.]+=\S+", word) is not None
        if collecting and is_pair and gathered[-1] not in _PAIRED:
            gathered[-1] += f" {word}"
            continue
        collecting = word in _PAIRED or (collecting and is_pair)
        gathered.append(word)
    return gathered
