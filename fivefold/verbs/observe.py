"""`fivefold observe`: a page to explore, learn and look at runs; offline, or as text."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, urlencode

import typer

from fivefold.core import models
from fivefold.core.errors import FivefoldError, UnknownName
from fivefold.core.plan import Wishes, read
from fivefold.page import document
from fivefold.page.document import RunSource
from fivefold.page.explore_state import State, state_of
from fivefold.planner import PRECISIONS
from fivefold.records import run_folder, run_reader
from fivefold.records.spans import RunFacts, StepSpans
from fivefold.report import write_text
from fivefold.verbs import one_of, progress_bar, with_plan_options

_TABS = ("explore", "learn", "run")
_LAST_PORT = 65_535


@dataclass(frozen=True)
class _Folder:
    """A run that is read anew whenever the page asks."""

    path: Path

    def facts(self) -> RunFacts:
        return run_reader.read(self.path)

    def spans(self, step: int) -> StepSpans | None:
        return run_reader.read_step(self.path, step)


def _look_up(target: str) -> str:
    """A run folder stands for the plan that it ran; a plan that cannot be read keeps nobody from
    looking at the run."""
    folder = Path(target)
    if (folder / run_folder.RUN).is_file():
        with contextlib.suppress(FivefoldError):
            read(folder / run_folder.PLAN)
            return str(folder / run_folder.PLAN)
        return State.model
    if target not in models.presets() and folder.is_dir() and not (folder / "config.json").exists():
        raise FivefoldError(
            f"{target} is neither a run, which has a {run_folder.RUN}, nor a model, which has a "
            "config.json: give the folder that train --out made"
        )
    return target


def _run(
    wishes: Wishes,
    command: typer.Context,
    at: Annotated[
        str | None,
        typer.Option(help="An address of the page: what stands behind its #.", show_default=False),
    ] = None,
    to_file: Annotated[
        Path | None, typer.Option("--html", help="Write one file that opens offline.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the pictures as text.")] = False,
    panel: Annotated[
        str | None, typer.Option(help="Print one panel only, as in memory, context or loss.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Estimate in bf16, fp8, fp16 or fp32.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes a free one.")] = 5555,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what pictures are made of.")
    ] = False,
) -> None:
    """Look at a job, at what parallelism is, and at a run: planned beside measured."""
    prints = text or as_json
    if prints + (to_file is not None) > 1:
        raise FivefoldError("--html writes a file, --text and --json print: choose one")
    if panel is not None and not prints:
        raise FivefoldError("--panel picks what is printed: add --text or --json")
    if not 0 <= port <= _LAST_PORT:
        raise FivefoldError(f"--port {port}: give a number from 0 to {_LAST_PORT}")
    target = command.params["target"]
    run = _Folder(Path(target)) if _look_up(target) != target else None
    job = _job(wishes, precision and one_of("precision", precision, PRECISIONS), run)
    tab, params = _place(at, job, run)
    opens = params if tab == "explore" else job
    start = document.PageStart(_address(tab, params), opens, target if run else "")
    if prints:
        with progress_bar("ask") as on_progress:
            found = document.answers(tab, params, panel, run, on_progress or _silent)
        typer.echo(json.dumps(found) if as_json else "\n".join(document.lines(found, panel)))
    elif to_file is not None:
        _write(to_file, start, run)
    else:
        _serve(start, run, port)


def _job(wishes: Wishes, precision: str | None, run: RunSource | None) -> dict[str, str]:
    """What Explore begins with; where a run's plan is none for the page, its usual job."""
    try:
        return state_of(wishes, precision).params()
    except FivefoldError:
        if run is None:
            raise
        return State().params()


def _place(
    at: str | None, job: dict[str, str], run: RunSource | None
) -> tuple[str, dict[str, str]]:
    """The tab and its parameters to begin with."""
    if at is None:
        return ("run", {}) if run else ("explore", job)
    tab, _, query = at.removeprefix("#").partition("?")
    if tab not in _TABS:
        raise UnknownName("tab in --at", tab, _TABS)
    if tab == "run" and run is None:
        raise FivefoldError("--at run: say of which run, as in fivefold observe runs/first")
    return tab, dict(parse_qsl(query))


def _address(tab: str, params: dict[str, str]) -> str:
    return f"{tab}?{urlencode(params)}" if params else tab


def _silent(share: float) -> None:
    """Nobody looks."""


def _write(file: Path, start: document.PageStart, run: RunSource | None) -> None:
    """A file with the page, and with every answer that its controls ask for next."""
    from fivefold.page import document

    document.plotly()
    with progress_bar("ask") as on_progress:
        answers = document.offline_answers(start.job, run, on_progress or _silent)
    words = shlex.join(["fivefold", "observe", *_without_file(sys.argv[2:])])
    write_text(file, document.offline_page(start, answers, words))
    typer.echo(f"{file}: {len(answers):,} answers, {file.stat().st_size / 2**20:.1f} MiB")


def _without_file(words: list[str]) -> list[str]:
    """The command line that serves what was written to a file."""
    kept: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if before != "--html" and word != "--html" and not word.startswith("--html="):
            kept.append(word)
    return kept


def _serve(start: document.PageStart, run: RunSource | None, port: int) -> None:
    try:
        from fivefold.page import server
    except ImportError as error:
        raise FivefoldError(
            f"the page is served by Starlette and uvicorn ({error}): {document.INSTALL}; "
            "--text and --json do without"
        ) from error

    def ready(address: str) -> None:
        typer.echo(f"fivefold observe: {address} (stop it with Ctrl-C)")
        sys.stdout.flush()

    server.serve(start, run, port, ready)


run = with_plan_options(_run, default_target="llama-3.1-405b", look_up=_look_up)
