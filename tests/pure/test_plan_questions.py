"""`plan --set textbook=true`, `--budget`, `--table` and `--sweep tp`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from fivefold.cli import main
from fivefold.core.model.presets import load
from fivefold.core.plan.compute_budget import (
    Formula,
    TextbookJob,
    compute_optimal,
    equal_flops,
    nominal_parameters,
    parse_budget,
    textbook,
)

JOB = ("llama-3.1-8b", "--machine", "h100", "--gpus", "16", "--batch", "64")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *words])
    output = capsys.readouterr()
    assert stop.value.code == 0, output.err
    return output.out


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(run(capsys, *words, "--json"))


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *words])
    output = capsys.readouterr()
    assert stop.value.code == 2 and not output.out
    return output.err


def one(formulas: list[Formula], topic: str, name: str) -> float:
    (found,) = [each.value for each in formulas if (each.topic, each.name) == (topic, name)]
    return found


# --- Textbook


@pytest.mark.parametrize("model", ["70b", "llama-2-70b", "llama-3.1-70b"])
def test_70b_takes_14_gpus(capsys: pytest.CaptureFixture[str], model: str) -> None:
    table = run_json(capsys, model, "--set", "textbook=true")["textbook"]
    assert table["states_gb"] == pytest.approx(1120) and table["gpus"] == 14
    text = run(capsys, model, "--set", "textbook=true")
    assert "= 1,120 GB" in text and "= 14 GPUs" in text and "16 × 70e9" in text
    assert "= 280 GB" in text and "= 420 GB" in text  # 2Ψ and 3Ψ elements of 2 bytes


def test_zero_is_that_of_its_paper() -> None:
    """Figure 1 of 1910.02054: 7.5B on 64 ranks takes 120, 31.4, 16.6 and 1.9 GB."""
    found = textbook(TextbookJob("7.5B", 7.5e9, dp=64))
    values = [one(found, "states a GPU", name) for name in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")]
    assert values == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)


def test_activations_are_those_of_their_paper() -> None:
    """2205.05198, section 4: 5as/h is 80 for GPT-3; table 2's forms agree where they must."""
    shape = load("gpt3-175b")
    found = textbook(TextbookJob("GPT-3", 175e9, shape, seq=2048, microbatch_size=1, tp=8))
    topic = "activations a layer"
    scores, linear = one(found, topic, "the s×s scores"), one(found, topic, "all but the scores")
    assert scores / linear == pytest.approx(80 / 34)
    assert one(found, topic, "a layer") == pytest.approx(scores + linear)
    assert one(found, topic, "tp and sp") == pytest.approx((scores + linear) / 8)
    assert one(found, topic, "full recomputation") == pytest.approx(2 * 2048 * 12288 / 1e9)
    assert one(found, "activations", "nothing recomputed") == pytest.approx(96 * (scores + linear))


def test_a_name_says_the_size_where_it_is_about_right() -> None:
    sizes = {name: nominal_parameters(load(name)) for name in ("llama-65b", "gpt-1t", "tiny")}
    assert sizes["llama-65b"] == 65e9 and sizes["gpt-1t"] == 1e12 and 0 < sizes["tiny"] < 1e8
    assert nominal_parameters(load("mixtral-8x7b")) == pytest.approx(46.7e9, rel=0.01)
    assert nominal_parameters(load("qwen3-30b-a3b")) == 30e9


def test_a_layout_gives_its_degrees(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "llama-3.1-8b",
        "--set",
        "textbook=true",
        "--layout",
        "dp=4 tp=2 pp=2",
        "--microbatches",
        "6",
    )
    table = run_json(capsys, *words)["textbook"]
    assert table["degrees"] == {"dp": 4, "tp": 2, "pp": 2} and table["microbatches"] == 6
    assert "impossible layout" in refuse(
        capsys, "llama-3.1-8b", "--set", "textbook=true", "--layout", "dp=1 tp=3"
    )


def test_experts_count_by_what_is_active(capsys: pytest.CaptureFixture[str]) -> None:
    formulas = run_json(capsys, "mixtral-8x7b", "--set", "textbook=true")["textbook"]["formulas"]
    (flops,) = [each for each in formulas if each["name"] == "forward and backward"]
    assert flops["formula"] == "6Ψ_active" and flops["value"] == pytest.approx(6 * 12.9e9, rel=0.01)
    assert any(each["name"] == "ep: 4 all-to-alls" for each in formulas)


@pytest.mark.parametrize(
    "words", [("llama-3.1-70b", "--set", "textbook=true"), ("--set", "budget=1e24")]
)
def test_formulas_need_no_numpy(words: tuple[str, ...]) -> None:
    code = f"import sys; from fivefold.cli import run; run(['plan', *{words!r}]); "
    code += "sys.exit('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


# --- Budgets


def test_chinchilla_is_compute_optimal() -> None:
    """2203.15556: 70B and 1.4T tokens for 5.76e23 FLOPs."""
    found = compute_optimal(parse_budget("5.76e23"))
    assert found.parameters == pytest.approx(70e9, rel=0.02)
    assert found.tokens == pytest.approx(1.4e12, rel=0.02)
    assert 6 * found.parameters * found.tokens == pytest.approx(5.76e23)


def test_gpus_and_time_are_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    table = run_json(capsys, "--set", "budget=512 h100 30 days", "--set", "mfu=0.5")
    flops = 512 * 989.4e12 * 30 * 86_400 * 0.5
    assert table["budget"]["flops"] == pytest.approx(flops, rel=1e-3)
    best = table["compute_optimal"]
    assert best["tokens"] == pytest.approx(20 * best["parameters"])
    more = run_json(capsys, "--set", "budget=512 h100 30 days", "--set", "tokens_per_parameter=200")
    assert more["compute_optimal"]["parameters"] < best["parameters"]


