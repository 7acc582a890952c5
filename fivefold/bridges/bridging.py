"""Bridges: a plan as another framework's configuration, and such a file as a plan.

One file per framework has the table of its keys, which writes and reads. Before it is written, a
plan becomes the nearest that the framework can express (`nearest.py`); what is lost is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fivefold.bridges.accelerate import ACCELERATE
from fivefold.bridges.axolotl import AXOLOTL
from fivefold.bridges.bridge import BRIDGE
from fivefold.bridges.bridge import read_script as read_overrides
from fivefold.bridges.deepspeed import DEEPSPEED
from fivefold.bridges.formats import (
    NOTE,
    flat_of,
    json_table,
    python_table,
    read_text,
    refuse_repeated_json,
    toml_table,
    yaml_table,
)
from fivefold.bridges.job_values import Values, options_of, usual_values, values_of
from fivefold.bridges.key_table import Flat, allowed, read_keys, same, write_keys
from fivefold.bridges.megatron import MEGATRON, read_script, world_of_launch
from fivefold.bridges.model_names import titan_of
from fivefold.bridges.nanotron import NANOTRON
from fivefold.bridges.nearest import Expressed, Loss, Price, Priced, express
from fivefold.bridges.target import YOURS, Sheet, Target, gpus_per_node
from fivefold.bridges.torchtitan import TORCHTITAN, TORCHTITAN_MAIN
from fivefold.core import BadFile, FivefoldError, UnknownName
from fivefold.core.layout import Batch, divisors
from fivefold.core.model import Shape
from fivefold.core.model import presets as models
from fivefold.core.plan import Plan, PlanOptions

# The values of a search that a target can express: what restricts a search to one framework.

Allowed = dict[str, frozenset[int | str]]
_AXES = ("replicate", "tp", "pp", "cp", "ep", "etp")
_LISTED = ("zero", "context", "recompute", "offload", "sp")


def possible_values(target: Target, shape: Shape, gpus: int) -> Allowed:
    """For each choice of a search, the values that the target has; a choice that is not there may
    have any. Values that only together cannot be are not here: `express` mends them."""
    allowed: Allowed = {axis: frozenset({1}) for axis in _AXES if axis not in target.axes}
    allowed["schedule"] = frozenset(target.schedules)
    for key in _LISTED:
        values = _values_of(target, key, shape.moe is not None)
        if values is not None:
            allowed[key] = values
    if "tp" not in allowed:
        usual = {**usual_values(), "microbatches": 1, "microbatch_size": 1, "zero": 1}
        degrees = [
            tp
            for tp in divisors(gpus)
            if all(key != "tp" for key, *_ in target.impossible({**usual, "tp": tp}, shape))
        ]
        allowed["tp"] = frozenset(degrees)
    return allowed


def _values_of(target: Target, key: str, has_experts: bool) -> frozenset[int | str] | None:
    """The values of a key of ours that the target lists; None: any."""
    for item in target.table:
        ours = (item.ours,) if isinstance(item.ours, str) else item.ours
        if key != ours[0]:
            continue
        listed = allowed(item, has_experts)
        if listed is None:
            return None
        return frozenset(row[0] if len(ours) > 1 else row for row in listed)
    if key in target.left or key in target.covers:
        return None
    return frozenset({target.always.get(key, usual_values()[key])})


# What a file leaves open: ranks of data parallelism, and the batch identity.


def complete(
    target: Target, read: Values, gpus: int | None, launched: int | None
) -> tuple[Values, tuple[str, ...]]:
    """All values of a plan, and what was assumed; contradictions are refused with their rule."""
    usual = {**usual_values(), **target.always}
    values = {name: value for name, value in read.items() if value is not None}
    for axis in (*_AXES, "shard"):
        if axis in values and values[axis] < 1:
            raise FivefoldError(f"{axis} = {values[axis]}: give a whole number of at least 1")
    notes: list[str] = []
    world = values.pop("world", None) or launched
    if gpus is not None and world is not None and gpus != world:
        notes.append(f"the file is for {world} GPUs; planned for the {gpus} of --gpus")
    values["shard"] = _shard(target, {**usual, **values}, values.get("shard"), gpus or world)
    dp = values["shard"] * {**usual, **values}["replicate"]
    values |= _batch(values, dp)
    for name in ("batch", "local_batch"):
        values.pop(name, None)
    if values.get("stage_layers") is None and values.get("pp", 1) == 1:
        values["chunks"] = None
    return {
        **usual,
        **{name: read_value for name, read_value in values.items() if name in usual},
    }, (*notes,)


def _shard(target: Target, values: Values, shard: int | None, world: int | None) -> int:
    """Ranks that shard: as given, or what the other degrees leave."""
    other_ranks = values["replicate"] * values["tp"] * values["pp"] * values["cp"]
    shown = " · ".join(f"{axis} {values[axis]}" for axis in ("tp", "pp", "cp"))
    if values["replicate"] > 1:
        shown += f" · replicas {values['replicate']}"
    if shard is not None:
        if world is not None and shard * other_ranks != world:
            rule = (
                f"dp {shard} · {shown} = {shard * other_ranks:,} ranks, and the job has {world:,}"
            )
            raise FivefoldError(f"{rule}: the degrees must multiply to it; change one of them")
        return shard
    if world is None:
        raise FivefoldError(
            f"{target.title} leaves data parallelism to the number of GPUs, which this file does "
            "not say: add --gpus N"
        )
    if world % other_ranks:
        below = world - world % other_ranks
        ways = " or ".join(f"{count:,}" for count in (below, below + other_ranks) if count)
        raise FivefoldError(
            f"{world:,} GPUs are no multiple of {shown} = {other_ranks:,}: use {ways} GPUs, or "
            "lower a degree"
        )
    return world // other_ranks


def _batch(values: Values, dp: int) -> Values:
    """Microbatches from the global batch, or from that of one data rank."""
    size, count, batch = (values.get(key) for key in ("microbatch_size", "microbatches", "batch"))
    local = values.get("local_batch")
    if local is not None:
        size = size or local
        if local % size:
            rule = f"{local} sequences of a data rank are no multiple of a microbatch of {size}"
            raise FivefoldError(f"{rule}: use a divisor")
        if batch is None:
            batch = local * dp
    if batch is None and count is None:
        return {} if size is None else {"microbatch_size": size}
    batch_sizes = Batch.resolve(dp, 1, batch=batch, microbatch_size=size, microbatches=count)
    return {
        "microbatch_size": batch_sizes.microbatch_size,
        "microbatches": batch_sizes.microbatches,
    }


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        *(MEGATRON, BRIDGE, TORCHTITAN, TORCHTITAN_MAIN),
        *(DEEPSPEED, NANOTRON, ACCELERATE, AXOLOTL),
    )
}
NAMES_NO_MODEL = "a file without a model"
_OURS = re.compile(r"^# fivefold: (\{.*\})$", re.MULTILINE)
_PLANNED = {"lr": "learning rate", "steps": "steps"}  # of YOURS, what a plan may say
_SUFFIXES = (".sh", ".slurm", ".sbatch", ".yaml", ".yml", ".py", ".json", ".toml")
# What is only in texts of a format, for files that people name as they like; all others are YAML.
_TEXTS = {
    ".json": r"\A\s*\{",
    ".sh": r"^#!.*sh$|(^|\s)--[a-z]+-[a-z]",
    ".py": r"^(import|from|def) ",
    ".toml": r"^\[[\w.]+\]$",
}


@dataclass(frozen=True)
class EmittedPlan:
    """A plan for another framework: the text of its file, and what it cannot express."""

    target: Target
    text: str
    losses: tuple[Loss, ...]
    options: PlanOptions  # the plan that the file is
    after: Priced | None = None  # the estimate of that plan
    notes: tuple[str, ...] = ()  # its memory, and what the file leaves to the user

    @property
    def lines(self) -> tuple[str, ...]:
        """The losses in words."""
        return tuple(loss.text(self.target.title) for loss in self.losses)


@dataclass(frozen=True)
class ForeignPlan:
    """A plan from another framework's file: keys that are not known here, and what was assumed."""

    target: Target
    options: PlanOptions
    unknown: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        unknown = [f"not known here, so not planned: {key}" for key in self.unknown]
        return (*self.notes, *unknown)


