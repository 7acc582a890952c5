"""What a training run does besides its steps: one file for each concern.

The loop calls every callback at the same moments, in the order of its list; only `finish` is called
in reverse, so that the last checkpoint is written before the record says that the run has ended.
"""

from __future__ import annotations

from typing import Any

from fivefold.records import StepRecord


class Callback:
    """Hooks of the training loop; each does nothing unless overridden."""

    def start(self, after: int) -> None:
        """Called when the job is built and loaded; step `after + 1` follows."""

    def before_data(self, number: int) -> None:
        """Called before the rank takes the data of a step."""

    def before_step(self, number: int) -> None:
        """Called with the data, before the step."""

    def measure(self, number: int) -> dict[str, Any]:
        """Called when the step is issued; returns this callback's fields of its record."""
        return {}

    def needs_record(self, number: int) -> bool:
        """Whether `after_step` must find the record of the step written."""
        return False

    def on_record(self, record: StepRecord) -> None:
        """Called with the complete record of a step, after its update. On a GPU the next step may
        run already, unless a callback needs the record."""

    def after_step(self, number: int) -> None:
        """Called after the step; its update may still run on a GPU."""

    def finish(self) -> None:
        """Called after the last step, in reverse order."""

    def out_of_memory(self) -> None:
        """Called when a step runs out of memory, before the error is raised."""

    def close(self) -> None:
        """Called when the loop has ended, with or without an error."""
