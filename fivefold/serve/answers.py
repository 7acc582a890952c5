"""The choices of a call as they grow, and the JSON of them, whole or in chunks.

The API process holds the text: a stop text is found here, and the engine is told to end. Text and
log-probabilities are given out together, when later tokens cannot change the text.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from fivefold.core.model import NUM_BYTES
from fivefold.generate import ByteCodec, Codec, Reason, Request, TextStream
from fivefold.serve.schema import ApiError, AskedText

DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # of a token without probability: JSON has no −inf


@dataclass(frozen=True)
class TokenNote:
    """A token of a choice with its log-probabilities; `offset` is where its text begins."""

    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    offset: int


class ServedChoice:
    """One completion of a call."""

    def __init__(
        self, call: ServedCall, index: int, request: Request, codec: Codec, stops: tuple[str, ...]
    ) -> None:
        self.call, self.index, self.request = call, index, request
        self.codec, self.stops = codec, stops
        self.starts = 0
        self.begin()

    def begin(self) -> None:
        """Reset to no tokens; under another id after a restart, since results of the first may
        still arrive."""
        self.starts += 1
        if self.starts > 1:
            self.request = replace(self.request, id=f"{self.request.id}/{self.starts}")
        self.stream = TextStream(self.codec, self.stops)
        self.num_tokens = 0
        self.reason: Reason | None = None
        self._text, self._taken = "", 0  # given out by the stream, and of this by us
        self._notes: list[TokenNote] = []  # not yet given out

    @property
    def can_begin_again(self) -> bool:
        """Whether it may restart: its client has seen nothing of it, and it started once only, so
        that a request that crashes engines does not crash all of them."""
        return self.starts == 1 and not (self.call.request.stream and self.num_tokens)

    @property
    def client(self) -> str:
        return self.call.client

    @property
    def id(self) -> str:
        return self.request.id

    def push(
        self,
        token: int,
        logprob: float,
        reason: Reason | None,
        alternatives: tuple[tuple[int, float], ...] = (),
    ) -> None:
        """Append a drawn token; sets `reason` if the choice has ended."""
        self.num_tokens += 1
        self.call.tick()
        if reason != "stop":  # a stop token has no text
            likeliest = tuple(
                (alternative, max(value, _LEAST_LOGPROB)) for alternative, value in alternatives
            )
            number = max(logprob, _LEAST_LOGPROB)
            self._notes.append(TokenNote(token, number, likeliest, len(self.stream.text)))
            self._text += self.stream.push(token)
        if self.stream.stopped:
            reason = "stop"
        if reason is not None:
            self._text += self.stream.finish()
            self.reason = "stop" if self.stream.stopped else reason

    def fail(self, error: ApiError) -> None:
        """Fail it and its call."""
        self.reason = "error"
        self.call.fail(error)

    def take(self) -> tuple[str, list[TokenNote]]:
        """Return text not yet sent, and its tokens."""
        text, self._taken = self._text[self._taken :], len(self._text)
        if self.reason is not None and not self.stream.stopped:
            ready = len(self._notes)
        else:
            ready = sum(note.offset < self._taken for note in self._notes)
        notes, self._notes = self._notes[:ready], self._notes[ready:]
        return text, notes


@dataclass(eq=False)
class ServedCall:
    """An API request in the server."""

    id: str
    client: str
    request: AskedText
    prompt_tokens: int
    began: float  # seconds of the clock of all calls
    created: int = field(default_factory=lambda: int(time.time()))
    choices: list[ServedChoice] = field(default_factory=list[ServedChoice])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: ApiError | None = None
    first: float | None = None  # when the first token came
    last: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether all its choices have ended."""
        return self.error is not None or all(choice.reason for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def tick(self) -> None:
        """Record the time of a token."""
        self.last = time.monotonic()
        self.first = self.first or self.last

    def fail(self, error: ApiError) -> None:
        """Fail with an error."""
        self.error = error
        self.changed.set()

    def usage(self) -> dict[str, int]:
        drawn = self.num_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": self.prompt_tokens + drawn,
        }


