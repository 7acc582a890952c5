"""How a plan is trained by one start of a run: the recipe, its precision, and where things go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fivefold.core.recipe import Recipe
from fivefold.records import PlannedStep

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
PRECISIONS: dict[str, Dtype] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class TrainSettings:
    """What all ranks of a start know. Without a `folder` nothing is recorded or saved.

    `until` ends this start behind that step, with a checkpoint, before the recipe does. `check`
    keeps what a comparison with one process needs.
    """

    recipe: Recipe = Recipe()  # noqa: RUF009, it is frozen
    dtype: Dtype = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    folder: Path | None = None
    resume: bool = False
    until: int | None = None
    planned: PlannedStep | None = None
    check: bool = False

    @property
    def last_step(self) -> int:
        """The step that this start ends behind."""
        return min(self.recipe.steps, self.until or self.recipe.steps)

    @property
    def weights(self) -> torch.dtype:
        """The type of weights and activations."""
        return getattr(torch, self.dtype)

    @property
    def master(self) -> bool:
        """Whether the optimizer keeps wider copies, and gradients are summed in float32."""
        return self.weights.itemsize < 4
