"""The one table of every weight: its global name, its shape, and how tensor parallelism cuts it.

The plain model, the tensor dimension, the ledger of bytes and the checkpoint all read this table,
so that a weight has one name and one cut everywhere. `piece` says what one tp rank holds.
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
# tp; whole: every tp rank holds all of it; expert: stacked experts, which tp does not split.
Cut = Literal["column", "vocab", "row", "kv", "whole", "expert"]


@dataclass(frozen=True)
class Weight:
    """One weight of the whole model, before anything is split."""

    name: str
    shape: tuple[int, ...]
    block: str  # "embed", "blocks.{i}", "head" or "mtp.{j}"; the final norm belongs to "head"
    cut: Cut
    spread: bool = False  # whole, but each tp rank uses it on its own heads only
    expert_dim: int | None = None  # of stacked experts: the dim of their width; dim 0 counts them

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightShard:
    """What one tp rank holds of a weight: [start, stop) along `dim`, whose padded size is `size`.

    `copies` ranks hold the same piece. `partial`: they see different tokens or heads, so that the
    gradient of the piece is the sum over them.
    """

    dim: int | None  # None: all of it
    start: int
    stop: int
    size: int
    copies: int
    partial: bool
    inner: tuple[int, int, int] | None = None  # a second cut, of experts: dim, start, stop


@lru_cache(maxsize=16)  # every stage of a job asks for all of them
def weights(shape: Shape) -> tuple[Weight, ...]:
    """Every weight in forward order; a tied head is the embedding and not listed twice."""
    _refuse_unsupported(shape)
    return tuple(_all(shape))


def buffers(shape: Shape) -> tuple[Weight, ...]:
    """What a model keeps and no optimizer updates: the biases of loss-free balancing, float32."""
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
    """Every name a parameter can have; two of them may lead to the embedding.

    A stage without the embedding has a copy of it: as `head.weight` where the head is tied to it,
    as `mtp.embed.weight` where only multi-token prediction looks tokens up.
    """
    named = {one.name: one for one in weights(shape)}
    if shape.tied:
        return {**named, "head.weight": named["embed.weight"]}
    return named if not shape.mtp else {**named, "mtp.embed.weight": named["embed.weight"]}


def piece(weight: Weight, shape: Shape, tp: int, sp: bool, coord: int) -> WeightShard:
    """What the tp rank at `coord` holds, with (`sp`) or without sequence parallelism."""
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


def held_by(weight: Weight, shape: Shape, layout: Layout, at: Coord) -> WeightShard:
    """What the rank at these coords holds: of experts its share over ep and etp, else over tp."""
    if weight.expert_dim is None:
        return piece(weight, shape, layout.tp, layout.sp, at.tp)
    count, width = weight.shape[0] // layout.ep, weight.shape[weight.expert_dim] // layout.etp
    start, low = at.ep * count, at.etp * width
    inner = (weight.expert_dim, low, low + width)
    return WeightShard(0, start, start + count, weight.shape[0], 1, partial=False, inner=inner)


def local_shape(weight: Weight, held: WeightShard) -> tuple[int, ...]:
    """The shape of a piece, padding included."""
    sizes = list(weight.shape)
    if held.dim is not None:
        sizes[held.dim] = held.stop - held.start
    if held.inner is not None:
        dim, start, stop = held.inner
        sizes[dim] = stop - start
    return tuple(sizes)


def _all(shape: Shape) -> Iterator[Weight]:
    yield Weight("embed.weight", (shape.vocab, shape.width), "embed", "vocab")
    if shape.positions == "learned":
        yield Weight("embed.positions", (shape.max_seq, shape.width), "embed", "whole")
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
    """Where the layer of a block lies: an MTP block has more than its layer."""
    return f"{block}.block" if block.startswith("mtp.") else block


def _layer(shape: Shape, i: int, block: str) -> Iterator[Weight]:
    name = _prefix(block)
    yield from _norm(shape, block, f"{name}.attention_norm")
    if shape.mla is None:
        yield from _attention(shape, block, f"{name}.attention")
    else:
        yield from _latent_attention(shape, shape.mla, block, f"{name}.attention")
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
        # A row-cut product is summed over tp first, and its bias added once: every rank has all.
        yield Weight(f"{name}.bias", sizes[:1], block, "whole" if cut == "row" else cut, spread)


def _norm(shape: Shape, block: str, name: str) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (shape.width,), block, "whole")
    if shape.norm_bias:
        yield Weight(f"{name}.bias", (shape.width,), block, "whole")


def _refuse_unsupported(shape: Shape) -> None:
    """The one place that says what the model cannot be built with; `plan` still prices it."""
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
    found = [name for name, there in missing.items() if there]
    if found:
        raise FivefoldError(
            f"model {shape.name!r} has {', '.join(found)}: it can be planned but not built; build "
            "decoders with rotary or no positions, or learned ones without multi-token prediction, "
            "with qk_norm none, head or full, and with sliding windows or none"
        )


# Which boxes of a whole weight a rank holds.
#
# A rank holds a piece of a weight, and of the piece often only a run of its elements in row-major
# order: where ZeRO cuts a flat buffer, it cuts through rows. Such a run is a few boxes of the
# whole weight, and boxes are what layouts have in common: what one wrote as its boxes, another
# reads as its own.


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor, whose elements are `numel` in a row from `at` on of what is held."""

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


def boxes_of(
    shape: Sequence[int], held: WeightShard, local: Sequence[int], start: int, stop: int
) -> tuple[Box, ...]:
    """The elements [start, stop) of a piece as boxes of a weight of this shape.

    `local` is the shape of the piece. There are at most 2·ndim − 1 boxes; `at` counts from `start`.
    Padding lies outside of the weight, and in no box.
    """
    assert 0 <= start <= stop <= math.prod(local), "a run lies inside of its piece"
    origin = [0] * len(shape)
    if held.dim is not None:
        origin[held.dim] = held.start
    if held.inner is not None:
        origin[held.inner[0]] = held.inner[1]
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
    """Elements [start, stop) in row-major order: the rest of a row, whole rows, a part of a row."""
    if start == stop:
        return
    if not shape:
        yield Box((), (), start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # all inside of one row
        yield from _inside(shape, last, start, stop)
        return
    yield from _inside(shape, first - 1, start, first * row)
    if first < last:
        rest = (0,) * (len(shape) - 1)
        yield Box((first, *rest), (last - first, *shape[1:]), first * row)
    yield from _inside(shape, last, last * row, stop)


def _inside(shape: tuple[int, ...], number: int, start: int, stop: int) -> Iterator[Box]:
    """The same of elements that all lie in row `number`."""
    base = number * math.prod(shape[1:])
    for box in _runs(shape[1:], start - base, stop - base):
        yield Box((number, *box.offsets), (1, *box.sizes), base + box.at)
