"""Explore's panel of failures: a month of the job with them, and other numbers of GPUs.

{"headline", "missing": None or why there is nothing, "goodput", "band", "lost": {cause: share},
 "words": {cause: sentence}, "designs": [{"name", "shares"}], "scales": [GPUs], "gpus",
 "lines": the answer of `simulate`}
"""

from __future__ import annotations

from itertools import groupby

from fivefold.core.plan import FailureRates
from fivefold.planner import Estimate, scale_points, simulate_failures, usual_failures
from fivefold.render import LOST_WORDS, forecast_lines, percent, rough_duration, wrapped
from fivefold_page import View

_DAYS, _RUNS = 30.0, 40
_LEAST, _MOST = 1024, 131_072


def failures_view(estimate: Estimate) -> View:
    """A month with failures, if the machine has a rate of them."""
    machine = estimate.setting.machine
    job = usual_failures(estimate, None)
    if job is None or machine.gpu_mtbf_hours is None:
        why = (
            f"No rate of failures is known for {machine.name}: fivefold simulate takes one with "
            "--mtbf-gpu."
        )
        return {"headline": why, "missing": why, "lost": {}, "designs": [], "lines": [why]}
    run = simulate_failures(job, _DAYS, _RUNS, seed=0)
    scales = [_LEAST << power for power in range(8) if _LEAST << power <= _MOST]
    points = scale_points(estimate, FailureRates(machine.gpu_mtbf_hours), scales)
    by_name = groupby(
        sorted(points, key=lambda point: point.design), key=lambda point: point.design
    )
    shares = {name: [point.goodput for point in ones] for name, ones in by_name}
    low, high = run.goodput_band
    return {
        "headline": f"{percent(run.goodput)} of the time in steps that count, {percent(low)} to "
        f"{percent(high)} in 90% of the months; one failure in {rough_duration(1 / job.rate)}, "
        f"{rough_duration(job.recovery)} to recover",
        "missing": None,
        "goodput": run.goodput,
        "band": [low, high],
        "lost": {
            name: seconds / (_DAYS * 86_400) for name, seconds in run.lost.items() if seconds > 0
        },
        "words": LOST_WORDS,
        "designs": [
            {"name": name, "shares": shares[name]}
            for name in dict.fromkeys(point.design for point in points)
        ],
        "scales": scales,
        "gpus": job.domain.gpus,
        "lines": forecast_lines(estimate.plan, run),
    }


def failures_text(view: View) -> list[str]:
    """The same for a terminal."""
    lines = list(view["lines"])
    for design in view["designs"]:
        shares = (
            f"{gpus // 1024}k {percent(share)}"
            for gpus, share in zip(view["scales"], design["shares"], strict=True)
        )
        lines += wrapped(f"{design['name']}: {', '.join(shares)}", "at scale  ")
    return lines
