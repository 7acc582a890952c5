"""Low-rank adapters of the plain model, and the same arithmetic with gradients written out."""

from __future__ import annotations

from dataclasses import replace

import torch
from small import LLAMA, MOE, batch_of
from torch import nn

from fivefold.core.tuning import Tuning
from fivefold.core.weights import weights
from fivefold.model.decoder import from_config
from fivefold.model.init import init_weights
from fivefold.model.low_rank import AdaptedMath, LowRank, adapted_linear

F64 = torch.float64


def test_a_new_adapter_changes_nothing_and_has_a_gradient() -> None:
    for shape in (LLAMA, MOE):
        batch = batch_of(shape)
        plain = from_config(shape, dtype=F64)
        adapted = from_config(replace(shape, tuning=Tuning(4, 8.0)), dtype=F64)
        for each in (plain, adapted):
            init_weights(each, each.shape, seed=3)
        loss = adapted(batch.tokens, batch)
        assert torch.equal(loss, plain(batch.tokens, batch))
        loss.backward()
        found = {name: one.grad for name, one in adapted.named_parameters()}
        assert all((one is None) == (".lora." not in name) for name, one in found.items())
        assert all(one.any() for name, one in found.items() if name.endswith("lora.b"))
        assert not any(one.any() for name, one in found.items() if name.endswith("lora.a"))


def test_parameters_are_those_of_the_table_in_its_order() -> None:
    for shape in (LLAMA, MOE):
        tuned = replace(shape, tuning=Tuning(4, 8.0, "q+experts+mlp.up", "norm"))
        decoder = from_config(tuned, device="meta")
        ours = [
            (name, tuple(one.shape), one.requires_grad) for name, one in decoder.named_parameters()
        ]
        assert ours == [(one.name, one.shape, not one.frozen) for one in weights(tuned)]


class _Sink:
    def __init__(self) -> None:
        self.found: dict[int, torch.Tensor] = {}

    def add_product(self, weight: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> None:
        self.found[id(weight)] = out.T @ x

    def add_gradient(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        self.found[id(weight)] = gradient


def test_written_out_gradients_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    a, b = (nn.Parameter(torch.randn(*size, dtype=F64)) for size in ((3, 5), (7, 3)))
    adapter, weight = LowRank(a, b, 0.7), torch.randn(7, 5, dtype=F64)
    bias = nn.Parameter(torch.randn(7, dtype=F64))
    x, grad = torch.randn(6, 5, dtype=F64, requires_grad=True), torch.randn(6, 7, dtype=F64)
    expected = adapted_linear(adapter, x, weight, bias)
    wanted = torch.autograd.grad(expected, (x, a, b, bias), grad)
    math, sink = AdaptedMath([adapter]), _Sink()
    with torch.no_grad():
        (made,) = math.multiply([x], [weight], [bias], None)
        back = torch.cat([math.back([grad], [weight], number, 2, None) for number in range(2)])
        for work in math.works([x], [grad], [weight], [bias]):
            work(sink)
    found = (made, back, *(sink.found[id(each)] for each in (a, b, bias)))
    for ours, theirs in zip(found, (expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
    assert id(weight) not in sink.found
