"""Text and tokens: what a prompt is in tokens, and what tokens are in text as they come.

A `TextStream` gives out text only when later tokens cannot change it: not half of a character, and
not what may be the beginning of a stop text.
"""

from __future__ import annotations

import json
import secrets
from codecs import utf_8_decode
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from fivefold.core import BadFile, FivefoldError, did_you_mean
from fivefold.core.model import END_TOKENS, NUM_BYTES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LEAST_LONGEST = 64  # bytes
_HALF = "\ufffd"  # what a part of a character decodes to
_BYTES = defaultdict(bytes, {byte: bytes([byte]) for byte in range(NUM_BYTES)})


class Codec(Protocol):
    """Encoder and decoder of text."""

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Encode a prompt; `special` adds the tokens that the tokenizer puts around a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens, without special ones."""
        ...

    def named(self) -> dict[str, int]:
        """Special tokens by their text."""
        ...

    def longest_token(self) -> int:
        """Most bytes of text in one token."""
        ...


class ByteCodec:
    """One token per byte, for models trained without a tokenizer."""

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(text.encode("utf-8", "surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < NUM_BYTES).decode("utf-8", "replace")

    def named(self) -> dict[str, int]:
        return {}

    def longest_token(self) -> int:
        return 1


class LibraryCodec:
    """A tokenizer of the `tokenizers` library. `unlocked` encodes without the GIL, by threads of
    the library, which a process must not have before it forks."""

    def __init__(self, tokenizer: Tokenizer, *, unlocked: bool = False) -> None:
        self.tokenizer, self.unlocked = tokenizer, unlocked

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        if not self.unlocked:
            return tuple(self.tokenizer.encode(text, add_special_tokens=special).ids)
        (batch,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return tuple(batch.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def named(self) -> dict[str, int]:
        table = self.tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in table.items() if token.special}

    def longest_token(self) -> int:
        # A word without a token, or spaces that are left out, may be longer than any token.
        longest = max((len(token.encode()) for token in self.tokenizer.get_vocab()), default=0)
        return max(longest, _LEAST_LONGEST)

    @cached_property
    def token_bytes(self) -> Mapping[int, bytes] | None:
        """Bytes of every token, if the tokenizer is one of bytes."""
        is_byte_level = type(self.tokenizer.decoder).__name__ == "ByteLevel"
        return _TokenBytes(self) if is_byte_level else None


class QuotingCodec:
    """A tokenizer that encodes special tokens in quoted texts as plain text.

    A quoted text has a random name, of characters that no text has, in place of every special
    token: chat templates leave it. It is a token here, and becomes the tokens of the text.
    """

    def __init__(self, codec: LibraryCodec, *, unlocked: bool = False) -> None:
        from tokenizers import AddedToken, Tokenizer

        plain, quoting = (Tokenizer.from_str(codec.tokenizer.to_str()) for _ in range(2))
        plain.encode_special_tokens = True
        mark = "".join(chr(0xE000 + secrets.randbelow(0x1000)) for _ in range(8))
        longest_first = sorted(filter(None, codec.named()), key=len, reverse=True)
        self._quotes = {name: f"{mark}{chr(0xF0000 + i)}" for i, name in enumerate(longest_first)}
        added: list[Any] = [
            AddedToken(quote_text, normalized=False) for quote_text in self._quotes.values()
        ]
        cast("Any", quoting).add_special_tokens(added)
        self._texts = {
            quoting.token_to_id(quote): plain.encode(name, add_special_tokens=False).ids
            for name, quote in self._quotes.items()
        }
        self.plain = LibraryCodec(plain, unlocked=unlocked)  # of a text that is all a quote
        self._codec = LibraryCodec(quoting, unlocked=unlocked)

    def quoted(self, text: str) -> str:
        """Replace every special token in a text by a name."""
        for name, quote in self._quotes.items():
            text = text.replace(name, quote)
        return text

    def quoted_messages(self, messages: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Replace every special token in messages by a name."""
        return tuple(
            {
                key: self.quoted(text) if key != "role" and isinstance(text, str) else text
                for key, text in message.items()
            }
            for message in messages
        )

    def shown(self, text: str) -> str:
        """Replace names by special tokens, for display."""
        for name, quote in self._quotes.items():
            text = text.replace(quote, name)
        return text

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Encode a text with quoted parts."""
        tokens = self._codec.encode(text, special=special)
        return tuple(part for token in tokens for part in self._texts.get(token, (token,)))


def read_tokenizer(path: Path) -> LibraryCodec:
    """Load a `tokenizer.json`."""
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


def end_tokens(folder: Path, codec: Codec, tokenizer: Path | None = None) -> frozenset[int]:
    """Tokens that end a text: those in the configs of model and tokenizer, or else those with a
    usual name. `tokenizer`: its folder, if another."""
    if isinstance(codec, ByteCodec):
        return frozenset({NUM_BYTES})
    tokens: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        table = read_table(folder / name)
        nested = table.get("text_config")  # of a model that reads pictures too
        for config in (table, cast("dict[str, Any]", nested) if isinstance(nested, dict) else {}):
            end_value = config.get("eos_token_id")
            listed = cast("list[Any]", end_value) if isinstance(end_value, list) else [end_value]
            tokens |= {
                number
                for number in listed
                if isinstance(number, int) and not isinstance(number, bool)
            }
    known = codec.named()
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        text = token_text(read_table((tokenizer or folder) / name).get("eos_token"))
        tokens |= {known[text]} if text in known else set()
    return frozenset(tokens or [known[name] for name in END_TOKENS if name in known][:1])


def token_text(token: Any) -> Any:
    """Text of a special token, which may be a JSON object."""
    return cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token


def read_table(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is absent."""
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BadFile(str(path), [f"not valid JSON: {error}; download it again"]) from error
    if not isinstance(table, dict):
        raise BadFile(str(path), ["must hold one JSON object; download it again"])
    return cast("dict[str, Any]", table)


