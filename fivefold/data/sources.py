"""Input files as blocks of rows: text, JSON, JSONL, parquet and Arrow, compressed or not.

What a file is, is decided by its first bytes and by its ending. A block is about a megabyte, so
that memory does not grow with a file; only a text file, which is one document, is read in full.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

from fivefold.core import BadFile, FivefoldError
from fivefold.data import table_files
from fivefold.data.table_files import TABLES

# The rows of a `.json` file: one array of objects, read a megabyte at a time.
#
# An element is decoded once all of it is there, so that memory is that of a block and of the
# largest element, however long the array is. An element that is broken is told from one that goes
# on in the next block by the place of the decoder's error, so that a broken one is not followed to
# the end.

_SPACES, _BOM = re.compile(r"[ \t\r\n]*"), "\ufeff"
_ARRAY = re.compile(rb"\s*\[\s*\{")
_LINE = 1 << 24  # bytes, of the longest first line that says that lines are objects
_NEAR = 16  # characters that a literal or an escape may need to its end
_SCAN = json.JSONDecoder().raw_decode
_KINDS = {'"': "a text", "[": "a list", "n": "null", "t": "true", "f": "false"}
_CORRECT = "copy the file again, or correct it there"


def json_kind(stream: IO[bytes]) -> Literal["array", "lines"] | None:
    """Kind of a JSON stream: an array of objects, or an object a line; None if neither."""
    head = stream.read(1 << 13).removeprefix(codecs.BOM_UTF8)
    if _ARRAY.match(head):
        return "array"
    if not head.lstrip().startswith(b"{"):
        return None
    first, *tail = (head + stream.readline(_LINE)).lstrip().split(b"\n", 1)
    next_text = (tail[0] if tail else b"").lstrip() or stream.read(1 << 13).lstrip()
    try:
        is_object = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return None
    return "lines" if is_object and next_text.startswith(b"{") else None


def read_elements(stream: IO[bytes], path: str, size: int) -> Iterator[list[dict[str, Any]]]:
    """Read the objects of an array in lists, each of about `size` bytes."""
    array = _Array(stream, path, size)
    array.begin()
    while not array.done:
        yield array.elements()


class _Array:
    """Incremental reader of an array; the text from `at` on is not decoded yet."""

    def __init__(self, stream: IO[bytes], path: str, size: int) -> None:
        self.stream, self.path, self.size = stream, path, size
        self.text, self.at, self.number = "", 0, 0  # of elements that are decoded
        self.undecoded, self.offset = b"", 0  # bytes of half a character, and where they are
        self.num_reads, self.ended, self.done = 0, False, False

    @property
    def where(self) -> str:
        """The element that is next, in words."""
        return f"{self.path}, element {self.number + 1}"

    def begin(self) -> None:
        """Go past the bracket that opens the array."""
        if self.peek() == _BOM:
            self.at += 1
        if self.peek() != "[":
            rule = "it does not begin with an array; give an array of objects"
            raise BadFile(self.path, [f"{rule}, or name it .jsonl if it has an object a line"])
        self.at += 1
        if self.peek() == "]":
            self.finish()

    def elements(self) -> list[dict[str, Any]]:
        """The next objects, until more of the file was read; one at least."""
        objects: list[dict[str, Any]] = []
        begun = self.num_reads
        while not self.done and (not objects or self.num_reads == begun):
            objects.append(self.element())
            self.number += 1
            mark = self.peek()
            if mark == "]":
                self.finish()
            elif mark == ",":
                self.at += 1
            else:
                rule = "no comma and no ]" if mark else "no end of the array"
                raise BadFile(self.path, [f"{rule} after element {self.number}; {_CORRECT}"])
        return objects

    def element(self) -> dict[str, Any]:
        """Decode the next one; read on until all of it is there."""
        self.require_object(self.peek())
        while True:
            try:
                value, self.at = _SCAN(self.text, self.at)
                return value
            except json.JSONDecodeError as error:
                is_open = error.msg.startswith("Unterminated string")
                is_broken = not is_open and len(self.text) - error.pos > _NEAR
                if self.ended or is_broken:
                    raise self.broken(error) from error
            except (ValueError, RecursionError) as error:
                rule = f"not valid JSON: {error}; correct that element"
                raise BadFile(self.where, [rule]) from error
            self.read_on()

    def require_object(self, mark: str) -> None:
        """Refuse anything but an object, by its first character."""
        if mark == "{":
            return
        if not mark:
            raise BadFile(self.where, [f"the file ends before it; {_CORRECT}"])
        if mark == "]":
            raise BadFile(self.where, ["a comma and no element after it; take the comma out"])
        kind = "a number" if mark in "-0123456789" else _KINDS.get(mark)
        description = f"is {kind}" if kind else f"begins with {mark!r}"
        rule = f"expected an object with named fields, and it {description}"
        raise BadFile(self.where, [f"{rule}; correct that element"])

    def broken(self, error: json.JSONDecodeError) -> BadFile:
        """The error of an element, with the place in it."""
        if error.pos >= len(self.text.rstrip()) or error.msg.startswith("Unterminated"):
            return BadFile(self.where, [f"the file ends within it; {_CORRECT}"])
        rule = f"not valid JSON: {error.msg} at character {error.pos - self.at + 1:,} of it"
        return BadFile(self.where, [f"{rule}; correct that element"])

    def finish(self) -> None:
        """Go past the bracket that closes the array, after which nothing may follow."""
        self.at += 1
        if self.peek():
            rule = f"more follows the end of the array, after element {self.number}"
            raise BadFile(self.path, [f"{rule}; join both into one array, or take it out"])
        self.done = True

    def peek(self) -> str:
        """The next character that is no space; none at the end of the file."""
        while True:
            self.at = _SPACES.match(self.text, self.at).end()  # pyright: ignore
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.read_on()

    def read_on(self) -> None:
        """Read on, as much as waits already, so that a long element is decoded a few times only."""
        waits = self.text[self.at :]
        data = self.stream.read(max(self.size, len(waits)))
        self.num_reads, self.ended = self.num_reads + 1, not data
        data = self.undecoded + data
        try:
            text, used = codecs.utf_8_decode(data, "strict", self.ended)
        except UnicodeDecodeError as error:
            rule = f"not UTF-8: {error.reason} at byte {self.offset + error.start:,} of the file"
            raise BadFile(self.where, [f"{rule}; convert it to UTF-8"]) from error
        self.undecoded, self.offset = data[used:], self.offset + used
        self.text, self.at = waits + text, 0


FileKind = Literal["text", "lines", "array", "parquet", "arrow", "stream"]
Unit = Literal["line", "element", "row", "file"]
_JSON = ".json"
_JSONL: dict[str, FileKind] = {".jsonl": "lines", ".ndjson": "lines"}
_HEAD, BLOCK = 8192, 1 << 20  # bytes
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_ENDINGS = {".gz": _GZIP, ".zst": _ZSTD}
_BINARY = (b"%PDF-", b"BZh", b"PK\x03\x04", b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"\xfd7zXZ")
_CONTROL = bytes(code for code in range(32) if code not in b"\b\t\n\f\r\x1b")
_MOST_CONTROL = 0.1  # of the first bytes of a text
_SPLITS, _STATE = "dataset_dict.json", "state.json"  # of a folder that `datasets` saved
_CARD = "README.md"


class InputFile(NamedTuple):
    """An input file and its format."""

    path: Path
    kind: FileKind
    packed: bytes = b""  # the first bytes of its compression


@dataclass(frozen=True)
class Sources:
    """Input files in order, and names of those left out, by reason."""

    files: tuple[InputFile, ...]
    skipped: dict[str, list[str]] = field(default_factory=dict[str, list[str]])

    @property
    def num_bytes(self) -> int:
        return sum(file.path.stat().st_size for file in self.files)


class RowBlock(NamedTuple):
    """Consecutive rows of a file: the bytes of lines or of a text, rows of a table, or objects."""

    file: int  # its number among the files
    path: str
    first: int  # the number of the first row, from 0
    num_rows: int
    rows: bytes | list[Any]
    unit: Unit  # what a row is: a line of JSON, an element of an array, of a table, or the file
    num_bytes: int  # on disk

    def where(self, row: int) -> str:
        """Format the position of a row of this block."""
        if self.unit == "file":
            return self.path
        return f"{self.path}, {self.unit} {self.first + row + 1}"


def find_sources(inputs: Sequence[Path]) -> Sources:
    """Find the files of the inputs; those of a folder by name, without hidden ones.

    A binary file is left out of a folder, and refused where it is named. What describes a dataset
    is left out too: the files beside its tables that `datasets` saved, and its card.
    """
    input_files: list[InputFile] = []
    skipped: dict[str, list[str]] = {}
    for path in inputs:
        if not path.is_dir():
            input_files.append(_named(path))
            continue
        inside = [(file, _kind(file)) for file in _inside(path)]
        tables = [file for file, source in inside if source is not None and source.kind in TABLES]
        for file, input_file in inside:
            if input_file is None:
                skipped.setdefault("binary file", []).append(str(file))
            elif input_file.kind not in TABLES and _describes(file, tables):
                skipped.setdefault("description of a dataset", []).append(str(file))
            else:
                input_files.append(input_file)
    if not input_files:
        num_skipped = sum(map(len, skipped.values()))
        left = f", and {num_skipped:,} left out" if num_skipped else ""
        raise FivefoldError(
            f"no files in {', '.join(map(str, inputs))} with text{left}: give text, JSON, JSONL, "
            "parquet or Arrow files, or folders of them"
        )
    return Sources(tuple(input_files), skipped)


def _describes(file: Path, tables: list[Path]) -> bool:
    """Whether a file says what is in tables of its folder."""
    if (file.parent / _STATE).is_file() and any(table.parent == file.parent for table in tables):
        return True
    if file.name != _CARD or not any(file.parent in table.parents for table in tables):
        return False
    with file.open("rb") as stream:
        return stream.readline().strip() == b"---"


def _named(path: Path) -> InputFile:
    if not path.exists():
        raise BadFile(str(path), ["there is no such file or folder; check the path"])
    input_file = _kind(path)
    if input_file is None:
        rule = "it is binary, and no text, JSON, JSONL, parquet or Arrow file"
        raise BadFile(str(path), [f"{rule}; leave it out, or convert it to UTF-8 text"])
    if input_file.kind == "text" and _plain(path).suffix == _JSON:
        rule = "its JSON has no rows: it is neither an array of objects nor an object a line"
        remedy = "give one of these, or name it .txt to take it as one text"
        raise BadFile(str(path), [f"{rule}; {remedy}"])
    return input_file


def _plain(path: Path) -> Path:
    """The path without the ending of its compression."""
    return path.with_suffix("") if path.suffix in _ENDINGS else path


def _inside(folder: Path) -> list[Path]:
    """The files of a folder, sorted; of a dataset that `datasets` saved, its tables."""
    if (folder / _SPLITS).is_file():
        names = sorted(state_file.parent.name for state_file in folder.glob(f"*/{_STATE}"))
        example = names[0] if names else "train"
        rule = f"it is a dataset with the splits {', '.join(names) or 'that are missing'}"
        raise BadFile(str(folder), [f"{rule}; give the folder of one, such as {folder / example}"])
    files: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(root) / name for name in names if not name.startswith(".")]
    if missing := sorted(str(path) for path in files if not path.exists()):
        raise BadFile(missing[0], ["there is no such file or folder; check the path"])
    return sorted(files, key=lambda file: file.parts)


def _kind(path: Path) -> InputFile | None:
    """What a file is; None if it is binary and nothing that is known."""
    ending, packed = _plain(path).suffix, _ENDINGS.get(path.suffix, b"")
    try:
        if not path.is_file():  # a pipe can be read only once
            return InputFile(
                path, "array" if path.suffix == _JSON else _JSONL.get(path.suffix, "text")
            )
        with path.open("rb") as raw:
            head = raw.read(_HEAD)
    except OSError as error:
        raise BadFile(str(path), [f"{error.strerror or error}; check the path"]) from error
    packed = packed or next((magic for magic in _ENDINGS.values() if head.startswith(magic)), b"")
    if packed:
        with _opened(InputFile(path, "text", packed)) as (stream, _):
            head = stream.read(_HEAD)
    if (kind := table_files.kind_of(head)) is not None:
        if packed:
            rule = f"it is a compressed {kind} file; decompress it, or read it as it was saved"
            raise BadFile(str(path), [rule])
        return InputFile(path, kind)
    if head.startswith(_BINARY) or b"\0" in head or _is_garbled(head):
        return None
    kind = _JSONL.get(ending, "text")
    if ending == _JSON:
        with _opened(InputFile(path, "text", packed)) as (stream, _):
            kind = json_kind(stream) or "text"
    return InputFile(path, kind, packed)


def _is_garbled(head: bytes) -> bool:
    """Whether these are hardly characters of a text."""
    return len(head) - len(head.translate(None, _CONTROL)) > _MOST_CONTROL * len(head)


@contextmanager
def _opened(source: InputFile) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The text of a file as a stream, and the file itself."""
    word = "zstd" if source.packed == _ZSTD else "gzip"
    errors: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    try:
        with source.path.open("rb") as raw:
            stream: Any = raw
            if source.packed == _GZIP:
                stream = gzip.GzipFile(fileobj=raw)
            elif source.packed == _ZSTD:
                library = table_files.imported("zstandard", source.path)
                errors = (*errors, library.ZstdError)
                stream = io.BufferedReader(_ZstdFrames(raw, library), BLOCK)
            yield cast("IO[bytes]", stream), raw
    except errors as error:
        rule = f"not a complete {word} file: {error}; copy it again"
        raise BadFile(str(source.path), [rule]) from error
    except OSError as error:
        reason = f"{error.strerror or error}; check the path"
        raise BadFile(str(source.path), [reason]) from error


