"""What a rank holds during a step, counted on its tensors, is what the schedule says.

Of each microbatch and chunk two tensors are followed, without keeping them alive: one that the
weight gradient needs, and one that only the input gradient needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from pipelines import SYNCHRONOUS, Case
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from fivefold.core.plan.plan import Plan
from fivefold.core.schedule.catalog import family
from fivefold.core.schedule.clock import memory_levels, peak_activations
from fivefold.core.schedule.receives import postings
from fivefold.core.schedule.schedule import Message, Schedule, Step, actions_of, merged, needed
from fivefold.core.schedule.selection import choose
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.model.linear_math import GradientSink
from fivefold.parallel.deferred import GradientQueue
from fivefold.parallel.pipeline import Pipeline, _Outbox
from fivefold.parallel.stage import ActionObserver
from fivefold.verify.runs import VerifySettings, run_rank

PATIENCE = 20.0  # seconds for a message to be received


def plan_of(name: str, ranks: int) -> Plan:
    case = Case(name, f"pp={ranks}", choose(name).default_chunks, recompute="none")
    return case.plan


@dataclass
class Level:
    """The most storages of one kind that were alive during each step, and after the last one."""

    seen: list[StorageWeakRef] = field(default_factory=list)
    most: list[int] = field(default_factory=list)

    def note(self, tensor: Tensor) -> None:
        self.seen.append(StorageWeakRef(tensor.untyped_storage()))
        self.most[-1] = max(self.most[-1], self.alive())

    def begin(self) -> None:
        self.most.append(self.alive())

    def alive(self) -> int:
        self.seen = [each for each in self.seen if not each.expired()]
        return len(self.seen)


class Told(ActionObserver):
    """Calls a function with every action that begins."""

    def __init__(self, before: Callable[[Step], None]) -> None:
        self.begin = before  # type: ignore[method-assign]


@contextmanager
def measured(pipeline: Pipeline) -> Iterator[tuple[Level, Level]]:
    """Follow what the weight gradient needs, and what the input gradient needs."""
    weight, gradient = Level(), Level()
    hooks: list[RemovableHandle] = []
    patches = ExitStack()
    for chunk in pipeline.chunks.values():
        inner: Any = getattr(chunk, "chunk", chunk)  # a stashing chunk has one inside
        mlp = next(iter(inner.model.blocks.values())).mlp
        hooks += [
            mlp.down.register_forward_pre_hook(lambda _, given: weight.note(given[0])),
        ]
        project = mlp.project
        patches.enter_context(patch.object(mlp, "project", partial(_noting, gradient, project)))

    def before(step: Step) -> None:
        weight.begin()
        gradient.begin()

    pipeline.observer = Told(before)
    yield weight, gradient
    weight.begin()
    gradient.begin()
    patches.close()
    for hook in hooks:
        hook.remove()


def _noting(level: Level, project: Any, *given: Any) -> Any:
    """The projections of an MLP, whose first output is followed."""
    outputs = project(*given)
    level.note(outputs[0])
    return outputs


def levels_of(
    worker: Worker, plan: Plan, settings: VerifySettings
) -> list[tuple[list[int], list[int]]]:
    """Both levels of every step of the optimizer, or of the one run without a drain."""
    found: list[tuple[list[int], list[int]]] = []
    run = Pipeline.run

    def measured_run(self: Pipeline, *arguments: Any) -> Any:
        with measured(self) as (weight, gradient):
            result = run(self, *arguments)
        found.append((weight.most, gradient.most))
        return result

    with patch.object(Pipeline, "run", measured_run):
        run_rank(worker, plan, settings)
    return found


def stream_of(plan: Plan, settings: VerifySettings) -> Schedule:
    """The schedule as it is executed: of an asynchronous one all microbatches of the run."""
    schedule = plan.schedule
    if not schedule.asynchronous:
        return schedule
    every = 1 if schedule.name == "pipedream" else schedule.num_microbatches
    return family(schedule.name).make(schedule.num_ranks, settings.steps * every, 1)


NAMES = (*SYNCHRONOUS, "pipedream", "pipedream-2bw")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 4) for name in NAMES), ("zb-v", 8)], ids=lambda each: str(each)
)
def test_activations_live_from_forward_to_the_last_that_needs_them(
    pool: Pool, name: str, ranks: int
) -> None:
    plan, settings = plan_of(name, ranks), VerifySettings(steps=9 if name == "pipedream" else 2)
    schedule = stream_of(plan, settings)
    found = pool.run_each([(levels_of, (plan, settings))] * ranks)
    for rank, (runs, peak) in enumerate(zip(found, peak_activations(schedule), strict=True)):
        steps = merged(schedule, rank)
        assert len(runs) == (1 if schedule.asynchronous else settings.steps)
        for weight, gradient in runs:
            assert max(weight) * schedule.num_ranks / schedule.num_stages == peak, rank
            assert weight == [*memory_levels(steps), 0], rank
            assert gradient == [*memory_levels(steps, after_input_grad=0.0), 0], rank


def hoarding(
    worker: Worker, plan: Plan, settings: VerifySettings
) -> list[tuple[list[int], list[int]]]:
    """The same, with a queue that forgets to let go of what its weight gradients needed."""
    kept: list[object] = []
    settle = GradientQueue.settle

    def keep(self: GradientQueue, microbatch: int, sink: GradientSink) -> None:
        kept.append(list(self._owed[microbatch]))
        settle(self, microbatch, sink)

    with patch.object(GradientQueue, "settle", keep):
        return levels_of(worker, plan, settings)


def test_what_is_held_too_long_is_seen(pool: Pool) -> None:
    plan, settings = plan_of("zb-h1", 2), VerifySettings(steps=1)
    _, ((weight, gradient),) = pool.run_each([(hoarding, (plan, settings))] * 2)
    steps = merged(plan.schedule, 1)
    assert max(weight) > max(memory_levels(steps)) and weight[-1] > 0
    assert gradient == [*memory_levels(steps, after_input_grad=0.0), 0]


def buffers_of(worker: Worker, plan: Plan, settings: VerifySettings) -> list[list[set[Message]]]:
    """The messages that have a buffer when each step begins, for each run of the pipeline."""
    found: list[list[set[Message]]] = []
    run = Pipeline.run

    def watched(self: Pipeline, *arguments: Any) -> Any:
        found.append([])
        self.observer = Told(lambda step: found[-1].append(set(self.inbox.coming)))
        result = run(self, *arguments)
        found[-1].append(set(self.inbox.coming))
        return result

    with patch.object(Pipeline, "run", watched):
        run_rank(worker, plan, settings)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "most"), [("gpipe", 1), ("zb-v", 3), ("dualpipe", 2)])
def test_buffers_are_made_when_their_message_is_due(pool: Pool, name: str, most: int) -> None:
    plan = plan_of(name, 4)
    schedule, largest = plan.schedule, 0
    found = pool.run_each([(buffers_of, (plan, VerifySettings()))] * 4)
    for rank, runs in enumerate(found):
        steps = merged(schedule, rank)
        for buffers in runs:
            for place, held in enumerate(buffers):
                done = [action for step in steps[:place] for action in actions_of(step)]
                taken = {needed(schedule, action) for action in done}
                posted = {each for some in postings(schedule)[rank][:place] for each in some}
                assert held == posted - taken
            largest = max(largest, *map(len, buffers))
    assert largest == most


def sends_of(worker: Worker, plan: Plan, settings: VerifySettings) -> list[int]:
    """How many sends were under way after each of them, where each had time to be received."""
    found: list[int] = []
    sent: list[StorageWeakRef] = []
    run, send = Pipeline.run, _Outbox.send

    def remember(self: _Outbox, message: Message, tensor: Tensor) -> None:
        send(self, message, tensor)
        sent.append(StorageWeakRef(tensor.untyped_storage()))
        found.append(len(self.waited_for))

    def patient(self: Pipeline, *arguments: Any) -> Any:
        def before(step: Step) -> None:
            for each in self.outbox.waited_for:
                each.result(PATIENCE)
            until = time.monotonic() + PATIENCE
            while not all(each.expired() for each in sent):
                assert time.monotonic() < until, "what was received is still held"
                time.sleep(0.001)

        self.observer = Told(before)
        result = run(self, *arguments)
        assert not self.outbox.waited_for
        return result

    with patch.object(Pipeline, "run", patient), patch.object(_Outbox, "send", remember):
        run_rank(worker, plan, settings)
    return found


def test_sends_are_let_go_when_they_are_received(pool: Pool) -> None:
    """GPipe's first rank sends all its forwards before it is told anything."""
    plan, settings = plan_of("gpipe", 2), VerifySettings()
    first, _ = pool.run_each([(sends_of, (plan, settings)), (run_rank, (plan, settings))])
    assert first == [1] * plan.schedule.num_microbatches * settings.steps
