"""Launched ranks that wait for others: they hear a request to stop, name who has not come, and end
when the network has lost the store."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
from test_store_address import free_port

from fivefold.launch.launcher import LauncherEnvironment
from fivefold.launch.watch import cut_off
from fivefold.launch.watch.kv_messages import StoreBoard
from fivefold.launch.watch.watchdog import RankSurroundings, watched
from fivefold.launch.worker import LaunchedMeeting, NoMeeting, Worker, joined_worker

import torch.distributed as dist  # isort: skip

LIMIT, SOON = 1.0, 20.0
HOST = "127.0.0.1"


def meets(rank: int, world: int, port: int, log: Path) -> None:
    """One rank that waits for all of its world."""
    sys.stderr = log.open("w", encoding="utf-8")
    worker = joined_worker(LauncherEnvironment(rank, world, rank, HOST, port), lambda _: None)
    print("waits", file=sys.stderr, flush=True)
    with patch("fivefold.launch.worker._NAMED_SECONDS", 0.5):
        worker.meeting.board(print)


@contextmanager
def waiting(rank: int, log: Path, words: str) -> Iterator[multiprocessing.process.BaseProcess]:
    """A rank of three, of which no other comes, when it has said these words."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=meets, args=(rank, 3, free_port(), log))
    process.start()
    try:
        until = time.monotonic() + SOON
        while words not in (log.read_text("utf-8") if log.exists() else ""):
            assert process.is_alive() and time.monotonic() < until
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_others_hears_a_request_to_stop(
    rank: int, number: signal.Signals, tmp_path: Path
) -> None:
    with waiting(rank, tmp_path / "log", "waits") as process:
        time.sleep(0.3)
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(SOON)
        assert process.exitcode == 128 + number


def test_the_first_rank_names_those_that_have_not_come(tmp_path: Path) -> None:
    with waiting(0, tmp_path / "log", "ranks 1 and 2 did not come within"):
        pass


class Cable:
    """Carries bytes to a port until it is cut; then it carries none, and closes nothing."""

    def __init__(self, port: int) -> None:
        self.target, self.cut, self._door = port, threading.Event(), socket.create_server((HOST, 0))
        self.port = self._door.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        pairs: dict[socket.socket, socket.socket] = {}
        while not self.cut.is_set():
            ready, _, _ = select.select([self._door, *pairs], [], [], 0.05)
            for one in ready:
                if one is self._door:
                    near, far = one.accept()[0], socket.create_connection((HOST, self.target))
                    pairs |= {near: far, far: near}
                elif data := one.recv(1 << 16):
                    pairs[one].sendall(data)
                else:
                    pairs.pop(pairs.pop(one), None)
        self._open = pairs  # nobody hears of the end


def give_up(seconds: float) -> None:
    raise dist.DistNetworkError(f"no answer for {seconds:.0f} s")


@contextmanager
def partitioned() -> Iterator[tuple[StoreBoard, Callable[[], None]]]:
    """A board of a store behind a cable, and what cuts the cable."""
    here = LaunchedMeeting(LauncherEnvironment(0, 1, 0, HOST, free_port()))
    store = here._connect(hosts=True)
    cable = Cable(here.launched.port)
    there = dist.TCPStore(HOST, cable.port, 1, False, timedelta(minutes=10))
    yield StoreBoard(there, give_up, LIMIT), cable.cut.set
    del store


def test_a_board_behind_a_cut_cable_does_not_wait() -> None:
    with partitioned() as (board, cut):
        assert board.claim("verdict", "none") and not board.claim("verdict", "another")
        assert board.get("verdict") == "none" and board.get("else") is None
        cut()
        time.sleep(0.2)
        began = time.monotonic()
        with pytest.raises(dist.DistError, match="no answer for 1 s"):
            board.get("verdict")
        assert time.monotonic() - began < SOON / 4


def test_a_partitioned_rank_ends() -> None:
    lost = threading.Event()
    said: list[object] = []

    def send(kind: str, value: object) -> None:
        if kind == "lost":
            said.append(value)
            lost.set()

    with (
        partitioned() as (board, cut),
        patch.object(
            NoMeeting, "board", lambda _, on_silence: StoreBoard(board.store, on_silence, LIMIT)
        ),
        patch.object(RankSurroundings, "probe", lambda *_: None),
        patch("fivefold.launch.watch.watchdog._UNREACHABLE", 2 * LIMIT),
        watched(Worker(1, NoMeeting(), send), 2, patience=2.0) as watchdog,
    ):
        watchdog.phase("step 3")
        cut()
        assert lost.wait(SOON)
    ((rank, _, cause),) = said
    assert rank == 0 and "the store is gone" in cause


@pytest.mark.sample(1)
@pytest.mark.parametrize("healed", [False, True])
def test_a_launcher_that_is_cut_off_is_ended(healed: bool) -> None:
    """One that does not hear SIGTERM, unless the store can be reached again."""
    with socket.create_server((HOST, 0)) as store:
        port = store.getsockname()[1] if healed else free_port()
        launcher = multiprocessing.get_context("fork").Process(target=deaf)
        launcher.start()
        try:
            with patch.multiple(cut_off, _WAIT_SECONDS=0.3, _TERM_SECONDS=0.5):
                cut_off.main(launcher.pid or 0, HOST, port)
            launcher.join(0.2)
            assert launcher.is_alive() == healed
        finally:
            launcher.kill()
            launcher.join()


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
