"""A plan and its estimates: values for JSON, lines for a terminal, and the answers of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from fivefold.core import counted
from fivefold.core.layout import Fp8, Topology, communicators, computed_flops
from fivefold.core.model import shape
from fivefold.core.plan import Plan
from fivefold.cost.memory import most_communicators, nccl_bytes
from fivefold.cost.step import COMPUTE
from fivefold.cost.traffic import collectives
from fivefold.render.text import bar, duration, gib, rough_duration, table

if TYPE_CHECKING:
    from fivefold.planner import (
        AxisComparison,
        Estimate,
        FailingJob,
        Neighbour,
        PlanResult,
        Strategy,
        StrategyTraffic,
        SweepPoint,
    )

_GIB = 2**30


def estimate_json(estimate: Estimate, because: list[str]) -> dict[str, Any]:
    """One plan with its estimated memory and time, and the reasons for it."""
    plan, layout, off = estimate.plan, estimate.plan.layout, estimate.accuracy
    low, high = off.span(estimate.step)
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
        "step_s": estimate.step,
        "step_s_low": low,
        "step_s_high": high,
        "error_bar": {"time": off.time, "time_p90": off.time_p90, "memory": off.memory},
        "time_s": estimate.parts,
        "tokens_per_s_per_gpu": estimate.tokens_per_s_per_gpu,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "bubble": estimate.bubble,
        "because": because,
    }


def step_text(estimate: Estimate) -> str:
    """The time of a step, and between which times nine in ten measured ones are."""
    low, high = map(duration, estimate.accuracy.span(estimate.step))
    return f"{duration(estimate.step)} (nine in ten: {low} to {high})"


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


def describe_plan(plan: Plan) -> dict[str, Any]:
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
    facts = {"scaling": fp8.scaling, "wgrad": fp8.wgrad, "gradients": fp8.gradients}
    return {**facts, "skip": fp8.skip, "what": fp8.describe()}


def _communicators(plan: Plan) -> dict[str, Any]:
    """Those of the rank that is in most; all of them are made by `calls` calls of every rank."""
    most = most_communicators(plan)
    return {
        "per_rank": len(most),
        "names": list(dict.fromkeys(role for group in most for role in group.roles)),
        "calls": len(communicators(Topology.of(plan))),
        "bytes": nccl_bytes(plan, plan.machine),
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


def plan_lines(plan: Plan, table: dict[str, Any]) -> list[str]:
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
            ranks = facts["first_group"]
            first = " ".join(map(str, ranks[:4])) + (" …" if len(ranks) > 4 else "")
            size = counted(len(ranks), "rank")
            lines.append(f"{axis:<9} {size}, the first group {first}{where}")
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
        spark = "".join(_spark(speed / most if most else 0.0) for speed in speeds)
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


def _spark(share: float) -> str:
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


_NAMES = {
    "tp": "tp traffic",
    "cp": "cp traffic",
    "ep": "ep traffic",
    "pp": "pp messages",
    "dp": "dp traffic",
    "bubble": "bubble",
    "launch": "launches",
    "rounding": "rounding",
    "optimizer": "optimizer",
    "offload": "host link",
    "fixed": "fixed",
    "compute": "compute",
}
_SMALL = 5e-3  # share of a step: smaller changes of a part are left out


def reasons_text(
    chosen: Estimate,
    takeaways: list[AxisComparison],
    rival: Estimate | None,
    simpler: str = "",
) -> list[str]:
    """Why this layout: beside the fastest or the next best, and each axis beside its neighbours.

    `rival`: the fastest plan, or the next best if the chosen one is the fastest. `simpler`: in what
    the chosen one is simpler than the fastest.
    """
    fastest = chosen.step if rival is None else min(chosen.step, rival.step)
    reasons: list[str] = []
    if rival is not None and rival.step < chosen.step:
        reasons = [f"equal to the fastest and simpler, {simpler}: {name_of(rival)} is "]
    elif rival is not None:
        reasons = [f"the next best, {name_of(rival)}: "]
    reasons = [reason + loses(rival, chosen, fastest) for reason in reasons if rival is not None]
    return [
        *reasons,
        *(axis_text(takeaway, chosen, fastest) for takeaway in takeaways if takeaway.neighbours),
    ]


def name_of(estimate: Estimate) -> str:
    """A plan in one line."""
    plan = estimate.plan
    parts = [str(plan.layout), f"ZeRO-{plan.layout.zero}"]
    if plan.layout.cp > 1:
        parts.append(plan.layout.context)
    if plan.layout.pp > 1:
        parts.append(f"{plan.options.schedule}({plan.layout.chunks})")
    parts += [f"recompute {plan.recompute}"] if str(plan.recompute) != "none" else []
    return ", ".join([*parts, *offload_words(estimate)])


def offload_words(estimate: Estimate) -> list[str]:
    """Where optimizer states are, if not on the device."""
    return [] if estimate.offload == "none" else [f"offload {estimate.offload}"]


def loses(estimate: Estimate, best: Estimate, fastest: float | None = None) -> str:
    """How much slower one plan is than another, and in which parts; `equal` if estimates cannot
    tell them apart, or either from the fastest."""
    parts = {
        name: estimate.parts.get(name, 0.0) - best.parts.get(name, 0.0)
        for name in {**best.parts, **estimate.parts}
    }
    text = _slower(estimate.step - best.step, best, best.step if fastest is None else fastest)
    return f"{text}{_where(parts, best.step)}"


def axis_text(comparison: AxisComparison, chosen: Estimate, fastest: float) -> str:
    """One axis: its degree, and its neighbours."""
    near = "; ".join(
        _neighbour(neighbour, comparison.tier, chosen, fastest)
        for neighbour in comparison.neighbours
    )
    where = _span_of_axis(comparison.tier, chosen) if comparison.axis != "zero" else ""
    return f"{_named(comparison.axis, comparison.value)}{where}: {near}"


def _span_of_axis(tier: str, chosen: Estimate) -> str:
    """Whether an axis stays within the innermost domain or crosses it."""
    inner = chosen.setting.machine.tiers[0]
    if not tier:
        return ""
    if tier != inner.name:
        return f" over {tier}"
    return f" within {tier}" + (f" ({inner.size} GPUs)" if inner.size else "")


def _named(axis: str, value: int | str) -> str:
    if axis == "zero":
        return f"ZeRO-{value}"
    if axis == "pp" and value == 1:
        return "no pipeline"
    return f"{axis} {value}" if axis in ("recompute", "microbatch") else f"{axis}={value}"


def _neighbour(neighbour: Neighbour, tier: str, chosen: Estimate, fastest: float) -> str:
    name = _named(neighbour.axis, neighbour.value)
    if neighbour.layout is None:
        return f"{name} cannot be ({neighbour.refused})"
    moves = neighbour.tier != tier and neighbour.value != 1
    over = _span_of_axis(neighbour.tier, chosen) if moves else ""
    suffix = _chosen_again(neighbour, chosen)
    if neighbour.over > 0:
        limit = chosen.setting.machine.memory - chosen.setting.capacity
        amount = f"takes {gib(neighbour.over)} too much" if neighbour.over > limit else "is tight"
        return f"{name}{over} {amount}{_growth(neighbour)}{suffix}"
    text = _slower(neighbour.seconds, chosen, fastest)
    return f"{name}{over} is {text}{_where(neighbour.parts or {}, chosen.step)}{suffix}"


def _chosen_again(neighbour: Neighbour, chosen: Estimate) -> str:
    """What else differs from the chosen plan, because it was chosen again for the changed value."""
    plan, layout = chosen.plan, neighbour.layout
    assert layout is not None
    parts = [str(layout)] if neighbour.axis in ("tp", "cp", "pp", "ep") else []
    if layout.pp > 1 and plan.layout.pp > 1 and neighbour.schedule != plan.options.schedule:
        parts.append(neighbour.schedule)
    if parts or layout.zero != plan.layout.zero:
        parts += [f"ZeRO-{layout.zero}"] if neighbour.axis != "zero" else []
    if parts or neighbour.recompute != str(plan.recompute.usual):
        parts += [f"recompute {neighbour.recompute}"] if neighbour.axis != "recompute" else []
    if neighbour.axis != "microbatch" and neighbour.microbatch_size != plan.batch.microbatch_size:
        parts.append(f"microbatch {neighbour.microbatch_size}")
    return f" ({', '.join(parts)})" if parts else ""


def _slower(seconds: float, chosen: Estimate, fastest: float) -> str:
    """How a step that takes so much longer than the chosen one compares with it."""
    if abs(seconds) < 5e-5:
        return "as fast"
    step = chosen.step + seconds
    least, bar = min(fastest, step, chosen.step), chosen.accuracy
    alike = bar.within(step, least) and bar.within(chosen.step, least)
    text = f"{duration(abs(seconds))} {'slower' if seconds > 0 else 'faster'}"
    return f"equal, {text}" if alike else text


def _growth(neighbour: Neighbour) -> str:
    """The memory category that grows most."""
    grown = max((neighbour.memory or {}).items(), key=lambda pair: pair[1], default=("", 0.0))
    return f", {grown[0]} +{gib(grown[1])}" if grown[1] > 2**28 else ""


def _where(parts: Mapping[str, float], step: float) -> str:
    """The three parts of a step that change most, the largest change first."""
    joined = {name: seconds for name, seconds in parts.items() if name not in COMPUTE}
    joined["compute"] = sum(parts.get(name, 0.0) for name in COMPUTE)
    largest = sorted(
        ((seconds, name) for name, seconds in joined.items() if abs(seconds) > _SMALL * step),
        key=lambda pair: -abs(pair[0]),
    )[:3]
    texts = [
        f"{_NAMES[name]} {'+' if seconds > 0 else '−'}{duration(abs(seconds))}"
        for seconds, name in largest
    ]
    return f": {', '.join(texts)}" if texts else ""


# --- Tables and bars

_HEADS = (
    "", "layout", "ZeRO", "schedule", "batch", "recompute", "GiB", "step", "tokens/s/GPU", "MFU",
    "bubble",
)  # fmt: skip
_LEFT = (1, 3, 5)  # columns of text


def ranked(estimates: Sequence[Estimate], fastest: float) -> list[str]:
    """One line per layout, the first choice first; those equal to the fastest have a mark."""
    off = estimates[0].accuracy
    heads, rows, left = ranking(estimates, fastest)
    return [
        *table([heads, *rows], left=left),
        f"= equal: within {off.equal:.1%} of the fastest, as far as estimates can tell; the "
        "simplest of these is first",
        f"half of all measured steps are within {off.time:.0%} of their estimate, nine in ten "
        f"within {off.time_p90:.0%}; peak memory is {off.memory:.0%} off on average",
    ]


def ranking(
    estimates: Sequence[Estimate], fastest: float
) -> tuple[Sequence[str], list[tuple[str, ...]], Sequence[int]]:
    """The same as cells: heads, rows, and the columns of text."""
    rows = [
        _row(f"{i}{' =' if plan.accuracy.within(plan.step, fastest) else ''}", plan)
        for i, plan in enumerate(estimates, start=1)
    ]
    return _HEADS, rows, (0, *_LEFT)


def _row(label: str, estimate: Estimate) -> tuple[str, ...]:
    plan, layout = estimate.plan, estimate.plan.layout
    parts = [str(layout), *([layout.context] if layout.cp > 1 else [])]
    schedule = f"{plan.options.schedule}({layout.chunks})" if layout.pp > 1 else "–"
    return (
        label,
        " ".join([*parts, *offload_words(estimate)]),
        str(layout.zero),
        schedule,
        f"{plan.batch.microbatch_size} × {plan.batch.microbatches}",
        str(plan.recompute),
        f"{estimate.total / 2**30:,.1f}",
        duration(estimate.step),
        f"{estimate.tokens_per_s_per_gpu:,.0f}",
        f"{estimate.mfu:.1%}",
        f"{estimate.bubble:.1%}",
    )


def detail(estimate: Estimate) -> list[str]:
    """Memory by category as shares of the limit, and the step by what it is spent on."""
    limit = estimate.setting.machine.memory
    lines = [
        f"memory    {gib(estimate.total)} of {gib(limit)} on the fullest rank: "
        f"{estimate.verdict}"
        + (f"; {gib(estimate.host)} in host memory" if estimate.host else "")
        + (f", {gib(estimate.disk)} on its share of local disks" if estimate.disk else ""),
    ]
    parts = {name: size for name, size in estimate.memory.items() if size > 0}
    lines += [bar(name, gib(size), size / limit) for name, size in parts.items()]
    if estimate.total < limit:
        lines.append(bar("free", gib(limit - estimate.total), 1 - estimate.total / limit, "·"))
    lines.append(
        f"step      {step_text(estimate)}: "
        f"{estimate.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, "
        f"MFU {estimate.mfu:.1%} of the {estimate.setting.precision} peak "
        "(causal attention at half, recompute not counted)"
        + (f", HFU {estimate.hfu:.1%} with recompute" if estimate.hfu > estimate.mfu else "")
    )
    parts = estimate.breakdown()
    return [
        *lines,
        *(bar(name, duration(time), time / estimate.step) for name, time in parts.items()),
    ]


class RunCosts(NamedTuple):
    """What is asked of a whole training run: its tokens, the price of a GPU-hour, and the hours
    between two failures of a GPU; None where it is not asked for."""

    tokens: float | None = None
    price: float | None = None
    mtbf_gpu: float | None = None

    def failing(self, estimate: Estimate) -> FailingJob | None:
        """The run with failures; None if no rate is known."""
        from fivefold.planner import usual_failures

        return usual_failures(estimate, self.mtbf_gpu)


def bill(estimate: Estimate, costs: RunCosts) -> list[str]:
    """Days, GPU-hours and price of a training run, and the days with failures beside them."""
    tokens, price = costs.tokens, costs.price
    if tokens is None:
        return []
    hours, days = estimate.gpu_hours(tokens), estimate.days(tokens)
    text = f"run       {tokens:.3g} tokens: {days:,.1f} days, {hours:,.0f} GPU-hours"
    text += f", {hours * price:,.0f} at {price:g} a GPU-hour" if price else ""
    failing = costs.failing(estimate)
    if failing is None:
        name = estimate.setting.machine.name
        failure_text = f"days with failures: no rate is known for {name}; add --set mtbf_gpu=HOURS"
    elif failing.expected <= 0:
        failure_text = "with failures it never ends: they come faster than a recovery"
    else:
        failure_text = (
            f"{days / failing.expected:,.1f} days with failures: goodput {failing.expected:.1%}, "
            f"one failure in {rough_duration(1 / failing.rate)}, "
            f"{rough_duration(failing.recovery)} to recover"
        )
    return [text, f"          {failure_text}"]


def labelled(head: str, sentences: Sequence[str]) -> list[str]:
    """Lines with a label before the first one."""
    return [f"{head if i == 0 else '':<10}{sentence}" for i, sentence in enumerate(sentences)]


def front(estimates: Sequence[Estimate]) -> list[str]:
    """Other plans: less memory for more time."""
    if len(estimates) < 2:
        return []
    lines = [
        f"{gib(estimate.total)} and {duration(estimate.step)}: {name_of(estimate)}"
        for estimate in sorted(estimates, key=lambda candidate: candidate.total)
    ]
    return labelled("front", lines)


Printed = tuple[dict[str, Any], list[str]]


def resolved_answer(plan: Plan) -> Printed:
    """A plan without a machine, of which there are no estimates."""
    table = describe_plan(plan)
    return table, plan_lines(plan, table)


def given_answer(
    plan: Plan, estimate: Estimate, why: Sequence[str], seconds: float, costs: RunCosts
) -> Printed:
    """A plan with a given layout, and its estimates."""
    table, lines = resolved_answer(plan)
    reasons = list(why)
    table |= {"stack": estimate.setting.stack.name}
    table |= {"candidates": 1, "seconds": seconds}
    table |= {"layouts": [estimate_json(estimate, reasons)]}
    table |= run_costs(estimate, costs)
    table |= {"notes": list(estimate.plan.notes)}
    extra_notes = (note for note in estimate.plan.notes if note not in plan.notes)
    return table, [
        *lines,
        *_detail(estimate, reasons, costs),
        *(f"note      {sentence}" for sentence in extra_notes),
    ]


def _detail(estimate: Estimate, why: list[str], costs: RunCosts) -> list[str]:
    return [
        *detail(estimate),
        *bill(estimate, costs),
        *labelled("why", why),
    ]


def first_reasons(result: PlanResult) -> list[str]:
    """Why the first choice of a search is the first."""
    from fivefold.planner import compare_neighbours

    first = result.plans[0]
    return reasons_text(first, compare_neighbours(first), result.rival, result.simpler)


def ranked_answer(result: PlanResult, costs: RunCosts, why: Sequence[str] | None = None) -> Printed:
    """A table of the best layouts, and details of the first; `why` if its reasons are known."""
    first, *rivals = result.plans
    fastest = result.fastest.step
    why = first_reasons(result) if why is None else list(why)
    reasons = [why, *([loses(rival, first, fastest)] for rival in rivals)]
    question, notes = result.request.space, [*search_notes(result), *first.plan.notes]
    table = {
        "model": result.request.shape.name,
        "machine": result.request.setting.machine.name,
        "precision": result.request.setting.precision,
        "stack": result.request.setting.stack.name,
        "gpus": question.gpus,
        "seq": question.seq,
        "batch": question.batch,
        "candidates": result.candidates,
        "passed_over": result.passed_over,
        "seconds": result.seconds,
        "equal_bar": first.accuracy.equal,
        "fastest": estimate_json(result.fastest, []),
        "layouts": [
            estimate_json(estimate, reason)
            | {"equal": estimate.accuracy.within(estimate.step, fastest)}
            for estimate, reason in zip(result.plans, reasons, strict=True)
        ],
        "front": [estimate_json(estimate, []) for estimate in result.front],
        "notes": notes,
        **run_costs(first, costs),
    }
    lines = [
        *headline(result),
        "",
        *ranked(result.plans, fastest),
        "",
        f"first     {first.plan.batch}",
        *_detail(first, why, costs),
        *front(result.front),
        *(f"note      {note}" for note in notes),
    ]
    return table, lines


def headline(result: PlanResult) -> list[str]:
    """What was searched, and how much of it."""
    request, question = result.request, result.request.space
    return [
        f"{request.shape.name} on {question.gpus_text} of {request.setting.machine.name}: "
        f"{counted(question.batch, 'sequence')} of {question.seq:,} tokens a step, "
        f"{request.setting.precision}",
        f"{counted(result.candidates, 'layout')} estimated and {result.passed_over:,} skipped in "
        f"{result.seconds:.1f} s; those below were simulated",
    ]


def search_notes(result: PlanResult) -> list[str]:
    """What whoever reads the ranking should know."""
    first, notes = result.plans[0], [*result.request.notes, *result.warnings]
    if first.offload != "none":
        where = {"cpu": "in host memory", "nvme": "on local disks"}[first.offload]
        notes.append(
            f"optimizer states are {where} (offload = {first.plan.options.train.offload}); the "
            "transfer is counted, the time of the host is assumed"
        )
    return notes
