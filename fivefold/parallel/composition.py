"""The order in which the dimensions are applied, on one screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fivefold.core.layout import (
    PIPELINE,
    LocalWeight,
    Weight,
    WeightShard,
    buffers,
    by_name,
    local_shape,
    shard_of,
    stores_codes,
)
from fivefold.core.plan import Plan
from fivefold.core.schedule import defers_weight_gradients
from fivefold.cost.traffic import units_of
from fivefold.model import (
    Decoder,
    ExpertStack,
    Linear,
    TokenBatch,
    apply_recompute,
    from_config,
    initial_weight,
    look_ahead,
    mark_outgrown,
)
from fivefold.model.fp8 import CODES, RoundedWeights, round_rows
from fivefold.model.kernels import Fuse, eager
from fivefold.parallel import context, expert, tensor
from fivefold.parallel.balance import Balancing
from fivefold.parallel.data import Blocks, DataParallel
from fivefold.parallel.deferred import GradientQueue
from fivefold.parallel.mesh import Mesh, Phase
from fivefold.parallel.pipeline import Pipeline
from fivefold.parallel.stage import Instruments, MathOf, Stage
from fivefold.parallel.units import (
    FlatUnit,
    GradientHome,
    OwnedShard,
    UnitOptions,
    round_experts,
    rounding_math,
    share_maxima,
)


@dataclass(frozen=True)
class StageChunk:
    """One stage on one rank, as the pipeline drives it: its model, flat units and gradient queue.

    Without a `queue` autograd delivers all gradients itself. `rounded` are its weights in fp8.
    """

    stage: int
    model: Decoder
    data: DataParallel
    queue: GradientQueue | None
    rounded: RoundedWeights

    def forward(self, x: Tensor | None, batch: TokenBatch, microbatch: int) -> Tensor:
        self.data.phase.begin(microbatch)
        return self.model(batch.tokens if x is None else x, batch)

    def backward(self, run: Callable[[], None], microbatch: int, split: bool, last: bool) -> None:
        self.data.phase.begin(microbatch)
        with self.data.backward(last):
            if self.queue is None:
                run()
            elif split:
                with self.queue.keeping(microbatch):
                    run()
            else:
                with self.queue.taking(self.data):
                    run()

    def weight_gradients(self, microbatch: int, last: bool) -> None:
        assert self.queue is not None, "a backward that was not split defers no weight gradient"
        with self.data.collecting(last):
            self.queue.settle(microbatch, self.data)


@dataclass(frozen=True)
class Job:
    """The runtime of a plan on one rank: mesh, stages, pipeline and the weights it owns."""

    plan: Plan
    mesh: Mesh
    chunks: tuple[StageChunk, ...]
    pipeline: Pipeline
    forwards: Pipeline  # the same stages without their backwards
    balancing: Balancing
    table: dict[str, Weight]
    shards: dict[str, WeightShard]
    on_phase: Callable[[str], None]

    @property
    def units(self) -> Iterator[FlatUnit]:
        """The flat units of all chunks."""
        return (unit for chunk in self.chunks for unit in chunk.data.units)

    @property
    def owned(self) -> list[OwnedShard]:
        """Weight shards that the optimizer of this rank updates."""
        return [weight for chunk in self.chunks for weight in chunk.data.owned]

    @property
    def local_shards(self) -> list[OwnedShard]:
        """Weight shards of this rank, including frozen weights."""
        return [weight for unit in self.units for weight in unit.owned]

    def copies(self, owned: OwnedShard) -> int:
        """Number of ranks of the job that hold the same shard of a weight."""
        shard, everyone = ("edp", "edp") if owned.row.expert else ("fsdp", "dp-cp")
        sliced = self.plan.layout.zero >= 1 and self.mesh.size(shard) > 1
        copies = self.mesh.size(everyone) // (self.mesh.size(shard) if sliced else 1)
        return self.shards[owned.row.name].copies * copies * self._stages(owned.row.name)

    def _stages(self, name: str) -> int:
        """How many stages hold a weight: both directions have it, and both ends if it is tied."""
        directions = 2 if self.plan.schedule.placement.mirrored else 1
        return directions * (2 if self.is_tied(name) else 1)

    def local(self, batch: TokenBatch) -> TokenBatch:
        """Select this rank's tokens from the rows of its data rank."""
        coord = self.plan.layout.coord(self.mesh.rank).cp
        batch = mark_outgrown(look_ahead(batch, self.plan.shape.mtp), self.plan.shape)
        return context.shard(batch, self.plan.split, self.plan.padded_seq, coord)

    def is_tied(self, name: str) -> bool:
        """Whether first and last stage each have a copy of this weight."""
        split = len(self.plan.stages) > 1
        shared = self.plan.shape.ends_share and self.table[name].name == "embed.weight"
        return split and shared


