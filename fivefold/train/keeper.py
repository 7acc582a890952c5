"""How far a training is: what a checkpoint has to know besides tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from fivefold.core.errors import FivefoldError
from fivefold.optim.optimizer import LossScale, Updater
from fivefold.parallel.compose import Job
from fivefold.records.run_folder import CHECKPOINTS
from fivefold.train.checkpoint import CannotSave, Checkpoints, Facts, slots_of, spread
from fivefold.train.settings import TrainSettings


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


# When checkpoints are written and read, and what of a job they hold.


_TO_WRITE = timedelta(hours=2)  # that the slowest rank may take behind the fastest


class Keeper:
    """The checkpoints of one run, as one rank sees them. Without a folder there are none."""

    def __init__(
        self, settings: TrainSettings, job: Job, updater: Updater, warn: Callable[[str], None]
    ) -> None:
        """`warn` is told what went wrong and does not end the run."""
        self.settings, self.job, self.updater, self.warn = settings, job, updater, warn
        self.checkpoints: Checkpoints | None = None
        if settings.folder is not None:
            # Writing goes on behind the steps, and must meet on a group of its own.
            alone = job.mesh.layout.world == 1
            group = None if alone else dist.new_group(backend="gloo", timeout=_TO_WRITE)
            folder = settings.folder / CHECKPOINTS
            self.checkpoints = Checkpoints(folder, settings.recipe.keep, group)

    def is_due(self, number: int) -> bool:
        """Whether a checkpoint is written behind this step."""
        return self.settings.recipe.is_due(self.settings.recipe.save_every, number)

    def load(self, progress: Progress) -> None:
        """Go on behind the newest good checkpoint, where there is one and it shall be."""
        if self.checkpoints is None or not self.settings.resume:
            return
        facts = self.checkpoints.load(slots_of(self.job, self.updater), self.warn)
        if facts is None:
            return
        if facts.seed != self.settings.recipe.seed and facts.has_states:
            raise FivefoldError(
                f"the run has seed {facts.seed}, not {self.settings.recipe.seed}: with another one "
                "the text would come in another order; resume with the same"
            )
        progress.resume(facts)
        self.updater.count = facts.updates
        spread(self.job)

    def save(self, progress: Progress) -> None:
        """Begin to write a checkpoint; the steps go on, also where the one before has failed."""
        if self.checkpoints is None:
            return
        facts = progress.facts(
            self.updater.count, self.settings.recipe.seed, self.job.plan.to_toml()
        )
        slots = slots_of(self.job, self.updater)
        for give in (self.checkpoints.wait, partial(self.checkpoints.save, slots, facts)):
            try:
                give()
            except CannotSave as failed:
                self.warn(str(failed))

    def finish(self) -> None:
        """Until what was begun is written; the run ends with an error where that failed."""
        if self.checkpoints is not None:
            self.checkpoints.wait()
