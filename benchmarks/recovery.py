"""Recovery: ranks are killed at random, and a run goes on from copies in memory.

    python benchmarks/recovery.py read [--ranks 8] [--times 5]
    python benchmarks/recovery.py kills [--ranks 8] [--kills 20] [--shrink] [--device cuda ...]

`read`: one run of `tiny` loses a rank again and again. Every other time its copies are broken, so
that the restart reads the disk. Both times and their ratio are of one run.

`kills`: a run without faults, and one whose ranks are killed by SIGKILL at random times: in a
build, in a step, in a copy. Where the layout stays, weights, states and losses are equal to the
bit; with `--shrink`, weights are within 1e-10 in float64. Every sample is read once, in order.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fivefold.commands.train import train
from fivefold.commands.train_start import RestartedRun
from fivefold.records.steps import StepRecord
from fivefold.train.checkpoint.checkpoints import Reader
from fivefold.train.checkpoint.folders import latest

NAME = "memfd:fivefold-"
CLOSE = 1e-10


def said_step(out: Path) -> int:
    """The steps that are recorded."""
    path = out / "metrics.jsonl"
    return len(path.read_text("utf-8").splitlines()) if path.exists() else 0


def ranks_of(parent: int) -> list[int]:
    """The ranks that a process has forked, apart from this one."""
    try:
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        return []
    return [pid for pid in map(int, found) if pid != os.getpid()]


def kill_at_random(parent: int, world: int, out: Path, kills: int, seed: int) -> None:
    """In a process of its own: kill a random rank so often, mostly after some progress."""
    draw, done = random.Random(seed), 0
    while done < kills:
        before, ranks, early = said_step(out), [], draw.random() < 0.2
        while (len(ranks) < world - 1 or not early) and said_step(out) <= before:
            ranks = ranks_of(parent)
            time.sleep(0.01)
            if os.getppid() != parent:
                return
        time.sleep(draw.random() * (0.5 if early else 0.3))
        if ranks := ranks_of(parent):
            try:
                os.kill(draw.choice(ranks), signal.SIGKILL)
            except ProcessLookupError:
                continue
            done += 1
            gone = time.monotonic() + 60
            while set(ranks) & set(ranks_of(parent)) and time.monotonic() < gone:
                time.sleep(0.01)


def job(asked: argparse.Namespace, steps: int, **more: Any) -> dict[str, Any]:
    return {
        "layout": asked.layout or f"dp={asked.ranks}",
        "seq": 32,
        "batch": 2 * asked.ranks,
        "layers": 2,
        "steps": steps,
        "dtype": asked.dtype,
        "device": asked.device,
        "backend": asked.backend,
        "deterministic": asked.device == "cuda",
        **more,
    }


def break_copies() -> None:
    """Nobody reads the copies that this process keeps."""
    for each in Path("/proc/self/fd").iterdir():
        try:
            ours = NAME in str(each.readlink())
        except OSError:
            continue
        if ours and os.fstat(int(each.name)).st_size:
            os.pwrite(int(each.name), bytes(8), 0)


class EveryThird:
    """Kills a rank after every third step, and breaks the copies before every other restart."""

    def __init__(self, times: int) -> None:
        self.left, self.seen = 2 * times, set[int]()
        self.took: dict[str, list[float]] = {"copies in memory": [], "the disk": []}

    def __call__(self, report: Any) -> None:
        new = isinstance(report, StepRecord) and report.step not in self.seen
        if new:
            self.seen.add(report.step)
        if new and report.step % 3 == 0 and self.left:
            self.left -= 1
            os.kill(random.choice(ranks_of(os.getpid())), signal.SIGKILL)
        if isinstance(report, RestartedRun) and report.number % 2 == 0:
            break_copies()
        if isinstance(report, str):
            print(report, flush=True)
            found = re.fullmatch(r"read step \d+ from (.*) in (\d+) ms", report)
            if found is not None:
                self.took[found[1]].append(float(found[2]))


def read(asked: argparse.Namespace, folder: Path) -> int:
    watch = EveryThird(asked.times)
    more = {"copy_every": 1, "save_every": 1}
    steps = 6 * asked.times + 6
    train(
        "tiny",
        out=folder / "run",
        restarts=2 * asked.times,
        on_progress=watch,
        **job(asked, steps, **more),
    )
    memory, disk = (
        statistics.median(watch.took[name]) for name in ("copies in memory", "the disk")
    )
    counts = [len(each) for each in watch.took.values()]
    print(f"{asked.ranks} ranks, medians of {counts[0]} and {counts[1]} restarts of one run:")
    print(f"memory {memory:.0f} ms, disk {disk:.0f} ms: {disk / memory:.1f} times as fast")
    return 0 if disk >= 3 * memory else 1


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def compare(calm: Path, shaken: Path, exact: bool) -> str:
    """What differs between two runs; raises if it is too much."""
    readers = [Reader(latest(each) or each) for each in (calm, shaken)]
    assert readers[0].tensors.keys() == readers[1].tensors.keys()
    worst = 0.0
    for key in readers[0].tensors:
        one, other = (each.read(key) for each in readers)
        if exact:
            assert one.equal(other), f"{key} differs"
        elif key.startswith("model/"):
            worst = max(worst, float((one - other).abs().max() / one.abs().max()))
    assert worst <= CLOSE, f"weights differ by {worst:.1e}"
    found = lines(shaken)
    samples = [each["first_sample"] + row for each in found for row in range(each["num_samples"])]
    assert samples == list(range(len(samples))), "a sample was lost or read twice"
    assert len(found) == len(lines(calm))
    if exact:
        assert [each["loss"] for each in found] == [each["loss"] for each in lines(calm)]
    worlds = sorted({each["world"] for each in found})
    return f"weights within {worst:.1e}, {len(samples)} samples once each, on {worlds} ranks"


def kills(asked: argparse.Namespace, folder: Path) -> int:
    calm, shaken, steps = folder / "calm", folder / "shaken", 2 * asked.kills + 5
    options = job(asked, steps, copy_every=1, save_every=10)
    train("tiny", out=calm, **options)
    said: list[str] = []
    killer = multiprocessing.get_context("fork").Process(
        target=kill_at_random,
        args=(os.getpid(), asked.ranks, shaken, asked.kills, asked.seed),
        daemon=False,
    )
    killer.start()
    restarts = 0

    def hear(report: Any) -> None:
        nonlocal restarts
        restarts += isinstance(report, RestartedRun)
        if isinstance(report, str | RestartedRun):
            said.append(str(report))

    try:
        train(
            "tiny",
            out=shaken,
            restarts=asked.kills + 3,
            shrink=asked.shrink,
            on_progress=hear,
            **options,
        )
    finally:
        killer.kill()
        killer.join()
        print("\n".join(said[-6:]), flush=True)
    found = compare(calm, shaken, exact=not asked.shrink)
    memory = sum("from copies in memory" in each for each in said)
    disk = sum("from the disk" in each for each in said)
    print(f"{restarts} restarts, {memory} from memory and {disk} from the disk: {found}")
    return 0 if restarts >= asked.kills else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("read", "kills"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layout", default="")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fivefold-") as folder:
        return {"read": read, "kills": kills}[asked.what](asked, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
