"""Text to tokens: documents from text files, folders and JSONL, and their tokens.

Text becomes bytes (one token each) or tokens of a `tokenizer.json`. A token that ends each document
may follow its text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from fivefold.core.errors import BadFile, FivefoldError
from fivefold.data.rows import BYTES, NUM_BYTES, byte_tokens
from fivefold.data.shards import DTYPES, TokenFormat

if TYPE_CHECKING:
    from tokenizers import Tokenizer


NO_END = "none"  # no token after a document
_JSONL = (".jsonl", ".ndjson")
_MOST_BYTES, _MOST_DOCUMENTS = 4 << 20, 1024  # what the threads of a tokenizer share at a time
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")


class Document(NamedTuple):
    """The bytes of a text, and the file and line it is from."""

    text: bytes
    where: str


def list_files(inputs: Sequence[Path]) -> list[Path]:
    """The input files; those of a folder in the order of their names, without hidden ones."""
    files: list[Path] = []
    for path in inputs:
        files += sorted(_inside(path), key=lambda file: file.parts) if path.is_dir() else [path]
    if missing := [str(path) for path in files if not path.exists()]:
        raise BadFile(missing[0], ["there is no such file or folder; check the path"])
    if not files:
        raise FivefoldError(
            f"no files in {', '.join(map(str, inputs))}: give text files, JSONL files, or folders "
            "with such files"
        )
    return files


def _inside(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(root) / name for name in names if not name.startswith("."))


def read_documents(
    files: Sequence[Path], field: str, tick: Callable[[int], None]
) -> Iterator[Document]:
    """A text file is one document; in JSONL, the `field` of each line is. Both may be gzipped.

    `tick` is called with the number of bytes on disk that were read since its last call.
    """
    for path in files:
        plain = path.with_suffix("") if path.suffix == ".gz" else path
        ticked = 0
        try:
            with path.open("rb") as raw:
                stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if plain != path else raw
                for document in _parse(stream, path, plain.suffix in _JSONL, field):
                    yield document
                    position = raw.tell() if raw.seekable() else 0  # a pipe has none
                    tick(position - ticked)
                    ticked = position
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            rule = f"not a complete gzip file: {error}; copy it again"
            raise BadFile(str(path), [rule]) from error
        except OSError as error:
            raise BadFile(str(path), [f"{error.strerror or error}; check the path"]) from error


def _parse(stream: IO[bytes], path: Path, lines: bool, field: str) -> Iterator[Document]:
    if not lines:
        yield Document(stream.read(), str(path))
        return
    for number, line in enumerate(stream, 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield Document(_field(line, where, field), where)


def _field(line: bytes, where: str, field: str) -> bytes:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _bad_text(where, error) from error
    except (ValueError, RecursionError) as error:
        raise BadFile(where, [f"not valid JSON: {error}; correct that line"]) from error
    if not isinstance(row, dict):
        raise BadFile(where, [f"expected an object with the field {field!r}; correct that line"])
    text = row.get(field)
    if not isinstance(text, str):
        found = f"field {field!r} is not a string" if field in row else f"no field {field!r}"
        known = ", ".join(row) or "none"
        raise BadFile(where, [f"{found}; name the field with the text by --field, one of: {known}"])
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadFile(where, [f"half of a surrogate pair: {error}; correct that line"]) from error


def _bad_text(where: str, error: UnicodeDecodeError) -> BadFile:
    rule = f"not UTF-8: {error.reason} at byte {error.start:,}"
    return BadFile(where, [f"{rule}; convert it to UTF-8, or take it as bytes: --tokenizer bytes"])


class Encoder(Protocol):
    """Turns documents into tokens."""

    @property
    def meaning(self) -> TokenFormat: ...

    def encode(self, documents: Sequence[Document]) -> list[NDArray[Any]]:
        """The tokens of each document, with the token that ends it; none for an empty text."""


@dataclass(frozen=True)
class ByteEncoder:
    """One token for each byte."""

    end: int | None

    @property
    def meaning(self) -> TokenFormat:
        return TokenFormat("uint16", BYTES, end=self.end)

    def encode(self, documents: Sequence[Document]) -> list[NDArray[Any]]:
        """Takes any bytes."""
        return [byte_tokens(each.text, self.end if each.text else None) for each in documents]


@dataclass(frozen=True)
class TextEncoder:
    """Tokens of a tokenizer of the `tokenizers` library."""

    tokenizer: Tokenizer
    meaning: TokenFormat

    def encode(self, documents: Sequence[Document]) -> list[NDArray[Any]]:
        """Takes UTF-8 only."""
        texts = [_decoded(each) for each in documents]
        try:
            found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            where = f"{documents[0].where} to {documents[-1].where}"
            raise BadFile(where, [f"{self.meaning.tokenizer} cannot encode it: {error}"]) from error
        end = [] if self.meaning.end is None else [self.meaning.end]
        dtype = DTYPES[self.meaning.dtype]
        return [np.array(each.ids + end if each.ids else [], dtype) for each in found]


def _decoded(document: Document) -> str:
    try:
        return document.text.decode()
    except UnicodeDecodeError as error:
        raise _bad_text(document.where, error) from error


def make_encoder(tokenizer: str, end: str | None) -> Encoder:
    """`tokenizer` is bytes or the path of a tokenizer.json; `end` is a token's text, or none."""
    if tokenizer != BYTES:
        return _text_encoder(Path(tokenizer), end)
    if end not in (None, NO_END):
        raise FivefoldError(
            f"--end {end}: documents of bytes end with token {NUM_BYTES}; leave --end out, or give "
            f"--end {NO_END}"
        )
    return ByteEncoder(NUM_BYTES if end is None else None)


