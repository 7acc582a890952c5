"""Learn: tokens sent to their experts and back, and the cost of an uneven load.

    view(params) -> {"choices", "ranks", "tokens", "experts", "scores", "slots", "room", "moves",
                     "flows", "load", "numbers", "frames", "sentences"}

Every rank has one row of tokens, and the ranks have the experts in order. A *slot* is one token on
one of its experts. The scores are drawn from a seed: the same choices give the same picture.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import NamedTuple

from fivefold.core import PRECISIONS, counted
from fivefold.core.model import balance, load
from fivefold.render import wrapped
from fivefold_page import Params, View
from fivefold_page.learn.lesson import Choice, chosen, sentence_lines, size_text

TITLE = "Experts: tokens travel to them"
CHOICES: Mapping[str, Choice] = {
    "ep": Choice("Ranks, ep", ("2", "4", "8"), "4"),
    "top_k": Choice("Experts of a token", ("1", "2"), "2"),
    "skew": Choice("Load", ("even", "mild", "heavy"), "mild"),
    "capacity": Choice(
        "Capacity",
        (balance.NONE, "capacity:1", "capacity:1.5", "capacity-position:1"),
        balance.NONE,
    ),
    "nodes": Choice("Nodes", ("1", "2"), "1"),
    "model": Choice("Width of", ("mixtral-8x7b", "deepseek-v3", "tiny-moe"), "mixtral-8x7b"),
}
EXPERTS, TOKENS = 8, 16  # experts in all, and tokens on each rank
_BAR = 64  # columns of the longest bar
_SKEW = {"even": 0.0, "mild": 0.6, "heavy": 1.6}  # x: the i-th expert has the popularity 1/i^x
_BY_POPULARITY = (2, 5, 0, 7, 3, 6, 1, 4)  # experts; popular ones are not neighbours
_FAR_ABOVE = 12.0  # larger than every random logit


class RoutedSlot(NamedTuple):
    """One token (of a rank, by its position in the row) on one of its experts."""

    rank: int
    token: int
    expert: int
    score: float
    weight: float
    fits: bool = True


class Moves(NamedTuple):
    """Rows that rank r sends to rank s: `far` between nodes first, then `near` inside a node."""

    far: list[list[int]] | None
    near: list[list[int]]

    def all(self) -> list[list[list[int]]]:
        """Every all-to-all of the dispatch; the combine has the same ones, reversed."""
        return [self.near] if self.far is None else [self.far, self.near]


def view(params: Params) -> View:
    """The routing of a few rows, the two all-to-alls, and the load of the experts."""
    choices = chosen(CHOICES, params)
    num_ranks, top_k = int(choices["ep"]), int(choices["top_k"])
    rules = balance.parse(choices["capacity"])
    capacity = rules[0].capacity(TOKENS, top_k, EXPERTS) if rules else None
    scores = [_scores(rank, top_k, choices["skew"]) for rank in range(num_ranks)]
    slots = [
        slot
        for rank, row in enumerate(scores)
        for slot in _within(_routed(rank, row, top_k), capacity, rules)
    ]
    moves = _moves(slots, num_ranks, int(choices["nodes"]))
    row_bytes = load(choices["model"]).width * PRECISIONS["bf16"].itemsize
    numbers = _numbers(slots, moves, num_ranks, int(choices["nodes"]), row_bytes)
    result = {
        "choices": choices,
        "ranks": num_ranks,
        "tokens": TOKENS,
        "experts": EXPERTS,
        "on_rank": EXPERTS // num_ranks,
        "row_bytes": row_bytes,
        "room": capacity,
        "scores": [
            [[round(score, 3) for score in token_scores] for token_scores in row] for row in scores
        ],
        "slots": [
            [s.rank, s.token, s.expert, round(s.score, 3), round(s.weight, 3), int(s.fits)]
            for s in slots
        ],
        "moves": {"far": moves.far, "near": moves.near},
        "flows": _flows(slots, num_ranks),
        "load": _load(slots),
        "asked": _load([slot._replace(fits=True) for slot in slots]),
        "numbers": numbers,
    }
    return result | {"frames": _frames(result, slots), "sentences": _sentences(result)}


def _scores(rank: int, top_k: int, skew: str) -> list[list[float]]:
    """The router's score of every expert, for each token of one rank."""
    draw = random.Random(f"{skew} {rank}")
    bias = {e: -_SKEW[skew] * math.log(1 + i) for i, e in enumerate(_BY_POPULARITY)}
    score_rows: list[list[float]] = []
    for token in range(TOKENS):
        logits = [bias[expert] - math.log(-math.log(draw.random())) for expert in range(EXPERTS)]
        if skew == "even":  # in turn: the most even load
            for choice in range(top_k):
                logits[(token + choice * EXPERTS // 2) % EXPERTS] += _FAR_ABOVE
        score_rows.append(_softmax(logits))
    return score_rows


def _routed(rank: int, scores: list[list[float]], top_k: int) -> list[RoutedSlot]:
    """The slots of one rank: the best experts of every token, the lower number if equal."""
    slots: list[RoutedSlot] = []
    for token, row in enumerate(scores):
        best = sorted(range(EXPERTS), key=lambda expert: -row[expert])[:top_k]
        total = sum(row[e] for e in best)
        slots += [RoutedSlot(rank, token, e, row[e], row[e] / total) for e in best]
    return slots


def _softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def _within(
    slots: list[RoutedSlot], capacity: int | None, rules: tuple[balance.Balance, ...]
) -> list[RoutedSlot]:
    """The slots of a row, marked if they are dropped: every expert takes the first `capacity`, by
    probability or by position; the earlier token wins if equal."""
    if capacity is None:
        return slots
    by_probability = rules[0].keep == "probability"
    order = sorted(slots, key=lambda slot: -slot.score) if by_probability else slots
    survivors = {
        slot for e in range(EXPERTS) for slot in [s for s in order if s.expert == e][:capacity]
    }
    return [slot._replace(fits=slot in survivors) for slot in slots]


def _home(expert: int, num_ranks: int) -> int:
    return expert // (EXPERTS // num_ranks)


def _moves(slots: list[RoutedSlot], num_ranks: int, nodes: int) -> Moves:
    """How many rows each rank sends to each rank.

    Between nodes a token travels once to each node with experts of its own, to the rank with the
    same local number as the sender, which passes it on to the experts.
    """
    size = num_ranks // nodes
    near = [[0] * num_ranks for _ in range(num_ranks)]
    far = [[0] * num_ranks for _ in range(num_ranks)] if nodes > 1 else None
    crossed: set[tuple[int, int, int]] = set()
    for slot in (candidate for candidate in slots if candidate.fits):
        home = _home(slot.expert, num_ranks)
        via = slot.rank if far is None else home // size * size + slot.rank % size
        if far is not None and (slot.rank, slot.token, via) not in crossed:
            crossed.add((slot.rank, slot.token, via))
            far[slot.rank][via] += 1
        near[via][home] += 1
    return Moves(far, near)


def _flows(slots: list[RoutedSlot], num_ranks: int) -> list[list[int]]:
    """Slots of each rank for each expert, after the capacity."""
    by_rank = [[slot for slot in slots if slot.rank == rank] for rank in range(num_ranks)]
    return [_load(rank_slots) for rank_slots in by_rank]


def _load(slots: list[RoutedSlot]) -> list[int]:
    return [sum(slot.fits for slot in slots if slot.expert == expert) for expert in range(EXPERTS)]


def _numbers(slots: list[RoutedSlot], moves: Moves, num_ranks: int, nodes: int, row: int) -> View:
    """The load, the dropped slots and the bytes of one dispatch."""
    load_, size = _load(slots), num_ranks // nodes
    on_rank = EXPERTS // num_ranks
    by_rank = [sum(load_[first : first + on_rank]) for first in range(0, EXPERTS, on_rank)]
    direct = sum(
        slot.fits and _home(slot.expert, num_ranks) // size != slot.rank // size for slot in slots
    )
    counted_rows = {"local": 0, "crossing": 0, "network": 0}
    for matrix in moves.all():
        for source, sent in enumerate(matrix):
            for target, rows in enumerate(sent):
                counted_rows["local" if source == target else "crossing"] += rows
                counted_rows["network"] += rows * (source // size != target // size)
    num_kept = sum(load_)
    return {
        "slots": len(slots),
        "kept": num_kept,
        "dropped": len(slots) - num_kept,
        "lost": _lost(slots),
        "fullest": max(load_),
        "mean": num_kept / EXPERTS,
        "imbalance": max(load_) / (num_kept / EXPERTS),
        "by_rank": by_rank,
        "fullest_rank": max(by_rank),
        "rank_imbalance": max(by_rank) / (num_kept / num_ranks),
        "rows": counted_rows,
        "bytes": {name: rows * row for name, rows in counted_rows.items()},
        "direct_bytes": direct * row,
        "sent_bytes": [sum(sent) * row for sent in moves.all()[0]],
    }


def _lost(slots: list[RoutedSlot]) -> int:
    """Tokens of which every slot is dropped."""
    survivors = {(slot.rank, slot.token) for slot in slots if slot.fits}
    return len({(slot.rank, slot.token) for slot in slots} - survivors)


def _frames(result: View, slots: list[RoutedSlot]) -> list[View]:
    """From the scores to the weighted sum."""
    numbers, ranks, top_k = result["numbers"], result["ranks"], int(result["choices"]["top_k"])
    return [
        {
            "phase": "scores",
            "says": f"Each of {ranks} ranks has {TOKENS} tokens, and {result['on_rank']} of "
            f"{EXPERTS} experts. The router scores all experts for every token, where it lies, and "
            f"keeps the best {'one' if top_k == 1 else top_k}.",
        },
        {"phase": "counts", "says": _count_words(result)},
        *_dispatch_frames(result),
        {"phase": "compute", "says": _compute_words(numbers)},
        *_combine_frames(result),
        _sum_frame(slots),
    ]


def _count_words(result: View) -> str:
    numbers = result["numbers"]
    summary = (
        f"Every rank counts its slots for each expert: {numbers['slots']} in all, "
        f"{numbers['slots'] / EXPERTS:g} an expert if they were even, and "
        f"{max(result['asked'])} on the most wanted."
    )
    if result["room"] is None:
        return f"{summary} Nothing is dropped: every slot will be computed."
    return (
        f"{summary} An expert has room for {result['room']} of each row: {numbers['dropped']} "
        f"slots are dropped, and {counted(numbers['lost'], 'token')} lost all of theirs."
    )


def _dispatch_frames(result: View) -> list[View]:
    numbers, far = result["numbers"], result["moves"]["far"]
    if far is None:
        rows = numbers["rows"]
        says = (
            f"Dispatch, an all-to-all: one row of {result['row_bytes']:,} bytes for every slot. "
            f"{rows['crossing']} rows go to other ranks, {rows['local']} stay."
        )
        return [{"phase": "near", "says": says}]
    return [
        {
            "phase": "far",
            "says": "Dispatch, first over the network: a token goes once to each node that has an "
            f"expert of its. {numbers['rows']['network']} rows cross, where one for every slot "
            f"would be {numbers['direct_bytes'] // result['row_bytes']}.",
        },
        {
            "phase": "near",
            "says": "Dispatch, then inside of each node: from the rank that received it, a token "
            "goes on to every expert that it chose there, one row for each slot.",
        },
    ]


def _compute_words(numbers: View) -> str:
    if numbers["fullest_rank"] == min(numbers["by_rank"]):
        return (
            f"The experts compute {numbers['fullest_rank']} rows on every rank: all are ready "
            "together."
        )
    return (
        f"The experts compute. The fullest rank has {numbers['fullest_rank']} rows, "
        f"{numbers['rank_imbalance']:.2f} times the mean: the others wait for it, since nobody "
        "has its results before they are sent back."
    )


def _combine_frames(result: View) -> list[View]:
    if result["moves"]["far"] is None:
        says = "Combine, an all-to-all the other way: every result goes home to its token's rank."
        return [{"phase": "near-back", "says": says}]
    return [
        {
            "phase": "near-back",
            "says": "Combine, first inside of each node: results go back to the rank that passed "
            "their token on, which weighs and adds those of its node.",
        },
        {
            "phase": "far-back",
            "says": "Combine, then over the network: one row comes back from each node that a "
            "token was sent to.",
        },
    ]


def _sum_frame(slots: list[RoutedSlot]) -> View:
    """The result of one token: one with a dropped slot, if there is any."""
    shown = next((slot for slot in slots if not slot.fits), slots[0])
    token_slots = [slot for slot in slots if (slot.rank, slot.token) == (shown.rank, shown.token)]
    parts = [f"{slot.weight:.2f} · expert {slot.expert}" for slot in token_slots if slot.fits]
    gone = [f"expert {slot.expert}" for slot in token_slots if not slot.fits]
    total = " + ".join(parts) if parts else "nothing but what stood there before"
    missing = f" It had no room on {' and '.join(gone)}." if gone else ""
    return {
        "phase": "sum",
        "says": f"The results, weighed by the experts, are added at home. Token {shown.token} of "
        f"rank {shown.rank} gets {total}.{missing}",
        "token": [shown.rank, shown.token],
    }


def _sentences(result: View) -> list[str]:
    numbers, sizes = result["numbers"], result["numbers"]["bytes"]
    sentences = [
        f"Imbalance: the fullest expert has {numbers['fullest']} slots, "
        f"{numbers['imbalance']:.2f} times the mean of {numbers['mean']:g}; the fullest rank "
        f"{numbers['rank_imbalance']:.2f} times. A layer takes as long as its fullest rank.",
        f"One dispatch moves {size_text(sizes['crossing'])} between ranks and leaves "
        f"{size_text(sizes['local'])} where they are, in bf16 at the width of "
        f"{result['choices']['model']}; the combine moves as much, and backward both again.",
    ]
    if result["moves"]["far"] is not None:
        sentences.append(
            f"Over the network go {size_text(sizes['network'])}; one row for every slot would be "
            f"{size_text(numbers['direct_bytes'])}."
        )
    if result["room"] is not None:
        sentences.append(
            f"The capacity gives every expert ⌈C·K·S/E⌉ = {result['room']} slots of a row: "
            f"{numbers['dropped']} of {numbers['slots']} slots are dropped, the price of a load "
            "that cannot be worse."
        )
    return sentences


def text(view: View) -> list[str]:
    """The same for a terminal: every step, the load as bars, and the rows between ranks."""
    numbers, lines = view["numbers"], list[str]()
    for number, frame in enumerate(view["frames"]):
        lines += wrapped(f"{number}. {frame['says']}", later="   ")
    lines += ["", "expert  rank  slots  dropped"]
    scale = min(1.0, _BAR / max(view["asked"]))
    for expert, (kept_slots, demand) in enumerate(zip(view["load"], view["asked"], strict=True)):
        solid = round(kept_slots * scale)
        bar = "█" * solid + "×" * (round(demand * scale) - solid)
        rank = expert // view["on_rank"]
        lines.append(
            f"{expert:>6} {rank:>5} {kept_slots:>6} {demand - kept_slots:>8}  {bar}".rstrip()
        )
    for name, where in (("far", "over the network"), ("near", "to the experts")):
        if (matrix := view["moves"][name]) is None:
            continue
        lines += ["", f"rows {where}, from rank (down) to rank (across)"]
        lines.append("      " + "".join(f"{rank:>6}" for rank in range(view["ranks"])))
        lines += [
            f"{rank:>6}" + "".join(f"{rows:>6}" for rows in sent)
            for rank, sent in enumerate(matrix)
        ]
    lines += ["", f"{numbers['kept']} of {numbers['slots']} slots kept"]
    return [*lines, *sentence_lines(view)]
