"""Flipped bits are found, and the rank is named; `benchmarks/flips.py` plants them in numbers."""

from __future__ import annotations

import math
import random
import socket
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.flips import (
    KINDS,
    LAYOUTS,
    Flip,
    at_rest,
    flip,
    found_at_rest,
    in_compute,
    plan_of,
    settings_of,
)
from fivefold.core.errors import FivefoldError, RankLost
from fivefold.core.layout.replicas import odd_ones, sign
from fivefold.core.plan.plan import Plan
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.optim.optimizer import DeviceUpdater
from fivefold.parallel.bit_sums import PRIME, bit_sum, combined
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.units.flat_unit import FlatUnit
from fivefold.records.run_writer import RunFolder
from fivefold.records.steps import StepRecord
from fivefold.step import StepOutcome
from fivefold.train.checkpoint.checkpoints import Checkpoints
from fivefold.train.checkpoint.folders import published, step_of
from fivefold.train.checkpoint.of_run import open_run
from fivefold.train.loop import run_rank
from fivefold.train.options import RunOptions
from fivefold.train.recovery import integrity
from fivefold.train.recovery.integrity import Integrity, LocalNumbers, ReplayCallback, RunningBound
from fivefold.train.recovery.resuming import nothing_left
from fivefold.train.state import TrainedRank, TrainSettings

step_module = import_module("fivefold.step")
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("numel", [1, 7, 64, 129])
def test_every_single_flip_changes_the_hash(dtype: torch.dtype, numel: int) -> None:
    tensor = torch.randn(numel + 1).mul(100).to(dtype)[1:]  # begins within a word
    before = bit_sum(tensor)
    for bit in range(8 * tensor.element_size()):
        changed = tensor.clone()
        flip(changed, 0.5, bit)
        sums = torch.stack([before, bit_sum(changed)])
        assert sums[0] != sums[1] and sums[0] % PRIME != sums[1] % PRIME


def test_powers_of_two_differ_modulo_the_prime() -> None:
    """So that a flip is seen also where its sum has wrapped around 2^64."""
    powers = {pow(2, each, PRIME) for each in range(65)}
    assert len(powers) == 65 and 0 not in powers
    assert len({PRIME - each for each in powers} | powers) == 130


def test_a_hash_does_not_depend_on_where_a_tensor_lies() -> None:
    base = torch.randn(4001).bfloat16()
    copies = [base[start:].clone()[: 4001 - 7] for start in (0, 1)]
    assert bit_sum(base[1:3995]) == bit_sum(base[1:3995].clone())
    assert combined(torch.stack([bit_sum(each) for each in copies])) < PRIME


@given(st.integers(2, 40), st.integers(0, 39), st.integers(1, 2**31 - 1))
def test_signs_cancel_for_equal_hashes_and_for_no_odd_one(size: int, odd: int, late: int) -> None:
    hashes = [12345] * size
    assert sum(sign(i, size) * each for i, each in enumerate(hashes)) == 0
    hashes[odd % size] += late
    assert sum(sign(i, size) * each for i, each in enumerate(hashes)) != 0


def test_the_majority_names_the_odd_one() -> None:
    assert odd_ones({3: "a", 5: "b", 7: "a"}) == (5,)
    assert odd_ones({3: "a", 5: "b", 7: "a", 9: "b"}) == (3, 5, 7, 9)


