"""Output that nobody reads: neither the training nor a rank waits for it."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from fivefold.commands import serve as serving
from fivefold.launch.processes import RankPipe
from fivefold.records.run_writer import read_records
from fivefold.render.training import LinePrinter
from fivefold.terminal import UnreadStream, discard

SOON = 60.0  # seconds of a busy machine


def test_lines_that_nobody_reads_are_dropped_and_counted() -> None:
    reads, printed = threading.Event(), list[tuple[str, bool]]()

    def echo(line: str, err: bool) -> None:
        assert reads.wait(SOON)
        printed.append((line, err))

    printer = LinePrinter(echo, most=10)
    began = time.monotonic()
    for number in range(100):
        printer.print_line(f"step {number}")
    assert time.monotonic() - began < SOON / 4 and printed == []
    reads.set()
    printer.close()
    lines = [line for line, err in printed if not err]
    assert lines[:10] == [f"step {number}" for number in range(10)] and len(lines) <= 12
    (said,) = [line for line, err in printed if err]
    assert said.startswith(f"fivefold: {100 - len(lines)} lines not printed")


def test_a_closed_pipe_is_raised_where_lines_come_from() -> None:
    def echo(line: str, err: bool) -> None:
        raise BrokenPipeError

    printer = LinePrinter(echo, most=2)
    printer.print_line("one")
    with pytest.raises(BrokenPipeError):
        for _ in range(200):
            printer.print_line("more")
            time.sleep(0.01)
    printer.close()


def test_a_rank_does_not_wait_for_a_parent_that_does_not_read() -> None:
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    pipe = RankPipe(theirs, most_bytes=1 << 20)
    for number in range(3000):
        pipe.send("report", (number, b"x" * 1000))
    pipe.send("done", "result")
    assert pipe.num_dropped > 1000
    found = [pickle.loads(ours.recv_bytes())]
    while found[-1] != ("done", "result"):  # whole messages, in their order
        found.append(pickle.loads(ours.recv_bytes()))
    pipe.flush()
    numbers = [value[0] for kind, value in found if kind == "report"]
    assert numbers == sorted(numbers) and len(numbers) + pipe.num_dropped == 3000
    assert numbers[-1] == 2999  # the oldest ones are dropped
    pipe.send("phase", "next")
    assert pickle.loads(ours.recv_bytes()) == ("phase", "next")
    ours.close()
    with pytest.raises(OSError, match="pipe"):
        pipe.send("phase", "to nobody")
    pipe.close()
    theirs.close()


def test_a_server_goes_on_and_ends_while_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe of one page is full after some requests."""
    logged: list[int] = []

    def serve(source: Path, *, log: Callable[[str], None], **options: object) -> int:
        for number in range(3000):
            log(f"request {number} " + "x" * 100)
            logged.append(number)
        return 0

    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr(serving, "_LAST_LINES_S", 0.05)
    with os.fdopen(reads, "rb") as reader:
        stream = os.fdopen(writes, "w")
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(typer.Exit) as ended:
            serving.run(source=Path("folder"), set=None)
        assert ended.value.exit_code == 0 and len(logged) == 3000
        assert reader.read1(200).startswith(b"request 0 x")
        stream.flush()  # no thread has its lock
    with contextlib.suppress(OSError):
        stream.close()


@pytest.mark.sample(0.34)
def test_a_training_goes_on_while_nobody_reads(tmp_path: Path) -> None:
    """A pipe of one page is full after some steps."""
    words = "train tiny --layout dp=1 --seq 8 --batch 1 --steps 250 --set data=synthetic --out run"
    words += " --set layers=1 --set width=16 --set heads=2 --set kv_heads=2 --set ffn=16"
    reads, writes = os.pipe()
    fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-m", "fivefold", *words.split()]
    with subprocess.Popen(command, stdout=writes, cwd=tmp_path) as process:
        os.close(writes)
        until, done = time.monotonic() + 2 * SOON, 0
        try:
            while done < 250 and time.monotonic() < until:
                time.sleep(0.2)
                done = len(read_records(tmp_path / "run" / "metrics.jsonl"))
            assert done == 250 and process.poll() is None  # it waits to say the rest
            with os.fdopen(reads, "rb") as file:
                out = file.read().decode()
            assert process.wait(SOON) == 0
        finally:
            process.kill()
    assert len(re.findall(r"^step \d+/250 ", out, re.M)) == 250 and "done in" in out


SMALL = "--set layers=1 width=16 heads=2 kv_heads=2 ffn=16 data=synthetic"


@pytest.mark.sample(0.5)
def test_a_training_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    """Both streams are closed before the first line: it trains, saves, and ends by its result."""
    words = f"train tiny --layout dp=1 --seq 8 --batch 1 --steps 2 --out run {SMALL}"
    command = f"set -o pipefail; {sys.executable} -m fivefold {words} 2>&1 | true"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path).returncode == 0
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()


def test_only_output_that_nobody_reads_is_dropped() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as gone, Path("/dev/full").open("w") as full:
        stream = UnreadStream(gone)
        for _ in range(3):
            assert stream.write("line\n") == 5
            stream.flush()
        assert os.path.samestat(os.fstat(gone.fileno()), Path(os.devnull).stat())
        with pytest.raises(OSError, match="No space"):
            UnreadStream(full).write("x" * 100_000)
        discard(full)  # it is flushed when it is closed
