"""Plan: model × machine × layout × schedule × batch × precision, and its strict TOML.

`PlanOptions` are what a user may set, with the same names on every command line and in every plan
file. `resolve` derives what is not set and returns a `Plan`, in which nothing is left open.

Paths in a plan: in a file a relative path starts at the file's folder, so that both can move
together. Everywhere else it starts where the command runs.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, TypedDict, cast, get_args

from fivefold.core import (
    BadFile,
    FivefoldError,
    Machine,
    Precision,
    UnknownName,
    is_code,
    split_code,
    tables,
)
from fivefold.core import hardware as machine
from fivefold.core.layout import (
    Batch,
    ContextSplit,
    Fp8,
    Layout,
    UnitPolicy,
    context_split,
    fp8_of,
    num_ep_nodes,
    padded_length,
    parse_zero,
    refuse_biases,
    rules,
    splits,
    tuned,
)
from fivefold.core.model import Balance, Shape, StageRecompute, balance, require_mixable
from fivefold.core.model import presets as models
from fivefold.core.plan.recipe import DISK, Recipe
from fivefold.core.schedule import AUTO, Family, Schedule, choose, looks_like_file

# What the keys `data` and `eval_data` name: corpora with weights, and folders with names.

STANDARD_LIBRARY, SYNTHETIC, RHYMES = "stdlib", "synthetic", "rhymes"
_WEIGHT = re.compile(r"(.+):([0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})")
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.+)")


def parse_mixture(spec: str) -> dict[str, Fraction]:
    """Names of corpora and their weights.

    >>> parse_mixture("web:3 a:b:.5")
    {'web': Fraction(3, 1), 'a:b': Fraction(1, 2)}
    """
    try:
        args = shlex.split(spec)
    except ValueError as error:
        raise BadFile(f"data = {spec!r}", [f"{error}; close the quotes"]) from error
    if not args:
        example = "name stdlib, rhymes, synthetic, or a folder that `fivefold tokens` wrote"
        raise BadFile(f"data = {spec!r}", [f"it names no corpus; {example}"])
    weights: dict[str, Fraction] = {}
    problems: list[str] = []
    for word in args:
        match = _WEIGHT.fullmatch(word)
        name, weight = (match[1], Fraction(match[2])) if match else (word, Fraction(1))
        if name in weights:
            problems.append(f"{name} appears twice; give it once, with one weight")
        if len(args) > 1 and match is None:
            problems.append(f"{name} has no weight; write {name}:0.5, for example")
        if weight == 0:
            problems.append(f"{word} has no weight above 0; give one, or leave it out")
        weights[name] = weight
    if problems:
        raise BadFile(f"data = {spec!r}", problems)
    return weights


def parse_sets(spec: str) -> dict[str, str]:
    """Folders by the names of their sets; without a name, a folder has its own.

    >>> parse_sets("data/web code=tokens/python")
    {'web': 'data/web', 'code': 'tokens/python'}
    """
    try:
        args = shlex.split(spec)
    except ValueError as error:
        raise BadFile(f"eval_data = {spec!r}", [f"{error}; close the quotes"]) from error
    folders: dict[str, str] = {}
    for word in args:
        named = _NAMED.fullmatch(word)
        name, folder = (named[1], named[2]) if named else (Path(word).name, word)
        if name in folders:
            rule = f"{folders[name]} and {folder} are both called {name}; write NAME=FOLDER"
            raise BadFile(f"eval_data = {spec!r}", [rule])
        folders[name] = folder
    return folders


def moved_corpora(spec: str, move: Callable[[str], str]) -> str:
    """The text of either key with all its folders moved; one that cannot be read stays as it is.

    >>> moved_corpora("stdlib:1 text/web:2", lambda folder: f"up/{folder}")
    'stdlib:1 up/text/web:2'
    >>> moved_corpora("code=a 'b c'", lambda folder: f"../{folder}")
    "code=../a '../b c'"
    """
    try:
        args = shlex.split(spec)
    except ValueError:
        return spec
    return " ".join(shlex.quote(_moved_word(word, move)) for word in args)


def _moved_word(word: str, move: Callable[[str], str]) -> str:
    name, equals, tail = "", "", word
    if named := _NAMED.fullmatch(word):
        name, equals, tail = named[1], "=", named[2]
    match = _WEIGHT.fullmatch(tail)
    folder, weight = (match[1], f":{match[2]}") if match else (tail, "")
    if folder in (STANDARD_LIBRARY, SYNTHETIC, RHYMES):
        return word
    return f"{name}{equals}{move(folder)}{weight}"


_FILES = (".json", ".toml", ".csv", ".txt")


def with_paths(options: PlanOptions, move: Callable[[str], str]) -> PlanOptions:
    """The options with every path moved; names of presets, schedules and corpora stay."""
    texts = {key: getattr(options, key) for key in ("model", "machine", "schedule")}
    paths = {key: _moved(text, move) for key, text in texts.items() if text and _is_path(text)}
    settings = {key: _moved(text, move) for key, text in options.set.items() if is_code(text)}
    train = _recipe(options.train, move)
    return replace(options, **paths, set={**options.set, **settings}, train=train)


def seen_from(folder: Path) -> Callable[[str], str]:
    """What moves paths from here into a file in this folder."""

    def move(file: str) -> str:
        return file if Path(file).is_absolute() else os.path.relpath(file, folder)

    return move


def _is_path(text: str) -> bool:
    if models.is_text(text):
        return False
    return "/" in text or Path(text).suffix.lower() in _FILES or is_code(text)


def _moved(text: str, move: Callable[[str], str]) -> str:
    """A path, or the path of code."""
    if not is_code(text):
        return move(text)
    file, name = split_code(text)
    return f"{move(file)}:{name}"


def _recipe(recipe: Recipe, move: Callable[[str], str]) -> Recipe:
    def tidy(folder: str) -> str:  # their names are printed
        return os.path.normpath(move(folder))

    offloads = {"offload": recipe.disk, "offload_grads": recipe.grads_disk}
    disks = {key: DISK + tidy(disk) for key, disk in offloads.items() if disk}
    corpora = {key: moved_corpora(getattr(recipe, key), tidy) for key in ("data", "eval_data")}
    codes = {"callbacks": recipe.callback_texts, "optimizer": [recipe.optimizer]}
    moved = {
        key: "+".join(_moved(text, move) if is_code(text) else text for text in texts)
        for key, texts in codes.items()
    }
    return replace(recipe, **disks, **corpora, **moved)


Gather = Literal["step", "microbatch"]
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
KEPT_INPUTS = ("shard", "gathered")  # what column-split matmuls save of their input
_LONGEST_DEFAULT = 8192
_SHORTEST_VERIFIED = 32


@dataclass(frozen=True)
class PlanOptions:
    """The keys of a plan file; `resolve` derives those that are None."""

    model: str
    layout: str = "dp=1"
    machine: str | None = None
    gpus: int | None = None
    zero: int | None = None
    gather: str | None = None
    grad_dtype: str = "fp32"
    unit_size: float | None = None
    prefetch: int = 1
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
    tp_overlap: int = 1
    precision: Precision = "bf16"
    fp8: str | None = None
    fp8_wgrad: str | None = None
    fp8_gradients: str | None = None
    fp8_skip: str | None = None
    fp8_matmul: str | None = None
    set: dict[str, str] = field(default_factory=dict[str, str])
    train: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class Plan:
    """A job with nothing left open. `notes` say what was changed or derived.

    `stage_layers` is None if layers are cut by cost; `gather` says how often ZeRO-3 gathers the
    weights of a flat unit, `units` how they are made; `ep_nodes`: nodes with experts of a layer.
    """

    shape: Shape
    machine: Machine | None
    layout: Layout
    batch: Batch
    packed: bool
    recompute: StageRecompute
    precision: Precision
    options: PlanOptions
    stage_layers: tuple[int, ...] | None = None
    gather: Gather = "microbatch"
    units: UnitPolicy = field(default_factory=UnitPolicy)
    balance: tuple[Balance, ...] = ()
    ep_nodes: int = 1
    notes: tuple[str, ...] = ()

    def to_toml(self, folder: Path = Path(), *, full: bool = False) -> str:
        """The plan as a file in `folder`, which every verb reads back as the same plan.

        Of the training keys only those that differ from the defaults are written, and `compile`, by
        which the plan is estimated; or, with `full`, all of them.
        """
        table = tables.table_of(with_paths(self.options, seen_from(folder)))
        if not full:
            usual = tables.table_of(Recipe())
            pairs = table["train"].items()
            table["train"] = {
                key: value for key, value in pairs if key == "compile" or value != usual.get(key)
            }
        return tables.to_toml(table)

    @property  # not cached: it has functions, and a plan is sent to other processes
    def family(self) -> Family:
        """What is known of the schedule; without a pipeline it is 1F1B, whatever the name."""
        return choose(self.options.schedule if self.layout.pp > 1 else "1f1b")

    @cached_property
    def schedule(self) -> Schedule:
        """The pipeline schedule; without a pipeline it is 1F1B on one rank, whatever the name."""
        return _schedule(self.options.schedule, self.layout, self.batch.microbatches)

    @property
    def saves_input_shards(self) -> bool:
        """Whether inputs of tensor-parallel matmuls are saved as sequence shards and gathered again
        in the backward, in modules whose forward does not run again.
        """
        layout, shard = self.layout, self.options.tp_keep == "shard"
        return shard and layout.sp and layout.tp > 1

    @property
    def fp8(self) -> Fp8 | None:
        """How matmuls are rounded to fp8; None in other precisions."""
        return fp8_of(self.options)

    @property
    def split(self) -> ContextSplit:
        """How a row of tokens is cut over the context ranks."""
        return context_split(self.layout, self.shape)

    @property
    def padded_seq(self) -> int:
        """Tokens of a row, padded to a length that cp and sp split evenly."""
        return padded_length(self.batch.seq, rules.sequence_unit(self.layout, self.shape))

    def gathers_each_time(self, layers: range) -> bool:
        """Whether ZeRO-3 gathers the weights of this stage for every microbatch.

        Multi-token prediction uses its weights several times in a row, so they stay gathered.
        """
        predicts = self.shape.mtp > 0 and layers.stop == self.shape.layers
        return self.gather == "microbatch" and not predicts

    @property
    def local_seq(self) -> int:
        """Tokens of a row on one context rank."""
        return self.padded_seq // self.layout.cp

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The layers of each pipeline stage."""
        placement, seq = self.schedule.placement, self.batch.seq
        return splits.cut_stages(
            self.shape, placement.num_stages, self.stage_layers, seq=seq, folded=placement.folded
        )


