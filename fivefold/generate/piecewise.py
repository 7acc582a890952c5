"""Steps with prompts as piecewise CUDA graphs: from one layer's attention to the next one's.

The lengths and tables that attention reads are others in every step with a prompt, and its kernels
are chosen by them. All else depends on the number of tokens alone, so it is captured, for some
numbers of tokens: 64, 128 and so on. A step takes the next larger one, and is filled with tokens
that belong to no sequence. Between two segments, attention is issued as in any other step. So the
host issues a graph and a few kernels for a layer; without segments it takes longer than an H200
computes, up to 2,000 tokens of an 8B model.

All sizes share one pool of memory: nothing in it is read after a step. Queries, what attention
finds and the last hidden states are copied to buffers outside of it. Sizes that would take more
than a quarter of the memory that is free are left out: larger steps need the rest.

Legend: T tokens of a step, H query heads, d width of a head, v that of a value head, D model width.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, cuda

from fivefold.core.model import BLOCK
from fivefold.generate.cache import LayerPages, PagedKernel
from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import SequenceChunk, StepBatch
from fivefold.generate.step_tensors import StepSize, StepTensors, packed, size_of, unpacked
from fivefold.model import AttentionInfo
from fivefold.model.kernels import by_operators

# Tokens of a step. With more, the GPU is slower than the host anyway.
_SIZES = (*range(64, 1536, 64), *range(1536, 4096 + 1, 128))
_MOST_OF_FREE = 0.25


def sizes_up_to(tokens: int) -> tuple[int, ...]:
    """Numbers of tokens to capture for steps of at most `tokens`.

    >>> sizes_up_to(150), sizes_up_to(8192)[-2:]
    ((64, 128, 192), (3968, 4096))
    """
    return _SIZES[: bisect_left(_SIZES, tokens) + 1]


class _Between(NamedTuple):
    """Attention between two graph segments."""

    pages: LayerPages
    info: AttentionInfo
    queries_THd: Tensor
    found_THv: Tensor

    def attend(self, kernel: PagedKernel, step: StepTensors, tokens: int) -> None:
        """What the first tokens find; the others fill the step."""
        output = kernel(self.queries_THd[:tokens], self.pages, step, self.info)
        self.found_THv[:tokens].copy_(output)


class _Segment(NamedTuple):
    graph: cuda.CUDAGraph
    then: _Between | None  # none after the last one


class _Capture:
    """Captures of steps, one size after another. Its `attend` replaces the attention kernel: one
    segment ends and the next begins."""

    def __init__(self, most: int) -> None:
        self.most, self.pool = most, cuda.graph_pool_handle()
        self.buffers: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # by sizes of heads
        self.graph: cuda.CUDAGraph | None = None
        self.segments: list[_Segment] = []

    def begin(self) -> None:
        """What is issued from now on belongs to a new segment."""
        self.graph = cuda.CUDAGraph()
        self.graph.capture_begin(pool=self.pool)

    def end(self, then: _Between | None) -> None:
        """The segment ends here."""
        assert self.graph is not None, "no segment has begun"
        self.graph.capture_end()
        self.segments.append(_Segment(self.graph, then))
        self.graph = None

    def attend(
        self, q_THd: Tensor, pages: LayerPages, step: StepTensors, info: AttentionInfo
    ) -> Tensor:
        """Nothing is attended to here: a replay does that between two segments."""
        tokens, heads, width = q_THd.shape
        queries, outputs = self._buffers(q_THd, (heads, width, pages.values.shape[3]))
        queries[:tokens].copy_(q_THd)
        if self.graph is not None:
            self.end(_Between(pages, info, queries, outputs))
            self.begin()
        return outputs[:tokens]

    def _buffers(self, like: Tensor, sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """Queries and what they find: one layer after another uses them. They are made when a step
        runs for the first time, before any capture."""
        if sizes not in self.buffers:
            heads, width, values = sizes
            queries, out_shape = ((self.most, heads, channels) for channels in (width, values))
            self.buffers[sizes] = like.new_zeros(queries), like.new_zeros(out_shape)
        return self.buffers[sizes]

    def taken(self) -> list[_Segment]:
        """The segments of a step, all of which are there."""
        segments, self.segments = self.segments, []
        return segments


class PiecewiseSteps:
    """Steps of a forward on one GPU, replayed as graph segments."""

    @torch.inference_mode()
    def __init__(self, forward: DecoderForward, sizes: Sequence[int]) -> None:
        """Captures steps of these numbers of tokens."""
        self.forward, self.kernel, self.most = forward, forward.cache.kernel, max(sizes)
        weight = next(forward.decoder.parameters())
        self.hidden_TD = weight.new_zeros((self.most, forward.decoder.shape.width))
        numbers = StepSize(self.most, 0, 0, 0).of_tokens
        self.numbers = torch.zeros(numbers, dtype=torch.int64, device=forward.device)
        self.captured: dict[int, list[_Segment]] = {}
        capture, beside = _Capture(self.most), cuda.Stream(forward.device)
        beside.wait_stream(cuda.current_stream(forward.device))
        forward.cache.kernel = capture.attend
        try:
            with cuda.stream(beside):
                gc.collect()
                for size in sorted(sizes, reverse=True):  # smaller ones need no more memory
                    self._capture(capture, size)
        finally:
            forward.cache.kernel = self.kernel
        cuda.current_stream(forward.device).wait_stream(beside)

    def _capture(self, capture: _Capture, tokens: int) -> None:
        """Run a step once, since kernels are compiled and chosen then, and capture it."""
        size = StepSize(tokens, 0, 0, 0)
        tensors = unpacked(self.numbers[: size.of_tokens], size, ())
        nothing = packed(self._filled(StepBatch(()), tokens), 1)
        self.numbers[: size.of_tokens].copy_(nothing[: size.of_tokens])
        if not self.captured and not self._has_room(tensors):
            return
        self._run(tensors)
        cuda.synchronize(self.forward.device)
        cuda.empty_cache()
        capture.begin()
        self._run(tensors)
        capture.end(None)
        self.captured[tokens] = capture.taken()

    def _has_room(self, tensors: StepTensors) -> bool:
        """Whether a step leaves most of the memory free."""
        device = self.forward.device
        cuda.reset_peak_memory_stats(device)
        before = cuda.memory_allocated(device)
        try:
            self._run(tensors)
        except torch.OutOfMemoryError:
            return False
        cuda.synchronize(device)
        needed = cuda.max_memory_allocated(device) - before
        cuda.empty_cache()
        return needed <= _MOST_OF_FREE * cuda.mem_get_info(device)[0]

    def _run(self, tensors: StepTensors) -> None:
        x_TD = self.forward.hidden(tensors)
        self.hidden_TD[: len(x_TD)].copy_(x_TD)

    def _filled(self, step: StepBatch, missing: int) -> StepBatch:
        """With so many tokens more, which write to a block that nobody reads. Their positions are
        the first ones, which every model knows."""
        most, table = min(BLOCK, self.forward.decoder.shape.max_seq), (self.forward.padding,)
        sizes = (min(most, missing - start) for start in range(0, missing, most))
        nobody = (
            SequenceChunk("", (0,) * num_fills, 0, table, False, fills=True) for num_fills in sizes
        )
        return StepBatch((*step.chunks, *nobody))

    def takes(self, step: StepBatch) -> bool:
        """Whether a step of its size was captured."""
        return 0 < step.num_tokens <= max(self.captured, default=0)

    @torch.inference_mode()
    def __call__(self, step: StepBatch) -> Tensor:
        """As the forward."""
        self.forward.copy_blocks(step)
        tokens, sequences = step.num_tokens, len(step.chunks)
        captured = next(capacity for capacity in sorted(self.captured) if capacity >= tokens)
        filled = self._filled(step, captured - tokens)
        size = size_of(filled)
        numbers = packed(filled, size.blocks).pin_memory()
        device_numbers = numbers.to(self.forward.device, non_blocking=True)
        self.numbers[: size.of_tokens].copy_(device_numbers[: size.of_tokens])
        tensors = unpacked(device_numbers, size, step.chunks)
        lengths, tables = tensors.lengths[:sequences], tensors.tables[:sequences]
        sequence_tensors = replace(tensors, lengths=lengths, tables=tables)
        for graph, then in self.captured[captured]:
            graph.replay()
            if then is not None:
                then.attend(self.kernel, sequence_tensors, tokens)
        with by_operators(True):
            return self.forward.logits(self.hidden_TD[:captured], sequence_tensors.sampled)
