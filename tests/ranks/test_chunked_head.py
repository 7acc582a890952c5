"""Losses in chunks of tokens on ranks: the numbers, the collectives and the memory that are
predicted, in layouts that share or split the head."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from fivefold.core import hardware as machine
from fivefold.core.layout import splits
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.model.head import GradientsInForward
from fivefold.planner.setting import estimate_setting
from fivefold.rehearse.rank import rehearse_rank
from fivefold.verify.runs import VerifiedRank, VerifySettings, run_rank, run_reference
from fivefold.verify.trial import judge
from tests.ranks.priced import planned_bytes

FEW = 2**11  # logits of a chunk
LAYOUTS: tuple[tuple[str, dict[str, Any], dict[str, str]], ...] = (
    ("dp=2", {"zero": 3, "microbatches": 2}, {}),
    ("dp=2", {"zero": 2, "microbatches": 2}, {"mtp": "1"}),
    ("tp=2", {}, {"vocab": "251"}),
    ("tp=2", {"sp": False}, {"tied": "true"}),
    ("tp=2 cp=2", {}, {"mtp": "1"}),
    ("dp=2", {}, {"logit_cap": "0.2"}),
    ("tp=2", {}, {"logit_cap": "0.2", "vocab": "251"}),
    ("pp=2", {"schedule": "1f1b"}, {}),
    ("dp=2 pp=2", {"schedule": "gpipe", "zero": 1}, {"tied": "true"}),
    ("pp=2", {"schedule": "pipedream-2bw"}, {}),
)
DEFERRED = ("pp=2", {"schedule": "zb-h1"}, {})


def plan_of(layout: str, said: dict[str, Any], changes: dict[str, str]) -> Plan:
    sizes = {"layers": "4" if "pp" in layout else "2", "width": "32"} | changes
    return resolve(PlanOptions("tiny", layout=layout, seq=64, set=sizes, **said), small=True)


def chunked_rank(worker: Worker, plan: Plan, settings: VerifySettings) -> tuple[VerifiedRank, int]:
    """A rank of a trial, and how many losses it has computed in chunks."""
    with (
        patch.object(splits, "MOST_LOGITS", FEW),
        patch.object(
            GradientsInForward, "apply", autospec=True, side_effect=GradientsInForward.apply
        ) as seen,
    ):
        return run_rank(worker, plan, settings), seen.call_count


@pytest.mark.sample(4)
@pytest.mark.parametrize(("layout", "said", "changes"), [*LAYOUTS, DEFERRED])
def test_a_layout_computes_what_one_device_does_with_all_logits(
    pool: Pool, layout: str, said: dict[str, Any], changes: dict[str, str]
) -> None:
    """Weight gradients that are deferred leave the head as it was."""
    plan, settings = plan_of(layout, said, changes), VerifySettings()
    ranks = [(chunked_rank, (plan, settings))] * plan.layout.world
    *runs, truths = pool.run_each([*ranks, (run_reference, (plan, settings))])
    verdict = judge(plan, settings, [run for run, _ in runs], truths)
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.traffic_match)
    chunked = sum(count for _, count in runs)
    assert chunked == 0 if said.get("schedule") == "zb-h1" else chunked > 0


# What chunks are for, as wide as it is: model, layout, rank, and what else.
WIDE: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("llama-3.2-1b", "dp=1", 0, {"microbatch_size": 2}),
    ("llama-3.2-1b", "dp=1", 0, {"microbatches": 2}),
    ("llama-3.1-8b", "dp=8", 0, {"microbatches": 2, "zero": 3}),
    ("llama-3.1-8b", "tp=2", 0, {"microbatches": 2}),
    ("llama-3.1-8b", "pp=2", 1, {"microbatches": 4, "schedule": "gpipe"}),
    ("llama-3.1-8b", "pp=2", 1, {"microbatches": 4, "schedule": "zb-h1"}),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernels", ["compiled", "eager"])
@pytest.mark.parametrize(("model", "layout", "rank", "said"), WIDE)
def test_a_rank_holds_one_chunk_of_logits(
    model: str, layout: str, rank: int, said: dict[str, Any], kernels: str
) -> None:
    """Rehearsed as it is planned, and less than with all logits."""
    layers = {"layers": "4" if "pp" in layout else "2"}
    recipe = Recipe(compile=kernels == "compiled")
    words = {"microbatches": 1, "seq": 8192, "train": recipe} | said
    plan = resolve(PlanOptions(model, layout=layout, set=layers, **words))
    setting, _ = estimate_setting(machine.load("h200"), "bf16", 0.0, kernels, 1.0)
    peaks: list[int] = []
    for most in (splits.MOST_LOGITS, 2**50):
        with patch.object(splits, "MOST_LOGITS", most):
            planned = planned_bytes(plan, setting, rank)
            peaks.append(rehearse_rank(plan, rank, None).peak)
        assert planned == pytest.approx(peaks[-1], rel=0.01)
    deferred = said.get("schedule") == "zb-h1"
    assert peaks[0] == peaks[1] if deferred else peaks[0] < peaks[1]
