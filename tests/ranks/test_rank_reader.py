"""What each rank reads: its own rows, once, in the order of one process, ahead of its steps."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from trained import train

from fivefold.core.errors import FivefoldError
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.data import rank_reader
from fivefold.data.mixture import CorpusShare, Shares, Source
from fivefold.data.rank_reader import AHEAD, Prefetch, RankReader
from fivefold.data.rows import Synthetic, TokenRows
from fivefold.launch.processes import Pool
from fivefold.model.batch import NOT_COUNTED, TokenBatch
from fivefold.train.check import single_process
from fivefold.train.state import TrainSettings

CPU, SEQ, SOON = torch.device("cpu"), 8, 20.0


@dataclass
class Noted:
    """A corpus that notes which rows are read; token t of row r is 100 · r + t."""

    num: int = 1_000
    name: str = "noted"
    rows: list[int] = field(default_factory=list)

    def num_rows(self, seq: int) -> int:
        return self.num

    def read(self, row: int, into: TokenRows) -> None:
        self.rows.append(row)
        into.tokens[:] = 100 * row + np.arange(len(into.tokens))
        into.begins[::5] = True


def plan_of(layout: str, **options: object) -> Plan:
    said = {"seq": SEQ, "batch": 32, "zero": 1, "packed": True, **options}
    return resolve(PlanOptions("tiny", layout=layout, **said))


def reader_of(plan: Plan, rank: int, *corpora: Noted) -> RankReader:
    """The reader of a rank, with a mixture of these corpora, each of twice the weight."""
    weights = tuple(2**i for i in range(len(corpora)))
    parts = tuple(CorpusShare.of(each, SEQ, seed=3) for each in corpora)  # type: ignore[arg-type]
    source = Source(parts, Shares(weights), SEQ)
    return RankReader(source, plan.batch, plan.packed, plan.layout.coord(rank).dp, CPU)


@pytest.mark.parametrize("layout", ["dp=16", "dp=4 tp=2 pp=2", "dp=2 tp=2 pp=2 cp=2", "pp=4 cp=4"])
def test_16_ranks_read_the_rows_of_their_data_rank_and_no_other(layout: str) -> None:
    plan, one, steps = plan_of(layout), Noted(), 3
    size = plan.batch.sequences
    truth = reader_of(single_process(plan), 0, one)
    for number in range(steps):
        truth.step(number * size)
    assert sorted(set(one.rows)) == sorted(one.rows) and len(one.rows) == steps * size
    by_coord = np.array(one.rows).reshape(steps, -1, plan.layout.dp, plan.batch.microbatch_size)
    counts: Counter[int] = Counter()
    for rank in range(16):
        noted = Noted()
        with reader_of(plan, rank, noted).ahead(0, steps) as take:
            for _ in range(steps):
                take()
        coord = plan.layout.coord(rank).dp
        assert noted.rows == by_coord[:, :, coord].ravel().tolist()  # its own, in their order
        counts.update(noted.rows)
    assert counts == dict.fromkeys(one.rows, 16 // plan.layout.dp)


def test_16_ranks_in_training_read_every_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are forked after the patch, and each appends what it reads."""
    read = Synthetic.read

    def noting(self: Synthetic, row: int, into: TokenRows) -> None:
        with (tmp_path / f"rank-{os.getpid()}").open("a", encoding="utf-8") as file:
            file.write(f"{row}\n")
        read(self, row, into)

    monkeypatch.setattr(Synthetic, "read", noting)
    plan = plan_of("dp=16", set={"layers": "1", "vocab": "64"})
    settings = TrainSettings(Recipe(steps=2, data="synthetic"))
    with Pool(16, 60.0) as pool:
        train(pool, plan, settings, lambda report: None)
    files = [each.read_text("utf-8").split() for each in tmp_path.iterdir()]
    source = Source.of(Synthetic(0, 64), SEQ, 0)
    wanted = [str(source.source_row(sample)[1]) for sample in range(2 * plan.batch.sequences)]
    assert len(files) == 16 and {len(each) for each in files} == {4}
    assert sorted(row for each in files for row in each) == sorted(wanted)


def together(plan: Plan, batches: Callable[[int], list[list[TokenBatch]]]) -> list[TokenBatch]:
    """The microbatches of all data ranks, in the order of one process."""
    ranks = {plan.layout.coord(rank).dp: rank for rank in reversed(range(plan.layout.world))}
    by_rank = [batches(ranks[dp]) for dp in range(plan.layout.dp)]
    steps = zip(*by_rank, strict=True)
    return [one for step in steps for both in zip(*step, strict=True) for one in both]


