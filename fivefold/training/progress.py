"""How far a training is: what a checkpoint has to know besides tensors."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.training.checkpoint import Facts
from fivefold.training.scale import LossScale


@dataclass
class Progress:
    """Behind `step` steps, which read the first `samples` of the text.

    Samples are counted apart from steps: another global batch reads on where this one ended.
    """

    scale: LossScale
    step: int = 0
    samples: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0  # that no scale explains

    def passed(self, num_samples: int, skipped: bool) -> None:
        """A step is over."""
        self.step += 1
        self.samples += num_samples
        self.skipped += skipped
        unexplained = skipped and not self.scale.explains_overflow
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if unexplained else 0
        self.scale.update(skipped)

    def facts(self, updates: int, seed: int, plan: str) -> Facts:
        """For a checkpoint's manifest."""
        scaler = {
            "scale": self.scale.value,
            "good_steps": self.scale.good_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
        }
        return Facts(self.step, updates, self.samples, self.skipped, seed, scaler, plan)

    def resume(self, facts: Facts) -> None:
        """Go on where a checkpoint was written; the scale only where this run has one too."""
        self.step, self.samples, self.skipped = facts.step, facts.samples, facts.skipped
        self.skipped_in_a_row = int(facts.scaler.get("skipped_in_a_row", 0))
        if self.scale.dynamic and facts.scaler.get("scale", 1.0) > 1.0:
            self.scale.value = facts.scaler["scale"]
            self.scale.good_steps = int(facts.scaler["good_steps"])
