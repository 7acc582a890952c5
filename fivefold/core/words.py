"""Numbers with their nouns."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """A number and what it counts, in the right grammatical number.

    >>> counted(1, "rank"), counted(16, "rank"), counted(2.5, "microbatch")
    ('1 rank', '16 ranks', '2.5 microbatches')
    """
    plural = noun + ("es" if noun.endswith("ch") else "s")
    shown = str(number) if isinstance(number, int) else f"{number:g}"
    return f"{shown} {noun if number == 1 else plural}"
