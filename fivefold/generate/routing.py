"""Routers' choices: recorded while a generator runs, replayed in a training step.

Record   every rank keeps the experts of the tokens that it has computed, by slot of the cache, for
         the layers of its stage. So a sequence that shares a block has its choices too. When a
         sequence ends, its choices are summed over all ranks: of each, one rank has the number.
Replay   the choices go with the tokens of a training batch, through any layout. The router takes
         these experts, and weighs them by its own scores, which have gradients.

Legend: T tokens of a step, S slots, L layers with experts (of a stage, or of all), K experts of a
token, B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.core import FivefoldError
from fivefold.core.model import BLOCK, Shape
from fivefold.generate.cache import copy_rows
from fivefold.generate.requests import BlockCopy
from fivefold.generate.routes import RecordedRoutes, frozen, routed_layers
from fivefold.model import Balancing, Decoder, Routing, TokenBatch, moe_layers


class RouteStore:
    """Expert choices of all tokens in a replica's cache, as this rank has computed them.

    Numbers of experts are stored from 1 on, so that 0 stands for those of other ranks.
    """

    def __init__(self, decoder: Decoder, blocks: int, counts: bool = True) -> None:
        """It listens to the routers of a decoder, or of a stage. `counts`: its choices are not
        those of another rank as well."""
        self.shape, self.counts = decoder.shape, counts
        moe = self.shape.moe
        if moe is None:
            raise FivefoldError(
                f"{self.shape.name} has no experts, so there are no choices to record: leave the "
                "recording out"
            )
        self.layers, self.top_k, self.experts = routed_layers(self.shape), moe.top_k, moe.experts
        local_layers = [
            (number, mlp) for number, mlp in moe_layers(decoder) if number in self.layers
        ]
        self.places = [self.layers.index(number) for number, _ in local_layers]
        device = next(decoder.parameters()).device
        sizes = (blocks * BLOCK, len(local_layers), moe.top_k)
        self.chosen_SLK = torch.zeros(sizes, dtype=torch.int32, device=device)
        self.own_rows = torch.empty(0, dtype=torch.int64, device=device)
        for index, (_, mlp) in enumerate(local_layers):
            mlp.balance = partial(self._keep, index, mlp.balance)

    def begin(self, slots_T: Tensor, own_rows: Tensor) -> None:
        """Set the slots of a step's tokens, and the rows that this rank computes."""
        self.chosen_SLK.index_fill_(0, slots_T, 0)
        self.own_rows = own_rows

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the choices of blocks that are copied in the cache."""
        slots, *choices = self.chosen_SLK.shape  # a stage may have no layer with experts
        copy_rows([self.chosen_SLK.view(slots // BLOCK, BLOCK, *choices)], copies)

    def _keep(self, index: int, balance: Balancing, routing: Routing, num_rows: int) -> Routing:
        numbers = (routing.experts + 1).to(self.chosen_SLK.dtype)
        self.chosen_SLK[:, index].index_copy_(0, self.own_rows, numbers)
        return balance(routing, num_rows)

    def nothing(self, tokens: int) -> Tensor:
        """Zeros for a rank that has computed none of these tokens, (T, L, K) for all layers."""
        sizes = (tokens, len(self.layers), self.top_k)
        return self.chosen_SLK.new_zeros(sizes)

    def read(self, slots: Sequence[int]) -> Tensor:
        """Choices that this rank has computed for these slots."""
        found_TLK = self.nothing(len(slots))
        if self.counts:
            index = torch.tensor(slots, dtype=torch.int64, device=found_TLK.device)
            found_TLK[:, self.places] = self.chosen_SLK[index]
        return found_TLK

    def recorded(self, summed_TLK: Tensor) -> RecordedRoutes:
        """Choices of one text, merged from all ranks."""
        numbers: Any = summed_TLK.cpu() - 1
        return RecordedRoutes(self.experts, self.layers, frozen(numbers.tolist()))


def replay(
    batch: TokenBatch, recorded: Sequence[RecordedRoutes | None], shape: Shape
) -> TokenBatch:
    """A training batch whose routers use recorded experts; rows of None route freely, and so does
    padding after the last recorded token. A recording must cover all tokens whose next one has a
    loss."""
    rows, seq = batch.tokens.shape
    if len(recorded) != rows:
        raise FivefoldError(
            f"{len(recorded)} recordings were given for {rows} rows: give one a row, or None"
        )
    moe, layers = shape.moe, routed_layers(shape)
    if moe is None:
        raise FivefoldError(f"{shape.name} has no experts: leave replay out")
    table = torch.full((rows, seq, len(layers), moe.top_k), -1, dtype=torch.int64)
    for row, routes in enumerate(recorded):
        if routes is None:
            continue
        routes.check(shape, f"the recording of row {row}")
        counted = (batch.labels[row] >= 0).nonzero()
        least, length = int(counted.max()) + 1 if len(counted) else 0, len(routes.chosen)
        if not least <= length <= seq:
            raise FivefoldError(
                f"the recording of row {row} has {length:,} tokens, and the row {seq:,}, of which "
                f"{least:,} matter to its loss: give the recording of this very text"
            )
        table[row, :length] = torch.tensor(routes.chosen).view(length, *table.shape[2:])
    return replace(batch, replayed=table.to(batch.tokens.device))
