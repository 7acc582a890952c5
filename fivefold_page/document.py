"""What the page can ask, the answers, and the HTML document that asks.

The same answers are shown in three ways: by a server (`live_page` and `server.py`), in one HTML
file that opens offline (`offline_page` with `offline_answers`), and as text (`answers`, `lines`).
Panels are registered in one table per tab: `LESSONS`, `explore.PANELS`, `run_view.PANELS`.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

from fivefold import __version__
from fivefold.core import FivefoldError, IllegalLayout, UnknownName
from fivefold_page.explore import JOB, State, explore
from fivefold_page.learn import GLOSSARY, LESSONS, Choice, chapters
from fivefold_page.run import RunSource
from fivefold_page.run import compare as run_compare
from fivefold_page.run import view as run_view
from fivefold_page.view import Params, Progress, View

Question = tuple[str, dict[str, str]]  # its name and its parameters
_EXPLORE = {"explore": explore.view, "pictures": explore.pictures}


# Questions and answers.


def answer(name: str, params: Params, run: RunSource | None = None) -> View:
    """The answer to a question that takes milliseconds; `explore.searches` take seconds."""
    if name in _EXPLORE:
        return _EXPLORE[name](params)
    if name in run_compare.ANSWERS:
        if run is None:
            raise FivefoldError("no run: say which, as in fivefold observe runs/first")
        return run_compare.ANSWERS[name](run, params)
    kind, _, lesson = name.partition("/")
    if kind == "chapter":
        return chapters.view(lesson)
    if kind != "learn" or lesson not in LESSONS:
        lessons = [*(f"chapter/{chapter_name}" for chapter_name in chapters.CHAPTERS)]
        lessons += [f"learn/{lesson_name}" for lesson_name in LESSONS]
        known = [*_EXPLORE, "run", "runs", *explore.searches(), *lessons]
        raise UnknownName("question", name, known)
    return LESSONS[lesson].view(params)


def refusal(error: FivefoldError) -> View:
    """An error as an answer."""
    illegal = isinstance(error, IllegalLayout)
    reasons, nearest = (error.reasons, error.nearest) if illegal else ((), ())
    return {"error": str(error), "reasons": [*reasons], "nearest": [*nearest]}


def answer_key(name: str, params: Params) -> str:
    """The name of an answer in an offline page; `key` of ask.js computes the same."""
    pairs = sorted([key, value] for key, value in params.items())
    return name + json.dumps(pairs, separators=(",", ":"), ensure_ascii=False)


# The panels of a tab for a terminal.


def answers(
    tab: str, params: Params, panel: str | None, run: RunSource | None, on_progress: Progress
) -> dict[str, View]:
    """The answers that a tab, or one of its panels, is drawn from, by question."""
    if tab == "run":
        _chosen(panel, [*run_view.PANELS, "runs"])
        questions = run_compare.questions(params, panel, () if run is None else run.names)
        return {name: answer(*question, run) for name, question in questions.items()}
    if tab == "explore":
        return _explore_answers(params, panel, on_progress)
    questions = chapters.questions(params, panel, LESSONS)
    return {name: answer(name, choices) for name, choices in questions}


def _explore_answers(params: Params, panel: str | None, on_progress: Progress) -> dict[str, View]:
    names, searches = _chosen(panel, explore.PANELS), explore.searches()
    views: dict[str, View] = {}
    if quick := [explore.PANELS[name] for name in names if name not in searches]:
        views["explore"] = answer("explore", params)
        if problem := views["explore"]["problem"]:
            near = [neighbour["label"] for neighbour in problem["nearest"]]
            raise IllegalLayout(State.parse(params).degrees(), problem["reasons"], near)
        if any(quick_panel.later for quick_panel in quick):
            views["explore"] |= answer("pictures", params)
    return views | {
        name: search(params, on_progress) for name, search in searches.items() if name in names
    }


def lines(views: dict[str, View], panel: str | None) -> Iterator[str]:
    """Answers as text, panel by panel; `panel` selects one."""
    for name, view in views.items():
        if name == "explore":
            quick = [
                panel_key for panel_key in explore.PANELS if panel_key not in explore.searches()
            ]
            for panel_name in quick if panel is None else [panel]:
                failed = view[panel_name].get("failed")
                text = (
                    [f"{panel_name}: {failed}"]
                    if failed
                    else explore.PANELS[panel_name].text(view[panel_name])
                )
                yield from (*text, "")
        elif name.split("/")[0] in run_compare.ANSWERS:
            yield from run_compare.lines(name, view, panel)
        elif name in explore.PANELS:
            yield from (*explore.PANELS[name].text(view), "")
        elif name.startswith("chapter/"):
            yield from (*chapters.text(view), "")
        else:
            lesson = LESSONS[name.removeprefix("learn/")]
            yield from (lesson.TITLE, "", *lesson.text(view), "")


def _chosen(panel: str | None, known: Iterable[str]) -> list[str]:
    """The panels to print: the given one, or all."""
    if panel is None:
        return list(known)
    if panel not in known:
        raise UnknownName("panel", panel, known)
    return [panel]


# The HTML document: live, with a server, or offline, with everything that it needs inside.


STATIC = Path(__file__).parent / "static"
INSTALL = "pip install 'fivefold[page]'"
_OTHERS = "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; base-uri 'none'"
_PREFIX = "fivefold/"


class PageStart(NamedTuple):
    """What the page opens with: its address, the job of Explore, and runs or "".

    `run` has the folders of the runs as words of a command line, `names` what they are called.
    """

    address: str
    job: Params
    run: str
    names: Sequence[str] = ()


def live_page(start: PageStart) -> tuple[str, str]:
    """The page of a server, and the policy that stops other scripts from running in it."""
    modules = {_PREFIX + path.name: f"/static/{path.name}" for path in _scripts()}
    names = json.dumps({"imports": modules})
    digest = base64.b64encode(hashlib.sha256(names.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; connect-src 'self'; {_OTHERS}; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    head = "\n".join(f'<link rel="stylesheet" href="/static/{path.name}">' for path in _sheets())
    scripts = [
        _data("site", json.dumps(_site(start, live=True))),
        f'<script type="importmap">{names}</script>',
        '<script src="/plotly.js"></script>',
        '<script type="module" src="/static/main.js"></script>',
    ]
    return _page(head, scripts), policy


def offline_page(start: PageStart, answers: Mapping[str, View], command: str) -> str:
    """A page that opens without a server, with every answer that it can show."""
    policy = f"default-src 'none'; script-src 'unsafe-inline' data:; {_OTHERS}"
    modules = {_PREFIX + path.name: _inline(path) for path in _scripts()}
    packed = gzip.compress(json.dumps(answers).encode(), mtime=0)
    site = _site(start, live=False) | {"command": command}
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{''.join(path.read_text('utf-8') for path in _sheets())}</style>"
    )
    scripts = [
        _data("site", json.dumps(site)),
        _data("answers", base64.b64encode(packed).decode()),
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>',
        f"<script>{_escaped(plotly().read_text('utf-8'))}</script>",
        f'<script type="module">import "{_PREFIX}main.js";</script>',
    ]
    return _page(head, scripts)


def plotly() -> Path:
    """The installed charting library."""
    spec = find_spec("plotly")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        path = Path(folder) / "package_data" / "plotly.min.js"
        if path.is_file():
            return path
    raise FivefoldError(f"the page draws with Plotly, which is not installed: {INSTALL}")


def _site(start: PageStart, *, live: bool) -> View:
    """What the scripts know before they ask: `site` of ask.js."""
    lessons = {
        name: {
            "title": lesson.TITLE,
            "choices": {
                choice_name: vars(choice) for choice_name, choice in lesson.CHOICES.items()
            },
        }
        for name, lesson in LESSONS.items()
    }
    return {
        "live": live,
        "run": start.run,
        "runs": list(start.names),
        "start": start.address,
        "job": dict(start.job),
        "version": __version__,
        "lessons": lessons,
        "chapters": chapters.contents(),
        "glossary": GLOSSARY,
        "panels": {
            "explore": _frames(explore.PANELS, "title", "hint", "later", "drawing"),
            "run": _frames(run_view.PANELS, "title", "hint", "column", "drawing"),
        },
    }


def _frames(panels: Mapping[str, Any], *fields: str) -> list[View]:
    """The panels that the page draws, with the fields that its scripts need."""
    named = ((name, panel) for name, panel in panels.items() if panel.title)
    return [{"name": n, **{field: getattr(panel, field) for field in fields}} for n, panel in named]


def _page(head: str, scripts: list[str]) -> str:
    text = (STATIC / "page.html").read_text("utf-8")
    return text.replace("{{head}}", head).replace("{{scripts}}", "\n".join(scripts))


def _sheets() -> list[Path]:
    """The page's own style sheet comes first: the others build on it."""
    return sorted(STATIC.glob("*.css"), key=lambda path: (path.name != "page.css", path.name))


