"""`fivefold export`: a run as a folder of Hugging Face or TorchTitan."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from fivefold.commands.job import (
    HUGGING_FACE,
    TITAN_FORMATS,
    above,
    checkpoint_step,
    one_of,
    warn_caller,
)
from fivefold.commands.options import model_path, print_answer, warn
from fivefold.core import PRECISIONS, FivefoldError, counted
from fivefold.core.layout import tuned
from fivefold.core.model import (
    BYTES,
    TOKENIZER,
    TOKENIZER_FILES,
    TokenizerId,
    Tuning,
    byte_tokenizer,
    files_in,
    fingerprint,
    model_folder,
    parameters,
)
from fivefold.core.model import presets as models
from fivefold.core.plan import PlanOptions, plan
from fivefold.huggingface import (
    CARD,
    GENERATION,
    HfModel,
    as_hf,
    generation_config,
    model_card,
)
from fivefold.records import known_tokenizer, options_of, plan_text_of

if TYPE_CHECKING:
    import torch

_WRITTEN = ("bf16", "fp32")


class ExportOptions(NamedTuple):
    """How the weights are written."""

    format: str
    dtype: str
    shard_gb: float
    tuning: Tuning | None  # of the run
    origin: str | None  # of adapters that are written alone: where their model was imported from


def run(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder to write.")],
    step: Annotated[
        str | None,
        typer.Option(help="Step of the checkpoint, or best (default: the newest valid one)."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16 or fp32 (default: the precision of the plan).")
    ] = None,
    written_as: Annotated[
        str,
        typer.Option(
            "--format",
            help=f"{HUGGING_FACE}, or what TorchTitan loads: torchtitan (up to 0.2.2), "
            "torchtitan-main (from 0.3 on).",
        ),
    ] = HUGGING_FACE,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the adapters of lora, as PEFT reads them.")
    ] = False,
    shard_gb: Annotated[float, typer.Option(help="Largest size of a file, in GB.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the weights of a run as a folder that transformers loads; adapters are merged."""
    exported = export(
        run_folder,
        folder,
        step=step,
        dtype=dtype,
        format=written_as,
        adapter=adapter,
        shard_gb=shard_gb,
        on_warning=warn,
    )
    print_answer(exported, as_json)


@dataclass(frozen=True)
class ExportedModel:
    """The weights of a run in a folder of Hugging Face or TorchTitan.

    `str()` is the text of `fivefold export`, `to_json()` its JSON.
    """

    folder: str
    format: str
    step: int
    model: str
    family: str
    parameters: int
    dtype: str
    adapter: bool  # alone, without the model
    files: tuple[str, ...]  # of weights
    beside: tuple[str, ...]  # other files
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """What `fivefold export --json` prints."""
        return asdict(self)

    def __str__(self) -> str:
        beside = f", beside {', '.join(self.beside)}" if self.beside else ""
        whose = f"{'the adapters of ' if self.adapter else ''}step {self.step} of "
        verb = "are" if self.adapter else "is"
        head = (
            f"{whose}{self.model} ({self.family}, {self.parameters:,} parameters) {verb} in "
            f"{self.folder}, in {self.dtype}, {counted(len(self.files), 'file')} of weights{beside}"
        )
        return "\n".join([head, *self.notes])


