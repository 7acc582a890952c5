"""axolotl: its YAML configuration (July 2026, commit 067b021), with FSDP2 and ring attention.

Its expert axis multiplies the ranks: world = ep · dp_shard · cp, without tp. Weights outside of
experts are sharded over dp_shard and copied over ep, so here that is dp = ep x dp_shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fivefold.bridges import accelerate
from fivefold.bridges.formats import nested_of, yaml_text
from fivefold.bridges.job_values import Values
from fivefold.bridges.key_table import Flat, Key, KeyChoice, Table
from fivefold.bridges.model_names import hosted_model, hosted_name
from fivefold.bridges.target import FoundModel, Impossible, Sheet, Target
from fivefold.core.model import Shape

TABLE: Table = (
    Key("dp_replicate_size", "out_replicate", usual=1),
    Key("dp_shard_size", "out_shard"),
    Key("tensor_parallel_size", "tp", usual=1),
    Key("context_parallel_size", "cp", usual=1, also=("sequence_parallel_degree",)),
    Key("expert_parallel_size", "ep", usual=1),
    KeyChoice(
        ("zero", "gather"),
        {
            (0, None): {},
            (3, "step"): {"fsdp_version": 2, "fsdp_config.reshard_after_forward": False},
            (3, "microbatch"): {"fsdp_version": 2, "fsdp_config.reshard_after_forward": True},
        },
    ),
    Key("gradient_checkpointing", "recompute", bool, {"full": True, "none": False}),
    KeyChoice(("offload",), {"none": {}, "cpu": {"fsdp_config.offload_params": True}}),
    KeyChoice(
        ("number",), {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "fp32": {"bf16": False}}
    ),
    Key("micro_batch_size", "microbatch_size"),
    Key("gradient_accumulation_steps", "microbatches"),
    Key("sequence_len", "seq"),
    Key("max_steps", "steps"),
    Key("optimizer", "optimizer", str, {"adamw": "adamw_torch_fused", "muon": "muon"}),
    Key("learning_rate", "lr", float),
    Key(
        *("lr_scheduler", "lr_curve", str),
        {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"},
    ),
    Key("warmup_steps", "warmup"),
    Key("weight_decay", "weight_decay", float),
    Key("max_grad_norm", "clip", float),
    Key("seed", "seed"),
    Key("lora_r", "lora", usual=0),
    Key("lora_alpha", "lora_alpha", float),
    Key("torch_compile", "compile", bool, {"auto": True, False: False}),
)


def outgoing(values: Values, shape: Shape) -> Values:
    flat = accelerate.outgoing(values, shape)
    return {**flat, "out_replicate": 1} if values["ep"] > 1 else flat


def incoming(values: Values, flat: Flat) -> Values:
    """Without FSDP all data ranks are replicas; without adapters there is no scale."""
    replicate, shard = values.pop("out_replicate", None) or 1, values.pop("out_shard", None)
    values |= {"replicate": replicate * (values.get("ep") or 1), "shard": shard}
    fsdp = any(key.startswith("fsdp_config") for key in flat) or flat.get("fsdp_version")
    if not fsdp:
        if shard is not None:
            values |= {"replicate": 1, "shard": values["replicate"] * shard}
        values |= {"zero": 0, "gather": None}
    elif not values.get("zero"):
        values |= {"zero": 3, "gather": "microbatch"}
    if not values.get("lora"):
        values["lora_alpha"] = None
    return values


def impossible(values: Values, _shape: Shape) -> Iterator[Impossible]:
    """Weights are on the host by an option of FSDP; experts have an axis of their own."""
    ep, dp = values["ep"], values["replicate"] * values["shard"] * values["tp"]
    own_axis = values["replicate"] == ep and values["tp"] == 1 and values["shard"] > 1
    if ep > 1 and not (own_axis and values["zero"] == 3):
        degrees: Values = {"zero": 3, "replicate": ep, "shard": dp // ep, "tp": 1}
        mended = [{**degrees, "gather": gather} for gather in ("microbatch", "step")]
        yield "ep", ep, [*(mended if dp % ep == 0 and dp > ep else []), {"ep": 1}]
    if values["zero"] == 0 and values["offload"] != "none":
        yield "offload", values["offload"], accelerate.sharded_or_on_device()


def extra_keys(_shape: Shape, values: Values) -> Flat:
    flat: Flat = {"output_dir": "outputs"}
    if values["lr_curve"] == "cosine":
        flat["cosine_min_lr_ratio"] = 0.1
    if values["zero"]:
        flat["fsdp_config.auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    if values["lora"]:
        flat |= {"adapter": "lora", "lora_target_linear": True}
    if values["ep"] > 1:
        flat["plugins"] = ["axolotl.integrations.expert_parallel.ExpertParallelPlugin"]
    return flat


def write_yaml(sheet: Sheet) -> str:
    head = "".join(f"# {line}\n" for line in sheet.header)
    first: dict[str, Any] = {"base_model": hosted_name(sheet.model)}
    return head + yaml_text(nested_of({**first, **sheet.flat}))


def find_model(flat: Flat) -> FoundModel:
    name = flat.get("base_model")
    return FoundModel(None if name is None else hosted_model(str(name)), frozenset({"base_model"}))


AXOLOTL = Target(
    name="axolotl",
    title="axolotl",
    suffix=".yaml",
    table=TABLE,
    axes=frozenset({"replicate", "shard", "tp", "cp", "ep"}),
    schedules=(),
    write=write_yaml,
    always={"sp": False, "context": "allgather"},
    impossible=impossible,
    outgoing=outgoing,
    incoming=incoming,
    extra_keys=extra_keys,
    find_model=find_model,
    neutral=(
        *("output_dir", "datasets", "dataset_", "plugins", "special_tokens", "val_set_size"),
        *("logging_steps", "saves_per", "evals_per", "num_epochs", "wandb_", "tf32", "adapter"),
        *("lora_target_linear", "lora_dropout", "lora_target_modules", "flash_attention", "chat_"),
        *("attn_implementation", "cosine_min_lr_ratio", "fsdp_config.auto", "load_in_", "debug"),
        *("fsdp_config.state", "fsdp_config.transformer", "fsdp_config.cpu_ram", "tokenizer_"),
        *("model_type", "strict", "train_on_inputs", "group_by_length", "resume_", "local_rank"),
        *("save_", "eval_", "hub_model_id", "warmup_ratio", "rl", "fsdp_config.sync", "output"),
        *("fsdp_config.final_state", "fsdp_config.use_orig"),
    ),
    yours=("datasets", "tokenizer_config", "save_steps", "learning_rate", "max_steps"),
)
