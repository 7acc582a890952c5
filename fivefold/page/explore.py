"""Five sliders, one for each axis, and the other inputs: what can be chosen, and why not the rest.

Every value of every input is judged by the rules that resolve a plan. A value is
`{"value", "legal", "why", "set"}`: `set` are the keys of the state that choosing it changes, for
degrees hang together. tp, cp and pp take from dp and give to it; dp takes from pp, else from cp,
else from tp. The browser needs to know none of this.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

from fivefold.core import count, machine, models
from fivefold.core.errors import FivefoldError, IllegalLayout
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.core.rules import divisors
from fivefold.core.shape import Shape
from fivefold.cost.grid import RECOMPUTE
from fivefold.page import View, explore_panels, explore_search, timeline
from fivefold.page.explore_state import CONTEXTS, SCHEDULES, State, degrees_of
from fivefold.planner import PRECISIONS
from fivefold.planner.estimate import Estimate
from fivefold.report import duration, gib, wrapped
from fivefold.report.plan_values import readings

AXES = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
_PAYERS = ("pp", "cp", "tp")
_MOST_CHUNKS = 16  # offered; more can be said in the address
_MOST_ROWS = 64


def sliders_view(state: State) -> View:
    """What the five sliders can be set to."""
    shape = state.shape()
    found: View = {}
    for axis, label in AXES.items():
        values = [_value(state, value, moves) for value, moves in _moves(state, shape, axis)]
        here = getattr(state, axis)
        found[axis] = {"label": label, "value": here, "values": values}
    return found


def choices(state: State) -> View:
    """What the other inputs can be set to; numbers that are free have none."""
    found = {
        "model": [_free(name, model=name, config="") for name in models.presets()],
        "machine": [_free(name, machine=name) for name in machine.presets()],
        "schedule": _options(state, "schedule", _schedules(state)),
    }
    shape, share = state.shape(), max(1, state.batch // state.dp)
    rows = [size for size in divisors(share) if size <= _MOST_ROWS]
    values: dict[str, Iterable[Any]] = {
        "zero": range(4),
        "chunks": range(1, 1 + min(_MOST_CHUNKS, max(1, shape.layers // state.pp))),
        "context": CONTEXTS,
        "recompute": RECOMPUTE,
        "precision": PRECISIONS,
        "microbatch_size": rows,
        "replicate": divisors(state.dp),
        "etp": [1] if shape.moe is None else divisors(math.gcd(shape.moe.ffn, state.gpus)),
    }
    for key, each in values.items():
        found[key] = _options(state, key, [replace(state, **{key: value}) for value in each])
    return found


def _free(value: str, **changes: str) -> View:
    """A value that no rule is asked about."""
    return {"value": value, "legal": True, "why": "", "set": changes}


def _schedules(state: State) -> Iterator[State]:
    for name in SCHEDULES:
        other = replace(state, schedule=name)
        yield replace(other, chunks=other.family.chunks_on(state.pp, None))


def _options(state: State, key: str, others: Iterable[State]) -> list[View]:
    """Options of a select; the one that is chosen keeps all that it has."""
    here = getattr(state, key)
    found: list[View] = []
    for other in others:
        value = getattr(other, key)
        found.append(_value(state, value, [state if value == here else other]))
    if here not in [one["value"] for one in found]:
        found.append(_value(state, here, [state]))
    return found


def _moves(state: State, shape: Shape, axis: str) -> Iterator[tuple[int, list[State]]]:
    """Every value of a slider with the states that it may lead to, the preferred first."""
    if axis == "ep":
        for value in divisors(shape.moe.experts) if shape.moe else [1]:
            yield value, [replace(state, ep=value)]
        return
    for value in divisors(state.gpus):
        if value == getattr(state, axis):
            yield value, [state]
        elif axis == "dp":
            yield value, list(_paid(state, value))
        else:
            yield value, [settled(state, {axis: value})]


def _paid(state: State, dp: int) -> Iterator[State]:
    """Other axes that make room for so many data ranks."""
    for payer in _PAYERS:
        others = math.prod(getattr(state, axis) for axis in _PAYERS if axis != payer)
        degree, rest = divmod(state.gpus, dp * others)
        if degree and not rest:
            yield settled(state, {payer: degree})


def settled(state: State, degrees: dict[str, int]) -> State:
    """Other degrees, and what cannot stay as it was: chunks without a pipeline, uneven replicas."""
    other = replace(state, **degrees)
    if (state.pp == 1) != (other.pp == 1):
        other = replace(other, chunks=other.family.chunks_on(other.pp, None))
    return replace(other, replicate=math.gcd(other.replicate, other.dp))


def _value(state: State, value: int | str, moves: list[State]) -> View:
    """One value: the first legal move, or why there is none."""
    why = (
        f"dp={value} leaves {state.gpus // int(value)} GPUs to tp {state.tp} · cp {state.cp} · "
        f"pp {state.pp}, and none of the three alone can shrink to that: lower another first"
        if not moves
        else ""
    )
    for other in moves:
        found = other.problems()
        if not found:
            return {"value": value, "legal": True, "why": "", "set": changed(state, other)}
        why = why or found[0]
    return {"value": value, "legal": False, "why": why, "set": {}}


def changed(state: State, other: State) -> dict[str, str]:
    """The keys that differ, as texts of the other."""
    names = [each.name for each in fields(state)]
    moved = [name for name in names if getattr(other, name) != getattr(state, name)]
    return {name: str(getattr(other, name)) for name in moved}


def sliders_text(found: View) -> list[str]:
    """The sliders for a terminal: legal values, and why others are none."""
    lines: list[str] = []
    for axis, one in found.items():
        marked = [
            f"[{each['value']}]" if each["value"] == one["value"] else str(each["value"])
            for each in one["values"]
            if each["legal"] or each["value"] == one["value"]
        ]
        lines += wrapped(" ".join(marked), f"{axis:<4}{one['label']:<10}")
        for same, run in groupby(one["values"], key=_reason):
            if same:
                lines += wrapped(_refused(axis, list(run)), "    not       ")
    return lines


def _reason(one: View) -> str:
    """Why not, without the numbers that differ from value to value."""
    return "" if one["legal"] else re.sub(r"[0-9]+", "", one["why"])


def _refused(axis: str, run: list[View]) -> str:
    """Values that the same rule refuses, with the words for the first."""
    first, last = run[0]["value"], run[-1]["value"]
    return f"{axis}={first}{f' to {last}' if last != first else ''}: {run[0]['why']}"


# Explore: one job, everything about it.
#
#     {"state": canonical params, "choices": {key: options}, "sliders": {axis: slider},
#      "problem": None or {"reasons": […], "nearest": [{"label", "set"}]}, "config": pasted or None,
#      "numbers", "memory", "time", "map": a part for each picture,
#      "plan_toml": the plan as a file}
#
# Where the job is illegal there is a `problem`, and no part but the inputs. What is longest to
# make is asked for apart, so that a slider does not wait for it: `pictures`, "timeline",
# "traffic" and "curves".


CONFIG_FILE = "config.json"
_VERDICTS = {
    "fits": "further below the GPU's memory than estimates may be off",
    "tight": "nearer to the GPU's memory, above or below, than estimates may be off",
    "does not fit": "further above the GPU's memory than estimates may be off",
}
_SAVE = f"# The model is the pasted config: save it as {CONFIG_FILE} beside this file.\n"


def view(params: Mapping[str, str]) -> View:
    """Everything about the job of these params; a job that is none says why, and what is near."""
    state = State.parse(params)
    found: View = {
        "state": state.params(),
        "sliders": sliders_view(state),
        "choices": choices(state),
        "problem": None,
        "config": state.config or None,
    }
    try:
        return found | _parts(state)
    except IllegalLayout as error:
        near = _near(state, error)
        return found | {"problem": {"reasons": error.reasons, "nearest": near}}
    except FivefoldError as error:
        return found | {"problem": {"reasons": [str(error)], "nearest": []}}


def _parts(state: State) -> View:
    plan, found = state.plan(), state.outlook()
    return {
        "numbers": _numbers(state, found),
        "memory": explore_panels.memory_view(found),
        "time": explore_panels.timing_view(found),
        "map": explore_panels.map_view(plan),
        "plan_toml": _toml(state, plan),
    }


def pictures(params: Mapping[str, str]) -> View:
    """The pipeline of the job, its traffic, and its memory over the length of sequences."""
    state = State.parse(params)
    found = state.outlook()
    seconds = found.setting.stack.factor
    return {
        "timeline": timeline.view(found.timeline, seconds=seconds),
        "traffic": explore_panels.traffic_view(found.plan),
        "curves": explore_search.current(state),
    }


def _near(state: State, error: IllegalLayout) -> list[View]:
    """Legal jobs near an illegal one, each with what a state must change to be it.

    No layout mends a sequence that is longer than learned positions: it is cut first.
    """
    shape = state.shape()
    if shape.positions != "learned" or state.seq <= shape.max_seq:
        return [_nearest(state, state, label) for label in error.nearest]
    short = replace(state, seq=shape.max_seq)
    try:
        short.plan()
    except IllegalLayout as rest:
        return [_nearest(state, short, label) for label in rest.nearest]
    return [{"label": f"seq={short.seq}", "set": changed(state, short)}]


def _nearest(state: State, asked: State, label: str) -> View:
    layout = Layout.parse(label.partition("(")[0])
    other = settled(asked, {"gpus": layout.world, **degrees_of(layout)})
    words = label if asked.seq == state.seq else f"seq={asked.seq} {label}"
    return {"label": words, "set": changed(state, other)}


def _numbers(state: State, found: Estimate) -> View:
    plan, setting = found.plan, found.setting
    layout, parameters = plan.layout, count.parameters(plan.shape)
    speed = found.tokens_per_s_per_gpu
    return {
        "model": plan.shape.name,
        "parameters": parameters.total,
        "active": parameters.active,
        "layout": str(layout),
        "verdict": found.verdict,
        "verdict_says": _VERDICTS[found.verdict],
        "total": found.total,
        "limit": setting.machine.memory,
        "usable": setting.capacity,
        "step": found.step,
        "tokens_per_s": speed * layout.world,
        "tokens_per_s_per_gpu": speed,
        "mfu": found.mfu,
        "bubble": found.bubble,
        "tokens": state.tokens,
        "days": found.days(state.tokens),
        "gpu_hours": found.gpu_hours(state.tokens),
        "batch": str(plan.batch),
        "readings": readings(plan),
        "notes": list(plan.notes),
        "peak": f"of the {setting.precision} peak of {setting.machine.chip}; causal attention at "
        "half, recompute not counted",
    }


def _toml(state: State, plan: Plan) -> str:
    """The plan as a file; a pasted config lies beside it."""
    if not state.config:
        return plan.to_toml()
    beside = replace(plan, wishes=replace(plan.wishes, model=CONFIG_FILE))
    return _SAVE + beside.to_toml()


def _numbers_text(found: View) -> list[str]:
    one = found["numbers"]
    lines = [
        ("model", f"{one['model']}: {one['parameters'] / 1e9:,.2f} B parameters, "
                  f"{one['active'] / 1e9:,.2f} B active a token"),
        *(("layout", reading) for reading in one["readings"]),
        ("batch", one["batch"]),
        ("verdict", f"{one['verdict']}: {gib(one['total'])} of {gib(one['limit'])}, "
                    f"of which {gib(one['usable'])} may be used"),
        ("step", f"{duration(one['step'])}: {one['tokens_per_s']:,.0f} tokens/s, "
                 f"{one['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"),
        ("MFU", f"{one['mfu']:.1%} {one['peak']}"),
        ("bubble", f"{one['bubble']:.1%} of the step"),
        ("run", f"{one['tokens']:.4g} tokens: {one['days']:,.1f} days, "
                f"{one['gpu_hours']:,.0f} GPU-hours"),
        *(("note", note) for note in one["notes"]),
    ]  # fmt: skip
    return [row for head, words in lines for row in wrapped(words, f"{head:<10}")]


def _twin(part: str, text: Callable[[View], list[str]]) -> Callable[[View], list[str]]:
    """A text of one part of the answer."""
    return lambda found: text(found[part])


# By the names of `--panel`; each takes the whole answer.
TEXTS: dict[str, Callable[[View], list[str]]] = {
    "numbers": _numbers_text,
    "sliders": _twin("sliders", sliders_text),
    "memory": _twin("memory", explore_panels.memory_text),
    "time": _twin("time", explore_panels.timing_text),
    "traffic": _twin("traffic", explore_panels.traffic_text),
    "map": _twin("map", explore_panels.map_text),
    "timeline": _twin("timeline", timeline.text),
}
