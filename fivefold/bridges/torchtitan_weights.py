"""TorchTitan's names of weights, in the folders of `torch.distributed.checkpoint` that it saves:
one table for both directions.

Read in its sources: `state_dict_adapter.py` of llama3 and qwen3, and `components/checkpoint.py`, in
0.2.2, in 0.3.0 and on main (August 2026, commit b5bcd76). From 0.3 on queries, keys and values are
in a module of their own, and the head has another name. Weights have their bare names, and states
of a full save are beside them, each kind with its prefix; a full save of 0.1 has a prefix before
weights too.

Its llama3 rotates pairs of neighbours in a head where Hugging Face, its qwen3 and we rotate halves:
rows of its queries and keys are in another order. A head that is tied is stored with the embedding
as a second tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import Weight, weights
from fivefold.core.model import Rope, Shape

METADATA = ".metadata"  # torch writes it last
OLD_PREFIX = "model."  # of weights in a full save of 0.1
# What a full save has besides weights, and the rotary table that 0.1 stored with them.
BESIDE = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.", "freqs_cis")
_WAY = "give the preset or the config.json of these weights, with --model"
_STEP = re.compile(r"step-(\d+)")
_BLOCK = {
    "attention_norm": "attention_norm",
    "attention.q_norm": "attention.q_norm",
    "attention.k_norm": "attention.k_norm",
    "attention.out": "attention.wo",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
}
_QKV = {"attention.q": "wq", "attention.k": "wk", "attention.v": "wv"}
# Keys of a model that its llama3 and qwen3 have too; every other one must have its usual value.
_SIZES = ("layers", "width", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_seq")
_COMMON = ("name", *_SIZES, "tied", "norm_eps", "rope_theta", "dropout", "embedding_dropout")
_SCALING = Rope("llama3", 8.0, 8192)  # of its llama3 up to 0.2.2, if nothing else is said


@dataclass(frozen=True)
class TitanNames:
    """The names of some versions."""

    title: str
    head: str
    qkv: str  # the module of queries, keys and values

    def of(self, name: str) -> str:
        """The name of the weight that we call `name`."""
        outer = {"embed.weight": "tok_embeddings.weight", "head.weight": self.head}
        if not name.startswith("blocks."):
            return outer.get(name, name)
        _, i, inner = name.split(".", 2)
        module, _, last = inner.rpartition(".")
        block = _BLOCK | {ours: f"{self.qkv}.{theirs}" for ours, theirs in _QKV.items()}
        return f"layers.{i}.{block[module]}.{last}"


VERSIONS = {
    "torchtitan": TitanNames("TorchTitan up to 0.2.2", "output.weight", "attention"),
    "torchtitan-main": TitanNames(
        "TorchTitan from 0.3 on", "lm_head.weight", "attention.qkv_linear"
    ),
}


@dataclass(frozen=True)
class TitanTensor:
    """One tensor of a folder: our `weight`, whose rows are in another order in so many `heads`."""

    weight: Weight
    heads: int  # 0: rows are in the same order


def titan_tensors(shape: Shape, names: TitanNames) -> dict[str, TitanTensor]:
    """Every tensor of a model by its name there."""
    refuse_others(shape, names)
    ours = {weight.name: weight for weight in weights(shape)}
    heads = {"attention.q.weight": shape.heads, "attention.k.weight": shape.kv_heads}
    paired = heads if shape.qk_norm == "none" else {}  # in llama3, not in qwen3
    tensors = {
        names.of(name): TitanTensor(weight, paired.get(name.split(".", 2)[-1], 0))
        for name, weight in ours.items()
    }
    return tensors | ({names.head: TitanTensor(ours["embed.weight"], 0)} if shape.tied else {})


def refuse_others(shape: Shape, names: TitanNames) -> None:
    """Refuse a model that is neither its llama3 nor its qwen3, with every key that differs."""
    is_qwen = shape.qk_norm == "head"
    plain = Shape(
        **{key: getattr(shape, key) for key in _COMMON},
        qk_norm="head" if is_qwen else "none",
        rope=shape.rope if shape.rope and shape.rope.kind == "llama3" and not is_qwen else None,
    )
    differ = [
        field.name
        for field in fields(Shape)
        if field.compare and getattr(shape, field.name) != getattr(plain, field.name)
    ]
    odd_heads = shape.heads * shape.head_dim != shape.width
    if odd_heads and not is_qwen and names is VERSIONS["torchtitan"]:
        differ.append("head_dim")
    if differ:
        differing = {key: getattr(shape, key) for key in differ}
        values = ", ".join(
            f"{key} = {value}" if isinstance(value, str | float | int | None) else key
            for key, value in differing.items()
        )
        raise FivefoldError(
            f"{shape.name} is neither a dense Llama (2 to 3) nor a dense Qwen3 as {names.title} "
            f"builds them ({values}), and only their DCP folders are read and written: use a "
            "Hugging Face folder, which TorchTitan loads with checkpoint.initial_load_in_hf and "
            "saves with checkpoint.last_save_in_hf"
        )


def notes_on(shape: Shape, names: TitanNames) -> list[str]:
    """What TorchTitan's model must be told to compute the same."""
    if shape.qk_norm == "head" or names is not VERSIONS["torchtitan"]:
        return []
    notes: list[str] = []
    rope = shape.rope or Rope("llama3", 1.0, _SCALING.original_seq)
    if rope != _SCALING:
        notes.append(
            "its llama3 scales rotary positions by 8 unless its model arguments say "
            f"rope_scaling_args=RoPEScalingArgs(scaling_factor={rope.factor}, "
            f"low_freq_factor={rope.low_freq}, high_freq_factor={rope.high_freq}, "
            f"original_max_position_embeddings={rope.original_seq})"
        )
    if shape.tied:
        notes.append(
            f"its llama3 ties no head: {names.head} is a copy of the embedding, which learns on "
            "its own there"
        )
    return notes


