"""Two hosts, each a network namespace, joined by a cable: one is lost, the other goes on alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

STEPS, BEFORE = 16, 4  # steps in all, and those that are done when the host is lost
PLAN = ("tiny", "--layout", "dp=2", "--seq", "32", "--microbatches", "2", "--set", "layers=2")
# A host is missed after 3 s, and those who are left wait 3 s for others.
PATIENCE = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"


class Host(NamedTuple):
    """A network namespace, its end of the cable, and its address."""

    name: str
    cable: str
    address: str


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip")
    made = [
        Host(f"fivefold-{os.getpid()}-{side}", f"ff{os.getpid() % 100_000}{side}", address)
        for side, address in (("a", "10.77.0.1"), ("b", "10.77.0.2"))
    ]
    try:
        try:
            lay_cable(made)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        yield made[0], made[1]
    finally:
        for host in made:
            lose(host)
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)


def lay_cable(made: list[Host]) -> None:
    for host in made:
        ip("netns", "add", host.name)
    ip("link", "add", made[0].cable, "type", "veth", "peer", "name", made[1].cable)
    for host in made:
        ip("link", "set", host.cable, "netns", host.name)
        ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.cable)
        for device in ("lo", host.cable):
            ip("-n", host.name, "link", "set", device, "up")


def cut_off(host: Host) -> None:
    """Nobody reaches the host any more."""
    down = ["ip", "-n", host.name, "link", "set", host.cable, "down"]
    subprocess.run(down, capture_output=True)


def lose(host: Host) -> None:
    """The host is gone, and says no goodbye: the cable is cut before its processes are killed."""
    cut_off(host)
    pids = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True)
    for pid in map(int, pids.stdout.split()):
        os.kill(pid, signal.SIGKILL)


def start(host: Host, first: Host, out: Path) -> subprocess.Popen[str]:
    """torchrun on a host, with one rank of the training."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
    meeting = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first.address}:29400",
        f"--rdzv-conf=is_host={int(host == first)},{PATIENCE}",
        f"--local-addr={host.address}",
        "--max-restarts=3",
        "--monitor-interval=0.2",
    ]
    train = ["-m", "fivefold", "train", *PLAN, "save_every=2", "--steps", str(STEPS)]
    return subprocess.Popen(
        ["ip", "netns", "exec", host.name, *launcher, *meeting, *train, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": host.cable, "OMP_NUM_THREADS": "1"},
    )


def lines(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def begin(
    hosts: tuple[Host, Host], out: Path
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """A training on both hosts, when it has done its first steps."""
    started = start(hosts[0], hosts[0], out), start(hosts[1], hosts[0], out)
    until = time.monotonic() + 120
    while len(lines(out)) < BEFORE:
        assert all(each.poll() is None for each in started) and time.monotonic() < until
        time.sleep(0.05)
    return started


def ranks_on(host: Host) -> list[int]:
    """The ranks among the processes of a host."""
    pids = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True)
    found: list[int] = []
    for pid in map(int, pids.stdout.split()):
        with contextlib.suppress(OSError):  # it has just ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"train" in words and b"torch.distributed.run" not in words:
                found.append(pid)
    return found


@pytest.mark.nightly  # two minutes of waiting
def test_a_host_that_is_cut_off_ends(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Its rank ends by itself, and so does the rank's launcher; the other host goes on."""
    _, goes = hosts
    first, second = begin(hosts, tmp_path / "run")
    assert len(ranks_on(goes)) == 1
    cut_off(goes)
    began = time.monotonic()
    while ranks_on(goes):
        assert time.monotonic() - began < 60
        time.sleep(0.2)
    print(f"rank ended after {time.monotonic() - began:.1f} s")
    said, _ = second.communicate(timeout=120)
    print(f"launcher ended after {time.monotonic() - began:.1f} s")
    assert second.returncode != 0 and "the store is gone" in said, said
    assert "does not notice: it is ended" in said, said
    said, _ = first.communicate(timeout=180)
    assert first.returncode == 0, said


@pytest.mark.nightly  # a minute of waiting
def test_one_host_is_lost_and_the_other_goes_on_alone(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    _, goes = hosts
    out = tmp_path / "run"
    first, second = begin(hosts, out)
    lose(goes)
    second.communicate()
    said, _ = first.communicate(timeout=180)
    assert first.returncode == 0, said
    assert re.search(r"lost rank 1 at .*: it has not joined .* it does not answer", said), said
    steps = lines(out)
    assert [each["step"] for each in steps] == list(range(1, STEPS + 1))
    worlds = [each["world"] for each in steps]
    assert worlds == sorted(worlds, reverse=True) and set(worlds) == {1, 2}
    samples = [each["first_sample"] + row for each in steps for row in range(each["num_samples"])]
    assert samples == list(range(len(samples))), "every sample once, and the batch is the same"
    assert {each["num_samples"] for each in steps} == {4}
