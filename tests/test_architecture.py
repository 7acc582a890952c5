"""The house rules: who may import whom, how large things may grow, what never loads torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.house import (
    BESIDE,
    BLANK_NAMES,
    FILES,
    KNOWN,
    PACKAGE,
    ROOT,
    identifiers,
    longest_chain,
    module_name,
    nodes,
    parsed,
    room,
    tree,
    trees,
)

MOST_FILES = 426  # beside the faces of rooms
MOST_CHAIN = 20  # modules of which each imports the next one when it is loaded
MOST_LINES = 800
MOST_FUNCTION_LINES = 100
MOST_FUNCTION_LINES_P95 = 50

RUNTIME = {"core", "cost", "model", "parallel", "step", "optim", "data", "launch"}
# Each room and the rooms it may import; a room that is not listed may not exist.
ARROWS = {
    "faces": set[str](),
    "core": set[str](),
    "cost": {"core"},
    "planner": {"core", "cost"},
    "records": {"core", "cost", "planner"},
    "render": {"core", "cost", "planner", "records"},
    "fivefold_score": {"core", "cost", "planner", "records", "render"},
    "fivefold_page": {"core", "cost", "planner", "records", "render", "__init__"},
    "model": {"core"},
    "parallel": {"core", "cost", "model"},
    "step": {"core", "model", "parallel", "optim"},
    "optim": {"core", "cost"},
    "data": {"core", "model"},
    "launch": {"core"},
    "bridges": {"core"},
    "huggingface": {"core", "model"},
    "generate": {"core", "model", "parallel", "launch", "huggingface", "records"},
    "serve": {"core", "generate", "launch"},
    "calibrate": {"core", "cost", "model", "launch"},
    "verify": RUNTIME | {"generate"},
    "rehearse": RUNTIME | {"planner"},
    "train": RUNTIME | {"planner", "records", "generate"},
    "commands": {
        *("core", "cost", "planner", "records", "render", "data", "launch", "huggingface"),
        *("generate", "serve", "calibrate", "verify", "rehearse", "train", "bridges"),
        *("completion", "terminal"),
        *BESIDE,
    },
    "cli": {"core", "__init__", "terminal", "completion"},
    "terminal": set[str](),
    "completion": set[str](),
    "__main__": {"cli"},
    "__init__": {"commands", "core", "train"},  # only when a name is used
}
WITHOUT_TORCH = (
    *("core", "cost", "planner", "records", "render", "bridges", *BESIDE),
    *("cli", "__main__", "__init__", "terminal", "completion", "faces"),
)
COMMANDS_WITHOUT_TORCH = (
    *("__init__", "compare_frameworks", "job", "launch", "observe", "options", "plan", "schedule"),
    *("score", "search", "simulate", "tokens"),
)
# It has no face: `fivefold` has its functions, and the command line loads one module of it.
OPEN = ("commands",)
# What several commands share; no command imports another.
SHARED_BY_COMMANDS = ("job", "options", "search", "titan_weights", "train_start")
# Blank names that other libraries dictate.
FOREIGN_NAMES = {
    "fivefold.generate.chat_worker": {"now"},  # datetime.now, of what templates call strftime_now
    "fivefold.serve.api": {"now"},  # datetime.now
}
# Of the five dimensions; they meet only in composition.
ROOMS = ("data", "tensor", "pipeline", "context", "expert")

PACKAGES = frozenset(module_name(path) for path in FILES if path.name == "__init__.py")

# What a launcher tells its processes. One module reads it, so that all agree on the rank.
LAUNCHER = "fivefold.launch.launcher"
OF_LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|NODE_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(SLURM|TORCHELASTIC|PMI|OMPI)_\w+"
)


@cache
def imports(path: Path, *, runtime_only: bool = False) -> set[str]:
    """Modules that a file imports, wherever in it; `runtime_only` leaves out what types need."""
    skipped: set[ast.AST] = set()
    for node in nodes(tree(path)) if runtime_only else ():
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= set(ast.walk(node))
    names: set[str] = set()
    for node in nodes(tree(path)):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports from the root"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = inner & KNOWN
            names |= modules
            if modules != inner:
                names.add(node.module or "")
    return names


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in nodes(tree(path)) if isinstance(node, kinds)]


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_arrows(path: Path) -> None:
    here = room(module_name(path))
    assert here in ARROWS, f"{here} is not a room of the house"
    ours = {name for name in imports(path) if name.startswith(("fivefold.", "fivefold_"))}
    wrong = {name for name in ours if room(name) not in {here, "faces", *ARROWS[here]}}
    assert not wrong, f"{path} may not import {wrong}"
    parts = {"commands": COMMANDS_WITHOUT_TORCH}
    if here in WITHOUT_TORCH or path.stem in parts.get(here, ()):
        assert not {name for name in imports(path) if name.split(".")[0] == "torch"}


def package_of(path: Path) -> str:
    """The room of a file: the package that it is in. A module beside the rooms is its own."""
    name = module_name(path)
    inner = (
        name if path.name == "__init__.py" or path.parent == PACKAGE else name.rpartition(".")[0]
    )
    return inner


@cache
def faces() -> dict[str, set[str]]:
    """The names of each room that other rooms may import."""
    return {
        package_of(path): {
            alias.asname or alias.name
            for node in ast.parse(path.with_suffix(".pyi").read_text("utf-8")).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for path in FILES
        if path.with_suffix(".pyi").exists()
    }


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    """Each module or room that a file imports from, and a name."""
    for node in nodes(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)


def inner_imports(path: Path) -> Iterator[str]:
    """What a file imports of other rooms beside their faces."""
    known = faces()
    for module, name in imported_names(path):
        owner = module if module in known or module in PACKAGES else module.rpartition(".")[0]
        if owner == package_of(path) or owner not in known:
            continue
        if module != owner or name not in known[owner]:
            yield f"{module}.{name}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_rooms_are_imported_by_their_faces(path: Path) -> None:
    assert not list(inner_imports(path)), "import it from the room, and list it in its __init__.pyi"


def test_faces_have_what_others_import_and_no_more() -> None:
    used: defaultdict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for module, name in imported_names(path):
            if module != package_of(path):
                used[module].add(name)
    for owner, names in faces().items():
        assert names == names & used[owner], f"{owner} lists what no room imports"


def test_the_rooms_do_not_know_one_another() -> None:
    for name in ROOMS:
        known = imports(PACKAGE / "parallel" / f"{name}.py")
        others = {
            f"fivefold.parallel.{other}" for other in (*ROOMS, "composition") if other != name
        }
        assert not known & others


def test_no_command_imports_another() -> None:
    shared = {f"fivefold.commands.{name}" for name in SHARED_BY_COMMANDS}
    for path in (PACKAGE / "commands").glob("*.py"):
        others = {name for name in imports(path) if name.startswith("fivefold.commands.")}
        assert others <= shared, f"{path} imports {others - shared}"


def test_no_import_cycle() -> None:
    graph = {module_name(path): imports(path, runtime_only=True) for path in FILES}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"import cycle: {' → '.join((*above, module))}"
        if module in done or module not in graph:
            return
        for name in graph[module]:
            visit(name, (*above, module))
        done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_sizes_and_types(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= MOST_LINES
    assert path.name != "utils.py"
    for node in functions(path):
        assert length(node) <= MOST_FUNCTION_LINES, f"{path}: {node.name} is too long"
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        untyped = [
            each.arg
            for each in arguments
            if each.annotation is None and each.arg not in ("self", "cls")
        ]
        assert node.returns is not None and not untyped, f"{path}: {node.name} is not typed"


def test_functions_fit_on_a_screen() -> None:
    lengths = sorted(length(node) for path in FILES for node in functions(path))
    assert lengths[int(0.95 * len(lengths))] <= MOST_FUNCTION_LINES_P95


def test_nothing_is_left_for_later() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")
    for path in [*FILES, *(ROOT / "tests").rglob("*.py")]:
        found = [mark for mark in marks if mark in path.read_text("utf-8")]
        assert not found, f"{path} has {found}"


def test_the_house_has_few_files() -> None:
    modules = [path for path in FILES if path.name != "__init__.py"]
    assert len(modules) <= MOST_FILES, "merge modules of one idea before adding another"


def test_chains_of_imports_are_short() -> None:
    chain = longest_chain()
    assert len(chain) <= MOST_CHAIN, f"join modules of one idea: {' → '.join(chain)}"


def duplicate_classes(modules: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Names of more than one class, and where they are."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, module in modules.items():
        for node in nodes(module):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    return {name: where for name, where in found.items() if len(where) > 1}


def test_class_names_are_unique() -> None:
    assert not duplicate_classes(trees())


def test_a_duplicate_class_name_is_seen() -> None:
    modules = parsed(a="class Run: ...", b="def f():\n    class Run: ...", c="class Other: ...")
    assert duplicate_classes(modules) == {"Run": ["fivefold.a", "fivefold.b"]}


def blank_names(modules: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Identifiers of each module that say nothing, beside those of other libraries."""
    found = {
        name: BLANK_NAMES.intersection(identifiers(module)) - FOREIGN_NAMES.get(name, set())
        for name, module in modules.items()
    }
    return {name: names for name, names in found.items() if names}


