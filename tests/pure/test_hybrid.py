"""Hybrids, which have attention in some layers only: counted layer by layer, planned by the same
functions as other models, and never built."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hf_configs import CONFIGS
from one_layout import grid_of

from fivefold.bridges.megatron import find_model, model_arguments
from fivefold.cli import main
from fivefold.commands.plan import plan_serving
from fivefold.core import hardware as machine
from fivefold.core.errors import BadFile, FivefoldError, IllegalLayout
from fivefold.core.layout.splits import flops_by_layer
from fivefold.core.layout.weight_table import planned_weights, tp_shard
from fivefold.core.model import layer_flops, layer_kinds, layer_parameters, parameters
from fivefold.core.model.hf_config import shape_from_config
from fivefold.core.model.mixers import Mixer, MixerTokens, MixerWeight
from fivefold.core.model.presets import load, to_text, with_overrides
from fivefold.core.model.shape import Rope, Shape
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.cost.hardware.stack import Split
from fivefold.cost.layer.attention_sizes import MixerSizes
from fivefold.cost.stages.ranks import rank_stages
from fivefold.cost.traffic.collectives import predict_traffic
from fivefold.cost.traffic.data_axis import Collective, RankChunk, context_collectives
from fivefold.planner.estimate import estimate_plan
from fivefold.planner.setting import estimate_setting
from fivefold.planner.space import SearchSpace, all_degrees

NEXT = "qwen3-next-80b-a3b"
SHAPE = load(NEXT)
SETTING, _ = estimate_setting(machine.load("h100"), "bf16", 0.0, "compiled", 1.0)


def planned(shape: Shape, layout: str, **keys: Any) -> Plan:
    options = {"machine": "h100", "seq": 4096, "microbatches": 8, **keys}
    return resolve(PlanOptions(to_text(shape), layout=layout, **options))


def figures(shape: Shape, layout: str, **keys: Any) -> tuple[float, float, object]:
    """Seconds, bytes of the fullest rank, and collectives of one plan."""
    plan = planned(shape, layout, **keys)
    found = estimate_plan(plan, SETTING)
    return found.step, sum(found.memory.values()), predict_traffic(plan, 0, itemsize=2)


def every(number: int, **changes: Any) -> Shape:
    assert SHAPE.hybrid is not None
    hybrid = replace(SHAPE.hybrid, attention_every=number)
    return replace(SHAPE, layers=8, hybrid=hybrid, **changes)


def test_each_fourth_layer_has_attention() -> None:
    assert [i for i in range(48) if not SHAPE.is_recurrent(i)] == [*range(3, 48, 4)]
    assert layer_kinds(SHAPE) == {0: 36, 3: 12}
    names = {one.name for one in planned_weights(replace(SHAPE, mtp=1))}
    assert {"blocks.0.attention.z.weight", "blocks.3.attention.gate.weight"} <= names
    assert "mtp.0.block.attention.gate.weight" in names  # as the last layer
    assert not {"blocks.3.attention.z.weight", "blocks.0.attention.gate.weight"} & names


def test_only_layers_with_attention_rotate() -> None:
    factors = (2.0,) * (SHAPE.rotated_dim // 2)
    rotated = replace(SHAPE, rope=Rope("longrope", 8.0, 4096, short=factors, long=factors))
    assert rotated.outgrown_at == 4096 and rotated.of_mixer == SHAPE.of_mixer


@pytest.mark.parametrize("layout", ["dp=4 ep=2", "dp=2 tp=2 pp=2", "dp=2 cp=2"])
def test_attention_in_all_layers_is_planned_as_without_a_hybrid(layout: str) -> None:
    one, four = (every(number, attention_gate=False) for number in (1, 4))
    plain = figures(replace(one, hybrid=None), layout, context="ulysses")
    assert figures(one, layout, context="ulysses") == plain
    assert figures(four, layout, context="ulysses") != plain


@pytest.mark.parametrize("layout", ["dp=4 ep=2", "dp=2 tp=2 pp=2"])
def test_no_attention_at_all_is_planned_as_an_own_mixer(layout: str) -> None:
    shape = every(9, positions="none", rotary_dim=None)
    assert figures(shape, layout) == figures(shape.of_mixer, layout)


def test_memory_and_time_lie_between_those_of_either_kind() -> None:
    ends = [figures(every(n), "dp=4 ep=2", recompute="none")[:2] for n in (1, 9)]
    step, memory, _ = figures(every(4), "dp=4 ep=2", recompute="none")
    for mine, low, high in zip((step, memory), *map(sorted, zip(*ends, strict=True)), strict=False):
        assert low < mine < high or high < mine < low


def test_context_ranks_exchange_what_each_layer_has() -> None:
    """Of eight layers two have attention, whose keys and values are few; the other six have not."""

    def exchanged(shape: Shape) -> Counter[Collective]:
        plan = planned(shape, "cp=2", context="ulysses")
        return context_collectives(plan, RankChunk(range(8), 1, ()), itemsize=2)

    plain = {"attention_gate": False, "positions": "none", "rotary_dim": None}
    shapes = [every(number, **plain) for number in (1, 4, 9)]
    attention, mixed, recurrent = map(exchanged, shapes)
    assert attention == exchanged(replace(shapes[0], hybrid=None)) != recurrent
    assert {call: 8 * times for call, times in mixed.items()} == {
        call: 2 * attention[call] + 6 * recurrent[call] for call in attention | recurrent
    }


@pytest.mark.parametrize("split", ["even", "short-ends"])
def test_layers_without_attention_are_an_even_share_of_each_stage(split: Split) -> None:
    """Three of four layers have none."""
    stages = [*rank_stages(SHAPE, split, grid_of(pp=4, microbatches=8), 4096)]
    shares = [(stage.layers.recurrent / stage.layers.all).item() for stage in stages]
    assert shares == [0.75] * len(stages)


def test_a_gate_after_attention_is_counted() -> None:
    gated, plain = (every(1, attention_gate=gate) for gate in (True, False))
    wide = 16 * 256 * 2048
    assert parameters(gated).total - parameters(plain).total == 8 * wide
    assert layer_flops(gated, 0, 4096).total - layer_flops(plain, 0, 4096).total == (2 * wide)
    with_gate, without = (figures(each, "dp=4 ep=2", recompute="none") for each in (gated, plain))
    assert with_gate[0] > without[0] and with_gate[1] > without[1]


def test_stages_are_cut_by_the_cost_of_their_layers() -> None:
    """Over 262,144 tokens a layer with attention takes several times as long."""
    long = flops_by_layer(SHAPE, 262_144)
    assert long[3] > 4 * long[0]
    stages = planned(SHAPE, "dp=2 pp=8 ep=2", seq=262_144).stages
    costs = [sum(long[i] for i in layers) for layers in stages]
    even = [sum(long[i] for i in range(n, n + 6)) for n in range(0, 48, 6)]
    assert max(costs) < max(even) and len({len(each) for each in stages}) > 1


def test_key_heads_are_split_with_their_heads() -> None:
    rows = {one.name: one for one in planned_weights(SHAPE)}
    sizes = {"q": 2048, "k": 2048, "v": 4096, "z": 4096, "a": 32, "b": 32}
    for name, size in sizes.items():
        shard = tp_shard(rows[f"blocks.0.attention.{name}.weight"], SHAPE, 16, True, 1)
        assert (shard.start, shard.stop, shard.copies) == (size // 16, size // 8, 1)


@pytest.mark.parametrize(
    ("layout", "keys", "named"),
    [
        ("tp=8", {"set": {"hybrid.key_heads": "4"}}, "tp=8 does not divide key heads of the rec"),
        ("cp=2", {}, "cp=2 with context=zigzag is for attention, and mixer gated-delta"),
        ("cp=16", {"context": "ulysses", "set": {"hybrid.key_heads": "8"}}, "cp=16 does not divi"),
        ("dp=2", {"precision": "fp8"}, "fp8 with mixer gated-delta"),
        ("dp=2", {"recompute": "full-but-attention"}, "keeps attention with mixer gated-delta"),
        ("dp=2", {"set": {"hybrid.key_heads": "3"}}, "hybrid.heads = 32 is no multiple of hybrid"),
        ("dp=2", {"set": {"hybrid.kernel": "0"}}, "hybrid.kernel = 0: must be above 0"),
        ("dp=2", {"set": {"hybrid.mixer": "mamba"}}, "mixer 'mamba' is not known in this process"),
        ("dp=2", {"set": {"mixer": "gated-delta"}, "model": "tiny"}, "has its sizes in hybrid"),
    ],
)
def test_what_has_no_rule_is_refused(layout: str, keys: dict[str, Any], named: str) -> None:
    options = {"model": NEXT, "seq": 4096, **keys}
    with pytest.raises((FivefoldError, IllegalLayout), match=named):
        resolve(PlanOptions(layout=layout, **options))


def test_a_search_has_no_rings() -> None:
    space = SearchSpace(SHAPE, 64, 4096, 64)
    contexts = {(one.cp > 1, one.context) for one in all_degrees(space)}
    assert (True, "ulysses") in contexts
    assert {context for split, context in contexts if split} == {"ulysses"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention"] + ["linear_attention"] * 47}, "each n-th layer only"),
        ({"layer_types": "linear"}, "must be a list"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"linear_num_value_heads": 24}, "hybrid.heads = 24 is no multiple"),
    ],
)
def test_a_config_that_is_no_hybrid_of_this_form(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BadFile, match=named):
        shape_from_config(CONFIGS[NEXT] | changes, "config.json")


def test_layer_types_and_interval_are_the_same() -> None:
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 12
    listed = CONFIGS[NEXT] | {"layer_types": kinds, "full_attention_interval": None}
    assert shape_from_config(listed, "config.json") == SHAPE
    assert with_overrides(SHAPE, {"hybrid.attention_every": "6"}).is_recurrent(3)


def test_a_plan_says_what_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", NEXT, "--machine", "h100", "--gpus", "64", "--json"])
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert not ended.value.code
    assert any("gated-delta" in note and "was not measured" in note for note in notes)


def test_a_serving_plan_is_refused() -> None:
    with pytest.raises(FivefoldError, match="and mixer gated-delta has states"):
        plan_serving(NEXT, machine="h100", gpus=8)


class Scan(Mixer, name="test-hybrid-scan"):
    """Another recurrence, as someone would add it: a table and a cost."""

    def table(self, shape: Shape) -> Sequence[MixerWeight]:
        return (
            MixerWeight("x", (shape.heads * shape.head_dim, shape.width), "heads"),
            MixerWeight("out", (shape.width, shape.heads * shape.head_dim), "heads", "mixed"),
        )

    def mix(self, shape: Shape, tensors: Mapping[str, Any], tokens: MixerTokens) -> Any:
        raise FivefoldError("planned only")


def test_another_recurrence_is_a_class_and_its_name() -> None:
    shape = with_overrides(SHAPE, {"hybrid.mixer": Scan.name, "layers": "8"})
    rows = [one.name for one in planned_weights(shape) if ".attention.x." in one.name]
    assert rows == [f"blocks.{i}.attention.x.weight" for i in (0, 1, 2, 4, 5, 6)]
    assert layer_parameters(shape, 0).attention == 2 * 2048 * 4096
    assert figures(shape, "dp=4 ep=2")[0] < figures(every(4), "dp=4 ep=2")[0]


def test_megatron_has_arguments_for_it() -> None:
    flat = model_arguments(SHAPE)
    assert flat["experimental-attention-variant"] == "gdn"
    found = find_model(flat | {"experimental-attention-variant": "gated_delta_net"}).model
    assert found is not None and SHAPE.moe is not None
    # Only that weights of chosen experts sum to one is said by no argument.
    assert load(found) == replace(SHAPE, moe=replace(SHAPE.moe, renormalise=False))
    with pytest.raises(FivefoldError, match="attention-variant = dsa: known here is gdn"):
        find_model(flat | {"experimental-attention-variant": "dsa"})


def test_a_curve_over_lengths_has_the_costs_of_each() -> None:
    tp, lengths = np.array([1.0, 2.0])[:, None], np.array([16, 64, 4096])
    curve = MixerSizes.of(SHAPE.of_mixer, tp, lengths)
    assert curve is not None and curve.flops.shape == (2, 3)
    for at, length in enumerate(lengths):
        alone = MixerSizes.of(SHAPE.of_mixer, tp, int(length))
        assert alone is not None
        for name in ("flops", "saved", "moved"):
            assert np.array_equal(getattr(curve, name)[:, at], getattr(alone, name)[:, 0])
    assert curve.flops[0, 0] < curve.flops[0, 1]  # a chunk is no longer than its sequence
