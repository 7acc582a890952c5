"""Why a layout, in sentences: every number in them was computed for a neighbour or a rival."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fivefold.report.amounts import duration, gib

if TYPE_CHECKING:
    from fivefold.core.estimate.outlook import Outlook
    from fivefold.core.estimate.why import Neighbour, Takeaway

_COMPUTE = ("products", "attention", "experts", "elementwise", "head")
_NAMES = {
    "tp": "tp traffic",
    "cp": "cp traffic",
    "ep": "ep traffic",
    "pp": "pp messages",
    "dp": "dp traffic",
    "bubble": "bubble",
    "launch": "launches",
    "optimizer": "optimizer",
    "offload": "host link",
    "fixed": "fixed",
    "compute": "compute",
}
_SMALL = 5e-3  # of a step: a part that changes by less is not told


def because(chosen: Outlook, takeaways: list[Takeaway], rival: Outlook | None) -> list[str]:
    """Why this layout: what the next best loses, and what each axis's neighbours say."""
    found = [] if rival is None else [f"the next best, {name_of(rival)}: {loses(rival, chosen)}"]
    return [*found, *(takeaway(each, chosen) for each in takeaways if each.neighbours)]


def name_of(one: Outlook) -> str:
    """A plan in one line."""
    plan = one.plan
    words = [str(plan.layout), f"ZeRO-{plan.layout.zero}"]
    if plan.layout.cp > 1:
        words.append(plan.layout.context)
    if plan.layout.pp > 1:
        words.append(f"{plan.wishes.schedule}({plan.layout.chunks})")
    words += [f"recompute {plan.recompute}"] if plan.recompute.kind != "none" else []
    return ", ".join([*words, *offloaded(one)])


def offloaded(one: Outlook) -> list[str]:
    """Where states lie that are not on the device."""
    return [] if one.offload == "none" else [f"offload {one.offload}"]


def loses(one: Outlook, best: Outlook) -> str:
    """What a plan takes longer than another, and where."""
    seconds = one.step - best.step
    parts = {
        name: one.parts.get(name, 0.0) - best.parts.get(name, 0.0)
        for name in {**best.parts, **one.parts}
    }
    return f"{_slower(seconds)}{_where(parts, best.step)}"


def takeaway(found: Takeaway, chosen: Outlook) -> str:
    """One axis: what it is, and what its neighbours would be."""
    near = "; ".join(_neighbour(one, found.tier, chosen) for one in found.neighbours)
    where = _place(found.tier, chosen) if found.axis != "zero" else ""
    return f"{_named(found.axis, found.value)}{where}: {near}"


def _place(tier: str, chosen: Outlook) -> str:
    """Where an axis lies: inside the innermost domain, or across it."""
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


def _neighbour(one: Neighbour, tier: str, chosen: Outlook) -> str:
    name = _named(one.axis, one.value)
    if one.layout is None:
        return f"{name} cannot be ({one.refused})"
    moves = one.tier != tier and one.value != 1
    over = _place(one.tier, chosen) if moves else ""
    how = f" ({one.layout}, ZeRO-{one.layout.zero}, recompute {one.recompute})"
    how = how if one.axis in ("tp", "cp", "pp", "ep") else ""
    if one.over > 0:
        return f"{name}{over} takes {gib(one.over)} too much{_swells(one)}{how}"
    return f"{name}{over} is {_slower(one.seconds)}{_where(one.parts or {}, chosen.step)}{how}"


def _slower(seconds: float) -> str:
    if abs(seconds) < 5e-5:
        return "as fast"
    return f"{duration(abs(seconds))} {'slower' if seconds > 0 else 'faster'}"


def _swells(one: Neighbour) -> str:
    """The category that grows most."""
    grown = max((one.memory or {}).items(), key=lambda pair: pair[1], default=("", 0.0))
    return f", {grown[0]} +{gib(grown[1])}" if grown[1] > 2**28 else ""


def _where(parts: Mapping[str, float], step: float) -> str:
    """The parts that change most, in the order of their change; what is lost comes first."""
    joined = {name: seconds for name, seconds in parts.items() if name not in _COMPUTE}
    joined["compute"] = sum(parts.get(name, 0.0) for name in _COMPUTE)
    told = sorted(
        ((seconds, name) for name, seconds in joined.items() if abs(seconds) > _SMALL * step),
        key=lambda pair: -abs(pair[0]),
    )[:3]
    if not told:
        return ""
    words = [
        f"{_NAMES[name]} {'+' if seconds > 0 else '−'}{duration(abs(seconds))}"
        for seconds, name in told
    ]
    return f": {', '.join(words)}"
