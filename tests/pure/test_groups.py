"""Groups of collectives: their sizes are those of the calls that core lists, their ranks those that
the runtime joins."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.core import hardware as machine
from fivefold.core.layout import groups
from fivefold.core.layout.groups import PIPELINE, Topology, communicators, group_of, rank_order
from fivefold.core.layout.layout import Layout
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.core.precision import PRECISIONS
from fivefold.cost.traffic.collectives import predict_traffic

PLANS = [
    resolve(options)
    for options in (
        PlanOptions("tiny-moe", "dp=2x2 tp=2 pp=2 cp=2 ep=2"),
        PlanOptions("tiny-moe", "dp=2 tp=4 cp=8 ep=8", context="hybrid", ep_nodes=2),
        PlanOptions("tiny-moe", "dp=2 tp=2 cp=4 pp=2 order=tp-cp-pp-dp", context="ulysses"),
        PlanOptions("tiny-moe", "tp=2 cp=2 ep=2 etp=2", balance="aux"),
        PlanOptions("llama-3.1-8b", "tp=16 pp=4", schedule="dualpipe"),
    )
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.layout))
def test_a_group_is_as_large_as_its_calls_say(plan: Plan) -> None:
    itemsize = PRECISIONS[plan.precision].itemsize
    listed = predict_traffic(plan, 0, itemsize=itemsize)
    assert listed
    for entry in listed:
        pair = groups.DIMENSIONS.get(entry.axis) == "pp"  # a message, and twins, are of two ranks
        assert entry.group == (2 if pair else groups.extent(plan, entry.axis).size), entry


def test_parts_of_an_axis_are_those_that_the_runtime_joins() -> None:
    plan = PLANS[1]
    layout, line, inner = plan.layout, rank_order(plan.layout), plan.split.inner
    assert 1 < inner < layout.cp, "a hybrid has both"
    near = layout.ep // plan.ep_nodes
    for rank in range(layout.world):
        cp, ep = layout.group("cp", rank), layout.group("ep", rank)
        place, coord = cp.index(rank), ep.index(rank)
        found = {name: line.group(groups.extent(plan, name), rank) for name in groups.DIMENSIONS}
        assert found["ulysses"] == cp[place // inner * inner :][:inner]
        assert found["ring"] == cp[place % inner :: inner]
        assert found["ep-near"] == ep[coord // near * near :][:near]
        assert found["ep-far"] == ep[coord % near :: near]


def test_a_part_of_an_axis_may_have_faster_links_than_the_whole() -> None:
    plan = resolve(
        PlanOptions("mixtral-8x7b", "tp=4 cp=4 dp=8 ep=8 etp=2", context="hybrid", ep_nodes=2)
    )
    h100 = machine.load("h100")
    inside, outside = h100.tiers[0].name, h100.tiers[-1].name
    assert plan.split.inner == 2
    tiers = {name: groups.tier(plan, name, h100).name for name in (*groups.DIMENSIONS, "world")}
    assert tiers["cp"] == tiers["ring"] == tiers["ep"] == tiers["ep-far"] == outside
    assert tiers["ulysses"] == tiers["ep-near"] == tiers["replica"] == inside
    assert tiers["world"] == outside


def test_every_group_of_core_serves_a_dimension() -> None:
    seen = {entry.axis for plan in PLANS for entry in predict_traffic(plan, 0, itemsize=2)}
    assert seen - {"world"} <= groups.DIMENSIONS.keys()
    assert {"replica", "ring", "ulysses", "ep-near", "ep-far", "twin", "row"} <= seen


LAYOUTS = [
    ("tiny", "dp=2 tp=2 pp=2", {}),
    ("tiny", "dp=2x2 tp=2", {"zero": 2}),
    ("tiny", "dp=4", {"zero": 0}),
    ("tiny", "tp=8", {}),
    ("tiny", "cp=4 tp=2", {"context": "hybrid"}),
    ("tiny", "pp=4", {"schedule": "dualpipe", "microbatches": 8}),
    ("tiny", "pp=4 dp=2", {"set": {"tied": "true"}}),
    ("tiny-moe", "dp=2 tp=2 pp=2 ep=2", {"schedule": "interleaved"}),
    ("tiny-moe", "dp=4 ep=4", {"ep_nodes": 2}),
    ("tiny-moe", "dp=2 tp=2 ep=2 etp=2", {"balance": "aux"}),
    ("tiny-moe", "dp=2 tp=2 pp=2 ep=4 order=tp-cp-pp-dp", {}),
]


@pytest.mark.parametrize(("model", "layout", "words"), LAYOUTS)
def test_a_rank_has_communicators_for_what_it_sends(
    model: str, layout: str, words: dict[str, Any]
) -> None:
    """Those that serve the roles of its traffic, each of them once, and no other."""
    plan = resolve(PlanOptions(model, layout=layout, **words), small=True)
    topology = Topology.of(plan)
    for rank in range(plan.layout.world):
        traffic = predict_traffic(plan, rank, itemsize=4)
        mine = [each for each in communicators(topology) if len(each.group(topology, rank)) > 1]
        coord = group_of(topology, PIPELINE, rank).index(rank)
        assert mine == [each for each in communicators(topology) if each.includes(topology, coord)]
        roles = [role for each in mine if not each.channels for role in each.roles]
        assert {*roles, *(each.role for each in mine)} == {entry.axis for entry in traffic}
        assert len(set(roles)) == len(roles)
        pairs = [each.channel(topology, rank) for each in mine if each.channels]
        assert len(set(pairs)) == len(pairs)
        for each in mine:
            assert each.group(topology, rank) in each.groups(topology)


@pytest.mark.parametrize(("model", "layout", "words"), LAYOUTS)
def test_roles_share_a_communicator_where_no_computation_waits(
    model: str, layout: str, words: dict[str, Any]
) -> None:
    """If their ranks are the same, and the messages of all are large, or of all small."""
    topology = Topology.of(resolve(PlanOptions(model, layout=layout, **words), small=True))
    queues = [each for each in communicators(topology) if not each.channels]
    waits = {each.role for each in queues if groups.ROLES[each.role].urgent} | {groups.TWIN}
    for each in queues:
        assert each.role not in waits or not each.sharers
        assert {groups.ROLES[role].small(topology) for role in each.roles} == {each.small}
        assert len({groups.all_groups(topology, role) for role in each.roles}) == 1
    rest = [each for each in queues if each.role not in waits]
    assert len({(groups.all_groups(topology, each.role), each.small) for each in rest}) == len(rest)


def test_totals_of_a_step_and_its_tokens_share_one() -> None:
    """Of FSDP: one for shards, and a small one. With ZeRO-0 gradients need a large one."""
    found = [
        [(each.roles, each.small) for each in communicators(Topology(Layout(shard=4, zero=zero)))]
        for zero in (3, 0)
    ]
    assert found[0] == [(("world", "dp-cp"), True), (("fsdp",), False)]
    assert found[1] == [(("world",), True), (("dp-cp",), False)]


@pytest.mark.parametrize(("model", "layout", "words"), LAYOUTS)
def test_no_rank_is_twice_in_a_communicator(model: str, layout: str, words: dict[str, Any]) -> None:
    topology = Topology.of(resolve(PlanOptions(model, layout=layout, **words), small=True))
    for each in communicators(topology):
        ranks = [rank for group in each.groups(topology) for rank in group]
        assert len(set(ranks)) == len(ranks)


def test_a_large_job_is_made_by_few_calls() -> None:
    options = PlanOptions("llama-3.1-405b", layout="tp=8 cp=2 pp=16 dp=64", schedule="interleaved")
    topology = Topology.of(resolve(options))
    assert topology.layout.world == 16_384
    assert len(communicators(topology)) <= 15
