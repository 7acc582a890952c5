"""The masks of dropout on a GPU are those of a CPU, with and without the compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fivefold.launch.backend import num_gpus

pytestmark = pytest.mark.skipif(
    not num_gpus(), reason="no CUDA device: run this where there is one"
)

MASKS = """
import torch
from fivefold.model.dropout import PairDropout, drop, site_keys, token_keys
from fivefold.model.kernels.regions import compiled
keys = token_keys(5, torch.arange(2**33, 2**33 + 4), 512)
sites, there = site_keys(keys, 3, 9), compiled(site_keys)(keys.cuda(), 3, 9)
assert torch.equal(sites, there.cpu()) and torch.equal(sites, site_keys(keys.cuda(), 3, 9).cpu())
for dtype in (torch.float32, torch.bfloat16):
    ones = torch.ones(4, 512, 1024, dtype=dtype)
    wanted = drop(ones, sites[2], 0.3)
    for made in (drop, compiled(drop)):
        found = made(ones.cuda(), there[2], 0.3).cpu()
        assert torch.equal(found == 0, wanted == 0)
        torch.testing.assert_close(found, wanted)
places, pairs = torch.arange(512), PairDropout(0.2, keys, 4, 1)
on_gpu = PairDropout(0.2, keys.cuda(), 4, 1).keeps(3, places.cuda(), places.cuda())
assert torch.equal(pairs.keeps(3, places, places), on_gpu.cpu())
print("equal")
"""


def test_a_gpu_and_its_compiler_draw_the_masks_of_a_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MASKS], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
