"""Raw configs as they are published, and with any key changed: the logits of `transformers`, or a
refusal by name."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import batch_of, state_from_hf
from test_hf_files import built, loaded
from test_hf_parity import Float64Everywhere, saved
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fivefold.core.errors import BadFile
from fivefold.core.model.hf_config import FAMILIES, shape_from_config
from fivefold.core.model.shape import Shape
from fivefold.huggingface.config_export import as_hf
from fivefold.huggingface.files import write_model
from fivefold.model.decoder import from_config
from tests.raw_configs import CONFIGS, newer
from tests.raw_tables import Keys
from tests.refused_configs import REFUSED_CONFIGS
from tests.selection import all_cases, shuffled

F32, F64 = torch.float32, torch.float64
CLOSE = 1e-9
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "relu", "silu", "gelu_new", "gelu_fast", "quick_gelu")
WINDOW, FULL = "sliding_attention", "full_attention"
VALUES: dict[str, tuple[object, ...]] = {
    "layer_types": ([WINDOW, WINDOW], [FULL, FULL], [WINDOW, FULL], [FULL, WINDOW]),
    "rope_scaling": (
        {"rope_type": "linear", "factor": 4.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
        {"rope_type": "default", "factor": 2.0},
    ),
    "mlp_only_layers": ([0], [1], []),
    "no_rope_layers": ([1, 1], [0, 1], [1, 0], []),
    "max_window_layers": (0, 1, 2, 9),
    **dict.fromkeys(
        ("hidden_act", "hidden_activation", "activation_function", "activation"), ACTIVATIONS
    ),
}
# Of other families, with a value that could matter.
FOREIGN: Keys = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_qk_norm", "alibi"), False),
    **dict.fromkeys(("use_sliding_window", "lm_head_bias"), False),
    **dict.fromkeys(("scale_attn_weights", "is_causal", "norm_topk_prob", "rope_interleave"), True),
    **dict.fromkeys(("layer_types", "rope_scaling", "no_rope_layers", "mlp_only_layers")),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv")),
    **dict.fromkeys(("logits_scaling", "residual_multiplier", "embedding_multiplier"), 1.0),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), 10000.0),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 0.5),
    **dict.fromkeys(("head_dim", "original_max_position_embeddings"), 4),
    **dict.fromkeys(("sliding_window", "num_key_value_heads", "max_window_layers"), 2),
}
# Which tests change elsewhere, or which are no part of a model.
SIZES = ("vocab_size", "hidden_size", "n_embd", "id2label", "label2id", "problem_type")


def logits_of(shape: Shape, raw: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours, and those of transformers' own model of the same file, which predicts one token."""
    shape = replace(shape, mtp=0)
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw))
    config.dtype = torch.float32
    torch.manual_seed(0)
    with Float64Everywhere():
        theirs = built(config).double().eval()
    with torch.no_grad():
        for each in theirs.parameters():
            each.add_(0.2 * torch.randn_like(each))
    batch = batch_of(shape, seq=24)
    with torch.no_grad(), Float64Everywhere():
        expected = theirs(batch.tokens).logits
    ours = from_config(shape, dtype=F64)
    ours.load_state_dict(state_from_hf(shape, saved(theirs)), strict=not shape.tied)
    assert ours.head is not None
    ours.head.cross_entropy = lambda logits, labels: logits
    with torch.no_grad():
        return ours.eval()(batch.tokens, batch).view_as(expected), expected


def test_every_family_has_a_raw_config() -> None:
    only_planned = {"qwen3_next"}
    assert {raw["model_type"] for raw in CONFIGS.values()} == FAMILIES.keys() - only_planned


@pytest.mark.sample(2)
@pytest.mark.parametrize("style", ["4", "5"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_gives_the_logits_of_transformers(name: str, style: str) -> None:
    raw = CONFIGS[name] if style == "4" else newer(CONFIGS[name])
    found, expected = logits_of(shape_from_config(raw, name), raw)
    torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_is_read_as_the_raw_file(name: str) -> None:
    """With all its defaults, and keys that it derives."""
    raw = CONFIGS[name]
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw))
    shape = shape_from_config(raw, name)
    assert shape_from_config(config.to_dict(), name) == shape
    assert shape_from_config(config.to_diff_dict(), name) == shape


def changes(raw: Keys) -> Iterator[Keys]:
    """The config with each key changed that it has, that its class in transformers has, or that
    other families have."""
    fields = dataclasses.fields(CONFIG_MAPPING[raw["model_type"]])
    defaults = {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in fields
    }
    known = {**FOREIGN, **defaults, **raw}
    bases = [raw]
    if "use_sliding_window" in raw:
        bases.append(raw | {"use_sliding_window": True})
    for key in sorted(known.keys() - set(SIZES)):
        if key.endswith("_token_id") or key in ("model_type", "architectures", "auto_map"):
            continue
        for value in VALUES.get(key, other_values(known[key])):
            for base in bases:
                if base.get(key) != value:
                    yield base | {key: value}


