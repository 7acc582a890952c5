"""Steps of the engine on one GPU where it is not one dense model with equal sequences.

    python benchmarks/engine.py [CASE ...] [--json FILE]

masks    8 layers of 8B: decode of 32 sequences and a prompt of 8k, with a cap, sinks, a window or
         chunks, as multiples of the plain model in the same run.
latents  DeepSeek-V2-Lite, 8 of 27 layers: decode of 1, 32 and 64 sequences at 1k beside reading
         their weights and latents; prompts of 4k and 16k.
long     8B: 127 short sequences, one of 60k tokens, and both together.
mixed    8B: 64 sequences that come one after another, with prompts of 1,024 tokens and answers of
         128: how much of the time is that of their prompts and decode steps, each measured alone.
prompts  8B: 4,096 tokens of prompts in a step: 1, 16 or 256 of them; and 64 tokens after 16k.
layers   80 narrow layers, of which a step is all host work: captured, and kernel by kernel.
experts  Qwen3-30B-A3B: decode of 1 and 128 sequences at 1k beside reading the weights of the
         experts that they choose, and keys.
drawing  8B: 256 sequences, greedy, T = 1, top-p and top-k.

Random weights in bfloat16. All of it goes through the engine: scheduling, copies, draws.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import decode

from fivefold.core.model.kv_pages import blocks_of
from fivefold.core.model.presets import load, with_overrides
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.cache import KvCache
from fivefold.generate.engine import Engine
from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import Request, Sampling
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.model.decoder import Decoder

Row = dict[str, Any]
_WARM, _STEPS = 6, 24


def engine_of(
    decoder: Decoder, blocks: int, limits: ScheduleLimits, captured: bool = True
) -> Engine:
    from fivefold.generate import cuda_graphs  # Triton is there only with CUDA

    if not captured:
        make_cache = partial(KvCache, kernel=cuda_graphs.attend_on_gpu)
        forward = DecoderForward(decoder, blocks, make_cache)
        return Engine(decoder.shape, forward, blocks, limits)
    drawn = DrawnTokens(max(limits.sequences, limits.tokens), torch.device("cuda"))
    graphed = cuda_graphs.GraphedForward(decoder, blocks, drawn=drawn)
    return Engine(decoder.shape, graphed, blocks, limits, drawn=drawn)


def requests(
    decoder: Decoder, count: int, length: int, new: int, sampling: Sampling | None = None
) -> list[Request]:
    generator = torch.Generator().manual_seed(time.time_ns() % 2**31)
    tokens: Any = torch.randint(decoder.shape.vocab, (count, length), generator=generator)
    rows: list[list[int]] = tokens.tolist()
    stamp = time.time_ns()
    sampling = sampling or Sampling()
    return [Request(f"{stamp}-{i}", tuple(row), new, sampling) for i, row in enumerate(rows)]


def decode_ms(engine: Engine, sequences: int, most: int = _STEPS) -> float:
    """Median of steps that draw for so many sequences."""
    steps: list[float] = []
    while engine.busy:
        begin = time.perf_counter()
        drawn = engine.step()
        if len(drawn) == sequences and len(steps) < most + _WARM:
            steps.append(1e3 * (time.perf_counter() - begin))
    return median(steps[_WARM:])


def prompt_ms(engine: Engine, decoder: Decoder, count: int, length: int) -> float:
    """Median time of prompts that come at once."""
    times: list[float] = []
    for _ in range(4):
        engine.renew()
        prompts = requests(decoder, count, length, 1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.run(prompts)
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times[1:])


def masks() -> Iterator[Row]:
    overrides = {
        "plain": {},
        "cap": {"score_cap": "50"},
        "sinks": {"sinks": "true"},
        "window": {"window": "512"},
        "chunks": {"window": "512", "window_kind": "chunked"},
    }
    plain: Row = {}
    for name, more in overrides.items():
        decoder = decode.decoder_of(with_overrides(load("llama-3.1-8b"), {"layers": "8", **more}))
        engine = engine_of(decoder, 32 * 70, ScheduleLimits(8192, 32))
        for request in requests(decoder, 32, 1024, 40):
            engine.add(request)
        row = {"decode_ms": decode_ms(engine, 32)}
        torch.cuda.reset_peak_memory_stats()
        engine = engine_of(decoder, blocks_of(8194) + 1, ScheduleLimits(8192, 1))
        row["prompt_ms"] = prompt_ms(engine, decoder, 1, 8192)
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        plain = plain or row
        yield {"mask": name, **row, **{f"x_{key}": row[key] / plain[key] for key in row}}
        del engine, decoder
        free()


def latents() -> Iterator[Row]:
    decoder = decode.decoder_of(with_overrides(load("deepseek-v2-lite"), {"layers": "8"}))
    speed = decode.bandwidth()
    for count in (1, 32, 64):
        engine = engine_of(decoder, count * (blocks_of(1100) + 1), ScheduleLimits(8192, count))
        for request in requests(decoder, count, 1024, 40):
            engine.add(request)
        milliseconds, limit = decode_ms(engine, count), limit_ms(decoder, count, 1050, speed)
        yield {
            "sequences": count,
            "ms": milliseconds,
            "limit_ms": limit,
            "share": limit / milliseconds,
        }
    for length in (4096, 16384):
        engine = engine_of(decoder, blocks_of(length + 2) + 1, ScheduleLimits(8192, 1))
        yield {"prompt": length, "ms": prompt_ms(engine, decoder, 1, length)}


def limit_ms(decoder: Decoder, sequences: int, keys: int, speed: float) -> float:
    """Time to read what a decode step must: of experts, those that random choices touch."""
    from fivefold.generate.cache import token_bytes
    from fivefold.model import moe_layers

    shape, total = decoder.shape, 0.0
    experts = {id(p) for _, mlp in moe_layers(decoder) for p in mlp.experts.parameters()}
    for parameter in decoder.parameters():
        share = 1.0
        if shape.moe is not None and id(parameter) in experts:
            share = 1 - (1 - shape.moe.top_k / shape.moe.experts) ** sequences
        total += share * parameter.nbytes
    if not shape.tied and decoder.embed is not None:
        total -= decoder.embed.weight.nbytes
    return 1e3 * (total + sequences * keys * token_bytes(decoder)) / speed


def experts() -> Iterator[Row]:
    decoder = decode.decoder_of(load("qwen3-30b-a3b"))
    speed = decode.bandwidth()
    for count in (1, 128):
        engine = engine_of(decoder, count * (blocks_of(1100) + 1), ScheduleLimits(8192, count))
        for request in requests(decoder, count, 1024, 40):
            engine.add(request)
        milliseconds, limit = decode_ms(engine, count), limit_ms(decoder, count, 1050, speed)
        yield {
            "sequences": count,
            "ms": milliseconds,
            "limit_ms": limit,
            "share": limit / milliseconds,
        }


def long() -> Iterator[Row]:
    decoder, short, length = eight(), 127, 60_000
    engine = engine_of(decoder, short * 40 + blocks_of(length + 300), ScheduleLimits(8192, 128))
    for request in requests(decoder, short, 128, 60):
        engine.add(request)
    alone = decode_ms(engine, short)
    yield {"sequences": "127 short", "ms": alone}
    (request,) = requests(decoder, 1, length, 240)
    engine.add(request)
    while not any(drawn.id == request.id for drawn in engine.step()):
        pass
    for other in requests(decoder, short, 128, 60):
        engine.add(other)
    steps: list[float] = []
    worst = 0.0
    while engine.busy:
        begin = time.perf_counter()
        drawn = engine.step()
        seconds = 1e3 * (time.perf_counter() - begin)
        worst = max(worst, seconds)
        if len(drawn) == short + 1:
            steps.append(seconds)
    both = median(steps[_WARM:])
    yield {"sequences": "and one of 60k", "ms": both, "more_ms": both - alone, "worst_ms": worst}


def mixed() -> Iterator[Row]:
    """A request comes with every second step. Alone: its prompt, and decode steps of as many
    sequences as there are in the median."""
    decoder, count, new = eight(), 64, 128
    engine = engine_of(decoder, count * (blocks_of(1024 + new) + 1), ScheduleLimits(8192, count))
    took, sizes = 0.0, list[int]()
    for _ in range(2):  # the first time kernels are made
        coming = requests(decoder, count, 1024, new)
        engine.renew()
        torch.cuda.synchronize()
        begin, sizes, number = time.perf_counter(), [], 0
        while coming or engine.busy:
            if coming and number % 2 == 0:
                engine.add(coming.pop())
            sizes.append(len(engine.step()))
            number += 1
        took = 1e3 * (time.perf_counter() - begin)
    prompt = prompt_ms(engine, decoder, 1, 1024)
    steps: dict[int, float] = {}
    for sequences in (1, 8, 16, 32, 48, count):
        engine.renew()
        for request in requests(decoder, sequences, 1024, 40):
            engine.add(request)
        steps[sequences] = decode_ms(engine, sequences)
    near = (min(steps, key=lambda known: abs(known - size)) for size in sizes if size)
    alone = count * prompt + sum(steps[known] for known in near)
    yield {"mixed_ms": took, "alone_ms": alone, "share": alone / took, "prompt_ms": prompt}


def prompts() -> Iterator[Row]:
    decoder = eight()
    for count, length in ((1, 4096), (16, 256), (256, 16)):
        engine = engine_of(decoder, 256 * 4 + 300, ScheduleLimits(4096, 256))
        yield {"prompts": count, "tokens": length, "ms": prompt_ms(engine, decoder, count, length)}
        del engine
        free()
    engine = engine_of(decoder, 3 * blocks_of(17000), ScheduleLimits(8192, 1))
    (first,) = requests(decoder, 1, 16384, 1)
    times: list[float] = []
    for turn in range(5):
        engine.run([Request(f"{first.id}-{turn}", first.prompt, 1)])
        (more,) = requests(decoder, 1, 64, 1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.run([Request(more.id, first.prompt + more.prompt, 1)])
        times.append(1e3 * (time.perf_counter() - begin))
    yield {"prompts": 1, "tokens": "64 after 16k", "ms": median(times[1:])}


def layers() -> Iterator[Row]:
    narrow = {"layers": "80", "width": "1024", "heads": "8", "kv_heads": "8", "head_dim": "128"}
    shape = with_overrides(load("llama-3.1-8b"), {**narrow, "ffn": "2048", "vocab": "32000"})
    decoder = decode.decoder_of(shape)
    for captured in (True, False):
        for count in (1, 64):
            engine = engine_of(decoder, count * 20, ScheduleLimits(8192, count), captured)
            for request in requests(decoder, count, 64, 40):
                engine.add(request)
            yield {"captured": captured, "sequences": count, "ms": decode_ms(engine, count)}


def drawing() -> Iterator[Row]:
    decoder, count, greedy = eight(), 256, 0.0
    engine = engine_of(decoder, count * 12, ScheduleLimits(8192, count))
    for name, sampling in (
        ("greedy", Sampling()),
        ("T=1", Sampling(1.0)),
        ("T=.7 top_p=.95", Sampling(0.7, None, 0.95)),
        ("T=.7 top_k=50", Sampling(0.7, 50)),
    ):
        for request in requests(decoder, count, 64, 40, sampling):
            engine.add(request)
        milliseconds = decode_ms(engine, count)
        greedy = greedy or milliseconds
        yield {"draw": name, "ms": milliseconds, "over_greedy_ms": milliseconds - greedy}


_decoders: dict[str, Decoder] = {}


def eight() -> Decoder:
    """Llama 3.1 8B, of which several cases need one."""
    if not _decoders:
        _decoders["8B"] = decode.decoder_of(load("llama-3.1-8b"))
    return _decoders["8B"]


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


CASES = {
    "masks": masks,
    "latents": latents,
    "experts": experts,
    "layers": layers,
    "long": long,
    "mixed": mixed,
    "prompts": prompts,
    "drawing": drawing,
}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of the engine on one GPU.")
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="all by default")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    for case in options.cases or CASES:
        begin = time.perf_counter()
        for row in CASES[case]():
            rows.append({"case": case, **row})
            text = (f"{key} {round(v, 3) if isinstance(v, float) else v}" for key, v in row.items())
            print(f"{case:9}", ", ".join(text), flush=True)
        free()
        print(f"{case:9} took {time.perf_counter() - begin:.0f} s", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
