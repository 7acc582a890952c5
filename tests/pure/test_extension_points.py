"""The table of `docs/architecture.md`: a dummy of each change, made in the files of its row, works.

What needs torch to run is checked in `tests/model/test_extension_runs.py`.
"""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from fivefold import cli
from fivefold.core.errors import UnknownName
from fivefold.core.layout.layout import Layout
from fivefold.core.layout.splits import context_split
from fivefold.core.model import presets as models
from fivefold.core.model.hf_config import shape_from_config
from fivefold.core.plan import great_runs as settings
from fivefold.core.plan.plan import Plan, PlanOptions, read, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.core.schedule.catalog import names
from fivefold.cost.grid import schedule_index
from fivefold.cost.traffic.collectives import predict_traffic
from fivefold.huggingface.config_export import as_hf
from fivefold_page import document
from fivefold_page.explore import explore
from fivefold_score.spelling import spellings
from tests import dummies

MOST_FILES = 4


@pytest.mark.parametrize("change", dummies.DUMMIES)
def test_a_change_touches_few_files_that_exist(change: str) -> None:
    files = dummies.rows()[change]
    assert 1 <= len(files) <= MOST_FILES
    assert all((dummies.ROOT / each).is_file() or dummies.NEW in each for each in files)
    assert all(each.startswith(("fivefold", "tests/", "docs/", "README")) for each in files)


def test_every_row_has_a_dummy() -> None:
    assert dummies.rows().keys() == dummies.DUMMIES.keys()


@pytest.mark.parametrize("change", dummies.DUMMIES)
def test_a_dummy_touches_only_the_files_of_its_row(change: str) -> None:
    named = {each.replace(dummies.NEW, "dummy") for each in dummies.rows()[change]}
    assert dummies.files_of(change) <= named


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return dummies.run_checks("tests.pure.test_extension_points", tmp_path_factory.mktemp("copy"))


# Everything below runs in a process that imports the package with all dummies.


