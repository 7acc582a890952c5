"""How rows spell things: GPUs, networks, models, and the families of their sources.

The words are data (`presets/rows.toml`). A reader notes every assumption that it makes for a row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from fivefold.core import PRESETS, FivefoldError, tables
from fivefold_score.rows import Row


@dataclass(frozen=True)
class SourceFamily:
    """What holds for all rows of a family: the source, its software, and its network."""

    source: str
    stack: str
    zero3: str = ""
    interconnect: str = ""


@dataclass(frozen=True)
class ModelSizes:
    """What the sizes of a row leave out for one model."""

    head_dim: int
    window: int
    global_every: int


@dataclass(frozen=True)
class Spellings:
    """The tables of `presets/rows.toml`."""

    gpus: dict[str, str]
    precisions: dict[str, str]
    schedules: dict[str, str]
    variants: dict[str, dict[str, str]]
    slices: dict[str, dict[str, str]]
    models: dict[str, str]
    sizes: dict[str, ModelSizes]
    families: dict[str, SourceFamily]


@lru_cache
def spellings() -> Spellings:
    """The one table of spellings."""
    path = PRESETS / "rows.toml"
    return tables.build(Spellings, tables.read_toml(path), str(path))


def family_of(row: Row) -> str:
    """The family of a row: the head of its id."""
    return re.split(r"[-_]", str(row.get("id", "")))[0]


def source_of(row: Row) -> str:
    """The source whose runs a row is one of; its family, if that is not known."""
    family = family_of(row)
    known = spellings().families.get(family)
    return known.source if known else family


@dataclass
class RowReader:
    """The values of a row, and what was assumed where it says nothing."""

    row: Row
    assumptions: list[str] = field(default_factory=list[str])

    def assume(self, assumption: str) -> None:
        """Note an assumption, once."""
        if assumption not in self.assumptions:
            self.assumptions.append(assumption)

    def text(self, key: str) -> str:
        """The text of a key; empty if it is not said."""
        return str(self.row.get(key) or "")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer. `default`: what null means; without it, null cannot be estimated."""
        value = self.row.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or value < 1 or value != int(value):
            rule = "this row does not say what the time depends on"
            raise FivefoldError(f"{key} = {value!r}: {rule}")
        return int(value)

    def assumed_integer(self, key: str, value: int, why: str) -> int:
        """The same, but what is assumed for null is noted."""
        if self.row.get(key) is None:
            self.assume(f"{key} is not said: {why}")
        return self.integer(key, value)


# A rate in the words of a network, such as `8x200 Gb/s HDR IB per node` or `12.5 GB/s a GPU`.
_RATE = re.compile(
    r"(?:(?P<ports>\d+)\s*x\s*)?(?P<rate>\d+(?:\.\d+)?)\s*(?P<unit>Gb|GB|Gbit|Gbps|GBps)\b(?:/s)?"
)
_OF_NETWORK = re.compile(r"\b(ib|infiniband|roce|rdma|efa|ethernet|cx-?\d|node|hdr|ndr|edr)", re.I)
_OF_GPU = re.compile(r"\b(per|a|an|each)\s+(gpu|card|rank)\b", re.I)
# Words for a network that is the usual one of its machine.
_USUAL = re.compile(r"selene|nvl ?72|dgx|nvlink", re.I)


def network_rate(text: str, gpus_per_node: int) -> float | None:
    """Bytes/s of one GPU over the network, one way, as the words say; a rate that is not said to be
    a GPU's is its node's."""
    for clause in re.split(r"[;,+]", text):
        match, own = _RATE.search(clause), bool(_OF_GPU.search(clause))
        if match and (own or _OF_NETWORK.search(clause)):
            size = 1.0 if match["unit"].startswith("GB") else 1 / 8
            rate = float(match["rate"]) * size * 1e9 * int(match["ports"] or 1)
            return rate if own else rate / gpus_per_node
    return None


def is_usual_network(text: str) -> bool:
    """Whether the words name a network, without a rate, that its machine has anyway."""
    return bool(_USUAL.search(text)) and not re.search(r"not stated", text)
