"""Learn: one sequence over the context ranks, step by step, with the pairs of each rank.

    view(params) -> {"choices", "tokens", "ranks", "sheets", "frames", "compared", "traffic",
                     "sentences"}

`sheets` are the drawn squares of queries and keys: one if a rank has all heads, and one for each
rank if the ranks share the heads. A frame has for each rank the pairs that it computes, as runs
[query, first key, last key + 1] of a sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple, get_args

from fivefold.core import PRECISIONS, counted, span
from fivefold.core.layout import (
    CONTEXT_KINDS,
    ContextKind,
    ContextSplit,
    Layout,
    Ranges,
    attention_calls,
    context_split,
)
from fivefold.core.model import load
from fivefold.core.plan import PlanOptions, resolve
from fivefold.cost.traffic import predict_traffic
from fivefold.render import wrapped
from fivefold_page import Params, View
from fivefold_page.learn.lesson import Choice, chosen, sentence_lines

TITLE = "Context: one row over many ranks"
# Not those that combine a ring with an exchange of heads, which have no picture.
KINDS = tuple(kind for kind in get_args(ContextKind) if CONTEXT_KINDS[kind].heads != "some")
NO_WINDOW = "none"
CHOICES: Mapping[str, Choice] = {
    "kind": Choice("Kind", KINDS, "zigzag"),
    "cp": Choice("Context ranks", ("2", "4", "8"), "4"),
    "tokens": Choice("Tokens of the row", ("16", "32", "64"), "32"),
    "window": Choice("Sliding window", (NO_WINDOW, "8", "16"), NO_WINDOW),
}
_SMALL_MODEL = "tiny"
HEADS = load(_SMALL_MODEL).heads  # divisible by every cp of the panel
_REAL_MODEL, _REAL_SEQ = "llama-3.1-8b", 131_072


class Work(NamedTuple):
    """Pairs of a query and a key per head: those that the mask allows, and those computed."""

    seen: float
    computed: float


def view(params: Params) -> View:
    """The sequence, its shards, and what every rank computes, receives and sends in each step."""
    choices = chosen(CHOICES, params)
    tokens = int(choices["tokens"])
    window = None if choices["window"] == NO_WINDOW else int(choices["window"])
    split = _split(choices["kind"], int(choices["cp"]))
    num_ranks = split.inner * split.outer
    frames = _frames(choices["kind"], split, tokens, window)
    compared = [_compared(kind, num_ranks, tokens, window) for kind in KINDS]
    return {
        "choices": choices,
        "tokens": tokens,
        "window": window,
        "heads": HEADS,
        "ranks": [
            {"rank": rank, "pieces": [[r.start, r.stop] for r in split.rank_tokens(tokens, rank)]}
            for rank in range(num_ranks)
        ],
        "sheets": _sheets(split),
        "frames": frames,
        "compared": compared,
        "traffic": {
            "model": _REAL_MODEL,
            "tokens": _REAL_SEQ,
            "bytes": {kind: _bytes_of_layer(kind, num_ranks) for kind in KINDS},
        },
        "sentences": _sentences(choices["kind"], compared, tokens, window),
    }


def _split(kind: str, num_ranks: int) -> ContextSplit:
    return context_split(Layout.parse(f"cp={num_ranks}", context=kind), load(_SMALL_MODEL))


def _sheets(split: ContextSplit) -> list[View]:
    """The drawn squares, and the ranks that work on each."""
    if split.inner == 1:
        return [{"label": f"all {HEADS} heads", "ranks": list(range(split.outer))}]
    share = HEADS // split.inner
    noun = "head" if share == 1 else "heads"
    heads = [range(first, first + share) for first in range(0, HEADS, share)]
    return [
        {"label": f"{noun} {span(own_heads)}", "ranks": [r]} for r, own_heads in enumerate(heads)
    ]


def _frames(kind: str, split: ContextSplit, tokens: int, window: int | None) -> list[View]:
    num_ranks = split.inner * split.outer
    ranges = split.rank_tokens(tokens, 0)
    first = " and ".join(f"{interval.start}–{interval.stop - 1}" for interval in ranges)
    dealt = "an early and a late chunk" if len(ranges) > 1 else "one chunk"
    says = (
        f"The row of {tokens} tokens is cut over {num_ranks} ranks ({kind}): {dealt} for every "
        f"rank, so that rank 0 has tokens {first}. A token sees itself and what stands before it: "
        "the triangle."
    )
    frames = [_frame("cut", says, [[rank] for rank in range(num_ranks)], [])]
    if split.inner > 1:
        frames += _ulysses_frames(split, tokens, window)
    elif split.gathers:
        frames += _gathered_frames(split, tokens, window)
    else:
        frames += [_ring_frame(split, tokens, window, hop) for hop in range(split.outer)]
    return frames


def _frame(
    phase: str,
    says: str,
    holds: list[list[int]],
    moves: list[list[int]],
    done: list[tuple[Work, list[list[int]]]] | None = None,
) -> View:
    """`holds`: the owners of the keys and values on each rank; `moves`: source, target, owner."""
    work = done or [(Work(0, 0), list[list[int]]())] * len(holds)
    return {
        "phase": phase,
        "says": says,
        "holds": holds,
        "moves": moves,
        "seen": [rank_work.seen for rank_work, _ in work],
        "computed": [rank_work.computed for rank_work, _ in work],
        "runs": [runs for _, runs in work],
    }


def _ring_frame(split: ContextSplit, tokens: int, window: int | None, hop: int) -> View:
    num_ranks = split.outer
    owners = [(rank - hop) % num_ranks for rank in range(num_ranks)]
    places = [split.ring_tokens(tokens, rank) for rank in range(num_ranks)]
    done = [_done(places[rank], places[owner], window) for rank, owner in enumerate(owners)]
    last = hop == num_ranks - 1
    moves = [[rank, (rank + 1) % num_ranks, owner] for rank, owner in enumerate(owners)]
    whose = "its own keys and values" if hop == 0 else "the keys and values that came last"
    on = "Nothing has to travel any more" if last else "They go on to the next rank meanwhile"
    says = (
        f"Step {hop + 1} of {num_ranks}: every rank computes its queries with {whose}. {on}. "
        + _work_words([work for work, _ in done])
    )
    return _frame("compute", says, [[owner] for owner in owners], [] if last else moves, done)


def _gathered_frames(split: ContextSplit, tokens: int, window: int | None) -> list[View]:
    ranks = list(range(split.outer))
    moves = [[source, target, source] for source in ranks for target in ranks if source != target]
    everything = [ranks for _ in ranks]
    done = [_done(split.ring_tokens(tokens, rank), (range(tokens),), window) for rank in ranks]
    return [
        _frame(
            "exchange",
            f"One all-gather: every rank sends its keys and values to the {split.outer - 1} other"
            f"{'s' * (split.outer > 2)}, and waits until it has those of the whole row.",
            everything,
            moves,
        ),
        _frame(
            "compute",
            "Every rank computes its queries with all keys that they see. "
            + _work_words([work for work, _ in done]),
            everything,
            [],
            done,
        ),
    ]


def _ulysses_frames(split: ContextSplit, tokens: int, window: int | None) -> list[View]:
    ranks = list(range(split.inner))
    work, runs = _done(split.ring_tokens(tokens, 0), split.ring_tokens(tokens, 0), window)
    heads = HEADS // split.inner
    own_work = Work(work.seen / split.inner, work.computed / split.inner)
    moves = [[source, target, source] for source in ranks for target in ranks if source != target]
    all_ranks, own = [ranks for _ in ranks], [[rank] for rank in ranks]
    done = [(own_work, runs) for _ in ranks]
    return [
        _frame(
            "exchange",
            f"All-to-all of queries, keys and values: every rank gives away {HEADS - heads} of "
            f"{HEADS} heads of its tokens, and gets {counted(heads, 'head')} of all {tokens} "
            "tokens.",
            all_ranks,
            moves,
        ),
        _frame(
            "compute",
            f"Every rank computes whole rows for {counted(heads, 'head')} of {HEADS}. "
            + _work_words([own_work] * split.inner),
            all_ranks,
            [],
            done,
        ),
        _frame(
            "exchange",
            "All-to-all of the outputs: heads are traded back for tokens, and every rank has all "
            "heads of its own tokens again.",
            own,
            moves,
        ),
    ]


def _done(queries: Ranges, keys: Ranges, window: int | None) -> tuple[Work, list[list[int]]]:
    """The pairs of some queries with some keys: their number, and as runs."""
    computed = sum(call.pairs for call in attention_calls(queries, keys, window))
    runs = [
        [query, max(shard.start, query + 1 - (window or query + 1)), min(shard.stop, query + 1)]
        for query_range in queries
        for query in query_range
        for shard in keys
    ]
    runs = [run for run in runs if run[1] < run[2]]
    return Work(sum(stop - start for _, start, stop in runs), computed), runs


def _work_words(works: list[Work]) -> str:
    """How much the ranks compute in this step, and which wait."""
    amounts = [work.computed for work in works]
    most, least = max(amounts), min(amounts)
    if not most:
        return "No query sees a key that far away: nothing is computed."
    if most == least:
        return f"All compute {most:g} pairs each: nobody waits."
    idle = [rank for rank, amount in enumerate(amounts) if not amount]
    if idle:
        names = ", ".join(map(str, idle))
        verb = "has none and waits" if len(idle) == 1 else "have none and wait"
        return f"The busiest computes {most:g} pairs; rank{'s' * (len(idle) > 1)} {names} {verb}."
    return f"The busiest computes {most:g} pairs, the least busy {least:g}, and waits."


def _compared(kind: str, num_ranks: int, tokens: int, window: int | None) -> View:
    """One kind in numbers: the pairs of each rank, and of the busiest rank of each step."""
    split = _split(kind, num_ranks)
    frames = _frames(kind, split, tokens, window)
    by_rank = [sum(frame["computed"][rank] for frame in frames) for rank in range(num_ranks)]
    lasts = sum(max(frame["computed"]) for frame in frames)
    return {
        "kind": kind,
        "pairs": by_rank,
        "most": max(by_rank),
        "least": min(by_rank),
        "seen": sum(sum(frame["seen"]) for frame in frames),
        "lasts": lasts,
        "busy": sum(by_rank) / (num_ranks * lasts),
    }


def _sentences(kind: str, compared: list[View], tokens: int, window: int | None) -> list[str]:
    by_kind = {comparison["kind"]: comparison for comparison in compared}
    kind_row, plain, zigzag = by_kind[kind], by_kind["ring"], by_kind["zigzag"]
    sentences = [
        f"{tokens} tokens see {kind_row['seen']:g} pairs of a query and a key, each computed on "
        "one rank: every kind has the same result.",
        f"Plain ring: the busiest rank computes {plain['most']:g} pairs, "
        f"{plain['most'] / plain['least']:.2f} times as many as the least busy with "
        f"{plain['least']:g}. Each step lasts as long as its busiest rank, so that ranks are busy "
        f"{plain['busy']:.0%} of the time.",
        f"Zigzag: {zigzag['most']:g} on the busiest, {zigzag['least']:g} on the least busy; ranks "
        f"are busy {zigzag['busy']:.0%} of the time.",
    ]
    if window is not None:
        sentences.append(
            f"With a window of {window} tokens, parts outside of it are skipped. Calls that lie "
            f"across its edge mask what they compute: {kind} computes {sum(kind_row['pairs']):g} "
            f"pairs to get {kind_row['seen']:g}."
        )
    return sentences


@cache
def _bytes_of_layer(kind: str, num_ranks: int) -> int:
    """Bytes that a rank sends in one layer of a real model: forward and backward, one sequence."""
    options = PlanOptions(
        _REAL_MODEL, layout=f"cp={num_ranks}", context=kind, seq=_REAL_SEQ, microbatches=1
    )
    plan, size = resolve(options), PRECISIONS["bf16"].itemsize
    sent = sum(
        entry.sent
        for entry in predict_traffic(plan, 0, itemsize=size)
        if entry.axis in ("ring", "ulysses")
    )
    return round(sent / plan.shape.layers)


def text(view: View) -> list[str]:
    """The same for a terminal: the shards, every step with its work, and the kinds compared."""
    # The sequence as digits: the rank of every token.
    owners = [""] * view["tokens"]
    for rank_view in view["ranks"]:
        for start, stop in rank_view["pieces"]:
            owners[start:stop] = [str(rank_view["rank"])] * (stop - start)
    lines = [*["the row, each token by its rank:", "  " + "".join(owners)], ""]
    for number, frame in enumerate(view["frames"]):
        lines += wrapped(f"{number}. {frame['says']}", later="   ")
        if any(frame["computed"]):
            lines += _table(frame)
    lines += ["", "kind         most    least   steps last   busy   MB a layer*"]
    for row in view["compared"]:
        sent = view["traffic"]["bytes"][row["kind"]] / 1e6
        lines.append(
            f"{row['kind']:<10} {row['most']:6g} {row['least']:8g} {row['lasts']:12g} "
            f"{row['busy']:6.0%} {sent:13,.1f}"
        )
    real = view["traffic"]
    lines.append(f"* sent by a rank of {real['model']}, a row of {real['tokens']:,} tokens, bf16")
    return [*lines, *sentence_lines(view)]


def _table(frame: View) -> list[str]:
    """For each rank, the owner of its keys and the number of pairs."""
    holds = [str(holders[0]) if len(holders) == 1 else "all" for holders in frame["holds"]]
    rows = {
        "rank": map(str, range(len(holds))),
        "keys of": holds,
        "pairs": [f"{pairs:g}" for pairs in frame["computed"]],
    }
    return [f"   {name:<8}" + "".join(f"{cell:>7}" for cell in row) for name, row in rows.items()]
