"""A rehearsal as JSON, as text and as a trace, from made-up ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.traffic.collectives import TrafficEntry
from fivefold.cost.traffic.order import (
    IssuedCollective,
    Mismatch,
    OrderVerdict,
    Unconnected,
    Waiting,
    mismatches,
)
from fivefold.planner.estimate import PlannedAction
from fivefold.render.checks import levels_trace, rehearsal_json, rehearsal_lines

GIB = 2**30
PLAN = resolve(PlanOptions("tiny", layout="dp=2"))
GATHER = IssuedCollective("fsdp", "all_gather", 512, (0, 1), "0F0")
ENTRY = TrafficEntry("fsdp", "all_gather", 3, 512, 2)


@dataclass
class Seconds:
    rank: int
    peak: int
    step: float
    update: float
    actions: dict[str, float]
    contended: Any = None


def ran(rank: int, gib: float) -> Any:
    return SimpleNamespace(
        rank=rank,
        peak=int(gib * GIB),
        memory={"weights": GIB, "activations": int((gib - 1) * GIB)},
        records=Counter({("fsdp", "all_gather", 512, 2): 3}),
        levels=[
            SimpleNamespace(action="0F0", bytes=2 * GIB, peak=3 * GIB),
            SimpleNamespace(action="0B0", bytes=GIB, peak=2 * GIB),
        ],
    )


def found(**changes: Any) -> Any:
    runs = [ran(0, 3.0), ran(1, 2.0)]
    seen = {
        "plan": PLAN,
        "runs": runs,
        "predicted": {0: (ENTRY,), 1: (ENTRY,)},
        "without_replay": {0: True},
        "mismatches": [],
        "astray": [],
        "order": OrderVerdict(2, 6),
        "order_seconds": 0.25,
        "worst": runs[0],
        "passed": True,
    }
    return SimpleNamespace(**(seen | changes))


def described(job: Any, **changes: Any) -> dict[str, Any]:
    given = {"planned": None, "timed": None, "imbalance": 1.0, "seconds": 2.0} | changes
    return rehearsal_json(
        job, given["planned"], given["timed"], given["imbalance"], given["seconds"]
    )


def outlook(**gib: float) -> Any:
    memory = {name: size * GIB for name, size in gib.items()}
    return SimpleNamespace(memory=memory, allocated=sum(memory.values()), step=0.5, parts={})


def shown(table: dict[str, Any]) -> list[str]:
    return list(rehearsal_lines(PLAN, table))


def test_json_is_the_contract() -> None:
    table = described(found())
    assert [each["rank"] for each in table["ranks"]] == [0, 1]
    assert table["ranks"][1]["coord"] == {"dp": 1, "tp": 0, "pp": 0, "cp": 0, "ep": 0}
    assert table["ranks"][1]["collectives"] == 3
    assert table["memory_gib"] == {"weights": 1.0, "activations": 2.0, "total": 3.0}
    assert table["worst_rank"] == 0
    traffic = table["traffic"]
    assert traffic["predicted"] == traffic["observed"]
    assert traffic["observed"][0]["bytes"] == 512
    assert traffic["match"] is table["matched"] is table["passed"] is True
    assert table["time"] is table["planned_gib"] is None


def test_json_of_ranks_that_went_astray() -> None:
    parted = mismatches({0: [GATHER, GATHER], 1: [GATHER]})
    table = described(found(mismatches=parted, astray=[1], without_replay={0: False}, passed=False))
    assert table["matched"] is table["traffic"]["match"] is table["passed"] is False
    assert table["traffic"]["astray"] == [1]
    assert table["mismatches"] == [str(each) for each in parted]
    text = shown(table)
    assert "ranks 1 call something else than predicted" in text
    assert "without replay, ranks 0 call something else" in text
    assert text[text.index("1 pair of ranks would hang:") + 1] == (
        "  call 2 of ranks 0 and 1: rank 0 makes all_gather of 512 bytes on fsdp in 0F0, "
        "rank 1 makes no further call"
    )


SEND = IssuedCollective("pp", "send", 2048, (0, 1), "0F1")
BACK = IssuedCollective("pp", "send", 2048, (1, 0), "1B0")


def test_a_step_that_ends_says_how_long_the_proof_took() -> None:
    table = described(found())
    assert table["order"] == {
        "ok": True,
        "ranks": 2,
        "calls": 6,
        "cycle": [],
        "unconnected": [],
        "differs": [],
        "seconds": 0.25,
    }
    assert shown(table)[-2] == (
        "the step ends even if every call blocks its rank until all members have issued it: "
        "6 calls of 2 of 2 ranks, proven in 0.2 s; the rest took 1.8 s"
    )


def test_a_cycle_is_named_in_sentences() -> None:
    cycle = (Waiting(0, SEND, (1,)), Waiting(1, BACK, (0,)))
    table = described(found(order=OrderVerdict(2, 6, cycle), passed=False))
    assert table["order"]["ok"] is False
    assert table["order"]["cycle"] == [
        {"rank": 0, "call": "send of 2,048 bytes on pp to rank 1 in 0F1", "waits_for": [1]},
        {"rank": 1, "call": "send of 2,048 bytes on pp to rank 0 in 1B0", "waits_for": [0]},
    ]
    text = shown(table)
    start = "the step hangs if every call blocks its rank (found in 0.2 s; the rest took 1.8 s):"
    assert text[text.index(start) + 1 :][:2] == [
        "  rank 0 waits in send of 2,048 bytes on pp to rank 1 in 0F1 for rank 1",
        "  rank 1 waits in send of 2,048 bytes on pp to rank 0 in 1B0 for rank 0",
    ]
    assert not any("the step ends" in line for line in text)


def test_a_rank_that_waits_for_one_without_calls() -> None:
    order = OrderVerdict(2, 6, (Waiting(0, GATHER, (1,)),))
    text = shown(described(found(order=order, passed=False)))
    waits = "  rank 0 waits in all_gather of 512 bytes on fsdp in 0F0 for rank 1"
    assert f"{waits}, which has no call left" in text


def test_other_findings_of_the_order() -> None:
    differing = (Mismatch(3, 0, 1, GATHER, None),)
    order = OrderVerdict(2, 6, (), (Unconnected(0, SEND),), differing)
    table = described(found(order=order, passed=False))
    assert table["order"]["ok"] is False
    assert table["order"]["unconnected"] == [
        {"rank": 0, "call": "send of 2,048 bytes on pp to rank 1 in 0F1"}
    ]
    assert table["order"]["differs"] == [str(differing[0])]
    text = shown(table)
    start = "pairs that are not connected before the step; NCCL blocks both ranks in a message:"
    assert text[text.index(start) + 1] == "  rank 0: send of 2,048 bytes on pp to rank 1 in 0F1"
    start = "ranks at the same pipeline coord that issue different calls:"
    assert text[text.index(start) + 1] == f"  {differing[0]}"


def test_a_part_of_a_pipeline_proves_no_order() -> None:
    text = shown(described(found(order=OrderVerdict())))
    assert text[-2] == (
        "the order was not played: no whole pipeline is among these ranks; leave out --rank"
    )


def test_of_many_mismatches_some_are_shown() -> None:
    group = tuple(range(16))
    calls = {rank: [GATHER._replace(members=group)] * (rank == 0) for rank in group}
    table = described(found(mismatches=mismatches(calls), passed=False))
    text = shown(table)
    assert len(table["mismatches"]) == 15
    assert "15 pairs of ranks would hang:" in text
    assert sum(line.startswith("  call 1 of ranks 0 and") for line in text) == 10
    assert "  and 5 more, in --json" in text


def test_the_text_of_a_good_rehearsal() -> None:
    text = shown(described(found()))
    assert text[0] == "tiny on dp=2: 2 ranks of 2 rehearsed"
    assert "weights                                   1.00" in text
    assert "total                                     3.00" in text
    assert "give --machine to see it beside the plan" in text
    assert "       1  dp=1                            2.00            3" in text
    assert "fsdp, bytes                                1,536               1,536" in text
    assert "every rank calls what was predicted" in text
    assert "all groups agree: same order, kinds and sizes" in text
    assert "without replay, 1 rank calls the same, one for each kind of stages" in text
    assert text[-1] == "in 2 s"
    assert not any("routed" in line for line in text)


def test_a_difference_that_matters_is_called_out() -> None:
    """Five hundredths of the whole: 0.15 GiB here."""
    table = described(found(), planned=outlook(weights=1.1, activations=1.8))
    lines = {line.split()[0]: line for line in shown(table) if line}
    assert lines["weights"].endswith("1.10")
    assert lines["activations"].endswith("1.80   +0.20")
    assert lines["total"].endswith("2.90")


@pytest.mark.parametrize(
    ("imbalance", "said"), [(1.0, "round-robin"), (1.5, "fullest expert 1.5 x the mean")]
)
def test_the_stand_in_of_the_routing_is_said(imbalance: float, said: str) -> None:
    plan = resolve(PlanOptions("tiny-moe", layout="dp=2 ep=2"))
    table = described(found(plan=plan), imbalance=imbalance)
    assert table["routing"] == said
    assert f"tokens have no values here; they are routed: {said}" in list(
        rehearsal_lines(plan, table)
    )


def test_of_many_ranks_some_are_shown() -> None:
    runs = [ran(rank % 2, 2.0) for rank in range(30)]
    text = shown(described(found(runs=runs)))
    assert "and 6 more, in --json" in text


def test_times_of_a_gpu() -> None:
    measured = Seconds(0, GIB, 0.25, 0.05, {"0F": 0.0123})
    timed = SimpleNamespace(measured=[measured], step=SimpleNamespace(step=0.75, parts={}))
    table = described(found(), planned=outlook(weights=3.0), timed=timed)
    assert table["time"]["forecast_s"] == 0.75
    assert table["time"]["planned_s"] == 0.5
    text = shown(table)
    assert any(line.split() == ["0F", "12.3", "ms"] for line in text)
    assert (
        "forecast: 0.750 s a step with these kernels and the modelled traffic; planned: 0.500 s"
        in text
    )


def test_the_trace_has_a_counter_a_rank() -> None:
    events = levels_trace(found())["traceEvents"]
    counters = [each for each in events if each["ph"] == "C"]
    assert {each["name"] for each in counters} == {"GiB of rank 0", "GiB of rank 1"}
    first = counters[0]
    assert first["args"] == {"held": 2.0, "peak": 3.0}
    actions = [each["name"] for each in events if each["ph"] == "X" and each["tid"] == 1]
    assert actions == ["0F0", "0B0"]


def test_the_planned_track_lies_beside() -> None:
    actions = [PlannedAction("0F0", 0.0, 0.5, GIB), PlannedAction("0B0", 0.5, 2.0, 2 * GIB)]
    events = levels_trace(found(), {0: actions, 1: actions})["traceEvents"]
    tracks = {each["args"]["name"]: each["pid"] for each in events if each["ph"] == "M"}
    assert set(tracks) == {"planned", "rehearsed"}
    slices = [each for each in events if each["ph"] == "X" and each["tid"] == 1]
    assert [(each["ts"], each["dur"]) for each in slices] == [(0, 5e5), (5e5, 15e5)] * 2
    last = [each for each in events if each["pid"] == tracks["planned"] and each["ph"] == "C"][-1]
    assert last["args"] == {"held": 2.0}
