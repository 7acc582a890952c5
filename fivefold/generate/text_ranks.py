"""One rank that writes text: all ranks of a layout run this, and so does a single process.

Every rank has the requests, an engine and a writer. A text that ends a completion ends it on all of
them, since all see the same tokens. Rank 0 reports what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fivefold.core import FivefoldError, RankLost
from fivefold.core.model import blocks_of
from fivefold.core.plan import Plan
from fivefold.generate.drafts import DraftOptions
from fivefold.generate.grammar import Grammars
from fivefold.generate.layout import (
    LayoutEngine,
    ReadWeight,
    blocks_within,
    mesh_of,
    share_memory,
    stage_of,
)
from fivefold.generate.requests import NOT_FINITE
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.generate.text import Codec
from fivefold.generate.writer import TextPiece, TextRequest, TextWriter
from fivefold.launch import Backend, Pool, Worker, forked_device
from fivefold.model.kernels import compiled_for_steps, eager

_PATIENCE = 600.0  # seconds of a step, or of reading weights
_FREE_SHARE = 0.8  # of the memory of a GPU; the rest is for activations, graphs and logits

Tell = Callable[[str], None]
"""Gets what is wrong, though it goes on."""


@dataclass(frozen=True)
class TextTask:
    """Task of every rank. `open_weights` reports damaged files."""

    plan: Plan
    dtype: str
    cache_gb: float  # on a rank
    open_weights: Callable[[Tell], ReadWeight]
    codec: Codec
    requests: list[TextRequest]
    device: str = "cpu"
    backend: Backend = "gloo"
    records_routes: bool = False
    batch_invariant: bool = False  # as in `generate/invariant.py`
    codes: bool = False  # as in `generate/coded_weights.py`
    adapter_ranks: tuple[int, ...] = ()  # of adapters side by side, as in `generate/adapters.py`
    drafts: DraftOptions | None = None
    kv_codes: bool = False  # keys and values in fp8
    # Sums of tensor ranks: measured alone, not yet in decode steps on a GPU, so nobody else asks.
    symmetric: bool = False


@dataclass(frozen=True)
class RefusedTask:
    """Reason why a rank refuses a task."""

    reason: str


@dataclass(frozen=True)
class TaskWarning:
    """A problem that does not stop the task."""

    reason: str


def run_ranks(task: TextTask, on_piece: Callable[[TextPiece], None], on_warning: Tell) -> None:
    """Run all ranks of a task: forked processes, or this one for a single rank. Raises why a rank
    refused it, or `RankLost`."""
    world, refused = task.plan.layout.world, list[str]()

    def on_report(value: Any) -> None:
        if isinstance(value, RefusedTask):
            refused.append(value.reason)
        elif isinstance(value, TaskWarning):
            on_warning(value.reason)
        else:
            on_piece(value)

    if world == 1:
        alone = Worker.alone(lambda kind, value: on_report(value) if kind == "report" else None)
        write_rank(alone, task)
        return
    try:
        with Pool(world, _PATIENCE) as pool:
            pool.run_each([(write_rank, (task,))] * world, on_report=on_report)
    except RankLost as lost:
        if refused:
            raise FivefoldError(refused[0]) from lost
        raise


def write_rank(worker: Worker, task: TextTask) -> None:
    """Generate all completions on one rank; rank 0 reports pieces of text."""
    try:
        world = task.plan.layout.world
        own_device = forked_device(task.device, task.backend, worker.rank, world)
        with worker.joined(world, own_device):
            _write(worker, task, own_device.device)
    except FivefoldError as error:
        worker.report(RefusedTask(str(error)))
        raise


def _write(worker: Worker, task: TextTask, device: torch.device) -> None:
    engine = engine_of_rank(worker, task, device, task.cache_gb * 1e9, _most_blocks(task))
    writer = TextWriter(engine, task.codec)
    for text_request in task.requests:
        writer.add(text_request)
    while writer.busy:
        worker.phase("generate")
        for piece in writer.step():
            if piece.written is not None and piece.written.reason == "error":
                _warn(worker, f"prompt {piece.id!r}: {NOT_FINITE}")
            if worker.rank == 0 and (piece.text or piece.written):
                worker.report(piece)
    engine.close()
    engine.mesh.close_groups()


def engine_of_rank(
    worker: Worker,
    task: TextTask,
    device: torch.device,
    cache_bytes: float | None,
    most_blocks: int,
    limits: ScheduleLimits | None = None,
) -> LayoutEngine:
    """Build the engine of a rank, with its weights. By default the cache takes most of the GPU
    memory that is free after the weights."""
    plan, fuse = task.plan, compiled_for_steps if device.type == "cuda" else eager
    worker.phase("load")
    same = task.batch_invariant
    mesh = mesh_of(plan, device, same)
    if task.symmetric and (problem := share_memory(mesh)):
        _warn(worker, problem)
    stage = stage_of(plan, mesh, getattr(torch, task.dtype), same, fuse, task.codes)
    stage.fill(task.open_weights(partial(_warn, worker)))
    if cache_bytes is None:
        torch.cuda.empty_cache()  # weights were wide while they were rounded
        cache_bytes = _FREE_SHARE * torch.cuda.mem_get_info(device)[0]
    blocks = min(blocks_within(stage.model, mesh, cache_bytes, task.kv_codes), most_blocks)
    routes = task.records_routes
    limits = limits or ScheduleLimits.of(device.type)
    return LayoutEngine(
        *(plan, mesh, stage, blocks, limits),
        records_routes=routes,
        batch_invariant=same,
        grammars=Grammars(task.codec, plan.shape.vocab),
        adapter_ranks=task.adapter_ranks,
        drafts=task.drafts,
        kv_codes=task.kv_codes,
    )


def _warn(worker: Worker, reason: str) -> None:
    if worker.rank == 0:
        worker.report(TaskWarning(reason))


def _most_blocks(task: TextTask) -> int:
    """The blocks of all requests together."""
    longest = task.plan.shape.max_seq
    requests = (text_request.request for text_request in task.requests)
    return sum(
        blocks_of(min(len(request.prompt) + request.max_tokens, longest)) for request in requests
    )
