"""What one pipeline rank does, as values with a text form.

`2F0` is the forward of stage 2 for microbatch 0, `2I0` its input gradient, `2W0` its weight
gradient, `2B0` both at once. `(2F4;2B0)OVERLAP_F_B` is a forward and a backward that run as one:
torch's own spelling, so that files travel both ways.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from fivefold.core.errors import IllegalSchedule

FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD = "F", "I", "W", "B"

# Nine digits: more is a slip, and Python refuses to read very long numbers.
_ACTION = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
_OVERLAP = re.compile(r"\(\s*([^;()]+?)\s*;\s*([^;()]+?)\s*\)OVERLAP_F_B")
# torch's lowered files also list transfers and weight gathers; our runtime derives them itself.
_DERIVED = re.compile(r"[0-9]{1,9}(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)[0-9]{0,9}")


class Action(NamedTuple):
    """One computation of one stage for one microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a full backward that run together, as one atomic step."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step: TypeAlias = Action | Overlap


def actions_of(step: Step) -> tuple[Action, ...]:
    """The computations inside one step."""
    return (step,) if isinstance(step, Action) else (step.forward, step.backward)


def parse_steps(texts: Iterator[str] | list[str], where: str) -> tuple[Step, ...]:
    """Read one rank's steps; empty cells (idle slots) and derived transfers are passed over."""
    steps: list[Step] = []
    for text in texts:
        cell = text.strip()
        if not cell or _DERIVED.fullmatch(cell):
            continue
        steps.append(_parse_step(cell, where))
    return tuple(steps)


def _parse_step(text: str, where: str) -> Step:
    if match := _OVERLAP.fullmatch(text):
        forward, backward = (_parse_action(part, where) for part in match.groups())
        if forward.kind != FORWARD or backward.kind != BACKWARD:
            raise IllegalSchedule(
                f"{where}: {text!r} must join a forward and a full backward: (2F4;2B0)OVERLAP_F_B"
            )
        return Overlap(forward, backward)
    return _parse_action(text, where)


def _parse_action(text: str, where: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise IllegalSchedule(
            f"{where}: {text!r} is no action; write STAGE, then F, I, W or B, then MICROBATCH: 2F0"
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), kind, int(microbatch))
