"""Parameters and FLOPs per token of a `Shape`, by category.

Parameters: `total` counts what published figures count, every trained weight once. A tied head is
counted in the embedding, learned positions belong to the embedding, the bias of loss-free balancing
is a buffer and no parameter, and multi-token-prediction layers are not part of the total. `active`
counts the same with only `top_k` of the experts; it includes the full input embedding.

FLOPs follow the convention of every MFU we print: 2 per active parameter and token in the forward
(with norms and biases, without the input embedding, with the head even if tied), twice that in the
backward; attention scores at half of the square, s/2 visible keys for the average token of a
sequence of s; recomputation never counts. Multi-token prediction is trained, so it counts, with one
pass through the shared head for each of its layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache

from fivefold.core.model.mixers import mixer_cost, mixer_table
from fivefold.core.model.recompute import Recompute
from fivefold.core.model.shape import LayerKind, Mla, Shape


@dataclass(frozen=True)
class Parameters:
    """Number of parameters by category, of a model or of some of its layers."""

    embedding: int = 0  # with learned positions
    attention: int = 0  # projections and their biases
    mlp: int = 0  # of dense layers
    router: int = 0
    experts: int = 0
    shared_experts: int = 0  # with their gate
    norms: int = 0  # with those inside attention
    head: int = 0  # 0 when tied
    mtp: int = 0  # in neither `total` nor `active`
    active_experts: int = 0  # those of `experts` that one token uses

    @property
    def total(self) -> int:
        """Every parameter once, without the MTP layers."""
        return sum(self.parts().values()) - self.mtp

    @property
    def active(self) -> int:
        """Parameters that one token uses, including the full input embedding."""
        return self.total - self.experts + self.active_experts

    def parts(self) -> dict[str, int]:
        """By category; the values sum to `total + mtp`."""
        names = (field.name for field in fields(self))
        return {name: getattr(self, name) for name in names if name != "active_experts"}

    def __add__(self, other: Parameters) -> Parameters:
        names = [field.name for field in fields(self)]
        return Parameters(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __mul__(self, times: int) -> Parameters:
        return Parameters(
            **{field.name: times * getattr(self, field.name) for field in fields(self)}
        )


@dataclass(frozen=True)
class Flops:
    """FLOPs per token by category."""

    attention: float = 0.0  # projections
    scores: float = 0.0  # queries × keys and weights × values, causal
    mlp: float = 0.0
    router: float = 0.0
    experts: float = 0.0
    shared_experts: float = 0.0
    norms: float = 0.0
    head: float = 0.0
    mtp: float = 0.0

    @property
    def total(self) -> float:
        """All categories together."""
        return math.fsum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """By category; the values sum to `total`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __add__(self, other: Flops) -> Flops:
        own, theirs = self.parts(), other.parts()
        return Flops(**{name: own[name] + theirs[name] for name in own})

    def __mul__(self, times: float) -> Flops:
        return Flops(**{name: times * flops for name, flops in self.parts().items()})


def parameters(shape: Shape) -> Parameters:
    """The full model: embedding, all layers, head and MTP layers."""
    total = embedding_parameters(shape) + head_parameters(shape)
    for i, times in layer_kinds(shape).items():
        total += layer_parameters(shape, i) * times
    return total + Parameters(mtp=shape.mtp * mtp_parameters(shape).total)


@cache
def layer_kinds(shape: Shape) -> dict[int, int]:
    """The first layer of each kind, and how many layers are of that kind."""
    first: dict[LayerKind, int] = {}
    kinds = [shape.layer_kind(i) for i in range(shape.layers)]
    for i, kind in enumerate(kinds):
        first.setdefault(kind, i)
    return {first[kind]: times for kind, times in Counter(kinds).items()}


@cache
def most_routed(shape: Shape, layers: int) -> int:
    """The most layers with experts among so many that follow one another."""
    routed = [shape.is_moe_layer(i) for i in range(shape.layers + shape.mtp)]
    return max(sum(routed[i : i + layers]) for i in range(len(routed)))


def embedding_parameters(shape: Shape) -> Parameters:
    """What comes before the first layer."""
    rows = shape.vocab + (shape.max_seq if shape.positions == "learned" else 0)
    return Parameters(
        embedding=rows * shape.width, norms=_norm(shape) if shape.embedding_norm else 0
    )


def head_parameters(shape: Shape) -> Parameters:
    """What comes after the last layer: the final norm, and the head unless it is tied."""
    return Parameters(norms=_norm(shape), head=0 if shape.tied else shape.vocab * shape.width)


@cache
def layer_parameters(shape: Shape, i: int) -> Parameters:
    """One layer, i from 0."""
    mixes = shape.of_layer(i)
    norms = _norm(shape) * (shape.inner_norms + shape.outer_norms) + _attention_norms(mixes)
    attention = _attention(mixes)
    if shape.moe is None or not shape.is_moe_layer(i):
        bias = shape.mlp_bias * ((2 if shape.gated else 1) * shape.ffn + shape.width)
        mlp = _mlp_matrices(shape, shape.ffn) + bias
        return Parameters(attention=attention, mlp=mlp, norms=norms)
    moe, expert = shape.moe, _mlp_matrices(shape, shape.moe.ffn)
    expert += shape.moe.biases * ((2 if shape.gated else 1) * shape.moe.ffn + shape.width)
    shared = _mlp_matrices(shape, moe.shared_ffn) + moe.shared_gated * shape.width
    return Parameters(
        attention=attention,
        router=(shape.width + moe.biases) * moe.experts,
        experts=moe.experts * expert,
        shared_experts=shared if moe.shared else 0,
        norms=norms,
        active_experts=moe.top_k * expert,
    )


