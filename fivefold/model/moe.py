"""Mixture of experts: a router, stacked experts, and shared experts.

Every token is routed to `top_k` experts. A *slot* is one token on one of its experts: slot
n·K + k is the k-th choice of token n. Of equal scores the lower expert number wins, so that the
choice does not depend on the rank that computes a token. Slots are dropped only by a capacity rule
of `model/balance.py`.

Seams: `Router.matmul`, `Router.route`, `ExpertStack.matmul`, `Experts.project` (gate and up),
`Experts.coding` (how rows travel to experts), `MoeMlp.balance` (between router and experts) and
`MoeMlp.dispatch` (from tokens to experts and back).

Legend: B rows, S tokens of a row, N = B·S, D model width, E experts, K experts of a token, M slots,
F expert width, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.model import Moe, Shape
from fivefold.model.kernels import Region
from fivefold.model.layers import Activate, Hold, Linear, Matmul, Mlp, WeightFactory, as_it_is
from fivefold.model.low_rank import LowRank, adapted_grouped
from fivefold.model.remake import saving
from fivefold.model.slots import AS_THEY_ARE, RowCodes, Slots, SlotSums, sort_slots

# Linears of stacked experts, on rows that are sorted by expert: a matmul for each expert, in one
# kernel, and biases.
#
# Legend: E experts, M rows, I inputs, O outputs.

ALIGNMENT = 16  # bytes: grouped_mm needs rows of a multiple of this
Later = Callable[[nn.Parameter, Callable[[], Tensor]], None]
"""Takes a weight and how its gradient is computed."""
AddExpertBias = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
_COLUMNS = 16  # of ones: a width that grouped matmuls take


def grouped_matmul(x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """One matmul for each expert: its rows, which stop at its end, times its weight."""
    if not _has_kernel(x_MI, weight_EOI.shape[1]):
        ends = ends_E.tolist()
        rows = zip(weight_EOI.unbind(), [0, *ends], ends, strict=False)
        return torch.cat([F.linear(x_MI[start:end], weight_OI) for weight_OI, start, end in rows])
    y_MO = F.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=ends_E)
    return _ContiguousGradient.apply(y_MO)


def grouped_weight_gradient(grad_MO: Tensor, x_MI: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of the weight of `grouped_matmul`, (E, O, I), from that of its result: the same
    kernel that autograd calls, without the forward that autograd needs first."""
    if _has_kernel(x_MI, grad_MO.shape[1]):
        return F.grouped_mm(grad_MO.T, x_MI, offs=ends_E)
    ends = ends_E.tolist()
    rows = zip([0, *ends], ends, strict=False)
    return torch.stack([grad_MO[start:end].T @ x_MI[start:end] for start, end in rows])


def _has_kernel(x_MI: Tensor, outputs: int) -> bool:
    """Whether grouped_mm supports this type and these widths."""
    widths = (x_MI.shape[1], outputs)
    aligned = all(width * x_MI.element_size() % ALIGNMENT == 0 for width in widths)
    return aligned and x_MI.dtype != torch.float64


