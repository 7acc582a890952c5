"""The weights of a stage and the units they travel in."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core.layout.layout import Layout
from fivefold.core.layout.units import (
    LocalWeight,
    Unit,
    UnitWeight,
    local_weights,
    pack,
    prefetched,
)
from fivefold.core.layout.weight_table import weights
from fivefold.core.model import presets as models
from fivefold.core.model.shape import Shape

TINY = models.load("tiny")
TIED = models.with_overrides(TINY, {"tied": "true", "vocab": "251"})
LEARNED = models.with_overrides(TIED, {"positions": "learned", "norm_bias": "true"})
AHEAD = models.with_overrides(TINY, {"mtp": "2", "vocab": "251"})
TIED_AHEAD = models.with_overrides(AHEAD, {"tied": "true"})


def names(rows: list[LocalWeight]) -> list[str]:
    return [row.name for row in rows]


@pytest.mark.parametrize(
    "shape",
    [TINY, TIED, LEARNED, AHEAD, TIED_AHEAD],
    ids=["untied", "tied", "learned", "ahead", "tied-ahead"],
)
def test_one_stage_has_every_weight_and_shares_none(shape: Shape) -> None:
    rows = local_weights(shape, Layout(tp=2), range(shape.layers))
    assert names(rows) == [weight.name for weight in weights(shape)]
    assert not any(row.alone for row in rows)


@settings(max_examples=50)
@given(
    shape=st.sampled_from([TINY, TIED, LEARNED, AHEAD, TIED_AHEAD]),
    ends=st.sets(st.integers(1, 7), min_size=1),
)
def test_stages_have_every_weight_once_but_the_embedding_of_both_ends(
    shape: Shape, ends: set[int]
) -> None:
    spans = [range(a, b) for a, b in pairwise((0, *sorted(ends), shape.layers))]
    rows = [local_weights(shape, Layout(tp=2), span) for span in spans]
    copy = ["head.weight"] if shape.tied else ["mtp.embed.weight"] if shape.mtp else []
    whole = [weight.name for weight in weights(shape)]
    assert [name for stage in rows for name in names(stage)] == whole + copy
    shared = [row for stage in rows for row in stage if row.alone]
    assert names(shared) == (["embed.weight", *copy] if copy else [])
    assert len({row.shape for row in shared}) <= 1
    assert [row.block for row in shared] == ["embed", "head"][: len(shared)]


def unit_of(units: tuple[Unit, ...], name: str) -> Unit:
    (found,) = (unit for unit in units if any(one.row.name == name for one in unit.entries))
    return found


@pytest.mark.parametrize("bucket", [None, 1, 20_000, 10**9])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_tied_weight_is_sliced_alike_on_both_stages(bucket: int | None, num_shards: int) -> None:
    first, last = (
        pack(local_weights(LEARNED, Layout(tp=2), layers), num_shards, 2, bucket)
        for layers in (range(3), range(3, 8))
    )
    lookup, head = unit_of(first, "embed.weight"), unit_of(last, "head.weight")
    assert (lookup.blocks, head.blocks) == (("embed",), ("head",))
    for place in range(num_shards):
        mine, its = lookup.owned(place), head.owned(place)
        assert [part[1:] for part in mine] == [part[1:] for part in its] != []
    # What stands beside it in its block travels with the neighbours.
    assert unit_of(first, "embed.positions") != lookup
    assert unit_of(last, "norm.weight") != head


def test_stages_between_have_neither_end() -> None:
    blocks = {row.block for row in local_weights(TIED, Layout(), range(2, 4))}
    assert blocks == {"blocks.2", "blocks.3"}


def unit(*blocks: str, expert: bool = False) -> Unit:
    rows = [LocalWeight(f"{block}.weight", block, (1,), expert=expert) for block in blocks]
    return Unit(blocks, tuple(UnitWeight(row, i) for i, row in enumerate(rows)), 2, len(rows))


BLOCKS = ("0", "1", "2")


def test_experts_are_prefetched_with_the_rest_of_their_block() -> None:
    """Block 0 is dense, 1 and 2 have experts."""
    units = [unit("0"), unit("1"), unit("1", expert=True), unit("2"), unit("2", expert=True)]
    assert [prefetched(units, BLOCKS, block, +1) for block in BLOCKS] == [[1, 2], [3, 4], []]
    assert [prefetched(units, BLOCKS, block, -1) for block in BLOCKS] == [[], [0], [2, 1]]


def test_a_unit_of_several_blocks_is_prefetched_before_the_first_of_them() -> None:
    """And in a backward before the last of them; of a block in several units, all come ahead."""
    dense, experts = unit("0", "1"), [unit(block, expert=True) for block in "01"]
    units = [dense, *experts, unit("2"), unit("2"), unit("2", expert=True)]
    assert [prefetched(units, BLOCKS, block, +1) for block in BLOCKS] == [[2], [3, 4, 5], []]
    assert [prefetched(units, BLOCKS, block, -1) for block in BLOCKS] == [[], [1], [2, 0]]
    assert [prefetched(units, BLOCKS, "0", +1, depth) for depth in (0, 1, 2)] == [
        [],
        [2],
        [2, 3, 4, 5],
    ]


def test_nothing_is_prefetched_that_has_been_used() -> None:
    """A dense unit of all blocks is needed before and after the experts of one."""
    units = [unit(*BLOCKS), unit("1", expert=True)]
    assert [prefetched(units, BLOCKS, block, +1) for block in BLOCKS] == [[1], [], []]
    assert [prefetched(units, BLOCKS, block, -1) for block in BLOCKS] == [[], [], [1]]
