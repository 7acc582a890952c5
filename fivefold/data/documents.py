"""Documents to tokens: bytes (one token each), or tokens of a `tokenizer.json`.

A token that ends each document may follow its text. `BlockEncoder` is what a worker runs: it takes
a block of rows and returns the tokens of those that stay, with the reason of every other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fivefold.core import BadFile, FivefoldError
from fivefold.core.model import (
    BYTES,
    END_TOKENS,
    NUM_BYTES,
    TOKENIZER,
    TOKENIZER_FILES,
    fingerprint,
)
from fivefold.data.rows import byte_tokens
from fivefold.data.shards import DTYPES, TokenFormat
from fivefold.data.sources import RowBlock, bad_text, line_row

if TYPE_CHECKING:
    from tokenizers import Tokenizer


NO_END = "none"  # no token after a document
DIGEST = 16  # bytes, of a text: two that differ never have the same
KEPT, BLANK, EMPTY, SHORT, LONG = range(5)  # what becomes of a row


class Document(NamedTuple):
    """Bytes of a text, with its file and line."""

    text: bytes
    where: str


class Encoder(Protocol):
    """Encodes documents to tokens."""

    @property
    def meaning(self) -> TokenFormat: ...

    @property
    def files(self) -> dict[str, bytes]:
        """Files of the tokenizer, which are copied beside the tokens."""
        ...

    def encode(self, documents: Sequence[Document]) -> list[NDArray[Any]]:
        """Encode each document, with an end token; empty texts give none."""
        ...


@dataclass(frozen=True)
class ByteEncoder:
    """Encodes each byte as one token."""

    end: int | None
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])

    @property
    def meaning(self) -> TokenFormat:
        return TokenFormat("uint16", BYTES, BYTES, self.end)

    def encode(self, documents: Sequence[Document]) -> list[NDArray[Any]]:
        """Encode any bytes."""
        return [
            byte_tokens(document.text, self.end if document.text else None)
            for document in documents
        ]


@dataclass(frozen=True)
class TextEncoder:
    """Encodes with a tokenizer of the `tokenizers` library."""

    tokenizer: Tokenizer
    meaning: TokenFormat
    files: dict[str, bytes]

    def encode(self, documents: Sequence[Document]) -> list[NDArray[Any]]:
        """Encode UTF-8; refuses other bytes."""
        texts = [_decoded(document) for document in documents]
        try:
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            where = f"{documents[0].where} to {documents[-1].where}"
            raise BadFile(where, [f"{self.meaning.tokenizer} cannot encode it: {error}"]) from error
        end = [] if self.meaning.end is None else [self.meaning.end]
        dtype = DTYPES[self.meaning.dtype]
        return [
            np.array(encoding.ids + end if encoding.ids else [], dtype) for encoding in encodings
        ]


def _decoded(document: Document) -> str:
    try:
        return document.text.decode()
    except UnicodeDecodeError as error:
        raise bad_text(document.where, error) from error


def make_chat_encoder(tokenizer: str, end: str | None) -> TextEncoder:
    """Create the encoder of a model folder; in conversations, special tokens are plain text."""
    if tokenizer == BYTES or not Path(tokenizer).is_dir():
        raise FivefoldError(
            f"--chat needs the chat template beside the tokenizer, and --tokenizer {tokenizer} is "
            "no folder: give the folder of a chat model, with --tokenizer DIR"
        )
    encoder = _text_encoder(Path(tokenizer), end or NO_END)  # a template ends its turns itself
    encoder.tokenizer.encode_special_tokens = False
    return encoder


def make_encoder(tokenizer: str, end: str | None) -> ByteEncoder | TextEncoder:
    """Create an encoder: `tokenizer` is bytes, or the path of a tokenizer.json or its folder; `end`
    is a token's text, or none."""
    if tokenizer != BYTES:
        return _text_encoder(Path(tokenizer), end)
    if end not in (None, NO_END):
        raise FivefoldError(
            f"--end {end}: documents of bytes end with token {NUM_BYTES}; leave --end out, or give "
            f"--end {NO_END}"
        )
    return ByteEncoder(NUM_BYTES if end is None else None)


def _text_encoder(source: Path, end: str | None) -> TextEncoder:
    path = source / TOKENIZER if source.is_dir() else source
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadFile(str(path), [f"{error.strerror}; give a tokenizer.json, or bytes"]) from error
    tokenizer = read_tokenizer(data, path)
    tokenizer.encode_special_tokens = True  # in a document, their text is plain text
    largest = max(tokenizer.get_vocab().values(), default=0)
    dtype = "uint16" if largest < 1 << 16 else "uint32"
    token = _end_token(tokenizer, path, end)
    files = {TOKENIZER: data}
    if source.is_dir():
        beside = {name: source / name for name in TOKENIZER_FILES}
        files |= {
            name: file_path.read_bytes()
            for name, file_path in beside.items()
            if file_path.is_file()
        }
    meaning = TokenFormat(dtype, path.name, fingerprint(data), token)
    return TextEncoder(tokenizer, meaning, files)


