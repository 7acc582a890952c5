"""The Run tab: a run's folder as one answer, which the page draws and the terminal prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fivefold.core.progress import STEPS, Pace, Summary
from fivefold.core.spans import RunFacts, StepSpans
from fivefold.core.words import counted
from fivefold.report.amounts import rough
from fivefold.report.page import run_curves, run_step

View = dict[str, Any]
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
