"""The expert dimension: tokens travel to the experts that they were routed to, and back.

Splits   the experts of a layer over ep ranks, and their width over etp ranks. Both are laid over
         the ranks that a stage already has: etp takes the fastest, then ep, and the experts are
         replicated over what is left (edp).
Moves    for each layer with experts: the number of tokens for every expert, then the tokens, once
         for every expert of theirs, in one all-to-all, and the results in another; both again in
         backward. With etp, tokens are gathered before and results summed behind.
Costs    4·K·A a layer and microbatch (K experts a token, A activations), wherever the experts are.
Wins     when experts are many and do not fit: weights fall with ep, and the batch of each expert
         does not.
Refuses  experts that ep does not divide, widths that etp does not, and tp ranks with the same
         tokens (no sequence parallelism) in one ep group.

The result does not depend on the layout: a token's experts are chosen where the token is, and its
results are added in the order of its choices.

Legend: N tokens, K experts of a token, M = N·K slots, D model width, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor

from fivefold.model.decoder import Decoder
from fivefold.model.moe import Experts, MoeMlp, Routing, rows_of_slots, sort_slots, tokens_of_slots
from fivefold.parallel.mesh import Mesh, Phase
from fivefold.parallel.wires import Wires

AXIS, INNER = "ep", "etp"


def spread(decoder: Decoder, mesh: Mesh, phase: Phase, sp: bool, recompute: str) -> None:
    """Give every layer with experts, whose weights are pieces, the way to all of them."""
    if mesh.size(AXIS) * mesh.size(INNER) == 1:
        return
    dispatch = SpreadExperts(mesh, phase, sp, recompute)
    for mlp in (each for each in decoder.modules() if isinstance(each, MoeMlp)):
        mlp.dispatch = dispatch


class SpreadExperts:
    """From the tokens of a rank to the experts of all ranks and back."""

    def __init__(self, mesh: Mesh, phase: Phase, sp: bool, recompute: str) -> None:
        self.mesh, self.phase = mesh, phase
        self.repeats = recompute != "selective"
        self.wires = None
        if mesh.size(INNER) > 1:
            self.wires = Wires(mesh, INNER, phase, sp, recompute == "full", dim=0)

    def __call__(self, x_ND: Tensor, routing: Routing, experts: Experts) -> Tensor:
        if self.wires is None:
            return self._dispatch(x_ND, routing, experts)
        wires = self.wires
        weights_NK, chosen_NK = wires.enter(routing.weights), routing.experts
        if wires.sp:
            with wires.forward():
                chosen_NK = wires.gather(chosen_NK)
        everywhere = routing._replace(experts=chosen_NK, weights=weights_NK)
        return wires.leave(self._dispatch(wires.enter(x_ND), everywhere, experts))

    def _dispatch(self, x_ND: Tensor, routing: Routing, experts: Experts) -> Tensor:
        slots = sort_slots(routing.experts, routing.scores.shape[1])
        rows_MD = rows_of_slots(x_ND, routing, slots, weigh=experts.weigh_inputs)
        if self.mesh.size(AXIS) == 1:
            y_MD = experts(rows_MD, slots.counts)
        else:
            y_MD = self._travel(rows_MD, slots.counts, experts)
        return tokens_of_slots(y_MD, routing, slots, weigh=not experts.weigh_inputs)

    def _travel(self, rows_MD: Tensor, counts_E: Tensor, experts: Experts) -> Tensor:
        """To the ranks of the experts, through them, and back."""
        size = self.mesh.size(AXIS)
        sent = counts_E.view(size, -1)  # by rank and by its experts
        arriving = self._counts(sent)
        leave, arrive = sent.sum(1).tolist(), arriving.sum(1).tolist()
        arrived = _Travel.apply(rows_MD, self, leave, arrive)
        # They come by rank, and within a rank by expert; experts want all of theirs together.
        numbers = torch.arange(arriving.shape[1], device=arriving.device).repeat(size)
        order = numbers.repeat_interleave(arriving.flatten()).sort(stable=True).indices
        y = experts(_Reorder.apply(arrived, order), arriving.sum(0))
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=y.device))
        return _Travel.apply(_Reorder.apply(y, back), self, arrive, leave)

    def _counts(self, sent: Tensor) -> Tensor:
        """How many rows every rank sends to each expert here."""
        if self.repeats or not self.phase.backward:
            self.mesh.note(AXIS, "all_to_all", sent)
        return functional.all_to_all_single(sent.contiguous(), None, None, self.mesh.groups[AXIS])

    def travel(
        self, rows: Tensor, leave: Sequence[int], arrive: Sequence[int], silent: bool
    ) -> Tensor:
        """One all-to-all of rows, so many to and from each rank."""
        if not silent:
            self.mesh.note(AXIS, "all_to_all", rows)
        group = self.mesh.groups[AXIS]
        arrived = functional.all_to_all_single(rows.contiguous(), list(arrive), list(leave), group)
        if self.mesh.takes_turns:
            self.mesh.let_pass(AXIS)
        return arrived


class _Travel(torch.autograd.Function):
    """Rows to other ranks; their gradients come back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, spread: SpreadExperts, leave: list[int], arrive: list[int]
    ) -> Tensor:
        ctx.spread, ctx.leave, ctx.arrive = spread, leave, arrive
        silent = spread.phase.backward and not spread.repeats
        return spread.travel(rows, leave, arrive, silent)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        spread: SpreadExperts = ctx.spread
        back = spread.travel(gradients[0], ctx.arrive, ctx.leave, silent=False)
        return back, None, None, None


class _Reorder(torch.autograd.Function):
    """Rows in another order, each once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return torch.empty_like(gradients[0]).index_copy_(0, order, gradients[0]), None
