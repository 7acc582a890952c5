"""Grammars on one device: completions are JSON of their schemas however the engine runs them, and
requests beside them draw what they would draw alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.core.errors import FivefoldError
from fivefold.core.model.presets import load, with_overrides
from fivefold.generate import sampling
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.engine import Engine
from fivefold.generate.forward import DecoderForward
from fivefold.generate.grammar import Grammars
from fivefold.generate.requests import NO_TOKEN, Completion, Request, Sampling
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.generate.text import ByteCodec, Codec, LibraryCodec, TextStream
from fivefold.verify.generated import GeneratedTrial, logits_of

pytest.importorskip("llguidance", reason="pip install 'fivefold[grammar]', which make setup does")
jsonschema = pytest.importorskip("jsonschema", reason="make setup installs it")

NUM_REQUESTS, LONGEST, END = 200, 500, 256
ROOMY = ScheduleLimits()
SHORT_TEXT = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            },
            'a "quoted" kéy': {"type": "boolean"},
        },
        "required": ["point", 'a "quoted" kéy'],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": SHORT_TEXT, "minItems": 1, "maxItems": 3},
    "enum": {"enum": ["gelb", "grün\n", '"', 7, None, {"a": [1.5]}]},
    "numbers": {
        "type": "array",
        "items": {"type": "number", "minimum": -2.5, "exclusiveMaximum": 1000},
        "maxItems": 2,
    },
    "text": {"type": "object", "properties": {"t": SHORT_TEXT}, "required": ["t"]}
    | {"additionalProperties": False},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-\\d{1,3}$"},
    "choice": {
        "anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "array", "items": {"$ref": "#/$defs/leaf"}}],
        "$defs": {"leaf": {"const": "é\\"}},
    },
}
SHAPE = with_overrides(load("tiny"), {"layers": "1", "vocab": "300"})  # with an end, and beyond it


@dataclass(frozen=True)
class Way:
    """How an engine runs requests."""

    name: str
    limits: ScheduleLimits = ROOMY
    blocks: int = 4096
    ahead: bool = False

    def engine(self, trial: GeneratedTrial) -> Engine:
        limits = self.limits
        most = max(limits.tokens, limits.sequences)
        drawn = DrawnTokens(most, torch.device("cpu")) if self.ahead else None
        forward = DecoderForward(trial.decoder(), self.blocks, drawn=drawn)
        grammars = Grammars(ByteCodec(), trial.shape.vocab)
        options: dict[str, Any] = {"drawn": drawn, "grammars": grammars}
        return Engine(trial.shape, forward, self.blocks, limits, **options)

    def __str__(self) -> str:
        return self.name


USUAL = Way("batched")
WAYS = (
    Way("in chunks of 5", ScheduleLimits(tokens=5)),
    Way("few blocks", ScheduleLimits(tokens=64), 40),
    Way("ahead of draws", ahead=True),
    Way("few blocks, ahead of draws", ScheduleLimits(tokens=64), 40, ahead=True),
)


@pytest.fixture(scope="module")
def trial() -> GeneratedTrial:
    return GeneratedTrial(SHAPE, "float64", 0)


def requests_of(count: int, stops: frozenset[int] = frozenset({END})) -> list[Request]:
    draw, schemas = random.Random(0), [json.dumps(schema) for schema in SCHEMAS.values()]
    return [
        Request(
            f"{number}",
            tuple(draw.randrange(256) for _ in range(draw.choice((1, 3, 20, 40)))),
            LONGEST,
            Sampling(float(number // len(schemas) % 2), seed=number),
            stops,
            grammar=schemas[number % len(schemas)],
        )
        for number in range(count)
    ]


def text_of(done: Completion, codec: Codec | None = None) -> str:
    stream = TextStream(codec or ByteCodec())
    tokens = done.tokens[:-1] if done.tokens[-1:] == (END,) else done.tokens
    return "".join(map(stream.push, tokens)) + stream.finish()


def is_valid(request: Request, done: Completion) -> bool:
    try:
        jsonschema.validate(json.loads(text_of(done)), json.loads(request.grammar))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.mark.parametrize(
    "stops", [frozenset({END}), frozenset[int]()], ids=["an end token", "none"]
)
def test_every_completion_is_valid(trial: GeneratedTrial, stops: frozenset[int]) -> None:
    engine, requests = USUAL.engine(trial), requests_of(NUM_REQUESTS, stops)
    completions = engine.run(requests)
    assert engine.grammars is not None and not engine.grammars._followers
    ended = 0
    for request in requests:
        done = completions[request.id]
        if done.reason == "stop":
            assert is_valid(request, done), (request.grammar, text_of(done))
            assert (done.tokens[-1] == END) == bool(stops)
            ended += 1
        else:  # greedy texts may repeat digits for ever
            assert done.reason == "length" and len(done.tokens) == LONGEST
    assert ended > 0.9 * NUM_REQUESTS
    assert len({text_of(done) for done in completions.values()}) > 0.3 * NUM_REQUESTS


def test_without_masks_texts_are_not_valid(
    trial: GeneratedTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: whoever drops the masks is seen."""
    monkeypatch.setattr(sampling, "_allowed", lambda logits_NV, draws: logits_NV)
    requests = requests_of(14)
    completions = USUAL.engine(trial).run(requests)
    assert not any(is_valid(request, completions[request.id]) for request in requests)
    assert {done.reason for done in completions.values()} == {"error"}, "no such token goes on"


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_draws_the_same(trial: GeneratedTrial, way: Way) -> None:
    """Beside requests without a grammar, which draw what they draw without company."""
    requests = requests_of(28)
    plain = [
        replace(request, id=f"plain {request.id}", grammar="", max_tokens=30, seed_key=request.id)
        for request in requests[::4]
    ]
    expected = USUAL.engine(trial).run(requests) | USUAL.engine(trial).run(plain)
    engine = way.engine(trial)
    completions = engine.run([*requests, *plain])
    for id, done in completions.items():
        assert (done.tokens, done.reason) == (expected[id].tokens, expected[id].reason), id
        assert done.logprobs == pytest.approx(expected[id].logprobs, abs=1e-9)
    assert engine.num_preempted or way.blocks == USUAL.blocks
    assert engine.schedulers[0].pool.num_free == way.blocks


