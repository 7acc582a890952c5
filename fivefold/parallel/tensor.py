"""The tensor dimension: every GEMM split over tp, with sequence parallelism.

Splits   projections into heads and MLP width by column, those back by row, embedding and head by
         rows of the vocabulary. With sequence parallelism (sp) the tokens between them are split
         too, so that norms and residuals hold 1/tp of the activations.
Moves    with sp, for attention and MLP of every layer and microbatch: an all-gather before and a
         reduce-scatter after, and the mirror of both in backward; without sp, one all-reduce
         forward and one backward. The loss sums three numbers a token.
Costs    four times the activations of a layer, twice a layer, on the critical path. With sp, the
         input of column-split GEMMs is saved as this rank's tokens and gathered once more in
         backward; or saved gathered, for one gather less and tp times the memory.
Wins     inside a node, when layers are wide, and when a microbatch of one sequence does not fit.
Refuses  when tp divides neither heads nor MLP width. KV heads fewer than tp are replicated, and a
         vocabulary that does not divide is padded, invisibly to the loss.

The arithmetic is local, on shards of the weights that `core/weights.py` defines; the collectives
below are all there are.

Legend: B rows, S tokens of a row, T = S/tp, N = B·S, D model width, V rows of a vocabulary shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from fivefold.core.weights import WeightShard
from fivefold.model.batch import NOT_COUNTED
from fivefold.model.decoder import AddPositions, Embedding, Lookup
from fivefold.model.flash import is_fake
from fivefold.model.layers import Linear, Matmul
from fivefold.model.moe import MoeMlp
from fivefold.parallel.boundary import AxisBoundary
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.stage import Stage

Add = Callable[[Tensor, Tensor], Tensor]
AXIS = "tp"
SEQUENCE = 1  # the dim of the tokens in (B, S, D)


def cut_inside(experts: Tensor, shard: WeightShard) -> Tensor:
    """This rank's shard of each of its experts."""
    if shard.inner is None:
        return experts
    dim, start, stop = shard.inner
    return experts.narrow(dim, start, stop - start)


def cut(full: Tensor, shard: WeightShard) -> Tensor:
    """This rank's shard of a weight; a vocabulary is padded with zeros."""
    full = cut_inside(full, shard)
    if shard.dim is None:
        return full
    stop = min(shard.stop, full.shape[shard.dim])
    local = full.narrow(shard.dim, shard.start, max(0, stop - shard.start))
    missing = shard.stop - shard.start - local.shape[shard.dim]
    if not missing:
        return local
    assert shard.dim == 0, "only the vocabulary is padded"
    return torch.cat([local, full.new_zeros(missing, *full.shape[1:])])


def split(stage: Stage) -> None:
    """Put the collectives around the arithmetic of a decoder whose weights are shards."""
    plan, decoder = stage.plan, stage.model
    if stage.mesh.size(AXIS) == 1:
        return
    repeats = plan.recompute.kind == "full"
    boundary = _TensorBoundary(stage.mesh, AXIS, stage.phase, plan.layout.sp, repeats, SEQUENCE)
    add = torch.add if stage.queue is None else stage.queue.add
    for block in decoder.all_blocks():
        # Experts are another dimension: they work on the tokens that a rank has.
        mlp = block.mlp.shared if isinstance(block.mlp, MoeMlp) else block.mlp
        for module, row in ((block.attention, block.attention.out), (mlp, mlp and mlp.down)):
            if module is None or row is None:
                continue
            module.register_forward_pre_hook(boundary.before)
            for column in (each for each in module.modules() if isinstance(each, Linear)):
                if plan.saves_input_shards and column is not row:
                    column.matmul = partial(boundary.column_product, column.matmul)
            row.matmul = partial(boundary.row_product, row.matmul, add)
    for embed in (each for each in decoder.modules() if isinstance(each, Embedding)):
        embed.lookup = partial(boundary.lookup, embed.lookup)
        embed.add_positions = partial(boundary.add_positions, embed.add_positions)
    if decoder.head is not None:
        decoder.head.register_forward_pre_hook(boundary.before)
        decoder.head.cross_entropy = _VocabularyLoss(boundary, decoder.shape.vocab)


