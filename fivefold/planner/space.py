"""Every layout that the runtime can run for a model on so many GPUs, in blocks of arrays.

Degrees are checked with the same rules that refuse a layout anywhere else. They are combined with
all choices that do not fix the degrees: microbatch size, schedule, ZeRO stage, recomputation,
offload.

From one element of a grid back to the options of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray

from fivefold.core import BadFile, FivefoldError, UnknownName
from fivefold.core.layout import (
    ContextKind,
    Layout,
    LayoutRequest,
    context_rule,
    divisors,
    experts_rule,
    gradients_rule,
    nodes_rule,
    overlap_rule,
    pipeline_rule,
    tensor_rule,
)
from fivefold.core.model import Recompute, Shape
from fivefold.core.plan import PlanOptions, key_request
from fivefold.core.schedule import FAMILIES, Family
from fivefold.cost import CONTEXTS, OFFLOADS, RULES, SCHEDULES, Flags, LayoutGrid, along
from fivefold.cost.stages import breaks_rules


def layout_of(grid: LayoutGrid) -> Layout:
    """The layout of a one-element grid."""
    return Layout(
        replicate=_integer(grid, "replicate"),
        shard=_integer(grid, "shard"),
        tp=_integer(grid, "tp"),
        pp=_integer(grid, "pp"),
        cp=_integer(grid, "cp"),
        ep=_integer(grid, "ep"),
        etp=_integer(grid, "etp"),
        zero=_integer(grid, "zero"),
        sp=bool(grid.sp.item()),
        context=CONTEXTS[_integer(grid, "context")],
        chunks=_integer(grid, "chunks"),
    )


def options_of(grid: LayoutGrid, base: PlanOptions) -> PlanOptions:
    """`base` with everything that a one-element grid decides; no choice of layout stays open."""
    layout = layout_of(grid)
    return replace(
        base,
        layout=str(layout),
        gpus=layout.world,
        zero=layout.zero,
        gather=None,
        sp=layout.sp,
        context=layout.context,
        schedule=SCHEDULES[_integer(grid, "schedule")],
        chunks=layout.chunks,
        stage_layers=None,
        microbatches=_integer(grid, "microbatches"),
        microbatch_size=_integer(grid, "microbatch_size"),
        batch=None,
        recompute=str(grid.rules[_integer(grid, "recompute")]),
        train=base.train.with_offload(OFFLOADS[_integer(grid, "offload")]),
    )


def _integer(grid: LayoutGrid, name: str) -> int:
    return round(float(getattr(grid, name).item()))


MOST_MICROBATCH_SIZE = 32  # sequences: more only fills the memory
MOST_CHUNKS = 8
_AT_ONCE = 512  # degrees that are estimated together: with fewer, calls of numpy take the time


@dataclass(frozen=True)
class SearchSpace:
    """A job on so many GPUs, and the choices that are fixed already."""

    shape: Shape
    gpus: int
    seq: int
    batch: int  # sequences per step
    domains: tuple[int, ...] = ()  # sizes of domains inside which sharding may stay
    fixed: Mapping[str, int | str] | None = None
    least_pp: int = 1  # pipeline ranks
    tp_inside: int | None = None  # GPUs of a domain that no group of tp leaves
    only: Mapping[str, frozenset[int | str]] | None = None  # values that choices may have
    options: PlanOptions | None = None  # whose other keys every layout must suit

    @property
    def gpus_text(self) -> str:
        """The number of GPUs in words."""
        return f"{self.gpus:,} GPU{'' if self.gpus == 1 else 's'}"

    @property
    def rules(self) -> tuple[Recompute, ...]:
        """Rules of recomputation: the usual ones, and one that is fixed."""
        rule = (self.fixed or {}).get("recompute")
        if "@" in str(rule):
            raise FivefoldError(
                f"recompute {rule}: rules for some stages need stages; give a --layout, or one "
                "rule for all stages"
            )
        return tuple(dict.fromkeys((*RULES, *([Recompute.parse(str(rule))] if rule else []))))

    @cached_property
    def job(self) -> LayoutRequest:
        """What the rules of legality ask, for this space as for one plan."""
        if self.options is None:
            return LayoutRequest(seq=self.seq)
        return LayoutRequest(seq=self.seq, **key_request(self.options))

    @property
    def offloads(self) -> list[int]:
        """The legal indices of `OFFLOADS`."""
        return [i for i, name in enumerate(OFFLOADS) if self._takes_offload(name)]

    def _takes_offload(self, name: str) -> bool:
        if not self.allows("offload", name) or self.options is None:
            return self.allows("offload", name)
        try:
            return bool(self.options.train.with_offload(name))
        except FivefoldError:  # such as for an optimizer that keeps its states on the device
            return False

    def allows(self, name: str, value: int | str) -> bool:
        listed = (self.only or {}).get(name)
        fits = self.fixed is None or self.fixed.get(name, value) == value
        return fits and (listed is None or value in listed)


class Degrees(NamedTuple):
    """The degrees that decide how a layer is sharded."""

    tp: int
    cp: int
    context: str
    pp: int
    dp: int
    ep: int
    etp: int

    def layout(self, sp: bool, zero: int = 0, replicate: int = 1) -> Layout:
        """The layout of these degrees with one kind of sharding."""
        return Layout(
            replicate=replicate,
            shard=self.dp // replicate,
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            etp=self.etp,
            zero=zero,
            sp=sp,
            context=cast(ContextKind, self.context),
        )


@dataclass(frozen=True)
class LayoutBlock:
    """Layouts with equal pp and dp: some degrees with every other choice.

    The columns of the grid have six axes: degrees, microbatch size, schedule, sharding,
    recomputation, offload. Each column extends along one or two of them. Arithmetic then
    broadcasts, and what depends on few axes is computed once for all others. `legal`: which
    schedules can run which microbatches.
    """

    degrees: tuple[Degrees, ...]
    grid: LayoutGrid
    legal: NDArray[np.bool_]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(column.shape for column in self.grid.columns()))

    @property
    def size(self) -> int:
        """Number of legal layouts."""
        legal, shape = self.legal, self.shape
        return int(legal.sum()) * (math.prod(shape) // legal.size)

    def only(self, stays: Sequence[Flags]) -> LayoutBlock:
        """The same block for what stays along each axis."""
        columns = [
            column if column.ndim < 6 else select(column, stays) for column in self.grid.columns()
        ]
        degrees = tuple(degree for degree, flag in zip(self.degrees, stays[0], strict=True) if flag)
        grid = LayoutGrid(*columns, rules=self.grid.rules)
        return LayoutBlock(degrees, grid, select(self.legal, stays))

    def leanest_shardings(self) -> LayoutBlock:
        """The same block with the fewest replicas of each ZeRO stage: they never need more memory
        than the others."""
        replicate, zero = self.grid.replicate.ravel(), self.grid.zero.ravel()
        stays = [np.ones(size, bool) for size in self.shape]
        stays[3] = replicate == [replicate[zero == stage].min() for stage in zero]
        return self.only(stays)

    def listed(self, places: NDArray[np.int64]) -> LayoutBlock:
        """Some layouts one by one, by their places in the block: columns of one axis."""
        index = np.unravel_index(places, self.shape)
        columns = (np.broadcast_to(column, self.shape)[index] for column in self.grid.columns())
        return LayoutBlock((), LayoutGrid(*columns, rules=self.grid.rules), np.ones(1, bool))


def select(array: NDArray[Any], stays: Sequence[Flags]) -> NDArray[Any]:
    """What stays of an array along each axis; an axis of one entry belongs to all."""
    for axis, which in enumerate(stays):
        if array.shape[axis] > 1 and not which.all():
            array = np.compress(which, array, axis)
    return array


def needed(which: Flags, shape: tuple[int, ...]) -> list[Flags]:
    """Along each axis of a block of this shape, what the layouts of a broadcast mask need."""
    # The mask is read twice, for three axes each.
    halves: list[Flags] = [np.asarray(which.any(axis=axes)) for axes in ((3, 4, 5), (0, 1, 2))]
    pairs = ((1, 2), (0, 2), (0, 1))
    stays = [np.asarray(half.any(axis=pair)) for half in halves for pair in pairs]
    return [np.broadcast_to(flags, size) for flags, size in zip(stays, shape, strict=True)]


def layout_blocks(space: SearchSpace) -> Iterator[LayoutBlock]:
    """All layouts of the search space."""
    groups: dict[tuple[int, int, bool], list[Degrees]] = {}
    for degrees in all_degrees(space):
        # With one rank in the shard group nothing is sharded.
        groups.setdefault((degrees.pp, degrees.dp, degrees.dp * degrees.cp == 1), []).append(
            degrees
        )
    for group in groups.values():
        for start in range(0, len(group), _AT_ONCE):
            block = _block(space, tuple(group[start : start + _AT_ONCE]))
            if block is not None:
                yield block


def _block(space: SearchSpace, degrees: tuple[Degrees, ...]) -> LayoutBlock | None:
    first_degrees, fixed, allows = degrees[0], space.fixed or {}, space.allows
    per_rank = space.batch // first_degrees.dp
    rows = [
        n for n in divisors(per_rank) if n <= MOST_MICROBATCH_SIZE and allows("microbatch_size", n)
    ]
    schedules = list(_schedules(space, first_degrees.pp))
    sharding = [
        pair
        for pair in _sharding(space, first_degrees)
        if allows("zero", pair[0]) and allows("replicate", pair[1])
    ]
    rules = space.rules
    repeats = [i for i, rule in enumerate(rules) if allows("recompute", str(rule))]
    offloads = space.offloads
    if not (rows and schedules and sharding and repeats and offloads):
        return None
    legal = np.array(
        [
            [
                not breaks_rules(family.name, first_degrees.pp, chunks, per_rank // n)
                for family, chunks in schedules
            ]
            for n in rows
        ]
    )
    numbers = [
        (degree.tp, degree.cp, CONTEXTS.index(degree.context), degree.ep, degree.etp)
        for degree in degrees
    ]
    tp, cp, context, ep, etp = (along(0, column) for column in zip(*numbers, strict=True))
    replicate = along(3, [pair[1] for pair in sharding])
    grid = LayoutGrid(
        tp=tp,
        cp=cp,
        pp=along(
            0, [first_degrees.pp]
        ),  # like dp the same for all: what depends on it alone is short
        replicate=replicate,
        shard=first_degrees.dp / replicate,
        ep=ep,
        etp=etp,
        zero=along(3, [pair[0] for pair in sharding]),
        chunks=along(2, [chunks for _, chunks in schedules]),
        microbatch_size=along(1, rows),
        microbatches=along(1, [per_rank // n for n in rows]),
        recompute=along(4, repeats),
        schedule=along(2, [SCHEDULES.index(family.name) for family, _ in schedules]),
        sp=np.full((1,) * 6, bool(fixed.get("sp", True))),
        offload=along(5, offloads),
        context=context,
        rules=rules,
    )
    legal = legal.reshape(1, len(rows), len(schedules), 1, 1, 1)
    return LayoutBlock(degrees, grid, legal & _suits_keys(space, degrees, rows, sharding))


def _suits_keys(
    space: SearchSpace,
    degrees: tuple[Degrees, ...],
    rows: list[int],
    sharding: list[tuple[int, int]],
) -> Flags:
    """Whether keys allow microbatch sizes and shardings of degrees; most jobs have no such key."""
    job, sp = space.job, bool((space.fixed or {}).get("sp", True))
    suits = np.ones((1,) * 6, bool)
    if job.get("tp_overlap", 1) > 1:
        sizes = [cast(LayoutRequest, {**job, "microbatch_size": size}) for size in rows]
        cuts = [
            [not any(overlap_rule(degree.layout(sp), space.shape, size)) for size in sizes]
            for degree in degrees
        ]
        suits = suits & np.array(cuts).reshape(len(degrees), len(rows), 1, 1, 1, 1)
    if job.get("offloads_grads"):
        cuts = [
            [
                not any(gradients_rule(degree.layout(sp, *pair), space.shape, job))
                for pair in sharding
            ]
            for degree in degrees
        ]
        suits = suits & np.array(cuts).reshape(len(degrees), 1, 1, len(sharding), 1, 1)
    return suits


def all_degrees(space: SearchSpace) -> Iterator[Degrees]:
    """Every legal way to divide the GPUs among the axes."""
    shape, gpus = space.shape, space.gpus
    job, sp = space.job, bool((space.fixed or {}).get("sp", True))
    depths = [pp for pp in divisors(gpus) if not any(pipeline_rule(Layout(pp=pp), shape, job))]
    spreads = job.get("ep_nodes") is not None or job.get("pads")
    experts: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by tp and by cp times dp
    for tp in tensor_degrees(space):
        for cp, context in product(divisors(gpus // tp), CONTEXTS):
            layout = Layout(tp=tp, cp=cp, context=context, sp=sp)
            allowed = space.allows("cp", layout.cp)
            if layout.cp == 1:  # sequence parallelism may pad sequences even so
                allowed = allowed and layout.context == CONTEXTS[0]
            else:
                allowed = allowed and space.allows("context", layout.context)
            if not (allowed and not any(context_rule(layout, space.shape, job))):
                continue
            for pp in depths:
                dp, left = divmod(gpus, tp * cp * pp)
                if pp < space.least_pp or left or space.batch % dp:
                    continue
                if space.allows("pp", pp) and space.allows("dp", dp):
                    if (tp, cp * dp) not in experts:
                        experts[tp, cp * dp] = list(_experts(space, tp, cp, dp))
                    for ep, etp in experts[tp, cp * dp]:
                        degrees = Degrees(tp, cp, context, pp, dp, ep, etp)
                        if not spreads or not any(nodes_rule(degrees.layout(sp), shape, job)):
                            yield degrees


def tensor_degrees(space: SearchSpace) -> Iterator[int]:
    """The legal numbers of tensor ranks, rising."""
    job, domain = space.job, space.tp_inside
    for tp in divisors(space.gpus):
        if not space.allows("tp", tp) or (domain is not None and domain % tp):
            continue
        if not any(tensor_rule(Layout(tp=tp), space.shape, job)):
            yield tp


def _experts(space: SearchSpace, tp: int, cp: int, dp: int) -> Iterator[tuple[int, int]]:
    moe = space.shape.moe
    if moe is None:
        yield from [(1, 1)] if space.allows("ep", 1) and space.allows("etp", 1) else []
        return
    job, sp = space.job, bool((space.fixed or {}).get("sp", True))
    for ep, etp in product(divisors(moe.experts), divisors(tp)):
        if space.allows("ep", ep) and space.allows("etp", etp):
            layout = Layout(tp=tp, cp=cp, shard=dp, ep=ep, etp=etp, sp=sp)
            if not any(experts_rule(layout, space.shape, job)):
                yield ep, etp


def _schedules(space: SearchSpace, pp: int) -> Iterator[tuple[Family, int]]:
    """Schedules with their chunks; without a pipeline there is one, whatever may be chosen."""
    alone = (space.fixed or {}).get("schedule", "1f1b")
    for family in FAMILIES:
        allowed = space.allows("schedule", family.name) if pp > 1 else family.name == alone
        if family.asynchronous or not allowed:
            continue
        for chunks in _chunks(family, space.shape.layers // pp) if pp > 1 else (1,):
            if space.allows("chunks", chunks):
                yield family, chunks


def _chunks(family: Family, most: int) -> range:
    """Possible numbers of chunks per rank, at most one per layer."""
    highest = MOST_CHUNKS if family.max_chunks is None else family.max_chunks
    return range(family.min_chunks, min(highest, most) + 1)


def _sharding(space: SearchSpace, degrees: Degrees) -> Iterator[tuple[int, int]]:
    """ZeRO stages with their replicas: all ranks shard, or those of one domain."""
    inner, dp = degrees.tp * degrees.cp, degrees.dp
    yield 0, 1
    if dp * degrees.cp == 1:
        return
    shards = {size // inner for size in space.domains if size % inner == 0}
    for zero in (1, 2, 3):
        yield zero, 1
        for shard in sorted(shards):
            if 1 < shard < dp and dp % shard == 0:
                yield zero, dp // shard


# --- Choices that a user fixes

_NUMBERS = ("tp", "cp", "pp", "dp", "replicate", "ep", "etp", "zero", "chunks", "microbatch_size")
FIXED = (*_NUMBERS, "schedule", "recompute", "context", "offload")


def parse_fixed(text: str) -> dict[str, int | str]:
    """`tp=8 schedule=zb-v` as a table; refuses unknown keys and values."""
    choices: dict[str, int | str] = {}
    for word in text.replace(",", " ").split():
        key, _, value = word.partition("=")
        if key not in FIXED:
            raise UnknownName("fix", key, FIXED)
        if not value or (key in _NUMBERS and not value.isdecimal()):
            raise BadFile("fix", [f"{word!r}: write {key}= and a value, as in tp=8 schedule=1f1b"])
        choices[key] = int(value) if value.isdecimal() else value
    options = {"context": get_args(ContextKind), "offload": OFFLOADS}
    for key, known in options.items():
        if key in choices and choices[key] not in known:
            raise UnknownName(f"fix {key}", str(choices[key]), known)
    return choices
