"""The table that a full run prints: a line for each case as it ends, then how many passed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from typing import Generic, TypeVar

from fivefold.launch.processes import PATIENCE, Pool
from fivefold.verify.trial import VerifyVerdict

Case = TypeVar("Case")

PUBLISHED = 1e-10  # what float64 must reach, whatever tolerance is derived
_ERRORS = {
    "loss": "loss_err",
    "gradients": "grad_err",
    "norm": "norm_err",
    "weights": "weight_err",
}


@dataclass(frozen=True)
class Table(Generic[Case]):
    """What a table says about itself, and how a case is run and named in it."""

    head: str  # {date} is the day of the run
    columns: tuple[str, ...]  # of `cells`; those of the verdict follow
    noun: str
    most_ranks: int
    prove: Callable[[Pool, Case], VerifyVerdict]
    cells: Callable[[Case], Iterable[object]]
    foot: str = ""
    most_error: Callable[[Case], float] = lambda case: PUBLISHED
    patience: float = PATIENCE

    def run(self, cases: Iterable[Case]) -> int:
        """Prove every case on one pool and print the table; the exit code."""
        began = time.perf_counter()
        print(self.head.format(date=date.today()))
        columns = [*self.columns, *_ERRORS, "traffic", "seconds", ""]
        print(_line(columns))
        print("|" + "---|" * len(columns))
        passed: list[bool] = []
        with Pool(self.most_ranks + 1, self.patience) as pool:
            for case in cases:
                start = time.perf_counter()
                verdict = self.prove(pool, case)
                seconds = time.perf_counter() - start
                good = max(verdict.errors.values()) <= self.most_error(case)
                passed.append(verdict.passed and good)
                said = _cells_of(verdict, seconds, passed[-1])
                print(_line([*self.cells(case), *said]), flush=True)
        print(f"\n{sum(passed)} of {len(passed)} {self.noun} pass")
        if self.foot:
            print(f"\n{self.foot}")
        print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
        return 0 if all(passed) else 1


def _cells_of(verdict: VerifyVerdict, seconds: float, passed: bool) -> list[str]:
    errors = [f"{verdict.errors[name]:.0e}" for name in _ERRORS.values()]
    match = "equal" if verdict.traffic_match else "differs"
    result = "pass" if passed else f"FAIL at {verdict.diverges_at}"
    return [*errors, match, f"{seconds:.1f}", result]


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
