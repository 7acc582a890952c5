"""`train sample_every=N`: samples during a run, the same in every layout, and no number changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained import train

from fivefold.core.errors import FivefoldError
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.processes import Pool
from fivefold.records import run_reader
from fivefold.records.run_writer import RunFolder
from fivefold.train.callbacks.samples import SampleText, generating
from fivefold.train.state import TrainSettings

LAYOUTS = ("dp=2", "tp=2", "pp=2", "cp=2", "dp=2 ep=2")


def trained(
    pool: Pool, layout: str, every: int, folder: Path | None = None
) -> tuple[list[SampleText], list[float]]:
    recipe = Recipe(steps=3, sample_every=every, compile=False)
    changes = {"layers": "2"}
    plan = resolve(
        PlanOptions("tiny-moe", layout=layout, seq=24, batch=4, set=changes, train=recipe)
    )
    if folder is not None:
        RunFolder.create(folder, plan.to_toml(folder, full=True), {"layout": layout}, resume=False)
    settings = TrainSettings(
        recipe=recipe, dtype="float64", device="cpu", backend="gloo", folder=folder
    )
    reports: list[object] = []
    ranks, _ = train(pool, plan, settings, reports.append)
    return [each for each in reports if isinstance(each, SampleText)], ranks[0].losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_the_same_in_every_layout(pool: Pool, layout: str) -> None:
    samples, losses = trained(pool, layout, 2)
    alone, _ = trained(pool, "dp=1", 2)
    assert [each.step for each in samples] == [2, 3], "every second step, and the last"
    assert samples == alone
    assert samples[0].prompt == samples[1].prompt and samples[0].text != samples[1].text
    assert str(samples[0]).startswith("sample after step 2 | ")
    none, without = trained(pool, layout, 0)
    assert not none and without == losses, "a sample changes no step"


def test_samples_are_written_to_the_run_folder(pool: Pool, tmp_path: Path) -> None:
    said, _ = trained(pool, "dp=2", 2, tmp_path / "run")
    read = run_reader.read(tmp_path / "run").samples
    assert [(one.step, one.prompt, one.text) for one in read] == [
        (one.step, one.prompt, one.text) for one in said
    ]
    assert [one.restart for one in read] == [0, 0]


def test_context_ranks_become_replicas() -> None:
    options = PlanOptions("tiny-moe", layout="dp=2 cp=2 tp=2 pp=2 ep=4", seq=32)
    layout = generating(resolve(options)).layout
    assert (layout.dp, layout.cp, layout.tp, layout.pp, layout.ep) == (4, 1, 2, 2, 4)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(FivefoldError, match="sample_every = -1: at least 0"):
        Recipe(sample_every=-1)
