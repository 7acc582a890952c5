"""The cluster as numbers: FLOP/s, memory, link tiers, host; each number with its source.

Units are bytes, seconds, FLOP/s and dollars. Bandwidths are one way and raw, as in the datasheet;
`Efficiency` says what software reaches of them. "GPU" is whatever one rank drives: a GPU, a TPU
chip, or one CPU process on a laptop. A machine is a preset name or a TOML file; a file may start
from a preset with `base = "h100"` and override some of its numbers.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from math import inf, prod
from pathlib import Path
from typing import Any, Literal, TypeGuard, cast

from fivefold.core import tables
from fivefold.core.errors import BadFile, FivefoldError, UnknownName, counted, did_you_mean
from fivefold.core.precision import PRECISIONS

Topology = Literal["switch", "torus", "ring"]

PRESETS = Path(__file__).parent.parent / "presets"
_MOST_USED = "h100"
_NEAR = 0.7  # of the letters of a name, for a suggestion


@dataclass(frozen=True)
class Link:
    """One kind of link, as one GPU sees it."""

    name: str
    bandwidth: float  # bytes/s one way, over all of a GPU's lanes
    latency: float  # seconds per hop
    source: str
    topology: Topology = "switch"
    rings: int = 1  # rings through each GPU; a group along one of them has bandwidth / rings
    trees: bool = True  # sums may go up and down a tree of domains, not only around a ring


@dataclass(frozen=True)
class Tier:
    """The link that connects a domain of `size` consecutive ranks; without a size, all ranks."""

    name: str
    link: Link
    size: int | None = None
    links_per_gpu: float = 1.0  # 0.5 where two GPUs share a network card
    reduces: bool = False  # its switches reduce (SHARP): a sum goes up and down once
    torus: tuple[int, ...] = ()  # ranks along each dimension, without a switch

    @property
    def bandwidth(self) -> float:
        """Bytes/s one way of each GPU when its whole domain communicates at once."""
        return self.link.bandwidth * self.links_per_gpu


@dataclass(frozen=True)
class Rates:
    """Dense FLOP/s of one GPU by precision; None if the hardware does not have it."""

    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    nvfp4: float | None = None
    tf32: float | None = None
    fp32: float | None = None
    fp64: float | None = None

    def known(self) -> dict[str, float]:
        """The rates that are set, by dtype."""
        rates = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {dtype: rate for dtype, rate in rates if rate is not None}


@dataclass(frozen=True)
class Host:
    """What a node has for offload: `memory` and NVMe are per node, `link` is per GPU."""

    memory: float
    link: Link
    nvme_bytes: float | None = None
    nvme_bandwidth: float | None = None


@dataclass(frozen=True)
class Efficiency:
    """What software reaches of the hardware's numbers; `calibrate` measures it.

    A matmul takes its FLOPs over `matmul` of the peak, plus `start` seconds for ramp-up and a last
    wave that is not full. `unfused`: attention as separate matmuls. `links`: shares of the tiers'
    bandwidths, from the innermost. `forward_host` and `backward_host`: seconds of a layer without
    experts for the host's program, where a rank is a process on a CPU, which then computes nothing.
    """

    matmul: float = 0.80
    matmul_fp8: float = 0.65
    matmul_fp4: float = 0.40  # assumed
    start: float = 30e-6
    memory: float = 0.80
    attention: float = 0.50
    softmax_dims: float = 0.0  # of fused attention: the softmax of a pair, in dims of a head
    short_keys: float = 0.0  # and the start of a query, in keys
    attention_old: float = 0.35  # FlashAttention-2
    unfused: float = 0.45
    links: tuple[float, ...] = (0.75, 0.70)
    forward_host: float = 0.0
    backward_host: float = 0.0


@dataclass(frozen=True)
class Machine:
    """A cluster of one kind of GPU; `tiers` start with the innermost link."""

    name: str
    chip: str
    gpus_per_node: int
    peaks: Rates
    memory: float  # what a program sees, which is less than the datasheet says
    memory_bandwidth: float
    tiers: tuple[Tier, ...]
    host: Host
    matmul_measured: Rates = Rates()  # the best published measurement of a matmul
    efficiency: Efficiency = Efficiency()
    price_per_gpu_hour: float | None = None
    gpu_mtbf_hours: float | None = None  # between interruptions of a job, for each of its GPUs
    sources: dict[str, str] = field(default_factory=dict[str, str], hash=False)  # by field name
    # Numbers that were fitted to step times, by dotted name, and the sources of these runs.
    fitted: dict[str, str] = field(default_factory=dict[str, str], hash=False)

    def __post_init__(self) -> None:
        problems = [*_bad_numbers(self), *_bad_tiers(self), *_bad_sources(self)]
        problems += _bad_shares(self.efficiency)
        if problems:
            raise FivefoldError("; ".join(problems))

    def peak(self, dtype: str) -> float:
        """Dense peak FLOP/s of one GPU in `dtype`."""
        known = self.peaks.known()
        if dtype in PRECISIONS and PRECISIONS[dtype].peak in known:
            return known[PRECISIONS[dtype].peak]
        if dtype not in known:
            options = ", ".join(known)
            raise FivefoldError(f"{self.name} has no peak for {dtype!r}: choose from {options}")
        return known[dtype]

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are processes on CPU cores, whose host does not work ahead of a device."""
        return self.efficiency.forward_host > 0

    def disk_bandwidth(self) -> float:
        """Bytes/s of a node's local disks."""
        if self.host.nvme_bytes is None or self.host.nvme_bandwidth is None:
            raise FivefoldError(
                f"{self.name} has no local disks to offload to: give host.nvme_bytes and "
                "host.nvme_bandwidth in a machine file, or offload to cpu"
            )
        return self.host.nvme_bandwidth

    def tier_of(self, ranks: Sequence[int]) -> Tier:
        """The innermost tier with one domain that contains all `ranks`."""
        low, high = min(ranks), max(ranks)
        for tier in self.tiers:
            if tier.size is None or low // tier.size == high // tier.size:
                return tier
        outermost = self.tiers[-1]
        raise FivefoldError(
            f"ranks {low} to {high} do not fit in one {outermost.name!r} domain of "
            f"{outermost.size} GPUs, the outermost of {self.name}: add a tier without a size, "
            "or use fewer ranks"
        )