def other_values(value: object) -> tuple[object, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value * 2, value + 1, 1, 0)
    if isinstance(value, float):
        return (value * 1.7, 0.0) if value else (0.3,)
    return (3, 0.37, True) if value is None else ()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_changed_key_changes_the_model_as_in_transformers_or_is_refused(name: str) -> None:
    """A change that transformers itself cannot build or run proves nothing."""
    cases, compared = list(changes(CONFIGS[name])), 0
    for raw in cases if all_cases() else shuffled(cases)[:12]:
        try:
            shape = shape_from_config(raw, name)
            found, expected = logits_of(shape, raw)
        except Exception:
            continue
        changed = {key: value for key, value in raw.items() if CONFIGS[name].get(key) != value}
        torch.testing.assert_close(
            found,
            expected,
            rtol=0,
            atol=CLOSE,
            msg=lambda told, changed=changed: f"{changed} {told}",
        )
        compared += 1
    assert compared or not all_cases()


FLAGS = (False, True)
# Keys of published configs on which no model depends, and those that another key makes moot.
NO_EFFECT = re.compile(
    r"architectures|auto_map\..*|transformers.*|_name_or_path|_attn_implementation_autoset|.*_token_id|"
    r"(torch_)?dtype|task_specific_params\..*|summary_.*|.*_in_fp32|reorder_and_upcast_attn|use_cache|"
    r"cache_implementation|initializer_range|classifier_dropout|(router_)?aux_loss_(alpha|coef)|"
    r"output_router_logits|seq_aux|ep_size|pretraining_tp|ff_factor|for_llm_compressor|"
    r"initial_context_length|is_llama_config|n_special|predict_special_tokens|output_past|"
    r"quantization_config\..*"
)
MOOT = {
    ("starcoder2", "activation_function"): "hidden_act",
    ("falcon", "num_kv_heads"): "multi_query",
    ("falcon-newer", "multi_query"): "new_decoder_architecture",
    ("deepseek_v2", "num_key_value_heads"): "kv_lora_rank",
    ("deepseek_v3", "num_key_value_heads"): "kv_lora_rank",
    ("deepseek-r1", "num_key_value_heads"): "kv_lora_rank",
    ("deepseek-v2-lite", "num_key_value_heads"): "kv_lora_rank",
    ("deepseek-v2-lite", "n_group"): "topk_method",
    ("deepseek-v2-lite", "topk_group"): "topk_method",
    ("falcon2-11b", "multi_query"): "new_decoder_architecture",
    ("phi-3-mini-4k", "original_max_position_embeddings"): "rope_scaling",
    ("phi-4", "original_max_position_embeddings"): "rope_scaling",
    ("qwen3-30b-a3b", "max_window_layers"): "use_sliding_window",
    ("qwen3-30b-a3b", "use_sliding_window"): "sliding_window",
    ("smollm3", "no_rope_layer_interval"): "no_rope_layers",
    ("smollm3", "max_window_layers"): "use_sliding_window",
    ("smollm3", "sliding_window"): "use_sliding_window",
    ("qwen3_moe", "max_window_layers"): "use_sliding_window",
    ("dots1", "max_window_layers"): "sliding_window",
}


