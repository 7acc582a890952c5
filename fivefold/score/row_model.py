"""The model of a measured run, from the sizes of its row.

Rows seldom say whether an MLP is gated and whether the head is tied. Their number of parameters
tells both; without it, an MLP of four times the width is taken for an ungated one.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import cast, get_args

from fivefold.core import models
from fivefold.core.count import parameters
from fivefold.core.errors import UnknownName
from fivefold.core.shape import Activation, Moe, Shape
from fivefold.score.spelling import RowReader, spellings

GPT_VOCAB = 51_200  # GPT-2's vocabulary, padded as Megatron does, if a row does not say


def read_shape(reader: RowReader) -> Shape:
    """The model: a preset if the sizes of a row do not describe it, else these sizes."""
    model = reader.text("model")
    for pattern, name in spellings().models.items():
        if re.search(pattern, model, re.IGNORECASE):
            preset = models.load(name)
            mtp = preset.mtp if re.search(r"w/ MTP", model) else 0
            return replace(preset, mtp=mtp, max_seq=reader.integer("seq_len"))
    width, heads = reader.integer("hidden"), reader.integer("heads")
    plain = Shape(
        name=reader.text("id"),
        layers=reader.integer("layers"),
        width=width,
        heads=heads,
        kv_heads=reader.assumed_integer("kv_heads", heads, "as many as heads"),
        head_dim=reader.integer("head_dim", max(2, width // heads // 2 * 2)),
        ffn=reader.integer("ffn_hidden", 4 * width),
        vocab=reader.integer("vocab", GPT_VOCAB),
        max_seq=reader.integer("seq_len"),
    )
    if reader.row.get("experts") is not None:
        routed = Moe(reader.integer("experts"), reader.integer("topk"), plain.ffn)
        plain = replace(plain, moe=routed)
    for pattern, sizes in spellings().sizes.items():
        if re.search(pattern, model, re.IGNORECASE):
            reader.assume(f"attention of {model}: heads of {sizes.head_dim}, window {sizes.window}")
            plain = replace(
                plain,
                head_dim=sizes.head_dim,
                window=sizes.window,
                global_every=sizes.global_every,
            )
    return _finished(reader, plain)


def _finished(reader: RowReader, plain: Shape) -> Shape:
    """The shape with its activation and its head."""
    said = reader.row.get("activation")
    if said is not None and said not in get_args(Activation):
        raise UnknownName("activation", str(said), get_args(Activation))
    kinds = ("swiglu", "gelu") if said is None else (cast(Activation, said),)
    tied = (True, False) if reader.row.get("tied") is None else (bool(reader.row["tied"]),)
    shapes = [_with(reader, plain, *each) for each in product(kinds, tied)]
    if reader.row.get("ffn_hidden") is None:
        # A gated MLP of 8/3 of the width has as many parameters as one of 4 times it.
        shapes = [one for one in shapes if one.activation != "gelu"] or shapes
        of = shapes[0]
        reader.assume(f"ffn_hidden is not said: {of.ffn / of.width:.3g} x hidden, {of.activation}")
    known = reader.row.get("vocab") is not None
    if not known:
        reader.assume(f"vocab is not said: {GPT_VOCAB}")
    number = reader.row.get("params_b")
    if len(shapes) == 1:
        return shapes[0]
    if known and isinstance(number, int | float) and number > 0:
        return min(shapes, key=lambda one: abs(parameters(one).total - number * 1e9))
    return _assumed(reader, shapes)


def _with(reader: RowReader, plain: Shape, activation: Activation, tied: bool) -> Shape:
    gated = activation in ("swiglu", "geglu")
    ffn = plain.ffn
    if reader.row.get("ffn_hidden") is None and gated:
        ffn = -(-plain.width * 8 // (3 * 256)) * 256
    moe = None if plain.moe is None else replace(plain.moe, ffn=ffn)
    positions = "rotary" if gated else "learned"
    return replace(plain, activation=activation, tied=tied, positions=positions, ffn=ffn, moe=moe)


def _assumed(reader: RowReader, shapes: list[Shape]) -> Shape:
    """The likelier of several shapes: GPT's layers if the MLP has four times the width."""
    wide = [one.ffn == 4 * one.width and one.moe is None for one in shapes]
    likely = "gelu" if any(wide) else "swiglu"
    found = [one for one in shapes if one.activation == likely] or shapes
    if len({one.activation for one in shapes}) > 1:
        reader.assume(f"activation is not said: {found[0].activation}, by the width of the MLP")
    if len({one.tied for one in found}) > 1:
        found = [one for one in found if one.tied == (found[0].activation == "gelu")]
        reader.assume(f"tied is not said: {str(found[0].tied).lower()}, as is usual for the MLP")
    return found[0]
