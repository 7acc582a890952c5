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
from fivefold.serve.answers import ServedChoice
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

_MOST_BLOCKS = 64  # of a prompt that are compared
_MOST_DIGESTS = 1 << 16  # that are remembered of a replica


class ServingReplica:
    """The state of a serving engine, as the API process sees it."""

    def __init__(self, hello: ReplicaHello, writer: asyncio.StreamWriter, most: int) -> None:
        """`most`: sequences of a data rank at a time."""
        self.index, self.role, self.start = hello.replica, hello.role, hello.start
        self.blocks, self.writer, self.most = hello.blocks, writer, most * hello.data_ranks
        self.tokens_of_one = hello.blocks_of_one * BLOCK
        self.alive = True
        self.open: dict[str, ServedChoice] = {}
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

    def add(self, choice: ServedChoice, digests: Iterable[bytes] = ()) -> None:
        """Start a choice; `digests` are those of its prompt."""
        self._begin(choice, digests, AddCommand(choice.request))

    def add_prompt(
        self, choice: ServedChoice, digests: Iterable[bytes], after: ServingReplica
    ) -> None:
        """Prefill a choice, and reserve capacity in its decode engine."""
        request, target = replace(choice.request, max_tokens=1), None
        if choice.request.max_tokens > 1:
            target = after.reserve(choice)
        self._begin(choice, digests, AddCommand(request, target))

    def _begin(self, choice: ServedChoice, digests: Iterable[bytes], command: AddCommand) -> None:
        self.open[choice.id] = choice
        self.load += tokens_of(choice)
        for digest in digests:
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > _MOST_DIGESTS:
            self._known.popitem(last=False)
        self._told.add(choice.id)
        self._tell(command)

    def reserve(self, choice: ServedChoice) -> KvTarget:
        """Reserve capacity for a choice whose prompt another engine prefills."""
        home = self._loads.index(min(self._loads))
        self._loads[home] += tokens_of(choice)
        self.open[choice.id] = choice
        self.load += tokens_of(choice)
        target = self._places[choice.id] = KvTarget(self.index, self.start, home)
        return target

    def go_on(self, choice: ServedChoice, source: ServingReplica, drawn: Drawn) -> None:
        """Continue a choice when its cache has arrived."""
        self._told.add(choice.id)
        self.sources[choice.id] = source
        self._tell(AddCommand(choice.request, home=self._places[choice.id].home, drawn=drawn))

    def forget(self, id: str, home: int) -> None:
        """Drop a cache that is on its way."""
        self._tell(ForgetCommand(id, home))

    def ended(self, choice: ServedChoice) -> None:
        """Release a choice that the engine has ended, or will."""
        if self.open.pop(choice.id, None) is not None:
            self.load -= tokens_of(choice)
            self._told.discard(choice.id)
            self.sources.pop(choice.id, None)
            if (target := self._places.pop(choice.id, None)) is not None:
                self._loads[target.home] -= tokens_of(choice)

    def drop(self, choice: ServedChoice) -> None:
        """Abort a choice: its blocks are free after the current step."""
        if choice.id in self.open:
            in_engine = choice.id in self._told
            self.ended(choice)
            if in_engine:
                self._tell(DropCommand(choice.id))

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


def tokens_of(choice: ServedChoice) -> int:
    """Most tokens of a choice."""
    return len(choice.request.prompt) + choice.request.max_tokens


def prompt_digests(prompt: Sequence[int]) -> list[bytes]:
    """Chained digests of the full blocks of a prompt."""
    digests, before = list[bytes](), b""
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
