"""The Explore tab: what its inputs can be set to, and everything about the job that they describe.

    view(params) -> {"state": canonical params, "sliders": {axis: slider},
                     "choices": {key: options}, "problem": None or {"reasons", "nearest"},
                     "config": pasted or None, a part for each panel, "plan_toml": the plan file,
                     "command": that plans the same in a terminal}

An illegal job has a `problem` and no parts; a part that fails is `{"failed": why}`.
`pictures(params)` has the parts that take longest, so that a slider does not wait for them.
`PANELS` registers all panels.

Every value of every input is checked by the rules that resolve a plan. A value is
`{"value", "legal", "why", "set"}`; `set` has all keys of the state that change with it, because the
degrees depend on one another: tp, cp and pp take GPUs from dp or return them to dp; dp takes GPUs
from pp, else from cp, else from tp. The browser only applies `set`.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from fivefold.core import PRECISIONS, FivefoldError, IllegalLayout
from fivefold.core import hardware as machine
from fivefold.core.layout import Layout, divisors
from fivefold.core.model import presets as models
from fivefold.core.plan import FailureRates, Plan
from fivefold.core.schedule import family
from fivefold.cost import RECOMPUTE
from fivefold.planner import Estimate, scale_points, simulate_failures, usual_failures
from fivefold.render import LOST_WORDS, forecast_lines, percent, rough_duration, wrapped
from fivefold_page import Params, Progress, View, timeline
from fivefold_page.explore import panels as explore_panels
from fivefold_page.explore import search as explore_search
from fivefold_page.explore.state import CONTEXTS, SCHEDULES, State, command, degrees_of, typed

# Explore's panel of failures: a month of the job with them, and other numbers of GPUs.
#
# {"headline", "missing": None or why there is nothing, "goodput", "band", "lost": {cause: share},
# "words": {cause: sentence}, "designs": [{"name", "shares"}], "scales": [GPUs], "gpus",
# "lines": the answer of `simulate`}

_DAYS, _RUNS = 30.0, 40
_LEAST, _MOST = 1024, 131_072


def failures_view(estimate: Estimate) -> View:
    """A month with failures, if the machine has a rate of them."""
    machine = estimate.setting.machine
    job = usual_failures(estimate, None)
    if job is None or machine.gpu_mtbf_hours is None:
        why = (
            f"No rate of failures is known for {machine.name}: fivefold simulate takes one with "
            "--mtbf-gpu."
        )
        return {"headline": why, "missing": why, "lost": {}, "designs": [], "lines": [why]}
    run = simulate_failures(job, _DAYS, _RUNS, seed=0)
    scales = [_LEAST << power for power in range(8) if _LEAST << power <= _MOST]
    points = scale_points(estimate, FailureRates(machine.gpu_mtbf_hours), scales)
    by_name = groupby(
        sorted(points, key=lambda point: point.design), key=lambda point: point.design
    )
    shares = {name: [point.goodput for point in ones] for name, ones in by_name}
    low, high = run.goodput_band
    return {
        "headline": f"{percent(run.goodput)} of the time in steps that count, {percent(low)} to "
        f"{percent(high)} in 90% of the months; one failure in {rough_duration(1 / job.rate)}, "
        f"{rough_duration(job.recovery)} to recover",
        "missing": None,
        "goodput": run.goodput,
        "band": [low, high],
        "lost": {
            name: seconds / (_DAYS * 86_400) for name, seconds in run.lost.items() if seconds > 0
        },
        "words": LOST_WORDS,
        "designs": [
            {"name": name, "shares": shares[name]}
            for name in dict.fromkeys(point.design for point in points)
        ],
        "scales": scales,
        "gpus": job.domain.gpus,
        "lines": forecast_lines(estimate.plan, run),
    }


def failures_text(view: View) -> list[str]:
    """The same for a terminal."""
    lines = list(view["lines"])
    for design in view["designs"]:
        shares = (
            f"{gpus // 1024}k {percent(share)}"
            for gpus, share in zip(view["scales"], design["shares"], strict=True)
        )
        lines += wrapped(f"{design['name']}: {', '.join(shares)}", "at scale  ")
    return lines


AXES = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
_GIVE_TO_DP = ("pp", "cp", "tp")  # the axes that dp takes GPUs from, in this order
_MOST_CHUNKS = 16  # offered; the address can say more
_MOST_SEQUENCES = 64  # in a microbatch, offered


def sliders_view(state: State) -> View:
    """What the five sliders can be set to."""
    return {
        axis: {
            "label": label,
            "value": getattr(state, axis),
            "values": [_value(state, value, states) for value, states in _moves(state, axis)],
        }
        for axis, label in AXES.items()
    }


def choices(state: State) -> View:
    """What the other inputs can be set to; numbers that can be typed freely are left out."""
    options = {
        "model": [_free(name, model=name, config="") for name in models.presets()],
        "machine": [_free(name, machine=name) for name in machine.presets()],
        "schedule": _options(state, "schedule", _schedules(state)),
    }
    shape, local_batch = state.shape(), max(1, state.batch // state.dp)
    sizes = [size for size in divisors(local_batch) if size <= _MOST_SEQUENCES]
    values: dict[str, Iterable[Any]] = {
        "zero": range(4),
        "chunks": range(1, 1 + min(_MOST_CHUNKS, max(1, shape.layers // state.pp))),
        "context": CONTEXTS,
        "recompute": RECOMPUTE,
        "precision": tuple(PRECISIONS),
        "microbatch_size": sizes,
        "replicate": divisors(state.dp),
        "etp": [1] if shape.moe is None else divisors(math.gcd(shape.moe.ffn, state.gpus)),
    }
    for key, key_values in values.items():
        options[key] = _options(
            state, key, [state.with_keys(**{key: value}) for value in key_values]
        )
    return options


def _free(value: str, **changes: str) -> View:
    """A value that is always legal."""
    return {"value": value, "legal": True, "why": "", "set": changes}


def _schedules(state: State) -> Iterator[State]:
    for name in SCHEDULES:
        yield state.with_keys(schedule=name, chunks=family(name).chunks_on(state.pp, None))


def _options(state: State, key: str, other_states: Iterable[State]) -> list[View]:
    """The options of a select; the current value, which changes nothing, is always one of them."""
    current = getattr(state, key)
    states = {getattr(other, key): other for other in other_states} | {current: state}
    return [_value(state, value, [other]) for value, other in states.items()]


def _moves(state: State, axis: str) -> Iterator[tuple[int, list[State]]]:
    """Every value of a slider with the states that it can lead to, the preferred one first."""
    if axis == "ep":
        moe = state.shape().moe
        for value in divisors(moe.experts) if moe else [1]:
            yield value, [state.with_keys(ep=value)]
        return
    for value in divisors(state.gpus):
        if value == getattr(state, axis):
            yield value, [state]
        elif axis == "dp":
            yield value, list(_with_dp(state, value))
        else:
            yield value, [settled(state, {axis: value})]


def _with_dp(state: State, dp: int) -> Iterator[State]:
    """States with so many data ranks: in each, one other axis makes room."""
    for axis in _GIVE_TO_DP:
        product = math.prod(getattr(state, other) for other in _GIVE_TO_DP if other != axis)
        degree, remainder = divmod(state.gpus, dp * product)
        if degree and not remainder:
            yield settled(state, {axis: degree})


def settled(state: State, degrees: dict[str, int]) -> State:
    """A state with other degrees; chunks and replicas that no longer fit them are adjusted."""
    other = state.with_keys(**degrees)
    if (state.pp == 1) != (other.pp == 1):
        other = other.with_keys(chunks=other.family.chunks_on(other.pp, None))
    replicate = math.gcd(other.replicate, other.dp)
    return other if replicate == other.replicate else other.with_keys(replicate=replicate)


def _value(state: State, value: int | str, states: list[State]) -> View:
    """One value: how the first legal one of `states` differs, or why none is legal."""
    why = (
        f"dp={value} leaves {state.gpus // int(value)} GPUs to tp {state.tp} · cp {state.cp} · "
        f"pp {state.pp}, and none of the three alone can shrink to that: lower another first"
        if not states
        else ""
    )
    for other in states:
        problems = other.problems()
        if not problems:
            return {"value": value, "legal": True, "why": "", "set": changed(state, other)}
        why = why or problems[0]
    return {"value": value, "legal": False, "why": why, "set": {}}


def changed(state: State, other: State) -> dict[str, str]:
    """The keys in which `other` differs, with its values as texts."""
    values = {name: str(value) for name, value in vars(other).items() if value != vars(state)[name]}
    return typed(state, values)


def sliders_text(sliders: View) -> list[str]:
    """The sliders for a terminal: the legal values, and why the others are illegal."""
    lines: list[str] = []
    for axis, slider in sliders.items():
        marked = [
            f"[{option['value']}]" if option["value"] == slider["value"] else str(option["value"])
            for option in slider["values"]
            if option["legal"] or option["value"] == slider["value"]
        ]
        lines += wrapped(" ".join(marked), f"{axis:<4}{slider['label']:<10}")
        for reason, values in groupby(slider["values"], key=_reason):
            if reason:
                lines += wrapped(_illegal(axis, list(values)), "    not       ")
    return lines


def _reason(option: View) -> str:
    """Why a value is illegal, without the numbers that differ from value to value."""
    return "" if option["legal"] else re.sub(r"[0-9]+", "", option["why"])


def _illegal(axis: str, values: list[View]) -> str:
    """Values that the same rule forbids, with the reason for the first."""
    first, last = values[0]["value"], values[-1]["value"]
    return f"{axis}={first}{f' to {last}' if last != first else ''}: {values[0]['why']}"


# The answers.


CONFIG_FILE = "config.json"
_SAVE = f"# The model is the pasted config: save it as {CONFIG_FILE} beside this file.\n"


def view(params: Params) -> View:
    """Everything about the job of these params; an illegal job has reasons and legal neighbours."""
    state = State.parse(params)
    result: View = {
        "state": state.params(),
        "sliders": sliders_view(state),
        "choices": choices(state),
        "problem": None,
        "config": state.config or None,
    }
    try:
        state.estimate()  # a job that cannot be estimated has no parts at all
        parts = _parts(state, later=False)
        plan_toml = _plan_toml(state, state.plan())
        return result | parts | {"plan_toml": plan_toml, "command": command(state, CONFIG_FILE)}
    except IllegalLayout as error:
        near = _nearest(state, error)
        return result | {"problem": {"reasons": error.reasons, "nearest": near}}
    except FivefoldError as error:
        return result | {"problem": {"reasons": [str(error)], "nearest": []}}


def pictures(params: Params) -> View:
    """The parts that take longest."""
    state = State.parse(params)
    state.estimate()  # raises for a job that has no parts
    return _parts(state, later=True)


def _parts(state: State, *, later: bool) -> View:
    return {
        name: _part(panel.view, state)
        for name, panel in PANELS.items()
        if panel.view is not None and panel.later == later
    }


def _part(view: Callable[[State], View], state: State) -> View:
    """The part of a panel; if it fails, `failed` says so, and the other panels are drawn."""
    try:
        return view(state)
    except FivefoldError as error:
        return {"failed": str(error)}
    except Exception as error:  # a defect in one panel must not take the page with it
        traceback.print_exc()
        return {"failed": f"this panel failed ({type(error).__name__}: {error}): please report it"}


def _nearest(state: State, error: IllegalLayout) -> list[View]:
    """Legal jobs near an illegal one, each with the keys to set.

    No layout helps a sequence that is longer than the learned positions: it is shortened first.
    """
    shape = state.shape()
    if shape.positions != "learned" or state.seq <= shape.max_seq:
        return [_with_layout(state, state, label) for label in error.nearest]
    short = replace(state, seq=shape.max_seq)
    try:
        short.plan()
    except IllegalLayout as refusal:
        return [_with_layout(state, short, label) for label in refusal.nearest]
    return [{"label": f"seq={short.seq}", "set": changed(state, short)}]


def _with_layout(state: State, base: State, label: str) -> View:
    """`base` with the layout of a label, as changes of `state`."""
    layout = Layout.parse(label.partition("(")[0])
    other = settled(base, {"gpus": layout.world, **degrees_of(layout)})
    text = label if base.seq == state.seq else f"seq={base.seq} {label}"
    return {"label": text, "set": changed(state, other)}


def _plan_toml(state: State, plan: Plan) -> str:
    """The plan as a file; a pasted config is saved next to it."""
    if not state.config:
        return plan.to_toml()
    with_file = replace(plan, options=replace(plan.options, model=CONFIG_FILE))
    return _SAVE + with_file.to_toml()


# The panels.


def _timeline(state: State) -> View:
    estimate = state.estimate()
    return timeline.view(
        estimate.timeline, seconds=estimate.setting.stack.factor, bubble=estimate.bubble
    )


class ExplorePanel(NamedTuple):
    """One panel, drawn by `create` of `static/<drawing>.js`, which is the panel's name if empty.

    `view` makes its part of `view(params)`, or of `pictures(params)` if `later`. A `search` is a
    question of its own, which takes seconds. `text` prints the answer of the search, if there is
    one, else the part. A panel without a title is one of the inputs: it is only printed.
    """

    title: str
    hint: str
    text: Callable[[View], list[str]]
    view: Callable[[State], View] | None = None
    later: bool = False
    search: Callable[[Params, Progress], View] | None = None
    drawing: str = ""


def _of_estimate(view: Callable[[Estimate], View]) -> Callable[[State], View]:
    return lambda state: view(state.estimate())


def _of_plan(view: Callable[[Plan], View]) -> Callable[[State], View]:
    return lambda state: view(state.plan())


# By the names of `--panel`, in the order of the page.
PANELS: dict[str, ExplorePanel] = {
    "numbers": ExplorePanel(
        "Does it fit, and how fast is it",
        "",
        explore_panels.numbers_text,
        explore_panels.numbers_view,
    ),
    "sliders": ExplorePanel("", "", sliders_text),
    "memory": ExplorePanel(
        "Memory",
        "Bytes by category against the GPU's limit: the fullest rank, and every stage.",
        explore_panels.memory_text,
        explore_panels.memory_view,
    ),
    "time": ExplorePanel(
        "One step",
        "What the busiest rank spends the step on; traffic that compute hides is not in it.",
        explore_panels.timing_text,
        _of_estimate(explore_panels.timing_view),
    ),
    "map": ExplorePanel(
        "GPU map",
        "Every rank on its node. Point at one, or use the arrow keys, to see its groups.",
        explore_panels.map_text,
        _of_plan(explore_panels.map_view),
        drawing="gpu_map",
    ),
    "timeline": ExplorePanel(
        "Pipeline",
        "Every action of every pipeline rank; idle slots say what they wait for.",
        timeline.text,
        _timeline,
        later=True,
    ),
    "traffic": ExplorePanel(
        "Traffic",
        "What rank 0 sends in a step, by axis, and the slowest link that the axis crosses.",
        explore_panels.traffic_text,
        _of_plan(explore_panels.traffic_view),
        later=True,
    ),
    "failures": ExplorePanel(
        "A month with failures",
        "What of the time does not count with checkpoints on disk, and what faster ways to recover "
        "are worth with more GPUs.",
        failures_text,
        _of_estimate(failures_view),
        later=True,
    ),
    "ranking": ExplorePanel(
        "The planner's best",
        "Ten layouts of the same job, and the front of memory and time. Choose one to load it.",
        explore_search.ranking_text,
        search=explore_search.ranking_view,
    ),
    "curves": ExplorePanel(
        "Memory over sequence length",
        "The present layout and other strategies, with and without recomputation. The star is the "
        "memory of the plan; curves are the search's closed forms, which lie somewhat above it. "
        "Where tp splits sequences, selective may lie above none: it keeps whole what collectives "
        "brought.",
        explore_search.curves_text,
        explore_search.current,
        later=True,
        search=explore_search.curves_view,
    ),
}


def searches() -> dict[str, Callable[[Params, Progress], View]]:
    """The questions that take seconds: asked apart, with a progress bar."""
    pairs = ((name, panel.search) for name, panel in PANELS.items())
    return {name: search for name, search in pairs if search is not None}
