"""The Run tab: a run's folder as one answer, which the page draws and the terminal prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fivefold.core.errors import counted
from fivefold.page import View, run_curves, run_step, timeline
from fivefold.page.run_curves import WRITE
from fivefold.records import STEPS, Pace, Summary
from fivefold.records.spans import RunFacts, StepSpans
from fivefold.report import duration, rough, thousands, wrapped

_SILENT = 120.0  # seconds without a line, at least, after which a run is taken for dead
_PATIENCE = 5  # times the longest of the newest steps
_WINDOW = 100


def view(
    facts: RunFacts, params: Mapping[str, str], spans: Callable[[int], StepSpans | None]
) -> View:
    """All that is known of a run; `spans` reads what ranks did in a step.

    `step` picks the step that is held against its plan (the newest, or `none`), `rank` whose
    pipeline is drawn.
    """
    return {
        "head": _head(facts),
        "curves": run_curves.curves(facts),
        "marks": run_curves.marks(facts),
        "load": run_curves.load(facts),
        "goodput": _goodput(facts.summary),
        "summary": facts.summary.to_json(),
        "told": [list(each) for _, each in sorted(facts.told.items())],
        "step": run_step.view(facts, params, spans),
    }


def _head(facts: RunFacts) -> View:
    newest, plan = facts.starts[-1], facts.plan
    said = newest.facts
    machine: dict[str, Any] = said.get("machine") or {}
    gpus: list[str] = machine.get("gpus") or []
    here = f"{len(gpus)} × {gpus[0]}" if gpus else counted(machine.get("num_cpus") or 1, "CPU")
    last = facts.kept[-1].step if facts.kept else 0
    steps = None if plan is None else plan.wishes.train.steps
    return {
        "name": facts.name,
        "model": said.get("model", "unknown"),
        "layout": said.get("layout", "unknown"),
        "world": said.get("world"),
        "zero": said.get("zero"),
        "schedule": said.get("schedule"),
        "machine": f"{here}, {machine.get('system', 'unknown system')}",
        "planned_for": None if plan is None or plan.machine is None else plan.machine.name,
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts.starts[0].began)),
        "num_starts": len(facts.starts),
        "step": last,
        "steps": steps,
        "live": newest.ended is None,
        "silent": newest.ended is None and _is_silent(facts),
        "state": _state(facts, last, steps),
        "no_plan": facts.no_plan,
    }


def _state(facts: RunFacts, last: int, steps: int | None) -> str:
    """Whether it runs, and if not, how it ended."""
    newest = facts.starts[-1]
    where = f"step {last}" + ("" if steps is None else f" of {steps}")
    if newest.ended is not None:
        after = rough(max(0.0, newest.ended - facts.starts[0].began))
        if newest.why == "done":
            return f"done at {where}, {after} after the first start"
        return (
            f"{newest.why or 'ended'} at {where}, {after} after the first start: --resume goes on"
        )
    if _is_silent(facts):
        return (
            f"silent for {rough(facts.silence)} behind {where}: it died, or it hangs; --resume "
            "goes on behind its newest checkpoint"
        )
    eta = _eta(facts, steps)
    left = "" if eta is None else f", about {rough(eta)} to go"
    return f"running: {where}{left}, last heard {rough(facts.silence)} ago"


def _is_silent(facts: RunFacts) -> bool:
    """Whether nothing was heard for much longer than steps take."""
    recent = [one.seconds + sum(one.spent.values()) for one in facts.kept[-_WINDOW:]]
    return facts.silence > max([_SILENT, *(_PATIENCE * each for each in recent)])


def _eta(facts: RunFacts, steps: int | None) -> float | None:
    """As the step line has it: by the newest steps of this start."""
    pace, number, found = Pace(), len(facts.starts) - 1, None
    for one in (one for one in facts.kept if one.restart == number):
        found = None if steps is None else pace.eta(one, steps)
    return None if found is None or found < 0 else found


def _goodput(summary: Summary) -> View:
    """Where the wall time went; what took none of it is left out."""
    parts = [
        {"name": name, "seconds": seconds, "share": seconds / summary.wall_s}
        for name, seconds in summary.spent.items()
        if summary.wall_s and (seconds > 0 or name == STEPS)
    ]
    lost = counted(summary.num_lost, "step")
    return {
        "share": summary.goodput,
        "wall_s": summary.wall_s,
        "parts": parts,
        "says": (
            f"{summary.goodput:.1%} of {rough(summary.wall_s)} went to steps that count; "
            f"{counted(summary.num_restarts, 'restart')}, {lost} lost, "
            f"{summary.num_skipped} skipped"
        ),
    }


# The Run tab for terminals: the text twins of its panels, from the same answer.


_COLUMNS, _ROWS = 72, 8  # of a curve
_DIGITS = "0123456789"
_BAR = 40
_RATES = {"step_s": "step", "tokens_per_s": "tokens/s", "mfu": "MFU"}
_WRITE = {**WRITE, "tokens_per_s": thousands}  # beside a title that has the unit


def head(view: View) -> list[str]:
    """What runs, where, and how far it is."""
    said = view["head"]
    zero = "" if said["zero"] is None else f", ZeRO-{said['zero']}"
    schedule = "" if said["schedule"] is None else f", {said['schedule']}"
    planned = said["planned_for"] or "no machine"
    lines = [
        f"{said['name']}: {said['model']} on {said['layout']}{zero}{schedule}",
        f"on {said['machine']}; planned for {planned}; first started {said['began']}",
        said["state"],
        *([] if said["no_plan"] is None else [said["no_plan"]]),
        *(each["says"] for each in (*view["marks"]["restarts"], *view["marks"]["skipped"][-5:])),
    ]
    return [part for line in lines for part in wrapped(line)]


def loss(view: View) -> list[str]:
    """The loss as a curve of dots, what was evaluated, and the newest norm and learning rate."""
    curves = view["curves"]
    if "loss" not in curves:
        return ["loss", "no step is recorded yet"]
    lines = ["loss", *_dots(curves["loss"]["smoothed"], "{:.3f}".format)]
    evals = curves["loss"]["eval"]
    shown = [f"{x}: {y:.4f}" for x, y in zip(evals["x"], evals["y"], strict=True)][-6:]
    if shown:
        lines += wrapped("eval " + ", ".join(shown))
    last = {name: _newest(curves[name]["measured"]) for name in ("loss", "norm", "lr")}
    known = [f"{name} {value:.4g}" for name, value in last.items() if value is not None]
    return [*lines, f"newest: {', '.join(known)}"]


def rates(view: View) -> list[str]:
    """Tokens, steps and MFU, planned beside measured."""
    return ["rates", *_beside(view, _RATES)]


def memory(view: View) -> list[str]:
    """The fullest rank's memory, planned beside measured."""
    return ["memory", *_beside(view, {"memory_gib": "the fullest rank"})]


