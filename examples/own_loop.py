"""Your own model in your own loop, sharded over data ranks: any `nn.Module`, given its blocks.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch
import torch.distributed as dist
from torch import nn

from fivefold.core.layout.groups import Topology
from fivefold.core.layout.layout import Layout
from fivefold.parallel.data import shard
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.units.flat_unit import UnitOptions


def make_model() -> nn.Sequential:
    """Four layers; the model knows nothing about ranks."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(32, 1)).double()


def train(steps: int = 20, zero: int = 3) -> list[float]:
    """The loss of every step. It is the same on one process and on many."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = Mesh(Topology(Layout(shard=world, zero=zero)), torch.device("cpu"))
    model = make_model()
    blocks = {f"layer {place}": [layer] for place, layer in enumerate(model)}
    data = shard(model, blocks, mesh, UnitOptions(zero), bucket=10_000)
    optimizer = torch.optim.AdamW([each.tensor for each in data.owned], lr=1e-2)
    losses = []
    for step in range(steps):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step)).double()
        mine = x.chunk(world)[mesh.coord("fsdp")]
        loss = ((model(mine) - mine.sum(1, keepdim=True)) ** 2).sum() / len(x)
        with data.backward(last=True):
            loss.backward()
        data.finish()
        optimizer.step()
        data.publish()
        total = loss.detach()
        if world > 1:
            dist.all_reduce(total)
        losses.append(float(total))
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses = train()
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.6f} at the first step, {losses[-1]:.6f} at the last")
    dist.destroy_process_group()
