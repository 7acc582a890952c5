"""The forward of generation on a GPU: attention over pages, linears of a few tokens, and decode
steps as CUDA graphs.

A decode step is a few hundred kernels of a few microseconds: issued one by one, the host would be
slower than the GPU. So a step is captured once for every size, and replayed. Sizes are powers of
two, of sequences and of the parts into which attention cuts their keys: a step has sequences to
spare, which write to a block that nobody reads. Ranks capture their collectives as well
(`DecodeSteps` says where), all in one order; what a stage of a pipeline receives and sends goes
beside the graph. Where experts serve several replicas, all of them replay a step of one size. A
server also captures steps with prompts (`piecewise.py`).

Legend: T tokens of a step, H query heads, d width of a head, v that of a value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from fivefold.core.layout import Layout
from fivefold.core.model import BLOCK, blocks_of
from fivefold.core.plan import DecodeSteps
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.cache import KvCache, LayerPages, attend_pages, page_sizes
from fivefold.generate.coded_weights import join_rows
from fivefold.generate.expert_kernel import choose_experts, run_experts
from fivefold.generate.expert_steps import ExpertGroup, FewTokenKernels, dispatch_few_tokens
from fivefold.generate.forward import DecoderForward
from fivefold.generate.paged_kernel import (
    DecodeParts,
    LayerMask,
    PromptTiles,
    attend_decode,
    attend_prompts,
    cut_keys,
    tile_tokens,
)
from fivefold.generate.piecewise import (
    CAPTURE_ERRORS,
    PiecewiseSteps,
    sizes_up_to,
    without_collection,
)
from fivefold.generate.requests import SequenceChunk, StepBatch
from fivefold.generate.routing import RouteStore
from fivefold.generate.skinny_kernel import skinny_linear, takes
from fivefold.generate.stage_ends import StageEnds
from fivefold.generate.step_tensors import (
    DecodeSize,
    StepSize,
    StepTensors,
    attended_length,
    decode_size,
    filled,
    packed,
    to_device,
    unpacked,
)
from fivefold.model import (
    CUDA_KERNELS,
    Attention,
    AttentionInfo,
    Decoder,
    Linear,
    LowRank,
    Matmul,
    Mlp,
    Project,
    TokenRanks,
)

_WIDEST_HEAD = 576  # DeepSeek's latents: a program holds some keys of this width
_LONG_PROMPT = 1024  # tokens
_WIDEST_FOR_TORCH = 256  # of heads, in torch's fast kernels


def has_kernel(width: int, dtype: torch.dtype) -> bool:
    """Whether the paged kernel supports this head width."""
    return width <= _WIDEST_HEAD and dtype != torch.float64


def attend_on_gpu(
    q_THd: Tensor, pages: LayerPages, step: StepTensors, info: AttentionInfo
) -> Tensor:
    """`attend_pages` on a GPU: one launch for all prompts, and one for all single tokens. Long
    prompts by torch's kernels over gathered keys, where these have what the layer has."""
    if not has_kernel(q_THd.shape[2], q_THd.dtype):
        return attend_pages(q_THd, pages, step, info)
    mask = LayerMask.of(info.window, info.chunk, info.cap, info.sinks)
    out_THv = q_THd.new_empty((*q_THd.shape[:2], pages.values.shape[3]))
    singles = step.num_singles
    if singles < len(step.chunks):
        long = _long_prompts(step, q_THd, mask)
        tiles = _prompt_tiles(step, q_THd, pages, long)
        if tiles is not None:
            attend_prompts(q_THd, pages, step.sequences, tiles, mask, out_THv)
        for index in long:
            start, tokens = step.first_tokens[index], len(step.chunks[index].tokens)
            q_nHd, table = q_THd[start : start + tokens], step.tables_SB[index]
            out_THv[start : start + tokens] = attend_prompt(q_nHd, pages, table)
    if singles:
        parts = _decode_parts(step, mask)
        attend_decode(q_THd, pages, step.sequences, parts, mask, out_THv)
    return out_THv


def _decode_parts(step: StepTensors, mask: LayerMask) -> DecodeParts:
    key = mask.kind, mask.reach
    if key not in step.work:
        lengths = step.sequences.lengths[: step.num_singles]
        step.work[key] = cut_keys(lengths, step.most_parts, mask)
    return step.work[key]


