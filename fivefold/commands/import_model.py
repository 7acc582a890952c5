"""`fivefold import`: a folder of Hugging Face or TorchTitan as a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fivefold.commands.job import HUGGING_FACE, TITAN_FORMATS, one_of, titan_model
from fivefold.commands.options import print_answer
from fivefold.core import PRECISIONS, FivefoldError, tables
from fivefold.core.layout import buffers, tuned, weights
from fivefold.core.model import (
    ADAPTER,
    TOKENIZER_FILES,
    files_in,
    known_keys,
    parameters,
    tokenizer_in,
)
from fivefold.core.model import presets as models

if TYPE_CHECKING:
    import torch

    from fivefold.commands.titan_weights import TitanFolder
    from fivefold.core.model import Shape
    from fivefold.huggingface import AdapterFolder, HfFolder

_CONFIG = "config.json"
_COPIED = (*TOKENIZER_FILES, "generation_config.json")
_RATES = {10e9: 2e-5, float("inf"): 1e-5}  # of full fine-tuning, by the number of parameters
_ADAPTER_RATE = 1e-4


def run(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Model folder: config.json and *.safetensors, or a checkpoint of TorchTitan; "
            "with --keys the name of a family, such as llama.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Run folder to create (default: runs/ and the name of DIR)."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Of a TorchTitan folder: a preset, config.json or Hugging Face folder."),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Adapter of this model, as PEFT saves it, to train on.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32 or bf16 (default: bf16 if DIR has 16 bits or fewer).")
    ] = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="Print which keys of config.json a family may have.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Create a run that starts from a downloaded Hugging Face model, or from TorchTitan's."""
    if keys:
        if out or model or adapter or dtype:
            raise FivefoldError("--keys imports nothing: leave the other options out")
        return print_answer(ConfigKeys(str(folder), known_keys(str(folder))), as_json)
    print_answer(import_model(folder, out=out, model=model, adapter=adapter, dtype=dtype), as_json)


@dataclass(frozen=True)
class ConfigKeys:
    """The keys that a `config.json` of a family may have, with what their values may be."""

    family: str
    keys: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """What `fivefold import --keys --json` prints."""
        return asdict(self)

    def __str__(self) -> str:
        width = max(map(len, self.keys))
        lines = [f"  {key:{width}}  {kind}".rstrip() for key, kind in self.keys.items()]
        end = "Null is no value. Keys of tokens, generation, training and files pass as well"
        return "\n".join([f"Keys of a config.json of {self.family}:", *lines, end])


@dataclass(frozen=True)
class ImportedModel:
    """A run whose step 0 has the weights of a downloaded model.

    `str()` is the text of `fivefold import`, `to_json()` its JSON.
    """

    run: str
    read: str  # the folder of the weights
    format: str
    checkpoint: str
    model: str
    family: str
    parameters: int
    tensors: int
    dtype: str
    lr: float
    tokenizer: str | None
    next: tuple[str, ...]  # commands that fine-tune it

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run)

    def to_json(self) -> dict[str, Any]:
        """What `fivefold import --json` prints."""
        return asdict(self)

    def __str__(self) -> str:
        read = f", read from {self.read}" if self.format != HUGGING_FACE else ""
        lines = [
            f"{self.model} ({self.family}, {self.parameters:,} parameters) is step 0 of "
            f"{self.run}{read}, in {self.dtype}; its plan has the learning rate {self.lr:g} of "
            "fine-tuning. Tokenize text with its own tokenizer, and train:",
            *(f"  {command}" for command in self.next),
            "For conversations, add --chat to the first command.",
        ]
        if self.tokenizer is None:
            lines.append(
                f"It came without a tokenizer.json: put the model's own into {self.run} first"
            )
        return "\n".join(lines)


def import_model(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    model: str | None = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
) -> ImportedModel:
    """Create a run that starts from the folder of a Hugging Face model, or from TorchTitan's.

    `model` says what a TorchTitan folder has. `adapter` is a folder of PEFT, to be trained on.
    """
    folder = Path(folder)
    dtype = dtype and one_of("--dtype", dtype, ("fp32", "bf16"))
    titan = titan_model(folder, model)
    origin = (folder, str(folder / _CONFIG)) if titan is None else titan
    shape = models.load(origin[1])
    weights(shape)  # refuses what cannot be built
    source = ImportSource(*origin, titan is not None)
    run_folder = Path("runs") / shape.name if out is None else Path(out)
    return _imported(source, run_folder, shape, dtype, None if adapter is None else Path(adapter))


