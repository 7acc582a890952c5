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
from fivefold.render import chunks_by_rank, duration, wrapped
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


def verdict(comparison: Comparison, column: Sequence[int]) -> str:
    """How long the step took, planned and measured, and what explains most of the difference."""
    what, plan = ("step", "planned") if comparison.full_step else ("pipeline", "with mean times")
    start = (
        f"the {what} took {duration(comparison.seconds)}, {plan} {duration(comparison.planned)} "
        f"({comparison.seconds / comparison.planned:.2f} times)"
    )
    if comparison.named is None:
        return start + ": nothing differs that needs a name"
    longer = "longer" if comparison.difference > 0 else "less"
    share = comparison.named.gain / comparison.difference
    clause = f"{start}; {sentence(comparison.named, column, comparison.full_step)}"
    if share < _ALL:
        return f"{clause}: {share:.0%} of what it took {longer}"
    return f"{clause}: all of what it took {longer}, and more, which other parts make up for"


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
    if cause.pp_rank is None:
        return f"messages between pipeline ranks arrive late {times}"
    own_rank, source = column[cause.pp_rank], column[_known(cause.source)]
    if cause.action is None:
        return f"messages from rank {source} to rank {own_rank} arrive late {times}"
    late = duration(cause.measured - cause.planned)
    return (
        f"waiting: rank {own_rank} idles {late} more before {cause.action}, for {cause.cause} of "
        f"rank {source}"
    )


def _known(pp_rank: int | None) -> int:
    assert pp_rank is not None
    return pp_rank


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
    step_spans = spans(step)
    if step_spans is None:
        ranges = ", ".join(f"{a} to {b}" for _, (a, b) in sorted(facts.event_steps.items()))
        return {
            "step": step,
            "problem": f"step {step} has no events: there are those of steps {ranges}",
        }
    plan, problem = facts.plan, _mismatch(facts, step_spans)
    if plan is None or problem is not None:
        return {"step": step, "problem": problem}
    return {"step": step, **_compared(facts, plan, step_spans, params)}


def _mismatch(facts: RunFacts, step_spans: StepSpans) -> str | None:
    """Why the events of a step cannot be compared with the plan of the folder."""
    if facts.plan is None:
        return facts.no_plan
    ran, plan_layout = facts.starts[step_spans.restart].facts.get("layout"), str(facts.plan.layout)
    if ran is not None and ran != plan_layout:
        return (
            f"start {step_spans.restart + 1} ran {ran}, and the plan of the folder is that of the "
            f"newest start, {plan_layout}: choose a step that the newest start ran"
        )
    return None


def _compared(facts: RunFacts, plan: Plan, step_spans: StepSpans, params: Params) -> View:
    record = facts.record(step_spans.number, step_spans.restart)
    columns = _columns(plan, step_spans.within(record))
    if not columns:
        return {"problem": "no pipeline has recorded all actions of this step: take another one"}
    column = _chosen(columns, params)
    peers = {
        pp_rank: [spans.ranks[ranks[pp_rank]] for ranks, spans in columns.items()]
        for pp_rank in range(plan.layout.pp)
    }
    own_spans = columns[column]
    expected = from_plan(plan) or from_means(plan.schedule, [own_spans.ranks[r] for r in column])
    comparison = compare(expected, own_spans, column, record, peers)
    says = verdict(comparison, column)
    # The parts of the difference, which sum to it, and their shares, which sum to 100%.
    return {
        "problem": None,
        "restart": step_spans.restart,
        "rank": column[0],
        "choices": [ranks[0] for ranks in columns],
        "read": [len(step_spans.ranks), step_spans.num_ranks],
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
        "causes": [
            {
                "says": _part(part, column, comparison.full_step),
                "gain_s": part.seconds,
                "share": part.share,
                "named": part.cause is not None and part.cause is comparison.named,
            }
            for part in comparison.parts
        ],
        "ranks": _ranks(comparison, column),
        "calls": _calls([own_spans.ranks[rank] for rank in column]),
        "picture": _picture(comparison, column),
    }


def _columns(plan: Plan, step_spans: StepSpans) -> Columns:
    """The pipelines with complete events on all ranks; waiting is separated from work."""
    complete = [ranks for ranks in plan.layout.groups("pp") if step_spans.ranks.keys() >= {*ranks}]
    columns = {ranks: split_waiting(step_spans, plan.schedule, ranks) for ranks in complete}
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


def _part(part: CausePart, column: Sequence[int], by_plan: bool) -> str:
    if part.cause is None:
        return "all else"
    return _OTHERS[part.cause.what] if part.residual else sentence(part.cause, column, by_plan)


