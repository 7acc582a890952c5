"""What a self-contained page holds: answers to the questions that its controls ask next.

Explore: the job itself, everything that one slider, one select or one of the planner's layouts
makes of it, and the two slow questions of the job. Learn: each panel with every combination of its
choices, or, where there are too many, with every two of them changed. A run: its newest steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations, product

from fivefold.core.errors import FivefoldError
from fivefold.report.page.learn.choice import Choice
from fivefold.report.page.questions import (
    LESSONS,
    SLOW,
    Answer,
    Params,
    Progress,
    Run,
    answer,
    key,
    refusal,
)
from fivefold.report.page.ranking import JOB
from fivefold.report.page.state import State

_MOST_COMBINATIONS = 450  # of a panel that is held whole
_CHANGED = 2  # choices of a larger one that may differ from where it begins
_MOST_STEPS = 8
_SLOW_SHARE = 0.2  # of the time
Question = tuple[str, dict[str, str]]


def embedded(params: Params, run: Run | None, on_progress: Progress) -> dict[str, Answer]:
    """Answers by `key`; `params` are those of Explore that the page opens with."""
    state = State.parse(params).params()
    job = {name: state[name] for name in JOB if name in state}
    found: dict[str, Answer] = {}
    for number, (name, view) in enumerate(SLOW.items()):
        start, share = _SLOW_SHARE * number / len(SLOW), _SLOW_SHARE / len(SLOW)
        found[key(name, job)] = view(job, _part(on_progress, start, share))
    begin = answer("explore", state)
    layouts = found[key("ranking", job)]
    questions = [
        ("explore", dict(params)),
        *_near(state, begin, layouts["layouts"] + layouts["front"]),
        *_lessons(),
        *_of_run(run),
    ]
    questions += [("pictures", each) for name, each in questions if name == "explore"]
    asked = {key(name, each): (name, each) for name, each in questions}
    for number, (place, (name, each)) in enumerate(asked.items()):
        found[place] = _answered(name, each, run)
        on_progress(_SLOW_SHARE + (1 - _SLOW_SHARE) * (number + 1) / len(asked))
    return found


def _part(on_progress: Progress, start: float, share: float) -> Progress:
    return lambda done: on_progress(start + share * done)


def _answered(name: str, params: Params, run: Run | None) -> Answer:
    """As a server would say it."""
    try:
        return answer(name, params, run)
    except FivefoldError as error:
        return refusal(error)


def _near(state: dict[str, str], view: Answer, layouts: list[Answer]) -> Iterator[Question]:
    """The state, and all that is one change away: what the inputs can be set to, and layouts."""
    yield "explore", state
    inputs = [slider["values"] for slider in view["sliders"].values()]
    for options in (*inputs, *view["choices"].values()):
        yield from (("explore", _set(state, one["set"])) for one in options if one["legal"])
    yield from (("explore", _set(state, one["set"])) for one in layouts)


def _set(state: dict[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """A changed state as the page asks for it: an empty text takes a key away."""
    return {name: text for name, text in {**state, **changes}.items() if text}


def _lessons() -> Iterator[Question]:
    for name, lesson in LESSONS.items():
        yield f"learn/{name}", {}
        for params in _combinations(lesson.CHOICES):
            yield f"learn/{name}", params


def _combinations(found: Mapping[str, Choice]) -> Iterator[dict[str, str]]:
    """Values for every choice."""
    if math.prod(len(one.values) for one in found.values()) <= _MOST_COMBINATIONS:
        for values in product(*(one.values for one in found.values())):
            yield dict(zip(found, values, strict=True))
        return
    usual = {name: one.default for name, one in found.items()}
    for names in combinations(found, min(_CHANGED, len(found))):
        for values in product(*(found[name].values for name in names)):
            yield usual | dict(zip(names, values, strict=True))


def _of_run(run: Run | None) -> Iterator[Question]:
    if run is None:
        return
    yield "run", {}
    for step in run.facts().steps[-_MOST_STEPS:]:
        yield "run", {"step": str(step)}
