"""Mixture of experts: a router, stacked experts, and shared ones beside them.

Every token is routed to `top_k` experts. A *slot* is one token on one of its experts: number
n·K + k for the k-th choice of token n. Equal scores go to the lower expert number, so that the
choice never depends on where a token is computed. No slot is dropped, unless a rule of
`model/balance.py` does.

The seams: `Router.product`, `Stack.product`, `MoeMlp.balance` (between router and experts) and
`MoeMlp.dispatch` (from tokens to experts and back).

Legend: B rows, S tokens of a row, N = B·S, D model width, E experts, K experts of a token, M slots,
F expert width, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.shape import Moe, Shape
from fivefold.model.layers import ACTIVATIONS, Linear, Mlp, NormKind, Product

ALIGNMENT = 16  # bytes: what grouped products want of a row
_NEVER_ZERO = 1e-20  # added to a sum of weights, as DeepSeek-V3 does


class Routing(NamedTuple):
    """Where tokens go, and how much each of their experts counts; float32 or wider.

    `drops`: slots may go nowhere, which is expert number E. With a `room`, every expert is given
    exactly so many rows, of which some are empty. `kept` says how many slots go somewhere, where
    that is known in advance.
    """

    experts: Tensor  # (N, K) int64, best first
    weights: Tensor  # (N, K)
    scores: Tensor  # (N, E) probabilities, or sigmoids
    logits: Tensor  # (N, E)
    drops: bool = False
    room: int | None = None
    kept: int | None = None


class Slots(NamedTuple):
    """The slots that go somewhere, sorted by expert, and within an expert by token."""

    order: Tensor  # (M,) int64: the slot at each place; N·K, one past the last, for an empty row
    counts: Tensor  # (E,) int64: rows of each expert
    num_tokens: int
    num_choices: int
    whole: bool  # every slot is here, once


Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]
Balancing = Callable[[Routing, int], Routing]
Travel = Callable[[Tensor, Tensor, "Experts"], Tensor]
Dispatch = Callable[[Tensor, Routing, "Experts", "Beside"], Tensor]


def wide_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ in float32 or wider: a rounded score can choose another expert."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide), bias)


class Router(nn.Module):
    """Scores every expert for a token and chooses the best."""

    def __init__(self, shape: Shape, moe: Moe, kind: NormKind) -> None:
        super().__init__()
        self.moe = moe
        self.weight = kind.empty(moe.experts, shape.width)
        bias = torch.zeros(moe.experts, dtype=torch.float32, device=kind.device)
        self.register_buffer("bias", bias if moe.bias else None)
        self.product: Product = wide_product

    def forward(self, x_ND: Tensor) -> Routing:
        moe = self.moe
        logits_NE = self.product(x_ND, self.weight, None)
        scores_NE = logits_NE.softmax(-1) if moe.score == "softmax" else logits_NE.sigmoid()
        experts_NK = choose(scores_NE.detach(), self.bias, moe)
        weights_NK = scores_NE.gather(1, experts_NK)
        if moe.renormalise:
            weights_NK = weights_NK / (weights_NK.sum(1, keepdim=True) + _NEVER_ZERO)
        return Routing(experts_NK, weights_NK * moe.scaling, scores_NE, logits_NE)


def choose(scores_NE: Tensor, bias_E: Tensor | None, moe: Moe) -> Tensor:
    """The best experts of each token, by score plus bias, within the best groups."""
    wanted_NE = scores_NE if bias_E is None else scores_NE + bias_E
    if moe.groups_kept < moe.groups:
        wanted_NE = _within_groups(wanted_NE, moe)
    return _best(wanted_NE, moe.top_k)


def _within_groups(wanted_NE: Tensor, moe: Moe) -> Tensor:
    """Minus infinity for experts outside of the groups that a token may use."""
    wanted_NGE = wanted_NE.unflatten(1, (moe.groups, -1))
    summed = 1 if moe.group_score == "max" else min(2, wanted_NGE.shape[2])
    group_scores_NG = wanted_NGE.topk(summed, dim=2).values.sum(2)
    kept_NG = torch.zeros_like(group_scores_NG, dtype=torch.bool)
    kept_NG = kept_NG.scatter(1, _best(group_scores_NG, moe.groups_kept), True)
    return wanted_NGE.masked_fill(~kept_NG[:, :, None], float("-inf")).flatten(1)


def _best(wanted: Tensor, count: int) -> Tensor:
    """Numbers of the highest; a stable sort, since topk leaves the order of equals open."""
    numbers = wanted.sort(dim=1, descending=True, stable=True).indices
    return numbers[:, :count].contiguous()


def grouped_product(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's rows, up to its end, times its weight."""
    rows = (x_MI.shape[1], weight_EOI.shape[1])
    aligned = all(size * x_MI.element_size() % ALIGNMENT == 0 for size in rows)
    if not aligned or x_MI.dtype == torch.float64:  # grouped_mm has neither
        return _product_by_product(x_MI, weight_EOI, ends_E)
    y_MO = F.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=ends_E)
    return _ContiguousGradient.apply(y_MO)


