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
from fivefold.render import rough_duration, wrapped
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


def _by_start(facts: RunFacts) -> list[list[StepRecord]]:
    """The records of each start, those of lost steps too."""
    groups: list[list[StepRecord]] = [[] for _ in facts.starts]
    for record in (*facts.records, *facts.lost):
        if record.restart < len(groups):
            groups[record.restart].append(record)
    return [sorted(group, key=lambda entry: entry.step) for group in groups]


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
        begin, end = (round(_BAR * entry[name] / wall) for name in ("from", "to"))
        bar = " " * begin + "█" * max(1, end - begin)
        lines += [f"|{bar:<{_BAR + 1}}|", *wrapped(entry["says"])]
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
