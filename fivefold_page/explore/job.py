"""The job of a state without its layout, and where to go if the planner finds no layout for it.

A change of model, machine, GPUs or batch is another job: its layout is the planner's first choice.
If nothing fits, the leanest layout is shown, with jobs near this one for which something fits. Each
of them was searched, so that no way ends at a job without a layout.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fivefold.core import hardware as machine
from fivefold.planner import (
    NothingFits,
    PlanRequest,
    gpus_needed,
    has_plan,
    plan_request,
    search_layouts,
)
from fivefold_page import Params, View
from fivefold_page.explore.state import DERIVED, HEADROOM, KERNELS, State, keys_of

# The keys that a search depends on; slow.js has the same.
JOB = ("model", "config", "machine", "gpus", "seq", "batch", "precision", "also", "derived")
LAYOUT = (
    "tp", "cp", "pp", "ep", "etp", "replicate", "zero", "schedule", "chunks", "context",
    "recompute", "microbatch_size",
)  # fmt: skip
# The keys of `also` that the planner decides for each layout.
_OF_LAYOUT = ("sp", "order", "gather", "ep_nodes", "stage_layers")
_LEAN = {"optimizer states in host memory": "offload=cpu", "LoRA adapters of rank 16": "lora=16"}
_SHORTEST = 1024  # tokens of a sequence that is halved until something fits


def job_of(params: Params) -> State:
    """The job without its layout, as a state on one axis; all of `params` must be valid. What they
    leave out is derived; sequences are not longer than learned positions."""
    state = State.parse(params)
    absent = (name for name in DERIVED if not params.get(name, "").strip())
    state = state.derive([*absent, *state.derived.split()])
    job = {name: getattr(state, name) for name in JOB}
    parts = (word for word in state.also.split() if word.partition("=")[0] not in _OF_LAYOUT)
    job["also"] = " ".join(parts)
    shape = state.shape()
    if shape.positions == "learned":
        job["seq"] = min(state.seq, shape.max_seq)
    return State(**job, tokens=state.tokens, **_ONE_AXIS)


_ONE_AXIS: dict[str, Any] = {"tp": 1, "pp": 1, "zero": 3, "schedule": "1f1b", "chunks": 1}


def request_of(job: State) -> PlanRequest:
    """The search over every layout that a state can describe."""
    return plan_request(
        job.options(),
        machine.load(job.machine),
        {"offload": job.options().train.offload_kind},
        precision=job.precision,
        headroom=HEADROOM,
        kernels=KERNELS,
    )


def job_params(job: State) -> dict[str, str]:
    """The keys of a job as texts; "" for those that it does not have."""
    texts = job.params()
    return {name: texts.get(name, "") for name in JOB}


def layout_params(state: State) -> dict[str, str]:
    """The keys of a layout as texts: what the page sets to show it."""
    texts = state.params()
    return {name: texts.get(name, "") for name in (*LAYOUT, "also")}


def nothing_fits(job: State, request: PlanRequest, refused: NothingFits) -> View:
    """The leanest layout, None if no layout is legal; and jobs near this one that have a layout."""
    plan = refused.leanest
    ways = [_way(job, changes) for changes in _ways(job, request, refused)]
    ways += _lean_ways(job)
    first = State(derived=" ".join(DERIVED))
    name = f"{first.model} on {first.gpus:,} GPUs of {first.machine}"
    return {
        "lean": None if plan is None else layout_params(replace(job, **keys_of(plan))),
        "ways": [*ways, {"label": name, "set": job_params(first)}],
    }


def _lean_ways(job: State) -> Iterator[View]:
    """The same job with less memory a GPU: what trains fewer weights, or keeps them elsewhere."""
    leaner = _LEAN if job.gpus <= machine.load(job.machine).gpus_per_node else {}
    for label, key in leaner.items():
        parts = {word.partition("=")[0]: word for word in job.also.split()}
        also = " ".join(sorted({**parts, key.partition("=")[0]: key}.values()))
        if also != job.also and has_plan(request_of(replace(job, also=also))):
            yield {"label": label, "set": {"also": also}}


def typed(job: State, changes: dict[str, str]) -> dict[str, str]:
    """Changes as the page applies them: what is changed is no longer derived."""
    text = " ".join(name for name in job.derived.split() if name not in changes)
    return changes if text == job.derived else {**changes, "derived": text}


def _way(job: State, changes: dict[str, int]) -> View:
    templates = {
        "gpus": "{:,} GPUs",
        "batch": "a batch of {:,} sequences",
        "seq": "sequences of {:,} tokens",
    }
    label = " and ".join(templates[name].format(value) for name, value in changes.items())
    return {"label": label, "set": typed(job, {name: str(changes[name]) for name in changes})}


def _ways(job: State, request: PlanRequest, refused: NothingFits) -> Iterator[dict[str, int]]:
    """Changes of the job after which something fits, the smallest first."""
    if refused.gpus is not None:
        yield {"gpus": refused.gpus}
        return
    fits = False
    if refused.leanest is None:
        batch = -(-job.batch // job.gpus) * job.gpus
        if batch != job.batch and _fits(request, batch=batch):
            fits = True
            yield {"batch": batch}
        round_number = 1 << (job.gpus.bit_length() - 1)
        if gpus := _enough(request.on(round_number)):
            fits = True
            yield {"gpus": gpus}
    seq = job.seq // 2
    while not fits and seq >= _SHORTEST:
        if fits := _fits(request, seq=seq):
            yield {"seq": seq}
        seq //= 2


def _fits(request: PlanRequest, **changes: int) -> bool:
    return has_plan(replace(request, space=replace(request.space, **changes)))


def _enough(request: PlanRequest) -> int | None:
    """The number of GPUs of this request if something fits on them, else how many it takes."""
    if has_plan(request):
        return request.space.gpus
    result = search_layouts(request.space, request.setting, 1)
    return None if result.leanest is None else gpus_needed(request, result.leanest.bytes)


def command(state: State, config_file: str) -> str:
    """The command that prints the same plan in a terminal; a pasted config is a file."""
    layout = state.layout()
    args = [
        *("fivefold", "plan", config_file if state.config else state.model),
        *("--machine", state.machine, "--layout", str(layout)),
        *("--zero", str(layout.zero), "--recompute", state.recompute),
        *("--microbatch-size", str(state.microbatch_size)),
        *("--seq", str(state.seq), "--batch", str(state.batch)),
        *("--precision", state.precision, "--tokens", f"{state.tokens:g}"),
    ]
    also = [word for word in state.also.split() if not word.startswith("order=")]
    if layout.pp > 1:
        args += ["--schedule", state.schedule]
        also = [f"chunks={layout.chunks}", *also]
    if layout.cp > 1:
        args += ["--context", layout.context]
    if also:
        args += ["--set", " ".join(also)]
    return shlex.join(args)
