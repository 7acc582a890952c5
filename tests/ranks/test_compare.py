"""The comparison itself, on numbers made by hand: what is wrong must be seen, and how wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fivefold.core.layout.layout import Layout
from fivefold.core.layout.rules import problems
from fivefold.core.layout.weight_table import WeightShard, weights
from fivefold.core.model import presets as models
from fivefold.core.model.presets import is_large, scale_down
from fivefold.verify.compare import (
    KINDS,
    ComparedPart,
    Wanted,
    errors_by_name,
    expected,
    first_disagreement,
    first_module,
    relative,
    tolerances,
)

WHOLE = WeightShard(None, 0, 2, 2, copies=2, partial=False)
LEFT = WeightShard(1, 0, 2, 4, copies=1, partial=False)
RIGHT = WeightShard(1, 2, 4, 4, copies=1, partial=False)
BELOW = WeightShard(0, 2, 4, 4, copies=1, partial=False)  # rows 2 and 3 of a vocabulary of 3
MATRIX = np.arange(8.0).reshape(2, 4)


def part(name: str, piece: WeightShard, start: int, *values: float) -> ComparedPart:
    return ComparedPart(name, piece, start, np.array(values))


def test_parts_lie_where_the_cuts_put_them() -> None:
    assert expected(MATRIX, part("w", RIGHT, 1, 0, 0)).tolist() == [3.0, 6.0]
    assert expected(MATRIX, part("w", WHOLE, 6, 0, 0)).tolist() == [6.0, 7.0]
    vocabulary = np.array([[1.0], [2.0], [3.0]])
    assert expected(vocabulary, part("v", BELOW, 0, 0, 0)).tolist() == [3.0, 0.0]


def test_the_error_is_relative_to_the_parameter_and_never_to_nothing() -> None:
    truth = {"w": MATRIX, "tiny": np.array([1e-9])}
    one = WeightShard(None, 0, 1, 1, copies=1, partial=False)
    parts = [
        part("w", LEFT, 0, 0, 1, 4, 5),
        part("w", RIGHT, 0, 2, 3.7, 6, 7),
        part("tiny", one, 0, 1e-9 + 7e-6),
    ]
    errors = errors_by_name(Wanted(truth, parts))
    assert errors["w"] == pytest.approx(0.7 / 7)
    assert errors["tiny"] == pytest.approx(7e-6 / 7e-3)


def test_every_copy_counts_and_a_missing_element_is_infinitely_wrong() -> None:
    left, right = part("w", LEFT, 0, 0, 1, 4, 5), part("w", RIGHT, 0, 2, 3, 6, 7)
    stray = replace(right, values=np.array([2, 3, 6, 7.7]))
    assert errors_by_name(Wanted({"w": MATRIX}, [left, right])) == {"w": 0.0}
    assert errors_by_name(Wanted({"w": MATRIX}, [left, right, stray]))["w"] == pytest.approx(0.1)
    short = part("w", RIGHT, 0, 2, 3, 6)
    assert errors_by_name(Wanted({"w": MATRIX}, [left, short]))["w"] == math.inf
    assert errors_by_name(Wanted({"w": MATRIX}, []))["w"] == math.inf


def test_what_is_no_number_is_infinitely_wrong() -> None:
    values = part("w", WHOLE, 0, math.nan, 1, 2, 3, 4, 5, 6, 7)
    assert errors_by_name(Wanted({"w": MATRIX}, [values]))["w"] == math.inf
    assert relative(math.nan, 1.0) == math.inf
    assert relative(1.5, 1.0) == 0.5


def test_the_first_difference_is_named_in_forward_order() -> None:
    order = ["embed.weight", "blocks.0.mlp.up.weight", "norm.weight"]
    assert first_module({"norm.weight", "blocks.0.mlp.up.weight"}, order) == "blocks.0.mlp.up"
    assert first_module(set(), order) is None


def test_tolerances_are_those_of_the_step_with_the_largest_floor_of_a_kind() -> None:
    floors = [dict.fromkeys(KINDS, 1e-13), dict.fromkeys(KINDS, 0.0) | {"grad_err": 1e-12}]
    found = tolerances("float64", floors)
    assert found.pop("grad_err") == pytest.approx(8e-12)
    assert found == pytest.approx(dict.fromkeys(found, 8e-13))
    assert tolerances("float32", floors)["loss_err"] == 8 * 2.0**-23  # a number is rounded itself


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt2-xl", "llama-3.1-405b", "mistral-7b", "qwen2.5-0.5b", "qwen3-32b"]
)
def test_scaled_down_models_are_small_and_split_alike(name: str) -> None:
    shape = models.load(name)
    assert is_large(shape)
    for tp in range(1, 65):
        layout = Layout(tp=tp)
        small = scale_down(shape, layout)
        assert not is_large(small) and small.layers <= 4
        seq = 64 * tp if shape.positions != "learned" else 64 * tp // math.gcd(64, tp)
        if seq <= shape.max_seq:
            legal = not problems(layout, shape, seq=seq)
            assert legal == (not problems(layout, small, seq=seq)), tp
            if legal:
                assert shape.vocab % tp == small.vocab % tp
    kept = ("tied", "norm", "activation", "positions", "qkv_bias", "qk_norm", "heads", "kv_heads")
    assert all(getattr(small, each) == getattr(shape, each) for each in kept)
    assert [each.cut for each in weights(replace(shape, layers=1))] == [
        each.cut for each in weights(replace(small, layers=1))
    ]


def test_tiny_is_verified_as_it_is() -> None:
    assert not is_large(models.load("tiny"))


def test_the_first_collective_in_another_order_is_named_with_both_ranks() -> None:
    same = {3: ["a", "b", "c"], 5: ["a", "b", "c"]}
    assert first_disagreement(same) is None
    assert first_disagreement(same | {7: ["a", "c", "b"]}) == (
        "as number 2 rank 3 issues b, and rank 7 c"
    )
    assert first_disagreement(same | {7: ["a", "b"]}) == (
        "as number 3 rank 3 issues c, and rank 7 nothing"
    )
