"""`fivefold observe`: a page to explore, learn and look at runs; offline, or as text."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, urlencode

import typer

from fivefold.core.errors import FivefoldError, UnknownName
from fivefold.core.plan import Wishes
from fivefold.core.spans import RunFacts, StepSpans
from fivefold.report.files import write_text
from fivefold.report.page import html, twins
from fivefold.report.page.begin import state_of
from fivefold.report.page.questions import Run
from fivefold.run import records, spans
from fivefold.verbs.options import progress_bar, with_plan_options

_TABS = ("explore", "learn", "run")


@dataclass(frozen=True)
class _Folder:
    """A run that is read anew whenever the page asks."""

    path: Path

    def facts(self) -> RunFacts:
        return spans.read(self.path)

    def spans(self, step: int) -> StepSpans | None:
        return spans.spans(self.path, step)


def _look_up(target: str) -> str:
    """A run folder stands for the plan that it ran."""
    is_run = (Path(target) / records.RUN).is_file()
    return str(Path(target) / records.PLAN) if is_run else target


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
        str | None, typer.Option(help="Print one panel only, as in memory, ring or loss.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes a free one.")] = 5555,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what pictures are made of.")
    ] = False,
) -> None:
    """Look at a job, at what parallelism is, and at a run: planned beside measured."""
    target = command.params["target"]
    run = _Folder(Path(target)) if _look_up(target) != target else None
    tab, params = _place(at, wishes, run)
    if text or as_json:
        with progress_bar("ask") as on_progress:
            found = twins.answers(tab, params, panel, run, on_progress or _silent)
        typer.echo(json.dumps(found) if as_json else "\n".join(twins.lines(found, panel)))
    elif to_file is not None:
        _write(to_file, tab, params, run)
    else:
        _serve(_address(tab, params), run, port)


def _place(at: str | None, wishes: Wishes, run: Run | None) -> tuple[str, dict[str, str]]:
    """The tab and its parameters to begin with."""
    if at is None:
        return ("run", {}) if run else ("explore", state_of(wishes).params())
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


def _write(file: Path, tab: str, params: dict[str, str], run: Run | None) -> None:
    """A file with the page, and with every answer that its controls ask for next."""
    from fivefold.report.page import snapshot

    html.plotly()
    job = params if tab == "explore" else {}
    with progress_bar("ask") as on_progress:
        answers = snapshot.embedded(job, run, on_progress or _silent)
    words = shlex.join(["fivefold", "observe", *_without_file(sys.argv[2:])])
    write_text(file, html.whole(_address(tab, params), run is not None, answers, words))
    typer.echo(f"{file}: {len(answers):,} answers, {file.stat().st_size / 2**20:.1f} MiB")


def _without_file(words: list[str]) -> list[str]:
    """The command line that serves what was written to a file."""
    kept: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if before != "--html" and word != "--html" and not word.startswith("--html="):
            kept.append(word)
    return kept


def _serve(start: str, run: Run | None, port: int) -> None:
    try:
        from fivefold.report.page import server
    except ImportError as error:
        raise FivefoldError(
            f"the page is served by Starlette and uvicorn ({error}): {html.INSTALL}; --text and "
            "--json do without"
        ) from error

    def ready(address: str) -> None:
        typer.echo(f"fivefold observe: {address} (stop it with Ctrl-C)")
        sys.stdout.flush()

    server.serve(start, run, port, ready)


run = with_plan_options(_run, default_target="llama-3.1-405b", look_up=_look_up)
