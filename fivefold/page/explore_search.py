"""The planner's best layouts of a job, and its front of memory against time.

Every entry is a state of Explore, and its numbers are those that Explore shows for that state:
nothing is offloaded, and stages are cut as the runtime cuts them by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fivefold.core import machine
from fivefold.core.errors import FivefoldError
from fivefold.core.plan import Plan, resolve
from fivefold.core.rules import context_rule, divisors, positions_rule
from fivefold.cost.grid import RECOMPUTE, of_plan
from fivefold.cost.memory import ledger
from fivefold.page import View
from fivefold.page.explore_state import HEADROOM, KERNELS, State, keys_of
from fivefold.planner import PlanAnswer, PlanRequest, answer, inquiry, wishes_of
from fivefold.planner.comparisons import STRATEGIES
from fivefold.planner.estimate import Estimate
from fivefold.planner.search import LayoutCandidate, SearchSetting, search
from fivefold.planner.space import SpaceQuestion
from fivefold.planner.why import takeaways
from fivefold.report import duration, gib, plan_text, table, wrapped

Progress = Callable[[float], None]
# Keys that a search depends on.
JOB = ("model", "config", "machine", "gpus", "seq", "batch", "precision", "also")
# Of `also`, what belongs to one layout: the planner decides it anew for each.
_OF_LAYOUT = ("sp", "order", "gather", "ep_nodes", "stage_layers")
LAYOUT = (
    "tp", "cp", "pp", "ep", "etp", "replicate", "zero", "schedule", "chunks", "context",
    "recompute", "microbatch_size",
)  # fmt: skip
_TOP = 10
_SEARCH = 0.8  # of the time; the rest is for why
_HEADS = ("", "layout", "ZeRO", "recompute", "GiB", "step", "tokens/s/GPU", "MFU")


def job_of(params: Mapping[str, str]) -> State:
    """The job alone: a state whose layout is open. All of `params` must be sound."""
    state = State.parse(params)
    job = {name: getattr(state, name) for name in JOB}
    words = (word for word in state.also.split() if word.partition("=")[0] not in _OF_LAYOUT)
    job["also"] = " ".join(words)
    return State(**job, tp=1, pp=1, schedule="1f1b", chunks=1)


def inquiry_of(job: State) -> PlanRequest:
    """What the planner is asked: every layout that a state can hold."""
    return inquiry(
        job.wishes(),
        machine.load(job.machine),
        {"offload": "none"},
        precision=job.precision,
        headroom=HEADROOM,
        kernels=KERNELS,
    )


def ranking_view(params: Mapping[str, str], on_progress: Progress) -> View:
    """The best ten and the front; where nothing fits, why."""
    job = job_of(params)
    asked = inquiry_of(job)
    machine_ = asked.setting.machine
    found: View = {
        "model": asked.shape.name,
        "machine": machine_.name,
        "gpus": job.gpus,
        "seq": job.seq,
        "batch": job.batch,
        "limit": machine_.memory,
        "usable": asked.setting.capacity,
        "layouts": [],
        "front": [],
        "because": [],
        "notes": list(asked.notes),
        "refused": "",
    }
    try:
        best = answer(asked, _TOP, lambda share: on_progress(_SEARCH * share))
    except FivefoldError as error:
        return found | {"refused": str(error)}
    found |= _ranked(job, best)
    on_progress(1.0)
    return found


def _ranked(job: State, found: PlanAnswer) -> View:
    states = [_state_of(job, one.plan) for one in found.plans]
    states.sort(key=lambda one: one.outlook().step)
    first = states[0].outlook()
    rival = states[1].outlook() if len(states) > 1 else None
    # The fastest of all is on the front, also where it takes too long to be played twice.
    front = dict.fromkeys([*(_state_of(job, one.plan) for one in found.front), states[0]])
    return {
        "candidates": found.candidates,
        "passed_over": found.passed_over,
        "layouts": [_entry(one, states[0]) for one in states],
        "front": [_entry(one, states[0]) for one in front],
        "because": plan_text.because(first, takeaways(first), rival),
        "notes": [*found.inquiry.notes, *_recut(found.plans[0], first)],
    }


def _state_of(job: State, plan: Plan) -> State:
    """The state that a click on this plan leads to."""
    return replace(job, **keys_of(plan))


def _entry(state: State, first: State) -> View:
    """One layout: what it takes, what it loses to the first, and the keys that a click sets."""
    one, texts = state.outlook(), state.params()
    layout, batch = one.plan.layout, one.plan.batch
    words = [str(layout), *([layout.context] if layout.cp > 1 else [])]
    return {
        "layout": " ".join(words),
        "zero": layout.zero,
        "schedule": f"{state.schedule}({layout.chunks})" if layout.pp > 1 else "–",
        "batch": f"{batch.microbatch_size} × {batch.microbatches}",
        "recompute": str(one.plan.recompute),
        "total": one.total,
        "verdict": one.verdict,
        "step": one.step,
        "tokens_per_s_per_gpu": one.tokens_per_s_per_gpu,
        "mfu": one.mfu,
        "bubble": one.bubble,
        "loses": "" if state == first else plan_text.loses(one, first.outlook()),
        "set": {name: texts.get(name, "") for name in (*LAYOUT, "also")},
    }


def _recut(best: Estimate, plain: Estimate) -> list[str]:
    """What a plan file can say and a state cannot: stages that are cut by hand."""
    if best.plan.stage_layers is None or best.step >= plain.step:
        return []
    cut = ",".join(map(str, best.plan.stage_layers))
    return [f'the first takes {duration(best.step)} with stage_layers = "{cut}" in its plan file']


def ranking_text(found: View) -> list[str]:
    """The same for a terminal."""
    place = f"{found['gpus']:,} GPU{'' if found['gpus'] == 1 else 's'} of {found['machine']}"
    head = (
        f"{found['model']} on {place}: the planner's best layouts for {found['batch']:,} sequences "
        f"of {found['seq']:,} tokens a step"
    )
    lines = wrapped(head)
    if found["refused"]:
        return [*lines, *wrapped(found["refused"])]
    rows = [_row(i + 1, one) for i, one in enumerate(found["layouts"])]
    lines += [
        f"{found['candidates']:,} layouts weighed and {found['passed_over']:,} passed over",
        "",
        *table([_HEADS, *rows], left=(1, 3)),
        "",
    ]
    for i, one in enumerate(found["layouts"]):
        how = [] if one["schedule"] == "–" else [one["schedule"]]
        how += [f"microbatches {one['batch']}", *([one["loses"]] if one["loses"] else [])]
        lines += _said(f"{i + 1}", [", ".join(how), *(found["because"] if i == 0 else [])])
    least = sorted(found["front"], key=lambda one: one["total"])
    lines += _said("front", [_on_front(one) for one in least])
    return [*lines, *_said("note", found["notes"])]


def _row(place: int, one: View) -> tuple[str, ...]:
    return (
        str(place),
        one["layout"],
        str(one["zero"]),
        one["recompute"],
        f"{one['total'] / 2**30:,.1f}",
        duration(one["step"]),
        f"{one['tokens_per_s_per_gpu']:,.0f}",
        f"{one['mfu']:.1%}",
    )


def _on_front(one: View) -> str:
    words = f"{one['layout']}, ZeRO-{one['zero']}, recompute {one['recompute']}"
    return f"{gib(one['total'])} and {duration(one['step'])}: {words}"


def _said(head: str, sentences: Sequence[str]) -> list[str]:
    """Sentences under a word in the margin, wrapped."""
    margins = [f"{'' if i else head:>5}  " for i in range(len(sentences))]
    pairs = zip(sentences, margins, strict=True)
    return [line for one, margin in pairs for line in wrapped(one, margin)]


# Memory over the length of sequences: of the layout that is looked at, and strategy by strategy.
#
# A curve belongs to one layout, whose sequences get longer, with as many of them as before. For
# each strategy that layout is the planner's at the length of the job with microbatches of one
# sequence, the fastest that fits or else the leanest. Where no layout of a strategy can share the
# batch, a larger batch is taken and said: what a rank holds does not depend on it.


LENGTHS = tuple(2048 << place for place in range(10))  # to one million tokens
# The axis that a strategy is named after must be there, or its line would be that of data alone.
_AXES = {"data+tensor": "tp", "data+pipeline": "pp", "data+context": "cp"}
_FAR = 10


def current(state: State) -> View:
    """The layout that is looked at, under each kind of recomputation. A few milliseconds."""
    plan, setting = state.plan(), state.setting()
    curve = _curve(plan, setting, lengths(state.seq))
    own = {"recompute": plan.recompute.kind, "words": words(curve)}
    return _frame(state, setting) | curve | own


def lengths(seq: int) -> list[int]:
    """The lengths that are drawn; that of the job is always one of them."""
    return sorted({*LENGTHS, seq})


def _frame(state: State, setting: SearchSetting) -> View:
    return {
        "seq": state.seq,
        "lengths": lengths(state.seq),
        "limit": setting.machine.memory,
        "usable": setting.capacity,
    }


def _curve(plan: Plan, setting: SearchSetting, along: list[int]) -> View:
    """Bytes of the fullest rank for each kind and length, None where a length is illegal, and the
    longest that fits, None where none does."""
    legal = [seq for seq in along if _is_legal(plan, seq)]
    sizes = _sizes(plan, setting, legal)
    held = {kind: [sizes[kind].get(seq) for seq in along] for kind in RECOMPUTE}
    longest = {
        kind: max((seq for seq in legal if sizes[kind][seq] <= setting.capacity), default=None)
        for kind in RECOMPUTE
    }
    return {"layout": str(plan.layout), "zero": plan.layout.zero, "bytes": held, "longest": longest}


def _sizes(plan: Plan, setting: SearchSetting, along: list[int]) -> dict[str, dict[int, float]]:
    """Bytes by kind and length. Long sequences move layers, for attention costs more of them."""
    by_cut: dict[tuple[range, ...], list[int]] = {}
    for seq in along:
        longer = replace(plan, batch=replace(plan.batch, seq=seq))
        by_cut.setdefault(tuple(longer.stages), []).append(seq)
    grid = replace(of_plan(plan), recompute=np.arange(float(len(RECOMPUTE))))
    found: dict[str, dict[int, float]] = {kind: {} for kind in RECOMPUTE}
    for spans, lengths_ in by_cut.items():
        # Books are arithmetic, so that one call serves all lengths, a row each.
        rows: Any = np.array(lengths_, float)[:, None]
        asked = (plan.shape, setting.machine, setting.stack, grid, rows, *setting.how)
        total = ledger(*asked, spans=spans).total
        sizes = np.broadcast_to(total, (len(lengths_), len(RECOMPUTE)))
        for kind, column in zip(RECOMPUTE, sizes.T, strict=True):
            found[kind] |= dict(zip(lengths_, map(float, column), strict=True))
    return found


def _is_legal(plan: Plan, seq: int) -> bool:
    rules = (positions_rule, context_rule)
    layout, shape = plan.layout, plan.shape
    return not any(reason for rule in rules for reason in rule(layout, shape, {"seq": seq}))


def curves_view(params: Mapping[str, str], on_progress: Progress) -> View:
    """A curve for each strategy; where `params` say a layout, its own as well."""
    job = job_of(params)
    asked = inquiry_of(job)
    found: list[View] = []
    for number, name in enumerate(STRATEGIES):
        on_progress(number / len(STRATEGIES))
        one = {"strategy": name, **_strategy(asked, name)}
        found.append(one | {"words": words(one)})
    on_progress(1.0)
    state = State.parse(params)
    is_looked_at = bool(set(params) & set(LAYOUT)) and not state.problems()
    return {
        **_frame(job, asked.setting),
        "gpus": job.gpus,
        "batch": job.batch,
        "strategies": found,
        "current": current(state) if is_looked_at else None,
    }


def _strategy(asked: PlanRequest, name: str) -> View:
    """The curve of the layout that stands for a strategy, or why there is none."""
    question = asked.question
    enough = -(-question.batch // question.gpus) * question.gpus
    for batch in dict.fromkeys((question.batch, enough)):
        one = _chosen(replace(question, batch=batch), asked.setting, name)
        if one is not None:
            plan = resolve(wishes_of(one.grid, asked.wishes))
            return {
                "refused": "",
                "larger_batch": batch if batch != question.batch else None,
                "recompute": plan.recompute.kind,
                **_curve(plan, asked.setting, lengths(question.seq)),
            }
    return {"refused": f"no legal layout on {question.place} at {question.seq:,} tokens"}


def _chosen(question: SpaceQuestion, setting: SearchSetting, name: str) -> LayoutCandidate | None:
    """The fastest that fits, else the leanest; None where nothing is legal."""
    axis = _AXES.get(name)
    degrees = divisors(question.gpus)[1:] if axis else [1]
    fast: list[LayoutCandidate] = []
    lean: list[LayoutCandidate] = []
    for degree in degrees:
        named = {axis: degree} if axis else {}
        fixed = {"offload": "none", "microbatch_size": 1, **STRATEGIES[name], **named}
        found = search(replace(question, fixed=fixed), setting, 1)
        fast += found.best
        lean += [] if found.leanest is None else [found.leanest]
    if fast:
        return min(fast, key=lambda one: one.seconds)
    return min(lean, key=lambda one: one.bytes, default=None)


def curves_text(found: View) -> list[str]:
    """The same for a terminal: GiB of the fullest rank, marked where they do not fit."""
    own = found["current"]
    named = [("this layout", own)] if own else []
    named += [(one["strategy"], one) for one in found["strategies"]]
    rows: list[tuple[str, ...]] = [("", "recompute", *map(_short, found["lengths"]))]
    for name, one in named:
        if not one.get("refused"):
            for kind, sizes in one["bytes"].items():
                cells = (_cell(size, found["usable"]) for size in sizes)
                rows.append((name, kind, *cells))
    limit, usable = (f"{found[each] / 2**30:,.1f}" for each in ("limit", "usable"))
    lines = [
        f"GiB of the fullest rank by sequence length; {usable} of {limit} may be used",
        f"(×: more than that, ≫: more than {_FAR} times that)",
        *table(rows, left=(0, 1)),
        "",
    ]
    for name, one in named:
        lines += wrapped(words(one), f"{name:<15}")
    return lines


def _cell(size: float | None, usable: float) -> str:
    if size is None:
        return "– "
    if size > _FAR * usable:
        return "≫ "
    return f"{size / 2**30:,.0f}{'×' if size > usable else ' '}"


def words(one: View) -> str:
    """A curve in words: its layout, and how long sequences may be."""
    if one.get("refused"):
        return one["refused"]
    held = [f"{_short(seq)} with {kind}" for kind, seq in one["longest"].items() if seq]
    fits = f"longest that fits: {', '.join(held)}" if held else "fits at no length drawn"
    batch = one.get("larger_batch")
    needs = f" needs a batch of {batch:,} sequences," if batch else ""
    return f"{one['layout']} ZeRO-{one['zero']},{needs} {fits}"


def _short(length: int) -> str:
    """A length in binary thousands.

    >>> _short(8192), _short(1 << 20), _short(3000)
    ('8k', '1024k', '3,000')
    """
    return f"{length >> 10}k" if length % 1024 == 0 else f"{length:,}"