def load(view: View) -> list[str]:
    """The heat map as digits: how many times the mean the fullest expert has."""
    table = view["load"]
    if table is None:
        return ["experts", "the model has no experts, or their load is not recorded"]
    size = -(-len(table["steps"]) // _COLUMNS)
    many = size * table["steps_a_column"]
    columns = "a column a step" if many == 1 else f"a column has the most of {many} steps"
    lines = ["experts", f"slots of the fullest expert over the mean, rounded down; {columns}"]
    for layer, row in zip(table["layers"], table["rows"], strict=True):
        most = [max(row[i : i + size]) for i in range(0, len(row), size)]
        digits = "".join(_DIGITS[min(9, int(each))] for each in most)
        lines.append(f"layer {layer:>3} {digits} newest {row[-1]:.2f}")
    return lines


def goodput(view: View) -> list[str]:
    """Where the wall time went, as bars."""
    spent = view["goodput"]
    lines = ["goodput", spent["says"]]
    for part in spent["parts"]:
        bar = "█" * round(_BAR * part["share"])
        row = f"{part['name']:<8} {rough(part['seconds']):>8} {part['share']:>6.1%} {bar}"
        lines.append(row.rstrip())
    return lines


def step(view: View) -> list[str]:
    """One step over its plan, and what explains the difference."""
    found = view["step"]
    if found is None or found["step"] is None or found["problem"] is not None:
        reason = "not asked for" if found is None else found["problem"]
        return ["one step", *wrapped(reason)]
    lines = [f"step {found['step']}, pipeline of rank {found['rank']}"]
    lines += wrapped(found["says"])
    lines += wrapped(found["basis"])
    lines += _picture(found["picture"])
    return [*lines, *_explained(found), *_busy(found), *_moved(found)]


def _picture(view: View) -> list[str]:
    """The timelines; their rows are numbered there, and get the names of ranks here."""
    lines = timeline.text(view)
    for place, row in enumerate(view["rows"]):
        _, rank, what = row["name"].split()
        start = f"rank {place} "
        label = f"{rank} {what[0].upper()}".ljust(len(start) - 1) + " "
        lines = [
            label + line[len(start) :]
            if line.startswith(start) and "waits at" not in line
            else line
            for line in lines
        ]
    return [*lines, "rows: rank, P as planned, M as measured"]


def _explained(found: View) -> Iterator[str]:
    yield "were it as planned, the step would be shorter by"
    for cause in found["causes"]:
        yield from wrapped(cause["says"], f"{duration(cause['gain_s']):>10}  ")


def _busy(found: View) -> Iterator[str]:
    yield f"{'':12}{'busy: plan':>12}{'measured':>12}{'idle: plan':>12}{'measured':>12}"
    for one in found["ranks"]:
        names = ("busy_planned", "busy", "idle_planned", "idle")
        yield f"{'rank ' + str(one['rank']):<12}" + "".join(
            f"{duration(one[n]):>12}" for n in names
        )


def _moved(found: View) -> Iterator[str]:
    yield f"{'collectives':<12}{'calls':>12}{'bytes':>16}{'under way':>12}"
    for one in found["calls"]:
        yield (
            f"{one['axis']:<12}{one['calls']:>12,}{one['bytes']:>16,}{duration(one['seconds']):>12}"
        )


def _beside(view: View, names: dict[str, str]) -> Iterator[str]:
    for name, title in names.items():
        curve = view["curves"].get(name)
        if curve is None:
            yield f"{title}: not measured, for the plan names no machine"
            continue
        middle = curve["median"]
        yield f"{title}: " + (curve["says"] or f"{_WRITE[name](middle)} (median), no plan")
        yield from _dots(curve["measured"], _WRITE[name])


def _newest(curve: View) -> float | None:
    return next((value for value in reversed(curve["y"]) if value is not None), None)


def _dots(curve: View, write: Callable[[float], str]) -> list[str]:
    """A curve of dots, a column for equally many points, with its edges written."""
    points = [(x, y) for x, y in zip(curve["x"], curve["y"], strict=True) if y is not None]
    if not points:
        return []
    heights = _means([y for _, y in points])
    low, high = min(heights), max(heights)
    room = max(len(write(low)), len(write(high)))
    lines: list[str] = []
    for row in range(_ROWS):
        top = {0: write(high), _ROWS - 1: write(low)}.get(row, "")
        dots = "".join("•" if _level(y, low, high) == row else " " for y in heights)
        lines.append(f"{top:>{room}} │{dots}".rstrip())
    return [*lines, f"{'':>{room}} └ steps {points[0][0]} to {points[-1][0]}"]


def _means(values: Sequence[float]) -> list[float]:
    size = -(-len(values) // _COLUMNS)
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    return [sum(group) / len(group) for group in groups]


def _level(value: float, low: float, high: float) -> int:
    """The row of a value, from the top."""
    share = (value - low) / (high - low) if high > low else 0.0
    return _ROWS - 1 - round(share * (_ROWS - 1))


TEXTS: dict[str, Callable[[View], list[str]]] = {
    "head": head,
    "loss": loss,
    "rates": rates,
    "memory": memory,
    "load": load,
    "goodput": goodput,
    "step": step,
}
