"""Answers of a schema through HTTP: a server of one rank, of two, with prompts on another rank, and
of bytes. Whatever the client draws is JSON of its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.ranks.serving import TEMPLATE, RunningServer, serving

openai = pytest.importorskip("openai", reason="pip install openai, which make setup does")
pytest.importorskip("llguidance", reason="pip install 'fivefold[grammar]', which make setup does")
jsonschema = pytest.importorskip("jsonschema", reason="make setup installs it")

LAYOUTS = {
    "one rank": ("--layout", "dp=1"),
    "tp=2": ("--layout", "tp=2"),
    "pp=2": ("--layout", "pp=2"),
    "prompts apart": ("--prefill", "tp=2", "--layout", "dp=1"),
    "bytes": ("--tokenizer", "bytes"),
}
VOCAB = 384  # the tokenizer has fewer
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["ä", "b\n", None]}, "maxItems": 2},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, and a tokenizer of bytes and some of their pairs."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([json.dumps(SCHEMA, indent=1), __doc__] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        eos_token_id=tokenizer.token_to_id("<|end|>"),
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def server(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("log") / "log.txt"
    with serving(folder, log, "--dtype", "float64", *request.param) as running:
        yield running
        assert running.settles(), "a block is leaked"
        assert running.stop() == 0


def client_of(server: RunningServer) -> Any:
    return openai.OpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=60)


def require_valid(text: str, schema: dict[str, Any] = SCHEMA) -> Any:
    table = json.loads(text)
    jsonschema.validate(table, schema)
    return table


@pytest.mark.sample(2)
def test_all_choices_of_a_chat_and_of_prompts_are_valid(server: RunningServer) -> None:
    client = client_of(server)
    chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a thing"}]}
    for temperature, n in ((0, 1), (1, 6)):
        usual: dict[str, Any] = {"temperature": temperature, "n": n, "seed": 5, "max_tokens": 300}
        answer = client.chat.completions.create(**chat, **usual, response_format=FORMAT)
        texts = [choice.message.content for choice in answer.choices]
        assert all(choice.finish_reason == "stop" for choice in answer.choices)
        assert [list(require_valid(text)) for text in texts] == [["name", "tags", "size"]] * n
        assert len(set(texts)) > n // 2
        parts: dict[int, str] = {}
        stream = client.chat.completions.create(
            **chat, **usual, response_format=FORMAT, stream=True
        )
        for event in stream:
            for choice in event.choices:
                parts[choice.index] = parts.get(choice.index, "") + (choice.delta.content or "")
        assert [parts[index] for index in range(n)] == texts
    body = {"response_format": FORMAT, "min_tokens": 5, "ignore_eos": True}
    prompts = client.completions.create(
        model="tiny",
        prompt=["one", "two"],
        n=2,
        seed=7,
        max_tokens=300,
        logprobs=1,
        extra_body=body,
    )
    for choice in prompts.choices:
        require_valid(choice.text)
        assert choice.finish_reason == "stop"
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) >= 5
    assert len({choice.text for choice in prompts.choices}) >= 2


@pytest.mark.sample(2)
def test_answers_without_a_schema_are_as_before(server: RunningServer) -> None:
    client = client_of(server)

    def text(**keys: Any) -> str:
        body: dict[str, Any] = {"model": "tiny", "prompt": "one", "seed": 3, "max_tokens": 40}
        return client.completions.create(**body, **keys).choices[0].text

    plain = text()
    assert text(extra_body={"response_format": {"type": "text"}}) == plain
    some = text(extra_body={"response_format": {"type": "json_object"}})
    assert some.lstrip().startswith("{") != plain.lstrip().startswith("{")
    cut = text(extra_body={"response_format": FORMAT}, stop=":")
    assert cut.rstrip().endswith('"name"'), "stop texts end an answer as ever"


@pytest.mark.sample(2)
def test_a_bad_schema_loses_nothing(server: RunningServer) -> None:
    client = client_of(server)
    bad = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nothing"}}}
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="Invalid type: nothing") as caught:
            client.completions.create(
                model="tiny", prompt="one", extra_body={"response_format": bad}
            )
        assert caught.value.param == "response_format"
    nested = {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 1}}}
    schema = nested | {"$ref": "#/$defs/n"}
    good = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    answer = client.completions.create(
        model="tiny", prompt="one", max_tokens=300, extra_body={"response_format": good}
    )
    require_valid(answer.choices[0].text, schema)
