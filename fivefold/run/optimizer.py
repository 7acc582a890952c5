"""Optimizers over what a rank owns, with their states on the device or in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

Name = Literal["adamw", "sgd"]


class Row(Protocol):
    """A weight, as far as an optimizer cares: only matrices decay."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Owned(Protocol):
    """A weight or a part of one, and its gradient."""

    tensor: Tensor

    @property
    def row(self) -> Row: ...
    @property
    def grad(self) -> Tensor: ...


def make_optimizer(
    name: Name, owned: Sequence[tuple[bool, Tensor]], lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """An optimizer over (decays, tensor) pairs."""
    groups = [
        {
            "params": [tensor for decays, tensor in owned if decays == wanted],
            "weight_decay": weight_decay if wanted else 0.0,
        }
        for wanted in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    # Fused keeps its arithmetic in float32 for bfloat16 weights, on CPU as on CUDA.
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


class HostOptimizer:
    """States live in host memory; a few weights at a time are updated on the device.

    The arithmetic is the device's own, so that the weights are the same to the bit as with states
    that stay there; the price is one trip of the states over the host link and back.
    """

    def __init__(
        self,
        name: Name,
        owned: Sequence[Owned],
        lr: float,
        weight_decay: float,
        at_once: int = 256_000_000,
    ) -> None:
        """`at_once` bounds the bytes of weights that are updated together."""
        self.name: Name = name
        self.lr, self.weight_decay = lr, weight_decay
        self.batches = _batches(owned, at_once)
        self.states: dict[int, dict[str, Tensor]] = {}

    def step(self) -> None:
        """Update everything, batch by batch."""
        for batch in self.batches:
            self._update(batch)

    def _update(self, batch: list[Owned]) -> None:
        device = batch[0].grad.device
        here = [each.tensor.detach().to(device, non_blocking=True) for each in batch]
        pairs = [(len(each.row.shape) > 1, one) for each, one in zip(batch, here, strict=True)]
        optimizer = make_optimizer(self.name, pairs, self.lr, self.weight_decay)
        for each, one in zip(batch, here, strict=True):
            one.grad = each.grad
            if (state := self.states.get(id(each))) is not None:
                optimizer.state[one] = {
                    key: value.to(device, non_blocking=True) for key, value in state.items()
                }
        optimizer.step()
        for each, one in zip(batch, here, strict=True):
            if each.tensor.device != device:
                each.tensor.copy_(one)
            self._keep(each, optimizer.state[one])

    def _keep(self, each: Owned, state: dict[str, Tensor]) -> None:
        """Copy the states into pinned memory, made once."""
        kept = self.states.setdefault(id(each), {})
        for key, value in state.items():
            if key not in kept:
                kept[key] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            kept[key].copy_(value)


def _batches(owned: Sequence[Owned], at_once: int) -> list[list[Owned]]:
    batches: list[list[Owned]] = []
    size = 0
    for each in owned:
        if not batches or size + each.tensor.nbytes > at_once:
            batches.append([])
            size = 0
        batches[-1].append(each)
        size += each.tensor.nbytes
    return batches
