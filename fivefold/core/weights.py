"""The one table of every weight: its global name, its shape, and how tensor parallelism cuts it.

The plain model, tensor parallelism, the memory estimate and checkpoints all use this table, so that
a weight has one name and one cut everywhere. `shard_of` gives the shard of a rank, `boxes_of` the
boxes of the full weight that a run of its elements covers, which is how checkpoints store it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from fivefold.core.errors import FivefoldError
from fivefold.core.layout import Coord, Layout
from fivefold.core.legality import padded_vocab
from fivefold.core.shape import Mla, Moe, Shape

# column: rows of the weight (its outputs) are split; vocab: the same, padded to a multiple of tp;
# row: columns (its inputs) are split; kv: rows by KV head, replicated where these are fewer than
# tp; whole: every tp rank has all of it; expert: stacked experts, which tp does not split.
Cut = Literal["column", "vocab", "row", "kv", "whole", "expert"]


@dataclass(frozen=True)
class Weight:
    """One full weight of the model."""

    name: str
    shape: tuple[int, ...]
    block: str  # "embed", "blocks.{i}", "head" or "mtp.{j}"; the final norm belongs to "head"
    cut: Cut
    spread: bool = False  # replicated, but each tp rank uses it on its own heads only
    expert_dim: int | None = None  # of stacked experts: the dim of their width; dim 0 counts them

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightShard:
    """A rank's shard of a weight: [start, stop) along `dim`, whose padded size is `size`.

    `copies` tp ranks have the same shard. `partial`: they see different tokens or heads, so the
    gradient of the shard is the sum over them.
    """

    dim: int | None  # None: all of it
    start: int
    stop: int
    size: int
    copies: int
    partial: bool
    inner: tuple[int, int, int] | None = None  # a second cut, of experts: dim, start, stop


@lru_cache(maxsize=16)  # every stage of a job needs all of them
def weights(shape: Shape) -> tuple[Weight, ...]:
    """Every weight in forward order; a tied head is the embedding and is not listed again."""
    _refuse_unsupported(shape)
    return planned_weights(shape)


@lru_cache(maxsize=16)
def planned_weights(shape: Shape) -> tuple[Weight, ...]:
    """The same, also of a model that can only be planned."""
    return tuple(_all(shape))


def buffers(shape: Shape) -> tuple[Weight, ...]:
    """What no optimizer updates: the biases of loss-free balancing, in float32."""
    moe = shape.moe
    if moe is None or not moe.bias:
        return ()
    routed = [(f"blocks.{i}", i) for i in range(shape.layers)]
    routed += [(f"mtp.{j}", shape.layers) for j in range(shape.mtp)]
    return tuple(
        Weight(f"{_prefix(block)}.mlp.router.bias", (moe.experts,), block, "whole")
        for block, i in routed
        if shape.is_moe_layer(i)
    )


def by_name(shape: Shape) -> dict[str, Weight]:
    """The weight of every parameter name; two names may mean the embedding.

    A last stage without the embedding has a copy of it: `head.weight` if the head is tied,
    `mtp.embed.weight` if only multi-token prediction looks up tokens.
    """
    named = {one.name: one for one in weights(shape)}
    if shape.tied:
        return {**named, "head.weight": named["embed.weight"]}
    return named if not shape.mtp else {**named, "mtp.embed.weight": named["embed.weight"]}


def tp_shard(weight: Weight, shape: Shape, tp: int, sp: bool, coord: int) -> WeightShard:
    """The shard of the tp rank at `coord`, with (`sp`) or without sequence parallelism."""
    size = weight.shape[0]
    if tp == 1 or weight.cut in ("whole", "expert"):
        partial = tp > 1 and (weight.spread or sp)
        return WeightShard(None, 0, size, size, copies=tp, partial=partial)
    dim, copies = 0, 1
    if weight.cut == "vocab":
        size = padded_vocab(shape.vocab, tp)
    elif weight.cut == "kv":
        copies = max(1, tp // shape.kv_heads)
        assert shape.kv_heads * copies % tp == 0, "tp must divide the KV heads or be their multiple"
    elif weight.cut == "row":
        dim, size = 1, weight.shape[1]
    assert size * copies % tp == 0, f"tp={tp} does not divide {weight.name}"
    length = size * copies // tp
    start = coord // copies * length
    return WeightShard(dim, start, start + length, size, copies, partial=copies > 1)


def shard_of(weight: Weight, shape: Shape, layout: Layout, at: Coord) -> WeightShard:
    """The shard of the rank at these coords: over ep and etp for experts, else over tp."""
    if weight.expert_dim is None:
        return tp_shard(weight, shape, layout.tp, layout.sp, at.tp)
    count, width = weight.shape[0] // layout.ep, weight.shape[weight.expert_dim] // layout.etp
    start, low = at.ep * count, at.etp * width
    inner = (weight.expert_dim, low, low + width)
    return WeightShard(0, start, start + count, weight.shape[0], 1, partial=False, inner=inner)


def local_shape(weight: Weight, shard: WeightShard) -> tuple[int, ...]:
    """The shape of a shard, with padding."""
    sizes = list(weight.shape)
    if shard.dim is not None:
        sizes[shard.dim] = shard.stop - shard.start
    if shard.inner is not None:
        dim, start, stop = shard.inner
        sizes[dim] = stop - start
    return tuple(sizes)


def _all(shape: Shape) -> Iterator[Weight]:
    yield Weight("embed.weight", (shape.vocab, shape.width), "embed", "vocab")
    if shape.positions == "learned":
        yield Weight("embed.positions", (shape.max_seq, shape.width), "embed", "whole")
    if shape.embedding_norm:
        yield from _norm(shape, "embed", "embed.norm")
    for i in range(shape.layers):
        yield from _layer(shape, i, f"blocks.{i}")
    yield from _norm(shape, "head", "norm")
    if not shape.tied:
        yield Weight("head.weight", (shape.vocab, shape.width), "head", "vocab")
    for j in range(shape.mtp):
        block, sizes = f"mtp.{j}", (shape.width, 2 * shape.width)
        yield from _norm(shape, block, f"{block}.token_norm")
        yield from _norm(shape, block, f"{block}.hidden_norm")
        yield Weight(f"{block}.join.weight", sizes, block, "whole")
        yield from _layer(shape, shape.layers, block)
        yield from _norm(shape, block, f"{block}.norm")


def _prefix(block: str) -> str:
    """The name prefix of a block's layer: an MTP block contains more than its layer."""
    return f"{block}.block" if block.startswith("mtp.") else block


