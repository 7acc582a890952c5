"""The data and the tensor panel: their numbers against the core's, and against one device's."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from pathlib import Path

import numpy
import pytest
from live_bytes import gathered_bytes
from numpy.typing import NDArray

import fivefold
from fivefold.core.errors import FivefoldError
from fivefold.core.hardware import load
from fivefold.cost.traffic.collectives import predict_traffic, traffic_entries
from fivefold_page.learn import data, tensor
from fivefold_page.learn.data_steps import GRAD_ITEMSIZE, ITEMSIZE, MOST_IN_FLIGHT
from fivefold_page.learn.lesson import size_text
from fivefold_page.learn.tensor_example import INNER, PARTS, Example

ZERO_CASES = [
    {"zero": zero, "gather": gather, "microbatches": microbatches, "dp": dp, "model": model}
    for zero, gather in (*product("0123", ["microbatch"]), ("3", "step"))
    for microbatches, dp, model in (("1", "8", "llama-3.1-8b"), ("3", "2", "tiny"))
]


def name_of(case: dict[str, str]) -> str:
    return "-".join(case.values())


@pytest.mark.parametrize("case", ZERO_CASES, ids=name_of)
def test_frames_move_and_hold_what_the_core_says(case: dict[str, str]) -> None:
    """Not a byte more or less than the lists that runs are held against."""
    plan, view = data.plan_of(case), data.view(case)
    moves = [move for frame in view["frames"] for move in frame["moves"]]
    calls = Counter((move["axis"], move["kind"], move["bytes"], move["group"]) for move in moves)
    assert traffic_entries(calls.items()) == predict_traffic(plan, 0, itemsize=ITEMSIZE)
    assert view["frames"][-1]["sent"] == view["stages"][int(case["zero"])]["sent"]
    (norm,) = [frame for frame in view["frames"] if frame["phase"] == "norm"]
    ledger = [data.static_memory(plan, rank) for rank in range(plan.layout.dp)]
    assert norm["live"] == [one.device for one in ledger]
    slices = min(frame["held"]["weights"] for frame in view["frames"])
    gathered = max(frame["held"]["weights"] - slices for frame in view["frames"])
    assert gathered == gathered_bytes(plan, 0, ITEMSIZE)
    assert view["frames"][-1]["peak"] == [
        max(frame["live"][rank] for frame in view["frames"]) for rank in range(plan.layout.dp)
    ]


@pytest.mark.parametrize("dp", ["2", "4", "8"])
def test_bytes_a_parameter_by_stage(dp: str) -> None:
    """2 + 4 + 12: a weight, its gradient in float32, and the optimizer's copy and moments; while
    gradients add up, stages 0 and 1 have them whole."""
    over = int(dp)
    view = data.view({"dp": dp})
    found = [one["per_parameter"] for one in view["stages"]]
    assert found[0] == pytest.approx(sum(view["bytes"].values()), rel=1e-6)
    assert found == pytest.approx([18, 6 + 12 / over, 2 + 16 / over, 18 / over], rel=1e-6)
    numel = view["stages"][0]["standing"] / 18
    stands = [one["standing"] / numel for one in view["stages"]]
    assert stands == pytest.approx([18, 2 + 16 / over, 2 + 16 / over, 18 / over], rel=1e-6)


@pytest.mark.parametrize("model", ["tiny", "llama-3.1-8b"])
@pytest.mark.parametrize("zero", ["0", "1", "2", "3"])
def test_what_adds_up_is_what_the_frames_hold(zero: str, model: str) -> None:
    """Between two microbatches, less what ZeRO-2 and 3 still sum and what ZeRO-3 gathers ahead."""
    view = data.view({"zero": zero, "model": model, "dp": "4", "microbatches": "2"})
    stage, frames = view["stages"][int(zero)], view["frames"]
    last = [at for at, one in enumerate(frames) if one["phase"] == "backward"][5]
    between = next(one for one in frames[last + 1 :] if one["phase"] in ("wait", "forward"))
    passing = sum(
        GRAD_ITEMSIZE * unit["elements"]
        for unit, words in zip(view["units"], between["gradients"], strict=True)
        if "summing" in words
    )
    gathered = between["held"]["weights"] - min(one["held"]["weights"] for one in frames)
    assert bool(passing) == (zero in "23") and bool(gathered) == (zero == "3")
    assert stage["accumulating"] == between["live"][0] - passing - gathered
    (norm,) = [one for one in frames if one["phase"] == "norm"]
    assert stage["standing"] == norm["live"][0]
    assert stage["accumulating"] <= stage["peak"]


def test_one_microbatch_adds_nothing_up() -> None:
    """ZeRO-1 then never has all gradients whole at once, and the panel says so."""
    for microbatches in "12":
        view = data.view({"dp": "4", "microbatches": microbatches})
        one, said = view["stages"][1], " ".join(view["sentences"])
        assert (one["peak"] < one["accumulating"]) == (microbatches == "1")
        adding, before = size_text(one["accumulating"]), size_text(one["standing"])
        held = f"{adding} while they add up, {before} before"
        assert held in said
        assert (f"and {size_text(one['peak'])} is the most" in said) == (microbatches == "1")


def test_stage_1_keeps_whole_gradients_between_microbatches() -> None:
    """Which is what stage 2 pays a sum for every microbatch for."""
    held = {}
    for zero in ("1", "2"):
        frames = data.view({"zero": zero, "microbatches": "2"})["frames"]
        second = [place for place, one in enumerate(frames) if one["phase"] == "forward"][6]
        held[zero] = frames[second]["gradients"]
    assert held["1"] == [["filling"]] * 6
    assert held["2"] == [["summing"], ["summing"], *[["slice"]] * 4]


def test_whole_gradients_under_way_are_those_of_the_runtime() -> None:
    source = (Path(fivefold.__file__).parent / "parallel" / "data.py").read_text("utf-8")
    assert f"_MOST_IN_FLIGHT = {MOST_IN_FLIGHT}" in source
    frames = data.view({"zero": "2"})["frames"]
    assert max(sum("summing" in unit for unit in one["gradients"]) for one in frames) == 2


def test_gradients_under_way_by_hand() -> None:
    """Block 2 fills while head and block 3 are summed, each with a buffer for the slice to come."""
    block, head = 218_112_000, 525_340_672  # weights of Llama-3.1-8B; its head has the last norm
    wanted = {"0": 2 * block + head, "2": block + (block + head) * 5 // 4}
    for zero, size in wanted.items():
        frames = data.view({"zero": zero, "dp": "4"})["frames"]
        (frame,) = [one for one in frames if (one["phase"], one["computes"]) == ("backward", 3)]
        assert frame["held"]["gradients"] == 4 * size
    # In a second microbatch every unit has a slice already; two are still under way.
    frames = data.view({"zero": "2", "dp": "4", "microbatches": "2"})["frames"]
    second = [one for one in frames if (one["phase"], one["computes"]) == ("backward", 3)][1]
    slices = (525_336_576 + 4 * block + head) // 4
    assert second["held"]["gradients"] == 4 * (slices + wanted["2"])


def test_data_twin_says_the_same_numbers() -> None:
    for zero in "0123":
        view = data.view({"zero": zero, "microbatches": "2"})
        lines = data.text(view)
        assert max(map(len, lines)) <= 100
        numbered = [
            line for line in lines if re.match(r" *\d+ (start|wait|forward|back|red)", line)
        ]
        assert sum("reduce-scatter" in line or "all-reduce" in line for line in numbered) > 5
        for stage in view["stages"]:
            (line,) = [line for line in lines if line.startswith(f"ZeRO-{stage['zero']}   ")]
            sizes = [size_text(stage[key]) for key in ("accumulating", "standing", "peak", "sent")]
            assert line.split()[1:] == " ".join([f"{stage['per_parameter']:.2f}", *sizes]).split()


@pytest.mark.parametrize(
    "params", [{"zero": "4"}, {"dp": "-1"}, {"model": "<script>"}, {"layers": "9" * 5000}]
)
def test_hostile_choices_of_data(params: dict[str, str]) -> None:
    with pytest.raises(FivefoldError):
        data.view(params)


TENSOR_CASES = list(product(PARTS, ("1", "2", "4", "8"), ("on", "off")))


def one_device(
    given: dict[str, NDArray[numpy.int64]], part: str
) -> dict[str, NDArray[numpy.int64]]:
    """Forward and backward of the whole example, by numpy and without any block."""
    x, gradient = given["X"], given["dY"]
    if part == "mlp":
        inner = x @ given["W1"]
        mixed = numpy.maximum(inner, 0)
        of_inner = (gradient @ given["W2"].T) * (inner > 0)
        return {"Y": mixed @ given["W2"], "dX": of_inner @ given["W1"].T}
    q, k, v = (x @ given[name] for name in ("Wq", "Wk", "Wv"))
    seen = numpy.tril(numpy.ones((len(x), len(x)), dtype=numpy.int64))
    mixed = numpy.einsum("ih,jh,jh,ij->ih", q, k, v, seen)
    of_mixed = gradient @ given["Wo"].T
    found = numpy.einsum("ih,jh,jh,ij->ih", of_mixed, k, v, seen) @ given["Wq"].T
    found += numpy.einsum("ih,ih,jh,ij->jh", of_mixed, q, v, seen) @ given["Wk"].T
    found += numpy.einsum("ih,ih,jh,ij->jh", of_mixed, q, k, seen) @ given["Wv"].T
    return {"Y": mixed @ given["Wo"], "dX": found}


@pytest.mark.parametrize(("part", "tp", "sp"), TENSOR_CASES)
def test_the_ranks_together_have_what_one_device_has(part: str, tp: str, sp: str) -> None:
    """Read off the frames, as the reader sees them."""
    example = Example(part, int(tp), sp == "on")
    given = {name: numpy.array(values) for name, values in example.inputs.items()}
    truth = one_device(given, part)
    frames = {
        frame["phase"]: frame for frame in tensor.view({"part": part, "tp": tp, "sp": sp})["frames"]
    }
    for name, summands, result in (("Y", "row", "reduce"), ("dX", "column back", "reduce back")):
        parts = [numpy.array(rank[0][-1]["values"]) for rank in frames[summands]["ranks"]]
        assert (sum(parts) == truth[name]).all()
        assert numpy.count_nonzero(truth[name]) > truth[name].size / 2
        if tp == "1":
            assert result not in frames
            continue
        shown = [numpy.array(rank[0][-1]["values"]) for rank in frames[result]["ranks"]]
        whole = [numpy.concatenate(shown)] if sp == "on" else shown
        assert all((one == truth[name]).all() for one in whole)


@pytest.mark.parametrize("part", PARTS)
def test_gradients_of_weights_are_blocks_of_the_whole(part: str) -> None:
    example = Example(part, 4, True)
    for name in example.into:
        blocks = [numpy.array(rank[f"d{name}"]) for rank in example.ranks]
        whole = numpy.array(example.one_device[f"d{name}"])
        assert (numpy.concatenate(blocks, axis=1) == whole).all() and whole.shape == (4, INNER)
    rows = [numpy.array(rank[f"d{example.back}"]) for rank in example.ranks]
    assert (numpy.concatenate(rows) == numpy.array(example.one_device[f"d{example.back}"])).all()


@pytest.mark.parametrize("part", PARTS)
def test_equations_of_products_hold(part: str) -> None:
    """Left and right of every "=" on the screen."""
    for frame in tensor.view({"part": part, "tp": "4"})["frames"]:
        for equation in (one for rank in frame["ranks"] for one in rank if "=" in one):
            left, (result,) = equation[: equation.index("=")], equation[equation.index("=") + 1 :]
            matrices = [numpy.array(one["values"]) for one in left if not isinstance(one, str)]
            assert [one for one in left if isinstance(one, str)][::2] == ["×"] * (
                len(matrices) // 2
            )
            made = sum(a @ b for a, b in zip(matrices[::2], matrices[1::2], strict=True))
            assert (made == numpy.array(result["values"])).all()


@pytest.mark.parametrize(("part", "tp", "sp"), TENSOR_CASES)
def test_a_layer_moves_what_the_core_says(part: str, tp: str, sp: str) -> None:
    """Attention and MLP move the same; together they are what `core/axes.py` lists for a layer."""
    view = tensor.view({"part": part, "tp": tp, "sp": sp, "model": "llama-3.1-8b"})
    moves = [move for frame in view["frames"] for move in frame["moves"]]
    calls = Counter((move["axis"], move["kind"], move["bytes"], move["group"]) for move in moves)
    plan = tensor.plan_of(view["choices"])
    assert {call: 2 * count for call, count in calls.items()} == tensor.layer_calls(plan)
    activations = 8192 * 4096 * 2
    sizes = {"all_gather": activations // int(tp), "reduce_scatter": activations}
    assert all(move["bytes"] == sizes.get(move["kind"], activations) for move in moves)


def test_a_link_of_the_machine() -> None:
    real = tensor.view({"tp": "8", "machine": "a100"})["real"]
    tier = load("a100").tiers[0]
    assert (real["tier"], real["bandwidth"]) == (tier.name, tier.bandwidth)
    gather = real["calls"]["all_gather"]
    assert gather["seconds"] == pytest.approx(7 * gather["bytes"] / tier.bandwidth)
    assert real["pieces"][0]["local"] == [28672 // 8, 8192]


@pytest.mark.parametrize("part", PARTS)
def test_row_first_is_wrong_without_a_sum(part: str) -> None:
    frame = tensor.view({"part": part, "tp": "4"})["frames"][-1]
    early = sum(numpy.array(rank[0][-1]["values"]) for rank in frame["ranks"])
    right = numpy.array(frame["one_device"]["values"])
    wrongs = numpy.count_nonzero(early != right)
    assert wrongs > 0 and f"{wrongs} of {right.size} numbers" in frame["says"]
    assert (early == numpy.array(frame["sum"]["values"])).all()


@pytest.mark.parametrize(("part", "tp", "sp"), TENSOR_CASES)
def test_tensor_twin_says_the_same_numbers(part: str, tp: str, sp: str) -> None:
    view = tensor.view({"part": part, "tp": tp, "sp": sp})
    lines = tensor.text(view)
    assert max(map(len, lines)) <= 100
    squeezed = [" ".join(line.split()) for line in lines]
    row = view["frames"][-1]["one_device"]["values"][0]
    assert any(" ".join(map(str, row)) in line for line in squeezed)
    assert view["frames"][0]["says"].split(".")[0] in " ".join(squeezed)


@pytest.mark.parametrize("params", [{"tp": "3"}, {"part": "<b>"}, {"machine": "../x"}, {"q": ""}])
def test_hostile_choices_of_tensor(params: dict[str, str]) -> None:
    with pytest.raises(FivefoldError):
        tensor.view(params)
