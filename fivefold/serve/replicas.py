"""Replicas: the processes of each, what the door knows of it, and which one takes a request.

A request goes to the replica that has the least to do for it: the tokens that its open requests may
have in the end, and those of the prompt that its cache does not know. So replicas are loaded alike,
and prompts with a common beginning meet where it was computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fivefold.core.errors import RankLost
from fivefold.generate.blocks import BLOCK, chained_digest
from fivefold.generate.text_ranks import RefusedTask, TaskWarning
from fivefold.launch.processes import Pool
from fivefold.serve.answers import ServedChoice
from fivefold.serve.links import (
    AddCommand,
    CloseCommand,
    DropCommand,
    EngineCommand,
    ReplicaHello,
    StepNews,
    packed_message,
)
from fivefold.serve.rank import ServeTask, serve_rank

_PATIENCE_S = 600.0  # of a step, or of reading weights
_MOST_BLOCKS = 64  # of a prompt that are compared
_MOST_DIGESTS = 1 << 16  # that are remembered of a replica


class ReplicaThread(threading.Thread):
    """Forks the ranks of a replica, and waits for their end."""

    def __init__(
        self,
        task: ServeTask,
        on_end: Callable[[int, str | None, bool], None],
        on_warning: Callable[[str], None],
    ) -> None:
        """`on_end` gets the replica, why it ended if that was not asked for, and whether a rank
        has refused the task. Both are called in this thread."""
        super().__init__(name=f"replica-{task.replica}", daemon=True)
        self.task, self.on_end, self.on_warning = task, on_end, on_warning
        self.forked = threading.Event()
        self.pids: list[int] = []
        self._refused: list[str] = []

    def run(self) -> None:
        world, reason = self.task.text.plan.layout.world, None
        try:
            # With `forwards_stop` ranks live through a signal to all processes: the door drains.
            with Pool(world, _PATIENCE_S, forwards_stop=True) as pool:
                self.pids = pool.pids
                self.forked.set()
                pool.run_each([(serve_rank, (self.task,))] * world, on_report=self._on_report)
        except RankLost as lost:
            reason = lost.reason
        except Exception as error:  # whatever it is, the door has to know
            reason = f"{type(error).__name__}: {error}"
        self.forked.set()
        refused = bool(self._refused)
        self.on_end(self.task.replica, self._refused[0] if refused else reason, refused)

    def kill(self) -> None:
        """End its ranks now."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _on_report(self, value: Any) -> None:
        if isinstance(value, RefusedTask):
            self._refused.append(value.reason)
        elif isinstance(value, TaskWarning):
            self.on_warning(value.reason)


class ServingReplica:
    """What the door knows of a replica that serves."""

    def __init__(self, hello: ReplicaHello, writer: asyncio.StreamWriter, most: int) -> None:
        self.index, self.blocks, self.writer, self.most = (
            *(hello.replica, hello.blocks),
            writer,
            most,
        )
        self.tokens_of_one = hello.blocks_of_one * BLOCK
        self.alive = True
        self.open: dict[str, ServedChoice] = {}
        self.load = 0  # tokens that its open requests may have
        self.free_blocks, self.preempted, self.running = hello.blocks, 0, 0
        self._known: OrderedDict[bytes, None] = OrderedDict()

    @property
    def has_room(self) -> bool:
        return self.alive and len(self.open) < self.most

    def add(self, choice: ServedChoice, digests: Iterable[bytes] = ()) -> None:
        """Begin a choice; `digests` are those of its prompt."""
        self.open[choice.id] = choice
        self.load += tokens_of(choice)
        for each in digests:
            self._known[each] = None
            self._known.move_to_end(each)
        while len(self._known) > _MOST_DIGESTS:
            self._known.popitem(last=False)
        self._tell(AddCommand(choice.request))

    def ended(self, choice: ServedChoice) -> None:
        """The engine has ended it, or will."""
        if self.open.pop(choice.id, None) is not None:
            self.load -= tokens_of(choice)

    def drop(self, choice: ServedChoice) -> None:
        """Nobody wants more of it: its blocks are free after the step that runs."""
        if choice.id in self.open:
            self.ended(choice)
            self._tell(DropCommand(choice.id))

    def close(self) -> None:
        self._tell(CloseCommand())

    def lose(self) -> None:
        """It has died."""
        self.alive = False

    def heard(self, news: StepNews) -> None:
        self.free_blocks, self.preempted, self.running = (
            *(news.free_blocks, news.preempted),
            news.open,
        )

    def known(self, digests: Sequence[bytes]) -> int:
        """How many of the first blocks of a prompt were here."""
        found = 0
        while found < len(digests) and digests[found] in self._known:
            found += 1
        return found

    def _tell(self, command: EngineCommand) -> None:
        if self.alive and not self.writer.is_closing():
            self.writer.write(packed_message(command))


def tokens_of(choice: ServedChoice) -> int:
    """The tokens that a choice may have in the end."""
    return len(choice.request.prompt) + choice.request.max_tokens


def prompt_digests(prompt: Sequence[int]) -> list[bytes]:
    """Of the first full blocks of a prompt, each with all before it."""
    digests, before = list[bytes](), b""
    for start in range(0, min(len(prompt) // BLOCK, _MOST_BLOCKS) * BLOCK, BLOCK):
        before = chained_digest(before, prompt[start : start + BLOCK])
        digests.append(before)
    return digests


def least_loaded(
    replicas: Iterable[ServingReplica], digests: Sequence[bytes]
) -> ServingReplica | None:
    """The replica that has the least to do for a prompt; None if all are full."""
    free = [each for each in replicas if each.has_room]
    return min(free, key=lambda each: each.load - BLOCK * each.known(digests), default=None)