def test_dense_and_moe_have_equal_flops() -> None:
    best = compute_optimal(parse_budget("3e24"))
    rows = equal_flops(best, "deepseek-v3")
    assert {row.kind for row in rows} == {"dense", "MoE"}
    for row in rows:
        assert 6 * row.active * row.tokens == pytest.approx(3e24)
    named = {row.name: row for row in rows}
    v3, dense = named["deepseek-v3"], named["compute-optimal, dense"]
    assert v3.active < 40e9 < 600e9 < v3.total
    assert v3.tokens > dense.tokens and v3.share > 1 and dense.share == pytest.approx(1)
    assert v3.states > dense.states


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--set", "budget=many"), "write FLOPs"),
        (("--set", "budget=-5"), "write FLOPs"),
        (("--set", "budget=512 h100 30 parsecs"), "write FLOPs"),
        (("--set", "budget=512 h1000 30 days"), "unknown machine"),
        (("--set", "budget=0 h100 30 days"), "above 0"),
        (("--set", "budget=1e24", "--set", "mfu=2"), "mfu 2"),
        (("--set", "budget=1e24", "--set", "tokens_per_parameter=0"), "tokens_per_parameter 0"),
        (("nothing-like-it", "--set", "budget=1e24"), "unknown model"),
        (("--set", "budget=1e24", "--gpus", "8"), "--gpus has no effect with --set budget"),
        (("tiny", "--set", "mfu=0.5"), "mfu is for budget"),
        (
            ("tiny", "--set", "textbook=true", "--zero", "1"),
            "--zero has no effect with --set textbook",
        ),
    ],
)
def test_bad_budgets(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    assert says in refuse(capsys, *words)


# --- Tables and sweeps


def test_zero3_or_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    table = run_json(capsys, *JOB, "--table", "zero3-or-pipeline")
    rows = {row["name"]: row["estimate"] for row in table["rows"]}
    assert rows["ZeRO-3 alone"]["layout"] == "dp=16" and rows["ZeRO-3 alone"]["zero"] == 3
    for name in ("pipeline alone", "pipeline, tp or cp"):
        assert "pp=" in rows[name]["layout"] and rows[name]["zero"] == 1
    assert rows["pipeline, tp or cp"]["step_s"] <= rows["pipeline alone"]["step_s"] * 1.001
    steps = {row["name"]: row["estimate"]["step_s"] for row in table["rows"] if row["fits"]}
    assert table["fastest"] == min(steps, key=steps.__getitem__)


def test_data_or_model(capsys: pytest.CaptureFixture[str]) -> None:
    table = run_json(capsys, *JOB, "--table", "data-or-model")
    rows = {row["name"]: row for row in table["rows"]}
    assert rows["data, ZeRO-3"]["estimate"]["layout"] == "dp=16"
    assert "dp=" not in rows["tensor and pipeline"]["estimate"]["layout"]
    best = rows["all dimensions"]["estimate"]["step_s"]
    assert all(row["estimate"]["step_s"] >= 0.99 * best for row in rows.values() if row["fits"])


def test_a_batch_that_is_too_small_for_data_ranks_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (*JOB[:-1], "8", "--table", "data-or-model")
    assert "16 data ranks cannot share 8 sequences a step" in run(capsys, *words)


def test_memory_techniques(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama-3.1-8b", "--machine", "h100", "--layout", "dp=8 tp=2", "--table", "memory")
    rows = {row["name"]: row for row in run_json(capsys, *words)["rows"]}
    assert rows["nothing saved"]["saved_gib"] == 0 == rows["nothing saved"]["added_s"]
    selective, full = rows["selective recomputation"], rows["full recomputation"]
    assert 0 < selective["saved_gib"] < full["saved_gib"]
    assert 0 < selective["added_s"] < full["added_s"]
    saved = [rows[f"ZeRO-{stage}"]["saved_gib"] for stage in (1, 2, 3)]
    assert saved == sorted(saved) and saved[0] > 0
    assert rows["sequence parallelism"]["saved_gib"] > 0
    assert rows["optimizer states in host memory"]["added_s"] > 0
    assert rows["the plan itself"]["estimate"]["zero"] == 3
    assert all(row["estimate"]["layout"] == "dp=8 tp=2" for row in rows.values())


def test_a_sweep_over_tp(capsys: pytest.CaptureFixture[str]) -> None:
    table = run_json(capsys, *JOB, "--sweep", "tp", "--set", "fix=recompute=none")
    assert table["axis"] == "tp"
    assert {point["tp"] for point in table["points"]} == {1, 2, 4, 8, 16}
    assert {point["strategy"] for point in table["points"]} == {"data+tensor", "all"}
    for point in table["points"]:
        words = point["estimate"]["layout"].split()
        assert point["tp"] == 1 or f"tp={point['tp']}" in words
    some = run_json(capsys, *JOB, "--sweep", "tp=2..4", "--set", "fix=recompute=none")
    assert {point["tp"] for point in some["points"]} == {2, 4}
    assert "tokens/s/GPU along tp" in run(
        capsys, *JOB, "--sweep", "tp=1..2", "--set", "fix=recompute=none"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*JOB, "--table", "prices"), "unknown --table"),
        (("llama-3.1-8b", "--table", "memory"), "name the machine"),
        ((*JOB, "--sweep", "tp=1..8", "--set", "fix=tp=2"), "leave one out"),
        ((*JOB, "--sweep", "pp=1..8"), "tp=1..8"),
    ],
)
def test_bad_tables(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    assert says in refuse(capsys, *words)
