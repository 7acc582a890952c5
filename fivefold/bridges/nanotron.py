"""nanotron: its YAML configuration (April 2026, commit 2411b02).

It has a key for expert parallelism, and no job starts with it: `ParallelContext` wants
tp · cp · dp · pp ranks and arranges ep times as many. So `ep` is read and never written.
"""

from __future__ import annotations

from typing import Any

from fivefold.bridges.formats import nested_of, yaml_text
from fivefold.bridges.job_values import Values
from fivefold.bridges.key_table import Flat, Key, KeyChoice, Table, typed
from fivefold.bridges.target import FoundModel, Sheet, Target, few_kv_heads
from fivefold.core.model import Shape
from fivefold.core.model import presets as models

_P, _C, _R = "parallelism.", "model.model_config.", "optimizer.learning_rate_scheduler."
_CONFIG = {  # of a model, by our keys
    "hidden_size": "width",
    "intermediate_size": "ffn",
    "num_attention_heads": "heads",
    "num_hidden_layers": "layers",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocab",
    "max_position_embeddings": "max_seq",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tied",
}
_M = "moe_config."
_EXPERTS = {  # of a Qwen2 with experts
    f"{_M}num_experts": "experts",
    f"{_M}top_k": "top_k",
    f"{_M}moe_intermediate_size": "ffn",
}
TABLE: Table = (
    Key(f"{_P}dp", "dp"),
    Key(f"{_P}tp", "tp"),
    Key(f"{_P}pp", "pp"),
    Key(f"{_P}context_parallel_size", "cp", usual=1),
    Key(f"{_P}expert_parallel_size", "ep", usual=1),
    Key(f"{_P}pp_engine", "schedule", str, {"1f1b": "1f1b", "gpipe": "afab"}),
    Key(f"{_P}tp_mode", "sp", str, {True: "REDUCE_SCATTER", False: "ALL_REDUCE"}),
    Key(f"{_P}tp_recompute_allgather", "tp_keep", bool, {"shard": True, "gathered": False}),
    Key(f"{_P}tp_linear_async_communication", "tp_overlap", bool, {1: True, 0: False}),
    Key(f"{_P}recompute_layer", "recompute", bool, {"full": True, "none": False}, usual="none"),
    KeyChoice(
        ("zero", "gather"),
        {(0, None): {"optimizer.zero_stage": 0}, (1, None): {"optimizer.zero_stage": 1}},
    ),
    Key("model.dtype", "number", str, {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}),
    Key("optimizer.accumulate_grad_in_fp32", "grad_dtype", bool, {"fp32": True, "bf16": False}),
    Key("tokens.micro_batch_size", "microbatch_size"),
    Key("tokens.batch_accumulation_per_replica", "microbatches"),
    Key("tokens.sequence_length", "seq"),
    Key("tokens.train_steps", "steps"),
    Key("optimizer.clip_grad", "clip", float),
    Key("optimizer.weight_decay", "weight_decay", float),
    Key("optimizer.optimizer_factory.name", "optimizer", str, {"adamw": "adamW", "sgd": "sgd"}),
    Key(f"{_R}learning_rate", "lr", float),
    Key(f"{_R}lr_warmup_steps", "warmup"),
    Key(f"{_R}lr_decay_style", "lr_curve", str, {"cosine": "cosine", "linear": "linear"}),
    Key("general.seed", "seed"),
)


def outgoing(values: Values, _shape: Shape) -> Values:
    return {**values, "dp": values["replicate"] * values["shard"]}


def incoming(values: Values, _flat: Flat) -> Values:
    """An engine and a mode that are not said are the older ones."""
    values["shard"] = values.pop("dp", None)
    values["schedule"] = values.get("schedule") or "gpipe"
    values["sp"] = bool(values.get("sp"))
    if (values.get("tp") or 1) == 1:
        values["sp"] = True
    return values


def extra_keys(shape: Shape, values: Values) -> Flat:
    """What a file must have besides."""
    lowest = values["lr"] / 10 if values["lr_curve"] == "cosine" else 0.0
    return {
        "general.project": "fivefold",
        "general.run": f"{shape.name}_%date_%jobid",
        "model.init_method.std": 0.02,
        "tokenizer.tokenizer_name_or_path": shape.name,
        "checkpoints.checkpoints_path": "checkpoints",
        "checkpoints.checkpoint_interval": 1000,
        f"{_R}lr_warmup_style": "linear",
        f"{_R}min_decay_lr": lowest,
        "optimizer.optimizer_factory.adam_eps": 1e-8,
        "optimizer.optimizer_factory.adam_beta1": 0.9,
        "optimizer.optimizer_factory.adam_beta2": 0.95,
        "optimizer.optimizer_factory.torch_adam_is_fused": True,
        "data_stages": [
            {
                "name": "training",
                "start_training_step": 1,
                "data": {"dataset": None, "num_loading_workers": 1, "seed": values["seed"]},
            }
        ],
    }


