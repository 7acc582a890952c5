"""Sums over ranks whose bits do not depend on where a number lies in its tensor.

A ring cuts a tensor into as many parts as there are ranks and adds each of them in another order of
ranks. So the sum of a token changes with the tokens beside it. Here every rank gets the terms of
all ranks and adds them in rank order, in float32 or wider, and rounds once.

Splits   nothing that a plain mesh does not split.
Moves    an all-gather of whole tensors for an all-reduce: n/2 times its bytes over n ranks. An
         all-to-all for a reduce-scatter: the same bytes.
Costs    n times the memory of a tensor while it is summed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel import transport
from fivefold.parallel.mesh import Issued, Mesh
from fivefold.parallel.transport import Pending


class RankOrderMesh(Mesh):
    """A mesh whose sums add in rank order."""

    def all_reduce(
        self, tensor: Tensor, axis: str, op: dist.ReduceOp.RedOpType, *, yields: bool = False
    ) -> Issued:
        """As in `Mesh`; sums add in rank order."""
        if op != dist.ReduceOp.SUM:
            return super().all_reduce(tensor, axis, op, yields=yields)
        size = self.size(axis)
        terms = tensor.new_empty(size * len(tensor), *tensor.shape[1:])

        def start(group: dist.ProcessGroup) -> Pending:
            return _TermsInOrder(transport.all_gather(terms, tensor, group), terms, size, tensor)

        return self.issue(axis, "all_gather", tensor, start, yields=yields)

    def reduce_scatter(
        self, output: Tensor, full: Tensor, axis: str, *, yields: bool = False
    ) -> Issued:
        """As in `Mesh`; sums add in rank order."""
        size = self.size(axis)
        counts = [len(output)] * size

        def start(group: dist.ProcessGroup) -> Pending:
            return _TermsInOrder(
                transport.exchange(full, counts, counts, group), None, size, output
            )

        return self.issue(axis, "all_to_all", full, start, yields=yields)

    def total(self, x: Tensor, axis: str, op: str = "sum") -> Tensor:
        """As in `Mesh`; sums add in rank order."""
        if op != "sum":
            return super().total(x, axis, op)
        summed = x.clone()
        self.all_reduce(summed, axis, dist.ReduceOp.SUM, yields=True).wait()
        return summed

    def scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """As in `Mesh`; sums add in rank order."""
        shards = x.chunk(self.size(axis), dim)
        local_shard = torch.empty_like(shards[0], memory_format=torch.contiguous_format)
        sent = torch.cat(shards) if dim else x
        self.reduce_scatter(local_shard, sent, axis, yields=True).wait()
        return local_shard


class _TermsInOrder:
    """Terms of all ranks as they arrive, one after another, and their sum."""

    def __init__(self, coming: Pending, terms: Tensor | None, size: int, into: Tensor) -> None:
        """Without `terms` the wait gives them."""
        self.coming, self.terms, self.size, self.into = coming, terms, size, into

    def wait(self) -> Tensor:
        """The sum."""
        came = self.coming.wait()
        terms = came if self.terms is None else self.terms
        assert isinstance(terms, Tensor)
        return self.into.copy_(in_order(terms.unflatten(0, (self.size, -1))))

    @property
    def done(self) -> bool:
        """Never before it was waited for: the sum is computed there."""
        return False


def in_order(terms: Tensor) -> Tensor:
    """Sum over the first dim, one term after another, in float32 or wider."""
    total = terms[0].to(torch.promote_types(terms.dtype, torch.float32))
    for term in terms[1:]:
        total = total + term
    return total
