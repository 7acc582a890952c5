"""Thousands of random requests of every kind of model: each token is that of the plain forward.

    python -m tests.gpu.random_requests [--requests 10000] [--device cpu]

Requests come in bursts, share beginnings, lose their blocks to others, and some are aborted. Greedy
tokens in float32 are compared with one forward of the full text without a cache; where the two
likeliest tokens are as near as rounding, either is right. At the end all blocks are free. It prints
a line for each model, and exits with 1 if a token is wrong or a block is missing.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.core.model.presets import load, with_overrides
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.engine import Engine
from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import Completion, Request
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.model import NOT_COUNTED, Decoder, TokenBatch
from fivefold.model.decoder import from_config

BLOCKS, SEQUENCES, LONGEST, CHECKED = 36, 16, 256, 64
NOISE = 2e-5  # of the largest logit
LATENT = {"head_dim": "24", "kv_heads": "8", "mla.kv_rank": "32", "mla.nope_dim": "16"}
MODELS = {
    "dense": ("tiny", {"heads": "8", "kv_heads": "2", "head_dim": "64"}),
    "experts": ("tiny-moe", {}),
    "groups": (
        "tiny-moe",
        {
            **{"moe.experts": "16", "moe.top_k": "4", "moe.groups": "4", "moe.groups_kept": "2"},
            **{"moe.score": "sigmoid", "moe.group_score": "top2", "moe.bias": "true"},
        },
    ),
    "latents": ("tiny", LATENT | {"mla.rope_dim": "8", "mla.value_dim": "16"}),
    "window": ("tiny", {"window": "24"}),
    "chunks": ("tiny", {"window": "24", "window_kind": "chunked", "global_every": "2"}),
    "caps": ("tiny", {"score_cap": "0.5", "logit_cap": "30"}),
    "sinks": ("tiny", {"sinks": "true", "window": "24", "global_every": "2"}),
    "normed": ("tiny", {"qk_norm": "head", "heads": "6", "kv_heads": "6", "head_dim": "40"}),
    "biases": (
        "gpt2",
        {"width": "96", "heads": "4", "kv_heads": "4", "head_dim": "24", "ffn": "128"},
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What was seen of a model's requests."""

    requests: int
    tokens: int
    ties: int
    wrong: int
    aborted: int
    preempted: int
    reused: int
    missing: int  # blocks

    @property
    def good(self) -> bool:
        """Whether nothing is wrong, and every way was taken."""
        return not self.wrong and not self.missing and min(self.aborted, self.preempted) > 0


