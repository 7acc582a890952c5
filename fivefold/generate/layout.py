"""An engine in a layout: what one rank of it has, and how ranks meet.

Splits   tp: heads, MLP columns and the vocabulary, as in training; KV heads fewer than tp are
         replicated. pp: layers, with as many batches under way as stages. ep: experts. dp: whole
         sequences; each data rank is a replica with its own blocks. cp: tokens of a step and
         blocks of the cache.
Moves    in a stage what training moves in its forward, and what cp moves in attention; hidden
         states of a batch between stages, and of its tokens over cp to the head;
         logits of the tokens to be followed over tp, N · V; and of every drawn token two numbers,
         summed over all ranks.
Costs    no broadcast of decisions: every rank has the schedulers of all replicas and decides alike.
Refuses  cp by heads (Ulysses), several stages on a rank, asynchronous schedules and fp8.

A replica without sequences still runs where its experts serve others: on tokens of no sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import (
    PIPELINE,
    RING,
    WORLD,
    Weight,
    boxes_of,
    buffers,
    local_shape,
    origin_of,
    whole_box,
)
from fivefold.core.model import BLOCK, Shape, blocks_of, refuse_mixer
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.cache import (
    KvCache,
    LayerPages,
    first_seen,
    hidden_pairs,
    scores_of,
    token_bytes,
)
from fivefold.generate.engine import Engine, EngineRanks, Forward, Shared, Watch, alone
from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import SequenceChunk, StepBatch
from fivefold.generate.routing import RouteStore
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.generate.stage_ends import StageEnds
from fivefold.generate.step_tensors import StepTensors
from fivefold.generate.tiles import (
    ROWS,
    TILE_MATH,
    PiecewiseActivate,
    tile_experts,
    tile_linear,
    wide_tile_linear,
)
from fivefold.model import AttentionInfo, Decoder, Experts, ExpertStack, Mlp, MoeMlp, Router
from fivefold.model.kernels import Fuse, eager
from fivefold.parallel import (
    AxisBoundary,
    ForwardStage,
    Issued,
    Job,
    Mesh,
    RankOrderMesh,
    compose_forward,
    transport,
)

# Steps of one size, so that the bits of a token do not depend on what else is in its batch.
#
# Libraries choose their kernels, tiles and splits by the size of a batch, and each sums in another
# order. Here a forward always has the same number of tokens: every token is a sequence of its own,
# prompts too, and tokens of no sequence fill the rest. So norms, routers and collectives have one
# size, and attention is that of single queries, whose splits depend on their position alone.
# Matmuls have tiles of fixed size (`generate/tiles.py`). Under tp, ranks add in rank order
# (`parallel/rank_order.py`).
#
# Splits   steps into `step_size` tokens; prompts are read in chunks of at most so many.
# Moves    nothing more.
# Costs    a decode of few sequences multiplies full tiles. A long prompt reads all weights once for
#          every step, and its attention reads all keys for every token. `benchmarks/decode.py`
#          prints the ratio.
# Refuses  cp, whose ranks have keys by the blocks that were free.
#
# Legend: T tokens of a step, V vocabulary.


def step_size(device: torch.device, unit: int) -> int:
    """Number of tokens of every step, a multiple of `unit`."""
    return -(-ROWS[device.type] // unit) * unit


class FixedSteps:
    """A forward whose steps all have one size, around that of a decoder or a stage."""

    def __init__(self, forward: DecoderForward) -> None:
        self.forward = forward
        self.size = step_size(forward.device, forward.ends.unit)

    def __call__(self, step: StepBatch) -> Tensor:
        if not step.chunks and not self.forward.ends.idles_along:
            return self.forward(step)
        logits_TV = self.forward(single_tokens(step, self.size, self.forward.padding))
        if not len(logits_TV):  # not the last stage
            return logits_TV
        lasts = accumulate(len(sequence_chunk.tokens) for sequence_chunk in step.chunks)
        pairs = zip(lasts, step.chunks, strict=True)
        rows = [row for last, chunk in pairs for row in range(last - chunk.num_wanted, last)]
        return logits_TV[torch.tensor(rows, dtype=torch.int64).to(logits_TV.device)]

    def limits(self, step_limits: ScheduleLimits) -> ScheduleLimits:
        """Scheduling limits that fit the fixed size."""
        return replace(step_limits, tokens=min(step_limits.tokens, self.size))


def single_tokens(step: StepBatch, size: int, padding: int) -> StepBatch:
    """Split a step into sequences of one token, padded with tokens of no sequence. All give their
    logits."""
    assert step.num_tokens <= size, "the scheduler knows its limit"
    singles = [
        replace(chunk, tokens=(token,), start=chunk.start + i, samples=True, scored=0)
        for chunk in step.chunks
        for i, token in enumerate(chunk.tokens)
    ]
    none = SequenceChunk("", (0,), 0, (padding,), samples=True, fills=True)
    return StepBatch((*singles, *[none] * (size - len(singles))))


def fix_tiles(decoder: Decoder) -> None:
    """Use fixed tiles where `compose_forward` does not: experts, routers, the head, and linears and
    activations beside them."""
    on_gpu = next(decoder.parameters()).is_cuda
    for module in decoder.modules():
        if isinstance(module, ExpertStack):
            module.matmul = tile_experts
        elif isinstance(module, Router):
            module.matmul = wide_tile_linear
        elif isinstance(module, Mlp | Experts) and not on_gpu:
            module.activate = PiecewiseActivate(module.activate)
        elif isinstance(module, MoeMlp) and module.shared_gate is not None:
            module.shared_gate.matmul = tile_linear
    if decoder.head is not None:
        decoder.head.matmul = tile_linear


# Weights from a running training job into a generator on the same ranks, without a file.
#
# Splits   what a rank of the job owns, and what a rank of the generator has, are both boxes of the
#          full weights (`core/layout/weight_table.py`), as in a checkpoint. Which element goes
#          where follows.
# Moves    every element of a generator's shard once, from one rank that owns it: from the rank
#          itself where it can, else from one of the owners, in turn. All-to-alls of a few weights
#          at a time, in the generator's type.
# Costs    the bytes of the generator's shards on each rank, and a bucket of memory.
#
# Ranks tell one another their boxes once; every later refit only moves values.

BUCKET = 1 << 26  # elements that move together, over all ranks

Span = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box of a full weight."""
Spans = Mapping[str, Sequence[Span]]
"""The boxes of each weight that one rank has."""


