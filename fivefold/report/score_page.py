"""The planner-accuracy page: the tables, the picture, and how a file of runs is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fivefold.core.score.rows import ACHIEVED, FIELDS, Field
from fivefold.report.score_sections import Section, sections

_MOST_SKIPPED = 40
_INTRODUCTION = """\
Estimates of step time, memory and fit are held against runs that others measured and published.
Every estimate is made from the run's inputs alone. Errors are |predicted − measured| over measured.

- A run whose source leaves open what time depends on (rows of a microbatch, chunks,
  recomputation) gets an interval: error 0 inside, the distance to the nearer end outside. Such
  runs are counted apart.
- Constants belong to a GPU or to a software stack, never to a run. Some stacks have one factor
  that was fitted to step times. Families with and without one are told apart, and those with one
  on both halves by hash.
- A stack's other numbers (host seconds of a launch, passes over memory, shares that hide) and the
  form of the formulas were chosen with runs of both halves in sight, also where there is no
  factor. What nanotron's allocator keeps was scored on the held-out half while it was being
  modelled. So the halves show how well a fitted factor carries over, and no more; only runs that
  were never looked at are a clean test.
- Subsets are chosen from inputs or predictions, never from what was measured.
- Runs of one job (same source, model, GPU, number of GPUs, batch and sequence) form a group where
  there are at least four. Regret: how much longer the run takes that the planner would have chosen
  than the best one.
- Whatever has no step time and no tokens/s, but published TFLOP/s, is converted by the convention
  of `fivefold plan` and counted apart."""


def score_page(table: dict[str, Any], files: Sequence[str], picture: str, date: str) -> str:
    """The page in Markdown."""
    made = f"Made by `fivefold score {' '.join(files)} --page …` on {date}"
    lines = [
        "# How accurate the planner is",
        "",
        f"{made}: {table['rows']:,} runs.",
        "",
        _INTRODUCTION,
        "",
        f"![Predicted and measured step times, and their ratio by source]({picture})",
    ]
    for part in sections(table):
        lines += ["", f"## {part.title[0].upper()}{part.title[1:]}", "", *_table(part)]
    lines += ["", *_not_scored(table), "", *_schema()]
    return "\n".join(lines) + "\n"


def _table(part: Section) -> Iterator[str]:
    yield _row(part.head)
    yield "|" + "---|" + "---:|" * (len(part.head) - 1)
    for row in part.rows:
        yield _row([cell.strip() for cell in row])
    if part.note:
        yield ""
        yield part.note


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _not_scored(table: dict[str, Any]) -> Iterator[str]:
    skipped = table["skipped"]
    yield "## Not scored"
    yield ""
    yield f"{len(skipped):,} runs with a measurement cannot be expressed" + (
        ":" if skipped else "."
    )
    yield ""
    for one in skipped[:_MOST_SKIPPED]:
        yield f"- `{one['id']}`: {' '.join(one['reason'].split())}"
    if len(skipped) > _MOST_SKIPPED:
        yield f"- and {len(skipped) - _MOST_SKIPPED:,} more: `--json` lists all"
    reasons = Counter(one["reason"] for one in table["unmeasured"])
    for reason, times in reasons.items():
        yield ""
        yield f"{times:,} runs have {reason}."


def _schema() -> Iterator[str]:
    yield "## A file of runs"
    yield ""
    yield "JSONL: one JSON object a line. Needed fields must be there, but may be null: unknown."
    yield "Other fields are passed over. A run that is in several files counts once."
    yield ""
    yield from _fields(FIELDS, "")
    yield ""
    yield from _fields(ACHIEVED, "achieved.")


def _fields(fields: Mapping[str, Field], prefix: str) -> Iterator[str]:
    yield "| field | kind | needed | meaning |"
    yield "|---|---|---|---|"
    for name, each in fields.items():
        needed = "yes" if each.needed else ""
        yield f"| `{prefix}{name}` | {each.kind} | {needed} | {each.meaning} |"
