"""One rank that writes text: all ranks of a layout run this, and so does a single process.

Every rank has the requests, an engine and a writer. A text that ends a completion ends it on all of
them, since all see the same tokens. Rank 0 reports what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fivefold.core.errors import FivefoldError
from fivefold.core.plan import Plan
from fivefold.generate.blocks import blocks_of
from fivefold.generate.layout import (
    LayoutEngine,
    ReadWeight,
    blocks_within,
    mesh_of,
    stage_of,
)
from fivefold.generate.requests import Request
from fivefold.generate.text import Codec
from fivefold.generate.writer import TextWriter
from fivefold.launch.backend import Backend, forked_device
from fivefold.launch.worker import Worker
from fivefold.model.regions import compiled, eager


@dataclass(frozen=True)
class TextTask:
    """What every rank does. `open_weights` is told whether to warn of damaged files."""

    plan: Plan
    dtype: str
    cache_gb: float  # on a rank
    open_weights: Callable[[bool], ReadWeight]
    codec: Codec
    requests: list[tuple[Request, str]]  # and their prompts
    stops: tuple[str, ...]
    device: str = "cpu"
    backend: Backend = "gloo"
    records_routes: bool = False
    batch_invariant: bool = False  # as in `generate/invariant.py`


@dataclass(frozen=True)
class RefusedTask:
    """Why a rank cannot do it."""

    reason: str


def write_rank(worker: Worker, task: TextTask) -> None:
    """All completions, on one rank; rank 0 reports pieces of text."""
    try:
        world = task.plan.layout.world
        mine = forked_device(task.device, task.backend, worker.rank, world)
        with worker.joined(world, mine):
            _write(worker, task, mine.device)
    except FivefoldError as error:
        worker.report(RefusedTask(str(error)))
        raise


def _write(worker: Worker, task: TextTask, device: torch.device) -> None:
    plan, fuse = task.plan, compiled if device.type == "cuda" else eager
    worker.phase("load")
    same = task.batch_invariant
    mesh = mesh_of(plan, device, same)
    stage = stage_of(plan, mesh, getattr(torch, task.dtype), same, fuse)
    stage.fill(task.open_weights(worker.rank == 0))
    blocks = min(blocks_within(stage.model, mesh, task.cache_gb * 1e9), _most_blocks(task))
    routes = task.records_routes
    engine = LayoutEngine(plan, mesh, stage, blocks, records_routes=routes, batch_invariant=same)
    writer = TextWriter(engine, task.codec)
    for request, prompt in task.requests:
        writer.add(request, prompt, task.stops)
    while writer.busy:
        worker.phase("generate")
        for piece in writer.step():
            if worker.rank == 0:
                worker.report(piece)
    engine.close()
    mesh.close_groups()


def _most_blocks(task: TextTask) -> int:
    """The blocks of all requests together."""
    longest = task.plan.shape.max_seq
    lengths = (min(len(each.prompt) + each.max_tokens, longest) for each, _ in task.requests)
    return sum(map(blocks_of, lengths))
