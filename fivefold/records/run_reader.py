"""A run's folder as values: its records, its plan, and what its ranks did in one step.

Nothing here loads torch. Files of events grow to hundreds of megabytes: their anchors come in the
order of starts and steps, so a step is found by halving the file, and only its own lines are read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan, resolve
from fivefold.core.plan import read as read_plan
from fivefold.core.schedule import parse_steps
from fivefold.records import RunStart, summarize
from fivefold.records.run_folder import CHECKPOINTS, EVENTS, LOST, METRICS, PLAN, RUN, read_records
from fivefold.records.spans import (
    ActionSpan,
    CollectiveSpan,
    RankSpans,
    RunFacts,
    StartFacts,
    StepSpans,
)

_ANCHOR = b'{"step": '
_CHUNK = 1 << 16
_MOST_RANKS = 256  # of which one step is read


def read(folder: Path) -> RunFacts:
    """All that a run's folder says, but for what its ranks did when."""
    starts, (plan, no_plan) = _starts(folder / RUN), _plan(folder / PLAN)
    kept, lost = read_records(folder / METRICS), read_records(folder / LOST)
    checkpoints = [*(folder / CHECKPOINTS).glob("step-*/manifest.json")]
    files = [folder / name for name in (RUN, METRICS)]
    written = max(file.stat().st_mtime for file in files if file.exists())
    return RunFacts(
        name=folder.resolve().name,
        starts=starts,
        kept=tuple(kept),
        lost=tuple(lost),
        summary=summarize([_since(one, starts[0]) for one in starts], kept, lost, len(checkpoints)),
        plan=plan,
        no_plan=no_plan,
        told=_told(folder),
        silence=max(0.0, time.time() - written),
    )


def read_step(folder: Path, step: int) -> StepSpans | None:
    """What ranks did in a step, as the newest start that ran it tells; None where none does."""
    starts = [number for number, (a, b) in _told(folder).items() if a <= step <= b]
    if not starts:
        return None
    restart, found = max(starts), dict[int, _Told]()
    start = _starts(folder / RUN)[restart]
    for rank in _chosen(start):
        told = _EventFile(_path(folder, rank)).told((restart, step))
        if told is not None:
            found[rank] = told
    if not found:
        return None
    zero = min(told.began for told in found.values())
    ranks = {rank: told.aligned(rank, zero) for rank, told in found.items()}
    return StepSpans(step, restart, int(start.facts.get("world", 1)), ranks)


def _path(folder: Path, rank: int) -> Path:
    return folder / EVENTS / f"rank-{rank:05d}.jsonl"


