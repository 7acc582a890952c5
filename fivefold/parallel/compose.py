"""The order in which the dimensions are applied, on one screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fivefold.core.plan import Plan
from fivefold.core.schedule import INPUT_GRAD, Action, merged
from fivefold.core.units import UnitRow
from fivefold.core.weights import Weight, WeightShard, by_name, held_by
from fivefold.cost.collectives import units_of
from fivefold.model import blocks
from fivefold.model.batch import TokenBatch, look_ahead
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.init import initial
from fivefold.parallel import context, expert, tensor
from fivefold.parallel.balance import Balancing
from fivefold.parallel.data import Blocks, DataParallel
from fivefold.parallel.deferred import GradientQueue
from fivefold.parallel.flat_unit import FlatUnit, OwnedShard, UnitOptions
from fivefold.parallel.mesh import PIPELINE, Mesh, Phase
from fivefold.parallel.pipeline import Pipeline
from fivefold.parallel.stage import StageChunk


@dataclass(frozen=True)
class Job:
    """A plan brought to life on one rank."""

    plan: Plan
    mesh: Mesh
    chunks: tuple[StageChunk, ...]
    pipeline: Pipeline
    forwards: Pipeline  # the same stages without their backwards
    balancing: Balancing
    table: dict[str, Weight]
    pieces: dict[str, WeightShard]

    @property
    def units(self) -> Iterator[FlatUnit]:
        """The data units of all chunks."""
        return (unit for chunk in self.chunks for unit in chunk.data.units)

    @property
    def owned(self) -> list[OwnedShard]:
        """What the optimizer of this rank updates."""
        return [each for chunk in self.chunks for each in chunk.data.owned]

    def copies(self, owned: OwnedShard) -> int:
        """How many times the job holds this very part of a weight."""
        shard, everyone = ("edp", "edp") if owned.row.expert else ("fsdp", "dp-cp")
        sliced = self.plan.layout.zero >= 1 and self.mesh.size(shard) > 1
        copies = self.mesh.size(everyone) // (self.mesh.size(shard) if sliced else 1)
        return self.pieces[owned.row.name].copies * copies * self._stages(owned.row.name)

    def _stages(self, name: str) -> int:
        """How many stages hold a weight: both directions have it, and both ends if it is tied."""
        directions = 2 if self.plan.schedule.placement.mirrored else 1
        return directions * (2 if self.is_tied(name) else 1)

    def local(self, batch: TokenBatch) -> TokenBatch:
        """What this rank holds of the rows of its data rank."""
        coord = self.plan.layout.coord(self.mesh.rank).cp
        batch = look_ahead(batch, self.plan.shape.mtp)
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
    grad_dtype: torch.dtype | None = None,
    offload: bool = False,
    bucket: int | None = None,
    master: bool = False,
    disk: Path | None = None,
) -> Job:
    """Build one rank: for each of its stages the plain model, then split backward, tensor,
    recomputation and data; and the pipeline around them."""
    shape, layout, schedule = plan.shape, plan.layout, plan.schedule
    table, coord = by_name(shape), layout.coord(mesh.rank)
    draw = partial(initial, shape=shape, seed=seed, dtype=dtype, device=mesh.device)
    pieces = {name: held_by(weight, shape, layout, coord) for name, weight in table.items()}
    options = UnitOptions(
        layout.zero,
        grad_dtype,
        offload,
        without_weights=frozenset({"embed"}),
        backward_follows=layout.pp == 1,
        past_autograd=_splits(plan),
        master=master,
        disk=disk,
    )

    fill = partial(_filled, table, pieces, draw)
    balancing = Balancing(plan, mesh)
    counts = not any(rule.pads for rule in plan.balance)

    def chunk(stage: int) -> StageChunk:
        model = from_config(shape, dtype=dtype, device="meta", layers=plan.stages[stage])
        _make_buffers(model, mesh.device)
        queue, phase = GradientQueue() if options.past_autograd else None, Phase()
        if queue is not None:
            queue.defer(model)
        repeats = plan.recompute.kind == "full"
        add = torch.add if queue is None else queue.add
        kind, layers = plan.recompute.kind, plan.stages[stage]
        balancing.attach(model, stage, phase)
        expert.spread(model, mesh, phase, layout.sp, kind, plan.ep_nodes, counts)
        context.split_rows(model, mesh, phase, plan.split, plan.padded_seq, kind)
        tensor.split(model, mesh, phase, layout.sp, repeats, add, plan.keeps_shards)
        blocks.apply(model, kind, plan.recompute.blocks, keeps_attention=layout.cp == 1)
        units = units_of(plan, stage, dtype.itemsize, bucket)
        keeps = replace(options, keeps_weights=not plan.gathers_each_time(layers))
        data = DataParallel(model, blocks_of(model), units, mesh, keeps, fill, phase)
        return StageChunk(stage, model, data, queue)

    chunks = tuple(chunk(stage) for stage in schedule.placement.held(mesh.place(PIPELINE)))
    pipeline, forwards = (
        Pipeline(each, mesh, {one.stage: one for one in chunks}, hidden_size(plan), dtype)
        for each in (schedule, schedule.forwards())
    )
    return Job(plan, mesh, chunks, pipeline, forwards, balancing, table, pieces)


def _filled(
    table: Mapping[str, Weight],
    pieces: Mapping[str, WeightShard],
    draw: Callable[..., Tensor],
    row: UnitRow,
) -> Tensor:
    """The first values of what a rank holds of a weight."""
    weight, piece = table[row.name], pieces[row.name]
    if weight.expert_dim is None:
        return tensor.cut(draw(weight), piece)
    return tensor.cut_inside(draw(weight, experts=range(piece.start, piece.stop)), piece)


def _make_buffers(model: Decoder, device: torch.device) -> None:
    """What is neither computed nor updated by the optimizer: zero, on every rank alike."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))


def _splits(plan: Plan) -> bool:
    """Whether some backward is split, on any rank: all ranks then defer, for one arithmetic."""
    schedule = plan.schedule
    steps = (step for rank in range(schedule.num_ranks) for step in merged(schedule, rank))
    return any(isinstance(step, Action) and step.kind == INPUT_GRAD for step in steps)


def hidden_size(plan: Plan) -> torch.Size:
    """Activations between two stages, as one rank holds them."""
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
