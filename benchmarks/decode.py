"""Generation on one GPU: decode and prefill beside what the GPU could do, and beside transformers.

    python benchmarks/decode.py [--model llama-3.1-8b] [--only one many most] [--json FILE]
    python benchmarks/decode.py --only invariant [--device cpu --model tiny]
    python benchmarks/decode.py --only drafts

one      Batch 1 at 1k tokens: tokens/s, as a share of reading all weights once a token.
many     Batch 64 at 1k tokens: the same, with the keys and values of all sequences.
most     Batch 256 at 1k tokens.
prefill  8k tokens: as a share of the matmul rate that is measured first.
invariant  What `--batch-invariant` costs: seconds of decode of 1 and of many sequences and of a
         prompt, with it as a multiple of without. Also on a CPU, in float32 and with smaller sizes.
drafts   What proposals cost: a decode step with 3 and 7 of them a sequence, none of which is right,
         beside one without, and the tokens that a step has to accept before drafts pay.
peer     transformers with a static cache, compiled, batch 1: tokens/s in the same run.

Random weights in bfloat16. All of it goes through the engine: scheduling, copies, draws. It exits
with 1 where decode of one sequence is below 0.75 of the limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import gpu

from fivefold.core.model import training_flops
from fivefold.core.model.kv_pages import blocks_of
from fivefold.core.model.presets import load, with_overrides
from fivefold.core.model.shape import Shape
from fivefold.core.plan.plan import PlanOptions
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.engine import Engine
from fivefold.generate.layout import LayoutEngine, mesh_of, plan_of, stage_of
from fivefold.generate.requests import Request, SequenceState
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.kernels.regions import compiled, eager

CONTEXT, NEW, LONG, MANY, MOST = 1024, 128, 8192, 64, 256
LEAST = 0.75


def bandwidth() -> float:
    """Bytes a second of a large sum: a read of memory."""
    numbers = torch.ones(1 << 30, device="cuda", dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        numbers.view(torch.float32).sum()  # sums of integers are slower than memory
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return numbers.nbytes / best


def decoder_of(shape: Shape) -> Decoder:
    decoder = from_config(shape, dtype=torch.bfloat16, device="cuda", fuse=compiled)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for each in decoder.parameters():
            each.normal_(0, 0.02, generator=generator)
    return decoder.requires_grad_(False)


def engine_of(decoder: Decoder, sequences: int, tokens: int) -> Engine:
    from fivefold.generate.cuda_graphs import GraphedForward  # Triton is there only with CUDA

    blocks = sequences * (blocks_of(tokens) + 1)
    drawn = DrawnTokens(sequences, torch.device("cuda"))
    forward = GraphedForward(decoder, blocks, drawn=drawn)
    return Engine(decoder.shape, forward, blocks, ScheduleLimits(LONG, sequences), drawn=drawn)


def prompts(shape: Shape, sequences: int, length: int, new: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(shape.vocab, (sequences, length), generator=generator).tolist()
    return [Request(f"{time.time_ns()}-{i}", tuple(row), new) for i, row in enumerate(rows)]


def decode(decoder: Decoder, sequences: int, speed: float) -> dict[str, float]:
    """Seconds of a decode step after prompts of the context, beside its limit."""
    shape, engine = decoder.shape, engine_of(decoder, sequences, CONTEXT + NEW)
    for request in prompts(shape, sequences, CONTEXT, NEW):
        engine.add(request)
    steps: list[float] = []
    while engine.busy:
        begin = time.perf_counter()
        drawn = engine.step()
        if len(drawn) == sequences:
            steps.append(time.perf_counter() - begin)
    seconds = median(steps[8:])  # the first ones compile and capture
    weights = sum(each.nbytes for each in decoder.parameters())
    if shape.tied is False and decoder.embed is not None:
        weights -= decoder.embed.weight.nbytes  # of which a row is read
    keys = sequences * (CONTEXT + NEW / 2) * 2 * shape.layers * shape.kv_heads * shape.head_dim * 2
    limit = (weights + keys) / speed
    return {
        "tokens_per_s": sequences / seconds,
        "ms": 1e3 * seconds,
        "limit_ms": 1e3 * limit,
        "share": limit / seconds,
    }


class WrongDrafter:
    """Proposes a token of the prompt, which is seldom right."""

    def __init__(self, count: int) -> None:
        self.count = count

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        return [sequence.request.prompt[0]] * min(most, self.count)


def drafts(decoder: Decoder) -> dict[str, float]:
    """Milliseconds of steps by sequences and proposals of each, and what has to be accepted."""
    found, shape = dict[str, float](), decoder.shape
    for sequences in (1, 8, 32):
        plain = decode(decoder, sequences, 1.0)["ms"]
        found[f"{sequences}"] = plain
        for count in (3, 7):
            ahead = engine_of(decoder, sequences, CONTEXT + NEW)
            blocks, limits = ahead.schedulers[0].pool.count, ScheduleLimits(LONG, sequences)
            engine = Engine(shape, ahead.forward, blocks, limits, drafter=WrongDrafter(count))
            for request in prompts(shape, sequences, CONTEXT, NEW):
                engine.add(request)
            steps: list[float] = []
            while engine.busy:
                begin, before = time.perf_counter(), engine.num_drafted
                engine.step()
                if engine.num_drafted - before == sequences * count:
                    steps.append(time.perf_counter() - begin)
            found[f"{sequences} x {count}"] = 1e3 * median(steps[8:])
            found[f"{sequences} x {count} pays from"] = 1e3 * median(steps[8:]) / plain - 1
    return found


def prefill(decoder: Decoder, rate: float) -> dict[str, float]:
    """Seconds to the first token after a long prompt."""
    shape, times = decoder.shape, list[float]()
    for number in range(4):
        engine = engine_of(decoder, 1, LONG + 1)
        (request,) = prompts(shape, 1, LONG, 1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.run([request])
        times += [time.perf_counter() - begin] * (number > 0)
    flops = training_flops(shape, LONG).total / 3 * LONG
    return {
        "ms": 1e3 * median(times),
        "tokens_per_s": LONG / median(times),
        "share": flops / median(times) / rate,
    }


@dataclass(frozen=True)
class Sizes:
    """What is timed on a device."""

    many: int
    prompt: int
    new: int


INVARIANT = {"cuda": Sizes(MANY, LONG, NEW), "cpu": Sizes(16, 512, 32)}


def invariant(shape: Shape, device: torch.device) -> dict[str, float]:
    """The ratios of times with and without batch invariance."""
    options = PlanOptions("tiny")  # its shape is replaced
    plan = replace(plan_of(shape, options), shape=replace(shape, mtp=0))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes, times = INVARIANT[device.type], list[tuple[float, float, float]]()
    for same in (False, True):
        mesh = mesh_of(plan, device, same)
        fuse = compiled if device.type == "cuda" else eager
        stage = stage_of(plan, mesh, dtype, same, fuse)
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for each in stage.model.parameters():
                each.normal_(0, 0.02, generator=generator)
        blocks = sizes.many * (blocks_of(CONTEXT) + 1) + blocks_of(sizes.prompt + 1)
        limits = ScheduleLimits(sizes.prompt, sizes.many)
        engine = LayoutEngine(plan, mesh, stage, blocks, limits, batch_invariant=same)
        one, many = (decode_seconds(engine, shape, count, sizes) for count in (1, sizes.many))
        times.append((one, many, prefill_seconds(engine, shape, sizes)))
    names = ("one", f"many ({sizes.many})", f"prefill ({sizes.prompt})")
    return {name: b / a for name, a, b in zip(names, *times, strict=True)}


def decode_seconds(engine: Engine, shape: Shape, sequences: int, sizes: Sizes) -> float:
    """The median step in which all sequences draw, after short prompts."""
    for request in prompts(shape, sequences, 4, sizes.new):
        engine.add(request)
    steps: list[float] = []
    while engine.busy:
        begin = time.perf_counter()
        if len(engine.step()) == sequences:
            steps.append(time.perf_counter() - begin)
    return median(steps[4:])


def prefill_seconds(engine: Engine, shape: Shape, sizes: Sizes) -> float:
    """To the first token after a long prompt."""
    times: list[float] = []
    for request in (prompts(shape, 1, sizes.prompt, 1)[0] for _ in range(3)):
        engine.renew()  # nothing is shared
        begin = time.perf_counter()
        engine.run([request])
        times.append(time.perf_counter() - begin)
    return median(times)


def peer(shape: Shape) -> dict[str, float]:
    """The package's own generate with a static cache and a compiled forward."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_seq,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("cuda"):
        model: Any = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    ids = torch.randint(shape.vocab, (1, CONTEXT), device="cuda")
    times = {}
    for new in (NEW, NEW // 2, NEW, NEW // 2):  # the first two compile
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            cache_implementation="static",
        )
        torch.cuda.synchronize()
        times[new] = time.perf_counter() - begin
    seconds = (times[NEW] - times[NEW // 2]) / (NEW - NEW // 2)
    return {"tokens_per_s": 1 / seconds, "ms": 1e3 * seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument(
        "--only", nargs="*", default=["one", "many", "most", "prefill", "invariant", "peer"]
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    said = parser.parse_args()
    if said.device == "cpu":
        ratios = invariant(
            with_overrides(load(said.model), {"max_seq": "2048"}), torch.device("cpu")
        )
        print(json.dumps({"invariant": ratios}))
        return 0
    if not torch.cuda.is_available():
        print("no GPU here: run this on a machine with one")
        return 0
    shape, speed, rate = load(said.model), bandwidth(), 1e12 * gpu.ceiling()
    print(f"reads {speed / 1e12:.2f} TB/s, matmuls {rate / 1e12:.0f} TFLOP/s", flush=True)
    found: dict[str, dict[str, float]] = {}
    if "invariant" in said.only:
        found["invariant"] = invariant(shape, torch.device("cuda"))
        print(json.dumps({"invariant": found["invariant"]}), flush=True)
        torch.cuda.empty_cache()
    decoder = decoder_of(shape)
    ways = {
        "one": lambda: decode(decoder, 1, speed),
        "many": lambda: decode(decoder, MANY, speed),
        "most": lambda: decode(decoder, MOST, speed),
        "prefill": lambda: prefill(decoder, rate),
        "drafts": lambda: drafts(decoder),
    }
    for name in (each for each in ways if each in said.only):
        found[name] = ways[name]()
        print(json.dumps({name: found[name]}), flush=True)
    if "peer" in said.only:
        del decoder
        torch.cuda.empty_cache()
        found["peer"] = peer(shape)
        print(json.dumps({"peer": found["peer"]}), flush=True)
    if said.json:
        said.json.write_text(json.dumps(found))
    return int(found.get("one", {"share": 1.0})["share"] < LEAST)


if __name__ == "__main__":
    sys.exit(main())
