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

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from fivefold.core import groups
from fivefold.core.errors import FivefoldError, counted, kind_text, span
from fivefold.core.groups import RankOrder, rank_order
from fivefold.core.layout import Extent, Layout
from fivefold.core.machine import Machine
from fivefold.core.plan import Plan
from fivefold.cost.axis_collectives import wide_size
from fivefold.cost.collectives import ITEMSIZE, TrafficEntry, predict
from fivefold.page import View
from fivefold.planner.estimate import Estimate, held_by_places
from fivefold.report import WIDTH, bar, duration, gib, table, wrapped

MARKS = {"tp": "t", "cp": "c", "dp": "d", "pp": "p", "ep": "e"}
_MOST_NODES = 64
_MOST_NAMED = 4


def map_view(plan: Plan) -> View:
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
        "digits": [[*digit] for digit in rank_order(layout).digits],
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


def map_text(view: View, rank: int = 0) -> list[str]:
    """The groups of one rank with their links, and where few nodes are, all ranks marked."""
    if not 0 <= rank < map_view["world"]:
        raise FivefoldError(f"rank {rank} is not on the map: use 0 to {map_view['world'] - 1}")
    line = RankOrder(tuple(Extent(*digit) for digit in map_view["digits"]))
    groups = {
        axis["axis"]: line.group(Extent(axis["size"], axis["stride"]), rank)
        for axis in map_view["axes"]
    }
    place = groups["pp"].index(rank)
    return [
        map_view["headline"],
        f"rank {rank} on node {rank // map_view['node']}, {map_view['stages'][place]}",
        *(_group(map_view, axis, groups[axis["axis"]], rank) for axis in map_view["axes"]),
        *_drawn(map_view, groups, rank),
    ]


def _group(view: View, axis: View, group: Sequence[int], rank: int) -> str:
    words = f"{axis['axis']:<4} {counted(len(group), 'rank'):<12}"
    if len(group) == 1:
        return f"{words} alone"
    own = _tier_of(map_view, group)
    others = f" (others over {axis['tier']})" if axis["tier"] != own else ""
    return f"{words} coord {group.index(rank):<5} {own}{others}: {listed(group)}"


def _tier_of(view: View, group: Sequence[int]) -> str:
    """The innermost tier with one domain that holds the whole group."""
    low, high = min(group), max(group)
    sizes = ((tier["name"], tier["size"]) for tier in map_view["tiers"])
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
    node, num_nodes = map_view["node"], -(-map_view["world"] // map_view["node"])
    if num_nodes > _MOST_NODES:
        yield f"{num_nodes:,} nodes: no map above {_MOST_NODES} nodes"
        return
    letters = ["·"] * map_view["world"]
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


# Memory by category: of the fullest rank against the GPU's limit, and of every pipeline place.
#
#     {"headline", "limit", "usable", "total", "verdict", "fullest": {category: bytes},
#      "places": [{"name", "layers", "total"}], "parts": {category: bytes of each place}}
#
# Categories that nobody has are left out.


_MOST_LINES = 16  # of places, in a terminal
_LABELS = {"context": "driver"}  # a word that means another thing beside the sliders


def memory_view(found: Estimate) -> View:
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


def memory_text(found: View) -> list[str]:
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


# What a step is spent on, by the busiest rank.
#
# {"headline", "step", "parts": {name: seconds}, "words": {name: what it is}}


_WORDS = {
    "compute": "matrix products, attention and what lies between them",
    "launch": "the host starts kernels more slowly than the GPU ends them",
    "bubble": "the rank waits for others of its pipeline",
    "tp": "tensor collectives that no compute hides",
    "cp": "keys and values of other context ranks, as far as attention does not hide them",
    "ep": "tokens on their way to experts and back",
    "pp": "messages between stages while the pipeline fills and drains",
    "dp": "gradients and weights among data ranks that no compute hides",
    "optimizer": "the update of the weights",
    "offload": "the way to host memory and back",
    "fixed": "what every step costs, whatever its size",
}


def timing_view(found: Estimate) -> View:
    """The step by what it is spent on; what is nothing is left out."""
    parts = found.breakdown()
    return {
        "headline": f"{duration(found.step)} a step, of which compute is "
        f"{parts.get('compute', 0.0) / found.step:.1%}",
        "step": found.step,
        "parts": parts,
        "words": {name: _WORDS[name] for name in parts},
    }


def timing_text(found: View) -> list[str]:
    """The same for a terminal."""
    lines = [f"step      {found['headline']}"]
    for name, seconds in found["parts"].items():
        lines.append(bar(name, duration(seconds), seconds / found["step"]))
    return lines


# What rank 0 sends in a step: every collective that the runtime will issue, summed up.
#
#     {"headline", "refused": why there is none, or None,
#      "rows": [{"dimension", "axis", "kind", "calls", "bytes", "sent", "group", "tier"}]}
#
# `bytes` are those of the calls' input buffers, as records of a run have them; `sent` is what
# goes over the rank's links where rings carry it. The tier is the slowest link that any group of
# the axis crosses.


_ORDER = ("tp", "cp", "ep", "dp", "pp", "all")


def traffic_view(plan: Plan) -> View:
    """The traffic of rank 0 by axis and kind; an asynchronous schedule is told why it has none."""
    assert plan.machine is not None, "a state always names a machine"
    itemsize = ITEMSIZE[plan.precision]
    try:
        found = predict(plan, 0, itemsize=itemsize, grad_itemsize=wide_size(itemsize))
    except FivefoldError as error:
        return {"headline": "not predicted", "refused": str(error), "rows": []}
    summed: defaultdict[tuple[str, str, int], list[TrafficEntry]] = defaultdict(list)
    for entry in found:
        summed[entry.axis, entry.kind, entry.group].append(entry)
    rows = [_row(plan, plan.machine, entries) for entries in summed.values()]
    rows.sort(key=lambda row: (_ORDER.index(row["dimension"]), -row["sent"]))
    sent = sum(row["sent"] for row in rows)
    calls = sum(row["calls"] for row in rows)
    return {
        "headline": f"rank 0 sends {gib(sent)} in {calls:,} calls of a step",
        "refused": None,
        "rows": rows,
    }


def _row(plan: Plan, machine: Machine, entries: list[TrafficEntry]) -> View:
    """Equal calls but for their sizes."""
    axis = entries[0].axis
    return {
        "dimension": groups.DIMENSIONS.get(axis, "all"),
        "axis": axis,
        "kind": kind_text(entries[0].kind),
        "calls": sum(one.count for one in entries),
        "bytes": sum(one.count * one.bytes for one in entries),
        "sent": round(sum(one.sent for one in entries)),
        "group": entries[0].group,
        "tier": groups.tier(plan, axis, machine).name,
    }


def traffic_text(found: View) -> list[str]:
    """The same for a terminal."""
    if found["refused"]:
        return wrapped(found["refused"], "traffic   ")
    rows: list[tuple[str, ...]] = [
        ("axis", "kind", "ranks", "calls", "GiB given", "GiB sent", "over")
    ]
    for one in found["rows"]:
        sizes = (f"{one[name] / 2**30:,.3f}" for name in ("bytes", "sent"))
        numbers = (f"{one['group']:,}", f"{one['calls']:,}", *sizes)
        rows.append((one["axis"], one["kind"], *numbers, one["tier"]))
    lines = table(rows, left=(0, 1, 6))
    return [f"traffic   {found['headline']}", *(f"          {line}" for line in lines)]
