"""Packed rows on one GPU: tokens/s beside rows of one document, in one run and in turn.

    python benchmarks/packed.py [--model llama-3.1-8b] [--layers 4] [--mean 1024] [--batch 1]

The step is that of `benchmarks/gpu.py`: bf16, 8,192 tokens a row, compiled. Lengths of documents
are exponential with the given mean, as the rest of a row allows; rows are drawn anew for every
step. Five rounds of six steps each way after a warm-up; medians, and the ratio of each round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import gpu

ROUNDS, STEPS, WARM_UP = 5, 6, 6


def first_tokens(rows: int, seq: int, mean: float, generator: torch.Generator) -> Tensor:
    """(rows, seq + 1): whether a document begins there; the first token of a row begins one."""
    begins = torch.zeros(rows, seq + 1, dtype=torch.bool)
    lengths = torch.empty(rows, seq).exponential_(1 / mean, generator=generator).long().clamp(min=1)
    for row, each in zip(begins, lengths.cumsum(dim=1), strict=True):
        row[0] = True
        row[each[each <= seq]] = True
    return begins


def make_batch(plan: Any, mean: float | None, seed: int) -> Any:
    """A microbatch on the GPU, as a data rank reads it; without a mean, one document a row."""
    from fivefold.data.batches import samples_from_rows

    generator = torch.Generator().manual_seed(seed)
    rows, seq = plan.batch.microbatch_size, plan.batch.seq
    tokens = torch.randint(plan.shape.vocab, (rows, seq + 1), generator=generator)
    begins = None if mean is None else first_tokens(rows, seq, mean, generator)
    return samples_from_rows(plan.batch, tokens, begins).to(torch.device("cuda")).of(0)[0]


def seconds_of(run: Callable[[Any], object], batches: list[Any]) -> float:
    """Mean seconds of a step over these batches."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for each in batches:
        run(each)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / len(batches)


def measure(model: str, layers: int, batch: int, mean: float) -> dict[str, Any]:
    """Tokens/s both ways, and packed over whole, round by round."""
    from fivefold.step import step

    case = gpu.Case(model, batch, ("", ""), changes={"layers": str(layers)})
    plan, job, optimizer = gpu.build(case)

    def run(one: Any) -> object:
        return step(job, optimizer, [one], 1.0)

    means = {"whole": None, "packed": mean}
    for each in means.values():
        seconds_of(run, [make_batch(plan, each, seed) for seed in range(WARM_UP)])
    found: dict[str, list[float]] = {name: [] for name in means}
    for number in range(ROUNDS):
        for name, each in means.items():
            seeds = range(number * STEPS, (number + 1) * STEPS)
            found[name].append(seconds_of(run, [make_batch(plan, each, seed) for seed in seeds]))
    tokens = batch * plan.batch.seq
    ratios = [a / b for a, b in zip(found["whole"], found["packed"], strict=True)]
    return {
        "model": model,
        "layers": layers,
        "tokens_per_document": mean,
        **{f"{name}_tokens_per_s": tokens / median(times) for name, times in found.items()},
        **{f"{name}_ms": 1e3 * median(times) for name, times in found.items()},
        "packed_over_whole": median(ratios),
        "rounds": ratios,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--mean", type=float, default=1024)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: run this on a machine with one")
        return
    found = measure(arguments.model, arguments.layers, arguments.batch, arguments.mean)
    print(json.dumps(found), flush=True)
    print(
        f"packed rows: {found['packed_over_whole']:.3f} times the tokens/s of one document a row "
        f"({found['packed_tokens_per_s']:,.0f} against {found['whole_tokens_per_s']:,.0f})"
    )


if __name__ == "__main__":
    main()
