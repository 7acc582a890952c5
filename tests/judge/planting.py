"""How a mistake is put into all processes of a run: patches that its forks inherit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

from fivefold import step as step_module

Patch = AbstractContextManager[Any]
LOOP_STEP = "fivefold.train.loop.step"


def with_step(change: Callable[..., Any]) -> Patch:
    """`change` gets the real step, and what it is called with."""
    return patch(LOOP_STEP, partial(change, step_module.step))


def instead(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """`change` gets the real method or function, and what it is called with."""
    inner = getattr(owner, name)

    def method(*given: Any) -> Any:
        return change(inner, *given)

    return patch.object(owner, name, method)
