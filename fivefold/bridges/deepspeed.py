"""DeepSpeed 0.19: its JSON configuration, with AutoTP, AutoEP and Ulysses.

Pipelines and recomputation are in the program, not in the file. AutoTP has no sequence parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from fivefold.bridges.formats import nested_of
from fivefold.bridges.job_values import Values
from fivefold.bridges.key_table import Flat, Key, KeyChoice, Table
from fivefold.bridges.target import Impossible, Sheet, Target, with_batch
from fivefold.core.model import Shape
from fivefold.core.plan import DISK

_Z = "zero_optimization."
_STAGE = f"{_Z}stage"
_PARAMS = "scheduler.params."
TABLE: Table = (
    Key("train_batch_size", "batch"),
    Key("train_micro_batch_size_per_gpu", "microbatch_size"),
    Key("gradient_accumulation_steps", "microbatches"),
    KeyChoice(
        ("zero", "gather"),
        {
            (0, None): {_STAGE: 0},
            (1, None): {_STAGE: 1},
            (2, None): {_STAGE: 2},
            (3, "microbatch"): {_STAGE: 3},
        },
    ),
    Key("tensor_parallel.autotp_size", "tp", usual=1),
    Key("sequence_parallel_size", "cp", usual=1),
    Key("expert_parallel.autoep_size", "ep", usual=1),
    KeyChoice(
        ("number",),
        {"bf16": {"bf16.enabled": True}, "fp16": {"fp16.enabled": True}, "fp32": {}},
    ),
    Key("data_types.grad_accum_dtype", "grad_dtype", str, {"fp32": "fp32", "bf16": "bf16"}),
    Key("gradient_clipping", "clip", float),
    Key("optimizer.type", "optimizer", str, {"adamw": "AdamW", "muon": "Muon"}),
    Key("optimizer.params.lr", "lr", float),
    Key("optimizer.params.weight_decay", "weight_decay", float),
    KeyChoice(
        ("lr_curve",),
        {
            "cosine": {"scheduler.type": "WarmupCosineLR", f"{_PARAMS}cos_min_ratio": 0.1},
            "linear": {"scheduler.type": "WarmupDecayLR"},
            "constant": {"scheduler.type": "WarmupLR"},
        },
    ),
    Key(f"{_PARAMS}warmup_num_steps", "warmup"),
    Key(f"{_Z}offload_optimizer.device", "offload_device", str),
    Key(f"{_Z}offload_optimizer.nvme_path", "offload_path", str),
)


def outgoing(values: Values, shape: Shape) -> Values:
    """Where states are, and the global batch."""
    flat, offload = with_batch(values, shape), values["offload"]
    on_disk = offload.startswith(DISK)
    flat["offload_device"] = "nvme" if on_disk else None if offload == "none" else offload
    flat["offload_path"] = offload.removeprefix(DISK) if on_disk else None
    return flat


def incoming(values: Values, _flat: Flat) -> Values:
    """Where states are."""
    device, path = values.pop("offload_device", None), values.pop("offload_path", None)
    on_disk = f"{DISK}{path or 'nvme'}"
    values["offload"] = on_disk if device == "nvme" else "cpu" if device == "cpu" else "none"
    return values


def impossible(values: Values, _shape: Shape) -> Iterator[Impossible]:
    """Only the optimizer of ZeRO has its states elsewhere. AutoTP is for ZeRO stages 0 to 2, and
    AutoEP beside ZeRO-3 has neither tp nor sequence parallelism."""
    if values["zero"] == 0 and values["offload"] != "none":
        yield "zero", 0, [{"zero": 1, "gather": None}]
    if values["zero"] == 3:
        tp, cp, stage = values["tp"], values["cp"], {"zero": 2, "gather": None}
        if tp > 1:
            yield "tp", tp, [stage, {"tp": 1, "etp": 1, "shard": values["shard"] * tp}]
        elif values["ep"] > 1 and cp > 1:
            yield "ep", values["ep"], [stage, {"cp": 1, "shard": values["shard"] * cp}, {"ep": 1}]


def extra_keys(_shape: Shape, values: Values) -> Flat:
    flat: Flat = {}
    if values["lr_curve"] != "constant":
        flat[f"{_PARAMS}total_num_steps"] = values["steps"]
    if values["lr_curve"] != "cosine":
        flat[f"{_PARAMS}warmup_max_lr"] = values["lr"]
    if values["ep"] > 1:
        flat["expert_parallel.enabled"] = True
    if values["zero"]:
        flat[f"{_Z}overlap_comm"] = True
    return flat


def write_json(sheet: Sheet) -> str:
    return json.dumps(nested_of(sheet.flat), indent=2) + "\n"


DEEPSPEED = Target(
    name="deepspeed",
    title="DeepSpeed",
    suffix=".json",
    table=TABLE,
    axes=frozenset({"shard", "tp", "cp", "ep"}),
    schedules=(),
    write=write_json,
    always={"sp": False, "context": "ulysses"},
    left=("recompute", "seq", "steps", "seed"),
    covers=("offload",),
    impossible=impossible,
    outgoing=outgoing,
    incoming=incoming,
    extra_keys=extra_keys,
    neutral=(
        *("steps_per_print", "wall_clock_breakdown", "optimizer.params.", "scheduler.params."),
        *(f"{_Z}overlap_comm", f"{_Z}contiguous", f"{_Z}reduce_", f"{_Z}allgather_", "fp16."),
        *(f"{_Z}stage3_", f"{_Z}sub_group", "tensorboard.", "wandb.", "csv_monitor.", "comms_"),
        *("dump_state", "expert_parallel.enabled", "zero_allow_untested_optimizer", "flops_"),
        *(f"{_Z}offload_optimizer.", "activation_checkpointing."),
    ),
    yours=(*["in your program"] * 3, "optimizer.params.lr", "in your program"),
    comments=False,
)
