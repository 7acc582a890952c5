"""The tensor dimension: every GEMM split over tp, with sequence parallelism.

Splits   projections into heads and MLP width by column, those back by row, embedding and head by
         rows of the vocabulary. With sequence parallelism (sp) the tokens between them are split
         too, so that norms and residuals hold 1/tp of the activations.
Moves    with sp, for attention and MLP of every layer and microbatch: an all-gather before and a
         reduce-scatter after, and the mirror of both in backward; without sp, one all-reduce
         forward and one backward. The loss sums three numbers a token.
Costs    four times the activations of a layer, twice a layer; of the backward, what runs beside
         matmuls (`parallel/tensor_linear.py`) is hidden. With sp, the input of column-split GEMMs
         is saved as this rank's tokens and gathered once more in backward; or saved gathered, for
         one gather less and tp times the memory.
Wins     inside a node, when layers are wide, and when a microbatch of one sequence does not fit.
Refuses  when tp divides neither heads nor MLP width. KV heads fewer than tp are replicated, and a
         vocabulary that does not divide is padded, invisibly to the loss.

The arithmetic is local, on shards of the weights that `core/layout/weight_table.py` defines; the
collectives below are all there are.

Legend: B rows, S tokens of a row, T = S/tp, N = B·S, D model width, V rows of a vocabulary shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.core.layout import WeightShard
from fivefold.core.model import Shape
from fivefold.core.plan import Plan
from fivefold.model import (
    NOT_COUNTED,
    PLAIN,
    AddPositions,
    Attention,
    Block,
    Embedding,
    Found,
    GradientsInForward,
    LatentAttention,
    Linear,
    Lookup,
    MixerLayer,
    MoeMlp,
    Wanted,
    cap_in_place,
    cap_slope,
    linear,
)
from fivefold.model.kernels import Fuse
from fivefold.parallel.boundary import AxisBoundary
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.stage import Stage
from fivefold.parallel.tensor_linear import NOT_SHARED, SharedOutputs, SplitMatmuls

Add = Callable[[Tensor, Tensor], Tensor]
AXIS = "tp"


def cut_inside(experts: Tensor, shard: WeightShard) -> Tensor:
    """Shard the width of each local expert."""
    if shard.inner is None:
        return experts
    dim, start, stop = shard.inner
    return experts.narrow(dim, start, stop - start)


def cut(full: Tensor, shard: WeightShard) -> Tensor:
    """Shard a weight over tp; a vocabulary is padded with zeros."""
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
    """Insert the collectives of tp into a decoder whose weights are shards."""
    plan, decoder = stage.plan, stage.model
    boundary = _TensorBoundary(stage.mesh, AXIS, plan.layout.sp, dim=0)
    rows = (plan.local_seq, padded_tokens(plan, stage.mesh))
    matmuls = SplitMatmuls(boundary, stage.queue, plan.options.tp_overlap, *rows)
    for block in decoder.all_blocks():
        block.attention.first_head = boundary.coord * decoder.shape.heads // boundary.size
        _split_block(stage, block, matmuls)
    if boundary.size > 1:
        _split_ends(stage, boundary)


def _split_block(stage: Stage, block: Block, matmuls: SplitMatmuls) -> None:
    """Projections and row-split linears of a block, and in fp8 the linears between them."""
    plan, attention, number = stage.plan, block.attention, block.number
    # Experts are another dimension: they work on the tokens that a rank has.
    routed = isinstance(block.mlp, MoeMlp)
    mlp, name = (block.mlp.shared, "experts") if routed else (block.mlp, "mlp")
    repeats = plan.recompute.of(stage.number).repeats
    keeps = plan.saves_input_shards and not repeats("attention")
    into, shared = _attention_linears(attention)
    # Attention saves values, and not what queries and keys come from.
    math = stage.math(number, into, copied=(2,) if isinstance(attention, Attention) else ())
    shared = shared if stage.plan.fp8 is not None and math is not PLAIN else NOT_SHARED
    attention.project = partial(matmuls.project_rows, keeps, math, shared)
    backs = [(attention.out, matmuls.row_linear_of_rows)]
    if mlp is not None:
        keeps = plan.saves_input_shards and not repeats(name)
        into = [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up]
        mlp.project = partial(matmuls.project, keeps, stage.math(number, into), NOT_SHARED)
        backs.append((mlp.down, matmuls.row_linear))
    add = torch.add if stage.queue is None else stage.queue.add
    for last, sums in backs if matmuls.splits else ():
        sums = partial(sums, stage.math(number, [last]))
        last.matmul = partial(_summed_rows, sums, add)
    latent = isinstance(attention, LatentAttention)
    between = [attention.q_up, attention.kv_up] if latent else []
    alone = [module for module in between if module is not None]
    alone += [] if matmuls.splits else [last for last, _ in backs]
    for module in alone:
        math = stage.math(number, [module])
        if math is not PLAIN:
            module.matmul = partial(matmuls.alone().linear, math)


def _attention_linears(
    attention: Attention | LatentAttention | MixerLayer,
) -> tuple[list[Linear], SharedOutputs]:
    """Those that read the input, and which of them several ranks have: key and value heads that are
    fewer than ranks, and latents."""
    if isinstance(attention, MixerLayer):
        return attention.linears, NOT_SHARED
    if isinstance(attention, Attention):
        linears = [attention.q, attention.k, attention.v]
        return linears, SharedOutputs("replica", (1, 2))
    if attention.q_down is not None:
        return [attention.q_down, attention.kv_down], SharedOutputs(AXIS, (0, 1))
    assert attention.q is not None, "queries come from the input or from a latent"
    return [attention.q, attention.kv_down], SharedOutputs(AXIS, (1,))


def padded_tokens(plan: Plan, mesh: Mesh) -> Tensor | None:
    """Mask of padding among this rank's tokens of a row; None without padding."""
    if plan.fp8 is None or plan.padded_seq == plan.batch.seq:
        return None
    ranges = plan.split.rank_tokens(plan.padded_seq, plan.layout.coord(mesh.rank).cp)
    places = [position for span in ranges for position in span]
    return torch.tensor(places).to(mesh.device) >= plan.batch.seq


