"""Times of one device, for the constants of a machine file: products, attention, copies, launches.

Sizes are visited round after round until a part's time is over, and the median of each counts:
like this all of them see the device as warm as training has it. Operands are random, since a chip
that multiplies zeros draws less power and runs faster. Work is counted as the planner counts it.
"""

from __future__ import annotations

import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fivefold.cost.calibration import COPIES, FLASH2, FUSED, NARROW, PRODUCTS, Sample
from fivefold.cost.layer_time import ATTENTION_BACKWARD
from fivefold.launch.processes import Pool, Worker

SHARES = {PRODUCTS: 0.45, NARROW: 0.1, FUSED: 0.15, FLASH2: 0.1, COPIES: 0.05}  # of the time left
RINGS_SHARE = 0.1
_LEAST = 3  # sizes that are measured whatever the time
_CHAIN = 200  # small kernels in a row
_HOST_CYCLES = 85_000  # of a GPU's clock: 50 us, more than the host needs for a call
_EIGHT_BITS = (8, 9)  # the first compute capability with fp8 products
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class TimedJob(NamedTuple):
    """Something to time, as a sample will name and count it."""

    name: str
    work: float
    call: Callable[[], object]
    starts: float = 1.0


@dataclass(frozen=True)
class Sizes:
    """What fills a device for milliseconds, and what does not."""

    squares: tuple[int, ...]
    tokens: int
    widths: tuple[int, ...]
    heads: int
    head_dim: int
    rows: tuple[int, ...]  # tokens of a row of attention
    copies: tuple[int, ...]  # bytes, beyond the caches
    shortest: float  # seconds that the clock can tell well


ON_GPU = Sizes(
    squares=(512, 1024, 2048, 4096, 8192),
    tokens=8192,
    widths=(1024, 2048, 4096, 8192),
    heads=16,
    head_dim=128,
    rows=(1024, 2048, 4096, 8192),
    copies=(2**27, 2**28, 2**29, 2**30),
    shortest=5e-3,
)
ON_CPU = Sizes(
    squares=(64, 128, 256, 512, 1024),
    tokens=512,
    widths=(128, 256, 512),
    heads=4,
    head_dim=64,
    rows=(128, 256, 512),
    copies=(2**25, 2**26, 2**27),
    shortest=1e-3,
)


