"""Tables in, dataclasses out, and back: unknown keys and wrong types are errors, all at once.

The one reader for every file a user may write (plans, machines) and for our own presets, so that
a typo is treated alike everywhere.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fivefold.core.errors import BadFile, FivefoldError, did_you_mean

T = TypeVar("T")
Table = Mapping[str, Any]


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; a missing or malformed one is a `BadFile` that names it."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(str(path), [f"{error.strerror}; check the path"]) from error
    except RecursionError as error:
        raise BadFile(str(path), ["nested too deep; take some brackets out"]) from error
    except ValueError as error:  # bad TOML, bad UTF-8, or a number too long to read
        raise BadFile(str(path), [f"not valid TOML: {error}; mend that line"]) from error
    if long := [*_long_numbers(table, "")]:
        rule = "whole numbers have at most 64 bits in TOML; give a smaller one"
        raise BadFile(str(path), [f"{key}: {rule}" for key in long])
    return table


def _long_numbers(value: Any, path: str) -> Iterator[str]:
    """Where numbers are that TOML does not allow, and that could be neither printed nor divided."""
    if isinstance(value, Mapping):
        for key, item in typing.cast(Table, value).items():
            yield from _long_numbers(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for item in typing.cast("list[Any]", value):
            yield from _long_numbers(item, path)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield path


def build(cls: type[T], table: Table, where: str) -> T:
    """Make the dataclass `cls` from a table, or raise one `BadFile` with every problem."""
    problems: list[str] = []
    value = _dataclass(cls, table, "", problems)
    if problems:
        raise BadFile(where, problems)
    try:
        return cls(**value)
    except FivefoldError as error:
        raise BadFile(where, [str(error)]) from error


def _dataclass(cls: Any, table: Any, path: str, problems: list[str]) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        problems.append(f"{path.rstrip('.')}: expected a table")
        return {}
    given = typing.cast(Table, table)
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in given:
        if key not in fields:
            problems.append(f"unknown key {path + key!r}: {did_you_mean(key, fields)}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in given:
            values[name] = _value(hints[name], given[name], path + name, problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"missing key {path + name!r}: add it")
    return values


def _value(hint: Any, value: Any, path: str, problems: list[str]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (one for one in arguments if one is not type(None))
        return _value(hint, value, path, problems)
    if dataclasses.is_dataclass(hint):
        before = len(problems)
        fields = _dataclass(hint, value, path + ".", problems)
        return None if len(problems) > before else typing.cast(Any, hint)(**fields)
    if origin is tuple and isinstance(value, (list, tuple)):
        items = typing.cast("list[Any]", value)
        return tuple(
            _value(arguments[0], item, f"{path}[{place}]", problems)
            for place, item in enumerate(items)
        )
    if origin is dict and isinstance(value, Mapping):
        pairs = typing.cast(Table, value)
        return {
            key: _value(arguments[1], item, f"{path}.{key}", problems)
            for key, item in pairs.items()
        }
    if origin is typing.Literal:
        if value not in arguments:
            known = [str(one) for one in arguments]
            problems.append(f"{path} = {value!r}: {did_you_mean(str(value), known)}")
        return value
    return _scalar(hint, value, path, problems)


def _scalar(hint: Any, value: Any, path: str, problems: list[str]) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = hint in (int, float, str, bool)
    if not plain or not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        name = getattr(hint, "__name__", str(hint))
        problems.append(f"{path} = {value!r}: expected {name}")
    return value


def from_text(hint: Any, text: str) -> Any:
    """A text of the command line as a value of that type; a ValueError says what was expected."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if text.lower() == "none":
            return None
        (hint,) = (one for one in typing.get_args(hint) if one is not type(None))
    if dataclasses.is_dataclass(hint):
        raise ValueError("expected none; set its keys one by one, as in moe.experts=8")
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("expected true or false")
        return text.lower() == "true"
    if hint is int:
        if not re.fullmatch(r"-?[0-9][0-9_]{0,30}", text):
            raise ValueError("expected a whole number")
        return int(text)
    if typing.get_origin(hint) is typing.Literal and text not in typing.get_args(hint):
        raise ValueError(did_you_mean(text, [str(one) for one in typing.get_args(hint)]))
    return float(text) if hint is float else text


def table_of(value: Any) -> dict[str, Any]:
    """The dataclass as a table that `build` reads back; unset optional fields are left out."""
    table: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if field.init and item is not None:
            table[field.name] = table_of(item) if dataclasses.is_dataclass(item) else item
    return table


def to_toml(table: Table, prefix: str = "") -> str:
    """Write a table of scalars, lists and tables as TOML; scalars first, as TOML requires."""
    plain = {key: item for key, item in table.items() if not isinstance(item, Mapping)}
    lines = [f"{key} = {_literal(item)}" for key, item in plain.items()]
    for key, item in table.items():
        if isinstance(item, Mapping) and item:
            body = to_toml(typing.cast(Table, item), f"{prefix}{key}.")
            lines += ["", f"[{prefix}{key}]", body.rstrip("\n")]
    return "\n".join(lines).lstrip("\n") + "\n"


def _literal(item: Any) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, (list, tuple)):
        items = typing.cast("list[Any]", item)
        return "[" + ", ".join(_literal(one) for one in items) + "]"
    if isinstance(item, str):
        return json.dumps(item, ensure_ascii=False)
    return repr(item)
