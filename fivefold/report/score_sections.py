"""How good the planner's estimates are, as tables: for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Table = dict[str, Any]
_ERRORS = ("runs", "median", "mean", "p90")


class Section(NamedTuple):
    """A table with a title, and a sentence below it."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def sections(table: Table) -> Iterator[Section]:
    """Everything but the lists of rows that were not scored."""
    yield _overall(table)
    if table["sets"]:
        yield _peers(table["sets"])
    yield _halves(table)
    yield _times(table["groups"])
    yield _other(table["groups"])


def share(value: float | None, digits: int = 1) -> str:
    """`12.3%`, or a dash where there is nothing."""
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def tau_text(value: float | None) -> str:
    """`.81`, or a dash where there is nothing."""
    return "–" if value is None else f"{value:.2f}".replace("0.", ".")


def render(parts: Sequence[Section]) -> str:
    """Tables for the terminal: words to the left, numbers to the right."""
    return "\n\n".join("\n".join(_lines(part)) for part in parts)


def _lines(part: Section) -> Iterator[str]:
    grid = [(part.title, *part.head[1:]), *part.rows]
    widths = [max(len(row[column]) for row in grid) for column in range(len(part.head))]
    for row in grid:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()
    if part.note:
        yield part.note


def _errors(found: Table) -> tuple[str, ...]:
    return (f"{found['n']:,}", *(share(found[key]) for key in ("median", "mean", "p90")))


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
            f"{one['set']}: {one['metric']}" + (f" ({one['detail']})" if one["detail"] else ""),
            f"{one['n']:,}",
            _value(one, "ours"),
            f"{one['held_out_n']:,}",
            _value(one, "held_out"),
            one["calculon"] or "–",
            one["llm_analysis"] or "–",
            "–" if one["peer_n"] is None else str(one["peer_n"]),
            one["aim"],
        )
        for one in sets
    ]
    head = (
        "set",
        "our n",
        "ours",
        "held n",
        "held out",
        "Calculon",
        "llm-analysis",
        "their n",
        "aim",
    )
    note = (
        "n counts runs; groups of runs for regret and tau; sizes where one is left out. Held: on "
        "the held-out half alone. The other planners were measured on the full public sets."
    )
    return Section("beside other planners", head, rows, note)


def _value(one: Table, key: str) -> str:
    return tau_text(one[key]) if one["metric"] == "Kendall tau" else share(one[key], 2)


def _halves(table: Table) -> Section:
    halves, groups = table["held_out"], table["groups"]
    rows: list[tuple[str, ...]] = []
    for key, words in _HALVES.items():
        rows.append((f"time, families with a factor, {words}", *_errors(halves[key]["time"])))
    for family, found in halves["all"]["by_family"].items():
        held = halves["held_out_half"]["by_family"].get(family)
        rows.append((f"  {family}, all", *_errors(found)))
        if held is not None:
            rows.append((f"  {family}, held-out half", *_errors(held)))
    if "stack: no factor" in groups:
        rows.append(("time, families without one", *_errors(groups["stack: no factor"]["time"])))
    for key, words in _HALVES.items():
        rows.append((f"peak memory, {words}", *_errors(halves[key]["memory"])))
    note = "A factor may be fitted on the runs outside the held-out half; sha256 of the id decides."
    if halves["families_without"]:
        note += (
            f"\nNo run of {', '.join(halves['families_without'])} is in the held-out half of these "
            "files: nothing here tests that factor."
        )
    return Section("fitted and held out", ("half", *_ERRORS), rows, note)


_HALVES = {"all": "all", "fitted_half": "fitted half", "held_out_half": "held-out half"}


def _times(groups: dict[str, Table]) -> Section:
    rows = [
        (name, *_errors(found["time"]), _inside(found["intervals"]))
        for name, found in groups.items()
        if found["time"]["n"] or found["intervals"]["n"]
    ]
    head = ("group", *_ERRORS, "inside intervals")
    return Section("step time by group", head, rows)


def _inside(found: Table) -> str:
    return f"{found['inside']} of {found['n']}" if found["n"] else "–"


def _other(groups: dict[str, Table]) -> Section:
    rows = [
        (
            name,
            f"{found['memory']['n']:,}",
            share(found["memory"]["mean"]),
            share(found["oom"]["accuracy"]),
            share(found["oom"]["false_fit"]),
            str(found["rank"]["groups"]),
            tau_text(found["rank"]["tau"]),
            share(found["rank"]["best3_regret"]),
        )
        for name, found in groups.items()
        if found["memory"]["n"] or found["oom"]["n"] or found["rank"]["groups"]
    ]
    head = ("group", "peaks", "mean", "fits right", "false fit", "ranked", "tau", "best of 3")
    return Section("memory and order by group", head, rows)
