"""Rope: how the rotation of positions is scaled for texts beyond the length of first training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["llama3", "yarn", "linear", "longrope"]


@dataclass(frozen=True)
class Rope:
    """How rotary positions are scaled beyond the length that a model was first trained on."""

    kind: RopeKind
    factor: float
    original_seq: int
    low_freq: float = 1.0  # llama3: wavelengths above original_seq / low_freq are fully scaled
    high_freq: float = 4.0  # llama3: wavelengths below original_seq / high_freq are kept
    beta_fast: float = 32.0  # yarn: rotations that mark the two ends of its ramp
    beta_slow: float = 1.0
    mscale: float = 0.0  # yarn, DeepSeek: 0 means unset
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None  # yarn, longrope: None computes it from `factor`
    truncate: bool = True  # yarn: the ends of its ramp are whole pairs
    short: tuple[float, ...] = ()  # longrope: what divides the frequency of each pair …
    long: tuple[float, ...] = ()  # … and in texts of more than original_seq tokens

    @property
    def sizes(self) -> dict[str, float]:
        """Numbers that must be above 0."""
        names = ("factor", "original_seq", "low_freq", "high_freq", "beta_fast", "beta_slow")
        return {name: getattr(self, name) for name in names}

    @property
    def counts(self) -> dict[str, float]:
        """Numbers that may be 0."""
        factors = {"mscale": self.mscale, "mscale_all_dim": self.mscale_all_dim}
        factor = self.attention_factor
        return factors if factor is None else factors | {"attention_factor": factor}

    @property
    def scale(self) -> float:
        """What rotated queries and keys are multiplied by."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original_seq))
        if self.mscale and self.mscale_all_dim:  # DeepSeek
            return self.yarn_mscale(self.mscale) / self.yarn_mscale(self.mscale_all_dim)
        return self.yarn_mscale(1.0)

    def yarn_mscale(self, mscale: float) -> float:
        """YaRN's attention temperature for positions that are stretched by `factor`."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def problems(self, rotated_dim: int) -> Iterator[str]:
        """Why heads with so many rotated dims cannot have this scaling, sizes aside."""
        num_factors = rotated_dim // 2 if self.kind == "longrope" else 0
        for name, factors in (("short", self.short), ("long", self.long)):
            if len(factors) != num_factors:
                rule = f"longrope has one for each of {num_factors} pairs of a head"
                rule = rule if num_factors else f"leave them out with rope.kind = {self.kind}"
                yield f"rope.{name} has {len(factors)} factors: {rule}"
            if not all(math.isfinite(factor) and factor > 0 for factor in factors):
                yield f"rope.{name}: factors must be above 0 and finite"
        if self.kind == "longrope" and self.original_seq < 2:
            yield f"rope.original_seq = {self.original_seq}: longrope needs at least 2"
