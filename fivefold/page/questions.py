"""What the page can ask, by name; a server and a self-contained file answer the same questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fivefold.core.errors import FivefoldError, IllegalLayout, UnknownName
from fivefold.page import explore, explore_search, run_view
from fivefold.page.learn import (
    Choice,
    collectives,
    context,
    data,
    expert,
    landscape,
    layer,
    pipeline,
    tensor,
)
from fivefold.records.spans import RunFacts, StepSpans

Params = Mapping[str, str]
Answer = dict[str, Any]
Progress = Callable[[float], None]


class Lesson(Protocol):
    """A module of `learn`; its answer has at least `choices`, `frames` and `sentences`."""

    @property
    def TITLE(self) -> str: ...

    @property
    def CHOICES(self) -> Mapping[str, Choice]: ...

    def view(self, params: Params, /) -> Answer: ...

    def text(self, view: Answer, /) -> list[str]: ...


# In the order of the page.
LESSONS: dict[str, Lesson] = {
    "landscape": landscape,
    "layer": layer,
    "collectives": collectives,
    "data": data,
    "tensor": tensor,
    "pipeline": pipeline,
    "context": context,
    "expert": expert,
}
_EXPLORE: dict[str, Callable[[Params], Answer]] = {
    "explore": explore.view,
    "pictures": explore.pictures,
}
# Seconds, not milliseconds: asked aside, with a progress bar, and given up when outdated.
SLOW: dict[str, Callable[[Params, Progress], Answer]] = {
    "ranking": explore_search.ranking_view,
    "curves": explore_search.curves_view,
}


class RunQuestion(Protocol):
    """A run as the page reads it, whenever it is asked."""

    def facts(self) -> RunFacts: ...

    def spans(self, step: int) -> StepSpans | None: ...


def answer(name: str, params: Params, run: RunQuestion | None = None) -> Answer:
    """The answer of a quick question."""
    if name in _EXPLORE:
        return _EXPLORE[name](params)
    if name == "run":
        if run is None:
            raise FivefoldError("no run: say which, as in fivefold observe runs/first")
        return run_view.view(run.facts(), params, run.spans)
    kind, _, lesson = name.partition("/")
    if kind != "learn" or lesson not in LESSONS:
        known = [*_EXPLORE, "run", *SLOW, *(f"learn/{each}" for each in LESSONS)]
        raise UnknownName("question", name, known)
    return LESSONS[lesson].view(params)


def refusal(error: FivefoldError) -> Answer:
    """An error as an answer."""
    reasons, nearest = (list[str](), list[str]())
    if isinstance(error, IllegalLayout):
        reasons, nearest = list(error.reasons), list(error.nearest)
    return {"error": str(error), "reasons": reasons, "nearest": nearest}


def key(name: str, params: Params) -> str:
    """The name of an answer in a self-contained page; `key` of ask.js is its twin."""
    pairs = sorted([each, value] for each, value in params.items())
    return name + json.dumps(pairs, separators=(",", ":"), ensure_ascii=False)
