"""Steps that run twice: after a spike of loss or norm, and every `replay` steps as a proof.

A step whose loss or norm is not finite, or `spike_bound` times as far above its median as is usual,
updates nothing. What each rank has of both is compared first: a spike that all data ranks share is
in the data, and the step counts. Else it runs again, from the inputs that are still here and the
weights that have not changed. The same result: it is in the data, and counts. Another one:
hardware, and the second result counts. Which rank, the tapes of both runs say
(`parallel/bit_sums.py`): the one that sent something else after it had received the same.

With `replay = N` every N-th step runs twice in any case, with kernels that add in one order. Both
runs must then be equal to the bit, in every message of every rank, and so must two updates from the
same gradients, where all states are on the device and no other rank has a part in an update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor

from fivefold.core import FivefoldError, counted
from fivefold.launch import Worker
from fivefold.optim import Updater
from fivefold.parallel import BitSums, Job, Mesh, Tape, TapeDifference, first_difference
from fivefold.step import Optimizer, StepOutcome
from fivefold.train.callbacks import Callback
from fivefold.train.recovery.integrity import exchanged, held_tensors

_WINDOW, _LEAST = 64, 16  # steps that the bound knows, and without which there is none
_DEVIATIONS = 6.0
_SPREAD = 1.4826  # of a normal distribution: its deviation over the median distance
_LOSS_SHARE, _NORM_SHARE = 0.05, 0.25  # of the median, by which a spike is above it at least
_WIDER, _NARROWER = 1.25, 0.999  # once in 224 steps both cancel: so often data may cross a bound
_SAID = 2.0  # times its bound: a spike in the data that is smaller is recorded and not printed
_APART = 3.0  # times the growth of the median rank: more is a spike of one rank

Bound = tuple[float, float]
Pair = tuple[int, int]
NOTHING: Bound = (-math.inf, -math.inf)  # no step is within


@dataclass
class RunningBound:
    """Bounds of loss and norm from the last 64 steps: six deviations above the median, and at least
    5% above it for the loss, 25% for the norm. A step runs again beyond `factor` times that
    distance from the median.

    A healthy step that does so widens the bound by a quarter, and every other step narrows it by a
    thousandth: no more than 0.5% of the steps run again for long, also with a `factor` of 1.
    """

    factor: float = 1.0

    losses: deque[float] = field(default_factory=lambda: deque[float](maxlen=_WINDOW))
    norms: deque[float] = field(default_factory=lambda: deque[float](maxlen=_WINDOW))

    width: float = 1.0

    def widen(self) -> None:
        """Widen the bounds after a spike of the data."""
        self.width *= _WIDER

    def add(self, loss: float, norm: float) -> None:
        """Add the numbers of a step, equal on all ranks."""
        self.width = max(1.0, self.width * _NARROWER)
        if math.isfinite(loss) and math.isfinite(norm):
            self.losses.append(loss)
            self.norms.append(norm)

    @property
    def limits(self) -> Bound:
        """Bounds above which a step runs again; infinite at the beginning."""
        return self._above_median(self.factor)

    @property
    def usual(self) -> Bound:
        """Bounds that loss and norm seldom exceed."""
        return self._above_median(1.0)

    def _above_median(self, factor: float) -> Bound:
        if len(self.losses) < _LEAST:
            return math.inf, math.inf
        loss, loss_margin = _limit(self.losses, _LOSS_SHARE)
        norm, norm_margin = _limit(self.norms, _NORM_SHARE)
        width = factor * self.width
        return loss + width * loss_margin, norm + width * norm_margin


def _limit(values: Sequence[float], share: float) -> tuple[float, float]:
    """The median, and how far a value may be above it."""
    middle = median(values)
    spread = _SPREAD * median(abs(value - middle) for value in values)
    return middle, max(_DEVIATIONS * spread, share * abs(middle))


@dataclass
class LocalNumbers:
    """This rank's parts of loss and gradient norm in the last 64 steps, on its device; read and
    exchanged only when a step exceeds its bound."""

    mesh: Mesh
    bound: RunningBound
    history: deque[Tensor] = field(default_factory=lambda: deque[Tensor](maxlen=_WINDOW))
    newest: Tensor | None = None
    num_shared: int = 0

    def note(self, local: Tensor) -> None:
        """As `SpikeWatch` has it."""
        self.newest = local

    def add(self) -> None:
        """Add the newest step."""
        if self.newest is not None:
            self.history.append(self.newest)
            self.newest = None

    def is_shared(self, loss: float, norm: float) -> bool:
        """Whether loss and norm have grown alike on all ranks, which a fault of one does not cause.

        What goes wrong in a forward is in the loss of one replica, so that there must be others.
        What goes wrong in a backward may reach all gradients, and leaves the loss as it was.
        """
        usual_loss, usual_norm = self.bound.usual
        explained = loss > usual_loss and norm > usual_norm and self.mesh.layout.dp > 1
        if not explained or not self.history or self.newest is None:
            return False
        past = torch.stack(list(self.history)).median(0).values.tolist()
        growths = list(map(_growth, self.newest.tolist(), past))
        shared = all(map(grew_alike, zip(*exchanged(self.mesh, growths), strict=True)))
        self.num_shared += shared
        return shared


def _growth(value: float, usual: float) -> float | None:
    """Times what is usual; None where a rank has no part of it."""
    return abs(value / usual) if usual else None


def grew_alike(growths: Sequence[float | None]) -> bool:
    """Whether no rank's part has grown far more than the median rank's.

    >>> grew_alike([20.0, 30.0, None, 25.0]), grew_alike([1.0, 40.0])
    (True, False)
    """
    known = [growth for growth in growths if growth is not None]
    return not known or max(known) <= _APART * median_low(known)


class ProvedUpdate:
    """An update that runs twice from the same weights, gradients and states, copied to the host."""

    def __init__(self, inner: Optimizer, job: Job, updater: Updater) -> None:
        self.inner, self.job, self.updater = inner, job, updater
        self.differing: list[str] = []

    def step(self) -> None:
        """Update, and compare with a second run."""
        state_tensors, count = held_tensors(self.job, self.updater), self.updater.count
        changed = [state_tensor.tensor.detach() for state_tensor in state_tensors]
        changed += [shard.grad for shard in self.job.owned]  # an update may scale them in place
        before = [original.to("cpu", copy=True) for original in changed]
        sums = BitSums(
            [state_tensor.tensor for state_tensor in state_tensors], self.job.mesh.device
        )
        self.inner.step()
        first = sums.read()
        for tensor, backup in zip(changed, before, strict=True):
            tensor.copy_(backup)
        self.updater.resume_after(count)
        self.inner.step()
        wrong = (first != sums.read()).tolist()
        self.differing = [
            state_tensor.name for state_tensor, bad in zip(state_tensors, wrong, strict=True) if bad
        ]


@dataclass
class ReplayCallback(Callback):
    """Runs the steps of a rank, some of them twice. `exact`: kernels add in one order."""

    worker: Worker
    mesh: Mesh
    every: int
    watches: bool
    exact: bool
    bound: RunningBound
    local: LocalNumbers
    num_spikes: int = 0  # steps beyond the usual bound, this start
    num_again: int = 0  # and of these, steps that ran again
    update: ProvedUpdate | None = None
    comparison: dict[str, Any] | None = None

    def run(
        self, number: int, attempt: Callable[[Bound | None], StepOutcome], expected: bool
    ) -> StepOutcome:
        """Run a step, and again if needed; returns the outcome that counts. `expected`: numbers
        that are not finite are usual."""
        self.comparison = self.update = None
        proves = self.proves(number)
        bound = NOTHING if proves else self.bound.limits if self.watches else None
        is_full = proves or self.exact
        first, tape = self._taped(partial(attempt, bound), is_full)
        if first.flips is not None and first.flips.any():
            return first  # in memory: a second run would gather weights anew, and hide where
        overflow = not math.isfinite(float(first.loss) + float(first.norm))
        strange = self.watches and first.skipped and not (expected and overflow)
        explained = proves or (expected and overflow)
        self.num_spikes += not explained and _is_above(_pair(first), self.bound.usual)
        self.num_again += strange and not proves
        if proves or strange:
            second, other = self._taped(partial(attempt, None), is_full)
            self._judge(number, (first, second), (tape, other), proves)
            first = second
        self.bound.add(*_pair(first))
        if not first.skipped:
            self.local.add()
        return first

    def proves(self, number: int) -> bool:
        """Whether a step always runs twice."""
        return bool(self.every) and number % self.every == 0

    def spikes(self, number: int) -> LocalNumbers | None:
        """Watch that compares ranks before a step runs again; None for proofs."""
        return self.local if self.watches and not self.proves(number) else None

    def proving(self, job: Job, updater: Updater, inner: Optimizer) -> Optimizer:
        """Update of a step that is proved."""
        self.update = ProvedUpdate(inner, job, updater)
        return self.update

    def finish(self) -> None:
        """Report the spikes of this start, if any step ran again or might have."""
        shared = self.local.num_shared
        if self.worker.rank == 0 and (self.num_again or shared):
            beyond = f"{counted(self.num_spikes, 'step')} had a loss or norm above the usual bound"
            self.worker.report(
                f"{beyond}: {self.num_again} ran again, {shared} had a spike of all ranks"
            )

    def measure(self, number: int) -> dict[str, Any]:
        return {} if self.comparison is None else {"again": self.comparison}

    def _taped(self, attempt: Callable[[], StepOutcome], is_full: bool) -> tuple[StepOutcome, Tape]:
        self.mesh.records.clear()
        tape = Tape(is_full)
        self.mesh.record_on(tape if self.watches or self.every else None)
        try:
            return attempt(), tape
        finally:
            self.mesh.record_on(None)

    def _judge(
        self,
        number: int,
        outcomes: tuple[StepOutcome, StepOutcome],
        tapes: tuple[Tape, Tape],
        proves: bool,
    ) -> None:
        """Compare both runs, with all ranks, and say what was found."""
        pairs = [_pair(outcome) for outcome in outcomes]
        wire = [tapes[0].messages(sent=sent) for sent in (True, False)]
        differs = first_difference(*tapes)
        if differs is None and self.update is not None and self.update.differing:
            differs = TapeDifference(f"its update of {self.update.differing[0]}", True, -1)
        answers = exchanged(self.mesh, (differs, *wire))
        ranks: list[TapeDifference | None] = [answer[0] for answer in answers]
        equal = not any(ranks) and _same(*pairs)
        if not self.exact:  # sums in another order are not hardware
            equal = equal or _is_above(pairs[1], self.bound.limits)
        causes = [
            rank
            for rank, difference in enumerate(ranks)
            if difference is not None and difference.sent
        ]
        lost = _lost_messages([answer[1] for answer in answers], [answer[2] for answer in answers])
        if not causes and not equal:
            causes = [0] if len(ranks) == 1 else sorted({rank for pair in lost for rank in pair})
        why = None if proves and equal else _words(number, pairs, self.bound.limits, proves)
        self.comparison = {"why": why, "same": equal, "ranks": causes}
        if why is None:
            return
        text = f"{why}{'' if proves else ', so it ran again'}; "
        text += _verdict(equal, causes, ranks, lost)
        if proves:
            raise FivefoldError(
                f"{text}: take these devices out, and continue with --resume; if the run has "
                "kernels of its own, they must add in one order"
            )
        small = equal and not _is_above(
            pairs[0], tuple(_SAID * limit for limit in self.bound.limits)
        )
        if self.worker.rank == 0 and not small:
            self.worker.report(text)
        if equal:
            self.bound.widen()


def _pair(outcome: StepOutcome) -> Bound:
    return float(outcome.loss), float(outcome.norm)


def _same(bound: Bound, other: Bound) -> bool:
    """Equal to the bit; what is not a number equals itself."""
    return all(a == b or (a != a and b != b) for a, b in zip(bound, other, strict=True))


def _is_above(values: Sequence[float], limits: Sequence[float]) -> bool:
    return any(not value <= limit for value, limit in zip(values, limits, strict=True))


def _lost_messages(
    sent: Sequence[Mapping[Pair, list[int]]], received: Sequence[Mapping[Pair, list[int]]]
) -> list[Pair]:
    """Pairs of ranks between which something else came than was sent, by the tapes of all ranks."""
    return [
        pair
        for came in received
        for pair, hashes in came.items()
        if sent[pair[0]].get(pair, hashes) != hashes
    ]


def _words(number: int, pairs: Sequence[Bound], limits: Bound, proves: bool) -> str:
    (loss, norm), (loss_again, norm_again) = pairs
    if proves:
        return (
            f"step {number} ran twice with different results: loss {loss!r} and {loss_again!r}, "
            f"norm {norm!r} and {norm_again!r}"
        )
    what, value, limit = ("loss", loss, limits[0])
    if loss <= limits[0]:
        what, value, limit = ("norm", norm, limits[1])
    return f"step {number}: {what} {value:.4g} was above its bound {limit:.4g}"


def _verdict(
    equal: bool,
    causes: Sequence[int],
    ranks: Sequence[TapeDifference | None],
    lost: Sequence[Pair],
) -> str:
    if equal:
        return "the result is the same, so it is in the data"
    if lost:
        pairs = ", ".join(f"{source} to {target}" for source, target in lost)
        return f"the result is another: a message of ranks {pairs} changed on its way"
    if not causes:
        return "the result is another, so it is in the hardware, of a rank that is not known"
    names = sorted({difference.name for rank in causes if (difference := ranks[rank]) is not None})
    where = f", first in {', '.join(names)}" if names else ""
    listed = ", ".join(map(str, causes))
    who = f"rank {listed}" if len(causes) == 1 else f"one of ranks {listed}"
    return f"the result is another, so it is in the hardware of {who}{where}"
