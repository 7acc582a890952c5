"""Folders of tokens: what goes in comes out, damage is named, and nothing is left half written."""

from __future__ import annotations

import errno
import gzip
import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from fivefold.cli import main
from fivefold.core.errors import BadFile, FivefoldError
from fivefold.data import tokenizing as shard_writer
from fivefold.data.documents import BlockEncoder, ByteEncoder, Document, Encoder, make_encoder
from fivefold.data.mixture import open_source
from fivefold.data.rows import Corpus, from_bytes, read_rows
from fivefold.data.shards import Index, open_corpus, read_index
from fivefold.data.sources import find_sources
from fivefold.data.tokenizing import (
    FolderJob,
    JoinedDocuments,
    Tokenized,
    TokenizeOptions,
    WrittenShards,
    tokenize,
    write_folder,
)

TEXTS = [b"first\n", b"", b"\xff\x00second", b"x" * 40, b"third " * 9]


def write(
    folder: Path, texts: list[bytes] = TEXTS, shard_tokens: int = 30, **options: Any
) -> Index:
    return write_texts(folder, ByteEncoder(256), texts, shard_tokens, **options)


def write_texts(
    folder: Path, encoder: Encoder, texts: list[bytes], shard_tokens: int, **options: Any
) -> Index:
    """Texts that are in no file, one block each."""

    def read(start: WrittenShards, seen: bytes) -> Generator[JoinedDocuments]:
        arrays = encoder.encode([Document(text, "here") for text in texts])
        for array, text in zip(arrays, texts, strict=True):
            if len(array):
                yield JoinedDocuments(array, np.array([len(array)]), np.array([len(text)]))

    job = FolderJob(folder, encoder.meaning, shard_tokens, encoder.files, **options)
    return write_folder(job, read)[0]


def tokenized(inputs: list[Path], folder: Path, tick: Callable[[float], None] = int) -> Tokenized:
    options = TokenizeOptions(100, workers=1)
    return tokenize(find_sources(inputs), folder, BlockEncoder(ByteEncoder(256)), options, tick)


def all_rows(corpus: Corpus, seq: int) -> list[list[list[int]]]:
    rows = read_rows([(corpus, row) for row in range(corpus.num_rows(seq))], seq)
    return [each.astype(int).tolist() for each in rows]


def run(*words: object) -> int | str | None:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return stop.value.code


def only_whole(folder: Path) -> list[str]:
    """What a folder of outputs holds; nothing hidden may be among it."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("shard_tokens", [1, 30, 10**6])
@pytest.mark.parametrize("seq", [1, 7, 100])
def test_shards_read_like_the_corpus_in_memory(tmp_path: Path, shard_tokens: int, seq: int) -> None:
    index = write(tmp_path / "d", shard_tokens=shard_tokens)
    assert len(index.shards) == {1: 4, 30: 2, 10**6: 1}[shard_tokens]
    memory, files = from_bytes("m", TEXTS, 257), open_corpus(tmp_path / "d", 257, verify=True)
    assert all_rows(files, seq) == all_rows(memory, seq)
    assert files.bytes_per_token == memory.bytes_per_token == 108 / 112
    assert str(files) == str(memory).replace("m:", f"{tmp_path / 'd'}:", 1)
    assert files.shards[0].tokens.base is not None  # mapped, not loaded
    assert isinstance(files.shards[0].tokens.base, np.memmap)


def test_the_index_says_what_is_there(tmp_path: Path) -> None:
    written = write(tmp_path / "d")
    index = read_index(tmp_path / "d")
    assert index == written and index.vocab == 257 and index.meaning.end == 256
    assert (index.num_tokens, index.num_documents) == (7 + 9 + 41 + 55, 4)
    assert index.num_bytes == 2 * 112 + 8 * 4
    names = {file.name for shard in index.shards for file in shard.files}
    assert names | {"index.json"} == set(only_whole(tmp_path / "d"))
    assert only_whole(tmp_path) == ["d"]


@pytest.mark.parametrize("counts", [[10], [2, 8], [5, 4, 1], [1] * 10], ids=str)
def test_shards_end_where_they_are_full_however_documents_come(
    tmp_path: Path, counts: list[int]
) -> None:
    """A run that goes on reads other blocks, and has to write the same files."""

    def read(start: WrittenShards, seen: bytes) -> Generator[JoinedDocuments]:
        for count in counts:
            tokens = np.zeros(10 * count, np.uint16)
            yield JoinedDocuments(tokens, np.full(count, 10), np.full(count, 9))

    index, _ = write_folder(FolderJob(tmp_path / "d", ByteEncoder(256).meaning, 30), read)
    assert [shard.num_tokens for shard in index.shards] == [30, 30, 30, 10]


def test_all_files_are_on_the_disk_before_a_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut finds a complete folder, or none."""
    synced: dict[int, int] = {}  # by inode, how large a file was
    sync, rename = os.fsync, Path.rename

    def noting(handle: int) -> None:
        sync(handle)
        state = os.fstat(handle)
        synced[state.st_ino] = state.st_size

    def checked(path: Path, target: Path) -> Path:
        published.extend(only_whole(path))
        for file in path.iterdir():
            assert synced.get(file.stat().st_ino) == file.stat().st_size, file.name
        assert path.stat().st_ino in synced, "and their names"
        synced.clear()
        return rename(path, target)

    published: list[str] = []
    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(Path, "rename", checked)
    encoder = ByteEncoder(256, {"tokenizer.json": b"{}"})
    write_texts(tmp_path / "d", encoder, TEXTS, 30)
    assert published == only_whole(tmp_path / "d") and len(published) == 2 * 2 + 2
    assert [*synced] == [tmp_path.stat().st_ino], "its own name, after the rename"


