"""Search five speeds on half of the jobs measured on an H200, and check them on the other half.

    python -m benchmarks.h200_fit

Only the fitted half is looked at while searching: one speed after the other moves by a step as long
as the mean error there falls. A worst error above 12% counts a tenth beside it. The result is
`h200_jobs.SEARCHED`; docs/h200-jobs.md shows what it gives on the other half.
"""

from __future__ import annotations

from benchmarks.h200_jobs import Speeds, errors_with

BEGIN = Speeds(0.73, 0.56, 50.0, 1000.0, 0.90)
STEPS = Speeds(0.01, 0.02, 15.0, 300.0, 0.03)
ROUNDS, TOLERATED = 6, 0.12


def _score(speeds: Speeds) -> float:
    found = errors_with(speeds, fitted=True)
    return found.mean + 0.1 * max(0.0, found.worst - TOLERATED)


def search() -> Speeds:
    """Walk from `BEGIN` to where no step lowers the error of the fitted half."""
    speeds, best = BEGIN, _score(BEGIN)
    for _ in range(ROUNDS):
        before = speeds
        for place, step in enumerate(STEPS):
            for moved in (step, -step):
                values = list(speeds)
                values[place] = round(values[place] + moved, 6)
                one = Speeds(*values)
                if min(one) > 0 and one.grouped_share <= 1 and (score := _score(one)) < best - 1e-5:
                    speeds, best = one, score
                    break
        if speeds == before:
            break
    return speeds


if __name__ == "__main__":
    found = search()
    print(found)
    for fitted in (True, False):
        print(
            "fitted" if fitted else "other", "half: mean | worst", errors_with(found, fitted=fitted)
        )
