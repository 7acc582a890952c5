"""Shape: a model as numbers; `count.py` counts its parameters and FLOPs.

A `Shape` has everything that the plain model needs to be built and the planner needs to estimate
it. `models.py` makes one from a preset or a Hugging Face config. Two shapes are equal if their
numbers are, whatever their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from fivefold.core import MOST, MOST_LAYERS, BadFile, FivefoldError
from fivefold.core.model.hybrid import Hybrid, recurrent
from fivefold.core.model.mixers import ATTENTION, Mixer, mixer_notes, mixer_problems, own_mixer
from fivefold.core.model.rope import Rope
from fivefold.core.model.tuning import Tuning

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
