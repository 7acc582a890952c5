"""Sentences beside a table of plans: every number in them is that of the table, or of the plan that
they name, estimated again on its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from fivefold.core import hardware as machine
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.planner.estimate import Estimate, estimate_plan
from fivefold.planner.neighbours import Neighbour, compare_neighbours
from fivefold.planner.planning import PlanResult, best_plans, plan_request
from fivefold.render import plan as plan_text
from fivefold.render import plan as plan_values
from fivefold.render.plan import RunCosts, ranked_answer

JOBS = (
    ("tiny", "laptop", 8, {}),
    ("tiny-moe", "h100", 4, {"batch": 16, "seq": 128}),
    ("llama-3.2-1b", "h100", 8, {}),
    ("llama-3.1-8b", "h100", 8, {}),
    ("llama-3.1-8b", "a100", 16, {"batch": 64}),
    ("llama-3.1-8b", "h100", 16, {"seq": 131_072, "batch": 16}),
    ("llama-3.1-70b", "h200", 32, {"batch": 64}),
    ("qwen3-30b-a3b", "h100", 16, {"batch": 64, "seq": 4096}),
    ("gpt3-175b", "a100", 64, {"batch": 64}),
    ("llama-2-7b", "a100-40g", 8, {"batch": 32}),
)
AMOUNT = re.compile(r"(equal, )?([\d.,]+) (ms|s) (slower|faster)")
IDS = [f"{model} {gpus} {name}" for model, name, gpus, _ in JOBS]


@cache
def searched(number: int) -> PlanResult:
    model, name, gpus, keys = JOBS[number]
    options = PlanOptions(model=model, machine=name, gpus=gpus, **keys)
    setting = {"precision": "bf16", "headroom": 0.05}
    return best_plans(plan_request(options, machine.load(name), {}, **setting), 6)


def said_difference(words: str) -> tuple[bool, float]:
    """Whether a sentence says equal, and by how many seconds it says that a step is longer."""
    if " as fast" in f" {words}":
        return True, 0.0
    found = AMOUNT.search(words)
    assert found is not None, words
    amount = float(found[2].replace(",", "")) * (1e-3 if found[3] == "ms" else 1.0)
    return found[1] is not None, amount if found[4] == "slower" else -amount


def is_near(said: float, seconds: float) -> bool:
    """As near as the digits that are printed."""
    return said == pytest.approx(seconds, rel=0.01, abs=6e-5) or abs(said - seconds) <= 0.0051


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(len(JOBS)), ids=IDS)
def test_the_table_and_its_sentences_agree(number: int) -> None:
    found = searched(number)
    table, lines = ranked_answer(found, RunCosts())
    json.dumps(table)
    first, *others = table["layouts"]
    fastest = min(one["step_s"] for one in (first, table["fastest"], *others))
    assert fastest == table["fastest"]["step_s"]
    for one in table["layouts"]:
        assert one["equal"] == (one["step_s"] <= (1 + table["equal_bar"]) * fastest)
        limit = found.request.setting.machine.memory / 2**30
        assert one["memory_gib"]["total"] <= limit and one["fits"] != "does not fit"
    assert first["equal"]
    marked = [line for line in lines if re.match(r"\d+ =  ", line)]
    assert len(marked) == sum(one["equal"] for one in table["layouts"])
    for one in others:
        equal, more = said_difference(one["because"][0])
        assert is_near(more, one["step_s"] - first["step_s"]), one["because"]
        assert equal <= one["equal"]
    head = first["because"][0]
    if first["step_s"] > fastest:
        assert head.startswith("equal to the fastest and simpler, ") and found.simpler in head
        assert plan_text.name_of(found.fastest) in head
        assert is_near(said_difference(head)[1], fastest - first["step_s"])
    elif others:
        assert head.startswith("the next best, ")
        assert is_near(said_difference(head)[1], others[0]["step_s"] - first["step_s"])


def neighbour_plan(chosen: Estimate, one: Neighbour) -> Estimate:
    """The neighbour as a plan of its own."""
    plan, layout = chosen.plan, one.layout
    assert layout is not None
    options = replace(
        plan.options,
        layout=str(layout),
        zero=layout.zero,
        chunks=layout.chunks,
        schedule=one.schedule or plan.options.schedule,
        recompute=one.recompute,
        microbatch_size=one.microbatch_size,
        microbatches=None,
        batch=plan.batch.sequences,
        stage_layers=None,
        ep_nodes=None,
        gather=None,
    )
    return estimate_plan(resolve(options), chosen.setting)


def told(chosen: Estimate, fastest: float) -> Iterator[tuple[Neighbour, str]]:
    """Each neighbour with the part of the sentence that is about it."""
    for found in compare_neighbours(chosen):
        if found.neighbours:
            text = plan_text.axis_text(found, chosen, fastest)
            parts = re.split(r"; (?=[^()]*(?:\(|$))", text.partition(": ")[2])
            assert len(parts) == len(found.neighbours), text
            yield from zip(found.neighbours, parts, strict=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(len(JOBS)), ids=IDS)
def test_neighbours_are_as_the_sentences_say(number: int) -> None:
    found = searched(number)
    first, fastest = found.plans[0], found.fastest.step
    setting = first.setting
    for one, words in told(first, fastest):
        if one.layout is None:
            assert "cannot be" in words
            continue
        other = neighbour_plan(first, one)
        assert one.over == pytest.approx(other.over, abs=2**20)
        if other.verdict == "does not fit":
            said = re.search(r"takes ([\d.,]+) GiB too much", words)
            assert said is not None, words
            assert float(said[1].replace(",", "")) == pytest.approx(other.over / 2**30, abs=0.1)
        elif other.over > 0:
            assert "is tight" in words
        else:
            equal, more = said_difference(words)
            assert is_near(more, other.step - first.step), (words, other.step, first.step)
            # No neighbour that the search could choose is faster than its fastest by more than the
            # microbatches that the search leaves out.
            assert other.step >= 0.999 * fastest or one.tier != setting.machine.tiers[0].name
            assert equal == first.accuracy.within(other.step, min(fastest, other.step))


def strategies(number: int) -> list[Any]:
    from fivefold.planner.comparisons import single_axis_strategies

    return list(single_axis_strategies(searched(number).request))


@pytest.mark.sample(0.5)
def test_no_axis_alone_beats_the_first_choice_by_more_than_estimates_can_tell() -> None:
    for number in (3, 4, 7):
        found = searched(number)
        for one in strategies(number):
            words = plan_values.drawback(one)
            if one.estimate is None:
                assert words == one.refused
            elif one.estimate.over <= 0:
                assert one.estimate.step >= 0.999 * found.fastest.step
            else:
                assert words.startswith(one.estimate.verdict)
                over = re.search(r"([\d.,]+) GiB above", words)
                assert over is not None
                said = float(over[1].replace(",", ""))
                assert said == pytest.approx(one.estimate.over / 2**30, abs=0.06)
