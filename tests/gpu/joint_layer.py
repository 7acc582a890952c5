"""One layer whose weights are adjacent, and the same layer with every weight in a unit of its own.

    python tests/gpu/joint_layer.py cuda bfloat16 compiled llama-3.1-8b 8192

prints JSON: the largest difference of a gradient over the norm of that gradient, and the seconds of
a forward and backward with joint and with separate matmuls, medians of turns that alternate. On a
CPU (`cpu float32 eager tiny 64`) they are seconds of the process.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from torch import Tensor

from fivefold.core import models
from fivefold.core.plan import PlanOptions, resolve
from fivefold.model.batch import TokenBatch
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.init import init_weights
from fivefold.model.layers import adjacent_rows
from fivefold.model.regions import compiled, eager
from fivefold.parallel.data import shard
from fivefold.parallel.flat_unit import UnitOptions
from fivefold.parallel.mesh import Mesh

DEVICE, DTYPE, KIND, MODEL, TOKENS = sys.argv[1:]
SHAPE, TURNS = models.load(MODEL), 20
BATCH = TokenBatch(*(torch.arange(int(TOKENS), device=DEVICE)[None] for _ in range(3)))


def layer(joint: bool) -> Decoder:
    """A stage of one block."""
    dtype, fuse = getattr(torch, DTYPE), compiled if KIND == "compiled" else eager
    decoder = from_config(SHAPE, dtype=dtype, device=DEVICE, layers=range(1, 2), fuse=fuse)
    init_weights(decoder, SHAPE, 0)
    mesh = Mesh.of(resolve(PlanOptions("tiny"), small=True), torch.device(DEVICE))
    blocks = {"blocks.1": [decoder.blocks["1"]]}
    decoder.units = shard(decoder, blocks, mesh, UnitOptions(0), None if joint else 1).units
    block = decoder.all_blocks()[0]
    weights = [block.attention.q.weight, block.attention.k.weight, block.attention.v.weight]
    assert (adjacent_rows(weights) is not None) == joint
    return decoder


def run(decoder: Decoder, x: Tensor) -> float:
    """Forward and backward: seconds."""
    decoder.zero_grad()
    start = _now()
    y = decoder(x, BATCH)
    y.backward(x.detach())
    return _now() - start


def _now() -> float:
    """When the device has done its work; on a CPU, the seconds of this process."""
    if DEVICE != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    x = torch.randn(1, int(TOKENS), SHAPE.width, generator=torch.Generator().manual_seed(0))
    x = x.to(DEVICE, getattr(torch, DTYPE)).requires_grad_()
    layers = {name: layer(name == "joint") for name in ("joint", "separate")}
    turns: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(TURNS):
        for name, decoder in layers.items():
            turns[name].append(run(decoder, x))
    found = dict(layers["joint"].named_parameters())
    errors: list[float] = []
    for name, truth in layers["separate"].named_parameters():
        gradient = found[name].grad
        assert truth.grad is not None and gradient is not None
        difference = gradient.float() - truth.grad.float()
        errors.append(float(difference.norm() / truth.grad.float().norm()))
    seconds = {name: statistics.median(each[TURNS // 4 :]) for name, each in turns.items()}
    print(json.dumps({"error": max(errors), **seconds}))


main()