def _unpriced(_values: Values) -> Priced | None:
    return None


def emit_plan(
    name: str, plan: Plan, price: Price = _unpriced, unplanned: Collection[str] = ()
) -> EmittedPlan:
    """The plan as a file of a framework; `price` estimates it, for what is lost. Keys that depend
    on our `unplanned` ones are left out."""
    # A target by its name.
    if name not in TARGETS:
        raise UnknownName("emit target", name, list(TARGETS))
    target, options = TARGETS[name], plan.options
    shape = replace(plan.shape, tuning=None)
    expressed = express(target, values_of(plan), (options.model, options.set, shape), price)
    file_losses = [loss for loss in expressed.losses if not (loss.left and loss.key in unplanned)]
    losses = (*file_losses, *model_losses(target, shape))
    before = values_of(plan)
    left = {key: before[key] for key in target.left}
    flat = _file_keys(target, shape, expressed.values, left)
    doubled = {key: 2 * before[key] for key in unplanned}
    other = _file_keys(target, shape, {**expressed.values, **doubled}, {**left, **doubled})
    flat = {key: value for key, value in flat.items() if value == other.get(key)}
    nearest = options_of(expressed.values, options.model, options.set)
    after = price({**expressed.values, **left})
    notes = [] if after is None else [f"memory of the fullest rank: {after}"]
    planned = [name for key, name in _PLANNED.items() if key not in unplanned]
    names = zip(YOURS, target.yours, strict=True)
    yours = [f"{name} ({theirs})" for name, theirs in names if name not in planned]
    notes.append(f"still yours: {', '.join(yours)}")
    lines = [f"{shape.name} on {nearest.layout} for {target.title}, planned by fivefold"]
    lines += [*(loss.text(target.title) for loss in losses), *notes]
    ours: dict[str, Any] = {"model": options.model}
    lines.append(f"fivefold: {json.dumps({**ours, 'set': options.set} if options.set else ours)}")
    sheet = Sheet(
        *(flat, expressed.values, shape, options.model, gpus_per_node(plan.machine), tuple(lines))
    )
    return EmittedPlan(target, target.write(sheet), losses, nearest, after, tuple(notes))


