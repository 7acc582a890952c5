"""Strict reading of tables: TOML to dataclasses and back, and keys of a Hugging Face config.

Unknown keys and wrong types are errors, and all problems are reported at once. This is the one
reader for every file of a user (plans, machines) and for our presets: typos are treated alike.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar, cast

from fivefold.core.errors import BadFile, FivefoldError, did_you_mean

# Far above any model, far below what would make a loop over layers hang.
MOST_LAYERS = 10_000
MOST = 1_000_000_000  # of any other whole number


T = TypeVar("T")
Table = Mapping[str, Any]


def read_toml(path: Path, text: str | None = None) -> dict[str, Any]:
    """Parse a TOML file, or `text` in its place; a missing or malformed one is a `BadFile` that
    names it."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8") if text is None else text)
    except OSError as error:
        raise BadFile(str(path), [f"{error.strerror}; check the path"]) from error
    except RecursionError as error:
        raise BadFile(str(path), ["nested too deep; take some brackets out"]) from error
    except ValueError as error:  # bad TOML, bad UTF-8, or a number too long to read
        raise BadFile(str(path), [f"not valid TOML: {error}; fix that line"]) from error
    if long := [*_long_numbers(table, "")]:
        rule = "whole numbers have at most 64 bits in TOML; give a smaller one"
        raise BadFile(str(path), [f"{key}: {rule}" for key in long])
    return table


def _long_numbers(value: Any, path: str) -> Iterator[str]:
    """The keys of numbers that are longer than TOML allows."""
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


def problems_of(cls: Any, table: Any, path: str) -> list[str]:
    """What is wrong with a table of some keys of the dataclass `cls`: unknown keys, wrong types."""
    problems: list[str] = []
    _dataclass(cls, table, path, problems)
    return [problem for problem in problems if not problem.startswith("missing key")]


@functools.cache
def types_of(cls: Any) -> Table:
    """The type of every field of a dataclass; to evaluate them takes longer than to read a file."""
    return typing.get_type_hints(cls)