class _ContiguousGradient(torch.autograd.Function):
    """Makes the gradient contiguous: the backward of grouped_mm takes no expanded one."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def add_expert_bias(
    y_MO: Tensor,
    bias_EO: Tensor,
    ends_E: Tensor,
    scale_M1: Tensor | None,
    later: Later | None = None,
) -> Tensor:
    """Rows plus the bias of their expert, times the scale of the row. `later`: who computes the
    gradient of the bias."""
    return _AddBias.apply(y_MO, bias_EO, ends_E, scale_M1, later)


def _rows(bias_EO: Tensor, ends_E: Tensor, count: int) -> Tensor:
    places_M = torch.arange(count, device=ends_E.device, dtype=ends_E.dtype)
    experts_M = torch.searchsorted(ends_E, places_M, right=True)
    return bias_EO[experts_M.clamp_(max=len(bias_EO) - 1)]


def _summed(grad_MO: Tensor, ends_E: Tensor) -> Tensor:
    """The sum over the rows of each expert, in one order."""
    ones = grad_MO.new_ones(len(grad_MO), _COLUMNS)
    return grouped_weight_gradient(grad_MO.contiguous(), ones, ends_E)[:, :, 0]


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_MO: Tensor,
        bias_EO: nn.Parameter,
        ends_E: Tensor,
        scale_M1: Tensor | None,
        later: Later | None,
    ) -> Tensor:
        ctx.save_for_backward(ends_E, scale_M1)
        ctx.bias, ctx.later = bias_EO, later
        rows_MO = _rows(bias_EO, ends_E, len(y_MO))
        rows_MO = rows_MO if scale_M1 is None else rows_MO * scale_M1
        return (y_MO + rows_MO).to(y_MO.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (ends_E, scale_M1), of_scale = gradients, ctx.saved_tensors, None
        scaled = grad
        if scale_M1 is not None:
            scaled = (grad * scale_M1).to(grad.dtype)
            rows_MO = _rows(ctx.bias, ends_E, len(grad)).to(scale_M1.dtype)
            of_scale = (grad.to(scale_M1.dtype) * rows_MO).sum(1, keepdim=True)
        compute = partial(_summed, scaled, ends_E)
        of_bias = None
        if ctx.later is not None and ctx.bias.requires_grad:
            ctx.later(ctx.bias, compute)
        elif ctx.needs_input_grad[1]:
            of_bias = compute().to(ctx.bias.dtype)
        return grad, of_bias, None, of_scale, None


_NEVER_ZERO = 1e-20  # added to a sum of weights, as DeepSeek-V3 does


class Routing(NamedTuple):
    """The experts of each token and their weights, in float32 or wider.

    `drops`: slots may be dropped, which is written as expert number E. With a `capacity`, every
    expert gets exactly so many rows, some of them empty. `num_kept` is the number of slots that are
    not dropped, where it is known in advance.
    """

    experts: Tensor  # (N, K) int64, best first
    weights: Tensor  # (N, K)
    scores: Tensor  # (N, E) probabilities, or sigmoids
    logits: Tensor  # (N, E)
    drops: bool = False
    capacity: int | None = None
    num_kept: int | None = None


GroupedMatmul = Callable[..., Tensor]
"""Of rows, the weights of all experts and the end of each expert's rows; in fp8 also of the codes
that gradients come as."""
Projection = Callable[..., Sequence[Tensor]]
Coding = Callable[[Tensor], RowCodes]
Balancing = Callable[[Routing, int], Routing]
Route = Callable[[Tensor, Tensor | None, Moe], Routing]
"""Of logits and the bias of the choice."""
RunExperts = Callable[["ExpertInputs", Slots, "Experts"], Tensor]
Dispatch = Callable[[Tensor, Routing, "Experts", "OverlappedTask"], Tensor]


def float32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ in float32 or wider, since a rounded score can choose another expert."""
    assert bias is None, "routers have none"
    return _WideLinear.apply(x, weight)


