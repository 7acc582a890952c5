"""The forward of generation on a GPU: attention over pages, linears of a few tokens, and decode
steps as CUDA graphs.

A decode step is a few hundred kernels of a few microseconds: issued one by one, the host would be
slower than the GPU. So a step is captured once for every size, and replayed. Sizes are powers of
two: a step has sequences to spare, which write to a block that nobody reads. A server also captures
steps with prompts (`piecewise.py`).

No kernel here has chunked windows, capped scores or sinks: layers with these are computed by the
plain kernel, on the device, and decode steps of their models are not captured as a whole.

Legend: T tokens of a step, H query heads, d width of a head, v that of a value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from fivefold.core.model import BLOCK, Shape, blocks_of
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.cache import (
    KvCache,
    LayerPages,
    attend_pages,
    attend_sequence,
    first_seen,
    page_sizes,
)
from fivefold.generate.forward import DecoderForward
from fivefold.generate.paged_kernel import attend_single_tokens
from fivefold.generate.piecewise import PiecewiseSteps, sizes_up_to
from fivefold.generate.requests import SequenceChunk, StepBatch
from fivefold.generate.routing import RouteStore
from fivefold.generate.skinny_kernel import skinny_linear, takes
from fivefold.generate.stage_ends import StageEnds
from fivefold.generate.step_tensors import (
    StepSize,
    StepTensors,
    attended_length,
    packed,
    size_of,
    unpacked,
)
from fivefold.model import (
    CUDA_KERNELS,
    Attention,
    AttentionInfo,
    Decoder,
    Linear,
    Matmul,
    Mlp,
    Project,
)

_WIDEST_HEAD = 256  # a program holds some keys of this width
_MOST_SEQUENCES = 256  # of a captured step
_LEAST_KEYS = 1024


def has_kernel(width: int, dtype: torch.dtype) -> bool:
    """Whether the paged kernel supports this head width; DeepSeek's latents are too wide."""
    return width <= _WIDEST_HEAD and dtype != torch.float64


def kernels_know(shape: Shape) -> bool:
    """Whether kernels support the attention of a model."""
    chunked = shape.window_kind == "chunked" and shape.window is not None
    return not (chunked or shape.sinks or shape.score_cap is not None)


def attend_on_gpu(
    q_THd: Tensor, pages: LayerPages, step: StepTensors, info: AttentionInfo
) -> Tensor:
    """`attend_pages` on a GPU: single tokens by a paged kernel, chunks by torch's kernels over
    gathered keys."""
    kernels = info.chunk is None and info.cap is None and info.sinks is None
    if not kernels or not has_kernel(q_THd.shape[2], q_THd.dtype):
        return attend_pages(q_THd, pages, step, info)
    singles = step.first_singles
    outputs = [_attend_singles(q_THd, pages, step, singles, info.window)] if singles else []
    start = singles
    for chunk, table in zip(step.chunks[singles:], step.tables[singles:], strict=True):
        stop = start + len(chunk.tokens)
        outputs.append(_attend_chunk(q_THd[start:stop], pages, chunk, table, info))
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_singles(
    q_THd: Tensor, pages: LayerPages, step: StepTensors, count: int, window: int | None
) -> Tensor:
    """The first sequences, with one token each."""
    tables, lengths = step.tables[:count], step.lengths[:count]
    keys_and_values = (pages.keys, pages.values)
    return attend_single_tokens(
        q_THd[:count], keys_and_values, tables, lengths, BLOCK * tables.shape[1], window
    )


