"""Threads that write, hash and read the files of a checkpoint at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import Thread
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

NUM_STREAMS = 8  # files of one rank that are written, hashed or read at a time


def in_threads(
    work: Callable[[Item], Result], items: Iterable[Item], num_threads: int = NUM_STREAMS
) -> list[Result]:
    """What `work` returns for every item, in their order.

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

    threads = [Thread(target=run, daemon=True) for _ in range(min(num_threads, len(waiting)) - 1)]
    for thread in threads:
        thread.start()
    run()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]
