"""The indices by which states are rounded, beside the boxes of shards."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fivefold.core.layout.boxes import boxes_of
from fivefold.core.layout.units import LocalWeight
from fivefold.core.layout.weight_table import WeightShard
from fivefold.optim.rounding import RoundingKey, round_stochastically, rounding_bits

CPU = torch.device("cpu")
# A full weight, the shape of a rank's shard of it, and that shard.
SHARDS: tuple[tuple[tuple[int, ...], tuple[int, ...], WeightShard], ...] = (
    ((13,), (13,), WeightShard(None, 0, 0, 0, 1, False)),
    ((6, 5), (6, 5), WeightShard(None, 0, 0, 0, 1, False)),
    ((6, 8), (3, 8), WeightShard(0, 3, 6, 6, 1, False)),
    ((6, 8), (6, 4), WeightShard(1, 4, 8, 8, 1, False)),
    ((6, 4, 5), (2, 2, 5), WeightShard(0, 4, 6, 6, 1, False, (1, 2, 4))),
    ((6, 4, 6), (3, 4, 2), WeightShard(0, 0, 3, 6, 1, False, (2, 4, 6))),
    ((7, 3), (4, 3), WeightShard(0, 4, 8, 8, 1, False)),  # the last row is padding
)


@pytest.mark.parametrize(("shape", "local", "shard"), SHARDS)
def test_an_element_has_its_index_in_the_full_weight(
    shape: tuple[int, ...], local: tuple[int, ...], shard: WeightShard
) -> None:
    """Whatever part of the shard a rank has; padding has none, and gets 0."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    row, size = LocalWeight("w", "blocks.0", local), math.prod(local)
    for start, stop in ((0, size), (1, size - 1), (size // 2, size // 2 + 3)):
        expected = torch.zeros(stop - start, dtype=torch.int32)
        for box in boxes_of(shape, shard, local, start, stop):
            cut = tuple(slice(low, low + n) for low, n in zip(box.offsets, box.sizes, strict=True))
            expected[box.at : box.at + box.numel] = numbers[cut].flatten().int()
        found = RoundingKey.of(0, 1, row, start, (shape, shard)).indices(stop - start, CPU)
        assert torch.equal(found, expected)


def test_indices_of_a_huge_weight_wrap_around() -> None:
    row = LocalWeight("w", "blocks.0", (2**18, 2**15))
    start = 2**32 - 2
    assert RoundingKey.of(0, 1, row, start, None).indices(4, CPU).tolist() == [-2, -1, 0, 1]


def test_copies_of_a_tied_embedding_are_rounded_alike() -> None:
    """The first stage calls it embedding and the last one head; both must stay equal."""
    first, last = (
        LocalWeight(name, block, (6, 8), alone=True)
        for name, block in (("embed.weight", "embed"), ("head.weight", "head"))
    )
    values = torch.linspace(-1, 1, 48)
    one, other, later = (
        round_stochastically(values, rounding_bits(0, count, row, 0, 48, CPU))
        for row, count in ((first, 3), (last, 3), (last, 4))
    )
    assert one.equal(other) and not one.equal(later)
    untied = replace(last, alone=False)
    bits = rounding_bits(0, 3, untied, 0, 48, CPU)
    assert not bits.equal(rounding_bits(0, 3, first, 0, 48, CPU))
