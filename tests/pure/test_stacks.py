"""Other people's stacks: read strictly, without one source's numbers, and priced by `plan`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from one_layout import H100, grid_of

from fivefold.cli import main
from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.hardware import load_without
from fivefold.core.model import presets as models
from fivefold.cost.hardware import stack_presets
from fivefold.cost.hardware.stack import EAGER_LAUNCH, FIVEFOLD
from fivefold.cost.hardware.stack_presets import load_preset, load_stack, presets
from fivefold.cost.layer.time import LayerTimer
from fivefold_score.left_out import fitted_numbers
from fivefold_score.spelling import spellings


@pytest.mark.parametrize("name", presets())
def test_every_stack_says_what_it_is(name: str) -> None:
    found = load_preset(name)
    assert found.stack.name == name and not found.stack.runs_plans
    assert len(found.what) > 10 and len(found.source) > 10
    assert all(each in presets() for each in found.open)


def test_numbers_are_fitted_to_sources_that_rows_name() -> None:
    sources = {each.source for each in spellings().families.values()}
    numbers = fitted_numbers()
    assert {source for one in numbers for source in one.to} <= sources
    assert len(numbers) == len(set(numbers)) <= 40, "fit fewer numbers, not more"
    assert all(each.stack in presets() for each in spellings().families.values())


def test_the_page_lists_every_stack() -> None:
    page = (Path(__file__).parents[2] / "docs" / "stacks.md").read_text("utf-8")
    table = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = [name.strip(" `") for cell in table for name in cell.split(",")]
    assert sorted(listed) == presets()


def test_our_own_launch_is_the_measured_one() -> None:
    pooled = stack_presets.load_stack("eager", without="vtrain").launch
    nanotron = 2.13e-3
    assert pooled == pytest.approx((EAGER_LAUNCH * nanotron) ** 0.5)


def write(path: Path, text: str) -> str:
    path.write_text(f'what = "a stack of a test"\nsource = "a test of it"\n{text}')
    return str(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[speed]\nlanch = 1.0", "did you mean launch"),
        ("[memory]\nsplitt = 'even'", "unknown key 'memory.splitt': did you mean split"),
        ("[memory]\nsplit = 'odd'", "memory.split = 'odd'"),
        ("[speed]\nlaunch = 'slow'", "launch = 'slow': expected float"),
        ("bass = 'eager'", "unknown key 'bass': did you mean base"),
        ("base = 'eagre'", "base = 'eagre': did you mean eager"),
        ("[fitted.speed]\nlaunch = 'zb'", "fitted speed.launch"),
        ("speed = 3", "speed: expected a table"),
    ],
)
def test_a_typo_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadFile, match=words):
        load_preset(write(tmp_path / "mine.toml", text))


def test_a_stack_may_not_be_its_own_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stacks").mkdir()
    write(tmp_path / "stacks" / "round.toml", 'base = "round"')
    monkeypatch.setattr(stack_presets, "PRESETS", tmp_path)
    with pytest.raises(BadFile, match="one inside another"):
        load_preset(str(tmp_path / "stacks" / "round.toml"))


def test_a_number_of_one_source_is_left_to_the_base(tmp_path: Path) -> None:
    text = """base = "eager"
[speed]
launch = 9.0
factor = 2.0
loss_bytes = 5.0
[fitted.speed]
launch = "a"
factor = "a, b"
"""
    path = write(tmp_path / "mine.toml", text)
    known, without = load_stack(path), load_stack(path, "a")
    assert (known.launch, known.factor, known.loss_bytes) == (9.0, 2.0, 5.0)
    assert without.launch == load_stack("eager").launch
    assert (without.factor, without.loss_bytes) == (2.0, 5.0)  # b gives it as well; not fitted


def test_what_an_allocator_was_fitted_to_goes_and_what_was_counted_stays() -> None:
    known, left = load_stack("nanotron"), load_stack("nanotron", "hugging-face")
    assert known.memory.cache is not None and left.memory.cache is not None
    assert known.memory.cache.most is not None and left.memory.cache.most is None
    assert left.memory.cache == replace(known.memory.cache, most=None)
    assert left.memory.fragments == load_stack("eager").memory.fragments and left.factor == 1.0
    assert left.memory.packed  # read from its source code


def test_a_machine_leaves_fitted_shares_to_its_base() -> None:
    known, left = load_without("b200", ""), load_without("b200", "mbridge")
    assert known.efficiency.matmul == 0.67
    assert left.efficiency.matmul == H100.efficiency.matmul
    assert left.efficiency.memory == known.efficiency.memory and left.peaks == known.peaks
    assert load_without("h100", "mbridge") == H100  # others give its shares, too


def test_parallel_blocks_share_their_collectives() -> None:
    shape, grid = models.load("palm-540b"), grid_of(tp=8, sp=False)
    xla, apart = load_stack("xla"), FIVEFOLD
    found = {
        each.name: LayerTimer(shape, H100, each, grid, 2048, "bf16").layer(0).forward["tp"].item()
        for each in (xla, apart)
    }
    assert found["xla"] == pytest.approx(found["fivefold"] / 2 * (1 - xla.tp_hidden))


# The command


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *words])
    output = capsys.readouterr()
    assert stop.value.code == 0, output.err
    return output.out


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *words])
    output = capsys.readouterr()
    assert stop.value.code == 2 and not output.out
    return output.err


JOB = ("llama-3.2-1b", "--machine", "h100", "--seq", "2048")


def test_a_given_layout_is_priced_as_another_stack(capsys: pytest.CaptureFixture[str]) -> None:
    def step(*words: str) -> dict[str, Any]:
        layout = ("--layout", "dp=4 tp=2", "--batch", "32")
        return json.loads(run(capsys, *JOB, *layout, *words, "--json"))

    ours, theirs = step(), step("--set", "stack=nanotron")
    assert (ours["stack"], theirs["stack"]) == ("fivefold", "nanotron")
    assert theirs["layouts"][0]["step_s"] > 1.1 * ours["layouts"][0]["step_s"]
    assert any("nanotron" in note and "not fivefold" in note for note in theirs["notes"])
    assert not any("not fivefold" in note for note in ours["notes"])


def test_a_search_is_priced_as_another_stack(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "slow.toml", 'base = "torchtitan"\n[speed]\nfactor = 3.0\n')
    job = (*JOB, "--gpus", "8", "--batch", "32", "--set", "top=1", "--json")
    theirs = json.loads(run(capsys, *job, "--set", "stack=torchtitan"))
    slow = json.loads(run(capsys, *job, "--set", f"stack={path}"))
    assert (theirs["stack"], slow["stack"]) == ("torchtitan", "slow")
    assert slow["layouts"][0]["step_s"] > 2 * theirs["layouts"][0]["step_s"]
    text = run(capsys, *job[:-1], "--set", "stack=torchtitan", "-o", str(tmp_path / "plan.toml"))
    assert "priced as torchtitan" in text and "train and rehearse run fivefold's own" in text
    assert (tmp_path / "plan.toml").exists()


def test_an_unknown_stack_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (JOB, JOB[:1]):
        said = refuse(capsys, *words, "--set", "stack=nonsense")
        assert all(name in said for name in presets())
    assert "did you mean nanotron" in refuse(capsys, *JOB, "--set", "stack=nanotrom")
    assert "--machine" in refuse(capsys, JOB[0], "--set", "stack=nanotron")
    said = refuse(capsys, *JOB, "--layout", "dp=1", "--set", "stack=nemo", "--set", "kernels=eager")
    assert "leave it or stack out" in said
    with pytest.raises(FivefoldError):
        load_preset("no/such/file.toml")