def _layer(shape: Shape, i: int, block: str) -> Iterator[Weight]:
    name = _prefix(block)
    yield from _norm(shape, block, f"{name}.attention_norm")
    if shape.mla is None:
        yield from _attention(shape, block, f"{name}.attention")
    else:
        yield from _latent_attention(shape, shape.mla, block, f"{name}.attention")
    if not shape.parallel_block:
        yield from _norm(shape, block, f"{name}.mlp_norm")
    if shape.moe is not None and shape.is_moe_layer(i):
        yield from _moe(shape, shape.moe, block, f"{name}.mlp")
    else:
        yield from _mlp(shape, block, f"{name}.mlp", shape.ffn, shape.mlp_bias)


def _attention(shape: Shape, block: str, name: str) -> Iterator[Weight]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    width, bias = shape.width, shape.qkv_bias
    yield from _linear(block, f"{name}.q", (queries, width), "column", bias)
    yield from _linear(block, f"{name}.k", (keys, width), "kv", bias)
    yield from _linear(block, f"{name}.v", (keys, width), "kv", bias)
    if shape.qk_norm == "head":
        for one in ("q_norm", "k_norm"):
            yield Weight(f"{name}.{one}.weight", (shape.head_dim,), block, "whole", spread=True)
    elif shape.qk_norm == "full":
        yield Weight(f"{name}.q_norm.weight", (queries,), block, "column")
        yield Weight(f"{name}.k_norm.weight", (keys,), block, "kv")
    yield from _linear(block, f"{name}.out", (width, queries), "row", shape.out_bias)


def _latent_attention(shape: Shape, mla: Mla, block: str, name: str) -> Iterator[Weight]:
    """Each tp rank makes the latents of all tokens, and from them its own heads."""
    width, bias, queries = shape.width, shape.qkv_bias, shape.heads * shape.head_dim
    if mla.q_rank is None:
        yield from _linear(block, f"{name}.q", (queries, width), "column")
    else:
        sizes = (mla.q_rank, width)
        yield from _linear(block, f"{name}.q_down", sizes, "whole", bias, spread=True)
        yield Weight(f"{name}.q_latent_norm.weight", (mla.q_rank,), block, "whole", spread=True)
        yield from _linear(block, f"{name}.q_up", (queries, mla.q_rank), "column")
    sizes = (mla.kv_rank + mla.rope_dim, width)
    yield from _linear(block, f"{name}.kv_down", sizes, "whole", bias, spread=True)
    yield Weight(f"{name}.kv_latent_norm.weight", (mla.kv_rank,), block, "whole", spread=True)
    sizes = (shape.heads * (mla.nope_dim + mla.value_dim), mla.kv_rank)
    yield from _linear(block, f"{name}.kv_up", sizes, "column")
    yield from _linear(
        block, f"{name}.out", (width, shape.heads * mla.value_dim), "row", shape.out_bias
    )


def _mlp(shape: Shape, block: str, name: str, ffn: int, bias: bool) -> Iterator[Weight]:
    for one in ("gate", "up") if shape.gated else ("up",):
        yield from _linear(block, f"{name}.{one}", (ffn, shape.width), "column", bias)
    yield from _linear(block, f"{name}.down", (shape.width, ffn), "row", bias)


def _moe(shape: Shape, moe: Moe, block: str, name: str) -> Iterator[Weight]:
    width, into = shape.width, (moe.experts, moe.ffn, shape.width)
    yield Weight(f"{name}.router.weight", (moe.experts, width), block, "whole")
    for one in ("gate", "up") if shape.gated else ("up",):
        yield Weight(f"{name}.experts.{one}.weight", into, block, "expert", expert_dim=1)
    back = (moe.experts, width, moe.ffn)
    yield Weight(f"{name}.experts.down.weight", back, block, "expert", expert_dim=2)
    if moe.shared:
        yield from _mlp(shape, block, f"{name}.shared", moe.shared_ffn, bias=False)
    if moe.shared_gated:
        yield Weight(f"{name}.shared_gate.weight", (1, width), block, "whole")


