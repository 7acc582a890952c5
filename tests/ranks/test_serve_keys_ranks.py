"""Keys of other clients against a server of one rank, of two, and with prompts on another rank:
the answers are what transformers computes of the same model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.ranks.serving import NUM_WORDS, RunningServer, make_model, serving

openai = pytest.importorskip("openai", reason="pip install openai, which make setup does")
PROMPT = [5, 6, 7, *range(20, 40)]
LAYOUTS = {
    "one rank": ("--layout", "dp=1"),
    "tp=2": ("--layout", "tp=2"),
    "prompts apart": ("--prefill", "tp=2", "--layout", "dp=1"),
}


class Reference:
    """The model by transformers, in float64."""

    def __init__(self, folder: Path) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.model = model

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Of the next token, after every token."""
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].double().log_softmax(1)

    def greedy(self, count: int, exclusions: tuple[int, ...] = (), least: int = 0) -> list[int]:
        """The likeliest continuation, of which the first tokens are none of the exclusions."""
        tokens = list(PROMPT)
        for index in range(count):
            logprobs_V = self.logprobs(tokens)[-1]
            if index < least:
                logprobs_V[list(exclusions)] = -torch.inf
            tokens.append(int(logprobs_V.argmax()))
        return tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose end token comes third after the prompt."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    end = Reference(folder).greedy(3)[2]
    for name in ("config.json", "generation_config.json"):
        table = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(table | {"eos_token_id": end}))
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def server(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("log") / "log.txt"
    with serving(folder, log, "--dtype", "float64", *request.param) as running:
        yield running
        assert running.settles(), "a block is leaked"
        assert running.stop() == 0


def completed(server: RunningServer, **more: Any) -> Any:
    """The first choice of a greedy completion."""
    client = openai.OpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=60)
    usual = {"max_tokens": 6, "temperature": 0}
    body = {"model": "tiny", "prompt": PROMPT, "extra_body": usual | more}
    return client.completions.create(**body).choices[0]


def words_of(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def test_an_end_token_may_be_ignored_or_come_later(
    server: RunningServer, reference: Reference
) -> None:
    greedy = reference.greedy(6)
    end = greedy[2]
    first = greedy.index(end)
    plain = completed(server)
    assert (plain.text, plain.finish_reason) == (words_of(greedy[:first]), "stop")
    neutral = {"repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0, "best_of": 1, "min_tokens": 0}
    assert completed(server, **neutral).text == plain.text
    free = completed(server, ignore_eos=True)
    assert (free.text, free.finish_reason) == (words_of(greedy), "length")
    later = reference.greedy(6, (end,), least=5)
    if end in later:
        later = later[: later.index(end)]
    found = completed(server, min_tokens=5)
    assert found.text == words_of(later) and len(later) >= 5
    stopped = completed(server, ignore_eos=True, stop_token_ids=[greedy[1]])
    assert stopped.finish_reason == "stop"
    assert stopped.text == words_of(greedy[: greedy.index(greedy[1])])


def test_min_p_of_one_leaves_the_likeliest(server: RunningServer, reference: Reference) -> None:
    greedy = words_of(reference.greedy(6))
    warm: dict[str, Any] = {"temperature": 2.0, "seed": 3, "ignore_eos": True}
    assert completed(server, min_p=1.0, **warm).text == greedy != completed(server, **warm).text


@pytest.mark.parametrize("repeated", [False, True], ids=["first", "over cached blocks"])
def test_prompts_are_scored(server: RunningServer, reference: Reference, repeated: bool) -> None:
    if repeated:
        completed(server)
    logprobs_TV = reference.logprobs(PROMPT)
    rows = completed(server, prompt_logprobs=2, logprobs=0).prompt_logprobs
    assert len(rows) == len(PROMPT) and rows[0] is None
    for position, row in enumerate(rows[1:]):
        logprobs_V, token = logprobs_TV[position], PROMPT[position + 1]
        top = logprobs_V.topk(2).indices.tolist()
        assert {int(key) for key in row} == {token, *top}
        for key, entry in row.items():
            value = logprobs_V[int(key)]
            assert entry["logprob"] == pytest.approx(value.item(), abs=1e-6)
            assert entry["rank"] == 1 + (logprobs_V > value).sum().item()
            assert entry["decoded_token"] == f"w{key}"


def test_a_prompt_is_echoed(server: RunningServer, reference: Reference) -> None:
    greedy = reference.greedy(6)
    drawn = greedy[: greedy.index(greedy[2])]
    found = completed(server, echo=True, logprobs=1)
    tokens = [*PROMPT, *drawn]
    assert found.text == words_of(tokens) and found.logprobs.tokens == [f"w{t}" for t in tokens]
    logprobs_TV = reference.logprobs(tokens)
    expected = [logprobs_TV[i, token].item() for i, token in enumerate(tokens[1:])]
    assert found.logprobs.token_logprobs[0] is None
    assert found.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-6)
    for token, offset in zip(found.logprobs.tokens, found.logprobs.text_offset, strict=True):
        assert found.text[offset:].lstrip().startswith(token)
    alone = completed(server, echo=True, logprobs=0, max_tokens=0)
    assert alone.text == words_of(PROMPT)
    count = len(PROMPT)
    assert alone.logprobs.token_logprobs[1:] == pytest.approx(expected[: count - 1], abs=1e-6)


def test_a_chat_is_scored_once(server: RunningServer, reference: Reference) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=60)
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "w9"}]}
    body |= {"n": 2, "max_tokens": 3, "extra_body": {"prompt_logprobs": 0, "min_tokens": 2}}
    whole = client.chat.completions.create(**body).prompt_logprobs
    logprobs_TV = reference.logprobs([1, 9, 2])
    assert whole[0] is None and [list(row) for row in whole[1:]] == [["9"], ["2"]]
    for position, row in enumerate(whole[1:]):
        ((key, entry),) = row.items()
        assert entry["logprob"] == pytest.approx(logprobs_TV[position, int(key)].item(), abs=1e-6)
    events = list(client.chat.completions.create(**body, stream=True))
    shown = [event.prompt_logprobs for event in events if hasattr(event, "prompt_logprobs")]
    assert len(shown) == 1 and len(shown[0]) == len(whole)
    for row, other in zip(shown[0][1:], whole[1:], strict=True):
        assert row.keys() == other.keys()
        for key, entry in row.items():  # of another batch, which rounds in another order
            assert entry["logprob"] == pytest.approx(other[key]["logprob"], abs=1e-9)


def test_a_bad_key_loses_nothing(server: RunningServer) -> None:
    for keys in ({"stop_token_ids": [NUM_WORDS]}, {"min_tokens": 7}, {"min_p": 2}):
        with pytest.raises(openai.BadRequestError) as caught:
            completed(server, **keys)
        assert caught.value.param == next(iter(keys))
    every = {"stop_token_ids": list(range(NUM_WORDS)), "min_tokens": 1}
    with pytest.raises(openai.BadRequestError, match="every token ends the completion"):
        completed(server, **every)
    assert completed(server).finish_reason == "stop", "it stays up"
