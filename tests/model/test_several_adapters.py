"""Adapters of one base in one engine: what each writes is what its merged model writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.weight_table import planned_weights
from fivefold.core.model.tuning import ALL, Tuning
from fivefold.core.plan.plan import resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.generate.adapters import AdaptedWeights, NamedAdapter, with_adapters
from fivefold.generate.drafts import DraftOptions
from fivefold.generate.layout import LayoutEngine, mesh_of, stage_of
from fivefold.generate.requests import Completion, Request
from fivefold.generate.scheduler import ScheduleLimits, Scheduler
from fivefold.model.low_rank import TokenRanks
from fivefold.train.callbacks.samples import generating
from tests.guesses import Guesses
from tests.model.several_adapters import (
    MODELS,
    TUNINGS,
    AdapterCase,
    reader_of,
    requests_of,
    values_of,
)
from tests.model.test_piecewise import on_gpu, recorded  # noqa: F401, fixtures

CPU = torch.device("cpu")
SMALL_STEPS = ScheduleLimits(tokens=40, sequences=6)


def together(case: AdapterCase, requests: list[Request], blocks: int = 60) -> dict[str, Completion]:
    return case.engine(CPU, None, blocks, SMALL_STEPS).run(requests)


def apart(case: AdapterCase, requests: list[Request]) -> dict[str, Completion]:
    """Each request by the merged model of its adapter."""
    completions: dict[str, Completion] = {}
    for number in range(4):
        own = [replace(request, adapter=0) for request in requests if request.adapter == number]
        completions |= case.engine(CPU, number).run(own)
    return completions


def differences(found: dict[str, Completion], expected: dict[str, Completion]) -> list[str]:
    return [
        id
        for id, completion in expected.items()
        if found[id].tokens != completion.tokens
        or found[id].logprobs != pytest.approx(completion.logprobs, abs=1e-9)
    ]


@pytest.mark.parametrize("model", MODELS)
def test_all_together_write_what_each_writes_alone(model: str) -> None:
    case = AdapterCase(model)
    requests = requests_of(case.text_model.shape.vocab)
    expected = apart(case, requests)
    texts = {expected[f"41 {number}"].tokens for number in range(4)}
    assert len(texts) == 4, "adapters must differ, or nothing is compared"
    found = together(case, requests)
    assert not differences(found, expected)
    again = {request.id: replace(request, id=f"{request.id} again") for request in requests}
    few = together(case, requests, blocks=9)
    assert not differences(few, expected)
    assert any(completion.preempted for completion in few.values())
    engine = case.engine(CPU, None, 60, SMALL_STEPS)
    engine.run(requests)
    shared = engine.run(again.values())
    assert not differences({id: shared[row.id] for id, row in again.items()}, expected)
    assert all(shared[again[f"41 {number}"].id].reused >= 32 for number in range(4))


@pytest.mark.parametrize("model", ["plain", "latents", "experts"])
def test_accepted_proposals_have_the_adapter_of_their_sequence(model: str) -> None:
    case = AdapterCase(model)
    vocab = case.text_model.shape.vocab
    requests = requests_of(vocab, tokens=20)
    expected = together(case, requests)
    guesses = Guesses({id: row.tokens for id, row in expected.items()}, vocab)
    with patch.object(DraftOptions, "drafter", lambda options: guesses):
        engine = case.engine(CPU, drafts=DraftOptions.parse("ngram:4"))
    assert not differences(engine.run(requests), expected)
    assert engine.schedulers[0].num_accepted > 60


def test_layers_of_the_base_propose_for_adapters() -> None:
    """Those of multi-token prediction have none, whatever linears an adapter names."""
    case = AdapterCase(tunings=(Tuning(2, 6.0, ALL), *TUNINGS[1:]))
    requests = requests_of(case.text_model.shape.vocab, tokens=20)
    expected = together(case, requests)
    engine = case.engine(CPU, drafts=DraftOptions.parse("mtp:1"))
    assert not differences(engine.run(requests), expected)
    assert engine.num_drafted > 60


@pytest.mark.parametrize("model", ["plain", "experts"])
def test_bits_do_not_depend_on_the_adapters_beside(model: str) -> None:
    case = AdapterCase(model, batch_invariant=True)
    requests = requests_of(case.text_model.shape.vocab, tokens=4)
    found = case.engine(CPU).run(requests)
    assert not differences(found, apart(replace(case, batch_invariant=False), requests))
    for request in requests[4:8]:
        alone = case.engine(CPU).run([request])[request.id]
        assert alone.logprobs == found[request.id].logprobs


def wrong_token() -> object:
    """Tokens have the adapter of the one before them."""
    begin = TokenRanks.begin
    return patch.object(TokenRanks, "begin", lambda self, adapters: begin(self, adapters.roll(1)))


def digest_without_adapter() -> object:
    contents = Scheduler._contents

    def forgetful(self: Scheduler, sequence: object) -> tuple[bool, bytes]:
        outgrown, root = contents(self, sequence)  # type: ignore[arg-type]
        return outgrown, root.rpartition(b" ")[0]

    return patch.object(Scheduler, "_contents", forgetful)


def scale_forgotten() -> object:
    return patch.object(Tuning, "scale", 1.0)


def every_rank() -> object:
    return patch.object(TokenRanks, "select", lambda self, low: low)


@pytest.mark.parametrize(
    "fault", [wrong_token, digest_without_adapter, scale_forgotten, every_rank]
)
def test_mistakes_are_seen(fault: Callable[[], object]) -> None:
    case = AdapterCase()
    requests = requests_of(case.text_model.shape.vocab)
    expected = apart(case, requests)
    with fault():  # type: ignore[attr-defined]
        assert differences(together(case, requests), expected)


@pytest.mark.parametrize("model", ["plain", "biases", "latent queries", "experts"])
def test_joined_weights_have_the_adapters(
    model: str,
    on_gpu: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linears of few tokens as on a GPU, by torch's matmuls in the place of its kernels."""
    case, few = AdapterCase(model), list[int]()

    def takes(x: Tensor) -> bool:
        return x.numel() // x.shape[-1] <= 16

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        few.append(len(weight))
        assert weight.is_contiguous()
        return F.linear(x, weight, bias)

    monkeypatch.setattr(on_gpu, "takes", takes)
    monkeypatch.setattr(on_gpu, "skinny_linear", multiply)
    requests = requests_of(case.text_model.shape.vocab)
    engine = case.engine(CPU, None, 60, SMALL_STEPS)
    on_gpu.multiply_few_tokens(engine.stage.model)
    assert not differences(engine.run(requests), apart(case, requests)) and few


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("model", ["plain", "latents", "experts"])
def test_a_plan_with_lora_computes_its_adapters(model: str, batch_invariant: bool) -> None:
    """As of a job whose weights an engine takes: those of routed experts and latents too."""
    tuning = Tuning(2, 6.0)
    case = AdapterCase(model, batch_invariant=batch_invariant, tunings=(tuning,))
    options = replace(case.text_model.options, train=Recipe(lora=2, lora_alpha=6.0))
    plan = generating(resolve(replace(options, batch=2), small=True))
    mesh = mesh_of(plan, CPU, batch_invariant)
    stage = stage_of(plan, mesh, torch.float64, batch_invariant)
    factors, base = reader_of("a/", None), reader_of("", None)
    stage.fill(lambda row, dtype: (factors if ".lora." in row.name else base)(row, dtype))
    engine = LayoutEngine(plan, mesh, stage, 60, SMALL_STEPS, batch_invariant=batch_invariant)
    requests = [row for row in requests_of(plan.shape.vocab) if row.adapter == 0]
    assert not differences(engine.run(requests), case.engine(CPU, 1).run(requests))


