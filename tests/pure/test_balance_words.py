"""The words of --balance: rules, their units, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.core.errors import FivefoldError, UnknownName
from fivefold.core.model import presets as models
from fivefold.core.model.balance import WORDS, Balance, check, parse

TINY, TINY_MOE = models.load("tiny"), models.load("tiny-moe")


def test_each_word_is_a_rule_with_its_unit() -> None:
    assert parse("aux") == (Balance("aux", "microbatch", 0.01),)
    assert parse("aux-seq") == (Balance("aux", "sequence", 0.0001),)
    assert parse("aux-global") == (Balance("aux", "global", 0.01),)
    assert parse("z") == (Balance("z", "token", 0.001),)
    assert parse("bias") == (Balance("bias", "global", 0.001),)
    assert parse("capacity:1.25") == (Balance("capacity", "sequence", 1.25),)
    by_position = Balance("capacity", "sequence", 2.0, keep="position")
    assert parse("capacity-position:2") == (by_position,)
    assert parse("none") == ()


def test_several_rules_keep_their_order_and_their_numbers() -> None:
    first, second, third = parse("bias+aux-seq:0.5+z")
    assert (first.kind, second.coefficient, third.kind) == ("bias", 0.5, "z")


@pytest.mark.parametrize(
    "text", ["aux", "aux-seq+z", "bias:0.01+aux-global", "capacity:1.25+z:2e-05", "aux+aux-seq"]
)
def test_rules_are_written_as_they_are_read(text: str) -> None:
    assert "+".join(map(str, parse(text))) == text


@pytest.mark.parametrize("word", WORDS)
def test_every_word_comes_back(word: str) -> None:
    text = f"{word}:1.5"
    assert str(*parse(text)) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("capacity", "capacity needs its factor, as in capacity:1.25"),
        ("capacity-position+z", "capacity-position needs its factor"),
        ("aux+aux:0.5", "given twice"),
        ("aux+none", "none goes with no other rule"),
        ("capacity:1+capacity-position:1", "given twice"),
        ("aux:", "'' must be a number above 0"),
        ("aux:-1", "above 0"),
        ("aux:0", "above 0"),
        ("z:nan", "above 0"),
        ("z:inf", "above 0"),
        ("z:1:2", "'1:2' must be a number"),
    ],
)
def test_what_cannot_be_is_refused(text: str, reason: str) -> None:
    with pytest.raises(FivefoldError) as caught:
        parse(text)
    assert reason in str(caught.value) and text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("aux-sequence", "did you mean aux-seq"),
        ("capacty:1", "did you mean capacity"),
        ("", "choose from aux, aux-global"),
        ("aux+", "choose from"),
        ("AUX", "did you mean aux"),
    ],
)
def test_unknown_words_are_answered_with_near_ones(text: str, hint: str) -> None:
    with pytest.raises(UnknownName) as caught:
        parse(text)
    assert hint in str(caught.value)


def test_rules_need_a_model_that_has_something_to_balance() -> None:
    check((), TINY)
    check(parse("aux+z+capacity:1"), TINY_MOE)
    with pytest.raises(FivefoldError, match=r"aux\+z: model 'tiny' has no experts"):
        check(parse("aux+z"), TINY)
    with pytest.raises(FivefoldError, match=r"--set moe\.bias=true"):
        check(parse("aux+bias"), TINY_MOE)
    assert TINY_MOE.moe is not None
    check(parse("bias"), replace(TINY_MOE, moe=replace(TINY_MOE.moe, bias=True)))