def load(name_or_path: str | Path) -> Machine:
    """The machine of a preset name in any case, of a TOML file (with a slash or `.toml`), or of a
    text that `to_text` wrote."""
    if isinstance(name_or_path, str) and name_or_path.startswith("{"):
        try:
            return _build(json.loads(name_or_path), "the machine")
        except json.JSONDecodeError as error:
            raise BadFile("the machine", [f"{error}; give a name or a TOML file"]) from error
    if isinstance(name_or_path, Path) or re.search(r"[/\\]|\.toml$", name_or_path):
        return _build(_read(Path(name_or_path)), str(name_or_path))
    name = name_or_path.lower()
    if name not in presets():
        raise UnknownName("machine", name_or_path, presets(), _hint(name))
    return _preset(name)


def _hint(name: str) -> str:
    """What to give instead of a name that is no preset."""
    # A chip is letters and a number: mi300x is no typo of b300.
    near = [
        preset
        for preset in difflib.get_close_matches(name, presets(), n=3, cutoff=_NEAR)
        if preset[0] == name[0]
    ]
    return (
        (f"did you mean {' or '.join(near)}? " if near else "")
        + f"known machines: {', '.join(presets())}. Describe another one in a TOML file, "
        '--machine my.toml, which starts with base = "h100" and sets the numbers that differ '
        "(chip, peaks, memory, memory_bandwidth, tiers), or measure this one: fivefold calibrate "
        "-o my.toml"
    )


@lru_cache
def load_without(name: str, source: str) -> Machine:
    """A preset in which every number that was fitted to `source` alone is left to its base, or else
    to h100."""
    if not source or name not in presets():
        return load(name)
    return _build(_read(_preset_file(name), source), f"machine {name}")


@lru_cache
def _preset(name: str) -> Machine:
    return _build(_read(_preset_file(name)), f"machine {name}")


@lru_cache
def presets() -> tuple[str, ...]:
    """The names of all machine presets."""
    return tuple(sorted(path.stem for path in (PRESETS / "machines").glob("*.toml")))