def export(
    run: Any,
    folder: str | Path,
    *,
    step: str | int | None = None,
    dtype: str | None = None,
    format: str = HUGGING_FACE,
    adapter: bool = False,
    shard_gb: float = 5.0,
    on_warning: Callable[[str], None] | None = None,
) -> ExportedModel:
    """Write the weights of a run as a folder that transformers or TorchTitan loads.

    Adapters are merged, or with `adapter` written alone, as PEFT reads them.
    """
    one_of("--format", format, (HUGGING_FACE, *TITAN_FORMATS))
    if adapter and format != HUGGING_FACE:
        raise FivefoldError(
            f"--adapter writes what PEFT reads, and --format {format} a model: leave one out"
        )
    dtype = dtype and one_of("--dtype", dtype, _WRITTEN)
    above("--shard-gb", shard_gb, 0.0)
    run_folder, chosen_step = model_path(run), checkpoint_step(step)
    options = options_of(run_folder, chosen_step)
    shape = models.with_overrides(models.load(options.model), options.set)
    narrow = PRECISIONS[options.precision].dtype == "bfloat16"  # fp8 too: its weights are bf16
    chosen = dtype or ("bf16" if narrow else "fp32")
    origin = str(_source(options).get("_name_or_path") or "") if adapter else None
    export_options = ExportOptions(format, chosen, shard_gb, options.train.tuning, origin)
    model = HfModel(shape, {})
    if format == HUGGING_FACE:
        model = as_hf(shape, PRECISIONS[chosen].dtype, _source(options))
    on_warning = on_warning or warn_caller
    return _exported(model, run_folder, chosen_step, Path(folder), export_options, on_warning)


def _source(options: PlanOptions) -> dict[str, Any]:
    """The config of the model that was imported; empty for a preset."""
    if models.is_text(options.model):
        return {}
    path = Path(options.model)
    if "/" in options.model and path.is_dir():
        path = path / "config.json"
    return json.loads(path.read_bytes()) if path.suffix == ".json" else {}


def _exported(
    model: HfModel,
    run_folder: Path,
    step: int | Literal["best"] | None,
    folder: Path,
    options: ExportOptions,
    on_warning: Callable[[str], None],
) -> ExportedModel:
    """Write the model."""
    # Imported here, so that a bad command line is refused before torch is loaded.
    import torch

    from fivefold.commands.titan_weights import how_to_load, write_titan
    from fivefold.huggingface import BASE, base_of, merged, write_adapter, write_model
    from fivefold.train.checkpoint import open_run

    shape = tuned(model.shape, options.tuning)
    dtype: torch.dtype = getattr(torch, PRECISIONS[options.dtype].dtype)
    reader = open_run(run_folder, shape, step, on_warning)

    def read(name: str) -> torch.Tensor:
        return reader.read(f"model/{name}")

    beside: dict[str, bytes] = {}
    notes: list[str] = []
    if options.format != HUGGING_FACE:
        values = merged(shape, read)
        files = write_titan(folder, model.shape, options.format, values, dtype)
        notes = how_to_load(folder, model.shape, options.format)
    elif options.origin is not None:
        base = base_of(shape, options.origin, read)
        files = write_adapter(folder, shape, base, read, dtype, model.config)
        notes = [f"their base model is {base or folder / BASE}, which PEFT loads with them"]
    else:
        beside = _beside(model, run_folder, reader.facts.step, options)
        most, values = int(options.shard_gb * 1e9), merged(shape, read)
        files = write_model(folder, model.shape, model.config, values, dtype, most, beside)
    return ExportedModel(
        folder=str(folder),
        format=options.format,
        step=reader.facts.step,
        model=model.shape.name,
        family=model.shape.family,
        parameters=parameters(model.shape).total,
        dtype=options.dtype,
        adapter=options.origin is not None,
        files=tuple(file.name for file in files),
        beside=tuple(sorted(beside)),
        notes=tuple(notes),
    )


def _beside(
    model: HfModel, run_folder: Path, step: int, options: ExportOptions
) -> dict[str, bytes]:
    """The files of the tokenizer, how the model generates, and its card."""
    read = options_of(run_folder, step)
    folders = (run_folder, model_folder(read.model))
    files = files_in(folders, (*TOKENIZER_FILES, GENERATION))
    files.setdefault(GENERATION, generation_config(model.config))
    recorded = known_tokenizer(run_folder)
    if recorded is not None and recorded.fingerprint == BYTES:
        files |= byte_tokenizer(model.shape.vocab)
    data = files.get(TOKENIZER)
    tokenizer = None if data is None else TokenizerId(TOKENIZER, fingerprint(data))
    text = plan_text_of(run_folder, step) or (run_folder / "plan.toml").read_text("utf-8")
    card = model_card(plan.resolve(read), text, options.dtype, step, tokenizer)
    return {**files, CARD: card}
