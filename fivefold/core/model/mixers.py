"""Own mixers: a block of the user's in the place of attention, described in one class.

A class has a table of its weights and a function of what its linears made. The table says how
tensor parallelism splits each weight; everything else follows from it: the shards, the collectives
around the linears, the sums of gradients, flat units, checkpoints, and the number of parameters.
The function is plain PyTorch on the heads that a rank has, and knows no rank.

A plan names a mixer. A name alone means something only in a process that has run the class; given
as `FILE.py:NAME` with `--set mixer`, the class is loaded from there.

Hybrids: a recurrence mixes tokens in most layers, and attention in each n-th one.

A hybrid is planned only. Its layers are those of two models: `Shape.of_layer` gives the model whose
layers are all like one of them, and everything that counts a layer asks that one. So a recurrence
is an own mixer whose `mix` is missing: a class with a table of weights and a cost, which a reader
of configs names.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from fivefold.core import FivefoldError

if TYPE_CHECKING:
    from fivefold.core.model.shape import Shape


ATTENTION = "attention"  # the name of what every model has without an own mixer
Split = Literal["heads", "kv_heads", "whole"]
Reads = Literal["input", "nothing", "mixed"]
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_OUT = "out"


@dataclass(frozen=True)
class MixerWeight:
    """One weight of a mixer.

    `reads`: a linear of the block's `input`, with a weight of (outputs, width); a tensor that `mix`
    uses as it is and that reads `nothing`; or the linear back to the residual, which reads what was
    `mixed`: it is called `out`, with a weight of (width, inputs).

    `split`: over tp by `heads`, by `kv_heads` (which are replicated where they are fewer than tp),
    or not at all: `whole`. Of `out` the inputs are split, of all others the first dim. The heads of
    a split dim follow one another.

    `first`: the first values of a tensor, evenly spaced from one number to the other along the
    first dim. Without it, vectors begin with 1 and all else is drawn as other weights are.
    """

    name: str
    shape: tuple[int, ...]
    split: Split
    reads: Reads = "input"
    bias: bool = False
    first: tuple[float, float] | None = None

    @property
    def split_size(self) -> int:
        """The size of the dim that is split."""
        return self.shape[1 if self.reads == "mixed" else 0]


class MixerCost(NamedTuple):
    """What `mix` costs in forward beside its linears: numbers for each token, of all heads, and the
    kernels of a microbatch."""

    flops: float
    saved: float = 0.0  # elements kept for backward, beside what it reads and returns
    moved: float = 0.0  # elements that its kernels read and write
    kernels: float = 0.0  # that it launches for a microbatch, whatever the number of heads


class MixerTokens(NamedTuple):
    """What `mix` knows about the tokens: tensors, which core does not name."""

    positions: Any  # (B, S): the index of each token in its document
    rotary: Any  # cos and sin, (B, S, 1, head_dim / 2) each, if positions are rotary; else None


class Mixer(ABC):
    """The base of own mixers: `class GatedScan(ff.Mixer, name="gated-scan")`.

    Heads must not see one another, and no token a later one. `rotates`: it uses the rotary tables,
    so that models with rotary positions may have it. `packs`: it begins anew where a position is 0,
    so that a row may have several documents.
    """

    name: ClassVar[str] = ""
    rotates: ClassVar[bool] = False
    packs: ClassVar[bool] = False

    def __init_subclass__(cls, *, name: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if not name:
            return  # a base of others
        if name == ATTENTION or name in _KNOWN:
            raise FivefoldError(
                f"there is a mixer {name!r} already: give this class another name, or begin a new "
                "process, because plans may have counted the weights of the first one"
            )
        cls.name = name
        _KNOWN[name] = cls

    @abstractmethod
    def table(self, shape: Shape) -> Sequence[MixerWeight]:
        """All weights of one layer of this model."""

    @abstractmethod
    def mix(self, shape: Shape, tensors: Mapping[str, Any], tokens: MixerTokens) -> Any:
        """What `out` reads, (B, S, inputs of this rank), of tensors by the names of the table:
        outputs of linears, (B, S, outputs of this rank), and tensors that read nothing."""

    def cost(self, shape: Shape, seq: int) -> MixerCost | None:
        """What planning counts for `mix` in rows of `seq` tokens; None if that is not known."""
        return None


_KNOWN: dict[str, type[Mixer]] = {}


def own_mixer(name: str) -> Mixer | None:
    """The mixer of this name; None for attention."""
    if name == ATTENTION:
        return None
    if name not in _KNOWN:
        known = ", ".join((ATTENTION, *sorted(_KNOWN)))
        raise FivefoldError(
            f"mixer {name!r} is not known in this process, which knows {known}: import the file "
            "of its class first, or give the class with --set mixer=FILE.py:NAME"
        )
    return _KNOWN[name]()


@lru_cache(maxsize=64)
def mixer_table(shape: Shape) -> tuple[MixerWeight, ...]:
    """The weights of a layer's mixer, `out` last; empty for attention."""
    mixer = own_mixer(shape.mixer)
    rows = () if mixer is None else tuple(mixer.table(shape))
    return tuple(sorted(rows, key=lambda row: row.reads == "mixed"))


