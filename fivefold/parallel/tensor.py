"""The tensor dimension: every matrix product split over tp, with sequence parallelism.

Splits   projections into heads and MLP width by column, those back by row, embedding and head by
         rows of the vocabulary. With sequence parallelism (sp) the tokens between them are split
         too, so that norms and residuals hold 1/tp of the activations.
Moves    with sp, for attention and MLP of every layer and microbatch: an all-gather in front and
         a reduce-scatter behind, and the mirror of both in backward; without it, one all-reduce
         forward and one backward. The loss sums three numbers a token.
Costs    four times the activations of a layer, twice a layer, on the critical path.
Wins     inside a node, when layers are wide, and when a sequence of one does not fit.
Refuses  when tp divides neither heads nor MLP width. KV heads fewer than tp are replicated, and a
         vocabulary that does not divide is padded, invisibly to the loss.

The arithmetic is local, on pieces of the weights that `core/weights.py` defines; the collectives
below are all there are.

Legend: B rows, S tokens of a row, T = S/tp, N = B·S, D model width, V rows of a vocabulary piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

from fivefold.core.weights import Piece
from fivefold.model.batch import NOT_COUNTED
from fivefold.model.decoder import Decoder
from fivefold.model.ends import Lookup, Place
from fivefold.model.layers import Product
from fivefold.parallel.mesh import Mesh, Phase

Add = Callable[[Tensor, Tensor], Tensor]
AXIS = "tp"
SEQUENCE = 1  # the dim of the tokens in (B, S, D)
# torch 2.13 renamed both, and warns about the old names.
_all_gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
_reduce_scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)


def cut(whole: Tensor, held: Piece) -> Tensor:
    """This rank's piece of a weight; a vocabulary is padded with zeros."""
    if held.dim is None:
        return whole
    stop = min(held.stop, whole.shape[held.dim])
    part = whole.narrow(held.dim, held.start, max(0, stop - held.start))
    missing = held.stop - held.start - part.shape[held.dim]
    if not missing:
        return part
    assert held.dim == 0, "only the vocabulary is padded"
    return torch.cat([part, whole.new_zeros(missing, *whole.shape[1:])])


def split(
    decoder: Decoder, mesh: Mesh, phase: Phase, sp: bool, recompute_repeats: bool, add: Add
) -> None:
    """Give a decoder whose weights are pieces the collectives that make it whole again.

    They go around the arithmetic that its leaves have already; `add` adds a bias behind a sum.
    """
    if mesh.size(AXIS) == 1:
        return
    wires = _Wires(mesh, phase, sp, recompute_repeats)
    for block in decoder.blocks.values():
        for module in (block.attention, block.mlp):
            module.register_forward_pre_hook(wires.before)
        for row in (block.attention.out, block.mlp.down):
            row.product = partial(wires.row_product, row.product, add)
    if decoder.embed is not None:
        decoder.embed.lookup = partial(wires.lookup, decoder.embed.lookup)
        decoder.embed.place = partial(wires.place, decoder.embed.place)
    if decoder.head is not None:
        decoder.head.register_forward_pre_hook(wires.before)
        decoder.head.cross_entropy = _VocabularyLoss(wires, decoder.shape.vocab)


