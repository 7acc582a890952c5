"""Paths in a plan: in a file a relative path starts at the file's folder, so that both can move
together. Everywhere else it starts where the command runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.core import is_code, split_code
from fivefold.core.model import presets as models
from fivefold.core.plan.corpora import moved_corpora
from fivefold.core.plan.recipe import DISK, Recipe

if TYPE_CHECKING:
    from fivefold.core.plan.plan import PlanOptions

_FILES = (".json", ".toml", ".csv", ".txt")


def with_paths(options: PlanOptions, move: Callable[[str], str]) -> PlanOptions:
    """The options with every path moved; names of presets, schedules and corpora stay."""
    texts = {key: getattr(options, key) for key in ("model", "machine", "schedule")}
    paths = {key: _moved(text, move) for key, text in texts.items() if text and _is_path(text)}
    settings = {key: _moved(text, move) for key, text in options.set.items() if is_code(text)}
    train = _recipe(options.train, move)
    return replace(options, **paths, set={**options.set, **settings}, train=train)


def seen_from(folder: Path) -> Callable[[str], str]:
    """What moves paths from here into a file in this folder."""

    def move(file: str) -> str:
        return file if Path(file).is_absolute() else os.path.relpath(file, folder)

    return move


def _is_path(text: str) -> bool:
    if models.is_text(text):
        return False
    return "/" in text or Path(text).suffix.lower() in _FILES or is_code(text)


def _moved(text: str, move: Callable[[str], str]) -> str:
    """A path, or the path of code."""
    if not is_code(text):
        return move(text)
    file, name = split_code(text)
    return f"{move(file)}:{name}"


def _recipe(recipe: Recipe, move: Callable[[str], str]) -> Recipe:
    def tidy(folder: str) -> str:  # their names are printed
        return os.path.normpath(move(folder))

    offloads = {"offload": recipe.disk, "offload_grads": recipe.grads_disk}
    disks = {key: DISK + tidy(disk) for key, disk in offloads.items() if disk}
    corpora = {key: moved_corpora(getattr(recipe, key), tidy) for key in ("data", "eval_data")}
    codes = {"callbacks": recipe.callback_texts, "optimizer": [recipe.optimizer]}
    moved = {
        key: "+".join(_moved(text, move) if is_code(text) else text for text in texts)
        for key, texts in codes.items()
    }
    return replace(recipe, **disks, **corpora, **moved)