class AnswerWriter:
    """Formats calls as JSON of the API."""

    def __init__(self, model: str, codec: Codec) -> None:
        self.model, self.codec = model, codec
        self._names = {number: name for name, number in codec.named().items()}

    def completion(self, call: ServedCall) -> bytes:
        """Response of a call that has ended."""
        choices = [self._whole_choice(choice, call.request) for choice in call.choices]
        return json.dumps(self._table(call, choices, call.usage(), full=True)).encode()

    def opening(self, call: ServedCall) -> bytes:
        """First event of a stream: in a chat, the role."""
        if not call.request.chat:
            return b""
        role = {"role": "assistant", "content": ""}
        rows = [self._row(i, {"delta": role}, None, None) for i in range(len(call.choices))]
        return b"".join(self._event(call, [row]) for row in rows)

    def news(self, call: ServedCall, indices: set[int]) -> bytes:
        """Events with new text of all choices; `indices` are those whose end was sent."""
        events: list[bytes] = []
        for choice in call.choices:
            if choice.index in indices:
                continue
            text, notes = choice.take()
            logprobs = self._logprobs(notes, call.request) if notes else None
            shown = {"delta": {"content": text}} if call.request.chat else {"text": text}
            if text or (logprobs and call.request.logprobs):
                events.append(self._event(call, [self._row(choice.index, shown, logprobs, None)]))
            if choice.reason is not None:
                empty: dict[str, Any] = {"delta": {}} if call.request.chat else {"text": ""}
                events.append(
                    self._event(call, [self._row(choice.index, empty, None, choice.reason)])
                )
                indices.add(choice.index)
        return b"".join(events)

    def closing(self, call: ServedCall) -> bytes:
        """Last events of a stream, with the usage if requested."""
        if call.error is not None:
            return b"data: " + call.error.body() + b"\n\n"
        usage = b""
        if call.request.with_usage:
            usage = self._line(self._table(call, [], call.usage(), full=False))
        return usage + DONE

    def _event(self, call: ServedCall, choices: list[dict[str, Any]]) -> bytes:
        return self._line(self._table(call, choices, None, full=False))

    def _line(self, table: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(table).encode() + b"\n\n"

    def _table(
        self, call: ServedCall, choices: list[Any], usage: dict[str, int] | None, full: bool
    ) -> dict[str, Any]:
        kind = "text_completion"
        if call.request.chat:
            kind = "chat.completion" if full else "chat.completion.chunk"
        table: dict[str, Any] = {"id": call.id, "object": kind, "created": call.created}
        table |= {"model": self.model, "choices": choices}
        if usage is not None or call.request.with_usage:
            table["usage"] = usage
        return table

    def _row(
        self, index: int, shown: dict[str, Any], logprobs: Any, reason: Reason | None
    ) -> dict[str, Any]:
        return {"index": index, **shown, "logprobs": logprobs, "finish_reason": reason}

    def _whole_choice(self, choice: ServedChoice, request: AskedText) -> dict[str, Any]:
        text, notes = choice.take()
        shown: dict[str, Any] = {"text": text}
        if request.chat:
            shown = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return self._row(choice.index, shown, self._logprobs(notes, request), choice.reason)

    def _logprobs(self, notes: Iterable[TokenNote], request: AskedText) -> dict[str, Any] | None:
        if not request.logprobs:
            return None
        notes = list(notes)
        if request.chat:
            content = [
                self._entry(note.token, note.logprob)
                | {"top_logprobs": [self._entry(*pair) for pair in note.alternatives]}
                for note in notes
            ]
            return {"content": content, "refusal": None}
        tops = [{self._text(t): value for t, value in note.alternatives} for note in notes]
        return {
            "tokens": [self._text(note.token) for note in notes],
            "token_logprobs": [note.logprob for note in notes],
            "top_logprobs": tops if request.alternatives else None,
            "text_offset": [note.offset for note in notes],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        data = list(text.encode())
        if isinstance(self.codec, ByteCodec):
            data = [token] if token < NUM_BYTES else []
        return {"token": text, "logprob": logprob, "bytes": data}

    def _text(self, token: int) -> str:
        return self._names.get(token) or self.codec.decode([token])
