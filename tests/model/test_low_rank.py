"""Low-rank adapters of the plain model, and the same arithmetic with gradients written out."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from small import LLAMA, MOE, batch_of
from torch import Tensor, nn

from fivefold.core.layout.weight_table import weights
from fivefold.core.model.tuning import Tuning
from fivefold.model.decoder import from_config
from fivefold.model.init import init_weights
from fivefold.model.linear_math import AdaptedMath, LowRank, Sent, adapted_linear

F64 = torch.float64
_FACTORS = ((3, 5), (7, 3), (2, 5), (9, 2))


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
    """Two linears with adapters of other ranks, and one without, of one input."""
    torch.manual_seed(0)
    wide = torch.nn.ParameterList(torch.randn(*size, dtype=F64) for size in _FACTORS)
    adapters = [LowRank(wide[0], wide[1], 0.7), None, LowRank(wide[2], wide[3], 1.3)]
    weights = [torch.randn(outputs, 5, dtype=F64) for outputs in (7, 4, 9)]
    biases = [nn.Parameter(torch.randn(7, dtype=F64)), None, None]
    x = torch.randn(6, 5, dtype=F64, requires_grad=True)
    expected = [_by_autograd(*each, x) for each in zip(adapters, weights, biases, strict=True)]
    grads = [torch.randn_like(each) for each in expected]
    learned = [*wide, biases[0]]
    wanted = torch.autograd.grad(expected, (x, *learned), grads)
    math, sink = AdaptedMath(adapters), _Sink()
    with torch.no_grad():
        made = math.fprop([x], weights, biases, None)
        read = math.operands([Sent(each) for each in grads], 6, True, True)
        back = torch.cat([math.dgrad(read, weights, number, 2, None) for number in range(2)])
        for work in math.wgrads([x], read, weights, biases):
            work(sink)
    found = (*made, back, *(sink.found[id(each)] for each in learned))
    for ours, theirs in zip(found, (*expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
    assert not any(id(weight) in sink.found for weight in weights)


def _by_autograd(adapter: LowRank | None, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    if adapter is None:
        return F.linear(x, weight, bias)
    return adapted_linear(adapter, x, weight, bias)
