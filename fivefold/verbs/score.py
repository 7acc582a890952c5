"""`fivefold score`: compare the planner's estimates with measured runs."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.core.errors import InternalError, counted
from fivefold.report import write_text
from fivefold.report.score_page import render, score_page, sections
from fivefold.report.score_svg import Dot, score_svg
from fivefold.score import summary
from fivefold.score.outcome import ScoredRun, score
from fivefold.score.rows import read_runs
from fivefold.verbs import progress_bar

_MOST_SKIPPED = 10


def run(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS.jsonl...",
            help="Measured runs; docs/planner-accuracy.md describes the fields.",
        ),
    ],
    page: Annotated[
        Path | None, typer.Option("--page", "-o", help="Write the accuracy page and its picture.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the planner's estimates with measured runs."""
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn

    found = read_runs(runs)
    with progress_bar("score", len(found.rows), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        scored = score(found.rows, lambda: bar.advance(1))
    table = {**summary(scored), "repeated": found.num_repeated}
    if page is not None:
        _write_page(page, table, [path.name for path in runs], scored.outcomes)
    typer.echo(json.dumps(table) if as_json else _text(table))
    if found := table["internal_errors"]:
        listed = "; ".join(f"{one['id']}: {one['reason']}" for one in found[:_MOST_SKIPPED])
        raise InternalError(f"{counted(len(found), 'impossible estimate')}: {listed}")


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
    scored = table["rows"] - len(skipped) - len(unmeasured) - len(table["internal_errors"])
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
