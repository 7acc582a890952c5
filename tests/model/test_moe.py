"""Experts: who is chosen, with what weight, and what comes back; numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import DEEPSEEK, LLAMA, MOE, batch_of, filled, gradients
from torch import Tensor

from fivefold.core.layout.weight_table import weights
from fivefold.core.model.shape import Moe, Shape
from fivefold.model.decoder import Decoder
from fivefold.model.layers import WeightFactory
from fivefold.model.moe import (
    Experts,
    MoeMlp,
    OverlappedTask,
    Router,
    Routing,
    choose_experts,
    grouped_matmul,
    local_dispatch,
)

F64 = torch.float64
CPU = WeightFactory(F64, torch.device("cpu"))
PLAIN = Moe(experts=4, top_k=2, ffn=8)


def routed(moe: Moe, logits: list[list[float]], bias: list[float] | None = None) -> Routing:
    """Through a router whose logits are its inputs."""
    router = Router(replace(LLAMA, width=moe.experts), moe, CPU)
    with torch.no_grad():
        router.weight.copy_(torch.eye(moe.experts))
        if bias is not None:
            router.bias.copy_(torch.tensor(bias))
    return router(torch.tensor(logits, dtype=F64))


def moe_of(decoder: Decoder) -> MoeMlp:
    return decoder.get_submodule("blocks.1.mlp")


def logs(*numbers: float) -> list[float]:
    """Logits whose softmax is these numbers over their sum."""
    return [math.log(number) for number in numbers]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.4, 0.3]),
        ({"renormalise": True}, [4 / 7, 3 / 7]),
        ({"scaling": 2.5}, [1.0, 0.75]),
        ({"renormalise": True, "scaling": 2.5}, [10 / 7, 7.5 / 7]),
    ],
)
def test_softmax_weights_by_hand(changes: dict[str, Any], expected: list[float]) -> None:
    found = routed(replace(PLAIN, **changes), [logs(1, 4, 2, 3)])
    assert found.experts.tolist() == [[1, 3]]
    torch.testing.assert_close(found.weights, torch.tensor([expected], dtype=F64))
    torch.testing.assert_close(found.scores, torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=F64))


def test_sigmoids_with_a_bias_choose_by_the_sum_and_weigh_by_the_score() -> None:
    moe = replace(PLAIN, score="sigmoid", renormalise=True, scaling=2.0, bias=True)
    odds = [math.log(score / (1 - score)) for score in (0.5, 0.6, 0.2, 0.1)]
    plain = routed(moe, [odds])
    assert plain.experts.tolist() == [[1, 0]]
    found = routed(moe, [odds], bias=[0.0, 0.0, 0.5, 0.0])
    assert found.experts.tolist() == [[2, 1]]
    torch.testing.assert_close(found.weights, torch.tensor([[0.5, 1.5]], dtype=F64))


def test_equal_scores_go_to_the_lower_expert() -> None:
    moe = Moe(experts=64, top_k=7, ffn=8)
    scores = torch.randint(0, 3, (200, 64), generator=torch.Generator().manual_seed(0))
    best = [sorted(range(64), key=lambda e, row=row: (-row[e], e))[:7] for row in scores.tolist()]
    assert choose_experts(scores.to(F64), None, moe).tolist() == best


def test_groups_by_their_best_or_by_their_two_best() -> None:
    """Group 0 has the best expert, group 2 the best pair, group 1 neither."""
    scores = torch.tensor([[0.9, 0.1, 0.3, 0.4, 0.6, 0.5]], dtype=F64)
    moe = Moe(experts=6, top_k=2, ffn=8, groups=3, groups_kept=1)
    assert choose_experts(scores, None, moe).tolist() == [[0, 1]]
    by_two = replace(moe, group_score="top2")
    assert choose_experts(scores, None, by_two).tolist() == [[4, 5]]
    # The bias moves groups as well.
    bias = torch.tensor([0.0, 0.3, 0, 0, 0, 0], dtype=F64)
    assert choose_experts(scores, bias, by_two).tolist() == [[0, 1]]
    # Of equal groups the first, of groups of one their only expert.
    assert choose_experts(torch.ones(1, 6, dtype=F64), None, by_two).tolist() == [[0, 1]]
    alone = replace(by_two, groups=6, groups_kept=2)
    assert choose_experts(scores, None, alone).tolist() == [[0, 4]]


def test_an_expert_of_a_dropped_group_is_never_chosen() -> None:
    """All scores zero outside: minus infinity, not zero, keeps the others out."""
    scores = torch.tensor([[0.5, 0.0, 0.0, 0.0]], dtype=F64)
    moe = replace(PLAIN, groups=2, groups_kept=1)
    bias = torch.tensor([0.0, -1.0, 0.0, 0.0], dtype=F64)
    assert choose_experts(scores, bias, moe).tolist() == [[0, 1]]


def test_a_narrow_model_routes_in_float32() -> None:
    router = Router(LLAMA, PLAIN, WeightFactory(torch.bfloat16, torch.device("cpu")))
    with torch.no_grad():
        router.weight.normal_()
    x = torch.randn(50, LLAMA.width).bfloat16()
    found = router(x)
    assert found.weights.dtype == found.logits.dtype == torch.float32
    torch.testing.assert_close(found.logits, x.float() @ router.weight.float().T)
    assert found.logits.ne(found.logits.bfloat16()).any()


def by_hand(moe: MoeMlp, x_ND: Tensor, weigh_inputs: bool = False) -> Tensor:
    """Token by token, expert by expert."""
    routing, experts = moe.router(x_ND), moe.experts
    rows = []
    for n, x in enumerate(x_ND):
        total = torch.zeros_like(x)
        for e, weight in zip(routing.experts[n], routing.weights[n], strict=True):
            inputs = x * weight if weigh_inputs else x
            up = experts.up.weight[e] @ inputs
            hidden = F.silu(experts.gate.weight[e] @ inputs) * up if experts.gate else F.gelu(up)
            total = total + experts.down.weight[e] @ hidden * (1 if weigh_inputs else weight)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "shape",
    [
        MOE,
        DEEPSEEK,
        replace(MOE, moe=replace(MOE.moe, weigh_inputs=True, shared=0, shared_ffn=0)),
        replace(MOE, activation="gelu"),
    ],
    ids=["moe", "deepseek", "weigh-inputs", "not-gated"],
)
def test_experts_and_their_gradients_by_hand(shape: Shape) -> None:
    moe = moe_of(filled(shape))
    x = torch.randn(2, 9, shape.width, dtype=F64, requires_grad=True)
    x_ND = x.flatten(0, 1)
    expected = by_hand(moe, x_ND, shape.moe.weigh_inputs).view_as(x)
    if moe.shared is not None:
        expected = expected + moe.shared(x)
    found = moe(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    slope = torch.randn_like(found)
    leaves = [x, *moe.parameters()]
    wanted = torch.autograd.grad(expected, leaves, slope)
    for mine, theirs in zip(torch.autograd.grad(found, leaves, slope), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_a_gated_shared_expert_is_weighed_by_a_sigmoid_of_the_token() -> None:
    shape = replace(MOE, moe=replace(MOE.moe, shared_gated=True))
    moe = moe_of(filled(shape))
    x = torch.randn(2, 5, shape.width, dtype=F64)
    assert moe.shared is not None and moe.shared_gate is not None
    share = 1 / (1 + torch.exp(-(x * moe.shared_gate.weight[0]).sum(-1, keepdim=True)))
    expected = by_hand(moe, x.flatten(0, 1)).view_as(x) + share * moe.shared(x)
    torch.testing.assert_close(moe(x), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("weigh_inputs", [False, True])
@pytest.mark.parametrize("pads", [False, True])
def test_dropped_slots_and_their_gradients_by_hand(weigh_inputs: bool, pads: bool) -> None:
    """A weight of zero is as good as no slot, but only for the result: nothing is computed."""
    moe = moe_of(filled(replace(MOE, moe=replace(MOE.moe, weigh_inputs=weigh_inputs))))
    x = torch.randn(7, MOE.width, dtype=F64, requires_grad=True)
    routing = moe.router(x)
    kept = torch.rand(7, 2, generator=torch.Generator().manual_seed(3)) < 0.6
    kept[2] = False
    assert not kept.all() and kept.any(0).all()
    dropped = routing._replace(
        experts=routing.experts.where(kept, 6),
        weights=routing.weights * kept,
        drops=True,
        capacity=7 if pads else None,
    )
    computed: list[int] = []
    moe.experts.register_forward_hook(lambda _, given, __: computed.append(len(given[0][0])))
    found = local_dispatch(x, dropped, moe.experts, OverlappedTask(lambda: None))
    assert computed == [7 * 6 if pads else int(kept.sum())]
    zeroed = routing._replace(weights=routing.weights * kept)
    expected = local_dispatch(x, zeroed, moe.experts, OverlappedTask(lambda: None))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    slope, leaves = torch.randn_like(found), [x, moe.router.weight, *moe.experts.parameters()]
    wanted = torch.autograd.grad(expected, leaves, slope, retain_graph=True)
    for mine, theirs in zip(torch.autograd.grad(found, leaves, slope), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_what_is_beside_is_computed_once_and_only_when_asked() -> None:
    asked: list[int] = []
    beside = OverlappedTask(lambda: asked.append(1) or torch.ones(1))
    assert not asked
    assert beside() is beside() and asked == [1]


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (6, 40), (40, 6)])
def test_grouped_products_in_float32_are_those_of_float64(
    inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, grouped = F.grouped_mm, []
    monkeypatch.setattr(F, "grouped_mm", lambda *a, **k: grouped.append(1) or real(*a, **k))
    x = torch.randn(17, inputs, dtype=F64, requires_grad=True)
    weight = torch.randn(4, outputs, inputs, dtype=F64, requires_grad=True)
    ends = torch.tensor([5, 5, 8, 17], dtype=torch.int32)
    y = grouped_matmul(x, weight, ends)
    parts = [part @ one.T for part, one in zip(x.split([5, 0, 3, 9]), weight, strict=True)]
    torch.testing.assert_close(y, torch.cat(parts))
    y.sum().backward()  # an expanded gradient
    assert not grouped
    narrow = [each.detach().float().requires_grad_() for each in (x, weight)]
    y32 = grouped_matmul(*narrow, ends)
    y32.sum().backward()
    # Rows of 24 bytes are not aligned to 16.
    assert bool(grouped) == (min(inputs, outputs) > 6)
    for mine, wide in ((y32, y), (narrow[0].grad, x.grad), (narrow[1].grad, weight.grad)):
        torch.testing.assert_close(mine.double(), wide, rtol=1e-5, atol=1e-5)
    assert narrow[1].grad.is_contiguous() and narrow[1].grad[1].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_experts_and_batches_without_tokens_have_zero_gradients(dtype: torch.dtype) -> None:
    decoder = filled(MOE, dtype)
    moe = moe_of(decoder)
    with torch.no_grad():
        moe.router.weight.zero_()  # every score is equal: experts 0 and 1 get everything
    found = gradients(decoder, batch_of(MOE))
    assert len(found) == len(weights(MOE))
    for one in ("gate", "up", "down"):
        grad = found[f"blocks.1.mlp.experts.{one}.weight"]
        assert [bool(each.count_nonzero()) for each in grad] == [True, True, *[False] * 4]
    decoder.zero_grad()
    nothing = torch.zeros(1, 0, MOE.width, dtype=dtype, requires_grad=True)
    moe(nothing).sum().backward()
    assert nothing.grad is not None
    for parameter in moe.parameters():
        assert parameter.grad is not None and parameter.grad.count_nonzero() == 0


def test_a_token_is_computed_alike_whatever_the_others() -> None:
    moe = moe_of(filled(MOE))
    x = torch.randn(1, 12, MOE.width, dtype=F64)
    order = torch.randperm(12)
    torch.testing.assert_close(moe(x[:, order]), moe(x)[:, order], rtol=1e-13, atol=1e-14)


def test_the_seams_between_router_and_experts() -> None:
    """A balance sees the rows, and a dispatch what the balance returned."""
    moe = moe_of(filled(MOE))
    x = torch.randn(3, 4, MOE.width, dtype=F64)
    seen: list[int] = []

    def halved(routing: Routing, num_rows: int) -> Routing:
        seen.append(num_rows)
        return routing._replace(weights=routing.weights / 2)

    def doubled(x_ND: Tensor, routing: Routing, experts: Experts, beside: OverlappedTask) -> Tensor:
        return 2 * local_dispatch(x_ND, routing, experts, beside)

    expected = moe(x)
    moe.balance, moe.dispatch = halved, doubled
    torch.testing.assert_close(moe(x), expected, rtol=1e-13, atol=1e-14)
    assert seen == [3]


@pytest.mark.parametrize("name", ["router.weight", "experts.down.weight", "shared.up.weight"])
def test_a_change_of_any_part_changes_the_loss(name: str) -> None:
    decoder, batch = filled(MOE), batch_of(MOE)
    before = decoder(batch.tokens, batch)
    with torch.no_grad():
        moe_of(decoder).get_parameter(name).mul_(1.5)
    assert decoder(batch.tokens, batch) != before
