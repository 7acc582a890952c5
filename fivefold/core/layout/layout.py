"""Layout: which rank does what. Grid, coords, groups, and the text form that every verb reads.

    world = dp · cp · tp · pp        dp = replicate × shard        edp = dp·cp·tp / (ep·etp)

Experts are folded over the ranks that the dense layers of a stage already use, so `ep` and `etp`
do not multiply the world. Inside a stage the ranks are numbered with tp fastest, then cp, then dp,
whatever the `order` on the machine. In that numbering every axis except pp is one (size, stride)
pair, and all groups follow from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast, get_args

from fivefold.core import BadFile, FivefoldError, IllegalLayout, UnknownName, counted, did_you_mean
from fivefold.core.layout.splits import CONTEXT_KINDS, ContextKind
from fivefold.core.schedule import MOST_CHUNKS

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from fivefold.core import Machine, Tier


Order = Literal["tp-cp-dp-pp", "tp-cp-pp-dp"]

DEGREES = ("replicate", "shard", "tp", "pp", "cp", "ep", "etp")
AXES = ("dp", "tp", "pp", "cp", "ep", "etp", "edp", "replicate", "shard", "fsdp", "dp-cp", "row")
# Far above any machine; without a limit a typo would be factored and drawn rank by rank.
MOST_RANKS = 1 << 20
ZERO_NAMES = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3}
_TEXT_KEYS = ("dp", "tp", "pp", "cp", "ep", "etp", "order")
_Whole = TypeVar("_Whole", int, "NDArray[numpy.int64]")


class Extent(NamedTuple):
    """How many ranks a group has, and their stride in the numbering with tp fastest."""

    size: int
    stride: int


class Coord(NamedTuple):
    """The coordinates of one rank, on every axis."""

    dp: int
    replicate: int
    shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    etp: int
    edp: int


class Textbook(NamedTuple):
    """The product N = N_dp · N_tp · N_pp · N_cp · N_ep, where N_dp counts whole sets of experts."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int


_ORDERS = get_args(Order)


