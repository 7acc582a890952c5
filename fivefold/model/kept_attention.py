"""Attention that runs once, though the forward of its block runs again in backward.

The second run of a segment makes queries, keys and values again. What the kernel made of them, its
result and what it saved for its own backward, is kept from the first run: the second takes the
result and calls no kernel. This is so for any kernel, also for one with collectives inside: these
are not issued again either.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fivefold.model.remake import address

Kernel = Callable[..., Tensor]


class KeptCall:
    """One call of a kernel. Of its inputs only their places are saved: the second run makes them,
    and they are freed when the kernel's backward has read them."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        self.known = [_memory(tensor) for tensor in inputs]
        self.result: Tensor | None = None
        self.again: dict[int, Tensor] = {}
        self.readers = 0

    def pack(self, saved: Tensor) -> Tensor | int:
        memory = _memory(saved)
        if memory not in self.known:
            return saved
        self.readers += 1
        return self.known.index(memory)

    def unpack(self, reference: Tensor | int) -> Tensor:
        if isinstance(reference, Tensor):
            return reference
        tensor = self.again[reference]
        self.readers -= 1
        if not self.readers:
            self.again.clear()
        return tensor

    def take(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The result, for the second run, in exchange for its inputs."""
        assert self.result is not None, "the first run has ended"
        result, self.result = self.result, None
        if self.readers:
            self.again = dict(enumerate(inputs))
        return result.requires_grad_()


KeptCalls = dict[int, KeptCall]
"""Of one segment and microbatch, by the site of an attention."""


def kept_once(kernel: Kernel, site: int) -> Kernel:
    """The same kernel; where a segment has a place for what it makes, it runs once."""
    return partial(_call, kernel, site)


def _call(kernel: Kernel, site: int, q: Tensor, k: Tensor, v: Tensor, info: Any) -> Tensor:
    calls: KeptCalls | None = info.kept_calls
    if calls is None:
        return kernel(q, k, v, info)
    if site in calls:
        return calls[site].take((q, k, v))
    calls[site] = call = KeptCall((q, k, v))
    with saved_tensors_hooks(call.pack, call.unpack):
        out = kernel(q, k, v, info)
    call.result = out.detach()
    return out


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """What tells a tensor from others: where it lies, and how."""
    return address(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
