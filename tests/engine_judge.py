"""The argument parsers of vLLM and SGLang, from their sources, on a machine that cannot run them.

    python -m tests.engine_judge vllm FOLDER < commands      (one command line a line)

FOLDER is a checkout. Modules that are not installed or need a GPU are replaced by hollow ones: any
name of them is a class of which everything is allowed. The parser itself, with its names, types and
choices, is all theirs. Prints the arguments of each command as JSON, or how parsing failed.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import shlex
import sys
import types
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

# Of theirs: compiled, or not needed to read arguments and full of what is not installed.
HOLLOW_PARTS = {
    "vllm": ("vllm._C", "vllm._rocm_C", "vllm._moe_C"),
    "sglang": (
        *("sglang.srt.function_call", "sglang.kernels", "sglang.srt.connector"),
        *("sglang.srt.configs", "sglang.srt.utils.hf_transformers_utils"),
    ),
}


class AnyClass(type):
    """The class of hollow names: attributes, calls and items of them are hollow again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return hollow(name)

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__


def hollow(name: str) -> Any:
    """A class that takes everything; as a decorator it gives back what it decorates."""

    def new(cls: type, *args: Any, **keys: Any) -> Any:
        is_decorated = len(args) == 1 and not keys and callable(args[0]) and cls.__name__ == name
        return args[0] if is_decorated else object.__new__(cls)

    def quiet(self: object, *args: Any, **keys: Any) -> None:
        return None

    def get(self: object, other: str) -> Any:
        if other.startswith("__"):
            raise AttributeError(other)
        return hollow(other)

    def schema(cls: type, source: object, handler: object) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    members: dict[str, Any] = {"__new__": new, "__init__": quiet, "__getattr__": get}
    members |= {"__call__": new, "__init_subclass__": classmethod(quiet)}
    members["__iter__"] = lambda self: iter(())  # pyright: ignore[reportUnknownLambdaType]
    members["__get_pydantic_core_schema__"] = classmethod(schema)
    return AnyClass(name, (), members)


class HollowModule(types.ModuleType):
    """A module with every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return hollow(name)


class HollowFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes after all other finders, and before them for some modules."""

    def __init__(self, ours: str, first: Sequence[str]) -> None:
        self.ours, self.first = ours, tuple(first)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        parts = [".".join(fullname.split(".")[:i]) for i in range(1, fullname.count(".") + 2)]
        if not set(parts) & set(self.first):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return HollowModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


class MissingFinder(HollowFinder):
    """For whatever nobody finds and their own code imports. Installed packages look for others to
    see what is there, and have to be told the truth."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        root = fullname.split(".")[0]
        inside = isinstance(sys.modules.get(root), HollowModule)
        if not inside and (root == self.ours or importer() != self.ours):
            return None
        return ModuleSpec(fullname, self, is_package=True)


def importer() -> str:
    """The package whose code imports."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).split(".")[0]


def parser_of(engine: str, folder: Path) -> argparse.ArgumentParser:
    """The parser of an engine's server."""
    # What is installed looks at others here, before any of these is hollow.
    import_module("transformers.models.auto.image_processing_auto")
    sys.path.insert(0, str(folder / "python" if engine == "sglang" else folder))
    sys.meta_path.insert(0, HollowFinder(engine, HOLLOW_PARTS[engine]))
    sys.meta_path.append(MissingFinder(engine, ()))
    if engine == "vllm":
        platforms = import_module("vllm.platforms")
        cpu = import_module("vllm.platforms.cpu").CpuPlatform()
        vars(platforms)["_current_platform"] = cpu  # or it would look for devices in hollow modules
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser(exit_on_error=False)
        parser.add_argument("model_tag", nargs="?")  # as `vllm serve` has it
        return AsyncEngineArgs.add_cli_args(parser)
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


def judged(engine: str, parser: argparse.ArgumentParser, line: str) -> dict[str, Any]:
    """What a command says to the parser."""
    words = shlex.split(line)
    start = 2 if engine == "vllm" else 3  # vllm serve; python -m sglang.launch_server
    try:
        return {"found": vars(parser.parse_args(words[start:]))}
    except (argparse.ArgumentError, SystemExit, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    engine, folder = sys.argv[1], Path(sys.argv[2])
    out = sys.stdout
    sys.stdout = sys.stderr  # whatever they print
    parser = parser_of(engine, folder)
    for line in sys.stdin:
        print(json.dumps(judged(engine, parser, line), default=str), file=out, flush=True)


if __name__ == "__main__":
    main()
