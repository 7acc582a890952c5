"""`fivefold score`: compare the planner's estimates with measured runs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fivefold.commands.job import OnProgress, TaskProgress
from fivefold.commands.options import print_answer, shown_progress
from fivefold.core import InternalError, counted, to_toml
from fivefold.render import write_text
from fivefold_score import (
    Dot,
    ScoredRun,
    fitted_numbers,
    leave_one_out,
    read_runs,
    render,
    rescore,
    score_page,
    score_svg,
    sections,
    summary,
)
from fivefold_score import score as score_rows

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
    accuracy: Annotated[
        Path | None, typer.Option(help="Write the errors, each source left out, as TOML.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the planner's estimates with measured runs."""
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn

    with shown_progress("score", MofNCompleteColumn(), TimeElapsedColumn()) as on_progress:
        scores = score(runs, page=page, accuracy=accuracy, on_progress=on_progress)
    print_answer(scores, as_json)
    if records := scores.table["internal_errors"]:
        listed = "; ".join(f"{entry['id']}: {entry['reason']}" for entry in records[:_MOST_SKIPPED])
        raise InternalError(f"{counted(len(records), 'impossible estimate')}: {listed}")


@dataclass(frozen=True)
class PlannerScore:
    """Errors of the planner's estimates on measured runs; `table` has them by kind and source.

    `str()` is the text of `fivefold score`, `to_json()` its JSON.
    """

    table: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """What `fivefold score --json` prints."""
        return self.table

    def __str__(self) -> str:
        table = self.table
        skipped, unmeasured = table["skipped"], table["unmeasured"]
        scored = table["rows"] - len(skipped) - len(unmeasured) - len(table["internal_errors"])
        lines = [
            f"{table['rows']:,} runs: {scored:,} scored, {len(skipped):,} that cannot be "
            f"expressed, {len(unmeasured):,} with nothing to compare; {table['repeated']:,} "
            "repeated",
            "",
            render(list(sections({**table}))),
        ]
        if skipped:
            lines += ["", "not expressed"]
            lines += [f"  {record['id']}: {record['reason']}" for record in skipped[:_MOST_SKIPPED]]
        if len(skipped) > _MOST_SKIPPED:
            lines.append(f"  and {len(skipped) - _MOST_SKIPPED:,} more: --json lists all")
        return "\n".join(lines)


def score(
    runs: str | Path | Sequence[str | Path],
    *,
    page: str | Path | None = None,
    accuracy: str | Path | None = None,
    on_progress: OnProgress | None = None,
) -> PlannerScore:
    """Compare the planner's estimates with the measured runs of JSONL files.

    `page` and `accuracy` are files to write: the page with its picture, and the errors to expect
    of a new source, which the planner reads.
    """
    files = [Path(file) for file in ([runs] if isinstance(runs, str | Path) else runs)]
    records = read_runs(files)
    done = 0

    def on_row() -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(TaskProgress(done, 2 * len(records.rows), "score"))

    scored = score_rows(records.rows, on_row)
    left = rescore(scored.outcomes, on_row)
    numbers = fitted_numbers()
    table: dict[str, Any] = {
        "leave_one_out": leave_one_out(left),
        "fitted": {"count": len(numbers), "numbers": [number._asdict() for number in numbers]},
        **summary(scored, left),
        "repeated": records.num_repeated,
    }
    if page is not None:
        _write_page(Path(page), table, [path.name for path in files], scored.outcomes)
    if accuracy is not None:
        _write_accuracy(Path(accuracy), table["leave_one_out"]["new_source"])
    return PlannerScore(table)


def _write_page(
    page: Path, table: dict[str, Any], files: Sequence[str], outcomes: Sequence[ScoredRun]
) -> None:
    picture = page.with_suffix(".svg")
    today = datetime.date.today().isoformat()
    write_text(page, score_page(table, files, picture.name, today))
    dots = [
        Dot(outcome.family, outcome.measured_seconds, outcome.seconds.low, outcome.seconds.high)
        for outcome in outcomes
        if outcome.measured_seconds is not None
    ]
    write_text(picture, score_svg(dots) + "\n")


def _write_accuracy(path: Path, bars: dict[str, Any]) -> None:
    """The errors to expect of a new source, in the form that the planner reads."""
    table = {
        "source": "fivefold score: each source left out, with the same weight for every source",
        "date": datetime.date.today().isoformat(),
        **{name: _rounded(bar) for name, bar in bars.items()},
    }
    head = "# How far estimates lie from measured runs, as shares of the measured value.\n"
    head += "# Written by `fivefold score RUNS.jsonl... --accuracy`.\n"
    write_text(path, head + to_toml(table))


def _rounded(table: dict[str, Any]) -> dict[str, Any]:
    """Without what no run tells; shares to four digits."""
    numbers: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            numbers[key] = _rounded(cast("dict[str, Any]", value))
        elif value is not None:
            numbers[key] = round(value, 4)
    return numbers