def read_tokenizer(data: bytes, path: Path) -> Tokenizer:
    """Load a tokenizer, without truncation and padding."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise FivefoldError(
            f"{path} needs the tokenizers library: pip install 'fivefold[tokens]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        rule = f"the tokenizers library cannot read it: {error}; give a tokenizer.json"
        raise BadFile(str(path), [rule]) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _end_token(tokenizer: Tokenizer, path: Path, end: str | None) -> int | None:
    if end == NO_END:
        return None
    candidates = (tokenizer.token_to_id(name) for name in (END_TOKENS if end is None else (end,)))
    token = next((candidate for candidate in candidates if candidate is not None), None)
    if token is None:
        rule = f"it has no token {end!r}" if end else f"it has none of {', '.join(END_TOKENS)}"
        remedy = f"name the token that ends a document by --end, or give --end {NO_END}"
        raise BadFile(str(path), [f"{rule}; {remedy}"])
    return token


@dataclass(frozen=True)
class LengthFilter:
    """Limits of a document's characters, and of its tokens with the end token."""

    min_chars: int = 0
    max_chars: int | None = None
    min_tokens: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        pairs = ((self.min_chars, self.max_chars), (self.min_tokens, self.max_tokens))
        for word, (low, high) in zip(("chars", "tokens"), pairs, strict=True):
            if low < 0 or (high is not None and high < max(1, low)):
                raise FivefoldError(
                    f"--min-{word} {low} and --max-{word} {high}: no document has such a length; "
                    "give numbers in rising order"
                )

    def of_text(self, text: bytes) -> int:
        """Verdict on a text."""
        if not self.min_chars and self.max_chars is None:
            return KEPT
        size = len(text.decode("utf-8", "replace"))
        return _judged(size, self.min_chars, self.max_chars)

    def of_tokens(self, size: int) -> int:
        """Verdict on a number of tokens."""
        return _judged(size, self.min_tokens, self.max_tokens)


def _judged(size: int, low: int, high: int | None) -> int:
    if size < low:
        return SHORT
    return LONG if high is not None and size > high else KEPT


class EncodedBlock(NamedTuple):
    """Verdicts on the rows of a block, and the joined tokens of those that stay."""

    block: RowBlock  # without its rows
    fates: NDArray[np.uint8]  # one a row
    lengths: NDArray[np.int64]  # one a document that was kept
    sizes: NDArray[np.int64]  # bytes of their texts
    tokens: NDArray[Any]
    digests: NDArray[np.void]  # one a document that was kept; none if not asked for
    masks: NDArray[np.uint8] | None = None  # of conversations: 1 for each token with a loss


@dataclass(frozen=True)
class BlockEncoder:
    """Encodes the texts of a block: a field of JSON objects, a column of a table, or a file."""

    encoder: Encoder
    column: str = "text"
    keep: LengthFilter = LengthFilter()
    digests: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def meaning(self) -> TokenFormat:
        return self.encoder.meaning

    @property
    def files(self) -> dict[str, bytes]:
        return self.encoder.files

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that the tokens depend on, besides their format."""
        return {"column": self.column, "keep": asdict(self.keep)}

    def __call__(self, block: RowBlock) -> EncodedBlock:
        fates = np.full(block.num_rows, KEPT, np.uint8)
        documents: list[Document] = []
        for row, text in enumerate(self._texts(block)):
            fates[row] = BLANK if text is None else self.keep.of_text(text)
            if text is not None and not text:
                fates[row] = EMPTY
            if fates[row] == KEPT and text is not None:
                documents.append(Document(text, block.where(row)))
        arrays = self.encoder.encode(documents) if documents else []
        rows = np.flatnonzero(fates == KEPT)
        for row, array in zip(rows, arrays, strict=True):
            fates[row] = self.keep.of_tokens(len(array)) if len(array) else EMPTY
        return encoded(block, fates, documents, arrays, rows, self.encoder.meaning, self.digests)

    def _texts(self, block: RowBlock) -> list[bytes | None]:
        """The text of each row; None for a blank line."""
        if isinstance(block.rows, list):
            take = self._field if block.unit == "element" else self._value
            return [take(row, block.where(at)) for at, row in enumerate(block.rows)]
        if block.unit == "file":
            return [block.rows]
        texts: list[bytes | None] = []
        for row, line in enumerate(lines_of(block.rows)):
            where = block.where(row)
            texts.append(self._field(line_row(line, where), where) if line.strip() else None)
        return texts

    def _value(self, value: Any, where: str) -> bytes:
        if value is None:
            return b""
        if isinstance(value, str | bytes):
            return value.encode() if isinstance(value, str) else value
        kind = type(value).__name__
        rule = f"column {self.column!r} has a {kind} and no text; name the column with the text"
        raise BadFile(where, [f"{rule} by --column"])

    def _field(self, row: dict[str, Any], where: str) -> bytes:
        text, field = row.get(self.column), self.column
        if not isinstance(text, str):
            cause = f"field {field!r} is not a string" if field in row else f"no field {field!r}"
            remedy = f"name the field with the text by --column, one of: {', '.join(row) or 'none'}"
            raise BadFile(where, [f"{cause}; {remedy}"])
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            rule = f"half of a surrogate pair: {error}; correct that text"
            raise BadFile(where, [rule]) from error


def lines_of(data: bytes) -> list[bytes]:
    """Split a block into lines."""
    lines = data.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def encoded(
    block: RowBlock,
    fates: NDArray[np.uint8],
    documents: Sequence[Document],
    arrays: Sequence[NDArray[Any]],
    rows: NDArray[np.int64],
    meaning: TokenFormat,
    digests: bool,
) -> EncodedBlock:
    """Join the arrays whose rows are kept."""
    stays = [row for row, at in enumerate(rows) if fates[at] == KEPT]
    document_tokens = [arrays[row] for row in stays]
    digest_bytes = b"".join(_digest(documents[row].text) for row in stays) if digests else b""
    tokens = (
        np.concatenate(document_tokens) if document_tokens else np.empty(0, DTYPES[meaning.dtype])
    )
    return EncodedBlock(
        block._replace(rows=b""),
        fates,
        np.array([len(array) for array in document_tokens], np.int64),
        np.array([len(documents[row].text) for row in stays], np.int64),
        tokens,
        np.frombuffer(digest_bytes, np.dtype((np.void, DIGEST))),
    )


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=DIGEST).digest()
