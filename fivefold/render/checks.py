"""The verdicts of verify and rehearse as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from fivefold.core import counted
from fivefold.core.layout import DIMENSIONS
from fivefold.core.plan import Plan
from fivefold.cost.traffic import TrafficEntry, traffic_entries

if TYPE_CHECKING:
    from fivefold.cost.traffic import Mismatch, OrderVerdict
    from fivefold.planner import Estimate, PlannedAction, SimulatedStep

_GIB = 2**30
_BAND = 0.05  # further apart than this is called out
_REHEARSED, _PLANNED = 0, 1  # tracks of the trace
_MOST_RANKS, _MOST_FINDINGS = 24, 10


class RehearsalRun(Protocol):
    """One rank rehearsed."""

    rank: int
    peak: int
    memory: dict[str, int]
    records: Any
    levels: Any


class RehearsalReport(Protocol):
    """A job rehearsed."""

    @property
    def plan(self) -> Plan: ...
    @property
    def runs(self) -> Sequence[Any]: ...
    @property
    def predicted(self) -> Mapping[int, tuple[TrafficEntry, ...]]: ...
    @property
    def without_replay(self) -> Mapping[int, bool]: ...
    @property
    def mismatches(self) -> Sequence[Mismatch]: ...
    @property
    def astray(self) -> Sequence[int]: ...
    @property
    def order(self) -> OrderVerdict: ...
    @property
    def order_seconds(self) -> float: ...
    @property
    def worst(self) -> Any: ...
    @property
    def passed(self) -> bool: ...


class RehearsalTimes(Protocol):
    """Times that were measured on a GPU."""

    @property
    def measured(self) -> Sequence[Any]: ...
    @property
    def step(self) -> SimulatedStep | None: ...


def rehearsal_json(
    report: RehearsalReport,
    planned: Estimate | None,
    timed: RehearsalTimes | None,
    imbalance: float,
    seconds: float,
) -> dict[str, Any]:
    """The rehearsal as JSON."""
    worst = report.worst
    routing = "round-robin" if imbalance == 1.0 else f"fullest expert {imbalance:g} x the mean"
    return {
        "model": report.plan.shape.name,
        "layout": str(report.plan.layout),
        "world": report.plan.layout.world,
        "routing": routing,
        "ranks": [_rank(report, run) for run in report.runs],
        "worst_rank": worst.rank,
        "memory_gib": _gib(worst.memory, worst.peak),
        "planned_gib": None if planned is None else _gib(planned.memory, planned.allocated),
        "traffic": {
            "rank": worst.rank,
            "predicted": [asdict(record) for record in report.predicted[worst.rank]],
            "observed": [asdict(record) for record in traffic_entries(worst.records.items())],
            "match": not report.astray,
            "astray": list(report.astray),
        },
        "matched": not report.mismatches,
        "mismatches": [str(mismatch) for mismatch in report.mismatches],
        "order": _order(report.order, report.order_seconds),
        "without_replay": {str(rank): same for rank, same in report.without_replay.items()},
        "time": None if timed is None else _time(timed, planned),
        "passed": report.passed,
        "seconds": round(seconds, 3),
    }


def _rank(report: RehearsalReport, run: RehearsalRun) -> dict[str, Any]:
    coord = report.plan.layout.coord(run.rank)
    return {
        "rank": run.rank,
        "coord": {axis: getattr(coord, axis) for axis in ("dp", "tp", "pp", "cp", "ep")},
        "memory_gib": _gib(run.memory, run.peak),
        "collectives": sum(run.records.values()),
    }


def _order(order: OrderVerdict, seconds: float) -> dict[str, Any]:
    return {
        "ok": order.ok,
        "ranks": order.ranks,
        "calls": order.calls,
        "cycle": [
            {"rank": wait.rank, "call": str(wait.call), "waits_for": list(wait.waits_for)}
            for wait in order.cycle
        ],
        "unconnected": [{"rank": call.rank, "call": str(call.call)} for call in order.unconnected],
        "differs": [str(difference) for difference in order.differing],
        "seconds": round(seconds, 3),
    }


def _gib(parts: Mapping[str, float], total: float) -> dict[str, float]:
    return {**{name: size / _GIB for name, size in parts.items()}, "total": total / _GIB}


def _time(timed: RehearsalTimes, planned: Estimate | None) -> dict[str, Any]:
    return {
        "ranks": [
            {**asdict(measurement), "peak_gib": measurement.peak / _GIB}
            for measurement in timed.measured
        ],
        "forecast_s": None if timed.step is None else timed.step.step,
        "parts_s": None if timed.step is None else timed.step.parts,
        "planned_s": None if planned is None else planned.step,
        "planned_exposed_s": None if planned is None else _planned_exposed(planned),
    }


def _planned_exposed(planned: Estimate) -> dict[str, float]:
    """Seconds of a step that the plan's collectives are exposed, by axis."""
    axes = sorted(set(DIMENSIONS.values()))
    return {axis: planned.parts[axis] for axis in axes if axis in planned.parts}


