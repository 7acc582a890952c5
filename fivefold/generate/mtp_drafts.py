"""Drafts by the layers of multi-token prediction (MTP) that a model was trained with.

At place i, depth j joins the hidden state of the depth before (of the last norm at depth 0) with
the embedding of token i + j + 1, and predicts the token after that, as in training. So when a step
has drawn its tokens, every depth runs over the places that are new, and the greedy token at the
last one is a proposal: known tokens are followed by the proposals of the depths before.

Splits   as the layers of the model, over tp, ep and dp; experts may serve other replicas.
Moves    what these layers move; hidden states of a step's tokens over tp where these are split;
         and the proposals, two numbers a sequence and depth, over all ranks.
Costs    a layer and a head for each proposal, one after another, issued kernel by kernel, and a
         wait of the host. Keys and values of each depth in the cache, for all places.
Refuses  pp, whose first stage has the embedding and whose last one the hidden states; cp, whose
         ranks have the hidden states of some tokens; and sequences that other engines have begun,
         whose caches come without these layers.

Keys of depth j at place i depend on tokens up to i + j + 1. As long as that one is a proposal they
are provisional, and the next step computes them again: their input is kept, one row a sequence and
depth. Blocks are shared under digests that have the tokens after them as well (`lookahead`), and
not before those are known: what others find there is final. A stale key would cost acceptance,
never a token.

Legend: T tokens of a pass, S sequences with proposals, K depths, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fivefold.generate.async_scheduling import place_of
from fivefold.generate.forward import DecoderForward
from fivefold.generate.requests import SequenceChunk, SequenceState, StepBatch

Scheduled = Iterable[tuple[SequenceChunk, SequenceState]]
"""The chunks of a step of one replica, with their sequences."""


@dataclass
class _Progress:
    """Where a sequence goes on, and what its depths read there."""

    stop: int  # places that the layers before have computed
    preempted: int
    starts: list[int]  # of each depth, the first place whose key is not final
    inputs: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Of a depth that starts before the one before it: the hidden state there."""


class PlaceSpan(NamedTuple):
    """New places of a sequence. Its chunk begins in `row` of the step."""

    sequence: SequenceState
    chunk: SequenceChunk
    row: int
    stop: int
    starts: list[int]  # of each depth
    stops: list[int]
    progress: _Progress
    before: _Progress | None


class _Source(NamedTuple):
    """Rows of hidden states, and which of them the places of spans have."""

    rows_TD: Tensor
    firsts: dict[str, tuple[int, int]]  # by sequence: a place, and its row
    earlier: dict[str, int]  # the row of the place before that, where it is kept

    def row(self, id: str, position: int) -> int:
        start, row = self.firsts[id]
        return row + position - start if position >= start else self.earlier[id]


