"""Restarts: after the loss of a rank all ranks start again, from copies in memory or the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fivefold.core import FivefoldError, RankLost
from fivefold.core.layout import Partners
from fivefold.core.plan import Plan, Recipe
from fivefold.launch import LauncherEnvironment, without_replica

if TYPE_CHECKING:
    from fivefold.launch import HostKeeper, InheritedMemory

Result = TypeVar("Result")


@dataclass(frozen=True)
class RestartedRun:
    """A rank was lost, and all ranks start again with this plan."""

    lost: RankLost
    number: int
    most: int
    plan: Plan

    def __str__(self) -> str:
        note = f"; {self.plan.notes[-1]}" if self.plan.notes else ""
        return f"{self.lost.reason}\nrestart {self.number} of {self.most}{note}"


@dataclass(frozen=True)
class RestartPolicy:
    """How often ranks start again; `shrink`: without the replica that was lost, until the restart
    after that."""

    most: int = 0
    shrink: bool = False

    def plan_after(self, full: Plan, current: Plan) -> Plan:
        """The plan of the next start: all replicas, or one less than all of them."""
        if not self.shrink or current.layout.dp < full.layout.dp:
            return full
        return without_replica(full)

    def run(
        self,
        full: Plan,
        attempt: Callable[[Plan, bool], Result],
        told: Callable[[RestartedRun], None],
    ) -> Result:
        """Call `attempt` with a plan, and whether it is a restart, until no rank is lost."""
        plan = full
        for number in range(self.most + 1):
            try:
                return attempt(plan, number > 0)
            except RankLost as lost:
                if lost.final or number == self.most:
                    raise
                plan = self.plan_after(full, plan)
                told(RestartedRun(lost, number + 1, self.most, plan))
        raise AssertionError("the last attempt returns or raises")

    def require(self, plan: Plan, launched: LauncherEnvironment | None, check: bool) -> None:
        """Refuse restarts that nobody could make."""
        if self.most < 0:
            raise FivefoldError(f"restarts {self.most}: 0 or more")
        if self.shrink and not self.most:
            raise FivefoldError("--shrink leaves a replica out at a restart: give --restarts too")
        if self.most and launched is not None:
            raise FivefoldError(
                "--restarts: these ranks were started by a launcher, which restarts them itself; "
                "give torchrun --max-restarts"
            )
        if self.most and check:
            raise FivefoldError("--check compares one start with one process: leave --restarts out")
        if self.shrink:
            without_replica(plan)


def copy_domain(recipe: Recipe, world: int, launched: LauncherEnvironment | None) -> int:
    """The ranks of a failure domain, 0 if one host keeps all copies; refused if a failure would
    lose a rank and its partner."""
    per_host = world if launched is None else launched.local_world or 1
    even = per_host < world and world % per_host == 0
    domain = recipe.copy_domain or (per_host if even and recipe.copy_every else 0)
    return Partners.checked(world, domain, per_host).domain


@contextmanager
def host_keeper(
    recipe: Recipe, launched: LauncherEnvironment, folder: Path
) -> Generator[HostKeeper | None]:
    """The keeper of copies on the host of a launched rank; it ends with a run that ends well."""
    from fivefold.launch import HostKeeper

    if not recipe.copy_every:
        yield None
        return
    share = None
    if launched.local_world != launched.world:
        share = (launched.local_rank, launched.local_world or 1)
    keeper = HostKeeper(folder, os.getppid(), share)
    yield keeper
    keeper.end()


@contextmanager
def kept_memory(recipe: Recipe, world: int) -> Generator[InheritedMemory | None]:
    """Memory of this process for the copies of ranks that it forks; None without copies."""
    from fivefold.launch import InheritedMemory

    if not recipe.copy_every:
        yield None
        return
    memory = InheritedMemory.create(world)
    try:
        yield memory
    finally:
        memory.close()
