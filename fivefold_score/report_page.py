"""How accurate the planner's estimates are: tables for the terminal, and the page with a picture
and the format of a file of runs."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fivefold.render import svg_style
from fivefold.render import table as aligned
from fivefold_score.rows import ACHIEVED, EXTRA, FIELDS, RowField

# Predicted and measured step times as one self-contained SVG: no script, nothing to load.
#
# Left: every run on two logarithmic axes. Right: predicted over measured, one line per source.

_SIDE, _TOP, _LEFT, _GAP, _FOOT = 420, 40, 60, 190, 44
_STRIP = 420
_WIDTH = _LEFT + _SIDE + _GAP + _STRIP + 70
_LEAST_ROW = 18
_REACH = 2.0  # the right side shows ratios from 1/2 to 2; others are drawn at its edge
_SCOPE = ".fivefold-score"
_LIGHT = {
    "path": "fill:none",
    "text": "fill:#222",
    ".headline": "font-size:14px",
    ".paper": "fill:#fff",
    ".line": "stroke:#bbb",
    ".even": "stroke:#222",
    ".dots": "stroke-linecap:round;stroke-width:4;stroke-opacity:.55",
}
_DARK = {
    "text": "fill:#ddd",
    ".paper": "fill:#16181d",
    ".line": "stroke:#555",
    ".even": "stroke:#ddd",
}


class Dot(NamedTuple):
    """A run: its source, its measured seconds, and the range of its predicted seconds."""

    family: str
    measured: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """Predicted over measured: of the nearer end of the range, or 1 inside it."""
        return min(max(self.measured, self.low), self.high) / self.measured


def score_svg(dots: Sequence[Dot]) -> str:
    """The SVG as text."""
    families = sorted({dot.family for dot in dots})
    height = _TOP + max(_SIDE, _LEAST_ROW * len(families)) + _FOOT
    title = f"{len(dots):,} runs of {len(families)} sources: predicted and measured step time"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{_SCOPE[1:]}" width="{_WIDTH}" '
            f'height="{height}" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{title}">',
            f"<style>{svg_style(_SCOPE, _LIGHT, _DARK)}</style>",
            f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
            f'<text class="headline" x="{_LEFT}" y="20">{title}</text>',
            *(_scatter(dots, families) if dots else ()),
            *(_strips(dots, families) if dots else ()),
            "</svg>",
        ]
    )


def colour(number: int, total: int) -> str:
    """One of `total` hues that are as far apart as they can be."""
    return f"hsl({round(360 * number / max(total, 1))},70%,45%)"


def _scatter(dots: Sequence[Dot], families: Sequence[str]) -> Iterator[str]:
    """Measured along x, predicted along y; on the thick line both are equal."""
    values = [value for dot in dots for value in (dot.measured, dot.low, dot.high)]
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    last = max(last, first + 1)
    scale = _SIDE / (last - first)

    def point(measured: float, predicted: float) -> tuple[float, float]:
        right, up = (math.log10(seconds) - first for seconds in (measured, predicted))
        return _LEFT + right * scale, _TOP + _SIDE - up * scale

    for power in range(first, last + 1):
        x, y = point(10.0**power, 10.0**power)
        yield f'<path class="line" d="M{_number(x)} {_TOP}v{_SIDE}M{_LEFT} {_number(y)}h{_SIDE}"/>'
        yield _label(x, _TOP + _SIDE + 16, "middle", f"{10.0**power:g}")
        yield _label(_LEFT - 6, y + 4, "end", f"{10.0**power:g}")
    yield f'<path class="even" d="M{_LEFT} {_TOP + _SIDE}L{_LEFT + _SIDE} {_TOP}"/>'
    yield _label(_LEFT + _SIDE / 2, _TOP + _SIDE + 34, "middle", "measured, s")
    yield _label(_LEFT, _TOP - 6, "start", "predicted, s")
    for number, family in enumerate(families):
        family_dots = [dot for dot in dots if dot.family == family]
        steps = "".join(
            _mark(*point(dot.measured, dot.low), *point(dot.measured, dot.high))
            for dot in family_dots
        )
        yield _path(steps, colour(number, len(families)), family, len(family_dots))


def _strips(dots: Sequence[Dot], families: Sequence[str]) -> Iterator[str]:
    """One line per source, with a dot for each run at predicted over measured."""
    left = _LEFT + _SIDE + _GAP
    row = max(_LEAST_ROW, _SIDE / len(families))
    bottom = _TOP + row * len(families)

    def across(ratio: float) -> float:
        drawn_ratio = min(max(ratio, 1 / _REACH), _REACH)
        return left + _STRIP * (math.log(drawn_ratio, _REACH) + 1) / 2

    for ratio in (0.5, 0.75, 0.9, 1.0, 1.1, 1.33, 2.0):
        x, name = across(ratio), "even" if ratio == 1 else "line"
        yield f'<path class="{name}" d="M{_number(x)} {_TOP}V{_number(bottom)}"/>'
        yield _label(x, bottom + 16, "middle", f"{ratio:g}")
    yield _label(left, _TOP - 6, "start", "predicted over measured; further out at the edge")
    for number, family in enumerate(families):
        family_dots = [dot for dot in dots if dot.family == family]
        y = _TOP + row * (number + 0.5)
        yield _label(left - 10, y + 4, "end", f"{family} ({len(family_dots)})")
        # Dots with equal ratios would hide each other: spread them over the height of the row.
        heights = [y + row * 0.6 * (index % 7 - 3) / 7 for index in range(len(family_dots))]
        spots = [
            (across(dot.ratio), height) for dot, height in zip(family_dots, heights, strict=True)
        ]
        steps = "".join(_mark(x, height, x, height) for x, height in spots)
        yield _path(steps, colour(number, len(families)), family, len(family_dots))


def _mark(x: float, y: float, to_x: float, to_y: float) -> str:
    """A dot, or a line for a range."""
    end = "h0" if (x, y) == (to_x, to_y) else f"L{_number(to_x)} {_number(to_y)}"
    return f"M{_number(x)} {_number(y)}{end}"


def _path(steps: str, stroke: str, family: str, runs: int) -> str:
    title = f"<title>{html.escape(family)}: {runs:,} runs</title>"
    return f'<path class="dots" stroke="{stroke}" d="{steps}">{title}</path>'


def _label(x: float, y: float, anchor: str, text: str) -> str:
    position = f'x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}"'
    return f"<text {position}>{html.escape(text)}</text>"


def _number(value: float) -> str:
    return f"{round(value, 1):g}"


Table = dict[str, Any]
_ERRORS = ("runs", "median", "mean", "p90")


class Section(NamedTuple):
    """A table with a title, and a sentence below it."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def sections(table: Table) -> Iterator[Section]:
    """All tables, without the lists of rows that were not scored."""
    if "leave_one_out" in table:
        yield _left_out(table["leave_one_out"])
        yield _fitted(table["fitted"])
    yield _overall(table)
    if table["sets"]:
        yield _peers(table["sets"])
    yield _halves(table)
    rows = [
        (name, *_errors(figures["time"]), _inside(figures["intervals"]))
        for name, figures in table["groups"].items()
        if figures["time"]["n"] or figures["intervals"]["n"]
    ]
    yield Section("step time by group", ("group", *_ERRORS, "inside intervals"), rows)
    yield _other(table["groups"])
    yield _assumed(table["assumptions"])


