"""Shape: a model as numbers, and its parameters and FLOPs.

A `Shape` has everything that the plain model needs to be built and the planner needs to estimate
it. `presets.py` makes one from a preset or a Hugging Face config. Two shapes are equal if their
numbers are, whatever their names.

Rope: how the rotation of positions is scaled for texts beyond the length of first training.

Parameters and FLOPs per token of a `Shape`, by category.

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

from fivefold.core import MOST, MOST_LAYERS, BadFile, FivefoldError
from fivefold.core.model.mixers import (
    ATTENTION,
    Hybrid,
    Mixer,
    mixer_cost,
    mixer_notes,
    mixer_problems,
    mixer_table,
    own_mixer,
    recurrent,
)
from fivefold.core.model.recompute import Recompute
from fivefold.core.model.tuning import Tuning

RopeKind = Literal["llama3", "yarn", "linear", "longrope"]


@dataclass(frozen=True)
class Rope:
    """How rotary positions are scaled beyond the length that a model was first trained on."""

    kind: RopeKind
    factor: float
    original_seq: int
    low_freq: float = 1.0  # llama3: wavelengths above original_seq / low_freq are fully scaled
    high_freq: float = 4.0  # llama3: wavelengths below original_seq / high_freq are kept
    beta_fast: float = 32.0  # yarn: rotations that mark the two ends of its ramp
    beta_slow: float = 1.0
    mscale: float = 0.0  # yarn, DeepSeek: 0 means unset
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None  # yarn, longrope: None computes it from `factor`
    truncate: bool = True  # yarn: the ends of its ramp are whole pairs
    short: tuple[float, ...] = ()  # longrope: what divides the frequency of each pair …
    long: tuple[float, ...] = ()  # … and in texts of more than original_seq tokens

    @property
    def sizes(self) -> dict[str, float]:
        """Numbers that must be above 0."""
        names = ("factor", "original_seq", "low_freq", "high_freq", "beta_fast", "beta_slow")
        return {name: getattr(self, name) for name in names}

    @property
    def counts(self) -> dict[str, float]:
        """Numbers that may be 0."""
        factors = {"mscale": self.mscale, "mscale_all_dim": self.mscale_all_dim}
        factor = self.attention_factor
        return factors if factor is None else factors | {"attention_factor": factor}

    @property
    def scale(self) -> float:
        """What rotated queries and keys are multiplied by."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_seq))
        if self.mscale and self.mscale_all_dim:  # DeepSeek
            return self.yarn_mscale(self.mscale) / self.yarn_mscale(self.mscale_all_dim)
        return self.yarn_mscale(1.0)

    def yarn_mscale(self, mscale: float) -> float:
        """YaRN's attention temperature for positions that are stretched by `factor`."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def problems(self, rotated_dim: int) -> Iterator[str]:
        """Why heads with so many rotated dims cannot have this scaling, sizes aside."""
        num_factors = rotated_dim // 2 if self.kind == "longrope" else 0
        for name, factors in (("short", self.short), ("long", self.long)):
            if len(factors) != num_factors:
                rule = f"longrope has one for each of {num_factors} pairs of a head"
                rule = rule if num_factors else f"leave them out with rope.kind = {self.kind}"
                yield f"rope.{name} has {len(factors)} factors: {rule}"
            if not all(math.isfinite(factor) and factor > 0 for factor in factors):
                yield f"rope.{name}: factors must be above 0 and finite"
        if self.kind == "longrope" and self.original_seq < 2:
            yield f"rope.original_seq = {self.original_seq}: longrope needs at least 2"


Activation = Literal["swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu"]
Norm = Literal["rms", "rms_offset", "layer"]
NormAt = Literal["before", "after", "both"]
Positions = Literal["rotary", "learned", "alibi", "none"]
QkNorm = Literal["none", "head", "full", "l2"]
Score = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]
WindowKind = Literal["sliding", "chunked"]


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: queries, keys and values pass through narrow latents."""

    kv_rank: int
    nope_dim: int  # part of a query/key head without positions
    rope_dim: int  # rotary part; its key is shared by all heads
    value_dim: int
    q_rank: int | None = None  # None: queries are projected directly

    def problems(self) -> Iterator[str]:
        """Every reason why this attention is impossible."""
        sizes = {"kv_rank": self.kv_rank, "nope_dim": self.nope_dim, "rope_dim": self.rope_dim}
        sizes |= {"value_dim": self.value_dim}
        if self.q_rank is not None:
            sizes["q_rank"] = self.q_rank
        yield from _out_of_range("mla.", sizes)