def rehearsal_lines(plan: Plan, table: Mapping[str, Any]) -> Iterator[str]:
    """The rehearsal as text."""
    ranks, world = table["ranks"], table["world"]
    start = f"{table['model']} on {table['layout']}"
    yield f"{start}: {counted(len(ranks), 'rank')} of {world:,} rehearsed"
    yield f"{plan.batch}"
    yield from (f"note: {note}" for note in plan.notes)
    if plan.shape.moe is not None:
        yield f"tokens have no values here; they are routed: {table['routing']}"
    yield from ("", *_memory(table), "", *_traffic(table), "", *_verdicts(table))
    if table["time"] is not None:
        yield from ("", *_times(table["time"]))
    yield f"in {table['seconds']:.0f} s"


def _memory(table: Mapping[str, Any]) -> Iterator[str]:
    """Memory of the fullest rank by category, beside the plan; then of every rank."""
    rehearsed, planned = table["memory_gib"], table["planned_gib"]
    head = f"GiB of rank {table['worst_rank']}, the fullest"
    yield f"{head:<34}{'rehearsed':>12}" + ("" if planned is None else f"{'planned':>12}")
    for name, size in rehearsed.items():
        line = f"{name:<34}{size:>12.2f}"
        if planned is not None:
            other = planned.get(name, 0.0)
            line += f"{other:>12.2f}{_mark(size, other, rehearsed['total'])}"
        yield line
    if planned is None:
        yield "give --machine to see it beside the plan"
    if len(table["ranks"]) > 1:
        yield from ("", *_ranks(table["ranks"]))


def _mark(size: float, planned: float, total: float) -> str:
    """The difference, if it is large compared with the total."""
    apart = abs(size - planned) / max(total, 1e-9)
    return f"   {size - planned:+.2f}" if apart > _BAND else ""


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"{'rank':>8}  {'coord':<28}{'GiB':>8}{'collectives':>13}"
    for rank_facts in ranks[:_MOST_RANKS]:
        coord = " ".join(f"{axis}={index}" for axis, index in rank_facts["coord"].items() if index)
        size, calls = rank_facts["memory_gib"]["total"], rank_facts["collectives"]
        yield f"{rank_facts['rank']:>8}  {coord or 'first':<28}{size:>8.2f}{calls:>13,}"
    if len(ranks) > _MOST_RANKS:
        yield f"and {len(ranks) - _MOST_RANKS} more, in --json"


def _traffic(table: Mapping[str, Any]) -> Iterator[str]:
    traffic = table["traffic"]
    yield f"{'collectives of rank ' + str(traffic['rank']):<28}{'predicted':>20}{'observed':>20}"
    sums: dict[str, list[int]] = {}
    for index, name in enumerate(("predicted", "observed")):
        for record in traffic[name]:
            sums.setdefault(record["axis"], [0, 0])[index] += record["count"] * record["bytes"]
    for axis, (predicted, observed) in sorted(sums.items()):
        yield f"{axis + ', bytes':<28}{predicted:>20,}{observed:>20,}"


def _verdicts(table: Mapping[str, Any]) -> Iterator[str]:
    traffic, parted, agreements = table["traffic"], table["mismatches"], table["without_replay"]
    yield (
        "every rank calls what was predicted"
        if traffic["match"]
        else f"ranks {', '.join(map(str, traffic['astray']))} call something else than predicted"
    )
    yield (
        "all groups agree: same order, kinds and sizes"
        if table["matched"]
        else f"{counted(len(parted), 'pair')} of ranks would hang:"
    )
    yield from _listed(parted)
    other = [rank for rank, same in agreements.items() if not same]
    if other:
        yield f"without replay, ranks {', '.join(other)} call something else"
    elif agreements:
        agree = "calls" if len(agreements) == 1 else "call"
        yield (
            f"without replay, {counted(len(agreements), 'rank')} {agree} the same, one for each "
            "kind of stages"
        )
    yield from _order_verdict(table["order"], table["world"], table["seconds"])


def _listed(findings: Sequence[str]) -> Iterator[str]:
    yield from (f"  {finding}" for finding in findings[:_MOST_FINDINGS])
    if len(findings) > _MOST_FINDINGS:
        yield f"  and {len(findings) - _MOST_FINDINGS} more, in --json"