def _attend_chunk(
    q_nHd: Tensor, pages: LayerPages, chunk: SequenceChunk, table: Tensor, info: AttentionInfo
) -> Tensor:
    """The tokens of one sequence, which are its last."""
    # Earlier blocks are out of sight of all its queries.
    first, window = first_seen(chunk.start, info) // BLOCK, info.window
    length, narrow = chunk.stop - first * BLOCK, q_nHd.dtype != torch.float32
    if narrow and chunk.start == first == 0 and (window is None or window >= length):
        return attend_prompt(q_nHd, pages, table)
    k_LKd, v_LKv = pages.read(table[first : -(-chunk.stop // BLOCK)])
    if not narrow:
        return attend_sequence(q_nHd, k_LKd[:length], v_LKv[:length], info, first * BLOCK)
    q, k, v = (tensor[None] for tensor in (q_nHd, k_LKd[:length], v_LKv[:length]))
    # Flash is causal from the last query and key backwards. A window counts the query itself.
    left = -1 if window is None else window - 1
    return torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, len(q_nHd), length, 0.0, True, False,
        window_size_left=left, window_size_right=-1 if window is None else 0,
    )[0][0]  # fmt: skip


def attend_prompt(q_nHd: Tensor, pages: LayerPages, table: Tensor) -> Tensor:
    """Attention of a prompt from its first token on, at a padded length: causal masks hide the
    padding."""
    length = attended_length(len(q_nHd))
    k_LKd, v_LKv = pages.read(table[: length // BLOCK])
    for page_rows in (k_LKd, v_LKv):  # 0 times what an earlier sequence left here could be NaN
        page_rows[len(q_nHd) :].zero_()
    q_LHd = F.pad(q_nHd, (0, 0, 0, 0, 0, length - len(q_nHd)))
    q, k, v = (tensor[None].transpose(1, 2) for tensor in (q_LHd, k_LKd, v_LKv))
    with sdpa_kernel(CUDA_KERNELS, set_priority=True):
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return output[0].transpose(0, 1)[: len(q_nHd)]


class FewTokens:
    """A linear with a kernel bound by memory bandwidth for few tokens."""

    def __init__(self, fallback: Matmul) -> None:
        self.fallback = fallback

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return skinny_linear(x, weight, bias) if takes(x) else self.fallback(x, weight, bias)


class JoinedLinears:
    """Linears of one input, fused for few tokens: their weights become rows of one tensor."""

    def __init__(self, linears: Sequence[Linear], fallback: Project) -> None:
        self.fallback, self.sizes = fallback, [len(linear.weight) for linear in linears]
        self.weight, self.bias = (
            _joined([getattr(linear, name) for linear in linears]) for name in ("weight", "bias")
        )

    def __call__(self, x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
        if not takes(x):
            return self.fallback(x, linears)
        assert self.weight is not None
        return skinny_linear(x, self.weight, self.bias).split(self.sizes, dim=-1)


@torch.no_grad()
def _joined(parts: Sequence[nn.Parameter | None]) -> Tensor | None:
    """One tensor, whose rows the parts become."""
    tensors = [parameter for parameter in parts if parameter is not None]
    if not tensors:
        return None
    full_tensor = torch.cat(tensors)
    for part, rows in zip(
        tensors, full_tensor.split([len(tensor) for tensor in tensors]), strict=True
    ):
        part.set_(rows)
    return full_tensor


def multiply_few_tokens(decoder: Decoder) -> None:
    """Replace the linears of a decoder on one device by kernels for few tokens; weights keep their
    values."""
    if decoder.head is not None and isinstance(decoder.head.matmul, FewTokens):
        return
    for module in decoder.modules():
        if isinstance(module, Attention):
            module.project = JoinedLinears((module.q, module.k, module.v), module.project)
        elif isinstance(module, Mlp):
            linears = [linear for linear in (module.gate, module.up) if linear is not None]
            module.project = JoinedLinears(linears, module.project)
        elif isinstance(module, Linear):
            module.matmul = FewTokens(module.matmul)
    if decoder.head is not None:
        decoder.head.matmul = FewTokens(decoder.head.matmul)


class _Captured(NamedTuple):
    numbers: Tensor  # of the step, read by every replay
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class GraphedForward(DecoderForward):
    """A decoder on one GPU, whose decode steps replay CUDA graphs."""

    def __init__(
        self,
        decoder: Decoder,
        blocks: int,
        ends: StageEnds | None = None,
        routes: RouteStore | None = None,
        drawn: DrawnTokens | None = None,
    ) -> None:
        make_cache = partial(KvCache, kernel=attend_on_gpu)
        super().__init__(decoder, blocks, make_cache, ends, routes, drawn)
        multiply_few_tokens(decoder)
        self.captured: dict[StepSize, _Captured] = {}
        self.most_keys = decoder.shape.max_seq
        widest = max(page_sizes(block.attention)[0][1] for block in decoder.all_blocks())
        dtype = next(decoder.parameters()).dtype
        # Grouped matmuls of other types wait for the numbers of rows.
        self.never_waits = decoder.shape.moe is None or dtype == torch.bfloat16
        fits = has_kernel(widest, dtype) and kernels_know(decoder.shape)
        self.captures = self.never_waits and fits
        self.with_prompts: PiecewiseSteps | None = None

    def capture_prompts(self, tokens: int) -> None:
        """Capture steps with prompts of up to so many tokens, and compile kernels of all lengths.
        It takes seconds, and pays where many requests come."""
        if self.never_waits:
            self.with_prompts = PiecewiseSteps(self, sizes_up_to(tokens))
        if self.captures:
            self._attend_lengths(min(tokens, self.most_keys))

    @torch.inference_mode()
    def _attend_lengths(self, tokens: int) -> None:
        """Attend in one layer to prompts of all padded lengths, so that their kernels are made."""
        pages = next(iter(self.cache.pages.values()))
        if pages.keys.dtype == torch.float32:  # which no such kernel has
            return
        lengths = sorted({attended_length(count) for count in range(1, tokens + 1)})
        heads, width = self.decoder.shape.heads, pages.keys.shape[3]
        q_THd = pages.keys.new_zeros((lengths[-1], heads, width))
        table = torch.full((blocks_of(lengths[-1]),), self.padding, device=self.device)
        for length in lengths:
            attend_prompt(q_THd[:length], pages, table)

    @torch.inference_mode()
    def __call__(self, step: StepBatch) -> Tensor:
        decodes = all(len(chunk.tokens) == 1 and chunk.samples for chunk in step.chunks)
        if not (self.captures and decodes and 0 < len(step.chunks) <= _MOST_SEQUENCES):
            replayed = self.with_prompts
            return replayed(step) if replayed and replayed.takes(step) else super().__call__(step)
        self.copy_blocks(step)
        size = self._size(step)
        numbers = packed(self._filled(step, size.sequences), size.blocks).pin_memory()
        if size not in self.captured:
            self.captured[size] = self._capture(numbers, size)
        capture = self.captured[size]
        capture.numbers.copy_(numbers, non_blocking=True)
        capture.graph.replay()
        return capture.logits[: len(step.chunks)]

    def _size(self, step: StepBatch) -> StepSize:
        """The smallest captured size for this step."""
        sequences = 1 << (len(step.chunks) - 1).bit_length()
        keys = max(_LEAST_KEYS, 1 << (BLOCK * size_of(step).blocks - 1).bit_length())
        blocks = -(-min(keys, max(self.most_keys, _LEAST_KEYS)) // BLOCK)
        return StepSize(sequences, sequences, sequences, blocks)

    def _filled(self, step: StepBatch, sequences: int) -> StepBatch:
        none = SequenceChunk("", (0,), 0, (self.padding,), samples=True, fills=True)
        return StepBatch((*step.chunks, *[none] * (sequences - len(step.chunks))))

    def _capture(self, numbers: Tensor, size: StepSize) -> _Captured:
        """Run a step once, since kernels are compiled and chosen then, and capture it."""
        device_numbers = numbers.to(self.device)
        tensors = unpacked(device_numbers, size, ())
        beside = torch.cuda.Stream(self.device)
        beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(beside):
            self.run(tensors)
        torch.cuda.current_stream(self.device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.run(tensors)
        return _Captured(device_numbers, graph, logits)
