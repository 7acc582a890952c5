"""Random requests of every kind of model: `tests.gpu.random_requests` makes thousands of them."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from fivefold.generate.scheduler import Scheduler
from tests.gpu.random_requests import MODELS, outcome_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_plain_forward(name: str) -> None:
    outcome = outcome_of(name, 40, CPU)
    assert outcome.good and outcome.requests == 40 and outcome.reused > 0, outcome
    assert outcome.tokens > 400 and outcome.ties <= 2


def leaks(release: Callable[..., None]) -> Callable[..., None]:
    """Without the blocks of every seventh sequence that ends."""
    calls = iter(range(10**6))

    def leaking(self: Scheduler, sequence: object) -> None:
        if next(calls) % 7 != 6:
            release(self, sequence)

    return leaking


def test_a_lost_block_is_seen() -> None:
    with patch.object(Scheduler, "_release", leaks(Scheduler._release)):
        outcome = outcome_of("dense", 12, CPU)
    assert outcome.missing > 0 and not outcome.good
