"""Layout values: grid, coords, groups, tiers, readings and the text form."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.core import hardware as machine
from fivefold.core.errors import BadFile, FivefoldError, IllegalLayout, UnknownName
from fivefold.core.hardware import Tier
from fivefold.core.layout.layout import AXES, DEGREES, Coord, Layout, Order, parse_zero

SMALL = st.integers(1, 3)
DATA_OUTERMOST = "order=tp-cp-pp-dp"

# Which coords a group of the axis varies; the others it shares.
VARIES = {
    "dp": {"dp", "replicate", "shard"},
    "replicate": {"dp", "replicate"},
    "shard": {"dp", "shard"},
    "fsdp": {"dp", "shard", "cp"},
    "dp-cp": {"dp", "replicate", "shard", "cp"},
    "tp": {"tp"},
    "cp": {"cp"},
    "pp": {"pp"},
    "ep": {"ep"},
    "etp": {"etp"},
    "edp": {"edp"},
    "row": {"cp", "tp"},
}
DENSE = {"dp", "replicate", "shard", "cp", "tp"}
EXPERT = {"ep", "etp", "edp"}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout whose experts fold, in either order."""
    dense = {axis: draw(SMALL) for axis in ("replicate", "shard", "tp", "pp", "cp")}
    order = draw(st.sampled_from(get_args(Order)))
    size = Layout(**dense).stage_size
    ep = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
    rest = size // ep
    etp = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
    return Layout(**dense, ep=ep, etp=etp, order=order)


def groups_by_definition(layout: Layout, axis: str) -> set[tuple[int, ...]]:
    """Collect the ranks that share every other coord, one rank at a time.

    A group along a dense axis shares the other dense coords; one along an expert axis the other
    expert coords: the two families number the same ranks of a stage.
    """
    family = EXPERT if axis in EXPERT else DENSE
    if axis == "row" and not layout.sp:
        axis = "cp"  # all tp ranks have the same tokens
    shared = (family | {"pp"}) - VARIES[axis]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world):
        coord = layout.coord(rank)
        found.setdefault(tuple(getattr(coord, name) for name in sorted(shared)), []).append(rank)
    return {tuple(group) for group in found.values()}


# ---- the grid and its laws


@settings(max_examples=60)
@given(layouts(), st.booleans())
def test_groups_partition_the_ranks_as_the_coords_define(layout: Layout, sp: bool) -> None:
    layout = replace(layout, sp=sp)
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
        assert set(groups) == groups_by_definition(layout, axis)
        assert all(layout.group(axis, rank) == group for group in groups for rank in group)
        assert list(groups) == sorted(groups)


def test_replicas_of_experts_with_the_same_tokens() -> None:
    """Without sequence parallelism, tp ranks that are not ranks of one expert."""
    assert Layout(tp=4, etp=2, sp=False).same_tokens == 2
    assert Layout(tp=4, shard=2, sp=False).same_tokens == 4
    assert Layout(tp=4, etp=4, ep=2, shard=2, sp=False).same_tokens == 1
    assert Layout(tp=4, shard=2).same_tokens == 1


@given(layouts())
def test_coord_and_rank_are_inverse_and_agree_with_the_grid(layout: Layout) -> None:
    grid = layout.grid()
    for rank in range(layout.world):
        at = layout.coord(rank)
        assert layout.rank(dp=at.dp, cp=at.cp, tp=at.tp, pp=at.pp) == rank
        assert at.dp == at.replicate * layout.shard + at.shard
        place = tuple(getattr(at, axis) for axis in reversed(layout.order.split("-")))
        assert grid[place] == rank


@given(layouts())
def test_experts_take_the_fastest_ranks_first(layout: Layout) -> None:
    for rank in range(layout.world):
        at = layout.coord(rank)
        dense = at.tp + layout.tp * (at.cp + layout.cp * at.dp)
        expert = at.etp + layout.etp * (at.ep + layout.ep * at.edp)
        assert dense == expert
        assert at.edp < layout.edp
        assert at.ep < layout.ep
        assert at.etp < layout.etp


