"""What happened to a run: its starts and failures, evaluations and samples, on one time line.

Times are seconds since the first start. A kind of events is a lane of the time line:

    {"wall_s": its end, "lanes": {kind: what it is},
     "starts": [{"number", "from", "to", "how": done, stopped, died or running, "says"}, ...],
     "events": [{"kind", "at", "step", "says"}, ...] in the order of time,
     "samples": [{"step", "prompt", "text"}, ...] of steps that count}
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fivefold.core import counted
from fivefold.records import RunFacts, StepRecord
from fivefold.report import rough_duration, wrapped
from fivefold_page import View

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
_BAR = 60  # columns of the wall time
_CHANGE = 0.01  # share of a step


def history(facts: RunFacts) -> View:
    """The time line; an evaluation names its sets."""
    facts = _timed(facts)
    records = _by_start(facts)
    starts = [_start(facts, number, each) for number, each in enumerate(records)]
    by_lane = {
        "failure": [*_failures(facts, starts, records)],
        "resume": [*_resumes(facts, starts, records)],
        "skipped": [*_skipped(facts)],
        "again": [*_again(facts)],
        "slow": [*_slow(facts)],
        "eval": [*_evaluations(facts)],
        "sample": [*_samples(facts)],
    }
    events = [one for found in by_lane.values() for one in found[-_MOST_EVENTS:]]
    events.sort(key=lambda one: (one["at"], one["step"] or 0))
    return {
        "wall_s": max([*(one["to"] for one in starts), *(one["at"] for one in events)]),
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


def _by_start(facts: RunFacts) -> list[list[StepRecord]]:
    """The records of each start, those of lost steps too."""
    found: list[list[StepRecord]] = [[] for _ in facts.starts]
    for one in (*facts.records, *facts.lost):
        if one.restart < len(found):
            found[one.restart].append(one)
    return [sorted(each, key=lambda one: one.step) for each in found]


def _start(facts: RunFacts, number: int, records: list[StepRecord]) -> View:
    """One start as a bar: a start that died ends with its last record, or with its failure."""
    one, zero = facts.starts[number], facts.starts[0].began
    began, failed = max(0.0, one.began - zero), one.facts.get("failed")
    end = max([began, *(record.wall or began for record in records)])
    how = "running" if number + 1 == len(facts.starts) else "died"
    if one.ended is not None:
        end, how = max(end, one.ended - zero), one.why or "ended"
    elif failed is not None:
        end, how = max(end, float(failed["at"]) - zero), "died"
    span = f"steps {records[0].step} to {records[-1].step}" if records else "no step"
    says = f"start {number + 1}: {span} in {rough_duration(end - began)}, {how}"
    return {"number": number + 1, "from": began, "to": end, "how": how, "says": says}


def _failures(
    facts: RunFacts, starts: list[View], records: list[list[StepRecord]]
) -> Iterator[View]:
    """Starts that died, with the reason that the process that started the ranks recorded."""
    for one, drawn, did in zip(facts.starts, starts, records, strict=True):
        if drawn["how"] != "died":
            continue
        failed, last = one.facts.get("failed"), did[-1].step if did else None
        where = "before its first step" if last is None else f"after step {last}"
        why = f": {failed['why']}" if failed else "; no process was left to say why"
        yield _event("failure", drawn["to"], last, f"start {drawn['number']} died {where}{why}")


def _resumes(
    facts: RunFacts, starts: list[View], records: list[list[StepRecord]]
) -> Iterator[View]:
    for drawn, did in list(zip(starts, records, strict=True))[1:]:
        first, before = did[0].step if did else None, drawn["number"] - 2
        repeated = sum(1 for one in facts.lost if one.restart == before)
        where = "" if first is None else f" with step {first}"
        again = f", {counted(repeated, 'step')} again" if repeated else ""
        says = f"start {drawn['number']} went on{where}{again}"
        yield _event("resume", drawn["from"], first, says)


def _skipped(facts: RunFacts) -> Iterator[View]:
    for one in facts.records:
        if one.skipped is not None:
            says = f"step {one.step} was skipped: {one.skipped}"
            yield _event("skipped", one.wall, one.step, says)


def _again(facts: RunFacts) -> Iterator[View]:
    """Spikes, and differences between two runs of a step; not proofs that found none."""
    for one in facts.records:
        if one.again is not None and one.again["why"] is not None:
            ranks = ", ".join(map(str, one.again["ranks"]))
            where = f"of rank {ranks}" if ranks else "of a rank that is not known"
            result = (
                "the same result: the data" if one.again["same"] else f"another: hardware {where}"
            )
            says = f"{one.again['why']}; it ran again with {result}"
            yield _event("again", one.wall, one.step, says)


def _slow(facts: RunFacts) -> Iterator[View]:
    """What was named, each time that its cost changed by a percent of the step or more."""
    before: dict[str, float] = {}
    for one in facts.records:
        now = {str(each["ranks"]): each for each in one.slow or []}
        for key, each in now.items():
            if abs(each["share"] - before.get(key, 0.0)) >= _CHANGE:
                says = f"step {one.step}: {each['words']}, {each['share']:.1%} of the step"
                yield _event("slow", one.wall, one.step, says)
                before[key] = each["share"]


def _evaluations(facts: RunFacts) -> Iterator[View]:
    for one in facts.records:
        if one.eval_loss is None and not one.evals:
            continue
        sets = {name: numbers.get("loss") for name, numbers in (one.evals or {}).items()}
        known = sets or {"loss": one.eval_loss}
        numbers = ", ".join(
            f"{name} {'not finite' if loss is None else f'{loss:.4f}'}"
            for name, loss in known.items()
        )
        yield _event("eval", one.wall, one.step, f"evaluated after step {one.step}: {numbers}")


def _samples(facts: RunFacts) -> Iterator[View]:
    walls = {(one.restart, one.step): one.wall for one in (*facts.records, *facts.lost)}
    counts = {(one.restart, one.step) for one in facts.records}
    for one in facts.samples:
        if (wall := walls.get((one.restart, one.step))) is not None:
            lost = "" if (one.restart, one.step) in counts else ", a step that was repeated"
            yield _event("sample", wall, one.step, f"sample after step {one.step}{lost}")


def _texts(facts: RunFacts) -> list[View]:
    counts = {(one.restart, one.step) for one in facts.records}
    kept = [one for one in facts.samples if (one.restart, one.step) in counts]
    return [
        {"step": one.step, "prompt": one.prompt, "text": one.text} for one in kept[-_MOST_SAMPLES:]
    ]


def _event(kind: str, at: float | None, step: int | None, says: str) -> View:
    return {"kind": kind, "at": max(0.0, at or 0.0), "step": step, "says": says}


# The same for a terminal.


def history_text(view: View) -> list[str]:
    """The starts as bars, and the newest events."""
    found = view["history"]
    lines, wall = ["time line"], found["wall_s"] or 1.0
    for one in found["starts"]:
        begin, end = (round(_BAR * one[name] / wall) for name in ("from", "to"))
        bar = " " * begin + "█" * max(1, end - begin)
        lines += [f"|{bar:<{_BAR + 1}}|", *wrapped(one["says"])]
    for one in found["events"][-_TEXT_EVENTS:]:
        lines += wrapped(one["says"], f"{rough_duration(one['at']):>8}  ")
    hidden = len(found["events"]) - _TEXT_EVENTS
    return [*lines, *([f"and {counted(hidden, 'earlier event')}"] if hidden > 0 else [])]


def samples_text(view: View) -> list[str]:
    """The newest samples."""
    lines = ["samples"]
    for one in view["history"]["samples"][-_TEXT_SAMPLES:]:
        lines += wrapped(f"{one['prompt']!r} → {one['text']!r}", f"step {one['step']}: ")
    return lines if len(lines) > 1 else [*lines, "none: train with --set sample_every=100"]
