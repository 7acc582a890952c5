"""The context dimension: one row of tokens over several ranks.

Splits   every row of tokens, and with it all activations, over cp = inner · outer ranks: the
         `outer` places form a ring, and the `inner` ranks of a place share its tokens by heads.
Moves    for attention only, in each layer. Ring: keys and values pass from place to place,
         outer − 1 hops forward; backward again, and their gradients with them, outer hops.
         All-gather: all keys and values at once, twice, and a reduce-scatter of their gradients.
         Ulysses: four all-to-alls forward (queries, keys, values, outputs) and four backward.
Costs    ring and all-gather 2·KV·(n − 1)/n, whatever the number of query heads; Ulysses
         2·(queries + KV)/n, less the more ranks there are.
Wins     when one sequence does not fit, or its attention takes too long.
Refuses  rows shorter than the cut, and for Ulysses heads that do not divide.

Tokens, positions, labels and documents are cut alike. A hop overlaps the attention on the block
that came before, so that a place never holds more than two blocks of keys and values. Merged
outputs and all gradients are float32 or wider.

Legend: B rows, H query heads, K key/value heads, S tokens, d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.core.layout import RING, ULYSSES, AttentionCall, ContextSplit, Ranges, attention_calls
from fivefold.core.model import MixerTokens
from fivefold.model import (
    NOT_COUNTED,
    AttentionInfo,
    MixerInputs,
    MixerLayer,
    TokenBatch,
    mixed,
    rotary_tables,
    sinks_gradient,
)
from fivefold.model.kernels import (
    MergedAttention,
    VisiblePairs,
    accumulate,
    attend,
    attend_backward,
)
from fivefold.parallel import transport
from fivefold.parallel.mesh import Issued, Mesh
from fivefold.parallel.stage import Stage

TOKENS, HEADS = 2, 1  # dims of (B, H, S, d)


def shard(batch: TokenBatch, split: ContextSplit, seq: int, coord: int) -> TokenBatch:
    """Pad rows to `seq` tokens, and return this context rank's tokens of them."""
    full_batch = _padded(batch, seq - batch.tokens.shape[1])
    if split.inner * split.outer == 1:
        return full_batch
    index = token_index(split.rank_tokens(seq, coord), batch.tokens.device)
    always = [
        tensor[:, index] for tensor in (full_batch.tokens, full_batch.labels, full_batch.positions)
    ]
    ahead = tuple((token[:, index], label[:, index]) for token, label in full_batch.ahead)
    fields = (full_batch.keys, full_batch.replayed, full_batch.outgrown)
    extra = [None if tensor is None else tensor[:, index] for tensor in fields]
    return TokenBatch(*always, full_batch.documents, full_batch, ahead, *extra)


