"""fp8 on a GPU: kernels beside the emulation bit by bit, matmuls on tensor cores beside it."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fivefold.core.layout.fp8 import Fp8, Fp8Format
from fivefold.core.model import presets as models
from fivefold.launch.backend import num_gpus
from fivefold.model.fp8.experts import ExpertRounding, RoundedExperts
from fivefold.model.fp8.linear import RoundedWeights
from fivefold.model.fp8.matmul import runs_on_tensor_cores, scaled_matmul
from fivefold.model.fp8.operand import Both, Operand
from fivefold.model.fp8.rounding import Blockwise, Rounding, Tensorwise, rounding_of, same
from fivefold.model.fp8.rows import (
    CodedRows,
    RowOperand,
    expert_maxima,
    has_grouped_kernel,
    round_and_pack,
    round_rows,
    round_stacks,
    scaled_grouped,
    unpacked,
)
from fivefold.model.layers import Linear, WeightFactory
from fivefold.model.moe import Experts
from tests.model.fp8_alone import fused, project

pytestmark = pytest.mark.skipif(
    not num_gpus(), reason="no CUDA device: run this where there is one"
)
EXACT, FAST = 1e-3, 2e-2
SIZES = [(1, 256, (512,)), (2, 150, (200,)), (3, 128, (256, 128, 72)), (1, 1, (16,))]


def drawn(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values of many sizes, some of them zero, and a column of nothing else."""
    x = torch.randn(sizes, device="cuda") * torch.randn(sizes, device="cuda").mul(4).exp2()
    x = x.masked_fill(torch.rand(sizes, device="cuda") < 0.02, 0.0).to(dtype)
    x[..., 3] = 0
    return x


def same_bits(found: Operand | None, wanted: Operand | None, what: str) -> None:
    assert found is not None and wanted is not None and found.shares == wanted.shares
    assert found.codes.shape == wanted.codes.shape and found.codes.dtype == wanted.codes.dtype
    assert torch.equal(found.scale.cpu(), wanted.scale), f"{what}: scales differ"
    ours, theirs = (each.cpu().contiguous().view(torch.uint8) for each in (found[0], wanted[0]))
    off = ours != theirs
    first = off.nonzero()[:1].flatten().tolist()
    places = [int(off.any(dim).sum()) for dim in (1, 0)]
    assert not off.any(), (
        f"{what}: {int(off.sum())} of {off.numel()} codes differ, in {places[0]} rows and "
        f"{places[1]} columns, first at {first}: {int(ours[*first])} for {int(theirs[*first])}"
    )


def same_both(found: Both, wanted: Both, what: str, both: bool = True) -> None:
    same_bits(found.rows, wanted.rows, f"{what}, rows")
    if both:
        same_bits(found.columns, wanted.columns, f"{what}, columns")


def tokens_are_those_of_the_emulation(
    rounding: Rounding, form: Fp8Format, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    for batch, seq, widths in SIZES:
        parts = [drawn(batch * seq, width, dtype=dtype) for width in widths]
        on_cpu = [each.cpu() for each in parts]
        for both in (True, False):
            found = rounding.tokens(parts, form, both, seq, rounding.maximum(parts))
            wanted = rounding.tokens(on_cpu, form, both, seq, rounding.maximum(on_cpu))
            same_both(found, wanted, f"{batch} x {seq} x {widths}", both)


def weights_are_those_of_the_emulation(rounding: Rounding) -> None:
    torch.manual_seed(0)
    for heights, inputs in (((512,), 256), ((256, 128, 128), 384), ((200,), 72), ((128, 40), 130)):
        parts = [drawn(height, inputs) for height in heights]
        on_cpu = [each.cpu() for each in parts]
        found = rounding.weights(parts, rounding.weight_maximum(parts))
        wanted = rounding.weights(on_cpu, rounding.weight_maximum(on_cpu))
        same_both(found, wanted, f"{heights} x {inputs}")


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def matmuls_are_those_of_the_emulation(fp8: Fp8, fast: bool) -> None:
    """Forward, input gradient and weight gradient of 8B's widths, in float32 and bf16."""
    torch.manual_seed(0)
    rounding = rounding_of(fp8)
    for tokens, outputs, inputs in ((2048, 1024, 4096), (512, 4096, 14336), (8192, 512, 256)):
        x, grad = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (inputs, outputs))
        weight = torch.randn(outputs, inputs, device="cuda").bfloat16()
        of_x = rounding.tokens([x], "e4m3", True, tokens, rounding.maximum([x]))
        of_weight = rounding.weights([weight], rounding.weight_maximum([weight]))
        of_grad = rounding.tokens([grad], fp8.gradients, True, tokens, rounding.maximum([grad]))
        for name, a, b in (
            ("forward", of_x.rows, of_weight.rows),
            ("dgrad", of_grad.rows, of_weight.columns),
            ("wgrad", of_grad.columns, of_x.columns),
        ):
            assert a is not None and b is not None
            assert runs_on_tensor_cores(a, b, torch.float32), name
            truth = a.values(torch.float64) @ b.values(torch.float64).T
            for dtype in (torch.float32, torch.bfloat16):
                found = scaled_matmul(a, b, dtype, fast)
                off = error(found, truth.to(dtype).double())
                assert off <= (FAST if fast else EXACT) + (
                    1e-3 if dtype == torch.bfloat16 else 0
                ), f"{name} {tokens}x{outputs}x{inputs} {dtype}: {off:.1e}"


