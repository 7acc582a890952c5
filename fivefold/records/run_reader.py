"""Read the folder of a run: its records, its plan, and what its ranks did in one step; and mend
files that cannot be read.

Event files grow to hundreds of megabytes. The first line of every step is an anchor, and anchors
are in the order of starts and steps. So a step is found by bisection, and only its own lines are
read. Nothing here loads torch.
"""

from __future__ import annotations

import json
import time
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import Layout
from fivefold.core.model import TokenizerId
from fivefold.core.plan import Plan, PlanOptions, resolve
from fivefold.core.plan import read as read_plan
from fivefold.core.schedule import parse_steps
from fivefold.records import stored_types
from fivefold.records.run_writer import (
    BAD_RUN,
    CHECKPOINTS,
    EVENTS,
    LOST,
    METRICS,
    PLAN,
    RUN,
    SAMPLES,
    SUSPECT,
    lines_of,
    naming_file,
    read_bytes,
    read_lines,
    read_records,
    read_starts,
    write_atomically,
)
from fivefold.records.spans import (
    ActionSpan,
    CollectiveSpan,
    RankSpans,
    RunFacts,
    RunSample,
    StartFacts,
    StepSpans,
)
from fivefold.records.steps import RunStart, summarize

_ANCHOR = b'{"step": '
_CHUNK = 1 << 16
_MOST_RANKS = 256  # whose events of one step are read


def read(folder: Path) -> RunFacts:
    """The run in a folder, without the events of its ranks."""
    starts = _starts(folder / RUN)
    metrics, repeated = read_lines(folder / METRICS), read_lines(folder / LOST)
    records, lost = metrics.records, repeated.records
    plan, no_plan = _plan(folder, any(record.restart == len(starts) - 1 for record in records))
    checkpoints = [*(folder / CHECKPOINTS).glob("step-*/manifest.json")]
    files = [folder / name for name in (RUN, METRICS)]
    written = max(file.stat().st_mtime for file in files if file.exists())
    return RunFacts(
        name=folder.resolve().name,
        starts=starts,
        records=tuple(records),
        lost=tuple(lost),
        summary=summarize(
            [_since(start, starts[0]) for start in starts], records, lost, len(checkpoints)
        ),
        plan=plan,
        no_plan=no_plan,
        event_steps=_event_steps(folder),
        idle_s=max(0.0, time.time() - written),
        samples=_samples(folder / SAMPLES),
        recipe=_recipe(folder / PLAN),
        damage=tuple(damage for damage in (metrics.damage, repeated.damage) if damage is not None),
    )


def mend(path: Path) -> list[str]:
    """Make the files of a run readable again before it goes on; says what was wrong.

    Nothing is lost: lines that are no records move to `metrics.bad.jsonl`, and a `run.json` that is
    none to `run.bad.json`. Its starts are then made from the records.
    """
    problems: list[str] = []
    for name in (METRICS, LOST):
        lines = read_lines(path / name)
        if (damage := lines.move_damage()) is not None:
            write_atomically(path / name, lines_of(lines.records))
            problems.append(damage)
    if (path / RUN).exists():
        try:
            read_starts(path / RUN)
        except BadFile as error:
            with naming_file(path / RUN):
                (path / RUN).replace(path / BAD_RUN)
            if starts := _recovered(path):
                facts = {"id": uuid.uuid4().hex, "starts": starts}
                write_atomically(path / RUN, json.dumps(facts, indent=2) + "\n")
            why = error.problems[0].partition(";")[0]
            problems.append(f"{path / RUN} was no record of a run ({why}), and is now {BAD_RUN}")
    return problems


