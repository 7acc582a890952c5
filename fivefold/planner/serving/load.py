"""What requests wait for: continuous batching under load, step by step.

Requests arrive at random with a fixed seed (`rate`), or a new one when one ends (`clients`). Every
step runs one token of each running sequence and, with what is left of its budget of tokens, chunks
of prompts, the oldest first: the scheduler of `fivefold generate`. Sequences that do not fit in
the cache wait. All prompts and outputs have one length, and steps the time of their mean context.

An engine that schedules asynchronously chooses a step when the one before it begins: a request that
arrives meanwhile waits one more step, and blocks of a request that ends are free one step later.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

SEED = 0
_REQUESTS = 2000  # that arrive, of which the first quarter warms up: queues are slow to settle
_ANSWERS = 200  # at least, of clients that wait
_MOST_STEPS = 200_000


@dataclass(frozen=True)
class ReplicaLoad:
    """What one replica is asked: requests a second or clients that wait for answers. `arrivals` are
    times at which requests came, in place of random ones."""

    prompt: int
    output: int
    rate: float | None = None
    clients: int = 1
    arrivals: tuple[float, ...] = ()


@dataclass(frozen=True)
class ReplicaSpeed:
    """What one replica does: `step` seconds of so many sequences; a prompt takes `busy` seconds of
    the steps that it is in, and all its tokens come `late` seconds after their steps. A step with
    both reads weights once, for `reading` seconds."""

    step: Callable[[int], float]
    busy: float
    late: float
    reading: float
    slots: int  # sequences
    budget: int  # tokens of a step
    ahead: bool  # a step is chosen when the one before it begins


@dataclass(frozen=True)
class LoadOutcome:
    """Times under load, and whether the queue kept growing."""

    ttft: float  # the median
    ttft_p99: float
    tpot: float
    tpot_p99: float
    tokens_per_s: float
    sequences: float  # that ran at a time, in the mean
    grows: bool


@dataclass
class _Served:
    arrived: float
    unread: int  # tokens of the prompt
    left: int  # tokens of the output
    first: float = 0.0  # when the step of its first token ended


def simulate(load: ReplicaLoad, speed: ReplicaSpeed, requests: int | None = None) -> LoadOutcome:
    """Run requests through one replica, until the load is steady; or so many."""
    if load.rate is None:
        requests = load.clients + (requests or max(_ANSWERS, 2 * load.clients))
    few = _MOST_STEPS // (4 * ceil(load.prompt / speed.budget))  # long prompts take many steps
    requests = len(load.arrivals) or requests or max(1, min(_REQUESTS, few))
    arrivals = deque(_arrivals(load, requests))
    last_arrival = arrivals[-1].arrived
    running: list[_Served] = []
    done: list[tuple[_Served, float]] = []
    clock = chosen = busy = 0.0
    num_running = 0  # sequences that had not ended when the step was chosen
    for _ in range(_MOST_STEPS):
        capacity = speed.slots - num_running
        while arrivals and arrivals[0].arrived <= chosen and len(running) < capacity:
            running.append(arrivals.popleft())
        if not running:
            if not arrivals:
                break
            clock = chosen = max(clock, arrivals[0].arrived)
            num_running = 0
            continue
        waits = arrivals and len(running) < speed.slots
        until = arrivals[0].arrived - clock if waits else float("inf")
        seconds, last, ended = _steps(running, speed, load.prompt, clock, until)
        clock, busy = clock + seconds, busy + seconds * len(running)
        chosen, num_running = (clock - last, len(ended)) if speed.ahead else (clock, 0)
        done += [(sequence, clock) for sequence in ended]
        running = [sequence for sequence in running if sequence.left]
        if load.rate is None:
            again = clock + speed.late  # a client has its last token
            arrivals.extend(_Served(again, load.prompt, load.output) for _ in ended)
        if len(done) >= requests:
            break
    first = 0 if load.rate is not None else min(load.clients, len(done) - 1)
    mean = busy / max(clock, 1e-12)
    stop = clock if load.rate is None else last_arrival
    return _outcome(done[first:], load, stop, mean, requests - first, speed)


def arrival_times(rate: float, requests: int) -> Iterator[float]:
    """At random, with a fixed seed."""
    clock, chance = 0.0, random.Random(SEED)
    for _ in range(requests):
        clock += chance.expovariate(rate)
        yield clock


def _arrivals(load: ReplicaLoad, requests: int) -> Iterator[_Served]:
    """All requests, or the first of each client. Clients are found somewhere in their answers:
    equal ones would stay in step for ever."""
    if load.rate is not None:
        for time in load.arrivals or arrival_times(load.rate, requests):
            yield _Served(time, load.prompt, load.output)
        return
    chance = random.Random(SEED)
    for _ in range(load.clients):
        yield _Served(0.0, 0, chance.randint(1, load.output))


def _steps(
    running: list[_Served], speed: ReplicaSpeed, prompt: int, clock: float, until: float
) -> tuple[float, float, list[_Served]]:
    """Seconds of a step, twice, and who ended with it; or of as many equal steps as there are until
    someone ends or arrives, in so many seconds, and of the last of them."""
    decoding = [request for request in running if not request.unread]
    if len(decoding) == len(running):
        step_seconds, fewest = speed.step(len(decoding)), min(request.left for request in decoding)
        count = fewest if until == float("inf") else max(1, min(fewest, ceil(until / step_seconds)))
        for sequence in decoding:
            sequence.left -= count
        return (
            count * step_seconds,
            step_seconds,
            [request for request in running if request.left <= 0],
        )
    budget, chunked, begun = max(1, speed.budget - len(decoding)), 0, list[_Served]()
    for sequence in running:
        if sequence.unread and chunked < budget:
            taken = min(sequence.unread, budget - chunked)
            sequence.unread, chunked = sequence.unread - taken, chunked + taken
            begun += [] if sequence.unread else [sequence]
    seconds = speed.busy * chunked / prompt
    if decoding:
        decode = speed.step(len(decoding))
        seconds = max(seconds + decode - (speed.reading if chunked else 0.0), decode)
    for sequence in begun:
        sequence.first, sequence.left = clock + seconds, sequence.left - 1
    for sequence in decoding:
        sequence.left -= 1
    return (
        seconds,
        seconds,
        [request for request in running if not request.unread and request.left <= 0],
    )


def _outcome(
    done: list[tuple[_Served, float]],
    load: ReplicaLoad,
    stop: float,
    mean: float,
    requests: int,
    speed: ReplicaSpeed,
) -> LoadOutcome:
    """Of all but the first quarter; tokens until `stop`, when no more requests come. A queue grows
    if later ones wait longer, by more than a few prompts."""
    warm = done[len(done) // 4 :] or done
    waits = sorted(sequence.first + speed.late - sequence.arrived for sequence, _ in warm)
    num_gaps = load.output - 1  # after the first token
    gaps = sorted((end - sequence.first) / num_gaps if num_gaps else 0.0 for sequence, end in warm)
    if not waits:
        never = float("inf")
        return LoadOutcome(never, never, never, never, 0.0, mean, True)
    start = done[len(done) // 4][1] if len(done) > 3 else 0.0
    rate = load.output * sum(start < end <= stop for _, end in warm) / max(stop - start, 1e-12)
    half = len(waits) // 2
    early, late = _mean_wait(warm[:half]), _mean_wait(warm[half:])
    grows = load.rate is not None and (len(done) < requests or late > 1.5 * early + 5 * speed.busy)
    return LoadOutcome(
        _share(waits, 0.5),
        _share(waits, 0.99),
        _share(gaps, 0.5),
        _share(gaps, 0.99),
        rate,
        mean,
        grows,
    )


def _mean_wait(served: list[tuple[_Served, float]]) -> float:
    """The mean time to the step of the first token."""
    return sum(sequence.first - sequence.arrived for sequence, _ in served) / max(1, len(served))


def _share(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
