"""Several runs side by side: curves in one chart, numbers, and how their recipes differ.

{"runs": [{"name", "state", "live", "layout", numbers of `_NUMBERS`}, ...],
 "curves": {name: {"title", "range", "lines": [{"run": its name, "x", "y"}, ...]}},
 "differs": [{"key", "values": a text for each run}, ...], "same": how many keys are equal}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Protocol

from fivefold.core import FivefoldError, UnknownName, counted
from fivefold.records import RunFacts, StepSpans, Summary
from fivefold.report import WIDTH, duration, rough_duration, table, thousands, wrapped
from fivefold_page import Params, View
from fivefold_page.run import curves as run_curves
from fivefold_page.run import view as run_view


class RunSource(Protocol):
    """Runs by name, whose records are read again for every question."""

    @property
    def names(self) -> Sequence[str]: ...

    def facts(self, name: str) -> RunFacts: ...

    def spans(self, name: str, step: int) -> StepSpans | None: ...


_NONE = "–"  # a run does not have this key or number
_CURVES = {
    "loss": "loss, smoothed",
    "eval": "evaluation loss",
    "tokens_per_s": "tokens/s",
    "memory_gib": "GiB of the fullest rank",
}
_LEAST_SPAN = {"loss": 0.01, "eval": 0.01, "tokens_per_s": 0.2, "memory_gib": 0.2}
_MOST_STEPS = 8  # of a run in a page without a server
_KEY_ROOM, _LEAST_ROOM = 20, 12  # characters of keys and of values in a terminal

_Number = Callable[[Summary], str | None]


def _known(value: float | None, write: Callable[[float], str]) -> str | None:
    return None if value is None else write(value)


_NUMBERS: dict[str, _Number] = {
    "steps": lambda one: f"{one.num_steps:,}",
    "last loss": lambda one: _known(one.last_loss, "{:.4f}".format),
    "evaluation loss": lambda one: _known(one.eval_loss, "{:.4f}".format),
    "step, median": lambda one: _known(one.step_s, duration),
    "tokens/s, median": lambda one: one.tokens_per_s and thousands(one.tokens_per_s.median),
    "MFU, median": lambda one: _known(one.mfu, "{:.1%}".format),
    "peak memory": lambda one: _known(one.memory_gib, "{:.1f} GiB".format),
    "wall time": lambda one: rough_duration(one.wall_s),
    "goodput": lambda one: f"{one.goodput:.1%}",
    "restarts": lambda one: str(one.num_restarts),
}


def labels(paths: Sequence[str]) -> list[str]:
    """A name for each folder: the shortest end of its path that no other folder has.

    >>> labels(["runs/a", "runs/b", "old/a"])
    ['runs/a', 'b', 'old/a']
    """
    parts = [PurePath(path).parts or (path,) for path in paths]
    found: list[str] = []
    for mine in parts:
        others = [each for each in parts if each != mine]
        ends = range(1, len(mine) + 1)
        size = next((n for n in ends if all(mine[-n:] != one[-n:] for one in others)), len(mine))
        found.append(str(PurePath(*mine[-size:])))
    return found


def chosen(params: Params, names: Sequence[str]) -> list[str]:
    """The runs of the param `runs`, numbers from 0 between commas; all if it is absent."""
    if "runs" not in params:
        return list(names)
    known = {str(number): name for number, name in enumerate(names)}
    asked = [each for each in params["runs"].split(",") if each]
    for each in asked:
        if each not in known:
            raise UnknownName("run", each[:20], known)
    if not asked:
        raise FivefoldError("runs is empty: choose at least one run")
    return [known[each] for each in dict.fromkeys(asked)]


def view(found: Mapping[str, RunFacts], states: Mapping[str, str]) -> View:
    """These runs by name; `states` says how far each is."""
    return {
        "runs": [_run(name, facts, states[name]) for name, facts in found.items()],
        "curves": _curves(found),
        **_recipes(found),
    }


def _run(name: str, facts: RunFacts, state: str) -> View:
    numbers = {each: write(facts.summary) or _NONE for each, write in _NUMBERS.items()}
    start = facts.starts[-1]
    layout = str(start.facts.get("layout", "unknown"))
    live = start.ended is None and start.facts.get("failed") is None
    return {"name": name, "state": state, "live": live, "layout": layout, "numbers": numbers}


def _curves(found: Mapping[str, RunFacts]) -> dict[str, View]:
    """Each curve that at least one run has, on an axis that all share."""
    by_run = {name: run_curves.curves(facts) for name, facts in found.items()}
    drawn: dict[str, View] = {}
    for curve, title in _CURVES.items():
        lines: list[View] = []
        for name, one in by_run.items():
            line = _line(one, curve)
            if line is not None and any(y is not None for y in line["y"]):
                lines.append({"run": name, **line})
        if lines:
            ends = [_ends(by_run[line["run"]], curve, line) for line in lines]
            spread = [each for pair in ends for each in pair]
            low, high = run_curves.axis_range(spread, None, _LEAST_SPAN[curve])
            drawn[curve] = {"title": title, "range": [low, high], "lines": lines}
    return drawn


def _line(curves: Mapping[str, View], name: str) -> View | None:
    if name == "eval":
        return curves["loss"]["eval"] if "loss" in curves else None
    if name not in curves:
        return None
    return curves[name]["smoothed" if name == "loss" else "measured"]


def _ends(curves: Mapping[str, View], name: str, line: View) -> list[float]:
    """The lowest and highest value that the axis shows; that of rates leaves first steps out."""
    if name in ("tokens_per_s", "memory_gib"):
        return curves[name]["axis"]["range"]
    values = [y for y in line["y"] if y is not None]
    return [min(values), max(values)]


def _recipes(found: Mapping[str, RunFacts]) -> View:
    """The keys whose values differ, and what else differs between the newest starts."""
    tables = [{**facts.recipe, **_circumstances(facts)} for facts in found.values()]
    keys = dict.fromkeys(key for each in tables for key in each)
    rows = {key: [_value(each.get(key)) for each in tables] for key in keys}
    differs = {key: values for key, values in rows.items() if len(set(values)) > 1}
    return {
        "differs": [{"key": key, "values": values} for key, values in differs.items()],
        "same": len(rows) - len(differs),
    }


def _circumstances(facts: RunFacts) -> dict[str, Any]:
    """What no recipe has: the code and the machine of the newest start."""
    start = facts.starts[-1].facts
    machine: dict[str, Any] = start.get("machine") or {}
    gpus: list[str] = machine.get("gpus") or []
    cpus = counted(machine.get("num_cpus") or 1, "CPU")
    versions: dict[str, str] = start.get("versions") or {}
    return {
        "commit": _short(start.get("commit")),
        **{f"version of {name}": text for name, text in versions.items()},
        "ran on": f"{len(gpus)} × {gpus[0]}" if gpus else cpus,
    }


def _short(commit: str | None) -> str | None:
    """The first digits of a commit, and whether files had changed."""
    return commit and re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", commit)


def _value(value: object) -> str:
    """A value as a plan file has it."""
    if value is None or value == "":
        return _NONE
    return str(value).lower() if isinstance(value, bool) else str(value)


# Questions about runs.


def _one(run: RunSource, params: Params) -> View:
    """The run that the param `run` numbers, the first if it is absent."""
    name = chosen({"runs": params.get("run", "0")}, run.names)[0]
    return run_view.view(run.facts(name), params, lambda step: run.spans(name, step))


def _all(run: RunSource, params: Params) -> View:
    found = {name: run.facts(name) for name in chosen(params, run.names)}
    return view(found, {name: run_view.state(each) for name, each in found.items()})


ANSWERS: dict[str, Callable[[RunSource, Params], View]] = {"run": _one, "runs": _all}
_Question = tuple[str, dict[str, str]]


def questions(params: Params, panel: str | None, names: Sequence[str]) -> dict[str, _Question]:
    """What a terminal asks, by the name of the answer: one run is `run`; several are `runs` and
    each of them `run/NAME`, unless the params choose one."""
    if len(names) < 2 or "run" in params:
        return {"run": ("run", dict(params))}
    found: dict[str, _Question] = {"runs": ("runs", dict(params))}
    for name in () if panel == "runs" else chosen(params, names):
        found[f"run/{name}"] = ("run", {**params, "run": str(list(names).index(name))})
    return found


def offline(run: RunSource) -> Iterator[_Question]:
    """What a page without a server can ask: all runs together, and the newest steps of each."""
    if len(run.names) > 1:
        yield "runs", {}
    for number, name in enumerate(run.names):
        which = {"run": str(number)} if number else {}
        yield "run", which
        for step in run.facts(name).steps[-_MOST_STEPS:]:
            yield "run", {**which, "step": str(step)}


# The same for a terminal.


def lines(name: str, found: View, panel: str | None) -> Iterator[str]:
    """One answer as text. Of several runs, `panel` is printed for each."""
    if name == "runs":
        yield from () if panel in run_view.PANELS else (*text(found), "")
        return
    _, _, label = name.partition("/")
    panels = [panel] if panel is not None else [] if label else run_view.shown(found)
    for each in panels:
        yield from (*([label, ""] if label else []), *run_view.PANELS[each].text(found), "")


def text(view: View) -> list[str]:
    """The numbers of all runs, and what differs between their recipes."""
    runs = view["runs"]
    lines = ["runs", *(line for one in runs for line in wrapped(one["state"], f"{one['name']}: "))]
    names = [one["name"] for one in runs]
    numbers = [[key, *(one["numbers"][key] for one in runs)] for key in _NUMBERS]
    lines += ["", *table([["", *names], *numbers])]
    same = f"{counted(view['same'], 'key')} equal"
    if not view["differs"]:
        return [*lines, "", f"the recipes do not differ: {same}"]
    room = max(_LEAST_ROOM, (WIDTH - _KEY_ROOM) // len(runs) - 2)
    rows = [[one["key"], *(_cut(each, room) for each in one["values"])] for one in view["differs"]]
    return [*lines, "", f"recipes differ ({same})", *table([["", *names], *rows])]


def _cut(text: str, room: int) -> str:
    """The end of a long text, for paths differ at their ends."""
    return text if len(text) <= room else "…" + text[1 - room :]
