"""TorchTitan: TOML up to 0.2.2, and a Python configuration on main (August 2026, commit b5bcd76).

FSDP2 shards weights, gradients and states, or nothing (DDP): ZeRO stages 1 and 2 are not there.
Weights that stay gathered until the end of a step are `fsdp_reshard_after_forward = never`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fivefold.bridges.accelerate import sharded_or_on_device
from fivefold.bridges.formats import Code, nested_of
from fivefold.bridges.job_values import Values
from fivefold.bridges.key_table import Flat, Key, KeyChoice, Table
from fivefold.bridges.model_names import model_called, titan_model, titan_of
from fivefold.bridges.target import FoundModel, Impossible, Sheet, Target, few_kv_heads, with_batch
from fivefold.core import FivefoldError, to_toml
from fivefold.core.model import Shape

SCHEDULES = {
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "gpipe": "GPipe",
    "bfs": "LoopedBFS",
    "zb-interleaved": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
_P = "parallelism."
_RESHARD = f"{_P}fsdp_reshard_after_forward"
_SHARDING = KeyChoice(
    ("zero", "gather"),
    {(0, None): {}, (3, "step"): {_RESHARD: "never"}, (3, "microbatch"): {_RESHARD: "always"}},
)
_DEGREES: Table = (
    Key(f"{_P}data_parallel_replicate_degree", "titan_replicate", usual=1),
    Key(f"{_P}data_parallel_shard_degree", "titan_shard"),
    Key(f"{_P}tensor_parallel_degree", "tp", usual=1),
    Key(f"{_P}pipeline_parallel_degree", "pp", usual=1),
    Key(f"{_P}context_parallel_degree", "cp", usual=1),
    Key(f"{_P}expert_parallel_degree", "ep", usual=1),
    Key(f"{_P}pipeline_parallel_schedule", "titan_schedule", str, SCHEDULES),
    Key(f"{_P}module_fqns_per_model_part", "parts", list),
    Key(f"{_P}pipeline_parallel_layers_per_stage", "per_stage"),
    _SHARDING,
    Key("training.steps", "steps"),
    Key("training.max_norm", "clip", float),
    Key("debug.seed", "seed"),
    Key("lr_scheduler.warmup_steps", "warmup"),
)
_CURVES = {
    "cosine": {"lr_scheduler.decay_type": "cosine", "lr_scheduler.min_lr_factor": 0.1},
    "linear": {"lr_scheduler.decay_type": "linear", "lr_scheduler.min_lr_factor": 0.0},
    "constant": {"lr_scheduler.decay_ratio": 0.0},
    "wsd": {"lr_scheduler.decay_ratio": 0.2, "lr_scheduler.decay_type": "linear"},
}
_MODE = "activation_checkpoint.mode"
_NUMBERS = {
    "bf16": {"training.mixed_precision_param": "bfloat16"},
    "fp32": {"training.mixed_precision_param": "float32"},
    "fp8 tensorwise e5m2": {
        "training.mixed_precision_param": "bfloat16",
        "model.converters": ["quantize.linear.float8"],
        "quantize.linear.float8.recipe_name": "tensorwise",
    },
    "fp8 mxfp8 e4m3": {
        "training.mixed_precision_param": "bfloat16",
        "model.converters": ["quantize.linear.mx"],
        "quantize.linear.mx.recipe_name": "mxfp8_cublas",
    },
}
TOML_TABLE: Table = (
    *_DEGREES,
    Key(f"{_P}expert_tensor_parallel_degree", "etp", usual=1),
    Key(f"{_P}pipeline_parallel_microbatch_size", "pipeline_rows"),
    KeyChoice(
        ("context",),
        {
            "zigzag": {f"{_P}context_parallel_rotate_method": "alltoall"},
            "allgather": {f"{_P}context_parallel_rotate_method": "allgather"},
        },
    ),
    KeyChoice(("recompute",), {"none": {_MODE: "none"}, "full": {_MODE: "full"}}),
    KeyChoice(("number",), _NUMBERS),
    KeyChoice(("offload",), {"none": {}, "cpu": {"training.enable_cpu_offload": True}}),
    KeyChoice(("lr_curve",), _CURVES),
    Key("training.local_batch_size", "local_rows"),
    Key("training.global_batch_size", "batch"),
    Key("training.seq_len", "seq"),
    Key("optimizer.name", "optimizer", str, {"adamw": "AdamW"}, usual="adamw"),
    Key("optimizer.lr", "lr", float),
    Key("optimizer.weight_decay", "weight_decay", float),
    Key("compile.enable", "compile", bool, {"auto": True, False: False}),
)
PYTHON_TABLE: Table = (
    *_DEGREES,
    Key(f"{_P}enable_sequence_parallel", "sp", bool, usual=True),
    Key(f"{_P}num_pp_microbatches", "pipeline_count"),
    KeyChoice(
        ("recompute",),
        {
            "none": {"activation_checkpoint": None},
            "full": {"activation_checkpoint": Code("FullAC.Config()")},
        },
    ),
    KeyChoice(("number",), {name: _NUMBERS[name] for name in ("bf16", "fp32")}),
    KeyChoice(("offload",), {"none": {}, "cpu": {"training.enable_cpu_offload": True}}),
    KeyChoice(("lr_curve",), _CURVES),
    Key("training.num_tokens_per_microbatch_per_dp_rank", "row_tokens"),
    Key("training.num_tokens_per_train_step", "step_tokens"),
    Key("training.max_context_length", "seq"),
    Key("optimizer", "optimizer_call", str),
    Key("compile.enable", "compile", bool, {"auto": True, False: False}),
)


def outgoing(values: Values, shape: Shape) -> Values:
    """Degrees as replicas and shards, batches as both versions count them, modules of stages."""
    flat = with_batch(values, shape)
    sharded, dp = values["zero"] > 0, values["replicate"] * values["shard"]
    flat["titan_replicate"] = values["replicate"] if sharded else dp
    flat["titan_shard"] = values["shard"] if sharded else 1
    pipeline = values["pp"] > 1
    flat["titan_schedule"] = values["schedule"] if pipeline else None
    flat["parts"] = _parts(values, "output") if pipeline else None
    flat["per_stage"] = None
    rows, count = values["microbatch_size"] or 1, values["microbatches"] or 1
    flat["pipeline_rows"] = rows if pipeline else None
    flat["pipeline_count"] = count if pipeline else None
    flat["local_rows"] = rows * count if pipeline else rows
    flat["row_tokens"] = rows * (values["seq"] or 0)
    flat["step_tokens"] = flat["batch"] * (values["seq"] or 0)
    call = f"default_adamw(lr={values['lr']!r}, weight_decay={values['weight_decay']!r})"
    flat["optimizer_call"] = Code(call)
    return flat


def outgoing_main(values: Values, shape: Shape) -> Values:
    """The head has another name on main."""
    parts = _parts(values, "lm_head") if values["pp"] > 1 else None
    return {**outgoing(values, shape), "parts": parts}


def more_main(_shape: Shape, values: Values) -> Flat:
    """Neither pipelines nor exchanges of experts can be captured as a graph."""
    return {"training.disable_cuda_graphs": True} if values["pp"] * values["ep"] > 1 else {}


def _parts(values: Values, head: str) -> list[list[str]]:
    """The modules of each stage, by TorchTitan's names."""
    counts = [int(count_text) for count_text in values["stage_layers"].split(",")]
    parts: list[list[str]] = []
    first = 0
    for count in counts:
        parts.append([f"layers.{i}" for i in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return parts


def incoming(values: Values, flat: Flat) -> Values:
    """Sharding, schedule and stages; the batch is completed when data parallelism is known."""
    replicate = values.pop("titan_replicate", None) or 1
    shard, cp = values.pop("titan_shard", None), values.get("cp") or 1
    values |= {"replicate": replicate, "shard": None if shard == -1 else shard or None}
    if shard == 1 and cp == 1:
        values |= {"zero": 0, "gather": None, "shard": replicate, "replicate": 1}
    elif values.get("zero") == 0:
        values |= {"zero": 3, "gather": None}
    if flat.get(_MODE) == "selective":
        values["recompute"] = "selective"
    pp = values.get("pp") or 1
    schedule = values.pop("titan_schedule", None) or "1f1b"
    values["schedule"] = schedule if pp > 1 else "1f1b"
    _read_stages(values, pp)
    seq = values.get("seq") or 2048
    for ours, theirs in (("local_rows", "row_tokens"), ("batch", "step_tokens")):
        tokens = values.pop(theirs, None)
        if tokens is not None and tokens > 0:
            if tokens % seq:
                raise FivefoldError(
                    f"{tokens} tokens are no multiple of {seq}, the length of a row"
                )
            values[ours] = tokens // seq
    rows = values.pop("local_rows", None)
    size, count = values.pop("pipeline_rows", None), values.pop("pipeline_count", None)
    if values.get("batch") == -1:
        values["batch"] = None
    if pp > 1 and count is not None:
        values |= {"microbatch_size": rows, "local_batch": (rows or 1) * count}
    elif pp > 1:
        values |= {"microbatch_size": size or 1, "local_batch": rows or 8}
    else:
        values |= {"microbatch_size": rows, "local_batch": rows}
    text = str(values.pop("optimizer_call", None) or "")
    for name in ("lr", "weight_decay"):
        match = re.search(rf"\b{name}=([0-9.e+-]+)", text)
        if match:
            values[name] = float(match[1])
    return values


def _read_stages(values: Values, pp: int) -> None:
    parts, per_stage = values.pop("parts", None), values.pop("per_stage", None)
    values |= {"stage_layers": None, "chunks": None}
    if pp == 1 or (parts is None and per_stage is None):
        return
    if parts is not None:
        counts = [sum(str(module).startswith("layers.") for module in part) for part in parts]
        if len(counts) % pp or 0 in counts:
            rule = f"module_fqns_per_model_part has layers {counts} for pp {pp}"
            raise FivefoldError(f"{rule}: give every rank as many stages, each with a layer")
        values |= {"stage_layers": ",".join(map(str, counts)), "chunks": len(counts) // pp}


def impossible(values: Values, shape: Shape) -> Iterator[Impossible]:
    """Weights are sharded over cp whenever there is cp, and on the host only if sharded. Experts
    are spread over ranks that shard, never over replicas."""
    if values["zero"] == 0 and values["offload"] != "none":
        yield "offload", values["offload"], sharded_or_on_device()
        return
    if values["zero"] == 0 and values["cp"] > 1:
        yield "zero", 0, [{"zero": 3, "gather": "step"}, {"zero": 3, "gather": "microbatch"}]
    ranks = (values["shard"] if values["zero"] else 1) * values["cp"] * values["tp"]
    if ranks % (values["ep"] * values["etp"]):
        dp = values["replicate"] * values["shard"]
        wide: Values = {"zero": 3, "replicate": 1, "shard": dp}
        changes = [{**wide, "gather": gather} for gather in ("step", "microbatch")]
        yield "ep", values["ep"], [*changes, {"ep": 1, "etp": 1}]
    yield from few_kv_heads(values, shape)


_RESET = {  # a configuration that is changed has values of its own
    "parallelism": "ParallelismConfig()",
    "training": "TrainingConfig()",
    "lr_scheduler": "LRSchedulersContainer.Config()",
}


def model_keys(shape: Shape) -> Flat:
    """The family and the flavor, if TorchTitan has the model."""
    known = titan_of(shape.name)
    if known is None or not known[1]:
        return {}
    return {"model.name": known[0], "model.flavor": known[1]}


def find_model(flat: Flat) -> FoundModel:
    """By family and flavor, or by the configuration that is changed."""
    notes, extra_keys = _remarks(flat)
    used = frozenset({"model.name", "model.flavor", "", *_RESET, *extra_keys})
    family, flavor = str(flat.get("model.name", "")), str(flat.get("model.flavor", ""))
    base = str(flat.get("", "")).rsplit(".", 1)[-1]
    model = titan_model(family, flavor) or titan_model("", base) or model_called(base or flavor)
    return FoundModel(model, used, notes)


def _remarks(flat: Flat) -> tuple[tuple[str, ...], set[str]]:
    """Keys that are read as something near, or that change nothing beside others."""
    notes: list[str] = []
    used = {_RESHARD} if flat.get(_RESHARD) == "default" else set[str]()
    converters = str(flat.get("model.converters") or "")
    if "quantize" not in converters:
        used |= {key for key in flat if key.startswith("quantize.")}
    if converters in ("['float8']", "['mx']"):
        notes.append(f"0.2.2 has no converter {converters}: write quantize.linear.… in its place")
    if flat.get(_MODE) == "selective":
        used |= {_MODE, "activation_checkpoint.selective_ac_option"}
        notes.append("its selective recomputation keeps every second matmul: planned as selective")
    return tuple(notes), used


def write_toml(sheet: Sheet) -> str:
    head = "".join(f"# {line}\n" for line in sheet.header)
    return head + to_toml(nested_of(sheet.flat))


def write_python(sheet: Sheet) -> str:
    """A function beside those of `config_registry.py`."""
    known = titan_of(sheet.model)
    family, _, base = known or ("llama3", "", "llama3_debugmodel")
    base = base or f"{family}_debugmodel"
    lines = [f"# {line}" for line in sheet.header]
    lines.append("from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw")
    lines.append("from torchtitan.config import ParallelismConfig, TrainingConfig")
    if "activation_checkpoint" in sheet.flat:
        lines.append("from torchtitan.distributed.activation_checkpoint import FullAC")
    lines += [f"from torchtitan.models.{family}.config_registry import {base}", "", ""]
    lines += [f"def {base}_planned():", f"    config = {base}()"]
    lines += [f"    config.{name} = {value}" for name, value in _RESET.items()]
    lines += [f"    config.{name} = {_source(value)}" for name, value in sheet.flat.items()]
    if "activation_checkpoint" not in sheet.flat:
        lines.append("    config.activation_checkpoint = None")
    return "\n".join([*lines, "    return config"]) + "\n"


def _source(value: Any) -> str:
    return str(value) if isinstance(value, Code) else repr(value)


_NEUTRAL = (
    *("job.", "profiling.", "metrics.", "checkpoint.", "comm.", "experimental.", "validation."),
    *("training.dataset", "training.gc", "model.hf_assets_path", "model.tokenizer", "dataloader"),
    *("model_spec", "validator", "hf_assets_path", "optimizer.eps", "optimizer.implementation"),
    *("optimizer.beta", "debug.", "compile.components", "training.deterministic", "tokenizer"),
    *("parallelism.disable_loss_parallel", "parallelism.context_parallel_load_balancer", "memory_"),
    *("fault_tolerance.", "loss", "training.disable_cuda_graphs"),
)
_YOURS = ("training.dataset", "hf_assets_path", "checkpoint", "optimizer.lr", "training.steps")
TORCHTITAN = Target(
    name="torchtitan",
    title="TorchTitan 0.2.2",
    suffix=".toml",
    table=TOML_TABLE,
    axes=frozenset({"replicate", "shard", "tp", "pp", "cp", "ep", "etp"}),
    schedules=tuple(SCHEDULES),
    write=write_toml,
    covers=("microbatches", "microbatch_size", "chunks", "stage_layers"),
    impossible=impossible,
    outgoing=outgoing,
    incoming=incoming,
    model_keys=model_keys,
    find_model=find_model,
    neutral=_NEUTRAL,
    yours=_YOURS,
)
TORCHTITAN_MAIN = Target(
    name="torchtitan-main",
    title="TorchTitan main",
    suffix=".py",
    table=PYTHON_TABLE,
    axes=frozenset({"replicate", "shard", "tp", "pp", "cp", "ep"}),
    schedules=tuple(SCHEDULES),
    write=write_python,
    always={"context": "allgather"},
    covers=("microbatches", "microbatch_size", "chunks", "stage_layers", "lr", "weight_decay"),
    impossible=impossible,
    outgoing=outgoing_main,
    incoming=incoming,
    extra_keys=more_main,
    find_model=find_model,
    neutral=_NEUTRAL,
    yours=_YOURS,
)
