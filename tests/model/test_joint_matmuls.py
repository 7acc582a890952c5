"""Several linears of one input as one matmul, where flat units make their weights adjacent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import DEEPSEEK, GPT, LLAMA, MOE, batch_of, filled, gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.core.plan import PlanOptions, resolve
from fivefold.core.recompute import Recompute
from fivefold.core.shape import Shape
from fivefold.data.batches import samples
from fivefold.model.attention import ROTATE_JOINT, Attention, rotate_joint
from fivefold.model.decoder import Decoder
from fivefold.model.layers import ROTATE, Linear, Mlp, adjacent_rows, rotary_tables, rotate
from fivefold.model.recompute import apply_recompute
from fivefold.model.regions import Region, eager
from fivefold.parallel.compose import Job, compose
from fivefold.parallel.deferred import GradientQueue
from fivefold.parallel.mesh import Mesh

NORMED = replace(LLAMA, qk_norm="head", norm_bias=True, qkv_bias=True)
INTERLEAVED = replace(LLAMA, rope_interleaved=True, activation="geglu", mlp_bias=True)
SHAPES = {"rotary": LLAMA, "learned": GPT, "normed": NORMED, "interleaved": INTERLEAVED, "moe": MOE}
EXACT = 1e-12


def linears_of(decoder: nn.Module) -> list[tuple[Linear, ...]]:
    """Those with the same input."""
    found: list[tuple[Linear, ...]] = []
    for module in decoder.modules():
        if isinstance(module, Attention):
            found.append((module.q, module.k, module.v))
        elif isinstance(module, Mlp) and module.gate is not None:
            found.append((module.gate, module.up))
    return found


def adjoin(decoder: Decoder) -> Decoder:
    """Move weights next to each other, as flat units do."""

    def move(linears: Sequence[Linear], name: str) -> None:
        values = [getattr(each, name).detach() for each in linears]
        joint = torch.cat(values).split([len(each) for each in values])
        for linear, rows in zip(linears, joint, strict=True):
            setattr(linear, name, nn.Parameter(rows.data))

    for linears in linears_of(decoder):
        for name in ("weight", "bias") if linears[0].bias is not None else ("weight",):
            move(linears, name)
    return decoder


class Matmuls(TorchDispatchMode):
    """Counts matmuls, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict.fromkeys(("mm", "addmm", "addmm_"), 0)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.counts:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def counted(decoder: Decoder, shape: Shape) -> tuple[dict[str, Tensor], int]:
    with Matmuls() as matmuls:
        found = gradients(decoder, batch_of(shape))
    return found, matmuls.count


