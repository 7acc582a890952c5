"""The model of a measured run, from the sizes of its row.

Rows seldom say whether an MLP is gated and whether the head is tied. Their number of parameters
tells both; without it, an MLP of four times the width is taken for an ungated one. What no size
tells (latents, shared experts, dense layers) is in the table `shape` of a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any, cast, get_args

from fivefold.core import UnknownName, tables
from fivefold.core.model import Activation, Moe, Shape, parameters
from fivefold.core.model import presets as models
from fivefold_score.spelling import RowReader, spellings

GPT_VOCAB = 51_200  # GPT-2's vocabulary, padded as Megatron does, if a row does not say


def read_shape(reader: RowReader) -> Shape:
    """The model by the sizes of a row and its table `shape`. Without that table, a row that is
    named like a preset has what its sizes do not describe, such as latents, from there."""
    keys: dict[str, Any] = dict(reader.row.get("shape") or {})
    base, model = keys.pop("base", None), reader.text("model")
    if reader.row.get("shape") is None:
        named = spellings().models.items()
        base = next((name for like, name in named if re.search(like, model, re.IGNORECASE)), None)
    if base is not None:
        preset = models.load(str(base))
        if reader.row.get("shape") is None:
            mtp = preset.mtp if re.search(r"w/ MTP", model) else 0
            preset = replace(preset, mtp=mtp)
            if preset.layers != reader.integer("layers", preset.layers):
                reader.assume(f"shape is not said: all but the sizes of the row is that of {base}")
        return _with_table(_resized(reader, preset), keys)
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
    if reader.row.get("shape") is not None:
        return _with_table(_finished(reader, plain), keys)
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


def _resized(reader: RowReader, preset: Shape) -> Shape:
    """A preset with the sizes that a row says; heads with latents have sizes of their own."""
    fields = {"layers": "layers", "width": "hidden", "heads": "heads", "vocab": "vocab"}
    fields |= {"max_seq": "seq_len"}
    if preset.mla is None:
        fields |= {"kv_heads": "kv_heads", "head_dim": "head_dim"}
    sizes = {key: reader.integer(name, getattr(preset, key)) for key, name in fields.items()}
    if preset.mla is not None:
        sizes["kv_heads"] = sizes["heads"]
    options = {
        key: reader.row[key] for key in ("activation", "tied") if reader.row.get(key) is not None
    }
    moe, inner = preset.moe, reader.integer("ffn_hidden", preset.ffn)
    if moe is None:
        sizes["ffn"] = inner
    else:
        counts = {"experts": reader.integer("experts", moe.experts)}
        counts |= {"top_k": reader.integer("topk", moe.top_k)}
        counts |= {"ffn": moe.ffn if inner == preset.ffn else inner}
        moe = replace(moe, **counts, first_dense=min(moe.first_dense, sizes["layers"] - 1))
    return replace(preset, **sizes, **options, moe=moe)


def _with_table(shape: Shape, keys: Mapping[str, Any]) -> Shape:
    """The shape with the keys of a row's table `shape`."""
    if not keys:
        return shape
    table = tables.table_of(shape)
    for key, value in keys.items():
        inner = isinstance(value, Mapping) and isinstance(table.get(key), Mapping)
        table[key] = {**table[key], **value} if inner else value
    latents: dict[str, Any] = table.get("mla") or {}
    counts: dict[str, Any] = keys.get("moe") or {}
    if latents:
        table["kv_heads"] = shape.heads
        table["head_dim"] = latents.get("nope_dim", 0) + latents.get("rope_dim", 0)
    if "shared" in counts and "shared_ffn" not in counts:
        table["moe"]["shared_ffn"] = counts["shared"] * table["moe"].get("ffn", 0)
    table = {key: value for key, value in table.items() if value is not None}
    return tables.build(Shape, table, "shape of the row")


def _finished(reader: RowReader, plain: Shape) -> Shape:
    """The shape with its activation and its head."""
    activation = reader.row.get("activation")
    if activation is not None and activation not in get_args(Activation):
        raise UnknownName("activation", str(activation), get_args(Activation))
    kinds = ("swiglu", "gelu") if activation is None else (cast(Activation, activation),)
    tied = (True, False) if reader.row.get("tied") is None else (bool(reader.row["tied"]),)
    shapes = [_with(reader, plain, *choice) for choice in product(kinds, tied)]
    if reader.row.get("ffn_hidden") is None:
        # A gated MLP of 8/3 of the width has as many parameters as one of 4 times it.
        shapes = [shape for shape in shapes if shape.activation != "gelu"] or shapes
        of = shapes[0]
        reader.assume(f"ffn_hidden is not said: {of.ffn / of.width:.3g} x hidden, {of.activation}")
    known = reader.row.get("vocab") is not None
    if not known:
        reader.assume(f"vocab is not said: {GPT_VOCAB}")
    number = reader.row.get("params_b")
    if len(shapes) == 1:
        return shapes[0]
    if known and isinstance(number, int | float) and number > 0:
        return min(shapes, key=lambda candidate: abs(parameters(candidate).total - number * 1e9))
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
    wide = [shape.ffn == 4 * shape.width and shape.moe is None for shape in shapes]
    likely = "gelu" if any(wide) else "swiglu"
    candidates = [shape for shape in shapes if shape.activation == likely] or shapes
    if len({shape.activation for shape in shapes}) > 1:
        reader.assume(
            f"activation is not said: {candidates[0].activation}, by the width of the MLP"
        )
    if len({shape.tied for shape in candidates}) > 1:
        candidates = [
            shape for shape in candidates if shape.tied == (candidates[0].activation == "gelu")
        ]
        reader.assume(
            f"tied is not said: {str(candidates[0].tied).lower()}, as is usual for the MLP"
        )
    return candidates[0]
