"""The Run tab: the records of a run as one answer, and the table of the panels that show it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fivefold.core.errors import counted
from fivefold.page import Params, View, run_curves, run_step
from fivefold.records import STEPS, Pace, Summary
from fivefold.records.spans import RunFacts, StepSpans
from fivefold.report import rough_duration, wrapped

# A run without a new record for this long counts as dead or hanging.
_LEAST_SILENCE_S = 120.0
_SILENT_STEPS = 5  # times the longest of the newest steps, if that is more
_WINDOW = 100  # newest steps
_BAR = 40  # columns of a full bar


def view(facts: RunFacts, params: Params, spans: Callable[[int], StepSpans | None]) -> View:
    """Everything about a run; `spans` reads the events of a step.

    The param `step` selects the step that is compared with its plan: a number, the newest if
    absent, or `none`; `rank` selects the pipeline that is drawn.
    """
    return {
        "head": _head(facts),
        "curves": run_curves.curves(facts),
        "marks": run_curves.marks(facts),
        "load": run_curves.load(facts),
        "goodput": _goodput(facts.summary),
        "summary": facts.summary.to_json(),
        "told": [list(each) for _, each in sorted(facts.event_steps.items())],
        "step": run_step.view(facts, params, spans),
    }


def _head(facts: RunFacts) -> View:
    newest, plan = facts.starts[-1], facts.plan
    start = newest.facts
    machine: dict[str, Any] = start.get("machine") or {}
    gpus: list[str] = machine.get("gpus") or []
    devices = f"{len(gpus)} × {gpus[0]}" if gpus else counted(machine.get("num_cpus") or 1, "CPU")
    last = facts.records[-1].step if facts.records else 0
    steps = None if plan is None else plan.options.train.steps
    return {
        "name": facts.name,
        "model": start.get("model", "unknown"),
        "layout": start.get("layout", "unknown"),
        "world": start.get("world"),
        "zero": start.get("zero"),
        "schedule": start.get("schedule"),
        "machine": f"{devices}, {machine.get('system', 'unknown system')}",
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
    """Whether the run goes on, and if not, how it ended."""
    newest = facts.starts[-1]
    where = f"step {last}" + ("" if steps is None else f" of {steps}")
    if newest.ended is not None:
        after = rough_duration(max(0.0, newest.ended - facts.starts[0].began))
        if newest.why == "done":
            return f"done at {where}, {after} after the first start"
        return (
            f"{newest.why or 'ended'} at {where}, {after} after the first start: --resume goes on"
        )
    if _is_silent(facts):
        return (
            f"silent for {rough_duration(facts.idle_s)} after {where}: it died, or it hangs; "
            "--resume goes on after its newest checkpoint"
        )
    eta = _eta(facts, steps)
    left = "" if eta is None else f", about {rough_duration(eta)} to go"
    return f"running: {where}{left}, last heard {rough_duration(facts.idle_s)} ago"


def _is_silent(facts: RunFacts) -> bool:
    """Whether the newest record is much older than a step takes."""
    recent = [one.interval for one in facts.records[-_WINDOW:]]
    return facts.idle_s > max([_LEAST_SILENCE_S, *(_SILENT_STEPS * each for each in recent)])


def _eta(facts: RunFacts, steps: int | None) -> float | None:
    """Seconds to the last step, as in the step line: by the newest steps of this start."""
    pace, number, found = Pace(), len(facts.starts) - 1, None
    for one in (one for one in facts.records if one.restart == number):
        found = None if steps is None else pace.eta(one, steps)
    return None if found is None or found < 0 else found


def _goodput(summary: Summary) -> View:
    """Where the wall time went, without parts of 0 seconds."""
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
            f"{summary.goodput:.1%} of {rough_duration(summary.wall_s)} went to steps that count; "
            f"{counted(summary.num_restarts, 'restart')}, {lost} lost, "
            f"{summary.num_skipped} skipped"
        ),
    }


# The panels; those of curves and of one step are printed by `run_curves` and `run_step`.


def _head_text(view: View) -> list[str]:
    """What runs, where, and how far it is."""
    head = view["head"]
    zero = "" if head["zero"] is None else f", ZeRO-{head['zero']}"
    schedule = "" if head["schedule"] is None else f", {head['schedule']}"
    planned = head["planned_for"] or "no machine"
    lines = [
        f"{head['name']}: {head['model']} on {head['layout']}{zero}{schedule}",
        f"on {head['machine']}; planned for {planned}; first started {head['began']}",
        head["state"],
        *([] if head["no_plan"] is None else [head["no_plan"]]),
        *(each["says"] for each in (*view["marks"]["restarts"], *view["marks"]["skipped"][-5:])),
    ]
    return [part for line in lines for part in wrapped(line)]


def _goodput_text(view: View) -> list[str]:
    """Where the wall time went, as bars."""
    spent = view["goodput"]
    lines = ["goodput", spent["says"]]
    for part in spent["parts"]:
        bar = "█" * round(_BAR * part["share"])
        row = f"{part['name']:<8} {rough_duration(part['seconds']):>8} {part['share']:>6.1%} {bar}"
        lines.append(row.rstrip())
    return lines


class RunPanel(NamedTuple):
    """One panel, drawn by the function of its name in `static/<drawing>.js`.

    Column 0 is above the columns 1 and 2, column 3 below them. `text` takes the whole answer.
    """

    title: str
    hint: str
    column: int
    drawing: str
    text: Callable[[View], list[str]]


# By the names of `--panel`, in the order of the page.
PANELS: dict[str, RunPanel] = {
    "head": RunPanel("Run", "", 0, "run", _head_text),
    "loss": RunPanel(
        "Loss",
        "Every step, faint; smoothed over a fiftieth of the steps, bold; evaluations as diamonds.",
        1,
        "run_curves",
        run_curves.loss_text,
    ),
    "rates": RunPanel("Speed", "Measured beside planned.", 2, "run_curves", run_curves.rates_text),
    "memory": RunPanel(
        "Memory",
        "Of the fullest rank, measured beside planned.",
        2,
        "run_curves",
        run_curves.memory_text,
    ),
    "load": RunPanel(
        "Experts",
        "Slots of the fullest expert over the mean, layer by layer.",
        1,
        "run_spent",
        run_curves.load_text,
    ),
    "goodput": RunPanel(
        "Where the time went",
        "The share of the wall time that went to steps that count is the goodput.",
        2,
        "run_spent",
        _goodput_text,
    ),
    "step": RunPanel(
        "One step over its plan",
        "What each rank of one pipeline did, under what it was to do.",
        3,
        "run_step",
        run_step.text,
    ),
}
