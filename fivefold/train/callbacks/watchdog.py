"""What a rank is doing now, for the process that started it and for the watchdog."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fivefold.core.model import shape
from fivefold.core.plan import Plan, Recipe
from fivefold.core.schedule import Step
from fivefold.launch.watch import Watchdog
from fivefold.parallel import CollectiveRecord
from fivefold.records import StepRecord
from fivefold.train.callbacks.callback import Callback

_LONGEST = 600.0  # seconds for what is done once and never known: compilation
_LEAST = 24.0  # seconds: less is the patience of a watchdog anyway
_SLOW_BYTES = 20e6  # a second: weights that are drawn, files that are read
_SLOW_FLOPS = {"cpu": 0.5e9, "cuda": 0.5e12}  # a second, of a first step
_FIRST_KERNELS = {"cpu": 0.0, "cuda": 60.0}  # seconds: libraries and communicators


@dataclass(frozen=True)
class PhaseLimits:
    """Most seconds of slow phases of a plan, before any is measured."""

    files: float = _LONGEST  # a build, a load, a save
    first_step: float = _LONGEST
    compiles: bool = False  # kernels, in the first step and for a new size in any other

    @classmethod
    def of(cls, plan: Plan, recipe: Recipe, device: str) -> PhaseLimits:
        """Limits from the bytes and FLOPs of a rank, on a slow machine."""
        parameters = shape.parameters(plan.shape)
        split = plan.layout.tp * plan.layout.pp
        files = _LEAST + 16 * parameters.total / split / _SLOW_BYTES
        flops = 8 * parameters.active * plan.batch.tokens / plan.layout.world
        first = _LEAST + _FIRST_KERNELS[device] + flops / _SLOW_FLOPS[device]
        compiles = recipe.compiles(device)
        return cls(min(_LONGEST, files), _LONGEST if compiles else min(_LONGEST, first), compiles)


class WatchdogCallback(Callback):
    """Reports phases, and observes collectives from the first step on."""

    def __init__(self, watchdog: Watchdog, limits: PhaseLimits) -> None:
        self.watchdog, self.limits = watchdog, limits
        self.actions = ActionPhases(self._step_action)
        self.evaluation = ActionPhases(lambda action: watchdog.phase(f"evaluation {action}"))
        self._started, self._first, self._number = False, 0, 0
        self._text = ""  # the newest phase

    def phase(self, text: str, long: bool = False) -> None:
        """Begin a phase of all ranks, which may take long without a collective if it has a
        limit."""
        self._text = text
        self.watchdog.phase(text, self.limits.files if long else 0.0, mark=True)

    def unknown(self, text: str) -> None:
        """Begin a phase of all ranks without a known limit."""
        self.watchdog.phase(text, _LONGEST, mark=True, alike=False)

    def start(self, after: int) -> None:
        self._started, self._first = True, after + 1
        if self.limits.compiles:
            from torch._dynamo.callback import callback_handler  # slow to import

            callback_handler.register_start_callback(self._compile)
            callback_handler.register_end_callback(self._compiled)

    def close(self) -> None:
        if self._started and self.limits.compiles:
            from torch._dynamo.callback import callback_handler

            callback_handler.remove_start_callback(self._compile)
            callback_handler.remove_end_callback(self._compiled)

    def before_data(self, number: int) -> None:
        self.phase(f"data of step {number}", long=number == self._first)

    def before_step(self, number: int) -> None:
        """End the patience of a checkpoint: a step begins with a collective."""
        self._number, self._text = number, f"step {number}"
        loads = self._loads_kernels
        self.watchdog.phase(self._text, self._allowed, mark=True, alike=False, loads_kernels=loads)

    def on_record(self, record: StepRecord) -> None:
        """Adapt the patience to the length of this step."""
        if record.seconds is not None:
            self.watchdog.step_took(record.seconds)

    def begin(self, record: CollectiveRecord, members: tuple[int, ...]) -> None:
        """Log a collective."""
        if self._started:
            self.watchdog.note(record, members)

    def end(self, token: None) -> None:
        """Do nothing: only issued collectives are counted."""

    @property
    def _allowed(self) -> float:
        return self.limits.first_step if self._number == self._first else 0.0

    @property
    def _loads_kernels(self) -> bool:
        return self.limits.compiles and self._number == self._first

    def _step_action(self, action: Step) -> None:
        self._text = f"step {self._number} {action}"
        self.watchdog.phase(self._text, self._allowed, loads_kernels=self._loads_kernels)

    def _compile(self, *_: object) -> None:
        """The compiler begins, in whatever thread needs a kernel: a rank that compiles on a busy
        machine is silent for longer than one that hangs may be."""
        self.watchdog.phase(f"{self._text}, compiling", _LONGEST, loads_kernels=True)

    def _compiled(self, *_: object) -> None:
        self.watchdog.phase(self._text, self._allowed, loads_kernels=self._loads_kernels)


class ActionPhases:
    """Observer that reports every pipeline action as a phase."""

    def __init__(self, phase: Callable[[Step], None]) -> None:
        self._phase = phase

    def begin(self, action: Step) -> None:
        self._phase(action)

    def end(self, token: None) -> None:
        """Do nothing: the next action or phase ends this one."""