class _Wires:
    """The collectives of one decoder; each forward one has its mirror in backward."""

    def __init__(self, mesh: Mesh, phase: Phase, sp: bool, recompute_repeats: bool) -> None:
        self.mesh, self.phase, self.sp = mesh, phase, sp
        self.recompute_repeats = recompute_repeats
        self.silent = False
        self.group, self.size, self.place_ = mesh.groups[AXIS], mesh.size(AXIS), mesh.place(AXIS)

    def before(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """In front of column-split products: all tokens to every rank."""
        x, *rest = arguments
        return (_Enter.apply(x, self), *rest)

    def after(self, share: Tensor) -> Tensor:
        """Behind row-split products: the sum over ranks, each with its tokens under sp."""
        return _Leave.apply(share, self)

    def row_product(
        self, product: Product, add: Add, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        summed = self.after(product(x, weight, None))
        return summed if bias is None else add(summed, bias)

    def lookup(self, look_up: Lookup, tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
        """Rows of this rank's piece of the vocabulary, zero elsewhere, summed over the ranks."""
        rows = weight_VD.shape[0]
        local_BS = tokens_BS - self.place_ * rows
        elsewhere_BS = (local_BS < 0) | (local_BS >= rows)
        x_BSD = look_up(local_BS.masked_fill(elsewhere_BS, 0), weight_VD)
        return self.after(x_BSD.masked_fill(elsewhere_BS[..., None], 0))

    def place(self, add: Place, x: Tensor, positions_BS: Tensor, weight_PD: Tensor) -> Tensor:
        """Learned positions, of this rank's tokens only under sp."""
        if self.sp:
            positions_BS = positions_BS.chunk(self.size, dim=SEQUENCE)[self.place_]
        return add(x, positions_BS, weight_PD)

    def gather(self, x: Tensor) -> Tensor:
        self._note("all_gather", x)
        return self._under_way(_all_gather(x.contiguous(), SEQUENCE, self.group))

    def scatter(self, x: Tensor) -> Tensor:
        self._note("reduce_scatter", x)
        return self._under_way(_reduce_scatter(x.contiguous(), "sum", SEQUENCE, self.group))

    def total(self, x: Tensor, op: str = "sum") -> Tensor:
        self._note("all_reduce", x)
        return self._under_way(functional.all_reduce(x.contiguous(), op, self.group))

    def _under_way(self, result: Tensor) -> Tensor:
        """A collective that was issued and that nobody has waited for."""
        if self.mesh.takes_turns:
            self.mesh.let_pass(AXIS)
        return result

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around forward arithmetic: selective recomputation repeats it, but no collective."""
        self.silent = self.phase.backward and not self.recompute_repeats
        yield
        self.silent = False

    def _note(self, kind: str, x: Tensor) -> None:
        if not self.silent:
            self.mesh.note(AXIS, kind, x)


class _Enter(torch.autograd.Function):
    """Gather forward, scatter the summed gradient backward; without sp identity and sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wires: _Wires) -> Tensor:
        ctx.wires = wires
        with wires.forward():
            return wires.gather(x) if wires.sp else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        wires: _Wires = ctx.wires
        return wires.scatter(gradients[0]) if wires.sp else wires.total(gradients[0]), None


class _Leave(torch.autograd.Function):
    """Scatter the sum forward, gather the gradient backward; without sp sum and identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wires: _Wires) -> Tensor:
        ctx.wires = wires
        with wires.forward():
            return wires.scatter(x) if wires.sp else wires.total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        wires: _Wires = ctx.wires
        return wires.gather(gradients[0]) if wires.sp else gradients[0], None


class _VocabularyLoss:
    """Cross-entropy over a split vocabulary: no rank ever holds all logits of a token."""

    def __init__(self, wires: _Wires, vocab: int) -> None:
        self.wires, self.vocab = wires, vocab

    def __call__(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        rows = logits_NV.shape[1]
        first = self.wires.place_ * rows
        if first + rows > self.vocab:  # rows that pad the vocabulary
            padding = torch.arange(first, first + rows, device=wide_NV.device)
            wide_NV = wide_NV.masked_fill(padding >= self.vocab, float("-inf"))
        return _SplitCrossEntropy.apply(wide_NV, labels_N - first, labels_N, self.wires)


class _SplitCrossEntropy(torch.autograd.Function):
    """The maximum over ranks, then the sums of exponentials and the logits of the labels."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, local_N: Tensor, labels_N: Tensor, wires: _Wires
    ) -> Tensor:
        counted_N = labels_N != NOT_COUNTED
        here_N = counted_N & (local_N >= 0) & (local_N < logits_NV.shape[1])
        safe_N = local_N.masked_fill(~here_N, 0)
        highest_N = wires.total(logits_NV.amax(dim=1), "max")
        shifted_NV = logits_NV - highest_N[:, None]
        target_N = shifted_NV.gather(1, safe_N[:, None])[:, 0].masked_fill(~here_N, 0)
        shares_NV = shifted_NV.exp_()
        sums_2N = wires.total(torch.stack([shares_NV.sum(dim=1), target_N]))
        losses_N = (sums_2N[0].log() - sums_2N[1]).masked_fill(~counted_N, 0)
        shares_NV /= sums_2N[0][:, None]
        ctx.save_for_backward(shares_NV, safe_N, here_N, counted_N)
        return losses_N.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        shares_NV, safe_N, here_N, counted_N = ctx.saved_tensors
        hits_N1 = here_N.to(shares_NV.dtype)[:, None]
        slope_NV = shares_NV.scatter_add(1, safe_N[:, None], -hits_N1)
        slope_NV *= counted_N[:, None] * gradients[0]
        return slope_NV, None, None, None


def sum_partial(gradients: Sequence[tuple[Piece, Tensor]], mesh: Mesh) -> None:
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
