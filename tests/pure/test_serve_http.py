"""Connections of clients that are slow, silent, rude or gone: each ends, and nothing waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("h11", reason="pip install 'fivefold[serve]', which make setup does")

from fivefold.serve.http import (
    ClientGone,
    HttpConnection,
    HttpLimits,
    HttpRefusal,
    HttpRequest,
    serve_connection,
)

LIMITS = HttpLimits(
    header_bytes=1000,
    body_bytes=2000,
    idle_s=0.4,
    header_s=0.3,
    body_s=0.3,
    write_s=0.3,
    linger_s=0.3,
)
HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\n"


class SmallServer:
    """Echoes bodies; `/wait` notices a client that goes, `/flood` sends without end."""

    def __init__(self) -> None:
        self.open = self.gone = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = HttpConnection(reader, writer, LIMITS)
        self.open += 1
        try:
            await serve_connection(connection, self._handle, self._refuse)
        finally:
            self.open -= 1

    async def _handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        if request.path == "/wait":
            await connection.gone()
            self.gone += 1
            raise ClientGone
        if request.path == "/flood":
            await connection.begin(200, [])
            try:
                while True:
                    await connection.send(b"x" * 100_000)
            except ClientGone:
                self.gone += 1
                raise
        await connection.respond(200, [], request.body)

    async def _refuse(self, connection: HttpConnection, refusal: HttpRefusal) -> None:
        await connection.respond(refusal.status, [("connection", "close")], b"refused")


def run(client: Callable[[SmallServer, int], Awaitable[Any]]) -> Any:
    """A client against a server of its own, which nothing holds on to afterwards."""

    async def both() -> Any:
        small = SmallServer()
        server = await asyncio.start_server(small.accept, "127.0.0.1", 0)
        found = await client(small, server.sockets[0].getsockname()[1])
        for _ in range(150):
            if not small.open:
                break
            await asyncio.sleep(0.02)
        server.close()
        assert small.open == 0, "a connection is held"
        return found

    return asyncio.run(both())


def talk(*parts: bytes, pause: float = 0.0) -> tuple[bytes, float]:
    """Send bytes, one part after another; what came back until the end, and how long it took."""

    async def listen(reader: asyncio.StreamReader, found: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1000):
                found += data

    async def client(_: SmallServer, port: int) -> tuple[bytes, float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began, found = time.monotonic(), bytearray()
        heard = asyncio.ensure_future(listen(reader, found))
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)
            if heard.done():
                break
        await asyncio.wait_for(heard, 5)
        writer.close()
        return bytes(found), time.monotonic() - began

    return run(client)


@pytest.mark.parametrize(
    ("parts", "pause", "status"),
    [
        ((HEAD + b"Content-Length: 2\r\n\r\nhi",), 0.0, 200),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",), 0.0, 200),
        ((HEAD,), 0.0, 408),  # half of a header
        (tuple(bytes([each]) for each in HEAD), 0.02, 408),  # a byte now and then
        ((HEAD + b"Content-Length: 90\r\n\r\nhi",), 0.0, 408),  # half of a body
        ((HEAD + b"A: " + b"x" * 3000,), 0.0, 431),
        ((HEAD + b"Content-Length: 10000000\r\n\r\n", b"x" * 3_000_000), 0.0, 413),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"800\r\n" + b"x" * 2048), 0.0, 413),
        ((b"\x16\x03\x01 what\r\n\r\n",), 0.0, 400),
        ((HEAD + b"Content-Length: -3\r\n\r\n",), 0.0, 400),
        ((HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",), 0.0, 400),
    ],
    ids=[
        "length",
        "chunks",
        "header",
        "drip",
        "body",
        "431",
        "10MB",
        "endless",
        "tls",
        "-3",
        "two",
    ],
)
def test_every_client_gets_an_answer_in_time(
    parts: tuple[bytes, ...], pause: float, status: int
) -> None:
    found, seconds = talk(*parts, pause=pause)
    assert found.startswith(b"HTTP/1.1 %d " % status), found[:100]
    assert seconds < 4


def test_a_client_that_says_nothing_is_hung_up_on() -> None:
    found, seconds = talk()
    assert found == b"" and 0.3 < seconds < 3


def test_requests_follow_one_another() -> None:
    one = HEAD + b"Content-Length: 2\r\n\r\n"
    found, _ = talk(one + b"hi" + one + b"ho" + one[:20])
    assert found.count(b"HTTP/1.1 200") == 2 and b"hi" in found and b"ho" in found


def test_a_client_that_goes_is_noticed() -> None:
    async def client(small: SmallServer, port: int) -> int:
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
            await asyncio.sleep(0.01)
            writer.transport.abort()
        for _ in range(100):
            if small.gone == 20:
                break
            await asyncio.sleep(0.02)
        return small.gone

    assert run(client) == 20


def test_a_client_that_does_not_read_is_dropped() -> None:
    async def client(small: SmallServer, port: int) -> int:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")
        for _ in range(150):
            if small.gone:
                break
            await asyncio.sleep(0.02)
        writer.transport.abort()
        return small.gone

    assert run(client) == 1


def test_noise_never_stops_the_server() -> None:
    draw = random.Random(0)
    whole = HEAD + b"Content-Length: 20\r\n\r\n" + json.dumps({"a": 1}).encode() + b" " * 20

    async def client(_: SmallServer, port: int) -> bytes:
        async def rude() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            data = bytearray(whole)
            for _ in range(draw.randrange(6)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            writer.write(data[: draw.randrange(len(data) + 1)])
            if draw.random() < 0.5:
                writer.write_eof()
            else:
                await asyncio.sleep(0.02)
                writer.transport.abort()
                return
            with contextlib.suppress(OSError):
                await asyncio.wait_for(reader.read(), 5)
            writer.close()

        await asyncio.gather(*(rude() for _ in range(150)))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"Content-Length: 2\r\nConnection: close\r\n\r\nhi")
        found = await reader.read()
        writer.close()
        return found

    assert run(client).endswith(b"hi")
