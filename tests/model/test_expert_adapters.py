"""Adapters of stacked experts in PEFT: written for it with equal logits, and read from it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from fivefold.core.errors import BadFile
from fivefold.core.layout.weight_table import buffers, weights
from fivefold.core.model.hf_config import shape_from_config
from fivefold.core.model.shape import Shape
from fivefold.core.model.tuning import ADAPTER, Tuning
from fivefold.huggingface.adapters import CONFIG, FILE, AdapterFolder, merged, write_adapter
from fivefold.huggingface.files import HfFolder
from fivefold.huggingface.names import hf_tensors, tensor_to_hf

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5,
    reason="experts are stacked in transformers from 5 on: pip install -U transformers",
)
F32 = torch.float32
TOKENS = torch.arange(3, 35)[None] * 5 % 64
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **{"moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "num_nextn_predict_layers": 0,
}
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, shared_expert_intermediate_size=24, mlp_only_layers=[0]
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SIZES, **LATENT),
}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def model_in(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=F32)


def downloaded(folder: Path, family: str) -> Shape:
    """Write a random model whose experts matter, and return its shape."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() == 3:
                each.normal_(0, 0.2)
    model.save_pretrained(folder)
    return shape_from_config(json.loads((folder / "config.json").read_text()), str(folder))


