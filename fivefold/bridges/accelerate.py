"""Accelerate 1.15: the file of `accelerate config`, with FSDP2 and its `ParallelismConfig`.

Batch, length and optimizer are in the training program.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.bridges.formats import nested_of, yaml_text
from fivefold.bridges.job_values import Values
from fivefold.bridges.key_table import Flat, Key, KeyChoice, Table
from fivefold.bridges.target import Impossible, Sheet, Target, with_batch
from fivefold.core.model import Shape

_P, _F = "parallelism_config.parallelism_config_", "fsdp_config.fsdp_"
TABLE: Table = (
    Key("num_processes", "world"),
    Key(f"{_P}dp_replicate_size", "out_replicate", usual=1),
    Key(f"{_P}dp_shard_size", "out_shard", usual=1),
    Key(f"{_P}tp_size", "tp", usual=1),
    Key(f"{_P}cp_size", "cp", usual=1),
    KeyChoice(
        ("zero", "gather"),
        {
            (0, None): {},
            (3, "step"): {f"{_F}version": 2, f"{_F}reshard_after_forward": False},
            (3, "microbatch"): {f"{_F}version": 2, f"{_F}reshard_after_forward": True},
        },
    ),
    KeyChoice(
        ("context",),
        {
            "zigzag": {f"{_P}cp_comm_strategy": "alltoall"},
            "allgather": {f"{_P}cp_comm_strategy": "allgather"},
        },
    ),
    Key(
        f"{_F}activation_checkpointing",
        "recompute",
        bool,
        {"full": True, "none": False},
        usual="none",
    ),
    KeyChoice(("offload",), {"none": {}, "cpu": {f"{_F}offload_params": True}}),
    Key("mixed_precision", "number", str, {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}),
)


def outgoing(values: Values, shape: Shape) -> Values:
    """All ranks, and data parallelism as replicas and shards."""
    sharded, dp = values["zero"] > 0, values["replicate"] * values["shard"]
    degrees = (values["replicate"], values["shard"]) if sharded else (dp, 1)
    return {**with_batch(values, shape), "out_replicate": degrees[0], "out_shard": degrees[1]}


def incoming(values: Values, flat: Flat) -> Values:
    """Without FSDP all data ranks are replicas."""
    replicate, shard = values.pop("out_replicate", None) or 1, values.pop("out_shard", None) or 1
    values |= {"replicate": replicate, "shard": shard}
    if not any(key.startswith("parallelism_config") for key in flat):
        values["shard"] = None  # what the number of processes leaves
    if str(flat.get("distributed_type", "")).upper() != "FSDP":
        if values["shard"] is not None:
            values |= {"replicate": 1, "shard": replicate * shard}
        values |= {"zero": 0, "gather": None}
    elif not values.get("zero"):
        values |= {"zero": 3, "gather": "microbatch"}
    return values


def impossible(values: Values, _shape: Shape) -> Iterator[Impossible]:
    """Recomputation and offload are options of FSDP; replicas alone have neither tp nor cp."""
    dp, zero = values["replicate"] * values["shard"], values["zero"]
    split = max(values["tp"], values["cp"]) > 1
    if zero == 0 and values["offload"] != "none":
        yield "offload", values["offload"], sharded_or_on_device()
    elif zero == 0 and dp > 1 and split:
        yield "zero", 0, sharded_or_on_device()[:-1]
    elif zero == 0 and values["recompute"] != "none":
        yield (
            "recompute",
            values["recompute"],
            [*sharded_or_on_device()[:-1], {"recompute": "none"}],
        )
    elif zero and values["replicate"] > 1 and values["shard"] == 1 and split:
        yield "replicate", values["replicate"], [{"replicate": 1, "shard": dp}]


def sharded_or_on_device() -> list[Values]:
    """ZeRO-3 with states on the host, or states on the device."""
    gathers = ("step", "microbatch")
    return [*({"zero": 3, "gather": gather} for gather in gathers), {"offload": "none"}]


def extra_keys(_shape: Shape, values: Values) -> Flat:
    flat: Flat = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if values["zero"] else "MULTI_GPU",
        "main_training_function": "main",
        "machine_rank": 0,
        "num_machines": 1,
    }
    if values["zero"]:
        flat["fsdp_config.fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        flat["fsdp_config.fsdp_state_dict_type"] = "SHARDED_STATE_DICT"
    return flat


def write_yaml(sheet: Sheet) -> str:
    head = "".join(f"# {line}\n" for line in sheet.header)
    return head + yaml_text(nested_of({**sheet.flat, "num_machines": sheet.nodes}))


ACCELERATE = Target(
    name="accelerate",
    title="Accelerate",
    suffix=".yaml",
    table=TABLE,
    axes=frozenset({"replicate", "shard", "tp", "cp"}),
    schedules=(),
    write=write_yaml,
    always={"sp": False},
    left=(
        *("microbatches", "microbatch_size", "seq", "steps", "optimizer", "lr", "lr_curve"),
        *("warmup", "weight_decay", "clip", "seed"),
    ),
    impossible=impossible,
    outgoing=outgoing,
    incoming=incoming,
    extra_keys=extra_keys,
    neutral=(
        *("compute_environment", "distributed_type", "main_", "machine_rank", "num_machines"),
        *(
            "debug",
            "downcast_bf16",
            "rdzv_backend",
            "same_network",
            "tpu_",
            "use_cpu",
            "enable_cpu",
        ),
        *("fsdp_config.fsdp_auto", "fsdp_config.fsdp_state", "fsdp_config.fsdp_transformer"),
        *("fsdp_config.fsdp_cpu_ram", "fsdp_config.fsdp_use_orig", "fsdp_config.fsdp_sync"),
    ),
    yours=("in your program",) * 5,
)
