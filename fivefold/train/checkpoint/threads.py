"""Threads that write, hash and read the files of a checkpoint at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import Thread
from typing import TypeVar

from fivefold.launch.watch import SAVE_THREAD

Item = TypeVar("Item")
Result = TypeVar("Result")

NUM_STREAMS = 8  # files of one rank that are written, hashed or read at a time
STREAM_BYTES = 64 << 20  # less is not worth another file and thread


def num_streams(num_bytes: int) -> int:
    """Number of files a rank writes for so many bytes, and of threads that read them.

    >>> [num_streams(num_bytes) for num_bytes in (0, 100, 100 << 20, 10 << 30)]
    [1, 1, 2, 8]
    """
    return min(NUM_STREAMS, max(1, -(-num_bytes // STREAM_BYTES)))


def in_threads(
    work: Callable[[Item], Result], items: Iterable[Item], num_threads: int
) -> list[Result]:
    """Map `work` over items in threads, in order.

    After an error no thread takes another item, and the first error is raised when all have ended.
    A process that exits does not wait for these threads.
    """
    waiting = deque(enumerate(items))
    results: dict[int, Result] = {}
    errors: list[Exception] = []

    def run() -> None:
        while waiting and not errors:
            try:
                number, item = waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                results[number] = work(item)
            except Exception as error:
                errors.append(error)

    number = min(num_threads, len(waiting)) - 1
    threads = [Thread(target=run, name=SAVE_THREAD, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]
