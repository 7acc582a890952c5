"""What a launcher says about this process. This is the only reader of its environment variables.

torchrun and the Kubernetes PyTorchJob set `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.
`srun` sets `SLURM_PROCID` and others. The ranks of srun meet at the first host of the job, on a
port that follows from the job's number. Either may show each task one GPU of its own, as
`srun --gpus-per-task=1` does. `refit` adapts a plan to the number of ranks started.
Nothing here loads torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from fivefold.core import BadFile, FivefoldError, counted
from fivefold.core.layout import Batch, weights
from fivefold.core.model import refuse_mixer
from fivefold.core.plan import Plan, resolve

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # below the ports that Linux assigns by itself
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_NODELIST", "SLURM_JOB_ID")


@dataclass(frozen=True)
class LauncherEnvironment:
    """Rank of this process among the `world` processes of a launcher, and their rendezvous.

    `local_world` counts those on this host, where the launcher says it. With its `own_gpu` a
    process sees only GPUs that no other one uses, whatever its local rank is.
    """

    rank: int
    world: int
    local_rank: int
    host: str
    port: int
    hosted: bool = False  # the launcher hosts the store, not rank 0
    local_world: int | None = None
    own_gpu: bool = False


def read_environment(environment: Mapping[str, str]) -> LauncherEnvironment | None:
    """Read the launcher's environment; None if no launcher started this process."""
    if any(name in environment for name in _TORCHRUN[:2]):
        return _checked(_from_torchrun(environment))
    # A shell in an allocation has the variables of the job; only a task of srun has a step.
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _checked(_from_slurm(environment))
    return None