def _linear(
    block: str,
    name: str,
    sizes: tuple[int, int],
    cut: Cut,
    bias: bool = False,
    spread: bool = False,
) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", sizes, block, cut, spread)
    if bias:
        # A row-cut matmul is summed over tp before its bias is added: every rank has the full bias.
        yield Weight(f"{name}.bias", sizes[:1], block, "whole" if cut == "row" else cut, spread)


def _norm(shape: Shape, block: str, name: str) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (shape.width,), block, "whole")
    if shape.norm_bias:
        yield Weight(f"{name}.bias", (shape.width,), block, "whole")


def is_buildable(shape: Shape) -> bool:
    """Whether the model can be built, and not only planned."""
    return not _unsupported(shape)


def _unsupported(shape: Shape) -> list[str]:
    """The one place that says which models cannot be built; `plan` still estimates them."""
    missing = {
        "alibi positions": shape.positions == "alibi",
        "attention and MLP side by side (parallel_block)": shape.parallel_block,
        "a norm after the embedding (embedding_norm)": shape.embedding_norm,
        "windows in chunks (window_kind=chunked)": shape.window_kind == "chunked",
        "layers without a window (global_every)": shape.global_every is not None,
        "qk_norm=l2": shape.qk_norm == "l2",
        "a qk_norm in latent attention": shape.mla is not None and shape.qk_norm != "none",
        "multi-token prediction with learned positions": shape.mtp > 0
        and shape.positions == "learned",
    }
    return [name for name, used in missing.items() if used]


def _refuse_unsupported(shape: Shape) -> None:
    if found := _unsupported(shape):
        raise FivefoldError(
            f"model {shape.name!r} has {', '.join(found)}: it can be planned but not built; build "
            "decoders with rotary or no positions, or learned ones without multi-token prediction, "
            "with qk_norm none, head or full, and with sliding windows or none"
        )


# Boxes. ZeRO cuts a flat buffer through rows, so a rank often owns only a run of a shard's elements
# in row-major order. Such a run is a few boxes of the full weight. Boxes do not depend on the
# layout: one layout writes its boxes, another reads the boxes that it needs.


@dataclass(frozen=True)
class Box:
    """A box of a full tensor; its elements are the `numel` from `at` on of what a rank owns."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.sizes)


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor.

    >>> whole_box((2, 3))
    Box(offsets=(0, 0), sizes=(2, 3), at=0)
    """
    return Box((0,) * len(shape), tuple(shape), 0)


def origin_of(shape: Sequence[int], shard: WeightShard) -> tuple[int, ...]:
    """Where the shard of a weight of this shape begins."""
    origin = [0] * len(shape)
    if shard.dim is not None:
        origin[shard.dim] = shard.start
    if shard.inner is not None:
        origin[shard.inner[0]] = shard.inner[1]
    return tuple(origin)


def boxes_of(
    shape: Sequence[int], shard: WeightShard, local: Sequence[int], start: int, stop: int
) -> tuple[Box, ...]:
    """The elements [start, stop) of a shard as boxes of a weight of this shape.

    `local` is the shape of the shard. There are at most 2·ndim − 1 boxes; `at` counts from `start`.
    Padding is outside the weight, and in no box.
    """
    assert 0 <= start <= stop <= math.prod(local), "a run lies inside its shard"
    origin = origin_of(shape, shard)
    found: list[Box] = []
    for box in _runs(tuple(local), start, stop):
        offsets = tuple(low + offset for low, offset in zip(origin, box.offsets, strict=True))
        room = [most - offset for most, offset in zip(shape, offsets, strict=True)]
        sizes = tuple(max(0, min(pair)) for pair in zip(box.sizes, room, strict=True))
        clipped = Box(offsets, sizes, box.at - start)
        assert sizes[1:] == box.sizes[1:] or not clipped.numel, "only rows can be padding"
        if clipped.numel:
            found.append(clipped)
    return tuple(found)


def _runs(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) in row-major order: end of a row, full rows, start of a row."""
    if start == stop:
        return
    if not shape:
        yield Box((), (), start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the full rows
    if first > last:  # all inside one row
        yield from _inside(shape, last, start, stop)
        return
    yield from _inside(shape, first - 1, start, first * row)
    if first < last:
        rest = (0,) * (len(shape) - 1)
        yield Box((first, *rest), (last - first, *shape[1:]), first * row)
    yield from _inside(shape, last, last * row, stop)


def _inside(shape: tuple[int, ...], number: int, start: int, stop: int) -> Iterator[Box]:
    """The same for elements that all lie in row `number`."""
    base = number * math.prod(shape[1:])
    for box in _runs(shape[1:], start - base, stop - base):
        yield Box((number, *box.offsets), (1, *box.sizes), base + box.at)
