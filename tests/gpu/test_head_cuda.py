"""The head in chunks of tokens on a GPU, in bf16: its numbers and its memory, with and without the
compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fivefold.launch.backend import num_gpus

pytestmark = pytest.mark.skipif(
    not num_gpus(), reason="no CUDA device: run this where there is one"
)

# Two chunks of logits, as many as a chunk may have.
HEAD = """
import sys, torch
import torch.nn.functional as F
from fivefold.core.layout.splits import MOST_LOGITS, loss_chunks
from fivefold.model.head import Head
from fivefold.model.kernels.regions import compiled, eager
tokens, vocab, width = 16384, 65536, 1024
assert loss_chunks(tokens, vocab, width) == 2 and tokens * vocab == 2 * MOST_LOGITS
fuse, wide = (compiled, 0) if sys.argv[1] == "compiled" else (eager, 8)
torch.manual_seed(0)
x = torch.randn(2, tokens // 2, width, device="cuda").bfloat16().requires_grad_()
weight = torch.nn.Parameter((0.1 * torch.randn(vocab, width, device="cuda")).bfloat16())
labels = torch.randint(vocab, (2, tokens // 2), device="cuda")
labels[0, 5:900] = -100
scale = 1 / (tokens - 895)

def run(head):
    loss = head(x, labels)
    (scale * loss).backward()
    found = loss.detach(), x.grad, weight.grad
    x.grad = weight.grad = None
    return found

head = Head(weight, fuse)
run(head)  # compiles
torch.cuda.synchronize()
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
found = run(head)
held = torch.cuda.max_memory_allocated() - before
gradients = 2 * (x.numel() + weight.numel())
assert held < 1.02 * (gradients + (2 + wide) * MOST_LOGITS), (held, gradients)
again = run(head)
assert all(one.equal(other) for one, other in zip(found, again))

# All logits, in float32 from the same values.
wanted = [torch.zeros((), device="cuda"), torch.zeros_like(x, dtype=torch.float32)]
wanted.append(torch.zeros_like(weight, dtype=torch.float32))
for part in range(8):
    rows = slice(part * tokens // 8, (part + 1) * tokens // 8)
    one = x.detach().flatten(0, 1)[rows].float().requires_grad_()
    other = weight.detach().float().requires_grad_()
    loss = F.cross_entropy(one @ other.T, labels.flatten()[rows], reduction="sum")
    of_x, of_weight = torch.autograd.grad(scale * loss, (one, other))
    wanted[0] += loss.detach()
    wanted[1].flatten(0, 1)[rows] = of_x
    wanted[2] += of_weight
for one, other, error in zip(found, wanted, (1e-4, 1e-2, 1e-2)):
    assert (one.float() - other).norm() < error * other.norm(), (one, other)
along = (found[2].float() * wanted[2]).sum() / wanted[2].square().sum()
assert abs(along - 1) < 1e-3, along
print("equal")
"""

# Of one row what a program of the kernel does: a width that no block divides, and no number.
KERNEL = """
import torch
import torch.nn.functional as F
from fivefold.model.kernels.loss_kernel import loss_to_gradient, scale
torch.manual_seed(0)
for dtype, error in ((torch.bfloat16, 8e-3), (torch.float32, 1e-6)):
    for vocab in (50257, 16384, 7):
        logits = (4 * torch.randn(65, vocab, device="cuda")).to(dtype)
        logits[3] += 60
        labels = torch.randint(vocab, (65,), device="cuda")
        labels[::7] = -100
        wide = logits.double().requires_grad_()
        loss = F.cross_entropy(wide, labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, wide)
        found = loss_to_gradient(logits, labels)
        assert abs(found - loss) < 1e-5 * loss, (found, loss)
        assert (logits - gradient).norm() < error * gradient.norm()
        assert not logits[::7].any()
        scale(logits, torch.tensor(1 / 23, device="cuda"))
        assert (logits - gradient / 23).norm() < 2 * error * gradient.norm() / 23
for bad in (float("nan"), float("inf")):
    logits = torch.randn(2, 999, device="cuda", dtype=torch.bfloat16)
    logits[1, 500] = bad
    assert loss_to_gradient(logits, torch.zeros(2, dtype=torch.int64, device="cuda")).isnan()
print("equal")
"""


def test_the_kernel_of_the_loss_has_the_numbers_of_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_a_head_in_chunks_has_the_numbers_and_the_memory_of_one_chunk(kernels: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEAD, kernels],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
