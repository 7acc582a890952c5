"""Keys that clients of other servers send: taken, refused, and their answers, without a model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("h11", reason="pip install 'fivefold[serve]', which make setup does")

from test_serve_door import Desk, run, status

from fivefold.generate.requests import Request
from fivefold.generate.text import ByteCodec, TextStream
from fivefold.serve import schema
from fivefold.serve.links import StepNews
from fivefold.serve.schema import ApiError, parse_asked

NEUTRAL = [
    *({"repetition_penalty": 1.0}, {"repetition_penalty": 1}, {"top_k": -1}, {"top_k": 0}),
    *({"presence_penalty": 0}, {"frequency_penalty": 0.0}, {"n": 2, "best_of": 2}),
    *({"logit_bias": {}}, {"user": "me"}, {"length_penalty": 1.0}, {"use_beam_search": False}),
    *({"skip_special_tokens": True}, {"min_p": 0}, {"min_p": 0.0}, {"min_tokens": 0}),
    *({"ignore_eos": False}, {"stop_token_ids": []}, {"prompt_logprobs": None}, {"echo": False}),
    *({"spaces_between_special_tokens": True}, {"include_stop_str_in_output": False}),
    *({"early_stopping": False}, {"truncate_prompt_tokens": None}, {"bad_words": []}),
    *({"guided_json": None}, {"detokenize": True}, {"priority": 0}, {"request_id": "r"}),
]


def parsed(chat: bool = False, **body: Any) -> schema.AskedText:
    prompt = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    return parse_asked(json.dumps({**prompt, **body}).encode(), chat)


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("body", NEUTRAL, ids=str)
def test_neutral_values_of_other_clients_ask_for_nothing(body: dict[str, Any], chat: bool) -> None:
    plain = {key: value for key, value in body.items() if key == "n"}
    assert parsed(chat, **body) == parsed(chat, **plain)
    for key in body:
        assert parsed(chat, **{key: None}) == parsed(chat)


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize(
    ("body", "param", "rule"),
    [
        (
            {"repetition_penalty": 1.2},
            "repetition_penalty",
            "1.2 is not supported: leave it out, or give 1",
        ),
        ({"repetition_penalty": True}, "repetition_penalty", "true is not supported"),
        ({"presence_penalty": False}, "presence_penalty", "leave it out, or give 0"),
        ({"length_penalty": 0.5}, "length_penalty", "leave it out, or give 1"),
        ({"use_beam_search": True}, "use_beam_search", "leave it out, or give false"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "leave it out, or give true"),
        ({"guided_regex": "a*"}, "guided_regex", '"a*" is not supported: leave it out'),
        ({"best_of": 2}, "best_of", "2 is not n = 1"),
        ({"top_k": -2}, "top_k", "-2 is no whole number from -1"),
        ({"min_p": 1.5}, "min_p", "1.5 is no number from 0 to 1"),
        ({"min_p": float("nan")}, "min_p", "NaN is no number from 0 to 1"),
        ({"min_p": True}, "min_p", "true is no number"),
        ({"min_tokens": -1}, "min_tokens", "-1 is no whole number from 0"),
        ({"min_tokens": 1.5}, "min_tokens", "1.5 is no whole number"),
        ({"ignore_eos": 1}, "ignore_eos", "1 is neither true nor false"),
        ({"stop_token_ids": 3}, "stop_token_ids", "3 is not a list of tokens"),
        ({"stop_token_ids": [3, "a"]}, "stop_token_ids", "has something else in it"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", "129 tokens are more than 128"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "-1 is no whole number from 0 to 20"),
        ({"prompt_logprobs": True}, "prompt_logprobs", "true is no whole number"),
        ({"echo": "yes"}, "echo", '"yes" is'),
        ({"min_tokes": 3}, "min_tokes", "did you mean min_tokens"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_value_is_refused_with_its_rule(
    body: dict[str, Any], param: str, rule: str, chat: bool
) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(chat, **body)
    error = caught.value
    assert (error.status, error.param) == (400, param) and rule in error.message


def test_an_echo_is_of_prompts_alone() -> None:
    assert parsed(echo=True, max_tokens=0).max_tokens == 0
    for chat, body in ((False, {"max_tokens": 0}), (True, {"max_tokens": 0}), (True, {"echo": 1})):
        with pytest.raises(ApiError):
            parsed(chat, **body)


def answer_of(data: bytes) -> Any:
    return json.loads(data.partition(b"\r\n\r\n")[2])


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events of a chunked stream, each of which is a line in a chunk."""
    lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def asked(folder: Path, **body: Any) -> tuple[bytes, list[Request]]:
    """The answer of a server, and what it asked of its engine, which draws `de`."""
    requests: list[Request] = []

    async def client(desk: Desk) -> bytes:
        call = asyncio.ensure_future(desk.ask(**body))
        (engine,) = desk.engines
        await desk.until(lambda: engine.ids() or call.done())
        requests.extend(command.request for command in engine.commands)
        for request in requests:
            length = len(request.prompt)
            scores = [
                (request.id, request.prompt[i], -float(i), i, ((120, -0.5), (97, float("-inf"))))
                for i in range(1, length if request.prompt_logprobs is not None else 1)
            ]
            desk.hear(0, StepNews([], [], 100, 0, prompt_rows=scores[:1]))
            await asyncio.sleep(0.01)
            rows: list[Any] = [(request.id, 100, -0.25, None, ())]
            news = StepNews(rows, [], 100, 0, prompt_rows=scores[1:])
            desk.hear(0, news)
            await asyncio.sleep(0.01)
            if request.max_tokens > 1:
                desk.say(0, (request.id, 101, -0.75, "length"))
        return await asyncio.wait_for(call, 10)

    return run(folder, client), requests