def _order_verdict(order: Mapping[str, Any], world: int, seconds: float) -> Iterator[str]:
    """Whether the step ends if every call blocks, or who waits in which call for whom."""
    times = f"{order['seconds']:.1f} s; the rest took {seconds - order['seconds']:.1f} s"
    if order["cycle"]:
        yield f"the step hangs if every call blocks its rank (found in {times}):"
        yield from _listed([_waiting(wait, order["cycle"]) for wait in order["cycle"]])
    if early := order["unconnected"]:
        yield "pairs that are not connected before the step; NCCL blocks both ranks in a message:"
        yield from _listed([f"rank {call['rank']}: {call['call']}" for call in early])
    if order["differs"]:
        yield "ranks at the same pipeline coord that issue different calls:"
        yield from _listed(order["differs"])
    if not order["ranks"]:
        yield "the order was not played: no whole pipeline is among these ranks; leave out --rank"
    elif order["ok"]:
        yield (
            "the step ends even if every call blocks its rank until all members have issued it: "
            f"{order['calls']:,} calls of {order['ranks']:,} of {world:,} ranks, "
            f"proven in {times}"
        )


def _waiting(wait: Mapping[str, Any], cycle: Sequence[Mapping[str, Any]]) -> str:
    """A single rank waits for ranks that have no call left; two or more wait for one another."""
    peers = wait["waits_for"]
    names = f"rank{'' if len(peers) == 1 else 's'} {', '.join(map(str, peers))}"
    left = "" if len(cycle) > 1 else f", which {'has' if len(peers) == 1 else 'have'} no call left"
    return f"rank {wait['rank']} waits in {wait['call']} for {names}{left}"


def _times(time: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'on this GPU':<34}{'peak GiB':>12}{'step':>12}{'update':>12}"
    for rank_facts in time["ranks"]:
        step, update = (f"{rank_facts[name] * 1e3:,.0f} ms" for name in ("step", "update"))
        name = f"rank {rank_facts['rank']}, alone"
        yield f"{name:<34}{rank_facts['peak_gib']:>12.2f}{step:>12}{update:>12}"
        for name, seconds in rank_facts["actions"].items():
            yield f"  {name:<32}{seconds * 1e3:>24,.1f} ms"
        if rank_facts["contended"] is not None:
            yield from _contended(rank_facts, time["planned_exposed_s"])
    if time["forecast_s"] is not None:
        yield (
            f"forecast: {time['forecast_s']:.3f} s a step with these kernels and the modelled "
            f"traffic; planned: {time['planned_s']:.3f} s"
        )


def _contended(measured: Mapping[str, Any], planned: Mapping[str, float]) -> Iterator[str]:
    """A step with kernels in place of collectives."""
    contended = measured["contended"]
    yield (
        f"  with collectives {contended['step'] * 1e3:,.0f} ms: computation is slowed by "
        f"{contended['slowed'] * 1e3:,.0f} ms, and waits for"
    )
    for axis in sorted({*contended["exposed"], *planned}):
        exposed, expected = contended["exposed"].get(axis, 0.0), planned.get(axis)
        beside = "" if expected is None else f" (plan {expected * 1e3:,.0f})"
        yield f"  {axis:<32}{exposed * 1e3:>24,.0f} ms{beside}"


def levels_trace(
    report: RehearsalReport, planned: Mapping[int, Sequence[PlannedAction]] | None = None
) -> dict[str, Any]:
    """The memory of every rank over its actions, as a trace for ui.perfetto.dev.

    Rehearsed actions have the times of the `planned` ones; without those, one unit each.
    """
    events = [_track(_REHEARSED, "rehearsed")]
    for run in report.runs:
        times = None if planned is None else planned[run.rank]
        for index, level in enumerate(run.levels):
            start, end = (index, index + 1)
            if times is not None:  # a merged action has the time of both
                share = len(times) / len(run.levels)
                first, last = int(index * share), int((index + 1) * share) - 1
                start, end = times[first].start * 1e3, times[max(first, last)].end * 1e3
            levels = {"held": level.bytes / _GIB, "peak": level.peak / _GIB}
            events += _slice(_REHEARSED, run.rank, level.action, start, end, levels)
    if planned is not None:
        events.append(_track(_PLANNED, "planned"))
        for rank, actions in planned.items():
            for action in actions:
                times, levels = (
                    (action.start * 1e3, action.end * 1e3),
                    {"held": action.bytes / _GIB},
                )
                events += _slice(_PLANNED, rank, action.action, *times, levels)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _track(number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}


