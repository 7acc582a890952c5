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
    found: list[str] = []
    if rival is not None and rival.step < chosen.step:
        found = [f"equal to the fastest and simpler, {simpler}: {name_of(rival)} is "]
    elif rival is not None:
        found = [f"the next best, {name_of(rival)}: "]
    found = [each + loses(rival, chosen, fastest) for each in found if rival is not None]
    return [*found, *(axis_text(each, chosen, fastest) for each in takeaways if each.neighbours)]


def name_of(one: Estimate) -> str:
    """A plan in one line."""
    plan = one.plan
    words = [str(plan.layout), f"ZeRO-{plan.layout.zero}"]
    if plan.layout.cp > 1:
        words.append(plan.layout.context)
    if plan.layout.pp > 1:
        words.append(f"{plan.options.schedule}({plan.layout.chunks})")
    words += [f"recompute {plan.recompute}"] if str(plan.recompute) != "none" else []
    return ", ".join([*words, *offload_words(one)])


def offload_words(one: Estimate) -> list[str]:
    """Where optimizer states are, if not on the device."""
    return [] if one.offload == "none" else [f"offload {one.offload}"]


def loses(one: Estimate, best: Estimate, fastest: float | None = None) -> str:
    """How much slower one plan is than another, and in which parts; `equal` if estimates cannot
    tell them apart, or either from the fastest."""
    parts = {
        name: one.parts.get(name, 0.0) - best.parts.get(name, 0.0)
        for name in {**best.parts, **one.parts}
    }
    words = _slower(one.step - best.step, best, best.step if fastest is None else fastest)
    return f"{words}{_where(parts, best.step)}"


def axis_text(found: AxisComparison, chosen: Estimate, fastest: float) -> str:
    """One axis: its degree, and its neighbours."""
    near = "; ".join(_neighbour(one, found.tier, chosen, fastest) for one in found.neighbours)
    where = _span_of_axis(found.tier, chosen) if found.axis != "zero" else ""
    return f"{_named(found.axis, found.value)}{where}: {near}"


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


def _neighbour(one: Neighbour, tier: str, chosen: Estimate, fastest: float) -> str:
    name = _named(one.axis, one.value)
    if one.layout is None:
        return f"{name} cannot be ({one.refused})"
    moves = one.tier != tier and one.value != 1
    over = _span_of_axis(one.tier, chosen) if moves else ""
    how = _chosen_again(one, chosen)
    if one.over > 0:
        limit = chosen.setting.machine.memory - chosen.setting.capacity
        amount = f"takes {gib(one.over)} too much" if one.over > limit else "is tight"
        return f"{name}{over} {amount}{_growth(one)}{how}"
    words = _slower(one.seconds, chosen, fastest)
    return f"{name}{over} is {words}{_where(one.parts or {}, chosen.step)}{how}"


def _chosen_again(one: Neighbour, chosen: Estimate) -> str:
    """What else differs from the chosen plan, because it was chosen again for the changed value."""
    plan, layout = chosen.plan, one.layout
    assert layout is not None
    words = [str(layout)] if one.axis in ("tp", "cp", "pp", "ep") else []
    if layout.pp > 1 and plan.layout.pp > 1 and one.schedule != plan.options.schedule:
        words.append(one.schedule)
    if words or layout.zero != plan.layout.zero:
        words += [f"ZeRO-{layout.zero}"] if one.axis != "zero" else []
    if words or one.recompute != str(plan.recompute.usual):
        words += [f"recompute {one.recompute}"] if one.axis != "recompute" else []
    if one.axis != "microbatch" and one.microbatch_size != plan.batch.microbatch_size:
        words.append(f"microbatch {one.microbatch_size}")
    return f" ({', '.join(words)})" if words else ""


def _slower(seconds: float, chosen: Estimate, fastest: float) -> str:
    """How a step that takes so much longer than the chosen one compares with it."""
    if abs(seconds) < 5e-5:
        return "as fast"
    step = chosen.step + seconds
    least, bar = min(fastest, step, chosen.step), chosen.accuracy
    alike = bar.within(step, least) and bar.within(chosen.step, least)
    words = f"{duration(abs(seconds))} {'slower' if seconds > 0 else 'faster'}"
    return f"equal, {words}" if alike else words


def _growth(one: Neighbour) -> str:
    """The memory category that grows most."""
    grown = max((one.memory or {}).items(), key=lambda pair: pair[1], default=("", 0.0))
    return f", {grown[0]} +{gib(grown[1])}" if grown[1] > 2**28 else ""


def _where(parts: Mapping[str, float], step: float) -> str:
    """The three parts of a step that change most, the largest change first."""
    joined = {name: seconds for name, seconds in parts.items() if name not in COMPUTE}
    joined["compute"] = sum(parts.get(name, 0.0) for name in COMPUTE)
    largest = sorted(
        ((seconds, name) for name, seconds in joined.items() if abs(seconds) > _SMALL * step),
        key=lambda pair: -abs(pair[0]),
    )[:3]
    words = [
        f"{_NAMES[name]} {'+' if seconds > 0 else '−'}{duration(abs(seconds))}"
        for seconds, name in largest
    ]
    return f": {', '.join(words)}" if words else ""


# --- Tables and bars

_HEADS = (
    "", "layout", "ZeRO", "schedule", "batch", "recompute", "GiB", "step", "tokens/s/GPU", "MFU",
    "bubble",
)  # fmt: skip
_LEFT = (1, 3, 5)  # columns of text