def _schedule(text: str, layout: Layout, num_microbatches: int) -> Schedule:
    numbers = (layout.pp, num_microbatches, layout.chunks)
    if layout.pp == 1:
        return named_schedule("1f1b", *numbers)
    if looks_like_file(text):
        return choose(text).make(*numbers)
    return named_schedule(text.lower(), *numbers)


@lru_cache
def named_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """A schedule that is not from a file, made once per process: a search takes long."""
    return choose(name).make(num_ranks, num_microbatches, num_chunks)


def read(path: Path, text: str | None = None) -> PlanOptions:
    """Read a plan file, or `text` as if it were that file; unknown keys are errors that suggest the
    nearest known one."""
    table = tables.read_toml(path, text)
    if isinstance(changes := table.get("set"), Mapping):
        pairs = cast("Mapping[str, Any]", changes).items()
        table["set"] = {
            key: str(value).lower() if isinstance(value, bool) else str(value)
            for key, value in pairs
        }
    if isinstance(table.get("zero"), str):
        table["zero"] = parse_zero(table["zero"])
    options = tables.build(PlanOptions, table, str(path))
    return with_paths(options, lambda file: str(path.parent / file))


def resolve(options: PlanOptions, *, small: bool = False) -> Plan:
    """Derive what is not set and check the whole; errors name every broken rule and a way out.

    `small` is for runs whose size does not matter (`verify`): the shortest legal sequence, and more
    layers if the pipeline needs them.
    """
    family = choose(options.schedule)
    layout = _layout(options, family)
    shape = models.with_overrides(models.load(options.model), options.set)
    notes = [_ASYNCHRONOUS] if family.asynchronous and layout.pp > 1 else []
    if small and shape.layers < layout.pp * layout.chunks:
        options = replace(options, set={**options.set, "layers": str(layout.pp * layout.chunks)})
        shape = models.with_overrides(shape, options.set)
        notes.append(f"raised to {shape.layers} layers, one for each stage of the pipeline")
    recompute = StageRecompute.parse(options.recompute)
    require_mixable(
        shape,
        fp8=options.precision == "fp8",
        packed=options.packed,
        keeps_attention=any(rule.keeps_attention for rule in recompute.rules),
    )
    shape = tuned(shape, options.train.tuning, fp8_of(options) is not None)
    refuse_biases(shape, fp8_of(options))
    seq = _default_seq(layout, shape, small) if options.seq is None else options.seq
    if options.tp_keep not in KEPT_INPUTS:
        raise UnknownName("tp_keep", options.tp_keep, KEPT_INPUTS)
    if options.tp_overlap < 0:
        number = options.tp_overlap
        raise FivefoldError(f"tp_overlap {number}: choose 0 for none, 1, or a number of chunks")
    job = job_of(options, family, seq)
    rules.check(layout, shape, **job)
    # Complete the batch identity, with a number of microbatches that the schedule can run.
    count = options.microbatches
    if count is None and options.batch is None:
        count = family.smallest_count(2 * layout.pp, layout.pp, layout.chunks)
    batch = Batch.resolve(
        layout.dp,
        seq,
        batch=options.batch,
        microbatch_size=options.microbatch_size,
        microbatches=count,
    )
    text = options.stage_layers
    counts = None if text is None else splits.parse_stage_layers(text)
    if family.name == AUTO and layout.pp > 1:
        layout = _searched(options, layout, batch)
        splits.cut_stages(shape, layout.pp * layout.chunks, counts)  # its stages are known only now
    gather = _gather(options, layout)
    nodes = num_ep_nodes(layout, job)
    return Plan(
        shape=shape,
        machine=_cluster(options),
        layout=layout,
        batch=batch,
        packed=options.packed,
        recompute=recompute.within(layout.pp * layout.chunks),
        precision=options.precision,
        options=_filled_in(options, layout, batch, gather, nodes),
        stage_layers=counts,
        gather=gather,
        units=UnitPolicy.of(options.grad_dtype, options.unit_size, options.prefetch),
        balance=balance.rules_of(
            options.balance, shape, asynchronous=family.asynchronous and layout.pp > 1
        ),
        ep_nodes=nodes,
        notes=(*notes, *shape.notes),
    )