def linears_are_those_of_the_emulation(fp8: Fp8, widths: Sequence[int], inputs: int) -> None:
    """Outputs and gradients of a fused matmul, beside float64 on the CPU with the same rounding of
    bf16 inputs."""
    torch.manual_seed(0)
    x = torch.randn(2, 300, inputs).bfloat16()
    weights = [torch.randn(width, inputs).bfloat16() for width in widths]
    given = [torch.randn(2, 300, width).bfloat16() for width in widths]
    found: list[list[Tensor]] = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        factory = WeightFactory(dtype, torch.device(device))
        linears = [Linear(width, inputs, False, factory) for width in widths]
        for linear, weight in zip(linears, weights, strict=True):
            nn.init.zeros_(linear.weight).data.copy_(weight)
        here = x.to(device, dtype).requires_grad_()
        outputs = project(fused(fp8, copied=(0,)), here, linears)
        leaves = [here, *(each.weight for each in linears)]
        grads = torch.autograd.grad(outputs, leaves, [g.to(device, dtype) for g in given])
        found.append([each.detach().cpu() for each in (*outputs, *grads)])
    for ours, truth in zip(*found, strict=True):
        assert error(ours, truth.double()) < FAST


def equal_bytes(found: Tensor, wanted: Tensor, what: str) -> None:
    ours, theirs = (each.cpu().contiguous().view(torch.uint8) for each in (found, wanted))
    off = ours != theirs
    assert not off.any(), f"{what}: {int(off.sum())} of {off.numel()} bytes differ"


def rows_are_those_of_the_emulation(dtype: torch.dtype) -> None:
    """Of one and of two matrices, with and without given maxima, packed and dequantised."""
    torch.manual_seed(0)
    for rows, widths in ((300, (2048,)), (77, (768, 768)), (5, (7168,)), (33, (48, 48))):
        parts = [drawn(rows, width, dtype=dtype) for width in widths]
        on_cpu = [each.cpu() for each in parts]
        for over in (None, lambda maximum: 3 * maximum):
            found, wanted = round_rows(parts, over), round_rows(on_cpu, over)
            for ours, theirs in zip(found, wanted, strict=True):
                equal_bytes(ours, theirs, f"{rows} x {widths}")
            for start, stop in ((0, None), (16, 48)):
                values = [each.values(torch.bfloat16, start, stop) for each in (found, wanted)]
                equal_bytes(*values, f"values of {rows} x {widths}")
        ours, theirs = (unpacked(round_and_pack(one[0]), widths[0]) for one in (parts, on_cpu))
        for mine, other in zip(ours, theirs, strict=True):
            equal_bytes(mine, other, f"packed {rows} x {widths[0]}")
    assert len(round_rows([drawn(0, 64)], None).codes) == 0, "an expert may get no rows"


def stacks_are_those_of_the_emulation() -> None:
    torch.manual_seed(0)
    for experts, heights, inputs in ((4, (768, 768), 2048), (3, (200,), 72), (8, (64, 64), 130)):
        parts = [drawn(experts, height, inputs) for height in heights]
        on_cpu = [each.cpu() for each in parts]
        maxima = [expert_maxima(each) for each in (parts, on_cpu)]
        equal_bytes(*maxima, "maxima")
        found, wanted = round_stacks(parts, maxima[0]), round_stacks(on_cpu, maxima[1])
        for ours, theirs in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True):
            equal_bytes(ours, theirs, f"{experts} x {heights} x {inputs}")


