"""Context ranks against one process: every kind, alone and with the other dimensions.

Those of the list in `contexts.py` that differ most; `python -m tests.ranks.contexts` runs all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contexts import (
    ATTENTION,
    DATA,
    DEGREES,
    HEADS,
    KINDS,
    MODELS,
    RECOMPUTES,
    ROWS,
    SCHEDULES,
    STAGES,
    Case,
    cases,
    most_error,
    part,
    prove,
)
from forked_steps import Setup, run, small_plan
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fivefold.core.layout.splits import ContextKind
from fivefold.data.batches import samples
from fivefold.launch.processes import Pool
from fivefold.model.batch import NOT_COUNTED
from fivefold.parallel import context
from fivefold.parallel.composition import Job
from fivefold.parallel.mesh import Issued
from fivefold.parallel.transport import InFlight
from fivefold.verify.runs import VerifySettings
from fivefold.verify.trial import run_trial

NUM_CASES = 3


@pytest.mark.parametrize("case", part()[:NUM_CASES], ids=str)
def test_context_ranks_compute_what_one_process_does(pool: Pool, case: Case) -> None:
    verdict = prove(pool, case)
    assert verdict.traffic_match, verdict.traffic
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)
    assert max(verdict.errors.values()) <= most_error(case)


def test_the_list_has_everything_once() -> None:
    everything = list(cases())
    assert len(set(map(str, everything))) == len(everything) > 150
    for kind in KINDS:
        mine = [case for case in everything if case.context == kind]
        for degree in DEGREES:
            alone = [case for case in mine if case.layout == f"cp={degree}"]
            assert {case.rows for case in alone} >= {"whole", "packed"}
            assert {case.model for case in alone} >= {"tiny", "window", "one KV head"}
        assert {case.zero for case in mine if case.layout == DATA} == {0, 1, 2, 3}
        assert {case.schedule for case in mine if case.layout == STAGES} == set(SCHEDULES)
        assert {case.recomputed for case in mine} == set(RECOMPUTES)
        assert {case.model for case in mine} >= set(MODELS)


def test_the_part_has_everything() -> None:
    mine = part()
    assert len(mine) < len(list(cases())) / 4
    for kind in KINDS:
        those = [case for case in mine if case.context == kind]
        layouts = {*(f"cp={degree}" for degree in DEGREES), DATA, STAGES, HEADS}
        assert {case.layout for case in those} == layouts
        assert {case.named_rows for case in those} == set(ROWS)
        assert {case.named_model for case in those} >= set(ATTENTION)
        assert {case.recomputed for case in those} == set(RECOMPUTES)
    assert {case.named_model for case in mine} == set(MODELS)
    assert {case.zero for case in mine if case.layout == DATA} == {0, 1, 2, 3}
    assert {case.schedule for case in mine if case.layout == STAGES} == set(SCHEDULES)
    assert {case.sp for case in mine} == {True, False}
    assert {case.dtype for case in mine} == {"float64", "float32"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_values_may_be_wider_than_keys(pool: Pool, kind: ContextKind) -> None:
    """Latent attention: keys are 6 wide and values 14; both travel as 14."""
    latents = {"mla.kv_rank": "12", "mla.nope_dim": "2", "mla.rope_dim": "4", "mla.value_dim": "14"}
    plan = small_plan("cp=4", latents | {"head_dim": "6"}, context=kind, packed=True)
    verdict = run_trial(pool, plan, VerifySettings())
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)


# ---- what is kept, and what is never moved twice


def heard(job: Job, *_: object) -> Callable[[], tuple[dict[Any, int], int]]:
    """The collectives of attention in the last step, and the parts of attention in both."""
    attend, parts = context.attend, 0

    def counted(*arguments: Any) -> tuple[Tensor, Tensor]:
        nonlocal parts
        parts += 1
        return attend(*arguments)

    context.attend = counted

    def look() -> tuple[dict[Any, int], int]:
        context.attend = attend
        return {
            record: count
            for record, count in job.mesh.records.items()
            if record.axis in ("ring", "ulysses")
        }, parts

    return look


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_selective_recomputation_repeats_no_transfer_and_no_attention(
    pool: Pool, kind: ContextKind
) -> None:
    """The dispatcher sees the same as these records: every case above requires it."""
    plans = [
        small_plan("cp=4", context=kind, recompute=each, microbatches=1)
        for each in ("none", "selective")
    ]
    for none, selective in zip(*(run(pool, plan, Setup(), heard) for plan in plans), strict=True):
        assert all(none) and selective == none


def most_blocks(job: Job, *_: object) -> Callable[[], dict[torch.dtype, int]]:
    """The most blocks on a ring that are alive at once, by type, and those that never end."""
    alive: dict[torch.dtype, dict[int, StorageWeakRef]] = {}
    most: Counter[torch.dtype] = Counter()
    pass_on = job.mesh.pass_on

    def look_again(dtype: torch.dtype) -> None:
        here = alive.setdefault(dtype, {})
        alive[dtype] = {key: each for key, each in here.items() if not each.expired()}
        most[dtype] = max(most[dtype], len(alive[dtype]))

    def watched(tensor: Tensor, axis: str) -> Issued:
        passing = pass_on(tensor, axis)
        assert isinstance(passing.pending, InFlight) and passing.pending.home is not None
        for each in (tensor, passing.pending.home):
            reference = StorageWeakRef(each.untyped_storage())
            alive.setdefault(each.dtype, {})[reference.cdata] = reference
        look_again(tensor.dtype)
        return passing

    job.mesh.pass_on = watched  # type: ignore[method-assign]

    def look() -> dict[torch.dtype, int]:
        found = dict(most)
        for dtype in found:
            look_again(dtype)
            assert not alive[dtype], "a block outlives its step"
        return found

    return look


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "layout"), [("ring", "cp=4"), ("zigzag", "cp=4"), ("hybrid", "cp=8")]
)
def test_a_place_holds_two_blocks_of_keys_and_values(
    pool: Pool, kind: ContextKind, layout: str
) -> None:
    """And two of their gradients, which are float32 here: what is sent, and what comes."""
    plan = small_plan(layout, context=kind, microbatches=1)
    assert plan.split.outer == 4
    for found in run(pool, plan, Setup(dtype=torch.bfloat16), most_blocks):
        assert found == {torch.bfloat16: 2, torch.float32: 2}


# ---- rows


def test_packed_rows_are_documents_of_random_lengths() -> None:
    plan = small_plan("dp=4", packed=True, microbatches=8, microbatch_size=4)
    drawn, again = (samples(plan.batch, 64, 3, 1, packed=True) for _ in range(2))
    whole = drawn.as_batch()
    documents, positions, labels = drawn.documents, whole.positions, whole.labels
    assert documents is not None and documents.equal(again.documents)
    documents = documents.flatten(0, 2)
    told = whole.documents
    assert told is not None and told.numbers(torch.device("cpu")).equal(documents)
    assert set((documents[:, -1] + 1).tolist()) == {1, 2, 3, 4, 5}
    steps = documents.diff(dim=1)
    assert documents[:, 0].eq(0).all() and steps.ge(0).all() and steps.le(1).all()
    begins = torch.cat([torch.ones(len(steps), 1), steps], dim=1).bool()
    assert positions[begins].eq(0).all() and positions.diff(dim=1)[steps.eq(0)].eq(1).all()
    ends = torch.cat([steps, torch.ones(len(steps), 1)], dim=1).bool()
    assert labels[ends].eq(NOT_COUNTED).all() and labels[~ends].ne(NOT_COUNTED).any()


def test_every_rank_gets_its_tokens_with_their_places_and_labels() -> None:
    """Padded and packed: what the ranks hold together is the row and its padding, once."""
    for kind in KINDS:
        plan = small_plan("cp=4", context=kind, packed=True, microbatch_size=3)
        seq, length = plan.batch.seq, plan.padded_seq + plan.split.unit
        batch = samples(plan.batch, 64, 0, 0, packed=True).of(0)[0]
        parts = [context.shard(batch, plan.split, length, coord) for coord in range(4)]
        index = [
            token
            for coord in range(4)
            for each in plan.split.rank_tokens(length, coord)
            for token in each
        ]
        order = torch.tensor(index).argsort()
        for name in ("tokens", "labels", "positions"):
            row = torch.cat([getattr(part, name) for part in parts], dim=1)[:, order]
            assert row[:, :seq].equal(getattr(batch, name)), name
            assert all(part.row is not None for part in parts)
            assert getattr(parts[0].row, name).equal(row), name
        row = parts[0].row
        assert row is not None and batch.documents is not None
        assert row.labels[:, seq:].eq(NOT_COUNTED).all()
        for each in parts:  # every rank knows the documents of the row; padding is another one
            assert each.documents is not None and each.documents.seq == length
            padding = (seq,) if length > seq else ()
            wanted = tuple((*starts, *padding) for starts in batch.documents.starts)
            assert each.documents.starts == wanted
