"""`fivefold observe`: the page to explore plans, learn, and inspect runs; offline or as text."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qsl, urlencode

import typer

from fivefold.commands.job import (
    GivenJob,
    Model,
    OnProgress,
    TaskProgress,
    given_job,
    one_of,
    warn_caller,
)
from fivefold.commands.options import (
    SetKey,
    print_answer,
    shown_progress,
    warn,
    with_plan_options,
)
from fivefold.core import PRECISIONS, FivefoldError, UnknownName, did_you_mean, printable
from fivefold.core.model import presets as models
from fivefold.core.plan import PlanOptions, read
from fivefold.records import RunFacts, StepSpans, run_reader
from fivefold.records import run_writer as run_folder
from fivefold.render import write_text

if TYPE_CHECKING:  # the page needs numpy: bad options are refused before it is loaded
    from fivefold_page import document
    from fivefold_page.run import RunSource

DEFAULT_MODEL = "llama-3.1-405b"
_TABS = ("explore", "learn", "run")
_LAST_PORT = 65_535


@dataclass(frozen=True)
class _Folders:
    """Run folders by name, which are read again for every request; damage is named once."""

    paths: dict[str, Path]
    on_warning: Callable[[str], None]
    named: set[str] = field(default_factory=set[str])

    @property
    def names(self) -> list[str]:
        return list(self.paths)

    def facts(self, name: str) -> RunFacts:
        facts = run_reader.read(self.paths[name])
        for damage in facts.damage:
            if damage not in self.named:
                self.named.add(damage)
                self.on_warning(printable(damage))
        return facts

    def spans(self, name: str, step: int) -> StepSpans | None:
        return run_reader.read_step(self.paths[name], step)


def _is_run(target: str | Path) -> bool:
    return (Path(target) / run_folder.RUN).is_file()


def _runs(folders: Sequence[str], on_warning: Callable[[str], None] = warn) -> _Folders:
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
    from fivefold_page.run import compare as run_compare

    names = run_compare.labels([str(path) for path in real])
    return _Folders(dict(zip(names, map(Path, folders), strict=True)), on_warning)


def _look_up(target: str) -> str:
    """The target; for a run folder its plan, or the default model if its plan cannot be read."""
    folder = Path(target)
    if _is_run(target):
        with contextlib.suppress(FivefoldError):
            read(folder / run_folder.PLAN)
            return str(folder / run_folder.PLAN)
        return DEFAULT_MODEL
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
    runs: Annotated[
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
    target = command.params["target"]
    with shown_progress("answers") as on_progress:
        page = observe(
            GivenJob(options, frozenset(), is_open=False),
            runs=[target, *(runs or [])] if runs or _is_run(target) else (),
            at=at,
            panel=panel,
            precision=precision,
            on_progress=on_progress,
            on_warning=warn,
        )
        if prints:
            print_answer(page, as_json)
        elif to_file is not None:
            command_line = shlex.join(["fivefold", "observe", *_without_file(sys.argv[2:])])
            number = page.write_html(to_file, command_line)
            size = to_file.stat().st_size / 2**20
            typer.echo(f"{to_file}: {number:,} answers, {size:.1f} MiB")
        else:
            page.serve(port, _announce)


def _announce(address: str) -> None:
    typer.echo(f"fivefold observe: {address} (stop it with Ctrl-C)")
    sys.stdout.flush()


@dataclass(frozen=True)
class ObservedPage:
    """A tab of the page, with the job of Explore and the runs that it shows.

    `str()` is the text of `fivefold observe --text`, `to_json()` its JSON.
    """

    start: document.PageStart
    tab: str
    params: Mapping[str, str]
    panel: str | None
    run: RunSource | None
    on_progress: OnProgress | None

    @cached_property
    def _views(self) -> dict[str, Any]:
        from fivefold_page import document

        return document.answers(self.tab, self.params, self.panel, self.run, self._report)

    def _report(self, share: float) -> None:
        if self.on_progress is not None:
            self.on_progress(TaskProgress(share, 1.0, "answers"))

    def to_json(self) -> dict[str, Any]:
        """What `fivefold observe --json` prints."""
        return self._views

    def __str__(self) -> str:
        from fivefold_page import document

        return printable("\n".join(document.lines(self._views, self.panel)))

    def write_html(self, path: str | Path, command: str = "fivefold observe") -> int:
        """Write one file that works offline; returns how many answers it has. `command` serves the
        same page."""
        from fivefold_page import document

        document.plotly()
        answers = document.offline_answers(self.start.job, self.run, self._report)
        write_text(Path(path), document.offline_page(self.start, answers, command))
        return len(answers)

    def serve(self, port: int = 5555, on_ready: Callable[[str], None] | None = None) -> None:
        """Serve the page on a port, or with 0 on a free one, until a signal ends it. `on_ready`
        gets the address."""
        if not 0 <= port <= _LAST_PORT:
            raise FivefoldError(f"--port {port}: give a number from 0 to {_LAST_PORT}")
        try:
            from fivefold_page import server
        except ImportError as error:
            from fivefold_page import document

            raise FivefoldError(
                f"the page is served by Starlette and uvicorn ({error}): {document.INSTALL}; "
                "--text and --json do not need them"
            ) from error
        server.serve(self.start, self.run, port, on_ready or (lambda address: None))


def observe(
    model: Model = DEFAULT_MODEL,
    *,
    runs: Sequence[str | Path] = (),
    at: str | None = None,
    panel: str | None = None,
    precision: str | None = None,
    on_progress: OnProgress | None = None,
    on_warning: Callable[[str], None] | None = None,
    **keys: Any,
) -> ObservedPage:
    """The page to explore the plans of a model, to learn, and to inspect run folders (`runs`).

    `at` is the part to open: what follows # in its address. `panel` selects one of its pictures.
    """
    if isinstance(model, str | Path) and _is_run(model):
        runs, model = (model, *runs), _look_up(str(model))
    folders = [str(run) for run in runs]
    source = _runs(folders, on_warning or warn_caller) if folders else None
    options = given_job(model, keys).options
    job = _job(options, precision and one_of("--precision", precision, PRECISIONS), source)
    tab, params = _place(at, job, source)
    address = f"{tab}?{urlencode(params)}" if params else tab
    arguments, names = (shlex.join(folders), source.names) if source else ("", [])
    from fivefold_page import document

    start = document.PageStart(address, params if tab == "explore" else job, arguments, names)
    return ObservedPage(start, tab, params, panel, source, on_progress)


def _job(options: PlanOptions, precision: str | None, run: RunSource | None) -> dict[str, str]:
    """The job that Explore opens with; the default job if it cannot show the plan of a run."""
    from fivefold_page.explore import State, state_of

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


def _without_file(args: list[str]) -> list[str]:
    """The command line without --html, which serves the same page."""
    return [
        word
        for before, word in zip(["", *args], args, strict=False)
        if "--html" not in (before, word) and not word.startswith("--html=")
    ]


run = with_plan_options(_run, default_target=DEFAULT_MODEL, look_up=_look_up)
