"""Decode steps and prompts of many sizes on one GPU, with which serving plans are calibrated.

    python benchmarks/serving_points.py [--model llama-3.1-8b] [--seconds 240] [--json FILE]

A line for each size: sequences, context and the median milliseconds of a step in which all of them
draw; the tokens of a prompt and the milliseconds to its first token; or sequences that draw in the
step of a prompt, with the milliseconds of the step and those until the host has issued it: where
both are as long, the GPU waits for the host. Steps with prompts are captured as a server does.
Random weights in bfloat16, all of it through the engine or its forward. Sizes that begin after
`--seconds` are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent))

import decode as decoding

from fivefold.core.model.kv_pages import blocks_of
from fivefold.core.model.presets import load
from fivefold.generate.forward import DecoderForward
from fivefold.generate.piecewise import PiecewiseSteps, sizes_up_to
from fivefold.generate.requests import SequenceChunk, StepBatch
from fivefold.model.decoder import Decoder

NEW = 40
DECODE = (
    *((4, 1024), (32, 1024), (128, 1024), (8, 1024), (16, 4096), (256, 256), (1, 1024)),
    *((64, 1024), (16, 1024), (256, 1024), (64, 4096), (1, 16384), (8, 16384)),
)
PROMPTS = (512, 2048)
CONTEXT = 1024  # of sequences that draw beside a prompt
MIXED = ((0, 1024), (8, 1024), (32, 1024), (64, 1024), (32, 256), (32, 4096))


def decode_ms(decoder: Decoder, sequences: int, context: int) -> float:
    """The median step in which all sequences draw."""
    new = NEW + sequences * context // decoding.LONG  # the first go on until the last begin
    engine = decoding.engine_of(decoder, sequences, context + new)
    for request in decoding.prompts(decoder.shape, sequences, context, new):
        engine.add(request)
    steps: list[float] = []
    while engine.busy:
        begin = time.perf_counter()
        if len(engine.step()) == sequences:
            steps.append(time.perf_counter() - begin)
    return 1e3 * median(steps[8:])  # the first ones compile and capture


def prompt_ms(decoder: Decoder, length: int) -> float:
    """To the first token of a prompt."""
    times: list[float] = []
    for _ in range(3):
        engine = decoding.engine_of(decoder, 1, length + 1)
        requests = decoding.prompts(decoder.shape, 1, length, 1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.run(requests)
        times.append(time.perf_counter() - begin)
    return 1e3 * median(times[1:])


def mixed_ms(decoder: Decoder, sequences: int, prompt: int) -> tuple[float, float]:
    """A step with one prompt beside sequences that draw, and how long the host issues it."""
    longest = blocks_of(max(CONTEXT, prompt) + 1)
    forward = decoding.engine_of(decoder, sequences + 1, max(CONTEXT, prompt) + 1).forward
    assert isinstance(forward, DecoderForward)
    if sequences + prompt <= sizes_up_to(decoding.LONG)[-1]:
        forward = PiecewiseSteps(forward, sizes_up_to(sequences + prompt)[-1:])
    tables = [tuple(range(i * longest, (i + 1) * longest)) for i in range(sequences + 1)]
    chunks = [
        SequenceChunk(str(i), (1,), CONTEXT, table, samples=True)
        for i, table in enumerate(tables[:-1])
    ]
    chunks.append(SequenceChunk("prompt", (1,) * prompt, 0, tables[-1], samples=True))
    whole, issued = list[float](), list[float]()
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        forward(StepBatch(tuple(chunks)))
        issued.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - begin)
    return 1e3 * median(whole[3:]), 1e3 * median(issued[3:])


def measured(decoder: Decoder, kind: str, sequences: int, tokens: int) -> dict[str, float]:
    """One line."""
    if kind == "decode":
        found = decode_ms(decoder, sequences, tokens)
        return {"sequences": sequences, "tokens": tokens, "ms": found}
    if kind == "prompt":
        return {"prompts": 1, "tokens": tokens, "ms": prompt_ms(decoder, tokens)}
    whole, host = mixed_ms(decoder, sequences, tokens)
    return {"sequences": sequences, "prompt": tokens, "ms": whole, "host_ms": host}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--json", type=Path)
    said = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: run this on a machine with one")
        return 0
    began, speed = time.monotonic(), decoding.bandwidth()
    print(f"{said.model}: reads {speed / 1e12:.2f} TB/s", flush=True)
    decoder, rows = decoding.decoder_of(load(said.model)), list[dict[str, float]]()
    todo = [("decode", *each) for each in DECODE[:7]] + [("prompt", 1, each) for each in PROMPTS]
    todo += [("mixed", *each) for each in MIXED] + [("decode", *each) for each in DECODE[7:]]
    for kind, sequences, tokens in todo:
        if time.monotonic() - began > said.seconds:
            break
        rows.append(measured(decoder, kind, sequences, tokens))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    if said.json:
        said.json.write_text(json.dumps({"model": said.model, "bytes_per_s": speed, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