def _layout(options: PlanOptions, family: Family) -> Layout:
    layout = Layout.parse(options.layout, zero=options.zero, sp=options.sp, context=options.context)
    return replace(layout, chunks=family.chunks_on(layout.pp, options.chunks))


def job_of(options: PlanOptions, family: Family, seq: int) -> rules.LayoutRequest:
    """What the layout must fit, for the rules of legality."""
    return rules.LayoutRequest(
        seq=seq,
        batch=options.batch,
        microbatch_size=options.microbatch_size,
        microbatches=options.microbatches,
        chunks=options.chunks,
        gpus=options.gpus,
        schedule=family,
        stage_layers=options.stage_layers,
        **key_request(options),
    )


class KeyRequest(TypedDict):
    """What keys besides the layout's own ask of it: a part of `LayoutRequest`."""

    fp8: Fp8 | None
    tp_overlap: int
    offloads_grads: bool
    ep_nodes: int | None
    domain: int | None
    pads: bool


def key_request(options: PlanOptions) -> KeyRequest:
    """The same for whoever varies the layout of these options: a search, or neighbours."""
    cluster = _cluster(options)
    return KeyRequest(
        fp8=fp8_of(options),
        tp_overlap=options.tp_overlap,
        offloads_grads=options.train.offload_grads != "none",
        ep_nodes=options.ep_nodes,
        domain=None if cluster is None else cluster.tiers[0].size,
        pads=any(rule.pads for rule in balance.parse(options.balance)),
    )


