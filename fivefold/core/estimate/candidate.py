"""From a layout of a grid back to what a user would have said, so that it can be resolved."""

from __future__ import annotations

from dataclasses import replace

from fivefold.core.estimate.grid import CONTEXTS, RECOMPUTE, SCHEDULES, Grid
from fivefold.core.layout import Layout
from fivefold.core.plan import Wishes


def layout_of(grid: Grid) -> Layout:
    """The degrees of a one-element grid."""
    return Layout(
        replicate=_whole(grid, "replicate"),
        shard=_whole(grid, "shard"),
        tp=_whole(grid, "tp"),
        pp=_whole(grid, "pp"),
        cp=_whole(grid, "cp"),
        ep=_whole(grid, "ep"),
        etp=_whole(grid, "etp"),
        zero=_whole(grid, "zero"),
        sp=bool(grid.sp.item()),
        context=CONTEXTS[_whole(grid, "context")],
        chunks=_whole(grid, "chunks"),
    )


def wishes_of(grid: Grid, base: Wishes) -> Wishes:
    """`base` with all that a one-element grid decides; nothing of its layout is left open."""
    layout = layout_of(grid)
    return replace(
        base,
        layout=str(layout),
        gpus=layout.world,
        zero=layout.zero,
        gather=None,
        sp=layout.sp,
        context=layout.context,
        schedule=SCHEDULES[_whole(grid, "schedule")],
        chunks=layout.chunks,
        stage_layers=None,
        microbatches=_whole(grid, "microbatches"),
        microbatch_size=_whole(grid, "rows"),
        batch=None,
        recompute=RECOMPUTE[_whole(grid, "recompute")],
    )


def _whole(grid: Grid, name: str) -> int:
    return round(float(getattr(grid, name).item()))
