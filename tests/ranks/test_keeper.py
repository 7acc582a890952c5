"""Two hosts, each a launcher with two ranks and a keeper: one host is lost, and the ranks of the
other go on from the copies that they have kept for it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_pool import gone
from test_recovery import lines, tensors_of
from test_store_address import free_port

from fivefold.commands.train import train
from fivefold.core.errors import FivefoldError
from fivefold.launch.shared_memory import HostKeeper, KeptSegment

STEPS, PER_HOST = 8, 2
JOB: dict[str, Any] = {"layout": "dp=4", "seq": 16, "batch": 8, "layers": 1, "steps": STEPS}
JOB |= {"dtype": "float64", "device": "cpu", "copy_every": 1}
SLOW = 0.3  # seconds of a step, so that there is time to lose a host
context = multiprocessing.get_context("fork")


def one_rank(rank: int, world: int, local: int, port: int, out: Path, said: Path) -> None:
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": PER_HOST}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {name: str(value) for name, value in names.items()}
    log = said.open("a", encoding="utf-8")
    sys.stdout = sys.stderr = log

    def hear(report: Any) -> None:
        print(report, file=log, flush=True)
        time.sleep(SLOW)

    train("tiny", out=out, on_progress=hear, **JOB)


def host(number: int, ports: list[int], out: Path, pids: Path) -> None:
    """A launcher: it starts its ranks, and starts them again without the other host."""
    os.setsid()
    for start, port in enumerate(ports):
        world, first = (2 * PER_HOST, number * PER_HOST) if start == 0 else (PER_HOST, 0)
        ranks = [
            context.Process(
                target=one_rank, args=(first + i, world, i, port, out, pids.with_suffix(".log"))
            )
            for i in range(PER_HOST)
        ]
        for each in ranks:
            each.start()
        pids.write_text(json.dumps([os.getpid(), *(each.pid for each in ranks)]))
        for each in ranks:
            each.join()
        if all(each.exitcode == 0 for each in ranks):
            return
    os._exit(1)


def keepers(launcher: int) -> list[int]:
    """The keeper processes of a launcher."""
    found: list[int] = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = each.read_bytes().split(b"\0")
            if b"fivefold.launch.shared_memory" in words and str(launcher).encode() in words:
                found.append(int(each.parent.name))
    return found


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[list[Any]]:
    ports = [free_port(), free_port()]
    # The second host stays, and starts its ranks again.
    made = [
        context.Process(
            target=host,
            args=(number, ports[: 1 + number], folder / "run", folder / f"host-{number}"),
        )
        for number in (0, 1)
    ]
    for each in made:
        each.start()
    try:
        yield made
    finally:
        for each in made:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid or 0, signal.SIGKILL)
            each.join()


def until(condition: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.sample(0.1)
def test_the_ranks_of_one_host_go_on_from_the_copies_of_both(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with two_hosts(tmp_path) as (goes, stays):
        metrics = out / "metrics.jsonl"
        until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3)
        lost = keepers(goes.pid)
        assert len(lost) == 1 and len(keepers(stays.pid)) == 1
        os.killpg(goes.pid, signal.SIGKILL)
        until(lambda: all(gone(pid) for pid in lost), 20)
        stays.join(120)
        assert stays.exitcode == 0, (tmp_path / "host-1.log").read_text()[-3000:]
        until(lambda: not keepers(stays.pid), 20)
    said = (tmp_path / "host-1.log").read_text()
    assert re.search(r"read step [1-9]\d* from copies in memory", said), said[-3000:]
    found = lines(out)
    assert [each["step"] for each in found] == list(range(1, STEPS + 1))
    assert {each["world"] for each in found} == {2, 4}
    samples = [each["first_sample"] + row for each in found for row in range(each["num_samples"])]
    assert samples == list(range(STEPS * JOB["batch"]))
    train("tiny", out=tmp_path / "calm", **JOB)
    for key, each in tensors_of(tmp_path / "calm").items():
        if key.startswith("model/"):
            assert (each - tensors_of(out)[key]).abs().max() <= 1e-10 * each.abs().max(), key


@pytest.mark.sample(0.5)
def test_a_keeper_ends_with_its_launcher_and_with_its_run(tmp_path: Path) -> None:
    launcher = context.Process(target=time.sleep, args=(60,))
    launcher.start()
    first = HostKeeper(tmp_path, launcher.pid or 0, None)
    segment = KeptSegment(first.open(3, 1))
    segment.reserve(1 << 20)
    again = HostKeeper(tmp_path, launcher.pid or 0, None)
    assert again.ranks() == [3] and KeptSegment(again.open(3, 1)).size == 1 << 20
    (pid,) = keepers(launcher.pid or 0)
    again.end()
    until(lambda: gone(pid), 10)
    with pytest.raises(FivefoldError, match="does not answer"):
        first.open(4, 0)
    HostKeeper(tmp_path, launcher.pid or 0, None)
    (pid,) = keepers(launcher.pid or 0)
    launcher.kill()
    launcher.join()
    until(lambda: gone(pid), 10)


@pytest.mark.nightly
def test_torchrun_restarts_ranks_from_the_keeper_of_their_host(tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.2"]
    keys = ("layers=1", "copy_every=1", "--steps", "30", "--dtype", "float64", "--device", "cpu")
    job = ["tiny", "--layout", "dp=2", "--seq", "32", "--batch", "16", "--set", *keys]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "-m", "fivefold", "train"]
    before = set(Path("/dev/shm").glob("*fivefold*"))
    with log.open("w") as file:
        launcher = subprocess.Popen(
            [*command, *job, "--out", str(out)], stdout=file, stderr=subprocess.STDOUT
        )
    metrics = out / "metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3)
    (keeper,) = keepers(launcher.pid)
    ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(max(map(int, ranks)), signal.SIGKILL)
    assert launcher.wait(180) == 0, log.read_text()[-3000:]
    assert re.search(r"read step \d+ from copies in memory", log.read_text()), log.read_text()
    assert [each["step"] for each in lines(out)] == list(range(1, 31))
    until(lambda: gone(keeper), 10)
    assert set(Path("/dev/shm").glob("*fivefold*")) <= before
