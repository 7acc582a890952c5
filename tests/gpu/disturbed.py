"""Collectives that end late, and memory that is overwritten as soon as it is free.

Over NCCL a collective runs beside the computation. One that nobody waits for is wrong only where it
is slow, and memory that nobody holds only where somebody else takes it at once. Here both happen:
some collectives start behind a stream that sleeps, and after each one tensors of the same size are
taken and filled with what is no number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fivefold.core.plan.plan import Plan
from fivefold.launch.worker import Worker
from fivefold.parallel import transport
from fivefold.parallel.mesh import Issued
from fivefold.parallel.tensor import SplitMatmuls
from fivefold.verify.runs import VerifiedRank, VerifySettings, run_rank

FILLING = ("all_reduce", "reduce_scatter", "all_gather", "send", "pass_on")
FUNCTIONAL = ("gather", "scatter", "total", "exchange")
CYCLES = (0, 200_000, 2_000_000, 20_000_000)  # up to about 10 ms
SHARE = 0.15  # of the collectives that are late


class Disturbance:
    """Delays and overwrites of one rank."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.draw, self.late = random.Random(seed), torch.cuda.Stream(device)
        self.num_late = 0

    def start(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that sometimes starts late, and what it left free is overwritten."""

        @wraps(call)
        def disturbed(*args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in args if isinstance(each, Tensor)]
            if self.num_late and self.draw.random() > SHARE:
                found = call(*args, **kwargs)
            else:
                self.num_late += 1
                here = torch.cuda.current_stream(self.late.device)
                self.late.wait_stream(here)
                with torch.cuda.stream(self.late):
                    torch.cuda._sleep(self.draw.choice(CYCLES))
                    found = call(*args, **kwargs)
            overwrite(tensors)
            return found

        return disturbed

    def wait(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """What a late call has made is memory of the late stream: it is held for this one too."""

        @wraps(wait)
        def disturbed(pending: Any) -> Any:
            here = torch.cuda.current_stream(self.late.device)
            for each in vars(pending).values():
                if isinstance(each, Tensor) and each.is_cuda:
                    each.record_stream(here)
            found = wait(pending)
            overwrite([found] if isinstance(found, Tensor) else [])
            return found

        return disturbed


def overwrite(like: list[Tensor]) -> None:
    """Take free memory of these sizes and fill it."""
    for each in like:
        if each.is_cuda and each.numel():
            taken = [torch.empty_like(each) for _ in range(3)]
            for one in taken:
                one.fill_(float("nan") if one.is_floating_point() else -1)


@contextmanager
def disturbed(seed: int, device: torch.device) -> Iterator[Disturbance]:
    """While it is on, every collective of this process is disturbed."""
    made = Disturbance(seed, device)
    with ExitStack() as stack:
        for name in (*FILLING, *FUNCTIONAL):
            call = made.start(getattr(transport, name))
            stack.enter_context(patch.object(transport, name, call))
        for kind in (transport.InFlight, transport.Functional):
            stack.enter_context(patch.object(kind, "wait", made.wait(kind.wait)))
        yield made


def run_disturbed(worker: Worker, plan: Plan, settings: VerifySettings, seed: int) -> VerifiedRank:
    """`run_rank`, disturbed."""
    device = torch.device("cuda", torch.cuda.current_device())
    with disturbed(seed + worker.rank, device) as made:
        found = run_rank(worker, plan, settings)
    assert made.num_late, "no collective was late"
    return found


def run_careless(worker: Worker, plan: Plan, settings: VerifySettings, seed: int) -> VerifiedRank:
    """A planted mistake: results of functional collectives are used before they are there."""

    def wait(pending: transport.Functional) -> Tensor:
        found = pending.under_way
        return found if pending.arrange is None else pending.arrange(found)

    with patch.object(transport.Functional, "wait", wait):
        return run_disturbed(worker, plan, settings, seed)


def run_hasty(worker: Worker, plan: Plan, settings: VerifySettings, seed: int) -> VerifiedRank:
    """A planted mistake: matmuls do not wait for the collectives beside them."""

    def begin(matmuls: SplitMatmuls, issued: Issued) -> Callable[[], object]:
        waits.append(issued.wait)
        return lambda: None

    waits: list[Callable[[], object]] = []  # held, as what the collectives read and write
    with patch.object(SplitMatmuls, "_begin", begin):
        return run_disturbed(worker, plan, settings, seed)
