"""Requests that wait for an engine, in turn between clients.

Each client has a queue of its own, and the queues are served round robin, a sequence at a time: who
sends a thousand requests waits for them, and nobody else does. All queues together have a limit. A
newcomer that finds them full takes the place of the newest call of the client that has the most, if
that one has clearly more than its own client; else it is refused.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class QueuedItem(Protocol):
    """A sequence in the queue, of a call of a client."""

    @property
    def client(self) -> str: ...

    @property
    def call(self) -> object: ...


Item = TypeVar("Item", bound=QueuedItem)


class FairQueue(Generic[Item]):
    """Bounded queue that serves clients in turn."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self._queues: OrderedDict[str, deque[Item]] = OrderedDict()

    def push(self, client: str, items: Iterable[Item]) -> list[Item] | None:
        """Queue the sequences of one call; returns those evicted for it, or None if the call is
        refused."""
        new, pushed_out = list(items), list[Item]()
        queue_size = len(self._queues.get(client, ()))
        if self.size + len(new) > self.most:
            victims = self._replaceable(
                client, queue_size + len(new), self.size + len(new) - self.most
            )
            if victims is None:
                return None
            pushed_out = victims
            for victim in pushed_out:
                self.remove(victim)
        self._queues.setdefault(client, deque()).extend(new)
        self.size += len(new)
        return pushed_out

    def restore(self, item: Item) -> None:
        """Requeue a sequence in front of those of its client, beyond the limit."""
        self._queues.setdefault(item.client, deque()).appendleft(item)
        self.size += 1

    def pop(self) -> Item | None:
        """Remove the next sequence: of the client whose turn is longest ago."""
        if not self._queues:
            return None
        client, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        self.size -= 1
        if queue:
            self._queues[client] = queue  # at the end
        return item

    def remove(self, item: Item) -> None:
        """Remove a sequence, if it is queued."""
        queue = self._queues.get(item.client)
        if queue is not None and item in queue:
            queue.remove(item)
            self.size -= 1
            if not queue:
                del self._queues[item.client]

    def _replaceable(self, client: str, client_size: int, missing: int) -> list[Item] | None:
        """The newest call of the client with the most, if it makes enough room."""
        greediest = max(
            self._queues, key=lambda other_client: len(self._queues[other_client]), default=client
        )
        queue = self._queues.get(greediest)
        if greediest == client or queue is None:
            return None
        newest = [choice for choice in queue if choice.call is queue[-1].call]
        fair = len(newest) >= missing and len(queue) - len(newest) >= client_size
        return newest if fair else None