@dataclass(frozen=True)
class Layout:
    """Degrees of the five axes, and how each is implemented.

    `sp` (sequence parallelism) matters only if tp > 1, `context` only if cp > 1; `chunks` is the
    number of stages on one pipeline rank.
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 3
    sp: bool = True
    context: ContextKind = "zigzag"
    chunks: int = 1
    order: Order = "tp-cp-dp-pp"

    def __post_init__(self) -> None:
        reasons = list(self._bad_fields())
        if reasons:
            raise IllegalLayout(str(self), reasons, [])

    def _bad_fields(self) -> Iterator[str]:
        wrong = [name for name in (*DEGREES, "chunks") if not _is_count(getattr(self, name))]
        for name in wrong:
            yield f"{name}={getattr(self, name)!r}: give a whole number of at least 1"
        if "chunks" not in wrong and self.chunks > MOST_CHUNKS:
            yield f"chunks={self.chunks}: give a whole number from 1 to {MOST_CHUNKS}"
        if not wrong and self.world > MOST_RANKS:
            yield f"{self.world:,} ranks: at most {MOST_RANKS:,} are supported; lower a degree"
        if self.zero not in range(4):
            yield f"zero={self.zero!r}: the ZeRO stages are 0, 1, 2 and 3"
        for name, kinds in (("context", CONTEXT_KINDS), ("order", _ORDERS)):
            value = getattr(self, name)
            if value not in kinds:
                yield f"{name}={value!r}: {did_you_mean(str(value), kinds)}"

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        zero: int | str | None = None,
        sp: bool = True,
        context: str = "zigzag",
        chunks: int = 1,
    ) -> Layout:
        """Read `dp=2x2 tp=2 pp=2`: omitted degrees are 1, `dp=RxS` is replicate × shard.

        The default ZeRO stage is 3, or 1 under a pipeline, where stages 2 and 3 would move
        gradients once per microbatch.
        """
        problems: list[str] = []
        fields = _fields_of(text, problems)
        stage = 1 if fields.get("pp", 1) > 1 else 3
        try:
            stage = stage if zero is None else parse_zero(zero)
        except FivefoldError as error:
            problems.append(str(error))
        if problems:
            raise BadFile(f'layout "{text}"', problems)
        return cls(**fields, zero=stage, sp=sp, context=cast(ContextKind, context), chunks=chunks)

    def __str__(self) -> str:
        data = f"{self.replicate}x{self.shard}" if self.replicate != 1 else str(self.shard)
        degrees = {"dp": data, "tp": self.tp, "pp": self.pp, "cp": self.cp}
        degrees |= {"ep": self.ep, "etp": self.etp}
        pairs = [f"{axis}={degree}" for axis, degree in degrees.items() if str(degree) != "1"]
        pairs = pairs or ["dp=1"]
        return " ".join(pairs if self.order == Layout.order else [*pairs, f"order={self.order}"])

    @property
    def dp(self) -> int:
        """Ranks that see different sequences."""
        return self.replicate * self.shard

    @property
    def stage_size(self) -> int:
        """Ranks that share one pipeline stage, over which experts are folded."""
        return self.dp * self.cp * self.tp

    @property
    def world(self) -> int:
        """All ranks."""
        return self.stage_size * self.pp

    @property
    def edp(self) -> int:
        """How often the experts of a stage are replicated."""
        self._require_folding()
        return self.stage_size // (self.ep * self.etp)

    @property
    def same_tokens(self) -> int:
        """How many replicas of an expert receive the same tokens: without sequence parallelism one
        for each tp rank that etp does not use."""
        return 1 if self.sp else self.tp // self.etp

    @property
    def folds(self) -> bool:
        """Whether the experts fit over the dense ranks."""
        return self.stage_size % (self.ep * self.etp) == 0

    def folding_rule(self) -> str:
        """The rule that `folds` tests, with this layout's numbers."""
        return (
            f"ep {self.ep} · etp {self.etp} = {self.ep * self.etp} must divide "
            f"dp {self.dp} · cp {self.cp} · tp {self.tp} = {self.stage_size}, the ranks of a stage "
            "that experts are folded over: lower ep or etp, or raise dp"
        )

    def grid(self) -> NDArray[numpy.int64]:
        """All ranks: one array dim per axis of `order`, the outermost first."""
        import numpy  # not needed to plan; its import would take longer than a whole plan

        sizes = [getattr(self, axis) for axis in reversed(self.order.split("-"))]
        return numpy.arange(self.world, dtype=numpy.int64).reshape(sizes)

    def rank(self, *, dp: int = 0, cp: int = 0, tp: int = 0, pp: int = 0) -> int:
        """The rank at these coords."""
        for axis, coord in (("dp", dp), ("cp", cp), ("tp", tp), ("pp", pp)):
            if not 0 <= coord < getattr(self, axis):
                raise FivefoldError(
                    f"{axis} coord {coord} is outside {self}: use 0 to {getattr(self, axis) - 1}"
                )
        return self._rank_at(tp + self.tp * (cp + self.cp * dp), pp)

    def coord(self, rank: int) -> Coord:
        """The coordinates of `rank` on every axis."""
        self._require_folding()
        number, stage = self._number_and_stage(rank)
        dp, inner = divmod(number, self.tp * self.cp)
        replicate, shard = divmod(dp, self.shard)
        cp, tp = divmod(inner, self.tp)
        edp, expert = divmod(number, self.ep * self.etp)
        ep, etp = divmod(expert, self.etp)
        return Coord(dp, replicate, shard, cp, tp, stage, ep, etp, edp)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The group of `rank` along `axis`, in order of their coord on it.

        Besides the five axes: `fsdp` is shard·cp, over which ZeRO shards the dense weights; `dp-cp`
        is dp·cp, over which loss and gradients are summed; `edp` does the same for experts; `row`
        shares the tokens of a row: cp, and tp under sequence parallelism.
        """
        number, stage = self._number_and_stage(rank)
        if axis == "pp":
            return tuple(self._rank_at(number, other) for other in range(self.pp))
        size, stride = self.extent(axis)
        first = number - number // stride % size * stride
        return tuple(self._rank_at(first + i * stride, stage) for i in range(size))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of `axis`, by their first rank; every rank is in one of them."""
        numbers = range(self.stage_size)
        stages = [[self._rank_at(number, stage) for number in numbers] for stage in range(self.pp)]
        if axis == "pp":
            return tuple(sorted(zip(*stages, strict=True)))
        size, stride = self.extent(axis)
        firsts = [number for number in numbers if number // stride % size == 0]
        spans = [slice(first, first + size * stride, stride) for first in firsts]
        return tuple(sorted(tuple(stage[span]) for stage in stages for span in spans))

    def extent(self, axis: str) -> Extent:
        """Size and stride of the groups of `axis`, with tp numbered fastest, then cp, dp and pp."""
        row = self.tp * self.cp
        extents = {
            "pp": (self.pp, self.stage_size),
            "tp": (self.tp, 1),
            "cp": (self.cp, self.tp),
            "dp": (self.dp, row),
            "shard": (self.shard, row),  # inside replicate: the heavier traffic stays nearer
            "replicate": (self.replicate, row * self.shard),
            "fsdp": (self.shard * self.cp, self.tp),
            "dp-cp": (self.dp * self.cp, self.tp),
            "row": (row, 1) if self.sp else (self.cp, self.tp),
            "etp": (self.etp, 1),
            "ep": (self.ep, self.etp),
        }
        if axis == "edp":
            return Extent(self.edp, self.etp * self.ep)
        if axis not in extents:
            raise UnknownName("axis", axis, AXES)
        return Extent(*extents[axis])

    def tier(self, axis: str, machine: Machine) -> Tier:
        """The slowest link tier that any group of `axis` spans on `machine`."""
        return self.tier_along(self.extent(axis), machine)

    def tier_along(self, extent: Extent, machine: Machine) -> Tier:
        """The same for the groups of any size and stride."""
        for tier in machine.tiers:
            if tier.size is None or self._stays_within(extent, tier.size):
                return tier
        return machine.tier_of((0, self.world - 1))  # raises with a way out if no tier is so wide

    def textbook(self) -> Textbook | None:
        """The same ranks as a plain product of five degrees; None if ep does not divide dp."""
        if self.dp % self.ep:
            return None
        return Textbook(self.dp // self.ep, self.tp, self.pp, self.cp, self.ep)

    def readings(self) -> tuple[str, str]:
        """The folded and the textbook reading of the degrees, one sentence each."""
        split = f"ep {self.ep}" if self.etp == 1 else f"ep {self.ep} × etp {self.etp}"
        folded = (
            f"folded: dp {self.dp} · cp {self.cp} · tp {self.tp} · pp {self.pp} "
            f"= {counted(self.world, 'rank')}, experts over {split} × edp {self.edp}"
        )
        product = self.textbook()
        if product is None:
            return folded, f"textbook: none, because ep {self.ep} does not divide dp {self.dp}"
        return folded, f"textbook: {' · '.join(map(str, product))} = {self.world:,}"

    def _require_folding(self) -> None:
        if not self.folds:
            raise IllegalLayout(str(self), [self.folding_rule()], [])

    def _stays_within(self, extent: Extent, domain: int) -> bool:
        """Whether no group spans two domains of so many ranks."""
        size, stride = extent
        if self.order == Layout.order and domain % (size * stride) == 0:  # groups lie in blocks
            return True
        first, last = self._ends(extent)
        return bool((first // domain == last // domain).all())

    def _ends(self, extent: Extent) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64]]:
        """The first and the last rank of every group."""
        import numpy

        size, stride = extent
        line = numpy.arange(self.world, dtype=numpy.int64)
        firsts = line[line // stride % size == 0]
        lasts = firsts + (size - 1) * stride
        first, last = (
            self._rank_at(ends % self.stage_size, ends // self.stage_size)
            for ends in (firsts, lasts)
        )
        return first, last

    def _rank_at(self, number: _Whole, stage: _Whole) -> _Whole:
        """The rank with this number inside this stage; also for arrays."""
        row = self.tp * self.cp
        if self.order == "tp-cp-dp-pp":
            return number + self.stage_size * stage
        return number % row + row * (stage + self.pp * (number // row))

    def _number_and_stage(self, rank: int) -> tuple[int, int]:
        """The number of a rank inside its stage, and the stage."""
        if not 0 <= rank < self.world:
            raise FivefoldError(f"rank {rank} is outside {self}: use 0 to {self.world - 1}")
        if self.order == "tp-cp-dp-pp":
            stage, number = divmod(rank, self.stage_size)
            return number, stage
        outer, inner = divmod(rank, self.tp * self.cp)
        data, stage = divmod(outer, self.pp)
        return inner + self.tp * self.cp * data, stage


def parse_zero(stage: int | str) -> int:
    """A ZeRO stage from its number or FSDP's name for it (`FULL_SHARD` is 3)."""
    name = str(stage).strip().upper()
    if name in [*"0123"]:
        return int(name)
    if name == "HYBRID_SHARD":
        raise FivefoldError(
            "HYBRID_SHARD is a layout here, not a ZeRO stage: write dp=RxS (R replicas of S shards)"
            " with stage 3"
        )
    if name not in ZERO_NAMES:
        raise UnknownName(
            "ZeRO stage", str(stage), ["0", "1", "2", "3", *map(str.lower, ZERO_NAMES)]
        )
    return ZERO_NAMES[name]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _fields_of(text: str, problems: list[str]) -> dict[str, Any]:
    """The fields that a layout text sets; errors are appended to `problems`."""
    fields: dict[str, Any] = {}
    seen: set[str] = set()
    for word in text.replace(",", " ").split():
        key, equals, value = word.partition("=")
        if not equals:
            problems.append(f"{word!r} is not a degree: write axis=number, such as tp=2")
        elif key not in _TEXT_KEYS:
            problems.append(f"unknown axis {key!r}: {did_you_mean(key, _TEXT_KEYS)}")
        elif key in seen:
            problems.append(f"{key} is given twice: keep one")
        elif key == "order" and value not in get_args(Order):
            problems.append(f"{word}: {did_you_mean(value, get_args(Order))}")
        elif key == "order":
            fields[key] = value
        else:
            fields |= _degree(key, value, problems)
        seen.add(key)
    return fields


def _degree(axis: str, value: str, problems: list[str]) -> dict[str, int]:
    """`tp=2` as {tp: 2}; `dp=2x4` as {replicate: 2, shard: 4}, `dp=4` as {shard: 4}."""
    number = r"([1-9][0-9]{0,8})"
    match = re.fullmatch(f"{number}(?:x{number})?" if axis == "dp" else number, value)
    degrees = [int(degree) for degree in match.groups() if degree] if match else [MOST_RANKS + 1]
    if max(degrees) > MOST_RANKS:
        form = "N or RxS (replicate x shard)" if axis == "dp" else "N"
        problems.append(
            f"{axis}={value}: write {axis}={form} with whole numbers from 1 to {MOST_RANKS:,}"
        )
        return {}
    if axis != "dp":
        return {axis: degrees[0]}
    return {"replicate": degrees[0], "shard": degrees[1]} if degrees[1:] else {"shard": degrees[0]}
