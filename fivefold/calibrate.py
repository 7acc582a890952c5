"""Measure the constants of a machine file.

`Bench` times one device: matmuls, attention, copies and kernel launches. It visits all sizes round
after round until the time is over and takes the median of each, so that every size sees a device
as warm as in training. Operands are random, because a chip that multiplies zeros draws less power
and runs faster. Work is counted as the planner counts it.

`forked_rings` and `launched_rings` time ring collectives between ranks: CPU ranks forked here, or
GPU ranks that torchrun started.
"""

from __future__ import annotations

import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fivefold.core import PRECISIONS
from fivefold.core.model import presets as models
from fivefold.cost.hardware import ATTENTION, ATTENTION_OLD, MATMUL, MATMUL_FP8, MEMORY, Sample
from fivefold.cost.layer import ATTENTION_BACKWARD
from fivefold.launch import LaunchedMeeting, LauncherEnvironment, Pool, RankDevice, Worker
from fivefold.model import TokenBatch, from_config, init_weights

SHARES = {
    MATMUL: 0.45,
    MATMUL_FP8: 0.1,
    ATTENTION: 0.15,
    ATTENTION_OLD: 0.1,
    MEMORY: 0.05,
}  # of the time left
RINGS_SHARE = 0.1
_FEWEST_SIZES = 3  # measured even when the time is over
_CHAIN = 200  # small kernels in a row
_HOST_ROUNDS = 8  # steps of a small model
_HOST_CYCLES = 85_000  # GPU clock cycles: 50 us, more than the host needs for one launch
_FP8_CAPABILITY = (8, 9)  # the first compute capability with fp8 matmuls


