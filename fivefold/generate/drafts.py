"""Drafts: tokens that are likely to come are proposed, and several are verified in one step.

A step computes a sequence's last token and its proposals as if all of them were known. From the
logits of every one of these places the next token is drawn as it would be without drafts: by the
request's sampling, its seed and the index of the token. While a draw is what was proposed, the one
after it is valid as well, and the first that differs is the token that follows. So drafts change no
token, greedy or sampled, where the logits are the same; and a proposed token is accepted as often
as the model draws it.

Keys and values of refused proposals stay in the blocks of the sequence until the tokens that come
in their places overwrite them: nobody reads them before.

Proposals by n-grams, here, are a function of a sequence's tokens alone: all ranks have the same.
Those of a model's own layers for multi-token prediction are in `mtp_drafts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from fivefold.core import FivefoldError
from fivefold.core.layout import Layout
from fivefold.core.model import BLOCK, Shape
from fivefold.generate.requests import SequenceState

NGRAM, MTP = "ngram", "mtp"
_GRAM = 2  # tokens that have to be equal for a proposal
_MOST_COMPARED = 8  # earlier places, of which that with the longest equal text before it counts
_LONGEST_COMPARED = 16  # tokens of it


class Drafter(Protocol):
    """What proposes the next tokens of sequences."""

    def propose(self, sequence: SequenceState, most: int) -> Sequence[int]:
        """Up to `most` tokens that are likely to follow."""
        ...


@dataclass(frozen=True)
class DraftOptions:
    """How many tokens are proposed in a step, and by what."""

    count: int
    kind: str = NGRAM

    @classmethod
    def parse(cls, text: str) -> DraftOptions:
        """Parse `ngram:K` or `mtp:K`.

        >>> DraftOptions.parse("ngram:4"), str(DraftOptions.parse("mtp:1"))
        (DraftOptions(count=4, kind='ngram'), 'mtp:1')
        """
        kind, _, number = text.partition(":")
        rule = f"drafts = {text!r}"
        if kind not in (NGRAM, MTP) or not (number.isascii() and number.isdecimal()):
            advice = f"give {NGRAM}:K, which proposes K tokens of equal text before, or {MTP}:K"
            advice = f"{advice}, by K layers of the model for multi-token prediction"
            raise FivefoldError(f"{rule} is no kind of drafts with a number: {advice}")
        if not 1 <= int(number) <= BLOCK:
            raise FivefoldError(f"{rule}: give 1 to {BLOCK} tokens, which a block of keys has")
        return cls(int(number), kind)

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}"

    def drafter(self) -> Drafter | None:
        """What proposes, unless the model does."""
        return NgramDrafter(self.count) if self.kind == NGRAM else None

    def require_heads(self, shape: Shape, layout: Layout) -> int:
        """Layers of multi-token prediction that propose; refuses a model or layout that has not as
        many on the ranks that draw."""
        if self.kind != MTP:
            return 0
        rule, other = f"drafts = {str(self)!r}", f"{NGRAM}:{self.count}"
        if self.count > shape.mtp:
            has = f"{shape.name} has {shape.mtp or 'no'} multi-token-prediction layers"
            fewer = f"{MTP}:{shape.mtp} or {other}" if shape.mtp else other
            raise FivefoldError(f"{rule}: {has}, and every draft needs its own: give {fewer}")
        if layout.pp > 1 or layout.cp > 1:
            raise FivefoldError(
                f"{rule} in layout {layout}: these layers read the embedding and the hidden states "
                f"of all tokens, which ranks of pp and cp do not have: use tp, dp or ep, or {other}"
            )
        return self.count


@dataclass
class _GramIndex:
    """The places of all pairs of tokens in a sequence, the last one first. A pair is one number:
    of many small tuples, the garbage collector would stop steps."""

    last: dict[int, int] = field(default_factory=dict[int, int])
    before: list[int] = field(default_factory=list[int])  # of a place, the one before; -1: none

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the tokens that are new. The last pair is left: nothing follows it yet."""
        for stop in range(len(self.before) + _GRAM, len(tokens)):
            pair = _pair(tokens[stop - 2], tokens[stop - 1])
            self.before.append(self.last.get(pair, -1))
            self.last[pair] = stop

    def best(self, tokens: Sequence[int]) -> int | None:
        """The place after the longest text that equals the last tokens, the last of equals."""
        stop, best, longest = self.last.get(_pair(tokens[-2], tokens[-1]), -1), None, 0
        for _ in range(_MOST_COMPARED):
            if stop < 0 or longest == _LONGEST_COMPARED:
                break
            length = _same_before(tokens, stop)
            if length > longest:
                best, longest = stop, length
            stop = self.before[stop - _GRAM]
        return best


class NgramDrafter:
    """Proposes what followed the last tokens where they were before, in prompt or completion."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._indices: WeakKeyDictionary[SequenceState, _GramIndex] = WeakKeyDictionary()

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        """The continuation of the place with the longest equal text before it, the last of equals.
        A text that repeats itself goes on with itself."""
        tokens, count = sequence.tokens, min(most, self.count)
        if len(tokens) <= _GRAM or count < 1:
            return []
        index = self._indices.setdefault(sequence, _GramIndex())
        index.extend(tokens)
        start = index.best(tokens)
        if start is None:
            return []
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(count)]


def _pair(first: int, second: int) -> int:
    return first << 32 | second


def _same_before(tokens: Sequence[int], stop: int) -> int:
    """How many tokens before a place equal the last ones."""
    count, most = _GRAM, min(stop, _LONGEST_COMPARED)
    while count < most and tokens[stop - 1 - count] == tokens[-1 - count]:
        count += 1
    return count
