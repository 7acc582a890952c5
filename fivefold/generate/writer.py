"""Text from an engine: prompts in, pieces of text out as they are drawn, and times.

Whoever serves or reads files sits on this: `add` what comes, call `step` while `busy`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fivefold.generate.engine import Engine
from fivefold.generate.requests import Reason, Request
from fivefold.generate.routes import RecordedRoutes
from fivefold.generate.text import Codec, TextStream


class TextRequest(NamedTuple):
    """A request with the text of its prompt and its stop texts."""

    request: Request
    prompt: str
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrittenText:
    """Completion of a prompt. Tokens and log-probabilities include the stop token or text. With
    targets there is no text, and they are those of `Completion`."""

    id: str
    prompt: str
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: Reason
    ttft_s: float  # from the request to its first token
    tpot_s: float | None  # between two tokens, in the mean; None for one token
    routing: RecordedRoutes | None = None  # if it is recorded
    drafted: int | None = None  # tokens that were proposed, if any could be
    accepted: int | None = None  # those of them that were drawn

    def table(self) -> dict[str, Any]:
        """Convert to JSON."""
        optional = ("routing", "drafted", "accepted")
        row = asdict(self)
        return {key: row[key] for key in row if key not in optional or row[key] is not None}


@dataclass(frozen=True)
class TextPiece:
    """Text added to a completion, the last of it if `written` is set."""

    id: str
    text: str
    written: WrittenText | None


@dataclass
class _Open:
    """A prompt with an unfinished completion."""

    prompt: str
    writes: bool  # else its targets are scored
    stream: TextStream
    began: float
    first: float = 0.0
    last: float = 0.0
    length: int | None = None  # tokens up to the end of a stop text

    def tick(self, time_now: float) -> None:
        self.first, self.last = self.first or time_now, time_now


class TextWriter:
    """Text completions of several prompts at a time."""

    def __init__(
        self, engine: Engine, codec: Codec, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.engine, self.codec, self.clock = engine, codec, clock
        self._open: dict[str, _Open] = {}

    @property
    def busy(self) -> bool:
        """Whether any completion is unfinished."""
        return self.engine.busy

    def add(self, text_request: TextRequest) -> None:
        """Queue a request for the tokens of a prompt."""
        request, prompt, stops = text_request
        self.engine.add(request)
        stream = TextStream(self.codec, stops, request.min_tokens)
        self._open[request.id] = _Open(prompt, not request.targets, stream, self.clock())

    def step(self) -> list[TextPiece]:
        """Run one forward; returns what it added."""
        return [self._piece(*draw) for draw in self._drawn()]

    def cancel(self, id: str) -> None:
        """Cancel a completion."""
        del self._open[id]
        self.engine.end(id, "cancelled")
        self.engine.collect(id)

    def _drawn(self) -> list[tuple[str, str, Reason | None]]:
        drawn, time_now = self.engine.step(), self.clock()
        pieces: list[tuple[str, str, Reason | None]] = []
        for token in drawn:
            open_text, reason = self._open[token.id], token.reason
            if open_text.length is not None:  # drafts went on after its stop text
                continue
            open_text.tick(time_now)
            # A stop token ends the text, and is no part of it; nor is a token of an error.
            adds = open_text.writes and reason in (None, "length")
            text = open_text.stream.push(token.token) if adds else ""
            if open_text.stream.stopped:
                open_text.length = token.index + 1
                if reason is None and self.engine.has_open(token.id):
                    self.engine.end(token.id, "stop")
                reason = reason or "stop"
            pieces.append((token.id, text, reason))
        return pieces

    def _piece(self, id: str, text: str, reason: Reason | None) -> TextPiece:
        if reason is None:
            return TextPiece(id, text, None)
        open_text, done = self._open.pop(id), self.engine.collect(id)
        if open_text.length is not None:
            done = done.first(open_text.length)
        text += open_text.stream.finish()
        steps = len(done.tokens) - 1
        written = WrittenText(
            id,
            open_text.prompt,
            open_text.stream.text,
            done.tokens,
            done.logprobs,
            "stop" if open_text.stream.stopped else reason,
            open_text.first - open_text.began,
            (open_text.last - open_text.first) / steps if steps > 0 else None,
            done.routes,
            *((done.drafted, done.accepted) if self.engine.drafts else ()),
        )
        return TextPiece(id, text, written)
