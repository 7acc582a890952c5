"""One training step with ZeRO as frames: the memory of a data rank during each action.

All data ranks do the same at the same time, and differ only in their shard, so a frame describes
all of them. Weights are `whole` (gathered), `arriving` or a `slice` (the shard of the rank).
Gradients are any of `filling` (full, of this rank alone), `summing` (full, during the reduction)
and the reduced result, a `slice` or `whole`. The order is that of `parallel/data.py`: gathers run
one unit ahead, and at most two reductions are in flight. The collectives add up to those of
`cost/traffic/collectives.py`, the bytes to those of `cost/memory/static.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from fivefold.core import PRECISIONS, kind_text
from fivefold.core.layout import Unit, UnitPolicy
from fivefold.core.plan import Plan
from fivefold.cost.traffic import Collective, step_collectives
from fivefold_page import View
from fivefold_page.learn.lesson import size_text

ITEMSIZE = PRECISIONS["bf16"].itemsize
GRAD_ITEMSIZE = UnitPolicy().grad_itemsize(ITEMSIZE)
MOST_IN_FLIGHT = 2  # reductions whose full gradients are still in memory, as in the runtime
_COUNT = (
    "The ranks add up their tokens, by which the loss is divided once: an all-reduce of 8 bytes."
)


@dataclass
class _UnitState:
    """The weights and gradients of a unit on every data rank."""

    weights: str
    filling: bool = False
    summing: bool = False
    summed: bool = False


class DataStep:
    """One training step; each action adds a frame with the memory while it runs."""

    def __init__(self, plan: Plan, units: tuple[Unit, ...], states: list[int]) -> None:
        self.plan, self.units, self.states = plan, units, states
        self.zero, self.num_ranks = plan.layout.zero, plan.layout.dp
        self.frees_weights = self.zero == 3
        self.unit_states = [_UnitState("slice" if self.frees_weights else "whole") for _ in units]
        self.in_flight: deque[int] = deque()
        self.frames: list[View] = []
        self.moves: list[tuple[int | None, Collective]] = []
        self.drops: list[int] = []
        self.peak, self.sent = 0, 0

    def run(self) -> None:
        """Make the frames of the whole step."""
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
        """A unit is gathered while it is used, and the next one is prefetched; the head stays for
        its backward."""
        for index in range(len(self.units)):
            absent = self.unit_states[index].weights == "slice"
            self._gather(index)
            self._gather(index + 1)
            head = f"Microbatch {number}, forward"
            if absent:
                self._show(
                    "wait",
                    f"{head}: {self._name(index)} is gathered, {self._from_each(index)}. Nothing "
                    f"is there to compute, so nothing hides this; {self._name(index + 1)} follows.",
                )
            self.unit_states[index].weights = "whole"
            text = f"{head} of {self._name(index)}{self._meanwhile()}"
            self._show("forward", text, computes=index)
            if index + 1 < len(self.units):
                self._drop(index)

    def _backward(self, number: int, last: bool) -> None:
        """The gradients of a unit fill a full buffer, whose reduction overlaps with the next
        unit."""
        for index in range(len(self.units) - 1, -1, -1):
            state = self.unit_states[index]
            if index:  # the embedding's backward reads no weight
                state.weights = "whole"
                self._drop(index + 1)
            if index > 1:
                self._gather(index - 1)
            verb = "adds to" if state.filling else "fills"
            state.filling = True
            num_bytes = self.units[index].size * GRAD_ITEMSIZE
            text = (
                f"Microbatch {number}, backward of {self._name(index)}: its gradient {verb} a "
                f"whole buffer of {size_text(num_bytes)}{self._meanwhile()}"
            )
            self._show("backward", text, computes=index)
            if last or self.zero >= 2:
                self._reduce(index)
        for index in range(len(self.units)):
            self._drop(index)

    def _reduce(self, index: int) -> None:
        while len(self.in_flight) >= MOST_IN_FLIGHT:
            self._finish_reduce()
        unit, state = self.units[index], self.unit_states[index]
        state.filling, state.summing = False, True
        self.in_flight.append(index)
        kind, axis = ("reduce_scatter", unit.shard_axis) if self.zero else ("all_reduce", "dp-cp")
        self.moves.append(
            (index, Collective(axis, kind, unit.size * GRAD_ITEMSIZE, self.num_ranks))
        )
        gets = "each rank gets the sum of its slice" if self.zero else "each rank gets all sums"
        self._show(
            "reduce",
            f"The gradients of {self._name(index)} are complete: their {kind_text(kind)} starts, "
            f"and {gets}. It runs while the next layer computes; its buffer stays until the end.",
        )

    def _finish_reduce(self) -> None:
        state = self.unit_states[self.in_flight.popleft()]
        state.summing, state.summed = False, True

    def _norm(self, totals: Collective) -> None:
        for index in range(len(self.units)):
            self._free(index)
        while self.in_flight:
            self._finish_reduce()
        self.moves.append((None, totals))
        contents = (
            "all weights and all gradients",
            *2 * ("all weights and its slice of the gradients",),
        )
        contents = (*contents, "its slice of the weights and of the gradients")[self.zero]
        self._show(
            "norm",
            f"All sums are there: a rank holds {contents}. Loss and squared norm are added up over "
            f"the ranks: an all-reduce of {totals.bytes} bytes.",
        )

    def _update(self) -> None:
        what = f"its 1/{self.num_ranks} of" if self.zero else "all"
        again = "" if self.zero else f", the same on all {self.num_ranks} ranks"
        self._show("optimizer", f"The optimizer of each rank updates {what} the weights{again}.")
        for index in range(len(self.units)):
            self.unit_states[index].summed = False
            if self.zero in (1, 2):
                self._start_gather(index)
                self._show(
                    "publish",
                    f"The new weights of {self._name(index)} go to everybody: all-gather, "
                    f"{self._from_each(index)}. Its gradients are let go.",
                )
                self.unit_states[index].weights = "whole"
        last = {
            0: "All ranks have the same new weights: nothing more moves.",
            3: "Nothing more moves: the next forward gathers the new weights.",
        }.get(self.zero, "All weights are whole again.")
        self._show("end", f"The step is done. {last}")

    def _gather(self, index: int) -> None:
        """Start to gather a unit, unless it is here; indices beyond the ends are ignored."""
        if 0 <= index < len(self.units) and self.unit_states[index].weights == "slice":
            self._start_gather(index)

    def _start_gather(self, index: int) -> None:
        unit = self.units[index]
        self.unit_states[index].weights = "arriving"
        call = Collective(unit.shard_axis, "all_gather", unit.shard_size * ITEMSIZE, self.num_ranks)
        self.moves.append((index, call))

    def _drop(self, index: int) -> None:
        """Free a unit after its use; weights that are gathered once a step stay."""
        if self.plan.gather == "microbatch":
            self._free(index)

    def _free(self, index: int) -> None:
        can_free = self.frees_weights and index < len(self.units)
        if can_free and self.unit_states[index].weights == "whole":
            self.unit_states[index].weights = "slice"
            self.drops.append(index)

    def _show(self, phase: str, says: str, computes: int | None = None) -> None:
        weights, gradients = self._weights(), self._gradients()
        live = weights + gradients
        self.peak = max(self.peak, live)
        moves: list[View] = [{"unit": index, **_move(call)} for index, call in self.moves]
        self.sent += sum(move["sent"] for move in moves)
        self.frames.append(
            {
                "phase": phase,
                "says": says,
                "computes": computes,
                "drops": self.drops,
                "moves": moves,
                "weights": [state.weights for state in self.unit_states],
                "gradients": [self._words(state) for state in self.unit_states],
                "held": {"weights": weights, "gradients": gradients},
                "live": [live + states for states in self.states],
                "peak": [self.peak + states for states in self.states],
                "sent": self.sent,
            }
        )
        self.moves, self.drops = [], []

    def _weights(self) -> int:
        """Bytes; in stage 3 the shard stays in memory next to the gathered unit."""
        total = sum(unit.shard_size for unit in self.units) if self.frees_weights else 0
        pairs = zip(self.units, self.unit_states, strict=True)
        return ITEMSIZE * (total + sum(u.size for u, state in pairs if state.weights != "slice"))

    def _gradients(self) -> int:
        total = 0
        for unit, state in zip(self.units, self.unit_states, strict=True):
            total += unit.size * (state.filling + state.summing)
            # A reduce-scatter has a buffer for its result; an all-reduce works in place.
            coming = state.summing and unit.num_shards > 1
            total += unit.shard_size * (state.summed + coming)
        return total * GRAD_ITEMSIZE

    def _words(self, state: _UnitState) -> list[str]:
        summed = "slice" if self.zero else "whole"
        flags = {summed: state.summed, "filling": state.filling, "summing": state.summing}
        return [word for word, flag in flags.items() if flag]

    def _name(self, index: int) -> str:
        name = name_of(self.units[index])
        return {"embed": "the embedding", "head": "the head"}.get(name, name)

    def _from_each(self, index: int) -> str:
        slice_bytes = self.units[index].shard_size * ITEMSIZE
        return f"{size_text(slice_bytes)} from each of {self.num_ranks} ranks"

    def _meanwhile(self) -> str:
        """What is gathered, and what was freed, while a unit computes."""
        coming = [index for index, _ in self.moves if index is not None]
        clauses = [f"{self._name(p)} is gathered meanwhile, {self._from_each(p)}" for p in coming]
        if self.drops:
            gone = " and ".join(map(self._name, self.drops))
            clauses.append(f"{gone} {'has' if len(self.drops) == 1 else 'have'} been dropped")
        return "; ".join(["", *clauses]) + "."

    def _start(self) -> str:
        contents = [
            "everything whole: weights and optimizer states",
            "whole weights, and its slice of the optimizer states",
            "whole weights, and its slice of the optimizer states",
            "its slice of the weights and of the optimizer states",
        ]
        return f"Every rank holds {contents[self.zero]}."


def _move(call: Collective) -> View:
    return {**call._asdict(), "word": kind_text(call.kind), "sent": round(call.sent)}


def name_of(unit: Unit) -> str:
    """The name of a unit in sentences; here each unit is one block."""
    return unit.blocks[0].replace("blocks.", "block ")
