"""The Run tab: the records of a run as one answer, and the table of the panels that show it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fivefold.core import counted
from fivefold.records import STEPS, Pace, RunFacts, StepSpans, Summary, shares_of
from fivefold.render import rough_duration, wrapped
from fivefold_page import Params, View
from fivefold_page.run import curves as run_curves
from fivefold_page.run import history as run_history
from fivefold_page.run import step as run_step

# A run without a new record for this long counts as dead or hanging.
_LEAST_SILENCE_S = 120.0
_SILENT_STEPS = 5  # times the longest of the newest steps, if that is more
_WINDOW = 100  # newest steps
_BAR = 40  # columns of a full bar
_NO_SAMPLES = "texts that the model writes while it trains: --set sample_every=100"
_NO_EVENTS = "what each rank did when: --set events=true"


def view(facts: RunFacts, params: Params, spans: Callable[[int], StepSpans | None]) -> View:
    """Everything about a run; `spans` reads the events of a step.

    The param `step` selects the step that is compared with its plan: a number, the newest if
    absent, or `none`; `rank` selects the pipeline that is drawn.
    """
    result = {
        "head": _head(facts),
        "curves": run_curves.curves(facts),
        "marks": run_curves.marks(facts),
        "load": run_curves.load(facts),
        "history": run_history.history(facts),
        "goodput": goodput(facts.summary),
        "summary": facts.summary.to_json(),
        "told": [list(numbers) for _, numbers in sorted(facts.event_steps.items())],
        "step": run_step.view(facts, params, spans),
    }
    return result | {"missing": _missing(result, facts)}


def _missing(view: View, facts: RunFacts) -> dict[str, str]:
    """The panels without data, each with what would fill it, or "" if nothing would."""
    no_step = "" if view["curves"] else "no step is recorded yet"
    shape = None if facts.plan is None else facts.plan.shape
    reasons = {
        "loss": None if "loss" in view["curves"] else no_step,
        "rates": None if "tokens_per_s" in view["curves"] else no_step,
        "memory": None if "memory_gib" in view["curves"] else no_step,
        "load": None if view["load"] else "",
        "samples": None if view["history"]["samples"] else _NO_SAMPLES,
        "goodput": None if view["goodput"]["wall_s"] else no_step,
        "step": None if facts.event_steps else _NO_EVENTS,
    }
    if shape is not None and shape.moe is not None and not view["load"]:
        reasons["load"] = "the load of the experts is not recorded yet"
    return {name: reason for name, reason in reasons.items() if reason is not None}


def shown(view: View) -> list[str]:
    """The panels that a run has data for, or that say what would fill them."""
    return [name for name in PANELS if view["missing"].get(name) != ""]


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
        "live": _is_live(facts),
        "silent": _is_live(facts) and _is_silent(facts),
        "failed": newest.ended is None and not _is_live(facts),
        "state": state(facts),
        "no_plan": facts.no_plan,
        "damage": list(facts.damage),
    }


def _is_live(facts: RunFacts) -> bool:
    """Whether the newest start has neither ended nor failed, as far as its folder says."""
    newest = facts.starts[-1]
    return newest.ended is None and newest.facts.get("failed") is None


def state(facts: RunFacts) -> str:
    """Whether the run goes on, and if not, how it ended."""
    newest, plan = facts.starts[-1], facts.plan
    last = facts.records[-1].step if facts.records else 0
    steps = None if plan is None else plan.options.train.steps
    where = f"step {last}" + ("" if steps is None else f" of {steps}")
    if newest.ended is not None:
        after = rough_duration(max(0.0, newest.ended - facts.starts[0].began))
        if newest.why == "done":
            return f"done at {where}, {after} after the first start"
        return (
            f"{newest.why or 'ended'} at {where}, {after} after the first start: --resume goes on"
        )
    if not _is_live(facts):
        why = newest.facts["failed"]["why"]
        return f"failed after {where}: {why}; --resume goes on after its newest checkpoint"
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
    recent = (record.interval for record in facts.records[-_WINDOW:])
    long = [_SILENT_STEPS * seconds for seconds in recent if seconds is not None]
    return facts.idle_s > max([_LEAST_SILENCE_S, *long])


def _eta(facts: RunFacts, steps: int | None) -> float | None:
    """Seconds to the last step, as in the step line: by the newest steps of this start."""
    pace, number, seconds = Pace(), len(facts.starts) - 1, None
    for record in (entry for entry in facts.records if entry.restart == number):
        seconds = None if steps is None else pace.eta(record, steps)
    return None if seconds is None or seconds < 0 else seconds


def goodput(summary: Summary) -> View:
    """Where the wall time went, without parts of 0 seconds."""
    spent = {
        name: time_spent
        for name, time_spent in summary.spent.items()
        if time_spent > 0 or name == STEPS
    }
    parts = [
        {"name": name, "seconds": seconds, "share": share}
        for (name, seconds), share in zip(spent.items(), shares_of([*spent.values()]), strict=True)
        if summary.wall_s
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
            + (f", {summary.num_untimed} without a time" if summary.num_untimed else "")
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
        *(mark["says"] for mark in (*view["marks"]["restarts"], *view["marks"]["skipped"][-5:])),
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
    "history": RunPanel(
        "Time line",
        "When each start ran, and what happened.",
        0,
        "run_history",
        run_history.history_text,
    ),
    "loss": RunPanel(
        "Loss",
        "Every step, faint; smoothed over a fiftieth of the steps, bold; evaluations as marks.",
        1,
        "run_curves",
        run_curves.loss_text,
    ),
    "rates": RunPanel(
        "Speed",
        "Measured, and planned where the plan has a machine.",
        2,
        "run_curves",
        run_curves.rates_text,
    ),
    "memory": RunPanel(
        "Memory",
        "Of the fullest rank.",
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
    "samples": RunPanel(
        "Samples",
        "What the model writes after the beginning of a text that it does not train on.",
        1,
        "run_history",
        run_history.samples_text,
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
