"""Calls as the dispatcher sees them: whose they are, and where what is drawn for them goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fivefold.generate import Request
from fivefold.serve.links import CallRows, DoorHello, DrawnRow, FailedCall, PromptRow
from fivefold.serve.schema import ApiError


@dataclass(eq=False)
class RoutedRequest:
    """A request between its door and an engine."""

    call: RoutedCall
    request: Request
    has_restarted: bool = False
    has_drawn: bool = False

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def client(self) -> str:
        return self.call.client

    @property
    def can_restart(self) -> bool:
        """Whether it may begin again: its client has seen nothing of it, and it began once only, so
        that a request that crashes engines does not crash all of them."""
        return not self.has_restarted and not (self.call.streams and self.has_drawn)

    def take(self, row: DrawnRow) -> None:
        """Take a token for its door."""
        self.has_drawn = True
        self.call.door.rows.append(row)

    def restart(self) -> None:
        """Begin again under another id."""
        self.has_restarted, self.has_drawn = True, False
        self.request = replace(self.request, id=f"{self.id}/again")


@dataclass(eq=False)
class RoutedCall:
    """A call of a door. It fails once."""

    id: str
    client: str
    streams: bool
    door: DoorPeer
    requests: list[RoutedRequest] = field(default_factory=list[RoutedRequest])
    has_failed: bool = False

    def fail(self, error: ApiError) -> None:
        """Tell the door an error."""
        if not self.has_failed:
            self.has_failed = True
            fields = error.status, error.message, error.param, error.code, error.headers
            self.door.send(FailedCall(self.id, fields))


class DoorPeer:
    """A door, as the dispatcher sees it."""

    def __init__(self, hello: DoorHello, send: Callable[[Any], None]) -> None:
        self.hello, self.send = hello, send
        self.calls: dict[str, RoutedCall] = {}
        self.rows: list[DrawnRow] = []  # to be sent, as are those of prompts
        self.prompt_rows: list[PromptRow] = []
        self.num_silent = 0  # beats that are due since its last message

    def count_beat(self, limit: int) -> bool:
        """Count a beat that is due; returns whether as many as the limit have not come."""
        self.num_silent += 1
        return self.num_silent == limit

    def hear(self) -> None:
        """A message has come."""
        self.num_silent = 0

    def send_rows(self) -> None:
        """Send what steps have drawn, in one message."""
        if self.rows or self.prompt_rows:
            self.send(CallRows(self.rows, self.prompt_rows))
            self.rows, self.prompt_rows = [], []
