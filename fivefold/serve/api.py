"""The HTTP API: paths, keys, answers and the log of a server.

On loopback everybody of this machine may come in, but no page of another site: its browser says
where it comes from. Beyond loopback there is no entry without a key; `/health` alone says whether
the server is up, to whoever looks after it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlsplit

from fivefold.core import FivefoldError
from fivefold.serve.answers import AnswerWriter, ServedCall
from fivefold.serve.calls import DoorCalls
from fivefold.serve.http import (
    ClientGone,
    Headers,
    HttpConnection,
    HttpLimits,
    HttpRefusal,
    HttpRequest,
    serve_connection,
)
from fivefold.serve.links import AnsweredRequest
from fivefold.serve.metrics import GONE
from fivefold.serve.prompting import PromptReader
from fivefold.serve.schema import ApiError, parse_asked, wrong

LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
_GET = ("/health", "/metrics", "/v1/models")
_JSON = ("content-type", "application/json")
_GRACE_S = 0.2  # for a request that is on its way when the server begins to end
_CODES = {413: "body_too_large", 408: "timeout"}


@dataclass
class RequestNote:
    """Log entry of a request."""

    client: str = "-"
    status: int = 0
    fields: list[str] = field(default_factory=list[str])
    times: tuple[float, float, float | None] | None = None  # to the first and last token, and TPOT


class Api:
    """HTTP handlers of the server."""

    def __init__(
        self,
        name: str,
        keys: tuple[str, ...],
        calls: DoorCalls,
        prompts: PromptReader,
        limits: HttpLimits,
        adapters: tuple[str, ...] = (),
    ) -> None:
        """`adapters`: names of those that clients may ask for instead of the base, `name`."""
        self.names = (name, *adapters)  # by the numbers of adapters
        self.keys, self.calls, self.prompts = keys, calls, prompts
        self.limits, self.writer = limits, AnswerWriter(calls.codec)
        self.draining = False
        self.created = int(time.time())
        self._connections: dict[HttpConnection, asyncio.Task[None]] = {}
        self._compiles = asyncio.Lock()  # one grammar at a time, beside the event loop

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        connection = HttpConnection(reader, writer, self.limits)
        if not self._makes_room(connection.peer):
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            await serve_connection(connection, self._handle, self._refuse)
        except asyncio.CancelledError:  # it was idle, and the server ends
            pass
        finally:
            self._connections.pop(connection, None)

    def _makes_room(self, peer: str) -> bool:
        """Whether one more connection has room: at a limit, the oldest idle one of whoever has the
        most is closed for it, so that idle connections never keep a request out."""
        counts = Counter(connection.peer for connection in self._connections)
        if counts[peer] < self.limits.per_client:
            if len(self._connections) < self.limits.connections:
                return True
            ((peer, _),) = counts.most_common(1)
        idle = (
            connection
            for connection in self._connections
            if connection.idle_since and connection.peer == peer
        )
        oldest = next(idle, None)
        if oldest is not None:
            self._connections.pop(oldest).cancel()
        return oldest is not None

    async def drain(self, seconds: float) -> None:
        """Refuse new calls and finish open ones; fails those that exceed the timeout. Requests that
        arrive meanwhile get 503, and are not waited for."""
        self.draining = True
        until, before = time.monotonic() + seconds, set(self._connections)
        while (left := before & self._connections.keys()) and time.monotonic() < until:
            for connection in left:
                if (since := connection.idle_since) and time.monotonic() > since + _GRACE_S:
                    self._connections[connection].cancel()
            await asyncio.sleep(0.02)
        if self._connections:
            self.calls.fail_all(_shutting_down())
            await asyncio.sleep(0.2)
            for task in list(self._connections.values()):
                task.cancel()
        await self.prompts.close()

    async def _handle(self, connection: HttpConnection, request: HttpRequest) -> None:
        note, began = RequestNote(request.peer), time.monotonic()
        try:
            try:
                await self._answer(connection, request, note)
            except ApiError as error:
                await self._respond(connection, note, error.status, error.body(), error.headers)
                note.fields.append(f"error={json.dumps(error.message[:200])}")
        except ClientGone:
            note.status = GONE
            raise
        except Exception as error:
            note.fields.append(f"error={json.dumps(f'{type(error).__name__}: {error}'[:300])}")
            failed = ApiError(500, "the server has failed: its log says why")
            await self._respond(connection, note, 500, failed.body())
        finally:
            self._log(request, note, time.monotonic() - began)

    async def _refuse(self, connection: HttpConnection, refusal: HttpRefusal) -> None:
        """Answer what is no request, or too large."""
        request = refusal.request or HttpRequest("-", "-", {}, b"", connection.peer)
        note = RequestNote(connection.peer, refusal.status)
        error = ApiError(refusal.status, refusal.message, None, _CODES.get(refusal.status))
        try:
            close = [*error.headers, ("connection", "close")]
            await self._respond(connection, note, error.status, error.body(), close)
        finally:
            self._log(request, note, 0.0)

    async def _answer(
        self, connection: HttpConnection, request: HttpRequest, note: RequestNote
    ) -> None:
        path, method = request.path.rstrip("/") or "/", request.method
        known = path in (*_GET, COMPLETIONS, CHATS) or path.startswith("/v1/models/")
        if path == "/health" and method == "GET":
            state = "ok" if self.calls.state.serves else "no engine"
            state = "draining" if self.draining else state
            body = json.dumps({"status": state}).encode()
            return await self._respond(connection, note, 200 if state == "ok" else 503, body)
        note.client = self._admitted(request)
        if not known:
            raise ApiError(404, f"no such path: {path[:100]}", None, "unknown_url")
        verb = "POST" if path in (COMPLETIONS, CHATS) else "GET"
        if method != verb:
            allow = [("allow", verb)]
            raise ApiError(405, f"{path[:100]} takes {verb}", None, "method_not_allowed", allow)
        if verb == "POST":
            return await self._complete(connection, request, note)
        if path == "/metrics":
            text = (await self.calls.metrics()).encode()
            kind = [("content-type", "text/plain; version=0.0.4; charset=utf-8")]
            return await self._respond(connection, note, 200, text, kind)
        await self._respond(connection, note, 200, self._models(path))

    def _admitted(self, request: HttpRequest) -> str:
        """The name of a client that may come in, for turns and the log; refuses any other."""
        if self.keys:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            for number, key in enumerate(self.keys):
                if scheme.lower() == "bearer" and hmac.compare_digest(
                    token.strip().encode("latin-1"), key.encode()
                ):
                    return f"key-{number}"
            rule = "no API key" if not token else "unknown API key"
            headers = [("www-authenticate", "Bearer")]
            rule = f"{rule}: send a known one as Authorization: Bearer KEY"
            raise ApiError(401, rule, None, "invalid_api_key", headers)
        host = request.headers.get("host", "localhost")
        origin = request.headers.get("origin", "http://localhost")
        try:
            names = [urlsplit(f"//{host}").hostname, urlsplit(origin).hostname]
        except ValueError as error:
            rule = f"Host or Origin is no valid address: {error}"
            raise ApiError(400, rule, None, "invalid_header") from error
        if any(name not in LOOPBACK for name in names):
            raise ApiError(403, "another site may not ask", None, "forbidden")
        return request.peer

    def _models(self, path: str) -> bytes:
        name = path.removeprefix("/v1/models").removeprefix("/")
        if not name:
            models = [self._model(served) for served in self.names]
            return json.dumps({"object": "list", "data": models}).encode()
        self._adapter(name)
        return json.dumps(self._model(name)).encode()

    def _model(self, name: str) -> dict[str, object]:
        model = {"id": name, "object": "model", "created": self.created, "owned_by": "fivefold"}
        parent = {} if name == self.names[0] else {"parent": self.names[0]}
        return {**model, "max_model_len": self.calls.state.longest, **parent}

    def _adapter(self, model: str) -> int:
        """The number of the adapter of that name, 0 of the base; refuses any other name."""
        if model in self.names:
            return self.names.index(model)
        served = " or ".join(repr(name) for name in self.names)
        rule = f"the model {json.dumps(model[:100])} is not served: ask for {served}"
        raise ApiError(404, rule, "model", "model_not_found")

    async def _complete(
        self, connection: HttpConnection, request: HttpRequest, note: RequestNote
    ) -> None:
        """Complete prompts or a chat."""
        began, chat = time.monotonic(), request.path.rstrip("/") == CHATS
        if self.draining:
            raise _shutting_down()
        text_request = parse_asked(request.body, chat)
        adapter = self._adapter(text_request.model)
        if text_request.grammar:
            await self._check_grammar(text_request.grammar)
        prompts = await self.prompts.tokens(text_request, self.calls.state.longest)
        id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex[:24]}"
        call = self.calls.call(id, note.client, text_request, prompts, began, adapter)
        note.fields += [f"id={id}", f"prompt={call.prompt_tokens}"]
        if adapter:
            note.fields.append(f"adapter={json.dumps(text_request.model)}")
        self.calls.begin(call)
        watch = asyncio.ensure_future(connection.gone())
        watch.add_done_callback(lambda _: call.changed.set())
        try:
            if text_request.stream:
                await self._stream(connection, call, watch, note)
            else:
                call.send_by(lambda: not call.ended)  # nothing is sent before
                while not call.ended:
                    await _changed(call, watch)
                if call.error is not None:
                    raise call.error
                body = await self._body(call)
                await self._respond(connection, note, 200, body, [("x-request-id", id)])
        finally:
            self.calls.end(call)
            watch.cancel()
            await asyncio.wait([watch])
            self._count(call, note)

    async def _check_grammar(self, schema: str) -> None:
        """Refuse a schema before an engine hears of it."""
        async with self._compiles:
            try:
                await asyncio.to_thread(self.calls.grammars.check, schema)
            except FivefoldError as error:
                raise wrong("response_format", str(error)) from error

    async def _body(self, call: ServedCall) -> bytes:
        """The answer of a call; scores of prompts take long to write, and the loop goes on."""
        if call.request.shows_prompt:
            return await asyncio.to_thread(self.writer.completion, call)
        return self.writer.completion(call)

    async def _prompts(self, call: ServedCall) -> bytes:
        """Events with the prompts of all choices that have begun since. Before it returns it waits
        for nothing, so that no text comes before its prompt."""
        data = b""
        while choice := next((choice for choice in call.choices if choice.take_prompt()), None):
            data += await asyncio.to_thread(self.writer.prompt_event, call, choice)
        return data

    async def _stream(
        self,
        connection: HttpConnection,
        call: ServedCall,
        watch: asyncio.Future[None],
        note: RequestNote,
    ) -> None:
        """Send tokens as they come. A client that reads slowly gets more of them at a time."""
        await _changed(call, watch)
        if call.error is not None:  # nothing was sent yet
            raise call.error
        note.status = 200
        headers = [("content-type", "text/event-stream; charset=utf-8")]
        headers += [("cache-control", "no-cache"), ("x-request-id", call.id)]
        await connection.begin(200, [*headers, *self._closing()])
        data, indices = self.writer.opening(call), set[int]()

        def send_news() -> bool:
            if call.ended or not connection.can_send:
                return False
            if news := self.writer.news(call, indices):
                connection.send_now(news)
            return True

        while True:
            ended = call.ended
            if call.request.shows_prompt:
                data += await self._prompts(call)
            data += self.writer.news(call, indices)
            if ended:
                break
            if data:
                await connection.send(data)
                data = b""
            if not call.request.shows_prompt:
                call.send_by(send_news)
            await _changed(call, watch)
        await connection.send(data + self.writer.closing(call))
        await connection.finish()

    def _closing(self) -> Headers:
        return [("connection", "close")] if self.draining else []

    async def _respond(
        self,
        connection: HttpConnection,
        note: RequestNote,
        status: int,
        body: bytes,
        headers: Headers | None = None,
    ) -> None:
        note.status = status
        full_headers = list(headers or [])
        if not any(name == "content-type" for name, _ in full_headers):
            full_headers.append(_JSON)
        await connection.respond(status, [*full_headers, *self._closing()], body)

    def _count(self, call: ServedCall, note: RequestNote) -> None:
        """Put the times of a call into numbers and log."""
        reasons = ",".join(str(choice.reason or "-") for choice in call.choices[:8])
        note.fields += [f"output={call.num_tokens}", f"reason={reasons}"]
        if call.first is None:
            return
        ttft, latency, tpot = call.first - call.began, call.last - call.began, None
        note.fields.append(f"ttft={ttft:.4f}")
        steps = max(choice.num_tokens for choice in call.choices) - 1
        if steps > 0:
            tpot = (call.last - call.first) / steps
            note.fields.append(f"tpot={tpot:.4f}")
        note.times = ttft, latency, tpot

    def _log(self, request: HttpRequest, note: RequestNote, seconds: float) -> None:
        known = request.path in (*_GET, COMPLETIONS, CHATS)
        path = request.path[:100].encode("unicode_escape").decode()
        time_now = datetime.now(UTC).isoformat(timespec="milliseconds")
        fields = [time_now, request.peer, note.client, request.method[:10], path, str(note.status)]
        line = " ".join([*fields, f"total={seconds:.4f}", *note.fields])
        name = request.path if known else "other"
        self.calls.send(AnsweredRequest(name, note.status, line, note.times))


def _shutting_down() -> ApiError:
    headers = [("retry-after", "5")]
    return ApiError(503, "the server is shutting down: ask again later", None, "draining", headers)


async def _changed(call: ServedCall, watch: asyncio.Future[None]) -> None:
    """Wait for news of a call; raises `ClientGone` if nobody waits for them."""
    await call.changed.wait()
    call.changed.clear()
    if watch.done():
        raise ClientGone("the client has closed the connection")
