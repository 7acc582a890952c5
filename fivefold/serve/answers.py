"""The choices of a call as they grow, and the JSON of them, whole or in chunks.

The door holds the text: a stop text is found here, and the engine is told to end. Text and
log-probabilities are given out together, when later tokens cannot change the text.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fivefold.core.model import NUM_BYTES
from fivefold.generate import ByteCodec, Codec, Drawn, Reason, Request, TextStream
from fivefold.serve.schema import ApiError, AskedText

DONE = b"data: [DONE]\n\n"
_CONTEXT = 8  # tokens of an echoed prompt that decide how the text after it is spaced
_TEXT = "\0"  # where an event has its text; what else is in it is no control character
_LEAST_LOGPROB = -9999.0  # of a token without probability: JSON has no −inf


@dataclass(frozen=True)
class TokenNote:
    """A token of a choice with its log-probabilities; `offset` is where its text begins."""

    token: int
    logprob: float | None  # None: the first one of a prompt
    alternatives: Drawn
    offset: int


@dataclass(frozen=True)
class PromptScore:
    """A token of a prompt; `rank` tokens are at least as likely."""

    token: int
    logprob: float
    rank: int
    alternatives: Drawn


class ServedChoice:
    """One completion of a call."""

    def __init__(
        self,
        call: ServedCall,
        index: int,
        request: Request,
        codec: Codec,
        stops: tuple[str, ...],
        echo: str = "",
    ) -> None:
        """`echo`: what the text begins with, the prompt if it is wanted."""
        self.call, self.index, self.request = call, index, request
        self.codec, self.stops, self.echo = codec, stops, echo
        self.frame: tuple[bytes, bytes] | None = None  # of its events, around the text
        self.begin(request.id)

    def begin(self, id: str) -> None:
        """Reset to no tokens, under an id."""
        self.request = replace(self.request, id=id)
        context = self.request.prompt[-_CONTEXT:] if self.echo else ()
        self.stream = TextStream(self.codec, self.stops, self.request.min_tokens, context)
        self.num_tokens = 0
        self.reason: Reason | None = None
        self.scores: list[PromptScore] = []
        self._prompt_taken = False
        # Given out by the stream, and of this by us; the echo is given out apart.
        self._text, self._num_taken = "", len(self.echo)
        self._notes: list[TokenNote] = []  # not yet given out

    @property
    def id(self) -> str:
        return self.request.id

    def score(self, token: int, logprob: float, rank: int, alternatives: Drawn) -> None:
        """Append a token of the prompt; all of them come before `push`."""
        number = max(logprob, _LEAST_LOGPROB)
        self.scores.append(PromptScore(token, number, rank, _finite(alternatives)))

    def push(
        self,
        token: int,
        logprob: float,
        reason: Reason | None,
        alternatives: Drawn = (),
    ) -> None:
        """Append a drawn token; sets `reason` if the choice has ended."""
        self.call.tick()
        if self.call.request.max_tokens == 0:  # the prompt alone is wanted
            self.reason = "length"
            return
        self.num_tokens += token >= 0  # a grammar may end without one
        if reason != "stop":  # a stop token has no text
            if self.call.request.logprobs:
                offset = len(self.echo) + self.stream.num_chars
                number = max(logprob, _LEAST_LOGPROB)
                self._notes.append(TokenNote(token, number, _finite(alternatives), offset))
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

    def take_prompt(self) -> bool:
        """Whether the prompt is known, and was not sent yet; from now on it was."""
        known = self.num_tokens > 0 or self.reason not in (None, "error")
        new, self._prompt_taken = known and not self._prompt_taken, known
        return new

    def take(self) -> tuple[str, list[TokenNote]]:
        """Return text not yet sent, and its tokens."""
        text, self._text = self._text, ""
        self._num_taken += len(text)
        if self.reason is not None and not self.stream.stopped:
            ready = len(self._notes)
        else:
            ready = sum(note.offset < self._num_taken for note in self._notes)
        notes, self._notes = self._notes[:ready], self._notes[ready:]
        return text, notes


def _finite(alternatives: Drawn) -> Drawn:
    return tuple((token, max(value, _LEAST_LOGPROB)) for token, value in alternatives)


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
    send_news: Callable[[], bool] | None = None

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

    def send_by(self, send_news: Callable[[], bool]) -> None:
        """Send what is new without waking the task of the call; `send_news` returns whether it
        could."""
        self.send_news = send_news

    def update(self) -> None:
        """Send what is new, or wake the task of the call for it."""
        if self.send_news is None or not self.send_news():
            self.changed.set()

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

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._names = {number: name for name, number in codec.named().items()}

    def completion(self, call: ServedCall) -> bytes:
        """Response of a call that has ended."""
        choices = [self._whole_choice(choice, call.request) for choice in call.choices]
        table = self._table(call, choices, call.usage(), full=True)
        if call.request.chat:
            table |= self._prompt_logprobs(call.choices[0])
        return json.dumps(table).encode()

    def opening(self, call: ServedCall) -> bytes:
        """First event of a stream: in a chat, the role."""
        if not call.request.chat:
            return b""
        role = {"role": "assistant", "content": ""}
        rows = [self._row(i, {"delta": role}, None, None) for i in range(len(call.choices))]
        return b"".join(self._event(call, [row]) for row in rows)

    def prompt_event(self, call: ServedCall, choice: ServedChoice) -> bytes:
        """Event with what a request wants of its prompt, before any text of the choice."""
        if call.request.chat:  # the first choice has that of all
            row = self._row(choice.index, {"delta": {}}, None, None)
            table = self._table(call, [row], None, full=False) | self._prompt_logprobs(choice)
            return b"" if choice.index else self._line(table)
        logprobs = self._logprobs(self._prompt_notes(choice), call.request)
        row = self._row(choice.index, {"text": choice.echo}, logprobs, None)
        return self._event(call, [row | self._prompt_logprobs(choice)])

    def news(self, call: ServedCall, indices: set[int]) -> bytes:
        """Events with new text of all choices; `indices` are those whose end was sent."""
        events: list[bytes] = []
        for choice in call.choices:
            if choice.index in indices:
                continue
            text, notes = choice.take()
            if notes:
                logprobs = self._logprobs(notes, call.request)
                row = self._row(choice.index, self._shown(call, text), logprobs, None)
                events.append(self._event(call, [row]))
            elif text:
                head, tail = choice.frame = choice.frame or self._frame(call, choice)
                events.append(head + json.dumps(text).encode() + tail)
            if choice.reason is not None:
                empty: dict[str, Any] = {"delta": {}} if call.request.chat else {"text": ""}
                events.append(
                    self._event(call, [self._row(choice.index, empty, None, choice.reason)])
                )
                indices.add(choice.index)
        return b"".join(events)

    def _shown(self, call: ServedCall, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if call.request.chat else {"text": text}

    def _frame(self, call: ServedCall, choice: ServedChoice) -> tuple[bytes, bytes]:
        """What is before and after the text in all events of a choice."""
        row = self._row(choice.index, self._shown(call, _TEXT), None, None)
        head, _, tail = self._event(call, [row]).rpartition(json.dumps(_TEXT).encode())
        return head, tail

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
        table |= {"model": call.request.model, "choices": choices}
        if usage is not None or call.request.with_usage:
            table["usage"] = usage
        return table

    def _row(
        self, index: int, shown: dict[str, Any], logprobs: Any, reason: Reason | None
    ) -> dict[str, Any]:
        return {"index": index, **shown, "logprobs": logprobs, "finish_reason": reason}

    def _whole_choice(self, choice: ServedChoice, request: AskedText) -> dict[str, Any]:
        text, notes = choice.take()
        if request.chat:
            shown = {"message": {"role": "assistant", "content": text, "refusal": None}}
            return self._row(choice.index, shown, self._logprobs(notes, request), choice.reason)
        logprobs = self._logprobs([*self._prompt_notes(choice), *notes], request)
        row = self._row(choice.index, {"text": choice.echo + text}, logprobs, choice.reason)
        return row | self._prompt_logprobs(choice)

    def _prompt_notes(self, choice: ServedChoice) -> Iterator[TokenNote]:
        """The tokens of an echoed prompt, if log-probabilities are wanted."""
        request, stream = choice.call.request, TextStream(self.codec)
        if not (request.echo and request.logprobs):
            return
        yield TokenNote(choice.request.prompt[0], None, (), 0)
        stream.push(choice.request.prompt[0])
        for score in choice.scores:
            likeliest = score.alternatives[: request.alternatives]
            offset = min(stream.num_chars, len(choice.echo))
            yield TokenNote(score.token, score.logprob, likeliest, offset)
            stream.push(score.token)

    def _prompt_logprobs(self, choice: ServedChoice) -> dict[str, Any]:
        """The key of that name as vLLM has it, if it is wanted."""
        count = choice.call.request.prompt_logprobs
        if count is None:
            return {}
        rows: list[dict[str, Any] | None] = [None]
        for score in choice.scores:
            entries = {score.token: (score.logprob, score.rank)}
            for rank, (token, value) in enumerate(score.alternatives[:count], 1):
                entries[token] = value, rank
            rows.append(
                {
                    str(token): {"logprob": value, "rank": rank, "decoded_token": self._text(token)}
                    for token, (value, rank) in entries.items()
                }
            )
        return {"prompt_logprobs": rows}

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
        tops = [
            None if note.logprob is None else {self._text(t): v for t, v in note.alternatives}
            for note in notes
        ]
        return {
            "tokens": [self._text(note.token) for note in notes],
            "token_logprobs": [note.logprob for note in notes],
            "top_logprobs": tops if request.alternatives else None,
            "text_offset": [note.offset for note in notes],
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        data = list(text.encode())
        if isinstance(self.codec, ByteCodec):
            data = [token] if token < NUM_BYTES else []
        return {"token": text, "logprob": logprob, "bytes": data}

    def _text(self, token: int) -> str:
        return self._names.get(token) or self.codec.decode([token])
