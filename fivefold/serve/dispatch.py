"""Calls of doors to replicas and tokens back: who waits, who runs, and what of it has ended."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from fivefold.core.model import Shape
from fivefold.generate import Drawn
from fivefold.serve.links import (
    AnsweredRequest,
    AskMetrics,
    BeginCall,
    DoorHello,
    Drain,
    DrawnRow,
    EndCall,
    EndRequest,
    EngineRole,
    KvTarget,
    MetricsText,
    ReplicaHello,
    RestartedRequest,
    ServerState,
    StepNews,
    packed_message,
    read_messages,
)
from fivefold.serve.metrics import Labels, ServeMetrics
from fivefold.serve.queue import FairQueue
from fivefold.serve.replicas import ServingReplica, least_loaded, prompt_digests
from fivefold.serve.routed import DoorPeer, RoutedCall, RoutedRequest
from fivefold.serve.schema import ApiError

_RECENT = 64  # calls whose time tells how long others will wait
_LONGEST_RETRY_S = 60


class Dispatcher:
    """Routes calls of doors to replicas, and tokens back to doors."""

    def __init__(
        self,
        shape: Shape,
        metrics: ServeMetrics,
        max_queue: int,
        max_running: int,
        log: Callable[[str], None],
        has_prefill: bool = False,
    ) -> None:
        """`max_running`: sequences of a data rank at a time. `log` gets a line for every HTTP
        request. `has_prefill`: prompts have engines of their own."""
        self.shape, self.metrics, self.log, self.has_prefill = shape, metrics, log, has_prefill
        self.max_running = max_running
        self.queue: FairQueue[RoutedRequest] = FairQueue(max_queue)
        self.replicas: dict[int, ServingReplica] = {}
        self.doors: dict[int, DoorPeer] = {}
        self.joined = asyncio.Event()  # set when a replica or a door has come, or a door has gone
        self.state = ServerState()
        self.drains_until: float | None = None
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
        """Receive messages of a replica or a door until it ends."""
        peer: ServingReplica | DoorPeer | None = None
        try:
            async for values in read_messages(reader):
                for value in values:
                    if isinstance(peer, ServingReplica):
                        self._take(peer, value)
                    elif isinstance(peer, DoorPeer):
                        self.take(peer, value)
                    else:
                        peer = self._join(value, writer)
                self.send_rows()  # of several steps, if this process is late
        except asyncio.CancelledError:  # the server ends
            pass
        finally:
            writer.close()
            if isinstance(peer, DoorPeer):
                self._leave(peer)

    def _join(
        self, hello: ReplicaHello | DoorHello, writer: asyncio.StreamWriter
    ) -> ServingReplica | DoorPeer:
        """A replica is ready, or a door; either may have been started again."""
        if isinstance(hello, DoorHello):
            peer = self.open_door(hello, lambda value: writer.write(packed_message(value)))
        else:
            peer = self.replicas[hello.replica] = ServingReplica(hello, writer, self.max_running)
            self.publish()
            self.pump()  # requests may wait for it
        self.joined.set()
        return peer

    def open_door(self, hello: DoorHello, send: Callable[[Any], None]) -> DoorPeer:
        """Take in a door, to which `send` sends messages; while the server drains, to drain too."""
        door = self.doors[hello.door] = DoorPeer(hello, send)
        door.send(self.state)
        if self.drains_until is not None:
            door.send(Drain(max(0.0, self.drains_until - time.monotonic())))
        return door

    def _leave(self, door: DoorPeer) -> None:
        """Abort the calls of a door that has ended."""
        for call in list(door.calls.values()):
            self.end(door, EndCall(call.id, None))
        if self.doors.get(door.hello.door) is door:
            del self.doors[door.hello.door]
        self.joined.set()

    def publish(self, accepts: bool | None = None) -> None:
        """Tell all doors the state of the engines, and from when on they accept connections."""
        accepts = self.state.accepts if accepts is None else accepts
        self.state = ServerState(self.serves, self.longest, accepts)
        for door in self.doors.values():
            door.send(self.state)

    def take(self, door: DoorPeer, value: Any) -> None:
        """Take a message of a door; a `DoorBeat` says no more than that it lives."""
        door.hear()
        if isinstance(value, BeginCall):
            self.begin(door, value)
        elif isinstance(value, EndRequest):
            # Under an earlier id it has begun again: its door will hear of that, and answer.
            requests = door.calls[value.call].requests
            self._drop(routed for routed in requests if routed.id == value.id)
        elif isinstance(value, EndCall):
            self.end(door, value)
        elif isinstance(value, AnsweredRequest):
            self.metrics.answered(value.path, value.status, value.times)
            self.log(value.line)
        elif isinstance(value, AskMetrics):
            text = self.metrics.lines(self.gauges())
            door.send(MetricsText(value.number, text))

    def drain(self, seconds: float) -> None:
        """Let all doors answer what is open, and end."""
        self.drains_until = time.monotonic() + seconds
        for door in self.doors.values():
            door.send(Drain(seconds))

    def send_rows(self) -> None:
        """Send doors what was drawn for their calls."""
        for door in self.doors.values():
            door.send_rows()

    def lose(self, index: int) -> None:
        """Requeue the requests of a dead engine, except those of which a client has seen text."""
        replica = self.replicas.get(index)
        if replica is None:
            return
        replica.lose()
        self.publish()
        lost = list(replica.open.values())
        for other in self.replicas.values():  # what it was sending never arrives
            coming = [id for id, source in other.sources.items() if source is replica]
            lost += [other.open[id] for id in coming]
        for routed in dict.fromkeys(lost):
            for other in self.replicas.values():
                other.drop(routed)
            if routed.call.has_failed:
                continue
            self.metrics.lost(routed.can_restart)
            if routed.can_restart:
                before = routed.id
                routed.restart()
                self.queue.restore(routed)
                routed.call.door.send(RestartedRequest(before, routed.id))
            else:
                rule = "the engine of this request was lost: send it again"
                routed.call.fail(ApiError(500, rule, None, "engine_lost"))
        self.pump()

    def give_up(self, reason: str) -> None:
        """Fail waiting requests: no engine of some kind will start again."""
        while (waiting := self.queue.pop()) is not None:
            waiting.call.fail(ApiError(503, f"no engine is left: {reason}"))

    def begin(self, door: DoorPeer, begun: BeginCall) -> None:
        """Queue a call, or refuse it."""
        call = door.calls[begun.id] = RoutedCall(begun.id, begun.client, begun.stream, door)
        call.requests.extend(RoutedRequest(call, request) for request in begun.requests)
        if (count := len(call.requests)) > self.queue.most:
            rule = f"{count} choices, and {self.queue.most} may wait in all: ask for fewer"
            return call.fail(ApiError(400, rule, "n", "invalid_value"))
        pushed_out = self.queue.push(call.client, call.requests)
        full = self.full()
        for other in pushed_out or ():
            other.call.fail(full)
        if pushed_out is None:
            return call.fail(full)
        self.metrics.begun(begun.prompt_tokens)
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
            routed = self.queue.pop()
            assert routed is not None
            several = len(prompts or self.replicas) > 1
            request = routed.request
            digests = prompt_digests(request.prompt, request.adapter) if several else []
            first = least_loaded(prompts or self.replicas.values(), digests)
            assert first is not None
            if self.has_prefill:
                first.add_prompt(routed, digests, decode)
            else:
                first.add(routed, digests)

    def _engines(self, role: EngineRole) -> list[ServingReplica]:
        return [replica for replica in self.replicas.values() if replica.role == role]

    def end(self, door: DoorPeer, ended: EndCall) -> None:
        """Abort what is left of a call."""
        call = door.calls.pop(ended.id)
        if ended.seconds is not None:
            self._recent.append(ended.seconds)
        self._drop(call.requests)

    def _drop(self, requests: Iterable[RoutedRequest]) -> None:
        """Abort requests, wherever they are."""
        for routed in requests:
            self.queue.remove(routed)
            for replica in self.replicas.values():
                replica.drop(routed)
        self.pump()

    def _take(self, replica: ServingReplica, news: StepNews) -> None:
        """Pass on the tokens of a step."""
        replica.heard(news)
        self.metrics.drew(len(news.rows))
        targets = dict(news.moved)
        self.metrics.moved(len(targets), news.moved_bytes)
        for row in news.prompt_rows:
            if (routed := replica.open.get(row[0])) is not None:
                routed.call.door.prompt_rows.append(row)
        open_requests = replica.open
        for row in news.rows:
            routed = open_requests.get(row[0])
            if routed is not None:
                routed.take(row)
                if row[3] is None and not targets and not replica.sources:
                    continue
            self._follow(replica, row, routed, targets.get(row[0]))
        for id, rule in news.refused:
            if (routed := replica.open.get(id)) is not None:
                replica.ended(routed)
                routed.call.fail(ApiError(400, rule, None, "invalid_value"))
        self.pump()

    def _follow(
        self,
        replica: ServingReplica,
        row: DrawnRow,
        routed: RoutedRequest | None,
        target: KvTarget | None,
    ) -> None:
        """Where a request goes on after a token, if it does."""
        id, token, logprob, reason, _ = row
        if routed is None:  # nobody waits for it any more
            if target is not None and (after := self._at(target)) is not None:
                after.forget(id, target.home)
            return
        replica.sources.pop(id, None)  # its cache has come
        if target is not None:
            self._pass_on(routed, replica, target, ((token, logprob),))
        elif reason is not None:
            for engine in (replica, *self._engines("decode")):
                engine.ended(routed)

    def _at(self, target: KvTarget) -> ServingReplica | None:
        """The engine that goes on, unless it has died since."""
        replica = self.replicas.get(target.engine)
        same = replica is not None and replica.alive and replica.start == target.start
        return replica if same else None

    def _pass_on(
        self, routed: RoutedRequest, first: ServingReplica, target: KvTarget, drawn: Drawn
    ) -> None:
        """Its cache is on its way, and so is the request, unless nobody wants more of it."""
        first.ended(routed)
        after = self._at(target)
        if after is None:  # its death has failed the call, or will
            return
        if not routed.call.has_failed and routed.id in after.open:
            after.go_on(routed, first, drawn)
        else:
            after.ended(routed)
            after.forget(routed.id, target.home)

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