class WeightMove(NamedTuple):
    """A box of a weight that is copied between ranks, and the box of the source that contains
    it."""

    name: str
    source: int
    target: int
    source_span: Span
    moved: Span

    @property
    def numel(self) -> int:
        return whole_box(self.moved[1]).numel


@dataclass(frozen=True)
class _Shard:
    """A generator's shard of a weight, at `origin` of the full one."""

    tensor: Tensor
    origin: tuple[int, ...]
    span: Span


class Refit:
    """Fixed schedule of copies from a training job to a generator."""

    def __init__(self, job: Job, stage: ForwardStage, mesh: Mesh) -> None:
        """All ranks call this together."""
        theirs, ours = job.mesh.layout.world, mesh.layout.world
        if theirs != ours:
            raise FivefoldError(
                f"the job has {theirs} ranks and the generator {ours}: weights move between "
                "layouts of the same ranks; give both layouts as many"
            )
        self.job, self.mesh = job, mesh
        self.dtype = next(stage.model.parameters()).dtype
        self.owned = dict(_owned(job))
        self.shards = list(_shards(stage))
        owned_spans = _listed(self.owned)
        shard_spans = _listed((name, shard.span) for name, shard in self.shards)
        everyone: list[tuple[Spans, Spans]] = [(owned_spans, shard_spans)] * ours
        if ours > 1:
            dist.all_gather_object(  # pyright: ignore[reportUnknownMemberType]
                everyone, (owned_spans, shard_spans), group=mesh.groups[WORLD]
            )
        weights = dict.fromkeys(weight.name for weight in job.table.values())
        biases = [bias.name for bias in buffers(job.plan.shape)]
        self.weights, self.biases = (
            list(_buckets(moves_of(names, everyone))) for names in (weights, biases)
        )

    @torch.no_grad()
    def run(self) -> None:
        """Copy the current values of all weights."""
        for bucket in self.weights:
            self._move(bucket, self.dtype)
        for bucket in self.biases:
            self._move(bucket, torch.float32)

    def _move(self, moves: Sequence[WeightMove], dtype: torch.dtype) -> None:
        """All of them by one exchange; between any two ranks in the order of the list."""
        rank, world = self.mesh.rank, self.mesh.layout.world
        leaving = sorted(
            (weight_move for weight_move in moves if weight_move.source == rank), key=_by_target
        )
        coming = sorted(
            (weight_move for weight_move in moves if weight_move.target == rank), key=_by_source
        )
        rows = torch.empty(0, dtype=dtype, device=self.mesh.device)
        rows = torch.cat([rows, *(self._cut(weight_move).to(rows) for weight_move in leaving)])
        if world > 1:
            leave, arrive = [0] * world, [0] * world
            for transfer in leaving:
                leave[transfer.target] += transfer.numel
            for transfer in coming:
                arrive[transfer.source] += transfer.numel
            rows = self._exchanged(rows, arrive, leave)
        values = torch.split(rows, [weight_move.numel for weight_move in coming])
        for move, value in zip(coming, values, strict=True):
            self._put(move, value)

    def _exchanged(self, rows: Tensor, arrive: list[int], leave: list[int]) -> Tensor:
        def start(group: dist.ProcessGroup) -> transport.Pending:
            return transport.exchange(rows, arrive, leave, group)

        return self.mesh.issue(WORLD, "all_to_all", rows, start).wait()

    def _cut(self, move: WeightMove) -> Tensor:
        """The values of a move, flat, out of what this rank owns."""
        values = self.owned[move.name, move.source_span].view(move.source_span[1])
        return _inside(values, move.source_span[0], move.moved).flatten()

    def _put(self, move: WeightMove, values: Tensor) -> None:
        """Write into every shard of this rank that has them: a tied weight may be there twice."""
        for name, shard in self.shards:
            if name == move.name:
                _inside(shard.tensor, shard.origin, move.moved).copy_(values.view(move.moved[1]))


