"""The panels of Explore that need one estimate: GPU map, numbers, memory, time and traffic.

For each panel a `view` makes the value that the page draws, and a `text` prints the same value in a
terminal. The timeline has a module of its own, and so have the panels that search.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from fivefold.core import PRECISIONS, FivefoldError, Machine, counted, kind_text, span
from fivefold.core.layout import Extent, Layout, RankOrder, groups, rank_order
from fivefold.core.model import shape
from fivefold.core.plan import Plan
from fivefold.cost.traffic import TrafficEntry, predict_traffic
from fivefold.planner import Estimate
from fivefold.render import WIDTH, bar, duration, gib, readings, table, wrapped
from fivefold_page import View
from fivefold_page.explore.state import State

# The GPU map: every rank on its node, and the groups of any rank; a few numbers for any job size.
#
#     {"headline": one sentence, "world": ranks, "node": GPUs of a node,
#      "tiers": [{"name", "size": ranks of a domain or None for all, "link"}, ...], innermost first,
#      "domain": {"name", "size"} of the fastest links if whole nodes share them, or None,
#           "digits": [[size, stride], ...] of a rank's position (see `RankOrder` of
#      core/layout/groups.py),      "axes": [{"axis", "size", "stride", "tier": the slowest of its
#      groups or None}, ...],      "run": consecutive ranks of one pipeline rank, after which the
#      next one follows,      "stages": the stages and layers of each pipeline rank, in words}

MARKS = {"tp": "t", "cp": "c", "dp": "d", "pp": "p", "ep": "e"}
_MOST_NODES = 64
_MOST_NAMED = 4


def map_view(plan: Plan) -> View:
    """The map of a plan, which must name a machine."""
    machine, layout = plan.machine, plan.layout
    if machine is None:
        raise FivefoldError("a map needs nodes and links: name a machine, such as h100")
    inner, num_nodes = machine.tiers[0], -(-layout.world // machine.gpus_per_node)
    nodes = f"{num_nodes:,} node{'s' if num_nodes > 1 else ''} of {machine.gpus_per_node}"
    spans_nodes = inner.size is not None and inner.size % machine.gpus_per_node == 0
    return {
        "headline": f"{counted(layout.world, 'GPU')} ({machine.chip}) on {nodes}: {layout}",
        "world": layout.world,
        "node": machine.gpus_per_node,
        "tiers": [
            {"name": tier.name, "size": tier.size, "link": tier.link.name} for tier in machine.tiers
        ],
        "domain": {"name": inner.name, "size": inner.size} if spans_nodes else None,
        "digits": [[*digit] for digit in rank_order(layout).digits],
        "axes": [
            {
                "axis": axis,
                **layout.extent(axis)._asdict(),
                "tier": layout.tier(axis, machine).name if layout.extent(axis).size > 1 else None,
            }
            for axis in _axes(layout)
        ],
        "run": layout.stage_size if layout.order == "tp-cp-dp-pp" else layout.tp * layout.cp,
        "stages": [_stages(plan, pp_rank) for pp_rank in range(layout.pp)],
    }


def _axes(layout: Layout) -> Iterator[str]:
    """The five axes, and etp, edp and fsdp if they have groups of their own."""
    yield from MARKS
    if layout.etp > 1:
        yield "etp"
    if layout.ep > 1 and layout.edp > 1:
        yield "edp"
    if layout.extent("fsdp") != layout.extent("dp") and layout.extent("fsdp").size > 1:
        yield "fsdp"


def _stages(plan: Plan, pp_rank: int) -> str:
    """The stages of a pipeline rank and their layers: "stages 1 and 3: layers 4–7 and 12–15"."""
    stages = plan.schedule.placement.stages_of(pp_rank)
    spans = [plan.stages[stage] for stage in stages]
    stage_noun, layer_noun = "stage" if len(stages) == 1 else "stages", _layer_noun(spans)
    return f"{stage_noun} {_and(map(str, stages))}: {layer_noun} {_and(map(span, spans))}"


def _and(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def map_text(view: View, rank: int = 0) -> list[str]:
    """The groups of one rank with their links, and on few nodes a map of all ranks."""
    if not 0 <= rank < view["world"]:
        raise FivefoldError(f"rank {rank} is not on the map: use 0 to {view['world'] - 1}")
    order = RankOrder(tuple(Extent(*digit) for digit in view["digits"]))
    groups_of_rank = {
        axis["axis"]: order.group(Extent(axis["size"], axis["stride"]), rank)
        for axis in view["axes"]
    }
    pp_rank = groups_of_rank["pp"].index(rank)
    return [
        view["headline"],
        f"rank {rank} on node {rank // view['node']}, {view['stages'][pp_rank]}",
        *(_group_text(view, axis, groups_of_rank[axis["axis"]], rank) for axis in view["axes"]),
        *_drawn_map(view, groups_of_rank, rank),
    ]


def _group_text(view: View, axis: View, group: Sequence[int], rank: int) -> str:
    heading = f"{axis['axis']:<4} {counted(len(group), 'rank'):<12}"
    if len(group) == 1:
        return f"{heading} alone"
    # The innermost tier with one domain that contains the whole group.
    low, high = min(group), max(group)
    sizes = ((tier["name"], tier["size"]) for tier in view["tiers"])
    own = next(name for name, size in sizes if size is None or low // size == high // size)
    suffix = f" (others over {axis['tier']})" if axis["tier"] != own else ""
    return f"{heading} coord {group.index(rank):<5} {own}{suffix}: {listed(group)}"


def listed(group: Sequence[int]) -> str:
    """Ranks in few words: a span of neighbours, all of a few, else the first ones and the last.

    >>> listed([0, 1, 2, 3, 4, 5]), listed([3, 11]), listed([0, 8, 16, 24, 32])
    ('0–5', '3, 11', '0, 8, 16 … 32')
    """
    if len(group) > 2 and all(other - member == 1 for member, other in pairwise(group)):
        return f"{group[0]}–{group[-1]}"
    if len(group) <= _MOST_NAMED:
        return ", ".join(map(str, group))
    return f"{', '.join(map(str, group[:3]))} … {group[-1]}"


def _drawn_map(view: View, groups: dict[str, tuple[int, ...]], rank: int) -> Iterator[str]:
    """A letter for every GPU: that of the first axis on which it shares a group with the rank."""
    node, num_nodes = view["node"], -(-view["world"] // view["node"])
    if num_nodes > _MOST_NODES:
        yield f"{num_nodes:,} nodes: no map above {_MOST_NODES} nodes"
        return
    letters = ["·"] * view["world"]
    for axis, letter in reversed(MARKS.items()):
        for other in groups[axis]:
            letters[other] = letter
    letters[rank] = "@"
    legend = " · ".join(
        f"{letter} {axis}" for axis, letter in MARKS.items() if len(groups[axis]) > 1
    )
    yield f"@ rank {rank}" + (f" · {legend}" if legend else "") + "; by node:"
    gutter = len(f"node {num_nodes - 1} ")
    across = max(1, (WIDTH - gutter) // (node + 1))
    for first in range(0, num_nodes, across):
        nodes = range(first, min(num_nodes, first + across))
        boxes = (
            "".join(letters[node_index * node : (node_index + 1) * node]) for node_index in nodes
        )
        yield f"node {first}".ljust(gutter) + " ".join(boxes)


# The numbers that decide.

_VERDICTS = {
    "fits": "within the usable share of the GPU's memory",
    "tight": "above the usable share, with NCCL's memory or without, within the GPU's memory",
    "does not fit": "more than the GPU's memory",
}


def numbers_view(state: State) -> View:
    """The numbers that decide, from the estimate of one step."""
    estimate = state.estimate()
    plan, setting = estimate.plan, estimate.setting
    layout, parameters = plan.layout, shape.parameters(plan.shape)
    speed = estimate.tokens_per_s_per_gpu
    return {
        "model": plan.shape.name,
        "parameters": parameters.total,
        "active": parameters.active,
        "layout": str(layout),
        "verdict": estimate.verdict,
        "verdict_says": f"{_VERDICTS[estimate.verdict]}: {estimate.verdict}",
        "total": estimate.total,
        "limit": setting.machine.memory,
        "usable": setting.capacity,
        "step": estimate.step,
        "tokens_per_s": speed * layout.world,
        "tokens_per_s_per_gpu": speed,
        "mfu": estimate.mfu,
        "bubble": estimate.bubble,
        "tokens": state.tokens,
        "days": estimate.days(state.tokens),
        "gpu_hours": estimate.gpu_hours(state.tokens),
        "batch": str(plan.batch),
        "readings": readings(plan),
        "notes": list(plan.notes),
        "peak": f"of the {setting.precision} peak of {setting.machine.chip}; causal attention at "
        "half, recompute not counted",
    }


def numbers_text(view: View) -> list[str]:
    """The same for a terminal."""
    lines = [
        ("model", f"{view['model']}: {view['parameters'] / 1e9:,.2f} B parameters, "
                  f"{view['active'] / 1e9:,.2f} B active a token"),
        *(("layout", reading) for reading in view["readings"]),
        ("batch", view["batch"]),
        ("verdict", f"{view['verdict']}: {gib(view['total'])} of {gib(view['limit'])}, "
                    f"of which {gib(view['usable'])} may be used"),
        ("step", f"{duration(view['step'])}: {view['tokens_per_s']:,.0f} tokens/s, "
                 f"{view['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"),
        ("MFU", f"{view['mfu']:.1%} {view['peak']}"),
        ("bubble", f"{view['bubble']:.1%} of the step"),
        ("run", f"{view['tokens']:.4g} tokens: {view['days']:,.1f} days, "
                f"{view['gpu_hours']:,.0f} GPU-hours"),
        *(("note", note) for note in view["notes"]),
    ]  # fmt: skip
    return [row for head, text in lines for row in wrapped(text, f"{head:<10}")]


# Memory by category: of the fullest rank against the GPU's limit, and of every pipeline rank.
#
#     {"headline", "limit", "usable", "total", "verdict", "fullest": {category: bytes},
#      "places": [{"name", "layers", "total"}, ...], "parts": {category: [bytes, ...]} by pipeline
#      rank}, without categories of 0 bytes

_MOST_LINES = 16  # pipeline ranks, in a terminal
_LABELS = {"context": "driver"}  # on this page, context means context parallelism


def memory_view(state: State) -> View:
    """Bytes of a rank of each pipeline stage, and of the fullest of all ranks."""
    estimate = state.estimate()
    plan, limit = estimate.plan, estimate.setting.machine.memory
    places = state.ranks().peaks()
    names = [name for name in places[0] if any(memory[name] > 0 for memory in places)]
    labels = {name: _LABELS.get(name, name) for name in estimate.memory}
    return {
        "headline": f"{gib(estimate.total)} of {gib(limit)} on the fullest rank: "
        + estimate.verdict,
        "limit": limit,
        "usable": estimate.setting.capacity,
        "total": estimate.total,
        "verdict": estimate.verdict,
        "fullest": {
            labels[name]: round(size) for name, size in estimate.memory.items() if size > 0
        },
        "places": [
            {
                "name": f"pp {pp_rank}",
                "layers": _layers(plan, pp_rank),
                "total": round(sum(memory.values())),
            }
            for pp_rank, memory in enumerate(places)
        ],
        "parts": {labels[name]: [round(memory[name]) for memory in places] for name in names},
    }


def _layers(plan: Plan, pp_rank: int) -> str:
    """The layers of each chunk, with neighbours joined: `layers 0–7, 64–71`."""
    spans: list[range] = []
    for stage in sorted(plan.schedule.placement.stages_of(pp_rank)):
        layers = plan.stages[stage]
        if spans and spans[-1].stop == layers.start:
            spans[-1] = range(spans[-1].start, layers.stop)
        else:
            spans.append(layers)
    return f"{_layer_noun(spans)} {', '.join(map(span, spans))}"


def _layer_noun(spans: Sequence[range]) -> str:
    return "layer" if sum(map(len, spans)) == 1 else "layers"


def memory_text(view: View) -> list[str]:
    """The same for a terminal."""
    limit = view["limit"]
    lines = [f"memory    {view['headline']}"]
    lines += [bar(name, gib(size), size / limit) for name, size in view["fullest"].items()]
    if view["total"] < limit:
        free = limit - view["total"]
        lines.append(bar("free", gib(free), free / limit, "·"))
    if len(view["places"]) > 1:
        lines += ["", f"          {counted(len(view['places']), 'stage')} of the pipeline:"]
        lines += _places(view["places"], limit)
    return lines


def _places(places: Sequence[View], limit: float) -> list[str]:
    """Both ends of a long pipeline, and how many ranks are between them."""
    rows = [bar(stage["name"], gib(stage["total"]), stage["total"] / limit) for stage in places]
    half, extra = _MOST_LINES // 2, len(rows) - _MOST_LINES
    return rows if extra <= 0 else [*rows[:half], f"          … {extra} more", *rows[-half:]]


# How the busiest rank spends a step.
#
#     {"headline", "step", "parts": {name: seconds}, "words": {name: what it is}}

_WORDS = {
    "compute": "matmuls, attention and what lies between them",
    "rounding": "inputs, gradients and weights to the few bits of matmuls",
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


def timing_view(estimate: Estimate) -> View:
    """The step by what it is spent on, without parts of 0 seconds."""
    parts = estimate.breakdown()
    return {
        "headline": f"{duration(estimate.step)} a step, of which compute is "
        f"{parts.get('compute', 0.0) / estimate.step:.1%}",
        "step": estimate.step,
        "parts": parts,
        "words": {name: _WORDS[name] for name in parts},
    }


def timing_text(view: View) -> list[str]:
    """The same for a terminal."""
    parts, step = view["parts"], view["step"]
    bars = [bar(name, duration(seconds), seconds / step) for name, seconds in parts.items()]
    return [f"step      {view['headline']}", *bars]


# What rank 0 sends in a step: every collective that the runtime will issue, by axis and kind.
#
#     {"headline", "refused": why nothing is predicted, or None,
#      "rows": [{"dimension", "axis", "kind", "calls", "bytes", "sent", "group", "tier"}]}
# `bytes` are those of the input buffers, as in the records of a run; `sent` are those that leave
# the rank with ring algorithms. The tier is the slowest link that any group of the axis crosses.

_ORDER = ("tp", "cp", "ep", "dp", "pp", "all")
_HEADS: tuple[str, ...] = ("axis", "kind", "ranks", "calls", "GiB given", "GiB sent", "over")


def traffic_view(plan: Plan) -> View:
    """The traffic of rank 0 by axis and kind; for an asynchronous schedule, why there is none."""
    assert plan.machine is not None, "a state always names a machine"
    try:
        collectives = predict_traffic(plan, 0, itemsize=PRECISIONS[plan.precision].itemsize)
    except FivefoldError as error:
        return {"headline": "not predicted", "refused": str(error), "rows": []}
    summed: defaultdict[tuple[str, str, int], list[TrafficEntry]] = defaultdict(list)
    for entry in collectives:
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
    """One row: collectives of the same axis, kind and group size."""
    axis = entries[0].axis
    return {
        "dimension": groups.DIMENSIONS.get(axis, "all"),
        "axis": axis,
        "kind": kind_text(entries[0].kind),
        "calls": sum(entry.count for entry in entries),
        "bytes": sum(entry.count * entry.bytes for entry in entries),
        "sent": round(sum(entry.sent for entry in entries)),
        "group": entries[0].group,
        "tier": groups.tier(plan, axis, machine).name,
    }


def traffic_text(view: View) -> list[str]:
    """The same for a terminal."""
    if view["refused"]:
        return wrapped(view["refused"], "traffic   ")
    rows = [_HEADS]
    for row in view["rows"]:
        sizes = (f"{row[name] / 2**30:,.3f}" for name in ("bytes", "sent"))
        numbers = (f"{row['group']:,}", f"{row['calls']:,}", *sizes)
        rows.append((row["axis"], row["kind"], *numbers, row["tier"]))
    lines = table(rows, left=(0, 1, 6))
    return [f"traffic   {view['headline']}", *(f"          {line}" for line in lines)]
