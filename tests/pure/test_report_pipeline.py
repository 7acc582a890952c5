"""The trace and the sentences say what the timeline says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from timelines import EVERY_FAMILY, UNEVEN, busy
from timelines import timeline as played

from fivefold.core.schedule import catalog
from fivefold.core.schedule import selection as choose
from fivefold.core.schedule.clock import Costs, Timeline, peak_activations, play, steady_bubble
from fivefold.core.schedule.definition import Family
from fivefold.core.schedule.schedule import actions_of
from fivefold.render.pipeline import (
    explain_schedule,
    perfetto_trace,
    schedule_headline,
    summary_lines,
)

# The trace


def events(timeline: Timeline, phase: str, **options: float) -> list[dict[str, Any]]:
    trace: Any = perfetto_trace(timeline, **options)
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


@pytest.mark.parametrize("name", EVERY_FAMILY)
@pytest.mark.parametrize("costs", [{}, UNEVEN])
def test_trace_slices_last_the_busy_time(name: str, costs: dict[str, Any]) -> None:
    timeline = played(name, 4, 8, **costs)
    slices = events(timeline, "X")
    texts = [text for texts in timeline.schedule.texts() for text in texts]
    assert Counter(each["name"] for each in slices) == Counter(texts)
    for rank in range(4):
        lasting = sum(each["dur"] for each in slices if each["tid"] == rank)
        assert lasting == pytest.approx(1000 * busy(timeline, rank))
    last = max(each["ts"] + each["dur"] for each in slices)
    assert last == pytest.approx(1000 * timeline.makespan)


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_trace_counters_peak_where_the_clock_says_and_end_at_zero(name: str) -> None:
    timeline = played(name, 4, 8, **UNEVEN)
    for rank, peak in enumerate(peak_activations(timeline.schedule)):
        levels = [
            (each["ts"], each["args"]["microbatches"])
            for each in events(timeline, "C")
            if each["tid"] == rank
        ]
        assert max(level for _, level in levels) == peak
        assert min(level for _, level in levels) == 0 == levels[-1][1]
        stamps = [stamp for stamp, _ in levels]
        assert stamps == sorted(set(stamps))


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_trace_counters_count_from_the_start_of_f_to_the_end_of_w_or_b(name: str) -> None:
    timeline = played(name, 4, 8, **UNEVEN)
    unit = 4 / timeline.schedule.num_stages
    for rank in range(4):
        taken, freed = list[float](), list[float]()
        steps = timeline.schedule.order[rank]
        times = zip(steps, timeline.starts[rank], timeline.ends[rank], strict=True)
        for step, start, end in times:
            for action in actions_of(step):
                if action.kind == "F":
                    taken.append(start)
                elif action.kind in "BW":
                    freed.append(end)
        for event in events(timeline, "C"):
            if event["tid"] == rank:
                now = event["ts"] / 1000 + 1e-6
                held = sum(each < now for each in taken) - sum(each < now for each in freed)
                assert event["args"] == {"microbatches": pytest.approx(unit * held)}


@pytest.mark.parametrize(
    ("name", "arrows"),
    [("1f1b", 2 * 3 * 8), ("zb-h1", 2 * 3 * 8), ("zb-v", 2 * 6 * 8), ("dualpipe", 2 * 3 * 8)],
)
def test_trace_draws_one_arrow_a_transfer_inside_its_slices(name: str, arrows: int) -> None:
    # Each microbatch crosses p−1 rank borders forward and back; the V crosses them twice.
    timeline = played(name, 4, 8)
    leaving, entering, slices = (events(timeline, phase) for phase in "sfX")
    assert len(leaving) == len(entering) == arrows
    for left, entered in zip(leaving, entering, strict=True):
        assert left["id"] == entered["id"] and left["tid"] != entered["tid"]
        assert left["ts"] < entered["ts"]
        for end in (left, entered):
            assert any(
                each["tid"] == end["tid"] and each["ts"] < end["ts"] < each["ts"] + each["dur"]
                for each in slices
            )


def test_trace_slices_say_what_they_are() -> None:
    slices = {each["name"]: each for each in events(played("zb-v", 2, 4), "X", unit_us=2.0)}
    assert slices["3I1"]["args"] == {"stage": 3, "kind": "I", "microbatch": 1, "chunk": 1}
    assert slices["3I1"]["cat"] == "input gradient" and slices["3I1"]["dur"] == 1.0
    pair = next(each for each in events(played("dualpipe", 2, 4), "X") if ";" in each["name"])
    assert pair["args"]["forward"]["kind"] == "F" and pair["args"]["backward"]["kind"] == "B"


def test_trace_is_deterministic_json() -> None:
    first, second = (json.dumps(perfetto_trace(played("dualpipe", 4, 8))) for _ in range(2))
    assert first == second and "NaN" not in first


# The sentences


def said(name: str, ranks: int, microbatches: int, **costs: Any) -> str:
    return "\n".join(
        explain_schedule(played(name, ranks, microbatches, **costs), catalog.family(name))
    )


@pytest.mark.parametrize(
    ("microbatches", "ideal", "makespan", "ratio", "share"),
    [(8, "24.0", "33.0", "37.5%", "27.3%"), (32, "96.0", "105.0", "9.4%", "8.6%")],
)
def test_the_two_conventions_are_one_sentence(
    microbatches: int, ideal: str, makespan: str, ratio: str, share: str
) -> None:
    lines = explain_schedule(played("1f1b", 4, microbatches), catalog.family("1f1b"))
    (line,) = [line for line in lines if "bubble_ratio" in line]
    assert "bubble_makespan" in line and line.count(". ") == 0
    assert f"{ratio} is idle over the ideal time {ideal}" in line
    assert f"{share} is idle over the whole makespan {makespan}" in line


def test_the_bubble_is_explained_with_its_numbers() -> None:
    text = said("1f1b", 4, 8)
    assert "the busiest rank works 24.0 and 9.0 is bubble" in text
    assert catalog.family("1f1b").because in text
    assert "(p−1)(F+B+W); here p=4, F=1.0, B=1.0, W=1.0." in text
    # By hand: 0+1+2+3 before the first forwards, 2·(0+1+2+3) after the last backwards, 9 a rank.
    assert "together idle 36.0: 6.0 before the first step, 18.0 between steps, 12.0 after" in text
    assert "rank 0 idles 6.0 from 4.0 to 10.0, at 0B0, waiting for 1B0" in text


def test_closed_forms_get_full_stage_times_and_chunks() -> None:
    assert "here p=4, F=1.0, B=1.1, W=0.7, v=2." in said("interleaved", 4, 8, times=(1, 1.1, 0.7))
    assert "(p/2−1)(F&B+B−2W) where F ≤ B and W ≤ B; here p=4, F&B=3.0," in said("dualpipe", 4, 8)
    assert "time of the bubble within the span is (p−1)(F+B−2W)" in said("zb-h2", 4, 8)


@pytest.mark.parametrize(
    ("name", "microbatches", "costs"),
    [
        ("1f1b", 8, {"transfer": 0.1}),
        ("dualpipe", 8, {"overlap": 0.7}),
        ("zb-h1", 3, {}),
        ("zb-h1", 8, {"times": (1.0, 1.0, 1.5)}),
        ("zb-v", 8, {"times": (1.0, 3.0, 1.0)}),
        ("v-half", 8, {}),
    ],
)
def test_a_closed_form_is_printed_only_where_it_is_exact(
    name: str, microbatches: int, costs: dict[str, Any]
) -> None:
    assert "closed form" not in said(name, 4, microbatches, **costs)


def evaluate(form: str, **values: float) -> float:
    """The printed formula as a number: `2W` and `(p−1)(F)` multiply."""
    text = form.replace("−", "-").replace("F&B", "P").replace(")(", ")*(").replace(")B", ")*B")
    return eval(re.sub(r"(\d)([A-Z])", r"\1*\2", text), {}, values)


eighths = st.integers(1, 24).map(lambda number: number / 8)


@given(
    st.sampled_from([family for family in catalog.FAMILIES if family.closed_form]),
    st.tuples(st.integers(1, 7), st.integers(1, 21), st.integers(0, 2)),
    st.tuples(eighths, eighths, eighths),
)
@settings(max_examples=300)
def test_every_closed_form_is_the_bubble_on_its_domain(
    family: Family, numbers: tuple[int, int, int], times: tuple[float, float, float]
) -> None:
    ranks, microbatches, more = numbers
    chunks = family.min_chunks + (more if family.max_chunks is None else 0)
    form = family.closed_form
    assume(form and not family.problems(ranks, microbatches, chunks))
    assume(form.holds(times, ranks, microbatches))
    timeline = played(family.name, ranks, microbatches, chunks, times)
    symbols = dict(zip("FBW", times, strict=True)) | {"p": ranks, "v": chunks, "P": sum(times)}
    found = getattr(timeline, form.of) - timeline.ideal
    assert found == pytest.approx(evaluate(form.text, **symbols), abs=1e-9)


def test_unequal_stages_are_not_put_into_a_closed_form() -> None:
    schedule = catalog.make("1f1b", 2, 4)
    costs = Costs((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), (0.0, 0.0))
    text = "\n".join(explain_schedule(play(schedule, costs), catalog.family("1f1b")))
    assert "closed form" not in text and catalog.family("1f1b").because in text


def test_span_is_mentioned_only_where_it_differs() -> None:
    assert "(span)" not in said("1f1b", 4, 8)
    # ZB-V at F=B=W=1: makespan bubble (p−1)B/2 = 1.5 and no bubble by span.
    assert "at most 24.0 (span), of which 0.0% is idle" in said("zb-v", 4, 8)
    assert "the makespan 25.5." in said("zb-v", 4, 8)


def test_peak_memory_names_its_ranks() -> None:
    assert (
        "Rank 0 holds the most activations, those of 4 microbatches of a full stage "
        "(1/p of the model); rank 3 the least, 1."
    ) in said("1f1b", 4, 8)
    assert "Every rank holds the activations of at most 8 microbatches" in said("gpipe", 4, 8)
    assert "Rank 0 (and 2 more) holds the most" in said("1f1b", 4, 2)


@pytest.mark.parametrize(
    ("name", "versions", "delays"),
    [("pipedream", "4, 3, 2, 1", "3, 2, 1, 0"), ("pipedream-2bw", "2, 2, 2, 2", "1, 1, 1, 1")],
)
def test_asynchronous_schedules_are_labelled(name: str, versions: str, delays: str) -> None:
    timeline = played(name, 4, 8)
    first = explain_schedule(timeline, catalog.family(name))[0]
    assert first.startswith("ASYNCHRONOUS")
    assert "In steady state 0.0% is bubble" in said(name, 4, 8)
    assert f"Weight versions by rank: {versions};" in first
    assert f"gradient delay in updates: {delays}." in first
    assert "ASYNCHRONOUS" in schedule_headline(timeline) and "ASYNCHRONOUS" not in said(
        "1f1b", 4, 8
    )


def test_the_steady_bubble_is_computed() -> None:
    # A window of four microbatches works 12; what it costs is seen far from fill and drain.
    timeline = played("pipedream", 2, 4, transfer=0.5)
    steady = steady_bubble(timeline, catalog.family("pipedream").make)
    longer, longest = (played("pipedream", 2, m, transfer=0.5).makespan for m in (40, 44))
    assert 0 < steady == pytest.approx(1 - 12 / (longest - longer))
    assert f"In steady state {steady:.1%} is bubble" in said("pipedream", 2, 4, transfer=0.5)


def test_dualpipe_says_that_parameters_are_kept_twice() -> None:
    assert "kept twice" in said("dualpipe", 4, 8)
    assert "kept twice" not in said("dualpipe-v", 4, 8)


def test_one_rank_has_no_bubble_to_explain() -> None:
    lines = explain_schedule(played("1f1b", 1, 3), catalog.family("1f1b"))
    assert lines[0] == "There is no bubble: the busiest rank never idles."
    assert len(lines) == 2 and "at most 1 microbatch of" in lines[1]


def test_a_schedule_without_family_is_explained_by_its_idle_slots() -> None:
    schedule = choose.parse_schedule("0F0 0B0\n1F0 1B0")
    lines = explain_schedule(play(schedule, Costs.uniform(schedule.placement)), None)
    # 0F 0–1, 1F 1–2, 1B 2–4, 0B 4–6: three of six are work.
    assert lines[0] == "Of the makespan 6.0, the busiest rank works 3.0 and 3.0 is bubble."
    assert "rank 0 idles 3.0 from 1.0 to 4.0, at 0B0, waiting for 1B0" in "\n".join(lines)


def test_summary_is_a_table_of_the_numbers() -> None:
    assert summary_lines(played("1f1b", 4, 8)) == [
        "makespan          33.0",
        "span              33.0",
        "ideal             24.0",
        "bubble            27.3% of the makespan, 27.3% of the span, 37.5% of the ideal",
        "peak activations  1–4 by rank, in microbatches of a full stage",
    ]
    assert "15 on every rank" in summary_lines(played("zb-h2", 8, 24))[-1]


def test_small_units_keep_their_digits() -> None:
    small = played("1f1b", 4, 8, times=(1e-4, 1e-4, 1e-4))
    assert summary_lines(small)[0] == "makespan          0.0033"
    assert "rank 0 idles 0.0006 from 0.0004 to 0.001," in "\n".join(explain_schedule(small, None))
    tiny = played("1f1b", 4, 8, times=(1e-9, 1e-9, 1e-9))
    assert summary_lines(tiny)[0] == "makespan          3.3e-08"


def test_one_is_singular() -> None:
    assert schedule_headline(played("1f1b", 1, 1)).startswith("1f1b: 1 rank, 1 microbatch, ")


def test_report_loads_neither_torch_nor_numpy() -> None:
    code = "import sys\nimport fivefold.render.pipeline\n"
    code += "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