def _by_target(move: WeightMove) -> int:
    return move.target


def _by_source(move: WeightMove) -> int:
    return move.source


def _inside(tensor: Tensor, origin: tuple[int, ...], span: Span) -> Tensor:
    """The elements of a box, of a tensor that begins at `origin` of the full weight."""
    for dim, (start, offset, size) in enumerate(zip(origin, *span, strict=True)):
        tensor = tensor.narrow(dim, offset - start, size)
    return tensor


def _owned(job: Job) -> Iterator[tuple[tuple[str, Span], Tensor]]:
    """The boxes that this rank of a job owns, and their values; a tied weight once."""
    for part in job.local_shards:
        name, weight = part.row.name, job.table[part.row.name]
        if weight.name != name:
            continue
        stop = part.start + part.tensor.numel()
        for box in boxes_of(weight.shape, job.shards[name], part.row.shape, part.start, stop):
            values = part.tensor.detach().view(-1)[box.at : box.at + box.numel]
            yield (name, (box.offsets, box.sizes)), values
    for chunk in job.chunks:
        for name, buffer in chunk.model.named_buffers():
            box = whole_box(buffer.shape)
            yield (name, (box.offsets, box.sizes)), buffer.flatten()


def _shards(stage: ForwardStage) -> Iterator[tuple[str, _Shard]]:
    """The shards of a generator's rank by the names of full weights, without padding."""
    for name, tensor in (*stage.model.named_parameters(), *stage.model.named_buffers()):
        weight, shard = stage.table[name], stage.shards[name]
        size = local_shape(weight, shard)
        for box in boxes_of(weight.shape, shard, size, 0, tensor.numel()):
            origin = origin_of(weight.shape, shard)
            yield weight.name, _Shard(tensor, origin, (box.offsets, box.sizes))


