"""Gradients that leave the device after their reduction: the same weights, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_steps import Setup, run, small_plan
from torch import Tensor

from fivefold.cli import main
from fivefold.launch.processes import Pool
from fivefold.optim.optimizer import Updater
from fivefold.parallel.composition import Job

EXPERTS = {"moe.experts": "4", "moe.top_k": "2", "moe.ffn": "24"}
CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("dp=1", 0, {}),
    ("dp=1", 0, {"grad_dtype": "bf16"}),
    ("dp=4", 2, {}),
    ("dp=4", 3, {"grad_dtype": "bf16", "unit_size": 0.01}),
    ("dp=2x2", 3, {}),
    ("dp=2x2", 2, {"grad_dtype": "bf16"}),
    ("dp=2 tp=2", 3, {}),
    ("dp=2 pp=2", 2, {"schedule": "zb-h1", "set": {"tied": "true"}}),
    ("dp=2 pp=2", 3, {"gather": "microbatch", "set": {"tied": "true"}}),
    ("cp=2 pp=2", 3, {"schedule": "dualpipe"}),
    ("dp=4 ep=2", 2, {"set": EXPERTS}),
)


# A rank that reduces with nobody adds float32 gradients to bf16 sums without rounding them first,
# unless the sums are elsewhere: only there a bit may differ.
RUNS = [
    (*case, dtype)
    for case in CASES
    for dtype in (torch.float32, torch.bfloat16)
    if (case[0], case[2], dtype) != ("dp=1", {"grad_dtype": "bf16"}, torch.float32)
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", ["cpu", "files"])
@pytest.mark.parametrize(("layout", "zero", "said", "dtype"), RUNS, ids=str)
def test_weights_are_those_of_resident_gradients(
    layout: str,
    zero: int,
    said: dict[str, Any],
    dtype: torch.dtype,
    place: str,
    pool: Pool,
    tmp_path: Path,
) -> None:
    keys = {name: value for name, value in said.items() if name != "set"}
    changes = {"layers": "4"} | said.get("set", {})
    plan = small_plan(layout, changes, zero=zero, **({"microbatches": 4} | keys))
    here = Setup(dtype=dtype)
    away = replace(here, offload_grads="cpu" if place == "cpu" else str(tmp_path))
    resident, offloaded = run(pool, plan, here, weights_of), run(pool, plan, away, weights_of)
    for (wanted, _), (found, homes) in zip(resident, offloaded, strict=True):
        assert homes and all(map(torch.equal, found, wanted))
    assert not any(homes for _, homes in resident)


def weights_of(job: Job, *_: Updater) -> Callable[[], tuple[list[Tensor], int]]:
    """What this rank owns after the last step, and how many gradients have a home."""

    def look() -> tuple[list[Tensor], int]:
        homes = sum(unit.home is not None for unit in job.units)
        return [each.tensor.detach().clone() for each in job.owned], homes

    return look


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--layout dp=2 --zero 1", "gradients leave the device once they are reduced"),
        ("--layout dp=2x1 --zero 3", "use zero = 2 or 3 and shards"),
        ("--set optimizer=muon", "muon updates full matrices from gradients on the device"),
    ],
)
def test_what_cannot_leave_is_refused(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "tiny", *words.split(), "--set", "offload_grads=cpu"])
    assert ended.value.code == 2 and reason in capsys.readouterr().err
