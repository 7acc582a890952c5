"""Steps of one size, so that the bits of a token do not depend on what else is in its batch.

Libraries choose their kernels, tiles and splits by the size of a batch, and each sums in another
order. Here a forward always has the same number of tokens: every token is a sequence of its own,
prompts too, and tokens of no sequence fill the rest. So norms, routers and collectives have one
size, and attention is that of single queries, whose splits depend on their position alone. Matmuls
have tiles of fixed size (`generate/tiles.py`). Under tp, ranks add in rank order
(`parallel/rank_order.py`).

Splits   steps into `step_size` tokens; prompts are read in chunks of at most so many.
Moves    nothing more.
Costs    a decode of few sequences multiplies full tiles. A long prompt reads all weights once for
         every step, and its attention reads all keys for every token. `benchmarks/decode.py` prints
         the ratio.
Refuses  cp, whose ranks have keys by the blocks that were free.

Legend: T tokens of a step, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import SequenceChunk, StepBatch
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.generate.tiles import (
    ROWS,
    PiecewiseActivate,
    tile_experts,
    tile_linear,
    wide_tile_linear,
)
from fivefold.model import Decoder, Experts, ExpertStack, Mlp, MoeMlp, Router


def step_size(device: torch.device, unit: int) -> int:
    """Number of tokens of every step, a multiple of `unit`."""
    return -(-ROWS[device.type] // unit) * unit


class FixedSteps:
    """A forward whose steps all have one size, around that of a decoder or a stage."""

    def __init__(self, forward: DecoderForward) -> None:
        self.forward = forward
        self.size = step_size(forward.device, forward.ends.unit)

    def __call__(self, step: StepBatch) -> Tensor:
        if not step.chunks and not self.forward.ends.idles_along:
            return self.forward(step)
        logits_TV = self.forward(single_tokens(step, self.size, self.forward.padding))
        if not len(logits_TV):  # not the last stage
            return logits_TV
        lasts = accumulate(len(sequence_chunk.tokens) for sequence_chunk in step.chunks)
        pairs = zip(lasts, step.chunks, strict=True)
        rows = [row for last, chunk in pairs for row in range(last - chunk.num_wanted, last)]
        return logits_TV[torch.tensor(rows, dtype=torch.int64).to(logits_TV.device)]

    def limits(self, step_limits: ScheduleLimits) -> ScheduleLimits:
        """Scheduling limits that fit the fixed size."""
        return replace(step_limits, tokens=min(step_limits.tokens, self.size))


def single_tokens(step: StepBatch, size: int, padding: int) -> StepBatch:
    """Split a step into sequences of one token, padded with tokens of no sequence. All give their
    logits."""
    assert step.num_tokens <= size, "the scheduler knows its limit"
    singles = [
        replace(chunk, tokens=(token,), start=chunk.start + i, samples=True, scored=0)
        for chunk in step.chunks
        for i, token in enumerate(chunk.tokens)
    ]
    none = SequenceChunk("", (0,), 0, (padding,), samples=True, fills=True)
    beside = tuple(single_tokens(batch, size, padding) for batch in step.beside)
    return replace(step, chunks=(*singles, *[none] * (size - len(singles))), beside=beside)


def fix_tiles(decoder: Decoder) -> None:
    """Use fixed tiles where `compose_forward` does not: experts, routers, the head, and linears and
    activations beside them."""
    on_gpu = next(decoder.parameters()).is_cuda
    for module in decoder.modules():
        if isinstance(module, ExpertStack):
            module.matmul = module.adapted(tile_experts)
        elif isinstance(module, Router):
            module.matmul = wide_tile_linear
        elif isinstance(module, Mlp | Experts) and not on_gpu:
            module.activate = PiecewiseActivate(module.activate)
        elif isinstance(module, MoeMlp) and module.shared_gate is not None:
            module.shared_gate.matmul = tile_linear
    if decoder.head is not None:
        decoder.head.matmul = tile_linear
