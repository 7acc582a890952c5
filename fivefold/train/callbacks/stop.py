"""When a run ends before its last step: on request, or after too many steps that are not finite."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.core import FivefoldError
from fivefold.launch import Worker
from fivefold.train import Progress
from fivefold.train.callbacks.callback import Callback
from fivefold.train.callbacks.checkpoints import CheckpointCallback


@dataclass
class StopCallback(Callback):
    """Stops on request, or after too many skipped steps.

    Ranks hear of a request at different times. So each step sums the requests of all ranks, and
    all stop after the same step (`Progress.stopped`). `--until` and the recipe set the last step.
    """

    worker: Worker
    progress: Progress
    skip_limit: int
    checkpoints: CheckpointCallback

    @property
    def requested(self) -> bool:
        """Whether a stop signal was received."""
        return self.worker.stopping

    def needs_record(self, number: int) -> bool:
        """The last record of a run that gives up must be written too."""
        return self.progress.skipped_in_a_row > self.skip_limit

    def after_step(self, number: int) -> None:
        """Raise after more skipped steps in a row than `skip_limit`."""
        if self.needs_record(number):
            self.checkpoints.wait()
            raise FivefoldError(
                f"{self.progress.skipped_in_a_row} steps in a row had a loss or norm that is not "
                "finite, more than skip_limit allows: lower lr, look at the data of these steps, "
                "or continue from an older checkpoint"
            )
