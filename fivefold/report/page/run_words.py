"""What explains the difference between a plan and a step, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.core.deviation import PAIR, Cause, Comparison
from fivefold.core.schedule.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD
from fivefold.report.amounts import duration

_KINDS = {
    FORWARD: "forwards",
    BACKWARD: "backwards",
    INPUT_GRAD: "input gradients",
    WEIGHT_GRAD: "weight gradients",
    PAIR: "overlapped pairs",
}
_ALL = 1.005  # above, other parts went the other way
_AROUND = {"dp": "sums and gathers of data ranks", "update": "the update and all else"}


def verdict(found: Comparison, column: Sequence[int]) -> str:
    """How long the step took beside the plan, and what explains most of the difference."""
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
    """One cause; `column` are the ranks of the pipeline in its order."""
    times = f"({duration(cause.measured)} against {duration(cause.planned)})"
    ratio = f"{cause.measured / cause.planned:.2f} times " if cause.planned > 0 else "more than "
    usual = f"{ratio}the {'plan' if by_plan else 'mean'} {times}"
    if cause.what == "compute":
        uneven = (cause.measured - cause.planned) * cause.gain < 0
        return f"{_actions(cause)} {'are uneven: on average' if uneven else 'take'} {usual}"
    if cause.what == "straggler":
        rank = column[_known(cause.place)]
        return f"rank {rank} computes {ratio}as long as other ranks of its stage {times}"
    if cause.what == "collective":
        return f"collectives of {cause.axis} inside of the actions take {usual}"
    if cause.what == "around":
        return f"{_AROUND[cause.axis or '']}, outside of the pipeline, take {usual}"
    if cause.what == "pause":
        who = "ranks pause" if cause.place is None else f"rank {column[cause.place]} pauses"
        return f"{who} for {duration(cause.measured)} in all before actions that lack nothing"
    return _message(cause, column, times)


def _actions(cause: Cause) -> str:
    kind = "actions" if cause.kind is None else _KINDS[cause.kind]
    return f"all {kind}" if cause.stage is None else f"stage {cause.stage}'s {kind}"


def _message(cause: Cause, column: Sequence[int], times: str) -> str:
    if cause.place is None:
        return f"messages between pipeline ranks arrive late {times}"
    here, source = column[cause.place], column[_known(cause.source)]
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
