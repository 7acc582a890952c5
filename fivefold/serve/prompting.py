"""Prompts and chats to tokens, beside the event loop.

A chat template is a program from a downloaded folder. `generate/chat.py` starts a process for every
prompt, which takes a tenth of a second; here one process stays, and forks for every chat: the same
limits hold for each, and nothing that one does is seen by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fivefold.core import FivefoldError
from fivefold.generate import ChatTemplate, Codec, LibraryCodec, QuotingCodec, chat_worker
from fivefold.serve.schema import ApiError, AskedText

_SHORT = 4096  # characters that are encoded at once; longer texts go to a thread
_SLICE = 1 << 16  # characters; texts of several are counted before they are encoded
_LONG_TEXTS = 2  # that are encoded at a time, for their memory
_SECONDS, _PATIENCE_S = 5, 30.0  # of processor time, and on the clock
_LONGEST_LINE = 64 << 20


class TemplateProcess:
    """The process that renders chat templates."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def render(self, messages: tuple[dict[str, str], ...]) -> str:
        """Render messages to a prompt; raises `ApiError`."""
        async with self._turn:
            answer = await self._answer(messages) or await self._answer(messages)
        if answer is None:
            raise ApiError(500, "the process that renders chats was lost: send it again")
        if "error" in answer:
            rule = f"the chat template of this model refuses it: {answer['error']}"
            raise ApiError(400, rule, "messages", "invalid_value")
        return answer["text"]

    async def _answer(self, messages: tuple[dict[str, str], ...]) -> dict[str, Any] | None:
        """What the process says; None if it was lost, and then another one is started."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self._ask({"messages": list(messages)})
        except (OSError, ValueError, TimeoutError):
            await self.close()
            return None
        except asyncio.CancelledError:  # the client has gone, and the answer is still to come
            await self.close()
            raise

    async def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        process = self._process or await self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(job).encode() + b"\n")
        await process.stdin.drain()
        return json.loads(await process.stdout.readline())

    async def _start(self) -> asyncio.subprocess.Process:
        pipe, worker = asyncio.subprocess.PIPE, str(Path(chat_worker.__file__))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", worker, str(_SECONDS), "--many"),
            stdin=pipe,
            stdout=pipe,
            limit=_LONGEST_LINE,
            start_new_session=True,  # Ctrl-C is for the server
        )
        assert process.stdin is not None
        job = {"template": self.template.source, "variables": self.template.variables}
        process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process = process
        return process

    async def start(self) -> None:
        """Start the process, so that the first chat need not wait."""
        async with self._turn:
            await self._start()

    async def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class PromptReader:
    """Encodes requests to prompt tokens."""

    def __init__(self, codec: Codec, folder: Path) -> None:
        self.codec, self.quotes, self._token_bytes = codec, None, codec.longest_token()
        if isinstance(codec, LibraryCodec):
            self.codec = LibraryCodec(codec.tokenizer, unlocked=True)
            self.quotes = QuotingCodec(codec, unlocked=True)
        self._long = asyncio.Semaphore(_LONG_TEXTS)
        self.chats: TemplateProcess | None = None
        with contextlib.suppress(FivefoldError):  # without a template there are no chats
            self.chats = TemplateProcess(ChatTemplate(folder))

    async def tokens(self, request: AskedText, longest: int) -> list[tuple[int, ...]]:
        """Encode every prompt; refuses texts that must exceed `longest` before encoding. Special
        tokens in them are plain text if the request says so."""
        quotes = None if request.parse_special else self.quotes
        if not request.chat:
            codec = self.codec if quotes is None else quotes.plain
            for text in request.prompts:
                self._check("prompt", text if isinstance(text, str) else "", longest)
            return [
                prompt
                if isinstance(prompt, tuple)
                else await self._encoded(codec, prompt, longest, True)
                for prompt in request.prompts
            ]
        if self.chats is None:
            rule = "this model has no chat template: use /v1/completions"
            raise ApiError(400, rule, "messages", "no_chat_template")
        messages = request.messages
        self._check("messages", "".join("".join(message.values()) for message in messages), longest)
        if quotes is not None:  # the time that it takes is that of the text
            messages = await asyncio.to_thread(quotes.quoted_messages, messages)
        rendered = await self.chats.render(messages)
        return [await self._encoded(quotes or self.codec, rendered, longest, special=False)]

    def _check(self, param: str, text: str, longest: int) -> None:
        """Refuse a text of more bytes than the longest sequence can have."""
        if (size := len(text.encode())) > longest * self._token_bytes:
            raise _too_long(param, f"{size:,} bytes", longest)

    async def _encoded(
        self, codec: Codec | QuotingCodec, text: str, longest: int, special: bool
    ) -> tuple[int, ...]:
        encode = partial(codec.encode, special=special)
        if len(text) <= _SHORT:
            return encode(text)
        async with self._long:
            return await asyncio.to_thread(_long_tokens, encode, text, longest)

    async def start(self) -> None:
        if self.chats is not None:
            await self.chats.start()

    async def close(self) -> None:
        if self.chats is not None:
            await self.chats.close()


def _long_tokens(
    encode: Callable[[str], tuple[int, ...]], text: str, longest: int
) -> tuple[int, ...]:
    """The tokens of a long text. One that is much too long is refused after as many tokens as may
    be: all of them would take a hundred times the memory of the text."""
    count = 0
    for start in range(0, len(text) if len(text) > _SLICE else 0, _SLICE):
        count += len(encode(text[start : start + _SLICE]))
        if count > 2 * longest:  # where it was cut, there are some more
            raise _too_long("prompt", f"{len(text):,} characters", longest)
    return encode(text)


def _too_long(param: str, size: str, longest: int) -> ApiError:
    rule = f"{param}: {size} are more than {longest:,} tokens, the limit: shorten it"
    return ApiError(400, rule, param, "context_length_exceeded")
