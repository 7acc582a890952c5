"""fp8 on one GPU: what matmuls and rounding take, how kernels cut a tensor, and a step of 8B.

    python benchmarks/fp8.py                      all three, about 3 minutes
    python benchmarks/fp8.py matmuls tiles        these alone, about 40 seconds

Times are medians in ms of one call at 8,192 tokens. Every part prints what it has, whatever happens
to the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS = 8192
# Outputs and inputs of the fused matmuls of a layer of Llama-3.1-8B.
SHAPES = {
    "qkv": ((4096, 1024, 1024), 4096),
    "out": ((4096,), 4096),
    "gate+up": ((14336, 14336), 4096),
    "down": ((4096,), 14336),
}
LAYERS = 32
STEPS = ("8B", "8B-fp8", "8B-fp8-blocks")
LONGEST = 150  # seconds of one step's process


def milliseconds(call: Callable[[], object], times: int = 9) -> float:
    """The median of several calls, after two."""
    taken: list[float] = []
    for number in range(times + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if number > 1:
            taken.append(start.elapsed_time(end))
    return median(taken)


def timed(call: Callable[[], object]) -> float | str:
    """Milliseconds, or what went wrong."""
    try:
        return round(milliseconds(call), 4)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"


def of_shape(widths: tuple[int, ...], inputs: int) -> Iterator[tuple[str, float | str]]:
    """bf16, tensorwise and blockwise: each matmul, each rounding, and all of a linear together."""
    from fivefold.core.layout.fp8 import Fp8, Fp8Format
    from fivefold.core.layout.groups import Topology
    from fivefold.core.layout.layout import Layout
    from fivefold.model.fp8.linear import FusedLinears, RoundedWeights
    from fivefold.model.fp8.matmul import scaled_matmul
    from fivefold.model.fp8.operand import Both
    from fivefold.model.fp8.rounding import Rounding, rounding_of
    from fivefold.parallel.boundary import AxisBoundary
    from fivefold.parallel.mesh import Mesh
    from fivefold.parallel.tensor import NOT_SHARED, SplitMatmuls

    mesh = Mesh(Topology(Layout()), torch.device("cuda"))
    one_device: Any = SplitMatmuls(AxisBoundary(mesh, "tp", False, 0), None, 1, row=TOKENS)
    outputs = sum(widths)
    x = torch.randn(TOKENS, inputs, device="cuda").bfloat16()
    grads = [torch.randn(TOKENS, width, device="cuda").bfloat16() for width in widths]
    weights = [torch.randn(width, inputs, device="cuda").bfloat16() * 0.02 for width in widths]
    whole, grad = torch.cat(weights), torch.cat(grads, -1)
    yield "bf16 forward", timed(lambda: F.linear(x, whole))
    yield "bf16 dgrad", timed(lambda: grad @ whole)
    yield "bf16 wgrad", timed(lambda: grad.T @ x)
    for fp8 in (Fp8(), Fp8.parse("blockwise")):
        name, rounding = fp8.scaling, rounding_of(fp8)

        def tokens(parts: list[Tensor], form: Fp8Format, r: Rounding = rounding) -> Both:
            return r.tokens(parts, form, True, TOKENS, r.maximum(parts))

        def of_weights(r: Rounding = rounding) -> Both:
            return r.weights(weights, r.weight_maximum(weights))

        form = fp8.gradients
        yield f"{name} round input", timed(lambda t=tokens: t([x], "e4m3"))
        yield f"{name} round gradient", timed(lambda t=tokens, f=form: t(grads, f))
        yield f"{name} round weight", timed(of_weights)
        of_x, of_weight, of_grad = tokens([x], "e4m3"), of_weights(), tokens(grads, form)
        for kind, a, b in (
            ("forward", of_x.rows, of_weight.rows),
            ("dgrad", of_grad.rows, of_weight.columns),
            ("wgrad", of_grad.columns, of_x.columns),
        ):
            assert a is not None and b is not None
            for fast in (False, True) if name == "tensorwise" else (False,):
                took = timed(lambda a=a, b=b, f=fast: scaled_matmul(a, b, torch.bfloat16, f))
                yield f"{name} {kind}{' fast' if fast else ''}", took
                if isinstance(took, float):
                    rate = 2e-9 * TOKENS * outputs * inputs / took
                    yield f"{name} {kind}{' fast' if fast else ''} TFLOP/s", round(rate)
        math = FusedLinears(["one"], fp8, rounding, RoundedWeights())
        leaves = [x.detach().requires_grad_(), *(w.detach().requires_grad_() for w in weights)]

        def both_ways(math: FusedLinears = math, leaves: list[Any] = leaves) -> None:
            linears = [SimpleNamespace(weight=each, bias=None) for each in leaves[1:]]
            found = one_device.project(False, math, NOT_SHARED, leaves[0], linears)
            torch.autograd.grad(found, leaves, grads)

        yield f"{name} forward and backward, weights rounded", timed(both_ways)

    leaves = [x.detach().requires_grad_(), *(w.detach().requires_grad_() for w in weights)]

    def plain() -> None:
        torch.autograd.grad([F.linear(leaves[0], w) for w in leaves[1:]], leaves, grads)

    yield "bf16 forward and backward", timed(plain)


def matmuls() -> None:
    """Each fused matmul of a layer, and the sums over all layers."""
    total: dict[str, float] = {}
    for name, (widths, inputs) in SHAPES.items():
        row = dict(of_shape(widths, inputs))
        print(json.dumps({"matmul": name, **row}), flush=True)
        for key, took in row.items():
            if isinstance(took, float) and "TFLOP" not in key:
                total[key] = total.get(key, 0.0) + took * LAYERS
    sums = {key: round(took, 1) for key, took in total.items()}
    print(json.dumps({"matmul": f"all of {LAYERS} layers", **sums}), flush=True)


def tiles() -> None:
    """GB/s of kernels by the sizes of their tiles, of a tensor of 8,192 × 14,336."""
    from fivefold.model.fp8 import kernel as kernel

    rows, width = TOKENS, 14336
    x = torch.randn(rows, width, device="cuda").bfloat16()
    codes = torch.empty(rows, width, dtype=torch.uint8, device="cuda")
    turned = torch.empty(width, rows, dtype=torch.uint8, device="cuda")
    maximum, scale = x.abs().amax().float(), torch.empty((), device="cuda")
    numbers = kernel._numbers("e4m3")

    def say(name: str, size: int, call: Callable[[], object]) -> None:
        took = timed(call)
        rate = round(size / took / 1e6) if isinstance(took, float) else None
        print(json.dumps({"kernel": name, "ms": took, "GB/s": rate}), flush=True)

    for programs in (2, 4, 8, 16):
        for size in (2048, 4096, 8192):
            grid = (programs * kernel._processors(x.device),)
            run = lambda g=grid, s=size: kernel._maximum[g](x, scale, x.numel(), SIZE=s)  # noqa: E731
            say(f"maximum, {programs} programs, {size}", x.nbytes, run)
    for high, wide, warps in (
        *((64, 64, 4), (128, 64, 4), (128, 64, 8), (64, 128, 4), (128, 128, 8), (256, 64, 8)),
        *((64, 256, 8), (128, 32, 4), (256, 32, 4)),
    ):
        cut = {"ROWS": high, "COLUMNS": wide, "num_warps": warps}
        grid = (rows // high, width // wide)
        run = lambda g=grid, c=cut: kernel._cast_tensor[g](  # noqa: E731
            x, maximum, scale, codes, turned, rows, width, width, rows, **numbers, BOTH=True, **c
        )
        say(f"cast {high}x{wide}, {warps} warps", 2 * x.nbytes, run)
    scales = [torch.empty(width, rows // 128, device="cuda") for _ in range(2)]
    for warps in (4, 8, 16):
        run = lambda w=warps: kernel._cast_blocks[(rows // 128, width // 128)](  # noqa: E731
            *(x, codes, scales[0], turned, scales[1], rows, width, rows // 128, rows),
            *(width, rows, width),
            **numbers,
            BOTH=True,
            SIZE=128,
            num_warps=w,
        )
        say(f"blocks, {warps} warps", 2 * x.nbytes, run)


def step() -> None:
    """Tokens/s of 8B in bf16 and fp8, each in a process of its own."""
    script = Path(__file__).with_name("gpu.py")
    for case in STEPS:
        words = [sys.executable, str(script), "step", case]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST)
            last = (done.stdout.splitlines() or [""])[-1]
            found = last if last.startswith("{") else done.stderr[-1500:]
        except subprocess.TimeoutExpired:
            found = f"took longer than {LONGEST} s"
        print(f"{case}: {found}", flush=True)


PARTS = {"matmuls": matmuls, "tiles": tiles, "step": step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[*PARTS], help=", ".join(PARTS))
    said = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: run this on a machine with one")
        return
    for name in said.parts:
        try:
            PARTS[name]()
        except Exception:
            print(f"{name} failed:\n{traceback.format_exc()[-2000:]}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
