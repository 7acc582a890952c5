"""The one table of every weight: its global name, its shape, and how tensor parallelism cuts it.

The plain model, tensor parallelism, the memory estimate and checkpoints all use this table, so that
a weight has one name and one cut everywhere. `shard_of` gives the shard of a rank; the boxes of a
shard are in `core/layout/boxes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from fivefold.core import FivefoldError, UnknownName
from fivefold.core.layout.splits import padded_vocab
from fivefold.core.model import (
    ADAPTER,
    ALL,
    MixerWeight,
    Mla,
    Moe,
    Shape,
    Split,
    Tuning,
    forward_flops,
    layer_flops,
    mixer_table,
    training_flops,
    unmatched,
)

if TYPE_CHECKING:
    from fivefold.core.layout.layout import Coord, Layout

# column: rows of the weight (its outputs) are split; vocab: the same, padded to a multiple of tp;
# row: columns (its inputs) are split; kv: rows by KV head, replicated where these are fewer than
# tp; whole: every tp rank has all of it; expert: stacked experts, which tp does not split.
Cut = Literal["column", "vocab", "row", "kv", "whole", "expert"]
# What a weight is to an optimizer, whatever its dims: biases of stacked experts have two.
# embedding: a table of rows that are used one by one; the LM head too, whose rows are tokens.
Role = Literal["matrix", "bias", "norm", "embedding"]


def decays(role: Role) -> bool:
    """Whether weight decay applies: norms and biases have no scale to lose."""
    return role in ("matrix", "embedding")


@dataclass(frozen=True)
class Weight:
    """One full weight of the model."""

    name: str
    shape: tuple[int, ...]
    block: str  # "embed", "blocks.{i}", "head" or "mtp.{j}"; the final norm belongs to "head"
    cut: Cut
    role: Role = "matrix"
    spread: bool = False  # replicated, but each tp rank uses it on its own heads only
    expert_dim: int | None = None  # of stacked experts, which dim 0 counts: the dim of their width
    frozen: bool = False  # never updated
    first: tuple[float, float] | None = None  # first values, evenly spaced along dim 0

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def expert(self) -> bool:
        """Whether it is of stacked experts."""
        return self.cut == "expert"


@dataclass(frozen=True)
class WeightShard:
    """A rank's shard of a weight: [start, stop) along `dim`, whose padded size is `size`.

    `copies` tp ranks have the same shard, of experts etp ranks. `partial`: they see different
    tokens, heads or widths, so the gradient of the shard is the sum over them.
    """

    dim: int | None  # None: all of it
    start: int
    stop: int
    size: int
    copies: int
    partial: bool
    inner: tuple[int, int, int] | None = None  # a second cut, of experts: dim, start, stop
    expert: bool = False

    @property
    def sum_axis(self) -> str:
        """The axis over which gradients of a partial shard are summed."""
        return "etp" if self.expert else "tp" if self.dim is None else "replica"


@lru_cache(maxsize=16)  # every stage of a job needs all of them
def weights(shape: Shape) -> tuple[Weight, ...]:
    """Every weight in forward order; a tied head is the embedding and is not listed again."""
    _refuse_unsupported(shape)
    return planned_weights(shape)


@lru_cache(maxsize=16)
def planned_weights(shape: Shape) -> tuple[Weight, ...]:
    """The same, also of a model that can only be planned."""
    tuning = shape.tuning
    return tuple(_all(shape) if tuning is None else _tuned(_all(shape), tuning))


@lru_cache(maxsize=64)
def computed_flops(shape: Shape, seq: int) -> float:
    """FLOPs per token that a step computes, recomputation apart: the numerator of MFU.

    A frozen weight has no weight gradient, and nothing below the first block that learns is
    differentiated.
    """
    if shape.tuning is None:
        return training_flops(shape, seq).total
    learned = [weight for weight in planned_weights(shape) if not weight.frozen]
    routed = 1.0 if shape.moe is None else shape.moe.top_k / shape.moe.experts
    gradients = adapters = 0.0
    for weight in learned:
        flops = 2.0 * weight.numel * (routed if weight.expert else 1.0)
        if ADAPTER in weight.name:
            adapters += flops
        elif weight.block != "embed" or shape.tied:  # a lookup multiplies nothing
            gradients += flops
    first = min(
        (_first_layer(weight.block, shape.layers) for weight in learned), default=shape.layers
    )
    forward = forward_flops(shape, seq)
    layers = [layer_flops(shape, i, seq) for i in range(first, shape.layers)]
    inputs = forward.head + forward.mtp + sum(layer.total + layer.scores for layer in layers)
    return forward.total + inputs + gradients + 3 * adapters


def _first_layer(block: str, layers: int) -> int:
    """The first layer that a gradient of this block passes through."""
    kind, _, number = block.partition(".")
    return {"embed": 0, "blocks": int(number or 0)}.get(kind, layers)


def tuned(shape: Shape, tuning: Tuning | None, fp8: bool = False) -> Shape:
    """The model of which only this learns; refuses parts that name nothing."""
    if tuning is None:
        return shape
    if fp8:
        raise FivefoldError(
            "lora or train_only with fp8: weights are rounded with others of the same matmul, and "
            "adapters are not rounded; use precision = bf16"
        )
    names = [weight.name for weight in planned_weights(replace(shape, tuning=None))]
    linears = [name.removesuffix(".weight") for name in names if Tuning(1).adapts(name)]
    if lost := unmatched(tuning.train_only, names):
        raise UnknownName("part of a weight's name in train_only", lost[0], _words(names))
    if tuning.targets != ALL and (lost := unmatched(tuning.targets, linears)):
        raise UnknownName("part of a linear's name in lora_targets", lost[0], _words(linears))
    return replace(shape, tuning=tuning)


def _words(names: Iterable[str]) -> list[str]:
    """The words of names, without numbers."""
    return sorted({word for name in names for word in name.split(".") if not word.isdigit()})


def buffers(shape: Shape) -> tuple[Weight, ...]:
    """What no optimizer updates: the biases of loss-free balancing, in float32."""
    moe = shape.moe
    if moe is None or not moe.bias:
        return ()
    routed = [(f"blocks.{i}", i) for i in range(shape.layers)]
    routed += [(f"mtp.{j}", shape.layers) for j in range(shape.mtp)]
    return tuple(
        Weight(f"{_prefix(block)}.mlp.router.bias", (moe.experts,), block, "whole", "bias")
        for block, i in routed
        if shape.is_moe_layer(i)
    )


def by_name(shape: Shape) -> dict[str, Weight]:
    """The weight of every parameter name; two names may mean the embedding.

    A last stage without the embedding has a copy of it: `head.weight` if the head is tied,
    `mtp.embed.weight` if only multi-token prediction looks up tokens.
    """
    named = {weight.name: weight for weight in planned_weights(shape)}
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
    if not weight.expert:
        return tp_shard(weight, shape, layout.tp, layout.sp, at.tp)
    count, etp = weight.shape[0] // layout.ep, layout.etp
    cut = (at.ep * count, (at.ep + 1) * count, weight.shape[0])
    if weight.expert_dim is None:  # of adapters, where each etp rank has its share of the width
        return WeightShard(0, *cut, copies=etp, partial=etp > 1, expert=True)
    width = weight.shape[weight.expert_dim] // etp
    inner = (weight.expert_dim, at.etp * width, (at.etp + 1) * width)
    return WeightShard(0, *cut, copies=1, partial=False, inner=inner, expert=True)


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
    yield Weight("embed.weight", (shape.vocab, shape.width), "embed", "vocab", "embedding")
    if shape.positions == "learned":
        yield Weight("embed.positions", (shape.max_seq, shape.width), "embed", "whole", "embedding")
    if shape.embedding_norm:
        yield from _norm(shape, "embed", "embed.norm")
    for i in range(shape.layers):
        yield from _layer(shape, i, f"blocks.{i}")
    yield from _norm(shape, "head", "norm")
    if not shape.tied:
        yield Weight("head.weight", (shape.vocab, shape.width), "head", "vocab", "embedding")
    for j in range(shape.mtp):
        block, sizes = f"mtp.{j}", (shape.width, 2 * shape.width)
        yield from _norm(shape, block, f"{block}.token_norm")
        yield from _norm(shape, block, f"{block}.hidden_norm")
        yield Weight(f"{block}.join.weight", sizes, block, "whole")
        yield from _layer(shape, shape.layers, block)
        yield from _norm(shape, block, f"{block}.norm")


def _tuned(rows: Iterable[Weight], tuning: Tuning) -> Iterator[Weight]:
    """The weights of a model of which only a part learns, with the adapters of its linears."""
    for weight in rows:
        yield replace(weight, frozen=not tuning.learns(weight.name))
        if tuning.adapts(weight.name):
            yield from _adapter(weight, tuning.rank)


def _adapter(linear: Weight, rank: int) -> Iterator[Weight]:
    """A reads the inputs, B makes the outputs, and each is cut where the linear is. The one that is
    not cut is used on a rank's own outputs or inputs only."""
    *stack, outputs, inputs = linear.shape
    name, reads = linear.name.removesuffix("weight"), linear.cut == "row"
    into, out = (*stack, rank, inputs), (*stack, outputs, rank)
    a = replace(linear, name=f"{name}lora.a", shape=into, frozen=False)
    b = replace(linear, name=f"{name}lora.b", shape=out, frozen=False)
    if linear.expert:
        width = linear.expert_dim
        yield replace(a, expert_dim=width if width == 2 else None)
        yield replace(b, expert_dim=width if width == 1 else None)
    elif linear.cut == "whole":
        yield from (a, b)
    else:
        yield a if reads else replace(a, cut="whole", spread=True)
        yield replace(b, cut="whole", spread=True) if reads else b


