"""Proof of generation: prefill and decode against the plain forward of the whole text.

Every request runs alone, in chunks, batched with strangers, with so few blocks that it loses them
and is computed again, and over blocks that others have left. Each time the logits that a token was
drawn from are those of one forward of the whole text without a cache, and the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.core.shape import Shape
from fivefold.generate.blocks import BLOCK, blocks_of
from fivefold.generate.engine import DecoderForward, Engine, Forward
from fivefold.generate.requests import Completion, Request, Sampling
from fivefold.generate.sampling import choose
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.model.batch import NOT_COUNTED, TokenBatch
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.init import init_weights

TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
SPREAD = 0.1  # of noise on every weight: initial ones make logits that are nearly equal
NUM_WAYS = 4  # that have an engine of their own
MakeForward = Callable[[Decoder, int], Forward]


@dataclass(frozen=True)
class GeneratedVerdict:
    """The largest errors over all ways to run, and what these ways have shown to happen."""

    logit_err: float
    logprob_err: float
    tokens_equal: bool
    tolerance: float
    errors: dict[str, float]  # of logits, by way
    tokens: int  # drawn and compared
    preempted: int
    reused: int

    @property
    def passed(self) -> bool:
        small = max(self.logit_err, self.logprob_err) <= self.tolerance
        return small and self.tokens_equal and self.preempted > 0 and self.reused > 0


class GeneratedTrial:
    """One model and its requests. `make` is what makes a forward of a decoder and blocks."""

    def __init__(
        self, shape: Shape, dtype: str, seed: int, make: MakeForward = DecoderForward
    ) -> None:
        self.shape, self.make = replace(shape, mtp=0), make
        self.dtype, self.seed = dtype, seed
        self.plain = self._decoder()
        self.requests = _requests(self.shape, seed)
        self.most = max(blocks_of(len(each.prompt) + each.max_tokens) for each in self.requests)

    def run(self, tick: Callable[[], None] = lambda: None) -> GeneratedVerdict:
        """Run every way and compare."""
        seen: dict[str, dict[tuple[str, int], Tensor]] = {}
        found: dict[str, dict[str, Completion]] = {}
        preempted = reused = 0
        roomy = self.most * len(self.requests)
        ways = {
            "alone": (roomy, ScheduleLimits(tokens=4 * BLOCK * self.most, sequences=1)),
            "in chunks": (roomy, ScheduleLimits(tokens=5, sequences=1)),
            "batched": (roomy, ScheduleLimits(tokens=3 * BLOCK + 1)),
            "preempted": (self.most + 1, ScheduleLimits(tokens=2 * BLOCK)),
        }
        for way, (blocks, limits) in ways.items():
            logits: dict[tuple[str, int], Tensor] = {}
            watch = _keeper(logits)
            engine = Engine(self.shape, self.make(self._decoder(), blocks), blocks, limits, watch)
            found[way], seen[way] = engine.run(self.requests), dict(logits)
            preempted += engine.scheduler.num_preempted
            if way == "batched":  # once more, over blocks that are there
                found["prefix shared"] = engine.run(self.requests)
                seen["prefix shared"] = dict(logits)
                reused = sum(each.reused for each in found["prefix shared"].values())
            tick()
        return self._verdict(found, seen, preempted, reused)

    def _decoder(self) -> Decoder:
        decoder = from_config(self.shape, dtype=getattr(torch, self.dtype))
        init_weights(decoder, self.shape, self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for each in decoder.parameters():
                noise = torch.randn(each.shape, generator=generator, dtype=torch.float64)
                each.add_(SPREAD * noise.to(each.dtype))
        return decoder.eval()

    @torch.no_grad()
    def _logits(self, tokens: list[int]) -> Tensor:
        """Of the plain forward of a whole text."""
        decoder = self.plain
        assert decoder.embed is not None and decoder.norm is not None and decoder.head is not None
        row, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
        batch = TokenBatch(row, torch.full_like(row, NOT_COUNTED), positions)
        x_BSD = decoder.embed(row, batch)
        context = decoder.context(batch, x_BSD.dtype)
        x_BSD = decoder.norm(decoder.run_blocks(decoder.blocks.values(), x_BSD, context))
        return decoder.head.matmul(x_BSD[0], decoder.head.weight, None)

    def _verdict(
        self,
        found: dict[str, dict[str, Completion]],
        seen: dict[str, dict[tuple[str, int], Tensor]],
        preempted: int,
        reused: int,
    ) -> GeneratedVerdict:
        errors, logprob_err, equal, drawn = dict.fromkeys(found, 0.0), 0.0, True, 0
        for request in self.requests:
            for way, completions in found.items():
                done, first = completions[request.id], len(request.prompt) - 1
                logits_SV = self._logits([*request.prompt, *done.tokens])
                equal &= done.tokens == found["alone"][request.id].tokens
                drawn += len(done.tokens)
                for index, token in enumerate(done.tokens):
                    expected_V = logits_SV[first + index]
                    ours_V = seen[way][request.id, index]
                    wrong = (ours_V - expected_V).abs().max().item()
                    errors[way] = _larger(errors[way], wrong)
                    again, logprob = choose(expected_V, request.sampling, request.id, index)
                    equal &= again == token
                    if again == token:
                        wrong = abs(done.logprobs[index] - logprob)
                        logprob_err = _larger(logprob_err, wrong)
        largest = 0.0
        for each in errors.values():
            largest = _larger(largest, each)
        bound = TOLERANCE[self.dtype]
        return GeneratedVerdict(
            largest, logprob_err, equal, bound, errors, drawn, preempted, reused
        )


def _keeper(logits: dict[tuple[str, int], Tensor]) -> Callable[[str, int, Tensor], None]:
    def keep(id: str, index: int, logits_V: Tensor) -> None:
        logits[id, index] = logits_V.clone()

    return keep


def _larger(one: float, other: float) -> float:
    """The larger number; what is no number counts as infinite."""
    return max(one, other) if other == other else float("inf")


def _requests(shape: Shape, seed: int) -> list[Request]:
    """Prompts of several lengths, two of which begin alike, greedy and drawn."""
    generator = torch.Generator().manual_seed(seed + 1)
    unit = max(2, min(BLOCK, shape.max_seq // 5))
    lengths = (1, unit - 1, 3 * unit + 1, 2 * unit, 3 * unit)
    drawn = torch.randint(0, shape.vocab, (len(lengths), 4 * unit), generator=generator).tolist()
    drawn[3][: 2 * unit] = drawn[2][: 2 * unit]  # the same beginning
    samplings = (Sampling(), Sampling(1.0, seed=seed), Sampling(0.8, 20, 0.9, seed))
    return [
        Request(f"request {i}", tuple(tokens[:length]), unit + i, samplings[i % len(samplings)])
        for i, (length, tokens) in enumerate(zip(lengths, drawn, strict=True))
    ]
