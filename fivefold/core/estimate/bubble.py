"""How long the ranks of a pipeline wait in a step: closed forms that the clock holds in check.

Legend: p stages, m microbatches, v chunks of a rank; F, B, W seconds of a stage for a microbatch:
forward, gradients of inputs with what is computed again, gradients of weights. The forms are those
of the makespan for equal stages; what they do when m is small, or B long, was read off the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fivefold.core.estimate.grid import SCHEDULES, Array, Grid


@dataclass(frozen=True)
class Stage:
    """Seconds of the average stage, beside the layouts that have it."""

    forward: Array
    inputs: Array
    weights: Array
    grid: Grid

    @property
    def whole(self) -> Array:
        return self.forward + self.inputs + self.weights


def bubbles(stage: Stage, others: Array, late_check: bool) -> Array:
    """Seconds that the slowest rank waits.

    `others`: seconds of one microbatch through all stages but the slowest. `late_check`: the
    optimizer does not wait for the norm of all gradients, so that steps of the ranks overlap.
    """
    grid = stage.grid
    found = others / grid.chunks
    for name, form in _FORMS.items():
        here = grid.schedule == SCHEDULES.index(name)
        if here.any():
            chosen = _zb_h2_span if late_check and name == "zb-h2" else form
            found = np.where(here, np.maximum(chosen(stage), 0.0), found)
    return np.where(grid.pp > 1, found, 0.0)


def _zb_h1(stage: Stage) -> Array:
    """Weight gradients fill the drain, as many as there are microbatches."""
    p, m = stage.grid.pp, stage.grid.microbatches
    filled = np.minimum(m, p) - 1
    return (p - 1) * (stage.forward + stage.inputs) - filled * stage.weights


def _zb_interleaved(stage: Stage) -> Array:
    return _zb_h1(stage) / stage.grid.chunks


def _zb_h2_span(stage: Stage) -> Array:
    p, m = stage.grid.pp, stage.grid.microbatches
    filled = np.minimum(m - 1, 2 * (p - 1))
    return (p - 1) * (stage.forward + stage.inputs) - filled * stage.weights


def _zb_h2(stage: Stage) -> Array:
    """The last stage starts after p - 1 forwards, whatever fills the rest."""
    return np.maximum((stage.grid.pp - 1) * stage.forward, _zb_h2_span(stage))


def _zb_v(stage: Stage) -> Array:
    p, m = stage.grid.pp, stage.grid.microbatches
    filled = np.clip(m - p, 0, p - 1)
    least = (p - 1) * stage.inputs / 2
    return np.maximum(least, (p - 1) * stage.inputs - filled * stage.weights)


def _v_half(stage: Stage) -> Array:
    """Where backwards are long, every further microbatch waits for them."""
    p, m = stage.grid.pp, stage.grid.microbatches
    forward, inputs, weights = stage.forward, stage.inputs, stage.weights
    trip = (p / 2 - 1) * forward + (1.5 * p - 1) * inputs - (p / 2 + 1.5) * weights
    trip = np.where(p == 2, inputs - weights / 2, trip)
    odd = p % 2 == 1
    trip = trip + np.where(odd, 1.5 * forward, 0.0)
    period = 2 * inputs + np.where(p > 4, weights / 2, 0.0) + np.where(odd, forward / 2, 0.0)
    drift = np.where(p == 2, 0.0, np.maximum(period - stage.whole, 0.0))
    return trip + drift * np.maximum(m - p, 0.0)


def _v_min(stage: Stage) -> Array:
    """Every slot of its three takes as long as the longest."""
    p, m = stage.grid.pp, stage.grid.microbatches
    forward, inputs, weights = stage.forward, stage.inputs, stage.weights
    longest = np.maximum(np.maximum(forward, inputs), weights)
    period = np.where(p == 2, (forward + weights) / 2 + 2 * inputs, 3 * longest)
    trip = p * forward + (p - 3) * inputs + weights / 2
    thirds = (p % 3 == 0) & (p > 3)
    trip = trip + np.where(thirds, np.maximum(forward / 2, 2 * forward - inputs), 0.0)
    trip = np.where(p == 2, 1.5 * forward, trip)
    return trip + m * np.maximum(period - stage.whole, 0.0)


def _dualpipe(stage: Stage) -> Array:
    return (stage.grid.pp / 2 - 1) * (stage.forward + 2 * stage.inputs - stage.weights)


def _dualpipe_v(stage: Stage) -> Array:
    return (stage.grid.pp - 1) * (stage.forward + 2 * stage.inputs - stage.weights) / 2


def _none(stage: Stage) -> Array:
    """An asynchronous pipeline never drains."""
    return np.zeros_like(stage.grid.pp)


_FORMS: dict[str, Callable[[Stage], Array]] = {
    "zb-h1": _zb_h1,
    "zb-h2": _zb_h2,
    "zb-interleaved": _zb_interleaved,
    "zb-v": _zb_v,
    "v-half": _v_half,
    "v-min": _v_min,
    "dualpipe": _dualpipe,
    "dualpipe-v": _dualpipe_v,
    "pipedream": _none,
    "pipedream-2bw": _none,
}
