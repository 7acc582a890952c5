"""Attention in parts: merged it is attention over all keys, forward and backward."""

from __future__ import annotations

import math
from itertools import permutations
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fivefold.core.layout.splits import AttentionCall, ContextSplit, Ranges, attention_calls
from fivefold.model.kernels.flash import (
    MergedAttention,
    VisiblePairs,
    attend,
    attend_backward,
    attend_by_formula,
    backward_by_formula,
)
from tests.model.context_places import index, places
from tests.model.test_recompute import Calls

EXACT = 1e-13  # for numbers of about 1 in float64, where only the order of sums differs
ROWS, HEADS, SEQ, WIDTH = 2, 6, 24, 8


class Inputs(NamedTuple):
    """Queries, keys, values and the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    slope: Tensor


def drawn(kv_heads: int = HEADS, queries: int = SEQ, keys: int = SEQ, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(HEADS, queries), (kv_heads, keys), (kv_heads, keys), (HEADS, queries)]
    return Inputs(
        *(
            torch.randn(ROWS, heads, tokens, WIDTH, generator=generator, dtype=torch.float64)
            for heads, tokens in sizes
        )
    )


def whole(given: Inputs, visible: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of torch's own attention, by its plain formula."""
    leaves = [each.clone().requires_grad_() for each in given[:3]]
    groups = HEADS // given.k.shape[1]
    k, v = (each.repeat_interleave(groups, dim=1) for each in leaves[1:])
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(leaves[0], k, v, attn_mask=visible)
    out.backward(given.slope)
    gradients = [each.grad for each in leaves]
    return out.detach(), *(each for each in gradients if each is not None)