def test_identifiers_are_nouns() -> None:
    assert not blank_names(trees())


def test_a_blank_name_is_seen() -> None:
    modules = parsed(
        a="def held(mine: int) -> int:\n    return f(rest=mine).whole",
        b='"""The rest of it."""\nshards = {"kept": 1}  # some',
    )
    assert blank_names(modules) == {"fivefold.a": {"held", "mine", "rest", "whole"}}
    datetime_now = {"fivefold.serve.api": ast.parse("datetime.now()")}
    assert not blank_names(datetime_now)


def launcher_readers(modules: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """The launcher's variables that each module names, in strings of their own."""
    found: dict[str, set[str]] = {}
    for name, module in modules.items():
        strings = {node.value for node in nodes(module) if isinstance(node, ast.Constant)}
        names = {one for one in strings if isinstance(one, str) and OF_LAUNCHER.fullmatch(one)}
        if names:
            found[name] = names
    return found


def test_one_module_reads_the_launcher() -> None:
    assert launcher_readers(trees()).keys() == {LAUNCHER}


def test_a_second_reader_of_the_launcher_is_seen() -> None:
    modules = parsed(
        a='"""The RANK of WORLD_SIZE."""\nimport os\nrank = os.environ.get("LOCAL_RANK", "0")',
        b='def f(names):\n    return int(names["SLURM_PROCID"]), names["MASTER_PORT"]',
        c='raise ValueError("RANK is not a number: set RANK")',
    )
    assert launcher_readers(modules) == {
        "fivefold.a": {"LOCAL_RANK"},
        "fivefold.b": {"SLURM_PROCID", "MASTER_PORT"},
    }


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["schedule", "zb-v", "--stages", "4", "--microbatches", "8"],
        ["schedule", "auto", "--stages", "3", "--microbatches", "6", "--json"],
        ["plan", "tiny-moe", "--layout", "dp=2 tp=2 ep=2", "--json"],
        ["launch", "slurm", str(ROOT / "examples/launch/plan.toml"), "--json"],
        ["plan", "tiny-moe", "--layout", "dp=2 tp=2 ep=2", "--machine", "h100", "--json"],
        ["plan", "tiny", "--serve", "--machine", "h100", "--gpus", "2", "--prompt", "9", "--json"],
    ],
    ids=lambda words: words[0],
)
def test_starts_without_torch(words: list[str]) -> None:
    """Only estimates, which need a machine, may wait for numpy."""
    heavy = {"torch"} if "--machine" in words else {"torch", "numpy"}
    code = (
        "import sys; from fivefold.cli import main\n"
        f"try: main({words!r})\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        f"loaded = {heavy!r} & set(sys.modules); assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
