"""Estimates of plans for people: the ranked table, bars of memory and time, and the bill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fivefold.report.amounts import duration, gib
from fivefold.report.lines import bar, table
from fivefold.report.plan_words import name_of, offloaded

if TYPE_CHECKING:
    from fivefold.core.estimate.outlook import Outlook

_HEADS = (
    "", "layout", "ZeRO", "schedule", "batch", "recompute", "GiB", "step", "tokens/s/GPU", "MFU",
    "bubble",
)  # fmt: skip
_LEFT = (1, 3, 5)  # columns of words


def ranked(found: Sequence[Outlook]) -> list[str]:
    """One line a layout, the fastest first."""
    return table([_HEADS, *(_row(i + 1, one) for i, one in enumerate(found))], left=_LEFT)


def _row(place: int, one: Outlook) -> tuple[str, ...]:
    plan, layout = one.plan, one.plan.layout
    words = [str(layout), *([layout.context] if layout.cp > 1 else [])]
    schedule = f"{plan.wishes.schedule}({layout.chunks})" if layout.pp > 1 else "–"
    return (
        str(place),
        " ".join([*words, *offloaded(one)]),
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


def detail(one: Outlook) -> list[str]:
    """Memory by category against the limit, and the step by what it is spent on."""
    limit = one.setting.machine.memory
    lines = [
        f"memory    {gib(one.total)} of {gib(limit)} on the fullest rank: {one.verdict}"
        + (f"; {gib(one.host)} in host memory" if one.host else "")
        + (f", {gib(one.disk)} on its share of local disks" if one.disk else ""),
    ]
    parts = {name: size for name, size in one.memory.items() if size > 0}
    lines += [bar(name, gib(size), size / limit) for name, size in parts.items()]
    if one.total < limit:
        lines.append(bar("free", gib(limit - one.total), 1 - one.total / limit, "·"))
    lines.append(
        f"step      {duration(one.step)}: {one.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, "
        f"MFU {one.mfu:.1%} of the {one.setting.precision} peak "
        "(causal attention at half, recompute not counted)"
    )
    for name, seconds in one.breakdown().items():
        lines.append(bar(name, duration(seconds), seconds / one.step))
    return lines


def bill(one: Outlook, tokens: float | None, price: float | None) -> list[str]:
    """Days, GPU-hours and money of a whole run."""
    if tokens is None:
        return []
    hours = one.gpu_hours(tokens)
    words = f"run       {tokens:.3g} tokens: {one.days(tokens):,.1f} days, {hours:,.0f} GPU-hours"
    return [words + (f", {hours * price:,.0f} at {price:g} a GPU-hour" if price else "")]


def said(head: str, sentences: Sequence[str]) -> list[str]:
    """Sentences under a word in the margin."""
    return [f"{head if i == 0 else '':<10}{one}" for i, one in enumerate(sentences)]


def front(found: Sequence[Outlook]) -> list[str]:
    """Less memory for more time: what else could be had."""
    if len(found) < 2:
        return []
    lines = [
        f"{gib(one.total)} and {duration(one.step)}: {name_of(one)}"
        for one in sorted(found, key=lambda one: one.total)
    ]
    return said("front", lines)
