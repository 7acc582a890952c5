"""Learn: one MoE layer with all five dimensions, forward and backward.

    view(params) -> {"choices", "layout", "legend", "stations", "frames", "sentences"}

A station has its weights, the local tensor after it, and its collectives in forward and backward; a
frame points at one station in one direction. Bytes, groups and counts are exactly the collectives
that the plan has for this layer; tiers are those of the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fivefold.core import kind_text
from fivefold.core.layout import CONTEXT_KINDS
from fivefold.core.model import Moe
from fivefold.core.model import presets as models
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.cost.traffic import COUNT, max_nodes_per_token
from fivefold.render import wrapped
from fivefold_page import Params, View
from fivefold_page.learn.layer_attention import attention, enter, leave, own_tokens, row_tokens
from fivefold_page.learn.layer_parts import Layer, LayerCollective, LocalTensor, Station, over
from fivefold_page.learn.lesson import (
    GROUPS,
    Choice,
    chosen,
    rank_sentences,
    sentence_lines,
    size_text,
)

# The stations of a layer from the second norm to its end: router, experts, shared experts.
#
# Legend: N tokens of a microbatch on one rank, d width, E experts, K experts per token, f width of
# an expert. A slot is one token on one of its experts.


class _Sizes(NamedTuple):
    """Average bytes of the all-to-alls of one rank and microbatch."""

    slots: int  # rows of all slots
    shares: int  # routing weights of all slots
    crossing: int  # rows that cross to other nodes, at most
    weights: int  # routing weights of those rows
    choices: int  # expert choices of those rows


def experts(layer: Layer, moe: Moe) -> Iterator[Station]:
    """From the norm to the sum of the residual and the outputs of the experts."""
    own, layout = own_tokens(layer, "x"), layer.plan.layout
    tokens = own.sizes[0] * own.sizes[1]
    yield Station(
        "norm 2",
        "norm",
        "The second norm, on this rank's own tokens again.",
        "The residual's gradient and the norm's are added.",
        own,
        weights=layer.weights("mlp_norm.weight"),
    )
    yield Station(
        "router",
        "router",
        f"Every rank has the whole router: each of its tokens is scored for all {moe.experts} "
        f"experts and keeps its best {moe.top_k}.",
        "The router's gradient comes by the weights of the choices; the choices have none.",
        LocalTensor("choices", ("N", "K"), (tokens, moe.top_k), itemsize=COUNT),
        weights=layer.weights("router.weight"),
    )
    if layout.etp > 1:
        yield _enter_width(layer, moe, tokens)
    sizes = _sizes(layer, moe, tokens)
    yield _dispatch(layer, moe, sizes, tokens)
    if moe.shared:
        yield from _shared(layer)
    yield _expert_mlps(layer, moe, tokens)
    yield _combine(layer, sizes, tokens, moe)
    if layout.etp > 1:
        row = layer.plan.shape.width * layer.itemsize
        yield Station(
            "leave experts",
            "sum of experts",
            "The partial sums of the shards of every expert are added up.",
            "Nothing happens: every rank has the whole gradient.",
            own_tokens(layer, "results"),
            "etp",
            forward=layer.take("etp", "all_reduce", tokens * row, "results"),
            pair=("all-reduce", "identity"),
        )
    yield Station(
        "add",
        "weigh and add",
        f"The {moe.top_k} results of a token, each weighed, are added to it: the layer's output.",
        "The gradient of the output goes to the residual, and to every result by its weight.",
        own_tokens(layer, "y"),
    )


def _sizes(layer: Layer, moe: Moe, tokens: int) -> _Sizes:
    row = layer.plan.shape.width * layer.itemsize
    crossing = tokens * max_nodes_per_token(moe, layer.plan.ep_nodes)
    return _Sizes(
        slots=tokens * moe.top_k * row,
        shares=tokens * moe.top_k * layer.wide,
        crossing=crossing * row,
        weights=crossing * moe.top_k * layer.wide,
        choices=crossing * moe.top_k * COUNT,
    )


def _slots(layer: Layer, moe: Moe, tokens: int, name: str) -> LocalTensor:
    """The rows at a rank's experts: on average, as many arrive as were sent."""
    return LocalTensor(name, ("N·K", "d"), (tokens * moe.top_k, layer.plan.shape.width))


