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
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import fivefold
from fivefold.core.errors import BadFile, FivefoldError
from fivefold.records import RunStart, StepRecord, Summary, summarize

PLAN, RUN, SUMMARY = "plan.toml", "run.json", "summary.json"
METRICS, LOST, SAMPLES = "metrics.jsonl", "metrics.lost.jsonl", "samples.jsonl"
EVENTS, CHECKPOINTS = "events", "checkpoints"
_OURS = (RUN, PLAN, METRICS, LOST, SAMPLES, SUMMARY, EVENTS, CHECKPOINTS)
_GPUS = Path("/proc/driver/nvidia/gpus")
_GIT_SECONDS = 5.0


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
    former_plan: str | None = None  # that this start has replaced

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
        number, former = len(facts["starts"]), None
        if (path / PLAN).exists():
            former = (path / PLAN).read_text("utf-8")
            if number and former != plan_toml:  # it is saved under the number of its start
                write_atomically(path / f"plan.{number - 1}.toml", former)
        write_atomically(path / PLAN, plan_toml)
        facts["starts"].append({"began": time.time(), **_environment(), **settings})
        write_atomically(path / RUN, json.dumps(facts, indent=2) + "\n")
        starts = facts["starts"]
        return cls(path, number, starts[0]["began"], starts[-1]["began"], former)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The newest start of an existing run."""
        starts = _read_json(path / RUN)["starts"]
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
    starts = _starts(_read_json(path / RUN)["starts"])
    checkpoints = [*(path / CHECKPOINTS).glob("step-*/manifest.json")]
    records, lost = read_records(path / METRICS), read_records(path / LOST)
    return summarize(starts, records, lost, len(checkpoints))


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
    lines = path.read_bytes().decode(errors="replace").split("\n") if path.exists() else [""]
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = StepRecord.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            problem = f"line {number} is no record of a step ({error!r}): delete it"
            raise BadFile(str(path), [problem]) from error
        # An interrupted move between the files is repeated, so a record may occur twice.
        found[record.restart, record.step] = record
    return list(found.values())


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

    def append(self, record: StepRecord) -> None:
        """Write a line, without a buffer."""
        line = _lines([record]).encode()
        with naming_file(self.path):
            if self.file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self.file.close()


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
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadFile(str(path), [f"{error}; give the folder of a run"]) from error


def _environment() -> dict[str, object]:
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
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            asked, cwd=checkout, env=quiet, capture_output=True, text=True, timeout=_GIT_SECONDS
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
