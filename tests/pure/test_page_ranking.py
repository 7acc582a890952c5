"""The planner's best, curves over sequence length, and what a self-contained page holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from fivefold.core import hardware as machine
from fivefold.core.errors import FivefoldError
from fivefold.core.layout.layout import Layout
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.memory.categories import peak_memory
from fivefold.planner import planning as planner
from fivefold.planner.setting import plan_arguments
from fivefold_page import document
from fivefold_page.explore import explore
from fivefold_page.explore import search as explore_search
from fivefold_page.explore.state import JOB as JOB_KEYS
from fivefold_page.explore.state import State
from fivefold_page.learn.lesson import Choice
from fivefold_page.view import Progress

JOB = {"model": "llama-3.1-8b", "machine": "h100", "gpus": "16", "seq": "8192", "batch": "64"}
HOW: dict[str, Any] = {"precision": "bf16", "headroom": 0.05}
EXPERTS = {"model": "mixtral-8x7b", "machine": "h100", "gpus": "16", "seq": "4096", "batch": "64"}


def silent(share: float) -> None:
    """Nobody looks."""


@cache
def ranked(**job: str) -> dict[str, Any]:
    return explore_search.ranking_view(job, silent)


@cache
def swept(**job: str) -> dict[str, Any]:
    return explore_search.curves_view(job, silent)


def options_of(job: dict[str, str], **said: Any) -> PlanOptions:
    """The job as the command line would have it, not as the page."""
    numbers = {name: int(job[name]) for name in ("gpus", "seq", "batch")}
    return PlanOptions(job["model"], machine=job["machine"], **numbers, **said)


@pytest.mark.parametrize("job", [JOB, EXPERTS], ids=["dense", "experts"])
def test_the_best_are_those_of_the_planner(job: dict[str, str]) -> None:
    fixed = {"offload": "none"}
    asked = planner.plan_request(options_of(job), machine.load("h100"), fixed, **HOW)
    wanted = planner.best_plans(asked, 10).plans
    found = ranked(**job)["layouts"]
    for one, plan in zip(found, wanted, strict=True):
        assert one["layout"].startswith(str(plan.plan.layout))
    # The planner cuts the stages of its first anew, which a state cannot say.
    assert [one["step"] for one in found][1:] == pytest.approx([one.step for one in wanted][1:])
    assert found[0]["step"] >= wanted[0].step * (1 - 1e-12)


@pytest.mark.parametrize("job", [JOB, EXPERTS], ids=["dense", "experts"])
def test_a_click_leads_to_what_the_entry_says(job: dict[str, str]) -> None:
    for one in (*ranked(**job)["layouts"], *ranked(**job)["front"]):
        set_ = one["set"]
        degrees = {name: int(set_[name]) for name in ("tp", "cp", "pp", "ep", "etp", "replicate")}
        dp = int(job["gpus"]) // (degrees["tp"] * degrees["cp"] * degrees["pp"])
        shard = dp // degrees["replicate"]
        plan = resolve(
            options_of(
                job,
                layout=str(Layout(shard=shard, **degrees)),
                zero=int(set_["zero"]),
                schedule=set_["schedule"],
                chunks=int(set_["chunks"]),
                context=set_["context"],
                recompute=set_["recompute"],
                microbatch_size=int(set_["microbatch_size"]),
            )
        )
        look = planner.estimate_on_machine(plan, machine.load("h100"), **HOW)
        assert (one["step"], one["total"], one["mfu"]) == (look.step, look.total, look.mfu)
        assert State.parse({**job, **set_}).estimate().step == one["step"]


def test_what_belongs_to_another_layout_is_left_behind() -> None:
    also = "layers=16 stage_layers=9,7 order=tp-cp-pp-dp"
    found = ranked(**JOB, also=also)
    assert {one["set"]["also"] for one in found["layouts"]} == {"layers=16"}
    best = found["layouts"][0]
    reached = State.parse({**JOB, "also": also, **best["set"]})
    assert reached.plan().shape.layers == 16
    assert reached.estimate().step == best["step"] < ranked(**JOB)["layouts"][0]["step"]


def test_the_front_falls_and_holds_the_fastest() -> None:
    found = ranked(**JOB)
    front = sorted(found["front"], key=lambda one: one["total"])
    assert len(front) > 1
    assert all(one["step"] > other["step"] for one, other in pairwise(front))
    fastest = min(found["layouts"], key=lambda one: one["step"])
    assert front[-1]["set"] == fastest["set"]
    assert all(one["total"] <= found["usable"] < found["limit"] for one in front)


def test_what_does_not_fit_is_refused_with_a_way_out() -> None:
    found = ranked(**{**JOB, "model": "llama-3.1-405b"})
    assert not found["layouts"]
    assert "does not fit" in found["refused"] and "it takes 128 GPUs" in found["refused"]
    assert "does not fit" in " ".join(explore_search.ranking_text(found))


@pytest.mark.parametrize(
    ("name", "text"),
    [("gpus", "-1"), ("gpus", "1e9"), ("machine", "<script>"), ("model", "/etc/passwd"),
     ("config", '{"a":' * 20_000), ("tp", "0"), ("color", "red")],
)  # fmt: skip
def test_hostile_params_are_refused(name: str, text: str) -> None:
    for view in (explore_search.ranking_view, explore_search.curves_view):
        with pytest.raises(FivefoldError):
            view({**JOB, name: text}, silent)


def test_the_text_of_the_ranking_has_its_numbers() -> None:
    found = ranked(**JOB)
    lines = explore_search.ranking_text(found)
    assert max(map(len, lines)) <= 100
    for place, one in enumerate(found["layouts"]):
        row = next(line for line in lines if line.startswith(f"{place + 1:>2}  "))
        assert one["layout"] in row and f"{one['total'] / 2**30:,.1f}" in row
        assert f"{one['mfu']:.1%}" in row
    words = " ".join(" ".join(lines).split())
    assert all(" ".join(one["loses"].split()) in words for one in found["layouts"])
    assert all(" ".join(reason.split()) in words for reason in found["because"])


def states() -> Iterator[State]:
    dense = State(model="llama-3.1-8b", gpus=16, batch=64, tp=2, pp=2, schedule="1f1b", chunks=1)
    yield dense
    yield replace(dense, cp=2, zero=1, recompute="selective", seq=6000)
    yield replace(dense, model="mixtral-8x7b", ep=4, zero=2, recompute="full")
    yield State()


@pytest.mark.parametrize("state", [*states()], ids=lambda state: f"{state.model} cp={state.cp}")
def test_curves_of_a_layout_are_its_memory_at_every_length(state: State) -> None:
    """By the closed forms of a search; the plan's own ledger may differ."""
    found = explore_search.current(state)
    assert state.seq in found["lengths"] and found["lengths"] == sorted(found["lengths"])
    for kind in ("none", "selective", "full"):
        for seq in (state.seq, 4096, 131_072):
            plan = resolve(replace(state.options(), recompute=kind, seq=seq))
            look = planner.estimate_on_machine(plan, machine.load(state.machine), **HOW)
            closed = peak_memory(*plan_arguments(plan, look.setting), spans=plan.stages).total
            place = found["lengths"].index(seq)
            assert found["bytes"][kind][place] == pytest.approx(float(closed.item()), rel=1e-12)
    pairs = zip(found["bytes"]["selective"], found["bytes"]["full"], strict=True)
    assert all(selective > full for selective, full in pairs)


