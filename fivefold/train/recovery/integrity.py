"""Flipped bits in memory: copies are compared, and what stays from update to update is sealed.

Sealed: the hash of weights, master weights and states is taken after an update and again before the
next one. Nothing may change them in between, so a difference is a flipped bit, on this rank, in a
tensor that is known. Weights that never learn are sealed once.

Compared: what several ranks hold (`core/layout/replicas.py`) has one hash on all of them. Each
multiplies it by a factor, and the factors of a group sum to zero. So one number per rank, in the
all-reduce that carries loss and norm, says whether any two copies of the whole job differ. Copies
and weights that never learn are looked at every N steps; weights that the next gather replaces, in
every step.

Only when a number is not zero do ranks exchange those hashes by name, to find out who is odd. They
are the hashes that were compared: the tensors have been updated since, or are being gathered. The
hash of a weight that ranks have gathered is the sum of those that its owners sealed, so that two
copies are enough.

Everything that a save will hold is looked at before the save. A checkpoint of a step after the last
one that was verified is marked as suspect, and a resume passes over it.

On a GPU seals take two passes over weights and states, which is above 1% of a short step, so that
they are taken around every N-th update there (N = 1: around all). States that are elsewhere than
the model, in files or in host memory beside a GPU, are not looked at.

Steps that run twice: after a spike of loss or norm, and every `replay` steps as a proof.

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
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, median_low
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core import FivefoldError, counted
from fivefold.core.layout import copy_roles, data_role, line_factor, odd_ones, sign
from fivefold.launch import Worker
from fivefold.optim import MASTER, StateInMemory, Updater
from fivefold.parallel import (
    PRIME,
    BitSums,
    Job,
    Mesh,
    Tape,
    TapeDifference,
    combined,
    first_difference,
)
from fivefold.step import Optimizer, StepOutcome
from fivefold.train.callbacks import Callback, CheckpointCallback

WEIGHTS, FROZEN = "weights", "frozen weights"
_MOST_NAMED = 3  # tensors in one message
LineKey = tuple[str, tuple[int, ...], bool]
"""What the members of a group call a line: its role, who they are, and whether it is looked at in
every step."""


class HeldTensor(NamedTuple):
    """A named tensor that stays in memory."""

    name: str
    tensor: Tensor
    start: int = 0  # of a shard: its first element in the weight


class ShardHash(NamedTuple):
    """Hash of a shard of a weight."""

    start: int
    stop: int
    itemsize: int
    hash: int


class CopyLine(NamedTuple):
    """Tensors that the ranks of a group replicate: `members` by their coord, and names."""

    role: str
    members: tuple[int, ...]
    names: tuple[str, ...]
    sums: BitSums
    every_step: bool = False

    @classmethod
    def of(
        cls, job: Job, role: str, tensors: Sequence[HeldTensor], every_step: bool = False
    ) -> CopyLine:
        """Replicated tensors of this rank's group in a role."""
        sums = BitSums([tensor.tensor for tensor in tensors], job.mesh.device)
        names = tuple(tensor.name for tensor in tensors)
        return cls(role, job.mesh.members[role], names, sums, every_step)

    @property
    def key(self) -> LineKey:
        return self.role, self.members, self.every_step


class Seal:
    """Hashes of tensors that may not change before the next update."""

    def __init__(self, tensors: Sequence[HeldTensor], device: torch.device) -> None:
        self.tensors, self.device = tensors, device
        self.sums = BitSums([tensor.tensor for tensor in tensors], device)
        self.taken: Tensor | None = None
        self.wrong: Tensor | None = None

    def take(self) -> None:
        """Hash the tensors."""
        self.taken = self.sums.read()

    def drop(self) -> None:
        """Drop the hashes: the tensors may change."""
        self.taken = None

    def check(self) -> Tensor:
        """Number of tensors that changed; zero without a seal."""
        if self.taken is None:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        self.wrong = self.sums.read() != self.taken
        return self.wrong.sum().to(torch.float64)

    def broken(self) -> list[str]:
        """Names of tensors that had changed at the last check."""
        wrong = [] if self.wrong is None else self.wrong.tolist()
        return [tensor.name for tensor, bad in zip(self.tensors, wrong, strict=False) if bad]


