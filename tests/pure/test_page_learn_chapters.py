"""The chapters of Learn: their path, their numbers, their words, and what they print."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.commands.plan import plan_serving
from fivefold.core.errors import FivefoldError
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.memory.static import static_bytes
from fivefold.cost.traffic.collectives import predict_traffic
from fivefold.render import WIDTH, gib
from fivefold_page import document
from fivefold_page.explore.state import SCHEDULES, State
from fivefold_page.learn import chapters, compare, device, serving, trainers
from fivefold_page.learn.chapters import CHAPTERS, plain
from fivefold_page.learn.glossary import GLOSSARY, linked
from fivefold_page.learn.lesson import GROUPS
from tests.commands import in_fork, in_new_process
from tests.selection import all_cases

STYLE = (
    *("shard", "flat unit", "collective", "group", "communicator", "rank", "stage", "chunk"),
    *("microbatch", "axis", "degree", "coord", "matmul", "loss scaling", "gradient clipping"),
    *("accumulation", "prefetch", "overlap", "offload", "weight gradient", "input gradient"),
    *("peak memory", "reserved", "allocated", "estimate"),
)


def prose(name: str) -> str:
    return " ".join(plain(each) for each in chapters.view(name)["paragraphs"])


def test_the_path_leads_through_all_chapters_and_panels() -> None:
    first, *_, last = CHAPTERS
    name, met = first, [first]
    while (after := chapters.view(name)["after"]) is not None:
        assert chapters.view(after)["before"] == name
        name = after
        met.append(name)
    assert met == list(CHAPTERS) and name == last
    assert {one.panel for one in CHAPTERS.values()} == set(document.LESSONS)
    # A panel by its own name opens with its defaults, in one chapter.
    for panel in document.LESSONS:
        assert sum(one.panel == panel and not one.start for one in CHAPTERS.values()) == 1
        assert CHAPTERS[chapters.chapter_of(panel) or ""].panel == panel


def test_chapters_are_short_questions_with_an_analogy() -> None:
    for name, chapter in CHAPTERS.items():
        view = chapters.view(name)
        assert chapter.question.endswith("?")
        assert 2 <= len(view["paragraphs"]) <= 3
        for each in view["paragraphs"]:
            assert 20 <= len(plain(each).split()) <= 130, (name, plain(each))
        assert 1 <= len(re.findall(r"[.:;] |\.$", plain(view["analogy"]))) <= 4
        assert document.LESSONS[chapter.panel].view(chapter.start)["frames"]


def test_a_word_is_linked_at_its_first_use_only() -> None:
    for name in CHAPTERS:
        view = chapters.view(name)
        parts = [part for each in (*view["paragraphs"], view["analogy"]) for part in each]
        terms = [part["term"] for part in parts if "term" in part]
        assert len(set(terms)) == len(terms) >= 1
        assert set(terms) <= set(GLOSSARY)
        # Before its link no other form of the word was used.
        for place, part in enumerate(parts):
            if "term" in part:
                before = "".join(one["text"] for one in parts[:place])
                assert not re.search(rf"(?<![\w-]){part['text']}(?![\w-]| \d)", before)


def test_the_glossary_has_the_words_of_the_style_guide() -> None:
    assert set(STYLE) <= set(GLOSSARY)
    for term, definition in GLOSSARY.items():
        assert definition.endswith(".") and 3 <= len(definition.split()) <= 32, term
    seen: set[str] = set()
    parts = linked("A flat unit, units, `rank`, ZeRO stage 1 and two stages.", seen)
    assert seen == {"flat unit", "ZeRO", "stage"}
    assert [part["text"] for part in parts if "term" in part] == ["flat unit", "ZeRO", "stages"]


def test_no_symbol_is_left_unexplained() -> None:
    """Names of groups are words, and what papers call a station is said as theirs."""
    shown = json.dumps([lesson.view({}) for lesson in document.LESSONS.values()])
    said = [text for text in re.findall(r'"((?:[^"\\]|\\.)*)"', shown) if " " in text]
    said += [prose(name) for name in CHAPTERS]
    for text in said:
        words = json.loads(f'"{text}"') if "\\u" in text else text
        if "papers call" not in words:
            assert not re.search(r"[ḡ]|f̄|\b(edp|fsdp|folded|twin|replica)\b", words), words
    plans = [PlanOptions("tiny-moe", "dp=2 tp=2 pp=2 cp=2 ep=2"), PlanOptions("tiny", "pp=2 dp=2")]
    for options in plans:
        assert {one.axis for one in predict_traffic(resolve(options), 0, itemsize=2)} <= set(GROUPS)


# Every number of the prose is computed: here once more, from the functions underneath.


def test_the_first_chapter_counts_what_one_gpu_would_hold() -> None:
    plan = resolve(PlanOptions("llama-3.1-70b", "dp=1", zero=0, seq=8192))
    held = static_bytes(plan, 0, itemsize=2, optimizer="adamw", master=True)
    said = prose("one-gpu")
    assert gib(held.device) in said and gib(held.weights) in said
    shown = device.view({})
    assert gib(sum(part["bytes"] for part in shown["parts"][:4])) == gib(held.device)
    assert gib(shown["parts"][4]["bytes"]) in said


def test_numbers_of_the_prose_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another GPU the same chapters have other numbers: none is written down."""
    names = ("one-gpu", "collectives", "data", "zero", "tensor")
    before = {name: prose(name) for name in names}
    alone = replace(chapters.ALONE, machine="a100-40g")
    monkeypatch.setattr(chapters, "ALONE", alone)
    for name in ("one-gpu", "collectives", "data", "zero"):
        paragraphs = " ".join(CHAPTERS[name].prose())
        assert paragraphs != before[name]
        assert gib(alone.setting().machine.memory) in paragraphs or name in ("collectives", "data")


