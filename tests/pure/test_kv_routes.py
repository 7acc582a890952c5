"""Routes of the cache between layouts: every layer and head arrives once, from who has it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from fivefold.core.model.kv_pages import token_bytes
from fivefold.core.model.presets import load
from fivefold.core.plan.kv_transfers import KvRoute, kv_routes, kv_share, moved_bytes, problems
from fivefold.core.plan.plan import Plan, PlanOptions, resolve

LAYOUTS = ("dp=1", "tp=2", "tp=4", "pp=2", "tp=2 pp=2", "dp=2", "cp=2", "dp=2 tp=2 pp=2 cp=2")


def plan_of(model: str, layout: str, **changes: str) -> Plan:
    return resolve(PlanOptions(model, layout, zero=0, sp=False, set=changes), small=True)


def arrived(route: KvRoute) -> list[tuple[int, int, int]]:
    return [(route.target, *each) for each in product(route.layers, route.heads)]


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_every_head_of_every_layer_arrives_once(before: str, after: str) -> None:
    for model in ("tiny", "deepseek-v3"):
        source, target = plan_of(model, before), plan_of(model, after)
        for home in {0, target.layout.dp - 1}:
            routes = kv_routes(source, target, source.layout.dp - 1, home)
            parts = source.layout.cp  # each has other blocks
            counts = Counter(each for route in routes for each in arrived(route))
            ranks = [r for r in range(target.layout.world) if target.layout.coord(r).dp == home]
            shares = {rank: kv_share(target, rank) for rank in ranks}
            wanted = {
                (rank, *each)
                for rank, share in shares.items()
                for each in product(share.layers, share.heads)
            }
            assert counts == dict.fromkeys(wanted, parts)
            for route in routes:
                has = kv_share(source, route.source)
                assert set(route.layers) <= set(has.layers), "a rank sends what it has"
                assert set(route.heads) <= set(has.heads)
                assert source.layout.coord(route.source).dp == source.layout.dp - 1


def test_replicated_heads_come_from_ranks_in_turn() -> None:
    """Two KV heads on four ranks: each of the four targets has a source of its own."""
    plan = plan_of("tiny", "tp=4", kv_heads="2")
    assert len({each.source for each in kv_routes(plan, plan)}) == 4


def test_bytes_are_those_that_the_target_keeps() -> None:
    for layout in LAYOUTS:
        target = plan_of("tiny", layout)
        ranks = [r for r in range(target.layout.world) if not target.layout.coord(r).dp]
        kept = sum(
            token_bytes(target.shape, len(kv_share(target, rank).layers), target.layout.tp, 2)
            for rank in ranks
        )
        assert moved_bytes(target, 7, 2) == 7 * kept


def test_windows_do_not_travel() -> None:
    plain = load("llama-3.1-8b")
    assert list(problems(plain)) == []
    windowed = replace(plain, window=4096, window_kind="sliding")
    assert "leave --prefill out" in "".join(problems(windowed))
