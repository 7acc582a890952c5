"""Weight gradients that wait: input gradients first, the rest later, and the sum of plain autograd.

One process: a queue between a decoder and a sink that sums by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import GPT, LLAMA, batch_of, filled, gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.core.model.recompute import Recompute
from fivefold.core.model.shape import Shape
from fivefold.model.batch import TokenBatch
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.moe import grouped_matmul
from fivefold.model.recompute import apply_recompute
from fivefold.parallel.deferred import GradientQueue
from fivefold.verify.compare import Dtype

NORMED = replace(LLAMA, qk_norm="head", norm_bias=True, qkv_bias=True, tied=True)
SHAPES = [LLAMA, GPT, NORMED]
RULES = ["none", "selective", "norm+mlp+experts", "full", "full:2"]
EXACT = 1e-14


class Sums:
    """A sink that sums in its own type, by the weight's name."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype = torch.float64) -> None:
        self.names = {id(one): name for name, one in decoder.named_parameters()}
        self.sums = {
            name: torch.zeros(one.shape, dtype=dtype) for name, one in decoder.named_parameters()
        }
        self.num_added = 0

    def add_product(self, weight: Tensor, outputs_NO: Tensor, inputs_NI: Tensor) -> None:
        assert outputs_NO.dim() == inputs_NI.dim() == 2
        self.add_gradient(weight, outputs_NO.T @ inputs_NI)

    def add_gradient(self, weight: Tensor, gradient: Tensor) -> None:
        assert not gradient.requires_grad, "a sum would keep the graph of every microbatch"
        self.sums[self.names[id(weight)]].add_(gradient)
        self.num_added += 1


class Split:
    """A decoder whose backward is split, as one chunk of a pipeline drives it."""

    def __init__(
        self,
        shape: Shape,
        rule: str = "none",
        dtype: torch.dtype = torch.float64,
        summed_in: torch.dtype = torch.float64,
    ) -> None:
        self.decoder, self.queue = filled(shape, dtype), GradientQueue()
        self.queue.defer(self.decoder)
        apply_recompute(self.decoder, Recompute.parse(rule))
        self.sink = Sums(self.decoder, summed_in)
        self.losses: dict[int, Tensor] = {}

    def forward(self, number: int, batch: TokenBatch) -> None:
        self.losses[number] = self.decoder(batch.tokens, batch)

    def input_gradients(self, number: int) -> None:
        before = self.sink.num_added
        with self.queue.keeping(number):
            self.losses.pop(number).backward()
        assert self.sink.num_added == before, "a weight gradient that did not wait"

    def weight_gradients(self, number: int) -> None:
        self.queue.settle(number, self.sink)

    def backward(self, number: int) -> None:
        with self.queue.taking(self.sink):
            self.losses.pop(number).backward()

    def require_done(self) -> None:
        assert not self.queue._owed and not self.losses
        assert all(one.grad is None for one in self.decoder.parameters())


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest, relative to each weight's largest gradient.

    A bias on keys moves all scores of a query alike, which softmax does not see: its gradient is
    zero, and what rounding makes of that is held against the model's largest.
    """
    assert found.keys() == truth.keys()
    sizes = {name: float(grad.abs().max()) for name, grad in truth.items()}
    largest = max(sizes.values())
    return max(
        float((found[name] - grad).abs().max())
        / (sizes[name] if sizes[name] > 1e-12 * largest else largest)
        for name, grad in truth.items()
    )


def summed(
    shape: Shape, batches: list[TokenBatch], plain: Decoder | None = None
) -> dict[str, Tensor]:
    """Plain autograd's gradients of all batches."""
    plain = plain or filled(shape)
    found = [gradients(plain, batch) for batch in batches]
    return {name: torch.stack([each[name] for each in found]).sum(0) for name in found[0]}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=["rms", "layer", "normed"])
def test_input_then_weight_gradients_are_those_of_autograd(shape: Shape, rule: str) -> None:
    batch, split = batch_of(shape), Split(shape, rule)
    split.forward(0, batch)
    split.input_gradients(0)
    split.weight_gradients(0)
    split.require_done()
    assert error(split.sink.sums, summed(shape, [batch])) <= EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=["rms", "layer", "normed"])
def test_a_whole_backward_takes_them_at_once(shape: Shape, rule: str) -> None:
    batch, split = batch_of(shape), Split(shape, rule)
    split.forward(0, batch)
    split.backward(0)
    split.require_done()
    assert error(split.sink.sums, summed(shape, [batch])) <= EXACT


@pytest.mark.parametrize("rule", RULES)
def test_weight_gradients_may_come_much_later_and_in_any_order(rule: str) -> None:
    batches = [batch_of(NORMED, seed=seed) for seed in range(4)]
    split = Split(NORMED, rule)
    for number in (0, 1, 2):
        split.forward(number, batches[number])
    split.input_gradients(1)
    split.forward(3, batches[3])
    split.input_gradients(0)
    split.backward(2)
    split.weight_gradients(0)
    split.input_gradients(3)
    split.weight_gradients(3)
    split.weight_gradients(1)
    split.require_done()
    assert error(split.sink.sums, summed(NORMED, batches)) <= EXACT


