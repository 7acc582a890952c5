"""Collectives through host memory, as ranks that share a GPU need them.

Here all memory is host memory: the ranks of one run believe that their groups cannot reach it, and
copy everything there and back. What they compute is the same to the bit, and so is what is seen of
their collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.core.layout.groups import WORLD, Topology
from fivefold.core.layout.layout import Layout
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel import transport
from fivefold.parallel.mesh import CollectiveRecord, Mesh
from fivefold.verify.runs import DispatchWatch, VerifiedRank, VerifySettings, run_rank

RANKS = 2


def by_host(worker: Worker, function: Callable[..., Any], *args: Any) -> Any:
    """Run a task of a rank that believes its groups cannot reach its memory."""
    with patch.object(transport, "goes_by_host", lambda device, group: True):
        return function(worker, *args)


def both_ways(pool: Pool, function: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Any]]:
    """What ranks find that reach their memory, and what those find that copy."""
    plain = pool.run_each([(function, args)] * RANKS)
    return plain, pool.run_each([(by_host, (function, *args))] * RANKS)


def numbers(rank: int, *shape: int) -> torch.Tensor:
    size = int(np.prod(shape))
    return torch.arange(100 * rank, 100 * rank + size, dtype=torch.float64).view(shape)


# ---- one call


def in_place(worker: Worker) -> dict[str, list[float]]:
    """Every call that fills a tensor: what is in it before the wait and behind it."""
    found: dict[str, list[float]] = {}
    with worker.joined(RANKS):
        group, rank, other = dist.group.WORLD, worker.rank, 1 - worker.rank
        mine = numbers(rank, 4)
        pending = transport.all_reduce(mine, dist.ReduceOp.SUM, group)
        found["all_reduce, unwaited"] = mine.tolist()
        pending.wait()
        found["all_reduce"] = mine.tolist()
        mine.zero_()
        pending.wait()  # what came is copied once
        found["all_reduce, waited twice"] = mine.tolist()
        part = torch.zeros(2, dtype=torch.float64)
        transport.reduce_scatter(part, numbers(rank, 4), group).wait()
        found["reduce_scatter"] = part.tolist()
        whole = torch.zeros(4, dtype=torch.float64)
        transport.all_gather(whole, numbers(rank, 2), group).wait()
        found["all_gather"] = whole.tolist()
        size, cpu = torch.Size((2, 2)), torch.device("cpu")
        coming = transport.receive(size, torch.float64, cpu, other, group)
        leaving = transport.send(numbers(rank, 2, 2), other, group)
        message = coming.wait()
        leaving.wait()
        assert message is not None
        found["message"] = message.flatten().tolist()
        sent = numbers(rank, 3)
        moving = transport.pass_on(sent, other, other, group)
        assert moving.home is not None
        moving.home.zero_()
        sent.zero_()
        found["pass_on, unwaited"] = moving.home.tolist()
        came = moving.wait()
        assert came is not None
        found["pass_on"] = came.tolist()
        assert moving.sent is moving.came is None, "memory is held behind the wait"
    return found


def test_who_waits_copies_back(pool: Pool) -> None:
    for rank, found in enumerate(pool.run_each([(by_host, (in_place,))] * RANKS)):
        other = 1 - rank
        assert found == {
            "all_reduce, unwaited": numbers(rank, 4).tolist(),
            "all_reduce": [100, 102, 104, 106],
            "all_reduce, waited twice": [0, 0, 0, 0],
            "reduce_scatter": [[100, 102], [104, 106]][rank],
            "all_gather": [0, 1, 100, 101],
            "message": numbers(other, 2, 2).flatten().tolist(),
            "pass_on, unwaited": [0, 0, 0],
            "pass_on": numbers(other, 3).tolist(),
        }


def functional(worker: Worker) -> dict[str, list[float]]:
    """Every call that returns a new tensor."""
    with worker.joined(RANKS):
        group, rank = dist.group.WORLD, worker.rank
        kept = numbers(rank, 2, 2)
        calls = {
            "gather": transport.gather(kept, 1, group),
            "scatter": transport.scatter(kept, 1, group),
            "max": transport.total(kept, "max", group),
        }
        found = {name: each.wait().flatten().tolist() for name, each in calls.items()}
        splits = {
            "uneven": ([[1, 2], [3, 0]][rank], [[1, 3], [2, 0]][rank]),
            "empty": ([0, 0], [0, 0]),
            "one way": ([[0, 0], [2, 0]][rank], [[0, 2], [0, 0]][rank]),
        }
        for name, (arrive, leave) in splits.items():
            rows = numbers(rank, sum(leave), 2)
            arrived = transport.exchange(rows, arrive, leave, group).wait()
            assert arrived.shape == (sum(arrive), 2)
            found[name] = arrived[:, 0].tolist()
        assert kept.equal(numbers(rank, 2, 2)), "the input was changed"
    return found


def test_new_tensors_come_home(pool: Pool) -> None:
    wanted = [
        {
            "gather": [0, 1, 100, 101, 2, 3, 102, 103],
            "scatter": [100, 104],
            "max": [100, 101, 102, 103],
            "uneven": [0, 100, 102],
            "empty": [],
            "one way": [],
        },
        {
            "gather": [0, 1, 100, 101, 2, 3, 102, 103],
            "scatter": [102, 106],
            "max": [100, 101, 102, 103],
            "uneven": [2, 4, 6],
            "empty": [],
            "one way": [0, 2],
        },
    ]
    assert both_ways(pool, functional) == (wanted, wanted)


def seen(worker: Worker) -> bool:
    """Whether the dispatcher sees every call once, with the bytes of the caller's tensor."""
    with worker.joined(RANKS):
        mesh = Mesh(Topology(Layout(shard=RANKS)), torch.device("cpu"))
        group, watch = mesh.groups[WORLD], DispatchWatch(mesh)
        with watch:
            mesh.all_reduce(torch.ones(3), WORLD, dist.ReduceOp.SUM).wait()
            mesh.all_gather(torch.ones(6), torch.ones(3), WORLD).wait()
            mesh.reduce_scatter(torch.ones(3), torch.ones(6), WORLD).wait()
            mesh.pass_on(torch.ones(5), WORLD).wait()
            transport.gather(torch.ones(7), 0, group).wait().sum()
            transport.exchange(torch.ones(4), [2, 2], [2, 2], group).wait()
        calls = [("all_reduce", 12), ("all_gather", 12), ("reduce_scatter", 24), ("send", 20)]
        calls += [("recv", 20), ("all_gather", 28), ("all_to_all", 16)]
        wanted = {CollectiveRecord(WORLD, kind, size, RANKS): 1 for kind, size in calls}
        mesh.groups.clear()
        return watch.records == wanted


