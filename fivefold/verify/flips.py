"""Flips: values that a rank rounds to another fp8 number than the reference.

A rank has some tokens of a microbatch and shards of some weights, in an order of its own. What it
rounds is brought to the order of rows, and compared with that part of the reference's codes; what
no rank rounds counts as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fivefold.core.layout import Weight, WeightShard, by_name, shard_of
from fivefold.core.plan import Plan
from fivefold.model.fp8 import Both
from fivefold.verify.fp8_reference import Codes, RoundedCodes

CodeArray = NDArray[np.uint8]
RankCodes = dict[tuple[str, str], list[CodeArray]]
"""By fused matmul and operand: the codes of microbatches, (B, S, W), or of a weight, (O, I)."""
_BETWEEN = ("q_up", "kv_up")  # linears that read tokens in the order of rows in any layout


class CodeRecord:
    """Records the fp8 codes that one rank computes."""

    def __init__(self, plan: Plan, rank: int) -> None:
        layout = plan.layout
        self.rows, self.seq = plan.batch.microbatch_size, plan.local_seq
        self.shards = layout.tp if layout.sp else 1
        self.chunks = max(1, plan.options.tp_overlap)
        self.counted = _counted(plan, rank) < plan.batch.seq
        self.codes: RankCodes = {}
        self.parts: dict[tuple[str, str], list[CodeArray]] = {}

    def note(self, names: Sequence[str], what: str, rounded: Sequence[Both], run: int) -> None:
        name = "+".join(names)
        if what == "weight":
            self._keep(
                name, what, np.concatenate([_bytes(operand.rows.codes) for operand in rounded])
            )
            turned = [
                _bytes(operand.columns.codes).T
                for operand in rounded
                if operand.columns is not None
            ]
            self._keep(name, "weight, turned", np.concatenate(turned))
            return
        key = (name, what)
        parts = self.parts.setdefault(key, [])
        parts.append(np.concatenate([_bytes(operand.rows.codes) for operand in rounded], axis=1))
        if sum(map(len, parts)) == self.rows * self.seq:
            self._keep(*key, self._in_rows(name, np.concatenate(self.parts.pop(key))))
        columns = [operand.columns for operand in rounded if operand.columns is not None]
        if columns:
            full_codes = np.concatenate([_bytes(column.codes) for column in columns]).T
            tokens = self.rows * self.seq
            if len(full_codes) > tokens:  # every run is padded to whole blocks
                by_run = full_codes.reshape(tokens // run, -1, full_codes.shape[1])
                full_codes = by_run[:, :run].reshape(tokens, -1)
            self._keep(name, f"{what}, by tokens", self._in_rows(name, full_codes))

    def take(self) -> RankCodes:
        """Return the codes since the last call."""
        codes, self.codes = self.codes, {}
        return codes

    def _in_rows(self, name: str, codes_NW: CodeArray) -> CodeArray:
        """Tokens in the order of rows, without padding."""
        shape = (self.rows, self.seq, codes_NW.shape[1])
        if self.shards > 1 and not name.endswith(_BETWEEN):
            by_chunk = codes_NW.reshape(self.chunks, self.shards, -1, shape[2])
            by_rank = by_chunk.swapaxes(0, 1).reshape(self.shards, self.rows, -1, shape[2])
            codes_NW = by_rank.swapaxes(0, 1)
        return codes_NW.reshape(shape)[:, self.counted]

    def _keep(self, name: str, operand: str, codes: CodeArray) -> None:
        known = self.codes.setdefault((name, operand), [])
        # What runs again in backward rounds the same: only what differs is kept.
        if not any(np.array_equal(codes, array) for array in known):
            known.append(codes.copy())


def _bytes(codes: Tensor) -> CodeArray:
    return codes.contiguous().view(torch.uint8).cpu().numpy()


def _counted(plan: Plan, rank: int) -> NDArray[np.int64]:
    """The positions of a rank's tokens in their row."""
    ranges = plan.split.rank_tokens(plan.padded_seq, plan.layout.coord(rank).cp)
    return np.array([index for span in ranges for index in span])


