"""Many layouts of one job at once: one array per degree or choice, and all broadcast together.

Also how unevenly routing loads the ranks: from the fullest expert to the rank that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.core import FivefoldError
from fivefold.core.layout import CONTEXT_KINDS, ContextMethod, Fp8, loss_chunks, ulysses_degree
from fivefold.core.model import MODULES, Balance, Moe, Recompute, Shape
from fivefold.core.plan import Plan
from fivefold.core.schedule import RankPosition, looks_like_file, named, none_deferred
from fivefold.core.schedule import names as schedule_names
from fivefold.cost.traffic import LayerJob

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
RULES = (Recompute(), Recompute.parse("selective"), Recompute.parse("full"))  # that are searched
RECOMPUTE = tuple(map(str, RULES))
OFFLOADS = ("none", "cpu", "nvme")  # where optimizer states and master weights are
CONTEXTS = tuple(CONTEXT_KINDS)
SCHEDULES = tuple(schedule_names())
FAMILIES = tuple(named(name) for name in SCHEDULES)
DEFERS = np.array([family.deferred is not none_deferred for family in FAMILIES])


@dataclass(frozen=True)
class LayoutGrid:
    """Layouts with their batches. `schedule`, `offload` and `context` are indices into the lists
    above, `recompute` is an index into `rules`."""

    tp: Array
    cp: Array
    pp: Array
    replicate: Array
    shard: Array
    ep: Array
    etp: Array
    zero: Array
    chunks: Array
    microbatch_size: Array  # sequences
    microbatches: Array
    recompute: Array
    schedule: Array
    sp: Flags
    offload: Array
    context: Array = field(default_factory=lambda: np.zeros(1))
    ep_nodes: Array = field(default_factory=lambda: np.zeros(1))  # 0: as the machine is built
    rules: tuple[Recompute, ...] = field(default=RULES, kw_only=True)

    @cached_property
    def dp(self) -> Array:
        return self.replicate * self.shard

    @cached_property
    def edp(self) -> Array:
        return self.dp * self.cp * self.tp / (self.ep * self.etp)

    @cached_property
    def world(self) -> Array:
        return self.dp * self.cp * self.tp * self.pp

    def context_has(self, fact: Callable[[ContextMethod], bool]) -> Flags:
        """Which layouts have a kind of context parallelism with this property."""
        facts = np.array([fact(method) for method in CONTEXT_KINDS.values()])
        return facts[self.context.astype(np.int64)]

    def recompute_has(self, fact: Callable[[Recompute], float]) -> Array:
        """A number of each layout's rule of recomputation; 1 or 0 for what is true of it or not."""
        return np.array([float(fact(rule)) for rule in self.rules])[self.recompute.astype(np.int64)]

    def loss_chunks(self, shape: Shape, tokens: Array) -> Array:
        """Chunks of a loss over so many tokens; one, if the head's weight gradient is deferred."""
        rows = -(-shape.vocab // self.tp)
        return np.where(self.defers, 1.0, loss_chunks(tokens, rows, shape.width))

    @cached_property
    def defers(self) -> Flags:
        """Whether the schedule of a layout defers weight gradients: if any rank does, the last."""
        last = RankPosition(self.pp, self.microbatches, self.chunks, np.ones_like(self.pp), 2)
        flags = np.zeros(1, bool)
        for index in {int(value) for value in self.schedule.flat if DEFERS[int(value)]}:
            waiting = sum(moment.waiting for moment in FAMILIES[index].deferred(last))
            flags = flags | (self.schedule == index) & (waiting > 0)
        return flags & (self.pp > 1)

    def columns(self) -> Iterator[NDArray[Any]]:
        return map(self.__dict__.__getitem__, COLUMNS)

    def at(self, index: tuple[int, ...]) -> LayoutGrid:
        """One layout of a broadcast grid."""
        values = (
            column[
                tuple(
                    i if size > 1 else 0
                    for i, size in zip(index[-column.ndim :], column.shape, strict=True)
                )
            ]
            for column in self.columns()
        )
        return LayoutGrid(*(np.array([value]) for value in values), rules=self.rules)


COLUMNS = tuple(column.name for column in fields(LayoutGrid) if column.name != "rules")


def grid_of_plan(plan: Plan) -> LayoutGrid:
    """The grid of one layout, with the rules of all of its stages."""
    layout, batch = plan.layout, plan.batch
    rules = tuple(dict.fromkeys((*RULES, *plan.recompute.rules)))
    return LayoutGrid(
        tp=_one(layout.tp),
        cp=_one(layout.cp),
        pp=_one(layout.pp),
        replicate=_one(layout.replicate),
        shard=_one(layout.shard),
        ep=_one(layout.ep),
        etp=_one(layout.etp),
        zero=_one(layout.zero),
        chunks=_one(layout.chunks),
        microbatch_size=_one(batch.microbatch_size),
        microbatches=_one(batch.microbatches),
        recompute=_one(rules.index(plan.recompute.usual)),
        schedule=_one(schedule_index(plan.options.schedule if layout.pp > 1 else "1f1b")),
        sp=np.array([layout.sp]),
        offload=_one(OFFLOADS.index(plan.options.train.offload_kind)),
        context=_one(CONTEXTS.index(layout.context)),
        ep_nodes=_one(plan.ep_nodes),
        rules=rules,
    )


def _one(number: int) -> Array:
    return np.array([float(number)])


def along(axis: int, values: Sequence[float]) -> Array:
    """A column along one of the six axes of a block of layouts."""
    return np.array(values, float).reshape([-1 if index == axis else 1 for index in range(6)])


def layer_job(
    shape: Shape,
    grid: LayoutGrid,
    seq: int,
    itemsize: int,
    *,
    keeps_shards: bool,
    tp_chunks: int,
    node: int | None,
    balance: tuple[Balance, ...] = (),
    fp8: Fp8 | None = None,
    narrowing: float = 1.0,
) -> LayerJob:
    """What the collectives of layers depend on, in arrays; `node`: ranks of a node, if tokens go to
    each node once."""
    swaps = grid.context_has(lambda kind: kind.heads == "all")
    head_mask = grid.context_has(lambda kind: kind.heads == "some")
    inner = np.where(swaps, grid.cp, 1.0)
    if head_mask.any():
        pairs = np.broadcast(grid.tp, grid.cp)
        known = {pair: ulysses_degree(shape, *map(int, pair)) for pair in set(pairs)}
        pairs.reset()
        degrees = np.array([known[pair] for pair in pairs])
        inner = np.where(head_mask, degrees.reshape(pairs.shape), inner)
    outer = grid.cp / inner
    halves = np.where((outer > 1) & grid.context_has(lambda kind: kind.zigzag), 2, 1)
    unit = grid.cp * np.lcm(halves, np.where(grid.sp, grid.tp, 1).astype(np.int64))
    kv_heads = np.maximum(1, shape.kv_heads // grid.tp).astype(np.int64)
    return LayerJob(
        shape=shape,
        itemsize=itemsize,
        microbatch_size=grid.microbatch_size,
        seq=-(-seq // unit) * unit / grid.cp,
        tp=grid.tp,
        sp=grid.sp,
        etp=grid.etp,
        ep=grid.ep,
        ep_nodes=expert_nodes(grid, node),
        inner=inner,
        outer=outer,
        kv_heads=np.lcm(kv_heads, inner.astype(np.int64)),
        gathers=grid.context_has(lambda kind: kind.gathers),
        full=grid.recompute_has(lambda rule: rule.full),
        repeats={
            module: grid.recompute_has(partial(Recompute.repeats, module=module))
            for module in MODULES
        },
        attends_again=grid.recompute_has(lambda rule: rule.attends_again),
        keeps_shards=np.where(grid.sp & (grid.tp > 1), int(keeps_shards), 0),
        tp_chunks=tp_chunks,
        balance=balance,
        row_seq=seq,
        fp8=fp8,
        narrowing=narrowing,
    )


def expert_nodes(grid: LayoutGrid, node: int | None) -> Array:
    """Nodes of an ep group: as given, or as the machine is built."""
    if node is None:
        return np.ones_like(grid.ep)
    inside = np.minimum(grid.ep, np.ceil(node / grid.etp))
    nodes = grid.ep / np.gcd(grid.ep.astype(np.int64), inside.astype(np.int64))
    return np.where(grid.ep_nodes > 0, grid.ep_nodes, nodes)


def schedule_index(text: str) -> int:
    """The number of the schedule that a `--schedule` text names; a file is estimated like 1F1B."""
    return SCHEDULES.index("1f1b" if looks_like_file(text) else named(text).name)


def require_possible_imbalance(shape: Shape, imbalance: float) -> None:
    """Refuse a load that no routing can cause."""
    if shape.moe is None:
        if imbalance != 1:
            raise FivefoldError(f"imbalance needs experts, and {shape.name} has none: leave it out")
        return
    most = shape.moe.experts / shape.moe.top_k
    if not 1 <= imbalance <= most:
        raise FivefoldError(
            f"imbalance {imbalance:g}: the fullest expert can have 1 to {most:g} times the mean "
            f"({shape.moe.top_k} of {shape.moe.experts} experts per token, none twice)"
        )


def fullest_rank_load(
    moe: Moe,
    ep: Array,
    imbalance: float,
    balance: Sequence[Balance] = (),
    cuts: Array | float = 1.0,
) -> Array | float:
    """Slots of the rank with the fullest expert over those of the average rank.

    All other experts share the remaining slots evenly. So a rank with all experts has the average
    load whatever the routing, and a rank with one expert has the full imbalance. A capacity limits
    it; a padded one is also the least. It is that of a row: each of the `cuts` ranks that share one
    has room for all of it, or for all of its own tokens.
    """
    for rule in balance:
        if rule.pads:
            return np.minimum(rule.coefficient * cuts, moe.experts / moe.top_k)
        if rule.drops and rule.coefficient < 1:
            return rule.coefficient
        if rule.drops:
            imbalance = min(imbalance, rule.coefficient)
    if imbalance == 1:
        return 1.0
    num_experts = moe.experts / ep
    other = (moe.experts - imbalance) / (moe.experts - 1)
    return (imbalance + (num_experts - 1) * other) / num_experts
