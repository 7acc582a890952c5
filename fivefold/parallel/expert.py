"""The expert dimension: tokens travel to the experts that they were routed to, and back.

Splits   the experts of a layer over ep ranks, and their width over etp ranks. Both are laid over
         the ranks that a stage already has: etp takes the fastest, then ep, and the experts are
         replicated over what is left (edp).
Moves    for each layer with experts: the number of tokens for every expert, then the tokens, once
         for every expert of theirs, in one all-to-all, and the results in another; both again in
         backward. With etp, tokens are gathered before and results are summed after. Over several
         nodes a token crosses once to each node that has one of its experts, to the rank with the
         same number there, and goes on inside that node. The numbers of both ways are exchanged
         first, and the host waits for the device once, or never where capacities are fixed.
Costs    4·K·A a layer and microbatch (K experts a token, A activations), wherever the experts are;
         between nodes 4·min(K, nodes)·A at most. Shared experts are computed while tokens travel.
Wins     when experts are many and do not fit: weights fall with ep, and the batch of each expert
         does not.
Refuses  experts that ep does not divide, widths that etp does not, and tp ranks with the same
         tokens (no sequence parallelism) in one ep group.

The result does not depend on the layout: a token's experts are chosen where the token is, and its
results are added in the order of its choices; over nodes, first inside each.

Legend: N tokens, K experts of a token, M = N·K slots, D model width, E experts, O nodes, J nodes of
a token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.core.layout import FAR, NEAR
from fivefold.cost.traffic import max_nodes_per_token
from fivefold.model import (
    AS_THEY_ARE,
    ExpertInputs,
    Experts,
    GroupedMatmul,
    MoeMlp,
    OverlappedTask,
    Routing,
    RowCodes,
    Slots,
    count_slots,
    dispatch_slots,
    run_local_experts,
    sort_slots,
)
from fivefold.parallel import transport
from fivefold.parallel.boundary import AxisBoundary
from fivefold.parallel.mesh import Issued, Mesh
from fivefold.parallel.stage import Stage

AXIS, INNER = "ep", "etp"


def spread(stage: Stage) -> None:
    """Dispatch the tokens of every MoE layer to the ranks of their experts."""
    if stage.mesh.size(AXIS) * stage.mesh.size(INNER) == 1:
        return
    dispatch = SpreadExperts(stage)
    for mlp in (module for module in stage.model.modules() if isinstance(module, MoeMlp)):
        mlp.dispatch = dispatch
        mlp.experts.down.matmul = partial(dispatch.yield_lane, mlp.experts.down.matmul)


class SplitSizes(NamedTuple):
    """Rows that a rank sends to, and receives from, each rank of an axis."""

    axis: str
    send: list[int]
    recv: list[int]

    def reversed(self) -> SplitSizes:
        return SplitSizes(self.axis, self.recv, self.send)


class Arrivals(NamedTuple):
    """Rows of a dispatch: `counts` are those that come from each rank for each expert here. `far`:
    what crosses between nodes before."""

    splits: SplitSizes
    counts: Tensor
    far: SplitSizes | None = None


Ask = Callable[[], Arrivals]
"""Waits for the arrivals of a dispatch."""


def _by_expert(arriving: Tensor, num_rows: int) -> Slots:
    """How rows of these numbers, which come by rank and within a rank by expert, are sorted by
    expert: each is the one slot of its own."""
    size, num_experts = arriving.shape
    numbers = torch.arange(num_experts, device=arriving.device).repeat(size)
    numbers = numbers.repeat_interleave(arriving.flatten(), output_size=num_rows)
    order = numbers.sort(stable=True).indices
    places = torch.arange(num_rows, device=order.device)
    back = torch.empty_like(order).scatter(0, order, places)
    return Slots(order, back[:, None], arriving.sum(0), True)


class SpreadExperts:
    """Dispatch and combine of tokens over the ranks of an expert group."""

    def __init__(self, stage: Stage) -> None:
        plan, self.mesh, self.phase = stage.plan, stage.mesh, stage.phase
        self.nodes, self.stand_in = plan.ep_nodes, stage.routing
        # Of forwards that run again in backward, by experts and microbatch.
        self.repeats = plan.recompute.of(stage.number).repeats("experts")
        self.arrivals: dict[tuple[int, int], Arrivals] = {}
        assert plan.shape.moe is not None
        self.most_nodes = int(max_nodes_per_token(plan.shape.moe, plan.ep_nodes))  # of one token
        # How many rows come is exchanged before the rows, unless every expert has a fixed room.
        self.counts = not any(rule.pads for rule in plan.balance)
        self.boundary = None
        if self.mesh.size(INNER) > 1:
            self.boundary = AxisBoundary(self.mesh, INNER, plan.layout.sp, dim=0)

    def __call__(
        self, x_ND: Tensor, routing: Routing, experts: Experts, beside: OverlappedTask
    ) -> Tensor:
        codes, boundary = experts.coding(x_ND), self.boundary
        x_ND = codes.tokens.round(x_ND)
        if boundary is None:
            return codes.round_gradient(self._dispatch(x_ND, routing, experts, beside, codes))
        weights_NK = boundary.enter(routing.weights)
        chosen_NK = routing.experts
        capacity = routing.capacity
        if boundary.sp:
            chosen_NK = boundary.gather(chosen_NK)
            capacity = capacity and capacity * boundary.size
        gathered = routing._replace(experts=chosen_NK, weights=weights_NK, capacity=capacity)
        x_ND = boundary.enter(x_ND, codes.tokens)
        y_ND = boundary.leave(self._dispatch(x_ND, gathered, experts, beside, codes), codes)
        return codes.round_gradient(y_ND)

    def _dispatch(
        self,
        x_ND: Tensor,
        routing: Routing,
        experts: Experts,
        beside: OverlappedTask,
        codes: RowCodes,
    ) -> Tensor:
        num_experts = routing.scores.shape[1]
        if self.mesh.size(AXIS) == 1:
            beside()
            return dispatch_slots(x_ND, routing, num_experts, experts, run_local_experts, codes)
        if self.nodes > 1:
            return self._by_node(x_ND, routing, experts, beside, codes)
        arrive = self._arrivals(routing, num_experts, experts)
        if routing.drops and routing.capacity is None:
            routing = routing._replace(num_kept=sum(arrive().splits.send))
        travel = partial(self._travel, beside, arrive)
        return dispatch_slots(x_ND, routing, num_experts, experts, travel, codes)

    def _arrivals(self, routing: Routing, num_experts: int, experts: Experts) -> Ask:
        """Start to learn how many rows leave and come."""
        size, capacity = self.mesh.size(AXIS), routing.capacity
        local = num_experts // size
        if capacity is not None:  # every expert gets as many from every rank
            share, counts = (
                [capacity * local] * size,
                routing.experts.new_full((size, local), capacity),
            )
            return lambda: Arrivals(SplitSizes(AXIS, share, share), counts)

        def ask() -> Ask:
            sent = count_slots(routing.experts.reshape(1, -1), num_experts).view(size, -1)
            exchange = self._exchange(sent, AXIS)

            def read() -> Arrivals:
                counts = sent

                def come() -> Tensor:
                    nonlocal counts
                    counts = exchange.end()
                    return torch.stack([sent.sum(1), counts.sum(1)])

                if self.stand_in is None:
                    send, recv = transport.read_on_host(self.mesh.device, come)
                    return Arrivals(SplitSizes(AXIS, send, recv), counts)
                come()
                num_rows = routing.experts.numel()
                counts = self.stand_in.arriving(AXIS, num_rows, counts)
                return Arrivals(SplitSizes(AXIS, *self.stand_in.rows(AXIS, num_rows)), counts)

            return read

        return self._once(experts, ask)

    def _once(self, experts: Experts, ask: Callable[[], Ask]) -> Ask:
        """`ask` starts an exchange of counts, and what it returns waits for them once. A forward
        that runs again in backward has them from its first run."""
        key, known = (id(experts), self.phase.microbatch), list[Arrivals]()
        if self.phase.backward and key in self.arrivals:
            known.append(self.arrivals.pop(key))
        read = None if known else ask()

        def arrive() -> Arrivals:
            if read is not None and not known:
                known.append(read())
                if self.repeats and torch.is_grad_enabled() and not self.phase.backward:
                    self.arrivals[key] = known[0]
            return known[0]

        return arrive

    def _travel(
        self,
        beside: OverlappedTask,
        arrive: Ask,
        inputs: ExpertInputs,
        slots: Slots,
        experts: Experts,
    ) -> Tensor:
        """To the ranks of the experts, through them, and back."""
        codes, rows = inputs.codes, inputs.rows()  # queued before the host waits for sizes
        splits, counts, _ = arrive()
        # Weights go after the rows, and arrive while these are waited for.
        wait, weights = self._start(rows, splits, codes=codes), inputs.weights()
        del rows  # they have been sent, and a name would keep their memory
        weights_come = None if weights is None else self._start(weights, splits, yields=False)
        beside()
        order, sums = _by_expert(counts, sum(splits.recv)), experts.slot_sums
        done = sums.tokens(
            experts(
                sums.rows_for_two(wait(), order, codes),
                order.counts,
                None if weights_come is None else sums.rows(weights_come(), order),
                codes,
            ),
            order,
            codes,
        )
        return self.move(done, splits.reversed(), grad_codes=codes)

    def _by_node(
        self,
        x_ND: Tensor,
        routing: Routing,
        experts: Experts,
        beside: OverlappedTask,
        codes: RowCodes,
    ) -> Tensor:
        """Once to each node that has experts of a token, and there to each of them."""
        node_experts, stand_in = routing.scores.shape[1] // self.nodes, self.stand_in
        sums = experts.slot_sums
        nodes_NJ = self._nodes_of_tokens(routing.experts // node_experts)
        ask = partial(self._ask_nodes, routing.experts, nodes_NJ, node_experts)
        arrivals = self._once(experts, ask)()
        splits, inside = arrivals.far, sum(arrivals.splits.send)
        assert splits is not None
        slots = sort_slots(nodes_NJ, self.nodes, True, None, sum(splits.send))
        token_M = slots.order // nodes_NJ.shape[1]
        node_M = nodes_NJ.flatten().index_select(0, slots.order)
        chosen_MK = routing.experts.index_select(0, token_M) - (node_M * node_experts)[:, None]
        chosen_MK = chosen_MK.where((chosen_MK >= 0) & (chosen_MK < node_experts), node_experts)
        rows = self.move(sums.rows(x_ND, slots, codes.tokens), splits, beside, codes.tokens)
        weights = self.move(sums.rows(routing.weights, slots), splits)
        came_MK = self._exchange(chosen_MK, FAR, splits).end()
        if stand_in is not None:
            # A rehearsal receives nothing, so the buffer may have any number.
            came_MK = came_MK.remainder(node_experts)
        node_routing = routing._replace(experts=came_MK, weights=weights)
        near = (
            run_local_experts
            if self.mesh.size(NEAR) == 1
            else partial(self._travel, beside, lambda: arrivals)
        )
        node_routing = node_routing._replace(drops=True, num_kept=inside)
        y = dispatch_slots(rows, node_routing, node_experts, experts, near, codes)
        return sums.tokens(self.move(y, splits.reversed(), grad_codes=codes), slots, codes)

    def _ask_nodes(self, experts_NK: Tensor, nodes_NJ: Tensor, node_experts: int) -> Ask:
        """Start to learn how many rows cross between nodes, and how many slots those that come
        bring: inside a node, ranks then know what they send before any row has come."""
        near, stand_in = self.mesh.size(NEAR), self.stand_in
        crossing_O = count_slots(nodes_NJ.reshape(1, -1), self.nodes)[0]
        slots_OE = count_slots(experts_NK.reshape(1, -1), self.nodes * node_experts)
        sent = torch.cat([slots_OE.view(self.nodes, -1), crossing_O[:, None]], 1)
        exchange = self._exchange(sent, FAR)

        def read() -> Arrivals:
            counts = crossing_O

            def come() -> Tensor:
                nonlocal counts
                coming = exchange.end()
                leaving = coming[:, :-1].sum(0).view(near, -1)
                counts = self._exchange(leaving, NEAR, yields=False).end() if near > 1 else leaving
                sums = (crossing_O, coming[:, -1], leaving.sum(1), counts.sum(1))
                return torch.cat(sums)

            if stand_in is not None:
                come()
                far = SplitSizes(FAR, *stand_in.rows(FAR, stand_in.crossing(len(nodes_NJ))))
                inside = stand_in.inside(sum(far.recv))
                counts = stand_in.arriving(NEAR, inside, counts)
                return Arrivals(SplitSizes(NEAR, *stand_in.rows(NEAR, inside)), counts, far)
            ends = [0, self.nodes, 2 * self.nodes, 2 * self.nodes + near, 2 * (self.nodes + near)]
            numbers = transport.read_on_host(self.mesh.device, come)
            send, recv, out, into = (numbers[a:b] for a, b in pairwise(ends))
            if counts.is_cuda:  # made on another stream
                counts.record_stream(torch.cuda.current_stream(counts.device))
            return Arrivals(SplitSizes(NEAR, out, into), counts, SplitSizes(FAR, send, recv))

        return read

    def _nodes_of_tokens(self, nodes_NK: Tensor) -> Tensor:
        """The nodes of each token's experts, each once and in order, as many as a token can have;
        the number of nodes stands for none."""
        numbers_O = torch.arange(self.nodes, device=nodes_NK.device)
        goes_NO = count_slots(nodes_NK, self.nodes) > 0
        return numbers_O.where(goes_NO, self.nodes).sort(dim=1).values[:, : self.most_nodes]

    def _exchange(
        self, numbers: Tensor, axis: str, splits: SplitSizes | None = None, yields: bool = True
    ) -> AllToAll:
        """Start to exchange integers, which have no gradient; without sizes, as many to every
        rank."""
        all_to_all = AllToAll(self, splits or SplitSizes(axis, [], []), yields)
        all_to_all.begin(numbers, all_to_all.splits)
        return all_to_all

    def move(
        self,
        rows: Tensor,
        splits: SplitSizes,
        beside: OverlappedTask | None = None,
        codes: RowCodes = AS_THEY_ARE,
        grad_codes: RowCodes = AS_THEY_ARE,
    ) -> Tensor:
        """Exchange rows between ranks, and compute `beside` meanwhile."""
        wait = self._start(rows, splits, codes=codes, grad_codes=grad_codes)
        if beside is not None:
            beside()
        return wait()

    def _start(
        self,
        rows: Tensor,
        splits: SplitSizes,
        yields: bool = True,
        codes: RowCodes = AS_THEY_ARE,
        grad_codes: RowCodes = AS_THEY_ARE,
    ) -> Callable[[], Tensor]:
        """Begin to send rows to other ranks; what is returned waits for those that come."""
        all_to_all = AllToAll(self, splits, yields, codes, grad_codes)
        return partial(_WaitAllToAll.apply, _StartAllToAll.apply(rows, all_to_all), all_to_all)

    def yield_lane(self, product: GroupedMatmul, x_MI: Tensor, *operands: Any) -> Tensor:
        """Yield to the other lane in the middle of the experts' backward, because the exchange of
        counts did so in the forward. Both then have as many turns, and each all-to-all is hidden by
        work of the other lane."""
        return product(_YieldInBackward.apply(x_MI, self.mesh) if self.counts else x_MI, *operands)


class AllToAll:
    """An all-to-all, and that of its gradients in backward, each waited for later. Rows are sent as
    `codes`, gradients as `grad_codes`."""

    def __init__(
        self,
        spread: SpreadExperts,
        splits: SplitSizes,
        yields: bool = True,
        codes: RowCodes = AS_THEY_ARE,
        grad_codes: RowCodes = AS_THEY_ARE,
    ) -> None:
        """`yields`: the other lane has its turn before this one waits."""
        self.spread, self.splits, self.yields = spread, splits, yields
        self.codes, self.grad_codes = codes, grad_codes
        self.issued: Issued | None = None

    def begin(self, rows: Tensor, splits: SplitSizes) -> None:
        """Start to exchange rows."""
        rows, size = rows.contiguous(), self.spread.mesh.size(splits.axis)
        even = [len(rows) // size] * size
        recv, send = splits.recv or even, splits.send or even
        self.issued = self.spread.mesh.issue(
            splits.axis,
            "all_to_all",
            rows,
            lambda group: transport.exchange(rows, recv, send, group),
            yields=self.yields,
        )

    def end(self) -> Tensor:
        """Wait for the received rows, after the other lane's turn, if there is one."""
        issued, self.issued = self.issued, None
        assert issued is not None, "the all-to-all has not begun"
        return issued.wait()


class _StartAllToAll(torch.autograd.Function):
    """Start an all-to-all; backward waits for the gradients. The received rows stay in `AllToAll`:
    as an output of this function, they would need a gradient of their size."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, all_to_all: AllToAll) -> Tensor:
        ctx.all_to_all = all_to_all
        all_to_all.begin(all_to_all.codes.open(rows), all_to_all.splits)
        return rows.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        all_to_all: AllToAll = ctx.all_to_all
        return all_to_all.grad_codes.close(all_to_all.end()), None


class _WaitAllToAll(torch.autograd.Function):
    """Wait for the received rows; backward starts to send the gradients."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, all_to_all: AllToAll) -> Tensor:
        ctx.all_to_all = all_to_all
        return all_to_all.codes.close(all_to_all.end())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        all_to_all: AllToAll = ctx.all_to_all
        all_to_all.begin(all_to_all.grad_codes.open(gradients[0]), all_to_all.splits.reversed())
        return gradients[0].new_zeros(()), None


class _YieldInBackward(torch.autograd.Function):
    """Identity; backward yields to the other lane."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        mesh: Mesh = ctx.mesh
        mesh.lanes.pause()
        return gradients[0], None
