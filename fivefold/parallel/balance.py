"""Balancing over ranks: each has some tokens of a row, and all decide as one device would.

A row lies on the ranks of the `row` axis: cp, and tp under sequence parallelism. What they count
there is summed, and what they have to decide is gathered; which tokens a rank has is known from the
layout alone. What a step records of its experts is summed over the world together with its loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.core.layout import PIPELINE, ROW
from fivefold.core.plan import Plan
from fivefold.core.schedule import FORWARD
from fivefold.model import Balancer, LocalRows, MoeMlp, attach_balancers, moe_layers, update_balance
from fivefold.parallel.boundary import AxisBoundary
from fivefold.parallel.mesh import Mesh, Phase
from fivefold.parallel.stage import Stage


class Route(NamedTuple):
    """The experts of the tokens of one microbatch in one layer, on one rank."""

    layer: int
    microbatch: int
    experts: Tensor  # (B, S, K), of the tokens of `positions_of` this rank


class _Layer(NamedTuple):
    """One layer with experts on this rank."""

    number: int
    stage: int
    mlp: MoeMlp
    balancer: Balancer
    phase: Phase


class Balancing:
    """The balancers of all stages of a rank."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh
        # An asynchronous run has no steps whose tokens could be counted.
        layers = () if plan.schedule.asynchronous else plan.shape.moe_layers
        self.places = {layer: index for index, layer in enumerate(layers)}
        self.layers: list[_Layer] = []
        self.routes: list[Route] = []

    def attach(self, stage: Stage) -> None:
        """Give the experts of a stage their balancing rules; their load is counted even without
        any."""
        if not self.places:
            return
        rows = _rows(self.plan, self.mesh)
        balancers = attach_balancers(stage.model, self.plan.balance, self.mesh.device, rows)
        self.layers += [
            _Layer(number, stage.number, mlp, balancers[number], stage.phase)
            for number, mlp in moe_layers(stage.model)
        ]

    @property
    def size(self) -> tuple[int, int]:
        """Layers with experts in the model, and numbers recorded for each."""
        moe = self.plan.shape.moe
        losses = sum(rule.is_loss for rule in self.plan.balance)
        return len(self.places), 0 if moe is None else moe.experts + losses

    def take(self) -> Tensor:
        """Return this rank's recorded values, flat, with zeros for layers of other stages."""
        table = torch.zeros(self.size, dtype=torch.float64, device=self.mesh.device)
        # Without sequence parallelism all tp ranks have the same tokens: one of them counts.
        counts = self.plan.layout.sp or self.mesh.coord("tp") == 0
        for layer in self.layers:
            table[self.places[layer.number]] += torch.cat(layer.balancer.take()) * counts
        return table.flatten()

    def scale_losses(self, scale: float) -> None:
        """Scale the balancing losses of the next step."""
        for layer in self.layers:
            layer.balancer.scale_losses(scale)

    def settle(self, recorded: Tensor) -> None:
        """Update biases and loads from the sum over all ranks."""
        load = self.load_of(recorded)
        if load is None:
            return
        for layer in self.layers:
            counts_E = load.slots[self.places[layer.number]]
            update_balance(layer.mlp, layer.balancer, self.plan.balance, counts_E)

    def load_of(self, recorded: Tensor) -> Load | None:
        """Split the sum over all ranks into named counts; None without experts."""
        if not self.places:
            return None
        moe = self.plan.shape.moe
        assert moe is not None
        counts_LE, losses = recorded.view(self.size).split_with_sizes(
            [moe.experts, self.size[1] - moe.experts], dim=1
        )
        return Load(counts_LE, losses.sum(0))

    def watch(self) -> None:
        """Record the experts of every token in `routes` from now on."""
        pp_rank, schedule = self.mesh.coord(PIPELINE), self.plan.schedule
        for layer in self.layers:
            actions = schedule.actions(pp_rank)
            forwards = [a for a in actions if a.kind == FORWARD and a.stage == layer.stage]
            layer.balancer.observe(
                partial(self._keep, layer, cycle(a.microbatch for a in forwards))
            )

    def _keep(self, layer: _Layer, microbatches: Iterator[int], experts: Tensor) -> None:
        if not layer.phase.backward:  # a recomputation
            self.routes.append(Route(layer.number, next(microbatches), experts.clone()))


class Load(NamedTuple):
    """What a step records of its experts: slots of each by layer, and its losses by rule."""

    slots: Tensor  # (L, E) float64
    losses: Tensor  # in the order of the plan's rules that are losses

    @property
    def imbalance(self) -> Tensor:
        """Slots of the fullest expert over the mean, by layer."""
        return self.slots.amax(1) / self.slots.mean(1).clamp(min=1e-300)


def positions_of(plan: Plan, rank: int) -> list[int]:
    """Positions, in the padded row, of the tokens that the experts of a rank receive."""
    coord, layout = plan.layout.coord(rank), plan.layout
    tokens = [
        token
        for token_range in plan.split.rank_tokens(plan.padded_seq, coord.cp)
        for token in token_range
    ]
    if not layout.sp:
        return tokens
    share = len(tokens) // layout.tp
    return tokens[coord.tp * share : (coord.tp + 1) * share]


def _rows(plan: Plan, mesh: Mesh) -> LocalRows:
    """What this rank has of the rows of a step, and how it learns the rest."""
    layout, seq, batch = plan.layout, plan.batch.seq, plan.batch
    group = layout.group(ROW, mesh.rank)
    positions = [positions_of(plan, rank) for rank in group]
    local_positions = torch.tensor(positions[group.index(mesh.rank)]).to(mesh.device)
    rows = LocalRows(
        tokens_in_step=batch.tokens,
        rows_in_unit=batch.microbatch_size,
        seq=seq,
        real=local_positions < seq if plan.padded_seq > seq else None,
    )
    if not plan.balance or len(group) == 1:
        return rows
    boundary = AxisBoundary(mesh, ROW, layout.sp, dim=1)
    everywhere = torch.tensor(
        [token for rank_positions in positions for token in rank_positions]
    ).to(mesh.device)
    order = everywhere.argsort()[:seq]

    def total(counts: Tensor) -> Tensor:
        return boundary.total(counts)

    def gather(of_tokens: Tensor) -> Tensor:
        return boundary.gather(of_tokens).index_select(1, order)

    def back(keep_mask: Tensor) -> Tensor:  # padding has no room
        return (
            keep_mask.index_select(1, local_positions.clamp(max=seq - 1))
            & (local_positions < seq)[:, None]
        )

    return replace(rows, sum_over_ranks=total, gather_tokens=gather, local_tokens=back)
