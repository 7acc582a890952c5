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

from fivefold.core.model import Shape
from fivefold.generate import (
    GRAMMAR_FAILED,
    NOT_FINITE,
    Codec,
    Drawn,
    Grammars,
    Request,
    Sampling,
)
from fivefold.serve.answers import ServedCall, ServedChoice
from fivefold.serve.links import EngineRole, KvTarget, ReplicaHello, StepNews, read_message
from fivefold.serve.metrics import Labels, ServeMetrics
from fivefold.serve.queue import FairQueue
from fivefold.serve.replicas import ServingReplica, least_loaded, prompt_digests
from fivefold.serve.schema import ApiError, AskedText, wrong

_RECENT = 64  # calls whose time tells how long others will wait
_LONGEST_RETRY_S = 60


class Dispatcher:
    """Routes calls to replicas, and tokens back to calls."""

    def __init__(
        self,
        shape: Shape,
        codec: Codec,
        ends: frozenset[int],
        metrics: ServeMetrics,
        max_queue: int,
        max_running: int,
        has_prefill: bool = False,
    ) -> None:
        """`max_running`: sequences of a data rank at a time. `has_prefill`: prompts have engines of
        their own."""
        self.has_prefill = has_prefill
        self.shape, self.codec, self.ends, self.metrics = shape, codec, ends, metrics
        self.max_running, self.grammars = max_running, Grammars(codec, shape.vocab)
        self.named = codec.named()
        self.queue: FairQueue[ServedChoice] = FairQueue(max_queue)
        self.replicas: dict[int, ServingReplica] = {}
        self.joined = asyncio.Event()  # set when a replica has come
        self._numbers = itertools.count()
        self._recent: deque[float] = deque(maxlen=_RECENT)

    @property
    def num_running(self) -> int:
        return sum(len(replica.open) for replica in self.replicas.values())

    @property
    def serves(self) -> bool:
        """Whether an engine of every kind is up."""
        roles = {replica.role for replica in self.replicas.values() if replica.alive}
        return roles == ({"prefill", "decode"} if self.has_prefill else {"both"})

    @property
    def longest(self) -> int:
        """Most tokens of a prompt with its completion."""
        if self.shape.window_everywhere is not None:
            return self.shape.max_seq
        capacities = [replica.tokens_of_one for replica in self.replicas.values()]
        return min([self.shape.max_seq, *capacities])

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive messages of a replica until it ends."""
        try:
            hello = await read_message(reader)
            assert isinstance(hello, ReplicaHello)
            replica = ServingReplica(hello, writer, self.max_running)
            self.replicas[hello.replica] = replica
            self.joined.set()
            self.pump()  # others may wait, if it was started again
            while True:
                self._take(replica, await read_message(reader))
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    def lose(self, index: int) -> None:
        """Requeue the requests of a dead engine, except those of which a client has seen text."""
        replica = self.replicas.get(index)
        if replica is None:
            return
        replica.lose()
        lost = list(replica.open.values())
        for other in self.replicas.values():  # what it was sending never arrives
            coming = [id for id, source in other.sources.items() if source is replica]
            lost += [other.open[id] for id in coming]
        for choice in dict.fromkeys(lost):
            for other in self.replicas.values():
                other.drop(choice)
            if choice.reason is not None or choice.call.error is not None:
                continue
            again = choice.can_begin_again
            self.metrics.lost(again)
            if again:
                choice.begin()
                self.queue.restore(choice)
            else:
                rule = "the engine of this request was lost: send it again"
                choice.call.fail(ApiError(500, rule, None, "engine_lost"))
        self.pump()

    def give_up(self, reason: str) -> None:
        """Fail waiting requests: no engine of some kind will start again."""
        while (waiting := self.queue.pop()) is not None:
            waiting.call.fail(ApiError(503, f"no engine is left: {reason}"))

    def call(
        self,
        id: str,
        client: str,
        text_request: AskedText,
        prompts: list[tuple[int, ...]],
        began: float,
    ) -> ServedCall:
        """Create a call with its choices, and validate them."""
        call = ServedCall(id, client, text_request, sum(map(len, prompts)), began)
        seed = secrets.randbits(63) if text_request.seed is None else text_request.seed
        sampling = Sampling(
            text_request.temperature,
            text_request.top_k,
            text_request.top_p,
            seed,
            text_request.min_p,
        )
        tokens = frozenset(self.named[stop] for stop in text_request.stops if stop in self.named)
        texts = tuple(stop for stop in text_request.stops if stop not in self.named)
        tokens |= self._stop_tokens(text_request.stop_token_ids)
        scores = text_request.prompt_alternatives
        scores = None if scores is None else min(scores, self.shape.vocab)
        for number, prompt in enumerate(prompts):
            limit, echo = self._limit(prompt, text_request), ""
            if text_request.echo:
                shown = text_request.prompts[number]
                echo = shown if isinstance(shown, str) else self.codec.decode(shown)
            for copy in range(text_request.n):
                request = Request(
                    f"{id}/{next(self._numbers)}",
                    prompt,
                    limit,
                    sampling,
                    tokens if text_request.ignore_eos else self.ends | tokens,
                    seed_key=f"choice {copy}",
                    alternatives=min(text_request.alternatives, self.shape.vocab),
                    min_tokens=text_request.min_tokens,
                    # All choices of a chat have one prompt, which its answer has once.
                    prompt_logprobs=None if text_request.chat and copy else scores,
                    grammar=text_request.grammar,
                )
                index = len(call.choices)
                call.choices.append(ServedChoice(call, index, request, self.codec, texts, echo))
        return call

    def _stop_tokens(self, tokens: tuple[int, ...]) -> frozenset[int]:
        """The tokens that end a completion, all of the vocabulary."""
        if bad := next((token for token in tokens if not 0 <= token < self.shape.vocab), None):
            rule = f"token {bad} is not in the vocabulary: give tokens below {self.shape.vocab:,}"
            raise wrong("stop_token_ids", rule)
        return frozenset(tokens)

    def _limit(self, prompt: tuple[int, ...], request: AskedText) -> int:
        """The tokens that may be drawn; refuses a prompt that leaves no room for them."""
        param, longest = "messages" if request.chat else "prompt", self.longest
        if not prompt:
            raise ApiError(400, f"{param}: it has no token", param, "invalid_value")
        max_tokens = request.max_tokens
        if len(prompt) + (max_tokens or 1) > longest:
            asks = "" if max_tokens is None else f" and {max_tokens:,} more are asked for"
            rule = f"the prompt has {len(prompt):,} tokens{asks}; {longest:,} is the limit"
            advice = "shorten the prompt" if max_tokens is None else "shorten one of them"
            raise ApiError(400, f"{rule}: {advice}", param, "context_length_exceeded")
        if bad := next((token for token in prompt if not 0 <= token < self.shape.vocab), None):
            rule = f"token {bad} is not in the vocabulary of {self.shape.vocab:,}"
            raise ApiError(400, f"{param}: {rule}", param, "invalid_value")
        limit = longest - len(prompt) if max_tokens is None else max_tokens
        if request.min_tokens > limit:
            rule = f"{request.min_tokens:,} are more than the {limit:,} that may be drawn"
            raise wrong("min_tokens", f"{rule}: give fewer, or a larger max_tokens")
        return max(1, limit)  # of 0 the engine draws a token too, which no answer has

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
        """Error of a full queue, with the time to retry after."""
        waits, runs = self.queue.size, max(1, self.num_running)
        seconds = fmean(self._recent) * waits / runs if self._recent else 1.0
        retry = max(1, min(_LONGEST_RETRY_S, math.ceil(seconds)))
        rule = f"{waits:,} requests wait, and the limit is {self.queue.most:,}"
        headers = [("retry-after", str(retry))]
        return ApiError(429, f"{rule}: try again in {retry} s", None, "queue_full", headers)

    def pump(self) -> None:
        """Dispatch waiting requests to replicas with capacity."""
        while self.queue.size:
            decode = least_loaded(self._engines("decode" if self.has_prefill else "both"), [])
            prompts = self._engines("prefill")
            if decode is None or (self.has_prefill and not any(p.has_room for p in prompts)):
                return
            choice = self.queue.pop()
            assert choice is not None
            several = len(prompts or self.replicas) > 1
            digests = prompt_digests(choice.request.prompt) if several else []
            first = least_loaded(prompts or self.replicas.values(), digests)
            assert first is not None
            if self.has_prefill:
                first.add_prompt(choice, digests, decode)
            else:
                first.add(choice, digests)

    def _engines(self, role: EngineRole) -> list[ServingReplica]:
        return [replica for replica in self.replicas.values() if replica.role == role]

    def end(self, call: ServedCall) -> None:
        """Abort a call whose client has disconnected."""
        for choice in call.choices:
            self.queue.remove(choice)
            for replica in self.replicas.values():
                replica.drop(choice)
        if call.ended and call.error is None:
            self._recent.append(time.monotonic() - call.began)
        self.pump()

    def fail_all(self, error: ApiError) -> None:
        """Fail all open calls."""
        while (waiting := self.queue.pop()) is not None:
            waiting.call.fail(error)
        for replica in self.replicas.values():
            for choice in list(replica.open.values()):
                choice.call.fail(error)

    def _take(self, replica: ServingReplica, news: StepNews) -> None:
        """Pass on the tokens of a step."""
        replica.heard(news)
        self.metrics.drew(len(news.rows))
        targets = dict(news.moved)
        self.metrics.moved(len(targets), news.moved_bytes)
        for id, token, logprob, rank, alternatives in news.prompt_rows:
            if (choice := replica.open.get(id)) is not None:
                choice.score(token, logprob, rank, alternatives)
        for id, token, logprob, reason, alternatives in news.rows:
            choice, target = replica.open.get(id), targets.get(id)
            if choice is None:  # nobody waits for it any more
                if target is not None and (after := self._at(target)) is not None:
                    after.forget(id, target.home)
                continue
            replica.sources.pop(id, None)  # its cache has come
            try:
                if reason == "error" and token < 0:
                    choice.fail(ApiError(500, GRAMMAR_FAILED, None, "grammar_failed"))
                elif reason == "error":
                    choice.fail(ApiError(500, NOT_FINITE, None, "logits_not_finite"))
                else:
                    choice.push(token, logprob, reason, alternatives)
            except Exception as error:  # of a tokenizer: the other calls go on
                rule = f"the tokens cannot be decoded: {type(error).__name__}: {error}"
                choice.call.fail(ApiError(500, rule))
            if target is not None:
                self._pass_on(choice, replica, target, ((token, logprob),))
            elif reason is not None:
                for engine in (replica, *self._engines("decode")):
                    engine.ended(choice)
            elif choice.reason is not None:  # by a text that the engine does not see
                replica.drop(choice)
            choice.call.changed.set()
        for id, rule in news.refused:
            choice = replica.open.get(id)
            if choice is not None:
                replica.ended(choice)
                choice.call.fail(ApiError(400, rule, None, "invalid_value"))
        self.pump()

    def _at(self, target: KvTarget) -> ServingReplica | None:
        """The engine that goes on, unless it has died since."""
        replica = self.replicas.get(target.engine)
        same = replica is not None and replica.alive and replica.start == target.start
        return replica if same else None

    def _pass_on(
        self, choice: ServedChoice, first: ServingReplica, target: KvTarget, drawn: Drawn
    ) -> None:
        """Its cache is on its way, and so is the request, unless nobody wants more of it."""
        first.ended(choice)
        after = self._at(target)
        if after is None:  # its death has failed the call, or will
            return
        if choice.reason is None and choice.call.error is None and choice.id in after.open:
            after.go_on(choice, first, drawn)
        else:
            after.ended(choice)
            after.forget(choice.id, target.home)

    def gauges(self) -> list[tuple[str, str, list[tuple[Labels, float]]]]:
        """Gauges of all replicas."""
        none: Labels = ()

        def gauge(value: Callable[[ServingReplica], float]) -> list[tuple[Labels, float]]:
            rows = sorted(self.replicas.items())
            return [(_labels(i, replica), value(replica)) for i, replica in rows]

        return [
            ("fivefold_waiting", "Sequences that wait.", [(none, self.queue.size)]),
            ("fivefold_running", "Sequences in an engine.", gauge(lambda engine: len(engine.open))),
            ("fivefold_up", "Whether a replica lives.", gauge(lambda engine: int(engine.alive))),
            ("fivefold_blocks", "Blocks of the cache.", gauge(lambda engine: engine.blocks)),
            (
                "fivefold_free_blocks",
                "Blocks without users.",
                gauge(lambda engine: engine.free_blocks),
            ),
            ("fivefold_preempted", "Lost caches so far.", gauge(lambda engine: engine.preempted)),
            ("fivefold_drafted", "Tokens proposed so far.", gauge(lambda engine: engine.drafted)),
            (
                "fivefold_accepted",
                "Proposed tokens that were drawn.",
                gauge(lambda engine: engine.accepted),
            ),
        ]


def _labels(index: int, replica: ServingReplica) -> Labels:
    """Which engine; and what it does of a request, if not all."""
    role = (("role", replica.role),) if replica.role != "both" else ()
    return (("replica", str(index)), *role)
