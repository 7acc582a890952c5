"""The head and its loss, in chunks of tokens, against plain cross-entropy over all logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import DEEPSEEK, GPT, LLAMA, batch_of, filled, gradients
from torch import Tensor, nn

from fivefold.core.layout import splits
from fivefold.core.layout.splits import loss_chunks
from fivefold.core.model.shape import Shape
from fivefold.model.head import Head
from fivefold.model.kernels.regions import Compute, Fuse, compiled, eager

WIDTH, VOCAB, TOKENS = 8, 50, 30
SCALE = 1 / 23  # of the loss: not a power of two
TIED = replace(LLAMA, name="tied", tied=True)
TWO = replace(LLAMA, name="two-ahead", mtp=2)


@pytest.fixture(autouse=True)
def seven_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of unequal length."""
    monkeypatch.setattr(splits, "MOST_LOGITS", 7 * VOCAB)


def inputs(dtype: torch.dtype) -> tuple[Tensor, nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, TOKENS // 2, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (2, TOKENS // 2), generator=generator)
    labels[0, 2:9] = labels[1, -1] = -100
    return x.to(dtype).requires_grad_(), nn.Parameter(weight.to(dtype)), labels


def plain(x: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """Loss and gradients in float64, of all logits at once."""
    x, weight = (each.detach().double().requires_grad_() for each in (x, weight))
    logits = (x @ weight.T).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=-100)
    return [loss.detach(), *torch.autograd.grad(SCALE * loss, (x, weight))]


def in_chunks(head: Head, x: Tensor, labels: Tensor) -> list[Tensor]:
    loss = head(x, labels)
    return [loss.detach(), *torch.autograd.grad(SCALE * loss, (x, head.weight))]


DTYPES = [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]


@pytest.mark.parametrize(("dtype", "error"), DTYPES)
def test_the_numbers_of_all_logits_at_once(
    dtype: torch.dtype, error: float, fuse: Fuse = eager
) -> None:
    x, weight, labels = inputs(dtype)
    assert loss_chunks(TOKENS, VOCAB, WIDTH) == 5
    found = in_chunks(Head(weight, fuse), x, labels)
    for one, wanted in zip(found, plain(x, weight, labels), strict=True):
        assert (one.double() - wanted).norm() <= error * wanted.norm()
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    assert found[1].dtype == found[2].dtype == dtype


@pytest.mark.sample(0.15)  # half a minute
@pytest.mark.parametrize(("dtype", "error"), DTYPES)
def test_compiled_it_has_the_same_numbers(dtype: torch.dtype, error: float) -> None:
    test_the_numbers_of_all_logits_at_once(dtype, error, compiled)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_a_cpu_computes_the_loss_by_operators(device: str) -> None:
    """torch 2.11 compiles it wrongly there. The rehearsal of a GPU has tensors without values, and
    the memory of what a GPU compiles."""
    calls: list[str] = []

    def noted(compute: Compute, varies: bool = False) -> Compute:
        def run(*operands: Any) -> Any:
            calls.append(compute.__name__)
            return compute(*operands)

        return run

    x, weight, labels = (tensor.detach().to(device) for tensor in inputs(torch.float32))
    loss = Head(nn.Parameter(weight), noted)(x.requires_grad_(), labels)
    loss.backward()
    assert {"loss_of_chunk", "_scale"} & set(calls) == (
        set() if device == "cpu" else {"loss_of_chunk", "_scale"}
    )


def test_the_factor_of_the_loss_is_not_rounded() -> None:
    """1/23 in bf16 is off by 0.2%, the same for every gradient."""
    x, weight, labels = inputs(torch.bfloat16)
    *_, found = in_chunks(Head(weight), x, labels)
    *_, wanted = plain(x, weight, labels)
    along = (found.double() * wanted).sum() / wanted.square().sum()
    assert along.item() == pytest.approx(1, abs=5e-4)


def test_tokens_that_do_not_count_have_no_loss_and_no_gradient() -> None:
    x, weight, labels = inputs(torch.float64)
    loss, of_x, of_weight = in_chunks(Head(weight), x, torch.full_like(labels, -100))
    assert loss == 0 and not of_x.any() and not of_weight.any()
    _, of_x, _ = in_chunks(Head(weight), x, labels)
    assert of_x.any(-1).equal(labels != -100)


@pytest.mark.parametrize("learns", [(True, False), (False, True), (False, False)])
def test_only_gradients_that_are_wanted_are_computed(learns: tuple[bool, bool]) -> None:
    """A frozen weight, a frozen model below, an evaluation."""
    x, weight, labels = inputs(torch.float64)
    wanted = plain(x, weight, labels)
    for each, learned in zip((x, weight), learns, strict=True):
        each.requires_grad_(learned)
    loss = Head(weight)(x, labels)
    torch.testing.assert_close(loss.detach(), wanted[0], rtol=1e-13, atol=0)
    assert loss.requires_grad == any(learns)
    if loss.requires_grad:
        (SCALE * loss).backward()
    for each, gradient, learned in zip((x, weight), wanted[1:], learns, strict=True):
        assert (each.grad is not None) == learned
        if each.grad is not None:
            torch.testing.assert_close(each.grad, gradient, rtol=1e-12, atol=1e-15)


def test_an_evaluation_computes_no_gradient() -> None:
    x, weight, labels = inputs(torch.float64)
    with torch.no_grad():
        loss = Head(weight)(x, labels)
    torch.testing.assert_close(loss, plain(x, weight, labels)[0], rtol=1e-13, atol=0)
    assert not loss.requires_grad


def test_twice_the_same_bits() -> None:
    x, weight, labels = inputs(torch.float32)
    first, second = (in_chunks(Head(weight), x, labels) for _ in range(2))
    assert all(one.equal(other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("shape", [LLAMA, GPT, TIED, TWO, DEEPSEEK], ids=lambda each: each.name)
def test_a_decoder_has_the_gradients_of_all_logits_at_once(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied heads and those of multi-token prediction too, which a model uses several times."""
    decoder, batch = filled(shape), batch_of(shape)
    assert loss_chunks(batch.tokens.numel(), shape.vocab, shape.width) > 1
    found = gradients(decoder, batch)
    assert decoder.head is not None
    monkeypatch.setattr(decoder.head, "chunked", None)
    wanted = gradients(decoder, batch)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        # Softmax does not see a bias of keys: its gradient is rounding beside that of the weight.
        size = wanted[name.replace("attention.k.bias", "attention.k.weight")].norm()
        assert (found[name] - gradient).norm() <= 1e-12 * size, name


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "width", "chunks"),
    [
        (7, 50, 8, 1),  # fewer tokens than the width: their logits are fewer than the weights
        (8, 50, 8, 2),
        (8, 21, 8, 1),  # few logits
        (8, 22, 8, 2),  # more than half of a chunk
        (700, 50, 8, 100),
        (701, 50, 8, 101),
    ],
)
def test_chunks_by_the_number_of_logits(
    tokens: int, vocabulary: int, width: int, chunks: int
) -> None:
    assert loss_chunks(tokens, vocabulary, width) == chunks