def _listed(pairs: Iterable[tuple[str, Span]]) -> Spans:
    named_spans: dict[str, list[Span]] = {}
    for name, span in pairs:
        spans = named_spans.setdefault(name, [])
        if span not in spans:
            spans.append(span)
    return named_spans


def moves_of(
    names: Iterable[str], ranks: Sequence[tuple[Spans, Spans]]
) -> Iterator[list[WeightMove]]:
    """Copies of each weight, from what ranks own and need; equal on all ranks."""
    for name in names:
        owners: dict[Span, list[int]] = {}
        for rank, (has, _) in enumerate(ranks):
            for span in has.get(name, ()):
                owners.setdefault(span, []).append(rank)
        moves: list[WeightMove] = []
        for target, (_, wants) in enumerate(ranks):
            for target_span in wants.get(name, ()):
                moves += _covering(name, owners, target, target_span)
        yield moves


def _covering(
    name: str, owners: Mapping[Span, list[int]], target: int, target_span: Span
) -> list[WeightMove]:
    """From whom a rank gets each element of a box."""
    moves: list[WeightMove] = []
    for span, ranks in owners.items():
        common = _common(span, target_span)
        if common is not None:
            source = target if target in ranks else ranks[target % len(ranks)]
            moves.append(WeightMove(name, source, target, span, common))
    numel = whole_box(target_span[1]).numel
    assert sum(move.numel for move in moves) == numel, f"{name} has holes"
    return moves


