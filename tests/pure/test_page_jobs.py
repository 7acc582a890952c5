"""Another job in Explore: the planner's best is loaded, and no job is a dead end."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import combinations, product
from math import dist
from pathlib import Path
from typing import Any

import pytest

from fivefold import cli
from fivefold.core import hardware as machine
from fivefold.core.model import presets as models
from fivefold.core.plan.plan import PlanOptions
from fivefold.cost.memory.categories import verdict
from fivefold.planner.planning import NothingFits, best_plans
from fivefold.render.pipeline import KINDS, OVERLAPPED
from fivefold_page import document, timeline
from fivefold_page.explore import explore
from fivefold_page.explore import search as explore_search
from fivefold_page.explore.state import (
    _LEAN,
    State,
    chosen_state,
    job_params,
    nothing_fits,
    request_of,
    requested_state,
    state_of,
    typed,
)
from tests.selection import shuffled

GPUS = (1, 2, 3, 8, 12, 16, 64, 100, 256, 1024, 4096, 16_384)
FEWEST_TELLING = 12  # of CIE76: less is hard to tell apart in small areas


def silent(share: float) -> None:
    """Nobody looks."""


def shown(params: dict[str, str]) -> dict[str, Any]:
    """What the page shows for these params; "" takes a key away."""
    return explore.view({key: text for key, text in params.items() if text})


def arrive(params: dict[str, str], ways: int = 1) -> State:
    """The state that the page comes to: the planner's best, or where its first button leads."""
    job = requested_state(params)
    asked = request_of(job)
    try:
        best = best_plans(asked, 1).plans[0]
    except NothingFits as refused:
        assert ways, f"a button of the page leads to a job without a layout: {refused}"
        found = nothing_fits(job, asked, refused)
        if found["lean"] is not None:
            view = shown({**job_params(job), **found["lean"]})
            assert view["problem"] is None
            assert view["numbers"]["total"] > view["numbers"]["usable"]
        return arrive({**params, **found["ways"][0]["set"]}, ways - 1)
    return chosen_state(job, best)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "gpus"), [*product(models.presets(), GPUS)])
