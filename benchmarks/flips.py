"""Flipped bits that are planted in a training, and what it says of them; and what watching costs.

    python benchmarks/flips.py rest [--flips 20]      weights, master weights and states
    python benchmarks/flips.py compute [--flips 60] [--top] [--bound 1]
                                                      gradients, activations and messages
    python benchmarks/flips.py healthy [--steps 5000] [--layout "tp=2 pp=2"] [--dtypes bfloat16]
                                                      nothing is planted, and nothing may be found
    python benchmarks/flips.py cost [--device cuda]   a step with the watch over one without

`rest` exits with 1 unless every flip is found and its rank named, `healthy` if anything is found,
`cost` if the watch takes more than 1% of a step. The first three run tiny models on this CPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fivefold.core.errors import RankLost
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.data.batches import samples
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.model.decoder import Block
from fivefold.model.kernels.regions import compiled, eager
from fivefold.parallel import transport
from fivefold.parallel.bit_sums import Tape
from fivefold.parallel.composition import compose
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.units.flat_unit import FlatUnit
from fivefold.records.steps import StepRecord
from fivefold.step import Guard, step, updater_of
from fivefold.train.loop import run_rank
from fivefold.train.recovery.integrity import Integrity
from fivefold.train.state import TrainedRank, TrainSettings

SIZES = {"layers": "2", "width": "32", "heads": "4", "kv_heads": "2", "ffn": "48", "vocab": "97"}
LAYOUTS = (
    *({"layout": "dp=3", "zero": 0}, {"layout": "dp=2", "zero": 1}, {"layout": "dp=2", "zero": 3}),
    *({"layout": "dp=2x2", "zero": 2}, {"layout": "dp=2 tp=2", "zero": 1}, {"layout": "tp=2"}),
    *({"layout": "dp=2 pp=2", "zero": 1}, {"layout": "dp=2 cp=2", "zero": 0}, {"layout": "dp=1"}),
)
HEALTHY = (
    *({"layout": "dp=2x2", "zero": 1}, {"layout": "dp=2 tp=2", "zero": 0}),
    {"layout": "tp=2 pp=2", "microbatches": 2},
)
KINDS = {"float32": ("weights", "exp_avg", "exp_avg_sq")}
KINDS["bfloat16"] = (*KINDS["float32"], "master weights")
WHERE = ("gradient", "activation", "message")
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST = 1.01


def plan_of(**options: Any) -> Plan:
    """A small training."""
    given = {"seq": 16, "batch": 12, "set": SIZES, **options}
    return resolve(PlanOptions("tiny", **given), small=True)


def flip(tensor: Tensor, place: float, bit: int) -> None:
    """Flip one bit of the element at this share of a tensor, in place."""
    flat = tensor.detach().view(-1)
    index, bits = int(place * len(flat)), 8 * flat.element_size()
    word = flat.view(WORDS[flat.element_size()])[index : index + 1]
    mask = 1 << bit % bits
    word ^= mask - (1 << bits if mask >> (bits - 1) else 0)


@dataclass(frozen=True)
class Flip:
    """A bit that flips on a rank before or in a step; `kind` says where."""

    kind: str
    rank: int
    step: int
    tensor: float
    place: float
    bit: int

    @classmethod
    def draw(cls, rng: random.Random, kind: str, world: int, number: int) -> Flip:
        return cls(
            kind, rng.randrange(world), number, rng.random(), rng.random(), rng.getrandbits(6)
        )


def at_rest(worker: Worker, plan: Plan, settings: TrainSettings, planted: Flip) -> TrainedRank:
    """One rank of a training in which a bit flips between two updates: once no gather is under way,
    which would write over it."""
    inner = Integrity.before_update

    def before_update(self: Integrity) -> Tensor:
        if (self.mesh.rank, self.number) == (planted.rank, planted.step):
            held = [
                each for each in self.seal.tensors if each.name.startswith(planted.kind + " of")
            ]
            chosen = held[int(planted.tensor * len(held))].tensor
            flip(chosen, planted.place, planted.bit)
        return inner(self)

    with patch.object(Integrity, "before_update", before_update):
        return run_rank(worker, plan, settings)


def in_compute(
    worker: Worker, plan: Plan, settings: TrainSettings, flips: dict[int, Flip]
) -> TrainedRank:
    """One rank of a training in which bits flip while it computes: each once, so that a step that
    runs again has none."""
    left = {number: each for number, each in flips.items() if each.rank == worker.rank}
    now = [0]

    def hit(kind: str, tensor: Tensor) -> None:
        each = left.get(now[0])
        if each is not None and each.kind == kind:
            del left[now[0]]
            flip(tensor, each.place, each.bit)

    with planted_in(now, hit):
        return run_rank(worker, plan, settings)


def planted_in(now: list[int], hit: Callable[[str, Tensor], None]) -> ExitStack:
    """Call `hit` with gradients before they are summed, outputs of blocks, and what came."""
    send, forward, begin, receive = (
        *(FlatUnit.send, Block.forward, Integrity.begin),
        transport.receive,
    )

    def begun(self: Integrity, number: int) -> None:
        now[0] = number
        begin(self, number)

    def sent(self: FlatUnit, last: bool) -> None:
        hit("gradient", self._whole_share())  # pyright: ignore[reportPrivateUsage]
        send(self, last)

    def ran(self: Block, *arguments: Any, **named: Any) -> Tensor:
        found = forward(self, *arguments, **named)
        hit("activation", found)
        return found

    def received(*arguments: Any) -> Any:
        pending = receive(*arguments)
        wait = pending.wait

        def waited() -> Tensor | None:
            found = wait()
            if found is not None:
                hit("message", found)
            return found

        return _Waiting(pending, waited)

    stack = ExitStack()
    stack.enter_context(patch.object(Integrity, "begin", begun))
    stack.enter_context(patch.object(FlatUnit, "send", sent))
    stack.enter_context(patch.object(Block, "forward", ran))
    stack.enter_context(patch.object(transport, "receive", received))
    return stack


@dataclass(frozen=True)
class _Waiting:
    """A message on its way."""

    pending: Any
    wait: Callable[[], Tensor | None]

    @property
    def done(self) -> bool:
        return self.pending.done


def settings_of(dtype: str, steps: int, **keys: Any) -> TrainSettings:
    recipe = Recipe(**{"steps": steps, "data": "synthetic", "lr": 3e-3, **keys})
    return TrainSettings(recipe, dtype)  # pyright: ignore[reportArgumentType]


def found_at_rest(pool: Pool, plan: Plan, dtype: str, planted: Flip, steps: int = 4) -> str:
    """What the ranks say of a flip; empty if nothing."""
    tasks = [(at_rest, (plan, settings_of(dtype, steps), planted))] * plan.layout.world
    try:
        pool.run_each(tasks)
    except RankLost as lost:
        return str(lost)
    return ""


def rest(asked: argparse.Namespace) -> int:
    """Flips at rest, of every kind and in every layout in turn."""
    rng, missed = random.Random(asked.seed), 0
    for dtype, kinds in KINDS.items():
        for number in range(asked.flips):
            plan = plan_of(**LAYOUTS[number % len(LAYOUTS)])
            kind = kinds[number % len(kinds)]
            planted = Flip.draw(rng, kind, plan.layout.world, rng.randint(2, 4))
            with Pool(plan.layout.world) as pool:
                text = found_at_rest(pool, plan, dtype, planted)
            named = f"rank {planted.rank} on" in text and f"{kind} of" in text
            missed += not named
            print(f"{dtype} {plan.layout} {planted}: {'named' if named else text or 'not found'}")
    print(f"{2 * asked.flips - missed} of {2 * asked.flips} found and named")
    return int(missed > 0)


def computed(
    plan: Plan, dtype: str, flips: dict[int, Flip], steps: int, bound: float
) -> list[StepRecord]:
    """The records of a training with flips."""
    said: list[Any] = []
    settings = settings_of(dtype, steps, spike_bound=bound)
    tasks = [(in_compute, (plan, settings, flips))] * plan.layout.world
    with Pool(plan.layout.world) as pool:
        pool.run_each(tasks, on_report=said.append)
    return [each for each in said if isinstance(each, StepRecord)]


def compute(asked: argparse.Namespace) -> int:
    """Flips in compute: the share that trips the bound, and of these whether the rank is named."""
    rng, first, apart = random.Random(asked.seed), 24, 3
    plan = plan_of(layout="dp=2 pp=2", zero=1, microbatches=2)
    for dtype in asked.dtypes.split(","):
        for kind in WHERE:
            numbers = [first + apart * each for each in range(asked.flips)]
            world = plan.layout.world
            flips = {each: Flip.draw(rng, kind, world, each) for each in numbers}
            if asked.top:  # of the exponent: what is small becomes huge
                flips = {number: replace(each, bit=-2) for number, each in flips.items()}
            records = computed(plan, dtype, flips, first + apart * asked.flips, asked.bound)
            again = {each.step: each.again for each in records if each.again is not None}
            tripped = [each for each in numbers if (again.get(each) or {}).get("same") is False]
            named = sum(flips[each].rank in (again[each] or {})["ranks"] for each in tripped)
            false = len(again.keys() - set(numbers))
            print(
                f"{dtype} {kind}: {len(tripped)} of {len(flips)} tripped the bound, "
                f"{named} named the rank; {false} other steps ran again"
            )
    return 0


def healthy(asked: argparse.Namespace) -> int:
    """A long training in which nothing may be found."""
    bad, keys = 0, {"compare_every": 5, "replay": 50, "lr": 1e-3, "spike_bound": asked.bound}
    for options in HEALTHY:
        if asked.layout not in (None, options["layout"]):
            continue
        for dtype in asked.dtypes.split(","):
            plan, said = plan_of(**options), list[Any]()
            tasks = [(run_rank, (plan, settings_of(dtype, asked.steps, **keys)))]
            with Pool(plan.layout.world) as pool:
                pool.run_each(tasks * plan.layout.world, on_report=said.append)
            records = [each for each in said if isinstance(each, StepRecord)]
            again = [each for each in records if each.again is not None]
            alarms = [each for each in again if not (each.again or {})["same"]]
            data = sum((each.again or {})["why"] is not None for each in again)
            bad += len(alarms)
            print(
                f"{dtype} {plan.layout}: {len(records)} steps, {len(again) - data} proofs, "
                f"{data} spikes in the data, {len(alarms)} alarms",
                flush=True,
            )
    return int(bad > 0)


def _timed(device: torch.device, every: int, asked: argparse.Namespace) -> Iterator[float]:
    """Seconds of steps, in turn without and with the watch, over one model; on a CPU those of the
    process, since others may run beside it."""
    cuda = device.type == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    name, sizes = ("llama-3.2-1b", {}) if cuda else ("tiny", {"layers": "4"})
    given = {"seq": asked.seq, "batch": asked.batch, "set": sizes}
    plan = resolve(PlanOptions(name, **given))
    dtype = torch.bfloat16 if cuda else torch.float32
    fuse = compiled if cuda else eager
    job = compose(plan, Mesh.of(plan, device), seed=0, dtype=dtype, fuse=fuse)
    updater = updater_of(job, Recipe(), master=cuda)
    batches = samples(plan.batch, plan.shape.vocab, seed=0, step=0).to(device).of(0)
    integrity, plain = Integrity(job, updater, every), Guard()
    for number in range(1, asked.steps + 1):
        for watched in (False, True):
            uncount = partial(updater.resume_after, updater.count) if updater.skips else None
            guard = replace(plain, uncount=uncount, watch=integrity if watched else None)
            integrity.begin(number)
            if not watched:
                integrity.seal.drop()
            job.mesh.record_on(Tape(not cuda) if watched else None)
            _wait(device)
            start = clock()
            step(job, updater, batches, 1.0, guard)
            _wait(device)
            yield clock() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cost(asked: argparse.Namespace) -> int:
    """The ratio of steps with the watch to steps without, which take turns."""
    torch.set_num_threads(1)
    device, every = torch.device(asked.device), asked.every
    times = list(_timed(device, every, asked))[10:]
    plain, watched = times[0::2], times[1::2]
    ratio = 1 + (sum(watched) - sum(plain)) / sum(plain)
    pairs = median(b / a for a, b in zip(plain, watched, strict=True))
    print(
        f"{1e3 * median(plain):.2f} ms a step, with the watch {1e3 * median(watched):.2f}: "
        f"{ratio:.4f} times in the mean, {pairs:.4f} in the median of {len(plain)} pairs"
    )
    return int((ratio if device.type == "cuda" else pairs) > MOST)  # seals are rare on a GPU


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("rest", "compute", "healthy", "cost"))
    parser.add_argument("--flips", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--top", action="store_true", help="flip the highest bit of exponents")
    parser.add_argument("--bound", type=float, default=Recipe().spike_bound, help="spike_bound")
    parser.add_argument("--dtypes", default=",".join(KINDS))
    parser.add_argument("--layout", choices=[each["layout"] for each in HEALTHY])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--seq", type=int, default=0)
    parser.add_argument("--batch", type=int, default=0)
    asked = parser.parse_args()
    large = asked.device == "cuda"
    asked.steps = asked.steps or {"healthy": 5000}.get(asked.what, 60)
    asked.seq, asked.batch = (
        asked.seq or (8192 if large else 128),
        asked.batch or (2 if large else 8),
    )
    return {"rest": rest, "compute": compute, "healthy": healthy, "cost": cost}[asked.what](asked)


if __name__ == "__main__":
    sys.exit(main())