class Integrity(Callback):
    """Memory checks of one rank."""

    def __init__(
        self,
        job: Job,
        updater: Updater,
        every: int,
        checkpoints: CheckpointCallback | None = None,
        *savers: Callback,
    ) -> None:
        """`every`: the steps from one comparison to the next. `checkpoints` and other `savers` save
        only what was looked at before."""
        self.mesh, self.every, self.number = job.mesh, every, 0
        self.checkpoints = checkpoints
        self.savers = savers if checkpoints is None else (checkpoints, *savers)
        device = job.mesh.device
        self.seal = Seal(held_tensors(job, updater), device)
        self.frozen = Seal(list(_shards(job, FROZEN, frozen=True)), device)
        self.frozen.take()
        self.lines = [line for line in _lines(job, updater) if len(line.members) > 1]
        self.compared: dict[LineKey, Tensor] = {}  # the hashes of the last comparison
        self.sealed: Tensor | None = None  # the seal of that moment
        self.after = 0 if checkpoints is None else checkpoints.progress.step
        self.verified = self.after  # the last step whose checkpoint is good, copies included
        self.always = device.type == "cpu"
        if self.always:
            self.seal.take()

    def begin(self, number: int) -> None:
        """Begin a step; earlier ones have passed their checks."""
        if self.number % self.every == 0:
            self.verified = max(self.verified, self.number - 1)
        self.number = number

    def before_update(self) -> Tensor:
        """As `StepWatch` has it."""
        due = self.number % self.every == 0
        return self._look([line for line in self.lines if due or line.every_step], frozen=due)

    def _look(self, lines: Sequence[CopyLine], *, frozen: bool) -> Tensor:
        """Two numbers whose sums over all ranks are zero if nothing has changed."""
        self.compared.clear()
        self.sealed = self.seal.taken
        differs = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for line in lines:
            sums = self.compared[line.key] = line.sums.read()
            hashed = combined(sums) * line_factor(line.role, line.every_step) % PRIME
            factor = sign(line.members.index(self.mesh.rank), len(line.members))
            differs = differs + factor * hashed.to(torch.float64)
        broken = self.seal.check()
        return torch.stack([differs, broken + self.frozen.check() if frozen else broken])

    def after_step(self, number: int) -> None:
        """Check everything that a save would write."""
        if not any(saver.needs_record(number) for saver in self.savers):
            return
        lines = [line for line in self.lines if not line.every_step]  # the others are gathered now
        flags = exchanged(self.mesh, self._look(lines, frozen=True).tolist())
        if any(map(sum, zip(*flags, strict=True))):
            raise self.error()
        self.verified = number

    def after_update(self) -> None:
        """As `StepWatch` has it."""
        if self.always or (self.number + 1) % self.every == 0:
            self.seal.take()
        else:
            self.seal.drop()

    def error(self) -> FivefoldError:
        """Describe a failed check, on every rank. Suspect checkpoints are marked."""
        broken = self.seal.broken(), self.frozen.broken()
        reports = exchanged(self.mesh, (socket.gethostname(), *broken))
        named = {rank: [*ours, *frozen] for rank, (_, ours, frozen) in enumerate(reports)}
        texts = [_flipped(rank, reports[rank][0], names) for rank, names in named.items() if names]
        last = self.verified if any(frozen for _, _, frozen in reports) else self.number - 1
        if not texts:
            texts, last = self._odd([report[0] for report in reports])
        why = f"step {self.number}: {'; '.join(texts)}"
        marked = [] if self.checkpoints is None else self.checkpoints.mark_suspect(last, why)
        listed = f"; --resume passes over {', '.join(marked)}, marked as suspect" if marked else ""
        return FivefoldError(
            f"{why}. What was computed since step {last} may be wrong: continue with --resume from "
            f"a checkpoint of that step or an earlier one, without this device{listed}"
        )

    def _odd(self, hosts: Sequence[str]) -> tuple[list[str], int]:
        """Sentences about copies that differ, and the last step whose checkpoint is good."""
        local = {
            line.key: dict(zip(line.names, self.compared[line.key].tolist(), strict=True))
            for line in self.lines
            if line.key in self.compared
        }
        rank_hashes = exchanged(
            self.mesh, {key: tuple(tensor_hashes.values()) for key, tensor_hashes in local.items()}
        )
        groups = sorted({key for ranks in rank_hashes for key in ranks})
        apart = [key for key in groups if len({rank_hashes[rank][key] for rank in key[1]}) > 1]
        details = exchanged(self.mesh, {key: local[key] for key in apart if key in local})
        shards = exchanged(self.mesh, self._sealed_shards())
        texts, last = dict[tuple[int, ...], str](), self.number - 1
        for key in apart:
            hashes = {rank: details[rank][key] for rank in key[1]}
            odd, names = _odd_of(hashes)
            flipped = _other_than_sealed(names, hashes, shards) if key[2] else {}
            for rank, tensors in flipped.items():
                texts.setdefault((rank,), _flipped(rank, hosts[rank], tensors))
            if not flipped:
                texts.setdefault(odd, _differs(odd, key[1], hosts, names))
                last = min(last, max(self.after, self.number - 2) if key[2] else self.verified)
        none = "the sum over hashes of copies is not zero, though these are equal"
        return [*texts.values()] or [none], last

    def _sealed_shards(self) -> dict[str, ShardHash]:
        """The hashes of this rank's weights, as they were sealed after the last update."""
        values = [] if self.sealed is None else self.sealed.tolist()
        return {
            name: ShardHash(start, start + tensor.numel(), tensor.itemsize, value)
            for (name, tensor, start), value in zip(self.seal.tensors, values, strict=False)
            if name.startswith(f"{WEIGHTS} of")
        }