def _enter_width(layer: Layer, moe: Moe, tokens: int) -> Station:
    """Without sequence parallelism the ranks of an expert have the same tokens."""
    row = layer.plan.shape.width * layer.itemsize
    backward = layer.take("etp", "all_reduce", tokens * row, "gradients of the tokens")
    weights = tokens * moe.top_k * layer.wide
    backward += layer.take("etp", "all_reduce", weights, "gradients of the weights")
    return Station(
        "enter experts",
        "copy to experts",
        f"The {layer.plan.layout.etp} ranks of an expert have the same tokens: nothing happens.",
        "The gradients of tokens and of their weights are summed over the shards of the experts.",
        own_tokens(layer, "x"),
        "etp",
        backward=backward,
        pair=("identity", "all-reduce"),
    )


def _dispatch(layer: Layer, moe: Moe, sizes: _Sizes, tokens: int) -> Station:
    plan, nodes = layer.plan, layer.plan.ep_nodes
    axis, kind = "ep" if nodes == 1 else "ep-near", "all_to_all"
    forward, backward = _crossing(layer, sizes), _crossing_back(layer, sizes)
    forward += layer.take(axis, kind, moe.experts // nodes * COUNT, "counts: slots of each expert")
    forward += layer.take(axis, kind, sizes.slots, "tokens, once for each slot")
    backward += layer.take(axis, kind, sizes.slots, "gradients of the tokens")
    if not moe.weigh_inputs:
        forward += layer.take(axis, kind, sizes.shares, "weights of the slots")
        backward += layer.take(axis, kind, sizes.shares, "gradients of the slots' weights")
    says = (
        "ep = 1: all experts are on this rank, and no token leaves it."
        if plan.layout.ep == 1
        else f"Every token is sent to its {moe.top_k} experts, on {plan.layout.ep} ep ranks: "
        "first how many come, then the tokens and their weights. How many each expert gets depends "
        "on the routing."
    )
    return Station(
        "dispatch",
        "dispatch",
        says,
        "The gradients of the slots come home, and are added to their tokens."
        if plan.layout.ep > 1
        else "ep = 1: nothing moves.",
        _slots(layer, moe, tokens, "slots"),
        "ep",
        forward=forward,
        backward=backward,
        pair=("all-to-all", "all-to-all") if plan.layout.ep > 1 else None,
    )


def _crossing(layer: Layer, sizes: _Sizes) -> tuple[LayerCollective, ...]:
    """Between nodes a token travels once, with its choices and their weights."""
    nodes, axis, kind = layer.plan.ep_nodes, "ep-far", "all_to_all"
    if nodes == 1 or layer.plan.shape.moe is None:
        return ()
    counts = (layer.plan.shape.moe.experts + nodes) * COUNT
    return (
        *layer.take(axis, kind, counts, "counts: rows for each node, slots for its experts"),
        *layer.take(axis, kind, sizes.crossing, "tokens, once for each node, at most"),
        *layer.take(axis, kind, sizes.choices, "choices"),
        *layer.take(axis, kind, sizes.weights, "weights of the choices"),
    )


def _crossing_back(layer: Layer, sizes: _Sizes) -> tuple[LayerCollective, ...]:
    axis, kind = "ep-far", "all_to_all"
    if layer.plan.ep_nodes == 1:
        return ()
    rows = layer.take(axis, kind, sizes.crossing, "gradients between nodes, at most")
    return rows + layer.take(axis, kind, sizes.weights, "gradients of the weights")


def _combine(layer: Layer, sizes: _Sizes, tokens: int, moe: Moe) -> Station:
    nodes = layer.plan.ep_nodes
    axis = "ep" if nodes == 1 else "ep-near"

    def take(what: str) -> tuple[LayerCollective, ...]:
        near = layer.take(axis, "all_to_all", sizes.slots, f"{what}, once for each slot")
        if nodes == 1:
            return near
        return near + layer.take("ep-far", "all_to_all", sizes.crossing, f"{what}, by node")

    alone = layer.plan.layout.ep == 1
    return Station(
        "combine",
        "combine",
        "ep = 1: the results are here already."
        if alone
        else "The results come home to the rank that has the token.",
        "ep = 1: nothing moves."
        if alone
        else "The gradients of the results travel to the experts: a dispatch in backward.",
        _slots(layer, moe, tokens, "results"),
        "ep",
        forward=take("results"),
        backward=take("gradients of the results"),
        pair=None if alone else ("all-to-all", "all-to-all"),
    )


def _expert_mlps(layer: Layer, moe: Moe, tokens: int) -> Station:
    layout = layer.plan.layout
    num_experts, width = moe.experts // layout.ep, moe.ffn // layout.etp
    cut = "whole" if layout.etp == 1 else f"1/{layout.etp} of the width of each"
    return Station(
        "experts",
        "experts: column, row",
        f"This rank has {num_experts} of {moe.experts} experts, {cut}: up by column, down by row, "
        "for all slots that came.",
        "Gradients of the experts' weights stay here: the tokens of the whole ep group have met "
        "in this rank, and only the copies of an expert have to be summed.",
        LocalTensor(
            "inside the experts",
            ("N·K", over("f", etp=layout.etp)),
            (tokens * moe.top_k, width),
            columns=1 / layout.etp,
        ),
        "ep",
        weights=layer.weights("experts.up.weight", "experts.down.weight"),
    )


def _shared(layer: Layer) -> Iterator[Station]:
    """Shared experts are an MLP sharded over tp; they overlap with the all-to-all."""
    plan = layer.plan
    assert plan.shape.moe is not None
    yield enter(layer, "enter 2", "the shared expert")
    yield Station(
        "shared",
        "shared experts",
        "Every token passes the shared experts, an MLP cut by tp, while its slots are under way.",
        "Their backward runs while the gradients of the slots travel.",
        LocalTensor(
            "inside the shared experts",
            ("b", over("s", cp=plan.layout.cp), over("f", tp=plan.layout.tp)),
            (
                plan.batch.microbatch_size,
                plan.local_seq,
                plan.shape.moe.shared_ffn // plan.layout.tp,
            ),
            row_tokens(layer, "").rows,
            1 / plan.layout.tp,
        ),
        "tp",
        weights=layer.weights("shared.up.weight", "shared.down.weight"),
    )
    yield leave(layer, "leave 2", "shared result")


TITLE = "One layer, five dimensions"
MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "tiny-moe")
DEGREES = ("1", "2", "4", "8")
CHOICES: Mapping[str, Choice] = {
    "model": Choice("Model", MODELS, "mixtral-8x7b"),
    "tp": Choice("Tensor (tp)", DEGREES, "2"),
    "cp": Choice("Context (cp)", DEGREES, "2"),
    "ep": Choice("Expert (ep)", DEGREES, "4"),
    "context": Choice("Kind of context", tuple(CONTEXT_KINDS), "zigzag"),
    "sp": Choice("Sequence parallelism", ("on", "off"), "on"),
    "machine": Choice("Machine", ("h100", "gb200", "a100", "laptop"), "h100"),
}
_SEQ = 4096
_PP = 2
_KINDS = {"send": "send and receive"}


