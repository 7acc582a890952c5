"""Boards: short texts between ranks, beside their collectives."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch.distributed as dist

FAN = 32  # ranks whose rows one of them sums up
_ANSWER_SECONDS = 10.0  # in which the store answers, or somebody asks why
_PROBE_SECONDS = 3  # to connect, and between signs of life of a connection
_KEEP_ALIVE = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")


class Board(Protocol):
    """Key-value store of short texts that all ranks share; no method blocks on another rank."""

    def put(self, name: str, text: str) -> None:
        """Set a key."""

    def get(self, name: str) -> str | None:
        """Get a value; None if the key is not set."""

    def claim(self, name: str, text: str) -> bool:
        """Set a key if it is not set; returns whether this rank was the first."""


class FolderBoard:
    """Board of ranks on one machine: a file for each key.

    torch's `FileStore` does not serve: a reader hangs if a writer was killed in a write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, name: str, text: str) -> None:
        written = self.folder / f"{name}.{os.getpid()}"
        written.write_text(text, "utf-8")
        written.replace(self.folder / name)  # a reader sees the full text or none

    def get(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text("utf-8")
        except FileNotFoundError:
            return None

    def claim(self, name: str, text: str) -> bool:
        try:
            with (self.folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True


class MemoryBoard:
    """Board of a single rank."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def put(self, name: str, text: str) -> None:
        self.texts[name] = text

    def get(self, name: str) -> str | None:
        return self.texts.get(name)

    def claim(self, name: str, text: str) -> bool:
        return self.texts.setdefault(name, text) is text


class StoreBoard:
    """Board of ranks on several machines: torch's store.

    A host that the network has lost gets no answer, and torch waits for one for many minutes. So a
    thread of its own asks the store, and whoever waits for an answer calls `on_silence` every
    `limit` seconds, which raises if the store is gone.
    """

    def __init__(
        self,
        store: dist.Store,
        on_silence: Callable[[float], None],
        limit: float = _ANSWER_SECONDS,
    ) -> None:
        self.store, self._on_silence, self._limit = (
            dist.PrefixStore("board", store),
            on_silence,
            limit,
        )
        self._questions = SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]]]()
        Thread(target=self._ask, name="fivefold-board", daemon=True).start()

    def put(self, name: str, text: str) -> None:
        self._answer(lambda: self.store.set(name, text))

    def get(self, name: str) -> str | None:
        return self._answer(
            lambda: self.store.get(name).decode() if self.store.check([name]) else None
        )

    def claim(self, name: str, text: str) -> bool:
        return self._answer(lambda: self.store.compare_set(name, "", text).decode() == text)

    def _answer(self, question: Callable[[], Any]) -> Any:
        """What the store says; raises torch's error if it says nothing any more."""
        answers = SimpleQueue[Any]()
        self._questions.put((question, answers))
        began = time.monotonic()
        while True:
            try:
                answer = answers.get(timeout=self._limit)
            except Empty:
                self._on_silence(time.monotonic() - began)
                continue
            if isinstance(answer, Exception):
                raise answer
            return answer

    def _ask(self) -> None:
        while True:
            question, answers = self._questions.get()
            try:
                answers.put(question())
            except Exception as error:
                answers.put(error)


class Probes:
    """Whether processes of other hosts are there, stopped or not: a kernel takes connections for a
    process that is stopped, and keeps them. One connection each stays open, since a kernel refuses
    new ones once as many wait as the process allows."""

    def __init__(self) -> None:
        self._links: dict[str, socket.socket] = {}

    def __call__(self, address: str) -> bool | None:
        """Whether a process is there; None if its host cannot be reached."""
        link = self._links.pop(address, None)
        if link is not None and not _is_open(link):
            link.close()  # its process has ended, or the network was lost: one more attempt tells
            link = None
        if link is None:
            host, _, port = address.rpartition(":")
            try:
                link = socket.create_connection((host, int(port)), _PROBE_SECONDS)
            except ConnectionRefusedError:
                return False
            except OSError:
                return None
            link.setblocking(False)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name in _KEEP_ALIVE:  # of Linux: the connection to a host that is lost ends soon
                if hasattr(socket, name):
                    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _PROBE_SECONDS)
        self._links[address] = link
        return True


def _is_open(link: socket.socket) -> bool:
    try:
        return bool(link.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


# Rows of all ranks: a rank of each block sums up those of its block, so that the reader of all
# reads few keys. The store counts a few calls for each rank, whoever reads.


def joined_rows(rows: Mapping[int, str]) -> str:
    """JSON texts of ranks as one."""
    return "{" + ",".join(f'"{rank}":{row}' for rank, row in rows.items()) + "}"


class PaceRows:
    """Rows of all ranks on their pace, by way of the board: no step waits for them.

    A cycle has three looks: each rank puts its newest row, the first of each block sums its rows
    up, and the first rank of all reads the sums.
    """

    def __init__(self, board: Board, rank: int, members: range, block: range) -> None:
        self.board, self.rank, self.members, self.block = board, rank, members, block
        self._row: str | None = None
        self._looks = 0
        self._rows: list[Any] | None = None

    def share(self, row: Any) -> None:
        """Replace the row of this rank."""
        self._row = json.dumps(row)

    def take(self) -> list[Any] | None:
        """On the first rank, the rows of all ranks, once."""
        rows, self._rows = self._rows, None
        return rows

    def look(self) -> None:
        """Go on with the cycle."""
        if self._looks == 0:
            row, self._row = self._row, None
            if row is None:
                return
            self.board.put(f"pace-{self.rank}", row)
        elif self._looks == 1 and self.block:
            rows = {rank: row for rank in self.block if (row := self.board.get(f"pace-{rank}"))}
            self.board.put(f"paces-{self.block[0] // FAN}", joined_rows(rows))
        elif self._looks == 2 and self.rank == self.members[0]:
            rows = self._read()
            self._rows = rows if len(rows) == len(self.members) else None
        self._looks = (self._looks + 1) % 3

    def _read(self) -> list[Any]:
        if len(self.members) <= FAN:
            texts = (self.board.get(f"pace-{rank}") for rank in self.members)
            return [json.loads(text) for text in texts if text]
        sums = (self.board.get(f"paces-{first // FAN}") for first in self.members[::FAN])
        return [row for text in sums if text for row in json.loads(text).values()]
