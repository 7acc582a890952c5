"""`fivefold import`: a folder of Hugging Face or TorchTitan as a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fivefold.commands.job import HUGGING_FACE, TITAN_FORMATS, one_of, titan_model
from fivefold.commands.options import json_text
from fivefold.core import PRECISIONS, FivefoldError, tables
from fivefold.core.layout import buffers, tuned, weights
from fivefold.core.model import ADAPTER, TOKENIZER_FILES, files_in, parameters, tokenizer_in
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
            help="Model folder: config.json and *.safetensors, or a checkpoint of TorchTitan.",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Create a run that starts from a downloaded Hugging Face model, or from TorchTitan's."""
    dtype = dtype and one_of("--dtype", dtype, ("fp32", "bf16"))
    titan = titan_model(folder, model)
    origin = (folder, str(folder / _CONFIG)) if titan is None else titan
    shape = models.load(origin[1])
    weights(shape)  # refuses what cannot be built
    source = ImportSource(*origin, titan is not None)
    table = _imported(source, out or Path("runs") / shape.name, shape, dtype, adapter)
    typer.echo(json_text(table) if as_json else _text(table))


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
    given: ImportSource, target: Path, shape: Shape, dtype: str | None, adapter: Path | None
) -> dict[str, Any]:
    """Write the run; returns a table of what was written."""
    # Imported here, so that a bad command line is refused before torch is loaded.
    import torch

    from fivefold.huggingface import AdapterFolder
    from fivefold.train.checkpoint import Facts, published, write_checkpoint

    if published(target / "checkpoints"):
        raise FivefoldError(
            f"{target} has checkpoints already: give a folder without any, with -o RUN"
        )
    source = given.open(shape)
    adapters = None if adapter is None else AdapterFolder(adapter, shape)
    chosen = dtype or ("bf16" if source.is_narrow else "fp32")
    size = parameters(shape).total
    train: dict[str, Any] = {"lr": next(rate for most, rate in _RATES.items() if size < most)}
    if adapters is not None:
        shape, tuning = tuned(shape, adapters.tuning), adapters.tuning
        adapted = {"lora": tuning.rank, "lora_alpha": tuning.alpha, "lora_targets": tuning.targets}
        train = {"lr": _ADAPTER_RATE, **adapted}
    model, copied = given.files()
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
    return {
        "run": str(target),
        "read": str(given.folder),
        "format": TITAN_FORMATS[0] if given.is_titan else HUGGING_FACE,
        "checkpoint": str(path),
        "model": shape.name,
        "family": shape.family,
        "parameters": size,
        "tensors": len(entries),
        "dtype": chosen,
        "lr": train["lr"],
        "tokenizer": None if (tokenizer := tokenizer_in(target)) is None else tokenizer.fingerprint,
        "next": _next_steps(target),
    }


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


def _next_steps(run: Path) -> list[str]:
    """Commands that fine-tune this model: text in its own tokens, at a rate that keeps what it
    knows, which the plan has."""
    return [
        f"fivefold tokens YOUR_TEXT --tokenizer {run} -o {run}/corpus",
        f"fivefold train {run}/plan.toml --out {run} --resume --set packed=true data={run}/corpus",
    ]


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


def _text(table: dict[str, Any]) -> str:
    read = f", read from {table['read']}" if table["format"] != HUGGING_FACE else ""
    lines = [
        f"{table['model']} ({table['family']}, {table['parameters']:,} parameters) is step 0 of "
        f"{table['run']}{read}, in {table['dtype']}; its plan has the learning rate "
        f"{table['lr']:g} of fine-tuning. Tokenize text with its own tokenizer, and train:",
        *(f"  {command}" for command in table["next"]),
        "For conversations, add --chat to the first command.",
    ]
    if table["tokenizer"] is None:
        lines.append(
            f"It came without a tokenizer.json: put the model's own into {table['run']} first"
        )
    return "\n".join(lines)
