"""The planner's best layouts of a job, and its front of memory against time.

Every entry is a state of Explore, and its numbers are those that Explore shows for that state:
nothing is offloaded, and stages are cut as the runtime cuts them by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fivefold.core import machine
from fivefold.core.errors import FivefoldError
from fivefold.core.estimate.outlook import Outlook
from fivefold.core.estimate.planner import Answer, Inquiry, answer, inquiry
from fivefold.core.estimate.why import takeaways
from fivefold.core.plan import Plan
from fivefold.report import plan_words
from fivefold.report.amounts import duration, gib
from fivefold.report.lines import table, wrapped
from fivefold.report.page.state import HEADROOM, KERNELS, State, keys_of

View = dict[str, Any]
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


def inquiry_of(job: State) -> Inquiry:
    """What the planner is asked: every layout that a state can hold."""
    return inquiry(
        job.wishes(),
        machine.load(job.machine),
        {"offload": "none"},
        precision=job.precision,
        headroom=HEADROOM,
        kernels=KERNELS,
    )


def view(params: Mapping[str, str], on_progress: Progress) -> View:
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


def _ranked(job: State, found: Answer) -> View:
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
        "because": plan_words.because(first, takeaways(first), rival),
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
        "loses": "" if state == first else plan_words.loses(one, first.outlook()),
        "set": {name: texts.get(name, "") for name in (*LAYOUT, "also")},
    }


def _recut(best: Outlook, plain: Outlook) -> list[str]:
    """What a plan file can say and a state cannot: stages that are cut by hand."""
    if best.plan.stage_layers is None or best.step >= plain.step:
        return []
    cut = ",".join(map(str, best.plan.stage_layers))
    return [f'the first takes {duration(best.step)} with stage_layers = "{cut}" in its plan file']


def text(found: View) -> list[str]:
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
