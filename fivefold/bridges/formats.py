"""Files of other frameworks as flat tables of keys: shell scripts, TOML, JSON, YAML and Python.

Nothing in a file is run. Files over 1 MB, YAML with tags, anchors or aliases (few lines of which
can stand for billions of values) and tables nested deeper than any configuration are refused.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from fivefold.core import BadFile, FivefoldError

LARGEST = 1_000_000  # bytes; real ones have a few thousand
NOTE = "note: "  # starts keys that are remarks of a reader
_DEEPEST = 32

Nested = dict[str, Any]


class Code(str):
    """An expression of Python that is no literal."""

    __slots__ = ()


def read_text(path: Path) -> str:
    """A file of at most 1 MB."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise BadFile(str(path), [f"{error.strerror}; check the path"]) from error
    if len(data) > LARGEST:
        raise BadFile(str(path), ["larger than 1 MB: give a configuration, not data"])
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadFile(str(path), ["not UTF-8: give a text file"]) from error


def flat_of(table: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Keys by their path with dots; lists stay values."""
    if depth > _DEEPEST:
        raise FivefoldError(f"tables are nested deeper than {_DEEPEST}: take some out")
    flat: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flat_of(cast("Mapping[str, Any]", value), f"{path}.", depth + 1)
        else:
            flat[path] = value
    return flat


def nested_of(flat: Mapping[str, Any]) -> Nested:
    """The tables that paths with dots stand for."""
    nested: Nested = {}
    for path, value in flat.items():
        *above, name = path.split(".")
        table = nested
        for part in above:
            table = table.setdefault(part, {})
        table[name] = value
    return nested


# --- TOML, JSON and YAML


def toml_table(text: str, where: str) -> Nested:
    return _parsed(tomllib.loads, text, where, "TOML")


def json_table(text: str, where: str) -> Nested:
    return _parsed(json.loads, text, where, "JSON")


def refuse_repeated_json(text: str, where: str) -> None:
    """Of equal keys the last would count in silence; DeepSpeed refuses them too."""

    def once(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise BadFile(where, [f"{twice[0]} is given twice: keep one of them"])

    json.loads(text, object_pairs_hook=once)


def yaml_table(text: str, where: str) -> Nested:
    """YAML without tags, anchors, aliases, and keys that are given twice."""
    try:
        import yaml
    except ImportError as error:
        raise FivefoldError(
            f"{where} is YAML, which needs PyYAML: install it with pip install 'fivefold[bridges]'"
        ) from error
    depth = 0
    try:
        events: Iterator[Any] = cast(Any, yaml).parse(text, Loader=yaml.SafeLoader)
        for event in events:
            if getattr(event, "anchor", None) or getattr(event, "tag", None):
                rule = f"line {event.start_mark.line + 1} has a tag, an anchor or an alias"
                raise BadFile(where, [f"{rule}: write the value itself"])
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                raise BadFile(where, [f"nested deeper than {_DEEPEST}: take some levels out"])
        _refuse_repeated_yaml(cast(Any, yaml).compose(text, Loader=yaml.SafeLoader), where)
        return _parsed(yaml.safe_load, text, where, "YAML")
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())
        raise BadFile(where, [f"not valid YAML: {line}; fix it"]) from error


def _refuse_repeated_yaml(node: Any, where: str) -> None:
    """Of equal keys of a mapping the last would count in silence."""
    if node is None or node.id == "scalar":
        return
    below: list[Any] = node.value
    if node.id == "mapping":
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                rule = f"{name} is given twice, in lines {lines[name]} and {line}"
                raise BadFile(where, [f"{rule}: keep one of them"])
            lines[name] = line
        below = [value for _, value in node.value]
    for child in below:
        _refuse_repeated_yaml(child, where)


def _parsed(load: Any, text: str, where: str, kind: str) -> Nested:
    try:
        table = load(text)
    except RecursionError as error:
        raise BadFile(where, ["nested too deep; take some brackets out"]) from error
    except ValueError as error:
        raise BadFile(where, [f"not valid {kind}: {error}; fix that line"]) from error
    if not isinstance(table, dict):
        raise BadFile(where, [f"must hold one table of keys, as {kind} of a framework does"])
    return {str(key): value for key, value in cast("dict[Any, Any]", table).items()}


def yaml_text(table: Mapping[str, Any], depth: int = 0) -> str:
    """Tables, lists of scalars and scalars as YAML; texts in quotes that JSON has too."""
    lines: list[str] = []
    for key, value in table.items():
        start = f"{'  ' * depth}{key}:"
        if isinstance(value, Mapping):
            lines += [start, yaml_text(cast("Mapping[str, Any]", value), depth + 1).rstrip("\n")]
        else:
            lines.append(f"{start} {_yaml_scalar(value)}")
    return "\n".join(lines) + "\n"


def _yaml_scalar(value: Any) -> str:
    if isinstance(value, float) and "e" in (text := repr(value)) and "." not in text:
        return text.replace("e", ".0e")  # YAML 1.1 reads 1e-05 as a text
    word = value if isinstance(value, str) else ""
    plain = re.fullmatch(r"[A-Za-z][\w./-]*", word)
    if plain and word.lower() not in ("true", "false", "yes", "no", "on", "off", "null", "y", "n"):
        return word
    return json.dumps(value)


# --- Python: assignments to attributes of a configuration


def python_table(text: str, where: str) -> dict[str, Any]:
    """`config.a.b = value` as {"a.b": value}, whatever the variable is called. A call that makes
    the variable is the key "": the configuration that is changed."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadFile(where, [f"not valid Python: {error}; fix it"]) from error
    flat: dict[str, Any] = {}
    for node in ast.walk(module):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Name) and isinstance(value, ast.Call):
            flat.setdefault("", ast.unparse(value.func))
        elif isinstance(target, ast.Attribute):
            _, _, path = ast.unparse(target).partition(".")
            flat[path] = _literal(value)
    return flat


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, RecursionError):
        text = ast.unparse(node)
        if re.fullmatch(r"[\d *]+", text):  # 8 * 2048
            product = 1
            for factor in text.split("*"):
                product *= int(factor)
            return product
        return Code(text)