@dataclass(frozen=True)
class Moe:
    """Mixture of experts. `Shape.mlp_bias` says nothing of experts and router."""

    experts: int
    top_k: int
    ffn: int  # width of one expert
    shared: int = 0  # number of shared experts
    shared_ffn: int = 0  # width of all shared experts together
    shared_gated: bool = False  # their output is weighted by a sigmoid of the token (Qwen2-MoE)
    first_dense: int = 0  # leading layers without experts
    every: int = 1  # experts in each n-th layer only: n−1, 2n−1, … (Llama 4 Maverick: 2)
    score: Score = "softmax"
    renormalise: bool = False  # the chosen weights are made to sum to one
    scaling: float = 1.0  # of the routed experts' sum
    groups: int = 1  # group-limited routing: experts in groups …
    groups_kept: int = 1  # … of which a token may use so many
    group_score: GroupScore = "max"  # V2: the group's best expert; V3: the sum of its two best
    bias: bool = False  # loss-free balancing: a bias on the choice, a buffer and no parameter
    biases: bool = False  # experts and router have biases (gpt-oss)
    weigh_inputs: bool = False  # the weight multiplies an expert's input, not its output (Llama 4)

    def problems(self, layers: int) -> Iterator[str]:
        """Every reason why a model of this many layers cannot have these experts."""
        sizes = {"experts": self.experts, "top_k": self.top_k, "ffn": self.ffn, "every": self.every}
        sizes |= {"groups": self.groups, "groups_kept": self.groups_kept}
        counts = {"shared": self.shared, "shared_ffn": self.shared_ffn}
        counts |= {"first_dense": self.first_dense}
        wrong = [*_out_of_range("moe.", {**sizes, "scaling": self.scaling}, counts)]
        yield from wrong
        if not wrong:
            yield from self._contradictions(layers)

    def _contradictions(self, layers: int) -> Iterator[str]:
        if self.top_k > self.experts:
            yield f"moe.top_k = {self.top_k} exceeds moe.experts = {self.experts}: lower it"
        if (self.shared > 0) != (self.shared_ffn > 0):
            yield "moe.shared and moe.shared_ffn: give both or neither"
        group = self.experts // self.groups
        if self.experts % self.groups:
            rule = f"does not divide moe.experts = {self.experts}: use a divisor"
            yield f"moe.groups = {self.groups} {rule}"
        elif self.groups_kept > self.groups:
            yield f"moe.groups_kept = {self.groups_kept} exceeds moe.groups: keep {self.groups}"
        elif self.experts >= self.top_k > group * self.groups_kept:
            limit = f"{self.groups_kept} groups of {group}"
            yield f"moe.top_k = {self.top_k} exceeds the {limit} kept: lower it or keep more"
        if not any(self.in_layer(i) for i in range(layers)):
            yield (
                f"no layer has experts: moe.first_dense = {self.first_dense} and moe.every = "
                f"{self.every} need more than {layers} layers"
            )

    def in_layer(self, i: int) -> bool:
        """Whether layer i (from 0) has experts in place of its MLP."""
        return i >= self.first_dense and (i + 1) % self.every == 0


class LayerKind(NamedTuple):
    """What tells layers of one model apart: layers of one kind have the same sizes and FLOPs."""

    moe: bool
    full_attention: bool  # no window, where others have one
    recurrent: bool = False  # of a hybrid: without attention