def _ranks(comparison: Comparison, column: Sequence[int]) -> list[View]:
    """How long each rank is busy and idle in the pipeline, planned and measured."""

    def busy(times: Timeline, row: int) -> float:
        return sum(times.ends[row]) - sum(times.starts[row])

    placement = comparison.ran.schedule.placement
    return [
        {
            "rank": rank,
            "stages": list(placement.stages_of(pp_rank)),
            "busy_planned": busy(comparison.played, pp_rank),
            "busy": busy(comparison.ran, pp_rank),
            "idle_planned": comparison.played.makespan - busy(comparison.played, pp_rank),
            "idle": comparison.ran.makespan - busy(comparison.ran, pp_rank),
        }
        for pp_rank, rank in enumerate(column)
    ]


def _calls(ranks: Sequence[RankSpans]) -> list[View]:
    """The collectives of these ranks by axis; the times of overlapping ones are added."""
    totals: dict[str, list[float]] = {}
    for call in (call for rank_spans in ranks for call in rank_spans.calls):
        sums = totals.setdefault(call.axis, [0, 0, 0.0])
        for i, amount in enumerate((1, call.bytes, call.end - call.begin)):
            sums[i] += amount
    return [
        {"axis": axis, "calls": calls, "bytes": size, "seconds": seconds}
        for axis, (calls, size, seconds) in sorted(totals.items())
    ]


def _picture(comparison: Comparison, column: Sequence[int]) -> View:
    """The timeline of every rank, planned and measured, one above the other."""
    schedule, played, ran = comparison.ran.schedule, comparison.played, comparison.ran
    longest = max(played.makespan, ran.makespan)
    chunks = chunks_by_rank(schedule.placement)
    planned_waits = timeline.waits_by_rank(played, longest / _SEEN)
    names = {
        result: str(step) for steps in schedule.order for step in steps for result in results(step)
    }
    rows: list[timeline.TimelineRow] = []
    for pp_rank, rank in enumerate(column):
        steps = schedule.order[pp_rank]
        waits = dict(_waits(ran, pp_rank, names, longest / _SEEN))
        pairs = {"planned": (played, planned_waits[pp_rank]), "measured": (ran, waits)}
        for name, (times, why) in pairs.items():
            label, starts, ends = f"rank {rank} {name}", times.starts[pp_rank], times.ends[pp_rank]
            rows.append(timeline.TimelineRow(label, steps, starts, ends, chunks[pp_rank], why))
    headline = (
        f"{schedule.name} on {counted(len(column), 'rank')}: planned {duration(played.makespan)}, "
        f"measured {duration(ran.makespan)}"
    )
    mirrored = schedule.placement.mirrored
    return timeline.picture(rows, longest, headline=headline, seconds=1.0, mirrored=mirrored)


def _waits(
    ran: Timeline, pp_rank: int, names: Mapping[Result, str], least: float
) -> Iterator[tuple[Step, str]]:
    """The steps after measured idle slots, each with the actions whose results it waited for."""
    free, schedule = 0.0, ran.schedule
    for i, step in enumerate(schedule.order[pp_rank]):
        if ran.starts[pp_rank][i] - free > least:
            senders = [names[result] for _, result in awaited(schedule, step)]
            yield step, " and ".join(senders) or "nothing"
        free = ran.ends[pp_rank][i]


# The same for a terminal.


def text(view: View) -> list[str]:
    """The step of a run's answer for a terminal."""
    step_view = view["step"]
    if step_view is None or step_view["step"] is None or step_view["problem"] is not None:
        reason = "not asked for" if step_view is None else step_view["problem"]
        return ["one step", *wrapped(reason)]
    return [
        f"step {step_view['step']}, pipeline of rank {step_view['rank']}",
        *wrapped(step_view["says"]),
        *wrapped(step_view["basis"]),
        *_timeline_lines(step_view["picture"]),
        *_table_lines(step_view),
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


def _table_lines(step_view: View) -> Iterator[str]:
    """The causes, how long each rank is busy and idle, and the collectives."""
    if step_view["causes"]:
        yield "set to the plan one after the other, they would make the step shorter by"
    for cause in step_view["causes"]:
        start = f"{duration(cause['gain_s']):>10}{cause['share']:>8.1%}  "
        yield from wrapped(cause["says"], start)
    yield f"{'':12}{'busy: plan':>12}{'measured':>12}{'idle: plan':>12}{'measured':>12}"
    for row in step_view["ranks"]:
        names = ("busy_planned", "busy", "idle_planned", "idle")
        times = "".join(f"{duration(row[name]):>12}" for name in names)
        yield f"{'rank ' + str(row['rank']):<12}{times}"
    yield f"{'collectives':<12}{'calls':>12}{'bytes':>16}{'under way':>12}"
    for row in step_view["calls"]:
        numbers = f"{row['calls']:>12,}{row['bytes']:>16,}{duration(row['seconds']):>12}"
        yield f"{row['axis']:<12}{numbers}"
