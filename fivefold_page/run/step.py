"""One step of a run compared with its plan: both timelines, and what explains the difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from fivefold.core import FivefoldError, counted
from fivefold.core.plan import Plan
from fivefold.core.schedule import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Step, Timeline
from fivefold.records import (
    PAIR,
    Cause,
    CausePart,
    Comparison,
    RankSpans,
    Result,
    RunFacts,
    StepSpans,
    awaited,
    compare,
    from_means,
    from_plan,
    own_seconds,
    results,
    split_waiting,
)
from fivefold.report import duration, wrapped
from fivefold.report.pipeline_text import chunks_by_rank
from fivefold_page import Params, View, timeline

_KINDS = {
    FORWARD: "forwards",
    BACKWARD: "backwards",
    INPUT_GRAD: "input gradients",
    WEIGHT_GRAD: "weight gradients",
    PAIR: "overlapped pairs",
}
_ALL = 1.005  # share of the difference above which other causes go the other way
_OTHERS = {
    "compute": "all other computation",
    "message": "all other messages between pipeline ranks",
    "pause": "all other pauses",
}
_AROUND = {"dp": "sums and gathers of data ranks", "update": "the update and all else"}


def verdict(found: Comparison, column: Sequence[int]) -> str:
    """How long the step took, planned and measured, and what explains most of the difference."""
    what, plan = ("step", "planned") if found.whole else ("pipeline", "with mean times")
    start = (
        f"the {what} took {duration(found.seconds)}, {plan} {duration(found.planned)} "
        f"({found.seconds / found.planned:.2f} times)"
    )
    if found.named is None:
        return start + ": nothing differs that needs a name"
    longer = "longer" if found.difference > 0 else "less"
    share = found.named.gain / found.difference
    words = f"{start}; {sentence(found.named, column, found.whole)}"
    if share < _ALL:
        return f"{words}: {share:.0%} of what it took {longer}"
    return f"{words}: all of what it took {longer}, and more, which other parts make up for"


def sentence(cause: Cause, column: Sequence[int], by_plan: bool) -> str:
    """One cause in words; `column` has the ranks of the pipeline in order."""
    times = f"({duration(cause.measured)} against {duration(cause.planned)})"
    ratio = f"{cause.measured / cause.planned:.2f} times " if cause.planned > 0 else "more than "
    usual = f"{ratio}the {'plan' if by_plan else 'mean'} {times}"
    if cause.what == "compute":
        uneven = (cause.measured - cause.planned) * cause.gain < 0
        kind = "actions" if cause.kind is None else _KINDS[cause.kind]
        which = f"all {kind}" if cause.stage is None else f"stage {cause.stage}'s {kind}"
        return f"{which} {'are uneven: on average' if uneven else 'take'} {usual}"
    if cause.what == "straggler":
        rank = column[_known(cause.pp_rank)]
        return f"rank {rank} computes {ratio}as long as other ranks of its stage {times}"
    if cause.what == "collective":
        return f"collectives of {cause.axis} inside of the actions take {usual}"
    if cause.what == "around":
        return f"{_AROUND[cause.axis or '']}, outside of the pipeline, take {usual}"
    if cause.what == "pause":
        who = "ranks pause" if cause.pp_rank is None else f"rank {column[cause.pp_rank]} pauses"
        return f"{who} for {duration(cause.measured)} in all before actions that lack nothing"
    return _message(cause, column, times)


def _message(cause: Cause, column: Sequence[int], times: str) -> str:
    if cause.pp_rank is None:
        return f"messages between pipeline ranks arrive late {times}"
    here, source = column[cause.pp_rank], column[_known(cause.source)]
    if cause.action is None:
        return f"messages from rank {source} to rank {here} arrive late {times}"
    late = duration(cause.measured - cause.planned)
    return (
        f"waiting: rank {here} idles {late} more before {cause.action}, for {cause.cause} of "
        f"rank {source}"
    )


def _known(place: int | None) -> int:
    assert place is not None
    return place


# The answer.


Columns = dict[tuple[int, ...], StepSpans]  # by the ranks of a pipeline
NONE = "none"  # the value of `step` that leaves the step out
_SEEN = 2_000  # idle slots shorter than the makespan over this number are not explained
_BY_MEANS = (
    "The plan names no machine: in place of planned times stands the schedule with the measured "
    "mean of each kind of action and free messages, and only the pipeline is compared."
)


def view(facts: RunFacts, params: Params, spans: Callable[[int], StepSpans | None]) -> View | None:
    """The step of `params`, or the newest; None for `none`.

    If the step cannot be compared, `problem` says why.
    """
    if params.get("step") == NONE:
        return None
    if not facts.event_steps:
        problem = "no rank wrote events: train with --set events=true to see what each did when"
        return {"step": None, "problem": problem}
    step = _number(params, "step", facts.steps[-1])
    found = spans(step)
    if found is None:
        ranges = ", ".join(f"{a} to {b}" for _, (a, b) in sorted(facts.event_steps.items()))
        return {
            "step": step,
            "problem": f"step {step} has no events: there are those of steps {ranges}",
        }
    plan, problem = facts.plan, _mismatch(facts, found)
    if plan is None or problem is not None:
        return {"step": step, "problem": problem}
    return {"step": step, **_compared(facts, plan, found, params)}


def _mismatch(facts: RunFacts, found: StepSpans) -> str | None:
    """Why the events of a step cannot be compared with the plan of the folder."""
    if facts.plan is None:
        return facts.no_plan
    ran, now = facts.starts[found.restart].facts.get("layout"), str(facts.plan.layout)
    if ran is not None and ran != now:
        return (
            f"start {found.restart + 1} ran {ran}, and the plan of the folder is that of the "
            f"newest start, {now}: choose a step that the newest start ran"
        )
    return None


def _compared(facts: RunFacts, plan: Plan, found: StepSpans, params: Params) -> View:
    record = facts.record(found.number, found.restart)
    columns = _columns(plan, found.within(record))
    if not columns:
        return {"problem": "no pipeline has recorded all actions of this step: take another one"}
    column = _chosen(columns, params)
    peers = {
        place: [spans.ranks[ranks[place]] for ranks, spans in columns.items()]
        for place in range(plan.layout.pp)
    }
    mine = columns[column]
    expected = from_plan(plan) or from_means(plan.schedule, [mine.ranks[r] for r in column])
    comparison = compare(expected, mine, column, record, peers)
    says = verdict(comparison, column)
    return {
        "problem": None,
        "restart": found.restart,
        "rank": column[0],
        "choices": [ranks[0] for ranks in columns],
        "read": [len(found.ranks), found.num_ranks],
        "seconds": {
            "measured": comparison.seconds,
            "planned": comparison.planned,
            "pipeline": comparison.ran.makespan,
            "pipeline_planned": comparison.played.makespan,
        },
        "says": says[:1].upper() + says[1:] + ".",
        "basis": _BY_MEANS
        if plan.machine is None
        else f"Planned times are those of the planner's forecast for {plan.machine.name}.",
        "causes": _causes(comparison, column),
        "ranks": _ranks(comparison, column),
        "calls": _calls([mine.ranks[rank] for rank in column]),
        "picture": _picture(comparison, column),
    }


def _columns(plan: Plan, found: StepSpans) -> Columns:
    """The pipelines with complete events on all ranks; waiting is separated from work."""
    complete = [ranks for ranks in plan.layout.groups("pp") if found.ranks.keys() >= {*ranks}]
    columns = {ranks: split_waiting(found, plan.schedule, ranks) for ranks in complete}
    return {ranks: spans for ranks, spans in columns.items() if spans is not None}


def _chosen(columns: Columns, params: Params) -> tuple[int, ...]:
    """The pipeline of the rank in `params`, or the one that computes longest."""
    if "rank" in params:
        rank = _number(params, "rank", 0)
        if with_rank := [ranks for ranks in columns if rank in ranks]:
            return with_rank[0]
        known = ", ".join(str(ranks[0]) for ranks in list(columns)[:8])
        raise FivefoldError(f"rank {rank} has no events of this step: choose one of {known}")
    return max(columns, key=lambda ranks: sum(own_seconds(columns[ranks].ranks[r]) for r in ranks))


def _number(params: Params, name: str, default: int) -> int:
    text = params.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise FivefoldError(f"{name}={text[:20]!r}: give a whole number, such as {default}")
    return int(text)


def _causes(found: Comparison, column: Sequence[int]) -> list[View]:
    """The parts of the difference, which sum to it, and their shares, which sum to 100%."""
    return [
        {
            "says": _part(one, column, found.whole),
            "gain_s": one.seconds,
            "share": one.share,
            "named": one.cause is not None and one.cause is found.named,
        }
        for one in found.parts
    ]


def _part(one: CausePart, column: Sequence[int], by_plan: bool) -> str:
    if one.cause is None:
        return "all else"
    return _OTHERS[one.cause.what] if one.rest else sentence(one.cause, column, by_plan)


def _ranks(found: Comparison, column: Sequence[int]) -> list[View]:
    """How long each rank is busy and idle in the pipeline, planned and measured."""

    def busy(one: Timeline, place: int) -> float:
        return sum(one.ends[place]) - sum(one.starts[place])

    placement = found.ran.schedule.placement
    return [
        {
            "rank": rank,
            "stages": list(placement.stages_of(place)),
            "busy_planned": busy(found.played, place),
            "busy": busy(found.ran, place),
            "idle_planned": found.played.makespan - busy(found.played, place),
            "idle": found.ran.makespan - busy(found.ran, place),
        }
        for place, rank in enumerate(column)
    ]


def _calls(ranks: Sequence[RankSpans]) -> list[View]:
    """The collectives of these ranks by axis; the times of overlapping ones are added."""
    found: dict[str, list[float]] = {}
    for call in (call for one in ranks for call in one.calls):
        sums = found.setdefault(call.axis, [0, 0, 0.0])
        for i, more in enumerate((1, call.bytes, call.end - call.begin)):
            sums[i] += more
    return [
        {"axis": axis, "calls": calls, "bytes": size, "seconds": seconds}
        for axis, (calls, size, seconds) in sorted(found.items())
    ]


def _picture(found: Comparison, column: Sequence[int]) -> View:
    """The timeline of every rank, planned and measured, one above the other."""
    schedule, played, ran = found.ran.schedule, found.played, found.ran
    longest = max(played.makespan, ran.makespan)
    chunks = chunks_by_rank(schedule.placement)
    planned_waits = timeline.waits_by_rank(played, longest / _SEEN)
    names = {
        each: str(step) for steps in schedule.order for step in steps for each in results(step)
    }
    rows: list[timeline.TimelineRow] = []
    for place, rank in enumerate(column):
        steps = schedule.order[place]
        waits = dict(_waits(ran, place, names, longest / _SEEN))
        pairs = {"planned": (played, planned_waits[place]), "measured": (ran, waits)}
        for name, (times, why) in pairs.items():
            label, starts, ends = f"rank {rank} {name}", times.starts[place], times.ends[place]
            rows.append(timeline.TimelineRow(label, steps, starts, ends, chunks[place], why))
    headline = (
        f"{schedule.name} on {counted(len(column), 'rank')}: planned {duration(played.makespan)}, "
        f"measured {duration(ran.makespan)}"
    )
    mirrored = schedule.placement.mirrored
    return timeline.picture(rows, longest, headline=headline, seconds=1.0, mirrored=mirrored)


def _waits(
    ran: Timeline, place: int, names: Mapping[Result, str], least: float
) -> Iterator[tuple[Step, str]]:
    """The steps after measured idle slots, each with the actions whose results it waited for."""
    free, schedule = 0.0, ran.schedule
    for i, step in enumerate(schedule.order[place]):
        if ran.starts[place][i] - free > least:
            senders = [names[result] for _, result in awaited(schedule, step)]
            yield step, " and ".join(senders) or "nothing"
        free = ran.ends[place][i]


# The same for a terminal.


def text(view: View) -> list[str]:
    """The step of a run's answer for a terminal."""
    found = view["step"]
    if found is None or found["step"] is None or found["problem"] is not None:
        reason = "not asked for" if found is None else found["problem"]
        return ["one step", *wrapped(reason)]
    return [
        f"step {found['step']}, pipeline of rank {found['rank']}",
        *wrapped(found["says"]),
        *wrapped(found["basis"]),
        *_timeline_lines(found["picture"]),
        *_table_lines(found),
    ]


