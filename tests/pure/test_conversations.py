"""Conversations: the forms of a row, what a template makes of them, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli import main
from fivefold.core.errors import BadFile
from fivefold.data.conversations import conversation_of
from fivefold.data.shards import open_corpus
from fivefold.generate.chat import ChatTemplate

PREFIX = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} .\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }} .{% endgeneration %}{% else %}{{ m.content }} .{% endif %}\n{% endfor %}"
)


def run(*words: object) -> int | str | None:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return stop.value.code


def model_folder(folder: Path, template: str) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir()
    words = ["[UNK]", "user", "assistant", "system", "tool", ":", ".", "hello", "there", "add", "1"]
    vocab = {word: at for at, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def asked(question: str, answer: str) -> list[dict[str, str]]:
    said = (("user", question), ("assistant", answer))
    return [{"role": role, "content": text} for role, text in said]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": asked("hello", "there")}, asked("hello", "there")),
        ({"messages": json.dumps(asked("hello", "there"))}, asked("hello", "there")),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
            asked("hi", "yes"),
        ),
        ({"instruction": "add", "input": "1", "output": "2"}, asked("add\n\n1", "2")),
        ({"instruction": "add", "input": "", "output": "2"}, asked("add", "2")),
        ({"prompt": "add", "completion": "2", "messages": None}, asked("add", "2")),
        ({"prompt": asked("a", "b")[:1], "completion": asked("a", "b")[1:]}, asked("a", "b")),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}, "b"]}]},
            [{"role": "assistant", "content": "ab"}],
        ),
    ],
)
def test_every_form_of_a_row_is_a_conversation(row: dict[str, Any], messages: list[Any]) -> None:
    assert conversation_of(row, "here") == {"messages": messages, "tools": None}


def test_tools_and_their_calls_stay(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    row = {"messages": [call, {"role": "tool", "content": "1"}], "tools": '[{"name": "add"}]'}
    found = conversation_of(row, "here")
    assert found["tools"] == [{"name": "add"}]
    assert found["messages"][0] == {**call, "content": ""}
    template = (
        "{{ tools[0].name }}:{% for m in messages %}{{ m.tool_calls or m.content }}{% endfor %}"
    )
    (answer,) = ChatTemplate(model_folder(tmp_path / "m", template)).render_many([found])
    assert answer["text"].startswith("add:[{") and answer["text"].endswith("}]1")
    assert answer["spans"] == [[len("add:"), len(answer["text"]) - 1]]
    template = "{{ messages | length }}" + template  # which every message changes
    (answer,) = ChatTemplate(model_folder(tmp_path / "n", template)).render_many([found])
    assert answer["error"].startswith("it renders message 1 in another way where others follow")


@pytest.mark.parametrize("template", [PREFIX, MARKED], ids=["prefix", "marked"])
def test_only_the_assistant_has_a_loss(tmp_path: Path, template: str) -> None:
    """The end of a turn is its own, by the prompt that asks for it or by the template's marks."""
    folder = model_folder(tmp_path / "model", template)
    rows = [
        {"messages": [*asked("hello there", "hello"), *asked("add 1", "there there")]},
        {"instruction": "add", "output": "1 1"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    words = ("--chat", "--tokenizer", folder, "--workers", 1)
    assert run("tokens", tmp_path / "a.jsonl", "-o", tmp_path / "d", *words) == 0
    corpus = open_corpus(tmp_path / "d", 11, verify=True)
    (shard,) = corpus.shards
    assert shard.mask is not None and shard.begins.tolist() == [0, 19]
    wanted = "00000 00 11 00000 00 111 0000 00 111".replace(" ", "")
    assert "".join(map(str, shard.mask.tolist())) == wanted
    assert corpus.num_rows(27) == 1 and corpus.num_rows(26) == 2 and corpus.end is None


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        ([{"messages": asked("a", "b")[:1]}], PREFIX, "line 1:\n  - the conversation has no mess"),
        ([{"text": "a"}], PREFIX, "line 1:\n  - it has no messages.* one of: text"),
        ([{"messages": "none"}], PREFIX, "line 1:\n  - messages is no list of messages"),
        ([{"messages": [{"content": "a"}]}], PREFIX, "line 1:\n  - a message has no role"),
        (
            [{"messages": asked("a", "b")}, {"messages": asked("a", "b")[1:]}],
            "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
            + PREFIX,
            "line 2:\n  - the chat template fails: TemplateError: user first",
        ),
        (
            [{"messages": asked("a", "b")}],
            "{{ nope.nope }}",
            "line 1:\n  - the chat template fails",
        ),
        ([{"messages": asked("a", "b")}], "{{ messages[0].content }}", "no token of it is the ass"),
    ],
)
def test_rows_that_cannot_be_used_are_named(
    tmp_path: Path,
    rows: list[Any],
    template: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = model_folder(tmp_path / "model", template)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--chat", "--tokenizer", folder)
    assert run("tokens", tmp_path / "a.jsonl", "-o", tmp_path / "d", *words) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "model"]


def test_a_template_needs_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert run("tokens", tmp_path / "a.jsonl", "-o", tmp_path / "d", "--chat") == 2
    assert "give the folder of a chat model, with --tokenizer DIR" in capsys.readouterr().err
    file = model_folder(tmp_path / "model", PREFIX) / "tokenizer.json"
    words = ("--chat", "--tokenizer", file)
    assert run("tokens", tmp_path / "a.jsonl", "-o", tmp_path / "d", *words) == 2
    assert f"--tokenizer {file} is no folder: give the folder" in capsys.readouterr().err


@pytest.mark.parametrize("turns", [3, [*asked("a", "b"), "c"], ["c"]], ids=str)
def test_a_column_without_messages_is_refused(turns: Any) -> None:
    with pytest.raises(BadFile, match="turns is no list of messages"):
        conversation_of({"turns": turns}, "here", "turns")
