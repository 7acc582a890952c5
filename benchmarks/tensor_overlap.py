"""Tensor collectives beside matmuls, in a trace of two ranks over NCCL.

    python benchmarks/tensor_overlap.py [--json FILE]

Two layers of Llama-3.1-8B on tp=2, one row of 8,192 tokens in bf16, forward and backward. For each
value of `tp_overlap`: how many of NCCL's kernels in one rank's trace a matmul of that rank ran
beside, and of how many. It fails if fewer do than half of those that should, or if one does that is
waited for at once. Two ranks may share one GPU, with NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1.
They take turns there: a collective lasts as long as its peer waits, and seconds say nothing.
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
LAYERS = 2
# Attention and MLP of each layer: of a backward the gather of the input, and the reduction of its
# gradient; in two chunks all of these, and at least one chunk of each in forward and of each output
# gradient.
EXPECTED = {
    1: {"all_gather": 2 * LAYERS, "reduce_scatter": 2 * LAYERS},
    2: {"all_gather": 8 * LAYERS, "reduce_scatter": 6 * LAYERS},
}
Span = tuple[float, float]


def counts(kernels: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """Of each kind of collective, how many a matmul ran beside, and how many there are."""
    spans: dict[str, list[Span]] = {"matmul": [], **{kind: [] for kind in KINDS}}
    for each in kernels:
        kind = next((kind for kind, word in KINDS.items() if word in each.name), None)
        if kind is None and any(word in each.name for word in MATMULS):
            kind = "matmul"
        if kind is not None:
            spans[kind].append((each.time_range.start, each.time_range.end))
    matmuls = spans.pop("matmul")
    return {
        kind: (sum(any(a < d and c < b for c, d in matmuls) for a, b in found), len(found))
        for kind, found in spans.items()
    }


def run_rank(rank: int, folder: str, overlap: int) -> None:
    from fivefold.core.plan.plan import PlanOptions, resolve
    from fivefold.data.batches import samples
    from fivefold.parallel.composition import compose
    from fivefold.parallel.mesh import Mesh

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store-{overlap}", 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=device)
    plan = resolve(
        PlanOptions("llama-3.1-8b", layout="tp=2", tp_overlap=overlap, set={"layers": str(LAYERS)})
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
    Path(folder, f"{overlap}-{rank}.json").write_text(json.dumps(counts(kernels)))
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
    found: dict[int, dict[str, tuple[int, int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for overlap in MODES:
            multiprocessing.spawn(run_rank, (folder, overlap), nprocs=2)
            found[overlap] = json.loads(Path(folder, f"{overlap}-0.json").read_text())
            words = [f"{some} of {every} {kind}" for kind, (some, every) in found[overlap].items()]
            print(f"tp_overlap={overlap}: beside matmuls {', '.join(words)}", flush=True)
    if said.json:
        said.json.write_text(json.dumps(found))
    apart = all(some == 0 for some, _ in found[0].values())
    beside = all(
        2 * found[overlap][kind][0] >= least
        for overlap, kinds in EXPECTED.items()
        for kind, least in kinds.items()
    )
    good = apart and beside
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    sys.exit(main())
