"""Checkpoints in memory: when they are copied, and when a restart loads them."""

from __future__ import annotations

from datetime import timedelta

from fivefold.core.layout import Partners
from fivefold.launch import lazy_group
from fivefold.records import CHECKPOINTS, SAVE, SUSPECT
from fivefold.train import RankRun
from fivefold.train.callbacks.callback import Callback
from fivefold.train.callbacks.checkpoints import checkpoint_tensors
from fivefold.train.checkpoint import CheckpointTensor, Facts, published, step_of
from fivefold.train.recovery import MemoryCopies

_TIMEOUT = timedelta(minutes=10)  # in which a partner gets a copy


class CopyCallback(Callback):
    """Copies a run to memory every `copy_every` steps, on one rank."""

    def __init__(self, run: RankRun) -> None:
        rank, settings, folder = run.rank, run.settings, run.folder
        self.recipe, self.resume = settings.recipe, settings.options.resume
        self.folder, self.rank, self.progress = folder, rank, run.progress
        self.spent, self.phases = run.spent, run.phases
        self.copies: MemoryCopies | None = None
        if settings.memory is not None and self.recipe.copy_every:
            world = rank.job.mesh.layout.world
            group = None if world == 1 else lazy_group(_TIMEOUT)
            start = 0 if folder is None else folder.restart
            partners = Partners(world, settings.copy_domain)
            self.copies = MemoryCopies(settings.memory, partners, start, group)

    def load(self, tensors: list[CheckpointTensor]) -> Facts | None:
        """Load the newest copies, if no checkpoint on disk is newer."""
        if self.copies is None or not self.resume:
            return None
        paths = [] if self.folder is None else published(self.folder.path / CHECKPOINTS)
        if any((path / SUSPECT).exists() for path in paths):
            return None  # copies of the same steps may be as wrong
        return self.copies.load(tensors, step_of(paths[-1]) if paths else 0)

    def needs_record(self, number: int) -> bool:
        """Steps before a copy must have their records written."""
        return self._is_due(number)

    def before_data(self, number: int) -> None:
        """Wait until all ranks have completed the last copy, before any begins the next."""
        if self._is_due(number) and self.copies is not None:
            self.phases.phase(f"the last copy before step {number}", long=True)
            with self.spent.on(SAVE):
                self.copies.wait()

    def after_step(self, number: int) -> None:
        if self._is_due(number) and self.copies is not None and not self.progress.done:
            self.phases.phase(f"copy {number}", long=True)
            with self.spent.on(SAVE):
                plan = "" if self.folder is None else self.folder.plan_text(self.rank.job.plan)
                seed = self.recipe.seed
                facts = self.progress.facts(self.rank.updater.count, seed, plan)
                self.copies.save(checkpoint_tensors(self.rank.job, self.rank.updater), facts)

    def finish(self) -> None:
        if self.copies is not None:
            self.copies.wait()

    def _is_due(self, number: int) -> bool:
        every = self.recipe.copy_every
        return self.copies is not None and bool(every) and number % every == 0
