"""`plan` with a machine: the JSON contract, the sentences, and what bad input gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fivefold as ff
from fivefold.cli import main
from fivefold.commands.job import given_job
from fivefold.commands.search import search, with_first_choice
from fivefold.core.errors import FivefoldError
from fivefold.core.hardware import presets
from fivefold.core.plan.plan import options_from, read, resolve

SMALL = ("plan", "llama-3.1-8b", "--machine", "h100", "--gpus", "16", "--batch", "64")
KNOWN = ", ".join(presets())
MEMORY = {"weights", "gradients", "master", "optimizer", "activations", "logits", "total"}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    output = capsys.readouterr()
    assert stop.value.code == 0, output.err
    return output.out


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(run(capsys, *words, "--json"))


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    output = capsys.readouterr()
    assert stop.value.code == 2 and not output.out and "Traceback" not in output.err
    return output.err


def test_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    table = run_json(capsys, *SMALL, "--set", "top=4")
    assert table["candidates"] > 1000 and table["seconds"] > 0
    assert len(table["layouts"]) == 4
    first, *others = [one["step_s"] for one in table["layouts"]]
    assert others == sorted(others)
    fastest, bar = table["fastest"]["step_s"], 1 + table["equal_bar"]
    assert min(first, *others) == fastest and first <= bar * fastest
    for one in table["layouts"]:
        assert one["memory_gib"].keys() >= MEMORY
        parts = [size for name, size in one["memory_gib"].items() if name != "total"]
        assert sum(parts) == pytest.approx(one["memory_gib"]["total"])
        assert one["memory_gib"]["total"] <= 0.95 * 79.2
        assert sum(one["time_s"].values()) == pytest.approx(one["step_s"])
        tokens = 64 * 8192 / one["step_s"] / 16
        assert one["tokens_per_s_per_gpu"] == pytest.approx(tokens)
        assert 0 < one["mfu"] < 1 and 0 <= one["bubble"] < 1 and one["because"]
        assert {"zero", "schedule", "chunks", "microbatch_size", "recompute"} <= one.keys()
        assert one["equal"] == (one["step_s"] <= bar * fastest) and one["fits"] != "does not fit"
        off = one["error_bar"]
        assert 0 < off["time"] < off["time_p90"] < 1 and 0 < off["memory"] < 1
        for end in (one["step_s_low"], one["step_s_high"]):  # shares are of measured times
            assert abs(one["step_s"] / end - 1) == pytest.approx(off["time_p90"])
        assert one["step_s_low"] < one["step_s"] < one["step_s_high"]
    fronts = table["front"]
    assert [one["step_s"] for one in fronts] == sorted(one["step_s"] for one in fronts)[::-1]


def test_the_best_is_written_and_read_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.toml"
    best = run_json(capsys, *SMALL, "--set", "top=1", "-o", str(path))["layouts"][0]
    (again,) = run_json(capsys, "plan", str(path))["layouts"]
    for key in ("layout", "zero", "schedule", "step_s", "mfu", "memory_gib", "recompute"):
        assert again[key] == best[key]


@pytest.mark.parametrize("words", [("--gpus", "4", "--batch", "12"), ("--layout", "dp=2 pp=2")])
def test_a_plan_for_a_budget_of_tokens_has_its_steps(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Its file has the steps and the batch that they assume, and names what is not planned."""
    path, tokens = tmp_path / "plan.toml", 3.3e12
    run(
        capsys,
        "plan",
        "tiny",
        "--machine",
        "h100",
        *words,
        "--tokens",
        str(tokens),
        "-o",
        str(path),
    )
    options = read(path)
    batch, steps = resolve(options).batch, options.train.steps
    assert options.batch == batch.sequences and options.seq == batch.seq
    assert 0 <= steps * batch.tokens - tokens < batch.tokens
    text = path.read_text("utf-8")
    assert f"{steps:,} steps of {batch.sequences:,} sequences of {batch.seq:,} tokens" in text
    assert "# still yours: data, tokenizer, saves, learning rate\n" in text
    other = resolve(options_from(str(path), {"layout": "dp=2 tp=2", "microbatch_size": 1}))
    assert other.batch.sequences == batch.sequences
    run(capsys, "plan", str(path), "--set", "data=tokens save_every=100 lr=3e-4", "-o", str(path))
    assert "still yours" not in path.read_text("utf-8")
    with pytest.raises(FivefoldError, match="leave one out"):
        ff.plan("tiny", layout="dp=2", tokens=1e9, steps=100)


