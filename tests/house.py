"""The files of the packages as trees, which the tests of the house rules read.

    python -m tests.house

prints the size of each room beside its budget, the names that its face has, comments, names that
say nothing, and the longest chain of imports.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fivefold"
BESIDE = ("fivefold_page", "fivefold_score")  # packages of the same distribution
FILES = sorted(path for name in ("fivefold", *BESIDE) for path in (ROOT / name).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_room = parts[-1] == "__init__" and parts != ("fivefold", "__init__")
    return ".".join(parts[:-1] if is_room else parts)


KNOWN = frozenset(module_name(each) for each in FILES)


def room(module: str) -> str:
    package, inner, *_ = [*module.split("."), "__init__"]
    return package if package in BESIDE else inner


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes(module: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a module: many rules look through them."""
    return tuple(ast.walk(module))


def trees() -> dict[str, ast.Module]:
    return {module_name(path): tree(path) for path in FILES}


def parsed(**sources: str) -> dict[str, ast.Module]:
    """Modules that are not in the package: to see a rule fail."""
    return {f"fivefold.{name}": ast.parse(source) for name, source in sources.items()}


# What a name should not be: a pronoun, a participle or an adverb in place of a noun.
BLANK_NAMES = {
    *("each", "found", "one", "made", "given", "kept", "asked", "told", "mine", "here", "there"),
    *("rest", "more", "whole", "place", "held", "room", "way", "words", "said", "wanted", "now"),
    *("how", "some", "both", "others"),
}
# Lines and files that each room may have in the end.
BUDGETS = {
    "core": (10_500, 30),
    "cost": (8_500, 26),
    "planner": (4_000, 14),
    "model": (5_800, 20),
    "parallel": (4_800, 16),
    "train": (5_200, 18),
    "verify, rehearse": (3_400, 14),
    "generate, serve": (7_000, 30),
    "optim, data": (4_400, 20),
    "launch": (3_500, 14),
    "huggingface, bridges": (5_500, 20),
    "records": (2_200, 7),
    "commands, render": (6_500, 18),
    "fivefold_page": (8_500, None),
    "fivefold_score": (1_500, None),
}


class Measures(NamedTuple):
    """What is measured of some files."""

    files: int
    lines: int
    comments: int
    identifiers: int
    blank: int
    face: int  # names that other rooms may import

    @classmethod
    def of(cls, paths: list[Path]) -> Measures:
        names = Counter(name for path in paths for name in identifiers(tree(path)))
        texts = [path.read_text("utf-8") for path in paths]
        stubs = [path.with_suffix(".pyi") for path in paths if path.name == "__init__.py"]
        return cls(
            len(paths),
            sum(len(text.splitlines()) for text in texts),
            sum(map(num_comments, texts)),
            names.total(),
            sum(names[name] for name in BLANK_NAMES),
            sum(len(stub.read_text("utf-8").splitlines()) for stub in stubs if stub.exists()),
        )


def identifiers(module: ast.Module) -> Iterator[str]:
    """Every use of a name: variables, attributes, parameters and keywords, functions, classes."""
    for node in nodes(module):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.keyword(arg=str(name)):
                yield name


def num_comments(text: str) -> int:
    """Lines that have a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


@cache
def _stubs() -> dict[str, Path]:
    return {module_name(stub.with_suffix(".py")): stub for stub in ROOT.glob("fivefold*/**/*.pyi")}


def imported_modules(path: Path) -> set[str]:
    """Modules of the packages that a file imports when it is loaded."""
    faces = _stubs()
    modules: set[str] = set()
    for node in tree(path).body:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("fivefold"):
            continue
        for alias in node.names:
            module = f"{node.module}.{alias.name}"
            if module in KNOWN:
                modules.add(module)
            elif node.module in faces:
                modules.add(source_in_face(faces[node.module], alias.name))
            else:
                modules.add(node.module or "")
    return modules


@cache
def _sources(stub: Path) -> dict[str, str]:
    return {
        alias.asname or alias.name: node.module or ""
        for node in ast.parse(stub.read_text("utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def source_in_face(stub: Path, name: str) -> str:
    """The module that a name of a face is loaded from."""
    return _sources(stub)[name]


def longest_chain() -> list[str]:
    """The longest chain of modules of which each imports the next one when it is loaded."""
    graph = {module_name(path): imported_modules(path) for path in FILES}

    @cache
    def chain(module: str) -> tuple[str, ...]:
        return (module, *max((chain(name) for name in graph.get(module, ())), key=len, default=()))

    return list(max(map(chain, graph), key=len))


def report() -> Iterator[str]:
    """The lines of `python -m tests.house`."""
    columns = "{:<22} {:>6} {:>7} {:>8} {:>8} {:>9} {:>6} {:>6}"
    yield columns.format("rooms", "files", "budget", "lines", "budget", "comments", "blank", "face")
    grouped = {name: set(name.split(", ")) for name in BUDGETS}
    others = {room(module_name(path)) for path in FILES} - set().union(*grouped.values())
    grouped["modules of the root"] = others
    for name, rooms in [*grouped.items(), ("all", others.union(*grouped.values()))]:
        size = Measures.of([path for path in FILES if room(module_name(path)) in rooms])
        lines, files = BUDGETS.get(name, (None, None))
        yield columns.format(
            name,
            size.files,
            files or "",
            f"{size.lines:,}",
            f"{lines:,}" if lines else "",
            f"{size.comments / size.lines:.1%}",
            f"{size.blank / size.identifiers:.1%}",
            size.face,
        )
    chain = longest_chain()
    yield f"longest chain of imports: {len(chain)} modules, {' → '.join(chain)}"


if __name__ == "__main__":
    print("\n".join(report()))
