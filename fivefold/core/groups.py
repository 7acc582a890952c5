"""The groups that collectives run over, by the names that records have: whom each serves, and where
its ranks stand.

Beside the axes of a layout there are parts of them: the places of a ring and the ranks that share a
place (`ring`, `ulysses`), the ep ranks of a node and their like on other nodes (`ep-near`,
`ep-far`), the tp ranks with the same KV heads (`replica`), both ends of a pipeline (`twin`), and
all ranks (`world`).
"""

from __future__ import annotations

from fivefold.core.layout import Extent
from fivefold.core.machine import Machine, Tier
from fivefold.core.plan import Plan

# The dimension that a group serves; `world` serves all.
DIMENSIONS = {
    "tp": "tp",
    "replica": "tp",
    "cp": "cp",
    "ring": "cp",
    "ulysses": "cp",
    "row": "cp",
    "pp": "pp",
    "twin": "pp",
    "dp-cp": "dp",
    "fsdp": "dp",
    "replicate": "dp",
    "edp": "dp",
    "ep": "ep",
    "ep-near": "ep",
    "ep-far": "ep",
    "etp": "ep",
}


def extent(plan: Plan, group: str) -> Extent:
    """The groups of this name in the line of all ranks."""
    layout, split = plan.layout, plan.split
    near = layout.ep // plan.ep_nodes
    parts = {
        "replica": Extent(max(1, layout.tp // plan.shape.kv_heads), 1),
        "ulysses": Extent(split.inner, layout.tp),
        "ring": Extent(split.outer, layout.tp * split.inner),
        "ep-near": Extent(near, layout.etp),
        "ep-far": Extent(plan.ep_nodes, layout.etp * near),
        "twin": layout.extent("pp"),  # the first and the last of a pipeline are always one of them
        "world": Extent(layout.world, 1),
    }
    return parts[group] if group in parts else layout.extent(group)


def tier(plan: Plan, group: str, machine: Machine) -> Tier:
    """The slowest link tier that any group of this name spans on `machine`."""
    return plan.layout.tier_along(extent(plan, group), machine)