def mixer_cost(shape: Shape, seq: int) -> MixerCost:
    """The figures of the class, or one pass over what linears make and read."""
    mixer = own_mixer(shape.mixer)
    cost = None if mixer is None else mixer.cost(shape, seq)
    if cost is not None:
        return cost
    linears = [row for row in mixer_table(shape) if row.reads != "nothing"]
    return MixerCost(0.0, 0.0, float(sum(row.split_size for row in linears)))


def mixer_notes(shape: Shape) -> Iterator[str]:
    """What a plan with this model should say about its estimate."""
    if (hybrid := shape.hybrid) is not None:
        yield (
            f"mixer {hybrid.mixer} in all layers but 1 of {hybrid.attention_every}: its time is "
            "from operations and bytes, at the speeds of matmuls and of memory; it was not "
            "measured, so that steps may be further from their estimates than is said here"
        )
        return
    mixer = own_mixer(shape.mixer)
    if mixer is None:
        return
    if mixer.cost(shape, shape.max_seq) is None:
        yield (
            f"mixer {shape.mixer} has no cost(): its linears are estimated, and of mix() one pass "
            "over what they make; FLOPs and memory inside of mix() are missing"
        )
    else:
        yield f"mixer {shape.mixer}: time and memory of mix() are by the figures of its cost()"


def mixer_problems(shape: Shape) -> Iterator[str]:
    """Every reason why a model cannot have its mixer."""
    mixer = own_mixer(shape.mixer)
    if mixer is None:
        return
    yield from _not_with(shape, mixer)
    rows = mixer_table(shape)
    for row in rows:
        yield from _row_problems(row, shape)
    names = [weight_row.name for weight_row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"mixer {shape.mixer}: two weights are called {twice[0]}; rename one"
    outs = [weight_row for weight_row in rows if weight_row.reads == "mixed"]
    if [weight_row.name for weight_row in outs] != [_OUT]:
        yield f"mixer {shape.mixer}: one weight reads what was mixed, and is called {_OUT}"
    if not any(weight_row.reads == "input" for weight_row in rows):
        yield f"mixer {shape.mixer}: no weight reads the input of the block; add one"
    if shape.kv_heads != shape.heads and not any(
        weight_row.split == "kv_heads" for weight_row in rows
    ):
        yield (
            f"kv_heads = {shape.kv_heads}: mixer {shape.mixer} splits nothing by KV heads; "
            f"set {shape.heads}"
        )


def _not_with(shape: Shape, mixer: Mixer) -> Iterator[str]:
    """Keys of attention, which a mixer would silently ignore."""
    used = {
        "mla": shape.mla is not None,
        "window": shape.window is not None,
        "global_every": shape.global_every is not None,
        "qk_norm": shape.qk_norm != "none",
        "qkv_bias": shape.qkv_bias,
        "out_bias": shape.out_bias,
        "attention_dropout": bool(shape.attention_dropout),
        "parallel_block": shape.parallel_block,
        "rotary_dim": shape.rotary_dim is not None,
        "score_dim": shape.score_dim is not None,
        "score_cap": shape.score_cap is not None,
        "attention_gate": shape.attention_gate,
        "sinks": shape.sinks,
    }
    for key in (key for key, is_used in used.items() if is_used):
        yield f"{key} is a key of attention, and the model has mixer {shape.mixer}: leave it out"
    if shape.positions == "alibi" or (shape.positions == "rotary" and not mixer.rotates):
        yield (
            f"positions = {shape.positions}: mixer {shape.mixer} does not use them; set none or "
            "learned, or let the class rotate and say rotates = True"
        )


def _row_problems(row: MixerWeight, shape: Shape) -> Iterator[str]:
    where, width = f"mixer {shape.mixer}, weight {row.name}", shape.width
    if not _NAME.fullmatch(row.name):
        yield f"{where}: a name has small letters, digits and _, and begins with a letter"
    if not row.shape or min(row.shape) < 1:
        yield f"{where}: its shape is {row.shape}; every size is at least 1"
        return
    if row.reads == "nothing" and row.bias:
        yield f"{where}: it is no linear and has no bias; list the bias as a weight of its own"
    if row.reads != "nothing" and row.first is not None:
        yield f"{where}: first is for tensors that read nothing; leave it out"
    if row.reads == "input" and row.shape[1:] != (width,):
        yield f"{where}: a linear of the input is (outputs, {width}), not {row.shape}"
    if row.reads == "mixed" and (len(row.shape) != 2 or row.shape[0] != width):
        yield f"{where}: the linear back is ({width}, inputs), not {row.shape}"
        return
    if row.reads == "mixed" and row.split != "heads":
        yield f"{where}: what was mixed is split by heads; say split = heads"
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}.get(row.split, 1)
    if row.split_size % heads:
        yield (
            f"{where}: {row.split_size} is no multiple of the {heads} {row.split} that split it; "
            "give each head as much as the others"
        )


