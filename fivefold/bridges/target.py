"""Target: another framework, as the table of its keys and what it can and cannot express."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fivefold.bridges.job_values import Values
from fivefold.bridges.key_table import Flat, Table
from fivefold.core import Machine
from fivefold.core.model import Shape


class Sheet(NamedTuple):
    """What a file is written from: its keys, our values and the model with its name."""

    flat: Flat
    values: Values
    shape: Shape
    model: str
    gpus_per_node: int
    header: tuple[str, ...]  # comments, without their sign

    @property
    def world(self) -> int:
        return world_of(self.values)

    @property
    def nodes(self) -> int:
        return -(-self.world // self.gpus_per_node)


class FoundModel(NamedTuple):
    """The model that a file names or describes, and the keys that say it."""

    model: str | None
    used: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


YOURS = ("data", "tokenizer", "saves", "learning rate", "steps")  # of the user, unless planned
Impossible = tuple[str, Any, list[Values]]  # our key, its value, candidates in its place


def _same_values(values: Values, _shape: Shape) -> Values:
    return values


def _no_model(_flat: Flat) -> FoundModel:
    return FoundModel(None)


def _all_possible(_values: Values, _shape: Shape) -> Iterator[Impossible]:
    yield from ()


def _no_keys(_shape: Shape, _values: Values) -> Flat:
    return {}


@dataclass(frozen=True)
class Target:
    """One framework.

    `axes`: the degrees that it has. `always`: our values that no key of it changes. `left`: our
    keys that the user's own program says. `outgoing` adds what its table writes beside our own
    values (a global batch), `incoming` turns what the table read back into our values; `covers` are
    our keys that these two say. `impossible` are values that only together cannot be. `extra_keys`
    are keys that every file has; `neutral` starts names that change nothing of a plan. `yours`: its
    names of `YOURS`.
    """

    name: str
    title: str
    suffix: str
    table: Table
    axes: frozenset[str]
    schedules: tuple[str, ...]
    write: Callable[[Sheet], str]
    always: Mapping[str, Any] = field(default_factory=dict[str, Any])
    left: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    impossible: Callable[[Values, Shape], Iterator[Impossible]] = _all_possible
    outgoing: Callable[[Values, Shape], Values] = _same_values
    incoming: Callable[[Values, Flat], Values] = lambda values, _flat: values
    extra_keys: Callable[[Shape, Values], Flat] = _no_keys
    model_keys: Callable[[Shape], Flat] = lambda _shape: {}
    find_model: Callable[[Flat], FoundModel] = _no_model
    neutral: tuple[str, ...] = ()
    yours: tuple[str, ...] = ()
    comments: bool = True  # that its files can have


def world_of(values: Values) -> int:
    """Ranks of the degrees."""
    return values["replicate"] * values["shard"] * values["tp"] * values["pp"] * values["cp"]


def gpus_per_node(machine: Machine | None) -> int:
    """Of the machine, or the usual number."""
    return 8 if machine is None else machine.gpus_per_node


def few_kv_heads(values: Values, shape: Shape) -> Iterator[Impossible]:
    """Tensor ranks beyond the KV heads, for targets that do not copy heads: a smaller tp, whose
    other ranks go elsewhere."""
    tp = values["tp"]
    if shape.kv_heads % tp == 0:
        return
    fits = [
        tp_degree
        for tp_degree in range(tp, 0, -1)
        if tp % tp_degree == 0 and shape.kv_heads % tp_degree == 0
    ]
    candidates: list[Values] = []
    for degree in fits:
        experts = {"etp": min(values["etp"], degree)} if values["etp"] > 1 else {}
        for changes in (experts, {"etp": 1, "ep": 1}) if experts else ({},):
            moved = [{axis: values[axis] * (tp // degree)} for axis in ("shard", "cp")]
            candidates += [{"tp": degree, **changes, **other} for other in moved]
    yield "tp", tp, candidates


def with_batch(values: Values, _shape: Shape) -> Values:
    """With the global batch, the ranks and what one data rank runs in a step."""
    dp = values["replicate"] * values["shard"]
    rows = (values["microbatches"] or 1) * (values["microbatch_size"] or 1)
    return {**values, "batch": rows * dp, "local_batch": rows, "world": world_of(values)}


def without(values: Values, *names: str) -> Values:
    """The values without some that were only written."""
    return {name: value for name, value in values.items() if name not in names}
