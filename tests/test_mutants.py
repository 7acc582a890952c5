"""Mutation testing: what each kind edits, what a result depends on, and who judges it."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import mutants
from tests.coverage_map import CoverageMap, Recording
from tests.mutants import Copy, Items, Judge, Record
from tests.mutations import KINDS, ROOMS, Mutant, draw, mutants_of

FUNCTION = "def f(x, y, mask, rank, mesh, cache):\n    {}\n"
EDITS = {
    "collective": [
        ('mesh.all_reduce(x, "tp", SUM).wait()', "pass"),
        ('mesh.all_reduce(x, "tp", SUM).wait()', 'mesh.all_reduce(x, "dp-cp", SUM).wait()'),
        ("return mesh.total(x, y)", "return (x)"),
    ],
    "reduction": [
        ("return x.sum(-1)", "return x.mean(-1)"),
        ("return x.sum", None),
        ("g(x, dist.ReduceOp.SUM)", "g(x, dist.ReduceOp.MAX)"),
        ("return sum(x)", "return max(x)"),
    ],
    "bound": [
        ("return x[y:]", "return x[(y) + 1:]"),
        ("return x[:y]", "return x[:(y) - 1]"),
        ("return range(1, y)", "return range(1, (y) - 1)"),
    ],
    "stale buffer": [
        ("x.copy_(y)", "pass"),
        ("x.state = y", "pass"),
        ("x[0] += y", "pass"),
        ("x = y", None),
    ],
    "neighbour": [
        ("return rank + 1", "return (rank)"),
        ("return x[rank]", "return x[rank - 1]"),
        ("return g(x.source, target)", "return g(target, x.source)"),
    ],
    "divisor": [
        ("return x / (y + 1)", "return x * (y + 1)"),
        ("return x / (y + 1)", "return (x)"),
        ("return x // y", "return (-(-(x) // (y)))"),
        ('return folder / "x.txt"', None),
    ],
    "wait": [
        ("mesh.all_reduce(x, y).wait()", "mesh.all_reduce(x, y)"),
        ("x.wait()", "pass"),
        ("return x.wait()", None),
    ],
    "mask": [
        ("return x.masked_fill(mask, 0)", "return x"),
        ("return torch.where(mask, x, y)", "return (x)"),
        ("return [v for v in x if v > 1]", "return [v for v in x if True]"),
        ("return x[mask]", "return x"),
    ],
    "sign": [
        ("return (x) + y", "return (x) - y"),
        ("return -x", "return (x)"),
        ("return 'a' + y", None),
        ("x += (v for v in y)", None),
    ],
    "comparison": [
        ("return x if x < y else y", "return x if x <= y else y"),
        ("return x if y else 0", "return x if not (y) else 0"),
        ("return x and y", "return x or y"),
    ],
    "stale cache": [
        ("cache.clear()", "pass"),
        ("del cache[x]", "pass"),
        ("del x", None),
        ("return cache[x, y]", "return cache[(y,)]"),
    ],
    "unit": [
        ("return x * 8", "return (x)"),
        ("return x / 1e9", "return x / (1e9 * 1.024)"),
        ("return min(x, y)", "return max(x, y)"),
    ],
}


def edited(line: str, kind: str, room: str = "cost") -> list[str]:
    """A line after each edit of a kind."""
    source = FUNCTION.format(line)
    of_kind = [one for one in mutants_of(room, "a.py", source.encode()) if one.kind == kind]
    changed = [mutant.apply(source.encode()).decode() for mutant in of_kind]
    return [text.split("\n", 1)[1].strip() for text in changed]


@pytest.mark.parametrize(
    ("kind", "line", "expected"), [(kind, *pair) for kind in EDITS for pair in EDITS[kind]]
)
def test_a_kind_edits_a_line(kind: str, line: str, expected: str | None) -> None:
    assert expected in edited(line, kind) if expected is not None else not edited(line, kind)


def test_every_kind_has_a_sample() -> None:
    assert EDITS.keys() == KINDS.keys()


def test_units_are_mutated_where_costs_are_estimated() -> None:
    assert edited("return x * 8", "unit", "planner") and not edited("return x * 8", "unit", "optim")


@pytest.mark.parametrize(
    "line",
    [
        "raise ValueError(x + y)",
        "assert x < y",
        'print(f"{x + y}")',
        'return f"{x + y}"',
        "if x.is_cuda:\n        return x + y",
        "z: Literal[-x]",
        "torch.cuda.synchronize(x + y)",
    ],
)
def test_what_shows_or_needs_a_gpu_is_not_edited(line: str) -> None:
    assert not list(mutants_of("parallel", "a.py", FUNCTION.format(line).encode()))


def test_representations_kernels_and_gpu_files_are_not_edited() -> None:
    body = "    return x + 1\n"
    left_out = f"def __repr__(x):\n{body}@overload\ndef f(x):\n{body}@triton.jit\ndef g(x):\n{body}"
    assert not list(mutants_of("model", "a.py", left_out.encode()))
    plain = f"def f(x):\n{body}".encode()
    assert not list(mutants_of("model", "fivefold/model/rows_kernel.py", plain))
    assert list(mutants_of("model", "a.py", plain))


def test_an_edit_leaves_all_other_bytes() -> None:
    source = (
        '"""· × “”"""\n\ndef f(x):\n    y = "·"  # ×\n    return (x  # a + b\n        + y)  # ·\n'
    )
    (mutant,) = [one for one in mutants_of("data", "a.py", source.encode()) if one.kind == "sign"]
    assert mutant.apply(source.encode()).decode() == source.replace("  + y", "  - y")
    assert (mutant.line, mutant.before, mutant.after) == (6, "+ y) # ·", "- y) # ·")


def ids(source: str, path: str = "a.py") -> list[str]:
    return [mutant.id for mutant in mutants_of("data", path, source.encode())]


def test_ids_stay_where_code_moves_and_differ_otherwise() -> None:
    source = "def f(x, y):\n    z = x + y\n    return z + (x + y)\n"
    moved = "import a\n\n\ndef f(x, y):\n    # why\n    z = x  +  y\n    return z + (x + y)\n"
    assert ids(source) == ids(moved)
    assert len({*ids(source)}) == 3
    assert not {*ids(source)} & {*ids(source.replace("def f", "def g")), *ids(source, "b.py")}


def test_a_draw_begins_with_a_shorter_one_and_spreads(tmp_path: Path) -> None:
    functions = (
        f"def f{n}(x, y):\n    x.copy_(y)\n    return x[y:] + {n} if x < y else -x\n"
        for n in range(9)
    )
    (tmp_path / "a.py").write_text("".join(functions))
    of_file = list(mutants_of("data", "a.py", (tmp_path / "a.py").read_bytes()))
    drawn = draw(of_file, 12, set(), tmp_path)
    assert draw(of_file[::-1], 8, set(), tmp_path) == drawn[:8]
    assert len(draw(of_file, 99, set(), tmp_path)) == 18  # two of a function
    kinds = [mutant.kind for mutant in drawn[:4]]
    assert sorted(kinds) == ["bound", "comparison", "sign", "stale buffer"]
    assert drawn[0] not in draw(of_file, 99, {drawn[0].id}, tmp_path)


MODULE = """
def shifted(x: int) -> int:
    return x + 1 if x else 0


