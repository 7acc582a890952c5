"""The life of a server: fork engines and doors, open the port, and after SIGTERM drain and end.

The keepers of engines are forked before anything else is open, so that ranks inherit no socket of a
client, and before signals are handled, so that none of theirs is taken for ours. The keeper of the
doors is the last of them, and has the port. All die with the server, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fivefold.core import FivefoldError
from fivefold.generate import ModelSetup
from fivefold.launch import TemporaryFolder
from fivefold.serve.dispatch import Dispatcher
from fivefold.serve.door import BACKLOG, DoorEnd, DoorKeeper, DoorTask
from fivefold.serve.http import OTHER_FILES, HttpLimits, open_files
from fivefold.serve.links import BEAT_S, EngineRole
from fivefold.serve.metrics import ServeMetrics
from fivefold.serve.prompting import PromptReader
from fivefold.serve.rank import API_SOCKET, ServeTask
from fivefold.serve.supervisor import EngineEnd, EngineKeeper

_END_S = 15.0  # for ranks to end by themselves
_LATE_S = 5.0  # for doors that have drained to end
_MISSED_BEATS = 20  # of a door that is stopped: about as many seconds
_CORES_OF_A_DOOR = 4
_DOORS = -1  # among the numbers of replicas
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
_USER_TIMEOUT_MS = 60_000  # for bytes that nobody acknowledges


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server."""

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    doors: int = 1  # processes that speak HTTP
    replicas: int = 1
    prefill_replicas: int = 1  # where prompts have engines of their own
    restarts: int = 3  # of an engine that has lost a rank
    max_queue: int = 1024  # sequences that wait
    max_running: int = 256  # sequences in the engine of a data rank
    max_batch_tokens: int | None = None  # of a forward; None: what suits the device
    cache_gb: float | None = None
    drain_s: float = 60.0
    limits: HttpLimits = field(default_factory=HttpLimits)


