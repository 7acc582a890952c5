"""The door of a server with engines that only listen: losses, limits, headers, the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import resource
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("h11", reason="pip install 'fivefold[serve]', which make setup does")

from fivefold.core.errors import FivefoldError, RankLost
from fivefold.core.model import presets as models
from fivefold.generate.text import ByteCodec, Codec
from fivefold.launch.worker import NoMeeting, Worker
from fivefold.serve import answers, api, door, http, rank, server
from fivefold.serve import calls as calls_module
from fivefold.serve import supervisor as keeper
from fivefold.serve.answers import ServedCall
from fivefold.serve.api import Api
from fivefold.serve.calls import DoorCalls
from fivefold.serve.dispatch import Dispatcher
from fivefold.serve.http import HttpLimits
from fivefold.serve.links import (
    AddCommand,
    DoorBeat,
    DoorHello,
    Drain,
    DropCommand,
    EngineRole,
    ReplicaHello,
    ServerState,
    StepNews,
    packed_message,
    read_messages,
)
from fivefold.serve.metrics import ServeMetrics
from fivefold.serve.prompting import PromptReader
from fivefold.serve.rank import RankBeat
from fivefold.serve.schema import ApiError, parse_asked

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class ListeningEngine:
    """Stands in for the socket of an engine: it remembers what it is told."""

    def __init__(self) -> None:
        self.commands: list[Any] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.commands.append(pickle.loads(data[4:]))

    def ids(self) -> list[str]:
        """The requests that it was given."""
        return [each.request.id for each in self.commands if isinstance(each, AddCommand)]


class CountingCodec(ByteCodec):
    """Counts what it encodes."""

    num_encoded = 0

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        CountingCodec.num_encoded += 1
        return super().encode(text, special=special)


class WideCodec(ByteCodec):
    """A token may have 64 bytes, and has one."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def longest_token(self) -> int:
        return 64

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        self.sizes.append(len(text))
        return super().encode(text, special=special)


def linked_calls(dispatcher: Dispatcher, codec: Codec, ends: frozenset[int]) -> DoorCalls:
    """Calls of a door in the process of the dispatcher."""
    calls = DoorCalls(dispatcher.shape, codec, ends, lambda value: dispatcher.take(door, value))
    door = dispatcher.open_door(DoorHello(0, 0), lambda value: calls.take([value]))
    return calls


