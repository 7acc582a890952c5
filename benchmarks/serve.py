r"""A server under load: Poisson arrivals of streams, TTFT, TPOT and goodput at several rates.

    python benchmarks/serve.py [--model tiny] [--rates 4 8 16] [--seconds 20] [--json FILE]
    python benchmarks/serve.py --model llama-3.1-8b --device cuda --rates 1 4 8 16 --clients 64 \
        --prompt 1024 --output 128 --spread 0 --beside h200
    python benchmarks/serve.py --prefill dp=1 --prompt 512   (prompts on ranks of their own)
    python benchmarks/serve.py --url http://127.0.0.1:8000/v1 --name NAME   (any server)

Without `--url` it serves the shape of a preset with random weights and a tokenizer of words, in
processes of its own. Prompts and completions have lognormal lengths around `--prompt` and
`--output` (`--spread 0`: all are equal); prompts share no beginning. `--clients N` are N clients
that each wait for an answer before they ask again. `--beside MACHINE` prints what `plan --serve`
says of each load, and of a rate also what it says of the very times at which requests came: medians
of some seconds depend on them. A request is good if its first token comes within `--ttft` seconds
and each further one within `--tpot`, in the mean. Clients are in one process of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Sent:
    """A request with its times, in seconds."""

    status: int
    ttft: float
    tpot: float
    total: float
    tokens: int
    ended: float  # on the clock


def drawn(draw: random.Random, vocab: int, most: int, said: Any) -> tuple[list[int], int]:
    """A prompt, and how many tokens are asked."""
    prompt, output = (
        max(1, round(draw.lognormvariate(math.log(middle), said.spread)))
        for middle in (said.prompt, said.output)
    )
    prompt = min(prompt, most // 2)
    return [draw.randrange(vocab) for _ in range(prompt)], min(output, most - prompt - 1)


async def stream(address: tuple[str, int], name: str, prompt: list[int], output: int) -> Sent:
    """One completion, streamed."""
    body = {"model": name, "prompt": prompt, "max_tokens": output, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    data, began = json.dumps(body).encode(), time.perf_counter()
    first, last, tokens, buffer, status = 0.0, 0.0, 0, b"", 0
    try:
        reader, writer = await asyncio.open_connection(*address)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
        writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + data)
        status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
        while block := await reader.read(1 << 16):
            buffer += block
            if b'"choices": [{' in block or b'"choices":[{' in block:
                last = time.perf_counter()
                first = first or last
        writer.close()
    except OSError:
        status = 0
    if found := buffer.rfind(b'"completion_tokens":') + 1:
        tokens = int(buffer[found + 19 : found + 40].split(b",")[0].split(b":")[-1])
    ended = time.perf_counter()
    tpot = (last - first) / (tokens - 1) if tokens > 1 else 0.0
    return Sent(status if first else 0, first - began, tpot, ended - began, tokens, ended)


async def at_rate(
    address: tuple[str, int], name: str, vocab: int, most: int, rate: float, said: Any
) -> Measured:
    """Requests as they arrive, until all are answered: Poisson arrivals, of as many requests as are
    expected, since more or fewer would be another load."""
    # Prompts of an earlier rate would be in the cache.
    draw = random.Random(f"{said.seed} at {rate:g}")
    count = max(1, round(rate * said.seconds))
    due = sorted(draw.uniform(0, said.seconds) for _ in range(count))
    began, tasks = time.perf_counter(), list[asyncio.Task[Sent]]()
    for each in due:
        await asyncio.sleep(max(0.0, began + each - time.perf_counter()))
        asked = drawn(draw, vocab, most, said)
        tasks.append(asyncio.ensure_future(stream(address, name, *asked)))
    sent = await asyncio.gather(*tasks)
    # The first ones fill the server, as those of a plan do.
    return Measured(sent, sent[len(sent) // 4 :], *rates_of(sent, began, said), tuple(due))


async def by_clients(
    address: tuple[str, int], name: str, vocab: int, most: int, clients: int, said: Any
) -> Measured:
    """Requests of so many clients. They begin one after the other, over a third of the seconds, so
    that they are not in step. Times are of answers that lie in the rest."""
    began = time.perf_counter()
    full, end = began + said.seconds / 3, began + said.seconds

    async def client(number: int) -> list[Sent]:
        draw, sent = random.Random(f"{said.seed} {number} of {clients}"), list[Sent]()
        await asyncio.sleep(said.seconds / 3 * number / clients)
        while time.perf_counter() < end:
            sent.append(await stream(address, name, *drawn(draw, vocab, most, said)))
        return sent

    found = await asyncio.gather(*(client(number) for number in range(clients)))
    sent = [each for one in found for each in one]
    inside = [each for each in sent if each.ended - each.total >= full and each.ended <= end]
    return Measured(sent, inside, *rates_of(sent, began, said))


class Measured(NamedTuple):
    """What came of a load: requests, those whose times count, tokens and good answers a second, and
    when requests came, if they did not wait for one another."""

    sent: list[Sent]
    timed: list[Sent]
    tokens_per_s: float
    goodput: float
    arrivals: tuple[float, ...] = ()


def is_good(sent: Sent, said: Any) -> bool:
    return sent.status == 200 and sent.ttft <= said.ttft and sent.tpot <= said.tpot


def rates_of(sent: list[Sent], began: float, said: Any) -> tuple[float, float]:
    """Of answers that ended in the last two thirds of the time in which requests came, whenever
    they began: as many end as begin."""
    seconds = said.seconds * 2 / 3
    ended = [each for each in sent if 0 <= began + said.seconds - each.ended < seconds]
    good = [each for each in ended if is_good(each, said)]
    return sum(each.tokens for each in ended) / seconds, len(good) / seconds


def at(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def summary(load: float, found: Measured, said: Any) -> dict[str, float]:
    done = [each for each in found.timed if each.status == 200]
    good = [each for each in done if is_good(each, said)]
    ttft, tpot = [each.ttft for each in done], [each.tpot for each in done if each.tokens > 1]
    return {
        "rate": load,
        "requests": len(found.sent),
        "lost": sum(each.status != 200 for each in found.sent),
        "ttft_p50_s": at(ttft, 0.5),
        "ttft_p99_s": at(ttft, 0.99),
        "tpot_p50_s": at(tpot, 0.5),
        "tpot_p99_s": at(tpot, 0.99),
        "tokens_per_s": found.tokens_per_s,
        "goodput": found.goodput,
        "good_share": len(good) / max(1, len(found.timed)),
    }


def random_weight(weight: Any, dtype: Any) -> Any:
    """A weight of a random model: the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(weight.name.encode()))
    if len(weight.shape) < 2:
        return torch.ones(weight.shape, dtype=dtype)
    # Few numbers, repeated: what they are changes no time, and drawing billions would.
    few = torch.randn(1 << 20, generator=generator).mul_(0.02).to(dtype)
    count = math.prod(weight.shape)
    return few.repeat(-(-count // len(few)))[:count].view(weight.shape)


def open_random(tell: Any) -> Any:
    return random_weight


@contextmanager
def own_server(said: Any) -> Iterator[tuple[tuple[str, int], str, int, int]]:
    """A server of a random model, in processes of its own."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, said))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        os.kill(process.pid or 0, signal.SIGTERM)
        process.join(60)


def words(vocab: int, folder: str) -> str:
    """A tokenizer with a word for every token: one without text would not be streamed."""
    from tokenizers import Tokenizer, models

    path = f"{folder}/tokenizer.json"
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0")).save(path)
    return path


def _serve(pipe: Any, said: Any) -> None:
    from fivefold.core.model.presets import load, with_overrides
    from fivefold.core.plan.plan import PlanOptions
    from fivefold.generate.text_model import ModelOptions, TextModel, set_up
    from fivefold.serve.server import ModelServer, ServeOptions

    changes = {"max_seq": str(said.max_seq)}
    shape = with_overrides(load(said.model), changes)
    named = PlanOptions(said.model, set=changes)
    with tempfile.TemporaryDirectory() as folder:
        model = TextModel(shape, named, Path(folder), Path(folder), True)
        runs = ModelOptions(said.layout, None, said.device, words(shape.vocab, folder))
        setup = set_up(model, runs, open_random)
        first = None
        if said.prefill:
            first = set_up(model, replace(runs, layout=said.prefill), open_random)
        options = ServeOptions(
            "random",
            port=0,
            replicas=said.replicas,
            prefill_replicas=said.prefill_replicas,
            max_running=said.max_running,
            max_batch_tokens=said.max_batch_tokens,
        )

        def ready(address: str) -> None:
            found = urlsplit(address)
            pipe.send(((found.hostname, found.port), "random", shape.vocab, shape.max_seq))

        def warn(why: str) -> None:
            print(why, file=sys.stderr, flush=True)

        log = print if said.log else lambda line: None
        sys.exit(ModelServer(setup, options, ready, log, warn, first).run())


def arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="preset whose shape is served")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layout", default="dp=1")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--prefill", help="layout of ranks for prompts alone")
    parser.add_argument("--prefill-replicas", type=int, default=1)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--max-batch-tokens", type=int)
    parser.add_argument("--max-seq", type=int, default=2048)
    parser.add_argument("--url", help="a server that is up, instead of one of ours")
    parser.add_argument("--name", default="", help="the model of that server")
    parser.add_argument("--rates", type=float, nargs="*", default=[2.0, 8.0])
    parser.add_argument("--clients", type=int, nargs="*", default=[])
    parser.add_argument("--spread", type=float, default=0.5, help="sigma of lengths' logarithm")
    parser.add_argument("--beside", help="a machine for `plan --serve`, printed beside")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--prompt", type=int, default=64, help="median tokens of a prompt")
    parser.add_argument("--output", type=int, default=32, help="median tokens of a completion")
    parser.add_argument("--ttft", type=float, default=1.0, help="bound of a good request")
    parser.add_argument("--tpot", type=float, default=0.1, help="bound of a good request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", action="store_true", help="print the server's lines")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def planned(load: dict[str, float], arrivals: tuple[float, ...], said: Any) -> dict[str, float]:
    """What `plan --serve` says of a load; with `_here` what it says of these arrivals."""
    from fivefold.commands.plan import plan_serving
    from fivefold.planner.serving.load import ReplicaLoad, simulate
    from fivefold.planner.serving.plans import LayoutLoad

    keys = {"machine": said.beside, "layout": said.layout, **load}
    answer = plan_serving(said.model, prompt=said.prompt, output=said.output, **keys)
    table = answer.to_json()
    found = {key: table[key] for key in ("ttft_s", "tpot_s", "tokens_per_s")}
    chosen = answer.choice.chosen
    if arrivals and chosen.layout.dp == 1:
        asked = ReplicaLoad(said.prompt, said.output, load["rate"], arrivals=arrivals)
        here = simulate(asked, LayoutLoad(chosen.fit).speed())
        found |= {"ttft_s_here": here.ttft, "tpot_s_here": here.tpot}
    return found


def measure(address: tuple[str, int], name: str, vocab: int, most: int, said: Any) -> int:
    rows: list[dict[str, float]] = []
    place = (address, name, vocab, most)
    print(
        "load        requests  lost  TTFT p50   p99      TPOT p50   p99      tokens/s  good/s  good"
    )
    for rate in said.rates:
        found = asyncio.run(at_rate(*place, rate, said))
        rows.append(shown(f"{rate:g} a second", {"rate": rate}, found, said))
    for clients in said.clients:
        found = asyncio.run(by_clients(*place, clients, said))
        rows.append(shown(f"{clients} clients", {"concurrency": clients}, found, said))
    if said.json:
        known = [{key: v for key, v in row.items() if not math.isnan(v)} for row in rows]
        said.json.write_text(json.dumps(known, indent=1))
    return int(any(row["lost"] for row in rows))


def shown(load: str, asked: dict[str, float], found: Measured, said: Any) -> dict[str, float]:
    """Print one line for a load, and one for each plan of it."""
    row = summary(*asked.values(), found, said)
    print(
        f"{load:10}  {row['requests']:8g}  {row['lost']:4g}  {row['ttft_p50_s']:7.3f} s "
        f"{row['ttft_p99_s']:7.3f} s {1e3 * row['tpot_p50_s']:7.1f} ms "
        f"{1e3 * row['tpot_p99_s']:7.1f} ms {row['tokens_per_s']:9.0f} {row['goodput']:7.2f} "
        f"{row['good_share']:5.0%}",
        flush=True,
    )
    plan = planned(asked, found.arrivals, said) if said.beside else {}
    for of, which in (("planned", ""), ("planned for these arrivals", "_here")):
        if f"ttft_s{which}" in plan:
            ttft, tpot = (plan[f"{name}_s{which}"] for name in ("ttft", "tpot"))
            print(
                f"  {of}: TTFT {ttft:.3f} s (measured {row['ttft_p50_s'] / ttft:.2f} of it), "
                f"TPOT {1e3 * tpot:.1f} ms ({row['tpot_p50_s'] / tpot:.2f})",
                flush=True,
            )
    return row | {f"planned_{key}": value for key, value in plan.items()}


def main() -> int:
    said = arguments()
    if said.url:
        found = urlsplit(said.url)
        address = (found.hostname or "127.0.0.1", found.port or 80)
        return measure(address, said.name, 256, said.max_seq, said)
    with own_server(said) as (address, name, vocab, most):
        # The first of a kind compiles, captures and loads.
        warm = [stream(address, name, [1] * said.prompt, 8) for _ in range(4)]

        async def all_warm() -> list[float]:
            return [each.ttft for each in await asyncio.gather(*warm)]

        print(f"first requests: {median(asyncio.run(all_warm())):.2f} s to the first token")
        return measure(address, name, vocab, most, said)


if __name__ == "__main__":
    sys.exit(main())
