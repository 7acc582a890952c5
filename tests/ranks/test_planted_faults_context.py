"""Bugs of context parallelism, planted one at a time: `verify` must see every one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from planted import GRADIENTS, LOSS, TRAFFIC, Fault, Patch, check_seen
from torch import Tensor

from fivefold.core.layout.groups import RING
from fivefold.core.layout.splits import AttentionCall, ContextSplit, Ranges
from fivefold.core.layout.units import Unit
from fivefold.launch.processes import Pool
from fivefold.model.batch import NOT_COUNTED, AttentionInfo, TokenBatch
from fivefold.model.documents import DocumentPairs
from fivefold.model.kernels import flash
from fivefold.model.kernels.flash import VisiblePairs
from fivefold.parallel import context
from fivefold.parallel.context import HEADS, ContextAttention
from fivefold.parallel.mesh import Mesh


def former_parts_not_scaled() -> Patch:
    """A new part of the keys is weighed, and what came before keeps its old weight."""

    def added(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        share = torch.sigmoid(more_lse - lse).nan_to_num(0.0)
        out.add_(share[..., None] * more)
        lse.copy_(torch.logaddexp(lse, more_lse))

    return patch.object(flash, "_blend", added)


def blind_parts_count() -> Patch:
    """A query that sees no key of a part has log-sum-exp 0 for it."""
    inner = flash._attend_one_by_one

    def counted(
        q: Tensor, k: Tensor, v: Tensor, sees: VisiblePairs, documents: DocumentPairs
    ) -> tuple[Tensor, Tensor]:
        out, lse = inner(q, k, v, sees, documents)
        return out, lse.masked_fill(lse.isinf(), 0.0)

    return patch.object(flash, "_attend_one_by_one", counted)


def two_blind_parts_unguarded() -> Patch:
    """A query that has not seen any key yet, and sees none in the next part: ∞ − ∞."""

    def unguarded(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        share = torch.sigmoid(more_lse - lse)
        out.sub_(share[..., None] * (out - more))
        lse.copy_(torch.logaddexp(lse, more_lse))

    return patch.object(flash, "_blend", unguarded)


def recut(change: Callable[[TokenBatch, int, int], TokenBatch]) -> Patch:
    """Another cut of the rows, made of the right one, the tokens of a rank and its coord."""
    inner = context.shard

    def changed(batch: TokenBatch, split: ContextSplit, seq: int, coord: int) -> TokenBatch:
        return change(inner(batch, split, seq, coord), seq // (split.inner * split.outer), coord)

    return patch.object(context, "shard", changed)


def positions_of_a_contiguous_cut() -> Patch:
    """Tokens are dealt in zigzag, and their positions are not."""

    def contiguous(mine: TokenBatch, size: int, coord: int) -> TokenBatch:
        assert mine.row is not None
        start = coord * size
        return replace(mine, positions=mine.row.positions[:, start : start + size])

    return recut(contiguous)


def labels_shifted_after_the_cut() -> Patch:
    """The last token of a piece is asked for the next one of its rank, not of the row."""

    def shifted(mine: TokenBatch, size: int, coord: int) -> TokenBatch:
        following = mine.tokens.roll(-1, dims=1)
        uncounted = mine.labels == NOT_COUNTED
        return replace(mine, labels=following.masked_fill(uncounted, NOT_COUNTED))

    return recut(shifted)


def rotated_by_the_padded_row() -> Patch:
    """Rows of the original length are padded, and are then longer."""

    def padded(mine: TokenBatch, size: int, coord: int) -> TokenBatch:
        return replace(mine, outgrown=torch.ones_like(mine.tokens))

    return recut(padded)


def rotated_by_the_tokens_of_a_rank() -> Patch:
    """A rank has fewer tokens than the original length, and the row has more."""

    def fewer(mine: TokenBatch, size: int, coord: int) -> TokenBatch:
        return replace(mine, outgrown=torch.zeros_like(mine.tokens))

    return recut(fewer)


def rotated_by_the_longest_document() -> Patch:
    """All documents of a row are rotated alike."""

    def alike(mine: TokenBatch, size: int, coord: int) -> TokenBatch:
        assert mine.row is not None and mine.row.outgrown is not None
        longest = mine.row.outgrown.amax(dim=1, keepdim=True)
        return replace(mine, outgrown=longest.expand_as(mine.tokens))

    return recut(alike)


def padding_has_a_loss() -> Patch:
    """Tokens behind the row are asked to predict token 0."""
    return patch.object(context, "NOT_COUNTED", 0)


def wrong_half_of_the_keys() -> Patch:
    """Of a visitor's two pieces, the one in the future is seen, and that of the past is not."""
    inner = context.attention_calls

    def other_half(
        queries: Ranges, keys: Ranges, window: int | None = None
    ) -> tuple[AttentionCall, ...]:
        size = sum(map(len, keys))
        return tuple(
            each._replace(k_start=size - each.k_stop, k_stop=size - each.k_start)
            for each in inner(queries, keys, window)
        )

    return patch.object(context, "attention_calls", other_half)


