"""Keepers and leaders of engines, and a server that waits for them, without a model."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

pytest.importorskip("h11", reason="pip install 'fivefold[serve]', which make setup does")

from fivefold.core.errors import FivefoldError, RankLost
from fivefold.core.layout.layout import Layout
from fivefold.core.model import presets as models
from fivefold.generate.requests import Request
from fivefold.generate.text import ByteCodec
from fivefold.generate.text_ranks import TaskWarning
from fivefold.serve import rank, supervisor
from fivefold.serve.links import AddCommand, CloseCommand, RankLink, ReplicaHello, StepNews
from fivefold.serve.rank import API_SOCKET, EngineUp, ServeTask
from fivefold.serve.replicas import ServingReplica
from fivefold.serve.server import ModelServer, ServeOptions, bound_socket
from fivefold.serve.supervisor import EngineEnd, EngineKeeper

SECONDS = 20.0  # for another process or thread


def task_of(folder: Path, layout: Layout, **fields: Any) -> ServeTask:
    text = cast("Any", SimpleNamespace(plan=SimpleNamespace(layout=layout), device="cpu"))
    return ServeTask(text, folder, 0, sequences=4, tokens=None, cache_gb=None, **fields)


class DyingPool:
    """Stands in for the ranks of an engine, which come up, warn and die."""

    pids: tuple[int, ...] = ()

    def __init__(self, size: int, patience: float, forwards_stop: bool) -> None:
        self.size = size

    def __enter__(self) -> DyingPool:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run_each(self, tasks: list[Any], on_report: Callable[[Any], None]) -> None:
        ((_, (task,)),) = tasks
        on_report(EngineUp())
        on_report(TaskWarning(f"start {task.start}"))
        raise RankLost(0, "serve", "was killed")


class SleepingPool(DyingPool):
    """Ranks that say nothing."""

    def run_each(self, tasks: list[Any], on_report: Callable[[Any], None]) -> None:
        time.sleep(600)


def wait_until(reached: Callable[[], Any]) -> None:
    until = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < until, "it never came so far"
        time.sleep(0.01)


def test_an_engine_that_dies_is_started_under_new_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache for an earlier start must not be taken for one of the next."""
    monkeypatch.setattr(supervisor, "Pool", DyingPool)
    monkeypatch.setattr(supervisor, "_PAUSE_S", 0.01)
    ends, warnings = list[EngineEnd](), list[str]()
    engine = EngineKeeper(task_of(tmp_path, Layout(), start=3), 2, [])
    wait_until(lambda: not engine.hear(ends.append, warnings.append))
    engine.process.join(SECONDS)
    assert warnings == ["start 3", "start 4", "start 5"]
    assert [end.again for end in ends] == [1, 2, 0]
    assert all(end.reason == ends[0].reason and not end.refused for end in ends)
    assert engine.process.exitcode == 0


def test_a_killed_engine_takes_its_ranks_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)
    ]
    monkeypatch.setattr(SleepingPool, "pids", [process.pid for process in ranks])
    monkeypatch.setattr(supervisor, "Pool", SleepingPool)
    engine = EngineKeeper(task_of(tmp_path, Layout()), 2, [])
    try:
        wait_until(lambda: engine.hear(pytest.fail, pytest.fail) and engine.pids)
        engine.kill()
        assert [process.wait(SECONDS) for process in ranks] == [-signal.SIGKILL] * 2
        engine.process.join(SECONDS)
        assert engine.process.exitcode == -signal.SIGKILL
    finally:
        engine.process.kill()
        for process in ranks:
            process.kill()
            process.wait()


class CountedReplicas(dict[int, Any]):
    """Counts how often somebody asks for their number."""

    num_looks = 0

    def __len__(self) -> int:
        self.num_looks += 1
        return super().__len__()


def server_of(folder: Path, on_warning: Callable[[str], None] = pytest.fail) -> ModelServer:
    model = SimpleNamespace(shape=models.load("tiny"), folder=folder, adapters=())
    setup = cast("Any", SimpleNamespace(model=model, codec=ByteCodec(), ends=frozenset()))
    return ModelServer(setup, ServeOptions("tiny"), pytest.fail, pytest.fail, on_warning)


