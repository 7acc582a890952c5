"""How a plan is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float64", "float32"]
MAX_NORM = 1.0
WEIGHT_DECAY = 0.1
# That of Llama 2 (arXiv:2307.09288). With the usual 1e-8, AdamW answers the rounding error of a
# small gradient with a step of the learning rate, and float32 runs soon part at the routers.
ADAM_EPS = 1e-5
_WARM_UP = 10  # one in so many steps


@dataclass(frozen=True)
class Settings:
    """How a plan is trained: AdamW, gradients clipped to a norm of 1, only matrices decay."""

    dtype: Dtype = "float32"
    steps: int = 20
    lr: float = 1e-3
    seed: int = 0
    check: bool = False  # keep what a comparison with one process needs

    def lr_at(self, number: int) -> float:
        """The learning rate of a step, from 1: a straight rise over the first tenth, then level."""
        warm_up = max(1, self.steps // _WARM_UP)
        return self.lr * min(1.0, number / warm_up)
