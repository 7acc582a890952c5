"""fp8 over ranks: which of them share a scale.

Blocks are on one rank each. Tensorwise, the maximum of an input or output gradient goes over all
ranks that have tokens or columns of one microbatch, tp · cp, and that of a weight over tp: four
bytes for each matmul that is rounded, of weights once a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from fivefold.core.fp8 import keeps_rounded
from fivefold.core.groups import SCALE
from fivefold.core.plan import Plan
from fivefold.model.decoder import Decoder
from fivefold.model.fp8 import OverRanks, rounding_of, same
from fivefold.model.fp8_linear import FusedLinears, RoundedWeights, Watch
from fivefold.model.fp8_matmul import require_units
from fivefold.model.layers import Linear
from fivefold.model.linear_math import PLAIN, LinearMath
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.stage import MathOf


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
        called = [names[id(each)] for each in linears]
        return FusedLinears(called, fp8, rounding, rounded, copied, watch)

    return math, rounded


def _plain(layer: int, linears: Sequence[Linear], copied: Sequence[int] = ()) -> LinearMath:
    return PLAIN


def _over(mesh: Mesh, axis: str) -> OverRanks:
    if mesh.size(axis) == 1:
        return same

    def largest(maximum: Tensor) -> Tensor:
        mesh.all_reduce(maximum, axis, dist.ReduceOp.MAX, yields=True).wait()
        return maximum

    return largest