def _common(span: Span, other: Span) -> Span | None:
    """The box in both."""
    starts = tuple(map(max, span[0], other[0]))
    ends = (
        min(low + size, begin + length)
        for low, size, begin, length in zip(*span, *other, strict=True)
    )
    sizes = tuple(end - start for end, start in zip(ends, starts, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _buckets(by_weight: Iterable[list[WeightMove]]) -> Iterator[list[WeightMove]]:
    """Moves of a few weights at a time."""
    bucket: list[WeightMove] = []
    for moves in by_weight:
        if bucket and sum(move.numel for move in (*bucket, *moves)) > BUCKET:
            yield bucket
            bucket = []
        bucket += moves
    if bucket:
        yield bucket


# The context dimension of generation: the tokens of a step, and the cache, over cp ranks.
#
# Splits   the tokens of a step into as many for every rank, in order: each computes its own,
#          outside of attention. The blocks of the cache: rank r owns blocks r, r + cp, r + 2·cp and
#          so on, and those of a sequence go round the ranks (`blocks.py`).
# Moves    in each layer queries, keys and values of a step, by one all-gather, T·(H·d + K·(d + v));
#          each rank writes the keys that it owns, and attends with all queries to its own blocks.
#          What it finds goes to the ranks of the tokens with its log-sum-exp, by one all-to-all,
#          T·H·(v + 1) in float32 or wider. What is in the cache never moves.
# Costs    1/cp of the cache and of attention on a rank, whatever is prefill and what decode.
# Wins     when the cache of long texts does not fit, or takes long to read.
# Refuses  kinds of cp that exchange tokens for heads.
#
# A rank may own no key that a query sees: the log-sum-exp is then −inf, and its weight 0. Every
# token sees itself, so the sum over ranks is never −inf. Ranks are summed in their order.
#
# Legend: T tokens of a step, M = T / cp tokens of this rank, n of one sequence, H query heads, K
# key/value heads, G = H / K, L keys, d width of a head, v that of a value head, C = cp.


class OwnedKeys(NamedTuple):
    """Slots and positions of the keys of one sequence that this rank owns."""

    pages: Tensor  # numbers of blocks on this rank
    positions_L: Tensor


class ContextCache(KvCache):
    """KV pages of one of cp ranks."""

    def __init__(self, decoder: Decoder, blocks: int, mesh: Mesh) -> None:
        self.mesh, self.size, self.coord = mesh, mesh.size(RING), mesh.coord(RING)
        self.boundary = AxisBoundary(mesh, RING, False, dim=0)
        super().__init__(decoder, -(-blocks // self.size))
        self.written, self.slots = torch.empty(0), torch.empty(0)  # of the tokens that it owns
        # By window and chunk.
        self._owned: dict[tuple[int | None, int | None], list[OwnedKeys]] = {}

    def owns(self, block: int) -> bool:
        """Whether a block is on this rank."""
        return block % self.size == self.coord

    def begin(self, step: StepTensors) -> None:
        super().begin(step)
        device, self._owned = step.slots.device, {}
        places = [
            (chunk.table[i // BLOCK], i % BLOCK)
            for chunk in step.chunks
            for i in range(chunk.start, chunk.stop)
        ]
        own_rows = [(row, *slot) for row, slot in enumerate(places) if self.owns(slot[0])]
        slots = [block // self.size * BLOCK + offset for _, block, offset in own_rows]
        self.written = torch.tensor([row for row, *_ in own_rows], dtype=torch.int64, device=device)
        self.slots = torch.tensor(slots, dtype=torch.int64, device=device)

    def attend(
        self, q_MHd: Tensor, k_MKd: Tensor, v_MKv: Tensor, /, pages: LayerPages, info: AttentionInfo
    ) -> Tensor:
        """Write the keys that this rank owns, attend to them with the queries of all ranks, and
        merge the results for its tokens."""
        assert self.step is not None, "no step has begun"
        q_THd, k_TKd, v_TKv = self._all_tokens(q_MHd, k_MKd, v_MKv)
        if len(self.written):
            pages.write(self.slots, k_TKd[self.written], v_TKv[self.written])
        chunks, key = self.step.chunks, (info.window, info.chunk)
        if key not in self._owned:
            self._owned[key] = [self._owned_keys(sequence_chunk, info) for sequence_chunk in chunks]
        outputs: list[Tensor] = []
        by_sequence = torch.split(q_THd, [len(sequence_chunk.tokens) for sequence_chunk in chunks])
        for q_nHd, chunk, owned in zip(by_sequence, chunks, self._owned[key], strict=True):
            positions_n = torch.arange(chunk.start, chunk.stop, device=q_nHd.device)
            k_LKd, v_LKv = (tensor[: len(owned.positions_L)] for tensor in pages.read(owned.pages))
            hidden_nL = hidden_pairs(positions_n, owned.positions_L, info)
            outputs.append(attend_part(q_nHd, k_LKd, v_LKv, hidden_nL, info))
        parts_CMHw = self._to_their_ranks(torch.cat(outputs))
        return merge_parts(parts_CMHw, info.sinks).to(q_MHd.dtype)

    def _all_tokens(self, *each_M: Tensor) -> list[Tensor]:
        """Queries, keys and values of all ranks, by one gather."""
        widths = [tensor[0].numel() for tensor in each_M]
        rows = self.boundary.gather(torch.cat([tensor.flatten(1) for tensor in each_M], dim=1))
        parts = torch.split(rows, widths, dim=1)
        return [
            part.unflatten(1, tensor.shape[1:]) for part, tensor in zip(parts, each_M, strict=True)
        ]

    def _owned_keys(self, chunk: SequenceChunk, info: AttentionInfo) -> OwnedKeys:
        first = first_seen(chunk.start, info) // BLOCK
        seen = range(first, blocks_of(chunk.stop))  # some query sees some of each
        own_blocks = [i for i in seen if self.owns(chunk.table[i])]
        device = self.slots.device
        pages = torch.tensor([chunk.table[i] // self.size for i in own_blocks], dtype=torch.int64)
        places = torch.tensor([i * BLOCK for i in own_blocks], dtype=torch.int64)[:, None]
        positions_L = (places + torch.arange(BLOCK)).flatten()
        # Only the last block may be filled in part.
        return OwnedKeys(pages.to(device), positions_L[positions_L < chunk.stop].to(device))

    def _to_their_ranks(self, parts_THw: Tensor) -> Tensor:
        """What all ranks have found for the tokens of this one, (C, M, H, w)."""
        share = [len(parts_THw) // self.size] * self.size

        def start(group: dist.ProcessGroup) -> transport.Pending:
            return transport.exchange(parts_THw, share, share, group)

        came = self.mesh.issue(RING, "all_to_all", parts_THw, start).wait()
        return came.unflatten(0, (self.size, -1))


def attend_part(
    q_nHd: Tensor, k_LKd: Tensor, v_LKv: Tensor, hidden_nL: Tensor, info: AttentionInfo
) -> Tensor:
    """Attention over some of the keys, (n, H, v + 1); the last number is the log-sum-exp, −inf
    without keys. Without sinks."""
    scores_KGnL = scores_of(q_nHd, k_LKd, hidden_nL, info)
    v_K1Lv = v_LKv.to(scores_KGnL.dtype).transpose(0, 1)[:, None]
    lse_KGn1 = scores_KGnL.logsumexp(-1, keepdim=True)
    odds_KGnL = (scores_KGnL - lse_KGn1.masked_fill(lse_KGn1.isneginf(), 0)).exp()
    part_KGnw = torch.cat([odds_KGnL @ v_K1Lv, lse_KGn1], dim=-1)
    return part_KGnw.permute(2, 0, 1, 3).flatten(1, 2)


def merge_parts(parts_CMHw: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Merge attention over parts of the keys; sinks are added once."""
    out_CMHv, lse_CMH1 = parts_CMHw[..., :-1], parts_CMHw[..., -1:]
    lse_MH1 = lse_CMH1.logsumexp(0)
    if sinks_H is not None:
        lse_MH1 = torch.logaddexp(lse_MH1, sinks_H.to(lse_MH1.dtype)[:, None])
    return (out_CMHv * (lse_CMH1 - lse_MH1).exp()).sum(0)


TP = "tp"
ReadWeight = Callable[[Weight, torch.dtype], Tensor]
"""A full weight, or a buffer."""


def blocks_within(decoder: Decoder, mesh: Mesh, num_bytes: float) -> int:
    """Number of blocks of a replica whose cache has so many bytes on a rank: equal on all ranks,
    limited by the largest stage."""
    fewest = torch.tensor(int(num_bytes // (token_bytes(decoder) * BLOCK)), device=mesh.device)
    if mesh.size(WORLD) > 1:
        mesh.all_reduce(fewest, WORLD, dist.ReduceOp.MIN).wait()
    return int(fewest) * mesh.layout.cp


def plan_of(shape: Shape, options: PlanOptions) -> Plan:
    """Plan of an engine. Tokens are split over tp only with experts: otherwise every rank has all
    of the few tokens of a decode."""
    usual = PlanOptions(options.model, options.layout, set=options.set, zero=0)
    return forward_plan(resolve(replace(usual, sp=shape.moe is not None)))


def forward_plan(plan: Plan) -> Plan:
    """Remove from a plan what only training uses; refuses what generation does not support."""
    refuse_mixer(plan.shape, "generation")
    if problems := list(_problems(plan)):
        raise BadFile(f"a generator in layout {plan.layout}", problems)
    return replace(plan, shape=replace(plan.shape, mtp=0), balance=())


def _problems(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    if plan.split.inner > 1:
        yield (
            f"context={layout.context} exchanges tokens for heads, and a generator keeps keys by "
            "blocks of tokens: leave the context kind out, which is for training"
        )
    if layout.chunks > 1:
        yield (
            f"chunks={layout.chunks}: a rank of a generator has one stage; leave the schedule and "
            "chunks out"
        )
    if plan.schedule.asynchronous:
        yield f"{plan.schedule.name} is for training: leave the schedule out"
    if plan.fp8 is not None:
        yield "fp8 is for training: leave the precision out"


class RankEnds(StageEnds):
    """Ends of one stage on one rank of a layout."""

    def __init__(self, plan: Plan, mesh: Mesh, dtype: torch.dtype) -> None:
        layout = plan.layout
        self.mesh, self.dtype, self.shape = mesh, dtype, plan.shape
        self.stage = mesh.coord(PIPELINE)
        self.tokens = AxisBoundary(mesh, TP, layout.sp, dim=0)
        self.vocabulary = AxisBoundary(mesh, TP, layout.sp, dim=1)
        self.context = AxisBoundary(mesh, RING, False, dim=0)
        self.shares = layout.tp if layout.sp else 1  # of the tokens of a context rank
        self.unit = self.context.size * self.shares
        # The experts of a rank serve the tokens of all replicas of its group.
        of_replica = layout.tp * layout.cp
        self.idles_along = plan.shape.moe is not None and layout.ep * layout.etp > of_replica
        self.sent: deque[Issued] = deque()

    def local_tokens(self, of_tokens_1T: Tensor) -> Tensor:
        return of_tokens_1T.chunk(self.context.size, dim=1)[self.context.coord]

    def receive(self, num_tokens: int) -> Tensor:
        size = torch.Size((1, num_tokens // self.shares, self.shape.width))
        return self.mesh.receive(size, self.dtype, self.stage - 1).wait()

    def send(self, x_1TD: Tensor) -> None:
        while len(self.sent) >= self.mesh.size(PIPELINE):  # received long ago: its draw is known
            self.sent.popleft().wait()
        self.sent.append(self.mesh.send(x_1TD.contiguous(), self.stage + 1))

    def all_tokens(self, x_TD: Tensor) -> Tensor:
        x_TD = self.tokens.gather(x_TD) if self.shares > 1 else x_TD
        return self.context.gather(x_TD) if self.context.size > 1 else x_TD

    def all_logits(self, logits_NV: Tensor) -> Tensor:
        if self.vocabulary.size == 1:
            return logits_NV
        return self.vocabulary.gather(logits_NV)[:, : self.shape.vocab]  # without its padding

    def finish(self) -> None:
        """Wait for all sends to complete."""
        while self.sent:
            self.sent.popleft().wait()


def forward_of(
    model: Decoder,
    blocks: int,
    mesh: Mesh,
    ends: StageEnds,
    routes: RouteStore | None = None,
    drawn: DrawnTokens | None = None,
) -> DecoderForward:
    """Forward for the device of a rank; captured as CUDA graphs on a GPU of its own."""
    if mesh.size(RING) > 1:
        return DecoderForward(model, blocks, partial(ContextCache, mesh=mesh), ends, routes)
    if mesh.device.type != "cuda":
        return DecoderForward(model, blocks, ends=ends, routes=routes, drawn=drawn)
    from fivefold.generate.cuda_graphs import (  # Triton is there with CUDA
        GraphedForward,
        attend_on_gpu,
    )

    if mesh.size(WORLD) == 1:
        return GraphedForward(model, blocks, ends, routes, drawn)
    return DecoderForward(model, blocks, partial(KvCache, kernel=attend_on_gpu), ends, routes)


def invariant_plan(plan: Plan) -> Plan:
    """Plan of a batch-invariant generator; refuses layouts that cannot be."""
    if plan.layout.cp > 1:
        raise FivefoldError(
            f"--batch-invariant with cp={plan.layout.cp}: which rank of cp has which keys depends "
            "on the blocks that are free, and so on the batch; use "
            f"tp={plan.layout.tp * plan.layout.cp}, or leave one of both out"
        )
    return plan


def mesh_of(plan: Plan, device: torch.device, batch_invariant: bool) -> Mesh:
    """Mesh of a generator; sums add in rank order for batch invariance."""
    return (RankOrderMesh if batch_invariant else Mesh).of(plan, device)


def stage_of(
    plan: Plan, mesh: Mesh, dtype: torch.dtype, batch_invariant: bool, fuse: Fuse = eager
) -> ForwardStage:
    """Build this rank's stage, without values."""
    if not batch_invariant:
        return compose_forward(plan, mesh, dtype, fuse)
    stage = compose_forward(plan, mesh, dtype, fuse, TILE_MATH)
    fix_tiles(stage.model)
    return stage


class LayoutEngine(Engine):
    """Engine on one rank. All ranks of the layout add the same requests in the same order, and call
    `step` equally often."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        stage: ForwardStage,
        blocks: int,
        limits: ScheduleLimits | None = None,
        watch: Watch | None = None,
        records_routes: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        """`blocks` are those of one replica; the plan is one of `forward_plan`. With
        `batch_invariant`, mesh and stage were made so as well."""
        self.plan, self.mesh, self.stage = plan, mesh, stage
        self._refit: Refit | None = None
        dtype = next(stage.model.parameters()).dtype
        self.ends = RankEnds(plan, mesh, dtype)
        # Without sequence parallelism all tp ranks have the same tokens: one of them counts.
        counts = plan.layout.sp or mesh.coord(TP) == 0
        routes = RouteStore(stage.model, blocks + 1, counts) if records_routes else None
        limits, drawn = limits or ScheduleLimits(), None
        # Other ranks would have to know what was drawn, and routes are read when a sequence ends.
        if plan.layout.world == 1 and not records_routes and not batch_invariant:
            drawn = DrawnTokens(max(limits.sequences, limits.tokens), mesh.device)
        inner = forward_of(stage.model, blocks, mesh, self.ends, routes, drawn)
        self.pages, forward = inner.cache.pages, cast("Forward", inner)
        if batch_invariant:
            forward = FixedSteps(inner)
            limits = forward.limits(limits)
        super().__init__(plan.shape, forward, blocks, limits, watch, self._ranks(), routes, drawn)

    def _ranks(self) -> EngineRanks:
        layout, mesh = self.plan.layout, self.mesh
        at = layout.coord(mesh.rank)
        last = mesh.coord(PIPELINE) == layout.pp - 1
        return EngineRanks(
            replicas=layout.dp,
            replica=at.dp,
            in_flight=layout.pp,
            draws=last and at.tp == at.cp == 0,
            owners=layout.cp,
            share=self._share if layout.world > 1 else alone,
        )

    def _share(self, table: Tensor) -> Shared:
        """Begin to sum over all ranks: of every row one rank has numbers, and the others zeros."""
        table = table.to(self.mesh.device)
        issued = self.mesh.all_reduce(table, WORLD, dist.ReduceOp.SUM)

        def wait() -> Tensor:
            issued.wait()
            return table

        return wait

    def load(self, job: Job) -> None:
        """Copy the current weights of a training job on the same ranks. All ranks call it together;
        running sequences are recomputed."""
        if self._refit is None or self._refit.job is not job:
            self._refit = Refit(job, self.stage, self.mesh)
        self._refit.run()
        self.renew()

    def close(self) -> None:
        """Wait until nothing of this engine is in flight on this rank."""
        if self.busy:
            raise FivefoldError("an engine with open requests was closed: end them before")
        self.ends.finish()
