"""Files of a run that are cut, edited or hostile: they are named, and a resume goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runs import RECORD

from fivefold import cli
from fivefold.core.errors import BadFile, FivefoldError
from fivefold.page import document
from fivefold.records import run_folder
from fivefold.records.run_folder import (
    Metrics,
    RunFolder,
    mend,
    read_records,
    read_starts,
    read_summary,
)
from fivefold.verbs.observe import _runs

FACTS = {"layout": "dp=2", "world": 2, "model": "tiny"}
WRONG = [None, True, -1, 0, 1e308, 10**400, "x", "", [], [None], {}, {"a": None}, [1, [2]]]
NUM_DRAWN = 150


def made(folder: Path, *, steps: int = 3) -> RunFolder:
    """A run with some steps, in two starts."""
    RunFolder.create(folder, "", FACTS, resume=False)
    run = RunFolder.create(folder, "", FACTS, resume=True)
    metrics = Metrics(folder, 0)
    for number in range(1, steps + 1):
        one = replace(RECORD, step=number, wall=float(number), restart=int(number > 1))
        assert metrics.append(one) is None
    assert metrics.close() is None
    return run


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a JSON value."""
    yield above
    inner = enumerate(value) if isinstance(value, list) else ()
    for key, each in value.items() if isinstance(value, dict) else inner:
        yield from places(each, (*above, key))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = new
    return copy


def test_wrong_types_are_named_and_no_traceback(tmp_path: Path) -> None:
    """The page of a run whose files have one value of another type."""
    made(tmp_path / "run")
    files = {name: tmp_path / "run" / name for name in ("run.json", "metrics.jsonl")}
    texts = {name: path.read_text().splitlines() for name, path in files.items()}
    good = {
        "run.json": json.loads("".join(texts["run.json"])),
        "metrics.jsonl": json.loads(texts["metrics.jsonl"][1]),
    }
    drawn, cases = random.Random(7), list[tuple[str, tuple[Any, ...], Any]]()
    for name, value in good.items():
        cases += [(name, place, new) for place in places(value) for new in WRONG]
    refused = 0
    for name, place, new in drawn.sample(cases, NUM_DRAWN):
        for each, lines in texts.items():
            files[each].write_text("\n".join(lines) + "\n")
        text = json.dumps(changed(good[name], place, new)) + "\n"
        lines = [f"{each}\n" for each in texts[name]]
        files[name].write_text(text if name == "run.json" else lines[0] + text + lines[2])
        try:
            found = document.answers(
                "run", {}, None, _runs([str(tmp_path / "run")]), lambda _: None
            )
            json.dumps(found)
            assert list(document.lines(found, None)), (name, place, new)
        except BadFile as error:
            assert name in str(error)
            refused += 1
    assert refused > NUM_DRAWN // 3  # it did look


def test_a_bad_line_moves_away_and_the_rest_goes_on(tmp_path: Path) -> None:
    run = made(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    bad = ['{"step": "two"}', "\x00\x00", lines[0].replace('"tokens": 1024', '"tokens": "many"')]
    path.write_text("\n".join([lines[0], *bad, *lines[1:]]) + "\n")
    with pytest.raises(BadFile, match="line 2 is no record of a step"):
        read_records(path)
    (said,) = mend(tmp_path)
    assert "3 lines that were no record" in said and "metrics.bad.jsonl" in said
    assert [each.step for each in read_records(path)] == [1, 2, 3]
    assert (tmp_path / "metrics.bad.jsonl").read_text().splitlines() == bad
    assert mend(tmp_path) == [] and run.summarize().num_steps == 3


@pytest.mark.parametrize("text", ["", "[]", '{"starts": []}', '{"starts": [{"began": "x"}]}'])
def test_a_run_file_that_is_none_is_made_from_the_records(tmp_path: Path, text: str) -> None:
    made(tmp_path)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(BadFile, match=r"run\.json"):
        RunFolder.open(tmp_path)
    (said,) = mend(tmp_path)
    assert "was no record of a run" in said and "run.bad.json" in said
    assert (tmp_path / "run.bad.json").read_text() == text
    again = RunFolder.create(tmp_path, "", FACTS, resume=True)
    assert again.restart == 2  # its events come after those of the two before
    first, second, _ = (each["began"] for each in read_starts(tmp_path / "run.json"))
    assert first < second and read_summary(tmp_path).num_steps == 3


def test_an_empty_run_file_without_records_is_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    assert len(mend(tmp_path)) == 1
    assert RunFolder.create(tmp_path, "", FACTS, resume=True).restart == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_lines_that_never_found_room_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "_MOST_WAITING", 1000)
    metrics = Metrics(tmp_path, 0)
    metrics.close()
    with Path("/dev/full").open("ab", buffering=0) as metrics.file:
        for number in range(1, 9):
            metrics.append(replace(RECORD, step=number))
        assert len(metrics.waiting) < 3000  # not all: memory is not endless either
        assert "could not be written" in (metrics.close() or "")


def test_what_a_terminal_obeys_is_spelt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run")
    run.fail("\x1b]0;pwned\x07\x1b[2J\x9b31m died \u202egnihton")
    run.append_sample(3, "hi\x1b[8m", "there\x1b[0m")
    assert cli.run(["observe", str(tmp_path / "run"), "--text"]) == 0
    out = capsys.readouterr().out
    assert "\\x1b]0;pwned\\x07\\x1b[2J\\x9b31m" in out and "\\u202e" in out
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(out)
    (tmp_path / "run" / "run.json").write_text('{"starts": [{"began": 1, "model": 2, "\x1b": 3}]}')
    with pytest.raises(FivefoldError):
        RunFolder.open(tmp_path / "run")
    assert cli.run(["observe", str(tmp_path / "run"), "--text"]) == 2
    assert "\x1b" not in capsys.readouterr().err