def count_flips(plan: Plan, truth: Codes, ranks: Sequence[RankCodes]) -> int:
    """Count values that a rank rounds differently, and those that no rank rounds.

    The reference has the microbatches of all data ranks one after another.
    """
    table, flips = by_name(plan.shape), 0
    missing = {key: np.ones(reference.codes.shape, bool) for key, reference in truth.items()}
    for rank, of_rank in enumerate(ranks):
        places = _counted(plan, rank)
        places = places[places < plan.batch.seq]
        for (name, operand), rank_codes in of_rank.items():
            cuts = list(_cuts(plan, table, name, rank))
            key = (name, operand)
            if operand.startswith("weight") and key not in truth:  # both orders have one code
                key = (name, "weight")
            if key not in truth:
                return sum(reference.codes.size for reference in truth.values())
            if operand.startswith("weight"):
                where = np.ix_(_outputs(cuts)[0], _inputs(cuts))
                flips += _differing(rank_codes[-1], truth[key], where)
                missing[key][where] = False
                continue
            local_columns, columns = np.arange(rank_codes[0].shape[2]), _inputs(cuts)
            if operand.startswith("gradient"):
                columns, local_columns = _outputs(cuts, without_copies=True)
            for codes in rank_codes:
                options = [np.ix_(rows, places, columns) for rows in _microbatches(plan, rank)]
                counts = [
                    _differing(codes[:, :, local_columns], truth[key], option) for option in options
                ]
                best = int(np.argmin(counts))
                flips += counts[best]
                missing[key][options[best]] = False
    return flips + sum(int(mask.sum()) for mask in missing.values())


def _microbatches(plan: Plan, rank: int) -> Iterator[NDArray[np.int64]]:
    """Rows of the step in each microbatch of a rank."""
    size, dp = plan.batch.microbatch_size, plan.layout.coord(rank).dp
    for number in range(plan.batch.microbatches):
        start = (number * plan.layout.dp + dp) * size
        yield np.arange(start, start + size)


Cut = tuple[Weight, WeightShard, bool]
"""A weight, this rank's shard of it, and whether another rank has the sum of its gradients."""


def _cuts(plan: Plan, table: Mapping[str, Weight], name: str, rank: int) -> Iterator[Cut]:
    coord = plan.layout.coord(rank)
    for linear in name.split("+"):
        weight = table[f"{linear}.weight"]
        shard = shard_of(weight, plan.shape, plan.layout, coord)
        yield weight, shard, coord.tp % shard.copies > 0


def _inputs(cuts: Sequence[Cut]) -> NDArray[np.int64]:
    weight, shard, _ = cuts[0]
    return np.arange(weight.shape[1]) if shard.dim != 1 else np.arange(shard.start, shard.stop)


def _outputs(
    cuts: Sequence[Cut], without_copies: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The outputs of the reference that a rank has, and where it has them."""
    full_rows, local_rows = list[int](), list[int]()
    start = local = 0
    for weight, shard, copied in cuts:
        rows = range(shard.start, shard.stop) if shard.dim == 0 else range(weight.shape[0])
        if not (without_copies and copied):
            full_rows += [start + row for row in rows]
            local_rows += range(local, local + len(rows))
        start, local = start + weight.shape[0], local + len(rows)
    return np.array(full_rows, int), np.array(local_rows, int)


def _differing(codes: CodeArray, truth: RoundedCodes, where: Any) -> int:
    """Codes that differ. A zero has two."""
    true_codes, noise = truth.codes[where], truth.noise[where]
    if codes.shape != true_codes.shape:
        return true_codes.size
    zero = ((codes & 0x7F) == 0) & ((true_codes & 0x7F) == 0)
    return int(((codes != true_codes) & ~zero & ~noise).sum())
