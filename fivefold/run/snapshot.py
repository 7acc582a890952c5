"""Snapshots of a GPU's memory, for the viewer at pytorch.org/memory_viz.

On request the first steps of a start are recorded, each allocation with the lines that asked for
it; when memory runs out, what is allocated is written whether it was recorded or not. torch names
these functions with an underscore but documents them: where one is missing nothing is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FOLDER = "memory"
STEPS = 3  # recorded on request: the first finds its memory, the others show the rhythm
_MOST_EVENTS = 1_000_000
_NO_GPU = "no memory snapshot: it shows the memory of a GPU, and this run has none"
_NO_FUNCTION = "no memory snapshot: this torch cannot write one"


class Snapshots:
    """The snapshots of one rank. `note` says why there are none, where they were asked for."""

    def __init__(self, folder: Path, rank: int, device: torch.device, asked: bool) -> None:
        self.folder, self.rank = folder / FOLDER, rank
        self.memory: Any = torch.cuda.memory if device.type == "cuda" else None
        self.steps_left = 0
        self.note: str | None = None
        if asked:
            self.note = self._record()

    def step(self, number: int) -> Path | None:
        """A step is over; the file that was written behind the last one recorded."""
        if not self.steps_left:
            return None
        self.steps_left -= 1
        if self.steps_left:
            return None
        path = self._dump(f"step-{number:08d}")
        self.memory._record_memory_history(enabled=None)  # it costs time
        return path

    def out_of_memory(self) -> Path | None:
        """The memory as it is now; None where there is no GPU to ask."""
        return self._dump("out-of-memory")

    def _record(self) -> str | None:
        """Begin to record; what is in the way of it."""
        if self.memory is None:
            return _NO_GPU
        if not hasattr(self.memory, "_record_memory_history"):
            return _NO_FUNCTION
        self.memory._record_memory_history(max_entries=_MOST_EVENTS)
        self.steps_left = STEPS
        return None

    def _dump(self, name: str) -> Path | None:
        if not hasattr(self.memory, "_dump_snapshot"):
            return None
        path = self.folder / f"rank-{self.rank:05d}-{name}.pickle"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.memory._dump_snapshot(str(path))
        except OSError:  # no room for it: no reason to end a run, nor to hide why one ends
            return None
        return path
