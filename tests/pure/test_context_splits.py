"""The cut of a row over context ranks: laws of tokens, pairs and balance, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import cast, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_layout import attention_pairs

from fivefold.cli import main
from fivefold.core.errors import IllegalLayout
from fivefold.core.layout.layout import Layout
from fivefold.core.layout.rules import nearest, problems
from fivefold.core.layout.splits import (
    CONTEXT_KINDS,
    AttentionCall,
    ContextKind,
    ContextMethod,
    ContextSplit,
    Ranges,
    attention_calls,
    context_split,
    padded_length,
    ulysses_degree,
)
from fivefold.core.model import presets as models
from fivefold.core.plan.plan import PlanOptions, resolve

TINY = models.load("tiny")
KINDS: tuple[ContextKind, ...] = get_args(ContextKind)
BALANCED = [kind for kind in KINDS if kind != "ring"]
DEGREES = (1, 2, 3, 4, 6, 8, 12)
HEADS = 24  # that every degree divides

splits = st.builds(
    lambda kind, cp: context_split(Layout(cp=cp, context=kind), replace(TINY, heads=HEADS)),
    st.sampled_from(KINDS),
    st.sampled_from(DEGREES),
)
windows = st.none() | st.integers(1, 60)


def split(kind: ContextKind, cp: int) -> ContextSplit:
    return context_split(Layout(cp=cp, context=kind), replace(TINY, heads=HEADS))


def tokens(ranges: Ranges) -> list[int]:
    return [token for each in ranges for token in each]


def sees(query: int, key: int, window: int | None) -> bool:
    """What attention means: nothing of the future, and no more than the window."""
    return key <= query and (window is None or query - key < window)


# ---- who holds which tokens


@given(splits, st.integers(1, 5))
def test_every_token_is_on_one_rank_and_ranks_have_equally_many(
    cut: ContextSplit, times: int
) -> None:
    seq, cp = times * cut.unit, cut.inner * cut.outer
    ranks = [tokens(cut.rank_tokens(seq, coord)) for coord in range(cp)]
    assert sorted(token for rank in ranks for token in rank) == list(range(seq))
    assert {len(rank) for rank in ranks} == {seq // cp}
    for place in range(cut.outer):
        inside = ranks[place * cut.inner : (place + 1) * cut.inner]
        held = [token for rank in inside for token in rank]
        assert held == tokens(cut.ring_tokens(seq, place)) == sorted(held)


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        ("ring", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        ("zigzag", [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        ("allgather", [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
        ("ulysses", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        ("hybrid", [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]),
    ],
)
def test_sixteen_tokens_on_four_ranks(kind: ContextKind, held: list[list[int]]) -> None:
    assert [tokens(split(kind, 4).rank_tokens(16, coord)) for coord in range(4)] == held


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_a_row_is_padded_by_less_than_a_unit(seq: int, unit: int) -> None:
    assert padded_length(seq, unit) % unit == 0
    assert 0 <= padded_length(seq, unit) - seq < unit


@pytest.mark.parametrize(
    ("layout", "context", "sp", "whole", "local"),
    [
        ("cp=2", "zigzag", True, 40, 20),
        ("cp=2", "ring", True, 38, 19),
        ("cp=2", "ulysses", True, 38, 19),
        ("cp=4", "hybrid", True, 40, 10),
        ("cp=2 tp=4", "ring", True, 40, 20),  # each rank's part is split once more
        ("cp=2 tp=4", "ring", False, 38, 19),
        ("tp=4", "zigzag", True, 40, 40),
        ("dp=4", "zigzag", True, 37, 37),
    ],
)
def test_a_plan_pads_a_row_of_37(
    layout: str, context: str, sp: bool, whole: int, local: int
) -> None:
    plan = resolve(PlanOptions("tiny", layout=layout, context=context, sp=sp, seq=37))
    assert (plan.batch.seq, plan.padded_seq, plan.local_seq) == (37, whole, local)


@given(
    st.integers(1, 64), st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([24, 32, 36, 48, 120])
)
def test_hybrid_takes_the_largest_ulysses_degree_up_to_the_root(
    cp: int, tp: int, heads: int
) -> None:
    mine = heads // tp
    fits = [d for d in range(1, cp + 1) if cp % d == 0 and d * d <= cp and mine % d == 0]
    layout, shape = Layout(cp=cp, tp=tp, context="hybrid"), replace(TINY, heads=heads)
    assert ulysses_degree(shape, layout.tp, layout.cp) == max(fits)
    assert context_split(layout, shape) == ContextSplit(
        max(fits), cp // max(fits), zigzag=True, gathers=False
    )


@pytest.mark.parametrize(
    ("cp", "tp", "degree"),
    [(1, 1, 1), (2, 1, 1), (4, 1, 2), (8, 1, 2), (16, 1, 4), (16, 4, 2), (9, 1, 1), (64, 1, 8)],
)
def test_hybrid_on_eight_heads(cp: int, tp: int, degree: int) -> None:
    assert ulysses_degree(TINY, tp, cp) == degree


# ---- which pairs are computed where


def computed(
    call: AttentionCall, queries: Ranges, keys: Ranges, window: int | None
) -> Iterator[tuple[int, int]]:
    """The pairs of tokens that a call computes; of a masked one those that its mask leaves."""
    rows = tokens(queries)[call.q_start : call.q_stop]
    columns = tokens(keys)[call.k_start : call.k_stop]
    assert rows and columns
    assert not call.causal or rows == columns
    for i, query in enumerate(rows):
        for j, key in enumerate(columns):
            hidden = call.masked and not sees(query, key, window)
            if not hidden and not (call.causal and j > i):
                yield query, key


def hops(cut: ContextSplit, seq: int) -> Iterator[tuple[Ranges, Ranges]]:
    """The queries and the keys that meet, over all places."""
    for place in range(cut.outer):
        queries = cut.ring_tokens(seq, place)
        if cut.gathers:
            yield queries, (range(seq),)
        else:
            yield from ((queries, cut.ring_tokens(seq, other)) for other in range(cut.outer))


def require_exact(found: Counter[tuple[int, int]], wanted: set[tuple[int, int]]) -> None:
    assert set(found) == wanted
    assert set(found.values()) <= {1}


@given(splits, st.integers(1, 3), windows)
def test_every_visible_pair_is_in_one_call_of_one_place(
    cut: ContextSplit, times: int, window: int | None
) -> None:
    seq = times * cut.unit
    found: Counter[tuple[int, int]] = Counter()
    for queries, keys in hops(cut, seq):
        for call in attention_calls(queries, keys, window):
            found.update(computed(call, queries, keys, window))
    everything = ((query, key) for query in range(seq) for key in range(seq))
    require_exact(found, {pair for pair in everything if sees(*pair, window)})


@st.composite
def pieces(draw: st.DrawFn) -> Ranges:
    """Some of the pieces between any cuts of a short row."""
    cuts = draw(st.lists(st.integers(0, 24), min_size=2, max_size=7, unique=True))
    every = [range(start, stop) for start, stop in pairwise(sorted(cuts))]
    kept = draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
    return tuple(sorted(kept, key=lambda each: each.start))


@settings(max_examples=300)
@given(pieces(), pieces(), windows)
def test_calls_are_exact_for_any_queries_and_keys(
    queries: Ranges, keys: Ranges, window: int | None
) -> None:
    found: Counter[tuple[int, int]] = Counter()
    for call in attention_calls(queries, keys, window):
        mine = list(computed(call, queries, keys, window))
        seen = {key for _, key in mine}
        assert len(seen) == call.k_stop - call.k_start  # no key is brought that nobody sees
        found.update(mine)
    everything = ((query, key) for query in tokens(queries) for key in tokens(keys))
    require_exact(found, {pair for pair in everything if sees(*pair, window)})


@given(st.sampled_from(DEGREES[1:]), st.integers(1, 8))
def test_a_hop_of_zigzag_is_one_call_of_the_same_size_everywhere(n: int, c: int) -> None:
    cut, seq = split("zigzag", n), 2 * n * c
    for place in range(n):
        for other in range(n):
            (call,) = attention_calls(cut.ring_tokens(seq, place), cut.ring_tokens(seq, other))
            assert not call.masked and call.causal == (place == other)
            assert call.pairs == (c * (2 * c + 1) if place == other else 2 * c * c)


@given(st.sampled_from(DEGREES[1:]), st.integers(1, 8))
def test_a_plain_ring_has_nothing_to_do_with_later_keys(n: int, c: int) -> None:
    cut, seq = split("ring", n), n * c
    for place in range(n):
        counts = [
            len(attention_calls(cut.ring_tokens(seq, place), cut.ring_tokens(seq, other)))
            for other in range(n)
        ]
        assert counts == [1] * (place + 1) + [0] * (n - place - 1)


# ---- who computes how much


@given(st.sampled_from(BALANCED), st.sampled_from(DEGREES), st.integers(1, 9))
def test_all_but_the_plain_ring_are_balanced(kind: ContextKind, cp: int, times: int) -> None:
    cut = split(kind, cp)
    seq = times * cut.unit
    found, whole = attention_pairs(cut, seq), seq * (seq + 1) // 2
    assert len(found) == cp
    assert max(found) == min(found) == whole // cp
    gathered = sum(call.pairs for hop in hops(cut, seq) for call in attention_calls(*hop))
    assert gathered == whole


@given(st.sampled_from(DEGREES), st.integers(1, 9))
def test_the_last_rank_of_a_plain_ring_does_most(n: int, c: int) -> None:
    """Place r sees r pieces of c keys whole, and its own half: max/min → 2n − 1, max/mean →
    2 − 1/n."""
    found = attention_pairs(split("ring", n), n * c)
    assert found == [r * c * c + c * (c + 1) // 2 for r in range(n)]
    assert Fraction(max(found), min(found)) == 1 + Fraction(2 * (n - 1) * c, c + 1)
    mean = Fraction(sum(found), n)
    assert Fraction(max(found)) / mean == Fraction((2 * n - 1) * c + 1, n * c + 1)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_imbalance_of_a_long_plain_ring(n: int) -> None:
    found = attention_pairs(split("ring", n), 131_072)
    assert max(found) / min(found) == pytest.approx(2 * n - 1, rel=1e-3)
    assert max(found) * n / sum(found) == pytest.approx(2 - 1 / n, rel=1e-3)


# ---- what is refused


@given(st.sampled_from(KINDS), st.sampled_from(DEGREES), st.integers(1, 200), windows)
def test_no_window_stands_in_the_way_of_a_degree(
    kind: ContextKind, cp: int, seq: int, window: int | None
) -> None:
    shape, layout = replace(TINY, heads=HEADS), Layout(cp=cp, context=kind)
    plain = problems(layout, shape, seq=seq)
    assert problems(layout, replace(shape, window=window), seq=seq) == plain
    assert bool(plain) == (seq < split(kind, cp).unit)


@pytest.mark.parametrize(
    ("words", "reason", "first"),
    [
        (
            "cp=16 --context ulysses",
            "context=ulysses gives whole heads to every cp rank, and cp=16 does not divide the 8 "
            "heads of a tp rank: use cp=8 or context=hybrid",
            "dp=2 cp=8",
        ),
        (
            "cp=8,tp=2 --context ulysses",
            "cp=8 does not divide the 4 heads of a tp rank: use cp=4 or context=hybrid",
            "dp=2 tp=2 cp=4",
        ),
        (
            "cp=8 --seq 10",
            "seq=10 is split by cp=8 (zigzag), which takes at least 16 tokens: use seq=16 or more, "
            "or cp=5",
            "dp=2 cp=4",
        ),
        (
            "cp=8,tp=2 --seq 5",
            "seq=5 is split by cp=8 (zigzag) and then by tp=2 (sequence parallelism), which takes "
            "at least 16 tokens: use seq=16 or more, or cp=2",
            "dp=4 tp=2 cp=2",
        ),
        (
            "cp=8 --context ring --seq 7",
            "seq=7 is split by cp=8 (ring), which takes at least 8 tokens: use seq=8 or more, or "
            "cp=7",
            "dp=2 cp=4",
        ),
        (
            "cp=8 --seq 60 --set positions=learned,max_seq=62",
            "seq=60 is padded to 64, more than the 62 learned positions of the model: use seq=48",
            "dp=4 cp=2",
        ),
    ],
)
def test_a_degree_that_cannot_be_is_refused_with_the_nearest_that_can(
    words: str, reason: str, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, *rest = words.split()
    with pytest.raises(SystemExit) as stop:
        main(["plan", "tiny", "--layout", layout.replace(",", " "), *rest])
    said = capsys.readouterr()
    assert stop.value.code == 2 and not said.out
    assert reason in said.err
    assert f"nearest legal layouts:\n  - {first}\n" in said.err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seq", [1, 2, 3, 5, 7, 11, 13])
def test_a_short_row_is_told_the_most_ranks_it_can_take(kind: ContextKind, seq: int) -> None:
    layout = Layout(cp=16, context=kind)
    short = problems(layout, TINY, seq=seq)[0]
    legal = [cp for cp in range(1, 17) if not problems(replace(layout, cp=cp), TINY, seq=seq)]
    assert short.endswith(f", or cp={max(legal)}")


@pytest.mark.parametrize("positions", [10, 17, 40, 62])
def test_padding_beyond_the_learned_positions_is_told_a_length_that_fits(positions: int) -> None:
    shape = replace(TINY, positions="learned", max_seq=positions)
    layout = Layout(cp=8)
    reasons = problems(layout, shape, seq=positions)
    legal = [seq for seq in range(1, positions + 1) if not problems(layout, shape, seq=seq)]
    for seq in legal[-1:]:
        assert reasons == [
            f"seq={positions} is padded to {padded_length(positions, 16)}, more than the "
            f"{positions} learned positions of the model: use seq={seq}"
        ]
    assert bool(legal) == (positions >= 16)
    assert not any("seq=0" in reason for reason in reasons)


@settings(max_examples=30)
@given(st.sampled_from(KINDS), st.integers(2, 24), st.integers(1, 30))
def test_what_is_offered_is_legal(kind: ContextKind, cp: int, seq: int) -> None:
    near = nearest(Layout(cp=cp, context=kind), TINY, seq=seq)
    assert len(near) == 3
    assert all(problems(one, TINY, seq=seq) == [] for one in near)


def test_a_new_kind_is_an_entry_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    method = ContextMethod(heads="some", zigzag=False, gathers=True)
    monkeypatch.setitem(CONTEXT_KINDS, "dummy", method)
    layout = Layout(cp=4, context=cast(ContextKind, "dummy"))
    assert context_split(layout, TINY) == ContextSplit(2, 2, zigzag=False, gathers=True)
    assert problems(layout, TINY, seq=64) == []
    with pytest.raises(IllegalLayout, match="did you mean dummy"):
        Layout(cp=4, context=cast(ContextKind, "dumy"))
