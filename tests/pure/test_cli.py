"""The command line: contracts of JSON and exit codes, and what bad input gets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fivefold import __version__, cli
from fivefold.cli import gather_pairs, main
from fivefold.commands.options import in_precision
from fivefold.core.plan.plan import PlanOptions
from fivefold.core.tables import parse_count

SMALL = ("--stages", "2", "--microbatches", "4")
MOE = ("plan", "tiny-moe")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 0
    return capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(run(capsys, *words, "--json"))


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert not output.out
    assert "Traceback" not in output.err
    return output.err


def test_schedule_json_is_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    table = run_json(capsys, "schedule", "1f1b", "--stages", "4", "--microbatches", "8")
    assert table["bubble_ratio"] == pytest.approx(0.375)
    assert table["bubble_makespan"] == pytest.approx(9 / 33)
    assert table["bubble_span"] == pytest.approx(9 / 33)
    assert table["makespan"] == 33
    assert table["peak_activations"] == [4, 3, 2, 1]
    assert table["order"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]
    assert any("bubble_ratio" in sentence for sentence in table["because"])


def test_overlap_shortens_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("schedule", "dualpipe", "--stages", "4", "--microbatches", "16")
    plain = run_json(capsys, *words)
    shorter = run_json(capsys, *words, "--overlap", "0.8")
    pairs = sum("OVERLAP" in text for text in plain["order"][0])
    assert plain["ideal"] - shorter["ideal"] == pytest.approx(0.2 * 3 * pairs)
    assert shorter["makespan"] < plain["makespan"]


def test_asynchronous_schedules_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    table = run_json(capsys, "schedule", "pipedream", "--stages", "4", "--microbatches", "12")
    assert table["asynchronous"] is True
    assert table["weight_versions"] == [4, 3, 2, 1]
    assert table["bubble_steady"] == pytest.approx(0)
    text = run(capsys, "schedule", "pipedream-2bw", "--stages", "2", "--microbatches", "4")
    assert "ASYNCHRONOUS" in text


def test_auto_keeps_the_limit_and_says_where_from(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--stages", "4", "--microbatches", "12", "--memory-limit", "3", "--comm", "0.1")
    table = run_json(capsys, "schedule", "auto", *words)
    best = run_json(capsys, "schedule", "v-half", *words)
    assert max(table["peak_activations"]) <= 3
    assert table["makespan"] <= best["makespan"] + 1e-9
    assert table["origin"]


def test_pictures_and_traces_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    svg, trace = tmp_path / "a.svg", tmp_path / "a.json"
    words = ("schedule", "zb-h1", "--stages", "2", "--microbatches", "4")
    run(capsys, *words, "--svg", str(svg), "--trace", str(trace))
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    slices = [one for one in json.loads(trace.read_text())["traceEvents"] if one["ph"] == "X"]
    assert len(slices) == 2 * 4 * 3
    message = refuse(capsys, *words, "--svg", str(tmp_path / "none" / "a.svg"))
    assert "cannot write" in message


def test_a_schedule_file_runs_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    named = run_json(capsys, "schedule", "zb-v", "--stages", "3", "--microbatches", "6")
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(",".join(row) for row in named["order"]))
    assert run_json(capsys, "schedule", str(path))["makespan"] == named["makespan"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["schedule", "1f1c", "--stages", "4", "--microbatches", "8"], "did you mean 1f1b"),
        (["schedule", "1f1b", "--stages", "4"], "give --microbatches"),
        (["schedule", "1f1b", "--stages", "0", "--microbatches", "8"], "at least 1"),
        (["schedule", "1f1b", "--stagse", "4"], "--stages"),
        (["schedule", "dualpipe", "--stages", "3", "--microbatches", "8"], "must be even"),
        (
            ["schedule", "zb-v", "--stages", "2", "--microbatches", "4", "--chunks", "3"],
            "must be 2",
        ),
        (["schedule", "gpipe", "--stages", "2", "--microbatches", "4", "--times", "1,2"], "F,B,W"),
        (
            ["schedule", "gpipe", "--stages", "2", "--microbatches", "4", "--times", "0,1,1"],
            "above",
        ),
        (["schedule", "gpipe", "--stages", "2", "--microbatches", "4", "--comm", "-1"], "--comm"),
        (["schedule", "gpipe", "--stages", "2", "--microbatches", "4", "--comm", "nan"], "--comm"),
        (
            ["schedule", "gpipe", "--stages", "2", "--microbatches", "9", "--memory-limit", "4"],
            "auto",
        ),
        (["schedule", "auto", "--stages", "2", "--microbatches", "4", "--memory-limit", ".5"], "1"),
        (["schedule", "auto", "--stages", "2", "--microbatches", "4", "--objective", "sp"], "span"),
        (["schedule", "1f1b", "--stages", "9999", "--microbatches", "9999"], "lower one"),
        (["schedule", "gpipe", *SMALL, "--memory-limit", "nan"], "--memory-limit nan"),
        (["schedule", "auto", *SMALL, "--memory-limit", "nan"], "--memory-limit nan"),
        (["schedule", "gpipe", *SMALL, "--chunks", "0"], "chunks must be at least 1"),
        (["schedule", "auto", "--stages", "300", "--microbatches", "8"], "at most 256"),
        (["schedule", "1f1b", *SMALL, "--svg", "/dev/full"], "cannot write /dev/full: No space"),
        (["plan", "tiny", "-o", "/dev/full"], "give a path in an existing folder"),
        (["plan", ""], "no model: give a preset name"),
        (["plan", "meta-llama/Llama-3.1-8B"], "for the preset say llama-3.1-8b"),
        (["plan", "tiny", "--seq", "0"], "seq=0: give a whole number from 1"),
        (["plan", "tiny", "--schedule", "dualpipe", "--layout", "pp=3"], "nearest legal layouts"),
        (["schedule", "nowhere.csv"], "nowhere.csv"),
        (["shedule"], "schedule"),
        (["plan", "lama-3.1-8b"], "did you mean llama-3.1-8b"),
        (["plan", "tiny", "--layout", "tp=3"], "nearest legal layouts"),
        (["plan", "tiny", "--layout", "xp=3"], "unknown axis 'xp'"),
        (["plan", "tiny", "--machine", "h10"], "did you mean h100"),
        (["plan", "tiny", "--zero", "4"], "ZeRO stage"),
        (["plan", "tiny", "--set", "lyers=3"], "did you mean layers"),
        (["plan", "tiny", "--set", "layers"], "key=value"),
        (["plan", "tiny", "--recompute", "some"], "selective"),
        (["plan", "tiny", "--context", "zagzig"], "zigzag"),
        (["plan", "tiny", "--gpus", "8"], "--gpus 8 without a machine"),
        (
            ["plan", "tiny", "--layout", "pp=2", "--set", "stage_layers=4,5"],
            "numbers that sum to 8",
        ),
        (["plan", "tiny", "--set", "gather=never"], "choose from microbatch, step"),
        (["plan", "missing.toml"], "no such plan file"),
        ([*MOE, "--set", "balance=nonsense"], "did you mean none"),
        ([*MOE, "--set", "balance=switch"], "choose from aux, aux-global"),
        ([*MOE, "--set", "balance=aux-sek"], "did you mean aux-seq"),
        ([*MOE, "--set", "balance=capacity"], "needs its factor, as in capacity:1.25"),
        ([*MOE, "--set", "balance=capacity:much"], "'much' must be a number above 0"),
        ([*MOE, "--set", "balance=bias"], "add --set moe.bias=true"),
        (["plan", "tiny", "--set", "balance=aux"], "has no experts; leave the option out"),
        (
            [*MOE, "--layout", "pp=2", "--schedule", "pipedream", "--set", "balance=aux"],
            "choose another schedule, or none",
        ),
        ([*MOE, "--layout", "dp=4 ep=4", "--set", "ep_nodes=3"], "choose a divisor"),
        ([*MOE, "--layout", "dp=4 ep=4", "--set", "ep_nodes=0"], "choose a divisor"),
        (
            [
                *MOE,
                "--layout",
                "dp=4 ep=4",
                "--set",
                "ep_nodes=2",
                "--set",
                "balance=capacity-pad:1",
            ],
            "choose capacity without padding, or ep_nodes=1",
        ),
    ],
)
def test_bad_input_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert says in refuse(capsys, *words)


def test_plan_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "deepseek-v3", "--layout", "pp=16", "dp=128", "ep=64", "--machine", "h800")
    table = run_json(capsys, *words)
    assert table["world"] == 2048
    assert table["readings"][1] == "textbook: 2 · 1 · 16 · 1 · 64 = 2,048"
    assert table["axes"]["ep"]["first_group"] == list(range(64))
    assert table["axes"]["edp"] == {"degree": 2, "first_group": [0, 64], "tier": "network"}
    assert table["batch"]["sequences"] == 128 * 32


def test_plan_tells_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "llama-3.1-405b", "--layout", "tp=8", "pp=16", "dp=8")
    assert run_json(capsys, *words)["stages"] == [7, *[8] * 14, 7]
    assert "\nstages    7, 14 x 8, 7 layers\n" in run(capsys, *words)
    said = run(capsys, "plan", "tiny", "--layout", "pp=4", "--set", "stage_layers=1,2,2,3")
    assert "\nstages    1, 2 x 2, 3 layers\n" in said
    assert "stages" not in run(capsys, "plan", "tiny", "--layout", "dp=4")


def test_plan_writes_a_file_that_it_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.toml"
    words = (
        "--layout",
        "dp=2x2 tp=2",
        "--zero",
        "FULL_SHARD",
        "--set",
        "sp=false",
        "--set",
        "vocab=251",
    )
    first = run_json(capsys, "plan", "tiny", *words, "-o", str(path))
    assert run_json(capsys, "plan", str(path)) == first
    assert 'layout = "dp=2x2 tp=2"' in path.read_text()


def test_pairs_need_no_quotes() -> None:
    words = ["plan", "tiny", "--layout", "dp=2", "tp=2", "--set", "a=1", "b.c=2", "--json"]
    assert gather_pairs(words) == [
        "plan", "tiny", "--layout", "dp=2 tp=2", "--set", "a=1 b.c=2", "--json",
    ]  # fmt: skip
    assert gather_pairs(["--layout=dp=2", "x=1"]) == ["--layout=dp=2", "x=1"]


def test_words_of_several_pairs_stand_among_others() -> None:
    words = ["--set", "packed=true", "lora=8 data=chat", 'log="a b" lr=1', "run"]
    assert gather_pairs(words) == ["--set", 'packed=true lora=8 data=chat log="a b" lr=1', "run"]
    assert gather_pairs(["--set", "a=1", "b=2 and no pair"]) == ["--set", "a=1", "b=2 and no pair"]


COMMANDS = [
    "schedule gpipe --stages 8 --microbatches 999 --json",
    "schedule 1f1b --stages 4 --microbatches 8",
    "plan tiny",
    "--help",
]


def shell(command: str) -> subprocess.CompletedProcess[str]:
    line = f"set -o pipefail; {sys.executable} -m fivefold {command}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("reader", ["head -c 10", "true"])
def test_a_closed_pipe_is_no_error(command: str, reader: str) -> None:
    done = shell(f"{command} | {reader}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_told(command: str) -> None:
    done = shell(f"{command} > /dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("fivefold: cannot write to standard output: No space left")
    assert len(done.stderr.splitlines()) == 1


def test_a_terminal_without_unicode_gets_marks_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = shell("schedule 1f1b --stages 2 --microbatches 2")
    assert done.returncode == 0 and "rank 0 F0" in done.stdout


@pytest.mark.parametrize(("no_color", "first"), [("", "0"), ("1", "F0")])
def test_no_color_on_a_terminal_means_letters(no_color: str, first: str) -> None:
    code = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]))"
    words = [sys.executable, "-m", "fivefold", "schedule", "1f1b", *SMALL]
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": no_color}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert f"rank 0 {first}" in plain


def test_infinite_memory_is_no_limit(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gpipe", "auto"):
        words = ("schedule", name, *SMALL)
        assert run_json(capsys, *words, "--memory-limit", "inf") == run_json(capsys, *words)


def test_help_lists_the_schedules_and_the_version_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(run(capsys, "schedule", "--help").split())
    assert "gpipe, afab, 1f1b" in text and "pipedream-2bw, auto" in text
    assert run(capsys, "--version").strip() == f"fivefold {__version__}"


def test_a_picture_has_a_limit_of_its_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fivefold.commands.schedule.MOST_DRAWN", 10)
    message = refuse(capsys, "schedule", "1f1b", *SMALL, "--svg", str(tmp_path / "a.svg"))
    assert "16 steps are too many" in message and "leave --svg" in message
    assert run(capsys, "schedule", "1f1b", *SMALL)


@pytest.mark.parametrize("verb", ["rehearse", "train", "verify"])
def test_runs_take_the_precision_that_plans_take(
    capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """The option is there, and a wrong value is refused before anything starts."""
    said = refuse(capsys, verb, "tiny", "--precision", "fp9")
    assert "unknown --precision 'fp9': did you mean fp8?" in said


def test_a_precision_becomes_the_keys_of_a_plan() -> None:
    plain = PlanOptions("tiny")
    assert in_precision(plain, None) is plain
    chosen = in_precision(plain, "mxfp8")
    assert (chosen.precision, chosen.fp8) == ("fp8", "mxfp8")
    assert in_precision(plain, "nvfp4").precision == "nvfp4"  # which runs refuse


def test_a_key_without_a_value_is_looked_up_too(capsys: pytest.CaptureFixture[str]) -> None:
    said = refuse(capsys, "plan", "tiny", "--layout", "dp=2", "--set", "learning_rate=")
    assert "unknown key 'learning_rate': did you mean lr?" in said
    said = refuse(capsys, "plan", "tiny", "--layout", "dp=2", "--set", "layers=")
    assert "'layers=' is no setting: write key=value" in said


def test_a_run_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('model = "tiny"\n')
    said = refuse(capsys, "plan", str(tmp_path), "--layout", "dp=2")
    assert "is a run, not a model" in said and f"{tmp_path}/plan.toml" in "".join(said.split())


@pytest.mark.parametrize("verb", cli.VERBS)
def test_no_number_is_refused_in_the_words_of_a_library(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option that takes a number; what is missing or unknown is said alike."""
    kinds = cli.options_of(verb)
    numbers = [option for option, kind in kinds.items() if cli._parts(kind) & {int, float}]
    for option in numbers:
        for words in ([verb, option, "8z"], [verb, f"{option}=8z"], [verb, option, "--json"]):
            assert cli.run(words) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"fivefold: {option} ") and " number, such as " in said
    for words in ([verb, "--bogus"], [verb, *list(kinds)[:1]]):
        assert cli.run(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("fivefold: ") and f"`fivefold {verb} -h`" in said
    assert {"--seq", "--gpus"} <= {*numbers} or verb not in ("plan", "train", "verify")


@pytest.mark.parametrize(
    ("text", "key", "number"),
    [
        *(("8192", "seq", 8192), ("8k", "seq", 8192), ("1M", "seq", 2**20), ("1e3", "seq", 1000)),
        *(
            ("16k", "gpus", 16384),
            ("15t", "tokens", 15 * 10**12),
            ("1.5e12", "tokens", 15 * 10**11),
        ),
        *(("2b", "tokens", 2 * 10**9), ("10k", "steps", 10000), ("1_000", "steps", 1000)),
        *(("-5", "steps", -5), ("2.5M", "shard_tokens", 2500000)),
        *((text, "seq", None) for text in ("8kk", "k", "", "1.5", "0x10", "eight", "1e-3", "nan")),
        *((text, "seq", None) for text in ("8 k", "1e999", "٣", "inf", "1e3.5")),
    ],
)
def test_one_reader_of_counts(text: str, key: str, number: int | None) -> None:
    if number is None:
        with pytest.raises(ValueError, match="whole number"):
            parse_count(text, key)
    else:
        assert parse_count(text, key) == number


@pytest.mark.parametrize("words", [("--seq", "1k"), ("--seq=1K",), ("--set", "seq=1k")])
def test_counts_are_read_alike_in_flags_and_keys(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["plan", "tiny", *words, "--set", "max_seq=4k steps=2k", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"]["seq"] == 1024


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "tiny", "--epochs", "3"), "--epochs; did you mean --steps?"),
        (("train", "tiny", "--num-train-epochs", "3"), "did you mean --steps?"),
        (("train", "tiny", "--set", "epochs=3"), "did you mean steps?"),
        (("train", "tiny", "--learning-rate", "3"), "No such option"),
        (("train", "tiny", "--warmup", "3"), "it is a key: --set warmup=3"),
        (("train", "tiny", "--warmups", "3"), "did you mean --set warmup=VALUE?"),
        (("plan", "tiny", "--tp", "3"), "did you mean --layout?"),
        (("plan", "tiny", "--bogus"), "`fivefold plan -h`"),
        (("plann", "tiny"), "unknown command 'plann': did you mean plan?"),
    ],
)
def test_only_what_is_near_is_suggested(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*words]) == 2
    error = capsys.readouterr().err
    assert said in error and "chunks" not in error


@pytest.mark.parametrize("words", ["plan {}", "import {}", "generate {} --prompt a", "export {} x"])
def test_a_name_of_the_hub_is_answered_with_how_to_get_it(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    presets = {
        "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
        "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
        "deepseek-ai/DeepSeek-R1": None,
    }
    for name, preset in presets.items():
        assert cli.run(words.format(name).split()) == 2
        said = capsys.readouterr().err
        folder = name.split("/")[1]
        assert f"hf download {name} --local-dir {folder}" in said
        assert f"fivefold import {folder}" in said
        assert (f"its preset is {preset}" in said) if preset else ("preset" not in said)
    (tmp_path / "runs").mkdir()
    for path in ("runs/first", "runs/plan.toml", "nowhere/config.json", "a/b/c"):
        assert cli.run(words.format(path).split()) == 2
        assert "hub" not in capsys.readouterr().err
