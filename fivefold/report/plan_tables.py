"""Strategies side by side, curves, and before against after, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fivefold.report.amounts import duration, gib
from fivefold.report.lines import table
from fivefold.report.plan_json import entry
from fivefold.report.plan_words import loses, name_of

if TYPE_CHECKING:
    from fivefold.core.estimate.outlook import Outlook
    from fivefold.core.estimate.strategies import Moved, Strategy
    from fivefold.core.estimate.sweep import Point

_MARKS = "▁▂▃▄▅▆▇█"


def compared(found: Sequence[Strategy]) -> list[str]:
    """Each dimension alone: batch, memory, time, traffic and what speaks against it."""
    heads = ("", "layout", "least batch", "weights", "grads", "states", "rest", "total GiB")
    rows = [(*heads, "compute", "step", "tokens/s/GPU")]
    rows += [_strategy_row(one) for one in found]
    lines = table(rows, left=(0, 1))
    for one in found:
        lines += ["", f"{one.name}: {drawback(one)}"]
        lines += [f"  {_moved(each)}" for each in one.moved[:4]]
    return lines


def _strategy_row(one: Strategy) -> tuple[str, ...]:
    batch = f"{one.least_batch:,}"
    if one.outlook is None:
        return (one.name, str(one.layout), batch, *("–",) * 8)
    memory, look = one.outlook.memory, one.outlook
    held = (memory["weights"], memory["gradients"], memory["master"] + memory["optimizer"])
    sizes = (*held, look.total - sum(held), look.total)
    return (
        one.name,
        str(one.layout),
        batch,
        *(f"{size / 2**30:,.1f}" for size in sizes),
        duration(look.breakdown()["compute"]),
        duration(look.step),
        f"{look.tokens_per_s_per_gpu:,.0f}",
    )


def drawback(one: Strategy) -> str:
    """What speaks most against a strategy, from its own numbers."""
    if one.outlook is None:
        return one.refused
    look = one.outlook
    if look.over > 0:
        name, size = max(look.memory.items(), key=lambda pair: pair[1])
        return f"does not fit: {gib(look.over)} too much, most of it {name} ({gib(size)})"
    waste = {k: v for k, v in look.breakdown().items() if k != "compute"}
    name, seconds = max(waste.items(), key=lambda pair: pair[1])
    what = name if name in ("bubble", "optimizer", "launch", "fixed") else f"{name} traffic"
    return f"{what} takes {duration(seconds)} of a step, {seconds / look.step:.0%}"


def _moved(one: Moved) -> str:
    calls = f"{one.calls:,} {'call' if one.calls == 1 else 'calls'}"
    return f"{one.axis} {one.kind}: {calls} with {gib(one.bytes)} a step on one rank"


def compared_json(found: Sequence[Strategy]) -> list[dict[str, Any]]:
    """The same as JSON."""
    return [
        {
            "strategy": one.name,
            "layout": str(one.layout),
            "least_batch": one.least_batch,
            "collectives": [each._asdict() for each in one.moved],
            "drawback": drawback(one),
            "estimate": None if one.outlook is None else entry(one.outlook, []),
        }
        for one in found
    ]


def curves(axis: str, values: Sequence[int], found: Sequence[Point]) -> list[str]:
    """A line for each strategy and recomputation: speed, and memory in GiB where it does not fit
    with a cross."""
    rows: list[tuple[str, ...]] = [("strategy", "recompute", *map(_short, values), "")]
    memory = [rows[0]]
    most = max((_speed(one) for one in found), default=0.0)
    for key in dict.fromkeys((one.strategy, one.recompute) for one in found):
        line = [one for one in found if (one.strategy, one.recompute) == key]
        speeds = [_speed(one) for one in line]
        spark = "".join(_mark(speed / most if most else 0.0) for speed in speeds)
        rows.append((*key, *(f"{speed:,.0f}" if speed else "×" for speed in speeds), spark))
        memory.append((*key, *(_memory(one) for one in line), ""))
    return [
        f"tokens/s/GPU along {axis} (×: does not fit)",
        *table(rows, left=(0, 1)),
        "",
        f"GiB of the fullest rank along {axis} (×: does not fit)",
        *table(memory, left=(0, 1)),
    ]


def _speed(one: Point) -> float:
    return one.outlook.tokens_per_s_per_gpu if one.outlook is not None and one.fits else 0.0


def _memory(one: Point) -> str:
    if one.outlook is None:
        return "–"
    return f"{one.outlook.total / 2**30:,.1f}{'' if one.fits else ' ×'}"


def _mark(share: float) -> str:
    return _MARKS[min(len(_MARKS) - 1, round(share * (len(_MARKS) - 1)))] if share else " "


def _short(number: int) -> str:
    for unit, size in (("m", 1 << 20), ("k", 1 << 10)):
        if number >= size and number % size == 0:
            return f"{number // size}{unit}"
    return f"{number:,}"


def curves_json(axis: str, found: Sequence[Point]) -> list[dict[str, Any]]:
    """The same as JSON."""
    return [
        {
            axis: one.value,
            "strategy": one.strategy,
            "recompute": one.recompute,
            "fits": one.fits,
            "estimate": None if one.outlook is None else entry(one.outlook, []),
        }
        for one in found
    ]


def before_after(before: Outlook, after: Outlook, words: str) -> list[str]:
    """One plan against another of a changed job."""
    rows = [("", "plan", "GPUs", "GiB", "step", "tokens/s", "tokens/s/GPU", "MFU")]
    for name, one in (("now", before), (words, after)):
        world = one.plan.layout.world
        row = (name, name_of(one), f"{world:,}", f"{one.total / 2**30:,.1f}", duration(one.step))
        speed = one.tokens_per_s_per_gpu
        rows.append((*row, f"{speed * world:,.0f}", f"{speed:,.0f}", f"{one.mfu:.1%}"))
    return [*table(rows, left=(0, 1)), f"a step is {loses(after, before)}"]
