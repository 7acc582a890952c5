"""A large model at a size for a laptop, with the same divisibility: legal layouts stay legal."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count

from fivefold.core import count as counting
from fivefold.core.layout import Layout
from fivefold.core.shape import Mla, Moe, Shape

LARGEST = 4_000_000  # parameters up to which a model is verified as it is
_LAYERS = 4
_WIDTH = 64
_LEAST_FFN = 96
_LEAST_VOCAB = 192
_EXPERT_FFN = 32
_WINDOW = 20  # below the shortest sequence verified, so that it hides something
_MAX_SEQ = 2048


def is_large(shape: Shape) -> bool:
    """Whether eight processes on a laptop would rather not run it."""
    return counting.parameters(shape).total > LARGEST


def scale_down(shape: Shape, layout: Layout) -> Shape:
    """Fewer layers and narrower, with all heads.

    A tp that divides the heads divides MLP width and vocabulary here exactly when it does there.
    """
    heads = shape.heads
    common = math.gcd(shape.ffn, heads)
    ffn = next(
        common * n for n in count(-(-_LEAST_FFN // common)) if math.gcd(common * n, heads) == common
    )
    head_dim = 8 if heads <= 32 else 4
    mla = None if shape.mla is None else _latents(shape.mla, head_dim)
    return replace(
        shape,
        layers=min(shape.layers, max(_LAYERS, layout.pp * layout.chunks)),
        width=_WIDTH,
        head_dim=head_dim if mla is None else mla.nope_dim + mla.rope_dim,
        mla=mla,
        moe=None if shape.moe is None else _experts(shape.moe, layout),
        ffn=ffn,
        vocab=-(-_LEAST_VOCAB // heads) * heads + shape.vocab % heads,
        max_seq=min(shape.max_seq, _MAX_SEQ),
        window=None if shape.window is None else min(shape.window, _WINDOW),
    )


def _latents(mla: Mla, head_dim: int) -> Mla:
    q_rank = None if mla.q_rank is None else _WIDTH // 2
    return Mla(_WIDTH // 4, nope_dim=head_dim, rope_dim=4, value_dim=head_dim, q_rank=q_rank)


def _experts(moe: Moe, layout: Layout) -> Moe:
    """Fewer and narrower, as many a token, in as many groups; ep and etp divide them as before."""
    step = math.lcm(moe.groups, layout.ep)
    fewest = max(2 * moe.top_k, moe.groups * -(-moe.top_k // moe.groups_kept))
    shared_ffn = math.lcm(layout.tp, _EXPERT_FFN) if moe.shared else 0
    return replace(
        moe,
        experts=min(moe.experts, -(-fewest // step) * step),
        ffn=math.lcm(layout.etp, _EXPERT_FFN),
        shared_ffn=shared_ffn,
        first_dense=min(moe.first_dense, 1),
    )


def scaling_note(full: Shape, small: Shape) -> str:
    """What was changed, in words."""
    return (
        f"{full.name} is verified scaled down: {small.layers} of {full.layers} layers, width "
        f"{small.width} for {full.width}, heads of {small.head_dim} for {full.head_dim}, MLP width "
        f"{small.ffn} for {full.ffn}, vocabulary {small.vocab} for {full.vocab}; heads "
        f"({small.heads}, KV {small.kv_heads}) and divisibility by tp are the same"
        + ("" if full.moe is None or small.moe is None else _experts_note(full.moe, small.moe))
    )


def _experts_note(full: Moe, small: Moe) -> str:
    return (
        f"; {small.experts} experts for {full.experts}, of width {small.ffn} for {full.ffn}, "
        f"{small.top_k} for a token as before"
    )
