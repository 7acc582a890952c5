"""Memory as the tensors that really live take it, by what they are for.

Sees every operator, and so every piece of memory when it is made; the piece itself says when it is
gone. Sizes are rounded up as a GPU's allocator does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WEIGHTS, GRADIENTS, MASTER, OPTIMIZER = "weights", "gradients", "master", "optimizer"
ACTIVATIONS, LOGITS, BUFFERS = "activations", "logits", "buffers"
CATEGORIES = (WEIGHTS, GRADIENTS, MASTER, OPTIMIZER, ACTIVATIONS, LOGITS, BUFFERS)
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_BLOCK = 512  # bytes: what the allocator of a GPU rounds to
Delta = tuple[str, int]


class Meter(TorchDispatchMode):
    """Bytes that live, by category, and the most there were.

    `category` is what new memory is for; None: `sort` says it for each tensor.
    """

    def __init__(self, sort: Callable[[Any, Tensor], str]) -> None:
        super().__init__()
        self.sort = sort
        self.category: str | None = None
        self.live = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.peak, self.at_peak = 0, dict(self.live)
        self.high = 0  # the most since somebody set it to `total`
        self.known: dict[int, Delta] = {}
        self.trace: list[tuple[int, Delta]] | None = None  # by address, while something is traced

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _WAIT:  # what is waited for is there; without values torch makes it anew
            return args[0]
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self.see(func, each)
        return result

    def see(self, func: Any, tensor: Tensor) -> None:
        """Count the memory of a tensor, if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.known or not storage.nbytes():
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        delta = (self.category or self.sort(func, tensor), size)
        self.known[address] = delta
        weakref.finalize(storage, self._gone, address)
        self._add(address, delta)

    def resized(self, tensor: Tensor, category: str) -> None:
        """The memory of a tensor was made anew, or given back."""
        storage = tensor.untyped_storage()
        address, size = storage._cdata, -(-storage.nbytes() // _BLOCK) * _BLOCK
        _, before = self.known.get(address, (category, 0))
        if before != size:
            if address not in self.known:
                weakref.finalize(storage, self._gone, address)
            self.known[address] = (category, size)
            self._add(address, (category, size - before))

    def move(self, tensors: Iterable[Tensor], category: str) -> None:
        """These are for something else than was thought when they were made."""
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            if address in self.known and (known := self.known[address])[0] != category:
                self.known[address] = (category, known[1])
                self.live[known[0]] -= known[1]
                self.live[category] += known[1]

    def replay(self, deltas: Iterable[Delta]) -> None:
        """What a traced computation did to the memory, once more."""
        for delta in deltas:
            self._count(delta)

    @contextmanager
    def tracing(self) -> Iterator[list[tuple[int, Delta]]]:
        """Keep what happens inside."""
        self.trace = trace = []
        try:
            yield trace
        finally:
            self.trace = None

    @contextmanager
    def called(self, category: str) -> Iterator[None]:
        """All that is made inside is for this."""
        before, self.category = self.category, category
        try:
            yield
        finally:
            self.category = before

    def _gone(self, address: int) -> None:
        category, size = self.known.pop(address)
        self._add(address, (category, -size))

    def _add(self, address: int, delta: Delta) -> None:
        if self.trace is not None:
            self.trace.append((address, delta))
        self._count(delta)

    def _count(self, delta: Delta) -> None:
        category, size = delta
        self.live[category] += size
        self.total += size
        self.high = max(self.high, self.total)
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.live)
