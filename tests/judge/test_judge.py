"""`fivefold train` has the losses, weights and evaluations of a trainer that shares no code."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from fivefold.core.plan.recipe import Recipe
from tests.judge import closed_forms, decoder, masks, tokens, trainer
from tests.judge.cases import BY_NAME, CASES, LONG
from tests.judge.runs import Case, differing, errors

OWN = ("tests.judge.decoder", "tests.judge.masks", "tests.judge.tokens")


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_training_is_as_the_judge_computes_it(case: Case, corpora: Path, tmp_path: Path) -> None:
    found = errors(case, corpora, tmp_path / "judged")
    assert not differing(case, found), found
    assert {"loss", "norm", "lr", "eval_loss"} <= found.keys()
    assert case.ends or {"model", "optim", "facts scaler"} <= found.keys()


@pytest.mark.nightly
def test_the_scale_of_the_loss_grows_after_500_steps(corpora: Path, tmp_path: Path) -> None:
    """The run resumes after 300 of them."""
    assert not differing(LONG, errors(LONG, corpora, tmp_path / "judged"))
    scales = [shown["scale"] for shown in LONG.judged(corpora).steps]
    assert scales[498:501] == [65536.0, 131072.0, 131072.0]


def test_the_judge_sees_what_its_cases_are_for(corpora: Path) -> None:
    """Clipping that clips, a second epoch, overflows, steps that are not finite."""
    clipped = BY_NAME["clipped"].judged(corpora)
    assert all(shown["norm"] > 0.05 for shown in clipped.steps)
    overflow = [shown["skipped"] for shown in BY_NAME["overflow"].judged(corpora).steps]
    assert True in overflow and False in overflow
    assert len(BY_NAME["not finite"].judged(corpora).steps) == 4
    short = BY_NAME["two epochs"].table(corpora)["train"]["data"]
    samples = tokens.Samples(short, 64, 12, 5)
    assert samples.num_trained[0] < 8 * 6


def test_the_judge_imports_nothing_of_what_it_judges() -> None:
    for module in (trainer, decoder, masks, tokens, closed_forms):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text("utf-8"))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not [name for name in names if name.startswith("fivefold")]
            assert {name for name in names if name.startswith("tests")} <= {*OWN}


def test_every_key_is_judged_or_changes_no_number() -> None:
    """A new key of the recipe belongs into the judge, and some case sets each to another value."""
    keys = {each.name for each in fields(Recipe)}
    kinds = [*trainer.USUAL, *trainer.UNCHANGING, *trainer.ELSEWHERE]
    assert keys == set(kinds) and len(keys) == len(kinds)
    for key, usual in trainer.USUAL.items():
        said = [case.train.get(key, usual) for case in CASES]
        assert key == "eval_every" or any(each not in (usual, None) for each in said), key