def test_damage_is_named(tmp_path: Path) -> None:
    write(tmp_path / "d")
    path = tmp_path / "d" / "00001.tokens"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    open_corpus(tmp_path / "d", 257)  # sizes are right
    with pytest.raises(BadFile, match=r"00001\.tokens is corrupted: its SHA-256 begins with"):
        open_corpus(tmp_path / "d", 257, verify=True)
    assert run("tokens", tmp_path / "d", "--check") == 2
    path.write_bytes(data[:-2])
    with pytest.raises(BadFile, match=r"00001\.tokens is truncated: 108 bytes instead of 110"):
        open_source(str(tmp_path / "d"), 257, 4, 0)
    path.unlink()
    with pytest.raises(BadFile, match=r"00001\.tokens: No such file"):
        open_corpus(tmp_path / "d", 257)


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "d")
    path = tmp_path / "d" / "index.json"
    table = json.loads(path.read_text())
    del table["sha256"]  # as folders of before
    shard = table["shards"][0]
    for change, message in (
        ({"version": 1}, "its version is 1, but this fivefold reads 2"),
        ({"shards": []}, "it has no shards"),
        ({"shards": [{**shard, "num_tokens": 1}]}, "the file sizes of shard 0 do not match"),
        ({"shards": [{**shard, "num_documents": 0}]}, "shard 0 should have documents"),
        ({"shards": [{**shard, "tokens": {**shard["tokens"], "name": "../x"}}]}, "files 00000"),
        ({"vocabulary": 3}, "unknown key 'vocabulary': did you mean vocab"),
    ):
        path.write_text(json.dumps({**table, **change}))
        with pytest.raises(BadFile, match=message):
            open_corpus(tmp_path / "d", 257)
    path.write_text("{")
    with pytest.raises(BadFile, match="not valid JSON"):
        open_corpus(tmp_path / "d", 257)
    path.unlink()
    with pytest.raises(FivefoldError, match=r"is not a folder of tokens: it has no index\.json"):
        open_corpus(tmp_path / "d", 257)


def test_an_index_that_was_changed_is_refused(tmp_path: Path) -> None:
    """A smaller vocabulary would train on tokens that the model does not know."""
    write(tmp_path / "d")
    path = tmp_path / "d" / "index.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps({**table, "vocab": 200}))
    with pytest.raises(BadFile, match=r"index\.json.*\s.*was changed after it was written"):
        open_corpus(tmp_path / "d", 200)
    del table["sha256"]  # as folders of before, or as whoever writes it anew
    path.write_text(json.dumps({**table, "vocab": 200}))
    with pytest.raises(BadFile, match=r"00000\.tokens has the token 256, and .* below 200"):
        open_corpus(tmp_path / "d", 200, verify=True)
    path.write_text(json.dumps(table))
    open_corpus(tmp_path / "d", 257, verify=True)


def test_what_the_model_cannot_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "d")
    message = "has tokens up to 256, but the model knows 256: use a vocabulary of at least 257"
    with pytest.raises(FivefoldError, match=message):
        open_source(str(tmp_path / "d"), 256, 4, 0)
    with pytest.raises(FivefoldError, match="is too short: a row takes 113 tokens; give a smaller"):
        open_source(str(tmp_path / "d"), 257, 112, 0)