# --- Shell


_ASSIGNED = re.compile(
    r"(?:^|[\s;])(?:export\s+|local\s+)?([A-Za-z_]\w*)=((?:\"[^\"]*\"|'[^']*'|[^\s;\"'(]|\$\(\([^()]*\)\))*)"
)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[@\])?(?::?-([^}]*))?\}|\$(\w+)")
_SUM = re.compile(r"\$\(\(([^()]{1,80})\)\)")
_SLURM = re.compile(r"^#SBATCH\s+(\S.*)$", re.MULTILINE)
_SLURM_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus"}


def shell_words(text: str) -> tuple[list[str], dict[str, str]]:
    """The words of a script with its variables put in, and its Slurm directives. Lists of options
    are read where a variable is set, so a variable with options stays out where it is used."""
    slurm: dict[str, str] = {}
    for line in _SLURM.findall(text):
        for name, _, value in _directives(line.split("#")[0]):
            slurm[name] = value
    joined = re.sub(r"\\\r?\n", " ", text)
    joined = re.sub(r"(?m)(^|\s)#.*$", " ", joined)
    variables: dict[str, str] = {}
    for name, value in _ASSIGNED.findall(_SUM.sub(_joined, joined)):
        plain = value.strip("\"'")
        if "--" not in plain:
            variables[name] = _put_in(plain, variables)
    joined = _SUM.sub(lambda match: _put_in(match[0], variables), joined)
    args = re.findall(r"(?:\"[^\"]*\"|'[^']*'|[^\s\"'])+", re.sub(r"\+?=\(", " ", joined))
    return [*_split(args, variables)], slurm


def _joined(match: re.Match[str]) -> str:
    """A sum without spaces, which would end a word."""
    return re.sub(r"\s", "", match[0])


def _split(args: list[str], variables: dict[str, str]) -> Iterator[str]:
    for word in args:
        inner = re.sub(r"^[A-Za-z_]\w*=(?=--)", "", re.sub(r"[\"']", "", word))
        if " --" in inner or "\n" in inner or (inner.startswith("--") and " " in inner):
            yield from _split(inner.split(), variables)
        else:
            yield _put_in(inner.rstrip(");"), variables) if "|" not in inner else inner


def _directives(line: str) -> Iterator[tuple[str, str, str]]:
    args = line.split()
    while args:
        name = args.pop(0)
        if "=" in name:
            name, _, value = name.partition("=")
        else:
            value = args.pop(0) if args and not args[0].startswith("-") else ""
        yield _SLURM_SHORT.get(name, name), "=", value


def _put_in(text: str, variables: Mapping[str, str]) -> str:
    """Variables and sums of a word; what is unknown stays."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in variables:
            return variables[name]
        return match[0] if match[2] is None else match[2].strip("\"'")

    done = _VARIABLE.sub(value_of, text)[:4096]
    return _SUM.sub(lambda expression: _computed(expression[1], variables), done)


def _computed(text: str, variables: Mapping[str, str]) -> str:
    """A sum of products; as it is if it has anything else."""
    total = 0
    for part in text.split("+"):
        product = 1
        for factor in part.split("*"):
            word = variables.get(factor.strip(), factor.strip())
            if not re.fullmatch(r"\d{1,9}", word):
                return f"$(({text}))"
            product *= int(word)
        total += product
    return str(total)


def options_of_words(
    args: list[str], flags: Collection[str], lists: Collection[str]
) -> dict[str, Any]:
    """`--name value`, `--name=value` and `--flag`; the values of `lists` are joined by spaces."""
    flat: dict[str, Any] = {}
    name = ""
    for word in args:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            flat[name] = value if equals else True
            name = "" if equals or name in flags else name
        elif name and not re.match(r"[-&|><;](?!\d)", word):
            flat[name] = word if flat[name] is True else f"{flat[name]} {word}"
            name = name if name in lists else ""
        else:
            name = ""
    return flat
