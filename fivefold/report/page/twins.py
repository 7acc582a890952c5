"""The text twins: what a tab shows, for terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fivefold.core.errors import IllegalLayout, UnknownName
from fivefold.report.page import curves, explore, ranking, run_text
from fivefold.report.page.questions import LESSONS, SLOW, Answer, Params, Progress, Run, answer
from fivefold.report.page.state import State

_SLOW_TEXTS: dict[str, Callable[[Answer], list[str]]] = {
    "ranking": ranking.text,
    "curves": curves.text,
}


def answers(
    tab: str, params: Params, panel: str | None, run: Run | None, on_progress: Progress
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
            wanted = list(run_text.TEXTS) if panel is None else [_known(panel, run_text.TEXTS)]
            for each in wanted:
                yield from (*run_text.TEXTS[each](view), "")
        elif name in _SLOW_TEXTS:
            yield from (*_SLOW_TEXTS[name](view), "")
        else:
            module = LESSONS[name.removeprefix("learn/")]
            yield from (module.TITLE, "", *module.text(view), "")


def _known(name: str, known: Iterable[str]) -> str:
    if name not in known:
        raise UnknownName("panel", name, known)
    return name
