"""Attention over pages, for decode and prompts of any number of sequences, as Triton kernels.

A program computes a tile of queries (some tokens of a sequence, with query heads of one key head)
over a range of the keys of that sequence, with a running softmax in float32. In decode a tile is
one token, and the keys are cut into parts of `PART_KEYS`, as many as each sequence has; a second
kernel merges the parts of a token in their order. Prompts have tiles of many tokens, and parts only
where the tiles are too few to fill a GPU. What a layer has of its own is in the same kernel:
windows, chunks, capped scores, sinks, and values that are the first numbers of keys, as latents.

Codes of fp8 are widened in registers, to float16 where queries have 16 bits: an H200 has an
instruction for that, and none to bfloat16. Queries are divided by a power of two before, so that
none is too large. The scale of a key multiplies its scores, that of a value its odds.

Where tiles of keys begin depends on nothing but positions, and a tile of keys that a query does not
see changes no bit of it. So a decoding sequence has the same result alone and beside others.

Legend: T tokens, S sequences, H query heads, K key/value heads, G = H / K, P tokens of a block, B
blocks of a table, d width of a head, v that of a value head, C parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.core.layout import LARGEST, LEAST_MAXIMUM
from fivefold.generate.pdl_kernel import begin_early, begins_early
from fivefold.generate.step_tensors import PART_KEYS, SequenceRows
from fivefold.generate.tile_kernel import widened

if TYPE_CHECKING:
    from fivefold.generate.cache import LayerPages

_PROMPT_KEYS = 1024  # of a part of few prompt tokens, at least
_PROGRAMS = 512  # that fill a GPU
# Parts that a program of the merge reads at once, and columns of a head.
_MERGED, _MERGED_COLUMNS, _MERGE_WARPS = 32, 128, 1
_LEAST_ROWS = 16  # of a matmul on tensor cores
_LOWEST = tl.constexpr(-3.0e38)  # below every score, and finite: differences are no NaN
_LOG2E = tl.constexpr(1.4426950408889634)  # exponents here are of 2
_WINDOW, _CHUNK = 1, 2
_MOST_CODE, _LEAST = tl.constexpr(LARGEST["e4m3"]), tl.constexpr(LEAST_MAXIMUM)


class Tiling(NamedTuple):
    """Sizes of a program: query rows, keys of a matmul, warps and stages of its loop."""

    rows: int
    keys: int
    warps: int
    stages: int


class LayerMask(NamedTuple):
    """What a query sees of its sequence, and what happens to its scores."""

    kind: int  # 0: all earlier keys
    reach: int  # keys of the window or of a chunk
    cap: float | None
    sinks_H: Tensor | None

    @classmethod
    def of(
        cls, window: int | None, chunk: int | None, cap: float | None, sinks_H: Tensor | None
    ) -> LayerMask:
        """Of a layer's attention; chunks go before the window that they are cut by."""
        if chunk is not None:
            return cls(_CHUNK, chunk, cap, sinks_H)
        return cls(0 if window is None else _WINDOW, window or 0, cap, sinks_H)


class DecodeParts(NamedTuple):
    """Parts of the keys of all decoding sequences, one after another."""

    firsts: Tensor  # (S + 1,) the first part of each sequence, and their number
    owners: Tensor  # (C,) the sequence of each part
    capacity: int


class PromptTiles(NamedTuple):
    """Tiles of prompt tokens."""

    sequences: Tensor  # of each tile
    tokens: Tensor  # the first token of each tile, within its chunk
    count: int
    first_token: int  # of the step, in a tile
    most_keys: int  # of their sequences