class _TensorBoundary(AxisBoundary):
    """The arithmetic of a decoder between its collectives."""

    def before(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before column-split GEMMs."""
        x, *rest = arguments
        full = self.enter(x)
        self.shards[full] = _Shard(self, x.detach())
        return (full, *rest)

    @cached_property
    def shards(self) -> WeakTensorKeyDictionary:
        """What was gathered into a tensor, while that lives."""
        return WeakTensorKeyDictionary()

    def column_product(
        self, product: Matmul, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """A GEMM that saves its input as it was before it was gathered."""
        shard: _Shard | None = self.shards.get(x)
        if shard is None:  # of another GEMM, inside the split
            return product(x, weight, bias)
        # Not the tensor itself: autograd holds these functions as long as what they packed.
        with saved_tensors_hooks(partial(shard.pack, _address(x), x.numel()), shard.unpack):
            return product(x, weight, bias)

    def row_product(
        self, product: Matmul, add: Add, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        summed = self.leave(product(x, weight, None))
        return summed if bias is None else add(summed, bias)

    def lookup(self, look_up: Lookup, tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
        """Rows of this rank's shard of the vocabulary, zero elsewhere, summed over the ranks."""
        rows = weight_VD.shape[0]
        local_BS = tokens_BS - self.coord * rows
        elsewhere_BS = (local_BS < 0) | (local_BS >= rows)
        x_BSD = look_up(local_BS.masked_fill(elsewhere_BS, 0), weight_VD)
        return self.leave(x_BSD.masked_fill(elsewhere_BS[..., None], 0))

    def add_positions(
        self, add: AddPositions, x: Tensor, positions_BS: Tensor, weight_PD: Tensor
    ) -> Tensor:
        """Learned positions, of this rank's tokens only under sp."""
        if self.sp:
            positions_BS = positions_BS.chunk(self.size, dim=SEQUENCE)[self.coord]
        return add(x, positions_BS, weight_PD)


def _address(tensor: Tensor) -> int:
    """Where its memory is; of a tensor without values, what stands for it."""
    return tensor.untyped_storage()._cdata if is_fake(tensor) else tensor.data_ptr()


class _Shard:
    """This rank's tokens saved in the place of all of them, for the GEMMs of one module."""

    def __init__(self, boundary: AxisBoundary, x: Tensor) -> None:
        self.boundary, self.x = boundary, x
        self.users = 0
        self.full: Tensor | None = None

    def pack(self, address: int, size: int, saved: Tensor) -> Tensor | torch.Size:
        """Save only the shape of what was gathered, whatever view of it is saved."""
        if _address(saved) != address or saved.numel() != size:
            return saved
        self.users += 1
        return saved.shape

    def unpack(self, kept: Tensor | torch.Size) -> Tensor:
        """Gathered for the first GEMM that asks, and freed after the last."""
        if isinstance(kept, Tensor):
            return kept
        full = self.boundary.gather(self.x) if self.full is None else self.full
        self.users -= 1
        self.full = full if self.users else None
        return full.view(kept)


class _VocabularyLoss:
    """Cross-entropy over a split vocabulary: no rank ever holds all logits of a token."""

    def __init__(self, boundary: _TensorBoundary, vocab: int) -> None:
        self.boundary, self.vocab = boundary, vocab

    def __call__(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        rows = logits_NV.shape[1]
        first = self.boundary.coord * rows
        if first + rows > self.vocab:  # rows that pad the vocabulary
            padding = torch.arange(first, first + rows, device=wide_NV.device)
            wide_NV = wide_NV.masked_fill(padding >= self.vocab, float("-inf"))
        return _SplitCrossEntropy.apply(wide_NV, labels_N - first, labels_N, self.boundary)


class _SplitCrossEntropy(torch.autograd.Function):
    """The maximum over ranks, then the sums of exponentials and the logits of the labels."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, local_N: Tensor, labels_N: Tensor, boundary: _TensorBoundary
    ) -> Tensor:
        counted_N = labels_N != NOT_COUNTED
        here_N = counted_N & (local_N >= 0) & (local_N < logits_NV.shape[1])
        safe_N = local_N.masked_fill(~here_N, 0)
        highest_N = boundary.total(logits_NV.amax(dim=1), "max")
        shifted_NV = logits_NV - highest_N[:, None]
        target_N = shifted_NV.gather(1, safe_N[:, None])[:, 0].masked_fill(~here_N, 0)
        shares_NV = shifted_NV.exp_()
        sums_2N = boundary.total(torch.stack([shares_NV.sum(dim=1), target_N]))
        losses_N = (sums_2N[0].log() - sums_2N[1]).masked_fill(~counted_N, 0)
        shares_NV /= sums_2N[0][:, None]
        ctx.save_for_backward(shares_NV, safe_N, here_N, counted_N)
        return losses_N.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        shares_NV, safe_N, here_N, counted_N = ctx.saved_tensors
        hits_N1 = here_N.to(shares_NV.dtype)[:, None]
        grad_NV = shares_NV.scatter_add(1, safe_N[:, None], -hits_N1)
        grad_NV *= counted_N[:, None] * gradients[0]
        return grad_NV, None, None, None


def sum_partial(gradients: Sequence[tuple[WeightShard, Tensor]], mesh: Mesh) -> None:
    """Sum the gradients of weights that several tp ranks hold but use on different tokens or heads.

    One all-reduce for those that all hold, one for KV heads that some share, in float32 or wider.
    """
    for axis in (AXIS, "replica"):
        if mesh.size(axis) == 1:
            continue
        shared = [
            gradient
            for held, gradient in gradients
            if held.partial and (held.dim is None) == (axis == AXIS)
        ]
        if shared:
            mesh.sum_together(shared, axis)