def mtp_parameters(shape: Shape) -> Parameters:
    """One MTP layer: a layer like the last, three norms, and the projection that joins the hidden
    state and the token. It shares the model's embedding and head, which are counted there."""
    join = 2 * shape.width * shape.width
    last = layer_parameters(shape, shape.layers - 1)
    return last + Parameters(attention=join, norms=3 * _norm(shape))


def forward_flops(shape: Shape, seq: int) -> Flops:
    """FLOPs per token of one forward pass over sequences of `seq` tokens."""
    ends = embedding_parameters(shape).norms + head_parameters(shape).norms
    head = 2.0 * shape.vocab * shape.width
    total = Flops(head=head, norms=2.0 * ends)
    for i, times in layer_kinds(shape).items():
        total += layer_flops(shape, i, seq) * times
    extra = mtp_parameters(shape)
    mtp_flops = 2.0 * extra.active + _scores(shape, shape.layers - 1, seq) + head
    return total + Flops(mtp=shape.mtp * mtp_flops)


def layer_flops(shape: Shape, i: int, seq: int) -> Flops:
    """FLOPs per token of one forward pass through layer i."""
    sizes = layer_parameters(shape, i)
    return Flops(
        attention=2.0 * sizes.attention,
        scores=_scores(shape, i, seq),
        mlp=2.0 * sizes.mlp,
        router=2.0 * sizes.router,
        experts=2.0 * sizes.active_experts,
        shared_experts=2.0 * sizes.shared_experts,
        norms=2.0 * sizes.norms,
    )


def training_flops(shape: Shape, seq: int) -> Flops:
    """Model FLOPs per token of forward and backward: the numerator of MFU."""
    return forward_flops(shape, seq) * 3


def repeated_flops(shape: Shape, seq: int, stages: Iterable[tuple[range, Recompute]]) -> float:
    """FLOPs per token that backward computes again: what HFU counts beside model FLOPs. `stages`:
    the layers of each, with its rule."""
    flops_again = 0.0
    for layers, rule in stages:
        for i in layers:
            flops = layer_flops(shape, i, seq)
            experts = flops.router + flops.experts + flops.shared_experts
            flops_again += flops.attention * rule.repeats("attention") + flops.mlp * rule.repeats(
                "mlp"
            )
            flops_again += flops.scores * rule.attends_again + experts * rule.repeats("experts")
    return flops_again


def visible_keys(shape: Shape, i: int, seq: int) -> float:
    """Keys that the average token of a sequence attends to in layer i, at half of the square."""
    if shape.window is None or shape.is_global_layer(i) or shape.window >= seq:
        return seq / 2
    if shape.window_kind == "sliding":
        return shape.window - shape.window**2 / (2 * seq)
    blocks, remainder = divmod(seq, shape.window)
    return (blocks * shape.window**2 + remainder**2) / (2 * seq)


def _scores(shape: Shape, i: int, seq: int) -> float:
    shape = shape.of_layer(i)
    if shape.own_mixer is not None:
        return mixer_cost(shape, seq).flops
    per_key = 2.0 * shape.heads * (shape.head_dim + shape.value_dim)
    return per_key * visible_keys(shape, i, seq)


def _norm(shape: Shape) -> int:
    return shape.width * (2 if shape.norm_bias else 1)


def _mlp_matrices(shape: Shape, ffn: int) -> int:
    return (3 if shape.gated else 2) * shape.width * ffn


def _attention(shape: Shape) -> int:
    if shape.own_mixer is not None:
        rows = mixer_table(shape)
        return sum(math.prod(row.shape) + row.bias * row.shape[0] for row in rows)
    if shape.mla is not None:
        return _latent_attention(shape, shape.mla)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    into = queries * (1 + shape.attention_gate) + 2 * keys
    matrices = shape.width * (into + queries)
    biases = shape.qkv_bias * into + shape.out_bias * shape.width
    return matrices + biases + shape.sinks * shape.heads


def _latent_attention(shape: Shape, mla: Mla) -> int:
    """MLA. As in Hugging Face, only the projections into latents have a `qkv_bias`."""
    queries, latents = shape.heads * shape.head_dim, mla.kv_rank + mla.rope_dim
    to_query = shape.width * queries
    if mla.q_rank is not None:
        to_query = mla.q_rank * (shape.width + queries)
    from_latent = mla.kv_rank * shape.heads * (mla.nope_dim + mla.value_dim)
    out = shape.heads * mla.value_dim * shape.width
    bias = shape.qkv_bias * (latents + (mla.q_rank or 0)) + shape.out_bias * shape.width
    return to_query + shape.width * latents + from_latent + out + bias


def _attention_norms(shape: Shape) -> int:
    if shape.mla is not None:
        return shape.mla.kv_rank + (shape.mla.q_rank or 0)
    if shape.qk_norm == "head":
        return 2 * shape.head_dim
    if shape.qk_norm == "full":
        return (shape.heads + shape.kv_heads) * shape.head_dim
    return 0
