"""The files of the package, as trees: what the tests of the house rules read."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

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
