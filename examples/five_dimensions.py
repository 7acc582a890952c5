"""All five dimensions from your own loop.

torchrun --nproc-per-node 16 examples/five_dimensions.py
"""

import torch
import torch.distributed as dist

from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.data.batches import samples
from fivefold.optim.optimizer import make_optimizer
from fivefold.parallel.composition import compose
from fivefold.parallel.mesh import Mesh
from fivefold.step import step

LAYOUT = "dp=2 tp=2 pp=2 cp=2 ep=2"


def train(layout: str = LAYOUT, steps: int = 3) -> list[float]:
    """The loss of every step. It is the same on every rank of every layout."""
    plan = resolve(PlanOptions("tiny-moe", layout=layout, schedule="zb-h1", seq=32, batch=8))
    job = compose(plan, Mesh.of(plan, torch.device("cpu")), seed=0, dtype=torch.float64)
    owned = [(len(each.row.shape) > 1, each.tensor) for each in job.owned]
    optimizer = make_optimizer("adamw", owned, lr=1e-3, weight_decay=0.1)
    losses = []
    for number in range(steps):
        drawn = samples(plan.batch, plan.shape.vocab, seed=0, step=number)  # or your own tokens
        mine = drawn.of(plan.layout.coord(job.mesh.rank).dp)
        losses.append(float(step(job, optimizer, mine, max_norm=1.0).loss))
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses = train()
    if dist.get_rank() == 0:
        print("loss", *(f"{loss:.9f}" for loss in losses))
    dist.destroy_process_group()
