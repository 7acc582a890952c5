"""The pipeline runtime, measured: against the clock, against autograd, and against waiting.

    python benchmarks/pipeline.py            all three tables
    python benchmarks/pipeline.py clock      one of clock, host, pair

clock  The real interpreter on 8 ranks over gloo, with stages whose F, I and W are timed sleeps, so
       that ranks are truly parallel on any machine. Measured makespan over the clock's, for every
       schedule, with messages that travel as fast as they can, for which the clock has no time,
       and with messages that take 5 ms more, which it has.
host   What the split costs a host: I+W of 16 layers over one plain backward, with tensors so small
       that nothing else counts; torch's own split beside it.
pair   A forward and a backward that take turns while their collectives are under way.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from delayed_mesh import DelayedMesh
from torch import Tensor

from fivefold.core.layout.groups import Topology
from fivefold.core.layout.layout import Layout
from fivefold.core.model import presets as models
from fivefold.core.schedule.catalog import FAMILIES
from fivefold.core.schedule.clock import Costs, play
from fivefold.core.schedule.definition import Family
from fivefold.core.schedule.schedule import Schedule
from fivefold.model.batch import TokenBatch
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.init import init_weights
from fivefold.parallel.deferred import GradientQueue
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Pipeline

RANKS, MICROBATCHES, LATENCY = 8, 16, 0.005
FORWARD, INPUT_GRAD, WEIGHT_GRAD = 0.040, 0.048, 0.040
HIDDEN = torch.Size((1, 16, 64))
NO_TOKENS = torch.zeros(1, 16, dtype=torch.long)
BATCH = TokenBatch(NO_TOKENS, NO_TOKENS, NO_TOKENS)


class Nap(torch.autograd.Function):
    """A stage's work: it sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(INPUT_GRAD)
        return gradients[0]


class SleepingChunk:
    """A stage for the interpreter, without a model."""

    def __init__(self, last: bool) -> None:
        self.last = last

    def forward(self, x: Tensor | None, batch: TokenBatch, microbatch: int) -> Tensor:
        y = Nap.apply(torch.ones(HIDDEN, requires_grad=True) if x is None else x)
        return y.sum() if self.last else y

    def backward(self, run: Callable[[], None], microbatch: int, split: bool, last: bool) -> None:
        run()
        if not split:
            time.sleep(WEIGHT_GRAD)

    def weight_gradients(self, microbatch: int, last: bool) -> None:
        time.sleep(WEIGHT_GRAD)


class SlowMesh(Mesh):
    """Every message is `latency` on its way, behind whatever its ranks do."""

    def __init__(self, topology: Topology, device: torch.device, latency: float) -> None:
        super().__init__(topology, device)
        self.latency = latency
        self.carriers: dict[int, ThreadPoolExecutor] = {}

    def send(self, tensor: Tensor, target: int) -> Any:
        if not self.latency:
            return super().send(tensor, target)
        carrier = self.carriers.setdefault(target, ThreadPoolExecutor(1))
        return Carried(carrier.submit(self._carry, tensor, target, time.perf_counter()).result)

    def _carry(self, tensor: Tensor, target: int, issued: float) -> None:
        time.sleep(max(0.0, issued + self.latency - time.perf_counter()))
        super().send(tensor, target).wait()


class Carried:
    """A message that somebody else carries."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


def cases() -> Iterator[tuple[Family, int, int]]:
    """Every schedule with the fewest chunks, at m = 16 and at the smallest legal m."""
    for family in FAMILIES:
        chunks = family.min_chunks
        smallest = family.smallest_count(1, RANKS, chunks)
        yield from ((family, count, chunks) for count in sorted({smallest, MICROBATCHES}))


def makespan(schedule: Schedule, latency: float) -> float:
    """Seconds from the first start to the last end over all ranks, the better of two runs."""
    layout = Layout(pp=RANKS, zero=0, chunks=schedule.num_chunks)
    mesh = SlowMesh(Topology(layout, schedule=schedule), torch.device("cpu"), latency)
    last = schedule.num_stages - 1
    held = schedule.placement.stages_of(mesh.coord("pp"))
    chunks = {stage: SleepingChunk(stage == last) for stage in held}
    pipeline = Pipeline(schedule, mesh, chunks, HIDDEN, torch.float32)
    count, best = schedule.num_microbatches, float("inf")
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        pipeline.run([BATCH] * count, [torch.ones(())] * count)
        both = torch.tensor([-start, time.perf_counter()], dtype=torch.float64)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        best = min(best, float(both.sum()))
    for group in (*mesh.channels.values(), *mesh.groups.values()):
        if group is not dist.group.WORLD:  # each has threads, which would pile up
            dist.destroy_process_group(group)
    return best


def against_the_clock(rank: int) -> None:
    """The table of every schedule."""
    if rank == 0:
        print(f"{RANKS} ranks; F {FORWARD * 1e3:.0f}, I {INPUT_GRAD * 1e3:.0f}, W "
              f"{WEIGHT_GRAD * 1e3:.0f} ms a chunk; seconds of one step")  # fmt: skip
        print(f"{'schedule':<16}{'v':>2}{'m':>4}  {'clock':>7}{'measured':>10}{'ratio':>7}   "
              f"{'clock':>7}{'measured':>10}{'ratio':>7}   with messages of 5 ms")  # fmt: skip
    worst = 0.0
    makespan(FAMILIES[0].make(RANKS, 1, 1), 0.0)  # the first run of a process loads this and that
    for family, count, chunks in cases():
        schedule = family.make(RANKS, count, chunks)
        stages = schedule.num_stages
        cells = []
        for latency in (0.0, LATENCY):
            costs = Costs(
                (FORWARD,) * stages,
                (INPUT_GRAD,) * stages,
                (WEIGHT_GRAD,) * stages,
                (latency,) * stages,
            )
            planned, measured = play(schedule, costs).makespan, makespan(schedule, latency)
            ratio = measured / planned
            worst = max(worst, ratio)
            cells.append(f"{planned:7.3f}{measured:10.3f}{ratio:7.3f}")
        if rank == 0:
            print(f"{family.name:<16}{chunks:>2}{count:>4}  {'   '.join(cells)}", flush=True)
    if rank == 0:
        print(f"worst ratio {worst:.3f} {'' if worst <= 1.05 else '(above 1.05)'}\n")


def host_cost() -> None:
    """I+W against B on one process."""
    layers = {"layers": "18", "width": "64", "heads": "4", "kv_heads": "4", "ffn": "128"}
    shape = models.with_overrides(models.load("tiny"), layers)
    rows: dict[str, Callable[[Decoder], float]] = {
        "B, plain autograd": time_plain,
        "I+W, deferred here": time_deferred,
        "I+W, torch's split": time_torch,
    }
    best = {name: float("inf") for name in rows}
    decoders = {name: from_config(shape, layers=range(1, 17)) for name in rows}
    for decoder in decoders.values():
        init_weights(decoder, shape, seed=0)
    queue = GradientQueue()
    queue.defer(decoders["I+W, deferred here"])
    decoders["I+W, deferred here"].queue = queue  # type: ignore[assignment]
    for _ in range(30):
        for name, measure in rows.items():
            best[name] = min(best[name], measure(decoders[name]))
    plain = best["B, plain autograd"]
    print("host time of a backward, 16 layers, best of 30")
    for name, seconds in best.items():
        print(f"{name:<22}{seconds * 1e3:8.2f} ms {seconds / plain:6.2f} times B")
    print()


def forward(decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Input and output of a stage on 8 tokens."""
    tokens = torch.zeros(1, 8, dtype=torch.long)
    x = torch.ones(1, 8, 64, requires_grad=True)
    return x, decoder(x, TokenBatch(tokens, tokens, torch.arange(8)[None]))