def reader(folder: Path, shape: Shape, factor: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Weights of a folder, and factors of adapters."""
    source = HfFolder(folder, shape)
    ours = {each.name: each for each in (*weights(shape), *buffers(shape))}
    return lambda name: factor(name) if ADAPTER in name else source.weight(ours[name], F32)


def merged_logits(folder: Path, shape: Shape, read: Callable[[str], Tensor]) -> Tensor:
    """Logits of the model with its adapters added to its weights."""
    full = merged(shape, read)
    model = model_in(folder)
    out = folder.with_name("merged")
    out.mkdir()
    plain = replace(shape, tuning=None)
    state = {name: tensor_to_hf(each, full) for name, each in hf_tensors(plain).items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(out)
    return logits(model_in(out))


def loaded(peft: Any, folder: Path, adapter: Path) -> Tensor:
    with warnings.catch_warnings():
        # PEFT does not know that patterns may be of parameters, and applies them.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did")
        return logits(peft.PeftModel.from_pretrained(model_in(folder), adapter))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "targets", "returned"),
    [
        ("mixtral", "all", "all"),
        ("qwen2_moe", "all", "all"),  # a dense layer and a shared expert
        ("deepseek_v3", "all", "all"),
        ("qwen3_moe", "experts.down+q", "attention.q+mlp.experts.down"),
        ("qwen3_moe", "experts.gate+experts.up", "mlp.experts.gate+mlp.experts.up"),
        ("qwen3_moe", "experts.up", "mlp.experts.gate+mlp.experts.up"),  # gate's B is zero
        ("mixtral", "blocks.2.mlp+blocks.1.mlp.experts.gate", None),
    ],
)
def test_peft_reads_adapters_of_experts(
    tmp_path: Path, family: str, targets: str, returned: str | None
) -> None:
    peft = pytest.importorskip("peft")
    plain = downloaded(tmp_path / "model", family)
    shape = replace(plain, tuning=Tuning(3, 5.0, targets))
    torch.manual_seed(1)
    factors = {
        each.name: torch.randn(each.shape) * 0.2 for each in weights(shape) if ADAPTER in each.name
    }
    read = reader(tmp_path / "model", plain, factors.__getitem__)
    write_adapter(tmp_path / "adapter", shape, "model", read, F32)
    theirs = loaded(peft, tmp_path / "model", tmp_path / "adapter")
    wanted = merged_logits(tmp_path / "model", shape, read)
    torch.testing.assert_close(theirs, wanted, rtol=0, atol=2e-5)
    assert (theirs - logits(model_in(tmp_path / "model"))).abs().max() > 0.1
    found = AdapterFolder(tmp_path / "adapter", plain)
    assert (found.tuning.rank, found.tuning.alpha) == (3, 5.0)
    assert returned is None or found.tuning.targets == returned
    for each in weights(replace(plain, tuning=found.tuning)):
        if ADAPTER in each.name:
            got = found.weight(each, F32)
            assert torch.equal(got, factors.get(each.name, got))
            assert each.name in factors or not each.name.endswith("b") or not got.any()


@pytest.fixture
def theirs(tmp_path: Path) -> Any:
    """Makes a random adapter of stacked experts in PEFT, saves it, and gives its logits."""
    peft = pytest.importorskip("peft")

    def make(**keys: Any) -> Tensor:
        said = {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        }
        config = peft.LoraConfig(r=2, lora_alpha=3, lora_dropout=0.0, **{**said, **keys})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
            model = peft.get_peft_model(model_in(tmp_path / "model"), config)
        torch.manual_seed(2)
        with torch.no_grad():
            for name, each in model.named_parameters():
                if "lora_" in name:
                    each.normal_(0, 0.2)
        model.save_pretrained(tmp_path / "theirs")
        return logits(model)

    return make


def test_an_adapter_of_stacked_experts_is_read(tmp_path: Path, theirs: Any) -> None:
    shape = downloaded(tmp_path / "model", "mixtral")
    wanted = theirs()
    found = AdapterFolder(tmp_path / "theirs", shape)
    tuned = replace(shape, tuning=found.tuning)
    assert found.tuning.rank == 2 and found.tuning.targets.count("+") == 3
    ours = {each.name: each for each in weights(tuned)}
    read = reader(tmp_path / "model", shape, lambda name: found.weight(ours[name], F32))
    torch.testing.assert_close(merged_logits(tmp_path / "model", tuned, read), wanted)


def test_what_one_adapter_of_gate_and_up_cannot_be_is_refused(tmp_path: Path, theirs: Any) -> None:
    shape = downloaded(tmp_path / "model", "qwen3_moe")
    doubled = {"mlp.experts.gate_up_proj": 4}
    theirs(rank_pattern=doubled, alpha_pattern={"mlp.experts.gate_up_proj": 6})
    with pytest.raises(BadFile, match=r"lora_B\.weight joins gate and up at rank 4: merge it"):
        AdapterFolder(tmp_path / "theirs", shape)
    for key, value in (("alpha_pattern", {}), ("rank_pattern", {"q_proj": 4}), ("r", 3)):
        config = json.loads((tmp_path / "theirs" / CONFIG).read_text())
        other = tmp_path / f"other-{key}"
        other.mkdir()
        (other / CONFIG).write_text(json.dumps({**config, key: value}))
        save_file(load_file(tmp_path / "theirs" / FILE), other / FILE)
        rule = "and this model asks for" if key == "r" else "_pattern = .* is not computed here"
        with pytest.raises(BadFile, match=rule):
            AdapterFolder(other, shape)


def test_one_tensor_an_expert_is_read_too(tmp_path: Path) -> None:
    shape = downloaded(tmp_path / "model", "mixtral")
    (tmp_path / "old").mkdir()
    torch.manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for layer in range(3):
        for expert in range(4):
            name = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.w2"
            tensors[f"{name}.lora_A.weight"] = torch.randn(2, 48)
            tensors[f"{name}.lora_B.weight"] = torch.randn(32, 2)
    save_file(tensors, tmp_path / "old" / FILE)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["w2"]}
    (tmp_path / "old" / CONFIG).write_text(json.dumps(config))
    found = AdapterFolder(tmp_path / "old", shape)
    assert found.tuning == Tuning(2, 4.0, "mlp.experts.down")
    ours = {each.name: each for each in weights(replace(shape, tuning=found.tuning))}
    factor = found.weight(ours["blocks.1.mlp.experts.down.lora.b"], F32)
    name = "base_model.model.model.layers.1.block_sparse_moe.experts.3.w2.lora_B.weight"
    assert torch.equal(factor[3], tensors[name])