def _prefix(block: str) -> str:
    """The name prefix of a block's layer: an MTP block contains more than its layer."""
    return f"{block}.block" if block.startswith("mtp.") else block


def _layer(shape: Shape, i: int, block: str) -> Iterator[Weight]:
    name, after, mixes = _prefix(block), shape.outer_norms > 0, shape.of_layer(i)
    if shape.inner_norms:
        yield from _norm(shape, block, f"{name}.attention_norm")
    if mixes.own_mixer is not None:
        for row in mixer_table(mixes):
            yield from _mixer_weight(row, block, f"{name}.attention.{row.name}")
    elif shape.mla is None:
        yield from _attention(shape, block, f"{name}.attention")
    else:
        yield from _latent_attention(shape, shape.mla, block, f"{name}.attention")
    if after:
        yield from _norm(shape, block, f"{name}.attention_out_norm")
    if shape.inner_norms > 1:
        yield from _norm(shape, block, f"{name}.mlp_norm")
    if shape.moe is not None and shape.is_moe_layer(i):
        yield from _moe(shape, shape.moe, block, f"{name}.mlp")
    else:
        yield from _mlp(shape, block, f"{name}.mlp", shape.ffn, shape.mlp_bias)
    if after:
        yield from _norm(shape, block, f"{name}.mlp_out_norm")