class TimedJob(NamedTuple):
    """A call to time, with the name and the work of its sample."""

    name: str
    work: float
    call: Callable[[], object]
    starts: float = 1.0


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure, from small ones to those that fill the device."""

    squares: tuple[int, ...]
    tokens: int
    widths: tuple[int, ...]
    heads: int
    head_dim: int
    seqs: tuple[int, ...]  # tokens in a sequence of attention
    copies: tuple[int, ...]  # bytes, larger than the caches
    shortest: float  # seconds that the clock measures well


ON_GPU = Sizes(
    squares=(512, 1024, 2048, 4096, 8192),
    tokens=8192,
    widths=(1024, 2048, 4096, 8192),
    heads=16,
    head_dim=128,
    seqs=(1024, 2048, 4096, 8192),
    copies=(2**27, 2**28, 2**29, 2**30),
    shortest=5e-3,
)
ON_CPU = Sizes(
    squares=(64, 128, 256, 512, 1024),
    tokens=512,
    widths=(128, 256, 512),
    heads=4,
    head_dim=64,
    seqs=(128, 256, 512),
    copies=(2**25, 2**26, 2**27),
    shortest=1e-3,
)


@dataclass
class Bench:
    """Times one device until a deadline. `notes` says what could not be measured, and why."""

    device: torch.device
    dtype: str
    until: float  # the deadline on `perf_counter`
    tick: Callable[[], None]  # called after every measurement
    notes: list[str] = field(default_factory=list[str])

    @property
    def sizes(self) -> Sizes:
        """The sizes that suit the device."""
        return ON_GPU if self.device.type == "cuda" else ON_CPU

    def measure(self, fp8: bool) -> dict[str, list[Sample]]:
        """The samples of each constant."""
        jobs: dict[str, Callable[[], Iterator[TimedJob]]] = {MATMUL: self._matmuls}
        if fp8 and self._has_fp8():
            jobs[MATMUL_FP8] = self._fp8_matmuls
        for key, backend in self._kernels().items():
            jobs[key] = partial(self._attention, backend)
        jobs[MEMORY] = self._copies
        samples: dict[str, list[Sample]] = {}
        for key, make in jobs.items():
            began = time.perf_counter()
            share = SHARES[key] / sum(SHARES[later] for later in jobs if later not in samples)
            samples[key] = self.rounds([*make()], began + share * (self.until - began))
        return samples

    def rounds(self, jobs: list[TimedJob], until: float) -> list[Sample]:
        """The median time of each job over as many rounds as fit, smallest job first."""
        jobs = sorted(jobs, key=lambda job: job.work)
        times_by_job: list[list[float]] = [[] for _ in jobs]
        repeats = [0] * len(jobs)
        is_over = False
        while not is_over:
            for index, job in enumerate(jobs):
                enough = all(times_by_job) or sum(map(bool, times_by_job)) >= _FEWEST_SIZES
                is_over = enough and time.perf_counter() >= until
                if is_over:
                    break
                repeats[index] = repeats[index] or self._repeats(job.call)
                times_by_job[index].append(self.time(job.call, repeats[index]))
                self.tick()
        return [
            Sample(job.name, job.work, median(times), job.starts)
            for job, times in zip(jobs, times_by_job, strict=True)
            if times
        ]

    def time(self, call: Callable[[], object], repeats: int) -> float:
        """Seconds per call, over `repeats` calls in a row. Those of a CPU are the process's own:
        what else runs there is no property of the machine."""
        if self.device.type != "cuda":
            start = time.process_time()
            for _ in range(repeats):
                call()
            return (time.process_time() - start) / repeats
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)
        # The host gets ahead while the device sleeps, so that kernels run without gaps.
        with torch.cuda.device(self.device):
            torch.cuda._sleep(repeats * _HOST_CYCLES)
        begin.record(stream)
        for _ in range(repeats):
            call()
        end.record(stream)
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats

    def launch(self) -> float:
        """Seconds between the launches of two small kernels."""
        x = torch.zeros(16, device=self.device)

        def chain() -> None:
            for _ in range(_CHAIN):
                x.add_(1.0)

        def seconds() -> float:
            start = time.perf_counter()
            chain()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return time.perf_counter() - start

        seconds()
        return median(seconds() for _ in range(5)) / _CHAIN

    def _repeats(self, call: Callable[[], object]) -> int:
        """How many calls take long enough to be timed, after one warm-up call."""
        call()
        once = self.time(call, 1)
        return max(1, min(200, math.ceil(self.sizes.shortest / max(once, 1e-9))))

    def _random(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device).to(
            getattr(torch, PRECISIONS[self.dtype].dtype)
        )

    def _matmuls(self) -> Iterator[TimedJob]:
        """Square matmuls, and those of an MLP: forward, input gradient and weight gradient."""
        for size in self.sizes.squares:
            left, right = self._random(size, size), self._random(size, size)
            yield TimedJob(f"{size} cubed", 2.0 * size**3, lambda a=left, b=right: a @ b)
        tokens = self.sizes.tokens
        for width in self.sizes.widths:
            x, y = self._random(tokens, width), self._random(tokens, 4 * width)
            up = self._random(4 * width, width)
            work = 8.0 * tokens * width**2
            name = f"{tokens} x {width} x {4 * width}"
            yield TimedJob(f"{name} forward", work, lambda x=x, w=up: x @ w.t())
            yield TimedJob(f"{name} inputs", work, lambda y=y, w=up: y @ w)
            yield TimedJob(f"{name} weights", work, lambda x=x, y=y: y.t() @ x)

    def _has_fp8(self) -> bool:
        """Whether torch and the device have fp8 matmuls; if not, `notes` says why."""
        if self.device.type != "cuda":
            return False
        if torch.cuda.get_device_capability(self.device) < _FP8_CAPABILITY:
            self.notes.append("fp8 was not measured: this GPU has no fp8 matmuls")
            return False
        try:
            self._fp8_matmul(16, 16, 16).call()
        except (AttributeError, RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.notes.append(f"fp8 was not measured: torch._scaled_mm does not run ({reason})")
            return False
        return True

    def _fp8_matmuls(self) -> Iterator[TimedJob]:
        for size in self.sizes.squares:
            yield self._fp8_matmul(size, size, size)
        for width in self.sizes.widths:
            yield self._fp8_matmul(self.sizes.tokens, 4 * width, width)
            yield self._fp8_matmul(self.sizes.tokens, width, 4 * width)

    def _fp8_matmul(self, rows: int, outputs: int, inputs: int) -> TimedJob:
        """An fp8 matmul with one scale per operand and fast accumulation."""
        kind = torch.float8_e4m3fn
        left, right = self._random(rows, inputs).to(kind), self._random(outputs, inputs).to(kind)
        unit_scale = torch.ones((), device=self.device)

        def call() -> Tensor:
            return torch._scaled_mm(
                left,
                right.t(),
                scale_a=unit_scale,
                scale_b=unit_scale,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )

        return TimedJob(f"{rows} x {inputs} x {outputs}", 2.0 * rows * outputs * inputs, call)

    def _kernels(self) -> dict[str, SDPBackend | None]:
        """The attention kernels that run here, by constant."""
        if self.device.type != "cuda":
            self.notes.append("attention_old was not measured: it is a kernel for GPUs")
            return {ATTENTION: None}
        backends: dict[str, SDPBackend | None] = {}
        preferred = {
            ATTENTION: SDPBackend.CUDNN_ATTENTION,
            ATTENTION_OLD: SDPBackend.FLASH_ATTENTION,
        }
        for key, backend in preferred.items():
            try:
                with warnings.catch_warnings():  # torch warns about every kernel it lacks
                    warnings.simplefilter("ignore")
                    for job in self._attention_of(backend, 1, 256):
                        job.call()
                backends[key] = backend
            except RuntimeError:
                self.notes.append(f"{key} was not measured: torch has no {backend.name} here")
        return backends

    def _attention(self, backend: SDPBackend | None) -> Iterator[TimedJob]:
        for seq in self.sizes.seqs:
            yield from self._attention_of(backend, max(self.sizes.seqs) // seq, seq)

    def _attention_of(self, backend: SDPBackend | None, batch: int, seq: int) -> Iterator[TimedJob]:
        """Causal attention: forward, and backward with the planner's multiple of its work."""
        heads, dim = self.sizes.heads, self.sizes.head_dim
        q, k, v = (self._random(batch, heads, seq, dim).requires_grad_() for _ in range(3))

        def forward() -> Tensor:
            if backend is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        grad = torch.randn_like(out)

        def backward() -> object:
            return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

        work = 2.0 * batch * seq * (seq / 2) * heads * 2 * dim
        name = f"{batch} x {seq} tokens, {heads} heads of {dim}"
        yield TimedJob(f"{name}, forward", work, forward)
        times = ATTENTION_BACKWARD
        yield TimedJob(f"{name}, backward", times * work, backward, starts=times)

    def _copies(self) -> Iterator[TimedJob]:
        """Copies within device memory: every byte is read and written."""
        for size in self.sizes.copies:
            source = torch.zeros(size // 4, device=self.device)
            target = torch.ones_like(source)
            yield TimedJob(f"{size >> 20} MiB", 2.0 * size, lambda a=source, b=target: b.copy_(a))


def device_name(device: torch.device) -> str:
    """The name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text("utf-8").splitlines() if listed.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"one core of {names[0] if names else platform.processor() or platform.machine()}"


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def layer_host_seconds() -> tuple[float, float]:
    """Seconds of a CPU for a layer's forward and backward beside their arithmetic: those of small
    models that differ by layers alone."""
    few, many = 1, 5
    times = {layers: _passes_of(layers) for layers in (few, many)}
    forward, backward = (
        max(1e-6, (long - short) / (many - few))
        for short, long in zip(times[few], times[many], strict=True)
    )
    return forward, backward


def _passes_of(layers: int) -> tuple[float, float]:
    """The fastest forward and backward of `tiny` with so many layers and a few tokens."""
    shape = replace(models.load("tiny"), layers=layers)
    model = from_config(shape)
    init_weights(model, shape, 0)
    tokens = torch.zeros((1, 8), dtype=torch.int64)
    batch = TokenBatch(tokens, tokens, torch.arange(8)[None])
    times: list[tuple[float, float]] = []
    for _ in range(_HOST_ROUNDS):
        begin = time.process_time()
        loss = model(tokens, batch)
        middle = time.process_time()
        loss.sum().backward()
        times.append((middle - begin, time.process_time() - middle))
    forward, backward = (min(column) for column in zip(*times, strict=True))
    return forward, backward


# Ring collectives between ranks.

_ON_GPU = tuple(2**power for power in range(16, 30, 2))  # bytes of all ranks together
_ON_CPU = tuple(2**power for power in range(14, 25, 2))
_REPEATS = 3
# torch 2.13 renamed these, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def forked_rings(ranks: int, seconds: float, tick: Callable[[], None]) -> list[Sample]:
    """Ring collectives between `ranks` processes on this host, over gloo."""
    with Pool(ranks) as pool:
        tasks = [(_forked, (ranks, seconds))] * ranks
        answers = pool.run_each(tasks, on_phase=tick)
    return answers[0]


def _forked(worker: Worker, ranks: int, seconds: float) -> list[Sample]:
    with worker.joined(ranks):
        return _rings(torch.device("cpu"), _ON_CPU, seconds, worker.phase)


def launched_rings(launched: LauncherEnvironment, rank: RankDevice, seconds: float) -> list[Sample]:
    """Ring collectives between the GPUs of the processes that torchrun started."""
    rank.start()
    LaunchedMeeting(launched).join(launched.rank, launched.world, rank)
    measured = _rings(rank.device, _ON_GPU, seconds, lambda text: None)
    dist.destroy_process_group()
    return measured


def _rings(
    device: torch.device, sizes: tuple[int, ...], seconds: float, on_phase: Callable[[str], None]
) -> list[Sample]:
    """All-gathers and reduce-scatters of rising size, until the time of rank 0 is over."""
    ranks, group = dist.get_world_size(), dist.new_group()  # that of the world has few channels
    sizes = tuple(size - size % (4 * ranks) for size in sizes)
    calls = {
        (kind, size): _ring(kind, size, group, device)
        for size in sizes
        for kind in ("all-gather", "reduce-scatter")
    }
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    until = time.perf_counter() + seconds
    while True:
        for key, call in calls.items():
            on_phase(f"{key[0]} of {key[1]} bytes")
            if not times[key]:
                call()  # the first one connects
            times[key].append(_time(call, device))
        over = torch.tensor([float(time.perf_counter() > until)], device=device)
        dist.broadcast(over, 0)
        if over.item():
            break
    usual = min if device.type == "cpu" else median  # a core has other work too
    return [
        Sample(f"{kind} of {size} bytes", size * (1 - 1 / ranks), usual(durations), ranks - 1.0)
        for (kind, size), durations in times.items()
    ]


def _ring(
    kind: str, size: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    shard = torch.ones(size // 4 // group.size(), device=device)
    full = torch.ones(shard.numel() * group.size(), device=device)
    if kind == "all-gather":
        return lambda: _all_gather(full, shard, group=group)
    return lambda: _reduce_scatter(shard, full, group=group)


def _time(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, from the barrier to the end of the slowest rank."""
    dist.barrier()
    _finish(device)
    start = time.perf_counter()
    for _ in range(_REPEATS):
        call()
    _finish(device)
    spent: Tensor = torch.tensor([(time.perf_counter() - start) / _REPEATS], device=device)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent.item())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
