"""From one element of a grid back to the options of a plan."""

from __future__ import annotations

from dataclasses import replace

from fivefold.core.layout import Layout
from fivefold.core.plan import PlanOptions
from fivefold.cost import CONTEXTS, OFFLOADS, SCHEDULES, LayoutGrid


def layout_of(grid: LayoutGrid) -> Layout:
    """The layout of a one-element grid."""
    return Layout(
        replicate=_integer(grid, "replicate"),
        shard=_integer(grid, "shard"),
        tp=_integer(grid, "tp"),
        pp=_integer(grid, "pp"),
        cp=_integer(grid, "cp"),
        ep=_integer(grid, "ep"),
        etp=_integer(grid, "etp"),
        zero=_integer(grid, "zero"),
        sp=bool(grid.sp.item()),
        context=CONTEXTS[_integer(grid, "context")],
        chunks=_integer(grid, "chunks"),
    )


def options_of(grid: LayoutGrid, base: PlanOptions) -> PlanOptions:
    """`base` with everything that a one-element grid decides; no choice of layout stays open."""
    layout = layout_of(grid)
    return replace(
        base,
        layout=str(layout),
        gpus=layout.world,
        zero=layout.zero,
        gather=None,
        sp=layout.sp,
        context=layout.context,
        schedule=SCHEDULES[_integer(grid, "schedule")],
        chunks=layout.chunks,
        stage_layers=None,
        microbatches=_integer(grid, "microbatches"),
        microbatch_size=_integer(grid, "microbatch_size"),
        batch=None,
        recompute=str(grid.rules[_integer(grid, "recompute")]),
        train=base.train.with_offload(OFFLOADS[_integer(grid, "offload")]),
    )


def _integer(grid: LayoutGrid, name: str) -> int:
    return round(float(getattr(grid, name).item()))
