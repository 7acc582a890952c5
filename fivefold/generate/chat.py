"""Chat templates: messages to a prompt.

A template is a program from a downloaded folder. It runs in a process of its own: in Jinja's
sandbox, with a limit on time and memory, and with no file that it could open.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from fivefold.core import BadFile, FivefoldError
from fivefold.generate import chat_worker
from fivefold.generate.text import read_table, token_text

Message = dict[str, str]
_SECONDS = 5  # of processor time
_CONVERSATIONS_A_SECOND = 20  # far more than any template needs
_PATIENCE = 60.0  # seconds on the clock: a busy machine starts a process late
_CONFIG, _FILE = "tokenizer_config.json", "chat_template.jinja"


class ChatTemplate:
    """Chat template of a folder, with its special tokens."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        table = read_table(folder / _CONFIG)
        self.source = _source(folder, table)
        if self.source is None:
            rule = f"has no chat template, in {_CONFIG} or {_FILE}"
            raise BadFile(self.where, [f"{rule}: leave --chat out, or give a chat model"])
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        special_tokens = {name: table.get(name) for name in names}
        contents = {name: token_text(value) for name, value in special_tokens.items()}
        self.variables = {k: v for k, v in contents.items() if isinstance(v, str)}

    def render(self, messages: Sequence[Message], seconds: int = _SECONDS) -> str:
        """Render messages to a prompt for the assistant's next message."""
        answer = self._run({"messages": list(messages)}, seconds)
        if "error" in answer:
            raise BadFile(f"the chat template of {self.where}", [f"{answer['error']}; correct it"])
        return answer["text"]

    def render_many(self, conversations: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Render conversations in one process: the text of each with the `spans` of the assistant,
        or its `error`."""
        seconds = _SECONDS + len(conversations) // _CONVERSATIONS_A_SECOND
        answer = self._run({"conversations": conversations}, seconds)
        if isinstance(answer, dict):  # of the process, not of a conversation
            raise BadFile(f"the chat template of {self.where}", [f"{answer['error']}; correct it"])
        return answer

    def _run(self, job: dict[str, Any], seconds: int) -> Any:
        job = {"template": self.source, "variables": self.variables, **job}
        command = [sys.executable, "-I", str(Path(chat_worker.__file__)), str(seconds)]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(job).encode(),
                capture_output=True,
                timeout=_PATIENCE + seconds,
            )
        except subprocess.TimeoutExpired as error:
            rule = f"the chat template of {self.where} has not ended after {error.timeout:g} s"
            raise FivefoldError(f"{rule}: correct it, or leave --chat out") from error
        if done.returncode == -signal.SIGXCPU:
            raise FivefoldError(
                f"the chat template of {self.where} ran for more than {seconds} s: it may loop; "
                "correct it, or leave --chat out"
            )
        try:
            return json.loads(done.stdout)
        except ValueError:
            return {"error": f"its process ended with code {done.returncode}"}


def _source(folder: Path, table: dict[str, Any]) -> str | None:
    if (folder / _FILE).exists():
        return (folder / _FILE).read_text("utf-8")
    template = table.get("chat_template")
    if isinstance(template, list):  # several, by name
        tables = [_table(entry) for entry in cast("list[Any]", template)]
        template = {entry.get("name"): entry.get("template") for entry in tables}.get("default")
    return template if isinstance(template, str) else None


def _table(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