def context_problem(shape: Shape, context: str, cp: int, tp: int) -> str | None:
    """Why the rows of a mixer cannot be split over cp like this; None if they can.

    Only Ulysses gives a rank all tokens of a row, for some of the heads. So every linear of the
    input must be split by heads, and each context rank of a tp rank needs some of them.
    """
    shape = shape.of_mixer
    mixer = own_mixer(shape.mixer)
    if mixer is None or cp == 1:
        return None
    if context != "ulysses":
        return (
            f"cp={cp} with context={context} is for attention, and mixer {shape.mixer} needs all "
            "tokens of a row in order: use context=ulysses, or cp=1"
        )
    few = shape.kv_heads % (tp * cp) != 0
    never = {"whole", "kv_heads"} if few else {"whole"}
    rows = (row for row in mixer_table(shape) if row.reads == "input" and row.split in never)
    if splits := [f"{row.name} ({row.split})" for row in rows]:
        return (
            f"cp={cp} gives every rank some of the heads for all tokens, but mixer {shape.mixer} "
            f"does not split like this: {', '.join(splits)}; use cp=1"
        )
    return None


def require_mixable(shape: Shape, *, fp8: bool, packed: bool, keeps_attention: bool) -> None:
    """Refuse what an own mixer cannot run with."""
    shape = shape.of_mixer
    mixer = own_mixer(shape.mixer)
    if mixer is None:
        return
    if fp8:
        raise FivefoldError(
            f"fp8 with mixer {shape.mixer}: only linears of attention and MLPs have rules for "
            "rounding; use precision = bf16"
        )
    if keeps_attention:
        raise FivefoldError(
            f"recompute that keeps attention with mixer {shape.mixer}: only kernels of attention "
            "run once; use recompute = full"
        )
    if packed and not mixer.packs:
        raise FivefoldError(
            f"packed with mixer {shape.mixer}: it would mix the documents of a row; leave packed "
            "out, or let mix() begin anew where positions are 0 and say packs = True"
        )


def refuse_mixer(shape: Shape, what: str) -> None:
    """Refuse what has no way to run an own mixer."""
    if shape.mixer != ATTENTION:
        raise FivefoldError(
            f"{what} with mixer {shape.mixer}: it knows attention only; train and verify the model"
        )


GATED_DELTA = "gated-delta"


@dataclass(frozen=True)
class Hybrid:
    """What mixes tokens in layers without attention, and the sizes of its states: of each head a
    matrix of key_dim x head_dim."""

    attention_every: int  # each n-th layer has attention
    heads: int  # of values
    key_heads: int  # of queries and keys; each has the same number of heads
    head_dim: int  # of values
    key_dim: int  # of queries and keys
    kernel: int  # tokens that the short convolution sees
    mixer: str = GATED_DELTA  # the class, by its name

    @property
    def sizes(self) -> dict[str, int]:
        """All numbers, by their keys of a model."""
        return {f"hybrid.{key}": size for key, size in asdict(self).items() if key != "mixer"}

    @property
    def keys(self) -> int:
        """Width of the queries, and of the keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of the values."""
        return self.heads * self.head_dim


