"""Write the folder of a run: its plan, what ran it, one line for each step, and the summary.

Files are replaced atomically, by rename; lines are appended. A killed process can leave a partial
line at the end of a file, and the next start cuts it off. Nothing here loads torch, so a run can be
read on any machine.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.records import RunStart, StepRecord, Summary, stored_types, summarize
from fivefold.records.environment import environment
from fivefold.records.stored_types import check_start

PLAN, RUN, SUMMARY = "plan.toml", "run.json", "summary.json"
METRICS, LOST, SAMPLES = "metrics.jsonl", "metrics.lost.jsonl", "samples.jsonl"
EVENTS, CHECKPOINTS = "events", "checkpoints"
BAD_LINES, BAD_RUN = "metrics.bad.jsonl", "run.bad.json"
_OURS = (RUN, PLAN, METRICS, LOST, SAMPLES, SUMMARY, EVENTS, CHECKPOINTS)
_MOST_WAITING = 64 << 20  # bytes of lines that a full disk keeps in memory


def run_folder(parent: Path, name: str, newest: bool) -> Path:
    """The folder `name-N` with the next free number, or the newest that exists."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    taken = {
        int(found[1])
        for each in (parent.iterdir() if parent.is_dir() else ())
        if (found := re.fullmatch(rf"{re.escape(name)}-([0-9]{{1,9}})", each.name))
    }
    if newest and not taken:
        raise FivefoldError(
            f"no run of {name} in {parent} to resume: name its folder with --out, or leave "
            "--resume out"
        )
    return parent / f"{name}-{max(taken, default=0) + (not newest)}"


@dataclass(frozen=True)
class RunFolder:
    """One start of a run and its folder. Ranks may have copies."""

    path: Path
    restart: int  # from 0
    began: float  # when the run was first started, since the epoch
    started: float  # when this start began
    former_plan: str | None = field(default=None, compare=False)  # that this start has replaced

    @classmethod
    def create(
        cls, path: Path, plan_toml: str, settings: Mapping[str, object], resume: bool
    ) -> RunFolder:
        """Create a run; with `resume`, add a start to the run that exists.

        `settings` are written to `run.json` for this start, such as layout and world.
        """
        there = [name for name in _OURS if (path / name).exists()]
        if there and not resume:
            what = "a run already" if RUN in there else f"{' and '.join(there)} already"
            raise FivefoldError(
                f"{path} has {what}: continue it with --resume, or give another folder with --out"
            )
        with naming_file(path):
            path.mkdir(parents=True, exist_ok=True)
        facts: dict[str, Any] = {"id": uuid.uuid4().hex, "starts": []}
        if RUN in there:
            facts = _read_json(path / RUN)
            read_starts(path / RUN)
        number, former = len(facts["starts"]), None
        if (path / PLAN).exists():
            former = (path / PLAN).read_text("utf-8")
            if number and former != plan_toml:  # it is saved under the number of its start
                write_atomically(path / f"plan.{number - 1}.toml", former)
        write_atomically(path / PLAN, plan_toml)
        facts["starts"].append({"began": time.time(), **environment(), **settings})
        write_atomically(path / RUN, json.dumps(facts, indent=2) + "\n")
        starts = facts["starts"]
        return cls(path, number, starts[0]["began"], starts[-1]["began"], former)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The newest start of an existing run."""
        starts = read_starts(path / RUN)
        return cls(path, len(starts) - 1, starts[0]["began"], starts[-1]["began"])

    @property
    def identity(self) -> str:
        """The id of the run, the same for all its starts."""
        return str(_read_json(self.path / RUN)["id"])

    def end(self, why: str, spent: Mapping[str, float]) -> None:
        """Record a regular end of this start; `spent` has the seconds after its last step."""
        facts = _read_json(self.path / RUN)
        ended = {"at": time.time(), "why": why, "spent": dict(spent)}
        facts["starts"][self.restart]["ended"] = ended
        write_atomically(self.path / RUN, json.dumps(facts, indent=2) + "\n")

    def fail(self, why: str) -> None:
        """Record what ended this start, in the words of the process that saw it."""
        facts = _read_json(self.path / RUN)
        facts["starts"][self.restart]["failed"] = {"at": time.time(), "why": why}
        write_atomically(self.path / RUN, json.dumps(facts, indent=2) + "\n")

    def note_saves(self, step: int, every: int, why: str) -> None:
        """Record how often this start saves from a step on, and why."""
        facts = _read_json(self.path / RUN)
        saves = facts["starts"][self.restart].setdefault("saves", [])
        saves.append({"step": step, "every": every, "why": why})
        write_atomically(self.path / RUN, json.dumps(facts, indent=2) + "\n")

    def restore_plan(self) -> None:
        """Undo the change of the plan by a start that failed before its first step."""
        if self.former_plan is not None:
            write_atomically(self.path / PLAN, self.former_plan)

    def append_sample(self, step: int, prompt: str, text: str) -> None:
        """Add a completion that the model wrote after a step."""
        line = {"step": step, "restart": self.restart, "prompt": prompt, "text": text}
        path = self.path / SAMPLES
        cut_torn_line(path)
        with naming_file(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def summarize(self) -> Summary:
        """Summarize all starts so far, and write `summary.json`."""
        summary = read_summary(self.path)
        write_atomically(self.path / SUMMARY, json.dumps(summary.to_json(), indent=2) + "\n")
        return summary


def read_summary(path: Path) -> Summary:
    """The summary of a run, from its records."""
    starts = _starts(read_starts(path / RUN))
    checkpoints = [*(path / CHECKPOINTS).glob("step-*/manifest.json")]
    records, lost = read_records(path / METRICS), read_records(path / LOST)
    return summarize(starts, records, lost, len(checkpoints))


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts in `run.json`, at least one."""
    table = _read_json(path)
    try:
        starts = [check_start(each) for each in table["starts"]]
        if not starts:
            raise ValueError("it has no start")
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile(str(path), [f"{error}; give the folder of a run"]) from error
    return starts


