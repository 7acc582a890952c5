"""What `--json` prints: one example of each verb, and every key of its answer.

`data/json_answers.txt` has them in lines: key, type, meaning. Types are those of JSON; `?` may be
null. A test runs the examples and compares; `python -m tests.reference` makes
docs/reference-json.md of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

ANSWERS = (Path(__file__).parent / "data" / "json_answers.txt").read_text("utf-8")
BEFORE = {  # commands that an example needs
    "export run model --json": ["train"],
    "import model -o imported --json": ["train", "export"],
    "generate run --prompt hello --max-tokens 4 --json": ["train"],
    "observe run --panel loss --json": ["train"],
}
_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


class JsonKey(NamedTuple):
    """One key of an answer."""

    name: str
    type: str
    meaning: str


class JsonAnswer(NamedTuple):
    """What a verb prints with `--json`; without an example where it needs another package."""

    title: str
    example: str | None
    keys: list[JsonKey]


def answers() -> list[JsonAnswer]:
    """All answers."""
    found: list[JsonAnswer] = []
    for block in ANSWERS.strip().split("\n\n"):
        title, *lines = block.splitlines()
        example = lines.pop(0).removeprefix("$ ") if lines[0].startswith("$ ") else None
        keys = [JsonKey(*line.split(" ", 2)) for line in lines]
        found.append(JsonAnswer(title, example, keys))
    return found


def problems(answer: JsonAnswer, table: dict[str, Any]) -> list[str]:
    """What is different in an answer: keys that are missing or unknown, and other types."""
    documented = {key.name: key.type for key in answer.keys}
    given = {key: value for key, value in table.items() if key != "schema_version"}
    found = [f"{key} is not documented" for key in given.keys() - documented.keys()]
    found += [f"{key} is not there" for key in documented.keys() - given.keys()]
    for key, value in given.items():
        kind = documented.get(key, "")
        if value is None:
            found += [] if kind.endswith("?") else [f"{key} is null"]
        elif _TYPES[type(value)] != kind.rstrip("?") and not (
            isinstance(value, int) and kind.startswith("number")
        ):
            found.append(f"{key} is {_TYPES[type(value)]}, not {kind}")
    return sorted(found)
