"""Over gloo, as over NCCL: the first message of a pair holds both ranks until both have called.

NCCL connects a pair then. The mesh does it before the first step, and the order of messages is one
in which even that would not lock. Receives that are posted as early as gloo allows do lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fivefold.core.errors import RankLost
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.schedule.receives import postings
from fivefold.core.schedule.schedule import Message, Schedule
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel import transport
from fivefold.parallel.mesh import Mesh
from fivefold.verify.runs import VerifiedRank, VerifySettings, run_rank, run_reference
from fivefold.verify.trial import judge

CASES = [("pp=4", "dualpipe"), ("dp=2 pp=2", "interleaved")]
SOON = 6.0  # seconds without a word: it hangs


def plan_of(layout: str, schedule: str) -> Plan:
    sizes = {"layers": "8" if layout == "pp=4" else "4"}
    options = PlanOptions("tiny", layout=layout, schedule=schedule, microbatches=8, set=sizes)
    return resolve(options, small=True)


class Meeting:
    """Who has called on each group: a first call returns when its other end has called too."""

    def __init__(self) -> None:
        self.met: set[str] = set()

    def at(self, call: Callable[..., Any], side: str, other: str) -> Callable[..., Any]:
        def met(*arguments: Any) -> Any:
            group = arguments[-1]
            pending = call(*arguments)
            if group.group_name not in self.met:
                self.met.add(group.group_name)
                store, name = dist.distributed_c10d._get_default_store(), group.group_name
                store.set(f"{name} {side}", "called")
                store.wait([f"{name} {other}"])
            return pending

        return met


@contextmanager
def first_messages_block() -> Iterator[None]:
    meeting = Meeting()
    send = meeting.at(transport.send, "source", "target")
    receive = meeting.at(transport.receive, "target", "source")
    with patch.object(transport, "send", send), patch.object(transport, "receive", receive):
        yield


def as_early_as_they_may(schedule: Schedule) -> tuple[tuple[tuple[Message, ...], ...], ...]:
    """Every receive a step before its time, as if posting one never blocked."""
    return tuple(
        ((*own[0], *(own[1] if len(own) > 1 else ())), *own[2:], ())[: len(own)]
        for own in postings(schedule)
    )


def blocking(
    worker: Worker, plan: Plan, settings: VerifySettings, connects: bool, early: bool
) -> VerifiedRank:
    with ExitStack() as stack:
        stack.enter_context(first_messages_block())
        if not connects:
            stack.enter_context(patch.object(Mesh, "_connect", lambda self: None))
        if early:
            place = "fivefold.parallel.pipeline.postings"
            stack.enter_context(patch(place, as_early_as_they_may))
        return run_rank(worker, plan, settings)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("layout", "schedule"), CASES)
def test_a_step_ends(layout: str, schedule: str, pool: Pool) -> None:
    plan, settings = plan_of(layout, schedule), VerifySettings(steps=1)
    tasks = [(blocking, (plan, settings, True, False))] * plan.layout.world
    *runs, truths = pool.run_each([*tasks, (run_reference, (plan, settings))])
    assert judge(plan, settings, runs, truths).passed


def test_receives_that_are_posted_too_early_lock() -> None:
    plan, settings = plan_of("pp=4", "dualpipe"), VerifySettings(steps=1)
    with Pool(4, SOON) as ranks, pytest.raises(RankLost, match="was silent"):
        ranks.run_each([(blocking, (plan, settings, False, True))] * 4)
