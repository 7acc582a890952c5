"""Proof of generation: prefill and decode against the plain forward of the whole text.

Every request runs alone, in chunks, batched with strangers, with so few blocks that it loses them
and is computed again, and over blocks that others have left. Each time the logits that a token was
drawn from are those of one forward of the whole text without a cache, and the tokens are the same.

In bfloat16 the same holds within a bound that is measured: `NARROW` times the largest error that
the plain forward itself has against float64. Tokens may differ there, and experts too, so that a
model with experts has no bound. What the ways differ by among themselves (`batch_diff`) is bounded
in every type, and must be zero where the engine is batch-invariant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.core.model import BLOCK, Shape, blocks_of
from fivefold.generate import (
    Completion,
    DecoderForward,
    Draw,
    Engine,
    Forward,
    Request,
    Sampling,
    ScheduleLimits,
    Watch,
    choose,
)
from fivefold.model import NOT_COUNTED, Decoder, TokenBatch, from_config, init_weights

TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
NARROW = 4.0
SPREAD = 0.1  # of noise on every weight: initial ones make logits that are nearly equal
BATCHED = ScheduleLimits(tokens=3 * BLOCK + 1)
NUM_WAYS = 4  # that have an engine of their own
MakeForward = Callable[[Decoder, int], Forward]
MakeEngine = Callable[[int, ScheduleLimits, Watch], Engine]
"""Of blocks, limits, and what is called with the logits that are drawn from."""


@dataclass(frozen=True)
class Observed:
    """Results of one rank: completions by mode and request, the logits they were sampled from, and
    counts of events."""

    completions: dict[str, dict[str, Completion]]
    logits: dict[str, dict[tuple[str, int], NDArray[Any]]]
    preempted: int
    reused: int
    cost: float | None = None  # of batch invariance: time with it, over that without


@dataclass(frozen=True)
class GeneratedVerdict:
    """Largest errors over all modes, and counts of events.

    `trained_err` is that of log-probabilities against the training forward in `trained_layout`.
    `batch_diff` is the largest difference of logits and log-probabilities between two ways. A bound
    is None where rounding may choose other experts. `tokens_bound`: tokens have to be equal.
    `batch_cost` is the time with batch invariance as a multiple of that without, where it was
    measured.
    """

    logit_err: float
    logprob_err: float
    tokens_equal: bool
    tolerance: float | None
    batch_invariant: bool
    batch_diff: float
    batch_bound: float | None
    tokens_bound: bool
    errors: dict[str, float]  # of logits, by way
    tokens: int  # drawn and compared
    preempted: int
    reused: int
    complete: bool  # every way has shown what it is there to show
    batch_cost: float | None = None
    trained_err: float = 0.0
    trained_layout: str | None = None

    @property
    def passed(self) -> bool:
        largest = max(self.logit_err, self.logprob_err, self.trained_err)
        near = self.tolerance is None or largest <= self.tolerance
        alike = self.batch_bound is None or self.batch_diff <= self.batch_bound
        return near and alike and self.complete and (self.tokens_equal or not self.tokens_bound)


class GeneratedTrial:
    """One model and its requests, the same number for each replica."""

    def __init__(self, shape: Shape, dtype: str, seed: int, replicas: int = 1) -> None:
        self.shape = replace(shape, mtp=0)
        self.dtype, self.seed = dtype, seed
        self.plain = self.decoder()
        self.requests = requests_of(self.shape, seed, replicas)
        needs = sorted(blocks_of(self._length(request)) for request in self.requests)
        self.most = needs[-1]
        # Short models have nothing to lose and nothing to share: two sequences must want more than
        # three blocks each, and a prompt must fill one and go on.
        self.can_preempt = needs[-2] > 3
        self.can_share = max(len(request.prompt) for request in self.requests) > BLOCK

    def _length(self, request: Request) -> int:
        return min(len(request.prompt) + request.max_tokens, self.shape.max_seq)

    def full_weight(self, name: str) -> Tensor | None:
        """A weight or buffer of the plain model; None if it does not exist."""
        tensors = dict(self.plain.named_parameters()) | dict(self.plain.named_buffers())
        return tensors[name].detach() if name in tensors else None

    def run(self, make: MakeForward = DecoderForward) -> GeneratedVerdict:
        """Run every mode on this device, and compare. `make` creates the forward of a decoder."""

        def engine(blocks: int, limits: ScheduleLimits, watch: Watch) -> Engine:
            return Engine(self.shape, make(self.decoder(), blocks), blocks, limits, watch)

        return self.verdict([self.observe(engine)])

    def observe(
        self, make: MakeEngine, tick: Callable[[str], None] = lambda mode_name: None
    ) -> Observed:
        """Run every mode on this rank."""
        seen: dict[str, dict[tuple[str, int], NDArray[Any]]] = {}
        completions: dict[str, dict[str, Completion]] = {}
        preempted = reused = 0
        roomy = self.most * len(self.requests)
        ways = {
            "alone": (roomy, ScheduleLimits(tokens=4 * BLOCK * self.most, sequences=1)),
            "in chunks": (roomy, ScheduleLimits(tokens=5, sequences=1)),
            "batched": (roomy, BATCHED),
            "preempted": (self.most, ScheduleLimits(tokens=2 * BLOCK)),
        }
        for mode, (blocks, limits) in ways.items():
            tick(mode)
            logits: dict[tuple[str, int], NDArray[Any]] = {}
            engine = make(blocks, limits, _keeper(logits))
            completions[mode], seen[mode] = engine.run(self.requests), dict(logits)
            preempted += engine.num_preempted
            if mode == "batched":  # once more, over blocks that are there
                completions["prefix shared"] = engine.run(self.requests)
                seen["prefix shared"] = dict(logits)
                reused = sum(
                    completion.reused for completion in completions["prefix shared"].values()
                )
        return Observed(completions, seen, preempted, reused)

    def seconds(self, make: MakeEngine) -> float:
        """Seconds of the batched requests: the minimum of two runs, since kernels start slowly."""
        engine = make(self.most * len(self.requests), BATCHED, lambda *_: None)
        times = list[float]()
        for _ in range(2):
            engine.renew()
            began = time.perf_counter()
            engine.run(self.requests)
            times.append(time.perf_counter() - began)
        return min(times)

    def decoder(self) -> Decoder:
        """A copy of the model, with its weights."""
        decoder = from_config(self.shape, dtype=getattr(torch, self.dtype))
        init_weights(decoder, self.shape, self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in decoder.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(SPREAD * noise.to(parameter.dtype))
        return decoder.eval()

    def verdict(self, ranks: Sequence[Observed], batch_invariant: bool = False) -> GeneratedVerdict:
        """Compare the results of ranks with the plain forward; all must have the same tokens."""
        first, plain = ranks[0], dict[tuple[int, ...], Tensor]()
        narrow = self.dtype not in TOLERANCE
        equal = all(rank.completions == first.completions for rank in ranks)
        errors, logprob_err, drawn = dict.fromkeys(first.completions, 0.0), 0.0, 0
        for mode, completions in first.completions.items():
            seen = _all_logits(ranks, mode)
            for request in self.requests:
                done, start = completions[request.id], len(request.prompt) - 1
                text = (*request.prompt, *done.tokens)
                if text not in plain:
                    plain[text] = logits_of(self.plain, text)
                equal &= done.tokens == first.completions["alone"][request.id].tokens
                drawn += len(done.tokens)
                for index, token in enumerate(done.tokens):
                    expected_V = plain[text][start + index]
                    ours_V = torch.from_numpy(seen[request.id, index])
                    wrong = (ours_V - expected_V).abs().max().item()
                    errors[mode] = larger(errors[mode], wrong)
                    draw = Draw(request.sampling, request.id, index)
                    ((again, _),) = choose(expected_V[None], [draw])
                    equal &= again == token or narrow
                    logprob = logprob_of(expected_V, token)
                    logprob_err = larger(logprob_err, abs(done.logprobs[index] - logprob))
        largest = 0.0
        for error in errors.values():
            largest = larger(largest, error)
        complete = (first.preempted > 0 or not self.can_preempt) and (
            first.reused > 0 or not self.can_share
        )
        bound = self._tolerance(plain)
        apart = None if bound is None else 2 * bound  # each way is so far from the plain forward
        batches = (batch_invariant, batch_difference(ranks), 0.0 if batch_invariant else apart)
        shown = (batch_invariant or not narrow, errors, drawn, first.preempted, first.reused)
        shown = (*shown, complete, first.cost)
        return GeneratedVerdict(largest, logprob_err, equal, bound, *batches, *shown)

    def _tolerance(self, plain: Mapping[tuple[int, ...], Tensor]) -> float | None:
        """The bound of logits; for narrow types from the logits of the plain forward."""
        if self.dtype in TOLERANCE:
            return TOLERANCE[self.dtype]
        if self.shape.moe is not None:
            return None
        exact = from_config(self.shape, dtype=torch.float64)
        exact.load_state_dict(self.plain.state_dict())
        wrong = [
            (logits_of(exact.eval(), text) - plain_logits).abs().max()
            for text, plain_logits in plain.items()
        ]
        return NARROW * max(gap.item() for gap in wrong)


def logits_of(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits of the plain forward of a full text. Where longer texts are rotated otherwise, each
    token has the logits of the text up to it."""
    short = decoder.shape.outgrown_at
    if short is None or len(tokens) <= short:
        return _forward(decoder, tokens)
    return torch.cat([_forward(decoder, tokens[:short]), _forward(decoder, tokens)[short:]])