class ImportSource(NamedTuple):
    """What is imported."""

    folder: Path
    model: str  # a preset, or where its config is
    is_titan: bool

    def open(self, shape: Shape) -> HfFolder | TitanFolder:
        """The weights, all of them checked."""
        from fivefold.commands.titan_weights import TitanFolder
        from fivefold.huggingface import HfFolder

        return (TitanFolder if self.is_titan else HfFolder)(self.folder, shape)

    def files(self) -> tuple[str, dict[str, bytes]]:
        """The model of the plan, and what is copied: its config, and the tokenizer beside it."""
        if models.is_text(self.model) or models.is_preset(self.model):
            return self.model, {}
        path = Path(self.model)
        config = path / _CONFIG if path.is_dir() else path
        # As transformers does: adapters that the run exports must name their base model.
        keys = json.loads(config.read_bytes()) | {"_name_or_path": str(config.parent.resolve())}
        text = json.dumps(keys, indent=2).encode()
        return _CONFIG, files_in([config.parent], _COPIED) | {_CONFIG: text}


def _imported(
    origin: ImportSource, target: Path, shape: Shape, dtype: str | None, adapter: Path | None
) -> ImportedModel:
    """Write the run."""
    # Imported here, so that a bad command line is refused before torch is loaded.
    import torch

    from fivefold.huggingface import AdapterFolder
    from fivefold.train.checkpoint import Facts, published, write_checkpoint

    if published(target / "checkpoints"):
        raise FivefoldError(
            f"{target} has checkpoints already: give a folder without any, with -o RUN"
        )
    source = origin.open(shape)
    adapters = None if adapter is None else AdapterFolder(adapter, shape)
    chosen = dtype or ("bf16" if source.is_narrow else "fp32")
    size = parameters(shape).total
    train: dict[str, Any] = {"lr": next(rate for most, rate in _RATES.items() if size < most)}
    if adapters is not None:
        shape, tuning = tuned(shape, adapters.tuning), adapters.tuning
        adapted = {"lora": tuning.rank, "lora_alpha": tuning.alpha, "lora_targets": tuning.targets}
        train = {"lr": _ADAPTER_RATE, **adapted}
    model, copied = origin.files()
    table = {"model": model, "precision": chosen, "train": train}
    plan = tables.to_toml(table)
    written = _write_new(target, copied | {"plan.toml": plan.encode()})
    weight_dtype: torch.dtype = getattr(torch, PRECISIONS[chosen].dtype)
    entries = list(_entries(source, adapters, shape, weight_dtype))
    facts = Facts(step=0, plan=plan, has_states=False, plan_in_run=True)
    try:
        path = write_checkpoint(target / "checkpoints", entries, facts)
    except FivefoldError:  # without its weights, the plan would train others
        for file in written:
            file.unlink()
        raise
    tokenizer = tokenizer_in(target)
    return ImportedModel(
        run=str(target),
        read=str(origin.folder),
        format=TITAN_FORMATS[0] if origin.is_titan else HUGGING_FACE,
        checkpoint=str(path),
        model=shape.name,
        family=shape.family,
        parameters=size,
        tensors=len(entries),
        dtype=chosen,
        lr=train["lr"],
        tokenizer=None if tokenizer is None else tokenizer.fingerprint,
        # In the model's own tokens, at a rate that preserves what it knows, which the plan has.
        next=(
            f"fivefold tokens YOUR_TEXT --tokenizer {target} -o {target}/corpus",
            f"fivefold train {target}/plan.toml --out {target} --resume "
            f"--set packed=true data={target}/corpus",
        ),
    )


def _write_new(target: Path, files: dict[str, bytes]) -> list[Path]:
    """Write the files of a run, unless one of another content has the name of one of them; returns
    those that were not there."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        old_names = [name for name in files if (target / name).exists()]
        if foreign := [name for name in old_names if (target / name).read_bytes() != files[name]]:
            raise FivefoldError(
                f"{target} has another {' and '.join(foreign)} already, which would be "
                "overwritten: give a folder without, with -o RUN"
            )
        for name, data in files.items():
            (target / name).write_bytes(data)
        return [target / name for name in files if name not in old_names]
    except OSError as error:
        raise FivefoldError(
            f"cannot make {target}: {error.strerror}; give another folder, with -o RUN"
        ) from error


def _entries(
    source: HfFolder | TitanFolder, adapters: AdapterFolder | None, shape: Shape, dtype: torch.dtype
) -> Iterator[Any]:
    """The tensors of the checkpoint; each is read when it is written."""
    import torch

    for weight in weights(shape):
        read = adapters.weight if adapters and ADAPTER in weight.name else source.weight
        yield f"model/{weight.name}", weight.shape, dtype, partial(read, weight, dtype)
    for weight in buffers(shape):
        wide = torch.float32
        yield f"model/{weight.name}", weight.shape, wide, partial(source.weight, weight, wide)
