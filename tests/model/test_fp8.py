"""fp8 on one device: rounding by hand, matmuls, gradients, and weights rounded once a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fivefold.core.layout.fp8 import LARGEST, Fp8, Fp8Format
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.model.fp8.linear import Watch
from fivefold.model.fp8.matmul import scaled_matmul
from fivefold.model.fp8.operand import Both
from fivefold.model.fp8.rounding import (
    Blockwise,
    Microscaled,
    Rounding,
    Tensorwise,
    rounding_of,
)
from fivefold.model.layers import Linear, WeightFactory
from fivefold.parallel.composition import Job, compose
from fivefold.parallel.deferred import GradientQueue
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.stage import Instruments
from tests.model.fp8_alone import fused, project
from tests.model.small import batch_of

WIDE = Fp8("blockwise", "fp8", "e4m3")
RECIPES = [
    Fp8(),
    Fp8("tensorwise", "bf16", "e4m3"),
    WIDE,
    Fp8("blockwise", "bf16", "e5m2"),
]


def numbers(form: Fp8Format) -> list[float]:
    """All finite values of a format, from its bits."""
    exponents, fractions = {"e4m3": (4, 3), "e5m2": (5, 2)}[form]
    bias, found = 2 ** (exponents - 1) - 1, list[float]()
    for exponent in range(2**exponents):
        for fraction in range(2**fractions):
            if exponent:
                found.append((1 + fraction / 2**fractions) * 2.0 ** (exponent - bias))
            else:
                found.append(fraction / 2**fractions * 2.0 ** (1 - bias))
    return [each for each in found if each <= LARGEST[form]]


def by_hand(values: Sequence[float], form: Fp8Format) -> tuple[list[float], float]:
    """Codes and scale of values that share one: the nearest number, of two the even one."""
    single = torch.tensor(max(map(abs, values)), dtype=torch.float32).clamp(min=2.0**-100)
    scale = single / torch.tensor(LARGEST[form])
    factor, known = torch.tensor(1.0) / scale, numbers(form)
    codes: list[float] = []
    for value in values:
        product = float(torch.tensor(value * float(factor), dtype=torch.float32))
        near = sorted(range(len(known)), key=lambda n: (abs(known[n] - abs(product)), n % 2))
        codes.append(math.copysign(known[near[0]], product))
    return codes, float(scale)


def rounded(
    rounding: Rounding, *parts: Tensor, form: Fp8Format = "e4m3", run: int | None = None
) -> Both:
    length = len(parts[0]) if run is None else run
    return rounding.tokens(parts, form, True, length, rounding.maximum(parts))


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_one_scale_by_hand(form: Fp8Format) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 7, dtype=torch.float64) * torch.logspace(-6, 3, 7, dtype=torch.float64)
    found = rounded(Tensorwise(), x, form=form)
    codes, scale = by_hand(x.flatten().tolist(), form)
    assert found.rows.codes.to(torch.float64).flatten().tolist() == codes
    assert float(found.rows.scale) == scale
    assert found.columns is not None
    assert torch.equal(found.columns.codes.to(torch.float64), found.rows.codes.to(torch.float64).T)


def test_ties_go_to_the_even_code() -> None:
    x = torch.tensor([[448.0, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10]])
    codes = rounded(Tensorwise(), x).rows.codes.float()
    assert codes.tolist() == [[448.0, 1.0, 1.25, 0.0, 2 * 2.0**-9]]


def test_zeros_stay_zeros_and_infinities_show() -> None:
    for rounding in (Tensorwise(), Blockwise()):
        zeros = rounded(rounding, torch.zeros(5, 130))
        assert zeros.rows.values(torch.float64).abs().max() == 0
        bad = torch.ones(5, 130)
        bad[2, 3] = math.inf
        assert rounded(rounding, bad).rows.values(torch.float32).isnan().any()
    tiny = rounded(Tensorwise(), torch.full((2, 2), 1e-44))
    assert tiny.rows.values(torch.float32).isfinite().all()


def test_blocks_by_hand() -> None:
    """Two rows of 150 tokens, 200 columns: blocks never span rows, and last ones are ragged."""
    torch.manual_seed(0)
    x = torch.randn(2, 150, 200, dtype=torch.float64) * torch.rand(2, 150, 200).exp().pow(6)
    found = rounded(Blockwise(), x.flatten(0, 1), run=150)
    assert found.columns is not None
    codes, scale = by_hand(x[1, 7, 128:].tolist(), "e4m3")
    row = 150 + 7
    assert found.rows.codes[row, 128:].tolist() == codes
    assert float(found.rows.scale[row, 1]) == scale
    codes, scale = by_hand(x[1, 128:, 3].tolist(), "e4m3")
    place = 256 + 128  # the second row begins at a block of its own
    assert found.columns.codes[3, place : place + 22].tolist() == codes
    assert float(found.columns.scale[3, 3]) == scale
    assert not found.columns.codes[:, 150:256].float().any()


def test_squares_by_hand() -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 150, dtype=torch.float64) * torch.rand(300, 150).exp().pow(6)
    found = Blockwise().weights([weight[:256], weight[256:]], None)
    codes, scale = by_hand(weight[128:256, 128:].flatten().tolist(), "e4m3")
    assert found.columns is not None
    assert found.rows.codes[128:256, 128:].flatten().tolist() == codes
    assert float(found.rows.scale[1, 1]) == float(found.columns.scale[1, 1]) == scale
    both = [each.values(torch.float64) for each in found if each is not None]
    assert torch.equal(both[0], both[1].T)


def linears(widths: Sequence[int], inputs: int, bias: bool = False) -> list[Linear]:
    factory = WeightFactory(torch.float64, torch.device("cpu"))
    made = [Linear(width, inputs, bias, factory) for width in widths]
    for parameter in (one for each in made for one in each.parameters()):
        nn.init.normal_(parameter)
    return made


def values(rounded: Both, columns: bool = False) -> Tensor:
    operand = rounded.columns if columns else rounded.rows
    assert operand is not None
    return operand.values(torch.float64)


@pytest.mark.parametrize("fp8", RECIPES, ids=str)
@pytest.mark.parametrize("widths", [(256, 128, 128), (192, 64), (48,)])
def test_the_three_matmuls_read_rounded_values(fp8: Fp8, widths: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    made, rounding = linears(widths, 160, bias=True), rounding_of(fp8)
    x = torch.randn(2, 140, 160, dtype=torch.float64, requires_grad=True)
    outputs = project(fused(fp8), x, made)
    given = [torch.randn_like(each) for each in outputs]
    torch.autograd.backward(outputs, given)
    weights = [each.weight.detach() for each in made]
    runs = rounding.runs(widths)
    rounded_x = rounded(rounding, x.detach().flatten(0, 1), run=140)
    largest = rounding.weight_maximum(weights)
    back = torch.zeros(280, 160, dtype=torch.float64)
    for run in runs:
        weight = rounding.weights([weights[n] for n in run], largest)
        parts = [given[n].flatten(0, 1) for n in run]
        grad = rounded(rounding, *parts, form=fp8.gradients, run=140)
        y = torch.cat([(outputs[n] - made[n].bias).flatten(0, 1) for n in run], 1)
        torch.testing.assert_close(y, values(rounded_x) @ values(weight).T, atol=1e-10, rtol=0)
        back += values(grad) @ values(weight)
        found = torch.cat([_grad(made[n].weight) for n in run])
        if fp8.wgrad == "fp8":
            wanted = values(grad, True) @ values(rounded_x, True).T
        else:
            wanted = torch.cat([given[n].flatten(0, 1) for n in run], 1).T @ x.detach().flatten(
                0, 1
            )
        torch.testing.assert_close(found, wanted, atol=1e-9, rtol=0)
        for n in run:
            torch.testing.assert_close(_grad(made[n].bias), given[n].sum((0, 1)))
    torch.testing.assert_close(_grad(x).flatten(0, 1), back, atol=1e-9, rtol=0)


def _grad(tensor: Tensor | None) -> Tensor:
    assert tensor is not None and tensor.grad is not None
    return tensor.grad


def test_linears_of_one_matrix_have_blocks_of_their_own() -> None:
    assert Blockwise().runs((256, 128, 64)) == [range(3)]
    assert Blockwise().runs((192, 128, 64)) == [range(1), range(1, 3)]
    assert Tensorwise().runs((192, 128, 64)) == [range(3)]


def test_rounding_errs_by_what_a_format_allows() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 256, 512), torch.randn(256, 512)
    exact = (x[0] @ weight.T).double()
    for rounding in (Tensorwise(), Blockwise()):
        of_weight = rounding.weights([weight], rounding.weight_maximum([weight]))
        a, b = rounded(rounding, x[0]).rows, of_weight.rows
        off = scaled_matmul(a, b, torch.float32).double() - exact
        assert 0.02 < float(off.norm() / exact.norm()) < 0.05


def job(watch: Watch | None = None, **keys: str) -> Job:
    options = PlanOptions(
        "tiny",
        precision="fp8",
        seq=32,
        microbatch_size=2,
        set={"layers": "3", "width": "128", "ffn": "256"},
        **keys,  # pyright: ignore[reportArgumentType]
    )
    plan = resolve(options)
    mesh = Mesh.of(plan, torch.device("cpu"))
    instruments = Instruments(on_rounded=watch)
    return compose(plan, mesh, seed=0, dtype=torch.float64, instruments=instruments)


def run(job: Job) -> Tensor:
    batch, model = batch_of(job.plan.shape, rows=2, seq=32), job.chunks[0].model
    loss = model(batch.tokens, batch)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
def test_weights_are_rounded_once_a_step(scaling: str) -> None:
    made = job(fp8=scaling)
    rounding = made.chunks[0].rounded
    first = [run(made) for _ in range(3)]
    matrices = 3 * 7  # q, k, v, out, gate, up, down
    assert rounding.num_rounded == matrices
    assert first[0] == first[1] == first[2]
    with torch.no_grad():
        for parameter in made.chunks[0].model.parameters():
            parameter.mul_(1.01)
    rounding.forget()
    assert run(made) != first[0]
    run(made)
    assert rounding.num_rounded == 2 * matrices


def test_layers_may_stay_as_they_are() -> None:
    seen: list[str] = []
    run(job(lambda names, what, *_: seen.extend(names), fp8_skip="1+1"))
    layers = {name.split(".")[1] for name in seen}
    assert layers == {"1"}
    assert {name.split(".", 2)[2] for name in seen} == {
        *("attention.q", "attention.k", "attention.v", "attention.out"),
        *("mlp.gate", "mlp.up", "mlp.down"),
    }


@pytest.mark.parametrize("fp8", RECIPES, ids=str)
def test_gradients_may_be_queued(fp8: Fp8) -> None:
    torch.manual_seed(1)
    made, queue = linears((256, 64), 160, bias=True), GradientQueue()
    x = torch.randn(2, 140, 160, dtype=torch.float64, requires_grad=True)
    outputs = project(fused(fp8), x, made)
    torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    plain = {id(one): _grad(one) for each in made for one in each.parameters()}
    taken: dict[int, Tensor] = {}

    class TakenGradients:
        def add_gradient(self, weight: Tensor, gradient: Tensor) -> None:
            taken[id(weight)] = gradient

        def add_product(self, weight: Tensor, outputs_NO: Tensor, inputs_NI: Tensor) -> None:
            taken[id(weight)] = outputs_NO.T @ inputs_NI

    outputs = project(fused(fp8), x, made, queue)
    with queue.keeping(0):
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    assert not taken
    queue.settle(0, TakenGradients())
    assert taken.keys() == plain.keys()
    assert all(torch.equal(taken[key], plain[key]) for key in plain)


@pytest.mark.parametrize("rounding", [Blockwise(), Microscaled()], ids=["blocks", "mxfp8"])
def test_tensors_without_values_round_to_the_same_sizes(rounding: Blockwise) -> None:
    """Rehearsals count them. No width is a multiple of a block, and no row of tokens is."""
    parts = [torch.randn(80, width) for width in (140, 60)]
    weights = [torch.randn(height, 200) for height in (40, 50)]

    def sizes(device: str) -> list[tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]]:
        of_tokens, of_weights = (
            [tensor.to(device) for tensor in tensors] for tensors in (parts, weights)
        )
        tokens = rounding.tokens(of_tokens, "e5m2", True, 40, None)
        operands = (*tokens[:2], *rounding.weights(of_weights, None)[:2])
        return [
            (tuple(operand.codes.shape), operand.codes.dtype, tuple(operand.scale.shape))
            for operand in operands
            if operand is not None
        ]

    assert sizes("meta") == sizes("cpu") and len(sizes("cpu")) == 4
