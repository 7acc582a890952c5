"""The clock of a step and the reader of a rank on a GPU, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fivefold.launch.backend import num_gpus

pytestmark = pytest.mark.skipif(
    not num_gpus(), reason="no CUDA device: run this where there is one"
)

STEPS = """
import json, time, warnings, torch
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.worker import NoMeeting, Worker
from fivefold.records import StepRecord
from fivefold.train import TrainSettings, run_rank
from fivefold.train.clock import StepClock
recipe = Recipe(steps=30, data="synthetic", compile=COMPILE)  # compiling waits for the GPU
sizes = {"width": "1024", "ffn": "4096", "layers": "8"}
plan = resolve(PlanOptions("tiny", seq=512, batch=8, microbatches=1, set=sizes, train=recipe))
records, moments, waits, order = [], {}, {}, []
caught = warnings.catch_warnings(record=True)
seen = caught.__enter__()
warnings.simplefilter("always")
def send(kind, value):
    order.append(value.step if isinstance(value, StepRecord) else value)
    if isinstance(value, StepRecord):
        records.append((value.step, value.data, value.seconds, value.wall_s))
    elif value in ("data of step 1", "data of step 11", "checkpoint 30"):
        torch.cuda.synchronize()
        moments[value] = time.perf_counter()
    if value == "data of step 12":
        torch.cuda.set_sync_debug_mode("warn")
    if value == "data of step 22":
        torch.cuda.set_sync_debug_mode("default")
mark = StepClock.mark
def mark_late(clock):
    if "data of step 15" in order and "data of step 16" not in order:
        torch.cuda._sleep(200_000_000)  # its update ends long after the host has issued it
    return mark(clock)
StepClock.mark = mark_late
run_rank(Worker(0, NoMeeting(), send), plan, TrainSettings(recipe, "bfloat16", "cuda"))
waits = [str(one.message) for one in seen if "synchronizing CUDA" in str(one.message)]
wall = moments["checkpoint 30"] - moments["data of step 11"]
full = moments["checkpoint 30"] - moments["data of step 1"]
late = order.index(15) > order.index("data of step 16")
told = {"records": records, "wall": wall, "full": full, "waits": len(waits), "late": late}
print(json.dumps(told))
"""

ROWS = """
import torch
from fivefold.core.layout.batch import Batch
from fivefold.data.mixture import open_source
from fivefold.data.rank_reader import RankReader
source = open_source("synthetic", 1000, 2048, 0)
batch = Batch(dp=2, seq=2048, microbatch_size=2, microbatches=3)
here = RankReader(source, batch, True, 1, torch.device("cpu"))
there = RankReader(source, batch, True, 1, torch.device("cuda", 0))
x, sums, wanted = torch.randn(4096, 4096, device="cuda"), [], []
names = ("tokens", "labels", "positions")
with there.ahead(0, 40) as take:
    for number in range(40):
        batches = take()
        for _ in range(5):
            x = (x @ x).clamp(-1, 1)  # the copies of later steps run during this
        sums.append(torch.stack([getattr(one, name).sum() for one in batches for name in names]))
        del batches
for number in range(40):
    batches = here.step(number * batch.sequences).of(0)
    wanted.append(torch.stack([getattr(one, name).sum() for one in batches for name in names]))
assert torch.stack(sums).cpu().equal(torch.stack(wanted))
"""


def ran(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_walls_of_the_steps_are_the_wall_time_and_the_host_waits_once() -> None:
    found = json.loads(ran(STEPS.replace("COMPILE", "False")).splitlines()[-1])
    records = found["records"]
    assert [step for step, *_ in records] == list(range(1, 31))
    assert all(0 <= data <= seconds <= wall for _, data, seconds, wall in records)
    walls = sum(wall for step, *_, wall in records if step > 10)
    assert walls == pytest.approx(found["wall"], rel=0.01)
    assert found["waits"] <= 10  # of ten steps
    assert found["late"]  # the record of a step is read while the next one runs


def test_the_walls_of_a_run_that_compiles_its_update_in_step_1_are_its_wall_time() -> None:
    """The host is late in step 1: it compiles between the event of loss and norm and its wait."""
    told = json.loads(ran(STEPS.replace("COMPILE", "True")).splitlines()[-1])
    records = told["records"]
    assert [step for step, *_ in records] == list(range(1, 31))
    assert all(0 < seconds <= wall for _, _, seconds, wall in records)
    walls = records[0][2] + sum(wall for *_, wall in records[1:])  # from the request for rows
    assert walls == pytest.approx(told["full"], rel=0.01)


def test_rows_arrive_whole_while_the_stream_is_behind() -> None:
    ran(ROWS)
