"""Calls to replicas and tokens back: who waits, who runs, and what of it has ended."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Generic, Protocol, TypeVar

from fivefold.core.model import BLOCK, Shape
from fivefold.generate import NOT_FINITE, Codec, Drawn, Request, Sampling, chained_digest
from fivefold.serve.answers import ServedCall, ServedChoice
from fivefold.serve.links import (
    AddCommand,
    CloseCommand,
    DropCommand,
    EngineCommand,
    EngineRole,
    ForgetCommand,
    KvTarget,
    ReplicaHello,
    StepNews,
    packed_message,
    read_message,
)
from fivefold.serve.metrics import Labels, ServeMetrics
from fivefold.serve.schema import ApiError, AskedText

# Replicas: the state of each, and which one takes a request.
#
# A request goes to the replica that has the least to do for it: the tokens that its open requests
# may have in the end, and those of the prompt that its cache does not know. So replicas are loaded
# alike, and prompts with a common beginning meet where it was computed.
#
# Where prompts have engines of their own, a request takes a place in one of both kinds at once: it
# begins only if there is room for all of it, and its cache never waits for an engine.

_MOST_BLOCKS = 64  # of a prompt that are compared
_MOST_DIGESTS = 1 << 16  # that are remembered of a replica


class ServingReplica:
    """The state of a serving engine, as the API process sees it."""

    def __init__(self, hello: ReplicaHello, writer: asyncio.StreamWriter, most: int) -> None:
        """`most`: sequences of a data rank at a time."""
        self.index, self.role, self.start = hello.replica, hello.role, hello.start
        self.blocks, self.writer, self.most = hello.blocks, writer, most * hello.data_ranks
        self.tokens_of_one = hello.blocks_of_one * BLOCK
        self.alive = True
        self.open: dict[str, ServedChoice] = {}
        self.load = 0  # tokens that its open requests may have
        self.free_blocks, self.preempted = hello.blocks, 0
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._told: set[str] = set()  # of open ones, those that the engine knows
        self._loads = [0] * hello.data_ranks  # of those with a place
        self._places: dict[str, KvTarget] = {}
        self.sources: dict[str, ServingReplica] = {}  # of those whose cache may be on its way

    @property
    def has_room(self) -> bool:
        return self.alive and len(self.open) < self.most

    def add(self, choice: ServedChoice, digests: Iterable[bytes] = ()) -> None:
        """Start a choice; `digests` are those of its prompt."""
        self._begin(choice, digests, AddCommand(choice.request))

    def add_prompt(
        self, choice: ServedChoice, digests: Iterable[bytes], after: ServingReplica
    ) -> None:
        """Prefill a choice, and reserve capacity in its decode engine."""
        request, target = replace(choice.request, max_tokens=1), None
        if choice.request.max_tokens > 1:
            target = after.reserve(choice)
        self._begin(choice, digests, AddCommand(request, target))

    def _begin(self, choice: ServedChoice, digests: Iterable[bytes], command: AddCommand) -> None:
        self.open[choice.id] = choice
        self.load += tokens_of(choice)
        for digest in digests:
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > _MOST_DIGESTS:
            self._known.popitem(last=False)
        self._told.add(choice.id)
        self._tell(command)

    def reserve(self, choice: ServedChoice) -> KvTarget:
        """Reserve capacity for a choice whose prompt another engine prefills."""
        home = self._loads.index(min(self._loads))
        self._loads[home] += tokens_of(choice)
        self.open[choice.id] = choice
        self.load += tokens_of(choice)
        target = self._places[choice.id] = KvTarget(self.index, self.start, home)
        return target

    def go_on(self, choice: ServedChoice, source: ServingReplica, drawn: Drawn) -> None:
        """Continue a choice when its cache has arrived."""
        self._told.add(choice.id)
        self.sources[choice.id] = source
        self._tell(AddCommand(choice.request, home=self._places[choice.id].home, drawn=drawn))

    def forget(self, id: str, home: int) -> None:
        """Drop a cache that is on its way."""
        self._tell(ForgetCommand(id, home))

    def ended(self, choice: ServedChoice) -> None:
        """Release a choice that the engine has ended, or will."""
        if self.open.pop(choice.id, None) is not None:
            self.load -= tokens_of(choice)
            self._told.discard(choice.id)
            self.sources.pop(choice.id, None)
            if (target := self._places.pop(choice.id, None)) is not None:
                self._loads[target.home] -= tokens_of(choice)

    def drop(self, choice: ServedChoice) -> None:
        """Abort a choice: its blocks are free after the current step."""
        if choice.id in self.open:
            in_engine = choice.id in self._told
            self.ended(choice)
            if in_engine:
                self._tell(DropCommand(choice.id))

    def close(self) -> None:
        self._tell(CloseCommand())

    def lose(self) -> None:
        """Mark it dead."""
        self.alive = False

    def heard(self, news: StepNews) -> None:
        self.free_blocks, self.preempted = news.free_blocks, news.preempted

    def known(self, digests: Sequence[bytes]) -> int:
        """Number of the first blocks of a prompt that this replica has cached."""
        count = 0
        while count < len(digests) and digests[count] in self._known:
            count += 1
        return count

    def _tell(self, command: EngineCommand) -> None:
        if self.alive and not self.writer.is_closing():
            self.writer.write(packed_message(command))


def tokens_of(choice: ServedChoice) -> int:
    """Most tokens of a choice."""
    return len(choice.request.prompt) + choice.request.max_tokens


def prompt_digests(prompt: Sequence[int]) -> list[bytes]:
    """Chained digests of the full blocks of a prompt."""
    digests, before = list[bytes](), b""
    for start in range(0, min(len(prompt) // BLOCK, _MOST_BLOCKS) * BLOCK, BLOCK):
        before = chained_digest(before, prompt[start : start + BLOCK])
        digests.append(before)
    return digests


def least_loaded(
    replicas: Iterable[ServingReplica], digests: Sequence[bytes]
) -> ServingReplica | None:
    """Replica with the least work for a prompt; None if all are full."""
    free = [replica for replica in replicas if replica.has_room]
    return min(
        free, key=lambda replica: replica.load - BLOCK * replica.known(digests), default=None
    )


# Requests that wait for an engine, in turn between clients.
#
# Each client has a queue of its own, and the queues are served round robin, a sequence at a time:
# who sends a thousand requests waits for them, and nobody else does. All queues together have a
# limit. A newcomer that finds them full takes the place of the newest call of the client that has
# the most, if that one has clearly more than its own client; else it is refused.


class QueuedItem(Protocol):
    """A sequence in the queue, of a call of a client."""

    @property
    def client(self) -> str: ...

    @property
    def call(self) -> object: ...


Item = TypeVar("Item", bound=QueuedItem)


class FairQueue(Generic[Item]):
    """Bounded queue that serves clients in turn."""

    def __init__(self, most: int) -> None:
        self.most, self.size = most, 0
        self._queues: OrderedDict[str, deque[Item]] = OrderedDict()

    def push(self, client: str, items: Iterable[Item]) -> list[Item] | None:
        """Queue the sequences of one call; returns those evicted for it, or None if the call is
        refused."""
        new, pushed_out = list(items), list[Item]()
        queue_size = len(self._queues.get(client, ()))
        if self.size + len(new) > self.most:
            victims = self._replaceable(
                client, queue_size + len(new), self.size + len(new) - self.most
            )
            if victims is None:
                return None
            pushed_out = victims
            for victim in pushed_out:
                self.remove(victim)
        self._queues.setdefault(client, deque()).extend(new)
        self.size += len(new)
        return pushed_out

    def restore(self, item: Item) -> None:
        """Requeue a sequence in front of those of its client, beyond the limit."""
        self._queues.setdefault(item.client, deque()).appendleft(item)
        self.size += 1

    def pop(self) -> Item | None:
        """Remove the next sequence: of the client whose turn is longest ago."""
        if not self._queues:
            return None
        client, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        self.size -= 1
        if queue:
            self._queues[client] = queue  # at the end
        return item

    def remove(self, item: Item) -> None:
        """Remove a sequence, if it is queued."""
        queue = self._queues.get(item.client)
        if queue is not None and item in queue:
            queue.remove(item)
            self.size -= 1
            if not queue:
                del self._queues[item.client]

    def _replaceable(self, client: str, client_size: int, missing: int) -> list[Item] | None:
        """The newest call of the client with the most, if it makes enough room."""
        greediest = max(
            self._queues, key=lambda other_client: len(self._queues[other_client]), default=client
        )
        queue = self._queues.get(greediest)
        if greediest == client or queue is None:
            return None
        newest = [choice for choice in queue if choice.call is queue[-1].call]
        fair = len(newest) >= missing and len(queue) - len(newest) >= client_size
        return newest if fair else None


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
        self.max_running = max_running
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
        sampling = Sampling(text_request.temperature, text_request.top_k, text_request.top_p, seed)
        tokens = frozenset(self.named[stop] for stop in text_request.stops if stop in self.named)
        texts = tuple(stop for stop in text_request.stops if stop not in self.named)
        for prompt in prompts:
            limit = self._limit(prompt, text_request)
            for copy in range(text_request.n):
                request = Request(
                    f"{id}/{next(self._numbers)}",
                    prompt,
                    limit,
                    sampling,
                    self.ends | tokens,
                    seed_key=f"choice {copy}",
                    alternatives=min(text_request.alternatives, self.shape.vocab),
                )
                index = len(call.choices)
                call.choices.append(ServedChoice(call, index, request, self.codec, texts))
        return call

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
        return longest - len(prompt) if max_tokens is None else max_tokens

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
        for id, token, logprob, reason, alternatives in news.rows:
            choice, target = replica.open.get(id), targets.get(id)
            if choice is None:  # nobody waits for it any more
                if target is not None and (after := self._at(target)) is not None:
                    after.forget(id, target.home)
                continue
            replica.sources.pop(id, None)  # its cache has come
            try:
                if reason == "error":
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
        ]


def _labels(index: int, replica: ServingReplica) -> Labels:
    """Which engine; and what it does of a request, if not all."""
    role = (("role", replica.role),) if replica.role != "both" else ()
    return (("replica", str(index)), *role)
