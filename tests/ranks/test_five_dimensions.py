"""The example of all five dimensions, and what it promises: one loss, whatever the layout."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from kept_pool import KeptPool

from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker

EXAMPLE = Path(__file__).parents[2] / "examples" / "five_dimensions.py"
MOST_LINES = 20
PUBLISHED = 1e-10


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("five_dimensions", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def losses(worker: Worker, world: int, layout: str) -> list[float]:
    with worker.joined(world):
        return example().train(layout, steps=2)


@pytest.fixture(scope="module")
def alone(kept_pool: KeptPool) -> list[float]:
    (found,) = kept_pool.whole().run_each([(losses, (1, "dp=1"))])
    return found


@pytest.mark.sample(0.5)
@pytest.mark.parametrize(
    ("layout", "world"),
    [("tp=2 pp=2 cp=2 ep=2", 8), ("dp=2 pp=2 cp=2 ep=4", 8), ("dp=2 tp=2 ep=4", 4)],
)
def test_every_layout_gives_the_loss_of_one_process(
    pool: Pool, alone: list[float], layout: str, world: int
) -> None:
    """The layout of the example takes 16 ranks; each of these has four of the five dimensions."""
    for found in pool.run_each([(losses, (world, layout))] * world):
        assert found == pytest.approx(alone, rel=PUBLISHED), layout


def test_the_loop_is_short() -> None:
    tree = ast.parse(EXAMPLE.read_text("utf-8"))
    (loop,) = (each for each in tree.body if isinstance(each, ast.FunctionDef))
    lines = (loop.end_lineno or 0) - loop.lineno + 1
    imports = sum(isinstance(each, ast.Import | ast.ImportFrom) for each in tree.body)
    assert lines <= MOST_LINES and imports <= MOST_LINES