def compose(
    plan: Plan,
    mesh: Mesh,
    *,
    seed: int,
    dtype: torch.dtype,
    offload: bool = False,
    as_summed: bool = True,
    disk: Path | None = None,
    grad_home: GradientHome | None = None,
    fuse: Fuse = eager,
    instruments: Instruments | None = None,
    initial: Callable[..., Tensor] = initial_weight,
) -> Job:
    """Build one rank: the rooms change the plain model of each of its stages one after the other,
    data parallelism shards the weights, and the pipeline drives the result. `fuse` makes kernels of
    all but GEMMs and attention, `initial` first values; `as_summed` as in `UnitOptions`."""
    watch, schedule, shape = instruments or Instruments(), plan.schedule, plan.shape
    table, coord = by_name(shape), plan.layout.coord(mesh.rank)
    shards = {name: shard_of(row, shape, plan.layout, coord) for name, row in table.items()}
    draw = partial(initial, shape=plan.shape, seed=seed, dtype=dtype, device=mesh.device)
    fill = partial(_first_values, table, shards, draw)
    options = UnitOptions(
        plan.layout.zero,
        getattr(torch, plan.units.grad_format(dtype.itemsize)),
        offload,
        without_weights=frozenset({"embed"}),
        backward_follows=plan.layout.pp == 1,
        past_autograd=defers_weight_gradients(schedule),  # on all ranks, for one arithmetic
        as_summed=as_summed,
        disk=disk,
        prefetch=plan.units.prefetch,
        grad_home=grad_home,
        on_collective=watch.on_unit,
    )
    balancing = Balancing(plan, mesh)
    rooms = (balancing.attach, expert.spread, context.split_rows, tensor.split, _recompute)

    def chunk(number: int) -> StageChunk:
        layers = plan.stages[number]
        model = from_config(plan.shape, dtype=dtype, device="meta", layers=layers, fuse=fuse)
        _make_buffers(model, mesh.device)
        queue = GradientQueue() if options.past_autograd else None
        units, keeps = units_of(plan, number, dtype.itemsize), not plan.gathers_each_time(layers)
        math, rounded = rounding_math(plan, mesh, model, keeps, watch.on_rounded)
        stage = Stage(number, plan, model, mesh, Phase(), queue, watch.routing, fuse, math)
        for apply in (_defer, partial(round_experts, rounded, watch.on_experts), *rooms):
            apply(stage)
        chunk_options = replace(options, keeps_weights=keeps, num_uses=model.num_uses())
        data = DataParallel(model, blocks_of(model), units, mesh, chunk_options, fill, stage.phase)
        return StageChunk(number, model, data, queue, share_maxima(plan, mesh, data.units, rounded))

    chunks = tuple(chunk(number) for number in schedule.placement.stages_of(mesh.coord(PIPELINE)))
    driven = {
        stage_chunk.stage: watch.wrap(stage_chunk) if watch.wrap else stage_chunk
        for stage_chunk in chunks
    }
    make = partial(Pipeline, mesh=mesh, hidden=hidden_size(plan), dtype=dtype)
    pipeline = make(schedule, chunks=driven, observer=watch.actions)
    plain = {stage_chunk.stage: stage_chunk for stage_chunk in chunks}
    forwards = make(schedule.forwards(), chunks=plain, observer=watch.evaluation)
    return Job(plan, mesh, chunks, pipeline, forwards, balancing, table, shards, watch.on_phase)


@dataclass(frozen=True)
class ForwardStage:
    """One stage of a rank that only computes forward: its weights are its shards, as plain
    parameters without values. Some may be codes in fp8."""

    model: Decoder
    table: dict[str, Weight]
    shards: dict[str, WeightShard]

    @property
    def scales(self) -> dict[str, Tensor]:
        """Scales of the rows of weights that are codes."""
        scales: dict[str, Tensor] = {}
        for name, _ in self.model.named_parameters():
            module = self.model.get_submodule(name.rpartition(".")[0])
            scale = module.row_scale if isinstance(module, Linear | ExpertStack) else None
            if scale is not None and stores_codes(name):
                scales[name] = scale
        return scales

    @torch.no_grad()
    def fill(self, read: Callable[[Weight, torch.dtype], Tensor]) -> None:
        """Give weights and buffers their values, cut from the full ones. A weight is rounded before
        it is cut, so that no layout changes the scale of a row."""
        scales, dtype = self.scales, self.model.dtype
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        for name, parameter in named:
            shard, scale = self.shards[name], scales.get(name)
            if scale is None:
                parameter.copy_(tensor.cut(read(self.table[name], parameter.dtype), shard))
                continue
            full = read(self.table[name], dtype).to(parameter.device)
            rows = round_rows([full.flatten(0, -2)], None)
            parameter.copy_(tensor.cut(rows.codes.view_as(full), shard))
            scale_of_row = rows.scale.view(*full.shape[:-1], 1).expand_as(full)
            scale.copy_(tensor.cut(scale_of_row, shard)[..., :1])


