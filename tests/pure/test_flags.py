"""Flags of commands: a shared set with one meaning, and few others; the rest are keys."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer

from fivefold import cli
from fivefold.core.plan import plan_keys, train_keys

# They mean the same on every command that has them.
SHARED = frozenset(
    {
        *("--layout", "--machine", "--gpus", "--seq", "--batch", "--microbatches"),
        *("--microbatch-size", "--zero", "--schedule", "--context", "--recompute", "--precision"),
        *("--dtype", "--steps", "--seed", "--set", "--out", "--resume", "--device", "--backend"),
        *("--json", "--help"),
    }
)
MOST_OWN = {"serve": 17}  # it had them before the limit; of others sixteen at most
OF_PLAN = (
    "-o --serve --prompt --output --concurrency --emit --tokens --table --run --sweep --compare"
)


def parameters(command: str) -> dict[str, Any]:
    """The options of a command by their flags."""
    group: Any = typer.main.get_command(cli.build(command))
    options = [
        param for param in group.commands[command].params if param.param_type_name == "option"
    ]
    return {flag: param for param in options for flag in param.opts}


@pytest.mark.parametrize("command", cli.VERBS)
def test_a_command_has_at_most_sixteen_flags_of_its_own(command: str) -> None:
    own = {
        max(param.opts, key=len)
        for flag, param in parameters(command).items()
        if flag not in SHARED
    }
    assert len(own) <= MOST_OWN.get(command, 16), sorted(own)


def test_plan_and_verify_have_the_flags_that_were_agreed() -> None:
    own = {"plan": OF_PLAN.split(), "verify": ["--compile", "--fp8", "--packed"]}
    own |= {
        "rehearse": ["--contend", "--rank"],
        "observe": ["--text", "--html", "--panel", "--port"],
    }
    own |= {"compare-frameworks": []}
    for command, flags in own.items():
        assert {*parameters(command)} - SHARED == {*flags}, command


def test_a_flag_means_one_thing() -> None:
    kinds: dict[str, set[str]] = {}
    for command in cli.VERBS:
        group: Any = typer.main.get_command(cli.build(command))
        context = group.commands[command].make_context(command, [], resilient_parsing=True)
        for flag, param in parameters(command).items():
            _, _, kind = param.get_help_record(context)[0].partition(" <")
            kinds.setdefault(flag, set()).add(kind.replace("path", "str"))
    wrong = {flag: kinds[flag] for flag in ("-o", *SHARED) if len(kinds.get(flag, ())) > 1}
    assert not wrong


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ("plan tiny --top 5", "--set top=5"),
        ("plan tiny --fix 'tp=2 pp=2'", "--set 'fix=\"tp=2 pp=2\"'"),
        ("plan tiny --what-if=gpus=2x", "--set what_if=gpus=2x"),
        ("plan tiny --stage-layers 1,2,3,2", "--set 'stage_layers=\"1,2,3,2\"'"),
        ("plan tiny --textbook", "--set textbook=true"),
        ("plan tiny --no-sp --json", "--set sp=false"),
        ("train tiny --lr 3e-4", "--set lr=3e-4"),
        ("train tiny --packed", "--set packed=true"),
        ("verify tiny --generate", "--set generate=true"),
        ("verify tiny --tp-overlap 4", "--set tp_overlap=4"),
        ("rehearse tiny --perfetto x.json", "--set perfetto=x.json"),
        ("observe tiny --at learn", "--set at=learn"),
        ("simulate tiny --days 1 --unit-size 3", "--set unit_size=3"),
        ("compare-frameworks tiny --stack", "--set stack=true"),
    ],
)
def test_a_flag_that_became_a_key_says_so(
    words: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(shlex.split(words)) == 2
    captured = capsys.readouterr()
    assert f"it is a key: {setting}" in captured.err
    # What is advised is understood: the pair reaches the command, which may refuse its value.
    command, *rest = shlex.split(words)
    key = setting.removeprefix("--set ").strip("'").partition("=")[0]
    assert key in {*cli.own_keys(command), *plan_keys(), *train_keys()} and rest


@pytest.mark.parametrize("command", ["calibrate", "launch", "generate", "tokens"])
def test_output_is_a_number_of_tokens(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "x", "--output", "file"]) == 2
    assert "a number of tokens: a file is -o FILE" in capsys.readouterr().err


def test_keys_of_a_command_hide_no_key_of_a_plan() -> None:
    shared = {*plan_keys()}
    for command in cli.VERBS:
        assert not {*cli.own_keys(command)} & shared, command


@pytest.mark.parametrize(
    "pairs",
    [
        ["top=2", "price=2.5", "fix=tp=2 pp=2"],
        ["top=2,price=2.5", 'fix="tp=2 pp=2"'],
        ['top=2 price=2.5 fix="tp=2 pp=2"'],
    ],
)
def test_keys_are_read_however_they_are_quoted(
    pairs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "llama-3.1-8b", "--machine", "h100", "--gpus", "8", "--tokens", "1e12"]
    gathered = cli.gather_pairs([*words, "--set", *pairs])
    assert cli.run(gathered) == 0
    text = capsys.readouterr().out
    assert "tp=2 pp=2" in text and "at 2.5 a GPU-hour" in text


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ("top=many", "top = 'many'"),
        ("textbook=yes", "expected true or false"),
        ("tops=3", "unknown key 'tops'"),
        ("price=2", "price is for estimates"),
    ],
)
def test_bad_keys_are_refused(pairs: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "tiny", "--set", pairs]) == 2
    assert message in capsys.readouterr().err
