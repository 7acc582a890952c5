"""Balancing in one layer: auxiliary losses, the load, capacity, and the bias without a loss.

An auxiliary loss enters backward where the routing weights do: the function that injects it is the
identity forward, and gives each loss the gradient 1 (or the scale of all losses) backward. So no
stage of a pipeline passes losses on. Since the load f has no gradient, the loss of a unit is a sum
over its tokens of Σ f·p: every rank computes its own tokens' share, once it knows the load of the
whole unit. Each layer's loss counts fully, and the losses of a step are means over its tokens.

What a step records, the load and the losses, arrives as the gradients of two leaves: autograd adds
them up over microbatches, exactly once each, also where recomputation runs the forward twice.

Legend: N tokens, B rows, S tokens of a row, E experts, K experts of a token, M slots of a row,
U units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fivefold.core.balance import Balance, Keep
from fivefold.model.decoder import Decoder
from fivefold.model.moe import MoeMlp, Routing, count_slots

Total = Callable[[Tensor], Tensor]
Decide = Callable[[Tensor, Tensor], Tensor]


@dataclass
class RowIndex:
    """What a device has of the rows of a step: by default all of one microbatch.

    `tokens_in_step` are those of the whole step over all ranks and microbatches, and `in_unit` the
    rows of a microbatch of one data rank; None: what is given is all. `seq` are the tokens of a
    whole row, `real` those here that are not padding. `total` sums loads over the ranks that share
    the rows; `whole` gives what they all hold of a row, in the order of its tokens, and `mine`
    takes this rank's share back. `scale` is that of all losses of the step.
    """

    tokens_in_step: int | None = None
    in_unit: int | None = None
    seq: int | None = None
    real: Tensor | None = None  # (S,) bool; None: all
    total: Total = lambda counts: counts
    whole: Total = lambda of_tokens: of_tokens
    mine: Total = lambda of_tokens: of_tokens
    scale: float = 1.0


class Balancer:
    """The rules of one layer; takes the place of `MoeMlp.balance`.

    `load` is the share of each expert in the slots of the step before, for the global unit; None:
    none is known, so all are taken to be equal. `watch` is shown the experts of all tokens.
    """

    def __init__(
        self,
        rules: Sequence[Balance],
        num_experts: int,
        device: torch.device | str,
        rows: RowIndex | None = None,
    ) -> None:
        self.losses = [rule for rule in rules if rule.is_loss]
        self.capacity = next((rule for rule in rules if rule.kind == "capacity"), None)
        self.num_experts, self.rows = num_experts, rows or RowIndex()
        self.load: Tensor | None = None
        self.watch: Callable[[Tensor], None] | None = None
        self._counts = _leaf(num_experts, device)
        self._values = _leaf(len(self.losses), device)

    def __call__(self, routing: Routing, num_rows: int) -> Routing:
        """The routing with its losses in backward, and without the slots that find no room."""
        experts_BSK = routing.experts.unflatten(0, (num_rows, -1))
        if self.watch is not None:
            self.watch(experts_BSK)
        if self.rows.real is not None:
            experts_BSK = experts_BSK.where(self.rows.real[:, None], self.num_experts)
        counts_BE = count_slots(experts_BSK.flatten(1), self.num_experts)
        losses = self._losses(routing, counts_BE)
        if self.capacity is not None:
            routing = self._within_capacity(self.capacity, routing, num_rows)
        stacked = torch.stack(losses) if losses else routing.weights.new_zeros(0)
        weights = _Inject.apply(
            routing.weights, stacked, self._counts, self._values, counts_BE.sum(0), self.rows.scale
        )
        return routing._replace(weights=weights)

    def take(self) -> tuple[Tensor, Tensor]:
        """What was recorded since the last time: slots of each expert (E,), before any is dropped,
        and the value of each loss, in the order of `losses`; float64. Ranks record their share."""
        taken = []
        for leaf in (self._counts, self._values):
            taken.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
        return taken[0].detach(), taken[1].detach()

    def _losses(self, routing: Routing, counts_BE: Tensor) -> list[Tensor]:
        if any(rule.counts_rows for rule in self.losses):
            counts_BE = self.rows.total(counts_BE)
        found: list[Tensor] = []
        for rule in self.losses:
            of_tokens_N = (
                routing.logits.logsumexp(1).square()
                if rule.kind == "z"
                else load_losses(routing.scores, self._load(rule, counts_BE, routing.scores))
            )
            if self.rows.real is not None:
                of_tokens_N = of_tokens_N.unflatten(0, (len(counts_BE), -1)) * self.rows.real
            tokens = self.rows.tokens_in_step or of_tokens_N.numel()
            found.append(rule.coefficient * of_tokens_N.sum() / tokens)
        return found

    def _load(self, rule: Balance, counts_BE: Tensor, scores_NE: Tensor) -> Tensor:
        """The share f of each expert in the slots of each unit, (U, E)."""
        if rule.unit == "global":
            even = scores_NE.new_full((self.num_experts,), 1 / self.num_experts)
            return (even if self.load is None else self.load.to(even))[None]
        rows = 1 if rule.unit == "sequence" else self.rows.in_unit or len(counts_BE)
        counts_UE = counts_BE.unflatten(0, (-1, rows)).sum(1).to(scores_NE.dtype)
        return counts_UE / counts_UE.sum(1, keepdim=True)

    def _within_capacity(self, rule: Balance, routing: Routing, num_rows: int) -> Routing:
        """Slots without room go nowhere."""
        top_k = routing.experts.shape[1]
        experts_BSK = routing.experts.unflatten(0, (num_rows, -1))
        scores_NK = routing.scores.detach().gather(1, routing.experts)
        whole = self.rows.whole(experts_BSK)
        room = rule.room(self.rows.seq or whole.shape[1], top_k, self.num_experts)
        scores_BSK = self.rows.whole(scores_NK.unflatten(0, (num_rows, -1)))
        kept_BSK = self.rows.mine(within(whole, scores_BSK, room, rule.keep, self.num_experts))
        kept_NK = kept_BSK.flatten(0, 1)
        return routing._replace(
            experts=routing.experts.where(kept_NK, self.num_experts),
            weights=routing.weights * kept_NK,
            drops=True,
            room=num_rows * min(room, experts_BSK.shape[1]) if rule.pads else None,
        )


def load_losses(scores_NE: Tensor, load_UE: Tensor) -> Tensor:
    """E · Σ f·p of each token, with f the load of the token's unit.

    The mean over the tokens of a unit is Switch's E·Σ f·P. Scores that do not sum to one, as
    sigmoids, are divided by their sum first, as DeepSeek-V3 does.
    """
    shares_NE = scores_NE / scores_NE.sum(1, keepdim=True)
    weighed_UME = shares_NE.unflatten(0, (len(load_UE), -1)) * load_UE[:, None]
    return scores_NE.shape[1] * weighed_UME.sum(2).flatten()


def within(
    experts_BSK: Tensor, scores_BSK: Tensor, room: int, keep: Keep, num_experts: int
) -> Tensor:
    """True for the slots of whole rows that stay, where every expert has `room` in each row.

    Equal scores go to the earlier token.
    """
    experts_BM, scores_BM = experts_BSK.flatten(1), scores_BSK.flatten(1)
    numbers_M = torch.arange(experts_BM.shape[1], device=experts_BM.device)
    order_BM = numbers_M.expand_as(experts_BM)
    if keep == "probability":
        order_BM = scores_BM.sort(dim=1, descending=True, stable=True).indices
    sorted_BM, again_BM = experts_BM.gather(1, order_BM).sort(dim=1, stable=True)
    counts_BE = count_slots(experts_BM, num_experts)
    place_BM = numbers_M - (counts_BE.cumsum(1) - counts_BE).gather(1, sorted_BM)
    kept_BM = torch.empty_like(place_BM, dtype=torch.bool)
    kept_BM = kept_BM.scatter(1, order_BM.gather(1, again_BM), place_BM < room)
    return kept_BM.view_as(experts_BSK)


class _Inject(torch.autograd.Function):
    """Routing weights as they are; backward, the scale for each loss, and the records as
    gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        losses: Tensor,
        counts: Tensor,
        values: Tensor,
        counts_E: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(losses, counts_E)
        ctx.scale = scale
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        losses, counts_E = ctx.saved_tensors
        recorded = counts_E.to(torch.float64), losses.to(torch.float64)
        return gradients[0], torch.full_like(losses, ctx.scale), *recorded, None, None