def leaves(table: Keys, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The keys of a config by their paths, with their values."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*before, key))
        else:
            yield (*before, key), value


def replaced(table: Keys, path: tuple[str, ...], value: object) -> Keys:
    first, *below = path
    return table | {first: replaced(table[first], tuple(below), value) if below else value}


@pytest.mark.parametrize("style", ["4", "5"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_of_a_published_config_is_read(name: str, style: str) -> None:
    """Some other value of it gives another model, or a refusal."""
    raw = CONFIGS[name] if style == "4" else newer(CONFIGS[name])
    bases = [raw]
    if "use_sliding_window" in raw and name != "smollm3":  # else its other keys say nothing
        bases += [raw | {"use_sliding_window": used, "max_window_layers": 0} for used in FLAGS]
        bases.append(raw | {"use_sliding_window": True})
    moot = {key for family, key in MOOT if family == name}
    assert all(MOOT[name, key] in CONFIGS[name] for key in moot)
    for path, value in leaves(raw):
        others = VALUES.get(path[-1], plausible_values(value))
        jobs = ((base, replaced(base, path, other)) for base in bases for other in others)
        read = any(is_read(name, *job) for job in jobs)
        key = ".".join(path)
        assert read != (key in moot or bool(NO_EFFECT.fullmatch(key))), key


def plausible_values(value: object) -> tuple[object, ...]:
    """Other values of a key that a model could have."""
    if isinstance(value, list):
        return [0, *value], value[:-1], value[::-1]
    if isinstance(value, str):
        return (f"{value}s",)
    if isinstance(value, float):
        return (2 * value, value / 2) if value else (0.3,)
    return tuple(other for other in other_values(value) if other or isinstance(value, bool))


def is_read(name: str, base: Keys, changed: Keys) -> bool:
    """Whether the model of a changed config is another, or refused, as by a size that it
    contradicts."""
    before = shape_from_config(base, name)
    try:
        return shape_from_config(changed, name) != before
    except BadFile:
        return True


RULES: list[tuple[str, Keys]] = [
    ("gemma", {"hidden_act": "gelu", "hidden_activation": None}),
    ("gpt2", {"scale_attn_weights": False}),
    ("qwen2_moe", {"use_sliding_window": True, "num_hidden_layers": 5, "max_window_layers": 9}),
    ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 0}),
    ("qwen3_moe", {"use_sliding_window": True, "num_hidden_layers": 3}),
    ("qwen2", {"use_sliding_window": True, "layer_types": [WINDOW, FULL]}),
    ("ministral", {"layer_types": [FULL, FULL]}),
    ("llama4_text", {"attn_temperature_tuning": False}),
]


@pytest.mark.parametrize(("name", "changed"), RULES, ids=str)
def test_rules_of_families_and_their_exports(name: str, changed: Keys, tmp_path: Path) -> None:
    """Also of what is exported, which transformers must be able to run."""
    raw = CONFIGS[name] | changed
    shape = shape_from_config(raw, name)
    found, expected = logits_of(shape, raw)
    torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE)
    ours, model = from_config(shape, dtype=torch.float32), as_hf(shape, "float32")
    assert model.shape.family == raw["model_type"]
    state: Any = ours.state_dict()
    torch.manual_seed(0)
    state = {key: 0.3 * torch.randn_like(each) for key, each in state.items()}
    ours.load_state_dict(state)
    state = ours.state_dict()  # a tied head once
    write_model(tmp_path / "out", model.shape, model.config, state.__getitem__, F32, 10**9)
    theirs, told = loaded(tmp_path / "out")
    assert not any(told.values()), told
    batch = batch_of(shape, seq=24)
    assert ours.head is not None
    ours.head.cross_entropy = lambda logits, labels: logits
    with torch.no_grad():
        logits = theirs.eval()(batch.tokens).logits
        wanted = ours.eval()(batch.tokens, batch).view_as(logits)
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", [True, False, 3, 0.37, "other", [1], {"factor": 2.0}], ids=str)
def test_an_unknown_key_is_refused_by_name(value: object) -> None:
    for name, raw in CONFIGS.items():
        with pytest.raises(BadFile, match=r"attention_twist = .*: not known here"):
            shape_from_config(raw | {"attention_twist": value}, name)
        shape_from_config(raw | {"attention_twist": None}, name)
        nested = newer(raw)
        if "rope_parameters" in nested:
            nested["rope_parameters"]["mrope_section"] = value
            with pytest.raises(BadFile, match=r"rope_parameters\.mrope_section = .*: not known"):
                shape_from_config(nested, name)


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3"])
def test_bookkeeping_passes(name: str) -> None:
    """What generation, tokenizers, training and tools leave in configs."""
    more: Keys = {
        **{"_commit_hash": "1a2b", "unk_token_id": 0, "gradient_checkpointing": True},
        **{"quantization_config": {"quant_method": "fp8"}, "temperature": 0.7, "do_sample": True},
        **{"unsloth_version": "2025.1", "tokenizer_class": "LlamaTokenizer", "prefix": "x"},
        **{"id2label": {"0": "LABEL_0"}, "max_length": 20, "output_attentions": False},
        **{"is_encoder_decoder": False, "pruned_heads": {}, "attn_implementation": "sdpa"},
        **{"suppress_tokens": [1], "layer_types": ["full_attention"] * 2, "dtype": "bfloat16"},
    }
    raw = CONFIGS[name]
    assert shape_from_config(raw | more, name) == shape_from_config(raw, name)


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_a_model_that_cannot_be_built_is_refused_by_what_it_has(name: str) -> None:
    config = REFUSED_CONFIGS[name]
    with pytest.raises(BadFile) as caught:
        shape_from_config(config.raw, name)
    for pattern, problem in zip(config.problems, caught.value.problems, strict=True):
        assert re.match(pattern, problem), problem


def test_the_text_model_beside_images_is_that_of_its_own_file() -> None:
    """As in mistralai/Mistral-Small-3.1-24B-Base-2503 and meta-llama/Llama-4-Scout-17B-16E."""
    for outer, name in (("mistral3", "mistral-nemo"), ("llama4", "llama4_text")):
        raw = CONFIGS[name]
        beside: Keys = {"model_type": outer, "vision_config": {"hidden_size": 8}}
        for text in (raw, {key: raw[key] for key in raw if key != "model_type"}):
            shape = shape_from_config(beside | {"text_config": text}, name)
            assert shape == shape_from_config(raw, name)
            assert shape.family == raw["model_type"]
