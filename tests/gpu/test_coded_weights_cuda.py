"""Linears and experts of codes in fp8 beside float64, and an engine of them beside a CPU's.

On a machine without a GPU, `TRITON_INTERPRET=1 python3 tests/gpu/test_coded_weights_cuda.py` runs
the checks of kernels where Triton is installed, slowly.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from fivefold.core.model import presets
from fivefold.core.plan import PlanOptions
from fivefold.generate import LayoutEngine, Request, ScheduleLimits, mesh_of, plan_of, stage_of
from fivefold.launch.backend import num_gpus
from fivefold.model.fp8 import round_rows
from fivefold.verify.generated import GeneratedTrial

pytestmark = pytest.mark.skipif(
    not num_gpus(), reason="no CUDA device: run this where there is one"
)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TOKENS = (1, 2, 16, 17, 33, 64, 65, 200)
SIZES = {"narrow": (40, 130), "ragged": (77, 1100), "wide": (96, 2304)}
LARGE = {"8B gate and up": (28672, 4096), "8B down": (4096, 14336)}


def drawn(*sizes: int, seed: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def require_near(
    output: Tensor, exact: Tensor, terms: Tensor, count: int, halves: bool = False
) -> None:
    """Rounded once, after a float32 sum of so many terms, of which `terms` is the root of the
    summed squares: its error grows with the root of their number. With `halves`, products and
    their sums in pairs are rounded to float16 before: by at most 2^-11 each, so the deviation of
    all is at most 2^-11 of the root, and four of these are allowed."""
    rounding = torch.finfo(output.dtype).eps / 2
    bound = 1.01 * rounding * exact.abs() + 4 * count**0.5 * 2.0**-24 * terms
    bound += halves * 4 * 2.0**-11 * terms
    wrong = ((output.double() - exact).abs() / bound).max()
    assert wrong < 1, wrong


def same_linear(size: tuple[int, int], tokens: int, biased: bool, dtype: torch.dtype) -> None:
    from fivefold.generate.code_kernel import coded_linear

    outputs, inputs = size
    # Rows of very different sizes: the scale of a neighbour would be far off.
    weight = (drawn(outputs, inputs, seed=1) * torch.logspace(-3, 3, outputs)[:, None]).to(DEVICE)
    x = drawn(tokens, inputs, seed=2).to(DEVICE, dtype)
    x[:, 3::97] *= 3e4  # beyond float16
    bias = drawn(outputs, seed=3).to(DEVICE, dtype) if biased else None
    rows = round_rows([weight.to(dtype)], None)
    output = coded_linear(x, rows.codes, bias, rows.scale[:, None].contiguous())
    values = rows.codes.double() * rows.scale.double()[:, None]
    exact = x.double() @ values.T + (0 if bias is None else bias.double())
    terms = x.double() ** 2 @ (values**2).T + (0 if bias is None else bias.double() ** 2)
    halves = tokens == 1 and dtype == torch.bfloat16
    require_near(output, exact, terms.sqrt() + 1e-30, inputs, halves)


def same_experts(dtype: torch.dtype) -> None:
    from fivefold.generate.tile_kernel import multiply_tiles

    experts, outputs, inputs, ends = 4, 40, 200, (3, 3, 40, 45)
    weight = drawn(experts, outputs, inputs, seed=1) * torch.logspace(-2, 2, experts)[:, None, None]
    x = drawn(ends[-1], inputs, seed=2).to(DEVICE, dtype)
    rows = round_rows([weight.flatten(0, 1).to(DEVICE, dtype)], None)
    codes, scale = rows.codes.view(weight.shape), rows.scale.view(experts, outputs, 1)
    ends_E = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    output = multiply_tiles(x, codes, None, ends_E, 16, dtype, scale)
    values = codes.double() * scale.double()
    for expert, (start, stop) in enumerate(zip((0, *ends), ends, strict=False)):
        terms = (x[start:stop].double() ** 2 @ (values[expert] ** 2).T).sqrt() + 1e-30
        exact = x[start:stop].double() @ values[expert].T
        if stop > start:
            require_near(output[start:stop], exact, terms, inputs)


def same_tokens(model: str, batch_invariant: bool) -> None:
    """Greedy tokens of an engine on the GPU, beside those on the CPU."""
    shape = replace(presets.load(model), max_seq=160, layers=2, mtp=0)
    plan = replace(plan_of(shape, PlanOptions("tiny")), shape=shape)
    requests = [
        Request(f"{i}", tuple(int(token) for token in row[: 5 + 60 * i]), 12)
        for i, row in enumerate((drawn(3, 130, seed=4).abs() * 1e4).long() % shape.vocab)
    ]
    found: list[list[tuple[int, ...]]] = []
    for device in (torch.device("cuda"), torch.device("cpu")):
        trial, mesh = GeneratedTrial(shape, "float32", 0), mesh_of(plan, device, batch_invariant)
        stage = stage_of(plan, mesh, torch.float32, batch_invariant, codes=True)

        def read(weight: object, dtype: torch.dtype, trial: GeneratedTrial = trial) -> Tensor:
            full = trial.full_weight(weight.name)  # type: ignore[attr-defined]
            assert full is not None
            return full

        stage.fill(read)
        engine = LayoutEngine(
            plan, mesh, stage, 40, ScheduleLimits(256), batch_invariant=batch_invariant
        )
        completions = engine.run(requests)
        engine.close()
        found.append([completions[request.id].tokens for request in requests])
    assert found[0] == found[1], found


def checks() -> dict[str, partial[None]]:
    cases: dict[str, partial[None]] = {}
    for dtype in (torch.float32,) if INTERPRETED else (torch.float32, torch.bfloat16):
        shown = str(dtype)[6:]
        for name, size in SIZES.items() if INTERPRETED else {**SIZES, **LARGE}.items():
            for tokens in TOKENS:
                for biased in (False, True):
                    case = f"{name}, {tokens} tokens, {'bias, ' * biased}{shown}"
                    cases[case] = partial(same_linear, size, tokens, biased, dtype)
        cases[f"experts, {shown}"] = partial(same_experts, dtype)
    for model in () if INTERPRETED else ("tiny", "tiny-moe"):
        for batch_invariant in (False, True):
            case = f"tokens of {model}{' batch-invariant' * batch_invariant}"
            cases[case] = partial(same_tokens, model, batch_invariant)
    return cases


@pytest.mark.parametrize("name", checks())
def test_codes_on_a_gpu(name: str) -> None:
    """In a process of its own: later tests fork, which no CUDA survives."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]


if __name__ == "__main__":
    failed = 0
    for case in sys.argv[1:] or checks():
        try:
            checks()[case]()
        except Exception as error:
            failed += 1
            print("FAILED ", case, type(error).__name__, str(error)[-600:], flush=True)
        else:
            print("passed ", case, flush=True)
    sys.exit(failed > 0)