def documents_of_the_wrong_place() -> Patch:
    """Visiting keys are masked by the documents of this place's own tokens."""
    inner = ContextAttention._sees

    def own(
        self: ContextAttention, call: AttentionCall, keys: Ranges, info: AttentionInfo, heads: int
    ) -> VisiblePairs:
        return inner(self, call, self.tokens, info, heads)

    return patch.object(ContextAttention, "_sees", own)


def gradients_of_keys_left_abroad() -> Patch:
    """Gradients of keys and values come home with what the last place added, and no other."""
    inner = context.RingGrad.waited

    def forgetful(self: Any) -> Callable[[], None]:
        arriving = inner(self)

        def forget() -> None:
            arriving()

        return forget

    return patch.object(context.RingGrad, "waited", forgetful)


def heads_dealt_in_turn() -> Patch:
    """Queries and keys go to Ulysses ranks head by head, and outputs come back in blocks."""
    inner = context._exchanged

    def in_turn(x_BHSd: Tensor, mesh: Mesh, split_dim: int) -> Tensor:
        if split_dim == HEADS:
            size = mesh.size(context.ULYSSES)
            x_BHSd = torch.cat([x_BHSd[:, first::size] for first in range(size)], dim=HEADS)
        return inner(x_BHSd, mesh, split_dim)

    return patch.object(context, "_exchanged", in_turn)


def summed_over_data_ranks_alone() -> Patch:
    """Context ranks see different tokens of the same rows, and keep their gradients."""
    return patch.object(Unit, "sum_axis", property(lambda self: "replicate"))


def one_hop_too_many() -> Patch:
    """Keys and values pass once more, after the last place has seen them."""
    inner = ContextAttention._ring_blocks

    def visits(self: ContextAttention, k: Tensor, v: Tensor) -> Iterator[tuple[Ranges, Tensor]]:
        for keys, here in inner(self, k, v):
            yield keys, here
        self.mesh.pass_on(here, RING).wait()

    return patch.object(ContextAttention, "_ring_blocks", visits)


def keys_gathered_wide() -> Patch:
    """Keys and values are gathered in float64 although the model is float32."""
    inner = ContextAttention._gathered

    def wide(self: ContextAttention, here: Tensor) -> Tensor:
        return inner(self, here.to(torch.float64)).to(here.dtype)

    return patch.object(ContextAttention, "_gathered", wide)


LONGROPE = {"rope.kind": "longrope", "rope.factor": "8", "rope.original_seq": "8"}
LONGROPE |= {"rope.short": "1,1.25,1.5,2", "rope.long": "4,5,6,7"}
OUTGROWN, AS_LONG = ({**LONGROPE, "rope.original_seq": size} for size in ("20", "37"))
FAULTS = (
    Fault(former_parts_not_scaled, "cp=2", LOSS, {"context": "ring"}),
    Fault(blind_parts_count, "cp=2", LOSS, {"packed": True}),
    Fault(two_blind_parts_unguarded, "cp=2", LOSS, {"context": "allgather", "packed": True}),
    Fault(positions_of_a_contiguous_cut, "cp=2", LOSS),
    Fault(labels_shifted_after_the_cut, "cp=2", LOSS),
    Fault(padding_has_a_loss, "cp=2", LOSS, {"seq": 37}),
    Fault(rotated_by_the_padded_row, "cp=2", LOSS, {"seq": 37}, AS_LONG),
    Fault(rotated_by_the_tokens_of_a_rank, "cp=2", LOSS, set=OUTGROWN),
    Fault(rotated_by_the_longest_document, "cp=2", LOSS, {"packed": True}, LONGROPE),
    Fault(wrong_half_of_the_keys, "cp=2", LOSS),
    Fault(documents_of_the_wrong_place, "cp=2", LOSS, {"packed": True}),
    Fault(gradients_of_keys_left_abroad, "cp=2", GRADIENTS),
    Fault(heads_dealt_in_turn, "cp=2", LOSS, {"context": "ulysses"}),
    Fault(heads_dealt_in_turn, "cp=4", LOSS, {"context": "hybrid"}),
    Fault(summed_over_data_ranks_alone, "cp=2", GRADIENTS, {"zero": 0}),
    Fault(one_hop_too_many, "cp=2", TRAFFIC),
    Fault(keys_gathered_wide, "cp=2", TRAFFIC, {"context": "allgather"}, dtype="float32"),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_verify_sees_the_fault(pool: Pool, fault: Fault) -> None:
    check_seen(pool, fault)
