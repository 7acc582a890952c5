"""What NCCL holds on a rank for its communicators, outside of torch's memory.

NCCL 2.30 takes 4 MiB for a communicator, 6 MiB for each of its channels, and 12 MiB, 10 to receive
and 2 to send, for each peer to which a channel is connected: to the next rank of a ring, and for
sums up and down a tree as well. Measured on an H200 that ranks shared: 388 and 1,156 MiB before and
after the first collective on 64 channels, 28 and 40 for a message on 4, 10 and 22 on 1. That GPU is
nobody's case: of 8 GPUs each, NCCL opens 24 channels over 18 NVLinks (H100), 16 over 8 (H800), and
16 between nodes. In an all-to-all each pair in a node connects up to 32 channels: 2.6 GiB of 7
peers, where 3.3 GB were reported of 8 H100 (NVIDIA/nccl#1685, with the same 10 and 2 MiB). Messages
between nodes share one buffer. NVLS, which may take the place of a tree, has none of its own here.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from fivefold.core import Machine
from fivefold.core.layout import (
    FAR,
    FEW_CHANNELS,
    NEAR,
    PIPELINE,
    RING,
    ROLES,
    TWIN,
    ULYSSES,
    Communicator,
    Extent,
    Layout,
    Topology,
    communicators,
)
from fivefold.core.model import Shape
from fivefold.core.plan import Plan

_MIB = 2**20
MADE, CHANNEL, PEER = 4 * _MIB, 6 * _MIB, 12 * _MIB
_MESSAGES = MADE + FEW_CHANNELS * CHANNEL + PEER  # of a pair of pipeline ranks
_OVER_NETWORK = 2 * 16 * 32 * 2**17  # sent and received: 16 steps of 128 KiB on 32 channels
_NVLINK = 25e9  # bytes/s one way; NCCL opens two channels for each
_MOST_PEERS = 7  # of an all-to-all with as many channels each; what larger nodes do is not known
_EVERY_PAIR = ("ep", NEAR, FAR, ULYSSES)
_GATHERED = ("fsdp", "edp")  # and scattered, where ZeRO shards: no sums over a tree


class Channels(NamedTuple):
    """Channels that NCCL opens in a node of so many GPUs, to each peer, and between nodes."""

    collective: int
    peer: int
    node: int
    between: int = 16

    @classmethod
    def of(cls, machine: Machine | None) -> Channels:
        """Those of a machine; without one, of 8 H100."""
        if machine is None:
            return cls(24, 32, 8)
        links = max(1, round(machine.tiers[0].bandwidth / _NVLINK))
        most = min(32, 2 * links)
        node = machine.tiers[0].size or machine.gpus_per_node
        return cls(min(24, most), 1 << (most - 1).bit_length(), node)


def most_communicators(plan: Plan) -> list[Communicator]:
    """The communicators of the rank that is in most."""
    topology = Topology.of(plan)
    every = communicators(topology)
    # Ranks differ by their neighbours in the pipeline, not by their coords on other axes.
    columns = (
        [communicator for communicator in every if communicator.includes(topology, r)]
        for r in range(plan.layout.pp)
    )
    return max(columns, key=len)


def communicator_bytes(topology: Topology, communicator: Communicator, channels: Channels) -> int:
    """What NCCL holds for a communicator on one rank, after its first use."""
    if communicator.role == PIPELINE:
        return _MESSAGES
    if communicator.role == TWIN:
        return _twin_bytes(topology.layout, channels)
    size, stride = ROLES[communicator.role].extent(topology)
    near = min(size, max(1, channels.node // stride))  # members in a node
    count = channels.collective if near == size else min(channels.collective, channels.between)
    count = min(count, FEW_CHANNELS) if communicator.small else count
    base = MADE + CHANNEL * count
    network = 0 if near == size else _OVER_NETWORK
    if communicator.role in _EVERY_PAIR:
        return base + network + PEER * channels.peer * min(near - 1, _MOST_PEERS)
    if communicator.role == RING:
        return base + (network or PEER * channels.peer)
    sums = topology.layout.zero == 0 or not set(communicator.roles) <= set(_GATHERED)
    return base + PEER * count * (1 + (min(size - 1, 2) if sums else 0))


def _twin_bytes(layout: Layout, channels: Channels) -> int:
    """Of two ranks of a pipeline with copies of a weight."""
    pair = Extent(2, layout.world // layout.pp)
    count = channels.collective if 2 * pair.stride <= channels.node else channels.between
    return MADE + min(count, channels.collective) * (CHANNEL + 2 * PEER)


def has_nccl(machine: Machine) -> bool:
    """Whether ranks talk over NCCL; those of TPUs and CPUs do not."""
    return not machine.tiers[0].link.name.startswith(("ici", "loopback"))


def nccl_bytes(plan: Plan, machine: Machine | None) -> int:
    """What NCCL holds for the communicators of a rank, at most."""
    if machine is not None and not has_nccl(machine):
        return 0
    return _layout_bytes(Topology.of(plan), Channels.of(machine))


def layout_nccl_bytes(shape: Shape, layout: Layout, machine: Machine) -> int:
    """The same for ranks that serve: no gradients are summed, and no experts balanced."""
    if not has_nccl(machine):
        return 0
    channels = Channels.of(machine)
    near = max(1, channels.node // layout.etp)
    nodes = layout.ep // math.gcd(layout.ep, min(layout.ep, near))
    topology = Topology(layout, shape.kv_heads, 1, nodes, experts=shape.moe is not None)
    return _layout_bytes(topology, channels)


@lru_cache(maxsize=1 << 16)
def degrees_bytes(
    degrees: tuple[int, ...], inner: int, facts: tuple[int, bool, bool, bool], channels: Channels
) -> int:
    """Of the degrees of a grid: tp, cp, pp, replicate, shard, ep, etp, ZeRO, nodes of experts, sp,
    and whether ranks of a pipeline have copies of a weight."""
    tp, cp, pp, replicate, shard, ep, etp, zero, nodes, sp, twin = degrees
    kv_heads, experts, balanced, scaled = facts
    layout = Layout(replicate, shard, tp, pp, cp, ep, etp, zero, bool(sp))
    topology = Topology(
        layout,
        kv_heads,
        inner,
        nodes,
        experts=experts,
        balanced=balanced,
        scaled=scaled,
    )
    twins = _twin_bytes(layout, channels) if twin and pp > 1 else 0
    return _layout_bytes(topology, channels) + twins


def _layout_bytes(topology: Topology, channels: Channels) -> int:
    """Of a rank inside a pipeline, which has two neighbours and a communicator for each direction,
    and of one with a copy of a weight."""
    groups = (group for group in communicators(topology) if not group.channels)
    total = sum(communicator_bytes(topology, group, channels) for group in groups)
    return total + _MESSAGES * min(4, 2 * (topology.layout.pp - 1))
