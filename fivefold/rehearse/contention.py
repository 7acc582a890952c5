"""What collectives take from the compute of a rank that is alone on its GPU.

In place of each collective a kernel runs on the stream of its communicator. It begins when its
input is there, occupies as many multiprocessors as NCCL's, moves through memory what a ring moves,
and lasts as long as the links of the machine say. Who waits for the collective waits for that
kernel, so what of it is exposed is measured, and so is how much it slows compute down.

What no rank alone can show: when others come. A message of the pipeline takes the time of its link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from fivefold.core import Machine
from fivefold.core.layout import FEW_CHANNELS, ROLES, WORLD
from fivefold.core.plan import Plan
from fivefold.cost.hardware import Links
from fivefold.parallel import CollectiveRecord, Pending, RoleKind

# Multiprocessors of a collective: inside a domain 0.15 of an H100's 132, by which NVLink's slow
# compute down (cost/step/overlap.py); across domains NCCL's channels of eight network cards.
_NEAR_SMS, _FAR_SMS = 20, 8
_MESSAGES = ("send", "recv")


class _Occupied:
    """A collective that ends with its kernel."""

    def __init__(self, pending: Pending, end: torch.cuda.Event, device: torch.device) -> None:
        self.pending, self.end, self.device = pending, end, device

    def wait(self) -> object:
        result = self.pending.wait()
        self.end.wait(torch.cuda.current_stream(self.device))
        return result

    @property
    def done(self) -> bool:
        return self.end.query()


class Contention:
    """Kernels in place of the collectives of a rank whose groups are fakes."""

    def __init__(self, plan: Plan, machine: Machine, device: torch.device) -> None:
        self.device = device
        self.links = Links(machine, np.array([float(plan.layout.world)]))
        self.near = machine.tiers[0].size or plan.layout.world
        self.streams: dict[tuple[str, str], torch.cuda.Stream] = {}
        from fivefold.rehearse.occupy_kernel import Occupation  # Triton is there only with CUDA

        self.occupation = Occupation(device)

    def __call__(
        self, record: CollectiveRecord, members: tuple[int, ...], pending: Pending
    ) -> Pending:
        """Start the kernel of a collective."""
        message = record.kind in _MESSAGES
        queue = record.axis, record.kind if message else ""
        if queue not in self.streams:
            self.streams[queue] = torch.cuda.Stream(self.device, priority=-1)
        stream = self.streams[queue]
        if record.kind != "recv":
            stream.wait_stream(torch.cuda.current_stream(self.device))
        sms = FEW_CHANNELS if message else _NEAR_SMS if self._is_near(members) else _FAR_SMS
        with torch.cuda.stream(stream):
            self.occupation.start(
                sms, moved_bytes(record), link_seconds(self.links, record, members)
            )
        return _Occupied(pending, stream.record_event(), self.device)

    def _is_near(self, members: tuple[int, ...]) -> bool:
        return members[0] // self.near == members[-1] // self.near


@dataclass(frozen=True)
class ContendedStep:
    """A step with kernels in place of collectives: its seconds, those in which computation waited
    for the collectives of each axis, and by how much they slowed it down."""

    step: float
    exposed: dict[str, float]
    slowed: float


def contended_step(
    step: float, waited: Mapping[RoleKind, list[float]], alone: float
) -> ContendedStep:
    """Sum the waits of a step by axis. `alone`: its seconds without any collective."""
    exposed: defaultdict[str, float] = defaultdict(float)
    for (role, _), seconds in waited.items():
        exposed[ROLES[role].dimension or WORLD] += sum(seconds)
    return ContendedStep(step, dict(exposed), step - alone - sum(exposed.values()))


def link_seconds(links: Links, record: CollectiveRecord, members: tuple[int, ...]) -> float:
    """Seconds of a collective among these ranks."""
    ranks, stride = (np.array([float(n)]) for n in (len(members), _stride(members)))
    kind = "send" if record.kind in _MESSAGES else record.kind
    size = np.array([float(record.bytes)])
    return float(np.asarray(links.seconds(kind, size, ranks, stride)).flat[0])


def _stride(members: tuple[int, ...]) -> int:
    return abs(members[1] - members[0]) if len(members) > 1 else 1


def moved_bytes(record: CollectiveRecord) -> float:
    """Bytes that a rank reads and writes for a collective around a ring."""
    size = record.bytes * (record.group if record.kind == "all_gather" else 1)
    passes = 2 if record.kind == "all_reduce" else 1
    return size * passes * (1 - 1 / max(2, record.group))
