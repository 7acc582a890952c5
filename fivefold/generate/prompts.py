"""Files of prompts, and of completions, which a command that was killed goes on with.

A line of prompts has `prompt` or `messages`, and may have an `id`; without one, its number is the
id. A line of completions is written at once; one that was cut off is dropped and made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fivefold.core import BadFile, FivefoldError
from fivefold.generate.chat import Message

_ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True)
class Prompt:
    """A text or chat messages, with an id."""

    id: str
    text: str = ""
    messages: tuple[Message, ...] = ()

    def rendered(self, render: Callable[[Sequence[Message]], str] | None) -> str:
        """Text for the model; `render` renders messages, and a text counts as the user's."""
        if render is None and self.messages:
            raise FivefoldError(f"prompt {self.id!r} has messages: give --chat")
        if render is None:
            return self.text
        return render(self.messages or ({"role": "user", "content": self.text},))


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts from a JSONL file; one error lists every problem."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise BadFile(str(path), [f"{error.strerror}; give a JSONL file of prompts"]) from error
    except UnicodeDecodeError as error:
        raise BadFile(str(path), [f"not UTF-8: {error.reason}; convert it"]) from error
    prompts: dict[str, Prompt] = {}
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = _parse(line, number)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            continue
        if prompt.id in prompts:
            problems.append(f"line {number}: id {prompt.id!r} is there already; give another")
        prompts[prompt.id] = prompt
    if not prompts and not problems:
        problems.append("it has no prompts; give a line for each")
    if problems:
        raise BadFile(str(path), problems[:20])
    return list(prompts.values())


def _parse(line: str, number: int) -> Prompt:
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError("expected an object with prompt or messages")
    table = cast("dict[str, Any]", row)
    id, text, messages = table.get("id", number), table.get("prompt"), table.get("messages")
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise ValueError(f"id {id!r} is neither a text nor a whole number")
    if (text is None) == (messages is None):
        raise ValueError("expected one of prompt and messages")
    if messages is not None:
        return Prompt(str(id), messages=_checked(messages))
    if not isinstance(text, str) or not text:
        raise ValueError("prompt is not a text, or an empty one")
    return Prompt(str(id), text)


def _checked(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is not a list, or an empty one")
    listed = cast("list[Any]", messages)
    for entry in listed:
        if not isinstance(entry, dict):
            raise ValueError("a message needs role and content, both texts")
        message = cast("dict[str, Any]", entry)
        if not isinstance(message.get("content"), str):
            raise ValueError("a message needs role and content, both texts")
        if message.get("role") not in _ROLES:
            raise ValueError(f"role {message.get('role')!r} is none of {', '.join(_ROLES)}")
    return tuple(listed)


def finished_ids(path: Path, texts: dict[str, str]) -> set[str]:
    """Ids of completions in a file; removes a truncated last line.

    `texts` are the prompts by id: a file for others is refused.
    """
    if not path.exists():
        return set()
    data = path.read_bytes()
    text = data[: data.rfind(b"\n") + 1]
    ids: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            id, prompt = str(row["id"]), row["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            rule = f"line {number} is no completion; give another file with -o"
            raise BadFile(str(path), [rule]) from error
        if texts.get(id) != prompt:
            rule = f"line {number} has the completion of another prompt for id {id!r}"
            raise BadFile(str(path), [f"{rule}; give another file with -o"])
        ids.add(id)
    if len(text) < len(data):
        os.truncate(path, len(text))
    return ids