def test_what_is_fixed_stays(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--set", "fix=tp=4 pp=2 schedule=zb-v", "--recompute", "full", "--zero", "1")
    for one in run_json(capsys, *SMALL, *words)["layouts"]:
        assert "tp=4" in one["layout"] and "pp=2" in one["layout"]
        assert (one["schedule"], one["recompute"], one["zero"]) == ("zb-v", "full", 1)


def test_every_sentence_has_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    """A neighbour that is said to be too large is too large, by as much as is said."""
    words = ("plan", "llama-3.1-70b", "--machine", "h100", "--layout", "dp=4", "tp=8", "pp=2")
    words = (*words, "--zero", "1", "--batch", "64", "--recompute", "full")
    (one,) = run_json(capsys, *words)["layouts"]
    (zero,) = (text for text in one["because"] if text.startswith("ZeRO-1"))
    other = run_json(capsys, *words, "--zero", "0")["layouts"][0]
    over = other["memory_gib"]["total"] - 0.95 * 79.18
    if over > 0:
        said = float(zero.split("ZeRO-0 takes ")[1].split(" GiB")[0])
        assert said == pytest.approx(over, abs=0.2)
    else:
        assert "ZeRO-0 is" in zero
    assert any(text.startswith("tp=8 within nvlink (8 GPUs): ") for text in one["because"])
    assert any("tp=16 over network" in text for text in one["because"])


def test_people_get_a_table_bars_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *SMALL, "--set", "top=3", "--tokens", "1e12", "--set", "price=2")
    wanted = ("layouts estimated", "tokens/s/GPU", "activations", "GPU-hours", "why  ", "front")
    for words in wanted:
        assert words in text
    hours = run_json(capsys, *SMALL, "--set", "top=1", "--tokens", "1e12", "--set", "price=2")[
        "run"
    ]
    assert hours["price"] == pytest.approx(2 * hours["gpu_hours"])
    assert hours["gpu_hours"] == pytest.approx(hours["days"] * 24 * 16)