def equal(found: list[TokenBatch], wanted: list[TokenBatch]) -> bool:
    names = ("tokens", "labels", "positions")
    pairs = list(zip(found, wanted, strict=True))
    same = all(getattr(a, name).equal(getattr(b, name)) for a, b in pairs for name in names)
    return same and all(
        a.documents and b.documents and a.documents.starts == b.documents.starts for a, b in pairs
    )


@pytest.mark.parametrize("layout", ["dp=2", "dp=4 tp=2", "dp=2 pp=2 cp=2"])
def test_a_mixture_and_its_evaluation_are_those_of_one_process(layout: str) -> None:
    plan = plan_of(layout, batch=16)
    corpora = (Noted(700), Noted(2_000, "more"))  # 5 and 15 rows are held out
    one = reader_of(single_process(plan), 0, *corpora)

    def steps(rank: int) -> list[list[TokenBatch]]:
        with reader_of(plan, rank, *corpora).ahead(32, 2) as take:  # resumed after two steps
            return [take(), take()]

    wanted = [*one.step(32).of(0), *one.step(48).of(0)]
    assert equal(together(plan, steps), wanted)
    places = one.source.held_out(8 * plan.batch.sequences)
    evaluated = [batch for step in one.rows(places) for batch in step]
    found = together(plan, lambda rank: [*reader_of(plan, rank, *corpora).rows(places)])
    assert equal(found, evaluated)
    rows = sum(int((batch.labels != NOT_COUNTED).any(-1).sum()) for batch in evaluated)
    assert rows == 20 and len(evaluated) * plan.batch.microbatch_size == 32


def wait_for(reached: Callable[[], bool]) -> None:
    """Other threads run meanwhile; fails if they do not get there."""
    for _ in range(round(SOON / 0.002)):
        if reached():
            return
        threading.Event().wait(0.002)
    pytest.fail("the thread does not go on")


def test_a_slow_source_is_read_during_the_step_before() -> None:
    """Each row takes as long as a step: no step waits, although nothing is read between them."""
    made: list[int] = []
    step_runs = threading.Semaphore(AHEAD)

    def slow(number: int) -> int:
        assert step_runs.acquire(timeout=SOON)
        made.append(number)
        return number

    steps = Prefetch(slow, 10)
    wait_for(lambda: len(made) == AHEAD)
    for number in range(10):
        before = len(made)
        assert steps.take() == number and len(made) == before > number  # it was there
        step_runs.release()  # the step runs, and the source gets the time for one row
        wait_for(lambda: len(made) == min(10, number + 1 + AHEAD))  # noqa: B023, called here
    steps.close()


def test_no_more_is_read_ahead_than_the_bound() -> None:
    made: list[int] = []
    steps = Prefetch(lambda number: made.append(number), 100, ahead=4)
    wait_for(lambda: len(made) == 4)
    steps.take()
    wait_for(lambda: len(made) == 5)
    threading.Event().wait(0.05)
    assert made == list(range(5))
    steps.close()
    assert made == list(range(5)) and not steps._thread.is_alive()


def test_an_error_of_the_thread_reaches_the_step_that_needs_the_row() -> None:
    def broken(number: int) -> int:
        if number == 2:
            raise FivefoldError("00003.tokens: Stale file handle; check the disk")
        return number

    steps = Prefetch(broken, 5)
    wait_for(lambda: not steps._thread.is_alive())
    assert [steps.take(), steps.take()] == [0, 1]
    for _ in range(2):
        with pytest.raises(FivefoldError, match=r"00003\.tokens: Stale file handle; check"):
            steps.take()
    steps.close()


def test_a_read_that_never_ends_does_not_keep_a_run_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_reader, "_LAST_READ_S", 0.01)
    never, begun = threading.Event(), threading.Event()

    def stuck(number: int) -> None:
        begun.set()
        never.wait(SOON)

    steps = Prefetch(stuck, 5)
    assert begun.wait(SOON)
    steps.close()
    assert steps._thread.is_alive() and steps._thread.daemon
    never.set()
    steps._thread.join(SOON)
    assert not steps._thread.is_alive()  # it reads nothing more


@pytest.mark.parametrize("raises", [False, True])
def test_a_loop_that_ends_leaves_no_thread(raises: bool) -> None:
    def names() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name == "fivefold-data"]

    plan = plan_of("dp=1")
    steps: AbstractContextManager[Callable[[], object]] = reader_of(plan, 0, Noted()).ahead(0, 50)
    try:
        with steps as take:
            take()
            assert len(names()) == 1
            if raises:
                raise RuntimeError
    except RuntimeError:
        pass
    assert names() == []
