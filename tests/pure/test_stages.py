"""How layers are dealt to pipeline stages: by cost, against trying every cut, or as a user says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core import hardware as machine
from fivefold.core.errors import FivefoldError
from fivefold.core.layout import splits
from fivefold.core.layout.splits import folded_ends
from fivefold.core.model import forward_flops, parameters
from fivefold.core.model import presets as models
from fivefold.core.model.shape import Moe, Shape
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.grid import grid_of_plan
from fivefold.cost.hardware.stack import FIVEFOLD
from fivefold.cost.step.time import step_time
from fivefold.planner.estimate import estimate_plan
from fivefold.planner.setting import EstimateSetting
from tests.selection import within

LLAMA_405B = models.load("llama-3.1-405b")
TINY = models.load("tiny")


def lengths(shape: Shape, num_stages: int, seq: int | None = None) -> list[int]:
    return [len(layers) for layers in splits.cut_stages(shape, num_stages, seq=seq)]


@pytest.mark.parametrize("seq", [8_192, 131_072])
def test_llama_405b_is_cut_as_its_authors_did(seq: int) -> None:
    """One layer fewer on the first and on the last of 16 stages (Llama team 2024, §3.3.2)."""
    assert lengths(LLAMA_405B, 16, seq) == [7, *[8] * 14, 7]


def test_the_head_weighs_on_the_last_stage() -> None:
    # 256 times the vocabulary of 256: 8.4 M FLOPs a token for the head, 0.35 M for a layer.
    wide = models.with_overrides(TINY, {"vocab": "65536"})
    assert lengths(TINY, 2) == [4, 4]
    assert lengths(wide, 2) == [7, 1]
    assert lengths(wide, 4) == [1, 3, 3, 1]  # the embedding makes the first stage large


def test_dense_layers_in_front_of_experts_are_cheaper() -> None:
    # 4 experts of 4·ffn for each token: such a layer computes 14 times what a dense one does.
    heavy = models.with_overrides(
        models.load("tiny-moe"),
        {"layers": "12", "moe.first_dense": "8", "moe.top_k": "4", "moe.ffn": "704", "vocab": "1"},
    )
    assert lengths(heavy, 4, seq=32) == [9, 1, 1, 1]


def test_multi_token_prediction_runs_on_the_last_stage() -> None:
    # 61 layers; behind the last come the head, one more layer and the head once more.
    assert lengths(models.load("deepseek-v3"), 16, 4096) == [*[4] * 15, 1]


def test_cost_is_that_of_the_whole_model() -> None:
    for name in ("llama-3.1-8b", "deepseek-v3", "gpt2", "bloom-176b"):
        shape = models.load(name)
        flops = forward_flops(shape, 2048).total
        assert sum(splits.flops_by_layer(shape, 2048)) == pytest.approx(flops, rel=1e-12), name
        sizes = parameters(shape)
        copy = shape.ends_share * shape.vocab * shape.width
        assert sum(splits.parameters_by_layer(shape, 1)) == sizes.total + sizes.mtp, name
        assert sum(splits.parameters_by_layer(shape, 2)) == sizes.total + sizes.mtp + copy, name


shapes = st.builds(
    Shape,
    name=st.just("drawn"),
    layers=st.integers(2, 9),
    width=st.sampled_from([8, 64]),
    heads=st.just(2),
    kv_heads=st.just(1),
    head_dim=st.just(4),
    ffn=st.sampled_from([8, 200]),
    vocab=st.sampled_from([1, 300, 3000]),
    max_seq=st.sampled_from([16, 4096]),
    tied=st.booleans(),
    moe=st.none() | st.builds(Moe, st.just(2), st.just(1), st.just(64), every=st.integers(1, 2)),
    window=st.none() | st.just(8),
    global_every=st.none() | st.just(3),
    mtp=st.integers(0, 1),
)


@settings(max_examples=200)
@given(drawn=shapes.flatmap(lambda s: st.tuples(st.just(s), st.integers(1, s.layers))))
def test_no_other_cut_is_better(drawn: tuple[Shape, int]) -> None:
    model, num_stages = drawn
    costs, sizes = (
        splits.flops_by_layer(model, model.max_seq),
        splits.parameters_by_layer(model, num_stages),
    )

    def worth(spans: list[slice]) -> tuple[int, int]:
        return max(sum(costs[s]) for s in spans), sum(sum(sizes[s]) ** 2 for s in spans)

    layers = model.layers
    every = [
        [slice(*span) for span in pairwise((0, *inner, layers))]
        for inner in combinations(range(1, layers), num_stages - 1)
    ]
    found = splits.cut_stages(model, num_stages)
    assert [i for span in found for i in span] == list(range(layers))
    assert len(found) == num_stages and all(found)
    assert worth([slice(span.start, span.stop) for span in found]) == min(map(worth, every))


@pytest.mark.parametrize(("layers", "num_stages"), [(126, 16), (126, 64), (1000, 64)])
@pytest.mark.parametrize("vocab", [128_256, 10_000_000])
def test_deep_models_are_cut_in_time(layers: int, num_stages: int, vocab: int) -> None:
    shape = models.with_overrides(TINY, {"layers": str(layers), "vocab": str(vocab)})
    with within(1.5, time.process_time):
        assert sum(lengths(shape, num_stages)) == layers


def test_a_user_may_say_the_layers_of_each_stage() -> None:
    assert splits.cut_stages(TINY, 3, (1, 5, 2)) == (range(0, 1), range(1, 6), range(6, 8))
    assert splits.parse_stage_layers(" 1, 5 2 ") == (1, 5, 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((4, 4), "is for 2 stages and the pipeline has 3: give 3 numbers"),
        ((3, 3, 3), "sum to 9, and the model has 8 layers: give numbers that sum to 8"),
        ((0, 4, 4), "every stage needs a layer"),
        ((), "give 3 numbers"),
    ],
)
def test_wrong_layers_are_refused(given: tuple[int, ...], says: str) -> None:
    with pytest.raises(FivefoldError, match=says):
        splits.cut_stages(TINY, 3, given)


@pytest.mark.parametrize("text", ["", "7;8", "7,x", "0,8", "-1,9", "4.5,3.5", "9999999"])
def test_text_that_is_no_list_of_layers(text: str) -> None:
    with pytest.raises(FivefoldError, match="such as 7,8,8,7"):
        splits.parse_stage_layers(text)


@pytest.mark.parametrize("num_stages", [0, 9])
def test_every_stage_needs_a_layer(num_stages: int) -> None:
    with pytest.raises(FivefoldError, match="use 1 to 8"):
        splits.cut_stages(TINY, num_stages)


# On a V a rank has two stages, and the slowest rank sets the pace


def slowest_rank(costs: list[int], spans: Sequence[range]) -> int:
    stages = [sum(costs[i] for i in span) for span in spans]
    return max(near + far for near, far in zip(stages, reversed(stages), strict=True))


@settings(max_examples=150)
@given(st.integers(2, 10), st.integers(0, 3), st.integers(0, 40_000), st.data())
def test_no_other_cut_of_a_v_has_a_faster_rank(
    layers: int, dense: int, vocab: int, data: st.DataObject
) -> None:
    """Against all cuts, for models with some cheaper layers in front and any head."""
    num_ranks = data.draw(st.integers(1, layers // 2))
    changes = {"layers": layers, "vocab": vocab + 1, "moe.first_dense": min(dense, layers - 1)}
    model = models.with_overrides(
        models.load("tiny-moe"), {key: str(value) for key, value in changes.items()}
    )
    costs = splits.flops_by_layer(model, model.max_seq)
    every = (
        [range(*span) for span in pairwise((0, *inner, layers))]
        for inner in combinations(range(1, layers), 2 * num_ranks - 1)
    )
    found = splits.cut_stages(model, 2 * num_ranks, folded=True)
    assert [i for span in found for i in span] == list(range(layers))
    assert len(found) == 2 * num_ranks and all(found)
    assert slowest_rank(costs, found) == min(slowest_rank(costs, cut) for cut in every)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=14), st.data())
def test_a_v_of_any_layers_is_never_slower_than_a_cut_by_stages(
    costs: list[int], data: st.DataObject
) -> None:
    num_stages = 2 * data.draw(st.integers(2, len(costs) // 2))
    inner = data.draw(
        st.lists(
            st.integers(1, len(costs) - 1),
            min_size=num_stages - 1,
            max_size=num_stages - 1,
            unique=True,
        )
    )
    by_stage = [*sorted(inner), len(costs)]
    ends = folded_ends(costs, by_stage)
    cuts = [[range(*span) for span in pairwise((0, *each))] for each in (ends, by_stage)]
    assert all(cuts[0]) and len(ends) == num_stages and ends[-1] == len(costs)
    assert slowest_rank(costs, cuts[0]) <= slowest_rank(costs, cuts[1])


def test_the_first_rank_of_a_v_has_both_ends_of_the_model() -> None:
    """DeepSeek-V3 on a V of 16: by stages, the first rank has 4 layers, the head and its MTP."""
    shape = models.load("deepseek-v3")
    assert lengths(shape, 32, 4096)[0] == 4
    folded = [len(span) for span in splits.cut_stages(shape, 32, seq=4096, folded=True)]
    assert folded == [1, 1, 3, *[2] * 27, 1, 1]
    plan = resolve(
        PlanOptions(
            model="deepseek-v3",
            layout="dp=8 pp=16 ep=8",
            schedule="zb-v",
            microbatches=32,
            seq=4096,
        )
    )
    assert [len(span) for span in plan.stages] == folded


@pytest.mark.parametrize(
    ("schedule", "share"), [("zb-v", 0.9), ("v-half", 0.9), ("v-min", 1.0), ("dualpipe-v", 0.9)]
)
def test_a_v_is_planned_faster_than_with_stages_cut_one_by_one(schedule: str, share: float) -> None:
    """The planned step, which is also that of the search. The pace of V-Min is that of its slowest
    slot, so it gains least."""
    setting = EstimateSetting(machine.load("h800"), FIVEFOLD, "bf16")
    options = PlanOptions(
        model="deepseek-v3", layout="dp=128 pp=16 ep=64", schedule=schedule, microbatches=120,
        seq=4096, zero=1, recompute="selective",
    )  # fmt: skip
    plan = resolve(options)
    by_stage = ",".join(map(str, lengths(plan.shape, 32, 4096)))
    planned = estimate_plan(plan, setting)
    before = estimate_plan(resolve(replace(options, stage_layers=by_stage)), setting)
    assert planned.step < share * before.step
    assert planned.total < before.total
    job = setting.arguments(plan.shape, grid_of_plan(plan), 4096)
    searched = float(step_time(*job, simulated=True).step.item())
    assert searched == pytest.approx(planned.step, rel=1e-6)


def test_deep_models_are_folded() -> None:
    shape = models.with_overrides(TINY, {"layers": "200", "vocab": "10000000"})
    assert sum(map(len, splits.cut_stages(shape, 64, folded=True))) == 200