def tiling(width: int, itemsize: int, heads: int, prompt: bool) -> Tiling:
    """Sizes for heads of this width, of which a key head serves so many. They fill the registers
    and the shared memory of a Hopper GPU, and no more."""
    group = max(_LEAST_ROWS, triton.next_power_of_2(heads))
    if width > 256:  # latents
        most, keys = (64, 32) if itemsize == 2 else (16, 16)
    elif width > 128:
        most, keys = (64, 32) if itemsize == 2 else (32, 16)
    else:
        most, keys = (128, 64) if itemsize == 2 else (32, 32)
    if not prompt:  # of few keys each: more programs at a time, and not more reads in each
        return Tiling(min(most, group), keys, 4, 2)
    return Tiling(most, keys, 8 if most * width >= 64 * 128 else 4, 2 if itemsize == 4 else 3)


def tile_tokens(width: int, itemsize: int, heads: int) -> int:
    """Tokens of a prompt in one tile."""
    rows = tiling(width, itemsize, heads, True).rows
    return rows // min(rows, triton.next_power_of_2(heads))


@triton.jit
def _first_key(position: tl.tensor, reach: int, KIND: tl.constexpr) -> tl.tensor:
    """First key that queries at these positions see."""
    if KIND == 1:
        return tl.maximum(position - reach + 1, 0)
    elif KIND == 2:
        return position // reach * reach
    else:
        return position * 0


