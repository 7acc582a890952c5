"""Boards: short texts between ranks, beside their collectives."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch.distributed as dist

_ANSWER_SECONDS = 10.0  # in which the store answers, or its host cannot be reached


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
    thread of its own asks the store, and who asks waits a few seconds at most.
    """

    def __init__(self, store: dist.Store, limit: float = _ANSWER_SECONDS) -> None:
        self.store, self._limit = dist.PrefixStore("board", store), limit
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
        """What the store says; raises torch's error if it says nothing in time."""
        answers = SimpleQueue[Any]()
        self._questions.put((question, answers))
        try:
            answer = answers.get(timeout=self._limit)
        except Empty:
            raise dist.DistNetworkError(f"no answer for {self._limit:.0f} s") from None
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
