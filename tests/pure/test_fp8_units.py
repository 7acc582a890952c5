"""Which weights ZeRO-3 gathers as fp8 codes, and the bytes of a shard."""

from __future__ import annotations

from fivefold.core import models
from fivefold.core.fp8 import Fp8
from fivefold.core.fp8_units import coded_shard_bytes, gathered_as_codes, is_coded, segments
from fivefold.core.plan import PlanOptions, resolve
from fivefold.core.units import LocalWeight, pack
from fivefold.cost.collectives import predict_traffic

LINEARS = {"attention.q", "attention.k", "attention.v", "attention.out"} | {
    f"mlp.{one}" for one in ("gate", "up", "down")
}


def test_linears_of_rounded_layers() -> None:
    shape = models.with_overrides(models.load("tiny"), {"layers": "3"})
    found = gathered_as_codes(shape, Fp8(first=1))
    assert found == {f"blocks.{layer}.{one}.weight" for layer in (1, 2) for one in LINEARS}
    assert not gathered_as_codes(shape, None)
    assert not gathered_as_codes(shape, Fp8.parse("blockwise")), "blocks are not known before"


def test_latents_shared_experts_and_layers_that_look_ahead() -> None:
    shape = models.load("deepseek-v3")
    found = gathered_as_codes(shape, Fp8(last=1))
    ends = {name.split(".", 2)[2] for name in found if name.startswith("blocks.5.")}
    latents = {f"attention.{one}.weight" for one in ("q_down", "q_up", "kv_down", "kv_up", "out")}
    assert ends == latents | {f"mlp.shared.{one}.weight" for one in ("gate", "up", "down")}
    assert not any(name.startswith(f"blocks.{shape.layers - 1}.") for name in found)
    assert "mtp.0.block.attention.out.weight" in found
    assert not any("join" in name or "experts." in name or "router" in name for name in found)


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