def test_a_folder_that_exists_is_kept_or_refused(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    write(folder)
    before = {path: path.stat().st_ino for path in folder.iterdir()}
    write(folder)
    assert {path: path.stat().st_ino for path in folder.iterdir()} == before
    for texts in ([*TEXTS, b"more"], TEXTS[:3], [b"other", *TEXTS]):
        with pytest.raises(FivefoldError, match="exists with other tokens"):
            write(folder, texts)
    assert read_index(folder).num_documents == 4 and only_whole(tmp_path) == ["d"]
    write(folder, [b"other"], replace=True)
    assert read_index(folder).num_documents == 1 and only_whole(tmp_path) == ["d"]
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FivefoldError, match=r"has the file notes\.txt, which is not a token file"):
        write(folder, replace=True)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    open_corpus(tmp_path / "empty", 257, verify=True)


class FullDisk:
    """A file on a disk that has room for the first shard alone."""

    def __init__(self, stream: IO[bytes], written: list[int]) -> None:
        self.stream, self.written = stream, written

    def write(self, data: bytes) -> int:
        self.written.append(len(data))
        if sum(self.written) > 200:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created, written = shard_writer._ChecksummedFile.__init__, list[int]()

    def full(file: Any, path: Path) -> None:
        created(file, path)
        file.stream = FullDisk(file.stream, written)

    monkeypatch.setattr(shard_writer._ChecksummedFile, "__init__", full)
    message = r"cannot write .*00001\.tokens: No space left on device; no files remain"
    with pytest.raises(FivefoldError, match=message):
        write(tmp_path / "d")
    assert only_whole(tmp_path) == []


def test_a_failed_replacement_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "d")
    rename = Path.rename

    def failing(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(FivefoldError, match="Input/output error"):
        write(tmp_path / "d", [b"other"], replace=True)
    assert read_index(tmp_path / "d").num_documents == 4 and only_whole(tmp_path) == ["d"]


def make_inputs(folder: Path) -> None:
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("text of b")
    (folder / "sub" / "a.txt").write_text("text of a")
    (folder / ".hidden").write_text("no")
    (folder / ".git").mkdir()
    (folder / ".git" / "config.txt").write_text("no")
    lines = '{"text": "one"}\n\n{"id": 3, "text": "zwölf"}\n{"text": ""}\n'
    (folder / "c.jsonl").write_text(lines, encoding="utf-8")
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}', mtime=0))
    (folder / "e.txt.gz").write_bytes(gzip.compress(b"\xfepacked", mtime=0))


def test_files_folders_lines_and_gzip_are_read(tmp_path: Path) -> None:
    make_inputs(tmp_path / "in")
    told: list[float] = []
    inputs = [tmp_path / "in", tmp_path / "in" / "b.txt"]
    done = tokenized(inputs, tmp_path / "d", told.append)
    (shard,) = open_corpus(tmp_path / "d", 257).shards
    parts = np.split(shard.tokens, shard.begins[1:])
    assert [bytes(each[:-1].astype(np.uint8)) for each in parts] == [
        b"text of b",
        b"one",
        "zwölf".encode(),
        b"packed",
        b"\xfepacked",
        b"text of a",
        b"text of b",
    ]
    assert done.left_out == {"empty": 1}
    assert sum(told) == find_sources(inputs).num_bytes


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', "a.jsonl, line 2:\n  - not valid JSON"),
        ("a.jsonl", b'{"body": "x"}', "line 1:\n  - no field 'text'; .* --column, one of: body"),
        ("a.jsonl", b'{"text": 3}', "line 1:\n  - field 'text' is not a string"),
        ("a.jsonl", b"[1]", "line 1:\n  - expected an object with named fields"),
        ("a.jsonl", b'{"text": "\xff"}', "line 1:\n  - not UTF-8: invalid start byte at byte 10"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1:\n  - half of a surrogate pair"),
        ("a.jsonl", b"[" * 100_000, "line 1:\n  - not valid JSON"),
        ("a.txt.gz", b"plain", "a.txt.gz:\n  - not a complete gzip file"),
        (
            "a.txt.gz",
            gzip.compress(b"text" * 99, mtime=0)[:-9],
            "a.txt.gz:\n  - not a complete gzip file",
        ),
        ("a.txt", b"", "no text in the input, only 1 documents"),
    ],
)
def test_bad_input_is_named_by_file_and_line(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FivefoldError, match=message):
        tokenized([tmp_path / name], tmp_path / "d")
    assert only_whole(tmp_path) == [name]


def test_no_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FivefoldError, match="no files in"):
        find_sources([tmp_path])
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadFile, match="gone:\n  - there is no such file"):
        find_sources([tmp_path])