def test_the_grid_is_one_array_with_tp_innermost() -> None:
    layout = Layout.parse("dp=2 tp=2 pp=2")
    assert layout.grid().tolist() == [[[[0, 1]], [[2, 3]]], [[[4, 5]], [[6, 7]]]]
    data_outermost = Layout.parse(f"dp=2 tp=2 pp=3 cp=5 {DATA_OUTERMOST}")
    assert data_outermost.grid().shape == (2, 3, 5, 2)


# ---- vectors computed by hand


def test_tp8_pp4_dp2_with_pipeline_outermost() -> None:
    layout = Layout.parse("tp=8 pp=4 dp=2")  # rank = tp + 8·(dp + 2·pp)
    assert layout.world == 64
    assert layout.groups("tp")[1] == (8, 9, 10, 11, 12, 13, 14, 15)
    assert layout.group("dp", 19) == (19, 27)
    assert layout.group("pp", 3) == (3, 19, 35, 51)
    assert layout.coord(29) == Coord(
        dp=1, replicate=0, shard=1, cp=0, tp=5, pp=1, ep=0, etp=0, edp=13
    )
    assert layout.rank(dp=1, tp=5, pp=1) == 29


def test_tp8_pp4_dp2_with_data_outermost() -> None:
    layout = Layout.parse(f"tp=8 pp=4 dp=2 {DATA_OUTERMOST}")  # rank = tp + 8·(pp + 4·dp)
    assert layout.group("dp", 19) == (19, 51)
    assert layout.group("pp", 3) == (3, 11, 19, 27)
    assert layout.coord(29) == Coord(
        dp=0, replicate=0, shard=0, cp=0, tp=5, pp=3, ep=0, etp=0, edp=5
    )
    assert layout.rank(dp=1, tp=5, pp=1) == 45


def test_llama_3_405b_fills_16384_ranks_at_8k_and_at_128k() -> None:
    short, long = Layout.parse("tp=8 pp=16 dp=128"), Layout.parse("tp=8 cp=16 pp=16 dp=8")
    assert short.world == long.world == 16_384
    assert short.group("pp", 5) == tuple(range(5, 16_384, 1024))
    assert long.group("cp", 1027) == tuple(range(1027, 1152, 8))
    assert long.group("dp", 1027) == (1027, 1155, 1283, 1411, 1539, 1667, 1795, 1923)
    assert long.group("fsdp", 1027) == tuple(range(1027, 2048, 8))
    assert long.coord(16_383) == Coord(
        dp=7, replicate=0, shard=7, cp=15, tp=7, pp=15, ep=0, etp=0, edp=1023
    )
    assert len(short.groups("tp")) == 2048


def test_deepseek_v3_has_two_copies_of_its_experts() -> None:
    layout = Layout.parse("pp=16 dp=128 ep=64")
    assert (layout.world, layout.edp) == (2048, 2)
    assert layout.group("ep", 200) == tuple(range(192, 256))
    assert layout.group("edp", 200) == (136, 200)
    assert layout.coord(200) == Coord(
        dp=72, replicate=0, shard=72, cp=0, tp=0, pp=1, ep=8, etp=0, edp=1
    )


def test_hybrid_sharding_keeps_shards_on_neighbouring_ranks() -> None:
    layout = Layout.parse("dp=2x4 tp=2")
    assert layout.group("shard", 0) == (0, 2, 4, 6)
    assert layout.group("replicate", 3) == (3, 11)
    assert layout.group("dp", 1) == (1, 3, 5, 7, 9, 11, 13, 15)
    with_context = Layout.parse("dp=2x2 cp=2")
    assert with_context.group("fsdp", 5) == (4, 5, 6, 7)
    assert with_context.group("dp-cp", 5) == tuple(range(8))


def test_expert_tensor_parallelism_is_innermost() -> None:
    layout = Layout.parse("dp=4 tp=2 ep=2 etp=2")
    assert layout.group("etp", 5) == (4, 5)
    assert layout.group("ep", 5) == (5, 7)
    assert layout.group("edp", 5) == (1, 5)


