"""What `core/traffic.py` predicts is what a step issues, on every rank, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from forked_steps import Setup, run, small_plan

from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.traffic.collectives import predict_traffic, traffic_entries
from fivefold.launch.processes import Pool
from fivefold.parallel.composition import Job
from fivefold.verify.runs import VerifySettings
from fivefold.verify.trial import run_trial

KV_SHARED = {"kv_heads": "2"}
TIED = {"tied": "true"}
LEARNED = {"positions": "learned", "norm_bias": "true"}
BIASED = {"qkv_bias": "true", "out_bias": "true", "qk_norm": "head", "vocab": "61"}


class Case(NamedTuple):
    layout: str
    zero: int
    sp: bool = True
    recompute: str = "none"
    changes: dict[str, str] = {}  # noqa: RUF012 - a NamedTuple's default is never written to
    microbatches: int = 2
    microbatch_size: int = 1
    bucket: int | None = 10_000
    double: bool = False
    grad_dtype: str = "fp32"
    offload: bool = False

    def __str__(self) -> str:
        """The layout and whatever is not as usual."""
        usual = self._field_defaults
        said = {name: value for name, value in self._asdict().items() if name in usual}
        said = {name: value for name, value in said.items() if value != usual[name]}
        changes = " ".join(f"{name}={value}" for name, value in said.pop("changes", {}).items())
        words = [f"{name}={value}" for name, value in said.items()]
        return " ".join(filter(None, [self.layout, f"zero={self.zero}", *words, changes]))


def every_case() -> Iterator[Case]:
    """Each axis by itself in every form, then together with what changes their traffic."""
    for zero in range(4):
        for layout in ("dp=2", "dp=3", "dp=2x2", "dp=2x1"):
            yield Case(layout, zero, microbatches=3)
        yield Case("dp=2", zero, bucket=None, changes=TIED)
        yield Case("dp=2", zero, bucket=3_000, double=True, changes=TIED | LEARNED)
        yield Case("dp=2", zero, grad_dtype="bf16")
        yield Case("dp=2 tp=2", zero, offload=True)
        yield Case("dp=2x2 tp=2", zero, sp=False, changes=BIASED)
        yield Case("dp=2 tp=4", zero, changes=KV_SHARED | TIED, double=True)
    for sp in (True, False):
        for recompute in ("none", "selective", "full", "full:2", "full:5"):
            yield Case("tp=2", 3, sp, recompute, microbatch_size=2, double=True)
            yield Case("dp=2 tp=2", 3, sp, recompute, changes=BIASED | {"layers": "5"})
    for bucket in (None, 2_000, 9_000, 14_000, 30_000, 60_000):
        for changes in ({}, TIED):
            yield Case("dp=2", 3, recompute="full:2", bucket=bucket, changes=changes)
            yield Case("dp=3", 3, recompute="full", bucket=bucket, changes=changes | LEARNED)
    yield Case("tp=4", 0, changes=KV_SHARED | BIASED, microbatches=1)
    yield Case("tp=4", 0, sp=False, changes=KV_SHARED | BIASED, microbatches=1)
    yield Case("dp=1", 3, offload=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", every_case(), ids=str)
def test_predicted_is_observed(case: Case, pool: Pool) -> None:
    plan = small_plan(
        case.layout,
        case.changes,
        zero=case.zero,
        sp=case.sp,
        recompute=case.recompute,
        microbatches=case.microbatches,
        microbatch_size=case.microbatch_size,
        grad_dtype=case.grad_dtype,
        unit_size=None if case.bucket is None else case.bucket / 1e6,
    )
    setup = Setup(
        dtype=torch.float64 if case.double else torch.float32,
        offload=case.offload,
    )
    for rank, observed in enumerate(run(pool, plan, setup, recorded)):
        predicted = predict_traffic(plan, rank, itemsize=setup.itemsize)
        assert traffic_entries(observed.items()) == predicted, f"rank {rank}"


# A weight that a microbatch uses several times (each depth of multi-token prediction uses embedding
# and head) gives several gradients to a split backward, and is still reduced once.
USED_AGAIN = {
    "hybrid sharding": PlanOptions(
        "tiny",
        layout="dp=2x2 pp=2",
        set={"layers": "2", "mtp": "3", "tied": "true"},
        schedule="zb-h1",
        zero=1,
        seq=8,
        microbatches=2,
    ),
    "two chunks": PlanOptions(
        "tiny-moe",
        layout="dp=2 pp=2 cp=2 ep=2 order=tp-cp-pp-dp",
        set={"layers": "4", "mtp": "2", "moe.score": "sigmoid"},
        balance="capacity:1.25",
        packed=True,
        context="ring",
        recompute="full",
        schedule="zb-interleaved",
        zero=1,
        seq=31,
        microbatches=2,
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", USED_AGAIN)
def test_a_weight_that_is_used_again_is_reduced_once(name: str, pool: Pool) -> None:
    plan = resolve(USED_AGAIN[name], small=True)
    verdict = run_trial(pool, plan, VerifySettings(steps=1))
    assert verdict.traffic_match, verdict.traffic
    assert verdict.passed, (verdict.errors, verdict.tolerance)


def recorded(job: Job, *_: object) -> Callable[[], dict[Any, int]]:
    return lambda: {tuple(record): count for record, count in job.mesh.records.items()}


def test_no_case_is_listed_twice() -> None:
    cases = list(every_case())
    assert len(set(map(str, cases))) == len(cases) > 60
