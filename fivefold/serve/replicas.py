"""Replicas: the state of each, and which one takes a request.

A request goes to the replica that has the least to do for it: the tokens that its open requests may
have in the end, and those of the prompt that its cache does not know. So replicas are loaded alike,
and prompts with a common beginning meet where it was computed.

Where prompts have engines of their own, a request takes a place in one of both kinds at once: it
begins only if there is room for all of it, and its cache never waits for an engine.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fivefold.core.model import BLOCK
from fivefold.generate import Drawn, chained_digest
from fivefold.serve.links import (
    AddCommand,
    CloseCommand,
    DropCommand,
    EngineCommand,
    ForgetCommand,
    KvTarget,
    ReplicaHello,
    StepNews,
    packed_message,
)
from fivefold.serve.routed import RoutedRequest

_MOST_BLOCKS = 64  # of a prompt that are compared
_MOST_DIGESTS = 1 << 16  # that are remembered of a replica


class ServingReplica:
    """The state of a serving engine, as the dispatcher sees it."""

    def __init__(self, hello: ReplicaHello, writer: asyncio.StreamWriter, most: int) -> None:
        """`most`: sequences of a data rank at a time."""
        self.index, self.role, self.start = hello.replica, hello.role, hello.start
        self.blocks, self.writer, self.most = hello.blocks, writer, most * hello.data_ranks
        self.tokens_of_one = hello.blocks_of_one * BLOCK
        self.alive = True
        self.open: dict[str, RoutedRequest] = {}
        self.load = 0  # tokens that its open requests may have
        self.free_blocks, self.preempted = hello.blocks, 0
        self.drafted = self.accepted = 0
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._told: set[str] = set()  # of open ones, those that the engine knows
        self._loads = [0] * hello.data_ranks  # of those with a place
        self._places: dict[str, KvTarget] = {}
        self.sources: dict[str, ServingReplica] = {}  # of those whose cache may be on its way

    @property
    def has_room(self) -> bool:
        return self.alive and len(self.open) < self.most

    def add(self, routed: RoutedRequest, digests: Iterable[bytes] = ()) -> None:
        """Start a request; `digests` are those of its prompt."""
        self._begin(routed, digests, AddCommand(routed.request))

    def add_prompt(
        self, routed: RoutedRequest, digests: Iterable[bytes], after: ServingReplica
    ) -> None:
        """Prefill a routed, and reserve capacity in its decode engine."""
        request, target = replace(routed.request, max_tokens=1), None
        if routed.request.max_tokens > 1:
            target = after.reserve(routed)
        self._begin(routed, digests, AddCommand(request, target))

    def _begin(self, routed: RoutedRequest, digests: Iterable[bytes], command: AddCommand) -> None:
        self.open[routed.id] = routed
        self.load += tokens_of(routed)
        for digest in digests:
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > _MOST_DIGESTS:
            self._known.popitem(last=False)
        self._told.add(routed.id)
        self._tell(command)

    def reserve(self, routed: RoutedRequest) -> KvTarget:
        """Reserve capacity for a request whose prompt another engine prefills."""
        home = self._loads.index(min(self._loads))
        self._loads[home] += tokens_of(routed)
        self.open[routed.id] = routed
        self.load += tokens_of(routed)
        target = self._places[routed.id] = KvTarget(self.index, self.start, home)
        return target

    def go_on(self, routed: RoutedRequest, source: ServingReplica, drawn: Drawn) -> None:
        """Continue a request when its cache has arrived."""
        self._told.add(routed.id)
        self.sources[routed.id] = source
        self._tell(AddCommand(routed.request, home=self._places[routed.id].home, drawn=drawn))

    def forget(self, id: str, home: int) -> None:
        """Drop a cache that is on its way."""
        self._tell(ForgetCommand(id, home))

    def ended(self, routed: RoutedRequest) -> None:
        """Release a request that the engine has ended, or will."""
        if self.open.pop(routed.id, None) is not None:
            self.load -= tokens_of(routed)
            self._told.discard(routed.id)
            self.sources.pop(routed.id, None)
            if (target := self._places.pop(routed.id, None)) is not None:
                self._loads[target.home] -= tokens_of(routed)

    def drop(self, routed: RoutedRequest) -> None:
        """Abort a request: its blocks are free after the current step."""
        if routed.id in self.open:
            in_engine = routed.id in self._told
            self.ended(routed)
            if in_engine:
                self._tell(DropCommand(routed.id))

    def close(self) -> None:
        self._tell(CloseCommand())

    def lose(self) -> None:
        """Mark it dead."""
        self.alive = False

    def heard(self, news: StepNews) -> None:
        self.free_blocks, self.preempted = news.free_blocks, news.preempted
        self.drafted, self.accepted = news.drafted, news.accepted

    def known(self, digests: Sequence[bytes]) -> int:
        """Number of the first blocks of a prompt that this replica has cached."""
        count = 0
        while count < len(digests) and digests[count] in self._known:
            count += 1
        return count

    def _tell(self, command: EngineCommand) -> None:
        if self.alive and not self.writer.is_closing():
            self.writer.write(packed_message(command))


def tokens_of(routed: RoutedRequest) -> int:
    """Most tokens of a request."""
    return len(routed.request.prompt) + routed.request.max_tokens


def prompt_digests(prompt: Sequence[int], adapter: int = 0) -> list[bytes]:
    """Chained digests of the full blocks of a prompt, which adapters do not share."""
    digests, before = list[bytes](), b"%d" % adapter
    for start in range(0, min(len(prompt) // BLOCK, _MOST_BLOCKS) * BLOCK, BLOCK):
        before = chained_digest(before, prompt[start : start + BLOCK])
        digests.append(before)
    return digests


def least_loaded(
    replicas: Iterable[ServingReplica], digests: Sequence[bytes]
) -> ServingReplica | None:
    """Replica with the least work for a prompt; None if all are full."""
    free = [replica for replica in replicas if replica.has_room]
    return min(
        free, key=lambda replica: replica.load - BLOCK * replica.known(digests), default=None
    )