# ---- link tiers


H100 = machine.load("h100")  # nodes of 8 on NVLink, then the network
INSIDE, OUTSIDE = H100.tiers
POD = replace(OUTSIDE, name="pod", size=32)
PODS = replace(H100, tiers=(INSIDE, POD, OUTSIDE))


@pytest.mark.parametrize(
    ("order", "dp", "pp"),
    [("tp-cp-dp-pp", POD, OUTSIDE), ("tp-cp-pp-dp", OUTSIDE, POD)],
)
def test_the_order_decides_which_axis_leaves_the_pod(order: str, dp: Tier, pp: Tier) -> None:
    layout = Layout.parse(f"tp=8 pp=4 dp=2 order={order}")
    assert [layout.tier(axis, PODS) for axis in ("tp", "dp", "pp")] == [INSIDE, dp, pp]
    assert [layout.tier(axis, H100) for axis in ("tp", "dp", "pp")] == [INSIDE, OUTSIDE, OUTSIDE]


def test_the_slowest_group_decides_the_tier() -> None:
    # Groups of 3 on nodes of 8: (0,1,2) and (3,4,5) stay inside, (6,7,8) does not.
    assert Layout.parse("tp=3 dp=3").tier("tp", H100) == OUTSIDE
    assert Layout.parse("tp=2 dp=9").tier("tp", H100) == INSIDE


def test_tiers_of_the_great_runs() -> None:
    for order in get_args(Order):
        llama = Layout.parse(f"tp=8 cp=16 pp=16 dp=8 order={order}")
        assert [llama.tier(axis, H100) for axis in ("tp", "ep")] == [INSIDE, INSIDE]
        assert {llama.tier(axis, H100) for axis in ("cp", "dp", "pp")} == {OUTSIDE}
        short = Layout.parse(f"tp=8 pp=16 dp=128 order={order}")
        assert [short.tier(axis, H100) for axis in ("tp", "dp", "pp")] == [INSIDE, OUTSIDE, OUTSIDE]
    assert Layout.parse("pp=16 dp=128 ep=64").tier("ep", H100) == OUTSIDE
    assert Layout.parse("pp=16 dp=128 ep=8").tier("ep", H100) == INSIDE
    data_outermost = Layout.parse(f"pp=16 dp=128 ep=8 {DATA_OUTERMOST}")
    assert data_outermost.tier("ep", H100) == OUTSIDE  # neighbours in dp are 16 ranks apart


def test_ep_64_fits_an_nvl72_domain_only_where_it_is_aligned() -> None:
    nvl72 = machine.load("gb200")
    layout = Layout.parse("dp=64 ep=64")
    assert layout.tier("ep", nvl72) == nvl72.tiers[0]
    # The second group, ranks 64 to 127, lies across the border at 72.
    assert Layout.parse("dp=128 ep=64").tier("ep", nvl72) == nvl72.tiers[-1]


# ---- both readings of the expert product


def test_deepseek_v3_reads_both_ways() -> None:
    layout = Layout.parse("pp=16 dp=128 ep=64")
    assert layout.textbook() == (2, 1, 16, 1, 64)
    assert layout.readings() == (
        "folded: dp 128 · cp 1 · tp 1 · pp 16 = 2,048 ranks, experts over ep 64 × edp 2",
        "textbook: 2 · 1 · 16 · 1 · 64 = 2,048",
    )


def test_every_degree_two_of_the_textbook_is_dp_4() -> None:
    layout = Layout.parse("dp=4 tp=2 pp=2 cp=2 ep=2")
    assert layout.world == 32
    assert layout.textbook() == (2, 2, 2, 2, 2)


def test_without_ep_dividing_dp_there_is_no_textbook_reading() -> None:
    layout = Layout.parse("dp=2 tp=4 ep=4 etp=2")
    assert layout.textbook() is None
    assert layout.readings() == (
        "folded: dp 2 · cp 1 · tp 4 · pp 1 = 8 ranks, experts over ep 4 × etp 2 × edp 1",
        "textbook: none, because ep 4 does not divide dp 2",
    )


