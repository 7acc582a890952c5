"""Mixers of a user on ranks: every dimension that a table allows, faults, runs, and the example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from planted import GRADIENTS, Fault, Patch, check_seen
from torch import Tensor, nn

import fivefold as ff
from fivefold import step as step_module
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.processes import Pool
from fivefold.model.linear_math import GradientSink
from fivefold.parallel import deferred
from fivefold.verify.runs import VerifySettings
from fivefold.verify.trial import run_trial
from tests.own_mixers import PATH, SHAPE, with_mixer

ULYSSES = {"context": "ulysses"}
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("gated-scan", "dp=2 tp=2", {"zero": 3, "recompute": "full", "tp_overlap": 2}),
    ("gated-scan", "tp=4", {"sp": False}),
    ("gated-scan", "tp=2", {"recompute": "selective", "microbatch_size": 2}),
    ("gated-scan", "pp=2 tp=2", {"schedule": "zb-h1", "recompute": "attention"}),
    ("gated-scan", "pp=2 dp=2", {"schedule": "dualpipe", "zero": 1}),
    ("gated-scan", "cp=2 tp=2 dp=2", {**ULYSSES, "recompute": "attention"}),
    ("gated-scan", "cp=4", {**ULYSSES, "seq": 38}),
    ("gated-scan", "dp=2 tp=2", {"train": Recipe(lora=2)}),
    ("test-groups", "dp=2 tp=4", {"zero": 3, "packed": True, "microbatch_size": 2}),
    ("test-groups", "tp=2 cp=2", {**ULYSSES, "packed": True, "seq": 38}),
    ("test-shared", "tp=2", {"sp": False}),
    ("test-shared", "tp=2 pp=2", {"schedule": "zb-h1"}),
    ("test-shared", "dp=2 tp=2", {"train": Recipe(train_only="attention.write+skip")}),
]


def model_of(mixer: str, layout: str) -> str:
    changes = {"positions": "rotary", "kv_heads": 4} if mixer == "test-groups" else {}
    return with_mixer(mixer, **changes, layers=4 if "pp" in layout else 2)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("mixer", "layout", "options"), LAYOUTS)
def test_a_mixer_gains_what_its_table_allows(
    pool: Pool, mixer: str, layout: str, options: dict[str, Any]
) -> None:
    options = PlanOptions(model_of(mixer, layout), layout=layout, **options)
    plan = resolve(options, small=True)
    verdict = run_trial(pool, plan, VerifySettings(steps=1))
    assert verdict.passed, (verdict.errors, verdict.traffic_match, verdict.diverges_at)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("mixer", "layout", "options"),
    [
        ("test-wrong-split", "tp=2", {}),
        ("test-across", "tp=2", {}),
        ("test-ahead", "cp=4", {**ULYSSES, "seq": 38}),
    ],
)
def test_a_fault_of_the_class_is_seen(
    pool: Pool, mixer: str, layout: str, options: dict[str, Any]
) -> None:
    alone = resolve(PlanOptions(with_mixer(mixer)), small=True)
    assert run_trial(pool, alone, VerifySettings(steps=1)).passed
    plan = resolve(PlanOptions(with_mixer(mixer), layout=layout, **options), small=True)
    verdict = run_trial(pool, plan, VerifySettings(steps=1))
    assert not verdict.passed and verdict.errors["loss_err"] > 1e-6
    assert verdict.traffic_match  # only numbers can tell


def whole_weights_not_summed() -> Patch:
    """What all heads share keeps the gradient of a rank's own heads."""
    return patch.object(step_module, "sum_partial", lambda *_: None)


def held_weights_halved() -> Patch:
    """A split backward delivers half the gradient of what the function holds."""

    def half(weight: nn.Parameter, grad: Tensor, sink: GradientSink) -> None:
        sink.add_gradient(weight, grad / 2)

    return patch.object(deferred, "_hold_work", half)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "fault",
    [
        Fault(
            whole_weights_not_summed,
            "tp=2",
            GRADIENTS,
            {"sp": False},
            model=with_mixer("test-shared"),
        ),
        Fault(
            held_weights_halved,
            "pp=2",
            GRADIENTS,
            {"schedule": "zb-h1"},
            model=with_mixer("gated-scan"),
        ),
    ],
    ids=str,
)
def test_a_missing_sum_of_a_mixer_is_seen(pool: Pool, fault: Fault) -> None:
    check_seen(pool, fault)


@pytest.mark.sample(0.4)
def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    """Checkpoints have the weights of the table by name, and any layout reads its shards."""
    keys = {"steps": 6, "seq": 32, "batch": 4, "lr": 1e-2, "save_every": 3, "dtype": "float64"}
    whole = ff.train(SHAPE, out=tmp_path / "whole", layout="dp=1", **keys)
    ff.train(SHAPE, out=tmp_path / "cut", layout="tp=2", until=3, **keys)
    rest = ff.train(SHAPE, out=tmp_path / "cut", layout="dp=2", zero=3, resume=True, **keys)
    assert len(rest.records) == 3 and whole.losses[-1] < whole.losses[0]
    assert rest.losses == pytest.approx(whole.losses[3:], abs=1e-9)


@pytest.mark.sample(0.2)
def test_the_example_of_an_own_model_runs() -> None:
    """46 processes that verify, and four that train: a minute and more on busy cores."""
    done = subprocess.run([sys.executable, PATH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.endswith("as predicted")]
    assert len(table) == 9 and done.stdout.count("refused:") == 3
    losses = re.search(r"loss ([0-9.]+) at the first step, ([0-9.]+) at the last", done.stdout)
    assert losses is not None and float(losses[2]) < float(losses[1]) - 0.5


@pytest.mark.sample(0.4)
def test_commands_know_the_mixer_of_the_file_that_calls_them(tmp_path: Path) -> None:
    plan = resolve(PlanOptions(with_mixer("gated-scan"), layout="tp=2"))
    (tmp_path / "plan.toml").write_text(plan.to_toml(tmp_path), encoding="utf-8")
    words = ["plan", str(tmp_path / "plan.toml"), "--json"]
    known = subprocess.run([sys.executable, PATH, *words], capture_output=True, text=True)
    assert known.returncode == 0 and '"model": "own"' in known.stdout, known.stderr
