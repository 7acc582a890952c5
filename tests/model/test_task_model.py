"""Given tokens are scored as a plain forward scores them, however the engine cuts its steps; and
texts become tokens, windows and requests as evaluations mean it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from test_hf_parity import CONFIGS, Float64Everywhere, Pair, pair

from fivefold.core.errors import FivefoldError
from fivefold.generate.engine import Engine
from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import Request
from fivefold.generate.scheduler import ScheduleLimits
from fivefold.generate.task_model import TaskModel, prefix_token
from fivefold.generate.text import ByteCodec
from fivefold.generate.writer import TextRequest, WrittenText


def texts(vocab: int) -> list[tuple[int, ...]]:
    """Some begin alike, by more than a block."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(1, vocab, (n,), generator=generator).tolist() for n in (2, 7, 39, 40)]
    return [tuple(each) for each in (*drawn, [*drawn[3][:-1], 1], drawn[3][:33] + drawn[1])]


def plain(models: Pair, tokens: tuple[int, ...]) -> tuple[list[float], list[int]]:
    """The log-probabilities of all tokens but the first, and the likeliest ones in their places, by
    one forward of transformers."""
    with Float64Everywhere(), torch.no_grad():
        logits_SV = models.theirs(torch.tensor([tokens])).logits[0, :-1].double()
    targets = torch.tensor(tokens[1:])[:, None]
    return logits_SV.log_softmax(1).gather(1, targets)[:, 0].tolist(), logits_SV.argmax(1).tolist()


def check_scores(models: Pair, engine: Engine, counts: list[int]) -> None:
    given = texts(models.shape.vocab)
    requests = [
        Request(f"{i}", each[:-1], 0, targets=each[-min(count, len(each) - 1) :])
        for i, (each, count) in enumerate(zip(given, counts, strict=True))
    ]
    found = engine.run([Request("beside", given[0], 40), *requests])
    for request, tokens in zip(requests, given, strict=True):
        logprobs, likeliest = plain(models, tokens)
        count, done = len(request.targets), found[request.id]
        assert done.logprobs == pytest.approx(logprobs[-count:], rel=0, abs=1e-9)
        assert list(done.tokens) == likeliest[-count:]
    assert len(found["beside"].tokens) == 40
    assert engine.schedulers[0].pool.num_free == engine.schedulers[0].pool.count


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_targets_are_scored_as_transformers_does(name: str) -> None:
    models = pair(name)
    engine = Engine(
        models.shape,
        DecoderForward(copy.deepcopy(models.ours), 24),
        24,
        ScheduleLimits(tokens=7, sequences=3),  # texts in chunks, beside decodes
    )
    check_scores(models, engine, [1, 3, 38, 5, 1, 100])


@pytest.mark.parametrize("blocks", [4, 5])
def test_sequences_that_lose_their_blocks_are_scored_once(blocks: int) -> None:
    models = pair("llama")
    engine = Engine(models.shape, DecoderForward(models.ours, blocks), blocks, ScheduleLimits(4, 4))
    check_scores(models, engine, [100] * 6)
    assert engine.num_preempted


def test_blocks_are_shared_up_to_the_first_target() -> None:
    models = pair("llama")
    given, engine = (
        texts(models.shape.vocab)[3],
        Engine(models.shape, DecoderForward(models.ours, 16), 16),
    )
    # Of the same prompt with one target, all but the last of 39 tokens is there.
    for count, shared in ((1, 0), (1, 38), (7, 32), (8, 16), (39, 0)):
        request = Request(f"{count}", given[:-1], 0, targets=given[-count:])
        done = engine.run([request])[request.id]
        assert done.reused == shared
        assert done.logprobs == pytest.approx(plain(models, given)[0][-count:], rel=0, abs=1e-9)


