"""The README and the docs are run: commands work, transcripts and pictures are fresh."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.commands import in_fork, in_new_process
from tests.selection import all_cases

ROOT = Path(__file__).parent.parent
TEXTS = {
    path.name: path.read_text("utf-8") for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))
}
PICTURE = "docs/pictures/"
LONG = ("verify", "rehearse", "train")


def fivefold(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder: in a fork; in `make nightly` as a person does."""
    (folder / PICTURE).mkdir(parents=True, exist_ok=True)
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    return (in_new_process if all_cases() else in_fork)(words, folder)


def commands(long: bool) -> list[str]:
    """Commands of README and docs: those that run a model and take long, or the others."""
    blocks = [
        each for text in TEXTS.values() for each in re.findall(r"```sh\n(.*?)```", text, re.S)
    ]
    lines = {line for block in blocks for line in block.splitlines()}
    found = sorted(line for line in lines if line.startswith("fivefold "))
    return [line for line in found if (line.split()[1] in LONG) == long]


def works(command: str, tmp_path: Path) -> None:
    """Run a command of the docs; without a GPU, one for a GPU stops for that alone."""
    done = fivefold(shlex.split(command, comments=True)[1:], tmp_path)
    if "--device cuda" in command and not torch.cuda.is_available():
        assert done.returncode == 2
        assert "this machine has no GPU" in done.stderr, done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    for drawn in (tmp_path / PICTURE).glob("*"):
        kept = ROOT / PICTURE / drawn.name
        assert drawn.read_text("utf-8") == kept.read_text("utf-8"), f"draw {kept} again"


@pytest.mark.sample(5)
@pytest.mark.parametrize("command", commands(long=False))
def test_commands_of_docs_work(command: str, tmp_path: Path) -> None:
    works(command, tmp_path)


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("command", commands(long=True))
def test_commands_that_run_a_model_work(command: str, tmp_path: Path) -> None:
    works(command, tmp_path)


def chains(name: str) -> list[str]:
    """Transcripts of a page whose commands build on one another."""
    return re.findall(r"```text in order\n(.*?)```", TEXTS[name], re.S)


def follow(chain: str, folder: Path) -> None:
    """Run the commands of a chain in a folder, and compare what they print, but for numbers."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "README.md", folder)
    for command, output in re.findall(r"^\$ fivefold (.*)\n((?:(?!\$ ).*\n)*)", chain, re.M):
        done = fivefold(shlex.split(command, comments=True), folder)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert shown(output, done.stdout + done.stderr, numbers=False), command


@pytest.mark.nightly
def test_a_chain_works_from_text_to_weights(tmp_path: Path) -> None:
    """The README's commands that build on one another: a model that has learnt its text."""
    (chain,) = chains("README.md")
    follow(chain, tmp_path)
    assert (tmp_path / "model" / "model.safetensors").exists()


def chains_of_docs(long: bool) -> list[str]:
    """Chains of other pages; those that rehearse, or learn a text, take long."""
    found = [chain for name in sorted(TEXTS) if name != "README.md" for chain in chains(name)]
    slow = ("$ fivefold rehearse", "data=rhymes")
    return [chain for chain in found if any(word in chain for word in slow) == long]


@pytest.mark.sample(0.2)
@pytest.mark.parametrize("chain", chains_of_docs(long=False), ids=lambda text: text[:40])
def test_chains_of_docs_work(chain: str, tmp_path: Path) -> None:
    follow(chain, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("chain", chains_of_docs(long=True), ids=lambda text: text[:40])
def test_long_chains_work(chain: str, tmp_path: Path) -> None:
    follow(chain, tmp_path)


def shown(transcript: str, printed: str, *, numbers: bool = True) -> bool:
    """Whether a transcript has lines of what was printed, in order; a line of … leaves some out.

    Without `numbers` only words are compared: times, losses and errors differ between machines.
    """
    if not numbers:
        transcript, printed = (
            re.sub(r"[\d.,]*\d(e[+-]?\d+)?k?", "#", re.sub(" +", " ", text))
            for text in (transcript, printed)
        )
    parts = [part.rstrip("\n") for part in re.split(r"^…\n", transcript, flags=re.M)]
    parts[-1] = parts[-1].removesuffix("…")  # or a line stops early
    if not printed.startswith(parts[0]):
        return False
    place = 0
    for part in parts:
        place = printed.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return transcript.endswith("…\n") or not printed[place:].strip()


def test_a_transcript_that_is_not_printed_is_seen() -> None:
    printed = "one 1\ntwo 2\nthree 3.5e-3\nfour\n"
    assert shown("one 1\n…\nthree 3.5e-3\nfour\n", printed)
    assert shown("one 1\n…\n", printed) and shown("one 1\ntwo…\n", printed)
    assert shown("one 7\n…\nthree 8e-9\nfour\n", printed, numbers=False)
    for wrong in ("two 2\n…\n", "one 1\nthree 3.5e-3\n…\n", "one 1\n", "one 1\n…\nfive\n…\n"):
        assert not shown(wrong, printed)
    assert not shown("one 7\n…\n", printed)


def transcripts(long: bool) -> list[tuple[str, str]]:
    pattern = re.compile(r"```text\n\$ fivefold (.*?)\n(.*?)```", re.S)
    everything = dict.fromkeys(found for text in TEXTS.values() for found in pattern.findall(text))
    return [found for found in everything if (found[0].split()[0] in LONG) == long]


@pytest.mark.sample(14)
@pytest.mark.parametrize(("command", "output"), transcripts(long=False), ids=lambda text: text[:40])
def test_transcript_is_what_is_printed(command: str, output: str, tmp_path: Path) -> None:
    done = fivefold(shlex.split(command, comments=True), tmp_path)
    assert shown(output, done.stdout + done.stderr)


@pytest.mark.nightly  # half a minute, and rehearsals have tests of their own
@pytest.mark.parametrize(("command", "output"), transcripts(long=True), ids=lambda text: text[:40])
def test_transcript_of_a_rehearsal_is_what_is_printed(
    command: str, output: str, tmp_path: Path
) -> None:
    done = fivefold(shlex.split(command, comments=True), tmp_path)
    assert shown(output, done.stdout + done.stderr, numbers=command.startswith("rehearse"))


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
