"""Files of other frameworks as plans: `fivefold plan FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.core.errors import FivefoldError
from fivefold.core.plan import PlanOptions
from fivefold.report.plan_answers import Printed

if TYPE_CHECKING:  # most targets are models, for which nothing of it is needed
    from fivefold.bridges import ForeignPlan

_SUFFIXES = (".sh", ".slurm", ".sbatch", ".yaml", ".yml", ".py", ".json", ".toml")


def is_foreign(target: str) -> bool:
    """Whether a target is a file of another framework."""
    if not target.endswith(_SUFFIXES):
        return False
    from fivefold.bridges import looks_foreign

    return looks_foreign(target)


def foreign_plan(target: str, gpus: int | None, model: str | None) -> ForeignPlan | None:
    """The plan of another framework's file; None if the target is none."""
    if is_foreign(target):
        from fivefold.bridges import read_foreign

        return read_foreign(Path(target), gpus, model)
    if model is not None:
        raise FivefoldError(
            f"--model {model} is for a file of another framework that names none: give MODEL alone"
        )
    return None


def target_or_options(target: str, gpus: int | None, model: str | None) -> str | PlanOptions:
    """A target as it is, or the plan of another framework's file."""
    found = foreign_plan(target, gpus, model)
    return target if found is None else found.options


def foreign_answer(found: ForeignPlan, printed: Printed) -> Printed:
    """What `fivefold plan FILE` prints: the plan, and what of the file is not in it."""
    table, lines = printed
    read = {"from": found.target.name, "unknown": [*found.unknown], "notes": [*found.notes]}
    head = f"read as {found.target.title}: {found.options.model[:60]} on {found.options.layout}"
    return {**table, "read": read}, [head, *(f"  {each}" for each in found.lines), "", *lines]
