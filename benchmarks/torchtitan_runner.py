"""TorchTitan 0.2.2 on random tokens: what `benchmarks/gpu.py compare` runs as the peer.

`benchmarks/peer.py` puts it beside TorchTitan's own files. Two models are added to TorchTitan's:
`llama3_rand`, with the shape of Llama-3.2-1B (head untied) as flavour 1B, and `qwen3_rand`, with
Qwen3-30B-A3B of 8 layers as 30B-A3B-8L. Packages that only other data needs are replaced by empty
ones where they are missing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class Unused:
    """Stands for a class that random tokens need not."""

    def __init__(self, *given: Any, **named: Any) -> None: ...


def replace_missing(name: str, **content: Any) -> None:
    """An empty package of this name with some content, if there is none."""
    top = name.split(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is not None:
        return
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            made = ModuleType(path)
            made.__path__ = []
            made.__spec__ = importlib.util.spec_from_loader(path, loader=None)
            sys.modules[path] = made
    vars(sys.modules[name]).update(content)


def prepare() -> None:
    """Make TorchTitan importable."""
    replace_missing("datasets", Dataset=Unused, IterableDataset=Unused, load_dataset=None)
    replace_missing("datasets.distributed", split_dataset_by_node=None)
    replace_missing("torchdata.stateful_dataloader", StatefulDataLoader=torch.utils.data.DataLoader)
    if importlib.util.find_spec("tensorboard") is None:
        empty = ModuleType("torch.utils.tensorboard")
        vars(empty).update(SummaryWriter=Unused)
        sys.modules["torch.utils.tensorboard"] = empty


def loader_of(base: type, flavours: dict[str, Any]) -> Any:
    """TorchTitan's hook that makes a loader: random tokens of a flavour's vocabulary."""

    class RandomTokens(base):  # type: ignore[misc, valid-type]
        def __init__(self, vocab: int, seq: int, batch: int, seed: int) -> None:
            self.vocab, self.size = vocab, (batch, seq + 1)
            self.generator = torch.Generator().manual_seed(seed)

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                tokens = torch.randint(self.vocab, self.size, generator=self.generator)
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def make(*, dp_rank: int, job_config: Any, **_: Any) -> RandomTokens:
        training = job_config.training
        vocab = flavours[job_config.model.flavor].vocab_size
        return RandomTokens(vocab, training.seq_len, training.local_batch_size, 1234 + dp_rank)

    return make


def register() -> None:
    """The two models, beside TorchTitan's own."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.models import llama3, qwen3
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.protocols.train_spec import register_train_spec

    small = TransformerModelArgs(
        dim=2048,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        ffn_dim_multiplier=1.5,
        multiple_of=1024,
        rope_theta=500000,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=32.0),
    )
    short = replace(qwen3.qwen3_args["30B-A3B"], n_layers=8)
    for name, family, more in (
        ("llama3_rand", llama3, {"1B": small}),
        ("qwen3_rand", qwen3, {"30B-A3B-8L": short}),
    ):
        spec = family.get_train_spec()
        flavours = {**spec.model_args, **more}
        hooks = {"build_tokenizer_fn": None, "build_validator_fn": None}
        loader = loader_of(BaseDataLoader, flavours)
        spec = replace(spec, model_args=flavours, build_dataloader_fn=loader, **hooks)
        register_train_spec(name, spec)


if __name__ == "__main__":
    prepare()
    register()
    from torchtitan import train

    train.main(train.Trainer)
