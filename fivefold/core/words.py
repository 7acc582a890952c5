"""Numbers with their nouns, and names as sentences have them."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """A number and what it counts, in the right grammatical number.

    >>> counted(1, "rank"), counted(16, "rank"), counted(2.5, "microbatch")
    ('1 rank', '16 ranks', '2.5 microbatches')
    """
    plural = noun + ("es" if noun.endswith("ch") else "s")
    shown = str(number) if isinstance(number, int) else f"{number:g}"
    return f"{shown} {noun if number == 1 else plural}"


def span(numbers: range) -> str:
    """Neighbours by the first and the last of them.

    >>> span(range(4, 8)), span(range(4, 5))
    ('4–7', '4')
    """
    return f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"


def kind_text(kind: str) -> str:
    """The kind of a collective.

    >>> kind_text("all_gather")
    'all-gather'
    """
    return kind.replace("_", "-")
