"""Bugs of pipelines, planted one at a time: `verify` must see every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from planted import GRADIENTS, LOSS, TRAFFIC, Fault, Patch, check_seen
from torch import Tensor

from fivefold import step as step_module
from fivefold.core.layout.groups import PIPELINE, TWIN
from fivefold.core.plan.plan import Plan
from fivefold.core.schedule.catalog import Delays
from fivefold.core.schedule.schedule import Message
from fivefold.launch.processes import Pool
from fivefold.model.batch import TokenBatch
from fivefold.parallel import pipeline
from fivefold.parallel.composition import Job, StageChunk
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Pipeline


def skipped_weight_gradient() -> Patch:
    """One microbatch's weight gradients are dropped instead of added."""
    inner = StageChunk.weight_gradients

    def skipped(self: StageChunk, microbatch: int, last: bool) -> None:
        assert self.queue is not None
        if microbatch == 1:
            self.queue._owed.pop(microbatch)
        else:
            inner(self, microbatch, last)

    return patch.object(StageChunk, "weight_gradients", skipped)


def repeated_message() -> Patch:
    """A rank takes the message of microbatch 0 for that of microbatch 1 as well."""
    inner = pipeline._Inbox.take
    first: dict[tuple[int, str], Tensor] = {}

    def repeated(self: Any, message: Message) -> Tensor:
        found, line = inner(self, message), (message.stage, message.kind)
        if message.microbatch == 0:
            first[line] = found.detach().clone()
        return first[line] if message.microbatch == 1 and line in first else found

    return patch.object(pipeline._Inbox, "take", repeated)


def copies_not_summed() -> Patch:
    """Ranks that hold the same weights add up their gradients and keep their own."""

    def unmoved(self: Mesh, tensors: Any, axis: str) -> None:
        inner(self, [each.clone() if axis == TWIN else each for each in tensors], axis)

    inner = Mesh.sum_together
    return patch.object(Mesh, "sum_together", unmoved)


def two_ends_of_one_rank_not_summed() -> Patch:
    """A tied weight on two stages of one rank, each with its own gradient."""
    return patch.object(step_module, "sum_copies", lambda job: None)


def layer_of_nobody() -> Patch:
    """The cut between two stages is off by one: a layer is left out."""
    inner = Plan.stages.func

    def short(self: Plan) -> tuple[range, ...]:
        first, *rest = inner(self)
        return (range(first.start, first.stop - 1), *rest)

    return patch.object(Plan, "stages", property(short))


def layer_of_two_stages() -> Patch:
    """The cut between two stages is off by one: a layer is computed twice."""
    inner = Plan.stages.func

    def long(self: Plan) -> tuple[range, ...]:
        first, *rest = inner(self)
        return (range(first.start, first.stop + 1), *rest)

    return patch.object(Plan, "stages", property(long))


def newest_weights() -> Patch:
    """An asynchronous pipeline computes on the weights of now, not on those of its delay."""
    return patch.object(Delays, "version", lambda self, microbatch, num_updates: num_updates)


def labels_of_another_microbatch() -> Patch:
    """Every stage but the first is given its batches one microbatch too early."""
    inner = Pipeline.run

    def early(self: Pipeline, batches: Sequence[TokenBatch], *rest: Any) -> dict[int, Tensor]:
        if self.mesh.coord(PIPELINE) > 0:
            batches = [*batches[1:], batches[0]]
        return inner(self, batches, *rest)

    return patch.object(Pipeline, "run", early)


def mean_of_microbatches() -> Patch:
    """The loss is divided by the microbatches too, although all their tokens are counted."""
    inner = Pipeline.run

    def averaged(
        self: Pipeline, batches: Any, tokens: Sequence[Tensor], *rest: Any
    ) -> dict[int, Tensor]:
        return inner(self, batches, [each * len(batches) for each in tokens], *rest)

    return patch.object(Pipeline, "run", averaged)


def messages_in_float32() -> Patch:
    """What passes between stages is rounded on the way."""
    inner = pipeline._Outbox.send

    def rounded(self: Any, message: Any, tensor: Tensor) -> None:
        inner(self, message, tensor.to(torch.float32).to(tensor.dtype))

    return patch.object(pipeline._Outbox, "send", rounded)


def embedding_of_prediction_ahead_not_tied() -> Patch:
    """The last stage looks tokens up in a copy of the embedding that learns for itself."""
    return patch.object(Job, "is_tied", lambda self, name: False)


def reduced_after_every_microbatch() -> Patch:
    """Each backward is taken for the last of its stage; the sums are right, and many times more
    bytes move."""
    return patch.object(Pipeline, "is_last", lambda self, action: True)


FAULTS = (
    Fault(skipped_weight_gradient, "pp=2", GRADIENTS, {"schedule": "zb-h1"}),
    Fault(skipped_weight_gradient, "dp=2 pp=2", GRADIENTS, {"schedule": "zb-v", "zero": 2}),
    Fault(repeated_message, "pp=2", LOSS, {"schedule": "gpipe"}),
    Fault(copies_not_summed, "pp=2", GRADIENTS, {"schedule": "dualpipe"}),
    Fault(copies_not_summed, "pp=2", GRADIENTS, set={"tied": "true"}),
    Fault(
        two_ends_of_one_rank_not_summed,
        "pp=2",
        GRADIENTS,
        {"schedule": "zb-v"},
        {"tied": "true"},
    ),
    Fault(layer_of_nobody, "pp=2", LOSS),
    Fault(layer_of_two_stages, "pp=2", LOSS),
    Fault(newest_weights, "pp=2", LOSS, {"schedule": "pipedream-2bw"}, steps=2),
    Fault(labels_of_another_microbatch, "pp=2", LOSS),
    Fault(mean_of_microbatches, "pp=2", LOSS),
    Fault(messages_in_float32, "pp=2", LOSS),
    Fault(embedding_of_prediction_ahead_not_tied, "pp=2", GRADIENTS, set={"mtp": "1"}),
    Fault(reduced_after_every_microbatch, "dp=2 pp=2", TRAFFIC, {"zero": 1}),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_verify_sees_the_fault(pool: Pool, fault: Fault) -> None:
    check_seen(pool, fault)
