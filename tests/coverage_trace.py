"""Which functions of the packages a process runs, and which files of the repository it opens
(presets, tables, pages: what Python reads by itself is left out), one line at the first of each.

A line belongs to a context: a test item, a fixture with a wider scope, or a cached function of the
tests. The context of a test worker lies in memory that its forks share, so that ranks of a pool
write under the test that uses them. A spawned process reads it from the environment.

This module is loaded before all others in every process, and imports the standard library alone.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER, CONTEXT = "FIVEFOLD_COVERAGE", "FIVEFOLD_COVERAGE_CONTEXT"
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fivefold", "fivefold_page", "fivefold_score")
# Ranks of a pool outlive a test: calls in this folder look whether the next one has begun.
NEVER_OFF = "fivefold/launch/"
# Caches of these rooms are cheap to fill again: a test would hide from the next what they run.
CLEARED = tuple(
    f"{prefix}."
    for prefix in (
        "fivefold.bridges",
        "fivefold.core",
        "fivefold.cost",
        "fivefold.planner",
        "fivefold_page",
        "fivefold_score",
    )
)
NO_CONTEXT = "0" * 12
_SIZE = len(NO_CONTEXT)


def digest(name: str) -> str:
    return blake2b(name.encode(), digest_size=_SIZE // 2).hexdigest()


def function_name(code: CodeType) -> str:
    """File and qualified name; nested functions count as the one around them. Code of modules and
    class bodies has no name."""
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return ""
    name = code.co_qualname.partition(".<locals>")[0]
    path = code.co_filename
    if name.startswith("<") or not path.startswith(_PREFIXES):
        return ""
    return f"{path[len(str(ROOT)) + 1 :]}:{name}"


def file_name(path: str) -> str:
    """The name of a file that is data, and of a script, as a function of no name."""
    folder, _, rest = path.removeprefix(_ROOT).partition(os.sep)
    own = not folder.startswith((".", "build")) and not rest.endswith(".pyc")
    is_module = path.endswith(".py") and (folder in PACKAGES or folder == "tests")
    return f"{path.removeprefix(_ROOT)}:" if own and not is_module else ""


_ROOT = f"{ROOT}{os.sep}"
_PREFIXES = tuple(f"{ROOT / package}{os.sep}" for package in PACKAGES)


class Trace:
    """The lines of one process and its forks."""

    def __init__(self, folder: Path) -> None:
        self.owner = os.getpid()
        path = folder / f"{time.time_ns()}-{self.owner}.txt"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._shared = mmap.mmap(-1, _SIZE)
        self._shared[:] = os.environ.get(CONTEXT, NO_CONTEXT).encode()
        self._local = self._shared[:]
        self._names: dict[CodeType, str] = {}
        self._seen: set[CodeType | str] = set()
        self._defined: set[str] = set()
        self._stack: list[list[Any]] = []
        self._opens = True

    def write(self, *fields: object) -> None:
        try:
            os.write(self._file, (" ".join(map(str, fields)) + "\n").encode())
        except OSError:  # a test that fills its disk, or closes all files
            return

    def define(self, name: str) -> str:
        """The digest of a name, which the file gives once."""
        short = digest(name)
        if short not in self._defined:
            self._defined.add(short)
            self.write("name", short, name)
        return short

    def start(self) -> None:
        if sys.version_info >= (3, 12):
            monitoring = sys.monitoring
            tool, event = monitoring.COVERAGE_ID, monitoring.events.PY_START
            monitoring.use_tool_id(tool, "fivefold")
            monitoring.register_callback(tool, event, self._on_start)
            monitoring.set_events(tool, event)
        else:
            threading.setprofile(self._on_event)
            sys.setprofile(self._on_event)

        sys.addaudithook(self._on_audit)

    def stop(self) -> None:
        self._opens = False
        if sys.version_info >= (3, 12):
            sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)
        else:
            sys.setprofile(None)

    def _on_start(self, code: CodeType, offset: int) -> object:
        self.note(code)
        never_off = NEVER_OFF in self._names.get(code, "")
        return None if never_off else sys.monitoring.DISABLE  # type: ignore[attr-defined]

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.note(frame.f_code)

    def _on_audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self._opens or not isinstance(arguments[0], (str, os.PathLike)):
            return
        path = str(arguments[0])
        try:
            path = path if path.startswith(os.sep) else f"{Path.cwd()}{os.sep}{path}"
        except OSError:  # a test that removes its folder
            return
        if path.startswith(_ROOT) and (name := file_name(path)):
            self._write_first(path, name)

    def note(self, code: CodeType) -> None:
        """Write the first call of a function in the present context."""
        name = self._names.get(code)
        if name is None:
            name = self._names[code] = function_name(code)
        if name:
            self._write_first(code, name)

    def _write_first(self, key: CodeType | str, name: str) -> None:
        if self._local != self._shared[:]:
            self._forget()
        if key not in self._seen:
            self._seen.add(key)
            if self._local != NO_CONTEXT.encode():
                self.write("ran", self._local.decode(), self.define(name))

    def _forget(self) -> None:
        """Every function counts as not yet called: another context has begun."""
        self._local = self._shared[:]
        self._seen = set()
        if sys.version_info >= (3, 12):
            sys.monitoring.restart_events()

    def enter(self, name: str) -> None:
        """Begin a context, within another or after it."""
        now = time.perf_counter()
        if self._stack:
            self._stack[-1][2] += now - self._stack[-1][1]
        self._stack.append([self.define(name), now, 0.0])
        self._switch()

    def leave(self) -> None:
        """End it; its own seconds leave out those of the contexts in it."""
        now = time.perf_counter()
        short, began, seconds = self._stack.pop()
        self.write("took", short, f"{seconds + now - began:.4f}")
        if self._stack:
            self._stack[-1][1] = now
        self._switch()

    def _switch(self) -> None:
        current = self._stack[-1][0] if self._stack else NO_CONTEXT
        self._shared[:] = current.encode()
        os.environ[CONTEXT] = current
        self._forget()

    def link(self, name: str) -> None:
        """What ran in the context of this name counts for the present one too."""
        if self._local != NO_CONTEXT.encode():
            self.write("uses", self._local.decode(), self.define(name))

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A context that the present one uses; in a fork, the present one."""
        if os.getpid() != self.owner:
            yield
            return
        self.link(name)
        self.enter(name)
        try:
            yield
        finally:
            self.leave()


