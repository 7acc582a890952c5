"""The text twins: what a tab shows, for terminals."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

from fivefold import __version__
from fivefold.core.errors import FivefoldError, IllegalLayout, UnknownName
from fivefold.page import explore, explore_search, run_view
from fivefold.page.explore_search import JOB
from fivefold.page.explore_state import State
from fivefold.page.learn import Choice
from fivefold.page.questions import (
    LESSONS,
    SLOW,
    Answer,
    Params,
    Progress,
    RunQuestion,
    answer,
    key,
    refusal,
)

_SLOW_TEXTS: dict[str, Callable[[Answer], list[str]]] = {
    "ranking": explore_search.ranking_text,
    "curves": explore_search.curves_text,
}


def answers(
    tab: str, params: Params, panel: str | None, run: RunQuestion | None, on_progress: Progress
) -> dict[str, Answer]:
    """What the panels of a tab are drawn from, by question."""
    if tab == "run":
        return {"run": answer("run", params, run)}
    if tab == "learn":
        given = {name: value for name, value in params.items() if name not in ("panel", "frame")}
        wanted = panel or params.get("panel")
        names = list(LESSONS) if wanted is None else [_known(wanted, LESSONS)]
        return {f"learn/{name}": answer(f"learn/{name}", given) for name in names}
    known = [*explore.TEXTS, *SLOW]
    names = known if panel is None else [_known(panel, known)]
    found: dict[str, Answer] = {}
    if set(names) & set(explore.TEXTS):
        found["explore"] = answer("explore", params)
        if problem := found["explore"]["problem"]:
            near = [one["label"] for one in problem["nearest"]]
            raise IllegalLayout(State.parse(params).words(), problem["reasons"], near)
        if {"timeline", "traffic"} & set(names):
            found["explore"] |= answer("pictures", params)
    for name in (each for each in SLOW if each in names):
        found[name] = SLOW[name](params, on_progress)
    return found


def lines(found: dict[str, Answer], panel: str | None) -> Iterator[str]:
    """The panels one after another; `panel` picks one."""
    for name, view in found.items():
        if name == "explore":
            for each in explore.TEXTS if panel is None else [panel]:
                yield from (*explore.TEXTS[each](view), "")
        elif name == "run":
            wanted = list(run_view.TEXTS) if panel is None else [_known(panel, run_view.TEXTS)]
            for each in wanted:
                yield from (*run_view.TEXTS[each](view), "")
        elif name in _SLOW_TEXTS:
            yield from (*_SLOW_TEXTS[name](view), "")
        else:
            module = LESSONS[name.removeprefix("learn/")]
            yield from (module.TITLE, "", *module.text(view), "")


def _known(name: str, known: Iterable[str]) -> str:
    if name not in known:
        raise UnknownName("panel", name, known)
    return name


# The page as one text: live, beside a server, or whole, with all that it needs inside.


STATIC = Path(__file__).parent / "static"
INSTALL = "pip install 'fivefold[page]'"
_OTHERS = "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; base-uri 'none'"
_PREFIX = "fivefold/"


class PageStart(NamedTuple):
    """With what a page opens: its address, the job of Explore, and the folder of a run, or ""."""

    address: str
    job: Mapping[str, str]
    run: str


def live(start: PageStart) -> tuple[str, str]:
    """The page of a server, and the policy that keeps other scripts from running in it."""
    modules = {_PREFIX + path.name: f"/static/{path.name}" for path in _modules()}
    names = json.dumps({"imports": modules})
    digest = base64.b64encode(hashlib.sha256(names.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; connect-src 'self'; {_OTHERS}; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    head = "\n".join(f'<link rel="stylesheet" href="/static/{path.name}">' for path in _sheets())
    scripts = [
        _data("site", json.dumps(_facts(start, live=True))),
        f'<script type="importmap">{names}</script>',
        '<script src="/plotly.js"></script>',
        '<script type="module" src="/static/main.js"></script>',
    ]
    return _page(head, scripts), policy


def whole(start: PageStart, answers: Mapping[str, Any], command: str) -> str:
    """A page that opens without a server, with every answer that it can show."""
    policy = f"default-src 'none'; script-src 'unsafe-inline' data:; {_OTHERS}"
    modules = {_PREFIX + path.name: _inline(path) for path in _modules()}
    packed = gzip.compress(json.dumps(answers).encode(), mtime=0)
    facts = _facts(start, live=False) | {"command": command}
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{''.join(path.read_text('utf-8') for path in _sheets())}</style>"
    )
    scripts = [
        _data("site", json.dumps(facts)),
        _data("answers", base64.b64encode(packed).decode()),
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>',
        f"<script>{_closed(plotly().read_text('utf-8'))}</script>",
        f'<script type="module">import "{_PREFIX}main.js";</script>',
    ]
    return _page(head, scripts)


def plotly() -> Path:
    """The charting library, from where it is installed."""
    spec = find_spec("plotly")
    places = (spec.submodule_search_locations if spec else None) or []
    for place in places:
        path = Path(place) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise FivefoldError(f"the page draws with Plotly, which is not installed: {INSTALL}")


def _facts(start: PageStart, *, live: bool) -> dict[str, Any]:
    lessons = {
        name: {
            "title": module.TITLE,
            "choices": {each: vars(choice) for each, choice in module.CHOICES.items()},
        }
        for name, module in LESSONS.items()
    }
    return {
        "live": live,
        "run": start.run,
        "start": start.address,
        "job": dict(start.job),
        "version": __version__,
        "lessons": lessons,
    }


def _page(head: str, scripts: list[str]) -> str:
    text = (STATIC / "page.html").read_text("utf-8")
    return text.replace("{{head}}", head).replace("{{scripts}}", "\n".join(scripts))


def _sheets() -> list[Path]:
    """The page's own sheet comes first: those of its parts build on it."""
    return sorted(STATIC.glob("*.css"), key=lambda path: (path.name != "page.css", path.name))


def _modules() -> list[Path]:
    return sorted(STATIC.glob("*.js"))


def _inline(path: Path) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _data(name: str, text: str) -> str:
    return f'<script type="application/json" id="{name}">{_closed(text)}</script>'


def _closed(text: str) -> str:
    """Nothing inside of a script may look like its end; in strings `\\/` is `/`."""
    return text.replace("</", "<\\/").replace("<!--", "<\\u0021--")


# What a self-contained page holds: answers to the questions that its controls ask next.
#
# Explore: the job itself, everything that one slider, one select or one of the planner's layouts
# makes of it, and the two slow questions of the job. Learn: each panel with every combination of
# its choices, or, where there are too many, with every two of them changed. A run: its newest
# steps.


_MOST_COMBINATIONS = 450  # of a panel that is held whole
_CHANGED = 2  # choices of a larger one that may differ from where it begins
_MOST_STEPS = 8
_SLOW_SHARE = 0.2  # of the time
Question = tuple[str, dict[str, str]]


def embedded(params: Params, run: RunQuestion | None, on_progress: Progress) -> dict[str, Answer]:
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


def _answered(name: str, params: Params, run: RunQuestion | None) -> Answer:
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


def _of_run(run: RunQuestion | None) -> Iterator[Question]:
    if run is None:
        return
    yield "run", {}
    for step in run.facts().steps[-_MOST_STEPS:]:
        yield "run", {"step": str(step)}