class Desk:
    """A door, its dispatcher, and engines that listen."""

    def __init__(self, folder: Path, limits: HttpLimits, replicas: int = 1) -> None:
        shape = models.load("tiny")
        codec = CountingCodec()
        self.lines: list[str] = []
        self.dispatcher = Dispatcher(shape, ServeMetrics(), 8, 4, self.lines.append)
        prompts = PromptReader(codec, folder)
        self.calls = linked_calls(self.dispatcher, codec, frozenset({256}))
        self.door = Api("tiny", (), self.calls, prompts, limits)
        self.engines = [self.start(index) for index in range(replicas)]
        self.port = 0

    def start(self, index: int, role: EngineRole = "both") -> ListeningEngine:
        """An engine says hello."""
        engine = ListeningEngine()
        writer = cast("asyncio.StreamWriter", engine)
        hello = ReplicaHello(index, 100, 100, role)
        self.dispatcher._join(hello, writer)
        return engine

    def say(self, index: int, *rows: tuple[Any, ...]) -> None:
        """An engine tells what it has drawn."""
        news = StepNews([(*row, ()) for row in rows], [], 100, 0)
        self.hear(index, news)

    def hear(self, index: int, news: StepNews) -> None:
        """The result of a step of an engine comes."""
        self.dispatcher._take(self.dispatcher.replicas[index], news)
        self.dispatcher.send_rows()

    async def send(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        found = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return found

    async def ask(self, **body: Any) -> bytes:
        data = json.dumps({"model": "tiny", "prompt": "abc", **body}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        return await self.send(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)

    async def until(self, reached: Callable[[], Any]) -> None:
        for _ in range(500):
            if reached():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it never came so far")


Client = Callable[[Desk], Awaitable[Any]]


def run(folder: Path, client: Client, replicas: int = 1, **limits: Any) -> Any:
    async def both() -> Any:
        desk = Desk(folder, HttpLimits(**limits), replicas)
        server = await asyncio.start_server(desk.door.accept, "127.0.0.1", 0)
        desk.port = server.sockets[0].getsockname()[1]
        try:
            return await client(desk)
        finally:
            server.close()
            await desk.door.drain(0.0)
            await desk.until(lambda: not desk.door._connections)
            await asyncio.sleep(0.02)

    return asyncio.run(both())


def status(answer: bytes) -> int:
    return int(answer.split()[1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_row_that_is_not_finite_fails_its_request(tmp_path: Path, stream: bool) -> None:
    async def client(desk: Desk) -> tuple[bytes, bytes, bytes]:
        asked = [asyncio.ensure_future(desk.ask(stream=stream, max_tokens=3)) for _ in range(3)]
        (engine,) = desk.engines
        await desk.until(lambda: len(engine.ids()) == 3)
        first, later, good = engine.ids()
        desk.say(
            0, (first, 0, float("nan"), "error"), (later, 97, -1.0, None), (good, 97, -1.0, None)
        )
        await asyncio.sleep(0.05)
        desk.say(0, (later, 0, float("nan"), "error"), (good, 98, float("-inf"), "length"))
        found = await asyncio.gather(*asked)
        assert desk.dispatcher.num_running == 0
        by_text = sorted(found, key=lambda each: (b"not finite" not in each, b"text" in each))
        return by_text[0], by_text[1], by_text[2]

    first, later, good = run(tmp_path, client)
    assert status(first) == 500 and b"logits_not_finite" in first
    assert status(good) == 200 and b'"finish_reason": "length"' in good
    assert b"not finite" in later and b"NaN" not in first + later + good
    if stream:  # it had begun: the code was sent, and the end says why
        assert status(later) == 200 and b'"finish_reason": "error"' in later
        assert b"[DONE]" in good and b"[DONE]" not in later
    else:
        assert status(later) == 500


def test_a_request_begins_again_if_nobody_saw_any_of_it(tmp_path: Path) -> None:
    """The engine dies twice: the second time it may be this request that ends engines."""

    async def client(desk: Desk) -> list[bytes]:
        silent = asyncio.ensure_future(desk.ask(max_tokens=2, temperature=0))
        seen = asyncio.ensure_future(desk.ask(stream=True, max_tokens=2))
        unseen = asyncio.ensure_future(desk.ask(stream=True, max_tokens=2))
        metrics, (engine,) = desk.dispatcher.metrics, desk.engines
        await desk.until(lambda: len(engine.ids()) == 3)
        by_stream = {
            routed.id: routed.call.streams for routed in desk.dispatcher.replicas[0].open.values()
        }
        first = next(id for id in engine.ids() if not by_stream[id])
        second = next(id for id in engine.ids() if by_stream[id])
        desk.say(0, (first, 97, -1.0, None), (second, 97, -1.0, None))
        await asyncio.sleep(0.05)
        desk.dispatcher.lose(0)
        assert (metrics.retried, metrics.num_lost) == (2, 1)
        assert status(await desk.send(HEALTH)) == 503, "no engine is up"
        again = desk.start(0)
        await desk.until(lambda: len(again.ids()) == 2)
        assert not set(again.ids()) & set(engine.ids()), "rows of the first may still come"
        desk.say(0, *((id, 98, -1.0, None) for id in again.ids()))
        desk.say(0, (again.ids()[0], 99, -1.0, "length"))
        desk.dispatcher.lose(0)
        assert (metrics.retried, metrics.num_lost) == (2, 2)
        text = metrics.lines([])
        assert "fivefold_retried_total 2" in text and "fivefold_lost_total 2" in text
        return await asyncio.gather(silent, seen, unseen)

    answers = run(tmp_path, client)
    whole = [each for each in answers if b'bc"' in each or b'"c"' in each]
    assert len(whole) == 1, "of two that began again one was lost a second time"
    assert sum(b"engine_lost" in each for each in answers) == 2


def test_a_request_goes_to_the_engine_with_the_least_to_do(tmp_path: Path) -> None:
    async def client(desk: Desk) -> None:
        first, second = desk.engines
        prompts = [[1] * 64, [2] * 64, [2] * 64 + [3]]

        async def ask(prompt: Sequence[int], tokens: int) -> None:
            total = len(first.ids()) + len(second.ids())
            asked.append(asyncio.ensure_future(desk.ask(prompt=prompt, max_tokens=tokens)))
            await desk.until(lambda: len(first.ids()) + len(second.ids()) > total)

        asked: list[asyncio.Future[bytes]] = []
        await ask(prompts[0], 40)
        await ask(prompts[1], 30)
        assert (len(first.ids()), len(second.ids())) == (1, 1), "the second has less to do"
        await ask([9], 20)
        assert len(second.ids()) == 2, "104 tokens against 94"
        await ask(prompts[2], 1)
        assert len(second.ids()) == 3, "115 against 104, but it knows 64 of the prompt"
        desk.dispatcher.replicas[1].lose()
        await ask([7], 1)
        assert len(first.ids()) == 2, "the other is lost"
        desk.calls.fail_all(ApiError(503, "over"))
        await asyncio.gather(*asked)

    run(tmp_path, client, replicas=2)


@pytest.mark.parametrize("header", ["Host: [::1", "Origin: http://[", "Host: [x]", "Host: ["])
def test_headers_that_are_no_address_are_refused(tmp_path: Path, header: str) -> None:
    async def client(desk: Desk) -> bytes:
        host = b"" if header.startswith("Host") else b"Host: localhost\r\n"
        head = b"GET /v1/models HTTP/1.1\r\n" + host + header.encode()
        return await desk.send(head + b"\r\nConnection: close\r\n\r\n")

    answer = run(tmp_path, client)
    assert status(answer) == 400 and b"invalid_request_error" in answer


def test_idle_connections_keep_nobody_out(tmp_path: Path) -> None:
    async def client(desk: Desk) -> tuple[int, int]:
        idle = [await asyncio.open_connection("127.0.0.1", desk.port) for _ in range(30)]
        await desk.until(lambda: len(desk.door._connections) == 4)
        busy = [asyncio.ensure_future(desk.ask(max_tokens=1)) for _ in range(3)]
        (engine,) = desk.engines
        await desk.until(lambda: len(engine.ids()) == 3)
        found = status(await desk.send(HEALTH))
        desk.say(0, *((id, 97, -1.0, "length") for id in engine.ids()))
        answers = await asyncio.gather(*busy)
        for _, writer in idle:
            writer.close()
        return found, sum(status(each) == 200 for each in answers)

    assert run(tmp_path, client, connections=6, per_client=4) == (200, 3)
    assert run(tmp_path, client, connections=4, per_client=6) == (200, 3), "or all together"


@pytest.mark.parametrize(
    ("soft", "hard", "limits", "raised"),
    [
        (1024, 1 << 20, (2048, 1024), 2048 + 128),
        (1024, resource.RLIM_INFINITY, (2048, 1024), 2048 + 128),
        (1024, 1024, (896, 448), 1024),
        (256, 512, (384, 192), 512),
        (64, 64, (8, 4), 64),
        (1 << 20, 1 << 20, (2048, 1024), None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, (2048, 1024), None),
    ],
)
def test_connections_are_as_many_as_files_may_be_open(
    monkeypatch: pytest.MonkeyPatch,
    soft: int,
    hard: int,
    limits: tuple[int, int],
    raised: int | None,
) -> None:
    given: list[int] = []
    monkeypatch.setattr(http.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(http.resource, "setrlimit", lambda _, pair: given.append(pair[0]))
    found = HttpLimits().within_open_files()
    assert (found.connections, found.per_client) == limits
    assert given == ([] if raised is None else [raised])


def test_more_doors_than_files_may_be_open_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http.resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(http.resource, "setrlimit", lambda *_: None)
    server.require_files(448)
    with pytest.raises(FivefoldError, match=r"doors = 449: .* have 1,024 .* give at most 448"):
        server.require_files(449)


def test_a_port_is_held_before_anybody_listens() -> None:
    """Two servers that load may bind one port."""
    first = server.bound_socket("127.0.0.1", 0, False, shared=True)
    port = first.getsockname()[1]
    with first, server.hold_port(first):
        second = server.bound_socket("127.0.0.1", port, False, shared=True)
        with second, pytest.raises(FivefoldError, match=f"--port {port}: another server has it"):
            server.hold_port(second)
    with server.bound_socket("127.0.0.1", port, False) as third, server.hold_port(third):
        pass


def test_an_answer_that_cannot_be_written_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news, bad = answers.AnswerWriter.news, list[str]()

    def failing(writer: answers.AnswerWriter, call: ServedCall, indices: set[int]) -> bytes:
        if call.choices[0].id in bad:
            raise ValueError("no text")
        return news(writer, call, indices)

    async def client(desk: Desk) -> list[bytes]:
        asked = [asyncio.ensure_future(desk.ask(stream=True, max_tokens=3)) for _ in range(2)]
        (engine,) = desk.engines
        await desk.until(lambda: len(engine.ids()) == 2)
        desk.say(0, *((id, 97, -1.0, None) for id in engine.ids()))
        await desk.until(lambda: all(call.send_news for call in desk.calls._calls.values()))
        bad.append(engine.ids()[0])
        desk.say(0, *((id, 98, -1.0, None) for id in engine.ids()))
        await desk.until(lambda: len(desk.calls._calls) == 1)
        desk.say(0, (engine.ids()[1], 99, -1.0, "length"))
        return sorted(await asyncio.gather(*asked), key=lambda answer: b"[DONE]" in answer)

    monkeypatch.setattr(answers.AnswerWriter, "news", failing)
    failed, good = run(tmp_path, client)
    assert b"[DONE]" not in failed and b'"text": "c"' in good


def test_a_door_that_comes_while_the_server_drains_drains() -> None:
    dispatcher, sent = Dispatcher(models.load("tiny"), ServeMetrics(), 8, 4, print), list[Any]()
    dispatcher.open_door(DoorHello(0, 0), sent.append)
    dispatcher.drain(5.0)
    assert [type(value) for value in sent] == [ServerState, Drain]
    dispatcher.open_door(DoorHello(0, 1), sent.append)
    assert isinstance(sent[-1], Drain) and 4.0 < sent[-1].seconds <= 5.0


@pytest.mark.parametrize("drains", [False, True])
def test_a_door_that_loses_its_link_fails(
    tmp_path: Path, drains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is started again; it has said that it lives."""
    codec, said = ByteCodec(), list[Any]()
    monkeypatch.setattr(door, "BEAT_S", 0.01)
    monkeypatch.setattr(door, "die_with", lambda parent: None)
    prompts = PromptReader(codec, tmp_path)

    async def dispatch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(packed_message(ServerState(True, 10, accepts=True)))
        async for values in read_messages(reader):
            said.extend(values)
            if len(said) > 3:
                break
        if drains:
            writer.write(packed_message(Drain(1.0)))
            await reader.read()
        writer.close()

    async def run_door() -> bool:
        with server.bound_socket("127.0.0.1", 0, False) as listener:
            task = door.DoorTask(
                *(tmp_path / "socket", (listener,), "tiny", (), HttpLimits()),
                *(models.load("tiny"), codec, frozenset[int](), prompts, ()),
            )
            async with await asyncio.start_unix_server(dispatch, task.address):
                return await door._run(task, 0)

    assert asyncio.run(run_door()) == drains
    assert [type(value) for value in said[:3]] == [DoorHello, DoorBeat, DoorBeat]

    async def ended(task: Any, number: int) -> bool:
        return drains

    monkeypatch.setattr(door, "_run", ended)
    with contextlib.nullcontext() if drains else pytest.raises(SystemExit, match="1"):
        door._serve(cast("Any", None), 0, cast("Any", SimpleNamespace(close=lambda: None)), 0)


def test_a_server_that_drains_still_answers(tmp_path: Path) -> None:
    async def client(desk: Desk) -> list[bytes]:
        open_call = asyncio.ensure_future(desk.ask(max_tokens=1))
        (engine,) = desk.engines
        await desk.until(lambda: engine.ids())
        draining = asyncio.ensure_future(desk.door.drain(10.0))
        await desk.until(lambda: desk.door.draining)
        slow_reader, slow = await asyncio.open_connection("127.0.0.1", desk.port)
        slow.write(HEALTH[:20])
        await asyncio.sleep(0.1)  # a request may come in two parts
        slow.write(HEALTH[20:])
        found = [await slow_reader.read(), await desk.send(HEALTH), await desk.ask()]
        desk.say(0, (engine.ids()[0], 97, -1.0, "length"))
        found.append(await open_call)
        _, idle = await asyncio.open_connection("127.0.0.1", desk.port)
        await asyncio.wait_for(draining, 5)  # for nobody who came later
        idle.close()
        slow.close()
        return found

    answers = run(tmp_path, client)
    assert list(map(status, answers)) == [503, 503, 503, 200]
    assert all(b"draining" in each for each in answers[:3])


def test_large_prompts_are_refused_before_they_are_tokens(tmp_path: Path) -> None:
    async def client(desk: Desk) -> list[bytes]:
        longest = desk.calls.state.longest
        large = [{"prompt": "x" * (longest + 1)}, {"prompt": ["a", "é" * longest]}]
        return [await desk.ask(**each) for each in (*large, {"prompt": [1] * (longest + 1)})]

    CountingCodec.num_encoded = 0
    for answer in run(tmp_path, client):
        assert status(answer) == 400 and b"context_length_exceeded" in answer
    assert CountingCodec.num_encoded == 0


def test_a_text_with_too_many_tokens_is_not_encoded_in_full(tmp_path: Path) -> None:
    """Its bytes may fit: only slices say that its tokens do not."""
    longest, size = 1 << 15, 1 << 16  # of a prompt, and of a slice

    def encoded(num_chars: int) -> tuple[int, list[int]]:
        """Tokens of a text, none if it is refused, and the sizes that were encoded."""
        codec = WideCodec()
        request = parse_asked(json.dumps({"prompt": "x" * num_chars}).encode(), chat=False)
        try:
            (tokens,) = asyncio.run(PromptReader(codec, tmp_path).tokens(request, longest))
        except ApiError as error:
            assert error.code == "context_length_exceeded"
            return 0, codec.sizes
        return len(tokens), codec.sizes

    assert encoded(size) == (size, [size])
    assert encoded(size + 1) == (0, [size, 1])
    assert encoded(4 * size) == (0, [size, size])


def test_usage_counts_all_prompts_and_all_choices(tmp_path: Path) -> None:
    async def client(desk: Desk) -> dict[str, int]:
        call = asyncio.ensure_future(desk.ask(prompt=["ab", "cdef"], n=2, max_tokens=3))
        (engine,) = desk.engines
        await desk.until(lambda: len(engine.ids()) == 4)
        desk.say(0, *((id, 97, -1.0, None) for id in engine.ids()[:3]))
        desk.say(0, *((id, 98, -1.0, "length") for id in engine.ids()))
        answer = json.loads((await call).partition(b"\r\n\r\n")[2])
        assert "fivefold_prompt_tokens_total 6\n" in desk.dispatcher.metrics.lines([])
        assert any("prompt=6 " in line and "output=7 " in line for line in desk.lines)
        return answer["usage"]

    usage = run(tmp_path, client)
    assert usage == {"prompt_tokens": 6, "completion_tokens": 7, "total_tokens": 13}


def test_a_stop_text_that_is_no_token_ends_a_choice(tmp_path: Path) -> None:
    async def client(desk: Desk) -> bytes:
        call = asyncio.ensure_future(desk.ask(stop=["zz", "b"], max_tokens=9))
        (engine,) = desk.engines
        await desk.until(engine.ids)
        (id,) = engine.ids()
        desk.say(0, (id, 97, -1.0, None))
        desk.say(0, (id, 98, -1.0, None))
        assert engine.commands[-1] == DropCommand(id), "the engine does not know it"
        return await call

    answer = run(tmp_path, client)
    assert status(answer) == 200 and b'"text": "a"' in answer and b'"stop"' in answer


def test_times_of_a_call_are_in_the_log_and_in_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    fake = SimpleNamespace(monotonic=lambda: clock[0], time=lambda: 0.0)
    for module in (answers, api, calls_module):
        monkeypatch.setattr(module, "time", fake)

    async def client(desk: Desk) -> None:
        call = asyncio.ensure_future(desk.ask(max_tokens=3))
        (engine,) = desk.engines
        await desk.until(engine.ids)
        (id,) = engine.ids()
        for seconds, reason in ((102.0, None), (105.0, None), (108.0, "length")):
            clock[0] = seconds
            desk.say(0, (id, 97, -1.0, reason))
        await call
        assert "ttft=2.0000 tpot=3.0000" in desk.lines[-1] and "total=8.0000" in desk.lines[-1]
        text = desk.dispatcher.metrics.lines([])
        for name, seconds in (("ttft", 2.0), ("tpot", 3.0), ("request", 8.0)):
            assert f"fivefold_{name}_seconds_sum {seconds}\n" in text

    run(tmp_path, client)


def test_a_line_of_the_log_is_short_whatever_a_client_sends(tmp_path: Path) -> None:
    async def client(desk: Desk) -> str:
        head = b"X" * 300 + b" /" + b"y" * 300 + b" HTTP/1.1\r\nHost: localhost\r\n"
        assert status(await desk.send(head + b"Connection: close\r\n\r\n")) == 404
        return desk.lines[-1]

    assert f" {'X' * 10} /{'y' * 99} 404 " in run(tmp_path, client)


def test_a_full_queue_says_when_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean time of a call, times those that wait, by those that run."""
    monkeypatch.setattr(calls_module, "time", SimpleNamespace(monotonic=lambda: 112.0))
    shape, codec = models.load("tiny"), ByteCodec()
    dispatcher = Dispatcher(shape, ServeMetrics(), max_queue=2, max_running=2, log=pytest.fail)
    calls = linked_calls(dispatcher, codec, frozenset())
    engines = [ListeningEngine(), ListeningEngine()]
    for index, engine in enumerate(engines):
        writer = cast("asyncio.StreamWriter", engine)
        dispatcher._join(ReplicaHello(index, 100, 100), writer)
    body = parse_asked(b'{"model": "tiny", "prompt": "a"}', chat=False)

    def begin(name: str) -> ServedCall:
        call = calls.call(name, "me", body, [(97,)], 100.0)
        calls.begin(call)
        return call

    def running() -> set[str]:
        return {id.partition("/")[0] for engine in engines for id in engine.ids()}

    ended = begin("ended")
    news = StepNews([(ended.choices[0].id, 97, -1.0, "length", ())], [], 100, 0)
    dispatcher._take(dispatcher.replicas[0], news)
    dispatcher.send_rows()
    calls.end(ended)  # after 12 s
    first, *_, gone, last = [begin(name) for name in ("a", "b", "c", "d", "gone", "last")]
    assert running() == {"ended", "a", "b", "c", "d"} and dispatcher.num_running == 4
    refused = begin("refused").error
    assert refused is not None and "2 requests wait" in refused.message
    assert refused.status == 429 and refused.headers == [("retry-after", "6")]
    calls.end(gone)
    assert dispatcher.queue.size == 1
    calls.end(first)
    assert running() == {"ended", "a", "b", "c", "d", "last"} and not last.ended


def test_a_busy_connection_is_never_closed_for_another(tmp_path: Path) -> None:
    """Nor an idle one of a client that has fewer."""

    async def client(desk: Desk) -> tuple[bytes, bytes, bytes, bytes]:
        busy = asyncio.ensure_future(desk.ask(max_tokens=1))
        (engine,) = desk.engines
        await desk.until(engine.ids)
        distant = ("127.0.0.2", 0)
        far = await asyncio.open_connection("127.0.0.1", desk.port, local_addr=distant)
        near = [await asyncio.open_connection("127.0.0.1", desk.port) for _ in range(2)]
        connections = desk.door._connections
        await desk.until(lambda: sum(peer.idle_since is not None for peer in connections) == 3)
        health = await desk.send(HEALTH)
        closed = await asyncio.wait_for(near[0][0].read(), 10)
        far[1].write(HEALTH)
        other_health = await asyncio.wait_for(far[0].read(), 10)
        desk.say(0, (engine.ids()[0], 97, -1.0, "length"))
        for _, writer in (far, *near):
            writer.close()
        return health, closed, other_health, await busy

    health, closed, other_health, completion = run(tmp_path, client, connections=4)
    assert closed == b"", "the oldest idle one of whoever has the most"
    assert [status(answer) for answer in (health, other_health, completion)] == [200] * 3


def test_a_silent_rank_is_lost_after_a_few_of_its_steps() -> None:
    start = keeper._OneStart(cast("Any", None))
    pool = cast("Any", SimpleNamespace(size=2, patience=600.0))
    pool.allow_silence = lambda seconds, computing: setattr(pool, "patience", seconds)
    start._pool = pool
    start._on_report(RankBeat(0, 10.0))
    assert pool.patience == 600.0, "rank 1 still reads weights"
    start._on_report(RankBeat(1, 40.0))
    assert pool.patience == 40.0, "its steps are slow"
    start._on_report(RankBeat(1, 600.0))
    assert pool.patience == 600.0, "it compiles"
    start._on_report(RankBeat(1, 10.0))
    assert pool.patience == 10.0
    for _ in range(100):  # now one, now the other
        start._on_report(RankBeat(0, 10.0))
        for _ in range(20):
            start._on_report(RankBeat(1, 10.0))
    with pytest.raises(RankLost, match="rank 0, at serve: was silent while the other"):
        start._on_report(RankBeat(1, 10.0))


def test_slow_steps_and_the_compiler_may_be_silent_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, beats = [100.0], list[RankBeat]()
    monkeypatch.setattr(rank.time, "monotonic", lambda: clock[0])
    worker = Worker(3, NoMeeting(), lambda kind, value: beats.append(cast("RankBeat", value)))
    beat = rank._Beat(worker, "cpu")
    del beats[0]  # the phase
    for seconds in (0.2, 0.9, 4.0, 0.1):
        clock[0] += seconds
        beat.tick(seconds)
    assert [each.rank for each in beats] == [3, 3, 3], "at most one a second"
    assert [each.patience for each in beats] == [10.0, 10.0, 20.0]
    beat.silent()
    beat.tick(0.1)
    assert beats[-2].patience == 600.0 and 19.0 < beats[-1].patience < 20.0
