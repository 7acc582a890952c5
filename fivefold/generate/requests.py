"""The values of generation: what is asked, how far it is, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from fivefold.core import FivefoldError
from fivefold.core.plan import MOST_CAPTURED
from fivefold.generate.blocks import BLOCK, chained_digest
from fivefold.generate.routes import RecordedRoutes

Reason = Literal["stop", "length", "cancelled", "error"]
"""Why a completion ends; "error": its logits are not finite, or its grammar has failed."""
Drawn = tuple[tuple[int, float], ...]
"""Tokens, each with its log-probability."""
DECODE_ROWS = MOST_CAPTURED
"""Most tokens of a decode step that a GPU replays, and that proposals may add to."""
GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy: divided by them, logits would overflow."""
NO_TOKEN = -1
"""In place of a token: the grammar has ended, or failed if the log-probability is NaN."""
NOT_FINITE = "the logits of the model are not finite: check its weights, or use a wider dtype"


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperatures below `GREEDY_BELOW` are greedy."""

    temperature: float = 0.0
    top_k: int | None = None  # of the most likely tokens; None: all
    top_p: float = 1.0  # of the smallest set of tokens with this probability
    seed: int = 0
    min_p: float = 0.0  # of the probability of the likeliest token; 0: all

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    def problems(self) -> Iterator[str]:
        """Every problem of the parameters."""
        if not 0 <= self.temperature < 1e3:
            yield f"temperature = {self.temperature}: give 0 (greedy) or a number above it"
        if self.top_k is not None and self.top_k < 1:
            yield f"top_k = {self.top_k}: give at least 1, or leave it out"
        if not 0 < self.top_p <= 1:
            yield f"top_p = {self.top_p}: give a number above 0 and at most 1"
        if not 0 <= self.min_p <= 1:
            yield f"min_p = {self.min_p}: give 0 (all tokens) or a number up to 1"


@dataclass(frozen=True)
class Request:
    """A generation request. The sampling seed is derived from `seed_key`, by default the request
    id.

    With `targets` nothing is drawn: they are the tokens that follow the last tokens of the prompt,
    one each, and their log-probabilities are wanted. The last target is no part of the prompt.

    With `prompt_logprobs` all tokens of the prompt but the first are scored before anything is
    drawn. They have negative indices, as in `prompt[index]`.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()  # each ends the completion, and is its last token
    targets: tuple[int, ...] = ()  # and max_tokens is 0
    seed_key: str = ""  # of the sampling seed, in place of the id
    alternatives: int = 0  # so many of the likeliest tokens are wanted for every place
    min_tokens: int = 0  # no stop token is drawn before
    prompt_logprobs: int | None = None  # likeliest tokens for every token of the prompt
    grammar: str = ""  # a JSON schema: the completion is JSON of it; "": any text
    adapter: int = 0  # number of the low-rank adapter that computes it; 0: the base alone

    def check(self, vocab: int, max_seq: int) -> None:
        """Refuse a request that the model cannot complete."""
        if problem := next(self._problems(vocab, max_seq), None):
            raise FivefoldError(f"request {self.id!r}: {problem}")

    def _problems(self, vocab: int, max_seq: int) -> Iterator[str]:
        if not self.prompt:
            yield "the prompt has no token: give some text"
        if self.targets:
            yield from self._target_problems(vocab, max_seq)
        elif self.max_tokens < 1:
            yield f"max_tokens = {self.max_tokens}: give at least 1"
        elif len(self.prompt) + 1 > max_seq:
            rule = f"the prompt has {len(self.prompt):,} tokens and the model takes {max_seq:,}"
            yield f"{rule}, with what it writes: shorten the prompt to {max_seq - 1:,}"
        if wrong := [token for token in self.prompt if not 0 <= token < vocab]:
            rule = f"token {wrong[0]} is not in the vocabulary of {vocab:,}"
            yield f"{rule}: give the tokenizer of this model"
        if self.min_tokens and len(self.stop_tokens.intersection(range(vocab))) == vocab:
            rule = f"min_tokens = {self.min_tokens}, and every token ends the completion"
            yield f"{rule}: leave one of both out"
        yield from self.sampling.problems()

    def _target_problems(self, vocab: int, max_seq: int) -> Iterator[str]:
        if self.max_tokens:
            yield f"max_tokens = {self.max_tokens} with targets, which are not drawn: give 0"
        if self.grammar:
            yield "a grammar with targets, which are not drawn: leave it out"
        if len(self.targets) > len(self.prompt):
            rule = f"{len(self.targets):,} targets follow {len(self.prompt):,} tokens"
            yield f"{rule}: give no more targets than tokens"
        if len(self.prompt) > max_seq:
            rule = f"the prompt has {len(self.prompt):,} tokens and the model takes {max_seq:,}"
            yield f"{rule}: shorten it"
        if wrong := [token for token in self.targets if not 0 <= token < vocab]:
            rule = f"target {wrong[0]} is not in the vocabulary of {vocab:,}"
            yield f"{rule}: give the tokenizer of this model"


