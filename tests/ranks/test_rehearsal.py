"""A rehearsal does what a run does: replayed or whole, predicted, and recorded by real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch
from weakref import WeakKeyDictionary

import pytest
import torch
from forked_steps import Setup, run, small_plan
from torch import Tensor

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.core.schedule.receives import postings
from fivefold.core.schedule.schedule import Message, Schedule
from fivefold.cost.traffic.order import IssuedCollective
from fivefold.launch.processes import Pool
from fivefold.optim.optimizer import Updater
from fivefold.parallel.boundary import AxisBoundary
from fivefold.parallel.composition import Job, StageChunk
from fivefold.parallel.mesh import CollectiveRecord, Mesh
from fivefold.parallel.units.flat_unit import FlatUnit
from fivefold.rehearse.job import Rehearsed, judged, rehearse
from fivefold.rehearse.rank import RoundRobin, rehearse_rank
from fivefold.rehearse.trace import Traces

MANY = 6  # microbatches: enough for some to be replayed
LAYOUTS = [
    ("dp=2", {"zero": 3}),
    ("tp=2 pp=2", {"microbatches": 9}),  # inputs are gathered again
    ("tp=2 pp=2", {"schedule": "zb-h1"}),
    ("cp=2", {}),
    ("dp=2 ep=2", {}),
    ("dp=2 ep=2", {"ep_nodes": 2}),
    ("pp=2", {"schedule": "interleaved", "chunks": 2}),
    ("pp=4", {"schedule": "zb-h2", "microbatches": 9, "recompute": "full"}),  # gradients wait long
    ("pp=2", {"schedule": "dualpipe", "microbatches": 12}),  # in two directions
    ("dp=2 pp=2 ep=2", {"schedule": "dualpipe", "microbatches": 12}),  # and in two lanes
    ("dp=2", {"zero": 3, "train": Recipe(optimizer="muon")}),
]


def plan_of(layout: str, changes: dict[str, str] | None = None, **options: Any) -> Plan:
    sizes = {"layers": "4" if "pp" in layout else "2", "vocab": "64", **(changes or {})}
    model = "tiny-moe" if "ep" in layout else "tiny"
    said = {"microbatches": MANY, "precision": "bf16"} | options
    return resolve(PlanOptions(model, layout=layout, seq=16, set=sizes, **said), small=True)


@pytest.mark.sample(0.5)
@pytest.mark.parametrize(("layout", "options"), LAYOUTS, ids=str)
def test_replayed_is_whole_and_as_predicted(layout: str, options: dict[str, Any]) -> None:
    plan, traces = plan_of(layout, **options), Traces()
    ranks = range(plan.layout.world)
    runs = [rehearse_rank(plan, rank, traces) for rank in ranks]
    for replayed in runs:
        whole = rehearse_rank(plan, replayed.rank, None)
        assert replayed.calls == whole.calls
        assert replayed.records == whole.records
        assert replayed.levels == whole.levels and replayed.peak == whole.peak
        assert sum(whole.memory.values()) == whole.peak
    assert traces
    assert judged(plan, runs, {}).passed


@pytest.mark.sample(1)
def test_backwards_that_are_split_beside_those_that_are_not() -> None:
    """The rank at the turn of a V joins some input and weight gradients, and others not."""
    plan = plan_of("pp=4", schedule="zb-v", microbatches=8, changes={"layers": "8"})
    replayed, whole = (rehearse_rank(plan, 3, traces) for traces in (Traces(), None))
    assert replayed.calls == whole.calls
    assert replayed.levels == whole.levels and replayed.peak == whole.peak
    kinds = {level.action.rstrip("0123456789")[-1] for level in whole.levels}
    assert kinds == {"F", "B", "I", "W"}


@pytest.mark.nightly
def test_most_microbatches_are_replayed() -> None:
    plan, seen = plan_of("dp=2", microbatches=8), list[int]()
    inner = StageChunk.forward

    def counted(self: StageChunk, x: Tensor | None, batch: Any, microbatch: int) -> Tensor:
        seen.append(microbatch)
        return inner(self, x, batch, microbatch)

    traces = Traces()
    with patch.object(StageChunk, "forward", counted):
        for given, real in ((None, 8), (traces, 4), (traces, 3)):
            seen.clear()
            rehearse_rank(plan, 0, given)
            assert len(seen) == real


REAL = [("dp=2", {"zero": 3}), ("tp=2 pp=2", {"schedule": "zb-h1"}), ("cp=2", {})]


@pytest.mark.sample(0.5)
@pytest.mark.parametrize(("layout", "options"), REAL, ids=str)
def test_real_ranks_call_the_same(pool: Pool, layout: str, options: dict[str, Any]) -> None:
    """Both steps of forked ranks, line by line: messages leave beside what is computed."""
    plan = small_plan(layout, {"layers": "4"}, microbatches=6, precision="fp32", **options)
    rehearsed = [rehearse_rank(plan, rank, {}) for rank in range(plan.layout.world)]
    heard = run(pool, plan, Setup(), listening)
    for one, calls in zip(rehearsed, heard, strict=True):
        step = [each for each in one.calls if not each.is_connection]  # those were made before
        assert by_line(calls) == by_line([*step, *step])


def listening(job: Job, updater: Updater) -> Callable[[], list[IssuedCollective]]:
    """Keep all calls of a job from now on."""
    calls: list[IssuedCollective] = []

    class Listener:
        def begin(self, record: CollectiveRecord, members: tuple[int, ...]) -> None:
            calls.append(IssuedCollective(record.axis, record.kind, record.bytes, members))

        def end(self, token: object) -> None: ...

    job.mesh.observers = (Listener(),)
    return lambda: calls


def by_line(calls: list[IssuedCollective]) -> dict[object, list[object]]:
    """What is called in one order: by axis and ranks."""
    lines: dict[object, list[object]] = {}
    for call in calls:
        lines.setdefault((call.axis, call.members), []).append((call.kind, call.bytes))
    return lines


class Nothing:
    def wait(self) -> None: ...


def skips_a_gather() -> Any:
    """Rank 1 computes with whatever is in the buffer of a unit."""
    inner = FlatUnit.gather

    def skipping(self: FlatUnit) -> None:
        if self.mesh.rank != 1 or "blocks.1" not in self.use.blocks or self.present:
            return inner(self)
        self.present = True
        self.full.untyped_storage().resize_(self.full.nbytes)
        return self.mesh.resized(self.full)

    return patch.object(FlatUnit, "gather", skipping)


def keeps_its_own_tokens() -> Any:
    """Rank 1 takes its own tokens for those of all, in backward alone."""
    inner = AxisBoundary.start_gather

    def alone(self: AxisBoundary, x: Tensor, into: Tensor) -> Any:
        if self.mesh.rank == 1 and torch._C._current_graph_task_id() >= 0:  # in backward
            into.copy_(torch.cat([x] * self.size))
            return Mock()
        return inner(self, x, into)

    return patch.object(AxisBoundary, "start_gather", alone)


def swaps_two_gathers() -> Any:
    """Rank 1 issues its first gather behind its second."""
    inner = Mesh.all_gather
    first: WeakKeyDictionary[Mesh, Any] = WeakKeyDictionary()

    def swapping(self: Mesh, whole: Tensor, part: Tensor, axis: str) -> Any:
        if self.rank != 1 or first.get(self, ()) is None:
            return inner(self, whole, part, axis)
        if self not in first:
            first[self] = (whole, part, axis)
            return Nothing()
        held, first[self] = first[self], None
        work = inner(self, whole, part, axis)
        inner(self, *held).wait()
        return work

    return patch.object(Mesh, "all_gather", swapping)


def sends_another_size() -> Any:
    """Rank 1 sends gradients wider than rank 0 expects them."""
    inner = Mesh.send

    def wide(self: Mesh, tensor: Tensor, target: int) -> Any:
        return inner(self, tensor.double() if self.rank == 1 else tensor, target)

    return patch.object(Mesh, "send", wide)


# Who calls something else than predicted: a swap changes only the order.
FAULTS = [
    (skips_a_gather, "dp=2", [1]),
    (keeps_its_own_tokens, "tp=2", [1]),
    (swaps_two_gathers, "dp=2", []),
    (sends_another_size, "pp=2", [1]),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("plant", "layout", "astray"), FAULTS)
def test_a_fault_of_one_rank_is_seen(
    plant: Callable[[], Any], layout: str, astray: list[int]
) -> None:
    """In layers so wide that each is a unit of its own."""
    plan = plan_of(layout, microbatches=2, zero=3, changes={"width": "2048"})
    with plant():
        found = rehearse(plan)
    assert not found.passed
    assert found.astray == astray
    parted = found.mismatches[0]
    assert (parted.rank, parted.other_rank) == (0, 1)
    assert str(parted.issued) != str(parted.other_issued)
    for rank, call in ((0, parted.issued), (1, parted.other_issued)):
        assert f"rank {rank} makes {call or 'no further call'}" in str(parted)


def forgets_to_connect() -> Any:
    return patch.object(Mesh, "_connect", lambda self: None)


def posts_a_step_too_early() -> Any:
    """Every receive is posted one step before its time, as if posting never blocked."""

    def early(schedule: Schedule) -> tuple[tuple[tuple[Message, ...], ...], ...]:
        return tuple(
            ((*own[0], *(own[1] if len(own) > 1 else ())), *own[2:], ())[: len(own)]
            for own in postings(schedule)
        )

    return patch("fivefold.parallel.pipeline.postings", early)


LOCKING = [
    ("pp=2", "1f1b", 4),
    ("pp=2", "dualpipe", 4),
    ("pp=4", "zb-v", 8),
    ("pp=4", "dualpipe", 8),
    ("pp=4", "v-min", 8),
    ("pp=4", "v-half", 8),
    ("pp=4", "gpipe", 8),
    ("pp=4", "bfs", 8),
    ("dp=2 pp=2", "interleaved", 4),
    ("dp=2 tp=2 pp=2 ep=2", "1f1b", 4),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("layout", "schedule", "microbatches"), LOCKING)
def test_a_step_that_may_lock_is_found(layout: str, schedule: str, microbatches: int) -> None:
    """Groups agree and traffic is as predicted: only the order tells."""
    plan = plan_of(layout, {"layers": "8"}, schedule=schedule, microbatches=microbatches)
    with forgets_to_connect():
        found = rehearsed_alone(plan)
    assert not found.passed
    assert not found.order.cycle
    assert found.order.unconnected
    with posts_a_step_too_early():
        found = rehearsed_alone(plan)
    assert not found.passed
    assert not found.order.unconnected
    cycle = found.order.cycle
    assert len(cycle) > 1
    for one, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        assert other.rank in one.waits_for
    found = rehearsed_alone(plan)
    assert found.passed
    assert found.order.ranks == plan.layout.world


def rehearsed_alone(plan: Plan) -> Rehearsed:
    """All ranks in this process. Only the order may be wrong."""
    traces = Traces()
    found = judged(
        plan, [rehearse_rank(plan, rank, traces) for rank in range(plan.layout.world)], {}
    )
    assert not found.mismatches
    assert not found.astray
    return found


def test_tokens_are_dealt_evenly_or_as_asked() -> None:
    plan = plan_of("dp=4 ep=4", microbatches=1)
    assert RoundRobin(plan, 0, 1.0).rows("ep", 32) == ([8] * 4, [8] * 4)
    like = torch.zeros(4, 2, dtype=torch.int64)
    for imbalance in (1.0, 1.5, 4.0):
        for num_rows in (0, 1, 30, 800):
            dealt = [RoundRobin(plan, rank, imbalance) for rank in range(4)]
            ways = [each.rows("ep", num_rows) for each in dealt]
            leave = ways[0][0]
            assert sum(leave) == num_rows
            assert [way[0] for way in ways] == [leave] * 4
            assert [way[1] for way in ways] == [[rows] * 4 for rows in leave]
            for each, rows in zip(dealt, leave, strict=True):
                experts = each.arriving("ep", num_rows, like)
                assert experts.sum(1).tolist() == [rows] * 4
                assert experts.min() >= 0


def test_the_fullest_expert_has_what_was_asked() -> None:
    plan, num_rows = plan_of("dp=4 ep=4", microbatches=1), 8000
    mean, like = num_rows / 8, torch.zeros(4, 2, dtype=torch.int64)
    first = RoundRobin(plan, 0, 2.5).arriving("ep", num_rows, like)
    assert first[0, 0] == 2.5 * mean
    last = RoundRobin(plan, 3, 2.5).arriving("ep", num_rows, like)
    assert last[0].tolist() == pytest.approx([(8 - 2.5) / 7 * mean] * 2, abs=1)


def test_imbalance_costs_memory_and_moves_what_it_says() -> None:
    plan = plan_of("dp=2 ep=2", microbatches=1)
    even, uneven = (rehearse_rank(plan, 0, None, imbalance) for imbalance in (1.0, 4.0))
    assert uneven.levels[0].bytes > even.levels[0].bytes
    assert judged(plan, [uneven], {}, 4.0).passed
