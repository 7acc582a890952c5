"""Boxes: what the ranks of any layout hold of a weight, together and one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fivefold.core.errors import FivefoldError
from fivefold.core.layout.boxes import Box, boxes_of, whole_box
from fivefold.core.layout.units import OwnedRange, Unit, UnitPolicy
from fivefold.core.layout.weight_table import WeightShard, by_name, shard_of, weights
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.cost.traffic.collectives import owned_shards, units_of

MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "dense": ("tiny", {"layers": "4"}),
    "few kv heads, tied, padded": (
        "tiny",
        {"layers": "4", "kv_heads": "2", "tied": "true", "vocab": "251"},
    ),
    "experts": ("tiny-moe", {"layers": "4"}),
    "ahead, padded": ("tiny-moe", {"layers": "4", "mtp": "1", "vocab": "253"}),
}
LAYOUTS = st.fixed_dictionaries(
    {name: st.sampled_from([1, 2, 4]) for name in ("dp", "tp", "pp", "cp", "ep")}
    | {"etp": st.sampled_from([1, 2])}
)


def planned(model: str, degrees: dict[str, int], zero: int, schedule: str | None) -> Plan | None:
    name, changes = MODELS[model]
    spread = {**degrees} if name == "tiny-moe" else {**degrees, "ep": 1, "etp": 1}
    layout = " ".join(f"{axis}={degree}" for axis, degree in spread.items())
    try:
        options = PlanOptions(
            name, layout=layout, zero=zero, schedule=schedule or "1f1b", set=changes
        )
        return resolve(options, small=True)
    except FivefoldError:
        return None  # no layout of this model


def owned(plan: Plan, rank: int) -> Iterator[tuple[str, WeightShard, OwnedRange, int]]:
    """What a rank owns of each weight, where it begins in it, and its name in the whole model."""
    layout, table = plan.layout, by_name(plan.shape)
    for stage in plan.schedule.placement.stages_of(layout.coord(rank).pp):
        for unit in units_of(plan, stage, 4):
            for part in owned_shards(layout, rank, [unit]):
                weight = table[part[0].name]
                held = shard_of(weight, plan.shape, layout, layout.coord(rank))
                yield weight.name, held, part, begins(plan, rank, unit, part)


def begins(plan: Plan, rank: int, unit: Unit, part: OwnedRange) -> int:
    place = plan.layout.group(unit.shard_axis, rank).index(rank) if unit.num_shards > 1 else 0
    (entry,) = (each for each in unit.entries if each.row is part[0])
    return part[1] + place * unit.shard_size - entry.start


def copies(plan: Plan, name: str, held: WeightShard, expert: bool) -> int:
    """How many times a job holds each element, counted from its degrees."""
    layout, placement = plan.layout, plan.schedule.placement
    everyone = layout.edp if expert else layout.dp * layout.cp
    sliced = (layout.edp if expert else layout.shard * layout.cp) if layout.zero else 1
    ends = 2 if plan.shape.ends_share and len(plan.stages) > 1 and name == "embed.weight" else 1
    return held.copies * (everyone // sliced) * ends * (2 if placement.mirrored else 1)


def cut(whole: NDArray[Any], shape: tuple[int, ...], held: WeightShard) -> NDArray[Any]:
    """A piece of a weight by hand, padding as -1."""
    padded = list(whole.shape)
    if held.dim is not None:
        padded[held.dim] = held.size
    full = np.full(padded, -1, whole.dtype)
    full[tuple(slice(0, size) for size in whole.shape)] = whole
    if held.dim is not None:
        full = full.take(range(held.start, held.stop), axis=held.dim)
    if held.inner is not None:
        full = full.take(range(*held.inner[1:]), axis=held.inner[0])
    assert full.shape == shape
    return full


def in_box(whole: NDArray[Any], box: Box) -> NDArray[Any]:
    spans = zip(box.offsets, box.sizes, strict=True)
    return whole[tuple(slice(offset, offset + size) for offset, size in spans)]


@settings(max_examples=20, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    model=st.sampled_from(sorted(MODELS)),
    degrees=LAYOUTS,
    zero=st.sampled_from([0, 1, 3]),
    schedule=st.sampled_from([None, "dualpipe", "zb-v"]),
    unit_bytes=st.sampled_from([None, 1, 50_000]),
)
def test_the_ranks_together_hold_every_element_as_often_as_there_are_copies(
    model: str, degrees: dict[str, int], zero: int, schedule: str | None, unit_bytes: int | None
) -> None:
    plan = planned(model, degrees, zero, schedule)
    assume(plan is not None and plan.layout.world <= 32)
    assert plan is not None
    plan = replace(plan, units=UnitPolicy(size=unit_bytes))
    table = {weight.name: weight for weight in weights(plan.shape)}
    whole = {
        name: np.arange(weight.numel, dtype=np.int32).reshape(weight.shape)
        for name, weight in table.items()
    }
    counts = {name: np.zeros(weight.shape, np.int16) for name, weight in table.items()}
    offsets: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    wanted: dict[str, int] = {}
    for rank in range(plan.layout.world):
        for name, held, (row, low, high), start in owned(plan, rank):
            flat = cut(whole[name], row.shape, held).ravel()[start : start + high - low]
            boxes = boxes_of(table[name].shape, held, row.shape, start, start + high - low)
            assert len(boxes) <= 2 * len(row.shape) - 1
            for box in boxes:
                counts[name][tuple(map(slice, box.offsets, _ends(box)))] += 1
                assert np.array_equal(
                    in_box(whole[name], box).ravel(), flat[box.at : box.at + box.numel]
                )
                # Copies are known by where they begin, so they have to be alike.
                assert offsets.setdefault((name, box.offsets), box.sizes) == box.sizes
            assert (flat >= 0).sum() == sum(box.numel for box in boxes)
            wanted[name] = copies(plan, name, held, row.expert)
    assert counts.keys() == wanted.keys()
    for name, found in counts.items():
        assert (found == wanted[name]).all(), name


def _ends(box: Box) -> list[int]:
    return [offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)]


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_a_run_is_its_boxes_in_order(shape: tuple[int, ...], ends: tuple[float, float]) -> None:
    numel = math.prod(shape)
    start, stop = sorted(round(end * numel) for end in ends)
    all_of_it = WeightShard(None, 0, shape[0], shape[0], 1, partial=False)
    boxes = boxes_of(shape, all_of_it, shape, start, stop)
    whole = np.arange(numel).reshape(shape)
    inside = [element for box in boxes for element in in_box(whole, box).ravel().tolist()]
    assert inside == list(range(start, stop))
    assert [box.at for box in boxes] == [
        sum(one.numel for one in boxes[:i]) for i in range(len(boxes))
    ]
    assert len(boxes) <= 2 * len(shape) - 1
    if (start, stop) == (0, numel):
        assert boxes == (whole_box(shape),)


def test_padding_is_in_no_box() -> None:
    last = WeightShard(0, 6, 9, 9, 1, partial=False)  # of 7 rows, padded to 9
    (box,) = boxes_of((7, 2), last, (3, 2), 1, 6)
    assert box == Box((6, 1), (1, 1), 0)
    assert boxes_of((7, 2), last, (3, 2), 2, 6) == ()
