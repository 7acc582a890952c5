"""Learn: one MoE layer with all five dimensions, forward and backward.

    view(params) -> {"choices", "layout", "legend", "stations", "frames", "sentences"}

A station has its weights, the local tensor after it, and its collectives in forward and backward; a
frame points at one station in one direction. Bytes, groups and counts are exactly the collectives
that the plan has for this layer; tiers are those of the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from fivefold.core import kind_text
from fivefold.core.layout import CONTEXT_KINDS
from fivefold.core.model import presets as models
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.render import wrapped
from fivefold_page import Params, View
from fivefold_page.learn.layer_attention import attention, own_tokens
from fivefold_page.learn.layer_experts import experts
from fivefold_page.learn.layer_parts import Layer, LayerCollective, LocalTensor, Station
from fivefold_page.learn.lesson import (
    GROUPS,
    Choice,
    chosen,
    rank_sentences,
    sentence_lines,
    size_text,
)

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
        _discard(layer),
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


def _discard(layer: Layer) -> Station:
    return Station(
        "discard",
        "ZeRO-3: discard weights",
        "The whole weights are let go; this rank's slice stays.",
        "Backward needs the weights again: they are gathered once more.",
        axis="dp",
        backward=layer.take_any("fsdp", "all_gather", "dense weights, again")
        + layer.take_any("edp", "all_gather", "experts, again"),
        pair=("free", "all-gather weights"),
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
