"""`fivefold observe`: the page to explore plans, learn, and inspect runs; offline or as text."""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, urlencode

import typer

from fivefold.commands.job import one_of
from fivefold.commands.options import SetKey, json_text, progress_bar, with_plan_options
from fivefold.core import PRECISIONS, FivefoldError, UnknownName, did_you_mean, printable
from fivefold.core.model import presets as models
from fivefold.core.plan import PlanOptions, read
from fivefold.records import RunFacts, StepSpans, run_reader
from fivefold.records import run_writer as run_folder
from fivefold.render import write_text
from fivefold_page import document
from fivefold_page.explore import State, state_of
from fivefold_page.run import RunSource
from fivefold_page.run import compare as run_compare

_TABS = ("explore", "learn", "run")
_LAST_PORT = 65_535


@dataclass(frozen=True)
class _Folders:
    """Run folders by name, which are read again for every request; damage is named once."""

    paths: dict[str, Path]
    named: set[str] = field(default_factory=set[str])

    @property
    def names(self) -> list[str]:
        return list(self.paths)

    def facts(self, name: str) -> RunFacts:
        facts = run_reader.read(self.paths[name])
        for damage in facts.damage:
            if damage not in self.named:
                self.named.add(damage)
                typer.echo(f"fivefold: {printable(damage)}", err=True)
        return facts

    def spans(self, name: str, step: int) -> StepSpans | None:
        return run_reader.read_step(self.paths[name], step)


def _is_run(target: str) -> bool:
    return (Path(target) / run_folder.RUN).is_file()


def _runs(folders: list[str]) -> _Folders:
    """These run folders; raises for every one that is none."""
    wrong = [folder for folder in folders if not _is_run(folder)]
    if wrong:
        reasons = [
            f"{folder} has no {run_folder.RUN}"
            if Path(folder).exists()
            else f"{folder} does not exist"
            for folder in wrong
        ]
        raise FivefoldError(
            f"{'; '.join(reasons)}: give run folders, which train --out made, or one target"
        )
    real = [Path(folder).resolve() for folder in folders]
    twice = [folder for folder, path in zip(folders, real, strict=True) if real.count(path) > 1]
    if twice:
        raise FivefoldError(f"{twice[0]} is given twice: leave one out")
    names = run_compare.labels([str(path) for path in real])
    return _Folders(dict(zip(names, map(Path, folders), strict=True)))


def _look_up(target: str) -> str:
    """The target; for a run folder its plan, or the default model if its plan cannot be read."""
    folder = Path(target)
    if _is_run(target):
        with contextlib.suppress(FivefoldError):
            read(folder / run_folder.PLAN)
            return str(folder / run_folder.PLAN)
        return State.model
    if len(folder.parts) > 1 and not folder.exists():
        raise FivefoldError(
            f"{target} does not exist: give the folder that train --out made, a plan file, a "
            "config.json, or the name of a model"
        )
    if target not in models.presets() and not folder.exists() and not folder.suffix[1:].isalpha():
        known = did_you_mean(target, sorted(models.presets()))
        raise FivefoldError(
            f"{target} is neither a run folder, which train --out makes, nor a model: {known}"
        )
    if target not in models.presets() and folder.is_dir() and not (folder / "config.json").exists():
        raise FivefoldError(
            f"{target} is neither a run, which has a {run_folder.RUN}, nor a model, which has a "
            "config.json: give the folder that train --out made"
        )
    return target


def _run(
    options: PlanOptions,
    command: typer.Context,
    more: Annotated[
        list[str] | None,
        typer.Argument(help="Further run folders, shown side by side.", metavar="RUN..."),
    ] = None,
    at: Annotated[
        str | None, SetKey("Part of the page to open: what follows # in its address.")
    ] = None,
    to_file: Annotated[
        Path | None, typer.Option("--html", help="Write one file that works offline.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the pictures as text.")] = False,
    panel: Annotated[
        str | None, typer.Option(help="Print one panel only, such as memory, context or loss.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help=f"Estimate in {', '.join(PRECISIONS)}.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the page; 0 picks a free one.")] = 5555,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the data of the pictures as JSON.")
    ] = False,
) -> None:
    """Open the page: explore plans, learn about parallelism, inspect runs."""
    prints = text or as_json
    if prints + (to_file is not None) > 1:
        raise FivefoldError("--html writes a file, --text and --json print: choose one")
    if panel is not None and not prints:
        raise FivefoldError("--panel chooses what is printed: add --text or --json")
    if not 0 <= port <= _LAST_PORT:
        raise FivefoldError(f"--port {port}: give a number from 0 to {_LAST_PORT}")
    target = command.params["target"]
    folders = [target, *(more or [])]
    run = _runs(folders) if more or _is_run(target) else None
    job = _job(options, precision and one_of("--precision", precision, PRECISIONS), run)
    tab, params = _place(at, job, run)
    opens = params if tab == "explore" else job
    address = f"{tab}?{urlencode(params)}" if params else tab
    arguments, names = (shlex.join(folders), run.names) if run else ("", [])
    start = document.PageStart(address, opens, arguments, names)
    if prints:
        with progress_bar("answers") as bar:
            answers = document.answers(tab, params, panel, run, bar.update)
        lines = () if as_json else document.lines(answers, panel)
        typer.echo(json_text(answers) if as_json else printable("\n".join(lines)))
    elif to_file is not None:
        _write(to_file, start, run)
    else:
        _serve(start, run, port)


def _job(options: PlanOptions, precision: str | None, run: RunSource | None) -> dict[str, str]:
    """The job that Explore opens with; the default job if it cannot show the plan of a run."""
    try:
        return state_of(options, precision).params()
    except FivefoldError:
        if run is None:
            raise
        return State().params()


def _place(
    at: str | None, job: dict[str, str], run: RunSource | None
) -> tuple[str, dict[str, str]]:
    """The tab to open, and its parameters."""
    if at is None:
        return ("run", {}) if run else ("explore", job)
    tab, _, query = at.removeprefix("#").partition("?")
    if tab not in _TABS:
        raise UnknownName("tab in at", tab, _TABS)
    if tab == "run" and run is None:
        raise FivefoldError("at=run: name the run, as in fivefold observe runs/first")
    return tab, dict(parse_qsl(query))


def _write(file: Path, start: document.PageStart, run: RunSource | None) -> None:
    """Write the page to a file, with all answers that its controls need."""
    document.plotly()
    with progress_bar("answers") as bar:
        answers = document.offline_answers(start.job, run, bar.update)
    command_line = shlex.join(["fivefold", "observe", *_without_file(sys.argv[2:])])
    write_text(file, document.offline_page(start, answers, command_line))
    typer.echo(f"{file}: {len(answers):,} answers, {file.stat().st_size / 2**20:.1f} MiB")


def _without_file(words: list[str]) -> list[str]:
    """The command line without --html, which serves the same page."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if "--html" not in (before, word) and not word.startswith("--html=")
    ]


def _serve(start: document.PageStart, run: RunSource | None, port: int) -> None:
    try:
        from fivefold_page import server
    except ImportError as error:
        raise FivefoldError(
            f"the page is served by Starlette and uvicorn ({error}): {document.INSTALL}; "
            "--text and --json do not need them"
        ) from error

    def ready(address: str) -> None:
        typer.echo(f"fivefold observe: {address} (stop it with Ctrl-C)")
        sys.stdout.flush()

    server.serve(start, run, port, ready)


run = with_plan_options(_run, default_target="llama-3.1-405b", look_up=_look_up)
