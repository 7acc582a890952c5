"""Routers' choices: what is recorded, what is refused, and what a router does with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import DEEPSEEK, LLAMA, MOE

from fivefold.core.errors import FivefoldError
from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.model.shape import Shape
from fivefold.generate.engine import Engine, EngineRanks
from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import Request, Sampling
from fivefold.generate.routes import RecordedRoutes
from fivefold.generate.routing import RouteStore, replay
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.model.balance import moe_layers
from fivefold.model.batch import NOT_COUNTED, TokenBatch
from fivefold.model.decoder import Decoder
from fivefold.model.moe import Routing
from fivefold.verify.generated import GeneratedTrial

SHAPES = {"moe": replace(MOE, max_seq=160), "latent": replace(DEEPSEEK, max_seq=160, mtp=0)}


def batch_of(tokens: tuple[int, ...], counted: int = 1) -> TokenBatch:
    """One row of a text, whose last tokens have a loss."""
    row = torch.tensor([tokens])
    labels = torch.full_like(row, NOT_COUNTED)
    labels[0, -counted:] = 0
    return TokenBatch(row, labels, torch.arange(len(tokens))[None])


def chosen_by(decoder: Decoder, batch: TokenBatch) -> list[list[list[int]]]:
    """What the routers of a plain forward choose, by token and layer."""
    found: list[torch.Tensor] = []

    def keep(routing: Routing, num_rows: int) -> Routing:
        found.append(routing.experts)
        return routing

    for _, mlp in moe_layers(decoder):
        mlp.balance = keep
    decoder(batch.tokens, batch)
    return torch.stack(found, dim=1).tolist()


def engine_of(trial: GeneratedTrial, blocks: int, tokens: int, in_flight: int = 1) -> Engine:
    decoder = trial.decoder()
    routes = RouteStore(decoder, blocks + 1)
    forward = DecoderForward(decoder, blocks, routes=routes)
    limits, ranks = ScheduleLimits(tokens=tokens), EngineRanks(in_flight=in_flight)
    return Engine(trial.shape, forward, blocks, limits, ranks=ranks, routes=routes)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_is_recorded_is_what_a_plain_forward_chooses(shape: Shape) -> None:
    """Also over shared blocks, and after blocks were lost."""
    trial = GeneratedTrial(shape, "float64", 0)
    engine = engine_of(trial, trial.most, 2 * BLOCK)
    found = engine.run(trial.requests)
    assert engine.num_preempted and any(each.reused for each in found.values())
    for request in trial.requests:
        done = found[request.id]
        text = (*request.prompt, *done.tokens)
        assert done.routes is not None
        expected = chosen_by(trial.decoder(), batch_of(text[:-1]))
        assert [[list(one) for one in token] for token in done.routes.chosen] == expected
        again = RecordedRoutes.parse(done.routes.table())
        assert again == done.routes
        again.check(shape)


def test_a_sequence_that_loses_its_blocks_before_its_last_draw_keeps_its_choices() -> None:
    trial = GeneratedTrial(SHAPES["moe"], "float64", 0)
    engine = engine_of(trial, 3, 64, in_flight=2)
    ended: list[str] = []
    plain: Callable[[Any], Any] = engine._recorded

    def recorded(sequence: Any) -> RecordedRoutes | None:
        ended.extend([sequence.request.id] if not sequence.computed else [])
        return plain(sequence)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "_recorded", recorded)
        # The older one needs its third block while the last token of the younger is being drawn.
        asked = [
            Request("old", tuple(range(2 * BLOCK - 2)), 4, Sampling(1.0)),
            Request("young", tuple(range(9)), 3, Sampling(1.0)),
        ]
        found = engine.run(asked)
    assert ended == ["young"]
    for request in asked:
        done = found[request.id]
        assert done.routes is not None
        expected = chosen_by(trial.decoder(), batch_of((*request.prompt, *done.tokens[:-1])))
        assert [[list(one) for one in token] for token in done.routes.chosen] == expected


def recorded_of(shape: Shape, tokens: int) -> RecordedRoutes:
    moe = shape.moe
    assert moe is not None
    layers = tuple(each for each in shape.moe_layers if each < shape.layers)
    one = tuple(range(moe.top_k))
    return RecordedRoutes(moe.experts, layers, ((one,) * len(layers),) * tokens)


GOOD = recorded_of(MOE, 6)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        (replace(GOOD, experts=8), "has 6 experts, not 8"),
        (replace(GOOD, layers=(0, *GOOD.layers[1:])), "layer 0 of small-moe has no experts"),
        (replace(GOOD, layers=GOOD.layers[:-1]), "small-moe has experts in"),
        (replace(GOOD, chosen=GOOD.chosen[:-1]), "has 5 tokens"),
        (replace(GOOD, chosen=GOOD.chosen * 2), "has 12 tokens"),
        (replace(GOOD, chosen=(((6, 0),) * len(GOOD.layers),) * 6), "expert 6 is none of 0 to 5"),
        (replace(GOOD, chosen=(((-1, 0),) * len(GOOD.layers),) * 6), "expert -1 is none"),
        (replace(GOOD, chosen=(((1, 1),) * len(GOOD.layers),) * 6), "the same expert twice"),
        (replace(GOOD, chosen=(((1,),) * len(GOOD.layers),) * 6), "has 2 experts in each layer"),
        (replace(GOOD, chosen=((),) * 6), "has 2 experts in each layer"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_choices_of_something_else_are_refused(changed: RecordedRoutes, rule: str) -> None:
    batch = batch_of(tuple(range(6)))
    assert replay(batch, [GOOD], MOE).replayed is not None
    with pytest.raises(FivefoldError, match=rule):
        replay(batch, [changed], MOE)


def test_rows_and_models_without_choices_are_refused() -> None:
    batch = batch_of(tuple(range(6)))
    with pytest.raises(FivefoldError, match="2 recordings were given for 1 rows"):
        replay(batch, [GOOD, None], MOE)
    with pytest.raises(FivefoldError, match="has no experts"):
        replay(batch, [GOOD], LLAMA)
    with pytest.raises(FivefoldError, match="no choices to record"):
        RouteStore(GeneratedTrial(LLAMA, "float64", 0).decoder(), 4)


@pytest.mark.parametrize(
    "table", [None, [], {"experts": 6}, {"experts": 6, "layers": [1], "chosen": [[1]]}]
)
def test_what_is_no_recording_is_refused(table: Any) -> None:
    with pytest.raises(FivefoldError, match="expected experts"):
        RecordedRoutes.parse(table)


def gradients(decoder: Decoder, batch: TokenBatch) -> dict[str, torch.Tensor]:
    decoder.zero_grad()
    decoder(batch.tokens, batch).backward()
    named = decoder.named_parameters()
    return {name: each.grad.clone() for name, each in named if each.grad is not None}


def test_own_choices_replayed_change_nothing_and_others_do() -> None:
    """Weights come from the router's own scores, through which gradients flow."""
    trial = GeneratedTrial(SHAPES["moe"], "float64", 0)
    decoder, batch = trial.decoder(), batch_of(tuple(range(12)), counted=12)
    own = torch.tensor(chosen_by(decoder, batch))[None]
    free, told = (gradients(decoder, each) for each in (batch, replace(batch, replayed=own)))
    assert free.keys() == told.keys()
    assert all(torch.equal(free[name], told[name]) for name in free)
    others = (own + 1) % 6
    changed = gradients(decoder, replace(batch, replayed=others))
    routers = [name for name in changed if name.endswith("router.weight")]
    assert routers and all(changed[name].abs().max() > 0 for name in routers)
    assert all((changed[name] - free[name]).abs().max() > 1e-6 for name in routers)
    asked = torch.full_like(own, -1)
    left = gradients(decoder, replace(batch, replayed=asked))
    assert all(torch.equal(free[name], left[name]) for name in free), "−1: its own choice"
