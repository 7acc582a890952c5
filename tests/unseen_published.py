"""Published training runs that no number of the planner was fitted to, beside our estimates:
`python -m tests.unseen_published` writes docs/unseen-runs.md.

The rows are a file for `fivefold score`. A line of the table has all sizes of one job.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from statistics import median

import numpy as np

from fivefold.planner.error_bars import accuracy
from fivefold_score.outcome import ScoredRun, score
from fivefold_score.rows import read_runs

RUNS = Path(__file__).parent / "data" / "unseen_runs.jsonl"
DOC = Path(__file__).parent.parent / "docs" / "unseen-runs.md"
BEGIN, END = "<!-- runs: begin -->", "<!-- runs: end -->"


def scored() -> list[ScoredRun]:
    """Every run of the file; raises if one cannot be expressed."""
    found = score(read_runs([RUNS]).rows)
    assert not found.skipped and not found.unmeasured, (found.skipped, found.unmeasured)
    return found.outcomes


def error(run: ScoredRun) -> float:
    """Of the step time, as a share of the measured one."""
    assert run.measured_seconds is not None
    return run.seconds.error(run.measured_seconds)


def summary(runs: list[ScoredRun]) -> str:
    """How many are within the error that the planner states."""
    errors, stated = [error(run) for run in runs], accuracy()
    half, most = (sum(each <= bar for each in errors) for bar in (stated.time, stated.time_p90))
    tried = [run.fits for run in runs if run.did_fit and run.fits is not None]
    return (
        f"{len(runs)} runs: half of the step times are within {median(errors):.1%} and nine of ten "
        f"within {float(np.percentile(errors, 90)):.1%}. The planner states {stated.time:.1%} and "
        f"{stated.time_p90:.1%}; {half} and {most} runs are within these. All ran; {sum(tried)} of "
        f"{len(tried)} with a verdict are said to fit."
    )


def _key(run: ScoredRun) -> tuple[str, str, str, str]:
    row = run.row
    model = str(row["model"]).partition(",")[0]
    return model, str(row["gpu"]), str(row["precision"]), str(row["id"]).partition("-")[0]


def _span(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def line(key: tuple[str, str, str, str], runs: list[ScoredRun]) -> str:
    """All sizes of one job."""
    model, gpu, precision, source = key
    gpus = _span([run.row["gpus"] for run in runs], ",.0f")
    ends = [run.seconds.low / (run.measured_seconds or 1.0) for run in runs]
    ends += [run.seconds.high / (run.measured_seconds or 1.0) for run in runs]
    ratio = _span(ends, ".2f") + (" (open)" if any(run.is_open for run in runs) else "")
    worst = max(map(error, runs))
    return (
        f"| {model} | {gpus} {gpu} | {precision} | {source} | {len(runs)} | {ratio} | {worst:.1%} |"
    )


def written() -> list[str]:
    """What stands between the marks."""
    runs = scored()
    lines = [
        summary(runs),
        "",
        "| model | GPUs | precision | source | runs | planned / published step | largest error |",
        "|---|---|---|---|---:|---|---:|",
    ]
    return [*lines, *(line(key, [*group]) for key, group in groupby(runs, _key))]


def main() -> int:
    """Write the table into its page."""
    before, _, rest = DOC.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOC.write_text("\n".join([before + BEGIN, *written(), END + after]), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
