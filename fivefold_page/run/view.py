"""The Run tab: the records of a run as one answer, and the table of the panels that show it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from fivefold.core import counted
from fivefold.records import STEPS, Pace, RunFacts, StepRecord, StepSpans, Summary, shares_of
from fivefold.render import rough_duration, wrapped
from fivefold_page import Params, View
from fivefold_page.run import curves as run_curves
from fivefold_page.run import step as run_step

# What happened to a run: its starts and failures, evaluations and samples, on one time line.
#
# Times are seconds since the first start. A kind of events is a lane of the time line:
#
# {"wall_s": its end, "lanes": {kind: what it is},
# "starts": [{"number", "from", "to", "how": done, stopped, died or running, "says"}, ...],
# "events": [{"kind", "at", "step", "says"}, ...] in the order of time,
# "samples": [{"step", "prompt", "text"}, ...] of steps that count}

_LANES = {
    "failure": "failures",
    "resume": "restarts",
    "skipped": "skipped steps",
    "again": "steps that ran again",
    "slow": "slow ranks and links",
    "eval": "evaluations",
    "sample": "samples",
}
_MOST_EVENTS = 400  # newest of each lane
_MOST_SAMPLES = 50  # newest
_TEXT_EVENTS, _TEXT_SAMPLES = 12, 4
_WALL_BAR = 60  # columns of the wall time
_CHANGE = 0.01  # share of a step


def history(facts: RunFacts) -> View:
    """The time line; an evaluation names its sets."""
    facts = _timed(facts)
    # The records of each start, those of lost steps too.
    groups: list[list[StepRecord]] = [[] for _ in facts.starts]
    for record in (*facts.records, *facts.lost):
        if record.restart < len(groups):
            groups[record.restart].append(record)
    records = [sorted(group, key=lambda entry: entry.step) for group in groups]
    starts = [_start(facts, number, step_records) for number, step_records in enumerate(records)]
    by_lane = {
        "failure": [*_failures(facts, starts, records)],
        "resume": [*_resumes(facts, starts, records)],
        "skipped": [*_skipped(facts)],
        "again": [*_again(facts)],
        "slow": [*_slow(facts)],
        "eval": [*_evaluations(facts)],
        "sample": [*_samples(facts)],
    }
    events = [event for lane_events in by_lane.values() for event in lane_events[-_MOST_EVENTS:]]
    events.sort(key=lambda event: (event["at"], event["step"] or 0))
    return {
        "wall_s": max([*(start["to"] for start in starts), *(event["at"] for event in events)]),
        "lanes": {kind: name for kind, name in _LANES.items() if by_lane[kind]},
        "starts": starts,
        "events": events,
        "samples": _texts(facts),
    }


def _timed(facts: RunFacts) -> RunFacts:
    """The run where a step without a time follows the one before it at once."""
    walls = [start.began - facts.starts[0].began for start in facts.starts]

    def with_wall(record: StepRecord) -> StepRecord:
        if record.restart >= len(walls):
            return record
        walls[record.restart] = record.wall or walls[record.restart]
        return replace(record, wall=walls[record.restart])

    lost = tuple(map(with_wall, facts.lost))
    return replace(facts, records=tuple(map(with_wall, facts.records)), lost=lost)


def _start(facts: RunFacts, number: int, records: list[StepRecord]) -> View:
    """One start as a bar: a start that died ends with its last record, or with its failure."""
    run_start, zero = facts.starts[number], facts.starts[0].began
    began, failed = max(0.0, run_start.began - zero), run_start.facts.get("failed")
    end = max([began, *(record.wall or began for record in records)])
    outcome = "running" if number + 1 == len(facts.starts) else "died"
    if run_start.ended is not None:
        end, outcome = max(end, run_start.ended - zero), run_start.why or "ended"
    elif failed is not None:
        end, outcome = max(end, float(failed["at"]) - zero), "died"
    span = f"steps {records[0].step} to {records[-1].step}" if records else "no step"
    says = f"start {number + 1}: {span} in {rough_duration(end - began)}, {outcome}"
    return {"number": number + 1, "from": began, "to": end, "how": outcome, "says": says}


def _failures(
    facts: RunFacts, starts: list[View], records: list[list[StepRecord]]
) -> Iterator[View]:
    """Starts that died, with the reason that the process that started the ranks recorded."""
    for run_start, drawn, did in zip(facts.starts, starts, records, strict=True):
        if drawn["how"] != "died":
            continue
        failed, last = run_start.facts.get("failed"), did[-1].step if did else None
        where = "before its first step" if last is None else f"after step {last}"
        why = f": {failed['why']}" if failed else "; no process was left to say why"
        yield _event("failure", drawn["to"], last, f"start {drawn['number']} died {where}{why}")


def _resumes(
    facts: RunFacts, starts: list[View], records: list[list[StepRecord]]
) -> Iterator[View]:
    for drawn, did in list(zip(starts, records, strict=True))[1:]:
        first, before = did[0].step if did else None, drawn["number"] - 2
        repeated = sum(1 for record in facts.lost if record.restart == before)
        where = "" if first is None else f" with step {first}"
        again = f", {counted(repeated, 'step')} again" if repeated else ""
        says = f"start {drawn['number']} went on{where}{again}"
        yield _event("resume", drawn["from"], first, says)


def _skipped(facts: RunFacts) -> Iterator[View]:
    for record in facts.records:
        if record.skipped is not None:
            says = f"step {record.step} was skipped: {record.skipped}"
            yield _event("skipped", record.wall, record.step, says)


def _again(facts: RunFacts) -> Iterator[View]:
    """Spikes, and differences between two runs of a step; not proofs that found none."""
    for record in facts.records:
        if record.again is not None and record.again["why"] is not None:
            ranks = ", ".join(map(str, record.again["ranks"]))
            where = f"of rank {ranks}" if ranks else "of a rank that is not known"
            result = (
                "the same result: the data"
                if record.again["same"]
                else f"another: hardware {where}"
            )
            says = f"{record.again['why']}; it ran again with {result}"
            yield _event("again", record.wall, record.step, says)


def _slow(facts: RunFacts) -> Iterator[View]:
    """What was named, each time that its cost changed by a percent of the step or more."""
    before: dict[str, float] = {}
    for record in facts.records:
        slow_ranks = {str(entry["ranks"]): entry for entry in record.slow or []}
        for key, delay in slow_ranks.items():
            if abs(delay["share"] - before.get(key, 0.0)) >= _CHANGE:
                says = f"step {record.step}: {delay['words']}, {delay['share']:.1%} of the step"
                yield _event("slow", record.wall, record.step, says)
                before[key] = delay["share"]


def _evaluations(facts: RunFacts) -> Iterator[View]:
    for record in facts.records:
        if record.eval_loss is None and not record.evals:
            continue
        sets = {name: numbers.get("loss") for name, numbers in (record.evals or {}).items()}
        known = sets or {"loss": record.eval_loss}
        numbers = ", ".join(
            f"{name} {'not finite' if loss is None else f'{loss:.4f}'}"
            for name, loss in known.items()
        )
        yield _event(
            "eval", record.wall, record.step, f"evaluated after step {record.step}: {numbers}"
        )


def _samples(facts: RunFacts) -> Iterator[View]:
    walls = {(record.restart, record.step): record.wall for record in (*facts.records, *facts.lost)}
    counts = {(record.restart, record.step) for record in facts.records}
    for sample in facts.samples:
        if (wall := walls.get((sample.restart, sample.step))) is not None:
            lost = "" if (sample.restart, sample.step) in counts else ", a step that was repeated"
            yield _event("sample", wall, sample.step, f"sample after step {sample.step}{lost}")


def _texts(facts: RunFacts) -> list[View]:
    counts = {(record.restart, record.step) for record in facts.records}
    samples = [sample for sample in facts.samples if (sample.restart, sample.step) in counts]
    return [
        {"step": sample.step, "prompt": sample.prompt, "text": sample.text}
        for sample in samples[-_MOST_SAMPLES:]
    ]


def _event(kind: str, at: float | None, step: int | None, says: str) -> View:
    return {"kind": kind, "at": max(0.0, at or 0.0), "step": step, "says": says}


# The same for a terminal.


def history_text(view: View) -> list[str]:
    """The starts as bars, and the newest events."""
    timeline = view["history"]
    lines, wall = ["time line"], timeline["wall_s"] or 1.0
    for entry in timeline["starts"]:
        begin, end = (round(_WALL_BAR * entry[name] / wall) for name in ("from", "to"))
        bar = " " * begin + "█" * max(1, end - begin)
        lines += [f"|{bar:<{_WALL_BAR + 1}}|", *wrapped(entry["says"])]
    for entry in timeline["events"][-_TEXT_EVENTS:]:
        lines += wrapped(entry["says"], f"{rough_duration(entry['at']):>8}  ")
    hidden = len(timeline["events"]) - _TEXT_EVENTS
    return [*lines, *([f"and {counted(hidden, 'earlier event')}"] if hidden > 0 else [])]


def samples_text(view: View) -> list[str]:
    """The newest samples."""
    lines = ["samples"]
    for sample in view["history"]["samples"][-_TEXT_SAMPLES:]:
        lines += wrapped(f"{sample['prompt']!r} → {sample['text']!r}", f"step {sample['step']}: ")
    return lines if len(lines) > 1 else [*lines, "none: train with --set sample_every=100"]


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
        "history": history(facts),
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
    # Seconds to the last step, as in the step line: by the newest steps of this start.
    pace, number, seconds = Pace(), len(facts.starts) - 1, None
    for record in (entry for entry in facts.records if entry.restart == number):
        seconds = None if steps is None else pace.eta(record, steps)
    eta = None if seconds is None or seconds < 0 else seconds
    left = "" if eta is None else f", about {rough_duration(eta)} to go"
    return f"running: {where}{left}, last heard {rough_duration(facts.idle_s)} ago"


def _is_silent(facts: RunFacts) -> bool:
    """Whether the newest record is much older than a step takes."""
    recent = (record.interval for record in facts.records[-_WINDOW:])
    long = [_SILENT_STEPS * seconds for seconds in recent if seconds is not None]
    return facts.idle_s > max([_LEAST_SILENCE_S, *long])


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
        history_text,
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
        samples_text,
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
