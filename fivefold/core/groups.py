"""Group roles: which ranks meet for which collectives. The mesh, the planner and the page read it.

All ranks stand in one line, tp fastest, then cp, dp and pp. There a role is an `Extent`: the size
of its groups and the distance between two members. Only the way from a rank to its place in the
line depends on the layout's `order`. Two roles need more than an extent: `twin` joins the pipeline
ranks that hold a copy of the same weight, and the messages of a pipeline go between pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fivefold.core.layout import Extent, Layout
from fivefold.core.machine import Machine, Tier
from fivefold.core.plan import Plan
from fivefold.core.schedule import Schedule, channels, twins
from fivefold.core.splits import ContextSplit

PIPELINE, TWIN, WORLD = "pp", "twin", "world"
RING, ULYSSES, ROW = "ring", "ulysses", "row"
NEAR, FAR = "ep-near", "ep-far"


@dataclass(frozen=True)
class Topology:
    """Everything that decides who meets whom: a layout, and what cuts its axes further.

    `kv_heads` fewer than tp are replicated, `split` cuts a row over the context ranks, experts are
    spread over `ep_nodes` nodes, and a `schedule` says which pipeline ranks send to which. `tied`:
    the first and the last stage share a weight. `balanced`: the ranks of a row balance experts.
    """

    layout: Layout
    kv_heads: int = 1
    split: ContextSplit | None = None
    ep_nodes: int = 1
    schedule: Schedule | None = None
    tied: bool = False
    balanced: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Topology:
        """The topology of a plan."""
        shape = plan.shape
        return cls(
            plan.layout,
            shape.kv_heads,
            plan.split,
            plan.ep_nodes,
            plan.schedule,
            shape.ends_share,
            bool(plan.balance),
        )

    @property
    def inner_context(self) -> int:
        """Context ranks that share their tokens by heads."""
        return 1 if self.split is None else self.split.inner


@dataclass(frozen=True)
class Role:
    """What a group is for: the dimension that it serves, its extent, and whether a job has it."""

    dimension: str
    extent: Callable[[Topology], Extent]
    used: Callable[[Topology], bool]


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


def _pipelined(topology: Topology) -> bool:
    return topology.schedule is not None


def _over_nodes(topology: Topology) -> bool:
    return topology.ep_nodes > 1


ROLES = {
    "tp": Role("tp", _axis("tp"), _always),
    "replica": Role("tp", _kv_replicas, _always),
    "cp": Role("cp", _axis("cp"), _never),  # ring and ulysses together are cp
    RING: Role("cp", _ring, _always),
    ULYSSES: Role("cp", _ulysses, _always),
    ROW: Role("cp", _axis(ROW), _balanced),
    PIPELINE: Role("pp", _axis("pp"), _always),
    TWIN: Role("pp", _axis("pp"), _pipelined),
    "dp-cp": Role("dp", _axis("dp-cp"), _always),
    "fsdp": Role("dp", _axis("fsdp"), _always),
    "replicate": Role("dp", _axis("replicate"), _always),
    "edp": Role("dp", _axis("edp"), _always),
    "ep": Role("ep", _axis("ep"), _always),
    NEAR: Role("ep", _near, _over_nodes),
    FAR: Role("ep", _far, _over_nodes),
    "etp": Role("ep", _axis("etp"), _always),
    WORLD: Role("", _everyone, _always),
}
# The dimension that each role serves; `world` serves all.
DIMENSIONS = {name: role.dimension for name, role in ROLES.items() if role.dimension}


class RankOrder(NamedTuple):
    """From a rank to its place in the line and back, as digits: the fastest first, with strides."""

    digits: tuple[Extent, ...]

    def place(self, rank: int) -> int:
        """Where in the line a rank stands."""
        place, unit = 0, 1
        for size, stride in self.digits:
            place += rank // stride % size * unit
            unit *= size
        return place

    def rank(self, place: int) -> int:
        """The rank at a place in the line."""
        rank = 0
        for size, stride in self.digits:
            place, digit = divmod(place, size)
            rank += digit * stride
        return rank

    def coord(self, extent: Extent, rank: int) -> int:
        """The coord of a rank on an axis of this extent."""
        return self.place(rank) // extent.stride % extent.size

    def group(self, extent: Extent, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` meets along an axis of this extent, by their coord on it."""
        first = self.place(rank) - self.coord(extent, rank) * extent.stride
        return tuple(self.rank(first + i * extent.stride) for i in range(extent.size))

    def groups(self, extent: Extent, world: int) -> tuple[tuple[int, ...], ...]:
        """All groups of an axis of this extent; together they hold every rank once."""
        firsts = (place for place in range(world) if place // extent.stride % extent.size == 0)
        return tuple(sorted(self.group(extent, self.rank(place)) for place in firsts))


def rank_order(layout: Layout) -> RankOrder:
    """The line in which the ranks of a layout stand."""
    if layout.order == "tp-cp-dp-pp":
        return RankOrder((Extent(layout.world, 1),))
    row = layout.tp * layout.cp
    return RankOrder((Extent(row, 1), Extent(layout.dp, row * layout.pp), Extent(layout.pp, row)))


def roles_of(topology: Topology) -> list[str]:
    """The roles that a job has groups for."""
    return [name for name, role in ROLES.items() if role.used(topology)]


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


def message_pairs(topology: Topology) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(source, target) as pipeline coords and as ranks, for every pair that sends messages."""
    if topology.schedule is None:
        return []
    columns = all_groups(topology, PIPELINE)
    pairs = channels(topology.schedule)
    return [((a, b), (column[a], column[b])) for a, b in pairs for column in columns]


def _twins(topology: Topology) -> tuple[tuple[int, ...], ...]:
    if topology.schedule is None:
        return ()
    pairs = twins(topology.schedule.placement, topology.tied)
    columns = all_groups(topology, PIPELINE)
    return tuple((column[a], column[b]) for column in columns for a, b in pairs)


def extent(plan: Plan, role: str) -> Extent:
    """The groups of a role in the line of all ranks."""
    return ROLES[role].extent(Topology.of(plan))


def tier(plan: Plan, role: str, machine: Machine) -> Tier:
    """The slowest link tier that any group of this role spans on `machine`."""
    return plan.layout.tier_along(extent(plan, role), machine)
