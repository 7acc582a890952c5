"""Serving plans as text and tables."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING, Any

from fivefold.core import counted
from fivefold.core.model import token_bytes
from fivefold.planner.serving import (
    EMITTERS,
    EngineCommand,
    ServingChoice,
    ServingPlan,
    ServingRequest,
    model_bytes,
)
from fivefold.render.plan import Printed
from fivefold.render.text import (
    duration,
    gib,
    table,
    wrapped,
)

if TYPE_CHECKING:
    pass

_ROWS = 6  # layouts in the table
_PART_WORDS = {
    "products": "matmuls that read weights",
    "experts": "experts",
    "attention": "attention that reads the cache",
    "collectives": "collectives",
    "elementwise": "small kernels",
    "head": "the head",
    "host": "schedule and draws",
}


def plan_json(plan: ServingPlan) -> dict[str, Any]:
    """One layout under its load."""
    fit, outcome = plan.fit, plan.outcome
    return {
        "layout": str(plan.layout),
        "replicas": plan.replicas,
        "ttft_s": plan.ttft,
        "ttft_p99_s": None if outcome is None else outcome.ttft_p99,
        "tpot_s": plan.tpot,
        "tpot_p99_s": None if outcome is None else outcome.tpot_p99,
        "tokens_per_s": plan.tokens_per_s,
        "sequences": plan.sequences,
        "max_sequences": plan.max_sequences,
        "weights_gib": fit.weights / 2**30,
        "cache_gib": fit.cache / 2**30,
        "kv_bytes_per_token_per_gpu": fit.token_bytes,
        "usd_per_million_tokens": plan.usd_per_million(),
        "time_s": plan.parts,
    }


def serving_json(choice: ServingChoice, flags: dict[str, EngineCommand]) -> dict[str, Any]:
    """What `plan --serve --json` prints: the choice's own keys are on top."""
    request = choice.request
    return {
        "model": request.shape.name,
        "machine": request.machine.name,
        "gpus": request.gpus,
        "precision": request.precision,
        "kv": request.kv,
        "prompt": request.prompt,
        "output": request.output,
        "rate": request.rate,
        "concurrency": request.concurrency,
        "kv_bytes_per_token": model_token_bytes(request),
        **plan_json(choice.chosen),
        "latency": plan_json(choice.latency),
        "throughput": plan_json(choice.throughput),
        "layouts": [plan_json(plan) for plan in choice.plans],
        "candidates": choice.candidates,
        "because": list(reasons(choice)),
        "rule_of_thumb": rule_of_thumb(choice),
        "flags": {name: flag.script for name, flag in flags.items()},
        "notes": list(notes(request)),
    }


def model_token_bytes(request: ServingRequest) -> int:
    """Bytes of the cache for a token, in all layers and without replicas of heads."""
    return token_bytes(request.shape, request.shape.layers, 1, request.cache_itemsize)


def serving_answer(choice: ServingChoice) -> Printed:
    """The plan as JSON and as lines."""
    flags = {name: make(choice.chosen) for name, make in EMITTERS.items()}
    answer = serving_json(choice, flags)
    return answer, list(_lines(choice, flags))


def _lines(choice: ServingChoice, flags: dict[str, EngineCommand]) -> Iterator[str]:
    request, chosen = choice.request, choice.chosen
    weights = model_bytes(request.shape, request.precision)
    yield from wrapped(
        f"{request.shape.name} on {counted(request.gpus, 'GPU')} of {request.machine.name}, "
        f"{request.precision}, {_load_words(request)}",
        "serve       ",
    )
    cache_bytes = model_token_bytes(request) * request.cached_tokens
    yield from wrapped(
        f"weights {gib(weights)}, {gib(chosen.fit.weights)} a GPU; cache "
        f"{model_token_bytes(request):,} bytes a token, {gib(cache_bytes)} a sequence of "
        f"{request.prompt + request.output:,}; {gib(chosen.fit.cache)} a GPU are left for it: "
        f"{chosen.max_sequences:,} sequences",
        "memory      ",
    )
    for name, plan in (("latency", choice.latency), ("throughput", choice.throughput)):
        yield from wrapped(_plan_words(plan), f"{name:12}")
    for part in reasons(choice):
        yield from wrapped(part, "why         ")
    yield from wrapped(rule_of_thumb(choice), "rule        ")
    if len(choice.plans) > 1:
        yield ""
        yield from table([_HEADER, *(_row(candidate) for candidate in choice.plans[:_ROWS])])
    yield ""
    for name, part in flags.items():
        yield f"# {name}"
        yield from part.script.rstrip("\n").splitlines()
    for part in notes(request):
        yield from wrapped(part, "note        ")


_HEADER = ("layout", "TTFT", "token", "tokens/s", "at a time", "fit", "$/M tokens")


def _row(plan: ServingPlan) -> tuple[str, ...]:
    price = plan.usd_per_million()
    return (
        str(plan.layout),
        duration(plan.ttft),
        duration(plan.tpot),
        f"{plan.tokens_per_s:,.0f}",
        f"{plan.sequences:,.0f}",
        f"{plan.max_sequences:,}",
        "" if price is None else f"{price:.2f}",
    )


