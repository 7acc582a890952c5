"""What a rank says to the process that forked it, without ever waiting for that process.

Messages go into the socket at once as long as it has room. If the other process does not read, the
rest waits here, and a thread sends it when there is room again. Beyond a limit the oldest messages
that only inform are dropped and counted; results are never.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
import threading
from collections import deque
from multiprocessing.connection import Connection

_MOST_BYTES = 16 << 20  # that wait
_DROPPED = ("phase", "detail", "report")
_LARGEST = 0x7FFFFFFF  # bytes of a message whose header is short


class RankPipe:
    """Sending end of the pipe from a rank to its parent."""

    def __init__(self, pipe: Connection, most_bytes: int = _MOST_BYTES) -> None:
        # A second descriptor of the same socket: the first one still receives.
        self._socket = socket.socket(fileno=socket.dup(pipe.fileno()))
        self._lock = threading.Lock()  # the watchdog thread sends too
        self._waiting: deque[tuple[str, memoryview]] = deque()
        self._begun = False  # the first message is sent in part
        self._size, self._most = 0, most_bytes
        self._thread: threading.Thread | None = None
        self.num_dropped = 0

    def send(self, kind: str, value: object) -> None:
        """Queue a message; never blocks."""
        message = _framed(pickle.dumps((kind, value), protocol=5))
        with self._lock:
            self._waiting.append((kind, message))
            self._size += len(message)
            self._push()
            self._shrink()
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fivefold-say", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Wait until all messages are sent."""
        while (thread := self._thread) is not None:
            thread.join()

    def close(self) -> None:
        """Close this end's descriptor; the pipe stays open."""
        self._socket.close()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        while self._thread is not None:
            poller.poll()
            with self._lock, contextlib.suppress(OSError):  # the other process is gone
                self._push()
            with self._lock:
                if not self._waiting:
                    self._thread = None

    def _push(self) -> None:
        """Send what the socket takes without waiting; raises if the other process is gone."""
        while self._waiting:
            kind, payload = self._waiting[0]
            try:
                sent = self._socket.send(payload, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                self._waiting.clear()
                raise
            self._size -= sent
            self._begun = sent < len(payload)
            if self._begun:
                self._waiting[0] = (kind, payload[sent:])
            else:
                self._waiting.popleft()

    def _shrink(self) -> None:
        """Drop the oldest messages that only inform, until the rest is small enough."""
        first = int(self._begun)
        while self._size > self._most and first < len(self._waiting):
            kind, message = self._waiting[first]
            if kind not in _DROPPED:
                first += 1
                continue
            del self._waiting[first]
            self._size -= len(message)
            self.num_dropped += 1


def _framed(data: bytes) -> memoryview:
    """A message as `Connection.recv_bytes` reads it."""
    if len(data) > _LARGEST:
        return memoryview(struct.pack("!iQ", -1, len(data)) + data)
    return memoryview(struct.pack("!i", len(data)) + data)
