"""Learn's first panels: the landscape, one layer with all five dimensions, the six collectives."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod
from typing import Any

import pytest

from fivefold.core.errors import FivefoldError, IllegalLayout
from fivefold.core.plan.plan import PlanOptions, resolve
from fivefold.cost.memory.static import static_bytes
from fivefold.cost.traffic.collectives import predict_traffic
from fivefold.cost.traffic.data_axis import PAYLOADS, Collective, message_bytes
from fivefold.render import WIDTH
from fivefold_page.explore import explore
from fivefold_page.learn import collectives, landscape, layer
from fivefold_page.learn.lesson import GROUPS, Choice, size_text

PANELS = (landscape, layer, collectives)


def wires(view: dict[str, Any], *ways: str) -> Counter[Collective]:
    """All that the stations of a layer move."""
    found: Counter[Collective] = Counter()
    for station in view["stations"]:
        for wire in (each for way in ways or ("forward", "backward") for each in station[way]):
            found[Collective(*(wire[name] for name in Collective._fields))] += wire["count"]
    return found


def station(view: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in view["stations"] if each["name"] == name)


# What the collectives are, without any ring: for each rank and slot the parts and the index.
def definition(kind: str, n: int) -> list[list[tuple[set[int], int] | None]]:
    everyone, ranks = set(range(n)), range(n)
    return {
        "all-reduce": [[(everyone, slot) for slot in ranks] for _ in ranks],
        "all-gather": [[({slot}, 0) for slot in ranks] for _ in ranks],
        "reduce-scatter": [[(everyone, s) if s == r else None for s in ranks] for r in ranks],
        "all-to-all": [[({slot}, rank) for slot in ranks] for rank in ranks],
        "broadcast": [[({0}, slot) for slot in ranks] for _ in ranks],
        "send and receive": [[({rank}, 0), ({(rank - 1) % n}, 0)] for rank in ranks],
    }[kind]


@pytest.mark.parametrize(("kind", "n"), [*product(collectives.COLLECTIVES, (2, 4, 8))])
def test_the_blocks_end_where_the_definition_says(kind: str, n: int) -> None:
    view = collectives.view({"collective": kind, "ranks": str(n)})
    end = [
        [block and (set(block["parts"]), block["index"]) for block in rank]
        for rank in view["frames"][-1]["state"]
    ]
    assert end == definition(kind, n)


def test_every_rank_sends_what_the_formula_says() -> None:
    size = 2**26
    for kind, n in product(collectives.COLLECTIVES, (2, 4, 8)):
        sent = collectives.view({"collective": kind, "ranks": str(n), "size": "64 MiB"})["sent"]
        whole = {"all-reduce": 2 * (n - 1) * size // n, "send and receive": size, "broadcast": size}
        last = 0 if kind == "broadcast" else whole.get(kind, (n - 1) * size // n)
        assert sent == [whole.get(kind, (n - 1) * size // n)] * (n - 1) + [last]


def test_one_message_a_rank_and_step() -> None:
    for kind, n in product(collectives.COLLECTIVES, (2, 4, 8)):
        for frame in collectives.view({"collective": kind, "ranks": str(n)})["frames"]:
            for end in ("source", "target"):
                ranks = [move[end] for move in frame["moves"]]
                assert len(set(ranks)) == len(ranks)


def test_uses_are_all_that_core_lists_and_no_more() -> None:
    options = [
        PlanOptions("tiny-moe", "dp=2x2 tp=2 pp=2 cp=2 ep=2", zero=2, context="hybrid"),
        PlanOptions("tiny-moe", "dp=2 tp=4 ep=2 etp=2", balance="aux"),
        PlanOptions("mixtral-8x7b", "dp=8 pp=2 ep=4", ep_nodes=2, zero=0),
    ]
    for wish in options:
        listed = predict_traffic(resolve(wish), 0, itemsize=2)
        assert {(e.kind, e.axis) for e in listed if e.kind != "recv"} <= set(PAYLOADS)
    shown = [
        (kind, use["axis"])
        for one in collectives.COLLECTIVES
        for use in collectives.view({"collective": one})["uses"]
        for kind in collectives.COLLECTIVES[one].kinds
        if kind != "recv"
    ]
    drawn = {kind for one in collectives.COLLECTIVES.values() for kind in one.kinds}
    assert sorted(shown) == sorted(each for each in PAYLOADS if each[0] in drawn)
    assert collectives.view({"collective": "broadcast"})["uses"] == []


@pytest.mark.parametrize("context", ["zigzag", "allgather", "ulysses", "hybrid"])
@pytest.mark.parametrize("sp", ["on", "off"])
def test_one_layer_moves_its_share_of_a_whole_step(context: str, sp: str) -> None:
    choices = {"model": "mixtral-8x7b", "tp": "2", "cp": "4", "ep": "4"}
    chosen = {**choices, "context": context, "sp": sp}
    view = layer.view(chosen)
    plan = layer.plan_of(view["choices"] | {"machine": "h100"})
    times = len(plan.stages[0]) * plan.batch.microbatches
    inside = ("ring", "ulysses", "ep", "ep-near", "ep-far", "etp")
    step = {
        Collective(each.axis, each.kind, each.bytes, each.group): each.count
        for each in predict_traffic(plan, 0, itemsize=2)
    }
    one = {call: count for call, count in wires(view).items() if call.axis in inside}
    assert one
    assert {call: count * times for call, count in one.items()} == {
        call: count for call, count in step.items() if call.axis in inside
    }
    # The embedding, on the first stage too, has one more sum, and in backward one more gather.
    kind = "reduce_scatter" if sp == "on" else "all_reduce"
    size = plan.local_seq * plan.shape.width * 2
    sums = wires(view)[Collective("tp", kind, size, 2)] * times
    assert step[Collective("tp", kind, size, 2)] == sums + plan.batch.microbatches
    assert wires(view, "forward")[Collective("pp", "send", message_bytes(plan, 2), 2)] == 1


def test_stations_take_all_that_core_lists_for_any_choice() -> None:
    grid = product(
        ("qwen3-30b-a3b", "tiny-moe"), ("1", "4", "8"), ("1", "2"), ("1", "8"), ("on", "off")
    )
    for model, tp, cp, ep, sp in grid:
        context = "hybrid" if tp == "8" else "ring"
        given = {"model": model, "tp": tp, "cp": cp, "ep": ep, "sp": sp, "context": context}
        view = layer.view(given)  # asserts that nothing is left, and that nothing is made up
        axes = {call.axis for call in wires(view)}
        assert ("tp" in axes) == (tp != "1")
        assert bool(axes & {"ring", "ulysses"}) == (cp != "1")
        assert bool(axes & {"ep", "ep-near", "ep-far"}) == (ep != "1")


def test_bytes_are_those_of_the_tensors_beside_them() -> None:
    view = layer.view({"model": "deepseek-v3", "tp": "4", "cp": "2"})
    own, gathered = station(view, "norm 1")["held"], station(view, "enter 1")["held"]
    assert own["sizes"] == [1, 4096 // 8, 7168]
    assert own["symbols"] == ["b", "s/(cp·tp)", "d"]
    assert gathered["sizes"] == [1, 4096 // 2, 7168]
    (gather,) = station(view, "enter 1")["forward"]
    (scatter,) = station(view, "leave 1")["forward"]
    assert gather["bytes"] == own["bytes"] == prod(own["sizes"]) * 2
    assert scatter["bytes"] == gathered["bytes"]
    # Zigzag: an early and a late piece of the row, of which the first tp rank has the early one.
    assert gathered["rows"] == [[0.0, 0.25], [0.75, 1.0]]
    assert own["rows"] == [[0.0, 0.125]]
    slots = station(view, "dispatch")
    assert slots["held"]["bytes"] == max(wire["bytes"] for wire in slots["forward"])
    query = station(view, "qkv")
    assert query["held"]["sizes"] == [1, 2048, 32, 192]
    assert {w["name"]: w["local"] for w in query["weights"]}["attention.q_up"] == [32 * 192, 1536]


def test_conjugate_pairs_swap_in_backward() -> None:
    with_sp = layer.view({"sp": "on", "tp": "2"})
    enter, leave = station(with_sp, "enter 1"), station(with_sp, "leave 1")
    assert (enter["title"], leave["title"]) == ("gather", "reduce")
    assert enter["pair"] == tuple(reversed(leave["pair"])) == ("all-gather", "reduce-scatter")
    assert [w["kind"] for w in enter["forward"]] == [w["kind"] for w in leave["backward"]]
    without = layer.view({"sp": "off", "tp": "2"})
    enter, leave = station(without, "enter 1"), station(without, "leave 1")
    assert (enter["title"], leave["title"]) == ("copy", "sum")
    assert enter["forward"] == leave["backward"] == []
    (back,), (there,) = enter["backward"], leave["forward"]
    assert back["kind"] == there["kind"] == "all_reduce"
    assert back["bytes"] == there["bytes"] == enter["held"]["bytes"]


def test_frames_walk_there_and_back() -> None:
    view = layer.view({})
    places = [frame["station"] for frame in view["frames"]]
    line = list(range(len(view["stations"])))
    assert places == [None, *line, *reversed(line)]
    assert [frame["back"] for frame in view["frames"]] == [False] * (len(line) + 1) + [True] * len(
        line
    )


def test_tiers_are_those_of_the_machine() -> None:
    near = layer.view({"tp": "8", "cp": "2", "machine": "h100"})
    (gather,) = station(near, "enter 1")["forward"]
    assert gather["tier"] == "nvlink"
    assert {wire["tier"] for wire in station(near, "attention")["forward"]} == {"network"}
    wide = layer.view({"tp": "8", "cp": "2", "machine": "gb200"})
    assert {wire["tier"] for wire in station(wide, "attention")["forward"]} == {"nvlink"}


def test_the_landscape_ends_at_the_whole_plan() -> None:
    given = {"model": "mixtral-8x7b", "dp": "4", "cp": "2", "tp": "2", "pp": "2", "ep": "4"}
    view = landscape.view({**given, "zero": "3"})
    options = PlanOptions("mixtral-8x7b", "dp=4 cp=2 tp=2 pp=2 ep=4", zero=3, seq=4096, batch=32)
    plan, end = resolve(options), view["frames"][-1]
    static = static_bytes(plan, 0, itemsize=2, optimizer="adamw", master=True)
    holds = {
        "batch": 32 // 4,
        "sequence": 4096 // 2,
        "between": 4096 // 4,
        "heads": 16,
        "layers": 16,
        "experts": 2,
        "activations": 4096 // 4 * 4096 * 2,
        "weights": static.weights,
        "gradients": static.gradients,
        "optimizer": static.master + static.optimizer + static.scalars,
    }
    assert end["holds"] == holds
    for row in view["rows"]:
        first = view["frames"][0]["holds"][row["name"]]
        assert prod(view["factors"][row["name"]]) * first == pytest.approx(holds[row["name"]])
    listed = predict_traffic(plan, 0, itemsize=2)
    for move in end["moves"]:
        same = [e for e in listed if (e.axis, e.kind) == (move["axis"], move["kind"])]
        assert move["bytes"] == sum(each.count * each.bytes for each in same)
        assert move["count"] == sum(each.count for each in same)
    assert {move["axis"] for move in end["moves"]} == {"fsdp", "edp"}


def test_each_dimension_cuts_its_own() -> None:
    degrees = {"dp": "4", "cp": "2", "tp": "2", "pp": "2", "ep": "2", "zero": "1"}
    view = landscape.view({"model": "tiny-moe", **degrees})
    cut = {
        name: {axis for axis, factor in zip(view["axes"], factors, strict=True) if factor != 1}
        for name, factors in view["factors"].items()
    }
    assert cut["batch"] == {"dp"}
    assert cut["sequence"] == {"cp"}
    assert cut["between"] == cut["activations"] == {"cp", "tp"}
    assert cut["heads"] == {"tp"}
    assert cut["layers"] == {"pp"}
    assert cut["experts"] == {"ep"}
    assert cut["weights"] == {"tp", "pp", "ep"}
    assert cut["gradients"] == {"tp", "pp", "ep"}
    assert cut["optimizer"] == {"tp", "pp", "ep", "zero"}
    assert [bool(frame["moves"]) for frame in view["frames"]] == [False] + [True] * 6
    still = landscape.view({"dp": "1", "cp": "1", "tp": "1", "pp": "1", "ep": "1", "zero": "0"})
    assert not any(frame["moves"] for frame in still["frames"])


@pytest.mark.parametrize("zero", ["0", "1", "2", "3"])
def test_the_landscape_holds_what_explore_says(zero: str) -> None:
    """Gradients whole under ZeRO-0 and 1, 43.5 GiB, and an eighth of them from stage 2 on."""
    degrees = {"cp": "2", "tp": "2", "pp": "2", "ep": "2", "zero": zero}
    view = landscape.view({"model": "mixtral-8x7b", "dp": "4", **degrees})
    asked = {"model": "mixtral-8x7b", "machine": "h100", "gpus": "32", "batch": "32", "seq": "4096"}
    parts = explore.view({**asked, **degrees})["memory"]["parts"]
    first = {name: sizes[0] for name, sizes in parts.items()}
    holds = view["frames"][-1]["holds"]
    assert holds["weights"] == first["weights"]
    assert holds["gradients"] == first["gradients"]
    assert size_text(holds["gradients"]) == ("43.5 GiB" if zero in "01" else "5.4 GiB")
    static = sum(first[name] for name in ("weights", "gradients", "master", "optimizer"))
    assert f"while gradients add up: 782.9 GiB on one device, {size_text(static)} on rank 0" in (
        " ".join(view["sentences"])
    )
    assert any(line.startswith("gradients, while they add up") for line in landscape.text(view))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.TITLE)
def test_unknown_values_are_refused_with_the_known_ones(panel: Any) -> None:
    choices: dict[str, Choice] = dict(panel.CHOICES)
    for name in choices:
        for value in ("", "-1", "<script>", "9" * 10_000):
            with pytest.raises(FivefoldError):
                panel.view({name: value})
    with pytest.raises(FivefoldError, match="choice"):
        panel.view({"modell": "tiny-moe"})


def test_an_impossible_combination_says_why() -> None:
    with pytest.raises(IllegalLayout, match="whole heads to every cp rank"):
        layer.view({"model": "tiny-moe", "tp": "4", "cp": "4", "context": "ulysses"})
    with pytest.raises(IllegalLayout, match="must divide"):
        landscape.view({"dp": "1", "cp": "1", "tp": "1", "ep": "8"})


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.TITLE)
def test_text_twins_fit_a_terminal(panel: Any) -> None:
    lines = panel.text(panel.view({}))
    assert max(map(len, lines)) <= WIDTH
    assert not any("_" in line for line in lines)


def test_text_twins_say_the_same_numbers() -> None:
    view = layer.view({"model": "deepseek-v3", "sp": "off", "tp": "8", "ep": "4"})
    said = " ".join(" ".join(layer.text(view)).split())
    for call in wires(view):
        assert size_text(call.bytes) in said
        assert f"among {call.group} {GROUPS[call.axis]}" in said
    view = landscape.view({})
    said = "\n".join(landscape.text(view))
    for frame in view["frames"]:
        for move in frame["moves"]:
            assert f"among {move['group']} {move['who']} over {move['tier']}" in said
            assert size_text(move["bytes"]) in said
    view = collectives.view({"collective": "all-to-all", "ranks": "8"})
    said = "\n".join(collectives.text(view))
    assert size_text(view["sent"][0]) in said
    assert all(use["what"] in said for use in view["uses"])