def test_log_probabilities_are_those_of_the_model(trial: GeneratedTrial) -> None:
    requests = [replace(request, alternatives=1) for request in requests_of(7)]
    completions = USUAL.engine(trial).run(requests)
    for request in requests:
        done = completions[request.id]
        logprobs_TV = logits_of(trial.plain, (*request.prompt, *done.tokens)).log_softmax(1)
        for i, token in enumerate(done.tokens):
            expected = logprobs_TV[len(request.prompt) - 1 + i, token].item()
            assert done.logprobs[i] == pytest.approx(expected, abs=1e-9)


def test_a_sequence_goes_on_elsewhere_and_after_new_weights(trial: GeneratedTrial) -> None:
    requests = requests_of(7)
    expected = USUAL.engine(trial).run(requests)
    first, second = USUAL.engine(trial), USUAL.engine(trial)
    begun = first.run([replace(request, max_tokens=1) for request in requests])
    second.connect(_Nothing())
    for request in requests:
        done = begun[request.id]
        assert done.tokens == expected[request.id].tokens[:1]
        second.add(request, drawn=((done.tokens[0], done.logprobs[0]),))
    for _ in range(3):
        second.step()
    second.renew()
    while second.busy:
        second.step()
    for request in requests:
        assert second.collect(request.id).tokens == expected[request.id].tokens


class _Nothing:
    """Carries no cache: all is computed again."""

    def leave(self, sequence: Any) -> None: ...

    def land(self, sequence: Any) -> None:
        sequence.carried = 0