@lru_cache(maxsize=16)
def recurrent(shape: Shape) -> Shape:
    """The model whose layers are all like those of a hybrid without attention."""
    hybrid = _hybrid(shape)
    return replace(
        shape,
        mixer=hybrid.mixer,
        heads=hybrid.key_heads,
        kv_heads=hybrid.key_heads,
        head_dim=hybrid.values // hybrid.key_heads,
        positions="none",
        rotary_dim=None,
        rope=None,
        qk_norm="none",
        **dict.fromkeys(("qkv_bias", "out_bias", "attention_gate"), False),
    )


class GatedDelta(Mixer, name=GATED_DELTA):
    """Gated DeltaNet (arXiv 2412.06464) as Qwen3-Next has it. Heads of one key are never split, so
    that key heads are the heads of this mixer."""

    packs = True
    chunk = 64  # tokens that are computed together, in Flash Linear Attention and `transformers`
    launches = 16.0  # kernels of Flash Linear Attention and of what is around them

    def table(self, shape: Shape) -> Sequence[MixerWeight]:
        hybrid, width = _hybrid(shape), shape.width
        sizes = {"q": hybrid.keys, "k": hybrid.keys, "v": hybrid.values}
        linears = {**sizes, "z": hybrid.values, "b": hybrid.heads, "a": hybrid.heads}
        return (
            *(MixerWeight(name, (size, width), "heads") for name, size in linears.items()),
            *(
                MixerWeight(f"{name}_conv", (size, hybrid.kernel), "heads", "nothing")
                for name, size in sizes.items()
            ),
            MixerWeight("decay", (hybrid.heads,), "heads", "nothing"),
            MixerWeight("decay_bias", (hybrid.heads,), "heads", "nothing"),
            MixerWeight("norm", (hybrid.head_dim,), "whole", "nothing"),
            MixerWeight("out", (width, hybrid.values), "heads", "mixed"),
        )

    def mix(self, shape: Shape, tensors: Mapping[str, Any], tokens: MixerTokens) -> Any:
        raise FivefoldError(f"mixer {self.name} is planned only: it has no mix()")

    def cost(self, shape: Shape, seq: int) -> MixerCost:
        """The delta rule in chunks. FLOPs of a token and head: products with the state (3 of
        key_dim x head_dim), and in its chunk keys with keys, queries with keys, two triangular
        solves, and weights with values, each at half of the square, as scores of attention are.

        Saved by Flash Linear Attention's kernel: queries and keys, which are repeated for each head
        before, values, the solved triangle, gates in float32; and the result for the gated norm.
        Moved: what the convolution, the norms and these kernels read and write, with a state for
        each chunk.
        """
        hybrid, chunk = _hybrid(shape), min(self.chunk, seq)
        heads, keys, values = hybrid.heads, hybrid.heads * hybrid.key_dim, hybrid.values
        state = hybrid.key_dim * hybrid.head_dim
        flops = 6 * state + chunk * (3 * hybrid.key_dim + 2 * hybrid.head_dim)
        triangle, gates = heads * chunk, 3 * heads
        convolved = 2 * (2 * hybrid.keys + hybrid.values)
        prepared = 2 * hybrid.keys + 6 * keys  # repeated, and normalised
        solved = 2 * keys + 2 * values + 4 * triangle + gates  # keys and values of a chunk
        states = 2 * keys + 2 * values + 2 * heads * state / chunk
        results = 2 * keys + 2 * values + 3 * values  # products with states, and the gated norm
        return MixerCost(
            flops=float(heads * flops),
            saved=float(2 * keys + 2 * values + triangle + gates),
            moved=float(convolved + prepared + solved + states + results),
            kernels=self.launches,
        )


def _hybrid(shape: Shape) -> Hybrid:
    hybrid = shape.hybrid
    if hybrid is None:
        raise FivefoldError(
            f"mixer {GATED_DELTA} has its sizes in hybrid: set hybrid.heads and the others"
        )
    if hybrid.heads % hybrid.key_heads:
        raise FivefoldError(
            f"hybrid.heads = {hybrid.heads} is no multiple of hybrid.key_heads = "
            f"{hybrid.key_heads}: choose key heads that divide the heads"
        )
    return hybrid