def test_a_port_that_somebody_took_meanwhile_is_refused(tmp_path: Path) -> None:
    """A server for all addresses, which came up while this one was loading."""
    with bound_socket("127.0.0.1", 0, False, shared=True) as listener:
        port = listener.getsockname()[1]
        with bound_socket("0.0.0.0", port, True, shared=True) as foreign:
            foreign.listen()
            with pytest.raises(FivefoldError, match=f"--port {port}: Address already in use"):
                asyncio.run(server_of(tmp_path)._serve([listener]))


def test_a_server_that_waits_for_engines_sleeps(tmp_path: Path) -> None:
    """Though one is ready, and another is started again."""
    warnings: list[str] = []
    server = server_of(tmp_path, warnings.append)
    server._keepers = [cast("Any", None)] * 3
    door = SimpleNamespace(send=lambda value: None)
    server.dispatcher.doors[0] = cast("Any", door)
    replicas = server.dispatcher.replicas = CountedReplicas()

    def join(index: int) -> None:
        replica = SimpleNamespace(lose=lambda: None, open={}, sources={}, role="both")
        replica.alive, replica.tokens_of_one = True, 100
        replicas[index] = cast("ServingReplica", replica)
        server.dispatcher.joined.set()

    async def wait() -> None:
        ready = asyncio.ensure_future(server._until_ready())
        for event in (
            lambda: join(0),
            lambda: server._on_end(task_of(tmp_path, Layout()), EngineEnd("lost", again=1)),
            lambda: join(1),
        ):
            await asyncio.sleep(0)
            replicas.num_looks = 0
            event()
            for _ in range(200):
                await asyncio.sleep(0)
            assert replicas.num_looks <= 2, "once for the event"
        assert not ready.done() and len(warnings) == 1
        join(2)
        await asyncio.wait_for(ready, SECONDS)

    asyncio.run(wait())


class IdleEngine:
    """An engine that has nothing to compute; it counts who asks."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.schedulers = [SimpleNamespace(pool=SimpleNamespace(count=10))] * 2

    @property
    def busy(self) -> bool:
        self.num_looks += 1
        return False


class RecordingLoop:
    """The loop of a decode rank, whose part of one cache comes at once."""

    def __init__(self) -> None:
        self.engine, self.over, self.open = IdleEngine(), False, dict[str, Any]()
        self.turns: list[Any] = []

    def start(self, own: RankLink) -> None:
        own.send("sequence")

    def turn(self, commands: list[Any]) -> StepNews:
        self.turns.append(commands)
        self.over = CloseCommand() in commands
        return StepNews([], [], 10, 0)


class CollectedLink(RankLink):
    """A link that is closed at the end of a test, as the end of its process would close it."""

    links: ClassVar[list[RankLink]] = []

    def __init__(self, stream: socket.socket) -> None:
        super().__init__(stream)
        self.links.append(self)


@pytest.fixture
def closing_links(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rank, "RankLink", CollectedLink)
    yield
    while CollectedLink.links:
        CollectedLink.links.pop().close()


@pytest.mark.usefixtures("closing_links")
def test_the_leader_of_two_data_ranks_adds_a_sequence_that_one_of_them_has(
    tmp_path: Path,
) -> None:
    """The cache of a sequence is on the ranks of one data rank. Meanwhile the leader sleeps."""
    loop, task = RecordingLoop(), task_of(tmp_path, Layout(shard=2), role="decode")
    reports = SimpleNamespace(rank=0, phase=lambda name: None, report=lambda value: None)
    leads = threading.Thread(target=rank._lead, args=(reports, task, loop), daemon=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / API_SOCKET))
        listener.listen(1)
        leads.start()
        follower = RankLink.to(task.leader)
        api = RankLink(listener.accept()[0])
    try:
        (hello,) = api.receive(SECONDS)
        assert hello == ReplicaHello(0, 20, 10, "decode", 0, data_ranks=2)
        time.sleep(0.5)
        assert loop.engine.num_looks < 50, "two a second, and two for the cache"
        add = AddCommand(Request("sequence", (1,), 5), home=1, drawn=((7, -1.0),))
        api.send(add)
        assert follower.receive(SECONDS) == [[add]]
        assert len(api.receive(SECONDS)) == 1
        api.send(CloseCommand())
        leads.join(SECONDS)
        assert loop.turns == [[add], [CloseCommand()]] and not leads.is_alive()
    finally:
        api.close()  # which ends the leader too
        leads.join(SECONDS)
        follower.close()