def cache_with_context(trace: Trace, function: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.cache` of a function of the tests: all who call it count as running what filled
    it."""
    code = function.__code__
    name = f"cache {code.co_filename}:{code.co_qualname}"

    @functools.wraps(function)
    def computed(*args: Any, **named: Any) -> Any:
        with trace.within(name):
            return function(*args, **named)

    cached = functools.lru_cache(maxsize=None)(computed)

    @functools.wraps(function)
    def linked(*args: Any, **named: Any) -> Any:
        trace.link(name)
        return cached(*args, **named)

    linked.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return linked


def watch_caches(trace: Trace) -> None:
    """Caches of tests that are imported from now on have contexts."""
    plain = functools.cache
    others = (*_PREFIXES, sys.prefix, sys.base_prefix)

    def cache(function: Callable[..., Any]) -> Callable[..., Any]:
        code = getattr(function, "__code__", None)
        if code is None or code.co_filename.startswith(others):
            return plain(function)
        return cache_with_context(trace, function)

    functools.cache = cache  # type: ignore[assignment]


def clear_caches() -> None:
    """Caches of the rooms that plan are empty, so that each test runs what it needs."""
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(CLEARED):
            for value in list(vars(module).values()):
                if isinstance(value, _CACHE):
                    value.cache_clear()


_CACHE = type(functools.lru_cache(maxsize=None)(digest))


@functools.cache
def begin() -> Trace | None:
    """Record this process where the environment asks for it, once."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    trace = Trace(Path(folder))
    trace.start()
    atexit.register(trace.stop)  # modules lose their names after it
    return trace
