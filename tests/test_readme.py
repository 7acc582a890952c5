"""The README and the docs are run: commands work, transcripts and pictures are fresh."""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from fivefold.cli import main
from tests.selection import all_cases, some_or_all

torch.set_num_threads(1)  # a fork after parallel work would hang

ROOT = Path(__file__).parent.parent
TEXTS = {
    path.name: path.read_text("utf-8") for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))
}
PICTURE = "docs/pictures/"
NARROW = {"COLUMNS": "80"}  # drawings are as wide as their terminal
FEW = 2  # commands of docs that verify


def fivefold(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder: in a fork of this process, which has imported torch already.

    `make nightly` starts a new process, as a person does.
    """
    (folder / PICTURE).mkdir(parents=True, exist_ok=True)
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-m", "fivefold", *words]
    if all_cases():
        narrow = {**os.environ, **NARROW}
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=narrow)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=in_fork, args=(words, folder, out.fileno(), err.fileno()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            process.start()
        process.join()
        printed = [stream.seek(0) or stream.read() for stream in (out, err)]
    return subprocess.CompletedProcess(command, process.exitcode or 0, *printed)


def in_fork(words: list[str], folder: Path, *streams: int) -> None:
    """The command, with a folder, a width and files for its output; it ends with SystemExit."""
    os.chdir(folder)
    os.environ.update(NARROW)
    sys.stdout.flush()
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    main(words)


def commands() -> list[str]:
    """Every command of the README; of those in docs that verify, which take long, a few."""
    found: dict[str, None] = {}
    long: dict[str, None] = {}
    for name, text in TEXTS.items():
        for block in re.findall(r"```sh\n(.*?)```", text, re.S):
            for line in (line for line in block.splitlines() if line.startswith("fivefold ")):
                verifies = name != "README.md" and line.startswith("fivefold verify")
                (long if verifies else found)[line] = None
    return [*found, *some_or_all((line for line in long if line not in found), FEW)]


@pytest.mark.parametrize("command", commands())
def test_commands_work(command: str, tmp_path: Path) -> None:
    done = fivefold(shlex.split(command)[1:], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    for drawn in (tmp_path / PICTURE).glob("*"):
        kept = ROOT / PICTURE / drawn.name
        assert drawn.read_text("utf-8") == kept.read_text("utf-8"), f"draw {kept} again"


def test_a_chain_works_from_text_to_weights(tmp_path: Path) -> None:
    """The README's commands that build on one another; the first reads the README and the docs."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    (chain,) = re.findall(r"```sh in order\n(.*?)```", TEXTS["README.md"], re.S)
    for command in chain.splitlines():
        done = fivefold(shlex.split(command)[1:], tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert (tmp_path / "model" / "model.safetensors").exists()


def transcripts() -> list[tuple[str, str]]:
    pattern = re.compile(r"```text\n\$ fivefold (.*?)\n(.*?)```", re.S)
    return [found for text in TEXTS.values() for found in pattern.findall(text)]


@pytest.mark.parametrize(("command", "output"), transcripts(), ids=lambda text: text[:40])
def test_transcript_is_what_is_printed(command: str, output: str, tmp_path: Path) -> None:
    done = fivefold(shlex.split(command), tmp_path)
    printed = done.stdout + done.stderr
    if output.endswith("…\n"):  # the transcript stops early
        printed = printed[: len(output) - 2] + "…\n"
    assert printed == output


def test_every_page_is_read() -> None:
    assert {"README.md", "pipeline.md"} <= {
        name for name, text in TEXTS.items() if "```text\n$ fivefold " in text
    }


def test_links_lead_somewhere() -> None:
    for name, text in TEXTS.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (folder / target).exists(), f"{name} links to {target}"


def test_both_commands_exist() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert {"train", "test"} <= set(targets)
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8")
