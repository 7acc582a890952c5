"""Estimates of plans as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.core.estimate.outlook import Outlook

_GIB = 2**30


def entry(one: Outlook, because: list[str]) -> dict[str, Any]:
    """One layout with what it takes, and why."""
    plan, layout = one.plan, one.plan.layout
    return {
        "layout": str(layout),
        "zero": layout.zero,
        "sp": layout.sp,
        "context": layout.context,
        "schedule": plan.wishes.schedule,
        "chunks": layout.chunks,
        "stages": [len(layers) for layers in plan.stages],
        "microbatch_size": plan.batch.microbatch_size,
        "microbatches": plan.batch.microbatches,
        "recompute": str(plan.recompute),
        "offload": one.offload,
        "memory_gib": {
            **{name: size / _GIB for name, size in one.memory.items()},
            "total": one.total / _GIB,
        },
        "host_gib": one.host / _GIB,
        "disk_gib": one.disk / _GIB,
        "fits": one.verdict,
        "step_s": one.step,
        "time_s": one.parts,
        "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu,
        "mfu": one.mfu,
        "bubble": one.bubble,
        "because": because,
    }


def costs(one: Outlook, tokens: float | None, price: float | None) -> dict[str, Any]:
    """A whole run; empty where nobody asked."""
    if tokens is None:
        return {}
    hours = one.gpu_hours(tokens)
    found = {"tokens": tokens, "days": one.days(tokens), "gpu_hours": hours}
    return {"run": found | ({"price": hours * price} if price else {})}
