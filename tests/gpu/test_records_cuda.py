"""Events and memory snapshots on a GPU, each in a process of its own: nobody forks after CUDA."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.launch.backend import num_gpus

pytestmark = pytest.mark.skipif(
    not num_gpus(), reason="no CUDA device: run this where there is one"
)

EVENTS = """
import sys, time, torch
from pathlib import Path
from fivefold.train.callbacks.records import SpanLog
device = torch.device("cuda")
x = torch.randn(4096, 4096, device=device)
(x @ x).sum().item()
events = SpanLog(Path(sys.argv[1]), 0, 0, device)
for number in range(3):
    began = time.perf_counter_ns()
    action = events.begin("0F0")
    collective = events.begin("tp/all_gather", 8, 2)
    for _ in range(20):
        x @ x
    events.end(collective)
    events.end(action)
    issued = time.perf_counter_ns()
    torch.cuda.synchronize()
    print(began, issued, time.perf_counter_ns())
    events.step(number)
events.close()
"""

SNAPSHOTS = """
import sys, torch
from pathlib import Path
from fivefold.train.callbacks.memory import STEPS, Snapshots
device = torch.device("cuda")
snapshots = Snapshots(Path(sys.argv[1]), 0, device, requested=True)
assert snapshots.note is None
kept = [torch.ones(1 << 20, device=device) for _ in range(STEPS)]
for number in range(1, STEPS + 1):
    snapshots.step(number)
try:
    torch.empty(1 << 50, device=device)
except torch.OutOfMemoryError:
    snapshots.out_of_memory()
"""


def ran(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_action_lasts_as_long_as_the_device_works(tmp_path: Path) -> None:
    """The host has only issued its kernels when its action ends."""
    rows = [[int(each) for each in line.split()] for line in ran(EVENTS, tmp_path).splitlines()]
    text = (tmp_path / "events" / "rank-00000.jsonl").read_text("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    actions = [line for line in lines if line.get("kind") == "action"]
    collectives = [line for line in lines if line.get("kind") == "collective"]
    assert len(rows) == len(actions) == len(collectives) == 3
    for (began, issued, over), action, collective in zip(rows, actions, collectives, strict=True):
        slack = 1_000_000  # nanoseconds between two clocks
        assert began - slack <= action["begin"] < action["end"] <= over + slack
        assert action["end"] - action["begin"] > 0.5 * (over - began)
        assert began <= collective["begin"] <= collective["end"] <= issued
        assert action["end"] > collective["end"]


def test_snapshots_are_what_the_viewer_reads(tmp_path: Path) -> None:
    ran(SNAPSHOTS, tmp_path)
    names = ("rank-00000-out-of-memory.pickle", "rank-00000-step-00000003.pickle")
    assert sorted(each.name for each in (tmp_path / "memory").iterdir()) == list(names)
    for name in names:
        found = pickle.loads((tmp_path / "memory" / name).read_bytes())
        assert sum(each["allocated_size"] for each in found["segments"]) >= 3 * (4 << 20)
    recorded = pickle.loads((tmp_path / "memory" / names[1]).read_bytes())
    assert any(event["action"] == "alloc" for trace in recorded["device_traces"] for event in trace)