def _cluster(options: PlanOptions) -> Machine | None:
    return None if options.machine is None else machine.load(options.machine)


def _default_seq(layout: Layout, shape: Shape, small: bool) -> int:
    if small:
        return rules.smallest_seq(layout, shape, _SHORTEST_VERIFIED)
    return min(_LONGEST_DEFAULT, shape.max_seq)


def _searched(options: PlanOptions, layout: Layout, batch: Batch) -> Layout:
    """The layout with as many chunks as a search chooses, at most its own.

    Fewer may idle less. The search is then repeated with that number as the limit, as it will be
    wherever the resolved plan is read.
    """
    num_chunks = _schedule(options.schedule, layout, batch.microbatches).num_chunks
    if num_chunks == layout.chunks:
        return layout
    return _searched(options, replace(layout, chunks=num_chunks), batch)


def _gather(options: PlanOptions, layout: Layout) -> Gather:
    """How often ZeRO-3 gathers: by default once per step in a pipeline."""
    if options.gather is None:
        return "step" if layout.pp > 1 else "microbatch"
    if options.gather not in get_args(Gather):
        raise UnknownName("gather", options.gather, get_args(Gather))
    return cast(Gather, options.gather)


def _filled_in(
    options: PlanOptions, layout: Layout, batch: Batch, gather: Gather, ep_nodes: int
) -> PlanOptions:
    """The options with everything derived filled in; the global batch follows from them."""
    return replace(
        options,
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


def options_from(target: str | PlanOptions, changes: Mapping[str, Any]) -> PlanOptions:
    """Options of a plan, from a plan file or a model name, with those that are given on top."""
    values = {key: value for key, value in changes.items() if value is not None}
    if isinstance(target, str) and not target.endswith(".toml"):
        values["train"] = Recipe(**values.get("train", {}))
        return PlanOptions(model=target, **values)
    options = _read_target(target) if isinstance(target, str) else target
    values["set"] = {**options.set, **values.get("set", {})}
    values["train"] = replace(options.train, **values.get("train", {}))
    # What the file derived from its layout or schedule is derived again if these change.
    changed = {
        key for key in _DERIVED if values.get(key, getattr(options, key)) != getattr(options, key)
    }
    derived = {name for key in changed for name in _DERIVED[key]}
    return replace(options, **dict.fromkeys(derived - values.keys()), **values)


def says_layout(target: str) -> bool:
    """Whether a target is a plan file that has a layout; an imported run leaves it open."""
    return target.endswith(".toml") and "layout" in tables.read_toml(Path(target))


def _read_target(target: str) -> PlanOptions:
    if not Path(target).is_file():
        raise BadFile(target, ["no such plan file; write one with: fivefold plan MODEL -o FILE"])
    return read(Path(target))
