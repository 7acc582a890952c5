"""Packed documents on a GPU, by flash's kernel for variable lengths, against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.core.layout.splits import AttentionCall, ContextSplit, attention_calls
from fivefold.launch.backend import num_gpus
from fivefold.model.documents import Documents
from fivefold.model.kernels import varlen
from fivefold.model.kernels.flash import VisiblePairs, attend, attend_backward

needs_gpu = pytest.mark.skipif(not num_gpus(), reason="no CUDA device: run this where there is one")

SEQ = 768
ROWS = Documents(
    [[0, 1, 2, 130, 131, 500], [0], [0, 384], [*range(0, SEQ, 3)]], SEQ
)  # of 1 token, of a row, up to the middle, and many
# Head counts of queries and keys, widths of keys and values: grouped, latent, and odd.
HEADS = {"grouped": (8, 2, 64, 64), "latent": (4, 4, 192, 128), "odd": (2, 1, 20, 20)}


def drawn(kind: str, call: AttentionCall) -> list[Tensor]:
    """Queries, keys, values and the output's gradient, in bfloat16."""
    heads, kv_heads, width, value_width = HEADS[kind]
    generator = torch.Generator().manual_seed(3)
    queries, keys = call.q_stop - call.q_start, call.k_stop - call.k_start
    sizes = (
        (4, queries, heads, width),
        (4, keys, kv_heads, width),
        (4, keys, kv_heads, value_width),
        (4, queries, heads, value_width),
    )
    return [torch.randn(size, generator=generator).bfloat16().transpose(1, 2) for size in sizes]


def found(given: list[Tensor], sees: VisiblePairs) -> list[Tensor]:
    """Output, log-sum-exp and gradients. Each query has another key elsewhere, of weight 1."""
    q, k, v, slope = given
    out, lse = attend(q, k, v, sees)
    seen = torch.logaddexp(lse.float(), torch.zeros_like(lse, dtype=torch.float32)).to(lse.dtype)
    merged = (out * (lse - seen).exp()[..., None]).to(q.dtype)
    return [out, lse, *attend_backward(slope, q, k, v, merged, seen, sees)]


ZIGZAG = ContextSplit(1, 2, zigzag=True, gathers=False)
WHOLE = ((range(SEQ),), (range(SEQ),), AttentionCall(0, SEQ, 0, SEQ, causal=True, masked=False))
CALLS = {"whole": (*WHOLE, None), "window": (*WHOLE, 100)} | {
    f"rank {mine} of rank {other}": (ours, theirs, call, None)
    for mine, other in ((0, 0), (0, 1), (1, 0))
    for ours, theirs in [(ZIGZAG.ring_tokens(SEQ, mine), ZIGZAG.ring_tokens(SEQ, other))]
    for call in attention_calls(ours, theirs)
}


@needs_gpu
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", CALLS)
def test_documents_on_a_gpu_are_as_in_float64(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rows, and calls of zigzag ranks where some queries pair no key."""
    queries, keys, call, window = CALLS[name]
    pairs = ROWS.pairs(queries, keys, call)
    sees = VisiblePairs(call.causal, documents=pairs, window=window)
    calls: list[str] = []
    for each in ("attend", "attend_backward"):
        inner = getattr(varlen, each)
        monkeypatch.setattr(varlen, each, lambda *a, e=each, f=inner: calls.append(e) or f(*a))
    given = drawn(kind, call)
    here = found([each.cuda() for each in given], sees)
    assert calls == ["attend", "attend_backward"]
    there = found([each.double() for each in given], sees)
    for mine, wanted in zip(here, there, strict=True):
        assert mine.is_cuda and mine.shape == wanted.shape
        back = mine.cpu().double()
        assert torch.equal(back.isinf(), wanted.isinf())
        back, wanted = (each.nan_to_num(neginf=0.0) for each in (back, wanted))
        # Rounded to bf16 once or twice; sums of up to 768 products of such numbers.
        assert (back - wanted).norm() <= 0.01 * wanted.norm()
        torch.testing.assert_close(back, wanted, rtol=0.02, atol=0.06)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_numbers_go_document_by_document(dtype: torch.dtype) -> None:
    queries, keys, call, _ = CALLS["rank 1 of rank 0"]
    sees = VisiblePairs(call.causal, documents=ROWS.pairs(queries, keys, call))
    given = [each.to(dtype) for each in drawn("grouped", call)]
    here = found([each.cuda() for each in given], sees)
    for mine, wanted in zip(here, found([each.double() for each in given], sees), strict=True):
        torch.testing.assert_close(mine.cpu().double(), wanted, rtol=1e-4, atol=1e-4)


@needs_gpu
def test_no_step_waits_for_lengths() -> None:
    """Lengths of documents come from the host: nothing on the way there asks the GPU."""
    queries, keys, call, _ = CALLS["whole"]
    given = [each.cuda() for each in drawn("grouped", call)]
    documents = Documents(ROWS.starts, SEQ)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sees = VisiblePairs(call.causal, documents=documents.pairs(queries, keys, call))
        found(given, sees)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert documents.pairs(queries, keys, call) is sees.documents
