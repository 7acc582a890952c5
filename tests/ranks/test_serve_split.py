"""Prompts on some ranks, answers on others: caches travel between layouts, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import in_fork
from tests.ranks.serving import (
    RunningServer,
    alone,
    ask,
    bodies,
    make_model,
    serving,
    under_load,
)
from tests.selection import all_cases

SMALL = ("--dtype", "float64", "--cache-gb", "0.0003")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """One engine."""
    with serving(folder, folder / "log.txt", "--dtype", "float64") as running:
        yield running


PAIRS = [
    ("dp=1", "dp=1"),
    ("dp=1", "tp=2"),
    ("tp=2", "dp=1"),
    ("pp=2", "tp=2"),
    ("dp=1", "pp=2"),
    ("tp=4", "dp=2"),
    ("cp=2", "tp=2"),
    ("dp=2", "cp=2"),
]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=lambda each: each.replace("=", ""))
@pytest.mark.sample(1)
def test_answers_are_those_of_one_engine(
    server: RunningServer, folder: Path, tmp_path: Path, prefill: str, decode: str
) -> None:
    asked = bodies(10)
    expected = asyncio.run(alone(server.port, asked))
    count = 160 if all_cases() else 40
    words = (*SMALL, "--prefill", prefill, "--layout", decode)
    with serving(folder, tmp_path / "log.txt", *words) as running:
        assert asyncio.run(alone(running.port, asked)) == expected
        longer = sum(body["n"] for body in asked if body["max_tokens"] > 1)
        assert 0 < running.number("fivefold_moved_total") <= longer, "or a stop token was first"
        assert running.number("fivefold_moved_bytes_total") > 0
        replies = asyncio.run(under_load(running.port, asked, count, cut=0.3))
        whole = [(which, reply) for which, reply in replies if reply is not None]
        assert whole and all(reply.texts == expected[which] for which, reply in whole)
        assert len(whole) < count and running.settles(), "a block is leaked"
        roles = {'{replica="0",role="decode"}', '{replica="1",role="prefill"}'}
        assert set(re.findall(r"fivefold_up(\S+) 1", running.metrics())) == roles
        assert running.stop() == 0


@pytest.mark.sample(1)
def test_keys_in_fp8_travel_with_their_scales(folder: Path, tmp_path: Path) -> None:
    asked, coded = bodies(10), (*SMALL, "--set", "kv=fp8")
    with serving(folder, tmp_path / "one.txt", *coded) as running:
        expected = asyncio.run(alone(running.port, asked))
        replies = asyncio.run(under_load(running.port, asked, 40, cut=0.3))
        assert all(reply is None or reply.texts == expected[which] for which, reply in replies)
    with serving(folder, tmp_path / "log.txt", *coded, "--prefill", "tp=2") as running:
        assert asyncio.run(alone(running.port, asked)) == expected
        assert running.number("fivefold_moved_bytes_total") > 0 and running.settles()


def wait_for(running: RunningServer, name: str, value: float) -> None:
    for _ in range(400):
        if running.number(name) == value:
            return
        time.sleep(0.02)
    raise AssertionError(f"{name} is {running.number(name)}, not {value}")


@pytest.mark.parametrize("victim", ["decode", "prefill"])
@pytest.mark.sample(0.25)
def test_an_engine_that_died_is_started_again(
    server: RunningServer, folder: Path, tmp_path: Path, victim: str
) -> None:
    """Its open requests begin again, and then there is no third time."""
    asked = bodies(6)
    expected = asyncio.run(alone(server.port, asked))

    async def killed(running: RunningServer) -> list[int]:
        long = {"prompt": [5, 6], "max_tokens": 200, "temperature": 1, "seed": 1}
        tasks = [asyncio.ensure_future(ask(running.port, long)) for _ in range(6)]
        await asyncio.sleep(0.1)
        os.kill(running.ranks()[("decode", "prefill").index(victim)], signal.SIGKILL)
        return [each.status for each in await asyncio.gather(*tasks) if each is not None]

    words = ("--dtype", "float64", "--prefill", "dp=1", "--max-running", "3", "--restarts", "1")
    with serving(folder, tmp_path / "log.txt", *words) as running:
        statuses = asyncio.run(killed(running))
        assert statuses == [200] * 6
        assert running.number("fivefold_retried_total") > 0 or victim == "prefill"
        wait_for(running, "fivefold_up", 2)
        said = running.output.read_text()
        assert f"{victim} replica" in said and "was killed by SIGKILL" in said
        assert "new start 1 of 1" in said and running.number("fivefold_restarts_total") == 1
        assert asyncio.run(alone(running.port, asked)) == expected
        assert running.settles(), "a block is leaked"
        os.kill(running.ranks()[("decode", "prefill").index(victim)], signal.SIGKILL)
        running.process.join(20)
        assert running.process.exitcode == 1, "without one kind of engine it ends"


@pytest.mark.sample(0.25)
def test_one_engine_of_several_is_started_again(folder: Path, tmp_path: Path) -> None:
    asked = bodies(6)
    words = (*SMALL, "--replicas", "2", "--layout", "tp=2")
    with serving(folder, tmp_path / "log.txt", *words) as running:
        expected = asyncio.run(alone(running.port, asked))
        os.kill(running.ranks()[1], signal.SIGKILL)
        wait_for(running, "fivefold_restarts_total", 1)
        after = asyncio.run(under_load(running.port, asked, 20, cut=0.0))
        assert all(reply and reply.texts == expected[which] for which, reply in after)
        wait_for(running, "fivefold_up", 2)
        after = asyncio.run(under_load(running.port, asked, 20, cut=0.0))
        assert all(reply and reply.texts == expected[which] for which, reply in after)
        assert running.settles() and running.stop() == 0


@pytest.mark.sample(0.25)
def test_several_engines_of_both_kinds(folder: Path, server: RunningServer, tmp_path: Path) -> None:
    asked = bodies(8)
    expected = asyncio.run(alone(server.port, asked))
    words = (*SMALL, "--prefill", "dp=1", "--prefill-replicas", "2", "--replicas", "2")
    with serving(folder, tmp_path / "log.txt", *words) as running:
        replies = asyncio.run(under_load(running.port, asked, 40, cut=0.2))
        whole = [(which, reply) for which, reply in replies if reply is not None]
        assert whole and all(reply.texts == expected[which] for which, reply in whole)
        assert running.settles() and running.stop() == 0


@pytest.mark.sample(0.5)
def test_what_cannot_be_split_is_refused(folder: Path, tmp_path: Path) -> None:
    for words, said in [
        (["--prefill", "tp=3"], "KV heads"),
        (["--prefill-replicas", "2"], "needs --prefill LAYOUT"),
        (["--prefill", "dp=1", "--prefill-replicas", "0"], "--prefill-replicas 0"),
        (["--restarts", "-1"], "--restarts -1"),
    ]:
        done = in_fork(["serve", str(folder), *words], tmp_path)
        assert done.returncode == 2 and said in done.stderr, done.stderr
