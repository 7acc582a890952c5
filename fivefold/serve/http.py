"""HTTP/1.1 on one connection: what a client may send, how long it may take, when it has gone.

The syntax is that of h11, which reads bytes and does nothing else: clocks and sizes are ours. An
ASGI server would hide them: uvicorn waits without end for half a header, and for a client that does
not read. Here every wait has a limit, every buffer a size, and a client that goes is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import h11

_READ = 1 << 16
_HIGH_WATER = 1 << 16  # bytes that wait to be sent before a sender waits
_LINGER_BYTES = 64 << 20  # of a refused body
OTHER_FILES = 128  # that a server has open: links, pipes, and connections that are being closed
_FEWEST = 8  # connections
Headers = list[tuple[str, str]]


@dataclass(frozen=True)
class HttpLimits:
    """Limits of a connection."""

    header_bytes: int = 16 << 10
    body_bytes: int = 4 << 20
    connections: int = 2048
    per_client: int = 1024  # of these, from one address
    idle_s: float = 60.0  # between two requests, or before the first
    header_s: float = 10.0  # from its first byte to its last
    body_s: float = 60.0
    write_s: float = 30.0  # for a buffer to be taken
    linger_s: float = 5.0  # for the rest of a refused body, so that its sender sees the answer

    def within_open_files(self) -> HttpLimits:
        """Limit connections to the process's open files, after raising its soft limit."""
        needed = self.connections + OTHER_FILES
        if (files := open_files(needed)) >= needed:
            return self
        most = max(_FEWEST, files - OTHER_FILES)
        return replace(self, connections=most, per_client=min(self.per_client, most // 2))


def open_files(needed: int) -> int:
    """Number of files that this process may open, after raising its soft limit to those needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


@dataclass(frozen=True)
class HttpRequest:
    """A parsed request."""

    method: str
    path: str  # without the query
    headers: dict[str, str]
    body: bytes
    peer: str


class HttpRefusal(Exception):
    """A request refused by the HTTP layer."""

    def __init__(self, status: int, message: str, request: HttpRequest | None = None) -> None:
        self.status, self.message, self.request = status, message, request
        super().__init__(message)


class ClientGone(Exception):
    """The client has disconnected, or does not read."""


class HttpConnection:
    """A connection. One request at a time: `read`, then `respond`, or `begin`, `send` and
    `finish`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: HttpLimits
    ) -> None:
        self.reader, self.writer, self.limits = reader, writer, limits
        self.state = h11.Connection(h11.SERVER, limits.header_bytes)
        self.idle_since: float | None = None  # while no request has begun
        self._is_chunked = False  # the response
        peer: Any = writer.get_extra_info("peername")
        self.peer = str(peer[0]) if peer else ""
        writer.transport.set_write_buffer_limits(_HIGH_WATER)

    async def read(self) -> HttpRequest | None:
        """Read the next request; None if the client has disconnected or is idle. Raises
        `HttpRefusal`."""
        request: HttpRequest | None = None
        try:
            self.idle_since = time.monotonic()
            head = await self._head()
            if head is None:
                return None
            self.idle_since = None
            request = _request(head, b"", self.peer)
            return _request(head, await self._body(request), self.peer)
        except h11.RemoteProtocolError as error:
            status, rule = error.error_status_hint, f"not valid HTTP: {error}"
            raise HttpRefusal(status, rule, request) from error
        except TimeoutError as error:
            rule = "the request was not sent in time: send it again"
            raise HttpRefusal(408, rule, request) from error
        except OSError:
            return None
        finally:
            self.idle_since = None

    async def _head(self) -> h11.Request | None:
        """The line and the headers of a request; None if there is none."""
        clock = asyncio.get_running_loop().time
        event = self.state.next_event()
        began = bool(self.state.trailing_data[0])
        until = clock() + (self.limits.header_s if began else self.limits.idle_s)
        while event is h11.NEED_DATA:
            try:
                async with asyncio.timeout_at(until):
                    data = await self.reader.read(_READ)
            except TimeoutError:
                if began:
                    raise
                return None
            if data and not began:
                began, until = True, clock() + self.limits.header_s
            self.state.receive_data(data)
            event = self.state.next_event()
        return event if isinstance(event, h11.Request) else None

    async def _body(self, request: HttpRequest) -> bytes:
        most, body = self.limits.body_bytes, bytearray()
        rule = f"the body has more than {most:,} bytes, the limit: send less"
        if int(request.headers.get("content-length", 0)) > most:
            raise HttpRefusal(413, rule, request)
        if self.state.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))
        async with asyncio.timeout(self.limits.body_s):
            while True:
                event = self.state.next_event()
                if event is h11.NEED_DATA:
                    self.state.receive_data(await self.reader.read(_READ))
                elif isinstance(event, h11.Data):
                    body += event.data
                    if len(body) > most:
                        raise HttpRefusal(413, rule, request)
                else:
                    return bytes(body)

    async def gone(self) -> None:
        """Wait until the client disconnects; buffers what it sends."""
        with contextlib.suppress(OSError):
            while data := await self.reader.read(_READ):
                self.state.receive_data(data)
                if len(self.state.trailing_data[0]) > self.limits.header_bytes:
                    await asyncio.get_running_loop().create_future()  # it may wait; nobody reads

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a full response."""
        await self.begin(status, [*headers, ("content-length", str(len(body)))])
        await self.send(body)
        await self.finish()

    async def begin(self, status: int, headers: Headers) -> None:
        """Begin a response; chunked if it has no length."""
        pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]
        head = self._encoded(h11.Response(status_code=status, headers=pairs))
        self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in head.lower()
        await self._write(head)

    @property
    def can_send(self) -> bool:
        """Whether a part of a chunked response can be sent now, as `send` would, without a wait."""
        transport = self.writer.transport
        has_room = transport.get_write_buffer_size() <= _HIGH_WATER
        return self._sends_chunks and has_room and not transport.is_closing()

    def send_now(self, data: bytes) -> None:
        """Send a part of the response if `can_send`."""
        self.writer.write(self._part(data))

    async def send(self, data: bytes) -> None:
        """Send a part of the response. Raises `ClientGone`, also on timeout."""
        await self._write(self._part(data))

    async def finish(self) -> None:
        """End the response."""
        await self._send(h11.EndOfMessage())

    @property
    def _sends_chunks(self) -> bool:
        return self._is_chunked and self.state.our_state is h11.SEND_BODY

    def _part(self, data: bytes) -> bytes:
        """A part of the response as it is sent. Chunks are written by us: h11 takes as long for a
        token as all else."""
        if data and self._sends_chunks:
            return b"%x\r\n%b\r\n" % (len(data), data)
        return self._encoded(h11.Data(data=data))

    def _encoded(self, event: h11.Event) -> bytes:
        try:
            return self.state.send(event) or b""
        except h11.LocalProtocolError as error:  # the client broke off in the middle
            raise ClientGone(str(error)) from error

    async def _send(self, event: h11.Event) -> None:
        await self._write(self._encoded(event))

    async def _write(self, data: bytes) -> None:
        transport = self.writer.transport
        if data:
            self.writer.write(data)
        if transport.is_closing():
            raise ClientGone("the connection is closed")
        if transport.get_write_buffer_size() > _HIGH_WATER:
            try:
                async with asyncio.timeout(self.limits.write_s):
                    await self.writer.drain()
            except (OSError, TimeoutError) as error:
                transport.abort()
                raise ClientGone("the client does not read") from error

    def next_cycle(self) -> bool:
        """Whether the connection may serve another request."""
        if self.state.our_state is not h11.DONE or self.state.their_state is not h11.DONE:
            return False
        self.state.start_next_cycle()
        return True

    async def close(self) -> None:
        """Close after sent data is read, or after a timeout."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self.limits.linger_s):
                await self._discard()
        self.writer.close()
        try:
            async with asyncio.timeout(self.limits.write_s):
                await self.writer.wait_closed()
        except TimeoutError:
            self.writer.transport.abort()
        except OSError:
            pass

    async def _discard(self) -> None:
        """Read the rest of a refused body: to close a connection that has unread bytes resets it,
        and its client would not see the answer."""
        if (
            self.state.their_state is h11.SEND_BODY
            and self.state.our_state is not h11.SEND_RESPONSE
        ):
            read = 0
            while read < _LINGER_BYTES and (data := await self.reader.read(_READ)):
                read += len(data)


def _request(head: h11.Request, body: bytes, peer: str) -> HttpRequest:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
    path = head.target.decode("latin-1").partition("?")[0]
    return HttpRequest(head.method.decode("latin-1"), path, headers, body, peer)


async def serve_connection(
    connection: HttpConnection,
    handle: Callable[[HttpConnection, HttpRequest], Awaitable[None]],
    refuse: Callable[[HttpConnection, HttpRefusal], Awaitable[None]],
) -> None:
    """Serve requests of a connection until the client disconnects or breaks a rule."""
    try:
        while True:
            try:
                request = await connection.read()
            except HttpRefusal as refusal:
                await refuse(connection, refusal)
                break
            if request is None:
                break
            await handle(connection, request)
            if not connection.next_cycle():
                break
    except ClientGone:
        pass
    finally:
        await connection.close()
