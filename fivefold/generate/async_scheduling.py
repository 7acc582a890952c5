"""Steps that begin before the host knows the tokens that they read.

A token that was drawn is on the device before the host has read it. Where the host waited for it,
the device would wait for the host: to schedule, to pack a step, to launch it. So the next step is
launched first, with the place of a token in the last draw instead of the token, and the host reads
what was drawn while the device is at work. A sequence that has ended meanwhile has one row in that
step that nobody reads.

Legend: N rows of a draw, T tokens of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def place_of(row: int) -> int:
    """Placeholder in a step for the token that is drawn at this index.

    >>> place_of(0), place_of(7)
    (-1, -8)
    """
    return -1 - row


class DrawnTokens:
    """Tokens of the last draw in fixed memory, which captured steps read."""

    def __init__(self, most: int, device: torch.device) -> None:
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)

    def put(self, tokens_N: Tensor) -> None:
        """Store the tokens of a draw."""
        self.tokens[: len(tokens_N)].copy_(tokens_N)

    def fill(self, tokens_1T: Tensor) -> Tensor:
        """Replace the placeholders of a step by the drawn tokens."""
        rows_1T = (-1 - tokens_1T).clamp(min=0)
        return torch.where(tokens_1T < 0, self.tokens[rows_1T], tokens_1T)
