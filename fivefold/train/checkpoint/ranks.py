"""The ranks that save and load a checkpoint together: all of them succeed, or all raise the same
error. One rank alone runs the same code without a message.

Values go up a tree and are merged on the way: first among eight neighbours, which usually share a
host, then among eight such eights, and so on. The result comes down the same way. So a rank has at
most seven children a level, and neither messages nor open files grow with the job but by levels.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core import FivefoldError

Part = TypeVar("Part")
Result = TypeVar("Result")


class CannotSave(FivefoldError):
    """A checkpoint was not written; earlier ones are intact."""


class RunTakenOver(FivefoldError):
    """Another start owns the run: this one may not publish."""


class RankFailure(Exception):
    """An error with a text for the user: the file, then the problem."""


class RanksFailed(RankFailure):
    """Errors by rank; every rank raises the same."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons
        super().__init__(reasons)

    def __str__(self) -> str:
        return "; ".join(self.reasons)


@dataclass(frozen=True)
class _Reasons:
    texts: tuple[str, ...]


FAN_OUT = 8  # children of a node, itself among them: the ranks of a host


class CheckpointRanks:
    """Ranks of a group for checkpoints alone, since a background thread may use it."""

    def __init__(
        self, group: dist.ProcessGroup | None, first: int = 0, size: int | None = None
    ) -> None:
        """Of the group the `size` ranks from `first` on; by default all."""
        self.group, self.first = group, first
        self.rank = 0 if group is None else dist.get_rank(group) - first
        self.size = size or (1 if group is None else dist.get_world_size(group))

    def neighbours(self, size: int) -> CheckpointRanks:
        """The block of so many consecutive ranks that this one is in."""
        first = self.rank // size * size
        return CheckpointRanks(self.group, self.first + first, min(size, self.size - first))

    def exchange(
        self,
        work: Callable[[], Part],
        merge: Callable[[list[Part]], Part],
        finish: Callable[[Part], Result],
    ) -> Result:
        """Run `work` on each rank, merge the values in the order of ranks, and `finish` on the
        first: all return what it returns.

        If one rank fails, `RanksFailed` is raised on all.
        """
        value: Any = self._collect(self._try(work), merge)
        if not self.rank and not isinstance(value, _Reasons):
            value = self._try(lambda: finish(value))
        data = self.receive(self.parent) if self.rank else b""
        if self.children:
            data = data or pickle.dumps(value)
            self.send(data, self.children)()
        return self._result(pickle.loads(data) if self.rank else value)

    def gather(self, work: Callable[[], Part], finish: Callable[[list[Part]], Result]) -> Result:
        """Run `work` on each rank, and `finish` on the first with the values of all."""
        return self.exchange(lambda: [work()], joined, finish)

    def ask(self, work: Callable[[], Part], answer: Callable[[list[Part]], list[Result]]) -> Result:
        """Run `work` on each rank; the first answers all values, and each rank gets its answer."""
        values: Any = self._collect(self._try(lambda: [work()]), joined)
        answers: Any = values
        if self.rank:
            answers = pickle.loads(self.receive(self.parent))
        elif not isinstance(values, _Reasons):
            answers = self._try(lambda: answer(values))
        failed = isinstance(answers, _Reasons)
        for child, stop in pairwise([*self.children, self.rank + (0 if failed else len(answers))]):
            theirs = answers if failed else answers[child - self.rank : stop - self.rank]
            self.send(pickle.dumps(theirs), [child])()
        return self._result(answers if failed else answers[0])

    def deliver(self, messages: Mapping[int, object], sources: Iterable[int]) -> dict[int, Any]:
        """Send a message to each of these ranks, and receive one from each source."""
        waits = [self.send(pickle.dumps(value), [rank]) for rank, value in messages.items()]
        received = {rank: pickle.loads(self.receive(rank)) for rank in sources}
        for wait in waits:
            wait()
        return received

    def on_all(self, work: Callable[[], object]) -> None:
        """Run `work` on each rank; returns when all have ended."""
        self.exchange(work, lambda _: None, lambda _: None)

    def on_first(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the first rank, and broadcast the result."""
        return self.exchange(lambda: None, lambda _: None, lambda _: work())

    def _try(self, work: Callable[[], Part]) -> Part | _Reasons:
        try:
            return work()
        except RanksFailed as failed:  # of its neighbours, each of which says the same
            return _Reasons(tuple(failed.reasons))
        except Exception as error:
            return _Reasons((f"rank {self.first + self.rank}: {reason_of(error)}",))

    def _collect(
        self, value: Part | _Reasons, merge: Callable[[list[Part]], Part]
    ) -> Part | _Reasons:
        """Merge the values of all ranks below this one, and send the result to its parent."""
        values = [value, *(pickle.loads(self.receive(child)) for child in self.children)]
        texts = [text for value in values if isinstance(value, _Reasons) for text in value.texts]
        merged = _Reasons(tuple(dict.fromkeys(texts)))
        if not texts:
            merged = self._try(lambda: merge(cast(list[Part], values)))
        if self.rank:
            self.send(pickle.dumps(merged), [self.parent])()
        return merged

    def _result(self, value: Result | _Reasons) -> Result:
        if isinstance(value, _Reasons):
            raise RanksFailed(list(value.texts))
        return value

    @property
    def children(self) -> list[int]:
        """Ranks that send to this one, by number."""
        children, stride = list[int](), 1
        while stride < self.size and self.rank % (FAN_OUT * stride) == 0:
            last = min(self.rank + FAN_OUT * stride, self.size)
            children += range(self.rank + stride, last, stride)
            stride *= FAN_OUT
        return children

    @property
    def parent(self) -> int:
        """Where this rank sends to."""
        stride = FAN_OUT
        while self.rank % stride == 0:
            stride *= FAN_OUT
        return self.rank - self.rank % stride

    def send(self, data: bytes, ranks: Iterable[int]) -> Callable[[], None]:
        """Send bytes to ranks; returns a function that waits for it."""
        tensors = torch.tensor([len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8)
        waits = [self.post(tensor, rank) for rank in ranks for tensor in tensors]

        def wait_all() -> None:
            for wait in waits:
                wait()

        return wait_all

    def receive(self, rank: int) -> bytes:
        """Receive what a rank sends."""
        size = int(self.fill(torch.empty(1, dtype=torch.int64), rank))
        return self.fill(torch.empty(size, dtype=torch.uint8), rank).numpy().tobytes()

    def post(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        """Send a tensor of the host to a rank; returns a function that waits for it."""
        work = dist.isend(tensor, group=self.group, group_dst=self.first + rank)
        assert work is not None, "a rank sends to others of its group"

        def wait(_borrowed: Tensor = tensor) -> None:
            work.wait()

        return wait

    def fill(self, tensor: Tensor, rank: int) -> Tensor:
        """Receive a tensor from a rank."""
        dist.recv(tensor, group=self.group, group_src=self.first + rank)
        return tensor


def joined(lists: list[list[Part]]) -> list[Part]:
    """Concatenate lists."""
    return [value for values in lists for value in values]


def reason_of(error: BaseException) -> str:
    """Format an error in one line, with the file and reason of an OSError."""
    if isinstance(error, RankFailure):
        return str(error)
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.filename}: {cause.strerror}" if cause.filename else cause.strerror
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__
