"""The loss over rows that are never trained on, every `eval_every` steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fivefold.core.recipe import Recipe
from fivefold.records import EVAL
from fivefold.records.run_folder import TimeSpent
from fivefold.step import evaluate
from fivefold.train.build import BuiltRank
from fivefold.train.callbacks import Callback

_MOST_BATCHES = 8  # global batches of held-out rows


@dataclass
class EvaluationCallback(Callback):
    """Adds `eval_loss` to the record of a step that is due."""

    recipe: Recipe
    rank: BuiltRank
    spent: TimeSpent

    def measure(self, number: int) -> dict[str, Any]:
        every = self.recipe.eval_every
        if not every or not self.recipe.is_due(every, number):
            return {}
        with self.spent.on(EVAL):
            return {"eval_loss": self._mean_loss()}

    def _mean_loss(self) -> float | None:
        """The mean over all tokens that have a loss."""
        total = count = 0.0
        for batches in self.rank.reader.held_out(_MOST_BATCHES):
            loss, num_tokens = evaluate(self.rank.job, batches)
            total, count = total + float(loss), count + float(num_tokens)
        return total / count if count else None