def share(value: float | None, digits: int = 1) -> str:
    """`12.3%`, or a dash for None."""
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def tau_text(value: float | None) -> str:
    """`.81`, or a dash for None."""
    return "–" if value is None else f"{value:.2f}".replace("0.", ".")


def render(parts: Sequence[Section]) -> str:
    """Tables for the terminal: text to the left, numbers to the right."""
    grids = [aligned([(part.title, *part.head[1:]), *part.rows]) for part in parts]
    notes = [[part.note] if part.note else [] for part in parts]
    return "\n\n".join("\n".join(g + n) for g, n in zip(grids, notes, strict=True))


def _errors(errors: Table) -> tuple[str, ...]:
    return (f"{errors['n']:,}", *(share(errors[key]) for key in ("median", "mean", "p90")))


def _left_out(left: Table) -> Section:
    """The figures that stand first: on sources that no number was fitted on."""
    oom, rank = left["oom"], left["rank"]
    rows = [
        ("step time, published and fully specified", *_errors(left["published"])),
        ("step time, all", *_errors(left["time"])),
        *(
            (f"  {name}", *_errors(figures["time"]))
            for name, figures in left["by_source"].items()
            if figures["time"]["n"]
        ),
        ("peak memory", *_errors(left["memory"])),
    ]
    bars = left["new_source"]
    note = (
        f"Fits or not: {share(oom['accuracy'])} of {oom['n']:,} right; of {oom['failed']:,} that "
        f"ran out of memory, {share(oom['false_fit'])} were predicted to fit. Best of three within "
        f"{share(rank['best3_regret'])} of the best.\n"
        "With the same weight for every source: half of the step times within "
        f"{share(bars['time']['median'])}, nine of ten within {share(bars['time']['p90'])}."
    )
    return Section("each source left out", ("left out", *_ERRORS), rows, note)


