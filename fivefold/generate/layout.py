"""An engine in a layout: what one rank of it has, and how ranks meet.

Splits   tp: heads, MLP columns and the vocabulary, as in training; KV heads fewer than tp are
         replicated. pp: layers, with as many batches under way as stages. ep: experts. dp: whole
         sequences; each data rank is a replica with its own blocks. cp: tokens of a step and
         blocks of the cache (`context_cache.py`).
Moves    in a stage what training moves in its forward, and what cp moves in attention; hidden
         states of a batch between stages, and of its tokens over cp to the head;
         logits of the tokens to be followed over tp, N · V; and of every drawn token two numbers,
         summed over all ranks.
Costs    no broadcast of decisions: every rank has the schedulers of all replicas and decides alike.
Refuses  cp by heads (Ulysses), several stages on a rank, asynchronous schedules and a plan in fp8.
Weights in codes of fp8 are in `coded_weights.py`.

A replica without sequences still runs where its experts serve others: on tokens of no sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import PIPELINE, RING, WORLD, Weight
from fivefold.core.model import BLOCK, Shape, refuse_mixer
from fivefold.core.plan import DecodeSteps, Plan, PlanOptions, resolve
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.cache import KvCache, token_bytes
from fivefold.generate.coded_weights import CodedLinears, require_codes
from fivefold.generate.context_cache import ContextCache
from fivefold.generate.drafts import DraftOptions
from fivefold.generate.engine import (
    Engine,
    EngineRanks,
    Forward,
    Shared,
    Watch,
    alone,
    on_this_rank,
)
from fivefold.generate.forward import DecoderForward
from fivefold.generate.grammar import Grammars
from fivefold.generate.invariant import FixedSteps, fix_tiles
from fivefold.generate.mtp_drafts import MtpDrafter
from fivefold.generate.refit import Refit
from fivefold.generate.routing import RouteStore
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.generate.stage_ends import StageEnds
from fivefold.generate.tiles import tile_math
from fivefold.model import Decoder, TokenRanks
from fivefold.model.kernels import Fuse, eager
from fivefold.parallel import (
    AxisBoundary,
    ForwardStage,
    Issued,
    Job,
    Mesh,
    RankOrderMesh,
    SymmetricBuffer,
    compose_forward,
)

TP = "tp"
ReadWeight = Callable[[Weight, torch.dtype], Tensor]
"""A full weight, or a buffer."""


def blocks_within(decoder: Decoder, mesh: Mesh, num_bytes: float, kv_codes: bool = False) -> int:
    """Number of blocks of a replica whose cache has so many bytes on a rank: equal on all ranks,
    limited by the largest stage."""
    of_block = token_bytes(decoder, kv_codes) * BLOCK
    fewest = torch.tensor(int(num_bytes // of_block), device=mesh.device)
    if mesh.size(WORLD) > 1:
        mesh.all_reduce(fewest, WORLD, dist.ReduceOp.MIN).wait()
    return int(fewest) * mesh.layout.cp


def plan_of(shape: Shape, options: PlanOptions, drafts: DraftOptions | None = None) -> Plan:
    """Plan of an engine. Tokens are split over tp only with experts: otherwise every rank has all
    of the few tokens of a decode."""
    usual = PlanOptions(options.model, options.layout, set=options.set, zero=0)
    usual = replace(usual, train=options.train.only_tuning())
    return forward_plan(resolve(replace(usual, sp=shape.moe is not None)), drafts)


def forward_plan(plan: Plan, drafts: DraftOptions | None = None) -> Plan:
    """Remove from a plan what only training uses; refuses what generation does not support. Layers
    of multi-token prediction stay as far as drafts use them."""
    refuse_mixer(plan.shape, "generation")
    if problems := list(_problems(plan)):
        raise BadFile(f"a generator in layout {plan.layout}", problems)
    heads = 0 if drafts is None else drafts.require_heads(plan.shape, plan.layout)
    return replace(plan, shape=replace(plan.shape, mtp=heads), balance=())


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
    steps: DecodeSteps,
    routes: RouteStore | None = None,
    drawn: DrawnTokens | None = None,
    adapters: TokenRanks | None = None,
    kv_codes: bool = False,
) -> DecoderForward:
    """Forward for the device of a rank; captured as CUDA graphs where `steps` are. `kv_codes`: keys
    and values in fp8."""
    same = (ends, routes, drawn, adapters)
    if kv_codes and mesh.device.type == "cuda":
        require_codes(mesh.device, "kv=fp8")
    if mesh.size(RING) > 1:
        make_cache = partial(ContextCache, mesh=mesh, codes=kv_codes)
        return DecoderForward(model, blocks, make_cache, *same)
    if mesh.device.type != "cuda":
        return DecoderForward(model, blocks, partial(KvCache, codes=kv_codes), *same)
    from fivefold.generate.cuda_graphs import (  # Triton is there with CUDA
        GraphedForward,
        attend_on_gpu,
    )
    from fivefold.generate.expert_steps import ExpertGroup

    if _captures_collectives(mesh):
        linears = mesh.layout.tp == 1
        return GraphedForward(model, blocks, *same, ExpertGroup(mesh), linears, steps, kv_codes)
    make_cache = partial(KvCache, kernel=attend_on_gpu, codes=kv_codes)
    return DecoderForward(model, blocks, make_cache, *same)


def _captures_collectives(mesh: Mesh) -> bool:
    """Whether collectives can be part of a graph; gloo goes by the host."""
    return mesh.size(WORLD) == 1 or mesh.backend == dist.Backend.NCCL


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


def share_memory(mesh: Mesh) -> str:
    """Let tensor ranks of one host sum and gather few tokens over symmetric memory; returns what
    went wrong, if anything did: then it is NCCL. All ranks call this together."""
    if mesh.size(TP) == 1 or mesh.backend != dist.Backend.NCCL:
        return ""
    shared, reason = SymmetricBuffer.of(mesh.groups[TP], mesh.device)
    for role in (TP, WORLD):
        if shared is not None and mesh.members[role] == mesh.members[TP]:
            mesh.symmetric[role] = shared
    return reason and f"tensor ranks sum over NCCL, and not over symmetric memory: {reason}"


def stage_of(
    plan: Plan,
    mesh: Mesh,
    dtype: torch.dtype,
    batch_invariant: bool,
    fuse: Fuse = eager,
    codes: bool = False,
) -> ForwardStage:
    """Build this rank's stage, without values; `codes`: weights of linears and experts in fp8."""
    coded = CodedLinears(mesh.device, batch_invariant) if codes else None
    math = tile_math if batch_invariant else None
    stage = compose_forward(plan, mesh, dtype, fuse, coded or math, codes)
    if batch_invariant:
        fix_tiles(stage.model)
    if coded is not None:
        coded.join(stage.model)
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
        grammars: Grammars | None = None,
        adapter_ranks: Sequence[int] = (),
        drafts: DraftOptions | None = None,
        kv_codes: bool = False,
    ) -> None:
        """`blocks` are those of one replica; the plan is one of `forward_plan`. With
        `batch_invariant`, mesh and stage were made so as well. With `adapter_ranks` the adapter of
        the plan is several side by side, of which a request names one. `kv_codes`: keys and values
        in fp8."""
        self.plan, self.mesh, self.stage = plan, mesh, stage
        self._refit: Refit | None = None
        self.ends = RankEnds(plan, mesh, stage.model.dtype)
        # Without sequence parallelism all tp ranks have the same tokens: one of them counts.
        counts = plan.layout.sp or mesh.coord(TP) == 0
        routes = RouteStore(stage.model, blocks + 1, counts) if records_routes else None
        limits, drawn = limits or ScheduleLimits(), None
        # A stage does not know what the last one draws, routes are read when a sequence ends, and
        # how many drafts are accepted is known after the draw.
        runs_ahead = plan.layout.world == plan.layout.tp and drafts is None and not plan.shape.mtp
        if runs_ahead and not records_routes and not batch_invariant:
            drawn = DrawnTokens(max(limits.sequences, limits.tokens), mesh.device)
        adapters = TokenRanks(adapter_ranks, mesh.device) if adapter_ranks else None
        dtype, codes = str(stage.model.dtype).removeprefix("torch."), bool(stage.scales)
        steps = DecodeSteps(plan.shape, plan.layout, dtype, codes, batch_invariant)
        inner = forward_of(
            *(stage.model, blocks, mesh, self.ends, steps), routes, drawn, adapters, kv_codes
        )
        self.decode_steps = steps
        self._decoder_forward = inner
        self.pages, forward = inner.cache.pages, cast("Forward", inner)
        if batch_invariant:
            forward = FixedSteps(inner)
            limits = forward.limits(limits)
        drafter = None if drafts is None else drafts.drafter()
        if plan.shape.mtp:
            drafter = MtpDrafter(inner, plan.shape.mtp)
        options = (limits, watch, self._ranks(), routes, drawn, grammars)
        options = (*options, len(adapter_ranks), drafter)
        super().__init__(plan.shape, forward, blocks, *options)

    def _ranks(self) -> EngineRanks:
        layout, mesh = self.plan.layout, self.mesh
        at = layout.coord(mesh.rank)
        last = mesh.coord(PIPELINE) == layout.pp - 1
        return EngineRanks(
            replicas=layout.dp,
            replica=at.dp,
            in_flight=layout.pp,
            draws=last and at.tp == at.cp == 0,
            together=self.ends.idles_along,
            owners=layout.cp,
            share=self._share if layout.world > 1 else alone,
            total=self._total if layout.world > 1 else on_this_rank,
        )

    def _total(self, table: Tensor) -> Tensor:
        """Sum over all ranks, on the device. Of every row one rank has numbers."""
        table = table.to(self.mesh.device)
        self.mesh.all_reduce(table, WORLD, dist.ReduceOp.SUM).wait()
        return table

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
        if self.stage.scales:
            raise FivefoldError(
                "weights of a running job into a generator with --precision fp8: a shard does not "
                "know the scales of full rows; generate without the precision, or load a checkpoint"
            )
        if self._refit is None or self._refit.job is not job:
            self._refit = Refit(job, self.stage, self.mesh)
        self._refit.run()
        self.renew()

    def close(self) -> None:
        """Wait until nothing of this engine is in flight on this rank."""
        if self.busy:
            raise FivefoldError("an engine with open requests was closed: end them before")
        self.ends.finish()
        self._decoder_forward.close()
