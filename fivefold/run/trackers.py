"""Where curves are drawn while a run goes on: TensorBoard and Weights & Biases, both optional."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fivefold.core.errors import FivefoldError, UnknownName

TENSORBOARD, WANDB, MEMORY = "tensorboard", "wandb", "memory"
_PROJECT = "fivefold"


class Tracker(Protocol):
    """Something that draws numbers over steps."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def logs(text: str) -> frozenset[str]:
    """The words of the `log` key, joined with `+`.

    >>> sorted(logs("wandb+memory")), sorted(logs(""))
    (['memory', 'wandb'], [])
    """
    words = frozenset(word.strip() for word in text.split("+") if word.strip())
    known = (TENSORBOARD, WANDB, MEMORY)
    for word in sorted(words):
        if word not in known:
            raise UnknownName("log", word, known)
    return words


def trackers(
    text: str, folder: Path, identity: str, settings: Mapping[str, Any], after: int
) -> list[Tracker]:
    """The trackers that the `log` key asks for, which go on behind step `after`.

    `identity` tells this run from others, `settings` are shown with it.
    """
    words, found = logs(text), list[Tracker]()
    if TENSORBOARD in words:
        found.append(TensorBoard(folder / TENSORBOARD, after))
    if WANDB in words:
        found.append(WeightsAndBiases(folder, identity, settings))
    return found


class TensorBoard:
    """Files that TensorBoard reads; points behind the step that a run resumes from are purged."""

    def __init__(self, folder: Path, after: int) -> None:
        module = _needed("torch.utils.tensorboard", TENSORBOARD)
        self.writer = module.SummaryWriter(log_dir=str(folder), purge_step=after + 1)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; all starts of a run are one there."""

    def __init__(self, folder: Path, identity: str, settings: Mapping[str, Any]) -> None:
        module = _needed(WANDB, WANDB)
        self.run = module.init(
            project=_PROJECT,
            name=folder.name,
            id=identity,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
        )
        # Its own count of steps cannot go back, as a resumed run does.
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.run.log({"step": step, **scalars})

    def close(self) -> None:
        self.run.finish()


def _needed(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise FivefoldError(
            f"log = {package} needs the package {package}, which is not installed: pip install "
            f"{package}, or leave it out of log"
        ) from error
