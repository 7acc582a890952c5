"""Explore: the state of the page, its sliders, and its numbers against the planner's own."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from hf_configs import CONFIGS
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.errors import FivefoldError, IllegalLayout
from fivefold.core.layout import rules
from fivefold.core.layout.layout import Layout
from fivefold.core.model import presets as models
from fivefold.core.plan import plan
from fivefold.cost.grid import RECOMPUTE
from fivefold.cost.traffic.collectives import TrafficEntry, traffic_json
from fivefold.planner.estimate import memory_by_pipeline_rank, rank_memory
from fivefold_page import document
from fivefold_page.explore import explore
from fivefold_page.explore.state import CONTEXTS, SCHEDULES, State

SMALL = {"model": "llama-7b", "gpus": "16", "tp": "2", "pp": "2", "batch": "64"}
SMALL |= {"schedule": "1f1b", "zero": "1"}
MIXED = {"model": "mixtral-8x7b", "gpus": "32", "tp": "2", "pp": "2", "ep": "8", "batch": "64"}
MIXED |= {"schedule": "1f1b", "zero": "1", "cp": "2"}
LLAMA = CONFIGS["llama-7b"]


# ---- the state


def test_the_default_is_the_layout_of_the_llama_run() -> None:
    state = State.parse({})
    assert str(state.layout()) == "dp=128 tp=8 pp=16"
    assert state.plan().layout.world == state.gpus == 16_384
    assert state.plan().batch.microbatches == 16


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "model": st.sampled_from(models.presets()),
            "gpus": st.integers(1, 1 << 20).map(str),
            "tp": st.integers(1, 64).map(str),
            "pp": st.integers(1, 64).map(str),
            "zero": st.sampled_from([*"0123"]),
            "schedule": st.sampled_from(SCHEDULES),
            "context": st.sampled_from(CONTEXTS),
            "recompute": st.sampled_from(RECOMPUTE),
            "tokens": st.floats(1, 1e20).map(str),
        },
    )
)
@settings(max_examples=60)
def test_params_are_canonical(params: dict[str, str]) -> None:
    state = State.parse(params)
    again = State.parse(state.params())
    assert again == state
    assert again.params() == state.params()


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"gpu": "8"}, "gpus"),
        ({"gpus": "-8"}, "gpus=-8: give a whole number from 1"),
        ({"gpus": "99999999999999999999"}, "give a whole number"),
        ({"tp": "1.5"}, "tp=1.5"),
        ({"model": "/etc/passwd"}, "unknown model"),
        ({"model": "../config.json"}, "unknown model"),
        ({"machine": "./machine.toml"}, "unknown machine"),
        ({"schedule": "/etc/passwd"}, "unknown schedule"),
        ({"schedule": "auto"}, "unknown schedule"),
        ({"tokens": "nan"}, "tokens=nan"),
        ({"tokens": "<script>"}, "give a number above 0"),
        ({"recompute": "all"}, "recompute 'all'"),
        ({"zero": "4"}, "unknown ZeRO stage"),
    ],
)
def test_bad_params_are_refused(params: dict[str, str], named: str) -> None:
    with pytest.raises(FivefoldError, match=_escaped(named)):
        explore.view(params)


def _escaped(text: str) -> str:
    return text.replace("(", r"\(").replace(".", r"\.").replace("+", r"\+")


def test_all_bad_params_are_told_at_once() -> None:
    with pytest.raises(FivefoldError, match=r"(?s)gpus=0.*zero=|gpus=0.*ZeRO"):
        State.parse({"gpus": "0", "zero": "9"})


# ---- a pasted config


def test_a_pasted_config_is_the_model() -> None:
    view = explore.view(SMALL | {"config": json.dumps(LLAMA)})
    preset = explore.view(SMALL)
    assert view["numbers"]["model"] == "pasted config"
    assert view["numbers"]["step"] == preset["numbers"]["step"]
    assert view["memory"] == preset["memory"]
    assert "model" not in view["state"]


def test_the_plan_of_a_pasted_config_is_read_beside_it(tmp_path: Path) -> None:
    view = explore.view(SMALL | {"config": json.dumps(LLAMA)})
    assert view["plan_toml"].startswith("# The model is the pasted config: save it as config.json")
    (tmp_path / "plan.toml").write_text(view["plan_toml"])
    (tmp_path / "config.json").write_text(view["config"])
    read = plan.resolve(plan.read(tmp_path / "plan.toml"))
    assert read.layout == State.parse(SMALL).plan().layout
    assert read.shape.width == 4096


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("hello", "not valid JSON"),
        ("[1, 2]", "one JSON object"),
        ("{" + '"a":{' * 10_000, "not valid JSON"),
        ('{"a":' + "[" * 100_000, "not valid JSON"),
        ("{" + " " * 10_000_000 + "}", "larger than 1 MB"),
        (json.dumps(LLAMA | {"hidden_size": -4096}), "hidden_size"),
        (json.dumps(LLAMA | {"hidden_size": float("nan")}), "hidden_size"),
        (json.dumps(LLAMA | {"rms_norm_eps": float("nan")}), "rms_norm_eps"),
        (json.dumps(LLAMA | {"num_hidden_layers": 10**40}), "num_hidden_layers"),
        (json.dumps(LLAMA | {"vocab_size": "<script>alert(1)</script>"}), "vocab_size"),
        (json.dumps({"model_type": "<img src=x onerror=alert(1)>"}), "model_type"),
    ],
)
def test_hostile_configs_are_refused(config: str, named: str) -> None:
    with pytest.raises(FivefoldError, match=named) as caught:
        explore.view({"config": config})
    assert len(str(caught.value)) < 5_000


# ---- sliders


@pytest.mark.parametrize("params", [{}, SMALL, MIXED], ids=["405b", "8b", "mixtral"])
def test_every_legal_value_leads_to_a_legal_job(params: dict[str, str]) -> None:
    state = State.parse(params)
    found = explore.sliders_view(state)
    assert [*found] == ["dp", "tp", "pp", "cp", "ep"]
    for axis, one in found.items():
        assert one["value"] == getattr(state, axis)
        assert [each["value"] for each in one["values"] if each["value"] == one["value"]]
        for each in one["values"]:
            assert each["legal"] == (not each["why"])
            if each["legal"]:
                other = State.parse(state.params() | each["set"])
                assert getattr(other, axis) == each["value"]
                assert other.gpus == state.gpus
                assert not other.problems()
                other.plan()


def test_degrees_are_paid_by_one_another() -> None:
    state = State.parse(SMALL)  # dp 4 · tp 2 · pp 2
    found = explore.sliders_view(state)
    sets = {axis: {each["value"]: each["set"] for each in found[axis]["values"]} for axis in found}
    assert sets["tp"][4] == {"tp": "4"}  # from dp, which is no key
    assert State.parse(SMALL | sets["tp"][4]).dp == 2
    assert sets["dp"][8] == {"pp": "1"}  # from pp first
    assert sets["dp"][2] == {"pp": "4"}
    no_pipeline = SMALL | {"pp": "1"}
    paid = explore.sliders_view(State.parse(no_pipeline))["dp"]["values"]
    assert next(each["set"] for each in paid if each["value"] == 16) == {"tp": "1"}


def test_a_refused_value_says_the_rule_itself() -> None:
    found = explore.sliders_view(State.parse({}))
    values = {each["value"]: each for each in found["tp"]["values"]}
    layout = Layout(shard=4, tp=256, pp=16, chunks=4)
    shape = models.load("llama-3.1-405b")
    assert values[256]["why"] in rules.problems(layout, shape, seq=8192)
    assert not values[256]["legal"]
    assert "microbatches must be a multiple" in values[4]["why"]


def test_chunks_follow_the_pipeline() -> None:
    alone = next(
        each for each in explore.sliders_view(State())["pp"]["values"] if each["value"] == 1
    )
    assert alone["set"] == {"pp": "1", "chunks": "1"}
    back = State.parse(State().params() | alone["set"])
    again = next(each for each in explore.sliders_view(back)["pp"]["values"] if each["value"] == 8)
    assert again["set"] == {"pp": "8", "chunks": "2"}


def test_options_say_what_they_change_and_why_not() -> None:
    state = State.parse(SMALL)
    found = explore.choices(state)
    assert {*found} <= {each.name for each in fields(State)}
    for key in ("zero", "schedule", "chunks", "context", "recompute", "microbatch_size"):
        assert str(getattr(state, key)) in [str(each["value"]) for each in found[key]]
        for each in found[key]:
            other = State.parse(state.params() | each["set"])
            assert each["legal"] == (not other.problems()) or not each["legal"]
    schedules = {each["value"]: each for each in found["schedule"]}
    assert schedules["interleaved"]["set"] == {"schedule": "interleaved", "chunks": "2"}
    zero3 = explore.choices(State.parse(SMALL | {"schedule": "pipedream"}))["zero"][3]
    assert "stores older versions of full weights" in zero3["why"]


def test_the_text_of_the_sliders_has_every_reason() -> None:
    lines = explore.sliders_text(explore.view({})["sliders"])
    assert any(line.startswith("dp  data") and "[128]" in line for line in lines)
    assert any("tp=256 to 1024: tp=256 does not divide heads 128" in line for line in lines)


# ---- what is shown


@pytest.mark.parametrize("params", [SMALL, MIXED], ids=["8b", "mixtral"])
def test_numbers_are_the_planners(params: dict[str, str]) -> None:
    view, found = explore.view(params), State.parse(params).estimate()
    one = view["numbers"]
    assert one["step"] == found.step
    assert one["mfu"] == found.mfu
    assert one["days"] == found.days(15.6e12)
    assert one["tokens_per_s"] == pytest.approx(found.plan.batch.tokens / found.step)
    assert view["memory"]["total"] == found.total
    assert view["memory"]["limit"] == found.setting.machine.memory
    assert sum(view["memory"]["fullest"].values()) == pytest.approx(found.total, abs=100)
    assert sum(view["time"]["parts"].values()) == pytest.approx(found.step)
    assert view["time"]["parts"] == found.breakdown()


def test_memory_of_every_place_is_that_of_its_ranks() -> None:
    state = State.parse(MIXED)
    job, setting = state.plan(), state.setting()
    for place, held in enumerate(memory_by_pipeline_rank(job, setting)):
        assert held == rank_memory(job, setting, job.layout.rank(pp=place))
    view = explore.view(MIXED)["memory"]
    for place, one in enumerate(view["places"]):
        parts = [sizes[place] for sizes in view["parts"].values()]
        assert sum(parts) == pytest.approx(one["total"], abs=10)
    assert [one["layers"] for one in view["places"]] == ["layers 0–15", "layers 16–31"]


def test_the_fullest_rank_is_the_fullest_place() -> None:
    view = explore.view({})["memory"]
    assert max(one["total"] for one in view["places"]) == pytest.approx(view["total"], rel=1e-6)
    assert max(range(16), key=lambda i: view["places"][i]["total"]) > 0  # not that of the embedding


def test_traffic_is_what_the_runtime_records() -> None:
    view = explore.pictures(MIXED)["traffic"]
    wanted = traffic_json(State.parse(MIXED).plan())
    assert wanted is not None
    assert sum(row["calls"] for row in view["rows"]) == sum(one["count"] for one in wanted)
    assert sum(row["bytes"] for row in view["rows"]) == sum(
        one["count"] * one["bytes"] for one in wanted
    )
    tiers = {row["axis"]: row["tier"] for row in view["rows"]}
    assert tiers["tp"] == "nvlink"
    assert tiers["world"] == "network"
    assert {row["dimension"] for row in view["rows"]} == {"tp", "cp", "ep", "dp", "pp", "all"}


def test_a_part_of_an_axis_is_told_with_its_own_links() -> None:
    params = {"model": "mixtral-8x7b", "gpus": "64", "tp": "16", "pp": "1", "ep": "4", "batch": "8"}
    rows = explore.pictures(params)["traffic"]["rows"]
    (replica,) = (row for row in rows if row["axis"] == "replica")  # pairs with the same KV heads
    assert (replica["dimension"], replica["group"], replica["tier"]) == ("tp", 2, "nvlink")
    assert {row["tier"] for row in rows if row["axis"] == "tp"} == {"network"}


def test_an_all_reduce_sends_what_its_two_halves_send() -> None:
    whole = TrafficEntry("dp", "all_reduce", 3, 800, 8)
    scattered = TrafficEntry("dp", "reduce_scatter", 3, 800, 8)
    gathered = TrafficEntry("dp", "all_gather", 3, 100, 8)
    assert whole.sent == scattered.sent + gathered.sent == 3 * 2 * 700


def test_an_asynchronous_schedule_says_why_it_has_no_traffic() -> None:
    params = SMALL | {"schedule": "pipedream"}
    view = explore.view(params) | explore.pictures(params)
    assert view["traffic"]["rows"] == []
    assert "asynchronous" in view["traffic"]["refused"]
    assert "asynchronous" in " ".join(explore.PANELS["traffic"].text(view["traffic"]))
    assert any("ASYNCHRONOUS" in note for note in view["numbers"]["notes"])


def test_the_plan_file_resolves_to_the_same_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(explore.view(MIXED)["plan_toml"])
    again, here = plan.resolve(plan.read(path)), State.parse(MIXED).plan()
    assert (again.layout, again.batch, again.shape) == (here.layout, here.batch, here.shape)
    assert tomllib.loads(path.read_text())["machine"] == "h100"


# ---- jobs that cannot be


def test_an_illegal_job_says_why_and_what_is_near() -> None:
    view = explore.view({"model": "llama-3.1-8b", "tp": "3"})
    assert "numbers" not in view
    reasons = view["problem"]["reasons"]
    assert any("tp=3 does not divide heads 32" in one for one in reasons)
    assert len(view["problem"]["nearest"]) == 3
    for near in view["problem"]["nearest"]:
        assert explore.view(view["state"] | near["set"])["problem"] is None
    with pytest.raises(IllegalLayout, match="tp=3 does not divide heads 32"):
        document.answers("explore", view["state"], None, None, lambda share: None)


def test_learned_positions_are_cut_first() -> None:
    view = explore.view({"model": "gpt2"})
    assert view["problem"]["nearest"][0]["label"].startswith("seq=1024 ")
    assert explore.view(view["state"] | view["problem"]["nearest"][0]["set"])["problem"] is None


def test_gpus_that_no_layout_divides() -> None:
    view = explore.view(SMALL | {"gpus": "17"})
    assert any("but there are 17 GPUs" in one for one in view["problem"]["reasons"])


# ---- text and size


@pytest.mark.parametrize("params", [{}, SMALL, MIXED])
def test_texts_fit_a_terminal_and_say_the_same_numbers(params: dict[str, str]) -> None:
    found = document.answers("explore", params, "traffic", None, lambda share: None)
    view, lines = found["explore"], list(document.lines(found, None))
    assert max(map(len, lines)) <= 100
    words = "\n".join(lines)
    assert f"MFU       {view['numbers']['mfu']:.1%}" in words
    assert f"{view['memory']['total'] / 2**30:,.1f} GiB of" in words
    assert f"{view['traffic']['rows'][0]['calls']:,}" in words


def test_the_answer_is_small_and_plain_json() -> None:
    answer = json.dumps(explore.view({}), allow_nan=False)
    assert len(answer) < 150_000


def test_a_page_runs_no_code_of_its_visitors(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("raise SystemExit('it ran')\n")
    for keys in ({"also": f"mixer={code}:Any"}, {"schedule": f"{code}:any"}):
        with pytest.raises(FivefoldError, match=r"runs no code|unknown schedule"):
            State.parse({"model": "tiny", **keys})
