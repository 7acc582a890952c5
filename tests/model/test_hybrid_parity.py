"""Hybrids beside `transformers`: as many parameters, layer by layer, and the FLOPs of the delta
rule; refusals of every verb that would run one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from fivefold.core.layout.weight_table import planned_weights
from fivefold.core.model import layer_parameters, parameters
from fivefold.core.model.hf_config import shape_from_config
from fivefold.core.model.mixers import mixer_cost
from tests.commands import in_fork

SMALL: dict[str, dict[str, Any]] = {
    "80b": {},
    "narrow": {
        **{"vocab_size": 320, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 7},
        **{"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24},
        **{"linear_conv_kernel_dim": 3, "linear_key_head_dim": 10, "linear_value_head_dim": 14},
        **{"linear_num_key_heads": 3, "linear_num_value_heads": 9, "attention_bias": True},
        **{"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
        **{"shared_expert_intermediate_size": 28, "layer_types": None, "tie_word_embeddings": True},
    },
    "half": {
        **{"vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6},
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 4},
        **{"linear_num_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 24, "decoder_sparse_step": 2},
        "layer_types": ["linear_attention", "full_attention"] * 3,
    },
}


@pytest.mark.parametrize("name", SMALL)
def test_as_many_parameters_as_the_model_of_the_package(name: str) -> None:
    config = Qwen3NextConfig(**SMALL[name])
    with torch.device("meta"):
        model = Qwen3NextForCausalLM(config)
    shape = shape_from_config(config.to_dict(), name)
    ours, rows = parameters(shape), planned_weights(shape)
    assert ours.total == sum(one.numel() for one in model.parameters())
    assert ours.total == sum(one.numel for one in rows)
    for i, layer in enumerate(model.model.layers):
        numel = sum(one.numel() for one in layer.parameters())
        assert layer_parameters(shape, i).total == numel
        assert sum(one.numel for one in rows if one.block == f"blocks.{i}") == numel
    assert name != "80b" or ours.total == 79_674_391_296


@pytest.mark.parametrize("heads", [(2, 2), (2, 6)])
def test_flops_of_the_delta_rule(heads: tuple[int, int]) -> None:
    """The counter sees all of each square and no triangular solve: the half of a square is as much
    as a solve."""
    sizes = {"linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1]}
    sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 24}
    shape = shape_from_config(Qwen3NextConfig(**sizes).to_dict(), "delta")
    seq, chunk = 256, 64
    (keys, values), (dim, width) = heads, (8, 24)
    q, k = (torch.randn(1, seq, keys, dim) for _ in range(2))
    v, gates = torch.randn(1, seq, values, width), -torch.rand(1, seq, values)
    with FlopCounterMode(display=False) as counter:
        theirs.torch_chunk_gated_delta_rule(q, k, v, gates, -gates, chunk_size=chunk)
    squares = chunk * (2 * dim + width) * values
    solves = chunk * (dim + width) * values
    counted = counter.get_total_flops() / seq
    assert mixer_cost(shape.of_mixer, seq).flops == counted - squares + solves


@pytest.mark.parametrize("verb", ["train", "verify", "rehearse", "import", "generate", "serve"])
def test_what_would_run_it_refuses(verb: str, tmp_path: Path) -> None:
    config = Qwen3NextConfig(**SMALL["narrow"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    more = {"import": ["-o", "run"], "generate": ["--prompt", "a", "--tokenizer", "bytes"]}
    more |= {each: ["--layout", "dp=2"] for each in ("verify", "rehearse")}
    more |= {"serve": ["--tokenizer", "bytes"], "train": ["--out", "run"]}
    ended = in_fork([verb, str(tmp_path), *more[verb]], tmp_path)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "is planned only: it mixes tokens by gated-delta" in ended.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"config.json"}