def model_of(answers: Mapping[str, str] | None = None, **more: object) -> TaskModel:
    """A model of bytes that takes 8 of them; what it was asked is in its `asked`."""
    asked: list[TextRequest] = []

    def write(requests: list[TextRequest]) -> dict[str, WrittenText]:
        asked.extend(requests)
        return {
            each.request.id: WrittenText(
                each.request.id,
                each.prompt,
                (answers or {}).get(each.prompt, ""),
                each.request.targets,
                (-1.0,) * len(each.request.targets),
                "length",
                0.0,
                None,
            )
            for each in requests
        }

    class Recording(TaskModel):
        @property
        def asked(self) -> list[TextRequest]:
            return asked

    options = {"prefix": 256, "ends": frozenset({256}), **more}
    return Recording(ByteCodec(), 257, 8, write=write, **options)  # type: ignore[arg-type]


def pieces(model: TaskModel) -> list[tuple[bytes, bytes]]:
    """What is read and what is scored, without the prefix as `|`."""
    shown = [
        ([t if t < 256 else 124 for t in each.request.prompt], each.request.targets)
        for each in model.asked  # type: ignore[attr-defined]
    ]
    return [(bytes(prompt), bytes(targets)) for prompt, targets in shown]


def test_contexts_end_before_their_spaces_and_lose_their_beginning() -> None:
    model = model_of()
    scored = model.loglikelihood([("ab ", "cd"), ("", "x"), ("0123456789", "yz"), ("a", "")])
    assert pieces(model) == [(b"ab c", b" cd"), (b"|", b"x"), (b"3456789y", b"yz")]
    assert [each.logprob for each in scored] == [-3.0, -1.0, -2.0, 0.0]
    assert all(each.is_greedy for each in scored) and model.num_truncated == 1


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 21])
def test_rolling_windows_count_every_token_once(length: int) -> None:
    model, text = model_of(), bytes(range(65, 65 + length))
    assert model.loglikelihood_rolling([text.decode(), "ab"]) == [-length, -2]
    *windows, last = pieces(model)
    assert last == (b"|a", b"ab") and b"".join(scored for _, scored in windows) == text
    assert [len(read) for read, _ in windows[:-1]] == [8] * (len(windows) - 1)
    whole = b"|" + text
    for read, scored in windows:  # what is scored follows what is read
        at = whole.index(scored[-1:])
        assert whole[:at].endswith(read) and len(read) in (at, 8)


def test_stops_lengths_and_sampling_are_those_of_the_task() -> None:
    model = model_of({"ask": "answer"})
    options = {"until": ["\n", ""], "max_gen_toks": 4, "do_sample": False, "temperature": 0.5}
    sampled = {"until": "x", "max_gen_toks": 5, "do_sample": True, "top_k": 3}
    assert model.generate_until([("ask", options), ("0123456", sampled)]) == ["answer", ""]
    first, second = model.asked  # type: ignore[attr-defined]
    assert (first.stops, first.request.max_tokens, first.request.stop_tokens) == (
        ("\n",),
        4,
        frozenset({256}),
    )
    assert first.request.sampling.temperature == 0.0
    assert bytes(second.request.prompt) == b"456" and model.num_truncated == 1
    assert (second.request.sampling.temperature, second.request.sampling.top_k) == (1.0, 3)


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(FivefoldError, match="continuation has 9 tokens and the model takes 8"):
        model_of().loglikelihood([("a", "012345678")])
    with pytest.raises(FivefoldError, match="neither a beginning nor an end token"):
        model_of(prefix=None).loglikelihood([("", "b")])
    with pytest.raises(FivefoldError, match="lower max_gen_toks"):
        model_of().generate_until([("a", {})])
    with pytest.raises(FivefoldError, match="repetition_penalty in generation_kwargs"):
        model_of().generate_until([("a", {"max_gen_toks": 2, "repetition_penalty": 2.0})])
    with pytest.raises(FivefoldError, match="3 targets follow 2 tokens"):
        Request("a", (1, 2), 0, targets=(1, 2, 3)).check(10, 8)
    with pytest.raises(FivefoldError, match="target 10 is not in the vocabulary"):
        Request("a", (1, 2), 0, targets=(10,)).check(10, 8)


def test_bytes_begin_with_their_end(tmp_path: Path) -> None:
    assert prefix_token(tmp_path, ByteCodec(), frozenset({256}), 257) == 256
    assert prefix_token(tmp_path, ByteCodec(), frozenset({256}), 256) is None
