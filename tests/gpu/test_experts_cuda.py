"""Kernels for experts of few tokens beside the operators of the model: choice, order and matmuls.

On a machine without a GPU, `TRITON_INTERPRET=1 python3 tests/gpu/test_experts_cuda.py` runs the
same checks where Triton is installed, slowly.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fivefold.core.model import Moe
from fivefold.core.model.presets import load
from fivefold.launch.backend import num_gpus
from fivefold.model import Decoder, MoeMlp, from_config
from fivefold.model.moe import local_dispatch
from fivefold.model.slots import sum_of_choices

pytestmark = pytest.mark.skipif(
    not num_gpus() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="no CUDA device: run this where there is one",
)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
WIDTH, SIZES = 72, (1, 20) if INTERPRETED else (1, 3, 40, 300)
ROUTERS = {
    "softmax": Moe(16, 4, 40),
    "renormalised": Moe(16, 2, 40, renormalise=True, scaling=2.5),
    "20 experts": Moe(20, 6, 24, renormalise=True),
    "one choice": Moe(8, 1, 32, score="sigmoid"),
    "groups by their best": Moe(60, 6, 24, groups=5, groups_kept=2, scaling=16.0),
    "groups by two": Moe(
        *(64, 8, 24), score="sigmoid", groups=8, groups_kept=4, group_score="top2", bias=True,
        renormalise=True, scaling=2.5,
    ),
    "all experts": Moe(4, 4, 24),
}  # fmt: skip


def layer_of(moe: Moe, dtype: torch.dtype) -> MoeMlp:
    sizes = {"width": WIDTH, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 36, "vocab": 64}
    shape = replace(load("tiny-moe"), moe=moe, **sizes)
    decoder: Decoder = from_config(shape, dtype=dtype, device=str(DEVICE))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(values)
        (layer,) = (module for module in decoder.modules() if isinstance(module, MoeMlp))
        layer.router.matmul = wide_matmul_by_torch
        if layer.router.bias is not None:
            layer.router.bias.copy_(torch.randn(moe.experts, generator=generator) * 0.1)
    layer.experts.slot_sums.sum = lambda parts, places, complete: sum_of_choices(
        *(*parts, None)[:2], places, complete
    )
    return layer.requires_grad_(False)


def wide_matmul_by_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    del bias
    return x.float() @ weight.float().T


def tokens_of(count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, WIDTH, generator=generator).to(DEVICE, dtype)


def nothing_beside() -> None:
    return None


@pytest.mark.parametrize("name", ROUTERS)
def test_choices_and_weights_are_those_of_the_router(name: str) -> None:
    from fivefold.generate.expert_kernel import choose_experts

    layer = layer_of(ROUTERS[name], torch.float32)
    for count in SIZES:
        plain = layer.router(tokens_of(count, torch.float32))
        logits = plain.logits.contiguous()
        routing = choose_experts(logits, layer.router.bias, layer.router.moe)
        torch.testing.assert_close(routing.experts, plain.experts)
        torch.testing.assert_close(routing.weights, plain.weights)
        torch.testing.assert_close(routing.scores, plain.scores)


def test_of_equal_scores_the_lower_number_wins() -> None:
    from fivefold.generate.expert_kernel import choose_experts

    moe = replace(ROUTERS["softmax"], groups=4, groups_kept=2)
    logits = torch.tensor([[0.0] * 16, [1.0, 0.0] * 8, [0.0] * 8 + [1.0] * 8]).to(DEVICE)
    chosen = choose_experts(logits, None, moe).experts.tolist()
    assert chosen == [[0, 1, 2, 3], [0, 2, 4, 6], [8, 9, 10, 11]]


def test_scores_that_are_no_number_choose_experts_that_there_are() -> None:
    from fivefold.generate.expert_kernel import choose_experts

    for moe in ROUTERS.values():
        logits = torch.full((3, moe.experts), float("nan"), device=DEVICE)
        bias = torch.zeros(moe.experts, device=DEVICE) if moe.bias else None
        chosen = choose_experts(logits, bias, moe).experts
        assert int(chosen.min()) >= 0 and int(chosen.max()) < moe.experts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["softmax", "20 experts", "one choice", "all experts"])
def test_sums_are_those_of_the_operators(name: str, dtype: str) -> None:
    from fivefold.generate.expert_kernel import run_experts

    if INTERPRETED and dtype == "bfloat16":
        pytest.skip("the interpreter has no such numbers")
    type_of_values: torch.dtype = getattr(torch, dtype)
    layer = layer_of(ROUTERS[name], type_of_values)
    exact = layer_of(ROUTERS[name], torch.float64 if INTERPRETED else torch.float32)
    for count in SIZES:
        x = tokens_of(count, type_of_values)
        routing = layer.router(x)
        wide = x.to(exact.experts.up.weight.dtype)
        expected = local_dispatch(wide, routing, exact.experts, nothing_beside)  # type: ignore[arg-type]
        total = torch.full_like(x, float("nan"))
        run_experts(x, routing.experts, routing.weights, layer.experts, 0, total)
        bound = {"rtol": 2e-2, "atol": 2e-2 * float(expected.abs().max())}
        bound = {"rtol": 2e-5, "atol": 2e-5} if dtype == "float32" else bound
        torch.testing.assert_close(total.to(expected.dtype), expected, **bound)


def test_ranks_of_experts_add_up_to_one() -> None:
    from fivefold.generate.expert_kernel import run_experts

    layer, x = layer_of(ROUTERS["20 experts"], torch.float32), tokens_of(20, torch.float32)
    routing, experts = layer.router(x), layer.experts
    whole, parts = torch.empty_like(x), torch.zeros_like(x)
    run_experts(x, routing.experts, routing.weights, experts, 0, whole)
    full = {name: getattr(experts, name).weight for name in ("gate", "up", "down")}
    for first in range(0, 20, 5):
        for name, weight in full.items():
            part = torch.nn.Parameter(weight[first : first + 5].clone(), requires_grad=False)
            getattr(experts, name).weight = part
        total = torch.full_like(x, float("nan"))
        parts += run_experts(x, routing.experts, routing.weights, experts, first, total)
    torch.testing.assert_close(parts, whole)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q", "-x", *sys.argv[1:]]))
