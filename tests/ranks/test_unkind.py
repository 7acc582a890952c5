"""Journeys on the unkind device of `tests/unkind.py`, and mistakes that it must show.

A journey gives there what it gives on a kind device, to the bit where that is promised. A mistake
is planted alone, beside a healthy twin that passes: on the unkind device it must fail.
`python -m tests.ranks.test_unkind` says which of them the kind device shows.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fivefold.commands.verify import runnable
from fivefold.core.errors import RankLost
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.generate import engine as engine_module
from fivefold.generate.cache import KvCache
from fivefold.launch.processes import Pool
from fivefold.parallel import pipeline as pipeline_module
from fivefold.parallel.units.flat_unit import FlatUnit
from fivefold.step import Reading
from fivefold.train.checkpoint import checkpoints as snapshot
from fivefold.train.checkpoint.checkpoints import Reader
from fivefold.train.checkpoint.folders import published
from fivefold.train.clock import StepClock, StepTimes
from fivefold.verify.generated_ranks import GeneratedSettings, run_generated
from fivefold.verify.runs import VerifySettings
from fivefold.verify.trial import run_trial
from tests.commands import in_fork
from tests.ranks.kept_pool import PATIENCE, KeptPool
from tests.ranks.serving import ask, make_model, serving
from tests.unkind import SHARE_LATE, Chance, LateDevice, LateTensor, unkind

Patch = AbstractContextManager[Any]
SEED = 44

# Journeys.


class UnkindPool(KeptPool):
    """Ranks that are forked while their parent is unkind, and stay so."""

    def whole(self) -> Pool:
        with unkind(SEED):
            return super().whole()


@pytest.fixture(scope="module")
def unkind_pool() -> Iterator[UnkindPool]:
    ranks = UnkindPool()
    yield ranks
    ranks.close()


VERIFIED: dict[str, dict[str, Any]] = {
    "dp=2": {"zero": 0},
    "dp=2 tp=2": {"zero": 1, "tp_overlap": 2},
    "dp=2x2": {"zero": 2, "grad_dtype": "bf16"},
    "dp=4": {"zero": 3, "prefetch": 2},
    "dp=2 pp=2": {"zero": 2, "schedule": "dualpipe"},
    "tp=2 pp=2": {"schedule": "zb-v", "recompute": "full"},
    "cp=4": {"recompute": "selective", "packed": True},
    "cp=4 tp=2": {"context": "ulysses"},
    "dp=2 ep=2": {"model": "tiny-moe", "zero": 3},
    "dp=2 tp=2 pp=2 ep=4": {"model": "tiny-moe", "zero": 1},
    "tp=2 etp=2": {"model": "tiny-moe"},
}


def plan_of(layout: str, model: str = "tiny", **options: Any) -> Plan:
    keys = {"unit_size": 0.06, "set": {"layers": "4" if "pp" in layout else "2"}, **options}
    return resolve(PlanOptions(model, layout=layout, **keys), small=True)


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", VERIFIED)
def test_a_layout_computes_what_one_device_does(unkind_pool: UnkindPool, layout: str) -> None:
    verdict = run_trial(unkind_pool.whole(), plan_of(layout, **VERIFIED[layout]), VerifySettings())
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)


class Trained(NamedTuple):
    """What a training leaves: loss and norm of each step, and hashes of all that it has saved."""

    steps: dict[int, tuple[float, float]]
    checkpoints: dict[str, dict[str, str]]


class CommandFailed(Exception):
    """A command ended with another exit code than 0."""


def trained(folder: Path, layout: str, *starts: str, model: str = "tiny") -> Trained:
    """Train in forks of this process, in one or several starts."""
    folder.mkdir()
    sizes = f"--seq 16 --batch 8 --set layers={4 if 'pp' in layout else 2}"
    for words in starts or ("",):
        command = f"train {model} --out run --dtype float32 {sizes} steps=6 save_every=2 keep=9"
        done = in_fork([*command.split(), *words.split(), "--layout", layout], folder)
        if done.returncode:
            raise CommandFailed(done.stderr)
    lines = (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    steps = {line["step"]: (line["loss"], line["norm"]) for line in map(json.loads, lines)}
    checkpoints: dict[str, dict[str, str]] = {}
    for checkpoint in published(folder / "run" / "checkpoints"):
        reader = Reader(checkpoint)
        checkpoints[checkpoint.name] = {key: _hash(reader.read(key)) for key in reader.tensors}
    return Trained(steps, checkpoints)


def _hash(tensor: Tensor) -> str:
    return hashlib.blake2b(tensor.numpy().tobytes()).hexdigest()


TRAININGS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "one device": ("dp=1", ("--microbatches 2",), "tiny"),
    "ZeRO-1": ("dp=2", ("--zero 1",), "tiny"),
    "ZeRO-3, resumed": ("dp=2", ("--zero 3 --until 3", "--zero 3 --resume"), "tiny"),
    "a pipeline": ("tp=2 pp=2", ("--microbatches 2",), "tiny"),
    "experts": ("cp=2 ep=2", ("",), "tiny-moe"),
    "Muon": ("dp=2", ("optimizer=muon",), "tiny"),
    "LoRA": ("dp=2", ("lora=4 --zero 3",), "tiny"),
    "states in host memory": ("dp=2", ("offload=cpu --zero 3",), "tiny"),
    "states on a disk": ("dp=1", ("offload=nvme:states",), "tiny"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_and_its_checkpoints_are_the_same(name: str, tmp_path: Path) -> None:
    layout, starts, model = TRAININGS[name]
    kind = trained(tmp_path / "kind", layout, *starts, model=model)
    assert [*kind.steps] == [1, 2, 3, 4, 5, 6] and len(kind.checkpoints) >= 3
    with unkind(SEED):
        assert trained(tmp_path / "unkind", layout, *starts, model=model) == kind


def generator_plan(layout: str) -> Plan:
    return runnable(PlanOptions("tiny", layout=layout, set={"layers": "2"}), trains=False)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["dp=1", "tp=2", "pp=2", "cp=2", "dp=2 tp=2"])
def test_generation_draws_the_tokens_of_one_forward(unkind_pool: UnkindPool, layout: str) -> None:
    verdict = run_generated(unkind_pool.whole(), generator_plan(layout), GeneratedSettings())
    assert verdict.passed and verdict.tokens_equal, verdict


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["dp=1", "tp=2"])
def test_a_server_gives_the_same_answers(layout: str, tmp_path: Path) -> None:
    """Many requests of all lengths at a time, and so few blocks that sequences lose theirs."""
    make_model(tmp_path / "model")
    bodies = [
        {"prompt": [*range(1, 2 + 7 * i % 40)], "max_tokens": 8 + 5 * i % 40, "temperature": 0}
        for i in range(12)
    ]

    async def answers(port: int) -> list[tuple[int, tuple[str, ...]]]:
        replies = await asyncio.gather(*(ask(port, body) for body in bodies))
        return [(reply.status, reply.texts) for reply in replies if reply is not None]

    words = ("--dtype", "float64", "--layout", layout, "--cache-gb", "0.0001")
    results: list[list[tuple[int, tuple[str, ...]]]] = []
    for name, device in (("kind", nullcontext()), ("unkind", unkind(SEED))):
        with device, serving(tmp_path / "model", tmp_path / f"{name}.txt", *words) as running:
            results.append(asyncio.run(answers(running.port)))
    assert {status for status, _ in results[0]} == {200} and results[0] == results[1]


# Mistakes. Each is a patch of the product in all ranks.


def gradients_added_to_unwritten_memory() -> Patch:
    return patch.object(FlatUnit, "_is_empty", lambda self, name: False)


def pages_read_before_they_are_written() -> Patch:
    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, /, pages: Any, info: Any) -> Tensor:
        output = self.kernel(q, pages, self.step, info)
        pages.write(self.step.slots, k, v)
        return output

    return patch.object(KvCache, "attend", attend)


def weights_used_before_their_gather_ends() -> Patch:
    issued: list[Any] = []  # so that what a collective reads and writes stays alive

    def arrive(self: FlatUnit) -> None:
        issued.append(self.arriving)
        self.arriving = None

    return patch.object(FlatUnit, "arrive", arrive)


def activations_used_before_they_arrive() -> Patch:
    issued: list[Any] = []

    def take(self: Any, message: Any) -> Tensor:
        issued.append(self.coming.pop(message))
        return issued[-1].pending.home

    return patch.object(pipeline_module._Inbox, "take", take)


def numbers_read_before_their_event() -> Patch:
    return patch.object(Reading, "wait", lambda self: self.numbers)


def event_before_the_copy() -> Patch:
    def read(self: Reading, numbers: Tensor) -> None:
        self.numbers, self.event = numbers, None
        if numbers.is_cuda:
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(numbers.device))
            self.numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)

    return patch.object(Reading, "__init__", read)


def event_in_another_stream() -> Patch:
    """The host waits for a stream that copies nothing."""
    real = engine_module.alone

    def alone(tensor: Tensor) -> Any:
        with patch.object(torch.cuda, "current_stream", torch.cuda.Stream):
            return real(tensor)

    return patch.object(engine_module, "alone", alone)


def gradient_buffer_reused_in_flight() -> Patch:
    real = FlatUnit.send

    def send(self: FlatUnit, last: bool) -> None:
        real(self, last)
        self.gradients = self.sent

    return patch.object(FlatUnit, "send", send)


def checkpoint_written_before_it_is_copied() -> Patch:
    return patch.object(snapshot, "_synchronise", lambda values: None)


def late_host_taken_for_the_event() -> Patch:
    """The host reads its clock after a wait, and takes that for the time of the event."""

    def synchronised(self: Any, event: Any) -> None:
        self.read_at = time.perf_counter(), event

    def mark(self: Any) -> Any:
        last = torch.cuda.Event(enable_timing=True)
        last.record(torch.cuda.current_stream(self.device))
        return *self.read_at, last

    def times(self: Any, mark: Any) -> StepTimes:
        host, event, last = mark
        end = host + 1e-3 * event.elapsed_time(last)
        wall, self.before = end - getattr(self, "before", START), end
        return StepTimes(0.0, wall, wall, end - START)

    return patch.multiple(StepClock, synchronised=synchronised, mark=mark, times=times)


# The journeys on which mistakes show, with results that can be compared.

Journey = Callable[[Path], object]
START = 100.0  # on the simulated clock of the host


def verifies(layout: str, **options: Any) -> Journey:
    def run(folder: Path) -> bool:
        plan = plan_of(layout, **options)
        with Pool(plan.layout.world + 1, PATIENCE) as pool:
            return run_trial(pool, plan, VerifySettings()).passed

    return run


def generates(folder: Path) -> bool:
    with Pool(1, PATIENCE) as pool:
        return run_generated(pool, generator_plan("dp=1"), GeneratedSettings()).passed


def trains(folder: Path) -> Trained:
    return trained(folder / f"{time.monotonic_ns()}", "dp=1")


@dataclass
class SimulatedHost:
    """A clock that stands still but when somebody sleeps."""

    time: float = START

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def keeps_time(folder: Path) -> bool:
    """Whether steps have their times, to a millisecond. On an unkind device the host is late, by up
    to 2 s where it compiles the kernels of the first update."""
    lateness = (2.0, 0.0, 0.4, 0.0, 0.0, 0.4) if hasattr(LateTensor, "home") else (0.0,) * 6
    host, ends = SimulatedHost(), [START]
    device = LateDevice(Chance(SEED), lambda: host.time, host.sleep)
    share = patch("tests.unkind.SHARE_LATE", SHARE_LATE if any(lateness) else 0.0)
    reader, real_time = threading.get_ident(), time.perf_counter

    def host_time() -> float:
        # Each look at the simulated clock draws a delay: threads of other tests may not look at it.
        return device.host() if threading.get_ident() == reader else real_time()

    with unkind(device=device), share, patch.object(time, "perf_counter", host_time):
        clock, marks = StepClock(torch.device("cuda"), START, START), list[Any]()
        for seconds in lateness:
            host.sleep(0.01)
            clock.ask()
            clock.begin()
            device.run(0.28)
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream())
            host.sleep(seconds)
            device.run(0.02)
            event.synchronize()
            clock.synchronised(event)
            marks.append(clock.mark())
            ends.append(device.stream.free)
        walls = [clock.times(mark).wall for mark in marks]
    return walls == pytest.approx([b - a for a, b in pairwise(ends)], abs=1e-3)


@dataclass(frozen=True)
class Mistake:
    """A mistake of a kind, and a journey on which it shows."""

    kind: str
    plant: Callable[[], Patch]
    journey: Journey

    def __str__(self) -> str:
        return self.plant.__name__

    def result(self, device: Callable[[], Patch], plant: Callable[[], Patch], path: Path) -> object:
        """What the journey gives on a device; an error of a rank is a result as well."""
        with device(), plant():
            try:
                return self.journey(path)
            except (RankLost, CommandFailed) as error:
                return error

    def is_seen(self, device: Callable[[], Patch], path: Path) -> bool:
        """Whether the journey goes well without the mistake, and not with it."""
        healthy = self.result(device, nullcontext, path)
        assert healthy and not isinstance(healthy, Exception), healthy
        return self.result(device, self.plant, path) != healthy


MISTAKES = (
    Mistake("memory", gradients_added_to_unwritten_memory, verifies("dp=2", zero=1)),
    Mistake("memory", pages_read_before_they_are_written, generates),
    Mistake("wait", weights_used_before_their_gather_ends, verifies("dp=2", zero=3)),
    Mistake("wait", activations_used_before_they_arrive, verifies("pp=2")),
    Mistake("late host", numbers_read_before_their_event, trains),
    Mistake("late host", late_host_taken_for_the_event, keeps_time),
    Mistake("event", event_before_the_copy, trains),
    Mistake("event", event_in_another_stream, generates),
    Mistake("reuse", gradient_buffer_reused_in_flight, verifies("dp=2", zero=2, unit_size=9.0)),
    Mistake("reuse", checkpoint_written_before_it_is_copied, trains),
)


@pytest.mark.sample(4)
@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_is_seen(mistake: Mistake, tmp_path: Path) -> None:
    assert mistake.is_seen(partial(unkind, SEED), tmp_path)


def main() -> int:
    """Print which mistakes both devices show."""
    unseen = 0
    for mistake in MISTAKES:
        with tempfile.TemporaryDirectory() as folder:
            devices = (partial(unkind, SEED), nullcontext)
            seen = [mistake.is_seen(device, Path(folder)) for device in devices]
        unseen += not seen[0]
        print(f"{mistake.kind:<10} {mistake!s:<40} unkind {seen[0]} kind {seen[1]}", flush=True)
    return unseen


if __name__ == "__main__":
    sys.exit(main())
