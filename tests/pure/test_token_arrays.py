"""Files of one JSON array: read in blocks, as lines of JSON are, and what is refused."""

from __future__ import annotations

import gzip
import io
import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.cli import main
from fivefold.core.errors import BadFile
from fivefold.data.shards import open_corpus, read_index
from fivefold.data.sources import read_elements

ROWS = [{"text": 'ä "quoted" \\ ]}, \u2028'}, {"text": "𝄞", "n": [1.5, {"x": None}]}, {"text": ""}]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"


def run(*words: object) -> int | str | None:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return stop.value.code


def elements(data: bytes, size: int) -> list[dict[str, Any]]:
    return [one for some in read_elements(io.BytesIO(data), "a.json", size) for one in some]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_elements_do_not_depend_on_the_blocks(indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(ROWS, indent=indent, ensure_ascii=ascii_only)
    for size in range(1, len(text) + 2):
        assert elements(f" {text}\n".encode(), size) == ROWS
        assert elements(f"\ufeff{text}".encode(), size) == ROWS
    assert elements(b" [ ] ", 1) == []


def test_memory_does_not_grow_with_the_array() -> None:
    class Made(io.RawIOBase):
        """An array that is made while it is read, broken in its middle."""

        def __init__(self, num_blocks: int) -> None:
            some = [f"{json.dumps({'text': 'word ' * 200})},".encode() * 60] * num_blocks
            self.blocks: Iterator[bytes] = iter([b"[", *some, b'{"text": wrong},', *some])

        def read(self, size: int = -1) -> bytes:
            return next(self.blocks, b"")

    peaks: list[int] = []
    for num_blocks in (10, 200):
        tracemalloc.start()
        with pytest.raises(
            BadFile, match=f"a.json, element {60 * num_blocks + 1}:\n.*character 10"
        ):
            for some in read_elements(Made(num_blocks), "a.json", 1 << 16):  # pyright: ignore
                assert len(some) <= 61
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_an_array_is_read_as_lines_are(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    lines = "".join(f"{json.dumps(row)}\n" for row in ROWS)
    array = json.dumps(ROWS, indent=1).encode()
    inputs = {
        "a.jsonl": lines.encode(),
        "b.json": array,
        "c.json.gz": gzip.compress(array),
        "d.json.zst": zstandard.ZstdCompressor().compress(array),
        "e.json": lines.encode(),  # by its content
    }
    for name, data in inputs.items():
        (tmp_path / name).write_bytes(data)
        assert run("tokens", tmp_path / name, "-o", tmp_path / name[0]) == 0
        assert read_index(tmp_path / name[0]) == read_index(tmp_path / "a")
    (tmp_path / "code").mkdir()
    (tmp_path / "code/package.json").write_text('{\n "name": "a"\n}\n')  # in a folder, a text
    assert run("tokens", tmp_path / "code", "-o", tmp_path / "f") == 0
    assert read_index(tmp_path / "f").num_documents == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a"}, {"text": }]', "element 2:\n  - not valid JSON: .* at character 10 of it"),
        ('[{"text": "a"}, {"text": "b', "element 2:\n  - the file ends within it; copy the file"),
        ('[{"text": "a"}, {"text": "b"', "element 2:\n  - the file ends within it"),
        ('[{"text": "a"}, ', "element 2:\n  - the file ends before it"),
        ('[{"text": "a"}', "a.json:\n  - no end of the array after element 1"),
        ('[{"text": "a"} {"text": "b"}]', "a.json:\n  - no comma and no ] after element 1"),
        ('[{"text": "a"},]', "element 2:\n  - a comma and no element after it; take the comma"),
        ('[{"text": "a"}, ["b"]]', "element 2:\n  - expected an object .*, and it is a list"),
        ('[{"text": "a"}, -1]', "element 2:\n  - expected an object .*, and it is a number"),
        ('[{"text": "a"}, x]', "element 2:\n  - expected an object .*, and it begins with 'x'"),
        ('[{"text": "a"}] [{"text": "b"}]', "a.json:\n  - more follows the end of the array"),
        ('[{"text": "a"}, {"text": ["b"]}]', "element 2:\n  - field 'text' is not a string"),
        ('[{"text": "a"}, {"body": "b"}]', "element 2:\n  - no field 'text'; .* one of: body"),
        ('[{"text": "a"}, {"n": ' + "9" * 5000 + "}]", "element 2:\n  - not valid JSON: Exceeds"),
        ('[{"text": "a"}, {"n": ' + "[" * 10**5, "element 2:\n  - not valid JSON: .*recursion"),
        ('{\n  "text": "a"\n}\n', "a.json:\n  - its JSON has no rows: .* name it .txt"),
        ('{"data": [{"text": "a"}]}', "a.json:\n  - its JSON has no rows"),
        ('["a", "b"]', "a.json:\n  - its JSON has no rows"),
        ("[]", "a.json:\n  - its JSON has no rows"),
        ('{"text": "a"}\n{"text": }\n', "a.json, line 2:\n  - not valid JSON"),
    ],
)
def test_a_broken_array_names_its_element(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(text)
    assert run("tokens", tmp_path / "a.json", "-o", tmp_path / "d") == 2
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_bytes_that_are_no_text_are_placed_in_the_file() -> None:
    data = json.dumps(ROWS, ensure_ascii=False).encode() + b"\xff"
    for size in (3, len(data)):
        with pytest.raises(BadFile, match=f"not UTF-8: .* at byte {len(data) - 1} of the file"):
            elements(data, size)


def chat_folder(folder: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir()
    vocab = {word: at for at, word in enumerate(["[UNK]", "user", "assistant", "add", "1", "2"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def test_conversations_and_pairs_lie_in_arrays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = chat_folder(tmp_path / "model")
    said = [{"role": "user", "content": "add 1"}, {"role": "assistant", "content": "2"}]
    chat = [
        {"instruction": "add", "input": "1", "output": "2"},  # alpaca
        {"messages": said},
        {"prompt": "add 1", "completion": "2"},
        {"conversations": [{"from": "human", "value": "add 1"}, {"from": "gpt", "value": "2"}]},
    ]
    pairs = [{"prompt": "add 1", "chosen": "2", "rejected": "1"}]
    path = tmp_path / "a.json"
    for rows, option in ((chat, "--chat"), (pairs, "--pairs")):
        path.write_text(json.dumps(rows, indent=2))
        name = tmp_path / option
        assert run("tokens", path, option, "--tokenizer", model, "-o", name) == 0
        (shard,) = open_corpus(name, 6, verify=True).shards
        if option == "--chat":
            assert shard.tokens.tolist() == [1, 3, 4, 2, 5] * 4
            assert len(shard.begins) == 4
        else:
            assert shard.tokens.tolist() == [1, 3, 4, 2, 5, 1, 3, 4, 2, 4]
            assert np.array_equal(shard.begins, [0])
    for rows, message in (
        ([*chat, {"messages": [said]}], "a.json, element 5:\n  - messages is no list of messages"),
        (
            [chat[0], {"instruction": 1, "output": "2"}],
            "element 2:\n  - instruction and output must",
        ),
        ([chat[0], {"messages": said[:1]}], "element 2:\n  - the conversation has no message of"),
        ([chat[0], {"data": said}], "element 2:\n  - it has no messages, .* one of: data"),
    ):
        path.write_text(json.dumps(rows))
        words = ("tokens", path, "--chat", "--tokenizer", model, "-o", tmp_path / "x")
        capsys.readouterr()
        assert run(*words) == 2
        assert re.search(message, capsys.readouterr().err)
        assert not (tmp_path / "x").exists()
    (tmp_path / "in").mkdir()
    (tmp_path / "in/b.json").write_text('{"rows": []}')
    words = ("tokens", tmp_path / "in", "--chat", "--tokenizer", model, "-o", tmp_path / "x")
    assert run(*words) == 2
    assert "a .json file that is an array of objects" in capsys.readouterr().err


def test_a_pair_is_left_out_if_either_text_is_too_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = chat_folder(tmp_path / "model"), tmp_path / "a.json"
    answers = [("2", "1 1 1"), ("2", "1"), ("2 2 2", "1")]
    rows = [{"prompt": "add 1", "chosen": best, "rejected": other} for best, other in answers]
    path.write_text(json.dumps(rows))
    words = ("--pairs", "--tokenizer", model, "--max-tokens", 5, "--json")
    assert run("tokens", path, "-o", tmp_path / "d", *words) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["documents"] == 1 and table["left_out"] == {"long": 2}
    (shard,) = open_corpus(tmp_path / "d", 6, verify=True).shards
    assert shard.tokens.tolist() == [1, 3, 4, 2, 5, 1, 3, 4, 2, 4]
