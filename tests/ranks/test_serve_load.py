"""A server under load: clients that break off, queues, signals, ranks that die, other layouts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest

from tests.ranks.serving import (
    Reply,
    RunningServer,
    alone,
    ask,
    bodies,
    killed_mid_request,
    lives,
    make_model,
    serving,
    under_load,
)
from tests.selection import all_cases

KEYS = ("key-of-the-greedy", "key-of-the-modest")
SMALL = ("--dtype", "float64", "--cache-gb", "0.0003")  # 36 blocks: sequences lose theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with serving(folder, folder / "log.txt", *SMALL) as running:
        yield running
        assert running.stop() == 0


def test_clients_that_break_off_change_nothing(server: RunningServer) -> None:
    asked = bodies(24 if all_cases() else 10)
    expected = asyncio.run(alone(server.port, asked))
    count = 2000 if all_cases() else 80
    replies = asyncio.run(under_load(server.port, asked, count, cut=0.3))
    whole = [(which, reply) for which, reply in replies if reply is not None]
    assert len(whole) < count, "some have broken off"
    for which, reply in whole:
        assert reply.status == 200 and reply.texts == expected[which]
    assert server.settles(), "a block is leaked"
    if all_cases():
        assert server.number("fivefold_preempted") > 0, "the cache is too small for all"
    assert server.number("fivefold_broken_off_total") > 0
    assert len(server.lines()) >= len(whole) + len(asked)
    print(f"{count} requests, {count - len(whole)} broken off, all others equal")


@pytest.mark.parametrize("words", [("--layout", "pp=2"), ("--prefill", "dp=1")])
def test_drafts_change_no_answer(
    server: RunningServer, folder: Path, words: tuple[str, ...]
) -> None:
    asked = bodies(24 if all_cases() else 10)
    expected = asyncio.run(alone(server.port, asked))
    drafting = (*SMALL, *words, "--set", "drafts=ngram:4")
    with serving(folder, folder / f"{words[1]}.txt", *drafting) as drafted:
        replies = asyncio.run(under_load(drafted.port, asked, 40, cut=0.3))
        for which, reply in replies:
            assert reply is None or (reply.status, reply.texts) == (200, expected[which])
        assert drafted.settles(), "a block is leaked"
        proposed, accepted = map(drafted.number, ("fivefold_drafted", "fivefold_accepted"))
        assert 0 < accepted <= proposed
        assert drafted.stop() == 0
    assert server.number("fivefold_drafted") == 0


def test_tiny_temperatures_are_answered_beside_others(server: RunningServer) -> None:
    async def crowd() -> list[Reply | None]:
        body = {"prompt": [5, 6, 7], "max_tokens": 12, "seed": 1}
        tiny = [ask(server.port, body | {"temperature": 5e-324, "stream": i > 2}) for i in range(5)]
        greedy, drawn = (ask(server.port, body | {"temperature": each}) for each in (0, 1))
        return await asyncio.gather(*tiny, greedy, drawn)

    replies = asyncio.run(crowd())
    assert all(each is not None and each.status == 200 for each in replies)
    assert len({each.texts for each in replies[:6] if each is not None}) == 1, "all are greedy"
    assert server.number("fivefold_restarts_total") == 0


def test_a_request_that_breaks_off_is_ended(server: RunningServer) -> None:
    async def leave() -> list[Reply | None]:
        body = {"prompt": [7, 8], "max_tokens": 240, "temperature": 0}
        return await asyncio.gather(*(ask(server.port, body, cut_after=0.1) for _ in range(3)))

    before = server.number("fivefold_output_tokens_total")
    assert asyncio.run(leave()) == [None] * 3
    assert server.settles()
    assert server.number("fivefold_output_tokens_total") - before < 3 * 200


@pytest.mark.sample(0.25)
def test_128_at_a_time_are_all_answered(folder: Path, tmp_path: Path) -> None:
    async def all_at_once(port: int) -> list[Reply | None]:
        many = [{**each, "stream": True} for each in bodies(128)]
        return await asyncio.gather(*(ask(port, each) for each in many))

    with serving(folder, tmp_path / "log.txt") as running:
        replies = asyncio.run(all_at_once(running.port))
        assert running.settles()
    times = [each.ttft for each in replies if each is not None and each.status == 200]
    assert len(times) == 128
    cuts = quantiles(times, n=100)
    print(f"128 at a time: TTFT p50 {cuts[49]:.3f} s, p99 {cuts[98]:.3f} s")


@pytest.mark.sample(0.25)
def test_a_full_queue_answers_429_and_turns_are_fair(folder: Path, tmp_path: Path) -> None:
    words = ("--max-queue", "20", "--max-running", "1", "--api-key", KEYS[0], "--api-key", KEYS[1])

    async def crowd(port: int) -> tuple[list[Reply], list[Reply], list[int]]:
        order: list[int] = []

        async def one(who: int) -> Reply:
            reply = await ask(port, {"prompt": [3, 4], "max_tokens": 24}, key=KEYS[who])
            assert reply is not None
            order.extend([who] * (reply.status == 200))
            return reply

        greedy = [asyncio.ensure_future(one(0)) for _ in range(40)]
        await asyncio.sleep(0.15)
        modest = [asyncio.ensure_future(one(1)) for _ in range(3)]
        return await asyncio.gather(*greedy), await asyncio.gather(*modest), order

    with serving(folder, tmp_path / "log.txt", *words) as running:
        greedy, modest, order = asyncio.run(crowd(running.port))
        assert {each.status for each in modest} == {200}, "others make room for it"
        full = [each for each in greedy if each.status == 429]
        assert full and len(full) < len(greedy)
        for each in full:
            assert "retry-after: " in each.headers and '"code": "queue_full"' in each.texts[0]
        last = max(place for place, who in enumerate(order) if who == 1)
        assert sum(who == 0 for who in order[last:]) >= 10, "it does not wait for the greedy"


def test_sigterm_drains(folder: Path, tmp_path: Path) -> None:
    async def in_the_middle(running: RunningServer) -> list[Reply | None]:
        body = {"prompt": [5, 6], "max_tokens": 120, "stream": True, "temperature": 0}
        open_ones = [asyncio.ensure_future(ask(running.port, body)) for _ in range(6)]
        waiting = ask(running.port, {"prompt": [1], "max_tokens": 4})
        queued = asyncio.ensure_future(waiting)
        # A request without its body keeps the port open, however soon the others end.
        reader, slow = await asyncio.open_connection("127.0.0.1", running.port)
        slow.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n")
        for _ in range(100):  # until all have come: a busy machine takes its time
            if await asyncio.to_thread(running.number, "fivefold_prompt_tokens_total") == 13:
                break
        os.kill(running.process.pid or 0, signal.SIGTERM)
        for _ in range(100):
            late = await ask(running.port, {"prompt": [1], "max_tokens": 1})
            assert late is not None
            if late.status == 503:  # nobody new comes in, and hears why
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("it still takes requests")
        slow.write(b"{}")
        assert b" 503 " in await reader.readline()
        slow.close()
        return await asyncio.gather(*open_ones, queued)

    with serving(folder, tmp_path / "log.txt", "--max-running", "3") as running:
        replies = asyncio.run(in_the_middle(running))
        assert all(each is not None and each.status == 200 for each in replies)
        texts = {each.texts for each in replies[:-1] if each is not None}
        assert len(texts) == 1 and len(next(iter(texts))[0].split()) > 10
        running.process.join(20)
        assert running.process.exitcode == 0


@pytest.mark.sample(0.25)
def test_nothing_outlives_a_killed_server(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "log.txt", "--layout", "tp=2", "--set", "doors=2") as running:
        found = running.children() + running.ranks() + running.doors() + running.chats()
        assert len(found) == 8 and all(map(lives, found)), "2 keepers, ranks, doors, chats"
        running.stop(signal.SIGKILL)
        for _ in range(100):
            if not any(map(lives, found)):
                return
            time.sleep(0.05)
    raise AssertionError(f"{found} live on")


@pytest.mark.sample(0.25)
def test_a_lost_replica_is_survived(folder: Path, tmp_path: Path) -> None:
    asked = bodies(8)
    words = (*SMALL, "--replicas", "2", "--restarts", "0")
    with serving(folder, tmp_path / "log.txt", *words) as running:
        expected = asyncio.run(alone(running.port, asked))
        both = asyncio.run(under_load(running.port, asked, 40, cut=0.0))
        assert all(reply and reply.texts == expected[which] for which, reply in both)
        first = running.ranks()[0]
        os.kill(first, signal.SIGKILL)
        for _ in range(200):
            if running.number("fivefold_up") == 1:
                break
            time.sleep(0.02)
        after = asyncio.run(under_load(running.port, asked, 10, cut=0.0))
        assert all(reply and reply.texts == expected[which] for which, reply in after)
        assert "replica 0 ended: lost rank 0" in running.output.read_text()
        for pid in running.ranks():
            os.kill(pid, signal.SIGKILL)
        running.process.join(20)
        assert running.process.exitcode == 1, "without an engine it ends"


@pytest.mark.parametrize(
    ("victim", "restarts"), [(0, 0), pytest.param(1, 1, marks=pytest.mark.nightly)]
)
@pytest.mark.sample(0.5)
def test_a_killed_tensor_rank_leaves_no_request_open(
    folder: Path, tmp_path: Path, victim: int, restarts: int
) -> None:
    """All requests end: streams with an error; others as well, or with an answer of the next
    start. So do those that wait."""

    words = ("--layout", "tp=2", "--max-running", "4", "--restarts", str(restarts))
    with serving(folder, tmp_path / "log.txt", *words) as running:
        replies = asyncio.run(killed_mid_request(running, victim))
        ends = (b"engine_lost", b"[DONE]" if restarts else b"no engine is left")
        assert all(any(end in data for end in ends) for _, data in replies[::2]), replies
        assert any(b"engine_lost" in data for _, data in replies[::2]), "some had text already"
        assert {status for status, _ in replies[1::2]} == {200 if restarts else 503}
        if not restarts:
            running.process.join(30)
            assert running.process.exitcode == 1, "without an engine it ends"
        assert (
            f"lost rank {victim} at serve: it was killed by SIGKILL" in running.output.read_text()
        )


@pytest.mark.nightly
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_noticed(folder: Path, tmp_path: Path, stopped: int) -> None:
    """Its engine is taken out, and all requests are answered by the other one."""
    asked = bodies(8)
    words = (*SMALL, "--replicas", "2", "--layout", "tp=2")
    with serving(folder, tmp_path / "log.txt", *words) as running:
        expected = asyncio.run(alone(running.port, asked))
        os.kill(running.ranks()[stopped], signal.SIGSTOP)
        after = asyncio.run(under_load(running.port, asked, 30, cut=0.0))
        whole = [(which, reply) for which, reply in after if reply and reply.status == 200]
        assert all(reply.texts == expected[which] for which, reply in whole)
        assert len(whole) + running.number("fivefold_lost_total") >= len(after)
        assert f"lost rank {stopped} at serve: it was silent" in running.output.read_text()
        assert running.number("fivefold_retried_total") > 0 and running.stop() == 0


def numbers(running: RunningServer) -> dict[str, Any]:
    """Tokens and log-probabilities of one completion, with the likeliest others."""
    body = {"model": "tiny", "prompt": [4, 5, 6], "max_tokens": 8, "seed": 1, "logprobs": 3}
    request = urllib.request.Request(f"{running.url}/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["choices"][0]["logprobs"]


@pytest.mark.parametrize("layout", ["tp=2", "dp=2", "pp=2", "cp=2"])
@pytest.mark.sample(0.5)
def test_a_layout_answers_the_same(
    server: RunningServer, folder: Path, tmp_path: Path, layout: str
) -> None:
    asked = bodies(10)
    expected = asyncio.run(alone(server.port, asked))
    with serving(folder, tmp_path / "log.txt", *SMALL, "--layout", layout) as running:
        ours, theirs = numbers(running), numbers(server)
        assert ours["tokens"] == theirs["tokens"]
        for mine, other in zip(ours["top_logprobs"], theirs["top_logprobs"], strict=True):
            assert mine == pytest.approx(other, abs=1e-9) and len(mine) == 3
        replies = asyncio.run(under_load(running.port, asked, 40, cut=0.2))
        whole = [(which, reply) for which, reply in replies if reply is not None]
        assert whole and all(reply.texts == expected[which] for which, reply in whole)
        assert running.settles() and running.stop() == 0
