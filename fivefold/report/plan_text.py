"""Estimates of plans as text: the reasons for a layout, the ranked table, bars, and the cost of a
run. Every number in a reason was computed for a neighbour, for the fastest or for the next best
plan. Steps that differ by less than estimates can tell are called equal, in tables and reasons
alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fivefold.cost.step import COMPUTE
from fivefold.report import bar, duration, gib, rough_duration, table

if TYPE_CHECKING:
    from fivefold.planner import AxisComparison, Estimate, FailingJob, Neighbour


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
        _row(f"{i + 1}{_mark(estimate, fastest)}", estimate) for i, estimate in enumerate(estimates)
    ]
    return _HEADS, rows, (0, *_LEFT)


def _mark(estimate: Estimate, fastest: float) -> str:
    return " =" if estimate.accuracy.within(estimate.step, fastest) else ""


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


def verdict_text(estimate: Estimate) -> str:
    """Whether a plan fits, with what NCCL holds beside its memory."""
    if not estimate.nccl:
        return estimate.verdict
    beside = f"without NCCL's memory, about {gib(estimate.nccl)}"
    if estimate.verdict == "tight" and estimate.over <= 0:
        beside += f"; with it above the usable {gib(estimate.setting.capacity)}"
    return f"{estimate.verdict} ({beside})"


def detail(estimate: Estimate) -> list[str]:
    """Memory by category as shares of the limit, and the step by what it is spent on."""
    limit = estimate.setting.machine.memory
    lines = [
        f"memory    {gib(estimate.total)} of {gib(limit)} on the fullest rank: "
        f"{verdict_text(estimate)}"
        + (f"; {gib(estimate.host)} in host memory" if estimate.host else "")
        + (f", {gib(estimate.disk)} on its share of local disks" if estimate.disk else ""),
    ]
    parts = {name: size for name, size in estimate.memory.items() if size > 0}
    lines += [bar(name, gib(size), size / limit) for name, size in parts.items()]
    if estimate.total < limit:
        lines.append(bar("free", gib(limit - estimate.total), 1 - estimate.total / limit, "·"))
    lines.append(
        f"step      {duration(estimate.step)} ± {estimate.accuracy.time:.0%}: "
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