def plan_of(choices: Mapping[str, str]) -> Plan:
    """The example: two stages, ZeRO-3, one sequence per microbatch, and the fewest data ranks that
    are legal, at least two."""
    tp, cp, ep = (int(choices[axis]) for axis in ("tp", "cp", "ep"))
    sp = choices["sp"] == "on"
    # Without sequence parallelism tp ranks have the same tokens, and shard every expert's width.
    etp = tp if ep > 1 and not sp else 1
    dp = next(dp for dp in (2, 4, 8) if dp * cp * tp % (ep * etp) == 0)
    return resolve(
        PlanOptions(
            choices["model"],
            f"dp={dp} tp={tp} pp={_PP} cp={cp} ep={ep} etp={etp}",
            machine=choices["machine"],
            zero=3,
            gather="microbatch",
            sp=sp,
            context=choices["context"],
            seq=min(_SEQ, models.load(choices["model"]).max_seq),
        )
    )


def layer_of(plan: Plan) -> int:
    """The first MoE layer after the layer that follows the embedding."""
    return next(i for i in range(1, plan.shape.layers) if plan.shape.is_moe_layer(i))


def view(params: Params) -> View:
    """The stations of the layer in order, and frames along them, forward and backward."""
    choices = chosen(CHOICES, params)
    plan = plan_of(choices)
    layer = Layer(plan, layer_of(plan))
    all_stations = stations(layer)
    return {
        "choices": choices,
        "layout": str(plan.layout),
        "world": plan.layout.world,
        "machine": choices["machine"],
        "layer": layer.number,
        "legend": _legend(plan),
        "stations": [_drawn(station, layer.itemsize) for station in all_stations],
        "frames": list(_frames(plan, all_stations)),
        "sentences": _sentences(layer, all_stations),
    }


