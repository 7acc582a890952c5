"""What somebody types first: help, nothing, names of other software, GPUs without a machine."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from fivefold.cli import VERBS, main
from fivefold.commands.job import one_of
from fivefold.core.errors import UnknownName
from fivefold.core.hardware import presets


def ended(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    said = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, said.out, said.err


def test_no_words_get_three_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ended(capsys)
    typed = [line.split()[1] for line in out.splitlines() if line.startswith("  fivefold ")]
    assert code == 0 and len(typed) == 3 and set(typed) <= set(VERBS)
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("name", VERBS)
def test_h_is_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ended(capsys, name, "-h")
    assert (code, out) == ended(capsys, name, "--help")[:2]
    assert code == 0 and f" {name} [OPTIONS]" in out.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("plan", "nosuch", "--json"), "UnknownName"),
        (("plan", "tiny", "--gpus", "0", "--json"), "FivefoldError"),
        (("verify", "tiny", "--layout", "tp=3", "--json"), "IllegalLayout"),
        (("train", "tiny", "--set", "lr=x", "--json"), "BadFile"),
        (("plan", "tiny", "--nosuch", "--json"), "UsageError"),
        (("simulate", "tiny", "--json"), "UsageError"),
        (("simulate", "tiny", "--days", "few", "--json"), "FivefoldError"),
        (("nosuch", "--json"), "UnknownName"),
    ],
)
def test_failures_are_json_where_answers_are(
    words: tuple[str, ...], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ended(capsys, *words)
    table = json.loads(out)
    assert code == 2 and table["schema_version"] == 1
    assert (table["error"]["kind"], table["error"]["exit_code"]) == (kind, 2)
    assert err == f"fivefold: {table['error']['message']}\n"


@pytest.mark.parametrize(
    ("typed", "ours"),
    [("learning_rate", "lr"), ("hidden_size", "width"), ("seq_len", "seq"), ("max_steps", "steps")],
)
def test_names_of_other_software_are_known(
    typed: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = ended(capsys, "train", "tiny", "--set", f"{typed}=1")
    assert err == f"fivefold: unknown key '{typed}': did you mean {ours}?\n"


def test_types_have_two_names() -> None:
    known = ("float64", "float32", "bfloat16")
    assert [one_of("--dtype", each, known) for each in ("bf16", "fp32", "float64")] == [
        *("bfloat16", "float32", "float64")
    ]
    assert one_of("--dtype", "bfloat16", ("fp32", "bf16")) == "bf16"
    with pytest.raises(UnknownName):
        one_of("--dtype", "fp16", known)
    with pytest.raises(UnknownName):
        one_of("--device", "bf16", known)


def test_gpus_need_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ended(capsys, "plan", "tiny", "--gpus", "8")
    assert code == 2 and not out and "--gpus 8 without a machine" in err
    assert all(each in err for each in presets())


def test_a_machine_is_asked_for_on_a_terminal() -> None:
    """The answer is typed; an empty one is the machine in brackets."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "fivefold", "plan", "tiny", "--gpus", "1"]
    with subprocess.Popen(
        command, stdin=follower, stdout=subprocess.PIPE, stderr=follower, text=True
    ) as asked:
        os.close(follower)
        said, until = "", time.monotonic() + 60
        while "which one" not in said and time.monotonic() < until:
            if select.select([leader], [], [], 1.0)[0]:
                said += os.read(leader, 1 << 16).decode()
        os.write(leader, b"h200\n")
        out, _ = asked.communicate(timeout=60)
    os.close(leader)
    assert asked.returncode == 0 and out.startswith("tiny on 1 GPU of h200")
