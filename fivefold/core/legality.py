"""Which layouts are legal, and what is offered instead of one that is not.

`problems` lists every broken rule with its way out, `nearest` finds legal layouts close by, `check`
raises both together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from fivefold.core.errors import FivefoldError, IllegalLayout
from fivefold.core.layout import Layout
from fivefold.core.neighbours import nearest
from fivefold.core.rules import Job, problems, sequence_unit
from fivefold.core.words import counted

if TYPE_CHECKING:
    from fivefold.core.shape import Shape


def check(layout: Layout, shape: Shape, **job: Unpack[Job]) -> None:
    """Refuse an impossible layout with every reason and the three nearest legal ones."""
    reasons = problems(layout, shape, **job)
    if not reasons:
        return
    world = job.get("gpus") or layout.world
    near = nearest(layout, shape, **job)
    ranks = [counted(one.world, "rank") for one in near]
    names = [
        str(one) + ("" if one.world == world else f"  ({count})")
        for one, count in zip(near, ranks, strict=True)
    ]
    raise IllegalLayout(str(layout), reasons, names)


def smallest_seq(layout: Layout, shape: Shape, at_least: int) -> int:
    """The shortest legal sequence of at least this many tokens."""
    unit = sequence_unit(layout, shape)
    seq = -(-at_least // unit) * unit
    if shape.positions == "learned" and seq > shape.max_seq:
        raise FivefoldError(
            f"{layout} needs sequences of a multiple of {unit}, so at least {seq}, but the model "
            f"has {shape.max_seq} learned positions: lower cp or tp"
        )
    return seq


def padded_vocab(vocab: int, tp: int) -> int:
    """The vocabulary that tp splits evenly; the padding never shows in the loss."""
    return -(-vocab // tp) * tp
