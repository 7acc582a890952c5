"""The example of reinforcement learning: its reward rises, and generator and trainer agree."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from fivefold.generate.layout import LayoutEngine
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel.composition import Job

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_loop.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


LOOP = example()  # ranks report values of its classes


def learn(worker: Worker, *words: Any) -> list[tuple[float, float]]:
    return [(each.reward, each.difference) for each in example().train(worker, *words)]


def learn_from_old_weights(worker: Worker, *words: Any) -> list[tuple[float, float]]:
    """The generator takes the weights once, and never again."""
    plain, loaded = LayoutEngine.load, list[Job]()

    def load(self: LayoutEngine, job: Job) -> None:
        if not loaded:
            plain(self, job)
        loaded.append(job)

    with patch.object(LayoutEngine, "load", load):
        return learn(worker, *words)


@pytest.mark.sample(0.25)
@pytest.mark.parametrize(
    ("trains", "generates", "dtype"),
    [("dp=2", "tp=2", "float64"), ("tp=2", "pp=2", "float32")],
)
def test_the_reward_rises_and_both_sides_agree(
    pool: Pool, trains: str, generates: str, dtype: str
) -> None:
    task = (learn, (trains, generates, 8, dtype))
    results, again = pool.run_each([task] * 2)
    assert results == again, "all ranks see the same"
    assert results[-1][0] > results[0][0] + 0.15
    assert max(difference for _, difference in results) <= LOOP.DTYPES[dtype]


@pytest.mark.sample(1)
def test_old_weights_are_seen(pool: Pool) -> None:
    task = (learn_from_old_weights, ("dp=2", "tp=2", 3, "float64"))
    (_, first), *rest = pool.run_each([task] * 2)[0]
    assert first <= 1e-9
    assert min(difference for _, difference in rest) > 1e-3