def tokenizer_json(
    folder: Path, special: tuple[str, ...] = ("<|endoftext|>",), num_more: int = 0
) -> Path:
    """A tokenizer of whole words, which would cut and pad if it were let."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3, "zwölf": 4}
    words |= {f"word{number}": 5 + number for number in range(num_more)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_tokenizer_makes_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tokenizer_json(tmp_path)
    lines = ["the cat sat", "", "zwölf", "the <|endoftext|> cat"]
    text = "".join(json.dumps({"body": line}) + "\n" for line in lines)
    (tmp_path / "t.jsonl").write_text(text)
    words = ("--field", "body", "--tokenizer", path, "--json")
    assert run("tokens", tmp_path / "t.jsonl", "-o", tmp_path / "d", *words) == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["documents"], table["empty"], table["vocab"], table["end"]) == (3, 1, 6, 5)
    corpus = open_corpus(tmp_path / "d", 6)
    found = corpus.shards[0].tokens.tolist()
    assert found[:6] == [1, 2, 3, 5, 4, 5]
    assert found[6] == 1 and found[-2:] == [2, 5] and 5 not in found[6:-1]  # a text ends nothing
    assert corpus.shards[0].begins.tolist() == [0, 4, 6]
    assert "by tokenizer.json, end-of-document token 5" in str(corpus)


def test_a_large_vocabulary_takes_wider_tokens(tmp_path: Path) -> None:
    encoder = make_encoder(str(tokenizer_json(tmp_path, num_more=1 << 16)), None)
    assert encoder.meaning.dtype == "uint32"
    write_texts(tmp_path / "d", encoder, [b"the cat"], 100)
    corpus = open_corpus(tmp_path / "d", 1 << 17)
    assert corpus.shards[0].tokens.tolist() == [1, 2, 65541]
    with pytest.raises(FivefoldError, match="has tokens up to 65,541, but the model knows 65,536"):
        open_corpus(tmp_path / "d", 1 << 16)


def test_tokenizers_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = str(tokenizer_json(tmp_path, special=()))
    for tokenizer, end, message in (
        (str(tmp_path / "nope.json"), None, "No such file or directory; give a tokenizer.json"),
        (__file__, None, "the tokenizers library cannot read it"),
        (path, None, "it has none of <|endoftext|>, .* or give --end none"),
        (path, "<end>", "it has no token '<end>'"),
        ("bytes", "<end>", "documents of bytes end with token 256"),
    ):
        with pytest.raises(FivefoldError, match=message.replace("|", r"\|")):
            make_encoder(tokenizer, end)
    assert make_encoder(path, "none").meaning.end is None
    assert make_encoder("bytes", "none").meaning.end is None
    encoder = make_encoder(path, "sat")
    with pytest.raises(BadFile, match=r"not UTF-8: .* or take it as bytes: --tokenizer bytes"):
        encoder.encode([Document(b"\xff", "a.txt")])


def test_two_tokenizers_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path / "bytes")
    encoder = make_encoder(str(tokenizer_json(tmp_path)), None)
    write_texts(tmp_path / "words", encoder, [b"the cat sat " * 9], 100)
    pair = f"{tmp_path}/bytes:1 {tmp_path}/words:1"
    with pytest.raises(FivefoldError, match="one token means two things: tokenize both with"):
        open_source(pair, 300, 4, 0)
    source = open_source(f"stdlib:.9 {tmp_path}/bytes:.1", 300, 4, 0)
    assert {source.source_row(sample)[0] for sample in range(20)} == {
        "Python's standard library",
        f"{tmp_path}/bytes",
    }


def test_the_verb_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_inputs(tmp_path / "in")
    folder = tmp_path / "d"
    assert run("tokens", tmp_path / "in", "-o", folder, "--end", "none", "--shard-tokens", 20) == 0
    assert capsys.readouterr().out == (
        f"{folder}: 40 tokens in 6 documents, 2 shards of uint16, 128 bytes; tokenizer bytes, "
        "no end-of-document token\nleft out 1 empty document\n"
        "the model's vocabulary must have 255 tokens at least\n"
    )
    assert run("tokens", folder, "--check") == 0
    assert capsys.readouterr().out.endswith("no end-of-document token, all checksums right\n")
    assert run("tokens", folder, "--check", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["checked"] is True
    for words, message in (
        (("tokens", folder), "give either -o DIR"),
        (("tokens", folder, "-o", folder, "--check"), "give either -o DIR"),
        (("tokens", tmp_path, "-o", "x", "--shard-tokens", "1.5"), "give a whole number of tokens"),
        (("tokens", tmp_path / "nope", "-o", "x"), "there is no such file or folder"),
        (("tokens", tmp_path / "nope", "--check"), "is not a folder of tokens"),
    ):
        assert run(*words) == 2
        assert message in capsys.readouterr().err
