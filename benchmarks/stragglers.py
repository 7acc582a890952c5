"""A slow rank and slow links, planted in a training, and what it says of them.

    python benchmarks/stragglers.py

Blocks and links take set times here, by sleeping, so that ranks which share cores do not disturb
one another: a block 120 ms, a link 60 ms. One rank computes 20% longer, then one link takes twice
its time, then nothing is slow. It exits with 1 unless each is named within 20 steps, and nothing
else with more than 3% of a step.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor

from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.model.decoder import Block
from fivefold.parallel import transport
from fivefold.records.steps import StepRecord
from fivefold.records.stragglers import SHOWN_SHARE
from fivefold.train.loop import run_rank
from fivefold.train.state import TrainedRank, TrainSettings

STEPS, BLOCK_S, LINK_S = 19, 0.12, 0.06
SIZES = {"layers": "4", "width": "32", "heads": "4", "kv_heads": "2", "ffn": "48", "vocab": "97"}


@dataclass(frozen=True)
class Case:
    """A layout, what is slow in it, and the ranks that must be named."""

    layout: str
    what: str  # rank, pair, group or nothing
    ranks: tuple[int, ...] = ()

    @property
    def plan(self) -> Plan:
        said = {"seq": 16, "batch": 8, "zero": 0, "microbatches": 2, "set": SIZES}
        return resolve(PlanOptions("tiny", layout=self.layout, **said), small=True)


CASES = (
    *(Case("dp=4", "rank", (2,)), Case("dp=2 pp=2", "rank", (3,)), Case("dp=2 tp=2", "rank", (1,))),
    *(Case("dp=2 pp=2", "pair", (1, 3)), Case("dp=2 tp=2", "group", (1, 3))),
    *(Case("dp=4", "nothing"), Case("dp=2 pp=2", "nothing"), Case("dp=2 tp=2", "nothing")),
)


class _Slowed:
    """A call under way that takes longer."""

    def __init__(self, pending: Any, seconds: float) -> None:
        self.pending, self.seconds = pending, seconds

    def wait(self) -> Any:
        found = self.pending.wait()
        time.sleep(self.seconds)
        return found

    @property
    def done(self) -> bool:
        return self.pending.done


def slowed(worker: Worker, case: Case) -> TrainedRank:
    """One rank of a training with set times."""
    forward, receive, reduce = Block.forward, transport.receive, transport.all_reduce
    mine = worker.rank in case.ranks
    block = BLOCK_S * (1.2 if mine and case.what == "rank" else 1.0)

    def ran(self: Block, *arguments: Any, **named: Any) -> Tensor:
        time.sleep(block)
        return forward(self, *arguments, **named)

    def received(size: Any, dtype: Any, device: Any, source: int, group: Any) -> _Slowed:
        slow = case.what == "pair" and case.ranks == (source, worker.rank)
        pending = receive(size, dtype, device, source, group)
        return _Slowed(pending, LINK_S * (1 + slow))

    def reduced(tensor: Tensor, op: Any, group: Any) -> _Slowed:
        slow = case.what == "group" and mine and group.size() == len(case.ranks)
        return _Slowed(reduce(tensor, op, group), LINK_S * (1 + slow))

    stack = ExitStack()
    stack.enter_context(patch.object(Block, "forward", ran))
    stack.enter_context(patch.object(transport, "receive", received))
    stack.enter_context(patch.object(transport, "all_reduce", reduced))
    with stack:
        settings = TrainSettings(Recipe(steps=STEPS, data="synthetic"))
        return run_rank(worker, case.plan, settings)


def named(pool: Pool, case: Case) -> list[list[dict[str, Any]]]:
    """What the records of a training name, every six steps."""
    said: list[Any] = []
    pool.run_each([(slowed, (case,))] * case.plan.layout.world, on_report=said.append)
    records = [each for each in said if isinstance(each, StepRecord)]
    return [each.slow or [] for each in records if each.step % 6 == 0]


def is_right(case: Case, found: list[list[dict[str, Any]]]) -> bool:
    """Whether the slow one is named after 18 steps, and nothing else above 3% of a step."""
    what = {"rank": "rank", "nothing": ""}.get(case.what, "link")
    names = {(each["what"], tuple(each["ranks"])): each["share"] for each in found[-1]}
    planted = names.pop((what, case.ranks), None)
    others = [share for share in names.values() if share >= SHOWN_SHARE]
    return (planted is not None) == bool(what) and not others


def main() -> int:
    wrong = 0
    for case in CASES:
        with Pool(case.plan.layout.world) as pool:
            found = named(pool, case)
        right = is_right(case, found)
        wrong += not right
        words = [f"{each['words']} ({each['share']:.1%})" for each in found[-1]] or ["nothing"]
        print(f"{case.layout}, slow {case.what} {case.ranks}: {'; '.join(words)}", right)
    print(f"{len(CASES) - wrong} of {len(CASES)} right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
