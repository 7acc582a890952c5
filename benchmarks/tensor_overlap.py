"""Tensor collectives beside matmuls, in a trace of two ranks over NCCL.

    python benchmarks/tensor_overlap.py [--json FILE]

Two layers of Llama-3.1-8B on tp=2, one row of 8,192 tokens in bf16, forward and backward. For each
value of `tp_overlap`: of the time of NCCL's kernels in one rank's trace, the share in which a
matmul of that rank ran. It fails if one that should run beside matmuls never does, or one that is
waited for at once does. Two ranks may share one GPU, with NCCL 2.30 and
NCCL_MULTI_RANK_GPU_ENABLE=1; they take turns there, so that shares say what may run at once, and
seconds say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

MODES = (0, 1, 2)
MATMULS = ("gemm", "nvjet", "cutlass", "s16816")
KINDS = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}
BESIDE, APART = 0.25, 0.05  # least share of what overlaps, most of what does not
Span = tuple[float, float]


def beside(span: Span, others: Sequence[Span]) -> float:
    """Of a span, the microseconds in which one of the others went on; these are sorted."""
    found, end = 0.0, span[0]
    for start, stop in others:
        begin = max(start, end)
        if stop > begin and begin < span[1]:
            found += min(stop, span[1]) - begin
            end = min(stop, span[1])
    return found


def shares(kernels: Sequence[Any]) -> dict[str, float]:
    """Of each kind of collective, the share of its time beside matmuls."""
    spans: dict[str, list[Span]] = {"matmul": [], **{kind: [] for kind in KINDS}}
    for each in kernels:
        span = (each.time_range.start, each.time_range.end)
        kind = next((kind for kind, word in KINDS.items() if word in each.name), None)
        if kind is None and any(word in each.name for word in MATMULS):
            kind = "matmul"
        if kind is not None:
            spans[kind].append(span)
    matmuls = sorted(spans.pop("matmul"))
    return {
        kind: sum(beside(span, matmuls) for span in found)
        / max(sum(stop - start for start, stop in found), 1e-9)
        for kind, found in spans.items()
    }


def run_rank(rank: int, folder: str, overlap: int) -> None:
    from fivefold.core.plan import PlanOptions, resolve
    from fivefold.data.batches import samples
    from fivefold.parallel.compose import compose
    from fivefold.parallel.mesh import Mesh

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store-{overlap}", 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=device)
    plan = resolve(
        PlanOptions("llama-3.1-8b", layout="tp=2", tp_overlap=overlap, set={"layers": "2"})
    )
    mesh = Mesh.of(plan, device)
    job = compose(plan, mesh, seed=0, dtype=torch.bfloat16)
    batch = job.local(samples(plan.batch, plan.shape.vocab, 0, 0).to(device).of(0)[0])

    def run() -> None:
        job.chunks[0].model(batch.tokens, batch).backward()
        torch.cuda.synchronize()

    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    kernels = [each for each in profile.events() if each.device_type.name == "CUDA"]
    Path(folder, f"{overlap}-{rank}.json").write_text(json.dumps(shares(kernels)))
    dist.barrier()
    mesh.close_groups()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    said = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: run this on a machine with one")
        return 0
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for overlap in MODES:
            multiprocessing.spawn(run_rank, (folder, overlap), nprocs=2)
            found[overlap] = json.loads(Path(folder, f"{overlap}-0.json").read_text())
            words = ", ".join(f"{kind} {share:.0%}" for kind, share in found[overlap].items())
            print(f"tp_overlap={overlap}: beside matmuls {words}", flush=True)
    if said.json:
        said.json.write_text(json.dumps(found))
    hidden = [found[1]["reduce_scatter"], *found[2].values()]
    good = min(hidden) >= BESIDE and max(found[0].values()) <= APART
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    sys.exit(main())
