"""Chaos: SIGKILLs at random ranks and times over one run, each resumed, and nothing is different.

A run is trained without interruption. The same run is trained again while random ranks are killed:
while they are built, in a step, and while a checkpoint is being written. Each time the command has
to end within 30 s, with exit code 1 and the name of the rank; then it is started again with
`--resume`. In the end all weights and optimizer states are equal bit for bit, and every sample was
consumed exactly once, in order.

    python benchmarks/chaos.py [--kills 10] [-- --device cuda --deterministic]

What follows `--` goes to `fivefold train`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from fivefold.train.checkpoint.checkpoints import Reader
from fivefold.train.checkpoint.folders import latest

WORLD = 4
PLAN = ("tiny-moe", "--layout", "dp=2 tp=2 ep=2", "--seq", "32", "--microbatches", "2")
MODEL = ("--set", "layers=2 save_every=2 keep=2")
SOON = 30.0  # seconds within which a run ends that has lost a rank
START = 120.0  # seconds that a start may take on a busy machine
AIMS = ("any time", "checkpoint")


class Broken(Exception):
    """A promise that was not kept."""


def begun(out: Path, asked: argparse.Namespace, resume: bool) -> subprocess.Popen[str]:
    """A training in a process of its own."""
    words = [*PLAN, *MODEL, "--steps", str(asked.steps), "--out", str(out), *asked.words]
    command = [sys.executable, "-m", "fivefold", "train", *words, *["--resume"] * resume]
    log = (out.parent / f"{out.name}.err").open("w+", encoding="utf-8")
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, text=True)


def said(out: Path) -> str:
    """What the last start has written to stderr."""
    return (out.parent / f"{out.name}.err").read_text("utf-8").strip()


def ranks(process: subprocess.Popen[str]) -> list[int]:
    """Its forks in order, when all of them are there; none when it is over."""
    until = time.monotonic() + START
    while process.poll() is None and time.monotonic() < until:
        found = sorted(_forks(process.pid))
        if len(found) == WORLD:
            return found
        time.sleep(0.01)
    return []


def _forks(parent: int) -> Iterator[int]:
    try:
        words = Path(f"/proc/{parent}/cmdline").read_bytes()
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if Path(f"/proc/{child}/cmdline").read_bytes() == words:
                yield int(child)
    except OSError:  # one of them has just ended
        return


def writing(out: Path) -> set[int]:
    """Checkpoints that are not whole, each by the number of its folder on disk."""
    found: set[int] = set()
    for part in (out / "checkpoints").glob("*.part"):
        with contextlib.suppress(FileNotFoundError):  # it has just been published
            found.add(part.stat().st_ino)
    return found


def wait_for(aim: str, out: Path, process: subprocess.Popen[str], chance: random.Random) -> None:
    """Until the moment to kill has come."""
    if aim == "any time":
        time.sleep(chance.uniform(0.0, 4.0))
        return
    left = writing(out)  # by a writer that was killed
    while process.poll() is None and not writing(out) - left:
        time.sleep(0.001)
    time.sleep(chance.uniform(0.0, 0.02))


def kill_one(out: Path, process: subprocess.Popen[str], aim: str, chance: random.Random) -> str:
    """Kill a rank, and hold the command to its promises; says what was seen."""
    pids, rank = ranks(process), chance.randrange(WORLD)
    wait_for(aim, out, process, chance)
    if not pids or process.poll() is not None:
        process.wait()
        return f"was over before it could be killed, with exit code {process.returncode}"
    os.kill(pids[rank], signal.SIGKILL)
    began = time.monotonic()
    try:
        code = process.wait(timeout=SOON)
    except subprocess.TimeoutExpired:
        process.kill()
        raise Broken(f"rank {rank} was killed, and the run went on for {SOON:.0f} s") from None
    named = re.search(rf"lost rank {rank} at (.*): it was killed by SIGKILL", said(out))
    if code != 1 or named is None:
        raise Broken(f"rank {rank} was killed; exit code {code}, and it said: {said(out)}")
    return f"killed rank {rank} at {named[1]}; over after {time.monotonic() - began:.1f} s"


def finished(out: Path, asked: argparse.Namespace, resume: bool) -> None:
    """Train to the end, unless the last kill came after that."""
    process = begun(out, asked, resume)
    if process.wait(timeout=300) != 0 and "nothing is left to train" not in said(out):
        raise Broken(f"exit code {process.returncode}: {said(out)}")


def compare(calm: Path, shaken: Path, steps: int) -> int:
    """How many tensors are equal in both runs, if all are."""
    readers = [Reader(latest(out) or out) for out in (calm, shaken)]
    if readers[0].tensors != readers[1].tensors:
        raise Broken("the checkpoints do not hold the same tensors")
    for key in readers[0].tensors:
        if not torch.equal(*(reader.read(key) for reader in readers)):
            raise Broken(f"{key} is not the same")
    lines = [json.loads(line) for line in (shaken / "metrics.jsonl").read_text().splitlines()]
    samples = [line["first_sample"] + each for line in lines for each in range(line["num_samples"])]
    if len(lines) != steps or samples != list(range(len(samples))):
        raise Broken(f"samples were lost or repeated: {samples}")
    return len(readers[0].tensors)


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="No kill after so long.")
    parser.add_argument("words", nargs="*", help="For `fivefold train`.")
    asked = parser.parse_args()
    chance, began, num_kills = random.Random(asked.seed), time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="fivefold-chaos-") as folder:
        calm, shaken = Path(folder) / "calm", Path(folder) / "shaken"
        finished(calm, asked, False)
        print(f"{asked.steps} steps without interruption: {time.monotonic() - began:.0f} s")
        for number in range(asked.kills):
            # What is left of the time is for the way to the end.
            if time.monotonic() - began > asked.seconds * 0.8:
                break
            resume = (shaken / "run.json").exists()
            process = begun(shaken, asked, resume)
            seen = kill_one(shaken, process, AIMS[number % len(AIMS)], chance)
            num_kills += seen.startswith("killed")
            print(f"{number + 1}: {seen}", flush=True)
        finished(shaken, asked, True)
        equal = compare(calm, shaken, asked.steps)
    print(
        f"{num_kills} kills in {time.monotonic() - began:.0f} s: {equal} tensors equal bit for "
        "bit, every sample once"
    )
    return 0 if num_kills == asked.kills else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Broken as broken:
        sys.exit(f"chaos: {broken}")