def stops_of(codec: Codec, stops: Iterable[str]) -> tuple[tuple[str, ...], frozenset[int]]:
    """Stop texts, and the special tokens among them, which no text shows."""
    texts: list[str] = []
    tokens: set[int] = set()
    known = codec.named()
    for text in stops:
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


class _TokenBytes(dict[int, bytes]):
    """Bytes of the tokens of a byte-level tokenizer, each computed when it first occurs."""

    def __init__(self, codec: LibraryCodec) -> None:
        super().__init__()
        self.tokenizer, self.special = codec.tokenizer, codec.named().keys()
        printable = (*range(33, 127), *range(161, 173), *range(174, 256))
        shifted = (byte for byte in range(NUM_BYTES) if byte not in printable)
        self.bytes = {chr(byte): byte for byte in printable}
        self.bytes |= {chr(NUM_BYTES + i): byte for i, byte in enumerate(shifted)}

    def __missing__(self, token: int) -> bytes:
        text = self.tokenizer.id_to_token(token)
        data = b""  # of a special token, or a row that pads the vocabulary
        if text is not None and text not in self.special:
            numbers = [self.bytes.get(character) for character in text]
            # As the library does it: an added token may have other characters.
            data = text.encode() if None in numbers else bytes(cast("list[int]", numbers))
        self[token] = data
        return data


def bytes_of_tokens(codec: Codec) -> Mapping[int, bytes] | None:
    """Bytes of every token, if a text is those of its tokens in a row; None if tokens depend on
    their neighbors, as words and their spaces do."""
    if type(codec) is ByteCodec:
        return _BYTES
    return codec.token_bytes if isinstance(codec, LibraryCodec) else None


class TextStream:
    """Incremental decoder of one completion."""

    def __init__(
        self,
        codec: Codec,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        context: Sequence[int] = (),
    ) -> None:
        """Stop texts count after `min_tokens`. `context`: tokens before the text, which is spaced
        as their continuation."""
        self.codec, self.stops = codec, tuple(stops)
        self.stopped = False
        # A context may end in the middle of a character, which only its own tokens can tell.
        self._bytes = None if context else bytes_of_tokens(codec)
        self._half = b""  # of a character
        self._tokens, self._num_ignored = list(context), min_tokens
        # Where bytes are not known, tokens from `_start` are decoded together, as words need.
        self._start, self._read = 0, len(context)
        self._num_tokens = 0
        self._parts: list[str] = []  # that were given out
        self._num_given = 0
        self._tail = ""  # that is decided, and not given out
        self._ends = {stop[:n] for stop in self.stops for n in range(1, len(stop))}
        self._longest = max(map(len, self._ends), default=0)

    @property
    def text(self) -> str:
        """All text that is decided, without the stop text."""
        return "".join(self._parts) + self._tail

    @property
    def num_chars(self) -> int:
        """Characters of `text`."""
        return self._num_given + len(self._tail)

    def push(self, token: int) -> str:
        """Add a token; returns text that later tokens cannot change."""
        self._num_tokens += 1
        if self._bytes is not None:
            data = self._half + self._bytes[token]
            new, num_read = utf_8_decode(data, "replace", False)
            self._half = data[num_read:]
            if not self.stops:  # most of what servers do for a token
                self._parts.append(new)
                self._num_given += len(new)
                return new
            self._add(new)
        else:
            self._tokens.append(token)
            before = self.codec.decode(self._tokens[self._start : self._read])
            text = self.codec.decode(self._tokens[self._start :])
            if len(text) > len(before) and not text.endswith(_HALF):
                self._start, self._read = self._read, len(self._tokens)
                self._add(text[len(before) :])
        return self._give(len(self._tail) - self._num_held())

    def finish(self) -> str:
        """Return the remaining text."""
        if not self.stopped:
            if self._bytes is not None:
                self._add(self._half.decode("utf-8", "replace"))
                self._half = b""
            else:
                before = self.codec.decode(self._tokens[self._start : self._read])
                self._add(self.codec.decode(self._tokens[self._start :])[len(before) :])
                self._start = self._read = len(self._tokens)
        return self._give(len(self._tail))

    def _add(self, new: str) -> None:
        before = len(self._tail)
        self._tail += new
        if self.stops and self._num_tokens > self._num_ignored:
            # A stop text cannot begin before the tail: what may begin one is in it.
            starts = [self._tail.find(end, max(0, before - len(end) + 1)) for end in self.stops]
            starts = [start for start in starts if start >= 0]
            if starts:
                self._tail, self.stopped = self._tail[: min(starts)], True

    def _num_held(self) -> int:
        """Characters at the end that may become a stop text."""
        if self.stopped or not self._longest:
            return 0
        lengths = range(min(self._longest, len(self._tail)), 0, -1)
        return next((n for n in lengths if self._tail[-n:] in self._ends), 0)

    def _give(self, count: int) -> str:
        text, self._tail = self._tail[:count], self._tail[count:]
        if text:
            self._parts.append(text)
            self._num_given += count
        return text
