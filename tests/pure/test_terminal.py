"""What a person meets in a terminal: help in panels, Tab, lines as wide as it, right plurals."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from fivefold import cli, completion
from fivefold.core import hardware as machines
from fivefold.core.model import presets as models
from fivefold.terminal import KEYS_PANEL, MOST_USED, MOST_USED_PANEL, PANELS, panels, wrapped

ROOT = Path(__file__).parents[2]


def options(verb: str) -> list[str]:
    """Long names of the options of a verb."""
    command: Any = typer.main.get_command(cli.build(verb))
    found = [each for each in command.commands[verb].params if each.param_type_name == "option"]
    return [max(each.opts, key=len).lstrip("-") for each in found] + ["help"]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_option_is_in_one_panel(verb: str) -> None:
    known = options(verb)
    found = panels(verb, known)
    assert sorted(name for names in found.values() for name in names) == sorted(known)
    if len(known) > 12:
        assert len(found[MOST_USED_PANEL]) == 5
    if verb in MOST_USED:
        assert found[MOST_USED_PANEL] == MOST_USED[verb].split()


def test_panels_name_options_that_exist() -> None:
    known = {name for verb in cli.VERBS for name in options(verb)}
    named = {name for names in PANELS.values() for name in names.split()}
    assert not named - known
    assert set(MOST_USED) <= set(cli.VERBS)


def test_help_shows_the_most_used_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "-h"])
    heads = [line for line in capsys.readouterr().out.splitlines() if re.match(r"[A-Z].*:$", line)]
    assert heads[:2] == ["Arguments:", "Most used:"]
    assert heads[-2:] == ["Output:", f"{KEYS_PANEL}:"]


def completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str):  # noqa: ANN201
    """What bash is offered for the end of the line."""
    words = [*re.findall(r"=|[^\s=]+", typed), *([""] if typed.endswith((" ", "=")) else [])]
    if typed.endswith("="):
        words.pop()  # bash takes the sign for the word
    monkeypatch.setenv(completion.ASKS, "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert not stop.value.code
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("fivefold pl", ["plan"]),
        ("fivefold ", sorted(cli.VERBS)),
        ("fivefold plan --lay", ["--layout"]),
        ("fivefold plan qwen3-8", ["qwen3-8b"]),
        ("fivefold plan --layout dp=2 --zero 1 tiny-", ["tiny-moe"]),
        ("fivefold plan tiny --machine h2", ["h200"]),
        ("fivefold plan tiny --schedule zb-", ["zb-h1", "zb-h2", "zb-interleaved", "zb-v"]),
        ("fivefold plan tiny --context u", ["ulysses"]),
        ("fivefold plan tiny --layout dp=2 t", ["tp=2"]),
        ("fivefold plan tiny --layout dp=2 tp=", ["1", "2", "4", "8", "16", "32", "64", "128"]),
        ("fivefold plan tiny --layout dp=2 tp=1", ["1", "16", "128"]),
    ],
)
def test_tab_completes(
    typed: str,
    offered: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert completed(monkeypatch, capsys, typed) == offered


def test_tab_knows_all_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(completed(monkeypatch, capsys, "fivefold plan ")) == set(models.presets())
    found = completed(monkeypatch, capsys, "fivefold plan --machine ")
    assert set(found) == set(machines.presets())
    axes = completed(monkeypatch, capsys, "fivefold plan tiny --layout ")
    assert {each.partition("=")[0] for each in axes} == set(completion.AXES)


@pytest.mark.parametrize(
    ("kind", "line", "answer"),
    [
        ("zsh", "fivefold plan --layout dp=2 t", "_arguments '*: :((\"tp=2\"))'"),
        ("zsh", "fivefold plan tiny-", "_arguments '*: :((\"tiny-moe\"))'"),
        ("fish", 'fivefold plan --layout "dp=2 t', "dp=2 tp=2"),
    ],
)
def test_other_shells_complete(
    kind: str,
    line: str,
    answer: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(completion.ASKS, f"complete_{kind}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    with pytest.raises(SystemExit):
        cli.main([])
    assert capsys.readouterr().out.strip() == answer


def test_the_script_for_a_shell_is_printed() -> None:
    code = "from fivefold.cli import main; main(['--show-completion', 'bash'])"
    names = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=names, capture_output=True, text=True
    )
    assert f"{completion.ASKS}=complete_bash" in done.stdout, done.stderr


class FakeTerminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def in_terminal(words: list[str], columns: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal of that width shows, without colours."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(ROOT)
    shown = FakeTerminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, shown)
    with pytest.raises(SystemExit):
        cli.main(words)
    monkeypatch.undo()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    return "\n".join(line.rsplit("\r", 1)[-1] for line in text.split("\n"))


COMMANDS = (
    ["plan", "llama-3.1-8b", "--machine", "h100", "--layout", "dp=1"],
    ["plan", "tiny", "--machine", "h100", "--gpus", "4", "--batch", "8"],
    ["plan", "tiny", "--layout", "tp=3"],
    ["schedule", "1f1b", "--stages", "1", "--microbatches", "1"],
    ["observe", "examples/runs/llama-3.2-1b-h200", "--text", "--panel", "step"],
    ["train", "-h"],
)


@pytest.mark.sample(6)
@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words)[:30])
def test_lines_are_as_wide_as_the_terminal(
    words: list[str], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = in_terminal(words, columns, monkeypatch).rstrip()
    assert shown
    for line in shown.splitlines():
        assert len(line.rstrip()) <= columns, line


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "tiny", "--layout", "tp=3"])
    assert max(map(len, capsys.readouterr().err.splitlines())) > 100


def test_a_line_goes_on_under_its_text() -> None:
    assert wrapped("why       tp=8 within nvlink: it is faster", 30) == (
        "why       tp=8 within nvlink:\n          it is faster"
    )
    assert wrapped("  - one two three four five six", 20) == "  - one two three\n    four five six"
    assert wrapped("compute  ██████████████", 20) == "compute  ███████████"
    assert wrapped("short", 20) == "short"


# A number that ends in 1, then a plural: "11 GPUs" and "0.1 GiB" are right.
WRONG = re.compile(
    r"(?<![\d.,=/·x×] )(?<![\d.,/])\b1 (GPUs|ranks|layers|stages|steps|tokens|sequences|chunks|"
    r"microbatches|processes|layouts|nodes|experts|communicators|collectives|samples|files|runs|"
    r"documents|prompts|shards|preemptions|values|blocks|keys|sizes)\b"
)


def test_wrong_plurals_are_seen() -> None:
    assert WRONG.search("on 1 GPUs of h100") and WRONG.search("1 ranks")
    assert not WRONG.search("11 GPUs") and not WRONG.search("2.1 tokens")
    assert not WRONG.search("on 1 GPU of h100")


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "tiny", "--machine", "h100", "--gpus", "1", "--batch", "1"],
        ["plan", "tiny", "--machine", "h100", "--layout", "dp=1", "--microbatches", "1"],
        ["plan", "tiny-moe", "--layout", "dp=1", "--set", "layers=2"],
        ["schedule", "1f1b", "--stages", "1", "--microbatches", "1"],
        ["schedule", "gpipe", "--stages", "2", "--microbatches", "1"],
        ["observe", "tiny", "--machine", "h100", "--gpus", "1", "--batch", "1", "--text"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_plurals_are_right(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(words)
    said = capsys.readouterr()
    wrong = [line for line in (said.out + said.err).splitlines() if WRONG.search(line)]
    assert not wrong