CASES = [(dtype, number) for dtype, kinds in KINDS.items() for number in range(len(kinds) * 9)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("dtype", "number"), CASES)
def test_a_flip_at_rest_is_found_before_the_next_update(
    pool: Pool, dtype: str, number: int
) -> None:
    plan, kind = plan_of(**LAYOUTS[number % 9]), KINDS[dtype][number // 9]
    planted = Flip.draw(random.Random(number), kind, plan.layout.world, 3)
    text = found_at_rest(pool, plan, dtype, planted)
    assert f"step 3: rank {planted.rank} on" in text and f"{kind} of" in text
    assert "since step 2 may be wrong" in text


def without_seals(
    worker: Worker, plan: Plan, settings: TrainSettings, planted: Flip
) -> TrainedRank:
    """As on a GPU between two comparisons."""
    inner = Integrity.after_update

    def after_update(self: Integrity) -> None:
        inner(self)
        self.seal.drop()

    with patch.object(Integrity, "after_update", after_update):
        return at_rest(worker, plan, settings, planted)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "dp=3", "zero": 0}, "rank 1 on {host} holds another"),
        ({"layout": "dp=3x2", "zero": 2}, "rank 1 on {host} holds another"),
        ({"layout": "dp=2", "zero": 0}, "ranks 0 on {host} and 1 on {host} hold different copies"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_copies_are_compared_every_n_steps(pool: Pool, options: dict[str, Any], words: str) -> None:
    plan = plan_of(**options)
    planted = Flip("exp_avg", 1, 2, 0.5, 0.5, 20)
    settings = settings_of("float32", 8, compare_every=4)
    with pytest.raises(RankLost, match="step 4") as lost:
        pool.run_each([(without_seals, (plan, settings, planted))] * plan.layout.world)
    assert words.format(host=socket.gethostname()) in str(lost.value)
    assert "since step 0 may be wrong" in str(lost.value)


# A block is a unit, and half of a unit is less than its last matrix: the second slice has no norm.
WIDE = {"layers": "2", "ffn": "512", "heads": "4", "kv_heads": "2", "vocab": "1601"}
MATRIX = "blocks.0.mlp.up.weight"
UNEVEN = {"layout": "dp=2 tp=2", "zero": 1, "unit_size": 0.23, "batch": 4, "set": WIDE}


def roles(worker: Worker, plan: Plan, settings: TrainSettings) -> list[str]:
    """The roles of a rank's lines, once it has trained under the watch."""
    inner, found = Integrity.__init__, list[str]()

    def init(self: Integrity, *given: Any) -> None:
        inner(self, *given)
        found.extend(line.role for line in self.lines)

    with patch.object(Integrity, "__init__", init):
        run_rank(worker, plan, settings)
    return found


def test_ranks_with_different_lines_agree_on_the_copies_that_they_share(pool: Pool) -> None:
    """A rank whose slice holds no norm has no line of tp: no other line may depend on that."""
    plan, settings = plan_of(**UNEVEN), settings_of("float32", 2, compare_every=1)
    found = pool.run_each([(roles, (plan, settings))] * plan.layout.world)
    assert found == [["tp", "dp-cp"], ["tp", "dp-cp"], ["dp-cp"], ["dp-cp"]]


def with_a_flipped_copy(
    worker: Worker, plan: Plan, settings: TrainSettings, rank: int
) -> TrainedRank:
    """A bit flips in weights that a rank has gathered, which no seal covers."""
    inner, left = Integrity.before_update, [2]

    def before_update(self: Integrity) -> torch.Tensor:
        if self.mesh.rank == rank and self.number in left:
            (line,) = (each for each in self.lines if each.every_step)
            copy = line.sums.tensors[line.names.index(f"weights of {MATRIX}")]
            flip(copy, 0.9 if rank < 2 else 0.1, 5)  # of the other's slice
            left.clear()
        return inner(self)

    with patch.object(Integrity, "before_update", before_update):
        return run_rank(worker, plan, settings)


@pytest.mark.parametrize(("rank", "replay"), [(1, 0), (3, 0), (3, 2)])
def test_a_flip_in_a_gathered_weight_names_its_rank(pool: Pool, rank: int, replay: int) -> None:
    """By the first hashes: the update and the gathers after it have changed the weights since, and
    so has the second run of a step. Two ranks differ, and the owners have sealed what is right."""
    plan, settings = plan_of(**UNEVEN), settings_of("float32", 3, replay=replay)
    with pytest.raises(RankLost) as lost:
        pool.run_each([(with_a_flipped_copy, (plan, settings, rank))] * plan.layout.world)
    where = f"step 2: rank {rank} on {socket.gethostname()} has flipped bits in memory"
    assert f"{where}, in weights of {MATRIX}. What was computed since step 1" in str(lost.value)


def in_folder(folder: Path, plan: Plan, **keys: Any) -> TrainSettings:
    """Of a run that saves, in a new folder."""
    settings = replace(settings_of("float32", **keys), folder=folder)
    RunFolder.create(folder, plan.to_toml(folder), {}, resume=False)
    return settings


def unsealed_copy(worker: Worker, plan: Plan, settings: TrainSettings, rank: int) -> TrainedRank:
    """As on a GPU in most steps."""
    with patch.object(Integrity, "_sealed_shards", lambda self: {}):
        return with_a_flipped_copy(worker, plan, settings, rank)


def test_a_checkpoint_that_may_be_wrong_is_marked_and_passed_over(
    pool: Pool, tmp_path: Path
) -> None:
    """Nobody knows which of two ranks is right, nor since when."""
    plan = plan_of(**UNEVEN)
    settings = in_folder(tmp_path, plan, steps=3, save_every=1)
    with pytest.raises(RankLost) as lost:
        pool.run_each([(unsealed_copy, (plan, settings, 1))] * plan.layout.world)
    host, words = socket.gethostname(), str(lost.value)
    assert f"ranks 1 on {host} and 3 on {host} hold different copies of weights of" in words
    assert "since step 0 may be wrong" in words and "passes over step-00000001" in words
    told: list[str] = []
    with pytest.raises(FivefoldError, match="no good checkpoint"):
        open_run(tmp_path, plan.shape, None, told.append)
    assert "suspect.txt: step 2: ranks 1" in told[0] and "remove this file" in told[0]
    assert nothing_left(replace(settings, options=RunOptions(until=1, resume=True))) is None
    with pytest.raises(FivefoldError, match=r"step-00000001 is suspect: .*ranks 1 on"):
        Checkpoints(tmp_path / "checkpoints", 1, None).load([], told.append)


def with_a_flipped_base(worker: Worker, plan: Plan, settings: TrainSettings) -> TrainedRank:
    """A bit flips in a weight that never learns, after step 3."""
    begin = Integrity.begin

    def begun(self: Integrity, number: int) -> None:
        begin(self, number)
        if number == 4 and self.mesh.rank == 1:
            flip(self.frozen.tensors[5].tensor, 0.5, 30)

    with patch.object(Integrity, "begin", begun):
        return run_rank(worker, plan, settings)


@pytest.mark.parametrize(
    ("keys", "step", "last"),
    [({"save_every": 2}, 4, 2), ({"compare_every": 3, "steps": 7}, 6, 2), ({}, 5, 0)],
)
def test_a_flip_in_a_frozen_weight_is_found_before_a_save(
    pool: Pool, tmp_path: Path, keys: dict[str, Any], step: int, last: int
) -> None:
    """What is recommended is the last step that was looked at, and no later one is saved."""
    plan = plan_of(layout="dp=2", train=Recipe(lora=2))
    settings = in_folder(tmp_path, plan, **{"steps": 5, "lora": 2} | keys)
    with pytest.raises(RankLost) as lost:
        pool.run_each([(with_a_flipped_base, (plan, settings))] * 2)
    where = f"step {step}: rank 1 on {socket.gethostname()} has flipped bits in memory, in frozen"
    assert f"{where} weights of blocks." in str(lost.value) and "more" not in str(lost.value)
    assert f"since step {last} may be wrong" in str(lost.value)
    assert all(step_of(each) <= last for each in published(tmp_path / "checkpoints"))


def run(pool: Pool, plan: Plan, *task: Any, **keys: Any) -> tuple[list[StepRecord], list[str]]:
    said: list[Any] = []
    settings = settings_of("float32", **keys)
    tasks = [(task[0], (plan, settings, *task[1:]))] * plan.layout.world
    pool.run_each(tasks, on_report=said.append)
    records = [each for each in said if isinstance(each, StepRecord)]
    return records, [each for each in said if isinstance(each, str)]


def test_a_spike_runs_again_and_names_the_rank(pool: Pool) -> None:
    plan = plan_of(layout="dp=2 pp=2", zero=1, microbatches=2)
    flips, said = run(pool, plan, in_compute, {18: Flip("gradient", 3, 18, 0.5, 0.5, 30)}, steps=20)
    truth, _ = run(pool, plan, run_rank, steps=20)
    assert [each.loss for each in flips] == [each.loss for each in truth]  # nothing was lost
    again = {each.step: each.again for each in flips if each.again}
    assert again[18]["same"] is False and again[18]["ranks"] == [3]
    assert any("in the hardware of rank 3, first in what it sent by fsdp" in each for each in said)


def with_a_spike(
    worker: Worker, plan: Plan, settings: TrainSettings, ranks: tuple[int, ...]
) -> TrainedRank:
    """In the first run of step 18 the losses of some ranks are 40 times as large."""
    count, calls = step_module.counted_tokens, iter(range(1000))

    def counted_tokens(*arguments: Any) -> torch.Tensor:
        spikes = next(calls) == 17 and worker.rank in ranks
        return count(*arguments) / (40.0 if spikes else 1.0)

    with patch.object(step_module, "counted_tokens", counted_tokens):
        return run_rank(worker, plan, settings)


def test_a_spike_of_all_ranks_counts_and_does_not_run_again(pool: Pool) -> None:
    plan = plan_of(layout="dp=2", zero=1)
    spike, said = run(pool, plan, with_a_spike, (0, 1), steps=20)
    truth, _ = run(pool, plan, with_a_spike, (0, 1), steps=20, compare_every=0)
    assert [(each.loss, each.norm) for each in spike] == [(e.loss, e.norm) for e in truth]
    assert spike[17].loss > 30 * spike[16].loss and not any(each.again for each in spike)
    line = "1 step had a loss or norm above the usual bound: 0 ran again, 1 had a spike of all"
    assert [line in each for each in said] == [True]


def test_a_spike_of_one_rank_runs_again(pool: Pool) -> None:
    plan = plan_of(layout="dp=2", zero=1)
    spike, said = run(pool, plan, with_a_spike, (1,), steps=20)
    truth, _ = run(pool, plan, run_rank, steps=20)
    assert [each.loss for each in spike] == [each.loss for each in truth]
    again = {each.step: each.again for each in spike if each.again}
    assert again.keys() == {18} and again[18]["ranks"] == [1] and not again[18]["same"]
    assert any(": 1 ran again, 0 had a spike of all ranks" in each for each in said)


@pytest.mark.sample(0.3)
def test_a_spike_runs_again_where_no_replica_can_be_compared(pool: Pool) -> None:
    spike, _ = run(pool, plan_of(layout="tp=2"), with_a_spike, (0, 1), steps=20)
    assert [each.step for each in spike if each.again] == [18]


def test_a_fault_of_a_backward_is_not_taken_for_a_spike_of_all_ranks() -> None:
    """It may reach the gradients of all ranks, and leaves the loss as it was."""
    bound = RunningBound(10.0)
    local = LocalNumbers(cast("Mesh", SimpleNamespace(layout=SimpleNamespace(dp=2))), bound)
    with patch.object(integrity, "exchanged", lambda mesh, mine: [mine, mine]):
        for _ in range(20):
            bound.add(4.0, 1.0)
            local.note(torch.tensor([2.0, 0.7]))
            local.add()
        local.note(torch.tensor([2.0, 70.0]))
        assert not local.is_shared(4.0, 100.0)
        local.note(torch.tensor([4.0, 70.0]))
        assert local.is_shared(8.0, 100.0)


def test_flipped_bits_are_named_with_the_host_of_their_rank() -> None:
    reports: list[tuple[str, list[str], list[str]]] = [
        (f"host-{rank}", [], []) for rank in range(4)
    ]
    reports[1][1].append("weights of a")
    reports[3][2].append("frozen weights of b")
    unbroken: Any = SimpleNamespace(broken=list[str])
    rank: Any = SimpleNamespace(
        mesh=None, seal=unbroken, frozen=unbroken, number=7, verified=4, checkpoints=None
    )
    with patch.object(integrity, "exchanged", lambda mesh, report: reports):
        text = str(Integrity.error(rank))
    for phrase in (
        "rank 1 on host-1 has",
        "in weights of a",
        "rank 3 on host-3 has",
        "weights of b",
    ):
        assert phrase in text
    assert "since step 4 may be wrong" in text


def test_a_record_tells_of_the_comparison_of_its_own_step() -> None:
    """Every second step runs twice, and the others have nothing to tell."""
    mesh: Any = SimpleNamespace(
        records=list[Any](), record_on=lambda tape: None, members={"world": (0,)}
    )
    bound, outcome = RunningBound(10.0), StepOutcome(*torch.ones(3).unbind())
    local = LocalNumbers(mesh, bound)
    replays = ReplayCallback(cast("Worker", None), mesh, 2, False, True, bound, local)
    records: list[Any] = []
    for number in (1, 2, 3):
        replays.run(number, lambda _: outcome, expected=False)
        records.append(replays.measure(number))
    assert records == [{}, {"again": {"why": None, "same": True, "ranks": []}}, {}]


def test_a_message_that_changes_on_its_way_is_named(pool: Pool) -> None:
    plan = plan_of(layout="dp=2 pp=2", zero=1, microbatches=2)
    planted = {2: Flip("message", 2, 2, 0.5, 0.5, 0)}
    with pytest.raises(RankLost, match="a message of ranks 0 to 2 changed on its way"):
        run(pool, plan, in_compute, planted, steps=3, replay=2)


def test_every_step_can_be_proved(pool: Pool) -> None:
    plan = plan_of(layout="dp=2 tp=2", zero=1, batch=4)
    proved, _ = run(pool, plan, run_rank, steps=4, replay=2)
    plain, _ = run(pool, plan, run_rank, steps=4, compare_every=0)
    assert [each.again and each.again["same"] for each in proved] == [None, True, None, True]
    assert [(each.loss, each.norm) for each in proved] == [(e.loss, e.norm) for e in plain]
    lowest = {2: Flip("activation", 1, 2, 0.5, 0.5, 0)}  # the last bit of a mantissa
    with pytest.raises(RankLost, match="step 2 ran twice with different results") as lost:
        run(pool, plan, in_compute, lowest, steps=4, replay=2)
    assert "in the hardware of rank 1, first in what it sent by tp/" in str(lost.value)


def with_a_wrong_update(worker: Worker, plan: Plan, settings: TrainSettings) -> TrainedRank:
    """The first of two updates of step 2 goes wrong on rank 1."""
    inner, calls = DeviceUpdater.step, iter(range(1000))

    def step(self: DeviceUpdater) -> None:
        inner(self)
        if worker.rank == 1 and next(calls) == 1:
            flip(self.moments["exp_avg"][3], 0.5, 0)

    with patch.object(DeviceUpdater, "step", step):
        return run_rank(worker, plan, settings)


def test_an_update_is_proved_too(pool: Pool) -> None:
    with pytest.raises(RankLost, match="in the hardware of rank 1, first in its update of exp_avg"):
        run(pool, plan_of(layout="dp=2", zero=1), with_a_wrong_update, steps=3, replay=2)


def with_one_nan(worker: Worker, plan: Plan, settings: TrainSettings) -> TrainedRank:
    """A gradient that rank 1 sends is no number, once."""
    inner, calls = FlatUnit.send, iter(range(1000))

    def send(self: FlatUnit, last: bool) -> None:
        if self.mesh.rank == 1 and next(calls) == 1:
            self.share()[0] = float("nan")
        inner(self, last)

    with patch.object(FlatUnit, "send", send):
        return run_rank(worker, plan, settings)


def test_what_is_not_finite_runs_again_before_it_is_skipped(pool: Pool) -> None:
    records, said = run(pool, plan_of(layout="dp=2", zero=0), with_one_nan, steps=2)
    assert [each.skipped for each in records] == [None, None]
    assert [each.again and each.again["ranks"] for each in records] == [None, [1]]
    assert any("rank 1" in each for each in said)


def test_the_bound_follows_what_is_usual() -> None:
    bound = RunningBound()
    for number in range(15):
        bound.add(4.0 - number / 100, 1.0)
    assert bound.limits == (float("inf"), float("inf"))
    bound.add(float("nan"), 1.0)
    assert bound.limits == (float("inf"), float("inf"))
    bound.add(3.8, 1.2)
    loss, norm = bound.limits
    assert 4.0 < loss < 4.5 and norm == pytest.approx(1.25)
    for _ in range(64):
        bound.add(2.0, 0.1)
    assert bound.limits == (pytest.approx(2.1), pytest.approx(0.125))


def test_data_can_cross_the_bound_in_few_steps_only() -> None:
    """Norms with a heavy tail, of which one in twenty is above six deviations at first."""
    rng, bound, crossed = random.Random(0), RunningBound(), 0
    for _ in range(20_000):
        norm = rng.lognormvariate(0.0, 0.3) * (20.0 if rng.random() < 0.05 else 1.0)
        if norm > bound.limits[1]:
            crossed += 1
            bound.widen()
        bound.add(3.0, norm)
    assert 20 < crossed < 0.007 * 20_000


def test_a_healthy_run_crosses_the_default_bound_in_no_step() -> None:
    """Norms that rise and fall with the learning rate, vary by a third and treble at times."""
    rng, seen = random.Random(1), dict[float, int]()
    for factor in (1.0, Recipe().spike_bound):
        bound = RunningBound(factor)
        for number in range(4_000):
            norm = (1 + math.sin(number / 900) / 2) * rng.lognormvariate(0.0, 0.3)
            norm *= 3.0 if rng.random() < 0.01 else 1.0
            loss = 3.0 + 4.0 * math.exp(-number / 100) + rng.gauss(0.0, 0.1)
            above = loss > bound.limits[0] or norm > bound.limits[1]
            seen[factor] = seen.get(factor, 0) + above
            bound.add(loss, norm)
    assert seen[1.0] > 10 and seen[10.0] == 0


def test_the_bound_is_so_many_times_as_far_above_the_median() -> None:
    bound = RunningBound(10.0)
    for _ in range(16):
        bound.add(-2.0, 1.0)
    assert bound.usual == (pytest.approx(-1.9), pytest.approx(1.25))
    assert bound.limits == (pytest.approx(-1.0), pytest.approx(3.5))
