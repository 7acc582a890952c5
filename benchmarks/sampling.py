"""Draws of next tokens from logits: milliseconds of a step beside greedy ones.

    python benchmarks/sampling.py [--vocab 128256] [--rows 1 64 256] [--json FILE]
    python benchmarks/sampling.py --device cpu --vocab 1000 --rows 8

Logits are random normal numbers times 1 (flat) and 6 (peaked), rounded to bfloat16 as heads give
them. A step takes as long as the longer of device and host; `ms` has both, with the copy of the
table to the host, and `host ms` is what Python takes before it waits. On a GPU it exits with 1 if
any way of sampling takes 1 ms more than greedy; likeliest tokens of all rows are only printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

from fivefold.generate.engine import alone
from fivefold.generate.requests import Sampling
from fivefold.generate.sampling import Draw, draw_table

MOST = 1.0  # ms beside greedy
_ALL = "greedy, top_logprobs 5 of all rows"
REPEATS = {"cuda": 50, "cpu": 3}
WAYS = {
    "greedy": Sampling(),
    "T=1": Sampling(1.0),
    "top-p 0.9": Sampling(1.0, top_p=0.9),
    "top-k 50": Sampling(1.0, top_k=50),
    "min-p 0.05": Sampling(1.0, min_p=0.05),
    "top-k 50, top-p 0.9": Sampling(0.7, 50, 0.9),
    "greedy, top_logprobs 5 of one row": Sampling(),
    _ALL: Sampling(),
}


def draws_of(way: str, rows: int, index: int) -> list[Draw]:
    """The draws of a step."""
    asking = rows if way == _ALL else int("one row" in way)
    return [
        Draw(WAYS[way], f"request-{row}", index, alternatives=5 * (row < asking))
        for row in range(rows)
    ]


def measure(logits_NV: torch.Tensor, way: str) -> tuple[float, float]:
    """Median milliseconds of a step, and of the host until it waits."""
    steps, issued = list[float](), list[float]()
    most = 5 if "logprobs" in way else 0
    for index in range(REPEATS[logits_NV.device.type] + 2):  # the first ones compile
        begin = time.perf_counter()
        wait = alone(draw_table(logits_NV, draws_of(way, len(logits_NV), index), most, False))
        issued.append(time.perf_counter() - begin)
        wait()
        steps.append(time.perf_counter() - begin)
    return 1e3 * median(steps[2:]), 1e3 * median(issued[2:])


def main() -> int:
    """Print a table; 1 where a GPU takes too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--device", choices=sorted(REPEATS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    results: list[dict[str, float | str]] = []
    print("| logits | rows | way | ms | beside greedy | host ms |\n|---|---:|---|---:|---:|---:|")
    for kind, scale in (("flat", 1.0), ("peaked", 6.0)):
        for rows in options.rows:
            generator = torch.Generator().manual_seed(rows)
            logits_NV = scale * torch.randn(rows, options.vocab, generator=generator)
            logits_NV = logits_NV.bfloat16().float().to(device)
            greedy = 0.0
            for way in WAYS:
                ms, host = measure(logits_NV, way)
                greedy = greedy or ms
                row = {"logits": kind, "rows": rows, "way": way, "ms": ms}
                results.append({**row, "beside_greedy_ms": ms - greedy, "host_ms": host})
                numbers = f"{ms:.3f} | {ms - greedy:+.3f} | {host:.3f}"
                print(f"| {kind} | {rows} | {way} | {numbers} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results))
    if device == "cpu":
        print("on a CPU nothing is judged")
    worst = max(float(row["beside_greedy_ms"]) for row in results if row["way"] != _ALL)
    return int(device == "cuda" and worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