def test_keys_reach_the_engine(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"min_p": 0.25, "min_tokens": 2, "stop_token_ids": [7, 8]}
    answer, (request,) = asked(tmp_path, **keys, stop=["x"], max_tokens=2)
    assert status(answer) == 200 and request.sampling.min_p == 0.25 and request.min_tokens == 2
    assert request.stop_tokens == {7, 8, 256} and request.prompt_logprobs is None
    _, (free,) = asked(tmp_path, stop_token_ids=[7], ignore_eos=True, max_tokens=2)
    assert free.stop_tokens == {7}
    _, (plain,) = asked(tmp_path, max_tokens=2)
    assert plain.stop_tokens == {256} and plain.min_tokens == 0


@pytest.mark.parametrize(
    ("body", "param", "rule"),
    [
        ({"stop_token_ids": [3, 999_999]}, "stop_token_ids", "token 999999 is not in the voc"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "token -1 is not in the vocabulary"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "9 are more than the 8 that may be"),
        ({"min_tokens": 1, "max_tokens": 0, "echo": True}, "min_tokens", "than the 0 that may"),
    ],
    ids=str,
)
def test_what_the_model_cannot_do_is_refused(
    tmp_path: Path, body: dict[str, Any], param: str, rule: str
) -> None:
    answer, requests = asked(tmp_path, **body)
    error = answer_of(answer)["error"]
    assert status(answer) == 400 and not requests, "nothing has begun"
    assert error["param"] == param and rule in error["message"] and error.keys() >= {"type", "code"}


SCORES = [
    None,
    {
        "98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"},
        "120": {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
    },
    {
        "99": {"logprob": -2.0, "rank": 2, "decoded_token": "c"},
        "120": {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
    },
]


@pytest.mark.parametrize("stream", [False, True], ids=["at once", "stream"])
def test_prompt_logprobs_have_the_shape_of_vllm(tmp_path: Path, stream: bool) -> None:
    answer, (request,) = asked(tmp_path, prompt_logprobs=1, max_tokens=2, stream=stream)
    assert request.prompt_logprobs == 1 and status(answer) == 200
    if stream:
        first, *others = [event["choices"][0] for event in events_of(answer)]
        assert first["prompt_logprobs"] == SCORES and first["text"] == ""
        assert not any("prompt_logprobs" in row for row in others)
        assert "".join(row["text"] for row in others) == "de"
        return
    (choice,) = answer_of(answer)["choices"]
    assert choice["prompt_logprobs"] == SCORES and choice["text"] == "de"


@pytest.mark.parametrize("stream", [False, True], ids=["at once", "stream"])
def test_an_echo_comes_before_the_text_and_its_log_probabilities(
    tmp_path: Path, stream: bool
) -> None:
    answer, (request,) = asked(tmp_path, echo=True, logprobs=2, max_tokens=2, stream=stream)
    assert request.prompt_logprobs == 2 and b"prompt_logprobs" not in answer
    rows = [event["choices"][0] for event in events_of(answer)] if stream else []
    rows = rows or answer_of(answer)["choices"]
    assert "".join(row["text"] for row in rows) == "abcde"
    assert rows[0]["text"] == ("abc" if stream else "abcde")
    parts: dict[str, list[Any]] = {}
    for row in rows:
        for key, values in (row["logprobs"] or {}).items():
            parts.setdefault(key, []).extend(values)
    assert parts["tokens"] == list("abcde") and parts["text_offset"] == [0, 1, 2, 3, 4]
    assert parts["token_logprobs"] == [None, -1.0, -2.0, -0.25, -0.75]
    likeliest = {"x": -0.5, "a": -9999.0}
    assert parts["top_logprobs"] == [None, likeliest, likeliest, {}, {}]
    assert rows[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True], ids=["at once", "stream"])
@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]], ids=["text", "tokens"])
def test_an_echo_alone_draws_nothing_that_shows(tmp_path: Path, prompt: Any, stream: bool) -> None:
    answer, (request,) = asked(
        tmp_path,
        prompt=prompt,
        echo=True,
        max_tokens=0,
        stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    assert request.max_tokens == 1 and request.prompt_logprobs is None
    tables = events_of(answer) if stream else [answer_of(answer)]
    rows = [row for table in tables for row in table["choices"]]
    assert "".join(row["text"] for row in rows) == "abc"
    assert rows[-1]["finish_reason"] == "length"
    usage = tables[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)


def test_stop_texts_count_after_min_tokens() -> None:
    def text(min_tokens: int) -> str:
        stream = TextStream(ByteCodec(), ("b", "cd"), min_tokens)
        for byte in b"abcdabcd":
            stream.push(byte)
            if stream.stopped:
                break
        stream.finish()
        return stream.text

    assert [text(count) for count in range(9)] == [
        *("a", "a", "ab", "ab", "abcda", "abcda", "abcdab", "abcdab", "abcdabcd"),
    ]


def test_text_after_an_echo_is_spaced_as_its_continuation() -> None:
    class Words(ByteCodec):
        def decode(self, tokens: Any) -> str:
            return " ".join(f"w{token}" for token in tokens)

    stream = TextStream(Words(), context=(1, 2))
    assert stream.push(3) + stream.push(4) + stream.finish() == " w3 w4"
    assert TextStream(Words()).push(3) == "w3"
