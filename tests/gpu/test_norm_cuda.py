"""Our kernels for norms on a GPU: the backward of a root-mean-square norm, and the gradients'."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor

from fivefold.launch.backend import num_gpus
from fivefold.model.kernels.regions import compiled, eager
from fivefold.model.layers import NORMS, rms_norm

pytestmark = pytest.mark.skipif(
    not num_gpus(), reason="no CUDA device: run this where there is one"
)
EPS = 1e-5


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def backward_is_that_of_autograd(dtype: torch.dtype, width: int) -> None:
    """Beside float64, no further off than the operators of torch in this dtype."""
    torch.manual_seed(0)
    sizes = (3, 701, width)
    x, y, *given = (torch.randn(sizes, device="cuda", dtype=dtype) for _ in range(4))
    weight = torch.randn(width, device="cuda", dtype=dtype)
    inputs = [each.requires_grad_() for each in (x, y, weight)]
    found = {
        fuse: torch.autograd.grad(
            NORMS["rms"].after_sum(fuse)(x, y, weight, None, EPS), inputs, given
        )
        for fuse in (compiled, eager)
    }
    wide = [(x + y).double().requires_grad_(), weight.double().requires_grad_()]
    exact = torch.autograd.grad(
        (rms_norm(wide[0], wide[1], None, EPS), wide[0]), wide, [each.double() for each in given]
    )
    truth = (exact[0], exact[0], exact[1])
    for ours, torchs, right in zip(found[compiled], found[eager], truth, strict=True):
        assert ours.isfinite().all()
        assert error(ours, right) <= 1.1 * error(torchs, right) + 1e-7


def norm_is_that_of_all(dtype: torch.dtype) -> None:
    from fivefold.optim.gradient_norm import norm_on_gpu

    torch.manual_seed(0)
    sizes = ((3, 5), (), (4096, 1031), (0,), ((1 << 22) + 1,))
    gradients = [torch.randn(each, device="cuda", dtype=dtype) for each in sizes]
    exact = torch.cat([each.double().flatten() for each in gradients]).norm()
    assert abs(float(norm_on_gpu(gradients) / exact) - 1) < 1e-6
    gradients[2][7, 3] = torch.inf
    assert not norm_on_gpu(gradients).isfinite()


CHECKS = {
    "backward in bfloat16": partial(backward_is_that_of_autograd, torch.bfloat16, 4096),
    "backward of an odd width": partial(backward_is_that_of_autograd, torch.bfloat16, 2050),
    "backward of a wide row": partial(backward_is_that_of_autograd, torch.bfloat16, 16384),
    "backward in float32": partial(backward_is_that_of_autograd, torch.float32, 1000),
    "norm of bfloat16": partial(norm_is_that_of_all, torch.bfloat16),
    "norm of float32": partial(norm_is_that_of_all, torch.float32),
}


@pytest.mark.parametrize("name", CHECKS)
def test_norms_on_a_gpu(name: str) -> None:
    """In a process of its own: later tests fork, which no CUDA survives."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    for each in sys.argv[1:] or CHECKS:
        CHECKS[each]()
