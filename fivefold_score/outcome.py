"""Estimate measured runs from their inputs alone, and score the estimates.

First the metrics: errors are shares of the measured value, and rankings are compared within groups.
Then one run at a time: the cases of a row are estimated and put beside what was measured.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np

from fivefold.core import FivefoldError, InternalError
from fivefold.core.model import training_flops
from fivefold.cost.memory import fits, peak_memory
from fivefold.cost.step import require_possible_memory, require_possible_time, step_time
from fivefold_score.published import Case, cases
from fivefold_score.rows import Row
from fivefold_score.spelling import source_of

LEAST_RANKED = 4  # runs of a group; the order of fewer says little
_TOP = 3
_CLOSE = 0.1  # logarithm of a ratio


class PredictedRange(NamedTuple):
    """A predicted value, or the range of values of a run that leaves choices open."""

    low: float
    high: float

    def error(self, measured: float) -> float:
        """0 inside the range; outside, the distance to the nearer end."""
        return max(self.low - measured, measured - self.high, 0.0) / measured


def stats(errors: Sequence[float]) -> dict[str, Any]:
    """`n`, `median`, `mean` and `p90`; None if there are no errors."""
    if not errors:
        return {"n": 0, "median": None, "mean": None, "p90": None}
    values = np.asarray(errors)
    return {
        "n": len(values),
        "median": float(np.median(values)),
        "mean": float(values.mean()),
        "p90": float(np.percentile(values, 90)),
    }


def confusion(verdicts: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """From pairs (predicted to fit, did fit): `accuracy`, and the share of failed runs that were
    predicted to fit (`false_fit`)."""
    failed = [predicted for predicted, happened in verdicts if not happened]
    right = [predicted == happened for predicted, happened in verdicts]
    return {
        "n": len(verdicts),
        "failed": len(failed),
        "accuracy": sum(right) / len(right) if right else None,
        "false_fit": sum(failed) / len(failed) if failed else None,
    }


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Tau-b: pairs in the same order minus pairs in the opposite order, without ties.

    0 if one side is all ties: nothing was ranked.
    """
    x, y = (np.sign(np.subtract.outer(times, times)) for times in (predicted, measured))
    pairs = np.sqrt(float((x != 0).sum()) * float((y != 0).sum()))
    return float((x * y).sum() / pairs) if pairs else 0.0


def regret(predicted: Sequence[float], measured: Sequence[float], tries: int) -> float:
    """By which share the best of the first `tries` predicted runs is slower than the best of all.

    Of equal predictions the first one is taken.
    """
    order = np.argsort(np.asarray(predicted), kind="stable")[:tries]
    times = np.asarray(measured)
    return float(times[order].min() / times.min() - 1)


def pair_errors(group: Sequence[tuple[float, float]]) -> list[float]:
    """By which share the predicted ratio of two runs differs from the measured one, for all pairs
    whose predictions are close: two layouts between which a planner must choose."""
    near = (
        (job, other)
        for job, other in combinations(group, 2)
        if abs(math.log(job[0] / other[0])) <= _CLOSE
    )
    return [
        math.exp(abs(math.log(job[0] / other[0] * other[1] / job[1]))) - 1 for job, other in near
    ]


def ranking(groups: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Mean tau and regret over groups of predicted and measured times, and how well the ratio of
    two of them is predicted."""
    pairs = stats([error for group in groups for error in pair_errors(group)])
    if not groups:
        nothing = {"groups": 0, "n": 0, "tau": None, "top1_regret": None, "best3_regret": None}
        return {**nothing, "pairs": pairs}
    sides = [tuple(zip(*group, strict=True)) for group in groups]
    return {
        "groups": len(groups),
        "n": sum(map(len, groups)),
        "tau": float(np.mean([kendall_tau(*side) for side in sides])),
        "top1_regret": float(np.mean([regret(*side, tries=1) for side in sides])),
        "best3_regret": float(np.mean([regret(*side, tries=_TOP) for side in sides])),
        "pairs": pairs,
    }


def leave_one_size_out(sizes: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """By size: the mean error of its runs with a scale that is fitted on all other sizes.

    The scale is the median of measured over predicted.
    """
    size_errors: dict[str, float] = {}
    for size, pairs in sizes.items():
        other_pairs = [pair for name, group in sizes.items() if name != size for pair in group]
        if other_pairs:
            scale = float(np.median([measured / predicted for predicted, measured in other_pairs]))
            errors = [abs(scale * predicted / measured - 1) for predicted, measured in pairs]
            size_errors[size] = float(np.mean(errors))
    return size_errors


# --- One run at a time

_GIB = 2**30
Source = Literal["step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu"]


@dataclass(frozen=True)
class ScoredRun:
    """A run: predicted values, and measured ones or None."""

    row: Row
    family: str
    source_name: str  # whose runs it is one of
    assumptions: tuple[str, ...]  # what the row leaves out and the estimate assumes
    fitted: bool  # whether its stack has a factor that was fitted to step times
    routed: bool  # whether the model has experts
    num_cases: int  # above 1: the source leaves choices open that time depends on
    seconds: PredictedRange
    measured_seconds: float | None
    source: Source | None  # what the measured seconds were computed from
    gib: PredictedRange
    measured_gib: float | None
    fits: bool | None  # None: only some of the cases fit
    fitting: tuple[str, ...]  # the choices of the cases that fit
    did_fit: bool | None
    tflops: float  # per GPU, by the predicted time of the slowest case

    @property
    def name(self) -> str:
        return str(self.row["id"])

    @property
    def is_open(self) -> bool:
        return self.num_cases > 1

    @property
    def specified(self) -> bool:
        """Whether nothing is left open: as the row says, or else if it has one case."""
        flag = self.row.get("fully_specified")
        return not self.is_open if flag is None else bool(flag)

    @property
    def is_held_out(self) -> bool:
        return held_out(self.name)

    @property
    def time_error(self) -> float:
        assert self.measured_seconds is not None
        return self.seconds.error(self.measured_seconds)

    @property
    def memory_error(self) -> float:
        assert self.measured_gib is not None
        return self.gib.error(self.measured_gib)


class UnscoredRow(NamedTuple):
    """A row that was not scored, and why."""

    id: str
    reason: str
    specified: bool


@dataclass
class ScoreResult:
    """All rows: scored ones, those that cannot be estimated, those whose estimate is impossible,
    and those without a measurement."""

    outcomes: list[ScoredRun] = field(default_factory=list[ScoredRun])
    skipped: list[UnscoredRow] = field(default_factory=list[UnscoredRow])
    impossible: list[UnscoredRow] = field(default_factory=list[UnscoredRow])
    unmeasured: list[UnscoredRow] = field(default_factory=list[UnscoredRow])


def held_out(name: str) -> bool:
    """Whether a run is in the half on which no factor may be fitted; its hash decides."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2 == 1


def score(
    rows: Sequence[Row], on_row: Callable[[], None] = lambda: None, *, leave_out: bool = False
) -> ScoreResult:
    """Estimate every row; `on_row` is called after each.

    `leave_out`: with no number of machine or stack that was fitted to the row's own source.
    """
    result = ScoreResult()
    for row in rows:
        flag = row.get("fully_specified")
        passed = UnscoredRow(str(row["id"]), "", True if flag is None else bool(flag))
        achieved = row["achieved"]
        known = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "peak_mem_gib")
        if not (achieved.get("status") in _DID_FIT or any(achieved.get(key) for key in known)):
            reason = "nothing to compare: no step time, tokens/s, TFLOP/s, peak or outcome"
            result.unmeasured.append(passed._replace(reason=reason))
        else:
            try:
                result.outcomes.append(score_row(row, source_of(row) if leave_out else ""))
            except FivefoldError as error:
                result.skipped.append(passed._replace(reason=str(error)))
            except InternalError as error:
                result.impossible.append(passed._replace(reason=str(error)))
        on_row()
    return result


