"""An unkind device: whatever a GPU and its host may do, done to CPU ranks.

A CPU is kind. Fresh memory is often zero, a collective is over soon after it was issued, a copy is
over at once, and the host is never late. What is right only there is wrong on a GPU. A process that
is `unkind`, and all its forks, find instead:

Memory       what was never written is garbage, another one on each rank: what `torch.empty` and
             its like return, storages that grow, the pages of a KV cache.
Collectives  read their input and write their output at any time from the issue to the wait. Until
             the wait the output is garbage. If either was changed meanwhile, the wait raises
             `ReusedEarly`. No order in which collectives can end is worse than this.
Copies       from the device to the host are garbage until the host has waited for an event that
             was recorded after the copy, in the stream of the copy.
Host         comes late to collectives, to waits and to events.
Kernels      take long on their first use, on each rank another time.
Clock        events have times of the device, whose clock drifts away from the host's.

No value is changed: results have the same bits as on a kind device.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch._dynamo  # it lists torch's functions when it is imported: before they are patched
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fivefold import step as step_module
from fivefold.generate import engine, layout, sampling
from fivefold.generate.cache import KvCache
from fivefold.parallel import transport
from fivefold.parallel.pipeline import Pipeline
from fivefold.train.checkpoint import checkpoints as snapshot

SHARE_LATE, MOST_LATE = 0.1, 0.004  # of the points at which the host can be late; seconds
FIRST_USE = 0.04  # seconds, at most
FILLING = ("in_place", "between", "receive")  # functions of `transport`, by how they are called
READING = ("send", "pass_on", "gather", "scatter", "total", "exchange")
KERNELS = (
    *((step_module, "update"), (step_module, "squared_norm"), (step_module, "clip_factor")),
    *((Pipeline, "run"), (KvCache, "attend"), (sampling, "draw_tokens")),
)
Patched = Iterator[tuple[Any, str, Any]]  # owners, names and new values of attributes
_empty = torch.empty


class ReusedEarly(AssertionError):
    """Memory of a collective was changed before somebody had waited for the collective."""


class Chance:
    """The misfortunes of a rank, drawn by a seed; torch's own generators are left alone."""

    def __init__(self, seed: int) -> None:
        self.seed, self.owner = seed, ""
        self.used: set[object] = set()

    @property
    def draw(self) -> random.Random:
        """The generator of this rank, or of a process that has no rank yet."""
        owner = f"rank {dist.get_rank()}" if dist.is_initialized() else f"process {os.getpid()}"
        if self.owner != owner:
            self.owner, self.random = owner, random.Random(f"{self.seed} {owner}")
            self.bits = torch.Generator().manual_seed(self.random.getrandbits(62))
        return self.random

    def delay(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Make the host late, sometimes."""
        if self.draw.random() < SHARE_LATE:
            sleep(self.random.random() * MOST_LATE)

    def compile(self, kernel: object) -> None:
        """Make the host late where this process has not used a kernel yet."""
        if kernel not in self.used:
            self.used.add(kernel)
            time.sleep(self.draw.random() * FIRST_USE)

    def garbage(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What unwritten memory may hold: NaN, or any bits."""
        blank = self.draw.random() < 0.5 and dtype.is_floating_point and dtype.itemsize > 1
        with torch.no_grad(), _disable_current_modes():
            values = _empty(size, dtype=dtype)
            if blank:
                return values.fill_(float("nan"))
            if dtype == torch.bool:
                return values.random_(0, 2, generator=self.bits)
            values.view(-1).view(torch.uint8).random_(0, 256, generator=self.bits)
            return values

    def spoil(self, tensor: Tensor) -> None:
        """Fill a tensor with garbage."""
        write(tensor, self.garbage(tensor.shape, tensor.dtype))


def write(tensor: Tensor, values: Tensor) -> None:
    """Copy, unnoticed by autograd and dispatch modes, as a collective writes."""
    with torch.no_grad(), _disable_current_modes():
        tensor.data.copy_(values)


def copy_of(tensor: Tensor) -> Tensor:
    """A contiguous copy, unnoticed as well."""
    with torch.no_grad(), _disable_current_modes():
        return _empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def same_bits(*tensors: Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN."""
    with _disable_current_modes():
        return torch.equal(*(copy_of(tensor).view(-1).view(torch.uint8) for tensor in tensors))


# Memory.


def allocating(chance: Chance, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function, whose tensors hold garbage."""

    @wraps(allocate)
    def allocated(*args: Any, **options: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return allocate(*args, **options)
        options.pop("pin_memory", None)  # a fork that pins memory would need its own CUDA
        plain = (arg.as_subclass(Tensor) if isinstance(arg, LateTensor) else arg for arg in args)
        tensor = allocate(*plain, **options)
        if type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.numel():
            chance.spoil(tensor)
        return tensor

    return allocated


def growing(chance: Chance, resize: Callable[..., Any]) -> Callable[..., Any]:
    """`UntypedStorage.resize_`, whose new bytes are garbage."""

    @wraps(resize)
    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        old = storage.nbytes()
        result = resize(storage, size)
        if size > old and storage.device.type == "cpu":
            chance.spoil(_empty(0, dtype=torch.uint8).set_(storage)[old:])
        return result

    return resized


def paging(chance: Chance, build: Callable[..., None]) -> Callable[..., None]:
    """`KvCache.__init__`, whose pages hold large numbers, as if sequences had used them before."""

    @wraps(build)
    def built(cache: KvCache, *args: Any, **options: Any) -> None:
        build(cache, *args, **options)
        for pages in cache.pages.values():
            for tensor in (pages.keys, pages.values):
                tensor.fill_(1e4 * (chance.draw.random() - 0.5))

    return built


# Collectives.


class LateCall:
    """A collective that runs on copies. The wait fills its output, if nothing was changed."""

    def __init__(
        self,
        chance: Chance,
        name: str,
        real: Any,
        reads: tuple[Tensor, Tensor] | None = None,
        fills: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`reads` is the input and its copy, `fills` the output and what the collective fills."""
        self.chance, self.name, self.real, self.reads, self.fills = chance, name, real, reads, fills
        if fills is None:
            return
        self.home = self.under_way = fills[0]  # the names that calls of `transport` have for it
        chance.spoil(self.home)
        if reads is not None:
            write(*reads)  # the input may be a part of the output
        self.garbage = copy_of(self.home)

    def wait(self) -> Any:
        """What the collective gives."""
        self.chance.delay()
        result = self.real.wait()
        reads, fills, self.reads, self.fills = self.reads, self.fills, None, None
        if reads is not None and not same_bits(*reads):
            raise ReusedEarly(f"the input of {self.name} was changed before the wait for it")
        if fills is None:
            return result
        if not same_bits(fills[0], self.garbage):
            raise ReusedEarly(f"the output of {self.name} was changed before the wait for it")
        if isinstance(self.real, transport.Functional):
            return result
        write(*fills)
        return fills[0]

    @property
    def done(self) -> bool:
        """Whether the collective is over, as far as anybody knows."""
        return self.chance.draw.random() < 0.5 and self.real.done


class LateTransport:
    """The functions of `transport` as late calls."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.real = {name: getattr(transport, name) for name in (*FILLING, *READING)}

    def patches(self) -> Patched:
        for name in FILLING:
            yield transport, name, self._late(name, getattr(self, name))
        for name in READING:
            yield transport, name, self._late(name, partial(self.reading, name))

    def _late(self, name: str, call: Callable[..., LateCall]) -> Callable[..., LateCall]:
        def issue(*args: Any) -> LateCall:
            self.chance.delay()
            self.chance.compile(name)
            return call(*args)

        return issue

    def in_place(self, tensor: Tensor, start: Any, group: Any) -> LateCall:
        filled = copy_of(tensor)
        real = self.real["in_place"](filled, start, group)
        return LateCall(self.chance, start.func.__name__, real, fills=(tensor, filled))

    def between(self, output: Tensor, x: Tensor, start: Any, group: Any) -> LateCall:
        sent, filled = copy_of(x), copy_of(output)
        real = self.real["between"](filled, sent, start, group)
        return LateCall(self.chance, start.func.__name__, real, (x, sent), (output, filled))

    def receive(self, *args: Any) -> LateCall:
        real = self.real["receive"](*args)
        return LateCall(self.chance, "receive", real, fills=(copy_of(real.home), real.home))

    def reading(self, name: str, x: Tensor, *args: Any) -> LateCall:
        """One that makes its own output, or has none."""
        sent = copy_of(x)
        real = self.real[name](sent, *args)
        filled = real.home if isinstance(real, transport.InFlight) else real.under_way
        fills = None if filled is None else (copy_of(filled), filled)
        return LateCall(self.chance, name, real, (x, sent), fills)


# Copies, events and the clock.


class LateStream:
    """A queue of the device: copies to the host, and kernels with a duration."""

    def __init__(self) -> None:
        self.copies: deque[Callable[[], None]] = deque()
        self.issued = 0  # copies
        self.free = 0.0  # when all kernels have run, on the host's clock

    def finish(self, number: int) -> None:
        """Do all copies up to this one."""
        while self.copies and self.issued - len(self.copies) < number:
            self.copies.popleft()()


class LateDevice:
    """What stands for CUDA: streams, events, and a clock of its own. `host` and `sleep` are those
    of the host's clock, and may be simulated."""

    def __init__(
        self,
        chance: Chance,
        host: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.chance, self.host, self.sleep = chance, host, sleep
        self.stream = LateStream()  # in which all copies and kernels are issued
        self.drift = 1e-4 * (chance.draw.random() - 0.5)  # seconds a second of the host

    def run(self, seconds: float) -> None:
        """Issue a kernel."""
        self.stream.free = max(self.stream.free, self.host()) + seconds

    def synchronize(self, device: object = None) -> None:
        self.stream.finish(self.stream.issued)

    def patches(self) -> Patched:
        """Of what the product reads on the host, all comes from this device."""
        yield LateTensor, "home", self
        yield torch.cuda, "Event", partial(LateEvent, self)
        yield torch.cuda, "Stream", lambda *_: LateStream()
        yield torch.cuda, "current_stream", lambda *_: self.stream
        yield torch.cuda, "synchronize", self.synchronize
        reading, alone = step_module.Reading, engine.alone
        yield step_module, "Reading", lambda numbers: reading(numbers.as_subclass(LateTensor))
        for module in (engine, layout):
            yield module, "alone", lambda tensor: alone(tensor.as_subclass(LateTensor))
        read, memory = snapshot.BoxSource.read, snapshot._memory
        yield snapshot.BoxSource, "read", lambda source: read(source).as_subclass(LateTensor)
        yield snapshot, "_memory", lambda num_bytes, pinned: memory(num_bytes, False)


class LateEvent:
    """A `torch.cuda.Event` of the device."""

    def __init__(self, device: LateDevice, enable_timing: bool = False) -> None:
        self.device, self.stream, self.number, self.passes_at = device, device.stream, 0, 0.0

    def record(self, stream: LateStream | None = None) -> None:
        self.stream = stream or self.device.stream
        self.number = self.stream.issued
        self.passes_at = max(self.stream.free, self.device.host())

    def query(self) -> bool:
        if passed := self.passes_at <= self.device.host():
            self.stream.finish(self.number)
        return passed

    def synchronize(self) -> None:
        self.device.chance.delay(self.device.sleep)
        self.device.sleep(max(0.0, self.passes_at - self.device.host()))
        self.stream.finish(self.number)

    def elapsed_time(self, later: LateEvent) -> float:
        return 1e3 * (1 + self.device.drift) * (later.passes_at - self.passes_at)


class LateTensor(Tensor):
    """A tensor of the device; copies of it to the host are late. Kernels are not: what is copied is
    what was there when the copy was issued, as in a stream."""

    home: ClassVar[LateDevice]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == Tensor.is_cuda.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return True
        if func == Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return torch.device("cuda", 0)
        if func == Tensor.cpu:
            return copy_of(args[0].as_subclass(Tensor))
        if func == Tensor.copy_ and not isinstance(args[0], LateTensor):
            target, value = args[0], copy_of(args[1].as_subclass(Tensor))
            cls.home.chance.spoil(target)
            cls.home.stream.copies.append(partial(write, target, value))
            cls.home.stream.issued += 1
            if not (kwargs or {}).get("non_blocking"):
                cls.home.synchronize()
            return target
        return super().__torch_function__(func, types, args, kwargs or {})


def launching(chance: Chance, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The same kernel, which is compiled once for all sizes that it is called with."""

    @wraps(kernel)
    def launched(*args: Any, **options: Any) -> Any:
        sizes = tuple(tuple(arg.shape) for arg in args if isinstance(arg, Tensor))
        chance.compile((name, sizes))
        return kernel(*args, **options)

    return launched


def _patches(chance: Chance, device: LateDevice) -> Patched:
    for name in ("empty", "empty_like", "empty_strided"):
        yield torch, name, allocating(chance, getattr(torch, name))
    yield Tensor, "new_empty", allocating(chance, Tensor.new_empty)
    yield torch.UntypedStorage, "resize_", growing(chance, torch.UntypedStorage.resize_)
    yield KvCache, "__init__", paging(chance, KvCache.__init__)
    for owner, name in KERNELS:
        yield owner, name, launching(chance, name, getattr(owner, name))
    yield from LateTransport(chance).patches()
    yield from device.patches()


@contextmanager
def unkind(seed: int = 0, device: LateDevice | None = None) -> Iterator[None]:
    """Make this process unkind, and all that it forks meanwhile."""
    device = device or LateDevice(Chance(seed))
    with ExitStack() as stack:
        for owner, name, value in list(_patches(device.chance, device)):
            stack.enter_context(patch.object(owner, name, value, create=owner is LateTensor))
        yield
