"""Two computations of one rank that take turns: one runs while the other waits for a collective.

The turn changes only at set places: where a lane has issued a collective and not yet waited for it,
and where it makes room for the other (`parallel/expert.py`). All ranks of a group so issue the
collectives of both lanes in the same order, on the same groups, whatever their speed; two free
threads would not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from fivefold.parallel.mesh import Mesh

First = TypeVar("First")
Second = TypeVar("Second")


class Lanes:
    """Runs pairs of functions, the second one in a thread of its own."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        # What the second lane runs in: modes of torch's dispatcher do not reach other threads.
        self.around: Callable[[], AbstractContextManager[object]] = nullcontext
        self._second = ThreadPoolExecutor(1, thread_name_prefix="fivefold-lane")
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._running = [False, False]
        self._main = threading.get_ident()

    def run(self, first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
        """Both results. The second lane begins: a backward has a collective to issue at once, which
        goes on behind the first computation of a forward."""
        self._running = [True, True]
        self.mesh.pause = self._pause
        self._main = threading.get_ident()
        try:
            other = self._second.submit(self._run_second, second)
            try:
                self._pause()
                found = first()
            finally:
                self._leave(0)
                result = other.result()
            return found, result
        finally:
            self.mesh.pause = None

    def _run_second(self, second: Callable[[], Second]) -> Second:
        self._turns[1].acquire()
        try:
            with self.around():
                return second()
        finally:
            self._leave(1)

    def _pause(self) -> None:
        lane = 0 if threading.get_ident() == self._main else 1
        if self._running[1 - lane]:
            self._turns[1 - lane].release()
            self._turns[lane].acquire()

    def _leave(self, lane: int) -> None:
        """The other lane goes on alone."""
        self._running[lane] = False
        if self._running[1 - lane]:
            self._turns[1 - lane].release()
