"""Ranks that a launcher started: torchrun, srun, a Kubernetes PyTorchJob.

They join one process group over a store at the meeting point, and then run the same lines as ranks
that a pool has forked: `joined_worker` gives them the same `Worker`. What a forked rank tells its
pool, a launched one says itself: reports are rank 0's to print, and a lost run ends with exit code
1, upon which the launcher starts all ranks again, or ends them.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fivefold.core.errors import FivefoldError
from fivefold.core.launched import Launched
from fivefold.run.board import StoreBoard
from fivefold.run.worker import StopRequest, Worker

_TO_MEET = timedelta(minutes=10)
_TO_ANSWER = 0.2  # seconds, then the name on the door is read again
_TO_HEAR = 2.0  # seconds in which other ranks read the last word, before its keeper ends


class LaunchedMeeting:
    """Where the ranks of a launcher come together."""

    folder = None

    def __init__(self, launched: Launched) -> None:
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


def joined_worker(launched: Launched, on_report: Callable[[Any], None]) -> Worker:
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


def own_device(launched: Launched) -> torch.device:
    """The GPU that this rank has on its host, or the processor where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if launched.local_rank >= torch.cuda.device_count():
        raise FivefoldError(
            f"local rank {launched.local_rank} has no GPU of its own, as this host has "
            f"{torch.cuda.device_count()}: start as many ranks a host as it has GPUs"
        )
    return torch.device("cuda", launched.local_rank)
