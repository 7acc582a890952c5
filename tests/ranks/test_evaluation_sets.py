"""Evaluation on sets of one's own: the same loss in every layout, and the best checkpoint stays."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.cli import main
from fivefold.core.layout.boxes import whole_box
from fivefold.core.model import presets as models
from fivefold.core.model.shape import Shape
from fivefold.core.plan import plan
from fivefold.core.plan.plan import parse_sets
from fivefold.core.plan.recipe import Recipe
from fivefold.data.evaluation import HELD_OUT, evaluation_sets
from fivefold.data.mixture import Source, open_source
from fivefold.data.rows import Synthetic, read_rows
from fivefold.model.batch import TokenBatch
from fivefold.model.decoder import from_config
from fivefold.optim.optimizer import StateInMemory
from fivefold.records.run_writer import read_records
from fivefold.train.checkpoint.checkpoints import Checkpoints
from fivefold.train.checkpoint.folders import Facts, published
from fivefold.train.checkpoint.of_run import open_run
from fivefold.train.checkpoint.storage import CheckpointTensor

SEQ, VOCAB = 16, 257


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token folders `web` and `code`, of 150 and 90 bytes."""
    place = tmp_path_factory.mktemp("sets")
    for name, text in {"web": "the cat sat. " * 12, "code": "def f(x): return x + 1\n" * 4}.items():
        (place / f"{name}.txt").write_text(text)
        assert run("tokens", f"{place}/{name}.txt", "-o", f"{place}/{name}") == 0
    return place


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*words])
    return int(stop.value.code or 0)


def train(out: Path, layout: str, changes: str, *more: str) -> int:
    sizes = f"--seq {SEQ} --batch 4 --dtype float64 --set lr=1e-2"
    words = ["train", "tiny", "--layout", layout, *sizes.split(), "--set", "layers=2,vocab=257"]
    return run(*words, "--set", changes, "--out", str(out), *more)


def plain_loss(folder: Path, data: Path) -> float:
    """Of the newest checkpoint over all rows, by the model on one device."""
    options = plan.read(folder / "plan.toml")
    shape: Shape = models.with_overrides(models.load(options.model), options.set)
    reader, decoder = open_run(folder, shape, None, print), from_config(shape, dtype=torch.float64)
    for name, weight in decoder.named_parameters():
        weight.data.copy_(reader.read(f"model/{name}"))
    corpus = open_source(str(data), VOCAB, SEQ, 0).parts[0].corpus
    rows = read_rows([(corpus, row) for row in range(corpus.num_rows(SEQ))], SEQ).tokens
    tokens = torch.from_numpy(rows)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    batch = TokenBatch(inputs, labels, torch.arange(SEQ).expand_as(inputs))
    with torch.no_grad():
        return float(decoder.eval()(inputs, batch)) / labels.numel()


def test_losses_of_all_sets_are_those_of_one_device_in_every_layout(
    folders: Path, tmp_path: Path
) -> None:
    found: dict[str, Any] = {}
    for layout in ("dp=1", "dp=2 pp=2"):
        out = tmp_path / layout.replace(" ", "-")
        sets = f"eval_every=2,eval_data='prose={folders}/web {folders}/code'"
        assert train(out, layout, sets, "--steps", "3") == 0
        records = read_records(out / "metrics.jsonl")
        assert [each.step for each in records if each.evals] == [2, 3]
        last = records[-1]
        assert last.evals is not None and [*last.evals] == ["prose", "code"]
        assert last.eval_loss == last.evals["prose"]["loss"]
        for name, data in (("prose", "web"), ("code", "code")):
            loss = last.evals[name]["loss"]
            assert loss is not None
            assert loss == pytest.approx(plain_loss(out, folders / data), rel=1e-12)
            assert last.evals[name]["perplexity"] == pytest.approx(math.exp(loss))
        summary = json.loads((out / "summary.json").read_text())
        assert summary["evals"] == last.evals
        found[layout] = last.evals
    one, other = found.values()
    for name in one:
        assert one[name] == pytest.approx(other[name], rel=1e-10)
    assert one["prose"]["loss"] != pytest.approx(one["code"]["loss"], rel=1e-3)