_CUTS: dict[Split, Cut] = {"heads": "column", "kv_heads": "kv", "whole": "whole"}


def _mixer_weight(row: MixerWeight, block: str, name: str) -> Iterator[Weight]:
    """Of an own mixer, which uses on each tp rank what is whole for the heads of that rank."""
    spread = row.split == "whole"
    if row.reads == "nothing":
        # No linear: a table decays, a vector does not, and Muon updates neither.
        role: Role = "embedding" if len(row.shape) > 1 else "norm"
        cut = _CUTS[row.split]
        yield Weight(name, row.shape, block, cut, role, spread=spread, first=row.first)
        return
    sizes = (row.shape[0], row.shape[1])
    cut = "row" if row.reads == "mixed" else _CUTS[row.split]
    yield from _linear(block, name, sizes, cut, row.bias, spread)


def _attention(shape: Shape, block: str, name: str) -> Iterator[Weight]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    width, bias = shape.width, shape.qkv_bias
    yield from _linear(block, f"{name}.q", (queries, width), "column", bias)
    yield from _linear(block, f"{name}.k", (keys, width), "kv", bias)
    yield from _linear(block, f"{name}.v", (keys, width), "kv", bias)
    if shape.attention_gate:
        yield from _linear(block, f"{name}.gate", (queries, width), "column", bias)
    if shape.qk_norm == "head":
        for norm in ("q_norm", "k_norm"):
            size = (shape.head_dim,)
            yield Weight(f"{name}.{norm}.weight", size, block, "whole", "norm", spread=True)
    elif shape.qk_norm == "full":
        yield Weight(f"{name}.q_norm.weight", (queries,), block, "column", "norm")
        yield Weight(f"{name}.k_norm.weight", (keys,), block, "kv", "norm")
    if shape.sinks:
        yield Weight(f"{name}.sinks", (shape.heads,), block, "column", "bias")
    yield from _linear(block, f"{name}.out", (width, queries), "row", shape.out_bias)


