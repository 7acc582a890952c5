"""The life of a server: fork the engines, open the port, and after SIGTERM drain and end.

The keepers of engines are forked before anything else is open, so that ranks inherit no socket of a
client, and before signals are handled, so that none of theirs is taken for ours. They die with the
door, however it ends.
"""

from __future__ import annotations

import asyncio
import ipaddress
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
from fivefold.serve.api import Api
from fivefold.serve.dispatch import Dispatcher
from fivefold.serve.http import HttpLimits
from fivefold.serve.links import EngineRole
from fivefold.serve.metrics import ServeMetrics
from fivefold.serve.prompting import PromptReader
from fivefold.serve.rank import API_SOCKET, ServeTask
from fivefold.serve.supervisor import EngineEnd, EngineKeeper

_BACKLOG = 1024
_END_S = 15.0  # for ranks to end by themselves
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
_USER_TIMEOUT_MS = 60_000  # for bytes that nobody acknowledges


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server."""

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    replicas: int = 1
    prefill_replicas: int = 1  # where prompts have engines of their own
    restarts: int = 3  # of an engine that has lost a rank
    max_queue: int = 1024  # sequences that wait
    max_running: int = 256  # sequences in the engine of a data rank
    max_batch_tokens: int | None = None  # of a forward; None: what suits the device
    cache_gb: float | None = None
    drain_s: float = 60.0
    limits: HttpLimits = field(default_factory=HttpLimits)


def listening_socket(host: str, port: int, has_keys: bool) -> socket.socket:
    """Listen on an address; beyond loopback only with API keys."""
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
        self.log, self.on_warning = log, on_warning
        self.stopping = False
        self.dispatcher = Dispatcher(
            setup.model.shape,
            setup.codec,
            setup.ends,
            ServeMetrics(),
            options.max_queue,
            options.max_running,
            prefill is not None,
        )
        prompts = PromptReader(setup.codec, setup.model.folder)
        adapters = tuple(adapter.name for adapter in setup.model.adapters)
        same = (options.keys, self.dispatcher, prompts, options.limits, self.log, adapters)
        self.api = Api(options.name, *same)
        self._wake = asyncio.Event()
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
        listening_socket(options.host, options.port, bool(options.keys)).close()
        for task in self._tasks(folder):
            self._keepers.append(EngineKeeper(task, options.restarts, self._keepers))
        links = None
        try:
            for keeper in self._keepers:
                loop.add_reader(keeper.pipe.fileno(), self._hear, keeper)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop)
            links = await asyncio.start_unix_server(self.dispatcher.hear, folder / API_SOCKET)
            await asyncio.to_thread(self.dispatcher.grammars.load)  # ranks load as well
            await self._until_ready()
            if not self.stopping:
                await self._serve()
        finally:
            if links is not None:
                links.close()
            await self._end()
        return 1 if self._lost and not self.stopping else 0

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
        """Whether there is an engine of every kind, or will be."""
        roles = {keeper.task.role for keeper in self._keepers}
        left = [keeper.task for keeper in self._keepers if keeper.task.replica not in self._lost]
        return {task.role for task in left} == roles

    def _stop(self) -> None:
        """A signal: the first one drains, the second one ends everything now."""
        for keeper in self._keepers:
            keeper.no_more()
            if self.stopping:
                keeper.kill()
        self.stopping = True
        self._wake.set()

    async def _until_ready(self) -> None:
        """Wait for all replicas; raises what keeps one from starting."""
        dispatcher = self.dispatcher
        while len(dispatcher.replicas) < len(self._keepers) and not self.stopping:
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

    async def _serve(self) -> None:
        options = self.options
        listener = listening_socket(options.host, options.port, bool(options.keys))
        self.api.limits = options.limits.within_open_files()  # after the fork: ranks need few
        server = await asyncio.start_server(self.api.accept, sock=listener, backlog=_BACKLOG)
        await self.api.prompts.start()
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.on_ready(f"http://{shown}:{port}/v1")
        while not self.stopping and self._serves():
            self._wake.clear()
            await self._wake.wait()
        await self.api.drain(options.drain_s if self.stopping else 1.0)
        server.close()

    async def _end(self) -> None:
        """End all ranks."""
        for keeper in self._keepers:
            keeper.no_more()
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
