"""Balancing in one layer: auxiliary losses, the load, capacity, and the bias without a loss.

An auxiliary loss enters backward where the routing weights do: the function that injects it is the
identity forward, and gives each loss the gradient 1 backward. So no stage of a pipeline passes
losses on. Since the load f has no gradient, the loss of a unit is a sum over its tokens of Σ f·p:
every rank computes its own tokens' share, once it knows the load of the whole unit. Each layer's
loss counts fully, and the losses of a step are means over its tokens.

What a step records, the load and the losses, arrives as the gradients of two leaves: autograd adds
them up over microbatches, exactly once each, also where recomputation runs the forward twice.

Legend: N tokens, B rows, S tokens of a row, E experts, K experts of a token, M slots of a row,
U units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.core.balance import Balance, Keep
from fivefold.model.decoder import Decoder
from fivefold.model.moe import MoeMlp, Routing, count_slots

Total = Callable[[Tensor], Tensor]
Decide = Callable[[Tensor, Tensor], Tensor]


class Balancer:
    """The rules of one layer; takes the place of `MoeMlp.balance`.

    `tokens_in_step` are those of the whole step over all ranks and microbatches, and `rows_in_unit`
    the rows of a microbatch of one data rank; None: what is given is all. `total` sums the load of
    units over the ranks that share them. `load` is the share of each expert in the slots of the
    step before, for the global unit; None: none is known, so all are taken to be equal.
    """

    def __init__(
        self, rules: Sequence[Balance], num_experts: int, device: torch.device | str
    ) -> None:
        self.losses = [rule for rule in rules if rule.kind in ("aux", "z")]
        self.num_experts = num_experts
        self.tokens_in_step: int | None = None
        self.rows_in_unit: int | None = None
        self.total: Total = lambda counts_UE: counts_UE
        self.load: Tensor | None = None
        # Which slots stay: experts (B, S, K) and their scores to a mask (B, S, K).
        self.decide: Decide | None = None
        for rule in rules:
            if rule.kind == "capacity":
                self.decide = Capacity(rule.coefficient, rule.keep, num_experts)
        self._counts = _leaf(num_experts, device)
        self._values = _leaf(len(self.losses), device)

    def __call__(self, routing: Routing, num_rows: int) -> Routing:
        """The routing with its losses in backward, and without the slots that find no room."""
        losses = [self._loss(rule, routing, num_rows) for rule in self.losses]
        counts_E = count_slots(routing.experts.view(1, -1), self.num_experts)[0]
        if self.decide is not None:
            routing = _dropped(routing, self.decide, num_rows)
        stacked = torch.stack(losses) if losses else routing.weights.new_zeros(0)
        weights = _Inject.apply(routing.weights, stacked, self._counts, self._values, counts_E)
        return routing._replace(weights=weights)

    def take(self) -> tuple[Tensor, Tensor]:
        """What was recorded since the last time: slots of each expert (E,), before any is dropped,
        and the value of each loss, in the order of `losses`; float64. Ranks record their share."""
        taken = []
        for leaf in (self._counts, self._values):
            taken.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
        return taken[0].detach(), taken[1].detach()

    def _loss(self, rule: Balance, routing: Routing, num_rows: int) -> Tensor:
        tokens = self.tokens_in_step or len(routing.experts)
        if rule.kind == "z":
            return rule.coefficient * routing.logits.logsumexp(1).square().sum() / tokens
        load_UE = self._load(rule, routing, num_rows)
        return rule.coefficient * load_loss(routing.scores, load_UE) / tokens

    def _load(self, rule: Balance, routing: Routing, num_rows: int) -> Tensor:
        """The share f of each expert in the slots of each unit, (U, E)."""
        if rule.unit == "global":
            even = routing.scores.new_full((self.num_experts,), 1 / self.num_experts)
            return (even if self.load is None else self.load.to(even))[None]
        rows = 1 if rule.unit == "sequence" else self.rows_in_unit or num_rows
        experts_UM = routing.experts.reshape(num_rows // rows, -1)
        counts_UE = self.total(count_slots(experts_UM, self.num_experts)).to(routing.scores.dtype)
        return counts_UE / counts_UE.sum(1, keepdim=True)


def load_loss(scores_NE: Tensor, load_UE: Tensor) -> Tensor:
    """E · Σ over the tokens of Σ f·p, with f the load of a token's unit.

    Divided by the number of tokens this is Switch's E·Σ f·P. Scores that do not sum to one, as
    sigmoids, are divided by their sum first, as DeepSeek-V3 does.
    """
    shares_NE = scores_NE / scores_NE.sum(1, keepdim=True)
    sums_UE = shares_NE.unflatten(0, (len(load_UE), -1)).sum(1)
    return scores_NE.shape[1] * (sums_UE * load_UE).sum()


class Capacity:
    """Which slots of whole rows find room: each expert has ⌈factor·K·S/E⌉ in every row."""

    def __init__(self, factor: float, keep: Keep, num_experts: int) -> None:
        self.factor, self.keep, self.num_experts = factor, keep, num_experts

    def room(self, seq: int, top_k: int) -> int:
        """Slots of one expert in a row of `seq` tokens."""
        return math.ceil(self.factor * top_k * seq / self.num_experts)

    def __call__(self, experts_BSK: Tensor, scores_BSK: Tensor) -> Tensor:
        """True for slots that stay; equal scores go to the earlier token."""
        _, seq, top_k = experts_BSK.shape
        experts_BM, scores_BM = experts_BSK.flatten(1), scores_BSK.flatten(1)
        order_BM = torch.arange(seq * top_k, device=experts_BM.device).expand_as(experts_BM)
        if self.keep == "probability":
            order_BM = scores_BM.sort(dim=1, descending=True, stable=True).indices
        sorted_BM, again_BM = experts_BM.gather(1, order_BM).sort(dim=1, stable=True)
        counts_BE = count_slots(experts_BM, self.num_experts)
        before_BE = counts_BE.cumsum(1) - counts_BE
        numbers_BM = torch.arange(seq * top_k, device=experts_BM.device)
        place_BM = numbers_BM - before_BE.gather(1, sorted_BM)
        kept_BM = torch.empty_like(place_BM, dtype=torch.bool)
        kept_BM = kept_BM.scatter(1, order_BM.gather(1, again_BM), place_BM < self.room(seq, top_k))
        return kept_BM.view_as(experts_BSK)


def _dropped(routing: Routing, decide: Decide, num_rows: int) -> Routing:
    """Weight zero for slots without room. Their experts compute them, to no effect."""
    experts_BSK = routing.experts.unflatten(0, (num_rows, -1))
    scores_NK = routing.scores.detach().gather(1, routing.experts)
    kept_BSK = decide(experts_BSK, scores_NK.unflatten(0, (num_rows, -1)))
    return routing._replace(weights=routing.weights * kept_BSK.flatten(0, 1))


class _Inject(torch.autograd.Function):
    """Routing weights as they are; backward, 1 for each loss, and the records as gradients."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, losses: Tensor, counts: Tensor, values: Tensor, counts_E: Tensor
    ) -> Tensor:
        ctx.save_for_backward(losses, counts_E)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        losses, counts_E = ctx.saved_tensors
        recorded = counts_E.to(torch.float64), losses.to(torch.float64)
        return gradients[0], torch.ones_like(losses), *recorded, None


def _leaf(size: int, device: torch.device | str) -> Tensor:
    return torch.zeros(size, dtype=torch.float64, device=device, requires_grad=True)


def balance(decoder: Decoder, rules: Sequence[Balance]) -> dict[str, Balancer]:
    """Give every layer with experts its rules; the balancers by the name of their module."""
    balancers: dict[str, Balancer] = {}
    for name, module in decoder.named_modules():
        if isinstance(module, MoeMlp):
            weight = module.router.weight
            module.balance = balancers[name] = Balancer(rules, len(weight), weight.device)
    return balancers


@torch.no_grad()
def update_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """Once a step, from the slots of all its tokens: a step up for experts below the mean load, a
    step down for those above it."""
    counts_E = counts_E.to(torch.float64)
    bias_E.add_((rate * (counts_E.mean() - counts_E).sign()).to(bias_E))