def _recovered(path: Path) -> list[dict[str, Any]]:
    """When each start began, as far as the records of its steps tell; nothing else is known."""
    files = [file for file in (path / METRICS, path / LOST) if file.exists()]
    records = [record for file in files for record in read_records(file)]
    if not records:
        return []
    last = max(file.stat().st_mtime for file in files)
    began = last - max(record.wall or 0.0 for record in records)
    starts: list[dict[str, Any]] = []
    for number in range(1 + max(record.restart for record in records)):
        same = [record for record in records if record.restart == number]
        walls = [
            step_record.wall - (step_record.elapsed or 0.0)
            for step_record in same
            if step_record.wall is not None
        ]
        starts.append({"began": max(0.0, began + (min(walls, default=0.0) if number else 0.0))})
    return starts


def tokenizer_of_run(folder: Path) -> TokenizerId | None:
    """The tokenizer of the newest start of a run that recorded one; None if none did."""
    starts = read_starts(folder / RUN) if (folder / RUN).is_file() else []
    tables = [start["tokenizer"] for start in starts if start.get("tokenizer")]
    names = [(table.get("name"), table.get("fingerprint")) for table in tables]
    return TokenizerId(*map(str, names[-1])) if names else None


def known_tokenizer(folder: Path) -> TokenizerId | None:
    """The tokenizer of a run whose weights are read: damaged records only leave it unknown."""
    try:
        return tokenizer_of_run(folder)
    except BadFile:
        return None


def options_of(folder: Path, step: int | Literal["best"] | None = None) -> PlanOptions:
    """The plan that made a checkpoint of a run, by default its newest one.

    The plan of the folder is that of the newest start, which may have saved nothing yet. It counts
    where a checkpoint carries none.
    """
    return read_plan(folder / PLAN, plan_text_of(folder, step))


def plan_text_of(folder: Path, step: int | Literal["best"] | None = None) -> str | None:
    """The plan that a checkpoint carries, as a file in the run folder; None if it has none."""
    checkpoints = _checkpoint_facts(folder)
    if step == "best":
        judged_by = options_of(folder).train.keep_best
        losses = {number: facts["evals"].get(judged_by) for number, facts in checkpoints.items()}
        known = [(loss, number) for number, loss in losses.items() if isinstance(loss, float)]
        step = min(known)[1] if known else None
    facts = checkpoints.get(max(checkpoints, default=0) if step is None else step, {})
    return facts["plan"] if facts.get("plan_in_run") is True else None


def _checkpoint_facts(folder: Path) -> dict[int, dict[str, Any]]:
    """The facts of checkpoints by step, without those that are suspect or cannot be read; whoever
    reads their tensors verifies them."""
    checkpoints: dict[int, dict[str, Any]] = {}
    for path in (folder / CHECKPOINTS).glob("step-*[0-9]/manifest.json"):
        if not path.is_file() or path.with_name(SUSPECT).exists():
            continue
        try:
            facts = stored_types.table("the file", json.loads(path.read_text("utf-8")))["facts"]
            if isinstance(facts["plan"], str) and isinstance(facts["evals"], dict):
                checkpoints[int(path.parent.name.removeprefix("step-"))] = facts
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            continue
    return checkpoints


def read_step(folder: Path, step: int) -> StepSpans | None:
    """What ranks did in a step, in the newest start that has events of it; None if none has."""
    starts = [number for number, (a, b) in _event_steps(folder).items() if a <= step <= b]
    if not starts:
        return None
    restart, rank_events = max(starts), dict[int, _RankEvents]()
    start = _starts(folder / RUN)[restart]
    for rank in _chosen(start):
        path = folder / EVENTS / f"rank-{rank:05d}.jsonl"
        events = _EventFile(path).events((restart, step))
        if events is not None:
            rank_events[rank] = events
    if not rank_events:
        return None
    zero = min(events.began for events in rank_events.values())
    ranks = {rank: events.aligned(rank, zero) for rank, events in rank_events.items()}
    return StepSpans(step, restart, int(start.facts.get("world", 1)), ranks)


