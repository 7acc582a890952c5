"""Tensor ranks that share one GPU: sums over symmetric memory, and decode steps with them.

    python -m tests.gpu.symm_ranks [sums] [decode] [kill] [--ranks 2 4] [--quick]

`sums`: values in float32, bfloat16 and float64, captured and not, while ranks are late at random,
so that a buffer that is written too early is seen; then microseconds of a sum in a graph of 8, in
one shot, in two shots and over NCCL. `decode`: `benchmarks/decode_ranks.py` with both ways for
every number of ranks, on 80 narrow layers (`--quick`: 8): milliseconds of a step of 1 and of 32
sequences, those of the host, and whether float32 tokens are one rank's. `kill`: a rank of a server
over tp=2 is killed mid-request, and all requests end, without MPS: its server would end all ranks.
MPS is started and ended, and NCCL is that of `carry/` where torch has none that lets ranks share a
GPU. It exits with 1 if a value or a token is wrong, if symmetric memory cannot be had, or if a
request does not end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from fivefold.core.model.presets import load
from fivefold.core.plan.plan import PlanOptions
from fivefold.generate.layout import mesh_of, plan_of, share_memory
from fivefold.launch.backend import forked_device
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.parallel import Mesh
from fivefold.parallel.symmetric import SHARING
from tests.gpu.accept import ROOT, machine_of, shared_gpu

SIZES = (8, 64, 256, 512, 1024, 4096, 8192)  # KiB
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
COUNTS = (4, 16, 1024, 4100, 65_536, 131_072, 1_000_000)  # numbers of a sum
CAPTURED = 8  # sums in a graph


def term(count: int, dtype: torch.dtype, rank: int, number: int) -> torch.Tensor:
    """Whole numbers that every type has, and so do their sums over 8 ranks."""
    values = (torch.arange(count, device="cuda") * 7 + 3 * rank + number) % 31
    return values.to(dtype)


def wrong_values(mesh: Mesh, trials: int) -> list[str]:
    """Sums and gathers of many sizes one after another, with ranks that are late."""
    wrong: list[str] = []
    chance, late = random.Random(0), random.Random(mesh.rank)
    size = mesh.size("tp")
    for number in range(trials):
        count, dtype = chance.choice(COUNTS), chance.choice(DTYPES)
        terms = [term(count, dtype, rank, number) for rank in range(size)]
        if late.random() < 0.3:
            torch.cuda._sleep(late.randrange(1_000_000))
        x = terms[mesh.rank].clone()
        mesh.all_reduce(x, "tp", dist.ReduceOp.SUM).wait()
        total = mesh.total(terms[mesh.rank], "tp")
        full = mesh.gather(terms[mesh.rank], "tp", 0)
        expected = torch.stack(terms).sum(0)
        if not (torch.equal(x, expected) and torch.equal(total, expected)):
            wrong.append(f"sum of {count} {dtype}")
        if not torch.equal(full, torch.cat(terms)):
            wrong.append(f"gather of {count} {dtype}")
    return wrong + captured_wrong(mesh)


def captured_wrong(mesh: Mesh) -> list[str]:
    """One graph with sums of several sizes, replayed with other values."""
    inputs = [torch.zeros(count, device="cuda") for count in COUNTS]
    mesh.total(inputs[0], "tp")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = [mesh.total(x, "tp") for x in inputs]
        gathered = mesh.gather(inputs[1], "tp", 0)
    wrong: list[str] = []
    ranks = range(mesh.size("tp"))
    for number in range(20):
        for count, x in zip(COUNTS, inputs, strict=True):
            x.copy_(term(count, torch.float32, mesh.rank, number))
        graph.replay()
        for count, output in zip(COUNTS, outputs, strict=True):
            terms = [term(count, torch.float32, rank, number) for rank in ranks]
            if not torch.equal(output, torch.stack(terms).sum(0)):
                wrong.append(f"captured sum of {count}")
        terms = [term(COUNTS[1], torch.float32, rank, number) for rank in ranks]
        if not torch.equal(gathered, torch.cat(terms)):
            wrong.append("captured gather")
    torch.cuda.synchronize()
    return wrong


def graph_us(mesh: Mesh, kib: int) -> float:
    """Microseconds of a sum in a graph."""
    x = torch.zeros(512 * kib, device="cuda", dtype=torch.bfloat16)
    mesh.all_reduce(x, "tp", dist.ReduceOp.SUM).wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CAPTURED):
            mesh.all_reduce(x, "tp", dist.ReduceOp.SUM).wait()
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    return round(1e6 * (time.perf_counter() - begin) / 20 / CAPTURED, 1)


def run_sums(worker: Worker, ranks: int) -> None:
    """Values and times on one rank."""
    worker.phase("sums")
    device = forked_device("cuda", "nccl", worker.rank, ranks)
    with worker.joined(ranks, device), torch.inference_mode():
        plan = plan_of(load("tiny"), PlanOptions("tiny", layout=f"tp={ranks}"))
        mesh = mesh_of(plan, device.device, False)
        problem = share_memory(mesh)
        shared = mesh.symmetric.get("tp")
        report: dict[str, Any] = {"problem": problem or ("" if shared else "not tried")}
        if shared is not None:
            report["wrong"] = wrong_values(mesh, 300)
            for name, limit in (("one", 1 << 30), ("two", 0)):
                with patch("fivefold.parallel.symmetric._ONE_SHOT_BYTES", limit):
                    report[name] = {kib: graph_us(mesh, kib) for kib in SIZES}
            mesh.symmetric.clear()
            report["nccl"] = {kib: graph_us(mesh, kib) for kib in SIZES}
        worker.report((worker.rank, report))
        mesh.close_groups()


def sums(ranks: int) -> bool:
    """Print values and times of so many ranks; returns whether all is right."""
    reports: list[Any] = []
    with Pool(ranks, 120.0) as pool:
        pool.run_each([(run_sums, (ranks,))] * ranks, on_report=reports.append)
    for rank, report in sorted(reports):
        print(json.dumps({"part": "sums", "ranks": ranks, "rank": rank, **report}), flush=True)
    return not any(report["problem"] or report["wrong"] for _, report in reports)


def decode(ranks: list[int], quick: bool, environment: dict[str, str]) -> bool:
    """Run the benchmark with both ways; returns whether all tokens are right."""
    command = [sys.executable, "benchmarks/decode_ranks.py", *(f"tp={each}" for each in ranks)]
    command += ["--sums", "nccl", "symmetric"]
    command += ["--set", "layers=8"] if quick else []
    return not subprocess.run(command, cwd=ROOT, env=environment).returncode


def kill() -> bool:
    """Kill a rank of a server twice; returns whether all requests have ended as they should."""
    from tests.ranks.serving import killed_mid_request, serving

    right = True
    with tempfile.TemporaryDirectory(prefix="fivefold-kill-") as name:
        folder = Path(name)
        # In a process of its own: one that has used CUDA cannot fork ranks.
        command = [sys.executable, "-m", "tests.gpu.journeys", "dense", str(folder / "hub")]
        subprocess.run(command, cwd=ROOT, check=True)
        for victim, restarts in ((1, 1), (0, 0)):
            words = ("--device", "cuda", "--layout", "tp=2", "--max-running", "4")
            words += ("--restarts", str(restarts), "--cache-gb", "0.5")
            output = folder / f"log-{victim}.txt"
            with serving(folder / "hub", output, *words, patience=240.0) as running:
                replies = asyncio.run(killed_mid_request(running, victim))
                ends = [("lost" if b"engine_lost" in data else status) for status, data in replies]
                others = {200} if restarts else {500, 503}
                right &= {status for status, _ in replies[1::2]} <= others and "lost" in ends
                row = {"part": "kill", "rank": victim, "restarts": restarts, "ends": ends}
                print(json.dumps(row), flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["sums", "decode", "kill"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--quick", action="store_true", help="8 layers")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside and options.parts == ["kill"]:
        return 0 if kill() else 1
    if options.inside:
        return 0 if all(sums(ranks) for ranks in options.ranks) else 1
    right = True
    with tempfile.TemporaryDirectory(prefix="fivefold-symm-") as name:
        machine = machine_of("cuda", Path(name))
        with shared_gpu(machine, Path(name)) as environment:
            environment = environment | {SHARING: "1", "PYTHONUNBUFFERED": "1"}
            if "sums" in options.parts:
                command = [sys.executable, "-m", "tests.gpu.symm_ranks", "sums", "--inside"]
                command += ["--ranks", *map(str, options.ranks)]
                right &= not subprocess.run(command, cwd=ROOT, env=environment).returncode
            if "decode" in options.parts:
                right &= decode(options.ranks, options.quick, environment)
        if "kill" in options.parts:
            command = [sys.executable, "-m", "tests.gpu.symm_ranks", "--inside", "kill"]
            right &= not subprocess.run(command, cwd=ROOT, env=machine.environment).returncode
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
