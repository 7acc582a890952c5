"""One pool of ranks for all tests of a worker: a fork is cheap, a rank's first steps are not."""

from __future__ import annotations

import contextlib
import multiprocessing
from pathlib import Path

from fivefold.launch.processes import Pool

NUM_RANKS = 9  # the largest layout has eight; one more process computes the reference
PATIENCE = 120.0  # seconds without a word: test workers share their cores
ROOT = Path(__file__).parents[2]


class KeptPool:
    """One pool for many tests. One that has lost a rank is replaced before the next test."""

    def __init__(self) -> None:
        self.pool: Pool | None = None

    def whole(self) -> Pool:
        """A pool with all its ranks."""
        if self.pool is None or not self._is_whole(self.pool):
            self.close()
            with contextlib.chdir(ROOT):  # ranks outlive the folders of single tests
                self.pool = Pool(NUM_RANKS, PATIENCE)
        return self.pool

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.pool = None

    def _is_whole(self, pool: Pool) -> bool:
        alive = {process.pid for process in multiprocessing.active_children()}
        return pool.size == NUM_RANKS and alive.issuperset(pool.pids)