def _odd_of(hashes: Mapping[int, Mapping[str, int]]) -> tuple[tuple[int, ...], list[str]]:
    """The odd ranks of a group, and the tensors in which they are."""
    first = next(iter(hashes.values()))
    names = [
        name for name in first if len({rank_hashes[name] for rank_hashes in hashes.values()}) > 1
    ]
    by_rank = {
        rank: tuple(rank_hashes[name] for name in names) for rank, rank_hashes in hashes.items()
    }
    return odd_ones(by_rank), names


def _other_than_sealed(
    names: Sequence[str],
    hashes: Mapping[int, Mapping[str, int]],
    shards: Sequence[Mapping[str, ShardHash]],
) -> dict[int, list[str]]:
    """The weights that ranks have gathered otherwise than their owners sealed them."""
    flipped: dict[int, list[str]] = {}
    for name in names:
        truth = sum_of_shards([shards[rank][name] for rank in hashes if name in shards[rank]])
        for rank, rank_hashes in hashes.items():
            if truth is not None and (rank_hashes[name] - truth) % 2**64:
                flipped.setdefault(rank, []).append(name)
    return flipped


def sum_of_shards(shards: Sequence[ShardHash]) -> int | None:
    """Hash of a weight from those of its shards; None if they do not add up to it.

    >>> sum_of_shards([ShardHash(0, 4, 2, 5), ShardHash(4, 7, 2, 6), ShardHash(0, 4, 2, 5)])
    11
    >>> sum_of_shards([ShardHash(0, 3, 2, 5), ShardHash(3, 7, 2, 6)])  # within a word of 8 bytes
    """
    ordered = sorted(set(shards))  # replicas have the same
    ends = [0, *(shard.stop for shard in ordered)]
    joined = all(shard.start == end for shard, end in zip(ordered, ends, strict=False))
    if not ordered or not joined or any(shard.start * shard.itemsize % 8 for shard in ordered):
        return None
    return sum(shard.hash for shard in ordered)


