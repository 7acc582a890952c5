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
    """Decides where rows go in a rehearsal, whose tokens have no values and whose other ranks do
    not exist."""

    def rows(self, axis: str, num_rows: int) -> tuple[list[int], list[int]]:
        """Of so many rows, how many go to each rank of an axis, and how many come from each."""
        ...

    def arriving(self, axis: str, num_rows: int, like: Tensor) -> Tensor:
        """How many come from each rank for each expert of this one."""
        ...

    def crossing(self, num_tokens: int) -> int:
        """Rows of so many tokens, each of which goes once to each node that it needs."""
        ...

    def inside(self, num_rows: int) -> int:
        """Slots of so many rows that have come to a node, in that node."""
        ...


class MathOf(Protocol):
    """The arithmetic of linears of one layer that read one input; `copied` outputs may not hold the
    memory of the others."""

    def __call__(
        self, layer: int, linears: Sequence[Linear], copied: Sequence[int] = ()
    ) -> LinearMath: ...


@dataclass(frozen=True)
class Stage:
    """A slice of the model, before its weights are sharded.

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
    """Is told of every action of a pipeline. This one does nothing."""

    def begin(self, action: Step) -> Any:
        """An action begins. What is returned comes back to `end`."""

    def end(self, token: Any) -> None:
        """The action is over, on the host."""


def ignore(phase: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Instruments:
    """What a caller puts around a job to watch or to rehearse it. A plain job needs none.

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
