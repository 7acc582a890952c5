"""What a training survives: numbers that are not finite, little memory, a full disk, damage."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from trained import train

from fivefold.core.errors import RankLost
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.optim.optimizer import DeviceUpdater, LossScale
from fivefold.parallel.units.flat_unit import FlatUnit
from fivefold.records.run_writer import RunFolder
from fivefold.records.steps import StepRecord
from fivefold.train.checkpoint.checkpoints import Reader
from fivefold.train.checkpoint.folders import latest
from fivefold.train.loop import run_rank
from fivefold.train.options import RunOptions
from fivefold.train.state import TrainedRank, TrainSettings

STEPS = 4


def plan_of(layout: str = "dp=2", **options: Any) -> Plan:
    said = {"seq": 16, "batch": 4, "set": {"layers": "2"}, **options}
    return resolve(PlanOptions("tiny", layout=layout, **said))


def settings_of(folder: Path | None = None, resume: bool = False, **said: Any) -> TrainSettings:
    dtype = said.pop("dtype", "float32")
    if folder is not None:
        RunFolder.create(folder, "", {}, resume)
    return TrainSettings(
        Recipe(**{"steps": STEPS, **said}), dtype, folder=folder, options=RunOptions(resume=resume)
    )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found = latest(folder)
    assert found is not None
    reader = Reader(found)
    return {key: reader.read(key) for key in reader.tensors}


def trained(pool: Pool, plan: Plan, settings: TrainSettings) -> tuple[list[StepRecord], list[str]]:
    said: list[Any] = []
    train(pool, plan, settings, said.append)
    return (
        [each for each in said if isinstance(each, StepRecord)],
        [each for each in said if isinstance(each, str)],
    )


def skips_like_the_kernel() -> ExitStack:
    """Updaters that are called before loss and norm are read, as that of a GPU is."""
    inner, stack = DeviceUpdater.step, ExitStack()

    def step(self: DeviceUpdater) -> None:
        factor = self.owned[0].factor
        assert factor is not None
        if factor.isnan():
            self.count += 1
        else:
            inner(self)

    stack.enter_context(patch.object(DeviceUpdater, "step", step))
    always = property(lambda _: True, lambda _, value: None)
    stack.enter_context(patch.object(DeviceUpdater, "skips", always, create=True))
    return stack


def with_bad_steps(
    worker: Worker,
    plan: Plan,
    settings: TrainSettings,
    bad: frozenset[int],
    early: bool = False,
) -> TrainedRank:
    """A gradient of rank 1 is no number in these steps."""
    inner, steps = FlatUnit.hand_over, iter(range(1, 1000))

    def hand_over(self: FlatUnit) -> None:
        inner(self)
        first = any(each.row.name == "embed.weight" for each in self.owned)
        if self.mesh.rank == 1 and first and next(steps) in bad:
            self.owned[0].grad[0] = float("nan")

    skipping = skips_like_the_kernel() if early else nullcontext()
    with patch.object(FlatUnit, "hand_over", hand_over), skipping:
        return run_rank(worker, plan, settings)


@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    early: bool, pool: Pool, tmp_path: Path
) -> None:
    plan, settings = plan_of(zero=0), settings_of(tmp_path, compare_every=0)
    pool.run_each([(with_bad_steps, (plan, settings, frozenset({2}), early))] * 2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["skipped"] for line in lines] == [None, "norm is not finite", None, None]
    assert [line["first_sample"] for line in lines] == [0, 4, 8, 12]  # its text is behind it
    found = latest(tmp_path)
    assert found is not None
    facts = Reader(found).facts
    assert (facts.step, facts.updates, facts.skipped, facts.samples) == (4, 3, 1, 16)
    assert all(each.isfinite().all() for each in weights_of(tmp_path).values())


def test_too_many_in_a_row_end_the_run(pool: Pool) -> None:
    plan, settings = plan_of(zero=0), settings_of(skip_limit=1, compare_every=0)
    with pytest.raises(RankLost, match="2 steps in a row had a loss or norm that is not finite"):
        pool.run_each([(with_bad_steps, (plan, settings, frozenset({2, 3})))] * 2)


def test_the_scale_of_float16_answers_an_overflow() -> None:
    scale = LossScale.of("float16")
    before = scale.value
    scale.update(skipped=True)
    assert scale.value == before / 2 and scale.explains_overflow
    for _ in range(500):
        scale.update(skipped=False)
    assert scale.value == before
    assert LossScale.of("bfloat16").value == 1.0 and not LossScale.of("bfloat16").explains_overflow


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_follow_float32(pool: Pool, tmp_path: Path, dtype: str) -> None:
    """Masters and sums in float32: the curve stays within the rounding of activations."""
    plan = plan_of("dp=2", zero=1, microbatches=2)
    wide, _ = trained(pool, plan, settings_of())
    narrow, _ = trained(pool, plan, settings_of(tmp_path, dtype=dtype))
    for one, other in zip(wide, narrow, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=2e-3)
        assert one.norm == pytest.approx(other.norm, rel=2e-2)
    kept = weights_of(tmp_path)
    assert {each.dtype for key, each in kept.items() if key.startswith("model/")} == {torch.float32}
    assert (narrow[0].scale is not None) == (dtype == "float16")


@pytest.mark.parametrize("layout", ["dp=1", "dp=2"])
def test_weights_and_states_on_disk_are_the_same_to_the_bit(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    plan = plan_of(layout, microbatches=2)
    trained(pool, plan, settings_of(tmp_path / "memory"))
    disk = tmp_path / "disk"
    trained(pool, plan, settings_of(tmp_path / "away", offload=f"nvme:{disk}"))
    wanted, found = weights_of(tmp_path / "memory"), weights_of(tmp_path / "away")
    assert wanted.keys() == found.keys()
    assert all(each.equal(found[key]) for key, each in wanted.items())
    assert not list(disk.iterdir())  # nobody has to clean up


CAPPED = """
import re, resource, sys
from pathlib import Path
from test_survival import Pool, plan_of, settings_of, trained