def test_the_longest_that_fits_is_under_the_limit_and_the_next_is_not() -> None:
    found = explore_search.current(State())
    for kind, seq in found["longest"].items():
        place = found["lengths"].index(seq)
        sizes = found["bytes"][kind]
        assert sizes[place] <= found["usable"] < sizes[place + 1]


def test_lengths_that_a_layout_cannot_have_are_left_out() -> None:
    state = State(model="gpt2", gpus=2, batch=8, tp=1, pp=1, seq=1000, schedule="1f1b", chunks=1)
    found = explore_search.current(state)
    assert [size is None for size in found["bytes"]["none"]] == [False] + [True] * 10


@pytest.mark.parametrize("job", [JOB, EXPERTS], ids=["dense", "experts"])
def test_every_strategy_has_a_layout_of_its_own_kind(job: dict[str, str]) -> None:
    found = swept(**job)
    layouts = {one["strategy"]: Layout.parse(one["layout"]) for one in found["strategies"]}
    degrees = {name: (one.tp > 1, one.pp > 1, one.cp > 1) for name, one in layouts.items()}
    assert degrees.pop("all") is not None
    assert degrees == {
        "data": (False, False, False),
        "data+tensor": (True, False, False),
        "data+pipeline": (False, True, False),
        "data+context": (False, False, True),
    }
    assert all(one.world == 16 for one in layouts.values())
    for one in found["strategies"]:
        for selective, full in zip(one["bytes"]["selective"], one["bytes"]["full"], strict=True):
            assert selective > full


