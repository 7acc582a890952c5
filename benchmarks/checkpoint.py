"""How fast a training state is saved, beside what the same disk takes for plain files.

    python benchmarks/checkpoint.py                              20 GiB on a GPU, 0.5 on a CPU
    python benchmarks/checkpoint.py --gib 2 --folder /scratch --json checkpoint.json

It builds llama-3.2-1b with as many layers as make the checkpoint as large as asked for: float32
weights or masters, and two states of AdamW. After a few steps, so that no state is zero, it times

  plain   the same bytes in plain files, written and synced by as many threads as a save has; once
          before and once after the saves, and in one thread at the end (a quarter of the bytes)
  memory  what a run does before its first step: it makes the host memory of the copies
  first   the first save, from the request until the checkpoint has its name
  next    another save
  steps   a save while steps go on; their time with and without it, and how long `save` held them
  load    the checkpoint of the last save, verified and read into the state

Every file is synced, in plain files too, and removed after its part. It exits with 1 if one of the
three saves takes longer than the better plain time over 0.8, or if the load does not return the
values at the moment of the save. Nothing else should use the disk meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from threading import Thread

import torch

from fivefold.core.layout.weight_table import weights
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.data.batches import samples
from fivefold.parallel.composition import Job, compose
from fivefold.parallel.mesh import Mesh
from fivefold.step import step, updater_of
from fivefold.train.callbacks.checkpoints import checkpoint_tensors
from fivefold.train.checkpoint.checkpoints import Checkpoints
from fivefold.train.checkpoint.folders import Facts
from fivefold.train.checkpoint.storage import CheckpointTensor
from fivefold.train.checkpoint.threads import in_threads, num_streams

LEAST = 0.8
WARM_UP, STEPS = 3, 10
BYTES_OF_WEIGHT = 12  # in a checkpoint: three numbers of four bytes
BLOCK = 16 << 20
SMALL = {"vocab": "8192", "ffn": "1024"}  # on a CPU, where few bytes must be enough


@dataclass
class Seconds:
    """What was measured."""

    num_bytes: int
    num_threads: int
    plain: list[float] = field(default_factory=list[float])
    one_thread: float = 0.0  # for all bytes
    reserve: float = 0.0
    saves: dict[str, float] = field(default_factory=dict[str, float])
    held: dict[str, float] = field(default_factory=dict[str, float])  # until `save` returned
    step: float = 0.0
    step_during_save: float = 0.0
    num_steps_during_save: int = 0
    load: float = 0.0
    load_is_exact: bool = False

    @property
    def ratios(self) -> dict[str, float]:
        """The speed of each save over that of plain files."""
        return {name: min(self.plain) / seconds for name, seconds in self.saves.items()}

    @property
    def good(self) -> bool:
        return self.load_is_exact and min(self.ratios.values()) >= LEAST

    def show(self, name: str, seconds: float, more: str = "") -> None:
        """Print one line."""
        speed = self.num_bytes / seconds / 1e9
        print(f"{name:<22}{seconds:8.2f} s {speed:7.2f} GB/s  {more}".rstrip(), flush=True)


class Trained:
    """One rank whose state is saved, and its steps."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        narrow = device.type == "cuda"
        self.plan, self.device = plan, device
        self.job: Job = compose(
            plan,
            Mesh.of(plan, device),
            seed=0,
            dtype=torch.bfloat16 if narrow else torch.float32,
        )
        self.updater = updater_of(self.job, Recipe(lr=3e-4), master=narrow)
        self.batches = samples(plan.batch, plan.shape.vocab, 0, 0).to(device).of(0)

    def step(self) -> float:
        """The seconds of one step."""
        began = time.perf_counter()
        step(self.job, self.updater, self.batches, 1.0)
        self.finish()
        return time.perf_counter() - began

    def finish(self) -> None:
        """Wait for the device."""
        for chunk in self.job.chunks:
            chunk.data.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tensors(self) -> list[CheckpointTensor]:
        return checkpoint_tensors(self.job, self.updater)

    def sums(self) -> list[float]:
        """One number of each tensor: equal if its values are."""
        return [each.state.read().double().sum().item() for each in self.tensors()]


def plan_of(gib: float, device: str) -> Plan:
    """The model with about as many bytes in its checkpoint, in the layers that it takes."""

    def with_layers(layers: int) -> Plan:
        changes = {"layers": str(layers)} | (SMALL if device == "cpu" else {})
        seq = 4096 if device == "cuda" else 64
        options = PlanOptions(
            "llama-3.2-1b", seq=seq, microbatches=1, microbatch_size=1, set=changes
        )
        return resolve(options)

    one, two = (num_bytes_of(with_layers(layers)) for layers in (1, 2))
    return with_layers(max(1, round((gib * 2**30 - (2 * one - two)) / (two - one))))


def num_bytes_of(plan: Plan) -> int:
    """Bytes of the values in a checkpoint."""
    return BYTES_OF_WEIGHT * sum(torch.Size(each.shape).numel() for each in weights(plan.shape))