def _padded(batch: TokenBatch, missing: int) -> TokenBatch:
    """Padding after the row: no earlier token sees it, and it has no loss."""
    if not missing:
        return batch
    rows, seq = batch.tokens.shape
    positions = torch.arange(seq, seq + missing, device=batch.tokens.device).expand(rows, -1)

    def padded(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (
            torch.cat([tokens, torch.zeros_like(positions)], dim=1),
            torch.cat([labels, torch.full_like(positions, NOT_COUNTED)], dim=1),
        )

    replayed = batch.replayed
    if replayed is not None:
        replayed = torch.cat(
            [replayed, replayed.new_full((rows, missing, *replayed.shape[2:]), -1)], dim=1
        )
    return TokenBatch(
        *padded(batch.tokens, batch.labels),
        torch.cat([batch.positions, positions], dim=1),
        None if batch.documents is None else batch.documents.padded(missing),
        ahead=tuple(padded(*pair) for pair in batch.ahead),
        keys=None if batch.keys is None else torch.cat([batch.keys, positions], dim=1),
        replayed=replayed,
        outgrown=None if batch.outgrown is None else F.pad(batch.outgrown, (0, missing)),
    )


def split_rows(stage: Stage) -> None:
    """Replace the kernel of every attention by one over all context ranks."""
    plan, split = stage.plan, stage.plan.split
    if split.inner * split.outer == 1:
        return
    for block in stage.model.all_blocks():
        if isinstance(block.attention, MixerLayer):
            block.attention.kernel = ContextMixer(stage.mesh)
        else:
            block.attention.kernel = ContextAttention(stage.mesh, split, plan.padded_seq)


class ContextAttention:
    """The attention of one layer over the tokens of all context ranks."""

    def __init__(self, mesh: Mesh, split: ContextSplit, seq: int) -> None:
        self.mesh, self.split = mesh, split
        self.ring_tokens = [split.ring_tokens(seq, index) for index in range(split.outer)]
        self.ring_coord = mesh.coord(RING)
        self.row = (range(seq),)

    @property
    def tokens(self) -> Ranges:
        """Tokens whose queries this rank computes."""
        return self.ring_tokens[self.ring_coord]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, info: AttentionInfo) -> Tensor:
        if k.shape[-1] != v.shape[-1]:
            return self._in_one_width(q, k, v, info)
        if self.split.inner == 1:
            return _Attention.apply(q, k, v, self, info, info.sinks)
        copies = math.lcm(k.shape[HEADS], self.split.inner) // k.shape[HEADS]
        if copies > 1:  # fewer heads than ranks: each goes to several
            k, v = (tensor.repeat_interleave(copies, dim=HEADS) for tensor in (k, v))
        q, k, v = (_Exchange.apply(tensor, self, HEADS) for tensor in (q, k, v))
        sinks = info.sinks_of(self.mesh.coord(ULYSSES), self.split.inner)
        return _Exchange.apply(_Attention.apply(q, k, v, self, info, sinks), self, TOKENS)

    def _in_one_width(self, q: Tensor, k: Tensor, v: Tensor, info: AttentionInfo) -> Tensor:
        """Latent attention: keys and values travel together, and kernels want one width.

        Kernels divide scores by the root of that width, which zeros must not change.
        """
        key_width, value_width = k.shape[-1], v.shape[-1]
        width = max(key_width, value_width)
        if width > key_width:
            q = q * math.sqrt(width / key_width)
        q, k, v = (F.pad(tensor, (0, width - tensor.shape[-1])) for tensor in (q, k, v))
        return self(q, k, v, info)[..., :value_width]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, info: AttentionInfo) -> MergedAttention:
        """Merge the results of the attention with every block of keys and values."""
        total = MergedAttention(q)
        for keys, kv_block in self._ring_blocks(k, v):
            for call in attention_calls(self.tokens, keys, info.window):
                sees = self._sees(call, keys, info, q.shape[HEADS])
                if _sees_nothing(sees):
                    continue
                queries = q[:, :, call.q_start : call.q_stop]
                theirs = kv_block[:, :, :, call.k_start : call.k_stop]
                out, lse = attend(queries, *theirs, sees)
                total.merge(call.q_start, call.q_stop, out, lse)
                del theirs
            del kv_block  # before the next one comes
        return total

    def attend_backward(
        self, grad_out: Tensor, saved: Sequence[Tensor], info: AttentionInfo
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this rank's queries, keys and values."""
        q, k, v, out, lse = saved
        dq, ring_grad = _Sum(q.shape, q), RingGrad(self)
        for keys, kv_block in self._ring_blocks(k, v):
            part = _Sum(kv_block.shape, q, ring_grad.waited())
            for call in attention_calls(self.tokens, keys, info.window):
                sees = self._sees(call, keys, info, q.shape[HEADS])
                if _sees_nothing(sees):
                    continue
                rows, columns = slice(call.q_start, call.q_stop), slice(call.k_start, call.k_stop)
                local_parts = [tensor[:, :, rows] for tensor in (grad_out, q, out, lse)]
                theirs = kv_block[:, :, :, columns]
                grads = attend_backward(
                    local_parts[0], local_parts[1], *theirs, local_parts[2], local_parts[3], sees
                )
                dq.add((..., rows, slice(None)), grads[0])
                for number in (0, 1):
                    part.add((number, ..., columns, slice(None)), grads[1 + number])
                del theirs
            del kv_block  # before the next one comes
            ring_grad.send(part.value())
        return dq.value().to(q.dtype), *ring_grad.arrived().to(q.dtype).unbind(0)

    def _ring_blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[Ranges, Tensor]]:
        """The keys and values of every place, as they come, and which tokens they are."""
        local_kv = torch.stack((k, v))
        if self.split.gathers and self.split.outer > 1:
            yield self.row, self._gathered(local_kv)
            return
        for hop in range(self.split.outer):
            has_next = hop < self.split.outer - 1
            coming = self.mesh.pass_on(local_kv, RING) if has_next else None
            yield self.ring_tokens[(self.ring_coord - hop) % self.split.outer], local_kv
            if coming is not None:
                local_kv = coming.wait()

    def _gathered(self, local_kv: Tensor) -> Tensor:
        """The keys and values of the row, in its order."""
        full_kv = local_kv.new_empty((self.split.outer * local_kv.shape[0], *local_kv.shape[1:]))
        self.mesh.all_gather(full_kv, local_kv, RING).wait()
        parts = full_kv.chunk(self.split.outer)
        return torch.cat([parts[index][:, :, :, cut] for index, cut in self._ranges()], dim=3)

    def scattered(self, full_grad: Tensor) -> Tensor:
        """Reduce-scatter the gradients of a row; returns this rank's tokens."""
        by_place = [
            torch.cat([full_grad[:, :, :, span.start : span.stop] for span in ranges], dim=3)
            for ranges in self.ring_tokens
        ]
        local_shard = torch.empty_like(by_place[0])
        self.mesh.reduce_scatter(local_shard, torch.cat(by_place), RING).wait()
        return local_shard

    def _ranges(self) -> list[tuple[int, slice]]:
        """The place of every contiguous range of the row, and where that place holds it."""
        entries: list[tuple[int, int, slice]] = []
        for index, ranges in enumerate(self.ring_tokens):
            offset = 0
            for span in ranges:
                entries.append((span.start, index, slice(offset, offset + len(span))))
                offset += len(span)
        return [
            (ring_index, cut) for _, ring_index, cut in sorted(entries, key=lambda entry: entry[0])
        ]

    def _sees(
        self, call: AttentionCall, keys: Ranges, info: AttentionInfo, num_heads: int
    ) -> VisiblePairs:
        row, documents, window = info.row, info.documents, None
        assert row is not None, "a batch that was not cut for the context ranks"
        if call.masked and keys == self.tokens and len(keys) == 1:  # a window over tokens in order
            call, window = call._replace(causal=True, masked=False), info.window
        if documents is not None and documents.one_a_row and window is None:
            documents = None  # this call is not limited by any
        if not call.masked and info.dropout is None:
            pairs = None if documents is None else documents.pairs(self.tokens, keys, call)
            return VisiblePairs(call.causal, documents=pairs, window=window, cap=info.cap)
        device = row.positions.device
        q_index = token_index(self.tokens, device)[call.q_start : call.q_stop]
        k_index = token_index(keys, device)[call.k_start : call.k_stop]
        keep_mask, scale = None, 1.0
        if info.dropout is not None:
            skipped = num_heads * self.mesh.coord(ULYSSES)  # heads of the ranks before, in a place
            keep_mask = info.dropout.keeps(num_heads, q_index, k_index, skipped)
            scale = info.dropout.scale
        distance = row.positions[:, q_index, None] - row.positions[:, None, k_index]
        visible = distance >= 0
        if info.window is not None:
            visible &= distance < info.window
        if documents is not None:
            numbers = documents.numbers(device)
            visible &= numbers[:, q_index, None] == numbers[:, None, k_index]
        return VisiblePairs(False, visible[:, None], keep_mask, scale, cap=info.cap)


