"""What run folders are called where nobody says."""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import fivefold
from fivefold.core.errors import BadFile, FivefoldError
from fivefold.records import RunStart, StepRecord, Summary, summarize


def run_folder(parent: Path, name: str, newest: bool) -> Path:
    """The next free folder of this name and a number, or the newest there is."""
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


# The folder of a run: its plan, what ran it, a line for every step, and the summary.
#
# Nothing here loads torch, so that a run can be read on any machine. Files are replaced whole, by
# rename; lines are appended. A process that is killed can leave half a line at the end of a file,
# which whoever comes next cuts off.


PLAN, RUN, METRICS, LOST, SUMMARY = (
    "plan.toml",
    "run.json",
    "metrics.jsonl",
    "metrics.lost.jsonl",
    "summary.json",
)
EVENTS, CHECKPOINTS = "events", "checkpoints"
_OURS = (RUN, PLAN, METRICS, LOST, SUMMARY, EVENTS, CHECKPOINTS)
_GPUS = Path("/proc/driver/nvidia/gpus")
_GIT_SECONDS = 5.0


@dataclass(frozen=True)
class RunFolder:
    """One start of a run, as a folder knows it. Made once a start; ranks may have copies."""

    path: Path
    restart: int  # from 0
    began: float  # when the run was first started, since the epoch

    @classmethod
    def create(
        cls, path: Path, plan_toml: str, settings: Mapping[str, object], resume: bool
    ) -> RunFolder:
        """A new run, or where it shall `resume` and there is one, its next start.

        `settings` are facts of this start for `run.json`, such as layout and world.
        """
        there = [name for name in _OURS if (path / name).exists()]
        if there and not resume:
            what = "a run already" if RUN in there else f"{' and '.join(there)} already"
            raise FivefoldError(
                f"{path} has {what}: continue it with --resume, or give another folder with --out"
            )
        with said_of(path):
            path.mkdir(parents=True, exist_ok=True)
        facts: dict[str, Any] = {"id": uuid.uuid4().hex, "starts": []}
        if RUN in there:
            facts = _read_json(path / RUN)
        number = len(facts["starts"])
        _keep_former_plan(path, plan_toml, number - 1)
        write_whole(path / PLAN, plan_toml)
        facts["starts"].append({"began": time.time(), **_circumstances(), **settings})
        write_whole(path / RUN, json.dumps(facts, indent=2) + "\n")
        return cls(path, number, facts["starts"][0]["began"])

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The newest start of a run, as any of its ranks sees it."""
        starts = _read_json(path / RUN)["starts"]
        return cls(path, len(starts) - 1, starts[0]["began"])

    @property
    def wall(self) -> float:
        """Seconds since the run was first started."""
        return time.time() - self.began

    @property
    def identity(self) -> str:
        """The same for all starts of a run, and for no other run."""
        return str(_read_json(self.path / RUN)["id"])

    def end(self, why: str, spent: Mapping[str, float]) -> None:
        """This start has come to an orderly end; `spent` is what came behind its last step."""
        facts = _read_json(self.path / RUN)
        ended = {"at": time.time(), "why": why, "spent": dict(spent)}
        facts["starts"][self.restart]["ended"] = ended
        write_whole(self.path / RUN, json.dumps(facts, indent=2) + "\n")

    def summarize(self) -> Summary:
        """All starts so far, written to `summary.json`."""
        summary = read_summary(self.path)
        write_whole(self.path / SUMMARY, json.dumps(summary.to_json(), indent=2) + "\n")
        return summary


def read_summary(path: Path) -> Summary:
    """The run in a folder, from its records."""
    starts = _starts(_read_json(path / RUN)["starts"])
    checkpoints = [*(path / CHECKPOINTS).glob("step-*/manifest.json")]
    kept, lost = read_records(path / METRICS), read_records(path / LOST)
    return summarize(starts, kept, lost, len(checkpoints))


def _starts(tables: Sequence[Mapping[str, Any]]) -> list[RunStart]:
    """The starts of a run, in seconds since the first."""
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
    """The records of a file, without a torn last line; none where there is no file."""
    found: dict[tuple[int, int], StepRecord] = {}
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            record = StepRecord.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            problem = f"line {number} is no record of a step ({error!r}): delete it"
            raise BadFile(str(path), [problem]) from error
        # A move between the files that was interrupted was done again.
        found[record.restart, record.step] = record
    return list(found.values())


class Metrics:
    """The lines of `metrics.jsonl`: every step that counts once, in order.

    A step's line is on its way before the step's checkpoint is published: then no step that a
    checkpoint holds is without one.
    """

    def __init__(self, folder: Path, after: int) -> None:
        """To go on behind step `after`; lines of later steps move to `metrics.lost.jsonl`."""
        self.path = folder / METRICS
        records = read_records(self.path)
        kept = [record for record in records if record.step <= after]
        lost = [record for record in records if record.step > after]
        if lost:
            before = read_records(folder / LOST)
            write_whole(folder / LOST, _lines([*before, *lost]))
        write_whole(self.path, _lines(kept))
        with said_of(self.path):
            self.file = self.path.open("ab", buffering=0)

    def append(self, record: StepRecord) -> None:
        """Write a line, at once."""
        line = _lines([record]).encode()
        with said_of(self.path):
            if self.file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self.file.close()


class Spent:
    """Seconds that a run takes for something else than its steps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        """What is done inside goes to this name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """All since the last time this was asked."""
        taken, self.seconds = self.seconds, {}
        return taken


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and rename it: it is there as a whole, or as it was before."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with said_of(path):
        try:
            with beside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def cut_torn_line(path: Path) -> None:
    """Cut off what a killed process left behind the last whole line."""
    if not path.exists():
        return
    with said_of(path), path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - 65_536)
            file.seek(begin)
            place = file.read(end - begin).rfind(b"\n")
            if place >= 0:
                file.truncate(begin + place + 1)
                return
            end = begin
        file.truncate(0)


@contextlib.contextmanager
def said_of(path: Path) -> Iterator[None]:
    """An error of the system becomes one that names the file."""
    try:
        yield
    except OSError as error:
        raise FivefoldError(
            f"cannot write {path}: {error.strerror or error}; give a folder that may be written "
            "and has room with --out, or make room and continue with --resume"
        ) from error


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_bytes().decode(errors="replace").split("\n")[:-1]


def _lines(records: list[StepRecord]) -> str:
    return "".join(json.dumps(record.to_json(), allow_nan=False) + "\n" for record in records)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadFile(str(path), [f"{error}; give the folder of a run"]) from error


def _keep_former_plan(path: Path, plan_toml: str, start: int) -> None:
    """A restart may change the plan; that of the start before stays, under its number."""
    if start >= 0 and (path / PLAN).exists():
        former = (path / PLAN).read_text("utf-8")
        if former != plan_toml:
            write_whole(path / f"plan.{start}.toml", former)


def _circumstances() -> dict[str, object]:
    """What runs, on what; no names of machines."""
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
    """The commit of a checkout, with `-dirty` where files were changed; None where it is none."""
    if not (checkout / ".git").exists():  # git would go on to look in the folders above
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
    """The GPUs that the driver lists. CUDA is not asked: whoever asks it can no longer fork."""
    names: list[str] = []
    for file in sorted(folder.glob("*/information")):
        lines = file.read_text("utf-8", errors="replace").splitlines()
        names += [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    return names
