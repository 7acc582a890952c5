"""The scale of losses in float16, whose small numbers would vanish.

The gradients of a scaled loss are as much larger, and are divided again before anybody looks at
them. Where one overflows, the step is skipped and the scale halved; after a long while without an
overflow it is doubled.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST = 2.0**16
_LEAST = 1.0
_STEPS_TO_GROW = 500


@dataclass
class LossScale:
    """Follows the steps of a training; `dynamic` only in float16."""

    dynamic: bool
    value: float = 1.0
    good_steps: int = 0  # without an overflow, since the scale was changed

    @classmethod
    def of(cls, dtype: str) -> LossScale:
        """The scale that a training in this type begins with."""
        return cls(True, _FIRST) if dtype == "float16" else cls(False)

    @property
    def explains_overflow(self) -> bool:
        """Whether a number that is not finite may be the scale's fault."""
        return self.dynamic and self.value > _LEAST

    def update(self, skipped: bool) -> None:
        """Behind a step."""
        if not self.dynamic:
            return
        if skipped:
            self.value, self.good_steps = max(_LEAST, self.value / 2), 0
            return
        self.good_steps += 1
        if self.good_steps == _STEPS_TO_GROW:
            self.value, self.good_steps = self.value * 2, 0
