"""Mistakes in the order of the data, in evaluation, and when a run resumes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from fivefold import step as step_module
from fivefold.data import batches as batches_module
from fivefold.data import mixture, rows
from fivefold.model.batch import NOT_COUNTED
from fivefold.optim import optimizer
from fivefold.train import loop, state
from fivefold.train.callbacks import checkpoints
from tests.judge.planting import Patch, instead

EVALUATE = "fivefold.train.callbacks.evaluation.evaluate"

# The order of the data.


def seed_of_the_order_ignored() -> Patch:
    def seedless(real: Any, self: Any, sample: int) -> int:
        return real(replace(self, seed=0), sample)

    return instead(rows.RowOrder, "row", seedless)


def every_epoch_in_one_order() -> Patch:
    def first_epoch(real: Any, self: Any, sample: int) -> int:
        return real(self, sample % self.num_rows)

    return instead(rows.RowOrder, "row", first_epoch)


def rows_in_their_order() -> Patch:
    return instead(rows.RowOrder, "row", lambda real, self, sample: sample % self.num_rows)


def equal_shares_of_a_mixture() -> Patch:
    def equal(real: Any, self: Any, sample: int) -> Any:
        return real(replace(self, weights=(1,) * len(self.weights)), sample)

    return instead(mixture.Shares, "draw", equal)


def ends_of_documents_counted() -> Patch:
    inner = batches_module.samples_from_rows

    def counted(batch: Any, drawn: Any, begins: Any = None, masked: Any = None) -> Any:
        return replace(
            inner(batch, drawn, begins, masked), labels=inner(batch, drawn, None, masked).labels
        )

    return patch("fivefold.data.rank_reader.samples_from_rows", counted)


def documents_see_one_another() -> Patch:
    inner = batches_module.samples_from_rows

    def unmasked(batch: Any, drawn: Any, begins: Any = None, masked: Any = None) -> Any:
        return replace(inner(batch, drawn, begins, masked), documents=None)

    return patch("fivefold.data.rank_reader.samples_from_rows", unmasked)


# Evaluation.


def evaluation_times_tp() -> Patch:
    inner = step_module.evaluate

    def times(job: Any, some: Any) -> Any:
        total, tokens = inner(job, some)
        return total * job.mesh.size("tp"), tokens

    return patch(EVALUATE, times)


def evaluation_of_one_data_rank() -> Patch:
    inner = step_module.evaluate

    def first_rank(job: Any, some: Any) -> Any:
        silent = [replace(one, labels=torch.full_like(one.labels, NOT_COUNTED)) for one in some]
        return inner(job, silent if job.plan.layout.coord(job.mesh.rank).dp else some)

    return patch(EVALUATE, first_rank)


def evaluation_by_means_of_batches() -> Patch:
    inner = step_module.evaluate

    def means(job: Any, some: Any) -> Any:
        total, tokens = inner(job, some)
        return total / tokens, torch.ones_like(tokens)

    return patch(EVALUATE, means)


def evaluation_of_one_batch() -> Patch:
    return patch("fivefold.train.build._MOST_BATCHES", 1)


def evaluation_of_trained_rows() -> Patch:
    def trained(real: Any, self: Any, most: int) -> list[Any]:
        return [self.row_place(number) for number in range(len(real(self, most)))]

    return instead(mixture.Source, "held_out", trained)


# Resuming.


def scaler_count_lost() -> Patch:
    def lost(real: Any, self: Any, facts: Any) -> None:
        real(self, facts)
        self.scale = replace(self.scale, good_steps=0)

    return instead(state.Progress, "resume", lost)


def update_count_lost() -> Patch:
    return instead(optimizer.DeviceUpdater, "resume_after", lambda real, self, count: None)


def samples_from_the_start() -> Patch:
    def again(real: Any, self: Any, facts: Any) -> None:
        real(self, facts)
        self.samples = 0

    return instead(state.Progress, "resume", again)


def states_lost() -> Patch:
    inner = checkpoints.CheckpointCallback.load

    def stateless(self: Any, *given: Any) -> None:
        inner(self, *given)
        for tensors in self.updater.states().values():
            for each in tensors:
                each.write(torch.zeros_like(each.read()))

    return patch.object(checkpoints.CheckpointCallback, "load", stateless)


def load_of_experts_lost() -> Patch:
    return patch("fivefold.train.callbacks.checkpoints._ExpertLoad.write", MagicMock())


def schedule_ends_with_the_start() -> Patch:
    """The learning rates of a start are those of a run that ends with it."""
    owner: Any = vars(loop)["_Loop"]
    inner = owner._advance

    def short(self: Any, *given: Any) -> Any:
        settings = self.run.settings
        recipe = replace(settings.recipe, steps=settings.last_step)
        run = replace(self.run, settings=replace(settings, recipe=recipe))
        return inner(replace(self, run=run), *given)

    return patch.object(owner, "_advance", short)
