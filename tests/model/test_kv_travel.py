"""Caches between layouts without processes: cut, sent, put in, and compared with a fresh cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fivefold.core.model.kv_pages import BLOCK, blocks_of, page_sizes
from fivefold.core.plan.kv_transfers import kv_routes, kv_share, moved_bytes
from fivefold.core.plan.plan import Plan, PlanOptions, resolve
from fivefold.generate.blocks import BlockPool
from fivefold.generate.cache import LayerPages
from fivefold.generate.kv_travel import KvPiece, RankPages
from fivefold.generate.requests import Request, SequenceState
from fivefold.generate.scheduler import ScheduleLimits, Scheduler
from fivefold.serve.kv_links import Adoptions, KvInbox, KvOutbox
from fivefold.serve.links import AddCommand, DropCommand, ForgetCommand, KvTarget

LAYOUTS = ("dp=1", "tp=2", "tp=4", "pp=2", "tp=2 pp=2", "cp=2", "dp=2 tp=2")
PROMPT, NUM_BLOCKS = 40, 12


def plan_of(model: str, layout: str) -> Plan:
    changes = {"kv_heads": "2"} if model == "tiny" else {"layers": "4"}
    return resolve(PlanOptions(model, layout, zero=0, sp=False, set=changes), small=True)


def full_cache(plan: Plan) -> dict[int, tuple[torch.Tensor, ...]]:
    """Numbers of every layer, token, head and place in it."""
    shape = plan.shape
    sizes = page_sizes(1 if shape.mla else shape.kv_heads, shape.head_dim, shape.mla)
    draw = torch.Generator().manual_seed(0)
    count = blocks_of(PROMPT)
    return {
        layer: tuple(torch.randn((count, BLOCK, *size), generator=draw) for size in sizes)
        for layer in range(shape.layers)
    }


class FakeRank:
    """A rank with pages and without a model."""

    def __init__(self, plan: Plan, rank: int, codes: bool = False) -> None:
        self.plan, self.mesh = plan, SimpleNamespace(rank=rank)
        self.cp, self.coord = plan.layout.cp, plan.layout.coord(rank)
        share, mla = kv_share(plan, rank), plan.shape.mla
        sizes = page_sizes(len(share.heads), plan.shape.head_dim, mla)
        self.pages: dict[int, LayerPages] = {}
        for layer in share.layers:
            blocks, dtype = NUM_BLOCKS // self.cp, torch.uint8 if codes else torch.float32
            found = [torch.zeros((blocks, BLOCK, *size), dtype=dtype) for size in sizes]
            scales = [torch.zeros(blocks, heads, BLOCK).transpose(1, 2) for heads, _ in sizes]
            values = found[0][..., : mla.kv_rank] if mla else found[1]
            of_pages = (scales[0], scales[-1]) if codes else ()
            self.pages[layer] = LayerPages(found[0], values, *of_pages)
        self.heads = slice(share.heads.start, share.heads.stop)

    def fill(
        self, full: dict[int, tuple[torch.Tensor, ...]], table: list[int], first: int = 0
    ) -> None:
        for layer, pages in self.pages.items():
            for index, block in list(enumerate(table))[first:]:
                if block % self.cp == self.coord.cp:
                    slots = block // self.cp * BLOCK + torch.arange(BLOCK)
                    of_block = [all_heads[index][:, self.heads] for all_heads in full[layer]]
                    pages.write(slots, of_block[0], of_block[-1])

    def rank_pages(self) -> RankPages:
        return RankPages(cast(Any, self))


def sequence_of(table: list[int], computed: int) -> SequenceState:
    request = Request("r", tuple(range(PROMPT)), 4)
    return SequenceState(request, 0, PROMPT + 4, computed=computed, table=table)


@pytest.mark.parametrize("codes", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("model", ["tiny", "deepseek-v3"])
@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.sample(20)
def test_what_arrives_is_what_the_target_would_have(
    model: str, before: str, after: str, codes: bool
) -> None:
    source, target = plan_of(model, before), plan_of(model, after)
    full, here, there = full_cache(source), [3, 8, 5], [7, 1, 4]
    home = target.layout.dp - 1
    routes, sent = kv_routes(source, target, 0, home), dict[int, list[KvPiece]]()
    for rank in range(source.layout.world):
        one = FakeRank(source, rank, codes)
        if one.coord.dp == 0:
            one.fill(full, here)
            for route, piece in one.rank_pages().pieces(sequence_of(here, PROMPT), routes):
                sent.setdefault(route.target, []).append(piece)
    num_bytes = sum(t.nbytes for each in sent.values() for p in each for t in p.tensors)
    assert num_bytes == moved_bytes(target, blocks_of(PROMPT) * BLOCK, 1 if codes else 4)
    for rank in range(target.layout.world):
        one, expected = (FakeRank(target, rank, codes) for _ in range(2))
        if one.coord.dp != home:
            assert rank not in sent
            continue
        expected.fill(full, there, first=1)
        # Its first block is shared with another sequence, and is not written.
        one.rank_pages().put(sequence_of(there, BLOCK), sent[rank])
        for layer, pages in one.pages.items():
            for arrived, right in zip(pages.stored, expected.pages[layer].stored, strict=True):
                torch.testing.assert_close(arrived, right, rtol=0, atol=0)


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never was")


def test_pieces_that_nobody_wants_leave_nothing(tmp_path: Path) -> None:
    target, complete = KvTarget(0, 0, 0), list[str]()
    inbox = KvInbox(tmp_path / "kv-0-0-1")
    inbox.start(complete.append)
    outbox = KvOutbox(tmp_path, "9-0")
    outbox.start()
    keys = torch.arange(24, dtype=torch.bfloat16).view(1, 2, 3, 4)

    def send(id: str, number: int, total: int) -> None:
        outbox.put(target, 1, KvPiece(id, number, range(3), (0,), (keys + number,)), total)

    for number in range(2):
        send("whole", number, 2)
        send("unwanted", number, 3)
    wait_until(lambda: complete == ["whole"])
    inbox.forget("unwanted")
    send("unwanted", 2, 3)
    inbox.forget("late")
    send("late", 0, 1)
    send("half", 0, 2)
    outbox.put(KvTarget(7, 0, 0), 1, KvPiece("dead", 0, range(3), (0,), (keys,)), 1)
    wait_until(lambda: complete == ["whole", "unwanted", "late"])
    outbox.finish()  # as if the sender had died: the half of a cache is thrown away
    wait_until(lambda: inbox.num_open == 1)
    pieces = inbox.take("whole")
    assert [each.layer for each in pieces] == [0, 1] and inbox.num_open == 0
    torch.testing.assert_close(pieces[1].tensors[0], keys + 1)


def test_a_request_is_added_when_all_ranks_have_its_cache() -> None:
    adoptions = Adoptions(2)
    add = AddCommand(Request("a", (1,), 4), home=1, drawn=((3, -0.5),))
    assert adoptions.due([add], ["a"]) == []
    assert adoptions.due([], ["a", "b"]) == [add]
    assert adoptions.due([DropCommand("a")], []) == [DropCommand("a")], "it is in the engine"
    later = AddCommand(Request("b", (1,), 4), home=0, drawn=((3, -0.5),))
    assert adoptions.due([later], []) == []
    assert adoptions.due([DropCommand("b")], []) == [ForgetCommand("b", 0)]
    assert adoptions.due([], ["b"]) == [], "its cache has come for nobody"
    assert adoptions.due([ForgetCommand("c", 1)], ["c"]) == [ForgetCommand("c", 1)]
    assert adoptions.due([], ["c"]) == []
    assert vars(adoptions) == vars(Adoptions(2)), "nothing stays"


def test_a_carried_sequence_takes_its_blocks_and_goes_on() -> None:
    pool, landed = BlockPool(8), list[tuple[int, int]]()
    scheduler = Scheduler(
        pool,
        ScheduleLimits(4, 8),
        64,
        on_landing=lambda one: landed.append((one.computed, len(one.table))),
    )
    for id in ("a", "b"):
        scheduler.add(Request(id, tuple(range(PROMPT)), 4), drawn=((9, -1.0),))
    batch = scheduler.schedule()
    assert [(each.start, each.tokens) for each in batch.chunks] == [(PROMPT, (9,))] * 2
    assert landed == [(0, 3), (32, 3)], "two blocks are those of the first, which has landed"
    scheduler.computed(batch, scheduler.running)
    scheduler.add(Request("c", tuple(range(PROMPT)), 4), drawn=((9, -1.0),))
    for each in scheduler.running:
        each.append(5, -1.0)
    assert scheduler.schedule().chunks[-1].tokens == (9,)
    assert landed[-1] == (32, 3), "two blocks are shared, and the third is written"
    scheduler.restart()  # whoever loses its blocks is computed again here
    assert scheduler.schedule().chunks[0].start == 0


@pytest.mark.parametrize("at", [PROMPT - 1, PROMPT, PROMPT + 1])
def test_a_carried_sequence_that_has_outgrown_its_keys_is_computed_here(at: int) -> None:
    landed = list[str]()
    scheduler = Scheduler(
        *(BlockPool(8), ScheduleLimits(64, 8), 64),
        on_landing=lambda one: landed.append(one.request.id),
        outgrown_at=at,
    )
    scheduler.add(Request("a", tuple(range(PROMPT)), 4), drawn=((9, -1.0),))
    (chunk,) = scheduler.schedule().chunks
    assert landed == ["a"], "whoever carries it lets it go"
    assert chunk.start == (0 if at == PROMPT else PROMPT)
    assert chunk.outgrown == (at <= PROMPT) and chunk.stop == PROMPT + 1
