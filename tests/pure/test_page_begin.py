"""Where Explore begins: plans and command lines as states, and what the verb refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from fivefold import cli
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.schedule.catalog import FAMILIES
from fivefold.planner.planning import NothingFits, PlanRequest, PlanResult
from fivefold_page.explore import state as explore_state
from fivefold_page.explore.state import State, state_of

ROOT = Path(__file__).parents[2]
ODD = PlanOptions(
    "tiny-moe",
    "dp=4 tp=2 pp=2 ep=2 order=tp-cp-pp-dp",
    machine="h100",
    schedule="zb-h1",
    balance="aux",
    packed=True,
    seq=64,
    set={"layers": "4"},
)


def test_nothing_said_is_the_usual_job() -> None:
    assert state_of(PlanOptions("llama-3.1-405b")) == State()


def test_a_model_alone_gets_the_best_layout_of_one_node() -> None:
    state = state_of(PlanOptions("llama-3.1-8b"))
    assert (state.machine, state.gpus) == ("h100", 8)
    assert state.estimate().over <= 0
    assert state.tokens == pytest.approx(20 * 8.03e9, rel=0.01)


def test_a_model_larger_than_a_node_gets_as_many_gpus_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if a small one were: a search for a large one takes seconds."""
    search = explore_state.best_plans

    def best(asked: PlanRequest, top: int) -> PlanResult:
        if asked.space.gpus < 16:
            raise NothingFits("too large", gpus=16)
        return search(asked, top)

    monkeypatch.setattr(explore_state, "best_plans", best)
    assert state_of(PlanOptions("gpt2")).gpus == 16
    with pytest.raises(NothingFits):
        state_of(PlanOptions("gpt2", machine="h100", gpus=8))


@pytest.mark.parametrize(
    "options",
    [
        ODD,
        PlanOptions("tiny", "dp=2 tp=2", sp=False, precision="fp32", batch=8),
        PlanOptions(
            "llama-3.1-8b", "dp=2x4 tp=2 cp=2", machine="h100", context="ulysses", batch=64
        ),
        PlanOptions("tiny", "pp=2", stage_layers="3,5"),
    ],
    ids=["odd", "plain", "hybrid", "stages"],
)
def test_a_plan_is_looked_at_as_it_is(options: PlanOptions) -> None:
    plan, state = resolve(options), state_of(options)
    again = State.parse(state.params())
    assert again == state
    for part in ("shape", "layout", "batch", "recompute", "precision", "packed", "balance"):
        assert getattr(again.plan(), part) == getattr(plan, part), part
    assert again.plan().stages == plan.stages


def test_what_was_derived_is_derived_again() -> None:
    state = state_of(PlanOptions("tiny-moe", "dp=4 ep=2", machine="h100", zero=3))
    assert state.also == ""


def test_fp8_is_estimated_and_runs() -> None:
    options = PlanOptions("llama-3.1-8b", "dp=8", machine="h100", batch=64)
    fast, plain = state_of(options, "fp8"), state_of(options)
    assert fast.estimate().step < plain.estimate().step
    assert fast.plan().precision == "fp8"


def test_every_schedule_of_the_page_has_a_plan() -> None:
    for one in FAMILIES:
        chunks = one.chunks_on(2, None)
        state = State.parse(
            {"model": "tiny", "machine": "h100", "gpus": "2", "tp": "1", "pp": "2", "batch": "8"}
            | {"seq": "64", "schedule": one.name, "chunks": str(chunks), "zero": "1"}
        )
        assert state.problems() == [], one.name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "99999"], "0 to 65535"),
        (["--panel", "memory"], "add --text or --json"),
        (["--text", "--html", "page.html"], "choose one"),
        (["--set", "at=explore?tp=3", "--text"], "tp=3 does not divide"),
        (["--set", "at=nothing", "--text"], "tab in at"),
        (["--set", "at=run", "--text"], "name the run"),
        (["--text", "--panel", "nothing"], "unknown panel"),
        (["--text", "--machine", "nothing"], "unknown machine"),
        (["--text", "--precision", "fp9"], "fp8"),
        ([str(ROOT / "tests"), "--text"], "neither a run"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_the_verb_refuses(words: list[str], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2 and said in done.stderr


def test_json_is_what_pictures_are_made_of() -> None:
    done = run("tiny", "--layout", "dp=2", "--json", "--panel", "memory")
    found = json.loads(done.stdout)["explore"]
    assert found["memory"]["total"] == pytest.approx(
        sum(found["memory"]["fullest"].values()), abs=9
    )


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """The verb in this process: to start one takes longer than the answer."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = cli.run(["observe", *words])
    return subprocess.CompletedProcess(words, int(code or 0), out.getvalue(), err.getvalue())


def test_a_run_shows_memory_beside_the_plan_of_gpus_alone() -> None:
    example = run(str(ROOT / "examples/runs/llama-3.2-1b-h200"), "--json")
    curve = json.loads(example.stdout)["run"]["curves"]["memory_gib"]
    assert curve["ratio"] == pytest.approx(1, abs=0.01) and "times the plan" in curve["says"]


def test_a_run_whose_plan_is_damaged_is_still_shown(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples/runs/llama-3.2-1b-h200", tmp_path / "run")
    (tmp_path / "run" / "plan.toml").write_text("model = ")
    done = run(str(tmp_path / "run"), "--text")
    assert done.returncode == 0 and "plan.toml" in done.stdout and "302 ms" in done.stdout