def _flipped(rank: int, host: str, names: Sequence[str]) -> str:
    return f"rank {rank} on {host} has flipped bits in memory, in {_list(names)}"


def _differs(
    odd: Sequence[int], members: Sequence[int], hosts: Sequence[str], names: Sequence[str]
) -> str:
    if len(odd) == len(members):
        ranks = " and ".join(f"{rank} on {hosts[rank]}" for rank in odd[:2])
        return f"ranks {ranks} hold different copies of {_list(names)}, and one of them is wrong"
    ranks = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in odd)
    return f"{ranks} holds another {_list(names)} than {len(members) - len(odd)} others"


def _list(names: Sequence[str]) -> str:
    remainder = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {remainder} more" if remainder > 0 else "")


def exchanged(mesh: Mesh, value: Any) -> list[Any]:
    """All-gather objects; rare and small."""
    if len(mesh.members["world"]) == 1:
        return [value]
    values: list[Any] = [None] * len(mesh.members["world"])
    dist.all_gather_object(values, value)
    return values


def held_tensors(job: Job, updater: Updater) -> list[HeldTensor]:
    """Tensors that an update changes: weights, master weights and optimizer states."""
    return [*_shards(job, WEIGHTS, frozen=False), *_states(job, updater)]


def _shards(job: Job, kind: str, *, frozen: bool) -> Iterator[HeldTensor]:
    """The shards of weights that this rank owns."""
    for unit in job.units:
        if unit.unit.frozen == frozen and unit.options.disk is None:
            for shard in unit.owned:
                name = f"{kind} of {job.table[shard.row.name].name}"
                yield HeldTensor(name, shard.tensor, shard.start)


def _states(
    job: Job, updater: Updater, predicate: Callable[[int], bool] = lambda index: True
) -> list[HeldTensor]:
    """The states and master weights of what is owned, where they are beside the model."""
    names = [job.table[shard.row.name].name for shard in job.owned]
    return [
        HeldTensor(f"{'master weights' if key == MASTER else key} of {names[index]}", state.tensor)
        for key, states in updater.states().items()
        for index, state in enumerate(states)
        if predicate(index) and isinstance(state, StateInMemory)
        if state.tensor.device.type == job.mesh.device.type
    ]


def _lines(job: Job, updater: Updater) -> Iterator[CopyLine]:
    """Everything that this rank holds alike with others, by the role of the group."""
    by_role: dict[str, set[int]] = {}
    number = 0
    for unit in job.units:
        for piece in () if unit.unit.frozen else unit.owned:
            shard = job.shards[piece.row.name]
            for role in copy_roles(shard, piece.row.expert, unit.sliced):
                by_role.setdefault(role, set()).add(number)
            number += 1
    owned = job.owned
    for role, indices in sorted(by_role.items()):
        tensors = [
            HeldTensor(f"{WEIGHTS} of {job.table[owned[i].row.name].name}", owned[i].tensor)
            for i in sorted(indices)
            if owned[i].tensor.device.type == job.mesh.device.type
        ]
        tensors += _states(job, updater, indices.__contains__)
        yield CopyLine.of(job, role, tensors)
    for expert in (False, True):
        full = [
            HeldTensor(f"{WEIGHTS} of {job.table[name].name}", unit.full[start:stop])
            for unit in job.units
            if unit.unit.expert == expert and unit.sliced and not unit.sheds_weights
            for name, (start, stop) in unit.spans.items()
        ]
        role = data_role(expert, sliced=False)
        if full and role is not None:
            yield CopyLine.of(job, role, full, every_step=True)


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
