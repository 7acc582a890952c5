"""The ranks of a test worker: one pool, forked at first use and kept over all its tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kept_pool import KeptPool

from fivefold.launch.processes import Pool

torch.set_num_threads(1)  # a fork after parallel work in the parent would hang its ranks


@pytest.fixture(scope="session")
def kept_pool() -> Iterator[KeptPool]:
    kept = KeptPool()
    yield kept
    kept.close()


@pytest.fixture
def pool(kept_pool: KeptPool) -> Pool:
    """The ranks of this test worker; what a test patches in them, its task patches and restores."""
    return kept_pool.whole()
