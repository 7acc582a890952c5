"""ZeRO-3 with fp8: a unit's weights come as codes, and are the values of these codes when they are
here. Rounded again by the same scales they are the same codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fivefold.core.layout import Unit, UnitSegment, coded_shard_bytes, segments
from fivefold.model.fp8 import CODES, scale_and_factor, to_codes
from fivefold.parallel import Issued, Mesh

MaximumOf = Callable[[str], Tensor]
"""The maximum of the values that share a scale with a weight; of a stack of experts, of each."""


class CodedGather:
    """Gathers of one unit as fp8 codes."""

    def __init__(self, unit: Unit, mesh: Mesh, coded: frozenset[str], maximum: MaximumOf) -> None:
        self.axis, self.mesh, self.maximum = unit.shard_axis, mesh, maximum
        self.shards = [segments(unit, index, coded) for index in range(unit.num_shards)]
        self.coord, self.shard_size = mesh.coord(unit.shard_axis), unit.shard_size
        self.first = next(entry.row.name for entry in unit.entries if entry.row.name in coded)
        self.num_bytes = {
            size: coded_shard_bytes(unit, coded, size)
            for size in (torch.bfloat16.itemsize, torch.float32.itemsize, torch.float64.itemsize)
        }

    def begin(self, full: Tensor, shard: Tensor) -> CodesArriving:
        """Start to gather; the wait of the result fills `full`."""
        self.maximum(self.first)  # found together: by all ranks here, whatever their shards hold
        low, size = self.coord * self.shard_size, self.num_bytes[shard.itemsize]
        sent, end = torch.zeros(size, dtype=torch.uint8, device=full.device), 0
        for segment in self.shards[self.coord]:
            part = shard[segment.start - low : segment.stop - low]
            if segment.rounded:
                _, factor = self._scales(segment)
                part = to_codes(part.unflatten(0, (len(factor), -1)), factor, "e4m3").flatten()
            as_bytes = part.contiguous().view(torch.uint8)
            sent[end : end + len(as_bytes)] = as_bytes
            end += len(as_bytes)
        come = sent.new_empty(len(self.shards) * size)
        issued = self.mesh.all_gather(come, sent, self.axis)
        return CodesArriving(self, full, (sent, come), issued)

    def fill(self, full: Tensor, come: Sequence[Tensor]) -> None:
        """Decode the weights of all shards."""
        for sent, parts in zip(come, self.shards, strict=True):
            end = 0
            for segment in parts:
                size = (segment.stop - segment.start) * (1 if segment.rounded else full.itemsize)
                full[segment.start : segment.stop] = self._values(
                    segment, sent[end : end + size], full
                )
                end += size

    def _values(self, segment: UnitSegment, sent: Tensor, like: Tensor) -> Tensor:
        if not segment.rounded:
            return sent.view(like.dtype)
        wide = torch.promote_types(like.dtype, torch.float32)
        scale, _ = self._scales(segment)
        codes = sent.view(CODES["e4m3"]).unflatten(0, (len(scale), -1))
        return (codes.to(wide) * scale.to(wide)).flatten()

    def _scales(self, segment: UnitSegment) -> tuple[Tensor, Tensor]:
        """What multiplies codes, and values: a row for each expert, or one."""
        own = slice(segment.experts.start, segment.experts.stop)
        return scale_and_factor(self.maximum(segment.name).reshape(-1, 1)[own], "e4m3")


class CodesArriving:
    """A gather of codes in flight."""

    def __init__(
        self, gather: CodedGather, full: Tensor, buffers: tuple[Tensor, Tensor], issued: Issued
    ) -> None:
        """`buffers`: what is sent, which must live until it was, and what comes."""
        self.gather, self.full, self.buffers, self.issued = gather, full, buffers, issued

    def wait(self) -> Tensor:
        self.issued.wait()
        with torch.no_grad():
            self.gather.fill(self.full, self.buffers[1].chunk(len(self.gather.shards)))
        return self.full