def gradient_of_input(defers: bool) -> Tensor:
    """Of a slice from the middle of the model, after its input gradient only."""
    whole, queue = filled(LLAMA), GradientQueue()
    part = from_config(LLAMA, dtype=torch.float64, layers=range(1, 3))
    part.load_state_dict({name: whole.state_dict()[name] for name in part.state_dict()})
    if defers:
        queue.defer(part)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 16, LLAMA.width, dtype=torch.float64, generator=generator)
    result = part(x.requires_grad_(), batch_of(LLAMA))
    with queue.keeping(0):
        result.backward(torch.ones_like(result))
    assert x.grad is not None
    return x.grad


def test_the_gradient_of_what_a_slice_was_given_does_not_wait() -> None:
    """It is what the stage before is waiting for."""
    plain, deferred = (gradient_of_input(defers) for defers in (False, True))
    assert error({"x": deferred}, {"x": plain}) <= EXACT


@contextmanager
def counting(decoder: Decoder) -> Iterator[list[int]]:
    """How often each block was begun."""
    times = [0] * len(decoder.blocks)

    def count(place: int) -> None:
        times[place] += 1

    for place, block in enumerate(decoder.blocks.values()):
        # The norm, not the block: selective recomputation repeats what is inside of a block.
        block.attention_norm.register_forward_pre_hook(lambda *_, place=place: count(place))
    yield times


@pytest.mark.parametrize("rule", RULES)
def test_blocks_are_recomputed_once_and_never_for_a_weight_gradient(rule: str) -> None:
    again = int(rule.startswith("full"))
    split = Split(LLAMA, rule)
    with counting(split.decoder) as times:
        for number in (0, 1):
            split.forward(number, batch_of(LLAMA, seed=number))
        assert times == [2] * LLAMA.layers
        split.input_gradients(0)
        assert times == [2 + again] * LLAMA.layers
        split.backward(1)
        assert times == [2 + 2 * again] * LLAMA.layers
        split.weight_gradients(0)
        assert times == [2 + 2 * again] * LLAMA.layers


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("dtype", "summed_in"),
    [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")],
)
@pytest.mark.parametrize("rule", ["none", "full"])
@pytest.mark.parametrize("shape", SHAPES, ids=["rms", "layer", "normed"])
def test_narrow_weights_and_wide_sums(
    shape: Shape, rule: str, dtype: Dtype, summed_in: Dtype
) -> None:
    """Against float64 on the same, rounded weights, within what `verify` allows."""
    batches = [batch_of(shape, seed=seed) for seed in range(3)]
    narrow, wide = getattr(torch, dtype), getattr(torch, summed_in)
    split = Split(shape, rule, narrow, wide)
    for number, batch in enumerate(batches):
        split.forward(number, batch)
        split.input_gradients(number)
    for number in range(len(batches)):
        split.weight_gradients(number)
    split.require_done()
    truth = summed(shape, batches, filled(shape, narrow).double())
    assert all(each.dtype == wide for each in split.sink.sums.values())
    # Products of bfloat16 are summed in float32: only results are rounded.
    longest = max(shape.width, shape.ffn, shape.vocab) if dtype == "float32" else 1
    most = 8 * torch.finfo(narrow).eps * (shape.layers * longest) ** 0.5
    assert error(split.sink.sums, truth) <= most


class Matmuls(TorchDispatchMode):
    """Counts matmuls, those of grouped_mm as one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "_grouped_mm")
        return func(*args, **(kwargs or {}))


# float64 and unaligned widths go expert by expert, others through one kernel.
@pytest.mark.parametrize(
    ("dtype", "inputs", "num_matmuls"), [("float64", 16, 4), ("float32", 16, 1), ("float32", 7, 4)]
)
def test_the_weight_gradient_of_experts_needs_no_forward(
    dtype: str, inputs: int, num_matmuls: int
) -> None:
    kind, outputs, ends = getattr(torch, dtype), 24, torch.tensor([5, 5, 12, 20], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    x, grad = (
        torch.randn(20, width, generator=generator, dtype=kind) for width in (inputs, outputs)
    )
    weight = nn.Parameter(torch.randn(4, outputs, inputs, generator=generator, dtype=kind))
    (expected,) = torch.autograd.grad(grouped_matmul(x, weight, ends), weight, grad)
    given: list[Tensor] = []

    class Sink:
        def add_product(self, *_: Tensor) -> None:
            raise AssertionError

        def add_gradient(self, weight: Tensor, gradient: Tensor) -> None:
            given.append(gradient)

    queue = GradientQueue()
    result = queue.grouped(x.requires_grad_(), weight, ends)
    with queue.keeping(0):
        result.backward(grad)
    with Matmuls() as matmuls:
        queue.settle(0, Sink())
    assert matmuls.count == num_matmuls
    assert torch.equal(given[0], expected)


def test_a_backward_that_nobody_asked_for_is_seen() -> None:
    split = Split(LLAMA)
    split.forward(0, batch_of(LLAMA))
    with pytest.raises(AssertionError, match="outside of the pipeline"):
        split.losses[0].backward()
