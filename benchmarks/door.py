r"""The HTTP side of a server: CPU time per token in each of its processes, by number of doors.

    python benchmarks/door.py [--doors 1 2 4] [--replicas 2] [--clients 64] [--tokens 512]
    python benchmarks/door.py --step-ms 20      (engines as fast as real ones: no token waits)

The engines are fakes that know no model: each sends a token of every open request per step, at full
speed or every `--step-ms`. All else is the server itself, with a byte-level tokenizer that is
trained on the documentation; its clients are processes of their own that stream over loopback. On
few cores tokens/s say how busy the machine is: CPU time per token in a process is what carries over
to many cores, where every door has its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fivefold.core.layout import Layout
from fivefold.core.model import load
from fivefold.generate import LibraryCodec
from fivefold.launch import die_with
from fivefold.serve import server, supervisor
from fivefold.serve.links import AddCommand, DropCommand, RankLink, ReplicaHello, StepNews
from fivefold.serve.rank import API_SOCKET
from fivefold.serve.supervisor import EngineEnd

_ROOT = Path(__file__).parents[1]
_TICKS = os.sysconf("SC_CLK_TCK")
_LONGEST = 1 << 16  # tokens of a sequence
_LIMIT_S = 120.0  # of a measurement


def trained_tokenizer(vocab: int) -> Any:
    """A byte-level tokenizer of the documentation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted((_ROOT / "docs").glob("*.md"))], trainer)
    return tokenizer


@dataclass
class FakeEngine:
    """Sends a token of every open request per step."""

    corpus: list[int]
    step_s: float

    def keep(self, task: Any, restarts: int, pipe: Any, inherited: Any, parent: int) -> None:
        """Stand in for the supervisor of an engine and its ranks."""
        die_with(parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        for connection in inherited:
            connection.close()
        link = RankLink.to(task.folder / API_SOCKET)
        link.send(ReplicaHello(task.replica, 1 << 20, 1 << 20))
        sequences: dict[str, list[int]] = {}
        begun, due = 0, time.monotonic()
        while True:
            try:
                commands = link.receive(0.0 if sequences else 60.0)
            except EOFError:
                return
            for command in commands:
                if isinstance(command, AddCommand):
                    request, begun = command.request, begun + 37
                    sequences[request.id] = [begun, request.max_tokens]
                elif isinstance(command, DropCommand):
                    sequences.pop(command.id, None)
                else:
                    pipe.send(EngineEnd())
                    return
            rows: list[Any] = []
            for id, state in list(sequences.items()):
                state[0], state[1] = state[0] + 1, state[1] - 1
                token = self.corpus[state[0] % len(self.corpus)]
                rows.append((id, token, -1.25, None if state[1] else "length", ()))
                if not state[1]:
                    del sequences[id]
            if rows:
                due = max(due, time.monotonic()) + self.step_s
                link.send(StepNews(rows, [], 1 << 20, 0))
                time.sleep(max(0.0, due - time.monotonic()))


def served(pipe: Any, options: Any, tokenizer: Any, engine: FakeEngine) -> None:
    """Run a server of fake engines; sends its address."""
    supervisor._keep = engine.keep
    plan = SimpleNamespace(layout=Layout())
    shape = replace(load("tiny"), vocab=tokenizer.get_vocab_size(), max_seq=_LONGEST)
    task = SimpleNamespace(plan=plan, device="cpu")
    setup: Any = SimpleNamespace(
        model=SimpleNamespace(shape=shape, folder=_ROOT, adapters=()),
        codec=LibraryCodec(tokenizer),
        ends=frozenset(),
        plan=plan,
        task=lambda _: task,
    )
    lines: list[str] = []
    warn = lambda line: print(line, file=sys.stderr)  # noqa: E731
    sys.exit(server.ModelServer(setup, options, pipe.send, lines.append, warn).run())


async def request(port: int, tokens: int, logprobs: bool) -> tuple[float, int, int]:
    """Stream a completion; returns seconds to the first token, tokens and events."""
    body: dict[str, Any] = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": tokens}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= {"logprobs": 1} if logprobs else {}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
    began = time.perf_counter()
    writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + data)
    await reader.readuntil(b"data: ")
    first, events, tail = time.perf_counter() - began, 1, b""
    while block := await reader.read(1 << 18):
        events += block.count(b"data: ")
        tail = (tail + block)[-400:]
    writer.close()
    assert b"[DONE]" in tail, tail
    usage = json.loads(tail.rpartition(b'"usage": ')[2].partition(b"}")[0] + b"}")
    return first, usage["completion_tokens"], events