def require_equal(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= EXACT


def in_parts(given: Inputs, parts: list[tuple[slice, slice, VisiblePairs]]) -> tuple[Tensor, ...]:
    """Output and gradients, part by part in this order: queries, keys, and what these see."""
    q, k, v, slope = given
    total = MergedAttention(q)
    for rows, columns, sees in parts:
        out, lse = attend(q[:, :, rows], k[:, :, columns], v[:, :, columns], sees)
        total.merge(rows.start, rows.stop, out, lse)
    assert total.out is not None and total.lse is not None
    dq, dk, dv = (torch.zeros_like(each) for each in (q, k, v))
    for rows, columns, sees in parts:
        more = attend_backward(
            slope[:, :, rows],
            q[:, :, rows],
            k[:, :, columns],
            v[:, :, columns],
            total.out[:, :, rows],
            total.lse[:, :, rows],
            sees,
        )
        dq[:, :, rows] += more[0]
        dk[:, :, columns] += more[1]
        dv[:, :, columns] += more[2]
    return total.out, dq, dk, dv


def visible_pairs(window: int | None = None, documents: Tensor | None = None) -> Tensor:
    """(B, 1, S, S): causal, within the window, within a document."""
    token = torch.arange(SEQ)
    distance = token[:, None] - token[None, :]
    seen = (distance >= 0) & (distance < (window or SEQ))
    if documents is None:
        return seen.expand(ROWS, 1, SEQ, SEQ)
    return (seen & (documents[:, :, None] == documents[:, None, :]))[:, None]


# ---- one call


@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_one_call_is_attention(kv_heads: int, causal: bool) -> None:
    given = drawn(kv_heads)
    visible = visible_pairs() if causal else torch.ones(ROWS, 1, SEQ, SEQ, dtype=torch.bool)
    everything = slice(0, SEQ)
    found = in_parts(given, [(everything, everything, VisiblePairs(causal))])
    for mine, wanted in zip(found, whole(given, visible), strict=True):
        require_equal(mine, wanted)


def test_the_log_sum_exp_is_that_of_the_scores() -> None:
    given = drawn(queries=7, keys=11)
    scores = given.q @ given.k.transpose(2, 3) / math.sqrt(WIDTH)
    _, lse = attend(*given[:3], VisiblePairs())
    require_equal(lse, scores.logsumexp(dim=-1))
    mask = torch.rand(ROWS, 1, 7, 11, generator=torch.Generator().manual_seed(1)) < 0.5
    _, lse = attend(*given[:3], VisiblePairs(mask=mask))
    wanted = scores.masked_fill(~mask, -math.inf).logsumexp(dim=-1)
    blind = wanted.isinf()
    assert torch.equal(lse.isinf(), blind)
    require_equal(lse[~blind], wanted[~blind])


def test_a_query_that_sees_no_key_has_no_output_and_asks_for_nothing() -> None:
    given = drawn(kv_heads=2, queries=5, keys=9)
    mask = torch.ones(ROWS, 1, 5, 9, dtype=torch.bool)
    mask[0, :, 2] = mask[1, :, 0] = False
    out, lse = attend(*given[:3], VisiblePairs(mask=mask))
    blind = ~mask.any(dim=-1).expand(ROWS, HEADS, 5)
    assert out[blind].eq(0).all() and lse[blind].eq(-math.inf).all()
    assert lse[~blind].isfinite().all()
    # It saw something elsewhere, or there would be no output to differentiate.
    seen = lse.masked_fill(blind, 0.0)
    dq, dk, dv = attend_backward(given.slope, *given[:3], out, seen, VisiblePairs(mask=mask))
    assert dq[blind].eq(0).all()
    assert all(each.isfinite().all() for each in (dq, dk, dv))


def test_nothing_and_nothing_is_nothing() -> None:
    given = drawn(queries=4, keys=6)
    mask = torch.zeros(ROWS, 1, 4, 6, dtype=torch.bool)
    mask[:, :, 1:] = True
    total = MergedAttention(given.q)
    for _ in range(3):
        total.merge(0, 4, *attend(*given[:3], VisiblePairs(mask=mask)))
    assert total.out is not None and total.lse is not None
    assert total.out[:, :, 0].eq(0).all() and total.lse[:, :, 0].eq(-math.inf).all()
    require_equal(total.out[:, :, 1:], attend(*given[:3], VisiblePairs())[0][:, :, 1:])


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("kind", ["all", "causal", "masked"])
def test_the_plain_formula_is_what_the_kernels_compute(kv_heads: int, kind: str) -> None:
    """The formula stands in for the kernel that CUDA has not; the lse is that of more keys."""
    given = drawn(kv_heads)
    documents = torch.arange(SEQ)[None] // torch.tensor([[5], [9]])
    blind = torch.arange(SEQ)[:, None] != 7
    mask = visible_pairs(documents=documents) & blind if kind == "masked" else None
    sees = VisiblePairs(kind == "causal", mask)
    out, lse = attend(*given[:3], sees)
    found, found_lse = attend_by_formula(*given[:3], sees)
    require_equal(found, out)
    assert torch.equal(found_lse.isinf(), lse.isinf())
    require_equal(found_lse.nan_to_num(neginf=0.0), lse.nan_to_num(neginf=0.0))
    merged = torch.logaddexp(lse, drawn(seed=1).q[..., 0])
    wanted = attend_backward(given.slope, *given[:3], out, merged, sees)
    for mine, theirs in zip(
        backward_by_formula(given.slope, *given[:3], out, merged, sees), wanted, strict=True
    ):
        require_equal(mine, theirs)


# ---- parts


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_parts_may_come_in_any_order(order: tuple[int, ...]) -> None:
    given, quarter = drawn(kv_heads=3), SEQ // 4
    visible = torch.ones(ROWS, 1, SEQ, SEQ, dtype=torch.bool)
    everything = slice(0, SEQ)
    parts = [(everything, slice(i * quarter, (i + 1) * quarter), VisiblePairs()) for i in order]
    for mine, wanted in zip(in_parts(given, parts), whole(given, visible), strict=True):
        require_equal(mine, wanted)


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_some_queries_may_see_a_part_that_others_do_not(order: tuple[int, ...]) -> None:
    """Causal attention in two triangles and the square below, whichever of them comes first."""
    given, half = drawn(kv_heads=2), SEQ // 2
    early, late = slice(0, half), slice(half, SEQ)
    parts = [
        (early, early, VisiblePairs(True)),
        (late, late, VisiblePairs(True)),
        (late, early, VisiblePairs()),
    ]
    found = in_parts(given, [parts[i] for i in order])
    for mine, wanted in zip(found, whole(given, visible_pairs()), strict=True):
        require_equal(mine, wanted)


def test_masks_that_leave_some_queries_blind_in_some_parts() -> None:
    given, third = drawn(kv_heads=1), SEQ // 3
    documents = torch.tensor([[0] * 5 + [1] * 12 + [2] * 7, [0] * 10 + [1] * 14])
    visible = visible_pairs(documents=documents)
    everything = slice(0, SEQ)
    parts = [
        (everything, cut, VisiblePairs(mask=visible[:, :, :, cut]))
        for cut in (slice(i * third, (i + 1) * third) for i in (2, 0, 1))
    ]
    assert any((~sees.mask.any(dim=-1)).any() for _, _, sees in parts if sees.mask is not None)
    for mine, wanted in zip(in_parts(given, parts), whole(given, visible), strict=True):
        require_equal(mine, wanted)


SPLITS = {
    "ring": ContextSplit(1, 3, zigzag=False, gathers=False),
    "zigzag": ContextSplit(1, 3, zigzag=True, gathers=False),
    "allgather": ContextSplit(1, 3, zigzag=True, gathers=True),
}


def seen_by(call: AttentionCall, queries: Ranges, keys: Ranges, visible: Tensor) -> VisiblePairs:
    if not call.masked:
        return VisiblePairs(call.causal)
    rows = index(queries)[call.q_start : call.q_stop]
    return VisiblePairs(mask=visible[:, :, rows][:, :, :, index(keys)[call.k_start : call.k_stop]])


@pytest.mark.parametrize("window", [None, 1, 5, 13, 40])
@pytest.mark.parametrize("name", SPLITS)
def test_the_calls_of_all_places_together_are_attention(name: str, window: int | None) -> None:
    given, visible = drawn(kv_heads=2), visible_pairs(window)
    out, dq, dk, dv = whole(given, visible)
    found_dk, found_dv = torch.zeros_like(dk), torch.zeros_like(dv)
    for queries, visits in places(SPLITS[name], SEQ):
        mine, held = index(queries), torch.cat([index(keys) for keys in visits])
        local = Inputs(
            given.q[:, :, mine],
            given.k[:, :, held],
            given.v[:, :, held],
            given.slope[:, :, mine],
        )
        parts, offset = [], 0
        for keys in visits:
            for call in attention_calls(queries, keys, window):
                columns = slice(offset + call.k_start, offset + call.k_stop)
                sees = seen_by(call, queries, keys, visible)
                parts.append((slice(call.q_start, call.q_stop), columns, sees))
            offset += sum(map(len, keys))
        found = in_parts(local, parts)
        require_equal(found[0], out[:, :, mine])
        require_equal(found[1], dq[:, :, mine])
        found_dk[:, :, held] += found[2]
        found_dv[:, :, held] += found[3]
    require_equal(found_dk, dk)
    require_equal(found_dv, dv)


# ---- narrow types


def test_sums_are_float32_or_wider() -> None:
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        q, k, v, _ = (each.to(dtype) for each in drawn())
        total = MergedAttention(q)
        for _ in range(2):
            total.merge(0, SEQ, *attend(q, k, v, VisiblePairs()))
        assert total.out is not None and total.lse is not None
        assert total.out.dtype == total.lse.dtype == wide


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_merging_bfloat16_errs_no_more_than_one_call(seed: int, parts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, 512, 64, generator=generator).bfloat16() for _ in range(3))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    one = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
    total = MergedAttention(q)
    for part_k, part_v in zip(k.chunk(parts, dim=2), v.chunk(parts, dim=2), strict=True):
        total.merge(0, 512, *attend(q, part_k, part_v, VisiblePairs()))
    assert total.out is not None

    def off(found: Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    assert 0 < off(total.out.bfloat16()) <= 1.05 * off(one)


@pytest.mark.parametrize(
    ("dtype", "masked", "kernel"),
    [
        (torch.bfloat16, False, "cudnn"),
        (torch.bfloat16, True, "efficient"),
        (torch.float32, False, "efficient"),
    ],
)
def test_pairs_of_a_mask_go_to_the_kernel_that_has_masks(
    dtype: torch.dtype, masked: bool, kernel: str
) -> None:
    """Without values, as in rehearsals, which stand for a GPU."""
    q, k, v = (torch.empty(2, 4, 16, 64, dtype=dtype, device="meta") for _ in range(3))
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool, device="meta") if masked else None
    with Calls() as counted:
        out, lse = attend(q, k, v, VisiblePairs(mask=mask))
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    names = [name for name in counted.times if "attention" in name]
    assert names == [f"_scaled_dot_product_{kernel}_attention.default"]
