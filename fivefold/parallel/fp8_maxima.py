"""fp8 over ranks: which of them share a scale.

Blocks are on one rank each. Tensorwise, the maximum of an input or output gradient goes over all
ranks that have tokens or columns of one microbatch, tp · cp, and that of a weight over tp: four
bytes for each matmul that is rounded, of weights once a step. Of routed experts every row has a
scale, and every expert's weight: their maxima go over etp, where it cuts the width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from fivefold.core.groups import SCALE
from fivefold.core.plan import Plan
from fivefold.model.decoder import Decoder
from fivefold.model.fp8 import OverRanks, rounding_of, same
from fivefold.model.fp8_experts import ExpertRounding, RoundedExperts, WatchExperts
from fivefold.model.fp8_linear import FusedLinears, RoundedWeights, Watch
from fivefold.model.layers import Linear
from fivefold.model.linear_math import PLAIN, LinearMath
from fivefold.model.moe import MoeMlp
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.stage import MathOf, Stage
from fivefold.parallel.tensor import padded_tokens


def rounding_math(
    plan: Plan, mesh: Mesh, model: Decoder, keeps: bool, watch: Watch | None
) -> tuple[MathOf, RoundedWeights]:
    """The arithmetic of the linears of a stage, and its rounded weights; `keeps` if ZeRO keeps full
    weights over a step."""
    fp8, rounded = plan.fp8, RoundedWeights(keeps or mesh.size("fsdp") == 1)
    if fp8 is None:
        return _plain, rounded
    fp8.require_runnable(plan.schedule.asynchronous)
    names = {id(module): name for name, module in model.named_modules()}
    rounding = rounding_of(fp8, _over(mesh, SCALE), _over(mesh, "tp"))

    def math(layer: int, linears: Sequence[Linear], copied: Sequence[int] = ()) -> LinearMath:
        if not fp8.rounds(layer, plan.shape.layers):
            return PLAIN
        called = [names[id(each)] for each in linears]
        return FusedLinears(called, fp8, rounding, rounded, copied, watch)

    return math, rounded


def round_experts(rounded: RoundedWeights, watch: WatchExperts | None, stage: Stage) -> None:
    """Give routed experts the arithmetic of fp8, where their layer is rounded."""
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
    return PLAIN


def _over(mesh: Mesh, axis: str) -> OverRanks:
    if mesh.size(axis) == 1:
        return same

    def largest(maximum: Tensor) -> Tensor:
        mesh.all_reduce(maximum, axis, dist.ReduceOp.MAX, yields=True).wait()
        return maximum

    return largest