def test_a_batch_that_is_too_small_for_data_ranks_is_said() -> None:
    found = swept(**{**JOB, "batch": "8"})
    data = found["strategies"][0]
    assert (data["strategy"], data["larger_batch"]) == ("data", 16)
    assert "needs a batch of 16 sequences" in data["words"]
    assert found["strategies"][2]["larger_batch"] is None


def test_the_text_of_the_curves_has_its_numbers() -> None:
    found = swept(**JOB, tp="2", pp="2", schedule="1f1b", zero="1")
    lines = explore_search.curves_text(found)
    assert max(map(len, lines)) <= 100
    own = State.parse({**JOB, "tp": "2", "pp": "2", "schedule": "1f1b", "zero": "1"}).estimate()
    row = next(line for line in lines if re.match(r"this layout +selective", line))
    assert f"{own.total / 2**30:,.0f}" in row.split()
    assert {one["strategy"] for one in found["strategies"]} <= {
        line.split()[0] for line in lines if line
    }
    assert "this layout" not in "\n".join(explore_search.curves_text(swept(**JOB)))


def test_progress_rises_to_the_end() -> None:
    for view in (explore_search.ranking_view, explore_search.curves_view):
        told: list[float] = []
        view(JOB, told.append)
        assert told == sorted(told) and told[-1] == 1.0 and len(told) > 3


def test_the_page_asks_for_the_keys_that_a_search_depends_on() -> None:
    text = (document.STATIC / "slow.js").read_text("utf-8")
    said = re.search(r"const JOB = \[(.*?)\]", text)
    assert said is not None
    assert re.findall(r'"(\w+)"', said[1]) == list(JOB_KEYS)


START = {**JOB, "tp": "2", "pp": "2", "schedule": "1f1b", "zero": "1"}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A self-contained page's answers; the quick ones are only the questions themselves."""
    monkeypatch.setattr(explore, "searches", lambda: {"ranking": _ranked, "curves": _swept})
    monkeypatch.setattr(
        document, "_answer_or_refusal", lambda name, params, run: {"asked": (name, params)}
    )
    return document.offline_answers(START, None, silent)


def _ranked(params: dict[str, str], on_progress: Progress) -> dict[str, Any]:
    return ranked(**params)


def _swept(params: dict[str, str], on_progress: Progress) -> dict[str, Any]:
    return swept(**params)


def test_a_file_holds_what_one_change_of_explore_asks(table: dict[str, Any]) -> None:
    state = State.parse(START).params()
    view = document.answer("explore", state)
    options = [one for slider in view["sliders"].values() for one in slider["values"]]
    options += [one for select in view["choices"].values() for one in select]
    options += [{**one, "legal": True} for one in ranked(**JOB)["layouts"]]
    legal = [one["set"] for one in options if one["legal"]]
    assert len(legal) > 100
    for set_ in (*legal, {}):
        asked = {name: text for name, text in {**state, **set_}.items() if text != ""}
        assert table[document.answer_key("explore", asked)]["asked"] == ("explore", asked)
        # What is embedded is canonical: the answer's own state asks for the same again.
        assert State.parse(asked).params() == asked
    assert document.answer_key("explore", START) in table


def test_a_file_holds_the_slow_answers_of_its_job(table: dict[str, Any]) -> None:
    job = JOB | {"precision": "bf16"}
    assert table[document.answer_key("ranking", job)]["layouts"]
    assert table[document.answer_key("curves", job)]["strategies"]


def test_a_file_holds_every_panel_of_learn_within_bounds(table: dict[str, Any]) -> None:
    for name in document.LESSONS:
        held = [key for key in table if key.startswith(f"learn/{name}[")]
        assert document.answer_key(f"learn/{name}", {}) in held
        usual = {each: one.default for each, one in document.LESSONS[name].CHOICES.items()}
        assert document.answer_key(f"learn/{name}", usual) in held
        assert len(held) <= 451
    assert len(table) < 4000


def test_small_panels_are_whole_and_large_ones_two_changes_deep() -> None:
    def panel(num_choices: int) -> dict[str, Choice]:
        return {f"c{i}": Choice("", ("a", "b", "c"), "a") for i in range(num_choices)}

    def distinct(num_choices: int) -> set[str]:
        return {"".join(one.values()) for one in document._combinations(panel(num_choices))}

    assert len(distinct(3)) == 27
    large = distinct(8)
    assert len(large) == 1 + 8 * 2 + 28 * 4
    assert all(len(one) == 8 and one.count("a") >= 6 for one in large)
