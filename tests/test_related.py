"""A change selects the cases that run it; the seconds of a run are divided fairly."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.changes import Changes, Repository, compare, mentioning
from tests.coverage_map import CoverageMap, Recording, collect, numbers_of, read, runs_of, write
from tests.coverage_trace import CONTEXT, FOLDER, ROOT
from tests.related import UNKNOWN, Case, Choice, Related, changes_since, choose, chosen

LAYER = '''
"""A layer."""
from math import pi

SCALE = 2
WIDTH: int = 8

class Base:
    size: int = 4

    def area(self) -> int:
        return self.size**2

    def edge(self) -> int:
        return self.size

def forward(x: int) -> int:
    """Doc."""
    return x * SCALE

def backward(x: int) -> int:
    def inner() -> int:
        return x
    return inner()
'''


def after(text: str, *edits: tuple[str, str]) -> Changes:
    for former, latter in edits:
        assert former in text
        text = text.replace(former, latter)
    return compare({"a.py": LAYER}, {"a.py": text}, {})


@pytest.mark.parametrize(
    ("former", "latter", "functions", "names"),
    [
        ("x * SCALE", "x * SCALE + 1", {"a.py:forward"}, set()),
        ("        return x\n", "        return -x\n", {"a.py:backward"}, set()),
        ("self.size**2", "self.size * 2", {"a.py:Base.area"}, set()),
        ("SCALE = 2", "SCALE = 3", set(), {"SCALE"}),
        ("size: int = 4", "size: int = 5", set(), {"Base"}),
        ("    def edge(self)", "    def rim(self)", set(), set()),  # a move
        ('"""Doc."""', '"""Other."""', set(), set()),
        ("return inner()", "return (inner())  # so", set(), set()),
        ("from math import pi", "from math import pi, e", set(), set()),
    ],
)
def test_changes_of_a_file(former: str, latter: str, functions: set[str], names: set[str]) -> None:
    changes = after(LAYER, (former, latter))
    assert changes.functions == functions
    assert {name for _, name in changes.names} == names


def test_a_function_that_went_has_changed_unless_it_moved() -> None:
    forward = LAYER[LAYER.index("def forward") : LAYER.index("def backward")]
    assert after(LAYER, (forward, "")).functions == {"a.py:forward"}
    moved = compare({"a.py": LAYER}, {"a.py": LAYER.replace(forward, ""), "b.py": forward}, {})
    assert not moved.functions and not moved.added


def test_a_moved_file_has_its_former_name() -> None:
    changes = compare({"a.py": LAYER}, {"b.py": LAYER.replace("x * SCALE", "x")}, {"b.py": "a.py"})
    assert changes.functions == {"a.py:forward"}


def test_a_constant_changes_who_mentions_it() -> None:
    files = {
        "p/a.py": LAYER,
        "p/b.py": "from p.a import SCALE\nTWICE = 2 * SCALE\ndef f():\n    return TWICE\n",
        "p/c.py": "from p import b\ndef g():\n    return b.TWICE\ndef h(TWO: int): ...\n",
        "p/d.py": "SCALE = 7\ndef other():\n    return SCALE\n",
    }
    mentions = mentioning({("p/a.py", "SCALE")}, files, through_functions=False)
    names = {name for _, name in mentions}
    assert names == {"SCALE", "forward", "TWICE", "f", "g"}


def test_a_fixture_changes_the_tests_of_its_folder() -> None:
    fixture = "def pool(): return 1\n"
    files = {
        "tests/ranks/conftest.py": fixture,
        "tests/ranks/test_a.py": "def test_one(pool): ...\ndef test_two(): ...\n",
        "tests/pure/test_b.py": "def test_three(pool): ...\n",
    }
    name = ("tests/ranks/conftest.py", "pool")
    assert mentioning({name}, files, through_functions=True) == {
        name,
        ("tests/ranks/test_a.py", "test_one"),
    }


def fake_map(functions: dict[str, list[str]], seconds: dict[str, float]) -> CoverageMap:
    recording = Recording("base", seconds)
    for function, items in functions.items():
        recording.functions[function].update(items)
    return recording.map()


CASES = [f"tests/test_a.py::test_{test}[{case}]" for test in "xyz" for case in range(20)]


def test_a_change_runs_its_cases_whatever_the_salt_draws() -> None:
    own = [CASES[3], CASES[47]]
    coverage = fake_map({"a.py:f": own, "a.py:g": CASES}, dict.fromkeys(CASES, 1.0))
    cases = [Case(name, 0.0) for name in CASES]
    assert choose(cases, coverage, Changes()).cases == frozenset()
    choice = choose(cases, coverage, Changes({"a.py:f"}))
    assert choice.cases == frozenset(own)
    assert (choice.num_changed, choice.num_related, choice.num_related_run) == (1, 2, 2)


def test_special_functions_keep_their_cases_beside_general_ones() -> None:
    own = [CASES[3], CASES[47]]
    coverage = fake_map({"a.py:f": own, "a.py:g": CASES}, dict.fromkeys(CASES, 1.0))
    cases = [Case(name, 0.0) for name in CASES]
    choice = choose(cases, coverage, Changes({"a.py:f", "a.py:g"}), limits=(8, 8))
    assert choice.cases >= set(own)
    assert (choice.num_related, choice.num_related_run, choice.seconds) == (60, 8, 8)
    assert {name.partition("[")[0] for name in choice.cases} == {
        f"tests/test_a.py::test_{test}" for test in "xyz"
    }


def test_what_changed_last_gets_more_seconds() -> None:
    early, late = CASES[:30], CASES[30:]
    coverage = fake_map({"a.py:f": early, "a.py:g": late}, dict.fromkeys(CASES, 1.0))
    changes, cases = Changes({"a.py:f", "a.py:g"}), [Case(name, 0.0) for name in CASES]
    numbers = [
        len(choose(cases, coverage, changes, recent=recent, limits=(22, 22)).cases & set(late))
        for recent in ([], ["a.py:g"])
    ]
    assert numbers == [11, 20]


def test_short_tests_leave_seconds_for_what_changed_last() -> None:
    short, long = CASES[:30], CASES[30:]
    coverage = fake_map({"a.py:f": long}, dict.fromkeys(CASES, 1.0))
    cases = [*(Case(name) for name in short), *(Case(name, 0.0) for name in long)]
    change, limits = Changes({"a.py:f"}), (10, 30)
    assert choose(cases, coverage, change, limits=limits).num_related_run == 0
    choice = choose(cases, coverage, change, recent=["a.py:f"], limits=limits)
    assert choice.cases > set(short)
    assert choice.num_related_run == 3


def test_a_new_test_counts_as_its_neighbours() -> None:
    coverage = fake_map({}, dict.fromkeys(CASES, 3.0))
    for name, seconds in (("test_a.py::test_new", 3.0), ("test_b.py::test_x", 3.0)):
        assert Related(coverage, []).seconds(f"tests/{name}") == seconds
    assert Related(coverage, []).seconds("tests/other/test_b.py::test_x") == UNKNOWN


def test_a_fixture_counts_once() -> None:
    recording = Recording("base", dict.fromkeys(CASES, 1.0), shared={"fixture": 5.0})
    recording.uses["fixture"].update(CASES)
    recording.functions["a.py:f"].update(CASES)
    cases = [Case(name, 0.0) for name in CASES]
    choice = choose(cases, recording.map(), Changes({"a.py:f"}), limits=(8, 8))
    assert (choice.num_related_run, choice.seconds) == (3, 8)


def test_cases_that_the_map_does_not_have_count_as_their_test() -> None:
    coverage = fake_map({"a.py:f": CASES[:2]}, dict.fromkeys(CASES[:2], 3.0))
    names = [*CASES[:2], "tests/test_a.py::test_x[new]", CASES[25]]
    choice = choose([Case(name, 0.0) for name in names], coverage, Changes({"a.py:f"}))
    assert choice.cases == frozenset(names[:3])
    assert choice.seconds == 9


def test_a_changed_test_runs_all_its_cases() -> None:
    cases = [Case(name, 0.0) for name in CASES]
    coverage = fake_map({}, dict.fromkeys(CASES, 1.0))
    choice = choose(cases, coverage, Changes(), [("tests/test_a.py", "test_y")])
    assert choice.cases == {name for name in CASES if "test_y" in name}


def test_the_sample_takes_short_cases_by_number_and_long_ones_rarely() -> None:
    seconds = {name: 8.0 if "test_z" in name else 0.1 for name in CASES}
    cases = [Case(name, None if "test_y" in name else 2.0) for name in CASES]
    choice = choose(cases, fake_map({}, seconds), Changes())
    numbers = [sum(f"test_{test}" in name for name in choice.cases) for test in "xyz"]
    assert numbers[0] == 2 and numbers[1] == 20 and numbers[2] <= 1
    assert len(choose(cases, fake_map({}, seconds), Changes(), limits=(0, 0)).cases) == 20


def test_runs_of_numbers() -> None:
    numbers = [0, 1, 2, 5, 9, 10]
    assert runs_of(numbers) == [0, 3, 2, 1, 3, 2]
    assert list(numbers_of(runs_of(numbers))) == numbers


def test_maps_of_two_runs_are_one(tmp_path: Path) -> None:
    first = fake_map({"a.py:f": CASES[:2]}, dict.fromkeys(CASES[:2], 1.0))
    second = fake_map({"a.py:f": CASES[1:4]}, dict.fromkeys(CASES[1:4], 2.0))
    recording = Recording()
    for number, coverage in enumerate((first, second)):
        write(coverage, tmp_path / f"{number}.xz")
        recording.update(read(tmp_path / f"{number}.xz"))
    coverage = recording.map()
    assert list(coverage.items(coverage.functions["a.py:f"])) == CASES[:4]
    assert list(coverage.seconds.values()) == [1.0, 2.0, 2.0, 2.0]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A package and its test, committed."""
    for path, text in {
        "fivefold/a.py": LAYER,
        "fivefold_page/b.py": "def page(): ...\n",
        "tests/test_a.py": "def test_x(): ...\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text, "utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "base")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_uncommitted_and_new_files_count(repository: Path) -> None:
    base = git(repository, "rev-parse", "HEAD")
    assert changes_since(Repository(repository, base)) == (Changes(), set())
    layer = repository / "fivefold" / "a.py"
    layer.write_text(LAYER.replace("SCALE = 2", "SCALE = 3"), "utf-8")
    (repository / "tests" / "test_new.py").write_text("def test_new(): ...\n", "utf-8")
    changes, tests = changes_since(Repository(repository, base))
    assert "fivefold/a.py:forward" in changes.functions
    assert tests == {("tests/test_new.py", "test_new")}
    (repository / "fivefold" / "tiny.toml").write_text("layers = 2\n", "utf-8")
    changes, _ = changes_since(Repository(repository, base))
    assert "fivefold/tiny.toml:" in changes.functions
    git(repository, "mv", "fivefold/a.py", "fivefold/c.py")
    changes, _ = changes_since(Repository(repository, base))
    assert "fivefold/a.py:forward" in changes.functions


