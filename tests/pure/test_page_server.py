"""The server of the page: local, deaf to other sites, with messages for what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    command = [sys.executable, "-m", "fivefold", "observe", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield "http://" + line.split("http://")[1].split()[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def post(
    site: str, name: str, body: object, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{site}ask/{name}", data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
            return answer.status, json.loads(lines[-1])
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, json.loads(text) if text.startswith("{") else text


def test_the_page_lets_no_other_script_run(site: str) -> None:
    with urllib.request.urlopen(site) as answer:
        policy = answer.headers["content-security-policy"]
        text = answer.read().decode()
    assert "script-src 'self' 'sha256-" in policy and "unsafe-eval" not in policy
    assert "default-src 'none'" in policy and "<script>" not in text


def test_it_answers(site: str) -> None:
    status, found = post(
        site,
        "explore",
        {"model": "tiny", "machine": "laptop", "gpus": "1"}
        | dict.fromkeys(("tp", "pp"), "1")
        | {"batch": "1", "seq": "64"},
    )
    assert status == 200 and found["state"]["model"] == "tiny"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "object"),
        ({"tp": 8}, "must be a text"),
        ({"tq": "8"}, "unknown key"),
        (b'{"config": "' + b"a" * 3_000_000 + b'"}', "bytes"),
    ],
    ids=["torn", "deep", "list", "number", "typo", "large"],
)
def test_what_is_wrong_gets_a_message(site: str, body: object, words: str) -> None:
    status, found = post(site, "explore", body)
    assert status == 422 and words in found["error"]


def test_unknown_questions_are_named(site: str) -> None:
    status, found = post(site, "learn/dota", {})
    assert status == 422 and "learn/data" in found["error"]


def test_other_sites_may_not_ask(site: str) -> None:
    assert post(site, "explore", {}, {"origin": "http://example.com"})[0] == 403
    assert post(site, "explore", {}, {"host": "example.com"})[0] == 400


def test_a_port_in_use_is_an_error(site: str) -> None:
    port = site.rstrip("/").rsplit(":", 1)[1]
    command = [sys.executable, "-m", "fivefold", "observe", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--port" in done.stderr


def test_who_leaves_early_ends_the_work() -> None:
    """A server that is killed while it searches leaves no worker behind."""
    command = [sys.executable, "-m", "fivefold", "observe", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = "http://" + process.stdout.readline().split("http://")[1].split()[0]
        request = urllib.request.Request(f"{address}ask/ranking", b"{}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.readline()
            children = _children(process.pid)
            assert children
        process.kill()
    for child in children:
        _require_gone(child)


def _children(pid: int) -> list[int]:
    text = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in text.stdout.split()]


def _require_gone(pid: int) -> None:
    import time

    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"{pid} is still there")
