"""A resolved plan as JSON and for people: ranks, groups, links, batch, parameters."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from fivefold.core import count, traffic
from fivefold.core.plan import Plan
from fivefold.core.words import counted

_DENSE_AXES = ("tp", "cp", "dp", "pp")
_EXPERT_AXES = ("ep", "etp", "edp")


def describe(plan: Plan) -> dict[str, Any]:
    """The resolved plan as JSON."""
    layout, batch = plan.layout, plan.batch
    parameters = count.parameters(plan.shape)
    return {
        "model": plan.shape.name,
        "parameters": {
            "total": parameters.total,
            "active": parameters.active,
            "parts": parameters.parts(),
        },
        "training_flops_per_token": count.training_flops(plan.shape, batch.seq).total,
        "layout": str(layout),
        "world": layout.world,
        "readings": readings(plan),
        "zero": layout.zero,
        "gather": plan.gather,
        "axes": {axis: _axis(plan, axis) for axis in _axes(plan)},
        "schedule": plan.wishes.schedule,
        "chunks": layout.chunks,
        "stages": [len(layers) for layers in plan.stages],
        "batch": {
            "sequences": batch.sequences,
            "tokens": batch.tokens,
            "microbatch_size": batch.microbatch_size,
            "microbatches": batch.microbatches,
            "dp": batch.dp,
            "seq": batch.seq,
        },
        "traffic": traffic.listed(plan),
        "notes": list(plan.notes),
    }


def _axes(plan: Plan) -> tuple[str, ...]:
    return _DENSE_AXES if plan.shape.moe is None else (*_DENSE_AXES, *_EXPERT_AXES)


def readings(plan: Plan) -> list[str]:
    """Both readings of the product where there are experts; otherwise there is only one."""
    layout = plan.layout
    if plan.shape.moe is None:
        degrees = f"dp {layout.dp} · cp {layout.cp} · tp {layout.tp} · pp {layout.pp}"
        return [f"{degrees} = {counted(layout.world, 'rank')}"]
    return list(layout.readings())


def _axis(plan: Plan, axis: str) -> dict[str, Any]:
    first = plan.layout.group(axis, 0)
    table: dict[str, Any] = {"degree": len(first), "first_group": list(first)}
    if plan.machine is not None:
        table["tier"] = plan.layout.tier(axis, plan.machine).name
    return table


def render(plan: Plan, table: dict[str, Any]) -> list[str]:
    """The same for people."""
    parameters = table["parameters"]
    parts = ", ".join(f"{part} {_billions(n)}" for part, n in parameters["parts"].items() if n)
    lines = [
        f"model     {plan.shape.name}: {_billions(parameters['total'])} parameters, "
        f"{_billions(parameters['active'])} active a token",
        f"          {parts}",
        f"          {table['training_flops_per_token']:.3e} training FLOPs a token at "
        f"{plan.batch.seq:,} tokens (causal attention at half, recompute not counted)",
        *(f"layout    {reading}" for reading in table["readings"]),
        f"          ZeRO-{plan.layout.zero}, schedule {plan.wishes.schedule}, "
        f"recompute {plan.recompute}, {plan.precision}",
        f"batch     {plan.batch}",
    ]
    if plan.layout.pp > 1:
        lines.append(f"stages    {_runs(table['stages'])} layers")
    for axis, one in table["axes"].items():
        if one["degree"] > 1:
            where = f", within {one['tier']}" if "tier" in one else ""
            lines.append(f"{axis:<9} {_group(one['first_group'])}{where}")
    return [*lines, *(f"note      {note}" for note in plan.notes)]


def _billions(number: int) -> str:
    scale, unit = (1e9, "B") if number >= 1e9 else (1e6, "M")
    return f"{number / scale:,.2f} {unit}"


def _runs(numbers: list[int]) -> str:
    """`7, 14 x 8, 7`: equal neighbours are told by their number."""
    runs = [(len([*group]), number) for number, group in groupby(numbers)]
    return ", ".join(str(number) if n == 1 else f"{n} x {number}" for n, number in runs)


def _group(ranks: list[int]) -> str:
    """`8 ranks, the first group 0 16 32 …`."""
    shown = " ".join(map(str, ranks[:4])) + (" …" if len(ranks) > 4 else "")
    return f"{len(ranks)} ranks, the first group {shown}"
