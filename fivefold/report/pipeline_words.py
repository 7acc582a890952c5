"""A pipeline timeline in sentences and numbers. Every number is computed from the timeline."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from fivefold.core import counted
from fivefold.core.schedule import ClosedForm, Family, Timeline, peak_activations, steady_bubble
from fivefold.report import percent

_SMALLEST_DECIMAL = 1e-6  # shorter steps would need too many decimals


def time_writer(timeline: Timeline) -> Callable[[float], str]:
    """A function that writes times with as many decimals as the shortest step needs, at least one;
    very short times as powers of ten."""
    durations = (timeline.costs.of(step) for steps in timeline.schedule.order for step in steps)
    shortest = min((duration for duration in durations if duration > 0), default=1.0)
    if shortest < _SMALLEST_DECIMAL:
        return "{:g}".format
    digits = max(3, 2 - math.floor(math.log10(shortest)))

    def write(time: float) -> str:
        text = f"{time:.{digits}f}".rstrip("0")
        return text + "0" if text.endswith(".") else text

    return write


def headline(timeline: Timeline, makespan: str | None = None, bubble: str | None = None) -> str:
    """The timeline in one line, for a title or a screen reader.

    `makespan`: its text, if times have a unit; `bubble`: its text, if it is not a share of the
    makespan.
    """
    schedule = timeline.schedule
    written = time_writer(timeline)(timeline.makespan) if makespan is None else makespan
    label = " (ASYNCHRONOUS)" if schedule.asynchronous else ""
    chunks = f", {schedule.num_chunks} chunks a rank" if schedule.num_chunks > 1 else ""
    return (
        f"{schedule.name}{label}: {counted(schedule.num_ranks, 'rank')}{chunks}, "
        f"{counted(schedule.num_microbatches, 'microbatch')}, makespan {written}, "
        f"bubble {bubble or percent(timeline.bubble_makespan)}"
    )


def summary_lines(timeline: Timeline) -> list[str]:
    """The numbers of a timeline, as a small table."""
    write, peaks = time_writer(timeline), peak_activations(timeline.schedule)
    least, most = min(peaks), max(peaks)
    peak_text = f"{most:g} on every rank" if least == most else f"{least:g}–{most:g} by rank"
    rows = {
        "makespan": write(timeline.makespan),
        "span": write(timeline.span),
        "ideal": write(timeline.ideal),
        "bubble": f"{percent(timeline.bubble_makespan)} of the makespan, "
        f"{percent(timeline.bubble_span)} of the span, "
        f"{percent(timeline.bubble_ratio)} of the ideal",
        "peak activations": f"{peak_text}, in microbatches of a full stage",
    }
    return [f"{name:<17} {value}" for name, value in rows.items()]


def explain(timeline: Timeline, family: Family | None) -> list[str]:
    """Sentences about the cause of the bubble, the meaning of its rates, and its memory."""
    return [
        *_asynchrony(timeline, family),
        *_bubble(timeline, family),
        *_span(timeline),
        *_memory(timeline),
    ]


def _asynchrony(timeline: Timeline, family: Family | None) -> Iterator[str]:
    versions = timeline.schedule.weight_versions
    if timeline.schedule.asynchronous:
        yield (
            "ASYNCHRONOUS: gradients are computed on older weights, which is not what one device "
            f"computes. Weight versions by rank: {', '.join(map(str, versions))}; gradient delay "
            f"in updates: {', '.join(str(version - 1) for version in versions)}."
        )
        if family:
            steady = percent(steady_bubble(timeline, family.make))
            yield (
                f"In steady state {steady} is bubble; what idles here beyond that is the fill and "
                "the drain of this window."
            )


def _bubble(timeline: Timeline, family: Family | None) -> Iterator[str]:
    write, idle = time_writer(timeline), timeline.makespan - timeline.ideal
    if idle <= 1e-9 * timeline.makespan:
        yield "There is no bubble: the busiest rank never idles."
        return
    reason = f". Why: {family.because}" if family else ""
    yield (
        f"Of the makespan {write(timeline.makespan)}, the busiest rank works "
        f"{write(timeline.ideal)} and {write(idle)} is bubble{reason}."
    )
    if family and family.closed_form:
        yield from _in_closed_form(timeline, family.closed_form)
    yield from _idle_slots(timeline, write)
    yield (
        "Two conventions for one bubble: "
        f"{percent(timeline.bubble_ratio)} is idle over the ideal time "
        f"{write(timeline.ideal)} (bubble_ratio), {percent(timeline.bubble_makespan)} is idle "
        f"over the whole makespan {write(timeline.makespan)} (bubble_makespan)."
    )


def _in_closed_form(timeline: Timeline, form: ClosedForm) -> Iterator[str]:
    """The published closed form with its numbers, only if it is exact."""
    schedule, costs = timeline.schedule, timeline.costs
    by_stage = (costs.forward, costs.backward, costs.weight)
    if any(len(set(stage_values)) > 1 for stage_values in by_stage) or any(costs.transfer):
        return
    share, write = schedule.num_stages / schedule.num_ranks, time_writer(timeline)
    forward, backward, weight = (share * stage_values[0] for stage_values in by_stage)
    times = (forward, backward, weight)
    gains = "F&B" in form.text and costs.overlap != 1
    if gains or not form.holds(times, schedule.num_ranks, schedule.num_microbatches):
        return
    values = {"p": str(schedule.num_ranks), "v": str(schedule.num_chunks)}
    values |= {symbol: write(time) for symbol, time in zip("FBW", times, strict=True)}
    values["F&B"] = write(sum(times))
    symbols = dict.fromkeys(re.findall(r"F&B|[pvFBW]", form.text))
    numbers = ", ".join(f"{symbol}={values[symbol]}" for symbol in symbols)
    domain = f" where {form.domain}" if form.domain else ""
    which = "bubble" if form.of == "makespan" else "bubble within the span"
    yield (
        f"In closed form, for equal stages and free transfers, the time of the {which} is "
        f"{form.text}{domain}; here {numbers}."
    )


def _idle_slots(timeline: Timeline, write: Callable[[float], str]) -> Iterator[str]:
    rows = list(zip(timeline.schedule.order, timeline.starts, timeline.ends, strict=True))
    busy = sum(timeline.costs.of(step) for steps, _, _ in rows for step in steps)
    before = sum(starts[0] for _, starts, _ in rows)
    after = sum(timeline.makespan - ends[-1] for _, _, ends in rows)
    idle = len(rows) * timeline.makespan - busy
    who = "The one rank idles" if len(rows) == 1 else f"All {len(rows)} ranks together idle"
    yield (
        f"{who} {write(idle)}: {write(before)} before the first step, "
        f"{write(abs(idle - before - after))} between steps, {write(after)} after the last."
    )
    longest = max(timeline.waits(), key=lambda wait: round(wait.end - wait.start, 9), default=None)
    if longest:
        yield (
            f"The longest wait: rank {longest.rank} idles {write(longest.end - longest.start)} "
            f"from {write(longest.start)} to {write(longest.end)}, at {longest.step}, waiting for "
            f"{longest.cause}."
        )


def _span(timeline: Timeline) -> Iterator[str]:
    if timeline.makespan - timeline.span > 1e-9 * timeline.makespan:
        write = time_writer(timeline)
        yield (
            f"No rank is at work from zero to the end: from its own first start to its own last "
            f"end a rank takes at most {write(timeline.span)} (span), of which "
            f"{percent(timeline.bubble_span)} is idle; where a global gradient norm separates "
            f"steps, a step takes the makespan {write(timeline.makespan)}."
        )


def _memory(timeline: Timeline) -> Iterator[str]:
    peaks = peak_activations(timeline.schedule)
    most, least = max(peaks), min(peaks)
    unit = "of a full stage (1/p of the model)"
    if most == least:
        yield f"Every rank holds the activations of at most {counted(most, 'microbatch')} {unit}."
    else:
        num_equal = peaks.count(most) - 1
        company = f" (and {num_equal} more)" if num_equal else ""
        yield (
            f"Rank {peaks.index(most)}{company} holds the most activations, those of "
            f"{counted(most, 'microbatch')} {unit}; rank {peaks.index(least)} the least, {least:g}."
        )
    if timeline.schedule.placement.mirrored:
        yield (
            "Every rank holds the parameters of its own stage and of its mirror's: parameters, "
            "gradients and optimizer state are kept twice."
        )