@torch.no_grad()
def _forward(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    assert decoder.embed is not None and decoder.norm is not None and decoder.head is not None
    row, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    batch = TokenBatch(row, torch.full_like(row, NOT_COUNTED), positions)
    x_BSD = decoder.embed(row, batch)
    context = decoder.context(batch, x_BSD.dtype)
    x_BSD = decoder.norm(decoder.run_blocks(decoder.blocks.values(), x_BSD, context))
    return decoder.head.logits(x_BSD[0])


def logprob_of(logits_V: Tensor, token: int) -> float:
    """Log-probability of a token, in float32 or wider."""
    wide_V = logits_V.to(torch.promote_types(logits_V.dtype, torch.float32))
    return wide_V.log_softmax(0)[token].item()


def _all_logits(ranks: Sequence[Observed], mode: str) -> dict[tuple[str, int], NDArray[Any]]:
    return {key: logits for rank in ranks for key, logits in rank.logits[mode].items()}


def batch_difference(ranks: Sequence[Observed]) -> float:
    """Largest difference of logits and log-probabilities to those of a request alone, up to the
    first token that differs."""
    runs, apart = ranks[0].completions, 0.0
    alone, logits_alone = runs["alone"], _all_logits(ranks, "alone")
    for mode, completions in runs.items():
        logits = _all_logits(ranks, mode)
        for id, done in completions.items():
            pairs = zip(done.tokens, alone[id].tokens, strict=False)
            for index, (token, other) in enumerate(pairs):
                gap = logits[id, index] - logits_alone[id, index]
                apart = larger(apart, float(abs(gap).max()))
                if token != other:
                    break
                gap = done.logprobs[index] - alone[id].logprobs[index]
                apart = larger(apart, abs(gap))
    return apart


def _keeper(logits: dict[tuple[str, int], NDArray[Any]]) -> Watch:
    def keep(id: str, index: int, logits_V: Tensor) -> None:
        logits[id, index] = logits_V.cpu().numpy().copy()

    return keep


def larger(value: float, other: float) -> float:
    """Maximum of two numbers; NaN counts as infinite."""
    return max(value, other) if other == other else float("inf")


def requests_of(shape: Shape, seed: int, replicas: int) -> list[Request]:
    """Requests of a trial."""
    return [request for number in range(replicas) for request in _requests(shape, seed, number)]


def _requests(shape: Shape, seed: int, number: int) -> list[Request]:
    """Prompts of several lengths, two of which begin alike, greedy and drawn: for one replica."""
    generator = torch.Generator().manual_seed(seed + 1 + 1000 * number)
    unit = max(2, min(BLOCK, shape.max_seq // 5))
    lengths = [min(n, shape.max_seq - 1) for n in (1, unit - 1, 3 * unit + 1, 2 * unit, 3 * unit)]
    drawn = torch.randint(0, shape.vocab, (len(lengths), 4 * unit), generator=generator).tolist()
    drawn[3][: 2 * unit] = drawn[2][: 2 * unit]  # the same beginning
    num_tokens = max(2, unit // 3)  # tokens that are drawn: some go on into another block
    samplings = (Sampling(), Sampling(1.0, seed=seed), Sampling(0.8, 20, 0.9, seed))
    return [
        Request(f"request {number}.{i}", tuple(tokens[:length]), num_tokens + i, samplings[i % 3])
        for i, (length, tokens) in enumerate(zip(lengths, drawn, strict=True))
    ]
