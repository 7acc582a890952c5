"""Bugs of expert parallelism, planted one at a time: `verify` must see every one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from planted import GRADIENTS, LOSS, NORM, TRAFFIC, Fault, Patch, check_seen
from torch import Tensor

from fivefold.core.layout.groups import TWIN
from fivefold.core.layout.units import Unit
from fivefold.launch.processes import Pool
from fivefold.model.balance import LocalRows
from fivefold.model.moe import MoeMlp, Routing
from fivefold.model.slots import RowCodes, Slots, SlotSums
from fivefold.parallel import composition as balance
from fivefold.parallel import composition as compose
from fivefold.parallel import expert
from fivefold.parallel.boundary import AxisBoundary
from fivefold.parallel.composition import Job
from fivefold.parallel.data import DataParallel
from fivefold.parallel.expert import INNER, SpreadExperts
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.stage import Stage
from fivefold.parallel.units.flat_unit import OwnedShard


def rerouted(change: Callable[[Routing], Routing]) -> Patch:
    """Tokens are dispatched by another routing than the router's."""
    inner = SpreadExperts.__call__

    def changed(self: SpreadExperts, x_ND: Tensor, routing: Routing, *rest: Any) -> Tensor:
        return inner(self, x_ND, change(routing), *rest)

    return patch.object(SpreadExperts, "__call__", changed)


def weight_forgotten() -> Patch:
    """Every expert of a token counts fully."""
    return rerouted(lambda routing: routing._replace(weights=torch.ones_like(routing.weights)))


def weight_applied_twice() -> Patch:
    """Results are weighed where they are computed, and again where they are added."""
    return rerouted(lambda routing: routing._replace(weights=routing.weights.square()))


def weight_without_gradient() -> Patch:
    """Results are weighed, and the router never learns from them."""
    return rerouted(lambda routing: routing._replace(weights=routing.weights.detach()))