def _sees_nothing(sees: VisiblePairs) -> bool:
    """Whether queries and keys of a call have no document in common."""
    return sees.documents is not None and not sees.documents.spans


class _Sum:
    """Sum of gradients of tokens, in float32 or wider, on top of what was received."""

    def __init__(
        self, shape: torch.Size, like: Tensor, arriving: Callable[[], Tensor | None] | None = None
    ) -> None:
        self.shape, self.device, self.arriving = shape, like.device, arriving
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        self.total: Tensor | None = None

    def add(self, where: tuple[Any, ...], part: Tensor) -> None:
        if self.total is None and self.arriving is None and part.shape == self.shape:
            self.total = part.to(self.dtype)
            return
        accumulate(self.value()[where], part)

    def value(self) -> Tensor:
        """The sum so far; the first use waits for what is still on its way."""
        if self.total is None and self.arriving is not None:
            self.total = self.arriving()
        if self.total is None:
            self.total = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self.total


class RingGrad:
    """Gradients of keys and values that travel around the ring; every rank adds its part."""

    def __init__(self, attention: ContextAttention) -> None:
        self.attention = attention
        self.coming: Issued | None = None
        self.result: Tensor | None = None

    def waited(self) -> Callable[[], Tensor | None]:
        """A function that waits for the gradients sent by the previous rank, if any."""
        coming = self.coming
        return lambda: None if coming is None else coming.wait()

    def send(self, part: Tensor) -> None:
        """Send the gradients to the next rank; without a ring, store the result."""
        attention = self.attention
        if attention.split.outer == 1:
            self.result = part
        elif attention.split.gathers:
            self.result = attention.scattered(part)
        else:
            self.coming = attention.mesh.pass_on(part, RING)

    def arrived(self) -> Tensor:
        if self.result is None:
            assert self.coming is not None
            self.result = self.coming.wait()
        return self.result


