"""A drafter that knows what comes, and is mostly right: much is accepted, and much refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from fivefold.generate.requests import SequenceState


@dataclass(frozen=True)
class Guesses:
    """Completions by request, of which some tokens are proposed wrongly. After a text, and for
    requests that it does not know, it proposes anything."""

    texts: Mapping[str, tuple[int, ...]]
    vocab: int
    right: float = 0.75
    least: int = 0
    most: int = 5

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        id, start = sequence.request.id, len(sequence.drawn)
        text, dice = self.texts.get(id, ()), random.Random(f"{id} at {start}")
        guesses: list[int] = []
        for index in range(start, start + min(dice.randint(self.least, self.most), most)):
            known = index < len(text) and dice.random() < self.right
            guesses.append(text[index] if known else dice.randrange(self.vocab))
        return guesses