def experts_dealt_in_turn() -> Patch:
    """Tokens travel as if ranks took experts one by one, not in blocks."""

    def in_turn(routing: Routing) -> Routing:
        block = routing.scores.shape[1] // 2
        return routing._replace(experts=routing.experts % 2 * block + routing.experts // 2)

    return rerouted(in_turn)


def rows_left_in_the_order_of_ranks() -> Patch:
    """Rows arrive by rank, and are taken to be sorted by expert."""
    inner = expert._by_expert

    def unsorted(arriving: Tensor, num_rows: int) -> Slots:
        as_they_came = torch.arange(num_rows)
        return inner(arriving, num_rows)._replace(order=as_they_came, rows=as_they_came[:, None])

    return patch.object(expert, "_by_expert", unsorted)


def results_left_in_the_order_of_experts() -> Patch:
    """Results come back sorted by expert, and are taken to be sorted by token."""
    inner = SlotSums.tokens

    def unsorted(self: SlotSums, y_MD: Tensor, slots: Slots, *codes: RowCodes) -> Tensor:
        return inner(self, y_MD.index_select(0, slots.order), slots, *codes)

    return patch.object(SlotSums, "tokens", unsorted)


def shared_expert_of_every_rank() -> Patch:
    """The shared expert counts once for each rank that has routed ones."""
    inner = expert.spread

    def counted(stage: Stage) -> None:
        inner(stage)
        ranks = stage.mesh.size(expert.AXIS)
        for mlp in (each for each in stage.model.modules() if isinstance(each, MoeMlp)):
            assert mlp.shared is not None
            mlp.shared.register_forward_hook(lambda module, given, y: y * ranks)

    return patch.object(expert, "spread", counted)


def parts_of_the_width_not_summed() -> Patch:
    """Each rank of a split expert goes on with what its own part of the width gives."""
    inner = AxisBoundary.leave

    def own(self: AxisBoundary, share: Tensor, *codes: RowCodes) -> Tensor:
        if self.axis != INNER:
            return inner(self, share, *codes)
        return share.chunk(self.size, dim=self.dim)[self.coord]

    return patch.object(AxisBoundary, "leave", own)


def experts_summed_over_all_data_ranks() -> Patch:
    """The gradients of different experts are added up, as if every data rank had the same."""
    return patch.object(Unit, "sum_axis", property(lambda self: "dp-cp"))


def experts_averaged_over_senders() -> Patch:
    """The gradient of an expert is divided by the ranks that its tokens came from."""
    finish = DataParallel.finish

    def averaged(self: DataParallel) -> None:
        finish(self)
        for each in (each for each in self.owned if each.row.expert):
            each.grad.div_(self.mesh.size(expert.AXIS))

    return patch.object(DataParallel, "finish", averaged)


def experts_copied_as_often_as_the_rest() -> Patch:
    """The norm takes every data rank to hold every expert."""
    inner = Job.copies

    def alike(self: Job, owned: OwnedShard) -> int:
        return inner(self, replace(owned, row=replace(owned.row, expert=False)))

    return patch.object(Job, "copies", alike)


def router_not_summed_over_tp() -> Patch:
    """Routers see other tokens on every tp rank, and keep their gradients."""
    inner = compose.shard_of

    def whole(weight: Any, *rest: Any) -> Any:
        held = inner(weight, *rest)
        return replace(held, partial=False) if "router" in weight.name else held

    return patch.object(compose, "shard_of", whole)


def experts_of_two_directions_not_summed() -> Patch:
    """Both directions of a pipeline have the experts of a stage, and only the rest is summed."""
    inner = Mesh.sum_together

    def only_rest(self: Mesh, tensors: Sequence[Tensor], axis: str) -> None:
        stacked = axis == TWIN
        kept = [each.clone() if stacked and each.dim() == 3 else each for each in tensors]
        inner(self, kept, axis)

    return patch.object(Mesh, "sum_together", only_rest)


def rows_travel_wide() -> Patch:
    """Tokens travel in float64 although the model is float32."""
    inner = SpreadExperts.move

    def wide(self: SpreadExperts, rows: Tensor, *rest: Any, **codes: Any) -> Tensor:
        return inner(self, rows.to(torch.float64), *rest, **codes).to(rows.dtype)

    return patch.object(SpreadExperts, "move", wide)


def token_crosses_to_every_node() -> Patch:
    """Tokens go to nodes that have no expert of theirs too, and come back with nothing."""

    def all_nodes(self: SpreadExperts, nodes_NK: Tensor) -> Tensor:
        return torch.arange(self.nodes).repeat(len(nodes_NK), 1)

    return patch.object(SpreadExperts, "_nodes_of_tokens", all_nodes)


def other_rows(**changes: Any) -> Patch:
    """Balancing takes this rank's tokens for something else than its share of a row."""
    inner = balance._rows

    def changed(*given: Any) -> LocalRows:
        return replace(inner(*given), **changes)

    return patch.object(balance, "_rows", changed)


def load_of_own_tokens() -> Patch:
    """The load in an auxiliary loss is that of a rank's tokens, not of the row."""
    return other_rows(sum_over_ranks=lambda counts: counts)


def room_for_own_tokens() -> Patch:
    """Each rank drops slots as if its tokens were all of the row."""
    return other_rows(gather_tokens=lambda of_tokens: of_tokens, local_tokens=lambda kept: kept)


def auxiliary_mean_of_means() -> Patch:
    """An auxiliary loss is a mean over the tokens of a rank and microbatch, and all are added."""
    return other_rows(tokens_in_step=None)


Expert = partial(Fault, model="tiny-moe")
FAULTS = (
    Expert(weight_forgotten, "dp=2 ep=2", LOSS),
    Expert(weight_applied_twice, "dp=2 ep=2", LOSS),
    Expert(weight_without_gradient, "dp=2 ep=2", GRADIENTS),
    Expert(experts_dealt_in_turn, "tp=2 ep=2", LOSS),
    Expert(rows_left_in_the_order_of_ranks, "dp=2 ep=2", LOSS),
    Expert(results_left_in_the_order_of_experts, "cp=2 ep=2", LOSS),
    Expert(shared_expert_of_every_rank, "dp=2 ep=2", LOSS),
    Expert(parts_of_the_width_not_summed, "tp=2 etp=2", LOSS),
    Expert(experts_summed_over_all_data_ranks, "dp=2 ep=2", GRADIENTS),
    Expert(experts_averaged_over_senders, "dp=2 ep=2", GRADIENTS, {"zero": 3}),
    Expert(experts_copied_as_often_as_the_rest, "dp=2 ep=2", NORM, {"zero": 0}),
    Expert(router_not_summed_over_tp, "tp=2 ep=2", GRADIENTS),
    Expert(
        experts_of_two_directions_not_summed,
        "dp=2 pp=2 ep=2",
        GRADIENTS,
        {"schedule": "dualpipe", "zero": 0},
    ),
    Expert(load_of_own_tokens, "cp=2 ep=2", GRADIENTS, {"balance": "aux-seq"}),
    Expert(room_for_own_tokens, "tp=2 ep=2", LOSS, {"balance": "capacity:1"}),
    Expert(auxiliary_mean_of_means, "dp=2 ep=2", GRADIENTS, {"balance": "z"}),
    Expert(rows_travel_wide, "dp=2 ep=2", TRAFFIC, dtype="float32"),
    Expert(token_crosses_to_every_node, "dp=4 ep=4", TRAFFIC, {"ep_nodes": 4}),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_verify_sees_the_fault(pool: Pool, fault: Fault) -> None:
    check_seen(pool, fault)
