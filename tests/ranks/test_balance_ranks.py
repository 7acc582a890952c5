"""Balancing over ranks: every rule as on one device, wherever its unit is cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kept_pool import KeptPool
from numpy.typing import NDArray
from torch import Tensor

from fivefold.commands.verify import runnable
from fivefold.core.model.shape import Moe
from fivefold.core.plan.plan import Plan, PlanOptions
from fivefold.data.batches import samples
from fivefold.launch.processes import Pool
from fivefold.launch.worker import Worker
from fivefold.model import moe as experts_of_tokens
from fivefold.optim.optimizer import make_optimizer
from fivefold.parallel.balance import Load, positions_of
from fivefold.parallel.composition import Job, compose
from fivefold.parallel.mesh import Mesh
from fivefold.step import step
from fivefold.verify import reference, runs
from fivefold.verify.compare import Call, expected
from fivefold.verify.runs import VerifiedRank, VerifySettings, run_rank, run_reference
from fivefold.verify.trial import judge, run_trial

PUBLISHED = 1e-10
TOP_K, EXPERTS, WIDTH = 2, 8, 64  # of tiny-moe
SIZES = {"layers": "3", "moe.bias": "true"}  # two layers with experts
RULES = (
    *("aux", "aux-seq", "aux-global", "z", "bias"),
    *("capacity:0.75", "capacity-position:0.75", "capacity-pad:0.75"),
)
LOSSES = "aux+aux-seq+aux-global+z"


def plan_of(layout: str, rules: str = "none", **options: Any) -> Plan:
    """Rows of 18 tokens, which no four ranks cut evenly, two in a microbatch."""
    said = {"seq": 18, "microbatch_size": 2, "microbatches": 2, "set": SIZES, **options}
    return runnable(PlanOptions("tiny-moe", layout=layout, balance=rules, **said))


def check(pool: Pool, plan: Plan, settings: VerifySettings | None = None) -> None:
    verdict = run_trial(pool, plan, settings or VerifySettings())
    assert verdict.traffic_match, verdict.traffic
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)
    assert max(verdict.errors.values()) <= PUBLISHED


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_whose_unit_is_cut_both_ways(pool: Pool, rule: str) -> None:
    plan = plan_of("tp=2 cp=2 ep=4", rule)
    assert plan.padded_seq > plan.batch.seq
    check(pool, plan)


CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("cp=2", f"{LOSSES}+capacity:0.75+bias", {"context": "ulysses", "packed": True}),
    ("tp=2", f"{LOSSES}+capacity-pad:0.75+bias", {"recompute": "full"}),
    ("tp=2", f"{LOSSES}+capacity:0.75+bias", {"sp": False}),
    ("tp=2 cp=2", f"{LOSSES}+capacity-position:1", {"sp": False, "context": "allgather"}),
    ("dp=2", f"{LOSSES}+capacity:1+bias", {"zero": 2}),
    ("dp=2 ep=2", f"{LOSSES}+capacity-pad:1.25", {"zero": 3, "recompute": "full:2"}),
    ("dp=2 ep=2", "capacity-position:0.5+bias", {"recompute": "selective"}),
    ("tp=2 cp=2 ep=4", "aux+capacity:8+z", {"recompute": "selective"}),
    ("tp=2 cp=2 ep=2 etp=2", "aux-seq+capacity-pad:0.75", {"recompute": "full"}),
    ("dp=2 tp=2 etp=2", "aux+capacity:0.75", {"sp": False}),
    ("pp=2", f"{LOSSES}+capacity:1+bias", {"schedule": "zb-h1", "microbatches": 4}),
    ("cp=2 pp=2 ep=2", "aux+aux-global+bias", {"schedule": "dualpipe", "microbatches": 4}),
    ("dp=4 ep=4", "capacity:0.75+aux+z", {"ep_nodes": 2, "recompute": "full"}),
    ("dp=2 tp=2 ep=4", "capacity-position:0.5+aux", {"ep_nodes": 4, "recompute": "selective"}),
)


@pytest.mark.sample(0.5)
@pytest.mark.parametrize(("layout", "rules", "options"), CASES, ids=str)
def test_rules_together(pool: Pool, layout: str, rules: str, options: dict[str, Any]) -> None:
    if options.get("schedule") is not None:
        options = {**options, "set": {**SIZES, "layers": "4"}}
    check(pool, plan_of(layout, rules, **options))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_changes_what_one_device_computes(rule: str) -> None:
    """Else a rule that does nothing would be equal everywhere. The second step tells of loads."""
    told, plain = (truths_of(plan_of("dp=1", rules), steps=2)[1] for rules in (rule, "none"))
    name = "blocks.2.mlp.router.weight"
    if rule == "bias":
        assert told.biases["blocks.2.mlp.router.bias"].any()
        assert not plain.biases["blocks.2.mlp.router.bias"].any()
    else:
        assert np.abs(told.gradients[name] - plain.gradients[name]).max() > 1e-9


def truths_of(plan: Plan, steps: int) -> list[reference.Truth]:
    batches = [
        samples(plan.batch, plan.shape.vocab, 0, number).as_batch() for number in range(steps)
    ]
    rules = (plan.balance, plan.batch.microbatch_size)
    return reference.truths(
        plan.shape, batches, "adamw", 0, torch.float64, lambda text: None, *rules
    )


@pytest.mark.sample(0.5)
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "tp=2 cp=2 ep=4", "rules": "bias:0.01", "microbatches": 1},
        {"layout": "dp=2 pp=2 ep=2", "rules": "bias:0.01", "schedule": "1f1b"},
    ],
    ids=str,
)
def test_the_bias_is_that_of_one_device_to_the_bit(pool: Pool, options: dict[str, Any]) -> None:
    plan, settings = plan_of(**options), VerifySettings(steps=10)
    tasks = [(run_rank, (plan, settings))] * plan.layout.world
    *ranks, truths = pool.run_each([*tasks, (run_reference, (plan, settings))])
    last = truths[-1].biases
    assert set(last) == {"blocks.1.mlp.router.bias", "blocks.2.mlp.router.bias"}
    seen: set[str] = set()
    for rank in ranks:
        for part in rank.steps[-1].biases:
            assert part.values.dtype == np.float32
            assert np.array_equal(part.values, expected(last[part.name], part)), part.name
            seen.add(part.name)
    assert seen == set(last)
    for bias in last.values():
        assert len(np.unique(bias)) > 2, "experts have gone more than one way"


class Seen(NamedTuple):
    """What one rank saw in some steps."""

    routes: dict[tuple[int, int, int, int], tuple[int, ...]]  # by step, layer, row, token
    slots: list[NDArray[np.floating]]  # (layers, experts), by step
    losses: list[NDArray[np.floating]]
    records: Counter[Call]  # of the last step


def steps_of(worker: Worker, plan: Plan, num_steps: int) -> Seen:
    """Where the tokens of this rank went, by their number in the whole step."""
    with worker.joined(plan.layout.world):
        mesh = Mesh.of(plan, torch.device("cpu"))
        job = compose(plan, mesh, seed=0, dtype=torch.float64)
        owned = [(len(each.row.shape) > 1, each.tensor) for each in job.owned]
        optimizer = make_optimizer("adamw", owned, lr=1e-2, weight_decay=0.1)
        job.balancing.watch()
        seen = Seen({}, [], [], Counter())
        for number in range(num_steps):
            drawn = samples(plan.batch, plan.shape.vocab, 0, number)
            mesh.records.clear()
            load = step(job, optimizer, drawn.of(plan.layout.coord(mesh.rank).dp), 1.0).load
            assert load is not None
            seen.slots.append(load.slots.numpy())
            seen.losses.append(load.losses.numpy())
            for key, chosen in routed(job):
                assert seen.routes.setdefault((number, *key), chosen) == chosen
            job.balancing.routes.clear()
        seen.records.update({tuple(one): count for one, count in mesh.records.items()})
        mesh.close_groups()
        return seen


def routed(job: Job) -> Iterator[tuple[tuple[int, int, int], tuple[int, ...]]]:
    plan, rank = job.plan, job.mesh.rank
    batch, dp = plan.batch, plan.layout.coord(rank).dp
    for layer, microbatch, experts in job.balancing.routes:
        first = (microbatch * batch.dp + dp) * batch.microbatch_size
        for row, tokens in enumerate(experts.tolist(), start=first):
            for position, chosen in zip(positions_of(plan, rank), tokens, strict=True):
                if position < batch.seq:
                    yield (layer, row, position), tuple(chosen)


def everywhere(pool: Pool, plan: Plan, num_steps: int = 2) -> tuple[list[Seen], dict[Any, Any]]:
    """What ranks saw, and all their routes together."""
    ranks = pool.run_each([(steps_of, (plan, num_steps))] * plan.layout.world)
    routes: dict[Any, Any] = {}
    for each in ranks:
        for key, chosen in each.routes.items():
            assert routes.setdefault(key, chosen) == chosen, f"two ranks differ at {key}"
    return ranks, routes


EIGHT_ROWS = {"batch": 8, "microbatches": None, "set": {**SIZES, "layers": "4"}}
SPREAD = "aux-seq+z+bias+capacity:1"


@pytest.fixture(scope="module")
def alone(kept_pool: KeptPool) -> tuple[Seen, dict[Any, Any]]:
    (seen,), routes = everywhere(kept_pool.whole(), plan_of("dp=1", SPREAD, **EIGHT_ROWS))
    return seen, routes


@pytest.mark.sample(0.5)
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "dp=2"},
        {"layout": "dp=4 ep=4", "microbatch_size": 1, "ep_nodes": 2},
        {"layout": "tp=2"},
        {"layout": "tp=2", "sp": False},
        {"layout": "cp=2", "context": "zigzag"},
        {"layout": "tp=2 ep=2", "recompute": "full"},
        {"layout": "pp=2", "schedule": "dualpipe"},
        {"layout": "pp=2", "schedule": "zb-v"},
        {"layout": "tp=2 pp=2 cp=2 ep=4", "schedule": "dualpipe-v"},
        {"layout": "dp=2 tp=2 cp=2 ep=8", "recompute": "selective"},
    ],
    ids=str,
)
def test_routing_and_load_do_not_depend_on_the_layout(
    pool: Pool, alone: tuple[Seen, dict[Any, Any]], options: dict[str, Any]
) -> None:
    plan = plan_of(rules=SPREAD, **{**EIGHT_ROWS, **options})
    one, routes = alone
    assert len(routes) == 2 * 3 * 8 * 18  # steps, layers, rows, tokens
    ranks, found = everywhere(pool, plan)
    assert found == routes
    for rank in ranks:
        for number in range(2):
            assert np.array_equal(rank.slots[number], one.slots[number])
            np.testing.assert_allclose(rank.losses[number], one.losses[number], rtol=1e-11)
    assert all((slots.sum(1) == 8 * 18 * TOP_K).all() for slots in one.slots), "no padding"


def test_the_fullest_expert_over_the_mean() -> None:
    slots = torch.tensor([[4, 0, 2, 2], [0, 0, 0, 8]], dtype=torch.float64)
    assert Load(slots, torch.zeros(0)).imbalance.tolist() == [2, 4]


class Forced(NamedTuple):
    """A trial of one rank, and the load of its steps."""

    run: VerifiedRank
    slots: list[NDArray[np.floating]]


def avoiding(avoid: Sequence[int], scores: Tensor, bias: Tensor | None, moe: Moe) -> Tensor:
    """The choice without some experts, whatever their scores."""
    return CHOOSE(scores.index_fill(1, torch.tensor(avoid), -1e9), bias, moe)


CHOOSE = experts_of_tokens.choose_experts


def forced_rank(
    worker: Worker, plan: Plan, settings: VerifySettings, avoid: Sequence[int]
) -> Forced:
    slots: list[NDArray[np.floating]] = []

    def kept(*args: Any) -> Any:
        outcome = step(*args)
        slots.append(outcome.load.slots.numpy())
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts_of_tokens, "choose_experts", partial(avoiding, avoid))
        patch.setattr(runs, "step", kept)
        return Forced(run_rank(worker, plan, settings), slots)


def forced_reference(
    worker: Worker, plan: Plan, settings: VerifySettings, avoid: Sequence[int]
) -> list[reference.Truth]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts_of_tokens, "choose_experts", partial(avoiding, avoid))
        return run_reference(worker, plan, settings)


def forced(
    pool: Pool, plan: Plan, avoid: Sequence[int], settings: VerifySettings | None = None
) -> list[Forced]:
    """Ranks and truth without some experts, compared."""
    args = (plan, settings or VerifySettings(), avoid)
    tasks = [(forced_rank, args)] * plan.layout.world
    *ranks, truths = pool.run_each([*tasks, (forced_reference, args)])
    verdict = judge(plan, args[1], [each.run for each in ranks], truths)
    assert verdict.passed, (verdict.errors, verdict.tolerance, verdict.diverges_at)
    if args[1].dtype == "float64":
        assert max(verdict.errors.values()) <= PUBLISHED
    for each in ranks:
        for slots in each.slots:
            assert not slots[:, list(avoid)].any() and slots.any(1).all()
    for truth in truths:
        for name in ("up", "down", "gate"):
            gradient = truth.gradients[f"blocks.2.mlp.experts.{name}.weight"]
            assert not gradient[list(avoid)].any() and gradient.any()
    return ranks


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layout", "avoid", "options"),
    [
        ("dp=2 ep=2", [3], {}),
        ("dp=2 ep=2", [0, 1, 2, 3], {"zero": 3}),
        ("tp=2 cp=2 ep=4", [2, 3, 6, 7], {"rules": "aux+z", "recompute": "full"}),
        ("dp=4 ep=2", [4, 5, 6, 7], {"rules": "aux-seq", "recompute": "selective", "zero": 2}),
        ("dp=4 ep=4", [0, 1, 2, 3], {"ep_nodes": 2}),  # a whole node
        ("dp=2 ep=2", [0, 1, 2, 3], {"rules": "capacity-pad:1"}),
        ("dp=2 tp=2 ep=2 etp=2", [0, 1, 2, 3], {}),
        ("pp=2", [1, 2, 3, 4, 5, 7], {"schedule": "zb-h1", "microbatches": 4}),
    ],
    ids=str,
)
def test_experts_that_nobody_wants(
    pool: Pool, layout: str, avoid: list[int], options: dict[str, Any]
) -> None:
    forced(pool, plan_of(layout, **options), avoid)


def test_experts_that_nobody_wants_in_float32(pool: Pool) -> None:
    """Grouped products of no row at all."""
    forced(pool, plan_of("dp=2 ep=2"), [0, 1, 2, 3], VerifySettings(dtype="float32"))


def test_a_rank_whose_tokens_are_all_dropped(pool: Pool) -> None:
    """Only experts 0 and 1 are left, with a slot in a row each, and the first token takes both:
    the rank of the last tokens, which also has the other experts, sends nothing anywhere. Weights
    of slots travel beside their rows."""
    plan = plan_of("cp=2 ep=2", "capacity-position:0.01", context="ring")
    first, last = forced(pool, plan, range(2, EXPERTS))
    for rank, sizes in ((first, {2 * 2 * WIDTH * 8, 2 * 2 * 8}), (last, {0})):
        for heard in rank.run.heard:
            rows = {call[2] for call in heard.noted if call[:2] == ("ep", "all_to_all")}
            assert rows - {EXPERTS * 8} == sizes


@pytest.mark.sample(0.5)
@pytest.mark.parametrize("rules", ["none", f"{LOSSES}+bias", "capacity-pad:1+aux", "capacity:8"])
def test_ranks_that_have_padding_only(pool: Pool, rules: str) -> None:
    plan = plan_of("cp=4 ep=4", rules, seq=5, context="ring")
    assert positions_of(plan, 3) == [6, 7]
    check(pool, plan)


def test_a_data_rank_without_counted_tokens_still_has_its_losses(pool: Pool) -> None:
    check(pool, plan_of("dp=4 ep=2", LOSSES, microbatches=1), VerifySettings(empty_rank=3))


def bytes_on(ranks: Sequence[Seen], axis: str) -> int:
    return sum(
        call[2] * count for each in ranks for call, count in each.records.items() if call[0] == axis
    )


def test_dropped_slots_are_not_sent(pool: Pool) -> None:
    plain, dropped, padded = (
        bytes_on(everywhere(pool, plan_of("dp=2 ep=2", rules), num_steps=1)[0], "ep")
        for rules in ("none", "capacity:0.5", "capacity-pad:0.5")
    )
    layers, microbatches, tokens = 2, 2, 2 * 18
    counts = 2 * layers * microbatches * EXPERTS * 8  # on two ranks
    # There and back, forward and backward; weights one way in each.
    row = 2 * layers * microbatches * (4 * WIDTH + 2) * 8
    assert plain == counts + row * tokens * TOP_K
    room = 3  # ⌈0.5·2·18/8⌉ in each of two rows
    assert padded == row * 2 * room * EXPERTS
    assert counts < dropped <= counts + row * 2 * room * EXPERTS < plain


def test_a_token_crosses_once_to_each_node_that_it_needs(pool: Pool) -> None:
    """Counted from where the tokens went: nodes have experts 0 to 3 and 4 to 7."""
    plan = plan_of("dp=4 ep=4", ep_nodes=2)
    ranks, routes = everywhere(pool, plan, num_steps=1)
    crossings = sum(len({expert // 4 for expert in chosen}) for chosen in routes.values())
    assert len(routes) < crossings < TOP_K * len(routes)
    calls = 4 * 2 * 2  # ranks, layers, microbatches
    numbers = EXPERTS + 2  # slots of each expert, and how many rows to each node
    there_and_back = 4 * WIDTH + 3 * TOP_K  # rows; choices forward, weights forward and backward
    assert bytes_on(ranks, "ep-far") == (calls * numbers + crossings * there_and_back) * 8
    counts = calls * EXPERTS // 2 * 8
    assert bytes_on(ranks, "ep-near") == counts + len(routes) * TOP_K * (4 * WIDTH + 2) * 8
    assert bytes_on(ranks, "ep") == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_mesh_notes_what_the_dispatcher_sees(pool: Pool, recompute: str) -> None:
    for layout, options in (("tp=2 cp=2 ep=4", {}), ("dp=4 ep=4", {"ep_nodes": 2})):
        plan = plan_of(layout, "aux+capacity:1", recompute=recompute, **options)
        for rank in pool.run_each(
            [(run_rank, (plan, VerifySettings(steps=1)))] * plan.layout.world
        ):
            for heard in rank.heard:
                assert heard.noted and heard.seen == heard.noted