def _latent_attention(shape: Shape, mla: Mla, block: str, name: str) -> Iterator[Weight]:
    """Each tp rank makes the latents of all tokens, and from them its own heads."""
    width, bias, queries = shape.width, shape.qkv_bias, shape.heads * shape.head_dim
    if mla.q_rank is None:
        yield from _linear(block, f"{name}.q", (queries, width), "column")
    else:
        sizes = (mla.q_rank, width)
        yield from _linear(block, f"{name}.q_down", sizes, "whole", bias, spread=True)
        yield _latent_norm(block, f"{name}.q_latent_norm", mla.q_rank)
        yield from _linear(block, f"{name}.q_up", (queries, mla.q_rank), "column")
    sizes = (mla.kv_rank + mla.rope_dim, width)
    yield from _linear(block, f"{name}.kv_down", sizes, "whole", bias, spread=True)
    yield _latent_norm(block, f"{name}.kv_latent_norm", mla.kv_rank)
    sizes = (shape.heads * (mla.nope_dim + mla.value_dim), mla.kv_rank)
    yield from _linear(block, f"{name}.kv_up", sizes, "column")
    yield from _linear(
        block, f"{name}.out", (width, shape.heads * mla.value_dim), "row", shape.out_bias
    )


def _latent_norm(block: str, name: str, size: int) -> Weight:
    return Weight(f"{name}.weight", (size,), block, "whole", "norm", spread=True)


def _mlp(shape: Shape, block: str, name: str, ffn: int, bias: bool) -> Iterator[Weight]:
    for part in ("gate", "up") if shape.gated else ("up",):
        yield from _linear(block, f"{name}.{part}", (ffn, shape.width), "column", bias)
    yield from _linear(block, f"{name}.down", (shape.width, ffn), "row", bias)


def _moe(shape: Shape, moe: Moe, block: str, name: str) -> Iterator[Weight]:
    width, into = shape.width, (moe.experts, moe.ffn, shape.width)
    yield Weight(f"{name}.router.weight", (moe.experts, width), block, "whole")
    if moe.biases:
        shift = f"{name}.router.shift"
        yield Weight(shift, (moe.experts,), block, "whole", "bias")
    for part in ("gate", "up") if shape.gated else ("up",):
        yield Weight(f"{name}.experts.{part}.weight", into, block, "expert", expert_dim=1)
        if moe.biases:
            bias = f"{name}.experts.{part}.bias"
            yield Weight(bias, into[:2], block, "expert", "bias", expert_dim=1)
    back = (moe.experts, width, moe.ffn)
    yield Weight(f"{name}.experts.down.weight", back, block, "expert", expert_dim=2)
    if moe.biases:
        yield Weight(f"{name}.experts.down.bias", back[:2], block, "expert", "bias")
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
    yield Weight(f"{name}.weight", sizes, block, cut, spread=spread)
    if bias:
        # A row-cut matmul is summed over tp before its bias is added: every rank has the full bias.
        cut = "whole" if cut == "row" else cut
        yield Weight(f"{name}.bias", sizes[:1], block, cut, "bias", spread=spread)


def _norm(shape: Shape, block: str, name: str) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (shape.width,), block, "whole", "norm")
    if shape.norm_bias:
        yield Weight(f"{name}.bias", (shape.width,), block, "whole", "bias")


def is_buildable(shape: Shape) -> bool:
    """Whether the model can be built, and not only planned."""
    return not _unsupported(shape)


def _unsupported(shape: Shape) -> list[str]:
    """The one place that says which models cannot be built; `plan` still estimates them."""
    missing = {
        "alibi positions": shape.positions == "alibi",
        "a norm after the embedding (embedding_norm)": shape.embedding_norm,
        "a qk_norm in latent attention": shape.mla is not None and shape.qk_norm != "none",
        "multi-token prediction with learned positions": shape.mtp > 0
        and shape.positions == "learned",
        "a recurrence beside attention": shape.hybrid is not None,
        "a gate after attention (attention_gate)": shape.attention_gate,
    }
    return [name for name, used in missing.items() if used]


def _refuse_unsupported(shape: Shape) -> None:
    if shape.hybrid is not None:
        raise FivefoldError(
            f"model {shape.name!r} is planned only: it mixes tokens by {shape.hybrid.mixer} in "
            "some layers and by attention in others, and a model that is built has one mixer for "
            "all layers; use a model with attention, such as qwen3-30b-a3b, or an own mixer"
        )
    if unsupported := _unsupported(shape):
        raise FivefoldError(
            f"model {shape.name!r} has {', '.join(unsupported)}: it can be planned but not built; "
            "build decoders with rotary or no positions, or learned ones without multi-token "
            "prediction, with or without norms of queries and keys, and with windows in all or "
            "some layers"
        )
