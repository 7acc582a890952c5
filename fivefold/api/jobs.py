"""A job in the user's words: a model, and any key of plan, training or model as a keyword."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fivefold.api.bridging import target_or_options
from fivefold.api.checks import above
from fivefold.core import BadFile, FivefoldError, Machine, UnknownName, code_text, tables
from fivefold.core import hardware as machines
from fivefold.core.layout import Layout, parse_zero
from fivefold.core.model import Shape
from fivefold.core.model import presets as models
from fivefold.core.plan import (
    Plan,
    PlanOptions,
    options_from,
    plan_keys,
    resolve,
    says_layout,
    train_keys,
)

_WHERE = "the keywords"
_OF_LAYOUT = ("zero", "sp", "context", "chunks")  # that a Layout says itself


class TaskProgress(NamedTuple):
    """How far a long task is: `done` of `total`."""

    done: float
    total: float
    what: str


OnProgress = Callable[[TaskProgress], None]


@dataclass(frozen=True)
class GivenJob:
    """A job as it was asked for: its options, the names of those that were given, and whether its
    layout is open: neither given nor in a plan."""

    options: PlanOptions
    given: frozenset[str]
    is_open: bool


@runtime_checkable
class HasPlan(Protocol):
    """An answer that has a plan."""

    @property
    def plan(self) -> Plan: ...


Model = str | Path | Mapping[str, Any] | Shape | Plan | PlanOptions | GivenJob | HasPlan
"""A preset's name, the path of a config.json, a plan.toml or another framework's file, a config as
a table, a shape, a plan, or an answer that has a plan."""


def given_job(model: Model, keys: Mapping[str, Any]) -> GivenJob:
    """The job of a model and of keywords, each checked; unknown ones suggest the nearest."""
    if isinstance(model, GivenJob):
        assert not keys, "a job has its keywords"
        return model
    job_keys = {key: value for key, value in keys.items() if value is not None}
    changed: Mapping[str, Any] = job_keys.pop("set", {})
    if twice := [key for key in changed if key in job_keys]:
        raise BadFile(_WHERE, [f"{key} is given twice: leave one out" for key in twice])
    pairs = {
        **_plain(job_keys),
        **{key: "none" if setting is None else setting for key, setting in changed.items()},
    }
    changes = _sorted(pairs)
    if (gpus := changes.get("gpus")) is not None:
        above("gpus", gpus, 0)
    target, given_keys = _target(model), frozenset({*job_keys, *changed})
    if isinstance(target, str):
        target = target_or_options(target, changes.get("gpus"), None)
    options = options_from(target, changes)
    closed = "layout" in given_keys or not isinstance(target, str) or says_layout(target)
    return GivenJob(options, given_keys, not closed)


def reopened(job: GivenJob) -> GivenJob:
    """The job with an open layout where GPUs were given, no layout was, and the plan's has another
    number of ranks. Its batch stays, in a multiple of the GPUs."""
    gpus, given_keys = job.options.gpus, job.given
    if job.is_open or gpus is None or "gpus" not in given_keys or "layout" in given_keys:
        return job
    plan = resolve(replace(job.options, gpus=None))
    if plan.layout.world == gpus:
        return job
    batch = job.options.batch or -(-plan.batch.sequences // gpus) * gpus
    free = dict.fromkeys(("microbatches", "microbatch_size", "stage_layers", "gather", "ep_nodes"))
    options = replace(job.options, layout=PlanOptions.layout, batch=batch, **free)
    return replace(job, options=options, is_open=True)


def as_shape(model: str | Path | Mapping[str, Any] | Shape) -> Shape:
    """The shape of a preset, of the config.json at a path, or of a config as a table."""
    if isinstance(model, Shape):
        return model
    return models.load(str(_target(model)))


def as_machine(machine: str | Path | Machine) -> Machine:
    """A machine by the name of its preset, or from a TOML file."""
    return machine if isinstance(machine, Machine) else machines.load(machine)


def _target(model: Model) -> str | PlanOptions:
    """What `options_from` reads."""
    if isinstance(model, str):
        return model
    if isinstance(model, Path):
        return str(model) if model.suffix or len(model.parts) > 1 else f"./{model}"
    if isinstance(model, Shape):
        return models.to_text(model)
    if isinstance(model, PlanOptions):
        return model
    if isinstance(model, Plan):
        return model.options
    if isinstance(model, Mapping):
        return models.config_text(model)
    if isinstance(model, HasPlan):
        return model.plan.options
    raise FivefoldError(
        f"a model of type {type(model).__name__}: give a preset's name, the path of a config.json "
        "or plan.toml, a config as a dict, a Shape or a Plan"
    )


def _plain(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords as a plan file has them: texts for layouts, machines, paths and lists."""
    flat: dict[str, Any] = {}
    for key, value in keys.items():
        if key == "layout" and isinstance(value, Layout):
            if twice := [name for name in _OF_LAYOUT if name in keys]:
                raise FivefoldError(f"a Layout says its {twice[0]}: leave the keyword out")
            flat |= _of_layout(value)
        elif key == "machine" and isinstance(value, Machine):
            preset = value.name in machines.presets() and machines.load(value.name) == value
            flat[key] = value.name if preset else machines.to_text(value)
        elif key == "zero":
            flat[key] = parse_zero(value)
        elif key == "stage_layers" and not isinstance(value, str):
            flat[key] = ",".join(map(str, value))
        else:
            flat[key] = _scalar(value)
    return flat


def _scalar(value: Any) -> Any:
    """A number of an array as Python's own, a path as a text, a class or function by its file."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, type | FunctionType):
        return code_text(value)
    return value.item() if hasattr(value, "item") else value


def _of_layout(layout: Layout) -> dict[str, Any]:
    """The keys of a layout; one chunk is what schedules have without being asked."""
    keys: dict[str, Any] = {"layout": str(layout), "zero": layout.zero, "sp": layout.sp}
    chunks = {"chunks": layout.chunks} if layout.chunks > 1 else {}
    return {**keys, "context": layout.context, **chunks}


def _sorted(pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of plan, training and model, checked for their types; all problems at once."""
    of_plan, of_training, of_model = plan_keys(), train_keys(), models.keys()
    plan: dict[str, Any] = {}
    train: dict[str, Any] = {}
    changed: dict[str, str] = {}
    for key, value in pairs.items():
        if key in of_training:
            train[key] = value
        elif key in of_plan:
            plan[key] = value
        elif key in of_model:
            changed[key] = str(value).lower() if isinstance(value, bool) else str(value)
        else:
            raise UnknownName("key", key, [*of_training, *of_plan, *of_model])
    built = tables.build(PlanOptions, {"model": "", **plan, "train": train}, _WHERE)
    changes: dict[str, Any] = {key: getattr(built, key) for key in plan}
    if train:
        changes["train"] = {key: getattr(built.train, key) for key in train}
    return {**changes, **({"set": changed} if changed else {})}