def mend(path: Path) -> list[str]:
    """Make the files of a run readable again before it goes on; says what was wrong.

    Nothing is lost: lines that are no records move to `metrics.bad.jsonl`, and a `run.json` that is
    none to `run.bad.json`. Its starts are then made from the records.
    """
    said: list[str] = []
    for name in (METRICS, LOST):
        good, bad = _parted(path / name)
        if bad:
            with naming_file(path / BAD_LINES), (path / BAD_LINES).open("ab") as file:
                file.write(b"".join(bad))
            write_atomically(path / name, _lines(good))
            lines = "a line that was" if len(bad) == 1 else f"{len(bad)} lines that were"
            said.append(f"{path / name} had {lines} no record of a step, now in {BAD_LINES}")
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
            said.append(f"{path / RUN} was no record of a run ({why}), and is now {BAD_RUN}")
    return said


def _recovered(path: Path) -> list[dict[str, Any]]:
    """When each start began, as far as the records of its steps tell; nothing else is known."""
    records = [*read_records(path / METRICS), *read_records(path / LOST)]
    if not records:
        return []
    files = [each for each in (path / METRICS, path / LOST) if each.exists()]
    last = max(file.stat().st_mtime for file in files)
    began = last - max(each.wall for each in records)
    starts: list[dict[str, Any]] = []
    for number in range(1 + max(each.restart for each in records)):
        walls = [each.wall - each.elapsed for each in records if each.restart == number]
        starts.append({"began": max(0.0, began + (min(walls, default=0.0) if number else 0.0))})
    return starts


def _starts(tables: Sequence[Mapping[str, Any]]) -> list[RunStart]:
    """The starts of a run, in seconds since the first start."""
    first = tables[0]["began"]
    found: list[RunStart] = []
    for table in tables:
        began, ended = table["began"] - first, table.get("ended")
        if ended is None:
            found.append(RunStart(began, None, {}))
        else:
            found.append(RunStart(began, ended["at"] - first, ended["spent"]))
    return found


