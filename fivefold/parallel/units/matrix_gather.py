"""Full matrices for Muon, gathered from the shards of all ranks, and the way back.

Moves    for every sharded flat unit, one all-gather of this rank's shard over the unit's shard
         axis; then, for the matrices that tp or etp has cut, one over that axis. All in the type
         of the weights.
Costs    the memory of one unit's full matrices, and the GEMMs of Newton-Schulz: 5 steps of
         2·m²·(2n + m) for an m by n matrix with m ≤ n. A rank computes only the matrices that it
         owns a shard of. A matrix that two shards share is computed twice; replicas and tp ranks
         all compute the same.

Ranks that meet on tp or etp own the same shards, so that all of them need the same matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fivefold.cost.traffic import is_muon_weight
from fivefold.parallel.units.flat_unit import FlatUnit

if TYPE_CHECKING:
    from fivefold.parallel import Job


class _Cut(NamedTuple):
    """[start, stop) along `dim` of a matrix, of which so many ranks in a row hold the same."""

    dim: int
    start: int
    stop: int
    copies: int


class GatheredMatrices:
    """Full matrices of a job, gathered unit by unit."""

    def __init__(self, job: Job) -> None:
        self.job, self.mesh, self.owned = job, job.mesh, job.owned
        self.units: list[tuple[FlatUnit, list[int]]] = []
        first = 0
        for unit in job.units:
            places = range(first, first + len(unit.owned))
            first = places.stop
            if any(is_muon_weight(entry.row) for entry in unit.unit.entries):
                indices = [index for index in places if is_muon_weight(self.owned[index].row)]
                self.units.append((unit, indices))

    def gather(self, parts: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """See `FullMatrices`. A rank that owns no matrix of a unit sends its slice all the same."""
        for unit, places in self.units:
            shards = self._unsliced(unit, places, parts)
            cuts = {index: self._cut(index) for index in places}
            yield from ((index, shards[index]) for index in places if cuts[index] is None)
            cut = {index: own_cut for index, own_cut in cuts.items() if own_cut is not None}
            if cut:
                yield from self._joined(shards, cut, "etp" if unit.unit.expert else "tp")

    def local_shard(self, index: int, matrix: Tensor) -> Tensor:
        """See `FullMatrices`."""
        shard, cut = self.owned[index], self._cut(index)
        if cut is not None:
            matrix = matrix.narrow(cut.dim, cut.start, cut.stop - cut.start)
        flat = matrix.reshape(-1)[shard.start : shard.start + shard.tensor.numel()]
        return flat.view(shard.tensor.shape)

    def _cut(self, index: int) -> _Cut | None:
        """How tp or etp has cut a weight; ep leaves experts whole."""
        row = self.owned[index].row
        shard = self.job.shards[row.name]
        if not row.expert:
            if shard.dim is None:
                return None
            return _Cut(shard.dim, shard.start, shard.stop, shard.copies)
        assert shard.inner is not None, "experts have an inner cut"
        return _Cut(*shard.inner, copies=1) if self.mesh.size("etp") > 1 else None

    def _unsliced(
        self, unit: FlatUnit, places: list[int], parts: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Of the unit's matrices that this rank owns some of, all that tp or etp gives it."""
        if not unit.sliced:
            return {position: parts[position] for position in places}
        entries = {entry.row.name: entry for entry in unit.unit.entries}
        size, low = unit.unit.shard_size, unit.coord * unit.unit.shard_size
        part = torch.zeros(size, dtype=unit.shard.dtype, device=self.mesh.device)
        for index in places:
            shard = self.owned[index]
            begin = entries[shard.row.name].start + shard.start - low
            part[begin : begin + shard.tensor.numel()] = parts[index]
        full_unit = part.new_empty(unit.unit.size)
        self.mesh.all_gather(full_unit, part, unit.unit.shard_axis).wait()
        matrices: dict[int, Tensor] = {}
        for index in places:
            entry = entries[self.owned[index].row.name]
            matrices[index] = full_unit[entry.start : entry.stop].view(entry.row.shape)
        return matrices

    def _joined(
        self, shards: Mapping[int, Tensor], cuts: Mapping[int, _Cut], axis: str
    ) -> Iterator[tuple[int, Tensor]]:
        """Whole matrices from the shards of all ranks of an axis, by one all-gather."""
        size = self.mesh.size(axis)
        part = torch.cat([shards[position].reshape(-1) for position in cuts])
        gathered = part.new_empty(size * part.numel())
        self.mesh.all_gather(gathered, part, axis).wait()
        by_rank, start = gathered.view(size, -1), 0
        for index, cut in cuts.items():
            stop = start + shards[index].numel()
            block = by_rank[:: cut.copies, start:stop].reshape(-1, *shards[index].shape)
            yield index, torch.cat(list(block), dim=cut.dim)
            start = stop
