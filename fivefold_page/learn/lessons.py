"""The table of lessons: each is a module of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fivefold_page import Params, View
from fivefold_page.learn import (
    collectives,
    compare,
    context,
    data,
    device,
    expert,
    landscape,
    layer,
    pipeline,
    serving,
    tensor,
    trainers,
)
from fivefold_page.learn.lesson import Choice


class Lesson(Protocol):
    """A module of `learn`, drawn by `static/learn_<name>.js`.

    Its answer has at least `choices`, `frames` and `sentences`.
    """

    @property
    def TITLE(self) -> str: ...

    @property
    def CHOICES(self) -> Mapping[str, Choice]: ...

    def view(self, params: Params, /) -> View: ...

    def text(self, view: View, /) -> list[str]: ...


# The panels; `chapters.CHAPTERS` puts them in the order of the path.


LESSONS: dict[str, Lesson] = {
    "device": device,
    "collectives": collectives,
    "data": data,
    "tensor": tensor,
    "pipeline": pipeline,
    "context": context,
    "expert": expert,
    "landscape": landscape,
    "layer": layer,
    "compare": compare,
    "serving": serving,
    "trainers": trainers,
}
