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

from fivefold.core.fp8 import Fp8, Fp8Format
from fivefold.launch.processes import num_gpus
from fivefold.model.fp8 import Blockwise, Rounding, Tensorwise, rounding_of
from fivefold.model.fp8_matmul import runs_on_tensor_cores, scaled_matmul
from fivefold.model.fp8_operand import Both, Operand
from fivefold.model.layers import Linear, WeightFactory
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