def _file_keys(target: Target, shape: Shape, ours: Values, left: Values) -> Flat:
    """The keys of a file: those of the model, of the table, and what every file has."""
    values = target.outgoing(ours, shape)
    flat = {**target.model_keys(_as_long(shape, values)), **write_keys(target.table, values)}
    extra = target.extra_keys(shape, {**values, **left})
    return {**flat, **{key: value for key, value in extra.items() if key not in flat}}


def _as_long(shape: Shape, values: Values) -> Shape:
    """The model with as many positions as rows have: Megatron refuses longer rows."""
    return replace(shape, max_seq=max(shape.max_seq, values.get("seq") or 0))


def model_losses(target: Target, shape: Shape) -> Iterator[Loss]:
    """What a file that describes or names its model leaves out of this one."""
    if target in (TORCHTITAN, TORCHTITAN_MAIN):
        known = titan_of(shape.name)
        if known is None or not known[1 if target is TORCHTITAN else 2]:
            yield Loss("model", shape.name, "register it there")
    if target not in (MEGATRON, NANOTRON):
        return
    model = target.find_model(target.model_keys(shape)).model
    if model is None:
        yield Loss("model", shape.name, NAMES_NO_MODEL)
        return
    described = models.load(model)
    names = [field.name for field in fields(shape) if field.compare]
    if other := [name for name in names if getattr(shape, name) != getattr(described, name)]:
        yield Loss("model", "+".join(other), "", left=True)


def looks_foreign(path: str) -> bool:
    """Whether a file looks like another framework's, by its name and for some by what is in it."""
    where = Path(path)
    if where.suffix in _SUFFIXES and where.suffix not in (".json", ".toml"):
        return not path.lstrip().startswith("{")
    try:
        return _recognised(format_of(where), parse_file(where)[1]) is not None
    except FivefoldError:
        return False


def read_foreign(path: Path, gpus: int | None = None, model: str | None = None) -> ForeignPlan:
    """Another framework's file as a plan. `gpus` and `model` are for files that do not say them."""
    text, flat = parse_file(path)
    target = _recognised(format_of(path), flat)
    if target is None:
        known = ", ".join(sorted(TARGETS))
        rule = f"no key of it is known: give a file of {known}, or a plan.toml"
        raise BadFile(str(path), [rule])
    if format_of(path) == ".json":
        refuse_repeated_json(text, str(path))
    try:
        return _read(target, text, flat, gpus, model)
    except BadFile as error:
        raise BadFile(str(path), error.problems) from error
    except FivefoldError as error:
        raise BadFile(str(path), [str(error)]) from error


def parse_file(path: Path) -> tuple[str, Flat]:
    """The text of a file, and its keys."""
    text, where, ending = read_text(path), str(path), format_of(path)
    if ending in (".yaml", ".yml"):
        return text, flat_of(yaml_table(text, where))
    if ending == ".json":
        return text, flat_of(json_table(text, where))
    if ending == ".toml":
        return text, flat_of(toml_table(text, where))
    if ending == ".py":
        table = python_table(text, where)
        return text, read_overrides(text) if _is_bridge(table) else table
    megatron = read_script(text)
    return text, megatron if "tensor-model-parallel-size" in megatron else _overrides(
        text, megatron
    )