def test_each_dimension_alone(capsys: pytest.CaptureFixture[str]) -> None:
    table = run_json(capsys, *SMALL, "--compare")["strategies"]
    names = [one["strategy"] for one in table]
    assert names == ["DP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "TP", "TP+SP", "PP", "CP"]
    weights = {one["strategy"]: one["estimate"]["memory_gib"]["weights"] for one in table}
    assert weights["ZeRO-3"] == pytest.approx(weights["DP"] / 16, rel=0.01)
    assert "tp" in {each["axis"] for one in table[4:5] for each in one["collectives"]}
    assert all(one["drawback"] for one in table)
    assert "DP: " in run(capsys, *SMALL, "--compare")


def test_curves(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--sweep", "seq=8k..32k", "--set", "fix=recompute=full")
    points = run_json(capsys, *words)["points"]
    assert {one["seq"] for one in points} == {8192, 16384, 32768}
    best = {
        (one["strategy"], one["seq"]): one["estimate"]["tokens_per_s_per_gpu"]
        for one in points
        if one["fits"]
    }
    for (_, seq), speed in best.items():
        assert speed <= best["all", seq] * 1.02
    assert "tokens/s/GPU along seq" in run(capsys, *words)


def test_what_if(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = run_json(capsys, *SMALL, "--set", "what_if=gpus=2x")["layouts"]
    assert after["step_s"] < before["step_s"]
    layout = ("plan", "llama-3.1-8b", "--machine", "h100", "--layout", "dp=8", "tp=2")
    _, after = run_json(capsys, *layout, "--batch", "64", "--set", "what_if=gpus=2x")["layouts"]
    assert after["layout"] == "dp=16 tp=2"


def test_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    fewest = run_json(capsys, *SMALL, "--set", "top=1", "--set", "objective=gpus")
    assert fewest["gpus"] < 16
    cheapest = run_json(capsys, *SMALL, "--set", "top=1", "--set", "objective=gpu-hours")
    fastest = run_json(capsys, *SMALL, "--set", "top=1")
    speeds = [t["layouts"][0]["tokens_per_s_per_gpu"] for t in (cheapest, fastest)]
    assert speeds[0] >= speeds[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "llama-3.1-405b", "--machine", "h100", "--gpus", "8"], "it takes "),
        (
            ["plan", "tiny", "--machine", "h101", "--gpus", "8"],
            f"h100? known machines: {KNOWN}. Describe",
        ),
        (["plan", "tiny", "--machine", "nowhere"], f"'nowhere': known machines: {KNOWN}. Describe"),
        (["plan", "llama-3.1-70b", "--machine", "h100", "--gpus", "1"], "on 1 GPU of h100 does"),
        ([*SMALL, "--set", "fix=offload=disk"], "choose from cpu, none, nvme"),
        (
            ["plan", "tiny", "--machine", "tpu-v4", "--gpus", "4", "--set", "fix=offload=nvme"],
            "give host.nvme_bytes",
        ),
        ([*SMALL, "--set", "fix=tb=8"], "choose from chunks"),
        ([*SMALL, "--set", "fix=tp=x"], "as in tp=8"),
        ([*SMALL, "--set", "fix=tp=5"], "no legal layout with tp=5"),
        ([*SMALL, "--set", "fix=dp=3"], "no legal layout with dp=3"),
        ([*SMALL, "--set", "fix=recompute=some"], "choose none, selective, full, full:K"),
        ([*SMALL, "--set", "objective=money"], "choose from"),
        ([*SMALL, "--set", "headroom=1"], "headroom 1.0"),
        ([*SMALL, "--set", "top=0"], "top 0"),
        ([*SMALL, "--tokens", "-1"], "--tokens -1.0"),
        ([*SMALL, "--sweep", "pp=1..8"], "seq=4k..1m"),
        ([*SMALL, "--sweep", "seq=8k..4k"], "a lower and a higher number"),
        ([*SMALL, "--set", "what_if=gpu=2x"], "did you mean gpus"),
        ([*SMALL, "--set", "what_if=gpus=1.01x"], "not a whole number"),
        ([*SMALL, "--set", "stage_layers=1,2"], "is for a given layout"),
        ([*SMALL, "--precision", "fp9"], "did you mean"),
        (["plan", "tiny", "--tokens", "1e9"], "name the machine with --machine"),
        (
            ["plan", "gpt2", "--machine", "h100", "--gpus", "8", "--seq", "4096"],
            "learned positions",
        ),
        (
            ["plan", "tiny", "--machine", "h100", "--layout", "dp=2", "--set", "fix=tp=2"],
            "a search",
        ),
        (["plan", "tiny", "--machine", "h100", "--layout", "dp=4", "--batch", "6"], "multiple"),
    ],
)
def test_bad_input_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert says in refuse(capsys, *words)


# --- GPUs without a layout: a search, whatever else the plan file says


def test_gpus_reopen_the_layout_of_a_plan_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Another number of GPUs than the file's layout has is a question, not a contradiction."""
    file = str(tmp_path / "plan.toml")
    run(capsys, "plan", "tiny", "--layout", "dp=1", "--microbatch-size", "3", "-o", file)
    table = run_json(capsys, "plan", file, "--gpus", "4", "--machine", "laptop")
    assert table["candidates"] > 10 and table["layouts"][0]["layout"] == "dp=4"
    assert table["batch"] == 8  # 6 in the file
    same = run_json(capsys, "plan", file, "--gpus", "1", "--machine", "laptop")
    assert same["candidates"] <= 1 and same["layout"] == "dp=1"
    for verb in ("plan", "rehearse", "verify"):
        said = refuse(capsys, verb, file, "--gpus", "4")
        assert "machine" in said and "dp=4" in said and "impossible" not in said
    typed = refuse(capsys, "plan", file, "--gpus", "4", "--layout", "dp=1")
    assert 'impossible layout "dp=1"' in typed


@pytest.mark.parametrize("verb", ["plan", "rehearse", "verify"])
def test_gpus_without_a_layout_ask_for_the_machine(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    said = refuse(capsys, verb, "tiny", "--gpus", "8")
    assert "machine" in said and 'layout "dp=8"' in said.replace(", such as", "")


def test_a_job_with_gpus_gets_the_first_choice() -> None:
    """What `rehearse` and `verify` run where no layout is given."""
    keys = {"gpus": 4, "machine": "laptop", "seq": 128}
    options = with_first_choice(given_job("tiny", keys))
    assert options.layout == search("tiny", **keys).plan.options.layout == "dp=4"
    assert with_first_choice(given_job("tiny", {**keys, "layout": "tp=4"})).layout == "tp=4"
