"""Lanes: two computations of one rank that take turns, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch

_CPU = torch.device("cpu")
First = TypeVar("First")
Second = TypeVar("Second")


def _nothing() -> None:
    """Nobody listens."""


def use_device(device: torch.device) -> None:
    """Make `device` the current one of this thread: every thread begins with GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Lanes:
    """Two computations of one rank in two threads: one runs while the other waits.

    The turn changes only at fixed points: where a lane has issued a collective and not yet waited
    for it, and where it makes room for the other one (`parallel/expert.py`). All ranks of a group
    therefore issue the collectives of both lanes in the same order, whatever their speed. Two free
    threads would not.
    """

    def __init__(self, device: torch.device = _CPU) -> None:
        self._second = ThreadPoolExecutor(1, "fivefold-lane", partial(use_device, device))
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._running = [False, False]
        self._main = threading.get_ident()
        self._around: Callable[[], AbstractContextManager[object]] = nullcontext
        self._on_pause: Callable[[], None] = _nothing

    @contextmanager
    def inside(
        self,
        around: Callable[[], AbstractContextManager[object]],
        on_pause: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Run second lanes in this context: dispatch modes of torch are local to a thread.

        `on_pause` is called wherever a lane would give its turn away.
        """
        before = self._around, self._on_pause
        self._around, self._on_pause = around, on_pause or _nothing
        try:
            yield
        finally:
            self._around, self._on_pause = before

    def run(self, first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
        """Run both lanes, and return both results. The second begins: a backward issues a
        collective at once, which the forward in the first lane hides."""
        self._running = [True, True]
        self._main = threading.get_ident()
        other = self._second.submit(self._run_second, second)
        try:
            self.pause()
            first_result = first()
        finally:
            self._leave(0)
            result = other.result()
        return first_result, result

    def pause(self) -> None:
        """Yield to the other lane, if it runs."""
        self._on_pause()
        lane = 0 if threading.get_ident() == self._main else 1
        if self._running[1 - lane]:
            self._turns[1 - lane].release()
            self._turns[lane].acquire()

    def _run_second(self, second: Callable[[], Second]) -> Second:
        self._turns[1].acquire()
        try:
            with self._around():
                return second()
        finally:
            self._leave(1)

    def _leave(self, lane: int) -> None:
        """The other lane goes on alone."""
        self._running[lane] = False
        if self._running[1 - lane]:
            self._turns[1 - lane].release()
