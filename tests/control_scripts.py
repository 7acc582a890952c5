"""Random faults at 1,024 simulated ranks: the right rank is named, and nothing goes on twice.

    python -m tests.control_scripts --scripts 10000

plays scripts: a rank dies, hangs, is slow, is stopped and comes back late, a host is cut off, two
ranks fail at once, in a step, a build or a save; and a judge decides for seconds, or is stopped
meanwhile. Then the run starts again: the ranks agree on a prefix, the plan loses a replica, and the
start takes over the run folder, while what is left of the old start tries to join and to publish.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.core.errors import FivefoldError
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.launch.launcher import without_replica
from fivefold.launch.watch.watchdog import PATIENCE
from fivefold.launch.worker import agreement
from fivefold.records.run_owner import OWNER, RunTicket, own_run
from tests.control_plane import END, LAYOUT, Script, World

_SAID = 50  # scripts after which the numbers so far are printed


class Finding(NamedTuple):
    """What a script showed."""

    script: Script
    named: int | None
    right: bool
    unsafe: list[str]


def judged(script: Script, folder: Path) -> Finding:
    """Play a script, and hold what happened to the rules."""
    world = World(script)
    world.play()
    on_board = {lost for by, lost in world.verdicts if by not in script.cut}
    unsafe: list[str] = []
    if len(on_board) > 1:
        unsafe.append(f"two verdicts: {sorted(on_board)}")
    said = [by for by, _ in world.verdicts if by not in script.cut]
    if len(said) > 1:
        unsafe.append(f"ranks {said} ended the run, each by itself")
    alive = {each.rank for each in world.ranks if each.alive and not each.stopped}
    dead = script.silent if script.back > END else set[int]()
    if on_board and alive - dead:
        unsafe.append(f"{len(alive - dead)} ranks go on after the verdict")
    if script.cut & alive:
        unsafe.append(f"{len(script.cut & alive)} ranks go on beyond the partition")
    if not on_board and script.back < END and (late := world.unfinished()):
        unsafe.append(f"{len(late)} ranks did not go on after a rank was slow")
    named = next(iter(on_board), None)
    unsafe += restarted(script, folder)
    # A rank that goes on soon was only slow, and nobody may be named.
    enough = script.hang_after - 2 if script.kind in ("slow", "late", "judge") else PATIENCE - 2
    right = named in script.ranks and script.back > enough
    right = right or (named is None and script.back < END)
    if named is None and script.kind in ("build", "save"):  # whose limit is a later one
        right = any(rank in script.ranks for rank in world.named())
    for each in world.ranks:
        each.watchdog.recorder.close()
    return Finding(script, named, right, unsafe)


class SimulatedStore:
    """torch's store, as far as ranks agree by it."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def set(self, name: str, text: str) -> None:
        self.texts[name] = text

    def get(self, name: str) -> bytes:
        return self.texts[name].encode()

    def check(self, names: list[str]) -> bool:
        return all(name in self.texts for name in names)


@cache
def world_after() -> int:
    """The ranks without a replica, as a restart plans them."""
    options = PlanOptions("tiny", LAYOUT, batch=512, microbatch_size=1, seq=64)
    return without_replica(resolve(options)).layout.world


def restarted(script: Script, folder: Path) -> list[str]:
    """The next start: who takes part in it, and who owns the checkpoints."""
    draw, store = random.Random(script.seed + 2), SimulatedStore()
    store.set("fivefold/offer", "of the start before")
    world, now, agreed = world_after(), [0.0], list[tuple[int, str]]()
    members = [(rank, agreement(store, rank, world, lambda: now[0])) for rank in range(world)]  # type: ignore[arg-type]
    stale = [rank for rank in sorted(script.ranks) if 0 < rank < world][:2]
    members += [(rank, agreement(store, rank, world, lambda: now[0])) for rank in stale]  # type: ignore[arg-type]
    draw.shuffle(members)
    waiting = members
    for _ in range(40):
        now[0] += 0.2
        still: list[tuple[int, Any]] = []
        for rank, agreeing in waiting:
            try:
                next(agreeing)
                still.append((rank, agreeing))
            except StopIteration as done:
                agreed.append((rank, done.value))
        waiting = still
        if len(agreed) >= world:
            break
    unsafe: list[str] = []
    if len({prefix for _, prefix in agreed}) != 1:
        unsafe.append("ranks agreed on different prefixes")
    if sorted(rank for rank, _ in agreed) != list(range(world)):
        unsafe.append("not every rank takes part in the new start exactly once")
    return unsafe + owners(draw, folder)


def owners(draw: random.Random, folder: Path) -> list[str]:
    """The old start and the new one publish at random times: never the old one after the new."""
    run = folder / "run"
    run.mkdir(exist_ok=True)
    (run / "run.json").write_text("{}", "utf-8")
    published: list[str] = []

    def publish(name: str, ticket: RunTicket) -> None:
        try:
            with ticket.publishing():
                published.append(name)
        except FivefoldError:
            published.append(f"{name} refused")

    with own_run(run, 0.0) as old:
        for _ in range(draw.randrange(3)):
            publish("old", old)
        (run / OWNER).unlink()  # a network file system has given the lock away
        if draw.random() < 0.5:
            publish("old", old)
            (run / OWNER).unlink()
        with own_run(run, 0.0) as new:
            for _ in range(draw.randrange(1, 5)):
                publish(*draw.choice((("old", old), ("new", new))))
            publish("old", old)
    taken = published[-1] == "old refused" and "new refused" not in published
    return [] if taken else [f"owners published {published}"]


def main() -> int:
    """Play scripts, and print how many were safe and named the right rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripts", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    began, wrong, unsafe = time.process_time(), list[Finding](), list[Finding]()
    kinds: Counter[str] = Counter()
    gc.disable()  # a script makes a million values and keeps them: a quarter of its time
    gc.freeze()  # nor is what was imported looked at after each script
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as made:
        for seed in range(asked.seed, asked.seed + asked.scripts):
            found = judged(Script.of(seed), Path(made))
            gc.collect()
            kinds[found.script.kind] += 1
            wrong += [] if found.right else [found]
            unsafe += [found] if found.unsafe else []
            if found.unsafe or not found.right:
                ranks = sorted(found.script.ranks)[:4]
                print(seed, found.script, ranks, found.named, found.unsafe, flush=True)
            if (done := kinds.total()) % _SAID == 0:
                print(f"{done}: {len(unsafe)} unsafe, {len(wrong)} wrong", flush=True)
    right = asked.scripts - len(wrong)
    print(dict(kinds), f"{time.process_time() - began:.0f} CPU-seconds")
    safe = asked.scripts - len(unsafe)
    print(f"{asked.scripts} scripts: {safe} safe, {right} passed (the right rank, or rightly none)")
    return int(bool(unsafe) or right < 0.995 * asked.scripts)


if __name__ == "__main__":
    sys.exit(main())
