"""Draws of the kernels beside their definition in float64.

Without a GPU, `TRITON_INTERPRET=1 python tests/gpu/test_sampling_cuda.py` runs the same checks with
fewer rows where Triton is installed, on the CPU.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor

from fivefold.generate.requests import Sampling
from fivefold.generate.sampling import Draw, draw_by_kernels, draw_table, draw_tokens, filtered
from fivefold.launch.backend import num_gpus

pytestmark = pytest.mark.skipif(
    not num_gpus(), reason="no CUDA device: run this where there is one"
)
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
ON_GPU = DEVICE == "cuda"
DRAWS = 4_000 if ON_GPU else 3  # of a row
ROUNDING = 1e-5  # of a cumulative probability
SAMPLINGS = [
    *(Sampling(1.0), Sampling(0.3), Sampling(50.0), Sampling(2e-5), Sampling(999.0, top_p=0.5)),
    *(Sampling(1.0, top_k=k) for k in (1, 2, 40, 1000, 10**9)),
    *(Sampling(1.3, top_p=p) for p in (1e-40, 1e-9, 0.3, 0.9, 0.9999, 1 - 1e-12)),
    *(Sampling(0.7, min_p=p) for p in (1e-300, 1e-9, 0.05, 0.5, 1.0)),
    *(Sampling(0.9, 50, 0.9), Sampling(1.1, 50, 0.95, min_p=0.02), Sampling(2.0, 3, 0.6)),
]


def kernel_draws(logits_NV: Tensor, draws: list[Draw]) -> Tensor:
    logits_NV = logits_NV.to(DEVICE)
    allowed_NV = logits_NV
    if any(draw.exclusions for draw in draws):
        allowed_NV = logits_NV.clone()
        for row, draw in enumerate(draws):
            allowed_NV[row, sorted(draw.exclusions)] = -math.inf
    return draw_by_kernels(logits_NV, allowed_NV, draws).cpu()


def rows_of(kind: str, vocab: int) -> Tensor:
    """One row of logits in float32."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(vocab, generator=generator)
    if kind == "flat":
        return logits
    if kind == "peaked":
        return 6 * logits
    if kind == "ties":  # as heads in bfloat16 have
        return (3 * logits).bfloat16().float()
    if kind == "coarse":
        return (2 * logits).round()
    if kind == "equal":
        return torch.full((vocab,), -3.5)
    if kind == "signed":  # zeros of both signs, and all magnitudes around them
        exponents = torch.randint(-120, 3, (vocab,), generator=generator)
        return torch.where(logits.abs() < 0.3, 0.0 * logits, logits.sign() * 2.0**exponents)
    assert kind == "masked"
    masked = (4 * logits).masked_fill(logits > 1.5, -math.inf)
    return masked.masked_fill(logits < -1, torch.finfo(torch.float32).min)


def by_definition(kind: str, vocab: int) -> None:
    """Tokens are those of the float64 CDF but where a number is at a boundary; none is filtered."""
    logits_V = rows_of(kind, vocab)
    for sampling in SAMPLINGS:
        draws = [Draw(sampling, "r", i) for i in range(DRAWS)]
        found = kernel_draws(logits_V.expand(len(draws), -1), draws)
        tokens = found[:, 0].long()
        odds = filtered(logits_V[None], [sampling])[0]
        assert bool((odds[tokens] > 0).all()), sampling
        uniforms = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64)
        ends = odds.cumsum(0)
        beyond = (uniforms - ends[tokens]).clamp(min=0) + (
            ends[tokens] - odds[tokens] - uniforms
        ).clamp(min=0)
        assert float(beyond.max()) < ROUNDING, sampling
        logprobs = logits_V.double().log_softmax(0)[tokens]
        torch.testing.assert_close(found[:, 1], logprobs, rtol=1e-6, atol=2e-6)


def often_enough() -> None:
    """Chi-squared of many draws over 97 tokens."""
    logits_V = rows_of("flat", 97)
    count = 200_000 if ON_GPU else 200
    for sampling in (Sampling(1.0), Sampling(1.2, 60, 0.97)):
        draws = [Draw(sampling, "c", i) for i in range(count)]
        tokens = kernel_draws(logits_V.expand(count, -1), draws)[:, 0].long()
        odds = filtered(logits_V[None], [sampling])[0]
        expected, seen = count * odds, torch.bincount(tokens, minlength=97)
        assert not seen[odds == 0].any()
        kept = odds > 0
        chi_squared = float(((seen - expected)[kept] ** 2 / expected[kept]).sum())
        freedom = int(kept.sum()) - 1
        assert chi_squared < freedom + 4.5 * math.sqrt(2 * freedom), (sampling, chi_squared)


def ties_by_hand() -> None:
    """Of equal logits the lower tokens stay, also across tiles."""
    for vocab, sampling, stays in (
        (97, Sampling(1.0, top_k=5), 5),
        (9001, Sampling(1.0, top_k=5000), 5000),
        (9001, Sampling(1.0, top_p=0.75), 6751),
        (9001, Sampling(1.0, 6000, 0.5), 3000),
        (9001, Sampling(1.0, 6000, 0.5, min_p=1.0), 3000),
    ):
        draws = [Draw(sampling, "t", i) for i in range(20)]
        tokens = kernel_draws(torch.zeros(vocab).expand(len(draws), -1), draws)[:, 0]
        assert float(tokens.max()) < stays
        assert float(tokens.max()) > 0.8 * stays - 2, (float(tokens.max()), stays)