def stations(layer: Layer) -> tuple[Station, ...]:
    """All stations; together they have every collective of the layer."""
    moe = layer.plan.shape.moe
    assert moe is not None, "the panel shows a layer with experts"
    layer_stations = (
        _fetch(layer),
        *attention(layer),
        *experts(layer, moe),
        Station(
            "discard",
            "ZeRO-3: discard weights",
            "The whole weights are let go; this rank's slice stays.",
            "Backward needs the weights again: they are gathered once more.",
            axis="dp",
            backward=layer.take_any("fsdp", "all_gather", "dense weights, again")
            + layer.take_any("edp", "all_gather", "experts, again"),
            pair=("free", "all-gather weights"),
            beside=True,
        ),
        _boundary(layer),
    )
    remainder = layer.take_rest()
    if not remainder:
        return layer_stations
    says = "Collectives of this layer that belong to no other station."
    return *layer_stations, Station("others", "other collectives", says, says, forward=remainder)


def _fetch(layer: Layer) -> Station:
    layout = layer.plan.layout
    shards = f"Each of {layout.dp * layout.cp} ranks (dp · cp) keeps a shard of the dense"
    experts = (
        f"and each of {layout.edp} ranks a shard of the experts that they all have"
        if layout.edp > 1
        else "and every expert is on one rank only"
    )
    return Station(
        "fetch",
        "ZeRO-3: fetch weights",
        f"{shards} weights, {experts}; they are gathered, one unit ahead of their use.",
        "The gradients of the whole unit are summed and scattered: every rank keeps the slice "
        "whose optimizer it has. It is hidden by the backward of the next layer.",
        axis="dp",
        forward=layer.take_any("fsdp", "all_gather", "dense weights of the layer")
        + layer.take_any("edp", "all_gather", "weights of the layer's experts"),
        backward=layer.take_any("fsdp", "reduce_scatter", "dense gradients of the layer")
        + layer.take_any("edp", "reduce_scatter", "gradients of the layer's experts"),
        pair=("all-gather weights", "reduce-scatter gradients"),
        beside=True,
    )


def _boundary(layer: Layer) -> Station:
    return Station(
        "boundary",
        "stage boundary",
        "After the last layer of a stage each rank sends its own tokens to the rank of the next "
        "stage that has the same place in every other dimension.",
        "The gradient of the output comes from the rank of the next stage.",
        own_tokens(layer, "y"),
        axis="pp",
        forward=layer.sent("activations"),
        backward=layer.sent("gradients of the activations"),
        pair=("send", "receive"),
    )


def _legend(plan: Plan) -> list[View]:
    shape, moe = plan.shape, plan.shape.moe
    assert moe is not None
    own = plan.batch.microbatch_size * plan.local_seq // (plan.layout.tp if plan.layout.sp else 1)
    rows = {
        "b": ("rows of a microbatch", plan.batch.microbatch_size),
        "s": ("tokens of a row", plan.padded_seq),
        "d": ("width", shape.width),
        "h": ("heads", shape.heads),
        "e": ("width of a head", shape.head_dim),
        "v": ("width of a head's values", shape.value_dim),
        "E": ("experts", moe.experts),
        "K": ("experts of a token", moe.top_k),
        "f": ("width of an expert", moe.ffn),
        "N": ("tokens of a microbatch on this rank", own),
    }
    return [{"symbol": key, "what": what, "size": size} for key, (what, size) in rows.items()]


def _drawn(station: Station, itemsize: int) -> View:
    return {
        "name": station.name,
        "title": station.title,
        "axis": station.axis,
        "held": None if station.tensor is None else _tensor(station.tensor, itemsize),
        "forward": [_collective(call) for call in station.forward],
        "backward": [_collective(call) for call in station.backward],
        "pair": station.pair,
        "weights": list(station.weights),
        "beside": station.beside,
    }