def decoder_of(name: str, device: torch.device) -> Decoder:
    model, overrides = MODELS[name]
    sizes = {"layers": "2", "max_seq": str(LONGEST), "vocab": "256"}
    decoder = from_config(with_overrides(load(model), overrides | sizes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0, 0.3 if parameter.ndim > 1 else 1.0, generator=generator)
    return decoder.to(device).eval().requires_grad_(False)


def requests_of(name: str, count: int, dice: random.Random) -> list[Request]:
    beginnings = [[dice.randrange(256) for _ in range(dice.randint(1, 120))] for _ in range(6)]
    requests: list[Request] = []
    for number in range(count):
        beginning = dice.choice(beginnings)
        prompt = beginning[: dice.randint(1, len(beginning))]
        prompt += [dice.randrange(256) for _ in range(dice.randint(0, 40))]
        requests.append(Request(f"{name}-{number}", tuple(prompt), dice.randint(1, 40)))
    return requests


def engine_of(decoder: Decoder, device: torch.device) -> Engine:
    limits = ScheduleLimits(96, SEQUENCES)
    if device.type != "cuda":
        return Engine(decoder.shape, DecoderForward(decoder, BLOCKS), BLOCKS, limits)
    from fivefold.generate.cuda_graphs import GraphedForward  # Triton is there only with CUDA

    drawn = DrawnTokens(limits.tokens, device)
    forward = GraphedForward(decoder, BLOCKS, drawn=drawn)
    return Engine(decoder.shape, forward, BLOCKS, limits, drawn=drawn)


def run(engine: Engine, requests: Sequence[Request], dice: random.Random) -> dict[str, Completion]:
    """Add requests in bursts, abort some of them, and run all others to their end."""
    coming, active = list(reversed(requests)), set[str]()
    done: dict[str, Completion] = {}
    while coming or engine.busy:
        for _ in range(min(len(coming), dice.choice((0, 0, 1, 2, 5)) if len(active) < 48 else 0)):
            request = coming.pop()
            engine.add(request)
            active.add(request.id)
        ended = {row.id for row in engine.step() if row.reason is not None}
        if active - ended and dice.random() < 0.05:
            leaver = dice.choice(sorted(active - ended))
            engine.end(leaver, "cancelled")
            ended.add(leaver)
        done |= {id: engine.collect(id) for id in ended}
        active -= ended
    return done


@torch.inference_mode()
def plain_logits(decoder: Decoder, texts: Sequence[Sequence[int]]) -> Tensor:
    """Of all positions of some texts, (texts, length, V), without a cache."""
    length = max(map(len, texts))
    device = next(decoder.parameters()).device
    rows = torch.tensor([[*text, *[0] * (length - len(text))] for text in texts], device=device)
    positions = torch.arange(length, device=device).expand_as(rows)
    batch = TokenBatch(rows, torch.full_like(rows, NOT_COUNTED), positions)
    assert decoder.embed is not None and decoder.norm is not None and decoder.head is not None
    x_BSD = decoder.embed(rows, batch)
    x_BSD = decoder.run_blocks(decoder.blocks.values(), x_BSD, decoder.context(batch, x_BSD.dtype))
    return decoder.head.logits(decoder.norm(x_BSD))


def judged(
    decoder: Decoder, requests: Sequence[Request], done: dict[str, Completion]
) -> tuple[int, int, int]:
    """Tokens, those that rounding decided, and those that are wrong."""
    tokens = ties = wrong = 0
    pairs = [(request, done[request.id]) for request in requests]
    for start in range(0, len(pairs), CHECKED):
        group = pairs[start : start + CHECKED]
        logits = plain_logits(decoder, [(*r.prompt, *c.tokens) for r, c in group])
        for row_SV, (request, completion) in zip(logits, group, strict=True):
            count = len(completion.tokens)
            if completion.reason != "cancelled":
                expected = min(request.max_tokens, LONGEST - len(request.prompt))
                wrong += completion.reason != "length" or count != expected
            if not count:
                continue
            row_NV = row_SV[len(request.prompt) - 1 :][:count]
            highest = row_NV.max(1)
            chosen = torch.tensor(completion.tokens, device=row_NV.device)
            gaps = highest.values - row_NV.gather(1, chosen[:, None])[:, 0]
            other = chosen != highest.indices
            near = gaps <= NOISE * row_NV.abs().amax(1)
            tokens += count
            ties += int((other & near).sum())
            wrong += int((other & ~near).sum())
    return tokens, ties, wrong


def outcome_of(name: str, count: int, device: torch.device) -> Outcome:
    dice = random.Random(f"{name} {count}")
    plain = decoder_of(name, device)
    engine, requests = engine_of(copy.deepcopy(plain), device), requests_of(name, count, dice)
    done = run(engine, requests, dice)
    tokens, ties, wrong = judged(plain, requests, done)
    aborted = sum(completion.reason == "cancelled" for completion in done.values())
    reused = sum(completion.reused for completion in done.values())
    missing = BLOCKS - engine.schedulers[0].pool.num_free
    counts = (len(done), tokens, ties, wrong, aborted, engine.num_preempted, reused, missing)
    return Outcome(*counts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random requests beside the plain forward.")
    parser.add_argument("--requests", type=int, default=10_000, help="of all models together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("models", nargs="*", default=[*MODELS])
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    good = True
    for name in options.models:
        begin = time.perf_counter()
        outcome = outcome_of(name, options.requests // len(MODELS), torch.device(options.device))
        good &= outcome.good
        seconds = time.perf_counter() - begin
        print(
            f"{'pass' if outcome.good else 'FAIL'} {name:8} {outcome} {seconds:.0f} s", flush=True
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
