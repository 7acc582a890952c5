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
    """Open a checkpoint of a run: of a step, the one of `keep_best`, or the newest valid one, if it
    is of this model.

    `tell` is called with the reason why a newer one is not valid.
    """
    reader = _reader(run_folder, step, tell)
    _refuse_other(reader, shape)
    return reader


def _reader(
    run_folder: Path, step: int | Literal["best"] | None, tell: Callable[[str], None]
) -> Reader:
    paths = published(run_folder / "checkpoints")
    if step == "best":
        return Reader(_best(run_folder, paths))
    if step is not None:
        matches = [path for path in paths if path.name == f"step-{step:08d}"]
        if not matches:
            known = ", ".join(str(int(path.name.removeprefix("step-"))) for path in paths)
            raise FivefoldError(
                f"{run_folder} has no checkpoint of step {step}: choose from {known or 'none'}"
            )
        return Reader(matches[0])
    for path in reversed(paths):
        if (newer := newer_format(path)) is not None:
            raise FivefoldError(f"{newer}, or choose another one with --step")
        try:
            return Reader(path)
        except FivefoldError as error:
            tell(str(error))
    remedy = (
        "restore one from a copy, or train again in another folder" if paths else "train it first"
    )
    raise FivefoldError(f"{run_folder} has no good checkpoint: {remedy}")


def _best(run_folder: Path, paths: Sequence[Path]) -> Path:
    judged_by = options_of(run_folder).train.keep_best
    if not judged_by:
        raise FivefoldError(f"{run_folder} keeps no best checkpoint: train with keep_best=SET")
    best = best_of(paths, judged_by)
    if best is None:
        raise FivefoldError(f"no checkpoint of {run_folder} was evaluated on {judged_by} yet")
    return best


def _refuse_other(reader: Reader, shape: Shape) -> None:
    """Refuse a checkpoint of another model, with the first differences."""
    problems: list[str] = []
    for tensor in (*weights(shape), *buffers(shape)):
        sizes, _ = reader.tensors.get(f"model/{tensor.name}", (None, None))
        if sizes is None:
            problems.append(f"{tensor.name} is missing")
        elif tuple(sizes) != tensor.shape:
            rule = f"has shape {tuple(sizes)}, and the plan asks for {tensor.shape}"
            problems.append(f"{tensor.name} {rule}")
    if problems:
        step, num_hidden = reader.facts.step, len(problems) - _SHOWN
        shown = [*problems[:_SHOWN], *([f"and {num_hidden} more"] if num_hidden > 0 else [])]
        remedy = f"--step {step} reads it by the plan that made it"
        if not reader.facts.plan_in_run:
            remedy = "put the plan of this checkpoint into plan.toml; plan.N.toml are former ones"
        raise BadFile(f"the checkpoint of step {step}", [*shown, remedy])
