"""Public recipes: the page is what the planner says, and the keys are those of the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fivefold.bridges.bridging import read_foreign
from fivefold.core.errors import FivefoldError
from tests.public_recipes import PAGE, PublicRecipe, planned, recipes, row, sources, stopped

_SOURCES = os.environ.get("FIVEFOLD_SOURCES", "")


@pytest.mark.sample(4)
@pytest.mark.parametrize("recipe", recipes(), ids=lambda one: Path(one.path).name)
def test_the_page_has_what_the_planner_says(recipe: PublicRecipe) -> None:
    assert row(recipe) in PAGE.read_text("utf-8"), "run: python -m tests.public_recipes"


@pytest.mark.nightly
def test_the_page_names_those_that_cannot_run() -> None:
    page = PAGE.read_text("utf-8")
    assert stopped() in page and sources() in page, "run: python -m tests.public_recipes"


def test_recipes_that_cannot_run_say_why() -> None:
    found = {Path(one.path).name: one for one in recipes()}
    assert len(found) >= 20
    gpt3 = planned(found["train_gpt3_175b_distributed.sh"])
    assert gpt3.legal == "no" and "use 128 GPUs" in gpt3.remark
    mixtral = planned(found["train_mixtral_8x7b_distributed.sh"])
    assert mixtral.legal == "no" and "ep 8" in mixtral.remark
    deepseek = planned(found["deepseek_v3_671b.toml"])
    assert not deepseek.runs and "does not fit" in deepseek.fits
    assert "cannot start" in planned(found["llama3_405b.toml"]).remark


def original(recipe: PublicRecipe) -> Path:
    return Path(_SOURCES) / recipe.repository.split("/")[1] / recipe.path


@pytest.mark.nightly
@pytest.mark.skipif(
    not any(_SOURCES and original(one).is_file() for one in recipes()),
    reason="no sources: name a folder with checkouts of the repositories in FIVEFOLD_SOURCES",
)
def test_descriptions_read_as_the_files_do() -> None:
    for recipe in recipes():
        path = original(recipe)
        if not path.is_file():
            continue
        try:
            whole = read_foreign(path, recipe.gpus, recipe.model).options
        except FivefoldError as error:
            with pytest.raises(FivefoldError, match=r"GPUs are no multiple|must multiply"):
                recipe.read()
            assert "GPUs" in str(error)
            continue
        assert recipe.read().options == whole, recipe.path