def _fitted(fitted: Table) -> Section:
    """How many numbers are fitted, and to what."""
    rows = [
        (f"{number['where']}: {number['key']}", ", ".join(number["to"]))
        for number in fitted["numbers"]
    ]
    note = f"{fitted['count']:,} numbers are fitted. All others are counted, measured or assumed."
    return Section("fitted numbers", ("number", "to"), rows, note)


def _assumed(table: Table) -> Section:
    """What rows leave out, and what was assumed."""
    rows = [(assumption, f"{times:,}") for assumption, times in table["kinds"].items()]
    by_count = ", ".join(f"{number:,} with {count}" for count, number in table["by_count"].items())
    note = f"{table['rows']:,} rows have assumptions, {table['total']:,} in all: {by_count}."
    return Section("assumptions", ("assumed", "rows"), rows, note)


def _overall(table: Table) -> Section:
    oom, rank, spans = table["oom"], table["rank"], table["intervals"]
    rows = [
        ("step time", *_errors(table["time"])),
        (f"step time, intervals ({spans['inside']} inside)", *_errors(spans)),
        ("step time, from published TFLOP/s", *_errors(table["from_tflops"])),
        ("peak memory", *_errors(table["memory"])),
    ]
    specified = table["specified"]
    note = (
        f"Fits or not: {share(oom['accuracy'])} of {oom['n']:,} right; of {oom['failed']:,} that "
        f"ran out of memory, {share(oom['false_fit'])} were predicted to fit.\n"
        f"Order within {rank['groups']:,} groups of one job: Kendall tau {tau_text(rank['tau'])}, "
        f"regret of the first {share(rank['top1_regret'])}, of the best of three "
        f"{share(rank['best3_regret'])}.\n"
        f"Of {specified['n']:,} fully specified runs with a measurement, {specified['skipped']:,} "
        "cannot be expressed."
    )
    return Section("error", ("error", *_ERRORS), rows, note)


def _peers(sets: Sequence[Table]) -> Section:
    rows = [
        (
            f"{row['set']}: {row['metric']}" + (f" ({row['detail']})" if row["detail"] else ""),
            f"{row['n']:,}",
            _value(row, "left_out"),
            _value(row, "ours"),
            row["calculon"] or "–",
            row["llm_analysis"] or "–",
            "–" if row["peer_n"] is None else str(row["peer_n"]),
            row["aim"],
        )
        for row in sets
    ]
    head = ("set", "our n", "left out", "ours", "Calculon", "llm-analysis")
    note = (
        "n counts runs; groups of runs for regret and tau; sizes where one is left out. Left out: "
        "without the numbers that were fitted to the source. The other planners were measured on "
        "the full public sets."
    )
    return Section("beside other planners", (*head, "their n", "aim"), rows, note)


def _value(row: Table, key: str) -> str:
    return tau_text(row[key]) if row["metric"] == "Kendall tau" else share(row[key], 2)


def _halves(table: Table) -> Section:
    halves, groups = table["held_out"], table["groups"]
    rows = [
        (f"time, families with a factor, {title}", *_errors(halves[key]["time"]))
        for key, title in _HALVES.items()
    ]
    for family, errors in halves["all"]["by_family"].items():
        test_errors = halves["held_out_half"]["by_family"].get(family)
        rows.append((f"  {family}, all", *_errors(errors)))
        if test_errors is not None:
            rows.append((f"  {family}, held-out half", *_errors(test_errors)))
    if "stack: no factor" in groups:
        rows.append(("time, families without one", *_errors(groups["stack: no factor"]["time"])))
    for key, label in _HALVES.items():
        rows.append((f"peak memory, {label}", *_errors(halves[key]["memory"])))
    note = "A factor may be fitted on the runs outside the held-out half; sha256 of the id decides."
    if halves["families_without"]:
        note += (
            f"\nNo run of {', '.join(halves['families_without'])} is in the held-out half of these "
            "files: nothing here tests that factor."
        )
    return Section("fitted and held out", ("half", *_ERRORS), rows, note)


_HALVES = {"all": "all", "fitted_half": "fitted half", "held_out_half": "held-out half"}


def _inside(counts: Table) -> str:
    return f"{counts['inside']} of {counts['n']}" if counts["n"] else "–"


