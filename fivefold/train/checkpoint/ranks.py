"""The ranks that save and load together. One rank alone runs the same lines, with no collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

import torch.distributed as dist

from fivefold.core.errors import FivefoldError

Part = TypeVar("Part")
Result = TypeVar("Result")


class CannotSave(FivefoldError):
    """A checkpoint that was not written; those before it are untouched."""


class RankFailure(Exception):
    """An error whose text is ready for a person: the file first, then what is wrong."""


class Failed(RankFailure):
    """What went wrong, rank by rank; all ranks raise it alike."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons
        super().__init__(reasons)

    def __str__(self) -> str:
        return "; ".join(self.reasons)


@dataclass(frozen=True)
class _Reason:
    text: str


class CheckpointRanks:
    """All ranks of a group that is used for nothing else: a thread may be the one that meets."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def together(
        self, part: Callable[[], Part], deal: Callable[[list[Part]], list[Result]]
    ) -> Result:
        """Each rank does its part; from all of them the first deals out what each gets.

        What one rank cannot do, none has done: `Failed` is raised on all.
        """
        mine = self._tried(part)
        parts = self._gather(mine)
        dealt: list[Result | Failed] | None = None
        if parts is not None:
            dealt = self._dealt(parts, deal)
        got = self._scatter(dealt)
        if isinstance(got, Failed):
            raise got
        return got

    def everyone(self, part: Callable[[], Part]) -> list[Part]:
        """Each rank does its part, and gets those of all."""
        return self.together(part, lambda parts: [parts] * self.size)

    def first(self, part: Callable[[], Result]) -> Result:
        """The first rank does it for all."""
        return self.together(lambda: None, lambda _: [part()] * self.size)

    def _tried(self, part: Callable[[], Part]) -> Part | _Reason:
        try:
            return part()
        except Exception as error:
            return _Reason(f"rank {self.rank}: {reason_of(error)}")

    def _dealt(
        self, parts: list[Part | _Reason], deal: Callable[[list[Part]], list[Result]]
    ) -> list[Result | Failed]:
        reasons = [each.text for each in parts if isinstance(each, _Reason)]
        if not reasons:
            dealt = self._tried(lambda: deal(cast(list[Part], parts)))
            if not isinstance(dealt, _Reason):
                return list(dealt)
            reasons = [dealt.text]
        return [Failed(reasons)] * self.size

    def _gather(self, mine: Part) -> list[Part] | None:
        """The parts of all, on the first rank."""
        if self.group is None:
            return [mine]
        parts = cast(list[Part], [None] * self.size) if self.rank == 0 else None
        dist.gather_object(mine, parts, dst=self._leader(), group=self.group)
        return parts

    def _scatter(self, dealt: list[Result] | None) -> Result:
        if self.group is None:
            assert dealt is not None
            return dealt[0]
        mine = cast(list[Result], [None])
        dist.scatter_object_list(mine, dealt, src=self._leader(), group=self.group)
        return mine[0]

    def _leader(self) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, 0)


def reason_of(error: BaseException) -> str:
    """One line for a person: where the system refused something, what and where."""
    if isinstance(error, RankFailure):
        return str(error)
    for each in _chain(error):
        if isinstance(each, OSError) and each.strerror:
            return f"{each.filename}: {each.strerror}" if each.filename else each.strerror
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it."""
    next_one: BaseException | None = error
    while next_one is not None:
        yield next_one
        next_one = next_one.__cause__ or next_one.__context__
