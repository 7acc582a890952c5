"""Decode steps with experts over ranks: all tokens to all ranks of a group, at one size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch.nn.functional as F
from torch import Tensor

from fivefold.commands.verify import runnable
from fivefold.core.layout import Layout
from fivefold.core.model import Moe
from fivefold.core.plan import DecodeSteps
from fivefold.core.plan.plan import PlanOptions
from fivefold.generate import DecoderForward, SequenceChunk, StepBatch, forward_plan
from fivefold.generate import layout as generate_layout
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.cache import KvCache
from fivefold.generate.expert_steps import ExpertGroup, FewTokenKernels, dispatch_few_tokens
from fivefold.generate.routing import RouteStore
from fivefold.generate.stage_ends import StageEnds
from fivefold.generate.step_tensors import decode_size, filled
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.model import Decoder, Experts, Routing, TokenRanks
from fivefold.model.moe import choose_experts, expert_weights
from fivefold.parallel import Mesh
from fivefold.verify.generated import Observed
from fivefold.verify.generated_ranks import GeneratedSettings, generate_rank, judge_rank


def choose(logits_NE: Tensor, bias_E: Tensor | None, moe: Moe) -> Routing:
    scores_NE = logits_NE.softmax(-1) if moe.score == "softmax" else logits_NE.sigmoid()
    chosen_NK = choose_experts(scores_NE, bias_E, moe)
    weights_NK = expert_weights(scores_NE, chosen_NK, moe.renormalise, moe.scaling)
    return Routing(chosen_NK, weights_NK, scores_NE, logits_NE)


def run(
    x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor, experts: Experts, first: int, total: Tensor
) -> Tensor:
    """What the kernels compute, expert by expert."""
    assert experts.gate is not None
    total.zero_()
    for number in range(len(experts.up.weight)):
        gate, up = (F.linear(x_ND, stack.weight[number]) for stack in (experts.gate, experts.up))
        y_ND = F.linear(F.silu(gate) * up, experts.down.weight[number])
        shares_N1 = (weights_NK * (chosen_NK == first + number)).sum(1, keepdim=True)
        total += y_ND * shares_N1
    return total


class TogetherForward(DecoderForward):
    """Decode steps of one size on all ranks of an expert group, as those that are captured."""

    steps = 0

    def __init__(
        self,
        model: Decoder,
        blocks: int,
        mesh: Mesh,
        ends: StageEnds,
        steps: DecodeSteps,
        routes: RouteStore | None = None,
        drawn: DrawnTokens | None = None,
        adapters: TokenRanks | None = None,
        kv_codes: bool = False,
    ) -> None:
        make_cache = partial(KvCache, codes=kv_codes)
        super().__init__(model, blocks, make_cache, ends, routes, drawn, adapters)
        self.group = ExpertGroup(mesh)
        assert steps == DecodeSteps(model.shape, mesh.layout, "float64"), "what it is asked of"
        dispatch_few_tokens(model, self.group, FewTokenKernels(choose, run))

    def __call__(self, step: StepBatch) -> Tensor:
        size = decode_size(step, self.ends.unit)
        if size is None:
            return super().__call__(step)
        self.copy_blocks(step)
        TogetherForward.steps += 1
        with self.group.in_decode():
            return super().__call__(filled(step, size.sequences, self.padding))[: len(step.chunks)]


def decode_together(worker: Worker, *task: object) -> tuple[Observed, int]:
    TogetherForward.steps = 0
    with patch.object(generate_layout, "forward_of", TogetherForward):
        observed: Observed = generate_rank(worker, *task)  # type: ignore[arg-type]
    return observed, TogetherForward.steps


@pytest.mark.parametrize(
    "layout",
    ["dp=2 ep=2", "tp=2 ep=2", "tp=2 etp=2", "dp=2 tp=2 ep=4", "dp=2 tp=2 ep=2 etp=2", "pp=2"],
)
def test_tokens_are_those_of_one_device(pool: Pool, layout: str) -> None:
    plan = runnable(PlanOptions("tiny-moe", layout=layout, set={"layers": "2"}), trains=False)
    plan, settings = forward_plan(plan), GeneratedSettings()
    ranks = pool.run_each([(decode_together, (plan, settings))] * plan.layout.world)
    steps = {count for _, count in ranks}
    assert len(steps) == 1 and steps.pop() > 60
    observed = [rank for rank, _ in ranks]
    (verdict,) = pool.run_each([(judge_rank, (plan, settings, observed))])
    assert verdict.passed and verdict.logit_err < 1e-10, verdict


def test_replicas_decode_at_the_size_of_the_largest() -> None:
    def batch(*stops: int) -> StepBatch:
        return StepBatch(tuple(SequenceChunk("", (0,), stop - 1, (), True) for stop in stops))

    assert decode_size(batch(), 1) is None
    assert decode_size(batch(5), 1) == (1, 8)
    assert decode_size(batch(5, 300, 128), 1) == (4, 32)
    assert decode_size(batch(4000), 1) == (1, 32)
    assert decode_size(batch(5), 2) == (2, 16)
    beside = (batch(), batch(9, 9, 9), batch(4000))
    sizes = {decode_size(replace(own, beside=beside), 1) for own in (batch(5), batch())}
    assert sizes == {(4, 64)}
    prompt = StepBatch((SequenceChunk("", (0, 0), 0, (), True),))
    assert decode_size(replace(batch(5), beside=(prompt,)), 1) is None


def test_experts_that_kernels_do_not_know() -> None:
    shape = runnable(PlanOptions("tiny-moe")).shape
    assert shape.moe is not None and DecodeSteps(shape, Layout()).few_token_experts
    moe = shape.moe
    others = (None, replace(moe, biases=True), replace(moe, weigh_inputs=True))
    for other in (
        *(replace(shape, moe=each) for each in others),
        replace(shape, activation="geglu"),
    ):
        assert not DecodeSteps(other, Layout()).few_token_experts
