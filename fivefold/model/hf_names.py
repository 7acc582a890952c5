"""Hugging Face weights in and out: one table of names read in both directions.

Every weight of ours lies in exactly one tensor of theirs: under another name, perhaps transposed
(GPT-2 stores inputs × outputs), perhaps as some of its rows (GPT-2 joins queries, keys and values).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.shape import Shape
from fivefold.core.weights import Weight, weights

LLAMA_ENDS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm": "model.norm",
    "head.weight": "lm_head.weight",
}
LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
GPT2_ENDS = {
    "embed.weight": "transformer.wte.weight",
    "embed.positions": "transformer.wpe.weight",
    "norm": "transformer.ln_f",
    "head.weight": "lm_head.weight",
}
GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
# Causal masks and rotary tables that older files store beside the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class HfPlace:
    """Where one weight of ours lies: in `name`, transposed or not, from row `start` on."""

    name: str
    transposed: bool = False
    start: int = 0  # of the rows after transposing


def to_hf(shape: Shape, name: str) -> HfPlace:
    """The place of the weight with this global name."""
    if shape.family == "gpt2":
        return _gpt2_place(shape, name)
    if shape.family in LLAMA_LIKE:
        return HfPlace(_renamed(name, LLAMA_ENDS, LLAMA_BLOCK, "model.layers"))
    known = ", ".join(("gpt2", *LLAMA_LIKE))
    raise FivefoldError(
        f"model {shape.name!r} is of family {shape.family!r}, whose Hugging Face names are not "
        f"known: use a model of one of {known}"
    )


def state_from_hf(shape: Shape, hf_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names to tensors, views of theirs where possible; every problem in one error."""
    hf_state = _with_prefix(shape, hf_state)
    problems: list[str] = []
    state: dict[str, Tensor] = {}
    expected = {"lm_head.weight"} if shape.tied else set[str]()
    for weight in weights(shape):
        place = to_hf(shape, weight.name)
        expected.add(place.name)
        if place.name not in hf_state:
            problems.append(f"{place.name} is missing: give all files of the model")
            continue
        whole = hf_state[place.name]
        state[weight.name] = part = _part(whole, place, weight)
        if tuple(part.shape) != weight.shape:
            asked = tuple(reversed(weight.shape)) if place.transposed else weight.shape
            problems.append(
                f"{place.name} has shape {tuple(whole.shape)}, and the config asks for {asked}: "
                "give the config of these weights"
            )
    extra = [name for name in hf_state if name not in expected and not name.endswith(BUFFERS)]
    problems += [f"{name} has no place in the model: check the config" for name in extra]
    if problems:
        raise BadFile(f"Hugging Face weights for {shape.name!r}", problems)
    return state


def state_to_hf(shape: Shape, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their names to contiguous tensors; a tied head is written once, as the embedding."""
    rows: dict[str, list[Tensor]] = {}
    transposed: set[str] = set()
    for weight in weights(shape):
        place = to_hf(shape, weight.name)
        rows.setdefault(place.name, []).append(state[weight.name])
        if place.transposed:
            transposed.add(place.name)
    joined = {
        name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in rows.items()
    }
    return {
        name: (whole.T if name in transposed else whole).contiguous()
        for name, whole in joined.items()
    }


def _part(whole: Tensor, place: HfPlace, weight: Weight) -> Tensor:
    whole = whole.T if place.transposed else whole
    # A whole tensor is not narrowed: a wrong size must stay visible.
    fused = ".c_attn." in place.name
    return whole[place.start : place.start + weight.shape[0]] if fused else whole


def _gpt2_place(shape: Shape, name: str) -> HfPlace:
    hf_name = _renamed(name, GPT2_ENDS, GPT2_BLOCK, "transformer.h")
    linear = name.startswith("blocks.") and "norm" not in name
    thirds = {"q": 0, "k": 1, "v": 2}
    third = thirds.get(name.split(".")[-2], 0) if linear else 0
    transposed = linear and name.endswith(".weight")
    return HfPlace(hf_name, transposed, start=third * shape.heads * shape.head_dim)


def _renamed(name: str, ends: Mapping[str, str], block: Mapping[str, str], blocks: str) -> str:
    """By whole name, or by the module's name with `.weight` or `.bias` kept."""
    module, _, last = name.rpartition(".")
    if name in ends:
        return ends[name]
    if module in ends:
        return f"{ends[module]}.{last}"
    _, i, inner = module.split(".", 2)
    return f"{blocks}.{i}.{block[inner]}.{last}"


def _with_prefix(shape: Shape, hf_state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """GPT-2's published files lack the `transformer.` that the package's own have."""
    if shape.family != "gpt2" or any(name.startswith("transformer.") for name in hf_state):
        return hf_state
    head = "lm_head.weight"
    return {name if name == head else f"transformer.{name}": t for name, t in hf_state.items()}
