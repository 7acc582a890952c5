"""Flips: values that a rank rounds to another fp8 number than the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.model.fp8_operand import Both
from fivefold.verify.fp8_reference import Codes

RankCodes = dict[tuple[str, str], list[NDArray[np.uint8]]]
"""By fused matmul and operand: codes in the order of microbatches, as the reference has them."""


class CodeRecord:
    """Keeps the codes that one rank computes, for rows of `seq` tokens."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.codes: RankCodes = {}

    def note(self, name: str, what: str, rounded: Both) -> None:
        rows, turned = rounded.rows.codes, rounded.columns
        if what == "weight":
            self._keep(name, what, rows)
            assert turned is not None
            self._keep(name, "weight, turned", turned.codes.view(torch.uint8).T)
            return
        self._keep(name, what, rows.unflatten(0, (-1, self.seq)))
        if turned is not None:
            padded = turned.codes.view(torch.uint8).T.unflatten(0, (len(rows) // self.seq, -1))
            self._keep(name, f"{what}, by tokens", padded[:, : self.seq])

    def take(self) -> RankCodes:
        """The codes since the last time."""
        found, self.codes = self.codes, {}
        return found

    def _keep(self, name: str, operand: str, codes: Tensor) -> None:
        whole = codes.contiguous().view(torch.uint8).cpu().numpy().copy()
        known = self.codes.setdefault((name, operand), [])
        # A forward that runs again in backward rounds the same: only what differs is kept.
        if not (operand.startswith("input") and any(np.array_equal(whole, one) for one in known)):
            known.append(whole)


def count_flips(
    truth: Codes, ranks: Mapping[int, Sequence[RankCodes]], microbatches: int, rows: int
) -> int:
    """Values that a rank rounds differently, by data rank; what no rank rounds counts as a whole.

    The reference has the microbatches of all data ranks one after another, of so many rows each.
    """
    flips, seen = 0, set[tuple[str, str]]()
    for dp, all_of_rank in ranks.items():
        for key, found in (pair for codes in all_of_rank for pair in codes.items()):
            name, operand = key
            seen.add(key)
            if operand.startswith("weight"):
                flips += _differing(np.concatenate(found), truth[name, "weight"])
                continue
            parts, rest = divmod(len(found), microbatches)  # of linears that are not one matrix
            if rest or not parts:
                flips += truth[key].size
                continue
            for number in range(microbatches):
                mine = np.concatenate(found[number * parts : (number + 1) * parts], axis=-1)
                start = (number * len(ranks) + dp) * rows
                flips += _differing(mine, truth[key][start : start + rows])
    return flips + sum(codes.size for key, codes in truth.items() if key not in seen)


def _differing(found: NDArray[np.uint8], truth: NDArray[np.uint8]) -> int:
    """Codes that differ. A zero has two."""
    if found.shape != truth.shape:
        return truth.size
    zero = ((found & 0x7F) == 0) & ((truth & 0x7F) == 0)
    return int(((found != truth) & ~zero).sum())
