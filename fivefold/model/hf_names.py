"""Hugging Face weights in and out: one table of names read in both directions.

The names are those on disk. A weight of ours lies in one tensor of theirs: under another name,
perhaps transposed (GPT-2 stores inputs × outputs), perhaps as some of its rows (GPT-2 joins
queries, keys and values). Stacked experts lie in one tensor for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.shape import Shape
from fivefold.core.weights import Weight, buffers, weights

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
EXPERT = "{}"  # stands for the number of an expert in a name
MOE = {
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": f"mlp.experts.{EXPERT}.gate_proj",
    "mlp.experts.up": f"mlp.experts.{EXPERT}.up_proj",
    "mlp.experts.down": f"mlp.experts.{EXPERT}.down_proj",
}
MIXTRAL = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": f"block_sparse_moe.experts.{EXPERT}.w1",
    "mlp.experts.up": f"block_sparse_moe.experts.{EXPERT}.w3",
    "mlp.experts.down": f"block_sparse_moe.experts.{EXPERT}.w2",
}
QWEN2_MOE = MOE | {
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
DEEPSEEK = MOE | {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_latent_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
}
# Of a layer behind the last one; its block has the names of any other.
AHEAD = {
    "token_norm": "enorm",
    "hidden_norm": "hnorm",
    "join": "eh_proj",
    "norm": "shared_head.norm",
}
# What such a layer has once more, as published, and the weight of ours that it copies.
AHEAD_COPIES = {"embed_tokens.weight": "embed.weight", "shared_head.head.weight": "head.weight"}
# What a family adds to the names of a Llama block, or spells otherwise.
LLAMA_LIKE: dict[str, dict[str, str]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": MOE,
    "olmoe": MOE,
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
}
# Causal masks and rotary tables that older files store beside the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class HfPlace:
    """Where one weight of ours lies: in `name`, transposed or not, from row `start` on.

    In the names of stacked experts, `EXPERT` stands for the number of each.
    """

    name: str
    transposed: bool = False
    start: int = 0  # of the rows after transposing

    def names(self, weight: Weight) -> list[str]:
        """The tensor of the whole weight, or one for each expert."""
        if EXPERT not in self.name:
            return [self.name]
        return [self.name.replace(EXPERT, str(expert)) for expert in range(weight.shape[0])]


def to_hf(shape: Shape, name: str) -> HfPlace:
    """The place of the weight or buffer with this global name."""
    if shape.family == "gpt2":
        return _gpt2_place(shape, name)
    if shape.family in LLAMA_LIKE:
        names = LLAMA_BLOCK | LLAMA_LIKE[shape.family]
        if name.startswith("mtp."):
            return HfPlace(_renamed_ahead(shape, name, names))
        return HfPlace(_renamed(name, LLAMA_ENDS, names, "model.layers"))
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
    expected |= {copy for copy, _ in _copies(shape)}
    for weight in (*weights(shape), *buffers(shape)):
        place = to_hf(shape, weight.name)
        names = place.names(weight)
        expected.update(names)
        missing = [name for name in names if name not in hf_state]
        problems += [f"{name} is missing: give all files of the model" for name in missing]
        if missing:
            continue
        parts = [_part(hf_state[name], place, weight) for name in names]
        asked = weight.shape if len(names) == 1 else weight.shape[1:]
        wrong = [name for name, part in zip(names, parts, strict=True) if part.shape != asked]
        asked = tuple(reversed(asked)) if place.transposed else asked
        problems += [
            f"{name} has shape {tuple(hf_state[name].shape)}, and the config asks for {asked}: "
            "give the config of these weights"
            for name in wrong
        ]
        if not wrong:
            state[weight.name] = parts[0] if EXPERT not in place.name else torch.stack(parts)
    extra = [name for name in hf_state if name not in expected and not name.endswith(BUFFERS)]
    problems += [f"{name} has no place in the model: check the config" for name in extra]
    if problems:
        raise BadFile(f"Hugging Face weights for {shape.name!r}", problems)
    return state


def state_to_hf(shape: Shape, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their names to contiguous tensors; a tied head is written once, as the embedding."""
    rows: dict[str, list[Tensor]] = {}
    transposed: set[str] = set()
    for weight in (*weights(shape), *buffers(shape)):
        place = to_hf(shape, weight.name)
        names, whole = place.names(weight), state[weight.name]
        parts = [whole] if EXPERT not in place.name else whole.unbind()
        for name, part in zip(names, parts, strict=True):
            rows.setdefault(name, []).append(part)
        if place.transposed:
            transposed.update(names)
    joined = {
        name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in rows.items()
    }
    out = {
        name: (whole.T if name in transposed else whole).contiguous()
        for name, whole in joined.items()
    }
    return out | {copy: out[name].clone() for copy, name in _copies(shape)}


def _copies(shape: Shape) -> Iterator[tuple[str, str]]:
    """Tensors that published files hold twice: the second name, and the first."""
    for j in range(shape.mtp):
        for copy, name in AHEAD_COPIES.items():
            ours = "embed.weight" if shape.tied else name
            yield f"model.layers.{shape.layers + j}.{copy}", to_hf(shape, ours).name


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
    _, i, inner = name.split(".", 2)
    return f"{blocks}.{i}.{_within_block(inner, block)}"


def _renamed_ahead(shape: Shape, name: str, block: Mapping[str, str]) -> str:
    """Layers of multi-token prediction are numbered behind the last one."""
    _, j, inner = name.split(".", 2)
    names = AHEAD if not inner.startswith("block.") else block
    return (
        f"model.layers.{shape.layers + int(j)}.{_within_block(inner.removeprefix('block.'), names)}"
    )


def _within_block(inner: str, names: Mapping[str, str]) -> str:
    module, _, last = inner.rpartition(".")
    return names[inner] if inner in names else f"{names[module]}.{last}"


def _with_prefix(shape: Shape, hf_state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """GPT-2's published files lack the `transformer.` that the package's own have."""
    if shape.family != "gpt2" or any(name.startswith("transformer.") for name in hf_state):
        return hf_state
    head = "lm_head.weight"
    return {name if name == head else f"transformer.{name}": t for name, t in hf_state.items()}
