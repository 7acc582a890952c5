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
        exempt = name == "embed" or name.startswith(f"{EXPERTS}.experts") or name.endswith("norm")
        return self.queued and self.itemsize == self.grad_itemsize and not exempt


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
    gives_remainder = gives_rest and not use.waits
    steps = [*_steps(events, _SegmentWeights(weights, sizes), use, gives_remainder, with_passes)]
    return [*_joined(_without_middles(steps))]


class _SegmentWeights:
    """Weights whose gradients have not come yet."""

    def __init__(self, weights: Sequence[Sequence[BlockWeight]], sizes: GradientSizes) -> None:
        self.left, self.sizes = [list(block_weights) for block_weights in weights], sizes

    def gradient_bytes(self, block: int, name: str, apart: bool = False) -> float:
        """Bytes of the largest weight gradient of these, as the backward makes it."""
        if self.sizes.adds_products(name) and not apart:
            return 0.0
        if self.sizes.tied_head and name == "head":
            return float(self.sizes.tied_head * self.sizes.itemsize)
        numels = (weight.numel for weight in self.left[block] if weight.name.startswith(name))
        return float(max(numels, default=0) * self.sizes.itemsize)

    def give(self, block: int, name: str) -> tuple[list[JoinedStep], list[JoinedStep]]:
        """What happens to units, and to gradients that stay."""
        own_weights = [weight for weight in self.left[block] if weight.name.startswith(name)]
        self.left[block] = [
            weight for weight in self.left[block] if not weight.name.startswith(name)
        ]
        size = self.sizes.grad_itemsize
        leftovers: list[JoinedStep] = [
            Kept(block, weight.name, weight.numel * size)
            for weight in own_weights
            if not weight.collected
        ]
        return [Given(weight.unit, 1) for weight in own_weights if weight.collected], leftovers


def _steps(
    events: Iterable[Event],
    weights: _SegmentWeights,
    use: SegmentUse,
    gives_rest: bool,
    with_passes: bool,
) -> Iterator[JoinedStep]:
    sizes: dict[tuple[int, str], float] = {}  # gradients that were not given yet
    for event in events:
        if isinstance(event, WeightGradient):
            key = event.block, event.name
            if not event.is_final:
                sizes[key] = weights.gradient_bytes(*key, event.apart)
                yield Change(sizes[key], peak=sizes[key])
            else:
                yield from _taken(event, weights, use, sizes.pop(key))
        elif with_passes or not isinstance(event, BlockPass):
            yield event
    for block in range(len(weights.left)) if gives_rest else ():
        grads, leftovers = weights.give(block, "")
        yield from (*grads, *leftovers)


def _taken(
    event: WeightGradient, weights: _SegmentWeights, use: SegmentUse, size: float
) -> Iterator[JoinedStep]:
    """A weight gradient leaves the backward. That of a tied head waits for the embedding's."""
    tied = weights.sizes.tied_head > 0
    if tied and event.name == "head":
        return
    if tied and event.name == "embed" and (waiting := weights.gradient_bytes(event.block, "head")):
        yield Change(-waiting, peak=size)  # their sum takes the place of both
    past_autograd = weights.sizes.queued
    if use.waited and not past_autograd:
        yield Change(-size, peak=size)
    if use.waits and not past_autograd:
        return
    grads, leftovers = weights.give(event.block, event.name)
    if use.waits:  # it is added to the sum, which is not complete
        grads = [Given(step.unit, 0) for step in grads if isinstance(step, Given)]
    yield from (*grads, Change(-size), *leftovers)


def _without_middles(steps: Iterable[JoinedStep]) -> Iterator[JoinedStep]:
    """Between the first and the last gradient, nothing happens to a unit."""
    sequence = [*steps]
    last = {
        step.unit: position for position, step in enumerate(sequence) if isinstance(step, Given)
    }
    passed: dict[int, int] = {}  # weights of a unit since its first one
    for index, step in enumerate(sequence):
        if not isinstance(step, Given):
            yield step
        elif step.unit not in passed:
            passed[step.unit] = 0
            yield step
        else:
            passed[step.unit] += step.weights
            if index == last[step.unit]:
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


def _after(first: Change, other: Change) -> Change:
    peak = (first.peak, first.peak_logits)
    if first.bytes + other.peak > first.peak:
        peak = (first.bytes + other.peak, first.logits + other.peak_logits)
    return Change(first.bytes + other.bytes, first.logits + other.logits, *peak)
