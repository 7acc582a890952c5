"""The stations of a layer from the second norm to its end: router, experts, shared experts.

Legend: N tokens of a microbatch on one rank, d width, E experts, K experts per token, f width of an
expert. A slot is one token on one of its experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fivefold.core.model import Moe
from fivefold.cost.traffic import COUNT, max_nodes_per_token
from fivefold_page.learn.layer_attention import enter, leave, own_tokens, row_tokens
from fivefold_page.learn.layer_parts import Layer, LayerCollective, LocalTensor, Station, over


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
        yield _leave_width(layer, tokens)
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


def _leave_width(layer: Layer, tokens: int) -> Station:
    row = layer.plan.shape.width * layer.itemsize
    return Station(
        "leave experts",
        "sum of experts",
        "The partial sums of the shards of every expert are added up.",
        "Nothing happens: every rank has the whole gradient.",
        own_tokens(layer, "results"),
        "etp",
        forward=layer.take("etp", "all_reduce", tokens * row, "results"),
        pair=("all-reduce", "identity"),
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
    if nodes == 1:
        return ()
    return (
        *layer.take(axis, kind, nodes * COUNT, "counts: rows for each node"),
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
