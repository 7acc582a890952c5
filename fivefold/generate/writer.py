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

    def table(self) -> dict[str, Any]:
        """Convert to JSON."""
        row = asdict(self)
        return row if self.routing else {key: row[key] for key in row if key != "routing"}


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
            open_text.tick(time_now)
            # A stop token ends the text, and is no part of it; nor is a token of an error.
            adds = open_text.writes and reason in (None, "length")
            text = open_text.stream.push(token.token) if adds else ""
            if reason is None and open_text.stream.stopped:
                reason = "stop"
                self.engine.end(token.id, reason)
            pieces.append((token.id, text, reason))
        return pieces

    def _piece(self, id: str, text: str, reason: Reason | None) -> TextPiece:
        if reason is None:
            return TextPiece(id, text, None)
        open_text, done = self._open.pop(id), self.engine.collect(id)
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
        )
        return TextPiece(id, text, written)
