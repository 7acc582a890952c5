"""The context dimension, measured.

    python benchmarks/context.py             balance, error and memory, on any machine
    python benchmarks/context.py gpu         the cost of cutting attention, on a GPU

balance  Pairs of query and key that each rank computes, by kind.
error    bfloat16 attention in 8 merged parts and in one call, both against float64.
memory   Bytes that one rank keeps for backward, cp = 1, 2, 4 and 8 at 32k tokens.
gpu      All calls of 8 zigzag ranks, forward and backward, merges included, one after another on
         one GPU, over the fastest single call on the whole row.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fivefold.core.layout.layout import Layout
from fivefold.core.layout.splits import (
    ContextKind,
    ContextSplit,
    Ranges,
    attention_calls,
    context_split,
)
from fivefold.core.model.presets import load
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.model.batch import AttentionInfo, TokenBatch
from fivefold.model.kernels.flash import MergedAttention, VisiblePairs, attend
from fivefold.parallel.composition import compose
from fivefold.parallel.context import ContextAttention
from fivefold.parallel.mesh import Mesh

KINDS: tuple[ContextKind, ...] = ("ring", "zigzag", "allgather", "ulysses", "hybrid")
LONG = 32_768


def attention_pairs(split: ContextSplit, seq: int) -> list[int]:
    """Pairs of a query and a key that each place of the ring computes, per head of a rank."""
    places = [split.ring_tokens(seq, place) for place in range(split.outer)]
    return [
        sum(call.pairs for keys in places for call in attention_calls(queries, keys, None))
        // split.inner
        for queries in places
        for _ in range(split.inner)
    ]


def balance() -> None:
    """Causal work by rank, from the very calls that a rank makes."""
    shape = load("llama-3-8b")
    print("attention pairs a rank computes, 128k tokens, heads of llama-3-8b")
    print(f"{'kind':<11}{'cp':>3}  {'max/min':>8} {'max/mean':>9}")
    for kind in KINDS:
        for cp in (2, 4, 8):
            found = attention_pairs(context_split(Layout(cp=cp, context=kind), shape), 131_072)
            high, low, mean = max(found), min(found), statistics.mean(found)
            beside = f"   2n−1 = {2 * cp - 1}, 2−1/n = {2 - 1 / cp:.3f}" if kind == "ring" else ""
            print(f"{kind:<11}{cp:>3}  {high / low:8.2f} {high / mean:9.3f}{beside}")
    print()


def merged(q: Tensor, k: Tensor, v: Tensor, parts: int) -> Tensor:
    """Attention over the keys in so many parts, still in float32."""
    total = MergedAttention(q)
    for part_k, part_v in zip(k.chunk(parts, dim=2), v.chunk(parts, dim=2), strict=True):
        total.merge(0, q.shape[2], *attend(q, part_k, part_v, VisiblePairs()))
    assert total.out is not None
    return total.out


def error(device: str) -> None:
    """The relative error of the result, rounded to bfloat16 as the model gets it."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, 8, 1024, 64, generator=generator, device=device).bfloat16() for _ in range(3)
    )
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())

    def off(found: Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    if device == "cpu":
        one = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
    else:
        one = attend(q, k, v, VisiblePairs())[0]
    print(f"bfloat16 on {device}: relative error against float64 of 1,024 queries and keys")
    print(f"one flash call                      {off(one):.3e}")
    for parts in (2, 4, 8):
        wide = merged(q, k, v, parts)
        for name, found in (("float32", wide), ("bfloat16", wide.bfloat16())):
            ratio = off(found) / off(one)
            print(f"{parts} parts merged, kept in {name:<9}  {off(found):.3e}  {ratio:.3f} of it")
    print()


def kept_bytes(worker: Worker, plan: Plan) -> tuple[int, int]:
    """What one forward of this rank keeps for its backward: of attention, and of all blocks."""
    with worker.joined(plan.layout.world):
        mesh = Mesh.of(plan, torch.device("cpu"))
        job = compose(plan, mesh, seed=0, dtype=torch.float32)
        row = torch.arange(plan.batch.seq)[None]
        batch = job.local(TokenBatch(row % plan.shape.vocab, row % plan.shape.vocab, row))
        weights = {one.untyped_storage().data_ptr() for one in job.chunks[0].model.parameters()}
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in weights:
                held[memory.data_ptr()] = memory.nbytes()
            return tensor

        model = job.chunks[0].model
        block, seen = next(iter(model.blocks.values())), [0]
        block.attention.register_forward_pre_hook(lambda *_: seen.append(sum(held.values())))
        block.attention.register_forward_hook(lambda *_: seen.append(sum(held.values())))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(batch.tokens, batch)
        del loss
        return seen[2] - seen[1], sum(held.values())


def memory() -> None:
    """Measured on real ranks; every kind keeps the same, for none keeps other ranks' keys."""
    sizes = {"layers": "1", "width": "32", "heads": "8", "kv_heads": "8", "head_dim": "4"}
    sizes |= {"ffn": "64", "vocab": "32", "max_seq": str(LONG)}
    print("bytes kept for backward on a rank, 32k tokens, one layer of width 32, float32")
    print(f"{'kind':<11}{'cp':>3} {'attention':>11} {'all':>11}  {'of cp=1':>8}")
    alone = 0
    with Pool(8) as pool:
        for kind, cp in (("zigzag", 1), ("zigzag", 2), ("zigzag", 4), ("zigzag", 8), ("ring", 8),
                         ("allgather", 8), ("ulysses", 8), ("hybrid", 8)):  # fmt: skip
            options = PlanOptions(
                "tiny", layout=f"cp={cp}", context=kind, zero=0, seq=LONG, set=sizes, microbatches=1
            )
            plan = resolve(options)
            found = pool.run_each([(kept_bytes, (plan,))] * cp)
            attention, whole = (max(each) for each in zip(*found, strict=True))
            alone = alone or whole
            print(f"{kind:<11}{cp:>3} {attention:>11,} {whole:>11,}  {whole / alone:8.4f}")
    print()


def timed(run: Callable[[], object], repeats: int = 5) -> float:
    """The best of some runs, in milliseconds."""
    for _ in range(2):
        run()
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def single_call(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, backend: SDPBackend) -> float:
    """Causal attention on the whole row, forward and backward."""

    def run() -> None:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), slope)

    return timed(run)


