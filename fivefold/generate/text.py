"""Text and tokens: what a prompt is in tokens, and what tokens are in text as they come.

A `TextStream` gives out text only when later tokens cannot change it: not half of a character, and
not what may be the beginning of a stop text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from fivefold.core.errors import BadFile, FivefoldError, did_you_mean

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_BYTES = 256
_HALF = "\ufffd"  # what a part of a character decodes to


class Codec(Protocol):
    """Turns text into tokens, and tokens into text."""

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """The tokens of a prompt; `special`: with those that the tokenizer puts around a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        ...

    def named(self) -> dict[str, int]:
        """Special tokens by their text."""
        ...


class ByteCodec:
    """One token for each byte, as models are trained that have no tokenizer."""

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(text.encode("utf-8", "surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < NUM_BYTES).decode("utf-8", "replace")

    def named(self) -> dict[str, int]:
        return {}


class LibraryCodec:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def named(self) -> dict[str, int]:
        table = self.tokenizer.get_added_tokens_decoder()
        return {each.content: number for number, each in table.items() if each.special}


def read_tokenizer(path: Path) -> LibraryCodec:
    """The tokenizer of a `tokenizer.json`."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise FivefoldError(
            f"{path} needs the tokenizers library: pip install 'fivefold[tokens]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise BadFile(str(path), [f"{error.strerror}; give a tokenizer.json"]) from error
    except Exception as error:  # the library raises nothing narrower
        rule = f"the tokenizers library cannot read it: {error}; give a tokenizer.json"
        raise BadFile(str(path), [rule]) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LibraryCodec(tokenizer)


def end_tokens(folder: Path) -> frozenset[int]:
    """The tokens that end a text, by the configs of a Hugging Face folder."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        given = read_table(folder / name).get("eos_token_id")
        listed = cast("list[Any]", given) if isinstance(given, list) else [given]
        found |= {each for each in listed if isinstance(each, int) and not isinstance(each, bool)}
    return frozenset(found)


def read_table(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadFile(str(path), [f"not valid JSON: {error}; download it again"]) from error
    if not isinstance(table, dict):
        raise BadFile(str(path), ["must hold one JSON object; download it again"])
    return cast("dict[str, Any]", table)


def stops_of(codec: Codec, given: Iterable[str]) -> tuple[tuple[str, ...], frozenset[int]]:
    """Stop texts, and the tokens of those that are special tokens, which no text shows."""
    texts: list[str] = []
    tokens: set[int] = set()
    known = codec.named()
    for text in given:
        if not text:
            raise FivefoldError("--stop is empty: give the text that ends a completion")
        if text in known:
            tokens.add(known[text])
        elif text.startswith("<|") and text.endswith("|>"):
            near = did_you_mean(text, known) if known else "it has no special tokens; give a text"
            raise FivefoldError(f"--stop {text} is no special token of this tokenizer: {near}")
        else:
            texts.append(text)
    return tuple(texts), frozenset(tokens)


class TextStream:
    """The text of one completion, token by token."""

    def __init__(self, codec: Codec, stops: Sequence[str] = ()) -> None:
        self.codec, self.stops = codec, tuple(stops)
        self.text = ""  # all that is decided, without the stop text
        self.stopped = False
        self._tokens: list[int] = []
        self._start = self._read = 0  # tokens from `_start` are decoded together, as words need
        self._given = 0  # characters that were given out

    def push(self, token: int) -> str:
        """Take a token; returns the text that is certain now."""
        self._tokens.append(token)
        before = self.codec.decode(self._tokens[self._start : self._read])
        now = self.codec.decode(self._tokens[self._start :])
        if len(now) > len(before) and not now.endswith(_HALF):
            self._start, self._read = self._read, len(self._tokens)
            self._add(now[len(before) :])
        return self._give(len(self.text) - self._held())

    def finish(self) -> str:
        """The rest, when no token follows."""
        if not self.stopped:
            before = self.codec.decode(self._tokens[self._start : self._read])
            self._add(self.codec.decode(self._tokens[self._start :])[len(before) :])
            self._start = self._read = len(self._tokens)
        return self._give(len(self.text))

    def _add(self, new: str) -> None:
        longest = max(map(len, self.stops), default=0)
        begin = max(0, len(self.text) - longest + 1)
        self.text += new
        found = [at for at in (self.text.find(each, begin) for each in self.stops) if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _held(self) -> int:
        """Characters at the end that may become a stop text."""
        if self.stopped:
            return 0
        lengths = (n for each in self.stops for n in range(len(each) - 1, 0, -1))
        ends = {each[:n] for each in self.stops for n in range(1, len(each))}
        return max((n for n in lengths if self.text[-n:] in ends), default=0)

    def _give(self, stop: int) -> str:
        given, self._given = self.text[self._given : stop], max(self._given, stop)
        return given
