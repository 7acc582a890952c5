"""What the runs of `train --check` keep of gradients, and what they do with routes.

The sketch of a weight's gradient G is L·G·R, where L and R have few rows and columns of random
signs. It is linear, so that the sketches of all shards add up to that of the full gradient, in any
layout, and only 64 numbers a tensor travel. The norm of the difference of two sketches is that of
the gradients within some tens of percent: a scale that is wrong by 1e-3 shows as 1e-3, and so does
a shard that is wrong or at the wrong place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from fivefold.core.layout import Box, Weight, boxes_of
from fivefold.model import Router, Routing, TokenBatch
from fivefold.parallel import Job
from fivefold.step import StepWatch
from fivefold.train.state import Progress, Routes, Sketch, TrainedRank

STEPS = 3  # whose gradients are compared: rounding errors grow from update to update
_SIGNS = 8  # rows of L, and columns of R


class GradientSketches:
    """Step watch that records sketches of this rank's gradients."""

    def __init__(
        self, job: Job, progress: Progress, result: TrainedRank, watch: StepWatch | None
    ) -> None:
        """`result` gets them, by step; `watch` is asked and told as without this."""
        self.job, self.progress, self.result, self.watch = job, progress, result, watch
        self.projections: dict[str, Projection] = {}

    def before_update(self) -> Tensor:
        """As `StepWatch` has it; gradients are summed over the ranks, and not yet clipped."""
        number = self.progress.step + 1
        if number <= STEPS:
            self.result.sketches[number] = self._sketch()  # again if the step runs twice
        device = self.job.mesh.device
        none = torch.zeros(2, dtype=torch.float64, device=device)
        return none if self.watch is None else self.watch.before_update()

    def after_update(self) -> None:
        """As `StepWatch` has it."""
        if self.watch is not None:
            self.watch.after_update()

    def _sketch(self) -> dict[str, Sketch]:
        """What this rank adds to the sketch of each gradient: what several have counts once."""
        sketches: dict[str, Sketch] = {}
        for piece in self.job.owned:
            weight, shard = self.job.table[piece.row.name], self.job.shards[piece.row.name]
            stop = piece.start + piece.grad.numel()
            boxes = boxes_of(weight.shape, shard, piece.row.shape, piece.start, stop)
            if weight.name not in self.projections:
                self.projections[weight.name] = Projection(weight, self.job.mesh.device)
            share = 1 / (self.job.copies(piece) * self.progress.scale.value)
            part = share * self.projections[weight.name].of(piece.grad, boxes)
            before = sketches.get(weight.name, 0.0)
            # A tied weight may be on two stages.
            sketches[weight.name] = part.cpu().numpy() + before
        return sketches


class Projection:
    """Random signs for the rows and columns of a weight, equal on every rank."""

    def __init__(self, weight: Weight, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(crc32(weight.name.encode()))
        *outer, width = weight.shape
        self.rows, self.columns = (
            (torch.randint(0, 2, size, generator=generator) * 2.0 - 1).to(device, torch.float64)
            for size in ((_SIGNS, *outer), (width, _SIGNS))
        )

    def of(self, gradient: Tensor, boxes: tuple[Box, ...]) -> Tensor:
        """Sketch of a gradient that is zero outside these boxes."""
        total = self.rows.new_zeros(_SIGNS, _SIGNS)
        flat = gradient.reshape(-1).to(self.rows.device)
        for box in boxes:
            *outer, (low, high) = (
                (low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True)
            )
            rows = self.rows[(slice(None), *(slice(*span) for span in outer))].reshape(_SIGNS, -1)
            values = flat[box.at : box.at + box.numel].view(-1, high - low).to(torch.float64)
            total += rows @ (values @ self.columns[low:high])
        return total / _SIGNS


class ReplayedRoutes:
    """Makes the routers of one process take the experts that ranks have taken, in every step.

    Two experts of nearly the same score are a tie: rounding decides which of them a token goes to,
    and the loss jumps by more than rounding. With the experts of the ranks it does not. `gap` is
    the most by which the score of an expert of the ranks was below one of the router's own: of
    ties alone it is small.
    """

    def __init__(self, job: Job, routes: Sequence[Routes]) -> None:
        shape = job.plan.shape
        self.layers = [layer for layer in shape.moe_layers if layer < shape.layers]
        self.routes, self.gap = routes, torch.zeros((), device=job.mesh.device)
        for chunk in job.chunks:
            for module in chunk.model.modules():
                if isinstance(module, Router):
                    module.register_forward_hook(self._compare)

    def replay(self, step: int, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
        """The microbatches of a step, counted from 0, with the experts of their tokens."""
        routes = self.routes[step]
        tables = [
            np.stack([routes[layer, number] for layer in self.layers], axis=2).astype(np.int64)
            for number in range(len(batches))
        ]
        return [
            replace(batch, replayed=torch.from_numpy(table).to(batch.tokens.device))
            for batch, table in zip(batches, tables, strict=True)
        ]

    def _compare(self, router: nn.Module, _: object, routing: Routing) -> None:
        """Forward hook of a router."""
        assert isinstance(router, Router)
        scores_NE = routing.scores.detach()
        own_NK = router.choose(scores_NE, router.bias, router.moe)
        ranked_NE = scores_NE if router.bias is None else scores_NE + router.bias
        worst_N = ranked_NE.gather(1, routing.experts).amin(1)
        gaps_N = ranked_NE.gather(1, own_NK).amin(1) - worst_N
        self.gap = torch.maximum(self.gap, gaps_N.max().to(self.gap.dtype))
