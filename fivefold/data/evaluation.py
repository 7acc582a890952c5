"""The sets of rows that a training is evaluated on, by name.

A training that names none has one: rows that its own data holds out.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from fivefold.core import FivefoldError
from fivefold.core.plan import parse_sets
from fivefold.data.mixture import Source, open_source, tokenizers_of
from fivefold.data.rows import RowPlace, Synthetic

HELD_OUT = "held-out"


class EvaluationSet(NamedTuple):
    """Rows of an evaluation set, in the order of the text."""

    name: str
    rows: Sequence[RowPlace]

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token; None if they were not counted."""
        corpora = {id(corpus): corpus for corpus, _ in self.rows}
        if len(corpora) != 1:
            return None
        (corpus,) = corpora.values()
        return None if isinstance(corpus, Synthetic) else corpus.bytes_per_token


class SetLoss(NamedTuple):
    """Mean loss of a set in nats per token, and derived numbers."""

    loss: float
    bytes_per_token: float | None

    def to_json(self) -> dict[str, float | None]:
        """Convert to JSON; numbers that are not finite become null."""
        perplexity = math.exp(self.loss) if self.loss < 700 else math.inf
        per_byte = self.bytes_per_token
        fields = {
            "loss": self.loss,
            "perplexity": perplexity,
            "bits_per_byte": None if per_byte is None else self.loss / math.log(2) / per_byte,
        }
        return {
            key: None if value is None or not math.isfinite(value) else value
            for key, value in fields.items()
        }


def evaluation_sets(
    spec: str, source: Source, vocab: int, most_held_out: int, *, verify: bool = False
) -> list[EvaluationSet]:
    """Sets of an `eval_data` key; without one, up to so many rows that `source` holds out."""
    named = parse_sets(spec)
    if not named:
        held_out = source.held_out(most_held_out)
        return [EvaluationSet(HELD_OUT, held_out)] if held_out else []
    return [
        EvaluationSet(name, _rows(name, folder, source, vocab, verify))
        for name, folder in named.items()
    ]


def require_set(name: str, sets: Sequence[EvaluationSet]) -> None:
    """Refuse a name that is no evaluation set."""
    known = [eval_set.name for eval_set in sets]
    if name and name not in known:
        raise FivefoldError(
            f"keep_best = {name}: no set of eval_data has this name; choose from "
            f"{', '.join(known) or 'none: the data holds out no row'}"
        )


def _rows(name: str, folder: str, source: Source, vocab: int, verify: bool) -> list[RowPlace]:
    """All rows of a folder, if its tokens mean what those of the training do."""
    spec, trained = shlex.quote(folder), source.tokenizer
    for tokenizer in tokenizers_of(spec).values():
        if trained is not None and tokenizer.fingerprint != trained.fingerprint:
            raise FivefoldError(
                f"eval_data: {name} has other tokens than the data: {folder} is from {tokenizer}, "
                f"and the data from {trained}; tokenize both with one tokenizer"
            )
    (part,) = open_source(spec, vocab, source.seq, 0, verify=verify).parts
    corpus = part.corpus
    if isinstance(corpus, Synthetic):
        raise FivefoldError(f"eval_data: {name} = {folder}: random tokens teach nothing; give text")
    return [(corpus, row) for row in range(corpus.num_rows(source.seq))]