def _scripts() -> list[Path]:
    return sorted(STATIC.glob("*.js"))


def _inline(path: Path) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _data(name: str, text: str) -> str:
    return f'<script type="application/json" id="{name}">{_escaped(text)}</script>'


def _escaped(text: str) -> str:
    """Nothing inside a script may look like its end; in strings `\\/` is `/`."""
    return text.replace("</", "<\\/").replace("<!--", "<\\u0021--")


# The answers inside an offline page: those to the questions that its controls ask next.
#
# Explore: the job, every job that one slider, one select or one of the planner's layouts leads to,
# and the searches for the job. Learn: each panel with every combination of its choices or, if
# there are too many, with every pair of choices changed. Run: the newest steps.


_MOST_COMBINATIONS = 450  # of the choices of one panel
_MOST_CHANGED = 2  # choices that differ from the defaults, in a panel with more combinations
_SEARCH_SHARE = 0.2  # of the time


def offline_answers(
    params: Params, run: RunSource | None, on_progress: Progress
) -> dict[str, View]:
    """Answers by `answer_key`; the page opens Explore with `params`."""
    state = State.parse(params).params()
    job = {name: state[name] for name in JOB if name in state}
    views: dict[str, View] = {}
    searches = explore.searches()
    for number, (name, search) in enumerate(searches.items()):
        start, share = _SEARCH_SHARE * number / len(searches), _SEARCH_SHARE / len(searches)
        views[answer_key(name, job)] = search(job, _portion(on_progress, start, share))
    ranking = views[answer_key("ranking", job)]
    questions = [
        ("explore", dict(params)),
        *_neighbours(state, answer("explore", state), ranking["layouts"] + ranking["front"]),
        *_lesson_questions(),
        *(run_compare.offline(run) if run else ()),
    ]
    questions += [
        ("pictures", question_params) for name, question_params in questions if name == "explore"
    ]
    keyed_questions = {
        answer_key(name, question_params): (name, question_params)
        for name, question_params in questions
    }
    for number, (key, (name, choices)) in enumerate(keyed_questions.items()):
        view = _answer_or_refusal(name, choices, run)
        # No way leads to a job that has no answer.
        illegal = view.get("problem") or (name == "pictures" and "error" in view)
        if not illegal or choices == params:
            views[key] = view
        on_progress(_SEARCH_SHARE + (1 - _SEARCH_SHARE) * (number + 1) / len(keyed_questions))
    return views


