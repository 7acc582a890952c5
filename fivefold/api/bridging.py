"""Files of other frameworks as plans: `fivefold plan FILE`; and their folders of weights, as far as
no weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.bridges import VERSIONS, checkpoint_in
from fivefold.core import FivefoldError
from fivefold.core.plan import PlanOptions
from fivefold.render import Printed

if TYPE_CHECKING:  # most targets are models, for which nothing of it is needed
    from fivefold.bridges import ForeignPlan

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


def foreign_answer(found: ForeignPlan, printed: Printed) -> Printed:
    """What `fivefold plan FILE` prints: the plan, and what of the file is not in it."""
    table, lines = printed
    read = {"from": found.target.name, "unknown": [*found.unknown], "notes": [*found.notes]}
    head = f"read as {found.target.title}: {table['model']} on {found.options.layout}"
    return {**table, "read": read}, [head, *(f"  {line}" for line in found.lines), "", *lines]


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