@given(layouts())
def test_the_textbook_product_counts_the_same_ranks(layout: Layout) -> None:
    product = layout.textbook()
    assert (product is None) == (layout.dp % layout.ep != 0)
    if product:
        assert product.dp * product.tp * product.pp * product.cp * product.ep == layout.world


# ---- the text form


@given(layouts())
def test_the_text_form_reads_back(layout: Layout) -> None:
    again = Layout.parse(str(layout), zero=layout.zero)
    assert again == layout


def test_the_text_form_is_short() -> None:
    assert str(Layout.parse("tp=2,pp=1, dp=1x4")) == "dp=4 tp=2"
    assert str(Layout.parse("ep=2 dp=2x1 etp=1")) == "dp=2x1 ep=2"
    assert str(Layout.parse("")) == "dp=1"
    assert str(Layout.parse(DATA_OUTERMOST)) == f"dp=1 {DATA_OUTERMOST}"


def test_zero_defaults_to_one_under_a_pipeline() -> None:
    assert Layout.parse("dp=2").zero == 3
    assert Layout.parse("dp=2 pp=2").zero == 1
    assert Layout.parse("dp=2 pp=2", zero="full_shard").zero == 3


def test_zero_has_the_names_people_know() -> None:
    names = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "1", 2)
    assert [parse_zero(name) for name in names] == [0, 2, 3, 1, 2]
    with pytest.raises(UnknownName, match="did you mean full_shard"):
        parse_zero("FULL_SHRD")
    with pytest.raises(FivefoldError, match="dp=RxS"):
        parse_zero("HYBRID_SHARD")
    with pytest.raises(UnknownName):
        parse_zero(4)


def test_every_slip_in_the_text_is_reported_at_once() -> None:
    with pytest.raises(BadFile) as refusal:
        Layout.parse("dp=2x0 tpp=2 tp=2 tp=3 cp=1.5 ep=-1 etp=² pp pp=2x2 order=pp-tp", zero=7)
    starts = ["dp=2x0", "unknown axis 'tpp': did you mean tp", "tp is given twice", "cp=1.5"]
    starts += ["ep=-1", "etp=²", "'pp' is not a degree", "pp is given twice", "order=pp-tp"]
    starts += ["unknown ZeRO stage '7'"]
    for problem, start in zip(refusal.value.problems, starts, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"tp": 0}, "tp=0"),
        ({"shard": True}, "shard=True"),
        ({"chunks": -1}, "chunks=-1"),
        ({"zero": 4}, "0, 1, 2 and 3"),
        ({"context": "zigzg"}, "did you mean zigzag"),
        ({"order": "pp-tp"}, "choose from tp-cp-dp-pp, tp-cp-pp-dp"),
        ({"shard": 1 << 20, "tp": 2}, "2,097,152 ranks"),
    ],
)
def test_values_that_no_layout_can_have(wrong: dict[str, int], reason: str) -> None:
    with pytest.raises(IllegalLayout) as refusal:
        Layout(**wrong)
    assert reason in str(refusal.value)


def test_a_place_outside_the_layout_is_refused() -> None:
    layout = Layout.parse("dp=2 tp=2")
    with pytest.raises(FivefoldError, match="use 0 to 3"):
        layout.coord(4)
    with pytest.raises(FivefoldError, match="tp coord 2 is outside"):
        layout.rank(tp=2)
    with pytest.raises(UnknownName, match="did you mean dp"):
        layout.groups("ddp")


def test_experts_that_do_not_fold_have_no_coords() -> None:
    layout = Layout.parse("dp=2 tp=2 ep=3")
    for ask in (lambda: layout.edp, lambda: layout.coord(0), lambda: layout.groups("edp")):
        with pytest.raises(IllegalLayout, match="ep 3 · etp 1 = 3 must divide"):
            ask()


def test_every_degree_is_a_field() -> None:
    assert set(DEGREES) <= {field.name for field in fields(Layout)}


def test_the_language_of_layouts_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, fivefold.core.layout.rules, fivefold.core.layout.batch;"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
