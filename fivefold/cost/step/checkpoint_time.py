"""What a checkpoint of a plan costs: bytes, and seconds to save and to load it.

A save copies each rank's shards to host memory, for which the steps wait, and moves them on while
the next steps run: to a file system that all hosts share, or to the memory of a partner host in
another failure domain. A checkpoint has the float32 masters and the optimizer's states of what
learns, and the weights of what does not; each shard once.
"""

from __future__ import annotations

from fivefold.core import Machine
from fivefold.core.layout import planned_weights
from fivefold.core.model import parameters
from fivefold.core.plan import CheckpointPlace, FailureDomain, Plan, SaveCost

# Of the host link, and of the time in which a save is written: measured on one H200 with 19.9 GiB,
# which block the run for 0.4 s and make steps 3.8% longer meanwhile (docs/checkpoints.md).
_OF_LINK = 0.85
_SLOWED = 0.038
# Bytes/s to a shared file system: Llama 3 had 2 TB/s sustained for 2,048 hosts (arXiv 2407.21783,
# section 3.1.1). A job has this share for each host, and the total at most.
STORAGE_PER_HOST = 1e9
STORAGE = 2e12
_MASTER = 4
_FROZEN = 2


def checkpoint_bytes(plan: Plan) -> float:
    """Bytes of a checkpoint, whatever the layout."""
    states = plan.options.train.state_bytes
    if plan.shape.tuning is None:
        return float((_MASTER + states) * parameters(plan.shape).total)
    return float(
        sum(
            (_FROZEN if weight.frozen else _MASTER + states) * weight.numel
            for weight in planned_weights(plan.shape)
        )
    )


def save_cost(
    plan: Plan,
    machine: Machine,
    target: CheckpointPlace,
    storage: float | None = None,
    gpus: int | None = None,
) -> SaveCost:
    """The seconds of a save to a disk or to partners' memory. `storage`: bytes/s of the shared file
    system, for all hosts of the job together. `gpus`: with so many in place of the plan's."""
    size, domain = checkpoint_bytes(plan), failure_domain(plan, machine, gpus)
    layout = plan.layout
    # Without ZeRO replicas hold the same; each shard is then copied on one of them.
    shards = domain.gpus if layout.zero else layout.tp * layout.pp
    stall = size / shards / (_OF_LINK * machine.host.link.bandwidth)
    if target == "disk":
        speed = storage or min(STORAGE, STORAGE_PER_HOST * domain.hosts)
    else:
        speed = machine.tiers[-1].bandwidth * domain.gpus
    write = size / speed
    return SaveCost(size, stall, write, _SLOWED * write, write)


def failure_domain(plan: Plan, machine: Machine, gpus: int | None = None) -> FailureDomain:
    """What can fail of a plan on a machine."""
    return FailureDomain(gpus or plan.layout.world, machine.gpus_per_node)
