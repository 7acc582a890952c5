"""Attention within documents, against one mask of all pairs; no such mask is made or saved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from small import DEEPSEEK, LLAMA, batch_of, filled
from torch import Tensor

from fivefold.core.layout.splits import AttentionCall, ContextSplit, attention_calls
from fivefold.model.attention import causal_attention
from fivefold.model.batch import AttentionInfo
from fivefold.model.documents import DocumentPairs, Documents
from fivefold.model.kernels import varlen
from fivefold.model.kernels.flash import (
    MergedAttention,
    VisiblePairs,
    attend,
    attend_backward,
    attend_by_formula,
    backward_by_formula,
)
from tests.model.context_places import index, places

EXACT = 1e-13  # for numbers of about 1 in float64, where only the order of sums differs
ROWS, HEADS, SEQ, WIDTH = 3, 6, 24, 8
CPU, ROW = torch.device("cpu"), (range(SEQ),)
ALL = AttentionCall(0, SEQ, 0, SEQ, causal=True, masked=False)

# Of 1 token; as long as a row; across every cut of a row in 2, 4, 6 or 8; random ones.
STARTS = {
    "single tokens": [range(SEQ)] * ROWS,
    "some of one token": [range(SEQ), [0, 1, 2], [0, 22, 23]],
    "whole rows": [[0], [0], [0]],
    "across cuts": [[0, 5, 7, 19], [0, 11], [0, 13, 14]],
    "at cuts": [[0, 6, 12, 18], [0, 12], [0, 4, 8, 12, 16, 20]],
}
for seed in range(6):
    drawn_cuts = torch.randint(1, SEQ, (ROWS, 5), generator=torch.Generator().manual_seed(seed))
    STARTS[f"random {seed}"] = [sorted({0, *row[: seed + 1]}) for row in drawn_cuts.tolist()]


class Inputs(NamedTuple):
    """Queries, keys, values and the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    slope: Tensor


def drawn(kv_heads: int = 2, value_width: int = WIDTH) -> Inputs:
    generator = torch.Generator().manual_seed(kv_heads)
    sizes = ((HEADS, WIDTH), (kv_heads, WIDTH), (kv_heads, value_width), (HEADS, value_width))
    return Inputs(
        *(
            torch.randn(ROWS, heads, SEQ, width, generator=generator, dtype=torch.float64)
            for heads, width in sizes
        )
    )


def visible(documents: Documents, window: int | None = None) -> Tensor:
    """(B, 1, S, S), pair by pair from the definition."""
    found = torch.zeros(ROWS, 1, SEQ, SEQ, dtype=torch.bool)
    for row, starts in enumerate(documents.starts):
        for query in range(SEQ):
            first = max(start for start in starts if start <= query)
            if window is not None:
                first = max(first, query - window + 1)
            found[row, 0, query, first : query + 1] = True
    return found


