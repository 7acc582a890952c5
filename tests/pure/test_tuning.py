"""Which weights learn, the rows of adapters in the table of weights, and their flat units."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fivefold.core import hardware as machine
from fivefold.core.errors import FivefoldError
from fivefold.core.layout.layout import Layout
from fivefold.core.layout.weight_table import (
    by_name,
    computed_flops,
    local_shape,
    shard_of,
    weights,
)
from fivefold.core.model import presets as models
from fivefold.core.model.shape import forward_flops, training_flops
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.plan.recipe import Recipe
from fivefold.cost.memory.static import static_bytes
from fivefold.cost.traffic.collectives import predict_traffic, units_of
from fivefold.planner.estimate import Estimate, estimate_plan
from fivefold.planner.planning import estimate_on_machine
from fivefold.planner.setting import estimate_setting
from fivefold.records import steps as records


def plan_of(model: str = "tiny", layout: str = "dp=1", **train: Any) -> Plan:
    zero = train.pop("zero", None)
    return resolve(PlanOptions(model, layout=layout, zero=zero, train=Recipe(**train)), small=True)


def test_adapters_stand_beside_their_linears_and_learn_alone() -> None:
    shape = plan_of(lora=4, lora_targets="q_proj+mlp.down").shape
    rows = [one for one in weights(shape) if one.block == "blocks.1"]
    learned = {one.name: (one.shape, one.cut, one.spread) for one in rows if not one.frozen}
    name = "blocks.1"
    assert learned == {
        f"{name}.attention.q.lora.a": ((4, 64), "whole", True),
        f"{name}.attention.q.lora.b": ((64, 4), "column", False),
        f"{name}.mlp.down.lora.a": ((4, 176), "row", False),
        f"{name}.mlp.down.lora.b": ((64, 4), "whole", True),
    }


def test_parts_of_names_say_what_learns() -> None:
    def learned(parts: str) -> set[str]:
        shape = plan_of(train_only=parts).shape
        return {one.name for one in weights(shape) if not one.frozen}

    assert learned("head") == {"head.weight"}
    assert learned("norm") == {"norm.weight"}
    assert learned("blocks.1.*norm") == {
        "blocks.1.attention_norm.weight",
        "blocks.1.mlp_norm.weight",
    }
    both = plan_of(lora=2, train_only="head").shape
    kinds = {one.name for one in weights(both) if not one.frozen}
    assert "head.weight" in kinds and "blocks.0.attention.k.lora.a" in kinds
    assert "blocks.0.attention.k.weight" not in kinds


def test_adapters_of_experts_are_cut_as_the_experts_are() -> None:
    shape, layout = plan_of("tiny-moe", lora=4).shape, Layout(shard=4, ep=2, etp=2)
    table, at = by_name(shape), layout.coord(3)
    found = {
        kind: shard_of(table[f"blocks.3.mlp.experts.{kind}"], shape, layout, at)
        for kind in ("up.lora.a", "up.lora.b", "down.lora.a", "down.lora.b")
    }
    sizes = {
        kind: local_shape(table[f"blocks.3.mlp.experts.{kind}"], one) for kind, one in found.items()
    }
    experts, ffn, width = 4, 32, 64
    assert sizes == {
        "up.lora.a": (experts, 4, width),
        "up.lora.b": (experts, ffn, 4),
        "down.lora.a": (experts, 4, ffn),
        "down.lora.b": (experts, width, 4),
    }
    assert {kind for kind, one in found.items() if one.partial} == {"up.lora.a", "down.lora.b"}
    assert all(one.sum_axis == "etp" for one in found.values())


@pytest.mark.parametrize("zero", range(4))
def test_frozen_units_are_cut_by_zero_3_only_and_never_reduced(zero: int) -> None:
    plan = plan_of(layout="dp=2", lora=4, zero=zero)
    units = units_of(plan, 0, 8)
    assert {unit.frozen for unit in units} == {True, False}
    assert all(unit.num_shards == (2 if zero == 3 else 1) for unit in units if unit.frozen)
    learned = sum(unit.size for unit in units if not unit.frozen)
    reduced = {"all_reduce": 1, "reduce_scatter": 1}
    sent = [
        each
        for each in predict_traffic(plan, 0, itemsize=8)
        if each.kind in reduced and each.axis in ("dp-cp", "fsdp") and each.bytes > 8
    ]
    assert sum(each.bytes for each in sent) == 8 * learned


def test_only_what_learns_has_gradients_and_states() -> None:
    full, part = plan_of(layout="dp=2", zero=1), plan_of(layout="dp=2", zero=1, lora=4)
    before, after = (static_bytes(one, 0, itemsize=8, optimizer="adamw") for one in (full, part))
    adapters = sum(one.numel for one in weights(part.shape) if not one.frozen)
    assert after.weights == before.weights + 8 * adapters
    assert after.gradients == after.optimizer // 2 == 8 * adapters // 2
    assert before.gradients > 5 * after.gradients


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"train_only": "headd"}, "did you mean head"),
        ({"lora": 4, "lora_targets": "q+norm"}, "lora_targets 'norm'"),
        ({"lora": -1}, "lora = -1: at least 0"),
        ({"lora_targets": "q"}, "say lora = RANK"),
        ({"lora": 4, "lora_alpha": 0.0}, "lora_alpha = 0.0: above 0"),
        ({"lora": 4, "optimizer": "muon"}, "use adamw or sgd"),
    ],
)
def test_what_cannot_be_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(FivefoldError, match=words):
        plan_of(**said)


def test_fp8_is_refused() -> None:
    options = PlanOptions("tiny", precision="fp8", train=Recipe(lora=4))
    with pytest.raises(FivefoldError, match="use precision = bf16"):
        resolve(options)


def test_a_plan_with_adapters_is_smaller_and_faster() -> None:
    def planned(**train: Any) -> Estimate:
        keys: dict[str, Any] = {"layout": "dp=8", "zero": 1, "gpus": 8, "machine": "h200"}
        plan = resolve(PlanOptions("llama-3.1-8b", train=Recipe(**train), **keys))
        assert plan.machine is not None
        return estimate_on_machine(plan, plan.machine, precision="bf16", headroom=0.05)

    full, part, head = planned(), planned(lora=16), planned(train_only="head")
    states = ("gradients", "master", "optimizer")
    for name in states:
        assert part.memory[name] < 0.02 * full.memory[name]
        assert head.memory[name] < 0.1 * full.memory[name]
    assert part.memory["weights"] == pytest.approx(full.memory["weights"], rel=0.01)
    assert 1.25 < full.step / part.step < 1.5
    assert head.step == pytest.approx(full.step, rel=0.05)


def test_mfu_counts_what_a_frozen_model_computes() -> None:
    """By hand: forward and input gradients of all linears, both gradients of scores, adapters in
    three passes, and no weight gradient of a frozen weight; the same in plan and run."""
    shape, seq, rank = models.load("llama-3.1-8b"), 4096, 16
    options = PlanOptions(shape.name, layout="dp=8", zero=3, machine="h100", seq=seq)
    plan = resolve(replace(options, train=Recipe(lora=rank)))
    width, ffn, heads, kv = shape.width, shape.ffn, 4096, 1024
    linears = shape.layers * (2 * width * heads + 2 * width * kv + 3 * width * ffn)
    norms = (2 * shape.layers + 1) * width
    passes = 4 * (linears + shape.vocab * width + norms) - 2 * width  # the last norm: forward alone
    scores = 3 * shape.layers * 2 * 2 * shape.heads * shape.head_dim * seq / 2
    pairs = 2 * (width + heads) + 2 * (width + kv) + 3 * (width + ffn)
    by_hand = passes + scores + 6 * rank * shape.layers * pairs
    assert computed_flops(plan.shape, seq) == pytest.approx(by_hand, rel=1e-6)
    full = training_flops(shape, seq).total
    assert computed_flops(shape, seq) == full > 1.35 * computed_flops(plan.shape, seq)
    setting, _ = estimate_setting(machine.load("h100"), "bf16", 0.05, "compiled", 1.0)
    one = estimate_plan(plan, setting)
    assert one.mfu == pytest.approx(records.mfu(plan, 8 * one.tokens_per_s_per_gpu))
    assert one.mfu < 0.65, "adapters do not make matmuls faster than they are"
    ends = [resolve(replace(options, train=Recipe(train_only=part))) for part in ("head", "embed")]
    head, embedding = (computed_flops(each.shape, seq) for each in ends)
    forward = forward_flops(shape, seq)
    assert head == pytest.approx(forward.total + 2 * forward.head, rel=1e-6), "no block's backward"
    inputs = forward.total + forward.scores - 2 * width
    assert embedding == pytest.approx(forward.total + inputs, rel=1e-6), "a lookup has no matmul"
