"""What a training run does besides its steps: one file for each concern.

The loop calls every callback at the same moments, in the order of its list; only `finish` is called
in reverse, so that the last checkpoint is written before the record says that the run has ended.
"""

from __future__ import annotations

from typing import Any

from fivefold.records import StepRecord


class Callback:
    """The moments of a training loop; each does nothing unless a callback overrides it."""

    def start(self, after: int) -> None:
        """The job is built and loaded; step `after + 1` follows."""

    def before_data(self, number: int) -> None:
        """The rank takes the data of a step, and waits if it is not there yet."""

    def before_step(self, number: int) -> None:
        """The data is there, and the step begins."""

    def measure(self, number: int) -> dict[str, Any]:
        """The step is issued: the fields of its record that this callback knows."""
        return {}

    def needs_record(self, number: int) -> bool:
        """Whether `after_step` must find the record of the step written."""
        return False

    def on_record(self, record: StepRecord) -> None:
        """The update of a step has run, and its record is complete. On a GPU this may be while the
        next step runs, unless a callback needs the record."""

    def after_step(self, number: int) -> None:
        """The step is over, except that its update may still run on a GPU."""

    def finish(self) -> None:
        """The last step is over; called in reverse order."""

    def out_of_memory(self) -> None:
        """A step has run out of memory; the error is raised afterwards."""

    def close(self) -> None:
        """The loop has ended, with or without an error."""
