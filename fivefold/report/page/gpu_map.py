"""The GPU map of the page: every rank on its node, and the groups that any rank belongs to.

`view(plan)` is a few numbers, whatever the size of the job: `static/gpu_map.js` draws all ranks and
lights up the groups of the one that is pointed at, and `text(view, rank)` prints them.

    {"headline": one sentence, "world": ranks, "node": GPUs of a node,
     "tiers": [{"name", "size": ranks of a domain or None for all, "link"}, …] from the innermost,
     "domain": {"name", "size"} of the fastest links, where whole nodes share them, or None,
     "digits": [[size, stride], …] of a rank's place in the line (see core/lineup.py),
     "axes": [{"axis", "size", "stride" in the line, "tier": the slowest of its groups or None}, …],
     "run": consecutive ranks of one pipeline rank, which then gives way to the next,
     "stages": what each pipeline rank holds, in words}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from fivefold.core.errors import FivefoldError
from fivefold.core.layout import Extent, Layout
from fivefold.core.lineup import Lineup, lineup
from fivefold.core.machine import Machine
from fivefold.core.plan import Plan
from fivefold.core.words import counted, span
from fivefold.report.lines import WIDTH

View = dict[str, Any]
MARKS = {"tp": "t", "cp": "c", "dp": "d", "pp": "p", "ep": "e"}
_MOST_NODES = 64
_MOST_NAMED = 4


def view(plan: Plan) -> View:
    """The map of a plan that names a machine."""
    machine, layout = plan.machine, plan.layout
    if machine is None:
        raise FivefoldError("a map needs nodes and links: name a machine, such as h100")
    return {
        "headline": _headline(layout, machine),
        "world": layout.world,
        "node": machine.gpus_per_node,
        "tiers": [
            {"name": tier.name, "size": tier.size, "link": tier.link.name} for tier in machine.tiers
        ],
        "domain": _domain(machine),
        "digits": [[*digit] for digit in lineup(layout).digits],
        "axes": [_axis(layout, machine, axis) for axis in _axes(layout)],
        "run": layout.stage_size if layout.order == "tp-cp-dp-pp" else layout.tp * layout.cp,
        "stages": [_held(plan, place) for place in range(layout.pp)],
    }


def _headline(layout: Layout, machine: Machine) -> str:
    num_nodes = -(-layout.world // machine.gpus_per_node)
    nodes = f"{num_nodes:,} node{'s' if num_nodes > 1 else ''} of {machine.gpus_per_node}"
    return f"{layout.world:,} GPUs ({machine.chip}) on {nodes}: {layout}"


def _domain(machine: Machine) -> View | None:
    inner = machine.tiers[0]
    if inner.size is None or inner.size % machine.gpus_per_node:
        return None
    return {"name": inner.name, "size": inner.size}


def _axes(layout: Layout) -> Iterator[str]:
    """The five, and where experts or shards make groups of their own, those as well."""
    yield from MARKS
    if layout.etp > 1:
        yield "etp"
    if layout.ep > 1 and layout.edp > 1:
        yield "edp"
    if layout.extent("fsdp") != layout.extent("dp") and layout.extent("fsdp").size > 1:
        yield "fsdp"


def _axis(layout: Layout, machine: Machine, axis: str) -> View:
    size, stride = layout.extent(axis)
    tier = layout.tier(axis, machine).name if size > 1 else None
    return {"axis": axis, "size": size, "stride": stride, "tier": tier}


def _held(plan: Plan, place: int) -> str:
    """The stages of a pipeline rank and their layers: "stages 1 and 3: layers 4–7 and 12–15"."""
    numbers = plan.schedule.placement.held(place)
    spans = [plan.stages[number] for number in numbers]
    layers = [*map(span, spans)]
    word = "stage" if len(numbers) == 1 else "stages"
    noun = "layer" if sum(map(len, spans)) == 1 else "layers"
    return f"{word} {_and(map(str, numbers))}: {noun} {_and(layers)}"


def _and(words: Iterator[str] | list[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def text(view: View, rank: int = 0) -> list[str]:
    """The groups of one rank with their links, and where few nodes are, all ranks marked."""
    if not 0 <= rank < view["world"]:
        raise FivefoldError(f"rank {rank} is not on the map: use 0 to {view['world'] - 1}")
    line = Lineup(tuple(Extent(*digit) for digit in view["digits"]))
    groups = {
        axis["axis"]: line.group(Extent(axis["size"], axis["stride"]), rank)
        for axis in view["axes"]
    }
    place = groups["pp"].index(rank)
    return [
        view["headline"],
        f"rank {rank} on node {rank // view['node']}, {view['stages'][place]}",
        *(_group(view, axis, groups[axis["axis"]], rank) for axis in view["axes"]),
        *_drawn(view, groups, rank),
    ]


def _group(view: View, axis: View, group: Sequence[int], rank: int) -> str:
    words = f"{axis['axis']:<4} {counted(len(group), 'rank'):<12}"
    if len(group) == 1:
        return f"{words} alone"
    own = _tier_of(view, group)
    others = f" (others over {axis['tier']})" if axis["tier"] != own else ""
    return f"{words} coord {group.index(rank):<5} {own}{others}: {listed(group)}"


def _tier_of(view: View, group: Sequence[int]) -> str:
    """The innermost tier with one domain that holds the whole group."""
    low, high = min(group), max(group)
    sizes = ((tier["name"], tier["size"]) for tier in view["tiers"])
    return next(name for name, size in sizes if size is None or low // size == high // size)


def listed(group: Sequence[int]) -> str:
    """Ranks in few words: all of few, a span of neighbours, else the first and the last.

    >>> listed([0, 1, 2, 3, 4, 5]), listed([3, 11]), listed([0, 8, 16, 24, 32])
    ('0–5', '3, 11', '0, 8, 16 … 32')
    """
    if len(group) > 2 and all(other - one == 1 for one, other in pairwise(group)):
        return f"{group[0]}–{group[-1]}"
    if len(group) <= _MOST_NAMED:
        return ", ".join(map(str, group))
    return f"{', '.join(map(str, group[:3]))} … {group[-1]}"


def _drawn(view: View, groups: dict[str, tuple[int, ...]], rank: int) -> Iterator[str]:
    """A letter for every GPU: that of the first axis on which it meets the rank."""
    node, num_nodes = view["node"], -(-view["world"] // view["node"])
    if num_nodes > _MOST_NODES:
        yield f"{num_nodes:,} nodes: no map above {_MOST_NODES} nodes"
        return
    letters = ["·"] * view["world"]
    for axis, letter in reversed(MARKS.items()):
        for other in groups[axis]:
            letters[other] = letter
    letters[rank] = "@"
    words = " · ".join(
        f"{letter} {axis}" for axis, letter in MARKS.items() if len(groups[axis]) > 1
    )
    yield f"@ rank {rank}" + (f" · {words}" if words else "") + "; by node:"
    gutter = len(f"node {num_nodes - 1} ")
    across = max(1, (WIDTH - gutter) // (node + 1))
    for first in range(0, num_nodes, across):
        nodes = range(first, min(num_nodes, first + across))
        boxes = ("".join(letters[one * node : (one + 1) * node]) for one in nodes)
        yield f"node {first}".ljust(gutter) + " ".join(boxes)
