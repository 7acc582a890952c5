"""Flips of routed experts: rows that a rank rounds to other fp8 numbers than the reference.

Which slots an expert gets together, and in which order, depends on the layout. So the rows of an
expert are a set: every row that a rank rounds must be one of the reference's for that expert, and
each of these must be rounded by some rank. Rows of zeros (padding, empty slots) are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.core.layout import Weight, WeightShard, by_name, shard_of
from fivefold.core.plan import Plan
from fivefold.model.fp8 import TURNED
from fivefold.verify.fp8_reference import CodeArray, ExpertCodes, RowKey

RankRows = dict[RowKey, CodeArray]
_SIGN, _REST = np.uint8(0x80), np.uint8(0x7F)


class ExpertRecord:
    """Records the fp8 codes that the experts of one rank read."""

    def __init__(self) -> None:
        self.rows: dict[RowKey, list[CodeArray]] = {}

    def note(self, names: Sequence[str], what: str, codes: Tensor, ends_E: Tensor | None) -> None:
        if what == TURNED:  # the same codes
            return
        name, code_bytes = "+".join(names), codes.contiguous().view(torch.uint8).cpu().numpy()
        if ends_E is None:
            for expert, expert_codes in enumerate(code_bytes):
                self.rows[name, what, expert] = [expert_codes.copy()]
            return
        ends = ends_E.tolist()
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            self.rows.setdefault((name, what, expert), []).append(code_bytes[start:end].copy())

    def take(self) -> RankRows:
        """Return the codes since the last call."""
        chunks, self.rows = self.rows, {}
        return {key: np.concatenate(arrays) for key, arrays in chunks.items()}


def count_expert_flips(plan: Plan, truth: ExpertCodes, ranks: Sequence[RankRows]) -> int:
    """Count values that a rank rounds differently, and those that no rank rounds."""
    table, flips = by_name(plan.shape), 0
    covered = {key: np.zeros(codes.shape, bool) for key, codes in truth.rows.items()}
    missing = {name: np.ones(codes.shape, bool) for name, codes in truth.weights.items()}
    for rank, of_rank in enumerate(ranks):
        for (name, what, number), rank_codes in of_rank.items():
            cuts = list(_cuts(plan, table, name, rank))
            expert, is_gradient = cuts[0][1].start + number, what == "gradient"
            if what == "weight":
                where = np.ix_([expert], _columns(cuts, True), _columns(cuts, False))
                flips += int(
                    (_unsigned(rank_codes[None]) != _unsigned(truth.weights[name][where])).sum()
                )
                missing[name][where] = False
                continue
            key, columns = (name, what, expert), _columns(cuts, is_gradient)
            if key not in truth.rows:
                flips += int((_unsigned(rank_codes) != 0).sum())
                continue
            true_codes = _unsigned(truth.rows[key][:, columns])
            off, seen = _differing(_unsigned(rank_codes), true_codes, truth.noise[key])
            flips += off
            covered[key][np.ix_(seen, columns)] = True
    for key, marks in covered.items():
        left = ~marks & (_unsigned(truth.rows[key]) != 0)
        flips += int((left & ~truth.noise[key][:, None]).sum())
    return flips + sum(int(mask.sum()) for mask in missing.values())


def _differing(
    codes: CodeArray, true_codes: CodeArray, noise: NDArray[np.bool_]
) -> tuple[int, NDArray[np.intp]]:
    """Codes that are in no row of the reference, and the rows of it that were found."""
    places: dict[bytes, list[int]] = {}
    for index, row in enumerate(true_codes):
        places.setdefault(row.tobytes(), []).append(index)
    seen, flips = set[int](), 0
    for row in np.unique(codes, axis=0):
        indices = places.get(row.tobytes())
        if indices is not None:
            seen.update(indices)
        elif row.any():
            near = (true_codes != row).sum(1)
            flips += 0 if noise[near.argmin()] else int(near.min())
    return flips, np.array(sorted(seen), np.intp)


def _unsigned(codes: CodeArray) -> CodeArray:
    """The same with one zero instead of two."""
    return np.where((codes & _REST) == 0, np.uint8(0), codes)


Cut = tuple[Weight, WeightShard]


def _cuts(plan: Plan, table: Mapping[str, Weight], name: str, rank: int) -> Iterator[Cut]:
    coord = plan.layout.coord(rank)
    for stack in name.split("+"):
        weight = table[f"{stack}.weight"]
        yield weight, shard_of(weight, plan.shape, plan.layout, coord)


def _columns(cuts: Sequence[Cut], outputs: bool) -> NDArray[np.int64]:
    """Of all outputs or inputs of an expert, those that a rank has."""
    dim, indices, start = (1 if outputs else 2), list[int](), 0
    for weight, shard in cuts if outputs else cuts[:1]:
        local_range = range(weight.shape[dim])
        if shard.inner is not None and shard.inner[0] == dim:
            local_range = range(*shard.inner[1:])
        indices += [start + column for column in local_range]
        start += weight.shape[dim]
    return np.array(indices, int)
