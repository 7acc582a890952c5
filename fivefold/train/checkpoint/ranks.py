"""The ranks that save and load a checkpoint together: all of them succeed, or all raise the same
error. One rank alone runs the same code without a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

import torch.distributed as dist

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
class _Reason:
    text: str


class CheckpointRanks:
    """Ranks of a group for checkpoints alone, since a background thread may use it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._first = 0 if group is None else dist.get_global_rank(group, 0)

    def exchange(
        self, work: Callable[[], Part], combine: Callable[[list[Part]], list[Result]]
    ) -> Result:
        """Run `work` on each rank; the first combines the values into a result for each.

        If one rank fails, `RanksFailed` is raised on all.
        """
        parts = self._gather(self._try(work))
        result = self._scatter(None if parts is None else self._combine(parts, combine))
        if isinstance(result, RanksFailed):
            raise result
        return result

    def on_all(self, work: Callable[[], Part]) -> list[Part]:
        """Run `work` on each rank, and all-gather the results."""
        return self.exchange(work, lambda parts: [parts] * self.size)

    def on_first(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the first rank, and broadcast the result."""
        return self.exchange(lambda: None, lambda _: [work()] * self.size)

    def _try(self, work: Callable[[], Part]) -> Part | _Reason:
        try:
            return work()
        except Exception as error:
            return _Reason(f"rank {self.rank}: {reason_of(error)}")

    def _combine(
        self, parts: list[Part | _Reason], combine: Callable[[list[Part]], list[Result]]
    ) -> list[Result | RanksFailed]:
        reasons = [part.text for part in parts if isinstance(part, _Reason)]
        if not reasons:
            results = self._try(lambda: combine(cast(list[Part], parts)))
            if not isinstance(results, _Reason):
                return list(results)
            reasons = [results.text]
        return [RanksFailed(reasons)] * self.size

    def _gather(self, local_part: Part) -> list[Part] | None:
        """The parts of all ranks, on the first."""
        if self.group is None:
            return [local_part]
        parts = cast(list[Part], [None] * self.size) if self.rank == 0 else None
        dist.gather_object(local_part, parts, dst=self._first, group=self.group)
        return parts

    def _scatter(self, results: list[Result] | None) -> Result:
        if self.group is None:
            assert results is not None
            return results[0]
        output = cast(list[Result], [None])
        dist.scatter_object_list(output, results, src=self._first, group=self.group)
        return output[0]


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
