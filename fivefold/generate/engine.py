"""The engine: requests in, tokens out, one step at a time.

The forward is a seam: it takes a `StepBatch` of plain numbers and returns the logits of the tokens
that are to be followed. That of a decoder, or of one stage of it, is in `forward.py`.

In a layout every rank has an engine, and all of them decide alike from the same requests: nothing
is sent but what is drawn. Each data rank is a replica with its own sequences and blocks. Each stage
of a pipeline works on another batch: tokens are drawn when the last stage is done, and a batch
waits for its draw while the others run. On one device there are one replica and one stage, and the
next step may begin ahead of the draw (`ahead.py`), unless tokens are drafted (`drafts.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from fivefold.core import FivefoldError
from fivefold.core.model import BLOCK, Shape, even_context
from fivefold.generate.async_scheduling import DrawnTokens
from fivefold.generate.blocks import BlockPool
from fivefold.generate.drafts import Drafter
from fivefold.generate.grammar import Grammars
from fivefold.generate.mtp_drafts import MtpDrafter
from fivefold.generate.requests import (
    NO_TOKEN,
    Completion,
    Drawn,
    DrawnToken,
    Reason,
    Request,
    SequenceChunk,
    SequenceState,
    StepBatch,
)
from fivefold.generate.routes import RecordedRoutes
from fivefold.generate.routing import RouteStore
from fivefold.generate.sampling import (
    Draw,
    as_rows,
    draw_table,
)
from fivefold.generate.scheduler import ScheduleLimits, Scheduler

Forward = Callable[[StepBatch], Tensor]
"""The logits, (sequences that sample, V), in float32 or wider; none before the last stage."""
Watch = Callable[[str, int, Tensor], None]
"""Called with a request, an index in its completion, and the logits that are drawn from."""


Shared = Callable[[], Tensor]
"""Waits for the sum of a tensor over all ranks."""


def alone(tensor: Tensor) -> Shared:
    """Sum over one rank, copied to the host."""
    if not tensor.is_cuda:
        return lambda: tensor
    host_copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host_copy.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        copied.synchronize()
        return host_copy

    return wait


def on_this_rank(tensor: Tensor) -> Tensor:
    """Sum over one rank, on its device."""
    return tensor


@dataclass(frozen=True)
class EngineRanks:
    """Position of this rank in an engine: the replicas it computes, the number of batches in
    flight, and whether it samples for its replica. Experts may serve the tokens of all replicas,
    whose steps then run `together`. The ranks of a replica that own blocks are `owners`; `share`
    starts to sum a tensor over all ranks, and `total` has the sum on the device of every rank."""

    replicas: int = 1
    replica: int = 0
    in_flight: int = 1
    draws: bool = True
    together: bool = False
    owners: int = 1
    share: Callable[[Tensor], Shared] = alone
    total: Callable[[Tensor], Tensor] = on_this_rank


@dataclass(slots=True)
class _DrawRow:
    """A row of logits: its sequence, the index in the completion, and the proposal that it is only
    valid after, if there is one."""

    sequence: SequenceState
    index: int
    proposal: int | None

    @property
    def accepts(self) -> bool:
        """Whether the token before this one was drawn, and is what was proposed."""
        sequence = self.sequence
        return self.index == len(sequence.logprobs) and sequence.tokens[-1] == self.proposal


@dataclass(frozen=True)
class _Flight:
    """A batch in flight: the tokens that it draws, and the wait. Of every replica, the chunks with
    their sequences."""

    rows: tuple[_DrawRow, ...]
    drawn: Shared
    scheduled: tuple[list[tuple[SequenceChunk, SequenceState]], ...] = ()


def _wanted(scheduled: Iterable[tuple[SequenceChunk, SequenceState]]) -> list[_DrawRow]:
    """Every row of logits."""
    rows: list[_DrawRow] = []
    for chunk, sequence in scheduled:
        count, stop = chunk.num_wanted, chunk.stop
        # The token after the last one of the prompt has index 0.
        first = stop - count + 1 - len(sequence.request.prompt)
        if sequence.request.targets:
            first = stop - chunk.scored - sequence.first_wanted
        proposal = chunk.tokens[0] if chunk.draft else None
        for index in range(first, first + count):
            rows.append(_DrawRow(sequence, index, proposal))
    return rows


def _num_pairs(request: Request, index: int) -> int:
    """How many of the likeliest tokens a request asks for at an index."""
    return request.alternatives if index >= 0 else request.prompt_logprobs or 0


def _pairs(request: Request, index: int, numbers: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens that a request asks for at an index."""
    count = _num_pairs(request, index)
    if not count:
        return ()
    return tuple((int(numbers[i]), numbers[i + 1]) for i in range(2, 2 + 2 * count, 2))


