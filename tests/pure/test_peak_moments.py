"""The moments of a step at which memory is estimated: the first backward, the loss, the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from one_layout import grid_of, memory_of

from fivefold.core.model import presets as models
from fivefold.core.model.recompute import Recompute
from fivefold.core.model.shape import parameters
from fivefold.cost.hardware import stack as stacks
from fivefold.cost.hardware.stack import SoftwareStack
from fivefold.cost.hardware.stack_presets import load_stack
from fivefold.cost.memory.categories import CATEGORIES, MemoryParts, PeakMemory

SELECTIVE = Recompute.parse("selective")
GPT3 = models.load("gpt3-175b")
MEGATRON_2021 = load_stack("megatron-2021")


def with_chunks(stack: SoftwareStack, chunks_loss: bool) -> SoftwareStack:
    return replace(stack, memory=replace(stack.memory, chunks_loss=chunks_loss))


def states(peak: PeakMemory) -> float:
    return sum(float(peak.parts[name].item()) for name in CATEGORIES[:4])


def at_loss(peak: PeakMemory) -> MemoryParts:
    """The rank of the head, where the loss has its gradient."""
    return peak.ranks[-1][-1]


def test_the_first_backward_makes_the_gradients_while_activations_go() -> None:
    """One microbatch never meets whole gradients with all activations; a second one does."""
    shape = models.load("llama-3.2-1b")
    number = parameters(shape).total
    (begin, end, *_, loss), (*_, second) = (
        memory_of(shape, grid_of(microbatches=m)).ranks[0] for m in (1, 2)
    )
    assert loss["gradients"] == 0 < begin["gradients"] < end["gradients"] == 4 * number
    assert second["gradients"] == 4 * number
    assert loss["activations"] == second["activations"] > end["activations"]


def test_stage_one_sends_its_only_backward_unit_by_unit() -> None:
    shape = models.load("llama-3.1-8b")
    alone, several = (
        memory_of(shape, grid_of(shard=8, zero=1, microbatches=m)).ranks[0][2] for m in (1, 2)
    )
    number = parameters(shape).total
    layer = (number - 2 * shape.vocab * shape.width) / shape.layers
    assert alone["gradients"].item() == pytest.approx(4 * number / 8)
    matrix = shape.vocab * shape.width
    assert alone["prefetch"].item() == pytest.approx(4 * (matrix + 2 * layer), rel=1e-3)
    assert several["gradients"].item() == 4 * number
    assert several["prefetch"].item() == pytest.approx(4 * 2 * layer / 8, rel=1e-3)


def test_eager_kernels_hold_more_of_the_loss_alone() -> None:
    shape = models.load("llama-3.1-8b")
    eager = replace(stacks.FIVEFOLD, memory=stacks.EAGER_MEMORY)
    words, gradients = 4096 * shape.vocab, 2 * (4096 + shape.vocab) * shape.width
    # Without chunks, and in the two that 4,096 tokens have.
    for chunks_loss, wanted in (
        (False, (14 * words, 4 * words)),
        (True, (10 * words / 2 + gradients, 2 * words / 2 + gradients)),
    ):
        slow, fast = (
            at_loss(memory_of(shape, grid_of(), with_chunks(stack, chunks_loss)))
            for stack in (eager, stacks.FIVEFOLD)
        )
        assert (slow["logits"], fast["logits"]) == wanted
        assert slow["activations"] == fast["activations"]
