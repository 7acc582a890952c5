"""Serving plans, and simulated failures, as text, tables and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, log10
from typing import TYPE_CHECKING, Any

from fivefold.core import counted
from fivefold.core.model import token_bytes
from fivefold.core.plan import Plan, young_interval
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
    bar,
    duration,
    gib,
    percent,
    rough_duration,
    svg_style,
    table,
    wrapped,
)

if TYPE_CHECKING:
    from fivefold.planner import FailingJob, FailureForecast, ScalePoint

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
    if request.precision not in ("bf16", "fp16", "fp32") or request.cache_itemsize == 1:
        yield "fp8 and narrower weights or caches are for plans: fivefold's engine has neither"
    if request.rate is not None or request.concurrency is not None:
        yield (
            "under load: continuous batching of one replica, simulated with a fixed seed "
            "(Poisson arrivals or clients that wait), median and 99th percentile of 200 requests"
        )


_DAY = 86_400.0
LOST_WORDS = {
    "save": "checkpoints, which stall or slow the steps",
    "rework": "steps since the last complete checkpoint",
    "detect": "until a failure was noticed",
    "restart": "to start ranks and load",
    "shrunk": "fewer replicas, after the spares",
    "waiting": "no replica left: until a repair",
}
_PLACES = {"disk": "the shared disk", "memory": "the memory of partner hosts"}


def forecast_json(plan: Plan, forecast: FailureForecast) -> dict[str, Any]:
    """What `fivefold simulate --json` prints."""
    job = forecast.job
    return {
        "model": plan.shape.name,
        "layout": str(plan.layout),
        "gpus": job.domain.gpus,
        "hosts": job.domain.hosts,
        "days": forecast.days,
        "runs": forecast.runs,
        "seed": forecast.seed,
        "goodput": forecast.goodput,
        "goodput_band": list(forecast.goodput_band),
        "closed_form": job.expected,
        "interruptions": forecast.interruptions,
        "interruptions_band": list(forecast.interruptions_band),
        "mtbf_s": 1 / job.rate,
        "lost_s": forecast.lost,
        "step_s": job.step,
        "interval_s": job.interval,
        "interval_steps": job.steps,
        "interval_why": interval_words(job),
        "checkpoint": job.location,
        "checkpoint_bytes": job.save.bytes,
        "save_s": {
            "stall": job.save.stall,
            "slowed": job.save.slowed,
            "write": job.save.write,
            "load": job.save.load,
        },
        "recovery_s": job.recovery,
        "spares": job.design.spares,
    }


def interval_words(job: FailingJob) -> str:
    """Why a job saves as often as it does."""
    best = young_interval(job.save.cost, 1 / job.rate)
    text = (
        f"Young and Daly: sqrt(2 · {duration(job.save.cost)} a checkpoint · "
        f"{rough_duration(1 / job.rate)} between failures) = {duration(best)}"
    )
    if best >= max(job.save.write, job.step):
        return text
    if job.save.write > job.step:
        return f"{text}; but a checkpoint is written for {duration(job.save.write)}"
    return f"{text}; but a step takes {duration(job.step)}"


def forecast_lines(plan: Plan, forecast: FailureForecast) -> list[str]:
    """The same as text."""
    job, end = forecast.job, forecast.days * _DAY
    spares = "" if job.design.spares is None else f", {counted(job.design.spares, 'spare')}"
    low, high = forecast.interruptions_band
    best, worst = forecast.goodput_band[1], forecast.goodput_band[0]
    lines = [
        f"job       {plan.shape.name} on {plan.layout}: {counted(job.domain.gpus, 'GPU')} on "
        f"{counted(job.domain.hosts, 'host')}{spares}, {counted(forecast.days, 'day')}",
        f"failures  one in {rough_duration(1 / job.rate)}: {forecast.interruptions:,.0f} "
        f"interruptions ({low:,.0f} to {high:,.0f} in 90% of {forecast.runs:,} runs)",
        f"saves     every {duration(job.interval)} ({counted(job.steps, 'step')}) to "
        f"{_PLACES[job.location]}: {job.save.bytes / 1e9:,.0f} GB",
        f"          steps wait for {duration(job.save.stall)}, "
        f"written in {duration(job.save.write)}",
        *(f"          {clause}" for clause in interval_words(job).split("; ")),
        f"recovery  {rough_duration(job.recovery)}: {rough_duration(job.design.detect)} to notice, "
        f"{rough_duration(job.design.restart)} to start, {duration(job.save.load)} to load",
        f"goodput   {percent(forecast.goodput)} ({percent(worst)} to {percent(best)}): of "
        f"{counted(forecast.days, 'day')} {forecast.goodput * forecast.days:,.1f} count; closed "
        f"form {percent(job.expected)}",
    ]
    for cause, seconds in forecast.lost.items():
        if seconds > 0:
            lines.append(
                bar(cause, rough_duration(seconds), seconds / end) + f"  {LOST_WORDS[cause]}"
            )
    return lines


def designs_table(points: Sequence[ScalePoint]) -> list[list[str]]:
    """Goodput of every design at every scale, as rows of a table; the first has the heads."""
    designs = list(dict.fromkeys(point.design for point in points))
    rows = [["GPUs", "a failure in", *designs]]
    for gpus in dict.fromkeys(point.gpus for point in points):
        design_points = {point.design: point for point in points if point.gpus == gpus}
        first = next(iter(design_points.values()))
        shares = [percent(design_points[name].goodput) for name in designs]
        rows.append([f"{gpus:,}", rough_duration(first.mtbf), *shares])
    return rows


# --- A picture: goodput by the number of GPUs, a line for each design

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 640, 300, 46, 16, 36, 190
_COLOURS = ("#c2410c", "#b45309", "#0f766e", "#4338ca", "#9d174d")
_DARK = ("#fb923c", "#fbbf24", "#2dd4bf", "#a5b4fc", "#f9a8d4")


def scale_svg(points: Sequence[ScalePoint], at: int | None = None) -> str:
    """Goodput over the number of GPUs; `at` marks the job's own number."""
    designs = list(dict.fromkeys(point.design for point in points))
    least, most = min(p.gpus for p in points), max(p.gpus for p in points)

    def x(gpus: float) -> float:
        span = log10(most / least) or 1
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * log10(gpus / least) / span

    def y(share: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)

    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(share):.1f}" '
        f'y2="{y(share):.1f}"/><text class="end" x="{_LEFT - 6}" y="{y(share) + 4:.1f}">'
        f"{share:.0%}</text>"
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    for gpus in dict.fromkeys(point.gpus for point in points):
        count = f"{gpus // 1024}k" if gpus % 1024 == 0 else f"{gpus:,}"
        parts.append(f'<text class="mid" x="{x(gpus):.1f}" y="{_HEIGHT - 20}">{count}</text>')
    parts.append(
        f'<text class="mid" x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 5}">GPUs</text>'
    )
    if at is not None and least <= at <= most:
        parts.append(
            f'<line class="here" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" '
            f'y2="{_HEIGHT - _BOTTOM}"/>'
        )
    parts += _curves(points, designs, x, y)
    light = {".grid": "stroke:#d4d4d8", ".here": "stroke:#71717a;stroke-dasharray:3 3"}
    light |= {"text": "fill:#27272a", ".end": "text-anchor:end", ".mid": "text-anchor:middle"}
    dark = {".grid": "stroke:#3f3f46", "text": "fill:#e4e4e7", ".here": "stroke:#a1a1aa"}
    for i, (day, night) in enumerate(zip(_COLOURS, _DARK, strict=True)):
        light[f".c{i}"], dark[f".c{i}"] = f"stroke:{day}", f"stroke:{night}"
    style = svg_style("svg.failures", light, dark)
    return (
        f'<svg class="failures" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="Goodput by number of GPUs">'
        f"<style>{style}</style>{''.join(parts)}</svg>"
    )


def _curves(points: Sequence[ScalePoint], designs: list[str], x: Any, y: Any) -> list[str]:
    """A line for each design, its name at the end; names keep a distance."""
    parts: list[str] = []
    ends: list[tuple[float, int]] = []
    for i, name in enumerate(designs):
        own = [point for point in points if point.design == name]
        where = " ".join(f"{x(p.gpus):.1f},{y(p.goodput):.1f}" for p in own)
        parts.append(f'<polyline class="c{i}" fill="none" stroke-width="2" points="{where}"/>')
        ends.append((y(own[-1].goodput), i))
    floor = 0.0
    for end, i in sorted(ends):
        floor = max(end, floor + 14)
        left = _WIDTH - _RIGHT
        parts.append(
            f'<line class="c{i}" stroke-width="2" x1="{left + 4}" x2="{left + 16}" '
            f'y1="{floor:.1f}" y2="{floor:.1f}"/>'
            f'<text x="{left + 20}" y="{floor + 4:.1f}">{designs[i]}</text>'
        )
    return parts
