"""Decode over ranks: captured steps, host time, and the tokens of one rank.

    python benchmarks/decode_ranks.py [tp=2 tp=4] [--set layers=80] [--sums WAY ...] [--json FILE]
    python benchmarks/decode_ranks.py --model tiny-moe "dp=2 ep=2" "tp=2 ep=2" pp=2

Every layout runs twice: in float32, whose greedy tokens are those of one rank, and in bfloat16,
where a step of 1 and of 32 sequences is timed. `--sums nccl symmetric` compares both ways of tensor
ranks of one host; a row says which one it had. Ranks that share a GPU need NCCL 2.30 and MPS, and
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1: `python -m tests.gpu.symm_ranks` sees to all of it. The
time of the host is that of a step without its wait for tokens. The default is a model of 80 narrow
layers, whose steps are all host work unless they are captured. Stages of a pipeline have a part of
the sequences each: a step is one of them. It exits with 1 if a layout draws other tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fivefold.core.layout import Weight
from fivefold.core.model.presets import load, with_overrides
from fivefold.core.plan.plan import PlanOptions
from fivefold.generate.engine import Shared, alone
from fivefold.generate.layout import plan_of
from fivefold.generate.requests import Request
from fivefold.generate.text import ByteCodec
from fivefold.generate.text_ranks import TaskWarning, TextTask, engine_of_rank
from fivefold.launch.backend import NcclLibrary, choose_backend, forked_device, num_gpus
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker

NARROW = {"layers": "80", "width": "1024", "heads": "8", "kv_heads": "8", "head_dim": "128"}
NARROW |= {"ffn": "2048", "vocab": "32000"}
_NEW, _WARM = 40, 8


def weight_of(weight: Weight, dtype: torch.dtype) -> Tensor:
    if len(weight.shape) < 2:
        return torch.ones(weight.shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(weight.name.encode()))
    numbers = torch.randn(1 << 18, generator=generator).mul_(0.02).to(dtype)
    return numbers.repeat(-(-math.prod(weight.shape) // len(numbers)))[
        : math.prod(weight.shape)
    ].view(weight.shape)


class Waits:
    """Time that the host waits for what was drawn."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def start(self, tensor: Tensor) -> Shared:
        wait = alone(tensor)

        def timed() -> Tensor:
            begin = time.perf_counter()
            tensor = wait()
            self.seconds += time.perf_counter() - begin
            return tensor

        return timed


def run_rank(worker: Worker, task: TextTask) -> None:
    world, waits = task.plan.layout.world, Waits()
    own_device = forked_device(task.device, task.backend, worker.rank, world)
    with worker.joined(world, own_device), patch("fivefold.generate.engine.alone", waits.start):
        torch.backends.cuda.matmul.allow_tf32 = False
        engine = engine_of_rank(worker, task, own_device.device, 2e9, 4000)
        for count in (1, 32):
            for index in range(count):
                prompt = tuple((7 * index + i) % 250 for i in range(1, 40))
                engine.add(Request(f"{count}-{index}", prompt, _NEW))
            steps: list[tuple[float, float]] = []
            tokens: dict[str, list[int]] = {}
            while engine.busy:
                worker.phase("generate")
                begin, waits.seconds = time.perf_counter(), 0.0
                drawn = engine.step()
                seconds = time.perf_counter() - begin
                if len(drawn) * task.plan.layout.pp >= count:
                    steps.append((seconds, seconds - waits.seconds))
                for row in drawn:
                    tokens.setdefault(row.id, []).append(row.token)
            captured = getattr(getattr(engine, "forward", None), "captured", {})
            if worker.rank == 0:
                step_ms, host_ms = (1e3 * median(part) for part in zip(*steps[_WARM:], strict=True))
                row = {"sums": "symmetric" if engine.mesh.symmetric else engine.mesh.backend}
                row |= {"sequences": count, "step_ms": step_ms, "host_ms": host_ms}
                worker.report((row | {"captured": len(captured)}, tokens))
        engine.close()
        engine.mesh.close_groups()


def rows_of(
    model: str, layout: str, dtype: str, sizes: dict[str, str], device: str, sums: str
) -> list[tuple[Any, Any]]:
    shape = with_overrides(load(model), sizes)
    plan = plan_of(shape, PlanOptions(model, layout=layout, set=sizes))
    world, reports = plan.layout.world, list[tuple[Any, Any]]()
    backend = choose_backend(None, device, world, num_gpus(), NcclLibrary.current())
    task = TextTask(plan, dtype, 1.0, open_weights, ByteCodec(), [], device, backend)
    task = replace(task, symmetric=sums == "symmetric")
    with Pool(world, 150.0) as pool:
        pool.run_each([(run_rank, (task,))] * world, on_report=reports.append)
    for warning in (report for report in reports if isinstance(report, TaskWarning)):
        print(warning.reason, file=sys.stderr)
    return [report for report in reports if not isinstance(report, TaskWarning)]


def open_weights(tell: object) -> Any:
    return weight_of


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode over ranks.")
    parser.add_argument("layouts", nargs="*", default=["tp=2", "tp=4"])
    parser.add_argument("--model", help="llama-3.1-8b with 80 narrow layers, by default")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="model sizes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sums", nargs="*", default=["symmetric"], choices=("nccl", "symmetric"))
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    sizes = {} if options.model else NARROW
    sizes = sizes | dict(pair.split("=", 1) for pair in options.set)
    table: list[dict[str, Any]] = []
    expected: list[Any] = []
    dtypes = ("float32", "bfloat16") if options.device == "cuda" else ("float32",)
    ways = [("dp=1", "nccl"), *itertools.product(options.layouts, options.sums)]
    for (layout, sums), dtype in itertools.product(ways, dtypes):
        model = options.model or "llama-3.1-8b"
        reports = rows_of(model, layout, dtype, sizes, options.device, sums)
        tokens = [tokens for _, tokens in reports]
        if dtype == "float32":
            expected = expected or tokens
        same = tokens == expected if dtype == "float32" else None
        for row, _ in reports:
            table.append({"layout": layout, "dtype": dtype, **row, "same_tokens": same})
            print(json.dumps(table[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return 0 if all(row["same_tokens"] in (True, None) for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
