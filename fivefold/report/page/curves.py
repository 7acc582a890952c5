"""Memory over the length of sequences: of the layout that is looked at, and strategy by strategy.

A curve belongs to one layout, whose sequences get longer, with as many of them as before. For each
strategy that layout is the planner's at the length of the job with microbatches of one sequence,
the fastest that fits or else the leanest. Where no layout of a strategy can share the batch, a
larger batch is taken and said: what a rank holds does not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fivefold.core.estimate.candidate import wishes_of
from fivefold.core.estimate.grid import RECOMPUTE, of_plan
from fivefold.core.estimate.ledger import ledger
from fivefold.core.estimate.planner import Inquiry
from fivefold.core.estimate.search import Candidate, Setting, search
from fivefold.core.estimate.space import Question
from fivefold.core.estimate.sweep import STRATEGIES
from fivefold.core.plan import Plan, resolve
from fivefold.core.rules import context_rule, divisors, positions_rule
from fivefold.report.lines import table, wrapped
from fivefold.report.page.ranking import LAYOUT, Progress, View, inquiry_of, job_of
from fivefold.report.page.state import State

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


def _frame(state: State, setting: Setting) -> View:
    return {
        "seq": state.seq,
        "lengths": lengths(state.seq),
        "limit": setting.machine.memory,
        "usable": setting.capacity,
    }


def _curve(plan: Plan, setting: Setting, along: list[int]) -> View:
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


def _sizes(plan: Plan, setting: Setting, along: list[int]) -> dict[str, dict[int, float]]:
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


def view(params: Mapping[str, str], on_progress: Progress) -> View:
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


def _strategy(asked: Inquiry, name: str) -> View:
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


def _chosen(question: Question, setting: Setting, name: str) -> Candidate | None:
    """The fastest that fits, else the leanest; None where nothing is legal."""
    axis = _AXES.get(name)
    degrees = divisors(question.gpus)[1:] if axis else [1]
    fast: list[Candidate] = []
    lean: list[Candidate] = []
    for degree in degrees:
        named = {axis: degree} if axis else {}
        fixed = {"offload": "none", "microbatch_size": 1, **STRATEGIES[name], **named}
        found = search(replace(question, fixed=fixed), setting, 1)
        fast += found.best
        lean += [] if found.leanest is None else [found.leanest]
    if fast:
        return min(fast, key=lambda one: one.seconds)
    return min(lean, key=lambda one: one.bytes, default=None)


def text(found: View) -> list[str]:
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