def test_no_job_is_a_dead_end(model: str, gpus: int) -> None:
    """From the landing page, with another model and another number of GPUs."""
    view = shown(arrive({**State().params(), "model": model, "gpus": str(gpus)}).params())
    assert view["problem"] is None
    assert view["numbers"]["total"] <= view["numbers"]["usable"]
    assert view["memory"]["total"] <= view["memory"]["usable"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", machine.presets())
def test_no_machine_is_a_dead_end(name: str) -> None:
    view = shown(arrive({**State().params(), "machine": name}).params())
    assert view["problem"] is None and view["numbers"]["total"] <= view["numbers"]["usable"]


def test_a_batch_that_no_layout_divides_is_a_way_on() -> None:
    """Of 101 GPUs no number divides layers, heads or one sequence."""
    params = {"model": "tiny", "gpus": "101", "batch": "1", "seq": "64"}
    found = explore_search.ranking_view(params, silent)
    assert "no legal layout" in found["refused"] and found["lean"] is None
    labels = [one["label"] for one in found["ways"]]
    assert labels[:2] == ["a batch of 101 sequences", "64 GPUs"]
    for way in found["ways"][:2]:
        assert arrive({**params, **way["set"]}, ways=0).estimate().over <= 0


def test_what_fits_nowhere_is_shown_with_its_leanest_layout() -> None:
    params = {"model": "llama-3.1-405b", "gpus": "64", "batch": "64"}
    found = explore_search.ranking_view(params, silent)
    first, *lean, last = (one["label"] for one in found["ways"])
    assert (first, last) == ("128 GPUs", "llama-3.1-405b on 16,384 GPUs of h100")
    assert {*lean} <= {*_LEAN}
    view = shown({**found["job"], **found["lean"]})
    assert view["numbers"]["verdict"] == "does not fit"
    needs = f"needs {view['numbers']['total'] / 2**30:,.1f} GiB"
    assert needs in found["refused"]


def test_one_gpu_is_offered_offload_and_adapters() -> None:
    found = explore_search.ranking_view({"model": "llama-3.1-8b", "gpus": "1"}, silent)
    lean = {one["label"]: one["set"] for one in found["ways"][1:-1]}
    assert lean == {label: {"also": key} for label, key in _LEAN.items()}
    for change in lean.values():
        state = arrive({"model": "llama-3.1-8b", "gpus": "1", **change}, ways=0)
        view = shown(state.params())
        assert view["numbers"]["verdict"] == "fits" and change["also"] in view["command"]


def test_another_model_brings_its_own_sequences_batch_and_tokens() -> None:
    """From any model, and as the first: what nobody typed is that of the model."""
    state = state_of(PlanOptions("llama-3.1-405b")).params()
    for name in shuffled(models.presets()):
        state = State.parse({**state, "model": name}).params()
        alone = requested_state({"model": name})
        assert {**state} == {**state, **{key: str(vars(alone)[key]) for key in ("seq", "batch")}}
        assert float(state["tokens"]) == alone.tokens and "tokens" in alone.derived


def test_what_was_typed_stays_or_is_said() -> None:
    opened = state_of(PlanOptions("llama-3.1-405b")).params()
    change = typed(State.parse(opened), {"seq": "4096"})
    assert change == {"seq": "4096", "derived": "batch tokens"}
    state = {**opened, **change, "gpus": "8"}
    assert State.parse({**state, "model": "deepseek-v3"}).seq == 4096
    job, derived = (requested_state({**each, "model": "gpt2"}) for each in (state, opened))
    assert job.seq == derived.seq == 1024
    found = explore_search.ranking_view({**state, "model": "gpt2"}, silent)
    assert "sequences are cut to 1,024 tokens" in found["notes"]


def test_a_plan_that_names_its_batch_keeps_it() -> None:
    options = PlanOptions("llama-3.1-8b", "dp=8", machine="h100", batch=64, seq=4096)
    state = state_of(options)
    assert state.derived == "tokens"
    other = State.parse({**state.params(), "model": "qwen3-8b"})
    assert (other.batch, other.seq) == (64, 4096) and other.tokens != state.tokens


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_the_page_keeps_typed_and_derived_apart_and_no_note_under_a_legal_value(
    tmp_path: Path,
) -> None:
    """The two functions of the scripts that decide it, in node."""
    scripts = [
        re.sub(r"^import .*$", "", (document.STATIC / name).read_text("utf-8"), flags=re.M)
        for name in ("address.js", "slider.js")
    ]
    script = tmp_path / "page.mjs"
    script.write_text(
        "globalThis.addEventListener = () => {};\n"
        + "\n".join(scripts)
        + """
const typed = merged({ seq: "8192", derived: "batch seq tokens" }, { seq: "4096", also: "" });
const [no, yes] = [{ value: 3, legal: false, why: "heads" }, { value: 3, legal: true }];
const notes = [[no, yes], [yes], [yes, yes]].map((values) => note("tp", values, 3));
console.log(JSON.stringify([typed, notes]));
"""
    )
    done = subprocess.run(["node", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        {"seq": "4096", "derived": "batch tokens"},
        ["tp=3 cannot be: heads", "tp can only be 1 for this model", ""],
    ]


def test_learned_positions_cut_the_sequences_of_another_model() -> None:
    found = explore_search.ranking_view({**State().params(), "model": "gpt2", "gpus": "8"}, silent)
    assert found["job"]["seq"] == "1024"
    assert "sequences are cut to 1,024 tokens" in found["notes"]
    assert found["layouts"][0]["verdict"] != "does not fit"


@pytest.mark.nightly
def test_the_landing_page_shows_the_planners_best_at_the_degrees_of_the_run() -> None:
    request, run = request_of(State()), {"dp": 128, "tp": 8, "pp": 16, "cp": 1}
    fixed = {**(request.space.fixed or {}), **run}
    result = best_plans(replace(request, space=replace(request.space, fixed=fixed)), 1)
    assert State() == chosen_state(State(), result.plans[0])
    assert result.plans[0].verdict != "does not fit"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_verdict_and_bytes_are_the_same_in_every_panel(recompute: str) -> None:
    state = replace(State(), recompute=recompute)
    found = state.estimate()
    view = explore.view(state.params()) | explore.pictures(state.params())
    chip, usable = machine.load(state.machine), found.setting.capacity
    named = verdict(found.total, usable, chip)  # pyright: ignore[reportArgumentType]
    assert view["numbers"]["verdict"] == str(named)
    totals = {view["numbers"]["total"], view["memory"]["total"], view["curves"]["now"]}
    assert totals == {found.total}
    assert view["memory"]["headline"].endswith(f": {view['numbers']['verdict']}")


def test_the_bubble_is_the_same_in_every_panel() -> None:
    state = State()
    view = explore.view(state.params()) | explore.pictures(state.params())
    bubble = view["numbers"]["bubble"]
    assert view["timeline"]["bubble"] == bubble
    assert view["time"]["parts"]["bubble"] / view["time"]["step"] == pytest.approx(bubble)
    said = f"bubble {bubble:.1%} of the step"
    assert said in view["timeline"]["headline"]
    assert said in "\n".join(timeline.text(view["timeline"])).replace("\n", " ")


@pytest.mark.parametrize(
    "state",
    [
        State(),
        State(model="mixtral-8x7b", gpus=32, tp=2, cp=2, pp=1, ep=8, batch=64, chunks=1),
        State(model="tiny", gpus=4, tp=2, pp=1, chunks=1, batch=8, seq=64, also="layers=4"),
    ],
    ids=lambda state: state.model,
)  # fmt: skip
def test_the_shared_command_prints_the_same_plan(state: State) -> None:
    found = explore.view(state.params())
    words = shlex.split(found["command"])
    assert words[:2] == ["fivefold", "plan"]
    with redirect_stdout(StringIO()) as out:
        assert not cli.run([*words[1:], "--json"])
    (said,) = json.loads(out.getvalue())["layouts"]
    assert said["step_s"] == pytest.approx(found["numbers"]["step"])
    assert said["memory_gib"]["total"] * 2**30 == pytest.approx(found["numbers"]["total"])


def lab(colour: str) -> tuple[float, float, float]:
    """A colour as CIE L*a*b*, in which distances are what eyes tell apart."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
    )
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    scaled = [
        (row[0] * red + row[1] * green + row[2] * blue) / one
        for row, one in zip(rows, white, strict=True)
    ]
    x, y, z = (each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116 for each in scaled)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_one_colour_has_one_meaning() -> None:
    text = (Path(document.STATIC) / "colours.js").read_text("utf-8")
    looks = re.search(r"const LOOKS = \{(.*?)\};", text, re.S)
    assert looks is not None
    named = dict(re.findall(r'(\w+): \["(#[0-9a-f]{6})"', looks[1]))
    assert {"tp", "cp", "dp", "pp", "ep", "weights", "bubble", "limit", "here"} <= named.keys()
    named |= {kind.name: kind.colour for kind in (*KINDS.values(), OVERLAPPED)}
    near = [
        (one, other)
        for one, other in combinations(named, 2)
        if dist(lab(named[one]), lab(named[other])) < FEWEST_TELLING
    ]
    assert not near
