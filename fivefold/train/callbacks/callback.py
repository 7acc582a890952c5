"""What a training run does besides its steps: one file for each concern.

The loop calls every callback at the same moments, in the order of its list; only `finish` is called
in reverse, so that the last checkpoint is written before the record says that the run has ended.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.core import BadFile, FivefoldError, load_code
from fivefold.records import StepRecord

if TYPE_CHECKING:
    from torch import nn

    from fivefold.core.plan import Plan, Recipe


@dataclass(frozen=True)
class CallbackRank:
    """What a callback knows of its rank: its number, the run's plan and folder, and the modules of
    its pipeline stages, which have this rank's shards of the weights."""

    rank: int
    plan: Plan
    folder: Path | None
    modules: tuple[nn.Module, ...]
    report: Callable[[str], None]  # prints a line as a warning, and gives it to `on_progress`


class Callback:
    """What a run does besides its steps: the base of a user's callbacks too.

    Every rank has its own value of the class, and calls all hooks at the same moments, so that a
    collective in a hook must be called by all ranks. A hook does nothing unless it is overridden.
    Between `before_step` and `after_step` the model runs; an error in a hook ends the run.
    """

    def setup(self, rank: CallbackRank) -> None:
        """The job is built, and no checkpoint is loaded yet. Only a user's callbacks have this."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of a user's callback, as JSON; that of rank 0 is written."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A checkpoint is loaded that has a state of this callback: on all ranks that of rank 0."""

    def start(self, after: int) -> None:
        """Called when the job is built and loaded; step `after + 1` follows."""

    def before_data(self, number: int) -> None:
        """Called before the rank takes the data of a step."""

    def before_step(self, number: int) -> None:
        """Called with the data, before the step."""

    def measure(self, number: int) -> dict[str, Any]:
        """Called when the step is issued; returns this callback's fields of its `StepRecord`."""
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


def callback_classes(recipe: Recipe) -> list[type[Callback]]:
    """The classes that the key `callbacks` names, loaded from their files."""
    classes: list[type[Callback]] = []
    for text in recipe.callback_texts:
        value = load_code(text)
        if not (isinstance(value, type) and issubclass(value, Callback)):
            raise BadFile(text, ["it is no callback: give a subclass of ff.Callback"])
        classes.append(value)
    return classes


def require_callbacks(values: Sequence[Callback]) -> tuple[Callback, ...]:
    """Refuse what ranks cannot receive as callbacks."""
    for value in values:
        if not isinstance(value, Callback):
            raise FivefoldError(
                f"callbacks = {value!r}: give values of subclasses of ff.Callback, as in "
                "callbacks=[MyCallback()]"
            )
        try:
            pickle.dumps(value)
        except Exception as error:
            raise FivefoldError(
                f"a {type(value).__name__} cannot be sent to the ranks ({error}): write its class "
                "at the top level of a file, and open files in setup() rather than before"
            ) from error
    return tuple(values)


def callback_states(callbacks: Sequence[Callback]) -> dict[str, dict[str, Any]]:
    """The states of a user's callbacks, by class and number."""
    states: dict[str, dict[str, Any]] = {}
    for name, callback in _named(callbacks).items():
        if state := callback.state_dict():
            try:
                states[name] = json.loads(json.dumps(state))
            except (TypeError, ValueError) as error:
                raise FivefoldError(f"state_dict() of {name}: {error}; return JSON") from error
    return states


def load_callback_states(callbacks: Sequence[Callback], states: dict[str, dict[str, Any]]) -> None:
    """Give callbacks what a checkpoint has of them."""
    for name, callback in _named(callbacks).items():
        if name in states:
            callback.load_state_dict(states[name])


def _named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    names: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__name__
        number = sum(other.partition("#")[0] == name for other in names)
        names[f"{name}#{number}" if number else name] = callback
    return names
