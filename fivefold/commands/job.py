"""A job in the user's words: a model, and any key of plan, training or model as a keyword."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    cast,
    runtime_checkable,
)

from fivefold.bridges import VERSIONS, checkpoint_in
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
from fivefold.render import Printed

if TYPE_CHECKING:
    from fivefold.bridges import ForeignPlan
    from fivefold.launch import Backend

_WHERE = "the keywords"
_OF_LAYOUT = ("zero", "sp", "context", "chunks")  # that a Layout says itself


class TaskProgress(NamedTuple):
    """How far a long task is: `done` of `total`."""

    done: float
    total: float
    what: str


OnProgress = Callable[[TaskProgress], None]


def warn_caller(why: str) -> None:
    """What a function does with a warning that has no `on_warning`."""
    warnings.warn(why, stacklevel=3)


@dataclass(frozen=True)
class GivenJob:
    """A job as it was asked for: its options, the names of those that were given, and whether its
    layout is open: neither given nor in a plan."""

    options: PlanOptions
    keys: frozenset[str]
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
        above("--gpus", gpus, 0)
    target, given_keys = _target(model), frozenset({*job_keys, *changed})
    if isinstance(target, str):
        target = target_or_options(target, changes.get("gpus"), None)
    options = options_from(target, changes)
    closed = "layout" in given_keys or not isinstance(target, str) or says_layout(target)
    return GivenJob(options, given_keys, not closed)


def reopened(job: GivenJob) -> GivenJob:
    """The job with an open layout where GPUs were given, no layout was, and the plan's has another
    number of ranks. Its batch stays, in a multiple of the GPUs."""
    gpus, given_keys = job.options.gpus, job.keys
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


Number = TypeVar("Number", int, float)

BACKENDS = ("nccl", "gloo")
# Names of one type of numbers: each is understood where another one is known.
_SAME_TYPE = (
    *({"bf16", "bfloat16"}, {"fp16", "float16"}, {"fp32", "float32"}, {"fp64", "float64"}),
)


def one_of(option: str, value: str, known: Collection[str]) -> str:
    """Check that an option has one of the known values, or another name of one; returns it."""
    if value not in known:
        same = next((names for names in _SAME_TYPE if value in names), set[str]())
        if option == "--dtype" and (matches := [match for match in known if match in same]):
            return matches[0]
        raise UnknownName(option, value, known)
    return value


def asked_backend(value: str | None) -> Backend | None:
    """The value of --backend; None if it was left out."""
    return None if value is None else cast("Backend", one_of("--backend", value, BACKENDS))


def above(option: str, value: Number, low: Number) -> Number:
    """Check that an option is a number above `low`."""
    if not low < value < 1e9:
        raise FivefoldError(f"{option} {value}: give a number above {low} and below 1e9")
    return value


def positive(option: str, value: float) -> float:
    """Check that an option is above 0 and finite."""
    if not 0 < value < 1e30:
        raise FivefoldError(f"{option} {value}: give a number above 0")
    return value


def checkpoint_step(value: str | int | None) -> int | Literal["best"] | None:
    """The checkpoint that an option names."""
    if value is None or value == "best":
        return value
    text = str(value)
    if not text.isdecimal() or len(text) > 9:
        raise FivefoldError(f"--step {value}: give the number of a step, or best")
    return int(text)


HUGGING_FACE, TITAN_FORMATS = "huggingface", tuple(VERSIONS)
_SUFFIXES = (".sh", ".slurm", ".sbatch", ".yaml", ".yml", ".py", ".json", ".toml")


def is_foreign(target: str) -> bool:
    """Whether a target is a file of another framework."""
    if not target.endswith(_SUFFIXES) and not _is_file(target):
        return False
    from fivefold.bridges import looks_foreign

    return looks_foreign(target)


def _is_file(target: str) -> bool:
    try:
        return Path(target).is_file()
    except OSError:  # a name too long for a file, such as the text of a config
        return False


def foreign_plan(target: str, gpus: int | None, model: str | None) -> ForeignPlan | None:
    """The plan of another framework's file; None if the target is none."""
    if is_foreign(target):
        from fivefold.bridges import read_foreign

        return read_foreign(Path(target), gpus, model)
    if model is not None:
        if _is_file(target):
            from fivefold.bridges import parse_file

            parse_file(Path(target))  # if that fails, it is what is wrong, and not the model
        raise FivefoldError(
            f"model {model} is for a file of another framework that names none: give MODEL alone"
        )
    return None


def target_or_options(target: str, gpus: int | None, model: str | None) -> str | PlanOptions:
    """A target as it is, or the plan of another framework's file."""
    foreign = foreign_plan(target, gpus, model)
    return target if foreign is None else foreign.options


def foreign_answer(foreign: ForeignPlan, printed: Printed) -> Printed:
    """What `fivefold plan FILE` prints: the plan, and what of the file is not in it."""
    table, lines = printed
    read = {"from": foreign.target.name, "unknown": [*foreign.unknown], "notes": [*foreign.notes]}
    head = f"read as {foreign.target.title}: {table['model']} on {foreign.options.layout}"
    return {**table, "read": read}, [head, *(f"  {line}" for line in foreign.lines), "", *lines]


def titan_model(folder: Path, model: str | None) -> tuple[Path, str] | None:
    """The checkpoint of TorchTitan in a folder, and its model; None if the folder has none."""
    checkpoint = checkpoint_in(folder)
    if checkpoint is None and model is not None:
        raise FivefoldError(
            f"--model {model} is for a folder of TorchTitan (.metadata and *.distcp), and {folder} "
            "is none: its own config.json names the model"
        )
    if checkpoint is not None and model is None:
        raise FivefoldError(
            f"{checkpoint} is a folder of TorchTitan, which does not say what its model is: name "
            "it with --model, a preset, a config.json or a Hugging Face folder"
        )
    return None if checkpoint is None or model is None else (checkpoint, model)
