"""Group roles: which ranks meet for which collectives. The mesh, the planner and the page read it.

A job has one table of communicators. A communicator is a queue: a role for which the computation
waits has its own, also where two roles join the same ranks. Other roles with the same ranks share
one, but those whose messages are `small` only with one another: they run on few of NCCL's channels,
and would connect every channel of a large one for a second algorithm. All groups of a communicator
are made by one call of every rank.

All ranks stand in one line, tp fastest, then cp, dp and pp. There a role is an `Extent`: the size
of its groups and the distance between two members. Only the way from a rank to its place in the
line depends on the layout's `order`. Two roles need more than an extent: `twin` joins the pipeline
ranks that hold a copy of the same weight, and the messages of a pipeline go between pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fivefold.core import Machine, Tier
from fivefold.core.layout.layout import Extent, Layout
from fivefold.core.plan import Plan
from fivefold.core.schedule import Schedule, channels, twins

PIPELINE, TWIN, WORLD = "pp", "twin", "world"
RING, ULYSSES, ROW, SCALE = "ring", "ulysses", "row", "scale"
NEAR, FAR = "ep-near", "ep-far"
FEW_CHANNELS = 4  # of NCCL, a block of the GPU each: enough for a network card, and little memory


@dataclass(frozen=True)
class Topology:
    """Everything that decides who meets whom: a layout, and what cuts its axes further.

    `kv_heads` fewer than tp are replicated, `inner_context` ranks share their tokens by heads,
    experts are spread over `ep_nodes` nodes, and a `schedule` says which pipeline ranks send to
    which. `tied`: the first and the last stage share a weight. `experts`: the model has some;
    `balanced`: the ranks of a row balance them. `scaled`: ranks of a microbatch share scales of
    fp8.
    """

    layout: Layout
    kv_heads: int = 1
    inner_context: int = 1
    ep_nodes: int = 1
    schedule: Schedule | None = None
    tied: bool = False
    experts: bool = False
    balanced: bool = False
    scaled: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Topology:
        """The topology of a plan."""
        shape = plan.shape
        return cls(
            plan.layout,
            shape.kv_heads,
            1 if plan.split is None else plan.split.inner,
            plan.ep_nodes,
            plan.schedule,
            shape.ends_share,
            shape.moe is not None,
            bool(plan.balance),
            plan.fp8 is not None and plan.fp8.scaling == "tensorwise",
        )


@dataclass(frozen=True)
class Role:
    """What a group is for: the dimension that it serves, its extent, and whether a job has
    collectives for it. `urgent`: the computation waits for them. `small`: they are of few bytes."""

    dimension: str
    extent: Callable[[Topology], Extent]
    used: Callable[[Topology], bool]
    urgent: bool = False
    small: Callable[[Topology], bool] = lambda topology: False


def _axis(name: str) -> Callable[[Topology], Extent]:
    return lambda topology: topology.layout.extent(name)


def _kv_replicas(topology: Topology) -> Extent:
    """The tp ranks that hold the same KV heads."""
    return Extent(max(1, topology.layout.tp // topology.kv_heads), 1)


def _ulysses(topology: Topology) -> Extent:
    return Extent(topology.inner_context, topology.layout.tp)


def _ring(topology: Topology) -> Extent:
    inner, layout = topology.inner_context, topology.layout
    return Extent(layout.cp // inner, layout.tp * inner)


def _near(topology: Topology) -> Extent:
    """The ep ranks of one node."""
    return Extent(topology.layout.ep // topology.ep_nodes, topology.layout.etp)


def _far(topology: Topology) -> Extent:
    """The ep ranks with the same number in every node."""
    layout = topology.layout
    return Extent(topology.ep_nodes, layout.etp * (layout.ep // topology.ep_nodes))


def _everyone(topology: Topology) -> Extent:
    return Extent(topology.layout.world, 1)


def _always(topology: Topology) -> bool:
    return True


def _never(topology: Topology) -> bool:
    return False


def _balanced(topology: Topology) -> bool:
    return topology.balanced


def _scaled(topology: Topology) -> bool:
    return topology.scaled


def _microbatch(topology: Topology) -> Extent:
    """The ranks that compute one microbatch of a stage together."""
    return Extent(topology.layout.tp * topology.layout.cp, 1)


def _pipelined(topology: Topology) -> bool:
    return topology.schedule is not None


def _sharded(topology: Topology) -> bool:
    return topology.layout.zero >= 1


def _counts_tokens(topology: Topology) -> bool:
    """Whether all that goes over data ranks is the number of tokens: gradients go over shards."""
    return topology.layout.zero >= 1 and topology.layout.extent("fsdp").size > 1


def _experts(topology: Topology) -> bool:
    return topology.experts


def _in_one_hop(topology: Topology) -> bool:
    return topology.experts and topology.ep_nodes == 1


def _over_nodes(topology: Topology) -> bool:
    return topology.experts and topology.ep_nodes > 1


ROLES = {
    "tp": Role("tp", _axis("tp"), _always, urgent=True),
    "replica": Role("tp", _kv_replicas, _always),
    "cp": Role("cp", _axis("cp"), _never),  # ring and ulysses together are cp
    RING: Role("cp", _ring, _always, urgent=True),
    ULYSSES: Role("cp", _ulysses, _always, urgent=True),
    ROW: Role("cp", _axis(ROW), _balanced, urgent=True, small=_always),
    SCALE: Role("tp", _microbatch, _scaled, urgent=True, small=_always),
    PIPELINE: Role("pp", _axis("pp"), _never),  # its messages go between pairs
    TWIN: Role("pp", _axis("pp"), _pipelined),
    "dp-cp": Role("dp", _axis("dp-cp"), _always, small=_counts_tokens),
    "fsdp": Role("dp", _axis("fsdp"), _sharded),
    "replicate": Role("dp", _axis("replicate"), _sharded),
    "edp": Role("dp", _axis("edp"), _experts),
    "ep": Role("ep", _axis("ep"), _in_one_hop, urgent=True),
    NEAR: Role("ep", _near, _over_nodes, urgent=True),
    FAR: Role("ep", _far, _over_nodes, urgent=True),
    "etp": Role("ep", _axis("etp"), _experts, urgent=True),
    WORLD: Role("", _everyone, _always, small=_always),
}
# The dimension that each role serves; `world` serves all.
DIMENSIONS = {name: role.dimension for name, role in ROLES.items() if role.dimension}


class RankOrder(NamedTuple):
    """From a rank to its place in the line and back, as digits: the fastest first, with strides."""

    digits: tuple[Extent, ...]

    def position(self, rank: int) -> int:
        """Where in the line a rank stands."""
        position, unit = 0, 1
        for size, stride in self.digits:
            position += rank // stride % size * unit
            unit *= size
        return position

    def rank(self, position: int) -> int:
        """The rank at a place in the line."""
        rank = 0
        for size, stride in self.digits:
            position, digit = divmod(position, size)
            rank += digit * stride
        return rank

    def coord(self, extent: Extent, rank: int) -> int:
        """The coord of a rank on an axis of this extent."""
        return self.position(rank) // extent.stride % extent.size

    def group(self, extent: Extent, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` meets along an axis of this extent, by their coord on it."""
        first = self.position(rank) - self.coord(extent, rank) * extent.stride
        return tuple(self.rank(first + i * extent.stride) for i in range(extent.size))

    def groups(self, extent: Extent, world: int) -> tuple[tuple[int, ...], ...]:
        """All groups of an axis of this extent; together they hold every rank once."""
        firsts = (
            position for position in range(world) if position // extent.stride % extent.size == 0
        )
        return tuple(sorted(self.group(extent, self.rank(first)) for first in firsts))


