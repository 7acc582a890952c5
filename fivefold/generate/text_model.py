"""A model as it is found in a folder, and how it is run: what a command needs before it has texts.

Nothing here loads torch before `set_up`, so that a bad command line is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fivefold.core import FORMATS, BadFile, FivefoldError
from fivefold.core.layout import tuned
from fivefold.core.model import BYTES, NUM_BYTES, TOKENIZER, Shape, TokenizerId, model_folder
from fivefold.core.model import presets as models
from fivefold.core.plan import Plan, PlanOptions
from fivefold.generate.drafts import DraftOptions
from fivefold.records import known_tokenizer, options_of

if TYPE_CHECKING:
    from fivefold.generate.adapters import NamedAdapter
    from fivefold.generate.layout import ReadWeight
    from fivefold.generate.text import Codec
    from fivefold.generate.text_ranks import Tell, TextTask
    from fivefold.generate.writer import TextRequest
    from fivefold.launch import Backend

PRECISIONS = ("bf16", "fp8")  # of weights of linears; bf16 is as --dtype says
DTYPES = [name for name, weight_format in FORMATS.items() if weight_format.verified]
_MOST_RANKS = 64  # processes on one machine


@dataclass(frozen=True)
class TextModel:
    """A model folder."""

    shape: Shape
    options: PlanOptions  # its name and changes
    source: Path
    folder: Path  # that may have a tokenizer and its configs
    is_run: bool
    trained_with: TokenizerId | None = None  # recorded by the run
    adapters: tuple[NamedAdapter, ...] = ()  # beside its weights, in the order of their numbers


def find_model(source: Path, step: int | Literal["best"] | None = None) -> TextModel:
    """Find the model of a folder; of a run, by the plan of the chosen checkpoint."""
    if (source / "plan.toml").exists():
        options = options_of(source, step)
        shape = models.with_overrides(models.load(options.model), options.set)
        shape = tuned(shape, options.train.tuning)
        imported = model_folder(options.model)
        has_tokenizer = imported is not None and (imported / TOKENIZER).exists()
        folder = imported if imported is not None and has_tokenizer else source
        named = PlanOptions(options.model, set=options.set)  # its own adapters are merged
        return TextModel(shape, named, source, folder, True, known_tokenizer(source))
    if (source / "config.json").exists():
        config = str(source / "config.json")
        return TextModel(models.load(config), PlanOptions(config), source, source, False)
    rule = "is neither a run (plan.toml) nor a Hugging Face model (config.json)"
    raise BadFile(str(source), [f"{rule}: give one of these folders"])


@dataclass(frozen=True)
class ModelOptions:
    """Options to run a model; the dtype defaults to that of the device."""

    layout: str = "dp=1"
    dtype: str | None = None
    device: str = "auto"
    tokenizer: str | None = None  # a file, or bytes
    cache_gb: float = 1.0  # on a rank
    batch_invariant: bool = False
    precision: str | None = None  # fp8: weights of linears and experts as codes
    drafts: DraftOptions | None = None
    kv: str | None = None  # fp8: keys and values as codes


@dataclass(frozen=True)
class ModelSetup:
    """A model with its tokenizer, layout and devices. `open_weights` reports damaged files."""

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
        """Task of every rank for these requests."""
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
            self.options.precision == "fp8",
            tuple(adapter.tuning.rank for adapter in self.model.adapters),
            self.options.drafts,
            self.options.kv == "fp8",
        )


def set_up(
    model: TextModel, options: ModelOptions, open_weights: Callable[[Tell], ReadWeight]
) -> ModelSetup:
    """Choose devices and load the tokenizer; refuses what cannot run."""
    from fivefold.generate.text import end_tokens
    from fivefold.launch import NcclLibrary, available_device, choose_backend, num_gpus

    gpus = num_gpus()
    device = available_device(options.device, gpus)
    plan, codec = _plan(model, options), _codec(model, options.tokenizer)
    tokenizer_path = options.tokenizer
    # Configs of that tokenizer are in its folder.
    beside = None if tokenizer_path is None else Path(tokenizer_path).parent
    return ModelSetup(
        model,
        plan,
        codec,
        end_tokens(model.folder, codec, beside),
        options,
        options.dtype or ("float32" if device == "cpu" else "bfloat16"),
        device,
        choose_backend(None, device, plan.layout.world, gpus, NcclLibrary.current()),
        open_weights,
    )


def _plan(model: TextModel, options: ModelOptions) -> Plan:
    """The plan of the layout; refused if it cannot run here."""
    from fivefold.generate.layout import invariant_plan, plan_of

    plan = plan_of(model.shape, replace(model.options, layout=options.layout), options.drafts)
    plan = invariant_plan(plan) if options.batch_invariant else plan
    if options.precision == "fp8" and plan.shape.tuning is not None and plan.shape.tuning.rank:
        raise FivefoldError(
            "--precision fp8 with adapters: they are not rounded, and linears of codes have none; "
            "merge them with `fivefold export`, or leave the precision out"
        )
    if plan.layout.world > _MOST_RANKS:
        raise FivefoldError(
            f"--layout {options.layout}: a process is forked for every rank, and "
            f"{plan.layout.world} are too many for one machine: use at most {_MOST_RANKS}"
        )
    return plan


def _codec(model: TextModel, tokenizer: str | None) -> Codec:
    """The tokenizer of the command line, else the one that the run was trained with."""
    from fivefold.generate.text import ByteCodec, read_tokenizer

    if tokenizer == BYTES or (tokenizer is None and _is_on_bytes(model)):
        return ByteCodec()
    path = model.folder / TOKENIZER if tokenizer is None else Path(tokenizer)
    if tokenizer is None and not path.exists():
        rule = f"has no {TOKENIZER}, and a vocabulary of {model.shape.vocab:,}"
        if model.trained_with is not None:
            rule = f"has no {TOKENIZER}, and was trained with {model.trained_with}"
        raise BadFile(str(model.folder), [f"{rule}: give --tokenizer FILE, or --tokenizer bytes"])
    return read_tokenizer(path)


def _is_on_bytes(model: TextModel) -> bool:
    """Whether the tokens of a model are bytes: the records of its run decide. A run on random
    tokens recorded none; its vocabulary tells then."""
    if model.trained_with is not None:
        return model.trained_with.fingerprint == BYTES
    has_tokenizer = (model.folder / TOKENIZER).exists()
    return model.is_run and not has_tokenizer and model.shape.vocab <= 2 * NUM_BYTES
