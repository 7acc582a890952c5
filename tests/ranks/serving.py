"""A server in a fork of the test worker, and clients of all kinds for it."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # ranks need it: here once, not in every server
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from fivefold.cli import main

NUM_WORDS, LONGEST = 60, 256
TEMPLATE = "{% for m in messages %}w1 {{ m.content }} w2{% endfor %}"


def make_model(folder: Path) -> None:
    """A model with random weights, and a tokenizer of sixty words."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=NUM_WORDS,
        max_position_embeddings=LONGEST,
        eos_token_id=NUM_WORDS - 1,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.1 * torch.randn_like(each))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(NUM_WORDS)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


@dataclass(frozen=True)
class RunningServer:
    """A server that is up."""

    process: BaseProcess
    port: int
    output: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        """Send a signal; returns the exit code."""
        os.kill(self.process.pid or 0, number)
        self.process.join(30)
        return self.process.exitcode

    def children(self) -> list[int]:
        """The keepers of its engines, by their age, and that of its doors."""
        return _children(self.process.pid or 0)

    def ranks(self) -> list[int]:
        """The ranks of all its engines."""
        return [rank for keeper in self.children()[:-1] for rank in _children(keeper)]

    def doors(self) -> list[int]:
        """Its doors."""
        return _children(self.children()[-1])

    def chats(self) -> list[int]:
        """The processes of chats."""
        return [chat for door in self.doors() for chat in _children(door)]

    def lines(self) -> list[str]:
        """The log, a line a request."""
        return [each for each in self.output.read_text().splitlines() if " total=" in each]

    def metrics(self) -> str:
        """The text of /metrics."""
        with urllib.request.urlopen(self.url.replace("/v1", "/metrics"), timeout=20) as answer:
            return answer.read().decode()

    def number(self, name: str) -> float:
        """A number of /metrics, summed over its labels."""
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.metrics(), re.MULTILINE)
        return sum(map(float, found))

    def settles(self) -> bool:
        """Whether nothing runs or waits soon, and every block is free."""
        for _ in range(100):
            busy = self.number("fivefold_running") + self.number("fivefold_waiting")
            free, blocks = (self.number(f"fivefold_{each}blocks") for each in ("free_", ""))
            if not busy and free == blocks:
                return True
            time.sleep(0.05)
        return False


@contextmanager
def serving(
    folder: Path, output: Path, *words: str, patience: float = 60.0
) -> Iterator[RunningServer]:
    """A server of the model in a folder, up in so many seconds; it is killed if it still runs."""
    context = multiprocessing.get_context("fork")
    command = ["serve", str(folder), "--port", "0", "--device", "cpu", "--name", "tiny", *words]
    process = context.Process(target=_run, args=(command, output))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        process.start()
    try:
        yield RunningServer(process, _port(process, output, patience), output)
    finally:
        process.kill()
        process.join()


def _port(process: BaseProcess, output: Path, patience: float) -> int:
    for _ in range(int(10 * patience)):
        text = output.read_text() if output.exists() else ""
        if found := re.search(r"http://[^/ ]+:(\d+)/v1", text):
            return int(found[1])
        assert process.is_alive(), text
        time.sleep(0.1)
    raise AssertionError(f"it is not up after {patience} s: {text}")


def _run(words: list[str], output: Path) -> None:
    with output.open("w") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    main(words)


@dataclass(frozen=True)
class Reply:
    """What a client got: the texts of all choices, and when the first one came."""

    status: int
    texts: tuple[str, ...]
    ttft: float
    headers: str


async def ask(
    port: int, body: dict[str, Any], cut_after: float | None = None, key: str = ""
) -> Reply | None:
    """Send a request; None if this client broke off, so many seconds after it was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data, began = json.dumps({"model": "tiny", **body}).encode(), time.perf_counter()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    try:
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
        async with asyncio.timeout(cut_after):
            start = await reader.readuntil(b"\r\n\r\n")
            ttft = time.perf_counter() - began
            rest = await reader.read()
    except TimeoutError:
        writer.transport.abort()
        return None
    writer.close()
    status, headers = int(start.split()[1]), start.decode()
    if "chunked" in headers:
        rest = _unchunked(rest)
    if status != 200:
        return Reply(status, (rest.decode(),), ttft, headers)
    return Reply(status, _texts(rest, bool(body.get("stream"))), ttft, headers)


async def raw(port: int, body: bytes) -> tuple[int, bytes]:
    """Status and text of a reply, however it ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    data = await reader.read()
    writer.close()
    return int(data.split()[1]), data


async def killed_mid_request(running: RunningServer, victim: int) -> list[tuple[int, bytes]]:
    """Kill a rank while it answers eight requests, of which every other one is a stream: their
    statuses and texts, once all have ended."""
    long = {"model": "tiny", "prompt": [5, 6], "max_tokens": 240, "ignore_eos": True}
    asked = [json.dumps(long | {"stream": number % 2 == 0}).encode() for number in range(8)]
    tasks = [asyncio.ensure_future(raw(running.port, body)) for body in asked]
    async with asyncio.timeout(90):
        while await asyncio.to_thread(running.number, "fivefold_output_tokens_total") < 8:
            await asyncio.sleep(0.01)
        os.kill(running.ranks()[victim], signal.SIGKILL)
        return await asyncio.gather(*tasks)


def _unchunked(data: bytes) -> bytes:
    parts: list[bytes] = []
    while data:
        size, _, data = data.partition(b"\r\n")
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts)


def _texts(data: bytes, stream: bool) -> tuple[str, ...]:
    if not stream:
        return tuple(each["text"] for each in json.loads(data)["choices"])
    texts: dict[int, str] = {}
    events = data.decode().removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        for each in json.loads(event.removeprefix("data: "))["choices"]:
            texts[each["index"]] = texts.get(each["index"], "") + each["text"]
    return tuple(texts[index] for index in sorted(texts))


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(each) for task in tasks for each in (task / "children").read_text().split())


def bodies(count: int) -> list[dict[str, Any]]:
    """Requests of mixed lengths, greedy and drawn, of one choice and of two."""
    draw, found = random.Random(0), list[dict[str, Any]]()
    for number in range(count):
        prompt = [draw.randrange(59) for _ in range(draw.choice((1, 5, 17, 40, 70)))]
        body = {"prompt": prompt, "max_tokens": draw.choice((1, 3, 12, 30)), "seed": number}
        body |= {"temperature": draw.choice((0, 1)), "n": draw.choice((1, 1, 2))}
        found.append(body)
    return found


async def alone(port: int, asked: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The texts of requests one after another."""
    found: list[tuple[str, ...]] = []
    for body in asked:
        reply = await ask(port, body)
        assert reply is not None and reply.status == 200, reply
        found.append(reply.texts)
    return found


async def under_load(
    port: int, asked: list[dict[str, Any]], count: int, cut: float
) -> list[tuple[int, Reply | None]]:
    """So many requests, 64 at a time; a share of the clients breaks off at some time."""
    draw, gate = random.Random(1), asyncio.Semaphore(64)

    async def one(number: int) -> tuple[int, Reply | None]:
        which = draw.randrange(len(asked))
        stream, after = draw.random() < 0.5, draw.uniform(0, 0.3) if draw.random() < cut else None
        async with gate:
            return which, await ask(port, asked[which] | {"stream": stream}, after)

    return await asyncio.gather(*map(one, range(count)))
