"""Several adapters in layouts: split over ranks as in training, chosen for every token."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import Completion
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.launch.backend import forked_device
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from tests.model.several_adapters import AdapterCase, requests_of

LIMITS = ScheduleLimits(tokens=48, sequences=8)
CASES = (
    *(AdapterCase(layout=layout) for layout in ("tp=2", "pp=2", "dp=2", "cp=2")),
    AdapterCase("latent queries", "tp=2"),
    AdapterCase("experts", "tp=2 ep=2"),
    AdapterCase("biases", "tp=2 pp=2"),
    AdapterCase(layout="tp=2", batch_invariant=True),
)


def run_on_rank(worker: Worker, case: AdapterCase) -> dict[str, Completion]:
    plan, _ = case.plan()
    rank = forked_device("cpu", "gloo", worker.rank, plan.layout.world)
    with worker.joined(plan.layout.world, rank):
        engine = case.engine(rank.device, None, 30, LIMITS)
        completions = engine.run(requests_of(plan.shape.vocab, tokens=6))
        engine.close()
        torch.distributed.barrier()
        engine.mesh.close_groups()
        return completions


def first_tokens(worker: Worker, case: AdapterCase) -> dict[str, Completion]:
    """As if every rank of cp had the first tokens of a step."""
    hidden = DecoderForward.hidden

    def wrong(self: DecoderForward, tensors: object, *received: object) -> torch.Tensor:
        begin = self.adapters.begin  # type: ignore[union-attr]
        full = tensors.adapters  # type: ignore[attr-defined]
        with patch.object(self.adapters, "begin", lambda own: begin(full[: len(own)])):
            return hidden(self, tensors, *received)  # type: ignore[arg-type]

    with patch.object(DecoderForward, "hidden", wrong):
        return run_on_rank(worker, case)


def expected_of(case: AdapterCase) -> dict[str, Completion]:
    one = AdapterCase(case.model)
    engine = one.engine(torch.device("cpu"), None, 60, LIMITS)
    return engine.run(requests_of(one.text_model.shape.vocab, tokens=6))


def same(found: dict[str, Completion], expected: dict[str, Completion]) -> bool:
    return all(
        found[id].tokens == completion.tokens
        and found[id].logprobs == pytest.approx(completion.logprobs, abs=1e-9)
        for id, completion in expected.items()
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_write_what_one_device_writes(pool: Pool, case: AdapterCase) -> None:
    """That one device writes what merged models write is shown in tests/model."""
    expected = expected_of(case)
    world = case.plan()[0].layout.world
    for completions in pool.run_each([(run_on_rank, (case,))] * world):
        assert same(completions, expected)


def test_a_mask_of_other_tokens_is_seen(pool: Pool) -> None:
    case = AdapterCase(layout="cp=2")
    ranks = pool.run_each([(first_tokens, (case,))] * 2)
    assert not same(ranks[0], expected_of(case))
