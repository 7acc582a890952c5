"""The arguments that describe a model to Megatron-LM, as a shape and back.

A few things of a shape are fixed by the kind of model that `pretrain_gpt.py` trains; where a shape
has something else, the arguments do not describe it, and its name in our comment does.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fivefold.bridges.key_table import Flat, typed
from fivefold.bridges.target import FoundModel
from fivefold.core import FivefoldError
from fivefold.core.model import GATED_DELTA, Hybrid, Mla, Moe, Rope, Shape
from fivefold.core.model import presets as models

_USUAL_VOCABULARY = 128_000  # for a file that leaves it to a tokenizer
# Arguments, our keys and their types.
_SIZES: tuple[tuple[str, str, type], ...] = (
    ("num-layers", "layers", int),
    ("hidden-size", "width", int),
    ("ffn-hidden-size", "ffn", int),
    ("num-attention-heads", "heads", int),
    ("num-query-groups", "kv_heads", int),
    ("kv-channels", "head_dim", int),
    ("vocab-size", "vocab", int),
    ("max-position-embeddings", "max_seq", int),
    ("norm-epsilon", "norm_eps", float),
    ("rotary-base", "rope_theta", float),
    ("mtp-num-layers", "mtp", int),
)
_EXPERTS: tuple[tuple[str, str, type], ...] = (
    ("num-experts", "experts", int),
    ("moe-router-topk", "top_k", int),
    ("moe-ffn-hidden-size", "ffn", int),
    ("moe-shared-expert-intermediate-size", "shared_ffn", int),
)
_LATENTS: tuple[tuple[str, str, type], ...] = (
    ("q-lora-rank", "q_rank", int),
    ("kv-lora-rank", "kv_rank", int),
    ("qk-head-dim", "nope_dim", int),
    ("qk-pos-emb-head-dim", "rope_dim", int),
    ("v-head-dim", "value_dim", int),
)
_RECURRENCE: tuple[tuple[str, str, type], ...] = (
    ("linear-attention-freq", "attention_every", int),
    ("linear-num-value-heads", "heads", int),
    ("linear-num-key-heads", "key_heads", int),
    ("linear-value-head-dim", "head_dim", int),
    ("linear-key-head-dim", "key_dim", int),
    ("linear-conv-kernel-dim", "kernel", int),
)
_VARIANT = "experimental-attention-variant"
_GATED_DELTA_NET = ("gdn", "gated_delta_net")  # as it is called now, and before
# What --use-rope-scaling stands for, with the factor that it has if no other is given.
_SCALED = Rope("llama3", 8.0, 8192)
_ACTIVATIONS = {"swiglu": "swiglu", "squared-relu": "relu"}
_POSITIONS = {"rope": "rotary", "learned_absolute": "learned", "none": "none", "yarn": "rotary"}
_SWITCHES = (
    *("group-query-attention", "swiglu", "squared-relu", "qk-layernorm", "add-qkv-bias"),
    *("disable-bias-linear", "untie-embeddings-and-output-weights", "multi-latent-attention"),
    *("apply-layernorm-1p", "attention-output-gate", "moe-shared-expert-gate"),
)
_OTHERS = (
    *("normalization", "position-embedding-type", "moe-layer-freq", "moe-router-score-function"),
    *(
        "padded-vocab-size",
        "use-rope-scaling",
        "rope-scaling-factor",
        "rotary-percent",
        "rope-type",
    ),
    *("use-rotary-position-embeddings", "mtp-loss-scaling-factor", "rotary-scaling-factor"),
    *("moe-router-num-groups", "moe-router-group-topk", "moe-router-topk-scaling-factor"),
    *("moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-router-pre-softmax"),
    *("moe-router-enable-expert-bias", "make-vocab-size-divisible-by", "moe-router-dtype"),
    *("moe-router-bias-update-rate", "mscale", "mscale-all-dim", _VARIANT),
)
_NUMBERS = (*_SIZES, *_EXPERTS, *_LATENTS, *_RECURRENCE)
KNOWN = frozenset([*(row[0] for row in _NUMBERS), *_SWITCHES, *_OTHERS])


def model_arguments(shape: Shape) -> Flat:
    """What the arguments can say of a model."""
    flat: Flat = {theirs: getattr(shape, ours) for theirs, ours, _ in _SIZES}
    flat |= {"mtp-num-layers": shape.mtp or None, "rotary-base": int(shape.rope_theta)}
    flat |= {"group-query-attention": shape.kv_heads != shape.heads}
    flat |= {"normalization": "LayerNorm" if shape.norm == "layer" else "RMSNorm"}
    types = {"rotary": "rope", "learned": "learned_absolute"}
    flat["position-embedding-type"] = types.get(shape.positions, "none")
    flat |= {name: True for name, ours in _ACTIVATIONS.items() if shape.activation == ours}
    flat["qk-layernorm"] = shape.qk_norm != "none"
    flat["add-qkv-bias"] = shape.qkv_bias and not shape.mlp_bias
    flat["disable-bias-linear"] = not shape.mlp_bias
    flat["untie-embeddings-and-output-weights"] = not shape.tied
    flat["apply-layernorm-1p"] = shape.norm == "rms_offset"
    flat["attention-output-gate"] = shape.attention_gate
    if shape.rope is not None and replace(shape.rope, factor=_SCALED.factor) == _SCALED:
        flat |= {"use-rope-scaling": True, "rope-scaling-factor": shape.rope.factor}
    if shape.rotary_dim is not None:
        flat["rotary-percent"] = shape.rotary_dim / shape.head_dim
    if shape.hybrid is not None and shape.hybrid.mixer == GATED_DELTA:
        flat[_VARIANT] = _GATED_DELTA_NET[0]
        flat |= {theirs: getattr(shape.hybrid, ours) for theirs, ours, _ in _RECURRENCE}
    if shape.moe is not None:
        flat |= _expert_arguments(shape.moe, shape.layers)
    if shape.mla is not None:
        flat |= {"multi-latent-attention": True, "num-query-groups": None, "kv-channels": None}
        flat |= {theirs: getattr(shape.mla, ours) for theirs, ours, _ in _LATENTS}
        flat["group-query-attention"] = False
    return {name: value for name, value in flat.items() if value not in (None, False)}


def _expert_arguments(moe: Moe, layers: int) -> Flat:
    flat: Flat = {theirs: getattr(moe, ours) or None for theirs, ours, _ in _EXPERTS}
    flat["moe-router-score-function"] = moe.score
    flat["moe-shared-expert-gate"] = moe.shared_gated
    if moe.first_dense:
        flat["moe-layer-freq"] = f"([0]*{moe.first_dense}+[1]*{layers - moe.first_dense})"
    elif moe.every > 1:
        flat["moe-layer-freq"] = f"([0]*{moe.every - 1}+[1]*1)*{layers // moe.every}"
    return flat


def find_model(flat: Flat) -> FoundModel:
    """The shape that the arguments describe, as a text; None without layers, width and heads."""
    if any(flat.get(name) is None for name in ("num-layers", "hidden-size", "num-attention-heads")):
        return FoundModel(None, KNOWN)
    notes: list[str] = []
    shape = _shape(flat, notes)
    return FoundModel(models.to_text(shape), KNOWN, tuple(notes))


def _numbers(flat: Flat, keys: tuple[tuple[str, str, type], ...]) -> dict[str, Any]:
    rows = [row for row in keys if flat.get(row[0]) is not None]
    return {ours: typed(flat[theirs], kind, theirs) for theirs, ours, kind in rows}


def _shape(flat: Flat, notes: list[str]) -> Shape:
    fields = _numbers(flat, _SIZES)
    gated = bool(flat.get("swiglu"))
    fields.setdefault("ffn", (8 * fields["width"] // 3 if gated else 4 * fields["width"]))
    if not flat.get("group-query-attention") or "kv_heads" not in fields:
        fields["kv_heads"] = fields["heads"]
    fields.setdefault("head_dim", fields["width"] // max(1, fields["heads"]))
    if "padded-vocab-size" in flat:
        fields["vocab"] = typed(flat["padded-vocab-size"], int, "padded-vocab-size")
    if "vocab" not in fields:
        fields["vocab"] = _USUAL_VOCABULARY
        assumed = f"planned with {_USUAL_VOCABULARY:,}; say --set vocab=N"
        notes.append(f"the vocabulary is its tokenizer's: {assumed}")
    fields.setdefault("max_seq", typed(flat.get("seq-length", 4096), int, "seq-length"))
    biased = not flat.get("disable-bias-linear")
    fields |= {"mlp_bias": biased, "out_bias": biased}
    fields["qkv_bias"] = biased or bool(flat.get("add-qkv-bias"))
    rms = "rms_offset" if flat.get("apply-layernorm-1p") else "rms"
    fields["norm"] = rms if flat.get("normalization") == "RMSNorm" else "layer"
    fields["norm_bias"] = fields["norm"] == "layer"
    chosen = [ours for theirs, ours in _ACTIVATIONS.items() if flat.get(theirs)]
    fields["activation"] = chosen[0] if chosen else "gelu"
    old = "rope" if flat.get("use-rotary-position-embeddings") else "learned_absolute"
    kind = str(flat.get("position-embedding-type", old))
    if kind not in _POSITIONS:
        raise FivefoldError(
            f"position-embedding-type = {kind}: known here are {', '.join(_POSITIONS)}"
        )
    fields["positions"] = _POSITIONS[kind]
    fields["qk_norm"] = "head" if flat.get("qk-layernorm") else "none"
    fields["tied"] = not flat.get("untie-embeddings-and-output-weights")
    if flat.get("multi-latent-attention"):
        mla = Mla(
            **{"kv_rank": 32, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
            | _numbers(flat, _LATENTS)
        )
        fields |= {"mla": mla, "head_dim": mla.nope_dim + mla.rope_dim, "qk_norm": "none"}
        fields["kv_heads"] = fields["heads"]
    if flat.get("num-experts") is not None:
        fields["moe"] = _moe(flat, fields["ffn"])
    fields |= _other_attention(flat, fields["head_dim"])
    return Shape(name="megatron", **fields)


def _other_attention(flat: Flat, head_dim: int) -> dict[str, Any]:
    """Scaled positions, heads of which a part is rotated, gates, and linear attention in some
    layers."""
    fields: dict[str, Any] = {"attention_gate": bool(flat.get("attention-output-gate"))}
    if flat.get("use-rope-scaling"):
        factor = flat.get("rope-scaling-factor", _SCALED.factor)
        fields["rope"] = replace(_SCALED, factor=typed(factor, float, "rope-scaling-factor"))
    rotated = int(head_dim * typed(flat.get("rotary-percent", 1.0), float, "rotary-percent"))
    if rotated < head_dim:
        fields["rotary_dim"] = rotated
    variant = str(flat.get(_VARIANT, ""))
    if variant not in ("", *_GATED_DELTA_NET):
        raise FivefoldError(f"{_VARIANT} = {variant}: known here is {_GATED_DELTA_NET[0]}")
    if variant:
        sizes: dict[str, Any] = {"attention_every": 4, "kernel": 4, "heads": 32, "key_heads": 16}
        sizes |= {"head_dim": 128, "key_dim": 128}
        fields["hybrid"] = Hybrid(**(sizes | _numbers(flat, _RECURRENCE)))
    return fields


def _moe(flat: Flat, ffn: int) -> Moe:
    numbers: dict[str, Any] = {"top_k": 2, "ffn": ffn, **_numbers(flat, _EXPERTS)}
    numbers["shared"] = 1 if numbers.get("shared_ffn") else 0
    numbers["shared_gated"] = bool(flat.get("moe-shared-expert-gate"))
    score = str(flat.get("moe-router-score-function", "softmax"))
    text = str(flat.get("moe-layer-freq", "1")).replace(" ", "")
    if match := re.fullmatch(r"\(?\[0\]\*(\d{1,4})\+\[1\]\*(\d{1,4})\)?(?:\*(\d{1,4}))?", text):
        every = int(match[3] or 1) > 1
        numbers |= {"every": int(match[1]) + 1} if every else {"first_dense": int(match[1])}
    elif text.isdecimal() and int(text) > 1:
        numbers["every"] = int(text)
    sigmoid = score == "sigmoid"
    return Moe(**numbers, score="sigmoid" if sigmoid else "softmax", renormalise=sigmoid)