class _ZstdFrames(io.RawIOBase):
    """Decompressor of zstd frames. The library's own stream does not notice a truncated frame."""

    def __init__(self, raw: IO[bytes], library: Any) -> None:
        self.raw, self.library = raw, library
        self.frame: Any = None  # the one that is being read
        self.text = self.unused = b""  # what is decompressed, and what follows the last frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.text:
            data = self.unused or self.raw.read(1 << 16)
            self.unused = b""
            if not data:
                if self.frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self.frame = self.frame or self.library.ZstdDecompressor().decompressobj()
            self.text = self.frame.decompress(data)
            if self.frame.eof:
                self.unused, self.frame = self.frame.unused_data, None
        size = min(len(buffer), len(self.text))
        buffer[:size], self.text = self.text[:size], self.text[size:]
        return size


def read_blocks(
    sources: Sources, columns: Sequence[str], begin: tuple[int, int] = (0, 0)
) -> Iterator[RowBlock]:
    """Read rows of all files from a position on: the number of a file, and a row of it.

    Rows of a table have these columns; of one column, they are its values.
    """
    for number, source in enumerate(sources.files[begin[0] :], begin[0]):
        skip = begin[1] if number == begin[0] else 0
        if source.kind in TABLES:
            path, at = source.path, 0
            for rows, num_bytes in table_files.read_rows(path, source.kind, columns):
                if at + len(rows) > skip:
                    cut = max(0, skip - at)
                    tail = rows[cut:]
                    yield RowBlock(number, str(path), at + cut, len(tail), tail, "row", num_bytes)
                at += len(rows)
        else:
            yield from _text_blocks(number, source, skip)