def compose_forward(
    plan: Plan,
    mesh: Mesh,
    dtype: torch.dtype,
    fuse: Fuse = eager,
    math: MathOf | None = None,
    codes: bool = False,
) -> ForwardStage:
    """Build one rank that computes forward: the same rooms, and no data dimension, whose ranks are
    replicas. Nothing balances experts, and nothing is dropped. `math`: the arithmetic of linears of
    blocks, where the plan's precision does not say it; with `codes`, of weights in fp8."""
    (number,) = plan.schedule.placement.stages_of(mesh.coord(PIPELINE))
    shape, coord = plan.shape, plan.layout.coord(mesh.rank)
    table = {**by_name(shape), **{buffer.name: buffer for buffer in buffers(shape)}}
    shards = {name: shard_of(weight, shape, plan.layout, coord) for name, weight in table.items()}
    layers = plan.stages[number]
    model = from_config(shape, dtype=dtype, device="meta", layers=layers, fuse=fuse)
    _make_buffers(model, mesh.device)
    rounding, _ = rounding_math(plan, mesh, model, True, None)
    stage = Stage(number, plan, model, mesh, Phase(), None, None, fuse, math or rounding)
    for apply in (expert.spread, tensor.split):
        apply(stage)
    _make_shards(model, table, shards, mesh.device, codes)
    return ForwardStage(model.eval(), table, shards)


def _make_shards(
    model: Decoder,
    table: Mapping[str, Weight],
    shards: Mapping[str, WeightShard],
    device: torch.device,
    codes: bool,
) -> None:
    """Put parameters of the size of a rank's shards in the place of full ones. A tied weight that
    two modules have is made once. With `codes`, those of linears and experts are in fp8."""
    new_shards: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in list(model.modules()):
        for attribute, full in list(module.named_parameters(recurse=False)):
            if id(full) not in new_shards:
                name = names[id(full)]
                size, dtype = local_shape(table[name], shards[name]), full.dtype
                if codes and stores_codes(name):
                    assert isinstance(module, Linear | ExpertStack)
                    dtype = CODES["e4m3"]
                    module.scale_rows(torch.ones(*size[:-1], 1, device=device))
                zero = torch.zeros(size, dtype=dtype, device=device)  # also where it pads
                new_shards[id(full)] = nn.Parameter(zero, requires_grad=False)
            setattr(module, attribute, new_shards[id(full)])


def _defer(stage: Stage) -> None:
    """Split the backward, whose weight gradients go through the queue."""
    if stage.queue is not None:
        stage.queue.defer(stage.model, stage.fuse)


def _recompute(stage: Stage) -> None:
    apply_recompute(stage.model, stage.plan.recompute.of(stage.number))


def _first_values(
    table: Mapping[str, Weight],
    shards: Mapping[str, WeightShard],
    draw: Callable[..., Tensor],
    row: LocalWeight,
) -> Tensor:
    """The first values of this rank's shard of a weight."""
    weight, shard = table[row.name], shards[row.name]
    if not weight.expert:
        return tensor.cut(draw(weight), shard)
    return tensor.cut_inside(draw(weight, experts=range(shard.start, shard.stop)), shard)


def _make_buffers(model: Decoder, device: torch.device) -> None:
    """What is neither computed nor updated by the optimizer: zero, on every rank alike."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))


def hidden_size(plan: Plan) -> torch.Size:
    """Shape of the activations between two stages on one rank."""
    seq = plan.local_seq // (plan.layout.tp if plan.layout.sp else 1)
    return torch.Size((plan.batch.microbatch_size, seq, plan.shape.width))


def blocks_of(model: Decoder) -> Blocks:
    """The modules of each block of the weights' table, in forward order."""
    embed = {"embed": [model.embed]} if model.embed is not None else {}
    middle = {f"blocks.{name}": [block] for name, block in model.blocks.items()}
    if model.norm is None or model.head is None:
        return {**embed, **middle}
    copy = [model.mtp["embed"]] if "embed" in model.mtp else []
    ahead = {f"mtp.{name}": [*copy, layer] for name, layer in model.mtp.items() if name != "embed"}
    return {**embed, **middle, "head": [model.norm, model.head], **ahead}
