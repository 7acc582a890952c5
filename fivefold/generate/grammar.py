"""Grammars: the tokens with which a completion stays JSON of a schema.

llguidance, an extra, compiles a schema for the bytes of a tokenizer, and has a bit for every token
that may be next. Only the rank that draws follows a grammar: what it draws tells the others all.

The end of a text is a token of ours there, which no model has. Where it may be next, the stop
tokens of the request may be; if it is the only one and there is no stop token, the sequence ends
without a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, cast

from fivefold.core import FivefoldError
from fivefold.core.model import NUM_BYTES
from fivefold.generate.requests import Reason, Request
from fivefold.generate.text import ByteCodec, Codec, LibraryCodec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_SCHEMA_BYTES = 1 << 15  # whose compilation stops an engine for a tenth of a second
GRAMMAR_FAILED = (
    "the grammar of this request has no next token, or takes more than its limits: "
    "give a simpler schema"
)
_INSTALL = "a schema needs the llguidance library, install fivefold[grammar]"
_MOST_COMPILED = 64
_MOST_LEXER_STATES = 50_000  # of one grammar, each up to 2 kB
_END = "<|end of the grammar|>"
# Endless blanks would be valid JSON as well, and models of little training write them.
_BLANKS = r"( |\n {0,32})?"
_ADVICE = {  # by what is in a message of the library
    "oneOf": "write anyOf, or leave oneOf out",
    "Unimplemented keys": "leave them out, and check the answer for them",
    "registry": "put what $ref names into $defs of the schema",
    "regex": "write the pattern without look-around and references",
}


class _Follower:
    """The state of a grammar after some tokens of a sequence."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher, self.consumed = matcher, 0

    def bits_after(self, tokens: Sequence[int]) -> int:
        """Bits of the tokens that may follow; 0 if the grammar does not take these or is too
        large."""
        self.matcher.consume_tokens(list(tokens[self.consumed :]))
        self.consumed = len(tokens)
        bits = 0 if self.matcher.is_error() else _bits(self.matcher)
        return 0 if self.matcher.is_error() else bits


def _bits(matcher: LLMatcher) -> int:
    return int.from_bytes(matcher.compute_bitmask(), "little")


class Grammars:
    """Grammars for one tokenizer, compiled once, and the sequences that follow them."""

    def __init__(self, codec: Codec, vocab: int) -> None:
        """`vocab` is that of the model: tokens that one of both lacks are never allowed."""
        self.codec, self.vocab = codec, vocab
        self._compiled = lru_cache(_MOST_COMPILED)(self._compile)
        self._followers: dict[str, _Follower] = {}

    def load(self) -> None:
        """Read the tokenizer now, if the library is there: it takes a second."""
        with contextlib.suppress(FivefoldError):
            _ = self._tokenizer

    def check(self, schema: str) -> None:
        """Compile a JSON schema; raises why that cannot be."""
        self._compiled(schema)

    def next_tokens(
        self, request: Request, drawn: Sequence[int]
    ) -> tuple[bytes | None, Reason | None]:
        """A bit for every token that may follow those drawn, or else why the sequence ends."""
        try:
            if request.id not in self._followers:
                matcher = self._compiled(request.grammar).deep_copy()
                self._followers[request.id] = _Follower(matcher)
            bits = self._followers[request.id].bits_after(drawn)
        except Exception:  # of a library: the other sequences go on
            return None, "error"
        may_end, allowed = bits & self._end_bit, bits & self._text_bits
        stops = sum(1 << token for token in request.stop_tokens if 0 <= token < self.vocab)
        if len(drawn) < request.min_tokens:
            # Unless the grammar needs one of them: it goes before `min_tokens`.
            allowed = allowed & ~stops if may_end or allowed & ~stops else allowed
        elif may_end:
            allowed |= stops
        if allowed:
            return allowed.to_bytes(-(-self.vocab // 8), "little"), None
        return None, "stop" if may_end else "error"

    def forget(self, id: str) -> None:
        """Drop the state of a sequence that has ended."""
        self._followers.pop(id, None)

    @cached_property
    def _end_bit(self) -> int:
        return 1 << self._tokenizer.eos_token

    @cached_property
    def _text_bits(self) -> int:
        return ((1 << self.vocab) - 1) & ~self._end_bit

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The bytes of every token, and the end of a grammar."""
        library = _library()
        if isinstance(self.codec, ByteCodec):
            return library.LLTokenizer(library.TokenizerWrapper(_ByteTokens()))
        rule = f"JSON cannot be assured with a {type(self.codec).__name__}"
        if isinstance(self.codec, LibraryCodec):
            tokenizer = cast(
                "Any", type(self.codec.tokenizer).from_str(self.codec.tokenizer.to_str())
            )
            tokenizer.add_special_tokens([_END])
            end: int = tokenizer.token_to_id(_END)
            try:
                return library.LLTokenizer(tokenizer.to_str(), n_vocab=end + 1, eos_token=end)
            except ValueError as error:
                rule = f"the bytes of this model's tokens are not known ({error})"
        raise FivefoldError(f"{rule}: leave it out, and ask for JSON in the prompt")

    def _compile(self, schema: str) -> LLMatcher:
        library, tokenizer = _library(), self._tokenizer
        if (size := len(schema.encode())) > MOST_SCHEMA_BYTES:
            rule = f"a schema of {size:,} bytes is more than {MOST_SCHEMA_BYTES:,}"
            raise FivefoldError(f"{rule}: shorten it, with $ref to what is there twice")
        limits = library.LLParserLimits(max_lexer_states=_MOST_LEXER_STATES, verbose_errors=False)
        try:
            grammar = library.LLMatcher.grammar_from_json_schema(
                schema,
                overrides={"whitespace_pattern": _BLANKS, "lenient": False, "coerce_one_of": False},
            )
            matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            allowed = 0 if matcher.is_error() else _bits(matcher) & self._text_bits
            problem = matcher.get_error()
        except ValueError as error:
            problem, allowed = str(error), 0
            matcher = None
        if problem or matcher is None:
            usual = "give a schema that llguidance knows"
            advice = (text for part, text in _ADVICE.items() if part in problem)
            raise FivefoldError(f"no grammar: {_line(problem)}: {next(advice, usual)}")
        if not allowed:
            rule = "no token of this tokenizer begins such a text"
            raise FivefoldError(f"{rule}: leave it out, and ask for JSON in the prompt")
        return matcher


class _ByteTokens:
    """A tokenizer of bytes, with the names that the library reads."""

    eos_token_id, bos_token_id, special_token_ids = NUM_BYTES, None, (NUM_BYTES,)
    tokens = (*(bytes([byte]) for byte in range(NUM_BYTES)), _END.encode())

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _line(text: str) -> str:
    """A message as a line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise FivefoldError(f"{_INSTALL}: pip install 'fivefold[grammar]'") from error
    return llguidance
