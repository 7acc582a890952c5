"""Megatron-LM core 0.20: the arguments of `pretrain_gpt.py`, in a script that torchrun starts.

Keys as of August 2026 (commit d98e8a6). Data parallelism is what the other degrees leave of the
ranks. The stages of a pipeline are written as `--pipeline-model-parallel-layout`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from fivefold.bridges.formats import NOTE, options_of_words, shell_words
from fivefold.bridges.job_values import Values
from fivefold.bridges.key_table import Flat, Key, KeyChoice, Spelling, Table
from fivefold.bridges.megatron_model import find_model, model_arguments
from fivefold.bridges.pipeline_layout import filled_stages, layout_text, parse_layout
from fivefold.bridges.target import Impossible, Sheet, Target, with_batch
from fivefold.core import FivefoldError
from fivefold.core.model import Recompute, Shape

_SEGMENTS = 64  # the most blocks of a segment of full recomputation
_MODULES = {"norm": "layernorm", "act": "moe_act", "mlp": "mlp", "experts": "moe"}
_OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
CURVES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}
CONTEXTS = {"zigzag": "p2p", "allgather": "allgather", "ulysses": "a2a"}


def _as_it_is(text: Any) -> Any:
    return text


def _stages_of(text: Any) -> str:
    return ",".join(map(str, filled_stages(parse_layout(str(text)).layers)))


STAGES = Spelling(_as_it_is, _stages_of)


def recompute_entries(prefix: str, dash: str) -> tuple[dict[str, Any], frozenset[str]]:
    """All rules that Megatron has, and those that only experts have."""

    def named(**keys: Any) -> dict[str, Any]:
        return {f"{prefix}recompute_{key}".replace("_", dash): value for key, value in keys.items()}

    entries: dict[str, Any] = {"none": {}}
    moe: set[str] = set()
    for size in range(1, 1 + len(_MODULES)):
        for chosen in combinations(_MODULES, size):
            rule = str(Recompute.parse("+".join(chosen)))
            modules = " ".join(_MODULES[module] for module in chosen)
            entries[rule] = named(granularity="selective", modules=modules)
            if {"act", "experts"} & {*chosen}:
                moe.add(rule)
    for blocks in range(1, 1 + _SEGMENTS):
        rule = str(Recompute(blocks=blocks))
        entries[rule] = named(granularity="full", method="uniform", num_layers=blocks)
    return entries, frozenset(moe)


def _numbers() -> dict[str, Any]:
    entries: dict[str, Any] = {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "fp32": {}}
    for scaling in ("tensorwise", "blockwise", "mxfp8"):
        for gradients, name in (("e5m2", "hybrid"), ("e4m3", "e4m3")):
            keys = {"bf16": True, "fp8-format": name, "fp8-recipe": scaling}
            entries[f"fp8 {scaling} {gradients}"] = keys
    return entries


_FSDP = {"use-megatron-fsdp": True}
TABLE: Table = (
    Key("tensor-model-parallel-size", "tp", usual=1),
    Key("pipeline-model-parallel-size", "pp", usual=1),
    Key("context-parallel-size", "cp", usual=1),
    Key("expert-model-parallel-size", "ep", usual=1),
    Key("expert-tensor-parallel-size", "etp"),
    Key("num-distributed-optimizer-instances", "replicate", usual=1),
    Key("sequence-parallel", "sp", bool, usual=False),
    Key("cp-comm-type", "context", str, CONTEXTS, usual="zigzag"),
    Key(
        *("use-tp-pp-dp-mapping", "order", bool),
        {"tp-cp-dp-pp": False, "tp-cp-pp-dp": True},
        usual="tp-cp-dp-pp",
    ),
    Key("pipeline-model-parallel-layout", "layout_text", str, spelling=STAGES),
    Key("num-virtual-stages-per-pipeline-rank", "virtual"),
    KeyChoice(
        ("zero", "gather"),
        {
            (0, None): {},
            (1, None): {"use-distributed-optimizer": True},
            (2, None): {**_FSDP, "data-parallel-sharding-strategy": "optim_grads"},
            (3, "microbatch"): {**_FSDP, "data-parallel-sharding-strategy": "optim_grads_params"},
        },
    ),
    KeyChoice(("recompute",), *recompute_entries("", "-")),
    KeyChoice(("number",), _numbers()),
    Key("grad-reduce-in-bf16", "grad_dtype", bool, {"fp32": False, "bf16": True}, usual="fp32"),
    KeyChoice(("offload",), {"none": {}, "cpu": {"optimizer-cpu-offload": True}}),
    Key("micro-batch-size", "microbatch_size"),
    Key("global-batch-size", "batch"),
    Key("seq-length", "seq"),
    Key("train-iters", "steps"),
    Key("optimizer", "optimizer", str, _OPTIMIZERS, usual="adamw"),
    Key("lr", "lr", float),
    Key("lr-decay-style", "lr_curve", str, CURVES, usual="linear"),
    Key("lr-warmup-iters", "warmup"),
    Key("weight-decay", "weight_decay", float),
    Key("clip-grad", "clip", float),
    Key("seed", "seed"),
)
FLAGS = frozenset(
    [
        *("sequence-parallel", "use-tp-pp-dp-mapping", "use-distributed-optimizer", "bf16", "fp16"),
        *("use-megatron-fsdp", "grad-reduce-in-bf16", "optimizer-cpu-offload", "swiglu"),
        *("overlap-grad-reduce", "overlap-param-gather", "group-query-attention", "qk-layernorm"),
        *("untie-embeddings-and-output-weights", "disable-bias-linear", "add-qkv-bias"),
        *(
            "multi-latent-attention",
            "use-mcore-models",
            "use-flash-attn",
            "no-masked-softmax-fusion",
        ),
        *("moe-grouped-gemm", "moe-permute-fusion", "use-rope-scaling", "delay-wgrad-compute"),
        *("overlap-moe-expert-parallel-comm", "accumulate-allreduce-grads-in-fp32", "mock-data"),
        *("use-rotary-position-embeddings", "recompute-activations", "moe-router-pre-softmax"),
        "use-precision-aware-optimizer",
    ]
)
LISTS = frozenset({"recompute-modules", "cp-comm-type", "data-path"})
NEUTRAL = (
    *("nproc-per-node", "nnodes", "node-rank", "master-", "rdzv-", "data-", "tokenizer-", "save"),
    *("load", "log-", "eval-", "tensorboard-", "wandb-", "distributed-", "split", "mock-data"),
    *("overlap-grad-reduce", "overlap-param-gather", "use-mcore-models", "transformer-impl"),
    *("ckpt-format", "min-lr", "exit-", "init-method-std", "adam-", "num-workers", "vocab-file"),
    *("merge-file", "timing-", "lr-wsd-", "moe-grouped-gemm", "moe-token-dispatcher-type", "no-"),
    *("use-flash-attn", "attention-backend", "accumulate-allreduce-grads-in-fp32", "async-"),
    *("job-name", "nodes", "ntasks", "gpus", "gres", "time", "partition", "account", "output"),
    *("error", "exclusive", "mem", "cpus-per-task", "container-", "attention-dropout"),
    *("hidden-dropout", "moe-permute-fusion", "max-restarts", "tee", "local-ranks-filter"),
    "use-precision-aware-optimizer",
)


def outgoing(values: Values, shape: Shape) -> Values:
    """With the global batch and the text of the pipeline."""
    flat = with_batch(values, shape)
    text = values["stage_layers"]
    layers = None if text is None else [int(count) for count in text.split(",")]
    flat["layout_text"] = None if layers is None else layout_text(layers, shape.mtp)
    flat["virtual"] = None
    if shape.moe is None:
        flat["etp"] = None  # where it is left out it is tp
    return flat


def incoming(values: Values, flat: Flat) -> Values:
    """Chunks from the stages, or from the number of virtual stages."""
    pp, stages = values.get("pp") or 1, values.pop("layout_text", None)
    virtual = values.pop("virtual", None)
    if stages is not None:
        count = stages.count(",") + 1
        if count % pp:
            rule = f"{count} stages of the pipeline layout are no multiple of pp {pp}"
            raise FivefoldError(f"{rule}: write as many for each rank")
        if virtual not in (None, count // pp):
            rule = f"{virtual} virtual stages and {count} stages of the layout on {pp} ranks"
            raise FivefoldError(f"{rule} contradict: leave one out")
        virtual = count // pp
    virtual = virtual or 1
    values |= {"stage_layers": stages, "chunks": virtual if pp > 1 else None}
    values["schedule"] = "interleaved" if virtual > 1 and pp > 1 else "1f1b"
    if values.get("etp") is None:
        values["etp"] = values.get("tp") or 1 if _has_experts(flat) else 1
    return values


def _has_experts(flat: Flat) -> bool:
    return any(flat.get(name) is not None for name in ("num-experts", "expert-model-parallel-size"))


def impossible(values: Values, _shape: Shape) -> Iterator[Impossible]:
    """What the arguments refuse together."""
    if values["offload"] == "cpu" and values["optimizer"] != "adamw":
        yield "offload", "cpu", [{"offload": "none"}]
    if values["optimizer"] == "muon" and values["zero"] > 1:
        yield "zero", values["zero"], [{"zero": 1, "gather": None}]
    elif values["zero"] > 1 and values["order"] != "tp-cp-dp-pp":  # Megatron-FSDP
        yield "order", values["order"], [{"order": "tp-cp-dp-pp"}, {"zero": 1, "gather": None}]


def extra_keys(_shape: Shape, values: Values) -> Flat:
    """What a run has that overlaps its collectives."""
    flat: Flat = {"overlap-grad-reduce": True}
    if values["zero"]:
        flat["overlap-param-gather"] = True
    if values["zero"] > 1:
        flat["ckpt-format"] = "fsdp_dtensor"
    if values["offload"] == "cpu":
        flat["use-precision-aware-optimizer"] = True
    if values["lr_curve"] == "cosine":
        flat["min-lr"] = values["lr"] / 10
    if values["lr_curve"] == "wsd":
        flat |= {
            "lr-wsd-decay-style": "linear",
            "lr-wsd-decay-iters": max(1, values["steps"] // 5),
        }
    if _shape.moe is not None:
        flat |= {"moe-grouped-gemm": True, "moe-token-dispatcher-type": "alltoall"}
    return flat


def words_of(flat: Flat) -> list[str]:
    """Keys as options of a command line."""
    args: list[str] = []
    for name, value in flat.items():
        if value is False:
            continue
        values = [] if value is True else str(value).split(" ") if name in LISTS else [str(value)]
        args.append(" ".join([f"--{name}", *(shlex.quote(argument) for argument in values)]))
    return args


def write_script(sheet: Sheet) -> str:
    """The command, one option a line."""
    lines = ["#!/bin/bash", *(f"# {line}" for line in sheet.header)]
    if sheet.values["tp"] * sheet.values["cp"] > 1 and sheet.values["zero"] < 2:
        lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=1")  # asked for below Blackwell
    start = f"torchrun --nproc-per-node {min(sheet.world, sheet.gpus_per_node)}"
    if sheet.nodes > 1:
        start += f" --nnodes {sheet.nodes} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
    args = [start, "pretrain_gpt.py", *words_of(sheet.flat)]
    return "\n".join([*lines, " \\\n    ".join(args)]) + "\n"


def read_script(text: str) -> Flat:
    """The options of a script, its Slurm directives below `slurm`."""
    args, slurm = shell_words(text)
    flat = options_of_words(args, FLAGS, LISTS)
    if flat.get("use-megatron-fsdp"):
        flat.setdefault("data-parallel-sharding-strategy", "optim_grads_params")
        flat.pop("use-distributed-optimizer", None)
    if "fp8-format" in flat and flat.get("fp8-recipe", "delayed") == "delayed":
        flat["fp8-recipe"] = "tensorwise"
        flat[f"{NOTE}fp8"] = "fp8 with delayed scaling is planned as tensorwise"
    _settle_modules(flat)
    return {**flat, **{f"slurm.{name.lstrip('-')}": value for name, value in slurm.items()}}


def _settle_modules(flat: Flat) -> None:
    """Modules in our order; those that are not here are named."""
    if flat.pop("recompute-activations", None):
        flat["recompute-granularity"] = "selective"
    if flat.get("recompute-granularity") != "selective":
        return
    names = str(flat.pop("recompute-modules", "core_attn")).split()
    known = [module for module in _MODULES.values() if module in names]
    if other := [name for name in names if name not in known]:
        rule = "kernels of attention save no scores" if other == ["core_attn"] else "not known here"
        flat[f"{NOTE}modules"] = f"recompute-modules {' '.join(other)}: {rule}"
    flat["recompute-modules"] = " ".join(known) or None
    if not known:
        del flat["recompute-granularity"]


def world_of_launch(flat: Flat) -> int | None:
    """Ranks by torchrun's options, or by Slurm's."""

    def number(*names: str) -> int | None:
        for name in names:
            match = re.search(r"(\d{1,6})\s*$", str(flat.get(name, "")))
            if match:
                return int(match[1])
        return None

    local = number("nproc-per-node", "slurm.ntasks-per-node", "slurm.gpus-per-node", "slurm.gres")
    nodes = number("nnodes", "slurm.nodes")
    if local == 1 and (gpus := number("slurm.gpus-per-node", "slurm.gres")):
        local = gpus  # one launcher a node
    if local is None:
        return number("slurm.ntasks", "slurm.gpus")
    return local * (nodes or 1)


MEGATRON = Target(
    name="megatron",
    title="Megatron-LM",
    suffix=".sh",
    table=TABLE,
    axes=frozenset({"replicate", "shard", "tp", "pp", "cp", "ep", "etp"}),
    schedules=("1f1b", "interleaved"),
    write=write_script,
    covers=("microbatches", "chunks", "stage_layers"),
    impossible=impossible,
    outgoing=outgoing,
    incoming=incoming,
    extra_keys=extra_keys,
    model_keys=model_arguments,
    find_model=find_model,
    neutral=NEUTRAL,
    yours=("--data-path", "--tokenizer-model", "--save-interval", "--lr", "--train-iters"),
)
