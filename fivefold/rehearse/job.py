"""A whole job rehearsed: its distinct ranks, compared with the plan and with one another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from fivefold.core.layout import Topology, stage_kind
from fivefold.core.plan import Plan
from fivefold.cost.traffic import (
    UNEVEN_AXES,
    Mismatch,
    OrderVerdict,
    TrafficEntry,
    distinct_ranks,
    mismatches,
    predict_traffic,
    prove_order,
    traffic_entries,
)
from fivefold.launch import Pool, Worker
from fivefold.rehearse.rank import DTYPES, RehearsedRank, rehearse_rank
from fivefold.rehearse.trace import Traces

_PROCESSES = 2
_SLACK = 1e-3  # of the peak: small tensors whose memory goes a moment later


@dataclass(frozen=True)
class Rehearsed:
    """Result of a rehearsal. `without_replay`: ranks that ran a second time without replay, and
    whether they issued the same collectives; `astray`: ranks whose collectives are not those of the
    plan; `order`: whether the step ends, which took `order_seconds` to prove."""

    plan: Plan
    runs: list[RehearsedRank]
    predicted: dict[int, tuple[TrafficEntry, ...]]
    without_replay: dict[int, bool] = field(default_factory=dict[int, bool])
    mismatches: list[Mismatch] = field(default_factory=list[Mismatch])
    astray: list[int] = field(default_factory=list[int])
    order: OrderVerdict = field(default_factory=OrderVerdict)
    order_seconds: float = 0.0

    @property
    def worst(self) -> RehearsedRank:
        """Rank with the highest peak memory."""
        return max(self.runs, key=lambda run: run.peak)

    @property
    def passed(self) -> bool:
        agree = not self.mismatches and not self.astray and all(self.without_replay.values())
        return agree and self.order.ok


def rehearse(
    plan: Plan,
    ranks: Sequence[int] | None = None,
    imbalance: float = 1.0,
    on_rank: Callable[[int], None] | None = None,
) -> Rehearsed:
    """Rehearse these ranks, or all distinct ones, in two processes; `on_rank` is called for each.

    Of the ranks that differ in what their stages hold, one each runs a second time for real; where
    it has so few microbatches that all of them ran for real, that was its first run.
    """
    chosen = list(distinct_ranks(plan) if ranks is None else ranks)
    again = representatives(plan, chosen)
    callback = on_rank or (lambda rank: None)
    shares = [chosen[number::_PROCESSES] for number in range(_PROCESSES)]
    tasks = [
        (_rehearse_some, (plan, share, again[number::_PROCESSES], imbalance))
        for number, share in enumerate(shares)
        if share
    ]
    with Pool(len(tasks), patience=3600.0) as pool:
        parts = pool.run_each(tasks, on_report=callback)
    runs = sorted((run for group_runs, _ in parts for run in group_runs), key=lambda run: run.rank)
    checks = {rank: same for _, checked in parts for rank, same in checked.items()}
    return judged(plan, runs, checks, imbalance)


def judged(
    plan: Plan, runs: list[RehearsedRank], checks: dict[int, bool], imbalance: float = 1.0
) -> Rehearsed:
    """Compare collectives with the plan and among ranks, and prove that the step ends."""
    size = DTYPES[plan.precision].itemsize
    predict = partial(
        predict_traffic,
        plan,
        itemsize=size,
        matrices=plan.options.train.optimizer_kind.full_matrices,
    )
    predicted = {run.rank: predict(run.rank) for run in runs}
    astray = [run.rank for run in runs if not _same(predicted[run.rank], run, imbalance)]
    calls = {run.rank: run.calls for run in runs}
    differences = mismatches(calls)
    began = time.perf_counter()
    order = prove_order(Topology.of(plan), calls)
    took = time.perf_counter() - began
    return Rehearsed(plan, runs, predicted, checks, differences, astray, order, took)


def representatives(plan: Plan, ranks: Sequence[int]) -> list[int]:
    """One rank for each kind of stages, by their layers, embedding and head."""
    first_ranks: dict[object, int] = {}
    for rank in ranks:
        stages = plan.schedule.placement.stages_of(plan.layout.coord(rank).pp)
        kinds = tuple(stage_kind(plan.shape, plan.stages[stage]) for stage in stages)
        first_ranks.setdefault(kinds, rank)
    return sorted(first_ranks.values())


def _rehearse_some(
    worker: Worker, plan: Plan, ranks: list[int], again: list[int], imbalance: float
) -> tuple[list[RehearsedRank], dict[int, bool]]:
    traces: Traces = {}
    runs: list[RehearsedRank] = []
    for rank in ranks:
        worker.phase(f"rank {rank}")
        runs.append(rehearse_rank(plan, rank, traces, imbalance))
        worker.report(rank)
    checks: dict[int, bool] = {}
    for rank in again:
        worker.phase(f"rank {rank} without replay")
        first = next((run for run in runs if run.rank == rank), None)
        first = first or rehearse_rank(plan, rank, traces, imbalance)
        real = rehearse_rank(plan, rank, None, imbalance) if first.replayed else first
        near = abs(real.peak - first.peak) <= _SLACK * real.peak
        checks[rank] = real.calls == first.calls and near
        worker.report(rank)
    return runs, checks


def _same(predicted: Sequence[TrafficEntry], run: RehearsedRank, imbalance: float) -> bool:
    """Whether a rank called what was predicted; how much goes to experts is up to the routing."""
    seen = traffic_entries(run.records.items())
    if imbalance == 1.0:
        return seen == tuple(predicted)
    even = [
        tuple(call for call in calls if call.axis not in UNEVEN_AXES) for calls in (seen, predicted)
    ]
    return even[0] == even[1]
