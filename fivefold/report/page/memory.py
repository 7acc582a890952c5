"""Memory by category: of the fullest rank against the GPU's limit, and of every pipeline place.

    {"headline", "limit", "usable", "total", "verdict", "fullest": {category: bytes},
     "places": [{"name", "layers", "total"}], "parts": {category: bytes of each place}}

Categories that nobody has are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivefold.core.estimate.outlook import Outlook, held_by_places
from fivefold.core.plan import Plan
from fivefold.core.words import counted, span
from fivefold.report.amounts import gib
from fivefold.report.lines import bar

View = dict[str, Any]
_MOST_LINES = 16  # of places, in a terminal
_LABELS = {"context": "driver"}  # a word that means another thing beside the sliders


def view(found: Outlook) -> View:
    """Bytes of one rank at each place of the pipeline, and of the fullest of all."""
    plan, limit = found.plan, found.setting.machine.memory
    places = held_by_places(plan, found.setting)
    names = [name for name in places[0] if any(one[name] > 0 for one in places)]
    return {
        "headline": f"{gib(found.total)} of {gib(limit)} on the fullest rank: {found.verdict}",
        "limit": limit,
        "usable": found.setting.capacity,
        "total": found.total,
        "verdict": found.verdict,
        "fullest": {_label(name): round(size) for name, size in found.memory.items() if size > 0},
        "places": [
            {
                "name": f"pp {place}",
                "layers": _layers(plan, place),
                "total": round(sum(one.values())),
            }
            for place, one in enumerate(places)
        ],
        "parts": {_label(name): [round(one[name]) for one in places] for name in names},
    }


def _label(category: str) -> str:
    return _LABELS.get(category, category)


def _layers(plan: Plan, place: int) -> str:
    """`layers 0–7, 64–71`: those of each chunk, neighbours joined."""
    spans: list[range] = []
    for number in sorted(plan.schedule.placement.held(place)):
        layers = plan.stages[number]
        if spans and spans[-1].stop == layers.start:
            spans[-1] = range(spans[-1].start, layers.stop)
        else:
            spans.append(layers)
    noun = "layer" if sum(map(len, spans)) == 1 else "layers"
    return f"{noun} {', '.join(map(span, spans))}"


def text(found: View) -> list[str]:
    """The same for a terminal."""
    limit = found["limit"]
    lines = [f"memory    {found['headline']}"]
    lines += [bar(name, gib(size), size / limit) for name, size in found["fullest"].items()]
    if found["total"] < limit:
        free = limit - found["total"]
        lines.append(bar("free", gib(free), free / limit, "·"))
    if len(found["places"]) > 1:
        lines += ["", f"          {counted(len(found['places']), 'place')} of the pipeline:"]
        lines += _places(found["places"], limit)
    return lines


def _places(places: Sequence[View], limit: float) -> list[str]:
    """Both ends of a long pipeline, and how many lie between them."""
    rows = [bar(one["name"], gib(one["total"]), one["total"] / limit) for one in places]
    if len(rows) <= _MOST_LINES:
        return rows
    half = _MOST_LINES // 2
    between = f"          … {len(rows) - 2 * half} more"
    return [*rows[:half], between, *rows[-half:]]
