"""`fivefold serve` as the official client of the API sees it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.commands import in_fork
from tests.ranks.serving import LONGEST, RunningServer, make_model, serving

openai = pytest.importorskip("openai", reason="pip install openai, which make setup does")
KEY, OTHER = "key-of-the-first", "key-of-the-second"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    words = ("--dtype", "float64", "--api-key", KEY, "--api-key", OTHER)
    with serving(folder, folder / "log.txt", *words) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    return openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=30)


def their_tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def words_of(tokens: list[int]) -> str:
    return " ".join(f"w{each}" for each in tokens)


def late_word(text: str) -> str:
    """A word that comes after some others for the first time, and begins no other."""
    words = text.split()
    places = (i for i, each in enumerate(words) if i >= 4 and len(each) == 3)
    return next(words[i] for i in places if words[i] not in words[:i])


def test_models_are_listed(client: Any) -> None:
    assert [each.id for each in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == LONGEST
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")


def test_a_completion_is_what_transformers_generates(client: Any, folder: Path) -> None:
    found = client.completions.create(model="tiny", prompt="w5 w6 w7", max_tokens=12, temperature=0)
    assert found.choices[0].text == words_of(their_tokens(folder, [5, 6, 7], 12))
    assert found.choices[0].finish_reason == "length" and found.object == "text_completion"
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 12, 15)


def test_a_chat_uses_the_template(client: Any, folder: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "w9"}]}]
    found = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=6, temperature=0
    )
    assert found.choices[0].message.content == words_of(their_tokens(folder, [1, 9, 2], 6))
    assert found.choices[0].message.role == "assistant" and found.usage.prompt_tokens == 3


@pytest.mark.parametrize("stop", [None, "w"], ids=["to the end", "stopped"])
def test_a_stream_is_the_same_in_pieces(client: Any, stop: str | None) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "w3 w4", "max_tokens": 16, "seed": 7}
    if stop is not None:
        asked["stop"] = late_word(client.completions.create(**asked).choices[0].text)
    whole = client.completions.create(**asked)
    options = {"include_usage": True}
    events = list(client.completions.create(**asked, stream=True, stream_options=options))
    assert "".join(each.choices[0].text for each in events[:-1]) == whole.choices[0].text
    assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.choices[0].finish_reason == ("length" if stop is None else "stop")
    assert events[-1].choices == [] and events[-1].usage == whole.usage
    assert len(events) > 5, "it comes as it is drawn"


def test_a_stream_of_a_chat_has_several_choices(client: Any) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "w8"}], "max_tokens": 5}
    asked |= {"n": 3, "seed": 11}
    whole = client.chat.completions.create(**asked)
    texts = {each.index: each.message.content for each in whole.choices}
    assert len(set(texts.values())) == 3, "each choice has draws of its own"
    found, roles = dict.fromkeys(texts, ""), dict[int, str]()
    for event in client.chat.completions.create(**asked, stream=True):
        for each in event.choices:
            found[each.index] += each.delta.content or ""
            roles[each.index] = each.delta.role or roles[each.index]
    assert found == texts and set(roles.values()) == {"assistant"}


def test_a_stop_text_ends_it_and_is_left_out(client: Any) -> None:
    asked = {"model": "tiny", "prompt": "w5 w6", "max_tokens": 20, "seed": 5, "logprobs": 0}
    text = client.completions.create(**asked).choices[0].text
    words, stop = text.split(), late_word(text)
    first = words.index(stop)
    found = client.completions.create(**asked, stop=["nowhere", f" {stop}"]).choices[0]
    assert found.text == " ".join(words[:first]) and found.finish_reason == "stop"
    assert found.logprobs.tokens == words[:first], "nor are its tokens"


def test_log_probabilities(client: Any) -> None:
    asked = {"model": "tiny", "prompt": "w5 w6 w7", "max_tokens": 4, "seed": 2}
    found = client.completions.create(**asked, logprobs=3).choices[0]
    assert " ".join(found.logprobs.tokens) == found.text
    for token, value, tops, offset in zip(
        found.logprobs.tokens,
        found.logprobs.token_logprobs,
        found.logprobs.top_logprobs,
        found.logprobs.text_offset,
        strict=True,
    ):
        assert len(tops) == 3 and list(tops.values()) == sorted(tops.values(), reverse=True)
        assert tops.get(token, value) == value <= max(tops.values())
        assert found.text[offset:].lstrip().startswith(token)
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "w9"}],
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    ).choices[0]
    assert " ".join(each.token for each in chat.logprobs.content) == chat.message.content
    for each in chat.logprobs.content:
        assert bytes(each.bytes).decode() == each.token
        assert each.top_logprobs[0].token == each.token, "greedy takes the likeliest"
        assert each.logprob == each.top_logprobs[0].logprob > each.top_logprobs[1].logprob


def test_all_probabilities_are_those_of_the_model(client: Any, folder: Path) -> None:
    found = client.completions.create(
        model="tiny", prompt=[5, 6, 7], max_tokens=1, temperature=0, logprobs=20
    ).choices[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logprobs_V = model(torch.tensor([[5, 6, 7]])).logits[0, -1].double().log_softmax(0)
    for word, value in found.logprobs.top_logprobs[0].items():
        assert abs(value - logprobs_V[int(word[1:])].item()) < 1e-6
    assert len(found.logprobs.top_logprobs[0]) == 20


def test_a_seed_repeats_and_temperature_matters(client: Any) -> None:
    def texts(**more: Any) -> str:
        found = client.completions.create(model="tiny", prompt="w3", max_tokens=12, **more)
        return found.choices[0].text

    assert texts(seed=4) == texts(seed=4) != texts(seed=5)
    assert texts() != texts(), "without a seed every answer is another one"
    assert texts(seed=4, temperature=0) == texts(top_p=1e-9) == texts(extra_body={"top_k": 1})


BAD = [
    ({"model": "huge"}, 404, "model", "is not served: ask for 'tiny'"),
    ({"max_tokens": -1}, 400, "max_tokens", "-1 is no whole number from 1"),
    ({"max_tokens": 0}, 400, "max_tokens", "0 is no whole number"),
    ({"prompt": "w1 " * 300}, 400, "prompt", "300 tokens and 16 more are asked for; 256 is"),
    ({"prompt": "w1 " * 250, "max_tokens": 100}, 400, "prompt", "250 tokens"),
    ({"prompt": ""}, 400, "prompt", "it has no token"),
    ({"prompt": [3, 60]}, 400, "prompt", "token 60 is not in the vocabulary"),
    ({"temperature": 3}, 400, "temperature", "3 is no number from 0 to 2"),
    ({"top_p": 0}, 400, "top_p", "not above 0"),
    ({"n": 0}, 400, "n", "no whole number from 1 to 128"),
    ({"n": 100, "prompt": ["w1", "w2"]}, 400, "n", "more than 128 choices"),
    ({"logprobs": 21}, 400, "logprobs", "from 0 to 20"),
    ({"stop": ""}, 400, "stop", "1 to 256 characters"),
    ({"presence_penalty": 1.0}, 400, "presence_penalty", "not supported"),
    ({"extra_body": {"tempreature": 1}}, 400, "tempreature", "did you mean temperature"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "needs stream"),
    ({"prompt": "x" * 10_000_000}, 413, None, "more than 4,194,304 bytes"),
]


@pytest.mark.parametrize(("more", "status", "param", "words"), BAD, ids=lambda each: str(each)[:20])
def test_bad_input_gets_the_error_of_the_api(
    client: Any, more: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "w1", **more})
    error = caught.value
    assert error.status_code == status and error.param == param and words in error.message
    assert error.type == "invalid_request_error" and error.body.keys() == {
        *("message", "type", "param", "code")
    }
    assert client.completions.create(model="tiny", prompt="w1", max_tokens=1).choices, "it stays up"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "give a list of messages"),
        ([{"role": "pirate", "content": "w1"}], 'role "pirate" is none of'),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text is read"),
        ([{"role": "user", "content": 3}], "3 is not a text"),
    ],
    ids=["none", "role", "picture", "number"],
)
def test_bad_messages_are_named(client: Any, messages: list[Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=messages)
    assert words in caught.value.message and caught.value.param.startswith("messages")


def test_no_key_no_entry(server: RunningServer, folder: Path, tmp_path: Path) -> None:
    for key in ("wrong-key", KEY[:-1], ""):
        client = openai.OpenAI(base_url=server.url, api_key=key or "-", max_retries=0)
        with pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(model="tiny", prompt="w1")
        assert caught.value.code == "invalid_api_key"
    other = openai.OpenAI(base_url=server.url, api_key=OTHER, max_retries=0)
    assert other.completions.create(model="tiny", prompt="w1").choices
    for words, said in [
        (["--host", "0.0.0.0"], "is beyond loopback, where everybody could come in"),
        (["--host", "0.0.0.0", "--api-key", "short"], "at least 8 letters"),
        (["--api-key-file", "nowhere"], "give a file with a key on each line"),
        (["--port", str(server.port)], "Address already in use"),
        (["--port", "70000"], "from 0 to 65535"),
        (["--max-queue", "0"], "--max-queue 0"),
        (["--layout", "tp=3"], "KV heads"),
    ]:
        done = in_fork(["serve", str(folder), *words], tmp_path)
        assert done.returncode == 2 and said in done.stderr, done.stderr


def test_the_log_has_a_line_for_every_request(client: Any, server: RunningServer) -> None:
    before = len(server.lines())
    answer = client.completions.create(model="tiny", prompt="w1 w2", max_tokens=3)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="a\nb", prompt="w1")
    time.sleep(0.1)
    good, bad = server.lines()[before:]
    drawn = answer.usage.completion_tokens  # it may draw the end early
    assert " key-0 POST /v1/completions 200 " in good and f"prompt=2 output={drawn} " in good
    assert "ttft=" in good and KEY not in server.output.read_text()
    assert " 404 " in bad and "a\\\\nb" in bad, "what clients send breaks no line"
