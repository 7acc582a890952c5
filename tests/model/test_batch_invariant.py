"""A batch-invariant engine gives the same bits in every batch; a split or a tile that depends on
the batch is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small import DEEPSEEK, GPT, LLAMA, MOE
from torch import Tensor

from fivefold.core.model.shape import Shape
from fivefold.core.plan.plan import PlanOptions
from fivefold.generate import invariant, layout, tiles
from fivefold.generate.cache import LayerPages, attend_pages
from fivefold.generate.engine import Watch
from fivefold.generate.forward import DecoderForward
from fivefold.generate.layout import LayoutEngine, mesh_of, plan_of, stage_of
from fivefold.generate.requests import BlockCopy, SequenceChunk, StepBatch
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.generate.step_tensors import StepTensors
from fivefold.model.batch import AttentionInfo
from fivefold.model.layers import Activate
from fivefold.verify.generated import GeneratedTrial, GeneratedVerdict

LONG = 96
SHAPES = {
    "llama": replace(LLAMA, max_seq=LONG),
    "window": replace(LLAMA, max_seq=LONG, window=7),
    "gpt": replace(GPT, max_seq=LONG),
    "moe": replace(MOE, max_seq=LONG),
    "latent": replace(DEEPSEEK, max_seq=LONG, mtp=0),
    "capped": replace(LLAMA, max_seq=LONG, score_cap=0.3, sinks=True),
    "chunks": replace(LLAMA, max_seq=LONG, window=7, window_kind="chunked", global_every=2),
}
SHORT = replace(LLAMA, max_seq=40)  # nothing to lose or to share, and enough to differ
CASES = [(shape, dtype) for shape in SHAPES for dtype in ("float32", "bfloat16")]


def prove(shape: Shape, dtype: str, batch_invariant: bool = True) -> GeneratedVerdict:
    """The verdict on an engine of one rank in this process."""
    plan, cpu = replace(plan_of(shape, PlanOptions("tiny")), shape=shape), torch.device("cpu")
    mesh, trial = mesh_of(plan, cpu, batch_invariant), GeneratedTrial(shape, dtype, 0)

    def make(blocks: int, limits: ScheduleLimits, watch: Watch) -> LayoutEngine:
        stage = stage_of(plan, mesh, getattr(torch, dtype), batch_invariant)
        stage.fill(lambda weight, _: full(trial, weight.name))
        return LayoutEngine(
            plan, mesh, stage, blocks, limits, watch, batch_invariant=batch_invariant
        )

    return trial.verdict([trial.observe(make)], batch_invariant)


def full(trial: GeneratedTrial, name: str) -> Tensor:
    found = trial.full_weight(name)
    assert found is not None, name
    return found


@pytest.mark.sample(0.5)
@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_batches_change_no_bit(shape: str, dtype: str) -> None:
    verdict = prove(SHAPES[shape], dtype)
    assert verdict.passed, verdict
    assert verdict.batch_diff == verdict.batch_bound == 0.0 and verdict.tokens_equal
    assert verdict.preempted > 0 and verdict.reused > 0


def test_without_it_bits_depend_on_the_batch() -> None:
    verdict = prove(SHORT, "float32", batch_invariant=False)
    assert verdict.passed and verdict.tokens_equal
    assert verdict.batch_bound is not None and 0 < verdict.batch_diff <= verdict.batch_bound


def unpadded_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and tiles of as many rows as there are tokens."""

    def as_they_are(step: StepBatch, size: int, padding: int) -> StepBatch:
        return single(step, step.num_tokens, padding)

    def at_once(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, rows: int) -> Tensor:
        return torch.nn.functional.linear(x_MI, weight_OI, bias_O)

    single = invariant.single_tokens
    monkeypatch.setattr(invariant, "single_tokens", as_they_are)
    monkeypatch.setattr(tiles, "_by_torch", at_once)


