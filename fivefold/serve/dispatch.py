"""Calls to replicas and tokens back: who waits, who runs, and what of it has ended."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean

from fivefold.core.shape import Shape
from fivefold.generate.requests import Request, Sampling
from fivefold.generate.text import Codec
from fivefold.serve.answers import ServedCall, ServedChoice
from fivefold.serve.asked import ApiError, AskedText
from fivefold.serve.links import ReplicaHello, StepNews, read_message
from fivefold.serve.metrics import Labels, ServeMetrics
from fivefold.serve.replicas import ServingReplica, least_loaded, prompt_digests
from fivefold.serve.waiting import FairQueue

_RECENT = 64  # calls whose time tells how long others will wait
_LONGEST_RETRY_S = 60


class Dispatcher:
    """All replicas, and the calls that wait for one."""

    def __init__(
        self,
        shape: Shape,
        codec: Codec,
        ends: frozenset[int],
        metrics: ServeMetrics,
        max_queue: int,
        max_running: int,
    ) -> None:
        """`max_running`: sequences of a replica at a time."""
        self.shape, self.codec, self.ends, self.metrics = shape, codec, ends, metrics
        self.max_running = max_running
        self.named = codec.named()
        self.queue: FairQueue[ServedChoice] = FairQueue(max_queue)
        self.replicas: dict[int, ServingReplica] = {}
        self.joined = asyncio.Event()  # set when a replica has come
        self._numbers = itertools.count()
        self._recent: deque[float] = deque(maxlen=_RECENT)

    @property
    def num_running(self) -> int:
        return sum(len(each.open) for each in self.replicas.values())

    @property
    def longest(self) -> int:
        """The tokens that a prompt and its completion may have together."""
        if self.shape.window_everywhere is not None:
            return self.shape.max_seq
        room = [each.tokens_of_one for each in self.replicas.values()]
        return min([self.shape.max_seq, *room])

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take in what a replica says, until it ends."""
        try:
            hello = await read_message(reader)
            assert isinstance(hello, ReplicaHello)
            replica = ServingReplica(hello, writer, self.max_running)
            self.replicas[hello.replica] = replica
            self.joined.set()
            while True:
                self._take(replica, await read_message(reader))
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    def lose(self, index: int, reason: str) -> None:
        """A replica has died: its calls fail, and the others go on."""
        replica = self.replicas.get(index)
        if replica is None:
            return
        replica.lose()
        for choice in list(replica.open.values()):
            choice.call.fail(ApiError(500, "the engine of this request was lost: send it again"))
        if not any(each.alive for each in self.replicas.values()):
            while (waiting := self.queue.pop()) is not None:
                waiting.call.fail(ApiError(503, f"no engine is left: {reason}"))

    def call(
        self, id: str, client: str, asked: AskedText, prompts: list[tuple[int, ...]], began: float
    ) -> ServedCall:
        """A call with all its choices, which are checked here."""
        call = ServedCall(id, client, asked, sum(map(len, prompts)), began)
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, seed)
        tokens = frozenset(self.named[each] for each in asked.stops if each in self.named)
        texts = tuple(each for each in asked.stops if each not in self.named)
        for prompt in prompts:
            limit = self._limit(prompt, asked)
            for copy in range(asked.n):
                request = Request(
                    f"{id}/{next(self._numbers)}",
                    prompt,
                    limit,
                    sampling,
                    self.ends | tokens,
                    drawn_as=f"choice {copy}",
                    alternatives=min(asked.alternatives, self.shape.vocab),
                )
                index = len(call.choices)
                call.choices.append(ServedChoice(call, index, request, self.codec, texts))
        return call

    def _limit(self, prompt: tuple[int, ...], asked: AskedText) -> int:
        """The tokens that may be drawn; refuses a prompt that leaves no room for them."""
        param, longest = "messages" if asked.chat else "prompt", self.longest
        if not prompt:
            raise ApiError(400, f"{param}: it has no token", param, "invalid_value")
        if bad := next((each for each in prompt if not 0 <= each < self.shape.vocab), None):
            rule = f"token {bad} is not in the vocabulary of {self.shape.vocab:,}"
            raise ApiError(400, f"{param}: {rule}", param, "invalid_value")
        wanted = asked.max_tokens
        if len(prompt) + (wanted or 1) > longest:
            asks = "" if wanted is None else f" and {wanted:,} more are asked for"
            rule = f"the prompt has {len(prompt):,} tokens{asks}; {longest:,} is the limit"
            way = "shorten the prompt" if wanted is None else "shorten one of them"
            raise ApiError(400, f"{rule}: {way}", param, "context_length_exceeded")
        return longest - len(prompt) if wanted is None else wanted

    def begin(self, call: ServedCall) -> None:
        """Queue a call, or refuse it."""
        if len(call.choices) > self.queue.most:
            rule = (
                f"{len(call.choices)} choices, and {self.queue.most} may wait in all: ask for fewer"
            )
            raise ApiError(400, rule, "n", "invalid_value")
        pushed_out = self.queue.push(call.client, call.choices)
        full = self.full()
        for other in pushed_out or ():
            if other.call.error is None:
                other.call.fail(full)
        if pushed_out is None:
            raise full
        self.metrics.begun(call.prompt_tokens)
        self.pump()

    def full(self) -> ApiError:
        """What is said when the queue is full, and when to come again."""
        waits, runs = self.queue.size, max(1, self.num_running)
        seconds = fmean(self._recent) * waits / runs if self._recent else 1.0
        retry = max(1, min(_LONGEST_RETRY_S, math.ceil(seconds)))
        rule = f"{waits:,} requests wait, and the limit is {self.queue.most:,}"
        headers = [("retry-after", str(retry))]
        return ApiError(429, f"{rule}: try again in {retry} s", None, "queue_full", headers)

    def pump(self) -> None:
        """Give replicas what waits, while they have room."""
        several = len(self.replicas) > 1
        while self.queue.size and any(each.has_room for each in self.replicas.values()):
            choice = self.queue.pop()
            assert choice is not None
            digests = prompt_digests(choice.request.prompt) if several else []
            replica = least_loaded(self.replicas.values(), digests)
            assert replica is not None
            replica.add(choice, digests)

    def end(self, call: ServedCall) -> None:
        """Nobody waits for a call any more: what it has is free."""
        for choice in call.choices:
            self.queue.remove(choice)
            for replica in self.replicas.values():
                replica.drop(choice)
        if call.ended and call.error is None:
            self._recent.append(time.monotonic() - call.began)
        self.pump()

    def fail_all(self, error: ApiError) -> None:
        """Give up everything that is open."""
        while (waiting := self.queue.pop()) is not None:
            waiting.call.fail(error)
        for replica in self.replicas.values():
            for choice in list(replica.open.values()):
                choice.call.fail(error)

    def _take(self, replica: ServingReplica, news: StepNews) -> None:
        """Pass on the tokens of a step."""
        replica.heard(news)
        self.metrics.drew(len(news.rows))
        for id, token, logprob, reason, alternatives in news.rows:
            choice = replica.open.get(id)
            if choice is None:  # nobody waits for it any more
                continue
            try:
                choice.push(token, logprob, reason, alternatives)
            except Exception as error:  # of a tokenizer: the other calls go on
                rule = f"the tokens cannot be decoded: {type(error).__name__}: {error}"
                choice.call.fail(ApiError(500, rule))
            if reason is not None:
                replica.ended(choice)
            elif choice.reason is not None:  # by a text that the engine does not see
                replica.drop(choice)
            choice.call.changed.set()
        for id, rule in news.refused:
            choice = replica.open.get(id)
            if choice is not None:
                replica.ended(choice)
                choice.call.fail(ApiError(400, rule, None, "invalid_value"))
        self.pump()

    def gauges(self) -> list[tuple[str, str, list[tuple[Labels, float]]]]:
        """Where the replicas stand."""
        none: Labels = ()

        def each(value: Callable[[ServingReplica], float]) -> list[tuple[Labels, float]]:
            rows = sorted(self.replicas.items())
            return [((("replica", str(i)),), value(replica)) for i, replica in rows]

        return [
            ("fivefold_waiting", "Sequences that wait.", [(none, self.queue.size)]),
            ("fivefold_running", "Sequences in an engine.", each(lambda one: len(one.open))),
            ("fivefold_up", "Whether a replica lives.", each(lambda one: int(one.alive))),
            ("fivefold_blocks", "Blocks of the cache.", each(lambda one: one.blocks)),
            ("fivefold_free_blocks", "Blocks without users.", each(lambda one: one.free_blocks)),
            ("fivefold_preempted", "Lost caches so far.", each(lambda one: one.preempted)),
        ]