class Travel(Protocol):
    """Callbacks with which sequences move between engines."""

    def leave(self, sequence: SequenceState) -> None:
        """Called when the prompt is computed, before the blocks are freed."""

    def land(self, sequence: SequenceState) -> None:
        """Called when the sequence has blocks: fill those of its first `computed` tokens."""


class Engine:
    """Continuous batching: adds requests, runs steps and collects completions."""

    def __init__(
        self,
        shape: Shape,
        forward: Forward,
        blocks: int,
        limits: ScheduleLimits | None = None,
        watch: Watch | None = None,
        ranks: EngineRanks | None = None,
        routes: RouteStore | None = None,
        drawn: DrawnTokens | None = None,
        grammars: Grammars | None = None,
        adapters: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        """`routes` are those that the forward records, if it does; `drawn` is what it reads of
        tokens that the host does not know yet: steps then begin ahead of draws. Without `grammars`
        requests have none. `adapters`: how many the forward has. A `drafter` proposes tokens, which
        are verified together: logits of refused ones are watched too."""
        assert drawn is None or (ranks is None or ranks.in_flight == ranks.replicas == 1)
        self.drawn, self.grammars, self.adapters = drawn, grammars, adapters
        self.shape, self.forward, self.watch, self.routes = shape, forward, watch, routes
        self.ranks = ranks or EngineRanks()
        pools = [BlockPool(blocks, self.ranks.owners) for _ in range(self.ranks.replicas)]
        schedule_limits, in_flight = limits or ScheduleLimits(), self.ranks.in_flight
        # Recorded routes are read from all blocks when a sequence ends.
        window = shape.window_everywhere if routes is None else None
        self.heads = drafter if isinstance(drafter, MtpDrafter) else None
        lookahead = 0 if self.heads is None else self.heads.count
        if window is not None and lookahead:  # deeper layers come later to what they see
            window += lookahead - 1
        options = (in_flight, self._save, window, drawn is not None, self._land)
        lengths = shape.outgrown_at, even_context(shape)
        self.schedulers = [
            Scheduler(pool, schedule_limits, shape.max_seq, *options, *lengths, drafter, lookahead)
            for pool in pools
        ]
        self.travel: Travel | None = None
        self._most_flights = in_flight + (drawn is not None)
        self._sequences: dict[str, SequenceState] = {}
        self._homes: dict[str, Scheduler] = {}
        self._ended: dict[str, Completion] = {}
        self._flights: deque[_Flight] = deque()
        self._landed: list[DrawnToken] = []  # before anybody asked for them
        self._saved: dict[str, Tensor] = {}  # routes of sequences that have lost their blocks

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._sequences or self._landed)

    @property
    def drafts(self) -> bool:
        """Whether tokens are proposed."""
        return self.schedulers[0].drafter is not None

    def has_open(self, id: str) -> bool:
        """Whether a request is here and has not ended."""
        return id in self._sequences

    @property
    def num_preempted(self) -> int:
        """Number of preemptions of running sequences."""
        return sum(scheduler.num_preempted for scheduler in self.schedulers)

    @property
    def num_drafted(self) -> int:
        """Number of tokens that were proposed."""
        return sum(scheduler.num_drafted for scheduler in self.schedulers)

    @property
    def num_accepted(self) -> int:
        """Number of proposed tokens that were drawn."""
        return sum(scheduler.num_accepted for scheduler in self.schedulers)

    def add(self, request: Request, home: int | None = None, drawn: Drawn = ()) -> None:
        """Queue a request; refuses one that the model or the cache cannot hold. `home`: its
        replica, if known; `drawn`: tokens that another engine has drawn."""
        request.check(self.shape.vocab, self.shape.max_seq)
        if request.grammar and self.grammars is None:
            rule = "it has a grammar, and this engine no tokenizer"
            raise FivefoldError(f"request {request.id!r}: {rule}: leave the grammar out")
        if not 0 <= request.adapter <= self.adapters:
            rule = f"adapter {request.adapter}, and this engine has {self.adapters}"
            raise FivefoldError(f"request {request.id!r}: {rule}: give another number, or 0")
        if request.id in self._sequences or request.id in self._ended:
            raise FivefoldError(f"request {request.id!r} is there already: give another id")
        loads = [scheduler.load for scheduler in self.schedulers]
        at = self.schedulers[loads.index(min(loads)) if home is None else home]
        self._sequences[request.id] = at.add(request, drawn)
        self._homes[request.id] = at

    def step(self) -> list[DrawnToken]:
        """Launch one forward; if the in-flight limit is reached, wait for the oldest and return its
        tokens."""
        landed, self._landed = self._landed, []
        batches = [scheduler.schedule() for scheduler in self.schedulers]
        if any(batch.chunks for batch in batches):
            self._flights.append(self._begin(batches))
            if len(self._flights) < self._most_flights:
                return landed
        return landed + self._end_first() if self._flights else landed

    def _begin(self, batches: Sequence[StepBatch]) -> _Flight:
        """Run this rank's stage of its replica's batch, and begin to share what is drawn."""
        replica, batch = self.ranks.replica, batches[self.ranks.replica]
        if self.ranks.together:
            batch = replace(batch, beside=(*batches[:replica], *batches[replica + 1 :]))
        try:
            logits_NV = self.forward(batch)
        except BaseException:  # others share what was not computed
            for scheduler in self.schedulers:
                scheduler.restart()
            raise
        scheduled = [self._count(*pair) for pair in zip(batches, self.schedulers, strict=True)]
        rows_of = [_wanted(pairs) for pairs in scheduled]
        waiting = [row for rows in rows_of for row in rows]
        # All ranks know all requests, and so how many numbers a row has.
        most = max((row.sequence.request.alternatives for row in waiting), default=0)
        scores = any(row.index < 0 for row in waiting)
        if scores:
            most = max(most, *(row.sequence.request.prompt_logprobs or 0 for row in waiting))
        drawn: list[Tensor] = []
        for replica, rows in enumerate(rows_of):
            if replica == self.ranks.replica and self.ranks.draws and rows:
                drawn.append(self._draw(rows, logits_NV, most, scores))
            else:
                size = (len(rows), 2 + 2 * most + scores)
                drawn.append(torch.zeros(size, dtype=torch.float64, device=logits_NV.device))
        for number, row in enumerate(waiting):
            row.sequence.draw_in(number)
        table = torch.cat(drawn) if len(drawn) > 1 else drawn[0]
        if self.drawn is not None and waiting:
            table = self.ranks.total(table)
            self.drawn.put(table[:, 0])
            return _Flight(tuple(waiting), alone(table))
        shared = self.ranks.share(table) if waiting else alone(table)
        return _Flight(tuple(waiting), shared, tuple(scheduled))

    def _count(
        self, batch: StepBatch, home: Scheduler
    ) -> list[tuple[SequenceChunk, SequenceState]]:
        """The chunks of a batch that is under way, with their sequences."""
        sequences = [self._sequences[chunk.id] for chunk in batch.chunks]
        home.computed(batch, sequences)
        return list(zip(batch.chunks, sequences, strict=True))

    def _draw(
        self,
        rows: Sequence[_DrawRow],
        logits_NV: Tensor,
        most: int,
        scores: bool,
    ) -> Tensor:
        """The next token of each sequence and its log-probability, the `most` likeliest ones where
        any are asked for, and, if any prompt is scored, ranks."""
        draws: list[Draw] = []
        nothing, endings = frozenset[int](), dict[int, Reason]()
        for number, row in enumerate(rows):
            sequence, index = row.sequence, row.index
            request = sequence.request
            target = request.targets[index] if request.targets else None
            target = request.prompt[index] if index < 0 else target
            ends = request.stop_tokens if index < request.min_tokens else nothing
            key, allowed = request.seed_key or request.id, None
            if request.grammar and target is None:
                assert self.grammars is not None
                ends = nothing
                allowed, ending = self.grammars.next_tokens(request, sequence.drawn)
                if ending is not None:
                    endings[number] = ending
            draws.append(
                Draw(
                    request.sampling,
                    key,
                    index,
                    target,
                    exclusions=ends,
                    alternatives=_num_pairs(request, index),
                    ranked=index < 0,
                    allowed=allowed,
                )
            )
        if self.watch is not None:
            for draw, logits_V in zip(draws, logits_NV, strict=True):
                self.watch(draw.request, draw.index, logits_V)
        table = draw_table(logits_NV, draws, most, scores)
        for row, ending in endings.items():
            table[row, 0] = NO_TOKEN
            table[row, 1] = 0.0 if ending == "stop" else math.nan
        return table

    def _end_first(self) -> list[DrawnToken]:
        """Wait for the draws of the batch that was begun first."""
        flight, drawn_tokens = self._flights.popleft(), list[DrawnToken]()
        for numbers, row in zip(as_rows(flight.drawn()), flight.rows, strict=True):
            sequence, index = row.sequence, row.index
            request, token, logprob, rank = sequence.request, int(numbers[0]), numbers[1], 0
            id = request.id
            if self._sequences.get(id) is not sequence:  # it was ended meanwhile
                continue
            if row.proposal is not None:
                if not row.accepts:
                    continue
                self._homes[id].accept(sequence)
            if request.targets:
                reason = sequence.score(index, token, logprob)
            elif index < 0:
                if index != -sequence.num_unscored:  # it lost its blocks: computed again
                    continue
                token, rank = request.prompt[index], int(numbers[-1])
                reason = sequence.score_prompt(logprob)
            else:
                reason = sequence.append(token, logprob)
            if reason is not None:
                self.end(id, reason)
            pairs = _pairs(request, index, numbers)
            drawn_tokens.append(DrawnToken(id, index, token, logprob, reason, pairs, rank))
        if self.heads is not None:
            self._propose(self.heads, flight)
        return drawn_tokens

    def _propose(self, heads: MtpDrafter, flight: _Flight) -> None:
        """What is likely to follow the tokens of a step, on all ranks."""
        spans = [heads.spans(pairs, self._sequences) for pairs in flight.scheduled]
        waiting = [
            [span.sequence for span in of_replica if span.chunk.samples] for of_replica in spans
        ]
        own, together = self.ranks.replica, self.ranks.together
        beside = (span for of_replica in spans for span in of_replica) if together else ()
        proposals_SK = heads.run(spans[own], beside)
        tables = [
            proposals_SK
            if replica == own and self.ranks.draws
            # One rank has the numbers, as of draws.
            else proposals_SK.new_zeros(len(sequences), heads.count)
            for replica, sequences in enumerate(waiting)
        ]
        if not any(waiting):
            return
        rows = as_rows(self.ranks.share(torch.cat(tables))())
        for sequence, row in zip(chain.from_iterable(waiting), rows, strict=True):
            heads.put(sequence, [int(token) for token in row])

    def end(self, id: str, reason: Reason) -> None:
        """Abort a request and free its blocks; its tokens so far are its completion."""
        sequence = self._sequences[id]
        routes = self._recorded(sequence)
        if self.travel is not None and reason == "length" and self._is_here(sequence):
            self.travel.leave(sequence)
        del self._sequences[id]
        home = self._homes.pop(id)
        home.remove(sequence)
        if self.grammars is not None:
            self.grammars.forget(id)
        if reason == "error":
            home.pool.forget()  # a fault that has passed must not live on in shared blocks
        self._ended[id] = Completion(
            id,
            tuple(sequence.drawn),
            tuple(sequence.logprobs),
            reason,
            sequence.reused,
            sequence.preempted,
            routes,
            sequence.drafted,
            sequence.accepted,
        )

    def connect(self, travel: Travel) -> None:
        """Connect to other engines, which send sequences or receive them."""
        self.travel = travel

    def _is_here(self, sequence: SequenceState) -> bool:
        """Whether this rank has something of its cache."""
        return self._homes[sequence.request.id] is self.schedulers[self.ranks.replica]

    def _land(self, sequence: SequenceState) -> None:
        """Put what another engine has computed into the blocks of a sequence."""
        if self._is_here(sequence):
            assert self.travel is not None, "a sequence came, and nobody carries any"
            self.travel.land(sequence)

    def _save(self, sequence: SequenceState) -> None:
        """Keep the routes of a sequence that is about to lose its blocks: its draw may end it."""
        if self.routes is not None:
            # Proposals that its draw will accept are in its blocks, and not counted yet.
            most = len(sequence.table) * BLOCK if sequence.awaits_draw else sequence.computed
            self._saved[sequence.request.id] = self._here(sequence, most)

    def _here(self, sequence: SequenceState, count: int) -> Tensor:
        """What this rank has recorded of the first tokens of a sequence that has its blocks."""
        assert self.routes is not None
        table = sequence.table
        if not self._is_here(sequence):
            return self.routes.nothing(count)
        slots = (table[i // BLOCK] * BLOCK + i % BLOCK for i in range(count))
        return self.routes.read(list(slots))

    def _recorded(self, sequence: SequenceState) -> RecordedRoutes | None:
        """The routes of a sequence that ends, from all ranks."""
        if self.routes is None:
            return None
        saved = self._saved.pop(sequence.request.id, None)
        if saved is not None and not sequence.computed:
            # No forward has read the last token, unless the next one was still to be drawn.
            local_routes = saved[: len(sequence.tokens) - (not sequence.awaits_draw)]
        else:
            local_routes = self._here(sequence, sequence.computed)
        return self.routes.recorded(self.ranks.share(local_routes)())

    def collect(self, id: str) -> Completion:
        """Return the completion of a request that has ended, once."""
        return self._ended.pop(id)

    def run(self, requests: Iterable[Request]) -> dict[str, Completion]:
        """Run requests to their end; returns completions by id."""
        ids: list[str] = []
        for request in requests:
            self.add(request)
            ids.append(request.id)
        while self.busy:
            self.step()
        return {id: self.collect(id) for id in ids}

    def renew(self) -> None:
        """Recompute the cache after the weights have changed."""
        while self._flights:
            self._landed += self._end_first()
        for scheduler in self.schedulers:
            scheduler.restart()
