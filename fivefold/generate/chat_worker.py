"""The process that runs a chat template: a job in JSON on standard input, its text on standard
output. It imports nothing of this package, and opens no file once the template runs.

With `--many` it stays, and renders one job a line.

A job of many `conversations` gets the text of each, and where the assistant speaks in it: what the
template itself puts between `{% generation %}` and `{% endgeneration %}`, or else what a turn adds
to the prompt that asks for it.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import cache
from importlib import import_module
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MOST_BYTES = 1 << 30  # of memory
_MOST_TEXT = 4 << 20  # characters
_MARK = secrets.token_hex(16)  # no text has it
_OPEN, _CLOSE = f"<{_MARK}>", f"</{_MARK}>"


class Generation(Extension):
    """Jinja tag around what the assistant writes; it inserts two marks."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("marked", [], [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        """The text of the block between marks."""
        return f"{_OPEN}{caller()}{_CLOSE}"


def main(seconds: int) -> None:
    """Render one job."""
    job = json.loads(sys.stdin.buffer.read())
    environment = _prepared()
    _limit_time(seconds)
    if "conversations" in job:
        print(
            json.dumps(
                [
                    _conversation(environment, job, conversation)
                    for conversation in job["conversations"]
                ]
            )
        )
    else:
        print(json.dumps(_rendered(environment, job)))


def main_of_many(seconds: int) -> None:
    """Render jobs, one a line, after a template, which is compiled once; every job runs in a fork
    with limits of its own."""
    job = json.loads(sys.stdin.buffer.readline())
    environment = _prepared()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1 + seconds, resource.RLIM_INFINITY))
    _caught(lambda: {"text": str(_compiled(environment, job["template"]))})
    resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for line in sys.stdin.buffer:
        child = os.fork()
        if not child:
            _limit_time(seconds)
            print(json.dumps(_rendered(environment, {**job, **json.loads(line)})), flush=True)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == -signal.SIGXCPU:
            print(json.dumps({"error": f"it ran for more than {seconds} s"}), flush=True)
        elif code:
            print(json.dumps({"error": f"its process ended with code {code}"}), flush=True)


def _prepared() -> ImmutableSandboxedEnvironment:
    """The sandbox, in a process that can open no file any more."""
    import_module("jinja2.debug")  # Jinja loads it at the first error, when no file can be opened
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    added: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals.update(added)
    environment.filters["tojson"] = _to_json
    environment.from_string("{{ 'a' }}").render()  # loads what Jinja and Python load late
    # Its streams are open already: no other file can be.
    limits = {
        resource.RLIMIT_NOFILE: 3,
        resource.RLIMIT_AS: _MOST_BYTES,
        resource.RLIMIT_FSIZE: 0,
    }
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    return environment


def _limit_time(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # the first is a signal


def _rendered(environment: ImmutableSandboxedEnvironment, job: dict[str, Any]) -> dict[str, Any]:
    """The prompt that asks for the next message of the assistant."""
    return _caught(lambda: {"text": _unmarked(_render(environment, job, job, True))[0]})


def _conversation(
    environment: ImmutableSandboxedEnvironment, job: dict[str, Any], conversation: dict[str, Any]
) -> dict[str, Any]:
    """The text of a conversation, and the spans of its characters that the assistant says."""

    def render(messages: list[Any], prompt: bool) -> str:
        return _render(environment, job, {**conversation, "messages": messages}, prompt)

    def spans() -> dict[str, Any]:
        messages = conversation["messages"]
        text, text_spans = _unmarked(render(messages, False))
        if text_spans:
            return {"text": text, "spans": text_spans}
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                before = render(messages[:number], True)
                after = render(messages[: number + 1], False)
                if not (after.startswith(before) and text.startswith(after)):
                    return {"error": _CHANGES.format(number=number + 1)}
                text_spans.append((len(before), len(after)))
        return {"text": text, "spans": text_spans}

    return _caught(spans)


_CHANGES = (
    "it renders message {number} in another way where others follow, so that its tokens cannot be "
    "distinguished: put {{% generation %}} and {{% endgeneration %}} around what the assistant says"
)


def _render(
    environment: ImmutableSandboxedEnvironment,
    job: dict[str, Any],
    conversation: dict[str, Any],
    prompt: bool,
) -> str:
    extra = {"tools": conversation["tools"]} if conversation.get("tools") else {}
    text = _compiled(environment, job["template"]).render(
        messages=conversation["messages"], add_generation_prompt=prompt, **extra, **job["variables"]
    )
    if len(text) > _MOST_TEXT:
        raise TemplateError(f"it made more than {_MOST_TEXT:,} characters")
    return text


@cache
def _compiled(environment: ImmutableSandboxedEnvironment, source: str) -> Template:
    """Compiled once: it takes longer than to render."""
    return environment.from_string(source)


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without marks, and what was between them."""
    parts, spans = [""], list[tuple[int, int]]()
    size = 0
    for piece in text.split(_OPEN):
        inside, closed, tail = piece.partition(_CLOSE)
        if closed:
            spans.append((size, size + len(inside)))
        parts += [inside, tail]
        size += len(inside) + len(tail)
    return "".join(parts), spans


def _caught(render: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return render()
    except MemoryError:
        return {"error": f"it needs more than {_MOST_BYTES >> 20} MiB"}
    except Exception as error:  # whatever a template calls
        return {"error": f"{type(error).__name__}: {error}"}


def _refuse(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


if __name__ == "__main__":
    (main_of_many if "--many" in sys.argv else main)(int(sys.argv[1]))