def _other(groups: dict[str, Table]) -> Section:
    rows = [
        (
            name,
            f"{figures['memory']['n']:,}",
            share(figures["memory"]["mean"]),
            share(figures["oom"]["accuracy"]),
            share(figures["oom"]["false_fit"]),
            str(figures["rank"]["groups"]),
            tau_text(figures["rank"]["tau"]),
            share(figures["rank"]["best3_regret"]),
        )
        for name, figures in groups.items()
        if figures["memory"]["n"] or figures["oom"]["n"] or figures["rank"]["groups"]
    ]
    head = ("group", "peaks", "mean", "fits right", "false fit", "ranked", "tau", "best of 3")
    return Section("memory and order by group", head, rows)


# --- The page

_MOST_SKIPPED = 40
_INTRODUCTION = """\
Estimates of step time, memory and fit are held against runs that others measured and published.
Every estimate is made from the run's inputs alone. Errors are |predicted − measured| over measured.

- A run whose source leaves open what time depends on (rows of a microbatch, chunks,
  recomputation) gets an interval: error 0 inside, the distance to the nearer end outside. Such
  runs are counted apart.
- The first table leaves out one source at a time: its runs are estimated without every number
  that was fitted to that source. A number that was fitted to it alone is left to the base of its
  file: to the stack or chip that it is a variant of, to H100's shares for a chip without one. A
  pooled number is the geometric mean of what the other sources give. A number that several sources
  gave together stays.
- Leaving out cannot undo that formulas were chosen with all sources in sight, nor that a number
  which stays was seen with the source; only runs that were never looked at are a clean test.
- Constants belong to a GPU (`presets/machines`) or to a software stack (`presets/stacks`), never to
  a run. No id, note or source steers an estimate. A row's stack is its key `stack`; where that is
  missing, it is that of the row's family (`presets/rows.toml`), or for unknown families the nearest
  by ZeRO stage, pipeline, GPU and precision. Either is an assumption. All are counted below.
- Subsets are chosen from inputs or predictions, never from what was measured.
- Runs of one job (same source, model, GPU, number of GPUs, batch and sequence) form a group where
  there are at least four. Regret: how much longer the run takes that the planner would have chosen
  than the best one.
- Whatever has no step time and no tokens/s, but published TFLOP/s, is converted by the convention
  of `fivefold plan` and counted apart."""


def score_page(table: dict[str, Any], files: Sequence[str], picture: str, date: str) -> str:
    """The page in Markdown."""
    origin = f"Made by `fivefold score {' '.join(files)} --page …` on {date}"
    lines = [
        "# How accurate the planner is",
        "",
        f"{origin}: {table['rows']:,} runs.",
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
        yield from ("", part.note)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _not_scored(table: dict[str, Any]) -> Iterator[str]:
    skipped = table["skipped"]
    yield from ("## Not scored", "")
    yield f"{len(skipped):,} runs with a measurement cannot be expressed" + (
        ":" if skipped else "."
    )
    yield ""
    for entry in skipped[:_MOST_SKIPPED]:
        yield f"- `{entry['id']}`: {' '.join(entry['reason'].split())}"
    if len(skipped) > _MOST_SKIPPED:
        yield f"- and {len(skipped) - _MOST_SKIPPED:,} more: `--json` lists all"
    reasons = Counter(row["reason"] for row in table["unmeasured"])
    for reason, times in reasons.items():
        yield from ("", f"{times:,} runs have {reason}.")


def _schema() -> Iterator[str]:
    yield from ("## A file of runs", "")
    yield "JSONL: one JSON object a line; or TOML: a table `[[run]]` for each, with `[run.shape]`,"
    yield "`[run.software]` and `[run.achieved]`. Needed fields must be there, but may be null"
    yield "(left out in TOML): unknown. A run is priced by what its row says. Without a table"
    yield "`shape`, a name like DeepSeek-V3 adds the latents and shared experts of that preset."
    yield "An unknown key of `shape` or `software` refuses the file."
    yield "An unknown field is passed over and counted as an assumption. An unknown stack,"
    yield "precision, activation, schedule or recomputation is refused: the row is not scored."
    yield "A run that is in several files counts once."
    yield from ("", *_fields(FIELDS, ""), "", *_fields(EXTRA, "extra."))
    yield from ("", *_fields(ACHIEVED, "achieved."))


def _fields(fields: Mapping[str, RowField], prefix: str) -> Iterator[str]:
    yield "| field | kind | needed | meaning |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        needed = "yes" if field.needed else ""
        yield f"| `{prefix}{name}` | {field.kind} | {needed} | {field.meaning} |"