@triton.jit
def _power_of_two(x: tl.tensor) -> tl.tensor:
    """The largest power of two that is not above a number; of zero a small one."""
    bits = tl.maximum(x, 1e-36).to(tl.int32, bitcast=True)
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _scan_keys(
    queries: tl.tensor,
    queries_rest: tl.tensor,
    out: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    positions: tl.tensor,
    firsts: tl.tensor,
    start: int,
    stop: int,
    lowest: int,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
    table_ptr: tl.tensor,
    kv_head: int,
    scale: tl.tensor,
    cap: float,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    CODES: tl.constexpr,
    LATENT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Continue the running softmax over the keys from `start` to `stop`."""
    column, tail = tl.arange(0, MAIN), MAIN + tl.arange(0, REST)
    value_column = tl.arange(0, VALUE_BLOCK)
    for first in range(start, stop, TILE):
        key = first + tl.arange(0, TILE)
        is_key = key < stop
        block = tl.load(table_ptr + key // PAGE, is_key, other=0).to(tl.int64)
        row = (block * PAGE + key % PAGE) * KV_HEADS + kv_head
        key_ptr = keys_ptr + row[:, None] * WIDTH
        is_column = is_key[:, None] & (column < WIDTH)[None, :]
        k = widened(tl.load(key_ptr + column[None, :], is_column, other=0), queries.dtype, CODES)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if WIDTH > MAIN:
            is_rest = is_key[:, None] & (tail < WIDTH)[None, :]
            k_rest = tl.load(key_ptr + tail[None, :], is_rest, other=0)
            k_rest = widened(k_rest, queries.dtype, CODES)
            scores += tl.dot(queries_rest, tl.trans(k_rest), input_precision="ieee")
        if CODES:
            # Blocks of keys that nobody sees any more may be of other sequences.
            at, seen_by_some = (block * KV_HEADS + kv_head) * PAGE + key % PAGE, key >= lowest
            key_scale = tl.load(key_scales_ptr + at, is_key & seen_by_some, other=0.0)
            value_scale = key_scale
            if not LATENT:
                value_scale = tl.load(value_scales_ptr + at, is_key & seen_by_some, other=0.0)
            scores *= scale[:, None] * key_scale[None, :]
        else:
            scores *= scale
        if CAPPED:
            scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
        if MASKED:
            seen = (key[None, :] <= positions[:, None]) & (key[None, :] >= firsts[:, None])
            seen = seen & is_key[None, :]
            scores = tl.where(seen, scores, _LOWEST)
            higher = tl.maximum(highest, tl.max(scores, 1))
            odds = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        else:
            higher = tl.maximum(highest, tl.max(scores, 1))
            odds = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(highest - higher)
        if LATENT:
            v = k
        else:
            is_value = is_key[:, None] & (value_column < VALUE)[None, :]
            value_ptr = values_ptr + row[:, None] * VALUE_ROW + value_column[None, :]
            v = widened(tl.load(value_ptr, is_value, other=0), queries.dtype, CODES)
        total, highest = total * decay + tl.sum(odds, 1), higher
        if CODES:
            unit = _power_of_two(tl.max(value_scale, 0))
            odds *= (value_scale * (1.0 / unit))[None, :]  # below 2, as odds are
            part = tl.dot(odds.to(v.dtype), v, input_precision="ieee") * unit
        else:
            part = tl.dot(odds.to(v.dtype), v, input_precision="ieee")
        out = out * decay[:, None] + part
    return out, highest, total


@triton.jit
def _num_items(firsts_ptr: tl.tensor, num_sequences: int, PROMPT: tl.constexpr) -> tl.tensor:
    """Programs that have work: of decode there may be more."""
    if PROMPT:
        return tl.num_programs(0)
    else:
        return tl.load(firsts_ptr + num_sequences)


@triton.jit
def _item_of(
    items_ptr: tl.tensor, firsts_ptr: tl.tensor, item: tl.tensor, PROMPT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Sequence, first token and part of the keys of a program."""
    sequence = tl.load(items_ptr + item)
    if PROMPT:
        return sequence, tl.load(firsts_ptr + item), tl.program_id(2)
    else:
        return sequence, item * 0, item - tl.load(firsts_ptr + sequence)


@triton.jit
def _queries(
    query_ptr: tl.tensor,
    is_row: tl.tensor,
    WIDTH: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Rows of queries, and their last numbers where the width is no power of two."""
    column, tail = tl.arange(0, MAIN), MAIN + tl.arange(0, REST)
    is_column = is_row[:, None] & (column < WIDTH)[None, :]
    queries = tl.load(query_ptr[:, None] + column[None, :], is_column, other=0.0)
    if WIDTH > MAIN:
        is_rest = is_row[:, None] & (tail < WIDTH)[None, :]
        return queries, tl.load(query_ptr[:, None] + tail[None, :], is_rest, other=0.0)
    else:
        return queries, queries


@triton.jit
def _operands(
    query_ptr: tl.tensor,
    is_row: tl.tensor,
    scale: float,
    CODES: tl.constexpr,
    WIDTH: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Queries and the factor of their scores. Beside codes they are below 2, in the type that codes
    are widened to, and each has its factor."""
    queries, queries_rest = _queries(query_ptr, is_row, WIDTH, MAIN, REST)
    if CODES:
        main, tail = queries.to(tl.float32), queries_rest.to(tl.float32)
        unit = _power_of_two(tl.maximum(tl.max(tl.abs(main), 1), tl.max(tl.abs(tail), 1)))
        factor = (1.0 / unit)[:, None]
        if queries.dtype == tl.float32:
            return main * factor, tail * factor, scale * unit
        else:
            return (main * factor).to(tl.float16), (tail * factor).to(tl.float16), scale * unit
    else:
        return queries, queries_rest, scale


@triton.jit
def _with_sink(
    out: tl.tensor, highest: tl.tensor, total: tl.tensor, sink: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Let a logit without a value take its share."""
    higher = tl.maximum(highest, sink)
    decay = tl.exp2(highest - higher)
    return out * decay[:, None], higher, total * decay + tl.exp2(sink - higher)


@triton.jit
def _store_rows(
    out: tl.tensor,
    total: tl.tensor,
    out_ptr: tl.tensor,
    at: tl.tensor,
    is_row: tl.tensor,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
) -> None:
    """Store sums of values over their totals."""
    value_column = tl.arange(0, VALUE_BLOCK)
    is_value = is_row[:, None] & (value_column < VALUE)[None, :]
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + at[:, None] * VALUE + value_column[None, :], out, is_value)


@triton.jit(do_not_specialize=["table_row", "reach", "span", "num_sequences"])
def _attend(
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    items_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    scale: float,
    cap: float,
    q_row: int,
    q_head: int,
    table_row: int,
    reach: int,
    span: int,
    num_sequences: int,
    PROMPT: tl.constexpr,
    DIRECT: tl.constexpr,
    KIND: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    CODES: tl.constexpr,
    LATENT: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin_early(EARLY)
    item, kv_head = tl.program_id(0), tl.program_id(1) // HEAD_BLOCKS
    if item >= _num_items(firsts_ptr, num_sequences, PROMPT):
        return
    sequence, token, part = _item_of(items_ptr, firsts_ptr, item, PROMPT)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    if PROMPT:
        start = tl.load(starts_ptr + sequence).to(tl.int32)
        num_tokens = tl.load(starts_ptr + sequence + 1).to(tl.int32) - start
    else:
        start, num_tokens = sequence.to(tl.int32), 1
    row = tl.arange(0, ROWS)
    tokens = (token + row // HEADS).to(tl.int32)
    in_group = tl.program_id(1) % HEAD_BLOCKS * HEADS + row % HEADS
    head, is_row = kv_head * GROUP + in_group, (tokens < num_tokens) & (in_group < GROUP)
    positions = length - num_tokens + tokens
    firsts = _first_key(positions, reach, KIND)
    last = tl.minimum(length, length - num_tokens + (token + ROWS // HEADS).to(tl.int32))
    lowest = _first_key(length - num_tokens + token.to(tl.int32), reach, KIND)
    if not PROMPT:
        part += lowest // span
    key, stop = tl.maximum(part * span, lowest // TILE * TILE), tl.minimum((part + 1) * span, last)
    query_ptr = q_ptr + (start + tokens).to(tl.int64) * q_row + head * q_head
    q, q_rest, factor = _operands(query_ptr, is_row, scale, CODES, WIDTH, MAIN, REST)
    highest, total = tl.full((ROWS,), _LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, VALUE_BLOCK), tl.float32)
    table_ptr = tables_ptr + tl.load(rows_ptr + sequence).to(tl.int64) * table_row
    unmasked = key
    if KIND == 0:  # all queries see all keys up to the first query's
        full = (length - num_tokens + token.to(tl.int32) + 1) // TILE * TILE
        unmasked = tl.maximum(key, tl.minimum(stop, full))
        out, highest, total = _scan_keys(
            q, q_rest, out, highest, total, positions, firsts, key, unmasked, lowest, keys_ptr,
            values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, kv_head, factor, cap, False,
            CAPPED, CODES, LATENT, KV_HEADS, WIDTH, MAIN, REST, VALUE, VALUE_BLOCK, VALUE_ROW, PAGE,
            TILE,
        )  # fmt: skip
    out, highest, total = _scan_keys(
        q, q_rest, out, highest, total, positions, firsts, unmasked, stop, lowest, keys_ptr,
        values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, kv_head, factor, cap, True, CAPPED,
        CODES, LATENT, KV_HEADS, WIDTH, MAIN, REST, VALUE, VALUE_BLOCK, VALUE_ROW, PAGE, TILE,
    )  # fmt: skip
    if DIRECT:
        at = (start + tokens).to(tl.int64)
        if SINKS:
            sink = tl.load(sinks_ptr + head, is_row, other=0.0).to(tl.float32) * _LOG2E
            out, highest, total = _with_sink(out, highest, total, sink)
    elif PROMPT:
        at = (start + tokens).to(tl.int64) * tl.num_programs(2) + part
    else:
        at = item.to(tl.int64) + tokens * 0
    at = at * (KV_HEADS * GROUP) + head
    if not DIRECT:
        tl.store(log_sums_ptr + at, tl.where(total > 0, highest + tl.log2(total), _LOWEST), is_row)
    _store_rows(out, total, out_ptr, at, is_row, VALUE, VALUE_BLOCK)


@triton.jit(do_not_specialize=["heads"])
def _merge_parts(
    parts_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    heads: int,
    SINKS: tl.constexpr,
    VALUE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MERGED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin_early(EARLY)
    token, head = tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(firsts_ptr + token), tl.load(firsts_ptr + token + 1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_value = column < VALUE
    highest, total = tl.full((), _LOWEST, tl.float32), tl.zeros((), tl.float32)
    if SINKS:
        highest = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E
        total += 1.0
    out = tl.zeros((COLUMNS,), tl.float32)
    for start in range(first, stop, MERGED):
        part = start + tl.arange(0, MERGED)
        is_part = part < stop
        at = part.to(tl.int64) * heads + head
        log_sums = tl.load(log_sums_ptr + at, is_part, other=_LOWEST)
        higher = tl.maximum(highest, tl.max(log_sums))
        shares = tl.where(is_part, tl.exp2(log_sums - higher), 0.0)
        part_ptr = parts_ptr + at[:, None] * VALUE + column[None, :]
        parts = tl.load(part_ptr, is_part[:, None] & is_value[None, :], other=0.0)
        decay = tl.exp2(highest - higher)
        out = out * decay + tl.sum(parts * shares[:, None], 0)
        total, highest = total * decay + tl.sum(shares), higher
    tl.store(out_ptr + (token * heads + head).to(tl.int64) * VALUE + column, out / total, is_value)


@triton.jit(do_not_specialize=["sequences", "reach"])
def _cut_keys(
    lengths_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    owners_ptr: tl.tensor,
    sequences: int,
    reach: int,
    KIND: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin_early(EARLY)
    sequence, lane = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, sequence, BLOCK):
        length = tl.load(lengths_ptr + start + lane, start + lane < sequence, other=0).to(tl.int32)
        lowest = _first_key(tl.maximum(length - 1, 0), reach, KIND)
        before += tl.where(length > 0, (length + KEYS - 1) // KEYS - lowest // KEYS, 0)
    first, length = tl.sum(before), tl.load(lengths_ptr + sequence).to(tl.int32)
    stop = first + (length + KEYS - 1) // KEYS - _first_key(length - 1, reach, KIND) // KEYS
    tl.store(firsts_ptr + sequence, first)
    if sequence == sequences - 1:
        tl.store(firsts_ptr + sequences, stop)
    for start in range(first, stop, BLOCK):
        tl.store(owners_ptr + start + lane, lane * 0 + sequence, start + lane < stop)


@triton.jit
def _store_head(
    x: tl.tensor,
    pages_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    is_column: tl.tensor,
    CODES: tl.constexpr,
) -> None:
    """Store a head of a token, as codes and a scale with the bits of `round_rows`."""
    if CODES:
        x = x.to(tl.float32)
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), _LEAST), _MOST_CODE)
        tl.store(scale_ptr, scale)
        x = (x * tl.div_rn(1.0, scale)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(pages_ptr, x, is_column)


@triton.jit
def _write_pages(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    k_row: int,
    k_head: int,
    v_row: int,
    v_head: int,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    PAGE: tl.constexpr,
    CODES: tl.constexpr,
    LATENT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin_early(EARLY)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    row, at = slot * KV_HEADS + head, (slot // PAGE * KV_HEADS + head) * PAGE + slot % PAGE
    column, value_column = tl.arange(0, WIDTH_BLOCK), tl.arange(0, VALUE_BLOCK)
    is_column, is_value = column < WIDTH, value_column < VALUE
    k = tl.load(k_ptr + token * k_row + head * k_head + column, is_column, other=0.0)
    _store_head(k, keys_ptr + row * WIDTH + column, key_scales_ptr + at, is_column, CODES)
    if not LATENT:
        v = tl.load(v_ptr + token * v_row + head * v_head + value_column, is_value, other=0.0)
        value_ptr = values_ptr + row * VALUE_ROW + value_column
        _store_head(v, value_ptr, value_scales_ptr + at, is_value, CODES)


def _scales(pages: LayerPages) -> tuple[Tensor, Tensor]:
    """Scales of keys and values, or something that nobody reads."""
    if pages.key_scales is None or pages.value_scales is None:
        return pages.keys, pages.values
    assert pages.key_scales.transpose(1, 2).is_contiguous()
    return pages.key_scales, pages.value_scales


def write_pages(pages: LayerPages, slots_T: Tensor, k_TKd: Tensor, v_TKv: Tensor) -> None:
    """Write keys and values of tokens to their slots."""
    (_, heads, width), value = k_TKd.shape, v_TKv.shape[2]
    assert k_TKd.stride(2) == v_TKv.stride(2) == 1
    _write_pages[(len(slots_T), heads)](
        k_TKd,
        v_TKv,
        pages.keys,
        pages.values,
        *_scales(pages),
        slots_T,
        *k_TKd.stride()[:2],
        *v_TKv.stride()[:2],
        KV_HEADS=heads,
        WIDTH=width,
        WIDTH_BLOCK=triton.next_power_of_2(width),
        VALUE=value,
        VALUE_BLOCK=triton.next_power_of_2(value),
        VALUE_ROW=pages.values.stride(2),
        PAGE=pages.keys.shape[1],
        CODES=pages.key_scales is not None,
        LATENT=pages.is_latent,
        num_warps=1,
        **begins_early(k_TKd),
    )


def cut_keys(lengths_S: Tensor, capacity: int, mask: LayerMask) -> DecodeParts:
    """Cut the keys of decoding sequences into parts, at most `capacity` of them."""
    sequences = len(lengths_S)
    firsts, owners = (lengths_S.new_empty(n, dtype=torch.int32) for n in (sequences + 1, capacity))
    _cut_keys[(sequences,)](
        lengths_S,
        firsts,
        owners,
        sequences,
        mask.reach,
        KIND=mask.kind,
        KEYS=PART_KEYS,
        BLOCK=256,
        num_warps=1,
        **begins_early(lengths_S),
    )
    return DecodeParts(firsts, owners, capacity)


def attend_decode(
    q_THd: Tensor,
    pages: LayerPages,
    step: SequenceRows,
    parts: DecodeParts,
    mask: LayerMask,
    out_THv: Tensor,
) -> None:
    """Attention of the first sequences, with one token each."""
    sequences = len(parts.firsts) - 1
    outputs = _part_outputs(q_THd, parts.capacity, out_THv)
    items, grid = (parts.owners, parts.firsts), (parts.capacity, 1)
    _launch(q_THd, pages, step, items, grid, mask, outputs, PART_KEYS, sequences)
    _merge(outputs, parts.firsts, mask, out_THv[:sequences])


def attend_prompts(
    q_THd: Tensor,
    pages: LayerPages,
    step: SequenceRows,
    tiles: PromptTiles,
    mask: LayerMask,
    out_THv: Tensor,
) -> None:
    """Attention of tiles of tokens. Other tokens after the first one of a tile get no number that
    means anything."""
    items, tokens = (tiles.sequences, tiles.tokens), len(q_THd)
    programs = tiles.count * pages.keys.shape[2]
    parts = min(triton.cdiv(_PROGRAMS, programs), tiles.most_keys // _PROMPT_KEYS)
    if parts <= 1:
        grid, outputs = (tiles.count, 1), (out_THv, out_THv)
        _launch(q_THd, pages, step, items, grid, mask, outputs, 2**30, None)
        return
    span = triton.cdiv(triton.cdiv(tiles.most_keys, parts), PART_KEYS) * PART_KEYS
    outputs, grid = _part_outputs(q_THd, tokens * parts, out_THv), (tiles.count, parts)
    _launch(q_THd, pages, step, items, grid, mask, outputs, span, None)
    first = tiles.first_token
    stop, device = tokens * parts + 1, q_THd.device
    firsts = torch.arange(first * parts, stop, parts, dtype=torch.int32, device=device)
    _merge(outputs, firsts, mask, out_THv[first:])


def _part_outputs(q_THd: Tensor, items: int, out_THv: Tensor) -> tuple[Tensor, Tensor]:
    """Results of parts, and the logarithms of their sums, without values."""
    size = (items, q_THd.shape[1], out_THv.shape[2])
    part_out = q_THd.new_empty(size, dtype=torch.float32)
    return part_out, q_THd.new_empty(size[:2], dtype=torch.float32)


def _launch(
    q_THd: Tensor,
    pages: LayerPages,
    step: SequenceRows,
    items: tuple[Tensor, Tensor],
    grid: tuple[int, int],
    mask: LayerMask,
    outputs: tuple[Tensor, Tensor],
    span: int,
    num_decoding: int | None,
) -> None:
    """Start the programs of decoding sequences, or of tiles of prompts."""
    keys_NPKd, values_NPKv = pages.keys, pages.values
    (_, heads, width), (_, page, kv_heads, value) = q_THd.shape, values_NPKv.shape
    assert q_THd.stride(2) == 1 and keys_NPKd.is_contiguous()
    group, prompt = heads // kv_heads, num_decoding is None
    sizes, main = tiling(width, q_THd.element_size(), group, prompt), _main_width(width)
    group_heads = min(sizes.rows, triton.next_power_of_2(group)) if prompt else sizes.rows
    head_blocks = triton.cdiv(group, group_heads)
    scale, cap = width**-0.5 * _LOG2E.value, 0.0
    if mask.cap is not None:  # of tanh(x) = 1 - 2 / (1 + exp(2x))
        scale, cap = 2 * scale / mask.cap, mask.cap * _LOG2E.value
    _attend[(grid[0], kv_heads * head_blocks, grid[1])](
        q_THd,
        keys_NPKd,
        values_NPKv,
        *_scales(pages),
        step.tables,
        step.rows,
        step.starts,
        step.lengths,
        *items,
        q_THd if mask.sinks_H is None else mask.sinks_H,
        *outputs,
        scale,
        cap,
        *q_THd.stride()[:2],
        step.tables.stride(0),
        mask.reach,
        span,
        num_decoding or 0,
        PROMPT=prompt,
        DIRECT=prompt and grid[1] == 1,
        KIND=mask.kind,
        CAPPED=mask.cap is not None,
        SINKS=mask.sinks_H is not None,
        CODES=pages.key_scales is not None,
        LATENT=pages.is_latent and value == main,
        KV_HEADS=kv_heads,
        GROUP=group,
        HEADS=group_heads,
        HEAD_BLOCKS=head_blocks,
        ROWS=sizes.rows,
        WIDTH=width,
        MAIN=main,
        REST=max(_LEAST_ROWS, triton.next_power_of_2(width - main)),
        VALUE=value,
        VALUE_BLOCK=max(_LEAST_ROWS, triton.next_power_of_2(value)),
        VALUE_ROW=values_NPKv.stride(2),
        PAGE=page,
        TILE=sizes.keys,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
        **begins_early(q_THd),
    )


def _main_width(width: int) -> int:
    """The largest power of two within a width; what is left of it is multiplied beside."""
    return max(_LEAST_ROWS, 1 << (width.bit_length() - 1))


def _merge(
    outputs: tuple[Tensor, Tensor], firsts: Tensor, mask: LayerMask, out_THv: Tensor
) -> None:
    """Merge the parts of tokens; their sinks count once."""
    tokens, heads, value = out_THv.shape
    columns = min(_MERGED_COLUMNS, triton.next_power_of_2(value))
    _merge_parts[(tokens, heads, triton.cdiv(value, columns))](
        *outputs,
        firsts,
        firsts if mask.sinks_H is None else mask.sinks_H,
        out_THv,
        heads,
        SINKS=mask.sinks_H is not None,
        VALUE=value,
        COLUMNS=columns,
        MERGED=_MERGED,
        num_warps=_MERGE_WARPS,
        **begins_early(out_THv),
    )
