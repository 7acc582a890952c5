"""What if: the same job with another machine, more GPUs, longer rows, a larger batch."""

from __future__ import annotations

import re
from dataclasses import replace

from fivefold.core.errors import FivefoldError, UnknownName
from fivefold.core.estimate.sweep import whole
from fivefold.core.plan import Plan, Wishes

KEYS = ("gpus", "seq", "batch", "machine")


def parse(text: str) -> dict[str, str]:
    """Read `gpus=2x seq=32k machine=gb200`."""
    found: dict[str, str] = {}
    for word in text.replace(",", " ").split():
        key, equals, value = word.partition("=")
        if key not in KEYS:
            raise UnknownName("--what-if", key, KEYS)
        if not equals or not value:
            raise FivefoldError(f"--what-if {word!r}: write {key}=2x, or {key}= and a value")
        found[key] = value
    if not found:
        raise FivefoldError("--what-if: write what changes, such as gpus=2x or seq=32k")
    return found


def changed(wishes: Wishes, changes: dict[str, str], **now: int) -> Wishes:
    """The wishes with the changes; `now` are the numbers that 2x doubles."""
    found = wishes
    for key, value in changes.items():
        if key == "machine":
            found = replace(found, machine=value)
        else:
            found = replace(found, **{key: scaled(now[key], value, key)})
    return found


def scaled(number: int, text: str, key: str) -> int:
    """`2x` and `0.5x` of a number, or another number.

    >>> scaled(8, "2x", "gpus"), scaled(8, "0.5x", "gpus"), scaled(8, "4k", "seq")
    (16, 4, 4096)
    """
    factor = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)x", text)
    if factor is None:
        return whole(text, f"--what-if {key}")
    value = number * float(factor[1])
    if value != int(value) or value < 1:
        raise FivefoldError(f"--what-if {key}={text}: {number:,} times that is no whole number")
    return int(value)


def stretched(plan: Plan, changes: dict[str, str]) -> Wishes:
    """A plan with the changes: more GPUs are more data ranks, all else of the layout stays."""
    batch, layout = plan.batch, plan.layout
    now = {"gpus": layout.world, "seq": batch.seq, "batch": batch.sequences}
    wishes = replace(plan.wishes, batch=batch.sequences, microbatches=None, ep_nodes=None)
    wishes = changed(wishes, changes, **now)
    gpus = wishes.gpus or layout.world
    inner = layout.replicate * layout.tp * layout.cp * layout.pp
    if gpus % inner:
        raise FivefoldError(
            f"--what-if gpus={gpus}: not a multiple of the {inner} ranks that {layout} has beside "
            "its shards; leave --layout out to search anew"
        )
    return replace(wishes, layout=str(replace(layout, shard=gpus // inner)), gpus=gpus)