def not_finite() -> None:
    """A row that is not finite has NaN and a token; it spoils no other."""
    for vocab in (4, 9001):
        rows = torch.randn(8, vocab, generator=torch.Generator().manual_seed(1))
        rows[0] = math.nan
        rows[1, 2] = math.nan
        rows[2, 1] = math.inf
        rows[3] = -math.inf
        rows[4, 1:3] = -math.inf
        rows[5, -1] = math.nan
        for sampling in SAMPLINGS:
            draws = [Draw(sampling, "r", i) for i in range(len(rows))]
            found = kernel_draws(rows, draws)
            assert bool(((found[:, 0] >= 0) & (found[:, 0] < vocab)).all())
            assert found[:, 1].isnan().tolist() == [True] * 4 + [False, True, False, False]
            for row in (4, 6, 7):
                assert torch.equal(
                    kernel_draws(rows[row][None], draws[row : row + 1])[0], found[row]
                )


def mixed(vocab: int) -> tuple[Tensor, list[Draw]]:
    """Rows with all samplings, targets and exclusions."""
    rows = [rows_of(("flat", "peaked", "ties", "masked")[i % 4], vocab) for i in range(24)]
    draws = [Draw(sampling, f"{i}", i) for i, sampling in enumerate(SAMPLINGS)]
    draws = [*draws[:20], Draw(Sampling(), "g", 0), Draw(SAMPLINGS[-2], "t", 0, target=vocab - 1)]
    likely = frozenset(rows[22].topk(5).indices.tolist())
    draws += [Draw(Sampling(), "e", 0, exclusions=likely)]
    draws += [Draw(Sampling(1.0, 20), "e", 1, exclusions=frozenset(range(0, vocab, 3)))]
    return torch.stack(rows), draws


def same_bits() -> None:
    """A row has the same bits alone, among others, and in a wider matrix."""
    rows, draws = mixed(9001)
    found = kernel_draws(rows, draws)
    assert not draws[22].exclusions & {int(found[22, 0])} and int(found[23, 0]) % 3
    wider = torch.randn(len(rows), 9400)
    wider[:, :9001] = rows
    assert torch.equal(kernel_draws(wider[:, :9001], draws), found)
    backwards = kernel_draws(rows.flip(0), draws[::-1]).flip(0)
    assert torch.equal(backwards, found)
    for row, draw in enumerate(draws):
        assert torch.equal(kernel_draws(rows[row][None], [draw])[0], found[row]), draw


def greedy_and_targets() -> None:
    """Greedy tokens are those of the definition, and log-probabilities those of the model."""
    rows, draws = mixed(9001)
    found, expected = kernel_draws(rows, draws), draw_tokens(rows, draws)
    is_greedy = [d.sampling.greedy or d.target is not None for d in draws]
    assert torch.equal(found[is_greedy, 0], expected[is_greedy, 0])
    same = found[:, 0] == expected[:, 0]
    assert int(same.sum()) >= len(rows) - 2  # numbers at boundaries
    torch.testing.assert_close(found[same, 1], expected[same, 1], rtol=1e-6, atol=2e-6)
    first = kernel_draws(torch.zeros(2, 9001), [Draw(Sampling(), "a", 0), draws[21]])
    assert first[:, 0].tolist() == [0, 0]


def tables() -> None:
    """On the device: rows that ask have the likeliest tokens and ranks, in the same order."""
    rows, draws = mixed(9001)
    draws[2] = Draw(Sampling(), "a", 0, alternatives=5)
    draws[21] = Draw(Sampling(), "p", -3, target=7, alternatives=2, ranked=True)
    draws[10] = Draw(Sampling(), "p", -2, target=8, ranked=True)
    found = draw_table(rows.to(DEVICE), draws, 5, True).cpu()
    expected = draw_table(rows, draws, 5, True)
    same = [2, 10, 21]
    torch.testing.assert_close(found[same], expected[same], rtol=1e-6, atol=2e-6)
    assert torch.equal(found[same][:, 2::2], expected[same][:, 2::2])
    others = [i for i in range(len(rows)) if i not in same]
    assert not found[others, 2:].any()


CHECKS = {
    f"{kind} rows of {vocab}": partial(by_definition, kind, vocab)
    for kind in ("flat", "peaked", "ties", "coarse", "equal", "signed", "masked")
    for vocab in ((97, 9001, 128_256, 151_936) if ON_GPU else (1, 97, 9001))
    if vocab > 1 or kind != "masked"
}
CHECKS |= {"frequencies": often_enough, "ties": ties_by_hand, "not finite": not_finite}
CHECKS |= {"bits": same_bits, "greedy": greedy_and_targets, "tables": tables}


@pytest.mark.parametrize("name", CHECKS)
def test_sampling_on_a_gpu(name: str) -> None:
    """In a process of its own: later tests fork, which no CUDA survives."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    for check in sys.argv[1:] or CHECKS:
        CHECKS[check]()
        print("passed ", check, flush=True)