def grouped_products_are_those_of_the_emulation(fast: bool) -> None:
    """Ragged groups, one of them empty; rows as they lie in packed ones, and by themselves."""
    torch.manual_seed(0)
    for counts, outputs, inputs in (
        ((300, 0, 17, 1, 700, 6), 1536, 2048),
        ((16, 16, 16, 16), 2048, 768),
        ((1, 2, 3, 1000), 1024, 7168),
    ):
        ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
        x = torch.randn(int(ends[-1]), inputs, device="cuda").bfloat16()
        weight = torch.randn(len(counts), outputs, inputs, device="cuda").bfloat16()
        stack = round_stacks([weight], expert_maxima([weight])).rows
        for rows in (unpacked(round_and_pack(x), inputs), round_rows([x], None)):
            assert has_grouped_kernel(rows, stack, torch.bfloat16)
            found = scaled_grouped(rows, stack, ends, torch.bfloat16, fast)
            on_cpu = RowOperand(rows.codes.cpu(), rows.scale.cpu())
            weights = stack._replace(codes=stack.codes.cpu(), scale=stack.scale.cpu())
            truth = scaled_grouped(on_cpu, weights, ends.cpu(), torch.float32)
            off = error(found.cpu(), truth.bfloat16().double())
            most = (FAST if fast else EXACT) + 1e-3  # the result is bf16
            assert off <= most, f"{counts} {outputs}x{inputs}: {off:.1e}"


def experts_are_those_of_the_emulation() -> None:
    """A layer's experts in bf16 beside float32 on the CPU, with the same rounding of inputs."""
    torch.manual_seed(0)
    changes = {"width": "256", "moe.experts": "4", "moe.ffn": "128"}
    shape = models.with_overrides(models.load("tiny-moe"), changes)
    assert shape.moe is not None
    counts, found = torch.tensor([90, 0, 37, 3]), list[list[Tensor]]()
    x, given = (torch.randn(int(counts.sum()), shape.width).bfloat16() for _ in range(2))
    known: dict[str, Tensor] = {}
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        made = Experts(shape, shape.moe, WeightFactory(dtype, torch.device(device)))
        for name, one in made.named_parameters():
            known.setdefault(name, (torch.randn(one.shape) / 16).bfloat16())
            nn.init.zeros_(one).data.copy_(known[name])
        names = {id(module): name for name, module in made.named_modules()}
        shared = ExpertRounding(RoundedWeights(), None, same, None, None)
        RoundedExperts(made, names, shared).attach()
        here = x.to(device, dtype).requires_grad_()
        codes = made.coding(here)
        assert isinstance(codes, CodedRows)
        rows = codes.round(here)
        y = codes.round_gradient(made((rows, rows), counts.to(device), None, codes))
        grads = torch.autograd.grad(y, [here, *made.parameters()], given.to(device, dtype))
        found.append([each.detach().cpu() for each in (y, *grads)])
    for number, (ours, truth) in enumerate(zip(*found, strict=True)):
        # What is rounded between the two matmuls was bf16 on the GPU, where some codes flip.
        assert error(ours, truth.double()) < 2 * FAST, number


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"{name} {form} {dtype}": partial(tokens_are_those_of_the_emulation, rounding, form, dtype)
        for name, rounding in (("tensor", Tensorwise()), ("blocks", Blockwise()))
        for form in ("e4m3", "e5m2")
        for dtype in (torch.bfloat16, torch.float32)
    },
    "tensor weights": partial(weights_are_those_of_the_emulation, Tensorwise()),
    "square weights": partial(weights_are_those_of_the_emulation, Blockwise()),
    **{
        f"matmuls {fp8.scaling} {fp8.gradients} {'fast' if fast else 'exact'}": partial(
            matmuls_are_those_of_the_emulation, fp8, fast
        )
        for fp8 in (Fp8(), Fp8(gradients="e4m3"), Fp8.parse("blockwise"))
        for fast in (False, True)
    },
    **{
        f"linears {fp8.scaling} {fp8.wgrad} {widths}": partial(
            linears_are_those_of_the_emulation, fp8, widths, inputs
        )
        for fp8 in (Fp8(), Fp8(wgrad="bf16"), Fp8.parse("blockwise"))
        for widths, inputs in (((512, 128, 128), 256), ((208, 64), 144))
    },
    "rows bf16": partial(rows_are_those_of_the_emulation, torch.bfloat16),
    "rows float32": partial(rows_are_those_of_the_emulation, torch.float32),
    "stacks": stacks_are_those_of_the_emulation,
    "grouped exact": partial(grouped_products_are_those_of_the_emulation, False),
    "grouped fast": partial(grouped_products_are_those_of_the_emulation, True),
    "experts": experts_are_those_of_the_emulation,
}


@pytest.mark.parametrize("name", CHECKS)
def test_fp8_on_a_gpu(name: str) -> None:
    """In a process of its own: later tests fork, which no CUDA survives."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.test_fp8_cuda", name], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def main(names: Sequence[str]) -> int:
    """Every check, whatever the others say."""
    failed = 0
    for name in names:
        try:
            CHECKS[name]()
            print(f"passed  {name}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()[-1500:]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:] or [*CHECKS])))
