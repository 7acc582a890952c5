"""What a resume says or refuses before any process starts."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.commands.train import train
from fivefold.core.errors import FivefoldError, RankLost
from fivefold.core.layout.weight_table import buffers, weights
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.generate.text_model import find_model
from fivefold.launch import processes
from fivefold.train.checkpoint.checkpoints import Reader, write_checkpoint
from fivefold.train.checkpoint.folders import Facts
from fivefold.train.checkpoint.of_run import open_run
from fivefold.train.options import RunOptions
from fivefold.train.recovery.resuming import check_resume, nothing_left
from fivefold.train.state import TrainSettings

STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum",)}
GIVEN: dict[str, Any] = {"model": "tiny", "layout": "dp=1", "seq": 16, "batch": 2}


def options_of(train: Recipe | None = None, **changes: Any) -> PlanOptions:
    recipe = train or Recipe(data="synthetic")
    return PlanOptions(**GIVEN | changes, train=recipe)


def trained(folder: Path, step: int = 4, **facts: Any) -> Path:
    """A run as a training would leave it, without one; returns its newest checkpoint."""
    plan = resolve(options_of())
    folder.mkdir(exist_ok=True)
    (folder / "plan.toml").write_text(plan.to_toml(folder, full=True))
    names = [f"model/{one.name}" for one in (*weights(plan.shape), *buffers(plan.shape))]
    shapes = {
        f"model/{one.name}": one.shape for one in (*weights(plan.shape), *buffers(plan.shape))
    }
    for state in STATES["adamw"]:
        names += [f"optim/{state}/{one.name}" for one in weights(plan.shape)]
        shapes |= {f"optim/{state}/{one.name}": one.shape for one in weights(plan.shape)}
    tensors = [
        (name, shapes[name], torch.float32, lambda name=name: torch.zeros(shapes[name]))
        for name in names
    ]
    known = {"samples": 8, "updates": 4} | facts
    return write_checkpoint(folder / "checkpoints", tensors, Facts(step, **known))


def said_of(folder: Path, options: PlanOptions) -> list[str]:
    settings = TrainSettings(options.train, folder=folder, options=RunOptions(resume=True))
    return check_resume(resolve(options), settings)


def test_other_rows_and_other_data_are_said(tmp_path: Path) -> None:
    trained(tmp_path)
    assert said_of(tmp_path, options_of()) == []
    (longer,) = said_of(tmp_path, options_of(seq=32))
    assert "had rows of 16 tokens, and goes on with rows of 32, at row 8" in longer
    assert "--seq 16 goes on as before" in longer
    (other,) = said_of(tmp_path, options_of(Recipe(data="stdlib")))
    assert "has read data = synthetic until now, and goes on with stdlib, at row 8" in other
    assert len(said_of(tmp_path, options_of(Recipe(data="stdlib"), seq=32))) == 2
    shutil.rmtree(tmp_path / "checkpoints")
    trained(tmp_path, step=0, samples=0)  # an import has read nothing
    assert said_of(tmp_path, options_of(Recipe(data="stdlib"), seq=32)) == []


def test_a_resume_keeps_the_rows_unless_others_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path)
    seen: list[Any] = []

    def lost(tasks: list[Any], **_: object) -> None:
        seen.append(tasks[0][1][0])
        raise RankLost(0, "build", "was asked to")

    ranks = SimpleNamespace(stopping=False, run_each=lost)
    pool = nullcontext(ranks)
    monkeypatch.setattr(processes, "Pool", lambda *_, **__: pool)
    told: list[Any] = []
    for more in ({}, {"seq": 32}):
        with pytest.raises(RankLost):
            train(
                "tiny", out=tmp_path, resume=True, data="synthetic", on_progress=told.append, **more
            )
    assert [(plan.batch.seq, plan.batch.sequences) for plan in seen] == [(16, 2), (32, 2)]
    (words,) = [each for each in told if isinstance(each, str)]
    assert "goes on with rows of 32" in words


def test_a_folder_that_holds_another_step_is_damaged(tmp_path: Path) -> None:
    """It would take the run back, and each save would leave it the newest."""
    good = trained(tmp_path, step=6)
    shutil.copytree(good, wrong := good.with_name("step-00000009"))
    with pytest.raises(FivefoldError, match=r"is of step 6, which the name of its folder"):
        Reader(wrong)
    assert Reader(good).facts.step == 6


@pytest.mark.parametrize(
    ("changes", "recipe", "words"),
    [
        ({"set": {"layers": "3"}}, {}, "another model or optimizer"),
        ({"set": {"ffn": "80"}}, {}, r"which is .* there"),
        ({}, {"optimizer": "sgd"}, r"it has no optim/momentum/"),
        ({}, {"optimizer": "muon"}, r"it has no optim/momentum/"),
        ({}, {"seed": 3}, "the run has seed 0, not 3"),
    ],
    ids=lambda value: str(value),
)
def test_what_ranks_would_refuse_is_refused_before_they_start(
    tmp_path: Path, changes: dict[str, Any], recipe: dict[str, Any], words: str
) -> None:
    trained(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    options = options_of(Recipe(data="synthetic", **recipe), **changes)
    with pytest.raises(FivefoldError, match=words):
        said_of(tmp_path / "run", options)
    given = {**GIVEN, "data": "synthetic", "out": tmp_path / "run", "resume": True}
    keys = {**given, **recipe, **changes.get("set", {})}
    with pytest.raises(FivefoldError, match=words):  # no pool, no process, and nothing written
        train(keys.pop("model"), **keys)
    after = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert after == before


def test_weights_alone_and_frozen_weights_go_on(tmp_path: Path) -> None:
    trained(tmp_path)
    assert said_of(tmp_path, options_of(Recipe(data="synthetic", lora=4))) == []
    assert said_of(tmp_path, options_of(Recipe(data="synthetic", train_only="head"))) == []
    shutil.rmtree(tmp_path / "checkpoints")
    plan = resolve(options_of())
    alone = [
        (f"model/{one.name}", one.shape, torch.float32, lambda one=one: torch.zeros(one.shape))
        for one in (*weights(plan.shape), *buffers(plan.shape))
    ]
    write_checkpoint(tmp_path / "checkpoints", alone, Facts(0, has_states=False))
    assert said_of(tmp_path, options_of(Recipe(data="synthetic", optimizer="sgd", seed=7))) == []


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_resume_with_nothing_left_changes_nothing(tmp_path: Path) -> None:
    trained(run := tmp_path / "run")
    before = files_of(run)
    given = {**GIVEN, "data": "synthetic", "out": run, "resume": True, "lora": 8}
    model = given.pop("model")
    for more, words in (({"steps": 4}, "--steps N"), ({"steps": 9, "until": 3}, "--until N")):
        with pytest.raises(FivefoldError, match=rf"is at step 4, .*{words}, and N above 4"):
            train(model, **given, **more)
    assert files_of(run) == before
    settings = TrainSettings(
        Recipe(data="synthetic", steps=4), folder=run, options=RunOptions(resume=True)
    )
    (file,) = run.glob("checkpoints/*/__0_0.distcp")
    file.write_bytes(file.read_bytes()[:-1])  # the ranks say so, and go on from an earlier one
    assert nothing_left(settings) is None


def test_a_start_that_saves_nothing_leaves_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does before the first checkpoint, twice: its exit is no error of a rank."""
    trained(tmp_path)
    plan = (tmp_path / "plan.toml").read_text()

    def interrupted(*_: object, **__: object) -> None:
        assert "lora = 4" in (tmp_path / "plan.toml").read_text()
        raise SystemExit(130)

    ranks = SimpleNamespace(stopping=True, run_each=interrupted)
    pool = nullcontext(ranks)
    monkeypatch.setattr(processes, "Pool", lambda *_, **__: pool)
    with pytest.raises(SystemExit):
        train("tiny", out=tmp_path, resume=True, data="synthetic", lora=4)
    assert (tmp_path / "plan.toml").read_text() == plan


