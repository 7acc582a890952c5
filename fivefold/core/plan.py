"""Plan: model × machine × layout × schedule × batch × precision, and its strict TOML.

`Wishes` is what a user may say, spelled alike on every command line and in every plan file; what
is not said is derived. `resolve` turns wishes into a `Plan`, in which nothing is left open.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

from fivefold.core import balance, legality, machine, models, splits, tables
from fivefold.core.balance import Balance
from fivefold.core.batch import Batch
from fivefold.core.errors import BadFile, FivefoldError, UnknownName
from fivefold.core.layout import Layout, parse_zero
from fivefold.core.machine import Machine
from fivefold.core.recipe import Recipe
from fivefold.core.schedule import Schedule
from fivefold.core.schedule.choose import choose, looks_like_file
from fivefold.core.schedule.family import AUTO, Family
from fivefold.core.shape import Shape
from fivefold.core.splits import ContextSplit, Recompute, context_split, padded_length

Precision = Literal["fp32", "bf16", "fp16"]
Gather = Literal["step", "microbatch"]
Keep = Literal["shard", "gathered"]
_FILES = (".json", ".toml", ".csv", ".txt")
_DERIVED = {
    "layout": ("zero", "chunks", "microbatches", "stage_layers", "gather", "ep_nodes"),
    "schedule": ("chunks", "microbatches", "stage_layers"),
    "chunks": ("stage_layers",),
    "set": ("stage_layers",),
}
_ASYNCHRONOUS = (
    "ASYNCHRONOUS: this schedule computes gradients on older weights, which is not what one device "
    "computes"
)
_LONGEST_DEFAULT = 8192
_SHORTEST_VERIFIED = 32


@dataclass(frozen=True)
class Wishes:
    """What is asked for. These are the keys of a plan file; None is derived by `resolve`."""

    model: str
    layout: str = "dp=1"
    machine: str | None = None
    gpus: int | None = None
    zero: int | None = None
    gather: str | None = None
    sp: bool = True
    context: str = "zigzag"
    schedule: str = "1f1b"
    chunks: int | None = None
    stage_layers: str | None = None
    microbatches: int | None = None
    microbatch_size: int | None = None
    batch: int | None = None
    seq: int | None = None
    packed: bool = False
    recompute: str = "none"
    balance: str = balance.NONE
    ep_nodes: int | None = None
    tp_keep: str = "shard"
    precision: Precision = "bf16"
    set: dict[str, str] = field(default_factory=dict[str, str])
    train: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class Plan:
    """A job with nothing left open. `notes` say what was changed or derived on the way.

    `stage_layers` is None where layers are dealt by cost; `gather` says how often ZeRO-3 gathers
    the weights of a unit; `ep_nodes` is over how many nodes the experts of a layer are spread.
    """

    shape: Shape
    machine: Machine | None
    layout: Layout
    batch: Batch
    packed: bool
    recompute: Recompute
    precision: Precision
    wishes: Wishes
    stage_layers: tuple[int, ...] | None = None
    gather: Gather = "microbatch"
    balance: tuple[Balance, ...] = ()
    ep_nodes: int = 1
    notes: tuple[str, ...] = ()

    def to_toml(self, folder: Path = Path(), *, whole: bool = False) -> str:
        """The plan as a file in `folder` that every verb reads back to the same plan.

        How it is trained is written as far as it was said, or `whole`.
        """
        table = tables.table_of(_with_paths(self.wishes, _seen_from(folder)))
        if not whole:
            usual = tables.table_of(Recipe())
            pairs = table["train"].items()
            table["train"] = {key: value for key, value in pairs if value != usual.get(key)}
        return tables.to_toml(table)

    @cached_property
    def family(self) -> Family:
        """What is known of the schedule; without a pipeline it is 1F1B, whatever the name."""
        return choose(self.wishes.schedule if self.layout.pp > 1 else "1f1b")

    @cached_property
    def schedule(self) -> Schedule:
        """The pipeline schedule; without a pipeline it is 1F1B on one rank, whatever the name."""
        return _schedule(self.wishes.schedule, self.layout, self.batch.microbatches)

    @property
    def keeps_shards(self) -> bool:
        """Whether inputs of split products are kept as a rank's own tokens, and gathered again.

        Recomputation has its own way: it keeps less, or what collectives brought.
        """
        layout, kept = self.layout, self.wishes.tp_keep == "shard"
        return kept and layout.sp and layout.tp > 1 and self.recompute.kind == "none"

    @property
    def split(self) -> ContextSplit:
        """How a row of tokens is cut over the context ranks."""
        return context_split(self.layout, self.shape)

    @property
    def padded_seq(self) -> int:
        """Tokens of a row as ranks hold it together: padded to what cp and sp cut evenly."""
        return padded_length(self.batch.seq, legality.sequence_unit(self.layout, self.shape))

    def gathers_each_time(self, layers: range) -> bool:
        """Whether ZeRO-3 gathers the weights of this stage for every microbatch.

        Those of multi-token prediction are used several times in a row, and stay.
        """
        ahead = self.shape.mtp > 0 and layers.stop == self.shape.layers
        return self.gather == "microbatch" and not ahead

    @property
    def local_seq(self) -> int:
        """Tokens of a row on one context rank."""
        return self.padded_seq // self.layout.cp

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The layers of each pipeline stage."""
        return splits.cut_stages(
            self.shape, self.schedule.num_stages, self.stage_layers, seq=self.batch.seq
        )


