"""Learn: a race of pipeline schedules, with the same work on one time axis.

    view(params) -> {"choices", "racers", "refused", "end", "frames", "sentences"}

A racer is a simulated schedule: its numbers, its place at the finish, and its timeline (see
`fivefold_page/timeline.py`). A frame is a moment: what every rank of every racer does then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fivefold.core import counted
from fivefold.core.schedule import Costs, Family, Timeline, catalog, peak_activations, play
from fivefold.render import Cell, cells, percent
from fivefold_page import Params, View
from fivefold_page import timeline as picture
from fivefold_page.learn.lesson import Choice, chosen, sentence_lines

TITLE = "Pipeline: the schedules raced"
_ALL = tuple(family.name for family in catalog.FAMILIES if not family.asynchronous)
SETS: Mapping[str, tuple[str, ...]] = {
    "classic": ("gpipe", "1f1b"),
    "interleaved": ("1f1b", "interleaved", "bfs"),
    "zero-bubble": ("1f1b", "zb-h1", "zb-h2", "zb-v", "zb-interleaved"),
    "less memory": ("1f1b", "zb-v", "v-half", "v-min"),
    "bidirectional": ("1f1b", "dualpipe", "dualpipe-v"),
    "all": _ALL,
}
CHOICES: Mapping[str, Choice] = {
    "schedules": Choice("Schedules", tuple(SETS), "zero-bubble"),
    "stages": Choice("Pipeline ranks", ("2", "3", "4", "6", "8"), "4"),
    "microbatches": Choice("Microbatches", ("4", "6", "8", "12", "16", "24"), "8"),
    "times": Choice(
        "Time of forward : input gradient : weight gradient",
        ("1:1:1", "1:1.1:0.7", "1:1.5:0.5", "1:2:0"),
        "1:1:1",
    ),
    "transfer": Choice("Time of a transfer", ("0", "0.05", "0.1", "0.25", "0.5"), "0"),
}
_MOST_FRAMES = 48
_BAR = 36  # columns of the slowest racer
_TOLERANCE = 1e-9  # of a makespan: sums of times differ by rounding


class Racer(NamedTuple):
    """One simulated schedule."""

    family: Family
    timeline: Timeline

    @property
    def copies(self) -> int:
        """Copies of the weights: two if the schedule runs in both directions."""
        return 2 if self.timeline.schedule.placement.mirrored else 1

    @property
    def peak(self) -> float:
        """Activations on the fullest rank, in microbatches of a full stage."""
        return max(peak_activations(self.timeline.schedule))


def view(params: Params) -> View:
    """The race: the timeline and numbers of every racer, and what happens at every moment."""
    choices = chosen(CHOICES, params)
    racers, refused = _racers(choices)
    end = max(racer.timeline.makespan for racer in racers)
    places = _places(racers)
    return {
        "choices": choices,
        "end": end,
        "racers": [
            _numbers(racer, position) for racer, position in zip(racers, places, strict=True)
        ],
        "refused": refused,
        "frames": list(_frames(racers, end)),
        "sentences": _sentences(racers, refused, choices),
    }


def _racers(choices: Mapping[str, str]) -> tuple[list[Racer], list[dict[str, str]]]:
    """The schedules that are legal here, simulated, and why the others are not."""
    forward, backward, weight = (float(part) for part in choices["times"].split(":"))
    racers, refused = list[Racer](), list[dict[str, str]]()
    for name in SETS[choices["schedules"]]:
        family = catalog.family(name)
        size = (int(choices["stages"]), int(choices["microbatches"]), family.default_chunks)
        if rules := family.problems(*size):
            refused.append({"name": name, "why": "; ".join(rules)})
            continue
        schedule, times = family.make(*size), (forward, backward, weight)
        costs = Costs.uniform(schedule.placement, times, float(choices["transfer"]))
        racers.append(Racer(family, play(schedule, costs)))
    return racers, refused


def _places(racers: list[Racer]) -> list[int]:
    """The place of each racer at the finish, from 1; equal times share a place."""
    times = [racer.timeline.makespan for racer in racers]
    return [1 + sum(_is_before(other, time) for other in times) for time in times]


def _is_before(value: float, other: float) -> bool:
    return value < other * (1 - _TOLERANCE)


def _numbers(racer: Racer, position: int) -> View:
    family, timeline = racer
    schedule = timeline.schedule
    return {
        "name": family.name,
        "place": position,
        "chunks": schedule.num_chunks,
        "placement": schedule.placement.kind,
        "makespan": timeline.makespan,
        "ideal": timeline.ideal,
        "bubble": timeline.bubble_makespan,
        "peaks": peak_activations(schedule),
        "peak": racer.peak,
        "copies": racer.copies,
        "because": family.because,
        "timeline": picture.view(timeline),
    }


def _frames(racers: list[Racer], end: float) -> Iterator[View]:
    """The race from start to finish, in whole units of time."""
    length = max(1, math.ceil(end / _MOST_FRAMES))
    rows = [cells(racer.timeline) for racer in racers]
    for number in range(math.ceil(end / length - _TOLERANCE) + 1):
        time = min(end, float(number * length))
        home = [not _is_before(time, racer.timeline.makespan) for racer in racers]
        pairs = zip(rows, home, strict=True)
        actions = [[_action_at(row, time, done) for row in rank_rows] for rank_rows, done in pairs]
        names = [racer.family.name for racer, done in zip(racers, home, strict=True) if done]
        yield {
            "says": _moment_words(time, number, racers, names, actions),
            "time": time,
            "now": actions,
            "finished": names,
        }


def _action_at(row: list[Cell], time: float, done: bool) -> str:
    """The action of a rank at a moment: a letter and a microbatch, or a dot if it is idle."""
    if done:
        return "✓"
    at = next((cell for cell in row if cell.start <= time + _TOLERANCE < cell.end), None)
    return "·" if at is None else f"{at.kind.letter}{at.label}"


def _moment_words(
    time: float, number: int, racers: list[Racer], finished: list[str], actions: list[list[str]]
) -> str:
    if not number:
        return (
            f"The start: {counted(len(racers), 'schedule')} with the same work for every rank. "
            "Only rank 0, or both ends of a two-way pipeline, has something to do; the others wait "
            "for what it sends."
        )
    running = [
        (racer.family.name, sum(action != "·" for action in ranks), len(ranks))
        for racer, ranks in zip(racers, actions, strict=True)
        if racer.family.name not in finished
    ]
    busy = ", ".join(f"{name} {count} of {total}" for name, count, total in running)
    home = f" Finished: {', '.join(finished)}." if finished else ""
    if not running:
        return f"Time {time:g}: all have finished. {_finish_words(racers)}"
    return f"Time {time:g}. Ranks at work: {busy}.{home}"


def _finish_words(racers: list[Racer]) -> str:
    """The order of the finish in words."""
    places = _places(racers)
    order = sorted(zip(places, racers, strict=True), key=lambda pair: pair[0])
    clauses = (
        f"{position}. {racer.family.name} ({racer.timeline.makespan:g})"
        for position, racer in order
    )
    return f"{', '.join(clauses)}."


def _sentences(
    racers: list[Racer], refused: list[dict[str, str]], choices: Mapping[str, str]
) -> list[str]:
    first = min(racers, key=lambda contender: contender.timeline.makespan)
    last = max(racers, key=lambda contender: contender.timeline.makespan)
    sentences = [
        f"Order of the finish: {_finish_words(racers)}",
        f"Every rank has work for {first.timeline.ideal:g} in all of them: a schedule with chunks "
        "cuts the stage of a rank into shorter ones, so that the work stays the same.",
        f"{first.family.name} idles {percent(first.timeline.bubble_makespan)} of its time, "
        f"{last.family.name} {percent(last.timeline.bubble_makespan)}. Why {last.family.name} "
        f"idles: {last.family.because}.",
        _memory_words(racers, first),
    ]
    sentences += [_paper_words(racer) for racer in racers if racer.family.name == "zb-h2"]
    sentences += [
        f"{racer.family.name} holds weights twice: every rank has a stage of either direction."
        for racer in racers
        if racer.copies > 1
    ]
    sentences += [
        f"{refusal['name']} is not in this race: {refusal['why']}; there are {choices['stages']} "
        f"stages and {choices['microbatches']} microbatches."
        for refusal in refused
    ]
    return sentences


def _paper_words(racer: Racer) -> str:
    """Why the bubble is larger here than in the paper."""
    name, timeline = racer.family.name, racer.timeline
    return (
        f"{name} idles {percent(timeline.bubble_span)} of its span, from a rank's own first start "
        "to its own last end. That is what its paper counts: there ranks begin the next step at "
        f"their own time. Here a global norm ends the step, and {name} idles "
        f"{percent(timeline.bubble_makespan)} of it."
    )


def _memory_words(racers: list[Racer], first: Racer) -> str:
    """The activations of the fastest racer and of the one with the fewest."""
    least = min(racers, key=lambda racer: racer.peak)
    peak = counted(first.peak, "microbatch")
    if first.peak == least.peak:
        return f"{first.family.name} holds activations of {peak} at most: nobody holds fewer."
    return (
        f"{first.family.name} holds activations of {peak} at most, "
        f"{least.family.name} of {least.peak:g}: fewest of all, and it takes "
        f"{least.timeline.makespan / first.timeline.makespan - 1:.1%} longer."
    )


def text(view: View) -> list[str]:
    """The same for a terminal: the finish on one time axis, and the timeline of every racer."""
    lines = ["place  schedule         time  bubble  activations  weights"]
    for racer in sorted(view["racers"], key=lambda row: row["place"]):
        work = round(_BAR * racer["ideal"] / view["end"])
        idle = round(_BAR * racer["makespan"] / view["end"]) - work
        lines.append(
            f"{racer['place']:>5}  {racer['name']:<14} {racer['makespan']:>6g} "
            f"{percent(racer['bubble']):>7} {racer['peak']:>12g} {racer['copies']:>7}×  "
            + "█" * work
            + "·" * idle
        )
    for racer in view["racers"]:
        lines += ["", *picture.text(racer["timeline"])]
    return [*lines, "", *sentence_lines(view)]
