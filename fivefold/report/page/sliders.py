"""Five sliders, one for each axis, and the other inputs: what can be chosen, and why not the rest.

Every value of every input is judged by the rules that resolve a plan. A value is
`{"value", "legal", "why", "set"}`: `set` are the keys of the state that choosing it changes, for
degrees hang together. tp, cp and pp take from dp and give to it; dp takes from pp, else from cp,
else from tp. The browser needs to know none of this.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

from fivefold.core import machine, models
from fivefold.core.estimate.grid import RECOMPUTE
from fivefold.core.estimate.planner import PRECISIONS
from fivefold.core.rules import divisors
from fivefold.core.shape import Shape
from fivefold.report.lines import wrapped
from fivefold.report.page.state import CONTEXTS, SCHEDULES, State

View = dict[str, Any]
AXES = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
_PAYERS = ("pp", "cp", "tp")
_MOST_CHUNKS = 16  # offered; more can be said in the address
_MOST_ROWS = 64


def view(state: State) -> View:
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


def text(found: View) -> list[str]:
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
