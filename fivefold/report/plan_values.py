"""Plans, estimates and comparisons as JSON, and as text where the text is made from the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fivefold.core import counted
from fivefold.core.layout import Fp8, Topology, communicators, computed_flops
from fivefold.core.model import shape
from fivefold.core.plan import Plan
from fivefold.cost.memory import communicator_bytes, most_communicators
from fivefold.cost.traffic import collectives
from fivefold.report import duration, gib, table
from fivefold.report.plan_text import RunCosts, loses, name_of

if TYPE_CHECKING:
    from fivefold.planner import Estimate, Strategy, StrategyTraffic, SweepPoint


_GIB = 2**30


def estimate_json(estimate: Estimate, because: list[str]) -> dict[str, Any]:
    """One plan with its estimated memory and time, and the reasons for it."""
    plan, layout, off = estimate.plan, estimate.plan.layout, estimate.accuracy
    return {
        "layout": str(layout),
        "zero": layout.zero,
        "sp": layout.sp,
        "context": layout.context,
        "schedule": plan.options.schedule,
        "chunks": layout.chunks,
        "stages": [len(layers) for layers in plan.stages],
        "microbatch_size": plan.batch.microbatch_size,
        "microbatches": plan.batch.microbatches,
        "recompute": str(plan.recompute),
        "compile": plan.options.train.compiles("cuda"),
        "offload": estimate.offload,
        "memory_gib": {
            key: n / _GIB for key, n in [*estimate.memory.items(), ("total", estimate.total)]
        },
        "host_gib": estimate.host / _GIB,
        "disk_gib": estimate.disk / _GIB,
        "fits": estimate.verdict,
        "nccl_gib": estimate.nccl / _GIB,
        "step_s": estimate.step,
        "step_s_low": (1 - off.time) * estimate.step,
        "step_s_high": (1 + off.time) * estimate.step,
        "error_bar": {"time": off.time, "time_p90": off.time_p90, "memory": off.memory},
        "time_s": estimate.parts,
        "tokens_per_s_per_gpu": estimate.tokens_per_s_per_gpu,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "bubble": estimate.bubble,
        "because": because,
    }


def run_costs(estimate: Estimate, costs: RunCosts) -> dict[str, Any]:
    """Days, GPU-hours and price of a training run; empty if its tokens are not given."""
    tokens, price = costs.tokens, costs.price
    if tokens is None:
        return {}
    hours = estimate.gpu_hours(tokens)
    facts = {"tokens": tokens, "days": estimate.days(tokens), "gpu_hours": hours}
    facts |= {"price": hours * price} if price else {}
    failing = costs.failing(estimate)
    if failing is not None:
        share = failing.expected
        days = estimate.days(tokens) / share if share > 0 else None
        facts |= {"goodput": share, "days_with_failures": days, "mtbf_s": 1 / failing.rate}
    return {"run": facts}


# --- A resolved plan: ranks, groups, links, batch, parameters

_DENSE_AXES = ("tp", "cp", "dp", "pp")
_EXPERT_AXES = ("ep", "etp", "edp")


def describe(plan: Plan) -> dict[str, Any]:
    """The resolved plan as JSON."""
    layout, batch = plan.layout, plan.batch
    counts = shape.parameters(plan.shape)
    axes = _DENSE_AXES if plan.shape.moe is None else (*_DENSE_AXES, *_EXPERT_AXES)
    return {
        "model": plan.shape.name,
        "parameters": {"total": counts.total, "active": counts.active, "parts": counts.parts()},
        "training_flops_per_token": computed_flops(plan.shape, batch.seq),
        "layout": str(layout),
        "world": layout.world,
        "readings": readings(plan),
        "zero": layout.zero,
        "gather": plan.gather,
        "axes": {axis: _axis(plan, axis) for axis in axes},
        "schedule": plan.options.schedule,
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
        **({} if plan.fp8 is None else {"fp8": _rounding(plan.fp8)}),
        "communicators": _communicators(plan),
        "traffic": collectives.traffic_json(plan),
        "notes": list(plan.notes),
    }


def _rounding(fp8: Fp8) -> dict[str, Any]:
    """How linears are rounded."""
    wgrad = {"wgrad": fp8.wgrad, "gradients": fp8.gradients, "skip": fp8.skip}
    return {"scaling": fp8.scaling, **wgrad, "what": fp8.describe()}


def _communicators(plan: Plan) -> dict[str, Any]:
    """Those of the rank that is in most; all of them are made by `calls` calls of every rank."""
    most = most_communicators(plan)
    return {
        "per_rank": len(most),
        "names": list(dict.fromkeys(communicator.role for communicator in most)),
        "calls": len(communicators(Topology.of(plan))),
        "bytes": communicator_bytes(most),
    }


def readings(plan: Plan) -> list[str]:
    """The degrees as a product: for dense layers, and for experts if there are any."""
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
    """The same as text."""
    parameters = table["parameters"]
    parts = ", ".join(f"{part} {_billions(n)}" for part, n in parameters["parts"].items() if n)
    lines = [
        f"model     {plan.shape.name}: {_billions(parameters['total'])} parameters, "
        f"{_billions(parameters['active'])} active a token",
        f"          {parts}",
        f"          {table['training_flops_per_token']:.3e} training FLOPs a token at "
        f"{plan.batch.seq:,} tokens (causal attention at half, recompute not counted)",
        *(f"layout    {reading}" for reading in table["readings"]),
        f"          ZeRO-{plan.layout.zero}, schedule {plan.options.schedule}, "
        f"recompute {plan.recompute}, {plan.precision}",
        *([] if plan.fp8 is None else [f"          {table['fp8']['what']}"]),
        f"batch     {plan.batch}",
    ]
    if plan.layout.pp > 1:
        lines.append(f"stages    {_runs(table['stages'])} layers")
    for axis, facts in table["axes"].items():
        if facts["degree"] > 1:
            where = f", within {facts['tier']}" if "tier" in facts else ""
            lines.append(f"{axis:<9} {_group(facts['first_group'])}{where}")
    communicators = table["communicators"]
    if communicators["per_rank"]:
        lines.append(
            f"groups    {counted(communicators['per_rank'], 'communicator')} a rank "
            f"({', '.join(communicators['names'])}), for which NCCL holds about "
            f"{gib(communicators['bytes'])}"
        )
    return [*lines, *(f"note      {note}" for note in plan.notes)]


def _billions(number: int) -> str:
    scale, unit = (1e9, "B") if number >= 1e9 else (1e6, "M")
    return f"{number / scale:,.2f} {unit}"


def _runs(numbers: list[int]) -> str:
    """`7, 14 x 8, 7`: equal neighbours are counted."""
    runs = [(len([*group]), number) for number, group in groupby(numbers)]
    return ", ".join(str(number) if n == 1 else f"{n} x {number}" for n, number in runs)


def _group(ranks: list[int]) -> str:
    """`8 ranks, the first group 0 16 32 …`."""
    shown = " ".join(map(str, ranks[:4])) + (" …" if len(ranks) > 4 else "")
    return f"{counted(len(ranks), 'rank')}, the first group {shown}"


# --- Comparisons: strategies side by side, sweeps, before and after

_MARKS = "▁▂▃▄▅▆▇█"


def strategies_text(strategies: Sequence[Strategy], best: Estimate | None) -> list[str]:
    """Each axis alone: batch, memory, time, traffic and its main drawback; and the first choice
    among all layouts."""
    heads = ("", "layout", "least batch", "weights", "grads", "states", "rest", "total GiB")
    rows = [(*heads, "compute", "step", "tokens/s/GPU")]
    rows += [_strategy_row(candidate) for candidate in strategies]
    lines = table(rows, left=(0, 1))
    if best is not None:
        speed = f"{duration(best.step)}, {best.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
        lines += ["", f"all axes: {name_of(best)}: {speed}"]
    for strategy in strategies:
        lines += ["", f"{strategy.name}: {drawback(strategy)}"]
        lines += [f"  {_traffic_text(traffic)}" for traffic in strategy.moved[:4]]
    return lines


def _strategy_row(strategy: Strategy) -> tuple[str, ...]:
    batch = f"{strategy.least_batch:,}"
    if strategy.estimate is None:
        return (strategy.name, str(strategy.layout), batch, *("–",) * 8)
    memory, look = strategy.estimate.memory, strategy.estimate
    static = (memory["weights"], memory["gradients"], memory["master"] + memory["optimizer"])
    sizes = (*static, look.total - sum(static), look.total)
    return (
        strategy.name,
        name_of(look),
        batch,
        *(f"{size / 2**30:,.1f}" for size in sizes),
        duration(look.breakdown()["compute"]),
        duration(look.step),
        f"{look.tokens_per_s_per_gpu:,.0f}",
    )


def drawback(strategy: Strategy) -> str:
    """The main drawback of a strategy, from its own numbers."""
    if strategy.estimate is None:
        return strategy.refused
    look = strategy.estimate
    if look.over > 0:
        name, size = max(look.memory.items(), key=lambda pair: pair[1])
        above = f"{gib(look.over)} above the usable {gib(look.setting.capacity)}"
        return f"{look.verdict}: {above}, most of it {name} ({gib(size)})"
    waste = {k: v for k, v in look.breakdown().items() if k != "compute"}
    name, seconds = max(waste.items(), key=lambda pair: pair[1])
    alone = ("bubble", "optimizer", "launch", "rounding", "fixed")
    what = name if name in alone else f"{name} traffic"
    return f"{what} takes {duration(seconds)} of a step, {seconds / look.step:.0%}"


def _traffic_text(traffic: StrategyTraffic) -> str:
    calls = f"{traffic.calls:,} {'call' if traffic.calls == 1 else 'calls'}"
    return f"{traffic.axis} {traffic.kind}: {calls} with {gib(traffic.bytes)} a step on one rank"


def strategies_json(strategies: Sequence[Strategy]) -> list[dict[str, Any]]:
    """The same as JSON."""
    return [
        {
            "strategy": strategy.name,
            "layout": str(strategy.layout),
            "least_batch": strategy.least_batch,
            "collectives": [traffic._asdict() for traffic in strategy.moved],
            "drawback": drawback(strategy),
            "estimate": None if strategy.estimate is None else estimate_json(strategy.estimate, []),
        }
        for strategy in strategies
    ]


def sweep_text(axis: str, values: Sequence[int], points: Sequence[SweepPoint]) -> list[str]:
    """One line per strategy and recomputation: speed and memory, with a cross if it does not
    fit."""
    rows: list[tuple[str, ...]] = [("strategy", "recompute", *map(_short, values), "")]
    memory = [rows[0]]
    most = max((_speed(point) for point in points), default=0.0)
    for key in dict.fromkeys((point.strategy, point.recompute) for point in points):
        line = [point for point in points if (point.strategy, point.recompute) == key]
        speeds = [_speed(point) for point in line]
        spark = "".join(_mark(speed / most if most else 0.0) for speed in speeds)
        rows.append((*key, *(f"{speed:,.0f}" if speed else "×" for speed in speeds), spark))
        memory.append((*key, *(_memory(point) for point in line), ""))
    return [
        f"tokens/s/GPU along {axis} (×: does not fit)",
        *table(rows, left=(0, 1)),
        "",
        f"GiB of the fullest rank along {axis} (×: does not fit)",
        *table(memory, left=(0, 1)),
    ]


def _speed(point: SweepPoint) -> float:
    return point.estimate.tokens_per_s_per_gpu if point.estimate is not None and point.fits else 0.0


def _memory(point: SweepPoint) -> str:
    if point.estimate is None:
        return "–"
    return f"{point.estimate.total / 2**30:,.1f}{'' if point.fits else ' ×'}"


def _mark(share: float) -> str:
    return _MARKS[min(len(_MARKS) - 1, round(share * (len(_MARKS) - 1)))] if share else " "


def _short(number: int) -> str:
    for unit, size in (("m", 1 << 20), ("k", 1 << 10)):
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return f"{number:,}"


def sweep_json(axis: str, points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """The same as JSON."""
    return [
        {
            axis: point.value,
            "strategy": point.strategy,
            "recompute": point.recompute,
            "fits": point.fits,
            "estimate": None if point.estimate is None else estimate_json(point.estimate, []),
        }
        for point in points
    ]


def before_after(before: Estimate, after: Estimate, title: str) -> list[str]:
    """One plan beside that of a changed job."""
    rows = [("", "plan", "GPUs", "GiB", "step", "tokens/s", "tokens/s/GPU", "MFU")]
    for name, estimate in (("now", before), (title, after)):
        world = estimate.plan.layout.world
        row = (
            name,
            name_of(estimate),
            f"{world:,}",
            f"{estimate.total / 2**30:,.1f}",
            duration(estimate.step),
        )
        speed = estimate.tokens_per_s_per_gpu
        rows.append((*row, f"{speed * world:,.0f}", f"{speed:,.0f}", f"{estimate.mfu:.1%}"))
    return [*table(rows, left=(0, 1)), f"a step is {loses(after, before)}"]