def model_keys(shape: Shape) -> Flat:
    """A Llama or a Qwen2, with experts or without, by its numbers; other models are not there."""
    if shape.norm != "rms" or shape.mla or shape.positions != "rotary":
        return {}
    config: dict[str, Any] = {theirs: getattr(shape, ours) for theirs, ours in _CONFIG.items()}
    qwen = shape.qkv_bias or shape.moe is not None
    config |= {"is_qwen2_config" if qwen else "is_llama_config": True}
    if shape.qkv_bias:
        config["attention_bias"] = True
    if (moe := shape.moe) is not None:
        config |= {theirs: getattr(moe, ours) for theirs, ours in _EXPERTS.items()}
        config[f"{_M}layers"] = [i for i in range(shape.layers) if moe.in_layer(i)]
        config[f"{_M}enable_shared_expert"] = moe.shared > 0
        if moe.shared:
            config[f"{_M}shared_expert_intermediate_size"] = moe.shared_ffn
    return {f"{_C}{key}": value for key, value in config.items()}


def find_model(flat: Flat) -> FoundModel:
    """The model of `model_config`, as a Hugging Face config."""
    config = {key.removeprefix(_C): value for key, value in flat.items() if key.startswith(_C)}
    used = frozenset(f"{_C}{key}" for key in config)
    if not config.get("num_hidden_layers"):
        return FoundModel(None, used)
    named = (*_CONFIG, "rope_scaling")
    fields = {key: config[key] for key in named if config.get(key) is not None}
    biased = bool(config.get("attention_bias"))
    if config.get(f"{_M}num_experts"):
        fields |= {"model_type": "qwen2_moe", "qkv_bias": biased, **_experts(config)}
    elif config.get("is_qwen2_config"):
        fields["model_type"] = "qwen2" if biased else "llama"
    else:
        fields |= {"model_type": "llama", "attention_bias": biased}
    return FoundModel(models.config_text(fields), used)


def _experts(config: Flat) -> Flat:
    """Experts as a Hugging Face config has them; nanotron's own numbers where none are given."""
    layers = range(typed(config["num_hidden_layers"], int, f"{_C}num_hidden_layers"))
    named = config.get(f"{_M}layers") or [-1]
    dense = [] if named == [-1] else [i for i in layers if i not in named]
    shared = config.get(f"{_M}shared_expert_intermediate_size", 5632)
    return {
        "num_experts": config[f"{_M}num_experts"],
        "num_experts_per_tok": config.get(f"{_M}top_k", 2),
        "moe_intermediate_size": config.get(f"{_M}moe_intermediate_size", 1408),
        "shared_expert_intermediate_size": shared if config.get(f"{_M}enable_shared_expert") else 0,
        "mlp_only_layers": dense,
        "norm_topk_prob": True,
    }


def write_yaml(sheet: Sheet) -> str:
    head = "".join(f"# {line}\n" for line in sheet.header)
    return head + yaml_text(nested_of(sheet.flat))


NANOTRON = Target(
    name="nanotron",
    title="nanotron",
    suffix=".yaml",
    table=TABLE,
    axes=frozenset({"shard", "tp", "pp", "cp"}),
    schedules=("1f1b", "gpipe"),
    write=write_yaml,
    always={"context": "allgather"},
    outgoing=outgoing,
    incoming=incoming,
    impossible=few_kv_heads,
    extra_keys=extra_keys,
    model_keys=model_keys,
    find_model=find_model,
    neutral=(
        *("general.", "checkpoints.", "data_stages", "logging.", "lighteval", "profiler", "s3_"),
        *("tokenizer.", "model.init_method", "model.make_vocab", "model.ddp_bucket", "metrics_"),
        *(f"{_R}lr_warmup_style", f"{_R}min_decay_lr", f"{_R}lr_decay_s", "tokens.val", "data."),
        *("tokens.limit", "optimizer.optimizer_factory.", "optimizer.weight_decay_exclude"),
    ),
    yours=("data_stages", "tokenizer", "checkpoints", f"{_R}learning_rate", "tokens.train_steps"),
)