def _dataclass(cls: Any, table: Any, path: str, problems: list[str]) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        problems.append(f"{path.rstrip('.')}: expected a table")
        return {}
    mapping = typing.cast(Table, table)
    hints = types_of(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in mapping:
        if key not in fields:
            problems.append(f"unknown key {path + key!r}: {did_you_mean(key, fields)}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in mapping:
            values[name] = _value(hints[name], mapping[name], path + name, problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"missing key {path + name!r}: add it")
    return values


def _value(hint: Any, value: Any, path: str, problems: list[str]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _value(_member(hint, value), value, path, problems)
    if dataclasses.is_dataclass(hint):
        before = len(problems)
        fields = _dataclass(hint, value, path + ".", problems)
        return None if len(problems) > before else typing.cast(Any, hint)(**fields)
    if origin is tuple and isinstance(value, (list, tuple)):
        items = typing.cast("list[Any]", value)
        return tuple(
            _value(arguments[0], item, f"{path}[{index}]", problems)
            for index, item in enumerate(items)
        )
    if origin is dict and isinstance(value, Mapping):
        pairs = typing.cast(Table, value)
        return {
            key: _value(arguments[1], item, f"{path}.{key}", problems)
            for key, item in pairs.items()
        }
    if origin is typing.Literal:
        if value not in arguments:
            problems.append(f"{path} = {value!r}: {did_you_mean(str(value), map(str, arguments))}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = hint in (int, float, str, bool)
    if not plain or not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        name = getattr(hint, "__name__", str(hint))
        problems.append(f"{path} = {value!r}: expected {name}")
    return value


def _member(union: Any, value: Any) -> Any:
    """The type of a union that a value is for: words, as auto, or else the other one."""
    members = [member for member in typing.get_args(union) if member is not type(None)]
    literals = [member for member in members if typing.get_origin(member) is typing.Literal]
    named = [literal for literal in literals if value in typing.get_args(literal)]
    return [*named, *(member for member in members if member not in literals), *literals][0]


_COUNT = re.compile(r"([+-]?[0-9][0-9_]{0,30}(?:\.[0-9]{1,12})?(?:e\+?[0-9]{1,2})?)([kmbt]?)", re.I)
_THOUSANDS = {"": 0, "k": 1, "m": 2, "b": 3, "t": 4}
_IN_POWERS_OF_TWO = ("seq", "max_seq", "window", "gpus", "batch", "prompt", "output")


def parse_count(text: str, key: str = "") -> int:
    """A whole number as people write it: the one reader of counts. k is 1,024 in lengths, batches
    and numbers of GPUs, and 1,000 in steps and tokens; m, b and t are its powers.

    >>> parse_count("8k", "seq"), parse_count("2.5M", "tokens"), parse_count("1e12", "tokens")
    (8192, 2500000, 1000000000000)
    """
    match = _COUNT.fullmatch(text.strip())
    unit = 1024 if key in _IN_POWERS_OF_TWO else 1000
    number = Decimal(match[1]) * unit ** _THOUSANDS[match[2].lower()] if match else Decimal("0.5")
    if number != int(number):
        raise ValueError("expected a whole number")
    return int(number)


def from_text(hint: Any, text: str, key: str = "") -> Any:
    """A text of the command line as a value of that type; a ValueError says what was expected."""
    choices = [
        f" or {word}" for argument in typing.get_args(hint) for word in typing.get_args(argument)
    ]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if text.lower() == "none":
            return None
        hint = _member(hint, text)
    if dataclasses.is_dataclass(hint):
        raise ValueError("expected none; set its keys one by one, as in moe.experts=8")
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("expected true or false")
        return text.lower() == "true"
    if hint is int:
        try:
            return parse_count(text, key)
        except ValueError as error:
            raise ValueError(f"{error}{''.join(choices)}") from None
    if typing.get_origin(hint) is typing.Literal:
        known = {_literal(choice).strip('"'): choice for choice in typing.get_args(hint)}
        if text not in known:
            raise ValueError(did_you_mean(text, list(known)))
        return known[text]
    if typing.get_origin(hint) is tuple:
        return [from_text(typing.get_args(hint)[0], part) for part in text.split(",")]
    try:
        return float(text) if hint is float else text
    except ValueError:
        raise ValueError("expected a number, such as 0.5 or 1e-3") from None


def table_of(value: Any) -> dict[str, Any]:
    """The dataclass as a table that `build` reads back, without optional fields that are None."""
    table: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if field.init and item is not None:
            table[field.name] = table_of(item) if dataclasses.is_dataclass(item) else item
    return table


def to_toml(table: Table, prefix: str = "") -> str:
    """Write a table of scalars, lists and tables as TOML; scalars first, as TOML requires."""
    plain = {key: item for key, item in table.items() if not isinstance(item, Mapping)}
    lines = [f"{_key(key)} = {_literal(item)}" for key, item in plain.items()]
    for key, item in table.items():
        if isinstance(item, Mapping) and item:
            body = to_toml(typing.cast(Table, item), f"{prefix}{_key(key)}.")
            lines += ["", f"[{prefix}{_key(key)}]", body.rstrip("\n")]
    return "\n".join(lines).lstrip("\n") + "\n"


def _key(name: str) -> str:
    """A key, in quotes unless TOML reads it without."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _literal(item: Any) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, (list, tuple)):
        items = typing.cast("list[Any]", item)
        return "[" + ", ".join(_literal(entry) for entry in items) + "]"
    if isinstance(item, str):
        return json.dumps(item, ensure_ascii=False)
    return repr(item)


# A Hugging Face `config.json`, read key by key, and what several model families spell in the same
# way. Problems are collected, so that one error reports them all.

Fields = dict[str, Any]

_PLACING = (
    *("num_hidden_layers", "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step"),
    *("mlp_only_layers", "interleave_moe_layer_step", "moe_layers"),
)


class Config:
    """One table of the file. A bad key is recorded as a problem, and a placeholder is returned.

    Null counts as absent, because these files use it for "default", except where null itself has a
    meaning (`optional_integer`).
    """

    def __init__(self, table: Mapping[str, Any], problems: list[str], prefix: str = "") -> None:
        self._table, self._problems, self._prefix = table, problems, prefix
        self._refused: set[str] = set()
        self._read: set[str] = set()
        self._nested: dict[str, Config] = {}

    def has(self, key: str) -> bool:
        """Whether the key is present and not null."""
        self._read.add(key)
        return self._table.get(key) is not None

    def gives(self, key: str) -> bool:
        """Whether the key is present, maybe null."""
        self._read.add(key)
        return key in self._table

    def ignore(self, *keys: str) -> None:
        """Keys that the model does not depend on, because of what others say."""
        self._read.update(keys)

    def refuse_unread(self, harmless: Callable[[str, Any], bool] | None = None) -> int:
        """Record every key that nothing has read, also of nested tables: it might change the model.
        Null is no value, and a key that is `harmless` at its value passes. Returns their number."""
        count = 0
        for key, value in self._table.items():
            passes = value is None or (harmless is not None and harmless(key, value))
            if key not in self._read and not passes:
                self.problem(key, "not known here, and might change the model; take it out if not")
                count += 1
        return count + sum(table.refuse_unread() for table in self._nested.values())

    def problem(self, key: str, rule: str) -> None:
        """Record that the value of `key` breaks a rule."""
        self._refused.add(key)
        shown = repr(self._table.get(key))
        shown = shown if len(shown) <= 60 else shown[:60] + "…"
        self._problems.append(f"{self._prefix}{key} = {shown}: {rule}")

    def usable(self, *keys: str) -> bool:
        """Whether none of these is bad: a consequence of a placeholder is not a second problem."""
        return not self._refused.intersection(keys)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self._get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST:
            return value
        if value is not None:
            self.problem(key, f"must be a whole number from {least} to {MOST:,}")
        return max(least, 1)

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """A positive whole number; None if it is null, the default if it is absent."""
        if not self.gives(key):
            return default
        return self.integer(key) if self.has(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of at least 0."""
        value = self._get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            # Above 1e300 a whole number may no longer be a float.
            if 0 <= value < 1e300 and math.isfinite(value):
                return float(value)
            self.problem(key, "must be a finite number, at least 0")
        elif value is not None:
            self.problem(key, "must be a number")
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if isinstance(value, bool):
            return value
        self.problem(key, "must be true or false")
        return default

    def choice(self, key: str, default: str, meanings: Mapping[str, str]) -> str:
        """The meaning of one of a few values."""
        value = self._get(key, default)
        if isinstance(value, str) and value in meanings:
            return meanings[value]
        self.problem(key, "supported are " + ", ".join(meanings))
        return next(iter(meanings.values()))

    def must_be(self, key: str, *allowed: object) -> None:
        """Refuse a feature that a Shape cannot express; an absent key is fine."""
        if self.has(key) and self._table[key] not in allowed:
            self.problem(key, "not supported; only " + " or ".join(map(str, allowed)) + " is")

    def table(self, key: str) -> Config | None:
        """A nested table, or None if the key is absent."""
        if not self.has(key):
            return None
        value = self._table[key]
        if not isinstance(value, Mapping):
            self.problem(key, "must be a table")
            return None
        # One for each table, so that all of its readers count.
        table, prefix = cast("Mapping[str, Any]", value), f"{self._prefix}{key}."
        return self._nested.setdefault(key, Config(table, self._problems, prefix))

    def items(self, key: str) -> list[object] | None:
        """A list, or None if the key is absent."""
        if not self.has(key):
            return None
        value = self._table[key]
        if isinstance(value, list):
            return cast("list[object]", value)
        self.problem(key, "must be a list")
        return None

    def layer_set(self, key: str) -> frozenset[int] | None:
        """A list of layer numbers, or None if the key is absent."""
        items = self.items(key)
        if items is None:
            return None
        layers = frozenset(item for item in items if isinstance(item, int))
        if not all(isinstance(item, int) for item in items):
            self.problem(key, "must hold layer numbers")
        return layers

    def first_of(self, keys: Iterable[str]) -> str:
        """The first of several spellings that is present; the first spelling if none is. Two that
        are present must say the same."""
        names = list(keys)
        present = [key for key in names if self.has(key)]
        for key in present[1:]:
            if self._table[key] != self._table[present[0]]:
                self.problem(key, f"contradicts {present[0]} = {self._table[present[0]]!r}")
        return next(iter(present), names[0])

    def _get(self, key: str, default: object) -> object:
        if self.has(key):
            return self._table[key]
        if default is None:
            self._refused.add(key)
            self._problems.append(f"{self._prefix}{key} is missing: add it")
        return default


def head_dim(config: Config, width: int, heads: int) -> int:
    """Width of a head, given or an even share of the model's width."""
    sizes = ("n_embd", "n_head", "hidden_size", "num_attention_heads")
    if not config.has("head_dim") and width % heads and config.usable(*sizes):
        config.problem("head_dim", f"add it, since {heads} heads do not divide width {width}")
    return config.integer("head_dim", max(width // heads, 1))


def attention_bias(config: Config, default: bool = False) -> Fields:
    """One key for all four projections."""
    return dict.fromkeys(("qkv_bias", "out_bias"), config.flag("attention_bias", default))


def expert_placement(config: Config, key: str, expert_layers: list[int], layers: int) -> Fields:
    """Which layers have experts, in the form of a Shape: each n-th from some layer on."""
    if not config.usable(*_PLACING):
        return {}
    if not expert_layers:
        config.problem(key, "no layer is left with experts")
        return {}
    # A single layer is the last one after dense ones, or the only multiple.
    only = 1 if expert_layers[0] == layers - 1 else expert_layers[0] + 1
    every = expert_layers[1] - expert_layers[0] if len(expert_layers) > 1 else only
    first_dense = 0 if expert_layers[0] == every - 1 else expert_layers[0]
    placed = [i for i in indices(layers) if i >= first_dense and (i + 1) % every == 0]
    if placed != expert_layers:
        config.problem(key, "not supported; experts must be in each n-th layer (n−1, 2n−1, …)")
    return {"first_dense": first_dense, "every": every}


def indices(layers: int) -> range:
    """The layers, from 0."""
    # Shape refuses an absurd number of layers later; do not loop over it here.
    return range(min(layers, MOST_LAYERS))
