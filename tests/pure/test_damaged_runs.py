"""Files of a run that are cut, edited or hostile: they are named, and a resume goes on."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runs import RECORD

from fivefold import cli
from fivefold.commands.observe import _runs
from fivefold.core.errors import BadFile, FivefoldError
from fivefold.records import run_writer as run_folder
from fivefold.records.run_reader import mend
from fivefold.records.run_writer import (
    Metrics,
    RunFolder,
    read_lines,
    read_records,
    read_starts,
    read_summary,
)
from fivefold_page import document
from fivefold_page.run import compare as run_compare

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
    refused, damaged = 0, 0
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
            for damage in found["run"]["head"]["damage"]:
                assert name in damage and "line 2 is no record of a step (" in damage
                damaged += 1
        except BadFile as error:
            assert name == "run.json" and name in str(error)
            refused += 1
    assert damaged > NUM_DRAWN // 5 and refused > NUM_DRAWN // 10  # it did look


def test_a_bad_line_moves_away_and_the_rest_goes_on(tmp_path: Path) -> None:
    run = made(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    bad = ['{"step": "two"}', "\x00\x00", lines[0].replace('"tokens": 1024', '"tokens": "many"')]
    path.write_text("\n".join([lines[0], *bad, *lines[1:]]) + "\n")
    (said,) = mend(tmp_path)
    assert "lines 2 to 4 are no records of steps (2: no loss)" in said
    assert said.startswith(f"{path} is damaged") and said.endswith("moved to metrics.bad.jsonl")
    assert [each.step for each in read_records(path)] == [1, 2, 3]
    assert (tmp_path / "metrics.bad.jsonl").read_text().splitlines() == bad
    assert mend(tmp_path) == [] and run.summarize().num_steps == 3


# Damage in the middle of a file of five records, what is said of it, and the steps that are left.
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str, list[int]]] = {
    "garbage": (lambda line: b"\x00\xff\xfe" * 40, "line 3 is no record of a step (no JSON)", []),
    "binary with newlines": (lambda line: bytes(range(256)), "lines 3 to 4 are no records", []),
    "cut": (lambda line: line[:40], "line 3 is no record of a step (no JSON)", []),
    "another table": (lambda line: b'{"a": 1}', "line 3 is no record of a step (no step)", []),
    "a number": (lambda line: b"3", "line 3 is no record of a step (the line is no table)", []),
    "empty": (lambda line: b"", "line 3 is no record of a step (no JSON)", []),
    "a record after a cut one": (
        lambda line: line[:90] + line,
        "line 3 is no record of a step (no JSON)",
        [3],
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_records_around_damage_are_read_and_the_damage_is_named(tmp_path: Path, name: str) -> None:
    run, (change, words, salvaged) = made(tmp_path, steps=5), DAMAGE[name]
    path, known = tmp_path / "metrics.jsonl", [1, 2, *salvaged, 4, 5]
    lines = path.read_bytes().split(b"\n")
    lines[2] = change(lines[2])
    path.write_bytes(b"\n".join(lines))
    named: list[str] = []
    assert run.summarize(named.append).num_steps == len(known)
    assert named == [read_lines(path).damage] and words in named[0] and str(path) in named[0]
    # A start that goes on after step 4 keeps what is damaged, and loses no good record.
    metrics = Metrics(tmp_path, 4)
    assert metrics.damage == f"{named[0]}; moved to metrics.bad.jsonl" and metrics.close() is None
    assert [record.step for record in read_records(path)] == known[:-1]
    assert [record.step for record in read_records(tmp_path / "metrics.lost.jsonl")] == [5]
    assert (tmp_path / "metrics.bad.jsonl").read_bytes() == change(lines[2]) + b"\n" or salvaged
    assert read_lines(path).damage is None


def test_many_damaged_lines_are_named_in_one_sentence(tmp_path: Path) -> None:
    made(tmp_path, steps=30)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{'x' if n % 3 else line}\n" for n, line in enumerate(lines)))
    words = "lines 2 to 3, 5 to 6, 8 to 9, 11 to 12, 14 to 15, and 5 more places are no records"
    assert words in (read_lines(path).damage or "")


def answers(page: str) -> str:
    """The data inside a page that works offline."""
    packed = re.search(r'id="answers">([^<]*)<', page)
    assert packed is not None
    return gzip.decompress(base64.b64decode(packed[1].replace("\\/", "/"))).decode()


def run_answers(params: object, run: run_compare.RunSource, bar: object) -> dict[str, Any]:
    """Those of a page that works offline, without Explore and Learn."""
    questions = run_compare.offline(run)
    return {document.answer_key(*each): document.answer(*each, run) for each in questions}


@pytest.mark.parametrize("flag", ["--text", "--json", "--html"])
def test_a_damaged_run_is_observed_and_its_damage_named_once(
    flag: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(document, "offline_answers", run_answers)
    made(tmp_path / "run", steps=5)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"\x1b[2J\xff", lines[1][:40], *lines[3:]]))
    page = tmp_path / "page.html"
    words = [flag, str(page)] if flag == "--html" else [flag]
    assert cli.run(["observe", str(tmp_path / "run"), *words]) == 0
    out, err = capsys.readouterr()
    damage = "metrics.jsonl is damaged: lines 2 to 3 are no records of steps (2: no JSON)"
    assert err.count("is damaged") == 1 and damage in err and "\x1b" not in err
    if flag == "--text":
        assert "steps 1 to 5" in out and "is damaged" not in out
    else:
        assert damage in (out if flag == "--json" else answers(page.read_text("utf-8")))


def test_a_time_that_cannot_be_is_read_as_missing(tmp_path: Path) -> None:
    """As older versions wrote them on a GPU: such a run is observed, summarised and resumed."""
    run = made(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    tables = [json.loads(line) for line in path.read_text().splitlines()]
    tables[1] |= {"seconds": -0.404, "wall_s": -0.404, "tokens_per_s": -2534.0}
    path.write_text("".join(f"{json.dumps(table)}\n" for table in tables))
    lines = read_lines(path)
    assert lines.damage is None and [record.elapsed for record in lines.records] == [0.2, None, 0.2]
    summary = run.summarize()
    assert (summary.num_steps, summary.num_untimed, summary.step_s) == (3, 1, 0.2)
    found = document.answers("run", {}, None, _runs([str(tmp_path / "run")]), lambda _: None)
    assert found["run"]["curves"]["step_s"]["measured"]["y"] == [0.2, None, 0.2]
    assert found["run"]["curves"]["tokens_per_s"]["measured"]["y"][1] is None
    assert "1 without a time" in found["run"]["goodput"]["says"]
    assert list(document.lines(found, None))


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