def fitted_numbers(name: str) -> Iterator[tuple[str, str, str]]:
    """The key, the value in words and the sources of every fitted number in a preset's own file."""
    table = tables.read_toml(_preset_file(name))
    for key, sources in cast("dict[str, str]", table.get("fitted", {})).items():
        value: Any = table
        for part in key.split("."):
            value = value[part]
        yield key, repr(value), sources


def links() -> dict[str, Link]:
    """All link presets, by name."""
    return {
        name: tables.build(Link, table, f"link {name}") for name, table in _link_tables().items()
    }


def to_table(machine: Machine) -> dict[str, Any]:
    """The machine as a table for `tables.to_toml`; `load` reads it back as an equal value."""
    table = tables.table_of(machine)
    tiers = {tier.name: tables.table_of(tier) for tier in machine.tiers}
    for tier in tiers.values():
        del tier["name"]  # it is the key
    return {**table, "tiers": tiers}


def to_text(machine: Machine) -> str:
    """The machine as a text that `load` reads, so that a plan can have one that is in no file."""
    return json.dumps(to_table(machine))


def _preset_file(name: str) -> Path:
    return PRESETS / "machines" / f"{name}.toml"


def _link_tables() -> dict[str, dict[str, Any]]:
    return {
        name: {"name": name, **table}
        for name, table in tables.read_toml(PRESETS / "links.toml").items()
    }


def _read(path: Path, without: str = "") -> dict[str, Any]:
    """The file's table, on top of its base's if it names one."""
    table = tables.read_toml(path)
    if without:
        _leave_out(table, without)
    base = table.pop("base", None)
    if base is not None:
        if base not in presets():
            raise BadFile(str(path), [f"base = {base!r}: {did_you_mean(str(base), presets())}"])
        parent = _read(_preset_file(base), without)
        del parent["name"]
        # The base's source does not apply to a number that the file overrides.
        parent["sources"] |= {key: f"set in {path.name}" for key in _sourced() if key in table}
        table = _overlay(parent, table)
    return {"name": path.stem, **table}


def _leave_out(table: dict[str, Any], source: str) -> None:
    """Take out what was fitted to this source alone. A file without a base has the shares of the
    chip that most sources ran on instead."""
    fitted = cast("dict[str, str]", table.get("fitted", {}))
    for key in [rate_name for rate_name, sources in fitted.items() if sources == source]:
        inner, *path = table, *key.split(".")
        for name in path[:-1]:
            inner = inner[name]
        del inner[path[-1]]
        if "base" not in table and path[0] == "efficiency":
            usual = tables.read_toml(_preset_file(_MOST_USED))["efficiency"]
            inner[path[-1]] = usual[path[-1]]


