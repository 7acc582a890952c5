"""Experts of decode steps: all tokens to all ranks of an expert group, and sums back.

Training sends every token to the ranks of its experts, as many rows as chose them, and the host
waits for their numbers. A decode step has few tokens.

Splits   experts over ep and their width over etp, as training does.
Moves    the tokens of a rank with their choices to all ranks of the group, N·(D + 8·K) bytes or
         twice that, and float32 sums of every rank back, by a reduce-scatter.
Costs    every rank reads the choices of all tokens; it computes those of its experts alone.
Wins     while rows are few: sizes depend on the number of tokens alone, so that a step is captured
         with its collectives, and weights are read once (`expert_kernel.py`).
Refuses  steps that some replica of the group does not decode, or of too many tokens
         (`core/plan/decode_steps.py`): they go as in training.

Legend: N tokens of a rank, K experts of a token, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.model import (
    Decoder,
    Dispatch,
    Experts,
    OverlappedTask,
    Route,
    Routing,
    moe_layers,
)
from fivefold.parallel import AxisBoundary, Mesh

AXES = ("etp", "ep")
MOST_TOKENS = 512  # with more, experts have rows enough for the matmuls of training
RunExperts = Callable[[Tensor, Tensor, Tensor, Experts, int, Tensor], Tensor]
"""Takes tokens, their experts and weights, the experts of this rank with the number of the first,
and where the sum of each token goes, which it returns."""


class FewTokenKernels(NamedTuple):
    """How experts of few tokens are chosen, and computed."""

    choose: Route
    run: RunExperts


class ExpertGroup:
    """The ranks that have the experts of a layer together; `decoding` while all of them run the
    same decode step."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        """Of one rank without a mesh."""
        self.boundaries: list[AxisBoundary] = []
        self.coord, self.decoding = 0, False
        if mesh is not None:
            shared = [axis for axis in AXES if mesh.size(axis) > 1]
            self.boundaries = [AxisBoundary(mesh, axis, True, dim=0) for axis in shared]
            self.coord = mesh.coord("ep")

    @contextmanager
    def in_decode(self) -> Generator[None]:
        """Context of a step that all ranks of the group run with as many tokens."""
        self.decoding = True
        try:
            yield
        finally:
            self.decoding = False

    def takes(self, x_ND: Tensor) -> bool:
        """Whether kernels for few tokens compute a step of these tokens."""
        return self.decoding if self.boundaries else len(x_ND) <= MOST_TOKENS

    def gather(
        self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What all ranks of the group know of their tokens, in one message."""
        if not self.boundaries:
            return x_ND, chosen_NK, weights_NK
        parts = (weights_NK.contiguous(), chosen_NK.to(torch.int32), x_ND.contiguous())
        packed = torch.cat([part.view(torch.uint8) for part in parts], 1)
        for boundary in self.boundaries:
            packed = boundary.gather(packed)
        sizes = [part.shape[1] * part.element_size() for part in parts]
        weights, chosen, x = (
            rows.contiguous().view(part.dtype)
            for rows, part in zip(torch.split(packed, sizes, dim=1), parts, strict=True)
        )
        return x, chosen, weights

    def scatter(self, total_ND: Tensor) -> Tensor:
        """Sums over all ranks, of this rank's tokens."""
        for boundary in reversed(self.boundaries):
            total_ND = boundary.scatter(total_ND)
        return total_ND


class FewTokenDispatch:
    """Dispatch of few tokens; others go as they did."""

    def __init__(self, group: ExpertGroup, run: RunExperts, plain: Dispatch) -> None:
        self.group, self.run, self.plain = group, run, plain

    def __call__(
        self, x_ND: Tensor, routing: Routing, experts: Experts, overlapped: OverlappedTask
    ) -> Tensor:
        group = self.group
        if not group.takes(x_ND):
            return self.plain(x_ND, routing, experts, overlapped)
        overlapped()
        x, chosen, weights = group.gather(x_ND, routing.experts, routing.weights)
        # Sums of ranks are rounded once, as those of one rank.
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.empty_like(x, dtype=wide if group.boundaries else x.dtype)
        first = group.coord * len(experts.up.weight)
        return group.scatter(self.run(x, chosen, weights, experts, first, total)).to(x.dtype)


def dispatch_few_tokens(decoder: Decoder, group: ExpertGroup, kernels: FewTokenKernels) -> None:
    """Let kernels for few tokens compute the experts of a decoder, where `DecodeSteps` has them."""
    for _, mlp in moe_layers(decoder):
        mlp.router.route = kernels.choose
        mlp.dispatch = FewTokenDispatch(group, kernels.run, mlp.dispatch)
