"""Plans to serve: which layout, how many sequences fit, how soon and how fast tokens come.

A layout of serving is one of training without ZeRO: tp and pp cut one replica, dp are replicas with
their own sequences and cache, and experts are either cut like the other weights (etp = tp) or laid
over the ranks of several replicas (ep, whose attention is then data parallel). tp stays inside the
fastest links. Legality is that of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np

from fivefold.core import FivefoldError, counted
from fivefold.core.layout import Layout, rules
from fivefold.core.model import STEP_TOKENS
from fivefold.cost import Array
from fivefold.cost.step import ReplicaStep, interpolated, serving_rates
from fivefold.planner import accuracy
from fivefold.planner.serving.fit import MOST_SEQUENCES, ServingFit, ServingRequest, model_bytes
from fivefold.planner.serving.load import LoadOutcome, ReplicaLoad, ReplicaSpeed, simulate

_MOST_GPUS = 16_384
_SIMULATED = 6  # layouts of each objective


@dataclass(frozen=True)
class ServingPlan:
    """One layout under one load."""

    layout: Layout
    fit: ServingFit
    sequences: float  # at a time, of all replicas
    ttft: float
    tpot: float
    tokens_per_s: float
    parts: dict[str, float] = field(default_factory=dict[str, float])  # seconds of a decode step
    outcome: LoadOutcome | None = None  # of the simulation, where there is a load
    capacity: float = 0.0  # most tokens/s

    @property
    def max_sequences(self) -> int:
        return self.fit.replica_room * self.layout.dp

    @property
    def latency(self) -> float:
        """Of a whole answer."""
        return self.ttft + (self.fit.request.output - 1) * self.tpot

    @property
    def replicas(self) -> int:
        """Engines that share nothing."""
        return self.layout.dp * self.layout.tp // max(self.layout.tp, self.layout.ep)

    def usd_per_million(self) -> float | None:
        """Of output tokens; None without a price."""
        request = self.fit.request
        price = request.price or request.machine.price_per_gpu_hour
        if price is None or not self.tokens_per_s:
            return None
        return price * self.layout.world / 3600 / self.tokens_per_s * 1e6


class LayoutLoad:
    """A layout that fits, under any load."""

    def __init__(self, fit: ServingFit) -> None:
        self.fit, self.request = fit, fit.request
        self.slots = min(fit.replica_room, MOST_SEQUENCES)
        # From the first size that is not captured on, steps take longer at once.
        sizes = {*(2**i for i in range(11)), min(fit.served.most_captured, self.slots) + 1}
        sizes = sorted(size for size in {*sizes, self.slots} if size <= self.slots)
        context = self.request.prompt + self.request.output / 2
        self.step: ReplicaStep = fit.served.decode(np.array(sizes, float), context)
        through, self.busy = fit.served.prompt(self.request.prompt)
        self.through = through + serving_rates().decode.door
        layout = fit.layout
        self.ahead = layout.tp == layout.pp == layout.ep == 1  # as the engine does on one GPU

    def _at(self, values: Array, sequences: float) -> float:
        return interpolated(
            self.step, np.broadcast_to(values, self.step.sequences.shape), sequences
        )

    def steady(self, sequences: int) -> ServingPlan:
        """As many sequences of a replica at any time: each step some of them begin."""
        request, layout = self.request, self.fit.layout
        decode = self._at(self.step.seconds, sequences)
        reading = self._at(self.step.reading, sequences)
        chunks = ceil(request.prompt / STEP_TOKENS)
        alone, decodes = sequences == 1, request.output > 1
        # Prompts share the reading of weights with a decode step, if there is one.
        taken = max(0.0, self.busy - chunks * reading) if decodes and not alone else self.busy
        cycle = (request.output - 1) * decode + sequences * taken
        tpot = 0.0 if not decodes else decode if alone else cycle / request.output
        wait = decode * (1.5 if self.ahead else 0.5)  # until the next step that is not yet chosen
        ttft = self.through + (0.0 if alone else chunks * (decode - reading) + wait)
        if alone:
            cycle = self.through + (request.output - 1) * decode
        rate = layout.dp * sequences * request.output / cycle
        parts = {name: self._at(part, sequences) for name, part in self.step.parts.items()}
        return ServingPlan(layout, self.fit, sequences * layout.dp, ttft, tpot, rate, parts)

    def within(self, plan: ServingPlan) -> bool:
        """Whether it keeps the bounds of the request."""
        bounds = ((plan.ttft, self.request.ttft), (plan.tpot, self.request.tpot))
        return all(bound is None or value <= bound for value, bound in bounds)

    def fullest(self) -> ServingPlan | None:
        """The most tokens per second within the bounds."""
        sizes = {int(size) for size in self.step.sequences}
        sizes |= {3 * size // 2 for size in sizes if 3 * size // 2 <= self.slots}
        fair = [plan for plan in map(self.steady, sorted(sizes)) if self.within(plan)]
        best = max(fair, key=lambda plan: plan.tokens_per_s, default=None)
        return None if best is None else replace(best, capacity=best.tokens_per_s)

    def speed(self) -> ReplicaSpeed:
        """What a simulation of load asks of it."""
        step, sizes = self.step, np.arange(self.slots + 1, dtype=float)
        seconds = np.interp(sizes, step.sequences, step.seconds).tolist()
        return ReplicaSpeed(
            step=seconds.__getitem__,
            busy=self.busy,
            late=self.through - self.busy,
            reading=float(np.min(self.step.reading)),
            slots=self.slots,
            budget=STEP_TOKENS,
            ahead=self.ahead,
        )

    def expected(self) -> ServingPlan:
        """The load by means: as many sequences as arrive while one is answered."""
        request, dp = self.request, self.fit.layout.dp
        sequences = max(1, ceil((request.concurrency or 1) / dp))
        for _ in range(20 if request.rate is not None else 0):
            estimate = self.steady(min(sequences, self.slots))
            sequences = max(1, ceil((request.rate or 0.0) / dp * estimate.latency))
        most = self.steady(self.slots).tokens_per_s
        return replace(self.steady(min(sequences, self.slots)), capacity=most)

    def loaded(self) -> ServingPlan | None:
        """The layout under the rate or the concurrency that is asked; None if it cannot keep up or
        breaks the bounds."""
        request, most = self.request, self.steady(self.slots).tokens_per_s
        if request.rate is not None and most < request.rate * request.output:
            return None
        shares = [
            (number, num_clients, self._simulated(num_clients))
            for number, num_clients in self._replicas()
        ]
        # Replicas differ by one client at most: times are those of most requests.
        *_, outcome = max(shares, key=lambda share: share[0] * share[1])
        plan = replace(
            self.steady(max(1, min(self.slots, round(outcome.sequences)))),
            sequences=sum(number * result.sequences for number, _, result in shares),
            ttft=outcome.ttft,
            tpot=outcome.tpot,
            tokens_per_s=sum(number * result.tokens_per_s for number, _, result in shares),
            outcome=outcome,
            capacity=most,
        )
        return None if outcome.grows or not self.within(plan) else plan

    def _replicas(self) -> list[tuple[int, int]]:
        """How many replicas have how many clients, where some have any."""
        dp, concurrency = self.fit.layout.dp, self.request.concurrency
        if concurrency is None:
            return [(dp, 1)]
        quotient, remainder = divmod(concurrency, dp)
        return [
            pair
            for pair in ((remainder, quotient + 1), (dp - remainder, quotient))
            if 0 not in pair
        ]

    def _simulated(self, clients: int) -> LoadOutcome:
        """One replica under its share of the rate, or with so many clients."""
        request = self.request
        rate = None if request.rate is None else request.rate / self.fit.layout.dp
        run = min(clients, self.slots)  # the others wait until one of these ends
        outcome = simulate(ReplicaLoad(request.prompt, request.output, rate, run), self.speed())
        wait = (clients - run) * request.output / max(outcome.tokens_per_s, 1e-9)
        return replace(outcome, ttft=outcome.ttft + wait, ttft_p99=outcome.ttft_p99 + wait)


def legal_layouts(request: ServingRequest) -> Iterator[Layout]:
    """Every layout of all GPUs that the model allows, with tp inside the fastest links."""
    if request.layout is not None:
        yield request.layout
        return
    gpus, shape = request.gpus, request.shape
    for tp in rules.divisors(gpus):
        for pp in rules.divisors(gpus // tp):
            if tp > request.domain or pp > shape.layers:
                continue
            dp = gpus // (tp * pp)
            for ep, etp in _experts(request, tp, dp):
                layout = Layout(
                    shard=dp,
                    tp=tp,
                    pp=pp,
                    ep=ep,
                    etp=etp,
                    zero=0,
                    sp=shape.moe is not None and tp > 1,
                )
                if not rules.problems(layout, shape, seq=max(request.prompt, tp)):
                    yield layout


def _experts(request: ServingRequest, tp: int, dp: int) -> Iterator[tuple[int, int]]:
    if request.shape.moe is None:
        yield 1, 1
        return
    yield 1, tp
    for ep in rules.divisors(dp * tp):
        if ep > 1 and ep % tp == 0:
            yield ep, 1


@dataclass(frozen=True)
class ServingChoice:
    """The answer: best for the latency, best for the throughput, and all that fit. The best is the
    simplest of those that estimates cannot tell from it."""

    request: ServingRequest
    latency: ServingPlan
    throughput: ServingPlan
    plans: tuple[ServingPlan, ...]  # the throughput-best of each layout, `throughput` first
    candidates: int

    @property
    def chosen(self) -> ServingPlan:
        """Under a rate the fastest answers, else the most tokens."""
        return self.latency if self.request.rate is not None else self.throughput


def plan_serving(request: ServingRequest) -> ServingChoice:
    """Search the layouts; raises with the nearest way out where nothing fits or keeps up."""
    if (mixer := request.shape.of_mixer.own_mixer) is not None:
        raise FivefoldError(
            f"a serving plan counts keys and values in all layers, and mixer {mixer.name} has "
            "states: leave --serve out, to plan how the model is trained"
        )
    layouts = list(legal_layouts(request))
    fits = [
        fit for fit in (ServingFit(request, layout) for layout in layouts) if fit.replica_room >= 1
    ]
    if not fits:
        raise FivefoldError(_no_room(request, layouts))
    loads = [LayoutLoad(fit) for fit in fits]
    if request.rate is None and request.concurrency is None:
        quick = [load.steady(1) for load in loads]
        quick = [plan for plan in quick if loads[0].within(plan)]
        full = [plan for load in loads if (plan := load.fullest()) is not None]
    else:
        full = [plan for load in _likely(loads) if (plan := load.loaded()) is not None]
        quick = full
    if not full or not quick:
        raise FivefoldError(_too_slow(request, loads))
    key = "capacity" if request.rate is not None else "tokens_per_s"
    latency = simplest_equals(quick, lambda plan: plan.latency)[0]
    throughput = simplest_equals(full, lambda plan: 1 / getattr(plan, key))[0]
    alternatives = [plan for plan in full if plan is not throughput]
    alternatives.sort(key=lambda plan: -getattr(plan, key))
    return ServingChoice(request, latency, throughput, (throughput, *alternatives), len(layouts))


def simplest_equals(
    plans: list[ServingPlan], cost: Callable[[ServingPlan], float]
) -> list[ServingPlan]:
    """The plans that estimates cannot tell from the best, the simplest first. Simple is: replicas
    that share nothing, few stages, few axes, then few tensor ranks."""
    limit = (1 + accuracy().equal) * min(map(cost, plans))

    def complexity(plan: ServingPlan) -> tuple[float, ...]:
        layout = plan.layout
        axes = sum(degree > 1 for degree in (layout.tp, layout.pp, layout.ep))
        return layout.ep > layout.tp, layout.pp, axes, layout.tp, cost(plan)

    return sorted((plan for plan in plans if cost(plan) <= limit), key=complexity)


def _likely(loads: list[LayoutLoad]) -> list[LayoutLoad]:
    """Those with the fastest answers and with the most tokens, and the simplest that are equal to
    them, as far as means can tell: others are not simulated."""
    expected = [load.expected() for load in loads]
    likely: list[ServingPlan] = []
    costs: tuple[Callable[[ServingPlan], float], ...]
    costs = (lambda plan: plan.latency, lambda plan: 1 / plan.capacity)
    for cost in costs:
        likely += sorted(expected, key=cost)[:_SIMULATED]
        likely += simplest_equals(expected, cost)[:_SIMULATED]
    layouts = {plan.layout for plan in likely}
    return [load for load in loads if load.fit.layout in layouts]


def gpus_needed(request: ServingRequest) -> int | None:
    """The smallest number of GPUs, of this one doubled, on which one sequence fits."""
    gpus = request.gpus
    while gpus <= _MOST_GPUS:
        new_request = replace(request, gpus=gpus, layout=None)
        if any(
            ServingFit(new_request, layout).replica_room >= 1
            for layout in legal_layouts(new_request)
        ):
            return gpus
        gpus *= 2
    return None


def _no_room(request: ServingRequest, layouts: list[Layout]) -> str:
    weights = model_bytes(request.shape, request.precision) / 2**30
    name, have = request.shape.name, counted(request.gpus, "GPU")
    where = f"{have} of {request.machine.name}" if request.layout is None else str(request.layout)
    if not layouts:
        return f"no layout of {where} is legal for {name}: give another number of --gpus"
    ways: list[str] = []
    if (gpus := gpus_needed(request)) is not None:
        ways.append(f"--gpus {gpus}" if gpus > request.gpus else "another layout")
    narrow = replace(request, precision="fp8", layout=None)
    if request.precision == "bf16" and "fp8" in request.machine.peaks.known():
        small = gpus_needed(narrow)
        if small is not None and (gpus is None or small < gpus):
            ways.append(f"--precision fp8 with --gpus {small}")
    capacity = request.usable / 2**30
    return (
        f"{name} does not fit {where}: its weights are {weights:.1f} GiB in {request.precision}, a "
        f"GPU has {capacity:.1f} GiB to use, and no layout leaves room for the cache of one "
        f"sequence of {request.prompt + request.output:,} tokens; use "
        f"{' or '.join(ways) or 'larger GPUs'}"
    )


def _too_slow(request: ServingRequest, loads: list[LayoutLoad]) -> str:
    alone = [layout_load.steady(1) for layout_load in loads]
    ttft, tpot = (min(getattr(plan, name) for plan in alone) for name in ("ttft", "tpot"))
    most = max(layout_load.steady(layout_load.slots).tokens_per_s for layout_load in loads)
    bounds = [f"{n} {v:g}" for n, v in (("ttft", request.ttft), ("tpot", request.tpot)) if v]
    load = f"rate {request.rate:g}" if request.rate is not None else ""
    if request.concurrency is not None:
        load = f"concurrency {request.concurrency}"
    limits = " and ".join(filter(None, [*bounds, load]))
    return (
        f"no layout of {counted(request.gpus, 'GPU')} keeps {limits}: at best a lone request has "
        f"TTFT {ttft:.3g} s and {tpot:.3g} s a token, and all GPUs give {most:,.0f} tokens/s, "
        f"{most / request.output:.3g} requests/s; ask for less, or give more GPUs"
    )
