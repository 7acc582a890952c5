"""The verbs. A verb's module is imported only when it is chosen, so that starting stays instant."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from typing import NamedTuple

import typer

from fivefold.core.errors import FivefoldError

BAD_INPUT = 2


class Verb(NamedTuple):
    """A command: the module whose `run` it calls, and its line in the help."""

    module: str
    help: str


VERBS = {
    "plan": Verb("fivefold.verbs.plan", "Resolve a job: layout, groups, links, batch, parameters."),
    "schedule": Verb("fivefold.verbs.schedule", "Draw and time a pipeline schedule."),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake prints one message and exits with code 2."""
    words = gather_pairs(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in words if not word.startswith("-")), None)
    try:
        build(chosen)(words)
    except FivefoldError as error:
        typer.echo(f"fivefold: {error}", err=True)
        sys.exit(BAD_INPUT)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build(chosen: str | None) -> typer.Typer:
    """The application, with only the chosen verb behind its name."""
    app = typer.Typer(
        name="fivefold",
        help="Train transformers across five dimensions of parallelism, and know the truth about "
        "it before, during and after the run.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_nothing)
    for name, verb in VERBS.items():
        run = import_module(verb.module).run if name == chosen else _nothing
        app.command(name, help=verb.help)(run)
    return app


def _nothing() -> None:
    """Stands for a verb that was not chosen."""


def gather_pairs(words: list[str]) -> list[str]:
    """`--layout dp=2 tp=2` may be written without quotes: pairs that follow belong to it."""
    gathered: list[str] = []
    collecting = False
    for word in words:
        is_pair = re.fullmatch(r"[a-z_.]+=\S+", word) is not None
        if collecting and is_pair and gathered[-1] not in ("--layout", "--set"):
            gathered[-1] += f" {word}"
            continue
        collecting = word in ("--layout", "--set") or (collecting and is_pair)
        gathered.append(word)
    return gathered