def _text_encoder(path: Path, end: str | None) -> TextEncoder:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise FivefoldError(
            "--tokenizer needs the tokenizers library: pip install 'fivefold[tokens]'"
        ) from error
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadFile(str(path), [f"{error.strerror}; give a tokenizer.json, or bytes"]) from error
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        rule = f"the tokenizers library cannot read it: {error}; give a tokenizer.json"
        raise BadFile(str(path), [rule]) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # in a document, their text is plain text
    largest = max(tokenizer.get_vocab().values(), default=0)
    dtype = "uint16" if largest < 1 << 16 else "uint32"
    checksum = hashlib.sha256(data).hexdigest()
    token = _end_token(tokenizer, path, end)
    return TextEncoder(tokenizer, TokenFormat(dtype, path.name, checksum, token))


def _end_token(tokenizer: Tokenizer, path: Path, end: str | None) -> int | None:
    if end == NO_END:
        return None
    found = (tokenizer.token_to_id(name) for name in (_ENDS if end is None else (end,)))
    token = next((each for each in found if each is not None), None)
    if token is None:
        rule = f"it has no token {end!r}" if end else f"it has none of {', '.join(_ENDS)}"
        way = f"name the token that ends a document by --end, or give --end {NO_END}"
        raise BadFile(str(path), [f"{rule}; {way}"])
    return token


class Tokenized:
    """Iterates over the tokens of documents, one array each, and counts empty documents."""

    def __init__(self, documents: Iterable[Document], encoder: Encoder) -> None:
        self.documents, self.encoder = documents, encoder
        self.num_empty = 0

    def __iter__(self) -> Iterator[NDArray[Any]]:
        num_full = 0
        for group in _groups(self.documents):
            arrays = self.encoder.encode(group)
            full = [array for array in arrays if len(array)]
            num_full += len(full)
            self.num_empty += len(arrays) - len(full)
            yield from full
        if not num_full:
            raise FivefoldError(
                f"no text in the input, only {self.num_empty:,} empty documents: give files with "
                "text"
            )


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= _MOST_BYTES or len(group) >= _MOST_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group
