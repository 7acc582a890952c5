"""Copies in memory: whole ones are read, torn and damaged ones are not, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.core.layout.boxes import Box, whole_box
from fivefold.core.layout.partners import CopyOf, Partners
from fivefold.launch.shared_memory import InheritedMemory, KeptSegment
from fivefold.optim.optimizer import StateInMemory
from fivefold.train.checkpoint.folders import Facts
from fivefold.train.checkpoint.ranks import CheckpointRanks
from fivefold.train.checkpoint.storage import CheckpointTensor
from fivefold.train.recovery.memory_checkpoint import MemoryCopies, Question, _matched
from tests.commands import in_fork


@pytest.fixture
def memory() -> Iterator[InheritedMemory]:
    made = InheritedMemory.create(2)
    yield made
    made.close()


def tensors(value: float, key: str = "model/w") -> list[CheckpointTensor]:
    full = torch.arange(12, dtype=torch.float64).view(4, 3) + value
    scalar = torch.tensor(float(value))
    return [
        CheckpointTensor(key, (4, 3), full.dtype, (whole_box((4, 3)),), StateInMemory(full)),
        CheckpointTensor("optim/s", (), scalar.dtype, (whole_box(()),), StateInMemory(scalar)),
    ]


def copies_of(memory: InheritedMemory) -> MemoryCopies:
    return MemoryCopies(memory, Partners(1), 0, None)


def saved(memory: InheritedMemory, *steps: int) -> None:
    copies = copies_of(memory)
    for step in steps:
        copies.save(tensors(step), Facts(step, samples=8 * step))
    copies.wait()


def test_the_newest_whole_copy_is_read(memory: InheritedMemory) -> None:
    saved(memory, 1, 2, 3)
    found = tensors(0.0)
    facts = copies_of(memory).load(found, after=0)
    assert facts is not None and (facts.step, facts.samples) == (3, 24)
    assert all(a.state.read().equal(b.state.read()) for a, b in zip(found, tensors(3), strict=True))
    assert copies_of(memory).load(tensors(0.0), after=4) is None, "the disk has a newer one"


def test_a_torn_copy_is_not_read_and_a_damaged_one_neither(memory: InheritedMemory) -> None:
    saved(memory, 1, 2)
    KeptSegment(memory.open(0, 1)).break_off()  # that of step 2
    facts = copies_of(memory).load(tensors(0.0), after=0)
    assert facts is not None and facts.step == 1
    segment = KeptSegment(memory.open(0, 0))
    data = segment.data()
    data[5] ^= 1
    assert segment.complete and not segment.verified()
    assert copies_of(memory).load(tensors(0.0), after=0) is None


def test_the_first_copy_after_a_restart_leaves_the_one_that_was_read(
    memory: InheritedMemory,
) -> None:
    saved(memory, 1, 2)
    again = copies_of(memory)
    assert again.load(tensors(0.0), after=0) is not None
    again.save(tensors(3.0), Facts(3))
    again.wait()
    kept = {KeptSegment(memory.open(0, slot)).copy.step for slot in (0, 1)}
    assert kept == {2, 3}


def test_another_layout_reads_what_two_ranks_wrote(memory: InheritedMemory) -> None:
    full = torch.arange(12, dtype=torch.float64).view(4, 3)
    for rank, (first, rows) in enumerate(((0, 1), (1, 3))):
        part = full[first : first + rows]
        box = ["model/w", "float64", [first, 0], [rows, 3], 0]
        copy = CopyOf(5, 0, 2, 0, rank)
        table = {"facts": {"step": 5}, "boxes": [box]}
        segment = KeptSegment(memory.open(rank, 0))
        data = segment.begin(copy, table, part.numel() * 8)
        data[:] = memoryview(part.contiguous().numpy()).cast("B")
        segment.commit()
    inner = Box((1, 0), (2, 3), 0)
    state = StateInMemory(torch.zeros(6, dtype=torch.float64))
    wanted = [CheckpointTensor("model/w", (4, 3), torch.float64, (inner,), state)]
    assert copies_of(memory).load(wanted, after=0) is not None
    assert state.tensor.equal(full[1:3].reshape(-1))
    other = [CheckpointTensor("model/v", (4, 3), torch.float64, (inner,), state)]
    assert copies_of(memory).load(other, after=0) is None, "a tensor is missing"


@dataclass(frozen=True)
class HostMemory:
    """The memory of one of two hosts with two ranks each."""

    memory: InheritedMemory
    rank: int

    def open(self, rank: int, slot: int) -> int:
        assert rank in self.ranks(), "another host has it"
        return self.memory.open(rank, slot)

    def ranks(self) -> list[int]:
        first = self.rank // 2 * 2
        return [first, first + 1]

    @property
    def share(self) -> tuple[int, int]:
        return self.rank % 2, 2


class RankThreads(CheckpointRanks):
    """Threads in the stead of ranks, whose messages are queues."""

    def __init__(self, rank: int, size: int, queues: dict[tuple[int, int], Queue[Tensor]]) -> None:
        super().__init__(None, 0, size)
        self.rank, self.queues = rank, queues
        self.peers = set[int]()

    def post(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        assert rank != self.rank, "gloo has no pair of a rank with itself"
        self.queues[self.rank, rank].put(tensor.clone())
        self.peers.add(rank)
        return lambda: None

    def fill(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor.copy_(self.queues[rank, self.rank].get(timeout=20))


def in_threads(size: int, work: Callable[[RankThreads], Any]) -> list[Any]:
    """What each of so many ranks returns."""
    queues: dict[tuple[int, int], Queue[Tensor]] = {
        pair: Queue() for pair in product(range(size), repeat=2)
    }
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: work(RankThreads(rank, size, queues)), range(size)))


def test_what_a_host_keeps_is_read_there_and_tables_of_others_are_asked_for() -> None:
    """The halves of a weight are on both hosts, in the copies of ranks 0 and 1, and of 3 and 2.
    Every rank now needs all of it, and no tensor is sent."""
    memory, full = InheritedMemory.create(4), torch.arange(12, dtype=torch.float64).view(4, 3)
    for rank, first in enumerate((0, 2, 2, 0)):
        box = ["model/w", "float64", [first, 0], [2, 3], 0]
        segment = KeptSegment(memory.open(rank, 0))
        data = segment.begin(CopyOf(5, 0, 4, 0, rank), {"facts": {"step": 5}, "boxes": [box]}, 48)
        data[:] = memoryview(full[first : first + 2].contiguous().numpy()).cast("B")
        segment.commit()

    def load(ranks: RankThreads) -> tuple[Facts | None, Tensor, set[int]]:
        copies = MemoryCopies(HostMemory(memory, ranks.rank), Partners(4), 0, None)
        copies._ranks = ranks
        state = StateInMemory(torch.zeros(4, 3, dtype=torch.float64))
        box = (whole_box((4, 3)),)
        facts = copies.load([CheckpointTensor("model/w", (4, 3), full.dtype, box, state)], 0)
        return facts, state.tensor, ranks.peers

    loaded = in_threads(4, load)
    memory.close()
    for facts, tensor, peers in loaded:
        assert facts == Facts(5) and tensor.equal(full)
        assert peers <= {0} or peers == {1, 2, 3}, "nobody is asked for what is here"


class TwoMemories(HostMemory):
    """The same, where a host keeps the copies of the other host too, and one host was lost."""

    def ranks(self) -> list[int]:
        return [] if self.rank < 2 else [0, 1, 2, 3]

    def open(self, rank: int, slot: int) -> int:
        return self.memory.open(rank, slot)


@pytest.mark.parametrize("rows", [2, 4], ids=["the same layout", "another layout"])
def test_a_lost_host_is_sent_what_its_partner_has_kept(rows: int) -> None:
    """Ranks 0 and 1 have nothing: they ask the ranks of the other host, and no rank asks all."""
    memory, full = InheritedMemory.create(4), torch.arange(24, dtype=torch.float64).view(8, 3)
    for rank in range(4):
        box = ["model/w", "float64", [2 * rank, 0], [2, 3], 0]
        segment = KeptSegment(memory.open(rank, 0))
        data = segment.begin(CopyOf(5, 0, 4, 0, rank), {"facts": {"step": 5}, "boxes": [box]}, 48)
        data[:] = memoryview(full[2 * rank : 2 * rank + 2].contiguous().numpy()).cast("B")
        segment.commit()

    def load(ranks: RankThreads) -> tuple[Facts | None, bool, set[int]]:
        copies = MemoryCopies(TwoMemories(memory, ranks.rank), Partners(4, 2), 0, None)
        copies._ranks = ranks
        first = rows * (ranks.rank * 2 // rows)
        box, state = Box((first, 0), (rows, 3), 0), StateInMemory(torch.zeros(rows, 3).double())
        facts = copies.load([CheckpointTensor("model/w", (8, 3), full.dtype, (box,), state)], 0)
        return facts, state.tensor.equal(full[first : first + rows]), ranks.peers

    loaded = in_threads(4, load)
    memory.close()
    assert [(facts, equal) for facts, equal, _ in loaded] == [(Facts(5), True)] * 4
    assert [peers for *_, peers in loaded] == [{1, 2, 3}, {0, 3}, {0}, {0, 1}]


def test_refused_before_anything_is_written(tmp_path: Path) -> None:
    small = ("tiny", "--layout", "dp=4", "--seq", "16", "--steps", "2", "--out", "run")
    for words, rule in (
        (("--set", "copy_every=1 copy_domain=2"), "must be in two failure domains, and all 4"),
        (("--set", "copy_domain=2"), "nothing is copied; give copy_every"),
        (("--shrink",), "give --restarts too"),
        (("--restarts", "1", "--check"), "leave --restarts out"),
    ):
        done = in_fork(["train", *small, *words], tmp_path)
        assert done.returncode == 2 and rule in done.stderr, done.stderr
        assert not (tmp_path / "run").exists()


def test_a_rank_reads_what_its_own_host_has_and_asks_another_for_the_rest() -> None:
    """Two hosts of two ranks have half of a weight each, and every rank needs all of it."""
    half = [{"w": (number, [(4 * number, 4 * number + 4)])} for number in range(2)]
    needs = {"w": [(0, 8)]}
    questions = [Question(needs, half[rank // 2] if rank % 2 == 0 else {}, 2) for rank in range(4)]
    assert _matched(questions) == [([2], [2]), ([3], [3]), ([0], [0]), ([1], [1])]
    # Both hosts have the same half: nobody asks for it.
    same = [question._replace(copies=half[0] if question.copies else {}) for question in questions]
    assert _matched(same) == [([], [])] * 4