@dataclass
class Bench:
    """One device and the time there is; what could not be measured is noted."""

    device: torch.device
    dtype: str
    until: float  # when the time is over, by `perf_counter`
    tick: Callable[[], None]  # called after every measurement
    notes: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.sizes = ON_GPU if self.device.type == "cuda" else ON_CPU

    def measure(self, fp8: bool) -> dict[str, list[Sample]]:
        """Times by constant."""
        jobs: dict[str, Callable[[], Iterator[TimedJob]]] = {PRODUCTS: self._products}
        if fp8 and self._has_fp8():
            jobs[NARROW] = self._narrow_products
        for key, backend in self._kernels().items():
            jobs[key] = partial(self._attention, backend)
        jobs[COPIES] = self._copies
        found: dict[str, list[Sample]] = {}
        for key, make in jobs.items():
            now = time.perf_counter()
            share = SHARES[key] / sum(SHARES[later] for later in jobs if later not in found)
            found[key] = self.rounds([*make()], now + share * (self.until - now))
        return found

    def rounds(self, jobs: list[TimedJob], until: float) -> list[Sample]:
        """The median of each job over as many rounds as there is time for, small ones first."""
        jobs = sorted(jobs, key=lambda job: job.work)
        found: list[list[float]] = [[] for _ in jobs]
        repeats = [0] * len(jobs)
        is_over = False
        while not is_over:
            for place, job in enumerate(jobs):
                enough = all(found) or sum(map(bool, found)) >= _LEAST
                is_over = enough and time.perf_counter() >= until
                if is_over:
                    break
                repeats[place] = repeats[place] or self._repeats(job.call)
                found[place].append(self.time(job.call, repeats[place]))
                self.tick()
        return [
            Sample(job.name, job.work, median(times), job.starts)
            for job, times in zip(jobs, found, strict=True)
            if times
        ]

    def time(self, call: Callable[[], object], repeats: int) -> float:
        """Seconds of one of so many calls in a row."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - start) / repeats
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # While the device sleeps the host gets ahead, so that kernels follow without a gap.
        torch.cuda._sleep(repeats * _HOST_CYCLES)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats

    def launch(self) -> float:
        """Seconds from one small kernel to the next, as the host sends them."""
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
        """Calls that take long enough to be timed; the first one is not counted."""
        call()
        once = self.time(call, 1)
        return max(1, min(200, math.ceil(self.sizes.shortest / max(once, 1e-9))))

    def _random(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device).to(_DTYPES[self.dtype])

    def _products(self) -> Iterator[TimedJob]:
        """Squares, and the MLP's products forward and for the gradients of inputs and weights."""
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
        """Whether torch and the device have 8-bit products; the reason is noted where not."""
        if self.device.type != "cuda":
            return False
        if torch.cuda.get_device_capability(self.device) < _EIGHT_BITS:
            self.notes.append("fp8 was not measured: this GPU has no 8-bit products")
            return False
        try:
            self._narrow(16, 16, 16).call()
        except (AttributeError, RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.notes.append(f"fp8 was not measured: torch._scaled_mm does not run ({reason})")
            return False
        return True

    def _narrow_products(self) -> Iterator[TimedJob]:
        for size in self.sizes.squares:
            yield self._narrow(size, size, size)
        for width in self.sizes.widths:
            yield self._narrow(self.sizes.tokens, 4 * width, width)
            yield self._narrow(self.sizes.tokens, width, 4 * width)

    def _narrow(self, rows: int, outputs: int, inputs: int) -> TimedJob:
        """An 8-bit product with one scale for each operand, and sums in fewer bits."""
        kind = torch.float8_e4m3fn
        left, right = self._random(rows, inputs).to(kind), self._random(outputs, inputs).to(kind)
        one = torch.ones((), device=self.device)

        def call() -> Tensor:
            return torch._scaled_mm(
                left,
                right.t(),
                scale_a=one,
                scale_b=one,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )

        return TimedJob(f"{rows} x {inputs} x {outputs}", 2.0 * rows * outputs * inputs, call)

    def _kernels(self) -> dict[str, SDPBackend | None]:
        """Attention kernels that run here, by their constant."""
        if self.device.type != "cuda":
            self.notes.append("attention_old was not measured: it is a kernel for GPUs")
            return {FUSED: None}
        found: dict[str, SDPBackend | None] = {}
        wanted = {FUSED: SDPBackend.CUDNN_ATTENTION, FLASH2: SDPBackend.FLASH_ATTENTION}
        for key, backend in wanted.items():
            try:
                with warnings.catch_warnings():  # torch warns of every kernel that it has not
                    warnings.simplefilter("ignore")
                    for job in self._attention_of(backend, 1, 256):
                        job.call()
                found[key] = backend
            except RuntimeError:
                self.notes.append(f"{key} was not measured: torch has no {backend.name} here")
        return found

    def _attention(self, backend: SDPBackend | None) -> Iterator[TimedJob]:
        longest = max(self.sizes.rows)
        for seq in self.sizes.rows:
            yield from self._attention_of(backend, longest // seq, seq)

    def _attention_of(self, backend: SDPBackend | None, rows: int, seq: int) -> Iterator[TimedJob]:
        """Causal attention forward, and backward at the planner's multiple of it."""
        heads, dim = self.sizes.heads, self.sizes.head_dim
        q, k, v = (self._random(rows, heads, seq, dim).requires_grad_() for _ in range(3))

        def forward() -> Tensor:
            if backend is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        slope = torch.randn_like(out)

        def backward() -> object:
            return torch.autograd.grad(out, (q, k, v), slope, retain_graph=True)

        work = 2.0 * rows * seq * (seq / 2) * heads * 2 * dim
        name = f"{rows} x {seq} tokens, {heads} heads of {dim}"
        yield TimedJob(f"{name}, forward", work, forward)
        times = ATTENTION_BACKWARD
        yield TimedJob(f"{name}, backward", times * work, backward, starts=times)

    def _copies(self) -> Iterator[TimedJob]:
        """Every byte is read and written."""
        for size in self.sizes.copies:
            source = torch.zeros(size // 4, device=self.device)
            target = torch.ones_like(source)
            yield TimedJob(f"{size >> 20} MiB", 2.0 * size, lambda a=source, b=target: b.copy_(a))


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text("utf-8").splitlines() if listed.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"one core of {names[0] if names else platform.processor() or platform.machine()}"


# Times of rings between ranks: forked ones on CPUs, or those that torchrun started on GPUs.


_ON_GPU = tuple(2**power for power in range(16, 30, 2))  # bytes of all ranks together
_ON_CPU = tuple(2**power for power in range(14, 25, 2))
_REPEATS = 3
# torch 2.13 renamed these, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class LaunchedRing(NamedTuple):
    """This process among those that torchrun started."""

    rank: int
    local_rank: int
    ranks: int


def launched() -> LaunchedRing | None:
    """What torchrun says of this process; None where it did not start it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if not all(name in os.environ for name in names):
        return None
    return LaunchedRing(*(int(os.environ[name]) for name in names))


def forked_rings(ranks: int, seconds: float, tick: Callable[[], None]) -> list[Sample]:
    """Between so many processes on this host, over gloo."""
    with Pool(ranks) as pool:
        tasks = [(_forked, (ranks, seconds))] * ranks
        answers = pool.run_each(tasks, on_phase=tick)
    return answers[0]


def _forked(worker: Worker, ranks: int, seconds: float) -> list[Sample]:
    with worker.joined(ranks):
        return _rings(torch.device("cpu"), _ON_CPU, seconds, worker.phase)


def launched_rings(mine: LaunchedRing, seconds: float) -> list[Sample]:
    """Between the GPUs of the processes that torchrun started, over NCCL."""
    device = torch.device("cuda", mine.local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(minutes=5), device_id=device)
    found = _rings(device, _ON_GPU, seconds, lambda text: None)
    dist.destroy_process_group()
    return found


def _rings(
    device: torch.device, sizes: tuple[int, ...], seconds: float, say: Callable[[str], None]
) -> list[Sample]:
    """All-gathers and reduce-scatters of rising size, until rank 0's time is over."""
    ranks = dist.get_world_size()
    sizes = tuple(size - size % (4 * ranks) for size in sizes)
    calls = {
        (kind, size): _ring(kind, size, ranks, device)
        for size in sizes
        for kind in ("all-gather", "reduce-scatter")
    }
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    until = time.perf_counter() + seconds
    while True:
        for key, call in calls.items():
            say(f"{key[0]} of {key[1]} bytes")
            if not times[key]:
                call()  # the first one connects
            times[key].append(_time(call, device))
        over = torch.tensor([float(time.perf_counter() > until)], device=device)
        dist.broadcast(over, 0)
        if over.item():
            break
    return [
        Sample(f"{kind} of {size} bytes", size * (1 - 1 / ranks), median(found), ranks - 1.0)
        for (kind, size), found in times.items()
    ]


def _ring(kind: str, size: int, ranks: int, device: torch.device) -> Callable[[], object]:
    part = torch.ones(size // 4 // ranks, device=device)
    whole = torch.ones(part.numel() * ranks, device=device)
    if kind == "all-gather":
        return lambda: _all_gather(whole, part)
    return lambda: _reduce_scatter(part, whole)


def _time(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, from when all ranks are there to when the slowest is done."""
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
