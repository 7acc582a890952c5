"""Curves of a run over its steps, thinned to what a screen can show.

A curve is `{"x": steps, "y": numbers}`, null where a number is not finite. The newest points are
all there; of older ones each bin keeps its least and its most, so that no spike is lost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from fivefold.page import View
from fivefold.records import StepRecord
from fivefold.records.spans import RunFacts
from fivefold.report import duration, thousands

Point = tuple[int, float | None]
_NEWEST, _BINS = 500, 500  # with two points a bin at most 1,500
_COLUMNS = 200  # of a heat map
_SMOOTHED = 50  # windows of the smoothed loss in a run
_WINDOW = 100  # newest steps that are held against the plan

_READ: dict[str, Callable[[StepRecord], float | None]] = {
    "loss": lambda one: one.loss,
    "norm": lambda one: one.norm,
    "lr": lambda one: one.lr,
    "step_s": lambda one: one.seconds,
    "tokens_per_s": lambda one: one.tokens_per_s,
    "mfu": lambda one: one.mfu,
    "memory_gib": lambda one: one.memory_gib,
}
_PLANNED = ("step_s", "tokens_per_s", "mfu", "memory_gib")
WRITE: dict[str, Callable[[float], str]] = {
    "step_s": duration,
    "tokens_per_s": lambda rate: f"{thousands(rate)} tok/s",
    "mfu": lambda share: f"{share:.1%}",
    "memory_gib": lambda size: f"{size:.1f} GiB",
}


def curves(facts: RunFacts) -> dict[str, View]:
    """Every number of the records; what no record has is left out."""
    found: dict[str, View] = {}
    for name, read in _READ.items():
        points = _points(facts.kept, read)
        if not any(value is not None for _, value in points):
            continue
        found[name] = {"measured": _curve(points), "lost": _lost(facts, read)}
        if name in _PLANNED:
            found[name] |= _beside(name, facts.kept, read)
    if "memory_gib" in found and not _on_gpus(facts):
        found["memory_gib"] |= {"planned": None, "ratio": None, "says": _of_a_process(found)}
    if "loss" in found:
        found["loss"]["smoothed"] = _curve(_smoothed(_points(facts.kept, _READ["loss"])))
        found["loss"]["eval"] = _curve(
            [(one.step, one.eval_loss) for one in facts.kept if one.eval_loss is not None]
        )
    return found


def _on_gpus(facts: RunFacts) -> bool:
    return bool(facts.starts[-1].facts.get("machine", {}).get("gpus"))


def _of_a_process(found: Mapping[str, View]) -> str:
    """Without a GPU, what is measured is more than what a plan counts."""
    size = WRITE["memory_gib"](found["memory_gib"]["median"] or 0.0)
    return f"{size} of the host for the whole process; a plan counts its tensors alone"


def marks(facts: RunFacts) -> View:
    """Where a start began that was not the first, and which steps updated nothing."""
    firsts: dict[int, int] = {}
    for one in sorted((*facts.kept, *facts.lost), key=lambda one: one.step):
        firsts.setdefault(one.restart, one.step)
    return {
        "restarts": [
            {"step": step, "says": f"start {number + 1} began at step {step}"}
            for number, step in sorted(firsts.items())
            if number > 0
        ],
        "skipped": [
            {"step": one.step, "says": f"step {one.step} was skipped: {one.skipped}"}
            for one in facts.kept
            if one.skipped is not None
        ],
    }


def load(facts: RunFacts) -> View | None:
    """The fullest expert over the mean, layers by steps; a column of several steps has the most."""
    told = [(one.step, one.load) for one in facts.kept if one.load]
    if not told:
        return None
    num_layers = len(told[-1][1])
    told = [(step, each) for step, each in told if len(each) == num_layers]
    size = -(-len(told) // _COLUMNS)
    groups = [told[i : i + size] for i in range(0, len(told), size)]
    return {
        "layers": _layers(facts, num_layers),
        "steps": [group[0][0] for group in groups],
        "steps_a_column": size,
        "rows": [
            [max(each[layer] for _, each in group) for group in groups]
            for layer in range(num_layers)
        ],
    }


def _layers(facts: RunFacts, num_layers: int) -> list[int]:
    """The numbers of the layers with experts, where the plan tells; else they are counted."""
    shape = None if facts.plan is None else facts.plan.shape
    known = [] if shape is None else [i for i in range(shape.layers) if shape.is_moe_layer(i)]
    return known if len(known) == num_layers else list(range(num_layers))


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most 1,500 points: the newest, and of older ones the least and the most of each bin."""
    if len(points) <= _NEWEST + 2 * _BINS:
        return list(points)
    old, found = points[:-_NEWEST], list[Point]()
    edges = [len(old) * i // _BINS for i in range(_BINS + 1)]
    for begin, end in itertools.pairwise(edges):
        known = [point for point in old[begin:end] if point[1] is not None]
        if not known:
            found.append(old[begin])
            continue
        ends = (min(known, key=_height), max(known, key=_height))
        found += sorted(set(ends))
    return [*found, *points[-_NEWEST:]]


def _height(point: Point) -> float:
    return point[1] or 0.0


def _points(
    records: Sequence[StepRecord], read: Callable[[StepRecord], float | None]
) -> list[Point]:
    return [(one.step, _finite(read(one))) for one in records]


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _curve(points: Sequence[Point]) -> View:
    shown = thinned(points)
    return {
        "x": [step for step, _ in shown],
        "y": [None if value is None else float(f"{value:.6g}") for _, value in shown],
    }


def _lost(facts: RunFacts, read: Callable[[StepRecord], float | None]) -> list[View]:
    """What restarts had to repeat, a curve for each start."""
    starts = sorted({one.restart for one in facts.lost})
    runs = [sorted((one for one in facts.lost if one.restart == n), key=_step) for n in starts]
    return [_curve(_points(run, read)) for run in runs]


def _step(record: StepRecord) -> int:
    return record.step


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """An exponential mean over about a fiftieth of the steps."""
    known = [(step, value) for step, value in points if value is not None]
    keep = 1 - 2 / (max(2, len(known) / _SMOOTHED) + 1)
    found: list[Point] = []
    mean = known[0][1] if known else 0.0
    for step, value in known:
        mean = keep * mean + (1 - keep) * value
        found.append((step, mean))
    return found


def _beside(
    name: str, kept: Sequence[StepRecord], read: Callable[[StepRecord], float | None]
) -> View:
    """The plan's number as a line of its own, and the newest steps held against it."""
    planned = [
        (one.step, None if one.planned is None else float(getattr(one.planned, name)))
        for one in kept
    ]
    newest = [one for one in kept[-_WINDOW:] if one.skipped is None]
    known = [value for one in newest if (value := _finite(read(one))) is not None]
    middle = median(known) if known else None
    goal = planned[-1][1]
    if goal is None or middle is None:
        return {"planned": None, "median": middle, "goal": goal, "ratio": None, "says": None}
    ratio = middle / goal
    write = WRITE[name]
    says = (
        f"{write(middle)} (median of the newest {len(known)}), planned {write(goal)}: "
        f"{ratio:.2f} times the plan"
    )
    changes = [
        point
        for place, point in enumerate(planned)
        if place in (0, len(planned) - 1) or point[1] != planned[place - 1][1]
    ]
    return {
        "planned": _curve(changes),
        "median": middle,
        "goal": goal,
        "ratio": ratio,
        "says": says,
    }
