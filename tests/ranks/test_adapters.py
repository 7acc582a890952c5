"""Adapters from a downloaded model to PEFT and back: train, resume in another layout, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import fivefold.train.checkpoint.checkpoints  # here, and not in every fork
import fivefold.train.loop
from fivefold.core.plan import plan
from fivefold.huggingface.adapters import CONFIG, FILE
from tests.commands import in_fork

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
TOKENS = torch.arange(3, 35)[None] * 5 % 256


def fivefold(folder: Path, words: str, code: int = 0) -> str:
    done = in_fork(words.split(), folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def model_in(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A downloaded model, trained with adapters: two steps as dp=2, one more as tp=2."""
    home = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(home / "model")
    fivefold(home, "import model -o run --dtype fp32")
    keys = "--seq 32 --batch 2 --device cpu --set lora=4 --set lora_targets=q+v+mlp --set lr=0.05"
    train = f"train run/plan.toml --out run --resume {keys} --steps 3"
    fivefold(home, f"{train} --layout dp=2 --zero 3 --until 2")
    fivefold(home, f"{train} --layout tp=2")
    assert "parameters) are in adapter, in" in fivefold(home, "export run adapter --adapter")
    fivefold(home, "export run merged")
    return home


def test_what_is_exported_is_what_was_trained_and_only_that(home: Path) -> None:
    stored = load_file(home / "adapter" / FILE)
    assert len(stored) == 2 * 2 * 5
    assert all(each.any() for each in stored.values()), "both factors have learned"
    before = load_file(home / "model" / "model.safetensors")
    after = load_file(home / "merged" / "model.safetensors")
    changed = {name for name, each in before.items() if not torch.equal(each, after[name])}
    assert changed == {
        f"model.layers.{i}.{name}.weight"
        for i in range(2)
        for name in (
            *("self_attn.q_proj", "self_attn.v_proj"),
            *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        )
    }


def test_peft_reads_the_adapter_with_equal_logits(home: Path) -> None:
    peft = pytest.importorskip("peft")
    base = logits(model_in(home / "model"))
    theirs = logits(peft.PeftModel.from_pretrained(model_in(home / "model"), home / "adapter"))
    torch.testing.assert_close(theirs, logits(model_in(home / "merged")), rtol=0, atol=2e-5)
    assert (theirs - base).abs().max() > 1e-2


def test_peft_finds_the_base_of_an_adapter(home: Path) -> None:
    """In the folder that was imported; or beside the adapter, if that has other weights by now."""
    peft = pytest.importorskip("peft")

    def found(folder: Path) -> Path:
        base = Path(json.loads((folder / CONFIG).read_text())["base_model_name_or_path"])
        alone = peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.testing.assert_close(logits(alone), logits(model_in(home / "merged")))
        return base

    assert found(home / "adapter") == (home / "model").resolve()
    weights = home / "model" / "model.safetensors"
    before = weights.read_bytes()
    save_file({name: each + 1 for name, each in load_file(weights).items()}, weights)
    try:
        fivefold(home, "export run apart --adapter")
    finally:
        weights.write_bytes(before)
    assert found(home / "apart") == (home / "apart" / "base").resolve()


def test_an_adapter_of_peft_is_imported(home: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["k_proj", "down_proj"])
    model = peft.get_peft_model(model_in(home / "model"), config)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_" in name:
                each.normal_(0, 0.2)
    model.save_pretrained(home / "theirs")
    fivefold(home, "import model -o second --dtype fp32 --adapter theirs")
    recipe = plan.read(home / "second" / "plan.toml").train
    said = (recipe.lora, recipe.lora_alpha, recipe.lora_targets)
    assert said == (3, 5.0, "attention.k+mlp.down")
    fivefold(home, "export second second-merged")
    torch.testing.assert_close(
        logits(model), logits(model_in(home / "second-merged")), rtol=0, atol=2e-5
    )


def test_an_adapter_of_another_model_is_refused(home: Path) -> None:
    other = home / "other"
    other.mkdir()
    stored = load_file(home / "adapter" / FILE)
    name = next(name for name in stored if "q_proj.lora_A" in name)
    stored[name] = torch.zeros(4, 64)
    stored["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 32)
    save_file(stored, other / FILE)
    (other / CONFIG).write_text((home / "adapter" / CONFIG).read_text())
    said = fivefold(home, "import model -o third --adapter other", code=2)
    assert "has shape (4, 64), and this model asks for (4, 32)" in said
    assert "layers.7.self_attn.q_proj.lora_A.weight is of no linear of this model" in said
    assert not (home / "third").exists()
    config = json.loads((other / CONFIG).read_text())
    (other / CONFIG).write_text(json.dumps({**config, "use_dora": True}))
    assert "use_dora" in fivefold(home, "import model -o third --adapter other", code=2)
    said = fivefold(home, "import model -o third --adapter model", code=2)
    assert CONFIG in said


def test_a_run_without_adapters_has_none_to_export(home: Path) -> None:
    fivefold(home, "import model -o plain --dtype fp32")
    said = fivefold(home, "export plain nothing --adapter", code=2)
    assert "has no adapters" in said and not (home / "nothing").exists()
