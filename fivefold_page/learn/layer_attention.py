"""The stations of a layer from the first norm to the sum after attention: tensor and context.

Legend: b sequences of a microbatch, s tokens of a sequence, d width, h heads, e width of a query or
key head, v width of a value head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fivefold_page.learn.layer_parts import (
    Layer,
    LayerCollective,
    LocalTensor,
    Station,
    over,
    shares,
)


def own_tokens(layer: Layer, name: str = "x") -> LocalTensor:
    """The tokens of one rank between two matmuls: with sp, 1/tp of those of its context rank."""
    plan, tp = layer.plan, layer.plan.layout.tp if layer.plan.layout.sp else 1
    tokens = plan.split.rank_tokens(plan.padded_seq, 0)
    local = plan.local_seq // tp
    sizes = (plan.batch.microbatch_size, local, plan.shape.width)
    symbols = ("b", over("s", cp=plan.layout.cp, tp=tp), "d")
    return LocalTensor(name, symbols, sizes, shares(tokens, plan.padded_seq, local))


def row_tokens(layer: Layer, name: str) -> LocalTensor:
    """All tokens of a context rank."""
    plan = layer.plan
    rows = shares(plan.split.rank_tokens(plan.padded_seq, 0), plan.padded_seq)
    sizes = (plan.batch.microbatch_size, plan.local_seq, plan.shape.width)
    return LocalTensor(name, ("b", over("s", cp=plan.layout.cp), "d"), sizes, rows)


def _heads(layer: Layer) -> LocalTensor:
    """The queries of a rank: all its tokens, with the heads of its tp rank."""
    shape, tp, cp = layer.plan.shape, layer.plan.layout.tp, layer.plan.layout.cp
    tensor = row_tokens(layer, "q")
    sizes = (*tensor.sizes[:2], shape.heads // tp, shape.head_dim)
    return LocalTensor(
        "q", ("b", over("s", cp=cp), over("h", tp=tp), "e"), sizes, tensor.rows, 1 / tp
    )


def attention(layer: Layer) -> Iterator[Station]:
    """From the norm to the sum of the residual and the output of attention."""
    tp = layer.plan.layout.tp
    yield Station(
        "norm 1",
        "norm",
        "Each rank normalises the tokens that it has; the residual stays as it is.",
        "The norm's gradient is that of this rank's tokens; tp ranks sum theirs once a step.",
        own_tokens(layer, "x"),
        weights=layer.weights("attention_norm.weight"),
    )
    yield enter(layer, "enter 1", "attention")
    column = "q.weight", "k.weight", "v.weight", "q_up.weight", "kv_up.weight"
    queries = _heads(layer)
    share = "all heads" if tp == 1 else f"1/{tp} of the heads"
    yield Station(
        "qkv",
        "q, k, v: column",
        f"Queries, keys and values of {share} for all of these tokens: the weights are cut by "
        "column, and nothing has to be summed.",
        "Gradients of the inputs are partial sums over the heads of this rank.",
        queries,
        axis="tp",
        weights=layer.weights(*column),
    )
    yield from _context(layer, queries)
    yield Station(
        "out",
        "out: row",
        "The projection back is cut by row: each rank has a partial sum of every token."
        if tp > 1
        else "The projection back; with tp = 1 its sum is whole.",
        "Each rank needs the whole gradient of every token, and makes that of its own heads.",
        replace(row_tokens(layer, "partial sums"), partial=tp > 1),
        axis="tp",
        weights=layer.weights("attention.out.weight"),
    )
    yield leave(layer, "leave 1", "x + attention")


def enter(layer: Layer, name: str, before: str) -> Station:
    """Before column-parallel matmuls: a gather, or nothing without sequence parallelism."""
    layout, tensor = layer.plan.layout, row_tokens(layer, "x of the tp group")
    size = tensor.numel * layer.itemsize
    if layout.tp == 1:
        return Station(name, "gather", *_IDLE, tensor, "tp")
    if not layout.sp:
        return Station(
            name,
            "copy",
            "Nothing happens: without sequence parallelism every tp rank has all tokens.",
            "A sum: the gradient of a token is the sum over the heads of all tp ranks.",
            tensor,
            "tp",
            backward=layer.take("tp", "all_reduce", size, "gradients of the tokens"),
            pair=("identity", "all-reduce"),
        )
    backward = layer.take("tp", "reduce_scatter", size, "gradients of the tokens")
    if layer.plan.saves_input_shards:
        again = "tokens, again, for the weights' gradients"
        backward += layer.take("tp", "all_gather", size // layout.tp, again)
    return Station(
        name,
        "gather",
        f"It gathers the tokens of the {layout.tp} tp ranks: {before} needs every token, with a "
        "part of the width.",
        "The mirror of gathering: gradients are summed and scattered, each rank its own "
        "tokens. The tokens themselves were not kept: they are gathered once more, for the "
        "gradients of the weights.",
        tensor,
        "tp",
        forward=layer.take("tp", "all_gather", size // layout.tp, "tokens"),
        backward=backward,
        pair=("all-gather", "reduce-scatter"),
    )


def leave(layer: Layer, name: str, after: str) -> Station:
    """After row-parallel matmuls: a reduce, or a sum without sequence parallelism."""
    layout, tensor = layer.plan.layout, row_tokens(layer, "")
    size = tensor.numel * layer.itemsize
    if layout.tp == 1:
        return Station(name, "reduce", *_IDLE, own_tokens(layer, after), "tp")
    if not layout.sp:
        return Station(
            name,
            "sum",
            f"It sums the parts of the {layout.tp} tp ranks; all of them then have every token.",
            "Nothing happens: every rank has the whole gradient already.",
            own_tokens(layer, after),
            "tp",
            forward=layer.take("tp", "all_reduce", size, "partial sums"),
            pair=("all-reduce", "identity"),
        )
    return Station(
        name,
        "reduce",
        f"It sums the parts of the {layout.tp} tp ranks and gives each its own tokens. An "
        "all-reduce would move as much: it is this and the next all-gather.",
        "The mirror of reducing: it gathers the gradients of the tokens of all tp ranks.",
        own_tokens(layer, after),
        "tp",
        forward=layer.take("tp", "reduce_scatter", size, "partial sums"),
        backward=layer.take("tp", "all_gather", size // layout.tp, "gradients of the tokens"),
        pair=("reduce-scatter", "all-gather"),
    )


def _context(layer: Layer, queries: LocalTensor) -> Iterator[Station]:
    """Attention, and how queries get the keys of other context ranks."""
    plan, split, shape = layer.plan, layer.plan.split, layer.plan.shape
    tp, seq = plan.layout.tp, plan.padded_seq
    query_bytes = queries.numel * layer.itemsize
    kv_heads = math.lcm(max(1, shape.kv_heads // tp), split.inner)
    keys = math.prod(queries.sizes[:2]) * kv_heads * shape.head_dim
    hybrid = split.inner > 1 and split.outer > 1
    ring, inside = ("ring", "ulysses") if hybrid else ("cp", "cp")
    tensor = LocalTensor(
        "attention",
        ("b", over("s", **{ring: split.outer}), over("h", tp=tp, **{inside: split.inner}), "v"),
        (
            queries.sizes[0],
            seq // split.outer,
            shape.heads // (tp * split.inner),
            shape.value_dim,
        ),
        shares(split.ring_tokens(seq, 0), seq),
        1 / (tp * split.inner),
    )
    if split.inner > 1:
        yield _tokens_to_heads(layer, tensor, query_bytes, keys * layer.itemsize)
    yield _ring(layer, tensor, keys)
    if split.inner > 1:
        results = replace(queries, name="attention", symbols=(*queries.symbols[:3], "v"))
        results = replace(results, sizes=(*queries.sizes[:3], shape.value_dim))
        yield Station(
            "heads to tokens",
            "heads → tokens",
            "The results go home: every rank has its own tokens again, with all its heads.",
            "The gradients of the results are traded, tokens for heads.",
            results,
            "cp",
            forward=layer.take("ulysses", "all_to_all", query_bytes, "results"),
            backward=layer.take("ulysses", "all_to_all", query_bytes, "gradients of the results"),
            pair=("all-to-all", "all-to-all"),
        )


def _tokens_to_heads(layer: Layer, tensor: LocalTensor, queries: int, keys: int) -> Station:
    """The all-to-all of Ulysses before attention; sizes in bytes."""
    ranks = layer.plan.split.inner

    def take(what: str) -> tuple[LayerCollective, ...]:
        return (
            *layer.take("ulysses", "all_to_all", queries, f"{what}queries"),
            *layer.take("ulysses", "all_to_all", keys, f"{what}keys, and values", 2),
        )

    return Station(
        "tokens to heads",
        "tokens → heads",
        f"{ranks} context ranks trade tokens for heads: each gets the tokens of all of them, with "
        f"1/{ranks} of its heads.",
        "The gradients go the way back, heads for tokens.",
        replace(
            tensor,
            name="q",
            symbols=(*tensor.symbols[:3], "e"),
            sizes=(*tensor.sizes[:3], layer.plan.shape.head_dim),
        ),
        "cp",
        forward=take(""),
        backward=take("gradients of "),
        pair=("all-to-all", "all-to-all"),
    )


def _ring(layer: Layer, tensor: LocalTensor, keys: int) -> Station:
    """Attention itself; `keys` is the number of elements of the local keys, or of the values."""
    split, hops = layer.plan.split, layer.plan.split.outer - 1
    hop_bytes, wide = 2 * keys * layer.itemsize, 2 * keys * layer.wide
    station = Station("attention", "attention", "", "", tensor, "cp" if hops else "")
    if not hops:
        return replace(
            station,
            says="Attention over whole rows: no key of these heads is anywhere else.",
            says_back="The backward of attention, over whole rows as well.",
        )
    if split.gathers:
        return replace(
            station,
            says=f"The keys and values of all {split.outer} context ranks are gathered at once.",
            says_back="They are gathered again, and their gradients summed, wide, and scattered.",
            forward=layer.take("ring", "all_gather", hop_bytes, "keys and values"),
            backward=layer.take("ring", "all_gather", hop_bytes, "keys and values, again")
            + layer.take("ring", "reduce_scatter", wide * split.outer, "their gradients, wide"),
            pair=("all-gather", "all-gather, reduce-scatter"),
        )

    def pass_on(size: int, what: str, count: int) -> tuple[LayerCollective, ...]:
        sent = layer.take("ring", "send", size, what, count)
        return sent + layer.take("ring", "recv", size, what, count)

    return replace(
        station,
        says=f"Queries stay; keys and values go around the {split.outer} places of the ring, each "
        "hop hidden by the attention of the block that came before.",
        says_back="Keys and values go around once more, and their gradients with them, one hop "
        "later, until they are home.",
        forward=pass_on(hop_bytes, "keys and values", hops),
        backward=pass_on(hop_bytes, "keys and values, again", hops)
        + pass_on(wide, "their gradients, wide", split.outer),
        pair=("ring", "ring of keys and gradients"),
    )


_IDLE = (
    "tp = 1: this rank has the whole width, and nothing moves. It is the same path.",
    "tp = 1: nothing moves in backward either.",
)
