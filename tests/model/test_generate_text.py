"""Text and tokens as they come, chat templates in their process, and files of prompts."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.core.model import NUM_BYTES
from fivefold.generate.chat import ChatTemplate
from fivefold.generate.prompts import finished_ids, read_prompts
from fivefold.generate.text import (
    ByteCodec,
    LibraryCodec,
    QuotingCodec,
    TextStream,
    end_tokens,
    stops_of,
)


def streamed(text: bytes, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(ByteCodec(), stops)
    given: list[str] = []
    for token in text:
        given.append(stream.push(token))
        if stream.stopped:
            break
    return [*given, stream.finish()], stream


def test_a_character_is_given_out_whole() -> None:
    given, stream = streamed("aé€".encode())
    assert given == ["a", "", "é", "", "", "€", ""]
    assert stream.text == "aé€"


def test_half_of_a_character_comes_at_the_end() -> None:
    given, stream = streamed("a€".encode()[:-1])
    assert "".join(given) == stream.text == "a\ufffd"


def test_a_stop_text_is_never_given_out() -> None:
    given, stream = streamed(b"one\nEN two\nEND three", ("\nEND",))
    assert "".join(given) == stream.text == "one\nEN two"
    assert stream.stopped
    assert given[3:7] == ["", "", "", "\nEN "], "held back until it was none"


def test_the_first_of_several_stop_texts_counts() -> None:
    _, stream = streamed(b"abcd", ("cd", "bc"))
    assert stream.text == "a" and stream.stopped


def test_special_tokens_of_bytes_have_no_text() -> None:
    """A padded vocabulary has more of them than the end of a text."""
    assert ByteCodec().decode([104, NUM_BYTES, 105, NUM_BYTES + 1]) == "hi"


def test_what_may_be_a_stop_text_comes_at_the_end() -> None:
    given, stream = streamed(b"ab", ("bc",))
    assert given == ["a", "", "b"] and not stream.stopped


def with_special_tokens(*names: str) -> LibraryCodec:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", "a", "b", "c"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>", *names])
    return LibraryCodec(tokenizer)


def test_a_special_token_stops_by_its_number() -> None:
    codec = with_special_tokens()
    assert stops_of(codec, ["<|end|>", "x"]) == (("x",), frozenset({4}))
    assert codec.encode("a <|end|> c", special=True) == (1, 4, 3)
    assert codec.decode([1, 4, 3]) == "a c"


def test_an_unknown_stop_is_refused() -> None:
    with pytest.raises(FivefoldError, match=r"<\|ends\|> is no special token.*<\|end\|>"):
        stops_of(with_special_tokens(), ["<|ends|>"])
    with pytest.raises(FivefoldError, match="has no special tokens"):
        stops_of(ByteCodec(), ["<|end|>"])
    with pytest.raises(FivefoldError, match="--stop is empty"):
        stops_of(ByteCodec(), [""])


def test_end_tokens_are_those_of_both_configs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    codec = with_special_tokens()
    assert end_tokens(tmp_path, codec) == {7, 8, 9}
    nested = {"text_config": {"eos_token_id": 2}, "eos_token_id": True}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert end_tokens(tmp_path, codec) == {2, 8, 9}
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    assert end_tokens(tmp_path, codec) == {2, 4, 8, 9}, "and that of the tokenizer"
    assert end_tokens(tmp_path, ByteCodec()) == {256}


def test_the_end_token_of_a_tokenizer_alone(tmp_path: Path) -> None:
    codec = with_special_tokens("</s>")
    assert end_tokens(tmp_path, codec) == {5}, "by its usual name"
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}')
    assert end_tokens(tmp_path, codec) == {4}
    other = tmp_path / "other"
    other.mkdir()
    assert end_tokens(other, codec, tmp_path) == {4}, "of --tokenizer FILE"
    assert end_tokens(other, with_special_tokens()) == set()


def test_special_tokens_of_a_quoted_text_are_text() -> None:
    codec = with_special_tokens("<|end|>x")
    quoting = QuotingCodec(codec)
    quoted = quoting.quoted("b <|end|> c <|end|>x")
    assert quoting.encode(f"a <|end|> {quoted} <|end|>", special=False) == (1, 4, 2, 0, 3, 0, 4)
    assert quoting.encode("a <|end|>", special=False) == codec.encode("a <|end|>", special=False)
    assert quoting.quoted(quoted) == quoted and quoting.quoted("a b") == "a b"


CHATML = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def template(folder: Path, source: str) -> ChatTemplate:
    table = {"chat_template": source, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    return ChatTemplate(folder)


def test_messages_become_a_prompt(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "é"}, {"role": "user", "content": "hi"}]
    found = template(tmp_path, CHATML).render(messages)
    assert found == "<s><|system|>é\n<|user|>hi\n<|assistant|>"


def test_a_prompt_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = (
        "{%- for m in messages %}\n    {%- if m.role == 'tool' %}{% continue %}{% endif %}\n"
        "{{- m | tojson }} {{ loop.index0 }}{{ eos_token }}\n{%- endfor %}\n  {% if true %}x\n"
        "  {% endif %}\n{{ bos_token }}"
    )
    codec = with_special_tokens()
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=codec.tokenizer, bos_token="<s>", eos_token="</s>"
    )
    roles = ("user", "tool", "assistant")
    messages = [{"role": each, "content": f'"{each}" <é>'} for each in roles]
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert template(tmp_path, source).render(messages) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "SecurityError"),
        ("{% for x in messages %}", "TemplateSyntaxError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'x' * 5000000 }}", "more than 4,194,304 characters"),
        ("{{ 'x' * 5000000000 }}", "needs more than 1024 MiB"),
    ],
)
def test_a_bad_template_is_refused(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(BadFile, match=message):
        template(tmp_path, source).render([{"role": "user", "content": "hi"}])


def test_a_template_that_loops_is_ended(tmp_path: Path) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(FivefoldError, match=r"ran for more than 2 s: it may loop"):
        template(tmp_path, loops).render([{"role": "user", "content": "hi"}], seconds=2)


def test_a_folder_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="has no chat template"):
        ChatTemplate(tmp_path)


def test_every_bad_line_of_prompts_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        '{"prompt": "a"}',
        "[]",
        '{"prompt": "a", "messages": []}',
        '{"id": "1", "prompt": "b"}',
        '{"messages": [{"role": "pirate", "content": "b"}]}',
        '{"prompt": ',
    ]
    file.write_text("\n".join(lines))
    with pytest.raises(BadFile) as caught:
        read_prompts(file)
    assert [each.split(":")[0] for each in caught.value.problems] == [
        f"line {n}" for n in (2, 3, 4, 5, 6)
    ]


def test_completions_that_are_there_are_known_and_a_torn_line_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    whole = '{"id": "0", "prompt": "a", "text": "b"}\n'
    file.write_text(whole + '{"id": "1", "pro')
    assert finished_ids(file, {"0": "a", "1": "c"}) == {"0"}
    assert file.read_text() == whole
    with pytest.raises(BadFile, match="of another prompt for id '0'"):
        finished_ids(file, {"0": "z"})


def test_special_tokens_of_a_message_begin_no_turn(tmp_path: Path) -> None:
    pytest.importorskip("h11")
    from fivefold.serve.prompting import PromptReader
    from fivefold.serve.schema import parse_asked

    template(tmp_path, "{% for m in messages %}{{ m.content | trim }} <|end|> {% endfor %}a")
    content = "b <|end|> c"

    async def tokens(*bodies: tuple[dict[str, object], bool]) -> list[list[tuple[int, ...]]]:
        reader = PromptReader(with_special_tokens(), tmp_path)
        asked = [parse_asked(json.dumps(body).encode(), chat) for body, chat in bodies]
        try:
            return [await reader.tokens(each, longest=64) for each in asked]
        finally:
            await reader.close()

    messages = [{"role": "user", "content": content}]
    found = asyncio.run(
        tokens(
            ({"messages": messages}, True),
            ({"messages": messages, "parse_special": True}, True),
            ({"prompt": content}, False),
            ({"prompt": content, "parse_special": False}, False),
        )
    )
    assert found == [[(2, 0, 3, 4, 1)], [(2, 4, 3, 4, 1)], [(2, 4, 3)], [(2, 0, 3)]]


def test_tokens_of_bytes_are_decoded_as_the_library_does() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: number for number, character in enumerate(alphabet)}
    pairs = [("Ġ", "a"), ("ð", "Ł"), ("â", "Ĥ")]  # the last two are halves of characters
    vocab |= {"".join(pair): 256 + number for number, pair in enumerate(pairs)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_tokens(["<tool call>", "naïve"])
    tokenizer.add_special_tokens(["<|end|>"])
    codec, draw = LibraryCodec(tokenizer), random.Random(0)
    assert codec.token_bytes is not None and with_special_tokens().token_bytes is None
    text = "aé€ 😀 <tool call> naïve<|end|> \ufffd"
    for trial in range(200):
        tokens = list(codec.encode(text, special=False))
        if trial:
            tokens = draw.choices(range(tokenizer.get_vocab_size() + 2), k=20)  # any bytes
        stream = TextStream(codec, ("never",) * (trial % 2))
        parts = [stream.push(token) for token in tokens]
        assert "".join(parts) + stream.finish() == codec.decode(tokens) == stream.text
        assert stream.num_chars == len(stream.text)