class MtpDrafter:
    """Proposes what the MTP layers of a decoder find likeliest."""

    def __init__(self, forward: DecoderForward, count: int) -> None:
        assert 0 < count <= len(forward.decoder.mtp), "refused before"
        self.forward, self.count = forward, count
        self._progress: WeakKeyDictionary[SequenceState, _Progress] = WeakKeyDictionary()
        self._proposals: WeakKeyDictionary[SequenceState, tuple[int, list[int]]]
        self._proposals = WeakKeyDictionary()

    def propose(self, sequence: SequenceState, most: int) -> list[int]:
        """What was proposed likely after the tokens that the sequence has now."""
        length, proposals = self._proposals.get(sequence, (0, []))
        return proposals[:most] if length == len(sequence.tokens) else []

    def put(self, sequence: SequenceState, proposals: list[int]) -> None:
        """What follows the tokens of a sequence."""
        self._proposals[sequence] = len(sequence.tokens), proposals

    def spans(self, scheduled: Scheduled, open_ids: Container[str]) -> list[PlaceSpan]:
        """The new places of a step whose tokens were drawn. Those that others may share are
        computed for sequences that have ended too."""
        groups: list[tuple[SequenceChunk, SequenceState, int, int]] = []
        row = 0
        for chunk, sequence in scheduled:
            if chunk.draft:
                first, _, first_row, _ = groups[-1]
                groups[-1] = first, sequence, first_row, chunk.stop
            else:
                groups.append((chunk, sequence, row, chunk.stop))
            row += len(chunk.tokens)
        spans = [
            self._span(*group, group[0].id in open_ids)
            for group in groups
            if min(group[3], len(group[1].tokens) - 1) > group[0].start
        ]
        # Single tokens first: they are one piece for a kernel of their own.
        return sorted(spans, key=lambda span: span.stop - span.chunk.start > 1)

    def _span(
        self, chunk: SequenceChunk, sequence: SequenceState, row: int, computed: int, is_open: bool
    ) -> PlaceSpan:
        known, before = len(sequence.tokens), self._progress.get(sequence)
        stop = min(computed, known - 1)
        request, starts = sequence.request, [chunk.start] * self.count
        if before is not None and (before.stop, before.preempted) == (
            chunk.start,
            sequence.preempted,
        ):
            starts = before.starts
        else:
            before = None
        proposes = chunk.samples and is_open and not (request.targets or request.grammar)
        final = [min(stop, known - 1 - depth) for depth in range(self.count)]
        following = [max(pair) for pair in zip(starts, final, strict=True)]
        progress = _Progress(stop, sequence.preempted, following)
        self._progress[sequence] = progress
        stops = [stop] * self.count if proposes else final
        chunk = replace(chunk, samples=proposes, scored=0)
        return PlaceSpan(sequence, chunk, row, stop, starts, stops, progress, before)

    @torch.inference_mode()
    def run(self, spans: Sequence[PlaceSpan], beside: Iterable[PlaceSpan] = ()) -> Tensor:
        """The proposals for spans of this replica, (S, K), those of a sequence in the order of
        tokens. `beside` are those of replicas whose experts are served together with its own."""
        forward, proposed = self.forward, list[Tensor]()
        states_TD = forward.take_states()
        all_spans = (*spans, *beside)
        if not all_spans:
            return torch.empty(0, self.count, dtype=torch.int64, device=forward.device)
        assert states_TD is not None, "a step comes before"
        firsts = {span.chunk.id: (span.chunk.start, span.row) for span in spans}
        source = _Source(states_TD, firsts, {})
        for depth in range(self.count):
            runs = any(span.starts[depth] < span.stops[depth] for span in all_spans)
            source, proposals_S = self._run_depth(depth, spans, source, proposed, runs)
            proposed.append(proposals_S)
        return torch.stack(proposed, 1)

    def _run_depth(
        self,
        depth: int,
        spans: Sequence[PlaceSpan],
        source: _Source,
        proposed: Sequence[Tensor],
        runs: bool,
    ) -> tuple[_Source, Tensor]:
        """One depth over its places: what the next one reads, and the proposals."""
        source = _with_inputs(depth, spans, source)
        proposing = [span.chunk.id for span in spans if span.chunk.samples]
        numbers = {id: number for number, id in enumerate(proposing)}
        chunks, rows, firsts = list[SequenceChunk](), list[int](), dict[str, tuple[int, int]]()
        for span in spans:
            id, start, stop = span.chunk.id, span.starts[depth], span.stops[depth]
            following = span.progress.starts
            if depth and following[depth] < following[depth - 1]:
                # A copy: it shall not keep the memory of all rows.
                row = source.row(id, following[depth])
                span.progress.inputs[depth] = source.rows_TD[row].clone()
            firsts[id] = start, len(rows)
            if start < stop:
                rows += [source.row(id, position) for position in range(start, stop)]
                known = span.sequence.tokens
                tokens = tuple(
                    known[index]
                    if index < len(known)
                    else place_of((index - len(known)) * len(proposing) + numbers[id])
                    for index in range(start + depth + 1, stop + depth + 1)
                )
                chunks.append(replace(span.chunk, tokens=tokens, start=start))
        if not runs:
            nothing = torch.empty(0, dtype=torch.int64, device=self.forward.device)
            return _Source(source.rows_TD[:0], firsts, {}), nothing
        step = StepBatch(tuple(chunks))
        x_TD, proposals_S = self.forward.run_ahead(depth, step, source.rows_TD, rows, proposed)
        return _Source(x_TD, firsts, {}), proposals_S


def _with_inputs(depth: int, spans: Sequence[PlaceSpan], source: _Source) -> _Source:
    """With the rows that were kept, where a depth starts before the one before it."""
    inputs = [
        (span.chunk.id, span.before.inputs[depth])
        for span in spans
        if span.before is not None and depth in span.before.inputs
    ]
    if not inputs:
        return source
    count = len(source.rows_TD)
    rows_TD = torch.cat([source.rows_TD, torch.stack([row for _, row in inputs])])
    earlier = {id: count + number for number, (id, _) in enumerate(inputs)}
    return source._replace(rows_TD=rows_TD, earlier=earlier)
