"""A server with several doors: right texts, sums of metrics, and what a killed door takes along."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fivefold.serve import server as server_module
from tests.ranks.serving import (
    Reply,
    RunningServer,
    alone,
    ask,
    bodies,
    lives,
    make_model,
    serving,
    under_load,
)

pytest.importorskip("h11", reason="pip install 'fivefold[serve]', which make setup does")

LONG: dict[str, Any] = {"prompt": [4, 5], "max_tokens": 200, "seed": 3, "ignore_eos": True}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    make_model(tmp_path)
    monkeypatch.setattr(server_module, "_MISSED_BEATS", 3)
    words = ("--set", "doors=2", "--replicas", "2", "--max-running", "8")
    with serving(tmp_path, tmp_path / "log.txt", *words) as running:
        yield running


def until(reached: Callable[[], Any]) -> None:
    for _ in range(400):
        if reached():
            return
        time.sleep(0.05)
    raise AssertionError("it never came so far")


def num_sockets(pid: int) -> int:
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return sum(link.startswith("socket:") for link in links)


def test_two_doors_share_clients_and_numbers(server: RunningServer) -> None:
    first, second = server.doors()

    async def connected() -> list[int]:
        before = [num_sockets(pid) for pid in (first, second)]
        writers = [(await asyncio.open_connection("127.0.0.1", server.port))[1] for _ in range(200)]
        await asyncio.sleep(1.0)
        after = [num_sockets(pid) for pid in (first, second)]
        for writer in writers:
            writer.close()
        return [end - start for start, end in zip(before, after, strict=True)]

    shares = asyncio.run(connected())
    assert sum(shares) == 200 and min(shares) > 50, "both accept connections"
    asked = bodies(12)
    expected = asyncio.run(alone(server.port, asked))
    replies = asyncio.run(under_load(server.port, asked, 120, cut=0.3))
    whole = [(which, reply) for which, reply in replies if reply is not None]
    assert all(reply.texts == expected[which] for which, reply in whole)
    assert 40 < len(whole) < 120 and server.settles(), "whoever left has left no block behind"
    answered = len(asked) + len(replies)
    until(lambda: sum("/v1/completions" in line for line in server.lines()) == answered)
    pattern = 'fivefold_requests_total{path="/v1/completions",'
    counted = [line for line in server.metrics().splitlines() if line.startswith(pattern)]
    assert sum(int(line.rpartition(" ")[2]) for line in counted) == answered
    left = [line for line in counted if 'status="499"' in line]
    assert server.number("fivefold_broken_off_total") == int(left[0].rpartition(" ")[2]) > 0
    assert server.number("fivefold_request_seconds_count") >= len(asked) + len(whole)

    async def ended_in_the_middle() -> list[Reply | None]:
        streams = [
            asyncio.ensure_future(ask(server.port, LONG | {"stream": True})) for _ in range(12)
        ]
        await asyncio.to_thread(until, lambda: server.number("fivefold_running") == 12)
        os.kill(server.process.pid or 0, signal.SIGTERM)
        return await asyncio.gather(*streams)

    drained = asyncio.run(ended_in_the_middle())
    texts = {reply.texts[0] for reply in drained if reply is not None}
    assert len(drained) == 12 and len(texts) == 1 and len(next(iter(texts)).split()) == 200
    server.process.join(20)
    assert server.process.exitcode == 0 and "Error" not in server.output.read_text()


def test_a_killed_door_takes_nobody_else_along(server: RunningServer) -> None:
    (whole,) = asyncio.run(alone(server.port, [LONG]))
    victim, other = server.doors()

    async def killed_in_the_middle() -> list[Any]:
        body = LONG | {"stream": True}
        streams = [asyncio.ensure_future(ask(server.port, body)) for _ in range(16)]
        await asyncio.to_thread(until, lambda: server.number("fivefold_running") == 16)
        os.kill(victim, signal.SIGKILL)
        return await asyncio.gather(*streams, return_exceptions=True)

    replies = asyncio.run(killed_in_the_middle())
    texts = [reply.texts for reply in replies if isinstance(reply, Reply)]
    assert 0 < len(texts) < 16 and set(texts) == {whole}, "of the other door"
    assert server.settles() and server.number("fivefold_running") == 0
    assert server.number("fivefold_output_tokens_total") < 15 * 200, "of the killed one are dropped"
    until(lambda: len(server.doors()) == 2)
    assert victim not in server.doors() and other in server.doors()
    assert "door 0 ended with exit code -9; new start" in server.output.read_text()
    assert asyncio.run(alone(server.port, [LONG] * 3)) == [whole] * 3
    os.kill(other, signal.SIGSTOP)
    until(lambda: "door 1 was silent for 3 s" in server.output.read_text())
    until(lambda: len(server.doors()) == 2 and other not in server.doors())
    assert asyncio.run(alone(server.port, [LONG] * 3)) == [whole] * 3
    processes = [*server.children(), *server.ranks(), *server.doors(), *server.chats()]
    os.kill(server.children()[-1], signal.SIGKILL)  # the keeper of doors
    server.process.join(30)
    assert server.process.exitcode == 1, "without doors it ends"
    until(lambda: not any(map(lives, processes)))


@pytest.mark.parametrize("doors", [1, 2])
def test_a_second_server_of_a_port_is_refused_while_the_first_loads(
    tmp_path: Path, doors: int
) -> None:
    """Neither listens yet, and both may bind it."""
    make_model(tmp_path)
    bound = server_module.bound_socket("127.0.0.1", 0, False, shared=doors > 1)
    port = bound.getsockname()[1]
    words = ("--port", f"{port}", "--set", f"doors={doors}")
    refused = pytest.raises(AssertionError, match=f"--port {port}: another server has it")
    second = serving(tmp_path, tmp_path / "log.txt", *words)
    with bound, server_module.hold_port(bound), refused, second:
        pass
