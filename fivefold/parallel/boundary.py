"""The two ends of a split computation: what every rank needs before it, and the sum after it.

With a split sequence (sp), tokens are gathered before and the sum is scattered after; without it,
every rank has all tokens before and gets the full sum after. Each collective of the forward has its
mirror in backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.plan import Plan
from fivefold.model import AS_THEY_ARE, RowCodes
from fivefold.parallel.mesh import Issued, Mesh


class AxisBoundary:
    """The collectives of one axis; tokens lie along `dim`."""

    def __init__(self, mesh: Mesh, axis: str, sp: bool, dim: int) -> None:
        self.mesh, self.axis, self.sp, self.dim = mesh, axis, sp, dim
        self.size, self.coord = mesh.size(axis), mesh.coord(axis)

    def enter(self, x: Tensor, codes: RowCodes = AS_THEY_ARE) -> Tensor:
        """All-gather tokens before a split computation."""
        return _Enter.apply(x, self, codes)

    def leave(self, partial_sum: Tensor, codes: RowCodes = AS_THEY_ARE) -> Tensor:
        """Sum over ranks after a split computation, under sp by a reduce-scatter over tokens.
        `codes`: the format in which its gradient is sent."""
        return _Leave.apply(partial_sum, self, codes)

    def gather(self, x: Tensor) -> Tensor:
        """All-gather the tokens of all ranks."""
        return self.mesh.gather(x.contiguous(), self.axis, self.dim)

    def scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter: sum over ranks, and return this rank's tokens."""
        return self.mesh.scatter(x.contiguous(), self.axis, self.dim)

    def total(self, x: Tensor, op: str = "sum") -> Tensor:
        """All-reduce over ranks."""
        return self.mesh.total(x.contiguous(), self.axis, op)

    def start_gather(self, x: Tensor, into: Tensor) -> Issued:
        """Start to all-gather the tokens of all ranks into `into`, rank by rank."""
        return self.mesh.all_gather(into, x, self.axis, yields=True)

    def start_scatter(self, x: Tensor, into: Tensor) -> Issued:
        """Start to reduce-scatter over ranks; `into` receives this rank's tokens."""
        return self.mesh.reduce_scatter(into, x, self.axis, yields=True)

    def start_total(self, x: Tensor) -> Issued:
        """Start to all-reduce in place."""
        return self.mesh.all_reduce(x, self.axis, dist.ReduceOp.SUM, yields=True)


class _Enter(torch.autograd.Function):
    """Gather forward, scatter the summed gradient backward; without sp identity and sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: AxisBoundary, codes: RowCodes) -> Tensor:
        ctx.boundary = boundary
        sent = codes.open(x)
        return codes.close(boundary.gather(sent) if boundary.sp else sent.view_as(sent))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (grad,), boundary = gradients, ctx.boundary
        return boundary.scatter(grad) if boundary.sp else boundary.total(grad), None, None


class _Leave(torch.autograd.Function):
    """Scatter the sum forward, gather the gradient backward; without sp sum and identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: AxisBoundary, codes: RowCodes) -> Tensor:
        ctx.boundary, ctx.codes = boundary, codes
        return boundary.scatter(x) if boundary.sp else boundary.total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        boundary, codes = ctx.boundary, ctx.codes
        sent = codes.open(gradients[0])
        return codes.close(boundary.gather(sent) if boundary.sp else sent), None, None


def padded_tokens(plan: Plan, mesh: Mesh) -> Tensor | None:
    """Mask of padding among this rank's tokens of a row; None without padding."""
    if plan.fp8 is None or plan.padded_seq == plan.batch.seq:
        return None
    ranges = plan.split.rank_tokens(plan.padded_seq, plan.layout.coord(mesh.rank).cp)
    places = [position for span in ranges for position in span]
    return torch.tensor(places).to(mesh.device) >= plan.batch.seq
