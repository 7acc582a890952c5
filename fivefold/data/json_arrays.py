"""The rows of a `.json` file: one array of objects, read a megabyte at a time.

An element is decoded once all of it is there, so that memory is that of a block and of the largest
element, however long the array is. An element that is broken is told from one that goes on in the
next block by the place of the decoder's error, so that a broken one is not followed to the end.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any, Literal

from fivefold.core import BadFile

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