@dataclass(frozen=True)
class Shape:
    """A decoder transformer. Impossible numbers raise one error with every problem."""

    name: str = field(compare=False)
    layers: int
    width: int
    heads: int
    kv_heads: int  # 1: multi-query; heads: multi-head
    head_dim: int  # of queries and keys; with MLA nope_dim + rope_dim
    ffn: int  # width of a dense MLP
    vocab: int
    max_seq: int
    family: str = field(default="llama", compare=False)  # whose weight names it has, if any
    source: str = field(default="", compare=False)  # where the numbers were published
    tied: bool = False  # the LM head is the input embedding
    window: int | None = None  # keys a query sees, itself included
    window_kind: WindowKind = "sliding"  # chunked: keys of the same block of `window` tokens
    global_every: int | None = None  # each n-th layer has no window, nor positions (Llama 4)
    global_rotary: bool = False  # such layers have positions (Gemma)
    nope_floor: int | None = None  # without them, queries grow with ⌊(position + 1) / floor⌋ …
    nope_scale: float = 0.1  # … by this, times its logarithm (Llama 4)
    norm: Norm = "rms"  # rms_offset: its weights are stored less 1 (Gemma)
    norm_at: NormAt = "before"  # of attention and of MLP: after them (OLMo 2), or both (GLM-4)
    norm_eps: float = 1e-5
    norm_bias: bool = False
    embedding_norm: bool = False  # a norm right after the embedding (BLOOM)
    scaled_embedding: bool = False  # times the root of the width (Gemma)
    activation: Activation = "swiglu"
    positions: Positions = "rotary"
    rope_theta: float = 10_000.0
    local_theta: float | None = None  # of layers with a window, which `rope` then does not scale
    rotary_dim: int | None = None  # dims of a head that are rotated, from the first; None: all
    rope_interleaved: bool = False  # rotate neighbouring pairs, not halves (DeepSeek, Llama 4)
    rope: Rope | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    score_dim: int | None = None  # scores are divided by its root; None: head_dim
    score_cap: float | None = None  # scores become cap · tanh(score / cap) (Gemma 2)
    logit_cap: float | None = None  # and logits
    attention_gate: bool = False  # a sigmoid of the token weighs what heads give (Qwen3-Next)
    sinks: bool = False  # a learned logit of each head takes a share of its softmax (gpt-oss)
    qk_norm: QkNorm = "none"  # head: one weight for all heads; full: over all heads; l2: no weight
    dropout: float = 0.0  # in training, of the embedding and of what is added to the residual
    embedding_dropout: float | None = None  # of the embedding, if it has another rate
    attention_dropout: float = 0.0  # in training, of the weights of attention
    parallel_block: bool = False  # attention and MLP side by side (PaLM)
    parallel_norms: int = 1  # of such a block: one for both, or one for each (GPT-NeoX)
    mixer: str = ATTENTION  # what mixes tokens: attention, or the name of a class of your own
    hybrid: Hybrid | None = None  # attention in some layers, and a recurrence in the others
    mla: Mla | None = None
    moe: Moe | None = None
    mtp: int = 0  # multi-token-prediction layers after the last one
    tuning: Tuning | None = None  # what learns; None: all of it. Set by the keys of a plan

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise BadFile(f"model {self.name!r}", problems)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a key of many caches, and it has many fields
        return hash(tuple(getattr(self, entry.name) for entry in fields(self) if entry.compare))

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: another process hashes texts otherwise."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @property
    def own_mixer(self) -> Mixer | None:
        """The user's class in the place of attention, if there is one."""
        return own_mixer(self.mixer)

    @property
    def gated(self) -> bool:
        """Whether an MLP has a gate besides its up projection: three matrices instead of two."""
        return self.activation in ("swiglu", "swiglu_clamped", "geglu", "geglu_tanh")

    @property
    def rotated_dim(self) -> int:
        """Dims of a head that rotary positions rotate."""
        if self.mla is not None:
            return self.mla.rope_dim
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def outgrown_at(self) -> int | None:
        """The length of a text after which all its tokens are rotated otherwise, if there is one:
        documents of packed rows are texts of their own."""
        if self.rope is None or self.rope.kind != "longrope" or self.positions != "rotary":
            return None
        return self.rope.original_seq

    @property
    def inner_norms(self) -> int:
        """Norms of a layer whose result attention or MLP reads."""
        if self.parallel_block:
            return self.parallel_norms
        return 0 if self.norm_at == "after" else 2

    @property
    def outer_norms(self) -> int:
        """Norms of a layer whose result is added to the residual."""
        return 0 if self.norm_at == "before" else 2

    @property
    def value_dim(self) -> int:
        """Width of one head's values."""
        return self.head_dim if self.mla is None else self.mla.value_dim

    @property
    def attended_dim(self) -> int:
        """Width of a head where queries, keys and values must have one width."""
        return max(self.head_dim, self.value_dim)

    @property
    def ends_share(self) -> bool:
        """Whether both ends of the model use the embedding: a tied head, or MTP layers."""
        return self.tied or self.mtp > 0

    @cached_property
    def num_moe_layers(self) -> int:
        """Layers with experts, multi-token-prediction layers not counted."""
        return sum(self.is_moe_layer(i) for i in range(self.layers))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts; MTP layers follow the others."""
        return tuple(i for i in range(self.layers + self.mtp) if self.is_moe_layer(i))

    def is_moe_layer(self, i: int) -> bool:
        """Whether layer i (from 0) has experts; MTP layers follow the rule of the last layer."""
        return self.moe is not None and self.moe.in_layer(min(i, self.layers - 1))

    def is_global_layer(self, i: int) -> bool:
        """Whether layer i (from 0) is one of those that have no window."""
        return self.global_every is not None and (i + 1) % self.global_every == 0

    @property
    def window_everywhere(self) -> int | None:
        """The window, if all layers have it: then no token sees further back, also in chunks."""
        return self.window if self.global_every is None else None

    def layer_kind(self, i: int) -> LayerKind:
        """The kind of layer i (from 0)."""
        return LayerKind(self.is_moe_layer(i), self.is_global_layer(i), self.is_recurrent(i))

    def is_recurrent(self, i: int) -> bool:
        """Whether layer i (from 0) of a hybrid is without attention; MTP layers as the last one."""
        every = None if self.hybrid is None else self.hybrid.attention_every
        i = min(i, self.layers - 1)
        return every is not None and self.mixer == ATTENTION and (i + 1) % every != 0

    def of_layer(self, i: int) -> Shape:
        """The model whose layers all mix tokens as layer i does: itself, but for a hybrid."""
        return self.of_mixer if self.is_recurrent(i) else self

    @property
    def of_mixer(self) -> Shape:
        """The model of a hybrid's layers without attention; itself, if it is no hybrid."""
        return self if self.hybrid is None or self.mixer != ATTENTION else recurrent(self)

    @property
    def drops(self) -> bool:
        """Whether training drops activations."""
        return bool(self.dropout or self.embedding_dropout or self.attention_dropout)

    @property
    def embedding_rate(self) -> float:
        """The dropout of the embedding."""
        return self.dropout if self.embedding_dropout is None else self.embedding_dropout

    @property
    def notes(self) -> list[str]:
        """What whoever trains it should know."""
        if self.outgrown_at is None:
            return self._attention_notes
        return [
            f"longrope: documents of more than {self.outgrown_at:,} tokens are rotated by its long "
            "factors, and all others by its short ones",
            *self._attention_notes,
        ]

    @property
    def _attention_notes(self) -> list[str]:
        if self.score_cap is not None:
            return [
                f"score_cap = {self.score_cap}: training computes attention with all scores in "
                "memory, because fused kernels here cap none; estimates say so"
            ]
        if not self.attention_dropout:
            return [*mixer_notes(self)]
        return [
            f"attention_dropout = {self.attention_dropout}: training computes attention with all "
            "scores in memory, because fused kernels draw masks of their own; estimates are for "
            "fused kernels, which attention_dropout=0 uses"
        ]

    def _problems(self) -> Iterator[str]:
        names = ("layers", "width", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_seq")
        sizes: dict[str, float] = {name: getattr(self, name) for name in names}
        sizes |= {"norm_eps": self.norm_eps, "rope_theta": self.rope_theta}
        keys = ("window", "global_every", "rotary_dim", "score_dim", "local_theta")
        keys += ("score_cap", "logit_cap", "nope_floor")
        optional: dict[str, float | None] = {name: getattr(self, name) for name in keys}
        sizes |= {name: size for name, size in optional.items() if size is not None}
        sizes |= {} if self.hybrid is None else self.hybrid.sizes
        wrong = [*_out_of_range("", sizes, {"mtp": self.mtp})]
        yield from wrong
        for key in ("dropout", "embedding_dropout", "attention_dropout"):
            if not 0 <= (getattr(self, key) or 0) < 1:
                yield f"{key} = {getattr(self, key)}: must be at least 0 and below 1"
        if not wrong:
            yield from self._contradictions()

    def _contradictions(self) -> Iterator[str]:
        if self.heads % self.kv_heads:
            yield (
                f"heads = {self.heads} is no multiple of kv_heads = {self.kv_heads}: "
                "choose KV heads that divide the heads"
            )
        if self.positions == "rotary" and self.mla is None and self.rotated_dim % 2:
            key = "head_dim" if self.rotary_dim is None else "rotary_dim"
            yield f"{key} = {self.rotated_dim}: rotary positions need an even one"
        if (rotated := self.rotary_dim) is not None and self.mla is not None:
            yield f"rotary_dim = {rotated}: leave it out with MLA, which has mla.rope_dim"
        elif rotated is not None and rotated > self.head_dim:
            yield f"rotary_dim = {rotated}: at most head_dim = {self.head_dim}"
        if self.parallel_norms not in ((1, 2) if self.parallel_block else (1,)):
            yield f"parallel_norms = {self.parallel_norms}: 1, or 2 with parallel_block"
        if self.parallel_block and self.norm_at != "before":
            yield f"norm_at = {self.norm_at}: a parallel_block has its norms before"
        if self.global_every is None and (self.global_rotary or self.local_theta is not None):
            yield "global_rotary and local_theta tell layers apart: set global_every too"
        if self.local_theta is not None and not self.global_rotary:
            yield "local_theta: layers without a window have no positions; set global_rotary"
        if self.nope_floor is not None and (self.global_every is None or self.global_rotary):
            yield "nope_floor: is of layers without positions; set global_every alone"
        for key in ("score_dim", "score_cap", "sinks", "attention_gate"):
            if self.mla is not None and getattr(self, key):
                yield f"{key} = {getattr(self, key)}: leave it out with MLA"
        if self.rope is not None:
            yield from _out_of_range("rope.", self.rope.sizes, self.rope.counts)
            yield from self.rope.problems(self.rotated_dim)
        if self.moe is not None:
            yield from self.moe.problems(self.layers)
        if self.mla is not None:
            yield from self.mla.problems()
            yield from self._mla_contradictions(self.mla)
        yield from self._mixer_problems()

    def _mixer_problems(self) -> Iterator[str]:
        try:
            yield from mixer_problems(self.of_mixer)
        except FivefoldError as unknown:
            yield str(unknown)

    def _mla_contradictions(self, mla: Mla) -> Iterator[str]:
        if self.head_dim != mla.nope_dim + mla.rope_dim:
            yield f"head_dim = {self.head_dim}: with MLA it is mla.nope_dim + mla.rope_dim"
        if self.kv_heads != self.heads:
            yield f"kv_heads = {self.kv_heads}: with MLA every head has its own, set {self.heads}"
        if mla.rope_dim % 2:
            yield f"mla.rope_dim = {mla.rope_dim}: rotary positions need an even one"


def _out_of_range(
    prefix: str, positive: Mapping[str, float], counts: Mapping[str, float] | None = None
) -> Iterator[str]:
    """Sizes above 0 and counts from 0; only whole numbers have an upper end."""
    lowest = {**dict.fromkeys(positive, "above 0"), **dict.fromkeys(counts or {}, "at least 0")}
    for name, size in {**positive, **(counts or {})}.items():
        most = MOST_LAYERS if name in ("layers", "mtp") else MOST
        is_int = isinstance(size, int)
        in_reach = size <= most if is_int else math.isfinite(size)
        if not in_reach or size < 0 or (size == 0 and name in positive):
            end = f" and at most {most:,}" if is_int else " and finite"
            yield f"{prefix}{name} = {size}: must be {lowest[name]}{end}"


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
