"""The scheduler: which tokens of which sequences run next.

First come, first served. Every step has a budget of tokens. Running sequences take what they need
of it, in order of arrival: one token in decode, and a chunk of the prompt in prefill. Waiting ones
are admitted with the rest of it. If blocks run out, the youngest sequence loses its own and waits;
it is computed again later. So the oldest sequence always goes on, and every request ends.

Attention of a chunk takes the longer, the more tokens are before it: its size falls with them, so
that a step of others who draw never waits much longer than for the first chunk.

Several batches may be under way, one in each stage of a pipeline. A sequence whose next token is
not drawn yet waits for it. Batches are computed in order by every stage: what an earlier one writes
or reads is safe from a later one, whoever has the blocks by then.

Every prompt is computed once. In each layer a step writes the keys of all its tokens before any of
them attends. So full blocks are shared as soon as their tokens are scheduled, with sequences of the
same step too. The last tokens of a prompt fill no block, and every sample goes on with tokens of
its own after them: other samples wait for the step that computes this end of their prompt, and the
next step begins with copies of the block. Whoever comes after them does not wait.

A sequence that another engine has begun waits with its cache beside it: when it is admitted, that
goes into its blocks. If it loses these, it is computed again here.

With a window in all layers a sequence gives back the blocks that no later token sees: it never has
more than the window and a chunk need, however long it gets.

A model may rotate all tokens of a text otherwise as soon as it is longer than `outgrown_at`
(longrope). Its keys so far are then of no use: it gives back its blocks and is computed again,
once. Texts on the two sides of that length share no blocks.

Drafts take what all others leave of a step: tokens, rows and blocks. A proposal is a chunk of one
token after that of its sequence. Blocks that only refused proposals needed are given back. While
they are under way, a sequence that needs them waits for their draw, and nobody loses others.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fivefold.core import FivefoldError
from fivefold.core.model import BLOCK, STEP_TOKENS, blocks_of, kept_tokens
from fivefold.generate.async_scheduling import place_of
from fivefold.generate.blocks import BlockPool
from fivefold.generate.drafts import Drafter
from fivefold.generate.requests import (
    DECODE_ROWS,
    BlockCopy,
    Drawn,
    Request,
    SequenceChunk,
    SequenceState,
    StepBatch,
)

SCORED_TOKENS = 512
"""Most tokens of prompts that a step scores: all of their logits are in memory together."""
LEAST_CHUNK = 512
"""Tokens of a long prompt that a step with room computes: fewer only read the weights."""


@dataclass(frozen=True)
class ScheduleLimits:
    """Limits of one step."""

    tokens: int = 512  # of one forward
    sequences: int = 256  # that run at a time

    def __post_init__(self) -> None:
        assert self.tokens > 0 and self.sequences > 0

    @classmethod
    def of(cls, device: str, tokens: int | None = None, sequences: int = 256) -> ScheduleLimits:
        """Limits for a kind of device. With many cores, large steps cost less a token; on other
        devices they only delay decoding."""
        usual = STEP_TOKENS if device == "cuda" else cls.tokens
        return cls(tokens or usual, sequences)


class Scheduler:
    """Queue of waiting and running sequences, and their blocks."""

    def __init__(
        self,
        pool: BlockPool,
        limits: ScheduleLimits,
        max_seq: int,
        in_flight: int = 1,
        on_lost: Callable[[SequenceState], None] = lambda sequence: None,
        window: int | None = None,
        ahead: bool = False,
        on_landing: Callable[[SequenceState], None] = lambda sequence: None,
        outgrown_at: int | None = None,
        even_context: float = math.inf,
        drafter: Drafter | None = None,
        lookahead: int = 0,
    ) -> None:
        """`in_flight`: batches under way at a time, over which sequences are spread. `on_lost` is
        called before a sequence loses its blocks, `on_landing` when one that was carried here has
        its blocks, of which the first `computed` tokens were found already. `window`: the keys that
        a token sees, itself included, in all layers. `ahead`: a sequence goes on with a token that
        is being drawn. `outgrown_at` is that of the shape. `even_context`: earlier tokens whose
        attention takes a token as long as all else. A `drafter` proposes tokens, but never
        `ahead`. `lookahead`: tokens after a block that its contents depend on."""
        assert drafter is None or not ahead, "how many tokens come is not known ahead"
        self.pool, self.limits, self.max_seq, self.in_flight = pool, limits, max_seq, in_flight
        self.on_lost, self.window, self.ahead = on_lost, window, ahead
        self.on_landing, self.outgrown_at, self.drafter = on_landing, outgrown_at, drafter
        self.even_context, self.lookahead = even_context, lookahead
        self.waiting: list[SequenceState] = []  # both by arrival
        self.running: list[SequenceState] = []
        self._short: SequenceState | None = None  # waits for blocks of proposals under way
        self.num_preempted = self.num_drafted = self.num_accepted = 0
        self._arrived = 0
        # Of the step that is being scheduled: ends of prompts that it computes, and its copies.
        self._ends = set[bytes]()
        self._copies: list[BlockCopy] = []
        self.load = 0  # tokens that its sequences may have in the end

    def add(self, request: Request, drawn: Drawn = ()) -> SequenceState:
        """Queue a request. With `drawn`, another engine has computed its prompt and these
        tokens."""
        limit = min(len(request.prompt) + request.max_tokens, self.max_seq)
        needed = kept_tokens(limit, self.window, self.limits.tokens)
        if blocks_of(needed) > self.pool.count:
            capacity = self.pool.count * BLOCK
            raise FivefoldError(
                f"request {request.id!r} may need {needed:,} tokens and the cache has room for "
                f"{capacity:,}: ask for fewer tokens, or give the cache more memory"
            )
        scores = request.prompt_logprobs is not None
        sequence = SequenceState(
            *(request, self._arrived, limit),
            tokens=[*request.prompt, *(token for token, _ in drawn)],
            logprobs=[logprob for _, logprob in drawn],
            carried=len(request.prompt) if drawn else 0,
            num_unscored=0 if drawn or not scores else len(request.prompt) - 1,
            lookahead=self.lookahead,
        )
        self._arrived += 1
        self.load += limit
        self.waiting.append(sequence)
        return sequence

    def remove(self, sequence: SequenceState) -> None:
        """Free the blocks of a sequence that has ended."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.load -= sequence.limit
        self._release(sequence)

    def restart(self) -> None:
        """Recompute everything without sharing earlier blocks: the weights have changed, or a step
        that is shared already was not computed."""
        while self.running:
            self._preempt(self.running[-1])
        self.pool.forget()

    def schedule(self) -> StepBatch:
        """Schedule the next forward; without chunks if there is nothing to do. What it computes is
        shared from now on."""
        self._ends.clear()
        self._copies.clear()
        if self.outgrown_at is not None:
            for sequence in [state for state in self.running if self._lost_rotation(state)]:
                self._start_again(sequence)
        self._trim_drafts()
        left, chunks, before = self.limits.tokens, list[SequenceChunk](), self.num_preempted
        rows = SCORED_TOKENS
        most = -(-(len(self.running) + len(self.waiting)) // self.in_flight)
        for sequence in [candidate for candidate in self.running if self._goes_on(candidate)]:
            if not left or len(chunks) == most:
                break
            share = self._share(sequence, left, rows)
            if not share or sequence not in self.running:
                continue
            if not self._makes_room(sequence, share):
                self._short = sequence
                continue
            if self._short is sequence:
                self._short = None
            chunks.append(self._chunk(sequence, share))
            left -= len(chunks[-1].tokens)
            rows -= chunks[-1].scored
        is_short = self._short in self.running
        late = 0  # first waiting ones, whose prompt's end is computed in this step
        while left and late < len(self.waiting):
            candidate = self.waiting[late]
            # Whoever came after a sequence that has just lost its blocks would take them again.
            full = len(chunks) == most or self.num_preempted > before or is_short
            full |= len(self.running) + late >= self.limits.sequences
            share = self._share(candidate, left, rows)
            if full or not share or candidate.awaits_draw:
                break
            candidate.begin(*self._contents(candidate))
            if self._awaits_end(candidate):
                late += 1
                continue
            if not self._admit(candidate, share, reserved=late):
                break
            # It may have found a long beginning.
            chunks.append(self._chunk(candidate, self._share(candidate, share, rows)))
            left -= len(chunks[-1].tokens)
            rows -= chunks[-1].scored
        for copy in self._copies:
            self.pool.release(copy.source)
        if self.drafter is not None and not is_short:
            chunks = self._with_drafts(chunks, left, self.drafter)
        # Single tokens first: they are one piece for a kernel of their own.
        chunks.sort(key=lambda sequence_chunk: len(sequence_chunk.tokens) > 1)
        return StepBatch(tuple(chunks), tuple(self._copies))

    def _share(self, sequence: SequenceState, left: int, rows: int) -> int:
        """Tokens that a sequence may have of a step in which so many tokens and scores are left."""
        most = min(left, rows) if sequence.num_unscored else left
        longer = 1 + sequence.computed / self.even_context
        return min(most, max(LEAST_CHUNK, int(self.limits.tokens / longer)))

    def _with_drafts(
        self, chunks: Sequence[SequenceChunk], left: int, drafter: Drafter
    ) -> list[SequenceChunk]:
        """The chunks of a step, with proposals after those that end a sequence."""
        by_id = {sequence.request.id: sequence for sequence in self.running}
        left, extended = min(left, DECODE_ROWS - len(chunks)), list[SequenceChunk]()
        for chunk in chunks:
            sequence = by_id[chunk.id]
            most = min(left, self._most_drafts(sequence, chunk))
            proposals = drafter.propose(sequence, most) if most > 0 else ()
            self._take(sequence, self._missing_to(sequence, chunk.stop + len(proposals)))
            if not proposals:
                extended.append(chunk)
                continue
            chunk = replace(chunk, table=tuple(sequence.table))
            extended.append(chunk)
            extended += [
                replace(chunk, tokens=(token,), start=start, draft=True)
                for start, token in enumerate(proposals, chunk.stop)
            ]
            sequence.draft(len(proposals))
            self.num_drafted += len(proposals)
            left -= len(proposals)
        return extended

    def _most_drafts(self, sequence: SequenceState, chunk: SequenceChunk) -> int:
        """Most proposals after a chunk. A grammar is to know a token before the next is drawn, and
        the last token that may be drawn has no other after it."""
        if not chunk.samples or len(chunk.tokens) > 1 or chunk.scored or sequence.request.grammar:
            return 0
        stop = sequence.limit - 1
        if self.outgrown_at is not None and not sequence.outgrown:
            stop = min(stop, self.outgrown_at)
        blocks = len(sequence.table) + self.pool.num_free
        return min(stop, blocks * BLOCK) - chunk.stop

    def _num_proposed(self) -> int:
        """Blocks that only proposals under way need."""
        drafted = self.running if self.drafter is not None else ()
        return sum(max(0, len(state.table) - blocks_of(state.length)) for state in drafted)

    def _trim_drafts(self) -> None:
        """Give back the blocks that only refused proposals needed."""
        for sequence in self.running if self.drafter is not None else ():
            if not sequence.awaits_draw:
                for block in sequence.trim(blocks_of(sequence.length)):
                    self.pool.release(block)

    def accept(self, sequence: SequenceState) -> None:
        """Count a proposal that was drawn."""
        self.num_accepted += 1
        sequence.accept()
        self._publish_blocks(sequence, self._num_final(sequence, sequence.computed))

    def _goes_on(self, sequence: SequenceState) -> bool:
        """Whether its next token is known, or will be when the device reads it."""
        if not sequence.awaits_draw:
            return True
        # A grammar is to know the last token before the next is drawn.
        has_next = self.ahead and not sequence.request.grammar
        has_next = has_next and sequence.awaited == 1 and sequence.length < sequence.limit
        return has_next and sequence.outgrown == self._outgrown(sequence.length)

    def _outgrown(self, length: int) -> bool:
        return self.outgrown_at is not None and length > self.outgrown_at

    def _lost_rotation(self, sequence: SequenceState) -> bool:
        """Whether its next token is known, and makes it too long for the keys that it has."""
        return not sequence.awaits_draw and sequence.outgrown != self._outgrown(sequence.length)

    def computed(self, batch: StepBatch, sequences: Sequence[SequenceState]) -> None:
        """Count the tokens of a batch, whose forward is done, or precedes any other."""
        for chunk, sequence in zip(batch.chunks, sequences, strict=True):
            if chunk.draft:  # it is computed if it is drawn
                continue
            sequence.advance(len(chunk.tokens))
            if chunk.samples:
                sequence.await_draw()
            self._leave_window(sequence)

    def _leave_window(self, sequence: SequenceState) -> None:
        """Give back what its next tokens do not see."""
        if self.window is not None:
            first = max(0, sequence.computed - self.window + 1)
            for block in sequence.leave(first // BLOCK):
                self.pool.release(block)

    def _contents(self, sequence: SequenceState) -> tuple[bool, bytes]:
        """What the blocks of a sequence that begins now depend on beside its tokens: whether it has
        outgrown its rotation; and the root of its digests, which is another for every adapter. What
        attends to contents that are forgotten later has another root than what begins then."""
        outgrown, adapter = self._outgrown(sequence.length), sequence.request.adapter
        return outgrown, b"%d %d %d" % (self.pool.num_forgotten, outgrown, adapter)

    def _publish(self, sequence: SequenceState, chunk: SequenceChunk) -> None:
        """Share the blocks that a chunk fills, and the end of the prompt."""
        full = self._num_final(sequence, chunk.stop)
        if full > sequence.published:
            self._publish_blocks(sequence, full)
        end = sequence.prompt_end
        if chunk.start > end or self.lookahead > 1:
            return
        index, count = divmod(end, BLOCK)
        if count and end <= chunk.stop:
            digest = sequence.digest_of_end()
            if self.pool.publish(sequence.table[index], digest):
                self._ends.add(digest)

    def _num_final(self, sequence: SequenceState, computed: int) -> int:
        """How many blocks are full, and have all the tokens that they depend on."""
        return max(0, min(computed, len(sequence.tokens) - self.lookahead)) // BLOCK

    def _publish_blocks(self, sequence: SequenceState, count: int) -> None:
        """Share the first blocks of a sequence, which are full."""
        for index in range(max(sequence.published, sequence.out_of_sight), count):
            self.pool.publish(sequence.table[index], sequence.digest(index))
        sequence.publish(count)

    def _awaits_end(self, sequence: SequenceState) -> bool:
        """Whether this step computes the end of the prompt for another sample."""
        shares = self._shares_end(sequence) and bool(self._ends)
        return shares and sequence.digest_of_end() in self._ends

    def _shares_end(self, sequence: SequenceState) -> bool:
        """Whether a sequence needs no logits before the last token of its prompt, no other engine
        has computed this, and nothing of it depends on tokens that are drawn."""
        needs_none = not sequence.carried and sequence.prompt_end <= sequence.first_wanted
        return needs_none and self.lookahead < 2

    def _chunk(self, sequence: SequenceState, most: int) -> SequenceChunk:
        start = sequence.computed
        tokens = tuple(sequence.tokens[start : start + most]) or (place_of(sequence.row),)
        last = start + len(tokens) == sequence.length
        stop, scored = start + len(tokens), 0
        if sequence.request.targets or sequence.num_unscored:
            scored = max(0, stop - max(start, sequence.first_wanted))
        same = (sequence.request.id, tokens, start, tuple(sequence.table), last)
        adapter = sequence.request.adapter
        chunk = SequenceChunk(*same, scored=scored, outgrown=sequence.outgrown, adapter=adapter)
        self._publish(sequence, chunk)
        return chunk

    def _missing(self, sequence: SequenceState, most: int) -> int:
        """The blocks that its next chunk needs and it does not have."""
        return self._missing_to(sequence, min(sequence.computed + most, sequence.length))

    @staticmethod
    def _missing_to(sequence: SequenceState, stop: int) -> int:
        """The blocks that its first `stop` tokens need and it does not have."""
        return max(0, blocks_of(stop) - len(sequence.table))

    def _makes_room(self, sequence: SequenceState, most: int) -> bool:
        """Give a running sequence its blocks, from the youngest ones if need be; False if it is the
        youngest itself, and has lost its own, or waits for those of proposals."""
        missing = self._missing(sequence, most)
        if not missing:  # in most steps of a decode
            return True
        while missing > self.pool.num_free:
            if missing <= self.pool.num_free + self._num_proposed():
                return False
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._take(sequence, missing)
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        self.num_preempted += 1
        self._start_again(sequence)

    def _start_again(self, sequence: SequenceState) -> None:
        """Take its blocks away: it waits to be computed again."""
        self.running.remove(sequence)
        self.on_lost(sequence)
        self._release(sequence)
        sequence.lose()
        insort(self.waiting, sequence, key=lambda state: state.number)

    def _admit(self, sequence: SequenceState, most: int, reserved: int) -> bool:
        """Start a waiting sequence if its first chunk has room beside `reserved` blocks."""
        num_blocks = self._reuse(sequence)
        landing = max(0, sequence.carried - sequence.computed)
        if self._missing(sequence, most + landing) > self.pool.num_free - reserved:
            self._release(sequence)
            return False
        sequence.advance(0, num_blocks * BLOCK)
        self._copy_end(sequence, most, reserved)
        self._take(sequence, self._missing(sequence, most + landing))
        if sequence.carried:
            valid = sequence.outgrown == self._outgrown(sequence.carried)
            self.on_landing(sequence)
            sequence.land(valid)
        # By arrival: a sequence that has lost its blocks is older than some that run.
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda state: state.number)
        return True

    def _reuse(self, sequence: SequenceState) -> int:
        """Share the blocks that others have computed, and count them; the tokens whose logits are
        wanted are left."""
        for index in range(self._num_final(sequence, sequence.first_wanted)):
            block = self.pool.share(sequence.digest(index))
            if block is None:
                break
            sequence.table.append(block)
            sequence.advance(BLOCK)
        sequence.publish(len(sequence.table))
        self._leave_window(sequence)  # or what is shared could leave no room for a chunk
        return len(sequence.table)

    def _copy_end(self, sequence: SequenceState, most: int, reserved: int) -> None:
        """Copy the end of the prompt from another sample, if the blocks before it are shared. Until
        the step is scheduled, nobody can take the source."""
        index, count = divmod(sequence.prompt_end, BLOCK)
        if not count or index != len(sequence.table) or not self._shares_end(sequence):
            return
        source = self.pool.share(sequence.digest_of_end())
        if source is None:
            return
        if self._missing(sequence, most + count) <= self.pool.num_free - reserved:
            target = self.pool.take(source - 1)
            assert target is not None, "counted before"
            if (target - source) % self.pool.owners == 0:
                self._copies.append(BlockCopy(source, target))
                sequence.table.append(target)
                sequence.advance(count, count)
                return
            self.pool.release(target)
        self.pool.release(source)

    def _take(self, sequence: SequenceState, count: int) -> None:
        for _ in range(count):
            block = self.pool.take(sequence.table[-1] if sequence.table else None)
            assert block is not None, "counted before"
            sequence.table.append(block)

    def _release(self, sequence: SequenceState) -> None:
        in_sight = sequence.table[sequence.out_of_sight :]
        for block in reversed(in_sight):  # the end of a prefix is forgotten first
            self.pool.release(block)
        sequence.restart()
