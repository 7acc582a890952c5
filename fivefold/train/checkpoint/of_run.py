"""The checkpoint of a run folder whose weights others read: to export them, or to generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from fivefold.core import BadFile, FivefoldError
from fivefold.core.layout import buffers, weights
from fivefold.core.model import Shape
from fivefold.records import options_of
from fivefold.train.checkpoint.checkpoints import Reader
from fivefold.train.checkpoint.folders import best_of, newer_format, published

_SHOWN = 5  # differences that an error names


def open_run(
    run_folder: Path, shape: Shape, step: int | Literal["best"] | None, tell: Callable[[str], None]
) -> Reader:
    """The checkpoint of a step, the one that `keep_best` keeps, or the newest valid one, if it is
    of this model.

    `tell` is called with the reason why a newer one is not valid.
    """
    reader = _reader(run_folder, step, tell)
    _refuse_other(reader, shape)
    return reader


def _reader(
    run_folder: Path, step: int | Literal["best"] | None, tell: Callable[[str], None]
) -> Reader:
    found = published(run_folder / "checkpoints")
    if step == "best":
        return Reader(_best(run_folder, found))
    if step is not None:
        wanted = [path for path in found if path.name == f"step-{step:08d}"]
        if not wanted:
            known = ", ".join(str(int(path.name.removeprefix("step-"))) for path in found)
            raise FivefoldError(
                f"{run_folder} has no checkpoint of step {step}: choose from {known or 'none'}"
            )
        return Reader(wanted[0])
    for path in reversed(found):
        if (newer := newer_format(path)) is not None:
            raise FivefoldError(f"{newer}, or choose another one with --step")
        try:
            return Reader(path)
        except FivefoldError as error:
            tell(str(error))
    way = "restore one from a copy, or train again in another folder" if found else "train it first"
    raise FivefoldError(f"{run_folder} has no good checkpoint: {way}")


def _best(run_folder: Path, found: Sequence[Path]) -> Path:
    judged_by = options_of(run_folder).train.keep_best
    if not judged_by:
        raise FivefoldError(f"{run_folder} keeps no best checkpoint: train with keep_best=SET")
    best = best_of(found, judged_by)
    if best is None:
        raise FivefoldError(f"no checkpoint of {run_folder} was evaluated on {judged_by} yet")
    return best


def _refuse_other(reader: Reader, shape: Shape) -> None:
    """Refuse a checkpoint of another model, with the first differences."""
    problems: list[str] = []
    for each in (*weights(shape), *buffers(shape)):
        sizes, _ = reader.tensors.get(f"model/{each.name}", (None, None))
        if sizes is None:
            problems.append(f"{each.name} is missing")
        elif tuple(sizes) != each.shape:
            rule = f"has shape {tuple(sizes)}, and the plan asks for {each.shape}"
            problems.append(f"{each.name} {rule}")
    if problems:
        step, more = reader.facts.step, len(problems) - _SHOWN
        shown = [*problems[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        way = f"--step {step} reads it by the plan that made it"
        if not reader.facts.plan_in_run:
            way = "put the plan of this checkpoint into plan.toml; plan.N.toml are former ones"
        raise BadFile(f"the checkpoint of step {step}", [*shown, way])
