"""The loss over rows that are never trained on, every `eval_every` steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fivefold.data import EvaluationSet, RowPlace, SetLoss, is_paired
from fivefold.records import EVAL
from fivefold.step import evaluate
from fivefold.train import PairLoss, PreferenceObjective, RankRun, sets_of
from fivefold.train.callbacks.callback import Callback


@dataclass
class EvaluationCallback(Callback):
    """Adds the losses of all evaluation sets to records; `eval_loss` is that of the first."""

    run: RankRun
    objective: PreferenceObjective | None = None

    def measure(self, number: int) -> dict[str, Any]:
        every = self.run.settings.recipe.eval_every
        if not every or not self.run.settings.recipe.is_due(every, number):
            return {}
        with self.run.spent.on(EVAL):
            losses = {eval_set.name: self._loss(eval_set) for eval_set in self._sets}
        results = {name: loss for name, loss in losses.items() if loss is not None}
        self.run.progress.evaluated({name: result.loss for name, result in results.items()})
        evals = {name: result.to_json() for name, result in results.items()}
        first = next(iter(losses.values()), None)
        return {"eval_loss": None if first is None else first.loss, "evals": evals}

    @cached_property
    def _sets(self) -> list[EvaluationSet]:
        return sets_of(
            self.run.rank.job.plan, self.run.settings.recipe, self.run.rank.reader.source
        )

    def _loss(self, eval_set: EvaluationSet) -> SetLoss | PairLoss | None:
        """Of DPO for preference pairs."""
        if self.objective is not None and is_paired(eval_set.rows[0][0]):
            return self.objective.evaluate(eval_set.rows)
        loss = self._mean_loss(eval_set.rows)
        return None if loss is None else SetLoss(loss, eval_set.bytes_per_token)

    def _mean_loss(self, rows: Sequence[RowPlace]) -> float | None:
        """The mean over all tokens that have a loss."""
        total = count = 0.0
        for batches in self.run.rank.reader.rows(rows):
            loss, num_tokens = evaluate(self.run.rank.job, batches)
            total, count = total + float(loss), count + float(num_tokens)
        return total / count if count else None
