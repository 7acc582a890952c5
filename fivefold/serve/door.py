"""Doors: the processes that speak HTTP, and the keeper that forks them, again if one dies.

Each has a socket of the same port, connections, a tokenizer and a process for chats of
its own, and turns tokens into text and events; what waits and runs in which engine is the
dispatcher's. The keeper is forked before the server has threads and handles signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fivefold.core.model import Shape
from fivefold.generate import Codec
from fivefold.launch import die_with
from fivefold.serve.api import Api
from fivefold.serve.calls import DoorCalls
from fivefold.serve.http import HttpLimits
from fivefold.serve.links import (
    BEAT_S,
    DoorBeat,
    DoorHello,
    Drain,
    ServerState,
    packed_message,
    read_messages,
)
from fivefold.serve.prompting import PromptReader

BACKLOG = 1024
_RETRY_S = 0.02
_PAUSE_S = 0.5  # before a new start


@dataclass(frozen=True)
class DoorTask:
    """Task of every door."""

    address: Path  # of the dispatcher's socket
    listeners: tuple[socket.socket, ...]  # of all doors
    name: str
    keys: tuple[str, ...]
    limits: HttpLimits
    shape: Shape
    codec: Codec
    ends: frozenset[int]
    prompts: PromptReader
    adapters: tuple[str, ...]  # names, by their numbers


@dataclass(frozen=True)
class DoorEnd:
    """A door has died."""

    door: int
    code: int


class DoorKeeper:
    """The supervisor of all doors, as the server sees it."""

    def __init__(self, task: DoorTask, peers: list[Connection]) -> None:
        """Forks it; the pipes of `peers`, forked before, are not for it."""
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        inherited = [self.pipe, *peers]
        self.process = context.Process(
            target=_keep, args=(task, theirs, inherited, os.getpid()), name="doors"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            self.process.start()
        theirs.close()

    def hear(self, on_end: Callable[[DoorEnd | None], None]) -> bool:
        """Handle messages; returns whether more may follow. None: the keeper itself has ended."""
        try:
            while self.pipe.poll():
                on_end(self.pipe.recv())
        except (EOFError, OSError):
            on_end(None)
            return False
        return True

    def no_more(self) -> None:
        """Do not restart doors."""
        with contextlib.suppress(OSError):
            self.pipe.send("no more")

    def kill(self, doors: list[int]) -> None:
        """Kill it and the doors with these process ids."""
        for pid in (self.process.pid or 0, *doors):
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGKILL)


def _keep(task: DoorTask, pipe: Connection, inherited: list[Connection], parent: int) -> None:
    die_with(parent)
    for connection in inherited:
        connection.close()
    for number in (signal.SIGTERM, signal.SIGINT):  # for the server, which drains
        signal.signal(number, signal.SIG_IGN)
    context, restarts = multiprocessing.get_context("fork"), True

    def start(door: int) -> BaseProcess:
        process = context.Process(target=_serve, args=(task, door, pipe, os.getpid()))
        process.start()
        return process

    doors = {door: start(door) for door in range(len(task.listeners))}
    while doors:
        news = wait(
            [*([pipe] if restarts else []), *(process.sentinel for process in doors.values())]
        )
        restarts &= pipe not in news
        for door, process in list(doors.items()):
            if process.exitcode is None:
                continue
            del doors[door]
            if process.exitcode and restarts:
                pipe.send(DoorEnd(door, process.exitcode))
                # A message of the server, or its end, means that it wants no more.
                restarts = not pipe.poll(_PAUSE_S)
                if restarts:
                    doors[door] = start(door)


def _serve(task: DoorTask, door: int, pipe: Connection, parent: int) -> None:
    die_with(parent)
    pipe.close()
    if not asyncio.run(_run(task, door)):
        sys.exit(1)  # so that it is started again


async def _run(task: DoorTask, door: int) -> bool:
    """Serve until the link to the dispatcher ends; returns whether it has drained before."""
    reader, writer = await _connected(task.address)

    def send(value: Any) -> None:
        writer.write(packed_message(value))

    calls = DoorCalls(task.shape, task.codec, task.ends, send)
    limits = task.limits.within_open_files()
    api = Api(task.name, task.keys, calls, task.prompts, limits, task.adapters)
    await asyncio.to_thread(calls.grammars.load)  # ranks load as well
    await api.prompts.start()
    send(DoorHello(door, os.getpid()))
    beats = asyncio.ensure_future(_beat(send))
    listener, server, draining = task.listeners[door], None, None
    async for values in read_messages(reader):
        calls.take(values)
        for value in values:
            if isinstance(value, ServerState) and value.accepts and server is None:
                server = await asyncio.start_server(api.accept, sock=listener, backlog=BACKLOG)
            elif isinstance(value, Drain) and server is not None:
                draining = asyncio.ensure_future(_drain(api, value.seconds, server, writer))
    beats.cancel()
    if draining is not None:
        await draining
    writer.close()
    return draining is not None


async def _beat(send: Callable[[Any], None]) -> None:
    """Say that this door lives: one that is stopped has connections all the same."""
    while True:
        await asyncio.sleep(BEAT_S)
        send(DoorBeat())


async def _drain(
    api: Api, seconds: float, server: asyncio.Server, writer: asyncio.StreamWriter
) -> None:
    """Answer what is open. Then new connections are for other doors, and the end of the link ends
    this process."""
    await api.drain(seconds)
    with server.sockets[0].dup() as listener, contextlib.suppress(OSError):
        server.close()
        listener.shutdown(socket.SHUT_RDWR)  # for all processes that have it
    writer.close()
    await writer.wait_closed()


async def _connected(address: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the dispatcher, which may open its socket a little later."""
    until = time.monotonic() + 60.0
    while True:
        try:
            return await asyncio.open_unix_connection(address)
        except OSError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(_RETRY_S)
