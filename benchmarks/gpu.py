"""One GPU: tokens/s and memory of our step beside a peer's, and what offload saves.

    python benchmarks/gpu.py step --model llama-3.1-8b --batch 1      our step, one JSON line
    python benchmarks/gpu.py compare --peer DIR                       ours and the peer's in turn
    python benchmarks/gpu.py offload --model llama-3.1-8b             peak memory with and without

bf16 weights, 8,192 tokens, compiled block by block, AdamW, no recompute; medians of 20 steps after
10. The peer is TorchTitan 0.2.2 in DIR (its wheel unpacked, with a runner `peer_torchtitan.py`),
not part of this project.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

SEQ = 8192
MODELS = (("llama-3.2-1b", "1B", 2), ("llama-3.1-8b", "8B", 1))
WARM_UP, MEASURED = 10, 20


def build(model: str, batch: int, offload: bool = False, changes: dict[str, str] | None = None):  # noqa: ANN201
    from fivefold.core.plan import PlanOptions, resolve
    from fivefold.core.recipe import Recipe
    from fivefold.model.regions import compiled
    from fivefold.optim import make_updater
    from fivefold.parallel.compose import compose
    from fivefold.parallel.mesh import Mesh

    sizes = {"seq": SEQ, "microbatches": 1, "microbatch_size": batch}
    changes = {"tied": "false"} | (changes or {})
    plan = resolve(PlanOptions(model, grad_dtype="bf16", set=changes, **sizes))
    mesh = Mesh.of(plan, torch.device("cuda"))
    how = {"dtype": torch.bfloat16, "offload": offload, "as_summed": False, "fuse": compiled}
    job = compose(plan, mesh, seed=0, **how)
    recipe = Recipe(lr=3e-4, offload="cpu" if offload else "none")
    return plan, job, make_updater(recipe, job.owned, mesh.device)


def random_batch(vocab: int, batch: int, seed: int):  # noqa: ANN201
    from fivefold.model.batch import TokenBatch

    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = torch.randint(vocab, (batch, SEQ + 1), generator=generator, device="cuda")
    positions = torch.arange(SEQ, device="cuda").expand(batch, SEQ)
    return TokenBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions)


def measure(model: str, batch: int) -> dict[str, float]:
    """Our step: tokens/s and memory."""
    from fivefold.core import count
    from fivefold.step import step

    plan, job, optimizer = build(model, batch)
    times = []
    for number in range(WARM_UP + MEASURED):
        torch.cuda.synchronize()
        start = time.perf_counter()
        outcome = step(job, optimizer, [random_batch(plan.shape.vocab, batch, number)], 1.0)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    seconds = median(times[WARM_UP:])
    flops = count.training_flops(plan.shape, SEQ).total * batch * SEQ
    return {
        "tokens_per_s": batch * SEQ / seconds,
        "ms": 1e3 * seconds,
        "tflops": flops / seconds / 1e12,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "loss": float(outcome.loss),
    }


def measure_peer(folder: Path, flavor: str, batch: int) -> dict[str, float]:
    """The peer's own log: the median of its tokens/s after warm-up, and its reserved memory."""
    words = f"""-m torch.distributed.run --nproc_per_node=1 {folder}/peer_torchtitan.py
        --model.name llama3_rand --model.flavor {flavor} --training.seq_len {SEQ}
        --training.local_batch_size {batch} --training.dtype bfloat16
        --activation_checkpoint.mode none --compile.enable
        --training.steps {WARM_UP + MEASURED} --metrics.log_freq 5""".split()
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    log = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    rows = re.findall(r"step:\s*(\d+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)", log)
    if not rows:
        raise SystemExit(f"the peer printed no steps:\n{log[-2000:]}")
    warm = [float(tps.replace(",", "")) for number, _, tps in rows if int(number) > WARM_UP]
    return {"tokens_per_s": median(warm), "reserved_gib": max(float(gib) for _, gib, _ in rows)}


def compare(folder: Path, only: str | None) -> None:
    """Three times in turn, each in a process of its own."""
    print(
        f"matrix product ceiling: {ceiling():.0f} TFLOP/s (bf16, 8192 cubed, random data)",
        flush=True,
    )
    for model, flavor, batch in MODELS:
        if only not in (None, flavor):
            continue
        ours, theirs = [], []
        for _ in range(3):
            words = [sys.executable, __file__, "step", "--model", model, "--batch", str(batch)]
            ours.append(json.loads(subprocess.check_output(words, text=True).splitlines()[-1]))
            theirs.append(measure_peer(folder, flavor, batch))
            print(json.dumps({"model": model, "ours": ours[-1], "peer": theirs[-1]}), flush=True)
        speed = [median(one["tokens_per_s"] for one in side) for side in (ours, theirs)]
        memory = [median(one["reserved_gib"] for one in side) for side in (ours, theirs)]
        faster, larger = speed[0] / speed[1], memory[0] / memory[1]
        print(
            f"{model}: {speed[0]:,.0f} tokens/s against {speed[1]:,.0f}: {faster:.3f} times; "
            f"{memory[0]:.1f} GiB reserved against {memory[1]:.1f}: {larger:.3f} times",
            flush=True,
        )


def ceiling() -> float:
    """The best of a large bf16 matrix product, in TFLOP/s."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(30):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        left @ right
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end))
    return 2 * size**3 / best / 1e9


def offload(model: str) -> None:
    """Three steps with the optimizer on the device and on the host: peaks, and equal weights."""
    from fivefold.step import step

    # Attention and embedding sum their gradients in any order unless told not to.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    kept: dict[str, torch.Tensor] = {}
    peaks = []
    for offloaded in (False, True):
        gc.collect()  # hooks make cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        plan, job, optimizer = build(model, 1, offloaded)
        for number in range(3):
            step(job, optimizer, [random_batch(plan.shape.vocab, 1, number)], 1.0)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        if not offloaded:
            states = sum(one.nbytes for one in optimizer.tensors() if one.ndim)
        model_here = job.chunks[0].model
        now = {name: weight.detach().cpu() for name, weight in model_here.named_parameters()}
        worst = max((float((kept[name] - now[name]).abs().max()) for name in kept), default=0.0)
        kept = now
        del job, optimizer, model_here
    fall = peaks[0] - peaks[1]
    print(
        f"{model}: peak {peaks[0] / 2**30:.1f} GiB, with offload {peaks[1] / 2**30:.1f}; falls by "
        f"{fall / states:.3f} of the optimizer's {states / 2**30:.1f} GiB; largest difference of a "
        f"weight after 3 steps {worst:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("step", "compare", "offload"))
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--only")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: run this on a machine with one")
    elif arguments.what == "step":
        print(json.dumps(measure(arguments.model, arguments.batch)))
    elif arguments.what == "offload":
        offload(arguments.model)
    elif arguments.peer is None:
        print("give --peer DIR, a folder with TorchTitan 0.2.2 and its runner")
    else:
        compare(arguments.peer, arguments.only)


if __name__ == "__main__":
    main()
