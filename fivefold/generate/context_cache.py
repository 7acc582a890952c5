"""The context dimension of generation: the tokens of a step, and the cache, over cp ranks.

Splits   the tokens of a step into as many for every rank, in order: each computes its own, outside
         of attention. The blocks of the cache: rank r owns blocks r, r + cp, r + 2·cp and so on,
         and those of a sequence go round the ranks (`blocks.py`).
Moves    in each layer queries, keys and values of a step, by one all-gather, T·(H·d + K·(d + v));
         each rank writes the keys that it owns, and attends with all queries to its own blocks.
         What it finds goes to the ranks of the tokens with its log-sum-exp, by one all-to-all,
         T·H·(v + 1) in float32 or wider. What is in the cache never moves.
Costs    1/cp of the cache and of attention on a rank, whatever is prefill and what decode.
Wins     when the cache of long texts does not fit, or takes long to read.
Refuses  kinds of cp that exchange tokens for heads.

A rank may own no key that a query sees: the log-sum-exp is then −inf, and its weight 0. Every token
sees itself, so the sum over ranks is never −inf. Ranks are summed in their order.

Legend: T tokens of a step, M = T / cp tokens of this rank, n of one sequence, H query heads, K
key/value heads, G = H / K, L keys, d width of a head, v that of a value head, C = cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.layout import RING
from fivefold.core.model import BLOCK, blocks_of
from fivefold.generate.cache import KvCache, LayerPages, first_seen, hidden_pairs, scores_of
from fivefold.generate.requests import BlockCopy, SequenceChunk
from fivefold.generate.step_tensors import StepTensors
from fivefold.model import AttentionInfo, Decoder
from fivefold.parallel import AxisBoundary, Mesh, transport


class OwnedKeys(NamedTuple):
    """Slots and positions of the keys of one sequence that this rank owns."""

    pages: Tensor  # numbers of blocks on this rank
    positions_L: Tensor


class ContextCache(KvCache):
    """KV pages of one of cp ranks."""

    def __init__(self, decoder: Decoder, blocks: int, mesh: Mesh, codes: bool = False) -> None:
        self.mesh, self.size, self.coord = mesh, mesh.size(RING), mesh.coord(RING)
        self.boundary = AxisBoundary(mesh, RING, False, dim=0)
        super().__init__(decoder, -(-blocks // self.size), codes=codes)
        self.written, self.slots = torch.empty(0), torch.empty(0)  # of the tokens that it owns
        # By window and chunk.
        self._owned: dict[tuple[int | None, int | None], list[OwnedKeys]] = {}

    def owns(self, block: int) -> bool:
        """Whether a block is on this rank."""
        return block % self.size == self.coord

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        own = [copy for copy in copies if self.owns(copy.source)]
        if own:  # source and target have one owner
            pages = [BlockCopy(*(block // self.size for block in copy)) for copy in own]
            super().copy_blocks(pages)

    def begin(self, step: StepTensors) -> None:
        super().begin(step)
        device, self._owned = step.slots.device, {}
        places = [
            (chunk.table[i // BLOCK], i % BLOCK)
            for chunk in step.chunks
            for i in range(chunk.start, chunk.stop)
        ]
        own_rows = [(row, *slot) for row, slot in enumerate(places) if self.owns(slot[0])]
        slots = [block // self.size * BLOCK + offset for _, block, offset in own_rows]
        self.written = torch.tensor([row for row, *_ in own_rows], dtype=torch.int64, device=device)
        self.slots = torch.tensor(slots, dtype=torch.int64, device=device)

    def attend(
        self, q_MHd: Tensor, k_MKd: Tensor, v_MKv: Tensor, /, pages: LayerPages, info: AttentionInfo
    ) -> Tensor:
        """Write the keys that this rank owns, attend to them with the queries of all ranks, and
        merge the results for its tokens."""
        assert self.step is not None, "no step has begun"
        q_THd, k_TKd, v_TKv = self._all_tokens(q_MHd, k_MKd, v_MKv)
        if len(self.written):
            pages.write(self.slots, k_TKd[self.written], v_TKv[self.written])
        chunks, key = self.step.chunks, (info.window, info.chunk)
        if key not in self._owned:
            self._owned[key] = [self._owned_keys(sequence_chunk, info) for sequence_chunk in chunks]
        outputs, wide = list[Tensor](), torch.promote_types(q_THd.dtype, torch.float32)
        by_sequence = torch.split(q_THd, [len(sequence_chunk.tokens) for sequence_chunk in chunks])
        for q_nHd, chunk, owned in zip(by_sequence, chunks, self._owned[key], strict=True):
            positions_n = torch.arange(chunk.start, chunk.stop, device=q_nHd.device)
            read = pages.read(owned.pages, wide)
            k_LKd, v_LKv = (tensor[: len(owned.positions_L)] for tensor in read)
            hidden_nL = hidden_pairs(positions_n, owned.positions_L, info)
            outputs.append(attend_part(q_nHd, k_LKd, v_LKv, hidden_nL, info))
        parts_CMHw = self._to_their_ranks(torch.cat(outputs))
        return merge_parts(parts_CMHw, info.sinks).to(q_MHd.dtype)

    def _all_tokens(self, *each_M: Tensor) -> list[Tensor]:
        """Queries, keys and values of all ranks, by one gather."""
        widths = [tensor[0].numel() for tensor in each_M]
        rows = self.boundary.gather(torch.cat([tensor.flatten(1) for tensor in each_M], dim=1))
        parts = torch.split(rows, widths, dim=1)
        return [
            part.unflatten(1, tensor.shape[1:]) for part, tensor in zip(parts, each_M, strict=True)
        ]

    def _owned_keys(self, chunk: SequenceChunk, info: AttentionInfo) -> OwnedKeys:
        first = first_seen(chunk.start, info) // BLOCK
        seen = range(first, blocks_of(chunk.stop))  # some query sees some of each
        own_blocks = [i for i in seen if self.owns(chunk.table[i])]
        device = self.slots.device
        pages = torch.tensor([chunk.table[i] // self.size for i in own_blocks], dtype=torch.int64)
        places = torch.tensor([i * BLOCK for i in own_blocks], dtype=torch.int64)[:, None]
        positions_L = (places + torch.arange(BLOCK)).flatten()
        # Only the last block may be filled in part.
        return OwnedKeys(pages.to(device), positions_L[positions_L < chunk.stop].to(device))

    def _to_their_ranks(self, parts_THw: Tensor) -> Tensor:
        """What all ranks have found for the tokens of this one, (C, M, H, w)."""
        share = [len(parts_THw) // self.size] * self.size

        def start(group: dist.ProcessGroup) -> transport.Pending:
            return transport.exchange(parts_THw, share, share, group)

        came = self.mesh.issue(RING, "all_to_all", parts_THw, start).wait()
        return came.unflatten(0, (self.size, -1))


def attend_part(
    q_nHd: Tensor, k_LKd: Tensor, v_LKv: Tensor, hidden_nL: Tensor, info: AttentionInfo
) -> Tensor:
    """Attention over some of the keys, (n, H, v + 1); the last number is the log-sum-exp, −inf
    without keys. Without sinks."""
    scores_KGnL = scores_of(q_nHd, k_LKd, hidden_nL, info)
    v_K1Lv = v_LKv.to(scores_KGnL.dtype).transpose(0, 1)[:, None]
    lse_KGn1 = scores_KGnL.logsumexp(-1, keepdim=True)
    odds_KGnL = (scores_KGnL - lse_KGn1.masked_fill(lse_KGn1.isneginf(), 0)).exp()
    part_KGnw = torch.cat([odds_KGnL @ v_K1Lv, lse_KGn1], dim=-1)
    return part_KGnw.permute(2, 0, 1, 3).flatten(1, 2)


def merge_parts(parts_CMHw: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Merge attention over parts of the keys; sinks are added once."""
    out_CMHv, lse_CMH1 = parts_CMHw[..., :-1], parts_CMHw[..., -1:]
    lse_MH1 = lse_CMH1.logsumexp(0)
    if sinks_H is not None:
        lse_MH1 = torch.logaddexp(lse_MH1, sinks_H.to(lse_MH1.dtype)[:, None])
    return (out_CMHv * (lse_CMH1 - lse_MH1).exp()).sum(0)