def adapter_of(name: str = "a", **changes: object) -> NamedAdapter:
    case = AdapterCase()
    (adapter,) = [one for one in case.adapters(case.text_model.shape) if one.name == "a"]
    return replace(adapter, name=name, **changes)  # type: ignore[arg-type]


def test_what_is_of_another_base_is_refused() -> None:
    case = AdapterCase()
    model, shape = case.text_model, adapter_of().shape
    refusals = {
        "the name is the name of the base": [adapter_of("base")],
        "the name is there already": [adapter_of(), adapter_of()],
        "of another base, with layers = 3, and this model has 2": [
            adapter_of(shape=replace(shape, layers=3))
        ],
        "has no adapters": [adapter_of(shape=replace(shape, tuning=Tuning()))],
        "other weights have learned too": [
            adapter_of(shape=replace(shape, tuning=Tuning(1, 1.0, "q", "head")))
        ],
    }
    for rule, adapters in refusals.items():
        with pytest.raises(FivefoldError, match=rule):
            with_adapters(model, adapters, "base")
    experts = AdapterCase("experts", tunings=(Tuning(1, 1.0),))
    with pytest.raises(FivefoldError, match="adapts routed experts"):
        experts.plan()


def test_weights_of_another_base_and_infinite_ones_are_refused() -> None:
    case, other = AdapterCase(), values_of("x", (64,))
    plan, _ = case.plan()
    norm = next(row for row in _table(plan.shape) if row.name == "blocks.1.mlp_norm.weight")
    factor = next(row for row in _table(plan.shape) if row.name.endswith("q.lora.b"))
    base = reader_of("", None)

    def opened(tell: object) -> object:
        return lambda weight, dtype: (
            other[: weight.shape[0]].to(dtype) if weight.name == norm.name else base(weight, dtype)
        )

    run = adapter_of(open_weights=opened, has_base=True)
    with pytest.raises(FivefoldError, match=r"adapter a \(a\) was trained on another base"):
        AdaptedWeights(base, [run], print)(norm, torch.float64)
    same = adapter_of(open_weights=lambda tell: base, has_base=True)
    narrow = AdaptedWeights(base, [same], print)(norm, torch.float32)
    assert torch.equal(narrow, base(norm, torch.float32))
    infinite = adapter_of(open_weights=lambda tell: lambda weight, dtype: base(weight, dtype) / 0)
    with pytest.raises(FivefoldError, match="is not finite"):
        AdaptedWeights(base, [infinite], print)(factor, torch.float64)


def _table(shape: object) -> list[object]:
    return list(planned_weights(shape))  # type: ignore[arg-type]


def test_a_request_for_an_adapter_that_is_not_there_is_refused() -> None:
    engine = AdapterCase().engine(CPU)
    with pytest.raises(FivefoldError, match="adapter 4, and this engine has 3"):
        engine.add(Request("x", (1,), 1, adapter=4))
    assert not engine.busy
