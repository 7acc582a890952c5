"""What a journey does: commands in fresh processes, and what is checked of each of them."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE = 240.0  # seconds for one command
WARNING = re.compile(r"warn|traceback|exception|deprecat|cubin|\bW\d{4} |\berror\b", re.I)
NOT_FINITE = re.compile(r"(?<![\w.])[-+−]?(nan|inf)(?![\w.])", re.I)
NEGATIVE = re.compile(r"(?<![\w.])[-−]\d")
TIMES = ("seconds", "wall_s", "wall", "tokens_per_s", "tokens_per_s_per_gpu")


class Failure(Exception):
    """What is wrong with a journey."""


def check(holds: bool, message: str) -> None:
    """Fail the journey with a message unless this holds."""
    if not holds:
        raise Failure(message)


@dataclass(frozen=True)
class Journey:
    """A way through several commands. `alone`: nothing else may run meanwhile, since times are
    judged; `together`: several ranks use the GPU at the same time, under MPS; `extra`: it runs only
    by name."""

    name: str
    go: Callable[[Trip], None]
    alone: bool = False
    together: bool = False
    extra: bool = False


class SharedGpu:
    """Lets as many ranks wait for one another on the GPU as it carries at a time.

    A collective that waits for its peers holds a part of a multiprocessor. If all of them are held,
    no matmul begins for which somebody waits, and nothing moves any more.
    """

    def __init__(self, most: int) -> None:
        self.most = self.free = most
        self.changed = threading.Condition()

    @contextmanager
    def joined(self, ranks: int) -> Iterator[None]:
        """Wait until so many more may join."""
        ranks = min(ranks, self.most)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= ranks)
            self.free -= ranks
        try:
            yield
        finally:
            with self.changed:
                self.free += ranks
                self.changed.notify_all()


@dataclass
class Trip:
    """The folder, the environment and the processes of one journey; `notes` go to the record."""

    folder: Path
    environment: dict[str, str]
    device: str
    gpu: SharedGpu
    until: float  # on the monotonic clock
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    processes: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])
    began: dict[int, float] = field(default_factory=dict[int, float])
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # of each command

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def start(self, words: Sequence[str], name: str) -> subprocess.Popen[str]:
        """A process whose output goes to NAME.out and NAME.err."""
        with (
            (self.folder / f"{name}.out").open("w") as out,
            (self.folder / f"{name}.err").open("w") as err,
        ):
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=self.environment,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)
        self.began[process.pid] = time.monotonic()
        return process

    def finish(self, process: subprocess.Popen[str], name: str, code: int = 0) -> str:
        """Wait for a command of the product, and check how it ended and what it printed; its
        output."""
        out, err = self.ended(process, name, code)
        strange = [each for each in out.splitlines() if WARNING.search(each)]
        strange += [each for each in err.splitlines() if each.strip()] if code == 0 else []
        check(not strange, f"{name} printed what no user caused: {'; '.join(strange[:5])}"[:1500])
        check_numbers(name, out)
        return out

    def ended(self, process: subprocess.Popen[str], name: str, code: int = 0) -> list[str]:
        """Wait for a process that must end with this code; its output and its errors."""
        patience = max(1.0, min(PATIENCE, self.until - time.monotonic()))
        try:
            ended = process.wait(patience)
        except subprocess.TimeoutExpired as error:
            raise Failure(f"{name} did not end in {patience:.0f} s: {self.tail(name)}") from error
        self.seconds[name] = round(time.monotonic() - self.began[process.pid], 1)
        check(ended == code, f"{name} ended with {ended} instead of {code}: {self.tail(name)}")
        return [(self.folder / f"{name}.{end}").read_text("utf-8") for end in ("out", "err")]

    def tail(self, name: str) -> str:
        """The end of what a process printed."""
        return " | ".join(
            (self.folder / f"{name}.{end}").read_text("utf-8", errors="replace")[-1500:]
            for end in ("out", "err")
        )

    def fivefold(self, *words: str, code: int = 0, name: str | None = None) -> str:
        """A command of the product; its output."""
        name = name or f"{len(self.processes)}-{words[0]}"
        process = self.start([sys.executable, "-m", "fivefold", *words], name)
        return self.finish(process, name, code)

    def python(self, *words: str) -> str:
        """A program of a user, in a fresh process; its output. Others print as they like."""
        name = f"{len(self.processes)}-python"
        return self.ended(self.start([sys.executable, *words], name), name)[0]

    def train(self, *words: str, out: str) -> list[dict[str, Any]]:
        """Train into a run folder; its records."""
        self.fivefold("train", *words, "--device", self.device, "--out", out)
        return self.records(out)

    def timed_train(self, *words: str, steps: int, out: str) -> float:
        """Train beside a watch on the host: how far the times of the records are from it, as a
        share. It runs from the first request for rows to the end of the last update."""
        command = [sys.executable, "-m", "tests.gpu.journeys", "timed", f"{out}.json", str(steps)]
        command += [*words, "--steps", str(steps), "--device", self.device, "--out", out]
        self.finish(self.start(command, out), out)
        host = json.loads((self.folder / f"{out}.json").read_text("utf-8"))["seconds"]
        records = self.records(out)
        # The first record's wall time begins with the run, the host's with the first request.
        recorded = records[0]["seconds"] + sum(each["wall_s"] for each in records[1:])
        apart = abs(recorded / host - 1)
        check(apart < 0.01, f"{out}: records have {recorded:.3f} s, the host {host:.3f} s")
        return apart

    def records(self, run: str) -> list[dict[str, Any]]:
        """The steps of a run, each of which is checked."""
        lines = (self.folder / run / "metrics.jsonl").read_text("utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        for record in records:
            check_record(run, record)
        return records

    @contextmanager
    def served(self, *words: str) -> Iterator[str]:
        """A server on a free port: its address. It ends with SIGTERM, after what is open."""
        name = f"{len(self.processes)}-serve"
        command = [sys.executable, "-m", "fivefold", "serve", *words, "--port", "0"]
        process = self.start([*command, "--device", self.device], name)
        until = min(self.until, time.monotonic() + PATIENCE)
        while not (ready := re.search(r"(http://\S+)", (self.folder / f"{name}.out").read_text())):
            check(process.poll() is None, f"the server ended: {self.tail(name)}")
            check(time.monotonic() < until, f"the server is not ready: {self.tail(name)}")
            time.sleep(0.1)
        yield ready[1]
        check(process.poll() is None, f"the server ended under load: {self.tail(name)}")
        process.send_signal(signal.SIGTERM)
        self.finish(process, name)

    def end_processes(self) -> None:
        """Kill what is left of the journey's processes, by the group of each."""
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()


def check_numbers(name: str, text: str) -> None:
    """Nothing that is printed is infinite or not a number, and nothing of a step is negative."""
    for line in text.splitlines():
        check(not NOT_FINITE.search(line), f"{name} printed {line!r}")
        step = line.startswith("step ")
        check(not (step and NEGATIVE.search(line)), f"{name} printed a negative number: {line!r}")


def check_record(run: str, record: dict[str, Any]) -> None:
    """All times are there and above zero, and all numbers are finite."""
    step = f"step {record['step']} of {run}"
    for key in TIMES:
        value = record[key]
        check(value is not None and 0 < value < math.inf, f"{step}: {key} is {value}")
    for key in ("loss", "norm"):
        check(record[key] is not None and math.isfinite(record[key]), f"{step}: {key} is missing")
    mfu, memory = record["mfu"], record["memory_gib"]
    check(mfu is None or 0 < mfu < 1, f"{step}: MFU is {mfu}")
    check(memory is None or memory > 0, f"{step}: memory is {memory}")
