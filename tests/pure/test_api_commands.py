"""Commands beside the functions that they call: the same JSON, the same text, nothing printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fivefold as ff
from fivefold.cli import main
from fivefold.core.errors import JSON_SCHEMA

ROOT = Path(__file__).parents[2]
PLAN = ROOT / "examples" / "launch" / "plan.toml"
TEXT = ROOT / "fivefold" / "presets" / "rhymes.txt"
RUNS = ROOT / "tests" / "data" / "published.jsonl"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "corpus"
    ff.tokens(TEXT, output=folder)
    return folder


Printed = Callable[..., tuple[Any, str]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """A command's JSON without the version of its keys, and its text."""

    def of(*words: str) -> tuple[Any, str]:
        outputs: list[str] = []
        for flags in (["--json"], []):
            with pytest.raises(SystemExit) as stop:
                main([*words, *flags])
            assert not stop.value.code
            outputs.append(capsys.readouterr().out)
        table = json.loads(outputs[0])
        if isinstance(table, dict):
            assert table.pop("schema_version") == JSON_SCHEMA
        return table, outputs[1]

    return of


def require_equal(
    answer: Any, printed: tuple[Any, str], capsys: pytest.CaptureFixture[str]
) -> None:
    table, text = printed
    assert json.loads(json.dumps(answer.to_json())) == table
    assert f"{answer}\n" == text
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("target", ["slurm", "torchrun", "kubernetes"])
def test_launch(target: str, printed: Printed, capsys: pytest.CaptureFixture[str]) -> None:
    image = "fivefold:1" if target == "kubernetes" else None
    words = ["launch", target, str(PLAN), "--gpus-per-node", "4", "--smoke"]
    words += [] if image is None else ["--image", image]
    answer = ff.launch(target, PLAN, gpus_per_node=4, smoke=True, image=image)
    require_equal(answer, printed(*words), capsys)
    with pytest.raises(ff.FivefoldError, match="leave it out"):
        ff.launch(target, PLAN, master="a", account="b")


def test_launch_into_a_file(
    tmp_path: Path, printed: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.sh"
    answer = ff.launch("slurm", PLAN, output=file, time="01:00:00")
    assert file.read_text("utf-8") == answer.script
    words = ("launch", "slurm", str(PLAN), "-o", str(file), "--time", "01:00:00")
    require_equal(answer, printed(*words), capsys)


def test_compare_frameworks(printed: Printed, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("compare-frameworks", "tiny", "--gpus", "2", "--machine", "h100")
    require_equal(ff.compare_frameworks("tiny", gpus=2, machine="h100"), printed(*words), capsys)


def test_observe(printed: Printed, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = ff.observe("tiny", layout="dp=2", machine="h100", panel="memory")
    words = ["observe", "tiny", "--layout", "dp=2", "--machine", "h100", "--panel", "memory"]
    with pytest.raises(SystemExit):
        main([*words, "--text"])
    text = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "--json"])
    table = json.loads(capsys.readouterr().out)
    assert table.pop("schema_version") == JSON_SCHEMA
    require_equal(page, (table, text), capsys)
    with pytest.raises(ff.FivefoldError, match="give run folders"):
        ff.observe("tiny", runs=[tmp_path])


def test_score(printed: Printed, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    runs = tmp_path / "runs.jsonl"
    lines = RUNS.read_text("utf-8").splitlines(keepends=True)
    runs.write_text("".join(lines[:3]), "utf-8")
    reports: list[Any] = []
    answer = ff.score(runs, on_progress=reports.append)
    assert reports and reports[-1].done <= reports[-1].total
    require_equal(answer, printed("score", str(runs)), capsys)


@pytest.mark.parametrize("flag", ["check", "info"])
def test_tokens_of_a_folder(
    flag: str, corpus: Path, printed: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ff.tokens(corpus, **{flag: True})  # type: ignore[arg-type]
    require_equal(answer, printed("tokens", str(corpus), f"--{flag}"), capsys)


def test_tokens_of_text(
    tmp_path: Path, printed: Printed, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = ff.tokens([TEXT], output=tmp_path / "corpus", force=True, workers=1)
    words = ("tokens", str(TEXT), "-o", str(tmp_path / "corpus"), "--force", "--workers", "1")
    require_equal(answer, printed(*words), capsys)


def test_calibrate_refuses_what_its_command_refuses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(ff.FivefoldError, match="120 at most") as refused:
        ff.calibrate(seconds=3600.0, output=tmp_path / "machine.toml")
    with pytest.raises(SystemExit):
        main(["calibrate", "--seconds", "3600"])
    assert re.search(re.escape(str(refused.value)), capsys.readouterr().err)
