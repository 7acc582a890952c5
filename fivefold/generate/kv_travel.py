"""Sequences that go from one engine to another with their cache: one computes prompts, one goes on.

Splits   the cache of a sequence into pieces: a layer with some KV heads of it, from one rank to
         one rank of the other layout (`core/plan/kv_transfers.py`), all blocks that the rank has.
Moves    pieces through the memory of the host, each copied out of the pages when the first token is
         drawn: the blocks of a prompt are free at once, and its full ones can still be shared.
Costs    the copies; the other engine waits for none of them, and goes on with other sequences.
Refuses  a sliding window in all layers.

Legend: n blocks, P tokens of a block, h heads of a piece, d width of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fivefold.core.model import blocks_of
from fivefold.core.plan import KvRoute, kv_share
from fivefold.generate.requests import SequenceState

if TYPE_CHECKING:
    from fivefold.generate.layout import LayoutEngine


@dataclass(frozen=True)
class KvPiece:
    """Keys and values of some heads of a layer, on the host."""

    id: str
    layer: int
    heads: range  # of the model
    blocks: tuple[int, ...]  # in the order of the sequence, from 0
    tensors: tuple[Tensor, ...]  # (n, P, h, d) each, one of a latent; scales are (n, P, h)


class RankPages:
    """Pages of a rank, which are sent and received as pieces."""

    def __init__(self, engine: LayoutEngine) -> None:
        self.plan, self.pages = engine.plan, engine.pages
        mesh, layout = engine.mesh, engine.plan.layout
        self.rank, self.owners, self.owner = mesh.rank, layout.cp, layout.coord(mesh.rank).cp
        self.heads = kv_share(engine.plan, mesh.rank).heads

    def pieces(
        self, sequence: SequenceState, routes: Iterable[KvRoute]
    ) -> Iterator[tuple[KvRoute, KvPiece]]:
        """Pieces of a sequence that this rank sends."""
        own_blocks = self._here(sequence, 0)
        blocks = tuple(index for index, _ in own_blocks)
        for route in routes:
            if route.source != self.rank:
                continue
            for layer in route.layers:
                tensors = tuple(
                    tensor[self._pages_of(own_blocks, tensor)][:, :, self._local(route.heads)].cpu()
                    for tensor in self.pages[layer].stored
                )
                yield route, KvPiece(sequence.request.id, layer, route.heads, blocks, tensors)

    def put(self, sequence: SequenceState, pieces: Iterable[KvPiece]) -> None:
        """Write received pieces to the blocks of a sequence, except shared ones."""
        own_pages = dict(self._here(sequence, blocks_of(sequence.computed)))
        for piece in pieces:
            rows = [row for row, index in enumerate(piece.blocks) if index in own_pages]
            block_pages = [(piece.blocks[row], own_pages[piece.blocks[row]]) for row in rows]
            heads = self._local(piece.heads)
            for pages, came in zip(self.pages[piece.layer].stored, piece.tensors, strict=True):
                values = came[torch.tensor(rows, dtype=torch.int64)].to(pages.device)
                pages[:, :, heads].index_copy_(0, self._pages_of(block_pages, pages), values)

    def _here(self, sequence: SequenceState, first: int) -> list[tuple[int, int]]:
        """The blocks of the prompt that this rank owns, from `first` on: each with its page."""
        last = blocks_of(len(sequence.request.prompt))
        table = list(enumerate(sequence.table[:last]))[first:]
        return [(i, b // self.owners) for i, b in table if b % self.owners == self.owner]

    @staticmethod
    def _pages_of(block_pages: Iterable[tuple[int, int]], pages: Tensor) -> Tensor:
        return torch.tensor([page for _, page in block_pages], dtype=torch.int64).to(pages.device)

    def _local(self, heads: range) -> slice:
        """Heads of the model as those of this rank."""
        return slice(heads.start - self.heads.start, heads.stop - self.heads.start)
