"""The curves of a run over its steps, thinned to what a screen can show, and as text.

A curve is `{"x": steps, "y": numbers}`, null where a number is not finite. All of the newest points
are there; of the older ones the minimum and the maximum of each bin, so that no spike is lost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

from fivefold.records import RunFacts, StepRecord
from fivefold.render import duration, thousands, wrapped
from fivefold_page import View

Point = tuple[int, float | None]
_NEWEST, _BINS = 500, 500  # at most 1,500 points, with two per bin
_HEAT_MAP_COLUMNS = 200
_SMOOTHING_WINDOWS = 50  # in a run
_WINDOW = 100  # newest steps that are compared with the plan
# Of the plan, or of the median, to both sides: what an axis shows at least.
_LEAST_SPAN = {"step_s": 0.2, "tokens_per_s": 0.2, "mfu": 0.2, "memory_gib": 0.2, "loss": 0.01}
_BAND, _ROOM = 0.05, 0.05  # of the plan, and of an axis
_MOST_BEYOND = 5
_TEXT_COLUMNS, _TEXT_ROWS = 72, 8  # of a curve in a terminal

_CURVES = ("loss", "norm", "lr", "step_s", "tokens_per_s", "mfu", "memory_gib")
_PLANNED = ("step_s", "tokens_per_s", "mfu", "memory_gib")
_RATES = {"step_s": "step", "tokens_per_s": "tokens/s", "mfu": "MFU"}
_FORMATS: dict[str, Callable[[float], str]] = {
    "step_s": duration,
    "tokens_per_s": lambda rate: f"{thousands(rate)} tok/s",
    "mfu": lambda share: f"{share:.1%}",
    "memory_gib": lambda size: f"{size:.1f} GiB",
}


def curves(facts: RunFacts) -> dict[str, View]:
    """Every number that at least one record has."""
    curve_views: dict[str, View] = {}
    for name in _CURVES:
        points = _points(facts.records, name)
        if not any(value is not None for _, value in points):
            continue
        curve_views[name] = {"measured": _curve(points), "lost": _lost(facts, name)}
        if name in _PLANNED:
            curve_views[name] |= _compared(facts.records, name)
        curve_views[name]["axis"] = _axis(facts, name, curve_views[name].get("goal"))
    if "memory_gib" in curve_views and not facts.starts[-1].facts.get("machine", {}).get("gpus"):
        # Without a GPU the measured memory is that of the process: no plan can be compared with it.
        size = _FORMATS["memory_gib"](curve_views["memory_gib"]["median"] or 0.0)
        says = f"{size} of the host for the whole process; a plan counts its tensors alone"
        curve_views["memory_gib"] |= {"planned": None, "ratio": None, "says": says}
        curve_views["memory_gib"]["axis"] = _axis(facts, "memory_gib", None)
    if "loss" in curve_views:
        curve_views["loss"]["smoothed"] = _curve(_smoothed(_points(facts.records, "loss")))
        curve_views["loss"]["eval"] = _curve(
            [
                (record.step, record.eval_loss)
                for record in facts.records
                if record.eval_loss is not None
            ]
        )
        # The loss over each evaluation set, by its name; records of older versions have no names.
        names = dict.fromkeys(name for record in facts.records for name in record.evals or ())
        curve_views["loss"]["sets"] = {
            name: _curve(
                [
                    (record.step, numbers.get("loss"))
                    for record in facts.records
                    if (numbers := (record.evals or {}).get(name)) is not None
                ]
            )
            for name in names
        }
    return curve_views


def _axis(facts: RunFacts, name: str, goal: float | None) -> View:
    """What the axis of a curve shows, and the band around its plan.

    The axis is at least so wide that a difference that does not matter looks like none. The first
    step of a start includes its build and compiles kernels: a rate of it may be beyond the axis.
    """
    points = [
        (record, value) for record in facts.records if (value := _value(record, name)) is not None
    ]
    firsts = {record.restart: record.step for record in reversed(facts.records)}
    usual = [value for record, value in points if record.step != firsts[record.restart]]
    values = usual if name in _RATES and usual else [value for _, value in points]
    if name == "loss":
        sets = [numbers for record in facts.records for numbers in (record.evals or {}).values()]
        evals = [record.eval_loss for record in facts.records] + [
            eval_set.get("loss") for eval_set in sets
        ]
        values += [loss for loss in evals if loss is not None]
    low, high = axis_range(values, goal, _LEAST_SPAN.get(name, 0.0))
    low = 0.0 if name == "lr" else low
    beyond = [record.step for record, value in points if not low <= value <= high]
    return {
        "range": [low, high],
        "band": None if goal is None else [(1 - _BAND) * goal, (1 + _BAND) * goal],
        "says": [*_axis_words(goal, beyond)],
    }


def _axis_words(goal: float | None, beyond: Sequence[int]) -> Iterator[str]:
    if goal is not None:
        yield f"The band is {_BAND:.0%} around the plan."
    if beyond:
        steps = ", ".join(map(str, beyond[:_MOST_BEYOND]))
        suffix = f" and {len(beyond) - _MOST_BEYOND} more" if len(beyond) > _MOST_BEYOND else ""
        which = f"step {steps}" if len(beyond) == 1 else f"steps {steps}{suffix}"
        yield f"Beyond the axis: {which}; the first step of a start includes its build."


def axis_range(values: Sequence[float], goal: float | None, least: float) -> tuple[float, float]:
    """The ends of an axis: all values and the plan, at least `least` of it to both sides.

    Without a plan the median is in its place. No end is below 0 if no value is.
    """
    known = [
        value for value in (*values, *([] if goal is None else [goal])) if math.isfinite(value)
    ]
    if not known:
        return 0.0, 1.0
    middle = median(known) if goal is None or not math.isfinite(goal) else goal
    low = min(*known, middle - least * abs(middle))
    high = max(*known, middle + least * abs(middle))
    margin = _ROOM * (high - low) or max(abs(high), 1e-9) * _ROOM
    return (low - margin if low < 0 else max(0.0, low - margin)), high + margin


def marks(facts: RunFacts) -> View:
    """The steps at which restarts began, and the steps whose update was skipped."""
    firsts: dict[int, int] = {}
    for record in sorted((*facts.records, *facts.lost), key=lambda entry: entry.step):
        firsts.setdefault(record.restart, record.step)
    return {
        "restarts": [
            {"step": step, "says": f"start {number + 1} began at step {step}"}
            for number, step in sorted(firsts.items())
            if number > 0
        ],
        "skipped": [
            {"step": entry.step, "says": f"step {entry.step} was skipped: {entry.skipped}"}
            for entry in facts.records
            if entry.skipped is not None
        ],
    }


def load(facts: RunFacts) -> View | None:
    """The load of the fullest expert over the mean, by layer and step.

    If a column stands for several steps, it has their maximum.
    """
    loads = [(record.step, record.load) for record in facts.records if record.load]
    if not loads:
        return None
    num_layers = len(loads[-1][1])
    loads = [(step, load_row) for step, load_row in loads if len(load_row) == num_layers]
    size = -(-len(loads) // _HEAT_MAP_COLUMNS)
    groups = [loads[i : i + size] for i in range(0, len(loads), size)]
    # The numbers of the layers with experts, or consecutive numbers without a plan.
    shape = None if facts.plan is None else facts.plan.shape
    known = [] if shape is None else [i for i in range(shape.layers) if shape.is_moe_layer(i)]
    return {
        "layers": known if len(known) == num_layers else list(range(num_layers)),
        "steps": [group[0][0] for group in groups],
        "steps_a_column": size,
        "rows": [
            [max(load_row[layer] for _, load_row in group) for group in groups]
            for layer in range(num_layers)
        ],
    }


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most 1,500 points: the newest, and the minimum and maximum of each bin of older ones."""
    if len(points) <= _NEWEST + 2 * _BINS:
        return list(points)
    old, result = points[:-_NEWEST], list[Point]()
    edges = [len(old) * i // _BINS for i in range(_BINS + 1)]
    for begin, end in itertools.pairwise(edges):
        known = [point for point in old[begin:end] if point[1] is not None]
        if not known:
            result.append(old[begin])
            continue
        result += sorted({min(known, key=_height), max(known, key=_height)})
    return [*result, *points[-_NEWEST:]]


def _height(point: Point) -> float:
    return point[1] or 0.0


def _points(records: Iterable[StepRecord], name: str) -> list[Point]:
    return [(record.step, _value(record, name)) for record in records]


def _value(record: StepRecord, name: str) -> float | None:
    """One number of a record, None if it is not finite."""
    number: float | None = record.elapsed if name == "step_s" else getattr(record, name)
    return number if number is not None and math.isfinite(number) else None


def _curve(points: Sequence[Point]) -> View:
    shown = thinned(points)
    return {
        "x": [step for step, _ in shown],
        "y": [None if value is None else float(f"{value:.6g}") for _, value in shown],
    }


def _lost(facts: RunFacts, name: str) -> list[View]:
    """The steps that restarts repeated, one curve for each start."""
    lost = sorted(facts.lost, key=lambda record: (record.restart, record.step))
    starts = itertools.groupby(lost, key=lambda record: record.restart)
    return [_curve(_points(records, name)) for _, records in starts]


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """An exponential mean over about a fiftieth of the steps."""
    known = [(step, value) for step, value in points if value is not None]
    decay = 1 - 2 / (max(2, len(known) / _SMOOTHING_WINDOWS) + 1)
    curve: list[Point] = []
    mean = known[0][1] if known else 0.0
    for step, value in known:
        mean = decay * mean + (1 - decay) * value
        curve.append((step, mean))
    return curve


def _compared(records: Sequence[StepRecord], name: str) -> View:
    """The planned number as a curve of its own, and the newest steps compared with it."""
    planned = [
        (record.step, None if record.planned is None else float(getattr(record.planned, name)))
        for record in records
    ]
    newest = [record for record in records[-_WINDOW:] if record.skipped is None]
    known = [value for record in newest if (value := _value(record, name)) is not None]
    middle = median(known) if known else None
    goal = planned[-1][1]
    comparison: View = {
        "planned": None,
        "median": middle,
        "goal": goal,
        "ratio": None,
        "says": None,
    }
    if goal is None or middle is None:
        return comparison
    write = _FORMATS[name]
    changes = [
        point
        for i, point in enumerate(planned)
        if i in (0, len(planned) - 1) or point[1] != planned[i - 1][1]
    ]
    return comparison | {
        "planned": _curve(changes),
        "ratio": middle / goal,
        "says": f"{write(middle)} (median of the newest {len(known)}), planned {write(goal)}: "
        f"{middle / goal:.2f} times the plan",
    }


# The same for a terminal.


def loss_text(view: View) -> list[str]:
    """The loss as a curve of dots, the evaluations, and the newest norm and learning rate."""
    curves = view["curves"]
    if "loss" not in curves:
        return ["loss", "no step is recorded yet"]
    lines = ["loss", *_dots(curves["loss"]["smoothed"], None, "{:.3f}".format)]
    evals = curves["loss"]["eval"]
    for name, eval_set in (curves["loss"]["sets"] or {"": evals}).items():
        points = [
            (x, y) for x, y in zip(eval_set["x"], eval_set["y"], strict=True) if y is not None
        ]
        if points:
            shown = ", ".join(f"{x}: {y:.4f}" for x, y in points[-6:])
            lines += wrapped(f"eval {name}: {shown}" if name else f"eval {shown}")
    last = {name: _newest(curves[name]["measured"]) for name in ("loss", "norm", "lr")}
    known = [f"{name} {value:.4g}" for name, value in last.items() if value is not None]
    return [*lines, f"newest: {', '.join(known)}"]


def rates_text(view: View) -> list[str]:
    """Tokens per second, step time and MFU, planned and measured."""
    return ["rates", *_curve_lines(view, _RATES)]


def memory_text(view: View) -> list[str]:
    """The memory of the fullest rank, planned and measured."""
    return ["memory", *_curve_lines(view, {"memory_gib": "the fullest rank"})]


def load_text(view: View) -> list[str]:
    """The heat map as digits: the load of the fullest expert over the mean."""
    table = view["load"]
    if table is None:
        return ["experts", "the model has no experts, or their load is not recorded"]
    size = -(-len(table["steps"]) // _TEXT_COLUMNS)
    many = size * table["steps_a_column"]
    columns = "a column a step" if many == 1 else f"a column has the most of {many} steps"
    lines = ["experts", f"slots of the fullest expert over the mean, rounded down; {columns}"]
    for layer, row in zip(table["layers"], table["rows"], strict=True):
        most = [max(row[i : i + size]) for i in range(0, len(row), size)]
        digits = "".join(str(min(9, int(value))) for value in most)
        lines.append(f"layer {layer:>3} {digits} newest {row[-1]:.2f}")
    return lines


def _curve_lines(view: View, titles: dict[str, str]) -> Iterator[str]:
    for name, title in titles.items():
        curve = view["curves"].get(name)
        if curve is None:
            yield f"{title}: not measured, for the plan names no machine"
            continue
        # The title of this rate has its unit.
        write = thousands if name == "tokens_per_s" else _FORMATS[name]
        yield f"{title}: " + (curve["says"] or f"{write(curve['median'])} (median), no plan")
        yield from _dots(curve["measured"], curve["axis"], write)


def _newest(curve: View) -> float | None:
    return next((value for value in reversed(curve["y"]) if value is not None), None)


def _dots(curve: View, axis: View | None, write: Callable[[float], str]) -> list[str]:
    """A curve of dots with labels at its edges; every column is the mean of equally many points.

    Without an axis the edges are the lowest and the highest dot; what is beyond one is at its edge.
    """
    points = [(x, y) for x, y in zip(curve["x"], curve["y"], strict=True) if y is not None]
    if not points:
        return []
    size = -(-len(points) // _TEXT_COLUMNS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    heights = [sum(y for _, y in group) / len(group) for group in groups]
    low, high = (min(heights), max(heights)) if axis is None else axis["range"]
    label_width = max(len(write(low)), len(write(high)))
    lines: list[str] = []
    for row in range(_TEXT_ROWS):
        label = {0: write(high), _TEXT_ROWS - 1: write(low)}.get(row, "")
        dots = "".join("•" if _level(y, low, high) == row else " " for y in heights)
        lines.append(f"{label:>{label_width}} │{dots}".rstrip())
    return [*lines, f"{'':>{label_width}} └ steps {points[0][0]} to {points[-1][0]}"]


def _level(value: float, low: float, high: float) -> int:
    """The row of a value, from the top."""
    share = min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0
    return _TEXT_ROWS - 1 - round(share * (_TEXT_ROWS - 1))
