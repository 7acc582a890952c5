"""Activations that backward makes again instead of saving them.

Whoever computes an activation can say how to make it again (`remade`). GEMMs that would save it
(`saving`) then keep that instead. It is made for the first GEMM that asks, and freed after the
last. Gradients are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from fivefold.model.kernels import is_fake

Make = Callable[[], Tensor]


class Remade:
    """An activation that was not saved, and what uses it."""

    def __init__(self, tensor: Tensor, make: Make) -> None:
        # Not the tensor itself: autograd holds this as long as what it stands for.
        self.address, self.size, self.make = address(tensor), tensor.numel(), make
        self.users = 0
        self.value: Tensor | None = None

    def pack(self, saved: Tensor) -> Tensor | torch.Size:
        """Save only the shape, whatever view of the activation is saved."""
        if address(saved) != self.address or saved.numel() != self.size:
            return saved
        self.users += 1
        return saved.shape

    def unpack(self, reference: Tensor | torch.Size) -> Tensor:
        return reference if isinstance(reference, Tensor) else self.take().view(reference)

    def take(self) -> Tensor:
        """The activation, for one of its users."""
        if self.value is None:
            with torch.no_grad():
                self.value = self.make()
        value, self.users = self.value, self.users - 1
        if not self.users:
            self.value = None
        return value


_REMADE = WeakTensorKeyDictionary()  # by the activation, while that lives


def remade(tensor: Tensor, make: Make) -> Tensor:
    """The tensor; from now on GEMMs keep `make` instead of it."""
    if torch.is_grad_enabled():
        _REMADE[tensor] = Remade(tensor, make)
    return tensor


def saving(x: Tensor) -> AbstractContextManager[object]:
    """Around what may save `x`: it keeps how `x` is made again, if that is known."""
    record: Remade | None = _REMADE.get(x) if torch.is_grad_enabled() else None
    return nullcontext() if record is None else saved_tensors_hooks(record.pack, record.unpack)


def later(x: Tensor) -> Make:
    """`x` when it is asked for, once: made again, if it is known how."""
    record: Remade | None = _REMADE.get(x)
    if record is None:
        return partial(_same, x.detach())
    record.users += 1
    return record.take


def _same(x: Tensor) -> Tensor:
    return x


def address(tensor: Tensor) -> int:
    """Where its memory is; of a tensor without values, what stands for it."""
    return tensor.untyped_storage()._cdata if is_fake(tensor) else tensor.data_ptr()
