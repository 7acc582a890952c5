"""The faces of rooms: names that other rooms import, each loaded when it is first used.

The `__init__.pyi` of a room lists them, for type checkers and for this module alike. Nothing is
loaded that nobody uses, so that a plan needs no torch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a room. A name is read from its module at every use: what a
    test puts in its place is seen here too."""

    @cache
    def sources() -> dict[str, tuple[str, str]]:
        stub = Path(sys.modules[package].__path__[0]) / "__init__.pyi"
        return {
            alias.asname or alias.name: (node.module or package, alias.name)
            for node in ast.parse(stub.read_text("utf-8")).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def load(name: str) -> Any:
        if name.startswith("__") or name not in sources():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, inner = sources()[name]
        if module == package:
            return import_module(f"{package}.{inner}")
        return getattr(import_module(module), inner)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *sources()})

    return load, names
