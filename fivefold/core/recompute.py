"""Which activations are computed again in the backward."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, cast

from fivefold.core.errors import FivefoldError


@dataclass(frozen=True)
class Recompute:
    """What a plan says: `selective` repeats cheap parts only, `full` keeps the input of every
    `blocks`-th block."""

    kind: Literal["none", "selective", "full"] = "none"
    blocks: int = 1

    @classmethod
    def parse(cls, text: str) -> Recompute:
        found = re.fullmatch(r"(none|selective|full)(?::([1-9][0-9]{0,4}))?", text)
        if not found or (found[2] and found[1] != "full"):
            raise FivefoldError(
                f"recompute {text!r}: choose none, selective, full, or full:K for segments of K "
                "blocks"
            )
        return cls(cast(Any, found[1]), int(found[2] or 1))

    def __str__(self) -> str:
        return self.kind if self.blocks == 1 else f"{self.kind}:{self.blocks}"