def read_torchrun(environment: Mapping[str, str]) -> LauncherEnvironment | None:
    """Read torchrun's environment; None if it did not start this process, nor if another launcher
    did."""
    if not all(name in environment for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        return None
    return _checked(_from_torchrun(environment))


def hosts(text: str) -> Iterator[str]:
    """Expand a Slurm host list.

    >>> list(hosts("login,node[08-10,12]-ib"))
    ['login', 'node08-ib', 'node09-ib', 'node10-ib', 'node12-ib']
    """
    if not re.fullmatch(r"([^,\[\]]|\[[\d,-]+\])+(,([^,\[\]]|\[[\d,-]+\])+)*", text):
        raise FivefoldError(
            f"cannot read the list of hosts {text!r}: expected a form such as node[001-004,7]; "
            "set MASTER_ADDR to the first host"
        )
    for pattern in re.split(r",(?![^\[]*\])", text):
        yield from _expanded(pattern)


def _expanded(pattern: str) -> Iterator[str]:
    head, bracket, remainder = pattern.partition("[")
    if not bracket:
        yield head
        return
    inside, _, tail = remainder.partition("]")
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        for number in range(int(first), int(last if dash else first) + 1):
            for suffix in _expanded(tail):
                yield f"{head}{number:0{len(first)}}{suffix}"


def _from_torchrun(environment: Mapping[str, str]) -> LauncherEnvironment:
    _require(environment, _TORCHRUN, "torchrun or a PyTorchJob", "start it with torchrun")
    number = partial(_number, environment)
    return LauncherEnvironment(
        number("RANK"),
        number("WORLD_SIZE"),
        number("LOCAL_RANK", "0"),
        environment["MASTER_ADDR"],
        number("MASTER_PORT"),
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else None,
        _sees_one_gpu(environment),
    )


def _from_slurm(environment: Mapping[str, str]) -> LauncherEnvironment:
    _require(environment, _SLURM, "srun", "start it with srun, in a job")
    number = partial(_number, environment)
    first = environment.get("MASTER_ADDR") or next(hosts(environment["SLURM_JOB_NODELIST"]))
    derived = _FIRST_PORT + number("SLURM_JOB_ID") % _NUM_PORTS
    return LauncherEnvironment(
        number("SLURM_PROCID"),
        number("SLURM_NTASKS"),
        number("SLURM_LOCALID"),
        first,
        number("MASTER_PORT", str(derived)),
        local_world=_tasks_here(environment),
        own_gpu="SLURM_GPUS_PER_TASK" in environment or _sees_one_gpu(environment),
    )


def _tasks_here(environment: Mapping[str, str]) -> int | None:
    """The tasks of the step on this host, such as the 2 or 1 of `2(x3),1`; None if not said."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    host = environment.get("SLURM_NODEID", "")
    return counts[int(host)] if host.isdecimal() and int(host) < len(counts) else None


def _sees_one_gpu(environment: Mapping[str, str]) -> bool:
    """Whether the list of visible GPUs has one entry.

    It may be a GPU for each task, or one for all of them: NCCL refuses the latter by itself.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES", environment.get("SLURM_STEP_GPUS", ""))
    return bool(re.fullmatch(r"\s*[^\s,]+\s*", visible))


def _require(
    environment: Mapping[str, str], names: tuple[str, ...], launcher: str, way_out: str
) -> None:
    if missing := [name for name in names if name not in environment]:
        variable = next(name for name in names if name in environment)
        rule = f"{variable} is set, as {launcher} would, but not {', '.join(missing)}"
        remedy = f"{way_out}, or unset {variable} to start the ranks on this machine"
        raise BadFile("the environment", [f"{rule}: {remedy}"])


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment[name] if default is None else environment.get(name, default)
    if not re.fullmatch(r"\d+", text):
        raise BadFile("the environment", [f"{name} is {text!r}: it must be a whole number"])
    return int(text)


def _checked(launched: LauncherEnvironment) -> LauncherEnvironment:
    if launched.rank >= launched.world:
        rank, world = launched.rank, launched.world
        rule = f"rank {rank} of {world}: ranks count from 0, so the highest is {world - 1}"
        remedy = "RANK and WORLD_SIZE, or those of Slurm, must come from one launcher"
        raise BadFile("the environment", [f"{rule}; {remedy}"])
    return launched


def require_trainable(plan: Plan) -> None:
    """Raise if `train` cannot run this plan on any ranks."""
    weights(plan.shape)  # raises for a model that cannot be built
    if plan.options.train.sample_every:
        refuse_mixer(plan.shape, "sample_every, which generates text,")
    if plan.fp8 is not None:
        plan.fp8.require_runnable(plan.schedule.asynchronous)
    if plan.schedule.asynchronous:
        raise FivefoldError(
            f"schedule {plan.schedule.name} is asynchronous, which train does not run: choose "
            "another, such as 1f1b or zb-h1"
        )


def refit(plan: Plan, world: int) -> Plan:
    """Plan for another number of ranks: dp changes, the global batch does not.

    tp, cp, pp and ep stay, because with them the model fits.
    """
    layout = plan.layout
    if world == layout.world:
        return plan
    fixed = layout.tp * layout.cp * layout.pp
    dp, remainder = divmod(world, fixed)
    if remainder or not dp:
        raise FivefoldError(
            f"{world} ranks were started, but the layout {layout} needs {layout.world}: only dp "
            f"can change, so start a multiple of tp · cp · pp = {fixed} ranks"
        )
    changed, even = _over(plan, dp), replace(layout, replicate=1, shard=dp)
    options = replace(plan.options, layout=str(even), microbatches=changed.microbatches, gpus=None)
    started = counted(world, "rank")
    note = f"dp={dp} instead of {layout.dp}, because {started} started; the batch stays"
    new_plan = resolve(options)
    if changed.idle:
        # The options keep the plan whose ranks are all there: no other has this batch.
        new_plan = replace(new_plan, batch=changed, options=plan.options)
        odd = counted(dp - changed.idle, "data rank")
        note += f", and the first {odd} take the odd microbatches, one each"
    return replace(new_plan, notes=(*plan.notes, note))


def _over(plan: Plan, dp: int) -> Batch:
    """The batch over so many data ranks; odd microbatches are allowed where idle ranks change no
    number."""
    batch = plan.batch
    number = batch.sequences // batch.microbatch_size
    routed = plan.shape.moe is not None or bool(plan.options.train.dpo_beta)
    if number < dp or (number % dp and routed):
        because = ", and experts or pairs do not allow a remainder" if routed else ""
        raise FivefoldError(
            f"{counted(dp * plan.layout.world // plan.layout.dp, 'rank')} give dp={dp}, which does "
            f"not divide the global batch of {batch.sequences} into microbatches of "
            f"{batch.microbatch_size}{because}: start another number of ranks, or set "
            "microbatch_size"
        )
    return Batch.over(dp, batch)


def without_replica(plan: Plan, lost: int = 1) -> Plan:
    """Plan without `lost` replicas, or more if that number is not legal."""
    layout = plan.layout
    replica_ranks, problem = layout.world // layout.dp, FivefoldError("there is no other replica")
    for dp in range(layout.dp - lost, 0, -1):
        try:
            return refit(plan, dp * replica_ranks)
        except FivefoldError as error:
            problem = error
    raise FivefoldError(f"no replica of {layout} can be left out: {problem}")