@dataclass(eq=False)
class SequenceState:
    """A request that runs: its tokens, and how many of them are in the cache.

    `computed` tokens have their keys and values in the blocks of `table`, in order. A sequence that
    has lost its blocks begins again from 0, with the tokens it has drawn. The first `out_of_sight`
    blocks of the table have left the window: others may have them.
    """

    request: Request
    number: int  # of arrival
    limit: int  # of tokens, prompt and completion together
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    computed: int = 0
    table: list[int] = field(default_factory=list[int])
    root: bytes = b""  # of its digests: what contents depend on beside tokens
    digests: list[bytes] = field(default_factory=list[bytes])  # of full blocks, from the first on
    end_digest: bytes | None = None  # of the end of the prompt
    published: int = 0  # blocks of the table that others can share
    reused: int = 0  # tokens that were found in the cache
    preempted: int = 0  # times that it lost its blocks
    out_of_sight: int = 0
    awaited: int = 0  # tokens that are being drawn, and are not known yet
    row: int = 0  # of the last draw that it was in
    likeliest: list[int] = field(default_factory=list[int])  # in the places of targets
    carried: int = 0  # tokens whose keys and values another engine has computed, and wait here
    outgrown: bool = False  # its blocks are those of a text longer than `Shape.outgrown_at`
    num_unscored: int = 0  # tokens of the prompt whose log-probabilities are still wanted
    drafted: int = 0  # tokens that were proposed
    accepted: int = 0  # those of them that were drawn
    lookahead: int = 0  # tokens after a block that its contents depend on

    @property
    def drawn(self) -> list[int]:
        """Tokens of the completion; with targets, the likeliest tokens at their positions."""
        return self.likeliest if self.request.targets else self.tokens[len(self.request.prompt) :]

    @property
    def first_wanted(self) -> int:
        """Position of the first token whose logits are needed."""
        if self.num_unscored:
            return len(self.request.prompt) - 1 - self.num_unscored
        return len(self.tokens) - (len(self.request.targets) or 1)

    @property
    def prompt_end(self) -> int:
        """Position of the last token of the prompt, or of the first one with a target: each sample
        computes it, and shares what is before it."""
        return len(self.request.prompt) - (len(self.request.targets) or 1)

    @property
    def awaits_draw(self) -> bool:
        """Whether all its tokens were scheduled, and the next is not known yet."""
        return self.awaited > 0

    @property
    def length(self) -> int:
        """Number of tokens, with those that are being drawn."""
        return len(self.tokens) + self.awaited

    def advance(self, computed: int, reused: int = 0) -> None:
        """Count more tokens in the cache, computed or shared."""
        self.computed += computed
        self.reused += reused

    def begin(self, outgrown: bool, root: bytes) -> None:
        """Start to fill blocks, whose contents depend on whether the text has outgrown its
        rotation, and whose digests begin with `root`. Another root makes them anew."""
        self.outgrown = outgrown
        if root != self.root:
            self.root, self.end_digest = root, None
            self.digests.clear()

    def digest(self, index: int) -> bytes:
        """Digest of a full block and of all before it. However long a sequence waits, it is hashed
        once."""
        while len(self.digests) <= index:
            start = len(self.digests) * BLOCK
            before = self.digests[-1] if self.digests else self.root
            stop = start + BLOCK + self.lookahead
            self.digests.append(chained_digest(before, self.tokens[start:stop]))
        return self.digests[index]

    def digest_of_end(self) -> bytes:
        """Digest of all that precedes `prompt_end`, which is no full block."""
        if self.end_digest is None:
            start = self.prompt_end // BLOCK * BLOCK
            before = self.digest(start // BLOCK - 1) if start else self.root
            stop = self.prompt_end + self.lookahead
            self.end_digest = chained_digest(before, self.tokens[start:stop])
        return self.end_digest

    def publish(self, count: int) -> None:
        """Note that its first `count` blocks are shared, or can be."""
        self.published = count

    def land(self, valid: bool) -> None:
        """Adopt a cache that another engine has computed, `valid` unless the text has outgrown
        it."""
        self.computed, self.carried = max(self.computed, valid * self.carried), 0

    def restart(self) -> None:
        """Reset after its blocks were freed."""
        self.table.clear()
        self.computed = self.out_of_sight = self.published = 0

    def leave(self, count: int) -> list[int]:
        """Drop blocks that left the window, all but those after the first `count`; returns them."""
        left = self.table[self.out_of_sight : count]
        self.out_of_sight = max(self.out_of_sight, count)
        return left

    def await_draw(self) -> None:
        """Note that a forward in flight draws the next token."""
        self.awaited += 1

    def accept(self) -> None:
        """Count a proposal that was drawn: its keys are in the cache, unless it has lost its blocks
        meanwhile, and the token after it was drawn as well."""
        self.awaited += 1
        self.accepted += 1
        self.computed += self.computed == len(self.tokens) - 1

    def draft(self, count: int) -> None:
        """Count proposals."""
        self.drafted += count

    def trim(self, count: int) -> list[int]:
        """Drop the blocks after the first `count`; returns them, the last one first."""
        extra, self.table[count:] = self.table[count:], []
        return extra[::-1]

    def draw_in(self, row: int) -> None:
        """Index of the next token in the draw."""
        self.row = row

    def lose(self) -> None:
        """Count a preemption."""
        self.preempted += 1

    def score(self, index: int, token: int, logprob: float) -> Reason | None:
        """Append the likeliest token and the log-probability of a target; returns the reason if the
        sequence has ended."""
        if math.isnan(logprob):
            return "error"
        if index == len(self.logprobs):  # else it lost its blocks, and this was computed again
            self.likeliest.append(token)
            self.logprobs.append(logprob)
        last = index == len(self.request.targets) - 1
        self.awaited -= last
        return "length" if last else None

    def score_prompt(self, logprob: float) -> Reason | None:
        """Count the next token of the prompt as scored; logits that are not finite end the
        sequence."""
        self.num_unscored -= 1
        return "error" if math.isnan(logprob) else None

    def append(self, token: int, logprob: float) -> Reason | None:
        """Append a drawn token; returns the reason if the sequence has ended. Logits that are not
        finite give no token, nor does the end of a grammar."""
        if math.isnan(logprob):
            return "error"
        if token == NO_TOKEN:
            return "stop"
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.awaited -= 1
        if token in self.request.stop_tokens:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None


@dataclass(slots=True)  # as `Draw`: every sequence has one in a step
class SequenceChunk:
    """Tokens of one sequence in a forward, from `start` on; their keys and values are written to
    the blocks of `table`, and they attend to all earlier tokens there."""

    id: str
    tokens: tuple[int, ...]
    start: int
    table: tuple[int, ...]
    samples: bool  # whether the last one is the last of its sequence: the next is to be drawn
    fills: bool = False  # tokens of no sequence, which fill a step: nobody reads what they give
    scored: int = 0  # so many of the last tokens are followed by targets, or by prompt to score
    outgrown: bool = False  # of a text longer than `Shape.outgrown_at`
    adapter: int = 0  # as in its request
    draft: bool = False  # its token is a proposal, after another chunk of the sequence

    @property
    def num_wanted(self) -> int:
        """Number of last tokens whose logits are needed."""
        return self.scored or int(self.samples)

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


class BlockCopy(NamedTuple):
    """A block of the cache that is copied to another one of the same owner."""

    source: int
    target: int


@dataclass(frozen=True)
class StepBatch:
    """Input of one forward: chunks of several sequences, concatenated in a single row. Before any
    of them, `copies` are made: all sources are read before a target is written. `beside` are the
    batches of other replicas in this step, where experts serve all of them."""

    chunks: tuple[SequenceChunk, ...]
    copies: tuple[BlockCopy, ...] = ()
    beside: tuple[StepBatch, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    @property
    def decodes(self) -> bool:
        """Whether all sequences have one token, and draw the next."""
        return all(len(chunk.tokens) == 1 and chunk.samples for chunk in self.chunks)


@dataclass(slots=True)
class DrawnToken:
    """A token of a completion, and the reason if it is the last. For a target, the likeliest token
    with the log-probability of the target. At a negative index, a token of the prompt."""

    id: str
    index: int  # in the completion
    token: int
    logprob: float
    reason: Reason | None
    alternatives: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, if asked for
    rank: int = 0  # of a token of the prompt: so many tokens are at least as likely


@dataclass(frozen=True)
class Completion:
    """Result of a request. With targets, the likeliest tokens at their positions, and the
    log-probabilities of the targets."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: Reason
    reused: int  # tokens of the prompt that were found in the cache
    preempted: int  # times that its cache was computed again
    routes: RecordedRoutes | None = None  # if they are recorded
    drafted: int = 0  # tokens that were proposed
    accepted: int = 0  # those of them that were drawn

    def first(self, count: int) -> Completion:
        """Its first tokens, as if it had ended after them: drafts may go on after a stop text."""
        extra, routes = len(self.tokens) - count, self.routes
        if not extra:
            return self
        if routes is not None:
            routes = replace(routes, chosen=routes.chosen[:-extra])
        tokens, logprobs = self.tokens[:count], self.logprobs[:count]
        return replace(self, tokens=tokens, logprobs=logprobs, routes=routes)
