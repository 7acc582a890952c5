"""Explore: one job, everything about it.

    {"state": canonical params, "choices": {key: options}, "sliders": {axis: slider},
     "problem": None or {"reasons": […], "nearest": [{"label", "set"}]}, "config": pasted or None,
     "numbers", "memory", "time", "map": a part for each picture,
     "plan_toml": the plan as a file}

Where the job is illegal there is a `problem`, and no part but the inputs. What is longest to make
is asked for apart, so that a slider does not wait for it: `pictures`, "timeline", "traffic" and
"curves".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fivefold.core import count
from fivefold.core.errors import FivefoldError, IllegalLayout
from fivefold.core.estimate.outlook import Outlook
from fivefold.core.layout import Layout
from fivefold.core.plan import Plan
from fivefold.report.amounts import duration, gib
from fivefold.report.lines import wrapped
from fivefold.report.page import curves, gpu_map, memory, sliders, timeline, timing, traffic
from fivefold.report.page.state import State, degrees_of
from fivefold.report.plan_resolved import readings

View = dict[str, Any]
CONFIG_FILE = "config.json"
_VERDICTS = {
    "fits": "further below the GPU's memory than estimates may be off",
    "tight": "nearer to the GPU's memory, above or below, than estimates may be off",
    "does not fit": "further above the GPU's memory than estimates may be off",
}
_SAVE = f"# The model is the pasted config: save it as {CONFIG_FILE} beside this file.\n"


def view(params: Mapping[str, str]) -> View:
    """Everything about the job of these params; a job that is none says why, and what is near."""
    state = State.parse(params)
    found: View = {
        "state": state.params(),
        "sliders": sliders.view(state),
        "choices": sliders.choices(state),
        "problem": None,
        "config": state.config or None,
    }
    try:
        return found | _parts(state)
    except IllegalLayout as error:
        near = _near(state, error)
        return found | {"problem": {"reasons": error.reasons, "nearest": near}}
    except FivefoldError as error:
        return found | {"problem": {"reasons": [str(error)], "nearest": []}}


def _parts(state: State) -> View:
    plan, found = state.plan(), state.outlook()
    return {
        "numbers": _numbers(state, found),
        "memory": memory.view(found),
        "time": timing.view(found),
        "map": gpu_map.view(plan),
        "plan_toml": _toml(state, plan),
    }


def pictures(params: Mapping[str, str]) -> View:
    """The pipeline of the job, its traffic, and its memory over the length of sequences."""
    state = State.parse(params)
    found = state.outlook()
    seconds = found.setting.stack.factor
    return {
        "timeline": timeline.view(found.timeline, seconds=seconds),
        "traffic": traffic.view(found.plan),
        "curves": curves.current(state),
    }


def _near(state: State, error: IllegalLayout) -> list[View]:
    """Legal jobs near an illegal one, each with what a state must change to be it.

    No layout mends a sequence that is longer than learned positions: it is cut first.
    """
    shape = state.shape()
    if shape.positions != "learned" or state.seq <= shape.max_seq:
        return [_nearest(state, state, label) for label in error.nearest]
    short = replace(state, seq=shape.max_seq)
    try:
        short.plan()
    except IllegalLayout as rest:
        return [_nearest(state, short, label) for label in rest.nearest]
    return [{"label": f"seq={short.seq}", "set": sliders.changed(state, short)}]


def _nearest(state: State, asked: State, label: str) -> View:
    layout = Layout.parse(label.partition("(")[0])
    other = sliders.settled(asked, {"gpus": layout.world, **degrees_of(layout)})
    words = label if asked.seq == state.seq else f"seq={asked.seq} {label}"
    return {"label": words, "set": sliders.changed(state, other)}


def _numbers(state: State, found: Outlook) -> View:
    plan, setting = found.plan, found.setting
    layout, parameters = plan.layout, count.parameters(plan.shape)
    speed = found.tokens_per_s_per_gpu
    return {
        "model": plan.shape.name,
        "parameters": parameters.total,
        "active": parameters.active,
        "layout": str(layout),
        "verdict": found.verdict,
        "verdict_says": _VERDICTS[found.verdict],
        "total": found.total,
        "limit": setting.machine.memory,
        "usable": setting.capacity,
        "step": found.step,
        "tokens_per_s": speed * layout.world,
        "tokens_per_s_per_gpu": speed,
        "mfu": found.mfu,
        "bubble": found.bubble,
        "tokens": state.tokens,
        "days": found.days(state.tokens),
        "gpu_hours": found.gpu_hours(state.tokens),
        "batch": str(plan.batch),
        "readings": readings(plan),
        "notes": list(plan.notes),
        "peak": f"of the {setting.precision} peak of {setting.machine.chip}; causal attention at "
        "half, recompute not counted",
    }


def _toml(state: State, plan: Plan) -> str:
    """The plan as a file; a pasted config lies beside it."""
    if not state.config:
        return plan.to_toml()
    beside = replace(plan, wishes=replace(plan.wishes, model=CONFIG_FILE))
    return _SAVE + beside.to_toml()


def _numbers_text(found: View) -> list[str]:
    one = found["numbers"]
    lines = [
        ("model", f"{one['model']}: {one['parameters'] / 1e9:,.2f} B parameters, "
                  f"{one['active'] / 1e9:,.2f} B active a token"),
        *(("layout", reading) for reading in one["readings"]),
        ("batch", one["batch"]),
        ("verdict", f"{one['verdict']}: {gib(one['total'])} of {gib(one['limit'])}, "
                    f"of which {gib(one['usable'])} may be used"),
        ("step", f"{duration(one['step'])}: {one['tokens_per_s']:,.0f} tokens/s, "
                 f"{one['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"),
        ("MFU", f"{one['mfu']:.1%} {one['peak']}"),
        ("bubble", f"{one['bubble']:.1%} of the step"),
        ("run", f"{one['tokens']:.4g} tokens: {one['days']:,.1f} days, "
                f"{one['gpu_hours']:,.0f} GPU-hours"),
        *(("note", note) for note in one["notes"]),
    ]  # fmt: skip
    return [row for head, words in lines for row in wrapped(words, f"{head:<10}")]


def _twin(part: str, text: Callable[[View], list[str]]) -> Callable[[View], list[str]]:
    """A text of one part of the answer."""
    return lambda found: text(found[part])


# By the names of `--panel`; each takes the whole answer.
TEXTS: dict[str, Callable[[View], list[str]]] = {
    "numbers": _numbers_text,
    "sliders": _twin("sliders", sliders.text),
    "memory": _twin("memory", memory.text),
    "time": _twin("time", timing.text),
    "traffic": _twin("traffic", traffic.text),
    "map": _twin("map", gpu_map.text),
    "timeline": _twin("timeline", timeline.text),
}