def test_a_checkpoint_is_read_by_the_plan_that_made_it(tmp_path: Path) -> None:
    """The plan of the folder may be of a start that was killed before it saved."""
    plan = resolve(options_of(set={"layers": "1"}))
    adapted = resolve(
        options_of(
            Recipe(lora=4, keep_best="text", eval_every=2, save_every=2), set={"layers": "3"}
        )
    )
    for step, each, loss in ((2, plan, 1.0), (4, adapted, 2.0)):
        text = each.to_toml(tmp_path, full=True)
        trained(tmp_path, step, plan=text, plan_in_run=True, evals={"text": loss})
    checkpoints = tmp_path / "checkpoints"
    assert find_model(tmp_path).shape == adapted.shape
    assert find_model(tmp_path, 2).shape == find_model(tmp_path, "best").shape == plan.shape
    (checkpoints / "step-00000004" / "suspect.txt").write_text("flipped bits")
    assert find_model(tmp_path).shape == plan.shape
    (checkpoints / "step-00000002" / "manifest.json").write_text('{"facts": []}')
    assert find_model(tmp_path).shape == resolve(options_of()).shape  # of the folder
    trained(tmp_path, 6, plan=plan.to_toml())  # of an older version: its paths begin elsewhere
    assert find_model(tmp_path).shape == resolve(options_of()).shape


def test_an_old_checkpoint_of_another_model_is_refused_in_few_lines(tmp_path: Path) -> None:
    trained(tmp_path)
    other = resolve(options_of(Recipe(lora=4))).shape
    with pytest.raises(FivefoldError, match=r"and \d+ more") as refused:
        open_run(tmp_path, other, None, lambda _: None)
    assert len(str(refused.value).splitlines()) < 9 and "plan.toml" in str(refused.value)
