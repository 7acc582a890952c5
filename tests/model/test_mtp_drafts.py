"""Drafts by multi-token prediction: every proposal is that of a training forward over the text, and
completions are those without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from small import DEEPSEEK, LLAMA, MOE, filled

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.layout import Layout
from fivefold.core.model import Shape
from fivefold.core.model.kv_pages import BLOCK
from fivefold.core.plan.plan import PlanOptions
from fivefold.generate.cache import token_bytes
from fivefold.generate.drafts import DraftOptions
from fivefold.generate.engine import Engine
from fivefold.generate.forward import DecoderForward
from fivefold.generate.layout import LayoutEngine, mesh_of, plan_of, stage_of
from fivefold.generate.mtp_drafts import MtpDrafter, PlaceSpan, _Source
from fivefold.generate.requests import Completion, Request, Sampling, SequenceState
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.model.batch import NOT_COUNTED, TokenBatch, look_ahead
from fivefold.model.decoder import Decoder
from tests.selection import salt

SMALL = {"max_seq": 120, "layers": 2}
SHAPES = {
    "latents": replace(DEEPSEEK, **SMALL),
    "dense": replace(LLAMA, **SMALL, tied=True, mtp=1),
    "window": replace(LLAMA, **SMALL, window=11, mtp=2),
    "two ahead": replace(DEEPSEEK, **SMALL, mtp=2),
    "three ahead": replace(MOE, **SMALL, mtp=3),
}
TIGHT, ROOMY = 6, 120
LIMITS = ScheduleLimits(tokens=44)


@dataclass
class Drafted:
    """Completions, and what was proposed after which tokens."""

    completions: dict[str, Completion] = field(default_factory=dict)
    proposed: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    engine: Engine | None = None


def decoder_of(shape: Shape) -> Decoder:
    """With layers ahead that attend strongly: a wrong key is to be seen."""
    decoder = filled(shape, torch.float64, seed=3).eval().requires_grad_(False)
    for layer in decoder.mtp.values():
        layer.block.attention.out.weight.mul_(8)
    return decoder


def requests_of(vocab: int, dice: random.Random) -> list[Request]:
    """With beginnings that are shared up to the end of a block, and others up to a token of it."""
    start = [dice.randrange(vocab) for _ in range(3 * BLOCK)]
    requests: list[Request] = []
    for i in range(8):
        prompt = start[: dice.choice((1, 2, BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK))]
        prompt += [dice.randrange(vocab) for _ in range(dice.choice((0, 1, 2, 20)))]
        sampling = Sampling(0.9, seed=i) if i % 3 else Sampling()
        stops = frozenset(range(0, vocab, 17)) if i % 4 == 0 else frozenset[int]()
        scores = 1 if i == 5 else None
        length = 1 if i == 3 else dice.randint(6, 20)
        request = Request(f"{i}", tuple(prompt), length, sampling, stops, prompt_logprobs=scores)
        requests.append(request)
    requests += [
        replace(requests[7], id=f"sample {i}", seed_key=f"{i}", max_tokens=9) for i in range(2)
    ]
    # Together they have more blocks than there are where it is tight.
    requests += [Request(f"long {i}", (i,), 3 * BLOCK + 1, Sampling(0.9)) for i in range(2)]
    return [*requests, Request("scored", tuple(start), 0, targets=tuple(start[-3:]))]


def drafted(
    shape: Shape,
    requests: Sequence[Request],
    monkeypatch: pytest.MonkeyPatch,
    blocks: int = ROOMY,
    aborts: random.Random | None = None,
    prepare: Callable[[Engine], None] = lambda engine: None,
    decoder: Decoder | None = None,
) -> Drafted:
    """Run requests, which come in bursts, with drafts by all layers."""
    seen, put = Drafted(), MtpDrafter.put

    def record(self: MtpDrafter, sequence: SequenceState, proposals: list[int]) -> None:
        put(self, sequence, proposals)
        assert seen.proposed.setdefault(tuple(sequence.tokens), proposals) == proposals

    monkeypatch.setattr(MtpDrafter, "put", record)
    forward = DecoderForward(decoder or decoder_of(shape), blocks)
    engine = Engine(shape, forward, blocks, LIMITS, drafter=MtpDrafter(forward, shape.mtp))
    prepare(engine)
    coming, steps = list(requests)[::-1], 0
    while coming or engine.busy:
        for _ in range(len(coming) if steps == 0 and aborts is None else min(len(coming), 3)):
            engine.add(coming.pop())
        engine.step()
        steps += 1
        if aborts is not None and engine._sequences and aborts.random() < 0.05:
            engine.end(aborts.choice(sorted(engine._sequences)), "cancelled")
    monkeypatch.undo()
    seen.completions = {request.id: engine.collect(request.id) for request in requests}
    seen.engine = engine
    return seen


def plain(shape: Shape, requests: Sequence[Request]) -> dict[str, Completion]:
    without = filled(replace(shape, mtp=0), torch.float64, seed=3)
    state = decoder_of(shape).state_dict()
    without.load_state_dict({name: state[name] for name in without.state_dict()})
    forward = DecoderForward(without.requires_grad_(False), ROOMY)
    return Engine(without.shape, forward, ROOMY, LIMITS).run(requests)


@torch.inference_mode()
def by_training(decoder: Decoder, texts: Sequence[tuple[int, ...]], count: int) -> list[list[int]]:
    """The greedy tokens after some texts, by the path of the training loss over all of a text:
    depth after depth, what a depth finds is the last token of the next."""
    assert decoder.embed is not None and decoder.norm is not None and decoder.head is not None
    rows = [list(text) for text in texts]
    lasts = torch.tensor([len(text) - 2 for text in texts])
    for depth in range(count):
        longest = max(map(len, rows))
        tokens_BS = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        positions_BS = torch.arange(longest).expand_as(tokens_BS)
        labels_BS = torch.full_like(tokens_BS, NOT_COUNTED)
        batch = look_ahead(TokenBatch(tokens_BS, labels_BS, positions_BS), count)
        x_BSD = decoder.embed(tokens_BS, batch)
        context = decoder.context(batch, x_BSD.dtype)
        x_BSD = decoder.norm(decoder.run_blocks(decoder.blocks.values(), x_BSD, context))
        for j, (ahead_BS, _) in enumerate(batch.ahead[: depth + 1]):
            token_BSD = decoder.embed(ahead_BS, batch)
            x_BSD = decoder.mtp[str(j)](x_BSD, token_BSD, context, decoder.run_blocks)
        found = decoder.head.logits(x_BSD[torch.arange(len(rows)), lasts]).argmax(-1)
        for row, token in zip(rows, found.tolist(), strict=True):
            row.append(token)
    return [row[len(text) :] for row, text in zip(rows, texts, strict=True)]


def require_proposals(shape: Shape, seen: Drafted) -> None:
    texts = list(seen.proposed)
    assert len(texts) > 30
    assert by_training(decoder_of(shape), texts, shape.mtp) == list(seen.proposed.values())


def require_same(expected: dict[str, Completion], completions: dict[str, Completion]) -> None:
    for id, completion in completions.items():
        known = expected[id]
        if completion.reason == "cancelled":
            assert completion.tokens == known.tokens[: len(completion.tokens)], id
            continue
        assert (completion.tokens, completion.reason) == (known.tokens, known.reason), id
        assert completion.logprobs == pytest.approx(known.logprobs, rel=0, abs=1e-10), id


@pytest.mark.sample(2)
@pytest.mark.parametrize("blocks", [ROOMY, TIGHT])
@pytest.mark.parametrize("name", SHAPES)
def test_proposals_are_those_of_training(
    name: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every place, whether blocks are shared, lost or left by an aborted request."""
    shape, dice = SHAPES[name], random.Random(f"{salt()}: {name}")
    requests = requests_of(shape.vocab, dice)
    seen = drafted(shape, requests, monkeypatch, blocks, dice if blocks == TIGHT else None)
    require_same(plain(shape, requests), seen.completions)
    require_proposals(shape, seen)
    engine, completions = seen.engine, list(seen.completions.values())
    assert engine is not None and engine.num_drafted > 30
    assert engine.schedulers[0].pool.num_free == blocks
    if blocks == ROOMY:
        assert sum(completion.reused for completion in completions) >= BLOCK
    elif shape.window is None:
        reasons = [completion.reason for completion in completions]
        assert engine.num_preempted or "cancelled" in reasons


