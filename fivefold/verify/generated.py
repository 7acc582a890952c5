"""Proof of generation: prefill and decode against the plain forward of the whole text.

Every request runs alone, in chunks, batched with strangers, with so few blocks that it loses them
and is computed again, and over blocks that others have left. Each time the logits that a token was
drawn from are those of one forward of the whole text without a cache, and the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.core.shape import Shape
from fivefold.generate.blocks import BLOCK, blocks_of
from fivefold.generate.engine import DecoderForward, Engine, Forward, Watch
from fivefold.generate.requests import Completion, Request, Sampling
from fivefold.generate.sampling import Draw, choose
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.model.batch import NOT_COUNTED, TokenBatch
from fivefold.model.decoder import Decoder, from_config
from fivefold.model.init import init_weights

TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
SPREAD = 0.1  # of noise on every weight: initial ones make logits that are nearly equal
NUM_WAYS = 4  # that have an engine of their own
MakeForward = Callable[[Decoder, int], Forward]
MakeEngine = Callable[[int, ScheduleLimits, Watch], Engine]
"""Of blocks, limits, and what is called with the logits that are drawn from."""


@dataclass(frozen=True)
class Observed:
    """What one rank has seen: completions by way and request, the logits that it has drawn from,
    and what these ways have shown to happen."""

    found: dict[str, dict[str, Completion]]
    logits: dict[str, dict[tuple[str, int], NDArray[Any]]]
    preempted: int
    reused: int


@dataclass(frozen=True)
class GeneratedVerdict:
    """The largest errors over all ways to run, and what these ways have shown to happen.

    `trained_err` is that of log-probabilities against the training forward in `trained_layout`.
    """

    logit_err: float
    logprob_err: float
    tokens_equal: bool
    tolerance: float
    errors: dict[str, float]  # of logits, by way
    tokens: int  # drawn and compared
    preempted: int
    reused: int
    complete: bool  # every way has shown what it is there to show
    trained_err: float = 0.0
    trained_layout: str | None = None

    @property
    def passed(self) -> bool:
        largest = max(self.logit_err, self.logprob_err, self.trained_err)
        return largest <= self.tolerance and self.tokens_equal and self.complete


class GeneratedTrial:
    """One model and its requests, as many for each replica."""

    def __init__(self, shape: Shape, dtype: str, seed: int, replicas: int = 1) -> None:
        self.shape = replace(shape, mtp=0)
        self.dtype, self.seed = dtype, seed
        self.plain = self.decoder()
        self.requests = requests_of(self.shape, seed, replicas)
        needs = sorted(blocks_of(self._length(each)) for each in self.requests)
        self.most = needs[-1]
        # Short models have nothing to lose and nothing to share: two sequences must want more than
        # three blocks each, and a prompt must fill one and go on.
        self.can_preempt = needs[-2] > 3
        self.can_share = max(len(each.prompt) for each in self.requests) > BLOCK

    def _length(self, request: Request) -> int:
        return min(len(request.prompt) + request.max_tokens, self.shape.max_seq)

    def full_weight(self, name: str) -> Tensor | None:
        """A weight or buffer of the plain model; None if it has no such."""
        found = dict(self.plain.named_parameters()) | dict(self.plain.named_buffers())
        return found[name].detach() if name in found else None

    def run(self, make: MakeForward = DecoderForward) -> GeneratedVerdict:
        """Run every way on this device and compare. `make` makes a forward of a decoder."""

        def engine(blocks: int, limits: ScheduleLimits, watch: Watch) -> Engine:
            return Engine(self.shape, make(self.decoder(), blocks), blocks, limits, watch)

        return self.verdict([self.observe(engine)])

    def observe(self, make: MakeEngine, tick: Callable[[str], None] = lambda way: None) -> Observed:
        """Run every way on this rank."""
        seen: dict[str, dict[tuple[str, int], NDArray[Any]]] = {}
        found: dict[str, dict[str, Completion]] = {}
        preempted = reused = 0
        roomy = self.most * len(self.requests)
        ways = {
            "alone": (roomy, ScheduleLimits(tokens=4 * BLOCK * self.most, sequences=1)),
            "in chunks": (roomy, ScheduleLimits(tokens=5, sequences=1)),
            "batched": (roomy, ScheduleLimits(tokens=3 * BLOCK + 1)),
            "preempted": (self.most, ScheduleLimits(tokens=2 * BLOCK)),
        }
        for way, (blocks, limits) in ways.items():
            tick(way)
            logits: dict[tuple[str, int], NDArray[Any]] = {}
            engine = make(blocks, limits, _keeper(logits))
            found[way], seen[way] = engine.run(self.requests), dict(logits)
            preempted += engine.num_preempted
            if way == "batched":  # once more, over blocks that are there
                found["prefix shared"] = engine.run(self.requests)
                seen["prefix shared"] = dict(logits)
                reused = sum(each.reused for each in found["prefix shared"].values())
        return Observed(found, seen, preempted, reused)

    def decoder(self) -> Decoder:
        """A new copy of the model, with its weights."""
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

    def verdict(self, ranks: Sequence[Observed]) -> GeneratedVerdict:
        """Compare what the ranks have seen with the plain forward; all have the same tokens."""
        first, plain = ranks[0], dict[tuple[int, ...], Tensor]()
        equal = all(each.found == first.found for each in ranks)
        errors, logprob_err, drawn = dict.fromkeys(first.found, 0.0), 0.0, 0
        for way, completions in first.found.items():
            seen = {key: each for rank in ranks for key, each in rank.logits[way].items()}
            for request in self.requests:
                done, start = completions[request.id], len(request.prompt) - 1
                text = (*request.prompt, *done.tokens)
                if text not in plain:
                    plain[text] = self._logits(list(text))
                equal &= done.tokens == first.found["alone"][request.id].tokens
                drawn += len(done.tokens)
                for index, token in enumerate(done.tokens):
                    expected_V = plain[text][start + index]
                    ours_V = torch.from_numpy(seen[request.id, index])
                    wrong = (ours_V - expected_V).abs().max().item()
                    errors[way] = larger(errors[way], wrong)
                    draw = Draw(request.sampling, request.id, index)
                    ((again, logprob),) = choose(expected_V[None], [draw])
                    equal &= again == token
                    if again == token:
                        logprob_err = larger(logprob_err, abs(done.logprobs[index] - logprob))
        largest = 0.0
        for each in errors.values():
            largest = larger(largest, each)
        complete = (first.preempted > 0 or not self.can_preempt) and (
            first.reused > 0 or not self.can_share
        )
        bound = TOLERANCE[self.dtype]
        shown = (first.preempted, first.reused, complete)
        return GeneratedVerdict(largest, logprob_err, equal, bound, errors, drawn, *shown)


def _keeper(logits: dict[tuple[str, int], NDArray[Any]]) -> Watch:
    def keep(id: str, index: int, logits_V: Tensor) -> None:
        logits[id, index] = logits_V.cpu().numpy().copy()

    return keep


def larger(one: float, other: float) -> float:
    """The larger number; what is no number counts as infinite."""
    return max(one, other) if other == other else float("inf")


def requests_of(shape: Shape, seed: int, replicas: int) -> list[Request]:
    """Those of a trial."""
    return [each for number in range(replicas) for each in _requests(shape, seed, number)]


def _requests(shape: Shape, seed: int, number: int) -> list[Request]:
    """Prompts of several lengths, two of which begin alike, greedy and drawn: for one replica."""
    generator = torch.Generator().manual_seed(seed + 1 + 1000 * number)
    unit = max(2, min(BLOCK, shape.max_seq // 5))
    lengths = [min(n, shape.max_seq - 1) for n in (1, unit - 1, 3 * unit + 1, 2 * unit, 3 * unit)]
    drawn = torch.randint(0, shape.vocab, (len(lengths), 4 * unit), generator=generator).tolist()
    drawn[3][: 2 * unit] = drawn[2][: 2 * unit]  # the same beginning
    more = max(2, unit // 3)  # tokens that are drawn: some go on into another block
    samplings = (Sampling(), Sampling(1.0, seed=seed), Sampling(0.8, 20, 0.9, seed))
    return [
        Request(f"request {number}.{i}", tuple(tokens[:length]), more + i, samplings[i % 3])
        for i, (length, tokens) in enumerate(zip(lengths, drawn, strict=True))
    ]
