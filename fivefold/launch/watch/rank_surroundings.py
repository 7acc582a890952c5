"""What a watchdog reads of its process: the clock, and where the main thread stands."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

from fivefold.launch.watch.positions import SAVE_THREAD

_FRAMES = 5  # innermost frames of a stack that are shown
_INNERMOST = 2  # of a thread that saves, whose outer ones wait for what it does
_READINGS = 5  # of a stack, until one is whole
# If one of these is in the innermost frames, the rank waits, or may wait, for other ranks.
_WAITING = (
    "wait",
    "synchronize",
    ".item()",
    "float(",
    "barrier",
    "run_backward",
    "destroy_process",
    "ProcessGroup",
    "process_group",
    "rendezvous",
)
_JOINS = "thread.join("  # the main thread waits for threads that save


class RankSurroundings:
    """Clock, stack and thread of a rank. Tests replace them by a simulated clock, and call `look`
    instead of the thread."""

    def __init__(self) -> None:
        self._main = threading.get_ident()

    def monotonic(self) -> float:
        """Seconds of a monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep while other ranks answer."""
        time.sleep(seconds)

    def stack(self) -> tuple[list[str], bool]:
        """Frames of the main thread, and whether it waits for other ranks."""
        return _stack(self._main)

    def watch(self, task: Callable[[], None]) -> threading.Thread | None:
        """Start the watchdog's thread."""
        thread = threading.Thread(target=task, name="watchdog", daemon=True)
        thread.start()
        return thread


def _stack(thread: int) -> tuple[list[str], bool]:
    """The innermost frames of a thread, without those of torch, outermost first; and whether the
    thread waits, or may wait, for other ranks. If it waits for threads that save, theirs count.

    The thread goes on while its frames are read, and one that has ended in between has no code any
    more. That must not end the thread that watches: it reads them again.
    """
    for _ in range(_READINGS):
        with contextlib.suppress(AttributeError):
            return _read_stack(thread)
    return [], True


def _read_stack(thread: int) -> tuple[list[str], bool]:
    frames = sys._current_frames()
    shown, waits, joins = _frames(frames.get(thread))
    if joins:
        saving = [
            save_thread.ident
            for save_thread in threading.enumerate()
            if save_thread.name == SAVE_THREAD
        ]
        for frame in (frames[ident] for ident in saving if ident in frames):
            lines, theirs, joins = _frames(frame, _INNERMOST)
            if not theirs and not joins:
                return lines, False
    return shown, waits


def _frames(frame: FrameType | None, num_read: int = _FRAMES) -> tuple[list[str], bool, bool]:
    """The innermost frames, whether they wait, and whether they wait for threads."""
    frames = [] if frame is None else traceback.extract_stack(frame)
    inner = [inner_frame.line or "" for inner_frame in frames[-num_read:]]
    ours = [own_frame for own_frame in frames if f"{os.sep}torch{os.sep}" not in own_frame.filename]
    shown = [
        f"  {own_frame.filename}:{own_frame.lineno} {own_frame.name}: {own_frame.line}"
        for own_frame in ours
    ]
    waits = any(word in line for line in inner for word in _WAITING)
    return shown[-_FRAMES:], waits, any(_JOINS in line for line in inner)