def splits_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention whose sums are cut by the number of sequences in a step."""

    def attend(q: Tensor, pages: LayerPages, step: StepTensors, info: AttentionInfo) -> Tensor:
        sequences = len({each.id for each in step.chunks if not each.fills})
        if sequences < 2:
            return attend_pages(q, pages, step, info)
        wide = LayerPages(pages.keys.double(), pages.values.double())
        return attend_pages(q.double(), wide, step, info).to(q.dtype)

    def sick(*given: Any) -> DecoderForward:
        forward = plain(*given)
        monkeypatch.setattr(forward.cache, "kernel", attend)
        return forward

    plain = layout.forward_of
    monkeypatch.setattr(layout, "forward_of", sick)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", [unpadded_tiles, splits_by_batch], ids=lambda each: each.__name__)
def test_what_depends_on_the_batch_is_caught(
    fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(fault)
    fault(monkeypatch)
    verdict = prove(SHORT, "float32")
    assert not verdict.passed
    assert verdict.batch_diff > 0 and verdict.logit_err < 1e-4  # nothing else would see it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_among_any_others(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x_MI, weight_EOI = (
        torch.randn(*size, generator=generator).to(dtype) for size in ((40, 72), (3, 33, 72))
    )
    bias_O = torch.randn(33, generator=generator).to(dtype)
    together = tiles.tile_linear(x_MI, weight_EOI[0], bias_O)
    alone = [tiles.tile_linear(row[None], weight_EOI[0], bias_O) for row in x_MI]
    assert torch.equal(together, torch.cat(alone))
    expected = (x_MI.double() @ weight_EOI[0].double().T + bias_O.double()).to(dtype)
    assert torch.allclose(together.double(), expected.double(), rtol=1e-2, atol=1e-4)
    ends = torch.tensor([17, 17, 40])
    experts = tiles.tile_experts(x_MI, weight_EOI, ends)
    first = tiles.tile_linear(x_MI[:17], weight_EOI[0], None)
    last = tiles.tile_linear(x_MI[17:], weight_EOI[2], None)
    assert torch.allclose(experts.float(), torch.cat([first, last]).float(), rtol=1e-2, atol=1e-4)
    one = tiles.tile_experts(x_MI[20:21], weight_EOI, torch.tensor([0, 0, 1]))
    assert torch.equal(one[0], experts[20])


def test_activations_do_not_end_inside_of_a_vector() -> None:
    plain = Activate(replace(LLAMA, activation="geglu"), lambda compute, varies=False: compute)
    pieces = tiles.PiecewiseActivate(plain)
    gate, up = torch.randn(2, 500, 37, generator=torch.Generator().manual_seed(0)).unbind()
    weight = torch.rand(500, 1)
    found = pieces(gate, up, weight)
    assert torch.allclose(found, plain(gate, up, weight), rtol=1e-5, atol=1e-6)
    alone = [pieces(*(each[n : n + 1] for each in (gate, up, weight))) for n in range(500)]
    assert torch.equal(found, torch.cat(alone))


def test_a_step_has_one_size() -> None:
    assert invariant.step_size(torch.device("cpu"), 1) == tiles.ROWS["cpu"]
    assert invariant.step_size(torch.device("cpu"), 3) == 33
    chunks = (
        SequenceChunk("a", (5, 6, 7), 30, (1, 2, 3), True, outgrown=True),
        SequenceChunk("b", (8,), 0, (4,), False),
    )
    step = invariant.single_tokens(StepBatch(chunks, (BlockCopy(3, 7),)), 6, padding=9)
    assert step.copies == (BlockCopy(3, 7),)
    found = step.chunks
    assert [(each.tokens[0], each.start) for each in found[:4]] == [
        (5, 30),
        (6, 31),
        (7, 32),
        (8, 0),
    ]
    assert [each.outgrown for each in found] == [True] * 3 + [False] * 3
    assert [each.fills for each in found] == [False] * 4 + [True] * 2
    assert found[4].table == (9,) and found[0].table == (1, 2, 3)