def _slice(
    track: int, rank: int, name: str, start: float, end: float, levels: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    """An action and the memory meanwhile; times are in milliseconds."""
    where = {"pid": track, "tid": rank, "ts": round(start * 1e3, 3)}
    yield {"ph": "X", "name": name, "dur": round((end - start) * 1e3, 3), **where}
    yield {"ph": "C", "name": f"GiB of rank {rank}", **where, "args": dict(levels)}


WORDS = {
    "loss_err": "loss",
    "grad_err": "gradients",
    "norm_err": "gradient norm",
    "clip_err": "clip coefficient",
    "weight_err": "weights",
}


def comparison_text(
    plan: Plan, options: Mapping[str, Any], table: Mapping[str, Any], formula: str
) -> str:
    """The verdict as text; `formula` says how the tolerances come about."""
    lines = [
        f"{table['model']} on {table['layout']}, ZeRO-{table['zero']}, {options['dtype']}: "
        f"{counted(table['world'], 'rank')} against one process, "
        f"{counted(options['steps'], 'step')} of {options['optimizer']}",
        f"{plan.batch}",
        "",
        f"{'':<18}{'largest error':>14}{'tolerance':>12}",
        *(
            f"{word:<18}{table[name]:>14.1e}{table['tolerance'][name]:>12.1e}"
            f"{'' if table[name] <= table['tolerance'][name] else '   too large'}"
            for name, word in WORDS.items()
        ),
        formula,
        "",
        *_traffic_lines(table["traffic"]),
        "",
        *(f"note: {note}" for note in table["notes"]),
    ]
    if "flips" in table:
        lines.append(f"values rounded to another fp8 number (flips): {table['flips']}")
    if table["diverges_at"] is not None:
        lines.append(f"first difference, in forward order: {table['diverges_at']}")
    if table["disorder"] is not None:
        lines.append(f"flat units in different orders: {table['disorder']}")
    verdict = "PASS" if table["passed"] else "FAIL"
    return "\n".join([*lines, f"{verdict} in {table['seconds']:.1f} s"])


def _traffic_lines(traffic: Mapping[str, Any]) -> Iterator[str]:
    """One line for each kind of collective, predicted and observed."""
    calls: dict[tuple[Any, ...], dict[str, int]] = {}
    for source in ("predicted", "observed"):
        for row in traffic[source]:
            entry = TrafficEntry(**row)
            key = (entry.axis, entry.kind, entry.bytes, entry.group)
            calls.setdefault(key, {"predicted": 0, "observed": 0})[source] = entry.count
    if not calls:
        yield "collectives: none predicted, none observed"
        return
    yield f"{'collectives of rank ' + str(traffic['rank']):<34}{'bytes':>10}{'ranks':>7}" + (
        f"{'predicted':>11}{'observed':>10}"
    )
    for (axis, kind, size, group), counts in sorted(calls.items()):
        mark = "" if counts["predicted"] == counts["observed"] else "   differs"
        yield (
            f"{axis:<16}{kind:<18}{size:>10,}{group:>7}"
            f"{counts['predicted']:>11}{counts['observed']:>10}{mark}"
        )


def generated_text(table: Mapping[str, Any]) -> str:
    """The verdict on generation as text."""
    same = "the same" if table["tokens_equal"] else "DIFFERENT"
    most = "none" if table["tolerance"] is None else f"{table['tolerance']:.1e}"
    lines = [
        f"{table['model']} on {table['layout']}, {table['dtype']}: generation against the forward "
        "of the whole text on one device",
        "",
        f"{'':<18}{'largest error of logits':>24}{'tolerance':>12}",
        *(f"{mode:<18}{error:>24.1e}{most:>12}" for mode, error in table["errors"].items()),
        f"log-probabilities: largest error {table['logprob_err']:.1e}; against the training "
        f"forward in {table['trained_layout']} {table['trained_err']:.1e}",
        *_batch_lines(table),
        f"{table['tokens']:,} tokens, {same} every way; {table['reused']:,} from shared blocks, "
        f"{counted(table['preempted'], 'preemption')}",
        *(f"note: {note}" for note in table["notes"]),
        f"{'PASS' if table['passed'] else 'FAIL'} in {table['seconds']:.1f} s",
    ]
    return "\n".join(lines)


def _batch_lines(table: Mapping[str, Any]) -> Iterator[str]:
    bound = table["batch_bound"]
    bound_text = "none" if bound is None else f"{bound:.1e}" if bound else "0, batch-invariant"
    yield f"between batches: largest difference {table['batch_diff']:.1e} (bound: {bound_text})"
    if table["batch_cost"] is not None:
        yield f"batch invariance: {table['batch_cost']:.1f} times the time without it"
    if table["tolerance"] is None:
        yield "no tolerance: bfloat16 may choose other experts than the plain forward"
