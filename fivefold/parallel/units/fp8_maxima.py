"""fp8 over ranks: which of them share a scale.

Blocks are on one rank each. Tensorwise, the maximum of an input or output gradient goes over all
ranks that have tokens or columns of one microbatch, tp · cp, and that of a weight over tp: four
bytes for each matmul that is rounded. Of routed experts every row has a scale, and every expert's
weight: their maxima go over etp, where it cuts the width. Those of all weights of a stage are found
together once a step, from the shards that ranks own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.layout import (
    SCALE,
    UnitSegment,
    gathered_as_codes,
    is_coded,
    keeps_rounded,
    maxima_joined,
    segments,
)
from fivefold.core.plan import Plan
from fivefold.model import PLAIN, AdaptedMath, Decoder, Linear, LinearMath, MoeMlp
from fivefold.model.fp8 import (
    ExpertRounding,
    FusedLinears,
    OverRanks,
    RoundedExperts,
    RoundedWeights,
    Watch,
    WatchExperts,
    largest_of,
    raise_maxima,
    require_units,
    rounding_of,
    same,
)
from fivefold.parallel import MathOf, Mesh, Stage, padded_tokens
from fivefold.parallel.units.flat_unit import CodedGather, FlatUnit


def rounding_math(
    plan: Plan, mesh: Mesh, model: Decoder, keeps: bool, watch: Watch | None
) -> tuple[MathOf, RoundedWeights]:
    """The arithmetic of the linears of a stage, and its rounded weights; `keeps` if weights that
    were gathered stay over a step."""
    fp8, rounded = plan.fp8, RoundedWeights(keeps_rounded(plan.layout, keeps))
    if fp8 is None:
        return _plain, rounded
    fp8.require_runnable(plan.schedule.asynchronous)
    require_units(fp8, mesh.device)
    names = {id(module): name for name, module in model.named_modules()}
    rounding = rounding_of(fp8, _over(mesh, SCALE), _over(mesh, "tp"))

    def math(layer: int, linears: Sequence[Linear], copied: Sequence[int] = ()) -> LinearMath:
        if not fp8.rounds(layer, plan.shape.layers):
            return PLAIN
        called = [names[id(linear)] for linear in linears]
        rounded.join(called)
        return FusedLinears(called, fp8, rounding, rounded, copied, watch)

    return math, rounded


def share_maxima(
    plan: Plan, mesh: Mesh, units: Sequence[FlatUnit], rounded: RoundedWeights
) -> RoundedWeights:
    """The rounded weights. The maxima of all weights of a stage that have a scale each, or one for
    each expert, are found together, and codes are gathered of those that are sharded."""
    coded = gathered_as_codes(plan.shape, plan.fp8)
    linears = rounded.fused if plan.fp8 is not None and plan.fp8.scaling == "tensorwise" else ()
    if not linears and not rounded.stacks:
        return rounded
    rounded.measure_by(WeightMaxima(mesh, units, linears, rounded.stacks).measure)
    first = {f"{name}.weight": group[0] for group in (*linears, *rounded.stacks) for name in group}

    def maximum(weight: str) -> Tensor:
        amax = rounded.maximum(first[weight])
        assert amax is not None, "every rounded weight belongs to a matmul"
        return amax

    for unit in units:
        if unit.sheds_weights and is_coded(unit.unit, coded):
            unit.code_by(CodedGather(unit.unit, mesh, coded, maximum))
    return rounded


class WeightMaxima:
    """Maxima of the weights of all fused matmuls of a stage, and of each expert: one all-reduce
    over the ranks with other slices, and one over those that cut weights (tp, of experts etp), or a
    single one where these ranks are the same for linears and experts."""

    def __init__(
        self,
        mesh: Mesh,
        units: Sequence[FlatUnit],
        linears: Sequence[Sequence[str]],
        stacks: Sequence[Sequence[str]],
    ) -> None:
        self.mesh, self.linears, self.stacks = mesh, linears, stacks
        routed = frozenset(f"{name}.weight" for names in stacks for name in names)
        self.owned = dict[str, list[tuple[FlatUnit, UnitSegment]]]()
        for unit in units:
            for segment in segments(unit.unit, unit.coord, routed, unit.unit.shard_size):
                self.owned.setdefault(segment.name, []).append((unit, segment))
        sizes = {
            name: len(parameter) for unit in units for name, parameter in unit.parameters.items()
        }
        self.experts = [sizes[f"{names[0]}.weight"] for names in stacks]
        numbers, axes = [len(linears), sum(self.experts)], [("fsdp", "tp"), ("edp", "etp")]
        if maxima_joined(mesh.layout):
            numbers, axes = [sum(numbers)], axes[:1]
        sharded = mesh.layout.zero > 0
        self.over = [
            [_over(mesh, axis) for axis in group_axes[1 - sharded :]] for group_axes in axes
        ]
        self.numbers = numbers

    def measure(self) -> dict[str, Tensor]:
        """Maxima by the name of the first linear or stack of each matmul."""
        local_maxima = [self._of_linears(names) for names in self.linears]
        local_maxima += [
            self._of_experts(*pair) for pair in zip(self.stacks, self.experts, strict=True)
        ]
        results: list[Tensor] = []
        for part, over in zip(torch.cat(local_maxima).split(self.numbers), self.over, strict=True):
            for over_ranks in over if len(part) else ():
                part = over_ranks(part)
            results.append(part)
        sizes = [1] * len(self.linears) + self.experts
        pairs = zip((*self.linears, *self.stacks), torch.cat(results).split(sizes), strict=True)
        return {names[0]: maxima for names, maxima in pairs}

    def _of_linears(self, names: Sequence[str]) -> Tensor:
        parts = [part for name in names for part, _ in self._owned(name)]
        return largest_of(parts).to(self.mesh.device)[None] if parts else self._zeros(1)

    def _of_experts(self, names: Sequence[str], number: int) -> Tensor:
        maxima = self._zeros(number)
        for part, experts in (pair for name in names for pair in self._owned(name)):
            own = maxima[experts.start : experts.stop]
            raise_maxima(own, part.unflatten(0, (len(own), 1, -1)))
        return maxima

    def _zeros(self, number: int) -> Tensor:
        return torch.zeros(number, dtype=torch.float32, device=self.mesh.device)

    def _owned(self, name: str) -> Iterator[tuple[Tensor, range]]:
        """What this rank owns of a weight, and of which experts."""
        for unit, segment in self.owned.get(f"{name}.weight", ()):
            low = unit.coord * unit.unit.shard_size
            yield unit.shard[segment.start - low : segment.stop - low], segment.experts


def round_experts(rounded: RoundedWeights, watch: WatchExperts | None, stage: Stage) -> None:
    """Replace the arithmetic of routed experts by fp8, in layers that are rounded."""
    plan, mesh, fp8 = stage.plan, stage.mesh, stage.plan.fp8
    if fp8 is None or plan.shape.moe is None:
        return
    over = _over(mesh, "etp") if mesh.size("etp") > 1 else None
    shared = ExpertRounding(rounded, over, _live(plan, mesh), stage.queue, watch)
    names = {id(module): name for name, module in stage.model.named_modules()}
    for block in stage.model.all_blocks():
        if isinstance(block.mlp, MoeMlp) and fp8.rounds(block.number, plan.shape.layers):
            RoundedExperts(block.mlp.experts, names, shared).attach()


def _live(plan: Plan, mesh: Mesh) -> Callable[[Tensor], Tensor]:
    """This rank's tokens between matmuls, zero where they are padding."""
    padded_S = padded_tokens(plan, mesh)
    if padded_S is None:
        return same
    if plan.layout.sp:
        padded_S = padded_S.chunk(mesh.size("tp"))[mesh.coord("tp")]
    mask_S1 = padded_S[:, None]

    def live(x_ND: Tensor) -> Tensor:
        rows = x_ND.unflatten(0, (-1, len(mask_S1)))
        return rows.masked_fill(mask_S1, 0).flatten(0, 1)

    return live


def _plain(layer: int, linears: Sequence[Linear], copied: Sequence[int] = ()) -> LinearMath:
    adapters = [linear.lora for linear in linears]
    return AdaptedMath(adapters) if any(adapters) else PLAIN


def _over(mesh: Mesh, axis: str) -> OverRanks:
    if mesh.size(axis) == 1:
        return same

    def largest(maximum: Tensor) -> Tensor:
        mesh.all_reduce(maximum, axis, dist.ReduceOp.MAX, yields=True).wait()
        return maximum

    return largest
