"""Print lines in a thread, so that nobody who trains or serves waits for whoever reads them.

A pager that is not scrolled, or a terminal that was stopped with Ctrl-S, makes a write wait for as
long as it likes. Lines wait in a bounded buffer meanwhile; those that find no room are counted.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from fivefold.core import counted

_MOST_LINES = 2000  # that wait: some hundred kilobytes
Echo = Callable[[str, bool], None]
"""Prints a line, on standard error if the second argument is true."""


class LinePrinter:
    """A thread that prints; it starts with the first line, after ranks were forked."""

    def __init__(self, echo: Echo, most: int = _MOST_LINES) -> None:
        self.echo, self.dropped = echo, 0
        self.lines: queue.Queue[tuple[str, bool] | None] = queue.Queue(most)
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def print_line(self, line: str, err: bool = False) -> None:
        """Print it soon, or drop it; raises what went wrong with an earlier line."""
        self._raise()
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="fivefold-print", daemon=True)
            self.thread.start()
        try:
            self.lines.put_nowait((line, err))
        except queue.Full:
            self.dropped += 1

    def close(self, seconds: float | None = None) -> None:
        """Wait until all lines are printed, at most so many seconds if given."""
        if self.thread is not None:
            with contextlib.suppress(queue.Full):
                self.lines.put(None, timeout=seconds)
            self.thread.join(seconds)
            self.thread = None
        self._raise()

    def _run(self) -> None:
        try:
            while (message := self.lines.get()) is not None:
                self.echo(*message)
                if self.dropped and self.lines.empty():
                    self._say_dropped()
            self._say_dropped()
        except BaseException as error:
            self.error = error
            while self.lines.get() is not None:  # nobody waits for room
                pass

    def _say_dropped(self) -> None:
        number, self.dropped = self.dropped, 0
        if number:
            lines = counted(number, "line")
            self.echo(f"fivefold: {lines} not printed, because nobody read the output", True)

    def _raise(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
