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
from fivefold.render import WIDTH, duration, rough_duration, table, thousands, wrapped
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
    "steps": lambda summary: f"{summary.num_steps:,}",
    "last loss": lambda summary: _known(summary.last_loss, "{:.4f}".format),
    "evaluation loss": lambda summary: _known(summary.eval_loss, "{:.4f}".format),
    "step, median": lambda summary: _known(summary.step_s, duration),
    "tokens/s, median": lambda summary: (
        summary.tokens_per_s and thousands(summary.tokens_per_s.median)
    ),
    "MFU, median": lambda summary: _known(summary.mfu, "{:.1%}".format),
    "peak memory": lambda summary: _known(summary.memory_gib, "{:.1f} GiB".format),
    "wall time": lambda summary: rough_duration(summary.wall_s),
    "goodput": lambda summary: f"{summary.goodput:.1%}",
    "restarts": lambda summary: str(summary.num_restarts),
}


def labels(paths: Sequence[str]) -> list[str]:
    """A name for each folder: the shortest end of its path that no other folder has.

    >>> labels(["runs/a", "runs/b", "old/a"])
    ['runs/a', 'b', 'old/a']
    """
    parts = [PurePath(path).parts or (path,) for path in paths]
    names: list[str] = []
    for segments in parts:
        other_paths = [candidate for candidate in parts if candidate != segments]
        ends = range(1, len(segments) + 1)
        size = next(
            (
                n
                for n in ends
                if all(segments[-n:] != other_path[-n:] for other_path in other_paths)
            ),
            len(segments),
        )
        names.append(str(PurePath(*segments[-size:])))
    return names


def chosen(params: Params, names: Sequence[str]) -> list[str]:
    """The runs of the param `runs`, numbers from 0 between commas; all if it is absent."""
    if "runs" not in params:
        return list(names)
    known = {str(number): name for number, name in enumerate(names)}
    run_names = [part for part in params["runs"].split(",") if part]
    for choice in run_names:
        if choice not in known:
            raise UnknownName("run", choice[:20], known)
    if not run_names:
        raise FivefoldError("runs is empty: choose at least one run")
    return [known[run_name] for run_name in dict.fromkeys(run_names)]


def view(runs: Mapping[str, RunFacts], states: Mapping[str, str]) -> View:
    """These runs by name; `states` says how far each is."""
    return {
        "runs": [_run(name, facts, states[name]) for name, facts in runs.items()],
        "curves": _curves(runs),
        **_recipes(runs),
    }


def _run(name: str, facts: RunFacts, state: str) -> View:
    numbers = {label: write(facts.summary) or _NONE for label, write in _NUMBERS.items()}
    start = facts.starts[-1]
    layout = str(start.facts.get("layout", "unknown"))
    live = start.ended is None and start.facts.get("failed") is None
    return {"name": name, "state": state, "live": live, "layout": layout, "numbers": numbers}


def _curves(runs: Mapping[str, RunFacts]) -> dict[str, View]:
    """Each curve that at least one run has, on an axis that all share."""
    by_run = {name: run_curves.curves(facts) for name, facts in runs.items()}
    drawn: dict[str, View] = {}
    for curve, title in _CURVES.items():
        lines: list[View] = []
        for name, curve_set in by_run.items():
            line = _line(curve_set, curve)
            if line is not None and any(y is not None for y in line["y"]):
                lines.append({"run": name, **line})
        if lines:
            ends = [_ends(by_run[line["run"]], curve, line) for line in lines]
            spread = [value for pair in ends for value in pair]
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


def _recipes(runs: Mapping[str, RunFacts]) -> View:
    """The keys whose values differ, and what else differs between the newest starts."""
    tables = [{**facts.recipe, **_circumstances(facts)} for facts in runs.values()]
    keys = dict.fromkeys(key for recipe in tables for key in recipe)
    rows = {key: [_value(recipe.get(key)) for recipe in tables] for key in keys}
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
    runs = {name: run.facts(name) for name in chosen(params, run.names)}
    return view(runs, {name: run_view.state(facts) for name, facts in runs.items()})


ANSWERS: dict[str, Callable[[RunSource, Params], View]] = {"run": _one, "runs": _all}
_Question = tuple[str, dict[str, str]]


def questions(params: Params, panel: str | None, names: Sequence[str]) -> dict[str, _Question]:
    """What a terminal asks, by the name of the answer: one run is `run`; several are `runs` and
    each of them `run/NAME`, unless the params choose one."""
    if len(names) < 2 or "run" in params:
        return {"run": ("run", dict(params))}
    requests: dict[str, _Question] = {"runs": ("runs", dict(params))}
    for name in () if panel == "runs" else chosen(params, names):
        requests[f"run/{name}"] = ("run", {**params, "run": str(list(names).index(name))})
    return requests


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


def lines(name: str, answer: View, panel: str | None) -> Iterator[str]:
    """One answer as text. Of several runs, `panel` is printed for each."""
    if name == "runs":
        yield from () if panel in run_view.PANELS else (*text(answer), "")
        return
    _, _, label = name.partition("/")
    panels = [panel] if panel is not None else [] if label else run_view.shown(answer)
    for panel_name in panels:
        yield from (*([label, ""] if label else []), *run_view.PANELS[panel_name].text(answer), "")


def text(view: View) -> list[str]:
    """The numbers of all runs, and what differs between their recipes."""
    runs = view["runs"]
    lines = ["runs", *(line for run in runs for line in wrapped(run["state"], f"{run['name']}: "))]
    names = [run["name"] for run in runs]
    numbers = [[key, *(run["numbers"][key] for run in runs)] for key in _NUMBERS]
    lines += ["", *table([["", *names], *numbers])]
    same = f"{counted(view['same'], 'key')} equal"
    if not view["differs"]:
        return [*lines, "", f"the recipes do not differ: {same}"]
    cell_width = max(_LEAST_ROOM, (WIDTH - _KEY_ROOM) // len(runs) - 2)
    rows = [
        [difference["key"], *(_cut(value, cell_width) for value in difference["values"])]
        for difference in view["differs"]
    ]
    return [*lines, "", f"recipes differ ({same})", *table([["", *names], *rows])]


def _cut(text: str, width: int) -> str:
    """The end of a long text, for paths differ at their ends."""
    return text if len(text) <= width else "…" + text[1 - width :]