SHAPE = {"layers": "20", "width": "512", "heads": "4", "kv_heads": "4", "ffn": "2048"}
folder = Path(sys.argv[1])
plan = plan_of("dp=1", seq=8, batch=1, set=SHAPE)


def run(name, **said):
    try:
        with Pool(1) as pool:
            trained(pool, plan, settings_of(folder / name, steps=2, **said))
    except Exception as error:
        return f"{name} failed: {error}".splitlines()[0]
    return f"{name} done"


print(run("free"))
(used,) = re.findall(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
most = (int(used) << 10) + (int(sys.argv[2]) << 20)
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
print(run("capped"))
print(run("away", offload=f"nvme:{folder}/disk"))
"""


@pytest.mark.nightly  # two gigabytes of files
def test_memory_may_be_smaller_than_weights_and_states(tmp_path: Path) -> None:
    """84 million weights and their states are 1,006 MB, 960 MiB; the process may take 800 MiB.

    With states and weights in files it needs 500: 320 for gradients, 92 for three blocks of states,
    48 for the weights of three layers, 40 for stacks of threads and imports. What the heap cannot
    use again is 150 to 200 more. A copy of all weights would be another 320, and fail.
    """
    code = [sys.executable, "-c", CAPPED, str(tmp_path), "800"]
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    done = subprocess.run(
        code, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": paths}
    )
    free, capped, away = done.stdout.splitlines()
    assert (free, away) == ("free done", "away done"), done.stdout
    assert "alloc" in capped or "MemoryError" in capped, capped
    wanted, found = weights_of(tmp_path / "free"), weights_of(tmp_path / "away")
    assert sum(each.nbytes for each in wanted.values()) > 1000e6
    assert all(each.equal(found[key]) for key, each in wanted.items())


def test_a_full_disk_is_said_and_the_next_save_tries_again(pool: Pool, tmp_path: Path) -> None:
    plan = plan_of()
    settings = settings_of(tmp_path, save_every=1)
    said: list[Any] = []
    pool.run_each([(without_room, (plan, settings, 2))] * 2, on_report=said.append)
    (warning,) = [each for each in said if isinstance(each, str)]
    assert "the checkpoint of step 2 was not written" in warning and "No space left" in warning
    assert "the next save tries again" in warning
    assert latest(tmp_path) == tmp_path / "checkpoints" / "step-00000004"


def test_a_full_disk_at_the_last_save_says_what_to_do(pool: Pool, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, save_every=3)
    with pytest.raises(RankLost, match=r"step 4 was not written.* No save follows.*--resume") as no:
        pool.run_each([(without_room, (plan_of(), settings, 4))] * 2)
    assert "tries again" not in str(no.value) and "step-00000003 stays" in str(no.value)


def without_room(worker: Worker, plan: Plan, settings: TrainSettings, full: int) -> TrainedRank:
    """The disk is full when the checkpoint of a step is written."""
    inner, calls = os.fsync, iter(range(1000))

    def fsync(number: int) -> None:
        if f"step-{full:08d}.part" in str(Path(f"/proc/self/fd/{number}").resolve()):
            next(calls)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        inner(number)

    with patch("os.fsync", fsync):
        return run_rank(worker, plan, settings)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    pool: Pool, tmp_path: Path
) -> None:
    plan = plan_of()
    trained(pool, plan, settings_of(tmp_path, save_every=2))
    whole = weights_of(tmp_path)
    found = latest(tmp_path)
    assert found is not None
    victim = max(found.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    records, said = trained(pool, plan, settings_of(tmp_path, resume=True, save_every=2))
    assert any(victim.name in each for each in said)
    assert [record.step for record in records] == [3, 4]
    again = weights_of(tmp_path)
    assert all(each.equal(again[key]) for key, each in whole.items())


def test_ranks_agree_on_when_to_save_and_say_why(pool: Pool, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, save_every="auto", mtbf_hours=1e-7, steps=24, keep=9)
    _, said = trained(pool, plan_of(), settings)
    saved = sorted(int(each.name[5:]) for each in (tmp_path / "checkpoints").glob("step-*"))
    assert {10, 20, 24} <= set(saved) and not set(range(1, 10)) & set(saved)
    assert any("save_every = auto: every" in each and "Young and Daly" in each for each in said)
    noted = json.loads((tmp_path / "run.json").read_text("utf-8"))["starts"][0]["saves"]
    assert noted[0]["step"] == 10 and "not known yet" in noted[0]["why"]
    assert noted[1]["step"] == 20 and noted[1]["every"] >= 1


def test_a_run_json_that_is_damaged_meanwhile_does_not_end_auto_saves(
    pool: Pool, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, save_every="auto", mtbf_hours=1e-7, steps=24, keep=9)
    said: list[Any] = []

    def damage(reported: object) -> None:
        (tmp_path / "run.json").write_text("{", "utf-8")
        said.append(reported)

    train(pool, plan_of(), settings, damage)
    words = [each for each in said if isinstance(each, str)]
    assert any("Young and Daly" in each for each in words)
    assert any("how often it saves is not recorded" in each for each in words)
    assert len(said) - len(words) == 24
    assert latest(tmp_path) == tmp_path / "checkpoints" / "step-00000024"


def test_another_seed_is_refused(pool: Pool, tmp_path: Path) -> None:
    plan = plan_of()
    trained(pool, plan, settings_of(tmp_path))
    settings = settings_of(tmp_path, resume=True)
    other = replace(settings, recipe=replace(settings.recipe, seed=1))
    with pytest.raises(RankLost, match="the run has seed 0, not 1"):
        trained(pool, plan, other)
