"""The events of a segment, joined: what happens between two changes of a flat unit is one change.

Equal layers have equal steps. So a stage of 40 layers takes the events of one layer, and its plays
add a few numbers a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fivefold.cost.layer import EXPERTS, BlockPass, Change, Event, Pause, WeightGradient


class BlockWeight(NamedTuple):
    """A weight by its name inside of its block. `unit` counts those of the segment; `collected`:
    its gradient goes into the buffer of its unit."""

    unit: int
    name: str
    numel: int
    collected: bool


class Given(NamedTuple):
    """Gradients of so many weights of a unit have come, the first and the last one of them in this
    step or another one of the segment."""

    unit: int
    weights: int


class Kept(NamedTuple):
    """A gradient stays where backward made it, if that is the first one of its weight."""

    block: int
    name: str
    bytes: float


JoinedStep = Change | Given | Kept | BlockPass | Pause


class GradientSizes(NamedTuple):
    """Bytes of elements, and whose gradients go past autograd or wait for others."""

    itemsize: int
    grad_itemsize: int
    queued: bool  # weight gradients go past autograd
    tied_head: int  # elements of a weight that is also the embedding's, 0 if there is none

    def adds_products(self, name: str) -> bool:
        """Whether the gradient of a weight is added to the sum by the GEMM that computes it."""
        others = name == "embed" or name.startswith(f"{EXPERTS}.experts") or name.endswith("norm")
        return self.queued and self.itemsize == self.grad_itemsize and not others


class SegmentUse(NamedTuple):
    """Multi-token prediction uses the head several times. Autograd sums its gradients before it
    gives them: the first one `waits` for the next, and that one has `waited`."""

    waits: bool = False
    waited: bool = False


def segment_steps(
    events: Iterable[Event],
    weights: Sequence[Sequence[BlockWeight]],
    sizes: GradientSizes,
    use: SegmentUse,
    gives_rest: bool,
    with_passes: bool,
) -> list[JoinedStep]:
    """The steps of one segment in one action. `weights` of its blocks come in the order of the
    backward. `gives_rest`: after the events, those come whose gradients take little memory.
    `with_passes`: a pass over a block gathers or frees weights."""
    rest = gives_rest and not use.waits
    found = [*_steps(events, _SegmentWeights(weights, sizes), use, rest, with_passes)]
    return [*_joined(_without_middles(found))]


class _SegmentWeights:
    """Weights whose gradients have not come yet."""

    def __init__(self, weights: Sequence[Sequence[BlockWeight]], sizes: GradientSizes) -> None:
        self.left, self.sizes = [list(each) for each in weights], sizes

    def made(self, block: int, name: str, apart: bool = False) -> float:
        """Bytes of the largest weight gradient of these, as the backward makes it."""
        if self.sizes.adds_products(name) and not apart:
            return 0.0
        if self.sizes.tied_head and name == "head":
            return float(self.sizes.tied_head * self.sizes.itemsize)
        numels = (each.numel for each in self.left[block] if each.name.startswith(name))
        return float(max(numels, default=0) * self.sizes.itemsize)

    def give(self, block: int, name: str) -> tuple[list[JoinedStep], list[JoinedStep]]:
        """What happens to units, and to gradients that stay."""
        mine = [each for each in self.left[block] if each.name.startswith(name)]
        self.left[block] = [each for each in self.left[block] if not each.name.startswith(name)]
        size = self.sizes.grad_itemsize
        kept: list[JoinedStep] = [
            Kept(block, each.name, each.numel * size) for each in mine if not each.collected
        ]
        return [Given(each.unit, 1) for each in mine if each.collected], kept


def _steps(
    events: Iterable[Event],
    weights: _SegmentWeights,
    use: SegmentUse,
    gives_rest: bool,
    with_passes: bool,
) -> Iterator[JoinedStep]:
    made: dict[tuple[int, str], float] = {}  # gradients that were not given yet
    for event in events:
        if isinstance(event, WeightGradient):
            key = event.block, event.name
            if not event.given:
                made[key] = weights.made(*key, event.apart)
                yield Change(made[key], peak=made[key])
            else:
                yield from _taken(event, weights, use, made.pop(key))
        elif with_passes or not isinstance(event, BlockPass):
            yield event
    for block in range(len(weights.left)) if gives_rest else ():
        given, kept = weights.give(block, "")
        yield from (*given, *kept)


def _taken(
    event: WeightGradient, weights: _SegmentWeights, use: SegmentUse, made: float
) -> Iterator[JoinedStep]:
    """A weight gradient leaves the backward. That of a tied head waits for the embedding's."""
    tied = weights.sizes.tied_head > 0
    if tied and event.name == "head":
        return
    if tied and event.name == "embed" and (waiting := weights.made(event.block, "head")):
        yield Change(-waiting, peak=made)  # their sum takes the place of both
    past_autograd = weights.sizes.queued
    if use.waited and not past_autograd:
        yield Change(-made, peak=made)
    if use.waits and not past_autograd:
        return
    given, kept = weights.give(event.block, event.name)
    if use.waits:  # it is added to the sum, which is not complete
        given = [Given(each.unit, 0) for each in given if isinstance(each, Given)]
    yield from (*given, Change(-made), *kept)


def _without_middles(steps: Iterable[JoinedStep]) -> Iterator[JoinedStep]:
    """Between the first and the last gradient, nothing happens to a unit."""
    found = [*steps]
    last = {step.unit: place for place, step in enumerate(found) if isinstance(step, Given)}
    passed: dict[int, int] = {}  # weights of a unit since its first one
    for place, step in enumerate(found):
        if not isinstance(step, Given):
            yield step
        elif step.unit not in passed:
            passed[step.unit] = 0
            yield step
        else:
            passed[step.unit] += step.weights
            if place == last[step.unit]:
                yield Given(step.unit, passed[step.unit])


def _joined(steps: Iterable[JoinedStep]) -> Iterator[JoinedStep]:
    """Neighbouring changes as one."""
    open_ = Change(0.0)
    for step in steps:
        if isinstance(step, Change):
            open_ = _after(open_, step)
            continue
        if open_ != Change(0.0):
            yield open_
            open_ = Change(0.0)
        yield step
    if open_ != Change(0.0):
        yield open_


def _after(one: Change, other: Change) -> Change:
    peak = (one.peak, one.peak_logits)
    if one.bytes + other.peak > one.peak:
        peak = (one.bytes + other.peak, one.logits + other.peak_logits)
    return Change(one.bytes + other.bytes, one.logits + other.logits, *peak)