def read_records(path: Path) -> list[StepRecord]:
    """The records of a file, without a partial last line; none if there is no file."""
    found: dict[tuple[int, int], StepRecord] = {}
    for number, line in enumerate(_complete_lines(path), 1):
        record = _record_of(line)
        if isinstance(record, str):
            problem = (
                f"line {number} is no record of a step ({record}): `train --resume` moves it away, "
                "or delete it"
            )
            raise BadFile(str(path), [problem])
        # An interrupted move between the files is repeated, so a record may occur twice.
        found[record.restart, record.step] = record
    return list(found.values())


def _complete_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _record_of(line: bytes) -> StepRecord | str:
    """The record of a line, or why it is none."""
    try:
        return StepRecord.from_json(json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return repr(error)


def _parted(path: Path) -> tuple[list[StepRecord], list[bytes]]:
    """The records of a file, and the lines that are none."""
    found = [(line, _record_of(line)) for line in _complete_lines(path)]
    good = [record for _, record in found if isinstance(record, StepRecord)]
    return good, [line + b"\n" for line, record in found if isinstance(record, str)]


class Metrics:
    """Writes `metrics.jsonl`: one line for each step that counts, in order.

    The line of a step is written before its checkpoint is published, so that every step up to a
    checkpoint has its line.
    """

    def __init__(self, folder: Path, after: int) -> None:
        """Continue after step `after`; lines of later steps move to `metrics.lost.jsonl`."""
        self.path = folder / METRICS
        records = read_records(self.path)
        valid = [record for record in records if record.step <= after]
        lost = [record for record in records if record.step > after]
        if lost:
            before = read_records(folder / LOST)
            write_atomically(folder / LOST, _lines([*before, *lost]))
        write_atomically(self.path, _lines(valid))
        with naming_file(self.path):
            self.file = self.path.open("ab", buffering=0)
        self.waiting = b""  # what could not be written yet
        self.problem: str | None = None

    def append(self, record: StepRecord) -> str | None:
        """Write a line, without a buffer; returns what is wrong with the file, once.

        A full disk does not end the training: lines wait in memory until there is room.
        """
        if len(self.waiting) < _MOST_WAITING:
            self.waiting += _lines([record]).encode()
        return self._write()

    def close(self) -> str | None:
        """Close the file; returns what is lost with lines that still wait."""
        self._write()
        self.file.close()
        lines = self.waiting.count(b"\n")
        return f"{self.path}: the last {lines} lines could not be written" if lines else None

    def _write(self) -> str | None:
        before, self.problem = self.problem, None
        try:
            while self.waiting:
                written = self.file.write(self.waiting)
                if not written:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.waiting = self.waiting[written:]
        except OSError as error:
            self.problem = (
                f"cannot write {self.path}: {error.strerror or error}; the training goes on, and "
                "the lines of its steps wait in memory until there is room"
            )
        return None if before is not None else self.problem


class TimeSpent:
    """Measures the seconds that a run spends outside of its steps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def on(self, name: str) -> Generator[None]:
        """Add the time of the block to this name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds since the last call of this method."""
        taken, self.seconds = self.seconds, {}
        return taken


def write_atomically(path: Path, text: str) -> None:
    """Write a file under another name and rename it, so that it is never partial."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with naming_file(path):
        try:
            with beside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def cut_torn_line(path: Path) -> None:
    """Cut off a partial last line, which a killed process leaves."""
    if not path.exists():
        return
    with naming_file(path), path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - 65_536)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                file.truncate(begin + newline + 1)
                return
            end = begin
        file.truncate(0)


@contextlib.contextmanager
def naming_file(path: Path) -> Generator[None]:
    """Turn an `OSError` into an error that names the file and the way out."""
    try:
        yield
    except OSError as error:
        raise FivefoldError(
            f"cannot write {path}: {error.strerror or error}; give a folder that may be written "
            "and has room with --out, or make room and continue with --resume"
        ) from error


def _lines(records: list[StepRecord]) -> str:
    return "".join(json.dumps(record.to_json(), allow_nan=False) + "\n" for record in records)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return stored_types.table("the file", json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise BadFile(str(path), [f"{error}; give the folder of a run"]) from error
