"""A function over many items in several processes, with the results in the order of the items.

Each process has a pipe and, in this process, a thread that feeds it. A few items for each process
are under way at a time, so that memory does not grow with their number. A process whose parent was
killed reads the end of its pipe, and ends.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

from fivefold.core import FivefoldError

T, R = TypeVar("T"), TypeVar("R")
_AHEAD = 3  # items for each process: one that it has, and those that wait


@contextmanager
def in_processes(
    function: Callable[[T], R], num_workers: int
) -> Iterator[Callable[[Iterable[T]], Iterator[R]]]:
    """Ordered parallel map over items; with one worker, in this process."""
    if num_workers == 1:
        yield lambda items: map(function, items)
        return
    context = get_context("fork")  # the function is inherited, and never sent
    pairs = [context.Pipe() for _ in range(num_workers)]
    ours = [pair[0] for pair in pairs]
    processes: list[Any] = []
    for number, (_, theirs) in enumerate(pairs):
        connections = [*ours, *(other for at, (_, other) in enumerate(pairs) if at != number)]
        process = context.Process(target=_serve, args=(function, theirs, connections), daemon=True)
        process.start()
        processes.append(process)
    for _, theirs in pairs:
        theirs.close()
    free: SimpleQueue[Connection] = SimpleQueue()
    for connection in ours:
        free.put(connection)
    threads = ThreadPoolExecutor(num_workers, thread_name_prefix="fivefold-worker")
    try:
        yield lambda items: _ordered(threads, free, items, num_workers * _AHEAD)
    finally:
        for process in processes:
            process.terminate()
        threads.shutdown(wait=True, cancel_futures=True)
        for process in processes:
            process.join()


def _ordered(
    threads: ThreadPoolExecutor, free: SimpleQueue[Connection], items: Iterable[T], most: int
) -> Iterator[Any]:
    waiting: deque[Future[Any]] = deque()
    for item in items:
        waiting.append(threads.submit(_ask, free, item))
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _ask(free: SimpleQueue[Connection], item: Any) -> Any:
    connection = free.get()
    try:
        connection.send(item)
        fine, result = connection.recv()
    except (EOFError, OSError) as error:
        raise FivefoldError(
            "a worker has ended without a result: it may have been killed for its memory; use "
            "fewer --workers"
        ) from error
    finally:
        free.put(connection)  # a dead one too: a thread that waited for it would wait forever
    if not fine:
        raise result
    return result


def _serve(
    function: Callable[[Any], Any], connection: Connection, connections: list[Connection]
) -> None:
    """Answer until the parent closes its pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallel part
    for other in connections:
        other.close()
    while True:
        try:
            item = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, function(item))
        except FivefoldError as error:
            answer = (False, FivefoldError(str(error)))  # which every error can be sent as
        except Exception as error:
            answer = (False, RuntimeError(f"{type(error).__name__}: {error}"))
        try:
            connection.send(answer)
        except OSError:
            return
