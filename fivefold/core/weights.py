"""The one table of every weight: its global name, its shape, and how tensor parallelism cuts it.

The plain model, the tensor dimension, the ledger of bytes and the checkpoint all read this table,
so that a weight has one name and one cut everywhere. `piece` says what one tp rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fivefold.core.errors import FivefoldError
from fivefold.core.legality import padded_vocab
from fivefold.core.shape import Shape

# column: rows of the weight (its outputs) are split; vocab: the same, padded to a multiple of tp;
# row: columns (its inputs) are split; kv: rows by KV head, replicated where these are fewer than
# tp; whole: every tp rank holds all of it.
Cut = Literal["column", "vocab", "row", "kv", "whole"]


@dataclass(frozen=True)
class Weight:
    """One weight of the whole model, before anything is split."""

    name: str
    shape: tuple[int, ...]
    block: str  # "embed", "blocks.{i}" or "head"; the final norm belongs to "head"
    cut: Cut
    spread: bool = False  # whole, but each tp rank uses it on its own heads only

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
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


def weights(shape: Shape) -> tuple[Weight, ...]:
    """Every weight in forward order; a tied head is the embedding and not listed twice."""
    _refuse_unsupported(shape)
    return tuple(_all(shape))


def by_name(shape: Shape) -> dict[str, Weight]:
    """Every name a parameter can have; `head.weight` of a tied model leads to the embedding.

    A stage that holds a tied head but not the embedding has a copy under that name.
    """
    named = {one.name: one for one in weights(shape)}
    return named if not shape.tied else {**named, "head.weight": named["embed.weight"]}


def piece(weight: Weight, shape: Shape, tp: int, sp: bool, coord: int) -> Piece:
    """What the tp rank at `coord` holds, with (`sp`) or without sequence parallelism."""
    size = weight.shape[0]
    if tp == 1 or weight.cut == "whole":
        partial = tp > 1 and (weight.spread or sp)
        return Piece(None, 0, size, size, copies=tp, partial=partial)
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
    return Piece(dim, start, start + length, size, copies, partial=copies > 1)


def local_shape(weight: Weight, held: Piece) -> tuple[int, ...]:
    """The shape of a piece, padding included."""
    if held.dim is None:
        return weight.shape
    rest = weight.shape[held.dim + 1 :]
    return (*weight.shape[: held.dim], held.stop - held.start, *rest)


def _all(shape: Shape) -> Iterator[Weight]:
    yield Weight("embed.weight", (shape.vocab, shape.width), "embed", "vocab")
    if shape.positions == "learned":
        yield Weight("embed.positions", (shape.max_seq, shape.width), "embed", "whole")
    for i in range(shape.layers):
        block = f"blocks.{i}"
        yield from _norm(shape, block, f"{block}.attention_norm")
        yield from _attention(shape, block)
        yield from _norm(shape, block, f"{block}.mlp_norm")
        yield from _mlp(shape, block)
    yield from _norm(shape, "head", "norm")
    if not shape.tied:
        yield Weight("head.weight", (shape.vocab, shape.width), "head", "vocab")


def _attention(shape: Shape, block: str) -> Iterator[Weight]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    name = f"{block}.attention"
    width, bias = shape.width, shape.qkv_bias
    yield from _linear(block, f"{name}.q", (queries, width), "column", bias)
    yield from _linear(block, f"{name}.k", (keys, width), "kv", bias)
    yield from _linear(block, f"{name}.v", (keys, width), "kv", bias)
    if shape.qk_norm == "head":
        for one in ("q_norm", "k_norm"):
            yield Weight(f"{name}.{one}.weight", (shape.head_dim,), block, "whole", spread=True)
    yield from _linear(block, f"{name}.out", (width, queries), "row", shape.out_bias)


def _mlp(shape: Shape, block: str) -> Iterator[Weight]:
    for one in ("gate", "up") if shape.gated else ("up",):
        sizes = (shape.ffn, shape.width)
        yield from _linear(block, f"{block}.mlp.{one}", sizes, "column", shape.mlp_bias)
    yield from _linear(block, f"{block}.mlp.down", (shape.width, shape.ffn), "row", shape.mlp_bias)


def _linear(
    block: str, name: str, sizes: tuple[int, int], cut: Cut, bias: bool
) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", sizes, block, cut)
    if bias:
        # A row-cut product is summed over tp first, and its bias added once: every rank has all.
        yield Weight(f"{name}.bias", sizes[:1], block, "whole" if cut == "row" else cut)


def _norm(shape: Shape, block: str, name: str) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (shape.width,), block, "whole")
    if shape.norm_bias:
        yield Weight(f"{name}.bias", (shape.width,), block, "whole")


def _refuse_unsupported(shape: Shape) -> None:
    """The one place that says what the model cannot be built with; `plan` still prices it."""
    missing = {
        "experts (moe)": shape.moe is not None,
        "latent attention (mla)": shape.mla is not None,
        "multi-token prediction (mtp)": shape.mtp > 0,
        "alibi positions": shape.positions == "alibi",
        "attention and MLP side by side (parallel_block)": shape.parallel_block,
        "a norm after the embedding (embedding_norm)": shape.embedding_norm,
        "windows in chunks (window_kind=chunked)": shape.window_kind == "chunked",
        "layers without a window (global_every)": shape.global_every is not None,
        f"qk_norm={shape.qk_norm}": shape.qk_norm not in ("none", "head"),
        "yarn positions (rope.kind=yarn)": shape.rope is not None and shape.rope.kind == "yarn",
        "rotation of neighbouring pairs (rope_interleaved)": shape.rope_interleaved,
    }
    found = [name for name, there in missing.items() if there]
    if found:
        raise FivefoldError(
            f"model {shape.name!r} has {', '.join(found)}: it can be planned but not built; build "
            "dense decoders with rotary, learned or no positions, rope kinds llama3 and linear, "
            "qk_norm none or head, and sliding windows or none"
        )