def usual_doors(engines: int) -> int:
    """Doors that keep up with so many data ranks, and leave most cores to other processes."""
    return max(1, min(engines, (os.cpu_count() or 1) // _CORES_OF_A_DOOR))


def bound_socket(host: str, port: int, has_keys: bool, *, shared: bool = False) -> socket.socket:
    """Bind a socket to an address, for us alone or as one of several; beyond loopback only with API
    keys."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise FivefoldError(f"--host {host}: no such address; give 127.0.0.1") from error
    family, _, _, _, address = addresses[0]
    if not has_keys and not ipaddress.ip_address(str(address[0])).is_loopback:
        raise FivefoldError(
            f"--host {host} is beyond loopback, where everybody could come in: give --api-key-file "
            "FILE or --api-key KEY, or leave --host out"
        )
    # asyncio sets TCP_NODELAY only if the protocol is named.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not on every system; accepted sockets inherit it
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if sys.platform == "linux":
            timeout = socket.TCP_USER_TIMEOUT
            listener.setsockopt(socket.IPPROTO_TCP, timeout, _USER_TIMEOUT_MS)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise FivefoldError(f"--port {port}: {error.strerror}; give another, or 0") from error
    return listener


def hold_port(listener: socket.socket) -> socket.socket:
    """Hold the name of a socket's port until the result is closed. Two servers can bind one port as
    long as neither listens, and several doors share it even then: both would have clients."""
    host, port = listener.getsockname()[:2]
    lock = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":  # which has names that end with their process
        try:
            lock.bind(f"\0fivefold {host} {port}")
        except OSError as error:
            lock.close()
            rule = f"--port {port}: another server has it; give another, or 0"
            raise FivefoldError(rule) from error
    return lock


def require_files(doors: int) -> None:
    """Refuse more doors than this process can have sockets and links for."""
    needed = 2 * doors + OTHER_FILES
    if (files := open_files(needed)) < needed:
        raise FivefoldError(
            f"doors = {doors:,}: a server has two open files for each and {OTHER_FILES} others, "
            f"and this one may have {files:,} (`ulimit -n`): give at most "
            f"{max(1, (files - OTHER_FILES) // 2):,}"
        )


class ModelServer:
    """One model behind one port."""

    def __init__(
        self,
        setup: ModelSetup,
        options: ServeOptions,
        on_ready: Callable[[str], None],
        log: Callable[[str], None],
        on_warning: Callable[[str], None],
        prefill: ModelSetup | None = None,
    ) -> None:
        """`on_ready` gets the address, `log` a line for every request. `prefill` is the layout of
        the engines that compute prompts, if these have their own."""
        self.setup, self.options, self.on_ready, self.prefill = setup, options, on_ready, prefill
        self.on_warning = on_warning
        self.stopping = False
        self.dispatcher = Dispatcher(
            setup.model.shape,
            ServeMetrics(),
            options.max_queue,
            options.max_running,
            log,
            prefill is not None,
        )
        self.prompts = PromptReader(setup.codec, setup.model.folder)  # before doors are forked
        self._wake = asyncio.Event()
        self._doors: DoorKeeper | None = None
        self._keepers: list[EngineKeeper] = []
        self._lost: dict[int, str] = {}
        self._refused: list[str] = []

    def run(self) -> int:
        """Serve until a signal; returns the exit code."""
        folder = TemporaryFolder("fivefold-serve-")
        try:
            return asyncio.run(self._run(folder.path))
        finally:
            folder.remove()

    async def _run(self, folder: Path) -> int:
        options, loop = self.options, asyncio.get_running_loop()
        # Before the fork, for what it refuses: ranks are not to inherit it.
        require_files(options.doors)
        bound_socket(options.host, options.port, bool(options.keys)).close()
        for task in self._tasks(folder):
            self._keepers.append(EngineKeeper(task, options.restarts, self._keepers))
        links, lock, listeners = None, None, list[socket.socket]()
        try:
            listeners = self._listeners()
            lock = hold_port(listeners[0])
            doors = self._doors = self._keep_doors(folder, listeners)
            loop.add_reader(doors.pipe.fileno(), self._hear_doors, doors)
            for keeper in self._keepers:
                loop.add_reader(keeper.pipe.fileno(), self._hear, keeper)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop)
            links = await asyncio.start_unix_server(self.dispatcher.hear, folder / API_SOCKET)
            await self._until_ready()
            if not self.stopping:
                await self._serve(listeners)
        finally:
            if links is not None:
                links.close()
            await self._end()
            for opened in (*listeners, *([lock] if lock else [])):
                opened.close()
        return 1 if self._lost and not self.stopping else 0

    def _listeners(self) -> list[socket.socket]:
        """A socket for every door: the kernel shares connections out. They are ours as well, so
        that clients of a door that has died wait for the next."""
        options, port = self.options, self.options.port
        listeners: list[socket.socket] = []
        for _ in range(options.doors):
            shared = options.doors > 1
            listeners.append(bound_socket(options.host, port, bool(options.keys), shared=shared))
            port = listeners[0].getsockname()[1]
        return listeners

    def _keep_doors(self, folder: Path, listeners: list[socket.socket]) -> DoorKeeper:
        options, setup = self.options, self.setup
        task = DoorTask(
            folder / API_SOCKET,
            tuple(listeners),
            options.name,
            options.keys,
            options.limits,
            setup.model.shape,
            setup.codec,
            setup.ends,
            self.prompts,
            tuple(adapter.name for adapter in setup.model.adapters),
        )
        return DoorKeeper(task, [keeper.pipe for keeper in self._keepers])

    def _tasks(self, folder: Path) -> list[ServeTask]:
        """What the ranks of every engine do: those that decode, or do all, are the first."""
        options, prefill = self.options, self.prefill
        kinds: list[tuple[ModelSetup, EngineRole, int]] = []
        kinds.append((self.setup, "decode" if prefill else "both", options.replicas))
        if prefill is not None:
            kinds.append((prefill, "prefill", options.prefill_replicas))
        places = sum(setup.plan.layout.world * count for setup, _, count in kinds)
        tasks, slot = list[ServeTask](), 0
        for setup, role, count in kinds:
            other = None if prefill is None else self.setup if role == "prefill" else prefill
            for _ in range(count):
                task = ServeTask(
                    setup.task([]),
                    folder,
                    len(tasks),
                    options.max_running,
                    options.max_batch_tokens,
                    options.cache_gb,
                    slot,
                    places,
                    role,
                    None if other is None else other.plan,
                )
                tasks.append(task)
                slot += setup.plan.layout.world
        return tasks

    def _hear(self, keeper: EngineKeeper) -> None:
        def on_end(end: EngineEnd) -> None:
            self._on_end(keeper.task, end)

        if not keeper.hear(on_end, self.on_warning):
            asyncio.get_running_loop().remove_reader(keeper.pipe.fileno())

    def _hear_doors(self, doors: DoorKeeper) -> None:
        if not doors.hear(self._on_door_end):
            asyncio.get_running_loop().remove_reader(doors.pipe.fileno())

    def _on_door_end(self, end: DoorEnd | None) -> None:
        """A door has died, and is started again; or else their keeper, and they with it."""
        if end is None:
            if not self.stopping:
                self._lost[_DOORS] = "the keeper of the doors was killed"
        else:
            reason = f"door {end.door} ended with exit code {end.code}"
            self.on_warning(f"{reason}; new start")
            if not self.dispatcher.state.accepts:
                self._lost[_DOORS] = reason
        self._wake.set()

    def _on_end(self, task: ServeTask, end: EngineEnd) -> None:
        """An engine has ended; of one that is started again only the open calls are lost."""
        if end.reason is not None:
            self.dispatcher.lose(task.replica)
            if not end.again:
                self._lost[task.replica] = end.reason
                self._refused += [end.reason] * end.refused
                if not self._serves():
                    self.dispatcher.give_up(end.reason)
            if not self.stopping and (end.again or not end.refused):
                name = "replica" if task.role == "both" else f"{task.role} replica"
                then = f"; new start {end.again} of {self.options.restarts}" if end.again else ""
                self.on_warning(f"{name} {task.replica} ended: {end.reason}{then}")
                if end.again:
                    self.dispatcher.metrics.restarted()
        self._wake.set()

    def _serves(self) -> bool:
        """Whether there are doors and an engine of every kind, or will be."""
        if _DOORS in self._lost:
            return False
        roles = {keeper.task.role for keeper in self._keepers}
        left = [keeper.task for keeper in self._keepers if keeper.task.replica not in self._lost]
        return {task.role for task in left} == roles

    def _stop(self) -> None:
        """A signal: the first one drains, the second one ends everything now."""
        for keeper in self._keepers:
            keeper.no_more()
            if self.stopping:
                keeper.kill()
        if self.stopping:
            self._kill_doors()
        self.stopping = True
        self._wake.set()

    async def _until_ready(self) -> None:
        """Wait for all replicas and doors; raises what keeps one from starting."""
        dispatcher, num_peers = self.dispatcher, len(self._keepers) + self.options.doors
        while len(dispatcher.replicas) + len(dispatcher.doors) < num_peers and not self.stopping:
            joined = asyncio.ensure_future(dispatcher.joined.wait())
            woken = asyncio.ensure_future(self._wake.wait())
            await asyncio.wait([joined, woken], return_when=asyncio.FIRST_COMPLETED)
            joined.cancel()
            woken.cancel()
            dispatcher.joined.clear()
            self._wake.clear()
            if self._refused:
                raise FivefoldError(self._refused[0])
            if self._lost:
                raise ServeLost(next(iter(self._lost.values())))

    async def _serve(self, listeners: list[socket.socket]) -> None:
        options, dispatcher = self.options, self.dispatcher
        host, port = listeners[0].getsockname()[:2]
        if sys.platform == "linux":  # somebody may listen now, at this address or at all of them
            bound_socket(options.host, port, bool(options.keys)).close()
        for listener in listeners:
            listener.listen(BACKLOG)
        dispatcher.publish(accepts=True)
        watch = asyncio.ensure_future(self._watch_doors())
        shown = f"[{host}]" if ":" in host else host
        self.on_ready(f"http://{shown}:{port}/v1")
        while not self.stopping and self._serves():
            self._wake.clear()
            await self._wake.wait()
        seconds = options.drain_s if self.stopping else 1.0
        if self._doors is not None:
            self._doors.no_more()
        dispatcher.drain(seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + _LATE_S):
                while dispatcher.doors:
                    dispatcher.joined.clear()
                    await dispatcher.joined.wait()
        watch.cancel()

    async def _watch_doors(self) -> None:
        """Kill doors that are silent, so that others are forked. Beats are counted, not timed: this
        process may have been stopped as well."""
        while True:
            await asyncio.sleep(BEAT_S)
            for number, door in self.dispatcher.doors.items():
                if door.count_beat(_MISSED_BEATS):
                    self.on_warning(f"door {number} was silent for {_MISSED_BEATS * BEAT_S:g} s")
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(door.hello.pid, signal.SIGKILL)

    def _kill_doors(self) -> None:
        if self._doors is not None:
            self._doors.kill([door.hello.pid for door in self.dispatcher.doors.values()])

    async def _end(self) -> None:
        """End all ranks and doors."""
        for keeper in self._keepers:
            keeper.no_more()
        self._kill_doors()
        for replica in self.dispatcher.replicas.values():
            replica.close()
        until = time.monotonic() + (_END_S if self.dispatcher.replicas else 0.0)
        while any(engine.process.is_alive() for engine in self._keepers):
            if time.monotonic() > until:
                for engine_keeper in self._keepers:
                    engine_keeper.kill()
            await asyncio.sleep(0.01)


class ServeLost(RuntimeError):
    """A rank died before the server was up."""
