"""The names of weights in Hugging Face files: one table for import and export.

Each of our weights is in one tensor of theirs: under another name, maybe transposed (GPT-2 stores
inputs × outputs), maybe as some of its rows (GPT-2 fuses queries, keys and values; GPT-NeoX does so
head by head). Stacked experts are in one tensor for each expert. Where a family's names differ from
those of Llama, its entry in `WRITERS` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.core import FivefoldError
from fivefold.core.layout import Weight, buffers, weights
from fivefold.core.model import Shape
from fivefold.huggingface.config_export import WRITERS
from fivefold.huggingface.families import EXPERT

LLAMA_OUTER = {
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
# A layer of multi-token prediction: the modules around its block.
MTP_MODULES = {
    "token_norm": "enorm",
    "hidden_norm": "hnorm",
    "join": "eh_proj",
    "norm": "shared_head.norm",
}
# The weights that published files store a second time in such a layer.
MTP_COPIES = {"embed_tokens.weight": "embed.weight", "shared_head.head.weight": "head.weight"}
# Causal masks and rotary tables that older files store with the weights.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class HfLocation:
    """Where one of our weights is: in the tensor `name`, transposed or not, from row `start` on.

    A name with `EXPERT` in it stands for one tensor for each expert; `stacked`: one has all of
    them. Rows are in so many `groups` of equal size, in each of which some are of this weight, from
    `start` on.
    """

    name: str
    transposed: bool = False
    start: int = 0  # of the rows after transposing
    groups: int = 1
    stacked: bool = False

    def names(self, weight: Weight) -> list[str]:
        """The tensor of the full weight, or one for each expert."""
        if EXPERT not in self.name:
            return [self.name]
        return [self.name.replace(EXPERT, str(expert)) for expert in range(weight.shape[0])]

    def rows(self, tensor: Tensor, weight: Weight) -> Tensor:
        """Those of our weight."""
        values, dim = tensor.mT if self.transposed else tensor, int(self.stacked)
        size = weight.shape[dim] // self.groups
        if self.groups == 1:
            return values.narrow(dim, self.start, size)
        grouped = values.unflatten(dim, (self.groups, -1))
        return grouped.narrow(dim + 1, self.start, size).flatten(dim, dim + 1)


def to_hf(shape: Shape, name: str) -> HfLocation:
    """The location of the weight or buffer with this global name."""
    if shape.family not in WRITERS:
        raise FivefoldError(
            f"model {shape.name!r} is of family {shape.family!r}, whose Hugging Face names are not "
            f"known: use a model of one of {', '.join(WRITERS)}"
        )
    writer = WRITERS[shape.family]
    names = LLAMA_BLOCK | writer.block_names
    names |= writer.two_norms if shape.parallel_norms > 1 else {}
    if name.startswith("mtp."):
        return HfLocation(_renamed_mtp(shape, name, names))
    hf_name = _renamed(name, LLAMA_OUTER | writer.outer, names, writer.blocks)
    inner = name.split(".", 2)[-1].rpartition(".")[0] if name.startswith("blocks.") else ""
    stacked = inner.startswith(_EXPERTS) and EXPERT not in hf_name
    turned = stacked or (writer.transposed and inner in _LINEARS)
    transposed = turned and name.endswith(".weight")
    parts = fused_parts(names, inner)
    if not parts:
        return HfLocation(hf_name, transposed, stacked=stacked)
    heads = parts[0] in _QKV
    groups = shape.kv_heads if heads and writer.grouped else 1
    if stacked and writer.interleaved:
        groups = _num_rows(shape, inner)
    sizes = {part: _num_rows(shape, part) // groups for part in parts}
    start = sum(sizes[part] for part in parts[: parts.index(inner)])
    return HfLocation(hf_name, transposed, start, groups, stacked)


_QKV, _EXPERTS = ("attention.q", "attention.k", "attention.v"), "mlp.experts."
_INTO = [("mlp.gate", "mlp.up"), (f"{_EXPERTS}gate", f"{_EXPERTS}up")]
_LINEARS = (*_QKV, "attention.out", "mlp.gate", "mlp.up", "mlp.down")


def fused_parts(names: Mapping[str, str], inner: str) -> tuple[str, ...]:
    """The linears of a block in one tensor with this one, in order; none if it is alone."""
    for parts in (_QKV, *_INTO):
        if inner in parts:
            hf_names = {_within_block(f"{part}.weight", names) for part in parts}
            return parts if len(hf_names) == 1 else ()
    return ()


def fuses_linears(shape: Shape) -> bool:
    """Whether files of this family have several linears of a block in one tensor."""
    names = LLAMA_BLOCK | (WRITERS[shape.family].block_names if shape.family in WRITERS else {})
    parts = ("attention.q", "mlp.up", *([f"{_EXPERTS}up"] if shape.moe is not None else []))
    return any(fused_parts(names, part) for part in parts)


def _num_rows(shape: Shape, part: str) -> int:
    heads = {"attention.q": shape.heads, "attention.k": shape.kv_heads}
    if part in _QKV:
        return heads.get(part, shape.kv_heads) * shape.head_dim
    return shape.moe.ffn if shape.moe is not None and part.startswith(_EXPERTS) else shape.ffn


@dataclass(frozen=True)
class HfTensor:
    """One tensor in a file: the rows of our weights `parts`, one after the other in each of so many
    `groups`.

    Without parts it has no values.
    """

    sizes: tuple[int, ...]
    parts: tuple[str, ...]  # our names
    transposed: bool
    expert: int | None  # which of our stacked experts it is
    buffer: bool  # stored in float32, whatever the dtype of the weights
    groups: int = 1
    dim: int = 0  # of the rows


def hf_tensors(shape: Shape) -> dict[str, HfTensor]:
    """Every tensor of a model on disk by name, each once, in the order of the forward.

    Not those of `empty_tensors`.
    """
    tensors: dict[str, HfTensor] = {}
    buffer_names = {buffer.name for buffer in buffers(shape)}
    for weight in (*weights(shape), *buffers(shape)):
        location = to_hf(shape, weight.name)
        apart, dim = EXPERT in location.name, int(location.stacked)
        sizes = weight.shape[1:] if apart else weight.shape
        for i, name in enumerate(location.names(weight)):
            rows, parts = sizes[dim], (weight.name,)
            if name in tensors:  # fused: its rows follow those of another weight
                parts = (*tensors[name].parts, weight.name)
                rows = location.start * location.groups + sizes[dim]
            full = (*sizes[:dim], rows, *sizes[dim + 1 :])
            tensors[name] = HfTensor(
                sizes=(*full[:-2], full[-1], full[-2]) if location.transposed else full,
                parts=parts,
                transposed=location.transposed,
                expert=i if apart else None,
                buffer=weight.name in buffer_names,
                groups=location.groups,
                dim=dim,
            )
    return tensors


def empty_tensors(shape: Shape) -> dict[str, HfTensor]:
    """Tensors of shared experts of width 0, which the transformers package makes and asks for in a
    family with shared experts where the model has none."""
    names = WRITERS[shape.family].block_names if shape.family in WRITERS else {}
    if shape.moe is None or shape.moe.shared or "mlp.shared.up" not in names:
        return {}
    with_shared = replace(shape, moe=replace(shape.moe, shared=1, shared_ffn=1))
    empty: dict[str, HfTensor] = {}
    for weight in weights(with_shared):
        if ".mlp.shared." in weight.name:
            sizes = (shape.width, 0) if ".down." in weight.name else (0, shape.width)
            empty[to_hf(shape, weight.name).name] = HfTensor(sizes, (), False, None, False)
    return empty


def mismatches(
    shape: Shape, sizes: Mapping[str, tuple[int, ...]], unread: Collection[str] = ()
) -> Iterator[str]:
    """Tensors that are missing, of the wrong shape or unknown; `unread` ones are not checked."""
    expected = hf_tensors(shape)
    for name, tensor in expected.items():
        if name not in sizes and name not in unread:
            yield f"{name} is missing: give all files of the model"
        elif name in sizes and sizes[name] != tensor.sizes:
            yield (
                f"{name} has shape {sizes[name]}, but the config asks for {tensor.sizes}: "
                "give the config of these weights"
            )
    known = expected.keys() | dict(optional_copies(shape)).keys() | empty_tensors(shape).keys()
    for name in sizes:
        if name not in known and not name.endswith(BUFFERS):
            yield f"{name} is not in the model: check the config"


def weight_from_hf(
    shape: Shape, weight: Weight, read: Callable[[str], Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """One of our weights: a view of the tensor that is read where possible, in its dtype or in
    `dtype`."""
    location = to_hf(shape, weight.name)
    names = location.names(weight)
    if EXPERT not in location.name:
        part = location.rows(read(names[0]), weight)
        return part if dtype is None else part.to(dtype)
    # One expert at a time: a list of all would need the memory twice.
    stacked = read(names[0]).new_empty(weight.shape, dtype=dtype)
    for i, name in enumerate(names):
        stacked[i] = read(name)
    return stacked


def tensor_to_hf(tensor: HfTensor, read: Callable[[str], Tensor]) -> Tensor:
    """One tensor of a file from our weights, contiguous."""
    parts = [read(name) for name in tensor.parts] or [torch.empty(tensor.sizes)]
    full = parts[0] if len(parts) == 1 else _joined(parts, tensor.groups, tensor.dim)
    full = full if tensor.expert is None else full[tensor.expert]
    return (full.mT if tensor.transposed else full).contiguous()


def _joined(parts: Sequence[Tensor], groups: int, dim: int) -> Tensor:
    """Rows of several weights in one tensor."""
    grouped = [part.unflatten(dim, (groups, -1)) for part in parts]
    return torch.cat(grouped, dim=dim + 1).flatten(dim, dim + 1)


def published_copies(shape: Shape) -> Iterator[tuple[str, str]]:
    """Tensors that published files store twice: the second name, and the first."""
    for j in range(shape.mtp):
        for copy, name in MTP_COPIES.items():
            ours = "embed.weight" if shape.tied else name
            yield f"model.layers.{shape.layers + j}.{copy}", to_hf(shape, ours).name


def optional_copies(shape: Shape) -> Iterator[tuple[str, str]]:
    """Tensors that a file may store a second time: the second name, and the first."""
    yield from published_copies(shape)
    if shape.tied:
        yield "lm_head.weight", to_hf(shape, "embed.weight").name


def names_in_files(shape: Shape, stored_names: Iterable[str]) -> dict[str, str]:
    """From the names of this table to those in a file.

    GPT-2's published files lack the prefix `transformer.` of files from the transformers package.
    """
    names = list(stored_names)
    if shape.family != "gpt2" or any(name.startswith("transformer.") for name in names):
        return {name: name for name in names}
    head = "lm_head.weight"
    return {name if name == head else f"transformer.{name}": name for name in names}


def _renamed(name: str, outer: Mapping[str, str], block: Mapping[str, str], blocks: str) -> str:
    """By full name, or by the module's name followed by `.weight` or `.bias`."""
    module, _, last = name.rpartition(".")
    if name in outer:
        return outer[name]
    if module in outer:
        return f"{outer[module]}.{last}"
    _, i, inner = name.split(".", 2)
    return f"{blocks}.{i}.{_within_block(inner, block)}"


def _renamed_mtp(shape: Shape, name: str, block: Mapping[str, str]) -> str:
    """Layers of multi-token prediction are numbered after the last layer."""
    _, j, inner = name.split(".", 2)
    names = block if inner.startswith("block.") else MTP_MODULES
    within = _within_block(inner.removeprefix("block."), names)
    return f"model.layers.{shape.layers + int(j)}.{within}"


def _within_block(inner: str, names: Mapping[str, str]) -> str:
    module, _, last = inner.rpartition(".")
    return names[inner] if inner in names else f"{names[module]}.{last}"