def test_each_is_seen_once_with_its_bytes(pool: Pool) -> None:
    assert both_ways(pool, seen) == ([True] * RANKS, [True] * RANKS)


def test_a_tensor_that_its_group_reaches_stays(pool: Pool) -> None:
    assert pool.run_each([(reaches, ())] * RANKS) == [True] * RANKS


def reaches(worker: Worker) -> bool:
    with worker.joined(RANKS):
        return not transport.goes_by_host(torch.device("cpu"), dist.group.WORLD)


class Names(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def gathers_by(worker: Worker) -> set[str]:
    with worker.joined(RANKS), Names() as names:
        transport.gather(torch.ones(2, 2), 1, dist.group.WORLD).wait()
    return names.found


def test_gloo_never_gathers_by_the_call_that_corrupts_its_memory(pool: Pool) -> None:
    for found in pool.run_each([(gathers_by, ())] * RANKS):
        assert "_c10d_functional::all_gather_into_tensor_out" in found
        assert not any(name.endswith(("into_tensor", "coalesced")) for name in found)


# ---- whole steps

CASES = {
    "data, stage 0": PlanOptions("tiny", "dp=2", zero=0),
    "data, stage 2": PlanOptions("tiny", "dp=2", zero=2),
    "data, stage 3": PlanOptions("tiny", "dp=2", zero=3),
    "tensor": PlanOptions("tiny", "tp=2", recompute="selective"),
    "tensor without sp": PlanOptions("tiny", "tp=2", sp=False, recompute="full:1"),
    "pipeline": PlanOptions("tiny", "pp=2", schedule="zb-v", microbatches=4),
    "stream": PlanOptions("tiny", "pp=2", schedule="pipedream", microbatches=4),
    "ring": PlanOptions("tiny", "cp=2", recompute="selective"),
    "heads": PlanOptions("tiny", "cp=2", context="ulysses", recompute="selective"),
    "experts": PlanOptions("tiny-moe", "dp=2 ep=2", recompute="selective"),
    "expert width": PlanOptions("tiny-moe", "tp=2 etp=2"),
}


def small(options: PlanOptions) -> Plan:
    return resolve(replace(options, set={"layers": "4"}), small=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_same_to_the_bit(pool: Pool, name: str) -> None:
    plan = small(CASES[name])
    for one, other in zip(*both_ways(pool, run_rank, plan, VerifySettings(steps=1)), strict=True):
        require_same(one, other)
        for heard in other.heard:
            assert heard.noted and heard.seen == heard.noted


def require_same(one: VerifiedRank, other: VerifiedRank) -> None:
    assert one.heard == other.heard
    for mine, theirs in zip(one.steps, other.steps, strict=True):
        assert (mine.loss, mine.norm) == (theirs.loss, theirs.norm)
        for part, same in zip(mine.weights, theirs.weights, strict=True):
            assert part.name == same.name and np.array_equal(part.values, same.values)
    for part, same in zip(one.parts, other.parts, strict=True):
        assert np.array_equal(part.values, same.values)