_DID_FIT = {"Success": True, "OOM": False}


def score_row(row: Row, without: str = "") -> ScoredRun:
    """Estimate one row, with no number that was fitted to the source `without`; raises if that is
    not possible."""
    row_cases = cases(row, without)
    first_case = row_cases[0]
    world = int(first_case.grid.world[0])
    if row["gpus"] != world:
        raise FivefoldError(
            f"gpus = {row['gpus']}, but dp, tp, pp and cp make {world} ranks: correct the row"
        )
    times = [_seconds(candidate) for candidate in row_cases]
    memory = [_memory(candidate) for candidate in row_cases]
    seconds, gib = _range(times), _range([reserved for reserved, _ in memory])
    verdicts = {fits for _, fits in memory}
    fitting = [case.choices for case, (_, fits) in zip(row_cases, memory, strict=True) if fits]
    flops = (
        training_flops(first_case.shape, first_case.seq).total
        * first_case.seq
        * row["global_batch"]
    )
    measured, source = measured_seconds(row, flops)
    return ScoredRun(
        row=row,
        family=first_case.family,
        source_name=first_case.source,
        assumptions=first_case.assumptions,
        fitted=first_case.stack.factor != 1.0,
        routed=first_case.shape.moe is not None,
        num_cases=len(row_cases),
        seconds=seconds,
        measured_seconds=measured,
        source=source,
        gib=gib,
        measured_gib=row["achieved"].get("peak_mem_gib"),
        fits=verdicts.pop() if len(verdicts) == 1 else None,
        fitting=tuple(fitting),
        did_fit=_DID_FIT.get(row["achieved"].get("status") or ""),
        tflops=flops / (seconds.high * row["gpus"] * 1e12),
    )


def measured_seconds(row: Row, flops: float) -> tuple[float | None, Source | None]:
    """Seconds of a step, and what they were computed from; `flops`: model FLOPs of a step."""
    achieved = row["achieved"]
    if achieved.get("status") == "OOM":
        return None, None
    if achieved.get("step_time_s"):
        return float(achieved["step_time_s"]), "step_time_s"
    if speed := achieved.get("tokens_per_s_per_gpu"):
        tokens = row["global_batch"] * row["seq_len"]
        return tokens / (speed * row["gpus"]), "tokens_per_s_per_gpu"
    if speed := achieved.get("tflops_per_gpu"):
        return flops / (speed * 1e12 * row["gpus"]), "tflops_per_gpu"
    return None, None


def _seconds(case: Case) -> float:
    """Seconds of a step; raises if its schedule cannot run the numbers of the row."""
    times = step_time(*case.arguments)
    step = float(times.step.item())
    if math.isinf(step):
        case.require_runnable_schedule()
    parts = {name: float(np.asarray(seconds).item()) for name, seconds in times.parts.items()}
    require_possible_time(_job_name(case), step, parts)
    return step


def _job_name(case: Case) -> str:
    return f"{case.shape.name} on {case.machine.name}"


def _memory(case: Case) -> tuple[float, bool]:
    """GiB that the first rank's allocator reserves, and whether every rank fits."""
    peak = peak_memory(*case.arguments)
    memory = {name: float(np.asarray(amount).item()) for name, amount in peak.parts.items()}
    require_possible_memory(_job_name(case), memory)
    return float(peak.reserved.item()) / _GIB, bool(fits(peak, case.machine).item())


def _range(values: Sequence[float]) -> PredictedRange:
    return PredictedRange(min(values), max(values))