def rank_order(layout: Layout) -> RankOrder:
    """The line in which the ranks of a layout stand."""
    if layout.order == "tp-cp-dp-pp":
        return RankOrder((Extent(layout.world, 1),))
    row = layout.tp * layout.cp
    return RankOrder((Extent(row, 1), Extent(layout.dp, row * layout.pp), Extent(layout.pp, row)))


@dataclass(frozen=True)
class Communicator:
    """What one call of all ranks makes: a group for each rank, or none for those left out.

    Of pipeline messages, the `channels` of one colour, (source, target) as pipeline coords: no rank
    is in two of them. Every direction of a pair has a communicator of its own. `sharers` are
    further roles with the same ranks; `small` messages take few of NCCL's channels.
    """

    role: str
    channels: tuple[tuple[int, int], ...] = ()
    sharers: tuple[str, ...] = ()
    small: bool = False

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles that it serves."""
        return (self.role, *self.sharers)

    def __str__(self) -> str:
        return " ".join([self.role, *(f"{source}->{target}" for source, target in self.channels)])

    def group(self, topology: Topology, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` meets; itself alone where it meets nobody."""
        if not self.channels:
            return group_of(topology, self.role, rank)
        column = group_of(topology, PIPELINE, rank)
        index = column.index(rank)
        return next((self._ranks(column, pair) for pair in self.channels if index in pair), (rank,))

    def includes(self, topology: Topology, pp_rank: int) -> bool:
        """Whether ranks with this pipeline coord are in one of its groups."""
        pairs = _twin_coords(topology) if self.role == TWIN else self.channels
        return not pairs or any(pp_rank in pair for pair in pairs)

    def channel(self, topology: Topology, rank: int) -> tuple[int, int] | None:
        """The (source, target) of its messages that this rank is one of."""
        index = group_of(topology, PIPELINE, rank).index(rank)
        return next((pair for pair in self.channels if index in pair), None)

    def groups(self, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """The groups of all ranks, in one order that every rank computes alike."""
        if not self.channels:
            return all_groups(topology, self.role)
        columns = all_groups(topology, PIPELINE)
        return tuple(self._ranks(column, pair) for column in columns for pair in self.channels)

    @staticmethod
    def _ranks(column: tuple[int, ...], pair: tuple[int, int]) -> tuple[int, ...]:
        return (column[pair[0]], column[pair[1]])


def communicators(topology: Topology) -> list[Communicator]:
    """All communicators of a job, in the order in which every rank makes them."""
    groups: dict[object, Communicator] = {}
    # That of the world is there before any role asks for it.
    for name in (WORLD, *(name for name in ROLES if name != WORLD)):
        role = ROLES[name]
        if role.used(topology) and _joins(topology, name):
            small = role.small(topology)
            alone = role.urgent or name == TWIN
            ranks = name if alone else (role.extent(topology), small)
            group = groups.get(ranks, Communicator(name, small=small))
            shares = () if group.role == name else (name,)
            groups[ranks] = replace(group, sharers=(*group.sharers, *shares))
    pairs = (Communicator(PIPELINE, pairs, small=True) for pairs in _coloured(topology))
    return [*groups.values(), *pairs]


def _joins(topology: Topology, role: str) -> bool:
    """Whether a role joins any ranks."""
    if role == TWIN:  # of all ranks they are many: whether there are any, one pipeline tells
        return bool(_twin_coords(topology))
    return ROLES[role].extent(topology).size > 1


def _coloured(topology: Topology) -> list[tuple[tuple[int, int], ...]]:
    """The channels of a pipeline, in as few sets as can be found in which no rank is twice."""
    colours: list[list[tuple[int, int]]] = []
    pairs = () if topology.schedule is None else channels(topology.schedule)
    for pair in pairs:
        free = (
            channel_set
            for channel_set in colours
            if not any(set(pair) & set(channel) for channel in channel_set)
        )
        colour = next(free, None)
        if colour is None:
            colours.append(colour := [])
        colour.append(pair)
    return [tuple(channel_set) for channel_set in colours]


def group_of(topology: Topology, role: str, rank: int) -> tuple[int, ...]:
    """The ranks that `rank` meets in a role; itself alone where it meets nobody."""
    if role != TWIN:
        return rank_order(topology.layout).group(ROLES[role].extent(topology), rank)
    return next((pair for pair in _twins(topology) if rank in pair), (rank,))


def all_groups(topology: Topology, role: str) -> tuple[tuple[int, ...], ...]:
    """The groups of all ranks in a role, in one order that every rank computes alike."""
    if role == TWIN:
        return _twins(topology)
    layout = topology.layout
    return rank_order(layout).groups(ROLES[role].extent(topology), layout.world)


def _twins(topology: Topology) -> tuple[tuple[int, ...], ...]:
    pairs = _twin_coords(topology)
    columns = all_groups(topology, PIPELINE) if pairs else ()
    return tuple((column[a], column[b]) for column in columns for a, b in pairs)


def _twin_coords(topology: Topology) -> Sequence[tuple[int, int]]:
    """The pairs of pipeline coords that have copies of the same weights."""
    schedule = topology.schedule
    return () if schedule is None else twins(schedule.placement, topology.tied)


def extent(plan: Plan, role: str) -> Extent:
    """The groups of a role in the line of all ranks."""
    return ROLES[role].extent(Topology.of(plan))


def tier(plan: Plan, role: str, machine: Machine) -> Tier:
    """The slowest link tier that any group of this role spans on `machine`."""
    return plan.layout.tier_along(extent(plan, role), machine)
