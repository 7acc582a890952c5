"""TorchTitan's own models and CheckpointManager on a CPU, as judges of folders of weights.

    python -m tests.titan_judge FOLDER

FOLDER has `config/config.json`, `tokens.pt` and `out`, a DCP folder. Its logits are computed, two
steps are trained, and both kinds of checkpoints are saved: `full`, with states, and `model`.
`logits.pt` has the logits before and after. 0.2.2 and 0.3.0 are known. Patched: imports of Triton
and of packages for data; in 0.3.0 attention is torch's own, which needs no kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fivefold.core.model import presets as models
from fivefold.core.model.shape import Rope, Shape
from tests.foreign_parsers import prepare

PLAIN = Rope("llama3", 1.0, 8192)  # scales nothing
RATE = {"lr": 1e-2}
Manager = Callable[[Any, Path, dict[str, Any]], Any]


def old_model(shape: Shape) -> Any:
    """Of 0.2.2, told what `fivefold export` says of the model."""
    common: dict[str, Any] = {
        **{"dim": shape.width, "n_layers": shape.layers, "n_heads": shape.heads},
        **{"n_kv_heads": shape.kv_heads, "vocab_size": shape.vocab, "norm_eps": shape.norm_eps},
        **{"rope_theta": shape.rope_theta, "max_seq_len": shape.max_seq},
    }
    if shape.qk_norm == "head":
        from torchtitan.models.qwen3.model import args, model

        sizes = {"head_dim": shape.head_dim, "hidden_dim": shape.ffn}
        given = args.Qwen3ModelArgs(**common, **sizes, enable_weight_tying=shape.tied)
        return model.Qwen3Model(given)
    from torchtitan.models.llama3.model import args, model

    rope = shape.rope or PLAIN
    scaling = args.RoPEScalingArgs(rope.factor, rope.low_freq, rope.high_freq, rope.original_seq)
    # Its MLP is as wide as the least multiple of a number above 8/3 of the width times a factor.
    ffn = {"multiple_of": shape.ffn, "ffn_dim_multiplier": 0.1}
    given = args.TransformerModelArgs(**common, **ffn, rope_scaling_args=scaling)
    return model.Transformer(given)


def old_manager(model: Any, folder: Path, keys: dict[str, Any]) -> Any:
    """Of 0.2.2, which saves into this folder."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config import Checkpoint

    optimizers = OptimizersContainer([model], torch.optim.AdamW, RATE)
    schedulers = LRSchedulersContainer(optimizers, lambda step: 1.0)
    config = Checkpoint(enable=True, folder=folder.name, keep_latest_k=0, **keys)
    return CheckpointManager(
        None, [model], optimizers, schedulers, {}, config, None, str(folder.parent)
    )


def new_model(shape: Shape) -> Any:
    """Of 0.3.0, whose queries, keys and values are one matmul."""
    from torchtitan.models import llama3, qwen3
    from torchtitan.models.common import Embedding, Linear, RMSNorm, rope
    from torchtitan.models.common.attention import ScaledDotProductAttention

    is_qwen = shape.qk_norm == "head"
    scaled = shape.rope or PLAIN
    rotation = (rope.CosSinRoPE if is_qwen else rope.ComplexRoPE).Config(
        dim=shape.head_dim,
        max_seq_len=shape.max_seq,
        theta=shape.rope_theta,
        scaling="none" if shape.rope is None else "llama",
        scaling_factor=scaled.factor,
        original_max_position_embeddings=scaled.original_seq,
    )
    sizes: dict[str, Any] = {
        **{"n_layers": shape.layers, "dim": shape.width, "n_heads": shape.heads},
        **{"n_kv_heads": shape.kv_heads, "hidden_dim": shape.ffn, "rope": rotation},
        **{"attn_backend": "flex", "fuse_qkv": True},
    }
    if is_qwen:
        kind, layers = qwen3.Qwen3Model, qwen3._build_qwen3_layers(head_dim=shape.head_dim, **sizes)
    else:
        kind, layers = llama3.Llama3Model, llama3._build_llama3_layers(**sizes)
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    first = {"param_init": {"weight": torch.nn.init.normal_}}
    return kind.Config(
        dim=shape.width,
        vocab_size=shape.vocab,
        enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab, embedding_dim=shape.width, **first
        ),
        norm=RMSNorm.Config(normalized_shape=shape.width, eps=shape.norm_eps, **first),
        lm_head=Linear.Config(in_features=shape.width, out_features=shape.vocab, **first),
        layers=layers,
    ).build()


def new_manager(model: Any, folder: Path, keys: dict[str, Any]) -> Any:
    """Of 0.3.0, which saves into this folder."""
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer import lr_scheduler, optimizer

    group = optimizer.ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=RATE)
    optimizers = optimizer.OptimizersContainer(
        optimizer.OptimizersContainer.Config(param_groups=[group], implementation="for-loop"),
        model_parts=[model],
    )
    schedulers = lr_scheduler.LRSchedulersContainer.Config(warmup_steps=1).build(
        optimizers=optimizers, training_steps=100
    )
    config = CheckpointManager.Config(enable=True, folder=folder.name, keep_latest_k=0, **keys)
    return CheckpointManager(
        config,
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=None,
        base_folder=str(folder.parent),
    )


def judge(folder: Path) -> None:
    """Load, compute, train, compute, save."""
    is_old = version("torchtitan").startswith("0.2.")
    alone = ModuleType("torchtitan")  # its own first lines import kernels
    found = find_spec("torchtitan")
    assert found is not None and found.submodule_search_locations is not None
    alone.__path__ = list(found.submodule_search_locations)
    sys.modules["torchtitan"] = alone
    prepare()
    dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
    build: tuple[Callable[[Shape], Any], Manager] = (
        (old_model, old_manager) if is_old else (new_model, new_manager)
    )
    model = build[0](models.load(str(folder / "config")))
    tokens = torch.load(folder / "tokens.pt")
    manager = build[1](
        model, folder / "full", {"initial_load_path": str(folder / "out"), "interval": 2}
    )
    assert manager.load()
    given = (tokens,) if is_old else (tokens, torch.arange(tokens.shape[1]).expand(tokens.shape))
    with torch.no_grad():
        answers = {"loaded": model(*given)}
    for _ in range(2):
        model(*given).square().mean().backward()
        manager.states["optimizer"].step()
        manager.states["optimizer"].zero_grad()
        manager.states["lr_scheduler"].step()
    with torch.no_grad():
        answers["changed"] = model(*given)
    manager.save(2)
    build[1](model, folder / "model", {"last_save_model_only": True}).save(2, last_step=True)
    torch.save(answers, folder / "logits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    judge(Path(sys.argv[1]))
