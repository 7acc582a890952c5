"""TorchTitan's own models and CheckpointManager (0.2.2) on a CPU, as a judge of folders of weights.

    python -m tests.titan_judge FOLDER

FOLDER has `config/config.json`, `tokens.pt` and `out`, a DCP folder. Its logits are computed, two
steps are trained, and both kinds of checkpoints are saved: `full`, with states, and `model`.
`logits.pt` has the logits before and after. Patched: imports of Triton and of packages for data.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fivefold.core import models
from fivefold.core.shape import Rope, Shape
from tests.foreign_parsers import prepare


def their_model(shape: Shape) -> Any:
    """Their class, told what `fivefold export` says of the model."""
    common: dict[str, Any] = {
        **{"dim": shape.width, "n_layers": shape.layers, "n_heads": shape.heads},
        **{"n_kv_heads": shape.kv_heads, "vocab_size": shape.vocab, "norm_eps": shape.norm_eps},
        **{"rope_theta": shape.rope_theta, "max_seq_len": shape.max_seq},
    }
    if shape.qk_norm == "head":
        from torchtitan.models.qwen3.model.args import Qwen3ModelArgs  # type: ignore[import-not-found]  # noqa: I001
        from torchtitan.models.qwen3.model.model import Qwen3Model  # type: ignore[import-not-found]

        sizes = {"head_dim": shape.head_dim, "hidden_dim": shape.ffn}
        return Qwen3Model(Qwen3ModelArgs(**common, **sizes, enable_weight_tying=shape.tied))
    from torchtitan.models.llama3.model import args  # type: ignore[import-not-found]
    from torchtitan.models.llama3.model.model import Transformer  # type: ignore[import-not-found]

    rope = shape.rope or Rope("llama3", 1.0, 8192)
    scaling = args.RoPEScalingArgs(rope.factor, rope.low_freq, rope.high_freq, rope.original_seq)
    # Its MLP is as wide as the least multiple of a number above 8/3 of the width times a factor.
    ffn = {"multiple_of": shape.ffn, "ffn_dim_multiplier": 0.1}
    return Transformer(args.TransformerModelArgs(**common, **ffn, rope_scaling_args=scaling))


def manager_of(model: Any, folder: Path, **keys: Any) -> Any:
    """Its CheckpointManager, which saves into this folder."""
    from torchtitan.components.checkpoint import CheckpointManager  # type: ignore[import-not-found]
    from torchtitan.components.lr_scheduler import (  # type: ignore[import-not-found]
        LRSchedulersContainer,
    )
    from torchtitan.components.optimizer import (  # type: ignore[import-not-found]
        OptimizersContainer,
    )
    from torchtitan.config import Checkpoint  # type: ignore[import-not-found]

    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 1e-2})
    schedulers = LRSchedulersContainer(optimizers, lambda step: 1.0)
    config = Checkpoint(enable=True, folder=folder.name, keep_latest_k=0, **keys)
    return CheckpointManager(
        None, [model], optimizers, schedulers, {}, config, None, str(folder.parent)
    )


def judge(folder: Path) -> None:
    """Load, compute, train, compute, save."""
    alone = ModuleType("torchtitan")  # its own first lines import kernels
    found = importlib.util.find_spec("torchtitan")
    assert found is not None and found.submodule_search_locations is not None
    alone.__path__ = list(found.submodule_search_locations)
    sys.modules["torchtitan"] = alone
    prepare()
    dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
    torch.manual_seed(0)
    model = their_model(models.load(str(folder / "config")))
    with torch.no_grad():
        model.init_weights()
    tokens = torch.load(folder / "tokens.pt")
    manager = manager_of(model, folder / "full", initial_load_path=str(folder / "out"), interval=2)
    assert manager.load()
    with torch.no_grad():
        answers = {"loaded": model(tokens)}
    for _ in range(2):
        model(tokens).square().mean().backward()
        manager.states["optimizer"].step()
        manager.states["optimizer"].zero_grad()
        manager.states["lr_scheduler"].step()
    with torch.no_grad():
        answers["changed"] = model(tokens)
    manager.save(2)
    manager_of(model, folder / "model", last_save_model_only=True).save(2, last_step=True)
    torch.save(answers, folder / "logits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    judge(Path(sys.argv[1]))
