"""Which weights ZeRO-3 gathers as fp8 codes, and the bytes of a shard."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.core.layout import units
from fivefold.core.layout.fp8 import Fp8
from fivefold.core.layout.units import (
    LocalWeight,
    coded_shard_bytes,
    gathered_as_codes,
    is_coded,
    pack,
    segments,
)
from fivefold.core.model import presets as models
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.traffic.collectives import predict_traffic

LINEARS = {"attention.q", "attention.k", "attention.v", "attention.out"} | {
    f"mlp.{one}" for one in ("gate", "up", "down")
}

ROUNDED_MLPS = ("shared", "experts")


def test_linears_of_rounded_layers() -> None:
    shape = models.with_overrides(models.load("tiny"), {"layers": "3"})
    found = gathered_as_codes(shape, Fp8(first=1))
    assert found == {f"blocks.{layer}.{one}.weight" for layer in (1, 2) for one in LINEARS}
    assert not gathered_as_codes(shape, None)
    assert not gathered_as_codes(shape, Fp8.parse("blockwise")), "blocks are not known before"


def test_routed_experts_by_every_scaling_that_rounds_them() -> None:
    shape = models.with_overrides(models.load("tiny-moe"), {"layers": "2"})
    stacks = {f"blocks.1.mlp.experts.{one}.weight" for one in ("gate", "up", "down")}
    assert gathered_as_codes(shape, Fp8.parse("blockwise", skip="1+0")) == stacks
    assert stacks < gathered_as_codes(shape, Fp8(first=1))
    assert not gathered_as_codes(shape, Fp8("nvfp4"))


def test_latents_shared_experts_and_layers_that_look_ahead() -> None:
    shape = models.load("deepseek-v3")
    found = gathered_as_codes(shape, Fp8(last=1))
    ends = {name.split(".", 2)[2] for name in found if name.startswith("blocks.5.")}
    latents = {f"attention.{one}.weight" for one in ("q_down", "q_up", "kv_down", "kv_up", "out")}
    mlps = {f"mlp.{kind}.{one}.weight" for kind in ROUNDED_MLPS for one in ("gate", "up", "down")}
    assert ends == latents | mlps
    assert not any(name.startswith(f"blocks.{shape.layers - 1}.") for name in found)
    assert "mtp.0.block.attention.out.weight" in found
    assert not any("join" in name or "router" in name for name in found)


def test_bytes_of_a_shard_by_hand() -> None:
    """200 values of a norm and 1,000 of a linear, in 2 bytes, cut into four shards of 304."""
    rows = [LocalWeight("norm", "blocks.0", (200,)), LocalWeight("q", "blocks.0", (10, 100))]
    (unit,) = pack(rows, 4, 2)
    assert unit.shard_size == 304 and is_coded(unit, frozenset({"q"}))
    first, second = (
        [each[:3] for each in segments(unit, place, frozenset({"q"}))] for place in (0, 1)
    )
    assert first == [("norm", 0, 200), ("q", 200, 304)] and second == [("q", 304, 608)]
    assert coded_shard_bytes(unit, frozenset({"q"}), 2) == 512  # 2 · 200 + 104, padded
    assert not is_coded(unit, frozenset({"k"}))
    (alone,) = pack(rows, 1, 2)
    assert not is_coded(alone, frozenset({"q"}))


def test_stacks_are_cut_where_another_scale_begins() -> None:
    """Five experts of 60 values in two shards of 152, before a norm that goes first."""
    rows = [
        LocalWeight("up", "blocks.0", (5, 6, 10), expert=True),
        LocalWeight("norm", "blocks.0", (3,), expert=True),
    ]
    (unit,) = pack(rows, 1, 2, expert_shards=2)
    assert unit.shard_size == 160
    first, second = (segments(unit, place, frozenset({"up"})) for place in (0, 1))
    assert [each[1:] for each in first] == [(0, 120, True, range(2)), (120, 160, True, range(2, 3))]
    assert [each[:3] for each in second[:1]] == [("norm", 304, 307)]
    assert [each[1:] for each in second[1:]] == [
        (160, 180, True, range(2, 3)),
        (180, 300, True, range(3, 5)),
    ]


@pytest.mark.parametrize(("size", "experts"), [(7, 40), (1, 9), (25, 2)])
def test_cuts_are_whole_experts_or_parts_of_one(size: int, experts: int) -> None:
    """No cut is longer than what is widened at once, and together they are everything."""
    for start in (0, 3, size):
        found = list(units.cut_experts(start, stop := size * experts - 1, size, at_once=20))
        assert [start, *(end for _, end, _ in found)] == [*(one for one, _, _ in found), stop]
        for first, end, own in found:
            whole = (first, end) == (own.start * size, own.stop * size)
            assert whole or len(own) == 1
            assert end - first <= 20 and own.start * size <= first < end <= own.stop * size


def test_maxima_of_experts_join_those_of_linears_where_their_ranks_are_the_same() -> None:
    """8 fused matmuls of linears in 2 layers, one of them with 2 grouped ones of 8 experts."""
    wanted = {
        "dp=4": [("fsdp", 4 * (8 + 2 * 8))],
        "dp=4 ep=2": [("edp", 4 * 2 * 4), ("fsdp", 4 * 8)],
        "dp=2 tp=2 etp=2": [("fsdp", 4 * (8 + 2 * 8)), ("tp", 4 * (8 + 2 * 8))],
        "dp=2x2": [("edp", 4 * 2 * 8), ("fsdp", 4 * 8)],
    }
    for layout, maxima in wanted.items():
        keys: dict[str, Any] = {"zero": 3, "precision": "fp8", "set": {"layers": "2"}}
        plan = resolve(PlanOptions("tiny-moe", layout=layout, **keys))
        listed = predict_traffic(plan, 0, itemsize=2)
        sizes = {size for _, size in maxima}
        found = [
            (each.axis, each.bytes)
            for each in listed
            if each.kind == "all_reduce" and each.bytes in sizes and each.count == 1
        ]
        assert sorted(found) == maxima, layout


def test_about_half_the_bytes_of_experts_are_gathered() -> None:
    sizes: dict[str, int] = {}
    for precision, scaling in (("bf16", None), ("fp8", "tensorwise"), ("fp8", "blockwise")):
        keys: dict[str, Any] = {"zero": 3, "precision": precision, "fp8": scaling}
        plan = resolve(PlanOptions("mixtral-8x7b", layout="dp=4 ep=2", **keys))
        listed = predict_traffic(plan, 0, itemsize=2)
        gathers = [each for each in listed if (each.axis, each.kind) == ("edp", "all_gather")]
        sizes[scaling or precision] = sum(each.count * each.bytes for each in gathers)
    assert 2 * sizes["tensorwise"] == 2 * sizes["blockwise"] == sizes["bf16"] > 0


def test_about_half_the_bytes_are_gathered() -> None:
    sizes: dict[str, int] = {}
    for precision in ("bf16", "fp8"):
        options = PlanOptions("llama-3.1-8b", layout="dp=8", zero=3, precision=precision)
        listed = predict_traffic(resolve(options), 0, itemsize=2)
        gathers = [each for each in listed if (each.axis, each.kind) == ("fsdp", "all_gather")]
        sizes[precision] = sum(each.count * each.bytes for each in gathers)
        maxima = [each for each in listed if (each.axis, each.kind) == ("fsdp", "all_reduce")]
        assert [each.bytes for each in maxima] == ([4 * 32 * 4] if precision == "fp8" else [])
    assert 0.5 < sizes["fp8"] / sizes["bf16"] < 0.6  # embedding and head stay