def _portion(on_progress: Progress, start: float, share: float) -> Progress:
    return lambda done: on_progress(start + share * done)


def _answer_or_refusal(name: str, params: Params, run: RunSource | None) -> View:
    try:
        return answer(name, params, run)
    except FivefoldError as error:
        return refusal(error)


def _neighbours(state: dict[str, str], view: View, layouts: list[View]) -> Iterator[Question]:
    """The state, and every state one change away: values of inputs, and the planner's layouts."""
    yield "explore", state
    inputs = [slider["values"] for slider in view["sliders"].values()]
    options = (choice for values in (*inputs, *view["choices"].values()) for choice in values)
    for option in (*(choice for choice in options if choice["legal"]), *layouts):
        # As the page asks for it: an empty text removes a key.
        yield "explore", {name: text for name, text in {**state, **option["set"]}.items() if text}


def _lesson_questions() -> Iterator[Question]:
    for name, chapter in chapters.CHAPTERS.items():
        yield f"chapter/{name}", {}
        yield f"learn/{chapter.panel}", dict(chapter.start)
    for name, lesson in LESSONS.items():
        yield f"learn/{name}", {}
        for params in _combinations(lesson.CHOICES):
            yield f"learn/{name}", params


def _combinations(choices: Mapping[str, Choice]) -> Iterator[dict[str, str]]:
    """Values for all choices of a panel."""
    if math.prod(len(choice.values) for choice in choices.values()) <= _MOST_COMBINATIONS:
        for values in product(*(choice.values for choice in choices.values())):
            yield dict(zip(choices, values, strict=True))
        return
    defaults = {name: choice.default for name, choice in choices.items()}
    for names in combinations(choices, min(_MOST_CHANGED, len(choices))):
        for values in product(*(choices[name].values for name in names)):
            yield defaults | dict(zip(names, values, strict=True))
