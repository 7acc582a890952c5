"""The documentation site: every page in the navigation, links that lead somewhere, a reference
that is what the code says, and a build without warnings."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import fivefold
from fivefold import cli
from fivefold.core.plan import plan_keys, train_keys
from fivefold.huggingface.config_export import WRITERS
from tests import json_answers, reference
from tests.commands import in_fork

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
CONFIG = (ROOT / "mkdocs.yml").read_text("utf-8")
IN_NAV = re.findall(r"^ +- .*: ([\w-]+\.md)$", CONFIG, re.M)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(IN_NAV) == [path.name for path in PAGES]


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as mkdocs makes them."""
    outside = re.sub(r"```.*?```", "", text, flags=re.S)
    heads = re.findall(r"^#+ (.*)$", outside, re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", head) for head in heads]
    words = [re.sub(r"[^\w\s-]", "", head.encode("ascii", "ignore").decode()) for head in plain]
    return {re.sub(r"[-\s]+", "-", head.strip().lower()) for head in words}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_of_a_page_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", text):
        file = path.parent / target if target else path
        assert file.exists(), f"{path.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text("utf-8")), f"{path.name}: {target}#{anchor}"


def test_no_page_names_a_key_as_a_flag() -> None:
    verbs = list(cli.VERBS)
    flags = {flag for verb in verbs for flag in cli.options_of(verb)}
    keys = {*train_keys(), *plan_keys(), *(key for verb in verbs for key in cli.own_keys(verb))}
    old = {f"--{key.replace('_', '-')}" for key in keys} - flags
    # Tools of the repository have flags of their own; the log says what was.
    pages = [path for path in PAGES if path.name not in ("log.md", "how-it-is-verified.md")]
    texts = {path.name: path.read_text("utf-8") for path in [*pages, ROOT / "README.md"]}
    named = {name: old.intersection(re.findall(r"`(--[\w-]+)", texts[name])) for name in texts}
    assert not {name: flags for name, flags in named.items() if flags}


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_reference_is_what_the_code_says(name: str) -> None:
    assert (DOCS / name).read_text("utf-8") == reference.text(name), "run: make reference"


def test_docs_and_code_have_one_number_of_families() -> None:
    texts = (path.read_text("utf-8") for path in (ROOT / "README.md", *PAGES))
    pattern = r"(\d+) (?:Hugging Face )?families(?!\s+(?:for chat|of))"
    said = [int(number) for text in texts for number in re.findall(pattern, text)]
    assert len(said) == 4 and {*said} == {len(WRITERS)}


def test_every_command_is_a_function() -> None:
    first = (DOCS / "python.md").read_text("utf-8").split("The functions take")[0]
    names = dict(re.findall(r"`([a-z-]+)` is\s`ff\.([a-z_]+)`", first))
    assert {names.get(verb, verb) for verb in cli.VERBS} <= set(fivefold.__all__)


def test_the_tokens_that_are_printed_are_those_of_the_file(tmp_path: Path) -> None:
    done = in_fork(["tokens", str(ROOT / "fivefold/presets/rhymes.txt"), "-o", "corpus"], tmp_path)
    line = done.stdout.splitlines()[0]
    said = f"`fivefold tokens fivefold/presets/rhymes.txt -o corpus` prints `{line}`"
    assert said in (DOCS / "tokens.md").read_text("utf-8")
    texts = (path.read_text("utf-8") for path in (ROOT / "README.md", *PAGES))
    assert sum(len(re.findall(r"[\d,]+ tokens in \d+ doc", text)) for text in texts) == 1


def _part_of(table: dict[str, Any], part: str) -> dict[str, Any]:
    """A table of an answer, or the first of a list of them."""
    return table[part][0] if isinstance(table[part], list) else table[part]


def example_keys(answer: json_answers.JsonAnswer, folder: Path) -> list[str]:
    """What is different when the example is run in a folder."""
    assert answer.example is not None
    (folder / "text.txt").write_text("The text of a test. " * 200, "utf-8")
    (folder / "plan.toml").write_text('model = "tiny"\nlayout = "dp=2"\n', "utf-8")
    titan = '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ntensor_parallel_degree = 2\n'
    (folder / "titan.toml").write_text(titan, "utf-8")
    shutil.copy(ROOT / "tests" / "data" / "published.jsonl", folder / "runs.jsonl")
    command, _, part = answer.example.partition(" | ")
    examples = {one.title.split()[0]: one.example for one in json_answers.answers()}
    for verb in json_answers.BEFORE.get(command, []):
        assert not in_fork(shlex.split(examples[verb] or ""), folder).returncode
    done = in_fork(shlex.split(command), folder)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert table.get("schema_version") == (None if "generate" in command.split()[0] else 1)
    return json_answers.problems(answer, _part_of(table, part) if part else table)


QUICK = ("plan", "schedule", "tokens", "launch", "observe MODEL")
WITH_EXAMPLE = [one for one in json_answers.answers() if one.example]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "answer",
    [one for one in WITH_EXAMPLE if one.title.startswith(QUICK)],
    ids=lambda one: one.title,
)
def test_keys_of_quick_answers_are_documented(
    answer: json_answers.JsonAnswer, tmp_path: Path
) -> None:
    assert not example_keys(answer, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "answer",
    [one for one in WITH_EXAMPLE if not one.title.startswith(QUICK)],
    ids=lambda one: one.title,
)
def test_keys_of_answers_are_documented(answer: json_answers.JsonAnswer, tmp_path: Path) -> None:
    assert not example_keys(answer, tmp_path)


def test_every_verb_with_json_has_a_table() -> None:
    from fivefold.cli import VERBS

    served = {"serve"}  # answers are those of the API that it serves
    found = {one.title.split()[0].rstrip(":") for one in json_answers.answers()}
    assert found == set(VERBS) - served


def test_a_wrong_key_is_seen() -> None:
    (answer,) = [one for one in json_answers.answers() if one.title.startswith("schedule")]
    table = {key.name: "" for key in answer.keys} | {"more": 1}
    found = json_answers.problems(answer, table)
    assert "more is not documented" in found and "stages is string, not integer" in found


@pytest.mark.sample(0.25)  # 10 seconds, and `make docs` builds it too
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="pip install 'fivefold[docs]' builds it")
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    names = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=names, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert all((tmp_path / path.with_suffix(".html").name).exists() for path in PAGES)
    html = (tmp_path / "index.html").read_text("utf-8")
    assert not re.findall(r'(?:src|href)="https?://(?!squidfunk|www\.mkdocs)[^"]+', html)