def _schedule(word: str, layout: Layout, num_microbatches: int) -> Schedule:
    numbers = (layout.pp, num_microbatches, layout.chunks)
    if layout.pp == 1:
        return named_schedule("1f1b", *numbers)
    return (
        choose(word).make(*numbers)
        if looks_like_file(word)
        else named_schedule(word.lower(), *numbers)
    )


@lru_cache
def named_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """A schedule that is not from a file, made once a process: a search takes its time."""
    return choose(name).make(num_ranks, num_microbatches, num_chunks)


def read(path: Path) -> Wishes:
    """The wishes in a plan file; unknown keys are errors with the nearest known one."""
    table = tables.read_toml(path)
    if isinstance(changes := table.get("set"), Mapping):
        pairs = cast("Mapping[str, Any]", changes).items()
        table["set"] = {
            key: str(value).lower() if isinstance(value, bool) else str(value)
            for key, value in pairs
        }
    if isinstance(table.get("zero"), str):
        table["zero"] = parse_zero(table["zero"])
    wishes = tables.build(Wishes, table, str(path))
    return _with_paths(wishes, lambda file: str(path.parent / file))


def _with_paths(wishes: Wishes, move: Callable[[str], str]) -> Wishes:
    """The wishes with every path moved; names of presets and schedules stay.

    In a plan file a relative path starts at the file's folder, so that both can move together.
    """
    said = {key: getattr(wishes, key) for key in ("model", "machine", "schedule")}
    paths = {key: move(text) for key, text in said.items() if text and _is_path(text)}
    return replace(wishes, **paths)


def _is_path(text: str) -> bool:
    return not models.is_text(text) and ("/" in text or Path(text).suffix.lower() in _FILES)


def _seen_from(folder: Path) -> Callable[[str], str]:
    def move(file: str) -> str:
        return file if Path(file).is_absolute() else os.path.relpath(file, folder)

    return move


def resolve(wishes: Wishes, *, small: bool = False) -> Plan:
    """Derive what is open and check the whole; every broken rule is named with a way out.

    `small` is for runs whose size does not matter (`verify`): the shortest legal sequence, and as
    many more layers as the pipeline needs.
    """
    family = choose(wishes.schedule)
    if wishes.tp_keep not in get_args(Keep):
        raise UnknownName("tp_keep", wishes.tp_keep, get_args(Keep))
    layout = _layout(wishes, family)
    shape = models.with_overrides(models.load(wishes.model), wishes.set)
    notes = [_ASYNCHRONOUS] if family.asynchronous and layout.pp > 1 else []
    if small and shape.layers < layout.pp * layout.chunks:
        wishes = replace(wishes, set={**wishes.set, "layers": str(layout.pp * layout.chunks)})
        shape = models.with_overrides(shape, wishes.set)
        notes.append(f"raised to {shape.layers} layers, one for each stage of the pipeline")
    seq = _default_seq(layout, shape, small) if wishes.seq is None else wishes.seq
    legality.check(layout, shape, **job_of(wishes, family, seq))
    batch = _batch(wishes, family, layout, seq)
    given = None if wishes.stage_layers is None else splits.parse_stage_layers(wishes.stage_layers)
    if family.name == AUTO and layout.pp > 1:
        layout = _searched(wishes, layout, batch)
        splits.cut_stages(
            shape, layout.pp * layout.chunks, given
        )  # whose number was not known before
    gather = _gather(wishes, layout)
    cluster = None if wishes.machine is None else machine.load(wishes.machine)
    nodes = _ep_nodes(wishes.ep_nodes, layout, cluster)
    return Plan(
        shape=shape,
        machine=cluster,
        layout=layout,
        batch=batch,
        packed=wishes.packed,
        recompute=Recompute.parse(wishes.recompute),
        precision=wishes.precision,
        wishes=_settled(wishes, layout, batch, gather, nodes),
        stage_layers=given,
        gather=gather,
        balance=_rules(wishes.balance, shape, family.asynchronous and layout.pp > 1, nodes),
        ep_nodes=nodes,
        notes=tuple(notes),
    )


def _layout(wishes: Wishes, family: Family) -> Layout:
    layout = Layout.parse(wishes.layout, zero=wishes.zero, sp=wishes.sp, context=wishes.context)
    return replace(layout, chunks=family.chunks_on(layout.pp, wishes.chunks))