def clients(pipe: Any, port: int, count: int, tokens: int, logprobs: bool) -> None:
    """Stream on so many connections at once; sends tokens and events."""

    async def gathered() -> tuple[int, int]:
        answers = await asyncio.gather(*(request(port, tokens, logprobs) for _ in range(count)))
        return sum(answer[1] for answer in answers), sum(answer[2] for answer in answers)

    pipe.send(asyncio.run(gathered()))


def processes_of(pid: int, num_engines: int) -> dict[int, str]:
    """The processes of a server and what they are."""
    names, children = {pid: "dispatcher"}, _children(pid)
    for number, child in enumerate(children):
        if number < num_engines:
            names[child] = "engine"
        elif below := _children(child):
            names |= dict.fromkeys(below, "door")
    return names


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system time of a process so far."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(stat[11]) / _TICKS, int(stat[12]) / _TICKS


def loop_us() -> float:
    """CPU time of a fixed piece of Python, which tells how fast this core is now."""
    began = time.process_time()
    for number in range(20_000):
        json.dumps({"id": "cmpl-1", "choices": [{"index": number, "text": "word", "more": None}]})
    return 1e6 * (time.process_time() - began) / 20_000


def measure(said: Any, num_doors: int, tokenizer: Any, corpus: list[int]) -> dict[str, Any]:
    """One server with so many doors."""
    context = multiprocessing.get_context("fork")
    more = {"doors": num_doors} if hasattr(server.ServeOptions("fake"), "doors") else {}
    options = server.ServeOptions(
        "fake", port=0, replicas=said.replicas, max_running=said.clients, **more
    )
    engine = FakeEngine(corpus, said.step_ms / 1e3)
    ours, theirs = context.Pipe()
    running = context.Process(target=served, args=(theirs, options, tokenizer, engine))
    running.start()
    pid = running.pid or 0
    try:
        assert ours.poll(_LIMIT_S), "the server is not up"
        port = int(ours.recv().split(":")[2].split("/")[0])
        latencies = [asyncio.run(request(port, 1, False))[0] for _ in range(said.alone)]
        names, loop = processes_of(pid, said.replicas), loop_us()
        before = {process_id: cpu_seconds(process_id) for process_id in names}
        began = time.perf_counter()
        pipes: list[Any] = []
        for _ in range(said.client_processes):
            end, other = context.Pipe()
            share = said.clients // said.client_processes
            process = context.Process(
                target=clients, args=(other, port, share, said.tokens, said.logprobs)
            )
            process.start()
            pipes.append((end, process))
        counts: list[tuple[int, int]] = []
        for end, _ in pipes:
            assert end.poll(_LIMIT_S), f"no answer within {_LIMIT_S:g} s"
            counts.append(end.recv())
        seconds = time.perf_counter() - began
        after = {process_id: cpu_seconds(process_id) for process_id in names}
        loop = (loop + loop_us()) / 2
        for _, process in pipes:
            process.join()
    finally:
        os.kill(pid, signal.SIGTERM)
        running.join(10)
        running.kill()
    total, events = sum(count[0] for count in counts), sum(count[1] for count in counts)
    assert total == said.clients // said.client_processes * said.client_processes * said.tokens
    row = {"doors": num_doors, "tokens": total, "events": events, "seconds": seconds}
    row |= {"latency_ms": 1e3 * median(latencies), "loop_us": loop, "processes": list[Any]()}
    for process_id, name in names.items():
        user, system = (
            1e6 * (end - start) / total
            for start, end in zip(before[process_id], after[process_id], strict=True)
        )
        row["processes"].append((name, user, system))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--doors", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--client-processes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512, help="of each client")
    parser.add_argument("--step-ms", type=float, default=0.0, help="of an engine; 0: full speed")
    parser.add_argument("--alone", type=int, default=30, help="requests for the latency of one")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--json", type=Path)
    said = parser.parse_args()
    tokenizer = trained_tokenizer(said.vocab)
    corpus = tokenizer.encode((_ROOT / "docs" / "log.md").read_text("utf-8")[:400_000]).ids
    rows = [measure(said, doors, tokenizer, corpus) for doors in said.doors]
    for row in rows:
        rate, per_event = row["tokens"] / row["seconds"], row["tokens"] / row["events"]
        print(
            f"{row['doors']} doors: {rate:,.0f} tokens/s on {os.cpu_count()} cores, "
            f"{per_event:.2f} tokens an event, {row['latency_ms']:.2f} ms for one request alone, "
            f"a core that takes {row['loop_us']:.1f} µs for one json.dumps"
        )
        for name in ("dispatcher", "door"):
            times = [part for part in row["processes"] if part[0] == name]
            user, system = (sum(part[i] for part in times) for i in (1, 2))
            if times:
                print(f"  {name:12} {user:6.2f} µs user + {system:6.2f} µs system a token")
    if said.json:
        said.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
