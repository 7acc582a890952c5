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
import platform
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import fivefold
from fivefold.core import BadFile, FivefoldError
from fivefold.core.plan import Plan
from fivefold.records import stored_types
from fivefold.records.steps import RunStart, StepRecord, Summary, summarize
from fivefold.records.stored_types import check_start

# What ran a training: the command, versions, the commit and the machine. No host names.

_GPUS = Path("/proc/driver/nvidia/gpus")
_GIT_SECONDS = 5.0


def environment() -> dict[str, object]:
    """Command, versions, commit and machine; no host names."""
    return {
        "command": sys.argv,
        "versions": {
            "fivefold": fivefold.__version__,
            "torch": metadata.version("torch"),
            "python": platform.python_version(),
        },
        "commit": commit_of(Path(fivefold.__file__).parent.parent),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "num_cpus": os.cpu_count(),
            "gpus": gpu_names(),
        },
    }


def commit_of(checkout: Path) -> str | None:
    """The commit of a checkout, with `-dirty` if files have changed; None if it is no checkout."""
    if not (checkout / ".git").exists():  # git would search the parent folders
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command, cwd=checkout, env=quiet, capture_output=True, text=True, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def gpu_names(folder: Path = _GPUS) -> list[str]:
    """The GPUs that the driver lists. CUDA is not used: after its start a process cannot fork."""
    names: list[str] = []
    for file in sorted(folder.glob("*/information")):
        lines = file.read_text("utf-8", errors="replace").splitlines()
        names += [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    return names


PLAN, RUN, SUMMARY = "plan.toml", "run.json", "summary.json"
METRICS, LOST, SAMPLES = "metrics.jsonl", "metrics.lost.jsonl", "samples.jsonl"
EVENTS, CHECKPOINTS = "events", "checkpoints"
SUSPECT = "suspect.txt"  # in a checkpoint that may hold flipped bits: why
BAD_LINES, BAD_RUN = "metrics.bad.jsonl", "run.bad.json"
_OURS = (RUN, PLAN, METRICS, LOST, SAMPLES, SUMMARY, EVENTS, CHECKPOINTS)
_MOST_WAITING = 64 << 20  # bytes of lines that a full disk keeps in memory
_RECORD_BEGIN = b'{"step": '  # of a line that `Metrics` writes
_MOST_RUNS = 5  # of damaged lines that are named


def run_folder(parent: Path, name: str, newest: bool) -> Path:
    """The folder `name-N` with the next free number, or the newest that exists."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", name)
    taken = {
        int(match[1])
        for path in (parent.iterdir() if parent.is_dir() else ())
        if (match := re.fullmatch(rf"{re.escape(name)}-([0-9]{{1,9}})", path.name))
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
        own_files = [name for name in _OURS if (path / name).exists()]
        if own_files and not resume:
            what = "a run already" if RUN in own_files else f"{' and '.join(own_files)} already"
            raise FivefoldError(
                f"{path} has {what}: continue it with --resume, or give another folder with --out"
            )
        with naming_file(path):
            path.mkdir(parents=True, exist_ok=True)
        facts: dict[str, Any] = {"id": uuid.uuid4().hex, "starts": []}
        if RUN in own_files:
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

    def plan_text(self, plan: Plan) -> str:
        """The plan as a file in this folder."""
        return plan.to_toml(self.path, full=True)

    @property
    def identity(self) -> str:
        """The id of the run, the same for all its starts."""
        return str(_read_json(self.path / RUN)["id"])

    def end(self, why: str, spent: Mapping[str, float]) -> str | None:
        """Record a regular end of this start; `spent` has the seconds after its last step.

        Returns why it cannot be recorded, which is no reason for the training to fail.
        """
        ended = {"at": time.time(), "why": why, "spent": dict(spent)}
        # A launcher may start a finished job again, which does not move its end.
        return self._record("the end of the run", lambda start: start.setdefault("ended", ended))

    def fail(self, why: str) -> str | None:
        """Record what ended this start, in the words of the process that saw it."""
        failed = {"failed": {"at": time.time(), "why": why}}
        return self._record("this failure", lambda start: start.update(failed))

    def note_saves(self, step: int, every: int, why: str) -> str | None:
        """Record how often this start saves from a step on, and why."""
        noted = {"step": step, "every": every, "why": why}
        return self._record(
            "how often it saves", lambda start: start.setdefault("saves", []).append(noted)
        )

    def _record(self, what: str, change: Callable[[dict[str, Any]], object]) -> str | None:
        """Change the facts of this start; returns why they cannot be, as with a damaged file."""
        try:
            facts = _read_json(self.path / RUN)
            change(facts["starts"][self.restart])
            write_atomically(self.path / RUN, json.dumps(facts, indent=2) + "\n")
        except (FivefoldError, LookupError, TypeError, AttributeError) as error:
            return f"{what} is not recorded: {error}"
        return None

    def restore_plan(self) -> None:
        """Undo the change of the plan by a start that failed before its first checkpoint."""
        if self.former_plan is not None:
            write_atomically(self.path / PLAN, self.former_plan)

    def append_sample(self, step: int, prompt: str, text: str) -> None:
        """Add a completion that the model wrote after a step."""
        line = {"step": step, "restart": self.restart, "prompt": prompt, "text": text}
        path = self.path / SAMPLES
        cut_torn_line(path)
        with naming_file(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def summarize(self, warn: Callable[[str], None] = lambda damage: None) -> Summary:
        """Summarize all starts so far, and write `summary.json`; `warn` gets what is damaged."""
        summary = read_summary(self.path, warn)
        write_atomically(self.path / SUMMARY, json.dumps(summary.to_json(), indent=2) + "\n")
        return summary


def read_summary(path: Path, warn: Callable[[str], None] = lambda damage: None) -> Summary:
    """The summary of a run, from its records."""
    # The starts of a run, in seconds since the first start.
    tables = read_starts(path / RUN)
    first = tables[0]["began"]
    starts: list[RunStart] = []
    for table in tables:
        began, ended = table["began"] - first, table.get("ended")
        if ended is None:
            starts.append(RunStart(began, None, {}))
        else:
            starts.append(RunStart(began, ended["at"] - first, ended["spent"]))
    checkpoints = [*(path / CHECKPOINTS).glob("step-*/manifest.json")]
    metrics, lost = read_lines(path / METRICS), read_lines(path / LOST)
    for damage in (metrics.damage, lost.damage):
        if damage is not None:
            warn(damage)
    return summarize(starts, metrics.records, lost.records, len(checkpoints))


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts in `run.json`, at least one."""
    table = _read_json(path)
    try:
        starts = [check_start(start) for start in table["starts"]]
        if not starts:
            raise ValueError("it has no start")
    except (ValueError, KeyError, TypeError) as error:
        raise BadFile(str(path), [f"{error}; give the folder of a run"]) from error
    return starts


def read_records(path: Path) -> list[StepRecord]:
    """The records of a file, without its damage; none if there is no file."""
    return read_lines(path).records


class RecordLines(NamedTuple):
    """The lines of a file of records: its records, and by its number each line that is damaged.

    A line that was cut may have a record after it, which counts.
    """

    path: Path
    records: list[StepRecord]
    damaged: dict[int, tuple[bytes, str]]  # the line, and what is wrong with it

    @property
    def damage(self) -> str | None:
        """Which lines are damaged, in one sentence; None if none is."""
        if not self.damaged:
            return None
        first, (_, why) = next(iter(self.damaged.items()))
        several = len(self.damaged) > 1
        which = f"{_numbers(list(self.damaged))} are no records of steps ({first}: {why})"
        line = f"{first} is no record of a step ({why})"
        return f"{self.path} is damaged: {f'lines {which}' if several else f'line {line}'}"

    def move_damage(self) -> str | None:
        """Append damaged lines to `metrics.bad.jsonl`; the sentence on them."""
        if self.damaged:
            target = self.path.with_name(BAD_LINES)
            with naming_file(target), target.open("ab") as file:
                file.write(b"".join(line + b"\n" for line, _ in self.damaged.values()))
        return self.damage and f"{self.damage}; moved to {BAD_LINES}"


def read_bytes(path: Path) -> bytes:
    """The content of a file of a run; nothing if there is none. To open a pipe or a device may wait
    for ever."""
    try:
        if path.exists() and not path.is_file():
            raise BadFile(str(path), ["is no regular file; move it away"])
        return path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise BadFile(str(path), [f"{error.strerror}; give a folder that can be read"]) from error


def read_lines(path: Path) -> RecordLines:
    """Read a file of records, without a partial last line; empty if there is no file."""
    records: dict[tuple[int, int], StepRecord] = {}
    damaged: dict[int, tuple[bytes, str]] = {}
    lines = read_bytes(path).split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        record = _record_of(line)
        if isinstance(record, str):
            damaged[number] = line, record
            record = _record_of(line[max(0, line.rfind(_RECORD_BEGIN)) :])
        # An interrupted move between the files is repeated, so a record may occur twice.
        if not isinstance(record, str):
            records[record.restart, record.step] = record
    return RecordLines(path, list(records.values()), damaged)


def _record_of(line: bytes) -> StepRecord | str:
    """The record of a line, or why it is none."""
    try:
        table = json.loads(line)
    except (ValueError, RecursionError):
        return "no JSON"
    try:
        return StepRecord.from_json(stored_types.table("the line", table))
    except KeyError as error:
        return f"no {error.args[0]}"
    except (ValueError, TypeError) as error:
        return str(error)


def _numbers(numbers: Sequence[int]) -> str:
    """Numbers in words, runs of them by their ends.

    >>> _numbers([2, 3, 4, 9])
    '2 to 4, 9'
    """
    first = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    last = [n for i, n in enumerate(numbers) if numbers[i + 1 : i + 2] != [n + 1]]
    runs = [f"{a} to {b}" if a < b else f"{a}" for a, b in zip(first, last, strict=True)]
    suffix = [f"and {len(runs) - _MOST_RUNS} more places"] if len(runs) > _MOST_RUNS else []
    return ", ".join([*runs[:_MOST_RUNS], *suffix])


class Metrics:
    """Writes `metrics.jsonl`: one line for each step that counts, in order.

    The line of a step is written before its checkpoint is published, so that every step up to a
    checkpoint has its line.
    """

    def __init__(self, folder: Path, after: int) -> None:
        """Continue after step `after`; lines of later steps move to `metrics.lost.jsonl`."""
        self.path = folder / METRICS
        lines = read_lines(self.path)
        self.damage, records = lines.move_damage(), lines.records
        valid = [record for record in records if record.step <= after]
        lost = [record for record in records if record.step > after]
        if lost:
            before = read_records(folder / LOST)
            write_atomically(folder / LOST, lines_of([*before, *lost]))
        write_atomically(self.path, lines_of(valid))
        with naming_file(self.path):
            self.file = self.path.open("ab", buffering=0)
        self.waiting = b""  # what could not be written yet
        self.problem: str | None = None

    def append(self, record: StepRecord) -> str | None:
        """Write a line, without a buffer; returns what is wrong with the file, once.

        A full disk does not end the training: lines wait in memory until there is room.
        """
        if len(self.waiting) < _MOST_WAITING:
            self.waiting += lines_of([record]).encode()
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


def lines_of(records: Sequence[StepRecord]) -> str:
    """Records as lines of JSON."""
    return "".join(json.dumps(record.to_json(), allow_nan=False) + "\n" for record in records)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise BadFile(str(path), ["No such file or directory; give the folder of a run"])
    try:
        return stored_types.table("the file", json.loads(read_bytes(path)))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadFile(str(path), [f"{error}; give the folder of a run"]) from error