class _Attention(torch.autograd.Function):
    """Attention whose backward sends keys and values again instead of saving them."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: Any, info: Any, sinks: Tensor | None
    ) -> Tensor:
        out, lse = attention.attend(q, k, v, info).result(q.dtype, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.attention, ctx.info = attention, replace(info, sinks=None)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (grad,), (*saved, sinks) = gradients, ctx.saved_tensors
        grads = ctx.attention.attend_backward(grad, saved, ctx.info)
        of_sinks = None if sinks is None else sinks_gradient(grad, *saved[3:], sinks)
        return (*grads, None, None, of_sinks)


class _HasMesh(Protocol):
    mesh: Mesh


class ContextMixer:
    """A custom mixer over the tokens of all context ranks: each rank computes all tokens for some
    of the heads."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __call__(self, layer: MixerLayer, inputs: MixerInputs) -> Tensor:
        mesh, shape, row = self.mesh, layer.shape, inputs.row
        assert row is not None, "a batch that was not cut for the context ranks"
        size, coord, tp = mesh.size(ULYSSES), mesh.coord(ULYSSES), mesh.size("tp")
        heads = {"heads": shape.heads // tp, "kv_heads": shape.kv_heads // tp}
        outputs = {
            name: self._exchanged(tensor, heads[layer.splits[name]], HEADS)
            for name, tensor in inputs.projections.items()
        }
        params = {
            name: tensor.chunk(size)[coord] if layer.splits[name] in heads else tensor
            for name, tensor in inputs.params.items()
        }
        rotary = inputs.tokens.rotary
        if rotary is not None:
            rotary = rotary_tables(shape, row.positions, rotary[0].dtype, row.outgrown)
        output = mixed(layer, MixerInputs(outputs, params, MixerTokens(row.positions, rotary), row))
        return self._exchanged(output, heads["heads"] // size, TOKENS)

    def _exchanged(self, x_BSO: Tensor, heads: int, split_dim: int) -> Tensor:
        x_BHSd = x_BSO.unflatten(-1, (heads, -1)).transpose(1, 2)
        return _Exchange.apply(x_BHSd, self, split_dim).transpose(1, 2).flatten(2)


class _Exchange(torch.autograd.Function):
    """All-to-all over the Ulysses ranks: split one of tokens and heads, join the other."""

    @staticmethod
    def forward(ctx: Any, x_BHSd: Tensor, attention: _HasMesh, split_dim: int) -> Tensor:
        ctx.attention, ctx.split_dim = attention, split_dim
        return _exchanged(x_BHSd, attention.mesh, split_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        other = TOKENS if ctx.split_dim == HEADS else HEADS
        return _exchanged(gradients[0], ctx.attention.mesh, other), None, None


def _exchanged(x_BHSd: Tensor, mesh: Mesh, split_dim: int) -> Tensor:
    size = mesh.size(ULYSSES)
    joined_dim = TOKENS if split_dim == HEADS else HEADS
    parts = torch.stack(x_BHSd.chunk(size, dim=split_dim))
    even = [1] * size
    issued = mesh.issue(
        ULYSSES,
        "all_to_all",
        parts,
        lambda group: transport.exchange(parts, even, even, group),
        yields=True,
    )
    return torch.cat(issued.wait().unbind(0), dim=joined_dim)


@cache
def token_index(ranges: Ranges, device: torch.device) -> Tensor:
    """Indices of these tokens as a tensor, cached."""
    return torch.tensor([token for span in ranges for token in span]).to(device)
