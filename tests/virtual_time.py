"""A clock that jumps from event to event, in which what sleeps lets other events happen."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from itertools import count


class _Over(BaseException):
    """No more events happen: who still sleeps ends."""


class VirtualTime:
    """Events in the order of their times, one after the other. One that sleeps keeps its thread,
    and another thread goes on with the events. Only one thread runs at a time, so that the same
    events always happen in the same order."""

    def __init__(self) -> None:
        self.now, self._end, self._over = 0.0, 0.0, False
        self._events: list[tuple[float, int, Callable[[], object] | threading.Event]] = []
        self._number = count()
        self._asleep: set[threading.Event] = set()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def later(self, seconds: float, action: Callable[[], object] | threading.Event) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._number), action))

    def sleep(self, seconds: float) -> None:
        """Called in an event: others happen meanwhile."""
        turn = threading.Event()
        self._asleep.add(turn)
        self.later(seconds, turn)
        threading.Thread(target=self._run, daemon=True).start()
        turn.wait()
        self._asleep.remove(turn)
        if self._over:
            raise _Over

    def run_until(self, end: float) -> None:
        """All events up to a time; then nothing happens any more."""
        self._end = end
        threading.Thread(target=self._run, daemon=True).start()
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while self._events and self._events[0][0] <= self._end:
                self.now, _, action = heapq.heappop(self._events)
                if isinstance(action, threading.Event):
                    action.set()  # its thread goes on in place of this one
                    return
                action()
        except _Over:
            return
        except BaseException as error:
            self._error = error
        self.now, self._over = self._end, True
        for turn in list(self._asleep):
            turn.set()
        self._ended.set()
