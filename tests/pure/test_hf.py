"""Hugging Face configs: the same shapes as the presets, and refusals instead of tracebacks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hf_configs import CONFIGS, LLAMA3_ROPE, Table
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import BadFile
from fivefold.core.model.hf_config import FAMILIES, shape_from_config
from fivefold.core.model.presets import load
from fivefold.core.model.shape import parameters
from fivefold.huggingface.config_export import WRITERS


@pytest.mark.parametrize("name", CONFIGS)
def test_config_equals_preset(name: str) -> None:
    shape = shape_from_config(CONFIGS[name], "config.json")
    assert shape == load(name)
    assert shape.family == load(name).family


def test_every_family_that_is_only_read_has_a_config_here() -> None:
    families = {shape_from_config(config, name).family for name, config in CONFIGS.items()}
    assert FAMILIES.keys() - WRITERS.keys() <= families


def test_loading_a_file_or_its_directory(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["deepseek-v3"]))
    (folder / "other.json").write_text(json.dumps(CONFIGS["gpt2"]))
    assert load(str(folder)) == load(str(folder / "config.json")) == load("deepseek-v3")
    assert load(str(folder)).name == "my-model"
    assert load(str(folder / "other.json")).name == "other"


# Traps


def changed(name: str, **changes: object) -> Table:
    return CONFIGS[name] | changes


def test_both_spellings_of_rope() -> None:
    old = shape_from_config(CONFIGS["llama-3.1-405b"], "old")
    table = {**LLAMA3_ROPE, "rope_theta": 500000.0}
    new = changed("llama-3.1-405b", rope_scaling=None, rope_theta=None, rope_parameters=table)
    assert shape_from_config(new, "new") == old
    plain = changed("llama-7b", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert shape_from_config(plain, "plain").rope is None
    assert shape_from_config(plain, "plain").rope_theta == 5e5


def test_heads_wider_than_their_share() -> None:
    assert shape_from_config(CONFIGS["qwen3-0.6b"], "q").head_dim == 128
    absent = {key: item for key, item in CONFIGS["qwen3-0.6b"].items() if key != "head_dim"}
    assert shape_from_config(absent, "q").head_dim == 128
    assert shape_from_config(changed("llama-7b", head_dim=None), "l").head_dim == 128


def test_tied_by_family() -> None:
    assert shape_from_config(CONFIGS["gpt2"], "g").tied
    assert not shape_from_config(CONFIGS["llama-7b"], "l").tied
    assert not shape_from_config(CONFIGS["mixtral-8x7b"], "m").tied


def test_qwen_window_needs_its_switch() -> None:
    on = {"use_sliding_window": True, "sliding_window": 4096}
    assert shape_from_config(changed("qwen2.5-14b", **on), "q").window is None
    everywhere = changed("qwen2.5-14b", **on, max_window_layers=0)
    assert shape_from_config(everywhere, "q").window == 4096
    with pytest.raises(BadFile, match="max_window_layers"):
        shape_from_config(changed("qwen2.5-14b", **on, max_window_layers=21), "q")


def test_mistral_window_null_and_absent() -> None:
    assert shape_from_config(changed("mistral-7b", sliding_window=None), "m").window is None
    absent = {key: item for key, item in CONFIGS["mistral-7b"].items() if key != "sliding_window"}
    assert shape_from_config(absent, "m").window == 4096


@pytest.mark.parametrize(
    ("changes", "moe_layers"),
    [
        ({}, list(range(8))),
        ({"mlp_only_layers": [0, 1]}, [2, 3, 4, 5, 6, 7]),
        ({"decoder_sparse_step": 2}, [1, 3, 5, 7]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, [3, 5, 7]),
        ({"decoder_sparse_step": 8}, [7]),
        ({"decoder_sparse_step": 5}, [4]),
    ],
)
def test_which_qwen_layers_have_experts(changes: Table, moe_layers: list[int]) -> None:
    config = changed("qwen3-235b-a22b", num_hidden_layers=8, **changes)
    shape = shape_from_config(config, "q")
    assert [i for i in range(8) if shape.is_moe_layer(i)] == moe_layers


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen3-235b-a22b", {"mlp_only_layers": [3]}, "mlp_only_layers"),
        ("qwen3-235b-a22b", {"mlp_only_layers": ["3"]}, "mlp_only_layers"),
        ("qwen3-235b-a22b", {"decoder_sparse_step": 95}, "no layer is left"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek-v2", {"n_group": None}, "n_group is missing"),
        ("deepseek-v2", {"n_group": 7}, "does not divide"),
        ("olmoe-1b-7b", {"clip_qkv": 8.0}, "clip_qkv"),
        ("llama-7b", {"hidden_act": "mish"}, "silu"),
        ("llama-7b", {"num_attention_heads": 33, "num_key_value_heads": 33}, "head_dim"),
        ("llama-7b", {"rope_scaling": {"type": "dynamic"}}, "llama3, yarn, linear, longrope"),
        ("llama-7b", {"rope_scaling": {"type": "longrope"}}, "long_factor = None: must be a list"),
        ("llama-7b", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ("llama-7b", {"rope_scaling": 3}, "must be a table"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "exceeds moe.experts"),
        ("mixtral-8x7b", {"num_key_value_heads": None}, "num_key_value_heads is missing"),
    ],
)
def test_what_a_shape_cannot_express_is_refused(name: str, changes: Table, named: str) -> None:
    with pytest.raises(BadFile) as caught:
        shape_from_config(changed(name, **changes), "config.json")
    assert named in str(caught.value)


def test_llama4_lists_must_agree_with_its_interval() -> None:
    text = CONFIGS["llama-4-maverick"]["text_config"]
    pattern = [1, 1, 1, 0] * 12
    same = shape_from_config(text | {"no_rope_layers": pattern}, "l4")
    assert same == load("llama-4-maverick")
    listed = shape_from_config(text | {"moe_layers": list(range(1, 48, 2))}, "l4")
    assert listed == same
    with pytest.raises(BadFile, match="no_rope_layer_interval"):
        shape_from_config(text | {"no_rope_layers": pattern[::-1]}, "l4")


# Bad input


def test_unknown_family_lists_the_known() -> None:
    with pytest.raises(BadFile, match="mixtral") as caught:
        shape_from_config({"model_type": "mamba"}, "config.json")
    assert all(family in str(caught.value) for family in FAMILIES)
    for wrong in (None, 3, ["llama"]):
        with pytest.raises(BadFile):
            shape_from_config({"model_type": wrong}, "config.json")
    with pytest.raises(BadFile):
        shape_from_config({"model_type": "llama4", "text_config": 3}, "config.json")


def test_all_problems_of_a_file_at_once() -> None:
    wrong: Table = {
        "num_hidden_layers": "32",
        "hidden_size": -4096,
        "vocab_size": None,
        "rms_norm_eps": math.nan,
        "tie_word_embeddings": "no",
        "num_attention_heads": True,
    }
    with pytest.raises(BadFile) as caught:
        shape_from_config(changed("llama-7b", **wrong), "bad.json")
    assert len(caught.value.problems) == len(wrong)
    assert all(any(key in line for line in caught.value.problems) for key in wrong)
    assert "bad.json" in str(caught.value)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_absurd_sizes(key: str) -> None:
    for size in (10**12, 10**400, 0, 1e9):
        with pytest.raises(BadFile):
            shape_from_config(changed("llama-7b", **{key: size}), "config.json")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=300)
@given(name=st.sampled_from(sorted(CONFIGS)), value=ANYTHING, data=st.data())
def test_no_value_escapes_the_error_tree(name: str, value: object, data: st.DataObject) -> None:
    config = CONFIGS[name].get("text_config", CONFIGS[name])
    key = data.draw(st.sampled_from(sorted(config)))
    try:
        shape = shape_from_config(config | {key: value}, "config.json")
    except BadFile:
        return
    assert parameters(shape).total > 0


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "hidden_size", "wide"),
        ("llama", "hidden_size", 10**4000),
        ("gpt2", "resid_pdrop", "some"),
        ("deepseek_v3", "num_hidden_layers", None),
        ("deepseek_v3", "n_shared_experts", 10**4000),
        ("qwen3_moe", "num_hidden_layers", 0),
    ],
)
def test_what_follows_from_a_bad_key_is_no_second_problem(
    family: str, key: str, value: object
) -> None:
    config = next(each for each in CONFIGS.values() if each["model_type"] == family)
    with pytest.raises(BadFile) as caught:
        shape_from_config({**config, key: value}, "config.json")
    (only,) = caught.value.problems
    assert only.startswith(key)
