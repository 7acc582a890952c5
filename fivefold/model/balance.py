"""Load balancing of experts in one layer: auxiliary losses, capacity, and the loss-free bias.

An auxiliary loss enters the backward at the routing weights. The function that injects it is the
identity in forward, and gives each loss the gradient 1 (or the loss scale) in backward, so that no
pipeline stage passes losses on. The load f has no gradient. The loss of a unit is therefore a sum
over its tokens of Σ f·p, and every rank computes the sum over its own tokens, once it knows the
load of the full unit. The losses of a step are means over its tokens; those of layers are summed.

What a step records, the load and the losses, arrives as the gradients of two leaf tensors: autograd
accumulates them over microbatches, each exactly once, even if recomputation runs a forward twice.

Legend: N tokens, B rows, S tokens of a row, E experts, K experts of a token, M slots of a row,
U units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fivefold.core.model import Balance, Keep
from fivefold.model.decoder import Decoder
from fivefold.model.moe import MoeMlp, Routing
from fivefold.model.slots import count_slots

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LocalRows:
    """The part of a step's rows on this rank, and how to reach the rest; by default it has all.

    `tokens_in_step` counts the tokens of the step on all ranks and in all microbatches, and
    `rows_in_unit` the rows of a microbatch of one data rank; None: those that are given. `seq` are
    the tokens of a full row, and `real` marks those here that are not padding. `sum_over_ranks`
    sums loads over the ranks that share the rows. `gather_tokens` gathers full rows from them, in
    the order of their tokens, and `local_tokens` takes those of this rank from full rows.
    """

    tokens_in_step: int | None = None
    rows_in_unit: int | None = None
    seq: int | None = None
    real: Tensor | None = None  # (S,) bool; None: all
    sum_over_ranks: Map = lambda counts: counts
    gather_tokens: Map = lambda of_tokens: of_tokens
    local_tokens: Map = lambda of_tokens: of_tokens


class Balancer:
    """Applies the balance rules of one layer: a value for the seam `MoeMlp.balance`.

    `load` is the fraction of the slots that each expert had in the step before, for the global
    unit; None: unknown, and taken to be uniform.
    """

    def __init__(
        self,
        rules: Sequence[Balance],
        num_experts: int,
        device: torch.device | str,
        rows: LocalRows | None = None,
    ) -> None:
        self.losses = [rule for rule in rules if rule.is_loss]
        self.capacity = next((rule for rule in rules if rule.kind == "capacity"), None)
        self.num_experts, self.rows = num_experts, rows or LocalRows()
        self.load: Tensor | None = None
        self.loss_scale = 1.0
        self.observer: Callable[[Tensor], None] | None = None
        self._counts = _leaf(num_experts, device)
        self._values = _leaf(len(self.losses), device)

    def set_load(self, load: Tensor) -> None:
        """The load of the step before, from its counts or from a checkpoint."""
        self.load = load

    def scale_losses(self, scale: float) -> None:
        """Multiply the gradients of the losses by this from now on."""
        self.loss_scale = scale

    def observe(self, observer: Callable[[Tensor], None]) -> None:
        """Call `observer` with the experts of all tokens (B, S, K) in every forward."""
        self.observer = observer

    def __call__(self, routing: Routing, num_rows: int) -> Routing:
        """The routing with its losses in backward, and without the slots over capacity."""
        experts_BSK = routing.experts.unflatten(0, (num_rows, -1))
        if self.observer is not None:
            self.observer(experts_BSK)
        if self.rows.real is not None:
            experts_BSK = experts_BSK.where(self.rows.real[:, None], self.num_experts)
        counts_BE = count_slots(experts_BSK.flatten(1), self.num_experts)
        losses = self._losses(routing, counts_BE)
        if self.capacity is not None:
            routing = self._within_capacity(self.capacity, routing, num_rows)
        stacked = torch.stack(losses) if losses else routing.weights.new_zeros(0)
        weights = _Inject.apply(
            routing.weights, stacked, self._counts, self._values, counts_BE.sum(0), self.loss_scale
        )
        return routing._replace(weights=weights)

    def take(self) -> tuple[Tensor, Tensor]:
        """Return and reset what this rank recorded, in float64: slots of each expert (E,), before
        any is dropped, and the value of each loss, in the order of `losses`."""
        taken = []
        for leaf in (self._counts, self._values):
            taken.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
        return taken[0].detach(), taken[1].detach()

    def _losses(self, routing: Routing, counts_BE: Tensor) -> list[Tensor]:
        if any(rule.counts_rows for rule in self.losses):
            counts_BE = self.rows.sum_over_ranks(counts_BE)
        losses: list[Tensor] = []
        for rule in self.losses:
            of_tokens_N = (
                routing.logits.logsumexp(1).square()
                if rule.kind == "z"
                else load_losses(routing.scores, self._load(rule, counts_BE, routing.scores))
            )
            if self.rows.real is not None:
                of_tokens_N = of_tokens_N.unflatten(0, (len(counts_BE), -1)) * self.rows.real
            tokens = self.rows.tokens_in_step or of_tokens_N.numel()
            losses.append(rule.coefficient * of_tokens_N.sum() / tokens)
        return losses

    def _load(self, rule: Balance, counts_BE: Tensor, scores_NE: Tensor) -> Tensor:
        """The fraction f of the slots of each unit that go to each expert, (U, E)."""
        if rule.unit == "global":
            uniform = scores_NE.new_full((self.num_experts,), 1 / self.num_experts)
            return (uniform if self.load is None else self.load.to(uniform))[None]
        rows = 1 if rule.unit == "sequence" else self.rows.rows_in_unit or len(counts_BE)
        counts_UE = counts_BE.unflatten(0, (-1, rows)).sum(1).to(scores_NE.dtype)
        return counts_UE / counts_UE.sum(1, keepdim=True)

    def _within_capacity(self, rule: Balance, routing: Routing, num_rows: int) -> Routing:
        """Drop the slots over the capacity of their expert."""
        top_k = routing.experts.shape[1]
        experts_BSK = routing.experts.unflatten(0, (num_rows, -1))
        scores_NK = routing.scores.detach().gather(1, routing.experts)
        full_BSK = self.rows.gather_tokens(experts_BSK)
        capacity = rule.capacity(self.rows.seq or full_BSK.shape[1], top_k, self.num_experts)
        scores_BSK = self.rows.gather_tokens(scores_NK.unflatten(0, (num_rows, -1)))
        kept_BSK = self.rows.local_tokens(
            slots_within_capacity(full_BSK, scores_BSK, capacity, rule.keep, self.num_experts)
        )
        kept_NK = kept_BSK.flatten(0, 1)
        return routing._replace(
            experts=routing.experts.where(kept_NK, self.num_experts),
            weights=routing.weights * kept_NK,
            drops=True,
            capacity=num_rows * min(capacity, experts_BSK.shape[1]) if rule.pads else None,
        )


def load_losses(scores_NE: Tensor, load_UE: Tensor) -> Tensor:
    """E · Σ f·p of each token, where f is the load of the token's unit.

    The mean over the tokens of a unit is the E·Σ f·P of the Switch Transformer. Scores that do not
    sum to one, such as sigmoids, are divided by their sum first, as in DeepSeek-V3.
    """
    probabilities_NE = scores_NE / scores_NE.sum(1, keepdim=True)
    weighed_UME = probabilities_NE.unflatten(0, (len(load_UE), -1)) * load_UE[:, None]
    return scores_NE.shape[1] * weighed_UME.sum(2).flatten()


def slots_within_capacity(
    experts_BSK: Tensor, scores_BSK: Tensor, capacity: int, keep: Keep, num_experts: int
) -> Tensor:
    """True for the slots of full rows that are kept, where an expert takes `capacity` slots of a
    row.

    Of equal scores, the earlier token is kept. Text that begins with equal tokens has such scores,
    but for the rounding of each layout: so they are compared in float32.
    """
    experts_BM, scores_BM = experts_BSK.flatten(1), scores_BSK.flatten(1).float()
    indices_M = torch.arange(experts_BM.shape[1], device=experts_BM.device)
    order_BM = indices_M.expand_as(experts_BM)
    if keep == "probability":
        order_BM = scores_BM.sort(dim=1, descending=True, stable=True).indices
    sorted_BM, again_BM = experts_BM.gather(1, order_BM).sort(dim=1, stable=True)
    counts_BE = count_slots(experts_BM, num_experts)
    rank_BM = indices_M - (counts_BE.cumsum(1) - counts_BE).gather(1, sorted_BM)
    kept_BM = torch.empty_like(rank_BM, dtype=torch.bool)
    kept_BM = kept_BM.scatter(1, order_BM.gather(1, again_BM), rank_BM < capacity)
    return kept_BM.view_as(experts_BSK)


class _Inject(torch.autograd.Function):
    """The identity on routing weights. Backward gives each loss the loss scale as its gradient, and
    the two leaves what is recorded."""

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


def attach_balancers(
    decoder: Decoder,
    rules: Sequence[Balance],
    device: torch.device | str,
    rows: LocalRows | None = None,
) -> dict[int, Balancer]:
    """Put a balancer into every layer with experts; returns them by number of layer."""
    balancers: dict[int, Balancer] = {}
    for number, mlp in moe_layers(decoder):
        mlp.balance = balancers[number] = Balancer(rules, len(mlp.router.weight), device, rows)
    return balancers


def moe_layers(decoder: Decoder) -> Iterator[tuple[int, MoeMlp]]:
    """The layers with experts by number; those of multi-token prediction come after the others."""
    for name, module in decoder.named_modules():
        if isinstance(module, MoeMlp):
            kind, number, *_ = name.split(".")
            yield int(number) + (decoder.shape.layers if kind == "mtp" else 0), module


@torch.no_grad()
def update_balance(
    mlp: MoeMlp, balancer: Balancer, rules: Sequence[Balance], counts_E: Tensor
) -> None:
    """After a step, set the load and the router's bias from the slots of all its tokens.

    The bias goes one step up for experts below the mean load, and one step down for those above.
    """
    balancer.set_load(counts_E / counts_E.sum().clamp(min=1))
    for rule in rules:
        if rule.kind == "bias":
            signs_E = (counts_E.mean() - counts_E).sign()
            mlp.router.bias.add_((rule.coefficient * signs_E).to(mlp.router.bias))