def test_the_comparison_says_what_the_planner_estimates() -> None:
    view = compare.view({})
    by_name = {row["name"]: row for row in view["rows"]}
    for row in view["rows"]:
        state = State.parse(row["address"])
        assert state.estimate().step == row["step"]
        assert gib(row["memory"]) in view["frames"][view["rows"].index(row)]["says"]
    assert by_name["data"]["memory"] > by_name["zero-1"]["memory"] > by_name["zero-3"]["memory"]
    small = {row["name"]: row for row in compare.view({"gpus": "8"})["rows"]}
    assert "16 GPUs" in small["two"]["problem"]


def test_the_chapter_on_choosing_says_what_its_command_says(tmp_path: Path) -> None:
    """Its first command is the plan that its prose names; the second searches the same job."""
    first, second = (shlex.split(each)[1:] for each in CHAPTERS["choose"].commands)
    done = in_fork([*first, "--json"], tmp_path)
    found = json.loads(done.stdout)["layouts"][0]
    view = compare.view({})
    rows = [row for row in view["rows"] if row["verdict"] == "fits"]
    best = min(rows, key=lambda row: row["step"])
    said = " ".join(chapters.CHAPTERS["choose"].prose())
    assert f"{best['layout']}: {gib(best['memory'])}, and {best['step_text']} a step" in said
    assert (found["step_s"], found["fits"]) == (pytest.approx(best["step"]), "fits")
    assert best["layout"] == f"{found['layout']} with ZeRO {found['zero']}"
    assert found["memory_gib"]["total"] * 2**30 == pytest.approx(best["memory"])
    options = resolve(PlanOptions("llama-3.1-70b", layout=found["layout"], batch=view["batch"]))
    asked = dict(zip(second[2::2], second[3::2], strict=True))
    assert asked == {"--machine": "h100", "--batch": "128", "--gpus": view["choices"]["gpus"]}
    assert options.layout.world == int(asked["--gpus"]) and view["batch"] == int(asked["--batch"])


def test_the_table_of_trainers_has_every_cell_its_source_and_its_date() -> None:
    """docs/compared.md is held to the same file by test_docs.py."""
    view = trainers.view({})
    assert [one["name"] for one in view["trainers"]] == list(trainers.CHOICES["beside"].values[1:])
    for one in view["trainers"]:
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", one["date"])
        assert re.match(r"[\w-]+/[\w-]+ [0-9a-f]{8,}, ", one["source"])
    for row, frame in zip(view["rows"], view["frames"], strict=True):
        assert len(row["cells"]) == 1 + len(view["trainers"]) and all(row["cells"])
        assert row["asks"] in frame["says"]
    pipeline = next(row for row in view["rows"] if row["name"] == "pipeline")
    assert f"{len(SCHEDULES)} schedules" in pipeline["cells"][0]
    one = trainers.view({"beside": "litgpt"})
    assert [row["cells"] for row in one["rows"]] == [
        [row["cells"][0], row["cells"][-1]] for row in view["rows"]
    ]
    assert "litgpt has no pipeline and no context parallelism" in prose("trainers")


