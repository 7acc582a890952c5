"""The panels of Explore that search: the planner's best layouts, and memory by sequence length.

A search takes seconds, and depends on the keys of `state.JOB` only. Every layout in a ranking
is a state of Explore, with the numbers that Explore shows for this state: without offloading, and
with the stages that the runtime makes by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fivefold.core import counted
from fivefold.core.layout import context_rule, divisors, positions_rule
from fivefold.core.plan import Plan, resolve
from fivefold.cost import RECOMPUTE, grid_of_plan
from fivefold.cost.memory import peak_memory
from fivefold.planner import (
    STRATEGIES,
    Estimate,
    EstimateSetting,
    LayoutCandidate,
    NothingFits,
    PlanRequest,
    PlanResult,
    SearchSpace,
    best_plans,
    compare_neighbours,
    options_of,
    search_layouts,
    speed_rank,
)
from fivefold.render import duration, gib, loses, reasons_text, table, wrapped
from fivefold_page import Params, Progress, View
from fivefold_page.explore.state import (
    LAYOUT,
    State,
    chosen_state,
    job_params,
    layout_params,
    nothing_fits,
    request_of,
    requested_state,
)

_TOP = 10
_SEARCH_SHARE = 0.8  # of the time; the rest explains the best layout
_HEADS = ("", "layout", "ZeRO", "recompute", "GiB", "step", "tokens/s/GPU", "MFU")


def ranking_view(params: Params, on_progress: Progress) -> View:
    """The ten best layouts and the front of memory against time; if nothing fits, why, the leanest
    layout, and jobs that have one. `job` has the keys of the job that was searched."""
    job = requested_state(params)
    cut = "seq" not in job.derived and State.parse(params).seq > job.seq
    request = request_of(job)
    machine_ = request.setting.machine
    view: View = {
        "job": job_params(job),
        "model": request.shape.name,
        "machine": machine_.name,
        "gpus": job.gpus,
        "seq": job.seq,
        "batch": job.batch,
        "limit": machine_.memory,
        "usable": request.setting.capacity,
        "layouts": [],
        "front": [],
        "because": [],
        "notes": [*request.notes, *([f"sequences are cut to {job.seq:,} tokens"] if cut else [])],
        "refused": "",
        "lean": None,
        "ways": [],
    }
    try:
        best = best_plans(request, _TOP, lambda share: on_progress(_SEARCH_SHARE * share))
    except NothingFits as error:
        return view | {"refused": str(error)} | nothing_fits(job, request, error)
    view |= _ranked(job, best, view["notes"])
    on_progress(1.0)
    return view


def _ranked(job: State, result: PlanResult, notes: list[str]) -> View:
    state_of = partial(chosen_state, job)  # that a click on a plan opens
    choice, *other_states = (state_of(candidate) for candidate in result.plans)
    states = [choice, *sorted(other_states, key=lambda state: speed_rank(state.estimate()))]
    first = choice.estimate()
    rival = None if result.rival is None else state_of(result.rival).estimate()
    # The fastest is on the front even if it took too long to be simulated twice.
    fastest = min(states, key=lambda state: state.estimate().step)
    front = dict.fromkeys([*(state_of(candidate) for candidate in result.front), fastest])
    return {
        "candidates": result.candidates,
        "passed_over": result.passed_over,
        "layouts": [
            _entry(layout_state, choice, fastest.estimate().step) for layout_state in states
        ],
        "front": [_entry(layout_state, choice, fastest.estimate().step) for layout_state in front],
        "because": reasons_text(first, compare_neighbours(first), rival, result.simpler),
        "notes": [*notes, *_stage_layers_note(result.plans[0], first)],
    }


def _entry(state: State, first: State, fastest: float) -> View:
    """One layout: its cost, what it loses to the first, and the keys that a click sets."""
    estimate = state.estimate()
    layout, batch = estimate.plan.layout, estimate.plan.batch
    return {
        "layout": f"{layout} {layout.context}" if layout.cp > 1 else str(layout),
        "zero": layout.zero,
        "schedule": f"{state.schedule}({layout.chunks})" if layout.pp > 1 else "–",
        "batch": f"{batch.microbatch_size} × {batch.microbatches}",
        "recompute": str(estimate.plan.recompute),
        "total": estimate.total,
        "verdict": estimate.verdict,
        "step": estimate.step,
        "tokens_per_s_per_gpu": estimate.tokens_per_s_per_gpu,
        "mfu": estimate.mfu,
        "bubble": estimate.bubble,
        "loses": "" if state == first else loses(estimate, first.estimate(), fastest),
        "set": layout_params(state),
    }


def _stage_layers_note(best: Estimate, plain: Estimate) -> list[str]:
    """A note if other stage boundaries are faster: a plan file can set them, a state cannot."""
    if best.plan.stage_layers is None or best.step >= plain.step:
        return []
    layers = ",".join(map(str, best.plan.stage_layers))
    return [
        f'the first takes {duration(best.step)} with stage_layers = "{layers}" in its plan file'
    ]


def ranking_text(view: View) -> list[str]:
    """The same for a terminal."""
    cluster = f"{view['gpus']:,} GPU{'' if view['gpus'] == 1 else 's'} of {view['machine']}"
    head = (
        f"{view['model']} on {cluster}: the planner's best layouts for "
        f"{counted(view['batch'], 'sequence')} of {view['seq']:,} tokens a step"
    )
    lines = wrapped(head)
    if view["refused"]:
        near = " · ".join(option["label"] for option in view["ways"])
        return [*lines, *wrapped(view["refused"]), *wrapped(near, "near: ")]
    rows = [_row(number, entry) for number, entry in enumerate(view["layouts"], 1)]
    lines += [
        f"{view['candidates']:,} layouts weighed and {view['passed_over']:,} passed over",
        "",
        *table([_HEADS, *rows], left=(1, 3)),
        "",
    ]
    for i, layout in enumerate(view["layouts"]):
        details = [] if layout["schedule"] == "–" else [layout["schedule"]]
        details += [
            f"microbatches {layout['batch']}",
            *([layout["loses"]] if layout["loses"] else []),
        ]
        lines += _in_margin(f"{i + 1}", [", ".join(details), *(view["because"] if i == 0 else [])])
    least = sorted(view["front"], key=lambda point: point["total"])
    lines += _in_margin("front", [_on_front(point) for point in least])
    return [*lines, *_in_margin("note", view["notes"])]


def _row(number: int, entry: View) -> tuple[str, ...]:
    return (
        str(number),
        entry["layout"],
        str(entry["zero"]),
        entry["recompute"],
        f"{entry['total'] / 2**30:,.1f}",
        duration(entry["step"]),
        f"{entry['tokens_per_s_per_gpu']:,.0f}",
        f"{entry['mfu']:.1%}",
    )


def _on_front(entry: View) -> str:
    text = f"{entry['layout']}, ZeRO-{entry['zero']}, recompute {entry['recompute']}"
    return f"{gib(entry['total'])} and {duration(entry['step'])}: {text}"


def _in_margin(head: str, sentences: Sequence[str]) -> list[str]:
    """Wrapped sentences, with a word in the margin of the first."""
    margins = [f"{'' if i else head:>5}  " for i in range(len(sentences))]
    pairs = zip(sentences, margins, strict=True)
    return [line for sentence, margin in pairs for line in wrapped(sentence, margin)]


# Memory by sequence length: of the shown layout, and of one layout for each strategy.
#
# A curve belongs to one layout and one number of sequences; only their length grows. The layout of
# a strategy is the planner's choice at the length of the job with microbatches of one sequence:
# the fastest that fits, else the one with the least memory. If the batch is too small for every
# layout of a strategy, a larger one is taken and named: the memory of a rank does not depend on it.


LENGTHS = tuple(2048 << doublings for doublings in range(10))  # to one million tokens
# Each strategy uses the axis of its name: without it, its curve would be that of data alone.
_AXES = {"data+tensor": "tp", "data+pipeline": "pp", "data+context": "cp"}
_FAR = 10  # times the usable memory


def current(state: State) -> View:
    """The shown layout with each kind of recomputation; takes a few milliseconds. `now` is the
    memory of its plan, as in every panel; the curves are closed forms, as in a search, which know
    less of its schedule."""
    plan, setting = state.plan(), state.setting()
    curve = _curve(plan, setting, lengths(state.seq))
    own = {
        "recompute": str(plan.recompute.usual),
        "words": curve_words(curve),
        "now": state.estimate().total,
    }
    return _axes(state, setting) | curve | own


def lengths(seq: int) -> list[int]:
    """The lengths of a curve; that of the job is always one of them."""
    return sorted({*LENGTHS, seq})


def _axes(state: State, setting: EstimateSetting) -> View:
    return {
        "seq": state.seq,
        "lengths": lengths(state.seq),
        "limit": setting.machine.memory,
        "usable": setting.capacity,
    }


def _curve(plan: Plan, setting: EstimateSetting, lengths: list[int]) -> View:
    """Bytes of the fullest rank by kind of recomputation and length, None if the length is illegal,
    and the longest length that fits, None if none does."""
    legal = [seq for seq in lengths if _is_legal(plan, seq)]
    sizes = _sizes(plan, setting, legal)
    by_kind = {kind: [sizes[kind].get(seq) for seq in lengths] for kind in RECOMPUTE}
    longest = {
        kind: max((seq for seq in legal if sizes[kind][seq] <= setting.capacity), default=None)
        for kind in RECOMPUTE
    }
    layout = plan.layout
    return {"layout": str(layout), "zero": layout.zero, "bytes": by_kind, "longest": longest}


def _sizes(plan: Plan, setting: EstimateSetting, lengths: list[int]) -> dict[str, dict[int, float]]:
    """Bytes by kind and length.

    Stage boundaries depend on the length: attention takes a larger share of long sequences.
    """
    by_stages: dict[tuple[range, ...], list[int]] = {}
    for seq in lengths:
        longer = replace(plan, batch=replace(plan.batch, seq=seq))
        by_stages.setdefault(tuple(longer.stages), []).append(seq)
    grid = replace(grid_of_plan(plan), recompute=np.arange(float(len(RECOMPUTE))))
    sizes_by_kind: dict[str, dict[int, float]] = {kind: {} for kind in RECOMPUTE}
    for spans, group in by_stages.items():
        # The memory is computed with arrays: one call for all lengths, one row per length.
        rows: Any = np.array(group, float)[:, None]
        job = setting.with_keys(plan.options).arguments(plan.shape, grid, rows)
        total = peak_memory(*job, spans=spans).total
        sizes = np.broadcast_to(total, (len(group), len(RECOMPUTE)))
        for kind, column in zip(RECOMPUTE, sizes.T, strict=True):
            sizes_by_kind[kind] |= dict(zip(group, map(float, column), strict=True))
    return sizes_by_kind


def _is_legal(plan: Plan, seq: int) -> bool:
    rules = (positions_rule, context_rule)
    layout, shape = plan.layout, plan.shape
    return not any(reason for rule in rules for reason in rule(layout, shape, {"seq": seq}))


def curves_view(params: Params, on_progress: Progress) -> View:
    """A curve for each strategy, and that of the layout in `params`, if there is one."""
    job = requested_state(params)
    request = request_of(job)
    strategies: list[View] = []
    for number, name in enumerate(STRATEGIES):
        on_progress(number / len(STRATEGIES))
        strategy = {"strategy": name, **_strategy(request, name)}
        strategies.append(strategy | {"words": curve_words(strategy)})
    on_progress(1.0)
    state = State.parse(params)
    has_layout = bool(set(params) & set(LAYOUT)) and not state.problems()
    return {
        **_axes(job, request.setting),
        "gpus": job.gpus,
        "batch": job.batch,
        "strategies": strategies,
        "current": current(state) if has_layout else None,
    }


def _strategy(request: PlanRequest, name: str) -> View:
    """The curve of the layout that represents a strategy, or why there is none."""
    question = request.space
    one_per_gpu = -(-question.batch // question.gpus) * question.gpus
    for batch in dict.fromkeys((question.batch, one_per_gpu)):
        candidate = _chosen(replace(question, batch=batch), request.setting, name)
        if candidate is not None:
            plan = resolve(options_of(candidate.grid, request.options))
            return {
                "refused": "",
                "larger_batch": batch if batch != question.batch else None,
                "recompute": str(plan.recompute.usual),
                **_curve(plan, request.setting, lengths(question.seq)),
            }
    return {"refused": f"no legal layout on {question.gpus_text} at {question.seq:,} tokens"}


def _chosen(question: SearchSpace, setting: EstimateSetting, name: str) -> LayoutCandidate | None:
    """The fastest layout that fits, else the one with the least memory; None if none is legal."""
    axis = _AXES.get(name)
    degrees = divisors(question.gpus)[1:] if axis else [1]
    fast: list[LayoutCandidate] = []
    lean: list[LayoutCandidate] = []
    for degree in degrees:
        named = {axis: degree} if axis else {}
        fixed = {"offload": "none", "microbatch_size": 1, **STRATEGIES[name], **named}
        result = search_layouts(replace(question, fixed=fixed), setting, 1)
        fast += result.best
        lean += [] if result.leanest is None else [result.leanest]
    if fast:
        return min(fast, key=lambda candidate: candidate.seconds)
    return min(lean, key=lambda candidate: candidate.bytes, default=None)


def curves_text(view: View) -> list[str]:
    """The same for a terminal: GiB of the fullest rank, with a mark if they do not fit."""
    own = view["current"]
    named = [("this layout", own)] if own else []
    named += [(entry["strategy"], entry) for entry in view["strategies"]]
    rows: list[tuple[str, ...]] = [("", "recompute", *map(_short, view["lengths"]))]
    for name, strategy in named:
        if not strategy.get("refused"):
            for kind, sizes in strategy["bytes"].items():
                cells = (_cell(size, view["usable"]) for size in sizes)
                rows.append((name, kind, *cells))
    limit, usable = (f"{view[key] / 2**30:,.1f}" for key in ("limit", "usable"))
    lines = [
        f"GiB of the fullest rank by sequence length; {usable} of {limit} may be used",
        f"(×: more than that, ≫: more than {_FAR} times that)",
        *table(rows, left=(0, 1)),
        "",
    ]
    for name, strategy in named:
        lines += wrapped(curve_words(strategy), f"{name:<15}")
    return lines


def _cell(size: float | None, usable: float) -> str:
    if size is None:
        return "– "
    if size > _FAR * usable:
        return "≫ "
    return f"{size / 2**30:,.0f}{'×' if size > usable else ' '}"


def curve_words(strategy: View) -> str:
    """A curve in words: its layout, and the longest sequences that fit."""
    if strategy.get("refused"):
        return strategy["refused"]
    longest = [f"{_short(seq)} with {kind}" for kind, seq in strategy["longest"].items() if seq]
    fits = f"longest that fits: {', '.join(longest)}" if longest else "fits at no length drawn"
    batch = strategy.get("larger_batch")
    needs = f" needs a batch of {batch:,} sequences," if batch else ""
    return f"{strategy['layout']} ZeRO-{strategy['zero']},{needs} {fits}"


def _short(length: int) -> str:
    """A length in binary thousands.

    >>> _short(8192), _short(1 << 20), _short(3000)
    ('8k', '1024k', '3,000')
    """
    return f"{length >> 10}k" if length % 1024 == 0 else f"{length:,}"
