"""NeMo Megatron-Bridge 0.7: overrides of a recipe, as words of `scripts/training/run_recipe.py`.

Keys as of August 2026 (commit 067f987). The recipe says the model; data parallelism is what the
other degrees leave of the ranks.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, cast

from fivefold.bridges import megatron
from fivefold.bridges.formats import options_of_words, python_table, shell_words
from fivefold.bridges.job_values import Values
from fivefold.bridges.key_table import Flat, Key, KeyChoice, Table
from fivefold.bridges.model_names import model_called, recipe_name
from fivefold.bridges.target import FoundModel, Sheet, Target
from fivefold.core.model import Shape

_MIXED = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8 tensorwise e5m2": "bf16_with_fp8_current_scaling_mixed",
    "fp8 blockwise e4m3": "bf16_with_fp8_subchannel_scaling_mixed",
    "fp8 mxfp8 e4m3": "bf16_with_mxfp8_mixed",
}
_FSDP = {"ddp.use_megatron_fsdp": True}
_STRATEGY = "ddp.data_parallel_sharding_strategy"
TABLE: Table = (
    Key("model.tensor_model_parallel_size", "tp", usual=1),
    Key("model.pipeline_model_parallel_size", "pp", usual=1),
    Key("model.context_parallel_size", "cp", usual=1),
    Key("model.expert_model_parallel_size", "ep", usual=1),
    Key("model.expert_tensor_parallel_size", "etp"),
    Key("ddp.num_distributed_optimizer_instances", "replicate", usual=1),
    Key("model.sequence_parallel", "sp", bool, usual=False),
    Key("model.cp_comm_type", "context", str, megatron.CONTEXTS, usual="zigzag"),
    Key(
        *("dist.use_tp_pp_dp_mapping", "order", bool),
        {"tp-cp-dp-pp": False, "tp-cp-pp-dp": True},
        usual="tp-cp-dp-pp",
    ),
    Key("model.pipeline_model_parallel_layout", "layout_text", str, spelling=megatron.STAGES),
    Key("model.virtual_pipeline_model_parallel_size", "virtual"),
    KeyChoice(
        ("zero", "gather"),
        {
            (0, None): {"ddp.use_distributed_optimizer": False},
            (1, None): {"ddp.use_distributed_optimizer": True},
            (2, None): {**_FSDP, _STRATEGY: "optim_grads"},
            (3, "microbatch"): {**_FSDP, _STRATEGY: "optim_grads_params"},
        },
    ),
    KeyChoice(("recompute",), *megatron.recompute_entries("model.", "_")),
    Key("mixed_precision", "number", str, _MIXED),
    Key("ddp.grad_reduce_in_fp32", "grad_dtype", bool, {"fp32": True, "bf16": False}),
    KeyChoice(("offload",), {"none": {}, "cpu": {"optimizer.optimizer_cpu_offload": True}}),
    Key("train.micro_batch_size", "microbatch_size"),
    Key("train.global_batch_size", "batch"),
    Key("dataset.seq_length", "seq", also=("model.seq_length", "dataset.sequence_length")),
    Key("train.train_iters", "steps"),
    Key("optimizer.optimizer", "optimizer", str, {"adamw": "adam", "sgd": "sgd"}, usual="adamw"),
    Key("optimizer.lr", "lr", float),
    Key("optimizer.weight_decay", "weight_decay", float),
    Key("optimizer.clip_grad", "clip", float),
    Key("scheduler.lr_decay_style", "lr_curve", str, megatron.CURVES),
    Key("scheduler.lr_warmup_iters", "warmup"),
    Key("rng.seed", "seed"),
)


def incoming(values: Values, flat: Flat) -> Values:
    """As Megatron's; a recipe without the key shards the optimizer."""
    ours = megatron.incoming(values, flat)
    if flat.get("ddp.use_distributed_optimizer") is None and ours.get("zero") is None:
        ours |= {"zero": 1, "gather": None}
    return ours


def extra_keys(_shape: Shape, values: Values) -> Flat:
    """What a run has that overlaps its collectives."""
    flat: Flat = {"ddp.overlap_grad_reduce": True}
    if values["zero"]:
        flat["ddp.overlap_param_gather"] = True
    if values["zero"] > 1:
        flat["checkpoint.ckpt_format"] = "fsdp_dtensor"
    if values["offload"] == "cpu":
        flat["optimizer.use_precision_aware_optimizer"] = True
    if values["lr_curve"] == "cosine":
        flat["optimizer.min_lr"] = values["lr"] / 10
    return flat


def write_script(sheet: Sheet) -> str:
    """The command, one override a line."""
    lines = ["#!/bin/bash", *(f"# {line}" for line in sheet.header)]
    start = f"torchrun --nproc-per-node {min(sheet.world, sheet.gpus_per_node)}"
    if sheet.nodes > 1:
        start += f" --nnodes {sheet.nodes} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
    recipe = f"--recipe {recipe_name(sheet.model)}_pretrain_config --mode pretrain"
    args = [
        start,
        f"scripts/training/run_recipe.py {recipe}",
        *(f"{name}={_word(name, value)}" for name, value in sheet.flat.items()),
    ]
    return "\n".join([*lines, " \\\n    ".join(args)]) + "\n"


def _word(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    if name.endswith("_modules"):
        return shlex.quote("[" + ",".join(text.split()) + "]")
    return shlex.quote(text)


def read_script(text: str) -> Flat:
    """Overrides and options of a script, or assignments of a Python file."""
    if re.search(r"^\s*(cfg|config|recipe)\.\w+\.\w+ *=", text, re.MULTILINE):
        return {key: _listed(value) for key, value in python_table(text, "the recipe").items()}
    args, slurm = shell_words(text)
    flat = options_of_words(args, frozenset(), frozenset())
    for word in args:
        match = re.fullmatch(r"([a-z_]+(?:\.[a-z_0-9]+)*)=(\S.*)", word)
        if match and ("." in match[1] or match[1] == "mixed_precision"):
            flat[match[1]] = _listed(match[2])
    return {**flat, **{f"slurm.{name.lstrip('-')}": value for name, value in slurm.items()}}


def _listed(value: Any) -> Any:
    """A list as words between spaces."""
    if isinstance(value, list):
        return " ".join(map(str, cast("list[Any]", value)))
    text = str(value)
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1].replace(",", " ").replace("'", "").replace('"', "")
    return value


def find_model(flat: Flat) -> FoundModel:
    """By `--model` or `--recipe`."""
    names = [str(flat[name]) for name in ("model", "recipe", "") if flat.get(name)]
    return FoundModel(model_called(names[0]) if names else None, frozenset({"model", "recipe", ""}))


BRIDGE = Target(
    name="bridge",
    title="Megatron-Bridge",
    suffix=".sh",
    table=TABLE,
    axes=megatron.MEGATRON.axes,
    schedules=megatron.MEGATRON.schedules,
    write=write_script,
    covers=megatron.MEGATRON.covers,
    impossible=megatron.impossible,
    outgoing=megatron.outgoing,
    incoming=incoming,
    extra_keys=extra_keys,
    find_model=find_model,
    neutral=(
        *megatron.NEUTRAL,
        *("mode", "ddp.overlap", "optimizer.min_lr", "checkpoint.", "logger.", "dataset.", "dist."),
        *("tokenizer.", "validation.", "profiling.", "train.eval", "train.manual_gc"),
        "optimizer.use_precision_aware_optimizer",
    ),
    yours=("dataset", "tokenizer", "checkpoint", "optimizer.lr", "train.train_iters"),
)
