"""The cache of keys and values in pages, and attention over them.

Splits: nothing on one device; with tensor parallelism every rank has the pages of its own heads,
with pipeline parallelism those of its own layers, and every replica those of its own sequences:
sizes are read from the modules. Context parallelism is in `context_cache.py`.
Moves: every token's key and value once into its slot; the pages of a sequence once a layer and step
from there.
Costs: 2 · K · d numbers for a token and layer. Latent attention caches the latent and the rotated
key of all heads, r + p numbers: queries are projected into the space of latents, where all heads
share one key, and what they find there is projected back. Each rank of tp has all latents. In fp8 a
number is a byte, and each head of a key and of a value has a scale of 4 bytes beside it (a latent
one, with its rotated key): all attention, of prompts too, is over what the codes mean.

A slot is block · BLOCK + offset. The kernel here is exact and plain: it gathers the pages of one
sequence after another and computes softmax in float32 or wider. Another of the same signature
(`PagedKernel`) can take its place. What a layer has of its own (window, chunks, cap, sinks) comes
in its `AttentionInfo`, as in training.

Legend: T tokens of a step, H query heads, K key/value heads, G = H / K, N blocks, P tokens of a
block, L keys, d width of a head, v that of a value head, r width of a latent, p of a rotated key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.core.model import BLOCK, kv_pages
from fivefold.generate.requests import BlockCopy
from fivefold.generate.step_tensors import StepTensors
from fivefold.model import (
    Attention,
    AttentionInfo,
    Decoder,
    LatentAttention,
    LowRank,
    soft_cap,
    with_sinks,
)
from fivefold.model.fp8 import CODES, round_rows, weight_values


@dataclass(frozen=True)
class LayerPages:
    """Pages of one layer. With scales their numbers are codes (e4m3) as bytes."""

    keys: Tensor  # (N, P, K, d)
    values: Tensor  # (N, P, K, v)
    key_scales: Tensor | None = None  # (N, P, K), a head's tokens of a block beside one another
    value_scales: Tensor | None = None

    @property
    def is_latent(self) -> bool:
        """Whether values are the first numbers of keys."""
        return self.keys.data_ptr() == self.values.data_ptr()

    def write(self, slots_T: Tensor, k_TKd: Tensor, v_TKv: Tensor) -> None:
        """Write keys and values to their slots."""
        if self.keys.is_cuda:
            from fivefold.generate.paged_kernel import write_pages  # Triton is there only with CUDA

            write_pages(self, slots_T, k_TKd, v_TKv)
            return
        _write(self.keys, self.key_scales, slots_T, k_TKd)
        if not self.is_latent:
            _write(self.values, self.value_scales, slots_T, v_TKv)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors that have memory of their own: values of latents are a view of the keys."""
        own = (self.keys, self.key_scales)
        own = own if self.is_latent else (*own, self.values, self.value_scales)
        return tuple(tensor for tensor in own if tensor is not None)

    def read(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Read keys and values of some blocks, in this order; what codes mean in this type."""
        of_keys = _read(self.keys, self.key_scales, blocks, dtype)
        return of_keys, _read(self.values, self.value_scales, blocks, dtype)


def _write(pages: Tensor, scales: Tensor | None, slots_T: Tensor, x_TKd: Tensor) -> None:
    if scales is not None:
        rows = round_rows([x_TKd.flatten(0, 1)], None)
        scales[slots_T // BLOCK, slots_T % BLOCK] = rows.scale.view(x_TKd.shape[:2])
        x_TKd = rows.codes.view(torch.uint8).view(x_TKd.shape)
    pages.flatten(0, 1).index_copy_(0, slots_T, x_TKd)


def _read(pages: Tensor, scales: Tensor | None, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    x_LKd = pages[blocks].flatten(0, 1)
    if scales is None:
        return x_LKd
    return weight_values(x_LKd.view(CODES["e4m3"]), scales[blocks].flatten(0, 1), dtype)


PagedKernel = Callable[[Tensor, LayerPages, StepTensors, AttentionInfo], Tensor]
"""Of queries (T, H, d), pages, step and layer, to (T, H, v). Positions and documents of the layer
are of the row, which has tokens of many sequences: those of keys are in the step."""


def attend_pages(
    q_THd: Tensor, pages: LayerPages, step: StepTensors, info: AttentionInfo
) -> Tensor:
    """Causal attention of each token over the pages of its sequence."""
    outputs, wide = list[Tensor](), torch.promote_types(q_THd.dtype, torch.float32)
    lengths = [len(sequence_chunk.tokens) for sequence_chunk in step.chunks]
    for q_nHd, chunk, table in zip(
        torch.split(q_THd, lengths), step.chunks, step.tables_SB, strict=True
    ):
        if chunk.fills:
            outputs.append(q_nHd.new_zeros((*q_nHd.shape[:2], pages.values.shape[3])))
            continue
        # Earlier blocks are out of sight of all its queries.
        first = first_seen(chunk.start, info) // BLOCK
        k_LKd, v_LKv = pages.read(table[first : -(-chunk.stop // BLOCK)], wide)
        length = chunk.stop - first * BLOCK
        keys_and_values = k_LKd[:length], v_LKv[:length]
        outputs.append(attend_sequence(q_nHd, *keys_and_values, info, first * BLOCK))
    return torch.cat(outputs)


def attend_sequence(
    q_nHd: Tensor, k_LKd: Tensor, v_LKv: Tensor, info: AttentionInfo, first: int
) -> Tensor:
    """Attention of the last queries over keys that begin at position `first`."""
    positions_L = torch.arange(first, first + len(k_LKd), device=q_nHd.device)
    hidden_nL = hidden_pairs(positions_L[-len(q_nHd) :], positions_L, info)
    scores_KGnL = scores_of(q_nHd, k_LKd, hidden_nL, info)
    v_K1Lv = v_LKv.to(scores_KGnL.dtype).transpose(0, 1)[:, None]
    out_Hnv = (scores_KGnL.softmax(-1) @ v_K1Lv).flatten(0, 1)
    if info.sinks is not None:
        out_Hnv, _ = with_sinks(out_Hnv, scores_KGnL.logsumexp(-1).flatten(0, 1), info.sinks)
    return out_Hnv.transpose(0, 1).to(q_nHd.dtype)


def first_seen(position: int, info: AttentionInfo) -> int:
    """First key that a query at this position attends to; it only grows with the position."""
    if info.chunk is not None:
        return position // info.chunk * info.chunk
    return 0 if info.window is None else max(0, position - info.window + 1)


def hidden_pairs(queries_n: Tensor, keys_L: Tensor, info: AttentionInfo) -> Tensor:
    """Mask of keys that queries do not attend to, by positions in the sequence."""
    queries_n1 = queries_n[:, None]
    hidden_nL = keys_L > queries_n1
    if info.chunk is not None:
        hidden_nL |= keys_L // info.chunk < queries_n1 // info.chunk
    return hidden_nL if info.window is None else hidden_nL | (keys_L <= queries_n1 - info.window)


def scores_of(q_nHd: Tensor, k_LKd: Tensor, hidden_nL: Tensor, info: AttentionInfo) -> Tensor:
    """Scores in float32 or wider, (K, G, n, L), with the layer's cap, −inf where masked."""
    wide = torch.promote_types(q_nHd.dtype, torch.float32)
    (queries, heads, width), kv_heads = q_nHd.shape, k_LKd.shape[1]
    q_nKGd = q_nHd.to(wide).view(queries, kv_heads, heads // kv_heads, width)
    k_K1dL = k_LKd.to(wide).permute(1, 2, 0)[:, None]
    scores_KGnL = (torch.permute(q_nKGd, (1, 2, 0, 3)) @ k_K1dL) * width**-0.5
    if info.cap is not None:
        scores_KGnL = soft_cap(scores_KGnL, info.cap)
    return scores_KGnL.masked_fill(hidden_nL, float("-inf"))


class _LayerKernel:
    """Attention kernel of one module, over its pages."""

    def __init__(self, pages: LayerPages, cache: KvCache) -> None:
        self.pages, self.cache = pages, cache

    def __call__(
        self, q_BHSd: Tensor, k_BKSd: Tensor, v_BKSv: Tensor, info: AttentionInfo
    ) -> Tensor:
        assert q_BHSd.shape[0] == 1, "a step is one row"
        q_THd, k_TKd, v_TKv = (tensor[0].transpose(0, 1) for tensor in (q_BHSd, k_BKSd, v_BKSv))
        out_THv = self.cache.attend(q_THd, k_TKd, v_TKv, self.pages, info)
        return out_THv.transpose(0, 1)[None]


class _LatentLayerKernel:
    """Attention kernel of latent attention: one key of r + p numbers for all heads, whose latent is
    the value as well."""

    def __init__(self, attention: LatentAttention, pages: LayerPages, cache: KvCache) -> None:
        self.attention, self.pages, self.cache = attention, pages, cache

    def __call__(
        self, q_BSHd: Tensor, latent_BSr: Tensor, key_BSp: Tensor, info: AttentionInfo
    ) -> Tensor:
        mla = self.attention.mla
        assert q_BSHd.shape[0] == 1, "a step is one row"
        kv_up, adapter = self.attention.kv_up, self.attention.kv_up.lora
        up = weight_values(kv_up.weight, kv_up.row_scale, q_BSHd.dtype)
        keys_Hnr, values_Hvr = self._keys_and_values(up, q_BSHd.shape[2])
        plain_THn, rotated_THp = torch.split(q_BSHd[0], [mla.nope_dim, mla.rope_dim], dim=-1)
        inward_THr = _by_head("thn,hnr->thr", plain_THn, keys_Hnr)
        if adapter is not None:
            keys_HnR, _ = self._keys_and_values(adapter.b, q_BSHd.shape[2])
            low_THR = _selected(adapter, _by_head("thn,hnR->thR", plain_THn, keys_HnR))
            inward_THr = inward_THr + _by_head("thR,Rr->thr", low_THR, adapter.a)
        # Kernels divide scores by the root of the width that they see.
        width = mla.kv_rank + mla.rope_dim
        scale = (width / self.attention.head_dim) ** 0.5
        q_THd = torch.cat([inward_THr, rotated_THp], dim=-1) * scale
        k_T1d = torch.cat([latent_BSr[0], key_BSp[0]], dim=-1)[:, None]
        latent_T1r = latent_BSr[0][:, None]
        found_THr = self.cache.attend(q_THd, k_T1d, latent_T1r, self.pages, info)
        out_THv = _by_head("thr,hvr->thv", found_THr, values_Hvr)
        if adapter is not None:
            _, values_HvR = self._keys_and_values(adapter.b, q_BSHd.shape[2])
            low_THR = _selected(adapter, _by_head("thr,Rr->thR", found_THr, adapter.a))
            out_THv = out_THv + _by_head("thR,hvR->thv", low_THR, values_HvR)
        return out_THv[None]

    def _keys_and_values(self, weight_OX: Tensor, heads: int) -> tuple[Tensor, ...]:
        """Rows of the up projection, or of its adapter, for keys and for values of all heads."""
        widths = [self.attention.mla.nope_dim, self.attention.mla.value_dim]
        return torch.split(weight_OX.view(heads, -1, weight_OX.shape[1]), widths, dim=1)


def _selected(adapter: LowRank, low_THR: Tensor) -> Tensor:
    """What each token has of its adapter, in all heads."""
    return adapter.select(low_THR.flatten(1)).view_as(low_THR) * adapter.scale


def _by_head(formula: str, x: Tensor, weight: Tensor) -> Tensor:
    """A matmul for each head. A CPU multiplies in float32 or wider: its narrow matmuls compute rows
    by other instructions, as many threads as there are."""
    if x.is_cuda:
        return torch.einsum(formula, x, weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.einsum(formula, x.to(wide), weight.to(wide)).to(x.dtype)


class KvCache:
    """Pages of all layers of a decoder or a stage; replaces the kernels of their attention."""

    def __init__(
        self,
        decoder: Decoder,
        blocks: int,
        kernel: PagedKernel = attend_pages,
        codes: bool = False,
    ) -> None:
        """`codes`: keys and values in fp8."""
        self.kernel: PagedKernel = kernel
        self.step: StepTensors | None = None
        self.pages: dict[int, LayerPages] = {}  # by layer
        for block in decoder.all_blocks():
            attention = block.attention
            assert isinstance(attention, Attention | LatentAttention)
            device, sizes = attention.out.weight.device, page_sizes(attention)
            dtype = torch.uint8 if codes else decoder.dtype
            pages = [
                torch.zeros(blocks, BLOCK, *size, dtype=dtype, device=device) for size in sizes
            ]
            scales = [
                torch.zeros(blocks, heads, BLOCK, device=device).transpose(1, 2) if codes else None
                for heads, _ in sizes
            ]
            if isinstance(attention, Attention):
                layer_pages = LayerPages(*pages, *scales)
                attention.kernel = _LayerKernel(layer_pages, self)
            else:
                # Values are keys without their rotated part.
                latents = pages[0][..., : attention.mla.kv_rank]
                layer_pages = LayerPages(pages[0], latents, scales[0], scales[0])
                attention.latent_kernel = _LatentLayerKernel(attention, layer_pages, self)
            self.pages[block.number] = layer_pages

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks in all layers. All sources are read before a target is written."""
        copy_rows([tensor for pages in self.pages.values() for tensor in pages.stored], copies)

    def begin(self, step: StepTensors) -> None:
        """Use this step in the kernels from now on. What its attention shares is computed again,
        since a captured step does so in every replay."""
        self.step = step
        step.work.clear()

    def attend(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKv: Tensor, /, pages: LayerPages, info: AttentionInfo
    ) -> Tensor:
        """Write new keys and values to the pages of a layer, and attend to all of them."""
        assert self.step is not None, "no step has begun"
        pages.write(self.step.slots, k_TKd, v_TKv)
        return self.kernel(q_THd, pages, self.step, info)


def copy_rows(tensors: Sequence[Tensor], copies: Sequence[BlockCopy]) -> None:
    """Copy some rows of tensors of one device to others; all are read before one is written."""
    numbers, device = torch.tensor(copies, dtype=torch.int64), tensors[0].device
    if device.type == "cuda":  # from other memory, the host would wait for the steps before
        numbers = numbers.pin_memory()
    sources, targets = numbers.to(device, non_blocking=True).unbind(1)
    for tensor in tensors:
        tensor.index_copy_(0, targets, tensor[sources])


def page_sizes(attention: Attention | LatentAttention) -> tuple[tuple[int, int], ...]:
    """Heads and widths of a token's key and value, from weights or their shards. A latent is
    both."""
    if isinstance(attention, Attention):
        kv_heads = attention.k.weight.shape[0] // attention.head_dim
        return kv_pages.page_sizes(kv_heads, attention.head_dim, None)
    return kv_pages.page_sizes(1, attention.head_dim, attention.mla)


def token_bytes(decoder: Decoder, codes: bool = False) -> int:
    """Bytes of the cache for one token, in all layers, with those of multi-token prediction;
    `codes`: in fp8."""
    total, itemsize = 0, 1 if codes else decoder.dtype.itemsize
    for block in decoder.all_blocks():
        attention = block.attention
        assert isinstance(attention, Attention | LatentAttention)
        total += kv_pages.layer_bytes(page_sizes(attention), itemsize)
    return total