def _summed_rows(
    row_linear: Add, add: Add, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """A bias is added once, to the sum over ranks."""
    summed = row_linear(x, weight)
    return summed if bias is None else add(summed, bias)


def _split_ends(stage: Stage, boundary: _TensorBoundary) -> None:
    """The collectives of embedding and head."""
    decoder = stage.model
    decoder.residual_tokens = boundary.local_tokens
    for embed in (module for module in decoder.modules() if isinstance(module, Embedding)):
        embed.lookup = partial(boundary.lookup, embed.lookup)
        embed.add_positions = partial(boundary.add_positions, embed.add_positions)
    if decoder.head is not None:
        decoder.head.register_forward_pre_hook(boundary.before_head)
        loss = _VocabularyLoss(boundary, decoder.shape, stage.fuse)
        decoder.head.cross_entropy = loss
        if stage.queue is None:
            decoder.head.chunked = loss.chunked


class _TensorBoundary(AxisBoundary):
    """The arithmetic of a decoder between its collectives."""

    def before_head(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """All tokens and their labels, in one order."""
        x, labels_BS = arguments
        return self.enter(x), self.in_rank_order(labels_BS)

    def lookup(self, look_up: Lookup, tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
        """Rows of this rank's shard of the vocabulary, zero elsewhere, summed over the ranks."""
        rows = weight_VD.shape[0]
        local_BS = self.in_rank_order(tokens_BS) - self.coord * rows
        elsewhere_BS = (local_BS < 0) | (local_BS >= rows)
        x_BSD = look_up(local_BS.masked_fill(elsewhere_BS, 0), weight_VD)
        return self.leave(x_BSD.masked_fill(elsewhere_BS[..., None], 0))

    def add_positions(
        self, add: AddPositions, x: Tensor, positions_BS: Tensor, weight_PD: Tensor
    ) -> Tensor:
        """Learned positions, of this rank's tokens only under sp."""
        return add(x, self.local_tokens(positions_BS), weight_PD)

    def local_tokens(self, of_tokens_BS: Tensor) -> Tensor:
        """Of all tokens, those that this rank has between GEMMs."""
        if not self.sp:
            return of_tokens_BS
        return of_tokens_BS.chunk(self.size, dim=1)[self.coord]

    def in_rank_order(self, of_tokens_BS: Tensor) -> Tensor:
        """As a gather brings tokens under sp: those of rank 0 of all rows, of rank 1 and so on."""
        if not self.sp:
            return of_tokens_BS
        return of_tokens_BS.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1)


class _VocabularyLoss:
    """Cross-entropy over a split vocabulary, without the full logits of any token on a rank. Saves
    the logits, unless backward ran in forward, and three numbers a token that are summed over
    ranks."""

    def __init__(self, boundary: _TensorBoundary, shape: Shape, fuse: Fuse) -> None:
        self.boundary, self.vocab, self.cap = boundary, shape.vocab, shape.logit_cap
        self.maxima, self.sums = fuse(_maxima), fuse(_sums)
        self.gradient, self.become_gradient = fuse(_loss_gradient), fuse(_become_gradient)
        self.cap_in_place, self.slope = fuse(cap_in_place), fuse(cap_slope)
        self.in_forward = GradientsInForward(fuse)

    def __call__(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        return _SplitCrossEntropy.apply(logits_NV, labels_N, self.rows(len(logits_NV.T)), self)

    def rows(self, num_rows: int) -> tuple[int, int]:
        """The first row of the vocabulary that this rank has, and how many there are in all."""
        return self.boundary.coord * num_rows, self.vocab

    def totals(
        self, logits_NV: Tensor, labels_N: Tensor, rows: tuple[int, int], chunks: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Of every token the highest logit, the exponentials above it, and its label's logit: over
        all ranks, and wide for one chunk of the tokens at a time."""
        parts = [tensor.tensor_split(chunks) for tensor in (logits_NV, labels_N)]
        highest_N = torch.cat([self.maxima(part, *rows) for part in parts[0]])
        highest_N = self.boundary.total(highest_N, "max")
        parts.append(highest_N.tensor_split(chunks))
        sums_2N = torch.cat([self.sums(*part, *rows) for part in zip(*parts, strict=True)], dim=1)
        return highest_N, self.boundary.total(sums_2N)

    def chunked(self, x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunks: int) -> Tensor:
        """The same with gradients in forward. All logits are held in the model's type, so that one
        collective still serves all tokens; chunks are those of what is wide."""
        rows = self.rows(len(weight_VD))

        def compute(x_ND: Tensor, weight_VD: Tensor, needs: Wanted) -> Found:
            logits_NV = linear(x_ND, weight_VD, None)
            for part in logits_NV.tensor_split(chunks) if self.cap is not None else ():
                self.cap_in_place(part, self.cap)
            highest_N, sums_2N = self.totals(logits_NV, labels_N, rows, chunks)
            of_tokens = (logits_NV, labels_N, highest_N, sums_2N[0])
            parts = (tensor.tensor_split(chunks) for tensor in of_tokens)
            for part in zip(*parts, strict=True):
                slope_NV = None if self.cap is None else self.slope(part[0], self.cap)
                self.become_gradient(*part, *rows)
                if slope_NV is not None:
                    part[0].mul_(slope_NV)
            of_x = logits_NV @ weight_VD if needs[0] else None
            of_weight = logits_NV.T @ x_ND if needs[1] else None
            return _summed(sums_2N, labels_N), of_x, of_weight

        return self.in_forward.apply(x_ND, weight_VD, compute)


class _SplitCrossEntropy(torch.autograd.Function):
    """All-reduce the maximum, then the sums of exponentials and the logits of the labels."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, rows: tuple[int, int], loss: _VocabularyLoss
    ) -> Tensor:
        highest_N, sums_2N = loss.totals(logits_NV, labels_N, rows)
        ctx.save_for_backward(logits_NV, labels_N, highest_N, sums_2N[0])
        ctx.rows, ctx.gradient = rows, loss.gradient
        return _summed(sums_2N, labels_N)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.gradient(*ctx.saved_tensors, gradients[0], *ctx.rows), None, None, None


def _summed(sums_2N: Tensor, labels_N: Tensor) -> Tensor:
    """The losses of all tokens."""
    losses_N = sums_2N[0].log() - sums_2N[1]
    return losses_N.masked_fill(labels_N == NOT_COUNTED, 0).sum()


def _wide_logits(logits_NV: Tensor, first: int, vocab: int) -> Tensor:
    """In float32 or wider; −inf in rows that pad the vocabulary."""
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    rows = logits_NV.shape[1]
    if first + rows <= vocab:
        return wide_NV
    return wide_NV.masked_fill(_numbers(wide_NV, first) >= vocab, float("-inf"))


def _numbers(logits_NV: Tensor, first: int) -> Tensor:
    """The rows of the vocabulary that this rank has."""
    return torch.arange(first, first + logits_NV.shape[1], device=logits_NV.device)


def _maxima(logits_NV: Tensor, first: int, vocab: int) -> Tensor:
    return _wide_logits(logits_NV, first, vocab).amax(dim=1)


def _sums(logits_NV: Tensor, labels_N: Tensor, highest_N: Tensor, first: int, vocab: int) -> Tensor:
    """Of every token: the exponentials, and the logit of the label where this rank has it."""
    shifted_NV = _wide_logits(logits_NV, first, vocab) - highest_N[:, None]
    local_N = labels_N - first
    here_N = (local_N >= 0) & (local_N < logits_NV.shape[1])
    target_N = shifted_NV.gather(1, local_N.masked_fill(~here_N, 0)[:, None])[:, 0]
    return torch.stack([shifted_NV.exp().sum(dim=1), target_N.masked_fill(~here_N, 0)])


def _loss_gradient(
    logits_NV: Tensor,
    labels_N: Tensor,
    highest_N: Tensor,
    sums_N: Tensor,
    gradient: Tensor,
    first: int,
    vocab: int,
) -> Tensor:
    shifted_NV = _wide_logits(logits_NV, first, vocab) - highest_N[:, None]
    shares_NV = shifted_NV.exp() / sums_N[:, None]
    hits_NV = _numbers(logits_NV, first) == labels_N[:, None]
    counted_N1 = (labels_N != NOT_COUNTED)[:, None]
    return ((shares_NV - hits_NV.to(shares_NV.dtype)) * (counted_N1 * gradient)).to(logits_NV.dtype)


def _become_gradient(
    logits_NV: Tensor, labels_N: Tensor, highest_N: Tensor, sums_N: Tensor, first: int, vocab: int
) -> None:
    """Logits to the gradient of the summed loss, in place: without a compiler, there is one wide
    tensor."""
    gradient_NV = _wide_logits(logits_NV, first, vocab).sub_(highest_N[:, None]).exp_()
    gradient_NV.div_(sums_N[:, None])
    gradient_NV.add_(_numbers(logits_NV, first) == labels_N[:, None], alpha=-1)
    logits_NV.copy_(gradient_NV.mul_((labels_N != NOT_COUNTED)[:, None]))


def sum_partial(gradients: Sequence[tuple[WeightShard, Tensor]], mesh: Mesh) -> None:
    """Sum the gradients of weights that several tp ranks hold but use on different tokens or heads,
    and of those that several etp ranks use on different widths of experts.

    One all-reduce for those that all hold, one for KV heads that some share, one for experts, in
    float32 or wider.
    """
    for axis in (AXIS, "replica", "etp"):
        if mesh.size(axis) == 1:
            continue
        shared = [
            gradient for shard, gradient in gradients if shard.partial and shard.sum_axis == axis
        ]
        if shared:
            mesh.sum_together(shared, axis)