def _product_by_product(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    ends = ends_E.tolist()
    rows = zip(weight_EOI.unbind(), [0, *ends], ends, strict=False)
    return torch.cat([F.linear(x_MI[start:end], weight_OI) for weight_OI, start, end in rows])


class _ContiguousGradient(torch.autograd.Function):
    """grouped_mm's backward takes no expanded gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


class ExpertStack(nn.Module):
    """The same linear of every expert, one weight of (experts, outputs, inputs)."""

    def __init__(self, experts: int, outputs: int, inputs: int, kind: NormKind) -> None:
        super().__init__()
        self.weight = kind.empty(experts, outputs, inputs)
        self.product: Grouped = grouped_product

    def forward(self, x_MI: Tensor, ends_E: Tensor) -> Tensor:
        return self.product(x_MI, self.weight, ends_E)


class Experts(nn.Module):
    """The MLPs of all experts. Their number and width are read from the weights, which may be
    pieces."""

    def __init__(self, shape: Shape, moe: Moe, kind: NormKind) -> None:
        super().__init__()
        count, width, ffn = moe.experts, shape.width, moe.ffn
        self.gate = ExpertStack(count, ffn, width, kind) if shape.gated else None
        self.up = ExpertStack(count, ffn, width, kind)
        self.down = ExpertStack(count, width, ffn, kind)
        self.activate = ACTIVATIONS[shape.activation]
        self.weigh_inputs = moe.weigh_inputs

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert, so many for each, through their experts."""
        ends_E = counts_E.cumsum(0).to(torch.int32)
        hidden_MF = self.up(x_MD, ends_E)
        if self.gate is None:
            return self.down(self.activate(hidden_MF), ends_E)
        return self.down(self.activate(self.gate(x_MD, ends_E)) * hidden_MF, ends_E)


def sort_slots(
    experts_NK: Tensor, num_experts: int, drops: bool, room: int | None, kept: int | None = None
) -> Slots:
    """Slots by expert. Only where slots are dropped, and nobody says how many are `kept`, does this
    wait for the device."""
    experts_M = experts_NK.flatten()
    order_M = experts_M.sort(stable=True).indices
    counts_E = count_slots(experts_M[None], num_experts)[0]
    whole = not drops and room is None
    if room is not None:
        order_M, counts_E = _with_empty_rows(experts_M, order_M, counts_E, room)
    elif drops:
        order_M = order_M[: int(counts_E.sum()) if kept is None else kept]
    return Slots(order_M, counts_E, *experts_NK.shape, whole)


def _with_empty_rows(
    experts_M: Tensor, order_M: Tensor, counts_E: Tensor, room: int
) -> tuple[Tensor, Tensor]:
    """Order and counts with `room` rows for every expert; those that go nowhere are cut off."""
    nowhere, num_slots = room * len(counts_E), len(experts_M)
    sorted_M = experts_M.index_select(0, order_M)
    starts = F.pad(counts_E.cumsum(0), (1, 0))
    numbers_M = torch.arange(num_slots, device=experts_M.device)
    place_M = (sorted_M * room + numbers_M - starts[sorted_M]).clamp(max=nowhere)
    padded = order_M.new_full((nowhere + 1,), num_slots).scatter(0, place_M, order_M)
    return padded[:nowhere], torch.full_like(counts_E, room)


def count_slots(experts_UM: Tensor, num_experts: int) -> Tensor:
    """How many slots of each unit every expert has, (units, E) int64; nowhere is not counted."""
    zeros_UE = experts_UM.new_zeros(len(experts_UM), num_experts + 1)
    return zeros_UE.scatter_add(1, experts_UM, torch.ones_like(experts_UM))[:, :num_experts]


def rows_of_slots(x_ND: Tensor, slots: Slots) -> Tensor:
    """The token of every slot, in the slots' order; zeros in empty rows."""
    return _ToSlots.apply(x_ND, slots)


def weights_of_slots(weights_NK: Tensor, slots: Slots) -> Tensor:
    """The weight of every slot, in the slots' order, as a column."""
    slots_of_one = slots._replace(num_tokens=slots.num_tokens * slots.num_choices, num_choices=1)
    return _ToSlots.apply(weights_NK.reshape(-1, 1), slots_of_one)


def choices_of_slots(y_MD: Tensor, slots: Slots) -> Tensor:
    """The rows of each token by its choices, (N, K, D); zeros for those that went nowhere."""
    return _FromSlots.apply(y_MD, slots)


class _ToSlots(torch.autograd.Function):
    """A row for each slot; backward adds a token's slots in a fixed order, without atomics."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, slots: Slots) -> Tensor:
        ctx.save_for_backward(slots.order)
        ctx.slots = slots._replace(order=None, counts=None)  # backward asks for no count
        return _take(x_ND, slots, slots.num_choices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        slots: Slots = ctx.slots._replace(order=ctx.saved_tensors[0])
        return _put(gradients[0], slots).sum(1), None


class _FromSlots(torch.autograd.Function):
    """The rows of slots, back from the experts' order; backward is the way there."""

    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, slots: Slots) -> Tensor:
        ctx.save_for_backward(slots.order)
        ctx.slots = slots._replace(order=None, counts=None)  # backward asks for no count
        return _put(y_MD, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        slots: Slots = ctx.slots._replace(order=ctx.saved_tensors[0])
        return _take(gradients[0].flatten(0, 1), slots, 1), None


def _take(rows: Tensor, slots: Slots, slots_of_row: int) -> Tensor:
    """The row of every slot, of which each row has so many."""
    if slots.whole:
        return rows.index_select(0, slots.order // slots_of_row)
    empty = slots.order == slots.num_tokens * slots.num_choices
    taken = rows.index_select(0, (slots.order // slots_of_row).clamp(max=max(0, len(rows) - 1)))
    return taken.masked_fill_(empty[:, None], 0)


def _put(rows: Tensor, slots: Slots) -> Tensor:
    """Rows where their slots belong, (N, K, ·)."""
    num_slots, width = slots.num_tokens * slots.num_choices, rows.shape[1]
    if slots.whole:
        put = rows.new_empty(num_slots, width).index_copy_(0, slots.order, rows)
    else:  # empty rows go where nobody looks
        put = rows.new_zeros(num_slots + 1, width).index_copy_(0, slots.order, rows)[:num_slots]
    return put.view(slots.num_tokens, slots.num_choices, width)


class Beside:
    """A computation that needs no expert, for somebody who waits; computed once, when asked."""

    def __init__(self, compute: Callable[[], Tensor | None]) -> None:
        self.compute: Callable[[], Tensor | None] | None = compute
        self.result: Tensor | None = None

    def __call__(self) -> Tensor | None:
        if self.compute is not None:
            self.result, self.compute = self.compute(), None
        return self.result


def dispatch_slots(
    x_ND: Tensor, routing: Routing, num_experts: int, experts: Experts, travel: Travel
) -> Tensor:
    """Sort by expert, weigh, compute where `travel` leads, and add a token's slots in the order of
    its choices."""
    slots = sort_slots(routing.experts, num_experts, routing.drops, routing.room, routing.kept)
    rows_MD = rows_of_slots(x_ND, slots)
    if experts.weigh_inputs:
        rows_MD = (rows_MD * weights_of_slots(routing.weights, slots)).to(x_ND.dtype)
    y_NKD = choices_of_slots(travel(rows_MD, slots.counts, experts), slots)
    if experts.weigh_inputs:
        return y_NKD.sum(1)
    return (y_NKD * routing.weights[:, :, None]).sum(1).to(y_NKD.dtype)


def stay(rows_MD: Tensor, counts_E: Tensor, experts: Experts) -> Tensor:
    """All experts are here."""
    return experts(rows_MD, counts_E)


def local_dispatch(x_ND: Tensor, routing: Routing, experts: Experts, beside: Beside) -> Tensor:
    """All experts are here, and nothing is waited for."""
    beside()
    return dispatch_slots(x_ND, routing, routing.scores.shape[1], experts, stay)


def unbalanced(routing: Routing, num_rows: int) -> Routing:
    """The routing as it is."""
    return routing


class MoeMlp(nn.Module):
    """What a layer with experts has in place of its MLP."""

    def __init__(self, shape: Shape, moe: Moe, kind: NormKind) -> None:
        super().__init__()
        self.router = Router(shape, moe, kind)
        self.experts = Experts(shape, moe, kind)
        self.shared = Mlp(shape, moe.shared_ffn, False, kind) if moe.shared else None
        self.shared_gate = Linear(1, shape.width, False, kind) if moe.shared_gated else None
        self.balance: Balancing = unbalanced
        self.dispatch: Dispatch = local_dispatch

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_ND, shared = x_BSD.flatten(0, 1), Beside(partial(self._shared, x_BSD))
        routing = self.balance(self.router(x_ND), x_BSD.shape[0])
        y_BSD = self.dispatch(x_ND, routing, self.experts, shared).view_as(x_BSD)
        return y_BSD if self.shared is None else y_BSD + shared()

    def _shared(self, x_BSD: Tensor) -> Tensor | None:
        if self.shared is None:
            return None
        y_BSD = self.shared(x_BSD)
        if self.shared_gate is None:
            return y_BSD
        return self.shared_gate(x_BSD).sigmoid() * y_BSD