@pytest.mark.parametrize("rule", ["none", "selective", "attention+mlp", "full"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_one_matmul_has_the_gradients_of_several(shape: Shape, rule: str) -> None:
    apart, joint = filled(shape), adjoin(filled(shape))
    for decoder in (apart, joint):
        apply_recompute(decoder, Recompute.parse(rule))
    truth, many = counted(apart, shape)
    found, few = counted(joint, shape)
    # One each for a forward, an input gradient and weight gradients; some forwards run twice.
    spared = sum(len(linears) - 1 for linears in linears_of(joint))
    assert many - few >= 3 * spared
    assert found.keys() == truth.keys()
    largest = max(float(each.abs().max()) for each in truth.values())
    for name, gradient in truth.items():
        torch.testing.assert_close(found[name], gradient, rtol=EXACT, atol=EXACT * largest)


@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["gated", "biased"])
def test_weight_gradients_are_rows_of_one_tensor(shape: Shape) -> None:
    """Autograd keeps the first gradient of a step as it is."""
    decoder, batch = adjoin(filled(shape)), batch_of(shape)
    decoder(batch.tokens, batch).backward()
    for linears in linears_of(decoder):
        parameters = [[each.weight for each in linears]]
        if linears[0].bias is not None:
            parameters.append([each.bias for each in linears if each.bias is not None])
        for some in parameters:
            assert adjacent_rows([each.grad for each in some if each.grad is not None]) is not None


def test_what_is_not_adjacent_is_left_alone() -> None:
    buffer, other = torch.arange(24.0), torch.zeros(8)
    rows = [buffer[:8].view(2, 4), buffer[8:20].view(3, 4)]
    joint = adjacent_rows(rows)
    assert joint is not None and torch.equal(joint, buffer[:20].view(5, 4))
    assert joint.data_ptr() == buffer.data_ptr()
    apart = [
        [rows[1], rows[0]],  # in another order
        [rows[0], buffer[12:24].view(3, 4)],  # a gap
        [rows[0], other.view(2, 4)],  # other memory
        [rows[0], buffer[8:14].view(3, 2)],  # other inputs
        [rows[0], buffer[8:16].view(4, 2).T],  # columns
    ]
    assert all(adjacent_rows(each) is None for each in apart)


def job_of(set_keys: dict[str, str], **options: Any) -> Job:
    plan = resolve(PlanOptions("tiny", set=set_keys, **options), small=True)
    return compose(plan, Mesh.of(plan, torch.device("cpu")), seed=0, dtype=torch.float64)


def stepped(job: Job, fast: bool) -> tuple[dict[str, Tensor], int]:
    """The gradients of a step, and how many matmuls its microbatches took."""
    plan = job.plan
    batches = [job.local(each) for each in samples(plan.batch, plan.shape.vocab, 0, 0).of(0)]
    for linears in linears_of(job.chunks[0].model):
        assert (adjacent_rows([each.weight for each in linears]) is not None) == fast
    with Matmuls() as matmuls:
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            loss = job.chunks[0].forward(None, batch, number)
            job.chunks[0].backward(loss.backward, number, False, last)
    job.chunks[0].data.finish()
    return {each.row.name: each.grad for each in job.owned}, matmuls.count


@pytest.mark.parametrize("bias", ["false", "true"])
def test_flat_units_make_weights_adjacent(bias: str) -> None:
    """Units so small that each weight has its own do not, and every matmul runs alone."""
    keys = {"qkv_bias": bias, "mlp_bias": bias}
    found, few = stepped(job_of(keys), True)
    truth, many = stepped(job_of(keys, unit_size=1e-5), False)
    layers = job_of(keys).plan.shape.layers
    microbatches = job_of(keys).plan.batch.microbatches
    assert many - few == 3 * 3 * layers * microbatches  # of q, k, v two less, of gate and up one
    for name, gradient in truth.items():
        torch.testing.assert_close(found[name], gradient, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("bias", ["false", "true"])
def test_deferred_weight_gradients_are_one_matmul_too(bias: str) -> None:
    """Those of later microbatches are added to all rows at once."""
    keys = {"qkv_bias": bias, "mlp_bias": bias}
    truth, at_once = stepped(job_of(keys), True)
    job, queue = job_of(keys), GradientQueue()
    chunk, plan = job.chunks[0], job.plan
    queue.defer(chunk.model)
    with Matmuls() as matmuls:
        for number, batch in enumerate(samples(plan.batch, plan.shape.vocab, 0, 0).of(0)):
            loss = chunk.forward(None, job.local(batch), number)
            with queue.keeping(number):
                loss.backward()
            queue.settle(number, chunk.data)
    chunk.data.finish()
    assert matmuls.count == at_once
    each = 4 * plan.shape.layers + 1  # joint ones, attention's and the MLP's last, and the head
    assert matmuls.counts["addmm_"] == (plan.batch.microbatches - 1) * each > 0
    for owned in job.owned:
        torch.testing.assert_close(owned.grad, truth[owned.row.name], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("shape", [LLAMA, INTERLEAVED, DEEPSEEK], ids=["halves", "pairs", "yarn"])
def test_rotary_gradients_are_those_of_autograd(shape: Shape) -> None:
    width = shape.head_dim if shape.mla is None else shape.mla.rope_dim
    generator = torch.Generator().manual_seed(0)
    tables = rotary_tables(shape, torch.arange(5)[None], torch.float64)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.float64, generator=generator).requires_grad_()

    heads, joint = draw(2, 5, 3, width), draw(2, 5, 6 * width)
    pairs = shape.rope_interleaved
    cases: list[tuple[Region, Any, tuple[Any, ...]]] = [
        (ROTATE, rotate, (heads, *tables, pairs)),
        (ROTATE_JOINT, rotate_joint, (joint, *tables, pairs, width, 1)),
    ]
    for region, plain, inputs in cases:
        outputs, expected = region.by(eager)(*inputs), plain(*inputs)
        outputs, expected = (
            (each,) if isinstance(each, Tensor) else each for each in (outputs, expected)
        )
        given = [draw(*each.shape).detach() for each in expected]
        (found,) = torch.autograd.grad(outputs, inputs[0], given)
        (wanted,) = torch.autograd.grad(expected, inputs[0], given)
        torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)
        for each, other in zip(outputs, expected, strict=True):
            assert torch.equal(each, other)
