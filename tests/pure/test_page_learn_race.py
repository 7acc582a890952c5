"""The race, the ring and the experts of Learn: their numbers against core, and their laws."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from one_layout import attention_pairs

from fivefold.core.errors import UnknownName
from fivefold.core.layout import splits
from fivefold.core.layout.layout import Layout
from fivefold.core.model import balance
from fivefold.core.model.presets import load
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.core.schedule import catalog
from fivefold.core.schedule.clock import Costs, play
from fivefold.cost.traffic.collectives import predict_traffic
from fivefold_page.learn import context as ring
from fivefold_page.learn import expert, pipeline

WIDEST = 100


# The race.


@pytest.mark.parametrize("stages", pipeline.CHOICES["stages"].values)
def test_racers_have_the_times_that_the_clock_plays(stages: str) -> None:
    """With times that differ and a transfer, against schedules made and played here."""
    view = pipeline.view(
        {"schedules": "all", "stages": stages, "times": "1:1.1:0.7", "transfer": "0.1"}
    )
    assert {each["name"] for each in view["racers"] + view["refused"]} == {
        each.name for each in catalog.FAMILIES if not each.asynchronous
    }
    for racer in view["racers"]:
        schedule = catalog.make(racer["name"], int(stages), 8)
        timeline = play(schedule, Costs.uniform(schedule.placement, (1.0, 1.1, 0.7), 0.1))
        assert racer["makespan"] == timeline.makespan
        assert racer["ideal"] == pytest.approx(8 * 2.8)  # equal work, whatever the chunks
        assert racer["copies"] == (2 if racer["name"] == "dualpipe" else 1)
        assert racer["timeline"]["makespan"] == timeline.makespan
    assert view["end"] == max(racer["makespan"] for racer in view["racers"])


def test_the_finish_is_that_of_the_closed_forms() -> None:
    """p = 4, m = 8, F = B = W = 1: bubbles of 9, 3, 3, and half of 3 with two chunks."""
    view = pipeline.view({})
    finish = {each["name"]: (each["place"], each["makespan"]) for each in view["racers"]}
    assert finish == {
        "zb-v": (1, 25.5),
        "zb-interleaved": (1, 25.5),
        "zb-h1": (3, 27),
        "zb-h2": (3, 27),
        "1f1b": (5, 33),
    }
    assert view["sentences"][0].startswith("Order of the finish: 1. zb-v (25.5), 1. zb-interleaved")


def test_zb_h2_is_told_with_what_its_paper_counts() -> None:
    """Without a bubble in its span; 3 of 27 in a step that a global norm ends."""
    (said,) = [each for each in pipeline.view({})["sentences"] if "its paper" in each]
    assert said.startswith("zb-h2 idles 0.0% of its span")
    assert said.endswith(f"zb-h2 idles {3 / 27:.1%} of it.")
    params = {"stages": "6", "times": "1:1.1:0.7", "transfer": "0.1", "microbatches": "12"}
    (said,) = [each for each in pipeline.view(params)["sentences"] if "its paper" in each]
    schedule = catalog.make("zb-h2", 6, 12)
    timeline = play(schedule, Costs.uniform(schedule.placement, (1.0, 1.1, 0.7), 0.1))
    assert 0 < timeline.bubble_span < timeline.bubble_makespan - 0.001
    assert said.startswith(f"zb-h2 idles {timeline.bubble_span:.1%} of its span")
    assert said.endswith(f"zb-h2 idles {timeline.bubble_makespan:.1%} of it.")
    classic = pipeline.view({"schedules": "classic"})
    assert not any("paper" in each for each in classic["sentences"])


def test_those_who_cannot_run_are_named_with_their_rule() -> None:
    view = pipeline.view({"schedules": "bidirectional", "stages": "3"})
    assert [each["name"] for each in view["racers"]] == ["1f1b", "dualpipe-v"]
    assert view["refused"] == [
        {"name": "dualpipe", "why": "stages must be even: two directions meet"}
    ]
    assert any("dualpipe is not in this race" in each for each in view["sentences"])


def test_frames_say_what_every_rank_does_then() -> None:
    view = pipeline.view({"schedules": "classic"})
    by_time = {frame["time"]: frame for frame in view["frames"]}
    assert by_time[0]["now"] == [["F0", "·", "·", "·"]] * 2
    assert by_time[4]["now"] == [["F4", "F3", "F2", "F1"], ["·", "·", "·", "B0"]]  # gpipe, 1f1b
    assert by_time[33]["finished"] == ["gpipe", "1f1b"]
    assert list(by_time) == list(range(34))
    assert view["frames"][-1]["says"].endswith("1. gpipe (33), 1. 1f1b (33).")


def test_every_race_can_be_run_and_printed() -> None:
    for name in pipeline.SETS:
        for stages, microbatches in (("2", "4"), ("3", "24"), ("8", "6")):
            for times in ("1:1:1", "1:2:0"):
                params = {"schedules": name, "stages": stages, "microbatches": microbatches}
                view = pipeline.view(params | {"times": times})
                assert view["racers"] and len(view["frames"]) <= 50
                lines = pipeline.text(view)
                assert max(map(len, lines)) <= WIDEST
                for racer in view["racers"]:
                    assert any(f"{racer['name']:<14} {racer['makespan']:>6g}" in x for x in lines)


# The ring.


def seen_pairs(view: dict[str, Any]) -> Counter[tuple[int, int, int]]:
    """How often each (sheet, query, key) is computed, over all steps and ranks."""
    sheets = {rank: number for number, each in enumerate(view["sheets"]) for rank in each["ranks"]}
    return Counter(
        (sheets[rank], query, key)
        for frame in view["frames"]
        for rank, runs in enumerate(frame["runs"])
        for query, start, stop in runs
        for key in range(start, stop)
    )


@pytest.mark.parametrize("kind", ring.KINDS)
@pytest.mark.parametrize("cp", ring.CHOICES["cp"].values)
@pytest.mark.parametrize("window", ring.CHOICES["window"].values)
def test_every_pair_is_computed_once(kind: str, cp: str, window: str) -> None:
    view = ring.view({"kind": kind, "cp": cp, "window": window})
    reach = 32 if window == ring.NO_WINDOW else int(window)
    wanted = {
        (sheet, query, key)
        for sheet in range(len(view["sheets"]))
        for query in range(32)
        for key in range(max(0, query - reach + 1), query + 1)
    }
    found = seen_pairs(view)
    assert set(found) == wanted
    assert set(found.values()) == {1}
    heads = len(view["sheets"])  # ranks that share heads have 1/n of the pairs of all of them
    assert sum(sum(frame["seen"]) for frame in view["frames"]) == len(wanted) / heads


@pytest.mark.parametrize("kind", ring.KINDS)
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_work_of_a_rank_is_that_of_core(kind: str, cp: int) -> None:
    view = ring.view({"kind": kind, "cp": str(cp), "tokens": "64"})
    split = splits.context_split(Layout.parse(f"cp={cp}", context=kind), load("tiny"))
    wanted = attention_pairs(split, 64)
    done = [sum(frame["computed"][rank] for frame in view["frames"]) for rank in range(cp)]
    assert done == wanted
    assert done == [sum(frame["seen"][rank] for frame in view["frames"]) for rank in range(cp)]
    assert next(each for each in view["compared"] if each["kind"] == kind)["pairs"] == wanted
    pieces = [[[r.start, r.stop] for r in split.rank_tokens(64, rank)] for rank in range(cp)]
    assert [each["pieces"] for each in view["ranks"]] == pieces


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_zigzag_is_equal_in_every_step_and_the_plain_ring_is_not(cp: int) -> None:
    """The last rank of a plain ring works in all n steps, the first in one."""
    zigzag = ring.view({"kind": "zigzag", "cp": str(cp)})["frames"][1:]
    assert len(zigzag) == cp
    assert all(len(set(frame["computed"])) == 1 for frame in zigzag)
    plain = ring.view({"kind": "ring", "cp": str(cp)})["frames"][1:]
    busy = [sum(frame["computed"][rank] > 0 for frame in plain) for rank in range(cp)]
    assert busy == list(range(1, cp + 1))


@pytest.mark.parametrize("kind", ["ring", "zigzag"])
def test_what_a_rank_passes_on_is_what_the_next_one_has(kind: str) -> None:
    frames = ring.view({"kind": kind, "cp": "8"})["frames"][1:]
    for before, after in itertools.pairwise(frames):
        assert all(before["holds"][source] == [owner] for source, _, owner in before["moves"])
        arrived = {target: [owner] for _, target, owner in before["moves"]}
        assert [arrived[rank] for rank in range(8)] == after["holds"]
    assert not frames[-1]["moves"]


def test_bytes_of_the_real_model_are_those_of_the_docs() -> None:
    """The table of docs/context.md: Llama-3.1-8B, 131,072 tokens, cp=4, in MB."""
    sent = ring.view({"cp": "4"})["traffic"]["bytes"]
    found = {kind: round(size / 1e6, 1) for kind, size in sent.items()}
    assert found == {"ring": 1879.0, "zigzag": 1879.0, "allgather": 1610.6, "ulysses": 1006.6}


def test_the_ring_as_text_has_the_row_and_every_number() -> None:
    view = ring.view({"kind": "ring"})
    lines = ring.text(view)
    assert max(map(len, lines)) <= WIDEST
    assert "  " + "0" * 8 + "1" * 8 + "2" * 8 + "3" * 8 in lines
    assert "   pairs         0     64     64     64" in lines
    assert any(line.split()[:4] == ["ring", "228", "36", "228"] for line in lines)


# The experts.

EXPERT_PARAMS = [
    {"ep": ep, "top_k": k, "skew": skew, "capacity": capacity, "nodes": nodes}
    for ep in ("2", "4", "8")
    for k in ("1", "2")
    for skew in ("even", "mild", "heavy")
    for capacity in expert.CHOICES["capacity"].values
    for nodes in ("1", "2")
]


def added(matrix: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*matrix, strict=True)]


def test_slots_are_conserved() -> None:
    """Every token has its k slots, all that are kept arrive, and each comes back the same way."""
    for params in EXPERT_PARAMS:
        view = expert.view(params)
        ranks, k = view["ranks"], int(params["top_k"])
        counts = Counter((rank, token) for rank, token, *_ in view["slots"])
        assert set(counts.values()) == {k} and len(counts) == ranks * expert.TOKENS
        assert len({tuple(slot[:3]) for slot in view["slots"]}) == len(view["slots"])
        kept = [slot for slot in view["slots"] if slot[5]]
        arrived = added(view["moves"]["near"])
        assert arrived == view["numbers"]["by_rank"]
        homes = Counter(slot[2] * ranks // expert.EXPERTS for slot in kept)
        assert arrived == [homes[rank] for rank in range(ranks)]
        assert added(view["flows"]) == view["load"]
        if params["capacity"] == balance.NONE:
            assert len(kept) == len(view["slots"])
        if params["nodes"] == "1":
            sent = Counter(slot[0] for slot in kept)
            assert list(map(sum, view["moves"]["near"])) == [sent[rank] for rank in range(ranks)]


def test_over_nodes_a_token_crosses_once() -> None:
    for params in (each for each in EXPERT_PARAMS if each["nodes"] == "2"):
        view = expert.view(params)
        ranks, size = view["ranks"], view["ranks"] // 2
        node_of = {e: e * 2 // expert.EXPERTS for e in range(expert.EXPERTS)}
        wanted = {(s[0], s[1], node_of[s[2]]) for s in view["slots"] if s[5]}
        far = view["moves"]["far"]
        assert sum(map(sum, far)) == len(wanted)
        crossing = sum(rank // size != node for rank, _, node in wanted)
        assert view["numbers"]["rows"]["network"] == crossing
        # Only to the rank of the sender's own number, and inside of a node from there.
        assert all(
            not far[s][t] or s % size == t % size for s in range(ranks) for t in range(ranks)
        )
        near = view["moves"]["near"]
        assert all(
            not near[s][t] or s // size == t // size for s in range(ranks) for t in range(ranks)
        )
        assert view["numbers"]["bytes"]["network"] <= view["numbers"]["direct_bytes"]


def test_capacity_keeps_what_its_rule_says() -> None:
    for params in (each for each in EXPERT_PARAMS if each["capacity"] != balance.NONE):
        view = expert.view(params)
        (rule,) = balance.parse(params["capacity"])
        room = rule.capacity(expert.TOKENS, int(params["top_k"]), expert.EXPERTS)
        assert view["room"] == room
        for rank in range(view["ranks"]):
            for number in range(expert.EXPERTS):
                row = [s for s in view["slots"] if s[0] == rank and s[2] == number]
                kept = [s for s in row if s[5]]
                assert len(kept) == min(room, len(row))
                gone = [s for s in row if not s[5]]
                if gone and rule.keep == "position":
                    assert max(s[1] for s in kept) < min(s[1] for s in gone)
                elif gone:
                    assert min(s[3] for s in kept) >= max(s[3] for s in gone)


@pytest.mark.parametrize("ep", [2, 4, 8])
@pytest.mark.parametrize("model", ["tiny-moe", "mixtral-8x7b"])
def test_bytes_of_an_even_load_are_those_of_core(ep: int, model: str) -> None:
    """Both have 8 experts and 2 for each token: every rank hands over what the plan lists, besides
    counts and weights of slots."""
    weights = 4 * 2 * expert.TOKENS
    view = expert.view({"ep": str(ep), "skew": "even", "model": model})
    options = PlanOptions(model, layout=f"dp={ep} ep={ep}", seq=expert.TOKENS, microbatches=1)
    rows = [
        entry.bytes
        for entry in predict_traffic(resolve(options), 0, itemsize=2)
        if entry.axis == "ep" and entry.bytes not in (8 * expert.EXPERTS, weights)
    ]
    assert rows == [view["numbers"]["sent_bytes"][0]]
    assert len(set(view["numbers"]["sent_bytes"])) == 1
    assert view["numbers"]["imbalance"] == 1
    # 1/ep of it stays.
    assert view["numbers"]["bytes"]["local"] == rows[0]


def test_a_heavier_skew_waits_longer() -> None:
    found = [
        expert.view({"skew": skew})["numbers"]["imbalance"] for skew in ("even", "mild", "heavy")
    ]
    assert found == sorted(found) and len(set(found)) == 3
    capped = expert.view({"skew": "heavy", "capacity": "capacity:1"})["numbers"]
    assert capped["dropped"] > 0 and capped["fullest"] < expert.EXPERTS * expert.TOKENS
    assert capped["fullest"] <= 4 * 4  # ranks times room


def test_the_same_choices_are_the_same_picture() -> None:
    assert expert.view({"skew": "heavy"}) == expert.view({"skew": "heavy"})


def test_the_experts_as_text_say_the_same_numbers() -> None:
    for params in EXPERT_PARAMS[::7]:
        view = expert.view(params)
        lines = expert.text(view)
        assert max(map(len, lines)) <= WIDEST
        for number, (kept, asked) in enumerate(zip(view["load"], view["asked"], strict=True)):
            words = [str(number), str(number // view["on_rank"]), str(kept), str(asked - kept)]
            assert any(line.split()[:4] == words for line in lines)
        numbers = view["numbers"]
        assert f"{numbers['kept']} of {numbers['slots']} slots kept" in lines


@pytest.mark.parametrize("module", [pipeline, ring, expert])
@pytest.mark.parametrize(
    "params", [{"kind": "<script>"}, {"ep": "-8"}, {"stages": "10**9"}, {"x": ""}]
)
def test_other_values_are_refused(module: Any, params: dict[str, str]) -> None:
    with pytest.raises(UnknownName):
        module.view(params)
