"""One GPU: tokens/s and memory of our step beside a peer's, and what offload saves.

    python benchmarks/gpu.py step 8B                          our step, one JSON line
    python benchmarks/gpu.py compare --peer DIR [--only 8B]   ours and the peer's in turn
    python benchmarks/gpu.py offload                          peak memory with and without
    python benchmarks/gpu.py lora                             adapters beside full fine-tuning

bf16 weights, gradients and states, AdamW, compiled; medians after a warm-up. The clock is read once
in ten steps, as both programs do by default, so that neither waits at the end of every step. The
peer is TorchTitan 0.2.2 in DIR, which `python benchmarks/peer.py DIR` makes.
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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

SEQ = 8192
# The head stays in bf16, as ours does.
PEER_FP8 = """--model.converters quantize.linear.float8 --quantize.linear.float8.filter_fqns output
    --quantize.linear.float8.recipe_name tensorwise"""


@dataclass(frozen=True)
class Case:
    """One job for both programs."""

    model: str
    batch: int
    peer: tuple[str, str]  # its name and flavour of the model
    seq: int = SEQ
    recompute: str = "none"
    warm_up: int = 10
    measured: int = 20
    between: int = 10  # steps from one reading of the clock to the next
    changes: dict[str, str] = field(default_factory=dict[str, str])
    keys: dict[str, str] = field(default_factory=dict[str, str])  # of the plan
    peer_options: str = ""
    train: dict[str, int] = field(default_factory=dict[str, int])  # of `[train]`


LONG = Case(
    "llama-3.1-8b", 1, ("llama3_rand", "8B"), 32768, "full", warm_up=3, measured=6, between=3
)
CASES = {
    "1B": Case("llama-3.2-1b", 2, ("llama3_rand", "1B")),
    "8B": Case("llama-3.1-8b", 1, ("llama3_rand", "8B")),
    "8B-lean": Case("llama-3.1-8b", 1, ("llama3_rand", "8B"), recompute="act"),
    "MoE": Case("qwen3-30b-a3b", 2, ("qwen3_rand", "30B-A3B-8L"), changes={"layers": "8"}),
    "8B-fp8": Case(
        "llama-3.1-8b",
        1,
        ("llama3_rand", "8B"),
        keys={"precision": "fp8"},
        peer_options=PEER_FP8,
    ),
    "8B-fp8-blocks": Case(
        "llama-3.1-8b",
        1,
        ("llama3_rand", "8B"),
        keys={"precision": "fp8", "fp8": "blockwise"},
        peer_options=PEER_FP8.replace("tensorwise", "rowwise"),
    ),
    "MoE-fp8": Case(
        "qwen3-30b-a3b",
        2,
        ("qwen3_rand", "30B-A3B-8L"),
        changes={"layers": "8"},
        keys={"precision": "fp8"},
    ),
    "8B-lora": Case("llama-3.1-8b", 1, ("llama3_rand", "8B"), train={"lora": 16}),
    "8B-32k": LONG,
    "8B-32k-kept": replace(LONG, recompute="full-but-attention"),
}


def build(case: Case, offload: bool = False):  # noqa: ANN201
    from fivefold.core.plan.plan import PlanOptions, resolve
    from fivefold.core.plan.recipe import Recipe
    from fivefold.model.kernels.regions import compiled
    from fivefold.optim.updater import make_updater
    from fivefold.parallel.composition import compose
    from fivefold.parallel.mesh import Mesh

    sizes = {"seq": case.seq, "microbatches": 1, "microbatch_size": case.batch}
    changes = {"tied": "false"} | case.changes
    keys = {"grad_dtype": "bf16", "recompute": case.recompute, **case.keys}
    recipe = Recipe(lr=3e-4, offload="cpu" if offload else "none", **case.train)
    plan = resolve(PlanOptions(case.model, set=changes, train=recipe, **keys, **sizes))
    mesh = Mesh.of(plan, torch.device("cuda"))
    how = {"dtype": torch.bfloat16, "offload": offload, "as_summed": False, "fuse": compiled}
    job = compose(plan, mesh, seed=0, **how)
    return plan, job, make_updater(recipe, job.owned, mesh.device)


def random_batch(vocab: int, case: Case, seed: int):  # noqa: ANN201
    from fivefold.model.batch import TokenBatch

    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = torch.randint(vocab, (case.batch, case.seq + 1), generator=generator, device="cuda")
    positions = torch.arange(case.seq, device="cuda").expand(case.batch, case.seq)
    return TokenBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions)


def measure(case: Case) -> dict[str, float]:
    """Our step as training runs it, guarded: tokens/s and memory."""
    from fivefold.core.model import training_flops
    from fivefold.step import Guard, step

    plan, job, optimizer = build(case)
    times, start = [], time.perf_counter()
    for number in range(case.warm_up + case.measured):
        batch = random_batch(plan.shape.vocab, case, number)
        guard = Guard(uncount=partial(optimizer.resume_after, number))
        outcome = step(job, optimizer, [batch], 1.0, guard)
        if (number + 1) % case.between == 0:
            torch.cuda.synchronize()
            start, last = time.perf_counter(), start
            times.append((start - last) / case.between)
    seconds = median(times[case.warm_up // case.between :])
    tokens = case.batch * case.seq
    return {
        "tokens_per_s": tokens / seconds,
        "ms": 1e3 * seconds,
        "tflops": training_flops(plan.shape, case.seq).total * tokens / seconds / 1e12,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "loss": float(outcome.loss),
    }


def measure_peer(folder: Path, case: Case) -> dict[str, float] | None:
    """The peer's own log: the median of its tokens/s after warm-up, and its reserved memory; None
    where it runs out of memory."""
    name, flavor = case.peer
    recompute = "full" if case.recompute.startswith("full") else "none"
    words = f"""-m torch.distributed.run --nproc_per_node=1 {folder}/peer_torchtitan.py
        --model.name {name} --model.flavor {flavor} --training.seq_len {case.seq}
        --training.local_batch_size {case.batch} --training.dtype bfloat16
        --activation_checkpoint.mode {recompute} --compile.enable
        --training.steps {case.warm_up + case.measured} --metrics.log_freq {case.between}
        {case.peer_options}""".split()
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    log = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    if "OutOfMemoryError" in log:
        return None
    rows = re.findall(r"step:\s*(\d+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)", log)
    if not rows:
        raise SystemExit(f"the peer printed no steps:\n{log[-2000:]}")
    warm = [float(tps.replace(",", "")) for number, _, tps in rows if int(number) > case.warm_up]
    return {"tokens_per_s": median(warm), "reserved_gib": max(float(gib) for _, gib, _ in rows)}


def compare(folder: Path, only: list[str], times: int) -> None:
    """So many times in turn, each in a process of its own."""
    print(
        f"matrix product ceiling: {ceiling():.0f} TFLOP/s (bf16, 8192 cubed, random data)",
        flush=True,
    )
    for name in only or CASES:
        ours, theirs = [], []
        for _ in range(times):
            words = [sys.executable, __file__, "step", name]
            ours.append(json.loads(subprocess.check_output(words, text=True).splitlines()[-1]))
            theirs.append(measure_peer(folder, CASES[name]))
            print(json.dumps({"case": name, "ours": ours[-1], "peer": theirs[-1]}), flush=True)
        print(f"{name}: {verdict(ours, [each for each in theirs if each])}", flush=True)


def compare_adapters(times: int) -> None:
    """8B with adapters and in full, so many times in turn, each in a process of its own."""
    found: dict[str, list[dict[str, float]]] = {"8B": [], "8B-lora": []}
    for _ in range(times):
        for name, rows in found.items():
            words = [sys.executable, __file__, "step", name]
            rows.append(json.loads(subprocess.check_output(words, text=True).splitlines()[-1]))
            print(json.dumps({"case": name, **rows[-1]}), flush=True)
    full, part = (
        {key: median(one[key] for one in rows) for key in ("tokens_per_s", "reserved_gib")}
        for rows in found.values()
    )
    print(
        f"lora=16: {part['tokens_per_s']:,.0f} tokens/s, {part['reserved_gib']:.1f} GiB reserved; "
        f"in full {full['tokens_per_s']:,.0f}, {full['reserved_gib']:.1f} GiB: "
        f"{part['tokens_per_s'] / full['tokens_per_s']:.3f} times as fast"
    )


def verdict(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> str:
    """Both medians, and their ratios."""
    speed, memory = (median(one[key] for one in ours) for key in ("tokens_per_s", "reserved_gib"))
    text = f"{speed:,.0f} tokens/s, {memory:.1f} GiB reserved"
    if not theirs:
        return f"{text}; the peer runs out of memory"
    peer_speed, peer_memory = (
        median(one[key] for one in theirs) for key in ("tokens_per_s", "reserved_gib")
    )
    return (
        f"{text}; the peer {peer_speed:,.0f}, {peer_memory:.1f} GiB: "
        f"{speed / peer_speed:.3f} times as fast, {memory / peer_memory:.3f} times the memory"
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


def offload(case: Case) -> None:
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
        plan, job, optimizer = build(case, offloaded)
        for number in range(3):
            step(job, optimizer, [random_batch(plan.shape.vocab, case, number)], 1.0)
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
        f"{case.model}: peak {peaks[0] / 2**30:.1f} GiB, with offload {peaks[1] / 2**30:.1f}; "
        f"falls by {fall / states:.3f} of the optimizer's {states / 2**30:.1f} GiB; "
        f"largest difference of a weight after 3 steps {worst:.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("step", "compare", "offload", "lora"))
    parser.add_argument("case", nargs="?", default="8B", choices=tuple(CASES))
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--only", nargs="*", default=[], choices=tuple(CASES))
    parser.add_argument("--times", type=int, default=3)
    said = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: run this on a machine with one")
    elif said.what == "step":
        print(json.dumps(measure(CASES[said.case])))
    elif said.what == "offload":
        offload(CASES[said.case])
    elif said.what == "lora":
        compare_adapters(said.times)
    elif said.peer is None:
        print("give --peer DIR, a folder that python benchmarks/peer.py DIR makes")
    else:
        compare(said.peer, said.only, said.times)


if __name__ == "__main__":
    main()
