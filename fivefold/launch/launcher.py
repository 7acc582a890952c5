"""Where a process stands that a launcher started, read from what the launcher left in the
environment.

torchrun and the Kubernetes PyTorchJob set `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`;
`srun` sets `SLURM_PROCID` and its like, from which the meeting point is worked out: the first host
of the job, and a port that follows from the job's number.
"""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.plan import Plan, resolve
from fivefold.launch.worker import StopRequest, StoreBoard, Worker

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000  # below those that Linux gives away by itself
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_NODELIST", "SLURM_JOB_ID")


@dataclass(frozen=True)
class LauncherEnvironment:
    """One of `world` processes that a launcher started, and where they meet."""

    launcher: str
    rank: int
    world: int
    local_rank: int
    host: str
    port: int
    restarts: int = 0  # how often the launcher has started all of them again
    hosted: bool = False  # the launcher keeps the store at the meeting point, not rank 0


def here(environment: Mapping[str, str]) -> LauncherEnvironment | None:
    """What the environment says; None where no launcher has started this process."""
    if any(name in environment for name in _TORCHRUN[:2]):
        return _checked(_by_torchrun(environment))
    # A shell inside of an allocation has the job's variables; only a task of srun has its step's.
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _checked(_by_slurm(environment))
    return None


def hosts(text: str) -> Iterator[str]:
    """The hosts of a Slurm list, in order.

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
    head, bracket, rest = pattern.partition("[")
    if not bracket:
        yield head
        return
    inside, _, tail = rest.partition("]")
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        for number in range(int(first), int(last if dash else first) + 1):
            for behind in _expanded(tail):
                yield f"{head}{number:0{len(first)}}{behind}"


def _by_torchrun(environment: Mapping[str, str]) -> LauncherEnvironment:
    _present(environment, _TORCHRUN, "torchrun or a PyTorchJob", "start it with torchrun")
    number = partial(_number, environment)
    return LauncherEnvironment(
        "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "environment",
        number("RANK"),
        number("WORLD_SIZE"),
        number("LOCAL_RANK", "0"),
        environment["MASTER_ADDR"],
        number("MASTER_PORT"),
        number("TORCHELASTIC_RESTART_COUNT", "0"),
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _by_slurm(environment: Mapping[str, str]) -> LauncherEnvironment:
    _present(environment, _SLURM, "srun", "start it with srun, inside of a job")
    number = partial(_number, environment)
    first = environment.get("MASTER_ADDR") or next(hosts(environment["SLURM_JOB_NODELIST"]))
    derived = _FIRST_PORT + number("SLURM_JOB_ID") % _NUM_PORTS
    return LauncherEnvironment(
        "srun",
        number("SLURM_PROCID"),
        number("SLURM_NTASKS"),
        number("SLURM_LOCALID"),
        first,
        number("MASTER_PORT", str(derived)),
        number("SLURM_RESTART_COUNT", "0"),
    )


def _present(
    environment: Mapping[str, str], names: tuple[str, ...], launcher: str, way_out: str
) -> None:
    missing = [name for name in names if name not in environment]
    if missing:
        found = next(name for name in names if name in environment)
        raise BadFile(
            "the environment",
            [
                f"{found} is set, as {launcher} would, but not {', '.join(missing)}: {way_out}, or "
                f"unset {found} to start the ranks on this machine"
            ],
        )


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment[name] if default is None else environment.get(name, default)
    if not re.fullmatch(r"\d+", text):
        raise BadFile("the environment", [f"{name} is {text!r}: it must be a whole number"])
    return int(text)


def _checked(launched: LauncherEnvironment) -> LauncherEnvironment:
    if launched.rank >= launched.world:
        raise BadFile(
            "the environment",
            [
                f"rank {launched.rank} of {launched.world}: ranks count from 0, so the highest is "
                f"{launched.world - 1}; RANK and WORLD_SIZE, or Slurm's like, must come from one "
                "launcher"
            ],
        )
    return launched


# Another number of ranks for the same training: data parallelism gives way, the batch stays.


def refit(plan: Plan, world: int) -> Plan:
    """The plan on so many ranks, with the dp that fills them and the same global batch.

    tp, cp, pp and experts stay: they are how the model fits.
    """
    layout, batch = plan.layout, plan.batch
    if world == layout.world:
        return plan
    fixed = layout.tp * layout.cp * layout.pp
    dp, rest = divmod(world, fixed)
    if rest or not dp:
        raise FivefoldError(
            f"{world} ranks were started, and the layout {layout} takes {layout.world}: only dp "
            f"can give way, so start a multiple of tp · cp · pp = {fixed} ranks"
        )
    each, rest = divmod(batch.sequences, dp * batch.microbatch_size)
    if rest or not each:
        raise FivefoldError(
            f"{world} ranks leave dp={dp}, which does not divide the global batch "
            f"{batch.sequences} into microbatches of {batch.microbatch_size}: start another number "
            "of ranks, or set microbatch_size"
        )
    changed = replace(layout, replicate=1, shard=dp)
    wishes = replace(plan.wishes, layout=str(changed), microbatches=each, gpus=None)
    note = f"dp={dp} instead of {layout.dp}, for {world} ranks were started; the batch stays"
    fitted = resolve(wishes)
    return replace(fitted, notes=(*plan.notes, note))


# Ranks that a launcher started: torchrun, srun, a Kubernetes PyTorchJob.
#
# They join one process group over a store at the meeting point, and then run the same lines as
# ranks that a pool has forked: `joined_worker` gives them the same `Worker`. What a forked rank
# tells its pool, a launched one says itself: reports are rank 0's to print, and a lost run ends
# with exit code 1, upon which the launcher starts all ranks again, or ends them.


_TO_MEET = timedelta(minutes=10)
_TO_ANSWER = 0.2  # seconds, then the name on the door is read again
_TO_HEAR = 2.0  # seconds in which other ranks read the last word, before its keeper ends


class LaunchedMeeting:
    """Where the ranks of a launcher come together."""

    folder = None

    def __init__(self, launched: LauncherEnvironment) -> None:
        self.launched = launched

    @cached_property
    def _room(self) -> str:
        """Where in the store this start of the ranks writes."""
        keeps = self.launched.rank == 0 and not self.launched.hosted
        self._store = self._reached(keeps)
        return agreed(self._store, self.launched.rank, self.launched.world)

    def join(self, rank: int, world: int, device: torch.device) -> None:
        """NCCL on GPUs, gloo elsewhere."""
        assert world == self.launched.world, "a launcher's ranks are all or none"
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(f"{self._room}/group", self._store),
            rank=rank,
            world_size=world,
            timeout=_TO_MEET,
            device_id=device if on_gpu else None,
        )

    def board(self) -> StoreBoard:
        """Over a connection of its own: one that waits for a key is not free for others."""
        room = self._room  # which rank 0 has to open first
        return StoreBoard(dist.PrefixStore(room, self._reached(False)))

    def leave(self) -> NoReturn:
        """End this rank. One that may keep the store gives the others time to hear why."""
        if self.launched.rank == 0:
            time.sleep(_TO_HEAR)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the main thread may wait for ever

    def _reached(self, keeps: bool) -> dist.Store:
        host, port = self.launched.host, self.launched.port
        try:
            return dist.TCPStore(
                host, port, self.launched.world, keeps, _TO_MEET, wait_for_workers=False
            )
        except dist.DistError as error:
            raise FivefoldError(
                f"rank {self.launched.rank} cannot reach the meeting point {host}:{port}: set "
                "MASTER_ADDR and MASTER_PORT to a host and a free port that all hosts can reach "
                f"({error})"
            ) from error


def agreed(store: dist.Store, rank: int, world: int) -> str:
    """A name that all ranks of this start know, and that no start before has used.

    torchrun keeps its store when it starts the ranks again, and its hosts count restarts each for
    itself. So rank 0 writes a new name on the door; every other rank knocks under that name with a
    new name of its own, and is answered by that. A name of a former start is never answered.
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        store.set("fivefold/door", mine)
        for other in range(1, world):
            store.set(f"fivefold/{store.get(f'fivefold/{mine}/{other}').decode()}", mine)
        return mine
    until, knocked = time.monotonic() + _TO_MEET.total_seconds(), ""
    while time.monotonic() < until:
        door = store.get("fivefold/door").decode()
        if door != knocked:
            store.set(f"fivefold/{door}/{rank}", mine)
            knocked = door
        if store.check([f"fivefold/{mine}"]):
            return store.get(f"fivefold/{mine}").decode()
        time.sleep(_TO_ANSWER)
    raise FivefoldError(
        f"rank {rank} has waited {_TO_MEET} for all {world} ranks to come: look at those that did "
        "not start"
    )


def joined_worker(launched: LauncherEnvironment, on_report: Callable[[Any], None]) -> Worker:
    """This process as a worker. It listens for requests to stop; `on_report` is rank 0's."""
    meeting, stop = LaunchedMeeting(launched), StopRequest()
    stop.listen()

    def tell(kind: str, what: Any) -> None:
        if kind == "report" and launched.rank == 0:
            on_report(what)
        elif kind == "lost":
            rank, doing, cause = what
            print(f"fivefold: lost rank {rank} at {doing}: it {cause}", file=sys.stderr, flush=True)
            meeting.leave()

    return Worker(launched.rank, meeting, tell, stop)


def own_device(launched: LauncherEnvironment) -> torch.device:
    """The GPU that this rank has on its host, or the processor where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if launched.local_rank >= torch.cuda.device_count():
        raise FivefoldError(
            f"local rank {launched.local_rank} has no GPU of its own, as this host has "
            f"{torch.cuda.device_count()}: start as many ranks a host as it has GPUs"
        )
    return torch.device("cuda", launched.local_rank)
