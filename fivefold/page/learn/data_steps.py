"""One step of training under ZeRO as frames: what every data rank holds while each action runs.

All data ranks do the same at the same time, so that a frame says once which units are whole; they
differ in which slice is theirs. Weights are `whole`, `arriving` or a `slice`; gradients are any of
`filling` (whole, of this rank alone), `summing` (whole, while others read them) and what is summed,
a `slice` or `whole`. The walk follows `parallel/data.py`: a gather runs one unit ahead, and at most
two sums are under way. Its collectives add up to `core/traffic.py`, its bytes to `core/memory.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from fivefold.core.errors import kind_text
from fivefold.core.plan import Plan
from fivefold.core.units import Unit
from fivefold.cost import collectives
from fivefold.cost.axis_collectives import Collective, step_collectives, wide_size
from fivefold.page.learn import size_text

ITEMSIZE = collectives.ITEMSIZE["bf16"]
GRAD_ITEMSIZE = wide_size(ITEMSIZE)
MOST_IN_FLIGHT = 2  # sums under way whose whole gradients are still held, as in the runtime
_COUNT = (
    "The ranks add up their tokens, by which the loss is divided once: an all-reduce of 8 bytes."
)


@dataclass
class _Held:
    """A unit as every data rank holds it."""

    weights: str
    filling: bool = False
    summing: bool = False
    summed: bool = False


class DataWalk:
    """One step of training; each action shows a frame of what is held while it runs."""

    def __init__(self, plan: Plan, units: tuple[Unit, ...], states: list[int]) -> None:
        self.plan, self.units, self.states = plan, units, states
        self.zero, self.num_ranks = plan.layout.zero, plan.layout.dp
        self.sheds = self.zero == 3
        self.held = [_Held("slice" if self.sheds else "whole") for _ in units]
        self.in_flight: deque[int] = deque()
        self.frames: list[dict[str, Any]] = []
        self.moves: list[tuple[int | None, Collective]] = []
        self.drops: list[int] = []
        self.peak, self.sent = 0, 0

    def run(self) -> None:
        """The frames of a whole step."""
        count, totals = step_collectives(self.plan)
        self.moves.append((None, count))
        self._show("start", f"Before the step. {self._start()} {_COUNT}")
        num_microbatches = self.plan.batch.microbatches
        for number in range(1, num_microbatches + 1):
            self._forward(number)
            self._backward(number, last=number == num_microbatches)
        self._norm(totals)
        self._update()

    def _forward(self, number: int) -> None:
        """A unit is there while it is used, the next one on its way; the head stays for its
        backward."""
        for place in range(len(self.units)):
            absent = self.held[place].weights == "slice"
            self._gather(place)
            self._gather(place + 1)
            head = f"Microbatch {number}, forward"
            if absent:
                self._show(
                    "wait",
                    f"{head}: {self._name(place)} is gathered, {self._from_each(place)}. Nothing "
                    f"is there to compute, so nothing hides this; {self._name(place + 1)} follows.",
                )
            self.held[place].weights = "whole"
            words = f"{head} of {self._name(place)}{self._meanwhile()}"
            self._show("forward", words, computes=place)
            if place + 1 < len(self.units):
                self._drop(place)

    def _backward(self, number: int, last: bool) -> None:
        """Gradients of a unit fill a whole buffer, which is then summed behind the next unit."""
        for place in range(len(self.units) - 1, -1, -1):
            held = self.held[place]
            if place:  # the embedding's backward reads no weight
                held.weights = "whole"
                self._drop(place + 1)
            if place > 1:
                self._gather(place - 1)
            more = "adds to" if held.filling else "fills"
            held.filling = True
            whole = self.units[place].size * GRAD_ITEMSIZE
            words = (
                f"Microbatch {number}, backward of {self._name(place)}: its gradient {more} a "
                f"whole buffer of {size_text(whole)}{self._meanwhile()}"
            )
            self._show("backward", words, computes=place)
            if last or self.zero >= 2:
                self._reduce(place)
        for place in range(len(self.units)):
            self._drop(place)

    def _reduce(self, place: int) -> None:
        while len(self.in_flight) >= MOST_IN_FLIGHT:
            self._receive()
        unit, held = self.units[place], self.held[place]
        held.filling, held.summing = False, True
        self.in_flight.append(place)
        kind, axis = ("reduce_scatter", unit.shard_axis) if self.zero else ("all_reduce", "dp-cp")
        self.moves.append(
            (place, Collective(axis, kind, unit.size * GRAD_ITEMSIZE, self.num_ranks))
        )
        gets = "each rank gets the sum of its slice" if self.zero else "each rank gets all sums"
        self._show(
            "reduce",
            f"The gradients of {self._name(place)} are complete: their {kind_text(kind)} starts, "
            f"and {gets}. It runs behind what is computed next; the buffer stays until it is done.",
        )

    def _receive(self) -> None:
        held = self.held[self.in_flight.popleft()]
        held.summing, held.summed = False, True

    def _norm(self, totals: Collective) -> None:
        for place in range(len(self.units)):
            self._let_go(place)
        while self.in_flight:
            self._receive()
        self.moves.append((None, totals))
        kept = (
            "all weights and all gradients",
            *2 * ("all weights and its slice of the gradients",),
        )
        kept = (*kept, "its slice of the weights and of the gradients")[self.zero]
        self._show(
            "norm",
            f"All sums are there: a rank holds {kept}. Loss and squared norm are added up over the "
            f"ranks: an all-reduce of {totals.bytes} bytes.",
        )

    def _update(self) -> None:
        what = f"its 1/{self.num_ranks} of" if self.zero else "all"
        again = "" if self.zero else f", the same on all {self.num_ranks} ranks"
        self._show(
            "optimizer",
            f"The optimizer of each rank updates {what} the weights{again}.",
        )
        for place in range(len(self.units)):
            self.held[place].summed = False
            if self.zero in (1, 2):
                self._start_gather(place)
                self._show(
                    "publish",
                    f"The new weights of {self._name(place)} go to everybody: all-gather, "
                    f"{self._from_each(place)}. Its gradients are let go.",
                )
                self.held[place].weights = "whole"
        last = {
            0: "All ranks have the same new weights: nothing more moves.",
            3: "Nothing more moves: the next forward gathers the new weights.",
        }
        self._show(
            "end", f"The step is done. {last.get(self.zero, 'All weights are whole again.')}"
        )

    def _gather(self, place: int) -> None:
        """Start to bring a unit here, unless it is; beyond the ends there is none."""
        if 0 <= place < len(self.units) and self.held[place].weights == "slice":
            self._start_gather(place)

    def _start_gather(self, place: int) -> None:
        unit = self.units[place]
        self.held[place].weights = "arriving"
        call = Collective(unit.shard_axis, "all_gather", unit.slice_size * ITEMSIZE, self.num_ranks)
        self.moves.append((place, call))

    def _drop(self, place: int) -> None:
        """After a use; weights that are gathered once a step stay."""
        if self.plan.gather == "microbatch":
            self._let_go(place)

    def _let_go(self, place: int) -> None:
        there = self.sheds and place < len(self.units)
        if there and self.held[place].weights == "whole":
            self.held[place].weights = "slice"
            self.drops.append(place)

    def _show(self, phase: str, says: str, computes: int | None = None) -> None:
        weights, gradients = self._weights(), self._gradients()
        live = weights + gradients
        self.peak = max(self.peak, live)
        moves: list[dict[str, Any]] = [{"unit": place, **_move(call)} for place, call in self.moves]
        self.sent += sum(each["sent"] for each in moves)
        self.frames.append(
            {
                "phase": phase,
                "says": says,
                "computes": computes,
                "drops": self.drops,
                "moves": moves,
                "weights": [held.weights for held in self.held],
                "gradients": [self._words(held) for held in self.held],
                "held": {"weights": weights, "gradients": gradients},
                "live": [live + states for states in self.states],
                "peak": [self.peak + states for states in self.states],
                "sent": self.sent,
            }
        )
        self.moves, self.drops = [], []

    def _weights(self) -> int:
        """Bytes; under stage 3 a slice is held beside the whole that was gathered from it."""
        total = 0
        for unit, held in zip(self.units, self.held, strict=True):
            total += unit.slice_size if self.sheds else 0
            total += unit.size if not self.sheds or held.weights != "slice" else 0
        return total * ITEMSIZE

    def _gradients(self) -> int:
        total = 0
        for unit, held in zip(self.units, self.held, strict=True):
            total += unit.size * (held.filling + held.summing)
            # A sliced sum has a buffer of its own while it comes; an all-reduce works in place.
            coming = held.summing and unit.num_slices > 1
            total += unit.slice_size * (held.summed + coming)
        return total * GRAD_ITEMSIZE

    def _words(self, held: _Held) -> list[str]:
        summed = "slice" if self.zero else "whole"
        flags = {summed: held.summed, "filling": held.filling, "summing": held.summing}
        return [word for word, there in flags.items() if there]

    def _name(self, place: int) -> str:
        name = name_of(self.units[place])
        return {"embed": "the embedding", "head": "the head"}.get(name, name)

    def _from_each(self, place: int) -> str:
        slice_bytes = self.units[place].slice_size * ITEMSIZE
        return f"{size_text(slice_bytes)} from each of {self.num_ranks} ranks"

    def _meanwhile(self) -> str:
        """What arrives, and what has left, while a unit computes."""
        coming = [place for place, _ in self.moves if place is not None]
        words = [f"{self._name(p)} is gathered meanwhile, {self._from_each(p)}" for p in coming]
        if self.drops:
            gone = " and ".join(map(self._name, self.drops))
            words.append(f"{gone} {'has' if len(self.drops) == 1 else 'have'} been dropped")
        return "; ".join(["", *words]) + "."

    def _start(self) -> str:
        kept = [
            "everything whole: weights and optimizer states",
            "whole weights, and its slice of the optimizer states",
            "whole weights, and its slice of the optimizer states",
            "its slice of the weights and of the optimizer states",
        ]
        return f"Every rank holds {kept[self.zero]}."


def _move(call: Collective) -> dict[str, Any]:
    return {**call._asdict(), "word": kind_text(call.kind), "sent": round(call.sent)}


def name_of(unit: Unit) -> str:
    """A unit as sentences name it; here each is one block."""
    return unit.blocks[0].replace("blocks.", "block ")
