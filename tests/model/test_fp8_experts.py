"""Routed experts in fp8 on one device: rows by hand, products, rows that travel as codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from fivefold.core.layout.fp8 import packed_row
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.model.fp8 import rows as fp8_rows
from fivefold.model.fp8.experts import ExpertRounding, RoundedExperts
from fivefold.model.fp8.linear import RoundedWeights
from fivefold.model.fp8.rounding import same
from fivefold.model.fp8.rows import (
    CodedRows,
    RowOperand,
    expert_maxima,
    round_and_pack,
    round_rows,
    round_stacks,
    scaled_grouped,
    unpacked,
)
from fivefold.model.layers import WeightFactory
from fivefold.model.moe import Experts
from fivefold.parallel.composition import compose
from fivefold.parallel.deferred import GradientQueue
from fivefold.parallel.mesh import Mesh
from tests.model.small import batch_of

COUNTS = torch.tensor([5, 0, 9, 2])
ENDS = COUNTS.cumsum(0).to(torch.int32)
ROWS = int(COUNTS.sum())


def drawn(*sizes: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(sizes, dtype=torch.float64) * torch.rand(sizes).mul(4).exp2()


def test_a_row_by_hand() -> None:
    x = torch.tensor([[448.0, 1.0625, 1.1875, 0.0], [0.0] * 4, [-0.5, 0.25, 0.0, 0.0]])
    found = round_rows([x], None)
    assert found.codes.float().tolist() == [[448, 1.0, 1.25, 0], [0] * 4, [-448, 224, 0, 0]]
    assert torch.equal(found.scale, torch.tensor([448.0, 2.0**-100, 0.5]) / torch.tensor(448.0))


def test_rows_of_two_matrices_share_a_scale() -> None:
    gate, up = drawn(6, 40), 100 * drawn(6, 40)
    found = round_rows([gate, up], None)
    largest = torch.cat([gate, up], 1).abs().amax(1).float()
    assert torch.equal(found.scale, largest / torch.full_like(largest, 448.0))
    assert torch.equal(
        found.values(torch.float64, 40), round_rows([up], None).values(torch.float64)
    )
    over = round_rows([gate], lambda maximum: 2 * maximum)
    assert torch.equal(over.scale, 2 * round_rows([gate], None).scale), "over all ranks"


@pytest.mark.parametrize("width", [64, 60, 13])
def test_packed_rows_have_their_scales(width: int) -> None:
    x = drawn(7, width)
    packed, plain = round_and_pack(x), round_rows([x], None)
    assert packed.shape == (7, packed_row(width)) and packed_row(width) % 16 == 0
    found = unpacked(packed[[3, 1, 3]], width)
    assert torch.equal(found.scale, plain.scale[[3, 1, 3]])
    assert torch.equal(found.values(torch.float64), plain.values(torch.float64)[[3, 1, 3]])


def experts(gated: bool = True, weighs: bool = False) -> Experts:
    gate = {} if gated else {"activation": "gelu"}
    changes = {"moe.experts": "4", "moe.weigh_inputs": str(weighs).lower(), **gate}
    shape = resolve(PlanOptions("tiny-moe", set=changes)).shape
    assert shape.moe is not None
    made = Experts(shape, shape.moe, WeightFactory(torch.float64, torch.device("cpu")))
    for number, parameter in enumerate(made.parameters()):
        parameter.data.copy_((number + 1) * drawn(*parameter.shape))
    return made


def rounded(made: Experts, queue: GradientQueue | None = None) -> RoundedWeights:
    state = RoundedWeights()
    names = {id(module): name for name, module in made.named_modules()}
    shared = ExpertRounding(state, None, same, queue, None)
    RoundedExperts(made, names, shared).attach()
    return state


def through(made: Experts, x: Tensor) -> Tensor:
    """Rows of tokens, which are their own slots, to the experts and back."""
    codes = made.coding(x)
    assert isinstance(codes, CodedRows)
    rows = codes.round(x)
    return codes.round_gradient(made((rows, rows), COUNTS, None, codes))


def of_row(x: Tensor) -> Tensor:
    return round_rows([x], None).values(torch.float64)


def weight_of(parts: Sequence[Tensor]) -> Tensor:
    """The rounded weights of all experts, from one maximum each."""
    stacked = torch.cat([each.detach() for each in parts], 1)
    each = [round_rows([one.flatten()[None]], None).values(torch.float64) for one in stacked]
    return torch.stack(each).view(stacked.shape)


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    spans = zip([0, *ENDS.tolist()], ENDS.tolist(), strict=False)
    return torch.cat([x[a:b] @ one.T for (a, b), one in zip(spans, weight, strict=False)])


def outer(grads: Tensor, x: Tensor) -> Tensor:
    spans = zip([0, *ENDS.tolist()], ENDS.tolist(), strict=False)
    return torch.stack([grads[a:b].T @ x[a:b] for a, b in spans])


@pytest.mark.parametrize("gated", [True, False])
def test_products_read_rounded_values(gated: bool) -> None:
    made = experts(gated)
    rounded(made)
    stacks = [each for each in (made.gate, made.up) if each is not None]
    x = drawn(ROWS, made.up.weight.shape[2]).requires_grad_()
    y = through(made, x)
    given = drawn(*y.shape) - 1
    y.backward(given)
    into, down = weight_of([each.weight for each in stacks]), weight_of([made.down.weight])
    hidden = grouped(of_row(x.detach()), into).requires_grad_()
    *gate, up = hidden.chunk(len(stacks), 1)
    activated = made.activate(gate[0] if gate else None, up, None)
    wanted = grouped(of_row(activated.detach()), down)
    torch.testing.assert_close(y.detach(), wanted, rtol=1e-12, atol=1e-12)
    grad = of_row(given)
    activated.backward(grouped(grad, down.mT))
    assert hidden.grad is not None and x.grad is not None
    between = of_row(hidden.grad)
    torch.testing.assert_close(x.grad, grouped(between, into.mT), rtol=1e-12, atol=1e-9)
    wanted = [*outer(between, of_row(x.detach())).chunk(len(stacks), 1)]
    wanted.append(outer(grad, of_row(activated.detach())))
    for stack, one in zip([*stacks, made.down], wanted, strict=True):
        assert stack.weight.grad is not None
        torch.testing.assert_close(stack.weight.grad, one, rtol=1e-12, atol=1e-9)


def test_weight_gradients_may_be_queued() -> None:
    plain, queued, queue = experts(), experts(), GradientQueue()
    rounded(plain)
    rounded(queued, queue)
    x, taken = drawn(ROWS, plain.up.weight.shape[2]), dict[int, Tensor]()

    class QueuedGradients:
        def add_gradient(self, weight: Tensor, gradient: Tensor) -> None:
            taken[id(weight)] = gradient

        def add_product(self, weight: Tensor, outputs_NO: Tensor, inputs_NI: Tensor) -> None:
            raise AssertionError("experts have stacks")

    contexts: Sequence[tuple[Experts, Callable[[], AbstractContextManager[None]]]] = [
        (plain, nullcontext),
        (queued, lambda: queue.keeping(0)),
    ]
    for made, around in contexts:
        y = through(made, x.clone().requires_grad_())
        with around():
            y.backward(torch.ones_like(y))
    assert not taken
    queue.settle(0, QueuedGradients())
    pairs = list(zip(plain.parameters(), queued.parameters(), strict=True))
    assert len(taken) == len(pairs) == 3
    assert all(
        torch.equal(taken[id(late)], now.grad) for now, late in pairs if now.grad is not None
    )


def test_an_expert_has_one_scale_and_a_transposed_copy() -> None:
    parts = [drawn(4, 24, 40), 9 * drawn(4, 24, 40)]
    found = round_stacks(parts, expert_maxima(parts))
    assert torch.equal(found.rows.codes.float(), found.turned.codes.float().mT)
    assert found.rows.scale.shape == (4, 48) and found.turned.scale.shape == (4, 40)
    values = found.rows.codes.to(torch.float64) * found.rows.scale.to(torch.float64)[:, :, None]
    assert torch.equal(values, weight_of(parts))
    x = RowOperand(*round_rows([drawn(ROWS, 40)], None))
    y = scaled_grouped(x, found.rows, ENDS, torch.float64)
    wanted = grouped(x.values(torch.float64), weight_of(parts))
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)


def test_weights_of_experts_are_rounded_once_a_step() -> None:
    options = PlanOptions("tiny-moe", precision="fp8", seq=16, set={"layers": "2"})
    job = compose(
        resolve(options),
        Mesh.of(resolve(options), torch.device("cpu")),
        seed=0,
        dtype=torch.float64,
    )
    chunk, batch = job.chunks[0], batch_of(job.plan.shape, rows=1, seq=16)
    counts: list[int] = []
    for _ in range(2):
        chunk.model(batch.tokens, batch).backward()
        counts.append(chunk.rounded.num_rounded)
    assert counts[0] == counts[1] > 0
    chunk.rounded.forget()
    chunk.model(batch.tokens, batch)
    assert chunk.rounded.num_rounded == 2 * counts[0]


def test_rows_are_opened_once() -> None:
    codes = CodedRows(8, torch.float64, same, False)
    known = codes.close(fp8_rows.round_and_pack(drawn(3, 8)))
    assert known.shape == (3, 8) and known.untyped_storage().nbytes() == 8, "it has no memory"
    codes.open(known)
    with pytest.raises(AssertionError, match="opened once"):
        codes.open(known)
