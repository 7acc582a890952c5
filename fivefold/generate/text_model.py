"""A model as it is found in a folder, and how it is run: what a command needs before it has texts.

Nothing here loads torch before `set_up`, so that a bad command line is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.core import models, plan
from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.plan import Plan, PlanOptions
from fivefold.core.precision import FORMATS
from fivefold.core.shape import Shape
from fivefold.core.weights import tuned

if TYPE_CHECKING:
    from fivefold.generate.layout import ReadWeight
    from fivefold.generate.text import Codec
    from fivefold.generate.text_ranks import Tell, TextTask
    from fivefold.generate.writer import TextRequest
    from fivefold.launch.backend import Backend

DTYPES = [name for name, each in FORMATS.items() if each.verified]
_TOKENIZER, _BYTES_END = "tokenizer.json", 256
_MOST_RANKS = 64  # processes on one machine


@dataclass(frozen=True)
class TextModel:
    """A model as it is found in a folder."""

    shape: Shape
    options: PlanOptions  # its name and changes
    source: Path
    folder: Path  # that may have a tokenizer and its configs
    is_run: bool


def find_model(source: Path) -> TextModel:
    """The model of a folder."""
    if (source / "plan.toml").exists():
        options = plan.read(source / "plan.toml")
        shape = models.with_overrides(models.load(options.model), options.set)
        shape = tuned(shape, options.train.tuning)
        path = source if models.is_text(options.model) else Path(options.model)
        beside = path if path.is_dir() else path.parent
        folder = beside if (beside / _TOKENIZER).exists() else source
        named = PlanOptions(options.model, set=options.set, train=options.train.only_tuning())
        return TextModel(shape, named, source, folder, True)
    if (source / "config.json").exists():
        config = str(source / "config.json")
        return TextModel(models.load(config), PlanOptions(config), source, source, False)
    rule = "is neither a run (plan.toml) nor a Hugging Face model (config.json)"
    raise BadFile(str(source), [f"{rule}: give one of these folders"])


@dataclass(frozen=True)
class ModelOptions:
    """How a model is run. Without a dtype, that of the device."""

    layout: str = "dp=1"
    dtype: str | None = None
    device: str = "auto"
    tokenizer: str | None = None  # a file, or bytes
    cache_gb: float = 1.0  # on a rank
    batch_invariant: bool = False


@dataclass(frozen=True)
class ModelSetup:
    """A model with its tokenizer, layout and devices. `open_weights` tells of damaged files."""

    model: TextModel
    plan: Plan
    codec: Codec
    ends: frozenset[int]  # tokens that end a text
    options: ModelOptions
    dtype: str
    device: str
    backend: Backend
    open_weights: Callable[[Tell], ReadWeight]

    def task(self, requests: list[TextRequest], records_routes: bool = False) -> TextTask:
        """What every rank does for these requests."""
        from fivefold.generate.text_ranks import TextTask

        return TextTask(
            self.plan,
            self.dtype,
            self.options.cache_gb,
            self.open_weights,
            self.codec,
            requests,
            self.device,
            self.backend,
            records_routes,
            self.options.batch_invariant,
        )


def set_up(
    model: TextModel, options: ModelOptions, open_weights: Callable[[Tell], ReadWeight]
) -> ModelSetup:
    """Choose devices, and read the tokenizer; refuses what cannot run here."""
    from fivefold.generate.text import ByteCodec, end_tokens
    from fivefold.launch.backend import NcclLibrary, available_device, choose_backend, num_gpus

    gpus = num_gpus()
    device = available_device(options.device, gpus)
    plan, codec = _plan(model, options), _codec(model, options.tokenizer)
    is_bytes = isinstance(codec, ByteCodec)
    return ModelSetup(
        model,
        plan,
        codec,
        frozenset({_BYTES_END}) if is_bytes else end_tokens(model.folder),
        options,
        options.dtype or ("float32" if device == "cpu" else "bfloat16"),
        device,
        choose_backend(None, device, plan.layout.world, gpus, NcclLibrary.here()),
        open_weights,
    )


def _plan(model: TextModel, options: ModelOptions) -> Plan:
    """The plan of the layout; refused if it cannot run here."""
    from fivefold.generate.layout import invariant_plan, plan_of

    plan = plan_of(model.shape, replace(model.options, layout=options.layout))
    plan = invariant_plan(plan) if options.batch_invariant else plan
    if plan.layout.world > _MOST_RANKS:
        raise FivefoldError(
            f"--layout {options.layout}: a process is forked for every rank, and "
            f"{plan.layout.world} are too many for one machine: use at most {_MOST_RANKS}"
        )
    return plan


def _codec(model: TextModel, tokenizer: str | None) -> Codec:
    from fivefold.generate.text import NUM_BYTES, ByteCodec, read_tokenizer

    path = model.folder / _TOKENIZER if tokenizer is None else Path(tokenizer)
    if tokenizer != "bytes" and (tokenizer is not None or path.exists()):
        return read_tokenizer(path)
    if tokenizer is None and (not model.is_run or model.shape.vocab > 2 * NUM_BYTES):
        rule = f"has no {_TOKENIZER}, and a vocabulary of {model.shape.vocab:,}"
        raise BadFile(str(model.folder), [f"{rule}: give --tokenizer FILE, or --tokenizer bytes"])
    return ByteCodec()