def _timeline_lines(picture: View) -> list[str]:
    """The timelines; `timeline.text` numbers the rows, which get the names of their ranks here."""
    lines = timeline.text(picture)
    for number, row in enumerate(picture["rows"]):
        _, rank, what = row["name"].split()
        start = f"rank {number} "
        label = f"{rank} {what[0].upper()}".ljust(len(start) - 1) + " "
        lines = [
            label + line[len(start) :]
            if line.startswith(start) and "waits at" not in line
            else line
            for line in lines
        ]
    return [*lines, "rows: rank, P as planned, M as measured"]


def _table_lines(found: View) -> Iterator[str]:
    """The causes, how long each rank is busy and idle, and the collectives."""
    if found["causes"]:
        yield "set to the plan one after the other, they would make the step shorter by"
    for cause in found["causes"]:
        start = f"{duration(cause['gain_s']):>10}{cause['share']:>8.1%}  "
        yield from wrapped(cause["says"], start)
    yield f"{'':12}{'busy: plan':>12}{'measured':>12}{'idle: plan':>12}{'measured':>12}"
    for one in found["ranks"]:
        names = ("busy_planned", "busy", "idle_planned", "idle")
        times = "".join(f"{duration(one[name]):>12}" for name in names)
        yield f"{'rank ' + str(one['rank']):<12}{times}"
    yield f"{'collectives':<12}{'calls':>12}{'bytes':>16}{'under way':>12}"
    for one in found["calls"]:
        numbers = f"{one['calls']:>12,}{one['bytes']:>16,}{duration(one['seconds']):>12}"
        yield f"{one['axis']:<12}{numbers}"