def test_bits_a_byte_count_the_text_and_not_its_ends(folders: Path) -> None:
    source = Source.of(Synthetic(0, VOCAB), SEQ, 0)
    (found,) = evaluation_sets(str(folders / "web"), source, VOCAB, 8)
    assert found.bytes_per_token == pytest.approx(156 / 157)  # one document, one end


def test_without_sets_rows_are_held_out() -> None:
    source = Source.of(Synthetic(0, VOCAB), SEQ, 0)
    (found,) = evaluation_sets("", source, VOCAB, 8)
    assert found.name == HELD_OUT and len(found.rows) == 8 and found.bytes_per_token is None


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.5, 3: 1.5, 4: math.nan, 5: 2.0, 6: 2.5}
    tensor = torch.zeros(2)
    slot = CheckpointTensor(
        "model/w", (2,), tensor.dtype, (whole_box((2,)),), StateInMemory(tensor)
    )
    checkpoints = Checkpoints(tmp_path, 1, None, judged_by="web")
    for step, loss in losses.items():
        checkpoints.save([slot], Facts(step, evals={"web": loss, "code": -loss}), wait=True)
        assert tmp_path / f"step-{step:08d}" in published(tmp_path)
    assert [int(each.name[5:]) for each in published(tmp_path)] == [2, 6]


def test_a_run_gives_its_best_checkpoint(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, web = tmp_path / "run", folders / "web"
    changes = f"eval_every=1,save_every=1,keep=1,keep_best=web,eval_data={web}"
    assert train(out, "dp=1", changes, "--steps", "3") == 0
    evaluated = {each.step: each.eval_loss for each in read_records(out / "metrics.jsonl")}
    best = min(evaluated, key=lambda step: evaluated[step] or math.inf)
    capsys.readouterr()
    assert run("export", str(out), str(tmp_path / "hf"), "--step", "best", "--json") == 0
    assert json.loads(capsys.readouterr().out)["step"] == best


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ("eval_every=1,eval_data=nowhere", "nowhere is not a folder of tokens"),
        ("eval_data={web}", "nothing is evaluated; give eval_every"),
        ("eval_every=1,eval_data='{web} web={code}'", "are both called web"),
        ("eval_every=1,keep_best=books,eval_data={web}", "choose from web"),
        ("eval_every=2,save_every=3,keep_best=web,eval_data={web}", "multiple of eval_every"),
        ("eval_every=1,eval_data=r=synthetic", "random tokens teach nothing"),
        ("log=wandb", "needs the package wandb, which is not installed"),
    ],
)
def test_bad_sets_are_refused_before_anything_is_written(
    changes: str, says: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = changes.format(web=folders / "web", code=folders / "code")
    assert train(tmp_path / "run", "dp=1", said, "--steps", "1") == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_paths_of_a_plan_start_at_its_folder(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders)
    changes = "data='web:2 code:1',eval_every=1,eval_data=code,log=none"
    assert train(tmp_path / "run", "dp=1", changes, "--steps", "1") == 0
    monkeypatch.chdir(tmp_path)  # from elsewhere it reads the same files
    said = ["train", "run/plan.toml", "--out", "run", "--resume", "--set", "steps=2"]
    assert run(*said) == 0
    recipe = plan.read(Path("run/plan.toml")).train
    found = [Path(one.rpartition(":")[0]).resolve() for one in recipe.data.split()]
    assert found == [folders / "web", folders / "code"]
    assert Path(recipe.eval_data).resolve() == folders / "code"
    assert read_records(tmp_path / "run" / "metrics.jsonl")[-1].step == 2


def test_names() -> None:
    assert parse_sets("a/b c='x y'") == {"b": "a/b", "c": "x y"}
    assert Recipe(eval_every=2, save_every=4, keep_best="web").keep == 2