class VirtualMesh:
    """One place of a ring whose places take turns on one GPU: a message is there at once."""

    def __init__(self, place: int) -> None:
        self._place = place

    def coord(self, axis: str) -> int:
        return self._place

    def pass_on(self, tensor: Tensor, axis: str) -> VirtualMesh:
        self.tensor = tensor
        return self

    def wait(self) -> Tensor:
        return self.tensor


class VirtualRank(ContextAttention):
    """The attention of one rank, as it runs everywhere, on keys that all lie on this GPU."""

    shards: ClassVar[list[Tensor]] = []

    def _visits(self, k: Tensor, v: Tensor) -> Iterator[tuple[Ranges, Tensor]]:
        for hop in range(self.split.outer):
            other = (self.ring_coord - hop) % self.split.outer
            yield self.ring_tokens[other], self.shards[other]


def cut_into_ranks(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, cp: int) -> float:
    """Attention of all ranks, one rank after another."""
    seq = q.shape[2]
    split = context_split(Layout(cp=cp), load("llama-3-8b"))
    row = TokenBatch(*(torch.arange(seq, device="cuda")[None] for _ in range(3)))
    info = AttentionInfo(row.positions, None, None, row=row)
    ranks = [VirtualRank(cast(Any, VirtualMesh(place)), split, seq) for place in range(cp)]

    def tokens(whole: Tensor, rank: VirtualRank) -> Tensor:
        parts = [whole[:, :, each.start : each.stop] for each in rank.tokens]
        return torch.cat(parts, dim=2).detach()

    inputs = [[tokens(each, rank) for each in (q, k, v, slope)] for rank in ranks]
    VirtualRank.shards = [torch.stack((keys, values)) for _, keys, values, _ in inputs]

    def run() -> None:
        for rank, (queries, keys, values, slope_here) in zip(ranks, inputs, strict=True):
            total = rank.attend(queries, keys, values, info)
            assert total.out is not None and total.lse is not None
            saved = (queries, keys, values, total.out.to(queries.dtype), total.lse)
            rank.attend_backward(slope_here, saved, info)

    return timed(run, repeats=3)


def gpu() -> None:
    if not torch.cuda.is_available():
        print("no GPU here: run this on a machine with one")
        return
    error("cuda")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: heads 32 × 128, KV 8, causal,"
    )
    print("forward and backward in ms; 8 zigzag ranks one after another over the fastest call")
    for seq in (16_384, 32_768, 65_536):
        q = torch.randn(1, 32, seq, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k, v = (
            torch.randn(1, 8, seq, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        slope = torch.randn_like(q)
        torch.compiler.reset()  # kernels are compiled for one size each
        flash = single_call(q, k, v, slope, SDPBackend.FLASH_ATTENTION)
        cudnn = single_call(q, k, v, slope, SDPBackend.CUDNN_ATTENTION)
        cut = {cp: cut_into_ranks(q, k, v, slope, cp) for cp in (2, 8)}
        best = min(flash, cudnn)
        shown = "  ".join(f"cp={cp} {ms:8.2f} ({ms / best:.3f})" for cp, ms in cut.items())
        print(f"{seq:>7} tokens: flash {flash:8.2f}  cuDNN {cudnn:8.2f}  {shown}", flush=True)


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    if wanted == ["gpu"]:
        gpu()
        return
    memory()  # first: it forks its ranks, and a fork after other work would hang
    balance()
    error("cpu")
    if torch.cuda.is_available():
        gpu()


if __name__ == "__main__":
    main(sys.argv[1:])
