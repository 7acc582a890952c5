"""What rank 0 sends in a step: every collective that the runtime will issue, summed up.

    {"headline", "refused": why there is none, or None,
     "rows": [{"dimension", "axis", "kind", "calls", "bytes", "sent", "group", "tier"}]}

`bytes` are those of the calls' input buffers, as records of a run have them; `sent` is what goes
over the rank's links where rings carry it. The tier is the slowest link that any group of the axis
crosses.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fivefold.core import groups
from fivefold.core.axes import wide_size
from fivefold.core.errors import FivefoldError
from fivefold.core.machine import Machine
from fivefold.core.plan import Plan
from fivefold.core.traffic import ITEMSIZE, Entry, predict
from fivefold.core.words import kind_text
from fivefold.report.amounts import gib
from fivefold.report.lines import table, wrapped

View = dict[str, Any]
_ORDER = ("tp", "cp", "ep", "dp", "pp", "all")


def view(plan: Plan) -> View:
    """The traffic of rank 0 by axis and kind; an asynchronous schedule is told why it has none."""
    assert plan.machine is not None, "a state always names a machine"
    itemsize = ITEMSIZE[plan.precision]
    try:
        found = predict(plan, 0, itemsize=itemsize, grad_itemsize=wide_size(itemsize))
    except FivefoldError as error:
        return {"headline": "not predicted", "refused": str(error), "rows": []}
    summed: defaultdict[tuple[str, str, int], list[Entry]] = defaultdict(list)
    for entry in found:
        summed[entry.axis, entry.kind, entry.group].append(entry)
    rows = [_row(plan, plan.machine, entries) for entries in summed.values()]
    rows.sort(key=lambda row: (_ORDER.index(row["dimension"]), -row["sent"]))
    sent = sum(row["sent"] for row in rows)
    calls = sum(row["calls"] for row in rows)
    return {
        "headline": f"rank 0 sends {gib(sent)} in {calls:,} calls of a step",
        "refused": None,
        "rows": rows,
    }


def _row(plan: Plan, machine: Machine, entries: list[Entry]) -> View:
    """Equal calls but for their sizes."""
    axis = entries[0].axis
    return {
        "dimension": groups.DIMENSIONS.get(axis, "all"),
        "axis": axis,
        "kind": kind_text(entries[0].kind),
        "calls": sum(one.count for one in entries),
        "bytes": sum(one.count * one.bytes for one in entries),
        "sent": round(sum(one.sent for one in entries)),
        "group": entries[0].group,
        "tier": groups.tier(plan, axis, machine).name,
    }


def text(found: View) -> list[str]:
    """The same for a terminal."""
    if found["refused"]:
        return wrapped(found["refused"], "traffic   ")
    rows: list[tuple[str, ...]] = [
        ("axis", "kind", "ranks", "calls", "GiB given", "GiB sent", "over")
    ]
    for one in found["rows"]:
        sizes = (f"{one[name] / 2**30:,.3f}" for name in ("bytes", "sent"))
        numbers = (f"{one['group']:,}", f"{one['calls']:,}", *sizes)
        rows.append((one["axis"], one["kind"], *numbers, one["tier"]))
    lines = table(rows, left=(0, 1, 6))
    return [f"traffic   {found['headline']}", *(f"          {line}" for line in lines)]