def _chosen(start: StartFacts) -> list[int]:
    """All ranks, or of many the ranks of evenly many whole pipelines."""
    world = int(start.facts.get("world", 1))
    if world <= _MOST_RANKS:
        return list(range(world))
    columns = Layout.parse(start.facts["layout"]).groups("pp")
    stride = -(-world // _MOST_RANKS)
    return [rank for column in columns[::stride] for rank in column]


def _starts(path: Path) -> tuple[StartFacts, ...]:
    """The starts in `run.json`."""
    try:
        tables = cast("list[dict[str, Any]]", json.loads(path.read_text("utf-8"))["starts"])
        found: list[StartFacts] = []
        for table in tables:
            ended: dict[str, Any] | None = table.get("ended")
            none = (None, None, dict[str, float]())
            end = none if ended is None else (ended["at"], ended["why"], ended["spent"])
            found.append(StartFacts(table["began"], *end, table))
        if not found:
            raise KeyError("starts")
        return tuple(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadFile(str(path), [f"{error!r}; give the folder of a run"]) from error


def _since(one: StartFacts, first: StartFacts) -> RunStart:
    """A start in seconds since the first."""
    ended = None if one.ended is None else one.ended - first.began
    return RunStart(one.began - first.began, ended, dict(one.spent))


def _plan(path: Path) -> tuple[Plan | None, str | None]:
    """The plan that the newest start ran, or why there is none."""
    try:
        return resolve(read_plan(path)), None
    except (FivefoldError, OSError) as error:
        return None, f"the plan of this run cannot be read again: {error}"


def _told(folder: Path) -> dict[int, tuple[int, int]]:
    """The first and the last step that each start has events of, by its number."""
    path = min((folder / EVENTS).glob("rank-*.jsonl"), default=None)
    return {} if path is None else dict(_EventFile(path).starts())


class _Anchor(NamedTuple):
    """Where the line of a step begins in a file, and when it was written, in both clocks."""

    place: int
    key: tuple[int, int]  # restart, step
    shift: int  # from the rank's clock to the wall's, in nanoseconds
    wall: int


class _Told(NamedTuple):
    """One rank's step: nanoseconds of the wall clock."""

    wall: int
    actions: list[tuple[str, int, int]]
    calls: list[tuple[str, int, int, int, int]]

    @property
    def began(self) -> int:
        return min((one[1] for one in (*self.actions, *self.calls)), default=self.wall)

    def aligned(self, rank: int, zero: int) -> RankSpans:
        """In seconds since `zero`, each kind in the order of its beginnings."""

        def since(moment: int) -> float:
            return (moment - zero) * 1e-9

        actions: list[ActionSpan] = []
        for name, begin, end in sorted(self.actions, key=lambda one: one[1]):
            (step,) = parse_steps([name], f"events of rank {rank}")
            actions.append(ActionSpan(step, since(begin), since(begin), since(end)))
        calls: list[CollectiveSpan] = []
        for name, begin, end, size, group in sorted(self.calls, key=lambda one: one[1]):
            axis, _, kind = name.partition("/")
            calls.append(CollectiveSpan(axis, kind, since(begin), since(end), size, group))
        return RankSpans(rank, since(self.wall), tuple(actions), tuple(calls))


class _EventFile:
    """`events/rank-*.jsonl`, read where it is looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size if path.exists() else 0

    def starts(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Every start in the file, with its first and its last step."""
        first = self._at_least((0, 0))
        while first is not None:
            restart = first.key[0]
            following = self._at_least((restart + 1, 0))
            last = self._before(self.size if following is None else following.place)
            assert last is not None
            yield restart, (first.key[1], last.key[1])
            first = following

    def told(self, key: tuple[int, int]) -> _Told | None:
        """The spans of a step; lines that are torn or strange are passed over."""
        anchor = self._at_least(key)
        if anchor is None or anchor.key != key:
            return None
        following = self._behind(anchor.place + 1)
        end = self.size if following is None else following.place
        with self.path.open("rb") as file:
            file.seek(anchor.place)
            lines = file.read(end - anchor.place).split(b"\n")[1:]
        told = _Told(anchor.wall, [], [])
        for line in lines:
            _keep(told, line, anchor.shift)
        return told

    def _at_least(self, key: tuple[int, int]) -> _Anchor | None:
        """The first anchor of this step or a later one, found by halving."""
        low, high = 0, self.size
        while low < high:
            middle = (low + high) // 2
            found = self._behind(middle)
            if found is None or found.key >= key:
                high = middle
            else:
                low = found.place + 1
        return self._behind(low)

    def _behind(self, place: int) -> _Anchor | None:
        """The first anchor that begins here or behind."""
        if place >= self.size:
            return None
        mark = b"\n" + _ANCHOR
        with self.path.open("rb") as file:
            if place == 0 and (found := self._anchor(file.readline(), 0)):
                return found
            place = max(0, place - 1)  # the end of the line before
            while place < self.size:
                file.seek(place)
                text = file.read(_CHUNK + len(mark))
                at = text.find(mark)
                if at < 0:
                    place += _CHUNK
                    continue
                file.seek(place + at + 1)
                if found := self._anchor(file.readline(), place + at + 1):
                    return found
                place += at + 1
        return None

    def _before(self, place: int) -> _Anchor | None:
        """The last anchor that begins before a place."""
        while place > 0:
            begin = max(0, place - _CHUNK)
            found = self._behind(begin)
            if found is not None and found.place < place:
                while (following := self._behind(found.place + 1)) and following.place < place:
                    found = following
                return found
            place = begin
        return None

    def _anchor(self, line: bytes, place: int) -> _Anchor | None:
        """The line as an anchor, where it is a whole one."""
        if not line.startswith(_ANCHOR) or not line.endswith(b"\n"):
            return None
        try:
            table = json.loads(line)
            wall, shift = table["wall_ns"], table["wall_ns"] - table["clock_ns"]
            return _Anchor(place, (table["restart"], table["step"]), shift, wall)
        except (ValueError, KeyError, TypeError):
            return None


def _keep(told: _Told, line: bytes, shift: int) -> None:
    """Add the span of a line; one that a killed process or a full disk cut is left out."""
    try:
        table = json.loads(line)
        name, begin, end = str(table["name"]), table["begin"] + shift, table["end"] + shift
        if table["kind"] == "action":
            parse_steps([name], "events")
            told.actions.append((name, begin, end))
        elif "/" in name:
            told.calls.append((name, begin, end, int(table["bytes"]), int(table["group"])))
    except (ValueError, KeyError, TypeError):
        return