def ranked(found: Sequence[Estimate], fastest: float) -> list[str]:
    """One line per layout, the first choice first; those equal to the fastest have a mark."""
    off = found[0].accuracy
    heads, rows, left = ranking(found, fastest)
    return [
        *table([heads, *rows], left=left),
        f"= equal: within {off.equal:.1%} of the fastest, as far as estimates can tell; the "
        "simplest of these is first",
        f"half of all measured steps are within {off.time:.0%} of their estimate, nine in ten "
        f"within {off.time_p90:.0%}; peak memory is {off.memory:.0%} off on average",
    ]


def ranking(
    found: Sequence[Estimate], fastest: float
) -> tuple[Sequence[str], list[tuple[str, ...]], Sequence[int]]:
    """The same as cells: heads, rows, and the columns of text."""
    rows = [_row(f"{i + 1}{_mark(one, fastest)}", one) for i, one in enumerate(found)]
    return _HEADS, rows, (0, *_LEFT)


def _mark(one: Estimate, fastest: float) -> str:
    return " =" if one.accuracy.within(one.step, fastest) else ""


def _row(place: str, one: Estimate) -> tuple[str, ...]:
    plan, layout = one.plan, one.plan.layout
    words = [str(layout), *([layout.context] if layout.cp > 1 else [])]
    schedule = f"{plan.options.schedule}({layout.chunks})" if layout.pp > 1 else "–"
    return (
        place,
        " ".join([*words, *offload_words(one)]),
        str(layout.zero),
        schedule,
        f"{plan.batch.microbatch_size} × {plan.batch.microbatches}",
        str(plan.recompute),
        f"{one.total / 2**30:,.1f}",
        duration(one.step),
        f"{one.tokens_per_s_per_gpu:,.0f}",
        f"{one.mfu:.1%}",
        f"{one.bubble:.1%}",
    )


def verdict_text(one: Estimate) -> str:
    """Whether a plan fits, with what NCCL holds beside its memory."""
    if not one.nccl:
        return one.verdict
    beside = f"without NCCL's memory, about {gib(one.nccl)}"
    if one.verdict == "tight" and one.over <= 0:
        beside += f"; with it above the usable {gib(one.setting.capacity)}"
    return f"{one.verdict} ({beside})"


def detail(one: Estimate) -> list[str]:
    """Memory by category as shares of the limit, and the step by what it is spent on."""
    limit = one.setting.machine.memory
    lines = [
        f"memory    {gib(one.total)} of {gib(limit)} on the fullest rank: {verdict_text(one)}"
        + (f"; {gib(one.host)} in host memory" if one.host else "")
        + (f", {gib(one.disk)} on its share of local disks" if one.disk else ""),
    ]
    parts = {name: size for name, size in one.memory.items() if size > 0}
    lines += [bar(name, gib(size), size / limit) for name, size in parts.items()]
    if one.total < limit:
        lines.append(bar("free", gib(limit - one.total), 1 - one.total / limit, "·"))
    lines.append(
        f"step      {duration(one.step)} ± {one.accuracy.time:.0%}: "
        f"{one.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, "
        f"MFU {one.mfu:.1%} of the {one.setting.precision} peak "
        "(causal attention at half, recompute not counted)"
        + (f", HFU {one.hfu:.1%} with recompute" if one.hfu > one.mfu else "")
    )
    parts = one.breakdown()
    return [*lines, *(bar(name, duration(time), time / one.step) for name, time in parts.items())]


class RunCosts(NamedTuple):
    """What is asked of a whole training run: its tokens, the price of a GPU-hour, and the hours
    between two failures of a GPU; None where it is not asked for."""

    tokens: float | None = None
    price: float | None = None
    mtbf_gpu: float | None = None

    def failing(self, one: Estimate) -> FailingJob | None:
        """The run with failures; None if no rate is known."""
        from fivefold.planner import usual_failures

        return usual_failures(one, self.mtbf_gpu)


def bill(one: Estimate, costs: RunCosts) -> list[str]:
    """Days, GPU-hours and price of a training run, and the days with failures beside them."""
    tokens, price = costs.tokens, costs.price
    if tokens is None:
        return []
    hours, days = one.gpu_hours(tokens), one.days(tokens)
    words = f"run       {tokens:.3g} tokens: {days:,.1f} days, {hours:,.0f} GPU-hours"
    words += f", {hours * price:,.0f} at {price:g} a GPU-hour" if price else ""
    failing = costs.failing(one)
    if failing is None:
        name = one.setting.machine.name
        more = f"days with failures: no rate is known for {name}; give --mtbf-gpu HOURS"
    elif failing.expected <= 0:
        more = "with failures it never ends: they come faster than a recovery"
    else:
        more = (
            f"{days / failing.expected:,.1f} days with failures: goodput {failing.expected:.1%}, "
            f"one failure in {rough_duration(1 / failing.rate)}, "
            f"{rough_duration(failing.recovery)} to recover"
        )
    return [words, f"          {more}"]


def labelled(head: str, sentences: Sequence[str]) -> list[str]:
    """Lines with a label before the first one."""
    return [f"{head if i == 0 else '':<10}{one}" for i, one in enumerate(sentences)]


def front(found: Sequence[Estimate]) -> list[str]:
    """Other plans: less memory for more time."""
    if len(found) < 2:
        return []
    lines = [
        f"{gib(one.total)} and {duration(one.step)}: {name_of(one)}"
        for one in sorted(found, key=lambda one: one.total)
    ]
    return labelled("front", lines)