def _tensor(tensor: LocalTensor, itemsize: int) -> View:
    return {
        "name": tensor.name,
        "symbols": list(tensor.symbols),
        "sizes": list(tensor.sizes),
        "bytes": tensor.numel * (tensor.itemsize or itemsize),
        "rows": [list(share) for share in tensor.rows],
        "columns": tensor.columns,
        "partial": tensor.partial,
    }


def _collective(call: LayerCollective) -> View:
    fields = call.collective._asdict()
    extra = {"who": GROUPS[call.collective.axis], "count": call.count, "what": call.what}
    return fields | extra | {"tier": call.tier}


def _frames(plan: Plan, all_stations: tuple[Station, ...]) -> Iterator[View]:
    layout = plan.layout
    yield {
        "says": f"Rank 0 of {layout.world}: {layout}. One microbatch passes one layer; step along "
        "it, forward and then back.",
        "station": None,
        "back": False,
    }
    for index, station in enumerate(all_stations):
        yield {"says": f"Forward: {station.says}", "station": index, "back": False}
    for index, station in reversed(list(enumerate(all_stations))):
        yield {"says": f"Backward: {station.says_back}", "station": index, "back": True}


def _sentences(layer: Layer, all_stations: tuple[Station, ...]) -> list[str]:
    layout = layer.plan.layout
    sums: Counter[str] = Counter()
    for call in (
        entry for station in all_stations for entry in (*station.forward, *station.backward)
    ):
        axis, kind, size, _ = call.collective
        if kind != "recv":
            sums[axis] += size * call.count
    by_axis = ", ".join(f"{GROUPS[axis]} {size_text(size)}" for axis, size in sums.items())
    lines = [
        *rank_sentences(layout),
        "Buffers that this rank hands to collectives for the layer and one microbatch, forward "
        f"and backward: {by_axis}.",
    ]
    if layout.sp and layout.tp > 1:
        lines.append(
            "Gather and reduce are mirrors (papers call them g and ḡ): the all-gather of one "
            "direction is the reduce-scatter of the other. Outside of them, in norms and "
            f"residuals, a rank has 1/{layout.tp} of the tokens."
        )
    elif layout.tp > 1:
        lines.append(
            "Copy and sum are mirrors (papers call them f and f̄): nothing in one direction, an "
            "all-reduce in the other. Every tensor rank has all tokens in norms and residuals."
        )
    split = layer.plan.split
    if split.inner > 1 and split.outer > 1:
        lines.append(
            f"Hybrid: cp {layout.cp} is a ring of {split.outer} places, each of {split.inner} "
            "ranks that trade tokens for heads."
        )
    if layout.etp > 1:
        lines.append(
            f"Without sequence parallelism tp ranks have the same tokens, so that they share the "
            f"width of each expert among {layout.etp} (etp)."
        )
    return lines


def text(view: View) -> list[str]:
    """The same for a terminal: the stations, each with its collectives."""
    lines = wrapped(view["frames"][0]["says"])
    legend = ", ".join(f"{row['symbol']} {row['what']} {row['size']:,}" for row in view["legend"])
    lines += [*wrapped(legend, "", "  "), ""]
    for station in view["stations"]:
        tensor = station["held"]
        shape = "" if tensor is None else f"{tensor['name']} {_shape_text(tensor)}"
        lines += wrapped(f"{station['title']:<24} {station['axis']:<4} {shape}", "", " " * 30)
        for direction, arrow in (("forward", "→"), ("backward", "←")):
            for call in (entry for entry in station[direction] if entry["kind"] != "recv"):
                lines += wrapped(f"{arrow} {_collective_text(call)}", "    ", "      ")
    return [*lines, "", *sentence_lines(view, "- ")]


def _shape_text(tensor: View) -> str:
    symbols = ", ".join(tensor["symbols"])
    sizes = ", ".join(f"{size:,}" for size in tensor["sizes"])
    return f"[{symbols}] = [{sizes}], {size_text(tensor['bytes'])}"


def _collective_text(call: View) -> str:
    kind = _KINDS.get(call["kind"], kind_text(call["kind"]))
    times = "" if call["count"] == 1 else f"{call['count']} × "
    where = f"among {call['group']} {call['who']} over {call['tier']}"
    return f"{times}{kind} of {size_text(call['bytes'])} {where}: {call['what']}"
