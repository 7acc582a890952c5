"""Learn: the six collectives, block by block.

    view(params) -> {"choices", "letters", "num_slots", "frames", "sent", "formula", "piece_bytes",
                     "uses", "sentences"}

A frame has the moves of a step and the blocks of every rank after it, `state[rank][slot]`. A block
is {"parts", "index", "label"}: the ranks whose data it contains or sums, and the index of the
shard; None is an empty slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from fivefold.core import counted
from fivefold.core.plan import PlanOptions, resolve
from fivefold.cost.traffic import PAYLOADS, predict_traffic
from fivefold.render import wrapped
from fivefold_page import Params, View
from fivefold_page.learn.lesson import GROUPS, Choice, chosen, sentence_lines, size_text

TITLE = "The six collectives"
SIZES = {"1 MiB": 2**20, "64 MiB": 2**26, "1 GiB": 2**30}
LETTERS = "abcdefgh"


@dataclass(frozen=True)
class DataBlock:
    """Shard `index` of the message of one rank, or the sum of this shard over several ranks."""

    parts: frozenset[int]
    index: int


@dataclass(frozen=True)
class Move:
    """One message: the block in `slot` of rank `source` goes to slot `into` of rank `target`."""

    source: int
    target: int
    slot: int
    into: int
    keeps: bool = False  # the sender still has the block
    adds: bool = False  # the receiver adds it to its own


Blocks = list[list[DataBlock | None]]  # by rank and slot
Steps = Iterator[tuple[str, list[Move]]]  # what happens in each, and its messages


@dataclass(frozen=True)
class CollectiveLesson:
    """One collective: its cost in words, its start and its steps, by the number of ranks."""

    kinds: tuple[str, ...]  # as `cost/traffic/collectives.py` names them
    means: str
    formula: str
    start: Callable[[int], Blocks]
    steps: Callable[[int], Steps]
    sharded: bool = True  # a message has a shard for each rank


def _own(rank: int, index: int) -> DataBlock:
    return DataBlock(frozenset({rank}), index)


def _all_shards(n: int) -> Blocks:
    """Every rank has a message of n shards."""
    return [[_own(rank, index) for index in range(n)] for rank in range(n)]


def _one_shard(n: int) -> Blocks:
    """Every rank has one shard."""
    return [[_own(rank, 0) if slot == rank else None for slot in range(n)] for rank in range(n)]


def _root_only(n: int) -> Blocks:
    """Rank 0 has the message; the others have empty slots."""
    return [[_own(0, slot) if rank == 0 else None for slot in range(n)] for rank in range(n)]


def _message(n: int) -> Blocks:
    """Every rank has one message and one empty slot."""
    return [[_own(rank, 0), None] for rank in range(n)]


def _reduce_scatter(n: int) -> Steps:
    for step in range(n - 1):
        moves = [_to_next(rank, n, (rank - step - 1) % n, adds=True) for rank in range(n)]
        yield (
            f"Step {step + 1} of {n - 1}: every rank passes one shard to its neighbour, "
            f"who adds its own numbers to it: sums of {step + 2}.",
            moves,
        )


def _all_gather(n: int) -> Steps:
    for step in range(n - 1):
        moves = [_to_next(rank, n, (rank - step) % n, keeps=True) for rank in range(n)]
        yield (
            f"Step {step + 1} of {n - 1}: every rank passes on the shard that came last; "
            f"each has {step + 2} of {n}.",
            moves,
        )


def _all_reduce(n: int) -> Steps:
    for name, steps in (("Reduce-scatter", _reduce_scatter(n)), ("All-gather", _all_gather(n))):
        yield from ((f"{name}. {says}", moves) for says, moves in steps)


def _all_to_all(n: int) -> Steps:
    """Ranks swap in pairs; their numbers differ in the bits of the step."""
    for step in range(1, n):
        moves = [Move(rank, rank ^ step, rank ^ step, rank) for rank in range(n)]
        pairs = ", ".join(f"{rank}↔{rank ^ step}" for rank in range(n) if rank < rank ^ step)
        yield f"Step {step} of {n - 1}: pairs of ranks swap their shards: {pairs}.", moves


def _broadcast(n: int) -> Steps:
    """Shards follow one another along the ranks, so that no rank waits for the whole message."""
    for step in range(2 * n - 2):
        moves = [
            _to_next(rank, n, step - rank, keeps=True)
            for rank in range(n - 1)
            if 0 <= step - rank < n
        ]
        busy = counted(len(moves), "chunk")
        verb = "is" if len(moves) == 1 else "are"
        yield f"Step {step + 1} of {2 * n - 2}: {busy} {verb} on the way down the line.", moves


def _send(n: int) -> Steps:
    moves = [Move(rank, (rank + 1) % n, 0, 1, keeps=True) for rank in range(n)]
    yield (
        "One step: every rank sends to its neighbour and receives from the other one; "
        "each message is between two ranks and needs nobody else.",
        moves,
    )


def _to_next(rank: int, n: int, slot: int, **flags: bool) -> Move:
    return Move(rank, (rank + 1) % n, slot, slot, **flags)


_RING = "(n − 1)/n · S"
_LABELS = (
    "In the picture b2 is shard 2 of rank b, a+b 2 the sum of two shards, and Σ2 the sum over all "
    "ranks."
)
COLLECTIVES: Mapping[str, CollectiveLesson] = {
    "all-reduce": CollectiveLesson(
        ("all_reduce",),
        "Every rank has S bytes of numbers; in the end each has the sum over all ranks.",
        "2 · (n − 1)/n · S",
        _all_shards,
        _all_reduce,
    ),
    "all-gather": CollectiveLesson(
        ("all_gather",),
        "Every rank has S/n bytes; in the end each has all S.",
        _RING,
        _one_shard,
        _all_gather,
    ),
    "reduce-scatter": CollectiveLesson(
        ("reduce_scatter",),
        "Every rank has S bytes of numbers; in the end each has 1/n of their sum.",
        _RING,
        _all_shards,
        _reduce_scatter,
    ),
    "all-to-all": CollectiveLesson(
        ("all_to_all",),
        "Every rank has S bytes, 1/n for each rank; in the end each has what was meant for it.",
        _RING,
        _all_shards,
        _all_to_all,
    ),
    "broadcast": CollectiveLesson(
        ("broadcast",),
        "Rank 0 has S bytes; in the end every rank has them.",
        "S",
        _root_only,
        _broadcast,
    ),
    "send and receive": CollectiveLesson(
        ("send", "recv"),
        "A rank has S bytes for one other rank.",
        "S",
        _message,
        _send,
        sharded=False,
    ),
}
CHOICES: Mapping[str, Choice] = {
    "collective": Choice("Collective", tuple(COLLECTIVES), "all-reduce"),
    "ranks": Choice("Ranks n", ("2", "4", "8"), "4"),
    "size": Choice("Message S", tuple(SIZES), "64 MiB"),
}
_EVERY = "dp=2x2 tp=2 pp=2 cp=2 ep=2"
# Together these plans have every collective that a step can have.
_EXAMPLES = (
    PlanOptions("tiny-moe", _EVERY, zero=0),
    PlanOptions("tiny-moe", _EVERY, zero=3),
    PlanOptions("tiny-moe", _EVERY, context="ulysses"),
    PlanOptions("tiny-moe", _EVERY, context="allgather"),
    PlanOptions("tiny-moe", "tp=2 cp=2 ep=2 etp=2", balance="aux"),
    PlanOptions("tiny-moe", "dp=4 tp=2 ep=2 etp=2", sp=False),
    PlanOptions("tiny-moe", "dp=4 ep=4", ep_nodes=2),
    PlanOptions("tiny-moe", "tp=8 pp=2", schedule="dualpipe"),
    PlanOptions("tiny-moe", "tp=2 cp=2", precision="fp8"),
)


def view(params: Params) -> View:
    """One collective on n ranks: its frames, the bytes that each rank sends, and its uses."""
    choices = chosen(CHOICES, params)
    lesson, n = COLLECTIVES[choices["collective"]], int(choices["ranks"])
    title, size = choices["collective"].capitalize(), SIZES[choices["size"]]
    shard_bytes = size // (n if lesson.sharded else 1)
    states, moves = _played(lesson, n)
    sources = [move.source for step in moves for move in step]
    sent = [shard_bytes * sources.count(rank) for rank in range(n)]
    says = [f"{lesson.means} At the beginning:", *(text for text, _ in lesson.steps(n))]
    frames = [
        {
            "says": word,
            "state": _plain(state, LETTERS[:n]),
            "moves": [
                {name: value for name, value in vars(move).items() if name != "keeps"}
                for move in step
            ],
        }
        for word, state, step in zip(says, states, [[], *moves], strict=True)
    ]
    return {
        "choices": choices,
        "title": title,
        "letters": LETTERS[:n],
        "num_slots": len(states[0][0]),
        "adds": any(move.adds for step in moves for move in step),
        "frames": frames,
        "size": size,
        "piece_bytes": shard_bytes,
        "sent": sent,
        "formula": lesson.formula,
        "uses": [
            {"axis": axis, "who": GROUPS[axis], "what": PAYLOADS[kind, axis]}
            for kind, axis in _used(lesson)
        ],
        "sentences": [
            f"{title} of S = {size_text(size)} on n = {n} ranks: each sends {lesson.formula} "
            f"= {size_text(max(sent))}, in {counted(len(moves), 'step')}.",
            *_remarks(lesson, n, sent),
            *(() if lesson.kinds[0] == "send" else (_LABELS,)),
        ],
    }


def text(view: View) -> list[str]:
    """The same for a terminal: one column per rank, one line per slot."""
    lines = [f"{view['title']}, {counted(len(view['letters']), 'rank')}", ""]
    for frame in view["frames"]:
        lines += wrapped(frame["says"])
        for slot in range(view["num_slots"]):
            row = [rank[slot]["label"] if rank[slot] else "·" for rank in frame["state"]]
            lines.append("  " + " ".join(f"{cell:>10}" for cell in row).rstrip())
        lines.append("")
    uses = [line for use in view["uses"] for line in wrapped(use["what"], f"  {use['who']:<28}")]
    return [*lines, *sentence_lines(view, "- "), *uses]


def label(block: DataBlock, letters: str) -> str:
    """A block in letters: `b2` is shard 2 of rank b, `a+c 2` a sum, Σ the sum over all ranks.

    >>> label(DataBlock(frozenset({0, 2}), 1), "abcd"), label(DataBlock(frozenset({1}), 2), "abcd")
    ('a+c 1', 'b2')
    """
    parts = sorted(block.parts)
    if len(parts) == 1:
        return f"{letters[parts[0]]}{block.index}"
    if len(parts) == len(letters):
        return f"Σ{block.index}"
    summed = "+".join(letters[part] for part in parts)
    return f"{summed if len(parts) < 4 else f'{len(parts)} of {len(letters)}'} {block.index}"


def _played(lesson: CollectiveLesson, n: int) -> tuple[list[Blocks], list[list[Move]]]:
    """The blocks of all ranks at the start and after each step, and the moves of each step."""
    states, moves = [lesson.start(n)], [step for _, step in lesson.steps(n)]
    for step in moves:
        before, after = states[-1], [list(rank) for rank in states[-1]]
        for move in (new_move for new_move in step if not new_move.keeps):
            after[move.source][move.slot] = None
        for move in step:
            block, target_block = before[move.source][move.slot], before[move.target][move.into]
            assert block is not None, f"rank {move.source} has nothing in slot {move.slot}"
            if move.adds:
                assert target_block is not None and target_block.index == block.index, (
                    "only equal shards are added"
                )
                block = DataBlock(block.parts | target_block.parts, block.index)
            after[move.target][move.into] = block
        states.append(after)
    return states, moves


def _plain(state: Blocks, letters: str) -> list[list[View | None]]:
    return [
        [
            b and {"parts": sorted(b.parts), "index": b.index, "label": label(b, letters)}
            for b in blocks
        ]
        for blocks in state
    ]


def _remarks(lesson: CollectiveLesson, n: int, sent: list[int]) -> Iterator[str]:
    if n > 2 and lesson.formula.endswith(_RING):
        yield "More ranks add steps, not bytes: what a rank sends stays below a bound."
    if min(sent) < max(sent):
        yield "The last rank of the line sends nothing."
    if not _used(lesson):
        yield (
            "No training step of fivefold has one: every rank makes the same weights from the same "
            "seed, or reads its own part of a file."
        )


@cache
def _listed() -> frozenset[tuple[str, str]]:
    """Kinds and axes of all collectives of the examples."""
    plans = [resolve(options) for options in _EXAMPLES]
    lists = [predict_traffic(plan, 0, itemsize=2) for plan in plans]
    return frozenset((collective.kind, collective.axis) for calls in lists for collective in calls)


def _used(lesson: CollectiveLesson) -> list[tuple[str, str]]:
    """Kinds and axes in the order of `PAYLOADS`; a message counts once, as a send."""
    return [key for key in PAYLOADS if key in _listed() and key[0] in lesson.kinds]
