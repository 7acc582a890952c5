"""Optimizers over what a rank owns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

Name = Literal["adamw", "sgd"]


def make_optimizer(
    name: Name, owned: Iterable[tuple[bool, Tensor]], lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """An optimizer over (decays, tensor) pairs; only matrices should decay."""
    pairs = list(owned)
    groups = [
        {
            "params": [tensor for decays, tensor in pairs if decays == wanted],
            "weight_decay": weight_decay if wanted else 0.0,
        }
        for wanted in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    # Fused keeps its arithmetic in float32 for bfloat16 weights, on CPU as on CUDA.
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
