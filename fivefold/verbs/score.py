"""`fivefold score`: hold the planner's estimates against measured runs."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.report import write_text
from fivefold.report.score_page import render, score_page, sections
from fivefold.report.score_svg import Dot, score_svg
from fivefold.score import summary
from fivefold.score.outcome import ScoredRun, score
from fivefold.score.rows import read

_MOST_SKIPPED = 10


def run(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS.jsonl...", help="Measured runs; docs/planner-accuracy.md has the fields."
        ),
    ],
    page: Annotated[
        Path | None,
        typer.Option("--page", "-o", help="Write the accuracy page, and its picture beside it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Hold the planner's estimates against measured runs."""
    found = read(runs)
    with _bar(len(found.rows)) as advance:
        scored = score(found.rows, advance)
    table = {**summary(scored), "repeated": found.num_repeated}
    if page is not None:
        _write_page(page, table, [path.name for path in runs], scored.outcomes)
    typer.echo(json.dumps(table) if as_json else _text(table))


@contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """One progress bar, where somebody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("score"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("score", total=total)
        yield lambda: progress.advance(task)


def _write_page(
    page: Path, table: dict[str, Any], files: Sequence[str], outcomes: Sequence[ScoredRun]
) -> None:
    picture = page.with_suffix(".svg")
    today = datetime.date.today().isoformat()
    write_text(page, score_page(table, files, picture.name, today))
    dots = [
        Dot(one.family, one.measured_seconds, one.seconds.low, one.seconds.high)
        for one in outcomes
        if one.measured_seconds is not None
    ]
    write_text(picture, score_svg(dots) + "\n")


def _text(table: dict[str, Any]) -> str:
    skipped, unmeasured = table["skipped"], table["unmeasured"]
    scored = table["rows"] - len(skipped) - len(unmeasured)
    lines = [
        f"{table['rows']:,} runs: {scored:,} scored, {len(skipped):,} that cannot be "
        f"expressed, {len(unmeasured):,} with nothing to compare; {table['repeated']:,} repeated",
        "",
        render(list(sections(table))),
    ]
    if skipped:
        lines += ["", "not expressed"]
        lines += [f"  {one['id']}: {one['reason']}" for one in skipped[:_MOST_SKIPPED]]
    if len(skipped) > _MOST_SKIPPED:
        lines.append(f"  and {len(skipped) - _MOST_SKIPPED:,} more: --json lists all")
    return "\n".join(lines)
