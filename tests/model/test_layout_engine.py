"""What one rank of an engine decides with others or waits for, without the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from small import LLAMA, filled
from torch import Tensor

from fivefold.core.layout.groups import WORLD
from fivefold.core.layout.layout import Layout
from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.generate.cache import token_bytes
from fivefold.generate.engine import Engine
from fivefold.generate.layout import RankEnds, blocks_within
from fivefold.generate.requests import Request
from fivefold.generate.text_ranks import _most_blocks
from fivefold.generate.writer import TextRequest


class Peers:
    """The mesh of the first of two stages; what it issues is over when it is waited for."""

    def __init__(self, fewest: int = 0) -> None:
        self.layout, self.device = Layout.parse("pp=2"), torch.device("cpu")
        self.fewest = fewest  # blocks on the other rank
        self.waited: list[int] = []
        self.sent = 0

    def size(self, role: str) -> int:
        return 2 if role in (WORLD, "pp") else 1

    def coord(self, role: str) -> int:
        return 0

    def all_reduce(self, x: Tensor, role: str, op: Any) -> SimpleNamespace:
        assert role == WORLD and op == dist.ReduceOp.MIN
        return SimpleNamespace(wait=lambda: x.clamp_(max=self.fewest))

    def send(self, x: Tensor, target: int) -> SimpleNamespace:
        number, self.sent = self.sent, self.sent + 1
        return SimpleNamespace(wait=lambda: self.waited.append(number))


@pytest.mark.parametrize(("fewest", "blocks"), [(3, 3), (9, 5)])
def test_all_ranks_have_as_many_blocks_as_the_one_with_fewest(fewest: int, blocks: int) -> None:
    """Five fit on this one."""
    decoder = filled(LLAMA)
    num_bytes = 5.9 * BLOCK * token_bytes(decoder)
    assert blocks_within(decoder, cast("Any", Peers(fewest)), num_bytes) == blocks


def test_a_stage_ends_when_all_that_it_sent_has_left() -> None:
    """Before its process does: a thread of it sends the messages of gloo."""
    mesh, plan = Peers(), resolve(PlanOptions("tiny", layout="pp=2"))
    ends = RankEnds(plan, cast("Any", mesh), torch.float32)
    for _ in range(5):
        ends.send(torch.zeros(1, 4, 8))
    assert mesh.waited == [0, 1, 2], "as many are under way as there are stages"
    ends.finish()
    assert mesh.waited == [0, 1, 2, 3, 4]


def test_blocks_of_a_file_are_those_of_all_its_prompts() -> None:
    """No prompt needs more than the longest text of the model."""
    lengths = ((BLOCK, 1), (3, 2), (100, 1000))
    requests = [TextRequest(Request("a", (1,) * n, most), "x") for n, most in lengths]
    shape = SimpleNamespace(max_seq=10 * BLOCK)
    task = SimpleNamespace(plan=SimpleNamespace(shape=shape), requests=requests)
    assert _most_blocks(cast("Any", task)) == 2 + 1 + 10


def test_preemptions_of_all_replicas_count() -> None:
    engine = object.__new__(Engine)
    engine.schedulers = cast("Any", [SimpleNamespace(num_preempted=n) for n in (2, 0, 3)])
    assert engine.num_preempted == 5
