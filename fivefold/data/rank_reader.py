"""What one rank reads: the rows of its data rank, ahead of its steps, on its device.

Ranks that differ only in their tensor, pipeline or context coords read the same rows: every stage
counts the tokens of a step and needs their positions and documents, and context parallelism cuts
rows later. No rank reads the rows of another data rank.

A thread reads the next steps while a step runs. On a GPU it copies them from pinned memory on a
stream of its own. How far a run is counts in steps that were taken, not in rows that were read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fivefold.core.layout import Batch
from fivefold.data.batches import Samples, samples_from_rows
from fivefold.data.mixture import Source
from fivefold.data.rows import RowPlace, TokenRows, read_rows
from fivefold.model import TokenBatch

AHEAD = 3  # steps that are read before they are needed
_LAST_READ_S = 5.0  # that the end of a run waits for a read which is under way

T = TypeVar("T")


@dataclass(frozen=True)
class RankReader:
    """Reader of the rows of one data rank."""

    source: Source
    batch: Batch
    packed: bool
    dp_coord: int
    device: torch.device
    dropout_seed: int | None = None  # of training steps; None: nothing is dropped

    def step(self, first: int) -> Samples:
        """This rank's rows of the step that begins with this sample."""
        numbers = [first + row for row in self.batch.rows_of(self.dp_coord)]
        samples = self._samples(self.source.samples(numbers))
        if self.dropout_seed is None:
            return samples
        numbers += [0] * (samples.tokens[..., 0].numel() - len(numbers))  # nothing is lost of these
        return samples.drawing(self.dropout_seed, torch.tensor(numbers))

    @contextmanager
    def ahead(self, first: int, num_steps: int) -> Generator[Callable[[], list[TokenBatch]]]:
        """Prefetch the steps from sample `first` on in a thread; each call returns the microbatches
        of the next."""
        copier, size = SideCopier.of(self.device), self.batch.sequences
        steps = Prefetch(lambda i: copier.send(self.step(first + i * size)), num_steps)
        try:
            yield lambda: copier.receive(steps.take()).of(0)
        finally:
            steps.close()

    def rows(self, places: Sequence[RowPlace]) -> Iterator[list[TokenBatch]]:
        """Iterate over the microbatches of these rows, step by step.

        The rows of the last may not fill it; those that are missing have no loss.
        """
        size = self.batch.sequences
        for first in range(0, len(places), size):
            step_places = places[first : first + size]
            local_places = [
                step_places[row]
                for row in self.batch.rows_of(self.dp_coord)
                if row < len(step_places)
            ]
            yield self._samples(read_rows(local_places, self.batch.seq)).to(self.device).of(0)

    def _samples(self, rows: TokenRows) -> Samples:
        """The rows of a step; those that are missing at its end have no loss."""
        local_batch = replace(self.batch, dp=1, idle=0)
        missing = local_batch.sequences - len(rows.tokens)
        full = (np.pad(array, ((0, missing), (0, 0))) for array in rows)
        tokens, begins, silent = map(torch.from_numpy, full)
        masked = None
        if missing or silent.any():
            masked = silent[:, 1:].clone()  # the label of a token is the next one
            masked[len(rows.tokens) :] = True
            masked = masked.view(local_batch.microbatches, 1, -1, local_batch.seq)
        return samples_from_rows(local_batch, tokens, begins if self.packed else None, masked)


class SentSamples(NamedTuple):
    """Samples in a copy to a GPU, and the event after it; None on a CPU."""

    samples: Samples
    copied: torch.cuda.Event | None


@dataclass(frozen=True)
class SideCopier:
    """Copies samples to a device on a side stream: one thread sends, the computing thread receives.

    Without a stream, on a CPU, there is nothing to copy.
    """

    device: torch.device
    stream: torch.cuda.Stream | None

    @classmethod
    def of(cls, device: torch.device) -> SideCopier:
        """A copier with a stream of its own on a GPU."""
        return cls(device, torch.cuda.Stream(device) if device.type == "cuda" else None)

    def send(self, samples: Samples) -> SentSamples:
        """Start a copy. Torch reuses the pinned memory only after it."""
        if self.stream is None:
            return SentSamples(samples, None)
        torch.cuda.set_device(self.device)  # a thread begins on device 0
        with torch.cuda.stream(self.stream):
            copies = samples.map_tensors(lambda tensor: _copied(tensor, self.device))
            copied = torch.cuda.Event()
            copied.record(self.stream)
        return SentSamples(copies, copied)

    def receive(self, sent: SentSamples) -> Samples:
        """Make the current stream wait for the copy, without the host."""
        samples, copied = sent
        if copied is None:
            return samples
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(copied)

        def used(tensor: Tensor) -> Tensor:
            # Its memory belongs to the other stream, which could overwrite it after a release.
            tensor.record_stream(stream)
            return tensor

        return samples.map_tensors(used)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    # Positions may repeat one row without a copy, and such a tensor cannot be pinned.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


class Prefetch(Generic[T]):
    """Calls `make(0)` to `make(count - 1)` in a thread, at most `ahead` results before they are
    taken.

    What goes wrong in the thread is raised by `take`, after the results before it. The thread never
    keeps a process from ending.
    """

    def __init__(self, make: Callable[[int], T], count: int, ahead: int = AHEAD) -> None:
        self._make, self._count, self._ahead = make, count, ahead
        self._results: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fivefold-data", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """Wait for the next result, and return it."""
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._ended)
            if self._results:
                self._changed.notify_all()
                return self._results.popleft()
            assert self._error is not None, "more was taken than asked for"
            raise self._error

    def close(self) -> None:
        """End the thread, and drop prefetched results."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_LAST_READ_S)

    def _run(self) -> None:
        try:
            for number in range(self._count):
                with self._changed:
                    self._changed.wait_for(self._has_room)
                    if self._closed:
                        return
                result = self._make(number)
                with self._changed:
                    self._results.append(result)
                    self._changed.notify_all()
        except BaseException as error:  # whatever it is, the thread that takes must not wait
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._closed or len(self._results) < self._ahead
