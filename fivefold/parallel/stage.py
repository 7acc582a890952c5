"""One stage on one rank, as the rooms see it: each room gets this value and changes the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fivefold.core.plan import Plan
from fivefold.core.schedule import Step
from fivefold.model import Decoder, Linear, LinearMath
from fivefold.model.fp8 import Watch, WatchExperts
from fivefold.model.kernels import Fuse
from fivefold.parallel.deferred import GradientQueue
from fivefold.parallel.mesh import Mesh, Phase
from fivefold.parallel.units import UnitListener, ignore_collective


class RehearsalRouting(Protocol):
    """Routing of a rehearsal, whose tokens have no values and whose other ranks do not exist."""

    def rows(self, axis: str, num_rows: int) -> tuple[list[int], list[int]]:
        """Rows to send to, and to receive from, each rank of an axis, of `num_rows` rows."""
        ...

    def arriving(self, axis: str, num_rows: int, like: Tensor) -> Tensor:
        """Rows received from each rank for each local expert."""
        ...

    def crossing(self, num_tokens: int) -> int:
        """Rows that `num_tokens` tokens send between nodes: one for each node of a token."""
        ...

    def inside(self, num_rows: int) -> int:
        """Expert slots on this node for `num_rows` received rows."""
        ...


class MathOf(Protocol):
    """Arithmetic of the linears of one layer that share an input; `copied` outputs may not alias
    the others."""

    def __call__(
        self, layer: int, linears: Sequence[Linear], copied: Sequence[int] = ()
    ) -> LinearMath: ...


@dataclass(frozen=True)
class Stage:
    """Blocks of the model on one rank, before data parallelism shards their weights.

    Without a `queue` autograd delivers all gradients itself. A `routing` is for rehearsals only.
    """

    number: int
    plan: Plan
    model: Decoder
    mesh: Mesh
    phase: Phase
    queue: GradientQueue | None
    routing: RehearsalRouting | None
    fuse: Fuse
    math: MathOf


class ActionObserver:
    """Callbacks before and after every action of a pipeline. This one does nothing."""

    def begin(self, action: Step) -> Any:
        """Called when an action begins; the returned value is passed to `end`."""

    def end(self, token: Any) -> None:
        """Called when the action has ended on the host."""


def ignore(phase: str) -> None:
    """Ignore a message."""


@dataclass(frozen=True)
class Instruments:
    """Observers and replacements with which a job is measured or rehearsed; none by default.

    `actions` watches the pipeline of a step, `evaluation` that of an evaluation; `on_phase` is told
    what a step does outside of its pipeline, `on_unit` of every collective of a flat unit, and
    `on_rounded` of everything that is rounded to fp8, but what experts read, of which `on_experts`
    is. A rehearsal brings its `routing`, and a `wrap` for each chunk that the pipeline drives.
    """

    actions: ActionObserver = ActionObserver()  # noqa: RUF009, it has no state
    evaluation: ActionObserver = ActionObserver()  # noqa: RUF009
    on_phase: Callable[[str], None] = ignore
    on_unit: UnitListener = ignore_collective
    on_rounded: Watch | None = None
    on_experts: WatchExperts | None = None
    routing: RehearsalRouting | None = None
    wrap: Callable[[Any], Any] | None = None