def test_answers_say_what_the_serving_planner_says() -> None:
    found = serving.view({"model": "llama-3.1-70b", "answers": "32"})
    asked = {"machine": "h100", "gpus": 8, "prompt": serving.PROMPT, "output": serving.OUTPUT}
    alone = plan_serving("llama-3.1-70b", layout="tp=8", **asked).choice
    assert found["shown"] == "tp=8"
    assert found["prefill"] == pytest.approx(alone.latency.ttft)
    assert found["step"] == pytest.approx(alone.latency.tpot)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["tensor"]["room"] == alone.latency.max_sequences
    loaded = plan_serving("llama-3.1-70b", layout="tp=8", concurrency=32, **asked).choice.chosen
    assert rows["tensor"]["tokens_per_s"] == pytest.approx(loaded.tokens_per_s, rel=0.05)
    assert "no room for a cache" in rows["data"]["problem"]
    assert rows["expert"]["problem"] == "the model has no experts"
    full = found["frames"][4]
    used = full["tokens"] * full["sequences"] * found["memory"]["token"]
    assert 0.99 < used / found["memory"]["cache"] <= 1, "the last answer that fits fills the cache"
    parts = (found["memory"][name] for name in ("weights", "engine", "cache"))
    assert sum(parts) == pytest.approx(found["limit"])
    moe = {r["name"]: r for r in serving.view({"model": "qwen3-30b-a3b", "answers": "1"})["rows"]}
    assert not any(row["problem"] for row in moe.values())
    assert moe["data"]["tokens_per_s"] < 1 / moe["data"]["tpot"], "one replica is busy"


# What is printed, and what is refused.


def test_an_address_of_a_chapter_prints_prose_and_panel() -> None:
    found = document.answers("learn", {"chapter": "data", "dp": "2"}, None, None, lambda _: None)
    assert list(found) == ["chapter/data", "learn/data"]
    assert found["learn/data"]["choices"]["zero"] == "0"
    assert found["learn/data"]["choices"]["dp"] == "2"
    lines = list(document.lines(found, None))
    assert lines[0] == "Chapter 3 of 14: What if the batch is split?"
    assert any("In a kitchen" in line for line in lines)
    assert any(CHAPTERS["data"].commands[0] in line for line in lines)
    assert max(map(len, lines)) <= WIDTH
    only = document.answers("learn", {"chapter": "data"}, "data", None, lambda _: None)
    assert list(only) == ["learn/data"]
    whole = document.answers("learn", {}, None, None, lambda _: None)
    assert {f"chapter/{name}" for name in CHAPTERS} <= whole.keys()
    assert {f"learn/{name}" for name in document.LESSONS} <= whole.keys()


def test_an_unknown_chapter_is_refused_with_the_nearest() -> None:
    with pytest.raises(FivefoldError, match="tensor"):
        document.answers("learn", {"chapter": "tensr"}, None, None, lambda _: None)
    with pytest.raises(FivefoldError, match="panel"):
        document.answers("learn", {"chapter": "data"}, "datum", None, lambda _: None)


LONG = ("verify", "rehearse")  # they run a model
COMMANDS = [command for one in CHAPTERS.values() for command in one.commands]


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("command", [one for one in COMMANDS if one.split()[1] in LONG])
def test_commands_of_chapters_that_run_a_model_work(command: str, tmp_path: Path) -> None:
    test_commands_of_chapters_work(command, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [one for one in COMMANDS if one.split()[1] not in LONG])
def test_commands_of_chapters_work(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    assert words[0] == "fivefold"
    done = (in_new_process if all_cases() else in_fork)(words[1:], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not list(tmp_path.iterdir())