def _overlay(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over`'s values win; tables are merged key by key."""
    merged = {**under, **over}
    for key in under.keys() & over.keys():
        if _is_table(under[key]) and _is_table(over[key]):
            merged[key] = _overlay(under[key], over[key])
    return merged


def _build(table: dict[str, Any], where: str) -> Machine:
    problems: list[str] = []
    names: list[str] = []
    if _is_table(tiers := table.get("tiers")):
        rows = _tier_rows(tiers, problems)
        names = [row["name"] for row in rows]
        table = {**table, "tiers": rows}
    elif "tiers" in table:
        raise BadFile(where, ["tiers: write a table for each, as [tiers.nvlink] with its link"])
    if _is_table(host := table.get("host")):
        table = {**table, "host": _with_link(host, "host", problems)}
    try:
        machine = tables.build(Machine, table, where)
    except BadFile as error:
        at_tier = re.compile(r"tiers\[(\d+)\]")  # numbers there, names in the file
        problems += [
            at_tier.sub(lambda m: f"tiers.{names[int(m[1])]}", problem)
            for problem in error.problems
        ]
        raise BadFile(where, problems) from error
    if problems:
        raise BadFile(where, problems)
    return machine


def _tier_rows(tiers: dict[str, Any], problems: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, tier in tiers.items():
        if _is_table(tier):
            rows.append({"name": name, **_with_link(tier, f"tiers.{name}", problems)})
        else:
            problems.append(f"tiers.{name} = {tier!r}: expected a table with a link")
    return sorted(rows, key=lambda row: row["size"] if isinstance(row.get("size"), int) else inf)


def _with_link(row: dict[str, Any], path: str, problems: list[str]) -> dict[str, Any]:
    """Replace the name of a link by its table; an unknown name is added to the problems."""
    name = row.get("link")
    if not isinstance(name, str):
        return row
    known = _link_tables()
    if name not in known:
        problems.append(f"{path}.link = {name!r}: {did_you_mean(name, known)}")
    return {**row, "link": known.get(name, next(iter(known.values())))}


def _is_table(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _sourced() -> list[str]:
    """The fields of a machine that are numbers, each of which has a source."""
    no_numbers = ("name", "chip", "sources", "fitted")
    return [field.name for field in fields(Machine) if field.name not in no_numbers]


def _bad_numbers(machine: Machine) -> Iterator[str]:
    for name, number in _numbers(machine, ""):
        if not 0 < number < inf and not (number == 0 and name.endswith("latency")):
            yield f"{name} = {number}: give a finite number above 0"
    if not machine.peaks.known():
        yield "peaks is empty: give the FLOP/s of one dtype at least"


def _numbers(value: object, path: str) -> Iterator[tuple[str, float]]:
    """Every number inside `value`, with its dotted name as in a file."""
    if isinstance(value, (Machine, Host, Tier, Link, Rates)):
        for field in fields(value):
            yield from _numbers(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple):
        for tier in cast("tuple[Tier | int, ...]", value):
            yield from _numbers(tier, f"{path}.{tier.name}" if isinstance(tier, Tier) else path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path.removeprefix("."), value


_UNITS = {
    **dict.fromkeys(("start", "forward_host", "backward_host"), "seconds"),
    "softmax_dims": "dims of a head",
    "short_keys": "keys",
}


def _bad_shares(reach: Efficiency) -> Iterator[str]:
    """Software reaches at most what the hardware has."""
    for constant in fields(reach):
        value = getattr(reach, constant.name)
        shares = cast("tuple[float, ...]", value) if constant.name == "links" else (value,)
        if (unit := _UNITS.get(constant.name)) is not None:
            if not 0 <= value < inf:
                yield f"efficiency.{constant.name} = {value}: give {unit}, 0 or more"
        elif not shares or not all(0 < share <= 1 for share in shares):
            yield f"efficiency.{constant.name} = {value}: give shares above 0, of 1 at most"


def _bad_tiers(machine: Machine) -> Iterator[str]:
    """Domains must nest, or "the innermost tier that contains these ranks" has no meaning."""
    if not machine.tiers:
        yield "tiers is empty: give one tier at least"
    for tier in machine.tiers:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", tier.name):  # else it is no TOML key
            yield f"tier name {tier.name!r}: use letters, digits, - and _"
        yield from _bad_torus(tier)
    for inner, outer in pairwise(machine.tiers):
        if inner.size is None:
            yield f"tiers.{inner.name} has no size, yet {outer.name} is outside it: give its size"
        elif outer.size is not None and (outer.size <= inner.size or outer.size % inner.size):
            yield (
                f"tiers.{outer.name}.size = {outer.size}: give a larger multiple of the "
                f"{inner.size} GPUs of {inner.name}"
            )


def _bad_torus(tier: Tier) -> Iterator[str]:
    """A torus has a dimension for each ring, and as many ranks as its domain."""
    if not tier.torus:
        return
    where = f"tiers.{tier.name}.torus = {list(tier.torus)}"
    if tier.reduces:
        yield f"{where}: no switch joins a torus that could reduce; leave torus or reduces out"
    if tier.link.topology != "torus" or tier.link.rings != len(tier.torus):
        known = (
            f"{tier.link.name} is a {tier.link.topology} with {counted(tier.link.rings, 'ring')}"
        )
        yield f"{where}: give one degree for each ring of a torus; {known}"
    elif prod(tier.torus) != tier.size:
        yield f"{where}: its {prod(tier.torus)} ranks must be the tier's size, {tier.size}"


def _bad_sources(machine: Machine) -> Iterator[str]:
    for key in machine.sources:
        if key not in _sourced():
            yield f"unknown key 'sources.{key}': {did_you_mean(key, _sourced())}"