def _chosen(start: StartFacts) -> list[int]:
    """All ranks; in a large job, the ranks of evenly spaced pipelines."""
    world = int(start.facts.get("world", 1))
    if world <= _MOST_RANKS:
        return list(range(world))
    columns = Layout.parse(start.facts["layout"]).groups("pp")
    stride = -(-world // _MOST_RANKS)
    return [rank for column in columns[::stride] for rank in column]


def _starts(path: Path) -> tuple[StartFacts, ...]:
    """The starts in `run.json`."""
    try:
        starts: list[StartFacts] = []
        for table in read_starts(path):
            ended: dict[str, Any] | None = table.get("ended")
            none = (None, None, dict[str, float]())
            end = none if ended is None else (ended["at"], ended["why"], ended["spent"])
            starts.append(StartFacts(table["began"], *end, table))
        return tuple(starts)
    except KeyError as error:
        raise BadFile(str(path), [f"{error!r}; give the folder of a run"]) from error


def _since(start: StartFacts, first: StartFacts) -> RunStart:
    """A start, in seconds since the first start."""
    ended = None if start.ended is None else start.ended - first.began
    return RunStart(start.began - first.began, ended, dict(start.spent))


def _plan(folder: Path, stepped: bool) -> tuple[Plan | None, str | None]:
    """The plan of the newest start, or why it cannot be read; without a step of that start, the
    plan of the newest checkpoint."""
    try:
        read_bytes(folder / PLAN)  # refuses a pipe
        return resolve(read_plan(folder / PLAN) if stepped else options_of(folder)), None
    except (FivefoldError, OSError) as error:
        return None, f"the plan of this run cannot be read again: {error}"


def _recipe(path: Path) -> dict[str, Any]:
    """Every key of a plan file with its value, tables as `table.key`; none if it is unreadable."""
    recipe: dict[str, Any] = {}

    def add(table: dict[str, Any], before: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                add(cast("dict[str, Any]", value), f"{before}{key}.")
            else:
                recipe[before + key] = value

    try:
        add(tomllib.loads(read_bytes(path).decode()), "")
    except (FivefoldError, ValueError):
        return {}
    return recipe


def _samples(path: Path) -> tuple[RunSample, ...]:
    """The newest sample of each step of each start; lines that a killed process cut are skipped."""
    samples: dict[tuple[int, int], RunSample] = {}
    lines = read_bytes(path).decode(errors="replace").split("\n")
    for line in lines:
        try:
            table = json.loads(line)
            step, restart = int(table["step"]), int(table["restart"])
            sample = RunSample(step, restart, str(table["prompt"]), str(table["text"]))
            samples[sample.restart, sample.step] = sample
        except (ValueError, KeyError, TypeError):
            continue
    return tuple(samples[key] for key in sorted(samples))


def _event_steps(folder: Path) -> dict[int, tuple[int, int]]:
    """For each start, the first and the last step with events."""
    path = min((folder / EVENTS).glob("rank-*.jsonl"), default=None)
    return {} if path is None else dict(_EventFile(path).starts())


class _Anchor(NamedTuple):
    """The first line of a step: its offset in the file, and when it was written."""

    offset: int
    key: tuple[int, int]  # restart, step
    shift: int  # from the rank's clock to the wall clock, in nanoseconds
    wall: int


class _RankEvents(NamedTuple):
    """The events of one rank in a step, in nanoseconds of the wall clock."""

    wall: int
    actions: list[tuple[str, int, int]]
    calls: list[tuple[str, int, int, int, int]]

    @property
    def began(self) -> int:
        return min((event[1] for event in (*self.actions, *self.calls)), default=self.wall)

    def aligned(self, rank: int, zero: int) -> RankSpans:
        """In seconds since `zero`, actions and collectives each sorted by their begin."""

        def since(moment: int) -> float:
            return (moment - zero) * 1e-9

        actions: list[ActionSpan] = []
        for name, begin, end in sorted(self.actions, key=lambda event: event[1]):
            (step,) = parse_steps([name], f"events of rank {rank}")
            actions.append(ActionSpan(step, since(begin), since(begin), since(end)))
        calls: list[CollectiveSpan] = []
        for name, begin, end, size, group in sorted(self.calls, key=lambda event: event[1]):
            axis, _, kind = name.partition("/")
            calls.append(CollectiveSpan(axis, kind, since(begin), since(end), size, group))
        return RankSpans(rank, since(self.wall), tuple(actions), tuple(calls))


class _EventFile:
    """A file `events/rank-*.jsonl`, of which only the lines of a step are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size if path.exists() else 0

    def starts(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Every start in the file, with its first and last step."""
        first = self._at_least((0, 0))
        while first is not None:
            restart = first.key[0]
            following = self._at_least((restart + 1, 0))
            last = self._before(self.size if following is None else following.offset)
            assert last is not None
            yield restart, (first.key[1], last.key[1])
            first = following

    def events(self, key: tuple[int, int]) -> _RankEvents | None:
        """The events of a step; lines that are partial or unknown are skipped."""
        anchor = self._at_least(key)
        if anchor is None or anchor.key != key:
            return None
        following = self._from(anchor.offset + 1)
        end = self.size if following is None else following.offset
        with self.path.open("rb") as file:
            file.seek(anchor.offset)
            lines = file.read(end - anchor.offset).split(b"\n")[1:]
        events = _RankEvents(anchor.wall, [], [])
        for line in lines:
            _add_event(events, line, anchor.shift)
        return events

    def _at_least(self, key: tuple[int, int]) -> _Anchor | None:
        """The first anchor of this step or a later one, by bisection."""
        low, high = 0, self.size
        while low < high:
            middle = (low + high) // 2
            anchor = self._from(middle)
            if anchor is None or anchor.key >= key:
                high = middle
            else:
                low = anchor.offset + 1
        return self._from(low)

    def _from(self, offset: int) -> _Anchor | None:
        """The first anchor that begins at an offset or after it."""
        if offset >= self.size:
            return None
        mark = b"\n" + _ANCHOR
        with self.path.open("rb") as file:
            if offset == 0 and (anchor := self._anchor(file.readline(), 0)):
                return anchor
            offset = max(0, offset - 1)  # the end of the line before
            while offset < self.size:
                file.seek(offset)
                text = file.read(_CHUNK + len(mark))
                at = text.find(mark)
                if at < 0:
                    offset += _CHUNK
                    continue
                file.seek(offset + at + 1)
                if anchor := self._anchor(file.readline(), offset + at + 1):
                    return anchor
                offset += at + 1
        return None

    def _before(self, offset: int) -> _Anchor | None:
        """The last anchor that begins before an offset."""
        while offset > 0:
            begin = max(0, offset - _CHUNK)
            anchor = self._from(begin)
            if anchor is not None and anchor.offset < offset:
                while (following := self._from(anchor.offset + 1)) and following.offset < offset:
                    anchor = following
                return anchor
            offset = begin
        return None

    def _anchor(self, line: bytes, offset: int) -> _Anchor | None:
        """The line as an anchor, if it is a complete one."""
        if not line.startswith(_ANCHOR) or not line.endswith(b"\n"):
            return None
        try:
            table = json.loads(line)
            wall, shift = table["wall_ns"], table["wall_ns"] - table["clock_ns"]
            return _Anchor(offset, (table["restart"], table["step"]), shift, wall)
        except (ValueError, KeyError, TypeError):
            return None


def _add_event(events: _RankEvents, line: bytes, shift: int) -> None:
    """Add the event of a line; skip a line that a killed process or a full disk has cut."""
    try:
        table = json.loads(line)
        name, begin, end = str(table["name"]), table["begin"] + shift, table["end"] + shift
        if table["kind"] == "action":
            parse_steps([name], "events")
            events.actions.append((name, begin, end))
        elif "/" in name:
            events.calls.append((name, begin, end, int(table["bytes"]), int(table["group"])))
    except (ValueError, KeyError, TypeError):
        return
