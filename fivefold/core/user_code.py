"""Code of a user, named as `FILE.py:NAME`: a callback, an optimizer, a mixer or a schedule.

The file runs when a plan or a command that names it is used, once in a process. A file that the
process has loaded already, as its script or by an import, does not run again.
"""

from __future__ import annotations

import hashlib
import re
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from fivefold.core.errors import BadFile, FivefoldError, UnknownName

_NAMED = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


def is_code(text: str) -> bool:
    """Whether a text names code of a user.

    >>> is_code("my_file.py:MyCallback"), is_code("my_file.py"), is_code("adamw")
    (True, False, False)
    """
    return _NAMED.fullmatch(text) is not None


def split_code(text: str) -> tuple[str, str]:
    """The file and the name in it."""
    match = _NAMED.fullmatch(text)
    if match is None:
        raise BadFile(text, ["code of your own is named as FILE.py:NAME"])
    return match[1], match[2]


def load_code(text: str) -> Any:
    """The class, function or value that a text names; raises if there is none."""
    file, name = split_code(text)
    path = Path(file)
    if not path.is_file():
        start = "a relative path starts where the command runs, and in a plan at the plan's folder"
        raise BadFile(text, [f"there is no file {file}: {start}"])
    names = vars(_module(path.resolve()))
    if name not in names:
        raise UnknownName(f"name in {file}", name, [key for key in names if key[0] != "_"])
    return names[name]


def code_text(value: Any) -> str:
    """The text that names a class or function, so that a plan and other processes can have it."""
    file = getattr(sys.modules.get(value.__module__), "__file__", None)
    if file is None or "." in value.__qualname__:
        raise FivefoldError(
            f"{value.__qualname__} is in no file that another process could load: write it at the "
            "top level of a file, and give it from there, or as FILE.py:NAME"
        )
    return f"{file}:{value.__name__}"


@cache
def _module(path: Path) -> ModuleType:
    """The module of a file: the one that is loaded, or a new one."""
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if file and file.endswith(path.name) and Path(file).resolve() == path:
            return module
    # Ranks receive objects of its classes by this name.
    name = f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "Python knows how to load .py"
    sys.modules[name] = module = module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as for a script: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except FivefoldError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise BadFile(str(path), [f"it raised {type(error).__name__}: {error}"]) from error
    finally:
        sys.path.remove(str(path.parent))
    return module
