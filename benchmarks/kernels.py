"""Where a step goes on one GPU: its kernels by what they do, their launches, and the gaps.

    python benchmarks/kernels.py 8B [--top 30] [--json FILE]

The step is that of a case of `benchmarks/gpu.py`. After its warm-up two are recorded by torch's
profiler. Shares are of the GPU's time from the first kernel to the last; a gap
is time in which no kernel ran.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import gpu

STEPS = 2
# What a kernel does, by a word of its name; the first that fits.
KINDS = (
    ("attention", ("flash", "fmha", "cudnn_generated", "attention")),
    ("grouped matmul", ("grouped", "ptr_array", "PtrArray")),
    ("matmul", ("gemm", "nvjet", "cutlass", "splitK", "s16816")),
    ("optimizer", ("adam", "multi_tensor", "foreach", "FusedOptimizer")),
    ("copy", ("Memcpy", "copy", "CatArray")),
    ("fill", ("Memset", "FillFunctor")),
    ("index", ("index", "scatter", "gather", "sort", "Sort", "embedding")),
    ("compiled elementwise", ("triton",)),
    ("elementwise", ("elementwise", "Reduce", "reduce", "softmax", "Softmax")),
)


def kind_of(name: str) -> str:
    """The first kind with a word that the kernel's name has."""
    return next((kind for kind, words in KINDS if any(word in name for word in words)), "other")


def recorded(case: gpu.Case) -> list[Any]:
    """The kernels of some steps, as the profiler saw them."""
    from fivefold.step import step

    plan, job, optimizer = gpu.build(case)

    def run(number: int) -> None:
        step(job, optimizer, [gpu.random_batch(plan.shape.vocab, case, number)], 1.0)

    for number in range(case.warm_up):
        run(number)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for number in range(STEPS):
            run(number)
        torch.cuda.synchronize()
    return [each for each in profile.events() if each.device_type.name == "CUDA"]


def summary(kernels: list[Any]) -> dict[str, Any]:
    """Milliseconds and launches of a step by kind and by kernel, and the gaps."""
    spans = sorted((each.time_range.start, each.time_range.end) for each in kernels)
    begin, end, busy = spans[0][0], spans[0][0], 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    kinds, launches, names, calls = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for each in kernels:
        kind, seconds = kind_of(each.name), each.time_range.elapsed_us() / 1e3 / STEPS
        kinds[kind] += seconds
        launches[kind] += 1
        names[f"{kind}: {each.name}"] += seconds
        calls[f"{kind}: {each.name}"] += 1
    return {
        "span_ms": (end - begin) / 1e3 / STEPS,
        "gap_ms": (end - begin - busy) / 1e3 / STEPS,
        "kinds": {kind: (ms, launches[kind] / STEPS) for kind, ms in kinds.most_common()},
        "kernels": [(name, ms, calls[name] / STEPS) for name, ms in names.most_common()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=tuple(gpu.CASES))
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--json", type=Path)
    said = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: run this on a machine with one")
        return
    found = summary(recorded(gpu.CASES[said.case]))
    if said.json:
        said.json.write_text(json.dumps(found))
    span = found["span_ms"]
    print(f"| {said.case} | ms a step | share | launches |\n|---|---:|---:|---:|")
    for kind, (ms, number) in found["kinds"].items():
        print(f"| {kind} | {ms:.2f} | {ms / span:.1%} | {number:.0f} |")
    print(f"| gaps | {found['gap_ms']:.2f} | {found['gap_ms'] / span:.1%} | |")
    print(f"| all | {span:.2f} | | |\n")
    for name, ms, number in found["kernels"][: said.top]:
        print(f"{ms:8.3f} ms {number:6.0f} ×  {name[:150]}")


if __name__ == "__main__":
    main()
