"""The recipe of a training: its keys, its learning rates, and who is told a `key=value`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.core.errors import BadFile, FivefoldError, UnknownName
from fivefold.core.model import presets as models
from fivefold.core.plan import settings
from fivefold.core.plan.plan import Plan, PlanOptions, options_from, read, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.launcher import refit, without_replica


def test_there_are_at_most_67_keys_and_none_has_two_meanings() -> None:
    plan, train, model = settings.plan_keys(), settings.train_keys(), list(models.keys())
    assert len(plan) + len(train) + 2 <= 67  # and `model` and `set`
    assert len({*plan, *train, *model}) == len([*plan, *train, *model])


def test_every_key_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text("utf-8")
    missing = [
        key for key in (*settings.plan_keys(), *settings.train_keys()) if f"`{key}`" not in page
    ]
    assert not missing


def test_a_setting_goes_to_who_knows_it() -> None:
    said = settings.parse_settings(
        {"lr": "3e-4", "zero": "FULL_SHARD", "layers": "4", "moe.experts": "8"}
    )
    assert said == ({"zero": 3}, {"lr": 3e-4}, {"layers": "4", "moe.experts": "8"})


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ({"stpes": "3"}, "did you mean steps"),
        ({"zer": "3"}, "did you mean zero"),
        ({"layer": "3"}, "did you mean layers"),
        ({"steps": "x", "lr": "y"}, "steps = 'x'"),
    ],
)
def test_a_mistake_is_named_with_the_nearest(pairs: dict[str, str], words: str) -> None:
    with pytest.raises((BadFile, UnknownName), match=words):
        settings.parse_settings(pairs)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"steps": 0}, {"lr": 0.0}, {"clip": float("inf")}, {"offload": "nvme"}, {"keep": 0}),
        *({"spike_bound": 0.5}, {"spike_bound": float("nan")}, {"hang_after": -1.0}),
        *({"optimizer": "adam"}, {"callbacks": "own.py"}),
    ],
)
def test_values_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(FivefoldError, match=next(iter(wrong))):
        Recipe(**wrong)  # type: ignore[arg-type]


def test_learning_rates() -> None:
    usual = Recipe(steps=100, lr=1.0)
    assert [usual.lr_at(n) for n in (1, 5, 10, 11)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert usual.lr_at(56) == pytest.approx(0.55)  # half of the wave
    assert 0.1 < usual.lr_at(100) < 0.102
    linear = Recipe(steps=10, lr=1.0, lr_curve="linear", warmup=0)
    assert [linear.lr_at(n) for n in (1, 6, 10)] == pytest.approx([1.0, 0.5, 0.1])
    wsd = Recipe(steps=100, lr=1.0, lr_curve="wsd")
    assert [wsd.lr_at(n) for n in (10, 80, 91, 100)] == pytest.approx([1.0, 1.0, 0.5, 0.05])
    assert Recipe(steps=100, lr=1.0, lr_curve="constant").lr_at(100) == 1.0


def test_a_plan_file_carries_it(tmp_path: Path) -> None:
    options = options_from("tiny", {"train": {"steps": 7, "lr": 2e-4}})
    plan, path = resolve(options), tmp_path / "plan.toml"
    path.write_text(plan.to_toml(tmp_path), "utf-8")
    assert "[train]" in path.read_text("utf-8") and "weight_decay" not in path.read_text("utf-8")
    assert read(path).train == Recipe(steps=7, lr=2e-4)
    assert options_from(str(path), {"train": {"lr": 1e-2}}).train == Recipe(steps=7, lr=1e-2)
    path.write_text(plan.to_toml(tmp_path, full=True), "utf-8")
    assert read(path).train == Recipe(steps=7, lr=2e-4)
    path.write_text('model = "tiny"\n[train]\nstep = 3\n', "utf-8")
    with pytest.raises(BadFile, match="did you mean steps"):
        read(path)


def small(layout: str, **options: object) -> Plan:
    return resolve(PlanOptions("tiny", layout=layout, seq=32, batch=8, **options))  # type: ignore[arg-type]


def test_fewer_ranks_keep_the_batch() -> None:
    plan = refit(small("dp=4 tp=2"), 4)
    assert (plan.layout.dp, plan.layout.tp, plan.batch.sequences) == (2, 2, 8)
    assert "dp=2 instead of 4" in plan.notes[-1]
    assert refit(small("dp=4 tp=2"), 8).notes == ()


def test_the_first_data_ranks_take_the_odd_microbatches() -> None:
    plan = small("dp=4")
    found = refit(plan, 3)
    assert (found.layout.dp, found.batch.sequences, found.batch.microbatches) == (3, 8, 3)
    assert "the first 2 data ranks take the odd microbatches, one each" in found.notes[-1]
    rows = [found.batch.rows_of(coord) for coord in range(3)]
    assert rows == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert found.options == plan.options, "its file is that of the run whose ranks are all there"
    assert without_replica(plan).layout.dp == 3 and without_replica(plan, 2).layout.dp == 2


def test_experts_allow_no_odd_microbatches() -> None:
    plan = resolve(PlanOptions("tiny-moe", layout="dp=4", seq=32, batch=8))
    with pytest.raises(FivefoldError, match="experts or pairs do not allow a remainder"):
        refit(plan, 3)
    assert without_replica(plan).layout.dp == 2, "the next that divides"


@pytest.mark.parametrize(("layout", "world"), [("dp=4 tp=2", 3), ("dp=8", 9), ("tp=4", 2)])
def test_ranks_that_cannot_be_filled_are_refused(layout: str, world: int) -> None:
    with pytest.raises(FivefoldError, match="start"):
        refit(small(layout), world)