def test_the_working_tree_chooses(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = repository / "map.xz"
    cases = [Case(name, 0.0) for name in CASES]
    assert "make test-map" in str(chosen(cases, repository, path))
    functions = {f"fivefold/a.py:{name}": [CASES[0]] for name in ("forward", "backward")}
    functions |= {"fivefold/a.py:Base.area": CASES[1:]}
    coverage = fake_map(functions, dict.fromkeys(CASES, 1.0))
    write(replace(coverage, base=git(repository, "rev-parse", "HEAD")), path)
    layer = repository / "fivefold" / "a.py"
    layer.write_text(LAYER.replace("return x * SCALE", "return x"), "utf-8")
    choice = chosen(cases, repository, path)
    assert isinstance(choice, Choice) and choice.cases == {CASES[0]}
    layer.write_text("", "utf-8")  # everything differs
    assert "make test-map" in str(chosen(cases, repository, path))
    monkeypatch.setenv("GIT_DIR", str(repository / "none"))
    unknown = chosen([Case(name) for name in CASES], repository, path)
    assert "no commit" in str(unknown)
    assert isinstance(unknown, Choice) and unknown.cases, "a sample by seconds runs all the same"


RECORDED = """
import functools, os, subprocess, sys
import pytest
from fivefold.core.model import presets

@functools.cache
def table():
    return presets.keys()

@pytest.fixture(scope="module")
def shape():
    return presets.load("tiny")

def test_cached(): table()
def test_cached_again(): table()
def test_fixture(shape): ...
def test_fixture_again(shape): ...
def test_spawned():
    code = "from fivefold.core.model import presets; presets.presets()"
    subprocess.run([sys.executable, "-c", code], check=True)
def test_forked():
    child = os.fork()
    if not child:
        presets.is_hub_name("a/b")
        os._exit(0)
    os.waitpid(child, 0)
def test_nothing(): ...
"""


def test_a_recording_sees_forks_spawned_processes_fixtures_and_caches(tmp_path: Path) -> None:
    path, folder = tmp_path / "test_recorded.py", tmp_path / "lines"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), FOLDER: str(folder)}
    environment.pop(CONTEXT, None)
    path.write_text(RECORDED, "utf-8")
    words = ["-q", "-p", "no:cacheprovider", "-p", "tests.coverage_recorder", "-c", os.devnull]
    command = [sys.executable, "-m", "pytest", *words, str(path)]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    coverage = collect(folder, "base")
    assert len(coverage.seconds) == 7 and not coverage.failed
    presets = "fivefold/core/model/presets.py"
    for function, tests in {
        f"{presets}:keys": {"cached", "cached_again"},
        f"{presets}:load": {"fixture", "fixture_again"},
        f"{presets}:presets": {"spawned"},
        f"{presets}:is_hub_name": {"forked"},
        "fivefold/presets/models/tiny.toml:": {"fixture", "fixture_again", "spawned"},
    }.items():
        items = coverage.items(coverage.functions[function])
        assert {item.rpartition("::test_")[2] for item in items} == tests