def time_plain(decoder: Decoder) -> float:
    _, y = forward(decoder)
    slope = torch.ones_like(y)
    start = time.perf_counter()
    y.backward(slope)
    return time.perf_counter() - start


class Sink:
    """Takes gradients as the data dimension does where nobody sums with this rank."""

    def add_product(self, weight: Tensor, outputs_NO: Tensor, inputs_NI: Tensor) -> None:
        if weight.grad is None:
            weight.grad = outputs_NO.T @ inputs_NI
        else:
            weight.grad.addmm_(outputs_NO.T, inputs_NI)

    def add_gradient(self, weight: Tensor, gradient: Tensor) -> None:
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def time_deferred(decoder: Decoder) -> float:
    _, y = forward(decoder)
    slope, queue, sink = torch.ones_like(y), decoder.queue, Sink()
    assert isinstance(queue, GradientQueue)
    start = time.perf_counter()
    with queue.keeping(0):
        y.backward(slope)
    queue.settle(0, sink)
    return time.perf_counter() - start


def time_torch(decoder: Decoder) -> float:
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    x, y = forward(decoder)
    slope = torch.ones_like(y)
    start = time.perf_counter()
    _, groups = stage_backward_input([y], [slope], [x], decoder.parameters())
    stage_backward_weight(decoder.parameters(), groups)
    return time.perf_counter() - start


def pair(rank: int) -> None:
    """Lanes of 10 pieces each: compute, then a collective of a set time."""
    pieces, compute = 10, 0.020
    mesh = DelayedMesh(Topology(Layout(tp=RANKS, zero=0)), torch.device("cpu"))

    def lane() -> None:
        for _ in range(pieces):
            time.sleep(compute)
            pending = mesh.all_reduce(torch.ones(8), "tp", dist.ReduceOp.SUM)
            mesh.lanes.pause()
            pending.wait()

    if rank == 0:
        print("a forward and a backward, 10 times 20 ms of compute and a collective each")
        print("collective  one after the other  taking turns  compute alone  hidden")
    for delay in (0.005, 0.010, 0.018):
        mesh.delay = delay
        times = []
        for run in (lambda: (lane(), lane()), lambda: mesh.lanes.run(lane, lane)):
            dist.barrier()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        alone = 2 * pieces * compute
        hidden = (times[0] - times[1]) / (times[0] - alone)
        if rank == 0:
            print(f"{delay * 1e3:7.0f} ms {times[0]:17.3f} s {times[1]:12.3f} s {alone:12.3f} s "
                  f"{hidden:8.0%}")  # fmt: skip


def on_ranks(rank: int, store: str, jobs: list[Callable[[int], None]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for job in jobs:
        job(rank)
    dist.barrier()
    dist.destroy_process_group()


def main(wanted: list[str]) -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    tables = {"clock": against_the_clock, "pair": pair}
    jobs = [job for name, job in tables.items() if not wanted or name in wanted]
    ranks = []
    if jobs:
        with tempfile.TemporaryDirectory() as folder:
            context = multiprocessing.get_context("fork")
            ranks = [
                context.Process(target=on_ranks, args=(rank, f"{folder}/store", jobs))
                for rank in range(RANKS)
            ]
            for one in ranks:
                one.start()
            for one in ranks:
                one.join()
    if not wanted or "host" in wanted:
        host_cost()
    return max((one.exitcode or 0 for one in ranks), default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
