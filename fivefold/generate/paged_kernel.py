"""Attention of single tokens over pages, and writing of pages, as Triton kernels.

In a decode step every sequence has one query. Its keys are cut into parts of `KEYS`, each the work
of one program for all query heads of a key head; a second kernel merges the parts of a query in
their order. Where a part begins depends on nothing but positions, so that a sequence has the same
result to the bit alone and beside others. Sums are float32. Values may be the first numbers of
keys, as latents are.

Legend: S sequences, H query heads, K key/value heads, G = H / K, P tokens of a block, B blocks of a
table, d width of a head, v that of a value head, C parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.generate.pdl_kernel import begin_early, begins_early

KEYS = 128  # of a part
_TILE = 64  # keys of a product
_MERGED = 16  # parts that a program reads at once
_LEAST_ROWS = 16  # of a product on tensor cores


# Every step with a prompt has other sizes, at other addresses: kernels would be made anew for some.
@triton.jit(
    do_not_specialize=["window", "table_row", "num_parts"],
    do_not_specialize_on_alignment=["tables_ptr", "lengths_ptr"],
)
def _attend_part(
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    scale: float,
    window: int,
    q_row: int,
    q_head: int,
    table_row: int,
    num_parts: int,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin_early(EARLY)
    sequence, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    lowest = tl.maximum(length - window, 0)
    if part * KEYS >= length or (part + 1) * KEYS <= lowest:
        return
    head, column = tl.arange(0, GROUP_ROWS), tl.arange(0, WIDTH_BLOCK)
    value_column, query_head = tl.arange(0, VALUE_BLOCK), kv_head * GROUP + head
    is_head, is_column, is_value = head < GROUP, column < WIDTH, value_column < VALUE
    q_offset = sequence.to(tl.int64) * q_row + query_head[:, None] * q_head + column[None, :]
    q = tl.load(q_ptr + q_offset, is_head[:, None] & is_column[None, :], other=0.0)
    highest = tl.full((GROUP_ROWS,), -3.0e38, tl.float32)
    total = tl.zeros((GROUP_ROWS,), tl.float32)
    out = tl.zeros((GROUP_ROWS, VALUE_BLOCK), tl.float32)
    for start in range(part * KEYS, tl.minimum((part + 1) * KEYS, length), TILE):
        key = start + tl.arange(0, TILE)
        seen = (key < length) & (key >= lowest)
        block = tl.load(tables_ptr + sequence * table_row + key // PAGE, seen, other=0)
        row = (block.to(tl.int64) * PAGE + key % PAGE) * KV_HEADS + kv_head
        k_place = row[None, :] * WIDTH + column[:, None]
        k = tl.load(keys_ptr + k_place, seen[None, :] & is_column[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(q, k, input_precision="ieee") * scale, -3.0e38)
        higher = tl.maximum(highest, tl.max(scores, 1))
        odds = tl.where(seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
        decay = tl.exp(highest - higher)
        v_place = row[:, None] * VALUE_ROW + value_column[None, :]
        v = tl.load(values_ptr + v_place, seen[:, None] & is_value[None, :], other=0.0)
        out = out * decay[:, None] + tl.dot(odds.to(v.dtype), v, input_precision="ieee")
        total, highest = total * decay + tl.sum(odds, 1), higher
    at = (sequence * KV_HEADS * GROUP + query_head).to(tl.int64) * num_parts + part
    tl.store(log_sums_ptr + at, highest + tl.log(total), is_head)
    parts_ptr += at[:, None] * VALUE + value_column[None, :]
    tl.store(parts_ptr, out / total[:, None], is_head[:, None] & is_value[None, :])


@triton.jit(
    do_not_specialize=["window", "num_parts"], do_not_specialize_on_alignment=["lengths_ptr"]
)
def _merge_parts(
    parts_ptr: tl.tensor,
    log_sums_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    window: int,
    heads: int,
    num_parts: int,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    MERGED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin_early(EARLY)
    sequence, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + sequence)
    lowest = tl.maximum(length - window, 0)
    first, stop = lowest // KEYS, (length + KEYS - 1) // KEYS
    column = tl.arange(0, VALUE_BLOCK)
    is_value = column < VALUE
    at = (sequence * heads + head).to(tl.int64) * num_parts
    highest, total = tl.full((), -3.0e38, tl.float32), tl.zeros((), tl.float32)
    out = tl.zeros((VALUE_BLOCK,), tl.float32)
    for start in range(first, stop, MERGED):
        part = start + tl.arange(0, MERGED)
        is_part = part < stop
        log_sums = tl.load(log_sums_ptr + at + part, is_part, other=-3.0e38)
        higher = tl.maximum(highest, tl.max(log_sums))
        shares = tl.where(is_part, tl.exp(log_sums - higher), 0.0)
        part_offset = (at + part)[:, None] * VALUE + column[None, :]
        parts = tl.load(parts_ptr + part_offset, is_part[:, None] & is_value[None, :], other=0.0)
        decay = tl.exp(highest - higher)
        out = out * decay + tl.sum(parts * shares[:, None], 0)
        total, highest = total * decay + tl.sum(shares), higher
    out_place = (sequence * heads + head).to(tl.int64) * VALUE + column
    tl.store(out_ptr + out_place, out / total, is_value)


@triton.jit
def _write_pages(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
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
    EARLY: tl.constexpr,
) -> None:
    begin_early(EARLY)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(slots_ptr + token).to(tl.int64) * KV_HEADS + head
    column, value_column = tl.arange(0, WIDTH_BLOCK), tl.arange(0, VALUE_BLOCK)
    k = tl.load(k_ptr + token * k_row + head * k_head + column, column < WIDTH)
    tl.store(keys_ptr + row * WIDTH + column, k, column < WIDTH)
    v = tl.load(v_ptr + token * v_row + head * v_head + value_column, value_column < VALUE)
    tl.store(values_ptr + row * VALUE_ROW + value_column, v, value_column < VALUE)


def write_pages(
    keys_NPKd: Tensor, values_NPKv: Tensor, slots_T: Tensor, k_TKd: Tensor, v_TKv: Tensor
) -> None:
    """Write keys and values of tokens to their slots."""
    (_, heads, width), value = k_TKd.shape, v_TKv.shape[2]
    assert k_TKd.stride(2) == v_TKv.stride(2) == 1
    _write_pages[(len(slots_T), heads)](
        k_TKd,
        v_TKv,
        keys_NPKd,
        values_NPKv,
        slots_T,
        *k_TKd.stride()[:2],
        *v_TKv.stride()[:2],
        KV_HEADS=heads,
        WIDTH=width,
        WIDTH_BLOCK=triton.next_power_of_2(width),
        VALUE=value,
        VALUE_BLOCK=triton.next_power_of_2(value),
        VALUE_ROW=values_NPKv.stride(2),
        num_warps=1,
        **begins_early(k_TKd),
    )


def attend_single_tokens(
    q_SHd: Tensor,
    pages: tuple[Tensor, Tensor],
    tables_SB: Tensor,
    lengths_S: Tensor,
    most_keys: int,
    window: int | None,
) -> Tensor:
    """Attention of one query per sequence over its first `lengths_S` tokens within the window, (S,
    H, v); `most_keys` bounds the lengths."""
    keys_NPKd, values_NPKv = pages
    (sequences, heads, width), (_, page, kv_heads, value) = q_SHd.shape, values_NPKv.shape
    assert q_SHd.stride(2) == 1 and keys_NPKd.is_contiguous()
    num_parts, seen = triton.cdiv(most_keys, KEYS), window or most_keys
    size, early = (sequences, heads, num_parts), begins_early(q_SHd)
    parts = q_SHd.new_empty((*size, value), dtype=torch.float32)
    log_sums = q_SHd.new_empty(size, dtype=torch.float32)
    group, sizes = heads // kv_heads, {"VALUE": value, "VALUE_BLOCK": triton.next_power_of_2(value)}
    _attend_part[(sequences, kv_heads, num_parts)](
        q_SHd,
        keys_NPKd,
        values_NPKv,
        tables_SB,
        lengths_S,
        parts,
        log_sums,
        width**-0.5,
        seen,
        *q_SHd.stride()[:2],
        tables_SB.stride(0),
        num_parts,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)),
        WIDTH=width,
        WIDTH_BLOCK=max(_LEAST_ROWS, triton.next_power_of_2(width)),
        PAGE=page,
        KEYS=KEYS,
        TILE=_TILE,
        VALUE=value,
        VALUE_BLOCK=max(_LEAST_ROWS, triton.next_power_of_2(value)),
        VALUE_ROW=values_NPKv.stride(2),
        **early,
    )
    out_SHv = q_SHd.new_empty((sequences, heads, value))
    merged = (parts, log_sums, lengths_S, out_SHv, seen, heads, num_parts)
    sizes |= {"KEYS": KEYS, "MERGED": _MERGED, "num_warps": 2}
    _merge_parts[(sequences, heads)](*merged, **sizes, **early)
    return out_SHv