def sized(x: int) -> int:
    return x + x if x > 0 else 0
"""
TESTS = """
import os, time
from fivefold.optim.small import shifted, sized

def test_shifted():
    assert shifted(2) == 3 or time.sleep(999)

def test_sized():
    assert sized(2) == 4

def test_that_no_machine_passes():
    assert False
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with one module and its tests."""
    root = tmp_path_factory.mktemp("small")
    (root / "fivefold" / "optim").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "fivefold" / "__init__.py").touch()
    (root / "fivefold" / "optim" / "__init__.py").touch()
    (root / "fivefold" / "optim" / "small.py").write_text(MODULE)
    (root / "tests" / "test_small.py").write_text(textwrap.dedent(TESTS))
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    return root


PATH = "fivefold/optim/small.py"


@pytest.fixture(scope="module")
def small_map() -> CoverageMap:
    recording = Recording("a commit")
    for name, function in [
        ("shifted", "shifted"),
        ("sized", "sized"),
        ("that_no_machine_passes", "sized"),
    ]:
        item = f"tests/test_small.py::test_{name}"
        recording.seconds[item] = 0.01
        recording.functions[f"{PATH}:{function}"].add(item)
    return recording.map()


def small_mutants(root: Path) -> Iterator[Mutant]:
    return mutants_of("optim", PATH, (root / PATH).read_bytes())


@pytest.fixture(scope="module")
def judged(
    small: Path, small_map: CoverageMap, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Record]:
    """Results of one function by edited line."""
    judge = Judge(small, tmp_path_factory.mktemp("copies"), workers=1)
    items = Items(small, small_map, judge.collect(["tests/test_small.py"]))
    sized = [mutant for mutant in small_mutants(small) if mutant.function == "sized"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutants, "START_SECONDS", 600.0)  # nothing hangs, but the machine may be busy
        records = [judge.judge(mutant, items, budget=9) for mutant in sized]
    return {record.after: record for record in records}


def test_a_fault_is_killed_by_the_test_that_sees_it(
    judged: dict[str, Record],
) -> None:
    record = judged["return x + x if not (x > 0) else 0"]
    assert (record.result, record.test) == ("killed", "tests/test_small.py::test_sized")


def test_a_fault_that_no_test_sees_survives_though_a_test_always_fails(
    judged: dict[str, Record],
) -> None:
    record = judged["return x + x if x >= 0 else 0"]
    assert (record.result, record.test) == ("survived", "")


@pytest.mark.parametrize(
    ("after", "killer", "result"),
    [
        ("return x + x if not (x > 0) else 0", "test_sized", "killed"),
        ("return x + x if x >= 0 else 0", "test_sized", "survived"),
        ("return x + x if x >= 0 else 0", "test_that_no_machine_passes", "survived"),
    ],
)
def test_a_former_killer_kills_only_if_the_fault_makes_it_fail(
    small: Path, small_map: CoverageMap, tmp_path: Path, after: str, killer: str, result: str
) -> None:
    judge = Judge(small, tmp_path, workers=1)
    items = Items(small, small_map, judge.collect(["tests/test_small.py"]))
    (mutant,) = [mutant for mutant in small_mutants(small) if mutant.after == after]
    item = f"tests/test_small.py::{killer}"
    record = judge.judge(mutant, items, 9, item)
    assert (record.result, record.test) == (result, item if result == "killed" else "")


def test_an_item_that_ends_the_process_is_named(small: Path, tmp_path: Path) -> None:
    copy = Copy(small, tmp_path, deadline=float("inf"))
    file = copy.folder / "tests" / "test_dying.py"
    file.write_text(
        "import os\n\ndef test_fine():\n    pass\n\ndef test_dies():\n    os.kill(os.getpid(), 8)\n"
    )
    items = [f"tests/test_dying.py::test_{name}" for name in ("fine", "dies")]
    outcome = copy.pytest(["-v", *items], limit=120)
    assert (outcome.code, outcome.failed(items)) == (-8, items[1])


@pytest.mark.nightly  # it waits
def test_a_fault_that_hangs_is_a_timeout(
    small: Path, small_map: CoverageMap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "START_SECONDS", 45.0)
    judge = Judge(small, tmp_path, workers=1)
    items = Items(small, small_map, judge.collect(["tests/test_small.py"]))
    (mutant,) = [one for one in small_mutants(small) if one.after == "return x - 1 if x else 0"]
    record = judge.judge(mutant, items, budget=9)
    assert (record.result, record.test) == ("timeout", "tests/test_small.py::test_shifted")


def test_the_tree_is_not_touched(small: Path, judged: dict[str, Record]) -> None:
    assert judged and (small / PATH).read_text() == MODULE


def test_a_result_lasts_until_its_function_or_tests_change(
    small: Path, small_map: CoverageMap, judged: dict[str, Record], tmp_path: Path
) -> None:
    items = Items(small, small_map)
    survivor = judged["return x + x if x >= 0 else 0"]
    (mutant,) = [one for one in small_mutants(small) if one.id == survivor.id]
    assert items.is_valid(survivor, mutant, 9)
    assert not items.is_valid(survivor, mutant, 10), "more seconds may find it"
    assert not items.is_valid(survivor, replace(mutant, digest="another"))
    path = tmp_path / "tests" / "test_small.py"
    path.parent.mkdir()
    path.write_text(TESTS + "\n\ndef test_another(): ...\n")
    changed = Items(tmp_path, small_map)
    assert not changed.is_valid(survivor, mutant)
    mutants.write_records(judged.values(), tmp_path / "records.json")
    assert {*mutants.read_records(tmp_path / "records.json").values()} == {*judged.values()}


def test_a_function_that_no_test_runs_is_uncovered(small: Path, judged: dict[str, Record]) -> None:
    mutant = next(small_mutants(small))
    assert Items(small, Recording().map()).choose(mutant, budget=60) == []
    assert not any(record.result == "uncovered" for record in judged.values())


def test_equivalent_mutants_are_no_part_of_the_score(
    judged: dict[str, Record],
) -> None:
    survivor = judged["return x + x if x >= 0 else 0"]
    reasons = {"equivalent": {}, "accepted": {}}
    assert mutants.score(judged.values(), reasons) < 1
    assert "survived" in mutants.section(judged.values(), reasons)
    reasons["equivalent"][survivor.id] = "0 + 0 is 0."
    assert mutants.score(judged.values(), reasons) == 1
    assert "0 + 0 is 0." in mutants.section(judged.values(), reasons)


def test_the_page_has_the_results() -> None:
    text = mutants.section(mutants.read_records().values(), mutants.read_reasons())
    page = mutants.PAGE.read_text("utf-8")
    assert page == mutants.with_section(page, text), "run: python -m tests.mutants page"


@pytest.mark.parametrize("room", ROOMS)
def test_most_faults_of_a_room_are_seen(room: str) -> None:
    of_room = [record for record in mutants.read_records().values() if record.room == room]
    least = 0.9 if room in ("parallel", "step", "optim", "train", "model", "generate") else 0.8
    assert len(of_room) >= 25 and mutants.score(of_room, mutants.read_reasons()) >= least


def test_reasons_are_of_survivors() -> None:
    records = mutants.read_records()
    for reasons in mutants.read_reasons().values():
        for name in reasons:
            assert records[name].result in ("survived", "uncovered"), f"{name} is seen by a test"


def test_what_only_a_gpu_runs_exists() -> None:
    """The lists of what is left out name files, functions and classes of the package."""
    from tests.mutations import GPU_CLASSES, GPU_FILES, GPU_FUNCTIONS

    names = [*GPU_FUNCTIONS, *GPU_CLASSES]
    assert all((mutants.ROOT / path).is_file() for path in GPU_FILES)
    for path, _, name in (name.partition(":") for name in names):
        assert name in _definitions(mutants.ROOT / path), f"{path} has no {name}"
    assert all((mutants.ROOT / path).exists() for path in ROOMS.values())


def _definitions(path: Path) -> set[str]:
    definitions: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            definitions.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            definitions |= {f"{node.name}.{one.name}" for one in inner if hasattr(one, "name")}
    return definitions