def _long_prompts(step: StepTensors, q_THd: Tensor, mask: LayerMask) -> tuple[int, ...]:
    """Prompts that begin in this step, for which torch's kernels are faster."""
    narrow = q_THd.dtype != torch.float32 and q_THd.shape[2] <= _WIDEST_FOR_TORCH
    if not narrow or mask.cap is not None or mask.sinks_H is not None:
        return ()
    reach = mask.reach if mask.kind else step.batch.tokens.numel()
    return tuple(
        index
        for index, chunk in enumerate(step.chunks)
        if not chunk.start and _LONG_PROMPT <= len(chunk.tokens) <= reach
    )


def _prompt_tiles(
    step: StepTensors, q_THd: Tensor, pages: LayerPages, without: tuple[int, ...]
) -> PromptTiles | None:
    """Tiles of all prompts, without some of them."""
    group = q_THd.shape[1] // pages.keys.shape[2]
    unit = tile_tokens(q_THd.shape[2], q_THd.element_size(), group)
    key = unit, without
    if key not in step.work:
        remaining = range(step.num_singles, len(step.chunks))
        chunks = [(index, step.chunks[index]) for index in remaining if index not in without]
        step.work[key] = _tiles(step, chunks, unit) if chunks else None
    return step.work[key]


def _tiles(
    step: StepTensors, chunks: Sequence[tuple[int, SequenceChunk]], unit: int
) -> PromptTiles:
    counts = [-(-len(chunk.tokens) // unit) for _, chunk in chunks]
    sequences = np.repeat([index for index, _ in chunks], counts)
    tokens = np.concatenate([np.arange(count) * unit for count in counts])
    numbers = to_device(np.stack([sequences, tokens]).astype(np.int32), step.slots.device)
    longest = max(chunk.stop for _, chunk in chunks)
    return PromptTiles(*numbers, sum(counts), step.first_tokens[chunks[0][0]], longest)


def attend_prompt(q_nHd: Tensor, pages: LayerPages, table: Tensor) -> Tensor:
    """Attention of a prompt from its first token on, at a padded length: causal masks hide the
    padding."""
    length = attended_length(len(q_nHd))
    k_LKd, v_LKv = pages.read(table[: length // BLOCK], q_nHd.dtype)
    for page_rows in (k_LKd, v_LKv):  # 0 times what an earlier sequence left here could be NaN
        page_rows[len(q_nHd) :].zero_()
    q_LHd = F.pad(q_nHd, (0, 0, 0, 0, 0, length - len(q_nHd)))
    q, k, v = (tensor[None].transpose(1, 2) for tensor in (q_LHd, k_LKd, v_LKv))
    with sdpa_kernel(CUDA_KERNELS, set_priority=True):
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return output[0].transpose(0, 1)[: len(q_nHd)]


class FewTokens:
    """A linear with a kernel bound by memory bandwidth for few tokens."""

    def __init__(self, fallback: Matmul, adapted: JoinedWeights | None = None) -> None:
        """`adapted`: its weight with its adapter, if it has one."""
        self.fallback, self.adapted = fallback, adapted

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not takes(x):
            return self.fallback(x, weight, bias)
        return skinny_linear(x, weight, bias) if self.adapted is None else self.adapted(x)[0]


class JoinedWeights:
    """Linears of one input with their adapters, for few tokens: weights and the first factors of
    adapters become rows of one tensor, second factors become blocks on the diagonal of another. So
    adapters cost one small matmul and a selection."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        adapters = [linear.lora for linear in linears]
        present = [adapter for adapter in adapters if adapter is not None]
        self.sizes = [len(linear.weight) for linear in linears]
        weight = join_rows([linear.weight for linear in linears] + [pair.a for pair in present])
        assert weight is not None
        self.weight, self.outputs = weight, sum(self.sizes)
        biases = [linear.bias for linear in linears]
        if any(bias is not None for bias in biases):  # of first factors there are none
            biases.append(nn.Parameter(weight.new_zeros(len(weight) - self.outputs)))
        self.bias = join_rows(biases)
        # All adapters of a model have one scale, and select alike.
        self.adapter = present[0] if present else None
        self.second = _block_diagonal(adapters, self.sizes, weight)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        y = skinny_linear(x, self.weight, self.bias)
        if self.adapter is not None:
            y_NO, low_NR = y.flatten(0, -2).tensor_split([self.outputs], dim=1)
            low_NR = self.adapter.select(low_NR)
            y_NO.addmm_(low_NR, self.second.T, alpha=self.adapter.scale)
        return y[..., : self.outputs].split(self.sizes, dim=-1)


class JoinedLinears:
    """Linears of one input, fused for few tokens."""

    def __init__(self, linears: Sequence[Linear], fallback: Project) -> None:
        self.fallback, self.joined = fallback, JoinedWeights(linears)

    def __call__(self, x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
        return self.joined(x) if takes(x) else self.fallback(x, linears)


@torch.no_grad()
def _block_diagonal(
    adapters: Sequence[LowRank | None], sizes: Sequence[int], like: Tensor
) -> Tensor:
    """Second factors as blocks of one tensor: outputs of all linears, ranks of all adapters."""
    pairs, column = list(zip(adapters, sizes, strict=True)), 0
    full = torch.block_diag(*(pair.b if pair else like.new_zeros(size, 0) for pair, size in pairs))
    for adapter, rows in zip(adapters, full.split(list(sizes)), strict=True):
        if adapter is not None:
            adapter.b.set_(rows[:, column : column + len(adapter.a)])
            column += len(adapter.a)
    return full


def multiply_few_tokens(decoder: Decoder) -> None:
    """Replace the linears of a decoder on one device by kernels for few tokens; weights keep their
    values. Linears of codes have their own (`coded_weights.py`)."""
    if decoder.head is not None and isinstance(decoder.head.matmul, FewTokens):
        return
    joined = set[Linear]()  # a module comes before those that it has
    for module in decoder.modules():
        if isinstance(module, Attention | Mlp):
            attends = isinstance(module, Attention)
            several = (module.q, module.k, module.v) if attends else (module.gate, module.up)
            linears = [linear for linear in several if linear is not None]
            if linears[0].row_scale is None:
                module.project = JoinedLinears(linears, module.project)
                joined.update(linears)
        elif isinstance(module, Linear) and module.row_scale is None:
            adapted = module.lora is not None and module not in joined
            weights = JoinedWeights([module]) if adapted else None
            module.matmul = FewTokens(module.matmul, weights)
    if decoder.head is not None:
        decoder.head.matmul = FewTokens(decoder.head.matmul)


class _Captured(NamedTuple):
    numbers: Tensor  # of the step, read by every replay
    received: Tensor | None  # from the stage before, if there is one
    graph: torch.cuda.CUDAGraph
    output: Tensor  # logits, or what the next stage receives
    states: Tensor | None  # that proposals go on from


class GraphedForward(DecoderForward):
    """A decoder on one GPU, or a rank's part of it, whose decode steps replay CUDA graphs."""

    def __init__(
        self,
        decoder: Decoder,
        blocks: int,
        ends: StageEnds | None = None,
        routes: RouteStore | None = None,
        drawn: DrawnTokens | None = None,
        adapters: TokenRanks | None = None,
        experts: ExpertGroup | None = None,
        linears: bool = True,
        steps: DecodeSteps | None = None,
        kv_codes: bool = False,
    ) -> None:
        """`experts`: the ranks that have those of a layer; `linears`: whether this rank has them as
        they were made, and not their shards; `steps`: the same on all ranks, by default of one;
        `kv_codes`: keys and values in fp8."""
        make_cache = partial(KvCache, kernel=attend_on_gpu, codes=kv_codes)
        super().__init__(decoder, blocks, make_cache, ends, routes, drawn, adapters)
        if linears:
            multiply_few_tokens(decoder)
        self.experts = experts or ExpertGroup()
        self.captured: dict[DecodeSize, _Captured] = {}
        self.most_keys = decoder.shape.max_seq
        widest = max(page_sizes(block.attention)[0][1] for block in decoder.all_blocks())
        dtype = decoder.dtype
        steps = steps or DecodeSteps(decoder.shape, Layout(), str(dtype).removeprefix("torch."))
        if steps.few_token_experts:
            kernels = FewTokenKernels(choose_experts, run_experts)
            dispatch_few_tokens(decoder, self.experts, kernels)
        self.never_waits = steps.never_waits
        self.most_captured = steps.most_captured if has_kernel(widest, dtype) else 0
        self.captured_tables = self.tables.tensor
        # Nothing in it is read after a step, but logits before the next.
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.with_prompts: PiecewiseSteps | None = None

    def close(self) -> None:
        """Free all graphs. NCCL ends a group only after the graphs that have its collectives."""
        torch.cuda.synchronize(self.device)
        self.captured.clear()
        self.with_prompts = None

    def capture_prompts(self, tokens: int) -> None:
        """Capture steps with prompts of up to so many tokens, and compile kernels of all lengths.
        It takes seconds, and pays where many requests come."""
        if self.never_waits:
            self.with_prompts = PiecewiseSteps(self, sizes_up_to(tokens))
        if self.most_captured:
            self._attend_lengths(min(tokens, self.most_keys))

    @torch.inference_mode()
    def _attend_lengths(self, tokens: int) -> None:
        """Attend in one layer to prompts of all padded lengths, so that their kernels are made."""
        pages, dtype = next(iter(self.cache.pages.values())), self.decoder.dtype
        if dtype == torch.float32:  # which no such kernel has
            return
        lengths = sorted({attended_length(count) for count in range(_LONG_PROMPT, tokens + 1)})
        if not lengths:
            return
        heads, width = self.decoder.shape.heads, pages.keys.shape[3]
        q_THd = pages.keys.new_zeros((lengths[-1], heads, width), dtype=dtype)
        table = torch.full((blocks_of(lengths[-1]),), self.padding, device=self.device)
        for length in lengths:
            attend_prompt(q_THd[:length], pages, table)

    @torch.inference_mode()
    def __call__(self, step: StepBatch) -> Tensor:
        if step.beside:
            self._grow_together((step, *step.beside))
        size = decode_size(step, self.ends.unit, self.most_captured)
        if size is None:
            replayed = self.with_prompts
            return replayed(step) if replayed and replayed.takes(step) else super().__call__(step)
        self.copy_blocks(step)
        host = packed(filled(step, size.sequences, self.padding), self.tables)
        if self.tables.tensor is not self.captured_tables:  # they have grown
            self.captured.clear()
            self.captured_tables = self.tables.tensor
        if size not in self.captured:
            self.captured[size] = self._capture(to_device(host.numbers, self.device), *size)
        else:
            capture = self.captured[size]
            capture.numbers.copy_(torch.as_tensor(host.numbers).pin_memory(), non_blocking=True)
            if capture.received is not None:
                capture.received.copy_(self.ends.receive(size.sequences))
        capture = self.captured[size]
        capture.graph.replay()
        self.states = capture.states
        if self.decoder.norm is None:  # the next replay may write before this is sent
            return self.hand_on(capture.output.clone())
        return capture.output[: len(step.chunks)]

    def _grow_together(self, batches: Sequence[StepBatch]) -> None:
        """Grow the block tables for the largest replica: all of them capture steps anew then."""
        chunks = [chunk for batch in batches for chunk in batch.chunks]
        rows = 1 + max(len(batch.chunks) for batch in batches)
        self.tables.reserve(rows, max((len(chunk.table) for chunk in chunks), default=0))

    def _capture(self, numbers: Tensor, sequences: int, parts: int) -> _Captured:
        """Run a step once, since kernels are compiled and chosen then, and capture it."""
        size = StepSize(sequences, sequences, sequences)
        tensors = unpacked(numbers, size, self.tables, (), (sequences, parts))
        received = self.received(tensors)
        beside = torch.cuda.Stream(self.device)
        beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(beside), self.experts.in_decode():
            self.computed(tensors, received)
        torch.cuda.current_stream(self.device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with (
            without_collection(),
            self.experts.in_decode(),
            torch.cuda.graph(graph, self.pool, capture_error_mode=CAPTURE_ERRORS),
        ):
            output = self.computed(tensors, received)
        return _Captured(numbers, received, graph, output, self.states)