def format_of(path: Path) -> str:
    """The ending that names a file's format: its own, or for others the one that its text has."""
    if path.suffix in _SUFFIXES:
        return path.suffix
    text = read_text(path)
    endings = (ending for ending, rule in _TEXTS.items() if re.search(rule, text, re.MULTILINE))
    return next(endings, ".yaml")


def _overrides(text: str, megatron: Flat) -> Flat:
    overrides = read_overrides(text)
    return overrides if _is_bridge(overrides) else megatron


def _is_bridge(flat: Flat) -> bool:
    return any(re.match(r"model\.\w+_parallel\w*$|train\.\w+_batch_size$", key) for key in flat)


def _recognised(suffix: str, flat: Flat) -> Target | None:
    """Whose file this is, by its keys."""

    def has(*starts: str) -> bool:
        return any(key.startswith(starts) for key in flat)

    if suffix in (".yaml", ".yml"):
        if has("base_model"):
            return AXOLOTL
        if has("parallelism.", "tokens."):
            return NANOTRON
        if has("compute_environment", "distributed_type", "parallelism_config", "fsdp_config.fsdp"):
            return ACCELERATE
        return AXOLOTL if has("micro_batch_size", "dp_shard_size") else None
    if suffix == ".json":
        return DEEPSPEED if has("train_", "zero_optimization", "gradient_acc") else None
    if suffix == ".toml":
        return TORCHTITAN if has("parallelism.", "training.", "job.") else None
    if _is_bridge(flat):
        return BRIDGE
    if suffix == ".py":
        return TORCHTITAN_MAIN if has("parallelism.", "training.") else None
    names = ("tensor-model", "pipeline-model", "micro-batch", "num-layers", "expert-model")
    return MEGATRON if has(*names) else None


def _read(
    target: Target, text: str, flat: Flat, gpus: int | None, model: str | None
) -> ForeignPlan:
    launched = world_of_launch(flat) if target in (MEGATRON, BRIDGE) else None
    auto = [key for key, value in flat.items() if value == "auto"]
    remarks = [str(value) for key, value in flat.items() if key.startswith(NOTE)]
    remarks += [f"auto, so the program decides: {', '.join(auto)}"] if auto else []
    flat = {
        key: file_value
        for key, file_value in flat.items()
        if file_value != "auto" and not key.startswith(NOTE)
    }
    read, used, wrong = read_keys(target.table, flat)
    if wrong:
        raise BadFile(target.title, wrong)
    described = target.find_model(flat)
    ours = _ours(text)
    name = model or _chosen_model(target, flat, ours, described.model, read)
    if name is None:
        raise FivefoldError(
            f"{target.title} says no model that is known here: add --set model=NAME, a preset or a "
            "config.json"
        )
    values, notes = complete(target, target.incoming(read, flat), gpus, launched)
    changes = dict(ours.get("set", {})) if name == ours.get("model") else {}
    known = {*used, *described.used}
    unknown = [
        f"{key or 'the configuration'} = {value}"[:100]
        for key, value in flat.items()
        if key not in known
        and not key.startswith((*target.neutral, "slurm."))
        and value is not None
    ]
    options = options_of(values, name, changes)
    return ForeignPlan(target, options, tuple(unknown), (*described.notes, *remarks, *notes))


def _chosen_model(
    target: Target, flat: Flat, ours: dict[str, Any], described: str | None, read: Values
) -> str | None:
    """The model of our comment, unless the keys beside it have been changed since."""
    named = ours.get("model")
    if named is None or described is None:
        return named or described
    shape = models.with_overrides(models.load(named), ours.get("set", {}))
    written = target.model_keys(_as_long(shape, read))
    changed = [key for key, value in written.items() if not same(flat.get(key), value)]
    return described if changed else named


def _ours(text: str) -> dict[str, Any]:
    """The model, as our own comment says it."""
    match = _OURS.search(text)
    try:
        table: dict[str, Any] = json.loads(match[1]) if match else {}
    except ValueError:
        return {}
    return table if isinstance(table.get("model"), str) else {}


__all__ = [
    "NAMES_NO_MODEL",
    "TARGETS",
    "EmittedPlan",
    "Expressed",
    "ForeignPlan",
    "Loss",
    "emit_plan",
    "model_losses",
    "read_foreign",
]
