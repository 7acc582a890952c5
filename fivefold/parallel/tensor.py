"""The tensor dimension: every GEMM split over tp, with sequence parallelism.

Splits   projections into heads and MLP width by column, those back by row, embedding and head by
         rows of the vocabulary. With sequence parallelism (sp) the tokens between them are split
         too, so that norms and residuals hold 1/tp of the activations.
Moves    with sp, for attention and MLP of every layer and microbatch: an all-gather before and a
         reduce-scatter after, and the mirror of both in backward; without sp, one all-reduce
         forward and one backward. The loss sums three numbers a token.
Costs    four times the activations of a layer, twice a layer; of the backward, what runs beside
         matmuls (`parallel/tensor.py`) is hidden. With sp, the input of column-split GEMMs
         is saved as this rank's tokens and gathered once more in backward; or saved gathered, for
         one gather less and tp times the memory.
Wins     inside a node, when layers are wide, and when a microbatch of one sequence does not fit.
Refuses  when tp divides neither heads nor MLP width. KV heads fewer than tp are replicated, and a
         vocabulary that does not divide is padded, invisibly to the loss.

The arithmetic is local, on shards of the weights that `core/layout/weight_table.py` defines; the
collectives below are all there are.

Legend: B rows, S tokens of a row, T = S/tp, N = B·S, D model width, V rows of a vocabulary shard.

Matmuls that are split over tp, and the collectives at both of their ends.

Several column-split linears read one input (`project`); a row-split one gives the sum over ranks
(`row_linear`). Without a tensor dimension the same code runs and issues no collective.

Order    Between the two, tokens are in the order in which gathers bring them: for each chunk, the
         tokens of rank 0, of rank 1 and so on. An MLP does not see it. Attention does, and gets its
         heads in the order of rows: a copy of this rank's heads, or no copy if a microbatch is one
         row. So nothing as wide as the model is copied before or after a collective.
Overlap  The backward of a projection gathers its input beside the matmuls of the input gradient,
         and reduces that gradient beside those of the weight gradients. In chunks, the collective
         of one chunk runs beside the matmuls of another, in forward as well.

Legend: B rows, S tokens of a row, M tokens of this rank, N tokens of all ranks of tp, I inputs,
O outputs of a linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.core.layout import BLOCK, WeightShard
from fivefold.core.model import Shape
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
    LinearMath,
    Lookup,
    Make,
    MixerLayer,
    MoeMlp,
    Sent,
    Wanted,
    cap_in_place,
    cap_slope,
    later,
    linear,
    saving,
)
from fivefold.model.kernels import Fuse
from fivefold.parallel.boundary import AxisBoundary, padded_tokens
from fivefold.parallel.deferred import GradientQueue
from fivefold.parallel.mesh import Issued, Mesh
from fivefold.parallel.stage import Stage

Finish = Callable[[], object]
"""Waits for a collective that has begun."""
Write = Callable[[int, int, Tensor | None], Tensor]
"""Makes one of so many chunks of all tokens, in the tensor that is given, or in a new one."""


class _Call(NamedTuple):
    """Arguments of a projection besides tensors. `local_input` rematerializes this rank's tokens of
    the input; of `shared` outputs a rank has the gradient of its own heads only."""

    math: LinearMath
    graded: bool
    local_input: Make | None
    shared: SharedOutputs


class SharedOutputs(NamedTuple):
    """Outputs that several ranks of an axis compute alike, for different heads."""

    axis: str = ""
    numbers: tuple[int, ...] = ()


NOT_SHARED = SharedOutputs()


class SplitMatmuls:
    """Column- and row-split matmuls of one stage, with their collectives.

    With a `queue`, weight gradients go there and not to autograd. `overlap` is the plan's key: 0 if
    every collective is waited for at once, else the number of chunks. `row` is the tokens of a row
    on this rank, `padded` which of them are padding, if any.
    """

    def __init__(
        self,
        boundary: AxisBoundary,
        queue: GradientQueue | None,
        overlap: int,
        row: int = 0,
        padded: Tensor | None = None,
        splits: bool = True,
    ) -> None:
        self.boundary, self.queue, self.overlaps = boundary, queue, overlap > 0
        self.splits = splits and boundary.size > 1
        self.gathers = self.splits and boundary.sp
        self.chunks = max(1, overlap) if self.splits else 1
        self.padded, self.row = padded, row
        # Tokens that follow one another in a row, wherever a chunk ends.
        ends_anywhere = self.gathers and self.chunks > 1
        self.run = BLOCK if ends_anywhere else row // (boundary.size if self.gathers else 1)

    def alone(self) -> SplitMatmuls:
        """A copy without a tensor dimension, for linears between two split ones."""
        return SplitMatmuls(self.boundary, self.queue, 1, self.row, self.padded, splits=False)

    def project(
        self,
        keeps: bool,
        math: LinearMath,
        shared: SharedOutputs,
        x: Tensor,
        linears: Sequence[Linear],
    ) -> Sequence[Tensor]:
        """Apply column-split linears to one input, (N, O) each; `keeps` saves only this rank's
        tokens of the input."""
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        with saving(x):
            graded = torch.is_grad_enabled()
            remake = later(x) if keeps and self.gathers and graded else None
            call = _Call(math, graded, remake, shared)
            return _Project.apply(x, self, call, *weights, *biases, *math.extra())

    def project_rows(self, *call: Any) -> Sequence[Tensor]:
        """`project` with outputs in the order of rows, (B, S, O) each."""
        rows = call[-2].shape[0]
        return [self._to_rows(output, rows) for output in self.project(*call)]

    def linear(self, math: LinearMath, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply a linear that is not split."""
        call = _Call(math, torch.is_grad_enabled(), None, NOT_SHARED)
        (y_NO,) = _Project.apply(x, self, call, weight, bias, *math.extra())
        return y_NO.view(*x.shape[:-1], len(weight))

    def row_linear(self, math: LinearMath, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        """Apply a row-split linear and sum over ranks; under sp returns this rank's tokens, (M,
        O)."""
        row = _RowLinear(math, torch.is_grad_enabled())
        saved_NI = _SaveInput.apply(x_NI, weight_OI, self, row, *math.extra())
        return _SumOfRows.apply(saved_NI, weight_OI.detach(), self, row)

    def row_linear_of_rows(self, math: LinearMath, x_BSI: Tensor, weight_OI: Tensor) -> Tensor:
        """`row_linear` of tokens in the order of rows."""
        summed = self.row_linear(math, self._from_rows(x_BSI), weight_OI)
        return summed.unflatten(0, (x_BSI.shape[0], -1))

    def zero_padding(self, x_MI: Tensor) -> Tensor:
        """Zero the padding among this rank's tokens."""
        if self.padded is None:
            return x_MI
        shards = self.boundary.size if self.gathers else 1
        mask = self.padded.chunk(shards)[self.boundary.coord if self.gathers else 0]
        rows = x_MI.unflatten(0, (-1, len(mask)))
        return rows.masked_fill(mask[:, None], 0).flatten(0, 1)

    def zero_padding_of_all(self, x_NI: Tensor) -> Tensor:
        """Zero the padding among the tokens of all ranks, in the order of gathers."""
        if self.padded is None:
            return x_NI
        mask_BS1 = self.padded[:, None].expand(len(x_NI) // self.row, -1, -1)
        return x_NI.masked_fill(self._from_rows(mask_BS1), 0)

    def sum_shared_grads(self, grads: Sequence[Tensor], shared: SharedOutputs) -> Sequence[Tensor]:
        """Sum gradients of shared outputs over the ranks that compute them: the first rank gets the
        sum, the others zero."""
        mesh = self.boundary.mesh
        if not shared.axis or mesh.size(shared.axis) == 1:
            return grads
        widths = [grads[number].shape[1] for number in shared.numbers]
        together = torch.cat([grads[number] for number in shared.numbers], 1)
        mesh.all_reduce(together, shared.axis, dist.ReduceOp.SUM, yields=True).wait()
        if mesh.coord(shared.axis):
            together.zero_()
        summed = dict(zip(shared.numbers, together.split(widths, 1), strict=True))
        return [summed.get(number, gradient) for number, gradient in enumerate(grads)]

    def _to_rows(self, x_NO: Tensor, rows: int) -> Tensor:
        if not self.gathers:
            return x_NO.unflatten(0, (rows, -1))
        by_rank = x_NO.unflatten(0, (self.chunks, self.boundary.size, -1)).transpose(0, 1)
        return by_rank.flatten(1, 2).unflatten(1, (rows, -1)).transpose(0, 1).flatten(1, 2)

    def _from_rows(self, x_BSO: Tensor) -> Tensor:
        if not self.gathers:
            return x_BSO.flatten(0, 1)
        by_rank = x_BSO.unflatten(1, (self.boundary.size, -1)).transpose(0, 1).flatten(1, 2)
        return by_rank.unflatten(1, (self.chunks, -1)).transpose(0, 1).flatten(0, 2)

    def gathered(self, x_MI: Tensor) -> tuple[Tensor, Sequence[Finish]]:
        """Start to gather the tokens of all ranks; returns a wait for each chunk."""
        if not self.gathers:
            return x_MI, [_nothing]
        x_NI = x_MI.new_empty(self.boundary.size * len(x_MI), x_MI.shape[1])
        pairs = zip(x_MI.contiguous().chunk(self.chunks), x_NI.chunk(self.chunks), strict=True)
        return x_NI, [self._begin(self.boundary.start_gather(*pair)) for pair in pairs]

    def reduced(
        self, size: tuple[int, int], dtype: torch.dtype, write: Write
    ) -> tuple[Tensor, Sequence[Finish]]:
        """Sum over ranks what `write` computes for each chunk of all tokens, under sp for this
        rank's tokens; returns a wait for each chunk."""
        begun: list[Finish] = []
        single_chunk = self.chunks == 1
        full_NO = write(0, 1, None) if single_chunk else self._empty(size, dtype)
        sum_MO = full_NO
        if self.gathers:
            sum_MO = full_NO.new_empty(size[0] // self.boundary.size, size[1])
        pairs = zip(full_NO.chunk(self.chunks), sum_MO.chunk(self.chunks), strict=True)
        for number, (full, local_shard) in enumerate(pairs):
            if not single_chunk:
                write(number, self.chunks, full)
            if self.gathers:
                begun.append(self._begin(self.boundary.start_scatter(full, local_shard)))
            elif self.splits:
                begun.append(self._begin(self.boundary.start_total(full)))
        return sum_MO, begun

    def _empty(self, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.boundary.mesh.device)

    def _begin(self, issued: Issued) -> Finish:
        if self.overlaps:
            return issued.wait
        issued.wait()
        return _nothing


def _nothing() -> None:
    """There is nothing to wait for."""


class _Project(torch.autograd.Function):
    """Linears of one input; weights, biases and extra weights are the last arguments."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matmuls: SplitMatmuls, call: _Call, *params: Any
    ) -> tuple[Tensor, ...]:
        math = call.math
        half = (len(params) - len(math.extra())) // 2
        weights, biases, ctx.extra = params[:half], params[half : 2 * half], params[2 * half :]
        sent = math.quantize(matmuls.zero_padding(x.flatten(0, -2)), False, matmuls.gathers)
        full, arrivals = matmuls.gathered(sent.tensor)
        sent, chunks = sent._replace(tensor=full), len(arrivals)
        operands, outputs = None, None
        if chunks > 1:
            outputs = tuple(x.new_empty(len(full), len(weight)) for weight in weights)
        for number, arrive in enumerate(arrivals):
            arrive()
            with_columns = call.graded and call.local_input is None and chunks == 1
            operands = math.operands([sent.chunk(number, chunks)], matmuls.run, False, with_columns)
            outs = outputs and [output.chunk(chunks)[number] for output in outputs]
            products = math.fprop(operands, weights, biases, outs)
            outputs = outputs or tuple(products)
        ctx.call, ctx.matmuls, ctx.shape, ctx.dtype = call, matmuls, x.shape, x.dtype
        ctx.weights, ctx.biases, ctx.maximum = weights, biases, sent.maximum
        if call.local_input is None:
            values, ctx.again = math.save(operands if chunks == 1 else None, sent, matmuls.run)
            ctx.save_for_backward(*values)
        assert outputs is not None
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        matmuls: SplitMatmuls = ctx.matmuls
        call: _Call = ctx.call
        ctx.call = None  # so that what it holds is freed here, and not with the whole graph
        math, arrivals, sent = call.math, (), None
        if call.local_input is not None:
            x_MI = matmuls.zero_padding(call.local_input().flatten(0, -2))
            call = call._replace(local_input=None)
            sent = math.quantize(x_MI, False, True, ctx.maximum)
            full, arrivals = matmuls.gathered(sent.tensor)
            sent = sent._replace(tensor=full)
        parts = [Sent(gradient) for gradient in matmuls.sum_shared_grads(gradients, call.shared)]
        grads = math.operands(parts, matmuls.run, True, True)
        back_MI, reduced = None, ()
        if ctx.needs_input_grad[0]:
            write = partial(_input_gradient, math, grads, ctx.weights)
            back_MI, reduced = matmuls.reduced((len(gradients[0]), ctx.shape[-1]), ctx.dtype, write)
        for arrive in arrivals:
            arrive()
        x = (
            math.operands([sent], matmuls.run, False, True)
            if sent
            else ctx.again(ctx.saved_tensors)
        )
        needs = ctx.needs_input_grad[3:]
        params = (ctx.weights, ctx.biases, ctx.extra)
        weight_grads = _weight_gradients(math, matmuls.queue, x, grads, *params, needs)
        for finish in reduced:
            finish()
        return None if back_MI is None else back_MI.view(ctx.shape), None, None, *weight_grads


class _RowLinear:
    """State shared by the two functions of a row-split linear: operands of the input in forward,
    and of the output gradient in backward."""

    def __init__(self, math: LinearMath, graded: bool) -> None:
        self.math, self.graded = math, graded
        self.operands: Any = None

    def give(self, value: Any) -> None:
        self.operands = value

    def take(self) -> Any:
        assert self.operands is not None, "the two functions take turns"
        value, self.operands = self.operands, None
        return value


class _SaveInput(torch.autograd.Function):
    """Save the input of a row-split linear, and compute its weight gradient. A function apart from
    the sum, so that recomputation stops before it: nothing after it saves a tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        matmuls: SplitMatmuls,
        row: _RowLinear,
        *extra: Tensor,
    ) -> Tensor:
        sent = row.math.quantize(matmuls.zero_padding_of_all(x_NI), False, False)
        operands = row.math.operands([sent], matmuls.run, False, row.graded)
        row.give(operands)
        values, ctx.again = row.math.save(operands, sent, matmuls.run)
        ctx.save_for_backward(*values)
        ctx.weight, ctx.matmuls, ctx.row, ctx.extra = weight_OI, matmuls, row, extra
        return x_NI.view_as(x_NI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        row: _RowLinear = ctx.row
        needs = (ctx.needs_input_grad[1], False, *ctx.needs_input_grad[4:])  # no bias
        operands = (ctx.again(ctx.saved_tensors), row.take(), [ctx.weight], [None], ctx.extra)
        weight_grads = _weight_gradients(row.math, ctx.matmuls.queue, *operands, needs)
        return gradients[0], weight_grads[0], None, None, *weight_grads[2:]


class _SumOfRows(torch.autograd.Function):
    """Matmul of a row-split linear, and the sum over ranks."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, matmuls: SplitMatmuls, row: _RowLinear
    ) -> Tensor:
        operands, math = row.take(), row.math

        def write(number: int, chunks: int, out: Tensor | None) -> Tensor:
            part = math.chunk(operands, number, chunks)
            return math.fprop(part, [weight_OI], [None], None if out is None else [out])[0]

        ctx.weight, ctx.matmuls, ctx.row, ctx.dtype = weight_OI, matmuls, row, x_NI.dtype
        size = (len(x_NI), len(weight_OI))
        summed, begun = matmuls.reduced(size, x_NI.dtype, write)
        for finish in begun:
            finish()
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        math, matmuls, weights = ctx.row.math, ctx.matmuls, [ctx.weight]
        sent = math.quantize(gradients[0], True, matmuls.gathers)
        full, arrivals = matmuls.gathered(sent.tensor)
        sent, chunks = sent._replace(tensor=full), len(arrivals)
        back_NI = full.new_empty(len(full), ctx.weight.shape[1], dtype=ctx.dtype)
        for number, arrive in enumerate(arrivals):
            arrive()
            part = math.operands([sent.chunk(number, chunks)], matmuls.run, True, chunks == 1)
            math.dgrad(part, weights, 0, 1, back_NI.chunk(chunks)[number])
            grads = part
        if chunks > 1:
            grads = math.operands([sent], matmuls.run, True, True)
        ctx.row.give(grads)
        return back_NI, None, None, None


def _input_gradient(math: LinearMath, grads: Any, weights: Sequence[Tensor], *part: Any) -> Tensor:
    return math.dgrad(grads, weights, *part)


def _weight_gradients(
    math: LinearMath,
    queue: GradientQueue | None,
    x: Any,
    grads: Any,
    weights: Sequence[Any],
    biases: Sequence[Any],
    extra: Sequence[Any],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Of all weights, then of all biases, then of those beside them; none if they are queued."""
    wgrads = math.wgrads(x, grads, weights, biases)
    if queue is not None:
        for wgrad in wgrads:
            queue.put(wgrad)
        return [None] * len(needs)
    params = [*weights, *biases, *extra]
    sink = _AutogradSink(id(param) for param, wants in zip(params, needs, strict=True) if wants)
    for wgrad in wgrads:
        wgrad(sink)
    return [sink.gradients.get(id(param)) for param in params]


class _AutogradSink:
    """Collect the gradients that autograd returns."""

    def __init__(self, param_ids: Iterable[int]) -> None:
        self.param_ids, self.gradients = frozenset(param_ids), dict[int, Tensor]()

    def add_product(self, weight: Tensor, outputs_NO: Tensor, inputs_NI: Tensor) -> None:
        if id(weight) in self.param_ids:
            self.gradients[id(weight)] = outputs_NO.T @ inputs_NI

    def add_gradient(self, weight: Tensor, gradient: Tensor) -> None:
        if id(weight) in self.param_ids:
            self.gradients[id(weight)] = gradient


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
