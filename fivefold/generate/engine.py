"""The engine: requests in, tokens out, one step at a time.

The forward is a seam: it takes a `StepBatch` of plain numbers and returns the logits of the tokens
that are to be followed. On one device that is `DecoderForward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.core.shape import Shape
from fivefold.generate.blocks import BlockPool
from fivefold.generate.cache import KvCache, PagedKernel, attend_pages, step_tensors
from fivefold.generate.requests import (
    Completion,
    DrawnToken,
    Reason,
    Request,
    SequenceState,
    StepBatch,
)
from fivefold.generate.sampling import choose
from fivefold.generate.scheduler import ScheduleLimits, Scheduler
from fivefold.model.decoder import Decoder

Forward = Callable[[StepBatch], Tensor]
"""The logits, (sequences that sample, V), in float32 or wider."""
Watch = Callable[[str, int, Tensor], None]
"""Called with a request, an index in its completion, and the logits that are drawn from."""


class DecoderForward:
    """The forward on one device. It takes the decoder over: its attention reads pages now."""

    def __init__(self, decoder: Decoder, blocks: int, kernel: PagedKernel = attend_pages) -> None:
        self.decoder = decoder.eval()
        self.cache = KvCache(decoder, blocks, kernel)

    @torch.inference_mode()
    def __call__(self, step: StepBatch) -> Tensor:
        decoder = self.decoder
        assert decoder.embed is not None and decoder.norm is not None and decoder.head is not None
        tensors = step_tensors(step, decoder.head.weight.device)
        self.cache.begin(tensors)
        x_1TD = decoder.embed(tensors.batch.tokens, tensors.batch)
        context = decoder.context(tensors.batch, x_1TD.dtype)
        x_1TD = decoder.run_blocks(decoder.blocks.values(), x_1TD, context)
        x_ND = decoder.norm(x_1TD[0, tensors.sampled])
        logits_NV = decoder.head.matmul(x_ND, decoder.head.weight, None)
        return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))


class Engine:
    """Requests that wait and run, and those that have ended and were not yet collected."""

    def __init__(
        self,
        shape: Shape,
        forward: Forward,
        blocks: int,
        limits: ScheduleLimits | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.shape, self.forward, self.watch = shape, forward, watch
        self.scheduler = Scheduler(BlockPool(blocks), limits or ScheduleLimits(), shape.max_seq)
        self._sequences: dict[str, SequenceState] = {}
        self._ended: dict[str, Completion] = {}

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._sequences)

    def add(self, request: Request) -> None:
        """Queue a request; refuses one that the model or the cache cannot take."""
        request.check(self.shape.vocab, self.shape.max_seq)
        if request.id in self._sequences or request.id in self._ended:
            raise FivefoldError(f"request {request.id!r} is there already: give another id")
        self._sequences[request.id] = self.scheduler.add(request)

    def step(self) -> list[DrawnToken]:
        """Run one forward; returns the tokens that were drawn from it."""
        batch = self.scheduler.schedule()
        if not batch.chunks:
            return []
        sequences = [self._sequences[chunk.id] for chunk in batch.chunks]
        logits_NV = self.forward(batch)
        self.scheduler.computed(batch, sequences)
        pairs = zip(batch.chunks, sequences, strict=True)
        sampled = [sequence for chunk, sequence in pairs if chunk.samples]
        return [self._draw(*each) for each in zip(sampled, logits_NV, strict=True)]

    def _draw(self, sequence: SequenceState, logits_V: Tensor) -> DrawnToken:
        request, index = sequence.request, len(sequence.logprobs)
        if self.watch is not None:
            self.watch(request.id, index, logits_V)
        token, logprob = choose(logits_V, request.sampling, request.id, index)
        reason = sequence.append(token, logprob)
        if reason is not None:
            self.end(request.id, reason)
        return DrawnToken(request.id, index, token, logprob, reason)

    def end(self, id: str, reason: Reason) -> None:
        """End a request now, and free its blocks; what it has so far is its completion."""
        sequence = self._sequences.pop(id)
        self.scheduler.remove(sequence)
        self._ended[id] = Completion(
            id,
            tuple(sequence.drawn),
            tuple(sequence.logprobs),
            reason,
            sequence.reused,
            sequence.preempted,
        )

    def collect(self, id: str) -> Completion:
        """The completion of a request that has ended, once."""
        return self._ended.pop(id)

    def run(self, requests: Iterable[Request]) -> dict[str, Completion]:
        """All completions of some requests, by id."""
        ids: list[str] = []
        for request in requests:
            self.add(request)
            ids.append(request.id)
        while self.busy:
            self.step()
        return {id: self.collect(id) for id in ids}

    def renew(self) -> None:
        """The weights have changed: everything in the cache is computed again."""
        self.scheduler.restart()