NUMBER = json.dumps({"type": "integer", "minimum": 0, "maximum": 99_999_999})


def test_stop_tokens_come_where_the_grammar_may_end(trial: GeneratedTrial) -> None:
    """A number may end after every digit: then the end token is a token like the digits."""
    grammars = Grammars(ByteCodec(), SHAPE.vocab)

    def allowed(drawn: str, **keys: Any) -> tuple[set[int], str | None]:
        request = Request("a", (1,), 99, grammar=NUMBER, **keys)
        bits, reason = grammars.next_tokens(request, tuple(drawn.encode()))
        grammars.forget("a")
        return {t for t in range(300) if bits and bits[t // 8] >> t % 8 & 1}, reason

    digits, blanks, stops = set(b"0123456789"), set(b" \n"), frozenset({END, 299, 7, 10**6})
    assert allowed("", stop_tokens=stops) == (digits, None)
    assert allowed("12", stop_tokens=stops) == (digits | {END, 299, 7}, None)
    assert allowed("12", stop_tokens=stops, min_tokens=3) == (digits, None)
    assert allowed("12", stop_tokens=frozenset()) == (digits, None)
    assert allowed("12", stop_tokens=frozenset(b"12345678"), min_tokens=3) == (set(b"90"), None)
    assert allowed("99999999", stop_tokens=stops) == ({END, 299, 7}, None)
    assert allowed("99999999", stop_tokens=frozenset()) == (set(), "stop")
    assert allowed("99999999", stop_tokens=stops, min_tokens=30) == (set(), "stop")
    assert allowed("12x") == (set(), "error") and not blanks & digits
    # A stop token that the grammar needs comes before `min_tokens`: nothing else can.
    assert allowed("", stop_tokens=frozenset(digits), min_tokens=3) == (digits, None)


def test_requests_of_several_seeds_and_ends(trial: GeneratedTrial) -> None:
    warm = Request("", (5,), 60, Sampling(1.0), frozenset({END}), grammar=NUMBER)
    requests = [replace(warm, id=f"{i}", seed_key=f"choice {i}") for i in range(20)]
    requests += [replace(request, id=f"{request.id} later", min_tokens=6) for request in requests]
    requests += [replace(warm, id="ignored", stop_tokens=frozenset())]
    requests += [replace(warm, id="by a digit", stop_tokens=frozenset(b"0123456789"))]
    completions = USUAL.engine(trial).run(requests)
    texts = {text_of(completions[f"{i}"]) for i in range(20)}
    assert len(texts) > 10 and min(map(len, texts)) < 6
    assert all(0 <= int(text) <= 99_999_999 for text in texts)
    for i in range(20):
        done = completions[f"{i} later"]
        assert done.reason == "stop" and (len(done.tokens) > 6 or text_of(done) == "0")
    assert completions["ignored"].reason == "stop" and END not in completions["ignored"].tokens
    assert len(completions["by a digit"].tokens) == 1


def test_a_grammar_that_fails_ends_its_request_alone(
    trial: GeneratedTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, requests = USUAL.engine(trial), requests_of(8)
    expected = USUAL.engine(trial).run(requests)
    grammars = engine.grammars
    assert grammars is not None
    plain = grammars.next_tokens

    def fails(request: Request, drawn: Sequence[int]) -> Any:
        return plain(request, drawn if request.id != "3" or len(drawn) < 3 else b"no JSON")

    monkeypatch.setattr(grammars, "next_tokens", fails)
    for request in requests:
        engine.add(request)
    rows = [row for _ in iter(lambda: engine.busy, False) for row in engine.step()]
    (last,) = [row for row in rows if row.reason == "error"]
    assert (last.id, last.token, last.index) == ("3", NO_TOKEN, 3)
    for request in requests:
        done = engine.collect(request.id)
        if request.id != "3":
            assert done.tokens == expected[request.id].tokens
    bad = replace(requests[0], grammar='{"type": "nothing"}')
    assert engine.run([bad])[bad.id].reason == "error", "whoever calls it may not have checked"
    assert engine.schedulers[0].pool.num_free == USUAL.blocks


def test_an_engine_without_a_tokenizer_has_no_grammars(trial: GeneratedTrial) -> None:
    engine = Engine(trial.shape, DecoderForward(trial.decoder(), 8), 8)
    with pytest.raises(FivefoldError, match="leave the grammar out"):
        engine.add(Request("a", (1,), 5, grammar=NUMBER))
    with pytest.raises(FivefoldError, match="a grammar with targets"):
        Request("a", (1, 2), 0, targets=(2,), grammar=NUMBER).check(300, 64)


def test_masks_leave_other_rows_alone() -> None:
    logits_NV = torch.randn(3, 11, dtype=torch.float64)
    bits = (1 << 3 | 1 << 10).to_bytes(2, "little")
    draws = [sampling.Draw(Sampling(), "a", 0, allowed=mask) for mask in (None, bits, None)]
    masked_NV: Tensor = sampling._allowed(logits_NV, draws)
    assert masked_NV[1].isfinite().nonzero().flatten().tolist() == [3, 10]
    assert torch.equal(masked_NV[[0, 2]], logits_NV[[0, 2]])
    for (token, logprob), row in zip(sampling.choose(logits_NV, draws), logits_NV, strict=True):
        assert logprob == pytest.approx(row.log_softmax(0)[token].item(), abs=1e-12)


def byte_level() -> LibraryCodec:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([json.dumps(SCHEMAS, indent=1), __doc__] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return LibraryCodec(tokenizer)


def with_fallback() -> LibraryCodec:
    """As of Llama 2: words after a blank, and bytes for what has no token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([json.dumps(SCHEMAS, indent=1), __doc__] * 3, trainer)
    table = json.loads(tokenizer.to_str())
    table["added_tokens"] = table["added_tokens"][:3]  # bytes are text
    return LibraryCodec(Tokenizer.from_str(json.dumps(table)))


@pytest.mark.parametrize("make", [byte_level, with_fallback], ids=lambda make: make.__name__)
@pytest.mark.parametrize("schema", SCHEMAS)
def test_tokens_of_a_tokenizer_are_valid_text(make: Any, schema: str) -> None:
    codec, draw = make(), random.Random(1)
    vocab = codec.tokenizer.get_vocab_size() + 40  # which the tokenizer does not have
    grammars, texts = Grammars(codec, vocab), set[str]()
    for number in range(8):
        request = Request(f"{number}", (1,), 999, grammar=json.dumps(SCHEMAS[schema]))
        drawn: list[int] = []
        while (step := grammars.next_tokens(request, drawn))[1] is None and len(drawn) < 400:
            assert step[0] is not None and len(step[0]) == -(-vocab // 8)
            bits = int.from_bytes(step[0], "little")
            drawn.append(draw.choice([token for token in range(vocab) if bits >> token & 1]))
        if len(drawn) == 400:  # a number may go on
            continue
        assert step[1] == "stop" and max(drawn) < vocab - 40
        text = text_of(Completion("", tuple(drawn), (), "stop", 0, 0), codec)
        assert is_valid(request, Completion("", tuple(text.encode()), (), "stop", 0, 0)), text
        texts.add(text)
    assert len(texts) > 1


def test_a_tokenizer_whose_bytes_are_unknown_is_refused() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer: Any = Tokenizer(models.WordLevel({"w0": 0, "w1": 1}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    grammars = Grammars(LibraryCodec(tokenizer), 2)
    grammars.load()
    with pytest.raises(FivefoldError, match=r"tokens are not known.*ask for JSON in the prompt"):
        grammars.check(NUMBER)
    few = Grammars(ByteCodec(), 40)
    with pytest.raises(FivefoldError, match="no token of this tokenizer begins such a text"):
        few.check(NUMBER)
