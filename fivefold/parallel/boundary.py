"""The two ends of a split computation: what every rank needs in front of it, and the sum behind.

With a split sequence (sp), tokens are gathered in front and the summed result is scattered behind;
without it, every rank has all tokens in front and gets the whole sum behind. Each collective of the
forward has its mirror in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fivefold.parallel import transport
from fivefold.parallel.mesh import Mesh, Phase


class AxisBoundary:
    """The collectives of one axis; tokens lie along `dim`."""

    def __init__(
        self, mesh: Mesh, axis: str, phase: Phase, sp: bool, recompute_repeats: bool, dim: int
    ) -> None:
        self.mesh, self.axis, self.phase, self.sp, self.dim = mesh, axis, phase, sp, dim
        self.recompute_repeats, self.silent = recompute_repeats, False
        self.group, self.size, self.place = mesh.groups[axis], mesh.size(axis), mesh.place(axis)

    def enter(self, x: Tensor) -> Tensor:
        """In front: all tokens to every rank."""
        return _Enter.apply(x, self)

    def leave(self, share: Tensor) -> Tensor:
        """Behind: the sum over ranks, each with its tokens under sp."""
        return _Leave.apply(share, self)

    def gather(self, x: Tensor) -> Tensor:
        token = self._note("all_gather", x)
        return self._landed(transport.gather(x.contiguous(), self.dim, self.group), x, token)

    def scatter(self, x: Tensor) -> Tensor:
        token = self._note("reduce_scatter", x)
        return self._landed(transport.scatter(x.contiguous(), self.dim, self.group), x, token)

    def total(self, x: Tensor, op: str = "sum") -> Tensor:
        token = self._note("all_reduce", x)
        return self._landed(transport.total(x.contiguous(), op, self.group), x, token)

    def _landed(self, under_way: Tensor, x: Tensor, token: Any) -> Tensor:
        """A collective was issued, and nobody has waited for it; its result, where `x` is."""
        if self.mesh.takes_turns:
            self.mesh.let_pass(self.axis)
        if token is None:
            return transport.landed(under_way, x.device)
        arrived = transport.waited(under_way, x.device)
        self.mesh.close(token)
        return arrived

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around forward arithmetic: selective recomputation repeats it, but no collective."""
        self.silent = self.phase.backward and not self.recompute_repeats
        yield
        self.silent = False

    def _note(self, kind: str, x: Tensor) -> Any:
        return None if self.silent else self.mesh.note(self.axis, kind, x)


class _Enter(torch.autograd.Function):
    """Gather forward, scatter the summed gradient backward; without sp identity and sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wires: AxisBoundary) -> Tensor:
        ctx.wires = wires
        with wires.forward():
            return wires.gather(x) if wires.sp else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        wires: AxisBoundary = ctx.wires
        return wires.scatter(gradients[0]) if wires.sp else wires.total(gradients[0]), None


class _Leave(torch.autograd.Function):
    """Scatter the sum forward, gather the gradient backward; without sp sum and identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wires: AxisBoundary) -> Tensor:
        ctx.wires = wires
        with wires.forward():
            return wires.scatter(x) if wires.sp else wires.total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        wires: AxisBoundary = ctx.wires
        return wires.gather(gradients[0]) if wires.sp else gradients[0], None