def _text_blocks(number: int, source: InputFile, skip: int) -> Iterator[RowBlock]:
    path, last_position = str(source.path), 0
    with _opened(source) as (stream, raw):
        if source.kind == "text":
            if not skip:
                data = stream.read()
                yield RowBlock(number, path, 0, 1, data, "file", _position(raw))
            return
        at = 0
        if source.kind == "array":
            for rows in read_elements(stream, path, BLOCK):
                if elements := rows[max(0, skip - at) :]:
                    first, position = at + len(rows) - len(elements), _position(raw)
                    size = position - last_position
                    yield RowBlock(number, path, first, len(elements), elements, "element", size)
                    last_position = position
                at += len(rows)
            return
        while data := stream.read(BLOCK) + stream.readline():
            num_lines = data.count(b"\n") + (not data.endswith(b"\n"))
            position = _position(raw)
            if at + num_lines > skip:
                cut = max(0, skip - at)
                text = data.split(b"\n", cut)[-1] if cut else data
                size = num_lines - cut
                yield RowBlock(number, path, at + cut, size, text, "line", position - last_position)
                last_position = position
            at += num_lines


def _position(raw: IO[bytes]) -> int:
    """How many bytes of a file were read; a pipe does not say."""
    return raw.tell() if raw.seekable() else 0


def line_row(line: bytes, where: str) -> dict[str, Any]:
    """Parse the object of a JSON line."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise bad_text(where, error) from error
    except (ValueError, RecursionError) as error:
        raise BadFile(where, [f"not valid JSON: {error}; correct that line"]) from error
    if not isinstance(row, dict):
        raise BadFile(where, ["expected an object with named fields; correct that line"])
    return row


def bad_text(where: str, error: UnicodeDecodeError) -> BadFile:
    """Error about bytes that are not UTF-8."""
    rule = f"not UTF-8: {error.reason} at byte {error.start:,}"
    return BadFile(where, [f"{rule}; convert it to UTF-8, or take it as bytes: --tokenizer bytes"])
