"""The parts of a server that need no model: turns, bodies, numbers, replicas."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("h11", reason="pip install 'fivefold[serve]', which make setup does")

from fivefold.generate.requests import Request
from fivefold.generate.text import ByteCodec
from fivefold.serve import replicas
from fivefold.serve import schema as asked
from fivefold.serve.answers import AnswerWriter, ServedCall, ServedChoice
from fivefold.serve.links import ReplicaHello
from fivefold.serve.metrics import Histogram
from fivefold.serve.queue import FairQueue
from fivefold.serve.replicas import ServingReplica, least_loaded, prompt_digests
from fivefold.serve.schema import ApiError, parse_asked


class Waiter(NamedTuple):
    """A sequence of a call."""

    client: str
    call: object
    number: int


def calls(client: str, *numbers: int) -> list[Waiter]:
    return [Waiter(client, f"{client}{each}", each) for each in numbers]


def test_clients_take_turns() -> None:
    queue: FairQueue[Waiter] = FairQueue(100)
    for one in [*calls("a", *range(6)), *calls("b", 0, 1), *calls("c", 0)]:
        queue.push(one.client, [one])
    order: list[str] = []
    while (one := queue.pop()) is not None:
        order.append(f"{one.client}{one.number}")
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4", "a5"]
    assert queue.size == 0


def test_a_full_queue_makes_room_for_those_who_have_less() -> None:
    queue: FairQueue[Waiter] = FairQueue(4)
    for one in calls("a", *range(4)):
        assert queue.push("a", [one]) == []
    assert queue.push("a", calls("a", 9)) is None, "nobody has more than itself"
    assert queue.push("b", calls("b", 0)) == calls("a", 3), "the newest of the greediest"
    assert queue.push("b", calls("b", 1)) == calls("a", 2)
    assert queue.push("b", calls("b", 2)) is None, "both have as much"
    queue.remove(calls("a", 0)[0])
    assert queue.size == 3 and queue.push("c", calls("c", 0)) == []


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=60))
def test_a_queue_loses_nothing(moves: list[tuple[str, int]]) -> None:
    queue: FairQueue[Waiter] = FairQueue(8)
    waiting: set[Waiter] = set()
    for number, (client, kind) in enumerate(moves):
        if kind == 0:
            popped = queue.pop()
            assert (popped is None) == (not waiting)
            waiting -= {popped} if popped else set()
            continue
        items = [Waiter(client, number, each) for each in range(kind)]
        pushed_out = queue.push(client, items)
        if pushed_out is not None:
            assert set(pushed_out) <= waiting
            waiting = (waiting - set(pushed_out)) | set(items)
        assert queue.size == len(waiting) <= 8


def test_a_body_is_checked() -> None:
    body = {"model": "m", "prompt": ["a", [1, 2]], "stop": "x", "n": 2, "user": "u", "echo": False}
    read = parse_asked(json.dumps(body).encode(), chat=False)
    assert read.prompts == ("a", (1, 2)) and read.stops == ("x",) and read.max_tokens == 16
    assert read.temperature == read.top_p == 1 and read.seed is None and not read.stream
    for temperature in (5e-324, 0, 1.7, 2):
        body["temperature"] = temperature
        assert parse_asked(json.dumps(body).encode(), chat=False).temperature == temperature


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"model": "m"}', "prompt: it is missing"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": [1, true, 2.5]}', "prompt: a list of tokens has something else in it"),
        (b'{"prompt": [1, "a"]}', "prompt: a list of tokens has something else in it"),
        (b'{"prompt": [[1, "a"]]}', "prompt: a list of tokens has something else in it"),
        (b'{"prompt": ["a", 1]}', "prompt: 1 is not a text"),
        (b'{"prompt": [[1], 2]}', "prompt: 2 is not a text"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature: NaN is no number"),
        (b'{"prompt": "a", "max_tokens": 1e3}', "max_tokens: 1000.0 is no whole number"),
        (b'{"prompt": "a", "max_tokens": true}', "true is no whole number"),
        (b'{"prompt": "a", "best_of": 3}', "best_of: 3 is not n = 1"),
        (b'{"prompt": "a", "stop": [1]}', "stop: give texts"),
        (b'{"prompt": "a", "stream": "yes"}', "neither true nor false"),
        (b'{"prompt": "a", "logit_bias": {"3": 1}}', "logit_bias"),
        (b'{"prompt": "a", "\\u0000\\n": 1}', "unknown key"),
        (b'{"prompt": "a", "temperature": ' + b"9" * 400 + b"}", "is no number from 0 to 2"),
        (b'{"prompt": "a", "temperature": -' + b"9" * 400 + b"}", "is no number from 0 to 2"),
        (b'{"prompt": "a", "top_p": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "Infinity is no number"),
        (b'{"prompt": "a", "parse_special": 1}', "neither true nor false"),
    ],
)
def test_a_bad_body_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_asked(body, chat=False)
    assert caught.value.status == 400 and words in caught.value.message
    error = json.loads(caught.value.body())["error"]
    assert error["type"] == "invalid_request_error" and error["message"] == caught.value.message


def test_only_the_beginning_of_a_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def suggest(name: str, known: list[str]) -> str:
        compared.append(len(name))
        return "none"

    monkeypatch.setattr(asked, "did_you_mean", suggest)
    with pytest.raises(ApiError, match="unknown key"):
        parse_asked(json.dumps({"prompt": "a", "k" * 3_000_000: 1}).encode(), chat=False)
    assert compared and max(compared) <= 100


def test_special_tokens_are_text_in_chats_alone_unless_asked() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for body, kind, expected in [(chat, True, False), ({"prompt": "a"}, False, True)]:
        assert parse_asked(json.dumps(body).encode(), kind).parse_special is expected
        for value in (True, False):
            changed = json.dumps({**body, "parse_special": value}).encode()
            assert parse_asked(changed, kind).parse_special is value


@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["model", "prompt", "messages", "n", "stop", "content", "role", "x"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ),
    st.booleans(),
)
def test_any_body_is_taken_or_refused(body: Any, chat: bool) -> None:
    try:
        parse_asked(json.dumps(body).encode(), chat)
    except ApiError as error:
        assert error.status == 400 and json.loads(error.body())["error"]["message"]


def choice_of(stops: tuple[str, ...], **fields: Any) -> tuple[ServedCall, ServedChoice]:
    body = json.dumps({"model": "m", "prompt": "a", **fields}).encode()
    call = ServedCall("cmpl-1", "me", parse_asked(body, chat=False), 1, 0.0)
    choice = ServedChoice(call, 0, Request("r", (1,), 50), ByteCodec(), stops)
    call.choices.append(choice)
    return call, choice


def test_numbers_of_tokens_come_with_their_text() -> None:
    call, choice = choice_of(("END",), logprobs=0)
    shown: list[tuple[str, int]] = []
    for byte in "aé EN END".encode():
        choice.push(byte, -1.0, None)
        text, notes = choice.take()
        shown.append((text, len(notes)))
        if choice.reason:
            break
    assert choice.reason == "stop" and call.ended
    assert "".join(text for text, _ in shown) == "aé EN " and shown[1] == ("", 0)
    assert sum(count for _, count in shown) == len("aé EN ".encode()), "none of the stop text"


def test_a_token_without_probability_is_valid_json() -> None:
    call, choice = choice_of((), logprobs=1)
    choice.push(97, float("-inf"), "length", ((98, float("-inf")),))
    table = AnswerWriter(ByteCodec()).completion(call)
    found = json.loads(table, parse_constant=pytest.fail)["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [-9999.0] and found["top_logprobs"] == [{"b": -9999.0}]


def test_a_stream_ends_with_its_reason() -> None:
    call, choice = choice_of((), stream=True)
    writer, told = AnswerWriter(ByteCodec()), set[int]()
    choice.push(97, -1.0, None)
    first = writer.news(call, told)
    choice.push(98, -1.0, "length")
    last = writer.news(call, told)
    assert writer.news(call, told) == b"", "an end is told once"
    events = [json.loads(each[6:])["choices"][0] for each in (first + last).split(b"\n\n")[:-1]]
    assert [each["text"] for each in events] == ["a", "b", ""]
    assert [each["finish_reason"] for each in events] == [None, None, "length"]
    assert writer.closing(call) == b"data: [DONE]\n\n"


def replica(index: int, most: int = 4) -> ServingReplica:
    class Deaf:
        def is_closing(self) -> bool:
            return True

    writer = cast("asyncio.StreamWriter", Deaf())
    return ServingReplica(ReplicaHello(index, 100, 100), writer, most)


def test_the_least_loaded_replica_is_chosen_unless_another_knows_the_prompt() -> None:
    _, choice = choice_of(())
    engines = [replica(0), replica(1)]
    prompt = tuple(range(64))
    digests = prompt_digests(prompt)
    assert len(digests) == 4 and digests[:3] == prompt_digests(prompt[:50])
    assert least_loaded(engines, digests) is engines[0]
    engines[1].add(choice, digests)
    assert engines[1].load == 51 and engines[1].known(digests) == 4
    assert least_loaded(engines, digests) is engines[1], "64 tokens are there, and 51 wait"
    assert least_loaded(engines, prompt_digests(prompt[1:])) is engines[0]
    engines[1].lose()
    assert least_loaded(engines, digests) is engines[0]
    engines[0].lose()
    assert least_loaded(engines, digests) is None


@pytest.mark.parametrize("changed", [0, 15, 16, 40, 63])
def test_a_replica_knows_the_blocks_before_the_first_token_that_differs(changed: int) -> None:
    _, choice = choice_of(())
    prompt = list(range(64))
    engine = replica(0)
    engine.add(choice, prompt_digests(prompt))
    prompt[changed] = 99
    assert engine.known(prompt_digests(prompt)) == changed // 16


def test_a_replica_remembers_the_latest_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_MOST_DIGESTS", 4)
    _, choice = choice_of(())
    engine = replica(0)
    first, second, third = (prompt_digests([number] * 32) for number in range(3))
    for digests in (first, second, first, third):
        engine.add(choice, digests)
    assert [engine.known(digests) for digests in (first, second, third)] == [2, 0, 2]


def test_a_choice_whose_prompt_is_elsewhere_loads_its_decode_engine() -> None:
    _, choice = choice_of(())
    prefill, *engines = (replica(index) for index in range(3))
    for expected in (engines[0], engines[1]):
        after = least_loaded(engines, [])
        assert after is expected
        prefill.add_prompt(choice, [], after)
        assert after.load == 1 + 50
    engines[0].ended(choice)
    assert engines[0].load == 0 and least_loaded(engines, []) is engines[0]


def test_a_histogram_counts() -> None:
    histogram = Histogram("x", "y", (1, 2))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert list(histogram.lines())[2:] == [
        'x_bucket{le="1"} 2',
        'x_bucket{le="2"} 3',
        'x_bucket{le="+Inf"} 4',
        "x_sum 12.0",
        "x_count 4",
    ]