def job_of(wishes: Wishes, family: Family, seq: int) -> legality.LayoutRequest:
    """What the rules hold against a layout."""
    return legality.LayoutRequest(
        seq=seq,
        batch=wishes.batch,
        microbatch_size=wishes.microbatch_size,
        microbatches=wishes.microbatches,
        chunks=wishes.chunks,
        gpus=wishes.gpus,
        schedule=family,
        stage_layers=wishes.stage_layers,
    )


def _default_seq(layout: Layout, shape: Shape, small: bool) -> int:
    if small:
        return legality.smallest_seq(layout, shape, _SHORTEST_VERIFIED)
    return min(_LONGEST_DEFAULT, shape.max_seq)


def _batch(wishes: Wishes, family: Family, layout: Layout, seq: int) -> Batch:
    """Complete the batch identity with a number of microbatches that the schedule can run."""
    count = wishes.microbatches
    if count is None and wishes.batch is None:
        count = family.smallest_count(2 * layout.pp, layout.pp, layout.chunks)
    return Batch.resolve(
        layout.dp,
        seq,
        batch=wishes.batch,
        microbatch_size=wishes.microbatch_size,
        microbatches=count,
    )


def _searched(wishes: Wishes, layout: Layout, batch: Batch) -> Layout:
    """The layout with the chunks that a search takes, of which its own are the most.

    Fewer may idle less. The search is then repeated with these as the most, as it will be wherever
    the settled plan is read.
    """
    found = _schedule(wishes.schedule, layout, batch.microbatches).num_chunks
    if found == layout.chunks:
        return layout
    return _searched(wishes, replace(layout, chunks=found), batch)


def _gather(wishes: Wishes, layout: Layout) -> Gather:
    """How often ZeRO-3 gathers; a pipeline keeps weights, for its microbatches lie far apart."""
    if wishes.gather is None:
        return "step" if layout.pp > 1 else "microbatch"
    if wishes.gather not in get_args(Gather):
        raise UnknownName("gather", wishes.gather, get_args(Gather))
    return cast(Gather, wishes.gather)


def _rules(text: str, shape: Shape, asynchronous: bool, nodes: int) -> tuple[Balance, ...]:
    """How experts are balanced."""
    rules = balance.parse(text)
    balance.check(rules, shape)
    if rules and asynchronous:
        raise FivefoldError(
            f"--balance {text}: an asynchronous schedule has no step whose tokens could be "
            "counted; choose another schedule, or none"
        )
    if nodes > 1 and any(rule.pads for rule in rules):
        raise FivefoldError(
            f"--balance {text} with ep_nodes {nodes}: how many tokens go to a node is known only "
            "when they are routed; choose capacity without padding, or ep_nodes=1"
        )
    return rules


def _ep_nodes(wish: int | None, layout: Layout, cluster: Machine | None) -> int:
    """Over how many nodes an ep group is spread: as wished, or as the machine is built."""
    if wish is not None:
        if wish < 1 or layout.ep % wish:
            raise FivefoldError(
                f"ep_nodes {wish} does not divide ep {layout.ep}: the ranks of an ep group lie "
                "evenly on its nodes; choose a divisor"
            )
        return wish
    size = None if cluster is None else cluster.tiers[0].size
    if size is None:
        return 1
    group = layout.group("ep", 0)
    inside = sum(rank < size for rank in group)
    return layout.ep // math.gcd(layout.ep, inside)


def _settled(wishes: Wishes, layout: Layout, batch: Batch, gather: Gather, ep_nodes: int) -> Wishes:
    """The wishes with all that is free said; the global batch follows from them."""
    return replace(
        wishes,
        layout=str(layout),
        zero=layout.zero,
        gather=gather,
        ep_nodes=ep_nodes,
        chunks=layout.chunks,
        microbatches=batch.microbatches,
        microbatch_size=batch.microbatch_size,
        batch=None,
        seq=batch.seq,
    )


def wishes_from(target: str, changes: Mapping[str, Any]) -> Wishes:
    """Wishes from a plan file or a model name, with what the command line says on top."""
    said = {key: value for key, value in changes.items() if value is not None}
    if not target.endswith(".toml"):
        said["train"] = Recipe(**said.get("train", {}))
        return Wishes(model=target, **said)
    if not Path(target).is_file():
        raise BadFile(target, ["no such plan file; write one with: fivefold plan MODEL -o FILE"])
    wishes = read(Path(target))
    said["set"] = {**wishes.set, **said.get("set", {})}
    said["train"] = replace(wishes.train, **said.get("train", {}))
    return replace(wishes, **_outdated(wishes, said), **said)


def _outdated(wishes: Wishes, said: Mapping[str, Any]) -> dict[str, None]:
    """What a file derived from its layout or schedule is derived anew under another one."""
    changed = {
        key for key in _DERIVED if said.get(key, getattr(wishes, key)) != getattr(wishes, key)
    }
    derived = {name for key in changed for name in _DERIVED[key]}
    return dict.fromkeys(derived - said.keys())