def printed(*words: str) -> str:
    """What a command prints."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.run(cli.gather_pairs(list(words)))
    assert not code, err.getvalue()
    return out.getvalue()


def planned(*words: str) -> dict[str, Any]:
    """The first layout that `plan` estimates."""
    return json.loads(printed("plan", *words, "--json"))["layouts"][0]


def traffic(plan: Plan) -> set[tuple[str, str]]:
    found = predict_traffic(plan, 0, itemsize=2)
    return {(entry.axis, entry.kind) for entry in found}


def check_optimizer() -> None:
    assert Recipe(optimizer="dummy").optimizer_kind.states == {"sum": "sum"}
    assert "dummy" in printed("verify", "--help")


def check_schedule() -> None:
    assert "dummy" in names() and "dummy" in explore.SCHEDULES
    size = ("--stages", "4", "--microbatches", "8", "--json")
    drawn = [json.loads(printed("schedule", name, *size)) for name in ("dummy", "gpipe")]
    assert [each["name"] for each in drawn] == ["dummy", "gpipe"]
    assert drawn[0]["makespan"] == drawn[1]["makespan"] and drawn[0]["order"] == drawn[1]["order"]
    job = ("llama-3.1-8b", "--layout", "pp=4 dp=2", "--machine", "h100", "--microbatches", "16")
    mine, same, usual = (planned(*job, "--schedule", name) for name in ("dummy", "gpipe", "1f1b"))
    assert mine["bubble"] == same["bubble"] > 0
    assert mine["memory_gib"] == same["memory_gib"] != usual["memory_gib"]
    search = ("--gpus", "8", "--batch", "8", "--set", "fix=pp=4 schedule=dummy", "--set", "top=1")
    assert planned(*job[:1], "--machine", "h100", *search)["schedule"] == "dummy"
    with pytest.raises(UnknownName, match="unknown schedule"):
        schedule_index("nothing")


def check_model_family() -> None:
    config = as_hf(models.load("tiny"), "float32").config
    shape = shape_from_config({**config, "model_type": "dummy"}, "here")
    assert shape.qk_norm == "head"
    model = as_hf(shape, "float32")
    assert (model.config["model_type"], model.config["architectures"]) == ("dummy", ["DummyModel"])
    assert shape_from_config(model.config, "here") == shape


def check_machine() -> None:
    job = ("llama-3.1-8b", "--layout", "dp=8", "--zero", "0", "--seq", "4096", "--machine")
    found = [planned(*job, name)["fits"] for name in ("dummy", "h100")]
    assert found == ["fits", "does not fit"]
    assert "dummy" in [one["value"] for one in explore.view({})["choices"]["machine"]]


def check_stack() -> None:
    job = ("llama-3.1-8b", "--layout", "dp=8", "--seq", "4096", "--machine", "h100", "--set")
    slow, usual = (
        planned(*job, f"stack={name}")["time_s"]["products"] for name in ("dummy", "eager")
    )
    assert slow == 2 * usual
    assert spellings().families["dummy"].stack == "dummy"


def check_context_kind() -> None:
    layout = Layout.parse("cp=4", context="dummy")
    split = context_split(layout, models.load("tiny"))
    assert (split.inner, split.outer, split.gathers) == (2, 2, True)
    tokens = [token for rank in range(4) for run in split.rank_tokens(32, rank) for token in run]
    assert sorted(tokens) == list(range(32))
    found = traffic(resolve(PlanOptions("tiny", "cp=4", context="dummy")))
    assert {("ulysses", "all_to_all"), ("ring", "all_gather"), ("ring", "reduce_scatter")} <= found
    job = ("llama-3.1-8b", "--layout", "cp=4", "--machine", "h100", "--seq", "32768")
    assert planned(*job, "--context", "dummy")["time_s"]["cp"] > 0
    assert "dummy" in [one["value"] for one in explore.view({})["choices"]["context"]]
    stations = document.answer("learn/layer", {"context": "dummy", "cp": "4"})["stations"]
    assert {"tokens to heads", "attention"} <= {each["name"] for each in stations}


def check_training_key() -> None:
    file = Path("key.toml")
    file.write_text('model = "tiny"\n[train]\ndummy = 0.5\n')
    assert read(file).train.dummy == 0.5
    assert "dummy = 0.5" in resolve(read(file)).to_toml()
    assert settings.parse_settings({"dummy": "0.25"}).train == {"dummy": 0.25}
    printed("plan", "tiny", "--set", "dummy=2", "-o", "out.toml")
    assert "dummy = 2.0" in Path("out.toml").read_text()


def check_learn_panel() -> None:
    where = ("observe", "--set", "at=learn?panel=dummy&size=large")
    assert "The dummy is large." in printed(*where, "--text")
    assert json.loads(printed(*where, "--json"))["learn/dummy"]["choices"] == {"size": "large"}
    page, _ = document.live_page(document.PageStart("learn", {}, ""))
    assert '"fivefold/learn_dummy.js"' in page and '"title": "A dummy"' in page


def check_explore_panel() -> None:
    job = ("observe", "tiny", "--layout", "dp=8", "--machine", "h100", "--panel", "dummy")
    assert "a dummy of 8 GPUs" in printed(*job, "--text")
    assert json.loads(printed(*job, "--json"))["explore"]["dummy"] == {"gpus": 8}
    page, _ = document.live_page(document.PageStart("explore", {}, ""))
    assert '"fivefold/dummy.js"' in page and '"title": "Dummy"' in page


def check_collective() -> None:
    assert ("tp", "broadcast") in traffic(resolve(PlanOptions("tiny", "tp=2")))
    plan = json.loads(printed("plan", "tiny", "--layout", "tp=2", "--json"))
    (mine,) = [each for each in plan["traffic"] if each["kind"] == "broadcast"]
    assert mine["count"] == 2  # once a microbatch, before the head
    uses = document.answer("learn/collectives", {"collective": "broadcast"})["uses"]
    assert [(each["axis"], each["what"]) for each in uses] == [("tp", "a dummy")]


def check_precision() -> None:
    file = Path("fp4.toml")
    file.write_text('base = "h100"\n[peaks]\nfp4 = 4000e12\n')
    job = ("llama-3.1-8b", "--layout", "dp=8", "--machine", str(file), "--precision")
    times = {name: planned(*job, name)["time_s"]["products"] for name in ("fp4", "fp8", "bf16")}
    assert times["fp4"] < times["fp8"] < times["bf16"]
    wide = ("--layout", "dp=2", "--machine", "h100", "--set", "precision=fp64")
    memory = planned("tiny", *wide)["memory_gib"]["weights"]
    assert memory == 2 * planned("tiny", *wide[:-1], "precision=fp32")["memory_gib"]["weights"]


def check_command() -> None:
    assert "Do nothing." in printed("--help")
    assert printed("dummy", "--times", "2").split() == ["nothing", "nothing"]


CHECKS = {
    "an optimizer": check_optimizer,
    "a schedule": check_schedule,
    "a model family": check_model_family,
    "a machine": check_machine,
    "a stack of other people": check_stack,
    "a context kind": check_context_kind,
    "a training key": check_training_key,
    "a page panel of Learn": check_learn_panel,
    "a page panel of Explore": check_explore_panel,
    "a collective": check_collective,
    "a precision": check_precision,
    "a command": check_command,
}


@pytest.mark.parametrize("change", dummies.DUMMIES)
def test_a_dummy_works(change: str, errors: dict[str, str]) -> None:
    assert not errors[change], errors[change]
