"""What one start of a run is asked for, from the command line or `ff.train` to every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fivefold.core import Dtype

if TYPE_CHECKING:
    from fivefold.launch import Backend
    from fivefold.train.callbacks import Callback


@dataclass(frozen=True)
class RunOptions:
    """What a start of a run is asked for beside its plan, passed as it is to the ranks.

    `out` is the run folder, None for the next free one. `resume` continues from its newest good
    checkpoint; `until` ends this start after that step, with a checkpoint, before the plan does.
    `dtype` and `backend` are None where the plan and the machine say them. `check` compares the
    losses with those of one process. After the loss of a rank all ranks start again up to
    `restarts` times, with `shrink` every other time without the lost replica. `callbacks` are
    values of a user; those that the plan names are loaded by each rank.
    """

    out: Path | None = None
    resume: bool = False
    until: int | None = None
    dtype: Dtype | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Backend | None = None
    check: bool = False
    deterministic: bool = False
    restarts: int = 0
    shrink: bool = False
    callbacks: tuple[Callback, ...] = ()