def plain_seconds(folder: Path, num_bytes: int, num_threads: int) -> float:
    """Write and sync as many bytes in plain files."""
    source = memoryview(torch.randint(256, (16 * BLOCK,), dtype=torch.uint8).numpy())
    share = -(-num_bytes // num_threads)

    def write(number: int) -> None:
        with (folder / f"plain-{number}").open("wb", buffering=0) as file:
            while (left := share - file.tell()) > 0:
                start = file.tell() % len(source)
                file.write(source[start : start + min(BLOCK, left)])
            os.fsync(file.fileno())

    os.sync()
    began = time.perf_counter()
    in_threads(write, range(num_threads), num_threads)
    seconds = time.perf_counter() - began
    empty(folder)
    return seconds


def empty(folder: Path) -> None:
    """Remove everything in it."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()


def saved(
    checkpoints: Checkpoints, tensors: Sequence[CheckpointTensor], number: int
) -> tuple[float, float]:
    """The seconds until a save returns, and until its checkpoint has its name."""
    os.sync()
    began = time.perf_counter()
    checkpoints.save(tensors, Facts(number))
    held = time.perf_counter() - began
    checkpoints.wait()
    return held, time.perf_counter() - began


def saved_during_steps(checkpoints: Checkpoints, trained: Trained, found: Seconds) -> None:
    """A save, and steps until it is over."""
    ends: list[float] = []

    def wait() -> None:
        checkpoints.wait()
        ends.append(time.perf_counter())

    os.sync()
    found.step = median(trained.step() for _ in range(STEPS))
    expected = trained.sums()
    began = time.perf_counter()
    checkpoints.save(trained.tensors(), Facts(3))
    found.held["steps"] = time.perf_counter() - began
    waiting = Thread(target=wait)
    waiting.start()
    times: list[float] = []
    while waiting.is_alive() or not times:
        times.append(trained.step())
    found.saves["steps"] = ends[0] - began
    found.step_during_save, found.num_steps_during_save = median(times), len(times)
    for each in trained.tensors():
        each.state.write(torch.zeros_like(each.state.read()))
    began = time.perf_counter()
    facts = checkpoints.load(trained.tensors(), print)
    trained.finish()
    found.load = time.perf_counter() - began
    found.load_is_exact = facts == Facts(3) and trained.sums() == expected


def measure(gib: float, device: str, folder: Path) -> Seconds:
    """Run all parts, and print them as they come."""
    plan = plan_of(gib, device)
    num_bytes = num_bytes_of(plan)
    found = Seconds(num_bytes, num_streams(num_bytes))
    trained = Trained(plan, torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"))
    gib_of = found.num_bytes / 2**30
    print(f"{gib_of:.1f} GiB, {plan.shape.layers} layers, {found.num_threads} threads", flush=True)
    for _ in range(WARM_UP):
        trained.step()

    def plain() -> None:
        found.plain.append(plain_seconds(folder, found.num_bytes, found.num_threads))
        found.show("plain files", found.plain[-1])

    def save(name: str, number: int) -> None:
        found.held[name], found.saves[name] = saved(checkpoints, trained.tensors(), number)
        found.show(f"{name} save", found.saves[name], f"returned after {found.held[name]:.2f} s")
        empty(folder)

    checkpoints = Checkpoints(folder, 1, None, trained.device)
    began = time.perf_counter()
    checkpoints.reserve(trained.tensors())
    found.reserve = time.perf_counter() - began
    found.show("memory", found.reserve)
    plain()
    save("first", 1)
    save("next", 2)
    saved_during_steps(checkpoints, trained, found)
    found.show("save during steps", found.saves["steps"], f"held {found.held['steps']:.2f} s")
    found.show("load", found.load, "exact" if found.load_is_exact else "WRONG VALUES")
    empty(folder)
    plain()
    found.one_thread = 4 * plain_seconds(folder, found.num_bytes // 4, 1)
    found.show("plain, one thread", found.one_thread)
    return found


def main() -> int:
    """Print all times and the ratios; 1 where a save is too slow or a load is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, help="size of the checkpoint")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    given = parser.parse_args()
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=given.folder) as name:
        found = measure(given.gib or (20 if device == "cuda" else 0.5), device, Path(name))
    during, without = 1e3 * found.step_during_save, 1e3 * found.step
    print(
        f"step {without:.1f} ms, during the save {during:.1f} ms ({during / without - 1:+.1%}, "
        f"{found.num_steps_during_save} steps)"
    )
    shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.ratios.items())
    print(f"of the speed of plain files: {shown} (at least {LEAST})")
    if given.json:
        given.json.write_text(
            json.dumps(asdict(found) | {"ratios": found.ratios, "good": found.good}, indent=1)
        )
    return int(not found.good)


if __name__ == "__main__":
    sys.exit(main())