def checkpoint_in(folder: Path) -> Path | None:
    """The folder of the newest step, or the folder itself; None if it has no such checkpoint."""
    if (folder / METADATA).exists() or any(folder.glob("*.distcp")):
        return folder
    steps = {
        int(match[1]): path
        for path in folder.glob("step-*")
        if (match := _STEP.fullmatch(path.name)) and (path / METADATA).exists()
    }
    return steps[max(steps)] if steps else None


@dataclass(frozen=True)
class TitanKeys:
    """The names of a folder's version, and what it has before each of them."""

    names: TitanNames
    prefix: str


def keys_of(folder: Path, sizes: Mapping[str, tuple[int, ...]]) -> TitanKeys:
    """Which version wrote a folder with these tensors."""
    prefix = OLD_PREFIX if f"{OLD_PREFIX}tok_embeddings.weight" in sizes else ""
    new, old = VERSIONS["torchtitan-main"], VERSIONS["torchtitan"]
    is_new = f"{prefix}{new.head}" in sizes or any(f".{new.qkv}." in key for key in sizes)
    if f"{prefix}tok_embeddings.weight" not in sizes:
        example = f"; it has {min(sizes)} and others" if sizes else ""
        rule = f"has no tok_embeddings.weight, as models of TorchTitan have{example}"
        raise BadFile(str(folder), [f"{rule}: give a folder that TorchTitan has saved"])
    return TitanKeys(new if is_new else old, prefix)


def differences(
    shape: Shape, keys: TitanKeys, stored_sizes: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Tensors that are missing, of another shape, or unknown."""
    expected = titan_tensors(shape, keys.names)
    for name, tensor in expected.items():
        sizes = stored_sizes.get(f"{keys.prefix}{name}")
        if sizes is None and not (shape.tied and name == keys.names.head):
            yield f"{name} is missing, and {shape.name} has it: {_WAY}"
        elif sizes is not None and sizes != tensor.weight.shape:
            right_sizes = tensor.weight.shape
            yield f"{name} has shape {sizes}, but {shape.name} asks for {right_sizes}: {_WAY}"
    for key in stored_sizes:
        name = key.removeprefix(keys.prefix)
        if name not in expected and not key.startswith(BESIDE) and not name.startswith(BESIDE):
            yield f"{name} is not in {shape.name}: {_WAY}"
