"""Which tokens the places of a ring have, for tests of attention in parts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fivefold.core.layout.splits import ContextSplit, Ranges


def places(split: ContextSplit, seq: int) -> Iterator[tuple[Ranges, list[Ranges]]]:
    """The queries of each place, and the keys that come to it, its own first."""
    for place in range(split.outer):
        others = [split.ring_tokens(seq, (place - hop) % split.outer) for hop in range(split.outer)]
        yield split.ring_tokens(seq, place), [(range(seq),)] if split.gathers else others


def index(ranges: Ranges) -> Tensor:
    return torch.tensor([token for each in ranges for token in each])