def test_layers_that_are_right_are_accepted() -> None:
    """A model whose next token follows from the last one, and whose layers read it alone."""
    shape = replace(LLAMA, width=80, heads=4, kv_heads=2, head_dim=20, vocab=64, max_seq=120, mtp=2)
    decoder = filled(shape).requires_grad_(False)
    for block in decoder.all_blocks():
        for weight in (block.attention.out.weight, block.mlp.down.weight):
            weight.zero_()
    assert decoder.embed is not None and decoder.head is not None and decoder.norm is not None
    decoder.embed.weight.copy_(torch.eye(64, 80))
    following = torch.tensor([(5 * token + 3) % 64 for token in range(64)])
    decoder.head.weight.zero_()
    decoder.head.weight[following] = torch.eye(64, 80, dtype=torch.float64)
    decoder.norm.weight.fill_(1.0)
    for layer in decoder.mtp.values():
        layer.join.weight.copy_(torch.eye(80, 160))
        for norm in (layer.token_norm, layer.norm):
            norm.weight.fill_(1.0)
    forward = DecoderForward(decoder, ROOMY)
    engine = Engine(shape, forward, ROOMY, drafter=MtpDrafter(forward, 2))
    requests = [Request(f"{i}", (1, 2, i), 50, Sampling()) for i in range(5)]
    for completion in engine.run(requests).values():
        assert completion.accepted == completion.drafted > 30
        assert completion.tokens[1] == following[completion.tokens[0]]


