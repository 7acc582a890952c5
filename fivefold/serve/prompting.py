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
from functools import partial
from pathlib import Path
from typing import Any

from fivefold.core.errors import FivefoldError
from fivefold.generate import chat_worker
from fivefold.generate.chat import ChatTemplate
from fivefold.generate.text import Codec, LibraryCodec, QuotingCodec
from fivefold.serve.asked import ApiError, AskedText

_SHORT = 4096  # characters that are encoded at once; longer texts go to a thread
_SECONDS, _PATIENCE_S = 5, 30.0  # of processor time, and on the clock
_LONGEST_LINE = 64 << 20


class TemplateProcess:
    """The process that renders chats, one after another."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def render(self, messages: tuple[dict[str, str], ...]) -> str:
        """The prompt that asks for the next message; raises `ApiError`."""
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
            start_new_session=True,  # Ctrl-C is for the door
        )
        assert process.stdin is not None
        job = {"template": self.template.source, "variables": self.template.variables}
        process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process = process
        return process

    async def start(self) -> None:
        """Start the process: the first chat would wait for it."""
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
    """Turns what is asked into the tokens of prompts."""

    def __init__(self, codec: Codec, folder: Path) -> None:
        self.codec, self.quotes, self._token_bytes = codec, None, codec.longest_token()
        if isinstance(codec, LibraryCodec):
            self.codec = LibraryCodec(codec.tokenizer, unlocked=True)
            self.quotes = QuotingCodec(codec)
        self.chats: TemplateProcess | None = None
        with contextlib.suppress(FivefoldError):  # without a template there are no chats
            self.chats = TemplateProcess(ChatTemplate(folder))

    async def tokens(self, asked: AskedText, longest: int) -> list[tuple[int, ...]]:
        """The tokens of every prompt; refuses texts that cannot be `longest` tokens, before they
        cost anything. Special tokens in texts are text where the request says so."""
        quotes = None if asked.parse_special else self.quotes
        if not asked.chat:
            for each in asked.prompts:
                if isinstance(each, str):
                    self._check("prompt", [each], longest)
            return [
                each if isinstance(each, tuple) else await self._encoded(each, quotes, special=True)
                for each in asked.prompts
            ]
        if self.chats is None:
            rule = "this model has no chat template: use /v1/completions"
            raise ApiError(400, rule, "messages", "no_chat_template")
        self._check(
            "messages", [text for each in asked.messages for text in each.values()], longest
        )
        messages = asked.messages
        if quotes is not None:
            messages = tuple(
                {key: text if key == "role" else quotes.quoted(text) for key, text in each.items()}
                for each in messages
            )
        rendered = await self.chats.render(messages)
        return [await self._encoded(rendered, quotes, special=False, is_quoted=True)]

    def _check(self, param: str, texts: list[str], longest: int) -> None:
        """Refuse more bytes, or more messages, than the longest sequence can have."""
        size, most = sum(len(each.encode()) for each in texts), longest * self._token_bytes
        if size > most or len(texts) > 2 * longest + 2:
            rule = (
                f"{param}: {size:,} bytes are more than {longest:,} tokens, the limit: shorten it"
            )
            raise ApiError(400, rule, param, "context_length_exceeded")

    async def _encoded(
        self, text: str, quotes: QuotingCodec | None, *, special: bool, is_quoted: bool = False
    ) -> tuple[int, ...]:
        if quotes is not None and not is_quoted:
            text = quotes.quoted(text)
        encode = partial((quotes or self.codec).encode, text, special=special)
        return encode() if len(text) <= _SHORT else await asyncio.to_thread(encode)

    async def start(self) -> None:
        if self.chats is not None:
            await self.chats.start()

    async def close(self) -> None:
        if self.chats is not None:
            await self.chats.close()