def wide_matmul(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """x · weightᵀ in float32 or wider. Products of narrow numbers are exact in float32, so that a
    GPU can sum them there without wide copies of its inputs."""
    wide = torch.promote_types(x_NI.dtype, torch.float32)
    if x_NI.is_cuda and x_NI.dtype == weight_OI.dtype != wide:
        return torch.mm(x_NI, weight_OI.T, out_dtype=wide)
    return F.linear(x_NI.to(wide), weight_OI.to(wide))


class _WideLinear(torch.autograd.Function):
    """Saves its inputs as they are, and not the wide ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wide_matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        (x, weight), (grad,) = ctx.saved_tensors, gradients
        back = (grad @ weight.to(grad.dtype)).to(x.dtype)
        learns = ctx.needs_input_grad[1]
        return back, (grad.mT @ x.to(grad.dtype)).to(weight.dtype) if learns else None


def expert_weights(
    scores_NE: Tensor, experts_NK: Tensor, renormalise: bool, scaling: float
) -> Tensor:
    """The weights of a token's experts, from their scores."""
    weights_NK = scores_NE.gather(1, experts_NK)
    if renormalise:
        weights_NK = weights_NK / (weights_NK.sum(1, keepdim=True) + _NEVER_ZERO)
    return weights_NK * scaling


WEIGH = Region(expert_weights)


class Router(nn.Module):
    """Scores all experts for each token and chooses the best ones."""

    def __init__(self, shape: Shape, moe: Moe, factory: WeightFactory) -> None:
        super().__init__()
        self.moe = moe
        self.weight = factory.empty(moe.experts, shape.width)
        bias = torch.zeros(moe.experts, dtype=torch.float32, device=factory.device)
        self.register_buffer("bias", bias if moe.bias else None)
        self.shift = factory.empty(moe.experts) if moe.biases else None
        self.hold: Hold = as_it_is  # seam: split backward
        self.choose, self.weigh = factory.fuse(choose_experts), WEIGH.by(factory.fuse)
        self.matmul: Matmul = float32_linear  # seam: split backward
        self.route: Route | None = None  # seam: generation, in place of what follows the logits

    def forward(self, x_ND: Tensor, replayed_NK: Tensor | None = None) -> Routing:
        """Replayed experts are taken where they are not negative. Weights come from own scores,
        and have gradients."""
        moe = self.moe
        logits_NE = self.matmul(x_ND, self.weight, None)
        if self.shift is not None:
            logits_NE = logits_NE + self.hold(self.shift)
        if self.route is not None and replayed_NK is None:
            return self.route(logits_NE, self.bias, moe)
        scores_NE = logits_NE.softmax(-1) if moe.score == "softmax" else logits_NE.sigmoid()
        experts_NK = self.choose(scores_NE.detach(), self.bias, moe)
        if replayed_NK is not None:
            experts_NK = torch.where(replayed_NK < 0, experts_NK, replayed_NK)
        weights_NK = self.weigh(scores_NE, experts_NK, moe.renormalise, moe.scaling)
        return Routing(experts_NK, weights_NK, scores_NE, logits_NE)


def choose_experts(scores_NE: Tensor, bias_E: Tensor | None, moe: Moe) -> Tensor:
    """The best experts of each token, by score plus bias, within the best groups."""
    ranked_NE = scores_NE if bias_E is None else scores_NE + bias_E
    if moe.groups_kept < moe.groups:
        # Minus infinity for experts outside the best groups of a token.
        grouped_NGE = ranked_NE.unflatten(1, (moe.groups, -1))
        summed = 1 if moe.group_score == "max" else min(2, grouped_NGE.shape[2])
        group_scores_NG = grouped_NGE.topk(summed, dim=2).values.sum(2)
        best_NG = torch.zeros_like(group_scores_NG, dtype=torch.bool)
        best_NG = best_NG.scatter(1, _best(group_scores_NG, moe.groups_kept), True)
        ranked_NE = grouped_NGE.masked_fill(~best_NG[:, :, None], float("-inf")).flatten(1)
    return _best(ranked_NE, moe.top_k)


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the highest; by a stable sort, since topk leaves the order of equals open."""
    indices = scores.sort(dim=1, descending=True, stable=True).indices
    return indices[:, :count].contiguous()


class ExpertStack(nn.Module):
    """The same linear layer of all experts: one weight of (experts, outputs, inputs), and maybe a
    bias of (experts, outputs)."""

    def __init__(
        self, experts: int, outputs: int, inputs: int, factory: WeightFactory, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = factory.empty(experts, outputs, inputs)
        self.bias = factory.empty(experts, outputs) if bias else None
        self.add_bias: AddExpertBias = add_expert_bias  # seam: split backward
        self.lora: LowRank | None = None
        self.row_scale: Tensor | None = None  # (experts, outputs, 1), of codes in fp8
        self.matmul: GroupedMatmul = grouped_matmul  # seam: split backward, overlapped dispatch

    def adapt(self, rank: int, scale: float, factory: WeightFactory) -> None:
        """Add a low-rank adapter to every expert."""
        count, outputs, inputs = self.weight.shape
        a, b = factory.empty(count, rank, inputs), factory.empty(count, outputs, rank)
        self.lora = LowRank(a, b, scale)
        self.matmul = self.adapted(grouped_matmul)

    def scale_rows(self, row_scale: Tensor) -> None:
        """The weights are codes, with these scales."""
        self.row_scale = row_scale

    def adapted(self, matmul: GroupedMatmul) -> GroupedMatmul:
        """This matmul, with the adapters if there are any."""
        return matmul if self.lora is None else partial(adapted_grouped, self.lora, matmul)

    def forward(
        self, x_MI: Tensor, ends_E: Tensor, *codes: RowCodes, scale_M1: Tensor | None = None
    ) -> Tensor:
        """`scale_M1`: by what inputs were multiplied, and the bias is not yet."""
        with saving(x_MI):
            y_MO = self.matmul(x_MI, self.weight, ends_E, *codes)
        return y_MO if self.bias is None else self.add_bias(y_MO, self.bias, ends_E, scale_M1)


def project_apart(
    rows: tuple[Tensor, Tensor], stacks: Sequence[ExpertStack], ends_E: Tensor, *codes: RowCodes
) -> Sequence[Tensor]:
    """Each stack by itself, the last one first."""
    pairs = zip(reversed(stacks), reversed(rows), strict=False)
    return [stack(x_MI, ends_E) for stack, x_MI in pairs][::-1]


def as_values(x: Tensor) -> RowCodes:
    """Rows travel as they are."""
    return AS_THEY_ARE


class Experts(nn.Module):
    """The MLPs of all experts. Their number and width are read from the weights, which may be
    shards."""

    def __init__(self, shape: Shape, moe: Moe, factory: WeightFactory) -> None:
        super().__init__()
        count, width, ffn = moe.experts, shape.width, moe.ffn
        bias = moe.biases
        self.gate = ExpertStack(count, ffn, width, factory, bias) if shape.gated else None
        self.up = ExpertStack(count, ffn, width, factory, bias)
        self.down = ExpertStack(count, width, ffn, factory, bias)
        self.activate = Activate(shape, factory.fuse, varies=True)  # seam: generation
        self.weigh_inputs = moe.weigh_inputs
        self.slot_sums = SlotSums(factory.fuse)
        self.project: Projection = project_apart  # seam: fp8
        self.coding: Coding = as_values  # seam: fp8

    def forward(
        self,
        rows: tuple[Tensor, Tensor],
        counts_E: Tensor,
        weights_M1: Tensor | None,
        codes: RowCodes = AS_THEY_ARE,
    ) -> Tensor:
        """The outputs of rows that are sorted by expert, with so many rows for each expert.

        The rows are given for the gate and for up, and are the same. Each row is multiplied by its
        weight before the last matmul, which is linear: so no backward needs the outputs.
        """
        ends_E = counts_E.cumsum(0).to(torch.int32)
        stacks = [self.up] if self.gate is None else [self.gate, self.up]
        coded = () if codes.two_readers else (codes,)
        *gate, up_MF = self.project(rows, stacks, ends_E, *coded)
        activated_MF = self.activate(gate[0] if gate else None, up_MF, weights_M1)
        return self.down(activated_MF, ends_E, *coded, scale_M1=weights_M1)


class OverlappedTask:
    """A computation that needs no routed expert, to overlap with the dispatch.

    It runs once, at its first call.
    """

    def __init__(self, compute: Callable[[], Tensor | None]) -> None:
        self.compute: Callable[[], Tensor | None] | None = compute
        self.result: Tensor | None = None

    def __call__(self) -> Tensor | None:
        if self.compute is not None:
            self.result, self.compute = self.compute(), None
        return self.result


class ExpertInputs:
    """What experts read of tokens: made when it is asked for, so that no name holds rows which have
    been sent. The weights of slots are in the rows or beside them, as `weigh_inputs` says."""

    def __init__(
        self, x_ND: Tensor, weights_NK: Tensor, slots: Slots, experts: Experts, codes: RowCodes
    ) -> None:
        self.x_ND, self.weights_NK, self.slots, self.codes = x_ND, weights_NK, slots, codes
        self.sums, self.in_rows = experts.slot_sums, experts.weigh_inputs

    def rows(self) -> Tensor:
        """One for each slot."""
        rows_MD = self.sums.rows(self.x_ND, self.slots, self.codes.tokens)
        if not self.in_rows:
            return rows_MD
        weights_M1 = self.sums.weights(self.weights_NK, self.slots)
        return self.codes.round((rows_MD * weights_M1).to(self.x_ND.dtype))

    def rows_for_two(self) -> tuple[Tensor, Tensor]:
        """The same rows for two readers."""
        if not self.in_rows:
            return self.sums.rows_for_two(self.x_ND, self.slots, self.codes)
        rows_MD = self.rows()
        return rows_MD, rows_MD

    def weights(self) -> Tensor | None:
        """One for each slot, a column."""
        return None if self.in_rows else self.sums.weights(self.weights_NK, self.slots)


def dispatch_slots(
    x_ND: Tensor,
    routing: Routing,
    num_experts: int,
    experts: Experts,
    run: RunExperts,
    codes: RowCodes = AS_THEY_ARE,
) -> Tensor:
    """Sort slots by expert, `run` the experts, and sum the results for each token in the order of
    its choices."""
    slots = sort_slots(
        routing.experts, num_experts, routing.drops, routing.capacity, routing.num_kept
    )
    y_MD = run(ExpertInputs(x_ND, routing.weights, slots, experts, codes), slots, experts)
    return experts.slot_sums.tokens(y_MD, slots, codes)


def run_local_experts(inputs: ExpertInputs, slots: Slots, experts: Experts) -> Tensor:
    """Run the experts on this device, which has all of them."""
    return experts(inputs.rows_for_two(), slots.counts, inputs.weights(), inputs.codes)


def local_dispatch(
    x_ND: Tensor, routing: Routing, experts: Experts, overlapped: OverlappedTask
) -> Tensor:
    """Dispatch on a device that has all experts: there is no communication to overlap with."""
    overlapped()
    codes, num_experts = experts.coding(x_ND), routing.scores.shape[1]
    x_ND = codes.tokens.round(x_ND)
    y_ND = dispatch_slots(x_ND, routing, num_experts, experts, run_local_experts, codes)
    return codes.round_gradient(y_ND)


def no_balancing(routing: Routing, num_rows: int) -> Routing:
    """The routing unchanged."""
    return routing


class MoeMlp(nn.Module):
    """The MLP of a layer with experts."""

    def __init__(self, shape: Shape, moe: Moe, factory: WeightFactory) -> None:
        super().__init__()
        self.router = Router(shape, moe, factory)
        self.experts = Experts(shape, moe, factory)
        self.shared = Mlp(shape, moe.shared_ffn, False, factory) if moe.shared else None
        self.shared_gate = Linear(1, shape.width, False, factory) if moe.shared_gated else None
        self.balance: Balancing = no_balancing  # seam: `model/balance.py`
        self.dispatch: Dispatch = local_dispatch  # seam: expert parallelism

    def forward(self, x_BSD: Tensor, replayed_BSK: Tensor | None = None) -> Tensor:
        x_ND, shared = x_BSD.flatten(0, 1), OverlappedTask(partial(self._shared_experts, x_BSD))
        replayed_NK = None if replayed_BSK is None else replayed_BSK.flatten(0, 1)
        with saving(x_BSD):
            routing = self.balance(self.router(x_ND, replayed_NK), x_BSD.shape[0])
        y_BSD = self.dispatch(x_ND, routing, self.experts, shared).view_as(x_BSD)
        return y_BSD if self.shared is None else y_BSD + shared()

    def _shared_experts(self, x_BSD: Tensor) -> Tensor | None:
        if self.shared is None:
            return None
        y_BSD = self.shared(x_BSD)
        if self.shared_gate is None:
            return y_BSD
        return self.shared_gate(x_BSD).sigmoid() * y_BSD