def test_layers_count_in_the_cache() -> None:
    """Every depth has pages like any other layer."""
    shape = replace(LLAMA, mtp=2)
    per_layer = token_bytes(decoder_of(replace(shape, mtp=0))) // shape.layers
    assert token_bytes(decoder_of(shape)) == per_layer * (shape.layers + 2)
    cache = DecoderForward(decoder_of(shape), 4).cache
    assert set(cache.pages) == set(range(shape.layers + 2))


@pytest.mark.parametrize(
    ("text", "mtp", "rule"),
    [
        ("mtp:2", 1, "small-llama has 1 multi-token-prediction layers.*give mtp:1 or ngram:2"),
        ("mtp:1", 0, "small-llama has no multi-token-prediction layers.*give ngram:1"),
    ],
)
def test_more_drafts_than_heads_are_refused(text: str, mtp: int, rule: str) -> None:
    drafts = DraftOptions.parse(text)
    with pytest.raises(FivefoldError, match=rule):
        drafts.require_heads(replace(LLAMA, mtp=mtp), Layout())


@pytest.mark.parametrize("codes", [False, True], ids=["", "codes"])
@pytest.mark.parametrize("same", [False, True], ids=["", "batch-invariant"])
def test_engines_of_a_layout_keep_their_tokens(codes: bool, same: bool) -> None:
    """Of two layers the model has, one proposes; weights may be codes, and no batch changes a
    bit."""
    shape = replace(DEEPSEEK, mtp=2, max_seq=120)
    state = decoder_of(shape).state_dict()
    drafts, completions = DraftOptions(1, "mtp"), list[dict[str, Completion]]()
    for option in (None, drafts):
        heads = 0 if option is None else option.require_heads(shape, Layout())
        plan = plan_of(shape, PlanOptions("tiny"))
        plan = replace(plan, shape=replace(shape, mtp=heads))
        mesh = mesh_of(plan, torch.device("cpu"), same)
        stage = stage_of(plan, mesh, torch.float64, same, codes=codes)
        stage.fill(lambda weight, _: state[weight.name])
        options: dict[str, Any] = {"records_routes": True, "batch_invariant": same}
        engine = LayoutEngine(plan, mesh, stage, ROOMY, drafts=option, **options)
        requests = [Request(f"{i}", tuple(range(3 * i + 1)), 20, Sampling(0.7)) for i in range(4)]
        completions.append(engine.run(requests))
    before, after = completions
    assert engine.num_drafted > 40
    require_same(before, after)
    assert all(after[id].routes == row.routes is not None for id, row in before.items())
    if same:
        assert all(after[id].logprobs == row.logprobs for id, row in before.items())


def wrong_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers read the hidden state of the place before."""
    row = _Source.row
    monkeypatch.setattr(_Source, "row", lambda self, id, place: max(0, row(self, id, place) - 1))


def stale_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers do not run where nothing is drawn."""
    spans = MtpDrafter.spans

    def drawing(self: MtpDrafter, *args: Any) -> list[PlaceSpan]:
        return [span for span in spans(self, *args) if span.chunk.samples]

    monkeypatch.setattr(MtpDrafter, "spans", drawing)


def stale_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of places whose next tokens were proposals stay as they are."""
    span_of = MtpDrafter._span

    def done(self: MtpDrafter, *args: Any) -> PlaceSpan:
        span = span_of(self, *args)
        span.progress.starts[:] = [span.stop] * self.count
        return span

    monkeypatch.setattr(MtpDrafter, "_span", done)


def shared_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are shared whatever follows them."""
    init = Engine.__init__

    def blind(self: Engine, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.schedulers[0].lookahead = 0

    monkeypatch.setattr(Engine, "__init__", blind)


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (wrong_states, "latents"),
        (stale_prompts, "latents"),
        (stale_ends, "two ahead"),
        (shared_too_early, "latents"),
    ],
)
def test_a_planted_mistake_is_seen(
    mistake: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES[name]
    requests = requests_of(shape.vocab, random.Random("planted"))
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        seen = drafted(shape, requests, monkeypatch)
        require_proposals(shape, seen)