def by_formula(given: Inputs, mask: Tensor) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients, with all scores under one mask."""
    pairs = VisiblePairs(mask=mask)
    out, lse = attend_by_formula(*given[:3], pairs)
    return out, lse, *backward_by_formula(given.slope, *given[:3], out, lse, pairs)


def require_equal(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for mine, each in zip(found, wanted, strict=True):
        assert mine.shape == each.shape
        assert (mine - each).abs().max() <= EXACT


# ---- one device


@pytest.mark.parametrize("window", [None, 1, 4, 40])
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("name", STARTS)
def test_documents_are_attention_under_a_mask(name: str, kv_heads: int, window: int | None) -> None:
    documents, given = Documents(STARTS[name], SEQ), drawn(kv_heads)
    sees = VisiblePairs(True, documents=documents.pairs(ROW, ROW, ALL), window=window)
    out, lse = attend(*given[:3], sees)
    found = (out, lse, *attend_backward(given.slope, *given[:3], out, lse, sees))
    require_equal(found, by_formula(given, visible(documents, window)))


@pytest.mark.parametrize("value_width", [5, 11])
def test_values_may_be_narrower_or_wider_than_keys(value_width: int) -> None:
    documents, given = Documents(STARTS["across cuts"], SEQ), drawn(HEADS, value_width)
    sees = VisiblePairs(True, documents=documents.pairs(ROW, ROW, ALL))
    out, lse = attend(*given[:3], sees)
    found = (out, lse, *attend_backward(given.slope, *given[:3], out, lse, sees))
    require_equal(found, by_formula(given, visible(documents)))


def test_the_kernel_of_the_model_has_the_gradients_of_its_formula() -> None:
    documents, given = Documents(STARTS["across cuts"], SEQ), drawn()
    leaves = [each.clone().requires_grad_() for each in given[:3]]
    info = AttentionInfo(torch.arange(SEQ).expand(ROWS, SEQ), documents, None)
    out = causal_attention(leaves[0], leaves[1], leaves[2], info)
    gradients = torch.autograd.grad(out, leaves, given.slope)
    wanted, _, *of_wanted = by_formula(given, visible(documents))
    require_equal((out, *gradients), (wanted, *of_wanted))


# ---- context ranks

SPLITS = {
    "ring of 2": ContextSplit(1, 2, zigzag=False, gathers=False),
    "ring of 3": ContextSplit(1, 3, zigzag=False, gathers=False),
    "zigzag of 2": ContextSplit(1, 2, zigzag=True, gathers=False),
    "zigzag of 4": ContextSplit(1, 4, zigzag=True, gathers=False),
    "allgather of 3": ContextSplit(1, 3, zigzag=True, gathers=True),
}


def merged(given: Inputs, calls: list[tuple[AttentionCall, Tensor, VisiblePairs]]) -> list[Tensor]:
    """Output and gradients of the queries of a place; those of keys are of the full row."""
    q, k, v, slope = given
    total, (dq, dk, dv) = MergedAttention(q), (torch.zeros_like(each) for each in (q, k, v))
    parts = [(slice(call.q_start, call.q_stop), held, sees) for call, held, sees in calls]
    for rows, held, sees in parts:
        total.merge(
            rows.start, rows.stop, *attend(q[:, :, rows], k[:, :, held], v[:, :, held], sees)
        )
    assert total.out is not None and total.lse is not None
    for rows, held, sees in parts:
        mine = [each[:, :, rows] for each in (slope, q, total.out, total.lse)]
        more = attend_backward(mine[0], mine[1], k[:, :, held], v[:, :, held], *mine[2:], sees)
        dq[:, :, rows] += more[0]
        dk[:, :, held] += more[1]
        dv[:, :, held] += more[2]
    return [total.out, dq, dk, dv]


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("split", SPLITS)
def test_the_calls_of_all_places_together_are_attention(split: str, name: str) -> None:
    documents, given = Documents(STARTS[name], SEQ), drawn()
    out, _, dq, dk, dv = by_formula(given, visible(documents))
    found_dk, found_dv, num_skipped, num_pairs = torch.zeros_like(dk), torch.zeros_like(dv), 0, 0
    for queries, visits in places(SPLITS[split], SEQ):
        calls: list[tuple[AttentionCall, Tensor, VisiblePairs]] = []
        for keys in visits:
            for call in attention_calls(queries, keys):
                pairs = documents.pairs(queries, keys, call)
                num_skipped += not pairs.spans
                num_pairs += sum(pairs_of(pairs, call))
                sees = VisiblePairs(call.causal, documents=pairs)
                held = index(keys)[call.k_start : call.k_stop]
                if pairs.spans:
                    calls.append((call, held, sees))
        mine = index(queries)
        local = Inputs(given.q[:, :, mine], given.k, given.v, given.slope[:, :, mine])
        found = merged(local, calls)
        require_equal((found[0], found[1]), (out[:, :, mine], dq[:, :, mine]))
        found_dk += found[2]
        found_dv += found[3]
    require_equal((found_dk, found_dv), (dk, dv))
    # No pair is computed that nobody sees, and calls without a document in common are left out.
    assert num_pairs == visible(documents).sum()
    assert name != "single tokens" or num_skipped > 0


def pairs_of(pairs: DocumentPairs, call: AttentionCall) -> Iterator[int]:
    for _, q_start, q_stop, k_start, k_stop in pairs.spans:
        queries, keys = q_stop - q_start, k_stop - k_start
        assert not call.causal or (q_start, q_stop) == (k_start, k_stop)
        yield queries * (queries + 1) // 2 if call.causal else queries * keys


# ---- the kernel for variable lengths


class ByDefinition:
    """Stands for flash: what its kernels for variable lengths compute, by the formula."""

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.zeros_like(q), q.new_full(q.shape[1::-1], math.inf)
        q = q * options["scale"] * math.sqrt(q.shape[-1])  # the formula has a scale of its own
        for mine, theirs, pairs in self._documents(q, k, v, *rest, **options):
            found, found_lse = attend_by_formula(
                *(_one_row(e) for e in (q[mine], k[theirs], v[theirs])), pairs
            )
            out[mine], lse[:, mine] = found[0].transpose(0, 1), found_lse[0]
        return out, lse

    def _flash_attention_backward(
        self, slope: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        *rest: Any, **options: Any,
    ) -> list[Tensor]:  # fmt: skip
        found = [torch.zeros_like(each) for each in (q, k, v)]
        q = q * (wider := options["scale"] * math.sqrt(q.shape[-1]))
        for mine, theirs, pairs in self._documents(q, k, v, *rest, **options):
            cuts = (slope[mine], q[mine], k[theirs], v[theirs], out[mine])
            more = backward_by_formula(*map(_one_row, cuts), lse[None, :, mine], pairs)
            for total, where, each in zip(found, (mine, theirs, theirs), more, strict=True):
                total[where] = each[0].transpose(0, 1)
        return [found[0] * wider, *found[1:]]

    def _documents(
        self, q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, max_q: int,
        max_k: int, dropout: float, causal: bool, *_: Any, scale: float,
        window_size_left: int = SEQ, window_size_right: int = 0,
    ) -> Iterator[tuple[slice, slice, VisiblePairs]]:  # fmt: skip
        assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] % 8 == 0
        assert scale == 1 / math.sqrt(WIDTH) and dropout == 0 and q_ends.dtype == torch.int32
        assert (q_ends[-1], k_ends[-1]) == (len(q), len(k))
        assert 1 < max_q >= q_ends.diff().max() and 1 < max_k >= k_ends.diff().max()
        for (start, stop), (first, last) in zip(_cuts(q_ends), _cuts(k_ends), strict=True):
            if start == stop or first == last:
                continue
            ones = torch.ones(stop - start, last - first, dtype=torch.bool)
            mask = ones.tril(last - first - (stop - start)).triu(-window_size_left)
            sees = VisiblePairs(mask=(mask if causal else ones)[None, None])
            yield slice(start, stop), slice(first, last), sees


def _one_row(x_THd: Tensor) -> Tensor:
    return x_THd.transpose(0, 1)[None]


def _cuts(ends: Tensor) -> list[tuple[int, int]]:
    return list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))


def as_one_by_one(given: Inputs, sees: VisiblePairs) -> None:
    """The call of the kernel gives what documents one by one give."""
    q, k, v, slope = given
    out, lse = attend(q, k, v, sees)
    more = attend_backward(slope, q, k, v, out, lse, sees)
    assert sees.documents is not None
    how = (sees.documents, sees.causal, sees.window)
    found, found_lse = varlen.attend(q, k, v, *how)
    found_more = varlen.attend_backward(slope, q, k, v, out, lse, *how)
    assert torch.equal(found_lse.isinf(), lse.isinf()) and not lse.eq(math.inf).any()
    finite = [each.nan_to_num(neginf=0.0) for each in (found_lse, lse)]
    require_equal((found, finite[0], *found_more), (out, finite[1], *more))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("value_width", [WIDTH, 5, 11])
def test_lengths_are_what_the_kernel_takes(
    monkeypatch: pytest.MonkeyPatch, value_width: int, window: int | None
) -> None:
    monkeypatch.setattr(varlen, "aten", ByDefinition())
    for starts in STARTS.values():
        pairs = Documents(starts, SEQ).pairs(ROW, ROW, ALL)
        as_one_by_one(drawn(2, value_width), VisiblePairs(True, documents=pairs, window=window))


@pytest.mark.parametrize("split", SPLITS)
def test_lengths_of_calls_with_gaps_are_what_the_kernel_takes(
    monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    monkeypatch.setattr(varlen, "aten", ByDefinition())
    num_gaps = 0
    for starts in STARTS.values():
        documents, given = Documents(starts, SEQ), drawn()
        for queries, visits in places(SPLITS[split], SEQ):
            visited = [(keys, each) for keys in visits for each in attention_calls(queries, keys)]
            for keys, call in visited:
                mine = index(queries)[call.q_start : call.q_stop]
                held = index(keys)[call.k_start : call.k_stop]
                local = Inputs(
                    given.q[:, :, mine],
                    given.k[:, :, held],
                    given.v[:, :, held],
                    given.slope[:, :, mine],
                )
                pairs = documents.pairs(queries, keys, call)
                num_gaps += pairs.has_gaps
                as_one_by_one(local, VisiblePairs(call.causal, documents=pairs))
    assert num_gaps > 0


# ---- what is kept


@pytest.mark.parametrize("window", [None, 4])
def test_no_mask_and_no_repeated_head_is_saved(window: int | None) -> None:
    """Queries, keys, values, output and log-sum-exp, on a GPU (without values) and on a CPU."""
    saved: list[Tensor] = []
    for fake, dtype in ((True, torch.bfloat16), (False, torch.float64)):
        saved.clear()
        with torch.device("meta" if fake else "cpu"):
            q, k, v = (
                torch.empty(2, 64, heads, 16, dtype=dtype)
                .normal_()
                .requires_grad_()
                .transpose(1, 2)
                for heads in (4, 2, 2)
            )
            info = AttentionInfo(torch.empty(2, 64), Documents([[0, 9], [0]], 64), window)
            hooks = torch.autograd.graph.saved_tensors_hooks
            with hooks(lambda one: saved.append(one) or one, lambda one: one):
                out = causal_attention(q, k, v, info)
            gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert [each.shape for each in gradients] == [each.shape for each in (q, k, v)]
        sizes = [tuple(each.shape) for each in saved]
        assert sizes == [(2, 4, 64, 16), (2, 2, 64, 16), (2, 2, 64, 16), (2, 4, 64, 16), (2, 4, 64)]
        # The output projection reads what is saved, without a copy.
        flat = out.transpose(1, 2).flatten(2)
        assert flat.untyped_storage()._cdata == saved[3].untyped_storage()._cdata


def test_every_layer_shares_the_lengths_of_a_batch() -> None:
    documents = Documents(STARTS["across cuts"], SEQ)
    pairs = documents.pairs(ROW, ROW, ALL)
    assert documents.pairs(ROW, ROW, ALL) is pairs
    assert pairs.ends(CPU)[0] is pairs.ends(CPU)[0]
    assert pairs.ends(CPU)[0].tolist() == [0, 5, 7, 19, 24, 35, 48, 61, 62, 72]
    assert (pairs.longest_q, pairs.longest_k, pairs.has_gaps) == (13, 13, False)


# ---- the value


def test_neighbours_of_one_number_are_a_document() -> None:
    numbers = torch.tensor([[4, 4, 4, 5, 5, 9], [0, 1, 2, 3, 4, 5], [7, 7, 7, 7, 7, 7]])
    documents = Documents.of(numbers)
    assert documents.starts == ((0, 3, 5), (0, 1, 2, 3, 4, 5), (0,))
    assert documents.seq == 6 and not documents.one_a_row
    assert documents.numbers(CPU).tolist() == [[0, 0, 0, 1, 1, 2], [*range(6)], [0] * 6]
    longer = documents.padded(2)
    assert longer.starts == ((0, 3, 5, 6), (0, 1, 2, 3, 4, 5, 6), (0, 6)) and longer.seq == 8
    assert Documents.of(numbers[2:]).one_a_row


@pytest.mark.parametrize("shape", [LLAMA, DEEPSEEK], ids=lambda shape: shape.name)
def test_documents_change_what_a_model_computes(shape: Any) -> None:
    numbers = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])
    whole, packed = batch_of(shape), batch_of(shape, documents=numbers)
    decoder = filled(shape)
    assert decoder(whole.tokens, whole) != decoder(packed.tokens, packed)
