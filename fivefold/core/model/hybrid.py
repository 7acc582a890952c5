"""Hybrids: a recurrence mixes tokens in most layers, and attention in each n-th one.

A hybrid is planned only. Its layers are those of two models: `Shape.of_layer` gives the model whose
layers are all like one of them, and everything that counts a layer asks that one. So a recurrence
is an own mixer whose `mix` is missing: a class with a table of weights and a cost, which a reader
of configs names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fivefold.core import FivefoldError
from fivefold.core.model.mixers import Mixer, MixerCost, MixerTokens, MixerWeight

if TYPE_CHECKING:
    from fivefold.core.model.shape import Shape

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