def _load_words(request: ServingRequest) -> str:
    text = f"prompts of {request.prompt:,} and answers of {counted(request.output, 'token')}"
    if request.rate is not None:
        text += f", {request.rate:g} requests/s"
    if request.concurrency is not None:
        text += f", {request.concurrency} requests at a time"
    return text


def _plan_words(plan: ServingPlan) -> str:
    price = plan.usd_per_million()
    cost = "" if price is None else f", ${price:.2f} a million tokens"
    late = "" if plan.outcome is None else f" (p99 {duration(plan.outcome.ttft_p99)})"
    return (
        f"{plan.layout}: first token after {duration(plan.ttft)}{late}, then one each "
        f"{duration(plan.tpot)}; {plan.tokens_per_s:,.0f} tokens/s with {plan.sequences:,.0f} at a "
        f"time{cost}"
    )


def reasons(choice: ServingChoice) -> Iterator[str]:
    """Why these layouts."""
    for name, plan in (("latency", choice.latency), ("throughput", choice.throughput)):
        total = sum(plan.parts.values())
        first, second = sorted(plan.parts.items(), key=lambda part: -part[1])[:2]
        yield (
            f"{name}: a decode step of {plan.layout} is {first[1] / total:.0%} "
            f"{_PART_WORDS[first[0]]} and {second[1] / total:.0%} {_PART_WORDS[second[0]]}"
        )
    if len(choice.plans) > 1:
        other = next(rival for rival in choice.plans if rival is not choice.plans[0])
        ratio = choice.plans[0].tokens_per_s / other.tokens_per_s
        ratio_text = (
            f"{ratio:.2f} times fewer" if ratio >= 1 else f"equal, {1 / ratio:.2f} times more"
        )
        yield (
            f"beside it {other.layout} has {other.tokens_per_s:,.0f} tokens/s "
            f"({ratio_text}) with {other.max_sequences:,} sequences that fit"
        )
    if choice.latency.layout != choice.throughput.layout:
        quick, wide = choice.latency, choice.throughput
        yield (
            f"{quick.layout} reads the weights of a token with {_ways(quick)} at once and in "
            f"{counted(quick.layout.pp, 'stage')}, {wide.layout} with {_ways(wide)} in "
            f"{counted(wide.layout.pp, 'stage')}: collectives take "
            f"{duration(quick.parts['collectives'])} and {duration(wide.parts['collectives'])} of "
            "their steps"
        )


def _ways(plan: ServingPlan) -> str:
    return counted(max(plan.layout.tp, plan.layout.ep), "GPU")


def rule_of_thumb(choice: ServingChoice) -> str:
    """tp so that weights and cache fit, inside one node; and what the plan has in place of it."""
    request, chosen = choice.request, choice.chosen
    weights = model_bytes(request.shape, request.precision)
    num_sequences = request.concurrency or 16
    cache = num_sequences * model_token_bytes(request) * request.cached_tokens
    need = (weights + cache) / request.usable
    tp = 1
    while tp < need:
        tp *= 2
    most = request.domain
    text = (
        f"({gib(weights)} of weights + {gib(cache)} of cache for {num_sequences} sequences) / "
        f"{gib(request.usable)} of a GPU = {need:.1f}, so tp={min(tp, most)}"
    )
    if tp > most:
        text += f" pp={ceil(tp / most)}: tp stays inside the {most} GPUs of the fast links"
    else:
        text += f", inside one domain of {most} GPUs; the other GPUs are replicas"
    degrees = min(tp, most), max(1, ceil(tp / most))
    alike = [plan for plan in choice.plans if (plan.layout.tp, plan.layout.pp) == degrees]
    if (chosen.layout.tp, chosen.layout.pp) == degrees:
        return text
    if not alike:
        return (
            f"{text}; of the layouts that fit none is like that, and the plan has {chosen.layout}"
        )
    ratio, what = chosen.tokens_per_s / alike[0].tokens_per_s, "times the tokens/s"
    if request.rate is not None:
        ratio, what = chosen.latency / alike[0].latency, "times the latency"
    return f"{text}; the plan has {chosen.layout}, with {ratio:.2f} {what} of {alike[0].layout}"


def notes(request: ServingRequest) -> Iterator[str]:
    """What an estimate leaves out."""
    yield (
        "decode is calibrated with fivefold's own engine on one H200 (presets/serving.toml); other "
        "engines may read weights faster: docs/serving-plans.md has published figures beside plans"
    )
    if request.precision not in ("bf16", "fp16", "fp32"):
        yield (
            "weights in fp8 and narrower are planned as engines that multiply in them reach them: "
            "fivefold's own widens fp8, and has nothing narrower"
        )
    if request.rate is not None or request.concurrency is not None:
        yield (
            "under load: continuous batching of one replica, simulated with a fixed seed "
            "(Poisson arrivals or clients that wait), median and 99th percentile of 200 requests"
        )
