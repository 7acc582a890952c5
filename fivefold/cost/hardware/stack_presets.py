"""Other people's software stacks: one TOML each, read strictly.

A file has `what` and `source`, the tables `memory` and `speed` with the keys of `StackMemory` and
`SoftwareStack`, and `fitted`, which names for each number that was fitted the sources whose runs it
was fitted to. `pooled` gives a number source by source: the stack has their geometric mean. A file
may start from another stack with `base`. A stack without a source is the same stack, but a number
that was fitted to that source alone is left to its base, and pooled ones are those of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, cast

from fivefold.core import PRESETS, BadFile, FivefoldError, UnknownName, did_you_mean, tables
from fivefold.cost.hardware.stack import SoftwareStack

Table = dict[str, Any]
_TABLES = ("memory", "speed")
_MOST_BASES = 8
OUR_OWN = "fivefold"  # a source of numbers that are measured, not fitted


@dataclass(frozen=True)
class StackPreset:
    """A stack, what it is, and which of its numbers were fitted to the runs of which sources."""

    what: str
    source: str
    stack: SoftwareStack
    fitted: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    open: tuple[str, ...] = ()  # stacks that its source allows as well


@dataclass(frozen=True)
class _StackFile:
    """The keys of a file."""

    what: str
    source: str
    base: str = ""
    open: tuple[str, ...] = ()
    memory: dict[str, Any] = field(default_factory=dict[str, Any])
    speed: dict[str, Any] = field(default_factory=dict[str, Any])
    fitted: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    pooled: dict[str, dict[str, dict[str, float]]] = field(
        default_factory=dict[str, dict[str, dict[str, float]]]
    )


def presets() -> list[str]:
    """The names of all stacks of other people."""
    return sorted(path.stem for path in (PRESETS / "stacks").glob("*.toml"))


def fitted_numbers() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The file, the key and the sources of every number of a stack that was fitted; a pooled number
    was fitted once for each of its sources."""
    for name in presets():
        stack_file = _read(_preset_file(name))
        for key in _flat(stack_file):
            head, tail = key.split(".", 1)
            sources = _sources(stack_file, key)
            if stack_file.pooled.get(head, {}).get(tail):
                yield from ((f"stacks/{name}", key, (source,)) for source in sources)
            elif sources:
                yield f"stacks/{name}", key, sources


def load_stack(name_or_path: str, without: str = "") -> SoftwareStack:
    """The stack of a name or a file; `without`: a source to which none of its numbers is fitted."""
    return load_preset(name_or_path, without).stack


@lru_cache
def load_preset(name_or_path: str, without: str = "") -> StackPreset:
    """The stack of a preset name in any case, or of a TOML file (with a slash or `.toml`)."""
    if re.search(r"[/\\]|\.toml$", name_or_path):
        path = Path(name_or_path)
    elif name_or_path.lower() in presets():
        path = _preset_file(name_or_path.lower())
    else:
        known = ", ".join(presets())
        error = UnknownName("stack", name_or_path, presets())
        message = str(error)
        raise error if known in message else FivefoldError(f"{message} known stacks: {known}")
    return _build(path, without)


def _preset_file(name: str) -> Path:
    return PRESETS / "stacks" / f"{name}.toml"


def _build(path: Path, without: str) -> StackPreset:
    chain = _chain(path)
    flat: Table = {}
    fitted: dict[str, tuple[str, ...]] = {}
    for where, stack_file in chain:
        for key, value in _flat(stack_file, without).items():
            sources = _sources(stack_file, key)
            if sources == (without,):
                continue
            flat[key] = value
            fitted.pop(key, None)
            if sources:
                fitted[key] = sources
        # What was fitted must be a number of the same file.
        known = _flat(stack_file)
        keys = [f"{head}.{tail}" for head, table in stack_file.fitted.items() for tail in table]
        if problems := [
            f"fitted {key}: {did_you_mean(key, known)}" for key in keys if key not in known
        ]:
            raise BadFile(str(where), problems)
    table: Table = {"name": path.stem, "memory": {}}
    for key, value in flat.items():
        _put(table, key.removeprefix("speed."), value)
    stack = tables.build(SoftwareStack, table, str(path))
    last = chain[-1][1]
    return StackPreset(last.what, last.source, stack, fitted, last.open)


def _chain(path: Path) -> list[tuple[Path, _StackFile]]:
    """The file and its bases, the outermost base first."""
    chain: list[tuple[Path, _StackFile]] = []
    while len(chain) < _MOST_BASES:
        stack_file = _read(path)
        chain.insert(0, (path, stack_file))
        if not stack_file.base:
            return chain
        if stack_file.base not in presets():
            problem = f"base = {stack_file.base!r}: {did_you_mean(stack_file.base, presets())}"
            raise BadFile(str(path), [problem])
        path = _preset_file(stack_file.base)
    raise BadFile(str(path), [f"base: more than {_MOST_BASES} stacks, one inside another"])


def _read(path: Path) -> _StackFile:
    table = tables.read_toml(path)
    known = _StackFile.__dataclass_fields__
    problems = [f"unknown key {key!r}: {did_you_mean(key, known)}" for key in table.keys() - known]
    problems += [f"{key}: expected a table" for key in _TABLES if not _is_table(table.get(key, {}))]
    problems += [f"missing key {key!r}: add it" for key in ("what", "source") if key not in table]
    if problems:
        raise BadFile(str(path), problems)
    plain = {key: value for key, value in table.items() if key not in _TABLES}
    stack_file = tables.build(_StackFile, plain, str(path))
    numbers = {key: table.get(key, {}) for key in _TABLES}
    return replace(stack_file, **numbers)


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _flat(stack_file: _StackFile, without: str = "") -> Table:
    """The numbers of a file by their dotted keys, such as `memory.cache.most`."""
    settings: Table = {}

    def add(table: Mapping[str, Any], path: str) -> None:
        for key, value in table.items():
            if isinstance(value, Mapping):
                add(cast("Mapping[str, Any]", value), f"{path}{key}.")
            else:
                settings[path + key] = value

    add(stack_file.memory, "memory.")
    add(stack_file.speed, "speed.")
    for head, numbers in stack_file.pooled.items():
        for key, by_source in numbers.items():
            pool = [constant for source, constant in by_source.items() if source != without]
            if pool:
                settings[f"{head}.{key}"] = prod(pool) ** (1 / len(pool))
    return settings


def _put(table: Table, key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        table = table.setdefault(part, {})
    table[last] = value


def _sources(stack_file: _StackFile, key: str) -> tuple[str, ...]:
    head, tail = key.split(".", 1)
    if pooled := stack_file.pooled.get(head, {}).get(tail):
        return tuple(source for source in pooled if source != OUR_OWN)
    text = stack_file.fitted.get(head, {}).get(tail, "")
    return tuple(source.strip() for source in text.split(",") if source.strip())