def _leaf(size: int, device: torch.device | str) -> Tensor:
    return torch.zeros(size, dtype=torch.float64, device=device, requires_grad=True)


def balance(
    decoder: Decoder,
    rules: Sequence[Balance],
    device: torch.device | str,
    rows: RowIndex | None = None,
) -> dict[int, Balancer]:
    """Give every layer with experts its rules; the balancers by number of layer."""
    balancers: dict[int, Balancer] = {}
    for number, mlp in moe_layers(decoder):
        mlp.balance = balancers[number] = Balancer(rules, len(mlp.router.weight), device, rows)
    return balancers


def moe_layers(decoder: Decoder) -> Iterator[tuple[int, MoeMlp]]:
    """The layers with experts by number; those of multi-token prediction go on behind the rest."""
    for name, module in decoder.named_modules():
        if isinstance(module, MoeMlp):
            kind, number, *_ = name.split(".")
            yield int(number) + (decoder.shape.layers if kind == "mtp" else 0), module


@torch.no_grad()
def settle(mlp: MoeMlp, balancer: Balancer, rules: Sequence[Balance], counts_E: Tensor) -> None:
    """Behind a step, from the slots of all its tokens: the load, and the bias of the router.

    The bias goes a step up for experts below the mean load, and one down for those above it.
    """
    balancer.load = counts_E / counts_E.sum().clamp(min=1)
    for rule in rules:
        if rule.kind == "bias":
            signs_E = (counts_E.mean() - counts_E).sign()
            mlp.router.bias.add_((rule.coefficient * signs_E).to(mlp.router.bias))
